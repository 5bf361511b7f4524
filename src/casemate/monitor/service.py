"""The monitor of a configured system: canaries, screening of new documents, and alert delivery.

The only module of the monitor that reads the configuration. It wires the areas below and adds no logic of its own.
Functions that use the event store raise ``BackendError`` if it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from casemate.config import Config, PluginSpec
from casemate.errors import ConfigError, DataError
from casemate.guard.guard import Guard
from casemate.monitor.canaries.canary import CanarySet, parse_interval
from casemate.monitor.canaries.canary_file import read_canaries
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.monitor.poisoning.drill import DrillQuestion, DrillResult, PoisoningDrill, Screen, guarded_copy
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.poisoning.scoring import MIN_DOCUMENTS, PoisonScreener
from casemate.monitor.poisoning.screening_gate import ScreeningGate, TenantScreening
from casemate.monitor.scheduler import schedule
from casemate.monitor.scheduler.run_executor import RunExecutor
from casemate.monitor.scheduler.schedule import ScheduleGap
from casemate.monitor.scheduler.watch import AlertDispatcher, WatchSettings, watch
from casemate.monitor.traces.recorder import GuardJudge, TraceRecorder
from casemate.monitor.trends import baseline
from casemate.monitor.trends.baseline import BASELINE_RUNS, Baseline
from casemate.monitor.trends.cusum import AlarmLimits, RunAnalysis, WatchedSet
from casemate.monitor.trends.trend import compute_trend, read_results
from casemate.monitor.trends.trend_page import TrendSource
from casemate.plugins import build
from casemate.protocols import Channel, DocumentSink, Embedder, EventStore, Generator, Index, Progress, Target
from casemate.rag.pipeline import Rag
from casemate.rag.question_file import questions_in
from casemate.system import App
from casemate.text.synthetic_questions import generate_with_documents
from casemate.types import DEFAULT_TENANT, Document

DRILL_ATTACKS: Mapping[str, PluginSpec] = {
    "PoisonedRAG": PluginSpec(use="poison"),
    "PoisonedRAG, white box": PluginSpec.model_validate({"use": "poison", "method": "white_box"}),
    "CorruptRAG": PluginSpec.model_validate({"use": "poison", "method": "corrupt"}),
    "blocker": PluginSpec.model_validate({"use": "poison", "method": "blocker"}),
}
"""Attacks of a drill."""
FALSE_ANSWER = "Quellbach ninety"
"""An answer that no model gives by itself."""
OWN = PluginSpec(use="own")
JUDGE_S = 60.0
"""Age at which the guard that judges traced questions is replaced."""
WATCHED_QUESTIONS = 2000
"""Default number of watched questions."""
RECENT_VERDICTS, RECENT_QUESTIONS = 5000, 1000
"""Latest verdicts among which questions of clients are searched, and the largest number of these that are watched."""


@dataclass(frozen=True, slots=True)
class CanaryMonitor:
    """The canaries of a system, with what asks them and the channels that receive their alerts."""

    app: App
    file: Path
    set: CanarySet
    runner: CanaryRunner
    channels: Sequence[Channel]

    async def run(
        self, pause_s: float = 2.0, on_result: Callable[[CanaryResult], None] = lambda result: None
    ) -> RunAnalysis:
        """Asks all canaries now, repeats failures after a pause in seconds, and delivers alerts.

        Raises:
            ConfigError: If a canary expects what the target does not report.
        """
        self.runner.require_supported()
        store, log_text = self.app.store, self.app.config.privacy.log_text
        executor = RunExecutor(self.watched_set(), self.runner.ask, store, self.limits, pause_s, log_text, on_result)
        analysis = await executor.run_now(lambda: datetime.now(UTC).timestamp())
        await AlertDispatcher(store, self.channels, self._settings).dispatch_once()
        return analysis

    async def watch(self, on_run: Callable[[RunAnalysis], None], on_leader_change: Callable[[bool], None]) -> None:
        """Asks canaries when they are due, until cancelled. See ``scheduler.watch``.

        Raises:
            ConfigError: If a canary expects what the target does not report.
        """
        self.runner.require_supported()
        await watch(
            self.watched_set(),
            self.runner.ask,
            self.app.store,
            self.channels,
            self._settings,
            current=self.watched_set,
            on_run=on_run,
            on_leader_change=on_leader_change,
        )

    async def measure_baseline(
        self,
        runs: int = BASELINE_RUNS,
        force: bool = False,
        progress: Progress = lambda count: None,
        pause_s: float = 2.0,
    ) -> Baseline:
        """Asks all canaries repeatedly and stores the recorded baseline as a candidate.

        Failures are repeated once, after a pause in seconds. With ``force``, canaries that never pass are accepted.
        ``progress`` gets 1 for each run.

        Raises:
            DataError: If canaries never pass, or the target answers none in a run.
        """
        recorded, repeats = [], list[CanaryResult]()
        for number in range(runs):
            run = await self.runner.run(f"{self.set.name}-baseline-{number}", wording=number)
            if all(result.status is CanaryStatus.ERROR for result in run.results):
                raise DataError(f"the target answered none of {len(run.results)} canaries: {run.results[0].error}")
            recorded.append(run)
            failed = {r.canary: () for r in run.results if r.status is CanaryStatus.FAIL}
            if failed:
                await asyncio.sleep(pause_s)
                repeats += (await self.runner.ask(f"{run.id}~1", failed, lambda result: None)).results
            progress(1)
        is_own = self.runner.target is self.app.target
        digests = self.app.index.digests(self.runner.tenant) if is_own else None
        found = baseline.record_baseline(
            recorded, self.set, at=datetime.now(UTC), digests=digests, force=force, repeats=repeats
        )
        baseline.propose_baseline(self.app.store, found)
        return found

    def watched_set(self) -> WatchedSet:
        """The set with the baseline in force. Outdated canaries do not alert."""
        return _watched_set(self.app, self.set, self.runner.tenant)

    @property
    def limits(self) -> AlarmLimits:
        """When failures become an alarm."""
        return _limits(self.app)

    def trend_source(self, since: datetime | None = None) -> TrendSource:
        """History of the set with all that its plots need."""
        return _trend_source(self.app, self.set, self.watched_set(), read_results(self.app.store, self.set.name, since))

    def gaps(self, since: datetime | None = None) -> list[ScheduleGap]:
        """Missed runs, oldest first; the last gap may continue."""
        now, store = datetime.now(UTC), self.app.store
        history = schedule.load_history(store, self.set.name, now)
        current = schedule.current_gap(self.watched_set(), history, now.timestamp())
        return [*schedule.load_gaps(store, self.set.name, since), *([current] if current else [])]

    @property
    def _settings(self) -> WatchSettings:
        config = self.app.config
        return WatchSettings(self.limits, config.monitor.notifications_per_hour, log_text=config.privacy.log_text)


def _limits(app: App) -> AlarmLimits:
    section = app.config.monitor
    return AlarmLimits(section.runs_per_false_alert, page_rules=section.page_rules)


def _watched_set(app: App, canaries: CanarySet, tenant: str) -> WatchedSet:
    """A set with the baseline in force. Outdated canaries do not alert."""
    found = baseline.load_baseline(app.store, canaries)
    outdated, changed = frozenset[str](), dict[str, tuple[str, ...]]()
    if found:
        updates = baseline.updated_sources(app.store, tenant, found.at)
        compared = any(canary.sources for canary in found.canaries.values())
        digests = app.index.digests(tenant) if compared else {}
        outdated = frozenset(baseline.outdated_canaries(found, digests, updates))
        changed = baseline.changed_sources(found, digests, updates)
    interval_s = parse_interval(app.config.monitor.interval).total_seconds()
    watched = baseline.watched_set(canaries, found, interval_s, outdated, changed)
    return replace(watched, external=app.config.monitor.target.use != OWN.use)


def _trend_source(app: App, canaries: CanarySet, watched: WatchedSet, results: Sequence[CanaryResult]) -> TrendSource:
    trend, by_id = compute_trend(results, watched, _limits(app)), {canary.id: canary for canary in canaries.canaries}
    return TrendSource(trend, results, watched, by_id, baseline.load_baseline(app.store, canaries))


def trend_of_results(
    app: App, name: str, results: Sequence[CanaryResult], links: Mapping[str, tuple[str, str]]
) -> TrendSource:
    """History of the configured set from results that were read already, oldest first. Needs no target and no channel.

    ``links`` has the address and title of each run, by id.

    Raises:
        DataError: If the canary file cannot be read, or its set has another name.
    """
    canaries = read_canaries(canary_file(app), judge=True)
    if canaries.name != name:
        raise DataError(f"the canary file contains the set {canaries.name!r}; plots need the file of the set {name!r}")
    found = _trend_source(app, canaries, _watched_set(app, canaries, DEFAULT_TENANT), results)
    return replace(found, links=[links.get(run.run, ("", "")) for run in found.trend.runs] if links else [])


def open_canary_monitor(app: App, tenant: str = DEFAULT_TENANT) -> CanaryMonitor:
    """The configured canaries of a system.

    Raises:
        DataError: If the canary file is missing or invalid.
        ConfigError: If a target, judge or channel cannot be built.
    """
    section = app.config.monitor
    judge = build("generator", section.judge, app.config.folder) if section.judge else None
    file = canary_file(app)
    canaries = read_canaries(file, k=app.config.rag.k, judge=judge is not None)
    baseline.watched_set(canaries)  # refuses invalid names before anything is asked
    runner = replace(
        open_runner(app, open_target(app, section.target), tenant), canaries=canaries.canaries, judge=judge
    )
    return CanaryMonitor(app, file, canaries, runner, _channels(app))


def open_runner(app: App, target: Target, tenant: str) -> CanaryRunner:
    """The runner that asks a target with the monitor's settings. It has no canaries and no judge yet."""
    section, embedder = app.config.monitor, app.guard.rag.embedder
    return CanaryRunner(
        (), target, app.config.rag.k, embedder, section.concurrency, section.timeout_s, tenant, section.client
    )


