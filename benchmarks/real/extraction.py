"""Crawlers with a real reader, end to end: no defense, ``crawl_limit``, and the quorum policy.

    python -m benchmarks.real.extraction FILE.gguf [questions=200] [writer=FILE.gguf] [corpus or attacker ...]
    python -m benchmarks.real.extraction measure FILE.gguf ...

Collections are small: texts of a corpus with at most `WORDS` words. Attackers are the crawlers, two of them with output
transforms. With ``writer=``, also those whose questions a second model writes. All attackers and settings run
concurrently, so that answers form batches. The simulated reader answers the same attackers.

Answers are cached in `build/real_extraction`. A resumed run replays the cached questions, so that the defense has its
complete state. ``measure`` does not query a model, and keeps results of other attackers. A crawl without an answer to
its next question fails there; the attacker's other crawls are then measured up to the same number of questions. A crawl
that its attacker ended early is complete: RAG-Thief stops after 50 questions without a new chunk.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT, SEED, before, code_digest, read_rows, save
from benchmarks.crawl import CRAWLERS, OFF, ONE, QUORUM, TWENTY, make_attack, measured
from benchmarks.real import files
from benchmarks.real.recorded_model import RecordedModel
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.protocols import ExtractionAttack, Generator
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.experiment import describe_options
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan, CrawlTrace
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.types import Document

CORPORA = ("mathqa", "squad", "nfcorpus")
CHUNKS, WORDS = 300, 100
K, TOKENS, WRITER_TOKENS = 3, 128, 160
FORMS = ("first_document", "capitals", "numbering")
TRANSFORMED = tuple(f"{crawler}+{form}" for crawler in ("rag_thief", "composite") for form in FORMS)
ATTACKERS = (*CRAWLERS, *TRANSFORMED)
WRITTEN = ("ikea, written", "rag_crawler, written")
SETTINGS = (ONE, TWENTY, QUORUM)
WORK = ROOT / "build/real_extraction"


@dataclass
class Ground:
    """An indexed collection."""

    corpus: str
    embedder: CachedEmbedder

    def __post_init__(self) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        texts = [r for r in read_rows(f"{self.corpus}/corpus.jsonl.gz") if len(r["text"].split()) <= WORDS][:CHUNKS]
        self.documents = [Document(r["_id"], r["text"]) for r in texts]
        self.index = SqliteIndex(WORK / f"{self.corpus}.db")
        self.index.open(self.embedder.fingerprint, self.embedder.dim)
        if not self.index.moments().n:
            self.index.add(self.documents, self.embedder.embed([d.content for d in self.documents]))


def main() -> None:
    """Runs the crawls with both readers, and writes the results after each corpus."""
    given = dict(a.partition("=")[::2] for a in sys.argv[1:] if "=" in a)
    named = [a for a in sys.argv[1:] if "=" not in a and a != "measure"]
    model, measuring = Path(named[0]), "measure" in sys.argv[1:]
    questions = int(given.get("questions", 200))
    writer = Path(given["writer"]) if "writer" in given else None
    attackers = [a for a in named if a in ATTACKERS or a in WRITTEN] or [*ATTACKERS, *(WRITTEN if writer else ())]
    about = {"chunks": CHUNKS, "words": WORDS, "k": K, "tokens": TOKENS, "questions": questions, "code": code_digest()}
    about["defenses"] = {s.name: [describe_options(d) for d in s.defenses()] for s in SETTINGS}
    embedder = CachedEmbedder(MiniLM(threads=1), megabytes=300)
    for corpus in [c for c in CORPORA if c in named] or CORPORA:
        ground, began = Ground(corpus, embedder), time.process_time()
        reader = _model(model, corpus, "reader", TOKENS, measuring)
        by = _model(writer, corpus, "writer", WRITER_TOKENS, measuring) if writer else None
        with closing(ground.index):
            found = asyncio.run(_crawls(ground, reader, by, attackers, questions))
            if by and not measuring:  # the writer also answers the crawls with the simulated reader
                asyncio.run(_crawls(ground, SimulatedReader(), by, attackers, questions))
            if not measuring:
                print(corpus, f"{time.process_time() - began:.0f} CPU-s", file=sys.stderr)
                continue
            simulated = asyncio.run(_crawls(ground, SimulatedReader(), by, attackers, questions))
            crawls: dict[str, dict[str, Any]] = {"crawls": {}, "simulated": {}}
            for attack, (crawler, traces) in found.items():
                asked = min((len(trace.exchanges) for trace in traces.values() if trace.error), default=questions)
                crawls["crawls"][attack] = _measured(crawler, traces, ground, asked)
                crawls["simulated"][attack] = _measured(*simulated[attack], ground, asked)
                print(corpus, attack, asked, file=sys.stderr, flush=True)
        results = before("real_extraction", about)
        held = results["corpora"].setdefault(corpus, {"chunks": len(ground.documents), "readers": {}})
        own = held["readers"].setdefault(model.name, {"about": files.read(reader.file)[0]})
        for kind, crawl in crawls.items():  # of the reader, and of the simulated one with as many questions
            own.setdefault(kind, {}).update(crawl)
        save("real_extraction", results)


def _model(model: Path, corpus: str, role: str, tokens: int, measuring: bool) -> RecordedModel:
    return RecordedModel(None if measuring else model, WORK / f"{model.stem}-{role}-{corpus}.jsonl.gz", tokens)


async def _crawls(
    ground: Ground, reader: Generator, writer: Generator | None, attackers: Sequence[str], questions: int
) -> dict[str, tuple[Crawler, dict[str, CrawlTrace]]]:
    """By attacker: the crawler, and its traces without a defense and in each setting."""
    rag = Rag(ground.embedder, ground.index, reader)
    with tempfile.TemporaryDirectory() as folder, CampaignStore(Path(folder) / "ledger.db") as ledger:
        runs = {}
        for attacker in attackers:
            attack = _attacker(attacker, ground, writer)
            for setting in (OFF, *SETTINGS):
                plan = CrawlPlan(seed=SEED, k=K, questions=questions, clients=setting.clients)
                target = {setting.name: setting.target(rag)}
                runs[attacker, setting.name] = Crawler(attacker, attack, target, ledger, plan)
        done = await asyncio.gather(*(crawler.run() for crawler in runs.values()))
    traces: dict[str, dict[str, CrawlTrace]] = {}
    for (attacker, _), found in zip(runs, done, strict=True):
        traces.setdefault(attacker, {}).update(found)
    return {attacker: (runs[attacker, OFF.name], traces[attacker]) for attacker in attackers}


def _attacker(name: str, ground: Ground, writer: Generator | None) -> ExtractionAttack:
    options = {"writer": writer} if name in WRITTEN else {}
    return make_attack(name.removesuffix(", written"), ground.embedder, **options)


def _measured(crawler: Crawler, traces: Mapping[str, CrawlTrace], ground: Ground, questions: int) -> dict[str, Any]:
    """Results over at most ``questions`` questions of each crawl."""
    cut = {
        name: replace(t, exchanges=t.exchanges[:questions], finds=tuple(f for f in t.finds if f.query <= questions))
        for name, t in traces.items()
    }
    errors = {name: t.error for name, t in traces.items() if t.error}
    return {"questions": questions, "errors": errors} | measured(crawler, cut, ground.documents, ground.embedder)


if __name__ == "__main__":
    main()
