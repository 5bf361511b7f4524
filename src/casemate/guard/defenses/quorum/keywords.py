"""Statements of one unit about a question: keywords, their forms, and pairs of neighboring keywords.

In a script without spaces, two units rarely write a clause alike. There a unit states all spans of the pieces between
the words of the question. Each span is counted as a whole.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from typing import Literal, NamedTuple, TypeAlias

from casemate.guard.defenses.quorum.subjects import Subject, visible
from casemate.text.answering import TYPES, Question
from casemate.text.function_words import ALL_FUNCTION_WORDS, ENGLISH, function_words, languages_of, without_elision
from casemate.text.markup import without_escapes, without_links
from casemate.text.sentences import sentences
from casemate.text.tokens import LETTERS, UNSPACED, FunctionCache, stem
from casemate.text.unspaced import SPACELESS, Piece, asked_parts, is_spaceless, pieces, spans, text_parts
from casemate.types import Document

_GROUPED = rf"\d{{1,9}}(?:,\d{{3}}){{0,3}}[{SPACELESS}]"
TOKEN = re.compile(
    rf"\d+(?:[.,:]\d+)*%?(?![^\W_]|[.,]{_GROUPED})|{LETTERS}(?:['’.-]{LETTERS}|(?<=\d),(?={_GROUPED}){LETTERS})*+"
)
"""A number or time with separators and percent sign, or a word. In scripts without spaces, words follow numbers."""
WORD_LETTERS = 8
"""Letters of a keyword in a script without spaces, at most."""
WORD_CLUSTERS = 4
"""Clusters of a piece that count as one keyword."""
_CLAUSE = re.compile(f"[{UNSPACED}]{{{WORD_LETTERS + 1},}}")
"""Letters of a script without spaces that are a clause, no word: as a keyword it would disclose more than a word."""
MAX_SPAN = 12
"""Clusters of a span, at most."""
_PARTS = re.compile(f"({TOKEN.pattern})")
MARKUP = re.compile(r"^[\s#>*+•|-]+|[*_`|]+")
_MARK_CHARACTERS = "*_`|"
_MARKS = re.compile(f"[{_MARK_CHARACTERS}]+")
_NUMBERING = re.compile(
    r"([ \t>#]*(?:[-*+•][ \t]{1,9})?)(?:\d{1,3}[.)]|\((?:\d{1,3}|[a-z]{1,3})\)|[a-z]{1,2}\))(?=[ \t]+\S)"
)
"""The number or letter of a list item or paragraph: it counts items, and is not a number that the text states."""
_FIRST_PERSON = frozenset("I I'm I've I'll I'd I’m I’ve I’ll I’d".split())
_PRONOUNS = _FIRST_PERSON | frozenset("Sie Ihnen Ihr Ihre Ihrem Ihren Ihrer".split())
"""Pronouns with a capital inside a sentence. They are not names."""
_UNNAMING = ALL_FUNCTION_WORDS - frozenset("a it long may us will".split())
"""Function words but those that with a capital are parts of names, as in *Will Lee*, *IT* and *Vitamin A*."""
MIN_COVERAGE = 0.5
"""Share of the question's words that a unit must contain; below it, the unit abstains.

