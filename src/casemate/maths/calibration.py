"""A calibrated score: a linear function of features, and its distribution among benign queries.

Split conformal prediction turns that distribution into thresholds and p-values, with no assumption about its shape.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring_ascii
from operator import mul
from typing import Any

from casemate.maths import stats

MAX_SIZE_RATIO = 1.25  # a calibration is stale once the number of chunks has grown or shrunk by more than this factor


def min_questions(rate: float) -> int:
    """Returns the fewest benign questions with a finite threshold at a rate (``stats.conformal_threshold``).

    >>> min_questions(0.01), min_questions(0.002)
    (99, 499)
    """
    return math.ceil(1 / rate - 1e-9) - 1


@dataclass(frozen=True)
class Calibration:
    """The calibration of one defense for one tenant.

    Attributes:
        documents: Chunks of the tenant when it was calibrated.
        k: Hits per context.
        features: Names of the features, in the order of the weights.
        centre: Means of the features among benign queries.
        scale: Standard deviations of the features among benign queries.
        weights: Weights of the standardized features, each at least 0: a closer query never scores lower.
        benign: Scores of benign queries that were not used to fit the weights, each the maximum over its context.
        source: Origin of the benign queries: a query log, or synthetic questions.
        doubt: Score above which the sentences of a query are also scored one by one.
        jitter: Largest pseudorandom reduction of the threshold per client and document.
        salt: Key of the jitter. As secret as the index.
        at: Time of calibration, ISO 8601.
        labels: Labels of the questions that the documents contain; see ``text.stored_questions``.
        notes: Further figures for reports: seed, counts, recall of each attack.
        collection: Name of the attached collection; empty: the index is Casemate's own.
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
    labels: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    collection: str = ""

    # Computed some ten times per request: for so few numbers, lists take a twentieth of numpy's time.

    @cached_property
    def _slope(self) -> list[float]:
        return [weight / scale for weight, scale in zip(self.weights, self.scale, strict=True)]

    @cached_property
    def _offset(self) -> float:
        return math.fsum(map(mul, self.centre, self._slope))

    def score(self, features: Sequence[float]) -> float:
        """Score of one document from its features, (f,): 0 for an average benign query; higher is closer."""
        return math.fsum(map(mul, features, self._slope)) - self._offset

    def threshold(self, rate: float) -> float:
        """Threshold that at most a share ``rate`` of benign queries exceeds (``stats.conformal_threshold``)."""
        if rate not in self._thresholds:
            self._thresholds[rate] = stats.conformal_threshold(self._sorted, rate)
        return self._thresholds[rate]

    @cached_property
    def _thresholds(self) -> dict[float, float]:
        return {}

    def attainable_rate(self, rate: float) -> float:
        """The false-alarm rate that applies: ``rate``, but at least 1 / (N + 1), which N benign queries can guarantee.

        The guard uses this rate: too many false alarms are better than no detection.
        """
        return max(rate, 1 / (len(self.benign) + 1)) if self.benign else rate

    def shortage(self, setting: str, rate: float) -> str:
        """Why the configured ``rate``, above 0, cannot be guaranteed yet; empty: there are enough benign queries."""
        if len(self.benign) >= (needed := min_questions(rate)):
            return ""
        return (
            f"{len(self.benign)} benign questions are too few for {setting} {rate}, which needs {needed}: until then "
            f"it works at {self.attainable_rate(rate):.3f}"
        )

    def p_value(self, score: float) -> float:
        """Conformal p-value of a score among N benign queries, in [1 / (N + 1), 1]; lower is more unusual."""
        b = self._sorted
        return (1 + len(b) - bisect_left(b, score)) / (len(b) + 1)

    @cached_property
    def _sorted(self) -> list[float]:
        return sorted(map(float, self.benign))

    def threshold_reduction(self, tenant: str, client: str, source: str) -> float:
        """Amount by which the threshold is lowered for this client and document, in [0, jitter), constant over time.

        So neither repeated nor averaged queries reveal the threshold.
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

    def staleness(self, fingerprint: str, documents: int) -> str:
        """Reason why the calibration does not fit this embedder or number of chunks; empty if it fits."""
        if fingerprint != self.fingerprint:
            return f"it was made with the embedder {self.fingerprint!r}; the present one is {fingerprint!r}"
        if not self.documents / MAX_SIZE_RATIO <= documents <= self.documents * MAX_SIZE_RATIO:
            return f"it was made with {self.documents} chunks; the tenant now has {documents}"
        return ""
