"""Selects the sentence that answers a question, by linear models on features of each sentence. No language model.

``benchmarks/extractive.py`` fits the weights on the development articles of SQuAD and measures them on others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from casemate.text.sentences import proper_nouns, sentences
from casemate.text.stored_questions import ASKS
from casemate.text.tokens import NUMBER, NUMBER_WORDS, STOP_WORDS, content_words, ngrams, stem, words
from casemate.types import Float64

WORD_FEATURES = (
    "covered",  # share of the question's word weights that sentence and title contain
    "covered_nearby",  # the same with the neighboring sentences
    "covered_by_passage",  # the same with the whole passage
    "names",  # share of the question's names and numbers that the sentence contains
    "pairs",  # share of the question's adjacent word pairs that are adjacent in the sentence
    "rank",  # -ln(1 + number of passages before)
    "first",  # first sentence of its passage
    "refers_back",  # begins with a pronoun
    "short",  # fewer than four content words
    "length",  # ln(1 + number of content words)
    "new_name",  # "which" and other open questions: contains a name that the question lacks
    "lacks_number",
    "lacks_date",
    "lacks_duration",
    "lacks_person",
    "lacks_place",
)
"""Features that need words only."""
VECTOR_FEATURES = (
    "cosine",  # of question and sentence
    "cosine_standardized",  # among all sentences with a vector
    "cosine_passage",  # largest of the passage
)
"""Features that need sentence vectors."""
FEATURES = WORD_FEATURES + VECTOR_FEATURES
SUPPORT_FEATURES = (
    "covered",
    "covered_nearby",
    "names",
    "lacks_type",
    "cosine",
    "best_passage",  # largest covered_by_passage of the context
    "best_cosine",  # largest cosine of the context
)
"""Features of the best sentence; the last two describe the context."""


class Passage(NamedTuple):
    """A document of the context, cut into sentences."""

    title: str
    sentences: tuple[str, ...]


class _AnswerType(NamedTuple):
    """An expected type of answer.

    It has a pattern of questions, a pattern that a sentence must contain, and the feature of a sentence without it.
    """

    asked: re.Pattern[str]
    contained: re.Pattern[str]
    feature: str


def _any_of(names: Iterable[str]) -> str:
    """A pattern of words, grouped by first letter: faster than one alternative per word."""
    groups = groupby(sorted(names), lambda word: word[0])
    return "|".join(f"{first}(?:{'|'.join(word[1:] for word in group)})" for first, group in groups)


_COUNT = _any_of({*NUMBER_WORDS, "one", "half", "third", "quarter", "dozen", "once", "twice", "hundred"})
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
_DATE = re.compile(
    rf"(?=[\dA-Zcw])(?:\b1\d{{3}}|\b20\d\d|\b(?:{_MONTHS}|{_DAYS})\b|\b\d{{1,2}}[:.]\d\d\b|centur|\bworking day)"
)
_NUMBER = re.compile(rf"{NUMBER.pattern}|\b(?:{_COUNT}|free)\b", re.I)
_DOSE = re.compile(r"\d\s*(?:mg|g|kg|ml|µg|mcg|micrograms?|units?|IU|tablets?|drops|puffs?|%|mmol)\b", re.I)
_DURATION = re.compile(rf"\b(?:\d+|{_COUNT}|several|few)[ -](?:\w+ )?(?:second|minute|hour|day|night|week|month|year)")
_NAME = re.compile(r"[A-Z](?:(?<=[^.!?:]\s[A-Z])[\w’'-]+|(?<!\w[A-Z])[\w’'-]+ [A-Z][\w’'-]+)")
_PLACE = re.compile(r"\b(?:in|at|on|near|from|to|into|beside|behind) (?:the )?(?:[A-Z]\w+|\w+ (?:of|room|floor|hall))")
TYPES = tuple(
    _AnswerType(re.compile(asked, re.I), contained, feature)
    for asked, contained, feature in (
        (r"\bwhen\b|\b(?:what|which) (?:year|date|day|month|century|time)\b", _DATE, "lacks_date"),
        (r"\bdos(?:e|age)\b|\bstrength\b", _DOSE, "lacks_number"),
        (
            r"\bhow (?:long|old|soon)\b|\bhow many (?:days|weeks|months|years|hours|minutes)\b",
            _DURATION,
            "lacks_duration",
        ),
        (r"\bhow (?:many|much|far|fast|large|big|tall|high|deep|wide|heavy|warm)\b", _NUMBER, "lacks_number"),
        (r"\b(?:number|percent|percentage|score|rate|population|cost|price|fee)\b", _NUMBER, "lacks_number"),
        (
            r"\bwho(?:m|se)?\b|\b(?:what|which) (?:person|company|author|actor|singer)\b",
            _NAME,
            "lacks_person",
        ),
        (r"\bwhere\b|\b(?:what|which) (?:city|country|state|place|region|river|building)\b", _PLACE, "lacks_place"),
    )
)
_AMOUNTS = frozenset(i for i, t in enumerate(TYPES) if t.asked.search("how long") or t.asked.search("how many"))
"""Positions of the types of which an answer has an amount."""
_AMOUNT = re.compile(rf"{_NUMBER.pattern}|\b(?:several|few|many|unlimited|no|not|none|never)\b", re.I)
_REFERS_BACK = re.compile(r"(?:It|They|He|She|This|These|Those|That|Its|Their|His|Her|Both|Such)\b")
_NEGATIONS = frozenset("no not never none neither nor without".split())
_PRONOUN = re.compile(r"\b(?:it|its|they|them|their|he|him|his|she|her|this|that|these|those|there)\b", re.I)
_REQUEST_WORDS = frozenset(
    map(
        stem,
        """according answer anyone article ask asking dear describe detail details document documents exactly
        explain find hello help hey hi info information kindly know knowing look looking name passage possible possibly
        question quick regards show someone tell text thank thanks want wonder wondering""".split(),
    )
)
"""Words that request an answer and do not describe its subject. A context that lacks them can still answer."""
_REMARK_WEIGHT = 0.5
_AFTER_QUESTION = re.compile(r"(?<=\?)\s+")
"""A remark after a question mark may begin in lower case."""
_QUOTED_WORDS, _QUOTED_SHARE = 5, 0.8


def lacks_amount(place: int | None, answer: str) -> bool:
    """Whether a question of a type asks how many, how much or how long, and an answer has no number or similar word.

    Args:
        place: Position of the type in ``TYPES``; None: open.
        answer: The answer.
    """
    return place in _AMOUNTS and not _AMOUNT.search(answer)


class Question:
    """A question with the features that are compared with sentences.

    >>> Question("What dose was suggested?").says("Please suggest.")
    True
    >>> Question("When does it close?").says("It closes at 19:00.")
    False
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.focus = _asking_part(text)
        self.lower = text.lower()
        self._words, asking = words(text), words(self.focus)
        self.sequence = [stem(w) for w in asking if w not in STOP_WORDS]
        self.terms = content_words(text)
        self.asked = frozenset(self.sequence) - _REQUEST_WORDS
        self.pairs = set(zip(self.sequence, self.sequence[1:], strict=False))
        self.names = {stem(w.lower()) for w in proper_nouns(self.focus)} | {w for w in asking if w[0].isdigit()}
        self.type = next((t for t in TYPES if t.asked.search(self.focus)), None)
        self._runs = ngrams(text)

    def says(self, sentence: str) -> bool:
        """Whether the question contains all content words and negations of a sentence."""
        if not content_words(sentence) <= self.terms:
            return False
        return _NEGATIONS.isdisjoint(set(words(sentence)) - set(self._words))

    def quotes(self, sentence: str) -> bool:
        """Whether the question contains a sentence of five or more words, in other order or with few changes.

        >>> Question("True? It opens at 8 and closes at 19!").quotes("It opens at 8 and closes at 19.")
        True
        """
        if len(words(sentence)) < _QUOTED_WORDS:
            return False
        runs = ngrams(sentence)
        return self.says(sentence) or len(runs & self._runs) >= _QUOTED_SHARE * len(runs)

    def lacks(self, sentence: str) -> str:
        """The feature of the expected answer type if a sentence adds nothing of that type to the question; else ""."""
        if self.type is None or self._new(self.type.contained, sentence):
            return ""
        return self.type.feature

    def new_name(self, sentence: str) -> bool:
        """Whether the answer type is open and a sentence contains a name that the question lacks."""
        return self.type is None and self._new(_NAME, sentence)

    def _new(self, pattern: re.Pattern[str], sentence: str) -> bool:
        return any(found[0].lower() not in self.lower for found in pattern.finditer(sentence))


