"""Experiments of the papers, run on the available data, with published figures beside measured ones.

Each result lists the differences of its setting. Where they are large, compare relations: guarded with unguarded, the
published rule with the calibrated guard.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from casemate.errors import ConfigError, DataError, did_you_mean
from casemate.papers import attackers, cascades, detection, differential_privacy, extraction, utility
from casemate.papers.laboratory import HELP, Setting
from casemate.papers.result import Result, Row, shown
from casemate.protocols import Steps
from casemate.runtime.file_lock import exclusive_lock

__all__ = ["NAMES", "Result", "Row", "Setting", "data_folder", "describe", "reproduce", "require", "shown"]

Run: TypeAlias = Callable[[Setting, Steps, ExitStack], Awaitable[Result]]

RUNS: Mapping[str, Run] = {
    "mirabel-table1": detection.table1,
    "mirabel-table2": detection.table2,
    "mirabel-table3": utility.table3,
    "mirabel-table4": attackers.table4,
    "mirabel-table5": attackers.table5,
    "mirabel-table6": differential_privacy.table6,
    "mirabel-table7": differential_privacy.table7,
    "mirabel-table8": detection.table8,
    "mirabel-table9": attackers.table9,
    "mirabel-table10": differential_privacy.table10,
    "mirabel-table11": differential_privacy.table11,
    "mirabel-table12": attackers.table12,
    "mirabel-figure1": detection.figure1,
    "mirabel-figure3": attackers.figure3,
    "ragfort-table1": extraction.table1,
    "ragfort-table2": cascades.table2,
    "ragfort-table3": cascades.table3,
    "ragfort-figure1": extraction.figure1,
}
NAMES = tuple(RUNS)
LOCK = "experiment.lock"
"""Lock file in the folder of intermediate results while an experiment runs."""
DATA = "CASEMATE_DATA"
"""Environment variable with the folder of the evaluation data."""


async def reproduce(name: str, setting: Setting, steps: Steps) -> Result:
    """Runs one experiment of ``NAMES``, or resumes an interrupted one.

    Raises:
        ConfigError: If the name is unknown, or a draft is given without a reader.
        DataError: If the data or the model is missing.
        LockHeld: If another experiment runs in this folder.
    """
    run = require(name)
    if setting.draft and not setting.reader:
        raise ConfigError("a draft is given without a reader; give both, or neither for the offline pair")
    with ExitStack() as opened:
        opened.enter_context(exclusive_lock(setting.folder / LOCK, "an experiment", "choose another folder"))
        return await run(setting, steps, opened)


def require(name: str) -> Run:
    """Finds an experiment by name.

    Raises:
        ConfigError: If the name is unknown; the message lists the known ones.
    """
    if name not in RUNS:
        raise ConfigError(f"unknown experiment {name!r}{did_you_mean(name, NAMES)}")
    return RUNS[name]


def describe(name: str) -> str:
    """One sentence about an experiment.

    Raises:
        ConfigError: If the name is unknown.
    """
    return (require(name).__doc__ or "").strip().splitlines()[0]


def data_folder(given: Path | None) -> Path:
    """Folder of the evaluation data: the argument, else the environment variable ``CASEMATE_DATA``, else ``data``.

    Raises:
        DataError: If one is given and does not exist. An experiment checks the files that it reads.
    """
    named = given or (Path(os.environ[DATA]) if os.environ.get(DATA) else None)
    if named is not None and not named.is_dir():
        raise DataError(f"the evaluation data is not at {named}; give its folder with --data or in {DATA} ({HELP})")
    return named or Path("data")