With a smaller share, more questions are answered, and more answers depend on a single unit.
"""
UNMARKED_COVERAGE = 2 / 3
"""The same where nothing marks names: in scripts without spaces or letter case, and in languages without a list of
words. With half, units about other names do not abstain (``benchmarks/unspaced.py``)."""
NAME_WEIGHT = 3
"""Weight of a name or number in that share: a unit about another bridge shares all words but the name."""
_NO_STEM = frozenset(("",))
LEADS = 2
"""Leading keywords of a unit."""
MAX_SENTENCES = 64
"""Sentences of a unit that are considered."""
CACHED_TEXTS = 4096
CACHED_VOCABULARIES = 16


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
    """Two content words that follow each other in one sentence, ignoring function words between them."""

    first: str
    second: str
    kind: Literal["pair"] = "pair"


class Gap(NamedTuple):
    """The function words between the two words of a pair."""

    first: str
    between: str
    second: str
    kind: Literal["gap"] = "gap"


class Span(NamedTuple):
    """A part of a piece in a script without spaces, as written."""

    text: str
    kind: Literal["span"] = "span"


Item: TypeAlias = Word | Lead | Form | Pair | Gap | Span


class Token(NamedTuple):
    """A content word of a sentence.

    Attributes:
        lemma: See ``lemma``.
        written: As written.
        before: Function words between the previous content word and this one, lower case.
        breaks: Whether punctuation separates it from the previous content word.
        stems: Stems of its words, for comparison with the question; of a script without spaces, ``text_parts``.
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
        function_words: Words that carry no content, in lower case. A negation is none: it must be released like others.
    """

    text: str
    function_words: frozenset[str] = ENGLISH

    @cached_property
    def stems(self) -> frozenset[str]:
        """Stems of the words of its tokens."""
        written = TOKEN.findall(self.text)
        if not _PRONOUNS.isdisjoint(written):  # "I" counts in "World War I" only
            return frozenset().union(*[token.stems for token in self.tokens])
        written[:1] = map(str.lower, written[:1])
        counted = _vocabulary(self.function_words).stems
        if not is_spaceless(self.text):
            return frozenset(map(counted.__getitem__, written)) - _NO_STEM
        parts = [text_parts(w.lower()) if is_spaceless(w) else (counted[w],) for w in written]
        return frozenset(chain.from_iterable(parts)) - _NO_STEM

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """Its content words. Capitalized words that follow each other are one token."""
        return tuple(_tokens(self.text, _vocabulary(self.function_words)))


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question with everything that sentences are compared with.

    Attributes:
        stems: Stems of its content words.
        names: Those of names and numbers.
        subject: What a unit must contain, such as names; see ``subjects``.
        lemmas: Its lemmas: words that an answer may repeat.
        type: Position of the expected type of answer in ``answering.TYPES``; None: open.
        lower: The text in lower case.
        least: Minimum share of its words in a unit, below which the unit abstains; see ``coverage``.
    """

    stems: frozenset[str]
    names: frozenset[str]
    subject: Subject
    lemmas: frozenset[str]
    type: int | None
    lower: str
    least: float

    @classmethod
    def of(cls, text: str) -> AskedQuestion:
        """Reads a question."""
        text = visible(_composed(text))
        text = text.lower() if text.isupper() or _is_title(text) else text  # its capitals mark no names
        languages = languages_of(text)
        plain, known = without_elision(_plain(text), languages), function_words(languages)
        read = [(s, Sentence(s, known).tokens) for s in map(_with_single_spaces, sentences(plain))]
        tokens = [t for _, found in read for t in found]
        names = (w for s, found in read for t in found if " " in t.written for w in _parts_of_name(t, s, known))
        subject = Subject.of(plain, names)
        kind = Question(text).type
        place = None if kind is None else TYPES.index(kind)
        lemmas = {t.lemma for t in tokens} | {lemma(w) for t in tokens for w in t.written.split()}
        asked = [(t, asked_parts(t.written) if is_spaceless(t.written) else t.stems) for t in tokens]
        stems = frozenset().union(*(parts for _, parts in asked))
        named = frozenset().union(*(parts for t, parts in asked if t.named))
        marked = subject.known and not any(map(is_spaceless, stems))
        least = MIN_COVERAGE if marked else UNMARKED_COVERAGE
        return cls(stems, named, subject, frozenset(lemmas), place, text.lower(), least)

    def coverage(self, stems: frozenset[str]) -> float:
        """Returns the share of its words among some stems, in [0, 1]; names and numbers weigh ``NAME_WEIGHT``."""
        found, most = (len(x) + (NAME_WEIGHT - 1) * len(x & self.names) for x in (stems & self.stems, self.stems))
        return found / most if most else 0.0

    def possible_stems(self, text: str) -> frozenset[str]:
        """Returns its stems that a word of a text may have, without reading the words: those that occur in its letters.

        A stem is the beginning of its word in lower case. Case folding maps all lower-case forms of a letter to one.
        """
        plain = _plain(_composed(text))
        folded = (_MARKS.sub("", plain) if any(map(plain.__contains__, _MARK_CHARACTERS)) else plain).casefold()
        return frozenset([name for name in self.stems if name.casefold() in folded])

    def concerns_another(self, text: str, title: str) -> bool:
        """Whether a unit is about another subject."""
        return self.subject.is_missing(_composed(f"{title}\n{text}"))

    def has_names(self, stems: frozenset[str]) -> bool:
        """Whether at least half of its names and numbers are among some stems."""
        return 2 * len(stems & self.names) >= len(self.names)

    def repeats(self, token: Token) -> bool:
        """Whether a token consists of words of the question."""
        return token.stems <= self.stems

    def asks(self, token: Token) -> bool:
        """Whether a token is not a keyword of an answer: its words, or those of its lemma, are in the question."""
        return token.stems <= self.stems or self.contains(token.lemma)

    def contains(self, name: str) -> bool:
        """Whether a lemma consists of words of the question, in any inflection."""
        return name in self.lemmas or self.stems.issuperset(map(stem, name.split()))

    def expects(self, text: str) -> frozenset[str]:
        """The lower-case words of a text that match the expected type of answer, and are not in the question."""
        if self.type is None:
            return frozenset()
        found = (m[0].lower() for m in TYPES[self.type].contained.finditer(text))
        return frozenset(w for match in found if match not in self.lower for w in TOKEN.findall(match))


