"""Questions whose answer several documents state: a synthetic collection of known redundancy, and SQuAD.

Synthetic: r documents state each fact in varied wording, between other sentences. SQuAD: r is the number of the best
``AMONG`` passages that contain a gold answer as whole words; not all of them state it. ``stated`` counts those in which
one sentence, with the title, contains it and at least half of the question's content words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import SEED, read_rows
from benchmarks.kept import Kept, corpus
from casemate.maths.metrics import exact_match
from casemate.text.answering import Question
from casemate.text.sentences import sentences
from casemate.text.tokens import content_words
from casemate.types import Document, Vector

REDUNDANCY = (1, 2, 3, 5, 8, 12, 16, 20)
AMONG = 24
FLOOR = 0.3
STATEMENTS = (
    "The {kind} of {place} was built in {year} by {person}.",
    "In {year}, {person} built the {kind} of {place}.",
    "{person} is known as the builder of the {kind} in {place}; it was finished in {year}.",
    "Visitors to {place} should see the {kind}, built by {person} in {year}.",
    "According to the chronicle, the {kind} of {place} dates from {year}, and {person} built it.",
    "It was {person} who built the {kind} of {place}, in {year}.",
    "Built in {year}, the {kind} of {place} is the work of {person}.",
    "A plaque in {place} names {person} as the builder of the {kind} and {year} as its year.",
    "The town of {place} had {person} build a {kind}, which was ready in {year}.",
    "When {person} built the {kind} of {place} in {year}, the old one was taken down.",
)
SUBJECTS = "ferry|market|orchard|school|chapel|tannery|weaver|forge|quarry|garden|inn|guild".split("|")
VERBS = "supplied|rented|painted|measured|guarded|moved|repaired|sold|described|planted|closed|extended".split("|")
OBJECTS = "ropes|barrels|lanterns|stables|maps|cellars|fences|wagons|clocks|ovens|benches|ponds|kilns|nets".split("|")
SEASONS = "spring|summer|autumn|winter|wartime|peace|drought|flood|frost|harvest".split("|")


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        id: Its id.
        question: The text.
        answers: Accepted answers.
        false: The attacker's false answer. No passage contains it.
        r: Redundancy.
        stated: Number of passages in which one sentence answers the question, by words; None: unknown.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    false: str
    r: int
    stated: int | None = None


def names(rng: np.random.Generator, count: int) -> list[str]:
    """Invented names of two syllables, capitalized."""
    heads, middles, tails = "b d f g k l m n p r s t v".split(), "a e i o u".split(), "lan mor nis rek tav vin".split()
    return ["".join(rng.choice(part) for part in (heads, middles, tails)).capitalize() for _ in range(count)]


def synthetic(facts: int, redundancy: Sequence[int] = REDUNDANCY) -> tuple[list[Document], list[Case]]:
    """Documents, and two questions about each fact: person and year.

    Args:
        facts: Facts for each r.
        redundancy: The values of r.
    """
    rng = np.random.default_rng(SEED)
    documents, cases = [], []
    for r in redundancy:
        for i in range(facts):
            kind = ("bridge", "mill", "harbor", "library", "theater")[i % 5]
            place, person, false = names(rng, 3)
            year, other = rng.choice(np.arange(1500, 1950), 2, replace=False)
            fact = {"kind": kind, "place": f"{place}ford", "person": f"{person}son", "year": str(year)}
            name = f"r{r}-{i}"
            documents += [Document(f"{name}-{j}", _stated(fact, rng)) for j in range(r)]
            who = f"Who built the {kind} of {place}ford?"
            when = f"When was the {kind} of {place}ford built?"
            cases.append(Case(f"{name}-who", who, (fact["person"],), f"{false}berg", r, r))
            cases.append(Case(f"{name}-when", when, (fact["year"],), str(other), r, r))
    return documents, cases


def _stated(fact: dict[str, str], rng: np.random.Generator) -> str:
    """A text that states a fact between other sentences."""
    stated = str(rng.choice(STATEMENTS)).format(**fact)
    parts = [_aside(rng), _aside(rng)]
    parts.insert(int(rng.integers(3)), stated)
    return " ".join(parts)


def _aside(rng: np.random.Generator) -> str:
    owner = names(rng, 1)[0]
    subject, verb, season = (str(rng.choice(part)) for part in (SUBJECTS, VERBS, SEASONS))
    first, second = rng.choice(OBJECTS, 2, replace=False)
    return f"The {subject} of {owner} {verb} {first} and {second} in {season}."


def squad(embedder: Kept, each: int, bins: Sequence[tuple[int, int]], sample: int = 3000) -> list[Case]:
    """SQuAD's questions by redundancy.

    Args:
        embedder: Embeds passages and questions.
        each: Questions for each bin.
        bins: Lowest and highest r of each bin.
        sample: Number of examined questions, in seeded order.
    """
    documents = corpus("squad")
    vectors = embedder.embed([d.content for d in documents])
    found = read_rows("squad/queries.jsonl.gz")
    rng = np.random.default_rng(SEED)
    drawn = [found[i] for i in rng.permutation(len(found))[:sample]]
    asked = [row for row in drawn if any(_is_distinctive(answer) for answer in row["answers"])]
    near = _near(embedder.embed([row["text"] for row in asked]), vectors)
    pool = list(dict.fromkeys(answer for row in drawn for answer in row["answers"] if _is_distinctive(answer)))
    taken: Counter[tuple[int, int]] = Counter()
    cases = []
    for row, places in zip(asked, near, strict=True):
        passages = [documents[i].text for i in places]
        stated = sum(_states(documents[i], row) for i in places)
        r = sum(exact_match(text, row["answers"]) for text in passages)
        place = next((b for b in bins if b[0] <= r <= b[1]), None)
        if place is None or taken[place] >= each:
            continue
        false = _other_answer(row, pool, passages, rng)
        if false:
            taken[place] += 1
            cases.append(Case(row["_id"], row["text"], tuple(dict.fromkeys(row["answers"])), false, r, stated))
    return cases


def _near(asked: Vector, vectors: Vector) -> Iterator[Iterable[int]]:
    for vector in asked:
        scores = vectors @ vector
        best = np.argsort(-scores, kind="stable")[:AMONG]
        yield [int(i) for i in best if scores[i] >= FLOOR]


def _states(passage: Document, row: Mapping[str, Any]) -> bool:
    """Whether one sentence contains a gold answer and, with the title, half of the question's content words."""
    asked, title = content_words(row["text"]), content_words(passage.title)
    return any(
        exact_match(s, row["answers"]) and 2 * len((content_words(s) | title) & asked) >= len(asked)
        for s in sentences(passage.text)
    )


def _is_distinctive(answer: str) -> bool:
    """Whether a passage is unlikely to contain an answer by chance: a name or a number of at least three characters."""
    return len(answer) >= 3 and len(answer.split()) <= 4 and (answer[0].isupper() or answer[0].isdigit())


def _other_answer(row: dict, pool: Sequence[str], passages: Sequence[str], rng: np.random.Generator) -> str:
    """Another question's answer of the same type that neither a passage nor the question contains; empty: none."""
    kind = Question(row["text"]).type
    wanted = None if kind is None else kind.contained
    digit = row["answers"][0][0].isdigit()
    for i in rng.permutation(len(pool))[:200]:
        answer = pool[i]
        fits = answer[0].isdigit() == digit and (wanted is None or wanted.search(f"It was in {answer}."))
        if fits and not exact_match(" ".join([row["text"], *row["answers"], *passages]), [answer]):
            return answer
    return ""
