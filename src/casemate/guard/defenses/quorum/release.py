"""Which statements are released, and the answer that is composed from them alone."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from casemate.guard.defenses.quorum.keywords import AskedQuestion, Form, Gap, Item, Lead, Pair, Span, Word
from casemate.text.answering import lacks_amount
from casemate.text.function_words import NEGATIONS
from casemate.text.unspaced import clusters, is_spaceless
from casemate.types import UNKNOWN

MAX_WORDS = 16
"""Keywords of an answer, at most."""
MAX_PHRASES = 6
"""Phrases of an answer, at most, if pairs are released."""
MAX_PHRASE = 8
"""Content words of a phrase, at most."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The number of units that each statement needs.

    Attributes:
        support: m, at least 1.
        jitter: J: the threshold of a statement is m plus 0 to J - 1, by a keyed hash.
        secret: Key of the hash.
        scope: Further input of the hash: tenant and period. A threshold stays the same within one scope.
    """

    support: int
    jitter: int = 1
    secret: str = ""
    scope: str = ""

    def of(self, item: Item) -> int:
        """Returns the threshold of a statement: m_w = m + HMAC(secret, statement, scope) mod J."""
        if self.jitter == 1:
            return self.support
        message = "\x1f".join((self.scope, item[-1], *item[:-1])).encode("utf-8", "surrogatepass")
        digest = hmac.digest(self.secret.encode(), message, "sha256")
        return self.support + int.from_bytes(digest[:8], "big") % self.jitter


@dataclass(frozen=True, slots=True)
class Release:
    """The statements that enough units support.

    Attributes:
        levels: Level of each released statement: how often its threshold can be doubled within its support. The answer
            depends on the levels alone, so on whether supports reach a threshold, its double, and so on.
        support: Number of units of every statement, for the operator.
        thresholds: The thresholds.
    """

    levels: Mapping[Item, int]
    support: Mapping[Item, int]
    thresholds: Thresholds

    @classmethod
    def of(cls, units: Sequence[Collection[Item]], thresholds: Thresholds) -> Release:
        """Counts each statement once per unit, and keeps those at or above their threshold.

        Args:
            units: The statements of each unit.
            thresholds: The thresholds.
        """
        support = Counter(item for unit in units for item in frozenset(unit))
        levels = {}
        for item, count in support.items():
            if count >= thresholds.support:  # the hash of rarer ones is not needed
                needed = thresholds.of(item)
                if count >= needed:
                    levels[item] = (count // needed).bit_length() - 1
        return cls(levels, support, thresholds)

    def supporters(self, word: str) -> int:
        """Returns the number of units that state a word of the answer, or a span."""
        return max(self.support.get(item, 0) for item in (Word(word), Span(word)))

    def certificate(self, words: Collection[str]) -> dict[str, int]:
        """Returns how many units must change to alter an answer.

        Args:
            words: Lemmas of the answer.

        Returns:
            ``lost``: units that must disappear before a word of the answer is no longer released (0: no words).
            ``added``: units that must appear before a further word is. ``altered``: units that must appear or
            disappear before anything in the answer can change, order and spelling included. All are exact lower
            bounds while the grouping of the other units stays the same.
        """
        lost = [
            max(self.support[item] - self.thresholds.of(item) + 1 for item in released)
            for word in words
            if (released := [item for item in (Word(word), Span(word)) if item in self.levels])
        ]
        kept = [item for item in self.support if isinstance(item, Word | Span) and item not in self.levels]
        added = self._least(kept, lambda count, bound: bound - count)
        return {"lost": min(lost, default=0), "added": added, "altered": self._least(self.support, _distance)}

    def _least(self, items: Iterable[Item], distance: Callable[[int, int], int]) -> int:
        """The least distance of the support of some statements, or of an unseen one, to a change.

        Statements that cannot be nearer than what was found are not hashed.
        """
        unseen, jitter = self.thresholds.support, self.thresholds.jitter
        by_count: dict[int, list[Item]] = {}
        for item in items:
            by_count.setdefault(self.support[item], []).append(item)
        possible = {n: range(unseen, max(unseen, min(unseen + jitter - 1, n + 1)) + 1) for n in by_count}
        bounds = {n: min(distance(n, bound) for bound in possible[n]) for n in by_count}
        least = unseen
        for count in sorted(by_count, key=lambda n: bounds[n]):
            for item in by_count[count]:
                if bounds[count] >= least:
                    return least
                least = min(least, distance(count, self.thresholds.of(item)))
        return least


def _distance(count: int, bound: int) -> int:
    """Units that must be added or removed to change the level of a statement."""
    if count < bound:
        return bound - count
    while 2 * bound <= count:
        bound *= 2
    return min(count - bound + 1, 2 * bound - count)


@dataclass(frozen=True, slots=True)
class Composition:
    """An answer.

    Attributes:
        text: The text.
        words: Lemmas of its keywords, in order.
    """

    text: str
    words: tuple[str, ...]


def compose(question: AskedQuestion, levels: Mapping[Item, int], phrases: int = MAX_PHRASES) -> Composition:
    """Composes an answer from the question and the released statements. It receives nothing else.

    Keywords are joined to phrases by released pairs, with released function words between them. A phrase begins and
    grows where the levels of the keyword are highest, as a keyword and as a leading one. Ties go to words of the
    expected type, then to the alphabet.

    Args:
        question: The question.
        levels: The released statements with their levels.
        phrases: Phrases, at most. Without released pairs, each keyword is a phrase of its own.

    >>> compose(AskedQuestion.of("When did it open?"), {}).text
    "I don't know."
    """
    return _Composer(question, levels).compose(phrases)


class _Composer:
    """One answer, word by word."""

    def __init__(self, question: AskedQuestion, levels: Mapping[Item, int]) -> None:
        self.question, self.levels = question, levels
        self.left = _longest({item[0] for item in levels if isinstance(item, Word | Span)})
        self.after: dict[str, list[str]] = {}
        self.previous: dict[str, list[str]] = {}
        for pair in (item for item in levels if isinstance(item, Pair)):
            self.after.setdefault(pair.first, []).append(pair.second)
            self.previous.setdefault(pair.second, []).append(pair.first)
        self.forms, self.gaps = self._spellings()

    def compose(self, most: int) -> Composition:
        phrases: list[list[str]] = []
        said: list[str] = []
        self.left &= self._expected() or self.left
        while self.left and len(phrases) < most and len(said) < MAX_WORDS:
            phrase = self._phrase()
            phrases.append(phrase)
            said += [name for name in phrase if not self.question.contains(name)]
        if NEGATIONS.issuperset(said):  # "Not." alone answers the opposite of what some sources may say
            return Composition(UNKNOWN, ())
        text = "; ".join(self._written(phrase) for phrase in phrases)
        if lacks_amount(self.question.type, text):
            return Composition(UNKNOWN, ())
        return Composition(f"{text[0].upper()}{text[1:]}.", tuple(said))

    def _phrase(self) -> list[str]:
        """Grows a phrase from the best remaining keyword, at both ends, by the best released pair."""
        phrase = [min(self.left, key=lambda name: (-self._worth(name), name))]
        self.left.discard(phrase[0])
        while len(phrase) < MAX_PHRASE:
            ends = [
                *(((phrase[-1], name), name, True) for name in self.after.get(phrase[-1], ())),
                *(((name, phrase[0]), name, False) for name in self.previous.get(phrase[0], ())),
            ]
            free = [e for e in ends if e[1] not in phrase and (e[1] in self.left or self.question.contains(e[1]))]
            if not free:
                break
            _, name, behind = min(free, key=lambda e: (-self.levels[Pair(*e[0])], e[1] not in self.left, e[1], e[2]))
            phrase.insert(len(phrase) if behind else 0, name)
            self.left.discard(name)
        self.left = {name for name in self.left if not _repeats(name, phrase[0])}
        return self._trimmed(phrase)

    def _trimmed(self, phrase: list[str]) -> list[str]:
        """Removes words of the question from the ends, but for one, which gives the keyword its place."""
        asked = self.question.contains
        while len(phrase) > 2 and asked(phrase[0]) and asked(phrase[1]):
            phrase = phrase[1:]
        while len(phrase) > 2 and asked(phrase[-1]) and asked(phrase[-2]):
            phrase = phrase[:-1]
        return phrase

    def _expected(self) -> set[str]:
        """Keywords of the expected type of answer, and those that released pairs join to them."""
        typed = {name for name in self.left if self.question.expects(self.forms.get(name, name))}
        beside = {other for name in typed for near in (self.after, self.previous) for other in near.get(name, ())}
        return typed | (beside & self.left if typed else set())

    def _worth(self, name: str) -> float:
        expected = bool(self.question.expects(self.forms.get(name, name)))
        level = max(self.levels.get(item, 0) for item in (Word(name), Span(name)))
        return level + self.levels.get(Lead(name), -1) + 2.0 * expected

    def _written(self, phrase: Sequence[str]) -> str:
        parts = [self.forms.get(phrase[0], phrase[0])]
        for first, second in zip(phrase, phrase[1:], strict=False):
            parts += [self.gaps.get((first, second), ""), self.forms.get(second, second)]
        return " ".join(part for part in parts if part)

    def _spellings(self) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
        """The released spelling of each word and gap with the highest level; ties by the alphabet."""
        forms: dict[str, str] = {}
        gaps: dict[tuple[str, str], str] = {}
        for item, _ in sorted(self.levels.items(), key=lambda pair: (-pair[1], pair[0][:-1])):
            if isinstance(item, Form):
                forms.setdefault(item.lemma, item.written)
            elif isinstance(item, Gap):
                gaps.setdefault((item.first, item.second), item.between)
        return forms, gaps


def _longest(names: set[str]) -> set[str]:
    """Leaves out names that are parts of others in a script without spaces. No names are joined."""
    if not any(map(is_spaceless, names)):
        return names
    kept, joined = set[str](), ""
    for name in sorted(names, key=lambda name: (-len(name), name)):
        if _key(name) not in joined:
            kept.add(name)
            joined += _key(name) if is_spaceless(name) else ""
    return kept


def _key(name: str) -> str:
    """The clusters of a name, separated."""
    return "\x1f".join(["", *(cluster.text for cluster in clusters(name)), ""])


def _repeats(name: str, said: str) -> bool:
    """Whether half of a span, at one of its ends, was released before; of a long text all windows are released."""
    if not (is_spaceless(name) and is_spaceless(said)):
        return False
    found = clusters(name)
    half = (len(found) + 1) // 2
    return any("".join(cluster.text for cluster in part) in said for part in (found[:half], found[-half:]))
