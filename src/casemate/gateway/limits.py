"""How much a key may ask: so many requests a minute, so many tokens a day; and how much is at work at once.

Rates and budgets are tallies in the event store, so that all gateways on one store, restarted or not, give a key what
one gateway would. A request is counted before it is let in, and a token before it leaves: what was not given does not
leave, and a budget is never exceeded. An answer that a budget does not cover uses it up. What a gateway has taken for
an answer that it sends when it is killed is lost: a few hundred tokens that count and were not sent.

Tokens are those of what the client sent and what he was sent, not those of the context: a budget that counted the
context would tell how long it was.
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
from typing import Any

from casemate.errors import CasemateError
from casemate.gateway.keys import Key
from casemate.protocols import EventStore
from casemate.together import Together
from casemate.types import Event, Wanted

KIND = "usage"
BLOCK, LARGEST = 64, 1024
"""Tokens that are taken at once for an answer in the making: so many at first, twice as many each time, up to this."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a request is not taken now: ``rate``, ``budget`` or ``busy``, and the seconds after which it may be."""

    why: str
    seconds: int


@dataclass(eq=False)
class Limits:
    """Counts requests and tokens by key.

    Attributes:
        store: Where it is counted.
        requests_per_minute: Of a key that has no rate of its own.
        tokens_per_day: Of a key that has no budget of its own.
        concurrency: Requests at work at once.
        before: Called, in a thread, before requests are counted: for what is as old as they are at most.
        today: The day that counts.
    """

    store: EventStore
    requests_per_minute: int
    tokens_per_day: int
    concurrency: int
    before: Callable[[], None] = lambda: None
    today: Callable[[], date] = lambda: datetime.now(UTC).date()
    working: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.gateway = uuid.uuid4().hex[:16]
        self._fresh: dict[str, Counter[str]] = {}  # of this gateway, not yet noted
        self._lock = threading.Lock()
        self._admissions: Together[Key, Wait | None] = Together(self._admit)
        self._payments: Together[tuple[Key, int], int] = Together(self._pay)

    def enter(self) -> Wait | None:
        """Takes one of the places; who got one must ``leave``."""
        with self._lock:
            if self.working >= self.concurrency:
                return Wait("busy", 1)
            self.working += 1
            return None

    def leave(self) -> None:
        """Gives a place back."""
        with self._lock:
            self.working -= 1

    async def admit(self, key: Key) -> Wait | None:
        """Counts a request, unless the key has used up its rate or its budget.

        Raises:
            BackendError: If it cannot be counted.
        """
        return await self._admissions.ask(key)

    async def take(self, key: Key, tokens: int) -> int:
        """Takes tokens from the day's budget, as many as it has; gives back, if below 0.

        Raises:
            BackendError: If they cannot be counted.
        """
        return await self._payments.ask((key, tokens))

    def save(self, notes: Mapping[str, Any]) -> None:
        """Notes what was used since the last time, with notes of the gateway's own; nothing if nobody asked.

        Args:
            notes: What else of these seconds is worth keeping.
        """
        with self._lock:
            if not self._fresh:
                return
            body = {"gateway": self.gateway, "day": self.today().isoformat(), **notes}
            body["keys"] = {id_: dict(counts) for id_, counts in self._fresh.items()}
            self._fresh = {}
        self.store.append(Event(uuid.uuid4().hex, datetime.now(UTC), KIND, body))

    def _admit(self, asked: list[Key]) -> Sequence[Wait | None]:
        """Counts one request of each, all in one transaction."""
        self.before()
        keys, counts = {key.id: key for key in asked}, Counter(key.id for key in asked)
        wanted = [
            *(Wanted(f"requests:{i}", counts[i], self._rate(k), self._rate(k) / 60) for i, k in keys.items()),
            *(Wanted(f"tokens:{i}", 0, self._budget(k), period=self.today().isoformat()) for i, k in keys.items()),
        ]
        found = self.store.take(wanted)
        admitted, spent = (dict(zip(keys, part, strict=True)) for part in (found[: len(keys)], found[len(keys) :]))
        left = Counter({i: given.amount for i, given in admitted.items()})
        waits = list[Wait | None]()
        for key in asked:
            left[key.id] -= 1
            if spent[key.id].used >= self._budget(key):
                waits.append(Wait("budget", until_midnight()))
            elif left[key.id] < 0:
                rate = self._rate(key)
                waits.append(Wait("rate", max(1, ceil((1 - (rate - admitted[key.id].used)) * 60 / rate))))
            else:
                waits.append(None)
                self._count(key, "requests", 1)
        return waits

    def _pay(self, asked: list[tuple[Key, int]]) -> Sequence[int]:
        """Takes for all of them in one transaction; of what a key has left, the first are served first."""
        keys = {key.id: key for key, _ in asked}
        sums = Counter[str]()
        for key, tokens in asked:
            sums[key.id] += tokens
        day = self.today().isoformat()
        wanted = [Wanted(f"tokens:{i}", sums[i], self._budget(k), period=day) for i, k in keys.items()]
        found = self.store.take(wanted)
        left = {i: given.amount for i, given in zip(keys, found, strict=True)}
        for key, tokens in asked:
            left[key.id] -= min(tokens, 0)
        got = list[int]()
        for key, tokens in asked:
            given = min(tokens, left[key.id])
            left[key.id] -= max(given, 0)
            got.append(given)
            self._count(key, "tokens", given)
        return got

    def _count(self, key: Key, what: str, count: int) -> None:
        with self._lock:
            self._fresh.setdefault(key.id, Counter())[what] += count

    def _rate(self, key: Key) -> int:
        return key.grant.requests_per_minute or self.requests_per_minute

    def _budget(self, key: Key) -> int:
        return key.grant.tokens_per_day or self.tokens_per_day


@dataclass(slots=True)
class Purse:
    """What is taken for one answer, in blocks, before it leaves.

    Attributes:
        limits: Whose tokens.
        key: Of the client.
        held: Taken and not yet used.
        paid: Used.
    """

    limits: Limits
    key: Key
    held: int = 0
    paid: int = 0
    block: int = BLOCK

    async def pay(self, tokens: int, *, exactly: bool = False) -> bool:
        """Uses tokens; False if the budget does not cover them: they may not leave, and the budget is used up.

        Args:
            tokens: How many.
            exactly: Whether no more will be wanted.

        Raises:
            BackendError: If they cannot be counted.
        """
        if tokens > self.held:
            more = tokens - self.held
            self.held += await self.limits.take(self.key, more if exactly else max(more, self.block))
            self.block = min(2 * self.block, LARGEST)
        if tokens > self.held:
            self.held = 0
            return False
        self.held -= tokens
        self.paid += tokens
        return True

    async def close(self) -> None:
        """Gives back what is not used."""
        back, self.held = self.held, 0
        if back:
            try:
                await self.limits.take(self.key, -back)
            except CasemateError as error:
                _log.warning("%d tokens of key %s were not given back: %s", back, self.key.id, error)


def until_midnight() -> int:
    """Seconds until budgets begin anew."""
    now = datetime.now(UTC)
    tomorrow = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return ceil((tomorrow - now).total_seconds())