def canary_file(app: App) -> Path:
    """Path of the canary file, relative to the configuration file."""
    return app.config.folder / app.config.monitor.canaries


def open_alert_dispatcher(app: App) -> AlertDispatcher:
    """Delivers a system's alerts; needs no canaries. Raises ``ConfigError`` if a channel cannot be built."""
    return AlertDispatcher(app.store, _channels(app), WatchSettings(per_hour=app.config.monitor.notifications_per_hour))


def open_target(app: App, spec: PluginSpec, recorded: bool = True) -> Target:
    """The system itself (``own``), or a configured target; raises ``ConfigError`` if it cannot be built.

    The system itself records verdicts only if ``recorded``; another target may record others.
    """
    if _is_own(spec, "monitor.target"):
        return app.target if recorded else app.unrecorded_target()
    made: Any = build("target", spec, app.config.folder)
    target: Target = made
    return target


def _is_own(spec: PluginSpec, key: str) -> bool:
    """Whether a part of the configuration names this system; ``ConfigError`` if it has options then."""
    if spec.use == OWN.use and spec.options:
        raise ConfigError(f"{key}: 'own' has no options, but was given {', '.join(spec.options)}; remove them")
    return spec.use == OWN.use


def open_trace_recorder(app: App) -> TraceRecorder:
    """Records production traces in the event store. Its guard has defenses of its own and records nothing.

    New defenses read all recent state of clients, and old ones remember each trace as a client. So they are replaced
    every ``JUDGE_S`` seconds, not with each batch.
    """
    made: dict[str, tuple[float, GuardJudge]] = {}

    def make_judge(tenant: str) -> GuardJudge:
        if tenant not in made or monotonic() - made[tenant][0] >= JUDGE_S:
            made[tenant] = monotonic(), GuardJudge(_judging_target(app, tenant), tenant, app.config.rag.k)
        return made[tenant][1]

    return TraceRecorder(app.store, make_judge, app.config.privacy.log_text)


