"""Files of questions: query logs and benign questions."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from casemate.errors import ConfigError

UTF8 = "utf-8-sig"  # with or without a byte order mark


def read_questions(name: str) -> Generator[tuple[str, str | None]]:
    """Reads id and text of each question in a file of plain or JSON lines. Without an id, the line number is the id.

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
    """The texts of all questions in a file; ``ConfigError``: it cannot be read or has none."""
    found = [text for _, text in read_questions(str(path)) if text]
    if not found:
        raise ConfigError(f"{path} has no questions; write one per line, or JSON lines with a 'text'")
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
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"cannot read the questions in {path}: {why}") from error


def _from_record(line: str, number: str) -> tuple[str, str | None]:
    """Id and text of a JSON line. The text is None if the line has none or is not JSON."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return number, None
    text = next((record[key] for key in ("text", "query", "question") if key in record), None)
    return str(record.get("_id", record.get("id", number))), text if isinstance(text, str) else None
