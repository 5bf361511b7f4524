"""Cost of the default protections for benign users: false alarms by session, and quality of search and answers.

``python -m benchmarks.defaults [folder] [corpus ...] [size=number ...]``. The defenses, the screening and the generator
are those that ``casemate init`` writes, all in enforce mode. The folder caches vectors. A corpus with results is not
measured again. ``sessions=200`` and similar arguments change the ``SIZES`` for missing corpora.

Corpora: samples of those in ``data/``, and three derived ones. ``short_posts``: short questions and answers, about 50
words. ``forum_posts``: long posts of two forums. ``sentences``: each sentence of SQuAD's paragraphs is a document. The
guard is calibrated on synthetic questions, as by ``casemate index``, and again on a log of the corpus's own questions,
which are not asked later.

Benign sessions ask 1 to 30 questions, drawn by Zipf's law from the corpus's own, or from synthetic ones if it has none.
100 of the sessions run against all defenses together. Quality is measured for clients who ask 25 questions each: recall
at 5, nDCG at 5, and exact match. Differences have 95 % intervals by paired bootstrap over questions. ``recall``: the
share of documents withheld from each scripted attack, as measured by the calibration.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import DATA, SEED, MemoryEvents, read_rows, save, saved
from benchmarks.kept import Kept
from benchmarks.ranking import ndcg_at_k, recall_at_k
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli.init import EXTRACTIVE_LINE, TEMPLATE
from casemate.config import PluginSpec
from casemate.guard.calibration.file import write_calibration
from casemate.guard.calibration.fitting import CalibrationSettings, calibrate
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.guard import Guard
from casemate.maths import metrics, stats
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.poisoning.scoring import PoisonScreener
from casemate.monitor.poisoning.screening_gate import ScreeningGate
from casemate.plugins import build
from casemate.protocols import Defense, Embedder, Index
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.caching import CachedGenerator, ReplyBuffer
from casemate.system import published_attacks
from casemate.text.sentences import sentences
from casemate.text.synthetic_questions import generate_questions
from casemate.types import Document, Query

CORPORA = ("short_posts", "forum_posts", "sentences", "squad", "nfcorpus", "mathqa", "enron_worms")
K = 5
SIZES = {
    "documents": 900,
    "trusted": 540,
    "questions": 150,
    "log": 120,
    "sessions": 1000,
    "full_sessions": 100,
    "session_questions": 30,
    "calibration_questions": 300,
    "calibration_documents": 24,
    "k": K,
}
"""``trusted``: documents that are indexed first; the others pass the screening gate. ``log``: logged questions."""
DAY = 25
RESAMPLES = 2000


@dataclass(frozen=True)
class Asked:
    """A question of the corpus with its relevant documents, their gains, and its gold answers."""

    text: str
    relevant: dict[str, float] = field(default_factory=dict)
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """Documents, test questions, and questions of a log."""

    documents: list[Document]
    asked: list[Asked]
    log: list[str]


def main() -> None:
    """Measures every corpus without results."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/casemate-defaults")
    folder.mkdir(parents=True, exist_ok=True)
    SIZES.update((name, int(size)) for name, _, size in (a.partition("=") for a in sys.argv[2:] if "=" in a))
    for name in [a for a in sys.argv[2:] if "=" not in a] or CORPORA:
        if name in saved("defaults").get("corpora", {}):
            continue
        began = time.process_time()
        embedder = Kept(folder / f"{name}.npz")
        try:
            found = asyncio.run(_measured(load(name), folder / name, embedder))
        finally:
            embedder.save()
        results = {"corpora": {}} | saved("defaults")  # read again: another process may have added a corpus meanwhile
        results["corpora"][name] = {"sizes": dict(SIZES), **found, "cpu_s": round(time.process_time() - began)}
        save("defaults", results)


def load(name: str) -> Corpus:
    """A sample of a corpus: the relevant documents of the sampled questions, and others."""
    rng = np.random.default_rng(SEED)
    match name:
        case "short_posts" | "forum_posts":
            kinds = {"questionDoctor"} if name == "short_posts" else {"icliniq", "ehealthforum"}
            found = [r for r in read_rows("patient_doctor_qa/corpus.jsonl.gz") if r["source"] in kinds]
            return _sampled(_documents(found), _asked("patient_doctor_qa", answers=False), rng)
        case "sentences":
            return _sampled(*_sentences(), rng)
        case "enron_worms":
            documents = _documents(read_rows("enron_worms/corpus.jsonl.gz"))
            return _sampled(documents, [], rng)
        case _:
            answers = name in ("squad", "mathqa")
            return _sampled(_documents(read_rows(f"{name}/corpus.jsonl.gz")), _asked(name, answers=answers), rng)


def _documents(found: Sequence[dict[str, Any]]) -> list[Document]:
    return [Document(r["_id"], r["text"], r.get("title", "")) for r in found]


