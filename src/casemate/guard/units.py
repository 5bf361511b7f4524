"""Units of independence: groups of documents with one source, one text or one declared interest.

A unit is a source with all its chunks and edited copies, and all sources with a common value of a metadata key. The
comparison of values ignores case, invisible characters, look-alike letters, and accents of Latin, Greek and Cyrillic
letters. A value without a visible character is none. Hiding withholds whole units, the two-world audit removes whole
units, and ``quorum`` counts units. A unit that is counted also contains translations and versions of a source, if their
names show it (``text.source_names``).

Units are formed at query time, from the hits (ADR 0015). Copy and original are about equally similar to every question,
so they rank near each other. ``unit_sources`` forms a unit from the whole collection, for the audit.

Near-duplicates as one group: Manku, Jain and Das Sarma 2007, "Detecting Near-Duplicates for Web Crawling", WWW.
Deviation: the share of common words (``text.edited_copies``), not a fingerprint: dropped words and another order of the
sentences must not separate a copy from its original.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias

from casemate.protocols import Index
from casemate.text.disguises import fold_name
from casemate.text.edited_copies import copy_groups, is_edited_copy, root, text_words
from casemate.text.source_names import document_name
from casemate.types import DEFAULT_TENANT, Document, Hit

UnitName: TypeAlias = tuple[str, Hashable]
"""``source`` and its name, or a metadata key and a value."""
MISSING = ("missing",)
"""Key of the documents without the metadata that the units need: for a count, they are together one unit."""
MAX_COPIES = 20
"""A text with copies in more sources is common in the collection: hiding it would hide nothing."""


def group_units(hits: Sequence[Hit], keys: Sequence[str] = ()) -> list[tuple[Hit, ...]]:
    """Groups hits into units, to count them; best hit first.

    The grouping is transitive. Sources are equal if their names differ in codes of languages and versions only. All
    hits without a value for a key are one unit: a document must not gain support by leaving out its author, or by
    copies with another figure. The number of copies is not limited. A short hit whose words are all in another hit is
    in no unit, because it would count as one more. It does not unite the two sources.

    Args:
        hits: By decreasing score.
        keys: Metadata keys, such as ``author``. A list as value names several.
    """
    copies, contained = copy_groups([hit.document.text for hit in hits])
    parent = list(range(len(hits)))
    first: dict[UnitName, int] = {}
    for i, hit in enumerate(hits):
        for name in (("copy", copies[i]), *_counted_names(hit.document, keys)):
            low, high = sorted((root(parent, first.setdefault(name, i)), root(parent, i)))
            parent[high] = low
    units: dict[int, list[Hit]] = {}
    for i, hit in enumerate(hits):
        if i in contained:
            continue
        units.setdefault(root(parent, i), []).append(hit)
    return [tuple(unit) for unit in units.values()]


class SourceRelations:
    """The sources of some documents that belong to one unit, to hide them together.

    The relation is transitive. Copies have most of their numbers in common: two forms with other figures are two
    records. A text with copies in more than ``MAX_COPIES`` sources relates none. A document without a value for a key
    is related to none by this key. Each text is compared once, for repeated questions about the same documents.

    Args:
        documents: Chunks, such as those of the hits.
        keys: Metadata keys, such as ``subject``.
        copies: Whether edited copies are related.
    """

    def __init__(self, documents: Iterable[Document], keys: Sequence[str] = (), *, copies: bool = True) -> None:
        self._documents = list(documents)
        self._texts = [text_words(document.text) for document in self._documents] if copies else []
        self._copies: dict[int, list[int]] = {}
        self._chunks, self._sharing = defaultdict[str, list[int]](list), defaultdict[UnitName, list[int]](list)
        self._names = [frozenset(_names(document, keys)) for document in self._documents]
        for i, document in enumerate(self._documents):
            self._chunks[document.source].append(i)
            for name in self._names[i]:
                self._sharing[name].append(i)

    def related_to(
        self, sources: Iterable[str], end: int | None = None, left_out: Collection[str] = ()
    ) -> frozenset[str]:
        """The other sources in the units of some sources.

        Args:
            sources: Names of sources.
            end: Number of documents that count, the first ones; None: all.
            left_out: Sources that do not count.
        """
        most, given = len(self._documents) if end is None else end, frozenset(sources)
        return _reachable(lambda source: self._direct(source, most, left_out), given) - given

    def _direct(self, source: str, end: int, left_out: Collection[str]) -> set[str]:
        related = set[str]()
        for i in self._chunks.get(source, ()) if source not in left_out else ():
            if i < end:
                copied = self._sources(self._copies_of(i), end, left_out)
                related |= copied if len(copied) <= MAX_COPIES + 1 else set()  # the source itself, and its copies
                related.update(*(self._sources(self._sharing[name], end, left_out) for name in self._names[i]))
        return related

    def _sources(self, places: Iterable[int], end: int, left_out: Collection[str]) -> set[str]:
        return {source for i in places if i < end and (source := self._documents[i].source) not in left_out}

    def _copies_of(self, i: int) -> list[int]:
        if i not in self._copies and self._texts:
            text = self._texts[i]
            self._copies[i] = [j for j, t in enumerate(self._texts) if is_edited_copy(text, t, same_record=True)]
        return self._copies.get(i, [])


def unit_sources(
    index: Index, sources: Collection[str], tenant: str = DEFAULT_TENANT, keys: Sequence[str] = ()
) -> dict[str, frozenset[str]]:
    """All sources in the unit of each source, from the whole collection; related as in ``SourceRelations``.

    Unlike in ``group_units``, names of translations and versions relate no sources (ADR 0015).

    Reads the index twice for each step of the relation, in bounded memory.
    """

    def documents() -> Iterator[Document]:
        return (document for page, _ in index.scan(tenant) for document in page)

    related = _relations(documents, frozenset(sources), keys)
    return {source: _reachable(related.__getitem__, [source]) for source in sources}


def unit_names(unit: Sequence[Hit], keys: Sequence[str] = ()) -> frozenset[UnitName]:
    """Names of a unit that are the same for every question: its sources, and its values of metadata keys.

    Codes of languages and versions are left out of the sources' names.
    """
    return frozenset(name for hit in unit for name in _counted_names(hit.document, keys))


def whole(unit: Sequence[Hit]) -> Document:
    """Joins the retrieved chunks of a unit, whatever their ranks are, each text once."""
    ordered = sorted(unit, key=lambda hit: hit.document.id)
    text = "\n\n".join(dict.fromkeys(hit.document.text for hit in ordered))
    return Document("unit", text, ordered[0].document.title)


def _relations(
    documents: Callable[[], Iterable[Document]], sources: frozenset[str], keys: Sequence[str]
) -> dict[str, frozenset[str]]:
    """The directly related sources of these sources, of those found, and so on."""
    related: dict[str, frozenset[str]] = {}
    while new := frozenset(sources.union(*related.values()) - related.keys()):
        own = [document for document in documents() if document.source in new]
        related |= dict.fromkeys(new, frozenset[str]())
        if own:
            related |= _directly_related(documents(), own, keys)
    return related


def _directly_related(
    documents: Iterable[Document], own: Sequence[Document], keys: Sequence[str]
) -> dict[str, frozenset[str]]:
    """For each source of ``own``: the sources with a copy of one of its chunks, or with a name in common."""
    texts = [text_words(document.text) for document in own]
    copied, sharing = [set[str]() for _ in texts], defaultdict[UnitName, set[str]](set)
    for document in documents:
        words = text_words(document.text)
        for text, found in zip(texts, copied, strict=True):
            if is_edited_copy(text, words, same_record=True):
                found.add(document.source)
        for name in _names(document, keys):
            sharing[name].add(document.source)
    related = defaultdict[str, set[str]](set)
    for i, document in enumerate(own):
        related[document.source].update(*(sharing[name] for name in _names(document, keys)))
        if len(copied[i]) <= MAX_COPIES + 1:  # the source itself, and its copies
            related[document.source] |= copied[i]
    return {source: frozenset(found) for source, found in related.items()}


def _reachable(related: Callable[[str], Collection[str]], sources: Iterable[str]) -> frozenset[str]:
    found, new = frozenset[str](), frozenset(sources)
    while new:
        found |= new
        new = frozenset[str]().union(*map(related, new)) - found
    return found


def _counted_names(document: Document, keys: Sequence[str]) -> Iterator[UnitName]:
    yield "source", document_name(document.source)
    for key in keys:
        values: list[Hashable] = [*_values(document, key)]
        yield from ((key, value) for value in values or [MISSING])


def _names(document: Document, keys: Sequence[str]) -> Iterator[UnitName]:
    return ((key, value) for key in keys for value in _values(document, key))


def _values(document: Document, key: str) -> list[str]:
    value = document.metadata.get(key)
    values = value if isinstance(value, list | tuple) else [value]
    named = (" ".join(fold_name(str(v)).split()) for v in values if v is not None)
    return [name for name in named if name]
