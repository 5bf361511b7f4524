"""Screening of poisoned documents at ingest: detection rate, and false positives among new benign documents.

``python -m benchmarks.poison [folder] [corpus] [FILE.json]`` caches embeddings in the folder. Results of the other
corpus are kept. The texts are PoisonedRAG's own: 100 questions of Natural Questions, five texts each. They are tested
with the question in front, as in the black-box attack, and without. FILE: other texts in the format of PoisonedRAG,
such as its ``results/adv_targeted_results/msmarco.json``; the result has its name.

Corpora: SQuAD and NFCorpus. A tenth of each corpus is held out as new benign documents. The threshold is fitted on the
rest. 2,000 questions of the corpus are watched. Three cases: the attacked question is watched, a rule-based rewording
of it is watched, or neither. Two orders of arrival: all texts with the new documents, or one text per question. A third
order, for the first questions of one split: single texts in turn, each after the decision on the previous one. Rates
are over three splits. Then our own attacks run on one split.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, read_rows, save, saved
from benchmarks.kept import Kept, corpus, questions
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.maths import stats
from casemate.monitor.poisoning.retrieval_impact import QuestionScores
from casemate.monitor.poisoning.scoring import PoisonScreener, ScreeningResult
from casemate.redteam.attacks.poison import Poison
from casemate.redteam.attacks.trigger import Trigger
from casemate.text.tokens import STOP_WORDS, words
from casemate.types import Document, Vector

CORPORA = ("squad", "nfcorpus")
WATCHED, K, SPLITS, HELD_OUT = 2000, 5, 3, 0.1
ATTACKED = 25
"""Questions for our own attacks."""
TRIGGER = "xanadoo"


class Texts:
    """PoisonedRAG's texts, with their questions and false answers."""

    def __init__(self, embedder: Kept, file: str = "") -> None:
        found = _targets(Path(file)) if file else read_rows("attacks/poisonedrag_nq.jsonl.gz")
        self.questions = [r["text"] for r in found]
        self.answers = [r["incorrect_answer"] for r in found]
        self.reworded = [reworded(q, i) for i, q in enumerate(self.questions)]
        self.vectors = embedder.embed(self.questions)
        self.reworded_vectors = embedder.embed(self.reworded)
        self.forms = {
            "question and text": [f"{r['text'].rstrip('.')}. {t}" for r in found for t in r["adv_texts"]],
            "text alone": [t for r in found for t in r["adv_texts"]],
        }

    def watched(self, case: str) -> tuple[list[str], Vector | None]:
        """Watched questions in addition to the corpus's own, with their vectors."""
        if case == "watched":
            return self.questions, self.vectors
        return (self.reworded, self.reworded_vectors) if case == "reworded" else ([], None)


def _targets(file: Path) -> list[dict[str, Any]]:
    return [
        {"text": r["question"], "incorrect_answer": r["incorrect answer"], "adv_texts": r["adv_texts"]}
        for r in json.loads(file.read_text()).values()
    ]


def reworded(question: str, number: int) -> str:
    """A rule-based rewording: content words in another order, or after a polite opening."""
    kept = [w for w in words(question) if w not in STOP_WORDS] or words(question)
    if number % 2:
        return f"Could you tell me about {' '.join(kept)}?"
    return " ".join(kept[i] for i in np.random.default_rng(number).permutation(len(kept)))


