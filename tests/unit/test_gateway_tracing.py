"""Traces: content, and export to a collector over HTTP."""

from __future__ import annotations

import gzip
import importlib
import pkgutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra casemate[otel] is not installed")
from opentelemetry import semconv
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import SpanKind

from casemate.backends.generators.openai import OpenAIGenerator
from casemate.errors import ConfigError
from casemate.gateway import state
from casemate.gateway.tracing import RequestTracer, open_tracer
from tests import gateways
from tests.fake_openai import FakeOpenAI
from tests.gateways import HideNamed, chat, client, key, make

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BEGUN = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exported(monkeypatch):
    """The exporter that collects all spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(state, "open_tracer", lambda address: RequestTracer(provider))
    return exporter


def finished(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_and_each_stage_a_child_span(tmp_path, exported, stream):
    app = make(tmp_path, defenses=(HideNamed("d3"),))
    with client(app, key(app)) as http:
        answer = http.post("/v1/chat/completions", json=chat("only3 secretword", stream=stream), headers=BEGUN)
        assert answer.status_code == 200
    spans = finished(exported)
    request = spans.pop("POST /v1/chat/completions")
    assert spans.keys() == {"embeddings minilm", "retrieval", "HideNamed", "chat extractive"}
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert {span.parent.span_id for span in spans.values()} == {request.context.span_id}
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["casemate.request"] == answer.headers["x-request-id"]
    for span in spans.values():
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time
    (verdict,) = request.events
    assert (verdict.name, verdict.attributes["casemate.flagged"], verdict.attributes["casemate.hidden"]) == (
        "verdict",
        True,
        1,
    )


PUBLISHED = {
    value
    for package in (semconv.attributes, semconv._incubating.attributes)
    for module in pkgutil.iter_modules(package.__path__)
    for name, value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).items()
    if name.isupper() and isinstance(value, str)
}
"""All attribute names of OpenTelemetry's published conventions."""


def attribute_names(spans):
    """Names of the attributes of spans and events: each is published or begins with ``casemate.``."""
    names = {name for span in spans for group in (span, *span.events) for name in group.attributes}
    assert {name for name in names if name not in PUBLISHED and not name.startswith("casemate.")} == set()
    return names


def test_attributes_and_operations_follow_the_published_conventions(tmp_path, exported):
    with FakeOpenAI() as fake:
        app = make(tmp_path, OpenAIGenerator("m", fake.url, "k"), (HideNamed("d3"),))
        with client(app, key(app)) as http:
            assert http.post("/v1/chat/completions", json=chat("only3")).status_code == 200
    assert len(PUBLISHED) > 500
    spans = exported.get_finished_spans()
    expected = {"gen_ai.operation.name", "gen_ai.request.model", "gen_ai.provider.name", "gen_ai.output.type"}
    assert expected <= attribute_names(spans)
    done = {name: span for span in spans if (name := span.attributes.get("gen_ai.operation.name"))}
    assert done.keys() == {"embeddings", "retrieval", "chat"}
    assert done.keys() <= {value.value for value in gen_ai.GenAiOperationNameValues}
    assert done["chat"].attributes["gen_ai.output.type"] in {value.value for value in gen_ai.GenAiOutputTypeValues}
    for operation, span in done.items():  # the convention for span names
        assert span.name == f"{operation} {span.attributes.get('gen_ai.request.model', '')}".strip()
    assert done["embeddings"].attributes["gen_ai.embeddings.dimension.count"] == 256
    assert done["chat"].kind is SpanKind.CLIENT


def test_span_of_a_generator_failure_has_the_error_type_without_the_message(tmp_path, exported):
    app = make(tmp_path, gateways.Down())
    with client(app, key(app)) as http:
        assert http.post("/v1/chat/completions", json=chat("only3")).status_code == 503
    spans = exported.get_finished_spans()
    assert "error.type" in attribute_names(spans)
    failed = {span.name: span.attributes["error.type"] for span in spans if "error.type" in span.attributes}
    assert failed == {"chat extractive": "BackendError", "POST /v1/chat/completions": "503"}
    assert not any("secret" in span.to_json() for span in spans)


