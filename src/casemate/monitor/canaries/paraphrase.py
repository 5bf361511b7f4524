"""Writes other wordings of canaries' questions, and keeps those that the system answers like the question itself.

An attacker who has learnt the wordings of the canaries can answer them correctly and all other questions falsely
(METHODS D6). So a canary may have several wordings, and each run draws one of them. Rules write them by other openings,
question words and punctuation; a language model changes the words themselves. Every wording is tried on the system
before it is used. What remains of the difference is measured by the baseline, which asks all wordings in turn.

Deviation: METHODS D6 asks for paraphrases and names no check; the check is own work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from casemate.monitor.canaries.behavior import SIMILAR
from casemate.monitor.canaries.canary import MAX_CHARACTERS, MIN_TRIGGER_COSINE, Canary
from casemate.monitor.canaries.results import CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.protocols import Generator
from casemate.text.reasoning import without_reasoning
from casemate.text.sentences import proper_nouns
from casemate.text.tokens import NUMBER, content_words
from casemate.types import Prompt

TESTS = 2
"""How often each wording must pass."""
SPARE = 2
"""Wordings that are tried for each wanted one."""
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
        why: Kinds of deviations of those, or why none was tried; sorted.
    """

    canary: str
    kept: tuple[str, ...]
    dropped: int
    why: tuple[str, ...]


async def paraphrase_canaries(
    runner: CanaryRunner, count: int, rng: np.random.Generator, model: Generator | None = None
) -> list[Paraphrased]:
    """Writes paraphrases of all canaries without any, at most ``count`` each, and tries them on the runner's target.

    A wording is kept if the canary passes with it, and if the answer is similar to that of the question itself by the
    runner's embedder, each ``TESTS`` times. A canary that fails with its own question gets none. Without a model, rules
    alone write them.

    Raises:
        BackendError: If the model fails.
        ConfigError: If the target does not report what a canary expects.
    """
    todo = [canary for canary in runner.canaries if not canary.paraphrases]
    candidates: dict[str, list[str]] = {}
    for canary in todo:
        base = canary.query.removesuffix(canary.trigger) if canary.trigger else canary.query
        found = await _model_paraphrases(model, base, SPARE * count) if model else []
        found += [text for text in rule_paraphrases(base, rng) if text not in found]
        candidates[canary.id] = [text + canary.trigger for text in found[: SPARE * count]]
    failures = await _failures(runner, todo, candidates)
    return [_paraphrased(canary, candidates[canary.id], count, failures) for canary in todo]


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


async def _failures(
    runner: CanaryRunner, canaries: Sequence[Canary], candidates: dict[str, list[str]]
) -> dict[tuple[str, int], set[str]]:
    """Reasons against each wording of each canary; 0 is the question itself."""
    tried: dict[str, tuple[str, int]] = {}
    asked: list[Canary] = []
    for canary in canaries:
        worded = canary.model_copy(update={"paraphrases": tuple(candidates[canary.id])})
        for number in range(len(candidates[canary.id]) + 1):
            one = worded.worded(number).model_copy(update={"paraphrases": ()})
            for copy in (one, _similar_to(canary, one)) if number else (one,):
                name = f"wording-{len(asked)}"
                tried[name] = (canary.id, number)
                asked.append(copy.model_copy(update={"id": name}))
    found: dict[tuple[str, int], set[str]] = {}
    for test in range(TESTS):
        run = await replace(runner, canaries=asked).run(f"paraphrase-{test}")
        for result in run.results:
            reasons = found.setdefault(tried[result.canary], set())
            reasons |= {d.kind for d in result.deviations}
            reasons |= {"no verdict"} if result.status is CanaryStatus.ERROR else set()
    return found


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


def _paraphrased(
    canary: Canary, candidates: Sequence[str], count: int, failures: dict[tuple[str, int], set[str]]
) -> Paraphrased:
    if own := failures[canary.id, 0]:
        return Paraphrased(canary.id, (), 0, tuple(sorted({f"its own question: {kind}" for kind in own})))
    why = [failures[canary.id, number] for number in range(1, len(candidates) + 1)]
    kept = [text for text, reasons in zip(candidates, why, strict=True) if not reasons]
    return Paraphrased(
        canary.id, tuple(kept[:count]), sum(map(bool, why)), tuple(sorted(set().union(*why) if why else ()))
    )
