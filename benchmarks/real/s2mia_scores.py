"""KS distance of each score of S2MIA with real readers (Mirabel's Table 12), from the recorded answers.

Run ``python -m benchmarks.real.s2mia_scores``.
"""

from __future__ import annotations

from typing import Any

from benchmarks import save
from benchmarks.real import files
from benchmarks.real.judging import RECORDED, SIDES
from casemate.papers.result import distance

SCORES = ("similarity", "perplexity")


def main() -> None:
    """Computes the distances for each recorded set, and writes them."""
    sets = {path.name.partition(".jsonl")[0]: files.read(path) for path in sorted(RECORDED.glob("*_qwen?.?b.jsonl.gz"))}
    save("real_s2mia_scores", {name: distances(rows) for name, (_, *rows) in sets.items()})


def distances(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Distance between members and non-members, by score, without and with the guard."""
    trials = [row for row in rows if row.get("attack") == "s2mia"]
    found: dict[str, Any] = {"candidates": len(trials)}
    for place, score in enumerate(SCORES):
        for side in SIDES:
            inside, outside = (
                [t["features"][side][place] for t in trials if t["member"] is kind] for kind in (True, False)
            )
            found[f"{score}, guard {side}"] = distance(inside, outside)
    return found


if __name__ == "__main__":
    main()
