import gzip
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from sklearn.metrics import balanced_accuracy_score, ndcg_score, roc_auc_score

from benchmarks.ranking import ndcg_at_k, recall_at_k
from casemate.maths import metrics

few = st.lists(st.integers(-3, 3) | st.sampled_from([-math.inf, math.inf]), min_size=1, max_size=15)
"""Scores with many ties and infinities."""
counts = st.integers(0, 30)
normal = np.random.default_rng(0).standard_normal


def pair_share(pairs, members, nonmembers):
    return sum(pairs(a, b) for a in members for b in nonmembers) / (len(members) * len(nonmembers))


@given(few, few)
def test_auc_equals_the_share_of_ordered_pairs(a, b):
    assert metrics.auc(a, b) == pytest.approx(pair_share(lambda x, y: (x > y) + (x == y) / 2, a, b))
    assert metrics.auc(a, b) + metrics.auc(b, a) == pytest.approx(1)


def test_auc_equals_scikit_learn_and_the_normal_distribution():
    a, b = normal(4000) + 1, normal(3000)
    assert metrics.auc(a, b) == pytest.approx(roc_auc_score([1] * 4000 + [0] * 3000, np.concatenate([a, b])))
    assert metrics.auc(a, b) == pytest.approx(scipy_stats.norm.cdf(1 / math.sqrt(2)), abs=0.015)


@pytest.mark.parametrize(
    "metric", [metrics.auc, metrics.roc_curve, metrics.ks_statistic, lambda a, b: metrics.tpr_at_fpr(a, b, 0.1)]
)
@pytest.mark.parametrize(
    ("a", "b", "says"),
    [([], [1], "members"), ([1], [], "members"), ([1, math.nan], [1], "NaN"), ([1], [math.nan], "NaN"), (1, [1], "()")],
)
def test_rejects_empty_or_nan_scores(metric, a, b, says):
    with pytest.raises(ValueError, match=says.replace("()", r"\(\)")):
        metric(a, b)


@given(few, few)
def test_roc_curve_is_monotone_and_its_area_is_auc(a, b):
    x, y = np.array(metrics.roc_curve(a, b)).T
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert (np.diff(x) >= 0).all()
    assert (np.diff(y) >= 0).all()
    assert np.trapezoid(y, x) == pytest.approx(metrics.auc(a, b))
    for t in {*a, *b}:  # each threshold is a point
        point = np.mean([s >= t for s in b]), np.mean([s >= t for s in a])
        assert np.isclose([x, y], np.array(point)[:, None]).all(axis=0).any()


def test_roc_curve_is_thinned_and_keeps_its_shape():
    a, b = normal(5000) + 1, normal(5000)
    points = metrics.roc_curve(a, b)
    assert 150 < len(points) <= metrics.ROC_POINTS
    assert np.trapezoid([y for _, y in points], [x for x, _ in points]) == pytest.approx(metrics.auc(a, b), abs=1e-3)
    for x, y in points[1:-1]:
        threshold = np.sort(b)[::-1][round(x * 5000) - 1] if x else math.inf
        assert y == pytest.approx(np.mean(a >= threshold), abs=0.01)


@given(few, few, st.floats(0, 0.999))
def test_threshold_of_tpr_at_fpr_is_the_smallest_allowed(a, b, fpr):
    found, threshold = metrics.tpr_at_fpr(a, b, fpr)
    allowed = math.floor(fpr * len(b) + 1e-9)
    assert found == sum(s > threshold for s in a)
    assert sum(s > threshold for s in b) <= allowed
    if threshold > -math.inf:
        assert sum(s > np.nextafter(threshold, -math.inf) for s in b) > allowed


def test_tpr_at_fpr_rounds_binary_fractions_correctly():
    assert 0.29 * 100 < 29
    assert metrics.tpr_at_fpr([70.5], range(100), 0.29) == (1, 70.0)


@pytest.mark.parametrize("fpr", [-0.1, 1, math.nan])
def test_rejects_fpr_out_of_range(fpr):
    with pytest.raises(ValueError, match="must be in"):
        metrics.tpr_at_fpr([1], [1], fpr)


