"""A simulated reader: a rule-based stand-in for a language model that follows every request literally.

For evaluations. Attacks are strongest against a model that follows every request, reproduces its context exactly and
never hallucinates. So a guard measured with this reader faces the worst case, without a model download, and campaigns
are reproducible.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from casemate.backends.generators.simulated_reader import judging, passages
from casemate.backends.generators.simulated_reader.requests import Request, Task, parse_request
from casemate.errors import require_range
from casemate.protocols import Generator
from casemate.text.output_transforms import requested_transform
from casemate.text.sentences import sentences
from casemate.types import UNKNOWN, Prompt


@dataclass(frozen=True, slots=True)
class SimulatedReader(Generator):
    """A SIMULATION of a language model, not a language model. Label results measured with it as simulated.

    It receives only question and context, so it cannot depend on the presence of a guard. It follows the question: it
    repeats the context, returns the text that matches or continues a quotation, fills masks, decides whether a text
    is present and whether a statement is true, and answers other questions with sentences of the context. If
    instructed, it writes its answer in another form (``casemate.text.output_transforms``). Everything else is
    unknown. It ignores the prompt's instructions, because the worst case is a model that follows the question.

    Attributes:
        sentences: Largest number of sentences of an answer to an open question.
        support: Smallest share of such a question's word weights, in (0, 1], that the best sentence must match. Below
            it the answer is unknown.
    """

    sentences: int = 3
    support: float = 0.35

    def __post_init__(self) -> None:
        require_range("simulated_reader", self, "sentences", at_least=1)
        require_range("simulated_reader", self, "support", above=0, at_most=1)

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer sentence by sentence."""
        transform = requested_transform(prompt.question)
        question = prompt.question if transform is None else prompt.question.replace(transform.instruction, "").strip()
        request = parse_request(question)
        if request.task is Task.REPEAT:
            text = "\n\n".join(document.content for document in prompt.context)
        else:
            text = self._answer(request, passages.join_chunks(prompt.context))
        if transform and text:
            text = transform.encode(text)
        for chunk in _split(text or UNKNOWN):
            yield chunk

    def _answer(self, request: Request, context: list[passages.Passage]) -> str:
        """The answer to any request except one for the whole context. Empty: unknown."""
        match request.task:
            case Task.FILL:
                filled = passages.fill_masks(request.text, context)
                return "\n".join(f"{mask}: {word or UNKNOWN.rstrip('.')}" for mask, word in filled.items())
            case Task.PRESENT:
                return "Yes." if passages.contains(request.text, context) else "No."
            case Task.JUDGE:
                verdict = judging.judge(request.text, context)
                return f"{verdict}." if verdict else ""
            case Task.MATCH | Task.CONTINUE:
                return passages.find_match(request.text, context, request.task is Task.CONTINUE)
            case _:
                sentences_found = judging.select_sentences(
                    request.text, request.topic, context, self.sentences, self.support
                )
                return " ".join(sentences_found)


def _split(text: str) -> Iterator[str]:
    """Splits a text before each sentence, without loss."""
    at = 0
    for sentence in sentences(text):
        begin = text.index(sentence, at)
        if begin > at:
            yield text[at:begin]
        yield sentence
        at = begin + len(sentence)
    if at < len(text):
        yield text[at:]
