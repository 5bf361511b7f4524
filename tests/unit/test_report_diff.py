import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.maths.metrics import auc
from casemate.maths.stats import Estimate
from casemate.redteam.lab.results import (
    AttackResult,
    AttackSession,
    Check,
    CheckStatus,
    MembershipMetrics,
    SessionSide,
    TwoWorldAudit,
)
from casemate.redteam.reporting.compare import ReportChange, ReportDiff, compare_results, render_diff_text
from casemate.redteam.reporting.text import redact
from casemate.reports.format import number
from casemate.text.tokens import words
from tests.campaigns import campaign

LOW, HIGH = Estimate(0.1, 0.05, 0.15), Estimate(0.3, 0.25, 0.35)
TOUCHING = Estimate(0.2, 0.15, 0.25)


def attack(off=None, **figures):
    baseline = MembershipMetrics(100, 100, Estimate(0.5, 0.45, 0.55), LOW, LOW, LOW, 0.1, LOW, LOW, LOW)
    return AttackResult("mba", "", "deterministic", off or baseline, replace(baseline, **figures), None)


def campaign_with(**changes):
    return replace(campaign(attacks=(attack(),), checks=(), utility=None, audit=None), **changes)


def campaign_with_metrics(**figures):
    return campaign_with(attacks=(attack(**figures),))


# direction of changes


@pytest.mark.parametrize("name", ["adjusted_accuracy", "tpr_at_1", "tpr_at_01"])
def test_a_higher_attack_metric_is_worse(name):
    change = compare_results(campaign_with_metrics(**{name: HIGH}), campaign_with_metrics(**{name: LOW}))
    assert len(change.worse) == 1 and change.better == () and change.exit_code == 1
    back = compare_results(campaign_with_metrics(**{name: LOW}), campaign_with_metrics(**{name: HIGH}))
    assert len(back.better) == 1 and back.worse == () and back.exit_code == 0


@pytest.mark.parametrize("name", ["recall_query", "recall_document"])
def test_a_lower_recall_of_the_guard_is_worse(name):
    assert len(compare_results(campaign_with_metrics(**{name: LOW}), campaign_with_metrics(**{name: HIGH})).worse) == 1
    assert len(compare_results(campaign_with_metrics(**{name: HIGH}), campaign_with_metrics(**{name: LOW})).better) == 1


@pytest.mark.parametrize(
    ("before", "after", "worse", "better"),
    [
        (Estimate(0.5, 0.45, 0.55), Estimate(0.8, 0.75, 0.85), 1, 0),
        (Estimate(0.5, 0.45, 0.55), Estimate(0.2, 0.15, 0.25), 1, 0),  # below one half leaks as much as above
        (Estimate(0.8, 0.75, 0.85), Estimate(0.2, 0.15, 0.25), 0, 0),
        (Estimate(0.2, 0.15, 0.25), Estimate(0.5, 0.45, 0.55), 0, 1),
        (Estimate(0.52, 0.5, 0.54), Estimate(0.55, 0.53, 0.57), 0, 0),
        (Estimate(0.52, 0.51, 0.53), Estimate(0.5, 0.4, 0.6), 0, 0),  # a wide interval around one half is not a leak
    ],
)
def test_an_auc_farther_from_one_half_is_worse(before, after, worse, better):
    change = compare_results(campaign_with_metrics(auc=after), campaign_with_metrics(auc=before))
    assert (len(change.worse), len(change.better)) == (worse, better)


def test_touching_intervals_are_no_change():
    change = compare_results(campaign_with_metrics(tpr_at_1=TOUCHING), campaign_with_metrics(tpr_at_1=LOW))
    assert change.worse == () and change.exit_code == 0 and change.compared == 6


def test_benign_cost_and_audit_leaks_are_compared():
    baseline, bad = campaign().utility, replace(campaign().utility, flagged=HIGH)
    assert (
        compare_results(campaign_with(utility=bad), campaign_with(utility=baseline)).worse[0].what
        == "benign questions: documents withheld"
    )
    kept, lost = replace(baseline, unentitled_lost=LOW), replace(baseline, unentitled_lost=HIGH)
    worse = compare_results(campaign_with(utility=lost), campaign_with(utility=kept)).worse
    assert [change.what for change in worse] == ["benign questions: answers lost without entitlement"]
    leak = TwoWorldAudit(100, 30, HIGH)
    assert (
        compare_results(
            campaign_with(audit=leak), campaign_with(audit=TwoWorldAudit(100, 0, Estimate(0, 0, 0.03)))
        ).exit_code
        == 1
    )


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=2, max_size=2))
def test_swapping_the_reports_turns_worse_into_better(values):
    a, b = (campaign_with_metrics(auc=Estimate(sorted(v)[1], min(v), max(v))) for v in values)
    forwards, backwards = compare_results(a, b), compare_results(b, a)
    assert [c.what for c in forwards.worse] == [c.what for c in backwards.better]
    assert not (forwards.worse and forwards.better)


# comparability of campaigns


