"""Kills processes at random times during writes. Afterwards every acknowledged write must be present in its version.

    python -m benchmarks.crashes [KILLS [OPERATION ...]]

Each operation gets KILLS kills (default 1,000). A run resumes the previous one, and saves after each ``BLOCK`` kills. A
forked process reports each step before it begins and after it is acknowledged. It receives SIGKILL after a random time.
Then another process opens the same files. ``during``: kills while a step was in progress.

- ``change``: add, replace and remove sources of the SQLite index.
- ``index``: ingest of a folder whose files change.
- ``attach``: changes of an attached collection.
- ``events``: the event store alone.
- ``campaign``: trials of a campaign.
- ``watch``: canary runs, while the clock of each process jumps by up to three slots, forwards or backwards.
- ``gateway``: a running server whose clients change documents, ask, and revoke keys. No answer may name the withheld
  document.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import httpx
import numpy as np

from benchmarks import SEED, save, saved
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.guard.guard import Guard
from casemate.maths.stats import clopper_pearson
from casemate.monitor.alerts.alert import ALERT_KIND
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, base_run_id
from casemate.monitor.scheduler.schedule import RUN_KIND, SLOT_KIND
from casemate.monitor.scheduler.watch import WatchSettings, watch
from casemate.monitor.trends.cusum import AlarmLimits, WatchedCanary, WatchedSet
from casemate.monitor.trends.sequential_tests import FlakeCounts
from casemate.protocols import Defense, EventStore
from casemate.rag import ingest
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.results import Trial
from casemate.redteam.lab.store import CampaignStore
from casemate.types import Document, Event, Vector
from tests.fakes import BagOfWords, Parrot, documents
from tests.gateways import HideNamed, chat, make, serving
from tests.unit.folder_collection import FolderCollection

KILLS, BLOCK, DIM, SOURCES = 1000, 25, 16, 12
Tell: TypeAlias = Callable[[str], None]
Told: TypeAlias = list[str]
"""Lines ``begin NAME VERSION`` and ``done NAME VERSION`` of all processes so far."""


def main() -> None:
    """Runs the operations, and adds the counts to earlier ones."""
    kills = int(sys.argv[1]) if sys.argv[1:] else KILLS
    results = saved("crashes")
    for operation in OPERATIONS:
        name = operation.name
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        found = results.setdefault(name, {"kills": 0, "during": 0, "finished": 0, "steps": 0, "faults": []})
        while found["kills"] < kills:
            with tempfile.TemporaryDirectory() as folder:
                block(operation(Path(folder), random.Random(f"{SEED} {name} {found['kills']}")), found)
            found["fault_rate_95"] = list(clopper_pearson(len(found["faults"]), found["kills"]))
            save("crashes", results)


def block(operation: Operation, found: dict[str, Any]) -> None:
    """Kills ``BLOCK`` processes that work on the same files."""
    told, seconds, killed = Told(), operation.seconds, 0
    while killed < BLOCK:
        operation.before()
        was_killed, lines = run(operation, operation.rng.uniform(0, seconds))
        if not was_killed:
            seconds *= 0.7
            found["finished"] += 1
        else:
            seconds *= 1.03
        told += lines
        killed += was_killed
        found["steps"] += sum(line.startswith("done") for line in lines)
        found["during"] += was_killed and bool(lines) and lines[-1].startswith("begin")
        found["faults"] += [f"after kill {found['kills'] + killed}: {fault}" for fault in operation.verify(told)]
    found["kills"] += killed


def run(operation: Operation, seconds: float) -> tuple[bool, Told]:
    """Kills a process after some seconds. Returns whether the kill ended it, and the lines it reported."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            operation.work(partial(tell_parent, writing))
        finally:
            os._exit(0)
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    with open(reading) as lines:
        return os.WIFSIGNALED(status), lines.read().splitlines()


def tell_parent(pipe: int, line: str) -> None:
    """Writes a line immediately, so that it survives the process."""
    os.write(pipe, f"{line}\n".encode())


def versions(told: Told) -> dict[str, set[str]]:
    """Allowed versions of each name: the last acknowledged one, and those begun since."""
    allowed: dict[str, set[str]] = {}
    for line in told:
        state, what, version = line.split()
        allowed[what] = {version} if state == "done" else allowed.get(what, {"0"}) | {version}
    return allowed


def differences(allowed: dict[str, set[str]], held: dict[str, str]) -> list[str]:
    """Names without an allowed version; version 0 means absent."""
    names = allowed.keys() | held.keys()
    return [
        f"{name} has version {held.get(name, '0')}, allowed: {sorted(allowed.get(name, {'0'}))}"
        for name in sorted(names)
        if held.get(name, "0") not in allowed.get(name, {"0"})
    ]


