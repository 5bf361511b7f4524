from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from scipy.stats import beta

from casemate.backends.sql_events import SqlEvents
from casemate.errors import BackendError, DataError
from casemate.monitor.canaries.canary import Canary, CanarySet
from casemate.monitor.canaries.results import Result, Run, Severity, Status
from casemate.monitor.trends import baseline as module
from casemate.monitor.trends.baseline import (
    accept,
    changes,
    load,
    note_update,
    outdated,
    propose,
    record,
    recordings,
    updated,
    watched,
)
from casemate.monitor.trends.gauges import Limits, State, step
from casemate.monitor.trends.watched import Clean
from tests.unit.monitor_stores import Kept

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
        Canary(id="hours", query="When?", expected_refusal=False, alert_on_deviation=False, every="15m"),
        Canary(id="bridge", query="Who built it?", expected_sources=("bridge.md",)),
    ),
)


def result(canary, number=0, status=Status.PASS, **fields):
    usual = {
        "documents": ("fees#1", "fees#2"),
        "sources": ("fees.md", "fees.md"),
        "scores": (0.8, 0.6),
        "words": 5,
        "text": "It is 25.",
    }
    if canary == "bridge":
        usual |= {"documents": ("b#1",), "sources": ("bridge.md",), "scores": (0.7,)}
    error = "late" if status is Status.ERROR else ""
    return Result(canary, f"r{number}", AT, status, error=error, **usual | fields)


def runs(count=20, **changed):
    """Runs in which all is well, but for what is given by canary: a function of the number of the run."""
    return [
        Run(f"r{n}", tuple(changed.get(c.id, lambda n, c=c: result(c.id, n))(n) for c in SET.canaries))
        for n in range(count)
    ]


def recorded(at=AT, force=False, digests=None, **changed):
    return record(runs(**changed), SET, at=at, force=force, digests=digests)


@pytest.fixture(params=["memory", "sql"])
def store(request, tmp_path):
    if request.param == "memory":
        yield Kept()
        return
    found = SqlEvents(path=tmp_path / "events.db")
    yield found
    found.close()


class TestRecord:
    def test_counts_what_was_judged(self):
        def shaky(n):
            return result("fee", n, Status.FAIL if n < 3 else Status.ERROR if n < 5 else Status.PASS)

        norm = recorded(fee=shaky).norms["fee"]
        assert (norm.asked, norm.failed, norm.errors) == (18, 3, 2)
        assert norm.clean == Clean(18, 3)
        assert norm.flake.value == 3 / 18
        assert norm.flake.low == pytest.approx(beta.ppf(0.025, 3, 16))
        assert norm.flake.high == pytest.approx(beta.ppf(0.975, 4, 15))

    def test_contexts_and_answers_are_those_of_passes(self):
        def sometimes(n):
            if n < 2:
                return result("fee", n, Status.FAIL, documents=("poison", "fees#1"), text="It is 90.")
            return result("fee", n, documents=("fees#1", f"x{n % 2}"), text="25" if n < 5 else "It is 25.", words=n)

        norm = recorded(fee=sometimes).norms["fee"]
        assert norm.documents == ("fees#1", "x0", "x1")
        assert norm.answers == 2
        assert norm.digest == recorded().norms["fee"].digest
        assert norm.words == (2, 19)

    def test_the_similarity_is_that_of_what_is_expected(self):
        def found(n):
            return result("fee", n, documents=("other", "fees#1"), scores=(0.9, 0.5 + n / 100))

        def bridge(n):
            return result("bridge", n, documents=("x", "b"), sources=("x.md", "bridge.md"), scores=(0.9, 0.3))

        norms = recorded(fee=found, bridge=bridge).norms
        assert norms["fee"].cosine == 0.5
        assert norms["bridge"].cosine == 0.3
        assert norms["hours"].cosine == 0.8  # nothing is expected: the best found
        assert recorded(hours=lambda n: result("hours", n, scores=())).norms["hours"].cosine is None

    def test_answers_that_were_not_kept_have_no_digest(self):
        assert recorded(fee=lambda n: result("fee", n, text="")).norms["fee"].digest == ""

    def test_canaries_that_never_pass_are_refused_by_name(self):
        with pytest.raises(DataError, match="2 of 3 canaries passed in none of 20 runs: fee, hours;"):
            recorded(fee=lambda n: result("fee", n, Status.FAIL), hours=lambda n: result("hours", n, Status.ERROR))

    def test_unless_by_force_and_what_was_never_judged_stays_unknown(self):
        found = recorded(
            force=True,
            fee=lambda n: result("fee", n, Status.FAIL),
            hours=lambda n: result("hours", n, Status.ERROR),
        )
        assert found.norms["fee"].clean == Clean(20, 20)
        assert found.norms["fee"].documents == ()
        assert found.unknown(SET) == ("hours",)

    def test_no_runs(self):
        with pytest.raises(DataError, match="no runs"):
            record([], SET, at=AT)

    def test_the_id_follows_from_what_was_recorded(self):
        assert recorded().id == recorded().id
        assert recorded().id != recorded(at=AT + timedelta(seconds=1)).id
        assert recorded().id != recorded(fee=lambda n: result("fee", n, Status.FAIL if n else Status.PASS)).id


