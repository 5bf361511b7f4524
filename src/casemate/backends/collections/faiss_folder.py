"""A FAISS index that LangChain saved in a folder, used in place."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from casemate.backends.sidecar.row_collection import SCAN_PAGE, RowCollection, StoredRow
from casemate.errors import ConfigError, DataError, needs
from casemate.types import Vector

CONTENT = "page_content"
"""LangChain's field for the text."""


class _Plain:
    """Stands for a class of LangChain: holds what was saved of an object, and does nothing."""

    def __setstate__(self, state: Any) -> None:
        self.held = state.get("__dict__", state)


class _PlainUnpickler(pickle.Unpickler):
    """Reads documents and their store; refuses every other class, so that a file cannot run code."""

    known = frozenset(
        {
            ("langchain_core.documents.base", "Document"),
            ("langchain_community.docstore.in_memory", "InMemoryDocstore"),
            ("langchain_classic.docstore.in_memory", "InMemoryDocstore"),
            ("langchain.docstore.in_memory", "InMemoryDocstore"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """See ``pickle.Unpickler``."""
        if (module, name) in self.known:
            return _Plain
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


@dataclass(eq=False)
class FaissFolder(RowCollection):
    """Documents of LangChain's FAISS store, saved by ``save_local``. Read again when the files change.

    FAISS ranks by its own metric; the documents are scored again exactly. The file of documents is a pickle: only
    texts, numbers, lists and mappings are read from it, and no code of it runs.

    Attributes:
        folder: The folder.
        index: The file names without ``.faiss`` and ``.pkl``.
        text: ``page_content`` for LangChain's text, or a metadata field.
        source: Metadata field with the name of the document's source. Empty: none.
        title: Metadata field of the title. Empty: none.
    """

    folder: Path
    index: str = "index"
    text: str = CONTENT
    source: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        if not (self.index and self.text) or "/" in self.index:
            raise ConfigError("faiss_folder: index and text must not be empty; index is a file name without ending")
        with needs("casemate[faiss]"):
            import faiss  # noqa: F401
        self.name = f"faiss {self.folder}, index {self.index}"
        self.by_cosine = False
        self._lock = threading.Lock()
        self._stamp: Any = None
        self._vectors: Any = None
        self._fields: dict[str, dict[str, Any]] = {}
        self._ids: list[str] = []
        self._places: dict[str, int] = {}

    def connect(self) -> int:
        """See ``RowCollection``."""
        return int(self._loaded().d)

    def count(self) -> int:
        """See ``VectorCollection.count``."""
        self._loaded()
        return len(self._ids)

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """See ``RowCollection``. The cursor is a number of documents."""
        index = self._loaded()
        ids = self._ids
        for start in range(int(after or 0), len(ids), SCAN_PAGE):
            end = min(start + SCAN_PAGE, len(ids))
            yield [self._row(index, place) for place in range(start, end)], str(end)

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        """See ``RowCollection``."""
        index = self._loaded()
        _, places = index.search(vector.reshape(1, -1), min(k, len(self._ids)))
        return [self._row(index, place) for place in places[0].tolist() if place >= 0]

    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        """See ``RowCollection``."""
        index = self._loaded()
        return [self._row(index, self._places[name]) for name in ids if name in self._places]

    def _row(self, index: Any, place: int) -> StoredRow:
        name = self._ids[place]
        return StoredRow(name, index.reconstruct(place), self._fields[name])

    def _loaded(self) -> Any:
        """FAISS's index, as the files are now."""
        files = [self.folder / f"{self.index}{ending}" for ending in (".faiss", ".pkl")]
        try:
            stamp = [(f.stat().st_mtime_ns, f.stat().st_size) for f in files]
            with self._lock:
                if stamp != self._stamp:
                    self._read(*files)
                    self._stamp = stamp
                return self._vectors
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {type(error).__name__}; check folder and index") from None

    def _read(self, vectors: Path, documents: Path) -> None:
        import faiss

        try:
            with documents.open("rb") as file:
                store, placed = _PlainUnpickler(file).load()
            held = {name: document.held for name, document in store.held["_dict"].items()}
            fields = {name: {**(one.get("metadata") or {}), CONTENT: one[CONTENT]} for name, one in held.items()}
            ids = [placed[place] for place in range(len(placed))]
            index = faiss.read_index(str(vectors))
        except (
            pickle.UnpicklingError,
            RuntimeError,
            EOFError,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise DataError(f"{self.name}: not what LangChain's save_local writes ({str(error)[:200]})") from None
        if index.ntotal != len(ids) or not fields.keys() >= set(ids):
            raise DataError(f"{self.name}: the two files do not belong together; save the store again")
        self._vectors, self._fields, self._ids = index, fields, ids
        self._places = {name: place for place, name in enumerate(ids)}
