"""Finds other right answers to a drafted question in the corpus."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from casemate.monitor.canaries.matching import normalized_tokens
from casemate.monitor.canaries.questions import TITLED_NAME, FactQuestion
from casemate.text.markup import without_links
from casemate.text.sentences import sentences
from casemate.text.tokens import NUMBER_WORDS, ReferenceCorpus, content_words, stem
from casemate.types import Document

MAX_SHARED = 0.6
"""Share of a question's words, weighted by their rarity, that a sentence with another answer may contain."""
MAX_SHARED_CHUNK = 0.9
"""The same for a chunk of another source than the one asked for."""
_GENERIC = content_words("known looking information documents anything mentioned together year many")
"""Words of the questions' forms."""
_YEAR = re.compile(r"(?<![\w.,-])(?:1\d{3}|20\d{2})(?![\w-])")
_COUNT = re.compile(r"(?<![\w.,])(\d+(?:[.,]\d+)*|[a-z]+(?:-[a-z]+)?) ([a-z]+)")


class _Statement(NamedTuple):
    """A sentence, its words, and the words of its document's title."""

    source: str
    text: str
    words: frozenset[str]
    title: frozenset[str]


class Ambiguity:
    """The statements of a corpus, to compare drafted questions with.

    Attributes:
        documents: Chunks of the corpus, or of a sample of it.
        genre: Rarity of words in the corpus.
    """

    def __init__(self, documents: Sequence[Document], genre: ReferenceCorpus) -> None:
        self.documents, self.genre = documents, genre

    @cached_property
    def _statements(self) -> list[_Statement]:
        found = dict[_Statement, None]()
        for d in self.documents:
            title = content_words(d.title)
            for text in sentences(without_links(d.text)):
                found[_Statement(d.source, " ".join(text.split()), content_words(text), title)] = None
        return list(found)

    @cached_property
    def _by_word(self) -> dict[str, list[int]]:
        """Numbers of the statements with a word, or whose title has it."""
        return _postings(statement.words | statement.title for statement in self._statements)

    @cached_property
    def _by_source(self) -> dict[str, list[int]]:
        return _postings({statement.source} for statement in self._statements)

    @cached_property
    def _chunks(self) -> list[tuple[str, frozenset[str]]]:
        return [(d.source, content_words(without_links(d.content))) for d in self.documents]

    @cached_property
    def _chunks_by_word(self) -> dict[str, list[int]]:
        return _postings(found for _, found in self._chunks)

    def of_fact(self, fact: FactQuestion, source: str) -> str:
        """Why a question has more than one right answer, or one that another source states too; empty: it has one."""
        asked = content_words(fact.query) - _GENERIC - {stem(fact.kind)}
        own = normalized_tokens(fact.answer)
        needed = self._needed(asked, MAX_SHARED)
        for i in {i for word in needed for i in self._by_word.get(word, ())} | {*self._by_source.get(source, ())}:
            statement = self._statements[i]
            if not self._shares_words(asked, statement, source):
                continue
            answers = [normalized_tokens(answer) for answer in answers_in(statement.text, fact.kind)]
            if statement.source == source and any(answer != own for answer in answers):
                return "its source states several answers"
            if statement.source != source and answers:
                return "another source may also answer the question"
        return ""

    def _shares_words(self, asked: frozenset[str], statement: _Statement, source: str) -> bool:
        """Whether a statement has most words of a question. In the source itself, its title distinguishes nothing."""
        if statement.source != source:
            return self._weight(asked & (statement.words | statement.title)) >= MAX_SHARED * self._weight(asked)
        asked -= statement.title
        return self._weight(asked & statement.words) >= MAX_SHARED * self._weight(asked)

    def of_topic(self, question: str, source: str) -> str:
        """Why a question is about more than one source; empty: it is about one."""
        asked = content_words(question) - _GENERIC
        whole = self._weight(asked)
        needed = self._needed(asked, MAX_SHARED_CHUNK)
        for i in {i for word in needed for i in self._chunks_by_word.get(word, ())}:
            other, found = self._chunks[i]
            if other != source and self._weight(asked & found) >= MAX_SHARED_CHUNK * whole:
                return "another source has the same words"
        return ""

    def _needed(self, asked: frozenset[str], share: float) -> list[str]:
        """Rarest words of a question: a text without all of them has less than this share of the question's weight."""
        found, left = list[str](), self._weight(asked)
        least = share * left
        for word in sorted(asked, key=lambda word: (-self.genre.rarity(word), word)):
            if left < least:
                break
            found.append(word)
            left -= self._weight(frozenset({word}))
        return found

    def _weight(self, found: frozenset[str]) -> float:
        return sum(0.1 + self.genre.rarity(word) for word in found)


def _postings(rows: Iterable[Collection[str]]) -> dict[str, list[int]]:
    """The numbers of the rows that contain each text."""
    found = defaultdict[str, list[int]](list)
    for i, row in enumerate(rows):
        for word in row:
            found[word].append(i)
    return found


def answers_in(text: str, kind: str) -> list[str]:
    """The years, persons with a title, or numbers with this unit in a text, as ``FactQuestion.kind`` says."""
    if kind == "year":
        return _YEAR.findall(text)
    if kind == "person":
        return [m[0] for m in TITLED_NAME.finditer(text)]
    unit = stem(kind)
    return [
        number
        for number, word in _COUNT.findall(text)
        if stem(word) == unit and (number[0].isdigit() or number in NUMBER_WORDS)
    ]
