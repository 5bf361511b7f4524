"""Plants, rotates and removes honeytoken records: made-up documents that only a crawler retrieves.

Planted records are listed in the event store, and can be found without it: the metadata of each record contains a seal
computed from the key file (``guard.watermarks.honeytoken_keys``). Every operation can be interrupted, even killed, and
repeated: existing records are kept, missing ones are added.

A document is removed only if its seal matches the key. A document that merely resembles a record is reported.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from casemate.errors import ConfigError, DataError
from casemate.guard.guard import Guard
from casemate.guard.watermarks.honeytoken_keys import (
    METADATA,
    HoneytokenKey,
    HoneytokenKeyFile,
    HoneytokenRecord,
    record_fields,
)
from casemate.maths.stats import Estimate, proportion
from casemate.monitor.honeytokens.ownership import facts_text
from casemate.monitor.honeytokens.records import BAITS, TEXTS, CorpusSample, Style, draft_records
from casemate.monitor.poisoning.retrieval_impact import QuestionScores
from casemate.protocols import EventStore, Index, Progress, Steps
from casemate.runtime.events import append_durably, digest
from casemate.types import DEFAULT_TENANT, Document, Event, Vector

HONEYTOKEN_KIND = "honeytoken"
"""Kind of the events that list planted and removed records, and strings given out."""
MIN_RECORDS = 20
"""Default number of records: 20, or one in 200 documents if that is more (METHODS G)."""
MAX_BENIGN_SHARE = 0.001
"""A record retrieved by more than this share of the benign questions is not planted."""
FIRST_RECORDS, FAR_ABOVE = 4, 5.0
"""Planting ends if the first records, two of each kind, are all retrieved by this many times the allowed share."""
LOCATIONS_PER_RECORD = 4
"""Locations in the corpus that are tried for each record."""
MAX_REMOVAL_ROUNDS = 5
"""How often removal searches again, since another process may plant at the same time."""


@dataclass(frozen=True, slots=True)
class PlantingSettings:
    """Where records are planted, and their form.

    Attributes:
        style: To match the corpus: ``article``, ``abstract`` or ``note``.
        questions: Benign questions, some hundreds at least, that should not retrieve a record.
        folder: Sources are named ``folder/`` and eight characters. Answers may show the name.

    Raises:
        ConfigError: If the folder is empty.
    """

    tenant: str = DEFAULT_TENANT
    style: Style = "article"
    questions: Sequence[str] = ()
    k: int = 5
    folder: str = "archive"

    def __post_init__(self) -> None:
        if not self.folder.strip("/"):
            raise ConfigError(f"honeytoken records: the folder {self.folder!r} must not be empty")


@dataclass(frozen=True, slots=True)
class PlantingResult:
    """Result of planting.

    Attributes:
        held: Number of records of this generation in the index.
        skipped: Records that were not planted, since too many benign questions would retrieve every draft.
        benign: Share of the benign questions that retrieve a new record; None without questions. The locations were
            chosen with these questions: expect a slightly larger share for others.
        rejected: Least share of the benign questions that retrieve a draft that was not planted; None without any.
        needed: Rough number of documents from which records would fit; None if any was planted. The share falls as the
            number of documents grows.
        english: Whether the documents are mostly English prose, as the records are.
    """

    added: tuple[str, ...]
    held: int
    generation: int
    wanted: int
    skipped: int = 0
    benign: Estimate | None = None
    rejected: float | None = None
    needed: int | None = None
    english: bool = True


@dataclass(frozen=True, slots=True)
class RemovalResult:
    """Result of removing records: their sources by tenant, and what resembles a record and was left, in sentences."""

    removed: dict[str, tuple[str, ...]]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordInventory:
    """Records among a tenant's documents.

    Attributes:
        doubtful: Sources with the metadata of a record but no valid seal, or with other documents beside one.
    """

    records: tuple[HoneytokenRecord, ...]
    doubtful: tuple[str, ...]


def find_records(index: Index, key: HoneytokenKey | None, tenant: str = DEFAULT_TENANT) -> RecordInventory:
    """Finds all records of a tenant. Reads the whole index, in constant memory; needs no event store."""
    records: dict[str, HoneytokenRecord] = {}
    others: set[str] = set()
    doubtful: set[str] = set()
    for documents, _ in index.scan(tenant):
        for document in documents:
            if key is not None and (record := key.identify(document, tenant)):
                records[document.source] = record
            elif METADATA in document.metadata:
                doubtful.add(document.source)
            else:
                others.add(document.source)
    mixed = records.keys() & (others | doubtful)
    valid = sorted((r for s, r in records.items() if s not in mixed), key=lambda r: (r.generation, r.number))
    return RecordInventory(tuple(valid), tuple(sorted(doubtful | mixed)))


async def plant_records(
    guard: Guard,
    keys: HoneytokenKeyFile,
    settings: PlantingSettings,
    count: int | None = None,
    steps: Steps = lambda title, total: nullcontext(lambda count: None),
) -> PlantingResult:
    """Plants records of the current generation until there are ``count``; None: 20, or one in 200 documents if more.

    A missing key file is created.

    Raises:
        DataError: If the corpus is empty or the key file is damaged.
    """
    key, index, tenant = keys.load_or_create(), guard.rag.index, settings.tenant
    existing = (await asyncio.to_thread(find_records, index, key, tenant)).records
    n = index.moments(tenant).n - len(existing)
    current = {r.number for r in existing if r.generation == key.generation}
    wanted = max(MIN_RECORDS, n // 200) if count is None else count
    missing = [i for i in range(wanted) if i not in current]
    if missing and not n:
        raise DataError(f"tenant {tenant!r} has no documents to plant records among; index documents first")
    writer = _RecordWriter(guard, key, settings, frozenset(r.source for r in existing))
    with steps("writing records", len(missing)) as progress:
        written = await asyncio.to_thread(writer.write, missing, progress)
    if written.documents:
        await guard.add(written.documents, tenant)
    new = [r for d in written.documents if (r := key.identify(d, tenant))]
    _log_records(guard.store, "planted", [r for r in (*existing, *new) if r.generation == key.generation])
    return PlantingResult(
        added=tuple(r.source for r in new),
        held=len(current) + len(new),
        generation=key.generation,
        wanted=wanted,
        skipped=written.skipped,
        benign=written.benign,
        rejected=written.rejected,
        needed=None if written.rejected is None or new else math.ceil(n * written.rejected / MAX_BENIGN_SHARE),
        english=written.english,
    )


async def rotate_records(
    guard: Guard,
    keys: HoneytokenKeyFile,
    settings: PlantingSettings,
    steps: Steps = lambda title, total: nullcontext(lambda count: None),
) -> tuple[PlantingResult, RemovalResult]:
    """Replaces the records by a new generation: plants the new ones first, then removes the old ones.

    If no new record fits, the old ones stay.

    The token in the instructions changes too. Old tokens and strings are still recognized. If interrupted and repeated,
    it makes one more generation and removes all earlier ones. Records of other tenants stay, as an old generation.
    """
    existing = (await asyncio.to_thread(find_records, guard.rag.index, keys.load_or_create(), settings.tenant)).records
    sizes = [sum(r.generation == g for r in existing) for g in {r.generation for r in existing}]
    keys.rotate()
    planted = await plant_records(guard, keys, settings, max(sizes, default=0), steps)
    if planted.wanted and not planted.held:
        return planted, RemovalResult({}, ())
    removed = await remove_records(guard, keys, tenant=settings.tenant, keep_generation=planted.generation)
    return planted, removed


async def remove_records(
    guard: Guard,
    keys: HoneytokenKeyFile,
    *,
    tenant: str | None = None,
    keep_generation: int | None = None,
    force: bool = False,
) -> RemovalResult:
    """Removes records until none is found: of one tenant or of all, except a generation to keep.

    Without a key file no seal can be verified, and nothing is removed. With ``force``, documents with the metadata of a
    record and no valid seal are removed too.

    Raises:
        DataError: If the key file is damaged.
    """
    key, index = keys.load(), guard.rag.index
    removed: dict[str, tuple[str, ...]] = {}
    left: list[str] = []
    for name in index.tenants() if tenant is None else [tenant]:
        gone: list[str] = []
        for _ in range(MAX_REMOVAL_ROUNDS):
            found = await asyncio.to_thread(find_records, index, key, name)
            records = [r for r in found.records if r.generation != keep_generation]
            sources = [r.source for r in records] + (list(found.doubtful) if force else [])
            if not sources:
                break
            await guard.remove(sources, name)
            _log_records(guard.store, "removed", records)
            gone += sources
        else:
            left += [f"{source} of tenant {name!r}: reappears after every removal" for source in sources]
        removed[name] = tuple(gone)
        left += [f"{source} of tenant {name!r}: {_why_left(key)}" for source in found.doubtful]
    return RemovalResult(removed, tuple(left))


def _why_left(key: HoneytokenKey | None) -> str:
    why = "there is no key file to verify its seal" if key is None else "its seal does not match the key"
    return f"resembles a record, but {why}; inspect it, or remove it with --force"


@dataclass(frozen=True, slots=True)
class _WrittenRecords:
    """Records ready to be indexed. See ``PlantingResult``."""

    documents: tuple[Document, ...]
    skipped: int
    benign: Estimate | None
    rejected: float | None = None
    english: bool = True


class _RecordWriter:
    """Writes records for a tenant's corpus; existing records are ignored."""

    def __init__(self, guard: Guard, key: HoneytokenKey, settings: PlantingSettings, without: frozenset[str]) -> None:
        self.embed, self.index = guard.rag.embedder.embed, guard.rag.index
        self.key, self.settings, self.without = key, settings, without

    def write(self, numbers: Sequence[int], progress: Progress) -> _WrittenRecords:
        """One record per number, unless too many benign questions would retrieve every draft of it.

        Ends early if the first ones are far from fitting, as in a small collection.
        """
        chosen, vectors, rejected = list[Document](), list[Vector](), list[float]()
        if not numbers:
            return _WrittenRecords((), 0, None)
        seed = [int(self.key.record_name(self.settings.tenant, self.key.generation, -1), 16)]
        rng = np.random.default_rng(seed)
        sample = CorpusSample.of(self.index, self.settings.tenant, rng, self.without)
        locations = sample.locations(LOCATIONS_PER_RECORD * (max(numbers) + 1), rng)
        scores = self._question_scores()
        for number in numbers:
            drafts = [
                draft
                for i in locations[LOCATIONS_PER_RECORD * number : LOCATIONS_PER_RECORD * (number + 1)]
                for draft in self._drafts(number, sample.terms(i), np.random.default_rng([*seed, number, i]))
            ]
            drafted = self.embed([d.content for d in drafts])
            best, entries = _least_retrieved(drafted, sample.vectors, scores)
            share = entries / len(scores.questions) if scores else 0.0
            if share <= MAX_BENIGN_SHARE:
                chosen.append(drafts[best])
                vectors.append(drafted[best])
            else:
                rejected.append(share)
            progress(1)
            if len(rejected) == FIRST_RECORDS and not chosen and min(rejected) > FAR_ABOVE * MAX_BENIGN_SHARE:
                break
        skipped, benign = len(numbers) - len(chosen), _benign_share(scores, vectors)
        return _WrittenRecords(tuple(chosen), skipped, benign, min(rejected, default=None), sample.english)

    def _question_scores(self) -> QuestionScores | None:
        questions, settings = list(self.settings.questions), self.settings
        if not questions:
            return None
        vectors = self.embed(questions)
        return QuestionScores.of(questions, vectors, self.index, settings.k, settings.tenant, self.without)

    def _drafts(self, number: int, terms: Sequence[str], rng: np.random.Generator) -> list[Document]:
        key, tenant, generation = self.key, self.settings.tenant, self.key.generation
        name = f"{self.settings.folder.strip('/')}/{key.record_name(tenant, generation, number)}"
        marks = [key.record_token(tenant, generation, n) for n in (number, number + 1)]
        texts, owned = BAITS if number % 2 else TEXTS[self.settings.style], facts_text(key, tenant, generation, number)
        return [
            key.seal(Document(name, text + owned, title), tenant, generation, number)
            for title, text in draft_records(marks[0], marks[1], terms, texts, rng)
        ]


