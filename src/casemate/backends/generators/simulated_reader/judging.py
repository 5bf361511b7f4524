"""Judges statements by the context, and selects the sentences that answer a question."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from casemate.backends.generators.simulated_reader.passages import Passage
from casemate.text.sentences import sentences
from casemate.text.tokens import ANTONYMS, NUMBER, NUMBER_WORDS, STOP_WORDS, content_words, numbers, stem, words

FRAME = re.compile(
    r"^\W*(?:according to [^,]{3,40}, )?(?:(?:is it|would it be|is it really) (?:(?P<no>false|wrong|untrue|incorrect|"
    r"not true)|true|right|correct|accurate|the case)(?: to say)? that|(?:do|does|did) (?:the|this|these|any) (?:\w+ )?"
    r"(?:text|document|passage|source|context|study|author|paper|record|note)s?(?: \w+ly)? "
    r"(?:say|state|mention|report|find|show|indicate|conclude|note|describe)(?: that)?)\s+",
    re.IGNORECASE,
)
TALK = content_words(
    "according ask answer better concern conclude context curious describe detail document especially evidence explain "
    "find found finding identified indicate information interested involve know learn mention note noted observe "
    "observed paper particular regard relation report reported respect result role say says show shown specifically "
    "state study suggest suggested tell text together understand want whether"
)
"""Words of asking and reporting, which do not name the subject."""
NEGATIONS = frozenset("not no never without neither nor none cannot lack lacks lacked failed fails hardly".split())
SUBJECT_SHARE = 0.55  # smallest share of a statement's word weights that a sentence on the same subject matches
TEXT_SHARE = 0.85  # smallest share that a whole text must match if no sentence does
VERBATIM_SHARE = 0.8
"""Share of a statement's content words in order in a sentence, above which a different word is a contradiction."""


class Sentence(NamedTuple):
    """A sentence of the context with its words."""

    position: tuple[int, int]  # passage, sentence in it
    text: str
    bag: frozenset[str]
    topic: frozenset[str]  # content words of the title

    @property
    def all(self) -> frozenset[str]:
        """Its words and those of its title."""
        return self.bag | self.topic


def split_sentences(context: Sequence[Passage]) -> list[Sentence]:
    """All sentences of the context with a content word."""
    result = []
    for number, passage in enumerate(context):
        topic = content_words(passage.title)
        for position, sentence in enumerate(sentences(passage.text)):
            text = " ".join(sentence.split())
            if bag := content_words(text):
                result.append(Sentence((number, position), text, bag, topic))
    return result


def judge(question: str, context: Sequence[Passage]) -> str:
    """``Yes`` if a sentence supports the statement of a yes/no question, ``No`` if one contradicts it, else empty."""
    frame = FRAME.match(question)
    statement = question[frame.end() :] if frame else question
    verdict = _judge(statement.strip(" ?."), split_sentences(context))
    if frame and frame["no"] and verdict:
        return "No" if verdict == "Yes" else "Yes"
    return verdict


def _judge(statement: str, context: Sequence[Sentence]) -> str:
    terms = frozenset(w for w in content_words(statement) if not NUMBER.fullmatch(w)) - TALK
    if not terms or not context:
        return ""
    weight = _weights(context)
    best = max(context, key=lambda s: _share(terms, s.all, weight) + 0.3 * _order(statement, s.text))
    same_text = [s for s in context if s.position[0] == best.position[0]]
    if _share(terms, best.all, weight) < SUBJECT_SHARE:
        everything = frozenset().union(*(s.all for s in same_text))
        stated = numbers(" ".join(s.text for s in same_text))
        return "Yes" if _share(terms, everything, weight) >= TEXT_SHARE and numbers(statement) <= stated else ""
    near = [s.text for s in same_text if abs(s.position[1] - best.position[1]) <= 1]
    wrong = not numbers(statement) <= numbers(" ".join(near)) or _contradicts(statement, best.text)
    return "No" if wrong else "Yes"


