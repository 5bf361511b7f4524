"""Ten minutes of mixed load on a gateway that is killed again and again: what is lost, what leaks, what grows.

    python -m benchmarks.soak [SECONDS]

One gateway with the real parts (MiniLM, calibrated Mirabel, SQLite) over the fictional clinic, in a process of its own.
From here: people who ask for whole answers and for streams, some who leave in mid-answer, some who read slowly, a
program that retrieves, one that adds and removes documents, one that makes and revokes keys. In the first half of the
time the gateway gets SIGKILL several times and is started anew; the second half is for its memory.

What must hold at the end: every document whose POST or DELETE was answered is there, or gone; every key that was
printed is there, and revoked if that was answered; every answer that came to its end has its verdicts in the store; no
answer holds words that are in no other document but one that was withheld from it, or, before, from its client; and the
gateway's memory does not grow.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np

from benchmarks import SEED, save
from benchmarks.gateway import prepare, raw, resident_kb, server, verbatim
from casemate.app import open_app
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.demo import clinic
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.system import App
from casemate.types import Event

SECONDS, KILLS = 600.0, 6
RUN = 6
"""Words in a row that tell a document from all others."""
PEOPLE = 60
Sample: TypeAlias = tuple[float, float, float]
"""Minutes since the process began to serve, MB that it holds, load of the machine."""
Work: TypeAlias = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]


@dataclass
class Told:
    """An answer that came to its end, or to where somebody left."""

    request: str
    client: str
    began: float
    ended: float
    text: str
    whole: bool = True
    sources: Sequence[str] = ()


@dataclass
class Soak:
    """The load, and what it was promised."""

    folder: Path
    questions: list[str]
    keys: dict[str, str]
    url: str = ""
    told: list[Told] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    made: dict[str, bool] = field(default_factory=dict)  # key -> whether its revocation was acknowledged
    counts: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def loop(self, work: Work, role: str, number: int) -> None:
        """Does a thing again and again, through kills."""
        rng = random.Random(SEED * 1000 + number)
        headers = {"Authorization": f"Bearer {self.keys[role]}"}
        while True:
            with suppress(httpx.TransportError):
                async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60) as http:
                    await self._again_and_again(work, http, rng)
            self.counts["connections broken"] += 1
            await asyncio.sleep(0.2)

    async def _again_and_again(self, work: Work, http: httpx.AsyncClient, rng: random.Random) -> None:
        while True:
            await work(http, rng)
            self.counts[work.__name__] += 1

    def _asked(self, rng: random.Random) -> dict[str, Any]:
        person = f"person-{rng.randrange(PEOPLE)}"
        message = {"role": "user", "content": rng.choice(self.questions)}
        return {"model": "casemate", "messages": [message], "user": person}

    async def ask(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """A whole answer."""
        body, began = self._asked(rng), time.time()
        answer = await http.post("/v1/chat/completions", json=body)
        if self._refused(answer):
            return
        text = answer.json()["choices"][0]["message"]["content"]
        self.told.append(Told(answer.headers["x-request-id"], body["user"], began, time.time(), text))

    async def stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """A stream, read at once, slowly, or not to its end."""
        body, began, how = self._asked(rng) | {"stream": True}, time.time(), rng.random()
        pieces, whole = list[str](), False
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if self._refused(answer):
                return
            async for line in _slowly(answer, 0.05 if how < 0.2 else 0.0):
                whole = whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    pieces.append(choices[0].get("delta", {}).get("content") or "")
                if how > 0.8 and len(pieces) > 2:
                    self.counts["left"] += 1
                    break
        text = "".join(pieces)
        self.told.append(Told(answer.headers["x-request-id"], body["user"], began, time.time(), text, whole))

    async def retrieve(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """The documents themselves."""
        asked, began = self._asked(rng), time.time()
        body = {"question": asked["messages"][0]["content"], "user": asked["user"]}
        answer = await http.post("/v1/retrieve", json=body)
        if not self._refused(answer):
            found = answer.json()["data"]
            text, sources = "\n".join(d["text"] for d in found), [d["source"] for d in found]
            request = answer.headers["x-request-id"]
            self.told.append(Told(request, body["user"], began, time.time(), text, sources=sources))
        await asyncio.sleep(0.1)

    async def write(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Adds a document, and removes an old one when there are some: the calibration is for so many documents."""
        number = next(self.numbers)
        name = f"new-{number}"
        self.unsure.add(name)
        text = f"Note {number}: the delivery of item {rng.randrange(10**9)} was taken by dock {number % 7}."
        added = await http.post("/v1/documents", json={"documents": [{"source": name, "text": text}]})
        if added.status_code == 200:
            self.kept.add(name)
            self.unsure.discard(name)
        certain = sorted(self.kept - self.unsure)
        if len(certain) > 20:
            old = rng.choice(certain)
            self.unsure.add(old)
            if (await http.delete("/v1/documents", params={"source": old})).status_code == 200:
                self.kept.discard(old)
                self.unsure.discard(old)
                self.gone.add(old)
        await asyncio.sleep(0.2)

    async def issue(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Makes a key, uses it, revokes it; from then on it is refused."""
        with closing(SqlEventStore(path=self.folder / "events.db")) as store:
            held = ApiKeyStore(store)
            key, secret = await asyncio.to_thread(held.create, Grant("passing"))
            self.made[key.id] = False
            await asyncio.sleep(5)  # gateways follow new keys every two seconds
            mine = {"Authorization": f"Bearer {secret}"}
            self.counts[f"with a new key {(await http.get('/v1/models', headers=mine)).status_code}"] += 1
            await asyncio.to_thread(held.revoke, key.id)
            self.made[key.id] = True
            self.counts[f"with a revoked key {(await http.get('/v1/models', headers=mine)).status_code}"] += 1
        await asyncio.sleep(rng.uniform(1, 10))

    def _refused(self, answer: httpx.Response) -> bool:
        if answer.status_code == 200:
            return False
        self.counts[f"status {answer.status_code}"] += 1
        return True


async def _slowly(answer: httpx.Response, pause_s: float) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        yield line
        if pause_s:
            await asyncio.sleep(pause_s)


def main() -> None:
    """Runs it."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        members, others = prepare(folder)
        with open_app(raw(folder)) as app:
            held = ApiKeyStore(app.store)
            keys = {
                "client": str(held.create(Grant("people", trust_user=True, retrieve=True))[1]),
                "admin": str(held.create(Grant("writer", "admin"))[1]),
            }
            texts = _texts(app)
        questions = [*clinic.BENIGN_QUESTIONS, *map(verbatim, members[:25]), *map(verbatim, others[:25])]
        soak = Soak(folder, questions, keys)
        resident, lives = asyncio.run(_run(soak, seconds))
        save("soak", {"seconds": seconds} | _judged(soak, texts, resident, lives))


async def _run(soak: Soak, seconds: float) -> tuple[list[Sample], int]:
    """The load and the kills; what the last process held."""
    tasks, lives = list[asyncio.Task[None]](), KILLS * [seconds / 2 / KILLS] + [seconds / 2]
    for number, life_s in enumerate(lives):
        with server(soak.folder, pace_ms=100) as (url, process):
            soak.url = url
            tasks = tasks or _begun(soak)
            resident = await _watched(process, life_s, tasks)
            if number < KILLS:
                os.kill(process, signal.SIGKILL)
                continue
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return resident, len(lives)


async def _watched(process: int, seconds: float, tasks: Sequence[asyncio.Task[None]]) -> list[Sample]:
    found, began = list[Sample](), time.monotonic()
    while time.monotonic() - began < seconds:
        await asyncio.sleep(1.0)
        spent = (time.monotonic() - began) / 60
        found.append((spent, resident_kb(process) / 1024, os.getloadavg()[0]))
        for task in (t for t in tasks if t.done()):
            task.result()
    return found


def _begun(soak: Soak) -> list[asyncio.Task[None]]:
    works = [soak.ask] * 4 + [soak.stream] * 6 + [soak.retrieve] * 2
    tasks = [asyncio.create_task(soak.loop(work, "client", n)) for n, work in enumerate(works)]
    return tasks + [asyncio.create_task(soak.loop(work, "admin", 100)) for work in (soak.write, soak.issue)]


def _texts(app: App) -> dict[str, str]:
    app.index.open(app.guard.rag.embedder.fingerprint, app.guard.rag.embedder.dim)
    held: dict[str, str] = defaultdict(str)
    for documents, _ in app.index.scan():
        for document in documents:
            held[document.source] += " " + document.content
    return held


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[i:] for i in range(RUN)), strict=False))


