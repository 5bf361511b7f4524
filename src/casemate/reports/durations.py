"""Formats durations for people. Without NumPy, because progress lines of every command need it."""

from __future__ import annotations

import math

NO_VALUE = "–"
NO_BREAK_SPACE = "\u00a0"
DURATIONS = ((1, 0.001, "ms"), (90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "days"))
"""The longest duration in each unit and the unit, both in seconds, and its name."""


def duration(seconds: float | None) -> str:
    r"""Formats a duration with its unit, from milliseconds to days.

    >>> duration(0.0123), duration(2.5), duration(40.2), duration(None)
    ('12\xa0ms', '2.5\xa0s', '40\xa0s', '–')
    >>> duration(700), duration(7200), duration(200000)
    ('12\xa0min', '2\xa0h', '2.3\xa0days')
    """
    if seconds is None or not math.isfinite(seconds):
        return NO_VALUE
    _, unit, name = next(one for one in DURATIONS if seconds < one[0])
    digits = seconds < 0.01 or (seconds < 10 * unit and name in ("s", "h", "days"))
    text = f"{seconds / unit:.{digits:d}f}".removesuffix(".0")
    return f"{text}{NO_BREAK_SPACE}{name}"
