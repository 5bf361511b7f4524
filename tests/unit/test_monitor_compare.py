import asyncio
import itertools
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm

from casemate.backends.target_answers import partial_answer
from casemate.errors import ConfigError
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Deviation
from casemate.monitor.canaries.run import CanaryRunner
from casemate.monitor.drift.compare import (
    Conclusion,
    compare_results,
    compare_targets,
    paired_interval,
    paired_p,
    rank_biased_overlap,
)
from casemate.protocols import Target
from tests.fakes import BagOfWords

AT = datetime(2026, 3, 1, tzinfo=UTC)


def results(passes, name="c", asked=None, **fields):
    """Results of canaries, given the number of passes of each."""
    asked = asked or max([*passes, 1])
    return [
        CanaryResult(
            f"{name}{i}",
            f"r{n}",
            AT,
            CanaryStatus.PASS if n < count else CanaryStatus.FAIL,
            () if n < count else (Deviation("answer_mismatch", ""),),
            **({"documents": ("a", "b"), "text": "yes"} | fields),
        )
        for i, count in enumerate(passes)
        for n in range(asked)
    ]


class ScriptedTarget(Target):
    """Answers by a function of the question, and records the order."""

    def __init__(self, answer, order=None, tells=frozenset()):
        self.answer, self.tells, self.order = answer, tells, order if order is not None else []

    async def ask(self, query):
        self.order.append((self, query.text))
        answer = self.answer(query.text)
        if isinstance(answer, Exception):
            raise answer
        return partial_answer(answer)


def canaries(count):
    return [Canary(id=f"c{i}", query=f"question {i}", expected_answer="yes") for i in range(count)]


def compared(first, second, count=10, **options):
    return asyncio.run(compare_targets(CanaryRunner(canaries(count), first), second, **options))


class TestPairedTest:
    @given(st.lists(st.integers(-3, 3), max_size=9))
    def test_p_value_equals_enumeration_of_signs(self, differences):
        total = abs(sum(differences))
        signs = list(itertools.product((-1, 1), repeat=len(differences)))
        far = sum(abs(sum(s * d for s, d in zip(sign, differences, strict=True))) >= total for sign in signs)
        assert paired_p(differences) == pytest.approx(far / len(signs))

    @given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 7))
    def test_equals_mcnemar_for_equal_sizes(self, gains, losses, size):
        expected = binomtest(gains, gains + losses).pvalue if gains + losses else 1.0
        assert paired_p([size] * gains + [-size] * losses + [0] * 5) == pytest.approx(expected)

    def test_type_i_error_rate_is_at_most_the_significance_level(self):
        rng = np.random.default_rng(3)
        hits = 0
        for _ in range(2000):
            flake = rng.uniform(0, 0.6, 30)
            hits += paired_p((rng.binomial(5, flake) - rng.binomial(5, flake)).tolist()) <= 0.05
        assert 0.02 < hits / 2000 <= 0.055

    def test_detects_a_difference(self):
        rng = np.random.default_rng(4)
        hits = sum(
            paired_p((rng.binomial(5, np.full(50, 0.8)) - rng.binomial(5, np.full(50, 0.95))).tolist()) <= 0.05
            for _ in range(200)
        )
        assert hits > 190


class TestInterval:
    @given(st.integers(1, 400))
    def test_width_without_any_difference(self, count):
        z2 = norm.ppf(0.975) ** 2
        assert paired_interval(0, 0, count) == pytest.approx((-z2 / (count + z2), z2 / (count + z2)))

    @given(st.integers(1, 60), st.data())
    def test_contains_the_difference_and_is_antisymmetric(self, count, data):
        gain = data.draw(st.floats(0, count))
        loss = data.draw(st.floats(0, count - gain))
        low, high = paired_interval(gain, loss, count)
        assert -1 <= low <= (gain - loss) / count <= high <= 1
        assert paired_interval(loss, gain, count) == pytest.approx((-high, -low), abs=1e-6)

    def test_equals_the_score_interval_by_numerical_search(self):
        def chi(delta, gain, loss, count):  # the score statistic with a searched nuisance parameter
            q = np.linspace(max(0, -delta), (1 - delta) / 2, 200_001)[1:-1]
            same = 1 - 2 * q - delta
            logs = gain * np.log(q + delta) + loss * np.log(q) + (count - gain - loss) * np.log(same)
            best = q[np.nanargmax(logs)]
            return (gain - loss - count * delta) ** 2 / (count * (2 * best + delta - delta**2))

        for gain, loss, count in ((9, 3, 32), (4, 1, 20), (2, 10, 50)):
            for end in paired_interval(gain, loss, count):
                assert chi(end, gain, loss, count) == pytest.approx(norm.ppf(0.975) ** 2, rel=1e-3)

    def test_covers_the_true_difference(self):
        rng, missed = np.random.default_rng(6), 0
        for _ in range(400):
            a, b = rng.binomial(1, 0.9, 60), rng.binomial(1, 0.8, 60)
            found = compare_results(results(a.tolist(), asked=1), results(b.tolist(), asked=1)).difference
            missed += not found.low <= -0.1 <= found.high
        assert missed <= 28  # 5 % of 400 plus random variation


