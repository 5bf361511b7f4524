"""IA, the interrogation attack: natural yes/no questions that only the document answers.

Naseh, Peng, Suri, Chaudhari, Oprea and Houmansadr 2025, "Riddle Me This! Stealthy Membership Inference for
Retrieval-Augmented Generation", CCS (arXiv 2502.00306). Each question stands behind a short summary of the text, so
that the text is retrieved if it is there. Who has it answers rightly; who has it not does not know, or guesses.

Deviation: without a language model, summary and questions are made by rules. The summary is the title, or the beginning
of the most central sentence. A question is a clause of the text; in every second one a number, a name or the sense is
changed, so that its true answer is no. A text with few clauses gives fewer questions, at least three.
Deviation: with a writer, questions whose true answer the shadow does not know are left out: whatever is replied to
them says nothing. With fewer than three left, the questions are made by rules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np

from casemate.errors import ConfigError
from casemate.protocols import Generator, MembershipAttack
from casemate.types import Document, Probe, Prompt, Reply
from casemate.words import (
    COUNTS,
    NUMBER,
    OPPOSITES,
    WORD,
    abstains,
    clauses,
    content_words,
    headline,
    names,
)

REQUEST = "Answer Yes, No or I don't know."
FEWEST = 3
LONGEST = 40
"""Words of a clause at most: a longer one is cut."""
SUBJECT = 12
"""A subject of more words is not moved behind its verb."""

AUXILIARIES = frozenset("are can could has have had is may might must should was were will would".split())
SUBORDINATE = frozenset(
    "after although as because before how if since that what when where whether which while who whose".split()
)
PREPOSITIONS = frozenset("at by despite during for from in on to under with".split())
TRUE = "Is it true that {}?"
WRONG = ("Is it wrong that {}?", "Is it untrue to say that {}?")
YES_NO = re.compile(
    r"\byes,?\s*(?:or|/)?\s*no\b"
    r"|\b(yes|no)\b(?!\s+(?:relevant |such )?(?:information|mention|answer|data|details?|indication)\b)",
    re.IGNORECASE,
)
"""A yes or a no; not both in a row, which repeats the question, nor the no of "no information"."""
JOINING = frozenset("additionally also although and but furthermore however moreover thus whereas while".split())
ITEM = re.compile(r"^[\s\-*•]*(?:\d+[.):]\s*)?")

ABOUT = (
    "Name the subject of the document in one short phrase that holds its most telling terms. Write the phrase and "
    "nothing else; do not call it a document, text or study."
)
ASK = (
    "Write {count} questions, one on a line, that somebody who has read the document can answer with yes or no. Each "
    "is about another single fact: a number, a name, a method, a finding. For half of them the right answer is no. "
    "Keep abbreviations as they are. Do not speak of a document, text or study. Write nothing else."
)
JUDGE = "Answer from the document alone, with Yes, No or I don't know, and nothing else."

Fact: TypeAlias = tuple[str, str]
"""A question and its true answer."""


@dataclass(eq=False)
class Interrogation(MembershipAttack):
    """Asks many yes/no questions about single facts: right answers count for membership, not knowing against it.

    Attributes:
        questions: How many are asked at most, at least 3.
        penalty: lambda, at least 0: what "I don't know" costs, in right answers.
        summary: Whether the summary stands in front of each question.
        writer: A generator that writes summary and questions; none: rules.
        shadow: A generator that gives the true answers to the writer's questions, from the text; none: the writer.
    """

    questions: int = 30
    penalty: float = 5.0
    summary: bool = True
    writer: Generator | None = None
    shadow: Generator | None = None
    _names: tuple[str, ...] = field(default=(), init=False, repr=False)  # of the genre, to exchange others for

    paper: ClassVar[str] = "Naseh et al. 2025, arXiv 2502.00306"
    features: ClassVar[tuple[str, ...]] = ("score", "right", "known")

    def __post_init__(self) -> None:
        if self.questions < FEWEST or not 0 <= self.penalty < float("inf"):
            raise ConfigError(
                f"interrogation: questions={self.questions}, penalty={self.penalty}; "
                f"questions must be at least {FEWEST}, penalty finite and not negative"
            )

    def study(self, texts: Sequence[str]) -> None:
        """Collects the genre's names."""
        self._names = proper(" \n\n".join(texts))

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """One question per fact; the key holds their true answers, ``yes`` or ``no``. None for an empty text."""
        facts = await self._written(candidate)
        if len(facts) < FEWEST:
            facts = made(candidate.text or candidate.title, self.questions, self._names, rng)
        about = f"{await self._about(candidate)} " if self.summary and facts else ""
        questions = tuple(f"{about}{question} {REQUEST}" for question, _ in facts)
        return Probe(questions, {"truth": [truth for _, truth in facts]})

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Mean of [right] - penalty * [does not know], in [-penalty, 1]; share right; share that is not unknown."""
        truth = probe.key["truth"]
        if not truth:
            return (-self.penalty, 0.0, 0.0)
        told = [said(reply.text) for reply in replies]
        right = sum(a == b for a, b in zip(told, truth, strict=True)) / len(truth)
        unknown = told.count("unknown") / len(truth)
        return (right - self.penalty * unknown, right, 1 - unknown)

    async def _about(self, candidate: Document) -> str:
        """The summary, with a stop at its end."""
        written = await _generated(self.writer, ABOUT, candidate) if self.writer else ""
        about = (" ".join(written.split()) or headline(candidate.text, candidate.title)).rstrip(". ")
        return about if about.endswith(("?", "!")) else f"{about}."

    async def _written(self, candidate: Document) -> list[Fact]:
        """The writer's questions with the shadow's answers, as far as it has any; none without a writer."""
        if not self.writer:
            return []
        lines = (await _generated(self.writer, ASK.format(count=self.questions), candidate)).splitlines()
        asked = [q for q in (ITEM.sub("", line).strip() for line in lines) if q.endswith("?")][: self.questions]
        shadow = self.shadow or self.writer
        answers = [said(await _generated(shadow, question, candidate, JUDGE)) for question in asked]
        return [(q, a) for q, a in zip(asked, answers, strict=True) if a in ("yes", "no")]


async def _generated(generator: Generator, question: str, candidate: Document, instructions: str = "") -> str:
    """What a generator writes with the candidate before it."""
    return "".join([piece async for piece in generator.stream(Prompt(question, (candidate,), instructions))])


def said(reply: str) -> str:
    """What a reply says: ``yes``, ``no``, ``unknown``, or nothing of the kind. The first yes or no counts.

    >>> [said(reply) for reply in ("**Yes**, it is", "There is no mention of it.", "I don't", "Perhaps")]
    ['yes', 'unknown', 'unknown', '']
    """
    for match in YES_NO.finditer(reply):
        if match[1]:
            return match[1].lower()
    return "unknown" if abstains(reply) else ""


def made(text: str, count: int, genre: Sequence[str], rng: np.random.Generator) -> list[Fact]:
    """Questions by rules, half of them with the true answer no, in random order.

    Args:
        text: What they are about.
        count: How many at most.
        genre: Names to exchange the text's own for.
        rng: Chooses clauses, changes and order.

    Returns:
        As many as the clauses give, at least three; none if the text has no words.
    """
    parts = [" ".join(c.split()[:LONGEST]).rstrip(",;:") for c in dict.fromkeys(clauses(text))]
    telling = [c for c in parts if len(content_words(c)) >= 4] or [c for c in parts if WORD.search(c)]
    own = proper(text)
    order = [telling[i] for i in rng.permutation(len(telling))]
    true = [(asked(clause, own), "yes") for clause in order]
    changed = [[(q, "no") for q in _changed(clause, own, genre, rng)] for clause in order]
    false = [facts[depth] for depth in range(5) for facts in changed if depth < len(facts)]
    half = min(len(true), count // 2)
    facts = true[:half] + false[: max(half, FEWEST - half)]
    return [facts[i] for i in rng.permutation(len(facts))]


def proper(text: str) -> tuple[str, ...]:
    """The names in a text that it never writes in lower case, sorted."""
    plain = set(WORD.findall(text))
    return tuple(sorted(name for name in set(names(text)) if name.lower() not in plain))


def _changed(clause: str, own: Sequence[str], genre: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Questions that a clause makes untrue: another number, another name, the contrary, in random order."""
    changed = (_other_number(clause, rng), _other_name(clause, own, genre, rng))
    facts = [asked(c, own) for c in changed if c]
    if contrary := reversed_sense(clause):
        facts.append(TRUE.format(_begun(contrary, own)))
    return [
        *(facts[i] for i in rng.permutation(len(facts))),
        *(frame.format(_begun(clause, own)) for frame in WRONG),
    ]