def _asked(name: str, *, answers: bool) -> list[Asked]:
    gains: dict[str, dict[str, float]] = {}
    for line in (DATA / name / "qrels.tsv").read_text().splitlines()[1:]:
        question, document, gain = line.split("\t")
        if float(gain) > 0:
            gains.setdefault(question, {})[document] = float(gain)
    return [
        Asked(q["text"], gains[q["_id"]], tuple(q.get("answers", ())) if answers else ())
        for q in read_rows(f"{name}/queries.jsonl.gz")
        if q["_id"] in gains and len(q["text"]) < 2000
    ]


def _sentences() -> tuple[list[Document], list[Asked]]:
    """Every sentence of 200 SQuAD paragraphs, and the questions that one sentence answers."""
    paragraphs = _documents(read_rows("squad/corpus.jsonl.gz"))[:200]
    documents, parts = list[Document](), dict[str, list[Document]]()
    for d in paragraphs:
        parts[d.id] = [Document(f"{d.id}-{i}", text) for i, text in enumerate(sentences(d.text))]
        documents += parts[d.id]
    asked = []
    for q in _asked("squad", answers=True):
        held = [s for name in q.relevant for s in parts.get(name, ()) if metrics.exact_match(s.text, q.answers)]
        if held:
            asked.append(Asked(q.text, {s.id: 1.0 for s in held}, q.answers))
    return documents, asked


