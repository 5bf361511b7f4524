import asyncio

import numpy as np
import pytest
from scipy.stats import norm

from casemate.errors import ConfigError
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.moments import CorpusMoments
from casemate.types import Action, Document, Hit, Query, Retrieval, SimilarityStats


def algorithm_1(E, q, rho, form):
    """Oracle: the paper's algorithm by a scan, with the given form of the threshold."""
    S = E.astype(np.float64) @ q.astype(np.float64)
    target = int(S.argmax())
    rest, n = np.delete(S, target), len(S)
    c, scale = -np.log(-np.log(1 - rho)), np.sqrt(2 * np.log(n))
    z = {
        "exact": norm.ppf((1 - rho) ** (1 / n)),
        "paper": scale + c / scale,
        "gumbel": scale - (np.log(np.log(n)) + np.log(4 * np.pi)) / (2 * scale) + c / scale,
    }[form]
    tau = rest.mean() + rest.std() * z
    return bool(S[target] > tau), target, tau


def retrieval(E, q, k=10):
    S = E.astype(np.float64) @ q.astype(np.float64)
    hits = tuple(Hit(Document(str(i), "text"), float(S[i])) for i in np.argsort(-S, kind="stable")[:k])
    return Retrieval(hits, CorpusMoments.of(E).similarity_stats(q))


@pytest.mark.parametrize("form", ["paper", "gumbel", "exact"])
def test_decisions_equal_algorithm_1_by_scan_on_1000_random_queries(form):
    rng = np.random.default_rng(11)
    centres = rng.standard_normal((12, 48))
    E = (centres[rng.integers(0, 12, 600)] + rng.standard_normal((600, 48))).astype(np.float32)
    E /= np.linalg.norm(E, axis=1, keepdims=True)
    near = E[rng.integers(0, 600, 1000)] * rng.uniform(0, 1, (1000, 1))
    Q = (near + 0.12 * rng.standard_normal((1000, 48))).astype(np.float32)
    Q /= np.linalg.norm(Q, axis=1, keepdims=True)
    mirabel, flags = Mirabel(mode=form), 0
    for q in Q:
        flagged, target, tau = algorithm_1(E, q, 0.05, form)
        verdict = mirabel.judge(retrieval(E, q))
        assert (verdict.flagged, verdict.evidence["target"]) == (flagged, str(target))
        assert abs(verdict.threshold - tau) < 1e-9
        flags += flagged
    assert 100 < flags < 900  # both decisions occur often


def hits(*pairs):
    return tuple(Hit(Document(f"{source}#{i}", "text", source=source), s) for i, (source, s) in enumerate(pairs))


def act(mirabel, found):
    return asyncio.run(mirabel.on_retrieve(Query("q"), found))


FLAGGED = Retrieval(hits(("a", 0.9), ("b", 0.3), ("a", 0.25), ("c", 0.2)), SimilarityStats(1000, 0.1, 0.05))


def test_hides_and_reports_every_chunk_of_the_target():
    value, verdict, _ = act(Mirabel(mode="paper"), FLAGGED)
    assert [h.document.source for h in value.hits] == ["b", "c"]
    assert (verdict.flagged, verdict.action, verdict.hidden) == (True, Action.HIDE, ("a#0", "a#2"))
    assert verdict.score == 0.9
    assert verdict.threshold < 0.9


def test_benign_query_is_unchanged():
    ordinary = Retrieval(hits(("a", 0.2), ("b", 0.15)), SimilarityStats(1000, 0.1, 0.05))
    value, verdict, _ = act(Mirabel(mode="paper"), ordinary)
    assert value == ordinary
    assert (verdict.flagged, verdict.action, verdict.hidden) == (False, Action.NONE, ())


def test_score_at_the_threshold_is_not_flagged():
    """Algorithm 1 compares with >, so a corpus of equal documents is not flagged."""
    same = Retrieval(hits(*[(str(i), 0.5) for i in range(40)]), SimilarityStats(40, 0.5, 0.0))
    assert act(Mirabel(mode="paper"), same).verdict.flagged is False


@pytest.mark.parametrize("n", [1, 2, 29])
def test_small_corpus_has_no_decision(n):
    small = Retrieval(hits(("a", 0.99)), SimilarityStats(n, 0.1, 0.05))
    value, verdict, _ = act(Mirabel(mode="paper"), small)
    assert value == small
    assert (verdict.flagged, verdict.threshold) == (False, None)
    assert verdict.evidence["undecided"] == f"too few chunks ({n}; a decision needs at least 30)"


def test_empty_search_result_in_a_large_corpus_has_the_reason_no_chunk_found():
    verdict = act(Mirabel(mode="paper"), Retrieval((), SimilarityStats(100, 0.1, 0.05))).verdict
    assert verdict.evidence["undecided"] == "no chunk was found"


def test_empty_corpus_has_no_decision():
    empty = Retrieval((), SimilarityStats(0, 0, 0))
    assert act(Mirabel(mode="paper"), empty).verdict.evidence["undecided"].startswith("too few chunks (0;")


def test_rounding_among_equal_documents_is_not_flagged():
    rng = np.random.default_rng(2)
    E = np.tile(rng.standard_normal(24).astype(np.float32), (40, 1))
    E /= np.linalg.norm(E, axis=1, keepdims=True)
    for q in rng.standard_normal((200, 24)).astype(np.float32):
        assert not Mirabel(mode="exact").judge(retrieval(E, q / np.linalg.norm(q))).flagged


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("mode", "papper", "known: calibrated, paper, gumbel, exact"),
        ("significance", 1.5, "above 0 and below 1"),
        ("min_documents", 1, "at least 3"),
        ("session_hours", 1e9, "at most 876000"),
    ],
)
def test_rejects_options_out_of_range(option, value, says):
    with pytest.raises(ConfigError, match=says):
        Mirabel(**{option: value})
