"""Alerts from opening to recovery, and their texts."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import DataError
from casemate.monitor.alerts.alert import (
    Alert,
    AlertPhase,
    acknowledge_alert,
    alert_from_event,
    alert_states,
    alert_to_event,
    close_alert,
    make_alert_id,
    open_alerts,
    raise_alert,
)
from casemate.monitor.alerts.alerting_store import alerts_for_event
from casemate.monitor.alerts.messages import render_alert, summarize_alerts
from casemate.monitor.alerts.rules import RunContext, alert_events, drift_alert, last_passes, new_documents, new_sources
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Deviation, Severity
from casemate.monitor.trends.cusum import AlarmLimits, CusumState, WatchedCanary, WatchedSet, analyze_run
from casemate.monitor.trends.sequential_tests import FlakeCounts
from casemate.types import Event
from tests.unit.monitor_stores import InMemoryEventStore

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STATUS_OF_LETTER = {"P": CanaryStatus.PASS, "F": CanaryStatus.FAIL, "E": CanaryStatus.ERROR}
NO_REPEATS = AlarmLimits(max_repeats=0)


def watched(n=6, severity=Severity.MEDIUM):
    return WatchedSet("clinic", tuple(WatchedCanary(f"c{i}", severity, FlakeCounts(100, 0)) for i in range(n)))


class RunSequence:
    """Consecutive runs with their alerts."""

    def __init__(self, set_=None, limits=NO_REPEATS):
        self.set, self.limits = set_ or watched(), limits
        self.state, self.store, self.number, self.history = CusumState(), InMemoryEventStore(), 0, []

    def run(self, letters, documents=None, sources=None, withheld=()):
        """Executes one run; returns the changes of alerts as (phase, alert)."""
        at = NOON + timedelta(hours=self.number)
        self.number += 1
        results = [
            CanaryResult(
                f"c{i}",
                f"clinic@{at:%Y-%m-%dT%H:%M:%SZ}",
                at,
                STATUS_OF_LETTER[x],
                (Deviation("answer_mismatch", f"c{i} says something else"),) if x == "F" else (),
                documents=() if sources else (documents or {}).get(i, (f"old{i}",)),
                refused=x == "F",
                words=3 if x == "F" else 7,
                sources=(sources or {}).get(i, (f"https://example.org/old{i}",)) if sources is not None else (),
                withheld=tuple(withheld) if x == "F" else (),
            )
            for i, x in enumerate(letters)
        ]
        before, analysis = self.state, analyze_run(self.state, results, self.set, self.limits)
        new = new_documents(self.history, results, self.set) if analysis.alarmed else {}
        states = alert_states(self.store.events).values()
        named = new_sources(self.history, results, self.set)
        passed = last_passes(self.history, results) if analysis.alarmed else {}
        run = RunContext(before, analysis, results, new, named, passed)
        events = alert_events(states, run, self.set, self.limits)
        for e in events:
            self.store.append(e)
        self.state = analysis.state
        self.history += results
        return [(AlertPhase(e.body["phase"]), alert_from_event(e)) for e in events]

    def runs(self, *words, documents=None):
        return [self.run(word, documents) for word in words]


def test_failing_canary_has_one_alert_until_it_recovers():
    sequence = RunSequence()
    changes = sequence.runs(*["P" * 6] * 3, *["FPPPPP"] * 7, *["P" * 6] * 5)
    happened = [(number, phase) for number, found in enumerate(changes) for phase, _ in found]
    assert happened == [(5, AlertPhase.OPENED), (12, AlertPhase.RECOVERED)]
    opened = next(alert for found in changes for _, alert in found)
    assert (opened.kind, opened.canaries, opened.severity) == ("changed", ("c0",), Severity.MEDIUM)
    assert opened.since == NOON + timedelta(hours=3)
    evidence = "c0 failed in 3 of 3 runs since 2026-03-01 15:00 UTC; baseline 0 of 100; evidence "
    assert opened.changes[0].startswith(evidence) and opened.changes[0].endswith(" (alarm at 12,000)")
    assert "answer mismatch: 1 canary" in opened.changes
    assert "c0: c0 says something else" in opened.changes


def test_alert_lists_changed_documents_and_the_command_that_lists_all():
    changed = tuple(f"fees{i}.md" for i in range(12))
    first, *others = watched().canaries
    sequence = RunSequence(WatchedSet("clinic", (replace(first, changed=changed), *others)))
    ((_, alert),) = [x for found in sequence.runs(*["P" * 6] * 3, *["FPPPPP"] * 4) for x in found]
    assert alert.changed == changed
    text = render_alert(alert, AlertPhase.OPENED).plain
    assert "Documents that were changed or removed:\n- fees0.md\n" in text
    assert "- and 2 more; 'casemate canary alerts --json' lists all" in text
    drift = drift_alert("clinic", "canaries", [], NOON, changed)
    assert drift.changed == tuple(sorted(changed)) and drift.changes[-1].startswith("12 sources were changed")


def test_severity_of_a_persistent_failure_increases_once():
    sequence = RunSequence()
    changes = sequence.runs(*["P" * 6] * 3, *["FPPPPP"] * 15)
    updates = [alert for found in changes for phase, alert in found if phase is AlertPhase.UPDATED]
    assert [a.severity for a in updates] == [Severity.HIGH]
    assert updates[0].changes == (
        "severity raised from medium to high: c0 failed in 8 of its last 10 runs",
        "c0 failed in 8 of 8 runs since 2026-03-01 15:00 UTC; baseline 0 of 100",
        "answer mismatch: 1 canary",
        "c0: c0 says something else",
    )


def test_simultaneous_failures_share_an_alert_of_higher_severity():
    changes = RunSequence().runs("P" * 6, *["FFFPPP"] * 4)
    ((phase, alert),) = [x for found in changes for x in found]
    assert phase is AlertPhase.OPENED
    assert set(alert.canaries) == {"c0", "c1", "c2"}
    assert alert.severity.rank > Severity.MEDIUM.rank


def test_failures_with_the_same_new_document_share_an_alert():
    sequence = RunSequence()
    sequence.runs(*["P" * 6] * 3)
    changes = sequence.runs(*["FPPPPP"] * 3, documents={0: ("poison", "old0")})
    changes += sequence.runs(*["FPPFPP"] * 3, documents={0: ("poison", "old0"), 3: ("old3", "poison")})
    happened = [x for found in changes for x in found]
    assert [p for p, _ in happened] == [AlertPhase.OPENED, AlertPhase.UPDATED]
    (_, opened), (_, joined) = happened
    assert opened.id == joined.id
    assert opened.documents == joined.documents == ("poison",)
    assert joined.canaries == ("c0", "c3")


def test_failure_with_another_new_document_opens_another_alert():
    sequence = RunSequence()
    sequence.runs(*["P" * 6] * 3)
    changes = sequence.runs(*["FPPPPP"] * 4, documents={0: ("poison",)})
    changes += sequence.runs(*["FPPFPP"] * 4, documents={0: ("poison",), 3: ("other",)})
    opened = [alert for found in changes for phase, alert in found if phase is AlertPhase.OPENED]
    assert [a.documents for a in opened] == [("poison",), ("other",)]
    assert len(open_alerts(sequence.store, "clinic")) == 2


def test_many_failures_in_one_run_open_one_critical_alert():
    sequence = RunSequence(watched(50))
    changes = sequence.runs("P" * 50, "F" * 9 + "P" * 41)
    ((_, alert),) = changes[1]
    assert (alert.kind, alert.severity) == ("many_at_once", Severity.CRITICAL)
    assert len(alert.canaries) == 9
    assert sequence.runs(*["F" * 9 + "P" * 41] * 6) == [[]] * 6


def test_unreachable_target_opens_one_alert():
    sequence = RunSequence()
    changes = sequence.runs("P" * 6, "E" * 6, "E" * 6, "E" * 6, "P" * 6)
    assert [(i, p, a.kind) for i, f in enumerate(changes) for p, a in f] == [
        (1, AlertPhase.OPENED, "unreachable"),
        (4, AlertPhase.RECOVERED, "unreachable"),
    ]


def test_unreachable_target_does_not_close_the_alert_of_a_canary():
    sequence = RunSequence()
    sequence.runs(*["P" * 6] * 3, *["FPPPPP"] * 4)
    sequence.runs(*["E" * 6] * 5)
    assert [s.alert.kind for s in open_alerts(sequence.store)] == ["changed", "unreachable"]


def test_alert_of_a_canary_without_answers_recovers_with_an_answer():
    changes = RunSequence().runs(*["PPPPPE"] * 5, "P" * 6)
    assert [(p, a.kind, a.canaries) for f in changes for p, a in f] == [
        (AlertPhase.OPENED, "blind", ("c5",)),
        (AlertPhase.RECOVERED, "blind", ("c5",)),
    ]


def test_page_rules_alert_if_configured():
    limits = AlarmLimits(max_repeats=0, page_rules=True)
    sequence = RunSequence(watched(20), limits)
    changes = sequence.runs("P" * 20, "F" + "P" * 19, *["P" * 20] * 4)
    assert [(p, a.kind) for f in changes for p, a in f] == [
        (AlertPhase.OPENED, "sudden_failure"),
        (AlertPhase.RECOVERED, "sudden_failure"),
    ]
    changes = sequence.runs("FFF" + "P" * 17)
    assert {"failure_rate", "sudden_failure"} <= {a.kind for f in changes for _, a in f}


def test_alert_recovers_if_its_canary_is_removed_from_the_set():
    sequence = RunSequence()
    sequence.runs(*["P" * 6] * 3, *["PPPPPF"] * 4)
    assert len(open_alerts(sequence.store)) == 1
    sequence.set = watched(5)
    assert [p for p, _ in sequence.run("P" * 5)] == [AlertPhase.RECOVERED]


def test_acknowledged_alert_notifies_only_on_higher_severity_or_recovery():
    sequence = RunSequence()
    sequence.runs(*["P" * 6] * 3)
    sequence.runs(*["FPPPPP"] * 4, documents={0: ("poison",)})
    (state,) = open_alerts(sequence.store)
    acknowledge_alert(sequence.store, state.alert.id, "ada", NOON + timedelta(days=1))
    sequence.runs(*["FFPPPP"] * 4, documents={0: ("poison",), 1: ("poison",)})
    events = [e for e in sequence.store.scan("alert") if e.body["phase"] == AlertPhase.UPDATED]
    quiet = {e.body["quiet"] for e in events}
    assert events and quiet == {alert_from_event(e).severity.rank <= state.alert.severity.rank for e in events}
    assert open_alerts(sequence.store)[0].acknowledged == "ada"
    sequence.runs(*["P" * 6] * 9)
    assert [e.body["quiet"] for e in sequence.store.scan("alert") if e.body["phase"] == AlertPhase.RECOVERED] == [False]


def test_error_about_an_unknown_alert_lists_the_open_ones():
    store = InMemoryEventStore()
    with pytest.raises(DataError, match="no open alert has the id 'x'; open alerts: none"):
        acknowledge_alert(store, "x", "ada", NOON)
    with pytest.raises(DataError, match="no open alert"):
        close_alert(store, "x", "done", NOON)


def plain_alert(**fields):
    alert = Alert("leak-1", "honeytoken_leak", Severity.CRITICAL, "clinic", (), NOON, "A honeytoken was about to leak")
    return replace(alert, **fields)


def test_raise_alert_opens_an_alert_once():
    store = InMemoryEventStore()
    assert raise_alert(store, plain_alert(), NOON)
    assert not raise_alert(store, plain_alert(id="leak-2"), NOON)
    assert raise_alert(store, plain_alert(id="leak-3", canaries=("other",)), NOON)
    close_alert(store, "leak-1", "The key was rotated.", NOON)
    assert [s.alert.id for s in open_alerts(store)] == ["leak-3"]
    assert not raise_alert(store, plain_alert(), NOON)  # this alert has recovered
    assert raise_alert(store, plain_alert(id="leak-4"), NOON)


def test_finding_about_the_same_document_updates_the_open_alert_once():
    sequence = RunSequence()
    sequence.runs(*["P" * 6] * 3)
    sequence.runs(*["FPPPPP"] * 6, documents={0: ("poison",)})
    (state,) = open_alerts(sequence.store)
    drift = Alert("drift-1", "drift", Severity.CRITICAL, "clinic", ("canaries",), NOON, "Answers drifted: hub",
                  ("hub: .2",), ("poison", "other"))  # fmt: skip
    for day in range(3):
        later = NOON + timedelta(days=day + 1)
        assert not raise_alert(sequence.store, replace(drift, id=f"drift-{day}"), later)
    (joined,) = open_alerts(sequence.store)
    assert (joined.alert.id, joined.alert.severity, joined.alert.documents) == (
        state.alert.id, Severity.CRITICAL, ("poison", "other"),
    )  # fmt: skip
    assert state.alert.changes and joined.alert.changes == (*state.alert.changes, "Answers drifted: hub", "hub: .2")
    assert len(joined.events) == len(state.events) + 1
    assert raise_alert(sequence.store, replace(drift, set="other set"), NOON)  # of another set
    assert raise_alert(sequence.store, replace(drift, id="drift-9", documents=("elsewhere",)), NOON)


def test_alert_describes_the_answer_before_and_after():
    """Includes kind and context of the last passed and the failed answer, without their text."""
    sequence = RunSequence()
    changes = [sequence.run("P" * 6) for _ in range(3)]
    changes += [sequence.run("FPPPPP", documents={0: ("poison", "old0")}) for _ in range(6)]
    (opened,) = [alert for found in changes for phase, alert in found if phase is AlertPhase.OPENED]
    text = render_alert(opened, AlertPhase.OPENED).plain
    assert "- c0 before (2026-03-01 14:00 UTC): an answer of 7 words; context: old0" in text
    assert "- c0 now: a refusal of 3 words; context: poison, old0" in text


@pytest.mark.parametrize("withheld", [(), ("fees.md#1", "fees.md#2")])
def test_advice_lists_the_guard_first_if_it_withheld_documents(withheld):
    sequence = RunSequence()
    changes = [sequence.run("P" * 6) for _ in range(3)]
    changes += [sequence.run("FPPPPP", documents={0: ("new.md#1", "old0")}, withheld=withheld) for _ in range(6)]
    (opened,) = [alert for found in changes for phase, alert in found if phase is AlertPhase.OPENED]
    assert opened.advice[0].startswith("Check the guard first" if withheld else "Check the new documents first")
    assert any(advice.startswith("Check the new documents") for advice in opened.advice)
    assert ("; withheld by the guard: fees.md#1, fees.md#2" in "".join(opened.changes)) is bool(withheld)


def test_runs_do_not_change_alerts_of_other_detectors():
    sequence = RunSequence()
    raise_alert(sequence.store, plain_alert(), NOON)
    sequence.runs(*["P" * 6] * 12)
    assert [s.alert.id for s in open_alerts(sequence.store)] == ["leak-1"]


def test_event_contains_the_whole_alert():
    alert = plain_alert(canaries=("a", "b"), changes=("x",), documents=("d",), advice=("y",))
    kept = alert_to_event(alert, AlertPhase.OPENED, NOON, "run")
    assert alert_from_event(kept) == alert
    assert (
        len(alert_to_event(plain_alert(id=make_alert_id("k" * 300, "s", "r")), AlertPhase.UPDATED, NOON, "r").id) < 200
    )


def test_new_documents_exclude_those_of_passed_results_and_baselines():
    set_ = WatchedSet(
        "clinic", (WatchedCanary("a", documents=frozenset({"base"})), WatchedCanary("b"), WatchedCanary("c"))
    )

    def result(canary, status, *documents):
        return CanaryResult(canary, "clinic@1", NOON, status, documents=documents)

    history = [
        result("a", CanaryStatus.PASS, "old"),
        result("a", CanaryStatus.FAIL, "seen in a failure"),
        result("b", CanaryStatus.PASS, "b"),
    ]
    found = new_documents(
        history,
        [
            result("a", CanaryStatus.FAIL, "old", "x", "base", "seen in a failure"),
            result("b", CanaryStatus.PASS, "fresh"),
            result("c", CanaryStatus.FAIL, "other"),
        ],
        set_,
    )
    assert found == {"a": ("x", "seen in a failure")}


def test_text_contains_change_start_evidence_documents_and_advice():
    sequence = RunSequence()
    sequence.runs(*["P" * 6] * 3)
    ((_, alert),) = [x for f in sequence.runs(*["FPPPPP"] * 4, documents={0: ("evil.md#1", "old0")}) for x in f]
    text = render_alert(alert, AlertPhase.OPENED)
    for part in (
        "[medium] clinic: 1 canary fails more often than in the baseline",
        "Since 2026-03-01 15:00:00 UTC",
        "What changed",
        "c0 failed in 3 of 3 runs since 2026-03-01 15:00 UTC; baseline 0 of 100; evidence",
        "answer mismatch: 1 canary",
        "New documents in the answers",
        "- evil.md#1",
        "What to do",
        "Check the new documents first",
        "casemate canary trend",
        alert.id,
    ):
        assert part in text.plain
    assert "`evil.md#1`" in text.markdown
    over = render_alert(replace(alert, changes=("The target answers again",), advice=()), AlertPhase.RECOVERED)
    assert over.title.startswith("[recovered]")
    assert "Began 2026-03-01 15:00:00 UTC" in over.plain
    assert "What to do" not in over.plain


@given(st.text(max_size=300), st.lists(st.text(max_size=60), max_size=30))
def test_untrusted_text_cannot_contain_mentions_or_links(title, names):
    alert = plain_alert(title=title, documents=tuple(names), canaries=tuple(names), changes=(title, *names))
    text = render_alert(alert, AlertPhase.OPENED)
    for shown in (text.plain, text.markdown, text.title):
        assert not re.search(r"<[!@#]|@\w|\]\(|://", shown)
        assert all(c.isprintable() or c == "\n" for c in shown)
    assert text.markdown.count("`") % 2 == 0
    assert "\n" not in text.title
    assert len(text.markdown) < 20_000


def test_summary_lists_each_alert_once():
    alerts = [
        (plain_alert(id=f"a{i % 3}", title=f"t{i % 3}"), AlertPhase.OPENED if i < 3 else AlertPhase.UPDATED)
        for i in range(6)
    ]
    text = summarize_alerts(alerts)
    assert text.title.startswith("6 more notifications about 3 alerts")
    assert [text.plain.count(f"(a{i})") for i in range(3)] == [1, 1, 1]
    assert "updated: [critical] t0" in text.plain


def test_severities_are_ordered():
    order = [Severity.LOW, Severity.MEDIUM, Severity.HIGH, Severity.CRITICAL]
    assert [severity.rank for severity in order] == [0, 1, 2, 3]


def test_alert_lists_new_sources_of_targets_without_document_ids():
    """An external target reports sources only; one poisoned page causes both alarms."""
    sequence, page = RunSequence(), "https://example.org/poison"
    changes = [sequence.run("P" * 6, sources={9: ()}) for _ in range(3)]
    changes += [sequence.run("FPPPPP", sources={0: (page, "https://example.org/old0")}) for _ in range(4)]
    changes += [sequence.run("FFPPPP", sources={0: (page,), 1: (page,)}) for _ in range(4)]
    opened = [alert for found in changes for phase, alert in found if phase is AlertPhase.OPENED]
    last = [alert for found in changes for _, alert in found][-1]
    assert [a.sources for a in opened] == [(page,)] and last.canaries == ("c0", "c1")
    text = render_alert(opened[0], AlertPhase.OPENED).plain
    assert "New sources in the answers:\n- https:⁄⁄example.org/poison" in text
    assert "Check the new documents first" in text and "New documents in the answers" not in text


def test_advice_depends_on_the_kind_of_target():
    """'casemate ask' and corrections of the index apply to the local system only."""
    page = "https://example.org/evil"
    for external in (False, True):
        sequence = RunSequence(replace(watched(), external=external))
        changes = [sequence.run("P" * 6, sources={9: ()}) for _ in range(3)]
        changes += [sequence.run("FPPPPP", sources={0: (page,)}) for _ in range(6)]
        advice = " ".join(line for found in changes for _, alert in found for line in alert.advice)
        assert ("casemate ask" in advice) is not external
        assert ("from the target" in advice) is external


def test_quarantined_documents_are_not_described_as_new_in_the_answers():
    body = {"what": "held", "key": "k" * 32, "tenant": "default", "source": "s", "documents": [{"id": "p0"}]}
    event = Event("q", NOON, "quarantine", body | {"reasons": ["addresses the model"]})
    text = render_alert(alerts_for_event(event)[0], AlertPhase.OPENED).plain
    assert "Quarantined documents, in no answer unless released:\n- p0" in text
    assert "new in" not in text.lower() and "baseline" not in text


def test_honeytoken_alert_contains_the_client_and_its_key():
    body = {"defense": "honeytoken", "flagged": True, "client": "ab12/kim", "evidence": {"what": "leaked"}}
    (alert,) = alerts_for_event(Event("h", NOON, "verdict", body))
    assert "Client:\n- ab12/kim\n" in render_alert(alert, AlertPhase.OPENED).plain
    text = render_alert(alert, AlertPhase.OPENED, {"ab12": "clinic"}).plain
    assert "Client:\n- clinic (ab12/kim)\n" in text and "Canaries" not in text


def test_reads_an_older_alert_without_sources():
    event = alert_to_event(
        Alert("leak-1", "changed", Severity.HIGH, "clinic", (), NOON, "title"), AlertPhase.OPENED, NOON, "x"
    )
    body = {name: value for name, value in event.body.items() if name != "sources"}
    assert alert_from_event(replace(event, body=body)).sources == ()


def test_text_limits_the_precision_of_small_probabilities():
    (found,) = [a for found in RunSequence(watched(30)).runs("P" * 30, "F" * 30) for _, a in found]
    assert found.kind == "many_at_once"
    assert "by chance less than one in a million runs has as many (alarm from one in " in found.changes[0]


def test_gradual_decay_opens_one_alert_for_decay_and_one_for_many_failures():
    sequence, rng = RunSequence(watched(50)), np.random.default_rng(3)
    changes = [
        sequence.run("".join("F" if x < rate else "P" for x in rng.random(50)))
        for rate in [0.01] * 10 + [0.08] * 12 + [0.0] * 60
    ]
    opened = [alert.kind for found in changes for phase, alert in found if phase is AlertPhase.OPENED]
    assert sorted(opened) == ["decay", "many_at_once"]
    ended = [alert.kind for found in changes for phase, alert in found if phase is AlertPhase.RECOVERED]
    assert sorted(ended) == ["decay", "many_at_once"] and not open_alerts(sequence.store)
