"""Knowledge-base extraction: every crawler on three corpora, with no defense and with several, one client and twenty.

``python -m benchmarks.crawl [folder] [questions=N] [sessions=N] [answers=N] [corpus=CHUNKS ...]`` keeps what was asked
in the folder, and does not measure again what was measured with the same code and sizes. So an interrupted run goes on.
The reader is the simulation: it repeats what it is told to repeat. What came of crawls with ``crawl_limit`` is compared
with the chunks whole, in items and in windows; what came of the others whole and in items only, which is a tenth of the
work and can only make them seem smaller, so no ratio to them is too good. Harmless sessions are those of clients who
ask up to 50 questions a day, drawn by Zipf's law from the corpus's own questions; where it has none, from questions
made from it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, SEED, before, code_digest, read_rows, save
from casemate import plugins
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.similarity_floor import SimilarityFloor
from casemate.guard.defenses.summarize import Summarize
from casemate.guard.guard import Guard
from casemate.maths import metrics, stats
from casemate.protocols import Defense, ExtractionAttack, Target
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.benign import replay_benign_sessions
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.experiment import describe_options, digest
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.text.synthetic_questions import generate_questions
from casemate.types import Document, Query

CORPORA = {"patient_doctor_qa": 2500, "enron_worms": 1500, "mathqa": 320}
ATTACKS = ("composite", "rag_thief", "worm", "pirates", "ikea", "rag_crawler")
K = 5
SESSIONS, DAY, ZIPF = 1000, 50, 1.0
COLLUDERS = 20
ANSWERS = 1500


def defenses(name: str) -> list[Defense]:
    """The defenses of a setting, new ones without a past."""
    match name:
        case "similarity_floor":
            return [SimilarityFloor(floor=0.35)]
        case "summarize":
            return [Summarize()]
        case "crawl_limit":
            return [CrawlLimit()]
        case _:
            return []


class Ground:
    """One corpus, indexed."""

    def __init__(self, name: str, folder: Path, embedder: CachedEmbedder) -> None:
        rng = np.random.default_rng(SEED)
        rows = read_rows(f"{name}/corpus.jsonl.gz")
        order = rng.permutation(len(rows))[: CORPORA[name]]
        self.documents = [Document(rows[i]["_id"], rows[i]["text"], rows[i].get("title", "")) for i in order]
        self.embedder = embedder
        self.index = SqliteIndex(folder / f"{name}.db")
        self.index.open(self.embedder.fingerprint, self.embedder.dim)
        if not self.index.moments().n:
            self.index.add(self.documents, self.embedder.embed([d.content for d in self.documents]))
        self.ledger = CampaignStore(folder / f"{name}-ledger.db")
        self.rag = Rag(self.embedder, self.index, CachedGenerator(SimulatedReader(), self.ledger, "simulated_reader"))
        self.questions = self._questions(name, rng)

    def _questions(self, name: str, rng: np.random.Generator) -> list[tuple[str, frozenset[str]]]:
        """Harmless questions, with the documents that answer them."""
        held = {d.source for d in self.documents}
        file = DATA / name / "queries.jsonl.gz"
        if not file.exists():
            return [(text, frozenset()) for text in generate_questions(self.documents, 400, rng)]
        right: dict[str, set[str]] = {}
        for line in (DATA / name / "qrels.tsv").read_text().splitlines()[1:]:
            question, document, *_ = line.split("\t")
            right.setdefault(question, set()).add(document)
        asked = [(r["text"], frozenset(right.get(r["_id"], ()))) for r in read_rows(file)]
        found = [(text, documents) for text, documents in asked if documents & held and len(text) < 2000]
        return [found[i] for i in rng.permutation(len(found))[:400]]


def replies_label(made: Sequence[Defense]) -> str:
    """Fingerprint of what stored replies depend on: the code, and all options of the defenses."""
    return digest(code_digest(), [describe_options(defense) for defense in made])


def main() -> None:
    """Crawls, and lets harmless people ask; writes the results after each measurement."""
    given = dict(a.partition("=")[::2] for a in sys.argv[1:] if "=" in a)
    folder = Path(next((a for a in sys.argv[1:] if "=" not in a), "/tmp/casemate-crawl"))
    folder.mkdir(parents=True, exist_ok=True)
    CORPORA.update((name, int(given[name])) for name in CORPORA if name in given)
    sizes = {"questions": int(given.get("questions", 1000)), "k": K, "code": code_digest()}
    sizes |= {"sessions": int(given.get("sessions", SESSIONS)), "answers": int(given.get("answers", ANSWERS))}
    results: dict[str, Any] = before("crawl", sizes | {"defense": describe_options(CrawlLimit())})
    embedder = CachedEmbedder(MiniLM(threads=1), megabytes=1500)  # of all corpora: the worm asks each the same
    if "accuracy" not in results:
        results["accuracy"] = asyncio.run(_accuracy(folder, embedder, sizes["answers"]))
        save("crawl", results)
    for name in [name for name in CORPORA if name in given] or CORPORA:
        ground = Ground(name, folder, embedder)
        held = results["corpora"].get(name, {})
        held = held if held.get("chunks") == len(ground.documents) else {"chunks": len(ground.documents), "crawls": {}}
        results["corpora"][name] = held
        with closing(ground.ledger), closing(ground.index):
            for attack in [attack for attack in ATTACKS if attack not in held["crawls"]]:
                held["crawls"][attack] = found = asyncio.run(_crawled(ground, attack, sizes["questions"]))
                print(attack, {label: round(h["crr"][0], 3) for label, h in found.items()}, file=sys.stderr, flush=True)
                save("crawl", results | {"relative": _relative(results["corpora"])})
            if "harmless" not in held:
                held["harmless"] = asyncio.run(_met(ground, sizes["sessions"]))
                save("crawl", results | {"relative": _relative(results["corpora"])})


async def _met(ground: Ground, sessions: int) -> dict[str, Any]:
    return {d: await _harmless(ground, d, sessions) for d in ("crawl_limit", "similarity_floor", "summarize")}


async def _crawled(ground: Ground, name: str, questions: int) -> dict[str, Any]:
    """The figures of one attacker against every setting."""
    found = {}
    for setting, clients in (
        ("off", 1),
        ("similarity_floor", 1),
        ("summarize", 1),
        ("crawl_limit", 1),
        ("crawl_limit", COLLUDERS),
    ):
        made = defenses(setting)
        target = Guard(ground.rag, made) if made else ground.rag
        label = setting if clients == 1 else f"{setting}, {clients} clients"
        plan = CrawlPlan(seed=SEED, k=K, questions=questions, clients=clients, label=replies_label(made))
        crawler = Crawler(name, _attack(name, ground), {label: target}, ground.ledger, plan)
        walks = await crawler.run()
        crawl = measure_crawl(crawler, walks, ground.documents, ground.embedder, windows=setting == "crawl_limit")
        found[label] = {k: v for k, v in asdict(crawl.by_target[label]).items() if k not in ("finds", "curve")}
    return found


def _attack(name: str, ground: Ground) -> ExtractionAttack:
    cls = plugins.load("crawler", name)
    options: dict[str, Any] = {"embedder": ground.embedder} if "embedder" in cls.__dataclass_fields__ else {}
    made: ExtractionAttack = cls(**options)
    return made


async def _harmless(ground: Ground, setting: str, sessions: int) -> dict[str, Any]:
    """What harmless clients meet with: alarms, other answers, and whether the right document is still found."""
    rng = np.random.default_rng(SEED + 1)
    guard = Guard(ground.rag, defenses(setting))
    met = await replay_benign_sessions(
        guard, _sessions([q for q, _ in ground.questions], sessions, rng), ground.rag, CrawlPlan(k=K)
    )
    kept = [await _recalled(ground, guard, i) for i in range(len(ground.questions)) if ground.questions[i][1]]
    return {
        **asdict(met),
        "recall_off_on": [stats.proportion(sum(side), len(kept)) for side in zip(*kept, strict=True)],
    }


def _sessions(questions: Sequence[str], sessions: int, rng: np.random.Generator) -> Iterator[tuple[str, list[str]]]:
    share = 1 / np.arange(1, len(questions) + 1) ** ZIPF
    for number in range(sessions):
        count = int(rng.integers(1, DAY + 1))
        yield f"harmless-{number}", [questions[i] for i in rng.choice(len(questions), count, p=share / share.sum())]


async def _recalled(ground: Ground, guard: Guard, number: int) -> tuple[bool, bool]:
    text, right = ground.questions[number]
    query = Query(text, f"alone-{number}", k=K)
    bare, (guarded, _) = await ground.rag.retrieve(query), await guard.retrieve(query)
    off, on = (any(h.document.source in right for h in r.hits[:K]) for r in (bare, guarded))
    return off, on


def _relative(corpora: dict[str, Any]) -> dict[str, list[float]]:
    """Mean CRR over attackers and corpora, each setting's by that without a defense, [95 %] over the pairs of both."""
    cells: dict[str, list[float]] = {}
    for corpus in corpora.values():
        for crawl in corpus["crawls"].values():
            for label, result in crawl.items():
                cells.setdefault(label, []).append(result["crr"][0])
    rng = np.random.default_rng(SEED)
    off = np.array(cells["off"])
    drawn = rng.integers(len(off), size=(10_000, len(off)))

    def figures(on: np.ndarray) -> list[float]:
        ratios = on[drawn].mean(axis=1) / off[drawn].mean(axis=1)
        return [float(on.mean() / off.mean()), *(float(q) for q in np.quantile(ratios, (0.025, 0.975)))]

    return {label: figures(np.array(values)) for label, values in cells.items()}


