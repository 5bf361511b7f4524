import asyncio
import json
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError, CapabilityError, ConfigError, DataError, QueryError
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.guard import Guard
from casemate.guard.turn import OpenTurns, collect_sources, turn
from casemate.protocols import Defense
from casemate.rag.pipeline import Rag, join_stream
from casemate.types import UNKNOWN, Action, Document, Hit, Outcome, Query, Verdict
from tests.fakes import BagOfWords, Memory, Parrot, documents


@dataclass
class HideBest(Defense):
    """Always flags, and hides the nearest source."""

    max_hidden_sources: ClassVar[int] = 1

    async def on_retrieve(self, query, retrieval):
        if not retrieval.hits:
            return Outcome(retrieval)
        target = retrieval.hits[0].document.source
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.source == target)
        kept = tuple(h for h in retrieval.hits if h.document.source != target)
        return Outcome(replace(retrieval, hits=kept), Verdict("hide_best", True, Action.HIDE, 1.0, 0.5, hidden))


@dataclass
class Broken(Defense):
    """Fails at one stage."""

    stage: str = "on_retrieve"

    def sync(self):
        if self.stage == "sync":
            raise RuntimeError("secret text of a document")

    async def on_retrieve(self, query, retrieval):
        if self.stage == "on_retrieve":
            raise RuntimeError("secret text of a document")
        return Outcome(retrieval)

    async def on_answer(self, query, answer):
        if self.stage == "on_answer":
            raise RuntimeError("secret text of a document")
        return Outcome(answer)

    async def on_deliver(self, query, documents):
        raise RuntimeError("secret text of a document")


@dataclass
class Censor(Defense):
    """Rewrites the finished answer."""

    async def on_answer(self, query, answer):
        return Outcome(replace(answer, text="[cut]"), Verdict("censor", True, Action.HIDE, 1.0, 0.5))


@pytest.fixture
def make(tmp_path):
    opened = []

    def guard(defenses=(), held=(), **options):
        index = SqliteIndex(tmp_path / f"{len(opened)}.db")
        rag = Rag(BagOfWords(), index, Parrot())
        opened.append(index)
        if held:
            index.add(held, rag.embedder.embed([d.content for d in held]))
        return Guard(rag, defenses, **options)

    yield guard
    for index in opened:
        index.close()


def ids(retrieval):
    return [h.document.id for h in retrieval.hits]


def test_hidden_documents_are_replaced_in_the_context(make):
    held = documents(60)
    guard = make([HideBest()], held)
    retrieval, (verdict,) = asyncio.run(guard.retrieve(Query(held[7].text, k=10)))
    assert len(retrieval.hits) == 10
    assert verdict.hidden == ("d7",)
    assert not set(ids(retrieval)) & set(verdict.hidden)


@settings(deadline=None, max_examples=30)
@given(k=st.integers(1, 12), chunks=st.integers(1, 30), layers=st.integers(1, 3), others=st.integers(0, 40))
def test_context_is_full_for_any_number_of_hidden_chunks(k, chunks, layers, others):
    big = [Document(f"big#{i}", f"amber birch part{i}", source="big") for i in range(chunks)]
    held = big + documents(others)
    with tempfile.TemporaryDirectory() as folder:
        index = SqliteIndex(Path(folder) / "i.db")
        guard = Guard(Rag(BagOfWords(), index, Parrot()), [HideBest() for _ in range(layers)])
        index.add(held, guard.rag.embedder.embed([d.content for d in held]))
        retrieval, verdicts = asyncio.run(guard.retrieve(Query("amber birch", k=k)))
        index.close()
    hidden = {i for v in verdicts for i in v.hidden}
    assert not set(ids(retrieval)) & hidden
    assert len(retrieval.hits) == min(k, len(held) - len(hidden))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 49), k=st.integers(1, 8))
