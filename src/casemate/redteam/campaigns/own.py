"""Campaigns on the system of this configuration.

The lab copies the index without the non-members and attacks guarded and bare systems over the copy. The own index is
only read, and no event is written to the event store.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.config import Config, PluginSpec
from casemate.guard import generation_costs
from casemate.guard.calibration.file import read_calibrations, write_calibration
from casemate.guard.calibration.fitting import calibrate, calibrated_defenses
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.defenses.quorum.bounds import describe_bounds
from casemate.plugins import build, packages
from casemate.protocols import Defense, Embedder, Generator, Index, Steps
from casemate.rag.corpus import Corpus
from casemate.rag.pipeline import Rag
from casemate.redteam.campaigns.extraction import ExtractionRunner, crawl_plan
from casemate.redteam.campaigns.membership import MembershipRunner, build_attacks, experiment_plan
from casemate.redteam.campaigns.pipeline import (
    INDEX,
    RUN,
    SIMULATED_READER,
    AttackRunner,
    Campaign,
    TargetSystem,
)
from casemate.redteam.campaigns.workers import TargetFactory, WorkerSpec, calibration_files, read_files, run_on_cluster
from casemate.redteam.lab import datasets
from casemate.redteam.lab.benign import benign_questions, measure_utility, replay_benign_sessions
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.capabilities import OWN_SYSTEM
from casemate.redteam.lab.datasets import IndexedSource, Split
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan, RunOnWorkers
from casemate.redteam.lab.extraction_experiment import CrawlPlan
from casemate.redteam.lab.judge import ON
from casemate.redteam.lab.results import BenignReplay, Check, CheckStatus, Utility
from casemate.redteam.lab.store import CampaignStore
from casemate.redteam.lab.two_world_audit import TwoWorldFindings, two_world_audit
from casemate.redteam.reporting.files import CRAWL
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.runtime.executor import LocalExecutor
from casemate.runtime.package_code import package_code
from casemate.system import App, EmbeddingTask, calibration_settings, published_attacks
from casemate.types import DEFAULT_TENANT, Document, Query, Secret

log = logging.getLogger(__name__)

INDEX_UNCHANGED = "The index did not change during the campaign"
BENIGN_QUESTIONS = 300  # synthetic benign questions that measure the guard's cost
SESSIONS, SESSION_LENGTH, SESSION_QUESTIONS = 30, 10, 200
"""Benign sessions that are replayed, questions in each, and synthetic questions they are drawn from."""


class OwnSystem(TargetSystem):
    """The system of this configuration, with the lab's copies of its guard."""

    def __init__(
        self,
        app: App,
        rag: Rag,
        tenant: str,
        directory: Path,
        digests: Mapping[str, str],
        discard: Callable[[], object] = lambda: None,
    ) -> None:
        """Collects the facts about the system, whose bare part ``rag`` generates by a `CachedGenerator`.

        ``digests`` are the content hashes of the sources before the campaign read them. ``discard`` is called if the
        attacked index changed: stored work must not be used again.
        """
        section = app.config.redteam
        evidence = {
            RUN: directory.name,
            "target": "own",
            "capabilities": sorted(OWN_SYSTEM),
            "corpus": _fingerprint(sorted(digests.items())),
            "documents": len(digests),
            "chunks": rag.index.moments(tenant).n,
            "embedder": rag.embedder.fingerprint,
            "guard": [part.use for part in app.config.guard.defenses],
            "guard_options": _fingerprint(repr(app.config.guard)),
            "reader": section.reader.use,
        }
        not_tested = [
            f"the budgets of units, which all attacks of a campaign share: {line}"
            for line in describe_bounds(app.guard.defenses, len(digests))
        ]
        super().__init__(
            evidence, not_tested, simulated=[SIMULATED_READER] if section.reader.use == "simulated_reader" else ()
        )
        self._app, self._rag, self._tenant = app, rag, tenant
        self._digests, self._discard = digests, discard

    async def check_end(self) -> None:
        """Checks that the operator's index is the same as before the campaign."""
        now = await asyncio.to_thread(self._app.index.digests, self._tenant)
        changed = sum(self._digests.get(source) != now.get(source) for source in self._digests.keys() | now.keys())
        self.checks.append(self._index_check(changed))

    def _index_check(self, changed: int) -> Check:
        if not changed:
            return Check(INDEX_UNCHANGED, CheckStatus.PASS, 0.0, 0.0, "All sources are as at the start")
        if self._rag.index is self._app.index:
            self._discard()
            what = "the results mix several states of it and are discarded"
            status = CheckStatus.ERROR
        else:
            what = "the results describe the copy made at the start"
            status = CheckStatus.INCONCLUSIVE
        reason = (
            f"{changed:,} sources of the index were added, changed or removed during the campaign: {what}. Run again"
        )
        return Check(INDEX_UNCHANGED, status, float(changed), 0.0, reason)

    def cost(self) -> Mapping[str, float]:
        """Model calls of the lab, and (`live_`) what defenses spent on answers for the system's users."""
        generator = self._rag.generator
        assert isinstance(generator, CachedGenerator)
        live = generation_costs.summarize_costs(self._app.store.scan("generation"))
        return {
            "model_calls": generator.calls,
            "answered_from_cache": generator.hits,
            **{f"live_{name}": value for name, value in live.items()},
        }


