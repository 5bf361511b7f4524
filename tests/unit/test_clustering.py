import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from casemate.errors import ConfigError, DataError, MissingExtra
from casemate.maths import clustering
from casemate.maths.clustering import (
    NOISE,
    TopicSettings,
    assign_topics,
    find_topics,
    knn_impurity,
    other_topic_share,
    silhouette,
    spherical_kmeans,
)


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def clustered(clusters=8, each=40, noise=60, spread=0.35, dim=64, seed=0):
    """Vectors around cluster centers with noise, in random order, and the true cluster of each (noise: -1)."""
    rng = np.random.default_rng(seed)
    centers = unit(rng.standard_normal((clusters, dim)))
    true = rng.permutation([*np.repeat(np.arange(clusters), each), *[-1] * noise])
    x = spread * rng.standard_normal((len(true), dim)) / np.sqrt(dim) * 4
    x[true >= 0] = centers[true[true >= 0]] + x[true >= 0] / 4
    return unit(x), true


def purity(labels, true):
    """Cluster purity: share of labeled vectors that belong to the majority class of their cluster."""
    kept = [np.bincount(true[labels == c] + 1).max() for c in np.unique(labels[labels != NOISE])]
    return sum(kept) / (labels != NOISE).sum()


@pytest.mark.parametrize("selection", ["leaf", "eom"])
def test_hdbscan_finds_topics_and_noise(selection):
    E, true = clustered()
    found = find_topics(E, TopicSettings(selection=selection))
    assert found.method.startswith("HDBSCAN")
    assert len(found.centroids) == 8
    assert purity(found.labels, true) > 0.95
    assert (found.labels[true >= 0] != NOISE).mean() > 0.95
    assert (found.labels[true < 0] == NOISE).mean() > 0.75
    np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1, atol=1e-5)


def test_k_means_is_the_fallback_without_topics():
    E = unit(np.random.default_rng(1).standard_normal((400, 48)))
    found = find_topics(E)
    assert found.method == "k-means, 14 classes"  # sqrt(400 / 2)
    assert set(found.labels) == set(range(14))


def test_topics_of_a_sample_extend_to_a_large_collection():
    E, true = clustered(each=120)
    found = find_topics(E, TopicSettings(sample=300))
    assert len(found.centroids) == 8
    assert purity(found.labels, true) > 0.98
    assert (found.labels[true >= 0] != NOISE).mean() > 0.85  # a tenth is outside the radius of its topic


def test_topics_are_deterministic_for_a_seed():
    E, _ = clustered(each=60)
    settings = TopicSettings(sample=200, seed=3)
    assert np.array_equal(find_topics(E, settings).labels, find_topics(E, settings).labels)


def test_higher_membership_threshold_gives_more_noise():
    E, _ = clustered()
    shares = [find_topics(E, TopicSettings(membership=m)).noise for m in (0.0, 0.2, 1.0)]
    assert shares[0] == 0 < shares[1] < shares[2]


@given(st.integers(2, 30), st.integers(1, 12), st.integers(0, 1000))
def test_k_means_has_no_empty_cluster(n, classes, seed):
    E = unit(np.random.default_rng(seed).standard_normal((n, 5)))
    labels = spherical_kmeans(E, min(classes, n), seed)
    assert set(labels) == set(range(min(classes, n)))


def test_k_means_cannot_be_improved_by_moving_one_vector():
    E, _ = clustered(noise=0)
    labels = spherical_kmeans(E, 8, seed=0)
    centroids = unit(np.array([E[labels == c].mean(axis=0) for c in range(8)]))
    assert np.array_equal((E @ centroids.T).argmax(axis=1), labels)


def test_k_means_handles_duplicates():
    E = unit(np.ones((30, 4)))
    assert set(spherical_kmeans(E, 3, seed=0)) == {0, 1, 2}


@given(st.integers(0, 1000))
def test_vector_is_assigned_to_the_nearest_topic_within_its_radius(seed):
    rng = np.random.default_rng(seed)
    E, centroids = unit(rng.standard_normal((9, 4))), unit(rng.standard_normal((3, 4)))
    floors = rng.uniform(-1, 1, 3).astype(np.float32)
    for x, label in zip(E, assign_topics(E, centroids, floors), strict=True):
        best = max(range(3), key=lambda c: x @ centroids[c])
        assert label == (best if x @ centroids[best] >= floors[best] else NOISE)


def test_all_vectors_are_noise_without_topics():
    assert (
        assign_topics(np.ones((2, 3), np.float32), np.empty((0, 3), np.float32), np.empty(0, np.float32)).tolist()
        == [-1] * 2
    )


@given(st.integers(0, 1000))
def test_silhouette_equals_its_definition(seed):
    rng = np.random.default_rng(seed)
    E, labels = unit(rng.standard_normal((20, 4))), np.array([0, 0, 1, 1, 2, *rng.integers(-1, 3, 15)])
    centers = {c: unit(E[labels == c].astype(float).mean(axis=0)[None])[0] for c in range(3)}
    each = []
    for x, label in zip(E, labels, strict=True):
        if label == NOISE:
            continue
        a = 1 - x @ centers[label]
        b = min(1 - x @ centers[c] for c in range(3) if c != label)
        each.append((b - a) / max(a, b))
    assert silhouette(E, labels) == pytest.approx(np.mean(each), abs=1e-5)
    gaps = np.where(labels > 0, labels + 7, labels)
    assert silhouette(E, gaps) == pytest.approx(silhouette(E, labels))


@pytest.mark.parametrize("labels", [[-1, -1, -1], [0, 0, 0], [0, -1, 0]])
def test_silhouette_is_0_for_one_topic(labels):
    assert silhouette(unit(np.eye(3)), np.array(labels)) == 0


@given(st.integers(0, 1000))
def test_knn_impurity_counts_neighbors_of_other_topics(seed):
    rng = np.random.default_rng(seed)
    E, labels = unit(rng.standard_normal((15, 4))), rng.integers(-1, 3, 15)
    each = []
    for i in np.flatnonzero(labels != NOISE):
        near = sorted((j for j in range(15) if j != i), key=lambda j: -(E[i] @ E[j]))[:3]
        each.append(np.mean([labels[j] != labels[i] for j in near]))
    assert knn_impurity(E, labels, k=3) == pytest.approx(np.mean(each) if each else 0)
    assert other_topic_share(E @ E.T, labels, labels, 15) == pytest.approx([np.mean(labels != c) for c in labels])


def test_principal_components_equal_scikit_learn():
    E, _ = clustered()
    our_components, reference_components = (
        clustering.principal_components(E, 5),
        PCA(5).fit_transform(E.astype(np.float64)),
    )
    for a, b in zip(our_components.T, reference_components.T, strict=True):
        np.testing.assert_allclose(a, b * np.sign(a @ b), atol=1e-8)


def test_too_few_chunks_are_refused():
    with pytest.raises(DataError, match="at least 20"):
        find_topics(unit(np.ones((19, 3))))


@pytest.mark.parametrize("wrong", [{"method": "dbscan"}, {"selection": "flat"}, {"sample": 3}, {"membership": 1.5}])
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TopicSettings(**wrong)


def test_missing_scikit_learn_error_names_the_extra(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    E, _ = clustered()
    with pytest.raises(MissingExtra, match="pip install 'casemate\\[torch\\]'"):
        find_topics(E)
    assert find_topics(E, TopicSettings(method="kmeans")).noise == 0  # k-means needs no scikit-learn
