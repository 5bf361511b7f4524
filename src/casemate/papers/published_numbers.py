"""Figures that the papers print, from ``published_numbers.yaml``; a note marks the questionable ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import yaml

FOUR = ("accuracy", "precision", "recall", "F1")
FIVE = (*FOUR, "harmless flagged")
NORMALITY = ("S_q", "without s_max")
SYSTEMS = ("no guard", "Mirabel", "DP-RAG", "DP-RAG-L")
"""The last two: differential privacy with epsilon 2, and 100."""
UTILITY = ("EM@5", "EM@20", "EM@100", "R@5", "R@20", "R@100")


class Printed(NamedTuple):
    """A figure of a paper; ``odd``: why it is questionable, or how it was derived."""

    value: float
    odd: str = ""


Numbers: TypeAlias = Mapping[str, Printed]
"""By column."""


def printed_table(name: str, columns: Sequence[str]) -> Mapping[Any, Numbers]:
    """The figures of a table by column, by row: a name, or a pair of names.

    >>> printed_table("mirabel-table9", FOUR)["MBA", "Mirabel"]["recall"]
    Printed(value=0.108, odd='')
    """
    rows: dict[Any, Numbers] = {}
    for row, cells in _content()[name].items():
        parts = tuple(row.split(", "))
        numbers = dict(zip(columns, map(_printed, cells), strict=True))
        rows[parts if len(parts) > 1 else row] = MappingProxyType(numbers)
    return MappingProxyType(rows)


def _printed(cell: Any) -> Printed:
    if not isinstance(cell, list):
        return Printed(cell)
    value, note, *texts = cell
    return Printed(value, _content()["notes"][note].format(*texts))


@cache
def _content() -> Mapping[str, Any]:
    text = files("casemate.papers").joinpath("published_numbers.yaml").read_text("utf-8")
    content: Mapping[str, Any] = yaml.safe_load(text)
    return content


TABLE_1, TABLE_12 = printed_table("mirabel-table1", NORMALITY), printed_table("mirabel-table12", SYSTEMS[:2])
TABLE_2, TABLE_2_AGENT = (printed_table(f"mirabel-table2{agent}", FOUR) for agent in ("", "-agent"))
TABLE_8, TABLE_8_AGENT = (printed_table(f"mirabel-table8{agent}", FIVE) for agent in ("", "-agent"))
TABLE_3 = printed_table("mirabel-table3", UTILITY)
TABLE_4, TABLE_5 = (printed_table(f"mirabel-table{number}", SYSTEMS) for number in (4, 5))
TABLE_9 = printed_table("mirabel-table9", FOUR)
