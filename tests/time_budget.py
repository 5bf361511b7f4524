"""Runs tests within a time budget, the least recently run files first: ``pytest -p tests.time_budget --minutes 30``.

Files whose tests were never run come first, then the others by the time of their last run, which is stored in
``.pytest_cache``. On a machine without that cache the number of commits rotates the files, so that every file has its
turn. Tests beyond the budget are skipped with a reason and counted in the summary: they did not pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

LAST_RUN = "casemate/last_run"
OUT_OF_TIME = "not run: the time budget is spent"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--minutes``."""
    parser.addoption("--minutes", type=float, default=None, help="Start no test after this many minutes.")


def pytest_configure(config: pytest.Config) -> None:
    """Sets the deadline once; worker processes of xdist inherit it."""
    minutes = config.getoption("minutes")
    if minutes is not None and not hasattr(config, "workerinput"):
        os.environ["CASEMATE_TEST_DEADLINE"] = str(time.time() + 60 * minutes)
        os.environ["CASEMATE_TEST_LAST_RUN"] = json.dumps(config.cache.get(LAST_RUN, {}) if config.cache else {})
        os.environ["CASEMATE_TEST_ROTATION"] = str(_commits(config.rootpath))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the files by the time of their last run, oldest first."""
    if config.getoption("minutes") is None:
        return
    last = json.loads(os.environ["CASEMATE_TEST_LAST_RUN"])
    files = sorted({_file(item) for item in items})
    if not last and files:
        start = int(os.environ["CASEMATE_TEST_ROTATION"]) % len(files)
        files = files[start:] + files[:start]
    order = {name: place for place, name in enumerate(sorted(files, key=lambda name: last.get(name, 0.0)))}
    items.sort(key=lambda item: order[_file(item)])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that would start after the deadline."""
    if time.time() > float(os.environ.get("CASEMATE_TEST_DEADLINE", "inf")):
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Stores the time of each completely run file, and reports the number of tests beyond the budget."""
    if config.getoption("minutes") is None:
        return
    skipped = {r.nodeid for r in terminalreporter.stats.get("skipped", []) if OUT_OF_TIME in str(r.longrepr)}
    run = {r.nodeid for key in ("passed", "failed") for r in terminalreporter.stats.get(key, [])}
    last = config.cache.get(LAST_RUN, {}) if config.cache else {}
    unfinished = {_name(nodeid) for nodeid in skipped}
    last |= {_name(nodeid): time.time() for nodeid in run if _name(nodeid) not in unfinished}
    if config.cache:
        config.cache.set(LAST_RUN, last)
    terminalreporter.write_line(f"time budget: {len(run)} tests run, {len(skipped)} left out")


def _file(item: pytest.Item) -> str:
    return _name(item.nodeid)


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _commits(root: Path) -> int:
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0
