"""A collection with six topics, its index, and an untrained re-indexing of it."""

from __future__ import annotations

import numpy as np

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.maths.clustering import topic_centroids
from casemate.reindexing.space import Reindexing, chunk_key, unique_keys
from casemate.types import Document
from tests.fakes import BagOfWords

TOPICS = 6
VOCABULARY = [[f"t{t}w{i}" for i in range(14)] for t in range(TOPICS)]


def topical(count=180, seed=0, first=0):
    """Documents with words of topic i % 6 and some words of the next topic. Only document i has the word
    ``only<i>``.
    """
    rng = np.random.default_rng(seed)

    def text(i):
        own, other = VOCABULARY[i % TOPICS], VOCABULARY[(i + 1) % TOPICS]
        return " ".join([f"only{i}", *rng.choice(own, 9), *rng.choice(other, 5)])

    return [Document(f"d{i}", text(i)) for i in range(first, first + count)]


def indexed(folder, documents, embedder=None):
    """Returns an index of these documents and its embedder."""
    embedder = embedder or BagOfWords()
    index = SqliteIndex(folder / "index.db")
    index.open(embedder.fingerprint, embedder.dim)
    index.add(documents, embedder.embed([d.content for d in documents]))
    return index, embedder


def drawn(documents, embedder, mode="adapter", seed=0, **fields):
    """A re-indexing with the true topics and a random map with a large effect."""
    E = embedder.embed([d.content for d in documents])
    labels = np.array([int(d.id[1:]) % TOPICS for d in documents])
    keys, ordered = unique_keys([chunk_key(d) for d in documents], labels)
    rng, dim = np.random.default_rng(seed), embedder.dim
    weights = {"W1": rng.standard_normal((dim, dim)), "b1": np.zeros(dim), "W2": rng.standard_normal((dim, dim)) / dim}
    weights = {n: w.astype(np.float32) for n, w in (weights | {"b2": np.zeros(dim)}).items()} if mode != "gate" else {}
    known = {"weights": weights, "penalty": 0.3 if mode == "gate" else 0.0} | fields
    return Reindexing(mode, "default", embedder.fingerprint, *topic_centroids(E, labels), keys, ordered, **known)