def _judged(soak: Soak, texts: dict[str, str], resident: Sequence[Sample], lives: int) -> dict[str, Any]:
    """What was lost, what leaked, and what grew."""
    with open_app(raw(soak.folder)) as app:
        held = set(_texts(app))
        unsound = app.index.check()
        keys = ApiKeyStore(app.store)
        keys.sync()
        known = {key.id: key.revoked is not None for key in keys.all()}
        verdicts = app.store.scan("verdict")
    noted = {event.body["request"] for event in verdicts}
    minutes, mb, load = np.array([x for x in resident if x[0] > 1.0] or resident).T
    new = {source for source in held if source.startswith("new-")}
    return {
        "lives": lives,
        "did": dict(soak.counts),
        "answers": len(soak.told),
        "of_them_to_their_end": sum(told.whole for told in soak.told),
        "flagged": sum(event.body["flagged"] for event in verdicts),
        "failed": sum("error" in event.body["evidence"] for event in verdicts),
        "documents": {"added": len(soak.gone) + len(soak.kept), "removed": len(soak.gone), "unsure": len(soak.unsure)},
        "documents_lost": len(soak.kept - soak.unsure - held),
        "documents_back_again": len(held & soak.gone),
        "documents_of_nobody": len(new - soak.kept - soak.unsure - soak.gone),
        "index_unsound": list(unsound),
        "keys_made": len(soak.made),
        "keys_lost": len(soak.made.keys() - known.keys()),
        "revocations_lost": sum(done and not known.get(key, False) for key, done in soak.made.items()),
        "answers_without_verdict": sum(told.whole and told.request not in noted for told in soak.told),
        **_leaks(soak.told, texts, verdicts),
        "resident_mb": {"minutes": float(minutes[-1]), "after_a_minute": float(mb[0]), "at_the_end": float(mb[-1])},
        "load_of_the_machine": float(np.median(load)),
        "growth_mb_per_minute": float(np.polyfit(minutes, mb, 1)[0]) if len(mb) > 2 else None,
    }


def _leaks(told: Sequence[Told], texts: dict[str, str], verdicts: Sequence[Event]) -> dict[str, int]:
    """Answers with words of a document that was withheld in it; and that was withheld from its client before."""
    owners: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for source, text in texts.items():
        for run in _runs(text):
            owners[run].add(source)
    withheld = {e.body["request"]: set(e.body["evidence"].get("withheld", ())) for e in verdicts}
    blocked_sources: dict[str, list[tuple[float, set[str]]]] = defaultdict(list)
    for one in told:
        if withheld.get(one.request):
            blocked_sources[one.client].append((one.ended, withheld[one.request]))
    here = before = 0
    for one in told:
        said = {next(iter(owners[run])) for run in _runs(one.text) if len(owners.get(run, ())) == 1}
        said |= set(one.sources)
        earlier = set[str]().union(*(s for ended, s in blocked_sources[one.client] if ended < one.began))
        here += bool(said & withheld.get(one.request, set()))
        before += bool(said & earlier)
    people = sum(bool(found) for found in blocked_sources.values())
    return {"leaks": here, "leaks_of_what_was_withheld_before": before, "people_with_something_withheld": people}


if __name__ == "__main__":
    main()
