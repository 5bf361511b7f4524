"""Write-ahead mode for an SQLite file that several processes open at the same moment."""

from __future__ import annotations

import sqlite3
import time

BUSY_S = 30.0
"""How long a process waits for another one."""


def write_ahead(connection: sqlite3.Connection, patience: float = BUSY_S) -> None:
    """Puts a file in WAL mode, so that readers and the writer do not wait for each other.

    SQLite does not wait here by itself when another process opens the file, whatever its timeout.

    Args:
        connection: To the file.
        patience: Seconds to wait for others.

    Raises:
        sqlite3.OperationalError: If the file cannot be written, or others are in the way for longer.
    """
    give_up = time.monotonic() + patience
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(0.02)