def test_spans_contain_no_text_and_responses_contain_no_trace_data(tmp_path, exported):
    app = make(tmp_path, defenses=(HideNamed("d3"),))
    with client(app, key(app, "admin")) as http:
        sent = {"documents": [{"source": "secretsource", "text": "secretword and more"}]}
        answers = [
            http.post("/v1/documents", json=sent, headers=BEGUN),
            http.post("/v1/chat/completions", json=chat("secretword"), headers=BEGUN),
            http.post("/v1/retrieve", json={"question": "secretword"}, headers=BEGUN),
            http.delete("/v1/documents", params={"source": "secretsource"}, headers=BEGUN),
            http.get("/v1/nowhere/secretword", headers=BEGUN),
        ]
    shown = "".join(span.to_json() for span in exported.get_finished_spans())
    assert "secret" not in shown
    assert "only" not in shown
    assert len(exported.get_finished_spans()) > 8
    for answer in answers:
        assert not any("trace" in name for name in answer.headers)
        assert TRACE not in answer.text


def test_refused_and_disconnected_requests_have_spans(tmp_path, exported):
    app = make(tmp_path)
    with client(app, None) as http:
        assert http.post("/v1/chat/completions", json=chat("x")).status_code == 401
        http.get("/healthz")
    (span,) = exported.get_finished_spans()
    assert (span.attributes["http.response.status_code"], span.attributes["casemate.key"]) == (401, "")


def test_trace_context_is_sent_to_a_remote_model(tmp_path, exported):
    with FakeOpenAI() as fake:
        app = make(tmp_path, OpenAIGenerator("m", fake.url, "k"))
        with client(app, key(app)) as http:
            assert http.post("/v1/chat/completions", json=chat("only1"), headers=BEGUN).status_code == 200
        (received,) = fake.received
    generate = finished(exported)["chat m"]
    assert received.headers["traceparent"] == f"00-{TRACE}-{generate.context.span_id:016x}-01"


def test_without_tracing_no_trace_headers_are_sent(tmp_path):
    with FakeOpenAI() as fake:
        app = make(tmp_path, OpenAIGenerator("m", fake.url, "k"))
        with client(app, key(app)) as http:
            assert http.post("/v1/chat/completions", json=chat("only1"), headers=BEGUN).status_code == 200
        (received,) = fake.received
    assert "traceparent" not in received.headers


def test_tracing_is_off_by_default(tmp_path, monkeypatch):
    assert open_tracer("") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert open_tracer("") is None
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        make(tmp_path, otlp_endpoint="http://user:secret@collector/v1/traces")


class Collector(BaseHTTPRequestHandler):
    """A minimal OTLP receiver for spans."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(body)))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@contextmanager
def collecting():
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.got = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server.got, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("how", ["configuration", "environment"])
def test_a_collector_receives_spans_over_http(tmp_path, monkeypatch, how):
    with collecting() as (got, url):
        section = {"otlp_endpoint": f"{url}/v1/traces"} if how == "configuration" else {}
        if how == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
            monkeypatch.setenv("OTEL_SERVICE_NAME", "library")
        app = make(tmp_path, **section)
        with client(app, key(app)) as http:  # shutdown exports the remaining spans
            assert http.post("/v1/chat/completions", json=chat("only1"), headers=BEGUN).status_code == 200
    assert {path for path, _ in got} == {"/v1/traces"}
    resources = [r for _, request in got for r in request.resource_spans]
    names = {span.name for r in resources for scope in r.scope_spans for span in scope.spans}
    assert names == {"POST /v1/chat/completions", "embeddings minilm", "retrieval", "chat extractive"}
    service = {a.value.string_value for r in resources for a in r.resource.attributes if a.key == "service.name"}
    assert service == {"library" if how == "environment" else "casemate"}
    assert {s.trace_id.hex() for r in resources for scope in r.scope_spans for s in scope.spans} == {TRACE}


def test_a_missing_collector_does_not_fail_requests(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    app = make(tmp_path, otlp_endpoint="http://127.0.0.1:9/v1/traces")
    with client(app, key(app)) as http:
        assert http.post("/v1/chat/completions", json=chat("only1")).status_code == 200
