"""Says when the daily share of ``crawl_limit`` covers a whole collection, and what to write into casemate.yaml."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.protocols import Defense


def daily_share_notes(defenses: Sequence[Defense], chunks: int, k: int) -> Iterator[str]:
    """Yields a note for each ``crawl_limit`` that lets one client see every chunk.

    Args:
        defenses: The guard's defenses.
        chunks: Chunks of a tenant.
        k: Chunks in a context, at least 1.
    """
    for limit in defenses:
        if isinstance(limit, CrawlLimit) and (note := limit.describe_small_collection(chunks, k)):
            most = math.ceil(chunks / k) - 1
            yield f"{note}. In casemate.yaml: - {{use: crawl_limit, questions: {most}}}" if most else note
