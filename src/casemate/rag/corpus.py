"""Reads the sources of a corpus from disk. A source that cannot be read becomes a ``Problem``; the others are read."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from casemate.errors import DataError
from casemate.rag.parsing import PLAIN_TEXT, READERS, Parsed, reason_of
from casemate.rag.parsing_process import PARSER

BEIR = ("corpus.jsonl", "corpus.jsonl.gz")
QUESTIONS = (
    "queries.jsonl",
    "qrels",
)  # next to corpus.jsonl they mark a BEIR data set, of which only the corpus is read
RECORDS = (".jsonl", ".jsonl.gz")
MB = 1_000_000
MAX_BLANK_LINES = 100_000
MAX_EXPANSION = 200  # times the size of a compressed file; text compresses 3 to 20 times
OUTSIDE = "a link to a target outside the corpus, which is not followed; copy the target here"
MAX_ID = 512  # characters; databases limit the length of keys

_ENDING = re.compile(r"\.[a-z0-9]{1,10}", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Problem:
    """A file or record that was not read.

    Attributes:
        where: Path relative to the corpus, with ``:line`` for a record.
        reason: The fault and its remedy.
        harmless: Whether no content is lost, because it is empty.
    """

    where: str
    reason: str
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one record of a jsonl file, before parsing.

    Attributes:
        name: Id of the record, or path of the file relative to the corpus with forward slashes.
        digest: SHA-256 of the content: see ``_file_digest``, or of the record as canonical JSON.
        size: Size in bytes, for progress.
        parse: Returns title, text and metadata; title and text are not both blank. Raises ``DataError``, whose message
            serves as the reason of a ``Problem``.
    """

    name: str
    digest: str
    size: int
    parse: Callable[[], Parsed] = field(repr=False, compare=False)


