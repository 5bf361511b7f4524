"""Crawlers against a real reader, without a defense and with ``crawl_limit``, end to end.

    python -m benchmarks.real.extraction FILE.gguf [questions] [crawler or corpus ...]

Small collections: the first texts of a corpus with at most `WORDS` words. All crawlers and both sides run at the same
time, so that their answers form batches. The reader's answers are kept in `build/real_extraction`: an interrupted run
begins again, and is answered from there as far as it was, so the defense has seen every question. The simulated reader
answers the same crawlers beside it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import DATA, ROOT, SEED, before, save
from benchmarks.crawl import ATTACKS, CORPORA, _attack, _rows, defenses
from benchmarks.real.answer import digest
from benchmarks.real.recorded_model import RecordedModel
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.guard import Guard
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.caching import CachedEmbedder
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan, CrawlTrace
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.redteam.lab.store import CampaignStore
from casemate.types import Document

CHUNKS, WORDS = 60, 80
K, TOKENS = 2, 96
SIDES = {"off": "", "on": "crawl_limit"}
WORK = ROOT / "build/real_extraction"


@dataclass
class Ground:
    """An indexed collection."""

    corpus: str
    embedder: CachedEmbedder

    def __post_init__(self) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        texts = [r for r in _rows(DATA / self.corpus / "corpus.jsonl.gz") if len(r["text"].split()) <= WORDS][:CHUNKS]
        self.documents = [Document(r["_id"], r["text"]) for r in texts]
        self.index = SqliteIndex(WORK / f"{self.corpus}.db")
        self.index.open(self.embedder.fingerprint, self.embedder.dim)
        if not self.index.moments().n:
            self.index.add(self.documents, self.embedder.embed([d.content for d in self.documents]))


def main() -> None:
    """Crawls with both readers, and writes the results after each corpus."""
    model, questions = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12
    named = sys.argv[3:]
    attacks = [name for name in named if name not in CORPORA] or list(ATTACKS)
    about = {"model": model.name, "digest": digest(model), "dtype": "bfloat16", "decoding": "greedy"}
    about |= {"chunks": CHUNKS, "words": WORDS, "k": K, "tokens": TOKENS, "questions": questions}
    results = before("real_extraction", about)
    embedder = CachedEmbedder(MiniLM(threads=1), megabytes=300)
    readers: dict[str, Generator] = {"simulated": SimulatedReader()}
    readers[model.name] = RecordedModel(model, WORK / f"{model.stem}.jsonl.gz", TOKENS)
    for corpus in [name for name in named if name in CORPORA] or CORPORA:
        ground, began, found = Ground(corpus, embedder), time.process_time(), {}
        with closing(ground.index):
            for name, reader in readers.items():
                found[name] = asyncio.run(_crawls(ground, name, reader, attacks, questions))
        results["corpora"][corpus] = {"cpu_s": time.process_time() - began, "crawls": found}
        save("real_extraction", results)


async def _crawls(
    ground: Ground, name: str, reader: Generator, attacks: Sequence[str], questions: int
) -> dict[str, Any]:
    rag = Rag(ground.embedder, ground.index, reader)
    plan = CrawlPlan(seed=SEED, k=K, questions=questions, label=name)
    with tempfile.TemporaryDirectory() as folder, CampaignStore(Path(folder) / "ledger.db") as ledger:
        runs = {
            (attack, side): Crawler(
                attack,
                _attack(attack, ground),
                {side: Guard(rag, defenses(defense)) if defense else rag},
                ledger,
                plan,
            )
            for attack in attacks
            for side, defense in SIDES.items()
        }
        done = await asyncio.gather(*(crawler.run() for crawler in runs.values()))
    traces = {key: found[key[1]] for key, found in zip(runs, done, strict=True)}
    return {a: _measured(runs[a, "off"], {s: traces[a, s] for s in SIDES}, ground) for a in attacks}


def _measured(crawler: Crawler, traces: Mapping[str, CrawlTrace], ground: Ground) -> dict[str, Any]:
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
