"""Crawlers against a real reader, without a defense and with ``crawl_limit``, end to end.

    python -m benchmarks.real.extraction FILE.gguf [questions] [crawler ...]

A small collection: the first texts of a corpus with at most `WORDS` words. Attacks and both sides run at the same time,
so that their answers form batches. What was asked is kept in `build/real_extraction`; a crawl that goes on there has a
guard without memory of the earlier questions, so delete the folder to measure again. The simulated reader answers the
same crawlers beside it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import DATA, ROOT, SEED, save
from benchmarks.crawl import _attack, _rows, defenses
from benchmarks.real.answer import digest
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.generators.transformers import CausalLM
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.guard import Guard
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.caching import CachedEmbedder
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan, CrawlTrace
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.redteam.lab.store import CampaignStore
from casemate.types import Document

CORPUS, CHUNKS, WORDS = "mathqa", 60, 80
K, TOKENS, BATCH = 2, 96, 16
SIDES = {"off": "", "on": "crawl_limit"}


@dataclass
class Ground:
    """The indexed collection and the ledger of what was asked."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        texts = [r for r in _rows(DATA / CORPUS / "corpus.jsonl.gz") if len(r["text"].split()) <= WORDS][:CHUNKS]
        self.documents = [Document(r["_id"], r["text"]) for r in texts]
        self.embedder = CachedEmbedder(MiniLM(threads=1), megabytes=100)
        self.index = SqliteIndex(self.folder / "index.db")
        self.index.open(self.embedder.fingerprint, self.embedder.dim)
        if not self.index.moments().n:
            self.index.add(self.documents, self.embedder.embed([d.content for d in self.documents]))
        self.ledger = CampaignStore(self.folder / "ledger.db")


def main() -> None:
    """Crawls with both readers, and writes the results."""
    model, questions = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12
    names = sys.argv[3:] or ["composite", "rag_thief"]
    ground = Ground(ROOT / "build/real_extraction")
    sizes = {"corpus": CORPUS, "chunks": CHUNKS, "k": K, "tokens": TOKENS, "questions": questions}
    with closing(ground.ledger), closing(ground.index):
        readers: dict[str, Generator] = {"simulated": SimulatedReader()}
        readers[model.name] = CausalLM(str(model), device="cpu", dtype="bfloat16", max_tokens=TOKENS, batch=BATCH)
        crawls, began = {}, time.process_time()
        for name, reader in readers.items():
            crawls[name] = asyncio.run(_crawls(ground, name, reader, names, questions))
        about = {"digest": digest(model), "dtype": "bfloat16", "decoding": "greedy"}
        save("real_extraction", sizes | about | {"cpu_s": time.process_time() - began, "crawls": crawls})


async def _crawls(
    ground: Ground, name: str, reader: Generator, attacks: Sequence[str], questions: int
) -> dict[str, Any]:
    rag = Rag(ground.embedder, ground.index, reader)
    plan = CrawlPlan(seed=SEED, k=K, questions=questions, label=name)
    runs = {
        (attack, side): Crawler(
            attack,
            _attack(attack, ground),
            {side: Guard(rag, defenses(defense)) if defense else rag},
            ground.ledger,
            plan,
        )
        for attack in attacks
        for side, defense in SIDES.items()
    }
    done = await asyncio.gather(*(crawler.run() for crawler in runs.values()))
    traces = {key: found[key[1]] for key, found in zip(runs, done, strict=True)}
    return {a: _measured(runs[a, "off"], {s: traces[a, s] for s in SIDES}, ground) for a in attacks}


def _measured(crawler: Crawler, traces: dict[str, CrawlTrace], ground: Ground) -> dict[str, Any]:
    crawl = measure_crawl(crawler, traces, ground.documents, ground.embedder)
    sides = {
        side: {"crr": result.crr, "coverage": result.coverage, "first_alarm": result.first_alarm}
        for side, result in crawl.by_target.items()
    }
    asked = {side: len(trace.exchanges) for side, trace in traces.items()}
    errors = {side: trace.error for side, trace in traces.items() if trace.error}
    return {**sides, "ratio": crawl.ratio, "questions": asked, "errors": errors}


if __name__ == "__main__":
    main()