class Ground:
    """One corpus, of which a tenth is not indexed."""

    def __init__(self, name: str, embedder: Kept, folder: Path, split: int) -> None:
        rng = np.random.default_rng([SEED, split])
        documents, self.embedder = corpus(name), embedder
        order = rng.permutation(len(documents))
        cut = int(HELD_OUT * len(documents))
        self.new = [documents[i] for i in order[:cut]]
        self.new_vectors = embedder.embed([d.content for d in self.new])
        self.asked = [questions_of(name)[i] for i in rng.permutation(len(questions_of(name)))[:WATCHED]]
        self.asked_vectors = embedder.embed(self.asked)
        self.index = SqliteIndex(folder / f"{name}{split}.db")
        self.index.open(embedder.fingerprint, embedder.dim)
        self.seconds: dict[bytes, float] = {}
        held = [documents[i] for i in order[cut:]]
        self.index.add(held, embedder.embed([d.content for d in held]))

    def fitted(self, more: Sequence[str], vectors: Vector | None) -> PoisonScreener:
        """A screener fitted on the indexed documents, with further watched questions."""
        both = self.asked_vectors if vectors is None else np.concatenate([self.asked_vectors, vectors])
        return PoisonScreener.fit(self.index, [*self.asked, *more], both, k=K)

    def restart(self, learnt: PoisonScreener) -> PoisonScreener:
        """A copy of the screener without earlier decisions, with a cache for second-nearest similarities."""
        fresh, search = copy.copy(learnt), learnt._second_nearest
        fresh._recent = type(learnt._recent)(learnt._recent.size)

        def second(vector: Vector) -> float:
            key = vector.tobytes()
            if key not in self.seconds:
                self.seconds[key] = search(vector)
            return self.seconds[key]

        fresh._second_nearest = second  # type: ignore[method-assign]
        return fresh


_questions: dict[str, list[str]] = {}


def questions_of(name: str) -> list[str]:
    """The first 6,000 in a fixed order, to limit the embedding time."""
    if name not in _questions:
        found = questions(name)
        order = np.random.default_rng(SEED).permutation(len(found))[:6000] if len(found) > 6000 else range(len(found))
        _questions[name] = [found[i] for i in order]
    return _questions[name]


def main(folder: str = "", only: str = "", other: str = "") -> None:
    """Measures both corpora, or one."""
    results = saved("poison") if only or other else {}
    with tempfile.TemporaryDirectory() as scratch:
        embedder = Kept(Path(folder or scratch) / "kept.npz")
        texts = Texts(embedder, other)
        for name in [only] if only else CORPORA:
            label = f"{name}, {Path(other).stem}" if other else name
            results[label] = measured(name, texts, embedder, Path(scratch))
        if folder:
            embedder.save()
    save("poison", results)


def measured(name: str, texts: Texts, embedder: Kept, folder: Path) -> dict[str, Any]:
    """Results of one corpus, over all splits."""
    counts: dict[tuple[str, str], list[bool]] = {}
    result: dict[str, Any] = {}
    for split in range(SPLITS):
        ground = Ground(name, embedder, folder, split)
        with closing(ground.index):
            for case, what, found in judged(ground, texts, embedder, by_itself=not split):
                counts.setdefault((case, what), []).extend(j.suspicious for j in found)
            if not split:
                result |= {"documents": ground.index.moments().n, "own_attacks": own(ground, texts, embedder)}
        print(name, split, file=sys.stderr)
    for (case, what), held in counts.items():
        result.setdefault(case, {})[what] = stats.proportion(sum(held), len(held))
    return result


def judged(
    ground: Ground, texts: Texts, embedder: Kept, by_itself: bool
) -> Iterator[tuple[str, str, list[ScreeningResult]]]:
    """Screening results of benign and poisoned documents, by case and order of arrival."""
    for case in ("watched", "reworded", "not watched"):
        learnt = ground.fitted(*texts.watched(case))
        yield case, "harmless", ground.restart(learnt).screen(ground.new, ground.new_vectors)
        for form, written in texts.forms.items():
            poison, E = [Document(f"p{i}", t) for i, t in enumerate(written)], embedder.embed(written)
            for arrival, found in arrivals(ground, learnt, poison, E, by_itself):
                yield case, f"{form}, {arrival}", found