def _judging_target(app: App, tenant: str) -> Guard | Rag | None:
    if not app.index.moments(tenant).n:
        return None
    target: Any = app.guard.rag if app.config.guard.mode == "off" or app.due(tenant) else app.unrecorded_target()
    if isinstance(target, Guard):
        target.enforce = False  # the nearest documents are wanted, whatever the defenses would hide
    found: Guard | Rag = target
    return found


def open_screening_gate(app: App, tenant: str = DEFAULT_TENANT, query_log: Sequence[str] = ()) -> ScreeningGate | None:
    """Screens new documents; None if not configured, or if the corpus is too small to compare with.

    Raises:
        ConfigError: If the reader of the gate cannot be built.
    """
    if not app.config.monitor.gate or app.index.moments(tenant).n < MIN_DOCUMENTS:
        return None
    return _open_gate(app.guard, app.store, app.config, tenant, query_log, _gate_reader(app.guard, app.config))


def missing_screening(app: App, tenant: str) -> str:
    """Says that the configured screening is off, because the corpus is too small to compare with; else empty."""
    n = app.index.moments(tenant).n
    if not app.config.monitor.gate or n >= MIN_DOCUMENTS:
        return ""
    return f"off until the index has {MIN_DOCUMENTS} chunks (now {n}); new documents are indexed unscreened"


