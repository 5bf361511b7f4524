"""Output transforms that a real model follows, on fixed contexts of the synthetic clinic.

The prompt asks the reader to repeat a text of `WORDS` words in a form of ``casemate.text.output_transforms``. A reply
counts as followed on two conditions. Its form is nearer to the requested form of the text than to the text (edit
distance). The transform's decoder recovers at least half of the words, in order. Baseline: the request without a form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from rapidfuzz.distance import Indel, LCSseq

from benchmarks import SEED
from benchmarks.real import files
from benchmarks.real.planning import READER
from benchmarks.real.questions import PROMPTS, prompt_row
from casemate.demo.clinic import case_notes
from casemate.maths import stats
from casemate.text.output_transforms import TRANSFORMS
from casemate.text.tokens import words
from casemate.types import Document, Prompt

REQUEST = "Repeat the text of the document word for word."
CONTEXTS, WORDS, TOKENS = 40, 20, 224
"""Number of texts, words of each, and maximum answer length: enough for half of a text in hexadecimal digits."""
PLAIN = "no transform"
FORMS = tuple(name for name, transform in TRANSFORMS.items() if transform.encode("One two.") != "One two.")
"""Transforms that change a text. The others request only a part of it."""
SHARE = 0.5
"""Minimum share of recovered words."""


def trials() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name of the transform, the text, and the row of the prompts file."""
    texts = [" ".join(note.split()[:WORDS]) for _, note in case_notes(CONTEXTS, SEED)]
    for text, name in product(texts, (PLAIN, *FORMS)):
        question = REQUEST if name == PLAIN else f"{REQUEST}\n\n{TRANSFORMS[name].instruction}"
        yield name, text, prompt_row(Prompt(question, (Document("note", text),), READER), TOKENS)


def judge(work: Path, models: list[str]) -> dict[str, Any]:
    """Shares of texts that were recovered, and that were given in the requested form, by reader and transform.

    Args:
        work: Folder with `answers_forms_MODEL.jsonl.gz`.
        models: Names of the readers.
    """
    found: dict[str, Any] = {"contexts": CONTEXTS, "words": WORDS, "tokens": TOKENS, "prompts": PROMPTS, "readers": {}}
    for model in models:
        answers, about = files.read_answers(work / f"answers_forms_{model}.jsonl.gz")
        found["readers"][model] = {"about": about, "transforms": _shares(answers)}
    return found


def _shares(answers: Mapping[str, str]) -> dict[str, Any]:
    """Shares over the texts for which all requests have answers."""
    replies: dict[str, list[tuple[bool, bool]]] = {}
    asked = list(trials())
    open_texts = {text for _, text, row in asked if row["id"] not in answers}
    for name, text, row in asked:
        if text in open_texts:
            continue
        replies.setdefault(name, []).append(judged(name, text, answers[row["id"]]))
    return {
        name: {
            "texts": len(pairs),
            "followed": stats.proportion(sum(done and formed for done, formed in pairs), len(pairs)),
            "recovered": stats.proportion(sum(done for done, _ in pairs), len(pairs)),
        }
        for name, pairs in replies.items()
    }


def judged(name: str, text: str, reply: str) -> tuple[bool, bool]:
    """Whether the decoder recovers at least half of a text, and whether the reply has the form.

    >>> judged("capitals", "One two three.", "ONE TWO THREE."), judged("capitals", "One two three.", "One two three.")
    ((True, True), (True, False))
    """
    if name == PLAIN:
        return recall(text, reply) >= SHARE, True
    transform = TRANSFORMS[name]
    near = Indel.normalized_distance(reply, transform.encode(text)) < Indel.normalized_distance(reply, text)
    return recall(text, transform.decode(reply)) >= SHARE, near


def recall(text: str, reply: str) -> float:
    """Share of the words of a text that a reply contains in order.

    >>> recall("One two three four.", "So: one, three!")
    0.5
    """
    own = words(text)
    return LCSseq.similarity(own, words(reply)) / len(own)
