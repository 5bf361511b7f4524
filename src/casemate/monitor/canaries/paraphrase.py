"""Writes other wordings of canaries' questions, and keeps those that the system answers like the question itself.

An attacker who has learnt the wordings of the canaries can answer them correctly and all other questions falsely
(METHODS D6). So a canary may have several wordings, and each run draws one of them. Rules write them by other openings,
question words and punctuation; a language model changes the words themselves. Every wording is tried on the system
before it is used. What remains of the difference is measured by the baseline, which asks all wordings in turn.

Deviation: METHODS D6 asks for paraphrases and names no check; the check is own work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from casemate.monitor.canaries.behavior import SIMILAR
from casemate.monitor.canaries.canary import MAX_CHARACTERS, MIN_TRIGGER_COSINE, Canary
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.protocols import Generator
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.text.reasoning import without_reasoning
from casemate.text.sentences import proper_nouns
from casemate.text.tokens import NUMBER, content_words
from casemate.types import Prompt

TESTS = 2
"""How often each wording must pass."""
SPARE = 2
"""Wordings that are tried at most for each wanted one."""
INSTRUCTIONS = (
    "You rewrite questions. Write {count} other wordings of the question that you are given. Keep its meaning, its "
    "names and its numbers. Do not answer it. Write one wording per line and nothing else."
)
QUESTION_WORDS = (
    (r"what is\b", "what's"),
    (r"what's\b", "what is"),
    (r"which\b", "what"),
    (r"how many\b", "what number of"),
    (r"how do i\b", "how can I"),
    (r"how can i\b", "how do I"),
    (r"where\b", "in which place"),
    (r"why\b", "for what reason"),
    (r"is there anything on\b", "do you have anything on"),
    (r"what do we have about\b", "is there something about"),
    (r"i am looking for\b", "I need"),
)
"""Beginnings of an English question and other words for them."""
OPENINGS = ("", "Hello. ", "Please tell me: ", "A question: ", "I would like to know this. ", "Can you help me? ")
CLOSINGS = ("", " Thank you.", " Please answer.", " Please look it up.")
"""Beside the question they contain stop words and words of politeness only, which hardly affect retrieval."""
_ENGLISH = re.compile(
    r"(?:what|which|who|whose|when|where|why|how|is|are|do|does|did|can|could|should|will|for|tell|explain|describe"
    r"|list|show|give|name|best|please)\b",
    re.IGNORECASE,
)
_LIST_MARK = re.compile(r"^\s*(?:[-*\u2022]|\(?\d{1,2}[.):])\s+")


class Paraphrased(NamedTuple):
    """Wordings of one canary that passed, and the number that did not.

    Attributes:
        reasons: Kinds of deviations of those, or why none was tried; sorted.
    """

    canary: str
    kept: tuple[str, ...]
    dropped: int
    reasons: tuple[str, ...]


async def paraphrase_canaries(
    runner: CanaryRunner,
    count: int,
    rng: np.random.Generator,
    model: Generator | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Paraphrased]:
    """Writes paraphrases of all canaries without any, at most ``count`` each, and tries them on the runner's target.

    A wording is kept if the canary passes with it, and if the answer is similar to that of the question itself by the
    runner's embedder, each ``TESTS`` times. A canary that fails with its own question gets none. Without a model, rules
    alone write them. ``progress`` receives the trials done, and those planned so far.

    Raises:
        BackendError: If the model fails.
        ConfigError: If the target does not report what a canary expects.
    """
    todo = [canary for canary in runner.canaries if not canary.paraphrases]
    trials = _Trials(replace(runner, embedder=runner.embedder and CachedEmbedder(runner.embedder)), progress)
    await trials.run([(canary, 0) for canary in todo])
    for i, canary in enumerate(todo):
        if not trials.failures[canary.id, 0]:
            texts = await _candidates(canary, SPARE * count, rng, model)
            todo[i] = canary.model_copy(update={"paraphrases": tuple(texts)})
    while wanted := [(canary, number) for canary in todo for number in trials.next(canary, count)]:
        await trials.run(wanted)
    return [trials.result(canary) for canary in todo]


async def _candidates(canary: Canary, count: int, rng: np.random.Generator, model: Generator | None) -> list[str]:
    """Other wordings of a canary, by the model first."""
    base = canary.query.removesuffix(canary.trigger) if canary.trigger else canary.query
    found = await _model_paraphrases(model, base, count) if model else []
    found += [text for text in rule_paraphrases(base, rng) if text not in found]
    return [text + canary.trigger for text in found[:count]]


def rule_paraphrases(question: str, rng: np.random.Generator) -> list[str]:
    """Other wordings of an English question, in random order; the words that carry its meaning stay.

    A question that does not begin with a known English word is only written without its question mark.

    >>> rule_paraphrases("Which bridge is it?", np.random.default_rng(1))[:2]
    ['Hello. What bridge is it? Please look it up.', 'A question: Which bridge is it? Thank you.']
    """
    text = question.strip()
    swapped = [_swapped(text, *rule) for rule in QUESTION_WORDS if re.match(rule[0], text, re.IGNORECASE)]
    found = re.match(r"\S+", text)
    casual = [text[0].lower() + text[1:-1].rstrip()] if text.endswith("?") and found and found[0].istitle() else []
    wordings = dict.fromkeys(casual)
    if swapped or _ENGLISH.match(text):
        wordings |= dict.fromkeys(
            f"{opening}{core}{closing}" for opening in OPENINGS for core in (text, *swapped) for closing in CLOSINGS
        )
    kept = [one for one in wordings if one != text and len(one) <= MAX_CHARACTERS]
    return [kept[i] for i in rng.permutation(len(kept))]


def _swapped(text: str, pattern: str, other: str) -> str:
    """The question with another beginning."""
    return re.sub(rf"^{pattern}", other[0].upper() + other[1:], text, count=1, flags=re.IGNORECASE)


async def _model_paraphrases(model: Generator, question: str, count: int) -> list[str]:
    """Wordings by a language model that keep the names and numbers of the question."""
    prompt = Prompt(question, (), INSTRUCTIONS.format(count=count))
    reply = without_reasoning("".join([piece async for piece in model.stream(prompt)]))
    lines = dict.fromkeys(_LIST_MARK.sub("", line).strip().strip('"') for line in reply.splitlines())
    return [line for line in lines if _keeps_names(question, line)][:count]


def _keeps_names(question: str, text: str) -> bool:
    """Whether a line is another wording with the same numbers and names, and not much longer."""
    named = content_words(" ".join(proper_nouns(question)))
    return (
        0 < len(text) <= min(3 * len(question) + 40, MAX_CHARACTERS)
        and text.lower() != question.lower()
        and sorted(NUMBER.findall(text)) == sorted(NUMBER.findall(question))
        and named <= content_words(text)
    )


@dataclass(slots=True)
class _Trials:
    """Tries wordings on a system.

    Attributes:
        failures: Reasons against each wording that was tried, by canary and number; 0 is the question itself.
    """

    runner: CanaryRunner
    progress: Callable[[int, int], None]
    failures: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    asked: int = 0
    done: int = 0

    async def run(self, wanted: Sequence[tuple[Canary, int]]) -> None:
        """Tries wordings, each given by the canary and its number there."""
        tried: dict[str, tuple[str, int]] = {}
        copies: list[Canary] = []
        for canary, number in wanted:
            one = canary.worded(number).model_copy(update={"paraphrases": ()})
            for copy in (one, _similar_to(canary, one)) if number else (one,):
                name = f"wording-{self.asked + len(copies)}"
                tried[name] = (canary.id, number)
                copies.append(copy.model_copy(update={"id": name}))
        self.asked += len(copies)
        for test in range(TESTS):
            run = await replace(self.runner, canaries=copies).run(f"paraphrase-{test}", on_result=self._count)
            for result in run.results:
                reasons = self.failures.setdefault(tried[result.canary], set())
                reasons |= {d.kind for d in result.deviations}
                reasons |= {"no verdict"} if result.status is CanaryStatus.ERROR else set()

    def _count(self, _: CanaryResult) -> None:
        self.done += 1
        self.progress(self.done, TESTS * self.asked)

    def _tried(self, canary: Canary) -> dict[str, set[str]]:
        """The reasons against each of a canary's wordings that was tried."""
        texts = enumerate(canary.paraphrases, 1)
        return {text: self.failures[canary.id, n] for n, text in texts if (canary.id, n) in self.failures}

    def next(self, canary: Canary, count: int) -> range:
        """The numbers of as many untried wordings as a canary lacks to ``count`` that passed."""
        tried = self._tried(canary)
        lacks = count - sum(not reasons for reasons in tried.values())
        return range(len(tried) + 1, min(len(tried) + lacks, len(canary.paraphrases)) + 1)

    def result(self, canary: Canary) -> Paraphrased:
        """The wordings of a canary that passed."""
        if own := self.failures[canary.id, 0]:
            return Paraphrased(canary.id, (), 0, tuple(sorted({f"its own question: {kind}" for kind in own})))
        tried = self._tried(canary)
        kept = tuple(text for text, reasons in tried.items() if not reasons)
        return Paraphrased(canary.id, kept, len(tried) - len(kept), tuple(sorted(set().union(*tried.values()))))


def _similar_to(canary: Canary, worded: Canary) -> Canary:
    """A canary that compares the answer to a wording, without its trigger, with that to the original question."""
    original, text = (c.query.removesuffix(canary.trigger) if canary.trigger else c.query for c in (canary, worded))
    return Canary(
        id=canary.id,
        query=text,
        baseline_query=original,
        expected_behavior=SIMILAR,
        similarity_threshold=MIN_TRIGGER_COSINE,
    )