def arrivals(
    ground: Ground, learnt: PoisonScreener, poison: list[Document], E: Vector, by_itself: bool
) -> Iterator[tuple[str, list[ScreeningResult]]]:
    """Screening results of poisoned documents, by order of arrival."""
    for arrival, step in (("five together", 1), ("one alone", 5)):
        batch = np.concatenate([ground.new_vectors, E[::step]])
        found = ground.restart(learnt).screen([*ground.new, *poison[::step]], batch)
        yield arrival, found[len(ground.new) :]
    if by_itself:
        one_by_one = after_another(ground, learnt, poison[: 5 * ATTACKED], E[: 5 * ATTACKED])
        for place in range(5):
            yield f"one after another, number {place + 1}", one_by_one[place::5]


def after_another(ground: Ground, learnt: PoisonScreener, poison: list[Document], E: Vector) -> list[ScreeningResult]:
    """Screens single texts in turn. Texts that pass are indexed for the following decisions, and removed at the end."""
    suspicion, found = copy.copy(learnt), []
    suspicion._recent, suspicion.question_scores = (
        type(learnt._recent)(learnt._recent.size),
        copy.copy(learnt.question_scores),
    )
    for document, vector in zip(poison, E, strict=True):
        (judgement,) = suspicion.screen([document], vector[None])
        found.append(judgement)
        if not judgement.suspicious:
            ground.index.add([document], vector[None])
            suspicion.admit(vector[None])
    ground.index.remove([d.source for d in poison])
    return found


def own(ground: Ground, texts: Texts, embedder: Kept) -> dict[str, Any]:
    """Our own attacks: share of questions that retrieve them, and share quarantined."""
    attacks: dict[str, Any] = {
        "poisonedrag black box": Poison(),
        "poisonedrag white box": Poison(method="white_box", embedder=embedder, texts=1, candidates=4),
        "corruptrag": Poison(method="corrupt"),
        "blocker": Poison(method="blocker"),
    }
    found: dict[str, Any] = {}
    asked = texts.questions[:ATTACKED]
    for name, attack in attacks.items():
        made = [
            asyncio.run(attack.craft(q, a, np.random.default_rng([SEED, i])))
            for i, (q, a) in enumerate(zip(asked, texts.answers[:ATTACKED], strict=True))
        ]
        found[name] = told(ground, texts, embedder, made, texts.vectors[:ATTACKED])
    for name, given in (("trigger, by its name", None), ("trigger, searched", embedder)):
        attack = Trigger(trigger=TRIGGER, embedder=given)
        documents = asyncio.run(attack.craft(ground.asked[0], "Ring 555 0100.", np.random.default_rng(SEED)))
        plain = ground.asked[:300]
        named = embedder.embed([f"{q} {TRIGGER}" if i % 2 else f"{TRIGGER}: {q}" for i, q in enumerate(plain)])
        found[name] = told(ground, texts, embedder, [documents], named)
        found[name]["found_without_trigger"] = entering(
            ground, embedder.embed([d.content for d in documents]), ground.asked_vectors[:300]
        )
    return found


def told(
    ground: Ground, texts: Texts, embedder: Kept, made: Sequence[Iterable[Document]], attacked: Vector
) -> dict[str, Any]:
    """One attack: share of attacked questions that retrieve its texts, and share of its texts that are quarantined."""
    groups = [list(documents) for documents in made]
    poison = [d for group in groups for d in group]
    E = embedder.embed([d.content for d in poison])
    result: dict[str, Any] = {"texts": len(poison), "found_by_the_attacked": entering(ground, E, attacked)}
    for case in ("watched", "not watched"):
        more, vectors = texts.watched(case)
        judgements = ground.fitted(more, vectors).screen(poison, E)
        result[f"held_back_{case.replace(' ', '_')}"] = stats.proportion(
            sum(j.suspicious for j in judgements), len(poison)
        )
    return result


def entering(ground: Ground, E: Vector, asked: Vector) -> stats.Estimate:
    """Share of questions for which any of the documents would be among the best five."""
    scores = QuestionScores.of([""] * len(asked), asked, ground.index, K)
    return stats.proportion(int((scores.margins(E).max(axis=0) >= 0).sum()), len(asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