def _least_retrieved(drafted: Vector, held: Vector, scores: QuestionScores | None) -> tuple[int, int]:
    """The draft that the fewest questions retrieve, ties by distance, and their number.

    Without questions: the most central draft.
    """
    if scores is None:
        return int((drafted @ held.T).mean(axis=1).argmax()), 0
    margins = scores.margins(drafted)
    entries, nearest = (margins >= 0).sum(axis=1), margins.max(axis=1)
    best = int(np.lexsort((nearest, entries))[0])
    return best, int(entries[best])


def _benign_share(scores: QuestionScores | None, vectors: Sequence[Vector]) -> Estimate | None:
    """Share of the questions that retrieve any of the records."""
    if scores is None or not vectors:
        return None
    found = ((scores.vectors @ np.stack(vectors).T).max(axis=1) >= scores.best[:, -1]).sum()
    return proportion(int(found), len(scores.questions))


def _log_records(store: EventStore | None, what: str, records: Sequence[HoneytokenRecord]) -> None:
    """Logs planted or removed records; each planted record once, however often it is repeated."""
    if store is None:
        return
    events = []
    for record in records:
        label = digest(f"{record.tenant}\n{record.source}\n{record.generation}", length=32)
        suffix = label if what == "planted" else uuid.uuid4().hex
        body: dict[str, Any] = {"what": what, "tenant": record.tenant, **record_fields(record)}
        events.append(Event(f"{HONEYTOKEN_KIND}:{what}:{suffix}", datetime.now(UTC), HONEYTOKEN_KIND, body))
    append_durably(store, events, f"the list of {what} records", "check the store and run the same again")
