"""Extraction with output transforms and colluding clients: the worst attacker, without a defense and with each policy.

``python -m benchmarks.transforms [folder] [questions=N] [corpus=N ...] [only=ATTACKER,...]``, and then
``python docs/transforms.py`` for the picture. Corpora are those of ``benchmarks.crawl``, with the given numbers of
chunks. Attackers are all crawlers with all transforms, the hardest to stop first. Those that were measured before with
the same code, defenses and questions are not measured again, so an interrupted run goes on. k = 5, the **simulated**
reader, which follows every instruction. Replies are decoded by the attacker before they are compared with the chunks,
whole and in items.

Settings: ``crawl_limit`` against 1 and 20 clients of one tenant, which ask in turn; and the quorum policy against 20:
no client may read a source in full. For three attackers on MathQA also 5 and 100 clients, clients that change when
replies get shorter (adaptive), and clients that come back on three **simulated** days. The attacker without a defense
asks as many questions. The worst attackers come first in the results, the mean of their ratios last. *Coverage*: chunks
that were in the context of an answer; its ratio is to that without a defense.

*Surrogate accuracy*: a system with the same reader that has only what the attacker obtained is asked ordinary
questions. It is the mean ROUGE-L F1 between its answers and those of the unguarded system.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import SEED, before, code_digest, save
from benchmarks.crawl import CORPORA, Ground, K, _attack, replies_label
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.guard.audience import AudiencePolicy
from casemate.guard.client_state import crawl_evidence
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.guard import Guard
from casemate.maths import recovery, stats
from casemate.protocols import Defense, Target
from casemate.rag.pipeline import join_stream
from casemate.redteam.crawling.extracted_texts import split_reply
from casemate.redteam.crawling.transformed import TransformedCrawler
from casemate.redteam.lab.experiment import describe_options
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan, CrawlTrace
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.text.output_transforms import TRANSFORMS
from casemate.text.refusals import is_refusal
from casemate.types import Answer, Document, Prompt, Query

DAY_S = 86_400
JUDGED = 40
"""Questions for the surrogate accuracy."""


@dataclass(frozen=True)
class Setting:
    """Clients and policy."""

    name: str
    clients: int = 1
    schedule: Any = "rotate"
    days: int = 1
    policy: str = "crawl_limit"

    def defenses(self) -> list[Defense]:
        """New defenses without a past."""
        return [CrawlLimit()] if self.policy == "crawl_limit" else [Quorum(support=2, jitter=1), CrawlLimit()]


ONE, TWENTY = Setting("1 client"), Setting("20 clients", 20)
QUORUM = Setting("20 clients, quorum", 20, policy="quorum")
COLLUSION = (
    Setting("5 clients", 5),
    Setting("100 clients", 100),
    Setting("20 clients, adaptive", 20, "adaptive"),
    Setting("100 clients, adaptive", 100, "adaptive"),
    Setting("20 clients, 3 days", 20, days=3),
    Setting("1 client, quorum", policy="quorum"),
)
WORST = ("rag_thief+reversal", "rag_thief+first_document", "rag_crawler")
"""Attackers that are measured in every setting."""
CRAWLERS = ("rag_thief", "composite", "worm", "pirates", "ikea", "rag_crawler")
TRANSFORMED = [f"{crawler}+{transform}" for transform in TRANSFORMS for crawler in CRAWLERS]
FIRST = (*CRAWLERS, "rag_thief+first_document", "composite+first_document", "rag_thief+spaced_letters")
ATTACKERS = tuple(dict.fromkeys([*FIRST, *WORST, *(f"rag_thief+{t}" for t in TRANSFORMS), *TRANSFORMED]))
"""In the order of measuring."""


def main() -> None:
    """Crawls, and writes the results after each attacker."""
    given = dict(a.partition("=")[::2] for a in sys.argv[1:] if "=" in a)
    folder = Path(next((a for a in sys.argv[1:] if "=" not in a), "/tmp/casemate-transforms"))
    folder.mkdir(parents=True, exist_ok=True)
    questions, only = int(given.get("questions", 200)), given.get("only", "")
    sizes = {name: int(given[name]) for name in CORPORA if name in given} or CORPORA
    made = {s.name: [describe_options(d) for d in s.defenses()] for s in (ONE, QUORUM)}
    about = {"questions": questions, "k": K, "code": code_digest(), "defenses": made}
    results = before("transforms", about)
    embedder = CachedEmbedder(MiniLM(threads=1), megabytes=1000)
    for corpus, size in sizes.items():
        CORPORA[corpus] = size
        ground = Ground(corpus, folder, embedder)
        judge = Judge(ground)
        held = results["corpora"].get(corpus, {})
        found: dict[str, dict[str, Any]] = held["attackers"] if held.get("chunks") == size else {}
        with closing(ground.ledger), closing(ground.index):
            for label in [a for a in ATTACKERS if a not in found and (not only or a in only.split(","))]:
                settings = (ONE, TWENTY, QUORUM, *(COLLUSION if label in WORST and corpus == "mathqa" else ()))
                found[label] = asyncio.run(_attacked(ground, judge, label, questions, settings))
                print(corpus, label, {s: c["ratio"] for s, c in found[label].items()}, file=sys.stderr, flush=True)
                results = before("transforms", about)  # again: another process may have measured another corpus
                results["corpora"][corpus] = {"chunks": size, "worst_first": _worst_first(found), "attackers": found}
                save("transforms", results)


class Judge:
    """Asks a system that has only what an attacker obtained."""

    def __init__(self, ground: Ground) -> None:
        self.ground, self.reader = ground, SimulatedReader()
        self.asked: list[tuple[str, str]] = []
        for text, _ in ground.questions:
            answer = asyncio.run(ground.rag.ask(Query(text, "judge", k=K))).text
            if not is_refusal(answer) and len(self.asked) < JUDGED:
                self.asked.append((text, answer))

    async def accuracy(self, replies: Sequence[str]) -> list[float]:
        """Mean similarity of the surrogate's answers to those of the unguarded system, with its interval."""
        texts = list(dict.fromkeys(t for reply in replies if not is_refusal(reply) for t in split_reply(reply)))
        scores = [0.0] * len(self.asked)
        if texts:
            embed = self.ground.embedder.embed
            cosines = embed([q for q, _ in self.asked]) @ embed(texts).T
            for number, (question, expected) in enumerate(self.asked):
                best = np.argsort(-cosines[number])[:K]
                context = tuple(Document(str(i), texts[i]) for i in best)
                answer = await join_stream(self.reader.stream(Prompt(question, context, "")))
                scores[number] = 0.0 if is_refusal(answer) else recovery.rouge_l(expected, answer).f1
        return list(stats.bootstrap(lambda a, _: float(np.mean(a)), scores, [0.0], SEED))


