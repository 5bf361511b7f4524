"""The tables of docs/reference/results-by-reader.md, from the figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import ROOT
from benchmarks.real.judging import SIMULATED
from casemate.maths.stats import Estimate
from casemate.reports.format import measured

AUTHORS = {"script": "script", "model": "the 1.5B"}


def tables(corpus: str) -> Iterator[str]:
    """Lines of Markdown: AUC by reader, the worst with the guard on first; then what was withheld.

    Two measurements: that of `real_sample` has the contexts of the guard; where a reader has no figure there, that of
    `real`, which has stand-in answers, is marked.
    """
    earlier, sample = _results("real")[corpus], _results("real_sample")[corpus]
    simulated = earlier["readers"][SIMULATED]["attacks"] | sample["readers"][SIMULATED]["attacks"]
    large = {name: row | {"mark": " ‡"} for name, row in earlier["readers"]["qwen1.5b"]["attacks"].items()}
    large |= sample["readers"]["qwen1.5b_sample"]["attacks"]
    readers = (sample["readers"]["qwen0.5b"]["attacks"], large, simulated)
    yield "| attack | questions by | the 0.5B, off | on | the 1.5B, off | on | simulated reader, off | on |"
    yield f"|{'---|' * 8}"
    for name in sorted(simulated, key=lambda name: -_worst(name, *readers)):
        author, attack = name.split(":")
        cells = [_auc(found, name, side) for found in readers for side in ("off", "on")]
        yield f"| `{attack}` | {AUTHORS[author]} | {' | '.join(cells)} |"
    yield ""
    yield "| attack | questions by | questions about members | record in the context, guard off | withheld of these |"
    yield "|---|---|---|---|---|"
    rows = {f"{name} ‡": row for name, row in earlier["withheld"].items() if name not in sample["withheld"]}
    rows |= sample["withheld"]
    for name in sorted(rows, key=lambda name: rows[name]["withheld"][0] if rows[name]["withheld"] else 0):
        author, attack = name.split(":")
        attack, _, mark = attack.partition(" ")
        row = rows[name]
        cells = [f"`{attack}` {mark}".strip(), AUTHORS[author], str(row["questions"])]
        cells += [_rate(row[what]) for what in ("in_context", "withheld")]
        yield f"| {' | '.join(cells)} |"


def simulated(corpora: Sequence[str]) -> Iterator[str]:
    """Lines of Markdown: AUC with the simulated reader, and what was withheld, from `real_CORPUS`; the worst first."""
    found = [_results(f"real_{corpus}")[corpus] for corpus in corpora]
    attacks = [figures["readers"][SIMULATED]["attacks"] for figures in found]
    columns = "".join(f" {corpus}, off | on | withheld |" for corpus in corpora)
    yield f"| attack | questions by |{columns}"
    yield f"|---|---|{'---|---|---|' * len(corpora)}"
    for name in sorted(attacks[0], key=lambda name: -_worst(name, *attacks)):
        author, attack = name.split(":")
        cells = []
        for own, figures in zip(attacks, found, strict=True):
            cells += [_auc(own, name, "off"), _auc(own, name, "on"), _rate(figures["withheld"][name]["withheld"])]
        yield f"| `{attack}` | {AUTHORS[author]} | {' | '.join(cells)} |"


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
    return max(float(r[name]["on"]["auc"][0]) for r in readers if name in r and r[name]["on"])


def _auc(found: Mapping[str, Any], name: str, side: str) -> str:
    row = found.get(name, {})
    return _rate(row[side]["auc"]) + row.get("mark", "") if row.get(side) else "–"


def _rate(values: list[float] | None) -> str:
    return measured(Estimate(*values)).replace("|", "") if values else "–"
