"""The gateway as a receiver of traces: SDK and exporter of OpenTelemetry, roles, limits, several gateways."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest

from casemate.errors import BackendError
from casemate.gateway import state
from casemate.gateway.api import traces
from casemate.gateway.state import Gateway
from casemate.gateway.tracing import RequestTracer
from casemate.monitor.traces.recorder import TRACE_KIND
from casemate.monitor.traces.traffic import read_traffic
from tests.fakes import BagOfWords
from tests.gateways import HideNamed, chat, client, key, make, serving

pytest.importorskip("opentelemetry.sdk", reason="the extra casemate[otel] is not installed")
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ASKED = "only3 secretword"
PROTOBUF = {"Content-Type": "application/x-protobuf"}


def request(spans=1, attributes=None, **more):
    """An OTLP request in JSON."""
    named = attributes or {"openinference.span.kind": "CHAIN", "input.value": ASKED, "output.value": "I don't know."}
    listed = [{"key": k, "value": {"stringValue": v}} for k, v in named.items()]
    made = [{"traceId": f"{i + 1:032x}", "spanId": f"{i + 1:016x}", "attributes": listed} | more for i in range(spans)]
    return {"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}


def finished_spans():
    """Spans of the OpenTelemetry SDK for an application that answers one question with a retrieval."""
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("app")
    asking = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.input.messages": json.dumps([{"role": "user", "content": ASKED}]),
    }
    with tracer.start_as_current_span("invoke_agent", attributes=asking) as root:
        found = {"gen_ai.operation.name": "retrieval", "gen_ai.retrieval.documents": json.dumps([{"id": "d9"}])}
        tracer.start_span("retrieval", attributes=found).end()
        root.set_attribute("gen_ai.output.messages", json.dumps([{"role": "assistant", "content": "page 9"}]))
    return memory.get_finished_spans()


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip, Compression.Deflate])
def test_traces_of_the_sdk_exporter_are_recorded(tmp_path, compression):
    app = make(tmp_path, defenses=(HideNamed("d3"),))
    headers = {"Authorization": f"Bearer {key(app, 'traces')}"}
    with serving(app) as url:
        exporter = OTLPSpanExporter(f"{url}/v1/traces", headers=headers, compression=compression)
        spans = finished_spans()
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        assert exporter.export(spans) is SpanExportResult.SUCCESS  # a repetition after a lost response
        exporter.shutdown()
        (found,) = read_traffic(app.store, "default")
        assert len(app.store.scan(TRACE_KIND)) == 2 and not app.store.scan("verdict")
    assert (found.asked, found.words, found.refused, found.flagged) == (2, 2, False, True)
    assert (found.nearest[0].id, [d.id for d in found.documents], found.text) == ("d3", ["d9"], "")


def test_no_text_is_in_the_store_or_in_the_log(tmp_path, caplog):
    app = make(tmp_path)
    with client(app, key(app, "traces")) as http:
        assert http.post("/v1/traces", json=request()).json() == {}
        assert http.post("/v1/traces", json=request(traceId="none")).status_code == 200
        assert http.post("/v1/traces", content=b"secretword", headers=PROTOBUF).status_code == 400
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("events.db*"))
    assert b"d3" in stored and b"secretword" not in stored and "secretword" not in caplog.text


@pytest.mark.parametrize(("role", "status"), [("traces", 200), ("admin", 200), ("client", 403), ("metrics", 403)])
def test_only_keys_for_traces_and_admins_may_send_traces(tmp_path, role, status):
    app = make(tmp_path)
    with client(app, key(app, role)) as http:
        assert http.post("/v1/traces", json=request()).status_code == status
        assert httpx.post(f"{http.base_url}/v1/traces", json=request()).status_code == 401


def test_key_for_traces_has_no_other_permission(tmp_path):
    app = make(tmp_path)
    with client(app, key(app, "traces")) as http:
        assert http.get("/metrics").status_code == 403
        assert http.get("/v1/documents").status_code == 403
        for path, body in (("chat/completions", chat("x")), ("retrieve", {"question": "x"}), ("documents", {})):
            assert http.post(f"/v1/{path}", json=body).status_code in (400, 403)
        assert http.post("/v1/retrieve", json={"question": "x"}).status_code == 403


@pytest.mark.parametrize(
    ("content", "headers", "status", "said"),
    [
        (b"{}", {"Content-Type": "text/plain"}, 415, "application/x-protobuf"),
        (b"\xff\xff\xff", PROTOBUF, 400, "protobuf"),
        (b"{", {"Content-Type": "application/json"}, 400, "not valid JSON"),
        (b'{"resourceLogs": []}', {"Content-Type": "application/json"}, 400, "only traces"),
        (b"no gzip", {**PROTOBUF, "Content-Encoding": "gzip"}, 400, "not valid gzip"),
        (b"x", {**PROTOBUF, "Content-Encoding": "zstd"}, 400, "zstd"),
        (gzip.compress(b"\0" * 9_000_000), {**PROTOBUF, "Content-Encoding": "gzip"}, 400, "smaller batches"),
        (b"\0" * 5_000_000, PROTOBUF, 413, "too large"),
        (b"", PROTOBUF, 200, ""),
    ],
)  # fmt: skip
def test_unreadable_requests_are_refused_with_a_reason(tmp_path, content, headers, status, said):
    app = make(tmp_path)
    with client(app, key(app, "traces")) as http:
        answer = http.post("/v1/traces", content=content, headers=headers)
        assert (answer.status_code, said in answer.text) == (status, True)
        assert not app.store.scan(TRACE_KIND)


def test_one_body_is_decoded_at_a_time(tmp_path, monkeypatch):
    app = make(tmp_path)
    decode, running, concurrency = traces._decode, [], []

    def observed(*given):
        running.append(given)
        concurrency.append(len(running))
        time.sleep(0.05)
        running.pop()
        return decode(*given)

    monkeypatch.setattr(traces, "_decode", observed)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    compressed = gzip.compress(b'{"resourceSpans": [' + b"{}," * 290_000 + b"{}]}")  # 900 kB of 580,000 values
    with client(app, key(app, "traces")) as http, ThreadPoolExecutor(4) as pool:
        for answer in pool.map(lambda _: http.post("/v1/traces", content=compressed, headers=headers), range(4)):
            assert (answer.status_code, "JSON values; send smaller batches" in answer.text) == (400, True)
    assert concurrency == [1] * 4


def test_few_decoded_bodies_wait_to_be_recorded(tmp_path, monkeypatch):
    """A compressed body of 4 kB may contain a text of 4 MB."""
    monkeypatch.setattr(state, "MAX_RECORDED", 2)
    app = make(tmp_path)
    decode, record, decoded, most = traces._decode, traces._record, [], []

    def decoding(*given):
        decoded.append(given)
        most.append(len(decoded))
        return decode(*given)

    async def recording(*given):
        await asyncio.sleep(0.05)
        await record(*given)
        decoded.pop()

    monkeypatch.setattr(traces, "_decode", decoding)
    monkeypatch.setattr(traces, "_record", recording)
    with client(app, key(app, "traces")) as http, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: http.post("/v1/traces", json=request()), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert max(most) == 2


def test_rejected_spans_are_counted_in_both_encodings(tmp_path):
    app = make(tmp_path)
    with client(app, key(app, "traces")) as http:
        body = request(3)
        body["resourceSpans"][0]["scopeSpans"][0]["spans"][1]["spanId"] = "wrong"
        assert http.post("/v1/traces", json=body).json()["partialSuccess"]["rejectedSpans"] == "1"
        assert len(app.store.scan(TRACE_KIND)) == 2
        # a resource with 200 empty spans
        raw = http.post("/v1/traces", content=b"\x0a\x93\x03\x12\x90\x03" + b"\x12\x00" * 200, headers=PROTOBUF)
        partial = ExportTraceServiceResponse.FromString(raw.content).partial_success
        assert (raw.headers["content-type"], partial.rejected_spans) == ("application/x-protobuf", 200)
        assert "trace id" in partial.error_message


class FailingEmbedder(BagOfWords):
    """An embedder that fails on request."""

    down = threading.Event()

    def embed(self, texts, progress=None):
        if self.down.is_set():
            raise BackendError("no server", backend="embedder", retryable=True)
        return super().embed(texts, progress)


def test_batch_that_cannot_be_recorded_gets_503_with_retry_after(tmp_path):
    app = make(tmp_path)
    app.guard.rag.embedder = embedder = FailingEmbedder(256)
    with client(app, key(app, "traces")) as http:
        embedder.down.set()
        refused = http.post("/v1/traces", json=request())
        assert refused.status_code == 503 and "Retry-After" in refused.headers  # exporters repeat the request
        assert not app.store.scan(TRACE_KIND)
        embedder.down.clear()
        assert http.post("/v1/traces", json=request()).status_code == 200
        assert len(app.store.scan(TRACE_KIND)) == 1


def test_store_failure_gets_503_and_queues_no_event(tmp_path, monkeypatch):
    app = make(tmp_path)
    with client(app, key(app, "traces")) as http:
        queued, waits = [], []

        async def failing(self, receipt):
            waits.append(len(queued))
            raise BackendError("events cannot be written", backend="store", retryable=True)

        monkeypatch.setattr(Gateway, "wait_written", failing)
        monkeypatch.setattr(type(app.store), "append", lambda self, event: queued.append(event.kind))
        assert http.post("/v1/traces", json=request()).status_code == 503
        assert waits == [0] and TRACE_KIND not in queued


def test_spans_of_one_trace_may_be_sent_to_several_gateways(tmp_path):
    with ExitStack() as stack:
        apps = [make(tmp_path), make(tmp_path)]
        text = key(apps[0], "traces")
        https = [stack.enter_context(client(app, text)) for app in apps]
        whole = request(1)
        found = {"openinference.span.kind": "RETRIEVER", "retrieval.documents.0.document.id": "d7"}
        part = request(1, found, spanId="ab" * 8, parentSpanId=f"{1:016x}")
        for http, bodies in zip(https, ([part, whole], [whole]), strict=True):
            for body in bodies:
                assert http.post("/v1/traces", json=body).status_code == 200
        (question,) = read_traffic(apps[1].store, "default")
        assert (question.refused, [d.id for d in question.documents]) == (True, ["d7"])


def test_traces_belong_to_the_tenant_of_the_key(tmp_path):
    app = make(tmp_path)
    with client(app, key(app, "traces", tenant="other")) as http:
        assert http.post("/v1/traces", json=request()).status_code == 200
        assert read_traffic(app.store, "default") == []
        (found,) = read_traffic(app.store, "other")
        assert found.nearest == () and found.refused is True  # this tenant has no documents


def test_receiving_traces_is_not_traced(tmp_path, monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(state, "open_tracer", lambda address: RequestTracer(provider))
    app = make(tmp_path)
    with client(app, key(app, "traces")) as http:
        assert http.post("/v1/traces", json=request()).status_code == 200
    assert exporter.get_finished_spans() == ()


def _whole_trace(exporter):
    """Waits for all spans of one request; the outermost span ends after the answer is sent."""
    for _ in range(1000):
        spans = exporter.get_finished_spans()
        if any(span.parent is not None and span.parent.is_remote for span in spans):
            return spans
        time.sleep(0.01)
    raise AssertionError("the request's span did not end")


def test_verdicts_of_a_traced_gateway_are_joined_with_the_question_of_the_application(tmp_path, monkeypatch):
    """The gateway's own spans continue the application's trace; both are sent to the receiver."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(state, "open_tracer", lambda address: RequestTracer(provider))
    app = make(tmp_path, defenses=(HideNamed("d3"),))
    begun = {"traceparent": f"00-{1:032x}-{1:016x}-01"}
    headers = {"Authorization": f"Bearer {key(app, 'traces')}"}
    with client(app, key(app)) as http:
        assert http.post("/v1/chat/completions", json=chat(ASKED), headers=begun).status_code == 200
        sender = OTLPSpanExporter(f"{http.base_url}/v1/traces", headers=headers)
        assert sender.export(_whole_trace(exporter)) is SpanExportResult.SUCCESS
        sender.shutdown()
        assert http.post("/v1/traces", json=request(), headers=headers).status_code == 200
        (found,) = read_traffic(app.store, "default")
    assert (found.flagged, found.flagged_by) == (True, "trace")


def test_the_question_is_stored_with_log_text(tmp_path):
    app = make(tmp_path)
    app = replace(
        app, config=app.config.model_copy(update={"privacy": app.config.privacy.model_copy(update={"log_text": True})})
    )
    with client(app, key(app, "traces")) as http:
        assert http.post("/v1/traces", json=request()).status_code == 200
        (found,) = read_traffic(app.store, "default")
    assert found.text == ASKED
