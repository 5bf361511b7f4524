"""Campaigns on external targets: systems of the operator that the lab cannot copy and queries over their interface.

Membership is known only for texts that the operator provides. An interrupted campaign resumes; a finished one is never
reused, because the target may change without notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from casemate.config import Config, PluginSpec
from casemate.errors import DataError
from casemate.plugins import build
from casemate.protocols import Steps
from casemate.rag.chunking import split_document
from casemate.redteam.campaigns.external_targets import ExternalTargets, build_external_targets, target_parts
from casemate.redteam.campaigns.extraction import ExtractionRunner, crawl_plan
from casemate.redteam.campaigns.liveness_checks import (
    QUESTIONS_BEFORE,
    LivenessResult,
    check_liveness,
    check_reachable,
    check_still_answers,
    genre_check,
    refusal_check,
)
from casemate.redteam.campaigns.membership import MembershipRunner, UnmeasurableRunner, build_attacks, experiment_plan
from casemate.redteam.campaigns.pipeline import RUN, AttackRunner, Campaign, TargetSystem
from casemate.redteam.lab.benign import benign_questions, measure_lost_answers
from casemate.redteam.lab.capabilities import CHECKS, NO_BARE_TARGET, Capability, NotObservable, unmet_checks
from casemate.redteam.lab.datasets import IndexedSource, Split, read_provided, split_provided
from casemate.redteam.lab.experiment import Experiment, digest
from casemate.redteam.lab.extraction_experiment import CrawlPlan
from casemate.redteam.lab.judge import OFF, ON
from casemate.redteam.lab.results import CampaignResult, Utility
from casemate.redteam.lab.store import CampaignStore
from casemate.redteam.reporting.files import CRAWL, has_own_reports, target_folder
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.runtime.concurrency import map_concurrently
from casemate.types import Document, Query

NO_WAITS: tuple[float, ...] = ()  # an external target retries by itself
BENIGN_QUESTIONS = 100  # synthetic benign questions that measure the guard's cost
MISSING = (
    "Membership inference needs texts that are known to be in the target's collection, and texts that are not. Set "
    "redteam.provided.members and redteam.provided.nonmembers to a folder or file of each, of the same genre and time: "
    "at least 10, better several hundred"
)
UTILITY_NOT_MEASURED = "The guard's cost for benign users: 'casemate redteam run' measures it."
SAMPLE = "Shares refer to the provided members, taken as a random sample of the collection."
EXTRACTION_CHECKS = frozenset({"guard_off", "defense_errors", "fresh_clients"})
"""Skippable checks that apply to extraction."""


@dataclass(frozen=True, slots=True)
class CampaignRound:
    """One campaign on one target, over as many runs as it takes.

    ``key`` is its fingerprint, ``begun`` the start of its first run (ISO 8601); ``resumed``: an earlier run began it.
    """

    key: str
    number: int
    begun: str
    resumed: bool
    directory: str = ""

    @classmethod
    def open(cls, store: CampaignStore, key: str, restart: bool) -> CampaignRound:
        """The unfinished round of a campaign, unless it is to ``restart``, or a new one."""
        number = 0
        while store.get_reply(f"round-{key}-{number}-ended"):
            number += 1
        if restart and store.get_reply(f"round-{key}-{number}"):
            store.put_reply(f"round-{key}-{number}-ended", "1")
            number += 1
        before = store.get_reply(f"round-{key}-{number}")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(key, number, before or store.put_reply(f"round-{key}-{number}", now), before is not None)

    @property
    def label(self) -> str:
        """Fingerprint of everything stored for this round."""
        return f"{self.key}-{self.number}"

    def finish(self, store: CampaignStore) -> None:
        """Ends the round: the next campaign asks everything again."""
        store.put_reply(f"round-{self.label}-ended", "1")


class ExternalSystem(TargetSystem):
    """External targets with their liveness checks."""

    def __init__(
        self,
        config: Config,
        external: ExternalTargets,
        documents: Sequence[Document],
        progress: tuple[CampaignRound, CampaignStore] | None,
        not_observable: NotObservable,
    ) -> None:
        """Collects the facts about the targets. No texts: none are provided; no ``progress``: nothing will be asked."""
        evidence = {
            "target": external.names[ON],
            **({"target_off": external.names[OFF]} if OFF in external.names else {}),
            "capabilities": sorted(external.can),
            "skipped_checks": sorted(config.redteam.skip_checks),
            **({"begun": progress[0].begun, "resumed": progress[0].resumed} if progress else {}),
            **({RUN: progress[0].directory} if progress else {}),
        }
        skipped = [CHECKS[name].skipped for name in sorted(not_observable.skipped)]
        super().__init__(evidence, [*skipped, *(() if OFF in external.targets else (NO_BARE_TARGET,))])
        self._section, self._external, self._documents = config.redteam, external, documents
        self._progress = progress
        self._alive: dict[str, LivenessResult] = {}

    async def check_before(self, steps: Steps) -> None:
        """Checks that each target answers from its collection, as far as texts are provided."""
        section, external = self._section, self._external
        if self._progress is None:
            return
        if not self._documents:
            for target in external.targets.values():
                await check_reachable(target, (), section.concurrency)
            return
        for side, target in external.targets.items():
            with steps(f"asking {external.names[side]} about provided texts", QUESTIONS_BEFORE) as count:
                found = await check_liveness(side, target, self._documents, section, progress=count)
            self.checks.append(found.check)
            self._alive[side] = found

    async def check_after(self) -> None:
        """Checks that each target still answers, and still from its collection."""
        if self._progress is None:
            return
        for side, target in self._external.targets.items():
            before, concurrency = self._alive.get(side), self._section.concurrency
            if before is None or not before.proven:
                await check_reachable(target, self._documents, concurrency)
            elif check := await check_still_answers(target, before, concurrency):
                self.checks.append(check)

    def cost(self) -> dict[str, float]:
        return self._external.cost()

    def finish(self) -> None:
        """Ends the round."""
        if self._progress is not None:
            current, store = self._progress
            current.finish(store)


@dataclass(frozen=True)
class ExternalCampaign(Campaign):
    """A campaign on external targets; ``restart`` abandons an interrupted one."""

    settings: Config
    restart: bool = False

    @property
    def config(self) -> Config:
        return self.settings

    def parts(self) -> list[tuple[str, PluginSpec]]:
        """Role and configuration of everything that is built: see `Campaign.parts`."""
        return [*super().parts(), *(("target", part) for part in target_parts(self.config.redteam).values())]

    def open_round(self, store: CampaignStore, external: ExternalTargets, key: str) -> CampaignRound:
        """Opens the campaign's round, with client names of its own."""
        current = CampaignRound.open(store, key, self.restart)
        fingerprint = digest(current.label)
        external.set_nonce(fingerprint[:8])
        return replace(current, directory=self.open_directory(fingerprint).name)

    def report_folders(self, result: CampaignResult) -> Sequence[Path]:
        """The target's own folder; also `redteam.folder`, unless that has reports of the operator's system."""
        own = target_folder(self.folder, str(result.evidence["target"]))
        return [own] if has_own_reports(self.folder) else [own, self.folder]

    def validate(self) -> None:
        """See `Campaign.validate`. Requires confirmed ownership."""
        super().validate()
        build_external_targets(self.config)


