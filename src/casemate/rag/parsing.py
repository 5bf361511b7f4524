"""Extracts title, text and metadata of a file, by the suffix of its name."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import yaml

from casemate.errors import DataError
from casemate.types import ACL
from casemate.types import READERS as CLIENTS

Parsed: TypeAlias = tuple[str, str, Mapping[str, Any]]  # title, text, metadata

_UTF16, _UTF32 = (b"\xff\xfe", b"\xfe\xff"), (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
_ENCODINGS = "cp1252 cp1250 cp1251 cp932 euc_jp gb18030 big5 cp949 koi8_r cp1253 cp1254 cp1255 cp1256".split()
"""Candidate encodings besides Unicode. With all of Python's encodings as candidates, short texts are misdetected."""
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?((?:iso-8859|windows|koi8|shift_jis|euc|gb|big5)[\w-]*)", re.I)
_FRONT_MATTER = re.compile(
    r"---[ \t]*\n(?=(?:#[^\n]*\n)*[\"']?[\w-]+[\"']?[ \t]*:)(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.S
)
_RESTRICTION = re.compile(
    rf"(?:^|[?{{\[,-])[ \t]*+[\"']?[ \t]*+({ACL}|{CLIENTS})[ \t]*+[\"']?[ \t]*+(?:[:=]|$)", re.M | re.I
)
_FRONT_START = re.compile(r"\s*(?:---|\+\+\+)(?=\s)(?![^\n]*---[ \t]*$)", re.M)  # +++: TOML. No --- heading ---
_CLOSING = re.compile(r"^(?:---|\.\.\.|\+\+\+)[ \t]*$", re.M)
_TAG = re.compile(r"(?:!<[^>\n]{0,100}>|[!&][^\s,\[\]{}]{0,100})[ \t]+")  # also an anchor; bounded: linear time
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|\n[ \t]*)")
_FRONT_MATTER_CHARACTERS = 16_000  # yaml reads about 100,000 a second
_BREAKS = dict.fromkeys(
    "address article aside blockquote body br caption dd details div dl dt fieldset figcaption figure footer"
    " form h1 h2 h3 h4 h5 h6 head header hr li main ol option p pre section summary table tr ul".split(),
    "\n",
) | {"td": " ", "th": " "}
_DROPPED = frozenset(("script", "style", "nav", "template", "title"))


def _decoded(raw: bytes, declared: str = "") -> str:
    """Decodes a text and normalizes line ends: as Unicode, else as declared, else by detection."""
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
            raise DataError("unknown encoding; save it as UTF-8")
        text = str(best)
    return text.replace("\r\n", "\n").replace("\r", "\n")


