"""Personal data in answers: replaces values that a finder recognizes by the name of their kind.

Many guards for language models have this check; no paper. It protects single values, such as telephone numbers, from
every client. It does not protect membership, and it depends on the recall of the finder.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar

from casemate.protocols import Defense, PersonalDataFinder
from casemate.types import Action, Answer, Outcome, PersonalData, Query, Verdict

NAME = "personal_data"


@dataclass(eq=False)
class MaskPersonalData(Defense):
    """Masks personal data in answers, except what the question contains itself.

    Attributes:
        finder: Recognizes personal data.
    """

    finder: PersonalDataFinder = field(repr=False)

    paper: ClassVar[str] = "none: a common check"
    max_hidden_sources: ClassVar[int] = 0  # it changes answers only

    async def on_answer(self, query: Query, answer: Answer) -> Outcome[Answer]:
        """Replaces each value by its kind in brackets. The evidence counts the values by kind, without their text."""
        new = await asyncio.to_thread(find_new, self.finder, query.text, answer.text)
        counts = Counter(one.kind for one in new)
        verdict = Verdict(NAME, bool(new), Action.NONE, float(len(new)), 0.5, evidence=dict(sorted(counts.items())))
        return Outcome(replace(answer, text=mask(answer.text, new)) if new else answer, verdict)


def find_new(finder: PersonalDataFinder, question: str, answer: str) -> list[PersonalData]:
    """Personal data in an answer, except values that the question contains itself. Blocks."""
    given = question.casefold()
    return [one for one in finder.find(answer) if answer[one.start : one.end].casefold() not in given]


def mask(text: str, found: list[PersonalData]) -> str:
    """Replaces values by their kinds; of overlapping values, all characters by the kind of the first.

    >>> mask("Ann, ann@b.org", [PersonalData("PERSON", 0, 3), PersonalData("EMAIL", 5, 14), PersonalData("URL", 9, 14)])
    '[PERSON], [EMAIL]'
    """
    pieces, end = list[str](), 0
    for one in sorted(found, key=lambda one: (one.start, -one.end)):
        if one.start >= end:
            pieces += [text[end : one.start], f"[{one.kind}]"]
        end = max(end, one.end)
    return "".join([*pieces, text[end:]])
