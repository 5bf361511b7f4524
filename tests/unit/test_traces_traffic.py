"""Recorded traces: content of events, joining of spans, coverage, canary candidates, and the command."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from casemate import config as configuration
from casemate.app import open_app
from casemate.cli import cli
from casemate.errors import BackendError, QueryError
from casemate.maths.clustering import assign_topics
from casemate.monitor.alerts.alert import open_alerts
from casemate.monitor.canaries.canary_file import parse_canaries
from casemate.monitor.canaries.coverage import RegionMap
from casemate.monitor.canaries.run import CanaryRunner
from casemate.monitor.service import open_trace_recorder
from casemate.monitor.traces import recorder as module
from casemate.monitor.traces.candidates import draft_candidates
from casemate.monitor.traces.recorder import GuardJudge, JudgedQuestion, TraceRecorder
from casemate.monitor.traces.span_content import Span, SpanEvent, TracedDocument
from casemate.monitor.traces.traffic import TracedQuestion, canary_contexts, join_spans, measure_traffic
from casemate.text.tokens import ReferenceCorpus
from casemate.types import Answer
from tests.fakes import Memory
from tests.gateways import HideNamed, make
from tests.topical import VOCABULARY, indexed, topical

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECRET = "Does Mrs. Miller of ward seven have diabetes?"


def span(name, second=0, parent="", trace="t1", **attributes):
    named = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span(trace, name, parent, NOON + timedelta(seconds=second), named)


def chain(name="root", asked=SECRET, reply_text="It is unknown.", **more):
    return span(name, openinference__span__kind="CHAIN", input__value=asked, output__value=reply_text, **more)


RETRIEVED = {"gen_ai__operation__name": "retrieval", "gen_ai__retrieval__documents": [{"id": "d1"}, {"id": "d2"}]}
PARTS = [
    chain(reply_text="I don't know."),
    span("search", 1, "root", gen_ai__retrieval__query__text="rewritten", **RETRIEVED),
    span("model", 2, "root", gen_ai__operation__name="chat", gen_ai__prompt="Context: d1 d2. Question: rewritten"),
    span("embed", 3, "root", gen_ai__operation__name="embeddings", input__value="rewritten"),
]


def recorded(spans, judge=None, log_text=False, tenant="default", store=None):
    store = store or Memory()

    async def judged(question, trace):
        return JudgedQuestion((TracedDocument("n1", "n"),), "Miller" in question)

    done = asyncio.run(TraceRecorder(store, lambda tenant: judge or judged, log_text).record(spans, tenant, NOON))
    return store, done


def test_spans_of_a_trace_are_joined_into_one_question():
    store, done = recorded(PARTS)
    assert done == (3, 1, 0, 0)
    (found,) = join_spans(store.events)
    assert found == TracedQuestion(
        "t1", NOON, 8, (TracedDocument("n1", "n"),), True, "guard", True, 3,
        (TracedDocument("d1", ""), TracedDocument("d2", "")),
    )  # fmt: skip


@given(st.permutations(PARTS), st.sets(st.integers(1, 3)))
def test_the_order_and_grouping_of_arriving_spans_do_not_matter(spans, cuts):
    """The question and the answer are those of the root span, even if other spans were judged before it."""
    store, edges = Memory(), [0, *sorted(cuts), len(spans)]
    for start, end in zip(edges, edges[1:], strict=False):
        recorded(spans[start:end], store=store)
    (found,) = join_spans(store.events)
    assert (found.at, found.asked, found.words, found.refused, found.flagged) == (NOON, 8, 3, True, True)
    assert [d.id for d in found.documents] == ["d1", "d2"]


def test_a_repeated_span_has_the_same_event_id():
    first, _ = recorded(PARTS)
    again, _ = recorded(PARTS[::-1])
    other, _ = recorded(PARTS, tenant="other")
    assert {e.id for e in first.events} == {e.id for e in again.events}
    assert not {e.id for e in first.events} & {e.id for e in other.events}


@pytest.mark.parametrize("log_text", [False, True])
def test_the_question_is_recorded_only_with_log_text(log_text):
    store, _ = recorded([*PARTS, chain("second", "NUL \0 and \ud800", trace="t2")], log_text=log_text)
    text = json.dumps([dict(e.body) for e in store.events])
    assert ("Miller" in text) == log_text and "I don't know" not in text
    assert {q.text for q in join_spans(store.events)} == ({SECRET, "NUL   and ?"} if log_text else {""})


def test_verdicts_of_the_traced_system_take_precedence():
    events = (SpanEvent("verdict", {"casemate.flagged": False}),)
    gateway = Span("t1", "gateway", "root", NOON, {"http.route": "/v1/chat/completions"}, events)
    (found,) = join_spans(recorded([*PARTS, gateway])[0].events)
    assert (found.flagged, found.flagged_by) == (False, "trace")


def test_the_retrieval_query_takes_precedence_over_a_model_prompt():
    """The system first asks the model to rewrite the question, with a prompt that contains more than the question."""
    prompt = span(
        "model", 0, "web", gen_ai__operation__name="chat", gen_ai__prompt="Rewrite this question in five words: why?"
    )
    query = span("search", 1, "web", gen_ai__retrieval__query__text="Why was it closed", **RETRIEVED)
    (found,) = join_spans(recorded([prompt, query])[0].events)
    assert found.asked == 4


def test_a_trace_without_a_question_is_ignored():
    assert join_spans(recorded([span("search", **RETRIEVED)])[0].events) == []


def test_a_backend_error_records_nothing_and_an_invalid_question_is_recorded():
    async def failing(question, trace):
        raise BackendError("down", backend="index", retryable=True)

    async def refusing(question, trace):
        raise QueryError("a NUL character")

    store = Memory()
    with pytest.raises(BackendError):
        recorded(PARTS, failing, store=store)
    assert not store.events
    assert recorded(PARTS, refusing)[1] == (3, 1, 1, 0)
    assert recorded([chain(asked="long " * 100_000)])[1] == (1, 0, 1, 0)


def test_questions_beyond_the_limit_of_a_batch_are_recorded_without_nearest_documents(monkeypatch):
    monkeypatch.setattr(module, "MAX_JUDGED", 3)
    store, done = recorded([chain(trace=f"t{i}") for i in range(5)])
    assert done == (5, 0, 2, 0)
    assert sorted(bool(q.nearest) for q in join_spans(store.events)) == [False, False, True, True, True]


def test_a_span_without_a_valid_time_gets_its_arrival_time():
    untimed_span = Span("t1", "root", "", None, chain().attributes)
    store, done = recorded([untimed_span])
    assert done.untimed == 1 and store.events[0].at == NOON


def test_the_judge_of_traced_questions_records_no_event(tmp_path):
    app = make(tmp_path, defenses=(HideNamed("d3"),))
    with app:
        made = open_trace_recorder(app).make_judge("default")
        assert isinstance(made, GuardJudge)
        found = asyncio.run(made("only3 secretword", "t1"))
        assert found.flagged is True and found.nearest[0] == TracedDocument("d3", "d3")  # not withheld
        assert asyncio.run(made("only4", "t2")).flagged is False
        assert asyncio.run(open_trace_recorder(app).make_judge("empty")("only3", "t1")) == JudgedQuestion()
        app.store.flush()
        assert app.store.scan() == []


# Coverage


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Six topics with given regions, without clustering."""
    documents = topical()
    index, embedder = indexed(tmp_path_factory.mktemp("corpus"), documents)
    labels = np.array([int(d.id[1:]) % 6 for d in documents])
    E = embedder.embed([d.content for d in documents])
    centroids = np.stack([E[labels == t].mean(axis=0) for t in range(6)])
    assert (assign_topics(E, centroids, np.full(6, -np.inf, np.float32)) == labels).mean() > 0.9
    genre = ReferenceCorpus([d.content for d in documents])
    return RegionMap(documents, E, labels, centroids, [f"topic {t}" for t in range(6)], genre, ""), index, embedder


