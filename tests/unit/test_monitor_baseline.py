from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError, DataError
from casemate.monitor.canaries.canary import Canary, CanarySet
from casemate.monitor.canaries.results import CanaryResult, CanaryRun, CanaryStatus, Severity
from casemate.monitor.trends import baseline as module
from casemate.monitor.trends.baseline import (
    accept_baseline,
    baseline_changes,
    changed_sources,
    load_baseline,
    outdated_canaries,
    propose_baseline,
    record_baseline,
    record_source_updates,
    recorded_baselines,
    unchanged_canaries,
    updated_sources,
    watched_set,
)
from casemate.monitor.trends.cusum import AlarmLimits, CusumState, analyze_run
from casemate.monitor.trends.sequential_tests import FlakeCounts
from tests.unit.monitor_stores import InMemoryEventStore

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
SET = CanarySet(
    "clinic",
    (
        Canary(
            id="fee",
            query="What is the fee?",
            expected_answer="25",
            expected_documents=("fees#1",),
            severity="critical",
        ),
        Canary(id="hours", query="When?", expected_refusal=False, alert_on_deviation=False, interval="15m"),
        Canary(id="bridge", query="Who built it?", expected_sources=("bridge.md",)),
    ),
)


def result(canary, number=0, status=CanaryStatus.PASS, **fields):
    usual = {
        "documents": ("fees#1", "fees#2"),
        "sources": ("fees.md", "fees.md"),
        "scores": (0.8, 0.6),
        "words": 5,
        "text": "It is 25.",
    }
    if canary == "bridge":
        usual |= {"documents": ("b#1",), "sources": ("bridge.md",), "scores": (0.7,)}
    error = "late" if status is CanaryStatus.ERROR else ""
    return CanaryResult(canary, f"r{number}", AT, status, error=error, **usual | fields)


def runs(count=20, **changed):
    """Runs in which all canaries pass, except the given ones: functions from run number to result."""
    return [
        CanaryRun(f"r{n}", tuple(changed.get(c.id, lambda n, c=c: result(c.id, n))(n) for c in SET.canaries))
        for n in range(count)
    ]


def recorded(at=AT, force=False, digests=None, **changed):
    return record_baseline(runs(**changed), SET, at=at, force=force, digests=digests)


@pytest.fixture(params=["memory", "sql"])
def store(request, tmp_path):
    if request.param == "memory":
        yield InMemoryEventStore()
        return
    found = SqlEventStore(path=tmp_path / "events.db")
    yield found
    found.close()


