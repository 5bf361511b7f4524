"""The gateway: CPU time of the guard, and memory of waiting streams.

Load comes from this process over HTTP; servers are separate processes. On a busy machine only ratios are reliable:
compared settings alternate in one run.

    python -m benchmarks.gateway [throughput] [streams] [work]

``throughput``: requests per second of the same application with the guard off and on (MiniLM, extractive answers).
``streams``: memory of each of 1,000 waiting streams, and whether other requests are still served. ``work``: CPU time of
the guard beyond embedding and search, with 100,000 documents of random vectors.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import ROOT, SEED, clustered, save, saved
from casemate.app import open_app
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.demo import clinic
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.gateway.server import serve
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.file import write_calibration
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.guard import Guard
from casemate.maths.calibration import Calibration
from casemate.maths.moments import CorpusMoments
from casemate.protocols import Embedder, Generator, Index
from casemate.rag.chunking import split_document
from casemate.rag.pipeline import Rag
from casemate.types import Document, Hit, Prompt, Query, Retrieval

ENVIRONMENT = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
STREAMS, PROBED = 1000, 100
WINDOW_S, WINDOWS, WORKERS = 3.0, 5, 24


def main() -> None:
    """Measures the named parts, or all, and adds them to earlier results."""
    if sys.argv[1:2] == ["--serve"]:
        run_server(Path(sys.argv[2]), json.loads(sys.argv[3]))
        return
    wanted = sys.argv[1:] or ["throughput", "streams", "work"]
    results = saved("gateway")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if {"throughput", "streams"} & set(wanted):
            prepare(folder)
        for what in wanted:
            if what == "throughput":
                results[what] = asyncio.run(throughput(folder))
            elif what == "streams":
                results[what] = asyncio.run(streams(folder))
            else:
                results[what] = asyncio.run(work())
    save("gateway", results)


def raw(folder: Path, **sections: Any) -> dict[str, Any]:
    """The configuration of a system in a folder."""
    return {
        "rag": {"index": {"use": "sqlite", "path": f"{folder}/index.db"}},
        "guard": {"defenses": [{"use": "mirabel", "calibration": f"{folder}/calibration.json"}]},
        "calibrate": {"questions": 200, "documents": 30},
        "store": {"use": "sql", "path": f"{folder}/events.db"},
        **sections,
    }


def prepare(folder: Path, **sections: Any) -> tuple[list[Document], list[Document]]:
    """Indexes and calibrates the fictional clinic without some of its case notes; see ``probed`` and ``raw``."""
    pages = [Document(page.name, page.read_text()) for page in sorted(clinic.PAGES.glob("*.md"))]
    with open_app(raw(folder, **sections)) as app:
        embedder = app.guard.rag.embedder
        held = [
            chunk
            for whole in (*pages, *shuffled_notes()[PROBED:])
            for chunk in split_document(whole, embedder, embedder.max_tokens, 32)
        ]
        asyncio.run(app.guard.add(held))
        asyncio.run(app.calibrate())
        Path(folder / "key").write_text(str(ApiKeyStore(app.store).create(Grant("load", trust_user=True))[1]))
    return probed()


def shuffled_notes() -> list[Document]:
    """The case notes of the fictional clinic in seeded order."""
    notes = [Document(name, text) for name, text in clinic.case_notes()]
    random.Random(SEED).shuffle(notes)
    return notes


def probed() -> tuple[list[Document], list[Document]]:
    """Some case notes that ``prepare`` indexes, and those that it leaves out."""
    notes = shuffled_notes()
    return notes[PROBED : 2 * PROBED], notes[:PROBED]


@contextmanager
def server(folder: Path, **how: Any) -> Iterator[tuple[str, int]]:
    """Starts a gateway process. Yields its address and process id."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--serve", str(folder), json.dumps(how)]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield running.stdout.readline().strip(), running.pid
        finally:
            running.terminate()


def run_server(folder: Path, how: dict[str, Any]) -> None:
    """Main function of such a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, how.get("files", 8192)), hard))
    section = {"port": 0, "requests_per_minute": 10**7, "tokens_per_day": 10**12, "pace_ms": how.get("pace_ms", 0)}
    section |= {"max_connections": how.get("max_connections")}
    config = raw(folder, gateway=section, **how.get("sections", {}))
    config["guard"]["mode"] = how.get("mode", "enforce")
    app = open_app(config)
    if how.get("hold"):
        app = replace(app, guard=app.guard.instrumented(wrap_generator=Holding))
    serve(app, lambda address: print(address, flush=True))


@dataclass(eq=False)
class Holding(Generator):
    """Blocks after the first piece if the question contains "wait for ever"."""

    generator: Generator

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Yields the answer, or one piece and no end."""
        if "wait for ever" in prompt.question:
            yield "well "
            await asyncio.Event().wait()
        async for piece in self.generator.stream(prompt):
            yield piece


