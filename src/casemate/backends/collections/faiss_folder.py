"""A FAISS index that LangChain saved in a folder, used in place."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from casemate.backends.sidecar.row_collection import SCAN_PAGE, RowCollection, StoredRow
from casemate.errors import ConfigError, DataError, needs
from casemate.types import Vector

CONTENT = "page_content"  # LangChain's field for the text
SAVING_S = 10.0
"""Seconds after the last write in which the files may be those of a ``save_local`` that has not ended."""


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
        if (module, name) in self.known:
            return _Plain
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


class _Saved(NamedTuple):
    """What the two files held at one time. Never changed, so a call that uses only this reads one state."""

    index: Any
    fields: Mapping[str, Mapping[str, Any]]
    ids: Sequence[str]
    places: Mapping[str, int]

    def row(self, place: int) -> StoredRow:
        name = self.ids[place]
        return StoredRow(name, self.index.reconstruct(place), self.fields[name])


@dataclass(eq=False)
class FaissFolder(RowCollection):
    """Documents of LangChain's FAISS store, saved by ``save_local``. Read again when the files change.

    ``save_local`` writes one file after the other. While only one is new, or they cannot be read, the state before is
    used, for ``SAVING_S`` at most: the new vectors with the old documents would be wrong rows.

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
        self._stamp: Sequence[tuple[int, int]] = ()
        self._saved = _Saved(None, {}, (), {})

    def connect(self) -> int:
        return int(self._loaded().index.d)

    def count(self) -> int:
        return len(self._loaded().ids)

    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """See ``RowCollection``. The cursor is a number of documents."""
        saved = self._loaded()
        for start in range(int(after or 0), len(saved.ids), SCAN_PAGE):
            end = min(start + SCAN_PAGE, len(saved.ids))
            yield [saved.row(place) for place in range(start, end)], str(end)

    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        saved = self._loaded()
        if not saved.ids:
            return ()
        _, places = saved.index.search(vector.reshape(1, -1), min(k, len(saved.ids)))
        return [saved.row(place) for place in places[0].tolist() if place >= 0]

    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        saved = self._loaded()
        return [saved.row(saved.places[name]) for name in ids if name in saved.places]

    def _loaded(self) -> _Saved:
        try:
            with self._lock:
                self._refresh()
                return self._saved
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {type(error).__name__}; check folder and index") from None

    def _refresh(self) -> None:
        """Reads the files again if both have changed, or one has and the writer must have ended."""
        stamp = self._stamp_of_files()
        if stamp == self._stamp:
            return
        saving = bool(self._stamp) and time.time() - max(written for written, _ in stamp) / 1e9 < SAVING_S
        if saving and any(new == old for new, old in zip(stamp, self._stamp, strict=True)):
            return
        try:
            saved = self._read(*self._files)
        except DataError:
            if saving:
                return
            raise
        if not saving or stamp == self._stamp_of_files():  # else they were written meanwhile
            self._saved, self._stamp = saved, stamp

    @property
    def _files(self) -> tuple[Path, Path]:
        return self.folder / f"{self.index}.faiss", self.folder / f"{self.index}.pkl"

    def _stamp_of_files(self) -> Sequence[tuple[int, int]]:
        """Time of the last write, in ns, and size of each file."""
        return [(found.st_mtime_ns, found.st_size) for found in (file.stat() for file in self._files)]

    def _read(self, vectors: Path, documents: Path) -> _Saved:
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
        return _Saved(index, fields, ids, {name: place for place, name in enumerate(ids)})
