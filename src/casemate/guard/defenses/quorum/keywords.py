"""What one unit states about a question: keywords, their forms, and pairs of neighboring keywords."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from casemate.text.answering import TYPES, Question
from casemate.text.sentences import sentences
from casemate.text.tokens import STOP_WORDS, stem
from casemate.types import Document

NEGATIONS = frozenset("no not never none neither nor without cannot".split())
FUNCTION_WORDS = STOP_WORDS - NEGATIONS
"""Words that carry no content. A negation does: it must be released like any other word."""
TOKEN = re.compile(r"\d+(?:[.,]\d+)*%?(?![^\W_])|[^\W_]+(?:['’.-][^\W_]+)*")
"""A number with separators and percent sign, or a word."""
MARKUP = re.compile(r"^[\s#>*+•|-]+|[*_`|]+")
MIN_COVERAGE = 0.5
"""Share of the question's words that a unit must contain to be heard. Below, it abstains. With a smaller share, more
questions are answered, and more answers depend on a single unit."""
NAME_WEIGHT = 3
"""Weight of a name or number in that share: a unit about another bridge shares all words but the name."""
LEADS = 2
"""Leading keywords of a unit."""
MAX_SENTENCES = 64
"""Sentences of a unit that are considered."""
CACHED_TEXTS = 4096


class Word(NamedTuple):
    """A keyword: a lemma, a number, or a name of several words as a whole."""

    lemma: str
    kind: Literal["word"] = "word"


class Lead(NamedTuple):
    """A keyword that is among the ``LEADS`` best of a unit. Released ones come first in the answer."""

    lemma: str
    kind: Literal["lead"] = "lead"


class Form(NamedTuple):
    """The spelling of a keyword: letter case and plural."""

    lemma: str
    written: str
    kind: Literal["form"] = "form"


class Pair(NamedTuple):
    """Two content words that follow each other in one sentence, whatever function words stand between them."""

    first: str
    second: str
    kind: Literal["pair"] = "pair"


class Gap(NamedTuple):
    """The function words between the two words of a pair."""

    first: str
    between: str
    second: str
    kind: Literal["gap"] = "gap"


Item: TypeAlias = Word | Lead | Form | Pair | Gap


class Token(NamedTuple):
    """A content word of a sentence.

    Attributes:
        lemma: See ``lemma``.
        written: As written.
        before: Function words between the previous content word and this one, lower case.
        breaks: Whether punctuation separates it from the previous content word.
        stems: Stems of its words, for comparison with the question.
        named: Whether it is a number, or capitalized inside a sentence.
    """

    lemma: str
    written: str
    before: str
    breaks: bool
    stems: frozenset[str]
    named: bool


@dataclass(frozen=True)
class Sentence:
    """A sentence as content words. Its tokens are parsed on first use: most sentences are compared by stems only.

    Attributes:
        text: The text.
    """

    text: str

    @cached_property
    def stems(self) -> frozenset[str]:
        """Stems of the words of its tokens."""
        first, *others = TOKEN.findall(self.text) or [""]
        lower = {word.lower() for word in others if word[0].isupper()}
        lower |= {first.lower(), *map(str.lower, others)} - FUNCTION_WORDS
        return frozenset(map(stem, lower - {""}))

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """Its content words. Capitalized words that follow each other are one token."""
        return tuple(_tokens(self.text))


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question with everything that sentences are compared with.

    Attributes:
        stems: Stems of its content words.
        names: Those of names and numbers.
        lemmas: Its lemmas: words that an answer may repeat.
        type: Position of the expected type of answer in ``answering.TYPES``; None: open.
        lower: The text in lower case.
    """

    stems: frozenset[str]
    names: frozenset[str]
    lemmas: frozenset[str]
    type: int | None
    lower: str

    @classmethod
    def of(cls, text: str) -> AskedQuestion:
        """Reads a question."""
        tokens = [t for s in sentences(text) for t in Sentence(s).tokens]
        kind = Question(text).type
        place = None if kind is None else TYPES.index(kind)
        lemmas = {t.lemma for t in tokens} | {lemma(w) for t in tokens for w in t.written.split()}
        stems = frozenset().union(*(t.stems for t in tokens))
        names = frozenset().union(*(t.stems for t in tokens if t.named))
        return cls(stems, names, frozenset(lemmas), place, text.lower())

    def coverage(self, stems: frozenset[str]) -> float:
        """Returns the share of its words among some stems, in [0, 1]; names and numbers weigh ``NAME_WEIGHT``."""
        found, most = (len(x) + (NAME_WEIGHT - 1) * len(x & self.names) for x in (stems & self.stems, self.stems))
        return found / most if most else 0.0

    def has_names(self, stems: frozenset[str]) -> bool:
        """Whether at least half of its names and numbers are among some stems, if it has any."""
        return 2 * len(stems & self.names) >= len(self.names)

    def repeats(self, token: Token) -> bool:
        """Whether a token consists of words of the question."""
        return token.stems <= self.stems

    def contains(self, name: str) -> bool:
        """Whether a lemma consists of words of the question, in any inflection."""
        return name in self.lemmas or all(stem(word) in self.stems for word in name.split())

    def expects(self, text: str) -> frozenset[str]:
        """The lower-case words of a text that match the expected type of answer, and are not in the question."""
        if self.type is None:
            return frozenset()
        found = (m[0].lower() for m in TYPES[self.type].contained.finditer(text))
        return frozenset(w for match in found if match not in self.lower for w in TOKEN.findall(match))


