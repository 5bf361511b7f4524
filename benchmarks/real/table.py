"""The tables of docs/reference/results-by-reader.md, from the figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import ROOT
from benchmarks.real.judging import SIMULATED
from casemate.maths.stats import Estimate
from casemate.reports.format import measured

AUTHORS = {"script": "script", "model": "the 1.5B"}


def tables(corpus: str, model: str) -> Iterator[str]:
    """Lines of Markdown: AUC by reader, then what was withheld; worst first."""
    figures = _results("real")[corpus]
    real, simulated = (figures["readers"][name]["attacks"] for name in (model, SIMULATED))
    there = _results("real_written").get(corpus, {}).get("readers", {})
    part = next((r["attacks"] for name, r in there.items() if name != SIMULATED), {})
    names = sorted(simulated, key=lambda name: -_worst(name, real, simulated))
    yield "| attack | questions by | real reader, off | on | simulated reader, off | on |"
    yield "|---|---|---|---|---|---|"
    for name in names:
        author, attack = name.split(":")
        cells = [_auc(found, name, side) for found in (real, simulated) for side in ("off", "on")]
        cells[:2] = [f"{_auc(part, name, side)} †" for side in ("off", "on")] if name in part else cells[:2]
        yield f"| `{attack}` | {AUTHORS[author]} | {' | '.join(cells)} |"
    yield ""
    yield "| attack | questions by | questions about members | record in the context, guard off | withheld of these |"
    yield "|---|---|---|---|---|"
    rows = figures["withheld"]
    for name in sorted(rows, key=lambda name: rows[name]["withheld"][0] if rows[name]["withheld"] else 0):
        author, attack = name.split(":")
        cells = [_rate(rows[name][what]) for what in ("in_context", "withheld")]
        yield f"| `{attack}` | {AUTHORS[author]} | {rows[name]['questions']} | {' | '.join(cells)} |"


def subsample(corpus: str) -> Iterator[str]:
    """Lines of Markdown: AUC of every reader on the same trials, from `real_written`."""
    figures = _results("real_written")[corpus]
    yield "| attack | reader | trials | questions | off | on |"
    yield "|---|---|---|---|---|---|"
    for name in figures["readers"][SIMULATED]["attacks"]:
        for reader, found in figures["readers"].items():
            if row := found["attacks"].get(name):
                cells = [_auc(found["attacks"], name, side) for side in ("off", "on")]
                yield f"| `{name}` | {reader} | {row['trials']} | {row['questions']} | {' | '.join(cells)} |"


def forms() -> Iterator[str]:
    """Lines of Markdown: shares of texts given in the requested form, and recovered by the decoder, by reader."""
    readers = _results("real_output_forms")["readers"]
    yield f"| transform | {' | '.join(f'{name}, in that form | recovered' for name in readers)} |"
    yield f"|---|{'---|---|' * len(readers)}"
    for name in next(iter(readers.values()))["transforms"]:
        rows = [reader["transforms"][name] for reader in readers.values()]
        cells = [_rate(row[what]) for row in rows for what in ("followed", "recovered")]
        yield f"| {name} | {' | '.join(cells)} |"


def _results(name: str) -> dict[str, Any]:
    file = ROOT / f"benchmarks/results/{name}.json"
    found: dict[str, Any] = json.loads(file.read_text())["results"] if file.exists() else {}
    return found


def _worst(name: str, *readers: Mapping[str, Any]) -> float:
    found = next((r[name] for r in readers if name in r and r[name]["on"]), None)
    return float(found["on"]["auc"][0]) if found else 0.0


def _auc(found: Mapping[str, Any], name: str, side: str) -> str:
    figures = found.get(name, {}).get(side)
    return _rate(figures["auc"]) if figures else "not run"


def _rate(values: list[float] | None) -> str:
    return measured(Estimate(*values)).replace("|", "") if values else "–"
