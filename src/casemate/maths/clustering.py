"""Topics of a collection by clustering: a label for each chunk, and a centroid and radius for each topic.

Source: RAGFort (Li et al. 2026, AAAI, arXiv 2511.10128), section 4.2: HDBSCAN (Campello, Moulavi and Sander 2013) on
the embeddings of the chunks. A topic is a class of the contrastive loss.

Deviation: the paper gives no parameters. HDBSCAN runs on the first 50 principal components, because in 384 or more
dimensions it finds one large cluster and noise. The minimum cluster size is 0.5 % of the chunks, from 5 to 50.
Deviation: HDBSCAN's noise (-1) is never a class, because noise points are not similar to each other. On real text noise
is four chunks of five. So clusters serve as cores, and noise points near a core join it (``membership``).
Deviation: where HDBSCAN finds no usable topics (``MAX_CORE_NOISE``), spherical k-means with sqrt(n / 2) clusters does.
Deviation: HDBSCAN clusters at most ``sample`` chunks. The others join the nearest topic if they lie within its radius.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError, DataError, needs
from casemate.types import Float64, Vector

Labels: TypeAlias = npt.NDArray[np.int64]  # topic of each chunk, (n,), from 0; ``NOISE`` for chunks without a topic

NOISE = -1
DIMENSIONS = 50  # principal components that HDBSCAN uses
MAX_CORE_NOISE, MAX_NOISE, MAX_TOPIC_SHARE = 0.85, 0.6, 0.5
"""Upper limits of a usable HDBSCAN result: noise (.86 to .93 on random vectors), noise after noise points have joined
topics, and the largest topic's share of the other chunks.
"""
FLOOR_QUANTILE = 0.05  # quantile of the members' cosines to their centroid that defines the topic's radius
TEMPERATURE = 0.1  # temperature of the soft membership, as in the contrastive loss
MIN_RANGE = 1e-5  # if no coordinate has a larger range, all texts count as equal
IMPURITY_SAMPLE, IMPURITY_SEED = 2000, 7
"""Most chunks whose neighbors ``knn_impurity`` looks up, and the seed of the sample."""
MAX_ROUNDS = 30  # most iterations of k-means
MIN_CHUNKS = 20  # smallest number of chunks that can be clustered


@dataclass(frozen=True)
class TopicSettings:
    """Parameters of ``find_topics``.

    Attributes:
        method: ``hdbscan`` (k-means where HDBSCAN finds no usable topics) or ``kmeans``.
        selection: Cluster selection of HDBSCAN: ``leaf`` (small clusters of similar size) or ``eom`` (excess of mass).
        membership: Minimum soft membership, in [0, 1], for a noise point to join a topic; 1: none joins.
        sample: Maximum number of chunks that HDBSCAN clusters.
    """

    method: Literal["hdbscan", "kmeans"] = "hdbscan"
    selection: Literal["leaf", "eom"] = "leaf"
    membership: float = 0.2
    sample: int = 5000
    seed: int = 7

    def __post_init__(self) -> None:
        for name, value, known in (
            ("method", self.method, ("hdbscan", "kmeans")),
            ("selection", self.selection, ("leaf", "eom")),
        ):
            if value not in known:
                raise ConfigError(f"topics: {name} is {value!r}; known: {', '.join(known)}")
        if self.sample < MIN_CHUNKS or not 0 <= self.membership <= 1:
            what = f"sample={self.sample}, membership={self.membership}"
            raise ConfigError(f"topics need sample >= {MIN_CHUNKS} and membership in [0, 1]; got {what}")


@dataclass(frozen=True)
class Topics:
    """The topics of a collection.

    Attributes:
        labels: Topic of each chunk, (n,), 0 to C - 1, or ``NOISE``.
        centroids: Normalized mean of each topic, (C, dim), float32.
        floors: Radius of each topic as a cosine: the ``FLOOR_QUANTILE`` of its members' cosines to the centroid, (C,),
            float32.
    """

    labels: Labels
    centroids: Vector
    floors: Vector
    method: str

    @property
    def noise(self) -> float:
        """Share of chunks without a topic, in [0, 1]."""
        return float((self.labels == NOISE).mean())


def find_topics(E: Vector, settings: TopicSettings | None = None) -> Topics:
    """Clusters chunks by topic, from unit vectors, (n, dim).

    Raises:
        DataError: If there are fewer than ``MIN_CHUNKS`` chunks, or all are equal.
        MissingExtra: If scikit-learn is needed and not installed.
    """
    settings = settings or TopicSettings()
    if len(E) < MIN_CHUNKS:
        raise DataError(f"cannot find topics in {len(E)} chunks; at least {MIN_CHUNKS} are needed")
    if np.ptp(E, axis=0).max() < MIN_RANGE:
        raise DataError(f"cannot find topics: all {len(E)} chunks are equal")
    if settings.method == "hdbscan" and (found := _hdbscan_topics(E, settings)) is not None:
        return found
    classes = max(2, round(math.sqrt(len(E) / 2)))
    return _topics(E, spherical_kmeans(E, classes, settings.seed), f"k-means, {classes} classes")


def assign_topics(E: Vector, centroids: Vector, floors: Vector) -> Labels:
    """Labels, (n,), of unit vectors, (n, dim): the nearest topic, or ``NOISE`` outside its radius.

    ``floors`` are minimum cosines to the centroids, (C,); minus infinity: no vector is noise.
    """
    if not len(centroids):
        return np.full(len(E), NOISE, np.int64)
    S = E @ centroids.T  # (n, C)
    best = S.argmax(axis=1)
    inside = S[np.arange(len(E)), best] >= floors[best]
    labels: Labels = np.where(inside, best, NOISE).astype(np.int64)
    return labels


def topic_centroids(E: Vector, labels: Labels) -> tuple[Vector, Vector]:
    """Centroids (C, dim) and radii as cosines (C,) of topics 0 to C - 1, from unit vectors and their labels."""
    count = int(labels.max(initial=NOISE)) + 1
    centroids, floors = np.zeros((count, E.shape[1]), np.float32), np.zeros(count, np.float32)
    for c in range(count):
        members = E[labels == c]
        centroids[c] = _normalize(members.mean(axis=0, dtype=np.float64)[None])[0]
        floors[c] = np.quantile(members @ centroids[c], FLOOR_QUANTILE)
    return centroids, floors


def principal_components(E: Vector, dimensions: int) -> Float64:
    """Projection on the principal components of largest variance: (n, dimensions), centered, not whitened.

    The largest entry of each component is positive, so the signs are the same on every machine.
    """
    X = E.astype(np.float64)
    X -= X.mean(axis=0)
    _, directions = np.linalg.eigh(X.T @ X)  # increasing
    V = directions[:, ::-1][:, :dimensions]
    signs = np.sign(V[np.abs(V).argmax(axis=0), np.arange(V.shape[1])])
    found: Float64 = X @ (V * signs)
    return found


def spherical_kmeans(E: Vector, classes: int, seed: int) -> Labels:
    """Spherical k-means (Dhillon and Modha 2001) of unit vectors, (n, dim), with k-means++ initialization.

    Labels, (n,), from 0; no cluster is empty. ``ValueError``: there are fewer vectors than clusters.
    """
    C = _kmeans_plus_plus(E, classes, np.random.default_rng(seed))
    labels = np.full(len(E), NOISE, np.int64)
    for _ in range(MAX_ROUNDS):
        S = E @ C.T
        found = S.argmax(axis=1).astype(np.int64)
        worst = S[np.arange(len(E)), found].argsort()
        for empty, farthest in zip(np.setdiff1d(np.arange(classes), found), worst, strict=False):
            found[farthest] = empty  # an empty cluster restarts at the vector farthest from its centroid
        if np.array_equal(found, labels):
            break
        labels = found
        sums = np.zeros((classes, E.shape[1]))
        np.add.at(sums, labels, E)
        C = _normalize(sums)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def silhouette(E: Vector, labels: Labels) -> float:
    """Simplified silhouette coefficient by centroids (Rousseeuw 1987), averaged over the chunks that have a topic.

    (b - a) / max(a, b) with cosine distance a to the own centroid and b to the nearest other centroid. In [-1, 1];
    higher: better separated topics. 0 with fewer than two topics.
    """
    inside = labels != NOISE
    if len(np.unique(labels[inside])) < 2:
        return 0.0
    own = np.unique(labels[inside], return_inverse=True)[1].astype(np.int64)
    centroids, _ = topic_centroids(E[inside], own)
    D = 1 - E[inside].astype(np.float64) @ centroids.T
    rows = np.arange(len(D))
    a = D[rows, own]
    D[rows, own] = np.inf
    b = D.min(axis=1)
    return float(((b - a) / np.maximum(np.maximum(a, b), 1e-12)).mean())


def knn_impurity(E: Vector, labels: Labels, k: int = 5) -> float:
    """Mean share of the k nearest neighbors that belong to another topic, over a sample of the n > k chunks, (n, dim).

    Chunks without a topic count as neighbors of another topic, and are not sampled. In [0, 1]; lower: better separated
    topics. 0 if no chunk has a topic.
    """
    asked = sample_labeled(labels, IMPURITY_SAMPLE, IMPURITY_SEED)
    if not len(asked):
        return 0.0
    S = E[asked] @ E.T
    S[np.arange(len(asked)), asked] = -np.inf
    return float(other_topic_share(S, labels[asked], labels, k).mean())


def sample_labeled(labels: Labels, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Sorted positions of at most ``most`` chunks that have a topic, drawn at random without replacement."""
    asked = np.flatnonzero(labels != NOISE)
    if len(asked) > most:
        asked = np.sort(np.random.default_rng(seed).choice(asked, most, replace=False))
    return asked


