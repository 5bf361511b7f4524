"""Reading what an owner has. What cannot be read becomes a ``Problem``; the rest is read all the same."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from casemate.errors import DataError
from casemate.formats import READERS

Parsed: TypeAlias = tuple[str, str, Mapping[str, Any]]  # title, text, metadata

BEIR = ("corpus.jsonl", "corpus.jsonl.gz")
QUESTIONS = ("queries.jsonl", "qrels")  # beside it they tell a BEIR data set, of which the corpus alone is read
RECORDS = (".jsonl", ".jsonl.gz")
MB = 1_000_000
MAX_ID = 512  # characters; databases refuse long keys

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was not read.

    Attributes:
        where: Path relative to the corpus, with ``:line`` for a record.
        reason: What is the matter, and what to do.
        harmless: Nothing is lost: there was nothing in it.
    """

    where: str
    reason: str
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one record of a jsonl file, not parsed yet.

    Attributes:
        name: The record's id, or the file's path relative to the corpus with forward slashes.
        digest: SHA-256 of the content: of the file's bytes, or of the record as canonical JSON.
        size: Bytes read, for progress.
        parse: Returns title, text and metadata, title and text not both blank. Raises a ``DataError``, whose
            message is fit for the reason of a ``Problem``, if it cannot.
    """

    name: str
    digest: str
    size: int
    parse: Callable[[], Parsed] = field(repr=False, compare=False)


class Corpus:
    """The sources under a path, which may be iterated again and again; each time the disk is read anew.

    Attributes:
        path: The folder or file.
        problems: What was not read, filled while ``sources()`` is iterated.
        unread: Names of sources that exist but could not be read this time.
        incomplete: Whether there may be sources whose names are unknown: what is missing need not be gone.
        ignored: Number of files of other kinds, and of things that are no files.
    """

    def __init__(self, path: Path, max_mb: float = 64, *, empty: bool = False) -> None:
        """Looks whether there is something to read; files, and lines of jsonl, beyond ``max_mb`` will not be.

        Args:
            path: A folder or a file.
            max_mb: Megabytes of the largest file, or line of a jsonl file, that is read.
            empty: Whether there may be nothing, because all was taken out on purpose.

        Raises:
            DataError: If nothing is there, it may not be read, or nothing in it is of a known kind.
        """
        self.path = Path(os.path.abspath(path))
        self._limit = int(max_mb * MB)
        self._too_big = f"more than max_file_mb ({max_mb:g} MB); raise that, or split it"
        self._folder = os.path.isdir(path)
        if not self._folder and not os.path.isfile(path):
            raise DataError(f"no file or folder at {path}; give the path of your documents")
        if not os.access(path, os.R_OK | os.X_OK if self._folder else os.R_OK):
            raise DataError(f"{path} may not be read; give this user the right to read it")
        self._reset()
        if not empty and next(self._files(), None) is None:
            why = "".join(f"; {p.where}: {p.reason}" for p in self.problems[:1])
            raise DataError(f"{path} holds nothing of a known kind ({', '.join((*READERS, *RECORDS))}){why}")
        self._reset()

    def sources(self) -> Iterator[Source]:
        """All sources in the order of their paths, no name twice. Records are read one by one."""
        self._reset()
        names: set[str] = set()
        for name, path in self._files():
            found = self._records(name, path) if _kind(name) in RECORDS else self._file(name, path)
            for where, source in found:
                if source.name in names:
                    self._problem(where, f"a second {source.name[:80]!r}; make names unique, or take it out")
                else:
                    names.add(source.name)
                    yield source

    def _reset(self) -> None:
        self.problems: list[Problem] = []
        self.unread: set[str] = set()
        self.incomplete = False
        self.ignored = 0

    def _problem(self, where: str, reason: str, unread: str = "", unknown: bool = False) -> None:
        """Notes what was not read: a source of that name, or sources whose names are unknown."""
        self.problems.append(Problem(where, reason))
        self.unread.update([unread] if unread else [])
        self.incomplete |= unknown

    def _files(self) -> Iterator[tuple[str, str]]:
        """Name and path of each file of a known kind. Links come last: who has a name of its own keeps it."""
        if not self._folder:
            yield from [(_name(self.path.name), str(self.path))] if _kind(self.path.name) else []
            return
        root = os.path.realpath(self.path)
        inside = os.path.join(root, "")
        seen: set[str] = set()  # real paths, so that neither loops nor two ways to one file matter
        waiting = deque([(root, root)])
        while waiting:
            path, real = waiting.pop()
            name = _name(path[len(inside) :])
            mode = self._mode(name, path, stray=not os.path.join(real, "").startswith(inside))
            if not mode or real in seen:
                continue
            if stat.S_ISDIR(mode):
                seen.add(real)
                paths = {n: os.path.join(path, n) for n in self._listed(name, path)}
                links = {n: p for n, p in paths.items() if os.path.islink(p)}
                waiting.extend((paths[n], os.path.join(real, n)) for n in reversed(paths) if n not in links)
                waiting.extendleft((p, os.path.realpath(p)) for p in links.values())
            elif stat.S_ISREG(mode) and _kind(name):
                seen.add(real)
                yield name, path
            else:
                self.ignored += 1

    def _mode(self, name: str, path: str, stray: bool) -> int:
        """Mode of a file or folder; 0 if it must not or cannot be read."""
        kind, unknown = _kind(name), False
        try:
            mode = os.stat(path).st_mode
            reason = "a link out of the corpus, which is not followed; put the thing itself here"
        except OSError as error:
            mode, reason, stray = 0, _refused(error), True
            unknown = kind in RECORDS or not kind and not os.path.islink(path)  # it may be a folder
        if not stray:
            return mode
        if kind or unknown or stat.S_ISDIR(mode):
            self._problem(name or ".", reason, name, unknown)
        else:
            self.ignored += 1
        return 0

    def _listed(self, name: str, folder: str) -> list[str]:
        """Names of what is to be read of a folder, sorted."""
        try:
            names = sorted(n for n in os.listdir(folder) if not n.startswith("."))
        except OSError as error:
            self._problem(name or ".", _refused(error), unknown=True)
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
            self._problem(name, _refused(error), unread=name)
            return
        if len(raw) > self._limit:
            self._problem(name, f"{size / MB:.3g} MB, {self._too_big}", unread=name)
        elif not raw.strip():
            self.problems.append(Problem(name, "empty", harmless=True))
        else:
            digest = hashlib.sha256(raw).hexdigest()
            yield name, Source(name, digest, len(raw), partial(_parse_file, path, digest))

    def _records(self, name: str, path: str) -> Iterator[tuple[str, Source]]:
        """Where each record is, and the record."""
        number = 0
        try:
            for number, line in enumerate(_lines(path, self._limit), 1):
                if len(line) > self._limit:
                    self._problem(f"{name}:{number}", self._too_big, unknown=True)
                elif line.strip():
                    yield from self._record(f"{name}:{number}", line)
        except (OSError, EOFError, zlib.error) as error:
            self._problem(name, f"after line {number} it {_refused(error)}", unknown=True)
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
            self._problem(where, "'text' must be a string, and 'title' too if it is there", unread=name)
        elif not text.strip() and not (title or "").strip():
            self.problems.append(Problem(where, "empty: neither text nor title", harmless=True))
        else:
            canonical = json.dumps(record, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            digest = hashlib.sha256(canonical.encode()).hexdigest()
            yield where, Source(name, digest, len(line), partial(_parse_record, record))


def _kind(name: str) -> str:
    """The ending by which a file is read; empty if it is of no known kind."""
    return next((k for k in (*READERS, *RECORDS) if name.lower().endswith(k)), "")


def _name(path: str) -> str:
    """A path that any database and any encoding takes."""
    return os.fsencode(path).decode("utf-8", "replace").replace(os.sep, "/")


def _refused(error: Exception) -> str:
    why = getattr(error, "strerror", None) or _clean(f"{type(error).__name__}: {error}"[:200])
    return f"cannot be read ({why}); mend it, let this user read it, or take it away"


def _clean(value: Any) -> Any:
    """The same without what databases refuse: NUL, lone surrogates, numbers that are not finite."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value).replace("\0", " ")
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: str, limit: int) -> Iterator[bytes]:
    """Lines of a file; of one longer than the limit just a beginning that is longer than the limit, too."""
    zipped = path.lower().endswith(".gz")
    if zipped and not os.path.getsize(path):
        raise EOFError("0 bytes are no gzip file")
    with gzip.open(path) if zipped else open(path, "rb") as file:
        while line := file.readline(limit + 1):
            yield line
            while line and not line.endswith(b"\n"):
                line = file.readline(MB)