class RetrievalTarget:
    """A target that answers with the hits of the index."""

    def __init__(self, corpus):
        _, self.index, self.embedder = corpus

    async def ask(self, query):
        vector = self.embedder.embed([query.text])[0]
        return Answer("said", self.index.search(vector, query.k, query.tenant))


def questions_about(number, count=1, text=""):
    documents = (TracedDocument(f"d{number}", f"d{number}"),)
    return [TracedQuestion(f"t{number}-{i}", NOON, 5, documents, text=text) for i in range(count)]


def test_topics_without_a_canary_equal_a_naive_count(corpus):
    regions, index, embedder = corpus
    contexts = canary_contexts(index, embedder, {"zero": "only0 t0w1", "one": "only1 t1w1"}, 3, "default")
    questions = [
        *questions_about(0, 4),
        *questions_about(1, 2),
        *questions_about(2, 5),
        *questions_about(9, 1),
        *questions_about(999, 3),
    ]  # 999 is not in the index
    found = measure_traffic(regions, contexts, questions)
    watched = set().union(*contexts.values())
    inside = [q for q in questions if q.nearest[0].id != "d999"]
    assert (found.placed, found.unplaced) == (12, 3)
    assert found.watched.value == sum(q.nearest[0].id in watched for q in inside) / 12
    assert {t.name: t.questions for t in found.topics} == {"topic 2": 5, "topic 0": 4, "topic 1": 2, "topic 3": 1}
    covered = {f"topic {int(d[1:]) % 6}" for d in watched}
    assert {t.name for t in found.unwatched} == {"topic 2", "topic 3", "topic 0", "topic 1"} - covered
    assert "topic 2" in {t.name for t in found.unwatched}