def _sampled(documents: Sequence[Document], asked: Sequence[Asked], rng: np.random.Generator) -> Corpus:
    there = {d.id: d for d in documents}
    count, log = SIZES["questions"], SIZES["log"]
    if not asked:
        kept = [documents[i] for i in rng.permutation(len(documents))[: SIZES["documents"]]]
        made = generate_questions(kept, count + log, rng)
        return Corpus(kept, [Asked(text) for text in made[:count]], made[count:])
    usable = [q for q in asked if q.relevant.keys() & there.keys()]
    drawn = [usable[i] for i in rng.permutation(len(usable))]
    wanted = dict.fromkeys(d for q in drawn[: count + log] for d in sorted(q.relevant) if d in there)
    named = list(wanted)[: SIZES["documents"] * 2 // 3]
    others = [d.id for d in (documents[i] for i in rng.permutation(len(documents))) if d.id not in wanted]
    kept = [there[i] for i in [*named, *others][: SIZES["documents"]]]
    ids = {d.id for d in kept}
    drawn = [Asked(q.text, {d: g for d, g in q.relevant.items() if d in ids}, q.answers) for q in drawn]
    drawn = [q for q in drawn if q.relevant]  # also for the log: its questions must resemble the test questions
    kept = [kept[i] for i in rng.permutation(len(kept))]
    return Corpus(kept, drawn[:count], [q.text for q in drawn[count : count + log]])


async def _measured(corpus: Corpus, folder: Path, embedder: Embedder) -> dict[str, Any]:
    """Results of one corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = CachedGenerator(ExtractiveGenerator(), ReplyBuffer(), "extractive")
    with (
        closing(new_index(folder / "all.db", embedder)) as whole,
        closing(new_index(folder / "screened.db", embedder)) as own,
    ):
        bare, screened = Rag(embedder, whole, generator), Rag(embedder, own, generator)
        await Guard(bare, []).add(corpus.documents)
        quarantined = await _screen(corpus, screened)
        found: dict[str, Any] = {
            "chunks": len(corpus.documents),
            "words": float(np.median([len(d.text.split()) for d in corpus.documents])),
            "questions": len(corpus.asked),
            "screened": stats.proportion(quarantined, len(corpus.documents) - SIZES["trusted"]),
        }
        for source in ("synthetic", "log"):
            guard, recall = await _guard(screened, folder / f"{source}.json", corpus.log if source == "log" else ())
            print(source, "calibrated", round(time.process_time()), file=sys.stderr, flush=True)
            found[source] = {"quality": await _quality(corpus, bare, guard), "sessions": await _withheld(corpus, guard)}
            found[source]["recall"] = recall
            print(json.dumps(found[source]), file=sys.stderr, flush=True)
    return found


def new_index(file: Path, embedder: Embedder) -> SqliteIndex:
    """An empty index in a file."""
    file.unlink(missing_ok=True)
    index = SqliteIndex(file)
    index.open(embedder.fingerprint, embedder.dim)
    return index


async def _screen(corpus: Corpus, rag: Rag) -> int:
    """Indexes the trusted documents, then the others through the enforced gate.

    Returns the number of quarantined documents.
    """
    trusted, new = corpus.documents[: SIZES["trusted"]], corpus.documents[SIZES["trusted"] :]
    guard = Guard(rag, [])
    await guard.add(trusted)
    questions = generate_questions(trusted, SIZES["calibration_questions"], np.random.default_rng(SEED + 3))
    screener = PoisonScreener.fit(rag.index, questions, rag.embedder.embed(questions), k=K)
    gate = ScreeningGate(guard, screener, Quarantine(MemoryEvents()))
    await gate.add(new)
    return len(gate.quarantined)


def default_specs() -> list[PluginSpec]:
    """The defenses that ``casemate init`` writes."""
    raw = yaml.safe_load(TEMPLATE.format(corpus="docs", generator=EXTRACTIVE_LINE))
    return [PluginSpec.model_validate(part) for part in raw["guard"]["defenses"]]


async def _guard(rag: Rag, calibration: Path, log: Sequence[str]) -> tuple[Guard, dict[str, Any]]:
    """The default defenses, calibrated and enforced, and the share of documents withheld from each attack."""
    parts: dict[Any, Any] = {Embedder: rag.embedder, Index: rag.index}
    made: list[Defense] = []
    for spec in default_specs():
        options = {"calibration": str(calibration.absolute())} if spec.use == "mirabel" else {}
        made.append(build("defense", PluginSpec(use=spec.use, **{**spec.options, **options}), parts=parts))
    (mirabel,) = (d for d in made if isinstance(d, Mirabel))
    settings = CalibrationSettings(
        k=K, documents=SIZES["calibration_documents"], questions=SIZES["calibration_questions"], seed=SEED
    )
    found = await calibrate(mirabel, rag, published_attacks(), log, settings)
    write_calibration(calibration, "default", found)
    rate = str(mirabel.significance)
    recall = {attack: by_rate[rate]["document"] for attack, by_rate in found.notes["recall"].items()}
    return Guard(rag, made), recall


def fresh(guard: Guard) -> Guard:
    """A copy of the guard without client state."""
    again: list[Defense] = []
    for d in guard.defenses:
        if isinstance(d, Mirabel):
            spec = {"significance": d.significance, "calibration": d.calibration}
            again.append(Mirabel(**spec, embedder=guard.rag.embedder, index=guard.rag.index))
        else:
            assert isinstance(d, CrawlLimit)
            again.append(CrawlLimit(questions=d.questions))
    return Guard(guard.rag, again)


async def _quality(corpus: Corpus, bare: Rag, guarded: Guard) -> dict[str, Any]:
    """Each metric without and with the guard, and the difference in percentage points with its 95 % interval."""
    values: dict[str, list[tuple[float, float]]] = {}
    guard, changed = fresh(guarded), 0
    for number, q in enumerate(corpus.asked):
        query = Query(q.text, f"reader-{number // DAY}", k=K)
        answers = await bare.ask(query), await guard.ask(query)
        changed += answers[0].text != answers[1].text
        contexts = [list(dict.fromkeys(h.document.source for h in a.retrieval.hits[:K])) for a in answers]
        if q.relevant:
            values.setdefault("R@5", []).append(_pair(recall_at_k(c, q.relevant, K) for c in contexts))
            values.setdefault("nDCG@5", []).append(_pair(ndcg_at_k(c, q.relevant, K) for c in contexts))
        if q.answers:
            values.setdefault("EM", []).append(_pair(metrics.exact_match(a.text, q.answers) for a in answers))
    return {name: _compared(np.array(pairs)) for name, pairs in values.items()} | {
        "changed": stats.proportion(changed, len(corpus.asked))
    }


def _pair(values: Iterator[float]) -> tuple[float, float]:
    off, on = values
    return float(off), float(on)


def _compared(pairs: np.ndarray) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    loss = 100 * (pairs[:, 0] - pairs[:, 1])
    means = loss[rng.integers(len(loss), size=(RESAMPLES, len(loss)))].mean(axis=1)
    return {
        "off": float(pairs[:, 0].mean()),
        "on": float(pairs[:, 1].mean()),
        "loss_points": [float(loss.mean()), *(float(q) for q in np.quantile(means, (0.025, 0.975)))],
    }


async def _withheld(corpus: Corpus, guarded: Guard) -> dict[str, Any]:
    """Questions and sessions from which Mirabel withholds a document, and sessions with an alarm of either defense."""
    guard, rng = fresh(guarded), np.random.default_rng(SEED + 2)
    texts, count, asked, flagged, met = [q.text for q in corpus.asked], SIZES["full_sessions"], 0, 0, Counter[str]()
    for client, numbers in sessions(len(texts), count, rng):
        hidden = alarmed = False
        for i in numbers:
            answer = await guard.ask(Query(texts[i], client, k=K))
            acted = {v.defense for v in answer.verdicts if v.flagged}
            asked, flagged = asked + 1, flagged + ("mirabel" in acted)
            hidden, alarmed = hidden or "mirabel" in acted, alarmed or "crawl_limit" in acted
        met.update({"hidden": hidden, "alarmed": alarmed})
    return {
        "sessions": count,
        "questions": asked,
        "alarmed": stats.proportion(met["alarmed"], count),
        "withheld_sessions": stats.proportion(met["hidden"], count),
        "withheld_questions": stats.proportion(flagged, asked),
    }


def sessions(questions: int, count: int, rng: np.random.Generator) -> Iterator[tuple[str, list[int]]]:
    """Yields clients with the numbers of their questions, drawn by Zipf's law."""
    share = 1 / np.arange(1, questions + 1)
    for number in range(count):
        length = int(rng.integers(1, SIZES["session_questions"] + 1))
        yield f"harmless-{number}", rng.choice(questions, length, p=share / share.sum()).tolist()


if __name__ == "__main__":
    main()
