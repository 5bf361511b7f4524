"""Rate limits per minute, token budgets per day, and the limit of concurrent requests.

Rates and budgets are quotas in the event store, so all gateways on one store, restarted or not, together grant what one
gateway would. A request is counted before it is admitted, and a token before it is sent, so a budget is never exceeded.
An answer that the budget does not cover uses up the rest of it. If a gateway is killed, the tokens that it reserved for
running answers are lost: up to 1,024 for each.

Tokens are those of the client's text and of the answer, not of the context: otherwise the budget would reveal the
length of the context.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from math import ceil
from typing import Literal

from casemate.errors import CasemateError
from casemate.gateway.auth.keys import ApiKey
from casemate.protocols import EventStore
from casemate.runtime.batching import Coalescer
from casemate.types import Event, QuotaGrant, QuotaRequest

KIND = "usage"
FIRST_BLOCK, LARGEST_BLOCK = 64, 1024
"""Tokens that are reserved at once for a stream: each block is twice as large as the one before."""
MESSAGES_PER_REQUEST = 5
"""MCP messages that a key may send for each request of its rate limit. For each call, a client may open a connection
with two messages, list the tools, call one, and close the connection."""
FREE_SLOTS = 5
"""Slots of one key for each free slot: alone it gets five sixths, and n keys leave 1 / (5 n + 1) free."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not admitted, and the seconds after which it may be."""

    reason: Literal["rate", "budget", "busy"]
    retry_after_s: int


