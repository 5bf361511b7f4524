"""A graph of what a crawler was told: entities, relations between them, and what seems to be missing.

For attacks that plan by what they know. By rules, entities are noun phrases, and the relation of two that follow one
another in a clause is told by the words between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.crawl.anchors import Memory, spoken
from casemate.protocols import Embedder
from casemate.types import Float64
from casemate.words import clauses, content_words, names


class Triple(NamedTuple):
    """Two entities and what holds between them; without a tail, an entity alone."""

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
"""What the words between two entities speak of; the first that fits holds."""
OTHER = "other"
ENDINGS: dict[str, re.Pattern[str]] = {
    "name": re.compile(r".*[A-Z]|.*\d"),
    "act": re.compile(r".*(?:tion|sion|ment|ing|sis|ance|ence|age|al|ure)s?$"),
    "person": re.compile(r".*(?:er|or|ist|ian|man|men|people|patient|child|children|mother|father|wife|husband)s?$"),
    "quality": re.compile(r".*(?:ity|ness|ship|hood|ous|ive|ful|ic|able|ible)$"),
}
"""How a phrase of a type ends; the first that fits holds."""
THING = "thing"


def kind(phrase: str) -> str:
    """The type of an entity, by its look.

    >>> [kind(phrase) for phrase in ("Ottilie Brandt", "bridge repair crossing", "night porter", "toll")]
    ['name', 'act', 'person', 'thing']
    """
    return next((name for name, pattern in ENDINGS.items() if pattern.match(phrase)), THING)


def triples(text: str) -> list[Triple]:
    """What a text says, by rules, in order of reading.

    >>> triples("Frost causes cracks in the tall piers.")
    [Triple(head='frost', relation='cause', tail='cracks'), Triple(head='cracks', relation='part', tail='tall piers')]
    """
    known = names(text)
    found: list[Triple] = []
    for clause in clauses(text):
        phrases = spoken(clause, known)
        found += _linked(clause.lower(), phrases) or [Triple(phrase) for phrase in phrases]
    return found


def _linked(clause: str, phrases: Sequence[str]) -> list[Triple]:
    """A chain of triples from each phrase to the next."""
    places, at = [], 0
    for phrase in phrases:
        begin = max(clause.find(phrase.lower(), at), at)
        at = begin + len(phrase)
        places.append((begin, at))
    return [
        Triple(head, _relation(clause[places[i][1] : places[i + 1][0]]), phrases[i + 1])
        for i, head in enumerate(phrases[:-1])
    ]


def _relation(between: str) -> str:
    return next((name for name, pattern in RELATIONS.items() if pattern.search(between)), OTHER)


class Graph:
    """Entities with their relations. Entities that are alike are one.

    Args:
        embedder: By whose vectors they are compared.
        relations: Names of all relations; a triple with any other counts as the last of them.
        alike: Cosine, in (0, 1], from which two entities are one.

    Attributes:
        entities: Names, in the order of coming, with their vectors.
        degree: How many edges each has, (n,).
    """

    def __init__(self, embedder: Embedder, relations: Sequence[str], alike: float) -> None:
        self.entities = Memory(embedder)
        self.relations = tuple(relations)
        self._alike = alike
        self._places: dict[frozenset[str], int] = {}  # by stems: what is the same in another form needs no vector
        self._kinds: dict[str, int] = {}
        self._kind: list[int] = []
        self._edges: set[tuple[int, int, int]] = set()
        self._near: list[dict[int, None]] = []
        self._counts: npt.NDArray[np.int32] = np.zeros((64, len(self.relations)), np.int32)  # (entities, relations)

    def __len__(self) -> int:
        return len(self.entities)

    @property
    def degree(self) -> npt.NDArray[np.int32]:
        """How many edges each entity has, (n,)."""
        return np.asarray(self._counts[: len(self)].sum(axis=1, dtype=np.int32))

    def neighbours(self, place: int) -> list[int]:
        """Entities that share an edge with one, in the order of coming."""
        return list(self._near[place])

    def add(self, told: Iterable[Triple]) -> tuple[int, int]:
        """Merges triples in; returns how many entities and how many edges were new."""
        told = list(told)
        before = len(self), len(self._edges)
        place = self._found(dict.fromkeys(name for t in told for name in (t.head, t.tail) if name))
        for head, relation, tail in told:
            if tail and place[head] != place[tail]:
                self._join(place[head], relation, place[tail])
        return len(self) - before[0], len(self._edges) - before[1]

    def deficits(self) -> Float64:
        """Edges of each relation that each entity seems to lack, (n, relations).

        0 where it has the relation, else the mean number that entities of its type have.
        """
        counts, kinds = self._counts[: len(self)], np.array(self._kind, np.int64)
        totals = np.zeros((len(self._kinds), len(self.relations)))
        np.add.at(totals, kinds, counts)
        means = totals / np.maximum(np.bincount(kinds, minlength=len(self._kinds)), 1)[:, None]
        return np.asarray(means[kinds] * (counts == 0))

    def _found(self, names: Iterable[str]) -> dict[str, int]:
        """The place of each entity, a new one if it is like none."""
        bags = {name: content_words(name) for name in names}
        new = [name for name, bag in bags.items() if bag not in self._places]
        rows = dict(zip(new, self.entities.embed(new), strict=True))
        for name, row in rows.items():
            place, cosine = self.entities.closest(row)
            if cosine < self._alike:
                place = self.entities.add(name, row)
                self._enter(name)
            self._places[bags[name]] = place
        return {name: self._places[bag] for name, bag in bags.items()}

    def _enter(self, name: str) -> None:
        self._kind.append(self._kinds.setdefault(kind(name), len(self._kinds)))
        self._near.append({})
        if len(self) > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])

    def _join(self, head: int, relation: str, tail: int) -> None:
        r = self.relations.index(relation) if relation in self.relations else len(self.relations) - 1
        if (head, r, tail) not in self._edges:
            self._edges.add((head, r, tail))
            self._counts[[head, tail], r] += 1
            self._near[head][tail] = self._near[tail][head] = None
