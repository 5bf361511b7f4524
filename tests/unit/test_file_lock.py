"""The exclusive lock on a file, within a process and between processes."""

import json
import os
import pickle
import signal
import subprocess
import sys

import pytest

from casemate.errors import BackendError
from casemate.runtime.file_lock import LockHeld, exclusive_lock

HOLDER = """
import sys, time
from pathlib import Path
from casemate.runtime.file_lock import exclusive_lock
with exclusive_lock(Path(sys.argv[1]), "a test", "choose another folder"):
    print("held", flush=True)
    time.sleep(600)
"""


def lock(path):
    return exclusive_lock(path, "a campaign", "choose another folder")


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "x.lock")], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_lock_is_exclusive_within_a_process(tmp_path):
    path = tmp_path / "folder" / "x.lock"
    with lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        with pytest.raises(LockHeld, match=f"process {os.getpid()} runs a campaign in .*folder since 2"), lock(path):
            pass
        assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == ""
    with lock(path):
        pass


def test_an_error_in_the_block_releases_the_lock(tmp_path):
    with pytest.raises(KeyError), lock(tmp_path / "x.lock"):
        raise KeyError
    with lock(tmp_path / "x.lock"):
        pass


def test_error_names_the_process_that_holds_the_lock_and_the_remedy(tmp_path, holder):
    with pytest.raises(LockHeld) as raised, lock(tmp_path / "x.lock"):
        pass
    assert f"process {holder.pid} runs a test in {tmp_path} since" in str(raised.value)
    assert str(raised.value).endswith("wait until it ends, stop it, or choose another folder")
    assert raised.value.retryable
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_the_lock_of_a_killed_process_is_released(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (
        json.loads((tmp_path / "x.lock").read_text())["pid"] == holder.pid
    )  # the entry in the file remains, the lock does not
    with lock(tmp_path / "x.lock"):
        assert json.loads((tmp_path / "x.lock").read_text())["pid"] == os.getpid()


def test_error_names_the_file_if_the_holder_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("casemate.runtime.file_lock.READ_PAUSE_S", 0.0)
    with lock(tmp_path / "x.lock"):
        (tmp_path / "x.lock").write_text("no JSON")
        with pytest.raises(LockHeld, match="another process holds .*x.lock; wait"), lock(tmp_path / "x.lock"):
            pass


def test_a_file_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="cannot be written"), lock(tmp_path / "file" / "x.lock"):
        pass
