"""Figures of papers as HTML pages: panels of step charts, in the style of the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from casemate.reports.render import render
from casemate.reports.svg import Drawing, step_chart
from casemate.types import Float64

Panel: TypeAlias = tuple[str, Drawing]
"""Caption and image."""


def write(path: Path, title: str, panels: Sequence[Panel]) -> Path:
    """Writes a self-contained page without script; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render("figures.html", title=title, panels=panels), encoding="utf-8")
    return path


def steps(caption: str, edges: Float64, groups: Mapping[str, Float64], below: str, mark: float | None = None) -> Panel:
    """Draws the shares of up to three groups in the same bins.

    Args:
        caption: Caption of the panel.
        edges: Edges of the bins, (n + 1,).
        groups: Shares by name of the group, (n,) each.
        below: Label of the horizontal axis.
        mark: Threshold that is marked; None for none.
    """
    return caption, step_chart(caption, edges, groups, below, mark)
