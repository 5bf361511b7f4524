"""Alerts for honeytokens and for quarantined documents."""

import asyncio
import contextlib
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError
from casemate.guard.defenses.honeytoken import Honeytoken
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKeyFile, format_credential
from casemate.monitor.alerts.alert import (
    CLIENT_GROUPS,
    AlertPhase,
    acknowledge_alert,
    alert_states,
    close_alert,
    open_alerts,
)
from casemate.monitor.alerts.alerting_store import AlertingEventStore, MissedAlertScanner, alerts_for_event
from casemate.monitor.alerts.messages import render_alert
from casemate.monitor.alerts.quarantine_alerts import settle_quarantine_alerts
from casemate.monitor.canaries.results import Severity
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.poisoning.scoring import ScreeningResult
from casemate.protocols import EventStoreProxy
from casemate.rag.pipeline import join_stream
from casemate.types import Document, Event, Prompt, Query
from tests.fakes import AnswerFunction, Memory
from tests.unit.test_honeytoken import retrieval

NOW = datetime(2031, 5, 3, 12, 30, tzinfo=UTC)


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(SqlEventStore(path=tmp_path / "e.db")) as made:
        yield AlertingEventStore(made)


def answered(defense, text, question="q"):
    generator = defense.on_generate(AnswerFunction(lambda prompt: text))
    asyncio.run(join_stream(generator.stream(Prompt(question, (), "Answer."))))


def leaked(defense):
    key = HoneytokenKeyFile(defense.keys).load_or_create()
    return format_credential("api_key", key.prompt_token("api_key", 1), "example.net")


