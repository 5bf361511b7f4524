"""Quorum answers: what unentitled clients learn, and what they still get. No language model; readers are simulated.

Attacks on samples of NFCorpus and SQuAD with guard off, Mirabel and quorum, k = 3: the natural asker and six published
attacks, their rules fitted under each guard on half of the candidates and judged on the other. An attacker that has
every other document and the code: the two-world audit of answers, over all questions of the attacks.
``python -m benchmarks.quorum nfcorpus 30 100``, the default, takes 30 + 30 candidates among 100 further documents, and
``... nfcorpus 30 100 menta,natural`` these attacks alone. ``benchmarks.quorum_utility`` measures utility, and
``benchmarks.poison_defenses`` poison.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import ROOT, save
from benchmarks.samples import Sample, cached_rag, experiment, guarded_app
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.guard import Guard
from casemate.guard.units import unit_sources
from casemate.maths.recovery import rouge_l
from casemate.maths.stats import clopper_pearson
from casemate.protocols import Target
from casemate.rag.pipeline import Rag
from casemate.redteam.lab import datasets
from casemate.redteam.lab.experiment import Experiment
from casemate.redteam.lab.judge import membership_metrics
from casemate.redteam.lab.results import MembershipMetrics
from casemate.redteam.lab.two_world_audit import IndexWithout
from casemate.system import App
from casemate.types import UNKNOWN, Document, Query, Secret

STRANGER = frozenset[str]()
POLICY = AudiencePolicy("quorum")


def main() -> None:
    """Measures one sample, and adds the figures to the written ones."""
    part, *sizes = sys.argv[1:] or ["nfcorpus"]
    file = ROOT / "benchmarks/results/quorum.json"
    results: dict[str, Any] = json.loads(file.read_text())["results"] if file.exists() else {}
    each, others = (int(size) for size in sizes[:2]) if sizes else (30, 100)
    names = sizes[2].split(",") if len(sizes) > 2 else list(Sample.of(part).attacks())
    found = _attacked_sample(Sample.of(part), each, others, names)
    held = results.get(part, {})
    if (held.get("each"), held.get("others")) == (each, others):  # measured in several runs
        found = {key: held.get(key, {}) | value for key, value in found.items()}
    results[part] = {"each": each, "others": others, **found}
    save("quorum", results)


def _quorum(support: int = 2, jitter: int = 2) -> Quorum:
    return Quorum(support=support, jitter=jitter, secret=Secret("secret of the benchmark"))


def _attacked_sample(sample: Sample, each: int, others: int, names: Sequence[str]) -> dict[str, Any]:
    members, nonmembers = sample.documents[:each], sample.documents[each : 2 * each]
    held = [*members, *sample.documents[2 * each : 2 * each + others]]
    with guarded_app(held, sample.log) as app:
        return asyncio.run(_attacked(sample, app, (members, nonmembers), names))


async def _attacked(
    sample: Sample, app: App, sides: tuple[Sequence[Document], Sequence[Document]], names: Sequence[str]
) -> dict[str, Any]:
    with cached_rag(app) as (rag, ledger):
        file = app.calibrated[0].calibration
        mirabel = Mirabel(calibration=file, embedder=rag.embedder, index=app.index)
        quorum = Guard(rag, [_quorum()], audience=POLICY)
        targets: dict[str, Target] = {"off": rag, "mirabel": Guard(rag, [mirabel]), "quorum": quorum}
        lab = experiment(sample, app, ledger, targets, sides, names)
        trials = await lab.run()
        found: dict[str, Any] = {"errors": dict(trials.errors), "attacks": {}, "pivotal": {}}
        for attack in lab.attacks:
            found["attacks"][attack] = {
                label: _brief(membership_metrics(trials.done[attack, label], lab.split.half, label != "off"))
                for label in targets
            }
            found["pivotal"][attack] = await _pivotal(lab, attack, rag, sides[0])
        if "natural" in names:
            found["answers"] = await _answers(
                targets, sample.harmless, [h for page, _ in app.index.scan() for h in page]
            )
        return found


def _brief(figures: MembershipMetrics | None) -> dict[str, Any] | None:
    return figures and {"auc": list(figures.auc), "adjusted_accuracy": list(figures.adjusted_accuracy)}


async def _pivotal(lab: Experiment, attack: str, rag: Rag, members: Sequence[Document]) -> dict[str, Any]:
    """Answers that differ without the candidate's unit: all that an attacker with every other document can learn."""
    asked = {
        m.source: list(dict.fromkeys(e.question for e in lab.exchanges(attack, "quorum", m.source))) for m in members
    }
    units = unit_sources(rag.index, asked.keys())
    chunks = datasets.indexed_sources(rag.index, frozenset[str]().union(*units.values()))
    found: dict[str, Any] = {}
    for label, defense in {"m=2": _quorum(jitter=1), "m=2, J=2": _quorum(), "m=3": _quorum(3, 1)}.items():
        changed = []
        for source, questions in asked.items():
            without = IndexWithout(rag.index, {name: chunks[name] for name in units[source]})
            worlds = [
                Guard(Rag(rag.embedder, index, rag.generator, rag.instructions), [defense], audience=POLICY)
                for index in (rag.index, without)
            ]
            queries = [Query(question, "knows all others", k=3, groups=STRANGER) for question in questions]
            answers = [[(await world.ask(query)).text for query in queries] for world in worlds]
            changed.append([one != other for one, other in zip(*answers, strict=True)])
        total, pivotal, members_told = sum(map(len, changed)), sum(map(sum, changed)), sum(map(any, changed))
        found[label] = {
            "answers": [pivotal, total, *clopper_pearson(pivotal, total)],
            "members": [members_told, len(changed), *clopper_pearson(members_told, len(changed))],
        }
    return found


async def _answers(targets: dict[str, Target], harmless: Sequence[str], held: list[Document]) -> dict[str, Any]:
    """Test questions as a crawler: answered, CPU time of the defense, documents recovered (ROUGE-L recall above .5)."""
    questions = harmless[:120]
    replies: dict[str, list[str]] = {}
    for label in ("off", "quorum"):
        replies[label] = [
            (await targets[label].ask(Query(q, f"crawler-{label}", k=3, groups=STRANGER))).text for q in questions
        ]
    out: dict[str, Any] = {"questions": len(questions)}
    for label, texts in replies.items():
        recovered = sum(any(rouge_l(d.text, t).recall > 0.5 for t in texts if len(t) > 200) for d in held[:200])
        out[label] = {"answered": sum(t != UNKNOWN for t in texts), "recovered_of_200": recovered}
    guard = targets["quorum"]
    assert isinstance(guard, Guard)
    (quorum,) = guard.defenses
    times = []
    for q in questions:
        query = Query(q, "timed", k=3, groups=STRANGER)
        found = await guard.rag.find(query, await guard.rag.encode(query), 3 + quorum.lookahead)
        marked = type(found)(found.hits, found.similarity_stats, True, frozenset(h.document.id for h in found.hits))
        began = time.thread_time()
        await quorum.on_retrieve(query, marked)
        times.append(time.thread_time() - began)
    out["cpu_ms"] = {name: 1000 * float(np.quantile(times, p)) for name, p in (("median", 0.5), ("p95", 0.95))}
    return out


if __name__ == "__main__":
    main()
