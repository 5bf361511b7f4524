"""Charges documents that are handed to the client itself: all words of their texts are disclosed."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace

from casemate.guard.client_state.crawl_evidence import CrawlEvidence, text_name
from casemate.text.disclosure import pieces_with_words
from casemate.types import Document, Query


class Delivery:
    """The documents that a client is given for one query.

    Args:
        evidence: What was disclosed before.
        query: The query.
        free: Words that may be newly disclosed: to the client (``budget``), and to its tenant (``tenant_budget``).

    Attributes:
        disclosed: Words of each chunk that the client is given, one bit each, by ``text_name``.
        shortened: Whether a text was shortened or left out because a budget ends.
    """

    def __init__(self, evidence: CrawlEvidence, query: Query, free: Mapping[str, int]) -> None:
        self._evidence, self._query, self._free = evidence, query, dict(free)
        self.disclosed, self.shortened = dict[str, int](), False

    def add(self, document: Document, parts: Sequence[str]) -> Document | None:
        """Charges the title and some parts of a document, and ends it where a budget ends.

        Args:
            document: The document.
            parts: Parts of its text, in their order.

        Returns:
            The document with as much of the parts as the budgets allow; None: nothing.
        """
        if not parts:
            return None
        pieces, ends, words = _read(document, parts)
        name = text_name(document)
        known = self._known(name)
        most = bisect(ends, False, key=lambda end: not self._fits(words & ((1 << end) - 1), known))
        self.shortened |= most < len(ends)
        if most < min(2, len(ends)):  # at most the title
            return None
        given = words & ((1 << ends[most - 1]) - 1)
        for budget, before in known.items():
            self._free[budget] -= (given & ~before).bit_count()
        self.disclosed[name] = self.disclosed.get(name, 0) | given
        return replace(document, text="".join(pieces[:most]))

    def _known(self, chunk: str) -> dict[str, int]:
        """For each budget, the words of a chunk that it is not charged for again, one bit each."""
        given = self.disclosed.get(chunk, 0)
        known = {"budget": given | self._evidence.disclosed(self._query, chunk)}
        if "tenant_budget" in self._free:
            known["tenant_budget"] = given | self._evidence.disclosed_to_tenant(self._query.tenant, chunk)
        return known

    def _fits(self, words: int, known: Mapping[str, int]) -> bool:
        return all((words & ~before).bit_count() <= self._free[budget] for budget, before in known.items())


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