@given(few, few)
def test_ks_statistic_is_the_maximum_distance_of_cdfs_and_of_the_roc_curve(a, b):
    gaps = [abs(sum(s <= t for s in a) / len(a) - sum(s <= t for s in b) / len(b)) for t in (*a, *b)]
    assert metrics.ks_statistic(a, b) == pytest.approx(max(gaps))
    assert metrics.ks_statistic(a, b) == pytest.approx(max(abs(x - y) for x, y in metrics.roc_curve(a, b)))


def test_ks_statistic_equals_scipy():
    a, b = normal(300) + 1, normal(200)
    assert metrics.ks_statistic(a, b) == pytest.approx(scipy_stats.ks_2samp(a, b).statistic)


def test_ks_statistic_ranks_infinities():
    assert metrics.ks_statistic([math.inf, math.inf, 1], [0, 1, -math.inf]) == pytest.approx(2 / 3)


@given(st.floats(0, 1))
def test_adjusted_accuracy_is_the_distance_from_chance(a):
    assert metrics.adjusted_accuracy(a) == pytest.approx(abs(a - 0.5))


@pytest.mark.parametrize("a", [-0.1, 1.1, math.nan])
def test_rejects_adjusted_accuracy_out_of_range(a):
    with pytest.raises(ValueError, match="accuracy"):
        metrics.adjusted_accuracy(a)


@given(counts, counts, counts, counts)
def test_balanced_accuracy_equals_scikit_learn(tp, fp, tn, fn):
    truth, said = [1] * tp + [0] * fp + [0] * tn + [1] * fn, [1] * tp + [1] * fp + [0] * tn + [0] * fn
    if tp + fn and tn + fp:
        assert metrics.balanced_accuracy(tp, fp, tn, fn) == pytest.approx(balanced_accuracy_score(truth, said))
    else:
        with pytest.raises(ValueError, match="members and non-members"):
            metrics.balanced_accuracy(tp, fp, tn, fn)


def k2_p_value(x):
    """D'Agostino's and Anscombe and Glynn's transformations, written out; K2 follows chi2(2), so p = exp(-K2/2)."""
    n, z = len(x), x - x.mean()
    m2, m3, m4 = (np.mean(z**k) for k in (2, 3, 4))
    skew, kurtosis = m3 / m2**1.5, m4 / m2**2
    y = skew * math.sqrt((n + 1) * (n + 3) / (6 * (n - 2)))
    beta = 3 * (n * n + 27 * n - 70) * (n + 1) * (n + 3) / ((n - 2) * (n + 5) * (n + 7) * (n + 9))
    w2 = math.sqrt(2 * (beta - 1)) - 1
    z1 = math.asinh(y / math.sqrt(2 / (w2 - 1))) / math.sqrt(math.log(w2) / 2)
    mean = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    t = (kurtosis - mean) / math.sqrt(variance)
    g = 6 * (n * n - 5 * n + 2) / ((n + 7) * (n + 9)) * math.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    a = 6 + 8 / g * (2 / g + math.sqrt(1 + 4 / g**2))
    z2 = ((1 - 2 / (9 * a)) - np.cbrt((1 - 2 / a) / (1 + t * math.sqrt(2 / (a - 4))))) / math.sqrt(2 / (9 * a))
    return math.exp(-(z1**2 + z2**2) / 2)


@pytest.mark.parametrize("n", [20, 100, 3000])
def test_normality_p_value_equals_its_definition(n):
    rng = np.random.default_rng(n)
    for x in (rng.standard_normal(n), 5 + 3 * rng.standard_normal(n), rng.uniform(size=n)):
        assert metrics.normality_p_value(x) == pytest.approx(k2_p_value(x), rel=1e-6, abs=1e-12)
    assert metrics.normality_p_value(rng.exponential(size=max(n, 100))) < 1e-3


@pytest.mark.parametrize("x", [range(19), [1.0] * 30, [*range(30), math.nan], [*range(30), math.inf], 3])
def test_normality_p_value_rejects_invalid_samples(x):
    with pytest.raises(ValueError, match="finite numbers, not all equal"):
        metrics.normality_p_value(x)


