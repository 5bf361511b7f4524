"""Alerts for honey that was touched, and for documents that were held back."""

import asyncio
import contextlib
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from casemate.backends.sql_events import SqlEvents
from casemate.defenses.honeytoken import HoneyToken
from casemate.errors import BackendError
from casemate.marks.honey import HoneyKeys, token
from casemate.monitor.alerts.alert import close, open_alerts
from casemate.monitor.alerts.at_once import GROUPS, Alarming, Missed, alert_of
from casemate.monitor.canaries.results import Severity
from casemate.monitor.poison.quarantine import Quarantine
from casemate.monitor.poison.suspicion import Judgement
from casemate.protocols import Generator
from casemate.rag import join
from casemate.types import Document, Event, Prompt, Query
from tests.fakes import Memory
from tests.unit.test_honeytoken import retrieval

NOW = datetime(2031, 5, 3, 12, 30, tzinfo=UTC)


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(SqlEvents(path=tmp_path / "e.db")) as made:
        yield Alarming(made)


class Says(Generator):
    def __init__(self, text):
        self.text = text

    async def stream(self, prompt):
        yield self.text


def answered(defense, text, question="q"):
    asyncio.run(join(defense.on_generate(Says(text)).stream(Prompt(question, (), "Answer."))))


def leaked(defense):
    key = HoneyKeys(defense.keys).get()
    return token("api_key", key.prompt_mark("api_key", 1), "example.net")


class TestAtOnce:
    def test_a_leak_is_critical_and_there_within_a_second(self, store, tmp_path):
        defense = HoneyToken(keys=tmp_path / "honey.json", store=store)
        secret = leaked(defense)
        began = time.perf_counter()
        answered(defense, secret)
        (standing,) = open_alerts(store)
        assert time.perf_counter() - began < 10  # how long it takes is benchmarks/honey.py's to say
        alert = standing.alert
        assert (alert.kind, alert.severity, alert.set) == ("honey_leak", Severity.CRITICAL, "honey")
        assert "api_key" in alert.changes[0] and any("rotate" in a for a in alert.advice)
        assert not any(secret[8:14] in str(e.body) for e in store.scan("alert"))  # no part of the token

    def test_many_leaks_of_one_client_in_an_hour_are_one_alert(self, store, tmp_path):
        defense = HoneyToken(keys=tmp_path / "honey.json", store=store)
        for _ in range(5):
            answered(defense, leaked(defense))
        assert len(store.scan("verdict")) == 5 and len(open_alerts(store)) == 1

    def test_an_asker_who_has_a_token_is_told(self, store, tmp_path):
        defense = HoneyToken(keys=tmp_path / "honey.json", store=store)
        answered(defense, "It opens nothing.", f"What is {leaked(defense)}?")
        assert [s.alert.kind for s in open_alerts(store)] == ["honey_known"]

    def test_an_honest_answer_is_no_alert(self, store, tmp_path):
        answered(HoneyToken(keys=tmp_path / "honey.json", store=store), "The toll is due on Mondays.")
        assert not open_alerts(store)

    def test_what_is_held_back_is_told(self, store):
        judgement = Judgement(Document("p", "text"), 5.0, 2.5, ("begins with a question",), {}, (), 0, ("q", "r"))
        held = Quarantine(store).hold([judgement], "acme")
        (standing,) = open_alerts(store)
        assert standing.alert.kind == "quarantine" and standing.alert.documents == ("p", "q", "r")
        assert held.key[:8] in standing.alert.advice[0]


def verdict(evidence, flagged=True, client="mallory", defense="honeytoken", at=NOW):
    body = {"defense": defense, "flagged": flagged, "client": client, "tenant": "t", "request": "r"}
    return Event(f"v{len(str(evidence))}{client}{at}", at, "verdict", body | {"evidence": evidence})


LEAK = {"what": "leaked", "form": "url", "generation": 2, "disguise": "base64"}


OTHER = next(n for n in map(str, range(99)) if alert_of(verdict(LEAK, client=n)).id != alert_of(verdict(LEAK)).id)