def test_observe_mode_does_not_change_answers(seed, k):
    with tempfile.TemporaryDirectory() as folder:
        index, held = SqliteIndex(Path(folder) / "i.db"), documents(50, seed)
        rag = Rag(BagOfWords(), index, Parrot())
        index.add(held, rag.embedder.embed([d.content for d in held]))
        guard = Guard(rag, [Mirabel(mode="paper"), HideBest(), Censor()], enforce=False)
        query = Query(held[seed].text, k=k)
        bare, observed = asyncio.run(rag.ask(query)), asyncio.run(guard.ask(query))
        streamed = asyncio.run(join_stream(guard.stream(query)))
        index.close()
    assert (observed.text, observed.retrieval) == (bare.text, bare.retrieval)
    assert streamed == bare.text
    assert {v.enforced for v in observed.verdicts} == {False}
    assert any(v.flagged for v in observed.verdicts)


def test_mirabel_hides_a_copied_document_end_to_end(make):
    held = documents(200)
    guard = make([Mirabel(mode="paper")], held)
    answer = asyncio.run(guard.ask(Query(held[33].text)))
    assert answer.verdicts[0].hidden == ("d33",)
    assert "d33 " not in answer.reply.text
    assert len(answer.retrieval.hits) == 5


def test_complete_and_streamed_answers_are_equal(make):
    guard = make([HideBest()], documents(40))
    query = Query("amber heron")
    assert asyncio.run(join_stream(guard.stream(query))) == asyncio.run(guard.ask(query)).text


def test_stream_is_sent_in_one_piece_if_a_defense_acts_on_answers(make):
    guard = make([Censor()], documents(40))

    async def pieces():
        return [piece async for piece in guard.stream(Query("amber"))]

    assert asyncio.run(pieces()) == ["[cut]"]


@pytest.mark.parametrize("stage", ["sync", "on_retrieve", "on_answer"])
def test_failing_defense_withholds_the_context_by_default(make, stage, caplog):
    store = Memory()
    guard = make([Broken(stage)], documents(40), store=store)
    answer = asyncio.run(guard.ask(Query("amber")))
    assert answer.text == {"sync": "", "on_retrieve": "", "on_answer": UNKNOWN}[stage]
    ((action, evidence),) = [(v.action, v.evidence) for v in answer.verdicts]
    assert (action, evidence["error"]) == (Action.WITHHOLD, "RuntimeError")
    assert re.fullmatch(r"RuntimeError in test_guard.py, line \d+", evidence["message"])
    assert "secret text" not in caplog.text + json.dumps([e.body for e in store.events])


@pytest.mark.parametrize("first", ["amber", "heron"])
def test_failure_for_one_query_withholds_the_context_of_the_turn(make, first):
    class FailsOnce(Defense):
        """Fails at its first decision."""

        failed = False

        async def on_retrieve(self, query, retrieval):
            if not self.failed:
                self.failed = True
                raise RuntimeError
            return Outcome(retrieval)

    guard = make([FailsOnce()], documents(40))
    with turn("amber"):
        shown = [asyncio.run(guard.retrieve(Query(text)))[0].hits for text in (first, "birch")]
    assert shown == [(), ()]
    assert asyncio.run(guard.retrieve(Query("birch")))[0].hits


@pytest.mark.parametrize("stage", ["sync", "on_retrieve", "on_answer"])
def test_failing_defense_is_skipped_with_on_error_open(make, stage):
    guard = make([Broken(stage)], documents(40), on_error="open")
    bare = asyncio.run(guard.rag.ask(Query("amber")))
    answer = asyncio.run(guard.ask(Query("amber")))
    assert answer.text == bare.text and [v.action for v in answer.verdicts] == [Action.NONE]
    with turn("amber"):  # the turn is not refused either
        assert asyncio.run(guard.ask(Query("amber"))).text == bare.text


def test_the_question_of_a_turn_is_judged_once_for_each_client(make):
    recording = RecordingDefense()
    guard = make([recording], documents(40))
    with turn("amber"):
        for text, client in (("birch", "ann"), ("cedar", "ann"), ("birch", "otto"), ("birch", "ann")):
            asyncio.run(guard.retrieve(Query(text, client=client)))
    assert len(recording.given) == 4 + 2