def open_document_sink(app: App) -> DocumentSink:
    """The sink of a long-running process, for all tenants: with screening if configured, else the guard."""
    return open_tenant_screening(app.guard, app.store, app.config) or app.guard


def open_tenant_screening(guard: Guard, store: EventStore, config: Config) -> TenantScreening | None:
    """Screens the documents of all tenants; None if not configured. Opens the gate of a tenant with its first ones.

    Of the configuration, ``monitor``, ``calibrate``, ``guard.mode`` and ``rag.k`` apply.

    Raises:
        ConfigError: If the reader of the gate cannot be built.
    """
    if not config.monitor.gate:
        return None
    reader = _gate_reader(guard, config)
    path = config.calibrate.query_log and config.folder / config.calibrate.query_log
    return TenantScreening(
        guard,
        lambda tenant: _open_gate(guard, store, config, tenant, questions_in(path) if path else (), reader),
        lambda: _screening_enforced(guard, config),
    )


def _open_gate(
    guard: Guard, store: EventStore, config: Config, tenant: str, query_log: Sequence[str], reader: Generator | None
) -> ScreeningGate | None:
    index = guard.rag.index
    if index.moments(tenant).n < MIN_DOCUMENTS:
        return None
    known = [*query_log, *_recent_questions(store, tenant)]
    watched = _watched(config, index, tenant, known, WATCHED_QUESTIONS)
    screener = _fit_screener(guard.rag.embedder, index, watched, tenant, config.rag.k, reader)
    return ScreeningGate(guard, screener, Quarantine(store), enforce=_screening_enforced(guard, config))


def _screening_enforced(guard: Guard, config: Config) -> bool:
    """Whether suspicious documents are quarantined; with ``observe``, once enforcement was switched on."""
    gate = config.monitor.gate
    return gate is True or (gate == "observe" and config.guard.mode == "observe" and guard.enforce)


def watched_questions(
    app: App, tenant: str = DEFAULT_TENANT, count: int = WATCHED_QUESTIONS, without: Collection[str] = ()
) -> list[str]:
    """Questions of the canaries, filled up with synthetic ones about documents of other sources than ``without``.

    Raises:
        DataError: If synthetic ones are needed, and there is no such document.
    """
    return list(_watched(app.config, app.index, tenant, (), count, without))


def _watched(
    config: Config, index: Index, tenant: str, query_log: Sequence[str], count: int, without: Collection[str] = ()
) -> dict[str, str]:
    """Watched questions; for each the source that it was generated from, or ""."""
    file = config.folder / config.monitor.canaries
    canaries = read_canaries(file, judge=True).canaries if file.exists() else ()
    found = [question for canary in canaries for question in (canary.query, *canary.paraphrases)]
    found += query_log
    watched = dict.fromkeys(found[:count], "")
    documents = [d for page, _ in index.scan(tenant) for d in page if d.source not in without]
    if count > len(found) and not documents:
        raise DataError(f"tenant {tenant!r} has no documents to ask about; run 'casemate index' first")
    rng = np.random.default_rng(config.calibrate.seed)
    for question, document in generate_with_documents(documents, max(0, count - len(found)), rng):
        watched.setdefault(question, document.source)
    return watched


