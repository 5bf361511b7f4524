"""Charges documents that are handed to the client itself: all words of all of their fields are disclosed."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from casemate.guard.client_state.crawl_evidence import CrawlEvidence, text_name, value_name
from casemate.text.disclosure import pieces_with_words
from casemate.types import Document, Query

_OPAQUE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32,}", re.IGNORECASE)
"""A value without words: a UUID or a digest."""


class Delivery:
    """The documents that a client is given for one query.

    Args:
        evidence: What was disclosed before.
        query: The query.
        free: Words that may be newly disclosed: to the client (``budget``), and to its tenant (``tenant_budget``).

    Attributes:
        disclosed: Words that the client is given, one bit each: of each chunk by ``text_name``, and of each of the
            chunks' values by ``value_name``.
        shortened: Whether a text was shortened or left out because a budget ends.
    """

    def __init__(self, evidence: CrawlEvidence, query: Query, free: Mapping[str, int]) -> None:
        self._evidence, self._query, self._free = evidence, query, dict(free)
        self._free_before = dict(free)
        self.disclosed, self.shortened = dict[str, int](), False

    @property
    def charged(self) -> dict[str, int]:
        """Words charged to each budget."""
        return {budget: self._free_before[budget] - left for budget, left in self._free.items()}

    def add(self, document: Document, parts: Sequence[str]) -> Document | None:
        """Charges the title, the values and some parts of a document, and ends it where a budget ends.

        Args:
            document: The document.
            parts: Parts of its text, in their order.

        Returns:
            The document with as much of the parts as the budgets allow; None: nothing, as values are never shortened.
        """
        if not parts:
            return None
        pieces, ends, words = _read(document, parts)
        name, values = text_name(document), dict(_values(document))
        known, left = self._known(name), dict(self._free)
        for value, bits in values.items():
            for budget, before in self._known(value).items():
                left[budget] -= (bits & ~before).bit_count()
        most = bisect(ends, False, key=lambda end: not self._fits(words & ((1 << end) - 1), known, left))
        self.shortened |= most < len(ends)
        if most < min(2, len(ends)):  # at most the title
            return None
        given = words & ((1 << ends[most - 1]) - 1)
        self._free = {budget: left[budget] - (given & ~before).bit_count() for budget, before in known.items()}
        self.disclosed |= values | {name: self.disclosed.get(name, 0) | given}
        return replace(document, text="".join(pieces[:most]))

    def _known(self, chunk: str) -> dict[str, int]:
        """For each budget, the words of a chunk that it is not charged for again, one bit each."""
        given = self.disclosed.get(chunk, 0)
        known = {"budget": given | self._evidence.disclosed(self._query, chunk)}
        if "tenant_budget" in self._free:
            known["tenant_budget"] = given | self._evidence.disclosed_to_tenant(self._query.tenant, chunk)
        return known

    @staticmethod
    def _fits(words: int, known: Mapping[str, int], free: Mapping[str, int]) -> bool:
        return all((words & ~before).bit_count() <= free[budget] for budget, before in known.items())


def _values(document: Document) -> Iterator[tuple[str, int]]:
    """Yields the ``value_name`` and the words, one bit each, of what a document has beside title and text.

    These are its source, its id, and the keys and values of its metadata. A field name is a value of all chunks.
    """
    for text in _texts([document.source, document.id.removeprefix(document.source), document.metadata]):
        if (count := _count(text)) and not _OPAQUE.fullmatch(text):
            yield value_name(text), (1 << count) - 1


def _texts(value: Any) -> Iterator[str]:
    """Yields the keys and values in a nested value as texts."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping | list | tuple | set | frozenset):
            if id(one) in seen:
                continue
            seen.add(id(one))
            waiting += [*one, *one.values()] if isinstance(one, Mapping) else one
        elif one is not None:
            yield str(one)


def _read(document: Document, parts: Sequence[str]) -> tuple[list[str], list[int], int]:
    """Divides parts of a document's text at the ends of words.

    Returns:
        The pieces, the first an empty one for the title. The number of words of the document up to the end of each. The
        words of all, one bit each.
    """
    end = _count(document.title)
    pieces, ends, words, at = [""], [end], (1 << end) - 1, 0
    for part in parts:
        start = document.text.index(part, at)
        end += _count(document.text[at:start])
        at, space, begin = start + len(part), " " if len(pieces) > 1 else "", end
        for piece, count in pieces_with_words(part):
            end += count
            pieces.append(space + piece)
            ends.append(end)
            space = ""
        words |= (1 << end) - (1 << begin)
    return pieces, ends, words


def _count(text: str) -> int:
    return sum(count for _, count in pieces_with_words(text))