class TestAcceptance:
    def test_a_recording_counts_for_nothing_until_it_is_accepted(self, store):
        found = recorded()
        propose(store, found)
        assert load(store, SET) is None
        assert recordings(store, SET) == [found]
        assert accept(store, SET, found.id[:6], "ann", AT) == found
        assert load(store, SET) == found

    def test_another_recording_moves_nothing(self, store):
        first = recorded()
        poisoned = recorded(AT + timedelta(days=1), fee=lambda n: result("fee", n, documents=("fees#1", "poison")))
        propose(store, first)
        accept(store, SET, first.id, "ann", AT)
        propose(store, poisoned)
        assert load(store, SET) == first
        assert changes(first, poisoned) == [
            "fee: new in its context: poison",
            "fee: no more in its context: fees#2",
        ]

    def test_an_older_one_can_be_accepted_again(self, store):
        one, two = recorded(), recorded(AT + timedelta(days=1))
        for n, found in enumerate((one, two)):
            propose(store, found)
            accept(store, SET, found.id, "ann", AT + timedelta(days=n))
        assert load(store, SET) == two
        accept(store, SET, one.id, "bob", AT + timedelta(days=2))
        assert load(store, SET) == one

    def test_names_of_nothing_of_several_and_of_other_sets(self, store):
        propose(store, recorded())
        propose(store, recorded(AT + timedelta(days=1)))
        for name in ("", "zz"):
            with pytest.raises(DataError, match=f"'{name}' names nothing of the recordings of 'clinic'"):
                accept(store, SET, name, "ann", AT)
        other = CanarySet("bank", SET.canaries)
        assert recordings(store, other) == []
        with pytest.raises(DataError, match="names nothing"):
            accept(store, other, recorded().id, "ann", AT)
        assert load(store, other) is None

    def test_a_store_that_takes_nothing_is_an_error(self):
        class Full(Kept):
            def flush(self, timeout_s=10.0):
                return False

        with pytest.raises(BackendError):
            propose(Full(), recorded())


class TestChanges:
    def test_all_that_may_change(self):
        new = recorded(
            fee=lambda n: result(
                "fee",
                n,
                Status.FAIL if n < 3 else Status.PASS,
                documents=("fees#1", "evil"),
                scores=(0.7, 0.7),
                text="It is 90, of course.",
                words=8,
            )
        )
        assert changes(recorded(), new) == [
            "fee: failed in 3 of 20 runs; before, in 0 of 20",
            "fee: new in its context: evil",
            "fee: no more in its context: fees#2",
            "fee: usually answers otherwise: 8 to 8 words; before, 5 to 5",
            "fee: its best document has a similarity of 0.700; before, 0.800",
        ]

    def test_nothing_changed_and_nothing_before(self):
        assert changes(recorded(), recorded(AT + timedelta(days=1))) == []
        assert changes(None, recorded()) == ["3 canaries are measured for the first time"]

    def test_canaries_that_came_went_and_were_edited(self):
        edited = CanarySet(
            "clinic",
            (SET.canaries[0].model_copy(update={"expected_answer": "30"}), replace_id(SET.canaries[1], "open")),
        )
        new = record([Run("r", tuple(result(c.id) for c in edited.canaries))], edited, at=AT)
        told = changes(recorded(), new)
        assert told[:2] == ["hours: is not measured any more", "bridge: is not measured any more"]
        assert {"fee: was edited since", "open: is measured first"} < set(told)

    def test_no_text_of_an_answer_is_told_or_kept(self, store):
        secret = "The vault opens at midnight."
        found = recorded(fee=lambda n: result("fee", n, text=secret))
        propose(store, found)
        assert "vault" not in repr([e.body for e in store.scan()]) + repr(changes(recorded(), found))


