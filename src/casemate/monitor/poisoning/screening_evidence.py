"""Evidence about new documents that adds up over days and processes.

One poisoned text a day passes a screening that forgets. So each screened document leaves an event: where it lies, which
source, subject and uploader it has, and how unusual it was. From these events follow, in every process:

- the recent documents, among which near-duplicates are searched: texts about one question in one region of the
  embedding space, whatever day they come;
- for each source, subject and uploader a sequential test. The p-value p of a document gives the e-value
  ``p ** -0.5 / 2``, whose mean over benign documents is at most 1. A running product that restarts at 1 (e-CUSUM)
  exceeds c once in c benign documents on average, at most (Shin, Ramdas and Rinaldo 2022, arXiv 2203.03532).

The events contain no text, but vectors, from which texts can be reconstructed in part: protect the store like the
index.
"""

from __future__ import annotations

import base64
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from casemate.monitor.poisoning.scoring import FALSE_POSITIVE_RATE, SHARES, ScreeningResult
from casemate.protocols import EventStore
from casemate.types import Document, Event, Vector

EVIDENCE_KIND = "screening-evidence"
"""Kind of the events about screened documents."""
LOOK_BACK = timedelta(days=30)
"""Age from which evidence no longer counts."""
MAX_STORED = 100
"""Documents of one batch that are stored: the most unusual ones. A large import is one event."""
MIN_P_VALUE = 1e-3
"""Smallest p-value that counts: one document alone does not exhaust the evidence of its uploader."""
GROUPS = ("source", "subject", "uploader")
"""What documents of one interest share, besides their region."""
THRESHOLD = math.log10(len(GROUPS) / (FALSE_POSITIVE_RATE * SHARES["evidence"]))
"""log10 of the evidence from which a document is suspicious: each group has a third of the signal's budget."""
REASON = "adds to the evidence of earlier documents of the same {0}"


class _Row(NamedTuple):
    """A screened document: id, source and other groups, and log10 of its e-value."""

    id: str
    groups: Mapping[str, str]
    evidence: float


class ScreeningEvidence:
    """The evidence about the documents of one tenant, shared by all processes on an event store."""

    def __init__(self, store: EventStore, tenant: str) -> None:
        self._store, self._tenant = store, tenant
        self._position, self._writer = 0, secrets.token_hex(6)
        self._evidence: dict[tuple[str, str], float] = {}

    def sync(self, now: datetime | None = None) -> tuple[list[Document], list[Vector]]:
        """Reads what other processes, or earlier ones, have screened since the last call.

        Returns the documents, oldest first, with ids and sources but without texts; and their vectors.

        Raises:
            BackendError: If the store cannot be read.
        """
        since = (now or datetime.now(UTC)) - LOOK_BACK
        if not self._position:
            self._store.flush()  # of a gate that this one replaces
        events, self._position = self._store.read_since(EVIDENCE_KIND, self._position, since)
        documents, vectors = list[Document](), list[Vector]()
        for event in events:
            if event.body["tenant"] != self._tenant or event.body["writer"] == self._writer or event.at < since:
                continue
            rows, found = _decode(event.body)
            self._add(rows)
            documents += [Document(row.id, "", source=row.groups["source"]) for row in rows]
            vectors += list(found)
        return documents, vectors

    def judge(self, results: Sequence[ScreeningResult], uploader: str = "") -> list[tuple[str, ...]]:
        """For each document, the groups whose evidence it completes: ``source``, ``subject``, ``uploader``."""
        return [
            tuple(
                name
                for name, key in row.groups.items()
                if self._evidence.get((name, key), 0.0) > 0 and self._with(name, key, row) > THRESHOLD
            )
            for row in _rows(results, uploader)
        ]

    def record(
        self, results: Sequence[ScreeningResult], vectors: Vector, uploader: str = "", now: datetime | None = None
    ) -> None:
        """Stores the evidence of documents that were screened together, (n, dim). Does not wait for the write."""
        rows = _rows(results, uploader)
        self._add(rows)
        order = sorted(np.argsort([-r.evidence for r in rows], kind="stable")[:MAX_STORED].tolist())
        if order:
            body = {"tenant": self._tenant, "writer": self._writer, "dim": vectors.shape[1]}
            body |= _encode([rows[i] for i in order], vectors[order])
            event_id = f"{EVIDENCE_KIND}:{secrets.token_hex(12)}"
            self._store.append(Event(event_id, now or datetime.now(UTC), EVIDENCE_KIND, body))

    def _add(self, rows: Iterable[_Row]) -> None:
        for row in rows:
            for name, key in row.groups.items():
                self._evidence[name, key] = max(self._with(name, key, row), 0.0)

    def _with(self, name: str, key: str, row: _Row) -> float:
        return self._evidence.get((name, key), 0.0) + row.evidence


def log_e_value(p: float) -> float:
    """log10 of the e-value of a p-value, ``p ** -0.5 / 2`` with p at least ``MIN_P_VALUE``.

    >>> round(log_e_value(0.01), 2), round(log_e_value(1.0), 2)
    (0.7, -0.3)
    """
    return -0.5 * math.log10(max(p, MIN_P_VALUE)) - math.log10(2)


def _rows(results: Sequence[ScreeningResult], uploader: str) -> list[_Row]:
    rows = []
    for result in results:
        document, subject = result.document, result.document.metadata.get("subject")
        named = {"source": document.source, "subject": str(subject or ""), "uploader": uploader}
        rows.append(_Row(document.id, {k: v for k, v in named.items() if v}, log_e_value(result.p_value)))
    return rows


def _encode(rows: Sequence[_Row], vectors: Vector) -> dict[str, Any]:
    stored = base64.b64encode(vectors.astype(np.float16).tobytes()).decode()
    return {"rows": [[row.id, dict(row.groups), round(row.evidence, 4)] for row in rows], "vectors": stored}


def _decode(body: Mapping[str, Any]) -> tuple[list[_Row], Vector]:
    vectors = np.frombuffer(base64.b64decode(body["vectors"]), np.float16).reshape(-1, body["dim"])
    return [_Row(*row) for row in body["rows"]], vectors.astype(np.float32)
