"""Persistent state of campaigns: finished trials with their exchanges, and cached replies."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from casemate.errors import BackendError, DataError
from casemate.redteam.lab.results import Trial
from casemate.runtime.sqlite import BUSY_S, enable_wal
from casemate.text.refusals import is_refusal
from casemate.types import Action, Answer, Verdict

APPLICATION_ID = 0x43534D4C  # "CSML" in the file's header
FORMAT = 2
SCHEMA = (
    "CREATE TABLE trial (campaign TEXT, target TEXT, candidate TEXT, trial TEXT NOT NULL, session BLOB NOT NULL, "
    "failed INTEGER NOT NULL, refused INTEGER NOT NULL, PRIMARY KEY (campaign, target, candidate))",
    "CREATE TABLE reply (key TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {FORMAT}",
)


class Exchange(NamedTuple):
    """One question and its reply, with what only the operator sees.

    Attributes:
        reply: The reply as the client sees it.
        context: Ids of the documents in the generator's context.
        hidden: Ids of the documents that the guard withheld.
        withheld: Whether an enforced verdict withheld something or changed the answer.
        refused: Whether the target rejected the question, for example as too long. The reply is then empty.
        alarms: Defenses that flagged the question.
        reasons: The decision of each of these defenses in a few words, with score and threshold.
    """

    question: str
    reply: str
    context: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    withheld: bool = False
    failed: bool = False
    refused: bool = False
    alarms: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @classmethod
    def from_answer(cls, question: str, answer: Answer) -> Self:
        """Builds an exchange from a question and the answer to it."""
        enforced = [v for v in answer.verdicts if v.enforced]
        return cls(
            question,
            answer.text,
            context=tuple(h.document.id for h in answer.retrieval.hits),
            hidden=tuple(sorted({i for v in enforced for i in v.hidden})),
            withheld=any(v.hidden or v.action is not Action.NONE for v in enforced),
            failed=any("error" in v.evidence for v in answer.verdicts),
            alarms=tuple(dict.fromkeys(v.defense for v in answer.verdicts if v.flagged)),
            reasons=tuple(describe_verdict(v) for v in answer.verdicts if v.flagged),
        )

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """The exchange of a decoded JSON array; one of an earlier version has no reasons."""
        fields: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
        return cls(*fields)

    @property
    def answered(self) -> bool:
        """Whether the reply is neither empty nor a refusal."""
        return bool(self.reply.strip()) and not is_refusal(self.reply)


def describe_verdict(verdict: Verdict) -> str:
    """Defense, score, threshold and action of a verdict, without any text of question or documents.

    A document can be withheld although the score is within the threshold: a guard with client state continues to
    withhold it after a flagged question.

    >>> describe_verdict(Verdict("mirabel", True, Action.HIDE, 3.2, 2.5, ("record-7",)))
    'mirabel: score 3.20, threshold 2.50, action hide'
    """
    limit = "none" if verdict.threshold is None else f"{verdict.threshold:.2f}"
    within = verdict.hidden and verdict.threshold is not None and verdict.score <= verdict.threshold
    since = ", withheld since an earlier question" if within else ""
    mode = "" if verdict.enforced else " (observed only)"
    return f"{verdict.defense}: score {verdict.score:.2f}, threshold {limit}, action {verdict.action}{since}{mode}"


class CampaignStore:
    """One SQLite file with finished trials and cached replies. Several processes may share it.

    Entries survive a killed process; the first write of a key wins. The file holds questions and replies, so only its
    owner may read it.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file and its folder.

        Raises:
            DataError: If the file is damaged, belongs to another program, or has another format.
            BackendError: If the file cannot be created.
        """
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise _store_error(f"cannot create the campaign store {path}: {error}") from error
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self._exclusive():
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    def record_trial(self, campaign: str, target: str, trial: Trial, exchanges: Sequence[Exchange]) -> None:
        """Stores a finished trial with its exchanges, unless it is already stored."""
        body = json.dumps([trial.candidate, trial.member, trial.features, trial.questions, trial.hidden, trial.flagged])
        session = zlib.compress(json.dumps(exchanges).encode())
        failed, refused = sum(e.failed for e in exchanges), sum(e.refused for e in exchanges)
        with self._exclusive():
            row = (campaign, target, trial.candidate, body, session, failed, refused)
            self._db.execute("INSERT OR IGNORE INTO trial VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def trials(self, campaign: str, target: str) -> dict[str, Trial]:
        """The finished trials by candidate."""
        with self._exclusive():
            rows = self._db.execute(
                "SELECT trial FROM trial WHERE campaign = ? AND target = ?", (campaign, target)
            ).fetchall()
        found = (json.loads(body) for (body,) in rows)
        return {name: Trial(name, member, tuple(f), *counts) for name, member, f, *counts in found}

    def failure_counts(self, campaign: str, target: str) -> tuple[int, int]:
        """Questions of finished trials in which a defense failed, and questions that the target rejected."""
        with self._exclusive():
            row = self._db.execute(
                "SELECT coalesce(sum(failed), 0), coalesce(sum(refused), 0) FROM trial "
                "WHERE campaign = ? AND target = ?",
                (campaign, target),
            ).fetchone()
        return int(row[0]), int(row[1])

    def exchanges(self, campaign: str, target: str, candidate: str) -> tuple[Exchange, ...]:
        """The exchanges of a finished trial; empty if there is none."""
        with self._exclusive():
            row = self._db.execute(
                "SELECT session FROM trial WHERE campaign = ? AND target = ? AND candidate = ?",
                (campaign, target, candidate),
            ).fetchone()
        return tuple(map(Exchange.from_json, json.loads(zlib.decompress(row[0])))) if row else ()

    def get_reply(self, key: str) -> str | None:
        """The text stored under a key, if any."""
        with self._exclusive():
            row = self._db.execute("SELECT text FROM reply WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None

    def put_reply(self, key: str, text: str) -> str:
        """Stores a text, unless the key exists; returns the stored text."""
        with self._exclusive():
            self._db.execute("INSERT OR IGNORE INTO reply VALUES (?, ?)", (key, text))
        return self.get_reply(key) or text

    def _prepare(self) -> None:
        """Creates the tables in an empty file and rejects a file of another program or format."""
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]  # first: they may come
        if tables and self._db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise DataError(f"{self.path} is an SQLite file of another program; choose another path")
        enable_wal(self._db)
        self._db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in SCHEMA:
                    self._db.execute(statement)
        finally:
            self._db.execute("COMMIT")
        if (version := self._db.execute("PRAGMA user_version").fetchone()[0]) != FORMAT:
            raise DataError(
                f"{self.path} has campaign store format {version}; this version reads {FORMAT}. Delete the file"
            )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Serializes threads and translates SQLite errors."""
        with self._lock:
            try:
                yield
            except sqlite3.OperationalError as error:
                what = f"campaign store {self.path}: {error}; finished work is kept, run again to continue"
                raise _store_error(what) from error
            except sqlite3.DatabaseError as error:
                raise DataError(
                    f"{self.path} is damaged or no campaign store ({error}); delete it and run again"
                ) from error


def _store_error(message: str) -> BackendError:
    return BackendError(message, backend="campaign store", retryable=False)
