"""Topics of a collection: a label for each chunk, and where each topic lies.

RAGFort, Section 4.2 (Li et al. 2026, AAAI, arXiv 2511.10128): the chunks' vectors are clustered by HDBSCAN (Campello,
Moulavi and Sander 2013), and what a chunk is grouped with is its class. Nobody names the classes.

Deviation: the paper gives no parameters. HDBSCAN runs on the 50 directions of largest variance, because in 384 or more
dimensions it finds one giant class and noise; the least size of a class is .5 % of the chunks, from 5 to 50.
Deviation: what HDBSCAN calls noise (-1) is never a class, which would pull everything odd together. On real text it is
four chunks of five, so its clusters serve as cores: a chunk that belongs to one well enough is given to it
(``membership``); the others keep -1.
Deviation: where HDBSCAN finds no topics worth the name (``CORES``), spherical k-means with sqrt(n / 2) classes does.
Deviation: of more than ``sample`` chunks, HDBSCAN sees a sample; the others go to the nearest topic if they lie within.
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

Labels: TypeAlias = npt.NDArray[np.int64]
"""The class of each chunk, (n,), from 0; ``NOISE`` for those that belong to none."""

NOISE = -1
CORES, MOST_NOISE, LARGEST = 0.85, 0.6, 0.5
"""HDBSCAN found no topics if more chunks than the first are noise to it (of random vectors, .86 to .93 are), if more
than the second still are when ``membership`` has been used, or if one class holds more of the others than the third."""
FLOOR = 0.05
"""A topic reaches as far from its centre as all but this share of its chunks."""
SHARPNESS = 0.1
"""Temperature of the membership: that of the contrastive loss."""
ALIKE = 1e-5
"""Range of every coordinate below which texts are the same one."""
FEWEST = 20
"""Chunks below which there is nothing to group."""


@dataclass(frozen=True)
class TopicSettings:
    """How topics are looked for.

    Attributes:
        method: ``hdbscan``, with k-means where it finds nothing, or ``kmeans`` at once.
        selection: Which of HDBSCAN's nested clusters: ``leaf`` (small ones, alike in size), or ``eom`` (stable ones).
        dimensions: Directions of largest variance that it sees.
        membership: Noise that belongs to a topic by this share, in [0, 1], is given to it; 1: none is.
        sample: Chunks that HDBSCAN sees at most.
        seed: Of the sample and of k-means.
    """

    method: Literal["hdbscan", "kmeans"] = "hdbscan"
    selection: Literal["leaf", "eom"] = "leaf"
    dimensions: int = 50
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
        if self.dimensions < 2 or self.sample < FEWEST or not 0 <= self.membership <= 1:
            what = f"dimensions={self.dimensions}, sample={self.sample}, membership={self.membership}"
            raise ConfigError(f"topics need dimensions >= 2, sample >= {FEWEST}, membership in [0, 1]; got {what}")


@dataclass(frozen=True)
class Topics:
    """The topics of a collection.

    Attributes:
        labels: Class of each chunk, (n,), 0 to C - 1, or ``NOISE``.
        centroids: Unit mean of each class, (C, dim), float32.
        floors: Cosine to its centroid that all but ``FLOOR`` of a class exceed, (C,), float32.
        method: How they were found, in words.
    """

    labels: Labels
    centroids: Vector
    floors: Vector
    method: str

    @property
    def noise(self) -> float:
        """Share of the chunks that belong to no topic."""
        return float((self.labels == NOISE).mean())


def find_topics(E: Vector, settings: TopicSettings | None = None) -> Topics:
    """Groups chunks by topic.

    Args:
        E: Unit vectors, (n, dim).
        settings: How.

    Raises:
        DataError: If there are fewer than ``FEWEST`` chunks, or all are alike.
        MissingExtra: If scikit-learn is absent and needed.
    """
    settings = settings or TopicSettings()
    if len(E) < FEWEST:
        raise DataError(f"{len(E)} chunks have no topics; at least {FEWEST} are needed")
    if np.ptp(E, axis=0).max() < ALIKE:
        raise DataError(f"all {len(E)} chunks are alike: they have no topics")
    if settings.method == "hdbscan" and (found := _by_density(E, settings)) is not None:
        return found
    classes = max(2, round(math.sqrt(len(E) / 2)))
    return _described(E, spherical_kmeans(E, classes, settings.seed), f"k-means, {classes} classes")


def nearest(E: Vector, centroids: Vector, floors: Vector) -> Labels:
    """The topic that each of some vectors lies in: the nearest, if its centroid is as near as ``floors`` says.

    Args:
        E: Unit vectors, (n, dim).
        centroids: (C, dim).
        floors: (C,); minus infinity: each vector gets a class.
    """
    if not len(centroids):
        return np.full(len(E), NOISE, np.int64)
    S = E @ centroids.T  # (n, C)
    best = S.argmax(axis=1)
    inside = S[np.arange(len(E)), best] >= floors[best]
    labels: Labels = np.where(inside, best, NOISE).astype(np.int64)
    return labels


def centres(E: Vector, labels: Labels) -> tuple[Vector, Vector]:
    """Centroids (C, dim) and floors (C,) of classes 0 to C - 1."""
    count = int(labels.max(initial=NOISE)) + 1
    centroids, floors = np.zeros((count, E.shape[1]), np.float32), np.zeros(count, np.float32)
    for c in range(count):
        members = E[labels == c]
        centroids[c] = _unit(members.mean(axis=0, dtype=np.float64)[None])[0]
        floors[c] = np.quantile(members @ centroids[c], FLOOR)
    return centroids, floors


def principal(E: Vector, dimensions: int) -> Float64:
    """Coordinates along the directions of largest variance, (n, dimensions), centred, not whitened.

    The sign of each direction is such that its largest entry is positive: the same on every machine.
    """
    X = E.astype(np.float64)
    X -= X.mean(axis=0)
    _, directions = np.linalg.eigh(X.T @ X)  # increasing
    V = directions[:, ::-1][:, :dimensions]
    signs = np.sign(V[np.abs(V).argmax(axis=0), np.arange(V.shape[1])])
    found: Float64 = X @ (V * signs)
    return found


def spherical_kmeans(E: Vector, classes: int, seed: int, rounds: int = 30) -> Labels:
    """k-means by cosine (Dhillon and Modha 2001): labels (n,), no class empty.

    Args:
        E: Unit vectors, (n, dim), at least ``classes`` of them.
        classes: How many.
        seed: Of the first centres, drawn far from one another (k-means++).
        rounds: Most.
    """
    C = _far_apart(E, classes, np.random.default_rng(seed))
    labels = np.full(len(E), NOISE, np.int64)
    for _ in range(rounds):
        S = E @ C.T
        found = S.argmax(axis=1).astype(np.int64)
        worst = S[np.arange(len(E)), found].argsort()
        for empty, lonely in zip(np.setdiff1d(np.arange(classes), found), worst, strict=False):
            found[lonely] = empty  # the least at home founds it anew
        if np.array_equal(found, labels):
            break
        labels = found
        sums = np.zeros((classes, E.shape[1]))
        np.add.at(sums, labels, E)
        C = _unit(sums)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def silhouette(E: Vector, labels: Labels) -> float:
    """How much nearer chunks are to their own topic's centre than to the next, on average (Rousseeuw 1987, by centres).

    (b - a) / max(a, b) with cosine distances a to the own centre and b to the nearest other; noise is left out.

    Returns:
        In [-1, 1]; higher: topics lie further apart. 0 if there are fewer than two.
    """
    inside = labels != NOISE
    if len(np.unique(labels[inside])) < 2:
        return 0.0
    own = np.unique(labels[inside], return_inverse=True)[1].astype(np.int64)
    centroids, _ = centres(E[inside], own)
    D = 1 - E[inside].astype(np.float64) @ centroids.T
    rows = np.arange(len(D))
    a = D[rows, own]
    D[rows, own] = np.inf
    b = D.min(axis=1)
    return float(((b - a) / np.maximum(np.maximum(a, b), 1e-12)).mean())


def strangers(E: Vector, labels: Labels, k: int = 5, seed: int = 7, most: int = 2000) -> float:
    """Share of the k nearest neighbours of a chunk that are of another topic, on average.

    Args:
        E: Unit vectors, (n, dim), n > k.
        labels: (n,); a chunk of no topic is a stranger to all, and is not asked about.
        k: Neighbours.
        seed: Of the draw of chunks that are asked about.
        most: How many of them.

    Returns:
        In [0, 1]; lower: topics are better isolated. 0 if no chunk has a topic.
    """
    asked = drawn(labels, most, seed)
    if not len(asked):
        return 0.0
    S = E[asked] @ E.T
    S[np.arange(len(asked)), asked] = -np.inf
    return float(foreign(S, labels[asked], labels, k).mean())


def drawn(labels: Labels, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Positions of at most so many chunks that have a topic, drawn at random, in order."""
    asked = np.flatnonzero(labels != NOISE)
    if len(asked) > most:
        asked = np.sort(np.random.default_rng(seed).choice(asked, most, replace=False))
    return asked


