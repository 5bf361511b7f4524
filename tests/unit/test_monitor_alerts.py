"""Alerts from the first sign to the all-clear, and their words."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import DataError
from casemate.monitor.alerts import wording
from casemate.monitor.alerts.alert import (
    Alert,
    Phase,
    acknowledge,
    close,
    event,
    graver,
    identity,
    of_event,
    one_worse,
    open_alerts,
    raise_alert,
    standings,
)
from casemate.monitor.alerts.alerting import Round, events_after, new_documents
from casemate.monitor.canaries.results import Deviation, Result, Severity, Status
from casemate.monitor.trends.gauges import Limits, State, step
from casemate.monitor.trends.watched import Clean, Known, Watched
from tests.unit.monitor_stores import Kept

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LETTERS = {"P": Status.PASS, "F": Status.FAIL, "E": Status.ERROR}
ONCE = Limits(confirm=0)


def watched(n=6, severity=Severity.MEDIUM):
    return Watched("clinic", tuple(Known(f"c{i}", severity, Clean(100, 0)) for i in range(n)))


class Story:
    """Runs one after another, with the alerts that come of them."""

    def __init__(self, set_=None, limits=ONCE):
        self.set, self.limits = set_ or watched(), limits
        self.state, self.store, self.number, self.history = State(), Kept(), 0, []

    def run(self, letters, documents=None):
        """One run; what happened to alerts in it, as (phase, alert)."""
        at = NOON + timedelta(hours=self.number)
        self.number += 1
        results = [
            Result(
                f"c{i}",
                f"clinic@{at:%Y-%m-%dT%H:%M:%SZ}",
                at,
                LETTERS[x],
                (Deviation("answer_mismatch", f"c{i} says something else"),) if x == "F" else (),
                documents=(documents or {}).get(i, (f"old{i}",)),
            )
            for i, x in enumerate(letters)
        ]
        before, found = self.state, step(self.state, results, self.set, self.limits)
        new = new_documents(self.history, results, self.set) if found.alarmed else {}
        standing = standings(self.store.events).values()
        events = events_after(standing, Round(before, found, results, new), self.set, self.limits)
        for e in events:
            self.store.append(e)
        self.state = found.state
        self.history += results
        return [(Phase(e.body["phase"]), of_event(e)) for e in events]

    def runs(self, *words, documents=None):
        return [self.run(word, documents) for word in words]


def test_a_failing_canary_is_one_alert_until_it_is_over():
    story = Story()
    told = story.runs(*["P" * 6] * 3, *["FPPPPP"] * 7, *["P" * 6] * 5)
    happened = [(number, phase) for number, found in enumerate(told) for phase, _ in found]
    assert happened == [(5, Phase.OPENED), (12, Phase.RECOVERED)]
    opened = next(alert for found in told for _, alert in found)
    assert (opened.kind, opened.canaries, opened.severity) == ("changed", ("c0",), Severity.MEDIUM)
    assert opened.since == NOON + timedelta(hours=3)
    assert "answer_mismatch: 1 canary" in opened.changes
    assert "c0: c0 says something else" in opened.changes


def test_it_rises_when_it_lasts_and_once():
    story = Story()
    told = story.runs(*["P" * 6] * 3, *["FPPPPP"] * 15)
    updates = [alert for found in told for phase, alert in found if phase is Phase.UPDATED]
    assert [a.severity for a in updates] == [Severity.HIGH]
    assert "c0 failed in 8 of its last runs" in updates[0].changes


def test_canaries_that_begin_to_fail_together_are_one_alert_graver_than_each():
    told = Story().runs("P" * 6, *["FFFPPP"] * 4)
    ((phase, alert),) = [x for found in told for x in found]
    assert phase is Phase.OPENED
    assert set(alert.canaries) == {"c0", "c1", "c2"}
    assert graver(alert.severity, Severity.MEDIUM)


def test_canaries_that_fail_for_the_same_new_document_join_its_alert():
    story = Story()
    story.runs(*["P" * 6] * 3)
    told = story.runs(*["FPPPPP"] * 3, documents={0: ("poison", "old0")})
    told += story.runs(*["FPPFPP"] * 3, documents={0: ("poison", "old0"), 3: ("old3", "poison")})
    happened = [x for found in told for x in found]
    assert [p for p, _ in happened] == [Phase.OPENED, Phase.UPDATED]
    (_, opened), (_, joined) = happened
    assert opened.id == joined.id
    assert opened.documents == joined.documents == ("poison",)
    assert joined.canaries == ("c0", "c3")


def test_canaries_that_fail_for_another_reason_are_another_alert():
    story = Story()
    story.runs(*["P" * 6] * 3)
    told = story.runs(*["FPPPPP"] * 4, documents={0: ("poison",)})
    told += story.runs(*["FPPFPP"] * 4, documents={0: ("poison",), 3: ("other",)})
    opened = [alert for found in told for phase, alert in found if phase is Phase.OPENED]
    assert [a.documents for a in opened] == [("poison",), ("other",)]
    assert len(open_alerts(story.store, "clinic")) == 2


def test_many_at_once_are_one_critical_alert():
    story = Story(watched(50))
    told = story.runs("P" * 50, "F" * 9 + "P" * 41)
    ((_, alert),) = told[1]
    assert (alert.kind, alert.severity) == ("many_at_once", Severity.CRITICAL)
    assert len(alert.canaries) == 9
    assert story.runs(*["F" * 9 + "P" * 41] * 6) == [[]] * 6


def test_a_target_that_is_down_is_one_alert_of_its_own():
    story = Story()
    told = story.runs("P" * 6, "E" * 6, "E" * 6, "E" * 6, "P" * 6)
    assert [(i, p, a.kind) for i, f in enumerate(told) for p, a in f] == [
        (1, Phase.OPENED, "unreachable"),
        (4, Phase.RECOVERED, "unreachable"),
    ]


def test_what_fails_is_not_over_because_the_target_is_down():
    story = Story()
    story.runs(*["P" * 6] * 3, *["FPPPPP"] * 4)
    story.runs(*["E" * 6] * 5)
    assert [s.alert.kind for s in open_alerts(story.store)] == ["changed", "unreachable"]


def test_a_blind_canary_is_told_and_over_when_it_gets_an_answer():
    told = Story().runs(*["PPPPPE"] * 5, "P" * 6)
    assert [(p, a.kind, a.canaries) for f in told for p, a in f] == [
        (Phase.OPENED, "blind", ("c5",)),
        (Phase.RECOVERED, "blind", ("c5",)),
    ]


def test_the_pages_rules_alert_where_they_are_to():
    limits = Limits(confirm=0, page_rules=True)
    story = Story(watched(20), limits)
    told = story.runs("P" * 20, "F" + "P" * 19, *["P" * 20] * 4)
    assert [(p, a.kind) for f in told for p, a in f] == [
        (Phase.OPENED, "sudden_failure"),
        (Phase.RECOVERED, "sudden_failure"),
    ]
    told = story.runs("FFF" + "P" * 17)
    assert {"failure_rate", "sudden_failure"} <= {a.kind for f in told for _, a in f}


def test_a_canary_that_was_taken_out_of_the_set_does_not_hold_its_alert_open():
    story = Story()
    story.runs(*["P" * 6] * 3, *["PPPPPF"] * 4)
    assert len(open_alerts(story.store)) == 1
    story.set = watched(5)
    assert [p for p, _ in story.run("P" * 5)] == [Phase.RECOVERED]


def test_what_was_acknowledged_is_told_again_only_if_it_gets_graver_or_is_over():
    story = Story()
    story.runs(*["P" * 6] * 3)
    story.runs(*["FPPPPP"] * 4, documents={0: ("poison",)})
    (standing,) = open_alerts(story.store)
    acknowledge(story.store, standing.alert.id, "ada", NOON + timedelta(days=1))
    story.runs(*["FFPPPP"] * 4, documents={0: ("poison",), 1: ("poison",)})
    events = [e for e in story.store.scan("alert") if e.body["phase"] == Phase.UPDATED]
    quiet = {e.body["quiet"] for e in events}
    assert events and quiet == {not graver(of_event(e).severity, standing.alert.severity) for e in events}
    assert open_alerts(story.store)[0].acknowledged == "ada"
    story.runs(*["P" * 6] * 9)
    assert [e.body["quiet"] for e in story.store.scan("alert") if e.body["phase"] == Phase.RECOVERED] == [False]


def test_acknowledging_what_is_not_open_names_what_is():
    store = Kept()
    with pytest.raises(DataError, match="no open alert is called 'x'; open: none"):
        acknowledge(store, "x", "ada", NOON)
    with pytest.raises(DataError, match="no open alert"):
        close(store, "x", "done", NOON)


def plain_alert(**fields):
    alert = Alert("leak-1", "honey_token", Severity.CRITICAL, "clinic", (), NOON, "A honey token was on its way out")
    return replace(alert, **fields)


def test_anybody_may_raise_an_alert_once_and_end_it():
    store = Kept()
    assert raise_alert(store, plain_alert(), NOON)
    assert not raise_alert(store, plain_alert(id="leak-2"), NOON)
    assert raise_alert(store, plain_alert(id="leak-3", canaries=("other",)), NOON)
    close(store, "leak-1", "The key was rotated.", NOON)
    assert [s.alert.id for s in open_alerts(store)] == ["leak-3"]
    assert not raise_alert(store, plain_alert(), NOON)  # that very one is over
    assert raise_alert(store, plain_alert(id="leak-4"), NOON)


def test_the_monitors_runs_leave_alerts_of_others_alone():
    story = Story()
    raise_alert(story.store, plain_alert(), NOON)
    story.runs(*["P" * 6] * 12)
    assert [s.alert.id for s in open_alerts(story.store)] == ["leak-1"]


def test_an_event_holds_the_whole_alert():
    alert = plain_alert(canaries=("a", "b"), changes=("x",), documents=("d",), advice=("y",))
    kept = event(alert, Phase.OPENED, NOON, "run")
    assert of_event(kept) == alert
    assert len(event(plain_alert(id=identity("k" * 300, "s", "r")), Phase.UPDATED, NOON, "r").id) < 200


def test_new_documents_are_those_that_no_pass_and_no_baseline_had():
    set_ = Watched("clinic", (Known("a", documents=frozenset({"base"})), Known("b"), Known("c")))

    def result(canary, status, *documents):
        return Result(canary, "clinic@1", NOON, status, documents=documents)

    history = [
        result("a", Status.PASS, "old"),
        result("a", Status.FAIL, "seen in a failure"),
        result("b", Status.PASS, "b"),
    ]
    found = new_documents(
        history,
        [
            result("a", Status.FAIL, "old", "x", "base", "seen in a failure"),
            result("b", Status.PASS, "fresh"),
            result("c", Status.FAIL, "whatever"),
        ],
        set_,
    )
    assert found == {"a": ("x", "seen in a failure")}


def test_the_text_tells_what_since_when_which_documents_and_what_to_do():
    story = Story()
    story.runs(*["P" * 6] * 3)
    ((_, alert),) = [x for f in story.runs(*["FPPPPP"] * 4, documents={0: ("evil.md#1", "old0")}) for x in f]
    text = wording.render(alert, Phase.OPENED)
    for part in (
        "[medium] clinic: 1 of its canaries fails",
        "Since 2026-03-01 15:00:00 UTC",
        "What changed",
        "answer_mismatch: 1 canary",
        "new in the answers since the baseline",
        "- evil.md#1",
        "What to do",
        "Look at the new documents first",
        "casemate canary trend",
        alert.id,
    ):
        assert part in text.plain
    assert "`evil.md#1`" in text.markdown
    over = wording.render(replace(alert, changes=("All is well",), advice=()), Phase.RECOVERED)
    assert over.title.startswith("[recovered]")
    assert "What to do" not in over.plain


@given(st.text(max_size=300), st.lists(st.text(max_size=60), max_size=30))
def test_somebody_elses_words_cannot_call_people_or_make_links(title, names):
    alert = plain_alert(title=title, documents=tuple(names), canaries=tuple(names), changes=(title, *names))
    text = wording.render(alert, Phase.OPENED)
    for shown in (text.plain, text.markdown, text.title):
        assert not re.search(r"<[!@#]|@\w|\]\(|://", shown)
        assert all(c.isprintable() or c == "\n" for c in shown)
    assert text.markdown.count("`") % 2 == 0
    assert "\n" not in text.title
    assert len(text.markdown) < 20_000


def test_a_summary_tells_of_each_alert_once():
    alerts = [
        (plain_alert(id=f"a{i % 3}", title=f"t{i % 3}"), Phase.OPENED if i < 3 else Phase.UPDATED) for i in range(6)
    ]
    text = wording.summarise(alerts)
    assert text.title.startswith("6 more notices about 3 alerts")
    assert [text.plain.count(f"(a{i})") for i in range(3)] == [1, 1, 1]
    assert "updated: [critical] t0" in text.plain


def test_severities_are_in_order():
    order = [Severity.LOW, Severity.MEDIUM, Severity.HIGH, Severity.CRITICAL]
    assert [one_worse(s) for s in order] == [*order[1:], Severity.CRITICAL]
    assert all(graver(b, a) and not graver(a, b) and not graver(a, a) for a, b in zip(order, order[1:], strict=False))
