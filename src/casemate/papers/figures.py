"""Figures of papers as HTML pages: panels of step charts, in the style of the reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from casemate.reports.render import render
from casemate.reports.svg import Drawing

Panel: TypeAlias = tuple[str, Drawing]
"""Caption and image."""


def write(path: Path, title: str, panels: Sequence[Panel]) -> Path:
    """Writes a self-contained page without script; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render("figures.html", title=title, panels=panels), encoding="utf-8")
    return path
