"""Finds the document of a store by its text, for retrievers whose documents have no ids or ids of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from casemate.guard.turn import text_digest
from casemate.integrations.adapters import FrameworkCollection
from casemate.integrations.guarded_query import FrameworkDocument


class TextLookup:
    """Ids of a store's documents by their text. Reads the store at the first use, then follows changes."""

    def __init__(self, store: FrameworkCollection) -> None:
        self._store = store
        self._ids: dict[bytes, str] | None = None
        self._lock = threading.Lock()

    def identify(self, rows: Sequence[FrameworkDocument]) -> list[FrameworkDocument]:
        """The rows that have the text of a document in the store, with the id of that document, in their order."""
        with self._lock:
            found = self._identified(rows)
            if found is None:  # a document was removed or replaced
                self._ids = None
                found = self._identified(rows) or []
            return found

    def update(self, ids: Sequence[str]) -> None:
        """Follows a change of these documents."""
        with self._lock:
            if self._ids is not None:
                self._ids.update((text_digest(d.text), d.id) for d in self._store.find(ids).documents)

    def clear(self) -> None:
        """The store changed in an unknown way: the next use reads it again."""
        with self._lock:
            self._ids = None

    def _identified(self, rows: Sequence[FrameworkDocument]) -> list[FrameworkDocument] | None:
        """None: a document that was listed is no longer in the store with this text."""
        if self._ids is None:
            self._ids = {text_digest(row.text): row.id for row, _ in self._store.rows()}
        named = [(self._ids.get(text_digest(row.text)), row) for row in rows]
        texts = {d.id: d.text for d in self._store.find([name for name, _ in named if name is not None]).documents}
        found = [(name, row) for name, row in named if name is not None]
        if any(texts.get(name) != row.text for name, row in found):
            return None
        return [row._replace(id=name) for name, row in found]
