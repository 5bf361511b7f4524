"""Extraction attacks: crawlers, output transforms and colluding clients, without a defense and under each policy.

``python -m benchmarks.crawl [folder] [questions=N] [answers=N] [corpus=CHUNKS ...] [only=ATTACKER,...]``. Afterwards
``python docs/crawls.py`` draws the picture. The attackers are all crawlers with all transforms, strongest first. The
benchmark skips attackers that have results for the same code, defenses, chunks and questions. So an interrupted run can
be resumed, and several corpora can run at the same time. k = 5. The **simulated** reader follows every instruction. The
attacker decodes replies before they are compared with the chunks, whole and in items.

Settings: no defense; ``crawl_limit`` against 1 and 20 clients of one tenant, which ask in turn; the quorum policy
against 20 clients without entitlement to any source. Crawlers without a transform also face the published defenses.
Three attackers on MathQA also use 5 and 100 clients. Further variants for them are adaptive clients, which are replaced
when replies become shorter, and clients that return on three **simulated** days. The results list the strongest
attackers first, and the mean of their ratios last. *Coverage*: share of chunks in the context of some answer; its ratio
is to no defense.

*Surrogate accuracy*: a system with the same reader, over the attacker's extracted texts only, answers ordinary
questions. It is the mean ROUGE-L F1 between its answers and those of the unguarded system. The cost of ``crawl_limit``
on SQuAD is measured with clients that ask `DAY` questions each (benign sessions: ``benchmarks.disclosure``).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import DATA, SEED, before, code_digest, read_rows, updating
from casemate import plugins
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import did_you_mean
from casemate.guard.audience import AudiencePolicy
from casemate.guard.client_state import crawl_evidence
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.similarity_floor import SimilarityFloor
from casemate.guard.defenses.summarize import Summarize
from casemate.guard.guard import Guard
from casemate.maths import metrics, recovery, stats
from casemate.protocols import Defense, ExtractionAttack, Target
from casemate.rag.pipeline import Rag, join_stream
from casemate.redteam.crawling.extracted_texts import split_reply
from casemate.redteam.crawling.transformed import TransformedCrawler
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.experiment import describe_options, digest
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan, CrawlTrace
from casemate.redteam.lab.extraction_metrics import measure_crawl, recovery_ratio
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.text.output_transforms import TRANSFORMS
from casemate.text.refusals import is_refusal
from casemate.text.synthetic_questions import generate_questions
from casemate.types import Answer, Document, Prompt, Query

CORPORA = {"patient_doctor_qa": 2500, "enron_worms": 1500, "mathqa": 320}
CRAWLERS = ("composite", "rag_thief", "worm", "pirates", "ikea", "rag_crawler")
K = 5
DAY, ANSWERS = 50, 1500
DAY_S = 86_400
SURROGATE_QUESTIONS = 40
"""Questions for the surrogate accuracy."""


@dataclass(frozen=True)
class Setting:
    """Clients and policy."""

    name: str
    clients: int = 1
    schedule: Any = "rotate"
    days: int = 1
    policy: str = "crawl_limit"

    def defenses(self) -> list[Defense]:
        """New defenses without state."""
        match self.policy:
            case "off":
                return []
            case "similarity_floor":
                return [SimilarityFloor(floor=0.35)]
            case "summarize":
                return [Summarize()]
            case "quorum":
                return [Quorum(support=2, jitter=1), CrawlLimit()]
            case _:
                return [CrawlLimit()]

    def target(self, rag: Rag) -> Target:
        """The system with these defenses."""
        audience = AudiencePolicy("quorum") if self.policy == "quorum" else None
        return Guard(rag, made, audience=audience) if (made := self.defenses()) else rag


OFF, ONE, TWENTY = Setting("off", policy="off"), Setting("1 client"), Setting("20 clients", 20)
QUORUM = Setting("20 clients, quorum", 20, policy="quorum")
PUBLISHED = tuple(Setting(name, policy=name) for name in ("similarity_floor", "summarize"))
COLLUSION = (
    Setting("5 clients", 5),
    Setting("100 clients", 100),
    Setting("20 clients, adaptive", 20, "adaptive"),
    Setting("100 clients, adaptive", 100, "adaptive"),
    Setting("20 clients, 3 days", 20, days=3),
    Setting("1 client, quorum", policy="quorum"),
)
WORST = ("rag_thief+reversal", "rag_thief+first_document", "rag_crawler")
"""Attackers that are measured in every setting."""
TRANSFORMED = [f"{crawler}+{transform}" for transform in TRANSFORMS for crawler in ("rag_thief", *CRAWLERS)]
FIRST = (*CRAWLERS, "rag_thief+first_document", "composite+first_document", "rag_thief+reversal")
ATTACKERS = tuple(dict.fromkeys([*FIRST, *(f"rag_thief+{t}" for t in TRANSFORMS), *TRANSFORMED]))
"""In the order of measurement."""


class IndexedCorpus:
    """An indexed corpus."""

    def __init__(self, name: str, folder: Path, embedder: CachedEmbedder) -> None:
        self.name, self.embedder = name, embedder
        rng = np.random.default_rng(SEED)
        rows = read_rows(f"{name}/corpus.jsonl.gz")
        order = rng.permutation(len(rows))[: CORPORA[name]]
        self.documents = [Document(rows[i]["_id"], rows[i]["text"], rows[i].get("title", "")) for i in order]
        self.index = _indexed(folder / f"{name}-{len(order)}.db", self.documents, embedder)
        self.ledger = CampaignStore(folder / f"{name}-{len(order)}-ledger.db")
        self.rag = Rag(self.embedder, self.index, CachedGenerator(SimulatedReader(), self.ledger, "simulated_reader"))
        self.questions = self._questions(rng)

    def _questions(self, rng: np.random.Generator) -> list[str]:
        """Benign questions: the corpus's own about the indexed documents, or synthetic ones."""
        file = DATA / self.name / "queries.jsonl.gz"
        if not file.exists():
            return list(generate_questions(self.documents, 400, rng))
        held = {d.source for d in self.documents}
        judged = (DATA / self.name / "qrels.tsv").read_text().splitlines()[1:]
        about = {question for question, document, *_ in (line.split("\t") for line in judged) if document in held}
        found = [r["text"] for r in read_rows(file) if r["_id"] in about and len(r["text"]) < 2000]
        return [found[i] for i in rng.permutation(len(found))[:400]]


