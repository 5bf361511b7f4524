"""Content of spans in each convention, and of exported files."""

from __future__ import annotations

import csv
import gzip
import json
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from casemate.errors import DataError
from casemate.monitor.traces.exports import read_export
from casemate.monitor.traces.span_content import KINDS, QuestionPlace, Span, SpanEvent, read_content, safe_id

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ASKED, SAID = "When is the toll due?", "It is due on Mondays."


def content(attributes, *events):
    return read_content(Span("t", "s", "", NOW, attributes, tuple(SpanEvent(*e) for e in events)))


def messages(role, text):
    """Messages in the format of the current conventions."""
    parts = [{"type": "text", "content": text}]
    return [{"role": "system", "parts": [{"type": "text", "content": "Be brief."}]}, {"role": role, "parts": parts}]


CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
IN = {"gen_ai.input.messages": json.dumps(messages("user", ASKED))}
OUT = {"gen_ai.output.messages": json.dumps(messages("assistant", SAID)[1:])}
LANGCHAIN = {
    "messages": [
        [
            {"lc": 1, "type": "constructor", "id": ["x", "SystemMessage"], "kwargs": {"content": "Be brief."}},
            {"lc": 1, "type": "constructor", "id": ["x", "HumanMessage"], "kwargs": {"content": ASKED}},
        ]
    ]
}


@pytest.mark.parametrize(
    "attributes",
    [
        {**CHAT, **IN, **OUT},
        {**CHAT, "gen_ai.input.messages": messages("user", ASKED), **OUT},  # structured, as in events
        {**CHAT, "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "Be brief.",
         "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": ASKED,
         "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": SAID},
        {"gen_ai.system": "openai", "gen_ai.prompt": ASKED, "gen_ai.completion": SAID},  # before version 1.27
        {"openinference.span.kind": "CHAIN", "input.value": ASKED, "output.value": SAID},
        {"openinference.span.kind": "CHAIN", "input.value": json.dumps({"question": ASKED, "history": []}),
         "output.value": json.dumps({"answer": SAID, "source_documents": []})},
        {"openinference.span.kind": "CHAIN", "input.value": json.dumps(LANGCHAIN),
         "output.value": json.dumps({"output": {"content": SAID}})},
        {"openinference.span.kind": "LLM", "llm.input_messages.0.message.role": "user",
         "llm.input_messages.0.message.content": "an earlier question",
         "llm.input_messages.1.message.role": "assistant", "llm.input_messages.1.message.content": "an answer",
         "llm.input_messages.2.message.role": "user",
         "llm.input_messages.2.message.contents.0.message_content.text": ASKED,
         "llm.output_messages.0.message.role": "assistant", "llm.output_messages.0.message.content": SAID},
        {"traceloop.span.kind": "workflow",
         "traceloop.entity.input": json.dumps({"args": [], "kwargs": {"query": ASKED}}),
         "traceloop.entity.output": json.dumps({"result": SAID})},
        {"openinference.span.kind": "TRACE", "input.value": {"args": [ASKED], "kwargs": {}}, "output.value": SAID},
        {"openinference.span.kind": "GENERATION", "input.value": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": ASKED}]}],
         "output.value": {"choices": [{"message": {"role": "assistant", "content": SAID}}]}},
    ],
)  # fmt: skip
def test_question_and_answer_are_extracted(attributes):
    found = content(attributes)
    assert (found.question, found.answer) == (ASKED, SAID)


@pytest.mark.parametrize(
    "events",
    [
        [("gen_ai.user.message", {"content": "first"}), ("gen_ai.user.message", {"content": ASKED}),
         ("gen_ai.choice", {"message": json.dumps({"role": "assistant", "content": SAID})})],
        [("gen_ai.content.prompt", {"gen_ai.prompt": json.dumps([{"role": "user", "content": ASKED}])}),
         ("gen_ai.content.completion", {"gen_ai.completion": json.dumps([{"role": "assistant", "content": SAID}])})],
        [("gen_ai.client.inference.operation.details", {**IN, **OUT})],
    ],
)  # fmt: skip
def test_texts_in_events_are_extracted(events):
    found = content(CHAT, *events)
    assert (found.question, found.answer, found.place) == (ASKED, SAID, QuestionPlace.MODEL)


def test_attribute_names_and_operations_are_in_the_published_conventions():
    semconv = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    published = {value for name, value in vars(semconv).items() if name.isupper()}
    assert {
        name for name in (*CHAT, *IN, *OUT, "gen_ai.retrieval.documents") if name.startswith("gen_ai.")
    } <= published
    operations = {value.value for value in semconv.GenAiOperationNameValues}
    without = {"embeddings", "create_agent", "execute_tool"}  # their inputs are not questions of users
    assert operations - without <= KINDS.keys() and not without & KINDS.keys()


