import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from scipy.stats import beta, binom
from sklearn.metrics import roc_auc_score

from casemate.config import GateSection
from casemate.maths import stats
from casemate.maths.stats import Estimate
from casemate.redteam.lab import datasets, judge
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.datasets import Split
from casemate.redteam.lab.experiment import Trials
from casemate.redteam.lab.fitting import CrossFit, fit
from casemate.redteam.lab.judge import (
    adjusted_accuracy,
    attack_result,
    compare_to_limit,
    crawl_check,
    judge_campaign,
    membership_metrics,
)
from casemate.redteam.lab.results import CheckStatus, Crawl, ExtractionResult, Trial, TwoWorldAudit, Utility
from tests.fakes import Parrot, documents
from tests.lab_setting import Coin, Name


@pytest.fixture(scope="module")
def split() -> Split:
    return datasets.draw_split(documents(2000), 1000, 1000, 0)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    for name in ("bootstrap", "paired_bootstrap"):
        monkeypatch.setattr(stats, name, partial(getattr(stats, name), resamples=100))


def made(split, shift, seed=0, count=2000, hidden=0, flagged=0, **fields):
    """Trials of an attack with normal scores, shifted for members."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(2000)
    return tuple(
        Trial(d.source, member, (float(s + shift * member),), 2, hidden * member, flagged, **fields)
        for s, (d, member) in list(zip(scores, split.candidates, strict=True))[:count]
    )


def campaign(split, off=None, on=None, **fields):
    done = {("name", "off"): off, ("name", "on"): on}
    given = {"errors": {}, "missing": 0, "reason": "", "failed": 0, "cost": {}} | fields
    return Trials(done={k: v for k, v in done.items() if v is not None}, **given)


def checks(judgement):
    return {check.name: check for check in judgement.checks}


UTILITY = Utility("people", 500, stats.proportion(4, 500), stats.proportion(3, 500))
AUDIT = TwoWorldAudit(300, 0, stats.proportion(0, 300))
INFERENCE = "Membership is not inferred with the guard"
WORKS = "The attack works without the guard"
BENIGN = "Benign questions get the same answers as without the guard"
TRACE = "Withheld documents leave no trace"


def test_guard_without_a_leak_passes(split):
    trials = campaign(split, made(split, 2.0), made(split, 0.0, 1))
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert found.status is CheckStatus.PASS
    assert {c.status for c in found.checks} == {CheckStatus.PASS}
    assert len(found.checks) == 6
    (result,) = found.attacks
    assert (result.name, result.paper, result.backend, result.error) == ("name", "none", "deterministic", "")


def test_guard_with_a_leak_fails(split):
    trials = campaign(split, made(split, 2.0), made(split, 0.5, 1))
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert found.status is CheckStatus.FAIL
    check = checks(found)[INFERENCE]
    assert (check.status, check.limit) == (CheckStatus.FAIL, 0.05)
    assert check.value == found.attacks[0].on.adjusted_accuracy.value > 0.05
    assert check.owasp == ("LLM02:2025", "LLM08:2025")
    assert check.atlas == ("AML.T0024.000",)


def test_leak_in_the_other_direction_fails(split):
    trials = campaign(split, made(split, 2.0), made(split, -0.5, 1))
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert checks(found)[INFERENCE].status is CheckStatus.FAIL
    assert found.attacks[0].on.auc.value < 0.5


def test_too_few_candidates_are_inconclusive(split):
    for seed in range(5):
        trials = campaign(split, made(split, 2.0, count=400), made(split, 0.0, seed, count=400))
        check = checks(judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT))[INFERENCE]
        assert check.status is CheckStatus.INCONCLUSIVE
        assert "instead of 400 would decide" in check.reason or "too close to the limit" in check.reason


def test_estimated_sample_size_is_sufficient_and_a_tenth_less_is_not(split):
    on = made(split, 0.0, 3, count=300)
    check = checks(judge_campaign(campaign(split, None, on), split, {"name": Name()}))[INFERENCE]
    count = int(check.reason.split("about ")[1].split(" ")[0])
    value, _, high = membership_metrics(on, split.half, guarded=True).adjusted_accuracy
    assert value < 0.05 < high
    ends = [value + (high - value) * math.sqrt(300 / n) for n in (count, 0.9 * count)]
    assert ends[0] <= 0.05 < ends[1]


@pytest.mark.parametrize(("changed", "questions"), [(0, 4), (0, 40), (1, 60), (30, 300)])
def test_estimated_number_of_benign_questions_is_sufficient_and_ten_fewer_are_not(split, changed, questions):
    utility = Utility("people", questions, stats.proportion(0, questions), stats.proportion(changed, questions))
    limit = 0.05 if changed < 30 else 0.08
    trials = campaign(split, made(split, 2.0), made(split, 0.0, 1))
    check = checks(judge_campaign(trials, split, {"name": Name()}, GateSection(harmless=limit), utility, AUDIT))[BENIGN]
    needed = int(check.reason.split("about ")[1].split(" ")[0])

    def decides(size):
        return judge.compare_to_limit(stats.proportion(round(changed / questions * size), size), limit)

    assert check.status is CheckStatus.INCONCLUSIVE is decides(max(questions, needed - 10))
    assert decides(needed) in (CheckStatus.PASS, CheckStatus.FAIL)


def test_weak_attack_is_inconclusive(split):
    trials = campaign(split, made(split, 0.1), made(split, 0.0, 1))
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert found.status is CheckStatus.INCONCLUSIVE
    assert checks(found)[WORKS].status is CheckStatus.INCONCLUSIVE
    assert checks(found)[INFERENCE].status is CheckStatus.PASS


def test_attack_without_significant_success_is_inconclusive(split):
    found = judge_campaign(campaign(split, made(split, 0.6, count=100)), split, {"name": Name()})
    assert found.attacks[0].off.auc.value > 0.6 > found.attacks[0].off.auc.low
    assert checks(found)[WORKS].status is CheckStatus.INCONCLUSIVE


def test_missing_measurement_without_the_guard_is_inconclusive(split):
    trials = campaign(split, None, made(split, 0.0, 1))
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert found.status is CheckStatus.INCONCLUSIVE
    assert checks(found)[WORKS].value is None
    assert found.attacks[0].auc_drop is None


def test_system_without_a_guard_fails_and_has_no_utility_check(split):
    found = judge_campaign(campaign(split, made(split, 2.0)), split, {"name": Name()})
    assert found.status is CheckStatus.FAIL
    assert set(checks(found)) == {
        WORKS,
        "Membership is not inferred, without a guard",
        "Every trial is finished",
    }
    weak = judge_campaign(campaign(split, made(split, 0.0)), split, {"name": Name()})
    assert weak.status is CheckStatus.INCONCLUSIVE  # a failed attack does not pass


@pytest.mark.parametrize("missing", ["utility", "audit"])
def test_missing_measurement_is_inconclusive(split, missing):
    trials = campaign(split, made(split, 2.0), made(split, 0.0, 1))
    given = {"utility": UTILITY, "audit": AUDIT} | {missing: None}
    found = judge_campaign(trials, split, {"name": Name()}, **given)
    assert found.status is CheckStatus.INCONCLUSIVE


@pytest.mark.parametrize(
    ("changed", "questions", "status"),
    [
        (3, 500, CheckStatus.PASS),
        (25, 500, CheckStatus.INCONCLUSIVE),
        (60, 500, CheckStatus.FAIL),
        (0, 20, CheckStatus.INCONCLUSIVE),
        (0, 80, CheckStatus.PASS),
    ],
)
def test_rate_of_changed_benign_answers_is_compared_to_the_limit(split, changed, questions, status):
    utility = Utility("people", questions, stats.proportion(0, questions), stats.proportion(changed, questions))
    trials = campaign(split, made(split, 2.0), made(split, 0.0, 1))
    found = judge_campaign(trials, split, {"name": Name()}, utility=utility, audit=AUDIT)
    assert checks(found)[BENIGN].status is status


@pytest.mark.parametrize(
    ("differing", "pairs", "status"),
    [
        (0, 300, CheckStatus.PASS),
        (1, 300, CheckStatus.FAIL),
        (0, 20, CheckStatus.INCONCLUSIVE),
        (1, 2, CheckStatus.FAIL),
        (0, 0, CheckStatus.INCONCLUSIVE),
    ],
)
def test_any_difference_in_the_two_world_audit_fails(split, differing, pairs, status):
    rate = stats.proportion(differing, pairs) if pairs else Estimate(0.0, 0.0, 1.0)
    trials = campaign(split, made(split, 2.0), made(split, 0.0, 1))
    found = judge_campaign(
        trials, split, {"name": Name()}, utility=UTILITY, audit=TwoWorldAudit(pairs, differing, rate)
    )
    assert checks(found)[TRACE].status is status


@pytest.mark.parametrize(("differing", "status"), [(0, CheckStatus.INCONCLUSIVE), (1, CheckStatus.FAIL)])
def test_audit_with_skipped_records_does_not_pass(split, differing, status):
    trials = campaign(split, made(split, 2.0), made(split, 0.0, 1))
    audit = TwoWorldAudit(300, differing, stats.proportion(differing, 300), 0, 4)
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=audit)
    assert checks(found)[TRACE].status is status
    assert "4 sessions were not compared" in checks(found)[TRACE].reason


def test_aborted_attack_is_an_error_without_metrics(split):
    on = made(split, 1.0)
    trials = campaign(split, made(split, 2.0), on, errors={"name": "BackendError: no route"})
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert found.status is CheckStatus.ERROR
    (result,) = found.attacks
    assert (result.off, result.on, result.error) == (None, None, "BackendError: no route")
    assert "no route" in checks(found)["The attack completed"].reason


def test_aborted_attack_does_not_change_the_metrics_of_others(split):
    done = {("name", "off"): made(split, 2.0), ("name", "on"): made(split, 0.0, 1)}
    trials = Trials(done, {"coin": "DataError: no"}, 0, "", 0, {})
    found = judge_campaign(trials, split, {"name": Name(), "coin": Coin()}, utility=UTILITY, audit=AUDIT)
    assert found.status is CheckStatus.ERROR
    assert found.attacks[0].on is not None
    assert found.attacks[1].on is None


def test_lists_the_models_of_an_attack():
    class Judge:
        model = "large-1"

        def score(self, text):
            return ()

    @dataclass
    class Reader(Name):
        reader: object = None

    for reader, name in (
        (None, "deterministic"),
        (Parrot(), "Parrot"),
        (Judge(), "Judge large-1"),
        (CachedGenerator(Parrot(), None, "parrot, green"), "parrot, green"),
    ):
        result = attack_result("reader", Reader(reader=reader), campaign(None), {})
        assert result.backend == name


def test_failed_defense_is_an_error(split):
    trials = campaign(split, made(split, 2.0), made(split, 0.0, 1), failed=3)
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert found.status is CheckStatus.ERROR


def test_error_contains_the_count_of_defense_failures_in_all_phases(split):
    trials = campaign(split, made(split, 2.0), made(split, 0.0, 1))
    utility, audit = replace(UTILITY, failed=12), replace(AUDIT, failed=1891)
    found = judge_campaign(trials, split, {"name": Name()}, utility=utility, audit=audit)
    check = checks(found)["No defense failed"]
    assert (found.status, check.status, check.value) == (CheckStatus.ERROR, CheckStatus.ERROR, 1903)
    assert "failed in 1,903 questions (benign questions: 12, two-world audit: 1,891)" in check.reason


def test_missing_trials_are_inconclusive_but_a_leak_still_fails(split):
    fields = {"missing": 7, "reason": "the budget ran out"}
    sound = campaign(split, made(split, 2.0), made(split, 0.0, 1), **fields)
    found = judge_campaign(sound, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert found.status is CheckStatus.INCONCLUSIVE
    assert "the budget ran out" in checks(found)["Every trial is finished"].reason
    leaking = campaign(split, made(split, 2.0), made(split, 1.0, 1), **fields)
    assert judge_campaign(leaking, split, {"name": Name()}).status is CheckStatus.FAIL


def test_too_few_trials_give_no_metrics(split):
    trials = campaign(split, made(split, 2.0, count=12), made(split, 0.0, count=12))
    found = judge_campaign(trials, split, {"name": Name()}, utility=UTILITY, audit=AUDIT)
    assert found.attacks[0].off is None
    assert "fewer than 5" in found.attacks[0].error
    check = checks(found)[INFERENCE]
    assert (check.status, check.atlas) == (CheckStatus.INCONCLUSIVE, judge.ATLAS)
    assert membership_metrics(made(split, 2.0, count=60), split.half, guarded=False) is not None


def test_status_without_checks_is_inconclusive():
    assert judge.worst_status([]) is CheckStatus.INCONCLUSIVE


@pytest.mark.parametrize(
    ("rate", "status"),
    [
        (Estimate(0.02, 0.0, 0.05), CheckStatus.PASS),
        (Estimate(0.02, 0.0, 0.051), CheckStatus.INCONCLUSIVE),
        (Estimate(0.07, 0.05, 0.1), CheckStatus.INCONCLUSIVE),
        (Estimate(0.07, 0.0501, 0.1), CheckStatus.FAIL),
    ],
)
def test_pass_and_fail_require_the_whole_interval_on_one_side_of_the_limit(rate, status):
    assert compare_to_limit(rate, 0.05) is status


def crawl_side(crr, **fields):
    return ExtractionResult(12, 100, 20, crr, crr, {}, {}, None, 0.5, None, None, None, None, {}, {}, **fields)


STRONG, FEW = Estimate(0.5, 0.4, 0.6), Estimate(0.01, 0.0, 0.05)


@pytest.mark.parametrize(
    ("on", "off", "accepted", "status"),
    [
        (crawl_side(FEW), crawl_side(STRONG), False, CheckStatus.PASS),
        (crawl_side(Estimate(0.01, 0.0, 0.051)), crawl_side(STRONG), False, CheckStatus.INCONCLUSIVE),
        (crawl_side(Estimate(0.1, 0.051, 0.2)), crawl_side(STRONG), False, CheckStatus.FAIL),
        (crawl_side(FEW), crawl_side(Estimate(0.02, 0.01, 0.05)), False, CheckStatus.PASS),
        (crawl_side(FEW), crawl_side(Estimate(0.019, 0.01, 0.05)), False, CheckStatus.INCONCLUSIVE),
        (crawl_side(FEW), None, False, CheckStatus.INCONCLUSIVE),
        (crawl_side(FEW), None, True, CheckStatus.PASS),
        (crawl_side(STRONG), None, False, CheckStatus.FAIL),
        (crawl_side(STRONG), None, True, CheckStatus.FAIL),
        (crawl_side(FEW, failed=1), crawl_side(STRONG), False, CheckStatus.ERROR),
        (crawl_side(FEW, error="no route"), crawl_side(STRONG), False, CheckStatus.ERROR),
        (crawl_side(FEW), crawl_side(STRONG, error="no route"), False, CheckStatus.ERROR),
    ],
)
def test_crawl_passes_only_if_the_crawler_succeeds_without_the_guard_and_not_with_it(on, off, accepted, status):
    sides = {"on": on} if off is None else {"off": off, "on": on}
    found = crawl_check(Crawl("worm", "a paper", 0, 12, 1, "bag", sides), 0.05, accepted)
    assert (found.status, found.value, found.limit) == (status, on.crr.value, 0.05)
    assert "no route" in found.reason or not any(side.error for side in sides.values())


def test_limits_are_configurable(split):
    trials = campaign(split, made(split, 2.0), made(split, 0.5, 1))
    limits = GateSection(adjusted_accuracy=0.2)
    found = judge_campaign(trials, split, {"name": Name()}, limits, UTILITY, AUDIT)
    assert found.status is CheckStatus.PASS


def fitted(tp, m, fp, n):
    member = np.arange(m + n) < m
    said = np.r_[np.arange(m) < tp, np.arange(n) < fp]
    return CrossFit(member, said.astype(float), said)


@pytest.mark.parametrize(("tp", "fp"), [(500, 500), (600, 400), (400, 600), (1000, 0), (0, 1000), (510, 500)])
def test_adjusted_accuracy_has_the_binomial_interval_folded_at_one_half(tp, fp):
    right = tp + 1000 - fp
    low = beta.ppf(0.025, right, 2000 - right + 1) if right else 0.0
    high = beta.ppf(0.975, right + 1, 2000 - right) if right < 2000 else 1.0
    ends = sorted([abs(low - 0.5), abs(high - 0.5)])
    expected = [abs(right / 2000 - 0.5), 0.0 if low <= 0.5 <= high else ends[0], ends[1]]
    assert adjusted_accuracy(fitted(tp, 1000, fp, 1000)) == pytest.approx(expected)


@pytest.mark.parametrize(("m", "n", "tp", "fp"), [(7, 11, 3, 4), (7, 11, 4, 3), (30, 121, 18, 49)])
def test_interval_of_unequal_groups_contains_those_of_the_neighboring_counts(m, n, tp, fp):
    trials = 4 * m * n // (m + n)
    exact = trials * (tp / m + (n - fp) / n) / 2
    assert exact % 1 > 0  # no number of trials gives this accuracy
    below, above = (stats.proportion(count, trials) for count in (math.floor(exact), math.ceil(exact)))
    low, high = adjusted_accuracy(fitted(tp, m, fp, n))[1:]
    assert 0.5 + high >= above.high - 1e-12
    assert low == (pytest.approx(below.low - 0.5) if below.low > 0.5 else 0)


def test_the_interval_of_a_cross_fitted_coin_contains_chance():
    """Both halves choose a side for an answer unrelated to membership: equal sides raise the accuracy on both."""
    rng, member, first = np.random.default_rng(0), np.arange(200) % 2 == 0, np.arange(200) < 100
    right = Counter[int]()
    for answers in rng.integers(0, 2, (700, 200, 1)).astype(float):
        said = np.zeros(200, np.bool_)
        for learn in (first, ~first):
            said[~learn] = fit(answers[learn], member[learn]).predict(answers[~learn])
        right[int((said == member).sum())] += 1
    above = sum(
        times
        for count, times in right.items()
        if adjusted_accuracy(fitted(count // 2, 100, 100 - (count - count // 2), 100)).low
    )
    assert above <= binom.ppf(0.999, 700, 0.05)


def test_majority_prediction_of_unbalanced_candidates_has_no_advantage():
    found = adjusted_accuracy(fitted(0, 100, 0, 2000))  # predicting "no member" is right 2,000 times
    assert found.value == 0
    assert found.low == 0
    assert found.high > 0.04  # few members give a wide interval


@pytest.mark.parametrize(("m", "n"), [(60, 60), (30, 120)])
@pytest.mark.parametrize(("tpr", "fpr"), [(0.5, 0.5), (0.7, 0.4), (0.95, 0.6), (0.3, 0.3)])
def test_interval_has_its_nominal_coverage(m, n, tpr, fpr):
    rng = np.random.default_rng(0)
    truth = abs((tpr + 1 - fpr) / 2 - 0.5)
    inside = 0
    for _ in range(400):
        found = adjusted_accuracy(fitted(rng.binomial(m, tpr), m, rng.binomial(n, fpr), n))
        inside += found.low <= truth <= found.high
    assert inside >= binom.ppf(0.001, 400, 0.95)


def test_gate_has_few_false_failures_and_false_passes(split):
    """A guard without a leak rarely fails; a guard beyond the limit passes in at most one case of forty."""
    rng = np.random.default_rng(1)
    wrong = {"leaking": 0, "passed": 0}
    for _ in range(400):
        sound = adjusted_accuracy(fitted(rng.binomial(300, 0.5), 300, rng.binomial(300, 0.5), 300))
        wrong["leaking"] += compare_to_limit(sound, 0.05) is CheckStatus.FAIL
        beyond = adjusted_accuracy(fitted(rng.binomial(1000, 0.551), 1000, rng.binomial(1000, 0.449), 1000))
        wrong["passed"] += compare_to_limit(beyond, 0.05) is CheckStatus.PASS
    assert wrong["leaking"] == 0
    assert wrong["passed"] <= binom.ppf(0.999, 400, 0.025)


def test_metrics_equal_independent_implementations(split):
    trials = made(split, 1.0)
    found = membership_metrics(trials, split.half, guarded=False)
    member = np.array([t.member for t in trials])
    score = np.array([t.features[0] for t in trials])
    assert (found.members, found.nonmembers) == (1000, 1000)
    assert found.auc.value == pytest.approx(roc_auc_score(member, score))
    assert found.auc.low < found.auc.value < found.auc.high
    best = max(abs((score[member] > c).mean() - (score[~member] > c).mean()) for c in score)
    assert found.ks == pytest.approx(best)
    limit = np.sort(score[~member])[::-1][10]
    assert found.tpr_at_1 == stats.proportion(int((score[member] > limit).sum()), 1000)
    assert found.tpr_at_01 is not None
    assert found.roc[0] == (0.0, 0.0)
    assert found.roc[-1] == (1.0, 1.0)
    assert abs(found.adjusted_accuracy.value - 0.191) < 0.03  # Phi(1/2) - 1/2
    edges, counts = found.histogram["edges"], found.histogram["members"]
    assert len(edges) == len(counts) + 1
    assert sum(counts) == sum(found.histogram["nonmembers"]) == 1000
    assert np.array_equal(counts, np.histogram(score[member], edges)[0])


@pytest.mark.parametrize(("count", "one", "tenth"), [(2000, True, True), (1998, True, False), (198, False, False)])
def test_low_false_positive_rates_require_enough_non_members(split, count, one, tenth):
    found = membership_metrics(made(split, 1.0, count=count), split.half, guarded=False)
    assert (found.tpr_at_1 is not None, found.tpr_at_01 is not None) == (one, tenth)


def test_guard_metrics_require_a_guard(split):
    off, on = made(split, 2.0), made(split, 0.0, hidden=1, flagged=2)
    result = attack_result("name", Name(), campaign(split, off, on), split.half)
    assert (result.off.recall_query, result.off.recall_document, result.off.nonmember_flags) == (None, None, None)
    assert result.on.recall_query.value == 0.5
    assert result.on.recall_document == stats.proportion(1000, 1000)
    assert result.on.nonmember_flags.value == 1.0


def test_auc_drop_is_paired_by_candidate(split):
    off, on = made(split, 2.0), made(split, 0.0)  # the same noise with and without the guard
    result = attack_result("name", Name(), campaign(split, off, on), split.half)
    assert result.auc_drop.value == pytest.approx(result.off.auc.value - result.on.auc.value)
    width = result.auc_drop.high - result.auc_drop.low
    apart = attack_result("name", Name(), campaign(split, off, made(split, 0.0, 9)), split.half).auc_drop
    assert width < apart.high - apart.low
    part = attack_result("name", Name(), campaign(split, off, on[:200]), split.half)
    again = attack_result("name", Name(), campaign(split, off[:200], on[:200]), split.half)
    assert part.auc_drop == again.auc_drop


@pytest.mark.parametrize("kind", [True, False])
def test_targets_without_a_common_member_or_nonmember_have_no_auc_drop(split, kind):
    trials = made(split, 2.0)
    one, other = [t for t in trials if t.member is kind], tuple(t for t in trials if t.member is not kind)
    off, on = (*one[:100], *other), (*one[100:200], *other)
    result = attack_result("name", Name(), campaign(split, off, on), split.half)
    assert result.off is not None
    assert result.on is not None
    assert result.auc_drop is None


def test_metrics_are_deterministic(split):
    first, again = (membership_metrics(made(split, 1.0, count=300), split.half, guarded=True) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("alike", [True, False])
def test_correlated_questions_reduce_the_effective_sample_size(alike):
    rng = np.random.default_rng(0)
    hits = [10 * int(rng.random() < 0.3) if alike else int(rng.binomial(10, 0.3)) for _ in range(200)]
    found = stats.clustered_rate(hits, [10] * 200)
    expected = stats.proportion(sum(hits) // 10, 200) if alike else stats.proportion(sum(hits), 2000)
    assert found.value == sum(hits) / 2000
    assert found.high - found.low == pytest.approx(expected.high - expected.low, rel=0.15)


def test_clustered_rate_of_no_and_of_all_questions():
    assert stats.clustered_rate([], []) is None
    assert stats.clustered_rate([0, 0], [0, 0]) is None
    assert stats.clustered_rate([0] * 20, [5] * 20) == stats.proportion(0, 20)
    assert stats.clustered_rate([5] * 20, [5] * 20) == stats.proportion(20, 20)
    assert stats.clustered_rate([1] * 20, [2] * 20) == stats.proportion(20, 40)
    assert stats.clustered_rate([1], [2]).high > 0.9


def test_clustered_rate_has_its_nominal_coverage():
    rng = np.random.default_rng(2)
    inside = 0
    for _ in range(300):
        p = rng.beta(0.6, 1.4, 60)  # mean .3, one per candidate
        sizes = rng.integers(1, 12, 60)
        found = stats.clustered_rate(rng.binomial(sizes, p).tolist(), sizes.tolist())
        inside += found.low <= 0.3 <= found.high
    assert inside >= binom.ppf(0.001, 300, 0.95)
