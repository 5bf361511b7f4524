import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.config import PluginSpec
from casemate.errors import ConfigError, DataError
from casemate.guard.defenses.similarity_floor import SimilarityFloor, floor_for
from casemate.guard.guard import Guard
from casemate.plugins import build
from casemate.rag.pipeline import Rag
from casemate.testing import DEFENSE_OBLIGATIONS
from casemate.types import Action, Document, Hit, Query, Retrieval, SimilarityStats
from tests.fakes import BagOfWords, Parrot, documents

SCORES = st.lists(st.floats(-1, 1), max_size=12).map(lambda scores: sorted(scores, reverse=True))


def found(scores):
    hits = tuple(Hit(Document(f"d{i}", "text", source=f"s{i // 2}"), score) for i, score in enumerate(scores))
    return Retrieval(hits, SimilarityStats(100, 0.1, 0.1))


def decided(floor, scores, k=5):
    return asyncio.run(SimilarityFloor(floor=floor).on_retrieve(Query("q", k=k), found(scores)))


@given(st.floats(-1, 1), SCORES, st.integers(1, 12))
def test_context_has_the_hits_at_or_above_the_floor(floor, scores, k):
    outcome = decided(floor, scores, k)
    assert [h.score for h in outcome.value.hits[:k]] == [s for s in scores[:k] if s >= floor]
    assert outcome.value.similarity_stats == found(scores).similarity_stats


@given(st.floats(-1, 1), SCORES, st.integers(1, 12))
def test_question_is_flagged_when_its_context_loses_a_hit(floor, scores, k):
    verdict = decided(floor, scores, k).verdict
    if not scores:
        assert verdict is None
        return
    loses = any(s < floor for s in scores[:k])
    assert verdict.flagged == (verdict.score > verdict.threshold) == loses
    assert verdict.action == (Action.HIDE if loses else Action.NONE)
    assert verdict.hidden == (tuple(f"d{i}" for i, s in enumerate(scores) if s < floor) if loses else ())
    assert verdict.evidence["kept"] == sum(s >= floor for s in scores[:k])


def test_hits_beyond_a_full_context_remain():
    assert len(decided(0.5, [0.9, 0.8, 0.3, 0.2], k=2).value.hits) == 4
    assert len(decided(0.5, [0.9, 0.8, 0.3, 0.2], k=3).value.hits) == 2


def test_no_floor_changes_nothing_and_is_undecided():
    outcome = decided(None, [0.3, -0.9])
    assert len(outcome.value.hits) == 2
    assert (outcome.verdict.flagged, outcome.verdict.threshold) == (False, None)
    assert "no floor is set" in outcome.verdict.evidence["undecided"]


def test_satisfies_the_defense_contract_except_for_two_obligations():
    """By design it shortens the context, and hides any number of sources."""
    exempt = {"_hides_what_it_says", "_leaves_a_full_context"}
    kept = [o for o in DEFENSE_OBLIGATIONS if o.__name__ not in exempt]
    assert len(kept) == len(DEFENSE_OBLIGATIONS) - len(exempt)
    for obligation in kept:
        asyncio.run(obligation(SimilarityFloor(floor=0.28)))


def test_off_topic_question_gets_no_context(tmp_path):
    index = SqliteIndex(tmp_path / "i.db")
    guard = Guard(Rag(BagOfWords(), index, Parrot()), [SimilarityFloor(floor=0.4)])
    asyncio.run(guard.add(documents(50)))
    near, far = (asyncio.run(guard.ask(Query(text, k=3))) for text in ("only7 amber heron", "zebra yacht"))
    index.close()
    assert 0 < len(near.retrieval.hits) and min(h.score for h in near.retrieval.hits) >= 0.4
    assert far.retrieval.hits == () and far.verdicts[0].flagged


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60), st.floats(0.01, 0.6))
def test_floor_for_is_the_highest_conformal_floor(similarities, share):
    """Oracle: exhaustive search. At most the given share of n + 1 lies below the floor."""
    n = len(similarities)
    allowed = [s for s in similarities if sum(t < s for t in similarities) + 1 <= share * (n + 1) + 1e-9]
    if allowed:
        assert floor_for(similarities, share) == max(allowed)
    else:
        with pytest.raises(DataError, match=f"{n} benign questions"):
            floor_for(similarities, share)


def test_floor_for_affects_at_most_its_share_of_further_questions():
    rng = np.random.default_rng(7)
    shares = [np.mean(rng.normal(size=400) < floor_for(rng.normal(size=199), 0.05)) for _ in range(200)]
    assert 0.04 < np.mean(shares) <= 0.052


@pytest.mark.parametrize(("count", "needed"), [(0, 99), (98, 99)])
def test_too_few_questions_for_a_share_are_an_error(count, needed):
    with pytest.raises(DataError, match=f"{count} benign questions; a share of 0.01 needs at least {needed}"):
        floor_for([0.5] * count)
    assert floor_for([0.5] * needed) == 0.5


def test_invalid_share_and_similarities_are_rejected():
    with pytest.raises(ConfigError, match="share is 0"):
        floor_for([0.5] * 200, 0)
    with pytest.raises(DataError, match="not finite"):
        floor_for([float("nan")] * 200)


@pytest.mark.parametrize("floor", [1.1, -2, float("nan")])
def test_floor_outside_the_cosine_range_is_rejected(floor):
    with pytest.raises(ConfigError, match="similarity_floor.floor"):
        SimilarityFloor(floor=floor)


def test_floor_comes_from_the_configuration():
    assert build("defense", PluginSpec(use="similarity_floor", floor=0.31)).floor == 0.31
