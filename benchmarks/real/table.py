"""Writes the tables of docs/reference/results-by-reader.md from the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import saved
from benchmarks.real.judging import SIMULATED
from casemate.maths.stats import Estimate
from casemate.reports.format import measured, short_rate

AUTHORS = {"script": "script", "model": "the 1.5B"}
READERS = {"qwen0.5b": "the 0.5B", "qwen1.5b": "the 1.5B", SIMULATED: "simulated"}
MODELS = {f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf": f"the {size.upper()}" for size in ("0.5b", "1.5b")}


def membership(corpus: str) -> Iterator[str]:
    """Lines of Markdown: AUC by reader, and share withheld; highest AUC with the guard on first."""
    found = saved(f"real_{corpus}")[corpus]
    readers = [found["readers"].get(name, {"attacks": {}})["attacks"] for name in READERS]
    yield f"| attack | questions by |{''.join(f' {title}, off | on |' for title in READERS.values())} withheld |"
    yield f"|{'---|' * (2 * len(READERS) + 3)}"
    for name in sorted(readers[-1], key=lambda name: -_worst(name, *readers)):
        cells = [_auc(own, name, side) for own in readers for side in ("off", "on")]
        cells.append(_rate(found["withheld"][name]["withheld"]))
        yield f"| {_named(name)} | {' | '.join(cells)} |"


def withheld(corpus: str) -> Iterator[str]:
    """Lines of Markdown: share withheld of questions about members; lowest first."""
    rows = saved(f"real_{corpus}")[corpus]["withheld"]
    yield "| attack | questions by | questions about members | record in the context, guard off | withheld of these |"
    yield "|---|---|---|---|---|"
    for name in sorted(rows, key=lambda name: rows[name]["withheld"][0] if rows[name]["withheld"] else 0):
        cells = [str(rows[name]["questions"])] + [_rate(rows[name][what]) for what in ("in_context", "withheld")]
        yield f"| {_named(name)} | {' | '.join(cells)} |"


def extraction() -> Iterator[str]:
    """Lines of Markdown: share of texts recovered by crawlers, by reader; highest with one client first.

    The number of questions is that without a defense.
    """
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    worst: dict[tuple[str, str], float] = {}
    for corpus, held in saved("real_extraction")["corpora"].items():
        for model in [m for m in MODELS if m in held["readers"]]:
            own = held["readers"][model]
            for crawler, found in own["crawls"].items():
                key, one, twenty = (corpus, crawler), found["1 client"]["crr"][0], found["20 clients"]["crr"][0]
                cells = [str(found["off"]["questions"]), _rate(found["off"]["crr"]), _point(one), _point(twenty)]
                simulated = own["simulated"][crawler]
                compared = "–" if simulated["errors"] else _point(simulated["off"]["crr"][0])
                rows.setdefault(key, {}).update({model: cells, SIMULATED: [compared]})
                worst[key] = max(worst.get(key, 0), one)
    sides = "questions | no defense | 1 client | 20 clients"
    yield f"| corpus | crawler |{''.join(f' {title}: {sides} |' for title in MODELS.values())} simulated, no defense |"
    yield f"|{'---|' * (3 + 4 * len(MODELS))}"
    for corpus, crawler in sorted(rows, key=lambda key: -worst[key]):
        found = rows[corpus, crawler]
        cells = [cell for name in (*MODELS, SIMULATED) for cell in found.get(name, ["–"] * 4)]
        yield f"| {corpus} | `{crawler}` | {' | '.join(cells)} |"


def _point(rate: float) -> str:
    return short_rate(float(f"{rate:.2g}")) if rate else "0"


def forms() -> Iterator[str]:
    """Lines of Markdown: shares of texts in the requested form, and recovered by the decoder, by reader."""
    readers = saved("real_output_forms")["readers"]
    yield f"| transform | {' | '.join(f'{name}, in that form | recovered' for name in readers)} |"
    yield f"|---|{'---|---|' * len(readers)}"
    for name in next(iter(readers.values()))["transforms"]:
        rows = [reader["transforms"][name] for reader in readers.values()]
        cells = [_rate(row[what]) for row in rows for what in ("followed", "recovered")]
        yield f"| {name} | {' | '.join(cells)} |"


def _worst(name: str, *readers: Mapping[str, Any]) -> float:
    return max(float(r[name]["on"]["auc"][0]) for r in readers if name in r and r[name]["on"])


def _named(name: str) -> str:
    author, attack = name.split(":")
    return f"`{attack}` | {AUTHORS[author]}"


def _auc(found: Mapping[str, Any], name: str, side: str) -> str:
    row = found.get(name, {})
    return _rate(row[side]["auc"]) if row.get(side) else "–"


def _rate(values: list[float] | None) -> str:
    return measured(Estimate(*values)).replace("|", "") if values else "–"
