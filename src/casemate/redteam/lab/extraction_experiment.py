"""Runs extraction attacks against targets.

Each exchange is stored at once. An interrupted crawl, or one out of budget, resumes when it is run again: the attack is
deterministic given the replies, so it restarts and is answered from the store until it asks its first new question.
Before that, a guard that keeps client state in memory is asked the stored questions again: it had lost their state.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from casemate.errors import BudgetExhausted, DataError, describe_failure, require_range
from casemate.protocols import ExtractionAttack, Progress, Target
from casemate.redteam.lab.black_box import Budget, MeteredBlackBox, TargetSession
from casemate.redteam.lab.experiment import describe_options, digest
from casemate.redteam.lab.results import RecoveredText
from casemate.redteam.lab.store import CampaignStore, Exchange
from casemate.types import DEFAULT_TENANT, Query, Reply

log = logging.getLogger(__name__)


Schedule: TypeAlias = Literal["rotate", "adaptive"]
SHORTENED = 0.5
"""Length of a reply, as a share of the longest one so far, below which an adaptive attacker changes the client."""


@dataclass(frozen=True, slots=True)
class CrawlPlan:
    """Settings of a crawl.

    Attributes:
        questions: Budget for each target, earlier runs included; at least 1.
        clients: Client names that the attacker uses; at least 1.
        schedule: `rotate`: the clients ask in turn. `adaptive`: one asks until its replies get shorter, then the next.
        waits: Seconds to wait before each retry of an unavailable target.
        label: Fingerprint of everything else that replies depend on: configuration, corpus, versions. Replies with
            another label are not reused, and the attacker then uses new client names, unknown to a guard with memory.

    Raises:
        ConfigError: If `questions` or `clients` is below 1.
    """

    seed: int = 7
    k: int = 5
    tenant: str = DEFAULT_TENANT
    questions: int = 1000
    clients: int = 1
    schedule: Schedule = "rotate"
    waits: tuple[float, ...] = (1.0, 5.0, 20.0)
    label: str = ""

    def __post_init__(self) -> None:
        require_range("crawl", self, "questions clients", at_least=1)


@dataclass(frozen=True, slots=True)
class CrawlTrace:
    """The exchanges of one crawl of one target in the order of asking, and the recovered texts in that of recovery.

    Attributes:
        resumed: Exchanges of earlier runs.
        exhausted: Whether the budget ended the crawl, and not the attack.
        error: Why the crawl was aborted; empty if it was not. Earlier results count.
    """

    exchanges: tuple[Exchange, ...]
    finds: tuple[RecoveredText, ...]
    resumed: int = 0
    exhausted: bool = False
    error: str = ""


@dataclass(eq=False)
class Crawler:
    """One extraction attack on targets, usually `off` (bare system) and `on` (guarded).

    It is restarted for each target, so the attack must keep no state between runs.

    Attributes:
        in_memory: Names of the targets that keep their client state in memory, if they have any.
    """

    name: str
    attack: ExtractionAttack
    targets: Mapping[str, Target]
    store: CampaignStore
    plan: CrawlPlan = CrawlPlan()
    in_memory: Collection[str] = ()

    async def run(self, progress: Progress = lambda count: None) -> dict[str, CrawlTrace]:
        """Crawls each target until the attack or its budget ends; stored exchanges are replayed, not asked again.

        Progress counts both. Errors of the attack or a target are in `CrawlTrace.error`.
        """
        return {target: await self._crawl(target, progress) for target in self.targets}

    async def _crawl(self, target: str, progress: Progress) -> CrawlTrace:
        key, in_memory = f"{self._campaign}-{target}", target in self.in_memory
        session = CrawlSession(self.targets[target], self.store, key, self.plan, progress, in_memory)
        finds, error = list[RecoveredText](), ""
        rng = np.random.default_rng(int(digest(self.plan.seed, self.name), 16))
        try:
            async for text in self.attack.extract(MeteredBlackBox(session.ask), rng):
                finds.append(RecoveredText(text, session.count))
        except BudgetExhausted:
            pass
        except Exception as fault:
            session.fault = session.fault or fault
        if session.fault is not None:
            error = describe_failure(session.fault)
            log.error("the crawl %s of %s was aborted: %s", self.name, target, error)
            log.debug("traceback of the aborted crawl", exc_info=session.fault)
        return CrawlTrace(session.exchanges, tuple(finds), session.resumed, session.budget.exhausted, error)

    @property
    def _campaign(self) -> str:
        """Prefix of client names and store keys: a fingerprint of everything that replies depend on.

        The budget is not part of it: attacks cannot see it, so a crawl with a larger budget resumes a smaller one.
        """
        plan = self.plan
        facts = [
            plan.label,
            plan.seed,
            plan.k,
            plan.tenant,
            plan.clients,
            plan.schedule,
            self.name,
            describe_options(self.attack),
        ]
        return f"crawl-{self.name}-{digest(*facts)}"


class _Clients:
    """Selects the client that asks next, from the replies alone."""

    def __init__(self, count: int, schedule: Schedule) -> None:
        self._count, self._schedule = count, schedule
        self._current, self._longest = 0, 0
        self._last = [math.inf] * count  # length of the last reply to each client

    def at(self, number: int) -> int:
        return number % self._count if self._schedule == "rotate" else self._current

    def observe(self, number: int, length: int) -> None:
        """Adapts to the length of a reply: a client with short replies is replaced by the one with the longest."""
        self._last[self.at(number)] = length
        self._longest = max(self._longest, length)
        if length < SHORTENED * self._longest:
            self._current = self._last.index(max(self._last))


class CrawlSession(TargetSession):
    """Answers an attack from the store first (``resumed`` counts these exchanges), then from the target.

    After ``fault``, an error, every question fails, even if the attack ignores it. ``in_memory``: the target keeps
    client state in memory, so it has lost that of earlier runs.
    """

    def __init__(
        self, target: Target, store: CampaignStore, key: str, plan: CrawlPlan, progress: Progress, in_memory: bool
    ) -> None:
        super().__init__(
            target,
            client=lambda number: f"{key}-{self._clients.at(number)}",
            budget=Budget(plan.questions),
            k=plan.k,
            tenant=plan.tenant,
            waits=plan.waits,
        )
        self._store, self._key, self._progress = store, key, progress
        self._clients = _Clients(plan.clients, plan.schedule)
        self._in_memory = in_memory
        self._repeat: deque[Query] = deque()  # stored questions whose client state the target has lost
        self.resumed = 0
        self.fault: Exception | None = None

    async def ask(self, text: str) -> Reply:
        """See `TargetSession.ask`. Raises the first error again on every later call."""
        if self.fault is not None:
            raise self.fault
        self.budget.require()
        number = self._asked
        try:
            exchange = self._stored(number, text)
            if exchange is None:
                await self._restore_state()
                await super().ask(text)
                stored = self._store.put_reply(f"{self._key}-{number}", json.dumps(self._exchanges[number]))
                exchange = Exchange.from_json(json.loads(stored))
            else:
                self._spend_question()
                self.resumed += 1
                if self._in_memory:
                    self._repeat.append(self._query(text, number))
        except BudgetExhausted:  # the target may have a limit of its own
            self.budget.exhausted = True
            raise
        except Exception as error:
            self.fault = error
            raise
        self._exchanges[number] = exchange
        self._clients.observe(number, len(exchange.reply))
        self._progress(1)
        return Reply(exchange.reply)

    async def _restore_state(self) -> None:
        """Asks the target the stored questions again, in order, and drops the answers."""
        while self._repeat:
            await self._answered(self._repeat.popleft())

    def _stored(self, number: int, text: str) -> Exchange | None:
        """The stored exchange with this number, if it has the same question."""
        stored = self._store.get_reply(f"{self._key}-{number}")
        if stored is None:
            return None
        exchange = Exchange.from_json(json.loads(stored))
        if exchange.question != text:
            raise DataError(
                f"question {number + 1} differs from the earlier run, after the same replies: the attack or its model "
                "is not deterministic; use a deterministic model, or change redteam.seed to start a new crawl"
            )
        return exchange
