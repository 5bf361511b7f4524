"""Result of an experiment, and intervals of its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.maths import metrics, stats
from casemate.maths.stats import Estimate
from casemate.papers.published_numbers import FOUR, Printed
from casemate.reports.format import number
from casemate.reports.render import render
from casemate.reports.svg import Drawing
from casemate.types import Float64

Cell: TypeAlias = Estimate | Printed
DRAWS = 4000
SEED = 0
"""Seed of the intervals: equal measurements have equal intervals."""
Panel: TypeAlias = tuple[str, Drawing]
"""Caption and image of a part of a figure."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: values of a system by column; ``of`` is the subject, an attack or a data set."""

    of: str
    system: str
    cells: Mapping[str, Cell]

    @property
    def printed(self) -> bool:
        """Whether the figures are published ones."""
        return any(isinstance(cell, Printed) for cell in self.cells.values())


@dataclass(frozen=True, slots=True)
class Result:
    """A table or a figure of a paper, with published and measured rows.

    ``differs`` has the differences from the paper's setting, one sentence each. ``setting`` has sizes, seed and models.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    differs: tuple[str, ...]
    remarks: tuple[str, ...]
    setting: Mapping[str, Any]
    files: tuple[Path, ...] = ()

    @property
    def odd(self) -> tuple[str, ...]:
        """Notes on questionable published figures, with their positions, each once."""
        places: dict[tuple[str, str, str], list[str]] = {}
        for row in self.rows:
            found: dict[str, list[str]] = {}
            for column, cell in row.cells.items():
                if isinstance(cell, Printed) and cell.odd:
                    found.setdefault(cell.odd, []).append(column)
            for odd, columns in found.items():
                places.setdefault((odd, row.system, ", ".join(columns)), []).append(row.of)
        return tuple(f"{', '.join(of)} ({system}; {where}): {odd}" for (odd, system, where), of in places.items())

    def as_json(self) -> dict[str, Any]:
        """The result as JSON."""
        rows = [
            {
                "of": row.of,
                "system": row.system,
                "printed": row.printed,
                "cells": {column: cell._asdict() for column, cell in row.cells.items()},
            }
            for row in self.rows
        ]
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": rows,
            "odd": list(self.odd),
            "differs": list(self.differs),
            "remarks": list(self.remarks),
            "setting": dict(self.setting),
            "files": [str(path) for path in self.files],
        }


def shown(cell: Cell | None) -> str:
    """A cell as text; a star marks a questionable figure.

    >>> shown(Printed(0.876)), shown(Printed(0.75, "why")), shown(Estimate(0.5, 0.4, 0.61)), shown(None)
    ('.876', '.750 *', '.500 [.40, .61]', '')
    """
    if cell is None:
        return ""
    if isinstance(cell, Printed):
        return number(cell.value, 3) + (" *" if cell.odd else "")
    return f"{number(cell.value, 3)} [{number(cell.low)}, {number(cell.high)}]"


def write_figure(path: Path, title: str, panels: Sequence[Panel]) -> Path:
    """Writes a figure as a self-contained page without script; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render("figures.html", title=title, panels=panels), encoding="utf-8")
    return path


class ClassificationMetrics(NamedTuple):
    """Metrics of a binary classifier, each in [0, 1]; higher is better."""

    accuracy: float
    precision: float
    recall: float
    f1: float


def balanced(recall: float, alarms: float) -> ClassificationMetrics:
    """Accuracy, precision, recall and F1 of the shares of positives and of as many negatives that are flagged.

    A positive is a query of an attack on a *member*: only members can be hidden. A quotient with denominator 0 is 0, as
    in Mirabel's tables.

    Deviation: in the paper's Table 2 some F1 values are not the harmonic mean of the printed precision and recall. Here
    F1 always is.

    >>> [round(x, 3) for x in balanced(1.0, 0.25)]
    [0.875, 0.8, 1.0, 0.889]
    """
    precision = recall / (recall + alarms) if recall + alarms else 0.0
    return ClassificationMetrics((1 + recall - alarms) / 2, precision, recall, 2 * recall / (1 + recall + alarms))