def client(url: str, folder: Path) -> httpx.AsyncClient:
    """A client with the key and an unlimited number of connections."""
    headers = {"Authorization": f"Bearer {(folder / 'key').read_text()}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60)


def body(text: str, **more: Any) -> dict[str, Any]:
    """Request body with a question of a new user."""
    user = uuid.uuid4().hex
    return {"model": "casemate", "messages": [{"role": "user", "content": text}], "user": user, **more}


async def throughput(folder: Path) -> dict[str, Any]:
    """Requests per second with benign questions, guard off and on alternating, with many concurrent requests."""
    questions = clinic.BENIGN_QUESTIONS
    rates: dict[str, list[float]] = {"off": [], "enforce": []}
    async with AsyncExitStack() as stack:
        https, processes = {}, {}
        for mode in rates:
            url, processes[mode] = stack.enter_context(server(folder, mode=mode))
            https[mode] = await stack.enter_async_context(client(url, folder))
            await _load(https[mode], questions, 1.0)
        cpu = {mode: -_cpu_s(process) for mode, process in processes.items()}
        for number in range(WINDOWS):
            for mode in sorted(rates, reverse=bool(number % 2)):
                rates[mode].append(await _load(https[mode], questions, WINDOW_S))
        cpu = {mode: spent + _cpu_s(processes[mode]) for mode, spent in cpu.items()}
    ratios = [on / off for on, off in zip(rates["enforce"], rates["off"], strict=True)]
    cpu_ms = {mode: 1e3 * spent / (sum(rates[mode]) * WINDOW_S) for mode, spent in cpu.items()}
    return {
        "per_second": rates,
        "ratios": ratios,
        "ratio_median": float(np.median(ratios)),
        "server_cpu_ms_each": cpu_ms,
        "ratio_by_cpu": cpu_ms["off"] / cpu_ms["enforce"],
    }


async def _load(http: httpx.AsyncClient, questions: Sequence[str], seconds: float) -> float:
    began, done = time.monotonic(), 0

    async def worker(number: int) -> None:
        nonlocal done
        rng = random.Random(number)
        while time.monotonic() - began < seconds:
            answer = await http.post("/v1/chat/completions", json=body(rng.choice(questions)))
            assert answer.status_code == 200, answer.text
            done += 1

    await asyncio.gather(*map(worker, range(WORKERS)))
    return done / (time.monotonic() - began)


def verbatim(document: Document) -> str:
    """A question that contains part of a document."""
    return f"What is known about this: {' '.join(document.text.split()[:40])}"


async def streams(folder: Path) -> dict[str, Any]:
    """Memory, and latency of other requests: before, while 1,000 streams wait, and after they are closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with server(folder, hold=True) as (url, process):
        async with client(url, folder) as http:
            before_s, before_kb = await _others(http), resident_kb(process)
            async with AsyncExitStack() as stack:
                await _wait_all(http, stack)
                while_s, while_kb = await _others(http), resident_kb(process)
            await asyncio.sleep(1)
            after_s, after_kb = await _others(http), resident_kb(process)
    return {
        "streams": STREAMS,
        "kb_each": (while_kb - before_kb) / STREAMS,
        "resident_mb": [before_kb / 1024, while_kb / 1024, after_kb / 1024],
        "others_ms": [1e3 * before_s, 1e3 * while_s, 1e3 * after_s],
        "others_ratio": while_s / before_s,
    }


async def _wait_all(http: httpx.AsyncClient, stack: AsyncExitStack) -> None:
    for _ in range(STREAMS // 50):
        await asyncio.gather(*(_waiting(http, stack) for _ in range(50)))


async def _waiting(http: httpx.AsyncClient, stack: AsyncExitStack) -> None:
    request = http.stream("POST", "/v1/chat/completions", json=body("wait for ever", stream=True))
    answer = await stack.enter_async_context(request)
    assert answer.status_code == 200
    await anext(aiter(answer.aiter_raw()))


async def _others(http: httpx.AsyncClient) -> float:
    """Median seconds of an answer to another client."""
    times = []
    for text in clinic.BENIGN_QUESTIONS * 2:
        began = time.perf_counter()
        answer = await http.post("/v1/chat/completions", json=body(text))
        assert answer.status_code == 200, answer.text
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def _cpu_s(process: int) -> float:
    """CPU seconds of a process so far. On a shared machine they are more reliable than wall-clock time."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_kb(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@dataclass(eq=False)
class Given(Embedder):
    """Returns the given vectors in order."""

    vectors: np.ndarray
    fingerprint: str = "given"
    max_tokens: int = 100
    at: int = 0

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self.vectors.shape[1])

    def embed(self, texts: Sequence[str], progress: Any = None) -> np.ndarray:
        """The next vectors, one for each text."""
        self.at += len(texts)
        return self.vectors[self.at - len(texts) : self.at]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """No spans."""
        return []


