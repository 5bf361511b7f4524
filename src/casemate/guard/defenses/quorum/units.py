"""Units of independence: the hits behind which one source, one text or one author stands."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeAlias

from casemate.text.edited_copies import copy_groups
from casemate.types import Document, Hit

UnitName: TypeAlias = tuple[str, Hashable]
"""``source`` and its name, or a metadata key and a value."""
MISSING = ("missing",)
"""Key of the documents without the metadata that the units need: together they are one unit."""


def group_units(hits: Sequence[Hit], keys: Sequence[str] = ()) -> list[tuple[Hit, ...]]:
    """Groups hits into units, best hit first: equal sources, edited copies, and equal values of a metadata key.

    The grouping is transitive. All hits that lack a value for a key are one unit: a document must not gain support by
    leaving out its author.

    Args:
        hits: By decreasing score.
        keys: Metadata keys, such as ``author``. A list as value names several.
    """
    copies = copy_groups([hit.document.text for hit in hits])
    parent = list(range(len(hits)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    first: dict[Hashable, int] = {}
    for i, hit in enumerate(hits):
        for name in (("copy", copies[i]), *_names(hit.document, keys)):
            low, high = sorted((root(first.setdefault(name, i)), root(i)))
            parent[high] = low
    units: dict[int, list[Hit]] = {}
    for i, hit in enumerate(hits):
        units.setdefault(root(i), []).append(hit)
    return [tuple(unit) for unit in units.values()]


def whole(unit: Sequence[Hit]) -> Document:
    """Joins the retrieved chunks of a unit, whatever their ranks are, each text once."""
    ordered = sorted(unit, key=lambda hit: hit.document.id)
    text = "\n\n".join(dict.fromkeys(hit.document.text for hit in ordered))
    return Document("unit", text, ordered[0].document.title)


def unit_names(unit: Sequence[Hit], keys: Sequence[str] = ()) -> frozenset[UnitName]:
    """Names of a unit that are the same for every question: its sources, and its values of metadata keys.

    Args:
        unit: Its hits.
        keys: Metadata keys, as for ``group_units``.
    """
    return frozenset(name for hit in unit for name in _names(hit.document, keys))


def _names(document: Document, keys: Sequence[str]) -> Iterator[UnitName]:
    yield "source", document.source
    for key in keys:
        value = document.metadata.get(key)
        values = value if isinstance(value, list | tuple) else [value]
        named = [" ".join(str(v).split()).casefold() for v in values if v is not None]
        named = [name for name in named if name]
        yield from ((key, name) for name in named)
        if not named:
            yield key, MISSING
