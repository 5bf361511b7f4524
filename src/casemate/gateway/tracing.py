"""OpenTelemetry traces: one span per request, and in it one per stage of the answer.

Traces go to the operator's collector. No span contains text of questions, answers or documents, nor ids of documents.
Verdicts are events of the request's span; clients do not see them. A client's W3C ``traceparent`` is continued here,
and forwarded to a remote generator.
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
from casemate.runtime.trace_context import forward_headers
from casemate.types import Event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_MS = 3000
"""Time for the last spans to be exported at shutdown."""
VERDICT_ATTRIBUTES = ("defense", "flagged", "enforced", "action", "score", "threshold")


class RequestTracer:
    """Creates the spans.

    Args:
        provider: Provider of the SDK, which this object owns.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._trace = provider, trace
        self._tracer = provider.get_tracer("casemate")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, scope: Scope, context: Any) -> Iterator[None]:
        """Wraps a request in a span, which continues the client's trace.

        Args:
            scope: ASGI scope of the request.
            context: Its ``RequestContext``.
        """
        kind, headers = self._trace.SpanKind.SERVER, Headers(scope=scope)
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(scope["method"], self._propagator.extract(given), kind)
        with self._trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            self._forward(span)
            try:
                yield
            finally:
                route, status = getattr(scope.get("route"), "path", "none"), context.status or 499
                span.update_name(f"{scope['method']} {route}")
                span.set_attributes(
                    {
                        "http.request.method": scope["method"],
                        "http.route": route,
                        "http.response.status_code": status,
                        "casemate.request": context.id,
                        "casemate.key": context.key.id if context.key else "",
                    }
                )
                if status >= 500:
                    span.set_status(self._trace.StatusCode.ERROR)

    def record_stage(self, stage: str, seconds: float) -> None:
        """Creates the span of a stage that has just ended."""
        now = time.time_ns()
        self._tracer.start_span(stage, start_time=now - int(seconds * 1e9)).end(now)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Wraps the generator in a span; its requests to other services continue that span."""
        before, span = self._trace.get_current_span(), self._tracer.start_span("generate")
        self._forward(span)
        try:
            yield
        finally:
            self._forward(before)
            span.end()

    def record_verdict(self, event: Event) -> None:
        """Adds a verdict to the span of its request."""
        attributes = {
            f"casemate.{name}": event.body[name] for name in VERDICT_ATTRIBUTES if event.body.get(name) is not None
        }
        attributes["casemate.hidden"] = len(event.body.get("hidden", ()))
        self._trace.get_current_span().add_event("verdict", attributes)

    def close(self) -> None:
        """Exports the remaining spans, for at most ``FLUSH_MS``."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _forward(self, span: Any) -> None:
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._trace.set_span_in_context(span))
        forward_headers(headers)


def open_tracer(endpoint: str, environment: Mapping[str, str] | None = None) -> RequestTracer | None:
    """Opens a tracer if an endpoint is configured, here or by OpenTelemetry's environment variables; else None.

    Raises:
        MissingExtra: If an endpoint is configured, and the SDK is not installed.
    """
    variables = os.environ if environment is None else environment
    disabled = variables.get("OTEL_SDK_DISABLED", "").lower() == "true"
    disabled = disabled or variables.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    if not endpoint and (disabled or not any(variables.get(name) for name in ENDPOINT_VARIABLES)):
        return None
    with needs("casemate[otel]"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    resource = Resource.create({SERVICE_NAME: "casemate"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    return RequestTracer(provider)
