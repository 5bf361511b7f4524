"""Defenses against poisoned passages with a real language model: a small recorded sample of the synthetic collection.

``python -m benchmarks.poison_reader FILE.gguf [MINUTES]`` asks the model for so long, and records each answer in
``benchmarks/recorded/quorum``. Run it again to go on. Without arguments it measures from the recorded answers.

Ten passages are retrieved. Poison: none, or one text of PoisonedRAG, by ``redteam.attacks.poison``. TrustRAG runs both
stages, RobustRAG both aggregations. An answer is right if it contains a gold answer as whole words, and false if it
contains the attacker's.
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
from benchmarks.kept import Kept
from benchmarks.real import answer, files
from benchmarks.redundant import Case, synthetic
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
from casemate.types import Query

RECORDED = ROOT / "benchmarks/recorded/quorum"
FACTS, REDUNDANCY = 4, (3, 4, 5, 8, 12)
"""Two questions about each fact."""
K, TOKENS, BATCH = 10, 32, 16
POISON = (0, 1)


def main() -> None:
    """Asks the model if it is given, and measures."""
    if len(sys.argv) > 1:
        asyncio.run(_ask(Path(sys.argv[1]), 60 * float(sys.argv[2]) if len(sys.argv) > 2 else 600))
    results = {}
    for file in sorted(RECORDED.glob("poison_*.jsonl.gz")):
        about, *rows = files.read(file)
        found = {"questions": len({row["case"] for row in rows}), "systems": tables(rows)}
        results[file.name.removeprefix("poison_").partition(".jsonl")[0]] = about | found
    save("poison_reader", results)


async def _ask(model: Path, seconds: float) -> None:
    """Asks what is not recorded yet, and records each answer at once."""
    began = time.monotonic()
    file = RECORDED / f"poison_{files.short_name(model)}.jsonl.gz"
    if not file.exists():
        about = {"model": model.name, "digest": answer.digest(model), "dtype": "bfloat16", "decoding": "greedy"}
        answer.write_lines(file, [about | {"max_tokens": TOKENS, "corpus": "synthetic", "seed": SEED}])
    done = {(row["case"], row["poison"], row["system"]) for row in files.read(file)[1:]}
    reader = CausalLM(str(model), dtype="bfloat16", max_tokens=TOKENS, batch=BATCH)
    async for row in _rows(reader, done):
        answer.write_lines(file, [row])
        print(row, f"{time.monotonic() - began:.0f} s", flush=True)
        if time.monotonic() - began > seconds:
            return


async def _rows(reader: Generator, done: Collection[tuple[str, int, str]]) -> AsyncIterator[dict[str, Any]]:
    documents, cases = synthetic(FACTS, REDUNDANCY)
    embedder = Kept(ROOT / "build/kept.npz")
    with tempfile.TemporaryDirectory() as folder, closing(SqliteIndex(Path(folder) / "index.db")) as index:
        rag = Rag(embedder, index, reader)
        index.add(documents, embedder.embed([d.content for d in documents]))
        for case, count in product(cases, POISON):
            crafted = await Poison(texts=max(POISON)).craft(case.question, case.false, np.random.default_rng(SEED))
            poison = crafted[:count]
            if poison:
                index.add(poison, embedder.embed([d.content for d in poison]))
            due = {name: guard for name, guard in systems(rag).items() if (case.id, count, name) not in done}
            for name, guard in due.items():
                yield {"case": case.id, "poison": count, "system": name} | await _answered(guard, case)
            index.remove([d.source for d in poison])


def systems(rag: Rag) -> dict[str, Guard]:
    """One guard for each defense; for quorum, the client may not read any source in full."""
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


async def _answered(guard: Guard, case: Case) -> dict[str, Any]:
    began = time.process_time()
    said = (await guard.ask(Query(case.question, "client", k=K, groups=frozenset()))).text
    right, false = exact_match(said, case.answers), exact_match(said, [case.false])
    return {"answer": said, "right": right, "false": false, "cpu_s": round(time.process_time() - began, 1)}


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Right and false answers with 95 % intervals, and median CPU seconds, by system and number of poisoned texts."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["system"] for row in rows):
        for count in POISON:
            same = [row for row in rows if (row["system"], row["poison"]) == (name, count)]
            rates = {what: _rate([row[what] for row in same]) for what in ("right", "false")}
            cpu_s = float(np.median([row["cpu_s"] for row in same])) if same else None
            found.setdefault(name, {})[f"poison {count}"] = rates | {"cpu_s": cpu_s}
    return found


def _rate(values: Sequence[bool]) -> list[float]:
    return [sum(values), len(values), *clopper_pearson(sum(values), len(values))] if values else []


if __name__ == "__main__":
    main()
