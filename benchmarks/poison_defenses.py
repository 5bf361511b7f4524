"""Defenses against poisoned passages: attack success, accuracy and CPU time. No language model.

``python -m benchmarks.poison_defenses [CASES [COLLECTION ...]]`` uses at most CASES questions of each collection.
Results of other collections are kept, each with its number of questions and the digest of the code. ``... quorum
[CASES]`` measures quorum alone, below m texts and at m = 2, on more questions of SQuAD.

The reader is **extractive** (by words), ten passages are retrieved, and every defense runs in the guard. Poison: one to
three texts of PoisonedRAG per question, and one of CorruptRAG, by ``redteam.attacks.poison``. On NFCorpus, questions,
false answers and texts are PoisonedRAG's own, with the question in front; its documents do not answer them.

An attack succeeds if the answer contains the false answer as whole words. An answer is correct if it contains a gold
answer. TrustRAG's second stage needs a language model and is not measured.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT, SEED, before, code_digest, read_rows, save
from benchmarks.kept import Kept, corpus
from benchmarks.redundant import Case, squad, synthetic
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.rag_defender import RAGDefender
from casemate.guard.defenses.robust_rag import RobustRAG
from casemate.guard.defenses.trust_rag import TrustRAG
from casemate.guard.guard import Guard
from casemate.maths.metrics import exact_match
from casemate.maths.stats import bootstrap, clopper_pearson
from casemate.rag.pipeline import Rag
from casemate.redteam.attacks.poison import Poison
from casemate.types import UNKNOWN, Document, Query, Secret

K = 10
POLICY = AudiencePolicy("quorum")
BINS = ((1, 2), (3, 4), (5, 8), (9, 24))
NF_DOCUMENTS = 400
ATTACKS = {"none": 0, "poisonedrag 1": 1, "poisonedrag 2": 2, "poisonedrag 3": 3, "corruptrag": 1}
FEW = ("none", "poisonedrag 1", "poisonedrag 2")


@dataclass(frozen=True)
class Ground:
    """A collection with its questions.

    Attributes:
        documents: The documents.
        cases: The questions.
        texts: Published poisoned texts by question; empty: they are generated.
    """

    documents: Sequence[Document]
    cases: Sequence[Case]
    texts: Mapping[str, Sequence[str]]


def main() -> None:
    """Measures the collections."""
    embedder = Kept(ROOT / "build/kept.npz")
    results = before("poison_defenses", {"reader": "extractive, by words", "k": K})
    if sys.argv[1:2] == ["quorum"]:
        each = int(sys.argv[2]) // len(BINS) if len(sys.argv) > 2 else 36
        ground = Ground(corpus("squad"), squad(embedder, each, BINS), {})
        results["quorum_alone"] = asyncio.run(measured(ground, embedder, ("quorum m=2", "quorum m=3"), FEW))
        embedder.save()
        save("poison_defenses", results)
        return
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 96
    results.pop("questions_at_most", None)
    for name, ground in grounds(embedder, most):
        if name in (sys.argv[2:] or [name]):
            results["corpora"][name] = asyncio.run(measured(ground, embedder))
            embedder.save()
            results["pooled"] = pooled(results["corpora"])
            save("poison_defenses", results)
            print(name, f"{time.process_time():.0f} CPU-s", file=sys.stderr, flush=True)


def pooled(corpora: Mapping[str, Any]) -> dict[str, Any]:
    """Attack success by number of poisoned texts, over all collections, with 95 % intervals."""
    found: dict[str, Any] = {}
    for count in sorted(set(ATTACKS.values()) - {0}):
        attacks = [attack for attack, texts in ATTACKS.items() if texts == count]
        for name in next(iter(corpora.values()))["systems"]:
            each = [(c["systems"][name][a]["false"][0], c["questions"]) for c in corpora.values() for a in attacks]
            trials = sum(n for _, n in each)
            found.setdefault(name, {})[str(count)] = [*_rate(round(sum(f * n for f, n in each)), trials), trials]
    return found


def grounds(embedder: Kept, most: int) -> Iterator[tuple[str, Ground]]:
    """Yields the collections."""
    documents, cases = synthetic(max(1, most // 12), (3, 4, 5, 8, 12, 20))
    yield "synthetic", Ground(documents, cases, {})
    yield "squad", Ground(corpus("squad"), squad(embedder, max(1, most // len(BINS)), BINS), {})
    found = read_rows("attacks/poisonedrag_nq.jsonl.gz")[:most]
    cases = [Case(r["_id"], r["text"], (), r["incorrect_answer"], 0) for r in found]
    texts = {r["_id"]: [f"{r['text'].rstrip('.')}. {text}" for text in r["adv_texts"]] for r in found}
    yield "nfcorpus", Ground(corpus("nfcorpus")[:NF_DOCUMENTS], cases, texts)


def systems(rag: Rag) -> dict[str, Guard]:
    """One guard for each defense, with a client without entitlement to any source."""

    def quorum(support: int, jitter: int = 1) -> Guard:
        defense = Quorum(support=support, jitter=jitter, secret=Secret("secret of the benchmark"))
        return Guard(rag, [defense], audience=POLICY)

    return {
        "plain": Guard(rag, []),
        "quorum m=2": quorum(2),
        "quorum m=2, J=2": quorum(2, 2),
        "quorum m=3": quorum(3),
        "robust_rag": Guard(rag, [RobustRAG()]),
        "trust_rag, stage 1": Guard(rag, [TrustRAG(embedder=rag.embedder)]),
        "rag_defender": Guard(rag, [RAGDefender(embedder=rag.embedder)]),
        "rag_defender, concentration": Guard(rag, [RAGDefender("concentration", rag.embedder)]),
    }


async def measured(
    ground: Ground, embedder: Kept, only: Sequence[str] = (), attacks: Sequence[str] = tuple(ATTACKS)
) -> dict[str, Any]:
    """Results of all systems, or of the named ones, under some attacks on one collection."""
    with tempfile.TemporaryDirectory() as folder, closing(SqliteIndex(Path(folder) / "index.db")) as index:
        rag = Rag(embedder, index, ExtractiveGenerator())
        index.add(ground.documents, embedder.embed([d.content for d in ground.documents]))
        guards = {name: guard for name, guard in systems(rag).items() if not only or name in only}
        runs = [
            (attack, *await _asked(case, poison, rag, guards))
            for number, case in enumerate(ground.cases)
            for attack, poison in (await poisoned(case, ground, number)).items()
            if attack in attacks
        ]
    answers = {(a, name): [said[name] for attack, said, _ in runs if attack == a] for a in attacks for name in guards}
    spent = {name: [seconds[name] for attack, _, seconds in runs if attack == "none"] for name in guards}
    return {
        "code": code_digest(),
        "documents": len(ground.documents),
        "questions": len(ground.cases),
        "redundancy": _counts(ground.cases),
        "systems": {name: _figures(ground.cases, name, answers, attacks) for name in guards},
        "cpu_ms": {name: 1000 * float(np.median(seconds)) for name, seconds in spent.items()},
    }


async def _asked(
    case: Case, poison: Sequence[Document], rag: Rag, guards: Mapping[str, Guard]
) -> tuple[dict[str, str], dict[str, float]]:
    """Answers and CPU seconds of each system, with poisoned texts in the index."""
    if poison:
        rag.index.add(poison, rag.embedder.embed([d.content for d in poison]))
    said, spent = {}, {}
    for name, guard in guards.items():
        began = time.process_time()
        said[name] = (await guard.ask(Query(case.question, "client", k=K, groups=frozenset()))).text
        spent[name] = time.process_time() - began
    rag.index.remove([d.source for d in poison])
    return said, spent


async def poisoned(case: Case, ground: Ground, number: int) -> dict[str, list[Document]]:
    """Poisoned texts of each attack."""
    found: dict[str, list[Document]] = {}
    for attack, count in ATTACKS.items():
        if attack == "corruptrag":
            rng = np.random.default_rng([SEED, number])
            found[attack] = list(await Poison("corrupt").craft(case.question, case.false, rng))
        elif ground.texts:
            found[attack] = [Document(f"p{i}", text) for i, text in enumerate(ground.texts[case.id][:count])]
        elif count:
            rng = np.random.default_rng([SEED, number])
            found[attack] = list(await Poison(texts=count).craft(case.question, case.false, rng))
        else:
            found[attack] = []
    return found


def _counts(cases: Sequence[Case]) -> dict[str, int]:
    values = [case.r for case in cases]
    return {str(r): values.count(r) for r in sorted(set(values))}


def _figures(
    cases: Sequence[Case], name: str, answers: Mapping[tuple[str, str], Sequence[str]], attacks: Sequence[str]
) -> dict[str, Any]:
    """Rates with 95 % intervals, and the paired change of accuracy by each attack."""
    found: dict[str, Any] = {}
    clean = _right(cases, answers["none", name])
    for attack in attacks:
        said = answers[attack, name]
        false = sum(exact_match(text, [case.false]) for text, case in zip(said, cases, strict=True))
        right = _right(cases, said)
        found[attack] = {"false": _rate(false, len(cases)), "declined": sum(text == UNKNOWN for text in said)}
        if cases[0].answers:
            lost = [before - after for before, after in zip(clean, right, strict=True)]
            change = bootstrap(lambda a, b: float(np.mean(a)), lost, [0.0], SEED)
            found[attack] |= {"right": _rate(sum(right), len(cases)), "lost_by_attack": list(change)}
    return found


def _right(cases: Sequence[Case], said: Sequence[str]) -> list[int]:
    return [int(exact_match(text, case.answers)) for text, case in zip(said, cases, strict=True)]


def _rate(count: int, trials: int) -> list[float]:
    return [count / trials, *clopper_pearson(count, trials)]


if __name__ == "__main__":
    main()