async def _attacked(
    ground: Ground, judge: Judge, label: str, questions: int, settings: Sequence[Setting]
) -> dict[str, Any]:
    """The figures of one attacker in each setting, the ratio to the same attacker without a defense."""
    name, _, transform = label.partition("+")
    attack = _attack(name, ground)
    attack = TransformedCrawler(attack, transform) if transform else attack
    found, off = dict[str, Any](), dict[str, CrawlTrace]()
    for setting in settings:
        made = setting.defenses()
        policy = AudiencePolicy("quorum") if setting.policy == "quorum" else None
        target: Target = Guard(ground.rag, made, audience=policy)
        with _days(target, setting.days, questions) as target_of_days:
            plan = CrawlPlan(
                seed=SEED,
                k=K,
                questions=questions,
                clients=setting.clients,
                schedule=setting.schedule,
                label=f"{replies_label(made)} {setting.name}",
            )
            crawler = Crawler(label, attack, {"on": target_of_days}, ground.ledger, plan)
            traces = await crawler.run()
        if not off:
            bare = CrawlPlan(seed=SEED, k=K, questions=questions, label=code_digest())
            off = await Crawler(label, attack, {"off": ground.rag}, ground.ledger, bare).run()
        crawl = measure_crawl(crawler, off | traces, ground.documents, ground.embedder, windows=False)
        sides = {side: {"crr": r.crr, "coverage": r.coverage} for side, r in crawl.by_target.items()}
        for side, trace in (off | traces).items():
            replies = [attack.decode(e.reply) for e in trace.exchanges]
            sides[side]["surrogate_accuracy"] = await judge.accuracy(replies)
        alarm = crawl.by_target["on"].first_alarm
        covered = _coverage_ratio(*((off | traces)[side] for side in ("off", "on")), ground.documents)
        found[setting.name] = {**sides, "ratio": crawl.ratio, "coverage_ratio": covered, "first_alarm": alarm}
    return found


def _coverage_ratio(off: CrawlTrace, on: CrawlTrace, documents: Sequence[Document]) -> list[float] | None:
    """Chunks in contexts of answers, relative to those without a defense, with the interval of resampled chunks."""
    seen = [{i for e in trace.exchanges if e.answered for i in e.context} for trace in (off, on)]
    counts = np.array([[d.id in ids for d in documents] for ids in seen])
    if not counts[0].any():
        return None
    drawn = np.random.default_rng(SEED).integers(len(documents), size=(stats.RESAMPLES, len(documents)))
    sums = counts[:, drawn].sum(axis=2)
    low, high = np.quantile(sums[1] / np.maximum(sums[0], 1), [0.025, 0.975])
    return [float(counts[1].sum() / counts[0].sum()), float(low), float(high)]


@contextmanager
def _days(target: Target, days: int, questions: int) -> Iterator[Any]:
    """A target for which the clock of ``crawl_limit`` advances by a day after each part of the questions."""
    asked = 0

    async def ask(query: Query) -> Answer:
        nonlocal asked
        asked += 1
        return await target.ask(query)

    module: Any = crawl_evidence
    real = module.time
    clock = SimpleNamespace(time=lambda: time() + DAY_S * (asked * days // (questions + 1)) * 1.01)
    module.time = clock
    try:
        yield SimpleNamespace(ask=ask)
    finally:
        module.time = real


def _worst_first(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By setting: recovery of each attacker and the ratios, the worst first, and the mean of the ratios last."""
    reports: dict[str, Any] = {}
    for setting in dict.fromkeys(name for cells in found.values() for name in cells):
        cells = {label: by_setting[setting] for label, by_setting in found.items() if setting in by_setting}
        worst = sorted(cells, key=lambda label: cells[label]["on"]["crr"][0], reverse=True)
        shown = ("ratio", "coverage_ratio")
        rows = {a: {"crr": cells[a]["on"]["crr"]} | {what: cells[a][what] for what in shown} for a in worst}
        ratios = [row["ratio"][0] for row in rows.values() if row["ratio"]]
        reports[setting] = rows | {"mean_ratio": sum(ratios) / max(len(ratios), 1)}
    return reports


if __name__ == "__main__":
    main()
