"""Draws docs/images/crawls.svg from benchmarks/results/crawl.json: two policies against each crawler.

Each crawler has two rows: without an output transform, and with the one that recovers most under ``crawl_limit``.

Run: python docs/crawls.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from casemate.reports.svg import Drawing, LinearScale

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/crawls.svg"
CORPORA = {"mathqa": "school mathematics", "enron_worms": "mail", "patient_doctor_qa": "medical questions"}
SETTINGS = {"1 client": "one", "20 clients": "twenty", "20 clients, quorum": "quorum"}
LEGEND = {"one": "crawl_limit, one client", "twenty": "crawl_limit, 20 clients", "quorum": "quorum, 20 clients"}
RATIOS = {"ratio": "chunks recovered", "coverage_ratio": "chunks shown"}
ROW_HEIGHT, PANEL_WIDTH, LEFT_MARGIN, TOP_MARGIN, PANEL_GAP = 22.0, 250.0, 190.0, 64.0, 46.0
"""Sizes in pixels."""
STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; color: #1b1b1f; }
text { fill: currentColor; } .quiet { opacity: .7; } .strong { font-weight: 600; }
.axis { stroke: currentColor; opacity: .5; } .grid { stroke: currentColor; opacity: .15; }
.one { fill: #7a7a80; stroke: #7a7a80; } .twenty { fill: #c2570c; stroke: #c2570c; }
.quorum { fill: #0b5cad; stroke: #0b5cad; } .whisker { stroke-width: 1.2; opacity: .6; }
@media (prefers-color-scheme: dark) {
  svg { background: #17171a; color: #ececf0; } .one { fill: #a5a5ad; stroke: #a5a5ad; }
  .twenty { fill: #ff9d57; stroke: #ff9d57; } .quorum { fill: #6db1ff; stroke: #6db1ff; }
}
"""


def main() -> None:
    """Draws the chart."""
    corpora = json.loads((ROOT / "benchmarks/results/crawl.json").read_text())["results"]["corpora"]
    found = {name: _worst_forms(corpora[name]["attackers"]) for name in CORPORA if name in corpora}
    high = ROW_HEIGHT * max(map(len, found.values()))
    width, height = (
        LEFT_MARGIN * len(found) + PANEL_WIDTH * len(found) + 20,
        TOP_MARGIN + len(RATIOS) * (high + PANEL_GAP),
    )
    image = Drawing((width, height), "What each attacker gets, relative to no defense, with two policies")
    for name, value in (("xmlns", "http://www.w3.org/2000/svg"), ("width", f"{width:g}"), ("height", f"{height:g}")):
        image.root.set(name, value)
    ET.SubElement(image.root, "style").text = STYLE
    for number, (kind, label) in enumerate(LEGEND.items()):
        _mark(image, kind, 12 + 190.0 * number, 20.0)
        image.text(label, 24 + 190.0 * number, 24.0, "start")
    image.text("relative to no defense [95 %], worst first", 24 + 190.0 * len(LEGEND), 24.0, "start", "quiet")
    for column, (name, attackers) in enumerate(found.items()):
        left = LEFT_MARGIN + column * (LEFT_MARGIN + PANEL_WIDTH)
        image.text(CORPORA[name], left, TOP_MARGIN - 18, "start", "strong")
        for row, (what, label) in enumerate(RATIOS.items()):
            above = TOP_MARGIN + row * (high + PANEL_GAP)
            _panel(image, attackers, what, (left, above))
            image.text(label, left + PANEL_WIDTH - 20, above + ROW_HEIGHT * len(attackers) + 32, "end", "quiet")
    PICTURE.write_text(f"{image}\n", encoding="utf-8")


def _worst_forms(attackers: Mapping[str, Any]) -> dict[str, Any]:
    """Each crawler without a transform and with the one that recovers most under ``crawl_limit``, worst first."""

    def recovered(attacker: str) -> float:
        return max(float(attackers[attacker][setting]["crr"][0]) for setting in ("1 client", "20 clients"))

    chosen = dict[str, str]()
    for attacker in sorted(attackers, key=recovered):
        crawler, _, transform = attacker.partition("+")
        chosen[f"{crawler}+" if transform else crawler] = attacker
    return {a: attackers[a] for a in sorted(chosen.values(), key=recovered, reverse=True)}


def _panel(image: Drawing, attackers: Mapping[str, Any], what: str, corner: tuple[float, float]) -> None:
    """Draws one row for each attacker, with a mark for each setting."""
    left, above = corner
    x, bottom = LinearScale(0.0, 1.5, left, left + PANEL_WIDTH - 20), above + ROW_HEIGHT * len(attackers)
    for share in (0.0, 0.1, 0.3, 0.5, 1.0):
        image.line("axis" if share == 0 else "grid", x(share), above, x(share), bottom)
        image.text(f"{share:.2g}".removeprefix("0") or "0", x(share), bottom + 16, kind="quiet")
    for number, (attacker, by_setting) in enumerate(attackers.items()):
        middle = above + ROW_HEIGHT * (number + 0.5)
        image.text(attacker, left - 8, middle + 4, "end")
        for aside, (setting, kind) in zip((-5.0, 0.0, 5.0), SETTINGS.items(), strict=True):
            if found := by_setting[setting][what]:
                image.line(f"whisker {kind}", x(found[1]), middle + aside, x(found[2]), middle + aside)
                _mark(image, kind, x(found[0]), middle + aside)


def _mark(image: Drawing, kind: str, x: float, y: float) -> None:
    if kind == "one":
        image.circle(kind, x, y, 3.5)
    elif kind == "twenty":
        image.rect(kind, x - 3.0, y - 3.0, 6.0, 6.0)
    else:
        image.path(kind, f"M{x:.1f},{y - 4:.1f} l4,7 h-8 z")


if __name__ == "__main__":
    main()
