"""The cascade for generators without token probabilities: generate, measure quotations, regenerate without them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from casemate.guard.defenses.cascade.decoding import View, reference_prompt
from casemate.protocols import Generator
from casemate.text.copying import CopyDetector, CopyState
from casemate.text.disclosure import DisclosureCounter
from casemate.text.tokens import words
from casemate.types import Prompt


@dataclass(eq=False)
class RewritingGenerator(Generator):
    """Regenerates an answer until it quotes no document at length.

    The answer is sent whole: no part of it may leave before it is measured.

    Attributes:
        generator: Writes the answers.
        view: Replacement of the quoted documents on the second attempt. If they are quoted again, they are removed.
        run: Maximum number of consecutive words quoted from a document.
        budget: Maximum number of quoted words of a document; None: no limit.
        share: Maximum share of a document's words in an answer in order, if that is more than the budget.
        append: Receives the prompt and the costs of each answer.
    """

    generator: Generator
    view: View
    run: int
    budget: int | None
    share: float
    append: Callable[[Prompt, dict[str, Any]], None]

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the first answer within the limits, whole."""
        copied, view, generations = frozenset[int](), self.view, 0
        while True:
            text = "".join([piece async for piece in self.generator.stream(reference_prompt(prompt, view, copied))])
            generations += 1
            quoted = self._measure(prompt, text)
            if not quoted["copied"] or (view == "ablated" and quoted["copied"] <= copied):
                break  # the model quotes a document it did not see: the text comes from elsewhere
            if quoted["copied"] <= copied:
                view = "ablated"
            copied |= quoted["copied"]
        self.append(prompt, {**quoted, "mode": "answer", "generations": generations, "copied": copied})
        yield text

    def _measure(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """Returns the documents quoted beyond the limits, and the maxima over all documents.

        A document is also quoted if an answer in another form, such as spaced letters or base64, discloses as much.
        """
        numbers: dict[str, int] = {}

        def read(source: str) -> list[int]:
            return [numbers.setdefault(word, len(numbers)) for word in words(source)]

        beyond = None if self.budget is None else self.budget + 1
        chunks = [read(d.content) for d in prompt.context]
        copying = CopyDetector(chunks, read(prompt.question), self.run + 1, beyond, self.share)
        state = copying.start()
        for word in read(text):
            state = copying.step(state, word)
        copied = state.copied | self._disguised(prompt, text)
        return {"copied": copied} | quotation_stats(copying, state, range(len(prompt.context)))

    def _disguised(self, prompt: Prompt, text: str) -> frozenset[int]:
        """Returns the documents of which the answer discloses more than budget and share, in whatever form."""
        if self.budget is None:
            return frozenset()
        counter = DisclosureCounter([d.content for d in prompt.context], prompt.question)
        disclosed = zip(counter.read(text), counter.lengths, strict=True)
        return frozenset(
            z for z, (bits, n) in enumerate(disclosed) if bits.bit_count() > max(self.budget, self.share * n)
        )


def quotation_stats(copying: CopyDetector, state: CopyState, chunks: Sequence[int]) -> dict[str, Any]:
    """Returns the maxima over the chunks: quoted tokens in runs, and ROUGE-L recall."""
    return {
        "quoted": max((copying.quoted_tokens(state, z) for z in chunks), default=0),
        "recall": round(max((copying.rouge_l_recall(state, z) for z in chunks), default=0.0), 4),
    }