class Corpus:
    """The sources under a path. Each iteration reads the disk again.

    Attributes:
        problems: Files and records that were not read; filled while ``sources()`` is iterated.
        unread: Names of sources that exist but could not be read this time.
        incomplete: Whether sources with unknown names may exist, so that a missing name does not imply removal.
        ignored: Number of files of other types, and of special files.
        ignored_types: Their numbers by ending, such as ``.csv``; files without one are left out.
    """

    def __init__(self, path: Path, max_mb: float = 64, *, empty: bool = False) -> None:
        """Opens a corpus.

        Args:
            path: A folder or a file.
            max_mb: Size limit of a file, or of a line of a jsonl file, in MB (10^6 bytes).
            empty: Whether the corpus may be empty, because all documents were removed on purpose.

        Raises:
            DataError: If the path does not exist, is not readable, or contains no file of a known type.
        """
        self.path = Path(os.path.abspath(path))
        self._limit = int(max_mb * MB)
        self._too_big = f"more than max_file_mb ({max_mb:g} MB); raise the limit, or split it"
        self._folder = os.path.isdir(path)
        if not self._folder and not os.path.isfile(path):
            raise DataError(f"no file or folder at {path}; give the path of your documents")
        if not os.access(path, os.R_OK | os.X_OK if self._folder else os.R_OK):
            raise DataError(f"{path} is not readable; grant this user read permission")
        self._reset()
        if not empty and next(self._files(), None) is None:
            why = "".join(f"; {p.where}: {p.reason}" for p in self.problems[:1])
            raise DataError(f"{path} contains no file of a known type ({', '.join((*READERS, *RECORDS))}){why}")
        self._reset()

    def sources(self) -> Iterator[Source]:
        """Yields all sources in the order of their paths, with unique names. Records are read one by one."""
        self._reset()
        names: set[str] = set()
        inside = os.path.join(os.path.realpath(self.path), "") if self._folder else ""
        for name, path in self._files():
            # it may have been replaced by a link since its folder was listed, perhaps minutes ago
            if not os.path.realpath(path).startswith(inside):
                self._problem(name, OUTSIDE, name, _kind(name) in RECORDS)
                continue
            found = self._records(name, path) if _kind(name) in RECORDS else self._file(name, path)
            for where, source in found:
                if source.name in names:
                    self._problem(
                        where, f"a second source named {source.name[:80]!r}; make the names unique, or remove one"
                    )
                else:
                    names.add(source.name)
                    yield source

    def _reset(self) -> None:
        self.problems: list[Problem] = []
        self.unread: set[str] = set()
        self.incomplete = False
        self.ignored = 0
        self.ignored_types = Counter[str]()

    def _problem(self, where: str, reason: str, unread: str = "", unknown: bool = False) -> None:
        """Records a fault. ``unread`` names the source, or ``unknown`` sources were not read."""
        self.problems.append(Problem(where, reason))
        self.unread.update([unread] if unread else [])
        self.incomplete |= unknown

    def _ignore(self, name: str) -> None:
        self.ignored += 1
        if _ENDING.fullmatch(ending := os.path.splitext(name)[1].lower()):
            self.ignored_types[ending] += 1

    def _files(self) -> Iterator[tuple[str, str]]:
        """Yields name and path of each file of a known type. Links come last, so a file keeps its own name.

        A file with several hard links is read if all of them are in the corpus. Else it may be a file that a user
        without the right to read it has linked.
        """
        if not self._folder:
            yield from [(_name(self.path.name), str(self.path))] if _kind(self.path.name) else []
            return
        root = os.path.realpath(self.path)
        inside = os.path.join(root, "")
        seen: set[str] = set()  # real paths, against loops and several paths to one file
        linked: dict[tuple[int, int], list[tuple[str, str, int]]] = {}  # by device and inode
        waiting = deque([(root, root)])
        while waiting:
            path, real = waiting.pop()
            name = _name(path[len(inside) :])
            found = self._status(name, path, stray=not os.path.join(real, "").startswith(inside))
            if not found or real in seen:
                continue
            if stat.S_ISDIR(found.st_mode):
                seen.add(real)
                paths = {n: os.path.join(path, n) for n in self._listed(name, path)}
                links = {n: p for n, p in paths.items() if os.path.islink(p)}
                waiting.extend((paths[n], os.path.join(real, n)) for n in reversed(paths) if n not in links)
                waiting.extendleft((p, os.path.realpath(p)) for p in links.values())
            elif stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                seen.add(real)
                linked.setdefault((found.st_dev, found.st_ino), []).append((name, path, found.st_nlink))
            elif stat.S_ISREG(found.st_mode) and _kind(name):
                seen.add(real)
                yield name, path
            else:
                self._ignore(name)
        for names in linked.values():
            yield from self._hard_links(names)

    def _hard_links(self, names: Sequence[tuple[str, str, int]]) -> Iterator[tuple[str, str]]:
        """Yields each (name, path) of one file's hard links, unless the corpus has only some of its links."""
        for name, path, count in names:
            if not _kind(name):
                self._ignore(name)
            elif count > len(names):
                reason = f"{count - len(names)} of its hard links are hidden or outside the corpus; copy the file here"
                self._problem(name, reason, name, _kind(name) in RECORDS)
            else:
                yield name, path

    def _status(self, name: str, path: str, stray: bool) -> os.stat_result | None:
        """Status of a file or folder; nothing if it must not or cannot be read."""
        kind, unknown, found = _kind(name), False, None
        try:
            found = os.stat(path)
            reason = OUTSIDE
        except OSError as error:
            reason, stray = reason_of(error), True
            unknown = kind in RECORDS or not kind and not os.path.islink(path)  # may be a folder
        if not stray:
            return found
        if kind or unknown or found and stat.S_ISDIR(found.st_mode):
            self._problem(name or ".", reason, name, unknown)
        else:
            self._ignore(name)
        return None

    def _listed(self, name: str, folder: str) -> list[str]:
        """Names of the entries of a folder that are read, sorted."""
        try:
            names = sorted(n for n in os.listdir(folder) if not n.startswith("."))
        except OSError as error:
            self._problem(name or ".", reason_of(error), unknown=True)
            return []
        questions = any(n.startswith(QUESTIONS) for n in names)
        beir = [n for n in BEIR if questions and n in names and os.path.isfile(os.path.join(folder, n))][:1]
        self.ignored += len(names) - 1 if beir else 0
        return beir or names

    def _file(self, name: str, path: str) -> Iterator[tuple[str, Source]]:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                raw = file.read(min(size, self._limit) + 1)
        except OSError as error:
            self._problem(name, reason_of(error), unread=name)
            return
        if len(raw) > self._limit:
            self._problem(name, f"{size / MB:.3g} MB, {self._too_big}", unread=name)
        elif not raw.strip():
            self.problems.append(Problem(name, "empty", harmless=True))
        else:
            digest = _file_digest(name, raw)
            yield name, Source(name, digest, len(raw), partial(_parse_file, path, digest))

    def _records(self, name: str, path: str) -> Iterator[tuple[str, Source]]:
        number = 0
        try:
            for number, line in enumerate(read_lines(path, self._limit, path.lower().endswith(".gz")), 1):
                if len(line) > self._limit:
                    self._problem(f"{name}:{number}", self._too_big, unknown=True)
                elif line.strip():
                    yield from self._record(f"{name}:{number}", line)
        except (OSError, EOFError, zlib.error) as error:
            self._problem(name, f"after line {number}: {reason_of(error)}", unknown=True)
            return
        if not number:
            self.problems.append(Problem(name, "empty", harmless=True))

    def _record(self, where: str, line: bytes) -> Iterator[tuple[str, Source]]:
        try:
            name, record = _load(line)
        except DataError as error:
            self._problem(where, str(error), unknown=True)
            return
        title, text = record.get("title"), record.get("text")
        if not isinstance(text, str) or not isinstance(title, str | None):
            self._problem(where, "'text' must be a string, and so must 'title' if present", unread=name)
        elif not text.strip() and not (title or "").strip():
            self.problems.append(Problem(where, "empty: neither text nor title", harmless=True))
        else:
            canonical = json.dumps(record, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            digest = hashlib.sha256(canonical.encode()).hexdigest()
            yield where, Source(name, digest, len(line), partial(_parse_record, record))


def _kind(name: str) -> str:
    """The suffix that selects the reader; empty for an unknown type."""
    return next((k for k in (*READERS, *RECORDS) if name.lower().endswith(k)), "")


def _name(path: str) -> str:
    """A path as valid Unicode with forward slashes, on one line: a line break would forge lines of output and logs."""
    return _CONTROL.sub("\ufffd", os.fsencode(path).decode("utf-8", "replace").replace(os.sep, "/"))


def _clean(value: Any) -> Any:
    """Replaces what databases reject: NUL characters, lone surrogates, numbers that are not finite."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value).replace("\0", " ")
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: str, limit: int, zipped: bool) -> Iterator[bytes]:
    """Yields the lines of a file. A line over the limit is truncated to ``limit`` + 1 bytes.

    Raises:
        OSError: If the file cannot be read.
        EOFError: If it ends early, has too many blank lines in a row, or expands too much.
        zlib.error: If it is damaged.
    """
    if zipped and not os.path.getsize(path):
        raise EOFError("an empty file is not a gzip file")
    most = MB * 64 + MAX_EXPANSION * os.path.getsize(path)
    size = blank = 0
    opened = gzip.open(path) if zipped else open(path, "rb")
    with cast(BinaryIO, opened) as file:
        while line := file.readline(limit + 1):
            yield line
            blank = 0 if line.strip() else blank + 1
            if blank > MAX_BLANK_LINES:
                raise EOFError(f"more than {MAX_BLANK_LINES:,} blank lines in a row")
            size += len(line) if line.endswith(b"\n") else _rest_of_line(file, most)
            if size > most:
                raise EOFError(f"expands to more than {MAX_EXPANSION} times its size")


def _rest_of_line(file: BinaryIO, most: int) -> int:
    """Skips the rest of a line; returns its length, or a little more than `most`."""
    size = 0
    while size <= most and (part := file.readline(MB)):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _load(line: bytes) -> tuple[str, dict[str, Any]]:
    """Id and content of a record."""
    try:
        record = _clean(json.loads(line.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON in UTF-8 ({error}); repair the line") from error
    if not isinstance(record, dict):
        raise DataError('not an object; write lines as {"_id": ..., "text": ...}')
    name = record.get(_name_field(record))
    if isinstance(name, bool) or not isinstance(name, str | int) or not 0 < len(str(name)) <= MAX_ID:
        raise DataError(
            f"no valid id; '_id', 'id' or 'source' must be a string of 1 to {MAX_ID} characters, or an integer"
        )
    return _CONTROL.sub("\ufffd", str(name)), record


def _name_field(record: Mapping[str, Any]) -> str:
    """The field with the id of a record; ``source`` as in ``POST /v1/documents``."""
    return next((name for name in ("_id", "id", "source") if record.get(name) is not None), "_id")


def _parse_record(record: Mapping[str, Any]) -> Parsed:
    own = {"title", "text", _name_field(record)}
    rest = {k: v for k, v in record.items() if k not in own}
    if isinstance(rest.get("metadata"), dict):
        inner = rest.pop("metadata")
        rest = inner | {k: v for k, v in rest.items() if v is not None or k not in inner}
    return record.get("title") or "", record["text"], rest


def _file_digest(path: str, raw: bytes) -> str:
    """SHA-256 of a file's bytes.

    Markdown that may have front matter has another digest than its bytes: an index without its metadata is out of date.
    """
    front = b"\nmetadata" if _kind(path) in {".md", ".markdown"} and b"-" in raw[:8] else b""
    return hashlib.sha256(raw + front).hexdigest()


def _parse_file(path: str, digest: str) -> Parsed:
    try:
        raw = Path(path).read_bytes()
        if _file_digest(path, raw) != digest:
            raise DataError("changed while it was read; run the command again")
    except OSError as error:
        raise DataError(reason_of(error)) from error
    kind = _kind(path)
    title, text, metadata = READERS[kind](raw) if kind in PLAIN_TEXT and _is_utf8(raw) else PARSER.parse(kind, raw)
    if not title.strip() and not text.strip():
        raise DataError("contains no text" + "; if it is a scan, run OCR first" * (kind == ".pdf"))
    return " ".join(_clean(title).split()), _clean(text), _clean(metadata)
