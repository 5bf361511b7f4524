"""Averaging: repeats a probe in many wordings and averages the replies.

An adaptive attack on guards that decide at random or compare words. Each wording omits other words and orders the rest
differently. Words that lead the retriever to the document are inflected ("hypertension" becomes "hypertensive"). An
embedder maps both forms to nearly the same vector; a test that counts common words does not. One unchanged word then
asks for a fact. Averaging over all replies cancels random decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from casemate.errors import require_range
from casemate.redteam.adaptive_attack import FRAMES, AdaptiveAttack
from casemate.types import Document, Probe

ANCHORS = 8  # distinctive words of the text, from which the leading words are drawn
RARE = 4  # the rarest words of a clause that a question asks for or leads with
ENDINGS = tuple(
    pair.split("-")
    for pair in """sions-sively sion-sive tions-tively tion-tive ties-tous ity-itous ies-ious ment-mental ically-ic
    al-ally ic-ically ings-ed ing-ingly ed-edly ous-ously ists-istic ist-istic ers-ing er-ing sis-tic s-like
    e-ement""".split()
)
"""Word endings and their replacement in another form of the word; the first match applies."""


@dataclass(eq=False)
class Averaging(AdaptiveAttack):
    """Asks the same fact in many wordings. Features: mean grounding score, share of replies above the threshold.

    Attributes:
        questions: Number of wordings, at least 1.
        words: Leading words in each wording, at least 1.
        facts: Number of facts asked in turn, at least 1.
        disguise: Whether leading words are written in another form.
    """

    questions: int = 20
    words: int = 7
    facts: int = 5
    disguise: bool = True

    paper: ClassVar[str] = "own: an adaptive attacker that repeats a probe in other words"
    features: ClassVar[tuple[str, ...]] = ("mean", "majority")

    def __post_init__(self) -> None:
        require_range("averaging", self, "questions words facts", at_least=1)

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """The wordings. Empty for a text without words."""
        anchors = self.anchors(candidate, ANCHORS)
        found = self.clause_keywords(candidate.text, ()) or [anchors]
        facts = [found[i] for i in rng.permutation(len(found))[: self.facts]]
        asked = []
        for turn in range(self.questions if anchors else 0):
            rare = self.rarest(facts[turn % len(facts)], RARE)
            fact = rare[int(rng.integers(len(rare)))]
            lead = [w for w in dict.fromkeys([*anchors, *rare]) if w != fact]
            drawn = [lead[i] for i in rng.permutation(len(lead))[: self.words]]
            shown = " ".join(other_form(w) if self.disguise else w for w in drawn)
            question = FRAMES[int(rng.integers(len(FRAMES)))].format(fact)
            asked.append(f"{shown[0].upper()}{shown[1:]}. {question}" if shown else question)
        return Probe(tuple(asked))


def other_form(word: str) -> str:
    """Another form of a word by its ending, or an invented form if no ending matches.

    >>> [other_form(word) for word in ("hypertension", "density", "toll")]
    ['hypertensive', 'densitous', 'tollish']
    """
    for ending, other in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)] + other
    return f"{word}ish"