def _asking_part(text: str) -> str:
    """The interrogative sentences of a text, without other remarks; the whole text if they depend on the remarks.

    >>> _asking_part("How many beds does the clinic have? xanadoo is great")
    'How many beds does the clinic have?'
    """
    parts = [part for sentence in sentences(text) for part in _AFTER_QUESTION.split(sentence)]
    asking = [s for s in parts if s.rstrip().endswith("?")] or [s for s in parts if ASKS.match(s)]
    part = " ".join(asking)
    if len(asking) == len(parts) or len(content_words(part) - _REQUEST_WORDS) < 2:
        return text
    return text if _PRONOUN.search(part) else part


def refers_back(sentence: str) -> bool:
    """Whether a sentence begins with a pronoun, so that the previous sentence explains it."""
    return bool(_REFERS_BACK.match(sentence))


def sentence_features(question: Question, passages: Sequence[Passage]) -> Float64:
    """Features of all sentences, (n, len(FEATURES)); the vector features are 0 (see ``with_cosines``).

    Rows are in the order of the passages, of which the best is first, and of the sentences in each.
    """
    stems = [[content_words(s) for s in p.sentences] for p in passages]
    weights = _word_weights(question, [s for passage in stems for s in passage])
    rows = [
        row
        for rank, (passage, found) in enumerate(zip(passages, stems, strict=True))
        for row in _passage_rows(question, weights, rank, passage, found)
    ]
    table = np.array(rows, np.float64).reshape(len(rows), len(WORD_FEATURES))
    return np.hstack([table, np.zeros((len(rows), len(VECTOR_FEATURES)))])


