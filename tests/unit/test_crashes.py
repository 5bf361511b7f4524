"""The crash benchmark finds what a store loses, and a few kills of each operation lose nothing."""

from __future__ import annotations

import random
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("forks processes", allow_module_level=True)

from benchmarks import crashes
from benchmarks.crashes import OPERATIONS, Campaign, Operation, Served, Watch, differences, versions

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only works and is killed


def test_versions_are_the_acknowledged_one_and_those_begun_since():
    told = ["begin a 1", "done a 1", "begin a 2", "begin b 1"]
    assert versions(told) == {"a": {"1", "2"}, "b": {"0", "1"}}
    assert versions([*told, "done a 2"])["a"] == {"2"}
    assert differences(versions(told), {"a": "2"}) == []
    assert len(differences(versions(told), {"a": "0", "b": "2", "c": "1"})) == 3


class Early(Campaign):
    """Acknowledges a trial before it is written."""

    name = "early"

    def work(self, tell):
        super().work(lambda line: tell(line.replace("begin", "done")))


def kill(kind: type[Operation], folder, monkeypatch, count) -> dict:
    monkeypatch.setattr(crashes, "BLOCK", count)
    found = {"kills": 0, "during": 0, "finished": 0, "steps": 0, "faults": []}
    crashes.block(kind(folder, random.Random(3)), found)
    assert found["kills"] == count
    return found


@pytest.mark.slow
def test_a_store_that_acknowledges_too_early_is_found(tmp_path, monkeypatch):
    """A kill must fall between the acknowledgement and the write, which the speed of the machine decides."""
    for attempt in range(20):
        (folder := tmp_path / str(attempt)).mkdir()
        if kill(Early, folder, monkeypatch, 15)["faults"]:
            return
    pytest.fail("300 kills found no trial that was acknowledged and lost")


class EarlyWatch(Watch):
    """Acknowledges a run when its first canary is asked."""

    def work(self, tell):
        super().work(lambda line: tell(line.replace("begin", "done")))


class Unguarded(Served):
    """Serves without the defense that withholds a document."""

    defenses = ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EarlyWatch, Unguarded])
def test_a_process_that_breaks_its_promise_is_found(kind, tmp_path, monkeypatch):
    for attempt in range(20):
        (folder := tmp_path / str(attempt)).mkdir()
        if kill(kind, folder, monkeypatch, 5)["faults"]:
            return
    pytest.fail("100 kills found no broken promise")


SLOW = {Served: [pytest.mark.slow]}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=SLOW.get(k, ()), id=k.name) for k in OPERATIONS])
def test_a_few_kills_lose_nothing(kind, tmp_path, monkeypatch):
    assert kill(kind, tmp_path, monkeypatch, 5)["faults"] == []
