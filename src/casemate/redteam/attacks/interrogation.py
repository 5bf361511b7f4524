"""IA, the interrogation attack: natural yes/no questions that only the document answers.

Naseh, Peng, Suri, Chaudhari, Oprea and Houmansadr 2025, "Riddle Me This! Stealthy Membership Inference for
Retrieval-Augmented Generation", CCS (arXiv 2502.00306). A short summary of the text precedes each question, so a member
is retrieved. With the document a model answers correctly; without it, the model does not know or guesses.

Deviation: without a language model, rules write summary and questions. The summary is the title, or the beginning of
the most central sentence. A question is a clause of the text. In every second one a number, a name or the sense is
changed, so its true answer is no. A text with few clauses gives fewer questions, at least three.
Deviation: with a writer, questions whose true answer the shadow model does not know are dropped: their replies carry no
information. If fewer than three remain, rules write the questions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np

from casemate.errors import require_range
from casemate.protocols import Generator, MembershipAttack
from casemate.redteam.crawling.writer import generate, summarize, write_questions
from casemate.text.refusals import is_refusal
from casemate.text.sentences import clauses, proper_nouns
from casemate.text.tokens import ANTONYMS, NUMBER, NUMBER_WORDS, WORD, content_words
from casemate.types import Document, Probe, Reply

REQUEST = "Answer Yes, No or I don't know."
MIN_QUESTIONS = 3
MAX_CLAUSE_WORDS = 40  # longest clause in words; longer ones are cut
MAX_SUBJECT_WORDS = 12  # longest subject in words that moves behind its verb

AUXILIARIES = frozenset("are can could has have had is may might must should was were will would".split())
SUBORDINATE = frozenset(
    "after although as because before how if since that what when where whether which while who whose".split()
)
PREPOSITIONS = frozenset("at by despite during for from in on to under with".split())
TRUE_QUESTION = "Is it true that {}?"
FALSE_QUESTIONS = ("Is it wrong that {}?", "Is it untrue to say that {}?")
YES_NO = re.compile(
    r"\byes,?\s*(?:(?:or|/)\s*)?no\b"
    r"|\b(yes|no)\b(?!\s+(?:relevant |such )?(?:information|mention|answer|data|details?|indication)\b)",
    re.IGNORECASE,
)
"""A yes or a no. Excludes both in a row, which repeats the question, and the no of "no information"."""
CONJUNCTIONS = frozenset("additionally also although and but furthermore however moreover thus whereas while".split())

ASK = (
    "Write {count} questions, one on a line, that a reader of the document can answer with yes or no. Each "
    "is about another single fact: a number, a name, a method, a finding. For half of them the right answer is no. "
    "Keep abbreviations as they are. Do not speak of a document, text or study. Write nothing else."
)
SHADOW_INSTRUCTIONS = "Answer from the document alone, with Yes, No or I don't know, and nothing else."

Fact: TypeAlias = tuple[str, str]  # a question and its true answer


@dataclass(eq=False)
class Interrogation(MembershipAttack):
    """Asks many yes/no questions about single facts. Correct answers count for membership, unknown ones against it.

    Attributes:
        questions: Most questions, at least 3.
        penalty: lambda, at least 0: cost of "I don't know" in correct answers.
        summary: Whether the summary precedes each question.
        writer: Generator that writes summary and questions. None: rules.
        shadow: Shadow model, which answers the writer's questions from the text. None: the writer.
    """

    questions: int = 30
    penalty: float = 5.0
    summary: bool = True
    writer: Generator | None = None
    shadow: Generator | None = None
    _names: tuple[str, ...] = field(default=(), init=False, repr=False)  # of the genre, to replace others

    paper: ClassVar[str] = "Naseh et al. 2025, arXiv 2502.00306"
    features: ClassVar[tuple[str, ...]] = ("score", "correct", "known")

    def __post_init__(self) -> None:
        require_range("interrogation", self, "questions", at_least=MIN_QUESTIONS)
        require_range("interrogation", self, "penalty", at_least=0)

    def study(self, texts: Sequence[str]) -> None:
        """Collects names of the genre."""
        self._names = proper_names(" \n\n".join(texts))

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """One question per fact; the key holds the true answers, ``yes`` or ``no``. Empty for an empty text."""
        facts = await self._writer_questions(candidate)
        if len(facts) < MIN_QUESTIONS:
            facts = rule_questions(candidate.text or candidate.title, self.questions, self._names, rng)
        summary = f"{await summarize(self.writer, candidate)} " if self.summary and facts else ""
        questions = tuple(f"{summary}{question} {REQUEST}" for question, _ in facts)
        return Probe(questions, {"truth": [truth for _, truth in facts]})

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Mean of [correct] - penalty * [unknown], in [-penalty, 1]; share correct; share not unknown."""
        truth = probe.key["truth"]
        if not probe.questions:
            return (-self.penalty, 0.0, 0.0)
        answers = [yes_no_answer(reply.text) for reply in replies]
        correct = sum(a == b for a, b in zip(answers, truth, strict=True)) / len(truth)
        unknown = answers.count("unknown") / len(truth)
        return (correct - self.penalty * unknown, correct, 1 - unknown)

    async def _writer_questions(self, candidate: Document) -> list[Fact]:
        """The writer's questions with the shadow model's answers. Empty without a writer."""
        asked = await write_questions(self.writer, ASK, self.questions, candidate)
        if not (shadow := self.shadow or self.writer):
            return []
        answers = [yes_no_answer(await generate(shadow, q, candidate, instructions=SHADOW_INSTRUCTIONS)) for q in asked]
        return [(q, a) for q, a in zip(asked, answers, strict=True) if a in ("yes", "no")]


