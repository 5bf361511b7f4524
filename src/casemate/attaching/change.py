"""One guarded change of a collection, as it is written down before it is carried out."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from casemate import indexing
from casemate.errors import DataError
from casemate.types import Document, Vector


@dataclass(frozen=True, slots=True)
class Change:
    """What goes and what comes, of one tenant.

    Attributes:
        tenant: Whose.
        gone: Ids that our tables know of the sources that are replaced or removed.
        found: Those of them that the collection still had.
        vectors: Of these, at length 1, (len(found), dim): what is taken out of the moments.
        documents: What comes.
        new: Their vectors, (len(documents), dim), as they were given.
    """

    tenant: str
    gone: Sequence[str]
    found: Sequence[str]
    vectors: Vector
    documents: Sequence[Document]
    new: Vector

    @property
    def removed(self) -> list[str]:
        """Ids that the collection is to lose; the others are overwritten."""
        stay = {d.id for d in self.documents}
        return [identity for identity in self.found if identity not in stay]

    def written(self) -> bytes:
        """As bytes, for the outbox."""
        return json.dumps(
            {
                "tenant": self.tenant,
                "gone": list(self.gone),
                "found": list(self.found),
                "vectors": _text(self.vectors),
                "documents": [indexing.columns(d) for d in self.documents],
                "new": _text(self.new),
            }
        ).encode()

    @classmethod
    def read(cls, body: bytes, dim: int) -> Change:
        """From the outbox.

        Raises:
            DataError: If it is damaged.
        """
        try:
            held = json.loads(bytes(body))
            documents = [indexing.document_of(row) for row in held["documents"]]
            vectors, new = _array(held["vectors"], dim), _array(held["new"], dim)
            return cls(held["tenant"], held["gone"], held["found"], vectors, documents, new)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"a change that was under way is damaged ({error}): run 'casemate attach'") from error


def _text(vectors: Vector) -> str:
    return base64.b64encode(np.ascontiguousarray(vectors, np.float32).tobytes()).decode()


def _array(text: str, dim: int) -> Vector:
    return np.frombuffer(base64.b64decode(text), np.float32).reshape(-1, dim)