def lemma(word: str) -> str:
    """Returns the lemma of a word: lower case, without plural ending (after Harman 1991). Numbers stay as they are.

    >>> [lemma(w) for w in ("Tolls", "policies", "boxes", "virus", "glass", "1,200", "analysis", "New York")]
    ['toll', 'policy', 'box', 'virus', 'glass', '1200', 'analysis', 'new york']
    """
    low = word.lower().replace("’", "'")
    if low[0].isdigit():
        return re.sub(r",(?=\d{3}\b)", "", low)
    low = low.removesuffix("'s")
    if len(low) > 4 and low.endswith("ies"):
        return f"{low[:-3]}y"
    if len(low) > 4 and low.endswith(("xes", "zes", "ches", "shes", "sses")):
        return low[:-2]
    if len(low) > 3 and low.endswith("s") and not low.endswith(("ss", "us", "is", "'s")):
        return low[:-1]
    return low


@lru_cache(maxsize=CACHED_TEXTS)
def read_text(text: str, questions: bool = False) -> tuple[Sentence, ...]:
    """Splits a text into sentences of content words; without questions, unless ``questions``. Cached."""
    plain = (" ".join(MARKUP.sub("", s).split()) for s in sentences(text))
    found = (Sentence(s) for s in plain if questions or not s.endswith("?"))
    return tuple(islice((s for s in found if s.stems), MAX_SENTENCES))


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    before: list[str] = []
    run: list[str] = []  # words of the present name
    breaks, end, run_starts = False, 0, False
    for position, match in enumerate(TOKEN.finditer(text)):
        written, between = match[0], text[end : match.start()]
        end = match.end()
        capital = written[0].isupper() and not (position == 0 and written.lower() in FUNCTION_WORDS)
        if run and capital and between == " ":
            run.append(written)
            continue
        if run:
            tokens.append(_token(run, before, breaks, run_starts))
            run, before, breaks = [], [], False
        breaks = breaks or bool(between.strip(" '\"“”‘’"))
        if capital:
            run, run_starts = [written], position == 0
        elif written.lower() in FUNCTION_WORDS:
            before.append(written.lower())
        else:
            tokens.append(_token([written], before, breaks, True))
            before, breaks = [], False
    if run:
        tokens.append(_token(run, before, breaks, run_starts))
    return tokens


def _token(run: Sequence[str], before: Sequence[str], breaks: bool, starts: bool) -> Token:
    words = [_word(written) for written in run]
    name = " ".join([*(written.lower() for written in run[:-1]), words[-1].lemma])
    stems = words[0].stems if len(run) == 1 else frozenset().union(*(word.stems for word in words))
    named = not starts or len(run) > 1 or words[0].named
    return Token(name, " ".join(run), " ".join(before), breaks, stems, named)


@lru_cache(maxsize=1 << 16)
def _word(written: str) -> Token:
    """A word as a token of its own, at the start of a sentence. Cached: texts share most words."""
    named = written[0].isdigit() or any(c.isupper() for c in written[1:])
    return Token(lemma(written), written, "", False, frozenset((stem(written.lower()),)), named)


