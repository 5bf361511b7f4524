"""Models of the sentence-transformers library, from a folder or the Hugging Face hub, on torch."""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from casemate.errors import BackendError, DataError, needs, require_range
from casemate.protocols import Embedder, Progress
from casemate.reindexing.lora import merge_adapter
from casemate.reindexing.space import Adapter
from casemate.runtime.hugging_face import fast_tokenizer, local_folder, not_loaded, require_device, silent
from casemate.text.tokens import whole_words
from casemate.types import Vector

NAME = "sentence_transformers"
NO_LIMIT = 1_000_000  # token limit of a model that reads texts of any length


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
        require_range("sentence_transformers", self, "batch", at_least=1)
        folder = local_folder(self.model)
        if not folder and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", self.model):
            raise DataError(f"no model folder at {self.model!r}; set a folder with modules.json, or a name on the hub")
        with needs("casemate[sentence-transformers]"):
            import sentence_transformers
        require_device(self.device)
        with silent():
            try:
                self._model: Any = sentence_transformers.SentenceTransformer(
                    folder or self.model,
                    device=self.device,
                    trust_remote_code=self.trust_remote_code,
                    local_files_only=bool(folder),
                )
            except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
                raise not_loaded(
                    self.model, error, "set a folder saved by sentence-transformers" if folder else ""
                ) from error
        self._model.eval()
        self._lock = threading.Lock()
        self._tokenizer: Any = fast_tokenizer(copy.deepcopy(getattr(self._model, "tokenizer", None)), self.model)
        self._digest = _weights_digest(self._model)
        self._dim = int(self._encode(["probe"]).shape[1])

    @property
    def fingerprint(self) -> str:
        """Name, sha256 of weights and pooling, token limit, and dimensions."""
        name = Path(self.model).expanduser().resolve().name
        return f"{NAME}:{name}:{self._digest[:16]}:{self._length}:{self._dim}"

    @property
    def dim(self) -> int:
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
