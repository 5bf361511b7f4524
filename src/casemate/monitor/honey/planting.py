"""Made-up records in the corpus: planted, rotated, and always found and removed again.

What is planted is written down in the event store, and can be found without it: each record carries a seal in its
metadata that follows from the key file (``marks.honey``). Every step may be interrupted, by a kill too, and run again:
what is there already is left as it is, and what is missing is added.

Where no key fits, nothing is removed: a document that only looks like a record is named, and left to its owner.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from casemate.errors import ConfigError, DataError
from casemate.guard import Guard
from casemate.marks.honey import METADATA, HoneyKey, HoneyKeys, Record, described
from casemate.monitor.honey.records import BAITS, STYLES, TEXTS, Sample, Style, drafts
from casemate.monitor.poison.impact import Standings
from casemate.protocols import EventStore, Index
from casemate.stats import Rate, rate
from casemate.types import DEFAULT_TENANT, Document, Event, Vector

KIND = "honey"
"""Events of this kind tell what was planted, removed and given out."""
LEAST = 20
"""Records of a corpus, unless somebody says otherwise (METHODS G): 20, or one in 200 documents."""
BENIGN = 0.001
"""A record that more than this share of the harmless questions would find is not planted."""
TRIES = 4
"""Places that are tried for each record."""
ROUNDS = 5
"""How often cleaning looks again, while somebody else may plant."""


@dataclass(frozen=True, slots=True)
class Bed:
    """Where records go, and how they look.

    Attributes:
        tenant: Among whose documents.
        style: Of the texts: ``article``, ``abstract`` or ``note``, whichever is like the corpus.
        questions: Harmless ones, some hundreds at least, that should not find a record.
        k: Documents that are read for an answer, at least 1.
        folder: The sources are called ``folder/`` and eight letters. Answers may show it.

    Raises:
        ConfigError: If one is out of its range.
    """

    tenant: str = DEFAULT_TENANT
    style: Style = "article"
    questions: Sequence[str] = ()
    k: int = 5
    folder: str = "honey"

    def __post_init__(self) -> None:
        if self.style not in STYLES or self.k < 1 or not self.folder.strip("/"):
            raise ConfigError(
                f"honey: style={self.style!r}, k={self.k}, folder={self.folder!r}; style must be one of "
                f"{', '.join(STYLES)}, k at least 1, folder a name"
            )


@dataclass(frozen=True, slots=True)
class Planted:
    """What planting did.

    Attributes:
        added: Sources of the records that are new.
        held: Records of this generation that are there now.
        generation: Of the key.
        given_up: Places where every draft would have been found by too many harmless questions.
        benign: Share of the harmless questions that find a new record; None if there were none to look with. They are
            those that the places were chosen by: expect a little more of others.
    """

    added: tuple[str, ...]
    held: int
    generation: int
    given_up: int = 0
    benign: Rate | None = None


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What cleaning did.

    Attributes:
        removed: Sources of the records that were taken out, by tenant.
        left: Sources that look like records and were not, with the reason, a sentence each.
    """

    removed: dict[str, tuple[str, ...]]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a tenant's documents say about records.

    Attributes:
        records: Those whose seal fits.
        doubtful: Sources that have the metadata of a record and no seal that fits, or other documents beside one.
    """

    records: tuple[Record, ...]
    doubtful: tuple[str, ...]


def find(index: Index, key: HoneyKey | None, tenant: str = DEFAULT_TENANT) -> Found:
    """All records of a tenant. Reads the whole index, in constant memory; no list and no event store is needed."""
    records: dict[str, Record] = {}
    others: set[str] = set()
    doubtful: set[str] = set()
    for documents, _ in index.scan(tenant):
        for document in documents:
            if key is not None and (record := key.record(document, tenant)):
                records[document.source] = record
            elif METADATA in document.metadata:
                doubtful.add(document.source)
            else:
                others.add(document.source)
    mixed = records.keys() & (others | doubtful)
    sound = sorted((r for s, r in records.items() if s not in mixed), key=lambda r: (r.generation, r.number))
    return Found(tuple(sound), tuple(sorted(doubtful | mixed)))


async def plant(guard: Guard, keys: HoneyKeys, bed: Bed, count: int | None = None) -> Planted:
    """Sees that there are so many records of the present generation among a tenant's documents.

    Args:
        guard: Where they go in.
        keys: Of all honey; the file is made if there is none.
        bed: Where they go, and how they look.
        count: How many, at least 0; None: 20, or one in 200 documents.

    Raises:
        DataError: If the corpus is empty, or the key file damaged.
    """
    key, index, tenant = keys.get(), guard.rag.index, bed.tenant
    held = (await asyncio.to_thread(find, index, key, tenant)).records
    n = index.moments(tenant).n - len(held)
    there = {r.number for r in held if r.generation == key.generation}
    missing = [i for i in range(max(LEAST, n // 200) if count is None else count) if i not in there]
    if missing and not n:
        raise DataError(f"tenant {tenant!r} has no documents to hide records among: index some first")
    garden = _Garden(guard, key, bed, frozenset(r.source for r in held))
    grown = await asyncio.to_thread(garden.grown, missing)
    if grown.documents:
        await guard.add(grown.documents, tenant)
    new = [r for d in grown.documents if (r := key.record(d, tenant))]
    _note(guard.store, "planted", [r for r in (*held, *new) if r.generation == key.generation])
    return Planted(tuple(r.source for r in new), len(there) + len(new), key.generation, grown.given_up, grown.benign)


async def rotate(guard: Guard, keys: HoneyKeys, bed: Bed) -> tuple[Planted, Cleaned]:
    """The next generation in place of the last: first the new records go in, then the old ones out.

    The token in the instructions changes with it. Old tokens and strings are still recognised. Interrupted and run
    again, it makes one more generation and removes all before it. Records of other tenants stay, and count as old.

    Args:
        guard: As for ``plant``, and so are the others.
        keys: Rotated.
        bed: Where the new ones go.
    """
    held = (await asyncio.to_thread(find, guard.rag.index, keys.get(), bed.tenant)).records
    sizes = [sum(r.generation == g for r in held) for g in {r.generation for r in held}]
    keys.rotate()
    planted = await plant(guard, keys, bed, max(sizes, default=0))
    return planted, await clean(guard, keys, tenant=bed.tenant, but=planted.generation)


async def clean(
    guard: Guard, keys: HoneyKeys, *, tenant: str | None = None, but: int | None = None, force: bool = False
) -> Cleaned:
    """Takes records out until none is found any more, and says what is left.

    Args:
        guard: Where they come out.
        keys: Of all honey. Without the file no record can be told for certain, and all are left.
        tenant: Whose records; None: all tenants'.
        but: A generation that stays; None: none stays.
        force: Also takes out what has the metadata of a record and no seal that fits.

    Raises:
        DataError: If the key file is damaged.
    """
    key, index = keys.find(), guard.rag.index
    removed: dict[str, tuple[str, ...]] = {}
    left: list[str] = []
    for name in index.tenants() if tenant is None else [tenant]:
        gone: list[str] = []
        for _ in range(ROUNDS):
            found = await asyncio.to_thread(find, index, key, name)
            out = [r for r in found.records if r.generation != but]
            sources = [r.source for r in out] + (list(found.doubtful) if force else [])
            if not sources:
                break
            await guard.remove(sources, name)
            _note(guard.store, "removed", out)
            gone += sources
        else:
            left += [f"{source} of tenant {name!r}: it comes back whenever it is removed" for source in sources]
        removed[name] = tuple(gone)
        left += [f"{source} of tenant {name!r}: {_why(key)}" for source in found.doubtful]
    return Cleaned(removed, tuple(left))


def _why(key: HoneyKey | None) -> str:
    if key is None:
        return "it looks like a record, and there is no key file to tell; see to it, or clean with force"
    return "it looks like a record, and its seal does not fit this key; see to it, or clean with force"


@dataclass(frozen=True, slots=True)
class _Grown:
    """Records ready to go in."""

    documents: tuple[Document, ...]
    given_up: int
    benign: Rate | None


class _Garden:
    """Where records grow: a tenant's corpus, without the records that are there, and the key they follow from."""

    def __init__(self, guard: Guard, key: HoneyKey, bed: Bed, without: frozenset[str]) -> None:
        self.embed, self.index = guard.rag.embedder.embed, guard.rag.index
        self.key, self.bed, self.without = key, bed, without

    def grown(self, numbers: Sequence[int]) -> _Grown:
        """One record for each number, but where every draft would be found by too many harmless questions."""
        chosen, vectors = list[Document](), list[Vector]()
        if not numbers:
            return _Grown((), 0, None)
        seed = [int(self.key.name(self.bed.tenant, self.key.generation, -1), 16)]
        rng = np.random.default_rng(seed)
        sample = Sample.of(self.index, self.bed.tenant, rng, self.without)
        places, standings = sample.places(TRIES * (max(numbers) + 1), rng), self._standings()
        for number in numbers:
            made = [
                draft
                for place in places[TRIES * number : TRIES * (number + 1)]
                for draft in self._drafted(number, sample.terms(place), np.random.default_rng([*seed, number, place]))
            ]
            drafted = self.embed([d.content for d in made])
            best, entries = _rarest(drafted, sample.vectors, standings)
            if standings is None or entries <= BENIGN * len(standings.questions):
                chosen.append(made[best])
                vectors.append(drafted[best])
        return _Grown(tuple(chosen), len(numbers) - len(chosen), _benign(standings, vectors))

    def _standings(self) -> Standings | None:
        questions, bed = list(self.bed.questions), self.bed
        if not questions:
            return None
        return Standings.of(questions, self.embed(questions), self.index, bed.k, bed.tenant, self.without)

    def _drafted(self, number: int, terms: Sequence[str], rng: np.random.Generator) -> list[Document]:
        key, tenant, generation = self.key, self.bed.tenant, self.key.generation
        name = f"{self.bed.folder.strip('/')}/{key.name(tenant, generation, number)}"
        marks = [key.record_mark(tenant, generation, n) for n in (number, number + 1)]
        texts = BAITS if number % 2 else TEXTS[self.bed.style]
        return [
            key.sealed(Document(name, text, title), tenant, generation, number)
            for title, text in drafts(marks[0], marks[1], terms, texts, rng)
        ]