class TestWhatCallsForOne:
    def test_three_records_do_and_one_does_not(self, tmp_path):
        defense = HoneyToken(keys=tmp_path / "honey.json")
        key = HoneyKeys(defense.keys).get()
        for records, expected in (([0], None), ([1, 2], "honey_crawl")):
            found = asyncio.run(defense.on_retrieve(Query("q", client="c"), retrieval(key, records))).verdict
            alert = alert_of(verdict(dict(found.evidence), found.flagged))
            assert (alert and alert.kind) == expected
        assert alert.documents == ("h1", "h2") and alert.canaries == ("mallory",)

    @pytest.mark.parametrize(
        "event",
        [verdict(LEAK, flagged=False), verdict(LEAK, defense="mirabel"), verdict({}), verdict({"crawler": False}),
         Event("x", NOW, "honey", {"what": "planted"}), Event("y", NOW, "quarantine", {"what": "released"})],
    )  # fmt: skip
    def test_others_do_not(self, event):
        assert alert_of(event) is None

    def test_clients_tenants_and_hours_are_told_apart(self):
        events = [verdict(LEAK), verdict(LEAK, client=OTHER), verdict(LEAK, at=NOW + timedelta(hours=1))]
        assert len({alert_of(e).id for e in events}) == 3
        assert alert_of(verdict(LEAK, at=NOW + timedelta(minutes=9))).id == alert_of(verdict(LEAK)).id

    def test_a_thousand_names_make_few_alerts(self):
        assert len({alert_of(verdict(LEAK, client=f"c{i}")).id for i in range(1000)}) == GROUPS

    @pytest.mark.parametrize("evidence", [{"what": "leaked"}, {"what": "known to the asker"}, {"crawler": True}])
    def test_what_another_version_noted_with_less_is_told_too(self, evidence):
        body = {"defense": "honeytoken", "flagged": True, "evidence": evidence}
        assert alert_of(Event("v", NOW, "verdict", body)).severity in {Severity.CRITICAL, Severity.HIGH}
        assert alert_of(Event("q", NOW, "quarantine", {"what": "held"})).kind == "quarantine"


class TestAfterwards:
    def test_what_others_have_written_is_made_good_once(self):
        store = Memory([verdict(LEAK), verdict(LEAK, client=OTHER), verdict({}, flagged=False)])
        missed = Missed(store)
        assert missed.open(NOW) == 2
        assert missed.open(NOW) == Missed(store).open(NOW) == 0
        assert {s.alert.canaries for s in open_alerts(store)} == {("mallory",), (OTHER,)}
        store.append(verdict(LEAK, at=NOW + timedelta(hours=1)))
        assert missed.open(NOW) == 1

    def test_both_ways_open_the_same(self, store):
        store.append(verdict(LEAK))
        assert Missed(store).open(NOW) == 0 and len(open_alerts(store)) == 1

    def test_what_was_closed_by_hand_stays_closed(self, store):
        store.append(verdict(LEAK))
        (standing,) = open_alerts(store)
        close(store, standing.alert.id, "a test of our own", NOW)
        assert Missed(store).open(NOW) == 0 and not open_alerts(store)

    def test_what_is_old_is_left_alone(self, store):
        written = store._store  # past what opens alerts
        written.append(verdict(LEAK, at=NOW - timedelta(days=2)))
        written.append(verdict(LEAK, at=NOW - timedelta(hours=2)))
        assert written.flush() and Missed(store).open(NOW) == 1

    def test_a_store_that_fails_is_asked_again(self, monkeypatch):
        store = Memory([verdict(LEAK)])
        missed = Missed(store)
        monkeypatch.setattr(store, "flush", lambda timeout_s=10.0: False)
        with pytest.raises(BackendError):
            missed.open(NOW)
        monkeypatch.undo()
        store.events = [e for e in store.events if e.kind != "alert"]  # it was not written
        assert missed.open(NOW) == 1


DIES = """
import os, signal, sys
from datetime import UTC, datetime
from casemate.backends.sql_events import SqlEvents
from casemate.monitor.alerts.at_once import Alarming
from casemate.types import Event

class Dies(SqlEvents):
    def append(self, event):
        if event.kind == "alert":
            self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(event)

evidence = {"what": "leaked", "form": "url", "generation": 2, "disguise": "base64"}
body = {"defense": "honeytoken", "flagged": True, "client": "mallory", "tenant": "t", "request": "r"}
Alarming(Dies(sys.argv[1])).append(Event("v", datetime.now(UTC), "verdict", body | {"evidence": evidence}))
"""


def test_killed_between_the_event_and_its_alert(tmp_path):
    url = f"sqlite:///{tmp_path}/e.db"
    assert subprocess.run([sys.executable, "-c", DIES, url], check=False, timeout=60).returncode == -9
    with contextlib.closing(SqlEvents(url)) as store:
        assert len(store.scan("verdict")) == 1 and not open_alerts(store)
        assert Missed(store).open(datetime.now(UTC)) == 1
        assert [s.alert.kind for s in open_alerts(store)] == ["honey_leak"]


def test_all_else_is_the_stores(store):
    assert store.flush() and store.scan("verdict") == [] and list(store.latest("verdict", 3)) == []
    assert store.follow("verdict", 0) == ([], 0) and store.dropped == 0
    assert store.lease("a", "me", 5) and not store.lease("a", "you", 5)
    store.release("a", "me")
    assert store.lease("a", "you", 5)
    store.close()