def balanced_cells(positives: npt.ArrayLike, *negatives: npt.ArrayLike) -> dict[str, Cell]:
    """``balanced`` with intervals: Clopper-Pearson for recall, draws of both rates for the others.

    Rates are drawn from the Jeffreys posterior, so no interval shrinks to a point when all or none were flagged. There
    is at least one decision of each kind; several kinds of negatives have equal weight.
    """
    rng = np.random.default_rng(SEED)
    kinds = [np.asarray(kind, np.bool_) for kind in (positives, *negatives)]
    value = balanced(float(kinds[0].mean()), float(np.mean([kind.mean() for kind in kinds[1:]])))
    drawn = [rng.beta(kind.sum() + 0.5, (~kind).sum() + 0.5, DRAWS) for kind in kinds]
    found = np.array([balanced(r, f) for r, f in zip(drawn[0], np.mean(drawn[1:], axis=0), strict=True)])
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    cells: dict[str, Cell] = {
        name: Estimate(v, min(v, float(a)), max(v, float(b)))
        for name, v, a, b in zip(FOUR, value, low, high, strict=True)
    }
    return cells | {"recall": share(positives)}


def share(flags: npt.ArrayLike) -> Estimate:
    """A share with its interval."""
    said = np.asarray(flags, np.bool_)
    return stats.proportion(int(said.sum()), len(said))


def mean(values: npt.ArrayLike) -> Estimate:
    """A mean with its percentile interval (Efron 1979)."""
    x = np.asarray(values, np.float64)
    return stats.bootstrap(lambda a, _: float(a.mean()), x, x[:1], SEED)


def distance(members: npt.ArrayLike, others: npt.ArrayLike) -> Estimate:
    """``ks_statistic`` with an interval: the value plus and minus the deviation of resampled distribution functions.

    A percentile interval would be wrong: resamples of two equal samples are never as equal as the samples.
    """
    return averaged([(members, others)])


def averaged(pairs: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]) -> Estimate:
    """Mean of ``distance`` over several features of the same members and non-members."""
    a, b = (np.column_stack([np.asarray(pair[side], np.float64) for pair in pairs]) for side in (0, 1))
    value = float(np.mean([metrics.ks_statistic(x, y) for x, y in zip(a.T, b.T, strict=True)]))
    rng = np.random.default_rng(SEED)
    gaps = _gaps(a, b)
    misses = [
        float(np.mean([np.abs(g(i, j) - g(None, None)).max() for g in gaps]))
        for i, j in ((rng.integers(len(a), size=len(a)), rng.integers(len(b), size=len(b))) for _ in range(1000))
    ]
    unseen = stats.clopper_pearson(0, min(len(a), len(b)))[1]  # what never happened in so many may happen so often
    reach = max(float(np.quantile(misses, 0.95)), unseen)
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach))


def _gaps(a: Float64, b: Float64) -> list[Callable[..., Float64]]:
    """For each feature, the difference of both distribution functions, of resampled scores or of all."""

    def gap(x: Float64, y: Float64) -> Callable[..., Float64]:
        levels, place = np.unique(np.concatenate([x, y]), return_inverse=True)
        first, second = place[: len(x)], place[len(x) :]

        def drawn(i: npt.NDArray[np.int64] | None, j: npt.NDArray[np.int64] | None) -> Float64:
            counts = (
                np.bincount(p if chosen is None else p[chosen], minlength=len(levels))
                for p, chosen in ((first, i), (second, j))
            )
            F, G = (np.cumsum(c) / c.sum() for c in counts)
            return np.asarray(F - G, np.float64)

        return drawn

    return [gap(x, y) for x, y in zip(a.T, b.T, strict=True)]
