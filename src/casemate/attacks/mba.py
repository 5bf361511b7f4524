"""MBA: masks words of a text that are hard to guess, and counts how many the target fills in.

Liu, Zhang and Long 2025, "Mask-based Membership Inference Attacks for Retrieval-Augmented Generation", WWW
(arXiv 2410.20142). A model that has the document before it reads the words off; another one has to guess.

Words are chosen as in the paper: the text is cut into as many equal fragments as there are masks, and in each the
hardest word that may be masked is taken. Not masked are stop words, single characters, what is not a plain word or
number, the first five words, and the word after a masked one. A fragment without any other word gets no mask.

Deviation: the paper ranks words by a proxy language model (``difficulty``). Without one, rare words of the genre are
taken (``idf``), before others those that the rest of the text does not give away.
Deviation: the paper also accepts the spelling that a correction model proposes. Here the word of the text counts alone.
Deviation: punctuation around a masked word stays in the question.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from casemate.errors import ConfigError
from casemate.protocols import LanguageModel, MembershipAttack
from casemate.types import Document, Probe, Reply
from casemate.words import STOP_WORDS, WORD, words

Policy: TypeAlias = Literal["idf", "difficulty", "random"]
POLICIES: tuple[str, ...] = get_args(Policy)

UNMASKED = 5
"""So many first words stay, because nothing stands before them by which they could be guessed."""
ANSWER_WORDS = 8
"""What stands further behind a label is explanation."""

REQUEST = (
    "Words of the text above are masked as [MASK_1], [MASK_2] and so on. Find this text in the context and read the "
    'masked words off there. Answer with one line for each mask, "[MASK_1]: word", and nothing else.'
)

_LABEL = re.compile(r"(?<![^\W_])MASK[ _-]*(\d{1,4})[\"'”’`*_\])} \t]*(=>|->|[:=→|–—]|-(?=\s))?", re.IGNORECASE)
_NUMBER = re.compile(r"(?:^|[,{])[ \t]*[\"'`*(\[]*(\d{1,4})(?:[.)](?=\s)|[\"'`*)\]]*[ \t]*[:=|](?=\D))", re.MULTILINE)
_PIECE = re.compile(r"[^\W_]+")


class _Word(NamedTuple):
    text: str
    start: int
    end: int

    @property
    def plain(self) -> str:
        """As ``words`` gives it."""
        return self.text.lower().replace("’", "'")


Difficulty: TypeAlias = Callable[[_Word], tuple[float, ...]]
"""How hard a word is to guess; higher is harder."""


@dataclass(eq=False)
class MBA(MembershipAttack):
    """Asks for the masked words of the text: one question, scored by the share of words that come back.

    Attributes:
        masks: How many words are masked at most, at least 1.
        policy: Which words: ``idf`` (rare in the genre), ``difficulty`` (unlikely to the model), ``random``; none:
            ``difficulty`` with a model, ``idf`` without.
        max_characters: How much of the text is shown at most, at least 1.
        model: A language model that says which words are hard to guess.
    """

    masks: int = 10
    policy: Policy | None = None
    max_characters: int = 2048
    model: LanguageModel | None = None
    _spread: Counter[str] = field(default_factory=Counter, init=False, repr=False)  # texts of the genre with a word

    paper: ClassVar[str] = "Liu, Zhang and Long 2025, arXiv 2410.20142"
    features: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __post_init__(self) -> None:
        if self.masks < 1 or self.max_characters < 1:
            raise ConfigError(f"mba: masks={self.masks}, max_characters={self.max_characters}; both must be at least 1")
        if self.policy is not None and self.policy not in POLICIES:
            raise ConfigError(f"mba.policy is {self.policy!r}; known: {', '.join(POLICIES)}")
        if self.policy == "difficulty" and not self.model:
            raise ConfigError("mba.policy 'difficulty' needs a language model: set mba.model, or take 'idf'")

    def study(self, texts: Sequence[str]) -> None:
        """Counts in how many texts each word stands."""
        self._spread = Counter(word for text in texts for word in set(words(text)))

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """One question with the masked text; the key holds the word of each mask. None without a word to mask."""
        text = _cut(candidate.text, self.max_characters)
        chosen = _choose(_split(text), self.masks, await self._difficulty(text, rng))
        if not chosen:
            return Probe(())
        masked = text
        for number, word in reversed(list(enumerate(chosen, 1))):
            masked = f"{masked[: word.start]}[MASK_{number}]{masked[word.end :]}"
        return Probe((f"{masked}\n\n{REQUEST}",), {str(number): word.text for number, word in enumerate(chosen, 1)})

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """Share of the masks that are filled in rightly, in [0, 1]."""
        if not probe.key:
            return (0.0,)
        given = answers(replies[0].text, len(probe.key))
        right = sum(_same(word, given.get(number, "")) for number, word in probe.key.items())
        return (right / len(probe.key),)

    async def _difficulty(self, text: str, rng: np.random.Generator) -> Difficulty:
        policy = self.policy or ("difficulty" if self.model else "idf")
        if policy == "random":
            return lambda word: (rng.random(),)
        if policy == "difficulty" and self.model:
            tokens = await asyncio.to_thread(self.model.score, text)
            return lambda word: (max((t.rank for t in tokens if t.start < word.end and t.end > word.start), default=0),)
        here = Counter(words(text))

        def rare(word: _Word) -> tuple[float, ...]:
            return here[word.plain] <= 1, -self._spread[word.plain], len(word.text)

        return rare


def answers(reply: str, masks: int) -> dict[str, str]:
    r"""What a reply gives for each mask, by its number as a string; of several answers, the first.

    Labels may be "[MASK_1]", "mask 1", or a bare number at the start of a line or in json. Without any, lines, or parts
    between commas, are taken in order if they are as many as the masks.

    >>> answers("Sure!\n[MASK_1]: **heron**\nMASK_2 = 2.5 mg", 2)
    {'1': '**heron**', '2': '2.5 mg'}
    """
    labels = list(_LABEL.finditer(reply))
    if any(label[2] for label in labels):
        labels = [label for label in labels if label[2]]  # the others are the question, repeated
    labels = labels or list(_NUMBER.finditer(reply))
    ends = [*(label.start() for label in labels[1:]), len(reply)]
    given: dict[str, str] = {}
    for label, end in zip(labels, ends, strict=False):
        given.setdefault(str(int(label[1])), reply[label.end() : end].strip().partition("\n")[0])
    if given:
        return given
    lists = ([part for part in reply.split(sign) if part.strip()] for sign in "\n,")
    return next(({str(i): part for i, part in enumerate(parts, 1)} for parts in lists if len(parts) == masks), {})


def _same(word: str, given: str) -> bool:
    """Whether an answer is the word, or holds it, whatever the case and the punctuation."""
    want = "".join(_PIECE.findall(word.casefold()))
    have = _PIECE.findall(given.casefold())[:ANSWER_WORDS]
    return any("".join(have[i:j]) == want for j in range(len(have) + 1) for i in range(j))


def _cut(text: str, length: int) -> str:
    """The beginning of a text, without a word that is cut in two."""
    inside = text[length : length + 1].strip()
    return re.sub(r"\S+\Z", "", text[:length]) if inside else text[:length]


def _split(text: str) -> list[_Word | None]:
    """What stands between spaces, in order: the one plain word or number in it, or None if it is anything else."""
    found: list[_Word | None] = []
    for part in re.finditer(r"\S+", text):
        inside = list(WORD.finditer(text, *part.span()))
        found.append(_Word(inside[0][0], *inside[0].span()) if len(inside) == 1 else None)
    return found


def _choose(parts: Sequence[_Word | None], masks: int, difficulty: Difficulty) -> list[_Word]:
    """The words to mask: the hardest that may be, of each fragment."""
    size = math.ceil(len(parts) / masks) or 1
    chosen: list[_Word] = []
    last = -2
    for start in range(0, len(parts), size):
        eligible = {
            i: word
            for i, word in enumerate(parts[start : start + size], start)
            if word and i >= UNMASKED and i != last + 1 and len(word.text) > 1 and word.plain not in STOP_WORDS
        }
        if eligible:
            last = max(eligible, key=lambda i: difficulty(eligible[i]))
            chosen.append(eligible[last])
    return chosen
