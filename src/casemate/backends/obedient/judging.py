"""Is a statement true by the context, and which sentences of it answer a question?"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from casemate.backends.obedient.reading import Passage
from casemate.words import COUNTS, NUMBER, OPPOSITES, STOP_WORDS, content_words, numbers, sentences, stem, words

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
"""Words with which one asks or reports; they tell nothing of what about."""
NEGATIONS = frozenset("not no never without neither nor none cannot lack lacks lacked failed fails hardly".split())
SURE = 0.55
"""Share of a statement's weight that a sentence must carry to speak of the same thing."""
WHOLE = 0.85
"""Share that a whole text must carry when no single sentence does."""
VERBATIM = 0.8
"""Share of a statement's content words found in order in a sentence, from which on another word is a contradiction."""


class Sentence(NamedTuple):
    """A sentence of the context, with what is compared of it."""

    place: tuple[int, int]  # passage, position in it
    text: str
    bag: frozenset[str]
    topic: frozenset[str]  # content words of the title

    @property
    def all(self) -> frozenset[str]:
        """Its words and those of its title."""
        return self.bag | self.topic


def read(context: Sequence[Passage]) -> list[Sentence]:
    """All sentences of the context that have a content word."""
    found = []
    for number, passage in enumerate(context):
        topic = content_words(passage.title)
        for position, piece in enumerate(sentences(passage.text)):
            text = " ".join(piece.split())
            if bag := content_words(text):
                found.append(Sentence((number, position), text, bag, topic))
    return found


def judge(question: str, context: Sequence[Passage]) -> str:
    """``Yes`` if a sentence supports the statement in a yes/no question, ``No`` if it contradicts it, else empty."""
    frame = FRAME.match(question)
    statement = question[frame.end() :] if frame else question
    verdict = _judge(statement.strip(" ?."), read(context))
    if frame and frame["no"] and verdict:
        return "No" if verdict == "Yes" else "Yes"
    return verdict


def _judge(statement: str, known: Sequence[Sentence]) -> str:
    wanted = frozenset(w for w in content_words(statement) if not NUMBER.fullmatch(w)) - TALK
    if not wanted or not known:
        return ""
    weight = _weights(known)
    best = max(known, key=lambda s: _share(wanted, s.all, weight) + 0.3 * _order(statement, s.text))
    same_text = [s for s in known if s.place[0] == best.place[0]]
    if _share(wanted, best.all, weight) < SURE:
        everything = frozenset().union(*(s.all for s in same_text))
        told = numbers(" ".join(s.text for s in same_text))
        return "Yes" if _share(wanted, everything, weight) >= WHOLE and numbers(statement) <= told else ""
    near = [s.text for s in same_text if abs(s.place[1] - best.place[1]) <= 1]
    wrong = not numbers(statement) <= numbers(" ".join(near)) or _contradicts(statement, best.text)
    return "No" if wrong else "Yes"


def _weights(known: Sequence[Sentence]) -> Callable[[str], float]:
    """How much a word tells: rare ones more, and most of all one that occurs nowhere."""
    spread = Counter(word for s in known for word in s.bag)
    return lambda word: math.log(1 + len(known) / (spread[word] or 0.5))


def _share(wanted: frozenset[str], there: frozenset[str], weight: Callable[[str], float]) -> float:
    """Share of the weight of some words that others carry."""
    return math.fsum(weight(w) for w in wanted & there) / math.fsum(weight(w) for w in wanted)


def _order(statement: str, sentence: str) -> float:
    """Share of the statement's words that the sentence has in the same order."""
    a, b = words(statement), words(sentence)
    return sum(m.size for m in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()) / max(1, len(a))


def _contradicts(statement: str, sentence: str) -> bool:
    """Whether a sentence says the contrary: negated, with the opposite word, or with one word exchanged."""
    a, b = words(statement), words(sentence)
    if (_negations(statement, a) - _negations(sentence, a)) % 2:
        return True
    if any(OPPOSITES.get(w) in b and w not in b and OPPOSITES[w] not in a for w in a):
        return True
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    same = [w for m in matcher.get_matching_blocks() for w in a[m.a : m.a + m.size] if w not in STOP_WORDS]
    if len(same) < VERBATIM * sum(w not in STOP_WORDS for w in a):
        return False
    left, right = ({stem(w) for w in side} | numbers(" ".join(side)) for side in (a, b))
    replaced = [(i1, i2, j1, j2) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag == "replace" and i2 - i1 <= 2]
    return any(
        _says(a[i1:i2], right) and _says(_instead(b[j1:j2], i2 - i1, not i1, i2 == len(a)), left)
        for i1, i2, j1, j2 in replaced
    )


def _instead(part: list[str], count: int, first: bool, last: bool) -> list[str]:
    """What a sentence says in place of ``count`` words: at the statement's ends, where it goes on, as many."""
    if first or last:
        return part[-count:] if first else part[:count]
    return part if len(part) <= 2 else []


def _negations(text: str, spoken: Sequence[str]) -> int:
    """How many negations a text has, in those of its parts that speak of the same."""
    known = {stem(w) for w in spoken}
    count = 0
    for part in re.split(r"[,;:()]", text.lower().replace("not only", "")):
        said = words(part)
        bag = {stem(w) for w in said if w not in STOP_WORDS and not _negates(w)}
        count += sum(map(_negates, said)) if 2 * len(bag & known) >= len(bag) else 0
    return count


def _negates(word: str) -> bool:
    return word in NEGATIONS or word.endswith("n't")


def _says(part: Sequence[str], other: Collection[str]) -> bool:
    """Whether some words mean something that the other side says in no form."""
    return any(
        w not in STOP_WORDS and COUNTS.get(w, w) not in other and not any(o.startswith(stem(w)[:4]) for o in other)
        for w in part
    )


def answer(question: str, topic: str, context: Sequence[Passage], most: int, support: float) -> list[str]:
    """The sentences that answer a question best, in order of reading; none if the best does not support it."""
    known = read(context)
    weight = _weights(known)
    wanted = content_words(question) - TALK
    about = content_words(topic)
    if not wanted:
        return []
    whole = [content_words(p.content) for p in context]

    def fit(s: Sentence) -> float:
        on_topic = len(about & whole[s.place[0]]) / len(about) if about else 1.0
        return _share(wanted, s.all, weight) * (0.5 + 0.5 * on_topic)

    ranked = sorted(known, key=lambda s: (-fit(s), s.place))
    if not ranked or fit(ranked[0]) < support:
        return []
    floor = max(support, 0.7 * fit(ranked[0]))
    return [s.text for s in sorted((s for s in ranked[:most] if fit(s) >= floor), key=lambda s: s.place)]
