"""Searches texts and files for planted strings, and makes unique strings for data sets.

A planted string in foreign answers, files or model outputs was copied from this system: it does not occur by chance.
The search also finds disguised strings (``guard.watermarks.detection``). It reports the origin: a token of the
instructions, a record, or a string given out with a data set, with recipient, time and purpose. It needs the key file;
the event store adds the origin.
"""

from __future__ import annotations

import codecs
import gzip
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from casemate.errors import ConfigError, DataError
from casemate.guard.watermarks.detection import WatermarkDetector
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKey, HoneytokenKeyFile, HoneytokenRecord
from casemate.monitor.honeytokens.planting import HONEYTOKEN_KIND, find_records
from casemate.protocols import EventStore, Index
from casemate.runtime.events import append_durably
from casemate.text.disguises import DecodedText
from casemate.types import Event

MAX_STRINGS = 10_000
"""Strings of one batch."""
BLOCK, OVERLAP = 60_000, 4_000
"""Characters searched at a time, and of these repeated from the block before: longer than any string."""
CARRIERS = (
    "The entry {0} belongs to no catalogue.",
    "{0} was the name of the trial that nobody joined.",
    "Ask for {0} at the desk, and they will say that there is none.",
    "In the old register the word after this one is {0}.",
    "The password of the lighthouse was {0}, until there was no lighthouse.",
)


@dataclass(frozen=True, slots=True)
class PlantedString:
    """Origin of a planted string.

    Attributes:
        kind: ``prompt``, ``record``, ``training``, or ``unknown``: valid checksum, but in no list.
        details: Form and generation; tenant and source; or purpose, recipient and time.
    """

    kind: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sighting:
    """A planted string found in a text.

    Attributes:
        form: Form in which it was found, as in ``DecodedText.views``.
        errors: Wrong, missing or additional letters; -1: unknown.
    """

    where: str
    string: PlantedString
    form: str
    errors: int


def training_strings(keys: HoneytokenKeyFile, store: EventStore, count: int, *, purpose: str, who: str) -> list[str]:
    """Makes 1 to 10,000 sentences for one data set that a model may be trained on, and logs the recipient.

    A model that outputs one has memorized the data set. Insert each into several documents, since a model rarely
    memorizes what occurs once. The strings are computed from the key, and not stored: without the log, their origin is
    lost.

    Raises:
        ConfigError: If an argument is out of range.
        BackendError: If the store does not confirm the write.
    """
    if not 1 <= count <= MAX_STRINGS or not purpose.strip() or not who.strip():
        raise ConfigError(
            f"count={count}, purpose={purpose!r}, who={who!r}: count must be 1 to {MAX_STRINGS}, purpose and who must "
            "not be empty"
        )
    key, batch = keys.load_or_create(), uuid.uuid4().hex
    body = {"what": "training", "purpose": purpose, "who": who, "batch": batch, "count": count}
    event = Event(f"{HONEYTOKEN_KIND}:training:{batch}", datetime.now(UTC), HONEYTOKEN_KIND, body)
    append_durably(store, [event], "the write, so no strings are given out")
    marks = [_training_mark(key, batch, i) for i in range(count)]
    return [CARRIERS[i % len(CARRIERS)].format(m) for i, m in enumerate(marks)]


def planted_strings(
    key: HoneytokenKey, store: EventStore | None = None, index: Index | None = None
) -> dict[str, PlantedString]:
    """Every string ever planted, as far as key, store and index show, by its mark.

    The index contains the current records, in case the store is lost.
    """
    found = {
        mark: PlantedString("prompt", {"form": form, "generation": generation})
        for mark, (form, generation) in key.prompt_tokens().items()
    }
    for record in _indexed_records(index, key):
        details = {"tenant": record.tenant, "source": record.source, "generation": record.generation}
        found[key.record_token(record.tenant, record.generation, record.number)] = PlantedString("record", details)
    for event in store.scan(HONEYTOKEN_KIND) if store else ():
        found |= _logged_strings(key, event)
    return found