@pytest.mark.parametrize(
    ("attributes", "documents"),
    [
        ({"gen_ai.operation.name": "retrieval", "gen_ai.retrieval.query.text": ASKED,
          "gen_ai.retrieval.documents": json.dumps([{"id": "d1", "score": 0.9}, {"id": "d2", "score": 0.8}])},
         [("d1", ""), ("d2", "")]),
        ({"openinference.span.kind": "RETRIEVER", "input.value": ASKED,
          "retrieval.documents.0.document.id": "d1", "retrieval.documents.0.document.metadata": '{"source": "a.md"}',
          "retrieval.documents.1.document.id": 2, "retrieval.documents.1.document.content": "text"},
         [("d1", "a.md"), ("2", "")]),
        ({"openinference.span.kind": "RETRIEVER", "input.value": {"query": ASKED},
          "output.value": [{"id": "d1", "page_content": "text", "metadata": {"source": "a.md"}},
                           {"node": {"id_": "d2", "metadata": {"file_name": "b.md"}}}, "text", {"score": 1}]},
         [("d1", "a.md"), ("d2", "b.md")]),
    ],
)  # fmt: skip
def test_documents_of_a_retrieval_span_are_extracted(attributes, documents):
    found = content(attributes)
    assert (found.question, found.answer, found.place) == (ASKED, None, QuestionPlace.RETRIEVAL)
    assert list(found.documents) == documents


@pytest.mark.parametrize("kind", ["EMBEDDING", "TOOL", "GUARDRAIL", "EVALUATOR", "something new"])
def test_texts_in_other_span_kinds_are_not_questions(kind):
    assert content({"openinference.span.kind": kind, "input.value": ASKED, "output.value": SAID}).empty


def test_verdicts_of_the_gateway_are_extracted():
    verdicts = [("verdict", {"casemate.flagged": flag, "casemate.defense": "mirabel"}) for flag in (False, True)]
    assert content({"http.route": "/v1/chat/completions"}, *verdicts).flagged is True
    assert content({"http.route": "/v1/chat/completions"}, verdicts[0]).flagged is False
    assert content({"http.route": "/v1/chat/completions"}).empty


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from("role content messages parts type input question id lc kwargs".split()), inner
        )
    ),
    max_leaves=12,
)
NAMES = "input.value output.value gen_ai.input.messages gen_ai.output.messages gen_ai.retrieval.documents".split()


@example("agent", {"input.value": [{"type": []}]})
@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(NAMES), json_values))
def test_arbitrary_attribute_values_cause_no_error(kind, attributes):
    attributes = {"openinference.span.kind": kind, **attributes}
    plain = content(attributes)
    assert isinstance(plain.question, str)
    encoded = {n: json.dumps(v) if isinstance(v, list | dict) else v for n, v in attributes.items()}
    assert content(encoded).question == plain.question  # JSON in a string has the same meaning


def test_deeply_nested_json_is_ignored():
    assert content({"openinference.span.kind": "CHAIN", "input.value": '{"input":' * 50_000}).question
    nested: object = ASKED
    for _ in range(30):
        nested = {"input": nested}
    assert content({"openinference.span.kind": "CHAIN", "input.value": nested}).question == ""


def test_a_text_as_document_id_is_replaced_by_its_hash():
    text = "Mrs. Miller has diabetes. " * 20
    attributes = {"openinference.span.kind": "RETRIEVER", "retrieval.documents.0.document.id": text}
    ((name, _),) = content(attributes).documents
    assert name == safe_id(text) and "Miller" not in name and len(name) == 64
    assert safe_id("a\nb") != "a\nb"


# Files

OBSERVATION = {"id": "o1", "traceId": "t1", "type": "GENERATION", "startTime": "2026-02-28T10:00:01.000Z",
               "parentObservationId": "o0", "input": [{"role": "user", "content": ASKED}], "output": SAID}  # fmt: skip
TRACE = {"id": "t1", "timestamp": "2026-02-28T10:00:00.000Z", "name": "rag", "input": {"question": ASKED},
         "output": SAID, "userId": None}  # fmt: skip
BLOB = {"id": "o2", "trace_id": "t2", "type": "SPAN", "start_time": "2026-02-28 10:00:00.000000", "input": ASKED,
        "parent_observation_id": None, "output": json.dumps({"answer": SAID})}  # fmt: skip
PHOENIX = {"id": "U3Bhbjox", "name": "query", "context": {"trace_id": "ab" * 16, "span_id": "cd" * 8},
           "span_kind": "CHAIN", "parent_id": None, "start_time": "2026-02-28T10:00:00+00:00", "events": [],
           "attributes": {"input.value": ASKED, "output.value": SAID}}  # fmt: skip
NESTED = {**PHOENIX, "attributes": {"openinference": {"span": {"kind": "CHAIN"}}, "input": {"value": ASKED},
                                    "output": {"value": SAID}}}  # fmt: skip
ROW = {"name": "query", "span_kind": "LLM", "context.trace_id": "ab" * 16, "context.span_id": "cd" * 8,
       "start_time": 1772272800000,
       "attributes.llm.input_messages": [{"message.role": "user", "message.content": ASKED}],
       "attributes.llm.output_messages": [{"message.role": "assistant", "message.content": SAID}]}  # fmt: skip