class _Yaml(yaml.BaseLoader):
    """Reads every value as text. Repeated keys are errors.

    So are aliases, because they can expand a short text to gigabytes.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            raise yaml.YAMLError("a repeated key")
        return found


def _front_metadata(front: str) -> dict[str, Any]:
    """The keys of a front matter except the title. Values are texts, lists and mappings.

    Raises:
        DataError: If it seems to restrict access, and the restriction would be ignored.
    """
    found: Any = None
    if len(front) <= _FRONT_MATTER_CHARACTERS:
        with suppress(yaml.YAMLError, RecursionError):
            found = yaml.load(front, _Yaml)
    found = found if isinstance(found, dict) else {}
    _refuse_ignored_restriction(front, found)
    return {key: value for key, value in found.items() if key != "title"}


def _without_escapes(front: str) -> str:
    """A front matter in which keys can be searched: without tags and anchors, with escapes and line breaks replaced."""

    def character(escape: re.Match[str]) -> str:
        code = int(escape[1] or escape[2] or escape[3] or "0", 16)
        return chr(code) if 0 < code <= sys.maxunicode else ""

    return _ESCAPE.sub(character, _TAG.sub("", "\n".join(front.splitlines())))


def _refuse_ignored_restriction(front: str, found: Mapping[str, Any]) -> None:
    """Raises ``DataError`` if a front matter seems to restrict access by a key that was not found."""
    read = {key for key in found if str(key).lower() in (ACL, CLIENTS)}
    if named := next((one[1] for one in _RESTRICTION.finditer(_without_escapes(front)) if one[1] not in read), ""):
        raise DataError(
            f"its front matter has {named!r}, but not as a key of its own. Write a line such as {named.lower()}: [name]"
            f" between two lines --- at the start of a Markdown file, in valid YAML without aliases and repeated keys,"
            f" of at most {_FRONT_MATTER_CHARACTERS:,} characters"
        )


def _unread_front(text: str) -> str:
    """What may be meant as front matter in a text without one: to the next line that closes one, or the start."""
    if not (opening := _FRONT_START.match(text)):
        return ""
    start = opening.end()
    closing = _CLOSING.search(text, start)
    return text[start : closing.start() if closing else start + _FRONT_MATTER_CHARACTERS]


def _markdown(raw: bytes) -> Parsed:
    """Title from the front matter, else from the first level-1 heading, which is removed from the text."""
    text, metadata = _decoded(raw), dict[str, Any]()
    if front := _FRONT_MATTER.match(text):
        text, metadata = text[front.end() :], _front_metadata(front[1])
        if title := re.search(r"^title[ \t]*:[ \t]*(\S.*)$", front[1], re.M):
            return title[1].strip().strip("\"'"), text, metadata
    else:
        _refuse_ignored_restriction(_unread_front(text), {})
    lines, fence = text.split("\n"), ""
    for i, line in enumerate(lines):
        mark = line.lstrip()[:3]
        if mark in {"```", "~~~"}:  # "# ..." inside code is not a heading
            fence = "" if mark == fence else fence or mark
        elif line.startswith("# ") and not fence:
            return line[2:].rstrip().removesuffix(" #"), "\n".join(lines[:i] + lines[i + 1 :]), metadata
    return "", text, metadata


def _plain(raw: bytes) -> Parsed:
    """A text without metadata: one that begins like front matter with a restriction is refused."""
    text = _decoded(raw)
    _refuse_ignored_restriction(_unread_front(text), {})
    return "", text, {}


def _html(raw: bytes) -> Parsed:
    """Title from <title>, else from <h1>; block elements are put on separate lines."""
    from bs4 import BeautifulSoup, Tag

    charset = _CHARSET.search(raw[:4096])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it takes short pages for URLs, and XHTML for XML
        page = BeautifulSoup(_decoded(raw, charset[1].decode() if charset else ""), "lxml")
    titles = [_text_of(tag) for tag in (page.find("title"), page.find("h1")) if isinstance(tag, Tag)]
    return next(filter(None, titles), ""), _text_of(page), {}


def _text_of(element: Any) -> str:
    """Visible text of an element. Iterative, because nesting may exceed the recursion limit."""
    from bs4.element import PreformattedString, Tag

    parts: list[str] = []
    waiting: list[Any] = list(reversed(element.contents))
    while waiting:
        node = waiting.pop()
        if isinstance(node, Tag) and node.name not in _DROPPED:
            separator = [_BREAKS[node.name]] if node.name in _BREAKS else []
            waiting += [*(separator if node.contents else []), *reversed(node.contents), *separator]
        elif not isinstance(node, Tag | PreformattedString):  # PreformattedString: comments, declarations
            parts.append(node if type(node) is str else re.sub(r"\s+", " ", node))
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _pdf(raw: bytes) -> Parsed:
    """Text of the pages, separated by blank lines."""
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it logs every flaw that it works around
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = PdfReader(io.BytesIO(raw))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DataError("encrypted; save it without a password")
        text = "\n\n".join(page.extract_text() for page in reader.pages)
        return str(reader.metadata.title or "") if reader.metadata else "", text, {}


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, with the remedy."""
    why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"[:200]
    why = why.encode(errors="replace").decode().replace("\0", " ")
    return f"cannot be read ({why}); repair it, grant read permission, or remove it"


READERS: Mapping[str, Callable[[bytes], Parsed]] = {
    ".txt": _plain,
    **dict.fromkeys((".md", ".markdown"), _markdown),
    **dict.fromkeys((".html", ".htm"), _html),
    ".pdf": _pdf,
}
"""Functions from a file's content to title, text and metadata, by suffix."""
PLAIN_TEXT = frozenset((".txt", ".md", ".markdown"))
"""Suffixes whose readers are safe on any UTF-8: they take linear time, and parse short front matter only."""