class Scanned(Index):
    """Minimal index: exact scan of all vectors in memory."""

    def __init__(self, E: np.ndarray, documents: Sequence[Document]) -> None:
        self.E, self.documents = E, documents
        parts = (CorpusMoments.of(E[i : i + 20_000]) for i in range(0, len(E), 20_000))
        self.held = sum(parts, CorpusMoments.empty(E.shape[1]))

    def open(self, fingerprint: str, dim: int) -> None:
        """Does nothing."""

    def search(self, vector: np.ndarray, k: int, tenant: str = "default") -> Retrieval:
        """The k nearest documents."""
        scores = self.E @ vector  # (n,)
        best = np.argpartition(-scores, k)[:k]
        best = best[np.argsort(-scores[best])]
        return Retrieval(
            tuple(Hit(self.documents[i], float(scores[i])) for i in best), self.held.similarity_stats(vector)
        )


async def work(asked: int = 300, n: int = 100_000) -> dict[str, Any]:
    """Milliseconds in the defense, and of the larger search that it needs; one question at a time."""
    rng = np.random.default_rng(SEED)
    E = clustered(n, 384, rng)
    Q = E[rng.integers(0, n, asked)] + 0.06 * rng.standard_normal((asked, 384), dtype=np.float32)
    Q = (Q / np.linalg.norm(Q, axis=1, keepdims=True)).astype(np.float32)
    words = [f"w{i}" for i in range(5000)]
    documents = [Document(f"d{i}", " ".join(random.Random(i).choices(words, k=60))) for i in range(n)]
    index = Scanned(E, documents)
    results: dict[str, Any] = {"documents": n, "questions": asked}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calibration.json"
        write_calibration(file, "default", await _fit(index, Q))
        for mode in ("paper", "calibrated"):
            mirabel = Mirabel(mode=mode, calibration=file)
            guard = Guard(Rag(Given(Q), index, ExtractiveGenerator()), [mirabel])
            results[mode] = await _own(guard, mirabel, asked)
    return results


async def _fit(index: Scanned, Q: np.ndarray) -> Calibration:
    """A calibration that flags few of these questions. The time of a decision does not depend on it otherwise."""
    ones, none = (1.0,) * len(FEATURES), (0.0,) * len(FEATURES)
    made = Calibration("given", len(index.E), 5, FEATURES, none, ones, ones, (), "synthetic")
    mirabel, scores = Mirabel(), list[float]()
    for number, vector in enumerate(Q[:100]):
        query = Query(_asked(number), client=str(number))
        scores += [max((await mirabel.score(query, index.search(vector, 40), made)).values())]
    return replace(made, benign=tuple(sorted(scores)))


def _asked(number: int) -> str:
    return f"w{number} w{number + 1} w{number + 2} and what is known of it"


async def _own(guard: Guard, mirabel: Mirabel, asked: int) -> dict[str, Any]:
    judged: list[float] = []
    real = mirabel.on_retrieve

    async def timed(query: Query, retrieval: Any) -> Any:
        began = time.thread_time()
        try:
            return await real(query, retrieval)
        finally:
            judged.append(time.thread_time() - began)

    mirabel.on_retrieve = timed  # type: ignore[method-assign]
    flagged, longer = 0, []
    embedder: Any = guard.rag.embedder
    for i in range(asked):
        query = Query(_asked(i), client=str(i))
        _, verdicts = await guard.retrieve(query)
        flagged += sum(v.flagged for v in verdicts)
        vector = embedder.vectors[i]
        times = []
        for k in (5, 5 + guard.defenses[0].lookahead + 6):
            began = time.thread_time()
            guard.rag.index.search(vector, k)
            times.append(time.thread_time() - began)
        longer.append(times[1] - times[0])
    extra = 1e3 * float(np.median(longer))  # difference of two scans, each much longer: its tail is noise
    defense = {f"p{p}": 1e3 * float(np.percentile(judged, p)) for p in (50, 99)}
    return {
        "defense_ms": defense,
        "longer_search_ms_median": extra,
        "own_ms": {name: value + extra for name, value in defense.items()},
        "flagged": flagged / asked,
        "judged": len(judged) / asked,
    }


if __name__ == "__main__":
    main()