@dataclass(eq=False)
class RateLimits:
    """Counts requests and tokens by API key. Raises ``BackendError`` if they cannot be counted.

    Attributes:
        requests_per_minute: Rate limit of a key that has none of its own.
        tokens_per_day: The same for its budget, in tokens.
        concurrency_per_key: The same for one key; None: five sixths of it, so one key cannot take every slot. A key has
            at most ``FREE_SLOTS`` times as many slots as are free, so two or three keys cannot take them all either
            (dynamic thresholds: Choudhury and Hahne 1998).
        before_admission: Called in a thread before each batch of requests is counted.
    """

    store: EventStore
    requests_per_minute: int
    tokens_per_day: int
    concurrency: int
    before_admission: Callable[[], None] = lambda: None
    today: Callable[[], date] = lambda: datetime.now(UTC).date()
    concurrency_per_key: int | None = None
    in_progress: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.gateway = uuid.uuid4().hex[:16]
        self._limit_per_key = self.concurrency_per_key or max(1, self.concurrency * 5 // 6)
        self._slots: Counter[str] = Counter()
        self._unrecorded: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()
        self._admissions: Coalescer[ApiKey, Rejection | None] = Coalescer(self._admit_batch)
        self._messages: Coalescer[ApiKey, Rejection | None] = Coalescer(self._admit_messages)
        self._charges: Coalescer[tuple[ApiKey, int], int] = Coalescer(self._consume_batch)

    def acquire_slot(self, key: ApiKey) -> Rejection | None:
        """Reserves a slot for a request of a key; if it succeeds, call ``release_slot`` later."""
        with self._lock:
            own, free = self._slots[key.id], self.concurrency - self.in_progress
            if own >= min(self._limit_per_key, FREE_SLOTS * free):
                return Rejection("busy", 1)
            self.in_progress += 1
            self._slots[key.id] += 1
            return None

    def release_slot(self, key: ApiKey) -> None:
        """Frees a slot."""
        with self._lock:
            self.in_progress -= 1
            self._slots[key.id] -= 1
            if not self._slots[key.id]:
                del self._slots[key.id]

    async def admit(self, key: ApiKey) -> Rejection | None:
        """Counts a request, unless the key has exhausted its rate limit or its budget."""
        return await self._admissions.submit(key)

    async def admit_message(self, key: ApiKey) -> Rejection | None:
        """Counts an MCP message, unless the key has sent ``MESSAGES_PER_REQUEST`` times its rate limit."""
        return await self._messages.submit(key)

    async def consume_tokens(self, key: ApiKey, tokens: int) -> int:
        """Deducts tokens from the day's budget, as many as are left; returns how many. A negative number refunds."""
        return await self._charges.submit((key, tokens))

    def record_usage(self) -> None:
        """Records the usage since the last call as an event, unless there is none."""
        with self._lock:
            if not self._unrecorded:
                return
            keys = {id_: dict(counts) for id_, counts in self._unrecorded.items()}
            body = {"gateway": self.gateway, "day": self.today().isoformat(), "keys": keys}
            self._unrecorded = {}
        self.store.append(Event(uuid.uuid4().hex, datetime.now(UTC), KIND, body))

    def _admit_batch(self, asked: list[ApiKey]) -> Sequence[Rejection | None]:
        """Counts one request of each key, in one transaction."""
        self.before_admission()
        keys, counts = {key.id: key for key in asked}, Counter(key.id for key in asked)
        day = self.today().isoformat()
        grants = self.store.acquire(
            [
                *(_per_minute(f"requests:{i}", counts[i], self._rate(k)) for i, k in keys.items()),
                *(QuotaRequest(f"tokens:{i}", 0, self._budget(k), period=day) for i, k in keys.items()),
            ]
        )
        requests, tokens = (dict(zip(keys, part, strict=True)) for part in (grants[: len(keys)], grants[len(keys) :]))
        results = list[Rejection | None]()
        for key, over_rate in zip(asked, _rejections(asked, requests, self._rate), strict=True):
            over_budget = tokens[key.id].used >= self._budget(key)
            results.append(Rejection("budget", seconds_until_midnight()) if over_budget else over_rate)
            if results[-1] is None:
                self._count(key, "requests", 1)
        return results

    def _admit_messages(self, asked: list[ApiKey]) -> Sequence[Rejection | None]:
        """Counts one MCP message of each key, in one transaction."""
        self.before_admission()
        keys, counts = {key.id: key for key in asked}, Counter(key.id for key in asked)
        grants = self.store.acquire(
            [_per_minute(f"messages:{i}", counts[i], self._message_rate(k)) for i, k in keys.items()]
        )
        return _rejections(asked, dict(zip(keys, grants, strict=True)), self._message_rate)

    def _consume_batch(self, asked: list[tuple[ApiKey, int]]) -> Sequence[int]:
        """Deducts all amounts in one transaction; if a key has too few left, the first requests get them."""
        keys = {key.id: key for key, _ in asked}
        sums = Counter[str]()
        for key, tokens in asked:
            sums[key.id] += tokens
        day = self.today().isoformat()
        requests = [QuotaRequest(f"tokens:{i}", sums[i], self._budget(k), period=day) for i, k in keys.items()]
        left = {i: grant.amount for i, grant in zip(keys, self.store.acquire(requests), strict=True)}
        for key, tokens in asked:
            left[key.id] -= min(tokens, 0)
        results = list[int]()
        for key, tokens in asked:
            granted = min(tokens, left[key.id])
            left[key.id] -= max(granted, 0)
            results.append(granted)
            self._count(key, "tokens", granted)
        return results

    def _count(self, key: ApiKey, what: str, count: int) -> None:
        with self._lock:
            self._unrecorded.setdefault(key.id, Counter())[what] += count

    def _rate(self, key: ApiKey) -> int:
        return key.grant.requests_per_minute or self.requests_per_minute

    def _message_rate(self, key: ApiKey) -> int:
        return MESSAGES_PER_REQUEST * self._rate(key)

    def _budget(self, key: ApiKey) -> int:
        return key.grant.tokens_per_day or self.tokens_per_day


def _per_minute(name: str, count: int, rate: int) -> QuotaRequest:
    return QuotaRequest(name, count, rate, rate / 60)


def _rejections(
    asked: Sequence[ApiKey], grants: Mapping[str, QuotaGrant], rate_of: Callable[[ApiKey], int]
) -> list[Rejection | None]:
    """The rejection of each request that its key's grant does not cover; the first requests of a key get it."""
    left = Counter({id_: grant.amount for id_, grant in grants.items()})
    results = list[Rejection | None]()
    for key in asked:
        left[key.id] -= 1
        rate = rate_of(key)
        wait = max(1, ceil((1 - (rate - grants[key.id].used)) * 60 / rate))
        results.append(Rejection("rate", wait) if left[key.id] < 0 else None)
    return results


@dataclass(slots=True)
class TokenBudget:
    """Reserves tokens for one answer, in blocks, before they are sent."""

    limits: RateLimits
    key: ApiKey
    reserved: int = 0
    used: int = 0
    block: int = FIRST_BLOCK

    async def use(self, tokens: int, *, last: bool = False) -> bool:
        """Uses tokens. If it returns False, the budget does not cover them: do not send them.

        For the last ones no block is reserved.
        """
        if tokens > self.reserved:
            missing = tokens - self.reserved
            self.reserved += await self.limits.consume_tokens(self.key, missing if last else max(missing, self.block))
            self.block = min(2 * self.block, LARGEST_BLOCK)
        if tokens > self.reserved:
            self.reserved = 0
            return False
        self.reserved -= tokens
        self.used += tokens
        return True

    async def close(self) -> None:
        """Refunds unused tokens."""
        unused, self.reserved = self.reserved, 0
        if unused:
            try:
                await self.limits.consume_tokens(self.key, -unused)
            except CasemateError as error:
                _log.warning("%d tokens of key %s were not refunded: %s", unused, self.key.id, error)


def seconds_until_midnight() -> int:
    """Returns the seconds until the budgets are reset (UTC)."""
    now = datetime.now(UTC)
    tomorrow = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return ceil((tomorrow - now).total_seconds())
