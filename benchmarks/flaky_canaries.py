"""Canaries that fail at random, and an HTTP service with such answers, for simulations and the complete monitor."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from casemate.app import open_app
from casemate.monitor.service import CanaryMonitor, open_canary_monitor
from casemate.monitor.trends.baseline import accept_baseline
from casemate.monitor.trends.cusum import AlarmLimits, RunAnalysis

CANARIES, BASELINE, FLAKE = 50, 20, 0.01
RIGHT, WRONG = "It costs 25 crowns.", "It costs 99 crowns."

Rates = npt.NDArray[np.float64]
Faults = Callable[[int], Rates]
"""Failure rates of the canaries in a run, by its number from 1."""


class Change(NamedTuple):
    """A fault that starts with the first run after the baseline.

    Attributes:
        rates: Failure rates of each run.
        alarms: Whether a run raises the alarm about the fault.
        within: Largest accepted number of runs until the alarm.
        sets: Simulated sets.
        longest: Largest number of runs of a set.
    """

    rates: Faults
    alarms: Callable[[RunAnalysis], bool]
    within: int
    sets: int
    longest: int


class Flakes:
    """Decides which answers fail. The random numbers of a run depend neither on the questions asked nor on their order.

    Args:
        rng: Random generator.
        lasting: Probability that the run after a failed one fails, and that a repetition fails.
    """

    def __init__(self, rng: np.random.Generator, lasting: tuple[float, float]) -> None:
        self.rng, self.lasting = rng, lasting
        self.failed, self.repeated = np.zeros(CANARIES, bool), np.zeros((0, CANARIES), bool)

    def next_run(self, rates: Rates | None = None) -> npt.NDArray[np.bool_]:
        """Draws the first failures of a run. ``repeated``: whether each repetition would fail."""
        usual = np.full(CANARIES, FLAKE) if rates is None else rates
        drawn = self.rng.random((1 + AlarmLimits().max_repeats, CANARIES))
        self.failed = drawn[0] < np.where(self.failed, np.maximum(self.lasting[0], usual), usual)
        self.repeated = drawn[1:] < np.maximum(self.lasting[1], usual)
        return self.failed

    def fails(self, canary: int, number: int) -> bool:
        """Whether an answer of the current run fails; number 0 is the first answer, others are repetitions."""
        return bool(self.failed[canary] if not number else self.repeated[number - 1, canary])


class FlakyService:
    """An HTTP service that answers canaries and receives their notifications. Use as a context manager.

    Args:
        flakes: Decides which answers are wrong.
    """

    def __init__(self, flakes: Flakes) -> None:
        self.flakes, self.asked, self.notified = flakes, Counter[int](), list[dict[str, Any]]()
        self._lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(outer._reply(body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> FlakyService:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def next_run(self, rates: Rates | None = None) -> None:
        """Starts a run: the next question of each canary is its first one."""
        self.asked.clear()
        self.flakes.next_run(rates)

    def _reply(self, body: dict[str, Any]) -> dict[str, str]:
        with self._lock:
            if "question" not in body:
                self.notified.append(body)
                return {}
            canary = int(body["question"].split()[-1].rstrip("?"))
            self.asked[canary] += 1
            return {"answer": WRONG if self.flakes.fails(canary, self.asked[canary] - 1) else RIGHT}


def end_to_end(folder: Path, flakes: Flakes, change: Change) -> dict[str, Any]:
    """Runs the complete monitor on a service until an alarm: configuration, HTTP target, baseline, store and webhook.

    Args:
        folder: An empty folder.
        flakes: Decides which answers are wrong.
        change: The fault.

    Returns:
        ``run``: number of the last run; ``alarmed_runs``: runs with an alarm; ``notified``: notifications received.
    """
    canaries = [{"id": f"c{i}", "query": f"What is fee {i}?", "expected_answer": "25"} for i in range(CANARIES)]
    (folder / "canaries.yaml").write_text(yaml.safe_dump({"name": "simulated", "canaries": canaries}))
    with FlakyService(flakes) as service:
        os.environ |= {"FLAKY_SERVICE_URL": service.url, "FLAKY_SERVICE_SECRET": "of this run"}  # in no file
        channel = {"use": "webhook", "url": "${FLAKY_SERVICE_URL}", "secret": "${FLAKY_SERVICE_SECRET}"}
        target = {"use": "http", "url": service.url}
        settings = {"monitor": {"target": target, "channels": [channel]}}
        (folder / "casemate.yaml").write_text(yaml.safe_dump(settings))
        with closing(open_app(folder / "casemate.yaml")) as app:
            number, alarmed = asyncio.run(_watch(open_canary_monitor(app), service, change))
        return {"run": number, "alarmed_runs": alarmed, "notified": len(service.notified)}


async def _watch(monitor: CanaryMonitor, service: FlakyService, change: Change) -> tuple[int, int]:
    """Records and accepts a baseline, then runs until the alarm.

    Returns the number of runs, and of runs with an alarm.
    """
    recorded = iter(range(1, BASELINE))
    service.next_run()
    progress = partial(_before_next, recorded, service)
    found = await monitor.measure_baseline(BASELINE, progress=progress, pause_s=0)
    accept_baseline(monitor.app.store, monitor.set, found.id, "benchmark", datetime.now(UTC))
    alarmed = 0
    for number in range(1, change.longest + 1):
        service.next_run(change.rates(number))
        analysis = await monitor.run(pause_s=0)
        alarmed += bool(analysis.alarmed or analysis.decayed)
        if change.alarms(analysis):
            return number, alarmed
    return change.longest, alarmed


def _before_next(recorded: Iterator[int], service: FlakyService, count: int) -> None:
    """Draws the next run of the baseline, if there is one."""
    if next(recorded, None) is not None:
        service.next_run()
