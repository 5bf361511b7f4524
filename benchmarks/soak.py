"""Ten minutes of mixed load on a system whose processes are killed: lost writes, leaks, and memory growth.

    python -m benchmarks.soak [sqlite|postgres [SECONDS]]

The real components (MiniLM, calibrated Mirabel) over the fictional clinic: one gateway over SQLite, or two over one
Postgres with pgvector, as separate processes. Users request whole answers and streams; some disconnect in the middle or
read slowly. Other clients retrieve, add and remove documents, create and revoke keys, and index a folder into another
tenant. In the first part of the time, a gateway, a parser process or the Postgres server receives SIGKILL in turn and
is restarted. The rest measures the memory of the gateways.

Checks at the end:

- Every acknowledged POST or DELETE of a document has its effect.
- Every file that was reported as indexed has that version or a later one.
- Every printed key exists; acknowledged revocations are effective.
- Every complete answer has its verdicts in the store.
- No answer contains words that only a withheld document contains: withheld from this answer, or from its client before.
- The memory of the gateways does not grow.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np

from benchmarks import SEED, save, saved
from benchmarks.crashes import differences, versions
from benchmarks.gateway import prepare, raw, resident_kb, verbatim
from benchmarks.killable import TENANT, Killable, postgres, sections
from casemate.app import open_app
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.demo import clinic
from casemate.errors import BackendError
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.system import App
from casemate.types import DEFAULT_TENANT, Event, Secret

SECONDS, KILLS = 600.0, 6
"""Duration in seconds, and kills of each kind of process."""
KILLING_SHARE = 0.75
"""Share of the time in which processes are killed."""
RUN = 6
"""Words of a run that identifies a document."""
PEOPLE = 60
Sample: TypeAlias = tuple[float, float, float]
"""Minutes since the process began to serve, resident MB, and load of the machine."""
Work: TypeAlias = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]


@dataclass
class Told:
    """An answer, complete or up to a disconnection."""

    request: str
    client: str
    began: float
    ended: float
    text: str
    whole: bool = True
    sources: Sequence[str] = ()


@dataclass
class Soak:
    """The load, and the acknowledged writes."""

    system: Killable
    questions: list[str]
    keys: dict[str, str]
    told: list[Told] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    made: dict[str, bool] = field(default_factory=dict)  # key -> whether its revocation was acknowledged
    counts: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def loop(self, work: Work, role: str, number: int) -> None:
        """Repeats a request at random gateways, through kills."""
        rng = random.Random(SEED * 1000 + number)
        headers = {"Authorization": f"Bearer {self.keys[role]}"}
        while True:
            url = rng.choice(self.system.urls)
            try:
                async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
                    await self._some_times(work, http, rng)
            except (httpx.TransportError, BackendError) as error:
                self.counts["connections broken" if isinstance(error, httpx.HTTPError) else "store not reached"] += 1
                await asyncio.sleep(0.2)

    async def _some_times(self, work: Work, http: httpx.AsyncClient, rng: random.Random) -> None:
        for _ in range(20):
            await work(http, rng)
            self.counts[work.__name__] += 1

    def _asked(self, rng: random.Random) -> dict[str, Any]:
        person = f"person-{rng.randrange(PEOPLE)}"
        message = {"role": "user", "content": rng.choice(self.questions)}
        return {"model": "casemate", "messages": [message], "user": person}

    async def ask(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Requests a whole answer."""
        body, began = self._asked(rng), time.time()
        answer = await http.post("/v1/chat/completions", json=body)
        if await self._refused(answer):
            return
        text = answer.json()["choices"][0]["message"]["content"]
        self.told.append(Told(answer.headers["x-request-id"], body["user"], began, time.time(), text))

    async def stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Requests a stream, and reads it fast, slowly, or in part."""
        body, began, how = self._asked(rng) | {"stream": True}, time.time(), rng.random()
        pieces, whole = list[str](), False
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if await self._refused(answer):
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
        """Retrieves documents."""
        asked, began = self._asked(rng), time.time()
        body = {"question": asked["messages"][0]["content"], "user": asked["user"]}
        answer = await http.post("/v1/retrieve", json=body)
        if not await self._refused(answer):
            found = answer.json()["data"]
            text, sources = "\n".join(d["text"] for d in found), [d["source"] for d in found]
            request = answer.headers["x-request-id"]
            self.told.append(Told(request, body["user"], began, time.time(), text, sources=sources))
        await asyncio.sleep(0.1)

    async def write(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Adds a document.

        Removes an old one above 20 documents, because the calibration is for a certain corpus size.
        """
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
        """Creates, uses and revokes a key, and checks that it is refused."""
        with closing(await asyncio.to_thread(self._open_store)) as store:
            held = ApiKeyStore(store)
            key, secret = await asyncio.to_thread(held.create, Grant("passing"))
            self.made[key.id] = False
            await asyncio.sleep(5)  # gateways read new keys every two seconds
            mine = {"Authorization": f"Bearer {secret}"}
            self.counts[f"with a new key {(await http.get('/v1/models', headers=mine)).status_code}"] += 1
            await asyncio.to_thread(held.revoke, key.id)
            self.made[key.id] = True
            self.counts[f"with a revoked key {(await http.get('/v1/models', headers=mine)).status_code}"] += 1
        await asyncio.sleep(rng.uniform(1, 10))

    def _open_store(self) -> SqlEventStore:
        if self.system.database:
            return SqlEventStore(Secret(self.system.database.url))
        return SqlEventStore(path=self.system.folder / "events.db")

    async def _refused(self, answer: httpx.Response) -> bool:
        if answer.status_code == 200:
            return False
        self.counts[f"status {answer.status_code}"] += 1
        await asyncio.sleep(0.2)
        return True


