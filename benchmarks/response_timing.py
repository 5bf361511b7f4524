"""Response time as a membership attack, without other load and under the attacker's load; all defaults.

    python -m benchmarks.response_timing [SECONDS [idle|loaded]]

The questions quote documents. Some of the documents are in the collection and are withheld; others are not in it. Four
workers ask about either, at random. In ``loaded``, twelve do, and 24 further workers of the same key ask benign
questions without a pause. The gateway (MiniLM, calibrated Mirabel, extractive answers) is another process.

A run adds SECONDS (default 600) to the samples in ``build/response_timing``, up to 5,000 of each class, so that it can
be continued. ``auc``: probability that a member takes longer; ``auc_95``: bootstrap interval over answers.
``interval_s``: response interval at the end of each run.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from scipy.stats import ks_2samp

from benchmarks import ROOT, SEED, save, saved
from benchmarks.gateway import body, client, prepare, probed, raw, server, verbatim
from casemate.app import open_app
from casemate.config import GatewaySection
from casemate.demo import clinic
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.maths.metrics import auc
from casemate.maths.stats import bootstrap
from casemate.types import Document

SAMPLES, SECONDS, PROBES, LOADED_PROBES, LOADERS = 5000, 600.0, 4, 12, 24
FOLDER = ROOT / "build/response_timing"


def main() -> None:
    """Measures the named conditions, or both, and adds them to earlier results."""
    seconds = float(sys.argv[1]) if sys.argv[1:] else SECONDS
    wanted = sys.argv[2:] or ["idle", "loaded"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = saved("response_timing")
    system = FOLDER / "system"
    if not (system / "key").exists():
        system.mkdir(exist_ok=True)
        prepare(system)
    members, others = probed()
    for label in wanted:
        kept = FOLDER / f"{label}.json"
        found = json.loads(kept.read_text()) if kept.exists() else {"member": [], "other": [], "interval_s": []}
        asyncio.run(measure(system, members, others, found, seconds / len(wanted), label == "loaded"))
        kept.write_text(json.dumps(found))
        results[label] = compared(found["member"], found["other"]) | {"interval_s": found["interval_s"]}
        save("response_timing", results)


async def measure(
    folder: Path,
    members: Sequence[Document],
    others: Sequence[Document],
    found: dict[str, list[float]],
    seconds: float,
    loaded: bool,
) -> None:
    """Adds samples to ``found`` until the time limit or the number of samples is reached."""
    questions = {"member": list(map(verbatim, members)), "other": list(map(verbatim, others))}
    run, end = len(found["interval_s"]), time.monotonic() + seconds

    async def probe(http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(f"{SEED} {run} {number}")
        while time.monotonic() < end and min(map(len, (found["member"], found["other"]))) < SAMPLES:
            kind = rng.choice(("member", "other"))
            began = time.perf_counter()
            await ask(http, rng.choice(questions[kind]))
            if len(found[kind]) < SAMPLES:
                found[kind].append(round(time.perf_counter() - began, 5))

    async def load(http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while True:
            await ask(http, rng.choice(clinic.BENIGN_QUESTIONS))

    with server(folder, pace_ms=GatewaySection().pace_ms) as (url, _):
        async with client(url, folder) as http:
            for text in clinic.BENIGN_QUESTIONS:
                await ask(http, text)
            loads = [asyncio.create_task(load(http, number)) for number in range(LOADERS * loaded)]
            await asyncio.gather(*(probe(http, number) for number in range(LOADED_PROBES if loaded else PROBES)))
            for task in loads:
                task.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        found["interval_s"].append(_interval_s(folder, url))


async def ask(http: httpx.AsyncClient, text: str) -> None:
    """Asks with a new client name."""
    answer = await http.post("/v1/chat/completions", json=body(text))
    assert answer.status_code == 200, answer.text


def _interval_s(folder: Path, url: str) -> float:
    with open_app(raw(folder)) as app:
        key = str(ApiKeyStore(app.store).create(Grant("metrics", "metrics"))[1])
    time.sleep(3)  # the gateway reads new keys every two seconds
    told = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"}).text
    return float(re.search(r"^casemate_response_interval_seconds (\S+)", told, re.M)[1])  # type: ignore[index]


def compared(member: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Kolmogorov-Smirnov test, and AUC of the time as an attack."""
    test = ks_2samp(member, other)
    value, low, high = bootstrap(auc, member, other, SEED, resamples=200)
    return {
        "n": [len(member), len(other)],
        "median_ms": [1e3 * float(np.median(x)) for x in (member, other)],
        "p99_ms": [1e3 * float(np.quantile(x, 0.99)) for x in (member, other)],
        "ks": float(test.statistic),
        "ks_p": float(test.pvalue),
        "auc": float(value),
        "auc_95": [float(low), float(high)],
    }


if __name__ == "__main__":
    main()
