"""Crawlers on a target outside: what they carry away, and how much of the collection that is, if it is known."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from casemate import capabilities
from casemate.app import build
from casemate.capabilities import Capability
from casemate.chunks import cut
from casemate.config import Config, Part
from casemate.crawlers import NOT_TESTED, CrawlCampaign, Verdict, judge, plan_facts
from casemate.errors import BackendError
from casemate.foreign.aim import Aim, ledger_of, take_aim
from casemate.foreign.campaign import facts
from casemate.foreign.rounds import Round, open_round
from casemate.foreign.signs import alive, life
from casemate.lab.box import CachedEmbedder
from casemate.lab.crawl import Crawler, CrawlPlan
from casemate.lab.crawl_figures import measured
from casemate.lab.crawl_results import Crawl, Loot, Walk
from casemate.lab.experiment import digest
from casemate.lab.judge import OFF, gravest
from casemate.lab.known import texts
from casemate.lab.ledger import Ledger
from casemate.lab.outside import Outside
from casemate.lab.results import Check, Status
from casemate.protocols import Embedder
from casemate.redteam import WRITTEN, Steps
from casemate.types import Document

UNKNOWN = (
    "what was carried away cannot be compared with the collection, whose texts are not known; set redteam.known.corpus "
    "to them, or redteam.known.members to a random sample"
)
PRICE = "What the guard costs harmless askers: 'casemate redteam run' measures that."
SAMPLE = "Shares are those of the known members, which are taken for a random sample of the collection."
ASKED = frozenset({"guard_off", "defense_errors", "fresh_clients"})
"""Checks that a crawl is about."""


@dataclass(eq=False)
class Raid:
    """Crawlers on one target outside, as far as they came.

    Attributes:
        config: The owner's.
        aim: Who is attacked.
        documents: What is known of the collection; none: nothing.
        embedder: For cosines.
        ledger: Where questions and replies are kept.
        plan: How it is run.
        round: Which campaign on it.
    """

    config: Config
    aim: Aim
    documents: list[Document]
    embedder: Embedder
    ledger: Ledger
    plan: CrawlPlan
    round: Round
    crawls: list[Crawl] = field(default_factory=list, init=False)
    loot: dict[str, dict[str, Loot]] = field(default_factory=dict, init=False)
    checks: list[Check] = field(default_factory=list, init=False)
    began: float = field(default_factory=time.monotonic, init=False)

    async def run(self, steps: Steps) -> CrawlCampaign:
        """Asks, compares and judges; what goes wrong on the way is in the campaign."""
        section = self.config.redteam
        try:
            await alive(self.aim, self.documents, section.concurrency)
            for side in self.aim.targets:
                await self._look(side, steps)
            for part in section.crawl.attacks:
                await self._crawl(part, steps)
            await alive(self.aim, self.documents, section.concurrency)
        except BackendError as error:
            why = f"{error}; what was asked is kept, run again to go on"
            self.checks.insert(0, Check("The target could be asked to the end", Status.ERROR, None, None, why))
        campaign = self._campaign()
        if campaign.status is not Status.ERROR:
            self.round.finish(self.ledger)
        return campaign

    async def _look(self, side: str, steps: Steps) -> None:
        """Sees that a target speaks of its collection, as far as that is known."""
        section, target = self.config.redteam, self.aim.targets[side]
        if self.documents:
            with steps(f"asking {self.aim.names[side]} about texts that it has", None):
                found = await life(side, target, self.documents, section.seed, section.concurrency)
            self.checks.append(found.check)

    async def _crawl(self, part: Part, steps: Steps) -> None:
        attack = build("crawler", part, self.config.folder, {Embedder: self.embedder})
        crawler = Crawler(part.use, attack, self.aim.targets, self.ledger, self.plan)
        total = len(self.aim.targets) * self.plan.questions
        with steps(f"{part.use} crawls {', '.join(self.aim.names.values())}", total) as count:
            walks = await crawler.run(count)
        self.loot[part.use] = {side: Loot.of(walk) for side, walk in walks.items()}
        if self.documents:
            with steps(f"comparing what {part.use} has with {len(self.documents)} texts", None):
                self.crawls.append(self._measured(crawler, walks))

    def _measured(self, crawler: Crawler, walks: Mapping[str, Walk]) -> Crawl:
        section = self.config.rag.chunk
        size = section.tokens or self.embedder.max_tokens
        chunks = [c for document in self.documents for c in cut(document, self.embedder, size, section.overlap)]
        return measured(crawler, walks, chunks, self.embedder, seen=False)

    def _campaign(self) -> CrawlCampaign:
        section = self.config.redteam
        left = frozenset(section.leave_out) & ASKED
        cannot = capabilities.impossible(self.aim.can, section.leave_out)
        wanted = ASKED if self.plan.clients > 1 else ASKED - {"fresh_clients"}
        if OFF not in self.aim.targets:
            wanted -= {"guard_off"}  # the verdicts themselves say it
        checks = [*self.checks, *Outside({key: why for key, why in cannot.items() if key in wanted}).checks()]
        verdicts = tuple(self._verdict(part.use, "guard_off" in left) for part in section.crawl.attacks)
        known = section.known
        notes = [SAMPLE] if self.documents and known.corpus is None else []
        notes += [] if OFF in self.aim.targets else [capabilities.AS_MET]
        return CrawlCampaign(
            status=gravest([*(v.status for v in verdicts), *(c.status for c in checks)]),
            verdicts=verdicts,
            crawls=tuple(self.crawls),
            harmless=None,
            simulated=(WRITTEN,),
            loot=self.loot,
            checks=tuple(checks),
            not_tested=(*(capabilities.LEFT_OUT[name] for name in sorted(left)), *notes, PRICE, *NOT_TESTED),
            evidence={
                **facts(self.config, self.aim),
                **plan_facts(self.plan, self.embedder, section.crawl.attacks),
                "texts_known": len(self.documents),
                "limit": section.crawl.recovered,
                "begun": self.round.begun,
                "resumed": self.round.resumed,
            },
            cost={**self.aim.cost(), "seconds": time.monotonic() - self.began},
        )

    def _verdict(self, name: str, alone: bool) -> Verdict:
        """How one crawler's attack ended."""
        broken = [one.error for one in self.loot.get(name, {}).values() if one.error]
        if broken or name not in self.loot:
            why = f"the crawl broke off: {broken[0]}" if broken else "it was not run, for the target failed before"
            return Verdict(name, Status.ERROR, why)
        crawl = next((crawl for crawl in self.crawls if crawl.attack == name), None)
        if crawl is None:
            return Verdict(name, Status.INCONCLUSIVE, UNKNOWN)
        return judge(crawl, self.config.redteam.crawl.recovered, alone)