async def _slowly(answer: httpx.Response, pause_s: float) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        yield line
        if pause_s:
            await asyncio.sleep(pause_s)


def main() -> None:
    """Measures one system, or both, and adds the results to earlier ones."""
    names = sys.argv[1:2] or ["sqlite", "postgres"]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    results = saved("soak")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="casemate-soak-") as folder:
            shared = name == "postgres"
            with postgres(Path(folder) / "pg") if shared else nullcontext() as database:
                system = Killable(Path(folder), 2 if shared else 1, sections() if shared else {}, database)
                results[name] = {"seconds": seconds} | _soaked(system, seconds)
        save("soak", results)


def _soaked(system: Killable, seconds: float) -> dict[str, Any]:
    members, others = prepare(system.folder, **system.sections)
    with open_app(raw(system.folder, **system.sections)) as app:
        held = ApiKeyStore(app.store)
        keys = {
            "client": str(held.create(Grant("people", trust_user=True, retrieve=True))[1]),
            "admin": str(held.create(Grant("writer", "admin"))[1]),
        }
        texts = _texts(app)
    questions = [*clinic.BENIGN_QUESTIONS, *map(verbatim, members[:25]), *map(verbatim, others[:25])]
    soak = Soak(system, questions, keys)
    resident = asyncio.run(_run(soak, seconds))
    return _judged(soak, texts, resident)


