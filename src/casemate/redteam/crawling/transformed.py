"""Any crawler with an output transform: it asks for answers in another form, and decodes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

from casemate.errors import ConfigError
from casemate.protocols import BlackBox, ExtractionAttack
from casemate.text.output_transforms import TRANSFORMS, OutputTransform
from casemate.text.refusals import is_refusal
from casemate.types import Reply


@dataclass
class TransformedCrawler(ExtractionAttack):
    """A crawler whose questions ask for a form of the answer, and which reads the decoded answers.

    Raises:
        ConfigError: If there is no such transform.
    """

    attack: ExtractionAttack
    transform: str

    def __post_init__(self) -> None:
        if self.transform not in TRANSFORMS:
            raise ConfigError(f"unknown transform {self.transform!r}; known: {', '.join(TRANSFORMS)}")
        self.paper = f"{self.attack.paper}; transform {self.transform}"  # type: ignore[misc]

    async def extract(self, box: BlackBox, rng: np.random.Generator) -> AsyncIterator[str]:
        async for text in self.attack.extract(_TransformedBox(box, TRANSFORMS[self.transform]), rng):
            yield text

    def decode(self, reply: str) -> str:
        return _decode(TRANSFORMS[self.transform], reply)


@dataclass(frozen=True)
class _TransformedBox(BlackBox):
    box: BlackBox
    transform: OutputTransform

    async def ask(self, text: str) -> Reply:
        reply = await self.box.ask(f"{text}\n\n{self.transform.instruction}")
        return Reply(_decode(self.transform, reply.text))


def _decode(transform: OutputTransform, reply: str) -> str:
    """The decoded reply; a refusal is in no form."""
    return reply if is_refusal(reply) else transform.decode(reply)
