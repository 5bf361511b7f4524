"""Membership inference on NFCorpus, guard off and on: the split of Naseh et al. (1,000 + 1,000), k = 3.

The guard is calibrated on the 324 dev questions. Its cost is measured on the 323 test questions. The reader is
**simulated**. ``python -m benchmarks.membership 250 [folder]`` uses the first 250 + 250 candidates. It resumes an
interrupted run in the folder; times are then those of the remaining part.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, both_sides, ingest, nfcorpus_questions, print_steps, save
from casemate.app import open_app
from casemate.redteam.campaigns.own import OwnMembershipCampaign
from casemate.redteam.lab.results import CampaignResult
from casemate.system import App
from casemate.types import Query


def main() -> None:
    """Indexes, attacks, and writes the results."""
    each = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    named = json.loads((DATA / "mia_riddle/nfcorpus_selected_indices.json").read_text())
    with nullcontext(sys.argv[2]) if len(sys.argv) > 2 else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        split = {"members": named["mem_indices"][:each], "nonmembers": named["non_mem_indices"][:each]}
        (folder / "split.json").write_text(json.dumps(split))
        raw: dict[str, Any] = {
            "rag": {"corpus": str(DATA / "nfcorpus"), "k": 3, "index": {"use": "sqlite", "path": f"{folder}/index.db"}},
            "redteam": {"split": f"{folder}/split.json", "folder": f"{folder}/all"},
            "guard": {"defenses": [{"use": "mirabel", "calibration": f"{folder}/calibration.json"}]},
            "store": {"use": "sql", "path": f"{folder}/events.db"},
        }
        with open_app(raw) as app:
            ingest(app, DATA / "nfcorpus")
            asyncio.run(app.calibrate(nfcorpus_questions("qrels.dev.tsv")))
            cost = _cost(app)
        one = {**raw["redteam"], "attacks": ["mba"], "folder": f"{folder}/mba"}
        _, mba_s = _campaign(raw | {"redteam": one})
        campaign, all_s = _campaign(raw)
        (folder / "campaign.json").write_text(campaign.to_json(), encoding="utf-8")
    results = {
        "each": each,
        "attacks": both_sides(campaign.attacks),
        "utility": campaign.utility and asdict(campaign.utility),
        "audit": campaign.audit and asdict(campaign.audit),
        "status": campaign.status,
        "questions": campaign.cost["questions"],
        "all_attacks_s": all_s,
        "mba_alone_s": mba_s,
        "added_to_a_request_us": cost,
    }
    save("membership", results)


def _campaign(raw: dict[str, Any]) -> tuple[CampaignResult, float]:
    with open_app(raw) as app:
        start = time.perf_counter()
        log, benign = nfcorpus_questions("qrels.dev.tsv"), nfcorpus_questions("qrels.tsv")
        return asyncio.run(
            OwnMembershipCampaign(app, benign, query_log=log).run(print_steps)
        ), time.perf_counter() - start


def _cost(app: App) -> dict[str, float]:
    """CPU microseconds of the calibrated test on the hits of each test question, by new clients.

    Each question is asked twice: the first time documents are analyzed; later the stems of recent words are cached.
    """
    (defense,) = app.calibrated
    found = []
    for text in nfcorpus_questions("qrels.tsv"):
        vector = asyncio.run(app.guard.rag.encode(Query(text, k=3)))
        found.append((text, app.index.search(vector, 3 + defense.lookahead + 2 * defense.max_hidden_sources)))

    async def judge(number: int, time_: str) -> float:
        text, retrieval = found[number]
        query = Query(text, f"client-{time_}-{number}", k=3)
        start = time.thread_time()
        await defense.on_retrieve(query, retrieval)
        return time.thread_time() - start

    async def judge_all(time_: str) -> list[float]:
        return [await judge(number, time_) for number in range(len(found))]

    times = {time_: asyncio.run(judge_all(time_)) for time_ in ("at first sight", "again")}
    quantiles = (("median", 0.5), ("p95", 0.95))
    return {f"{name}, {t}": float(np.quantile(times[t], q)) * 1e6 for t in times for name, q in quantiles}


if __name__ == "__main__":
    main()
