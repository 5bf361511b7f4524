"""Any model of the sentence-transformers library, from a folder or the Hugging Face hub, on torch."""

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
from casemate.reindexing.lora import merged
from casemate.reindexing.tuned import Adapter
from casemate.types import Vector
from casemate.words import whole_words

NAME = "sentence_transformers"
NO_LIMIT = 1_000_000
"""Stands for the limit of a model that reads texts of any length."""


@dataclass(eq=False)
class SentenceTransformers(Embedder):
    """A model of your choice. A local folder is never looked up on the network.

    Attributes:
        model: Folder, or the hub's name of the model, which is downloaded unless it is in the hub's cache.
        device: As torch names it: "cpu", "cuda", "cuda:1", "mps".
        batch: Texts that are run at once.
        trust_remote_code: Runs code that comes with the model. Only for models that you have read.
    """

    model: str
    device: str = "cpu"
    batch: int = 32
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"need batch > 0, got {self.batch}")
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
        """Name, sha256 of the weights and pooling as loaded, tokens that are read, and dimensions."""
        name = Path(self.model).expanduser().resolve().name
        return f"{NAME}:{name}:{self._digest[:16]}:{self._length}:{self._dim}"

    @property
    def dim(self) -> int:
        """Length of the vectors of this model."""
        return self._dim

    @property
    def max_tokens(self) -> int:
        """Length of the model's input without special tokens such as [CLS] and [SEP]."""
        return self._length - int(self._tokenizer.num_special_tokens_to_add(False))

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds texts in order: (n, dim), float32, unit rows. Sorted by length inside, so that little is padded.

        Raises:
            BackendError: If the model puts out a vector that is zero or not finite.
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
        """The words that are one token each; see ``attacks.worm.Worded``."""
        return whole_words(self._tokenizer.get_vocab())

    def network(self) -> Any:
        """A copy of the model, for training; see ``reindexing.tuned.Tunable``."""
        with self._lock:
            return copy.deepcopy(self._model)

    def tuned(self, adapter: Adapter) -> SentenceTransformers:
        """The same model with an adapter that peft made; see ``reindexing.tuned.Tunable``."""
        found = copy.copy(self)
        found._model, found._lock = merged(self.network(), adapter), threading.Lock()
        found._digest = _weights_digest(found._model)
        return found

    @property
    def _length(self) -> int:
        limit = self._model.max_seq_length
        return int(limit) if limit and limit < NO_LIMIT else NO_LIMIT

    def _encode(self, texts: list[str]) -> Vector:
        """One batch. The lock is for the library's tokenizer, which two threads cannot use at once."""
        with self._lock:
            rows = self._model.encode(texts, batch_size=len(texts), show_progress_bar=False)
        vectors = np.asarray(rows, np.float32)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not (np.isfinite(lengths).all() and lengths.all()):
            message = f"the model {self.model!r} put out a vector that is zero or not finite; its weights are unfit"
            raise BackendError(message, backend=NAME, retryable=False)
        unit: Vector = vectors / lengths
        return unit


def _is_local(model: str) -> bool:
    """Whether it is a folder; a name that can only be one must exist."""
    if model and Path(model).expanduser().is_dir():
        return True
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        return False
    raise DataError(f"no model folder at {model!r}; give a folder that has modules.json, or a name on the hub")


def _not_loaded(model: str, local: bool, error: Exception) -> DataError:
    remedy = (
        "give a folder saved by sentence-transformers"
        if local
        else "correct the name or the path; without network, give a local folder"
    )
    return DataError(f"the model {model!r} cannot be loaded ({type(error).__name__}); {remedy}")


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"the device {device!r} cannot be used here; 'cpu' always can") from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Progress bars of the Hugging Face libraries are off inside, and afterwards as they were."""
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
    """A copy of the fast tokenizer that cuts and pads nothing, and that no other thread reconfigures."""
    from tokenizers import Tokenizer

    found = getattr(model, "tokenizer", None)
    found = getattr(found, "backend_tokenizer", found)
    if not isinstance(found, Tokenizer):
        raise ConfigError(f"the model {name!r} has no fast tokenizer (tokenizer.json); use a model that has one")
    copy = Tokenizer.from_str(found.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _weights_digest(model: Any) -> str:
    """SHA-256 over the loaded parameters and the pooling: the same wherever the model came from.

    It costs about 0.1 s per 100 MB, once. Names are left out, since they change with the library's version; so is
    the pooler, which pooling over tokens does not use and which is random where a checkpoint lacks it.
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