class TestRecord:
    def test_counts_runs_with_a_verdict(self):
        def partly_failing(n):
            return result("fee", n, CanaryStatus.FAIL if n < 3 else CanaryStatus.ERROR if n < 5 else CanaryStatus.PASS)

        measured = recorded(fee=partly_failing).canaries["fee"]
        assert (measured.asked, measured.failed, measured.errors) == (18, 3, 2)
        assert measured.flakes == FlakeCounts(18, 3, 3, 2)

    def test_repetitions_count_only_as_repeat_failures(self):
        again = [result("fee", 0, CanaryStatus.FAIL), result("fee", 1), result("fee", 2, CanaryStatus.ERROR)]
        failing = runs(fee=lambda n: result("fee", n, CanaryStatus.FAIL if n < 3 else CanaryStatus.PASS))
        measured = record_baseline(failing, SET, at=AT, repeats=again).canaries["fee"]
        assert measured.flakes == FlakeCounts(20, 3, 3, 2, 2, 1)

    def test_records_contexts_and_answers_of_passed_runs(self):
        def partly_failing_answer(n):
            if n < 2:
                return result("fee", n, CanaryStatus.FAIL, documents=("poison", "fees#1"), text="It is 90.")
            return result("fee", n, documents=("fees#1", f"x{n % 2}"), text="25" if n < 5 else "It is 25.", words=n)

        measured = recorded(fee=partly_failing_answer).canaries["fee"]
        assert measured.documents == ("fees#1", "x0", "x1")
        assert measured.answers == 2
        assert measured.digest == recorded().canaries["fee"].digest
        assert measured.words == (2, 19)

    def test_records_the_minimum_cosine_of_the_expected_document(self):
        def found(n):
            return result("fee", n, documents=("other", "fees#1"), scores=(0.9, 0.5 + n / 100))

        def bridge(n):
            return result("bridge", n, documents=("x", "b"), sources=("x.md", "bridge.md"), scores=(0.9, 0.3))

        measured = recorded(fee=found, bridge=bridge).canaries
        assert measured["fee"].cosine == 0.5
        assert measured["bridge"].cosine == 0.3
        assert measured["hours"].cosine == 0.8  # without an expected document: the best hit
        assert recorded(hours=lambda n: result("hours", n, scores=())).canaries["hours"].cosine is None

    def test_answers_without_stored_text_have_no_digest(self):
        assert recorded(fee=lambda n: result("fee", n, text="")).canaries["fee"].digest == ""

    def test_error_lists_canaries_that_never_passed(self):
        with pytest.raises(DataError, match="2 of 3 canaries never passed in 20 runs: fee, hours;"):
            recorded(
                fee=lambda n: result("fee", n, CanaryStatus.FAIL),
                hours=lambda n: result("hours", n, CanaryStatus.ERROR),
            )

    def test_force_records_failing_canaries_except_those_without_a_verdict(self):
        found = recorded(
            force=True,
            fee=lambda n: result("fee", n, CanaryStatus.FAIL),
            hours=lambda n: result("hours", n, CanaryStatus.ERROR),
        )
        assert found.canaries["fee"].flakes == FlakeCounts(20, 20, 19, 19)
        assert found.canaries["fee"].documents == ()
        assert [c.id for c in SET.canaries if found.of(c) is None] == ["hours"]

    def test_id_depends_on_the_content(self):
        assert recorded().id == recorded().id
        assert recorded().id != recorded(at=AT + timedelta(seconds=1)).id
        assert (
            recorded().id != recorded(fee=lambda n: result("fee", n, CanaryStatus.FAIL if n else CanaryStatus.PASS)).id
        )


class TestAcceptance:
    def test_recorded_baseline_has_no_effect_until_accepted(self, store):
        found = recorded()
        propose_baseline(store, found)
        assert load_baseline(store, SET) is None
        assert recorded_baselines(store, SET) == [found]
        assert accept_baseline(store, SET, found.id[:6], "ann", AT) == found
        assert load_baseline(store, SET) == found

    def test_another_recording_does_not_change_the_accepted_baseline(self, store):
        first = recorded()
        poisoned = recorded(AT + timedelta(days=1), fee=lambda n: result("fee", n, documents=("fees#1", "poison")))
        propose_baseline(store, first)
        accept_baseline(store, SET, first.id, "ann", AT)
        propose_baseline(store, poisoned)
        assert load_baseline(store, SET) == first
        assert baseline_changes(first, poisoned) == [
            "fee: new in its context: poison",
            "fee: no longer in its context: fees#2",
        ]

    def test_older_baseline_can_be_accepted_again(self, store):
        one, two = recorded(), recorded(AT + timedelta(days=1))
        for n, found in enumerate((one, two)):
            propose_baseline(store, found)
            accept_baseline(store, SET, found.id, "ann", AT + timedelta(days=n))
        assert load_baseline(store, SET) == two
        accept_baseline(store, SET, one.id, "bob", AT + timedelta(days=2))
        assert load_baseline(store, SET) == one

    def test_rejects_unknown_and_ambiguous_ids_and_those_of_another_set(self, store):
        propose_baseline(store, recorded())
        propose_baseline(store, recorded(AT + timedelta(days=1)))
        for name in ("", "zz"):
            with pytest.raises(DataError, match=f"'{name}' matches 0 recorded baselines of 'clinic'"):
                accept_baseline(store, SET, name, "ann", AT)
        other = CanarySet("bank", SET.canaries)
        assert recorded_baselines(store, other) == []
        with pytest.raises(DataError, match="matches 0"):
            accept_baseline(store, other, recorded().id, "ann", AT)
        assert load_baseline(store, other) is None

    def test_unconfirmed_write_is_an_error(self):
        class FailingFlush(InMemoryEventStore):
            def flush(self, timeout_s=10.0):
                return False

        with pytest.raises(BackendError):
            propose_baseline(FailingFlush(), recorded())


