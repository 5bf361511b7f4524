"""Kills at random times while something is written; afterwards, everything acknowledged must be there, in its version.

    python -m benchmarks.crashes [KILLS [OPERATION ...]]

Each operation gets KILLS (default 1,000) in all; a run continues where the last one ended, and writes after each block
of ``BLOCK`` kills. A forked process works and tells each step before it begins and after it is acknowledged. It gets
SIGKILL after a random time. Then another process opens the same files. ``during``: kills while a step was in progress.

``change``: add, replace and remove sources of the SQLite index. ``index``: ingest of a folder whose files change.
``attach``: changes of an attached collection. ``events``: the event store, to which gateway and watch write.
``campaign``: trials of a campaign.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from benchmarks import ROOT, SEED, save
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.guard import Guard
from casemate.maths.stats import clopper_pearson
from casemate.rag import ingest
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest
from casemate.rag.pipeline import Rag
from casemate.redteam.lab.results import Trial
from casemate.redteam.lab.store import CampaignStore
from casemate.types import Document, Event, Vector
from tests.fakes import BagOfWords, Parrot
from tests.unit.folder_collection import FolderCollection

KILLS, BLOCK, DIM, SOURCES = 1000, 25, 16, 12
Tell: TypeAlias = Callable[[str], None]
Told: TypeAlias = list[str]
"""Lines ``begin WHAT VERSION`` and ``done WHAT VERSION`` of all processes so far."""


def main() -> None:
    """Runs the operations, and adds to what was counted before."""
    kills = int(sys.argv[1]) if sys.argv[1:] else KILLS
    file = ROOT / "benchmarks/results/crashes.json"
    results: dict[str, Any] = json.loads(file.read_text())["results"] if file.exists() else {}
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
    """Whether a process was killed after this time, and what it told."""
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
    """Writes a line at once: it must not be lost with the process."""
    os.write(pipe, f"{line}\n".encode())


def versions(told: Told) -> dict[str, set[str]]:
    """The versions that each thing may have: the last one acknowledged, and those begun since."""
    allowed: dict[str, set[str]] = {}
    for line in told:
        state, what, version = line.split()
        allowed[what] = {version} if state == "done" else allowed.get(what, {"0"}) | {version}
    return allowed


def differences(allowed: dict[str, set[str]], held: dict[str, str]) -> list[str]:
    """Things that have no allowed version; version 0 is absence."""
    names = allowed.keys() | held.keys()
    return [
        f"{name} has version {held.get(name, '0')}, allowed: {sorted(allowed.get(name, {'0'}))}"
        for name in sorted(names)
        if held.get(name, "0") not in allowed.get(name, {"0"})
    ]


class Operation:
    """Something that is killed.

    Attributes:
        name: Its name in the results.
        seconds: Longest time before the first kill; it follows the time that the work takes.
        folder: Its files.
        rng: Source of randomness; a child continues with a copy.
    """

    name: ClassVar[str]
    seconds: ClassVar[float] = 0.1

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng, self.version = folder, rng, 0

    def before(self) -> None:
        """Prepares the next process."""
        self.version += 1

    def work(self, tell: Tell) -> None:
        """Works in a process of its own."""
        raise NotImplementedError

    def verify(self, told: Told) -> list[str]:
        """Faults of the files, one sentence each."""
        raise NotImplementedError


class Change(Operation):
    """Sources of the SQLite index."""

    name = "change"

    @contextmanager
    def index(self) -> Iterator[SqliteIndex | AttachedIndex]:
        """The index, open."""
        with closing(SqliteIndex(self.folder / "index.db")) as index:
            index.open("crashes", DIM)
            yield index

    def work(self, tell: Tell) -> None:
        """Adds, replaces and removes."""
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
        """Compares with what was acknowledged, and checks moments, vectors and checksums."""
        with self.index() as index:
            held: dict[str, set[str]] = {}
            for documents, _ in index.scan():
                for d in documents:
                    held.setdefault(d.source, set()).add(d.text.split()[0])
            mixed = [f"{source} has parts of {sorted(found)}" for source, found in held.items() if len(found) > 1]
            single = {source: next(iter(found)) for source, found in held.items()}
            return [*index.check(), *mixed, *differences(versions(told), single)]


class Attach(Change):
    """Sources of an attached collection."""

    name = "attach"

    @contextmanager
    def index(self) -> Iterator[SqliteIndex | AttachedIndex]:
        """The index, open."""
        collection = FolderCollection(self.folder / "collection", DIM)
        with closing(AttachedIndex(collection, self.folder / "attached.db", source_pattern="^(.*)#")) as index:
            index.open("crashes", DIM)
            if not index.summary():
                index.attach()
            yield index


class Index(Operation):
    """Ingest of a folder of which some files change before each run."""

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
        """The index, open."""
        with closing(SqliteIndex(self.folder / "index.db")) as index:
            index.open(BagOfWords(DIM).fingerprint, DIM)
            yield index

    def work(self, tell: Tell) -> None:
        """Ingests what has changed."""
        ingest.BATCH_CHUNKS = 8
        with self.index() as index:
            work = self._ingest(index)
            tell(f"begin corpus {self.version}")
            asyncio.run(work.run(work.plan()))
            tell(f"done corpus {self.version}")

    def verify(self, told: Told) -> list[str]:
        """Each file is complete in one version; if the run was acknowledged, in the newest."""
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
    """Events, each of which is acknowledged once it is on disk."""

    name = "events"

    def work(self, tell: Tell) -> None:
        """Appends and waits."""
        with closing(SqlEventStore(path=self.folder / "events.db")) as store:
            for number in range(20):
                what = f"e{self.version}.{number}"
                tell(f"begin {what} 1")
                store.append(Event(uuid.uuid4().hex, datetime.now(UTC), "crash", {"what": what, "text": "x" * 500}))
                if store.flush():
                    tell(f"done {what} 1")

    def verify(self, told: Told) -> list[str]:
        """Every acknowledged event is there, once."""
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
        """Every acknowledged trial is there."""
        with closing(CampaignStore(self.folder / "campaigns.db")) as store:
            return differences(versions(told), dict.fromkeys(store.trials("c", "off"), "1"))


def unit(rng: random.Random, count: int) -> Vector:
    """Random vectors of unit length."""
    E = np.random.default_rng(rng.randrange(2**32)).standard_normal((count, DIM))
    vectors: Vector = (E / np.linalg.norm(E, axis=1, keepdims=True)).astype(np.float32)
    return vectors


OPERATIONS: tuple[type[Operation], ...] = (Change, Index, Attach, Events, Campaign)

if __name__ == "__main__":
    main()
