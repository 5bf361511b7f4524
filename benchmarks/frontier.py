"""Trade-off of re-indexing and client limits: topic separation against loss of recall.

``python -m benchmarks.frontier [folder] [questions] [corpus ...]``: three corpora, all crawlers, one client each. An
interrupted run can be resumed with the same code.

Cost: loss of known-item recall at 5 for benign clients with 30 questions each. Benefit: reduction of the crawlers'
coverage (share of chunks shown) and CRR (of whole replies and of items). ``full``: full strength, even if the
acceptance test on retrieval quality limits it. The reader is the simulation of ``benchmarks.crawl``, whose folder may
be shared. ``lora`` fine-tunes the same MiniLM through sentence-transformers. ``UMAP`` finds topics in ten UMAP
dimensions, not in the 50 principal components. It needs umap-learn, which is not a dependency, and is skipped without
it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import SEED, before, code_digest, save
from benchmarks.crawl import CORPORA, CRAWLERS, IndexedCorpus, K, make_attack
from benchmarks.kept import span
from casemate.backends.embedders.minilm import PACKAGE, MiniLM
from casemate.backends.embedders.sentence_transformers import SentenceTransformers
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.reindex import Reindex
from casemate.guard.guard import Guard
from casemate.maths import clustering, stats
from casemate.maths.clustering import TopicSettings
from casemate.protocols import Defense, Embedder, Target
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.reindexing.fitting import ReindexSettings, fit
from casemate.reindexing.lora import DEFAULT_TRAINING as LORA
from casemate.reindexing.registry import ReindexRegistry
from casemate.reindexing.space import Adapter, Reindexing
from casemate.reindexing.supcon import TrainSettings
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.types import Query

SHORT = replace(LORA, classes=6, learning_rate=1e-3, steps=50, eval_interval=10)
"""A tenth of the steps at three times the learning rate, for two cores: four CPU seconds per step."""
READINGS = {
    "adapter": ReindexSettings(),
    "adapter, whole clusters": ReindexSettings(topics=TopicSettings(selection="eom")),
    "adapter, noise left out": ReindexSettings(topics=TopicSettings(membership=1.0)),
    "adapter, k-means": ReindexSettings(topics=TopicSettings(method="kmeans")),
    "adapter, no keeping": ReindexSettings(training=TrainSettings(keep_weight=0)),
    "compatible": ReindexSettings(mode="compatible"),
    "gate": ReindexSettings(mode="gate"),
    "lora": ReindexSettings(mode="lora", training=SHORT),
    "lora, compatible": ReindexSettings(mode="lora_compatible", training=SHORT),
    "lora, no keeping": ReindexSettings(mode="lora", training=replace(SHORT, keep_weight=0)),
    "adapter, UMAP": ReindexSettings(),
}
LIMITS: dict[str, dict[str, Any]] = {
    "50 questions": {},
    "25 questions": {"questions": 25},
    "10 questions": {"questions": 10},
    "5 topics": {"topics": 5},
}
ASKED, SESSION = 600, 30


def main() -> None:
    """Measures the points of the trade-off. Each is saved when it is finished, and skipped if it has a result."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/casemate-crawl")
    questions = int(sys.argv[2]) if len(sys.argv) > 2 else 300
    embedder = Trainable(MiniLM(threads=1), megabytes=1500)
    results = before("frontier", {"questions": questions, "k": K, "asked": ASKED, "code": code_digest()})
    for name in sys.argv[3:] or CORPORA:
        collection = IndexedCorpus(name, folder, embedder)
        found = results["corpora"].setdefault(name, {"chunks": len(collection.documents), "points": {}})
        with closing(collection.ledger), closing(collection.index):
            asyncio.run(_corpus(collection, folder / f"{name}-shelves", questions, found["points"], results))


class Trainable(CachedEmbedder):
    """MiniLM that sentence-transformers can fine-tune: the same weights, and vectors equal to five digits."""

    @cached_property
    def _model(self) -> SentenceTransformers:
        spec = importlib.util.find_spec(PACKAGE)
        assert spec and spec.origin
        return SentenceTransformers(str(Path(spec.origin).parent / "model"))

    def network(self) -> Any:
        """See ``TunableEmbedder``."""
        return self._model.network()

    def with_adapter(self, adapter: Adapter) -> Embedder:
        """See ``TunableEmbedder``."""
        return CachedEmbedder(self._model.with_adapter(adapter))