@dataclass(frozen=True)
class OwnCampaign(Campaign):
    """A campaign on one tenant of this system, which is only read; ``benign``: see `ExternalMembershipCampaign`."""

    app: App
    benign: Sequence[str] = ()
    tenant: str = DEFAULT_TENANT

    @property
    def config(self) -> Config:
        return self.app.config

    def bare_system(self, index: Index, store: CampaignStore) -> Rag:
        """The system without its guard, over an index, with caches."""
        rag = self.app.guard.rag
        return Rag(CachedEmbedder(rag.embedder), index, CachedGenerator(*self._reader(store)), rag.instructions)

    def parts(self) -> list[tuple[str, PluginSpec]]:
        """Role and configuration of everything that is built: see `Campaign.parts`."""
        reader = self.config.redteam.reader
        part = self.config.rag.generator if reader.use == "own" else reader
        return [*super().parts(), *self._system(), ("generator", part)]

    def fingerprint(self, documents: object) -> str:
        """Fingerprint of the plan and the attacked documents: equal for a campaign and its resumption."""
        config, section = self.config, self.config.redteam
        settings = [
            section.seed,
            section.identity,
            section.crawl.clients,
            section.crawl.schedule,
            config.rag.k,
            config.guard.on_error,
            self._audience(),
        ]
        return _fingerprint([self.tenant, documents, _describe_all(self.parts()), settings, version("casemate")])

    def label(self, rag: Rag, learned: object) -> str:
        """Fingerprint of everything but plan, split and attacks that results depend on."""
        generator, settings = rag.generator, [self.config.guard.on_error, self._audience()]
        assert isinstance(generator, CachedGenerator)
        parts = [*_describe_all(self._system()), *settings]
        return _fingerprint([parts, rag.instructions, generator.label, learned, version("casemate")])

    def _system(self) -> list[tuple[str, PluginSpec]]:
        """Role and configuration of embedder and defenses."""
        config = self.config
        return [("embedder", config.rag.embedder), *(("defense", part) for part in config.guard.defenses)]

    def _audience(self) -> str:
        """The rules of who may read what, with the code of the operator's function."""
        return f"{self.config.guard.audience!r} {package_code(self.app.guard.audience.function)}"

    def _reader(self, store: CampaignStore) -> tuple[Generator, CampaignStore, str]:
        """The generator that writes the answers, where its replies are kept, and its label."""
        part = self.config.redteam.reader
        if part.use == "own":
            return self.app.guard.rag.generator, store, f"own:{_describe('generator', self.config.rag.generator)}"
        parts = {Embedder: self.app.guard.rag.embedder}
        return build("generator", part, self.config.folder, parts), store, _describe("generator", part)


