"""Adaptive attacks on NFCorpus: success, and cost to benign users, over the guard's operating points.

Each attack runs without the guard, and with it at several significances. Its decision rule is fitted at each of them on
half of the candidates, and tested on the other half. The guard is calibrated on the 324 dev questions. Its cost is
measured on the 323 test questions. The reader is **simulated**. ``python -m benchmarks.adaptive 60`` uses 60 members
and 60 non-members.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import DATA, SEED, nfcorpus_app, nfcorpus_questions, save
from casemate import plugins
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.guard import Guard
from casemate.protocols import Target
from casemate.rag.corpus import Corpus
from casemate.rag.pipeline import Rag
from casemate.redteam.lab import datasets
from casemate.redteam.lab.benign import measure_utility
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan
from casemate.redteam.lab.judge import membership_metrics
from casemate.redteam.lab.results import MembershipMetrics
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.system import App
from casemate.types import Query

ATTACKS = ("ladder", "decoys", "split_facts", "duplicates", "oracle", "averaging", "menta", "interrogation")
"""Adaptive attacks, and the two published attacks that are most similar to them."""
POINTS = (0.01, 0.05, 0.2)


def main() -> None:
    """Calibrates, attacks at every operating point, and writes the results."""
    each = int(sys.argv[1]) if len(sys.argv) > 1 else 120
    split = _split(each)
    with nfcorpus_app({d.source for d in split.nonmembers}, nfcorpus_questions("qrels.dev.tsv")) as app:
        with tempfile.TemporaryDirectory() as name, closing(CampaignStore(Path(name) / "ledger.db")) as ledger:
            found = asyncio.run(_run(app, split, ledger))
    save("adaptive", {"each": each, **found})


def _split(each: int) -> datasets.Split:
    named = json.loads((DATA / "mia_riddle/nfcorpus_selected_indices.json").read_text())
    corpus = Corpus(DATA / "nfcorpus")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "split.json"
        file.write_text(json.dumps({key: named[key][:each] for key in ("mem_indices", "non_mem_indices")}))
        return datasets.read_split(file, datasets.read_documents(corpus, {s.name for s in corpus.sources()}), SEED)


async def _run(app: App, split: datasets.Split, ledger: CampaignStore) -> dict[str, Any]:
    embedder = CachedEmbedder(app.guard.rag.embedder)
    rag = Rag(
        embedder, app.index, CachedGenerator(SimulatedReader(), ledger, "simulated_reader"), app.guard.rag.instructions
    )

    def guard(significance: float) -> Guard:
        file = app.calibrated[0].calibration if app.calibrated else Path()
        return Guard(rag, [Mirabel(significance=significance, calibration=file, embedder=embedder, index=app.index)])

    targets: dict[str, Target] = {"off": rag, **{str(p): guard(p) for p in POINTS}}
    attacks = {name: plugins.load("attack", name)() for name in ATTACKS}
    held = datasets.indexed_sources(app.index, {d.source for d in split.members})
    experiment = Experiment(attacks, split, targets, ledger, held, ExperimentPlan(seed=SEED, k=3))
    done = [0]

    def count(n: int) -> None:
        done[0] += n
        if done[0] % 200 < n:
            print(f"{done[0]} of {experiment.total}", file=sys.stderr, flush=True)

    trials = await experiment.run(count)
    leaks = {
        name: {
            label: _brief(membership_metrics(trials.done[name, label], split.half, label != "off")) for label in targets
        }
        for name in attacks
    }
    queries = [Query(text, f"harmless-{i}", k=3) for i, text in enumerate(nfcorpus_questions("qrels.tsv"))]
    costs = {str(p): await measure_utility(rag, guard(p), queries, "test questions") for p in POINTS}
    price = {p: {"flagged": u.flagged, "answer_changed": u.answer_changed} for p, u in costs.items()}
    return {"leakage": leaks, "price": price, "errors": dict(trials.errors)}


def _brief(figures: MembershipMetrics | None) -> dict[str, Any] | None:
    keep = ("auc", "adjusted_accuracy", "recall_query", "recall_document")
    return figures and {name: getattr(figures, name) for name in keep}


if __name__ == "__main__":
    main()
