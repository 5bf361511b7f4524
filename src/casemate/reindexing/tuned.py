"""A fine-tuned encoder beside the embedder, as arrays and bytes: what ``lora`` trains and ``shelf`` keeps.

z = norm((1 - t) E + t T) with E by the embedder, T by the same model with an adapter, and a strength t in [0, 1]; t = 0
is E itself. Needs numpy alone; the model is the embedder's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from casemate.errors import CapabilityError
from casemate.protocols import Embedder
from casemate.types import Vector

Adapter: TypeAlias = Mapping[str, bytes]
"""The files of a folder that the package peft reads, by name: ``FILES``."""
FILES = ("adapter_config.json", "adapter_model.safetensors")


@runtime_checkable
class Tunable(Embedder, Protocol):
    """An embedder whose model can be fine-tuned."""

    def network(self) -> Any:
        """A copy of the model, for training: a ``SentenceTransformer``."""
        ...

    def tuned(self, adapter: Adapter) -> Embedder:
        """The same model with an adapter.

        Raises:
            DataError: If the adapter is damaged, or of another model.
        """
        ...


def tunable(embedder: Embedder) -> Tunable:
    """The embedder, or that behind it (``inner``), whose model can be fine-tuned.

    Raises:
        CapabilityError: If there is none.
    """
    found: Embedder | None = embedder
    while found is not None:
        if isinstance(found, Tunable):
            return found
        found = getattr(found, "inner", None)
    raise CapabilityError(
        f"reindex: modes lora and lora_compatible fine-tune the embedder, and {embedder.fingerprint.split(':')[0]!r} "
        "only gives vectors; set rag.embedder to sentence_transformers with a folder or name of the model (and index "
        "anew), or use mode adapter, compatible or gate"
    )


def blended(E: Vector, T: Vector, strength: float) -> Vector:
    """Unit vectors between two encoders': norm((1 - strength) E + strength T), (n, dim), float32."""
    z = np.float32(1 - strength) * E + np.float32(strength) * T
    found: Vector = (z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    return found


def digest(adapter: Adapter) -> str:
    """SHA-256 over names and contents: whoever changes a file changes this."""
    whole = hashlib.sha256()
    for name in sorted(adapter):
        whole.update(f"{name} {len(adapter[name])}\n".encode() + adapter[name])
    return whole.hexdigest()