class TestChanges:
    def test_reports_all_kinds_of_changes(self):
        new = recorded(
            fee=lambda n: result(
                "fee",
                n,
                CanaryStatus.FAIL if n < 3 else CanaryStatus.PASS,
                documents=("fees#1", "evil"),
                scores=(0.7, 0.7),
                text="It is 90, of course.",
                words=8,
            )
        )
        assert baseline_changes(recorded(), new) == [
            "fee: failed in 3 of 20 runs; before: 0 of 20",
            "fee: new in its context: evil",
            "fee: no longer in its context: fees#2",
            "fee: different usual answer, 8 to 8 words; before: 5 to 5",
            "fee: cosine of its best document 0.700; before: 0.800",
        ]

    def test_reports_no_changes_and_a_first_baseline(self):
        assert baseline_changes(recorded(), recorded(AT + timedelta(days=1))) == []
        assert baseline_changes(None, recorded()) == ["first baseline, of 3 canaries"]

    def test_lower_number_of_runs_is_not_a_change(self):
        runs = [CanaryRun(f"r{n}", tuple(result(c.id, n) for c in SET.canaries)) for n in range(2)]
        short = record_baseline(runs, SET, at=AT)
        assert baseline_changes(recorded(), short) == [] and unchanged_canaries(recorded(), short) == 3
        poisoned = recorded(fee=lambda n: result("fee", n, documents=("fees#1", "poison")))
        assert unchanged_canaries(recorded(), poisoned) == 2

    def test_reports_added_removed_and_edited_canaries(self):
        edited = CanarySet(
            "clinic",
            (SET.canaries[0].model_copy(update={"expected_answer": "30"}), replace_id(SET.canaries[1], "open")),
        )
        new = record_baseline([CanaryRun("r", tuple(result(c.id) for c in edited.canaries))], edited, at=AT)
        changes = baseline_changes(recorded(), new)
        assert changes[:2] == ["hours: no longer measured", "bridge: no longer measured"]
        assert {"fee: edited since the old baseline", "open: newly measured"} < set(changes)

    def test_neither_reports_nor_stores_text_of_answers(self, store):
        secret = "The vault opens at midnight."
        found = recorded(fee=lambda n: result("fee", n, text=secret))
        propose_baseline(store, found)
        assert "vault" not in repr([e.body for e in store.scan()]) + repr(baseline_changes(recorded(), found))


def replace_id(canary, name):
    return canary.model_copy(update={"id": name})


class TestEditedCanaries:
    def test_only_new_and_edited_canaries_have_no_baseline(self):
        found = recorded()
        edited = CanarySet(
            "clinic",
            (
                SET.canaries[0],
                SET.canaries[1].model_copy(update={"query": "Since when?"}),
                replace_id(SET.canaries[2], "tunnel"),
            ),
        )
        assert edited.fingerprint != found.fingerprint == SET.fingerprint
        assert all(found.of(canary) for canary in SET.canaries)
        assert [c.id for c in edited.canaries if found.of(c) is None] == ["hours", "tunnel"]
        assert found.of(edited.canaries[0]).documents == ("fees#1", "fees#2")
        known = {c.id: c.documents for c in watched_set(edited, found).canaries if c.documents}
        assert known == {"fee": {"fees#1", "fees#2"}}


class TestWatchedSet:
    def test_combines_canaries_and_baseline(self):
        found = watched_set(SET, recorded(), interval_s=600, outdated={"bridge"})
        fee, hours, bridge = found.canaries
        assert (found.name, found.interval_s) == ("clinic", 600)
        assert (fee.id, fee.severity, fee.flakes, fee.alerts) == ("fee", Severity.CRITICAL, FlakeCounts(20, 0), True)
        assert fee.documents == {"fees#1", "fees#2"}
        assert (hours.interval_s, hours.alerts) == (900.0, False)
        assert bridge.alerts is False

    def test_without_a_baseline_counts_are_zero(self):
        assert {(k.flakes, k.documents) for k in watched_set(SET).canaries} == {(FlakeCounts(), frozenset())}


