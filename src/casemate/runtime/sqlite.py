"""SQLite files that several processes open at the same time: write-ahead mode, and files that were replaced."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

BUSY_S = 30.0  # how long a process waits for the lock of another one


def enable_wal(connection: sqlite3.Connection, timeout_s: float = BUSY_S) -> None:
    """Puts a file into WAL mode, so that readers and the writer do not block each other.

    SQLite's own timeout does not apply here while another process opens the file.

    Raises:
        sqlite3.OperationalError: If the file is not writable, or others block it for longer than ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if there is none. A process that has opened it does not see a replacement."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