OTLP = {"resourceSpans": [{"scopeSpans": [{"spans": [{
    "traceId": "ab" * 16, "spanId": "cd" * 8, "startTimeUnixNano": "1772272800000000000",
    "attributes": [{"key": k, "value": {"stringValue": v}} for k, v in {**CHAT, **IN, **OUT}.items()],
}]}]}]}  # fmt: skip


def written(folder, name, text):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("record", "kind"),
    [(OBSERVATION, "langfuse"), (TRACE, "langfuse"), (BLOB, "langfuse"), (PHOENIX, "openinference"),
     (NESTED, "openinference"), (ROW, "openinference"), (OTLP, "otlp")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "page.json"])
def test_exports_in_every_format_are_read(tmp_path, record, kind, name):
    text = json.dumps({"data": [record], "meta": {"page": 1}} if name == "page.json" else record)
    found = read_export(written(tmp_path, name, f"{text}\n\n{text}" if name.endswith("l") else text), NOW)
    assert (found.formats, found.skipped) == ({kind: 2 if name.endswith("l") else 1}, {})
    read = read_content(found.spans[0])
    assert (read.question, read.answer) == (ASKED, SAID)
    assert (found.spans[0].start - datetime(2026, 2, 28, 10, tzinfo=UTC)).total_seconds() in (0, 1)


def test_a_langfuse_trace_includes_its_observations(tmp_path):
    path = written(
        tmp_path, "t.json", json.dumps([{**TRACE, "observations": [OBSERVATION, {**OBSERVATION, "id": "o3"}]}])
    )
    spans = read_export(path, NOW).spans
    assert [(s.trace, s.id, s.parent) for s in spans] == [
        ("t1", "trace t1", ""),
        ("t1", "o1", "o0"),
        ("t1", "o3", "o0"),
    ]


def test_a_langfuse_table_is_read(tmp_path):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [*BLOB])
        table.writeheader()
        table.writerow({**BLOB, "input": json.dumps({"question": ASKED})})
    (span,) = read_export(tmp_path / "rows.csv", NOW).spans
    assert (read_content(span).question, read_content(span).answer) == (ASKED, SAID)


def test_console_output_of_the_real_sdk_is_read(tmp_path):
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    tracer = trace.TracerProvider().get_tracer("app")
    with tracer.start_as_current_span("chat m", attributes={**CHAT, **IN}) as span:
        span.add_event("gen_ai.choice", {"message": SAID})
    found = read_export(written(tmp_path, "console.json", span.to_json()), datetime.now(UTC))
    (read,) = found.spans
    assert read.trace == f"{span.context.trace_id:032x}" and read.id == f"{span.context.span_id:016x}"
    assert (read_content(read).question, read_content(read).answer) == (ASKED, SAID)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.json", json.dumps({"spans": [], "version": 9}), "first record has the keys spans, version; allowed: OTLP"),
        ("a.json", "{", "line that is not JSON; allowed: OTLP JSON"),
        ("a.json", "", "no record has a known format"),
        ("a.json", "[" * 100_000, "line that is not JSON|nested too deep"),
        ("a.json", "[1, 2]", "record that is not a JSON object"),
        ("a.json", json.dumps({"resourceSpans": [], "resourceLogs": []}), "only traces"),
        ("a.json.gz", "\x00", None),
        ("a.csv", "a,b\n1,2\n", "keys a, b"),
    ],
)
def test_other_files_are_rejected_with_a_reason(tmp_path, name, text, reason):
    path = written(tmp_path, name, text)
    if reason is None:
        path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match=reason or "cannot read the traces"):
        read_export(path, NOW)


def test_errors_contain_keys_and_no_values(tmp_path):
    path = written(tmp_path, "a.json", json.dumps({"secret_question": "Mrs. Miller"}))
    with pytest.raises(DataError, match="secret_question") as caught:
        read_export(path, NOW)
    assert "Miller" not in str(caught.value)


def test_damaged_records_are_counted_and_the_others_are_read(tmp_path):
    lines = [json.dumps(PHOENIX), "{", json.dumps({"new": 1}), "7", json.dumps({**PHOENIX, "context": {}})]
    found = read_export(written(tmp_path, "a.jsonl", "\n".join(lines)), NOW)
    assert len(found.spans) == 1
    assert found.skipped == {
        "line that is not JSON": 1,
        "unknown format": 1,
        "record that is not a JSON object": 1,
        "span without valid ids": 1,
    }


def test_a_file_that_is_too_large_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("casemate.monitor.traces.exports.MAX_BYTES", 1_000_000)
    with pytest.raises(DataError, match="more than 1,000,000 bytes uncompressed; export shorter periods"):
        read_export(written(tmp_path, "a.json.gz", "0" * 5_000_000), NOW)
    with pytest.raises(DataError, match="No such file"):
        read_export(tmp_path / "missing.json", NOW)
