"""DCMI, differential calibration: asks about a text and a perturbed copy, and scores the difference.

Gao, Meng, Dong, Li and Guo 2025, "DCMI: A Differential Calibration Membership Inference Attack Against
Retrieval-Augmented Generation", CCS (arXiv 2509.06026), the black-box attack. Other documents on the subject make a
model agree with both texts, so their effect cancels out. Only the document itself contradicts the changed copy.

Deviation: without a language model, rules perturb the copy: antonyms from a list, other numbers, "not".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import ClassVar

import numpy as np

from casemate.errors import require_range
from casemate.protocols import Generator, MembershipAttack
from casemate.redteam.crawling.writer import generate
from casemate.text.refusals import says_yes
from casemate.text.tokens import STOP_WORDS, WORD, words
from casemate.types import Document, Probe, Reply

ANTONYM_PAIRS = """
above/below absent/present abundant/scarce active/inactive acute/chronic adequate/inadequate after/before always/never
ancient/modern apart/together bad/good beneficial/harmful best/worst better/worse bright/dark broad/narrow
certain/uncertain cheap/expensive clean/dirty clear/unclear cold/hot common/rare complete/incomplete
consistent/inconsistent correct/wrong dangerous/safe decrease/increase decreased/increased decreases/increases
decreasing/increasing deep/shallow different/identical difficult/easy direct/indirect dry/wet early/late earlier/later
effective/ineffective empty/full external/internal failed/succeeded false/true fast/slow female/male few/many fewer/more
first/last formal/informal frequent/infrequent frequently/rarely general/specific greater/smaller happy/unhappy
hard/soft healthy/ill heavy/light high/low higher/lower highest/lowest important/unimportant improve/worsen
improved/worsened inside/outside known/unknown large/small larger/lesser left/right likely/unlikely long/short
longer/shorter major/minor maximum/minimum men/women mild/severe near/far necessary/unnecessary negative/positive
new/old normal/abnormal often/seldom older/younger open/closed permanent/temporary poor/rich possible/impossible
primary/secondary private/public quickly/slowly quiet/loud reduce/raise reduced/raised regular/irregular
related/unrelated significant/insignificant significantly/insignificantly similar/dissimilar simple/complex
single/multiple smooth/rough stable/unstable strong/weak stronger/weaker successful/unsuccessful sufficient/insufficient
thick/thin useful/useless usual/unusual usually/exceptionally visible/invisible warm/cool with/without young/aged
"""
ONE_WAY_ANTONYMS = {
    "all": "few",
    "big": "small",
    "least": "most",
    "less": "more",
    "most": "least",
    "not": "indeed",
    "tall": "short",
}
ANTONYMS = ONE_WAY_ANTONYMS | {
    a: b for pair in ANTONYM_PAIRS.split() for a, b in (pair.split("/"), pair.split("/")[::-1])
}
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
MODIFIER = re.compile(r"\w{3,}(?:able|ful|ible|ive|less|ly|ous)", re.IGNORECASE)
"""Endings of most adverbs and many adjectives."""
AUXILIARIES = frozenset("are can could did do does had has have is may might must should was were will would".split())

INSTRUCTIONS = (
    "Change the text so that it says something else, in about {percent} of its words: adjectives, adverbs and numbers "
    "first, each to its opposite or to another value. Leave all other words and their order as they are. Write the "
    "changed text and nothing else."
)


@dataclass(frozen=True, slots=True)
class DCMI(MembershipAttack):
    """Asks whether the text and a perturbed copy are right: two questions, scored by the difference.

    Attributes:
        share: Share of changed words, in (0, 1]; at least one word.
        max_characters: Longest text in a question, at least 1.
        writer: Generator that writes the copy. None, or a copy that does not follow the request: rules.
    """

    share: float = 0.06
    max_characters: int = 2000
    writer: Generator | None = None

    paper: ClassVar[str] = "Gao et al. 2025, arXiv 2509.06026"
    features: ClassVar[tuple[str, ...]] = ("difference",)

    def __post_init__(self) -> None:
        require_range("dcmi", self, "share", above=0, at_most=1)
        require_range("dcmi", self, "max_characters", at_least=1)

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """Two questions in the same words: about the text, and about its perturbed copy."""
        text = candidate.text[: self.max_characters].strip()
        copy = await self._writer_copy(text) or perturbed_copy(text, self.share, rng)
        return Probe(
            tuple(f'"{t}"\nIs this right, according to the documents? Answer Yes or No.' for t in (text, copy))
        )

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """[yes to the text] - [yes to the copy]: -1, 0 or 1."""
        text, copy = (says_yes(reply.text) for reply in replies)
        return (float(text) - float(copy),)

    async def _writer_copy(self, text: str) -> str:
        """The writer's copy. Empty without a writer, or if the copy is equal or more than half of its words are new."""
        if not self.writer:
            return ""
        instructions = INSTRUCTIONS.format(percent=f"{self.share:.0%}")
        copy = (await generate(self.writer, text, instructions=instructions)).strip().strip('"')
        same = SequenceMatcher(None, words(text), words(copy), autojunk=False).ratio()
        return copy if 0.5 <= same < 1 else ""


def perturbed_copy(text: str, share: float, rng: np.random.Generator) -> str:
    """The text with a share of its words, at least one, changed.

    Antonyms and numbers come first, then "not" after auxiliary verbs and before likely adverbs or adjectives. Other
    words follow, content words first. Ties are broken at random.

    >>> perturbed_copy("The dose was low.", 0.06, np.random.default_rng(0))
    'The dose was high.'
    """
    found = list(WORD.finditer(text))
    edits = [_edit(m[0], rng) for m in found]
    order = sorted(rng.permutation(len(found)), key=lambda i: edits[i][0])
    chosen = set(order[: max(1, round(share * len(found)))])
    pieces, end = [], 0
    for i, m in enumerate(found):
        pieces += [text[end : m.start()], edits[i][1] if i in chosen else m[0]]
        end = m.end()
    return "".join([*pieces, text[end:]])


def _edit(word: str, rng: np.random.Generator) -> tuple[int, str]:
    """The changed word and its priority; lower is changed first."""
    plain = word.lower()
    if plain in ANTONYMS:
        return 0, _match_case(ANTONYMS[plain], word)
    if NUMBER.fullmatch(word):
        return 0, str(rng.choice([digit for digit in "123456789" if digit != word[0]])) + word[1:]
    if plain in AUXILIARIES:
        return 1, f"{word} not"
    if MODIFIER.fullmatch(word):
        return 1, f"not {word}"
    return (3 if plain in STOP_WORDS else 2), f"not {word}"


def _match_case(word: str, like: str) -> str:
    if like.isupper():
        return word.upper()
    return word.capitalize() if like[0].isupper() else word