class TestAlertingEventStore:
    def test_leak_opens_a_critical_alert_immediately(self, store, tmp_path):
        defense = Honeytoken(keys=tmp_path / "honeytokens.json", store=store)
        secret = leaked(defense)
        began = time.perf_counter()
        answered(defense, secret)
        (state,) = open_alerts(store)
        assert time.perf_counter() - began < 10  # benchmarks/honeytoken.py measures the time
        alert = state.alert
        assert (alert.kind, alert.severity, alert.set) == (
            "honeytoken_leak",
            Severity.CRITICAL,
            "clients and documents",
        )
        assert "api_key" in alert.changes[0] and any("rotate" in a for a in alert.advice)
        assert not any(secret[8:14] in str(e.body) for e in store.scan("alert"))  # contains no part of the token

    def test_leaks_to_one_client_in_an_hour_share_one_alert(self, store, tmp_path):
        defense = Honeytoken(keys=tmp_path / "honeytokens.json", store=store)
        for _ in range(5):
            answered(defense, leaked(defense))
        assert len(store.scan("verdict")) == 5 and len(open_alerts(store)) == 1

    def test_question_with_a_token_opens_an_alert(self, store, tmp_path):
        defense = Honeytoken(keys=tmp_path / "honeytokens.json", store=store)
        answered(defense, "It opens nothing.", f"What is {leaked(defense)}?")
        assert [s.alert.kind for s in open_alerts(store)] == ["honeytoken_known"]

    def test_answer_without_a_token_opens_no_alert(self, store, tmp_path):
        answered(Honeytoken(keys=tmp_path / "honeytokens.json", store=store), "The toll is due on Mondays.")
        assert not open_alerts(store)

    def test_quarantined_document_opens_an_alert(self, store):
        result = ScreeningResult(Document("p", "text"), 5.0, 2.5, ("begins with a question",), ("q", "r"))
        source = Quarantine(store).add([result], "acme")
        (state,) = open_alerts(store)
        assert state.alert.kind == "quarantine" and state.alert.documents == ("p", "q", "r")
        assert source.key[:8] in state.alert.advice[0]

    def test_alert_closes_with_an_empty_quarantine_and_reopens_for_the_next_document(self, store):
        quarantine = Quarantine(store)
        first, second, other = (quarantine.add([suspicious(name)], tenant) for name, tenant in NAMES)
        acknowledge_alert(store, open_alerts(store)[0].alert.id, "ann", NOW)
        quarantine.approve(first.key)
        assert sorted(s.alert.canaries[0] for s in open_alerts(store)) == ["acme", "other"]
        quarantine.approve(second.key)
        (state,) = open_alerts(store)
        assert state.alert.canaries == ("other",)  # the alert of another tenant
        closed = next(s.alert for s in alert_states(store.scan("alert")).values() if s.alert.canaries == ("acme",))
        assert "none is in quarantine" in closed.changes[0]
        quarantine.add([suspicious("late")], "acme")  # in the same hour
        reopened = next(s for s in open_alerts(store) if s.alert.canaries == ("acme",))
        assert reopened.alert.documents == ("late",) and not reopened.acknowledged
        close_alert(store, reopened.alert.id, "seen", datetime.now(UTC))
        settle_quarantine_alerts(store, datetime.now(UTC))
        assert len(open_alerts(store)) == 1  # an alert closed by an operator reopens only for a new document
        quarantine.add([suspicious("later")], "acme")
        assert len(open_alerts(store)) == 2

    def test_hourly_alert_counts_documents_and_lists_the_most_suspicious_first(self, tmp_path):
        with contextlib.closing(SqlEventStore(path=tmp_path / "q.db")) as inner, contextlib.ExitStack() as opened:
            store = opened.enter_context(contextlib.closing(AlertingEventStore(Unclosed(inner))))
            quarantine, scores = Quarantine(store), [3.2, *([11.3] * 4), 12.0, *([4.0] * 8)]
            sources = [quarantine.add([replace(suspicious(f"d{i}"), score=s)], "acme") for i, s in enumerate(scores)]
            assert open_alerts(store)[0].alert.title == "8 new documents are in quarantine"
            opened.close()
            (state,) = open_alerts(inner)
            assert state.alert.title == "14 new documents are in quarantine"
            assert len(state.alert.documents) == 10 and state.alert.documents[0] == "d5"
            assert "d0" not in state.alert.documents and sources[5].key[:8] in state.alert.advice[0]
            quiet = [e.body["quiet"] for e in inner.scan("alert")]
            assert quiet == [False, False, False, False, True]  # at 1, 2, 4, 8 documents, and at the last one


class Unclosed(EventStoreProxy):
    def close(self):
        pass


def alert_for_event(event):
    return next(iter(alerts_for_event(event)), None)


NAMES = (("a", "acme"), ("b", "acme"), ("c", "other"))


def suspicious(name):
    return ScreeningResult(Document(name, f"text of {name}"), 5.0, 2.5, ("begins with a question",))


def verdict(evidence, flagged=True, client="mallory", defense="honeytoken", at=NOW):
    body = {"defense": defense, "flagged": flagged, "client": client, "tenant": "t", "request": "r"}
    return Event(f"v{len(str(evidence))}{client}{at}", at, "verdict", body | {"evidence": evidence})


LEAK = {"what": "leaked", "form": "url", "generation": 2, "disguise": "base64"}
RESTRICTED = {"tenant_since": NOW.timestamp(), "tenant_until": NOW.timestamp() + 3600}


OTHER = next(
    n for n in map(str, range(99)) if alert_for_event(verdict(LEAK, client=n)).id != alert_for_event(verdict(LEAK)).id
)


