"""RAG-MIA: shows the target a text and asks whether its context holds it.

Anderson, Amit and Goldsteen 2024, "Is My Data in Your Retrieval Database? Membership Inference Attacks Against
Retrieval Augmented Generation" (arXiv 2405.20446), the black-box attack. The whole candidate stands in one question,
so it is retrieved if it is there, and the model compares.

Deviation: the paper cuts texts after 1,000 characters; here 2,000 are the default, which is stronger.
Deviation: the paper tries five wordings and reports the best; here one wording of our own does the same job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from casemate.errors import ConfigError
from casemate.protocols import MembershipAttack
from casemate.types import Document, Probe, Reply
from casemate.words import says_yes


@dataclass(frozen=True, slots=True)
class Direct(MembershipAttack):
    """Asks whether the text is in the context: one question, 1 for yes and 0 for anything else.

    Attributes:
        title: Whether the title is shown above the text.
        max_characters: How much of the candidate is shown at most, at least 1.
    """

    title: bool = False
    max_characters: int = 2000

    paper: ClassVar[str] = "Anderson, Amit and Goldsteen 2024, arXiv 2405.20446"
    features: ClassVar[tuple[str, ...]] = ("yes",)

    def __post_init__(self) -> None:
        if self.max_characters < 1:
            raise ConfigError(f"direct.max_characters is {self.max_characters}; it must be at least 1")

    async def prepare(self, candidate: Document, rng: np.random.Generator) -> Probe:
        """One question that holds the text."""
        text = candidate.content if self.title else candidate.text
        shown = text[: self.max_characters].strip()
        return Probe((f'Does the context contain this text?\n"{shown}"\nAnswer Yes or No.',))

    async def measure(self, candidate: Document, probe: Probe, replies: Sequence[Reply]) -> tuple[float, ...]:
        """1 if the reply says yes, 0 if it says no or neither."""
        return (float(says_yes(replies[0].text)),)
