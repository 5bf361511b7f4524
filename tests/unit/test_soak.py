"""The oracle of the soak benchmark finds answers with words of a document that was withheld from the same client."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest

if sys.platform != "linux":
    pytest.skip("the benchmark kills processes by signals", allow_module_level=True)

from benchmarks.soak import Told, _leaks
from casemate.types import Event

COMMON = "the harbor office is open from nine to five on every working day"
TEXTS = {
    "a": f"{COMMON}. The walnut door of the north tower was mended in spring by two masons.",
    "b": f"{COMMON}. Tickets for the orchid show cost three coins at the booth near the gate.",
}
A, B = (text.partition(". ")[2] for text in TEXTS.values())


def leaks(*told, withheld=("r1",)):
    body = {"flagged": True, "evidence": {"withheld": ["a"]}}
    verdicts = [Event(r, datetime.now(UTC), "verdict", body | {"request": r}) for r in withheld]
    found = _leaks(told, TEXTS, verdicts)
    return found["leaks"], found["leaks_of_what_was_withheld_before"]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([Told("r1", "eve", 0, 1, f"It says: {A}")], (1, 0)),
        ([Told("r1", "eve", 0, 1, f"It says: {B} And {COMMON}.")], (0, 0)),
        ([Told("r1", "eve", 0, 1, "", sources=["a"])], (1, 0)),
        ([Told("r1", "eve", 0, 1, ""), Told("r2", "eve", 2, 3, A)], (0, 1)),
        ([Told("r1", "eve", 0, 1, ""), Told("r2", "eve", 2, 3, A, whole=False)], (0, 1)),
        ([Told("r1", "eve", 0, 3, ""), Told("r2", "eve", 2, 4, A)], (0, 0)),  # starts before the end of the first
        ([Told("r1", "eve", 0, 1, ""), Told("r2", "ann", 2, 3, A)], (0, 0)),
        ([Told("r1", "eve", 0, 1, ""), Told("r2", "eve", 2, 3, "The walnut door of the")], (0, 0)),  # too few words
    ],
)
def test_words_and_sources_of_withheld_documents_are_found(told, expected):
    assert leaks(*told) == expected


def test_an_answer_without_a_withheld_document_is_no_leak():
    assert leaks(Told("r1", "eve", 0, 1, A), withheld=()) == (0, 0)
