"""Units: missed edited copies, merged distinct documents, and information that copies reveal to attackers.

An edited copy lacks 22 % of the words, and its sentences are shuffled. The index contains a candidate of NFCorpus or
SQuAD with its copy, the copy alone, the original alone, or neither. Published attacks and the natural asker attack the
original. In one case they have the copy, and the index contains the original. Guard off, and Mirabel with
``edited_copies`` off (before) and on. Readers are **simulated**. ``python -m benchmarks.units nfcorpus 20 100`` uses 20
candidates of each kind among 100 further documents; ``python -m benchmarks.units texts`` compares texts only.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np

from benchmarks import SEED, read_rows, save, saved
from benchmarks.samples import Sample, cached_rag, experiment, guarded_app
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.guard import Guard
from casemate.maths.metrics import auc
from casemate.maths.stats import bootstrap, clopper_pearson
from casemate.protocols import Index, Target
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.experiment import Experiment, Trials
from casemate.redteam.lab.two_world_audit import two_world_audit
from casemate.system import App
from casemate.text.edited_copies import is_edited_copy, text_words
from casemate.text.sentences import sentences
from casemate.types import Document, Query

TEXTS = ("nfcorpus", "squad", "mathqa", "patient_doctor_qa")
COMPARED = 2000
"""Number of documents of a corpus for pairwise comparison."""
ATTACKS = ("natural", "s2mia", "mba", "menta")
"""Attacks with few questions that a copy can answer."""


def main() -> None:
    """Measures texts, or the candidates of one corpus, and adds the results to the saved ones."""
    part, *sizes = sys.argv[1:] or ["texts"]
    results = saved("units")
    if part == "texts":
        results[part] = {name: _texts(name) for name in TEXTS}
    else:
        each, others = (int(size) for size in sizes) if sizes else (20, 100)
        results[part] = {"each": each, "others": others, **_relatives(part, each, others)}
    save("units", results)


def edited(text: str, rng: np.random.Generator) -> str:
    """A copy without 22 % of the words, and with shuffled sentences."""
    parts = sentences(text)
    words = " ".join(parts[j] for j in rng.permutation(len(parts))).split()
    return " ".join(w for w in words if rng.random() > 0.22)


def _texts(name: str) -> dict[str, Any]:
    """Rates of missed edited copies, and of documents that are merged with a different text."""
    rng = np.random.default_rng(SEED)
    texts = list(dict.fromkeys(row["text"] for row in read_rows(f"{name}/corpus.jsonl.gz")))
    chosen = [texts[i] for i in rng.permutation(len(texts))[:COMPARED]]
    words = [text_words(text) for text in chosen]
    copies = [text_words(edited(chosen[i], rng)) for i in range(500)]
    found: dict[str, Any] = {"documents": len(chosen), "pairs": len(words) * (len(words) - 1) // 2}
    for use, same_record in (("counting", False), ("hiding", True)):
        missed = sum(not is_edited_copy(words[i], copy, same_record=same_record) for i, copy in enumerate(copies))
        pairs = [
            (i, j)
            for i, j in combinations(range(len(words)), 2)
            if is_edited_copy(words[i], words[j], same_record=same_record)
        ]
        merged = len({i for pair in pairs for i in pair})
        found[use] = {
            "missed": [missed, len(copies), *clopper_pearson(missed, len(copies))],
            "merged_pairs": len(pairs),
            "merged_documents": [merged, len(chosen), *clopper_pearson(merged, len(chosen))],
        }
    return found


def _relatives(name: str, each: int, others: int) -> dict[str, Any]:
    sample, rng = Sample.of(name), np.random.default_rng(SEED)
    kinds = {
        kind: sample.documents[i * each : (i + 1) * each]
        for i, kind in enumerate(("both", "copy", "original", "attacker has the copy", "neither"))
    }
    copies = {
        d.source: Document(f"copy-{d.source}", edited(d.text, rng), d.title) for kind in kinds.values() for d in kind
    }
    rest = sample.documents[5 * each : 5 * each + others]
    held = [
        *(d for kind in ("both", "original", "attacker has the copy") for d in kinds[kind]),
        *(copies[d.source] for kind in ("both", "copy") for d in kinds[kind]),
        *rest,
    ]
    asked = sample.asked | {f"copy-{source}": question for source, question in sample.asked.items()}
    sample = replace(sample, asked=asked)
    attackers = {kind: list(documents) for kind, documents in kinds.items()}
    attackers["attacker has the copy"] = [copies[d.source] for d in kinds["attacker has the copy"]]
    with guarded_app(held, sample.log) as app:
        return asyncio.run(_measured(sample, app, attackers))


async def _measured(sample: Sample, app: App, attackers: dict[str, list[Document]]) -> dict[str, Any]:
    with cached_rag(app) as (rag, ledger):
        file = app.calibrated[0].calibration

        def guard(index: Index, on: bool) -> Guard:
            used = Rag(rag.embedder, index, rag.generator, rag.instructions)
            mirabel = Mirabel(calibration=file, embedder=rag.embedder, index=index, edited_copies=on)
            return Guard(used, [mirabel])

        targets: dict[str, Target] = {"off": rag, "before": guard(app.index, False), "on": guard(app.index, True)}
        members = [*attackers["both"], *attackers["original"]]
        others = [d for kind in ("copy", "attacker has the copy", "neither") for d in attackers[kind]]
        lab = experiment(sample.attacks(ATTACKS), app.index, ledger, targets, (members, others))
        done = [0]

        def count(n: int) -> None:
            done[0] += n
            if done[0] % 200 < n:
                print(f"{sample.name}: {done[0]} of {lab.total}", file=sys.stderr, flush=True)

        trials = await lab.run(count)
        found: dict[str, Any] = {
            "errors": dict(trials.errors),
            "auc": {
                attack: {kind: _aucs(trials, attack, attackers[kind], attackers["neither"]) for kind in attackers}
                for attack in lab.attacks
            },
            "copy_in_context": {label: _copy_shown(lab, label, attackers["both"]) for label in ("before", "on")},
            "audit": {},
        }
        for label in ("before", "on"):
            worlds = await two_world_audit(
                app.index,
                lambda index, on=label == "on": guard(index, on),
                lab.member_sessions(label),
                lab.indexed,
                lab.plan,
            )
            audit = worlds.audit
            found["audit"][label] = {
                "differing": [audit.differing, audit.pairs, audit.rate.low, audit.rate.high],
                "exposed": worlds.exposed,
                "asked": worlds.asked,
                "ended_early": worlds.ended_early,
                "failed": audit.failed,
            }
        found["price"] = await _price(sample, guard, app.index)
        return found


def _aucs(trials: Trials, attack: str, inside: Sequence[Document], outside: Sequence[Document]) -> dict[str, Any]:
    """AUC of the first feature with a 95 % interval, for each target: one kind of candidates against absent ones."""
    found = {}
    for label in ("off", "before", "on"):
        score = {t.candidate: t.features[0] for t in trials.done.get((attack, label), ())}
        members, others = ([score[d.source] for d in side if d.source in score] for side in (inside, outside))
        measured = members and others
        found[label] = [float(value) for value in bootstrap(auc, members, others, SEED)] if measured else None
    return found


def _copy_shown(lab: Experiment, label: str, both: Sequence[Document]) -> dict[str, Any]:
    """Questions whose original is withheld: share with the copy in the context, and share of these candidates."""
    withheld = [
        (document.source, f"copy-{document.source}" in exchange.context)
        for attack, document in product(lab.attacks, both)
        for exchange in lab.exchanges(attack, label, document.source)
        if document.id in exchange.hidden
    ]
    shown = sum(leaks for _, leaks in withheld)
    hidden, leaked = {source for source, _ in withheld}, {source for source, leaks in withheld if leaks}
    return {
        "questions": [shown, len(withheld), *clopper_pearson(shown, len(withheld))] if withheld else None,
        "candidates": [len(leaked), len(hidden), *clopper_pearson(len(leaked), len(hidden))] if hidden else None,
    }


async def _price(sample: Sample, guard: Any, index: Index) -> dict[str, Any]:
    """Benign questions whose context ``edited_copies`` changes, and those with a withheld document."""
    contexts, withheld = {}, {}
    for on in (False, True):
        target = guard(index, on)
        answers = [await target.retrieve(Query(q, f"harmless-{i}", k=3)) for i, q in enumerate(sample.harmless)]
        contexts[on] = [[h.document.id for h in found.hits] for found, _ in answers]
        withheld[on] = sum(any(v.hidden for v in verdicts) for _, verdicts in answers)
    n = len(sample.harmless)
    changed = sum(a != b for a, b in zip(contexts[False], contexts[True], strict=True))
    return {
        "context_changed": [changed, n, *clopper_pearson(changed, n)],
        "withheld_before": [withheld[False], n, *clopper_pearson(withheld[False], n)],
        "withheld_on": [withheld[True], n, *clopper_pearson(withheld[True], n)],
    }


if __name__ == "__main__":
    main()
