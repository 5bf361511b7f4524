"""The systems that a red-team campaign attacks, wired the same way by whoever runs it and by the workers that help.

A worker is told the configuration, in which secrets are the names of environment variables, and everything that the lab
has made: the index without the non-members, the calibration, who is a candidate. On the machine of whoever runs the
campaign it opens the lab's files; elsewhere it is sent them, and keeps its copies in a folder of its own for as long as
it lives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from casemate import registry
from casemate.app import Embedding, build
from casemate.backends.sqlite import SqliteIndex
from casemate.config import Config, Part
from casemate.errors import ConfigError
from casemate.guard import Guard
from casemate.lab.box import CachedEmbedder, CachedGenerator
from casemate.lab.datasets import Split, Stored
from casemate.lab.errands import Brought, Errand, Replies, Send
from casemate.lab.experiment import Experiment, Plan
from casemate.lab.judge import OFF, ON
from casemate.lab.ledger import Ledger
from casemate.protocols import Embedder, Index, MembershipAttack, Target
from casemate.rag import Rag
from casemate.spread import Shared, Spread, Stopped

INDEX = "index.db"


@dataclass(frozen=True, slots=True)
class Systems:
    """What is attacked.

    Attributes:
        config: The owner's.
        folder: Where relative paths of the configuration start.
        rag: The bare system over the lab's index.
        fitted: The lab's calibration; None: no defense needs one.
    """

    config: Config
    folder: Path
    rag: Rag
    fitted: Path | None

    def guard(self, over: Index) -> Guard:
        """A guard without a past over an index."""
        parts: dict[Any, Any] = {Embedder: self.rag.embedder, Index: over}
        section = self.config.guard
        defenses = [build("defense", _in_lab(p, self.fitted), self.folder, parts) for p in section.defenses]
        bare = Rag(self.rag.embedder, over, self.rag.generator, self.rag.instructions)
        return Guard(bare, defenses, on_error=section.on_error)

    def targets(self) -> dict[str, Target]:
        """Guard off and guard on."""
        return {OFF: self.rag, ON: self.guard(self.rag.index)}


def _in_lab(part: Part, fitted: Path | None) -> Part:
    """A defense as configured, but with the lab's calibration."""
    fields = {f.name for f in dataclasses.fields(registry.load("defense", part.use))}
    if fitted is None or "calibration" not in fields:
        return part
    return Part.model_validate({"use": part.use, **part.options, "calibration": fitted.absolute()})


@dataclass(frozen=True, slots=True)
class Orders:
    """What every worker of a campaign is told.

    Attributes:
        config: The owner's, and the folder in which its relative paths start.
        embedding: Makes the worker's embedder.
        split: Who is a candidate.
        held: What the lab's index holds of the members.
        plan: How the campaign is run.
        reader: The label of who writes the answers.
        instructions: What he is told to do.
        fitted: The lab's calibration file; None: there is none.
        place: The lab's index, on the machine of whoever runs the campaign.
        files: Contents of both, for other machines; None: all workers are on that machine.
    """

    config: tuple[Config, Path]
    embedding: Embedding
    split: Split
    held: Mapping[str, Stored]
    plan: Plan
    reader: str
    instructions: str
    fitted: Path | None
    place: Path
    files: Mapping[str, bytes] | None


@dataclass(frozen=True)
class Crew:
    """Runs one errand on a worker.

    Attributes:
        orders: Pickled here, not by the cluster: what a worker lacks for them is then said in our words.
    """

    orders: Shared[bytes]

    def __call__(self, errand: Errand) -> Brought:
        """See ``Experiment.errand``."""
        return _ready(self.orders).run(errand)


def crew(spread: Spread, orders: Orders, counted: CachedGenerator) -> Send:
    """Sends a campaign's errands to workers; what their models wrote counts as that of this generator."""
    shared = spread.share(pickle.dumps(orders))

    def send(errands: Iterable[Errand], stopped: Stopped) -> Iterator[Brought]:
        for brought in spread.map(Crew(shared), errands, stopped):
            counted.calls += len(brought.replies)
            counted.hits += brought.cached
            yield brought

    return send


def files_of(index: Path, fitted: Path | None) -> dict[str, bytes]:
    """The lab's index as of now, whole, and the calibration."""
    with tempfile.TemporaryDirectory() as folder, closing(sqlite3.connect(index)) as db:
        with closing(sqlite3.connect(Path(folder) / INDEX)) as copy:
            db.backup(copy)
        found = {INDEX: (Path(folder) / INDEX).read_bytes()}
    return found | ({fitted.name: fitted.read_bytes()} if fitted else {})


class _Worker:
    """The systems of one worker, which live as long as its process."""

    def __init__(self, orders: Orders) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="casemate-crew-", ignore_cleanup_errors=True)
        self._runner = asyncio.Runner()  # one loop for all errands: connections of a generator belong to it
        self._replies = Replies()
        config, folder = orders.config
        place, fitted = self._files(orders)
        reader = config.rag.generator if config.redteam.reader.use == "own" else config.redteam.reader
        self._written = CachedGenerator(build("generator", reader, folder), self._replies, orders.reader)
        rag = Rag(CachedEmbedder(orders.embedding.embedder), SqliteIndex(place), self._written, orders.instructions)
        systems = Systems(config, folder, rag, fitted)
        attacks: dict[str, MembershipAttack] = {p.use: build("attack", p, folder) for p in config.redteam.attacks}
        unused = Ledger(Path(self._folder.name) / "ledger.db")
        self._experiment = Experiment(attacks, orders.split, systems.targets(), unused, orders.held, orders.plan)

    def run(self, errand: Errand) -> Brought:
        """One errand, with what models wrote for it."""
        before = self._written.hits
        brought = self._runner.run(self._experiment.errand(errand))
        brought.replies, brought.cached = self._replies.take(), self._written.hits - before
        return brought

    def _files(self, orders: Orders) -> tuple[Path, Path | None]:
        if orders.files is None:
            return orders.place, orders.fitted
        own = Path(self._folder.name)
        for name, content in orders.files.items():
            (own / name).write_bytes(content)
        return own / INDEX, own / orders.fitted.name if orders.fitted else None


@lru_cache(maxsize=1)
def _ready(shared: Shared[bytes]) -> _Worker:
    """The worker's systems, made for its first errand."""
    try:
        orders: Orders = pickle.loads(shared.get())
    except KeyError as error:
        raise ConfigError(f"the environment of a worker lacks {error}, which the configuration names") from error
    return _Worker(orders)
