"""The command line on a system without ``fcntl``, ``resource`` and signal handlers of the event loop, as on Windows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HIDE = """
import asyncio, os, signal, sys, types
sys.modules["fcntl"] = sys.modules["resource"] = None
locked = set()

def locking(handle, mode, count):
    name = os.fstat(handle).st_ino
    if (name, handle) in locked:
        raise OSError("locked")
    locked.add((name, handle))

sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
for name in ("setitimer", "ITIMER_PROF"):
    delattr(signal, name)

def add_signal_handler(*arguments):
    raise NotImplementedError

asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = add_signal_handler
sys.argv[0] = "casemate"
import casemate.__main__
"""


@pytest.mark.slow
def test_the_command_line_works_without_unix_modules(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "light.html").write_text("<title>Light</title><p>The lighthouse keeper is called Mira.</p>")
    (tmp_path / "docs" / "boat.txt").write_text("The boat is called Ann.")

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-c", HIDE, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2] / "src"), *sys.path))},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("init", "docs")
    run("index")
    assert "Mira" in run("ask", "Who is the lighthouse keeper?")
    assert "lock" not in run("doctor").lower()