class TestConclusion:
    def test_worse_and_better(self):
        good, bad = results([5] * 40), results([0] * 10 + [5] * 30)
        found = compare_results(good, bad)
        assert found.conclusion is Conclusion.WORSE
        assert found.difference.value == pytest.approx(-0.25)
        assert found.difference.low < -0.25 < found.difference.high < 0
        assert found.rates == (1.0, 0.75)
        assert compare_results(bad, good).conclusion is Conclusion.BETTER
        assert compare_results(bad, good).difference.value == -found.difference.value

    def test_same_requires_enough_canaries(self):
        assert compare_results(results([5] * 50), results([5] * 50)).conclusion is Conclusion.SAME
        assert compare_results(results([5] * 20), results([5] * 20)).conclusion is Conclusion.UNCLEAR

    def test_two_flips_of_fifty_are_inconclusive_but_listed(self):
        found = compare_results(results([5] * 50), results([0, 0] + [5] * 48))
        assert found.conclusion is Conclusion.UNCLEAR
        assert [(p.canary, p.flip) for p in found.flips] == [("c0", Conclusion.WORSE), ("c1", Conclusion.WORSE)]
        assert found.flips[0].deviations == ("answer_mismatch",)

    def test_flaky_canaries_are_not_listed_as_flips(self):
        assert compare_results(results([5, 2]), results([1, 4], asked=5)).flips == ()

    def test_empty_results_are_inconclusive(self):
        found = compare_results([], [])
        assert (found.conclusion, found.p, found.difference.low, found.difference.high) == (
            Conclusion.UNCLEAR,
            1.0,
            -1.0,
            1.0,
        )
        assert found.overlap is found.cosine is None

    def test_excludes_and_lists_canaries_with_errors(self):
        second = results([5] * 10)
        second[0] = CanaryResult("c0", "r0", AT, CanaryStatus.ERROR, error="late")
        found = compare_results(results([5] * 10), second)
        assert found.left_out == {"c0": (0, 1)}
        assert len(found.pairs) == 9


class TestSimilarity:
    def test_measures_overlap_of_contexts_and_cosine_of_answers(self):
        one = results([5], documents=("a", "b"), text="seven crowns")
        other = results([5], documents=("a", "c"), text="ninety marks")
        found = compare_results(one, other, BagOfWords())
        assert found.overlap == pytest.approx((1 + 0.9 * 0.5) / 1.9)
        E = BagOfWords().embed(["seven crowns", "ninety marks"])
        assert found.cosine == pytest.approx(float(E[0] @ E[1]))
        assert compare_results(one, one, BagOfWords()).cosine == 1.0
        assert compare_results(one, other).cosine is None

    def test_compares_sources_if_there_are_no_ids(self):
        one, other = results([1], documents=(), sources=("s",)), results([1], documents=(), sources=("t",))
        assert compare_results(one, other).overlap == 0.0
        assert compare_results(results([1], documents=()), results([1], documents=())).overlap is None

    @given(st.lists(st.sampled_from("abcdefg"), unique=True), st.lists(st.sampled_from("abcdefg"), unique=True))
    def test_overlap_equals_its_definition(self, one, other):
        depth = max(len(one), len(other))
        weights = [0.9**d for d in range(depth)]
        shared = sum(w * len([x for x in one[: d + 1] if x in other[: d + 1]]) / (d + 1) for d, w in enumerate(weights))
        assert rank_biased_overlap(one, other) == pytest.approx(shared / sum(weights) if depth else 1.0)
        assert rank_biased_overlap(one, other) == rank_biased_overlap(other, one)

    def test_overlap_weights_high_ranks_most(self):
        top, last = rank_biased_overlap("abcde", "xbcde"), rank_biased_overlap("abcde", "abcdx")
        assert 0 < top < last < 1


class TestAsking:
    def test_asks_both_targets_equally_often_in_alternation(self):
        order = []
        first, second = ScriptedTarget(lambda q: "yes", order), ScriptedTarget(lambda q: "yes", order)
        found = compared(first, second, count=3, repeats=4)
        assert found.repeats == 4
        target_order = [order[i * 3][0] for i in range(8)]
        assert target_order == [first, second, second, first, first, second, second, first]
        assert {(target, text): order.count((target, text)) for target, text in order} == {
            (target, f"question {i}"): 4 for target in (first, second) for i in range(3)
        }

    def test_detects_a_worse_target(self):
        second = ScriptedTarget(lambda q: "no" if q in {f"question {i}" for i in range(8)} else "yes")
        found = compared(ScriptedTarget(lambda q: "yes"), second)
        assert found.conclusion is Conclusion.WORSE
        assert {p.canary for p in found.flips} == {f"c{i}" for i in range(8)}

    def test_unreachable_target_gives_no_pairs(self):
        found = compared(ScriptedTarget(lambda q: "yes"), ScriptedTarget(lambda q: OSError("gone")), repeats=2)
        assert found.pairs == ()
        assert found.left_out == {f"c{i}": (0, 2) for i in range(10)}
        assert found.conclusion is Conclusion.UNCLEAR

    def test_rejects_unsupported_expectations(self):
        unsupported = [Canary(id="c", query="why", expected_documents=("d",))]
        with pytest.raises(ConfigError, match="needs a target that reports ids"):
            asyncio.run(
                compare_targets(CanaryRunner(unsupported, ScriptedTarget(lambda q: "x")), ScriptedTarget(lambda q: "x"))
            )