def _recent_questions(store: EventStore, tenant: str) -> list[str]:
    """Questions that clients asked lately, newest first, where ``privacy.log_text`` records them."""
    bodies = [event.body for event in store.latest("verdict", RECENT_VERDICTS)]
    texts = [body["text"] for body in reversed(bodies) if body.get("text") and body["tenant"] == tenant]
    return list(dict.fromkeys(texts))[:RECENT_QUESTIONS]


def _gate_reader(guard: Guard, config: Config) -> Generator | None:
    """Answers watched questions for the gate; None: the default, without a model."""
    spec = config.monitor.gate_reader
    if spec is None:
        return None
    if _is_own(spec, "monitor.gate_reader"):
        return guard.rag.generator
    made: Generator = build("generator", spec, config.folder)
    return made


def _fit_screener(
    embedder: Embedder, index: Index, watched: Mapping[str, str], tenant: str, k: int, reader: Generator | None
) -> PoisonScreener:
    made = PoisonScreener.fit(index, watched, embedder.embed(list(watched)), k=k, tenant=tenant)
    if reader is not None:
        made.answers = replace(made.answers, reader=reader)
    return made


def fit_screen(app: App, tenant: str, index: Index, watched: Mapping[str, str] | None = None) -> Screen | None:
    """Fits the screening of new documents to a copy of a tenant's index; None if it is too small. Blocks.

    ``watched``: the watched questions; None: synthetic ones about the operator's index.
    """
    if index.moments(tenant).n < MIN_DOCUMENTS:
        return None
    if watched is None:
        watched = _watched(app.config, app.index, tenant, (), WATCHED_QUESTIONS)
    embedder, reader = app.guard.rag.embedder, _gate_reader(app.guard, app.config)
    screener = _fit_screener(embedder, index, watched, tenant, app.config.rag.k, reader)

    def screen(documents: Sequence[Document]) -> int:
        vectors = embedder.embed([d.content for d in documents])
        return sum(r.suspicious for r in screener.fresh_copy().screen(documents, vectors))

    return screen


async def run_drill(
    monitor: CanaryMonitor, count: int = 3, progress: Progress = lambda count: None
) -> list[DrillResult]:
    """Plants false documents in a copy of the corpus, for ``count`` questions of canaries and for as many others.

    The copy is asked, whatever the target of the canaries is. ``progress`` gets 1 for each result.
    """
    app, tenant, folder = monitor.app, monitor.runner.tenant, monitor.app.config.folder
    rag = app.guard.rag
    parts: dict[Any, Any] = {Embedder: rag.embedder}
    canaries = monitor.set.canaries
    watched = [c.query for c in canaries if c.expected_answer or c.expected_answer_contains][:count]
    questions = _watched(app.config, app.index, tenant, (), WATCHED_QUESTIONS)
    attacked = [
        DrillQuestion(question, FALSE_ANSWER, question in watched) for question in (*watched, *list(questions)[-count:])
    ]
    attacks = {name: build("poisoner", spec, folder, parts) for name, spec in DRILL_ATTACKS.items()}
    async with guarded_copy(rag, app.config, tenant) as guard:
        screen = await asyncio.to_thread(fit_screen, app, tenant, guard.rag.index, questions)
        drill = PoisoningDrill(guard, monitor.runner, screen, app.config.redteam.seed)
        return await drill.run(attacks, attacked, progress)


def _channels(app: App) -> list[Channel]:
    """The configured channels; raises one ``ConfigError`` with the errors of all of them."""
    found, errors = list[Channel](), list[str]()
    for spec in app.config.monitor.channels:
        try:
            found.append(build("channel", spec, app.config.folder))
        except ConfigError as error:
            errors.append(str(error))
    if len(errors) > 1:
        raise ConfigError(f"{len(errors)} channels are configured wrongly: {'; '.join(errors)}")
    if errors:
        raise ConfigError(errors[0])
    return found
