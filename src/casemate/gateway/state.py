"""What all routes of a gateway share, and what is done beside them: following keys and settings, telling of alerts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from starlette.types import Scope

from casemate.app import App
from casemate.canaries import open_post
from casemate.config import GatewaySection
from casemate.errors import BackendError, CasemateError
from casemate.gateway.answering import Books
from casemate.gateway.dashboard.operating_point import Settings
from casemate.gateway.keys import Key, Keys
from casemate.gateway.limits import Limits, Purse
from casemate.gateway.metrics import Metrics
from casemate.gateway.pace import Paced, beat
from casemate.gateway.spans import Spans, spans_of
from casemate.together import Together

FOLLOW_S = 2.0
"""Seconds after which a key that was created elsewhere, or a setting that was changed there, is known here."""
SETTLE_S = 5.0
"""How long the store may take to write what an answer waits for."""
STALE_S = 60.0
"""A gateway that could not read its keys for so long is not ready."""
LOOK_S = 5.0
"""How long index and store may take to show that they are there."""
VISIT = "casemate.visit"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Visit:
    """One request.

    Attributes:
        id: Random; the client sees it as ``X-Request-Id``, and verdicts are noted with it.
        key: Whose it is, once that is known.
        began: When it came, by the monotonic clock.
        status: What was answered; 0: nothing yet.
    """

    id: str
    key: Key | None = None
    began: float = field(default_factory=time.monotonic)
    status: int = 0


def visit_of(scope: Scope) -> Visit:
    """The visit that a request is."""
    found: Visit = scope[VISIT]
    return found


@dataclass(eq=False)
class Gateway:
    """A wired system with a door.

    Attributes:
        app: The system. It belongs to the gateway, which closes it when it ends.
    """

    app: App

    def __post_init__(self) -> None:
        section = self.section
        self.keys = Keys(self.app.store)
        self.limits = Limits(
            self.app.store,
            section.requests_per_minute,
            section.tokens_per_day,
            section.concurrency,
            self.keys.follow,
        )
        self.metrics = Metrics(lambda: self.limits.working, self.app.store, lambda: time.monotonic() - self._followed)
        self.spans = spans_of(section.traces)
        self._wire(self.spans)
        self._flushes: Together[None, bool] = Together(lambda asked: [self.app.store.flush(SETTLE_S)] * len(asked))
        self._settings = Settings(self.app)
        self.post = open_post(self.app)
        self._followed = float("-inf")
        self._looked: tuple[float, bool] = (float("-inf"), False)

    def _wire(self, spans: Spans | None) -> None:
        """Puts what is counted, traced and paced into the guard."""
        guard, store = self.app.guard, self.app.guard.store or self.app.store
        guard.store = self.metrics.watching(store, *([spans.verdict] if spans else []))
        span = spans.writing if spans else nullcontext
        guard.generator = Paced(guard.generator, self.beat, self.metrics.stage, span)

        def watch(stage: str, seconds: float) -> None:
            self.metrics.stage(stage, seconds)
            if spans:
                spans.stage(stage, seconds)

        guard.watch = watch

    @property
    def section(self) -> GatewaySection:
        """Its part of the configuration."""
        return self.app.config.gateway

    def books(self, key: Key) -> Books:
        """Where an answer to a key's client is entered."""
        return Books(Purse(self.limits, key), self.app.store.receipt, self.settle, self.metrics)

    async def beat(self) -> None:
        """Waits for the next beat, while what was noted is written: that takes longer when there is more of it."""
        if self.section.pace_ms:
            self.app.store.flush(0)  # begins at once, and does not wait
            await beat(self.section.pace_ms / 1000)

    async def settle(self, receipt: Callable[[], bool]) -> None:
        """Waits until what was noted is written. Then it is safe from a kill, and known to other gateways.

        Args:
            receipt: The store's, for what was noted by then: the payment that came between may have carried it along.

        Raises:
            BackendError: If the store does not take it.
        """
        if not (receipt() or await self._flushes.ask(None)):
            raise BackendError("the event store does not take what is noted", backend="store", retryable=True)

    async def ready(self) -> bool:
        """Whether index, store and keys are there. Looked at once a second at most, whoever asks."""
        now = time.monotonic()
        if now - self._looked[0] >= 1:
            self._looked = now, self._looked[1]
            self._looked = now, await self._look()
        return self._looked[1]

    async def _look(self) -> bool:
        if time.monotonic() - self._followed > STALE_S:
            return False
        try:
            async with asyncio.timeout(LOOK_S):
                await asyncio.to_thread(self.app.index.tenants)
                return await asyncio.to_thread(self.app.store.flush, LOOK_S)
        except (CasemateError, TimeoutError) as error:
            _log.warning("not ready: %s", str(error) or type(error).__name__)
            return False

    def begin(self) -> None:
        """Reads keys and settings, and makes the first search as fast as the others. Blocks.

        Raises:
            BackendError: If index or store cannot be read.
        """
        self._follow()
        asked = {key.grant.tenant for key in self.keys.all() if key.revoked is None}
        for tenant in asked & set(self.app.index.tenants()):
            self.app.index.warm(tenant)
            if why := self.app.due(tenant):
                _log.warning("tenant %r: %s", tenant, why)

    def end(self) -> None:
        """Writes what is still to be noted, and closes the system."""
        self.limits.save(self.metrics.notes())
        if self.spans:
            self.spans.close()
        self.app.close()

    def _follow(self) -> None:
        self.keys.follow()
        self._settings.follow()
        self._followed = time.monotonic()

    def _tend(self) -> None:
        self.limits.save(self.metrics.notes())
        self._follow()

    async def tend(self) -> None:
        """Follows and writes, for ever."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await asyncio.to_thread(self._tend)
            except Exception as error:  # what is known stays; /readyz tells when it is too old
                _log.warning("keys and settings were not read: %s", str(error) or type(error).__name__)

    async def tell(self) -> None:
        """Brings alerts to people, for ever, if no other process does."""
        while True:
            try:
                await self.post.run()
            except Exception as error:
                _log.error("alerts are not sent for a while: %s", str(error) or type(error).__name__)
            await asyncio.sleep(self.post.settings.lease_s)

    @asynccontextmanager
    async def open(self, _: object = None) -> AsyncIterator[None]:
        """From the first request to the last."""
        await asyncio.to_thread(self.begin)
        beside = [asyncio.create_task(work) for work in (self.tend(), self.tell())]
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await asyncio.to_thread(self.end)