def test_a_question_counts_for_its_nearest_document_in_the_current_index(corpus):
    nearest = tuple(TracedDocument(f"d{number}", "") for number in (999, 8, 1))  # document 999 was removed
    question = TracedQuestion("t", NOON, 5, nearest, text="only8 only8 t2w3")
    (topic,) = measure_traffic(corpus[0], {"eight": frozenset({"d8"})}, [question]).topics
    assert topic.canaries == ("eight",)
    assert measure_traffic(corpus[0], {"eight": frozenset({"d8"})}, [question]).watched.value == 1
    assert measure_traffic(corpus[0], {"one": frozenset({"d1"})}, [question]).watched.value == 0
    found = asyncio.run(
        draft_candidates(
            corpus[0],
            measure_traffic(corpus[0], {}, [question]),
            [question],
            CanaryRunner((), RetrievalTarget(corpus), 4, corpus[2]),
        )
    )
    assert [canary.expected_documents for canary in found.canaries] == [("d8",)]


def test_coverage_without_placed_questions_has_no_share(corpus):
    found = measure_traffic(corpus[0], {}, questions_about(999))
    assert (found.watched, found.topics, found.unplaced) == (None, (), 1)


def as_phrases(text):
    """The text as phrases of two words with clear borders, so that drafted questions can name them."""
    found = text.split()
    return "The " + " of the ".join(map(" ".join, zip(found[::2], found[1::2], strict=False))) + "."


