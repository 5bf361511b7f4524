"""Extraction: runs crawlers, measures what they recover, replays benign sessions, and judges both.

An own index is only read, and no event is written: the lab's guard is a copy without client state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from casemate.config import Config, PluginSpec
from casemate.plugins import build
from casemate.protocols import Embedder, ExtractionAttack, Steps, Target
from casemate.redteam.campaigns.pipeline import SCRIPTED_ATTACKS, AttackRunner
from casemate.redteam.crawling.transformed import TransformedCrawler
from casemate.redteam.lab.capabilities import NotObservable
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan, CrawlTrace
from casemate.redteam.lab.extraction_metrics import measure_crawl, summarize_trace, without_context
from casemate.redteam.lab.judge import ATLAS_LEAKAGE, EXTRACTION_FAILS, ON, OWASP, crawl_check, defense_check
from casemate.redteam.lab.results import BenignReplay, CampaignResult, Check, CheckStatus, Crawl, ExtractionSide
from casemate.redteam.lab.store import CampaignStore
from casemate.redteam.reporting.sessions import crawl_sessions
from casemate.types import DEFAULT_TENANT, Document

NOT_TESTED = ("Membership inference, and poisoning: crawlers only extract texts.",)
UNKNOWN_COLLECTION = (
    "recovered texts cannot be compared with the collection, whose texts are not provided; set "
    "redteam.provided.corpus to them, or redteam.provided.members to a random sample"
)


def crawl_plan(config: Config, label: str, tenant: str = DEFAULT_TENANT) -> CrawlPlan:
    """The configured crawl; the label is a fingerprint of everything else that replies depend on."""
    section, crawl = config.redteam, config.redteam.crawl
    return CrawlPlan(
        seed=section.seed,
        k=config.rag.k,
        tenant=tenant,
        questions=crawl.questions,
        clients=crawl.clients,
        schedule=crawl.schedule,
        label=label,
    )


@dataclass(eq=False)
class ExtractionRunner(AttackRunner):
    """Crawlers on prepared targets.

    ``make_targets`` builds them for each crawler, without client state of an earlier crawl. ``seen``: they report
    verdicts, and their context by the ids of `chunks`; without chunks, the texts to recover are unknown.
    ``accept_without_bare``: a crawl without a bare target may pass. ``replay`` replays benign sessions. ``in_memory``:
    see ``Crawler``.
    """

    config: Config
    make_targets: Callable[[], Mapping[str, Target]]
    chunks: Sequence[Document]
    embedder: Embedder
    store: CampaignStore
    plan: CrawlPlan
    seen: bool = True
    accept_without_bare: bool = False
    replay: Callable[[Steps], Awaitable[BenignReplay]] | None = None
    in_memory: Collection[str] = ()
    not_observable: NotObservable = NotObservable({})
    _crawls: dict[str, Crawl] = field(default_factory=dict, init=False)
    _traces: dict[str, dict[str, CrawlTrace]] = field(default_factory=dict, init=False)
    _sides: dict[str, dict[str, ExtractionSide]] = field(default_factory=dict, init=False)
    _replay: BenignReplay | None = field(default=None, init=False)

    async def execute(self, steps: Steps) -> None:
        """Runs one crawler after another, and measures each."""
        for name, part, transform in self._attackers:
            attack: ExtractionAttack = build("crawler", part, self.config.folder, {Embedder: self.embedder})
            attack = TransformedCrawler(attack, transform) if transform else attack
            crawler = Crawler(name, attack, self.make_targets(), self.store, self.plan, self.in_memory)
            total = len(crawler.targets) * self.plan.questions
            with steps(f"{name} crawls ({', '.join(crawler.targets)})", total) as count:
                traces = self._traces[name] = await crawler.run(count)
            self._sides[name] = {target: summarize_trace(trace) for target, trace in traces.items()}
            if self.chunks:
                step = partial(steps, f"comparing the replies to {name} with {len(self.chunks)} chunks")
                crawl = measure_crawl(crawler, traces, self.chunks, self.embedder, step=step)
                self._crawls[name] = crawl if self.seen else without_context(crawl)

    @property
    def _attackers(self) -> list[tuple[str, PluginSpec, str]]:
        """Name, crawler and transform of each attacker: every crawler as it is, and with every transform."""
        section = self.config.redteam.crawl
        return [
            (f"{part.use}+{transform}" if transform else part.use, part, transform)
            for part in section.attacks
            for transform in ("", *section.transforms)
        ]

    async def audit(self, steps: Steps) -> None:
        """Replays benign sessions."""
        if self.replay is not None:
            self._replay = await self.replay(steps)

    @property
    def complete(self) -> bool:
        return all(name in self._sides and not _error(self._sides[name]) for name, _, _ in self._attackers)

    def judge(self) -> CampaignResult:
        crawls = sorted(self._crawls.values(), key=lambda crawl: crawl.recovered, reverse=True)  # the worst first
        order = {crawl.attack: place for place, crawl in enumerate(crawls)}
        names = sorted((name for name, _, _ in self._attackers), key=lambda name: order.get(name, len(order)))
        checks = [self._check(name) for name in names]
        if self.seen:  # otherwise the verdicts of the target are unknown
            checks.append(defense_check(self._failures()))
        reported = crawl_sessions(self._traces, self._crawls, self.chunks)
        return CampaignResult(
            checks=(*checks, *self.not_observable.checks()),
            sessions=reported.sessions,
            sessions_total=reported.total,
            document_names=reported.names,
            crawls=tuple(crawl.without_texts() for crawl in crawls),
            extracted=self._sides,
            benign_sessions=self._replay,
            not_tested=NOT_TESTED,
            simulated=(SCRIPTED_ATTACKS,),
            evidence=self._evidence(),
            cost={"questions": sum(side.questions for sides in self._sides.values() for side in sides.values())},
        )

    def _check(self, name: str) -> Check:
        limit = self.config.redteam.crawl.max_recovered
        if (crawl := self._crawls.get(name)) is not None:
            return crawl_check(crawl, limit, self.accept_without_bare)
        status, reason = CheckStatus.INCONCLUSIVE, UNKNOWN_COLLECTION
        if name not in self._sides:
            status, reason = CheckStatus.ERROR, "not run, because the target failed before"
        elif error := _error(self._sides[name]):
            status, reason = CheckStatus.ERROR, f"the crawl was aborted: {error}"
        return Check(EXTRACTION_FAILS, status, None, limit, reason, name, OWASP, ATLAS_LEAKAGE)

    def _failures(self) -> dict[str, int]:
        """Questions in which a defense failed, by phase."""
        crawls = sum(crawl.by_target[ON].failed for crawl in self._crawls.values())
        return {"crawls": crawls, "benign sessions": self._replay.failed if self._replay else 0}

    def _evidence(self) -> dict[str, Any]:
        section = self.config.redteam.crawl
        return {
            "attacks": [part.use for part in section.attacks],
            "transforms": list(section.transforms),
            "k": self.plan.k,
            "budget": self.plan.questions,
            "clients": self.plan.clients,
            "embedder": self.embedder.fingerprint,
            "chunks": len(self.chunks),
            "limit": section.max_recovered,
        }


def _error(sides: Mapping[str, ExtractionSide]) -> str:
    return next((side.error for side in sides.values() if side.error), "")
