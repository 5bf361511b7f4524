"""The black box that attacks query, and the session behind it: budget, retries, recorded exchanges.

An attack gets a `MeteredBlackBox`, which can only ask. The `TargetSession` behind it records the guard's actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from casemate.errors import BackendError, BudgetExhausted, QueryError
from casemate.protocols import Target
from casemate.redteam.lab.caching import PROMPT_COUNTS
from casemate.redteam.lab.store import Exchange
from casemate.runtime.retry import retry
from casemate.types import DEFAULT_TENANT, Query, Reply

T = TypeVar("T")


@dataclass(slots=True)
class Budget:
    """Limits the number of questions: ``total`` (None: unlimited), ``spent``, and ``leased`` to work items in progress.

    ``exhausted``: a question was rejected because the total was spent.
    """

    total: int | None = None
    spent: int = 0
    exhausted: bool = False
    leased: int = 0

    def lease(self, count: int) -> bool:
        """Reserves questions for a work item; False if too few are left."""
        if self.total is None:
            return True
        if self.spent + self.leased + count > self.total:
            return False
        self.leased += count
        return True

    def settle(self, leased: int, asked: int) -> None:
        """Replaces a lease by the number of questions that its work item asked."""
        self.leased -= leased if self.total is not None else 0
        self.spent += asked

    def require(self) -> None:
        """Raises ``BudgetExhausted`` unless another question may be asked."""
        if self.total is not None and self.spent >= self.total:
            self.exhausted = True
            raise BudgetExhausted(f"all {self.total} questions of the campaign are asked; raise its budget")


@dataclass(frozen=True, slots=True)
class MeteredBlackBox:
    """The `BlackBox` that an attack gets: it can ask, and nothing else."""

    ask: Callable[[str], Coroutine[Any, Any, Reply]]


@dataclass(slots=True)
class TargetSession:
    """A series of questions to one target. As a context manager it counts as one trial and yields a black box.

    Attributes:
        client: Client name of the question with this number, from 0.
        budget: Budget, shared by all sessions of a campaign.
        waits: Seconds to wait before each retry of an unavailable target.
        truncated: Whether the campaign's budget ended this session before the attack did.
    """

    target: Target
    client: Callable[[int], str]
    budget: Budget = field(default_factory=Budget)
    k: int = 5
    tenant: str = DEFAULT_TENANT
    waits: Sequence[float] = ()
    truncated: bool = field(default=False, init=False)
    _asked: int = field(default=0, init=False)
    _exchanges: dict[int, Exchange] = field(default_factory=dict, init=False)
    _token: Token[Counter[str] | None] | None = field(default=None, init=False)

    def __enter__(self) -> MeteredBlackBox:
        self._token = PROMPT_COUNTS.set(Counter())
        return MeteredBlackBox(self.ask)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            PROMPT_COUNTS.reset(self._token)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The finished exchanges in the order of asking."""
        return tuple(self._exchanges[number] for number in sorted(self._exchanges))

    @property
    def count(self) -> int:
        """Number of finished exchanges."""
        return len(self._exchanges)

    async def ask(self, text: str) -> Reply:
        """Asks the target and records the exchange.

        Raises:
            BudgetExhausted: If no question is left.
            BackendError: If the target fails in every try. Not retryable.
        """
        number = self._spend_question()
        self._exchanges[number] = exchange = await self._answered(self._query(text, number))
        return Reply(exchange.reply)

    def _query(self, text: str, number: int) -> Query:
        return Query(text, self.client(number), self.tenant, self.k, groups=frozenset())  # an attacker has no group

    async def _answered(self, query: Query) -> Exchange:
        """Asks the target, with retries."""
        try:
            return Exchange.from_answer(query.text, await retry_with(self.waits, partial(self.target.ask, query)))
        except QueryError:  # to the client, a rejected question looks like an empty reply
            return Exchange(query.text, "", refused=True)
        except BackendError as error:  # retried here already: callers must not retry
            raise BackendError(str(error), backend=error.backend, retryable=False) from error

    def _spend_question(self) -> int:
        """Takes one question from the budget; returns its number in this session."""
        try:
            self.budget.require()
        except BudgetExhausted:
            self.truncated |= self.budget.exhausted
            raise
        self.budget.spent += 1
        self._asked += 1
        return self._asked - 1


async def retry_with(waits: Sequence[float], call: Callable[[], Awaitable[T]]) -> T:
    """Retries after these waits; only retryable `BackendError`s are retried."""

    def delay(error: Exception, attempt: int) -> float | None:
        return waits[attempt] if isinstance(error, BackendError) and error.retryable else None

    return await retry(call, len(waits), delay)