async def crawl_outside(config: Config, steps: Steps, anew: bool = False) -> CrawlCampaign:
    """Lets the configured crawlers loose on the configured target outside, or goes on with what was interrupted.

    A finished campaign is not used again: the target may have changed since, and nobody would know.

    Args:
        config: The owner's.
        steps: Shows progress.
        anew: Whether an interrupted campaign is given up.

    Raises:
        ConfigError: If the target is not said to be the owner's, or a part cannot be built.
        DataError: If texts that were named cannot be read.
    """
    documents = _known(config)
    aim = take_aim(config, *((Capability.CORPUS,) if documents else ()))
    embedder = CachedEmbedder(build("embedder", config.rag.embedder, config.folder))
    with ExitStack() as opened:
        ledger = opened.enter_context(Ledger(ledger_of(config)))
        section = config.redteam
        attacks = sorted(part.use for part in section.crawl.attacks)
        facts = [aim.label, section.seed, section.crawl.clients, section.crawl.questions, config.rag.k, attacks]
        this = open_round(ledger, f"crawl-{digest(*facts)}", anew)
        plan = CrawlPlan(
            seed=section.seed,
            k=config.rag.k,
            questions=section.crawl.questions,
            clients=section.crawl.clients,
            waits=(),  # a target outside has patience of its own: retries, backoff and Retry-After
            label=this.label,
        )
        for target in aim.targets.values():
            target.nonce = digest(this.label)[:8]
        return await Raid(config, aim, documents, embedder, ledger, plan, this).run(steps)


def _known(config: Config) -> list[Document]:
    """What is known of the collection: all of it, or its known members."""
    known = config.redteam.known
    path, kind = (known.corpus, "corpus") if known.corpus else (known.members, "members")
    return texts(config.folder / path, kind, config.rag.max_file_mb) if path else []