@pytest.mark.parametrize(
    ("on_error", "enforce", "count"), [("closed", True, 0), ("open", True, 2), ("closed", False, 2)]
)
def test_a_defense_that_fails_to_limit_fetched_documents_withholds_them(make, on_error, enforce, count, caplog):
    store = Memory()
    guard = make([Broken("none"), Censor()], documents(40), store=store, on_error=on_error, enforce=enforce)
    assert len(asyncio.run(guard.deliver(Query("amber"), documents(2)))) == count
    (event,) = [e.body for e in store.events]
    assert (event["defense"], event["evidence"]["error"]) == ("Broken", "RuntimeError")
    assert "secret text" not in caplog.text


def test_exception_that_evaluates_to_false_withholds_the_context(make):
    class Empty(RuntimeError):
        def __len__(self):
            return 0

    class Broken(Defense):
        """Fails to synchronize."""

        def sync(self):
            raise Empty

    answer = asyncio.run(make([Broken()], documents(40)).ask(Query("amber")))
    assert answer.retrieval.hits == ()


@pytest.mark.parametrize("nonsense", [None, (1, 2, 3), Outcome(None), Outcome("text")])
def test_invalid_result_of_a_defense_withholds_the_context(make, nonsense):
    @dataclass
    class Nonsense(Defense):
        """Returns an invalid result."""

        async def on_retrieve(self, query, retrieval):
            return nonsense

    answer = asyncio.run(make([Nonsense()], documents(40)).ask(Query("amber")))
    assert answer.retrieval.hits == ()
    assert answer.verdicts[0].action == Action.WITHHOLD
    bare = make([Nonsense()], documents(40), enforce=False)
    assert asyncio.run(bare.ask(Query("amber"))).text == asyncio.run(bare.rag.ask(Query("amber"))).text


def test_store_failure_does_not_prevent_the_answer(make, caplog):
    class ClosedStore(Memory):
        def append(self, event):
            raise BackendError("closed", backend="memory", retryable=False)

    assert asyncio.run(make([HideBest()], documents(40), store=ClosedStore()).ask(Query("amber"))).text
    assert "was not appended to the event store" in caplog.text


def test_each_verdict_is_one_event_without_the_query_text(make):
    store = Memory()
    guard = make([Mirabel(mode="paper"), HideBest()], documents(40), store=store)
    query = Query("amber private words", client="alice", k=3)
    answer = asyncio.run(guard.ask(query))
    assert [e.body["defense"] for e in store.events] == ["mirabel", "hide_best"]
    body = store.events[1].body
    assert (body["client"], body["tenant"], body["request"], body["k"]) == ("alice", "default", query.id, 3)
    assert (body["hidden"], body["threshold"]) == (answer.verdicts[1].hidden, 0.5)
    assert "private" not in json.dumps([e.body for e in store.events])


def test_query_text_is_logged_only_with_log_text(make):
    store = Memory()
    asyncio.run(make([HideBest()], documents(40), store=store, log_text=True).ask(Query("amber")))
    assert store.events[0].body["text"] == "amber"


def test_verdicts_are_logged_even_if_the_generator_fails(make):
    store = Memory()
    guard = make([HideBest()], documents(40), store=store)

    async def fail(prompt):
        raise ConnectionError
        yield

    guard.generator.stream = fail
    with pytest.raises(ConnectionError):
        asyncio.run(guard.ask(Query("amber")))
    assert len(store.events) == 1


def test_on_stage_receives_the_duration_of_every_stage(make):
    stages = []
    guard = make([HideBest(), Censor()], documents(40), on_stage=lambda stage, seconds: stages.append((stage, seconds)))
    asyncio.run(guard.ask(Query("amber")))
    assert [stage for stage, _ in stages] == ["embed", "search", *["HideBest", "Censor"] * 2]
    assert all(seconds >= 0 for _, seconds in stages)