@dataclass(frozen=True)
class ExternalMembershipCampaign(ExternalCampaign):
    """Membership inference on external targets.

    ``benign`` are logged questions that measure the guard's cost; empty: synthetic ones about provided members.
    """

    benign: Sequence[str] = ()

    async def prepare(self, steps: Steps, resources: ExitStack) -> tuple[TargetSystem, AttackRunner]:
        config, section = self.config, self.config.redteam
        split, missing = self._split()
        external = build_external_targets(config, *((Capability.PROVIDED,) if split else ()))
        attacks = build_attacks(config, config.folder)
        skipped = {*section.skip_checks, *({"fresh_clients"} if section.identity == "campaign" else ())}
        not_observable = NotObservable(unmet_checks(external.can, skipped), frozenset(skipped))
        if split is None:
            system = ExternalSystem(config, external, (), None, not_observable)
            return system, UnmeasurableRunner(missing)
        store = self.open_store(resources)
        identity = section.identity if Capability.CLIENTS in external.can else "campaign"
        key = digest(external.label, split.fingerprint, section.seed, identity, config.rag.k, sorted(attacks))
        current = self.open_round(store, external, key)
        plan = replace(experiment_plan(config, current.label), identity=identity, waits=NO_WAITS)
        unknown = IndexedSource((), np.empty((0, 0), np.float32))
        indexed = {document.source: unknown for document in split.members}
        experiment = Experiment(attacks, split, external.targets, store, indexed, plan)
        comparable = OFF in external.targets and "harmless" not in section.skip_checks
        runner = MembershipRunner(
            experiment,
            section.gate,
            measure_utility=partial(self._measure_utility, external, split, current, store) if comparable else None,
            not_observable=not_observable,
            extra_checks=lambda: (genre_check(split), refusal_check(experiment.trials())),
        )
        return ExternalSystem(config, external, split.members, (current, store), not_observable), runner

    def _split(self) -> tuple[Split | None, str]:
        """The split of the provided texts, or why there is none."""
        config, section = self.config, self.config.redteam
        paths = {"members": section.provided.members, "nonmembers": section.provided.nonmembers}
        lacking = [f"redteam.provided.{kind} is not set" for kind, path in paths.items() if path is None]
        if lacking:
            return None, f"{' and '.join(lacking)}. {MISSING}"
        members, nonmembers = (
            read_provided(config.folder / path, kind, config.rag.max_file_mb)
            for kind, path in paths.items()
            if path is not None
        )
        try:
            return split_provided(members, nonmembers, (section.members, section.nonmembers), section.seed), ""
        except DataError as error:
            return None, f"{error}. {MISSING}"

    async def _measure_utility(
        self, external: ExternalTargets, split: Split, current: CampaignRound, store: CampaignStore, steps: Steps
    ) -> Utility | None:
        section, rng = self.config.redteam, np.random.default_rng(self.config.redteam.seed + 1)
        source, questions = benign_questions(self.benign, split.members, BENIGN_QUESTIONS, rng)
        queries = [Query(text, f"benign-{i}", k=self.config.rag.k) for i, text in enumerate(questions)]
        with steps("asking benign questions (off, on)", 2 * len(queries)) as count:

            async def reply(side: str, query: Query) -> str:
                key = f"benign-{current.label}-{digest(side, query.client, query.text)}"
                found = store.get_reply(key)
                if found is None:  # else an earlier run of this round asked it, before its attacks
                    (answer,) = await external.targets[side].ask_all([query], 1)
                    found = store.put_reply(key, answer.text if answer else "")
                count(1)
                return found

            sides = [await map_concurrently(partial(reply, s), queries, section.concurrency) for s in (OFF, ON)]
        return measure_lost_answers(source, *sides)