def _rarest(drafted: Vector, held: Vector, standings: Standings | None) -> tuple[int, int]:
    """The draft that the fewest questions find, and of these the one they come least near to; how many find it.

    Without questions the most central.
    """
    if standings is None:
        return int((drafted @ held.T).mean(axis=1).argmax()), 0
    over = standings.over(drafted)
    entries, nearest = (over >= 0).sum(axis=1), over.max(axis=1)
    best = int(np.lexsort((nearest, entries))[0])
    return best, int(entries[best])


def _benign(standings: Standings | None, vectors: Sequence[Vector]) -> Rate | None:
    """Share of the questions that find any of the records."""
    if standings is None or not vectors:
        return None
    found = ((standings.vectors @ np.stack(vectors).T).max(axis=1) >= standings.best[:, -1]).sum()
    return rate(int(found), len(standings.questions))


def _note(store: EventStore | None, what: str, records: Sequence[Record]) -> None:
    """Writes down what was done; of what is planted once for each record, however often it is done again."""
    if store is None:
        return
    for record in records:
        label = hashlib.sha256(f"{record.tenant}\n{record.source}\n{record.generation}".encode()).hexdigest()[:32]
        tail = label if what == "planted" else uuid.uuid4().hex
        body: dict[str, Any] = {"what": what, "tenant": record.tenant, **described(record)}
        store.append(Event(f"{KIND}:{what}:{tail}", datetime.now(UTC), KIND, body))
    store.flush()
