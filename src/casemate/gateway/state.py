"""The gateway's shared state, and its background work: reading keys and settings, recording usage, sending alerts."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from casemate.config import GatewaySection
from casemate.errors import BackendError, CasemateError
from casemate.gateway import errors
from casemate.gateway.auth.keys import ApiKey, ApiKeyStore
from casemate.gateway.auth.rate_limits import RateLimits, TokenBudget, seconds_until_midnight
from casemate.gateway.metrics import Metrics
from casemate.gateway.response_timing import PacedGenerator, ResponsePacer
from casemate.gateway.tracing import model_attributes, open_tracer
from casemate.guard.guard import Guard
from casemate.monitor.enforcement import SettingsSync
from casemate.monitor.service import open_alert_dispatcher, open_document_sink, open_trace_recorder
from casemate.protocols import Generator
from casemate.runtime.batching import Coalescer
from casemate.runtime.events import append_or_log
from casemate.system import App
from casemate.types import Event, Hit, Query, Retrieval

REQUEST_KIND = "request"
"""Kind of the event that records a finished request: client, route, status and durations, never a text."""
SYNC_S = 2.0
"""Interval at which keys and settings of other gateways are read."""
WRITE_TIMEOUT_S = 5.0
"""Time that the store has to write the events of an answer before it is sent."""
STALE_S = 60.0
"""A gateway that has not read its keys for this long is not ready."""
PROBE_TIMEOUT_S = 5.0
"""Time that index and store have to answer a readiness probe."""
MAX_RECORDED = 8
"""Bodies of traces that are in memory decoded, until they are recorded."""
_CONTEXT = "casemate.request"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestContext:
    """One request.

    Attributes:
        id: Sent as ``X-Request-Id`` and recorded with verdicts.
        key: None before authentication.
        start: Arrival, by the monotonic clock.
        status: 0 for none sent yet.
        admitted: Whether it passed authentication and rate limits.
    """

    id: str
    key: ApiKey | None = None
    start: float = field(default_factory=time.monotonic)
    status: int = 0
    admitted: bool = False
    client: str = ""
    first_token: float | None = None
    stages: dict[str, float] = field(default_factory=dict)


_CURRENT: ContextVar[RequestContext | None] = ContextVar("casemate-request", default=None)


def set_context(scope: Scope, context: RequestContext) -> None:
    """Attaches the context to an ASGI scope and to the current task."""
    scope[_CONTEXT] = context
    _CURRENT.set(context)


def get_context(scope: Scope) -> RequestContext:
    """Returns the context of an ASGI scope."""
    context: RequestContext = scope[_CONTEXT]
    return context


@dataclass(eq=False)
class Gateway:
    """A wired system behind the HTTP API.

    Attributes:
        app: The system, which the gateway closes.

    ``documents`` is the sink of all uploads, with screening if configured; ``traces`` records production traces.
    ``decoding`` admits one body of traces at a time, ``recording`` admits ``MAX_RECORDED``: decoded, a body takes many
    times its compressed size.
    """

    app: App

    def __post_init__(self) -> None:
        section = self.section
        self.keys = ApiKeyStore(self.app.store)
        self.limits = RateLimits(
            self.app.store,
            section.requests_per_minute,
            section.tokens_per_day,
            section.concurrency,
            self.keys.sync,
            concurrency_per_key=section.concurrency_per_key,
        )
        self._pacer = ResponsePacer(section.pace_ms / 1000, section.timeout_s)
        self.metrics = Metrics(
            lambda: self.limits.in_progress,
            self.app.store,
            lambda: time.monotonic() - self._synced_at,
            self._pacer.longest_s,
        )
        self.tracer = open_tracer(section.otlp_endpoint)
        if self.tracer:
            rag = self.app.guard.rag
            self.tracer.stages = model_attributes(self.app.config.rag, rag.embedder, rag.generator)
        self.app = replace(self.app, guard=self._instrument(self.app.guard))
        self.documents = open_document_sink(self.app)
        self.traces = open_trace_recorder(self.app)
        self.decoding, self.recording = asyncio.Semaphore(1), asyncio.Semaphore(MAX_RECORDED)
        self._flushes: Coalescer[None, bool] = Coalescer(
            lambda asked: [self.app.store.flush(WRITE_TIMEOUT_S)] * len(asked)
        )
        self._settings = SettingsSync(self.app)
        self._alerts = open_alert_dispatcher(self.app)
        self._synced_at = float("-inf")
        self._probe: tuple[float, bool] = (float("-inf"), False)

    def _instrument(self, guard: Guard) -> Guard:
        """Adds metrics, traces and response pacing to the guard."""
        tracer, metrics = self.tracer, self.metrics

        def paced(generator: Generator) -> Generator:
            span = tracer.generation if tracer else nullcontext
            return PacedGenerator(generator, self.pace, observe, span)

        def observe(stage: str, seconds: float) -> None:
            metrics.observe_stage(stage, seconds)
            if context := _CURRENT.get():
                context.stages[stage] = context.stages.get(stage, 0.0) + seconds

        def on_stage(stage: str, seconds: float) -> None:
            observe(stage, seconds)
            if tracer:
                tracer.record_stage(stage, seconds)

        observers = [tracer.record_verdict] if tracer else []
        store = metrics.observed_store(guard.store or self.app.store, *observers)
        return guard.instrumented(store=store, wrap_generator=paced, on_stage=on_stage)

    @property
    def section(self) -> GatewaySection:
        """The section ``gateway`` of the configuration."""
        return self.app.config.gateway

    def usage_meter(self, key: ApiKey) -> UsageMeter:
        """Returns the meter that charges an answer to a key."""
        return UsageMeter(self, TokenBudget(self.limits, key))

    async def admit(self, key: ApiKey, *, message: bool = False) -> None:
        """Counts a request of a key, or an MCP message.

        Raises:
            ApiError: If the key is over a limit, or revoked.
            BackendError: If the request cannot be counted.
        """
        rejection = await (self.limits.admit_message(key) if message else self.limits.admit(key))
        if rejection:
            refuse = errors.budget_exhausted if rejection.reason == "budget" else errors.rate_limited
            raise refuse(rejection.retry_after_s)
        if self.keys.is_revoked(key.id):  # admission has read the newest key events
            raise errors.invalid_key()

    async def retrieve(self, query: Query) -> Retrieval:
        """The documents that a client may have, with scores; those of the bare system if the guard is off."""
        guard = self.app.guard
        if self.app.config.guard.mode == "off":
            return await guard.rag.retrieve(query)
        retrieval, _ = await guard.retrieve(query)
        scores = {hit.document.id: hit.score for hit in retrieval.hits}
        given = await guard.deliver(query, [hit.document for hit in retrieval.hits], metadata=False)
        await self.pace()
        return replace(retrieval, hits=tuple(Hit(document, scores[document.id]) for document in given))

    def record_ingest(
        self, key: ApiKey, action: str, sources: int, chunks: int, quarantined: int = 0, *, tenant: str = ""
    ) -> None:
        """Records who changed how much; not which sources, whose names may be confidential.

        An empty tenant is that of the key.
        """
        body: dict[str, Any] = {
            "action": action,
            "key": key.id,
            "tenant": tenant or key.grant.tenant,
            "sources": sources,
            "chunks": chunks,
            "quarantined": quarantined,
        }
        self.app.store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "ingest", body))

    def record_request(self, context: RequestContext, route: str, seconds: float) -> None:
        """Appends the event of a finished request, unless it was refused before it reached its route."""
        if not context.admitted or context.key is None:
            return
        body = {
            "request": context.id,
            "client": context.client or context.key.id,
            "tenant": context.key.grant.tenant,
            "route": route,
            "status": context.status or 499,
            "seconds": seconds,
            "first_token": context.first_token,
            "stages": context.stages,
        }
        append_or_log(self.app.store, REQUEST_KIND, body, f"request {context.id}")

    async def pace(self) -> None:
        """Waits for a multiple of the response interval; meanwhile events are written, which takes longer for more."""
        if self.section.pace_ms:
            self.app.store.flush(0)  # starts writing, and returns at once
            context = _CURRENT.get()
            await self._pacer.wait(context.key.id if context and context.key else "")

    async def wait_written(self, receipt: Callable[[], bool]) -> None:
        """Waits until a receipt (``EventStore.receipt``) confirms that events are written.

        Then a kill does not lose them, and other gateways read them.

        Raises:
            BackendError: If the store does not write them in time.
        """
        if not (receipt() or await self._flushes.submit(None)):
            raise BackendError("events cannot be written to the event store", backend="store", retryable=True)

    async def ready(self) -> bool:
        """Whether index, store and keys are available; probed at most once a second."""
        now = time.monotonic()
        if now - self._probe[0] >= 1:
            self._probe = now, self._probe[1]
            self._probe = now, await self._run_probe()
        return self._probe[1]

    async def _run_probe(self) -> bool:
        if time.monotonic() - self._synced_at > STALE_S:
            return False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await asyncio.to_thread(self.app.index.tenants)
                return await asyncio.to_thread(self.app.store.flush, PROBE_TIMEOUT_S)
        except (CasemateError, TimeoutError) as error:
            _log.warning("not ready: %s", str(error) or type(error).__name__)
            return False

    @asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncIterator[None]:
        """Runs the background work from the first request to the last, and closes the system."""
        await asyncio.to_thread(self._start)
        tasks = [asyncio.create_task(work) for work in (self._sync_forever(), self._send_alerts_forever())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._stop)

    def _start(self) -> None:
        """Reads keys and settings, and warms up the index, so that the first search is not slower than the others."""
        self._sync()
        tenants = {key.grant.tenant for key in self.keys.all() if key.revoked is None}
        for tenant in tenants & set(self.app.index.tenants()):
            self.app.index.warm(tenant)
            if why := self.app.due(tenant):
                _log.warning("tenant %r: %s", tenant, why)

    def _stop(self) -> None:
        self.limits.record_usage()
        if self.tracer:
            self.tracer.close()
        self.app.close()

    def _sync(self) -> None:
        self.keys.sync()
        self._settings.sync()
        self._synced_at = time.monotonic()

    def _record_and_sync(self) -> None:
        self.limits.record_usage()
        self._sync()

    async def _sync_forever(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            try:
                await asyncio.to_thread(self._record_and_sync)
            except Exception as error:  # the cached values stay; /readyz reports when they are too old
                _log.warning("keys and settings cannot be read: %s", str(error) or type(error).__name__)

    async def _send_alerts_forever(self) -> None:
        """Sends alerts while this process has the lease."""
        while True:
            try:
                await self._alerts.run()
            except Exception as error:
                _log.error("alerts cannot be sent at the moment: %s", str(error) or type(error).__name__)
            await asyncio.sleep(self._alerts.settings.lease_s)


@dataclass(frozen=True, slots=True)
class UsageMeter:
    """Charges one answer, and waits until its events are written, before the answer is sent."""

    gateway: Gateway
    budget: TokenBudget

    async def charge(self, tokens: int, *, last: bool = False) -> None:
        """Charges tokens before they are sent; raises ``ApiError`` if the budget does not cover them."""
        if not await self.budget.use(tokens, last=last):
            raise errors.budget_exhausted(seconds_until_midnight())
        self.gateway.metrics.tokens.inc(tokens)

    async def charge_and_write(self, tokens: int, *, last: bool = False) -> None:
        """Charges tokens, and waits until the events of the answer are written; the charge often writes them as well.

        Raises ``BackendError`` if they cannot be written.
        """
        receipt = self.gateway.app.store.receipt()
        await self.charge(tokens, last=last)
        await self.gateway.wait_written(receipt)