def planted_records(
    key: HoneytokenKey, store: EventStore | None = None, index: Index | None = None
) -> list[HoneytokenRecord]:
    """Every record ever planted, as far as store and index show, the newest generation first.

    A record that was planted under several names counts once: its token and its facts do not depend on the name.
    """
    logged = (event.body for event in (store.scan(HONEYTOKEN_KIND) if store else ()))
    found = [
        HoneytokenRecord(body["tenant"], body["source"], body["generation"], body["number"])
        for body in logged
        if body.get("what") == "planted"
    ]
    records = {(-r.generation, r.tenant, r.number): r for r in (*found, *_indexed_records(index, key))}
    return [records[place] for place in sorted(records)]


def search_texts(
    texts: Iterable[tuple[str, str]],
    keys: HoneytokenKeyFile,
    store: EventStore | None = None,
    index: Index | None = None,
) -> list[Sighting]:
    """Finds every planted string in named texts: answers, model outputs, any found material.

    Store or index provide the origin.

    Raises:
        DataError: If the key file is missing or damaged.
    """
    key = keys.load()
    if key is None:
        raise DataError(f"no key file at {keys.path}: nothing was planted, or the file is elsewhere")
    known = planted_strings(key, store, index)
    detector = WatermarkDetector(known)
    found: dict[tuple[str, str], Sighting] = {}
    for where, block in ((name, block) for name, whole in texts for block in _blocks(whole)):
        text = DecodedText(block)
        for match in detector.matches(text):
            found.setdefault((where, match.token), Sighting(where, known[match.token], match.form, match.errors))
        for mark in set(key.generator.find_genuine(text)) - known.keys():
            found.setdefault((where, mark), Sighting(where, PlantedString("unknown", {}), "letters", -1))
    return list(found.values())


def search_files(
    paths: Sequence[Path], keys: HoneytokenKeyFile, store: EventStore | None = None, index: Index | None = None
) -> list[Sighting]:
    """Finds every planted string in files and folders, also in gzip files. Constant memory per file.

    Raises:
        DataError: If a path is missing or unreadable, or there is no key file.
    """
    files = [f for path in paths for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    texts = ((str(f), block) for f in files if not f.is_dir() for block in _read_blocks(f))
    return search_texts(texts, keys, store, index)


def _indexed_records(index: Index | None, key: HoneytokenKey) -> list[HoneytokenRecord]:
    if index is None:
        return []
    return [record for tenant in index.tenants() for record in find_records(index, key, tenant).records]


def _training_mark(key: HoneytokenKey, batch: str, number: int) -> str:
    return key.generator.token("honey training", batch, str(number))


def _logged_strings(key: HoneytokenKey, event: Event) -> dict[str, PlantedString]:
    """Strings listed by an event, by their marks."""
    body = event.body
    if body.get("what") == "planted":
        details = {name: body[name] for name in ("tenant", "source", "generation")} | {"at": event.at.isoformat()}
        mark = key.record_token(body["tenant"], body["generation"], body["number"])
        return {mark: PlantedString("record", details)}
    if body.get("what") == "training":
        details = {name: body[name] for name in ("purpose", "who", "batch")} | {"at": event.at.isoformat()}
        return {
            _training_mark(key, body["batch"], i): PlantedString("training", details | {"number": i})
            for i in range(body["count"])
        }
    return {}


def _blocks(text: str) -> Iterator[str]:
    for start in range(0, max(len(text) - OVERLAP, 1), BLOCK - OVERLAP):
        yield text[start : start + BLOCK]


def _read_blocks(path: Path) -> Iterator[str]:
    """A file in overlapping blocks: UTF-16 with a byte order mark, else UTF-8."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            head = file.read(2)
        encoding = "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
        with opener(path, "rt", encoding=encoding, errors="replace") as text:
            held = ""
            while read := text.read(BLOCK - OVERLAP):
                yield held + read
                held = (held + read)[-OVERLAP:]
    except (OSError, EOFError, UnicodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
