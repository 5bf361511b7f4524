"""The canaries of an owner's own configuration: from the file to a monitor that can be run, watched and asked.

The index is only read. What is found goes into the event store, where the trend, the alerts and the dashboard read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from casemate.app import App, build
from casemate.backends.sqlite import SqliteIndex
from casemate.config import Part
from casemate.errors import ConfigError, DataError
from casemate.lab.drill import Aim, Drill, Range, copied
from casemate.lab.questions import made_questions
from casemate.monitor.alerts.letters import Policy
from casemate.monitor.canaries import run as asking
from casemate.monitor.canaries.canary import CanarySet, interval, read
from casemate.monitor.canaries.results import Result, Run, Status
from casemate.monitor.poison.quarantine import Gate, Quarantine
from casemate.monitor.poison.suspicion import LEAST, Suspicion
from casemate.monitor.trends import baseline
from casemate.monitor.trends.baseline import RUNS, Baseline
from casemate.monitor.trends.gauges import Limits, Step
from casemate.monitor.trends.trend import Trend, trend
from casemate.monitor.trends.trend import read as history
from casemate.monitor.trends.watched import Watched
from casemate.monitor.watch import schedule
from casemate.monitor.watch.post import Post
from casemate.monitor.watch.rounds import Rounds
from casemate.monitor.watch.schedule import Gap
from casemate.monitor.watch.settings import Settings
from casemate.monitor.watch.watch import watch
from casemate.protocols import Channel, Defense, Embedder, Generator, Index, Progress, Target
from casemate.types import DEFAULT_TENANT, Document

OWN = Part(use="own")
MADE = 2000
"""Questions that new documents are held to."""


@dataclass(frozen=True, slots=True)
class Canaries:
    """A set, who is asked, and who is told.

    Attributes:
        app: The owner's system.
        file: Where the set is written.
        set: The canaries.
        target: Who is asked.
        tenant: Whose documents.
        judge: Judges behaviours without a name.
        channels: Who is told of alerts.
        heard: Called with each result as soon as it is there.
    """

    app: App
    file: Path
    set: CanarySet
    target: Target
    tenant: str
    judge: Generator | None
    channels: Sequence[Channel]
    heard: list[Callable[[Result], None]] = field(default_factory=list)

    async def ask(self, run: str, ids: Sequence[str], on_result: Callable[[Result], None]) -> None:
        """Asks some of the canaries in a run of this name. See ``monitor.watch.rounds.Ask``."""

        def each(result: Result) -> None:
            on_result(result)
            for hear in self.heard:
                hear(result)

        watched = await asyncio.to_thread(lambda: self.watched)
        await self._asked(run, ids, each, {known.id: known.documents for known in watched.canaries})

    async def _asked(
        self,
        run: str,
        ids: Sequence[str],
        on_result: Callable[[Result], None] | None = None,
        known: Mapping[str, frozenset[str]] | None = None,
    ) -> Run:
        section = self.app.config.monitor
        return await asking.run(
            [canary for canary in self.set.canaries if canary.id in set(ids)],
            self.target,
            run_id=run,
            k=self.app.config.rag.k,
            embedder=self.app.guard.rag.embedder,
            concurrency=section.concurrency,
            timeout_s=section.timeout_s,
            tenant=self.tenant,
            client=section.client,
            judge=self.judge,
            baselines={name: documents for name, documents in (known or {}).items() if documents},
            on_result=on_result,
        )

    async def measure(self, runs: int = RUNS, force: bool = False, progress: Progress = lambda count: None) -> Baseline:
        """Asks all canaries again and again, and proposes what came of it as the norm; ``accept`` makes it so.

        Args:
            runs: How often.
            force: Whether canaries that never pass are taken in, too.
            progress: Called with 1 for each run.

        Raises:
            DataError: If canaries pass in no run, or a run gets no answer at all.
            BackendError: If the store fails.
        """
        self.require()
        made = []
        for number in range(runs):
            found = await self._asked(f"{self.set.name}-baseline-{number}", [c.id for c in self.set.canaries])
            if all(result.status is Status.ERROR for result in found.results):
                raise DataError(f"the target answers none of {len(found.results)} canaries: {found.results[0].error}")
            made.append(found)
            progress(1)
        digests = self.app.index.digests(self.tenant) if self.target is self.app.target else None
        recorded = baseline.record(made, self.set, at=datetime.now(UTC), digests=digests, force=force)
        baseline.propose(self.app.store, recorded)
        return recorded

    @property
    def watched(self) -> Watched:
        """The set as the monitor knows it now: with the baseline in force, and what rests on replaced documents aside.

        Raises:
            BackendError: If the store cannot be read.
        """
        known = baseline.load(self.app.store, self.set)
        every = interval(self.app.config.monitor.every).total_seconds()
        return baseline.watched(self.set, known, every, _aside(self.app, known, self.tenant))

    @property
    def aside(self) -> tuple[str, ...]:
        """Canaries that page nobody, because the owner has replaced the documents that they rest on."""
        pages = {canary.id for canary in self.set.canaries if canary.alert_on_deviation}
        return tuple(known.id for known in self.watched.canaries if known.id in pages and not known.pages)

    @property
    def limits(self) -> Limits:
        """When a trend becomes an alarm."""
        section = self.app.config.monitor
        return Limits(budget=section.false_alerts, page_rules=section.page_rules)

    async def run(self, pause_s: float = 2.0) -> Step:
        """Asks all canaries now, draws the conclusions, and tells those who must be told.

        Args:
            pause_s: Pause before failures are asked again.

        Raises:
            ConfigError: If a canary expects what the target cannot tell.
            BackendError: If the store fails.
        """
        self.require()
        store = self.app.store
        log_text = self.app.config.privacy.log_text
        rounds = Rounds(self.watched, self.ask, store, self.limits, pause_s, log_text)
        found = await rounds.by_hand(lambda: datetime.now(UTC).timestamp())
        await Post(store, self.channels, self._settings).once()
        return found

    async def watch(self, on_run: Callable[[Step], None], on_lead: Callable[[bool], None]) -> None:
        """Runs when runs are due, until it is told to end.

        Raises:
            ConfigError: If a canary expects what the target cannot tell.
        """
        self.require()
        await watch(
            self.watched,
            self.ask,
            self.app.store,
            self.channels,
            self._settings,
            current=lambda: self.watched,
            on_run=on_run,
            on_lead=on_lead,
        )

    def trend(self, since: datetime | None = None) -> Trend:
        """How the set has fared, by what the store holds.

        Raises:
            BackendError: If the store cannot be read.
        """
        return trend(history(self.app.store, self.set.name, since), self.watched, self.limits)

    def gaps(self, since: datetime | None = None) -> list[Gap]:
        """The times at which nobody ran what was due, oldest first; the last of them may last still.

        Raises:
            BackendError: If the store cannot be read.
        """
        now, store = datetime.now(UTC), self.app.store
        last = schedule.unwatched(self.watched, schedule.past(store, self.set.name, now), now.timestamp())
        return [*schedule.gaps(store, self.set.name, since), *([last] if last else [])]

    def require(self) -> None:
        """Refuses, before anything is asked, what this setting cannot tell.

        Raises:
            ConfigError: With a line for each canary.
        """
        asking.require(self.set.canaries, self.target, self.app.config.rag.k, True, self.judge is not None)

    @property
    def _settings(self) -> Settings:
        return Settings(self.limits, _policy(self.app), log_text=self.app.config.privacy.log_text)


def open_canaries(app: App, tenant: str = DEFAULT_TENANT) -> Canaries:
    """The configured canaries of a system.

    Raises:
        DataError: If the set is missing or wrong.
        ConfigError: If a target, judge or channel cannot be built.
    """
    section = app.config.monitor
    judge = build("generator", section.judge, app.config.folder) if section.judge else None
    found = read(file := file_of(app), k=app.config.rag.k, judge=judge is not None)
    baseline.watched(found)  # refuses, before anything is asked, names that could not be kept
    return Canaries(app, file, found, target_of(app, section.target), tenant, judge, _channels(app))


def file_of(app: App) -> Path:
    """Where the configured set is written: beside the configuration, unless it says otherwise."""
    return app.config.folder / app.config.monitor.canaries


def open_post(app: App) -> Post:
    """What brings a system's alerts to people, also without canaries.

    Raises:
        ConfigError: If a channel cannot be built.
    """
    return Post(app.store, _channels(app), Settings(policy=_policy(app)))


def _channels(app: App) -> list[Channel]:
    return [build("channel", part, app.config.folder) for part in app.config.monitor.channels]


def _policy(app: App) -> Policy:
    return Policy(per_hour=app.config.monitor.notices_per_hour)


def _aside(app: App, known: Baseline | None, tenant: str) -> frozenset[str]:
    """The canaries whose documents the owner has replaced: they page nobody until a new baseline is accepted."""
    if known is None:
        return frozenset()
    updates = baseline.updated(app.store, tenant, known.at)
    return frozenset(baseline.outdated(known, app.index.digests(tenant), updates)) if updates else frozenset()


def target_of(app: App, part: Part) -> Target:
    """Who is asked: the owner's own system, or what the configuration names.

    Raises:
        ConfigError: If it cannot be built.
    """
    if part.use == OWN.use:
        if part.options:
            raise ConfigError(f"the target 'own' has no options; it was given {', '.join(part.options)}")
        return app.target
    made: Any = build("target", part, app.config.folder)
    target: Target = made
    return target


def open_gate(app: App, tenant: str = DEFAULT_TENANT, log: Sequence[str] = ()) -> Gate | None:
    """What holds suspicious documents back; None if it is not configured, or there is too little to compare with."""
    rag = app.guard.rag
    if not app.config.monitor.gate or rag.index.moments(tenant).n < LEAST:
        return None
    suspicion = _learnt(app, rag.index, watched_questions(app, tenant, log), tenant)
    return Gate(app.guard, suspicion, Quarantine(app.store))


def _learnt(app: App, index: Index, questions: Sequence[str], tenant: str) -> Suspicion:
    """What the harmless documents of an index are like, by the questions that they answer."""
    vectors = app.guard.rag.embedder.embed(questions)
    return Suspicion.learnt(index, questions, vectors, k=app.config.rag.k, tenant=tenant)


def watched_questions(app: App, tenant: str = DEFAULT_TENANT, log: Sequence[str] = (), count: int = MADE) -> list[str]:
    """The canaries' questions, those of a log, and as many made ones as it takes: what new documents are held to."""
    file = file_of(app)
    found = [c.query for c in read(file, judge=True).canaries] if file.exists() else []
    found += log
    documents = [d for some, _ in app.index.scan(tenant) for d in some]
    rng = np.random.default_rng(app.config.calibrate.seed)
    return [*found[:count], *made_questions(documents, max(0, count - len(found)), rng)]