async def _run(soak: Soak, seconds: float) -> list[Sample]:
    """Runs the load with the kills. Returns the memory of the first gateway after the kills."""
    system, rng = soak.system, random.Random(SEED)
    kinds = ["gateway", "parser", "database"] if system.database else ["gateway", "parser"]
    await system.start()
    began, tasks = time.monotonic(), _begun(soak)
    try:
        for number in range(KILLS * len(kinds)):
            at = began + seconds * KILLING_SHARE * (number + rng.random()) / (KILLS * len(kinds))
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            _raise_failures(tasks)
            await system.kill(kinds[number % len(kinds)], rng)
        return await _watched(system.processes[0], began + seconds, tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await system.stop()


async def _watched(process: int, until: float, tasks: Sequence[asyncio.Task[None]]) -> list[Sample]:
    found, began = list[Sample](), time.monotonic()
    while not found or time.monotonic() < until:
        await asyncio.sleep(1.0)
        spent = (time.monotonic() - began) / 60
        found.append((spent, resident_kb(process) / 1024, os.getloadavg()[0]))
        _raise_failures(tasks)
    return found


def _raise_failures(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def _begun(soak: Soak) -> list[asyncio.Task[None]]:
    works = [soak.ask] * 4 + [soak.stream] * 6 + [soak.retrieve] * 2
    tasks = [asyncio.create_task(soak.loop(work, "client", n)) for n, work in enumerate(works)]
    tasks += [asyncio.create_task(soak.loop(work, "admin", 100)) for work in (soak.write, soak.issue)]
    return [*tasks, asyncio.create_task(soak.system.index_again_and_again(random.Random(SEED)))]


def _texts(app: App, tenant: str = DEFAULT_TENANT) -> dict[str, str]:
    held: dict[str, str] = defaultdict(str)
    for documents, _ in app.index.scan(tenant):
        for document in documents:
            held[document.source] += " " + document.content
    return held


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[i:] for i in range(RUN)), strict=False))


def _judged(soak: Soak, texts: dict[str, str], resident: Sequence[Sample]) -> dict[str, Any]:
    """Lost writes, leaks and memory growth."""
    with open_app(raw(soak.system.folder, **soak.system.sections)) as app:
        held = set(_texts(app))
        files = {name: re.findall(r"version (\d+)", text) for name, text in _texts(app, TENANT).items()}
        unsound = app.index.check()
        keys = ApiKeyStore(app.store)
        keys.sync()
        known = {key.id: key.revoked is not None for key in keys.all()}
        verdicts = app.store.scan("verdict")
    noted = {event.body["request"] for event in verdicts}
    minutes, mb, load = np.array([x for x in resident if x[0] > 1.0] or resident).T
    new = {source for source in held if source.startswith("new-")}
    return {
        "gateways": soak.system.gateways,
        "did": dict(soak.counts + soak.system.counts),
        "answers": len(soak.told),
        "of_them_to_their_end": sum(told.whole for told in soak.told),
        "flagged": sum(event.body["flagged"] for event in verdicts),
        "failed": sum("error" in event.body["evidence"] for event in verdicts),
        "documents": {"added": len(soak.gone) + len(soak.kept), "removed": len(soak.gone), "unsure": len(soak.unsure)},
        "documents_lost": len(soak.kept - soak.unsure - held),
        "documents_back_again": len(held & soak.gone),
        "documents_unexplained": len(new - soak.kept - soak.unsure - soak.gone),
        "index_unsound": list(unsound),
        "files_acknowledged": sum(line.startswith("done") for line in soak.system.told),
        "files_lost": differences(versions(soak.system.told), {name: "+".join(found) for name, found in files.items()}),
        "keys_made": len(soak.made),
        "keys_lost": len(soak.made.keys() - known.keys()),
        "revoked_keys_accepted": soak.counts["with a revoked key 200"],
        "revocations_lost": sum(done and not known.get(key, False) for key, done in soak.made.items()),
        "answers_without_verdict": sum(told.whole and told.request not in noted for told in soak.told),
        **_leaks(soak.told, texts, verdicts),
        "resident_mb": {"minutes": float(minutes[-1]), "after_a_minute": float(mb[0]), "at_the_end": float(mb[-1])},
        "load_of_the_machine": float(np.median(load)),
        "growth_mb_per_minute": float(np.polyfit(minutes, mb, 1)[0]) if len(mb) > 2 else None,
    }


def _leaks(told: Sequence[Told], texts: dict[str, str], verdicts: Sequence[Event]) -> dict[str, int]:
    """Answers with words of a document that was withheld from them, or earlier from their client."""
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
