"""What every model of the Hugging Face libraries needs: a device, a tokenizer, and silent loading."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from casemate.errors import ConfigError, DataError


def local_folder(model: str) -> str | None:
    """The folder of a model. None: it is a name on the hub."""
    folder = Path(model).expanduser()
    return str(folder) if model and folder.is_dir() else None


def not_loaded(model: str, error: Exception, remedy: str = "") -> DataError:
    """The error for a model that cannot be loaded; without a remedy, that of a name on the hub."""
    remedy = remedy or "correct the name or path; without network, set a local folder"
    return DataError(f"the model {model!r} cannot be loaded ({type(error).__name__}); {remedy}")


def require_device(name: str) -> Any:
    """The device of torch with this name; ``ConfigError``: this machine does not have it."""
    import torch

    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"the device {name!r} is not available; 'cpu' always is") from error


@contextmanager
def silent(warnings: bool = True) -> Iterator[None]:
    """Disables the libraries' progress bars during the block; with ``warnings=False``, their warnings as well."""
    hub: Any = importlib.import_module("huggingface_hub.utils")
    settings: Any = importlib.import_module("transformers.utils.logging")
    shown = settings.is_progress_bar_enabled() and not hub.are_progress_bars_disabled()
    level = settings.get_verbosity()
    settings.disable_progress_bar()  # both libraries' bars
    if not warnings:
        settings.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        settings.set_verbosity(level)
        if shown:
            settings.enable_progress_bar()


def fast_tokenizer(owner: Any, model: str) -> Any:
    """The thread-safe fast tokenizer of an object, without truncation and padding; ``ConfigError``: there is none."""
    from tokenizers import Tokenizer

    tokenizer = getattr(owner, "backend_tokenizer", owner)
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError(f"the model {model!r} has no fast tokenizer (tokenizer.json); use a model that has one")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
