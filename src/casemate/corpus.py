"""Reading what an owner has. What cannot be read becomes a ``Problem``; the rest is read all the same."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import math
import os
import re
import stat
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from casemate.errors import DataError

Parsed: TypeAlias = tuple[str, str, Mapping[str, Any]]  # title, text, metadata

BEIR = ("corpus.jsonl", "corpus.jsonl.gz")
QUESTIONS = ("queries.jsonl", "qrels")  # beside it they tell a BEIR data set, of which the corpus alone is read
RECORDS = (".jsonl", ".jsonl.gz")
MB = 1_000_000
MAX_ID = 512  # characters; databases refuse long keys

_SURROGATE = re.compile("[\ud800-\udfff]")
_UTF16, _UTF32 = (b"\xff\xfe", b"\xfe\xff"), (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
_ENCODINGS = "cp1252 cp1250 cp1251 cp932 euc_jp gb18030 big5 cp949 koi8_r cp1253 cp1254 cp1255 cp1256".split()
"""Other encodings of real files. Where all that Python knows are candidates, short texts are misread."""
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?((?:iso-8859|windows|koi8|shift_jis|euc|gb|big5)[\w-]*)", re.I)
_FRONT_MATTER = re.compile(r"---[ \t]*\n(?=[\w-]+[ \t]*:)(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.S)
_BREAKS = dict.fromkeys(
    "address article aside blockquote body br caption dd details div dl dt fieldset figcaption figure footer"
    " form h1 h2 h3 h4 h5 h6 head header hr li main ol option p pre section summary table tr ul".split(),
    "\n",
) | {"td": " ", "th": " "}
_DROPPED = frozenset(("script", "style", "nav", "template", "title"))


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

    def __init__(self, path: Path, max_mb: float = 64) -> None:
        """Looks whether there is something to read; files, and lines of jsonl, beyond ``max_mb`` will not be.

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
        if next(self._files(), None) is None:
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


def _decoded(raw: bytes, declared: str = "") -> str:
    """Text with line feeds as line ends. In Unicode, else as the file declares, else as is likeliest."""
    bom = "utf-32" if raw.startswith(_UTF32) else "utf-16" if raw.startswith(_UTF16) else ""
    if not bom and b"\0" in raw[:8192]:
        raise DataError("binary (NUL bytes), not text; save it as UTF-8 if it is text")
    for encoding in [bom] if bom else ["utf-8-sig", declared]:
        with suppress(UnicodeDecodeError, LookupError):
            text = raw.decode(encoding)
            break
    else:
        from charset_normalizer import from_bytes

        best = None if bom else from_bytes(raw, cp_isolation=_ENCODINGS).best()
        if best is None:
            raise DataError("in no encoding that can be told; save it as UTF-8")
        text = str(best)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _markdown(raw: bytes) -> tuple[str, str]:
    """The title is that of the front matter, else the first main heading, which is taken out of the text."""
    text = _decoded(raw)
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        if title := re.search(r"^title[ \t]*:[ \t]*(\S.*)$", front[1], re.M):
            return title[1].strip().strip("\"'"), text
    lines, fence = text.split("\n"), ""
    for i, line in enumerate(lines):
        mark = line.lstrip()[:3]
        if mark in {"```", "~~~"}:  # a comment in code is no heading
            fence = "" if mark == fence else fence or mark
        elif line.startswith("# ") and not fence:
            return line[2:].rstrip().removesuffix(" #"), "\n".join(lines[:i] + lines[i + 1 :])
    return "", text


def _html(raw: bytes) -> tuple[str, str]:
    """The title is that of the page, else its first heading; blocks are on lines of their own."""
    from bs4 import BeautifulSoup, Tag

    charset = _CHARSET.search(raw[:4096])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it guesses that short pages are addresses, and that XHTML is XML
        page = BeautifulSoup(_decoded(raw, charset[1].decode() if charset else ""), "lxml")
    titles = [_text_of(tag) for tag in (page.find("title"), page.find("h1")) if isinstance(tag, Tag)]
    return next(filter(None, titles), ""), _text_of(page)


def _text_of(element: Any) -> str:
    """What a reader sees. Not recursive: pages may nest deeper than the stack."""
    from bs4.element import PreformattedString, Tag

    parts: list[str] = []
    waiting: list[Any] = list(reversed(element.contents))
    while waiting:
        node = waiting.pop()
        if isinstance(node, Tag) and node.name not in _DROPPED:
            separator = [_BREAKS[node.name]] if node.name in _BREAKS else []
            waiting += [*(separator if node.contents else []), *reversed(node.contents), *separator]
        elif not isinstance(node, Tag | PreformattedString):  # the latter: comments, declarations
            parts.append(node if type(node) is str else re.sub(r"\s+", " ", node))
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _pdf(raw: bytes) -> tuple[str, str]:
    """Text of the pages with blank lines in between."""
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of each flaw it works around
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = PdfReader(io.BytesIO(raw))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DataError("encrypted; save it without a password")
        text = "\n\n".join(page.extract_text() for page in reader.pages)
        return str(reader.metadata.title or "") if reader.metadata else "", text


READERS: Mapping[str, Callable[[bytes], tuple[str, str]]] = {
    ".txt": lambda raw: ("", _decoded(raw)),
    **dict.fromkeys((".md", ".markdown"), _markdown),
    **dict.fromkeys((".html", ".htm"), _html),
    ".pdf": _pdf,
}
"""Title and text from a file's content, by the ending of its name."""
