"""Where honey has turned up: unique strings for data that models are trained on, and a search for everything planted.

A string of ours in somebody else's answers, files or model outputs was taken from here: nobody says it by chance. The
search finds it disguised, too (``marks``), and tells what it was: a token of the instructions, a record, or a string
given to a data set, with who, when and for what. It needs the key file; the event store tells the rest.
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
from casemate.marks import Marks, Text
from casemate.marks.honey import HoneyKey, HoneyKeys, Record
from casemate.monitor.honey.planting import KIND, find
from casemate.protocols import EventStore, Index
from casemate.types import Event

MOST = 10_000
"""Strings of one batch at most."""
PIECE, OVERLAP = 60_000, 4_000
"""Characters of a file that are searched at a time, and how many again with the next: more than any string takes."""
CARRIERS = (
    "The entry {0} belongs to no catalogue.",
    "{0} was the name of the trial that nobody joined.",
    "Ask for {0} at the desk, and they will say that there is none.",
    "In the old register the word after this one is {0}.",
    "The password of the lighthouse was {0}, until there was no lighthouse.",
)


@dataclass(frozen=True, slots=True)
class Planting:
    """A string that is ours, and what is known of it.

    Attributes:
        what: ``prompt``, ``record``, ``training`` or ``unknown``: ours by its checksum, and of no list.
        about: Form and generation; tenant and source; purpose, who and when.
    """

    what: str
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sighting:
    """A string that turned up.

    Attributes:
        where: Name of the text or file.
        planting: What it is.
        form: What the text had to be taken for: ``letters``, ``base64``, ``hex`` or ``codes``.
        errors: Letters wrong, lacking or too many; -1 where that cannot be said.
    """

    where: str
    planting: Planting
    form: str
    errors: int


def training_strings(
    keys: HoneyKeys, store: EventStore, count: int, *, purpose: str, who: str, carried: bool = True
) -> list[str]:
    """Strings for one data set that a model may be trained on, each in no other; what was given out is written down.

    A model that says one has seen the data set, and remembers it word for word. Put each into several documents: a
    model seldom remembers what it saw once.

    Args:
        keys: Of all honey; the file is made if there is none.
        store: Keeps who has what; without it the strings cannot be told later. Not the strings: they follow from it.
        count: How many, 1 to 10,000.
        purpose: Which data set, and for what.
        who: Who has it.
        carried: Whether each stands in a sentence of its own; otherwise three made-up words.

    Raises:
        ConfigError: If an argument is out of its range.
        DataError: If it could not be written down.
    """
    if not 1 <= count <= MOST or not purpose.strip() or not who.strip():
        raise ConfigError(f"count={count}, purpose={purpose!r}, who={who!r}: 1 to {MOST} strings, and two names")
    key, batch = keys.get(), uuid.uuid4().hex
    body = {"what": "training", "purpose": purpose, "who": who, "batch": batch, "count": count}
    store.append(Event(f"{KIND}:training:{batch}", datetime.now(UTC), KIND, body))
    if not store.flush():
        raise DataError("the strings were not written down, so they are not given out; see to the event store")
    marks = [_training_mark(key, batch, i) for i in range(count)]
    return [CARRIERS[i % len(CARRIERS)].format(m) if carried else m for i, m in enumerate(marks)]


def plantings(key: HoneyKey, store: EventStore | None = None, index: Index | None = None) -> dict[str, Planting]:
    """Every string that was ever planted, as far as key, store and index tell, by its mark.

    Args:
        key: Tells all tokens of the instructions.
        store: Tells records and strings for data sets.
        index: Tells the records that are there now, if the store is lost.
    """
    found = {
        mark: Planting("prompt", {"form": form, "generation": generation})
        for mark, (form, generation) in key.prompt_marks().items()
    }
    for record in _there(index, key):
        about = {"tenant": record.tenant, "source": record.source, "generation": record.generation}
        found[key.record_mark(record.tenant, record.generation, record.number)] = Planting("record", about)
    for event in store.scan(KIND) if store else ():
        found |= _written_down(key, event)
    return found


def search(
    texts: Iterable[tuple[str, str]], keys: HoneyKeys, store: EventStore | None = None, index: Index | None = None
) -> list[Sighting]:
    """Every planted string in some texts.

    Args:
        texts: Names and texts: answers, outputs of a model, whatever was found somewhere.
        keys: Of all honey.
        store: Tells provenance.
        index: The same, if the store is lost.

    Raises:
        DataError: If there is no key file, or it is damaged.
    """
    key = keys.find()
    if key is None:
        raise DataError(f"there is no key of honey tokens at {keys.path}: nothing was planted, or it is elsewhere")
    known = plantings(key, store, index)
    marks = Marks(known)
    found: dict[tuple[str, str], Sighting] = {}
    for where, piece in ((name, piece) for name, whole in texts for piece in _pieces(whole)):
        text = Text(piece)
        for seen in marks.each(text):
            found.setdefault((where, seen.mark), Sighting(where, known[seen.mark], seen.form, seen.errors))
        for mark in set(key.mint.own(text)) - known.keys():
            found.setdefault((where, mark), Sighting(where, Planting("unknown", {}), "letters", -1))
    return list(found.values())


def search_files(
    paths: Sequence[Path], keys: HoneyKeys, store: EventStore | None = None, index: Index | None = None
) -> list[Sighting]:
    """The same in files, and all files below folders; also such as are packed with gzip. In constant memory each.

    Raises:
        DataError: If a path is not there or cannot be read, or there is no key file.
    """
    files = [f for path in paths for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    texts = ((str(f), piece) for f in files if not f.is_dir() for piece in _read(f))
    return search(texts, keys, store, index)


def _there(index: Index | None, key: HoneyKey) -> list[Record]:
    """The records of all tenants."""
    return [record for tenant in index.tenants() for record in find(index, key, tenant).records] if index else []


def _training_mark(key: HoneyKey, batch: str, number: int) -> str:
    return key.mint.mark("honey training", batch, str(number))


def _written_down(key: HoneyKey, event: Event) -> dict[str, Planting]:
    """The marks that an event tells of."""
    body = event.body
    if body.get("what") == "planted":
        about = {name: body[name] for name in ("tenant", "source", "generation")} | {"at": event.at.isoformat()}
        return {key.record_mark(body["tenant"], body["generation"], body["number"]): Planting("record", about)}
    if body.get("what") == "training":
        about = {name: body[name] for name in ("purpose", "who", "batch")} | {"at": event.at.isoformat()}
        return {
            _training_mark(key, body["batch"], i): Planting("training", about | {"number": i})
            for i in range(body["count"])
        }
    return {}


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that overlap."""
    for start in range(0, max(len(text) - OVERLAP, 1), PIECE - OVERLAP):
        yield text[start : start + PIECE]


def _read(path: Path) -> Iterator[str]:
    """A file in pieces that overlap, whatever its encoding: UTF-16 by its mark, all else as UTF-8."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            head = file.read(2)
        encoding = "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
        with opener(path, "rt", encoding=encoding, errors="replace") as text:
            held = ""
            while read := text.read(PIECE - OVERLAP):
                yield held + read
                held = (held + read)[-OVERLAP:]
    except (OSError, EOFError, UnicodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
