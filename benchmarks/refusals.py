"""Recall and precision of the refusal detector on labeled replies in six languages.

The third held-out set was written before the present detector, by the same author. Its misclassified replies were not
inspected. The first two sets became development data of this detector. ``EARLIER`` contains earlier measurements of the
third set: patterns in six languages, and the first version of this detector.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks import ROOT, save
from casemate.maths.stats import proportion
from casemate.text.refusals import is_refusal

SETS = ("held_out_3", "held_out_2", "held_out", "development")
EARLIER = {
    "first_measurement": {"held_out_3": {"recall": [240, 250], "precision": [240, 246]}},
    "patterns": {"held_out_3": {"recall": [219, 250], "precision": [219, 220]}},
}
"""Counts of measurements that cannot be repeated, because the detector changed."""


def load(name: str) -> list[dict[str, Any]]:
    """Labeled replies: language, refusal, kind, text."""
    lines = (ROOT / f"tests/data/refusals_{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def measure(replies: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and recall and precision with 95 % Clopper-Pearson intervals."""
    counts = Counter((reply["refusal"], is_refusal(reply["text"])) for reply in replies)
    hits, misses, false = counts[True, True], counts[True, False], counts[False, True]
    return {
        "refusals": hits + misses,
        "answers": false + counts[False, False],
        "missed": misses,
        "false_positives": false,
        "recall": [round(x, 4) for x in proportion(hits, hits + misses)],
        "precision": [round(x, 4) for x in proportion(hits, hits + false)] if hits + false else None,
    }


def main() -> None:
    """Measures each set as a whole and by language."""
    results: dict[str, Any] = {}
    for name in SETS:
        replies = load(name)
        languages = sorted({reply["language"] for reply in replies})
        by_language = {x: measure(r for r in replies if r["language"] == x) for x in languages}
        results[name] = {"all": measure(replies), "by_language": by_language}
    earlier = {
        when: {
            name: {metric: [round(x, 4) for x in proportion(*counts)] for metric, counts in metrics.items()}
            for name, metrics in sets.items()
        }
        for when, sets in EARLIER.items()
    }
    save("refusals", results | {"earlier": earlier})


if __name__ == "__main__":
    main()
