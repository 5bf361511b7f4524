"""What every index owes its callers, whatever it keeps vectors in: checks, words for what they find, and patience."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from casemate.errors import DataError
from casemate.stats import CorpusMoments
from casemate.types import Document, Vector

Sent = TypeVar("Sent")
Given = TypeVar("Given")
Result = TypeVar("Result")
Pieces: TypeAlias = Iterable[tuple[npt.NDArray[np.int64], Vector]]
"""All keys and vectors of a tenant, (m,) and (m, dim) at a time."""

UNIT_TOLERANCE = 1e-4
"""How far the length of a float32 vector may be from 1."""
MOMENT_TOLERANCE = 1e-6
"""How far the stored moments may be from those of the stored vectors, relative to them."""
PROBES = 8
"""Directions along which moments are compared with vectors: an error hides from none of them but by measure zero."""
SCAN = 1024
"""Documents that a scan reads at a time."""
COLUMNS = "id, source, digest, title, text, metadata"
"""What ``columns`` gives, as a database calls it."""
FIX = "run 'casemate doctor --fix'"


def require_fit(documents: Sequence[Document], vectors: Vector, dim: int) -> Vector:
    """The vectors as they are stored, contiguous float32.

    Args:
        documents: What is to be added.
        vectors: One row for each document, (n, dim).
        dim: Dimensions of the index.

    Raises:
        DataError: If the shape is wrong, a vector is not of unit length (NaN is not), an id is given twice, or a text
            is no Unicode.
    """
    if np.shape(vectors) != (len(documents), dim):
        raise DataError(
            f"{len(documents)} documents need {len(documents)} vectors of {dim}, got an array of {np.shape(vectors)}"
        )
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, hence not of unit length
        stored = np.ascontiguousarray(vectors, np.float32)
    wrong = _not_unit(stored)
    if wrong.any():
        bad = documents[int(np.argmax(wrong))]
        raise DataError(f"the vector of document {bad.id!r} is not of unit length; normalise before adding")
    seen: set[str] = set()
    for d in documents:
        if d.id in seen:
            raise given_twice(d.id)
        seen.add(d.id)
        try:
            "".join((d.id, d.source, d.digest, d.title, d.text)).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"document {d.id!r} holds half of a surrogate pair, which is no text: {error}") from error
    return stored


def require_query(vector: Vector, dim: int) -> Vector:
    """The query's vector as float32, (dim,).

    Raises:
        DataError: If it has another shape, or is not finite: no similarity could be trusted.
    """
    if np.shape(vector) != (dim,) or not np.isfinite(vector).all():
        raise DataError(f"a query needs {dim} finite numbers, got an array of {np.shape(vector)}; see to the embedder")
    return np.ascontiguousarray(vector, np.float32)


def columns(document: Document) -> tuple[str, str, str, str, str, str]:
    """Id, source, digest, title, text, and the metadata as ASCII, so that any database takes it.

    Raises:
        DataError: If the metadata cannot be written as JSON.
    """
    d = document
    try:
        return d.id, d.source, d.digest, d.title, d.text, json.dumps(dict(d.metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the metadata of document {d.id!r} cannot be written as JSON: {error}") from error


def document_of(row: Sequence[str]) -> Document:
    """The document whose ``columns`` these are."""
    identity, source, digest, title, text, metadata = row
    try:
        return Document(identity, text, title, source, digest, dict(json.loads(metadata)))
    except (TypeError, ValueError) as error:
        raise DataError(f"document {identity!r} is damaged in the index; 'casemate index --rebuild'") from error


def given_twice(identity: str) -> DataError:
    """What to raise for an id that the tenant already has."""
    return DataError(f"the document id {identity!r} is given twice; ids are unique within a tenant")


def another_embedder(where: object, held: str | None, wanted: str) -> DataError:
    """What to raise for an index that was built by another embedder, or emptied since."""
    return DataError(
        f"{where} holds vectors of the embedder {held!r}, not of {wanted!r}: "
        "configure that embedder, or embed all anew with 'casemate index --rebuild'"
    )


def moments_of(tenant: str, row: tuple[int, bytes, bytes] | None, dim: int) -> CorpusMoments:
    """The moments that a database holds of a tenant as (n, mean, scatter), None: nothing.

    Raises:
        DataError: If they are of another size than the dimension asks for.
    """
    if row is None or not row[0]:
        return CorpusMoments.empty(dim)
    n, mean, scatter = row
    kinds = isinstance(n, int) and isinstance(mean, bytes) and isinstance(scatter, bytes)
    if not kinds or (len(mean), len(scatter)) != (8 * dim, 8 * dim * dim):
        raise DataError(f"tenant {tenant!r}: the moments are damaged: {FIX}")
    return CorpusMoments(n, np.frombuffer(mean), np.frombuffer(scatter).reshape(dim, dim))


def changed(tenant: str, held: CorpusMoments, gone: CorpusMoments, new: CorpusMoments | None = None) -> CorpusMoments:
    """The moments after some vectors went and others came.

    Raises:
        DataError: If more would go than there is: the moments do not belong to the vectors.
    """
    try:
        left = held - gone
        return left + new if new else left
    except ValueError as error:
        raise DataError(f"tenant {tenant!r}: the moments do not fit the vectors ({error}): {FIX}") from error


def moments_from(pieces: Pieces, dim: int) -> CorpusMoments:
    """The moments of the vectors themselves."""
    return sum((CorpusMoments.of(vectors) for _, vectors in pieces), CorpusMoments.empty(dim))


def scanned(
    read: Callable[[int, int], Sequence[Sequence[Any]]], matrix: Callable[[Sequence[bytes]], Vector]
) -> Iterator[tuple[list[Document], Vector]]:
    """``Index.scan`` for a store in which keys grow with age.

    Args:
        read: Gives rows (key, vector, *columns), by key: those with keys above the first number, so many as the second
            says. It is one transaction, over before the caller gets the piece, so a slow caller holds up nobody.
        matrix: Turns vectors as the store keeps them into an array.
    """
    after = 0
    while rows := read(after, SCAN):
        yield [document_of(row[2:]) for row in rows], matrix([row[1] for row in rows])
        after = rows[-1][0]


def compare_all(
    tenants: Iterable[str], load: Callable[[str], CorpusMoments], vectors: Callable[[str], Pieces]
) -> list[str]:
    """What ``compare_moments`` finds wrong with any of the tenants."""
    return [fault for t in tenants for fault in compare_moments(t, partial(load, t), vectors(t))]


def compare_moments(tenant: str, load: Callable[[], CorpusMoments], pieces: Pieces) -> list[str]:
    """What is wrong with a tenant's vectors and moments, a sentence each, in constant memory and O(n dim).

    Compared are the count, the sum of squares (tr(S), which is n for unit vectors), and mean and deviation of the
    similarities to ``PROBES`` random directions.

    Args:
        tenant: Named in the sentences.
        load: Gives what the index holds.
        pieces: What they are compared with.
    """
    try:
        moments = load()
    except DataError as error:
        return [str(error)]
    probes = np.random.default_rng(0).standard_normal((len(moments.mean), PROBES)).astype(np.float32)
    found, squares, law = [], 0.0, CorpusMoments.empty(PROBES)
    for keys, vectors in pieces:
        X = vectors.astype(np.float64)
        squares += float((X * X).sum())
        law += CorpusMoments.of(X @ probes)  # type: ignore[arg-type]  # in float64 already
        found += [
            f"tenant {tenant!r}: the vector with key {key} is not of unit length: index its document again"
            for key in keys[_not_unit(vectors)]
        ]
    if law.n != moments.n:
        return [*found, f"tenant {tenant!r}: the moments count {moments.n} documents, the index {law.n}: {FIX}"]
    if not law.n:
        return found
    if not abs(moments.square_norm - squares) <= MOMENT_TOLERANCE * law.n:  # written so that NaN is found too
        found.append(f"tenant {tenant!r}: tr(S) = {moments.square_norm:.6f}, the vectors have {squares:.6f}: {FIX}")
    held = np.array([[b.mean, b.std] for b in map(moments.background, probes.T)])
    seen = np.stack([law.mean, np.sqrt(np.diag(law.scatter) / law.n)], axis=1)
    if not np.allclose(held, seen, rtol=MOMENT_TOLERANCE, atol=1e-6):
        found.append(f"tenant {tenant!r}: the moments do not fit the vectors: {FIX}")
    return found


def within(steps: Generator[Sent, Given, Result], seconds: float) -> Generator[Sent, Given, Result]:
    """The same conversation with a server, broken off when the server was silent for too long.

    Raises:
        TimeoutError: If so. Silence is a false value sent in, as a driver does while it waits.
    """
    heard = monotonic()
    try:
        wanted = next(steps)
        while True:
            given = yield wanted
            if given:
                heard = monotonic()
            elif monotonic() - heard > seconds:
                raise TimeoutError(f"no answer for {seconds:g} seconds")
            wanted = steps.send(given)
    except StopIteration as end:
        result: Result = end.value
        return result


def _not_unit(vectors: Vector) -> npt.NDArray[np.bool_]:
    """Which rows are not of unit length; NaN is not."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    unit: npt.NDArray[np.bool_] = np.abs(lengths - 1) < UNIT_TOLERANCE
    return ~unit