def _load(line: bytes) -> tuple[str, dict[str, Any]]:
    """Id and content of a record."""
    try:
        record = _clean(json.loads(line.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON in UTF-8 ({error}); mend the line") from error
    if not isinstance(record, dict):
        raise DataError('not an object; a line is {"_id": ..., "text": ...}')
    name = record.get("id") if record.get("_id") is None else record["_id"]
    if isinstance(name, bool) or not isinstance(name, str | int) or not 0 < len(str(name)) <= MAX_ID:
        raise DataError(f"no '_id' or 'id' that is a string of 1 to {MAX_ID} characters or a whole number")
    return str(name), record


def _parse_record(record: Mapping[str, Any]) -> Parsed:
    own = {"title", "text", "id" if record.get("_id") is None else "_id"}
    rest = {k: v for k, v in record.items() if k not in own}
    if isinstance(rest.get("metadata"), dict):
        rest = rest.pop("metadata") | rest
    return record.get("title") or "", record["text"], rest


def _parse_file(path: str, digest: str) -> Parsed:
    try:
        raw = Path(path).read_bytes()
        if hashlib.sha256(raw).hexdigest() != digest:
            raise DataError("changed while it was read; run again")
        title, text = READERS[_kind(path)](raw)
    except DataError:
        raise
    except Exception as error:  # parsers raise anything on damaged or hostile files
        raise DataError(_refused(error)) from error
    if not title.strip() and not text.strip():
        raise DataError("has no text; if it is scanned, recognise the text (OCR) first")
    return " ".join(_clean(title).split()), _clean(text), {}
