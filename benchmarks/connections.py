"""The gateway under many slow and idle connections of one key: p99 latency of another key.

    python -m benchmarks.connections [CONNECTIONS [SETTING ...]]

Server, attacker and the other client are separate processes. Six in ten of the attacker's connections sent one request
and are idle. The others send one byte of a header every few seconds; 100 stop in the middle of a body. The attacker
reopens connections that the server closes. The other client asks one question at a time, each on a new connection.
Windows with and without the attacker alternate. The guard is off, so that answers are fast. ``factor``: ratio of the
two p99, with a 95 % bootstrap interval over answers.

Settings: ``all_fit``, the default, admits all connections. ``cap_of_a_fifth`` sets ``gateway.max_connections`` to a
fifth of them, and the attacker has another address than the other client. In ``cap_of_a_fifth_one_address`` both have
the same address. There, the gateway resets most connections of both, because it cannot distinguish them before it reads
a request.
"""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import ROOT, SEED, ingest, save, saved
from benchmarks.gateway import ENVIRONMENT, body, raw, server
from casemate.app import open_app
from casemate.demo import clinic
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.maths.stats import bootstrap

CONNECTIONS, WINDOWS, ANSWERS = 10_000, 3, 100
IDLE_SHARE, BODIES = 0.6, 100
ELSEWHERE = "127.0.0.2"
"""Another address of the loopback network."""
BYTE_S = 5.0
"""Seconds between the bytes of a slow header."""


def main() -> None:
    """Measures the named settings, or all, and adds them to earlier results."""
    if sys.argv[1:2] == ["--attack"]:
        asyncio.run(attack(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]))
        return
    count = int(sys.argv[1]) if sys.argv[1:] else CONNECTIONS
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    results = saved("connections")
    results |= {"connections": count, "descriptors": hard, "answers": WINDOWS * ANSWERS}
    settings = {
        "all_fit": (None, "127.0.0.1"),
        "cap_of_a_fifth": (count // 5, ELSEWHERE),
        "cap_of_a_fifth_one_address": (count // 5, "127.0.0.1"),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = prepare(folder)
        for label in sys.argv[2:] or settings:
            cap, host = settings[label]
            with server(folder, mode="off", max_connections=cap, files=hard) as (url, _):
                results[label] = measure(url, keys, count, min(cap or count, count), host)
            save("connections", results)


def prepare(folder: Path) -> list[str]:
    """Indexes the pages of the fictional clinic, without a guard.

    Returns the keys of the attacker and of the other client.
    """
    with open_app(raw(folder) | {"guard": {"mode": "off", "defenses": []}}) as app:
        ingest(app, clinic.PAGES)
        return [str(ApiKeyStore(app.store).create(Grant(name, trust_user=True))[1]) for name in ("one", "other")]


def measure(url: str, keys: Sequence[str], count: int, fit: int, host: str) -> dict[str, Any]:
    """Latency with and without the attacker from the address ``host``, in alternating windows."""
    seconds: dict[str, list[float]] = {"alone": [], "attacked": []}
    failed, reached = Counter[str](), list[int]()
    for _ in range(WINDOWS):
        seconds["alone"] += window(url, keys[1], failed, "alone")
        with attacker(url, keys[0], count, fit, host) as opened:
            seconds["attacked"] += window(url, keys[1], failed, "attacked")
        reached += opened
    p99 = {what: float(np.quantile(values, 0.99)) for what, values in seconds.items()}

    def factor(alone: np.ndarray, attacked: np.ndarray) -> float:
        return float(np.quantile(attacked, 0.99) / np.quantile(alone, 0.99))

    low, high = bootstrap(factor, seconds["alone"], seconds["attacked"], SEED)[1:]
    return {
        "p50_ms": {what: 1e3 * float(np.median(values)) for what, values in seconds.items()},
        "p99_ms": {what: 1e3 * value for what, value in p99.items()},
        "factor": p99["attacked"] / p99["alone"],
        "factor_95": [float(low), float(high)],
        "failed": dict(failed),
        "opened_by_the_attacker": reached,
    }


def window(url: str, key: str, failed: Counter[str], label: str) -> list[float]:
    """Seconds of each answer of the other client."""
    rng, found = random.Random(SEED), []
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(ANSWERS):
        began = time.perf_counter()
        try:
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json=body(rng.choice(clinic.BENIGN_QUESTIONS)),
                headers=headers,
                timeout=60,
            )
            failed[label] += answer.status_code != 200
        except httpx.HTTPError:
            failed[label] += 1
        found.append(time.perf_counter() - began)
    return found


@contextmanager
def attacker(url: str, key: str, count: int, fit: int, host: str) -> Iterator[list[int]]:
    """Starts the attacker and waits until ``fit`` connections are open.

    At the end, appends the number opened to the list.
    """
    command = [sys.executable, "-m", "benchmarks.connections", "--attack", url, key, str(count), str(fit), host]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline().strip() == "open"
        opened: list[int] = []
        yield opened
        process.stdin.close()
        opened.append(int(process.stdout.read()))


async def attack(url: str, key: str, count: int, fit: int, source: str) -> None:
    """Opens connections from an address and keeps them open until standard input ends. Prints how many were opened."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = url.removeprefix("http://").partition(":")
    opened, ready, gate = Counter[str](), asyncio.Event(), asyncio.Semaphore(50)

    def note(number: int) -> None:
        opened["all"] += 1
        opened[f"{number}"] = 1
        if len(opened) > fit:
            ready.set()

    async def hold(number: int) -> None:
        while True:
            try:
                async with gate:
                    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
                    note(number)
                    await _begin(number, count, key, reader, writer)
                await _wait(number, count, reader, writer)
                writer.close()
            except OSError:
                pass
            await asyncio.sleep(1)

    tasks = [asyncio.create_task(hold(number)) for number in range(count)]
    await ready.wait()
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    print(opened["all"], flush=True)


async def _begin(number: int, count: int, key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = f"Host: x\r\nAuthorization: Bearer {key}\r\n"
    if number < BODIES:
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{head}Content-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    elif number < IDLE_SHARE * count:
        writer.write(f"GET /v1/models HTTP/1.1\r\n{head}\r\n".encode())
        await reader.read(4096)
    else:
        writer.write(f"GET /v1/models HTTP/1.1\r\n{head}X-Slow: ".encode())
    await writer.drain()


async def _wait(number: int, count: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Waits until the server closes the connection, and sends a header byte at intervals."""
    closed = asyncio.create_task(reader.read())
    while not (await asyncio.wait([closed], timeout=BYTE_S))[0]:
        if number >= IDLE_SHARE * count:
            writer.write(b"x")
            await writer.drain()
    await closed


if __name__ == "__main__":
    main()
