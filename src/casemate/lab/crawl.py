"""Runs an extraction attack against targets, and harmless sessions against the same.

Every answered question is kept in the ledger at once. A crawl that was killed or ran out of budget goes on by running
again: the attack decides the same on the same replies, so it is begun anew and told from the ledger what it was told,
until it asks what nobody has asked yet.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from casemate.errors import BackendError, BudgetExhausted, CasemateError, ConfigError, DataError, QueryError
from casemate.lab.box import Box, Budget, noted, patiently
from casemate.lab.crawl_results import Find, Replay, Step, Walk
from casemate.lab.experiment import digest, options_of
from casemate.lab.ledger import Ledger
from casemate.protocols import ExtractionAttack, Progress, Target
from casemate.stats import rate
from casemate.types import DEFAULT_TENANT, Query, Reply

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CrawlPlan:
    """How a crawl is run.

    Attributes:
        seed: Of everything that is drawn.
        k: Chunks that may be read for an answer.
        tenant: Whose.
        questions: How many may be asked of each target, those of earlier runs included; at least 1.
        clients: Names that the attacker goes by, one after another; at least 1.
        waits: Seconds before each further try when the target cannot be reached for the moment.
        label: Of everything else that the replies depend on: configuration, corpus, versions. Replies of another label
            are not used again, and the attacker goes by other names, which a guard with a lasting memory does not know.
    """

    seed: int = 7
    k: int = 5
    tenant: str = DEFAULT_TENANT
    questions: int = 1000
    clients: int = 1
    waits: tuple[float, ...] = (1.0, 5.0, 20.0)
    label: str = ""

    def __post_init__(self) -> None:
        if self.questions < 1 or self.clients < 1:
            raise ConfigError(f"crawl: questions={self.questions}, clients={self.clients}; both must be at least 1")


@dataclass(eq=False)
class Crawler:
    """One extraction attack on one or several targets.

    Attributes:
        name: The attack's.
        attack: It is begun anew for each target, and must keep nothing from one time to the next.
        targets: By name, usually ``off`` (the bare system) and ``on`` (the guard around it).
        ledger: Where questions and replies are kept.
        plan: How it is run.
    """

    name: str
    attack: ExtractionAttack
    targets: Mapping[str, Target]
    ledger: Ledger
    plan: CrawlPlan = CrawlPlan()

    async def run(self, progress: Progress = lambda count: None) -> dict[str, Walk]:
        """Crawls each target to the end of the attack or of the budget; what was done before is read, not asked.

        Args:
            progress: Called with the number of questions just answered, or read.

        Returns:
            The walks by target. What an attack or a target raises is told in ``Walk.error``.
        """
        return {label: await self._walk(label, progress) for label in self.targets}

    async def _walk(self, label: str, progress: Progress) -> Walk:
        began = time.monotonic()
        steps = _Steps(self.targets[label], self.ledger, f"{self._campaign}-{label}", self.plan, progress)
        finds, error = list[Find](), ""
        rng = np.random.default_rng(int(digest(self.plan.seed, self.name), 16))
        try:
            async for text in self.attack.extract(Box(steps.ask), rng):
                finds.append(Find(text, len(steps.done)))
        except BudgetExhausted:
            pass
        except Exception as fault:
            steps.fault = steps.fault or fault
        if steps.fault is not None:
            error = _said(steps.fault)
            log.error("the crawl %s of %s broke off: %s", self.name, label, error)
            log.debug("where it broke off", exc_info=steps.fault)
        seconds = time.monotonic() - began
        done = tuple(step for _, step in sorted(steps.done.items()))
        return Walk(done, tuple(finds), steps.resumed, steps.budget.exhausted, error, seconds)

    @property
    def _campaign(self) -> str:
        """Beginning of the names of this crawl's clients and of its keys: a fingerprint of all that replies depend on.

        The budget is not in it: an attack does not know it, so a crawl with a larger one goes on where it was.
        """
        plan = self.plan
        facts = [plan.label, plan.seed, plan.k, plan.tenant, plan.clients, self.name, options_of(self.attack)]
        return f"crawl-{self.name}-{digest(*facts)}"


class _Steps:
    """Answers an attack from the ledger, then from the target.

    Attributes:
        done: Answered questions by their number.
        budget: What is left.
        resumed: How many were in the ledger.
        fault: Why no more is answered, whatever the attack makes of it; None: nothing is wrong.
    """

    def __init__(self, target: Target, ledger: Ledger, key: str, plan: CrawlPlan, progress: Progress) -> None:
        self._target, self._ledger, self._key, self._plan, self._progress = target, ledger, key, plan, progress
        self.done: dict[int, Step] = {}
        self.budget = Budget(plan.questions)
        self.resumed = 0
        self.fault: Exception | None = None

    async def ask(self, text: str) -> Reply:
        """See ``BlackBox.ask``."""
        if self.fault is not None:
            raise self.fault
        self.budget.take(0)
        number = self.budget.spent
        try:
            self.done[number] = step = self._kept(number, text) or await self._fresh(number, text)
        except Exception as error:
            self.fault = error
            raise
        self._progress(1)
        return Reply(step.reply)

    async def _fresh(self, number: int, text: str) -> Step:
        client = f"{self._key}-{(number - 1) % self._plan.clients}"
        step = await asked(self._target, Query(text, client, self._plan.tenant, self._plan.k), self._plan.waits)
        return _read(self._ledger.keep(f"{self._key}-{number}", json.dumps(step)))

    def _kept(self, number: int, text: str) -> Step | None:
        kept = self._ledger.reply(f"{self._key}-{number}")
        if kept is None:
            return None
        self.resumed += 1
        step = _read(kept)
        if step.question != text:
            raise DataError(
                f"question {number} is not what it was in the earlier run, after the same replies: the attack, or the "
                "model that writes for it, decides otherwise now; crawl anew under another label"
            )
        return step


async def asked(target: Target, query: Query, waits: Sequence[float] = ()) -> Step:
    """Asks once, and notes what came back.

    Raises:
        BackendError: If the target could not be reached, each time. Not to be tried again.
    """
    try:
        answer = await patiently(lambda: target.ask(query), waits)
    except QueryError:  # what a client sees of it tells nothing
        return Step(query.text, "", refused=True)
    except BackendError as error:
        raise BackendError(str(error), backend=error.backend, retryable=False) from error
    note = noted(query.text, answer)
    alarms = tuple(dict.fromkeys(v.defense for v in answer.verdicts if v.flagged))
    return Step(query.text, answer.text, note.context, note.hidden, alarms, note.withheld, note.failed)


async def replay(
    target: Target,
    sessions: Iterable[tuple[str, Sequence[str]]],
    bare: Target | None = None,
    plan: CrawlPlan = CrawlPlan(),
) -> Replay:
    """Lets harmless people ask, session after session: how many of them raise an alarm.

    Args:
        target: The guarded system.
        sessions: The client's name and his questions, in order.
        bare: The system without its guard, to see which answers differ. Its generator must answer the same prompt the
            same, as a ``CachedGenerator`` does: what a model says otherwise the next time would count as changed.
        plan: Its k, tenant and waits hold.

    Raises:
        BackendError: If a target cannot be reached.
    """
    alarms, count, questions, changed = Counter[str](), 0, 0, 0
    alarmed = touched = failed = 0
    for client, texts in sessions:
        seen = set[str]()
        for text in texts:
            query = Query(text, client, plan.tenant, plan.k)
            step = await asked(target, query, plan.waits)
            seen.update(step.alarms)
            questions, touched, failed = questions + 1, touched + step.touched, failed + step.failed
            if bare is not None:
                changed += (await asked(bare, query, plan.waits)).reply != step.reply
        alarms.update(seen)
        count, alarmed = count + 1, alarmed + bool(seen)
    share = rate(alarmed, count) if count else None
    return Replay(count, questions, share, dict(alarms), touched, None if bare is None else changed, failed)


def _read(text: str) -> Step:
    question, reply, context, hidden, alarms, *rest = json.loads(text)
    return Step(question, reply, tuple(context), tuple(hidden), tuple(alarms), *rest)


def _said(error: Exception) -> str:
    """The text of an error that is none of ours may hold a document's."""
    return f"{type(error).__name__}{f': {error}' if isinstance(error, CasemateError) else ''}"
