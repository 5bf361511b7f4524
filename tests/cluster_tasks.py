"""Tasks for cluster tests, in a module that workers can import."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from casemate.errors import BackendError


def slow_every_third(number):
    """The first of every three items takes the longest."""
    time.sleep(0.2 * (number % 3 == 0))
    return number, os.getpid()


@dataclass(frozen=True)
class KillsWorker:
    """Kills the worker at the first attempt of every fourth item, and at every attempt of the item ``bad``."""

    folder: Path
    bad: int = -1

    def __call__(self, number):
        mark = self.folder / f"{number}"
        if number == self.bad or (number % 4 == 1 and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number


def refuse(number):
    raise BackendError(f"no {number} here", backend="fake", retryable=True)


@dataclass(frozen=True)
class AddsShared:
    shared: object

    def __call__(self, number):
        return self.shared.get() + number


def environment_of(name):
    """A variable of the worker's environment, and the id of its parent process."""
    return os.environ.get(name), os.getppid()


@dataclass(frozen=True)
class DotProducts:
    """Dot products of queries and shared vectors."""

    shared: object

    def __call__(self, Q):
        return Q @ self.shared.get().T