def asked(clause: str, own: Collection[str]) -> str:
    """A clause as a question: its verb in front where it is an auxiliary near the beginning.

    Args:
        clause: A statement.
        own: Names, which keep their capital.

    >>> asked("The north bridge was closed in May", []), asked("Tolls doubled", ["Tolls"])
    ('Was the north bridge closed in May?', 'Is it true that Tolls doubled?')
    """
    said = clause.split()
    for i, word in enumerate(said[: SUBJECT + 1]):
        if i and word in AUXILIARIES and said[i - 1] not in ("and", "but", "or"):
            return f"{word.capitalize()} {_begun(' '.join(said[:i]), own)} {' '.join(said[i + 1 :])}?"
        opens = word.lower() in SUBORDINATE or (not i and word.lower() in PREPOSITIONS)
        if opens or word in AUXILIARIES or word[-1] in ",;:)" or word[0] == "(":
            break
    return TRUE.format(_begun(clause, own))


def _begun(clause: str, own: Collection[str]) -> str:
    """The clause as it reads behind other words: without a joining word, in lower case unless a name begins it."""
    first, _, rest = clause.partition(" ")
    if rest and first.lower().rstrip(",") in JOINING:
        return _begun(rest, own)
    name = first in own or first == "I" or not first[1:].islower()
    return clause if name and len(first) > 1 else clause[0].lower() + clause[1:]