def yes_no_answer(reply: str) -> str:
    """Classifies a reply: ``yes``, ``no``, ``unknown`` or empty. The first yes or no counts.

    >>> [yes_no_answer(reply) for reply in ("**Yes**, it is", "There is no mention of it.", "I don't", "Perhaps")]
    ['yes', 'unknown', 'unknown', '']
    """
    for match in YES_NO.finditer(reply):
        if match[1]:
            return match[1].lower()
    return "unknown" if is_refusal(reply) else ""


def rule_questions(text: str, count: int, genre: Sequence[str], rng: np.random.Generator) -> list[Fact]:
    """Rule-based questions, half of them with the true answer no, in random order; at least three, one a clause.

    ``genre`` provides names that replace those of the text. Empty if the text has no words.
    """
    parts = [" ".join(c.split()[:MAX_CLAUSE_WORDS]).rstrip(",;:") for c in dict.fromkeys(clauses(text))]
    informative = [c for c in parts if len(content_words(c)) >= 4] or [c for c in parts if WORD.search(c)]
    own = proper_names(text)
    order = [informative[i] for i in rng.permutation(len(informative))]
    true = [(as_question(clause, own), "yes") for clause in order]
    changed = [[(q, "no") for q in _contradictions(clause, own, genre, rng)] for clause in order]
    false = [facts[depth] for depth in range(5) for facts in changed if depth < len(facts)]
    half = min(len(true), count // 2)
    facts = true[:half] + false[: max(half, MIN_QUESTIONS - half)]
    return [facts[i] for i in rng.permutation(len(facts))]


def proper_names(text: str) -> tuple[str, ...]:
    """Names in a text that never occur in lower case, sorted."""
    plain = set(WORD.findall(text))
    return tuple(sorted(name for name in set(proper_nouns(text)) if name.lower() not in plain))


def _contradictions(clause: str, own: Sequence[str], genre: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Questions that contradict a clause: another number, another name or the opposite, in random order."""
    changed = (_replace_number(clause, rng), _replace_name(clause, own, genre, rng))
    facts = [as_question(c, own) for c in changed if c]
    if contrary := negated_clause(clause):
        facts.append(TRUE_QUESTION.format(_continuation(contrary, own)))
    return [
        *(facts[i] for i in rng.permutation(len(facts))),
        *(frame.format(_continuation(clause, own)) for frame in FALSE_QUESTIONS),
    ]


def as_question(clause: str, own: Collection[str]) -> str:
    """Turns a clause into a question: an auxiliary verb near its beginning moves to the front. ``own``: names.

    >>> as_question("The north bridge was closed in May", []), as_question("Tolls doubled", ["Tolls"])
    ('Was the north bridge closed in May?', 'Is it true that Tolls doubled?')
    """
    tokens = clause.split()
    for i, word in enumerate(tokens[: MAX_SUBJECT_WORDS + 1]):
        if i and word in AUXILIARIES and tokens[i - 1] not in ("and", "but", "or"):
            return f"{word.capitalize()} {_continuation(' '.join(tokens[:i]), own)} {' '.join(tokens[i + 1 :])}?"
        opens = word.lower() in SUBORDINATE or (not i and word.lower() in PREPOSITIONS)
        if opens or word in AUXILIARIES or word[-1] in ",;:)" or word[0] == "(":
            break
    return TRUE_QUESTION.format(_continuation(clause, own))


def _continuation(clause: str, own: Collection[str]) -> str:
    """The clause as a continuation: without a conjunction, in lower case unless it begins with a name."""
    first, _, rest = clause.partition(" ")
    if rest and first.lower().rstrip(",") in CONJUNCTIONS:
        return _continuation(rest, own)
    name = first in own or first == "I" or not first[1:].islower()
    return clause if name and len(first) > 1 else clause[0].lower() + clause[1:]


def _replace_number(clause: str, rng: np.random.Generator) -> str:
    """The clause with one number changed; empty if it has none."""
    places = list(NUMBER.finditer(clause))
    counts = [m for m in WORD.finditer(clause) if m[0].lower() in NUMBER_WORDS]
    if not places and not counts:
        return ""
    place = (places or counts)[int(rng.integers(len(places or counts)))]
    new = _other_number(place[0], rng) if places else _other_count(place[0], rng)
    return clause[: place.start()] + new + clause[place.end() :]


def _other_number(old: str, rng: np.random.Generator) -> str:
    """Another number of the same kind: years change little, others are about halved or doubled."""
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


def _other_count(old: str, rng: np.random.Generator) -> str:
    """Another number, written in words."""
    options = [word for word in NUMBER_WORDS if word != old.lower()]
    return str(rng.choice(options[:10]))


def _replace_name(clause: str, own: Sequence[str], genre: Sequence[str], rng: np.random.Generator) -> str:
    """The clause with one name replaced by a similar name of the genre; empty if impossible."""
    here = [word for word in WORD.findall(clause) if word in own]
    if not here:
        return ""
    old = here[int(rng.integers(len(here)))]
    options = [n for n in genre if n not in own and (n.isupper(), n.istitle()) == (old.isupper(), old.istitle())]
    if not options:
        return ""
    return re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", str(rng.choice(options)), clause)


def negated_clause(clause: str) -> str:
    """The opposite of a clause: "not" is inserted or removed after its first auxiliary, or a word becomes its opposite.

    >>> [negated_clause(c) for c in ("The bridge was not closed", "Tolls rose after May", "It rained")]
    ['The bridge was closed', 'Tolls rose before May', '']
    """
    tokens = clause.split()
    for i, word in enumerate(tokens[:-1]):
        if word in AUXILIARIES and not (word in ("has", "have", "had") and tokens[i + 1] in ("a", "an", "the")):
            rest = tokens[i + 1 :]
            return " ".join([*tokens[: i + 1], *(rest[1:] if rest[0] in ("not", "no") else ["not", *rest])])
    for i, word in enumerate(tokens):
        if word in ANTONYMS:
            return " ".join([*tokens[:i], ANTONYMS[word], *tokens[i + 1 :]])
    return ""
