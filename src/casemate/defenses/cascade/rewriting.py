"""The cascade by whole answers, for generators that show no probabilities: write, measure, write again without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from casemate.copying import Copying, State
from casemate.defenses.cascade.decoding import View, shown
from casemate.protocols import Generator
from casemate.types import Prompt
from casemate.words import words


@dataclass(eq=False)
class Rewriting(Generator):
    """Lets a generator answer, and answer again until no document is quoted at length.

    An answer comes whole, at its end: nothing of it may leave before it is measured.

    Attributes:
        generator: Writes the answers.
        view: What it sees, the second time, in place of the documents that it quoted. If it quotes them still, they
            are left out.
        run: Words of a document that may stand in an answer as they stand there.
        budget: Words of a document that may be quoted in all; None: any number.
        share: Share of a document's words that may stand in an answer in order, if they are more than the budget.
        note: Takes the figures of each answer, and the prompt.
    """

    generator: Generator
    view: View
    run: int
    budget: int | None
    share: float
    note: Callable[[Prompt, dict[str, Any]], None]

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The first answer that keeps the limits, whole."""
        copied, view, written = frozenset[int](), self.view, 0
        while True:
            text = "".join([piece async for piece in self.generator.stream(shown(prompt, view, copied))])
            written += 1
            quoted = self._quoted(prompt, text)
            if not quoted["copied"] or (view == "ablated" and quoted["copied"] <= copied):
                break  # what is quoted of a document that the model never saw, it has from elsewhere
            if quoted["copied"] <= copied:
                view = "ablated"
            copied |= quoted["copied"]
        self.note(prompt, {**quoted, "mode": "answer", "generations": written, "copied": copied})
        yield text

    def _quoted(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """Which documents an answer quotes beyond the limits, and how much it quotes of any."""
        numbers: dict[str, int] = {}

        def read(source: str) -> list[int]:
            return [numbers.setdefault(word, len(numbers)) for word in words(source)]

        beyond = None if self.budget is None else self.budget + 1
        chunks = [read(d.content) for d in prompt.context]
        copying = Copying(chunks, read(prompt.question), self.run + 1, beyond, self.share)
        state = copying.start()
        for word in read(text):
            state = copying.step(state, word)
        return {"copied": state.copied} | measured(copying, state, range(len(prompt.context)))


def measured(copying: Copying, state: State, chunks: Sequence[int]) -> dict[str, Any]:
    """The most that an answer quotes of any chunk: tokens in runs, and ROUGE-L recall."""
    return {
        "quoted": max((copying.quoted(state, z) for z in chunks), default=0),
        "recall": round(max((copying.recall(state, z) for z in chunks), default=0.0), 4),
    }