def main() -> None:
    """Runs the crawls, and writes the results after each attacker."""
    given = dict(a.partition("=")[::2] for a in sys.argv[1:] if "=" in a)
    folder = Path(next((a for a in sys.argv[1:] if "=" not in a), "/tmp/casemate-crawl"))
    folder.mkdir(parents=True, exist_ok=True)
    only = chosen(given["only"]) if "only" in given else ATTACKERS
    about: dict[str, Any] = {"questions": int(given.get("questions", 1000)), "k": K, "code": code_digest()}
    about["defenses"] = {s.name: [describe_options(d) for d in s.defenses()] for s in (ONE, QUORUM, *PUBLISHED)}
    embedder = CachedEmbedder(MiniLM(threads=1), megabytes=1500)  # shared: the worm asks each corpus the same
    if "accuracy" not in before("crawl", about) and "only" not in given:
        accuracy = asyncio.run(_accuracy(folder, embedder, int(given.get("answers", ANSWERS))))
        with updating("crawl", about) as results:
            results["accuracy"] = accuracy
    for corpus in [name for name in CORPORA if name in given] or CORPORA:
        CORPORA[corpus] = int(given.get(corpus, CORPORA[corpus]))
        collection = IndexedCorpus(corpus, folder, embedder)
        with closing(collection.ledger), closing(collection.index):
            _measure_corpus(collection, only, about)


def _measure_corpus(collection: IndexedCorpus, only: Collection[str], about: dict[str, Any]) -> None:
    """Measures the attackers without results, and writes the results after each."""
    surrogate, size = SurrogateTest(collection), CORPORA[collection.name]
    known = _attackers(before("crawl", about), collection.name, size)
    for label in [attacker for attacker in ATTACKERS if attacker in only and attacker not in known]:
        figures = asyncio.run(_attacked(collection, surrogate, label, about["questions"]))
        ratios = {setting: cells.get("ratio") for setting, cells in figures.items()}
        print(collection.name, label, ratios, file=sys.stderr, flush=True)
        with updating("crawl", about) as results:
            found = _attackers(results, collection.name, size) | {label: figures}
            rows = {"chunks": size, "worst_first": _worst_first(found), "attackers": found}
            results["corpora"][collection.name] = rows