def _parts_of_name(token: Token, sentence: str, known: Collection[str]) -> list[str]:
    """The words of a name in lower case, without function words.

    At the start of a sentence the first word may be a verb, as in *Describe Ann Lee*, and is left out, too.
    """
    words = token.written.lower().replace("’", "'").split()[sentence.startswith(token.written) :]
    return [word.removesuffix("'s") for word in words if word not in known]


def _inner_words(text: str) -> list[str]:
    """The words of a text but the first of each sentence, numbers and pronouns with a capital."""
    words = (word for s in sentences(text) for word in TOKEN.findall(s)[1:])
    return [word for word in words if word not in _PRONOUNS and not word[0].isdigit()]


def _is_title(text: str) -> bool:
    """Whether all content words of a question have a capital, and its first function word: *Where Is Ann Lee?*.

    The first word of a sentence does not count.
    """
    inner = _inner_words(text)
    content = [word for word in inner if word.lower() not in ALL_FUNCTION_WORDS]
    verbs = [word for word in inner if word.lower() in _UNNAMING]
    return all(word[0].isupper() for word in [*content, *verbs[:1]]) and bool(content and verbs)


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
    """Splits a text, without links, tags, escapes and numbers of list items, into sentences of content words.

    Sentences that are questions are left out, unless ``questions``. Cached.
    """
    text = _composed(text)
    languages = languages_of(text)
    text = without_escapes(_without_numbering(without_links(text)))  # an escaped number is not a list item
    text = without_elision(text, languages)
    known = function_words(languages)
    marked = _MARKS.search(text) is not None
    bare = (MARKUP.sub("", s) if marked or not s[0].isalnum() else s for s in sentences(text))
    plain = map(_with_single_spaces, bare)
    found = (Sentence(s, known) for s in plain if questions or not s.endswith(("?", "？")))
    return tuple(islice((s for s in found if s.stems), MAX_SENTENCES))


def _composed(text: str) -> str:
    """Returns a text in normal form C. In form D, which some file systems write, an accent is a character of its own.

    Forms of one text then have the same words, function words and statements.
    """
    return unicodedata.normalize("NFC", text)


def _with_single_spaces(text: str) -> str:
    """A sentence without line breaks and repeated spaces: words of a name are separated by one space."""
    return " ".join(text.split())


def _plain(text: str) -> str:
    return without_escapes(without_links(text))


def _without_numbering(text: str) -> str:
    r"""Replaces the numbers of list items by hyphens. A line that continues a sentence is not a list item.

    >>> _without_numbering("Steps:\n1. Mix\n2. Bake\n\nIt opens on\n1. May.").split("\n")
    ['Steps:', '- Mix', '- Bake', '', 'It opens on', '1. May.']
    """
    lines, follows = list[str](), False
    for line in text.split("\n"):
        item = _NUMBERING.match(line)
        follows = item is not None and (follows or not lines or not (end := lines[-1].rstrip()) or end[-1] in ".:;!?")
        lines.append(f"{item[1]}-{line[item.end() :]}" if item and follows else line)
    return "\n".join(lines)


