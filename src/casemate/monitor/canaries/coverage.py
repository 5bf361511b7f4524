"""Coverage: clusters a corpus into regions of similar chunks, and measures which of them a canary set covers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from casemate.errors import DataError, MissingExtra
from casemate.maths.clustering import MIN_CHUNKS, NOISE, Labels, TopicSettings, assign_topics, find_topics
from casemate.maths.stats import Estimate, proportion
from casemate.protocols import Embedder, Index
from casemate.text.markup import without_links
from casemate.text.tokens import STOP_WORDS, ReferenceCorpus, stem, words
from casemate.types import DEFAULT_TENANT, Document, Float64, Vector

MAX_CHUNKS, GENRE_CHUNKS = 20_000, 5_000
"""Chunks that are clustered, and those among them that estimate word rarity; a larger corpus is sampled."""
NAME_WORDS = 4
"""Words in the name of a region."""
MAX_QUESTIONS = 2_000
"""Logged questions that are compared; more are sampled."""


@dataclass(frozen=True, slots=True)
class CorpusRegion:
    """A cluster of similar chunks.

    Attributes:
        name: Words that distinguish it.
        canaries: Ids of the canaries with one of its chunks in their context.
    """

    name: str
    chunks: int
    canaries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of a corpus that a canary set covers.

    Attributes:
        documents: Share of the chunks that are in a canary's context.
        traffic: Share of the given questions that a canary covers: a document as close to the canary as the question
            would be in the canary's context. None: no questions were given.
    """

    regions: tuple[CorpusRegion, ...]
    documents: float
    traffic: Estimate | None = None

    @property
    def uncovered(self) -> tuple[CorpusRegion, ...]:
        """The regions without a canary."""
        return tuple(r for r in self.regions if not r.canaries)