class Operation:
    """A workload whose process is killed.

    Attributes:
        name: Its name in the results.
        seconds: Maximum time before the first kill, adapted to the duration of the work.
        folder: Its files.
        rng: Random generator; a child process continues with a copy.
    """

    name: ClassVar[str]
    seconds: ClassVar[float] = 0.1

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng, self.version = folder, rng, 0

    def before(self) -> None:
        """Prepares the next process."""
        self.version += 1

    def work(self, tell: Tell) -> None:
        """Runs in a forked process."""
        raise NotImplementedError

    def verify(self, told: Told) -> list[str]:
        """Returns faults of the files, one sentence each."""
        raise NotImplementedError


class Change(Operation):
    """Changes of sources in the SQLite index."""

    name = "change"

    embedder: ClassVar[tuple[str, int]] = ("crashes", DIM)

    @contextmanager
    def index(self) -> Iterator[SqliteIndex | AttachedIndex]:
        """The open index."""
        with closing(SqliteIndex(self.folder / "index.db")) as index:
            index.open(*self.embedder)
            yield index

    def work(self, tell: Tell) -> None:
        """Adds, replaces and removes sources."""
        rng = random.Random(f"{self.version} {self.rng.random()}")
        with self.index() as index:
            for number in range(8):
                source = f"s{rng.randrange(SOURCES)}"
                version = "0" if rng.random() < 0.25 else f"{self.version}.{number}"
                tell(f"begin {source} {version}")
                if version == "0":
                    index.remove([source])
                else:
                    count = rng.randrange(1, 6)
                    text = f"{version} " * 100
                    documents = [Document(f"{source}#{i}", text, source=source, digest=version) for i in range(count)]
                    index.add(documents, unit(rng, count))
                tell(f"done {source} {version}")

    def verify(self, told: Told) -> list[str]:
        """Compares with the acknowledged changes, and checks moments, vectors and checksums."""
        with self.index() as index:
            held: dict[str, set[str]] = {}
            for documents, _ in index.scan():
                for d in documents:
                    held.setdefault(d.source, set()).add(d.text.split()[0])
            mixed = [f"{source} has parts of {sorted(found)}" for source, found in held.items() if len(found) > 1]
            single = {source: next(iter(found)) for source, found in held.items()}
            return [*index.check(), *mixed, *differences(versions(told), single)]


class Attach(Change):
    """Changes of sources in an attached collection."""

    name = "attach"

    @contextmanager
    def index(self) -> Iterator[SqliteIndex | AttachedIndex]:
        """The open index."""
        collection = FolderCollection(self.folder / "collection", DIM)
        with closing(AttachedIndex(collection, self.folder / "attached.db", source_pattern="^(.*)#")) as index:
            index.open("crashes", DIM)
            if not index.summary():
                index.attach()
            yield index


class Index(Operation):
    """Ingest of a folder; some files change before each run."""

    name = "index"
    seconds = 0.4

    def before(self) -> None:
        """Changes some files."""
        super().before()
        corpus = self.folder / "corpus"
        corpus.mkdir(exist_ok=True)
        for number in range(40) if self.version == 1 else self.rng.sample(range(40), 15):
            (corpus / f"f{number}.txt").write_text(f"{self.version}.{number} garden " * 20)

    def _ingest(self, index: SqliteIndex) -> Ingest:
        return Ingest(Guard(Rag(BagOfWords(DIM), index, Parrot()), []), Corpus(self.folder / "corpus"), 30, 0)

    @contextmanager
    def index(self) -> Iterator[SqliteIndex]:
        """The open index."""
        with closing(SqliteIndex(self.folder / "index.db")) as index:
            index.open(BagOfWords(DIM).fingerprint, DIM)
            yield index

    def work(self, tell: Tell) -> None:
        """Ingests the changed files."""
        ingest.BATCH_CHUNKS = 8
        with self.index() as index:
            work = self._ingest(index)
            tell(f"begin corpus {self.version}")
            asyncio.run(work.run(work.plan()))
            tell(f"done corpus {self.version}")

    def verify(self, told: Told) -> list[str]:
        """Checks that each file is complete in one version, and in the newest one if the run was acknowledged."""
        present = {p.name: p.read_text().split()[0] for p in (self.folder / "corpus").iterdir()}
        found, counts = dict[str, set[str]](), Counter[str]()
        with self.index() as index:
            faults = list(index.check())
            for documents, _ in index.scan():
                for d in documents:
                    found.setdefault(d.source, set()).update(word for word in d.text.split() if word != "garden")
                    counts[d.source] += len(d.text.split())
        faults += [f"{name} has parts of {sorted(held)}" for name, held in found.items() if len(held) > 1]
        faults += [f"{name} has {count} of 40 words" for name, count in counts.items() if count != 40]
        done = bool(told) and told[-1] == f"done corpus {self.version}"
        if done and found != {name: {version} for name, version in present.items()}:
            faults.append("an acknowledged run has not indexed every file in its present version")
        return faults


