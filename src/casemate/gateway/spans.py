"""OpenTelemetry traces: a span for each request, and in it one for each stage of its answer.

They are the operator's, and go to his collector. No span holds a text: not of questions, answers or documents, nor ids
of documents. What the guard decided is in them, as events of the request's span; nothing of it goes back to the client.
A trace that a client began (W3C ``traceparent``) goes on here, and in what a model's server is sent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from casemate.errors import needs
from casemate.passed_on import pass_on
from casemate.types import Event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ADDRESSES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_MS = 3000
"""How long the last spans may take to leave when the gateway ends."""
TOLD = ("defense", "flagged", "enforced", "action", "score", "threshold")


class Spans:
    """Where spans are made.

    Args:
        provider: Of the SDK; it belongs to this object.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._trace = provider, trace
        self._tracer = provider.get_tracer("casemate")
        self._carrier = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, scope: Scope, visit: Any) -> Iterator[None]:
        """The span of a request. What it began with is passed on."""
        kind, headers = self._trace.SpanKind.SERVER, Headers(scope=scope)
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(scope["method"], self._carrier.extract(given), kind)
        with self._trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            self._pass_on(span)
            try:
                yield
            finally:
                route, status = getattr(scope.get("route"), "path", "none"), visit.status or 499
                span.update_name(f"{scope['method']} {route}")
                span.set_attributes(
                    {
                        "http.request.method": scope["method"],
                        "http.route": route,
                        "http.response.status_code": status,
                        "casemate.request": visit.id,
                        "casemate.key": visit.key.id if visit.key else "",
                    }
                )
                if status >= 500:
                    span.set_status(self._trace.StatusCode.ERROR)

    def stage(self, stage: str, seconds: float) -> None:
        """The span of a stage that has just ended."""
        now = time.time_ns()
        self._tracer.start_span(stage, start_time=now - int(seconds * 1e9)).end(now)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The span of a generator at work; what it asks goes on in it."""
        before, span = self._trace.get_current_span(), self._tracer.start_span("generate")
        self._pass_on(span)
        try:
            yield
        finally:
            self._pass_on(before)
            span.end()

    def verdict(self, event: Event) -> None:
        """Notes a verdict in the span of its request."""
        told = {f"casemate.{name}": event.body[name] for name in TOLD if event.body.get(name) is not None}
        told["casemate.hidden"] = len(event.body.get("hidden", ()))
        self._trace.get_current_span().add_event("verdict", told)

    def close(self) -> None:
        """Sends what is left, for a moment."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _pass_on(self, span: Any) -> None:
        headers: dict[str, str] = {}
        self._carrier.inject(headers, self._trace.set_span_in_context(span))
        pass_on(headers)


def spans_of(address: str, environment: Mapping[str, str] | None = None) -> Spans | None:
    """What writes traces, if they are wanted: to this address, or where OpenTelemetry's own variables say.

    Raises:
        MissingExtra: If they are wanted, and the SDK is not installed.
    """
    told = os.environ if environment is None else environment
    off = told.get("OTEL_SDK_DISABLED", "").lower() == "true" or told.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    if not address and (off or not any(told.get(name) for name in ADDRESSES)):
        return None
    with needs("casemate[otel]"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    resource = Resource.create({SERVICE_NAME: "casemate"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address or None)))
    return Spans(provider)