def other_topic_share(S: Vector, own: Labels, labels: Labels, k: int) -> Float64:
    """Share of each query's k most similar chunks that belong to another topic, (m,), by similarities, (m, n).

    ``own`` has the topics of the m queries, ``labels`` those of the n >= k chunks.
    """
    near = np.argpartition(-S, k - 1, axis=1)[:, :k]
    share: Float64 = (labels[near] != own[:, None]).mean(axis=1)
    return share


def _hdbscan_topics(E: Vector, settings: TopicSettings) -> Topics | None:
    """HDBSCAN's topics; None if they are not usable."""
    rng = np.random.default_rng(settings.seed)
    seen = np.arange(len(E))
    if len(E) > settings.sample:
        seen = np.sort(rng.choice(len(E), settings.sample, replace=False))
    part = E[seen]
    X = principal_components(part, min(DIMENSIONS, E.shape[1]))
    least = max(5, min(50, round(0.005 * len(part))))
    for size in dict.fromkeys(max(5, least // divisor) for divisor in (1, 2, 4)):
        labels = _hdbscan(X, size, settings.selection)
        if (labels == NOISE).mean() > MAX_CORE_NOISE:
            continue
        labels = _assign_noise(part, labels, settings.membership)
        if _usable(labels):
            if len(seen) < len(E):
                whole = assign_topics(E, *topic_centroids(part, labels))
                whole[seen] = labels
                labels = whole
            return _topics(E, labels, f"HDBSCAN, {settings.selection}, classes of {size} or more")
    return None


def _hdbscan(X: Float64, least: int, selection: str) -> Labels:
    with needs("casemate[torch]"):
        cluster = importlib.import_module("sklearn.cluster")
    model = cluster.HDBSCAN(
        min_cluster_size=least, min_samples=5, cluster_selection_method=selection, copy=True, n_jobs=1
    )
    labels: Labels = model.fit_predict(X).astype(np.int64)
    labels[labels < 0] = NOISE
    return labels


def _usable(labels: Labels) -> bool:
    """Whether most chunks have a topic and no topic dominates."""
    inside = labels[labels != NOISE]
    if len(inside) < (1 - MAX_NOISE) * len(labels) or len(np.unique(inside)) < 2:
        return False
    return bool(np.bincount(inside).max() <= MAX_TOPIC_SHARE * len(inside))


def _assign_noise(E: Vector, labels: Labels, membership: float) -> Labels:
    """Labels in which each noise point has joined the topic of its largest soft membership, if that is large enough.

    Soft membership: softmax of the cosines to the centroids, times the cosine relative to the topic's radius, at most
    1. Without the second factor, distant noise would join a topic where there are few.
    """
    noise = np.flatnonzero(labels == NOISE)
    if membership >= 1 or not len(noise):
        return labels
    centroids, floors = topic_centroids(E, labels)
    S = E[noise] @ centroids.T
    P = np.exp((S - S.max(axis=1, keepdims=True)) / TEMPERATURE)
    P *= np.clip(S / np.maximum(floors, 1e-6), 0, 1) / P.sum(axis=1, keepdims=True)
    soft = labels.copy()
    soft[noise] = np.where(P.max(axis=1) >= membership, P.argmax(axis=1), NOISE)
    return soft


def _topics(E: Vector, labels: Labels, method: str) -> Topics:
    return Topics(labels, *topic_centroids(E, labels), method)


def _kmeans_plus_plus(E: Vector, classes: int, rng: np.random.Generator) -> Vector:
    """Initial centroids by k-means++ (Arthur and Vassilvitskii 2007) with cosine distances, (classes, dim)."""
    if not 1 <= classes <= len(E):
        raise ValueError(f"cannot form {classes} clusters of {len(E)} vectors")
    chosen = [int(rng.integers(len(E)))]
    distance = np.full(len(E), np.inf)
    for _ in range(classes - 1):
        distance = np.minimum(distance, np.maximum(1 - E @ E[chosen[-1]], 0).astype(np.float64))
        total = distance.sum()
        chosen.append(int(rng.choice(len(E), p=distance / total) if total > 0 else rng.integers(len(E))))
    return E[chosen]


def _normalize(X: npt.NDArray[np.floating]) -> Vector:
    found: Vector = (X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    return found
