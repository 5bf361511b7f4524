"""What all commands share: where they print, their exit codes and their common options."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from casemate.errors import ConfigError
from casemate.words import UNREADABLE, UNSAFE

OK, FAILED, ERROR, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 130
UTF8 = "utf-8-sig"  # with or without a byte order mark

say = Console(stderr=True, highlight=False)
out = Console(highlight=False)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file. Default: casemate.yaml here, if any.")
]
Json = Annotated[bool, typer.Option("--json", help="One machine-readable object on stdout.")]
Tenant = Annotated[str, typer.Option(help="Whose documents.")]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="CLUSTER",
        help="Ray workers that share the work: local (this machine), auto, HOST:PORT, ray://HOST:PORT.",
    ),
]


def print_json(value: Any, indent: int | None = 2) -> None:
    """One object on stdout."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    print(UNSAFE.sub(lambda c: f"\\u{ord(c[0]):04x}", text))


def plain(text: str) -> str:
    r"""Without what makes a terminal do things: documents and file names are not ours.

    >>> plain("safe\u202etxt.exe\x1b[2J")
    'safe�txt.exe�[2J'
    """
    return UNSAFE.sub(UNREADABLE, text)


def shown(text: str) -> str:
    """Text that is not ours, as rich prints it."""
    return escape_markup(plain(text))


def bar() -> Progress:
    """A progress bar on stderr, if somebody is looking."""
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=say, transient=True, disable=not say.is_terminal)


def read_questions(name: str) -> Iterator[tuple[str, str | None]]:
    """Id and text of each question in a file, plain or json lines; the line number where there is no id.

    Raises:
        ConfigError: If the file cannot be read.
    """
    path = Path(name)
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.lstrip().startswith("{"):
                yield _from_record(line, str(number))
            elif line.strip():
                yield str(number), line.strip()


def questions_in(path: Path) -> list[str]:
    """The texts of all questions in a file.

    Raises:
        ConfigError: If the file cannot be read, or holds none.
    """
    found = [text for _, text in read_questions(str(path)) if text]
    if not found:
        raise ConfigError(f"{path} holds no questions; write one a line, or as json with a 'text'")
    return found


@contextmanager
def _open_text(path: Path) -> Iterator[Any]:
    try:
        if str(path) == "-":
            yield sys.stdin
            return
        opened = gzip.open(path, "rt", encoding=UTF8) if path.suffix == ".gz" else path.open(encoding=UTF8)
        with opened as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"cannot read the questions in {path}: {error}") from error


def _from_record(line: str, number: str) -> tuple[str, str | None]:
    """Id and text of a json line; None for the text where there is none, or the line is no json."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return number, None
    text = next((record[key] for key in ("text", "query", "question") if key in record), None)
    return str(record.get("_id", record.get("id", number))), text if isinstance(text, str) else None
