"""Regions of a corpus: chunks of like meaning, and how much of them a set of questions watches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from casemate.errors import DataError, MissingExtra
from casemate.protocols import Embedder, Index
from casemate.reindexing.topics import FEWEST, NOISE, Labels, TopicSettings, find_topics, nearest
from casemate.stats import Rate, rate
from casemate.types import DEFAULT_TENANT, Document, Float64, Vector
from casemate.words import STOP_WORDS, Genre, stem, words

READ, GENRE = 20_000, 5_000
"""Chunks that are looked at, and of these, the ones that tell which words are rare; beyond, a sample is drawn."""
NAMED = 4
"""Words that name a region."""
QUESTIONS = 2_000
"""Questions of a log that are looked at."""


@dataclass(frozen=True, slots=True)
class Region:
    """Chunks of like meaning.

    Attributes:
        name: The words that tell it from the others.
        chunks: How many, of those that were looked at.
        canaries: Those that have one of its chunks in their context.
    """

    name: str
    chunks: int
    canaries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the corpus a set watches.

    Attributes:
        regions: The largest first.
        documents: Share of the chunks that are in the context of a canary.
        traffic: Share of the questions given that a canary is near to: a document as near to the canary as the question
            is would be in its context. None: no questions were given.
    """

    regions: tuple[Region, ...]
    documents: float
    traffic: Rate | None = None

    @property
    def bare(self) -> tuple[Region, ...]:
        """The regions without a canary."""
        return tuple(r for r in self.regions if not r.canaries)


@dataclass(frozen=True)
class Corpus:
    """What is known of a corpus.

    Attributes:
        documents: Its chunks, or a sample of them.
        E: Their vectors, (n, dim).
        labels: Their regions, (n,).
        centroids: Centres of the regions, (C, dim).
        names: Of the regions.
        genre: Which words are rare.
        method: How the regions were found, in words.
    """

    documents: Sequence[Document]
    E: Vector
    labels: Labels
    centroids: Vector
    names: Sequence[str]
    genre: Genre
    method: str

    @classmethod
    def of(cls, index: Index, tenant: str, seed: int) -> Corpus:
        """Reads an index once, and parts it.

        Args:
            index: Where the documents are.
            tenant: Whose.
            seed: Of all that is drawn.

        Raises:
            DataError: If there are none.
        """
        documents, E = _sample(index, tenant, np.random.default_rng(seed))
        labels, centroids, method = _parted(E, seed)
        genre = Genre([d.content for d in documents[:: math.ceil(len(documents) / GENRE)]])
        return cls(documents, E, labels, centroids, _names(documents, labels), genre, method)

    def near(self, region: int) -> list[Document]:
        """The documents of a region, those nearest to its centre first."""
        members = np.flatnonzero(self.labels == region)
        order = np.argsort(-(self.E[members] @ self.centroids[region]), kind="stable")
        return [self.documents[i] for i in members[order]]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Chunks of each region."""
        return np.bincount(self.labels, minlength=len(self.centroids))


def _sample(index: Index, tenant: str, rng: np.random.Generator) -> tuple[list[Document], Vector]:
    n = index.moments(tenant).n
    if not n:
        raise DataError(f"tenant {tenant!r} has no documents; run 'casemate index' first")
    wanted = np.ones(n, bool) if n <= READ else np.isin(np.arange(n), rng.choice(n, READ, replace=False))
    documents: list[Document] = []
    rows: list[Vector] = []
    seen = 0
    for found, vectors in index.scan(tenant):
        take = [i for i in range(len(found)) if seen + i < n and wanted[seen + i]]
        documents += [found[i] for i in take]
        rows.append(vectors[take])
        seen += len(found)
    return documents, np.concatenate(rows)


def _parted(E: Vector, seed: int) -> tuple[Labels, Vector, str]:
    """A region for each chunk, the regions' centres, and how they were found."""
    if len(E) < FEWEST:
        return np.zeros(len(E), np.int64), E.mean(axis=0, keepdims=True), "one region, of few chunks"
    try:
        topics = find_topics(E, TopicSettings(seed=seed))
    except MissingExtra:  # without scikit-learn
        topics = find_topics(E, TopicSettings("kmeans", seed=seed))
    everywhere = np.full(len(topics.centroids), -np.inf, np.float32)
    home = nearest(E, topics.centroids, everywhere)  # what belongs to no topic lies near one all the same
    return np.where(topics.labels == NOISE, home, topics.labels), topics.centroids, topics.method


