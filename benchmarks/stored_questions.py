"""Membership inference with the guard off and on, calibrated by default without a log.

``python -m benchmarks.stored_questions [documents each side] [corpus ...] [significance=RATE]``. Default corpora: short
forum posts and problems of MathQA, whose documents contain users' questions; 600 documents of each. With
``significance``, the name of the result contains it. The reader is **simulated**. The benign questions are those of the
corpus. A corpus with results is skipped.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, before, both_sides, defaults, ingest, print_steps, save
from casemate.app import open_app
from casemate.redteam.campaigns.own import OwnMembershipCampaign

CORPORA = ("short_posts", "mathqa")
DOCUMENTS, QUESTIONS = 600, 60


def main() -> None:
    """Measures the corpora without results."""
    numbers, names = [a for a in sys.argv[1:] if a.isdigit()], [a for a in sys.argv[1:] if a.isalpha() or "_" in a]
    rates = [a.partition("=")[2] for a in sys.argv[1:] if "=" in a]
    each = int(numbers[0]) if numbers else 40
    results = before("stored_questions", {"documents": DOCUMENTS, "questions": QUESTIONS, "each": each})
    for name in names or CORPORA:
        key = ", significance ".join([name, *rates])
        if key not in results["corpora"]:
            with tempfile.TemporaryDirectory() as folder:
                results["corpora"][key] = _measured(name, each, Path(folder), [float(rate) for rate in rates])
            save("stored_questions", results)


def _measured(name: str, each: int, folder: Path, rates: Sequence[float]) -> dict[str, Any]:
    defaults.SIZES.update(documents=DOCUMENTS, questions=QUESTIONS, log=0)
    corpus = defaults.load(name)
    rows = ({"_id": d.id, "title": d.title, "text": d.text} for d in corpus.documents)
    (folder / "posts").mkdir()
    (folder / "posts/corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "posts/queries.jsonl").write_text("")
    drawn = np.random.default_rng(SEED).permutation([d.id for d in corpus.documents])[: 2 * each].tolist()
    (folder / "split.json").write_text(json.dumps({"members": drawn[:each], "nonmembers": drawn[each:]}))
    raw: dict[str, Any] = {
        "rag": {"corpus": f"{folder}/posts", "index": {"use": "sqlite", "path": f"{folder}/index.db"}},
        "redteam": {"split": f"{folder}/split.json", "folder": f"{folder}/runs"},
        "guard": {"defenses": [{"use": "mirabel", "calibration": f"{folder}/calibration.json"}]},
        "store": {"use": "sql", "path": f"{folder}/events.db"},
    }
    for rate in rates:
        raw["guard"]["defenses"][0]["significance"] = rate
    with open_app(raw) as app:
        ingest(app, folder / "posts")
        found = asyncio.run(OwnMembershipCampaign(app, [q.text for q in corpus.asked]).run(print_steps))
    return {
        "attacks": both_sides(found.attacks),
        "utility": found.utility and asdict(found.utility),
        "status": found.status,
    }


if __name__ == "__main__":
    main()
