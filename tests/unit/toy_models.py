"""Language models with few letters, whose distributions a test can compute exactly."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from casemate.protocols import DecodingSession, Generator, TokenModel


@dataclass
class Toy(Generator, TokenModel):
    """The next letter depends on the whole prompt and the last two letters of the answer.

    A letter is a token. A prompt is its question and the texts of its documents, each followed by a space.
    """

    seed: int = 0
    letters: str = "abc "
    end: str = ""
    spread: float = 1.5
    limit: int | None = None
    begun: list = field(default_factory=list)  # all prompts of sessions
    known: dict = field(default_factory=dict)  # cache of computed logits

    @property
    def vocabulary(self):
        return tuple(self.letters)

    @property
    def ends(self):
        return frozenset(self.tokens(self.end))

    def encode(self, prompt):
        parts = [prompt.instructions, prompt.question, *(d.content for d in prompt.context)]
        return self.tokens("".join(f"{part} " for part in parts))

    def tokens(self, text):
        return [self.letters.index(c) for c in text if c in self.letters]

    def text(self, tokens):
        return "".join(self.letters[t] for t in tokens)

    def begin(self, prompts):
        self.begun += [self.text(prompt) for prompt in prompts]
        return ToyReading(self, [tuple(prompt) for prompt in prompts])

    def flops(self, tokens, before):
        return float(tokens)

    def logits(self, prompt, answer):
        """Returns the logits of the next letter, float64, (V,)."""
        key = tuple(prompt), tuple(answer)[-2:]
        if key not in self.known:
            rng = np.random.default_rng(zlib.crc32(repr((self.seed, *key)).encode()))
            self.known[key] = self.spread * rng.standard_normal(len(self.letters))
        return self.known[key]

    async def stream(self, prompt):
        generated = []
        while len(generated) < 8:
            generated.append(int(self.logits(self.encode(prompt), generated).argmax()))
            yield self.text(generated[-1:])


@dataclass
class ToyReading(DecodingSession):
    model: Toy
    prompts: list
    flops: float = 0.0

    def read(self, answer, last=1):
        self.flops += last
        ends = range(len(answer) - last + 1, len(answer) + 1)
        return np.array([[self.model.logits(prompt, answer[:end]) for end in ends] for prompt in self.prompts])
