"""RAGDefender: estimates how many passages are poisoned, and removes those that resemble one another most. A baseline.

Kim, Lee and Koo 2025, "Rescuing the Unpoisoned: Efficient Defense against Knowledge Corruption Attacks on RAG Systems"
(ACSAC 2025, arXiv 2511.01268). It uses no language model. Grouping for questions that one passage answers: two
hierarchical clusters. The smaller one is poisoned unless most passages share the most prominent terms (equations 1 and
2). Grouping for questions that several passages answer together: the passages with high mean and median cosines.
Identification: the passages with the highest sums over the most similar pairs (equations 4 to 7).

Deviation: the system's embedder.

Deviation: prominent terms are matched as words in lower case. The authors' code looks for lower-case terms as parts of
the original text.

Deviation: ``concentration`` follows the paper's text. The authors' code joins its two conditions with "or", and
sometimes counts the other passages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np

from casemate.errors import ConfigError
from casemate.guard.context_filter import ContextFilter
from casemate.maths.clustering import Labels
from casemate.protocols import Defense, Embedder, EventStore, Generator
from casemate.text.tfidf import TfIdf
from casemate.text.tokens import STOP_WORDS, words
from casemate.types import Document, Float64, Vector

NAME = "rag_defender"
TERMS = 5
"""m: prominent terms. A passage with more than half of them counts."""
POWER = 2
"""p: power of the cosines that are added up."""
Grouping: TypeAlias = Literal["clusters", "concentration"]


@dataclass(eq=False)
class RAGDefender(Defense):
    """Removes the passages that resemble one another most, as many as it estimates to be poisoned.

    Attributes:
        grouping: ``clusters`` for questions that one passage answers, ``concentration`` for questions that several
            passages answer together.
        embedder: The system's.
        store: The system's; receives the number of removed passages.
    """

    grouping: Grouping = "clusters"
    embedder: Embedder | None = field(default=None, repr=False)
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Kim, Lee and Koo 2025, RAGDefender, arXiv 2511.01268"

    def __post_init__(self) -> None:
        if self.grouping not in get_args(Grouping):
            raise ConfigError(f"{NAME}.grouping is {self.grouping!r}; allowed are {', '.join(get_args(Grouping))}")

    def on_generate(self, generator: Generator) -> Generator:
        """Wraps the generator: it reads the remaining passages."""
        return ContextFilter(NAME, generator, self.embedder, self.store, self.choose)

    def choose(self, documents: Sequence[Document], vectors: Callable[[], Vector]) -> frozenset[int]:
        """Returns the positions of the passages to remove: at least one of two or more."""
        rows = vectors().astype(np.float64)
        cosines: Float64 = rows @ rows.T
        return most_alike(cosines, self._poisoned([document.text for document in documents], cosines))

    def _poisoned(self, texts: Sequence[str], cosines: Float64) -> int:
        """The estimated number of poisoned passages."""
        if self.grouping == "concentration":
            return concentrated(cosines)
        smaller = min(Counter(ward(cosines).tolist()).values())
        return smaller if with_prominent_terms(texts) <= len(texts) / 2 else len(texts) - smaller


def with_prominent_terms(texts: Sequence[str]) -> int:
    """Returns the number of texts that contain more than half of the prominent terms (equation 1).

    These are the ``TERMS`` words, without stop words, whose TF-IDF weights over all texts have the largest sums.
    """
    kept = [[w for w in words(text) if w not in STOP_WORDS] for text in texts]
    matrix = TfIdf(" ".join(row) for row in kept)
    names = list(dict.fromkeys(word for row in kept for word in row))  # in the order of the columns
    sums = np.bincount(matrix.columns, matrix.values, len(names))
    prominent = {name for _, name in sorted(zip(-sums, names, strict=True))[:TERMS]}
    return sum(2 * len(prominent.intersection(row)) > len(prominent) for row in kept)


def ward(cosines: Float64) -> Labels:
    """Returns two clusters of unit vectors by Ward's hierarchical method: 0 or 1, (n,).

    Two clusters merge whose merger adds least to the sum of squared distances (Lance and Williams 1967).

    Args:
        cosines: (n, n), n at least 2.
    """
    distances = 2.0 - 2.0 * cosines  # squared
    clusters = {i: [i] for i in range(len(cosines))}
    D = {pair: distances[pair] for pair in combinations(clusters, 2)}
    while len(clusters) > 2:
        (a, b), merged = min(D.items(), key=lambda item: (item[1], item[0]))
        size = {c: len(members) for c, members in clusters.items()}
        for c in clusters.keys() - {a, b}:
            total = size[a] + size[b] + size[c]
            parts = (size[a] + size[c]) * D.pop(_pair(a, c)) + (size[b] + size[c]) * D.pop(_pair(b, c))
            D[_pair(a, c)] = (parts - size[c] * merged) / total
        del D[a, b]
        clusters[a] += clusters.pop(b)
    labels = np.zeros(len(cosines), np.int64)
    labels[list(clusters.values())[1]] = 1
    return labels


def concentrated(cosines: Float64) -> int:
    """Returns the number of passages whose mean cosine exceeds the mean of all, and median the median of all."""
    mean, median = cosines.mean(axis=0), np.median(cosines, axis=0)
    return int(((mean > mean.mean()) & (median > np.median(median))).sum())


def most_alike(cosines: Float64, count: int) -> frozenset[int]:
    """Returns the passages with the highest sums of signed squared cosines over the most similar pairs.

    Args:
        cosines: (n, n).
        count: N: passages to return. The N (N - 1) / 2 most similar pairs count, at least one.
    """
    if count < 1:
        return frozenset()
    pairs = sorted(combinations(range(len(cosines)), 2), key=lambda pair: (-cosines[pair], pair))
    sums = np.zeros(len(cosines))
    for pair in pairs[: max(1, comb(count, 2))]:
        sums[list(pair)] += np.sign(cosines[pair]) * abs(cosines[pair]) ** POWER
    return frozenset(sorted(range(len(cosines)), key=lambda i: (-sums[i], i))[:count])


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
