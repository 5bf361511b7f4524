"""The lab's memory on disk: finished trials with what was asked and answered, and replies that were generated."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from casemate.errors import BackendError, DataError
from casemate.lab.results import Trial
from casemate.sqlite_wal import BUSY_S, write_ahead

APPLICATION_ID = 0x43534D4C  # "CSML" in the file's header
FORMAT = 1
SCHEMA = (
    "CREATE TABLE trial (campaign TEXT, target TEXT, candidate TEXT, trial TEXT NOT NULL, session BLOB NOT NULL, "
    "failed INTEGER NOT NULL, refused INTEGER NOT NULL, PRIMARY KEY (campaign, target, candidate))",
    "CREATE TABLE reply (key TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {FORMAT}",
)


class Exchange(NamedTuple):
    """One question, what came back, and what the operator knows about it.

    Attributes:
        question: What was asked.
        reply: What the client saw.
        context: Ids of the documents that the answer was made from.
        hidden: Ids of the documents that the guard withheld.
        withheld: Whether the guard withheld anything.
        failed: Whether a defense failed.
        refused: Whether the target took the question for none, as when it is too long. The reply is empty then.
    """

    question: str
    reply: str
    context: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    withheld: bool = False
    failed: bool = False
    refused: bool = False


class Ledger:
    """One SQLite file with finished trials and generated replies. Several processes may share it.

    What was noted stays when the process is killed. The file holds questions and replies, so only its owner may read
    it; its folder is made when missing.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it.

        Args:
            path: Where it lies.

        Raises:
            DataError: If it is damaged, of another program, or of another version.
            BackendError: If it cannot be made.
        """
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise BackendError(f"cannot make the ledger {path}: {error}", backend="ledger", retryable=False) from error
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self._explained():
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file."""
        with self._lock:
            self._db.close()

    def note(self, campaign: str, target: str, trial: Trial, exchanges: Sequence[Exchange]) -> None:
        """Keeps a finished trial with its session; one that is there already stays."""
        body = json.dumps([trial.candidate, trial.member, trial.features, trial.questions, trial.hidden, trial.flagged])
        session = zlib.compress(json.dumps(exchanges).encode())
        failed, refused = sum(e.failed for e in exchanges), sum(e.refused for e in exchanges)
        with self._explained():
            row = (campaign, target, trial.candidate, body, session, failed, refused)
            self._db.execute("INSERT OR IGNORE INTO trial VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def trials(self, campaign: str, target: str) -> dict[str, Trial]:
        """The finished trials by candidate."""
        with self._explained():
            rows = self._db.execute(
                "SELECT trial FROM trial WHERE campaign = ? AND target = ?", (campaign, target)
            ).fetchall()
        found = (json.loads(body) for (body,) in rows)
        return {name: Trial(name, member, tuple(f), *counts) for name, member, f, *counts in found}

    def troubles(self, campaign: str, target: str) -> tuple[int, int]:
        """In how many questions of the finished trials a defense failed, and how many were refused."""
        with self._explained():
            row = self._db.execute(
                "SELECT coalesce(sum(failed), 0), coalesce(sum(refused), 0) FROM trial "
                "WHERE campaign = ? AND target = ?",
                (campaign, target),
            ).fetchone()
        return int(row[0]), int(row[1])

    def session(self, campaign: str, target: str, candidate: str) -> tuple[Exchange, ...]:
        """What was asked and answered in a finished trial; empty if there is none."""
        with self._explained():
            row = self._db.execute(
                "SELECT session FROM trial WHERE campaign = ? AND target = ? AND candidate = ?",
                (campaign, target, candidate),
            ).fetchone()
        found = json.loads(zlib.decompress(row[0])) if row else []
        return tuple(Exchange(q, r, tuple(context), tuple(hidden), *rest) for q, r, context, hidden, *rest in found)

    def reply(self, key: str) -> str | None:
        """The reply that is kept under a key."""
        with self._explained():
            row = self._db.execute("SELECT text FROM reply WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None

    def keep(self, key: str, text: str) -> str:
        """Keeps a reply, unless another process was faster; returns the one that is kept."""
        with self._explained():
            self._db.execute("INSERT OR IGNORE INTO reply VALUES (?, ?)", (key, text))
        return self.reply(key) or text

    def _prepare(self) -> None:
        """Makes the tables in an empty file, recognises its own, and refuses any other."""
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]  # first: they may come
        if tables and self._db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise DataError(f"{self.path} is an SQLite file of another program; choose another path for the ledger")
        write_ahead(self._db)
        self._db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in SCHEMA:
                    self._db.execute(statement)
        finally:
            self._db.execute("COMMIT")
        if (version := self._db.execute("PRAGMA user_version").fetchone()[0]) != FORMAT:
            raise DataError(f"{self.path} has ledger format {version}, this version reads {FORMAT}; delete the file")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """One thread at a time, and SQLite's complaints in the operator's words."""
        with self._lock:
            try:
                yield
            except sqlite3.OperationalError as error:
                what = f"ledger {self.path}: {error}; what was finished is kept, run again"
                raise BackendError(what, backend="ledger", retryable=False) from error
            except sqlite3.DatabaseError as error:
                raise DataError(f"{self.path} is damaged or no ledger ({error}); delete it and run again") from error