def _weights(context: Sequence[Sentence]) -> Callable[[str], float]:
    """Inverse document frequency by sentence. Words that occur nowhere have the highest weight."""
    frequency = Counter(word for s in context for word in s.bag)
    return lambda word: math.log(1 + len(context) / (frequency[word] or 0.5))


def _share(terms: frozenset[str], present: frozenset[str], weight: Callable[[str], float]) -> float:
    return math.fsum(weight(w) for w in terms & present) / math.fsum(weight(w) for w in terms)


def _order(statement: str, sentence: str) -> float:
    """Share of the statement's words that are in the sentence in the same order."""
    a, b = words(statement), words(sentence)
    return sum(m.size for m in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()) / max(1, len(a))


def _contradicts(statement: str, sentence: str) -> bool:
    """Whether a sentence contradicts: by negation, an antonym, or one replaced word."""
    a, b = words(statement), words(sentence)
    if (_negations(statement, a) - _negations(sentence, a)) % 2:
        return True
    if any(ANTONYMS.get(w) in b and w not in b and ANTONYMS[w] not in a for w in a):
        return True
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    same = [w for m in matcher.get_matching_blocks() for w in a[m.a : m.a + m.size] if w not in STOP_WORDS]
    if len(same) < VERBATIM_SHARE * sum(w not in STOP_WORDS for w in a):
        return False
    left, right = ({stem(w) for w in side} | numbers(" ".join(side)) for side in (a, b))
    replaced = [(i1, i2, j1, j2) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag == "replace" and i2 - i1 <= 2]
    return any(
        _adds_meaning(a[i1:i2], right) and _adds_meaning(_replacement(b[j1:j2], i2 - i1, not i1, i2 == len(a)), left)
        for i1, i2, j1, j2 in replaced
    )


def _replacement(part: list[str], count: int, first: bool, last: bool) -> list[str]:
    """The words of a sentence in place of ``count`` others; at the ends of the statement, as many."""
    if first or last:
        return part[-count:] if first else part[:count]
    return part if len(part) <= 2 else []


def _negations(text: str, subject: Sequence[str]) -> int:
    """Number of negations in the parts of a text on the same subject."""
    stems = {stem(w) for w in subject}
    count = 0
    for part in re.split(r"[,;:()]", text.lower().replace("not only", "")):
        part_words = words(part)
        bag = {stem(w) for w in part_words if w not in STOP_WORDS and not _negates(w)}
        count += sum(map(_negates, part_words)) if 2 * len(bag & stems) >= len(bag) else 0
    return count


def _negates(word: str) -> bool:
    return word in NEGATIONS or word.endswith("n't")


def _adds_meaning(part: Sequence[str], other: Collection[str]) -> bool:
    """Whether some words have a meaning that the other side does not express in any form."""
    return any(
        w not in STOP_WORDS
        and NUMBER_WORDS.get(w, w) not in other
        and not any(o.startswith(stem(w)[:4]) for o in other)
        for w in part
    )


def select_sentences(question: str, topic: str, context: Sequence[Passage], limit: int, support: float) -> list[str]:
    """The best sentences for a question in reading order. None if the best one lacks support."""
    candidates = split_sentences(context)
    weight = _weights(candidates)
    terms = content_words(question) - TALK
    topic_words = content_words(topic)
    if not terms:
        return []
    whole = [content_words(p.content) for p in context]

    def score_of(s: Sentence) -> float:
        on_topic = len(topic_words & whole[s.position[0]]) / len(topic_words) if topic_words else 1.0
        return _share(terms, s.all, weight) * (0.5 + 0.5 * on_topic)

    ranked = sorted(candidates, key=lambda s: (-score_of(s), s.position))
    if not ranked or score_of(ranked[0]) < support:
        return []
    floor = max(support, 0.7 * score_of(ranked[0]))
    return [s.text for s in sorted((s for s in ranked[:limit] if score_of(s) >= floor), key=lambda s: s.position)]
