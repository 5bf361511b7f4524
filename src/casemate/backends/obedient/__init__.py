"""A stand-in for an able and obedient language model: it does by rules what such a model would do when told to.

For the laboratory. An attack is strongest against a model that does all that it is told, knows its context by heart
and invents nothing. Measured against such a reader, a guard faces the worst case, with no model to download, and the
same campaign gives the same figures twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from casemate.backends.obedient import judging, reading
from casemate.backends.obedient.asking import Kind, Request, understand
from casemate.errors import ConfigError
from casemate.protocols import Generator
from casemate.types import UNKNOWN, Prompt
from casemate.words import sentences


@dataclass(frozen=True, slots=True)
class Obedient(Generator):
    """A SIMULATION of a language model, not a language model: figures measured with it must say so.

    It sees the question and the context and nothing else, so it cannot know whether a guard stood between. It does
    what the question asks: it repeats the context, gives the text that goes with a quotation or follows it, fills
    masks, says whether a text is there and whether a statement is true, and answers other questions with sentences of
    the context. What the context does not hold it does not know. The instructions of the prompt are not read: the
    worst case is a model that follows the question.

    Attributes:
        sentences: How many sentences an answer to an open question has at most.
        support: Share of such a question's weight, in (0, 1], that the best sentence must carry; below, the answer
            is that it does not know.
    """

    sentences: int = 3
    support: float = 0.35

    def __post_init__(self) -> None:
        if self.sentences < 1 or not 0 < self.support <= 1:
            raise ConfigError(
                f"obedient: sentences={self.sentences}, support={self.support}; "
                "sentences must be at least 1, support above 0 and at most 1"
            )

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The answer, sentence by sentence."""
        request = understand(prompt.question)
        if request.kind is Kind.REPEAT:
            text = "\n\n".join(document.content for document in prompt.context)
        else:
            text = self._obey(request, reading.passages(prompt.context))
        for piece in _pieces(text or UNKNOWN):
            yield piece

    def _obey(self, request: Request, context: list[reading.Passage]) -> str:
        """The answer to anything but a request for the whole context; empty if there is none."""
        match request.kind:
            case Kind.FILL:
                filled = reading.fill(request.text, context)
                return "\n".join(f"{mask}: {word or UNKNOWN.rstrip('.')}" for mask, word in filled.items())
            case Kind.PRESENT:
                return "Yes." if reading.holds(request.text, context) else "No."
            case Kind.JUDGE:
                verdict = judging.judge(request.text, context)
                return f"{verdict}." if verdict else ""
            case Kind.MATCH | Kind.CONTINUE:
                return reading.following(request.text, context, request.kind is Kind.CONTINUE)
            case _:
                chosen = judging.answer(request.text, request.topic, context, self.sentences, self.support)
                return " ".join(chosen)


def _pieces(text: str) -> Iterator[str]:
    """The text cut before each sentence, nothing lost."""
    at = 0
    for sentence in sentences(text):
        begin = text.index(sentence, at)
        if begin > at:
            yield text[at:begin]
        yield sentence
        at = begin + len(sentence)
    if at < len(text):
        yield text[at:]
