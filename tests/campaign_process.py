"""The command line as a process, with a small fast system. The process can be killed or paused at a given point.

python -m tests.campaign_process [--kill STAGE | --pause POINT] redteam run ...
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.protocols import Defense
from casemate.redteam.campaigns import pipeline
from casemate.redteam.campaigns.membership import MembershipRunner
from casemate.redteam.lab import two_world_audit
from casemate.redteam.lab.store import CampaignStore
from casemate.redteam.reporting import files
from casemate.types import Action, Outcome, Verdict
from tests.fakes import BAG, entry_points

ROOT = Path(__file__).parents[1]
CONFIG = """\
rag: {corpus: corpus.jsonl, embedder: bag, k: 3}
guard: {defenses: [DEFENSE]}
calibrate: {questions: 60, documents: 24}
redteam:
  attacks: [direct]
  members: 20
  nonmembers: 20
  folder: lab
  crawl: {attacks: [rag_thief], questions: 12}
"""
POINTS = {
    "plan": (pipeline, "validate_plan", 1),
    "prepare": (SqliteIndex, "add", 1),
    "execute": (CampaignStore, "record_trial", 15),
    "audit": (two_world_audit, "_replay", 3),
    "judge": (MembershipRunner, "judge", 1),
    "write": (files, "write_atomically", 7),
    "crawl": (CampaignStore, "put_reply", 4),
}
"""Stop points of a process: owner and name of a function, and the number of the call."""


@dataclass
class HideAsked(Defense):
    """Hides the document whose unique word is in the question. Fails for clients with a given prefix.

    Attributes: fails_for: The prefix. Empty: it never fails.
    """

    fails_for: str = ""
    paper: ClassVar[str] = "none: a test"
    max_hidden_sources: ClassVar[int] = 1

    async def on_retrieve(self, query, retrieval):
        if self.fails_for and query.client.startswith(self.fails_for):
            raise RuntimeError("a secret text of a document")
        asked = {f"d{number}" for number in re.findall(r"only(\d+)", query.text)}
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.source in asked)
        kept = tuple(h for h in retrieval.hits if h.document.source not in asked)
        action = Action.HIDE if hidden else Action.NONE
        verdict = Verdict("hide_asked", bool(hidden), action, float(bool(hidden)), 0.5, hidden)
        return Outcome(replace(retrieval, hits=kept), verdict)


registered = entry_points(BAG, ("defense", "hide_asked", f"{__name__}:HideAsked"))


def start(folder, *words, stop=()):
    """Starts the command line in a folder.

    Args: folder: Working directory. words: The command. stop: `("--kill", STAGE)` or `("--pause", POINT)`.
    """
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.campaign_process", *stop, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def casemate(folder, *words, stop=()):
    """Runs a command to completion. Returns exit code, stdout and stderr."""
    process = start(folder, *words, stop=stop)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def wait_for(path):
    """Waits until a file exists."""
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} was not created")


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _pause():
    Path("paused").touch()
    wait_for(Path("go"))


def _stop_at(point, stop):
    """Stops this process before the given call of a function."""
    owner, name, number = POINTS[point]
    original, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append(1)
        if len(calls) == number:
            stop()
        return original(*args, **options)

    setattr(owner, name, counted)


def main():
    from casemate import plugins
    from casemate.cli import main as run

    plugins.entry_points = registered
    if sys.argv[1] in ("--kill", "--pause"):
        _stop_at(sys.argv[2], _kill if sys.argv[1] == "--kill" else _pause)
        del sys.argv[1:3]
    run()


if __name__ == "__main__":
    main()