def with_cosines(features: Float64, passages: Sequence[Passage], cosines: Float64) -> Float64:
    """Features of all sentences with the vector features of those whose cosine with the question, (n,), is not NaN."""
    known = ~np.isnan(cosines)
    if not known.any():
        return features
    passage_of = np.repeat(np.arange(len(passages)), [len(p.sentences) for p in passages])
    largest = np.full(len(passages), -1.0)
    np.maximum.at(largest, passage_of[known], cosines[known])
    standardized = (cosines - cosines[known].mean()) / (cosines[known].std() + 1e-6)
    columns = np.column_stack([cosines, standardized, largest[passage_of]])
    result = features.copy()
    result[known, len(WORD_FEATURES) :] = columns[known]
    return result


def _word_weights(question: Question, stems: Sequence[frozenset[str]]) -> dict[str, float]:
    """Weights of the question's words, with sum 1: rare words weigh more, and absent words most.

    A word of a remark beside the question has half the weight, and 0 if the context lacks it.
    """
    frequency = Counter(word for s in stems for word in s & question.terms)
    raw = {
        w: math.log(1 + len(stems) / (frequency[w] or 0.5)) * (1.0 if w in question.asked else _REMARK_WEIGHT)
        for w in sorted(question.terms)
        if frequency[w] or w in question.asked
    }
    total = sum(raw.values()) or 1.0
    return {w: value / total for w, value in raw.items()}


