"""A change of an attached collection, logged in the sidecar database before it is applied (write-ahead log)."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from casemate.backends import index_checks
from casemate.errors import DataError
from casemate.types import Document, Vector


@dataclass(frozen=True, slots=True)
class PendingChange:
    """Rows to remove and documents to add, of one tenant.

    Attributes:
        gone: Ids in the inventory of the replaced or removed sources.
        found: Those of them that the collection had.
        vectors: Their vectors at unit length, (len(found), dim), to subtract from the moments.
        new: Vectors of the documents, (len(documents), dim), as given.
    """

    tenant: str
    gone: Sequence[str]
    found: Sequence[str]
    vectors: Vector
    documents: Sequence[Document]
    new: Vector

    @property
    def removed(self) -> list[str]:
        """Ids to delete from the collection; the others are overwritten."""
        kept = {d.id for d in self.documents}
        return [identity for identity in self.found if identity not in kept]

    def to_bytes(self) -> bytes:
        """Serializes the change."""
        return json.dumps(
            {
                "tenant": self.tenant,
                "gone": list(self.gone),
                "found": list(self.found),
                "vectors": _encode(self.vectors),
                "documents": [index_checks.document_columns(d) for d in self.documents],
                "new": _encode(self.new),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, body: bytes, dim: int) -> PendingChange:
        """The inverse of ``to_bytes``; ``DataError``: the bytes are damaged."""
        try:
            fields = json.loads(bytes(body))
            documents = [index_checks.decode_document(row) for row in fields["documents"]]
            vectors, new = _decode(fields["vectors"], dim), _decode(fields["new"], dim)
            return cls(fields["tenant"], fields["gone"], fields["found"], vectors, documents, new)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"a pending change is damaged ({error}): run 'casemate attach'") from error


def _encode(vectors: Vector) -> str:
    return base64.b64encode(np.ascontiguousarray(vectors, np.float32).tobytes()).decode()


def _decode(text: str, dim: int) -> Vector:
    return np.frombuffer(base64.b64decode(text), np.float32).reshape(-1, dim)