class TestUpdates:
    digests = {"fees.md": "v1", "bridge.md": "v1", "other.md": "v1"}

    def test_canary_is_outdated_if_the_operator_changed_its_source(self, store):
        found = recorded(digests=self.digests)
        assert found.canaries["fee"].sources == {"fees.md": "v1"}
        assert found.canaries["bridge"].sources == {"bridge.md": "v1"}
        assert found.canaries["hours"].sources == {}
        record_source_updates(store, "default", ["fees.md", "other.md"], AT + timedelta(hours=1))
        now = {"bridge.md": "v1", "other.md": "v2"}
        assert outdated_canaries(found, now, updated_sources(store, "default", AT)) == {"fee": ("fees.md",)}

    def test_reports_changed_sources_with_and_without_an_update_record(self):
        found = recorded(digests=self.digests)
        assert changed_sources(found, self.digests, ()) == {}
        assert changed_sources(found, {"fees.md": "evil"}, ()) == {"fee": ("fees.md",), "bridge": ("bridge.md",)}
        assert found.canaries["fee"].documents == ("fees#1", "fees#2")
        assert changed_sources(found, self.digests, {"fees", "other.md"})["fee"] == ("fees",)  # a source of its context
        (fee, *_) = watched_set(SET, found, outdated={"fee"}, changed={"fee": ("fees.md",)}).canaries
        assert fee.outdated and fee.changed == ("fees.md",)

    def test_canary_is_not_outdated_if_its_source_changed_without_an_update_record(self, store):
        found = recorded(digests=self.digests)
        assert outdated_canaries(found, {"fees.md": "evil"}, updated_sources(store, "default", AT)) == {}
        record_source_updates(store, "default", ["bridge.md"], AT + timedelta(hours=1))
        assert outdated_canaries(found, {"fees.md": "evil"}, updated_sources(store, "default", AT)) == {
            "bridge": ("bridge.md",)
        }

    def test_canary_is_not_outdated_if_its_source_was_reindexed_unchanged(self, store):
        record_source_updates(store, "default", ["fees.md"], AT + timedelta(hours=1))
        found = recorded(digests=self.digests)
        assert outdated_canaries(found, self.digests, updated_sources(store, "default", AT)) == {}

    def test_ignores_earlier_updates_and_those_of_other_tenants(self, store):
        record_source_updates(store, "south", ["fees.md"], AT + timedelta(hours=1))
        record_source_updates(store, "default", ["fees.md"], AT - timedelta(hours=1))
        assert updated_sources(store, "default", AT) == frozenset()

    def test_stores_a_long_list_in_batches(self, store, monkeypatch):
        monkeypatch.setattr(module, "SOURCES_PER_EVENT", 3)
        names = [f"s{i}" for i in range(10)]
        record_source_updates(store, "default", names, AT)
        assert updated_sources(store, "default", AT) == set(names)
        assert len(store.scan("corpus-update")) == 4
        record_source_updates(store, "default", [], AT)
        assert len(store.scan("corpus-update")) == 4

    def test_failing_canary_alarms_unless_it_is_outdated(self):
        found = recorded(digests=self.digests)
        for outdated, expected in (((), ("fee",)), (("fee",), ())):
            watched, state, alarmed = watched_set(SET, found, outdated=outdated), CusumState(), []
            for n in range(10):
                results = [
                    replace(
                        result(c.id, status=CanaryStatus.FAIL if c.id == "fee" else CanaryStatus.PASS),
                        run=f"clinic@{n:02d}",
                    )
                    for c in SET.canaries
                ]
                analysis = analyze_run(state, results, watched, AlarmLimits())
                state, alarmed = analysis.state, [*alarmed, *analysis.alarmed]
            assert tuple(alarmed) == expected
