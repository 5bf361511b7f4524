"""An exclusive lock on a file. The operating system releases it when the process ends, also when it is killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from casemate.errors import BackendError
from casemate.runtime.files import write_error

LOCKED_BYTE = 1 << 30
"""Windows locks bytes, which other processes then cannot read. This one is far beyond the content."""
READ_TRIES, READ_PAUSE_S = 20, 0.05
"""Number of reads of the holder's entry, and the pause between: the holder writes it just after it acquires the lock.

Windows tries a lock at the same pace.
"""


class LockHeld(BackendError):
    """Another process, or another thread of this one, holds the lock."""

    def __init__(self, message: str) -> None:
        super().__init__(message, backend="lock", retryable=True)

    def __reduce__(self) -> tuple[type[LockHeld], tuple[str, ...]]:
        return type(self), self.args


@contextmanager
def exclusive_lock(path: Path, purpose: str, advice: str) -> Iterator[None]:
    """Holds a lock for the duration of the block. It never waits. The file is created if missing, and never deleted.

    Args:
        path: The lock file.
        purpose: What the holder does, for the message to others: "a membership campaign".
        advice: An alternative to waiting, for that message: "set redteam.folder to another folder".

    Raises:
        LockHeld: If the lock is held. The message names the process.
        BackendError: If the file cannot be created or locked.
    """
    with lock_file(path, wait=False) as handle:
        if handle is None:
            raise LockHeld(f"{_describe_holder(path)}; wait until it ends, stop it, or {advice}")
        holder = {"pid": os.getpid(), "purpose": purpose, "since": datetime.now(UTC).isoformat(timespec="seconds")}
        _rewrite(handle, json.dumps(holder).encode())
        try:
            yield
        finally:
            with suppress(OSError):
                _rewrite(handle, b"")


@contextmanager
def lock_file(path: Path, *, wait: bool) -> Iterator[int | None]:
    """Holds a lock among processes for the duration of the block; yields the file's handle.

    If the lock is held, it waits, or yields None.

    Raises:
        BackendError: If the file cannot be created or locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise write_error(path, error) from error
    try:
        yield handle if _acquire(handle, path, wait) else None
    finally:
        os.close(handle)  # releases the lock


def _rewrite(handle: int, content: bytes) -> None:
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, content)


def _describe_holder(path: Path) -> str:
    """The process that holds the lock, and what it does."""
    for _ in range(READ_TRIES):
        with suppress(OSError, ValueError, KeyError, TypeError):
            holder = json.loads(path.read_bytes())
            return f"process {holder['pid']} runs {holder['purpose']} in {path.parent} since {holder['since']}"
        time.sleep(READ_PAUSE_S)
    return f"another process holds {path}"


try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    def _acquire(handle: int, path: Path, wait: bool) -> bool:
        """Locks the file if no other handle has; False if one has. Windows cannot wait, so it is asked repeatedly."""
        while not (locked := _try_lock(handle)) and wait:
            time.sleep(READ_PAUSE_S)
        return locked

    def _try_lock(handle: int) -> bool:
        os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True

else:

    def _acquire(handle: int, path: Path, wait: bool) -> bool:
        """Locks the file if no other handle has; False if one has."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:
            raise write_error(path, error) from error
        return True
