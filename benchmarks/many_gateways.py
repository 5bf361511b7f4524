"""Several gateways over one Postgres: CPU time of sharing.

    python -m benchmarks.many_gateways [polling] [throughput]

``polling``: CPU time in which a gateway reads new events of others, beside 100,000 verdicts. It compares the earlier
query by time, without and with an index on (kind, at), with the present query by position.

``throughput``: gateways (MiniLM, calibrated Mirabel, extractive answers) with pgvector. ``alone``: load on one gateway.
``together``: load on three over one database. ``apart``: load on three with a database each. Clients, gateways and
Postgres share the cores and caches of one machine. So an answer of three gateways needs more CPU time than that of one.
The cost of sharing is the CPU time per answer, in gateway and database, ``together`` compared with ``apart``. If both
are equal, three machines have three times the throughput, up to the capacity of the database.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psycopg

from benchmarks import ROOT, SEED, save, saved
from benchmarks.gateway import ENVIRONMENT, _cpu_s, _load, client
from benchmarks.killable import Database, postgres, sections
from casemate.app import open_app
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.demo import clinic
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.rag.chunking import split_document
from casemate.types import Document, Event, Secret

VERDICTS, KEYS = 100_000, 500
GATEWAYS, WINDOWS, WINDOW_S = 3, 4, 4.0


def main() -> None:
    """Measures the named parts, or all, and adds them to earlier results."""
    wanted = sys.argv[1:] or ["polling", "throughput"]
    results = saved("many_gateways")
    with tempfile.TemporaryDirectory(prefix="casemate-pg-") as name, postgres(Path(name) / "pg") as database:
        if "polling" in wanted:
            lite = f"sqlite:///{name}/events.db"
            results["polling_ms"] = {"sqlite": polling(lite), "postgres": polling(database.url)}
        if "throughput" in wanted:
            results["throughput"] = asyncio.run(throughput(Path(name), database))
    save("many_gateways", results)


def polling(url: str) -> dict[str, dict[str, float]]:
    """Wall-clock and CPU milliseconds of a poll without new events."""
    with closing(SqlEventStore(Secret(url))) as store:
        _fill(store)
        _, place = store.read_since("key", 0)
        recent = datetime.now(UTC) - timedelta(minutes=2)
        found = {"by_time": _cost(lambda: store.scan("key", recent))}
        with store._engine.begin() as connection:
            connection.exec_driver_sql("CREATE INDEX extra ON casemate_events (kind, at)")
            connection.exec_driver_sql("ANALYZE")
        found["by_time_with_an_index_on_kind_and_at"] = _cost(lambda: store.scan("key", recent))
        with store._engine.begin() as connection:
            connection.exec_driver_sql("DROP INDEX extra")
        found["by_place"] = _cost(lambda: store.read_since("key", place))
    return found


def _fill(store: SqlEventStore) -> None:
    """Appends verdicts of the last five minutes for a few keys."""
    now, verdict = datetime.now(UTC), {"defense": "mirabel", "flagged": False, "text": "x" * 300}
    step = VERDICTS // KEYS
    for number in range(VERDICTS):
        at = now - timedelta(milliseconds=VERDICTS - number)
        store.append(Event(uuid.uuid4().hex, at, "verdict", verdict))
        if number % step == 0:
            store.append(Event(uuid.uuid4().hex, at - timedelta(days=1), "key", {"key": str(number)}))
        if number % 20_000 == 0:
            store.flush(120)
    assert store.flush(120)
    with store._engine.begin() as connection:
        connection.exec_driver_sql("ANALYZE")


def _cost(call: Callable[[], Any], times: int = 30) -> dict[str, float]:
    call()
    spent, cpu = [], time.process_time()
    for _ in range(times):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return {"median_ms": 1e3 * float(np.median(spent)), "own_cpu_ms": 1e3 * (time.process_time() - cpu) / times}


def _config(folder: Path) -> dict[str, Any]:
    section = {"port": 0, "requests_per_minute": 10**7, "tokens_per_day": 10**12, "pace_ms": 0}
    return {
        **sections(),
        "guard": {"defenses": [{"use": "mirabel", "calibration": f"{folder}/calibration.json"}]},
        "calibrate": {"questions": 100, "documents": 20},
        "gateway": section,
    }


async def throughput(folder: Path, database: Database) -> dict[str, Any]:
    """Answers per second and CPU milliseconds per answer: one gateway, three, and three with separate databases."""
    await asyncio.to_thread(_prepare, folder)
    own = [database.url.replace("/postgres?", f"/apart{number}?") for number in range(GATEWAYS)]
    with psycopg.connect(database.url, autocommit=True) as connection:
        for number in range(GATEWAYS):
            connection.execute(f"CREATE DATABASE apart{number} TEMPLATE postgres")
    windows: dict[str, list[dict[str, float]]] = {"alone": [], "together": [], "apart": []}
    async with AsyncExitStack() as stack:
        started = [stack.enter_context(_gateway(folder, place)) for place in [database.url] * GATEWAYS + own]
        https = [await stack.enter_async_context(client(place, folder)) for place, _ in started]
        for http in https:
            await _load(http, clinic.BENIGN_QUESTIONS, 2.0)
        processes = [process for _, process in started]
        for number in range(WINDOWS * GATEWAYS):
            windows["alone"].append(await _window([https[number % GATEWAYS]], processes, database.process))
            if number % GATEWAYS == 0:
                windows["together"].append(await _window(https[:GATEWAYS], processes, database.process))
                windows["apart"].append(await _window(https[GATEWAYS:], processes, database.process))
    cost = {name: sum(w["cpu_s"] for w in these) / sum(w["answers"] for w in these) for name, these in windows.items()}
    return {
        "cores": os.cpu_count(),
        "answers_per_second": {name: [w["answers"] / w["seconds"] for w in these] for name, these in windows.items()},
        "cpu_ms_each": {name: 1e3 * spent for name, spent in cost.items()},
        "of_it_in_the_database_ms": {
            name: 1e3 * sum(w["database_s"] for w in these) / sum(w["answers"] for w in these)
            for name, these in windows.items()
        },
        "kept_of_the_sum_by_cpu": cost["apart"] / cost["together"],
        "kept_of_three_times_one_by_cpu": cost["alone"] / cost["together"],
    }


async def _window(https: Sequence[httpx.AsyncClient], processes: Sequence[int], postmaster: int) -> dict[str, float]:
    before, database = sum(map(_cpu_s, processes)), _tree_s(postmaster)
    began = time.monotonic()
    rates = await asyncio.gather(*(_load(http, clinic.BENIGN_QUESTIONS, WINDOW_S) for http in https))
    seconds = time.monotonic() - began
    database = _tree_s(postmaster) - database
    cpu = sum(map(_cpu_s, processes)) - before + database
    return {"answers": sum(rates) * WINDOW_S, "seconds": seconds, "cpu_s": cpu, "database_s": database}


def _tree_s(process: int) -> float:
    """CPU seconds of a process and its descendants."""
    children = [
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and _parent(path) == process
    ]
    return _cpu_s(process) + sum(map(_cpu_s, children))


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _prepare(folder: Path) -> None:
    config = _config(folder)
    (folder / "casemate.json").write_text(json.dumps(config))
    documents = [Document(name, text) for name, text in clinic.case_notes()][:300]
    documents += [Document(page.name, page.read_text()) for page in sorted(clinic.PAGES.glob("*.md"))]
    random.Random(SEED).shuffle(documents)
    with open_app(config) as app:
        embedder = app.guard.rag.embedder
        asyncio.run(
            app.guard.add([c for whole in documents for c in split_document(whole, embedder, embedder.max_tokens, 32)])
        )
        asyncio.run(app.calibrate())
        (folder / "key").write_text(str(ApiKeyStore(app.store).create(Grant("load", trust_user=True))[1]))


@contextmanager
def _gateway(folder: Path, url: str) -> Iterator[tuple[str, int]]:
    """Starts a gateway process over the database at ``url``. Yields its address and process id."""
    command = [sys.executable, "-m", "casemate", "serve", "--config", str(folder / "casemate.json")]
    environment = ENVIRONMENT | {"DATABASE_URL": url, "COLUMNS": "200"}
    log = folder / f"{uuid.uuid4().hex}.log"
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file) as running:
        try:
            while "/v1" not in log.read_text():
                assert running.poll() is None, log.read_text()
                time.sleep(0.05)
            yield log.read_text().split("serving at ")[1].split("/v1")[0], running.pid
        finally:
            running.terminate()


if __name__ == "__main__":
    main()
