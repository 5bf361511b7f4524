"""Agreement of three judges of answer quality: contains-answer, token-F1, and a language model with a rubric.

A small real model answers questions of SQuAD. Three in four are asked with their own paragraph and one with another, so
that wrong answers occur. The judging language model is another, larger one. It sees the question, the accepted answers
and the given answer, but not the paragraph.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import DATA, SEED, read_rows
from benchmarks.real import files
from benchmarks.real.planning import READER
from benchmarks.real.questions import PROMPTS, prompt_row
from casemate.maths import stats
from casemate.papers.laboratory import relevant
from casemate.types import Document, Prompt

QUESTIONS = 240
OTHERS = 4
"""Every fourth question is asked with the paragraph of the question before."""
F1 = 0.5
"""Minimum token-F1 of a correct answer."""
RUBRIC = (
    "You check answers to questions. An answer is right if it states one of the accepted answers or means the same, "
    "also within a longer sentence. It is wrong if it states something else, or says that it does not know."
)
ASK = (
    "Question: {question}\nAccepted answers: {gold}\nGiven answer: {given}\nIs the given answer right? Write Yes or No."
)
ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True, slots=True)
class Case:
    """A question with its accepted answers and the row of the reader's prompt."""

    question: str
    gold: tuple[str, ...]
    row: dict[str, Any]


def cases() -> list[Case]:
    """The questions, in seeded order."""
    texts = {row["_id"]: (row["title"], row["text"]) for row in read_rows("squad/corpus.jsonl.gz")}
    asked = [row for row in read_rows("squad/queries.jsonl.gz") if row["answers"]]
    own = relevant(DATA / "squad/qrels.tsv")
    drawn = [asked[i] for i in np.random.default_rng(SEED).permutation(len(asked))[:QUESTIONS]]
    found = []
    for number, row in enumerate(drawn):
        source = own[(drawn[number - 1] if number % OTHERS == OTHERS - 1 else row)["_id"]]
        title, text = texts[source]
        prompt = prompt_row(Prompt(row["text"], (Document(source, text, title),), READER), 40)
        found.append(Case(row["text"], tuple(row["answers"]), prompt))
    return found


def judge_rows(answers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the judge's prompts file, in the order of the cases."""
    rows = []
    for case in cases():
        given = " ".join(answers[case.row["id"]].split())
        question = ASK.format(question=case.question, gold="; ".join(dict.fromkeys(case.gold)), given=given)
        row = prompt_row(Prompt("", (), ""), 4)
        rows.append(row | {"id": f"judge-{case.row['id']}", "system": RUBRIC, "parts": [], "user": question})
        rows[-1]["texts"] = {}
    return rows


def judge(work: Path, reader: str, judging: str) -> dict[str, Any]:
    """Rates of correct answers by judge, and Cohen's kappa of each pair with its 95 % interval.

    Args:
        work: Folder of the answers.
        reader: Name of the model that answered.
        judging: Name of the model that judges.
    """
    answers, about = files.read_answers(work / f"answers_quality_{reader}.jsonl.gz")
    said, about_judge = files.read_answers(work / f"answers_quality_judge_{judging}.jsonl.gz")
    verdicts: dict[str, list[bool]] = {"contains-answer": [], "token-F1": [], "model with a rubric": []}
    for case in cases():
        given = answers[case.row["id"]]
        verdicts["contains-answer"].append(any(contains(given, gold) for gold in case.gold))
        verdicts["token-F1"].append(max(token_f1(given, gold) for gold in case.gold) >= F1)
        verdicts["model with a rubric"].append(said[f"judge-{case.row['id']}"].lower().startswith("yes"))
    pairs = combinations(verdicts, 2)
    return {
        "reader": about,
        "judge": about_judge,
        "questions": QUESTIONS,
        "prompts": PROMPTS,
        "right": {name: stats.proportion(sum(found), len(found)) for name, found in verdicts.items()},
        "kappa": {f"{a}, {b}": _estimate(verdicts[a], verdicts[b]) for a, b in pairs},
    }


def _estimate(a: Sequence[bool], b: Sequence[bool]) -> stats.Estimate:
    codes = np.array(a) * 2 + np.array(b)
    return stats.bootstrap(lambda found, _: kappa(found >= 2, found % 2 == 1), codes, [0.0], SEED)


def kappa(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> float:
    """Cohen's kappa of two binary judges: 1 for equal judgements, 0 for chance.

    >>> kappa(np.array([True, True, False, False]), np.array([True, False, False, False]))
    0.5
    """
    agreed = float(np.mean(a == b))
    chance = float(a.mean() * b.mean() + (1 - a.mean()) * (1 - b.mean()))
    return (agreed - chance) / (1 - chance) if chance < 1 else 1.0


def contains(given: str, gold: str) -> bool:
    """Whether an answer contains an accepted answer as whole words.

    >>> contains("It was the Denver Broncos.", "denver broncos"), contains("In 19761.", "1976")
    (True, False)
    """
    return f" {' '.join(_tokens(gold))} " in f" {' '.join(_tokens(given))} "


def token_f1(given: str, gold: str) -> float:
    """Token-F1 of SQuAD (Rajpurkar et al. 2016): case, punctuation and articles do not count.

    >>> token_f1("The Denver Broncos won", "Denver Broncos")
    0.8
    """
    ours, theirs = Counter(_tokens(given)), Counter(_tokens(gold))
    common = sum((ours & theirs).values())
    return 2 * common / (sum(ours.values()) + sum(theirs.values())) if common else 0.0


def _tokens(text: str) -> list[str]:
    return ARTICLES.sub(" ", re.sub(r"[^\w\s]", "", text.lower())).split()