def test_instrumented_copy_shares_the_defenses_and_does_not_change_the_guard(make):
    class UpperCaseGenerator(Parrot):
        def __init__(self, inner):
            self.inner = inner

        async def stream(self, prompt):
            async for piece in self.inner.stream(prompt):
                yield piece.upper()

    own, other, stages = Memory(), Memory(), []
    guard = make([HideBest()], documents(40), store=own)
    copy = guard.instrumented(
        store=other, wrap_generator=UpperCaseGenerator, on_stage=lambda stage, seconds: stages.append(stage)
    )
    answer = asyncio.run(copy.ask(Query("amber")))
    assert answer.text.isupper()
    assert (len(own.events), len(other.events)) == (0, 1)
    assert "search" in stages
    stages.clear()
    assert asyncio.run(guard.ask(Query("amber"))).text == answer.text.lower()
    assert (len(own.events), len(other.events), stages) == (1, 1, [])
    assert copy.defenses is guard.defenses
    assert guard.instrumented().store is own


def test_mode_switch_applies_to_all_copies_from_the_next_question_on(make):
    guard = make([HideBest()], documents(40))
    copy = guard.instrumented()
    withheld = asyncio.run(copy.ask(Query("amber")))
    guard.enforce = False
    unenforced = asyncio.run(copy.ask(Query("amber")))
    bare = asyncio.run(guard.rag.ask(Query("amber")))
    assert (unenforced.text, unenforced.retrieval) == (bare.text, bare.retrieval) and {
        v.enforced for v in unenforced.verdicts
    } == {False}
    guard.enforce = True
    again = asyncio.run(copy.ask(Query("amber")))
    assert (again.text, again.retrieval) == (withheld.text, withheld.retrieval) != (bare.text, bare.retrieval)


def test_reply_contains_the_text_only(make):
    reply = asyncio.run(make([HideBest()], documents(40)).ask(Query("amber"))).reply
    assert reply.__slots__ == ("text",)


@pytest.mark.parametrize(
    ("text", "k", "says"),
    [
        ("", 5, "empty"),
        (" \n", 5, "empty"),
        ("a\0b", 5, "NUL"),
        ("a\udcff", 5, "surrogate"),
        ("x" * 20_001, 5, "20001 characters; at most 20000"),
        ("x", 0, "k is 0"),
        ("x", 1001, "between 1 and 1000"),
    ],
)
def test_invalid_queries_are_refused_with_the_reason(make, text, k, says):
    with pytest.raises(QueryError, match=says):
        asyncio.run(make([Mirabel(mode="paper")], documents(40)).ask(Query(text, k=k)))


@pytest.mark.parametrize("count", [0, 1, 2, 29])
def test_small_corpora_are_answered_without_a_decision(make, count):
    guard = make([Mirabel(mode="paper")], documents(count))
    retrieval, verdicts = asyncio.run(guard.retrieve(Query("only0 amber", k=5)))
    assert len(retrieval.hits) == min(5, count)
    assert [v.threshold for v in verdicts] == [None]


def test_k_beyond_the_corpus_returns_all_documents(make):
    retrieval, _ = asyncio.run(make([HideBest()], documents(3)).retrieve(Query("amber", k=50)))
    assert len(retrieval.hits) == 2


def test_tenants_are_isolated_in_hits_and_statistics(make):
    guard = make([Mirabel(mode="paper")])
    mine, theirs = documents(40, seed=1), documents(50, seed=2)
    asyncio.run(guard.add(mine, "mine"))
    asyncio.run(guard.add(theirs, "theirs"))
    retrieval, _ = asyncio.run(guard.retrieve(Query("amber", tenant="mine", k=100)))
    assert retrieval.similarity_stats.n == 40
    assert {h.document.text for h in retrieval.hits} <= {d.text for d in mine}