def naive_bleu(reference, candidate):
    """BLEU by its definition, from explicit n-gram counts."""
    r, c, p = reference.split(), candidate.split(), []
    for n in range(1, 5):
        left = Counter(tuple(r[i : i + n]) for i in range(len(r) - n + 1))
        hits, all_ = 0, max(len(c) - n + 1, 1)
        for i in range(len(c) - n + 1):
            if left[tuple(c[i : i + n])] > 0:
                left[tuple(c[i : i + n])] -= 1
                hits += 1
        p.append((hits or 0.1) / all_)
    penalty = 1 if len(c) > len(r) else math.exp(1 - len(r) / len(c))
    return penalty * math.prod(p) ** 0.25


sentences = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join)


@given(sentences, sentences)
def test_bleu_equals_the_definition(reference, candidate):
    want = naive_bleu(reference, candidate) if set(reference.split()) & set(candidate.split()) else 0
    assert metrics.bleu(reference, candidate) == pytest.approx(want)


def test_bleu_is_1_for_equal_and_0_for_disjoint_words():
    text = "Swine are the primary reservoir, of course."
    assert metrics.bleu(text, text.upper()) == pytest.approx(1)
    assert (
        metrics.bleu(text, "nothing") == metrics.bleu(text, "") == metrics.bleu("", text) == metrics.bleu("", "") == 0
    )
    assert metrics.bleu("a b c d e f g h", "a b c d") == pytest.approx(math.exp(-1))


def test_bleu_separates_members_with_the_published_auc(data):
    with gzip.open(data / "mia_riddle/nfcorpus_s2mia.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    yes, no = (
        [metrics.bleu(r["text"], r["llm_responses"][0]) for r in rows if r["mem"] == mem] for mem in ("yes", "no")
    )
    assert (len(yes), len(no)) == (250, 250)
    assert metrics.auc(yes, no) == pytest.approx(0.745, abs=0.01)


@pytest.mark.parametrize(
    ("answer", "golds", "matches"),
    [
        ("It was Paris.", ["Paris"], True),
        ("the U.S. government", ["The US"], True),
        ("Rock-and-roll, 1956", ["rock and roll"], False),  # SQuAD removes the hyphen without a replacement
        ("I know nothing", ["no"], False),
        ("No.", ["no"], True),
        ("New York City", ["york  new"], False),
        ("a city", ["London", "city"], True),
        ("anything", [], False),
        ("anything", ["", "the", "?!"], False),
        ("", ["x"], False),
    ],
)
def test_exact_match_compares_whole_normalized_words(answer, golds, matches):
    assert metrics.exact_match(answer, golds) is matches


@pytest.mark.parametrize(
    ("passages", "golds", "found"),
    [
        (["the Rhine", "the Danube."], ["Danube"], True),
        (["the Rhine", "the Danube"], ["Rhine Danube"], False),  # not across passages
        (["the Rhine"], ["Danube", "rhine"], True),
        ([], ["Danube"], False),
        (["the Rhine"], [], False),
    ],
)
def test_answer_recall_searches_each_passage(passages, golds, found):
    assert metrics.answer_recall(iter(passages), golds) is found


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20).filter(any), st.integers(1, 25), st.randoms())
def test_ndcg_equals_scikit_learn(gains, k, random):
    ids = [str(i) for i in range(len(gains))]
    random.shuffle(ids)
    position = {d: -rank for rank, d in enumerate(ids)}
    want = ndcg_score(np.array([gains]), np.array([[position[str(i)] for i in range(len(gains))]]), k=k)
    assert ndcg_at_k(ids, {str(i): float(g) for i, g in enumerate(gains)}, k) == pytest.approx(want)


@given(st.lists(st.integers(0, 30), unique=True), st.sets(st.integers(0, 30), min_size=1), st.integers(1, 40))
def test_recall_at_k_equals_naive_counting(ranking, relevant, k):
    want = sum(1 for i, d in enumerate(ranking) if i < k and d in relevant) / len(relevant)
    assert recall_at_k([str(d) for d in ranking], {str(d) for d in relevant}, k) == pytest.approx(want)
