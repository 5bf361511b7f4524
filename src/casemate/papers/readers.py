"""The model that answers in an experiment: the simulated reader, or a given language model."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

from casemate.backends.generators.transformers import CausalLM
from casemate.config import PluginSpec
from casemate.errors import DataError
from casemate.plugins import build
from casemate.protocols import Generator
from casemate.redteam.campaigns.pipeline import SIMULATED_READER
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.files import file_checksum

LONGEST, BATCH = 128, 16
"""Tokens of an answer of a language model; answers that it writes at once."""


def open_reader(model: str, ledger: CampaignStore) -> Generator:
    """A reader, whose answers are stored: a GGUF file, or the folder of a model; empty: the simulated reader.

    Raises:
        DataError: If the model cannot be read.
        MissingExtra: If ``casemate[transformers]`` is not installed.
    """
    if model:
        label = f"{reader_name(model)}, {LONGEST} tokens"
        return CachedGenerator(load(model, LONGEST, BATCH), ledger, label)
    simulated = build("generator", PluginSpec(use="simulated_reader"))
    return CachedGenerator(simulated, ledger, f"simulated_reader {version('casemate')}")


def load(model: str, longest: int, batch: int = 1) -> CausalLM:
    """A language model with greedy decoding, on an accelerator if there is one; ``longest``: tokens of an answer."""
    return CausalLM(model, dtype="bfloat16", max_tokens=longest, batch=batch)


def reader_name(model: str) -> str:
    """Name for reports, with a digest of the model's files.

    Raises:
        DataError: If the model does not exist.
    """
    return f"{Path(model).name} (SHA-256 {_digest(model)[:12]})" if model else "simulated_reader (simulated)"


def reader_note(model: str) -> str:
    """A sentence about the reader, for a list of differences from a paper."""
    return f"The reader is a language model, {reader_name(model)}." if model else SIMULATED_READER


@cache
def _digest(model: str) -> str:
    """SHA-256 of a file, or of the digests of all files directly in a folder."""
    path = Path(model).expanduser()
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        digests = [file_checksum(file) for file in files if not file.is_dir()]
    except OSError as error:
        raise DataError(f"no model at {model} ({type(error).__name__}); give a GGUF file or a model's folder") from None
    return digests[0] if files == [path] else hashlib.sha256("".join(digests).encode()).hexdigest()
