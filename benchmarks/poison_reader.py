"""Defenses against poisoned passages with a real language model, on the synthetic collection and SQuAD.

``python -m benchmarks.poison_reader FILE.gguf [MINUTES] [corpus ...]`` queries the model for at most MINUTES, and
records each answer in ``benchmarks/recorded/quorum``. Run it again to resume. Without arguments it measures recorded
answers.

Ten passages are retrieved. Poison: none, or one text of PoisonedRAG, by ``redteam.attacks.poison``. TrustRAG runs both
stages, RobustRAG both aggregations. An answer is correct if it contains a gold answer as whole words, and false if it
contains the attacker's. The SQuAD questions have an answer in several passages. Their model answers are not recorded,
because they may repeat the corpus.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT, SEED, save
from benchmarks.kept import Kept, corpus
from benchmarks.real import answer, files
from benchmarks.redundant import Case, squad, synthetic
from casemate.backends.generators.transformers import CausalLM
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.robust_rag import RobustRAG
from casemate.guard.defenses.trust_rag import TrustRAG
from casemate.guard.guard import Guard
from casemate.maths.metrics import exact_match
from casemate.maths.stats import clopper_pearson
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag
from casemate.redteam.attacks.poison import Poison
from casemate.types import Document, Query

RECORDED = ROOT / "benchmarks/recorded/quorum"
FACTS, REDUNDANCY = 4, (3, 4, 5, 8, 12)
"""Two questions about each fact."""
CORPORA = ("synthetic", "squad")
EACH, BINS = 12, ((3, 4), (5, 24))
"""Questions of SQuAD for each bin of redundancy."""
K, TOKENS, BATCH = 10, 32, 16
POISON = (0, 1)


def main() -> None:
    """Queries the model if one is given, and measures."""
    named = [a for a in sys.argv[1:] if a in CORPORA] or CORPORA
    given = [a for a in sys.argv[1:] if a not in CORPORA]
    if given:
        asyncio.run(_ask(Path(given[0]), 60 * float(given[1]) if len(given) > 1 else 600, named))
    results = {}
    for file in sorted(RECORDED.glob("poison_*.jsonl.gz")):
        about, *rows = files.read(file)
        found = {}
        for name in CORPORA:
            own = [row for row in rows if row["corpus"] == name]
            found[name] = {"questions": len({row["case"] for row in own}), "systems": tables(own)}
        results[file.name.removeprefix("poison_").partition(".jsonl")[0]] = about | found
    save("poison_reader", results)


async def _ask(model: Path, seconds: float, corpora: Sequence[str]) -> None:
    """Asks the questions without a recorded answer, and records each answer immediately."""
    began = time.monotonic()
    file = RECORDED / f"poison_{files.short_name(model)}.jsonl.gz"
    if not file.exists():
        about = {"model": model.name, "digest": answer.digest(model), "dtype": "bfloat16", "decoding": "greedy"}
        answer.write_lines(file, [about | {"max_tokens": TOKENS, "seed": SEED}])
    done = {(row["case"], row["poison"], row["system"]) for row in files.read(file)[1:]}
    reader = CausalLM(str(model), dtype="bfloat16", max_tokens=TOKENS, batch=BATCH)
    embedder = Kept(ROOT / "build/kept.npz")
    for name in corpora:
        async for rows in _rows(name, reader, embedder, done):
            answer.write_lines(file, rows)
            print(name, rows[0]["case"], f"{time.monotonic() - began:.0f} s", flush=True)
            if time.monotonic() - began > seconds:
                return


async def _rows(
    name: str, reader: Generator, embedder: Kept, done: Collection[tuple[str, int, str]]
) -> AsyncIterator[list[dict[str, Any]]]:
    """Answers of all systems to one question with one number of poisoned texts; the systems run concurrently."""
    documents, cases = synthetic(FACTS, REDUNDANCY) if name == "synthetic" else _squad(embedder)
    with tempfile.TemporaryDirectory() as folder, closing(SqliteIndex(Path(folder) / "index.db")) as index:
        rag = Rag(embedder, index, reader)
        index.add(documents, embedder.embed([d.content for d in documents]))
        for case, count in product(cases, POISON):
            crafted = await Poison(texts=max(POISON)).craft(case.question, case.false, np.random.default_rng(SEED))
            poison = crafted[:count]
            if poison:
                index.add(poison, embedder.embed([d.content for d in poison]))
            due = {system: guard for system, guard in systems(rag).items() if (case.id, count, system) not in done}
            found = await asyncio.gather(*(_answered(guard, case, name == "synthetic") for guard in due.values()))
            key = {"corpus": name, "case": case.id, "poison": count}
            if found:
                yield [key | {"system": system} | row for system, row in zip(due, found, strict=True)]
            index.remove([d.source for d in poison])


def _squad(embedder: Kept) -> tuple[list[Document], list[Case]]:
    """The paragraphs, and questions of both bins, alternating."""
    cases = squad(embedder, EACH, BINS)
    bins = [[case for case in cases if low <= case.r <= high] for low, high in BINS]
    return corpus("squad"), [case for pair in zip(*bins, strict=True) for case in pair]


def systems(rag: Rag) -> dict[str, Guard]:
    """One guard for each defense; for quorum, the client has no entitlement to any source."""
    reader = rag.generator
    return {
        "plain": Guard(rag, []),
        "quorum m=2": Guard(
            rag, [Quorum(support=2, jitter=1, writer=reader, units=K)], audience=AudiencePolicy("quorum")
        ),
        "trust_rag": Guard(rag, [TrustRAG(embedder=rag.embedder, writer=reader)]),
        "robust_rag, keywords": Guard(rag, [RobustRAG(writer=reader)]),
        "robust_rag, decoding": Guard(rag, [RobustRAG("decoding", tokens=TOKENS)]),
    }


async def _answered(guard: Guard, case: Case, kept: bool) -> dict[str, Any]:
    """One row of the recorded file, with the answer if ``kept``."""
    said = (await guard.ask(Query(case.question, "client", k=K, groups=frozenset()))).text
    right, false = exact_match(said, case.answers), exact_match(said, [case.false])
    return {"answer": said if kept else "", "right": right, "false": false}


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Correct and false answers with 95 % intervals, by system and number of poisoned texts."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["system"] for row in rows):
        for count in POISON:
            same = [row for row in rows if (row["system"], row["poison"]) == (name, count)]
            found.setdefault(name, {})[f"poison {count}"] = {
                what: _rate([row[what] for row in same]) for what in ("right", "false")
            }
    return found


def _rate(values: Sequence[bool]) -> list[float]:
    return [sum(values), len(values), *clopper_pearson(sum(values), len(values))] if values else []


if __name__ == "__main__":
    main()
