"""Memory of a gateway over 100,000 questions without a model: does it grow with the number of questions?

    python -m benchmarks.memory [QUESTIONS]

The gateway (SQLite, calibrated Mirabel, crawl_limit, test embedder and generator) is called within this process: 12
concurrent questions of four users; half of the answers are streams. Tables that store 10,000 requests are limited to
500 here. So these tables and the client state are full after 4,000 questions.

Every 100 questions it measures resident memory; memory that the C library has allocated and free (``mallinfo2``); and
the arenas of Python's allocator. Both allocators keep their peak size, and reach it after some thousand questions. So
the warm-up is a fifth of the questions.

``growth_mb_per_100_000``: slope of a line through the later measurements, with a 95 % bootstrap interval over blocks of
ten. ``at_4000``: when the tables were full.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import re
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks import SEED, save
from benchmarks.gateway import resident_kb
from casemate import config as configuration
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.gateway.app import make_app
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.gateway.server import share_memory_arenas
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.file import write_calibration
from casemate.guard.client_state import withheld_documents
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.guard import Guard
from casemate.maths.calibration import Calibration
from casemate.rag.pipeline import Rag
from casemate.system import App
from casemate.types import Prompt, Query, Vector
from tests.fakes import WORDS, BagOfWords, Parrot, documents

QUESTIONS, WARM_UP_SHARE, FULL, REMEMBERED = 100_000, 0.2, 4000, 500
AT_ONCE, PEOPLE, DIM, HELD = 12, 4, 64, 60


class Sample(NamedTuple):
    """Megabytes after a number of questions.

    Attributes:
        asked: Questions so far.
        resident: Resident memory of the process.
        allocated: Allocated by the C library, including large blocks.
        free: Free memory of the C library.
        arenas: Arenas of Python's allocator.
    """

    asked: int
    resident: float
    allocated: float
    free: float
    arenas: float


class Light(BagOfWords):
    """Caches directions of words, but no texts."""

    @cached_property
    def _directions(self) -> dict[str, Vector]:
        return {}

    def embed(self, texts: Any, progress: Any = None) -> Vector:
        """See ``Embedder``."""
        vectors: Vector = super().embed(texts, progress)
        self.texts.clear()
        return vectors

    def _direction(self, word: str) -> Vector:
        if word not in self._directions:
            self._directions[word] = super()._direction(word)
        return self._directions[word]


class Forgetful(Parrot):
    """Stores no prompts."""

    async def stream(self, prompt: Prompt) -> Any:
        """See ``Generator``."""
        async for piece in super().stream(prompt):
            yield piece
        self.prompts.clear()


def main() -> None:
    """Asks and measures."""
    count = int(sys.argv[1]) if sys.argv[1:] else QUESTIONS
    share_memory_arenas()  # as ``casemate serve`` does
    withheld_documents.MAX_CLIENTS = REMEMBERED  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as name:
        samples = asyncio.run(measure(system(Path(name)), count))
    later = [s for s in samples if s.asked > WARM_UP_SHARE * count]
    asked = np.array([s.asked for s in later])
    full = next(s for s in samples if s.asked >= min(FULL, count // 2))
    save(
        "memory",
        {
            "questions": count,
            "after_the_warm_up": int(asked[-1] - asked[0]),
            "growth_mb_per_100_000": {
                name: growth(asked, np.array([getattr(s, name) for s in later])) for name in Sample._fields[1:]
            },
            "mb": {
                "at_4000": full._asdict(),
                "after_the_warm_up": later[0]._asdict(),
                "at_the_end": later[-1]._asdict(),
            },
        },
    )


def growth(asked: np.ndarray, mb: np.ndarray) -> list[float]:
    """Growth in MB per 100,000 questions, with its interval."""
    blocks = np.array_split(np.arange(len(asked)), max(2, len(asked) // 10))
    rng = np.random.default_rng(SEED)
    slopes = []
    for _ in range(1000):
        chosen = np.concatenate([blocks[i] for i in rng.integers(0, len(blocks), len(blocks))])
        if np.ptp(asked[chosen]):
            slopes.append(np.polyfit(asked[chosen], mb[chosen], 1)[0])
    slope = np.polyfit(asked, mb, 1)[0]
    return [float(1e5 * x) for x in (slope, *np.quantile(slopes, (0.025, 0.975)))]


def system(folder: Path) -> App:
    """A system over documents of random words, calibrated on short benign questions."""
    section = {"port": 0, "pace_ms": 0, "requests_per_minute": 10**7, "tokens_per_day": 10**12}
    config = configuration.parse({"guard": {"defenses": []}, "gateway": section}, folder=folder)
    opened = ExitStack()
    index = opened.enter_context(closing(SqliteIndex(folder / "index.db")))
    store = opened.enter_context(closing(SqlEventStore(path=folder / "events.db")))
    embedder = Light(DIM)
    mirabel = Mirabel(calibration=folder / "calibration.json", embedder=embedder, index=index, store=store)
    guard = Guard(Rag(embedder, index, Forgetful()), [mirabel, CrawlLimit(store=store)], store=store)
    asyncio.run(guard.add(documents(HELD)))
    ones, none = (1.0,) * len(FEATURES), (0.0,) * len(FEATURES)
    made = Calibration(embedder.fingerprint, HELD, 5, FEATURES, none, ones, ones, (), "made up")
    scores = list[float]()
    for number, text in enumerate(questions(100)):
        found = index.search(embedder.embed([text])[0], 40)
        scores.append(max(asyncio.run(mirabel.score(Query(text, client=str(number)), found, made)).values()))
    write_calibration(folder / "calibration.json", "default", replace(made, benign=tuple(sorted(scores))))
    return App(config, guard, store, opened)


def questions(count: int) -> list[str]:
    """Questions of three words."""
    rng = random.Random(SEED)
    return [" ".join(rng.sample([*WORDS, f"only{number % HELD}"], 3)) for number in range(count)]


async def measure(app: App, count: int) -> list[Sample]:
    """Asks, and measures every 100 questions."""
    key = str(ApiKeyStore(app.store).create(Grant("people", trust_user=True))[1])
    api, rng, samples = make_app(app), random.Random(SEED), list[Sample]()
    texts = [*questions(200), *(document.text for document in documents(HELD)[:25])]

    async def ask(http: httpx.AsyncClient) -> None:
        message = {"role": "user", "content": rng.choice(texts)}
        body = {"model": "casemate", "messages": [message], "user": f"person-{rng.randrange(PEOPLE)}"}
        answer = await http.post("/v1/chat/completions", json=body | {"stream": rng.random() < 0.5})
        assert answer.status_code == 200, answer.text

    async with (
        api.router.lifespan_context(api),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(api), base_url="http://gateway", headers={"Authorization": f"Bearer {key}"}
        ) as http,
    ):
        asked, next_sample = 0, 0
        while asked < count:
            await asyncio.gather(*(ask(http) for _ in range(AT_ONCE)))
            asked += AT_ONCE
            if asked >= next_sample:
                gc.collect()
                samples.append(Sample(asked, resident_kb(os.getpid()) / 1024, *malloc_mb(), python_arenas_mb()))
                next_sample += count // 100
    return samples


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def malloc_mb() -> tuple[float, float]:
    """MB that glibc has allocated, including large blocks, and MB that it has free."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    return float(info.uordblks + info.hblkhd) / 2**20, float(info.fordblks) / 2**20


def python_arenas_mb() -> float:
    """MB of the arenas, as the interpreter prints them to standard error; 0 with ``PYTHONMALLOC=malloc``."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            sys._debugmallocstats()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        found = re.search(rb"([\d,]+) arenas \* ([\d,]+) bytes/arena", file.read())
    if found is None:
        return 0.0
    return float(found[1].replace(b",", b"")) * float(found[2].replace(b",", b"")) / 2**20


if __name__ == "__main__":
    main()
