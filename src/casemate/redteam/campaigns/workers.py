"""The attacked systems, wired alike in this process and on the workers of a cluster.

A worker receives the configuration, in which secrets are names of environment variables, and everything that the lab
has built: the index without the non-members, the calibration, the split. On this machine it opens the lab's files; on
others it receives them, and keeps copies in a temporary folder for its lifetime.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from casemate import plugins
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.config import Config, PluginSpec
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.guard import Guard
from casemate.plugins import build
from casemate.protocols import CalibratedDefense, Embedder, EventStore, Index, Target
from casemate.rag.pipeline import Rag
from casemate.redteam.campaigns.membership import build_attacks
from casemate.redteam.campaigns.pipeline import INDEX
from casemate.redteam.lab.caching import CachedGenerator, ReplyBuffer
from casemate.redteam.lab.datasets import IndexedSource, Split
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan, RunOnWorkers, WorkItem, WorkResult
from casemate.redteam.lab.judge import OFF, ON
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.runtime.executor import Executor, Shared, Stopped
from casemate.system import EmbeddingTask, audience_policy
from casemate.types import Event, QuotaGrant, QuotaRequest


@dataclass(frozen=True, slots=True)
class TargetFactory:
    """Builds the attacked systems over the bare one, with the lab's calibrations; None: the configured ones."""

    config: Config
    folder: Path
    rag: Rag
    calibrations: Path | None

    def guard(self, index: Index | None = None) -> Guard:
        """A guard without client state, over the attacked or another index. Only ``quorum`` has a store."""
        index = index or self.rag.index
        bare = Rag(self.rag.embedder, index, self.rag.generator, self.rag.instructions)
        injected: dict[Any, Any] = {Embedder: bare.embedder, Index: index}
        section = self.config.guard
        defenses = []
        for part in section.defenses:
            parts = injected | ({EventStore: _BudgetsInMemory()} if plugins.load("defense", part.use) is Quorum else {})
            defenses.append(build("defense", self._calibrated(part), self.folder, parts))
        return Guard(bare, defenses, on_error=section.on_error, audience=audience_policy(section, self.folder))

    def targets(self) -> dict[str, Target]:
        """The bare system and a new guard."""
        return {OFF: self.rag, ON: self.guard()}

    def _calibrated(self, part: PluginSpec) -> PluginSpec:
        """A defense with the lab's calibration, if it uses one."""
        if self.calibrations is None or not issubclass(plugins.load("defense", part.use), CalibratedDefense):
            return part
        file = self.calibrations.absolute() / f"{part.use}.json"
        return PluginSpec.model_validate({"use": part.use, **part.options, "calibration": file})


