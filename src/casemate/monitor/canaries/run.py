"""Asks the canaries of one run, concurrently and each with its own timeout.

No behavior of a target breaks a run: a canary that cannot be asked or checked has the status ERROR and a reason.

The order is shuffled per run, seeded by the run id, so that it does not identify canaries. So is the wording: each run
draws one of a canary's wordings, independently of other runs, and so does each repetition. Then a canary fails
independently at one rate, the mean over its wordings, which the baseline measures and the tests assume.

Canaries pass through the guard like any query, under a client name of their own. The guard limits what one client sees
per day: ``{canary}`` in the name gives each canary its own client, ``{run}`` each run.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from casemate.errors import CasemateError, ConfigError
from casemate.monitor.canaries import behavior
from casemate.monitor.canaries.behavior import BehaviorCase
from casemate.monitor.canaries.canary import Canary, unsupported_expectations
from casemate.monitor.canaries.check import ObservedAnswer, check_answer, observe_answer
from casemate.monitor.canaries.results import CanaryResult, CanaryRun, CanaryStatus, Deviation
from casemate.protocols import Embedder, Generator, Target
from casemate.runtime.concurrency import map_concurrently
from casemate.text.refusals import judge_refusal
from casemate.types import DEFAULT_TENANT, Answer, Query, T

DEFAULT_CLIENT = "canary-{canary}-{run}"
MAX_ANSWER_CHARACTERS = 1_000_000
"""A longer answer is an error."""
MAX_REASON_CHARACTERS = 300
"""Longest stored reason of an error."""


@dataclass(frozen=True, slots=True)
class CanaryRunner:
    """Asks canaries, whose ids must be unique, and checks the answers.

    Attributes:
        target: Its attribute ``tells`` lists what it reports; without one, everything.
        embedder: Compares meanings; None: only words are compared.
        timeout_s: Timeout of one question, and of one reply of the judge, in seconds.
        client: Client name of the queries; ``{canary}`` and ``{run}`` are replaced by the ids.
        judge: Model that judges expected behaviors without a named check, and expected refusals.
    """

    canaries: Sequence[Canary]
    target: Target
    k: int = 5
    embedder: Embedder | None = None
    concurrency: int = 8
    timeout_s: float = 30.0
    tenant: str = DEFAULT_TENANT
    client: str = DEFAULT_CLIENT
    judge: Generator | None = None

    def require_supported(self) -> None:
        """Checks that the system reports what the canaries expect.

        Raises:
            ConfigError: If not, with one line per canary and key.
        """
        tells = getattr(self.target, "tells", None)
        embeds, judges = self.embedder is not None, self.judge is not None
        wrong = [
            f"canary {canary.id!r}: {error}"
            for canary in self.canaries
            for error in unsupported_expectations(canary, k=self.k, tells=tells, has_embedder=embeds, has_judge=judges)
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))

    async def run(
        self,
        run_id: str,
        on_result: Callable[[CanaryResult], None] = lambda result: None,
        wording: int | None = None,
    ) -> CanaryRun:
        """Asks all canaries, as if none had a baseline.

        An exception in ``on_result`` ends the run. The wording is counted cyclically; None: drawn by the run id.

        Raises:
            ConfigError: If a canary expects what this system does not report, before anything is asked.
        """
        return await self.ask(run_id, {c.id: () for c in self.canaries}, on_result, wording)

    async def ask(
        self,
        run_id: str,
        baseline_documents: Mapping[str, Collection[str]],
        on_result: Callable[[CanaryResult], None],
        wording: int | None = None,
    ) -> CanaryRun:
        """Like ``run``, but asks the canaries in ``baseline_documents`` only. One without any there has no new ones."""
        self.require_supported()
        wanted = [canary for canary in self.canaries if canary.id in baseline_documents]
        found: dict[str, CanaryResult] = {}

        async def ask_one(canary: Canary) -> None:
            number = _draw_wording(canary, run_id) if wording is None else wording % (len(canary.paraphrases) + 1)
            result = await self._result(canary.worded(number), run_id, baseline_documents[canary.id])
            found[canary.id] = replace(result, wording=number)
            on_result(found[canary.id])

        await map_concurrently(ask_one, _shuffled(wanted, run_id), min(self.concurrency, len(wanted)))
        return CanaryRun(run_id, tuple(found[c.id] for c in wanted))

    async def _result(self, canary: Canary, run_id: str, known: Collection[str]) -> CanaryResult:
        client = self.client.replace("{canary}", canary.id).replace("{run}", run_id)
        at, begun = datetime.now(UTC), time.perf_counter()
        answer, seconds = None, 0.0
        deviations: tuple[Deviation, ...] = ()
        error = ""
        try:
            answer = await self._query(canary.query, client)
            seconds = time.perf_counter() - begun
            other = None if canary.untriggered is None else await self._query(canary.untriggered, client)
            deviations = await self._deviations(canary, answer, other, known)
        except _Unjudged as unjudged:
            error = str(unjudged)
        status = CanaryStatus.ERROR if error else CanaryStatus.FAIL if deviations else CanaryStatus.PASS
        result = CanaryResult(canary.id, run_id, at, status, deviations, error, seconds or time.perf_counter() - begun)
        return result if answer is None else _with_answer(result, answer)

    async def _query(self, text: str, client: str) -> ObservedAnswer:
        query = Query(text, client, self.tenant, self.k)
        answer = await self._in_time("answer", lambda: self.target.ask(query))
        if not isinstance(answer, Answer) or not isinstance(answer.text, str):
            raise _Unjudged(f"the target returned {type(answer).__name__}; expected an Answer with a text")
        if len(answer.text) > MAX_ANSWER_CHARACTERS:
            size = f"the answer has {len(answer.text):,} characters"
            raise _Unjudged(f"{size}; at most {MAX_ANSWER_CHARACTERS:,} are allowed")
        return observe_answer(answer, getattr(self.target, "tells", None))

    async def _deviations(
        self, canary: Canary, answer: ObservedAnswer, other: ObservedAnswer | None, known: Collection[str]
    ) -> tuple[Deviation, ...]:
        judge_passed, judge, behaves = None, self.judge, canary.expected_behavior
        if canary.needs_judge and judge is not None and behaves is not None:
            case = BehaviorCase(canary.query, answer.text)
            judge_passed = await self._in_time("verdict", lambda: behavior.judge_behavior(behaves, case, judge))
        if canary.expected_refusal is not None and judge is not None:
            text = answer.text
            refused = await self._in_time("verdict", lambda: judge_refusal(judge, canary.query, text))
            answer = replace(answer, judged_refusal=refused)
        try:
            return await asyncio.to_thread(
                check_answer, canary, answer, other, self.embedder, judge_passed, known or None
            )
        except Exception as error:
            raise _Unjudged(f"the answer could not be checked: {_reason(error)}") from error

    async def _in_time(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await ask()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _Unjudged(f"no {what}: the target cancelled the request (CancelledError)") from None
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            raise _Unjudged(f"no {what} within {self.timeout_s:g} s" if late else _reason(error)) from error


class _Unjudged(Exception):
    """A canary could not be asked or checked; the reason, on one line."""


def _reason(error: Exception) -> str:
    """Why something failed. Messages of foreign exceptions may quote a text, so only their type is kept."""
    message = str(error) if isinstance(error, CasemateError) else f"{type(error).__name__} was raised"
    return " ".join(message.split())[:MAX_REASON_CHARACTERS]


def _with_answer(result: CanaryResult, answer: ObservedAnswer) -> CanaryResult:
    return replace(
        result,
        documents=answer.documents,
        sources=answer.sources,
        scores=answer.scores,
        refused=answer.refused,
        words=answer.length,
        text=answer.text,
        withheld=answer.withheld,
    )


def _draw_wording(canary: Canary, run_id: str) -> int:
    """Number of the wording of a canary in a run; uniform, and independent of other runs and canaries."""
    drawn = hashlib.sha256(f"{run_id}\0{canary.id}".encode()).digest()[:8]
    return int.from_bytes(drawn, "big") % (len(canary.paraphrases) + 1)


def _shuffled(canaries: Sequence[Canary], run_id: str) -> list[Canary]:
    seed = int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8], "big")
    return [canaries[i] for i in np.random.default_rng(seed).permutation(len(canaries))]
