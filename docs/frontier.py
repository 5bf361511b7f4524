"""Draws docs/images/frontier.svg from benchmarks/results/frontier.json: extraction against lost recall.

Run: python docs/frontier.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from casemate.reports.svg import Drawing, LinearScale

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/frontier.svg"
CORPORA = {"mathqa": "school mathematics", "enron_worms": "mail", "patient_doctor_qa": "medical questions"}
ROWS = {"coverage": "chunks shown", "crr": "chunks recovered (CRR)"}
KINDS = {"reindex": "re-indexing", "lora": "fine-tuned encoder (LoRA)", "limit": "crawl_limit"}
SAID = {"limit, 50 questions": "50 a day, the default", "limit, 10 questions": "10 a day"}
MOST, TOP = 0.5, 1.15
"""Ends of the axes: recall lost, and what crawlers get relative to no defense."""
WIDE, HIGH, LEFT, ABOVE = 300.0, 220.0, 56.0, 62.0
STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; color: #1b1b1f; }
text { fill: currentColor; } .quiet { opacity: .7; } .strong { font-weight: 600; }
.axis { stroke: currentColor; opacity: .5; } .grid { stroke: currentColor; opacity: .15; }
.reindex { fill: #0b5cad; stroke: #0b5cad; } .lora { fill: #7a7a80; stroke: #7a7a80; }
.limit { fill: #c2570c; stroke: #c2570c; } .whisker { stroke-width: 1.2; opacity: .6; }
@media (prefers-color-scheme: dark) {
  svg { background: #17171a; color: #ececf0; } .reindex { fill: #6db1ff; stroke: #6db1ff; }
  .lora { fill: #a5a5ad; stroke: #a5a5ad; } .limit { fill: #ff9d57; stroke: #ff9d57; }
}
"""


def main() -> None:
    """Draws the chart."""
    corpora = json.loads((ROOT / "benchmarks/results/frontier.json").read_text())["results"]["corpora"]
    shown = {name: said for name, said in CORPORA.items() if name in corpora}
    width, height = LEFT + len(shown) * WIDE, ABOVE + len(ROWS) * HIGH + 24
    image = Drawing((width, height), "What crawlers get, relative to no defense, against what benign clients lose")
    for name, value in (("xmlns", "http://www.w3.org/2000/svg"), ("width", f"{width:g}"), ("height", f"{height:g}")):
        image.root.set(name, value)
    ET.SubElement(image.root, "style").text = STYLE
    _legend(image)
    for column, (name, said) in enumerate(shown.items()):
        for row, (what, axis) in enumerate(ROWS.items()):
            _panel(image, corpora[name]["points"], what, (LEFT + column * WIDE, ABOVE + row * HIGH), axis)
        image.text(said, LEFT + column * WIDE, ABOVE - 14, "start", "strong")
    image.text("known-item recall@5 lost by benign clients [95 %]", width / 2, height - 6)
    PICTURE.write_text(f"{image}\n", encoding="utf-8")


def _legend(image: Drawing) -> None:
    for number, (kind, said) in enumerate(KINDS.items()):
        _point(image, kind, LEFT + 6 + 190 * number, 20.0)
        image.text(said, LEFT + 18 + 190 * number, 24.0, "start")
    image.text("vertical axis: share of what crawlers get without a defense", LEFT + 510, 24.0, "start", "quiet")


def _panel(image: Drawing, points: Mapping[str, Any], what: str, corner: tuple[float, float], axis: str) -> None:
    """Draws the mean of all crawlers, relative to no defense, against the recall that is lost."""
    left, above = corner
    x, y = LinearScale(-0.03, MOST + 0.06, left, left + WIDE - 40), LinearScale(0.0, TOP, above + HIGH - 40, above)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        image.line("axis" if share == 0 else "grid", x.start, y(share), x.end, y(share))
        if left == LEFT:
            image.text(f"{share:.2g}", left - 8, y(share) + 4, "end", "quiet")
    for lost in (0.0, 0.25, 0.5):
        image.text(f"{lost:g}", x(lost), y(0) + 16, kind="quiet")
    image.text(axis, x.end, y(TOP) + 4, "end", "quiet")
    nothing = points["off"]["mean"][what]
    for name, point in points.items():
        if name == "off":
            continue
        kind = next((k for k in ("limit", "lora") if name.startswith(k)), "reindex")
        lost, low, high = point["lost"]
        at = y(point["mean"][what] / nothing)
        image.line(f"whisker {kind}", x(low), at, x(high), at)
        _point(image, kind, x(lost), at)
        if name in SAID:
            image.text(SAID[name], x(lost), at - 9, "middle" if lost > 0.25 else "start")


def _point(image: Drawing, kind: str, x: float, y: float) -> None:
    if kind == "limit":
        image.circle(kind, x, y, 4.5)
    elif kind == "lora":
        image.path(kind, f"M{x:.1f},{y - 5:.1f} l5,9 h-10 z")
    else:
        image.rect(kind, x - 3.5, y - 3.5, 7.0, 7.0)


if __name__ == "__main__":
    main()