def chosen(names: str) -> list[str]:
    """Attackers in a comma-separated list. Raises ``SystemExit`` for an unknown name."""
    only = names.split(",")
    if unknown := [name for name in only if name not in ATTACKERS]:
        sys.exit(f"only={','.join(unknown)}: no such attacker{did_you_mean(unknown[0], ATTACKERS)}")
    return only


def _attackers(results: Mapping[str, Any], corpus: str, chunks: int) -> dict[str, Any]:
    """Results of a corpus by attacker, if they were measured with the same number of chunks."""
    held = results["corpora"].get(corpus, {})
    found: dict[str, Any] = held["attackers"] if held.get("chunks") == chunks else {}
    return found


class SurrogateTest:
    """Queries a system that contains only the texts that an attacker extracted."""

    def __init__(self, collection: IndexedCorpus) -> None:
        self.collection, self.reader = collection, SimulatedReader()
        self.asked: list[tuple[str, str]] = []
        for text in collection.questions:
            if len(self.asked) == SURROGATE_QUESTIONS:
                break
            answer = asyncio.run(collection.rag.ask(Query(text, "judge", k=K))).text
            if not is_refusal(answer):
                self.asked.append((text, answer))

    async def accuracy(self, replies: Sequence[str]) -> list[float]:
        """Mean similarity of the surrogate's answers to those of the unguarded system, with its interval."""
        texts = list(dict.fromkeys(t for reply in replies if not is_refusal(reply) for t in split_reply(reply)))
        scores = [0.0] * len(self.asked)
        if texts:
            embed = self.collection.embedder.embed
            cosines = embed([q for q, _ in self.asked]) @ embed(texts).T
            for number, (question, expected) in enumerate(self.asked):
                best = np.argsort(-cosines[number])[:K]
                context = tuple(Document(str(i), texts[i]) for i in best)
                answer = await join_stream(self.reader.stream(Prompt(question, context, "")))
                scores[number] = 0.0 if is_refusal(answer) else recovery.rouge_l(expected, answer).f1
        return list(stats.bootstrap(lambda a, _: float(np.mean(a)), scores, [0.0], SEED))


async def _attacked(collection: IndexedCorpus, surrogate: SurrogateTest, label: str, questions: int) -> dict[str, Any]:
    """Results of one attacker in each setting."""
    attack = make_attack(label, collection.embedder)
    published = PUBLISHED if label in CRAWLERS else ()
    collusion = COLLUSION if label in WORST and collection.name == "mathqa" else ()
    traces = dict[str, CrawlTrace]()
    for setting in (OFF, ONE, TWENTY, QUORUM, *published, *collusion):
        with _days(setting.target(collection.rag), setting.days, questions) as target:
            made = digest(code_digest(), [describe_options(defense) for defense in setting.defenses()])
            plan = CrawlPlan(
                seed=SEED,
                k=K,
                questions=questions,
                clients=setting.clients,
                schedule=setting.schedule,
                label=f"{made} {setting.name}",
            )
            crawler = Crawler(label, attack, {setting.name: target}, collection.ledger, plan)
            traces |= await crawler.run()
    found = measured(crawler, traces, collection.documents, collection.embedder)
    for name, trace in traces.items():
        found[name]["surrogate_accuracy"] = await surrogate.accuracy([attack.decode(e.reply) for e in trace.exchanges])
    return found


def make_attack(label: str, embedder: CachedEmbedder, **options: Any) -> ExtractionAttack:
    """A crawler with these options, otherwise its defaults.

    The name after ``+`` is the output transform that it requests.
    """
    name, _, transform = label.partition("+")
    cls = plugins.load("crawler", name)
    own = {"embedder": embedder} if "embedder" in cls.__dataclass_fields__ else {}
    made: ExtractionAttack = cls(**own, **options)
    return TransformedCrawler(made, transform) if transform else made


