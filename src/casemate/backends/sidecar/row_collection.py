"""Base of collections whose store returns rows as mappings: pages, exact scores and errors, once for all stores.

A subclass is one store. It implements five calls: connect, count, pages, nearest and stored. One that can be written
overrides add and remove, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from casemate.backends.sidecar.row_inventory import quote_ids
from casemate.errors import CapabilityError, DataError
from casemate.maths.vectors import cosines
from casemate.protocols import CollectionPage, VectorCollection
from casemate.types import Document, Hit, Vector

SCAN_PAGE = 1000  # rows per page of a scan
SPARE = 16  # rows to fetch above k at first, for scoring in float64 and for rows without text


class StoredRow(NamedTuple):
    """A row as its store returns it: without a vector, ``vector`` is None; values of other fields may be mappings."""

    id: str
    vector: Any
    fields: Mapping[str, Any]


class RowCollection(VectorCollection):
    """Rows of one store. Read-only, unless a subclass overrides ``add`` and ``remove``: other programs write them.

    Attributes:
        name: Name in messages; contains no password.
        text: Field of the text. ``a.b`` is the field ``b`` in the mapping ``a``.
        source: Field with the name of the row's source document. Empty: none.
        title: Field of the title. Empty: none.
        own_fields: Fields that are not metadata, such as the vector's.
    """

    name: str = ""
    text: str
    source: str
    title: str
    own_fields: frozenset[str] = frozenset()
    _dim = 0

    @abstractmethod
    def connect(self) -> int:
        """Connects, sets ``by_cosine``, and returns the length of a vector; 0: the first row decides."""

    @abstractmethod
    def pages(self, after: str) -> Iterator[tuple[Sequence[StoredRow], str]]:
        """Pages of rows with the cursor behind each, in a stable order, starting behind a cursor if one is given."""

    @abstractmethod
    def nearest(self, vector: Vector, k: int) -> Iterable[StoredRow]:
        """The k nearest rows, as the store ranks them."""

    @abstractmethod
    def stored(self, ids: Sequence[str]) -> Iterable[StoredRow]:
        """The rows with these ids (at least one) that exist."""

    def errors(self) -> AbstractContextManager[Any]:
        """Translates errors of the store's client inside the block. Default: none."""
        return nullcontext()

    def open(self) -> int:
        """See ``VectorCollection.open``. Closes connections if it fails."""
        try:
            with self.errors():
                self._dim = self.connect() or self._first_length()
            if not self._dim:
                raise DataError(f"{self.name} has no row with a vector; fill it first")
        except BaseException:
            self.close()
            raise
        return self._dim

    def _first_length(self) -> int:
        rows = (row for page, _ in self.pages("") for row in page)
        return next((len(row.vector) for row in rows if row.vector is not None), 0)

    def scan(self, after: str = "") -> Iterator[CollectionPage]:
        pages = self.pages(after)
        while True:
            with self.errors():
                found = next(pages, None)
            if found is None:
                return
            yield self._page(*found)

    def search(self, vector: Vector, k: int) -> Sequence[Hit]:
        page = self._nearest_page(vector, k)
        s = cosines(page.vectors, vector)
        return [Hit(page.documents[i], float(s[i])) for i in np.argsort(-s, kind="stable")[:k].tolist()]

    def _nearest_page(self, vector: Vector, k: int) -> CollectionPage:
        """At least k nearest rows with text and vector; fewer only if the store has no more."""
        wanted = min(k + SPARE, self.max_results)
        while k <= self.max_results:
            with self.errors():
                rows = list(self.nearest(vector, wanted))
            page = self._page(rows, "")
            if len(page.documents) >= k or len(rows) < wanted:
                return page
            if wanted == self.max_results:
                break
            wanted = min(2 * wanted, self.max_results)
        raise CapabilityError(
            f"{self.name}: a search for k = {k:,} rows needs more than the {self.max_results:,} rows that the store "
            "returns at once; lower k, and remove rows without text from the collection"
        )

    def find(self, ids: Sequence[str]) -> CollectionPage:
        rows: list[StoredRow] = []
        for start in range(0, len(ids), SCAN_PAGE):
            with self.errors():
                rows += self.stored(ids[start : start + SCAN_PAGE])
        return self._page(rows, "")

    def add(self, documents: Sequence[Document], vectors: Vector) -> None:
        """See ``VectorCollection.add``. Refused."""
        raise self._read_only()

    def remove(self, ids: Sequence[str]) -> None:
        """See ``VectorCollection.remove``. Refused."""
        raise self._read_only()

    def close(self) -> None:
        """See ``VectorCollection.close``. Closes the attribute ``_server``, if there is one."""
        if server := getattr(self, "_server", None):
            server.close()

    def _own(self, d: Document, only: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Fields to write: those of ``only``, and a document's text, source and title. None may contain another."""
        own = {**(only or {}), self.text: d.text, self.source: d.source, self.title: d.title}
        if nested := [name for name in own if "." in name]:
            raise CapabilityError(
                f"{self.name}: fields inside other fields can be read, not written: {quote_ids(nested)}; "
                "write them with the program that owns the collection"
            )
        return {name: value for name, value in own.items() if name}

    def _read_only(self) -> CapabilityError:
        return CapabilityError(
            f"{self.name} is read-only here; add and remove rows with the program that owns it, then run "
            "'casemate attach'"
        )

    def _page(self, rows: Sequence[StoredRow], after: str) -> CollectionPage:
        """A page without the rows that lack text or vector."""
        texts = [field_of(row.fields, self.text) for row in rows]
        whole = [row for row, text in zip(rows, texts, strict=True) if text is not None and row.vector is not None]
        if other := [row.id for row in whole if len(row.vector) != self._dim]:
            raise DataError(f"{self.name}: the vectors of {quote_ids(other)} do not have {self._dim} dimensions")
        textless = sum(text is None for text in texts)
        vectors = np.array([row.vector for row in whole], np.float32).reshape(-1, self._dim)
        documents = [self._document(row) for row in whole]
        return CollectionPage(documents, vectors, after, (), textless, len(rows) - len(whole) - textless)

    def _document(self, row: StoredRow) -> Document:
        own = {self.text, self.source, self.title, *self.own_fields}
        metadata = {name: value for name, value in row.fields.items() if name not in own}
        title, source = (str(field_of(row.fields, name) or "") for name in (self.title, self.source))
        return Document(row.id, str(field_of(row.fields, self.text)), title, source, "", metadata)


def require_writable(collection: Any, plug_in: str) -> None:
    """Raises ``CapabilityError`` unless the option ``writable`` of the collection is on."""
    if not collection.writable:
        option = f"{plug_in}.writable: true"
        raise CapabilityError(f"{collection.name} is read-only; set {option} to add and remove documents")


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field; None if it is missing or has no name.

    >>> field_of({"metadata": {"source": "a.pdf"}, "x.y": 3}, "metadata.source"), field_of({"x.y": 3}, "x.y")
    ('a.pdf', 3)
    """
    if name in fields:
        return fields[name]
    first, dot, rest = name.partition(".")
    inner = fields.get(first) if dot else None
    return field_of(inner, rest) if isinstance(inner, Mapping) else None
