"""Extraction with output transforms: every crawler with every transform, no defense and ``crawl_limit``.

``python -m benchmarks.transforms [folder] [questions] [crawler ...]``. One corpus (320 chunks of school mathematics),
k = 5, the **simulated** reader, which follows every instruction. Each crawler asks as one client and as 20 of one
tenant. Replies are decoded by the attacker before they are compared with the chunks, whole and in items. What was asked
is kept in the folder. The worst attackers come first in the results.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import SEED, save
from benchmarks.crawl import ATTACKS, COLLUDERS, Ground, K, _attack, defenses
from casemate.backends.embedders.minilm import MiniLM
from casemate.guard.guard import Guard
from casemate.maths.stats import Estimate
from casemate.redteam.crawling.transformed import TransformedCrawler
from casemate.redteam.lab.caching import CachedEmbedder
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.text.output_transforms import TRANSFORMS

CORPUS = "mathqa"
SETTINGS = {"one client": 1, f"{COLLUDERS} clients": COLLUDERS}


def main() -> None:
    """Crawls with each transform, and writes the results after each crawler."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/casemate-transforms")
    folder.mkdir(parents=True, exist_ok=True)
    questions = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    ground = Ground(CORPUS, folder, CachedEmbedder(MiniLM(threads=1), megabytes=500))
    found: dict[str, dict[str, Any]] = {}
    with closing(ground.ledger), closing(ground.index):
        for name in sys.argv[3:] or ATTACKS:
            for transform in ("", *TRANSFORMS):
                label = f"{name}+{transform}" if transform else name
                found[label] = {
                    setting: asyncio.run(_crawled(ground, label, transform, questions, clients))
                    for setting, clients in SETTINGS.items()
                }
                print(label, found[label], file=sys.stderr, flush=True)
            about = {"questions": questions, "k": K, "corpus": CORPUS, "chunks": len(ground.documents)}
            save("transforms", about | {"settings": {setting: _report(found, setting) for setting in SETTINGS}})


async def _crawled(ground: Ground, label: str, transform: str, questions: int, clients: int) -> dict[str, Any]:
    """One attacker without a defense and with ``crawl_limit``."""
    attack = _attack(label.split("+", maxsplit=1)[0], ground)
    attack = TransformedCrawler(attack, transform) if transform else attack
    targets = {"off": ground.rag, "on": Guard(ground.rag, defenses("crawl_limit"))}
    plan = CrawlPlan(seed=SEED, k=K, questions=questions, clients=clients, label="disclosure")
    crawler = Crawler(label, attack, targets, ground.ledger, plan)
    crawl = measure_crawl(crawler, await crawler.run(), ground.documents, ground.embedder, windows=False)
    sides = {side: {"crr": result.crr, "coverage": result.coverage} for side, result in crawl.by_target.items()}
    return {**sides, "ratio": crawl.ratio, "first_alarm": crawl.by_target["on"].first_alarm}


def _report(found: dict[str, dict[str, Any]], setting: str) -> dict[str, Any]:
    """The attackers, the worst first, and the mean of their ratios last."""
    cells = {label: by_setting[setting] for label, by_setting in found.items()}
    worst = sorted(cells.items(), key=lambda item: item[1]["on"]["crr"].value, reverse=True)
    ratios: list[Estimate] = [cell["ratio"] for cell in cells.values() if cell["ratio"]]
    return {**dict(worst), "mean_ratio": sum(r.value for r in ratios) / max(len(ratios), 1)}


if __name__ == "__main__":
    main()