async def _corpus(
    collection: IndexedCorpus, folder: Path, questions: int, points: dict[str, Any], results: dict[str, Any]
) -> None:
    """Adds the missing points of a corpus."""
    rng = np.random.default_rng(SEED + 2)
    drawn = rng.choice(len(collection.documents), min(ASKED, len(collection.documents)), False)
    about = [collection.documents[i] for i in drawn]
    asked = [(span(d.text, rng), d.id) for d in about]
    off = await _recalled(collection.rag, asked)

    async def add(label: str, defenses: Sequence[Defense], **facts: Any) -> None:
        points[label] = await _point(collection, label, defenses, asked, off, questions) | facts
        save("frontier", results)

    if "off" not in points:
        await add("off", [])
    for name, settings in READINGS.items():
        if f"{name}, full" in points or ("UMAP" in name and not importlib.util.find_spec("umap")):
            continue
        learnt = _learnt(collection, name, replace(settings, checkpoint=folder / f"{name}.pt"))
        found = {"as accepted": learnt} if learnt.accepted and learnt.strength < 1 else {}
        for label, version in (found | {"full": replace(learnt, strength=1.0, accepted=True, version=0)}).items():
            shelf = folder / f"{name}, {label}".replace(" ", "-")
            ReindexRegistry(shelf, "default").write(version)
            defense = Reindex(mode=version.mode, folder=shelf, embedder=collection.embedder, index=collection.index)
            facts = {"strength": version.strength, "accepted": learnt.accepted, "reason": learnt.reason}
            if learnt.adapter:
                facts |= {n: learnt.report[n] for n in ("silhouette", "step", "steps", "megabytes")}
            await add(f"{name}, {label}", [defense], **facts)
    for name, options in LIMITS.items():
        if f"limit, {name}" not in points:
            await add(f"limit, {name}", [CrawlLimit(**options, folder=folder / "adapter,-full")])


def _learnt(collection: IndexedCorpus, name: str, settings: ReindexSettings) -> Reindexing:
    """The re-indexing of a setting, with UMAP in place of principal components if its name says so."""
    projection = mock.patch.object(clustering, clustering.principal_components.__name__, _umap)
    with projection if "UMAP" in name else nullcontext():
        return fit(collection.index, collection.embedder, settings)


def _umap(E: np.ndarray, _: int) -> np.ndarray:
    """Ten UMAP dimensions, which preserve neighborhoods."""
    umap = importlib.import_module("umap")
    made = umap.UMAP(n_components=10, n_neighbors=15, min_dist=0.0, metric="cosine", random_state=SEED, n_jobs=1)
    return np.asarray(made.fit_transform(E), np.float64)


async def _point(
    collection: IndexedCorpus,
    label: str,
    defenses: Sequence[Defense],
    asked: Sequence[tuple[str, str]],
    off: Sequence[bool],
    questions: int,
) -> dict[str, Any]:
    """Cost of a setting, and coverage and CRR of each crawler."""
    target: Target = Guard(collection.rag, defenses) if defenses else collection.rag
    on = await _recalled(target, asked)
    lost = stats.paired_bootstrap(_mean, (off, [0.0]), (on, [0.0]), SEED)
    crawls: dict[str, Any] = {}
    for name in CRAWLERS:
        plan = CrawlPlan(seed=SEED, k=K, questions=questions, label="off" if label == "off" else f"frontier {label}")
        crawler = Crawler(name, make_attack(name, collection.embedder), {label: target}, collection.ledger, plan)
        result = measure_crawl(
            crawler, await crawler.run(), collection.documents, collection.embedder, windows=False
        ).by_target[label]
        crawls[name] = {"coverage": result.coverage, "crr": result.crr, "first_alarm": result.first_alarm}
    mean = {what: float(np.mean([c[what].value for c in crawls.values()])) for what in ("coverage", "crr")}
    point = {"recall": stats.proportion(sum(on), len(on)), "lost": lost, "mean": mean, "crawls": crawls}
    print(label, round(lost.value, 3), {k: round(v, 3) for k, v in mean.items()}, file=sys.stderr, flush=True)
    return point


async def _recalled(target: Target, asked: Sequence[tuple[str, str]]) -> list[bool]:
    found = []
    for number, (text, right) in enumerate(asked):
        answer = await target.ask(Query(text, f"harmless-{number // SESSION}", k=K))
        found.append(any(h.document.id == right for h in answer.retrieval.hits[:K]))
    return found


def _mean(values: np.ndarray, _: np.ndarray) -> float:
    return float(np.mean(values))


if __name__ == "__main__":
    main()
