"""Quorum answers with a real language model: by redundancy, by composition, and what an answer costs.

``python -m benchmarks.quorum_reader FILE.gguf [MINUTES]`` asks the model, and records its answers under ``build``. Run
it again until nothing is open. ``... pack`` writes the recorded answers to ``benchmarks/recorded/quorum``, without a
text of a corpus. ``... judge`` needs no model: it measures from the recorded answers.

Each question is asked three times: plain RAG over ten passages, and quorum over the isolated answers, without poison
and with one and two texts of PoisonedRAG. An answer is right if it contains a gold answer as whole words.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from benchmarks import ROOT, SEED
from benchmarks.kept import Kept, corpus
from benchmarks.real.recorded_model import RecordedModel
from benchmarks.redundant import FLOOR, Case, squad, synthetic
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError
from casemate.guard.defenses.quorum.isolated import IsolatedAnswers
from casemate.guard.defenses.quorum.units import group_units, whole
from casemate.protocols import Generator
from casemate.rag.pipeline import INSTRUCTIONS, Rag, join_stream
from casemate.redteam.attacks.poison import Poison
from casemate.types import Hit, Prompt, Query

WORK = ROOT / "build/quorum_reader"
TOKENS = 48
K = 10
PROMPTS = 1
"""Version of the prompts: change it with ``isolated.ASK`` or ``INSTRUCTIONS``."""
POISON = (0, 1, 2)
PLAIN = (0, 1)
"""Numbers of poisoned texts with which plain RAG is asked, too: its contexts are long."""
UNITS = {"squad": 10, "synthetic": 24}
EACH, FACTS = 10, 1
"""Questions of SQuAD for each bin, and facts of the synthetic collection for each r."""
BINS = ((3, 4), (5, 24))


@dataclass(frozen=True)
class Asked:
    """A question with what a reader said.

    Attributes:
        corpus: Name of the collection.
        case: The question.
        poison: Number of poisoned texts.
        plain: Answer of plain RAG; None: not asked.
        isolated: Answers from single units; empty: abstained.
    """

    corpus: str
    case: Case
    poison: int
    plain: str | None
    isolated: tuple[str, ...]


def main() -> None:
    """Parses the command line."""
    what = sys.argv[1]
    minutes = float(sys.argv[2]) if len(sys.argv) > 2 else 1e9
    about = {"prompts": PROMPTS, "seed": SEED, "corpus": "synthetic, squad"}
    reader = RecordedModel(Path(what), WORK / f"{Path(what).stem}.jsonl.gz", TOKENS, about)
    began = time.monotonic()
    for number, row in enumerate(answers(reader), 1):
        spent = time.monotonic() - began
        print(number, row[0].case.id, f"{spent:.0f} s", flush=True)
        if spent > 60 * minutes:
            return


def answers(reader: Generator) -> Iterator[list[Asked]]:
    """Every question with the answers to it, one list for each question."""
    with collections() as found:
        for name, (rag, cases) in found.items():
            for case in cases:
                yield asyncio.run(asked(name, rag, case, reader))


@contextmanager
def collections() -> Iterator[dict[str, tuple[Rag, list[Case]]]]:
    """Both collections, indexed, with their questions."""
    embedder = Kept(ROOT / "build/kept.npz")
    found = {
        "squad": (corpus("squad"), squad(embedder, EACH, BINS)),
        "synthetic": synthetic(FACTS),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        rags = {}
        for name, (documents, cases) in found.items():
            index = opened.enter_context(closing(SqliteIndex(Path(folder) / f"{name}.db")))
            rags[name] = Rag(embedder, index, ExtractiveGenerator()), cases
            index.add(documents, embedder.embed([d.content for d in documents]))
        yield rags


async def asked(name: str, rag: Rag, case: Case, reader: Generator) -> list[Asked]:
    """Asks one question, with each number of poisoned texts. They rank first: each begins with the question."""
    most = UNITS[name]
    poison = await Poison(texts=max(POISON)).craft(case.question, case.false, np.random.default_rng(SEED))
    hits = (await rag.retrieve(Query(case.question, k=2 * most))).hits
    hits = tuple(hit for hit in hits if hit.score >= FLOOR)
    contexts = [(*(Hit(d, 1.0) for d in poison[:count]), *hits) for count in POISON]
    units = [[whole(unit) for unit in group_units(context)[:most]] for context in contexts]
    every = list({d.text: d for context in units for d in context}.values())
    reads = [tuple(h.document for h in context[:K]) for context in contexts[: len(PLAIN)]]
    prompts = [Prompt(case.question, context, INSTRUCTIONS) for context in reads]
    (said, costs), *plain = await asyncio.gather(
        IsolatedAnswers(reader).ask(case.question, every), *(join_stream(reader.stream(p)) for p in prompts)
    )
    if costs["failed"]:
        raise BackendError(f"{costs['failed']} isolated answers failed; ask again", backend="reader", retryable=True)
    answer = dict(zip((d.text for d in every), said, strict=True))
    rows = zip_longest(POISON, plain, units)
    return [Asked(name, case, count, text, tuple(answer[d.text] for d in found)) for count, text, found in rows]


if __name__ == "__main__":
    main()
