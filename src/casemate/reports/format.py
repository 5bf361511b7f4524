"""Formats numbers, percentages, intervals and times for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from casemate.maths.stats import Estimate, clopper_pearson
from casemate.reports.durations import NO_BREAK_SPACE, NO_VALUE
from casemate.text.tokens import REPLACEMENT_CHARACTER, UNSAFE_CHARACTERS

T = TypeVar("T")
TOO_FEW = "too few to say"
MAX_TYPES = 5
"""Types of files that are named."""
_FIGURE = re.compile(r"[\d.<>]+( %)?( \[[^\]]*\])?")


def scrub(value: T) -> T:
    r"""Returns the same records with every character replaced that harms a terminal, an XML parser or an encoder.

    >>> scrub({"a": ("b\x1b[31m", 1.5)})
    {'a': ('b�[31m', 1.5)}
    """
    return _scrubbed(value)  # type: ignore[no-any-return]


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, StrEnum) else UNSAFE_CHARACTERS.sub(REPLACEMENT_CHARACTER, value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _scrubbed(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, Mapping):
        return {_scrubbed(k): _scrubbed(v) for k, v in value.items()}
    if isinstance(value, Estimate):
        return value
    if isinstance(value, list | tuple):
        scrubbed = map(_scrubbed, value)
        return type(value)(*scrubbed) if hasattr(value, "_fields") else type(value)(scrubbed)
    return value


def number(x: float | None, digits: int = 2) -> str:
    """Formats a figure as papers print it, without a leading zero.

    >>> [number(x) for x in (0.984, 1.0, -0.031, 0.0, None)]
    ['.98', '1.00', '-.03', '.00', '–']
    """
    if x is None or not math.isfinite(x):
        return NO_VALUE
    text = f"{x:.{digits}f}"
    return re.sub(r"^(-?)0\.", r"\1.", text if float(text) else text.lstrip("-"))


def decimal(x: float | None, digits: int = 2) -> str:
    """Formats a number with a fixed count of decimals and a typographic minus.

    >>> decimal(-0.5), decimal(None)
    ('−0.50', '–')
    """
    return NO_VALUE if x is None or not math.isfinite(x) else minus(f"{x:.{digits}f}")


def minus(text: str) -> str:
    """Replaces each hyphen by a minus sign."""
    return text.replace("-", "−")


def percent(x: float | None) -> str:
    """Formats a share in [0, 1]; it is never rounded to 0 % or 100 %.

    >>> [percent(x) for x in (0.5, 0.041, 0.0, 0.9996, 0.0002, 1.0)]
    ['50 %', '4.1 %', '0 %', '>99.9 %', '<0.1 %', '100 %']
    """
    return NO_VALUE if x is None or not math.isfinite(x) else f"{_hundredths(x)} %"


def _hundredths(x: float) -> str:
    if not math.isfinite(x):
        return NO_VALUE
    if 0 < x < 0.0005 or 0.9995 < x < 1:
        return "<0.1" if x < 0.5 else ">99.9"
    tight = 0 < x < 0.0995 or 0.99 < x < 1
    return f"{100 * x:.1f}" if tight else f"{100 * x:.0f}"


def interval(rate: Estimate, share: bool = False) -> str:
    """Formats both ends of the 95 % interval.

    >>> interval(Estimate(0.512, 0.481, 0.543)), interval(Estimate(0.02, 0.0, 0.05), share=True)
    ('[.48, .54]', '[0, 5.0]')
    """
    form = _hundredths if share else number
    return f"[{form(rate.low)}, {form(rate.high)}]"


def measured(rate: Estimate | None, share: bool = False) -> str:
    """Formats a figure with its 95 % interval.

    >>> measured(Estimate(0.512, 0.481, 0.543)), measured(None)
    ('.51 [.48, .54]', 'too few to say')
    """
    if rate is None:
        return TOO_FEW
    return f"{percent(rate.value) if share else number(rate.value)} {interval(rate, share)}"


def sample_rate(count: int, n: int) -> tuple[str, str]:
    """Formats the rate of a sample: the percentage, and the counts with the exact 95 % interval.

    >>> sample_rate(1, 10)
    ('10 %', '1 of 10; 95 % interval 0.3 to 44.5 %')
    >>> sample_rate(0, 0)
    ('–', 'no data')
    """
    if not n:
        return NO_VALUE, "no data"
    low, high = clopper_pearson(count, n)
    return percent(count / n), f"{count:,} of {n:,}; 95 % interval {100 * low:.1f} to {100 * high:.1f} %"


def unbroken(text: str) -> str:
    r"""Keeps each figure, its percent sign and its interval on one line.

    >>> unbroken("AUC .51 [.48, .54], 5 % of all")
    'AUC .51\xa0[.48,\xa0.54], 5\xa0% of all'
    """
    return _FIGURE.sub(lambda found: found.group().replace(" ", NO_BREAK_SPACE), text)


def short_rate(rate: float) -> str:
    """Formats a rate without leading zero and without exponent.

    >>> short_rate(0.01), short_rate(0.00005)
    ('.01', '.00005')
    """
    return np.format_float_positional(rate).removeprefix("0")


def one_in(rate: float) -> str:
    """Formats a rate as a ratio.

    >>> [one_in(r) for r in (0.01, 0.03, 0.5, 0.4)]
    ['1 in 100', '1 in 33', '1 in 2', '1 in 2.5']
    """
    return f"1 in {1 / rate:.0f}" if rate <= 0.1 else f"1 in {1 / rate:.1f}".removesuffix(".0")


def plural(count: int, noun: str) -> str:
    """Formats a count of things.

    >>> plural(1, "chunk"), plural(1200, "chunk")
    ('1 chunk', '1,200 chunks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def file_types(counts: Mapping[str, int]) -> str:
    """Formats numbers of files by ending, the most frequent first, in parentheses; empty without any.

    >>> file_types({".csv": 1, ".docx": 3}), file_types({})
    (' (3 .docx, 1 .csv)', '')
    """
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count:,} {ending}" for ending, count in frequent[:MAX_TYPES]]
    parts += [f"{plural(len(frequent) - MAX_TYPES, 'other type')}"] if len(frequent) > MAX_TYPES else []
    return f" ({', '.join(parts)})" if parts else ""


def iso_time(text: str) -> str:
    """Formats an ISO 8601 time with a space instead of the T.

    >>> iso_time("2026-11-20T14:34:10+00:00"), iso_time("")
    ('2026-11-20 14:34:10+00:00', 'at an unknown time')
    """
    return text.replace("T", " ", 1) or "at an unknown time"


def utc_time(at: datetime, seconds: bool = True) -> str:
    """Formats a time in UTC, without the year.

    >>> utc_time(datetime(2026, 3, 1, 7, 5, 9, tzinfo=UTC))
    '01 Mar 07:05:09 UTC'
    """
    return f"{at.astimezone(UTC):{'%d %b %H:%M:%S' if seconds else '%d %b %H:%M'}} UTC"


def utc_datetime(at: datetime) -> str:
    """Formats a date and time in UTC.

    >>> utc_datetime(datetime(2026, 3, 1, 7, 5, 9, tzinfo=UTC))
    '2026-03-01 07:05:09 UTC'
    """
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