def _names(documents: Sequence[Document], labels: Labels) -> list[str]:
    """The words that tell each region from the others: frequent in it, and rare elsewhere."""
    bags = [{stem(w): w for w in words(d.content) if w not in STOP_WORDS and w.isalpha()} for d in documents]
    spread = Counter(chain.from_iterable(bags))
    found = []
    for region in range(int(labels.max()) + 1):
        inside = [bags[i] for i in np.flatnonzero(labels == region)]
        counts = Counter(chain.from_iterable(inside))
        written = {base: word for bag in inside for base, word in bag.items()}
        share = max(len(inside), 1) / len(documents)
        gain = {base: count * math.log(count / (spread[base] * share)) for base, count in counts.items()}
        telling = sorted((base for base in gain if gain[base] > 0), key=lambda b: (-gain[b], b))
        found.append(", ".join(written[base] for base in telling[:NAMED]) or f"region {region + 1}")
    return found


def coverage(  # noqa: PLR0913  what is asked, of whom
    corpus: Corpus,
    index: Index,
    embedder: Embedder,
    queries: Mapping[str, str],
    *,
    k: int,
    tenant: str = DEFAULT_TENANT,
    questions: Sequence[str] = (),
    seed: int = 7,
) -> Coverage:
    """What some questions watch.

    Args:
        corpus: The regions.
        index: Where the documents are.
        embedder: That of the index.
        queries: The questions of the canaries, by id. Leave out those about nothing that the corpus holds.
        k: Documents read for an answer.
        tenant: Whose documents.
        questions: That people asked; of more than ``QUESTIONS``, so many are drawn.
        seed: Of the draw.
    """
    vectors = embedder.embed(list(queries.values())) if queries else np.empty((0, embedder.dim), np.float32)
    found = [index.search(vector, k, tenant).hits for vector in vectors]
    home = {d.id: int(label) for d, label in zip(corpus.documents, corpus.labels, strict=True)}
    read = {name: {h.document.id for h in hits} & home.keys() for name, hits in zip(queries, found, strict=True)}
    watching: dict[int, list[str]] = {}
    for name, ids in read.items():
        for region in {home[i] for i in ids}:
            watching.setdefault(region, []).append(name)
    sizes = corpus.sizes
    order = np.argsort(-sizes, kind="stable").tolist()
    regions = tuple(Region(corpus.names[r], int(sizes[r]), tuple(watching.get(r, ()))) for r in order)
    last = np.array([hits[-1].score if len(hits) == k else -1.0 for hits in found])
    seen = set[str]().union(*read.values())
    return Coverage(regions, len(seen) / len(home), _traffic(embedder, vectors, last, _drawn(questions, seed)))


def _drawn(questions: Sequence[str], seed: int) -> list[str]:
    order = np.random.default_rng(seed).permutation(len(questions))[:QUESTIONS]
    return [questions[i] for i in order]


def _traffic(embedder: Embedder, vectors: Vector, last: Float64, questions: Sequence[str]) -> Rate | None:
    """Share of the questions within what canaries read; ``last``: the scores of the last document that each reads."""
    if not questions:
        return None
    S = embedder.embed(questions) @ vectors.T  # (questions, canaries)
    return rate(int((S >= last).any(axis=1).sum()), len(questions))