def best_sentences(question: AskedQuestion, text: str, title: str, most: int) -> tuple[Sentence, ...]:
    """Returns the sentences of a unit that answer the question best, in reading order; none: the unit abstains.

    A sentence scores by the share of the question's words that it contains, half of what its neighbors add, and
    whether it contains the expected type of answer. Depends on this unit and the question alone.
    """
    found = read_text(text)
    heading = _heading(title)
    if not found or question.coverage(heading.union(*(s.stems for s in found))) < MIN_COVERAGE:
        return ()
    ranked = _ranked(question, found, heading)
    chosen = sorted(i for worth, i in ranked[:most] if worth > 0)
    return tuple(found[i] for i in chosen)


def excerpt(question: AskedQuestion, unit: Document, most: int) -> Document | None:
    """Returns the sentences of a unit that a writer reads, in reading order; None: it lacks the question's names.

    A small model answers from a text about another bridge as if it were the one that is asked about. Words of the
    question need not occur, since a model knows other words for them. Depends on this unit and the question alone.
    """
    found, heading = read_text(unit.text), _heading(unit.title)
    if not question.has_names(heading.union(*(s.stems for s in found))):
        return None
    if len(found) <= most:
        return unit
    chosen = sorted(i for _, i in _ranked(question, found, heading)[:most])
    return replace(unit, text=" ".join(found[i].text for i in chosen))


def _heading(title: str) -> frozenset[str]:
    return frozenset(stem(word.lower()) for word in TOKEN.findall(title))


def _ranked(question: AskedQuestion, found: Sequence[Sentence], heading: frozenset[str]) -> list[tuple[float, int]]:
    """Worth and position of each sentence, the best first. It is not positive if the sentence says nothing new."""
    covered = [(s.stems | heading) & question.stems for s in found]
    rows = []
    for i, sentence in enumerate(found):
        near = frozenset().union(*covered[max(0, i - 1) : i + 2])
        new = not sentence.stems <= question.stems  # a token that does not repeat the question
        worth = len(covered[i]) + 0.5 * len(near - covered[i]) + 1.0 * bool(question.expects(sentence.text))
        rows.append((worth if new else -1.0, i))
    return sorted(rows, key=lambda row: (-row[0], row[1]))


def unit_statements(question: AskedQuestion, unit: Document, most_sentences: int, most: int) -> frozenset[Item]:
    """Returns the ``statements`` of a unit's best sentences; none if it abstains. Depends on this unit alone."""
    return statements(question, best_sentences(question, unit.text, unit.title, most_sentences), most)


def statements(question: AskedQuestion, chosen: Sequence[Sentence], most: int) -> frozenset[Item]:
    """Returns what one unit contributes: at most ``most`` keywords, the leading ones, their forms, and pairs.

    Numbers, names and words of the expected type come first, then words near those of the question.

    Args:
        question: The question. Its words do not count as keywords.
        chosen: The sentences that speak for the unit.
        most: L.
    """
    ranked: dict[str, tuple[float, int, int]] = {}
    for row, sentence in enumerate(chosen):
        expected = question.expects(sentence.text)
        anchors = [i for i, t in enumerate(sentence.tokens) if question.repeats(t)]
        for i, token in enumerate(sentence.tokens):
            if question.repeats(token) or question.contains(token.lemma):
                continue
            near = max((1.0 / abs(i - a) for a in anchors), default=0.0)
            typed = not expected.isdisjoint(w.lower() for w in token.written.split())
            key = (-(3.0 * typed + 1.0 * token.named + near), row, i)
            ranked[token.lemma] = min(key, ranked.get(token.lemma, key))
    kept = sorted(ranked, key=lambda name: ranked[name])[:most]
    return frozenset(_items(question, chosen, frozenset(kept))).union(map(Lead, kept[:LEADS]))


def _items(question: AskedQuestion, chosen: Sequence[Sentence], kept: frozenset[str]) -> Iterable[Item]:
    for sentence in chosen:
        previous: Token | None = None
        for token in sentence.tokens:
            asked = question.repeats(token) or question.contains(token.lemma)
            if token.lemma not in kept and not asked:
                previous = None
                continue
            if not asked:
                yield Word(token.lemma)
            yield Form(token.lemma, token.written)
            if previous is not None and not token.breaks and previous.lemma != token.lemma:
                yield Pair(previous.lemma, token.lemma)
                yield Gap(previous.lemma, token.before, token.lemma)
            previous = token