def measured(
    crawler: Crawler, traces: Mapping[str, CrawlTrace], documents: Sequence[Document], embedder: CachedEmbedder
) -> dict[str, dict[str, Any]]:
    """Recovery and coverage by setting, and their ratios to the crawl ``off``."""
    sides = measure_crawl(crawler, traces, documents, embedder, windows=False).by_target
    found: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        shown = ("questions", "crr", "crr_ikea", "coverage", "coverage_after", "verbatim", "first_alarm")
        found[name] = {what: value for what, value in asdict(side).items() if what in shown}
        if name != "off":
            found[name]["ratio"] = recovery_ratio(sides["off"], side, documents, SEED)
            found[name]["coverage_ratio"] = _coverage_ratio(traces["off"], traces[name], documents)
    return found


def _coverage_ratio(off: CrawlTrace, on: CrawlTrace, documents: Sequence[Document]) -> list[float] | None:
    """Covered chunks relative to no defense, with an interval by bootstrap over chunks."""
    seen = [{i for e in trace.exchanges if e.answered for i in e.context} for trace in (off, on)]
    counts = np.array([[d.id in ids for d in documents] for ids in seen])
    if not counts[0].any():
        return None
    drawn = np.random.default_rng(SEED).integers(len(documents), size=(stats.RESAMPLES, len(documents)))
    sums = counts[:, drawn].sum(axis=2)
    low, high = np.quantile(sums[1] / np.maximum(sums[0], 1), [0.025, 0.975])
    return [float(counts[1].sum() / counts[0].sum()), float(low), float(high)]


@contextmanager
def _days(target: Target, days: int, questions: int) -> Iterator[Any]:
    """A target for which the clock of ``crawl_limit`` advances by one day after each part of the questions."""
    asked = 0

    async def ask(query: Query) -> Answer:
        nonlocal asked
        asked += 1
        return await target.ask(query)

    module: Any = crawl_evidence
    real = module.time
    clock = SimpleNamespace(time=lambda: time() + DAY_S * (asked * days // (questions + 1)) * 1.01)
    module.time = clock
    try:
        yield SimpleNamespace(ask=ask)
    finally:
        module.time = real


def _worst_first(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By setting: recovery and ratio of each attacker, strongest first, and the mean of the ratios last."""
    reports: dict[str, Any] = {}
    for setting in dict.fromkeys(name for cells in found.values() for name in cells if name != "off"):
        cells = {label: by_setting[setting] for label, by_setting in found.items() if setting in by_setting}
        worst = sorted(cells, key=lambda label: cells[label]["crr"][0], reverse=True)
        rows = {a: {what: cells[a][what] for what in ("crr", "ratio", "coverage_ratio")} for a in worst}
        ratios = [row["ratio"][0] for row in rows.values() if row["ratio"]]
        reports[setting] = rows | {"mean_ratio": sum(ratios) / len(ratios) if ratios else None}
    return reports


async def _accuracy(folder: Path, embedder: CachedEmbedder, answers: int) -> dict[str, Any]:
    """Exact match and recall on SQuAD with the guard off and on, for clients with up to `DAY` questions each."""
    rows = [Document(r["_id"], r["text"], r.get("title", "")) for r in read_rows("squad/corpus.jsonl.gz")]
    index = _indexed(folder / "squad.db", rows, embedder)
    asked = read_rows("squad/queries.jsonl.gz")
    items = [asked[i] for i in np.random.default_rng(SEED).permutation(len(asked))[:answers]]
    found: dict[str, Any] = {}
    with closing(index):
        for setting in (OFF, ONE):
            served, target = [], setting.target(Rag(embedder, index, SimulatedReader()))
            for number, item in enumerate(items):
                answer = await target.ask(Query(item["text"], f"reader-{number // DAY}", k=K))
                passages = [hit.document.text for hit in answer.retrieval.hits]
                right = metrics.exact_match(answer.text, item["answers"])
                served.append((right, metrics.answer_recall(passages, item["answers"])))
            exact, recalled = (sum(side) for side in zip(*served, strict=True))
            rates = {"EM@5": stats.proportion(exact, len(items)), "R@5": stats.proportion(recalled, len(items))}
            found["crawl_limit" if setting is ONE else "off"] = rates
    return found


def _indexed(file: Path, documents: Sequence[Document], embedder: CachedEmbedder) -> SqliteIndex:
    index = SqliteIndex(file)
    index.open(embedder.fingerprint, embedder.dim)
    if not index.moments().n:
        index.add(documents, embedder.embed([d.content for d in documents]))
    return index


if __name__ == "__main__":
    main()