@pytest.mark.parametrize("key", ["seed", "corpus_hash", "split", "k"])
def test_a_changed_seed_split_or_corpus_is_listed_first_and_is_not_comparable(key):
    change = compare_results(campaign_with(evidence={key: 1}), campaign_with(evidence={key: 2}))
    assert change.settings == (ReportChange(key, "2", "1"),) and change.exit_code == 3
    assert render_diff_text(change).startswith("Not comparable")


def test_evidence_that_depends_on_the_guard_is_a_note():
    evidence = [{"members_in_context_despite_guard": n, "questions_about_members": n} for n in (5, 94)]
    change = compare_results(*(campaign_with(evidence=one) for one in evidence))
    assert change.settings == () and len(change.notes) == 2 and change.exit_code == 0


def campaign_with_scores(scores, split="a", cut=0):
    """A campaign of 40 candidates with a score each, guard on. The first half are members."""
    sides = [{"off": SessionSide(True, 1, 0, 0, 1.0), "on": SessionSide(True, 1, 0, 0, score)} for score in scores]
    found = tuple(AttackSession("mba", f"document {i}", i < 20, side) for i, side in enumerate(sides))
    return campaign_with(evidence={"split": split}, sessions=found[cut:], sessions_total=len(found))


def test_campaigns_with_the_same_split_have_a_paired_comparison():
    rng = np.random.default_rng(0)
    scores = np.where(np.arange(40) < 20, 0.5, 0.0) + rng.standard_normal(40)
    better, before = campaign_with_scores(scores + np.where(np.arange(40) < 20, 0.5, 0.0)), campaign_with_scores(scores)
    (change,) = compare_results(better, before).paired
    was, now = (auc(x[:20], x[20:]) for x in (scores, [s.sides["on"].score for s in better.sessions]))
    assert (change.what, change.before) == ("mba, guard on: AUC", number(was))
    assert change.after.startswith(f"{number(now)}, difference {number(now - was)} [.")  # the interval is above zero
    assert compare_results(better, before).exit_code == 0
    assert "Paired, over the same candidates:\n  mba, guard on" in render_diff_text(compare_results(better, before))
    shuffled = replace(before, sessions=before.sessions[::-1])
    assert compare_results(better, shuffled).paired == (change,)


@pytest.mark.parametrize("few", [slice(19, 40), slice(0, 21)])
def test_a_single_member_or_non_member_gives_no_paired_comparison(few):
    scores = np.arange(40.0)
    reports = (campaign_with_scores(scores), campaign_with_scores(-scores))
    two = slice(few.start - (few.start == 19), few.stop + (few.stop == 21))
    cut = [[replace(r, sessions=r.sessions[s], sessions_total=len(r.sessions[s])) for r in reports] for s in (few, two)]
    assert [len(compare_results(*pair).paired) for pair in cut] == [0, 1]


@pytest.mark.parametrize("missing", [None, math.nan])
def test_reports_with_missing_scores_have_no_paired_comparison(missing):
    scores = np.arange(40.0)
    report = campaign_with_scores([missing, *scores[1:]])
    assert not compare_results(report, campaign_with_scores(-scores)).paired
    assert not compare_results(campaign_with_scores(-scores), report).paired


@pytest.mark.parametrize("other", [{"split": "b"}, {"split": None}, {"cut": 1}])
def test_campaigns_with_other_splits_or_sessions_have_no_paired_comparison(other):
    scores = np.arange(40.0)
    assert compare_results(campaign_with_scores(-scores), campaign_with_scores(scores)).paired
    assert not compare_results(campaign_with_scores(-scores, **other), campaign_with_scores(scores)).paired
    assert not compare_results(campaign_with_scores(scores), campaign_with_scores(scores)).paired


def test_changed_versions_and_configurations_are_notes():
    new, old = ({"configuration_hash": v, "versions": {"casemate": v, "model": v}} for v in "ab")
    change = compare_results(campaign_with(evidence=new), campaign_with(evidence=old))
    assert change.settings == () and len(change.notes) == 3 and change.exit_code == 0


def test_a_changed_backend_or_number_of_candidates_is_a_setting():
    other = attack(members=50)
    change = compare_results(campaign_with(attacks=(replace(other, backend="qwen"),)), campaign_with())
    assert [c.what for c in change.settings] == ["mba: backend", "mba: candidates"]


def test_a_weaker_attack_makes_the_reports_not_comparable():
    strong = attack(replace(attack().off, auc=Estimate(0.98, 0.96, 0.99)), auc=Estimate(0.8, 0.75, 0.85))
    change = compare_results(campaign_with(attacks=(attack(),)), campaign_with(attacks=(strong,)))
    assert "strength" in change.settings[0].what and change.exit_code == 3


# appeared and disappeared results


def test_an_attack_without_metrics_is_listed_as_disappeared():
    failed_attack = AttackResult("mba", "", "deterministic", None, None, error="down")
    change = compare_results(campaign_with(attacks=(failed_attack,)), campaign_with())
    assert change.disappeared == ("mba, guard on",) and change.exit_code == 3
    assert compare_results(campaign_with(), campaign_with(attacks=(failed_attack,))).appeared == ("mba, guard on",)


