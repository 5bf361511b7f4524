"""Measures what a guard costs benign users: withheld documents, changed or lost answers, alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from casemate.errors import DataError, QueryError
from casemate.maths import stats
from casemate.protocols import Progress, Target
from casemate.redteam.lab.black_box import TargetSession
from casemate.redteam.lab.extraction_experiment import CrawlPlan
from casemate.redteam.lab.results import BenignReplay, Utility
from casemate.redteam.lab.store import Exchange
from casemate.runtime.concurrency import map_concurrently
from casemate.text.synthetic_questions import generate_questions
from casemate.types import Answer, Document, Query

PLAN = CrawlPlan()
AT_ONCE = 4  # questions that are asked concurrently


def benign_questions(
    logged: Sequence[str], documents: Sequence[Document], count: int, rng: np.random.Generator
) -> tuple[str, list[str]]:
    """Benign questions and their origin for the report: logged ones, or else synthetic ones about documents."""
    if logged:
        return f"{len(logged)} logged questions", list(logged)
    made = generate_questions(documents, count, rng)
    return f"{len(made)} synthetic questions", made


async def measure_utility(
    bare: Target,
    guarded: Target,
    queries: Sequence[Query],
    source: str,
    progress: Progress = lambda count: None,
    unentitled: Target | None = None,
) -> Utility:
    """Asks every question without the guard, then with it, and compares. Invalid questions are skipped.

    A sampling model answers the same context differently each time. Its replies must come through a `CachedGenerator`
    in all targets, or chance counts as the guard's effect.

    Args:
        bare: The system without the guard. Each question is asked once.
        guarded: The system with the guard.
        queries: The questions.
        source: Their origin, for the report.
        progress: Called with the number of questions just asked.
        unentitled: The system with a second guard, asked as a client without groups. The answers of such a client have
            other words under ``guard.audience``, so only lost ones are counted. None: not measured.

    Raises:
        DataError: If no question can be answered.
        BackendError: If a target fails.
    """

    async def ask(query: Query) -> tuple[Answer, Answer, Answer | None] | None:
        try:
            before, after = await bare.ask(query), await guarded.ask(query)
            return before, after, await unentitled.ask(replace(query, groups=frozenset())) if unentitled else None
        except QueryError:
            return None
        finally:
            progress(1)

    found = [answers for answers in await map_concurrently(ask, queries, AT_ONCE) if answers is not None]
    if not found:
        raise DataError("no benign question could be answered; give others, or none to use synthetic ones")
    exchanges = [Exchange.from_answer("", after) for _, after, _ in found]
    lost = _lost_answers((before.text, other.text) for before, _, other in found if other is not None)
    return Utility(
        source,
        questions=len(found),
        flagged=stats.proportion(sum(exchange.withheld for exchange in exchanges), len(found)),
        answer_changed=stats.proportion(sum(before.reply != after.reply for before, after, _ in found), len(found)),
        failed=sum(exchange.failed for exchange in exchanges),
        unentitled_lost=stats.proportion(sum(lost), len(lost)) if lost else None,
    )


def measure_lost_answers(source: str, bare: Sequence[str], guarded: Sequence[str]) -> Utility | None:
    """Cost of an external guard, whose verdicts are not observable: answers of the bare system that are lost.

    An empty answer: refused. Returns None if the bare target answers nothing either.
    """
    lost = _lost_answers(zip(bare, guarded, strict=True))
    if not lost:
        return None
    return Utility(f"{source}; lost answers are counted", len(lost), None, stats.proportion(sum(lost), len(lost)))


def _lost_answers(replies: Iterable[tuple[str, str]]) -> list[bool]:
    """Whether the guarded system gives no answer, for each question that the bare one answers."""
    return [not Exchange("", after).answered for before, after in replies if Exchange("", before).answered]


async def replay_benign_sessions(
    target: Target,
    sessions: Iterable[tuple[str, Sequence[str]]],
    bare: Target,
    plan: CrawlPlan = PLAN,
    progress: Progress = lambda count: None,
) -> BenignReplay:
    """Replays benign sessions (client and questions) one after another, and counts alarms and changed answers.

    The generator of the ``bare`` system must answer the same prompt the same, as a `CachedGenerator` does. Of the plan,
    k, tenant and waits apply.

    Raises:
        BackendError: If a target fails.
    """
    alarms, alarmed, changed = Counter[str](), list[bool](), 0
    exchanges: list[Exchange] = []
    for name, questions in sessions:
        guarded, unguarded = _session(target, name, plan), _session(bare, name, plan)
        for question in questions:
            changed += await guarded.ask(question) != await unguarded.ask(question)
        exchanges += guarded.exchanges
        raised = {alarm for e in guarded.exchanges for alarm in e.alarms}
        alarms.update(raised)
        alarmed.append(bool(raised))
        progress(1)
    return BenignReplay(
        sessions=len(alarmed),
        questions=len(exchanges),
        alarmed=stats.proportion(sum(alarmed), len(alarmed)) if alarmed else None,
        alarms=dict(alarms),
        touched=sum(e.withheld for e in exchanges),
        changed=changed,
        failed=sum(e.failed for e in exchanges),
    )


def _session(target: Target, client: str, plan: CrawlPlan) -> TargetSession:
    return TargetSession(target, lambda number: client, k=plan.k, tenant=plan.tenant, waits=plan.waits)
