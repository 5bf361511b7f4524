"""Words that an owner may newly be given in a period, counted over all processes on an event store.

A process acquires words in blocks, one store write each, and gives words from its block. Words of a block that it does
not give count as given: also after a crash, or if the block is forgotten. So no number of processes exceeds a quota.
Nothing is returned to a quota within its period.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from casemate.errors import BackendError
from casemate.guard.client_state.withheld_documents import key_of
from casemate.protocols import EventStore
from casemate.runtime.bounded_dict import BoundedDict
from casemate.types import QuotaGrant, QuotaRequest

_log = logging.getLogger(__name__)
PREFIX = "crawl words"
"""Beginning of the names of these quotas."""
BLOCK_SHARE = 16
"""A process acquires this part of the words that are left, unless it needs more at once.

At first, it acquires only what it needs, because it does not know how many are left. So a restart loses few words.
"""
KEPT_PERIODS = 366
"""Ended periods whose quotas are kept. If fewer were, a process with a fast clock would delete quotas in use."""
MAX_OWNERS = 1_000_000
"""Owners counted without an event store; the oldest are forgotten first."""


@dataclass(slots=True)
class WordBlock:
    """What this process knows of a quota.

    Attributes:
        name: Of the quota.
        period: Number of the period that the others are of.
        left: Words that this process acquired and has not given.
        used: Words that all processes had acquired when this one last did.
    """

    name: str
    period: int = -1
    left: int = 0
    used: int = 0


class WantedWords(NamedTuple):
    """Words that a block lacks, and the quota's limit."""

    block: WordBlock
    lacking: int
    most: int


class WordQuotas:
    """The quotas of the owners, in periods of equal length since 1970.

    Args:
        seconds: Length of a period.
        store: The shared event store; None: only this process counts, in memory.
    """

    def __init__(self, seconds: float, store: EventStore | None) -> None:
        self._seconds, self._store = seconds, store
        self._counts: BoundedDict[str, int] = BoundedDict(MAX_OWNERS)  # without a store
        self._lock = threading.Lock()
        self._discarded_in = -1  # period in which this process last discarded outdated quotas

    def words_left(self, block: WordBlock) -> int:
        """Returns the words that this process may give from a block."""
        with self._lock:
            self._renew(block)
            return block.left

    def most_left(self, block: WordBlock, most: int) -> int:
        """Returns the words that may be left to this process: those of the block, and those no process has acquired.

        Others may have acquired some of them meanwhile.
        """
        with self._lock:
            self._renew(block)
            return block.left + max(0, most - block.used)

    def give(self, block: WordBlock, words: int) -> None:
        """Takes words that were given from a block; below 0 if more were given than acquired."""
        with self._lock:
            self._renew(block)
            block.left -= words

    def acquire(self, wanted: Sequence[WantedWords]) -> None:
        """Acquires what blocks lack, as far as the quotas allow, in one transaction. Blocks.

        Raises:
            BackendError: If the store fails. The words may count as given.
        """
        with self._lock:
            period = self._period()
            requests = []
            for block, lacking, most in wanted:
                self._renew(block)
                ahead = (most - block.used) // BLOCK_SHARE if block.used else 0  # unknown until the first grant
                amount = max(lacking, ahead)
                requests.append(QuotaRequest(f"{block.name} {self._seconds:g}s{period}", amount, most))
        grants = self._count(requests) if self._store is None else self._store.acquire(requests)
        with self._lock:
            for (block, *_), grant in zip(wanted, grants, strict=True):
                self._renew(block)
                if block.period == period:
                    block.left += grant.amount
                    block.used = max(block.used, int(grant.used))
            is_due, self._discarded_in = self._discarded_in != period, period
        if is_due and self._store is not None:
            self._discard_outdated(self._store, period)

    def _discard_outdated(self, store: EventStore, period: int) -> None:
        """Deletes the quotas of periods that ended ``KEPT_PERIODS`` ago, once per process and period.

        A failure only leaves them there.
        """
        kept = re.compile(rf"{PREFIX} [0-9a-f]{{32}} {re.escape(f'{self._seconds:g}')}s(\d+)")
        try:
            named = (kept.fullmatch(name) for name in store.quota_usage(f"{PREFIX} "))
            store.discard_quotas([one[0] for one in named if one and int(one[1]) < period - KEPT_PERIODS])
        except BackendError as error:
            _log.warning("outdated quotas could not be deleted: %s", error)

    def _period(self) -> int:
        return int(time.time() // self._seconds)

    def _renew(self, block: WordBlock) -> None:
        """Empties a block of another period. Requires the lock."""
        if block.period != (period := self._period()):
            block.period, block.left, block.used = period, 0, 0

    def _count(self, requests: Sequence[QuotaRequest]) -> list[QuotaGrant]:
        """Grants requests from the counts in memory."""
        grants = []
        with self._lock:
            for request in requests:
                before = self._counts.get(request.name, 0)
                amount = max(0, min(request.amount, int(request.most) - before))
                self._counts[request.name] = before + amount
                grants.append(QuotaGrant(amount, before + amount))
        return grants


def quota_name(tenant: str, client: str | None) -> str:
    """Name of the quota of a client, or of a tenant, without the period. A digest: names may identify a person."""
    owner = key_of(tenant, client) if client is not None else (tenant,)
    digest = hashlib.blake2b(repr(owner).encode(), digest_size=16).hexdigest()
    return f"{PREFIX} {digest}"


def reset_quota(store: EventStore, tenant: str, client: str) -> None:
    """Returns to a client's quotas what was acquired from them.

    Raises:
        BackendError: If the store fails.
    """
    used = store.quota_usage(f"{quota_name(tenant, client)} ")
    if returned := [QuotaRequest(name, -int(words), words) for name, words in used.items() if words >= 1]:
        store.acquire(returned)