class TestAlertForEvent:
    def test_retrieval_of_three_honeytokens_opens_an_alert_and_of_one_does_not(self, tmp_path):
        defense = Honeytoken(keys=tmp_path / "honeytokens.json")
        key = HoneytokenKeyFile(defense.keys).load_or_create()
        for records, expected in (([0], None), ([1, 2], "honeytoken_crawl")):
            found = asyncio.run(defense.on_retrieve(Query("q", client="c"), retrieval(key, records))).verdict
            alert = alert_for_event(verdict(dict(found.evidence), found.flagged))
            assert (alert and alert.kind) == expected
        assert alert.documents == ("h1", "h2") and alert.canaries == ("mallory",)

    def test_crawler_opens_an_alert_and_a_limited_client_does_not(self):
        evidence = {"level": "alarmed", "grade": "extracts", "chunks": 12}
        alert = alert_for_event(verdict(evidence, defense="crawl_limit"))
        assert alert.kind == "crawl" and alert.canaries == ("mallory",) and "12 different chunks" in alert.changes[0]
        assert "Client" in render_alert(alert, AlertPhase.OPENED).plain
        assert alert_for_event(verdict(evidence, flagged=False, defense="crawl_limit")) is None

    def test_crawler_also_opens_the_alert_of_its_restricted_tenant(self, store):
        events = [verdict({"chunks": n} | RESTRICTED, client=f"c{n}", defense="crawl_limit") for n in range(2)]
        for event in events:
            store.append(event)
        assert {s.alert.kind for s in open_alerts(store)} == {"crawl", "crawl_tenant"}
        assert [s.alert.canaries for s in open_alerts(store) if s.alert.kind == "crawl_tenant"] == [("t",)]
        assert MissedAlertScanner(store).open_missed(NOW) == 0
        missed = Memory(events[:1])
        assert MissedAlertScanner(missed).open_missed(NOW) == 2 == len(open_alerts(missed))

    def test_alert_of_a_restricted_tenant_contains_its_full_name(self):
        tenant = "north-" * 20
        body = {"defense": "crawl_limit", "flagged": False, "client": "c", "tenant": tenant, "evidence": RESTRICTED}
        alert = alert_for_event(Event("v", NOW, "verdict", body))
        assert f"{tenant!r}" in alert.changes[0] and f"--tenant {tenant}'" in alert.advice[1]

    @pytest.mark.parametrize(
        "event",
        [verdict(LEAK, flagged=False), verdict(LEAK, defense="mirabel"), verdict({}), verdict({"crawler": False}),
         Event("x", NOW, "honeytoken", {"what": "planted"}), Event("y", NOW, "quarantine", {"what": "released"})],
    )  # fmt: skip
    def test_other_events_open_no_alert(self, event):
        assert alert_for_event(event) is None

    def test_clients_and_hours_have_separate_alerts(self):
        events = [verdict(LEAK), verdict(LEAK, client=OTHER), verdict(LEAK, at=NOW + timedelta(hours=1))]
        assert len({alert_for_event(e).id for e in events}) == 3
        assert alert_for_event(verdict(LEAK, at=NOW + timedelta(minutes=9))).id == alert_for_event(verdict(LEAK)).id

    def test_number_of_alerts_is_limited_for_a_thousand_client_names(self):
        assert len({alert_for_event(verdict(LEAK, client=f"c{i}")).id for i in range(1000)}) == CLIENT_GROUPS

    @pytest.mark.parametrize("evidence", [{"what": "leaked"}, {"what": "known to the asker"}, {"crawler": True}])
    def test_events_with_missing_fields_open_alerts(self, evidence):
        body = {"defense": "honeytoken", "flagged": True, "evidence": evidence}
        assert alert_for_event(Event("v", NOW, "verdict", body)).severity in {Severity.CRITICAL, Severity.HIGH}
        assert alert_for_event(Event("q", NOW, "quarantine", {"what": "held"})).kind == "quarantine"


