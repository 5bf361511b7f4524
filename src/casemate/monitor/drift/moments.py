"""Moment canaries: has a corpus moved more than what came and went explains, and are its vectors those of its texts?

The moments of the index (``stats.CorpusMoments``) cost nothing to read and tell of every vector. Documents like those
held move the mean m by little: with a added and r removed, Q = n'^2 |m' - m|^2 / (a (1 + a / n) + r (n - r) / (n - 1))
has the mean tr S and the variance 2 tr S^2, where S = M2 / n. j copies of one vector among a added ones make it larger
by some j^2 / a times tr S. So a block of alike vectors shows where j exceeds the square root of a by enough
(``Reading.block``), and a single one never does. Vectors that change while nothing comes or goes show at once: then
nothing explains anything.

What this cannot tell is a poisoned block from a new subject: forty pages of one article move the mean as well. It says
that the corpus moved, and by how much more than chance would; who moved it is for the owner to know.

Deviation: METHODS D6 names mean, trace and top eigenvalues. For unit vectors the trace of M2 is n - n |m|^2: it is
told, and tells nothing that the mean does not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import numpy as np

from casemate.errors import DataError
from casemate.protocols import Embedder, EventStore, Index
from casemate.stats import CorpusMoments
from casemate.types import DEFAULT_TENANT, Document, Event, Vector

KIND = "canary-moments"
"""Events of this kind hold the moments of a corpus."""
ROUNDING = 1e-6
"""How far the mean may move by rounding alone."""
SAME = 0.999
"""Cosine of a stored vector with that of its text made anew, from which on they are the same (METHODS D6)."""
CONFIDENCE = 0.95
"""Of what an audit concludes."""
RARE = 0.001
"""A p-value below it is more than documents like those held explain."""


class Move(StrEnum):
    """What a move of a corpus means."""

    NONE = "nothing came or went, and nothing moved"
    LIKE = "moved no more than documents like those held would"
    MORE = "moved more than documents like those held would"
    IN_PLACE = "changed though no source was"
    UNKNOWN = "documents were replaced, nobody said how many"


@dataclass(frozen=True, slots=True)
class Reading:
    """The moments of a corpus at one time, with S = M2 / n.

    Attributes:
        tenant: Whose.
        at: When.
        n: Documents.
        mean: m, (dim,).
        trace: tr S.
        square: tr S^2.
        top: Largest eigenvalue of S.
        content: A digest of sources and embedder; empty: they were not read.
    """

    tenant: str
    at: datetime
    n: int
    mean: tuple[float, ...]
    trace: float
    square: float
    top: float
    content: str = ""

    @property
    def freedom(self) -> float:
        """Degrees of freedom of Q, as if it were a chi-square (Satterthwaite 1946): directions that matter."""
        return self.trace**2 / self.square if self.square else 1.0

    def block(self, added: int, p: float = 0.01) -> int:
        """How many copies of one vector, among so many added like those held, make the p-value so small, about.

        Args:
            added: Documents that come in, at least 1.
            p: The p-value, in (0, 1).
        """
        from scipy.special import gammainccinv

        half = self.freedom / 2
        excess = float(gammainccinv(half, p)) / half - 1  # of Q / tr S
        return math.ceil(math.sqrt(max(excess, 0.0) * added)) + 1


@dataclass(frozen=True, slots=True)
class Shift:
    """How far a corpus has moved from one reading to the next.

    Attributes:
        added: Documents that came.
        removed: Documents that went.
        distance: Of the means.
        expected: Root mean square of it, if all that came and went is like what was held.
        p: How likely so far a move is by chance.
        trace: Change of tr S.
        top: Change of the largest eigenvalue, as a share of it.
    """

    added: int
    removed: int
    distance: float
    expected: float
    p: float
    trace: float
    top: float


@dataclass(frozen=True, slots=True)
class Audit:
    """What embedding some documents anew has shown.

    Attributes:
        held: Documents in the index.
        checked: How many were drawn.
        wrong: Ids of those whose vectors are not those of their texts, with the cosines.
        lowest: Lowest cosine of all.
    """

    held: int
    checked: int
    wrong: tuple[tuple[str, float], ...]
    lowest: float

    @property
    def at_most(self) -> int:
        """With 95 % confidence no more documents than these are wrong."""
        return most_wrong(self.held, self.checked, len(self.wrong))

    def finds(self, wrong: int) -> float:
        """Probability that such an audit finds at least one, if so many are wrong."""
        return 1 - _tail(self.held, wrong, self.checked, 0)


def read(index: Index, tenant: str, at: datetime, embedder: str = "") -> Reading:
    """The moments of a tenant's documents now.

    Args:
        index: Where they are.
        tenant: Whose.
        at: Now.
        embedder: Fingerprint of what made their vectors.
    """
    sources = json.dumps([embedder, *sorted(index.digests(tenant).items())]).encode()
    return replace(of(index.moments(tenant), tenant, at), content=hashlib.sha256(sources).hexdigest()[:32])


def of(moments: CorpusMoments, tenant: str, at: datetime) -> Reading:
    """What is kept of some moments."""
    S = moments.scatter / max(moments.n, 1)
    top = float(np.linalg.eigvalsh(S)[-1])
    mean = tuple(round(float(x), 9) for x in moments.mean)
    return Reading(tenant, at.astimezone(UTC), moments.n, mean, float(np.trace(S)), float((S * S).sum()), top)


def to_event(reading: Reading) -> Event:
    """A reading as it is kept: n + 4 numbers, and no vector of any document."""
    body = asdict(reading) | {"mean": list(reading.mean)}
    at = body.pop("at")
    return Event(f"{KIND}:{at.timestamp():.6f}:{reading.tenant}"[:200], at, KIND, body)


def readings(store: EventStore, tenant: str, since: datetime | None = None) -> list[Reading]:
    """What was kept of a tenant, the oldest first.

    Raises:
        BackendError: If the store cannot be read.
    """
    return [_reading(event) for event in store.scan(KIND, since) if event.body["tenant"] == tenant]


def shift(before: Reading, after: Reading, added: int | None = None, removed: int | None = None) -> Shift:
    """How far a corpus has moved, against what so many documents like those held would move it.

    Args:
        before: The first reading.
        after: The second.
        added: Documents that came between them; None: as many as explain the numbers with those removed.
        removed: Documents that went; None: likewise.

    Raises:
        DataError: If the first is of fewer than two documents, they are of different spaces, or the numbers do not add
            up.
    """
    if before.n < 2:
        raise DataError(f"the first reading is of {before.n} documents, which tell nothing of others")
    if len(before.mean) != len(after.mean):
        raise DataError(f"the readings have {len(before.mean)} and {len(after.mean)} dimensions: another embedder")
    grown = after.n - before.n
    removed = removed if removed is not None else max(-grown if added is None else added - grown, 0)
    added = added if added is not None else grown + removed
    if added - removed != grown or min(added, removed) < 0 or removed > before.n:
        raise DataError(f"{before.n} documents, {added} added and {removed} removed do not make {after.n}")
    distance = float(np.linalg.norm(np.array(after.mean) - np.array(before.mean)))
    came = added * (1 + added / before.n)  # m is itself known from n documents only
    moved = came + removed * (before.n - removed) / (before.n - 1)  # drawn without replacement
    expected = math.sqrt(moved * before.trace) / max(after.n, 1)
    p = _p_value(before, (distance / expected) ** 2) if expected else float(distance <= ROUNDING)
    top = after.top / before.top - 1 if before.top else 0.0
    return Shift(added, removed, distance, expected, p, after.trace - before.trace, top)


def moved(before: Reading, after: Reading, removed: int | None = None) -> tuple[Move, Shift | None]:
    """What a move means.

    Args:
        before: The first reading.
        after: The second.
        removed: Documents that went or were replaced between them; None: not known.

    Returns:
        What it means, and how far it went; None where the numbers do not add up.

    Raises:
        DataError: As ``shift``.
    """
    if before.content and before.content == after.content:
        if before.n != after.n:
            return Move.IN_PLACE, None
        found = shift(before, after, 0, 0)
        return (Move.NONE if found.distance <= ROUNDING else Move.IN_PLACE), found
    if removed is None and before.n == after.n:
        return Move.UNKNOWN, None
    found = shift(before, after, removed=removed)
    return (Move.MORE if found.p < RARE else Move.LIKE), found


def audit(
    index: Index,
    embedder: Embedder,
    *,
    count: int = 200,
    tenant: str = DEFAULT_TENANT,
    seed: int = 7,
    vectors: Callable[[Sequence[Document]], Vector] | None = None,
) -> Audit:
    """Embeds documents drawn at random anew, and compares with what the index holds of them.

    Args:
        index: Where they are.
        embedder: That of the index.
        count: How many are drawn.
        tenant: Whose.
        seed: Of the draw; another one each time, so that nobody knows which are looked at.
        vectors: Makes the vectors, where a defense changes them on the way in; None: ``embedder``, of title and text.

    Raises:
        DataError: If the tenant has no documents.
    """
    held = index.moments(tenant).n
    if not held or count < 1:
        raise DataError(f"tenant {tenant!r} has {held} documents, and {count} are to be drawn; one at least")
    wanted = set(np.random.default_rng(seed).choice(held, min(count, held), replace=False).tolist())
    documents: list[Document] = []
    rows: list[Vector] = []
    place = 0
    for found, stored in index.scan(tenant):
        take = [i for i in range(len(found)) if place + i in wanted]
        documents += [found[i] for i in take]
        rows.append(stored[take])
        place += len(found)
    made = vectors(documents) if vectors else embedder.embed([d.content for d in documents])
    cosines = np.einsum("nd,nd->n", made.astype(np.float64), np.concatenate(rows).astype(np.float64))
    wrong = tuple((d.id, float(c)) for d, c in zip(documents, cosines, strict=True) if not c >= SAME)
    return Audit(held, len(documents), wrong, float(cosines.min()))


def most_wrong(held: int, checked: int, found: int, confidence: float = CONFIDENCE) -> int:
    """Upper end of an exact one-sided interval for how many of some documents are wrong (hypergeometric).

    Args:
        held: Documents.
        checked: How many were drawn of them, without replacement.
        found: How many of these are wrong.
        confidence: In (0, 1).

    >>> most_wrong(5000, 200, 0), most_wrong(5000, 5000, 0), most_wrong(10, 5, 5)
    (72, 0, 10)
    """
    low, high = found, held - (checked - found)
    while low < high:  # the largest number for which so few would not be too rare
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _tail(held, middle, checked, found) > 1 - confidence else (low, middle - 1)
    return low


def _tail(held: int, wrong: int, checked: int, found: int) -> float:
    """Probability that no more than so many of those drawn are wrong."""
    ways = (
        _log_choose(wrong, x) + _log_choose(held - wrong, checked - x) - _log_choose(held, checked)
        for x in range(max(0, checked - (held - wrong)), min(found, wrong, checked) + 1)
    )
    return math.fsum(math.exp(way) for way in ways)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _p_value(reading: Reading, ratio: float) -> float:
    """How likely Q is so many times tr S or more."""
    from scipy.special import gammaincc

    half = reading.freedom / 2
    return float(gammaincc(half, half * ratio))


def _reading(event: Event) -> Reading:
    told: dict[str, Any] = dict(event.body)
    return Reading(**told | {"mean": tuple(told["mean"]), "at": event.at})