def test_a_single_missing_metric_is_listed_as_disappeared():
    change = compare_results(campaign_with_metrics(tpr_at_01=None), campaign_with())
    assert change.disappeared == ("mba, guard on: TPR at 0.1 % FPR",)


def test_campaigns_without_a_guard_are_compared_with_the_guard_off():
    bare = replace(attack(replace(attack().off, adjusted_accuracy=HIGH)), on=None)
    change = compare_results(campaign_with(attacks=(bare,)), campaign_with(attacks=(replace(attack(), on=None),)))
    assert [c.what for c in change.worse] == ["mba, guard off: adjusted accuracy"]


@pytest.mark.parametrize(
    ("before", "after", "field", "code"),
    [
        (CheckStatus.PASS, CheckStatus.FAIL, "worse", 1),
        (CheckStatus.INCONCLUSIVE, CheckStatus.FAIL, "worse", 1),
        (None, CheckStatus.FAIL, "worse", 1),
        (CheckStatus.FAIL, CheckStatus.PASS, "better", 0),
        (CheckStatus.PASS, CheckStatus.INCONCLUSIVE, "disappeared", 3),
        (CheckStatus.FAIL, CheckStatus.ERROR, "disappeared", 3),
        (CheckStatus.PASS, None, "disappeared", 3),
        (CheckStatus.ERROR, CheckStatus.PASS, "appeared", 0),
        (CheckStatus.PASS, CheckStatus.PASS, None, 0),
        (CheckStatus.FAIL, CheckStatus.FAIL, None, 0),
    ],
)
def test_a_changed_check_status_is_classified(before, after, field, code):
    old, new = (campaign_with(checks=(Check("holds", s, 0.1, 0.1, ""),) if s else ()) for s in (before, after))
    change = compare_results(new, old)
    changed = {name for name in ("worse", "better", "appeared", "disappeared") if getattr(change, name)}
    assert changed == ({field} if field else set())
    assert change.exit_code == code


def test_campaigns_without_common_results_are_not_comparable():
    assert compare_results(campaign_with(attacks=()), campaign_with(attacks=())).exit_code == 3
    assert ReportDiff(compared=1).exit_code == 0


def test_the_text_lists_all_changes_and_ends_with_the_exit_code():
    text = render_diff_text(
        compare_results(
            campaign_with_metrics(tpr_at_1=HIGH, recall_query=HIGH, tpr_at_01=None), campaign_with(evidence={"seed": 1})
        )
    )
    order = ["Not comparable", "seed: 1 -> 7", "Worse", "TPR at 1 % FPR: 10 % [5.0, 15] -> 30 % [25, 35]", "Better"]
    order += ["Disappeared", "exit code 1"]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert "->" not in render_diff_text(
        compare_results(campaign_with(), campaign_with())
    ) and "exit code 0" in render_diff_text(compare_results(campaign_with(), campaign_with()))


def test_the_text_contains_no_terminal_control_characters():
    change = compare_results(campaign_with(evidence={"seed": "\x1b[2J"}), campaign_with(evidence={"seed": "\x9b\r8"}))
    assert not set(render_diff_text(change)) & set("\x1b\x9b\r")


# redaction

OWN = ["Does the passage mention", "yes", "no", "I don't know", "to", "12 weeks"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Does the passage mention Ada Byron?", "Does the passage mention ▇×2?"),
        ("Yes, Ada took 20 mg.\nNo: I don’t know", "Yes, ▇×4.\nNo: I don’t know"),
        ("Ada went to the ward", "▇×5"),  # a function word between two redacted names is redacted too
        ("1: yes 2: no", "▇×1: yes ▇×1: no"),
        ("12 weeks", "▇×1 weeks"),  # numbers are redacted
        ("", ""),
        ("ada@example.org, #7", "▇×3"),
        ("Ⅷ €٣ 患者 yes", "▇×3 yes"),
        ("don't won't", "don't ▇×1"),
        ("\x1b[31myes", "[▇×1"),
    ],
)
def test_redaction_keeps_only_the_words_of_the_attack(text, shown):
    assert redact(text, OWN) == shown


def test_a_single_phrase_is_not_treated_as_letters():
    assert redact("a yes b", "yes") == "▇×1 yes ▇×1"


@given(st.text(max_size=300))
def test_redaction_without_attack_words_leaves_no_letter_or_digit(text):
    left = redact(text, [])
    assert not any(c.isalnum() for c in left.replace("▇", "").translate(str.maketrans("", "", "0123456789")))
    assert sum(int(n) for n in re.findall(r"▇×(\d+)", left)) >= bool(words(text))


@given(
    st.lists(st.sampled_from([*"alpha beta gamma delta yes no the to 7 mention".split(), "\n", "$", "x1"]), max_size=30)
)
def test_redaction_keeps_only_attack_words_without_digits(parts):
    left = redact(" ".join(parts), OWN)
    own = {w for phrase in OWN for w in words(phrase)} - {"12"}
    shown = re.sub(r"▇×\d+", " ", left)
    assert set(words(shown)) <= own
    for word in ("yes", "no", "mention"):  # and keeps all of them
        assert words(shown).count(word) == parts.count(word)