async def _accuracy(folder: Path, embedder: CachedEmbedder, answers: int) -> dict[str, Any]:
    """Exact match and recall on SQuAD, asked by clients with up to 50 questions a day each, off and on."""
    rng = np.random.default_rng(SEED)
    rows = [Document(r["_id"], r["text"], r.get("title", "")) for r in read_rows("squad/corpus.jsonl.gz")]
    index = SqliteIndex(folder / "squad.db")
    index.open(embedder.fingerprint, embedder.dim)
    with closing(index), closing(CampaignStore(folder / "squad-ledger.db")) as ledger:
        if not index.moments().n:
            index.add(rows, embedder.embed([d.content for d in rows]))
        rag = Rag(embedder, index, CachedGenerator(SimulatedReader(), ledger, "simulated_reader"))
        targets: dict[str, Target] = {"off": rag, "crawl_limit": Guard(rag, defenses("crawl_limit"))}
        asked = read_rows("squad/queries.jsonl.gz")
        items = [asked[i] for i in rng.permutation(len(asked))[:answers]]
        found: dict[str, Any] = {}
        for label, target in targets.items():
            served = []
            for number, item in enumerate(items):
                answer = await target.ask(Query(item["text"], f"reader-{number // DAY}", k=K))
                passages = [hit.document.text for hit in answer.retrieval.hits]
                told = metrics.exact_match(answer.text, item["answers"])
                served.append((told, metrics.answer_recall(passages, item["answers"])))
            exact, recalled = (sum(side) for side in zip(*served, strict=True))
            found[label] = {"EM@5": stats.proportion(exact, len(items)), "R@5": stats.proportion(recalled, len(items))}
    return found


if __name__ == "__main__":
    main()