def _other_number(clause: str, rng: np.random.Generator) -> str:
    """The clause with one of its numbers changed; empty if it has none."""
    places = list(NUMBER.finditer(clause))
    counts = [m for m in WORD.finditer(clause) if m[0].lower() in COUNTS]
    if not places and not counts:
        return ""
    place = (places or counts)[int(rng.integers(len(places or counts)))]
    new = _number(place[0], rng) if places else _count(place[0], rng)
    return clause[: place.start()] + new + clause[place.end() :]


def _number(old: str, rng: np.random.Generator) -> str:
    """Another number of the same kind: a year stays near, the rest is about halved or doubled."""
    grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})+", old) is not None
    plain = old.replace(",", "") if grouped else old.replace(",", ".")
    decimals = plain.partition(".")[2]
    if "." in decimals or len(plain) > 15:  # a date, a version, an identifier
        return f"{old[:-1]}{(int(old[-1]) + int(rng.integers(1, 9))) % 10}"
    value = float(plain)
    if not decimals and not grouped and 1500 <= value <= 2100:
        return str(int(value) + int(rng.integers(3, 12)))
    form = f"{',' if grouped else ''}.{len(decimals)}f"
    new = value * float(rng.choice([0.4, 0.6, 1.6, 2.3]))
    if format(new, form) in (format(value, form), format(0.0, form)):
        new = value + float(rng.integers(2, 6)) / 10 ** len(decimals)
    return format(new, form)


def _count(old: str, rng: np.random.Generator) -> str:
    """Another number in words."""
    options = [word for word in COUNTS if word != old.lower()]
    return str(rng.choice(options[:10]))


def _other_name(clause: str, own: Sequence[str], genre: Sequence[str], rng: np.random.Generator) -> str:
    """The clause with one of its names exchanged for one of the genre that looks alike; empty if that cannot be."""
    here = [word for word in WORD.findall(clause) if word in own]
    if not here:
        return ""
    old = here[int(rng.integers(len(here)))]
    options = [n for n in genre if n not in own and (n.isupper(), n.istitle()) == (old.isupper(), old.istitle())]
    if not options:
        return ""
    return re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", str(rng.choice(options)), clause)


def reversed_sense(clause: str) -> str:
    """The contrary of a clause: "not" behind its first auxiliary, or taken away there; else one opposite word.

    >>> reversed_sense("The bridge was not closed"), reversed_sense("Tolls rose after May"), reversed_sense("It rained")
    ('The bridge was closed', 'Tolls rose before May', '')
    """
    said = clause.split()
    for i, word in enumerate(said[:-1]):
        if word in AUXILIARIES and not (word in ("has", "have", "had") and said[i + 1] in ("a", "an", "the")):
            rest = said[i + 1 :]
            return " ".join([*said[: i + 1], *(rest[1:] if rest[0] in ("not", "no") else ["not", *rest])])
    for i, word in enumerate(said):
        if word in OPPOSITES:
            return " ".join([*said[:i], OPPOSITES[word], *said[i + 1 :]])
    return ""
