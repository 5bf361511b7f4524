"""The crash benchmark detects lost writes, and a few kills of each operation lose no data."""

from __future__ import annotations

import random
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("forks processes", allow_module_level=True)

from benchmarks import crashes
from benchmarks.crashes import OPERATIONS, Campaign, Operation, Served, Watch, differences, versions

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only works and is killed


def test_possible_versions_are_the_last_acknowledged_and_those_started_later():
    log_lines = ["begin a 1", "done a 1", "begin a 2", "begin b 1"]
    assert versions(log_lines) == {"a": {"1", "2"}, "b": {"0", "1"}}
    assert versions([*log_lines, "done a 2"])["a"] == {"2"}
    assert differences(versions(log_lines), {"a": "2"}) == []
    assert len(differences(versions(log_lines), {"a": "0", "b": "2", "c": "1"})) == 3


class AcknowledgesTrialsEarly(Campaign):
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
def test_store_that_acknowledges_too_early_is_detected(tmp_path, monkeypatch):
    """A kill must occur between acknowledgement and write, which depends on the speed of the machine."""
    for attempt in range(20):
        (folder := tmp_path / str(attempt)).mkdir()
        if kill(AcknowledgesTrialsEarly, folder, monkeypatch, 15)["faults"]:
            return
    pytest.fail("300 kills found no trial that was acknowledged and lost")


class AcknowledgesRunsEarly(Watch):
    """Acknowledges a run when its first canary is asked."""

    def work(self, tell):
        super().work(lambda line: tell(line.replace("begin", "done")))


class Unguarded(Served):
    """Serves without the defense that withholds a document."""

    defenses = ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AcknowledgesRunsEarly, Unguarded])
def test_process_that_violates_its_guarantee_is_detected(kind, tmp_path, monkeypatch):
    for attempt in range(20):
        (folder := tmp_path / str(attempt)).mkdir()
        if kill(kind, folder, monkeypatch, 5)["faults"]:
            return
    pytest.fail("100 kills found no broken promise")


SLOW = {Served: [pytest.mark.slow]}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=SLOW.get(k, ()), id=k.name) for k in OPERATIONS])
def test_few_kills_of_each_operation_lose_no_data(kind, tmp_path, monkeypatch):
    assert kill(kind, tmp_path, monkeypatch, 5)["faults"] == []
