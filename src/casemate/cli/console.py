"""Output, exit codes and common options of all commands."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn

from casemate.reports.durations import NO_BREAK_SPACE, duration
from casemate.text.tokens import REPLACEMENT_CHARACTER, UNSAFE_CHARACTERS

LINE_SECONDS, MAX_LINE_SECONDS = 10.0, 60.0
"""First and longest time between two lines of progress where stderr is not a terminal. It doubles from line to line."""
MIN_ESTIMATED_PERCENT, SPEED_SECONDS = 10.0, 10.0
"""Share of a step from which the time left is estimated, and the last seconds whose speed counts."""


class TextConsole(Console):
    """Leaves the wrapping of texts to the terminal, so that lines are whole in files, pipes and copies."""

    def print(self, *objects: Any, **options: Any) -> None:
        if all(isinstance(one, str) for one in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)


say = TextConsole(stderr=True, highlight=False)
out = TextConsole(highlight=False)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file. Default: casemate.yaml here, if any.")
]
Json = Annotated[bool, typer.Option("--json", help="One machine-readable object on stdout.")]
Tenant = Annotated[str, typer.Option(help="Tenant that owns the documents.")]
On = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Run on Ray workers: local (this machine), auto, HOST:PORT or ray://HOST:PORT.",
    ),
]


class Code(IntEnum):
    """Exit codes of the commands."""

    OK = 0
    FAILED = 1
    ERROR = 2
    INCOMPLETE = 3
    INTERRUPTED = 130


def is_terminal() -> bool:
    """Whether a user can be asked: input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_json(value: Any, indent: int | None = 2) -> None:
    """Prints one JSON object to stdout. On one line (``indent`` is None) it is ASCII, so that no reader splits it."""
    text = json.dumps(value, ensure_ascii=indent is None, indent=indent, default=str)
    print(UNSAFE_CHARACTERS.sub(lambda c: f"\\u{ord(c[0]):04x}", text))


def plain(text: str) -> str:
    r"""Replaces terminal control characters in untrusted text, such as documents and file names.

    >>> plain("safe\u202etxt.exe\x1b[2J")
    'safe�txt.exe�[2J'
    """
    return UNSAFE_CHARACTERS.sub(REPLACEMENT_CHARACTER, text)


def shown(text: str) -> str:
    """Untrusted text, safe to print with rich markup."""
    return escape_markup(plain(text))


def note(text: str) -> None:
    """Prints a remark to stderr."""
    say.print(f"[yellow]note:[/yellow] {text}")


class _ProgressLines(Progress):
    """Progress for logs and pipes: one line per unfinished task, after 10 s, 30 s, 70 s and then each minute."""

    def start(self) -> None:
        self._ended = threading.Event()
        threading.Thread(target=self._print_lines, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _print_lines(self) -> None:
        pause = LINE_SECONDS
        while not self._ended.wait(pause):
            pause = min(2 * pause, MAX_LINE_SECONDS)
            for task in self.tasks:
                if not task.finished:
                    say.print(_progress_line(task))


def _progress_line(task: Task) -> str:
    """One line about an unfinished task: n of N, or a percentage of bytes; without a total, the count or the time."""
    if task.total and task.fields.get("unit") == "bytes":
        done = f"{task.percentage:.0f} % "
    elif task.total:
        done = f"{task.completed:,.0f} of {task.total:,.0f} "
    else:
        done = f"{task.completed:,.0f} done " if task.completed else ""
    known = not task.total or task.percentage >= MIN_ESTIMATED_PERCENT  # the first items are often the slowest
    left, took = task.time_remaining if known else None, duration(max(1, round(task.elapsed or 0)))
    remaining = f", about {duration(max(1, round(left)))} left" if left is not None else ""
    return f"{task.description}: {done}after {took}{remaining}".replace(NO_BREAK_SPACE, " ")


def bar() -> Progress:
    """Progress on stderr: a bar on a terminal, otherwise lines with the time left."""
    if not say.is_terminal:
        return _ProgressLines(console=say, disable=True, speed_estimate_period=SPEED_SECONDS)
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=say, transient=True)


@contextmanager
def counted_errors() -> Iterator[None]:
    """Logs each error of the guard once at the end, with its number. Else each question of a run logs the same one."""
    log = logging.getLogger("casemate.guard.guard")
    counts: Counter[str] = Counter()

    def count(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        counts[record.getMessage()] += 1
        return False

    log.addFilter(count)
    try:
        yield
    finally:
        log.removeFilter(count)
        for message, number in counts.items():
            log.error("%s%s", message, f" ({number} times)" if number > 1 else "")


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Turns Ctrl-C into a message and its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        say.print(message)
        raise typer.Exit(Code.INTERRUPTED) from None


@contextmanager
def show_progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Progress of one step of a campaign (see `Steps`)."""
    with bar() as progress:
        task = progress.add_task(title, total=total)
        yield lambda n: progress.advance(task, n)