@dataclass(frozen=True)
class ExternalExtractionCampaign(ExternalCampaign):
    """Extraction attacks on external targets. Recovery is measured as far as texts of the collection are provided."""

    stem: ClassVar[str] = CRAWL

    async def prepare(self, steps: Steps, resources: ExitStack) -> tuple[TargetSystem, AttackRunner]:
        config, section = self.config, self.config.redteam
        documents = self._documents()
        external = build_external_targets(config, *((Capability.CORPUS,) if documents else ()))
        embedder = CachedEmbedder(build("embedder", config.rag.embedder, config.folder))
        store = self.open_store(resources)
        crawl, attacks = section.crawl, sorted(part.use for part in section.crawl.attacks)
        settings = [section.seed, crawl.clients, crawl.schedule, crawl.questions]
        facts = [external.label, *settings, config.rag.k, attacks]
        current = self.open_round(store, external, f"crawl-{digest(*facts)}")
        plan = replace(crawl_plan(config, current.label), waits=NO_WAITS)
        size = config.rag.chunk.tokens or embedder.max_tokens
        chunks = [
            c for document in documents for c in split_document(document, embedder, size, config.rag.chunk.overlap)
        ]
        not_observable = self._not_observable(external, plan)
        runner = ExtractionRunner(
            config,
            lambda: external.targets,
            chunks,
            embedder,
            store,
            plan,
            seen=False,
            accept_without_bare="guard_off" in not_observable.skipped,
            not_observable=not_observable,
        )
        system = ExternalSystem(config, external, documents, (current, store), not_observable)
        sampled = [SAMPLE] if documents and section.provided.corpus is None else []
        system.not_tested = [*system.not_tested, *sampled, UTILITY_NOT_MEASURED]
        return system, runner

    def _not_observable(self, external: ExternalTargets, plan: CrawlPlan) -> NotObservable:
        relevant = EXTRACTION_CHECKS if plan.clients > 1 else EXTRACTION_CHECKS - {"fresh_clients"}
        if OFF not in external.targets:
            relevant -= {"guard_off"}  # covered by the check of each crawler
        skip = self.config.redteam.skip_checks
        unmet = {key: reason for key, reason in unmet_checks(external.can, skip).items() if key in relevant}
        return NotObservable(unmet, EXTRACTION_CHECKS & frozenset(skip))

    def _documents(self) -> list[Document]:
        """The provided texts of the collection: all of it, or members."""
        config, provided = self.config, self.config.redteam.provided
        path, kind = (provided.corpus, "corpus") if provided.corpus else (provided.members, "members")
        return read_provided(config.folder / path, kind, config.rag.max_file_mb) if path else []