@dataclass(frozen=True)
class OwnMembershipCampaign(OwnCampaign):
    """Membership inference on the system of this configuration.

    Attributes:
        query_log: Benign questions on which the lab's guard is calibrated; empty: synthetic ones. Must not overlap with
            `benign`.
        split: Candidates whose non-members were never indexed. The own calibration then does not depend on them, and
            the lab uses it. None: the split is drawn from the indexed documents, and the lab calibrates a copy.
    """

    query_log: Sequence[str] = ()
    split: Split | None = None
    two_worlds: bool = True

    async def prepare(self, steps: Steps, resources: ExitStack) -> tuple[TargetSystem, AttackRunner]:
        section, split, before = self.config.redteam, self.split or self._split(), self.app.index.digests(self.tenant)
        attacks = build_attacks(self.config, self.config.folder)
        directory = self.open_directory(self.fingerprint(split.fingerprint))
        store = self.open_store(resources)
        index: Index = resources.enter_context(closing(SqliteIndex(directory / INDEX)))
        rag = self.bare_system(index, store)
        with steps("copying the index without the non-members", self.app.index.moments(self.tenant).n) as count:
            datasets.copy_without_nonmembers(self.app.index, index, split, self.tenant, count)
        systems = TargetFactory(self.config, self.config.folder, rag, await self._calibrate(rag, steps))
        indexed = datasets.indexed_sources(index, {d.source for d in split.members}, self.tenant)
        calibrations = [path.read_text(encoding="utf-8") for path in calibration_files(systems.calibrations)]
        label = self.label(rag, [sorted(index.digests(self.tenant).items()), *calibrations])
        plan = experiment_plan(self.config, label, self.tenant)
        workers = self._workers(systems, split, indexed, plan, directory / INDEX)
        experiment = Experiment(attacks, split, systems.targets(), store, indexed, plan, workers)
        runner = MembershipRunner(
            experiment,
            section.gate,
            measure_utility=partial(self._measure_utility, systems, experiment),
            audit_worlds=partial(self._audit_worlds, systems, experiment) if self.two_worlds else None,
            undecided=describe_undecided(self.app.guard.defenses, index.moments(self.tenant).n),
        )
        system = OwnSystem(self.app, rag, self.tenant, directory, before)
        return system, runner

    def _split(self) -> Split:
        section, corpus = self.config.redteam, self.config.rag.corpus
        assert corpus is not None  # see `validate_plan`
        self.app.require_documents(self.tenant)
        files = Corpus(self.config.folder / corpus, self.config.rag.max_file_mb)
        documents = datasets.read_documents(files, self.app.index.digests(self.tenant).keys())
        if section.split is not None:
            return datasets.read_split(self.config.folder / section.split, documents, section.seed)
        # the two-world audit removes one member from the copy, and mirabel must decide without it, too
        fixed, least = section.model_fields_set & {"members", "nonmembers"}, fewest_chunks(self.app.guard.defenses)
        chunks = (
            Counter(d.source for found, _ in self.app.index.scan(self.tenant) for d in found) if least else Counter()
        )

        def leaves_enough(nonmembers: Sequence[Document]) -> bool:
            left = chunks - Counter({d.source: chunks[d.source] for d in nonmembers})
            return left.total() - max(left.values(), default=0) >= least

        return datasets.draw_split(documents, section.members, section.nonmembers, section.seed, fixed, leaves_enough)

    async def _calibrate(self, rag: Rag, steps: Steps) -> Path | None:
        """Calibrates the lab's guard on the lab's index, without the non-members. None: the own calibration holds."""
        if self.split is not None or not self.app.calibrated:
            return None
        settings = calibration_settings(self.config, self.tenant)
        defenses = _describe_all(("defense", part) for part in self.config.guard.defenses)
        digests = rag.index.digests(self.tenant)
        facts = [rag.embedder.fingerprint, digests, list(self.query_log), dataclasses.asdict(settings), *defenses]
        folder = self.folder / f"calibration-{_fingerprint(facts)}"
        guard = TargetFactory(self.config, self.config.folder, rag, folder).guard()
        for defense in calibrated_defenses(guard.defenses):
            if self.tenant not in read_calibrations(defense.calibration):
                found = await calibrate(defense, rag, published_attacks(), self.query_log, settings, steps)
                write_calibration(defense.calibration, self.tenant, found)
        return folder

    def _workers(
        self,
        systems: TargetFactory,
        split: Split,
        indexed: Mapping[str, IndexedSource],
        plan: ExperimentPlan,
        copied: Path,
    ) -> RunOnWorkers | None:
        """Runs trials on the cluster; None: this process runs all."""
        app, generator = self.app, systems.rag.generator
        if isinstance(app.executor, LocalExecutor):
            return None
        if any(defense.compares_clients for defense in app.guard.defenses):
            log.warning("a defense compares clients across trials, so all trials run in this process")
            return None
        assert isinstance(generator, CachedGenerator)
        index, calibrations = copied.absolute(), systems.calibrations and systems.calibrations.absolute()
        spec = WorkerSpec(
            config=(self.config, self.config.folder.absolute()),
            embedding=EmbeddingTask.of(self.config, app.guard.rag.embedder.fingerprint),
            split=split,
            indexed=indexed,
            plan=plan,
            reader=generator.label,
            instructions=systems.rag.instructions,
            calibrations=calibrations,
            index=index,
            files=None if app.executor.local else read_files(index, calibrations),
        )
        return run_on_cluster(app.executor, spec, generator)

    async def _measure_utility(self, systems: TargetFactory, experiment: Experiment, steps: Steps) -> Utility:
        plan, rng = experiment.plan, np.random.default_rng(experiment.plan.seed + 1)
        source, questions = benign_questions(self.benign, experiment.split.members, BENIGN_QUESTIONS, rng)
        queries = [Query(text, f"benign-{i}", plan.tenant, plan.k) for i, text in enumerate(questions)]
        restricted = self.app.guard.audience.unentitled != "full"
        unentitled = systems.guard() if restricted else None
        with steps("asking benign questions", len(queries)) as count:
            return await measure_utility(systems.rag, systems.guard(), queries, source, count, unentitled)

    async def _audit_worlds(self, systems: TargetFactory, experiment: Experiment, steps: Steps) -> TwoWorldFindings:
        sessions, index = experiment.member_sessions(ON), systems.rag.index
        with steps("two-world audit", len(experiment.attacks) * len(experiment.split.members)) as count:
            return await two_world_audit(index, systems.guard, sessions, experiment.indexed, experiment.plan, count)