class _Word(NamedTuple):
    """A word or number as written, with what depends on it alone.

    Attributes:
        written: As written.
        lower: In lower case.
        lemma: See ``lemma``.
        stems: Its stem alone.
        capital: Whether it begins with a capital.
        function: Whether it is a function word.
        pronoun: Whether it is a pronoun with a capital.
        named: Whether it is a number, or has a capital after the first character.
    """

    written: str
    lower: str
    lemma: str
    stems: frozenset[str]
    capital: bool
    function: bool
    pronoun: bool
    named: bool


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Words and their counted stems, for some function words. Kept: texts share most words."""

    words: FunctionCache[str, _Word]
    stems: FunctionCache[str, str]


@lru_cache(maxsize=CACHED_VOCABULARIES)
def _vocabulary(known: frozenset[str]) -> _Vocabulary:
    return _Vocabulary(FunctionCache(partial(_word, known)), FunctionCache(partial(_counted_stem, known)))


def _word(known: frozenset[str], written: str) -> _Word:
    lower = written.lower()
    stems = text_parts(lower) if is_spaceless(lower) else frozenset((stem(lower),))
    named = written[0].isdigit() or any(map(str.isupper, written[1:]))
    function = lower in known or written in _FIRST_PERSON
    pronoun = function and written in _PRONOUNS
    return _Word(written, lower, lemma(written), stems, written[0].isupper(), function, pronoun, named)


def _counted_stem(known: frozenset[str], written: str) -> str:
    """The stem of a word; empty for a function word without a capital."""
    counts = written.lower() not in known or written[0].isupper()
    return stem(written.lower()) if counts else ""


def _tokens(text: str, vocabulary: _Vocabulary) -> list[Token]:
    tokens: list[Token] = []
    before: list[str] = []
    run: list[_Word] = []  # words of the present name
    breaks, run_starts = False, True
    parts, known = _PARTS.split(text), vocabulary.words.__getitem__
    # Runs without spaces rarely recur, so they are not cached. Their function words are found by clusters.
    read = known if not is_spaceless(text) else lambda w: _word(ENGLISH, w) if is_spaceless(w) else known(w)
    words = list(map(read, parts[1::2]))
    for position, (between, word) in enumerate(zip(parts[::2], words, strict=False)):
        capital = word.capital and (position > 0 or not word.function)
        if run and capital and between == " ":
            run.append(word)
            continue
        if run:
            tokens.append(_token(run, before, breaks, run_starts))
            run, before, breaks = [], [], False
        breaks = breaks or (between != " " and bool(between.strip(" '\"“”‘’")))
        if capital and not word.pronoun:
            run, run_starts = [word], position == 0
        elif word.function:
            before.append(word.lower)
        else:
            tokens.append(_token([word], before, breaks, True))
            before, breaks = [], False
    if run:
        tokens.append(_token(run, before, breaks, run_starts))
    return tokens


def _token(run: Sequence[_Word], before: Sequence[str], breaks: bool, starts: bool) -> Token:
    function_words, last = " ".join(before), run[-1]
    if len(run) == 1:
        return Token(last.lemma, last.written, function_words, breaks, last.stems, not starts or last.named)
    name = " ".join([*[word.lower for word in run[:-1]], last.lemma])
    written = " ".join([word.written for word in run])
    return Token(name, written, function_words, breaks, frozenset().union(*[word.stems for word in run]), True)


def best_sentences(question: AskedQuestion, text: str, title: str, most: int) -> tuple[Sentence, ...]:
    """Returns the sentences of a unit that answer the question best, in reading order; none: the unit abstains.

    The score of a sentence is the share of the question's words in it, plus half of the share that its neighbors add.
    It is higher with the expected type of answer. It depends on this unit and the question alone.
    """
    possible = question.coverage(question.possible_stems(f"{title}\n{text}"))
    if possible < question.least or question.concerns_another(text, title):
        return ()
    found, heading = read_text(text), _heading(title)
    stems = heading.union(*(s.stems for s in found))
    if not found or question.coverage(stems) < question.least:
        return ()
    ranked = _ranked(question, found, heading)
    chosen = sorted(i for worth, i in ranked[:most] if worth > 0)
    return tuple(found[i] for i in chosen)


def excerpt(question: AskedQuestion, unit: Document, most: int) -> Document | None:
    """Returns the sentences of a unit that a writer reads, in reading order; None: it lacks the question's names.

    A small model answers from a text about another bridge as if the question named it. Other words of the question need
    not occur, since a model may use synonyms. The result depends on this unit and the question alone.
    """
    found, heading = read_text(unit.text), _heading(unit.title)
    stems = heading.union(*(s.stems for s in found))
    if not question.has_names(stems) or question.concerns_another(unit.text, unit.title):
        return None
    if len(found) <= most:
        return unit
    chosen = sorted(i for _, i in _ranked(question, found, heading)[:most])
    return replace(unit, text=" ".join(found[i].text for i in chosen))


def _heading(title: str) -> frozenset[str]:
    title = _composed(title)
    plain = without_elision(_plain(title), languages_of(title))
    return frozenset(stem(word.lower()) for word in TOKEN.findall(plain))


def _ranked(question: AskedQuestion, found: Sequence[Sentence], heading: frozenset[str]) -> list[tuple[float, int]]:
    """Score and position of each sentence, the best first.

    The score is not positive if a sentence states nothing new.
    """
    titled = heading & question.stems
    covered = [(s.stems & question.stems) | titled for s in found]
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


class _Part(NamedTuple):
    """A token, or a piece of one in a script without spaces.

    Attributes:
        token: The token.
        asked: Whether it is of the question.
        piece: What it consists of; none: a token.
    """

    token: Token
    asked: bool
    piece: Piece | None = None


def statements(question: AskedQuestion, chosen: Sequence[Sentence], most: int) -> frozenset[Item]:
    """Returns what one unit contributes: at most ``most`` keywords, the leading ones, their forms, and pairs.

    Numbers, names and words of the expected type come first, then words near those of the question.

    Args:
        question: The question. Its words do not count as keywords.
        chosen: The sentences that the unit contributes.
        most: L.
    """
    ranked: list[tuple[float, int, int, _Part]] = []
    read = [_parts(question, sentence) for sentence in chosen]
    for row, (sentence, parts) in enumerate(zip(chosen, read, strict=True)):
        expected = question.expects(sentence.text)
        anchors = [i for i, part in enumerate(parts) if part.asked and question.repeats(part.token)]
        for i, part in enumerate(parts):
            if not part.asked and (part.piece or not _CLAUSE.search(part.token.lemma)):
                typed = bool(expected) and not expected.isdisjoint(part.token.written.lower().split())
                near = 1.0 / min([abs(i - a) for a in anchors]) if anchors else 0.0
                near = 1.0 if part.piece and part.piece.touches else near
                ranked.append((-(3.0 * typed + 1.0 * part.token.named + near), row, i, part))
    kept = _kept([part for *_, part in sorted(ranked)], most)
    said = set[Item](_items(read, frozenset(kept)))
    for i, (name, piece) in enumerate(kept.items()):
        found = spans(piece.clusters, MAX_SPAN) if piece else set[str]()
        said.update(map(Span, found), map(Lead, {name, *found} if i < LEADS else ()))
    return frozenset(said)


def _parts(question: AskedQuestion, sentence: Sentence) -> list[_Part]:
    """The tokens of a sentence, or their pieces in a script without spaces."""
    if not is_spaceless(sentence.text):
        return [_Part(token, question.asks(token)) for token in sentence.tokens]
    return [part for token in sentence.tokens for part in _parts_of_token(question, token)]


def _parts_of_token(question: AskedQuestion, token: Token) -> list[_Part]:
    if not is_spaceless(token.written):
        return [_Part(token, question.asks(token))]
    parts = list[_Part]()
    for piece in pieces(token.written, question.stems):
        text, named = piece.text, any(cluster.whole for cluster in piece.clusters)
        parts.append(_Part(Token(text, text, "", True, frozenset(), named), piece.asked, piece))
    return parts


def _kept(ranked: Sequence[_Part], most: int) -> dict[str, Piece | None]:
    """The first different lemmas with their pieces, ``most`` keywords in all. A long piece counts for several."""
    kept, left = dict[str, Piece | None](), most
    for token, _, piece in ranked:
        if left > 0 and token.lemma not in kept:
            found = piece.clusters[: WORD_CLUSTERS * left] if piece else ()
            left -= max(1, -(-len(found) // WORD_CLUSTERS))
            kept[token.lemma] = piece._replace(clusters=found) if piece else None
    return kept


def _items(read: Sequence[Sequence[_Part]], kept: frozenset[str]) -> Iterator[Item]:
    """The statements from sentences but spans."""
    for parts in read:
        previous: Token | None = None
        for token, asked, piece in parts:
            if token.lemma not in kept and not asked:
                previous = None
                continue
            if not asked and not _CLAUSE.search(token.lemma):
                yield Word(token.lemma)
            if piece:
                previous = None
                continue
            yield Form(token.lemma, token.written)
            if previous is not None and not token.breaks and previous.lemma != token.lemma:
                yield Pair(previous.lemma, token.lemma)
                yield Gap(previous.lemma, token.before, token.lemma)
            previous = token
