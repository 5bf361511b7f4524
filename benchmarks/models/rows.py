"""Training rows: one context followed by as many questions with answers as fit, masked from each other.

So a context is processed once for all its questions, while each question is trained as in inference: alone. Some rows
are random tokens to repeat or continue, so that the model learns to copy independent of content.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from benchmarks.models.documents import Writer, shown
from benchmarks.models.questions import RECITE, Asker
from benchmarks.models.tokens import END, PAD, START, encoded, prompt

LENGTHS = {0: (192,), 1: (192,), 2: (256,), 3: (256, 384, 384, 512)}
"""Tokens of a row, by stage."""
RANDOM = {0: 0.5, 1: 0.12, 2: 0.08, 3: 0.08}
"""Share of random rows, by stage."""
CONTEXT_SHARE, CONTEXT_WEIGHT = 0.15, 0.1
"""Share of context tokens in the loss, and their weight; an answer token has weight 1."""
FIRST_WEIGHT, COPY_WEIGHT = 3.0, 0.5
"""The first token of an answer decides between yes, no and unknown. Repetitions are long and easy."""
GATED = ("qa", "idk", "rep", "yn")
"""Kinds that must be mastered before the next stage."""


class Branch(NamedTuple):
    """A context, or a question with its answer.

    Attributes:
        tokens: All tokens.
        kind: Kind of the question; empty: a context.
        given: Number of tokens of the question.
    """

    tokens: list[int]
    kind: str = ""
    given: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows as model input.

    Attributes:
        tokens: Token ids, (rows, length).
        places: Position of each token after its own context, (rows, length).
        seen: Additive attention mask, 0 or a large negative number, (rows, 1, length, length).
        weights: Weight of each token in the loss, (rows, length).
        answers: Number of the answer that a token belongs to, -1: none; (rows, length).
        kinds: Kinds of the answers; empty for those of another stage.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    seen: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor
    kinds: list[str]


@dataclass
class Rows:
    """Draws rows and batches without end.

    Attributes:
        tokenizer: The tokenizer of the pair.
        seed: Seed of the random draws.
    """

    tokenizer: Tokenizer
    seed: int
    rng: random.Random = field(init=False)
    askers: dict[int, Asker] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed * 977 + 5)
        self.askers = {stage: Asker(Writer(self.seed * 1000 + stage + 7, stage)) for stage in (1, 2, 3)}
        self._size = self.tokenizer.get_vocab_size()

    def state(self) -> list[Any]:
        """State of the random generators, to resume from."""
        return [self.rng.getstate(), *(asker.rng.getstate() for asker in self.askers.values())]

    def go_on(self, state: Sequence[Any]) -> None:
        """Restores a state."""
        for rng, held in zip((self.rng, *(asker.rng for asker in self.askers.values())), state, strict=True):
            rng.setstate(held)

    def batch(self, stage: int, tokens: int) -> Batch:
        """Rows with about ``tokens`` tokens in all; a fifth come from the neighboring stages."""
        length = self.rng.choice(LENGTHS[stage])
        rows = []
        for _ in range(max(1, tokens // length)):
            part = self.rng.random()
            other = stage if part < 0.8 else max(0, stage - 1) if part < 0.9 else min(3, stage + 1)
            rows.append((self.row(other, length), other == stage))
        return _stacked(rows, length, self.rng)

    def row(self, stage: int, length: int) -> list[Branch]:
        """A context and questions about it."""
        if self.rng.random() < RANDOM[stage]:
            return self._random(stage, length)
        asker = self.askers[max(1, stage)]
        for _ in range(20):
            texts = asker.writer.context(1 if stage == 0 else 0)
            context, _ = prompt(self.tokenizer, shown(texts), "")
            if len(context) < 0.6 * length:
                break
        else:
            return self.row(stage, length)
        found, left, missed = [Branch(context)], length - len(context), 0
        while left > 14 and missed < 3:
            asked = asker.ask(texts, "" if stage else self.rng.choice(["rep", "repdoc", "cont"]))
            question = prompt(self.tokenizer, "", asked.text)[1]
            branch = [*question, *encoded(self.tokenizer, f" {asked.answer}"), END]
            if len(branch) > left:
                missed += 1
                continue
            found.append(Branch(branch, asked.kind, len(question)))
            left -= len(branch)
        return found

    def _random(self, stage: int, length: int) -> list[Branch]:
        """Random tokens with requests to repeat them, and to continue from four of them."""
        rng = self.rng
        count = rng.randint(6, (length - 40) // 2) if stage else rng.randint(5, rng.choice([20, 70]))
        drawn = [rng.randrange(END + 1, self._size) for _ in range(count)]
        if stage and rng.random() < 0.7:  # few different tokens: then a match of two does not determine the next one
            few = [rng.randrange(END + 1, self._size) for _ in range(rng.choice([8, 16, 32, 64, 128, 300]))]
            uneven = [1 / (i + 1) for i in range(len(few))] if rng.random() < 0.6 else None
            drawn = rng.choices(few, uneven, k=count)
        start, mark = encoded(self.tokenizer, "Context:\n[1]"), encoded(self.tokenizer, " [1]")
        context = [START, *start, *drawn, *encoded(self.tokenizer, "\n")]
        question = prompt(self.tokenizer, "", rng.choice(RECITE))[1]
        found, left = [Branch(context)], length - len(context)
        recital = [*question, *mark, *drawn, END]
        if len(recital) <= left:
            found.append(Branch(recital, "rnd", len(question)))
            left -= len(recital)
        while left > 40 and count > 12:
            i = rng.randrange(count - 10)
            if sum(drawn[j : j + 4] == drawn[i : i + 4] for j in range(count)) > 1:
                break
            begun = [*encoded(self.tokenizer, "Question: Complete this text:"), *drawn[i : i + 4]]
            question = [*begun, *encoded(self.tokenizer, "\nAnswer:")]
            branch = [*question, *drawn[i + 4 : i + 16], END]
            if len(branch) > left:
                break
            found.append(Branch(branch, "rnd", len(question)))
            left -= len(branch)
        return found


def _stacked(rows: Sequence[tuple[list[Branch], bool]], length: int, rng: random.Random) -> Batch:
    shape = (len(rows), length)
    tokens, places = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.long)
    part, answers, weights = torch.full(shape, -1), torch.full(shape, -1), torch.zeros(shape)
    kinds: list[str] = []
    for r, (row, usual) in enumerate(rows):
        begin = 0
        for n, branch in enumerate(row):
            given = branch.tokens[: length - begin]
            end, context = begin + len(given), len(row[0].tokens)
            tokens[r, begin:end], part[r, begin:end] = torch.tensor(given), n
            first = context if n else 0
            places[r, begin:end] = torch.arange(first, first + len(given))
            if n:
                said = begin + branch.given
                weights[r, said:end] = COPY_WEIGHT if branch.kind in {"rep", "rnd"} else 1.0
                weights[r, min(end - 1, said)] *= FIRST_WEIGHT
                answers[r, said:end] = len(kinds)
                kinds.append(branch.kind if usual else "")
            else:
                chosen = [i for i in range(1, end) if rng.random() < CONTEXT_SHARE]
                weights[r, chosen] = CONTEXT_WEIGHT
            begin = end
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    mine = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])  # (rows, length, length)
    seen = torch.where(earlier & mine, 0.0, -1e4)[:, None]
    return Batch(tokens, places, seen, weights, answers, kinds)
