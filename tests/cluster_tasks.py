"""What the workers of a cluster are given to do in tests: of a module, so that they find it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from casemate.errors import BackendError


def patient(number):
    """The first of every three takes longest."""
    time.sleep(0.2 * (number % 3 == 0))
    return number, os.getpid()


@dataclass(frozen=True)
class Fatal:
    """Kills the worker when it comes to an item for the first time; ever so many times for a bad one."""

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
class Plus:
    shared: object

    def __call__(self, number):
        return self.shared.get() + number


def told(name):
    """A variable of the worker's environment, and what it runs as."""
    return os.environ.get(name), os.getppid()


@dataclass(frozen=True)
class Dots:
    """Similarity of questions to shared vectors."""

    shared: object

    def __call__(self, Q):
        return Q @ self.shared.get().T
