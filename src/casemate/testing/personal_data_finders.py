"""Conformance suite for finders of personal data."""

from __future__ import annotations

from casemate.protocols import PersonalDataFinder

TEXT = "Write to ann.lee@example.org or to bo@example.org."
HARMLESS = ("", " ", "The library opens at ten.", "naïve 漢字 \u202e <b>")


def check_personal_data_finder(finder: PersonalDataFinder) -> None:
    """Runs every check for a finder. It must recognize mail addresses."""
    found = finder.find(TEXT)
    texts = [TEXT[one.start : one.end] for one in found]
    assert texts == ["ann.lee@example.org", "bo@example.org"], "find must return each value with its exact position"
    assert all(one.kind for one in found), "a value needs a kind"
    assert list(finder.find(TEXT)) == list(found), "the same text must give the same values"
    for text in HARMLESS:
        assert not finder.find(text), f"nothing personal is in {text!r}"