@pytest.mark.parametrize("text", ["only8 only8 t2w3", ""])
def test_candidates_cover_frequent_documents_of_topics_without_a_canary(corpus, tmp_path, text):
    regions = replace(corpus[0], documents=[replace(d, text=as_phrases(d.text)) for d in corpus[0].documents])
    contexts = {"one": frozenset({"d1"})}
    questions = [*questions_about(8, 6, text), *questions_about(1, 9), *questions_about(14, 2, "nothing like it")]
    coverage = measure_traffic(regions, contexts, questions)
    runner = CanaryRunner((), RetrievalTarget(corpus), 12, corpus[2])
    found = asyncio.run(draft_candidates(regions, coverage, questions, runner, count=5))
    first = found.canaries[0]
    assert first.expected_documents == ("d8",) and first.id == "traffic-01"
    assert (first.query == text) == bool(text)
    assert "6 questions" in found.notes[first.id] and "topic 2" in found.notes[first.id]
    assert {c.expected_documents for c in found.canaries} <= {("d8",), ("d14",)}  # topic 1 has a canary
    assert "nothing like it" not in found.text  # this question does not retrieve its document
    assert parse_canaries(found.text).canaries == found.canaries


def test_an_empty_set_of_candidates_is_written(corpus):
    empty = measure_traffic(corpus[0], {}, [])
    found = asyncio.run(draft_candidates(corpus[0], empty, [], CanaryRunner((), None)))
    assert "canaries: []" in found.text and not found.canaries


# The command


def casemate(*words):
    done = CliRunner().invoke(cli, ["traces", *words, "--json"], catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)


def error_of(*words):
    return str(CliRunner().invoke(cli, ["traces", *words]).exception)


def traffic(days, refusing=2):
    """Twelve questions a day about two documents; the answers of the last days are refusals."""
    start = datetime.now(UTC) - timedelta(days=days)
    for day in range(days):
        for i in range(12):
            at = (start + timedelta(days=day, minutes=i)).isoformat()
            reply_text = "I don't know." if day >= days - refusing else "The answer is on page seven."
            yield {
                "id": f"{day}-{i}",
                "timestamp": at,
                "input": f"What is only{i % 2} {VOCABULARY[i % 2][3]}?",
                "output": reply_text,
            }


@pytest.mark.slow
def test_traces_are_imported_reported_and_used_for_canaries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("casemate.yaml").write_text("guard: {mode: 'off', defenses: []}\n")
    with open_app(configuration.read()) as app:
        asyncio.run(app.guard.add([replace(d, text=as_phrases(d.text)) for d in topical(20)]))
    assert casemate("report")[0] == 3
    assert "casemate traces import" in error_of("suggest")

    Path("t.jsonl").write_text("\n".join(map(json.dumps, [*traffic(10), {"version": 9}])))
    code, found = casemate("import", "t.jsonl")
    assert (code, found["recorded"], found["formats"], found["skipped"]) == (
        3, 120, {"langfuse": 120}, {"unknown format": 1},
    )  # fmt: skip
    assert CliRunner().invoke(cli, ["traces", "import", "t.jsonl"]).exit_code == 3  # repeated: no event is added

    code, found = casemate("report")
    assert (found["questions"], found["refused"], found["flagged"]) == (
        120, {"count": 24, "of": 120}, {"count": 0, "of": 0},
    )  # fmt: skip
    assert found["coverage"]["placed"] == 120 and found["windows"] == {"traced answers": 10, "traced questions": 10}
    alarms = {r["signal"] for step in found["readings"]["traced answers"] for r in step if r["alarm"]}
    assert code == 1 and "refusals" in alarms
    assert not any(r["alarm"] for step in found["readings"]["traced questions"] for r in step)
    shown = CliRunner().invoke(cli, ["traces", "report", "--alert"]).stdout
    assert "refused: 20 %" in shown and "without a canary" in shown
    with open_app(configuration.read()) as app:
        (state,) = open_alerts(app.store)
    assert "Answers in traces drifted: " in state.alert.title and "traces report" in state.alert.advice[0]

    code, found = casemate("suggest", "new.yaml")
    assert code == 0 and len(found["canaries"]) == len(parse_canaries(Path("new.yaml").read_text()).canaries) > 0
    assert "What is only0" not in Path("new.yaml").read_text()  # without log_text no recorded question is written
    assert "overwrite it with --force" in error_of("suggest", "new.yaml")
    assert Path("new.yaml").stat().st_mode & 0o077 == 0