@dataclass(frozen=True)
class RegionMap:
    """A corpus, or a sample of it, clustered into regions.

    Attributes:
        E: Their vectors, (n, dim).
        labels: Region of each chunk, (n,).
        centroids: Centroids of the regions, (C, dim).
        genre: Rarity of words in the corpus.
    """

    documents: Sequence[Document]
    E: Vector
    labels: Labels
    centroids: Vector
    names: Sequence[str]
    genre: ReferenceCorpus
    method: str

    @classmethod
    def of(cls, index: Index, tenant: str, seed: int) -> RegionMap:
        """Reads an index once and clusters its chunks; the seed is that of sampling and clustering.

        Raises:
            DataError: If the tenant has no documents.
        """
        documents, E = sample_documents(index, tenant, np.random.default_rng(seed), MAX_CHUNKS)
        labels, centroids, method = _cluster(E, seed)
        genre = ReferenceCorpus([d.content for d in documents[:: math.ceil(len(documents) / GENRE_CHUNKS)]])
        return cls(documents, E, labels, centroids, _region_names(documents, labels), genre, method)

    @property
    def region_of(self) -> dict[str, int]:
        """Region of each chunk, by id."""
        return {d.id: int(label) for d, label in zip(self.documents, self.labels, strict=True)}

    def covering(self, contexts: Mapping[str, Collection[str]]) -> dict[int, tuple[str, ...]]:
        """The canaries that cover each region, from the ids of the documents in the context of each canary."""
        region_of = self.region_of
        found: dict[int, tuple[str, ...]] = {}
        for name, ids in contexts.items():
            for region in {region_of[i] for i in ids if i in region_of}:
                found[region] = (*found.get(region, ()), name)
        return found

    def documents_of(self, region: int) -> list[Document]:
        """The chunks of a region, closest to its centroid first."""
        members = np.flatnonzero(self.labels == region)
        order = np.argsort(-(self.E[members] @ self.centroids[region]), kind="stable")
        return [self.documents[i] for i in members[order]]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of chunks of each region, (C,)."""
        return np.bincount(self.labels, minlength=len(self.centroids))


def sample_documents(index: Index, tenant: str, rng: np.random.Generator, most: int) -> tuple[list[Document], Vector]:
    """A random sample of a tenant's chunks, in the order of the index, and their vectors; all if there are no more.

    Raises:
        DataError: If the tenant has no documents.
    """
    n = index.moments(tenant).n
    if not n:
        raise DataError(f"tenant {tenant!r} has no documents; run 'casemate index' first")
    wanted = np.ones(n, bool) if n <= most else np.isin(np.arange(n), rng.choice(n, most, replace=False))
    documents: list[Document] = []
    rows: list[Vector] = []
    seen = 0
    for page, vectors in index.scan(tenant):
        kept = [i for i in range(len(page)) if seen + i < n and wanted[seen + i]]
        documents += [page[i] for i in kept]
        rows.append(vectors[kept])
        seen += len(page)
    return documents, np.concatenate(rows)


def _cluster(E: Vector, seed: int) -> tuple[Labels, Vector, str]:
    """Region of each chunk, centroids, and a description of the method."""
    if len(E) < MIN_CHUNKS:
        return np.zeros(len(E), np.int64), E.mean(axis=0, keepdims=True), "one region: too few chunks to cluster"
    try:
        topics = find_topics(E, TopicSettings(seed=seed))
    except MissingExtra:  # without scikit-learn
        topics = find_topics(E, TopicSettings("kmeans", seed=seed))
    everywhere = np.full(len(topics.centroids), -np.inf, np.float32)
    closest = assign_topics(E, topics.centroids, everywhere)  # noise points join the closest region
    return np.where(topics.labels == NOISE, closest, topics.labels), topics.centroids, topics.method


def _region_names(documents: Sequence[Document], labels: Labels) -> list[str]:
    """Words that distinguish each region: frequent in it and rare elsewhere."""
    bags = [
        {stem(w): w for w in words(without_links(d.content)) if w not in STOP_WORDS and w.isalpha()} for d in documents
    ]
    spread = Counter(chain.from_iterable(bags))
    found = []
    for region in range(int(labels.max()) + 1):
        inside = [bags[i] for i in np.flatnonzero(labels == region)]
        counts = Counter(chain.from_iterable(inside))
        spelling = {base: word for bag in inside for base, word in bag.items()}
        share = max(len(inside), 1) / len(documents)
        gain = {base: count * math.log(count / (spread[base] * share)) for base, count in counts.items()}
        distinctive = sorted((base for base in gain if gain[base] > 0), key=lambda b: (-gain[b], b))
        found.append(", ".join(spelling[base] for base in distinctive[:NAME_WORDS]) or f"region {region + 1}")
    return found


def measure_coverage(  # noqa: PLR0913  one call, one measurement
    corpus: RegionMap,
    index: Index,
    embedder: Embedder,
    queries: Mapping[str, str],
    *,
    k: int,
    tenant: str = DEFAULT_TENANT,
    questions: Sequence[str] = (),
    seed: int = 7,
) -> Coverage:
    """Measures which regions, chunks and questions a canary set covers.

    The queries, by canary id, exclude those about subjects that the corpus does not cover. Of more than
    ``MAX_QUESTIONS`` questions of clients a sample is drawn.
    """
    vectors = embedder.embed(list(queries.values())) if queries else np.empty((0, embedder.dim), np.float32)
    found = [index.search(vector, k, tenant).hits for vector in vectors]
    contexts = {name: {h.document.id for h in hits} for name, hits in zip(queries, found, strict=True)}
    covering, sizes, known = corpus.covering(contexts), corpus.sizes, corpus.region_of.keys()
    order = np.argsort(-sizes, kind="stable").tolist()
    regions = tuple(CorpusRegion(corpus.names[r], int(sizes[r]), covering.get(r, ())) for r in order)
    last = np.array([hits[-1].score if len(hits) == k else -1.0 for hits in found])
    covered = known & set[str]().union(*contexts.values())
    drawn = np.random.default_rng(seed).permutation(len(questions))[:MAX_QUESTIONS]
    sample = [questions[i] for i in drawn]
    return Coverage(regions, len(covered) / len(known), _traffic_covered(embedder, vectors, last, sample))


def _traffic_covered(embedder: Embedder, vectors: Vector, last: Float64, questions: Sequence[str]) -> Estimate | None:
    """Share of the questions at least as close to a canary as the last document of its context (``last``: scores)."""
    if not questions:
        return None
    S = embedder.embed(questions) @ vectors.T  # (questions, canaries)
    return proportion(int((S >= last).any(axis=1).sum()), len(questions))
