"""Tables of the dashboard: sorted by a column and split into pages on the server, so they work without a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

PAGE_SIZE = 50
T = TypeVar("T")


class Column(NamedTuple):
    """A column.

    Attributes:
        sort: Returns the sort key of a row; None for a row without a value, which comes last. None: not sortable.
        key: Its name in the address; empty: its position.
        largest_first: Whether the first click sorts descending, as for counts and times.
    """

    title: str
    sort: Callable[[Any], Any] | None = None
    key: str = ""
    largest_first: bool = False


class Heading(NamedTuple):
    """A column as it is shown: title, address that sorts by it (or empty), and its present order (or empty)."""

    title: str
    url: str
    order: str


@dataclass(frozen=True, slots=True)
class TableSpec:
    """What a table shows.

    Attributes:
        columns: The columns; a text is a column that cannot be sorted.
        order: Column that the rows are sorted by unless the address names one, with a minus for descending order;
            empty: their natural order.
        name: Prefix of the query parameters where a page has several tables.
    """

    label: str
    columns: Sequence[Column | str]
    order: str = ""
    name: str = ""
    size: int = PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Table:
    """The requested page of a table; addresses are empty where there is no such page.

    Attributes:
        total: Number of rows on all pages.
        number: Number of this page, from 1.
    """

    label: str
    headings: Sequence[Heading]
    rows: Sequence[Any]
    total: int
    number: int = 1
    last: int = 1
    before: str = ""
    after: str = ""

    @classmethod
    def of(
        cls, query: Mapping[str, str], spec: TableSpec, rows: Sequence[T], show: Callable[[T], Any] | None = None
    ) -> Table:
        """Sorts rows as the address requests, and selects the requested page.

        Query parameters: ``sort`` names a column, ``page`` is a number; other values are ignored. ``show`` converts a
        row for the template.
        """
        made = [Column(c) if isinstance(c, str) else c for c in spec.columns]
        keyed = {(c.key or str(i)): c for i, c in enumerate(made)}
        sorting, paging = (f"{spec.name}-{what}".strip("-") for what in ("sort", "page"))
        wanted = query.get(sorting, "") if query.get(sorting, "").removeprefix("-") in keyed else spec.order
        column = keyed.get(wanted.removeprefix("-"))
        found = _sorted(rows, column.sort, wanted.startswith("-")) if column and column.sort else list(rows)
        last = max(1, -(-len(found) // spec.size))
        text = query.get(paging, "")
        number = min(max(1, int(text)) if text.isdecimal() and len(text) < 9 else 1, last)
        shown = found[spec.size * (number - 1) : spec.size * number]

        def address(**changes: str) -> str:
            kept = {n: v for n, v in query.items() if n != paging and n not in changes}
            return f"?{urlencode(kept | changes, errors='replace')}"

        headings = [
            Heading(c.title, address(**{sorting: _next(key, c, wanted)}) if c.sort else "", _order(key, wanted))
            for key, c in keyed.items()
        ]
        return cls(
            spec.label,
            headings,
            [show(row) for row in shown] if show else shown,
            len(found),
            number,
            last,
            address(**{paging: str(number - 1)}) if number > 1 else "",
            address(**{paging: str(number + 1)}) if number < last else "",
        )


def _sorted(rows: Sequence[T], key: Callable[[T], Any], descending: bool) -> list[T]:
    known = [row for row in rows if key(row) is not None]
    return [*sorted(known, key=key, reverse=descending), *(row for row in rows if key(row) is None)]


def _order(key: str, wanted: str) -> str:
    if wanted.removeprefix("-") != key:
        return ""
    return "descending" if wanted.startswith("-") else "ascending"


def _next(key: str, column: Column, wanted: str) -> str:
    """The order that a click requests: the column's first, and then the opposite of the present one."""
    present = _order(key, wanted)
    descending = present == "ascending" if present else column.largest_first
    return f"-{key}" if descending else key