def test_index_of_another_embedder_is_refused(tmp_path):
    index = SqliteIndex(tmp_path / "i.db")
    Rag(BagOfWords(), index, Parrot())
    index.close()
    with pytest.raises(DataError, match="'bag-of-words', not of 'other'.*--rebuild"):
        Rag(BagOfWords(fingerprint="other"), SqliteIndex(tmp_path / "i.db"), Parrot())


def test_documents_can_be_removed(make):
    guard = make([], documents(10))
    assert asyncio.run(guard.remove(["d3", "d4", "nothing"])) == 2
    retrieval, _ = asyncio.run(guard.retrieve(Query("only3", k=100)))
    assert {"d3", "d4"} & set(ids(retrieval)) == set()


@dataclass
class RecordingDefense(Defense):
    """Requests a number of hits, hides blocked sources, and records the number of hits received."""

    requested: int = 0
    blocked: tuple[str, ...] = ()
    lookahead: int = 0
    given: list = field(default_factory=list)

    def blocked_sources(self, query):
        return self.blocked

    async def on_retrieve(self, query, retrieval):
        self.given.append((len(retrieval.hits), retrieval.exhausted))
        if len(retrieval.hits) < self.requested:
            return Outcome(retrieval, more=True)
        kept = tuple(h for h in retrieval.hits if h.document.source not in self.blocked)
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.source in self.blocked)
        verdict = Verdict("curious", bool(hidden), Action.HIDE if hidden else Action.NONE, 1.0, 0.5, hidden)
        return Outcome(replace(retrieval, hits=kept), verdict)


@pytest.mark.parametrize(("lookahead", "least"), [(0, 5), (7, 12), (60, 65)])
def test_defense_receives_lookahead_hits_beyond_the_context(make, lookahead, least):
    recording = RecordingDefense(lookahead=lookahead)
    retrieval, _ = asyncio.run(make([recording, HideBest()], documents(100)).retrieve(Query("amber", k=5)))
    assert recording.given[0][0] >= least
    assert not recording.given[0][1]
    assert len(retrieval.hits) == 5


def test_a_defense_that_withholds_or_compares_precedes_one_that_reorders(make):
    reorders = Quorum(jitter=1)
    for compares in (HideBest(), RecordingDefense(lookahead=1)):
        make([compares, reorders])
        name = type(compares).__name__
        with pytest.raises(ConfigError, match=f"quorum reorders hits, which misleads {name}; place {name}"):
            make([reorders, compares])
    make([reorders, RecordingDefense(lookahead=0)])


def test_items_without_an_id_are_identified_by_their_text():
    with turn("What?") as current:
        current.show([Hit(Document("", "amber"), 0.9)], object(), "default")
        current.allowed([(None, "amber")], lambda item: item)
        assert current.allowed([("", "amber"), (None, "birch"), ("", "cedar")], lambda item: item) == [("", "amber")]


def test_sources_are_collected_only_within_the_block_and_from_any_text():
    index, hits = object(), [Hit(Document(name, f"text \ud800 {name}"), 0.9) for name in "ab"]
    with turn("What is \ud800?") as current:
        with collect_sources() as found:
            current.show(hits[:1], index, "default")
        current.show(hits[1:], index, "default")
    assert found == {(id(index), "default", "a")}
    assert OpenTurns().of("default", "ann", current.question).question == current.question


@pytest.mark.parametrize("chunks", [8, 44, 48, 190])
def test_lookahead_is_complete_after_another_defense_hides_a_source(make, chunks):
    large = [Document(f"big#{i}", f"amber birch part{i}", source="big") for i in range(chunks)]
    recording = RecordingDefense(lookahead=7)
    asyncio.run(make([HideBest(), recording], large + documents(60)).retrieve(Query("amber birch", k=5)))
    assert recording.given[0][0] >= 12