class Events(Operation):
    """Appends of events, each acknowledged when it is on disk."""

    name = "events"

    def work(self, tell: Tell) -> None:
        """Appends events and waits for each."""
        with closing(SqlEventStore(path=self.folder / "events.db")) as store:
            for number in range(20):
                what = f"e{self.version}.{number}"
                tell(f"begin {what} 1")
                store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "crash", {"what": what, "text": "x" * 500}))
                if store.flush():
                    tell(f"done {what} 1")

    def verify(self, told: Told) -> list[str]:
        """Checks that every acknowledged event is present once."""
        with closing(SqlEventStore(path=self.folder / "events.db")) as store:
            counts = Counter(str(event.body["what"]) for event in store.scan("crash"))
        twice = [f"{what} is there {count} times" for what, count in counts.items() if count > 1]
        return [*twice, *differences(versions(told), dict.fromkeys(counts, "1"))]


class Campaign(Operation):
    """Trials of a campaign."""

    name = "campaign"

    def work(self, tell: Tell) -> None:
        """Records trials."""
        with closing(CampaignStore(self.folder / "campaigns.db")) as store:
            for number in range(20):
                what = f"c{self.version}.{number}"
                tell(f"begin {what} 1")
                store.record_trial("c", "off", Trial(what, True, (0.5,), 1, 0, 0), [])
                tell(f"done {what} 1")

    def verify(self, told: Told) -> list[str]:
        """Checks that every acknowledged trial is present."""
        with closing(CampaignStore(self.folder / "campaigns.db")) as store:
            return differences(versions(told), dict.fromkeys(store.trials("c", "off"), "1"))


class Watch(Operation):
    """Canary runs on a clock that is 100 times too fast and jumps once in each process."""

    name = "watch"
    seconds = 1.0
    interval, canaries = 10, tuple(f"c{i}" for i in range(4))

    def __init__(self, folder: Path, rng: random.Random) -> None:
        super().__init__(folder, rng)
        self.began = time.time()

    def work(self, tell: Tell) -> None:
        """Runs the watch for 1.5 seconds."""
        rng = random.Random(f"{self.version} {self.rng.random()}")
        jump_at, jump = time.time() + rng.uniform(0, 1), rng.uniform(-3, 3) * self.interval

        def clock() -> float:
            now = time.time()
            return self.began + 100 * (now - self.began) + jump * (now > jump_at)

        async def ask(run: str, asked: Any, on_result: Callable[[CanaryResult], None]) -> None:
            tell(f"begin {base_run_id(run)} 1")
            for canary in asked:
                await asyncio.sleep(0.005)
                status = CanaryStatus.FAIL if canary == "c0" else CanaryStatus.PASS
                on_result(CanaryResult(canary, run, datetime.fromtimestamp(clock(), UTC), status))

        canaries = tuple(WatchedCanary(name, flakes=FlakeCounts(50, 0)) for name in self.canaries)
        settings = WatchSettings(
            AlarmLimits(max_repeats=1),
            lease_s=0.2,
            pause_s=0,
            clock=clock,
            sleep=lambda seconds: asyncio.sleep(seconds / 100),
        )
        watched = WatchedSet("crashes", canaries, self.interval)
        with closing(SqlEventStore(path=self.folder / "events.db")) as store, suppress(TimeoutError):
            watching = watch(watched, ask, store, settings=settings, on_run=lambda a: tell(f"done {a.run} 1"))
            asyncio.run(asyncio.wait_for(watching, 1.5))

    def verify(self, told: Told) -> list[str]:
        """Checks that each acknowledged run is present with each canary once, and that no slot is unaccounted for."""
        with closing(SqlEventStore(path=self.folder / "events.db")) as store:
            runs, slots = store.scan(RUN_KIND), store.scan(SLOT_KIND)
            results = Counter((str(e.body["run"]), str(e.body["canary"])) for e in store.scan("canary"))
            opened = [e for e in store.scan(ALERT_KIND) if e.body["phase"] == "opened"]
        finished = {str(event.body["run"]): "1" for event in runs}
        faults = differences(versions(told), finished)
        faults += [f"{run} has {canary} {count} times" for (run, canary), count in results.items() if count > 1]
        faults += [f"{run} lacks {canary}" for run in finished for canary in self.canaries if not results[run, canary]]
        covered = Counter[int]()
        for body in (event.body for event in slots):
            first, last = (body["slot"],) * 2 if body["state"] == "begun" else (body["first"], body["last"])
            covered.update(range(int(first), int(last) + 1, self.interval))
        every = range(min(covered, default=0), max(covered, default=0), self.interval)
        faults += [f"slot {slot} is accounted for {covered[slot]} times" for slot in every if covered[slot] != 1]
        return faults + [f"{len(opened)} alerts were opened for one lasting failure"] * (len(opened) > 1)


