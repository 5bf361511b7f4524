"""Conformance suites for membership, extraction, poisoning and injection attacks."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from casemate.errors import BudgetExhausted
from casemate.protocols import BlackBox, ExtractionAttack, InjectionAttack, MembershipAttack, PoisoningAttack
from casemate.types import UNKNOWN, Document, Reply

CANDIDATE = Document(
    "record",
    "The patient, a 54-year-old weaver from Arnhem, reported a burning pain in the left wrist after 12 hours at the "
    "loom. Doctor Ilse Maren prescribed 20 mg of naproxen and a splint. The pain was gone after three weeks, and the "
    "weaver returned to work in March.",
    "Wrist pain of a weaver",
)
SYSTEM_PROMPT = "Answer from the documents given, in the language of the question, and name the page that you used."
GENRE = (
    "The patient, a 31-year-old baker from Delft, reported a cough at night. Doctor Piet Hals prescribed a spray.",
    "A 67-year-old gardener came with knee pain. The knee was punctured, and 40 ml of clear fluid were removed.",
    "The patient, a 45-year-old teacher, lost her voice for ten days. Rest was advised; no medicine was given.",
)


class ScriptedBox(BlackBox):
    """A target that repeats its texts, or declines when it has none; it refuses questions beyond a budget."""

    def __init__(self, texts: Sequence[str] = (), budget: int = 200) -> None:
        self.texts, self.budget = tuple(texts), budget
        self.questions: list[str] = []

    async def ask(self, text: str) -> Reply:
        if len(self.questions) >= self.budget:
            raise BudgetExhausted("the budget of the check is spent")
        self.questions.append(text)
        return Reply("\n\n".join(self.texts) or UNKNOWN)


def check_membership_attack(attack: MembershipAttack) -> None:
    """Runs every check for a membership attack. Call it where no event loop runs."""
    _require_description(attack, attack.paper)
    assert attack.features and len(set(attack.features)) == len(attack.features), "features need distinct names"
    attack.study(GENRE)

    async def run(box: ScriptedBox) -> tuple[float, ...]:
        return await attack.run(CANDIDATE, box, np.random.default_rng(7))

    for texts in ((), (CANDIDATE.text,), GENRE):
        boxes = ScriptedBox(texts), ScriptedBox(texts)
        first, second = (asyncio.run(run(box)) for box in boxes)
        assert boxes[0].questions == boxes[1].questions, "the same seed and replies must give the same questions"
        assert all(math.isfinite(value) for value in first), f"a feature is not finite: {first}"
        assert first == second, "the same seed and replies must give the same features"
        assert len(first) == len(attack.features), f"{len(first)} values came for {len(attack.features)} features"
        assert boxes[0].questions and all(q.strip() for q in boxes[0].questions), "an attack must ask questions"
    _require_budget_error(run)


def check_extraction_attack(attack: ExtractionAttack) -> None:
    """Runs every check for an extraction attack. Call it where no event loop runs."""
    _require_description(attack, attack.paper)

    async def run(box: ScriptedBox) -> list[str]:
        texts = []
        try:
            async for text in attack.extract(box, np.random.default_rng(7)):
                texts.append(text)
        except BudgetExhausted:
            if not box.budget:
                raise
        return texts

    for texts in ((), GENRE):
        boxes = ScriptedBox(texts, 30), ScriptedBox(texts, 30)
        first, second = (asyncio.run(run(box)) for box in boxes)
        assert boxes[0].questions, "an extraction attack must ask questions"
        assert boxes[0].questions == boxes[1].questions, "the same seed and replies must give the same questions"
        assert first == second, "the same seed and replies must give the same texts"
        assert all(isinstance(text, str) and text.strip() for text in first), "recovered texts must not be empty"
        assert len(boxes[0].questions) <= 30, "an attack must stop when the budget is spent"
    _require_budget_error(run)


def check_poisoning_attack(attack: PoisoningAttack) -> None:
    """Runs every check for a poisoning attack. Call it where no event loop runs."""
    _require_description(attack, attack.paper)
    crafted = [
        list(asyncio.run(attack.craft("When does the pharmacy open?", "At noon.", np.random.default_rng(7))))
        for _ in range(2)
    ]
    assert crafted[0] == crafted[1], "the same seed must give the same documents"
    assert crafted[0], "an attack must craft at least one document"
    assert all(d.text.strip() for d in crafted[0]), "a poisoned document must have text"
    assert len({d.id for d in crafted[0]}) == len(crafted[0]), "poisoned documents need distinct ids"


def check_injection_attack(attack: InjectionAttack) -> None:
    """Runs every check for an injection attack."""
    _require_description(attack, attack.paper)
    assert attack.variants and len(set(attack.variants)) == len(attack.variants), "variants need distinct names"
    for variant in attack.variants:
        made, again = (
            attack.craft(variant, "When does the pharmacy open?", np.random.default_rng(7)) for _ in range(2)
        )
        assert made == again, "the same seed must give the same document"
        assert made.variant == variant, "an injection must name its variant"
        assert made.instruction.strip(), "an injection must have an instruction"
        assert made.instruction in made.document.text, "the document must contain the instruction"
        for reply in ("", "The pharmacy opens at noon.", made.document.text):
            assert not attack.succeeded(made, reply, SYSTEM_PROMPT), "an answer or a quotation is not the effect"


def _require_description(attack: object, paper: str) -> None:
    cls = type(attack)
    assert dataclasses.is_dataclass(attack), "options are dataclass fields: configuration and documentation need them"
    assert (cls.__doc__ or "").strip() and not (cls.__doc__ or "").startswith(f"{cls.__name__}("), (
        "a docstring is missing"
    )
    assert paper.strip(), "'paper' must name the source of the method"


def _require_budget_error(run: object) -> None:
    """``BudgetExhausted`` of the box must reach the lab."""
    try:
        asyncio.run(run(ScriptedBox(GENRE, 0)))  # type: ignore[operator]
    except BudgetExhausted:
        return
    raise AssertionError("an attack must not catch BudgetExhausted")