DRILLS: Mapping[str, Part] = {
    "PoisonedRAG": Part(use="poison"),
    "PoisonedRAG, white box": Part.model_validate({"use": "poison", "method": "white_box"}),
    "CorruptRAG": Part.model_validate({"use": "poison", "method": "corrupt"}),
    "blocker": Part.model_validate({"use": "poison", "method": "blocker"}),
}
"""What is planted in a drill."""
FALSE = "Quellbach ninety"
"""What nobody would say of his own accord."""


async def run_drill(canaries: Canaries, count: int = 3, progress: Progress = lambda count: None) -> list[Drill]:
    """Plants false documents into a copy of the corpus: for questions that canaries ask, and for as many others.

    Args:
        canaries: The owner's. The copy is asked, whatever their target is.
        count: How many questions of both kinds.
        progress: Called with 1 for each drill.

    Raises:
        DataError: If there are no documents.
    """
    app, tenant, folder = canaries.app, canaries.tenant, canaries.app.config.folder
    parts: dict[Any, Any] = {Embedder: app.guard.rag.embedder}

    def defenses(index: Index) -> list[Defense]:
        return [build("defense", part, folder, parts | {Index: index}) for part in app.config.guard.defenses]

    async def ask(target: Target, run: str) -> Run:
        return await replace(canaries, target=target)._asked(run, [c.id for c in canaries.set.canaries])

    rag, k = app.guard.rag, app.config.rag.k
    watched = [c.query for c in canaries.set.canaries if c.expected_answer or c.expected_answer_contains][:count]
    questions = watched_questions(app, tenant)
    aims = [Aim(question, FALSE, question in watched) for question in (*watched, *questions[-count:])]
    attacks = {name: build("poisoner", part, folder, parts) for name, part in DRILLS.items()}
    async with copied(rag, lambda place: SqliteIndex(place / "copy.db"), defenses, tenant) as guard:
        index, judge = guard.rag.index, None
        if index.moments(tenant).n >= LEAST:
            learnt = await asyncio.to_thread(_learnt, app, index, questions, tenant)

            def judge(documents: Sequence[Document]) -> int:  # afresh: it remembers what it has seen
                vectors = rag.embedder.embed([d.content for d in documents])
                return sum(j.quarantine for j in learnt.afresh().judge(documents, vectors))

        return await Range(guard, ask, judge, tenant, k, app.config.redteam.seed).hold(attacks, aims, progress)