def replace_id(canary, name):
    return canary.model_copy(update={"id": name})


class TestUnknown:
    def test_new_and_edited_canaries_are_unknown_and_the_others_keep_their_norms(self):
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
        assert found.unknown(SET) == ()
        assert found.unknown(edited) == ("hours", "tunnel")
        assert found.documents(edited) == {"fee": ("fees#1", "fees#2")}


class TestWatched:
    def test_fits_what_the_monitor_needs(self):
        found = watched(SET, recorded(), every=600, aside={"bridge"})
        fee, hours, bridge = found.canaries
        assert (found.name, found.every) == ("clinic", 600)
        assert (fee.id, fee.severity, fee.clean, fee.pages) == ("fee", Severity.CRITICAL, Clean(20, 0), True)
        assert fee.documents == {"fees#1", "fees#2"}
        assert (hours.every, hours.pages) == (900.0, False)
        assert bridge.pages is False

    def test_without_a_baseline_nothing_is_known(self):
        assert {(k.clean, k.documents) for k in watched(SET).canaries} == {(Clean(), frozenset())}


class TestUpdates:
    digests = {"fees.md": "v1", "bridge.md": "v1", "other.md": "v1"}

    def test_a_canary_whose_source_the_owner_changed_is_outdated(self, store):
        found = recorded(digests=self.digests)
        assert found.norms["fee"].sources == {"fees.md": "v1"}
        assert found.norms["bridge"].sources == {"bridge.md": "v1"}
        assert found.norms["hours"].sources == {}
        note_update(store, "default", ["fees.md", "other.md"], AT + timedelta(hours=1))
        now = {"bridge.md": "v1", "other.md": "v2"}
        assert outdated(found, now, updated(store, "default", AT)) == {"fee": ("fees.md",)}

    def test_what_changed_without_a_note_is_not(self, store):
        found = recorded(digests=self.digests)
        assert outdated(found, {"fees.md": "evil"}, updated(store, "default", AT)) == {}
        note_update(store, "default", ["bridge.md"], AT + timedelta(hours=1))
        assert outdated(found, {"fees.md": "evil"}, updated(store, "default", AT)) == {"bridge": ("bridge.md",)}

    def test_what_was_indexed_again_as_it_was_is_not(self, store):
        note_update(store, "default", ["fees.md"], AT + timedelta(hours=1))
        found = recorded(digests=self.digests)
        assert outdated(found, self.digests, updated(store, "default", AT)) == {}

    def test_notes_of_other_tenants_and_of_times_before_do_not_count(self, store):
        note_update(store, "south", ["fees.md"], AT + timedelta(hours=1))
        note_update(store, "default", ["fees.md"], AT - timedelta(hours=1))
        assert updated(store, "default", AT) == frozenset()

    def test_a_long_list_is_kept_in_pieces(self, store, monkeypatch):
        monkeypatch.setattr(module, "NAMES", 3)
        names = [f"s{i}" for i in range(10)]
        note_update(store, "default", names, AT)
        assert updated(store, "default", AT) == set(names)
        assert len(store.scan("corpus-update")) == 4
        note_update(store, "default", [], AT)
        assert len(store.scan("corpus-update")) == 4

    def test_an_outdated_canary_fails_and_pages_nobody_and_a_deleted_document_does(self):
        found = recorded(digests=self.digests)
        for aside, alarmed in (((), ("fee",)), (("fee",), ())):
            known, state, pages = watched(SET, found, aside=aside), State(), []
            for n in range(10):
                results = [
                    replace(result(c.id, status=Status.FAIL if c.id == "fee" else Status.PASS), run=f"clinic@{n:02d}")
                    for c in SET.canaries
                ]
                told = step(state, results, known, Limits())
                state, pages = told.state, [*pages, *told.alarmed]
            assert tuple(pages) == alarmed
