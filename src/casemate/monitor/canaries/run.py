"""All canaries, asked once: as users ask, side by side, each within its time.

Whatever a target does, it cannot break a run: a canary that could not be asked, or judged, is in error, with a reason.

The order is shuffled anew for each run, by its id, so that canaries are not known by their order. They go through the
guard like any question, under a client's name of their own. The guard remembers clients, and shows none of them more in
a day than so many questions need: ``{canary}`` in the name gives each canary a client of its own, ``{run}`` each run.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from casemate.errors import CasemateError, ConfigError
from casemate.monitor.canaries import behaviour
from casemate.monitor.canaries.behaviour import Case
from casemate.monitor.canaries.canary import Canary, misfits
from casemate.monitor.canaries.check import Observed, check, observed
from casemate.monitor.canaries.results import Deviation, Result, Run, Status
from casemate.protocols import Embedder, Generator, Progress, Target
from casemate.types import DEFAULT_TENANT, MAX_K, Answer, Query, T

CLIENT = "canary"
LONGEST = 1_000_000
"""Characters of an answer beyond which it is no answer, but a fault."""
REASON = 300
"""Characters of a reason that are kept."""


async def run(  # noqa: PLR0913  what a run needs, in one call
    canaries: Sequence[Canary],
    target: Target,
    *,
    run_id: str,
    k: int = 5,
    embedder: Embedder | None = None,
    concurrency: int = 8,
    timeout_s: float = 30.0,
    tenant: str = DEFAULT_TENANT,
    client: str = CLIENT,
    judge: Generator | None = None,
    baselines: Mapping[str, Collection[str]] | None = None,
    done: Collection[str] = (),
    progress: Progress | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Run:
    """Asks all canaries and judges the answers.

    Args:
        canaries: With ids that differ.
        target: Who is asked. What it tells is its attribute ``tells``; without one it tells everything.
        run_id: Names the run; the order of asking follows from it.
        k: Documents that may be read for an answer.
        embedder: Compares meanings; None: only words are compared.
        concurrency: Questions at the same time, at least 1.
        timeout_s: Longest time for a question, in seconds; for a judge's reply, too.
        tenant: Whose documents.
        client: The name under which they are asked; ``{canary}`` and ``{run}`` in it stand for the ids.
        judge: Says whether an answer behaves as a sentence describes.
        baselines: For each canary, the ids that are known of its context; None, or a canary that is not there: no id
            is new.
        done: Ids of canaries that are not asked, because an earlier part of this run has their results.
        progress: Called with 1 for each result.
        on_result: Called with each result as soon as it is there; what it raises ends the run.

    Returns:
        The new results, in the order of the canaries.

    Raises:
        ConfigError: Before anything is asked, if a canary expects what this setting cannot tell, or a number is out of
            range.
    """
    if concurrency < 1 or not timeout_s > 0 or not 1 <= k <= MAX_K:
        what = f"concurrency={concurrency}, timeout_s={timeout_s}, k={k}"
        raise ConfigError(f"{what}; the first two must be above 0, and k must lie between 1 and {MAX_K}")
    require(canaries, target, k, embedder is not None, judge is not None)
    asker = _Asker(target, k, embedder, timeout_s, tenant, client, judge, baselines or {})
    due = iter([canary for canary in _shuffled(canaries, run_id) if canary.id not in set(done)])
    found: dict[str, Result] = {}

    async def work() -> None:
        for canary in due:  # all workers draw from one row
            found[canary.id] = await asker.result(canary, run_id)
            if on_result:
                on_result(found[canary.id])
            if progress:
                progress(1)

    await _together(work, min(concurrency, len(canaries)))
    return Run(run_id, tuple(found[c.id] for c in canaries if c.id in found))


def require(canaries: Sequence[Canary], target: Target, k: int, embeds: bool, judge: bool) -> None:
    """Refuses canaries that expect what a setting cannot tell.

    Raises:
        ConfigError: With all of them, a line each; or if an id comes twice.
    """
    twice = [name for name, count in Counter(canary.id for canary in canaries).items() if count > 1]
    if twice:
        raise ConfigError(f"several canaries are called {twice[0]!r}; each needs an id of its own")
    tells = getattr(target, "tells", None)
    wrong = [
        f"canary {canary.id!r}: {fault}"
        for canary in canaries
        for fault in misfits(canary, k=k, tells=tells, embeds=embeds, judge=judge)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


@dataclass(frozen=True, slots=True)
class _Asker:
    """How each canary is asked and judged."""

    target: Target
    k: int
    embedder: Embedder | None
    timeout_s: float
    tenant: str
    client: str
    judge: Generator | None
    baselines: Mapping[str, Collection[str]]

    async def result(self, canary: Canary, run_id: str) -> Result:
        """How one canary ended."""
        client = self.client.replace("{canary}", canary.id).replace("{run}", run_id)
        at, begun = datetime.now(UTC), time.perf_counter()
        seen, seconds = None, 0.0
        deviations: tuple[Deviation, ...] = ()
        error = ""
        try:
            seen = await self._ask(canary.query, client)
            seconds = time.perf_counter() - begun
            baseline = None if canary.baseline_query is None else await self._ask(canary.baseline_query, client)
            deviations = await self._deviations(canary, seen, baseline)
        except _Failed as failed:
            error = str(failed)
        status = Status.ERROR if error else Status.FAIL if deviations else Status.PASS
        result = Result(canary.id, run_id, at, status, deviations, error, seconds or time.perf_counter() - begun)
        return result if seen is None else _with(result, seen)

    async def _ask(self, text: str, client: str) -> Observed:
        """What the target answers, if that is an answer."""
        query = Query(text, client, self.tenant, self.k)
        answer = await self._within("answer", lambda: self.target.ask(query))
        if not isinstance(answer, Answer) or not isinstance(answer.text, str):
            raise _Failed(f"the target returned {type(answer).__name__}, which is no answer")
        if len(answer.text) > LONGEST:
            raise _Failed(f"the answer has {len(answer.text):,} characters; at most {LONGEST:,} are read")
        return observed(answer, getattr(self.target, "tells", None))

    async def _deviations(self, canary: Canary, seen: Observed, baseline: Observed | None) -> tuple[Deviation, ...]:
        """What the answer lacks."""
        judged, judge, behaves = None, self.judge, canary.expected_behavior
        if canary.judged and judge is not None and behaves is not None:
            case = Case(canary.query, seen.text)
            judged = await self._within("judgement", lambda: behaviour.judged(behaves, case, judge))
        known = self.baselines.get(canary.id)
        try:
            return await asyncio.to_thread(check, canary, seen, baseline, self.embedder, judged, known)
        except Exception as error:
            raise _Failed(f"the answer could not be judged: {_reason(error)}") from error

    async def _within(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """What is waited for, if it comes in time."""
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await ask()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _Failed(f"no {what}: the target gave up (CancelledError)") from None
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            raise _Failed(f"no {what} within {self.timeout_s:g} s" if late else _reason(error)) from error


class _Failed(Exception):
    """A canary could not be asked or judged; the reason, on one line."""


def _reason(error: Exception) -> str:
    """What went wrong. The words of errors that are not ours may quote a text, so only their kind is kept."""
    said = str(error) if isinstance(error, CasemateError) else f"{type(error).__name__} was raised"
    return " ".join(said.split())[:REASON]


def _with(result: Result, seen: Observed) -> Result:
    return replace(
        result,
        documents=seen.documents,
        sources=seen.sources,
        scores=seen.scores,
        refused=seen.refused,
        words=seen.length,
        text=seen.text,
    )


def _shuffled(canaries: Sequence[Canary], run_id: str) -> list[Canary]:
    """In an order that follows from the run's id."""
    seed = int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8], "big")
    return [canaries[i] for i in np.random.default_rng(seed).permutation(len(canaries))]


async def _together(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    """So many workers side by side; the first error of one ends all, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
