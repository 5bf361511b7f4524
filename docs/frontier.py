"""Makes docs/images/frontier.svg of benchmarks/results/frontier.json: what a protection costs against what it keeps.

Run: python docs/frontier.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from casemate.lab.charts import Markup, Scale, tag

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
    """Draws it."""
    corpora = json.loads((ROOT / "benchmarks/results/frontier.json").read_text())["results"]["corpora"]
    shown = {name: said for name, said in CORPORA.items() if name in corpora}
    marks = [tag("style", Markup(STYLE)), *_legend()]
    for column, (name, said) in enumerate(shown.items()):
        for row, (what, axis) in enumerate(ROWS.items()):
            marks += _panel(corpora[name]["points"], what, LEFT + column * WIDE, ABOVE + row * HIGH, axis, column == 0)
        marks.append(_text(said, LEFT + column * WIDE, ABOVE - 14, class_="strong"))
    width, height = LEFT + len(shown) * WIDE, ABOVE + len(ROWS) * HIGH + 24
    marks.append(_text("known-item recall@5 lost by harmless clients [95 %]", width / 2, height - 6, anchor="middle"))
    title = tag("title", "What crawlers get, relative to no defense, against what harmless clients lose")
    box = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}", "height": f"{height:g}"}
    image = tag("svg", title, *marks, xmlns="http://www.w3.org/2000/svg", role="img", **box)
    PICTURE.write_text(f"{image}\n", encoding="utf-8")


def _legend() -> Iterator[Markup]:
    for number, (kind, said) in enumerate(KINDS.items()):
        yield _point(kind, LEFT + 6 + 190 * number, 20.0)
        yield _text(said, LEFT + 18 + 190 * number, 24.0)
    yield _text("upright: share of what crawlers get without a defense", LEFT + 510, 24.0, class_="quiet")


def _panel(points: Mapping[str, Any], what: str, left: float, above: float, axis: str, first: bool) -> Iterator[Markup]:
    """What all crawlers get on average, relative to no defense, by the recall that is lost."""
    x, y = Scale(-0.03, MOST + 0.06, left, left + WIDE - 40), Scale(0.0, TOP, above + HIGH - 40, above)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield tag("line", class_="axis" if share == 0 else "grid", x1=x.start, x2=x.end, y1=y(share), y2=y(share))
        if first:
            yield _text(f"{share:.2g}", left - 8, y(share) + 4, anchor="end", class_="quiet")
    for lost in (0.0, 0.25, 0.5):
        yield _text(f"{lost:g}", x(lost), y(0) + 16, anchor="middle", class_="quiet")
    yield _text(axis, x.end, y(TOP) + 4, anchor="end", class_="quiet")
    nothing = points["off"]["mean"][what]
    for name, point in points.items():
        if name == "off":
            continue
        kind = next((k for k in ("limit", "lora") if name.startswith(k)), "reindex")
        lost, low, high = point["lost"]
        at = y(point["mean"][what] / nothing)
        yield tag("line", class_=f"whisker {kind}", x1=x(low), x2=x(high), y1=at, y2=at)
        yield _point(kind, x(lost), at)
        if name in SAID:
            yield _text(SAID[name], x(lost), at - 9, anchor="middle" if lost > 0.25 else "start")


def _point(kind: str, x: float, y: float) -> Markup:
    if kind == "limit":
        return tag("circle", class_=kind, cx=x, cy=y, r=4.5)
    if kind == "lora":
        return tag("path", class_=kind, d=f"M{x:.1f},{y - 5:.1f} l5,9 h-10 z")
    return tag("rect", class_=kind, x=x - 3.5, y=y - 3.5, width=7.0, height=7.0)


def _text(text: str, x: float, y: float, anchor: str = "start", class_: str = "") -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=class_)


if __name__ == "__main__":
    main()