def test_decision_is_repeated_after_requested_hits_are_fetched(make):
    store, recording = Memory(), RecordingDefense(requested=70)
    guard = make([HideBest(), recording], documents(100), store=store)
    retrieval, verdicts = asyncio.run(guard.retrieve(Query("amber", k=5)))
    counts = [count for count, _ in recording.given]
    assert len(counts) > 2
    assert all(a < b for a, b in zip(counts, counts[1:], strict=False))
    assert counts[-2] < 70 <= counts[-1]
    assert len(retrieval.hits) == 5
    assert [v.defense for v in verdicts] == [e.body["defense"] for e in store.events] == ["hide_best", "curious"]


def test_a_defense_requests_more_hits_for_a_client_that_may_not_read_them(make):
    recording = RecordingDefense(requested=70)
    guard = make([HideBest(), recording], documents(100), audience=AudiencePolicy("quorum"))
    retrieval, _ = asyncio.run(guard.retrieve(Query("amber", k=5, groups=frozenset())))
    assert recording.given[-1][0] >= 70 and not retrieval.hits


def test_requests_for_more_hits_end_when_the_corpus_is_exhausted(make):
    recording = RecordingDefense(requested=1000)
    retrieval, verdicts = asyncio.run(make([recording], documents(30)).retrieve(Query("amber", k=5)))
    assert recording.given[-1] == (30, True)
    assert [exhausted for _, exhausted in recording.given[:-1]] == [False] * (len(recording.given) - 1)
    assert verdicts == ()
    assert len(retrieval.hits) == 5


@pytest.mark.parametrize("chunks", [1, 40])
def test_blocked_sources_do_not_shorten_the_context(make, chunks):
    blocked_sources = [
        Document(f"b{s}#{i}", f"amber birch {i}", source=f"b{s}") for s in range(4) for i in range(chunks)
    ]
    recording = RecordingDefense(blocked=("b0", "b1", "b2", "b3"))
    guard = make([recording, HideBest()], blocked_sources + documents(40))
    retrieval, verdicts = asyncio.run(guard.retrieve(Query("amber birch", k=5)))
    assert len(retrieval.hits) == 5
    assert not any(h.document.source.startswith("b") for h in retrieval.hits)
    assert len(verdicts[0].hidden) == 4 * chunks


def test_verdict_contains_only_messages_of_casemate_errors(make):
    @dataclass
    class Unready(Defense):
        """Fails with a Casemate error."""

        async def on_retrieve(self, query, retrieval):
            raise DataError("run 'casemate calibrate'")

    (ours,) = asyncio.run(make([Unready()], documents(40)).retrieve(Query("amber")))[1]
    (theirs,) = asyncio.run(make([Broken()], documents(40)).retrieve(Query("amber")))[1]
    assert ours.evidence == {"error": "DataError", "message": "run 'casemate calibrate'"}
    assert theirs.evidence["message"].startswith("RuntimeError in test_guard.py, line ")


def test_failure_is_attributed_to_one_defense_of_a_module(make):
    guard = make([Broken("sync"), Censor()], documents(40), on_error="open")
    assert [v.defense for v in asyncio.run(guard.ask(Query("amber"))).verdicts if "error" in v.evidence] == ["Broken"]


def test_defense_that_returns_no_outcome_fails_with_the_reason_in_the_verdict(make):
    class OldStyle(Defense):
        """Returns the retrieval itself."""

        async def on_retrieve(self, query, retrieval):
            return retrieval

    answer = asyncio.run(make([OldStyle()], documents(40)).ask(Query("amber")))
    assert not answer.retrieval.hits
    assert answer.verdicts[0].evidence["message"] == "a defense must return an Outcome, not Retrieval"


def test_failure_of_on_index_stops_indexing(make):
    @dataclass
    class Unable(Defense):
        """Fails on documents."""

        async def on_index(self, documents, vectors):
            raise RuntimeError("secret text of a document")

    guard = make([], documents(4))
    broken = Guard(guard.rag, [Unable()])
    with pytest.raises(CapabilityError, match="defense Unable failed in on_index: RuntimeError in test_guard.py"):
        asyncio.run(broken.add(documents(6)))
    assert guard.rag.index.moments().n == 4
