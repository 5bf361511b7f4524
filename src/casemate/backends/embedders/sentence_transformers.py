"""Models of the sentence-transformers library, from a folder or the Hugging Face hub, on torch."""

from __future__ import annotations

import copy
import hashlib
import importlib
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from casemate.errors import BackendError, ConfigError, DataError, needs
from casemate.protocols import Embedder, Progress
from casemate.reindexing.lora import merge_adapter
from casemate.reindexing.space import Adapter
from casemate.text.tokens import whole_words
from casemate.types import Vector

NAME = "sentence_transformers"
NO_LIMIT = 1_000_000
"""Token limit of a model that reads texts of any length."""


@dataclass(eq=False)
class SentenceTransformers(Embedder):
    """A sentence-transformers model. A local folder is never looked up on the network.

    Attributes:
        model: Folder, or name on the hub, from which it is downloaded unless cached.
        device: torch device: "cpu", "cuda", "cuda:1", "mps".
        batch: Texts per forward pass.
        trust_remote_code: Runs code that comes with the model. Use it for reviewed models only.
    """

    model: str
    device: str = "cpu"
    batch: int = 32
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"sentence_transformers.batch is {self.batch}; it must be above 0")
        local = _is_local(self.model)
        with needs("casemate[sentence-transformers]"):
            import sentence_transformers
        _check_device(self.device)
        with _no_bars():
            try:
                self._model: Any = sentence_transformers.SentenceTransformer(
                    str(Path(self.model).expanduser()) if local else self.model,
                    device=self.device,
                    trust_remote_code=self.trust_remote_code,
                    local_files_only=local,
                )
            except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
                raise _not_loaded(self.model, local, error) from error
        self._model.eval()
        self._lock = threading.Lock()
        self._tokenizer: Any = _own_tokenizer(self._model, self.model)
        self._digest = _weights_digest(self._model)
        self._dim = int(self._encode(["probe"]).shape[1])

    @property
    def fingerprint(self) -> str:
        """Name, sha256 of weights and pooling, token limit, and dimensions."""
        name = Path(self.model).expanduser().resolve().name
        return f"{NAME}:{name}:{self._digest[:16]}:{self._length}:{self._dim}"

    @property
    def dim(self) -> int:
        """Dimensions of the vectors."""
        return self._dim

    @property
    def max_tokens(self) -> int:
        """Token limit without special tokens such as [CLS] and [SEP]."""
        return self._length - int(self._tokenizer.num_special_tokens_to_add(False))

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds texts in order: (n, dim), float32, unit rows. Sorts by length internally to reduce padding.

        Raises:
            BackendError: If the model returns a vector that is zero or not finite.
        """
        out = np.empty((len(texts), self._dim), np.float32)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            out[part] = self._encode([texts[i] for i in part])
            if progress:
                progress(len(part))
        return out

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Start and end character of each token."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def vocabulary(self) -> Sequence[str]:
        """Words of exactly one token; see ``attacks.worm.Worded``."""
        return whole_words(self._tokenizer.get_vocab())

    def network(self) -> Any:
        """A copy of the model, for training; see ``TunableEmbedder``."""
        with self._lock:
            return copy.deepcopy(self._model)

    def with_adapter(self, adapter: Adapter) -> SentenceTransformers:
        """The model with a peft adapter merged in; see ``TunableEmbedder``."""
        adapted = copy.copy(self)
        adapted._model, adapted._lock = merge_adapter(self.network(), adapter), threading.Lock()
        adapted._digest = _weights_digest(adapted._model)
        return adapted

    @property
    def _length(self) -> int:
        limit = self._model.max_seq_length
        return int(limit) if limit and limit < NO_LIMIT else NO_LIMIT

    def _encode(self, texts: list[str]) -> Vector:
        """Embeds one batch. The lock protects the library's tokenizer, which is not thread-safe."""
        with self._lock:
            rows = self._model.encode(texts, batch_size=len(texts), show_progress_bar=False)
        vectors = np.asarray(rows, np.float32)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not (np.isfinite(lengths).all() and lengths.all()):
            message = f"the model {self.model!r} returned a vector that is zero or not finite; use other weights"
            raise BackendError(message, backend=NAME, retryable=False)
        unit: Vector = vectors / lengths
        return unit


def _is_local(model: str) -> bool:
    """Whether the model is a folder.

    Raises:
        DataError: If it can only be a folder and does not exist.
    """
    if model and Path(model).expanduser().is_dir():
        return True
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        return False
    raise DataError(f"no model folder at {model!r}; set a folder with modules.json, or a name on the hub")


def _not_loaded(model: str, local: bool, error: Exception) -> DataError:
    remedy = (
        "set a folder saved by sentence-transformers"
        if local
        else "correct the name or path; without network, set a local folder"
    )
    return DataError(f"the model {model!r} cannot be loaded ({type(error).__name__}); {remedy}")


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"the device {device!r} is not available; 'cpu' always is") from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Disables the progress bars of the Hugging Face libraries during the block."""
    hub: Any = importlib.import_module("huggingface_hub.utils")
    logging: Any = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled() and not hub.are_progress_bars_disabled()
    logging.disable_progress_bar()  # both libraries' bars
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _own_tokenizer(model: Any, name: str) -> Any:
    """A private copy of the fast tokenizer, without truncation and padding."""
    from tokenizers import Tokenizer

    original = getattr(model, "tokenizer", None)
    original = getattr(original, "backend_tokenizer", original)
    if not isinstance(original, Tokenizer):
        raise ConfigError(f"the model {name!r} has no fast tokenizer (tokenizer.json); use a model that has one")
    copy = Tokenizer.from_str(original.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _weights_digest(model: Any) -> str:
    """SHA-256 of the loaded parameters and the pooling, independent of where the model was loaded from.

    Takes about 0.1 s per 100 MB. Excludes parameter names, which change with the library's version, and the pooler,
    which token pooling does not use and which is random if a checkpoint lacks it.
    """
    import torch

    digests = []
    for name, parameter in model.named_parameters():
        if "pooler." in name:
            continue
        tensor = parameter.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
        digests.append(digest.hexdigest())
    for module in model.children():
        pooling = getattr(module, "get_pooling_mode_str", None) or getattr(module, "pooling_mode", "")
        digests.append(str(pooling() if callable(pooling) else pooling))
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
