"""OpenTelemetry traces: one span per request, and in it one per stage of the answer.

Traces go to the operator's collector. No span contains text of questions, answers or documents, nor ids of documents.
Verdicts are events of the request's span; clients do not see them. A client's W3C ``traceparent`` is continued here,
and forwarded to a remote generator.

Names of spans and attributes are those of OpenTelemetry's semantic conventions for HTTP and generative AI
(``gen_ai.*``), https://github.com/open-telemetry/semantic-conventions-genai. Further ones begin with ``casemate.``.

Deviation: no ``gen_ai.usage.*``, because the gateway does not know a model's count of tokens, and nothing with text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from casemate.config import RagSection
from casemate.errors import needs
from casemate.protocols import Embedder, Generator
from casemate.runtime.trace_context import forward_headers
from casemate.types import Event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_MS = 3000
"""Time for the last spans to be exported at shutdown."""
OPERATIONS = {"embed": "embeddings", "search": "retrieval", "generate": "chat"}
"""Operations of the conventions, by stage. Spans of other stages, which are defenses, have the stage's name."""
VERDICT_ATTRIBUTES = ("defense", "flagged", "enforced", "action", "score", "threshold")


class RequestTracer:
    """Creates the spans, and owns the provider of the SDK.

    ``stages`` has attributes of the spans of embedder and generator (``model_attributes``).
    """

    stages: Mapping[str, Mapping[str, str | int]] = MappingProxyType({})

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._trace = provider, trace
        self._tracer = provider.get_tracer("casemate")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, scope: Scope, context: Any) -> Iterator[None]:
        """Wraps a request in a span, which continues the client's trace."""
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
                    self._mark_failed(span, str(status))

    def record_stage(self, stage: str, seconds: float) -> None:
        """Creates the span of a stage that has just ended."""
        now = time.time_ns()
        self._stage_span(stage, start_time=now - int(seconds * 1e9)).end(now)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Wraps the generator in a span; its requests to other services continue that span."""
        before, span = self._trace.get_current_span(), self._stage_span("generate", kind=self._trace.SpanKind.CLIENT)
        self._forward(span)
        try:
            yield
        except Exception as error:
            self._mark_failed(span, type(error).__name__)
            raise
        finally:
            self._forward(before)
            span.end()

    @contextmanager
    def tool(self, name: str) -> Iterator[None]:
        """Wraps the call of a tool that exists in a span; another name is text of the client."""
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "mcp.method.name": "tools/call",
        }
        span = self._tracer.start_span(f"execute_tool {name}", attributes=attributes)
        with self._trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except Exception as error:
                self._mark_failed(span, type(error).__name__)
                raise

    def _mark_failed(self, span: Any, error_type: str) -> None:
        span.set_attribute("error.type", error_type)
        span.set_status(self._trace.StatusCode.ERROR)

    def _stage_span(self, stage: str, **options: Any) -> Any:
        attributes: dict[str, str | int] = dict(self.stages.get(stage, {}))
        operation = OPERATIONS.get(stage)
        if operation:
            attributes["gen_ai.operation.name"] = operation
        model = attributes.get("gen_ai.request.model", "")
        return self._tracer.start_span(f"{operation or stage} {model}".strip(), attributes=attributes, **options)

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


def model_attributes(config: RagSection, embedder: Embedder, generator: Generator) -> dict[str, dict[str, str | int]]:
    """Attributes of the spans of embedder and generator, by stage.

    Provider and model are the plug-in's name and its option ``model``; without that option, both are its name.
    """
    found: dict[str, dict[str, str | int]] = {}
    parts = {"embed": (config.embedder.use, embedder), "generate": (config.generator.use, generator)}
    for stage, (plug_in, part) in parts.items():
        model = getattr(part, "model", None)
        found[stage] = {
            "gen_ai.provider.name": plug_in,
            "gen_ai.request.model": model if isinstance(model, str) and model else plug_in,
        }
    found["embed"]["gen_ai.embeddings.dimension.count"] = embedder.dim
    found["generate"]["gen_ai.output.type"] = "text"
    return found


def open_tracer(endpoint: str) -> RequestTracer | None:
    """Opens a tracer if an endpoint is configured, here or by OpenTelemetry's environment variables; else None.

    Raises:
        MissingExtra: If an endpoint is configured, and the SDK is not installed.
    """
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    disabled = disabled or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    if not endpoint and (disabled or not any(os.environ.get(name) for name in ENDPOINT_VARIABLES)):
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