class _BudgetsInMemory(EventStore):
    """Budgets of units for a guard of the lab, so that attacks use up none of the operator's. Safe for threads.

    Quotas have one period and start unused. Events are dropped.
    """

    def __init__(self) -> None:
        self._used: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def append(self, event: Event) -> None:
        """Drops the event."""

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        return ()

    def flush(self, timeout_s: float = 10.0) -> bool:
        return True

    def lease(self, name: str, holder: str, seconds: float) -> bool:
        return False

    def release(self, name: str, holder: str) -> None:
        """See ``EventStore``. There are no leases."""

    def close(self) -> None:
        """See ``EventStore``. There is nothing to close."""

    def acquire(self, requests: Sequence[QuotaRequest]) -> Sequence[QuotaGrant]:
        """See ``EventStore``. Periods and replenishment are not supported."""
        grants = []
        with self._lock:
            for request in requests:
                granted = max(0, min(request.amount, int(request.most) - self._used[request.name]))
                self._used[request.name] += granted
                grants.append(QuotaGrant(granted, self._used[request.name]))
        return grants

    def quota_usage(self, prefix: str) -> Mapping[str, float]:
        with self._lock:
            return {name: float(used) for name, used in self._used.items() if name.startswith(prefix)}

    def discard_quotas(self, names: Collection[str]) -> None:
        with self._lock:
            for name in names:
                self._used.pop(name, None)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What every worker of a campaign receives.

    Attributes:
        config: The operator's configuration, and the base of its relative paths.
        reader: Label of the generator that writes the answers.
        calibrations: Folder of the lab's calibrations; None: no defense uses one.
        index: Path of the lab's index on this machine.
        files: Contents of index and calibrations by relative path; None: all workers are on this machine.
    """

    config: tuple[Config, Path]
    embedding: EmbeddingTask
    split: Split
    indexed: Mapping[str, IndexedSource]
    plan: ExperimentPlan
    reader: str
    instructions: str
    calibrations: Path | None
    index: Path
    files: Mapping[str, bytes] | None


@dataclass(frozen=True)
class WorkerTask:
    """Runs a work item on a worker, which has received the ``spec``."""

    spec: Shared[WorkerSpec]

    def __call__(self, item: WorkItem) -> WorkResult:
        """See `Experiment.run_item`."""
        return _worker(self.spec).run(item)


def run_on_cluster(executor: Executor, spec: WorkerSpec, generator: CachedGenerator) -> RunOnWorkers:
    """Runs work items on workers; their model calls are added to those of `generator`."""
    shared = executor.share(spec)

    def run(items: Iterable[WorkItem], stopped: Stopped) -> Iterator[WorkResult]:
        for result in executor.map(WorkerTask(shared), items, stopped):
            generator.calls += len(result.replies)
            generator.hits += result.cached
            yield result

    return run


def read_files(index: Path, calibrations: Path | None) -> dict[str, bytes]:
    """A consistent copy of the lab's index, and the calibration files, by relative path."""
    with tempfile.TemporaryDirectory() as folder, closing(sqlite3.connect(index)) as db:
        with closing(sqlite3.connect(Path(folder) / INDEX)) as copy:
            db.backup(copy)
        found = {INDEX: (Path(folder) / INDEX).read_bytes()}
    return found | {f"{file.parent.name}/{file.name}": file.read_bytes() for file in calibration_files(calibrations)}


def calibration_files(calibrations: Path | None) -> list[Path]:
    """The lab's calibration files, sorted."""
    return sorted(calibrations.glob("*.json")) if calibrations else []


class _Worker:
    """The systems of one worker; they live as long as its process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="casemate-worker-", ignore_cleanup_errors=True)
        self._runner = asyncio.Runner()  # one loop for all items: the generator's connections are bound to it
        self._replies = ReplyBuffer()
        config, folder = spec.config
        index, calibrations = self._local_files(spec)
        reader = config.rag.generator if config.redteam.reader.use == "own" else config.redteam.reader
        parts = {Embedder: spec.embedding.embedder}
        self._generator = CachedGenerator(build("generator", reader, folder, parts), self._replies, spec.reader)
        embedder = CachedEmbedder(spec.embedding.embedder)
        rag = Rag(embedder, SqliteIndex(index), self._generator, spec.instructions)
        targets = TargetFactory(config, folder, rag, calibrations).targets()
        unused = CampaignStore(Path(self._folder.name) / "unused.db")
        attacks = build_attacks(config, folder)
        self._experiment = Experiment(attacks, spec.split, targets, unused, spec.indexed, spec.plan)

    def run(self, item: WorkItem) -> WorkResult:
        """Runs one item; the result includes the replies that models wrote for it."""
        before = self._generator.hits
        result = self._runner.run(self._experiment.run_item(item))
        result.replies, result.cached = self._replies.drain(), self._generator.hits - before
        return result

    def _local_files(self, spec: WorkerSpec) -> tuple[Path, Path | None]:
        """The index and the folder of calibrations on this machine."""
        if spec.files is None:
            return spec.index, spec.calibrations
        folder = Path(self._folder.name)
        for name, content in spec.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        return folder / INDEX, folder / spec.calibrations.name if spec.calibrations else None


@lru_cache(maxsize=1)
def _worker(spec: Shared[WorkerSpec]) -> _Worker:
    """The worker of this process, built for its first item."""
    return _Worker(spec.get())
