"""The time range of a page: relative to now, or between two times. It is in the address, so a view can be shared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from casemate.reports.format import utc_time
from casemate.reports.svg import ChartLink

PRESETS = {
    "1h": (timedelta(hours=1), "last hour"),
    "24h": (timedelta(hours=24), "last 24 hours"),
    "7d": (timedelta(days=7), "last 7 days"),
    "30d": (timedelta(days=30), "last 30 days"),
}
"""Relative ranges by their name in the address: length, and description."""
DEFAULT = "24h"
YEARS = range(1970, 3000)
"""Years of a time in the address. Near the first and last year of ``datetime``, the edges of a bin do not exist."""
MAX_BINS = 32
WIDTHS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
"""Seconds of a bin of a chart; beyond the largest, whole days."""


class TimeBin(NamedTuple):
    """One bin of a chart, from start (included) to end (excluded)."""

    start: datetime
    end: datetime

    @property
    def parameters(self) -> dict[str, str]:
        """The query parameters that select this bin as a range."""
        return {"since": field_time(self.start), "until": field_time(self.end)}

    def link(self, url: str, said: str) -> ChartLink:
        """A link over this bin of a chart to the events behind it; its title is the time and the text ``said``."""
        return ChartLink(self.start, self.end, url, f"{utc_time(self.start, seconds=False)}: {said}")


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range of time.

    Attributes:
        end: Its end, excluded; of a relative range: now, and later events belong to it too (clocks differ).
        preset: Key of `PRESETS` for a relative range; empty for an absolute one.
        problem: Why the requested range could not be used; empty if it could.
    """

    start: datetime
    end: datetime
    preset: str = DEFAULT
    problem: str = ""

    @classmethod
    def parse(cls, parameters: Mapping[str, str], now: datetime) -> TimeRange:
        """Reads the query parameters `since` and `until` (ISO 8601, UTC unless stated), or else `range`.

        An unusable range is replaced by the default, and `problem` states why.

        >>> now = datetime(2026, 3, 1, 12, tzinfo=UTC)
        >>> TimeRange.parse({"range": "7d"}, now).start.isoformat()
        '2026-02-22T12:00:00+00:00'
        >>> TimeRange.parse({"since": "2026-03-01", "until": "2026-02-01"}, now).problem
        'The range ends before it starts.'
        """
        since, until = (parameters.get(name, "") for name in ("since", "until"))
        default = cls(now - PRESETS[DEFAULT][0], now)
        if not since and not until:
            preset = parameters.get("range", "") or DEFAULT
            if preset not in PRESETS:
                return cls(default.start, now, DEFAULT, f"Unknown range; choose one of {', '.join(PRESETS)}.")
            return cls(now - PRESETS[preset][0], now, preset)
        try:
            end = _parse(until) if until else now
            start = _parse(since) if since else end - PRESETS[DEFAULT][0]
        except (ValueError, OverflowError):
            return cls(default.start, now, DEFAULT, "A time must look like 2026-03-01T12:00.")
        if start >= end:
            return cls(default.start, now, DEFAULT, "The range ends before it starts.")
        return cls(start, end, "")

    def __contains__(self, at: datetime) -> bool:
        """Whether a time is in the range."""
        return self.start <= at and (bool(self.preset) or at < self.end)

    @property
    def parameters(self) -> dict[str, str]:
        """The query parameters of this range; empty for the default."""
        if self.preset:
            return {} if self.preset == DEFAULT else {"range": self.preset}
        return TimeBin(self.start, self.end).parameters

    @property
    def description(self) -> str:
        """The range in words, as they follow 'in the'."""
        return PRESETS[self.preset][1] if self.preset else f"time from {utc_time(self.start)} to {utc_time(self.end)}"

    @property
    def bins(self) -> list[TimeBin]:
        """Bins of equal width that cover the range, at most ``MAX_BINS``, at full minutes, hours or days in UTC."""
        first, last = self.start.timestamp(), self.end.timestamp()
        day = WIDTHS[-1]
        widths = (*WIDTHS, day * -(-int(last - first) // (day * (MAX_BINS - 1))))
        width = next(w for w in widths if (last - first) / w <= MAX_BINS - 1)
        edges = range(int(first // width) * width, int(last) + width, width)
        moments = [datetime.fromtimestamp(edge, UTC) for edge in edges if edge < last + width]
        return [TimeBin(a, b) for a, b in zip(moments, moments[1:], strict=False) if a < self.end]


def by_bin(bins: Iterable[TimeBin], times: Iterable[datetime]) -> list[list[int]]:
    """The positions of the times in each bin, of one width and in order.

    A time behind the last bin belongs to the last one; those before the first are left out.
    """
    known = list(bins)
    first, width = known[0].start.timestamp(), (known[0].end - known[0].start).total_seconds()
    found: list[list[int]] = [[] for _ in known]
    for position, at in enumerate(times):
        number = int((at.timestamp() - first) // width)
        if number >= 0:
            found[min(number, len(known) - 1)].append(position)
    return found


def _parse(text: str) -> datetime:
    found = datetime.fromisoformat(text.strip())
    if found.year not in YEARS:
        raise ValueError(f"the year {found.year}")
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)


def field_time(at: datetime) -> str:
    """Formats a time in UTC, to the second, as the value of a field of type datetime-local."""
    return at.astimezone(UTC).replace(tzinfo=None, microsecond=0).isoformat()
