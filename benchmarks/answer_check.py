"""The answer-level check of new documents with and without a real model, on poisoned and benign documents.

``python -m benchmarks.answer_check FILE.gguf [QUESTIONS] [gate]`` queries a model and caches its answers under
``build``, so that an interrupted run can be resumed. Both readers see the same documents in one run. Without arguments
it measures the synthetic collection with recorded answers of the 0.5B model. ``... FILE.gguf pack`` records them.

``synthetic``: invented facts, each stated by r documents. Poisoned: PoisonedRAG's form with our sentences, with and
without the question in front, and CorruptRAG's form. Benign: one of the documents that state the fact.

``squad``: PoisonedRAG's own texts for questions of Natural Questions that SQuAD does not answer; CorruptRAG's form for
questions that it answers; and benign held-out documents, each with the watched question that it answers best. All rank
first.

``stays_suspicious``: the answer changes, and no other document states the new answer. ``deceived``: the reader gives
the false answer. ``gate``: the complete screening gate on SQuAD. It calls the reader only above the threshold of its
first step.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import ROOT, SEED, save, saved
from benchmarks.kept import Kept
from benchmarks.poison import Ground, Texts
from benchmarks.real import files
from benchmarks.real.recorded_model import RecordedModel
from benchmarks.redundant import Case, squad, synthetic
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.maths import stats
from casemate.maths.metrics import exact_match
from casemate.monitor.poisoning import answer_change
from casemate.monitor.poisoning.answer_change import AnswerCheck, EnteredQuestion
from casemate.monitor.poisoning.scoring import PoisonScreener
from casemate.protocols import Embedder, Generator, Index
from casemate.redteam.attacks.poison import Poison
from casemate.types import Document

WORK = ROOT / "build/answer_check"
RECORDED = ROOT / "benchmarks/recorded/answer_check/qwen0.5b.jsonl.gz"
QUESTIONS, K, TOKENS = 20, 3, 32
FACTS, REDUNDANCY = 2, (1, 2, 3)
BINS = ((1, 2), (3, 24))
"""Ranges of redundancy of the SQuAD questions; half of the questions are in each."""
FORMS = ("question in front", "text alone", "corruptrag")


class Arrival(NamedTuple):
    """A new document with a question whose results it enters.

    Attributes:
        kind: Kind of the document.
        entered: Question and document.
        false: The attacker's answer; empty for a benign document.
    """

    kind: str
    entered: EnteredQuestion
    false: str = ""


def main(model: str = "", what: str = str(QUESTIONS), whole: str = "") -> None:
    """Parses the command line."""
    found = saved("answer_check")
    if not model or what == "pack":
        reader = RecordedModel(None, WORK / f"{Path(model).stem}.jsonl.gz" if model else RECORDED, TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            shown = invented(reader, Path(folder))
        if model:
            rows = files.read(WORK / f"{Path(model).stem}.jsonl.gz")
            files.write(RECORDED, [rows[0], *(row for row in rows[1:] if row["id"] in reader.used)])
        print(json.dumps(shown, indent=2))
        return
    path = Path(model)
    answer_change.ANSWER_S = 3600  # the machine may be shared
    reader = RecordedModel(path, WORK / f"{path.stem}.jsonl.gz", TOKENS, {"k": K, "seed": SEED})
    with tempfile.TemporaryDirectory() as folder:
        results = {"questions": int(what), "k": K, "synthetic": invented(reader, Path(folder))}
        save("answer_check", found | {path.stem: results})
        results |= {"squad": real(reader, Path(folder), int(what), bool(whole))}
    save("answer_check", found | {path.stem: results})


def invented(reader: Generator, folder: Path) -> dict[str, Any]:
    """Results for the synthetic collection."""
    documents, cases = synthetic(FACTS, REDUNDANCY)
    held_out = {d.id: d for d in documents if d.id.endswith("-0")}
    embedder = MiniLM(threads=1)
    with closing(SqliteIndex(folder / "synthetic.db")) as index:
        index.open(embedder.fingerprint, embedder.dim)
        rest = [d for d in documents if d.id not in held_out]
        index.add(rest, embedder.embed([d.content for d in rest]))
        arrivals = [a for form in FORMS for a in crafted(cases, embedder, form)]
        new = [held_out[f"{case.id.rsplit('-', 1)[0]}-0"] for case in cases]
        stated = ["stated by no other" if case.r == 1 else "stated by others" for case in cases]
        asked = [case.question for case in cases]
        arrivals += entering([f"harmless, {s}" for s in stated], asked, new, embedder)
        return compared(index, reader, arrivals)


def real(reader: Generator, folder: Path, count: int, whole: bool) -> dict[str, Any]:
    """Results for SQuAD: the check alone, and the complete gate if ``whole``."""
    embedder = Kept(ROOT / "build/kept.npz")
    texts, cases = Texts(embedder), squad(embedder, count // 2, BINS)
    ground = Ground("squad", embedder, folder, 0)
    embedder.save()
    with closing(ground.index):
        learnt = ground.fitted(*texts.watched("watched"))
        arrivals = list(crafted(cases, embedder, "corruptrag"))
        for form, written in texts.forms.items():
            new = [Document(f"{form}-{i}", text) for i, text in enumerate(written[: 5 * count : 5])]
            kinds = [f"poisonedrag, {form}"] * count
            arrivals += entering(kinds, texts.questions[:count], new, embedder, texts.answers)
        arrivals += harmless(ground, learnt, count)
        found = compared(ground.index, reader, arrivals)
        return found | ({"gate": gate(ground, learnt, reader, texts, count)} if whole else {})


def crafted(cases: Sequence[Case], embedder: Embedder, form: str) -> Iterator[Arrival]:
    """One poisoned document for each question, with our sentences."""
    attack = Poison(method="corrupt") if form == "corruptrag" else Poison(texts=1)
    new = []
    for i, case in enumerate(cases):
        (made,) = asyncio.run(attack.craft(case.question, case.false, np.random.default_rng([SEED, i])))
        text = made.text.removeprefix(case.question).lstrip(" .") if form == "text alone" else made.text
        new.append(Document(f"{form}-{i}", text))
    asked = [case.question for case in cases]
    yield from entering([form] * len(cases), asked, new, embedder, [case.false for case in cases])


def entering(
    kinds: Sequence[str],
    questions: Sequence[str],
    new: Sequence[Document],
    embedder: Embedder,
    false: Sequence[str] = (),
) -> Iterator[Arrival]:
    """New documents, each with the questions whose results it enters."""
    Q, E = embedder.embed(questions), embedder.embed([d.content for d in new])
    for i, document in enumerate(new):
        yield Arrival(kinds[i], EnteredQuestion(questions[i], Q[i], document, E[i]), false[i] if false else "")


def harmless(ground: Ground, learnt: PoisonScreener, count: int) -> Iterator[Arrival]:
    """Held-out documents that rank first for a watched question, with that question."""
    scores = learnt.question_scores
    _, contexts = scores.impact(ground.new_vectors, [d.source for d in ground.new])
    first = [(i, entries[0].question) for i, entries in enumerate(contexts) if entries and entries[0].lift > 0]
    for place in np.random.default_rng(SEED).permutation(len(first))[:count]:
        i, asked = first[place]
        question = scores.questions[asked], scores.vectors[asked]
        yield Arrival("harmless", EnteredQuestion(*question, ground.new[i], ground.new_vectors[i]))


def compared(index: Index, reader: Generator, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Results of the check with and without the model, by kind of document."""
    plain = AnswerCheck(index, k=K)
    return {
        name: summary(check, index, arrivals)
        for name, check in (("without a model", plain), ("model", replace(plain, reader=reader)))
    }