def foreign(S: Vector, own: Labels, labels: Labels, k: int) -> Float64:
    """Of the k most similar chunks to each question, the share of another topic, (m,).

    Args:
        S: Similarity of m questions to n chunks, (m, n), n >= k.
        own: The questions' topics, (m,).
        labels: The chunks', (n,).
        k: How many are looked at.
    """
    near = np.argpartition(-S, k - 1, axis=1)[:, :k]
    share: Float64 = (labels[near] != own[:, None]).mean(axis=1)
    return share


def _by_density(E: Vector, settings: TopicSettings) -> Topics | None:
    """HDBSCAN's topics; None if they are none."""
    rng = np.random.default_rng(settings.seed)
    seen = np.arange(len(E))
    if len(E) > settings.sample:
        seen = np.sort(rng.choice(len(E), settings.sample, replace=False))
    part = E[seen]
    X = principal(part, min(settings.dimensions, E.shape[1]))
    least = max(5, min(50, round(0.005 * len(part))))
    for size in dict.fromkeys(max(5, least // divisor) for divisor in (1, 2, 4)):
        labels = _hdbscan(X, size, settings.selection)
        if (labels == NOISE).mean() > CORES:
            continue
        labels = _softened(part, labels, settings.membership)
        if _parted(labels):
            if len(seen) < len(E):
                whole = nearest(E, *centres(part, labels))
                whole[seen] = labels
                labels = whole
            return _described(E, labels, f"HDBSCAN, {settings.selection}, classes of {size} or more")
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


def _parted(labels: Labels) -> bool:
    """Whether these are topics, and not one giant class or mostly noise."""
    inside = labels[labels != NOISE]
    if len(inside) < (1 - MOST_NOISE) * len(labels) or len(np.unique(inside)) < 2:
        return False
    return bool(np.bincount(inside).max() <= LARGEST * len(inside))


def _softened(E: Vector, labels: Labels, membership: float) -> Labels:
    """Labels, with noise given to the topic that it belongs to by at least that share.

    The share of a topic is its part among all topics (softmax of the cosines to the centroids), times how near the
    chunk is compared with the topic's own outermost: else noise of no topic would be of one, where there are few.
    """
    noise = np.flatnonzero(labels == NOISE)
    if membership >= 1 or not len(noise):
        return labels
    centroids, floors = centres(E, labels)
    S = E[noise] @ centroids.T
    P = np.exp((S - S.max(axis=1, keepdims=True)) / SHARPNESS)
    P *= np.clip(S / np.maximum(floors, 1e-6), 0, 1) / P.sum(axis=1, keepdims=True)
    soft = labels.copy()
    soft[noise] = np.where(P.max(axis=1) >= membership, P.argmax(axis=1), NOISE)
    return soft


def _described(E: Vector, labels: Labels, method: str) -> Topics:
    return Topics(labels, *centres(E, labels), method)


def _far_apart(E: Vector, classes: int, rng: np.random.Generator) -> Vector:
    """First centres by k-means++ (Arthur and Vassilvitskii 2007), with cosine distances."""
    if not 1 <= classes <= len(E):
        raise ValueError(f"{classes} classes of {len(E)} vectors")
    chosen = [int(rng.integers(len(E)))]
    distance = np.full(len(E), np.inf)
    for _ in range(classes - 1):
        distance = np.minimum(distance, np.maximum(1 - E @ E[chosen[-1]], 0).astype(np.float64))
        total = distance.sum()
        chosen.append(int(rng.choice(len(E), p=distance / total) if total > 0 else rng.integers(len(E))))
    return E[chosen]


def _unit(X: npt.NDArray[np.floating]) -> Vector:
    found: Vector = (X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    return found
