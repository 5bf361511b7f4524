"""Conformance suite for executors (clusters)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from casemate.runtime.executor import Executor, Shared


@dataclass(frozen=True)
class Scale:
    """Multiplies by a shared number."""

    factor: Shared[int]

    def __call__(self, x: int) -> int:
        """The product."""
        return self.factor.get() * x


def _fail(x: int) -> int:
    if x == 3:
        raise ValueError("three")
    return x


def check_executor(executor: Executor) -> None:
    """Runs every check for an executor. The caller closes it."""
    assert executor.workers >= 1, f"workers is {executor.workers}; at least 1"
    assert isinstance(executor.local, bool), "'local' says whether all tasks run on this machine"
    assert list(executor.map(Scale(executor.share(3)), range(40))) == [3 * i for i in range(40)], (
        "results must come in the order of the items"
    )
    assert list(executor.map(len, [])) == [], "no items give no results"
    endless = executor.map(abs, itertools.count())
    assert list(itertools.islice(endless, 20)) == list(range(20)), "items must be read lazily"
    del endless
    done: list[int] = []
    for result in executor.map(abs, itertools.count(), lambda: len(done) >= 5):
        done.append(result)
        assert len(done) < 10_000, "map must end soon after 'stopped' returns True"
    try:
        list(executor.map(_fail, range(6)))
    except ValueError as error:
        assert "three" in str(error), "the error of a task must reach the caller unchanged"
    else:
        raise AssertionError("the error of a task must reach the caller")