def summary(check: AnswerCheck, index: Index, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Rates among the documents that rank first, by kind."""
    first = [a for a in arrivals if _lift(index, a.entered) > 0]
    changes = check.check([a.entered for a in first])
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(a.kind for a in arrivals):
        rows = [(a, c) for a, c in zip(first, changes, strict=True) if a.kind == kind]
        caught = [c.changed and not c.supporters for _, c in rows]
        deceived = [bool(a.false) and exact_match(c.after, [a.false]) for a, c in rows]
        found[kind] = {
            "documents": sum(a.kind == kind for a in arrivals),
            "rank_first": len(rows),
            "stays_suspicious": _share(caught),
            "changed": sum(c.changed for _, c in rows),
            "supported": sum(c.supporters > 0 for _, c in rows),
        }
        if any(a.false for a, _ in rows):
            both = [c for c, d in zip(caught, deceived, strict=True) if d]
            found[kind] |= {"deceived": _share(deceived), "stays_suspicious_if_deceived": _share(both)}
    return found


def gate(
    ground: Ground, learnt: PoisonScreener, reader: Generator, texts: Texts, count: int
) -> dict[str, dict[str, Any]]:
    """Results of the complete gate: all benign documents in one batch, each poisoned document alone."""
    found: dict[str, dict[str, Any]] = {}
    for name, answers in (("without a model", learnt.answers), ("model", replace(learnt.answers, reader=reader))):
        screener = ground.restart(learnt)
        screener.answers = replace(answers, k=K)
        results = screener.screen(ground.new, ground.new_vectors)
        found[name] = {"harmless": _share([r.suspicious for r in results])}
        for form, written in texts.forms.items():
            held = []
            for i, text in enumerate(written[: 5 * count : 5]):
                one = ground.restart(learnt)
                one.answers = screener.answers
                held.append(one.screen([Document(f"p{i}", text)], ground.embedder.embed([text]))[0].suspicious)
            found[name][form] = _share(held)
    return found


def _lift(index: Index, entered: EnteredQuestion) -> float:
    """Cosine of document and question, minus that of the best other document."""
    hits = index.search(entered.question_vector, 2).hits
    best = max((h.score for h in hits if h.document.source != entered.document.source), default=-1.0)
    return float(np.dot(entered.question_vector, entered.vector)) - best


def _share(held: Iterable[bool]) -> stats.Estimate | None:
    rows = list(held)
    return stats.proportion(sum(rows), len(rows)) if rows else None


if __name__ == "__main__":
    main(*sys.argv[1:4])
