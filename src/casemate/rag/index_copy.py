"""Copies a tenant's documents and vectors to another index. Nothing is embedded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from casemate.errors import DataError
from casemate.maths.moments import CorpusMoments
from casemate.protocols import Index, Progress
from casemate.types import DEFAULT_TENANT, Document, Vector

COPY_BATCH = 2048  # documents in one batch
MOMENT_TOLERANCE = 1e-7
"""Tolerance for sums of the same unit vectors in different orders. One different vector exceeds it."""


def copy_index(
    index: Index,
    target: Index,
    tenant: str = DEFAULT_TENANT,
    without: Collection[str] = (),
    progress: Progress = lambda count: None,
) -> int:
    """Copies a tenant's sources to another index, opened for the same embedder; returns the number of chunks. Blocks.

    Sources that only the target has, and those in ``without``, are removed from it. Documents already copied are kept,
    so an interrupted copy resumes and a finished one is reused. At the end the moments of both indexes must agree: they
    are sums over all vectors, so one document too many or too few shows.

    Raises:
        DataError: If the tenant has no documents, or the index changed during the copy.
    """
    wanted = {source: digest for source, digest in index.digests(tenant).items() if source not in without}
    sizes, moments = _sizes_and_moments(index, wanted, tenant)
    copied = 0
    for keep in (True, False):  # if the reused part does not match, everything is copied again
        stale = [s for s, digest in target.digests(tenant).items() if not keep or wanted.get(s) != digest]
        if stale:
            target.remove(stale, tenant)
        missing = wanted.keys() - target.digests(tenant).keys()
        for documents, vectors in _read_sources(index, {s: sizes[s] for s in missing if s in sizes}, tenant):
            target.add(documents, vectors, tenant)
            copied += len(documents)
            progress(len(documents))
        if target.digests(tenant) == wanted and _same_moments(target.moments(tenant), moments):
            return copied
    raise DataError("the index changed during the copy; run again when no process writes to it")


def _sizes_and_moments(index: Index, wanted: Collection[str], tenant: str) -> tuple[Counter[str], CorpusMoments]:
    """The number of chunks of each source, and the moments of all of them."""
    sizes: Counter[str] = Counter()
    total = None
    for documents, vectors in index.scan(tenant):
        mine = [i for i, d in enumerate(documents) if d.source in wanted]
        sizes.update(documents[i].source for i in mine)
        part = CorpusMoments.of(vectors[mine])
        total = part if total is None else total + part
    if total is None:
        raise DataError(f"tenant {tenant!r} has no documents; run 'casemate index' first")
    return sizes, total


def _read_sources(index: Index, sizes: Mapping[str, int], tenant: str) -> Iterator[tuple[list[Document], Vector]]:
    """Chunks with their vectors, about `COPY_BATCH` at a time, in whole sources: adding replaces a source."""
    parts: dict[str, list[tuple[Document, Vector]]] = {}
    whole: list[tuple[Document, Vector]] = []
    for documents, vectors in index.scan(tenant) if sizes else ():
        for document, vector in zip(documents, vectors, strict=True):
            if document.source in sizes:
                part = parts.setdefault(document.source, [])
                part.append((document, vector.copy()))
                whole += parts.pop(document.source) if len(part) == sizes[document.source] else ()
        if len(whole) >= COPY_BATCH:
            yield [d for d, _ in whole], np.stack([v for _, v in whole])
            whole = []
    if whole:
        yield [d for d, _ in whole], np.stack([v for _, v in whole])


def _same_moments(a: CorpusMoments, b: CorpusMoments) -> bool:
    return (
        a.n == b.n
        and float(np.abs(a.mean - b.mean).max()) <= MOMENT_TOLERANCE
        and float(np.abs(a.scatter - b.scatter).max()) <= MOMENT_TOLERANCE
    )