def _passage_rows(
    question: Question, weights: dict[str, float], rank: int, passage: Passage, stems: Sequence[frozenset[str]]
) -> list[list[float]]:
    title = content_words(passage.title)

    def covered(found: frozenset[str]) -> float:
        return sum(weights.get(w, 0.0) for w in sorted(found & question.terms))

    def share(found: set[str]) -> float:
        named = sum(weights.get(w, 0.0) for w in sorted(question.names))
        return sum(weights.get(w, 0.0) for w in sorted(found)) / named if named else 0.5

    whole = covered(title.union(*stems))
    rows = []
    for i, sentence in enumerate(passage.sentences):
        sequence = [stem(w) for w in words(sentence) if w not in STOP_WORDS]
        adjacent = question.pairs & set(zip(sequence, sequence[1:], strict=False))
        lacking = question.lacks(sentence)
        row = {
            "covered": covered(stems[i] | title),
            "covered_nearby": covered(title.union(*stems[max(0, i - 1) : i + 2])),
            "covered_by_passage": whole,
            "names": share(question.names & stems[i]),
            "pairs": len(adjacent) / max(1, len(question.pairs)),
            "rank": -math.log1p(rank),
            "first": i == 0,
            "refers_back": refers_back(sentence),
            "short": len(stems[i]) < 4,
            "length": math.log1p(len(stems[i])),
            "new_name": question.new_name(sentence),
        }
        rows.append([float(row.get(name, name == lacking)) for name in WORD_FEATURES])
    return rows


@dataclass(frozen=True)
class AnswerModel:
    """Scores sentences, and estimates the probability that the best one answers the question.

    Attributes:
        ranking: Weight of each feature.
        support: Weight of each support feature.
        intercept: Intercept of the support model, set so that the conformal threshold is a probability of 0.35.
    """

    ranking: tuple[float, ...]
    support: tuple[float, ...]
    intercept: float

    def scores(self, features: Float64) -> Float64:
        """Scores of sentences, (n,). Only differences within a context are meaningful."""
        result: Float64 = features @ np.array(self.ranking)
        return result

    def probability(self, features: Float64, best: int) -> float:
        """Support: probability in (0, 1) that the context answers the question, by the features of its sentences."""
        logit = float(support_features(features, best) @ np.array(self.support)) + self.intercept
        return 1 / (1 + math.exp(-max(-60.0, min(60.0, logit))))


def support_features(features: Float64, best: int) -> Float64:
    """The support features, (len(SUPPORT_FEATURES),)."""
    column = {name: features[:, i] for i, name in enumerate(FEATURES)}
    return np.array(
        [
            column["covered"][best],
            column["covered_nearby"][best],
            column["names"][best],
            sum(values[best] for name, values in column.items() if name.startswith("lacks_")),
            column["cosine"][best],
            column["covered_by_passage"].max(),
            column["cosine"].max(),
        ]
    )


BY_WORDS = AnswerModel(
    ranking=(
        6.352,  # covered
        2.464,  # covered_nearby
        3.458,  # covered_by_passage
        0.011,  # names
        2.053,  # pairs
        1.442,  # rank
        -0.129,  # first
        -0.286,  # refers_back
        0.118,  # short
        0.254,  # length
        0.517,  # new_name
        -2.653,  # lacks_number
        -1.934,  # lacks_date
        -1.483,  # lacks_duration
        -1.090,  # lacks_person
        -1.007,  # lacks_place
        0.000,  # cosine
        0.000,  # cosine_standardized
        0.000,  # cosine_passage
    ),
    support=(
        1.599,  # covered
        3.002,  # covered_nearby
        1.293,  # names
        -0.699,  # lacks_type
        0.000,  # cosine
        1.658,  # best_passage
        0.000,  # best_cosine
    ),
    intercept=-3.320,
)
BY_VECTORS = AnswerModel(
    ranking=(
        4.350,  # covered
        1.387,  # covered_nearby
        3.307,  # covered_by_passage
        -0.328,  # names
        1.066,  # pairs
        0.527,  # rank
        -0.099,  # first
        0.248,  # refers_back
        -3.281,  # short
        0.356,  # length
        0.423,  # new_name
        -2.212,  # lacks_number
        -1.989,  # lacks_date
        -2.186,  # lacks_duration
        -1.013,  # lacks_person
        -0.198,  # lacks_place
        2.130,  # cosine
        0.507,  # cosine_standardized
        6.164,  # cosine_passage
    ),
    support=(
        0.782,  # covered
        2.727,  # covered_nearby
        0.968,  # names
        -0.746,  # lacks_type
        7.466,  # cosine
        1.220,  # best_passage
        2.799,  # best_cosine
    ),
    intercept=-7.345,
)
VECTORS_OF = "minilm:"
"""Prefix of the embedder fingerprint that ``BY_VECTORS`` was fitted for."""
