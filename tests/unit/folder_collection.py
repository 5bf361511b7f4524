"""An external collection for tests: one atomically written file per row, so that it survives SIGKILL."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from casemate.errors import BackendError
from casemate.maths.vectors import cosines
from casemate.protocols import CollectionPage, VectorCollection
from casemate.types import Document, Hit, Vector

PAGE = 50


class FolderCollection(VectorCollection):
    """Rows by id in a folder. ``before`` is called with the name of each step, so that a test can make it fail."""

    def __init__(self, folder: Path, dim: int = 16, before: Callable[[str], None] = lambda step: None) -> None:
        self.folder, self.dim, self.before = folder, dim, before
        self.broken = False
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        return "the folder"

    def open(self) -> int:
        return self.dim

    def count(self) -> int:
        return len(self._ids())

    def scan(self, after: str = "") -> Iterator[CollectionPage]:
        ids = [i for i in self._ids() if i > after]
        for start in range(0, len(ids), PAGE):
            self.before(f"page {start // PAGE}")
            if page := self.find(ids[start : start + PAGE]).documents:
                yield CollectionPage(page, self.find([d.id for d in page]).vectors, ids[start : start + PAGE][-1])

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        if self.broken:
            raise BackendError("the folder is down", backend="folder", retryable=True)
        page = self.find(self._ids())
        s = cosines(page.vectors, vector)
        return [Hit(page.documents[i], float(s[i])) for i in np.argsort(-s, kind="stable")[:k]]

    def find(self, ids: Sequence[str]) -> CollectionPage:
        self.before("find")
        rows = [json.loads((self.folder / i).read_text()) for i in ids if (self.folder / i).exists()]
        vectors = np.array([r["vector"] for r in rows], np.float32).reshape(-1, self.dim)
        return CollectionPage([Document(r["id"], r["text"], metadata=r["about"]) for r in rows], vectors)

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        self.before("add")
        for d, v in zip(documents, vectors, strict=True):
            self.put(d, v)
            self.before("added one")

    def remove(self, ids: Sequence[str]) -> None:
        self.before("remove")
        for i in ids:
            (self.folder / i).unlink(missing_ok=True)
            self.before("removed one")

    def close(self) -> None:
        pass

    def put(self, d: Document, v: Vector) -> None:
        """Writes a row like another program."""
        part = self.folder / f".{d.id}.part"
        part.write_text(
            json.dumps({"id": d.id, "text": d.text, "about": dict(d.metadata), "vector": [float(x) for x in v]})
        )
        os.replace(part, self.folder / d.id)

    def _ids(self) -> list[str]:
        return sorted(i for i in os.listdir(self.folder) if not i.startswith("."))