@dataclass(frozen=True)
class OwnExtractionCampaign(OwnCampaign):
    """Extraction attacks on the system of this configuration."""

    stem: ClassVar[str] = CRAWL

    async def prepare(self, steps: Steps, resources: ExitStack) -> tuple[TargetSystem, AttackRunner]:
        self.app.require_documents(self.tenant)
        index = self.app.index
        digests = index.digests(self.tenant)
        chunks = [d for documents, _ in index.scan(self.tenant) for d in documents]
        directory = self.open_directory(self.fingerprint(sorted(digests.items())))
        store = self.open_store(resources)
        rag = self.bare_system(index, store)
        systems = TargetFactory(self.config, self.config.folder, rag, None)
        label, discard = _usable_label(store, self.label(rag, sorted(digests.items())))
        plan = crawl_plan(self.config, label, self.tenant)
        runner = ExtractionRunner(
            self.config,
            systems.targets,
            chunks,
            rag.embedder,
            store,
            plan,
            replay=partial(self._replay, systems, chunks, plan),
            in_memory=(ON,),
        )
        return OwnSystem(self.app, rag, self.tenant, directory, digests, discard), runner

    async def _replay(
        self, systems: TargetFactory, chunks: Sequence[Document], plan: CrawlPlan, steps: Steps
    ) -> BenignReplay:
        """Replays sessions, each with some of the benign questions."""
        rng = np.random.default_rng(plan.seed + 2)
        _, questions = benign_questions(self.benign, chunks, SESSION_QUESTIONS, rng)
        length = min(SESSION_LENGTH, len(questions))
        sessions = [
            (f"benign-{i}", [questions[j] for j in rng.permutation(len(questions))[:length]]) for i in range(SESSIONS)
        ]
        with steps("replaying benign sessions", SESSIONS) as count:
            return await replay_benign_sessions(systems.guard(), sessions, systems.rag, plan, count)


def fewest_chunks(defenses: Sequence[Defense]) -> int:
    """The number of chunks from which mirabel decides; 0 without it."""
    return max((d.min_documents for d in defenses if isinstance(d, Mirabel)), default=0)


def describe_undecided(defenses: Sequence[Defense], chunks: int) -> str:
    """Says that mirabel decides nothing in an index of this many chunks; empty if it decides."""
    least = fewest_chunks(defenses)
    return f"mirabel decided nothing: {chunks:,} chunks are indexed, it needs {least}" if chunks < least else ""


def _usable_label(store: CampaignStore, label: str) -> tuple[str, Callable[[], object]]:
    """A label whose stored exchanges were not discarded, and a function that discards them."""
    number = 0
    while store.get_reply(f"discarded-{label}-{number}"):
        number += 1
    return f"{label}-{number}", partial(store.put_reply, f"discarded-{label}-{number}", "1")


def _describe_all(parts: Iterable[tuple[str, PluginSpec]]) -> list[str]:
    return [_describe(role, part) for role, part in parts]


def _describe(role: str, part: PluginSpec) -> str:
    """A plug-in with its options and, if it is not Casemate's, its code.

    A secret counts by its fingerprint: the label is stored in a file.
    """
    options = {k: _fingerprint(str(v)) if isinstance(v, Secret) else repr(v) for k, v in part.options.items()}
    return f"{part.use}:{options}{packages(role, part) or ''}"


def _fingerprint(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:16]
