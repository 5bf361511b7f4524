"""The experiments of a paper, run on the data at hand, its numbers beside ours.

Each says what differs in the setting. Where that is much, the relation counts: guarded against unguarded, the published
rule against the calibrated guard.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from casemate.errors import ConfigError, DataError
from casemate.redteam import Steps
from casemate.reproduce import attackers, cascades, detection, extraction, private, utility
from casemate.reproduce.laboratory import HELP, Setting
from casemate.reproduce.result import Result, Row, shown

__all__ = ["NAMES", "Result", "Row", "Setting", "data_folder", "reproduce", "require", "shown"]

Run: TypeAlias = Callable[[Setting, Steps, ExitStack], Awaitable[Result]]

RUNS: Mapping[str, Run] = {
    "mirabel-table1": detection.table1,
    "mirabel-table2": detection.table2,
    "mirabel-table3": utility.table3,
    "mirabel-table4": attackers.table4,
    "mirabel-table5": attackers.table5,
    "mirabel-table6": private.table6,
    "mirabel-table7": private.table7,
    "mirabel-table8": detection.table8,
    "mirabel-table9": attackers.table9,
    "mirabel-table10": private.table10,
    "mirabel-table11": private.table11,
    "mirabel-figure1": detection.figure1,
    "mirabel-figure3": attackers.figure3,
    "ragfort-table1": extraction.table1,
    "ragfort-table2": cascades.table2,
    "ragfort-table3": cascades.table3,
    "ragfort-figure1": extraction.figure1,
}
NAMES = tuple(RUNS)
DATA = "CASEMATE_DATA"
BESIDE = Path("../shared/data")


async def reproduce(name: str, setting: Setting, steps: Steps) -> Result:
    """Runs one experiment, or goes on with what was interrupted.

    Args:
        name: One of ``NAMES``.
        setting: How large, and where.
        steps: Shows progress.

    Raises:
        ConfigError: If there is none of that name.
        DataError: If the data is not there.
    """
    run = require(name)
    with ExitStack() as opened:
        return await run(setting, steps, opened)


def require(name: str) -> Run:
    """The experiment of that name.

    Raises:
        ConfigError: If there is none; the message lists those there are.
    """
    if name not in RUNS:
        raise ConfigError(f"nothing to reproduce is called {name!r}; known: {', '.join(NAMES)}")
    return RUNS[name]


def data_folder(given: Path | None) -> Path:
    """Where the evaluation data is: as given, as ``CASEMATE_DATA`` says, or beside this folder.

    Raises:
        DataError: If it is nowhere.
    """
    named = given or Path(os.environ.get(DATA) or BESIDE)
    if not named.is_dir():
        raise DataError(f"the evaluation data is not at {named}; give its folder with --data or in {DATA} ({HELP})")
    return named
