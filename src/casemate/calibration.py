"""What a guard has learnt of one owner's harmless questions: a score, and how high harmless questions score.

Made by ``lab.calibrate``, used by ``defenses.mirabel``, kept in one json file, by tenant.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from json.encoder import encode_basestring_ascii
from operator import mul
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from casemate import stats
from casemate.closeness import FEATURES
from casemate.errors import DataError

FORMAT = 1
LARGEST = 1e7
"""No figure of a calibration that was made is beyond this, nor a scale below its inverse."""
DRIFT = 1.25
"""The tenant may grow or shrink by this factor before its calibration is stale."""


@dataclass(frozen=True)
class Calibration:
    """A score over the figures of ``closeness``, and its law among harmless questions of one tenant.

    Attributes:
        fingerprint: Of the embedder.
        documents: Chunks that the tenant held.
        k: Hits that made a context.
        features: Names of the figures, in the order of the weights.
        centre: Their means among harmless questions.
        scale: Their standard deviations there.
        weights: At least 0 each: a question that is closer never scores less.
        benign: Scores of harmless questions that the weights were not fitted on, each the largest over its context.
        source: Where the harmless questions are from: asked by people, or made from the corpus.
        doubt: Score above which the sentences of a question are looked at one by one.
        jitter: Width of the random share by which a threshold is lowered, for each client and document.
        salt: Key of that randomness. A secret like the index.
        at: When, ISO 8601.
        notes: Whatever else is told about it: seed, counts, recall of each attack.
    """

    fingerprint: str
    documents: int
    k: int
    features: tuple[str, ...]
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    benign: tuple[float, ...]
    source: str
    doubt: float = math.inf
    jitter: float = 0.0
    salt: str = field(default="", repr=False)
    at: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)

    # On every request's path, some ten times: for so few numbers, lists take a twentieth of numpy's time.

    @cached_property
    def _slope(self) -> list[float]:
        return [weight / scale for weight, scale in zip(self.weights, self.scale, strict=True)]

    @cached_property
    def _offset(self) -> float:
        return math.fsum(map(mul, self.centre, self._slope))

    def score(self, figures: Sequence[float]) -> float:
        """The score of one document: 0 for an average harmless question, higher is closer."""
        return math.fsum(map(mul, figures, self._slope)) - self._offset

    def threshold(self, rate: float) -> float:
        """Above it lies a share of at most ``rate`` of harmless questions (``stats.conformal_threshold``)."""
        if rate not in self._thresholds:
            self._thresholds[rate] = stats.conformal_threshold(self._sorted, rate)
        return self._thresholds[rate]

    @cached_property
    def _thresholds(self) -> dict[float, float]:
        return {}

    def attainable(self, rate: float) -> float:
        """The rate, or the smallest that so few harmless questions can promise, 1 / (N + 1).

        A guard goes by it: rather more false alarms than were wanted than no alarm at all.
        """
        return max(rate, 1 / (len(self.benign) + 1)) if self.benign else rate

    def p_value(self, score: float) -> float:
        """How unusual a score is among harmless questions, in [1 / (N + 1), 1]."""
        b = self._sorted
        return (1 + len(b) - bisect_left(b, score)) / (len(b) + 1)

    @cached_property
    def _sorted(self) -> list[float]:
        return sorted(map(float, self.benign))

    def allowance(self, tenant: str, client: str, source: str) -> float:
        """By how much the threshold is lower for this client and document: the same whenever they meet.

        So nobody can find out the threshold by asking often, and averaging is in vain.
        """
        if not self.jitter:
            return 0.0
        names = map(encode_basestring_ascii, (tenant, client, source))  # what json.dumps gives, at a tenth of its time
        message = f"[{', '.join(names)}]".encode()
        drawn = hashlib.blake2b(message, key=self._key, digest_size=8).digest()  # a hundredth of the time of an HMAC
        return self.jitter * int.from_bytes(drawn, "big") / 2.0**64

    @cached_property
    def _key(self) -> bytes:
        return hashlib.blake2b(self.salt.encode()).digest()

    def stale(self, fingerprint: str, documents: int) -> str:
        """Why it must not be used for an index in this state; empty if it may."""
        if fingerprint != self.fingerprint:
            return f"it was made with the embedder {self.fingerprint!r}, and this one is {fingerprint!r}"
        if not self.documents / DRIFT <= documents <= self.documents * DRIFT:
            return f"it was made with {self.documents} chunks, and there are {documents} now"
        return ""


class Calibrations:
    """The calibrations in a file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: tuple[int, int, int] | None = None
        self._held: dict[str, Calibration] = {}

    def of(self, tenant: str) -> Calibration | None:
        """The calibration of a tenant, if there is one.

        Raises:
            DataError: If the file is damaged.
        """
        try:
            found = self.path.stat()
        except OSError:
            return None
        state = (found.st_mtime_ns, found.st_ino, found.st_size)
        if state != self._state:
            self._held = read(self.path)
            self._state = state
        return self._held.get(tenant)


def read(path: Path) -> dict[str, Calibration]:
    """The calibrations in a file, by tenant; none if there is no file.

    Raises:
        DataError: If the file is damaged, or of another format.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format") != FORMAT:
            what = f"calibration format {raw.get('format')!r}, this version reads {FORMAT}"
            raise DataError(f"{path} has {what}; delete it and run 'casemate calibrate'")
        held = TypeAdapter(dict[str, Calibration]).validate_python(raw.get("tenants"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, OverflowError, RecursionError, ValidationError) as error:
        raise DataError(
            f"{path} is no calibration, or damaged ({type(error).__name__}); delete it and run 'casemate calibrate'"
        ) from error
    for tenant, calibration in held.items():
        _require_sound(path, tenant, calibration)
    return held


def write(path: Path, tenant: str, calibration: Calibration) -> None:
    """Puts one tenant's calibration into the file, whole or not at all; readable by its owner only."""
    held = read(path) | {tenant: calibration}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "tenants": {t: asdict(c) for t, c in held.items()}}, indent=1)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _require_sound(path: Path, tenant: str, c: Calibration) -> None:
    """Refuses what would make scores absurd, or a guard that silently withholds nothing."""
    what = f"{path}: the calibration of tenant {tenant!r}"
    if c.features != FEATURES:
        raise DataError(f"{what} was made by another version; delete the file and run 'casemate calibrate'")
    sizes = {len(c.features), len(c.centre), len(c.scale), len(c.weights)}
    numbers = (*c.centre, *c.scale, *c.weights, *c.benign, c.jitter)
    sound = (
        len(sizes) == 1
        and all(abs(x) <= LARGEST for x in numbers)  # not true of NaN either
        and min(c.weights) >= 0
        and min(c.scale) >= 1 / LARGEST
        and 0 <= c.documents < 1 << 60
        and c.k > 0
        and c.jitter >= 0
        and not math.isnan(c.doubt)
        and bool(c.benign) == any(c.weights)
        and (not c.jitter or (bool(c.salt) and c.salt.isascii()))
    )
    if not sound:
        raise DataError(f"{what} makes no sense; delete the file and run 'casemate calibrate'")
