"""Indexes as much of a folder as fits into a time limit, and keeps some documents out of the index.

The documents kept out are the non-members of membership inference: they come from the same folder, and no part of the
system has seen them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from casemate.errors import DataError
from casemate.protocols import Steps
from casemate.rag.corpus import Corpus, Problem
from casemate.rag.ingest import Ingest, IngestPlan, IngestReport
from casemate.redteam.lab.datasets import MIN_CANDIDATES, Split, read_documents, split_from_pools
from casemate.system import App
from casemate.types import Document

MAX_FILE_MB = 10.0
"""Larger files are skipped and reported."""
MAX_FILES, MAX_BYTES = 5_000, 300_000_000
"""Maximum number and total size of the files, which are drawn at random."""
MAX_HELD_OUT, HELD_OUT_SHARE = 60, 0.25
"""Maximum number, and maximum share, of documents that are kept out of the index."""
FIRST_BYTES = 30_000
"""Size of the first part, whose duration predicts how much can be indexed in time."""
PART_SECONDS, RESERVE = 20.0, 0.8
"""Maximum duration of a part, and planned share of the remaining time."""
SEED = 7


class SampledCorpus(Corpus):
    """A corpus of which at most `MAX_FILES` files and `MAX_BYTES` are read, drawn at random.

    Attributes:
        left_out: Files of known types that are not read.
    """

    def __init__(self, path: Path) -> None:
        """Opens it. Arguments and errors: see `Corpus`."""
        self.left_out = 0
        super().__init__(path, MAX_FILE_MB)

    def _files(self) -> Iterator[tuple[str, str]]:
        found = list(super()._files())
        order = np.random.default_rng(SEED).permutation(len(found))[:MAX_FILES]
        sizes = np.array([_size(found[i][1]) for i in order], np.int64)
        sizes[sizes > MAX_FILE_MB * 1e6] = 0  # not read whole
        chosen = sorted(order[np.cumsum(sizes) <= MAX_BYTES].tolist())
        self.left_out = len(found) - len(chosen)
        yield from (found[i] for i in chosen)


@dataclass(frozen=True, slots=True)
class Sample:
    """The indexed part of a folder.

    Attributes:
        found: Number of documents in the folder: files, or records of a jsonl file.
        held_out: Documents that were kept out of the index as non-members.
        left_out: Files that were not read, because the folder is too large.
        split: None: see ``gap``.
        gap: Why there is no split; empty if there is one.
    """

    folder: str
    found: int
    indexed: int
    chunks: int
    held_out: int = 0
    left_out: int = 0
    ignored: int = 0
    ignored_types: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    split: Split | None = None
    gap: str = ""

    @property
    def whole(self) -> bool:
        """Whether every readable document was indexed or held out."""
        return not self.left_out and self.indexed + self.held_out >= self.found


async def index_sample(app: App, corpus: SampledCorpus, seconds: float, steps: Steps) -> Sample:
    """Indexes a folder, or as much of it as fits into the time, and draws members and non-members.

    Raises:
        DataError: If nothing can be read, or nothing can be indexed in time.
    """
    folder = corpus.path
    work = Ingest(app.guard, corpus)
    with steps("reading the documents", None):
        plan = await asyncio.to_thread(work.plan)
        sizes = await asyncio.to_thread(lambda: {s.name: s.size for s in corpus.sources()})
    rng = np.random.default_rng(SEED)
    order = [sorted(plan.todo)[i] for i in rng.permutation(len(plan.todo))]
    outside = order[: _held_out(len(order))]
    problems = await _index_in_time(work, plan, {n: sizes[n] for n in order[len(outside) :]}, seconds, steps)
    held = app.index.digests()
    if not held:
        why = "; ".join(f"{p.where}: {p.reason}" for p in problems[:3])
        raise DataError(f"nothing in {folder} could be indexed within {seconds:.0f} s{': ' if why else ''}{why}")
    documents = await asyncio.to_thread(read_documents, corpus, {*held, *outside})
    split, gap = _split([d for d in documents if d.source in held], [d for d in documents if d.source not in held])
    return Sample(
        folder=str(folder),
        found=len(order) - sum(p.where in plan.todo for p in problems),
        indexed=len(held),
        chunks=app.index.moments().n,
        held_out=sum(d.source not in held for d in documents),
        left_out=corpus.left_out,
        ignored=corpus.ignored,
        ignored_types=dict(corpus.ignored_types),
        problems=tuple(problems),
        split=split,
        gap=gap,
    )


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _held_out(count: int) -> int:
    """Number of documents to keep out of the index; 0 if too few would be left."""
    wanted = max(int(HELD_OUT_SHARE * count), MIN_CANDIDATES)
    return min(wanted, MAX_HELD_OUT) if count >= 2 * MIN_CANDIDATES else 0


async def _index_in_time(
    work: Ingest, plan: IngestPlan, sizes: Mapping[str, int], seconds: float, steps: Steps
) -> list[Problem]:
    """Indexes sources in the given order, part by part, as long as there is time; returns what could not be read.

    The first part is small. Its duration predicts the size of the next ones, which take at most `PART_SECONDS` each.
    """
    work.sink.embedder.embed(["The first call loads the model."])
    began, waiting, done, problems = time.monotonic(), dict(sizes), 0, dict[str, Problem]()
    with steps("indexing the documents, in bytes", sum(sizes.values()) or None) as count:
        limit: float = FIRST_BYTES
        while waiting and limit > 0:
            part = _next_part(waiting, limit) or ([] if done else [min(waiting, key=lambda name: waiting[name])])
            if not part:
                break
            left = seconds - (time.monotonic() - began)
            report = await _run(work, plan, part, 2 * left, count)
            problems |= {p.where: p for p in report.problems}
            done += sum(waiting.pop(name) for name in part)
            spent = time.monotonic() - began
            limit = done / spent * min(PART_SECONDS, RESERVE * (seconds - spent))
    return list(problems.values())


def _next_part(sizes: Mapping[str, int], limit: float) -> list[str]:
    """Names of the first sources that fit into a number of bytes together."""
    chosen, total = list[str](), 0
    for name, size in sizes.items():
        if total + size <= limit:
            chosen.append(name)
            total += size
    return chosen


async def _run(
    work: Ingest, plan: IngestPlan, names: Sequence[str], seconds: float, count: Callable[[int], None]
) -> IngestReport:
    """Indexes some sources; after the time limit, unfinished ones are discarded."""
    part = replace(plan, todo={name: plan.todo[name] for name in names})
    try:
        async with asyncio.timeout(seconds):
            return await work.run(part, lambda size: count(int(size)))
    except TimeoutError:
        return IngestReport(problems=list(work.corpus.problems))


def _split(inside: Sequence[Document], outside: Sequence[Document]) -> tuple[Split | None, str]:
    """Members and non-members, or why there are none."""
    rng = np.random.default_rng(SEED)
    members = rng.permutation(len(inside)).tolist()
    nonmembers = list(range(len(inside), len(inside) + len(outside)))
    try:
        return split_from_pools([*inside, *outside], members, nonmembers, (len(outside), len(outside)), rng), ""
    except DataError as error:
        return None, str(error)
