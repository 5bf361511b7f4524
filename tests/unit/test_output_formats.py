"""Percentages and durations have one format in all outputs."""

import re
from pathlib import Path

import pytest

import casemate
from casemate.reports.durations import NO_BREAK_SPACE, duration

PACKAGE = Path(casemate.__file__).parent


def test_percentages_of_monitor_and_dashboard_have_a_space():
    """Python's format ``.0%`` writes ``57%``; ``reports.format.percent`` writes ``57 %``."""
    found = [
        str(file.relative_to(PACKAGE))
        for part in ("monitor", "cli", "gateway", "reports")
        for file in sorted((PACKAGE / part).rglob("*.py"))
        if re.search(r"\{[^{}\n]+:[+,]?(?:\.\d)?%\}", file.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.002, "2 ms"), (0.4, "400 ms"), (1, "1 s"), (2.54, "2.5 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"),
     (5400, "1.5 h"), (36_000, "10 h"), (172_800, "2 days"), (1e7, "116 days")],
)  # fmt: skip
def test_durations_have_one_format(seconds, text):
    assert duration(seconds) == text.replace(" ", NO_BREAK_SPACE)