class TestMissedAlertScanner:
    def test_corrects_an_alert_left_inconsistent_by_two_processes(self):
        store = Memory()
        quarantine = Quarantine(store)  # records no alerts
        scanner = MissedAlertScanner(store)
        source = quarantine.add([suspicious("a")], "acme")
        now = datetime.now(UTC)
        assert scanner.open_missed(now) == 1 and len(open_alerts(store)) == 1
        quarantine.approve(source.key)
        assert scanner.open_missed(now) == 0 and not open_alerts(store)
        store.events.insert(0, replace(store.events[0], id="raced", body=store.events[0].body | {"key": "raced"}))
        MissedAlertScanner(store).open_missed(now)  # a document quarantined before the alert closed
        assert len(open_alerts(store)) == 1

    def test_opens_missed_alerts_once(self):
        store = Memory([verdict(LEAK), verdict(LEAK, client=OTHER), verdict({}, flagged=False)])
        scanner = MissedAlertScanner(store)
        assert scanner.open_missed(NOW) == 2
        assert scanner.open_missed(NOW) == MissedAlertScanner(store).open_missed(NOW) == 0
        assert {s.alert.canaries for s in open_alerts(store)} == {("mallory",), (OTHER,)}
        store.append(verdict(LEAK, at=NOW + timedelta(hours=1)))
        assert scanner.open_missed(NOW) == 1

    def test_event_store_and_scanner_open_the_same_alert(self, store):
        store.append(verdict(LEAK))
        assert MissedAlertScanner(store).open_missed(NOW) == 0 and len(open_alerts(store)) == 1

    def test_does_not_reopen_a_closed_alert(self, store):
        store.append(verdict(LEAK))
        (state,) = open_alerts(store)
        close_alert(store, state.alert.id, "a test", NOW)
        assert MissedAlertScanner(store).open_missed(NOW) == 0 and not open_alerts(store)

    def test_skips_old_events(self, store):
        written = store._store  # bypasses the wrapper
        written.append(verdict(LEAK, at=NOW - timedelta(days=2)))
        written.append(verdict(LEAK, at=NOW - timedelta(hours=2)))
        assert written.flush() and MissedAlertScanner(store).open_missed(NOW) == 1

    def test_reads_events_again_after_a_failed_write(self, monkeypatch):
        store = Memory([verdict(LEAK)])
        scanner = MissedAlertScanner(store)
        monkeypatch.setattr(store, "flush", lambda timeout_s=10.0: False)
        with pytest.raises(BackendError):
            scanner.open_missed(NOW)
        monkeypatch.undo()
        store.events = [e for e in store.events if e.kind != "alert"]  # the write failed
        assert scanner.open_missed(NOW) == 1


DIES = """
import os, signal, sys
from datetime import UTC, datetime
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.monitor.alerts.alerting_store import AlertingEventStore
from casemate.types import Event

class KilledStore(SqlEventStore):
    def append(self, event):
        if event.kind == "alert":
            self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(event)

evidence = {"what": "leaked", "form": "url", "generation": 2, "disguise": "base64"}
body = {"defense": "honeytoken", "flagged": True, "client": "mallory", "tenant": "t", "request": "r"}
store = AlertingEventStore(KilledStore(sys.argv[1]))
store.append(Event("v", datetime.now(UTC), "verdict", body | {"evidence": evidence}))
"""


def test_alert_opens_after_a_kill_between_event_and_alert(tmp_path):
    url = f"sqlite:///{tmp_path}/e.db"
    assert subprocess.run([sys.executable, "-c", DIES, url], check=False, timeout=60).returncode == -9
    with contextlib.closing(SqlEventStore(url)) as store:
        assert len(store.scan("verdict")) == 1 and not open_alerts(store)
        assert MissedAlertScanner(store).open_missed(datetime.now(UTC)) == 1
        assert [s.alert.kind for s in open_alerts(store)] == ["honeytoken_leak"]


def test_delegates_other_methods(store):
    assert store.flush() and store.scan("verdict") == [] and list(store.latest("verdict", 3)) == []
    assert store.read_since("verdict", 0) == ([], 0) and store.dropped == 0
    assert store.lease("a", "me", 5) and not store.lease("a", "you", 5)
    store.release("a", "me")
    assert store.lease("a", "you", 5)
    store.close()