class Served(Change):
    """A running gateway whose clients change documents, ask, and revoke keys.

    No answer may name a withheld document.
    """

    name = "gateway"
    seconds = 1.5
    embedder = (BagOfWords.fingerprint, 256)
    defenses: ClassVar[tuple[Defense, ...]] = (HideNamed("d3"),)

    def before(self) -> None:
        """Prepares documents and keys for the first process."""
        super().before()
        if self.version == 1:
            with make(self.folder, count=SOURCES) as app:
                keys = ApiKeyStore(app.store)
                self.keys = [str(keys.create(Grant(role, role, trust_user=True))[1]) for role in ("admin", "client")]

    def work(self, tell: Tell) -> None:
        """Runs the server and its client."""
        logging.disable()
        rng = random.Random(f"{self.version} {self.rng.random()}")
        app = make(self.folder, defenses=self.defenses, requests_per_minute=10**6, tokens_per_day=10**9)
        with serving(app) as url, httpx.Client(base_url=url) as http:
            for number in range(12):
                what, version = f"s{rng.randrange(SOURCES)}", f"{self.version}.{number}"
                self._change(http, what, version if rng.random() < 0.75 else "0", tell)
                self._ask(http, f"answer.{version}", tell)
                self._revoke(app.store, version, tell)

    def _change(self, http: httpx.Client, what: str, version: str, tell: Tell) -> None:
        tell(f"begin {what} {version}")
        headers = {"Authorization": f"Bearer {self.keys[0]}"}
        if version == "0":
            answer = http.delete("/v1/documents", params={"source": what}, headers=headers)
        else:
            sent = {"documents": [{"source": what, "text": f"{version} " * 100}]}
            answer = http.post("/v1/documents", json=sent, headers=headers)
        tell(f"done {what} {version}" if answer.status_code in {200, 404} else f"done failed-{answer.status_code} 1")

    def _ask(self, http: httpx.Client, what: str, tell: Tell) -> None:
        tell(f"begin {what} 1")
        headers = {"Authorization": f"Bearer {self.keys[1]}"}
        answer = http.post("/v1/chat/completions", json=chat("only3", user=what), headers=headers)
        tell(f"done {what} 1" if answer.status_code == 200 else f"done failed-{answer.status_code} 1")
        if "d3" in answer.json()["choices"][0]["message"]["content"].split():
            tell("done unguarded-answer 1")

    def _revoke(self, store: EventStore, version: str, tell: Tell) -> None:
        keys = ApiKeyStore(store)
        key = keys.create(Grant(f"key.{version}"))[0]
        tell(f"begin key.{version} revoked")
        keys.revoke(key.id)
        tell(f"done key.{version} revoked")

    def verify(self, told: Told) -> list[str]:
        """Compares documents, verdicts and keys with the acknowledged changes."""
        with closing(SqlEventStore(path=self.folder / "events.db")) as store:
            asked = {str(e.body["client"]).partition("/")[2]: "1" for e in store.scan("verdict")}
            keys = ApiKeyStore(store)
            keys.sync()
            revoked = {k.grant.name: "revoked" for k in keys.all() if k.revoked}
        kinds = ("s", "answer.", "key.")
        by_kind = {k: [line for line in told if line.split()[1].startswith(k)] for k in kinds}
        rest = [line for line in told if not line.split()[1].startswith(kinds)]
        faults = [*differences(versions(by_kind["answer."]), asked), *differences(versions(by_kind["key."]), revoked)]
        kept = [f"done {d.source} {d.text.split()[0]}" for d in documents(SOURCES)]
        return [*super().verify([*kept, *by_kind["s"]]), *faults, *rest]


def unit(rng: random.Random, count: int) -> Vector:
    """Random vectors of unit length."""
    E = np.random.default_rng(rng.randrange(2**32)).standard_normal((count, DIM))
    vectors: Vector = (E / np.linalg.norm(E, axis=1, keepdims=True)).astype(np.float32)
    return vectors


OPERATIONS: tuple[type[Operation], ...] = (Change, Index, Attach, Events, Campaign, Watch, Served)

if __name__ == "__main__":
    main()
