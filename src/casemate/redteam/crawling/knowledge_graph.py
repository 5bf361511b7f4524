"""Knowledge graph of a crawler: entities, relations between them, and relations that seem to be missing.

For attacks that plan queries from collected answers. Without a language model, entities are noun phrases, and the words
between two successive entities of a clause give their relation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.protocols import Embedder
from casemate.redteam.crawling.anchors import TextVectors, clause_noun_phrases
from casemate.text.sentences import clauses, proper_nouns
from casemate.text.tokens import content_words
from casemate.types import Float64


class Triple(NamedTuple):
    """Two entities and their relation; without a tail, an entity alone."""

    head: str
    relation: str = ""
    tail: str = ""


RELATIONS: dict[str, re.Pattern[str]] = {
    name: re.compile(rf"\b(?:{stems})", re.IGNORECASE)
    for name, stems in {
        "cause": r"caus|lead|due\b|trigger|result|produc|because|increas|rais|make|made",
        "remedy": r"treat|reliev|cur|prevent|help|reduc|avoid|heal|lower|solv|against\b|fix",
        "use": r"for\b|us(?:e|ed|es|ing)\b|tak|need|requir|giv|apply|order|buy|bought",
        "time": r"when|whil|after|before|during|since|until|day|week|month|year|hour|ago\b",
        "place": r"at\b|near|from\b|to\b|into\b|on\b|over\b|under\b|through",
        "person": r"by\b|met\b|call|sen[dt]|sa(?:y|id)|ask|t(?:ell|old)|wr[io]t|who\b",
        "part": r"of\b|in\b|within|includ|contain|consist|ha(?:s|ve|d)\b|with\b|and\b|or\b",
        "kind": r"is\b|are\b|was\b|were\b|be\b|such\b|as\b|call|mean|like\b",
    }.items()
}
"""Patterns of relations between two entities; the first match applies."""
OTHER = "other"
TYPE_ENDINGS: dict[str, re.Pattern[str]] = {
    "name": re.compile(r".*[A-Z]|.*\d"),
    "act": re.compile(r".*(?:tion|sion|ment|ing|sis|ance|ence|age|al|ure)s?$"),
    "person": re.compile(r".*(?:er|or|ist|ian|man|men|people|patient|child|children|mother|father|wife|husband)s?$"),
    "quality": re.compile(r".*(?:ity|ness|ship|hood|ous|ive|ful|ic|able|ible)$"),
}
"""Endings of phrases by type; the first match applies."""
THING = "thing"


def entity_type(phrase: str) -> str:
    """Type of an entity by its form.

    >>> [entity_type(phrase) for phrase in ("Ottilie Brandt", "bridge repair crossing", "night porter", "toll")]
    ['name', 'act', 'person', 'thing']
    """
    return next((name for name, pattern in TYPE_ENDINGS.items() if pattern.match(phrase)), THING)


def extract_triples(text: str) -> list[Triple]:
    """Triples of a text by rules, in order of reading.

    >>> extract_triples("Frost causes cracks in the tall piers.")
    [Triple(head='frost', relation='cause', tail='cracks'), Triple(head='cracks', relation='part', tail='tall piers')]
    """
    known = proper_nouns(text)
    found: list[Triple] = []
    for clause in clauses(text):
        phrases = clause_noun_phrases(clause, known)
        found += _linked(clause.lower(), phrases) or [Triple(phrase) for phrase in phrases]
    return found


def _linked(clause: str, phrases: Sequence[str]) -> list[Triple]:
    """A chain of triples from each phrase to the next."""
    positions, at = [], 0
    for phrase in phrases:
        begin = max(clause.find(phrase.lower(), at), at)
        at = begin + len(phrase)
        positions.append((begin, at))
    between = [clause[end:begin] for (_, end), (begin, _) in pairwise(positions)]
    relations = (next((name for name, p in RELATIONS.items() if p.search(part)), OTHER) for part in between)
    return list(map(Triple, phrases, relations, phrases[1:]))


class KnowledgeGraph:
    """Entities in order of arrival, with their vectors and relations. Similar entities are merged.

    Args:
        relations: Names of all relations; a triple with another name counts as the last.
        entity_similarity: Least cosine of two entities that are merged, in (0, 1].
    """

    def __init__(self, embedder: Embedder, relations: Sequence[str], entity_similarity: float) -> None:
        self.entities = TextVectors(embedder)
        self.relations = tuple(relations)
        self._entity_similarity = entity_similarity
        self._positions: dict[frozenset[str], int] = {}  # by stems: other forms of the same words need no vector
        self._type_codes: dict[str, int] = {}
        self._types: list[int] = []
        self._edges: set[tuple[int, int, int]] = set()
        self._neighbors: list[dict[int, None]] = []
        self._counts: npt.NDArray[np.int32] = np.zeros((64, len(self.relations)), np.int32)  # (entities, relations)

    def __len__(self) -> int:
        return len(self.entities)

    @property
    def degree(self) -> npt.NDArray[np.int32]:
        """Number of edges of each entity, (n,)."""
        return np.asarray(self._counts[: len(self)].sum(axis=1, dtype=np.int32))

    def neighbors(self, position: int) -> list[int]:
        """Entities that share an edge with one, in order of arrival."""
        return list(self._neighbors[position])

    def add(self, added: Iterable[Triple]) -> tuple[int, int]:
        """Adds triples and merges similar entities. Returns the numbers of new entities and new edges."""
        added = list(added)
        before = len(self), len(self._edges)
        position = self._resolve(dict.fromkeys(name for t in added for name in (t.head, t.tail) if name))
        for head, relation, tail in added:
            if tail and position[head] != position[tail]:
                self._add_edge(position[head], relation, position[tail])
        return len(self) - before[0], len(self._edges) - before[1]

    def deficits(self) -> Float64:
        """Missing edges, (n, relations): the mean number of such edges of its type if an entity has none, else 0."""
        counts, types = self._counts[: len(self)], np.array(self._types, np.int64)
        totals = np.zeros((len(self._type_codes), len(self.relations)))
        np.add.at(totals, types, counts)
        means = totals / np.maximum(np.bincount(types, minlength=len(self._type_codes)), 1)[:, None]
        return np.asarray(means[types] * (counts == 0))

    def _resolve(self, names: Iterable[str]) -> dict[str, int]:
        """Entity resolution: the position of each name's entity, which is added if no similar one exists."""
        bags = {name: content_words(name) for name in names}
        new = [name for name, bag in bags.items() if bag not in self._positions]
        rows = dict(zip(new, self.entities.embed(new), strict=True))
        for name, row in rows.items():
            position, cosine = self.entities.nearest(row)
            if cosine < self._entity_similarity:
                position = self.entities.add(name, row)
                self._add_entity(name)
            self._positions[bags[name]] = position
        return {name: self._positions[bag] for name, bag in bags.items()}

    def _add_entity(self, name: str) -> None:
        self._types.append(self._type_codes.setdefault(entity_type(name), len(self._type_codes)))
        self._neighbors.append({})
        if len(self) > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])

    def _add_edge(self, head: int, relation: str, tail: int) -> None:
        r = self.relations.index(relation) if relation in self.relations else len(self.relations) - 1
        if (head, r, tail) not in self._edges:
            self._edges.add((head, r, tail))
            self._counts[[head, tail], r] += 1
            self._neighbors[head][tail] = self._neighbors[tail][head] = None
