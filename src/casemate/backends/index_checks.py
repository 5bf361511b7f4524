"""What all indexes share: input validation, document columns, checks of moments and texts, and paged scans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.errors import DataError
from casemate.maths.moments import CorpusMoments
from casemate.types import Document, Vector

VectorPages: TypeAlias = Iterable[tuple[npt.NDArray[np.int64], Vector]]
"""All keys and vectors of a tenant, in pages of shapes (m,) and (m, dim)."""

UNIT_TOLERANCE = 1e-4  # largest difference of a float32 vector's length from 1
MOMENT_TOLERANCE = 1e-6  # largest relative difference of the stored moments from those of the stored vectors
PROBES = 8
"""Random directions along which moments are compared with vectors: an error is orthogonal to one with probability 0."""
SCAN_PAGE = 1024  # documents per page of a scan
COLUMNS = "id, source, digest, title, text, metadata, checksum"  # the columns of ``document_columns``, for SQL
NAMED_FAULTS = 5  # damaged documents that a check names; it counts the others
FIX = "run 'casemate doctor --fix'"
REBUILD = "run 'casemate index --rebuild'"


def require_valid(documents: Sequence[Document], vectors: Vector, dim: int) -> Vector:
    """Validates documents to be added and their vectors, (n, dim), and returns these as contiguous float32.

    Raises:
        DataError: If the shape is wrong, a vector is not of unit length (NaN is not), an id occurs twice, or a text is
            not valid Unicode.
    """
    if np.shape(vectors) != (len(documents), dim):
        raise DataError(
            f"{len(documents)} documents need {len(documents)} vectors of {dim} dimensions; "
            f"got an array of shape {np.shape(vectors)}"
        )
    with np.errstate(over="ignore"):  # a value too large for float32 becomes infinite, so its vector is refused below
        stored = np.ascontiguousarray(vectors, np.float32)
    wrong = _not_unit(stored)
    if wrong.any():
        bad = documents[int(np.argmax(wrong))]
        raise DataError(f"the vector of document {bad.id!r} is not of unit length; normalize it before adding")
    seen: set[str] = set()
    for d in documents:
        if d.id in seen:
            raise duplicate_id(d.id)
        seen.add(d.id)
        try:
            "".join((d.id, d.source, d.digest, d.title, d.text)).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"document {d.id!r} is not valid Unicode: it has half of a surrogate pair") from error
    return stored


def require_query(vector: Vector, dim: int) -> Vector:
    """Validates a query vector and returns it as float32, (dim,).

    Raises:
        DataError: If it has another shape or is not finite.
    """
    if np.shape(vector) != (dim,) or not np.isfinite(vector).all():
        raise DataError(
            f"a query vector needs {dim} finite numbers; got an array of shape {np.shape(vector)}; check the embedder"
        )
    return np.ascontiguousarray(vector, np.float32)


def document_columns(document: Document) -> tuple[str, ...]:
    """Id, source, digest, title, text, the metadata as JSON in ASCII, which any database accepts, and the checksum.

    Raises:
        DataError: If the metadata cannot be written as JSON.
    """
    d = document
    try:
        columns = d.id, d.source, d.digest, d.title, d.text, json.dumps(dict(d.metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the metadata of document {d.id!r} cannot be written as JSON: {error}") from error
    return *columns, checksum(columns)


def checksum(columns: Sequence[str]) -> str:
    """SHA-256 of the columns of a document, in hexadecimal digits: against damage, not against a forger.

    >>> checksum(("a", "", "", "", "text", "{}"))[:8]
    '22ab475d'
    """
    as_json = f"[{', '.join(map(encode_basestring_ascii, columns))}]"  # as json.dumps, in three quarters of its time
    return hashlib.sha256(as_json.encode()).hexdigest()


def is_damaged(row: Sequence[str]) -> bool:
    """Whether the columns of a document do not fit their checksum. Documents of earlier versions have none."""
    stored = _stored_checksum(row)
    return bool(stored) and checksum(row[:-1]) != stored


def _stored_checksum(row: Sequence[str]) -> str:
    """The checksum of a row; empty if an earlier version wrote it."""
    return row[-1] if len(row) == len(COLUMNS.split(", ")) else ""


def decode_document(row: Sequence[str]) -> Document:
    """The inverse of ``document_columns``.

    Raises:
        DataError: If the document does not fit its checksum: a damaged text is never part of an answer.
    """
    identity, source, digest, title, text, metadata, *_ = row
    try:
        if is_damaged(row):
            raise ValueError("checksum")
        return Document(identity, text, title, source, digest, dict(json.loads(metadata)))
    except (TypeError, ValueError) as error:
        raise DataError(f"document {identity!r} is damaged in the index: {REBUILD}") from error


def decode_metadata(rows: Iterable[tuple[str, str]]) -> list[tuple[str, dict[str, Any]]]:
    """Sources with their metadata, from the columns of both.

    Raises:
        DataError: If metadata are damaged.
    """
    try:
        return [(source, dict(json.loads(metadata))) for source, metadata in rows]
    except (TypeError, ValueError) as error:
        raise DataError(f"metadata of a document are damaged in the index: {REBUILD}") from error


def check_documents(rows: Iterable[Sequence[str]]) -> list[str]:
    """Compares the columns of all documents with their checksums, in constant memory. One sentence per fault."""
    damaged = without = 0
    faults = list[str]()
    for row in rows:
        without += not _stored_checksum(row)
        if is_damaged(row):
            damaged += 1
            if damaged <= NAMED_FAULTS:
                faults.append(f"text or metadata of document {row[0]!r} do not fit their checksum: {REBUILD}")
    if damaged > NAMED_FAULTS:
        faults.append(f"{damaged - NAMED_FAULTS} more documents do not fit their checksums: {REBUILD}")
    if without:
        faults.append(f"{without} documents have no checksum, because an earlier version wrote them: {REBUILD}")
    return faults


def duplicate_id(identity: str) -> DataError:
    """The error for an id that the tenant already has."""
    return DataError(f"duplicate document id {identity!r}; ids are unique within a tenant")


def embedder_mismatch(where: object, stored: str | None, configured: str) -> DataError:
    """The error for an index of another embedder, or one that was cleared since it was opened."""
    return DataError(
        f"{where} has vectors of the embedder {stored!r}, not of {configured!r}: "
        "configure that embedder, or run 'casemate index --rebuild' to embed all documents again"
    )


def damaged_moments(tenant: str) -> DataError:
    """The error for moments that cannot be decoded."""
    return DataError(f"tenant {tenant!r}: the moments are damaged: {FIX}")


def decode_moments(tenant: str, row: tuple[int, bytes, bytes] | None, dim: int) -> CorpusMoments:
    """The moments from a database row (n, mean, scatter). None: no documents.

    Raises:
        DataError: If their size does not fit the dimension.
    """
    if row is None or not row[0]:
        return CorpusMoments.empty(dim)
    n, mean, scatter = row
    types_fit = isinstance(n, int) and isinstance(mean, bytes) and isinstance(scatter, bytes)
    if not types_fit or (len(mean), len(scatter)) != (8 * dim, 8 * dim * dim):
        raise damaged_moments(tenant)
    return CorpusMoments(n, np.frombuffer(mean), np.frombuffer(scatter).reshape(dim, dim))


def updated_moments(
    tenant: str, stored: CorpusMoments, removed: CorpusMoments, added: CorpusMoments | None = None
) -> CorpusMoments:
    """The moments after some vectors were removed and others added.

    Raises:
        DataError: If more is removed than was stored: the moments do not fit the vectors.
    """
    try:
        left = stored - removed
        return left + added if added else left
    except ValueError as error:
        raise DataError(f"tenant {tenant!r}: the moments do not fit the vectors ({error}): {FIX}") from error


def compute_moments(pages: VectorPages, dim: int) -> CorpusMoments:
    """The moments of stored vectors."""
    return sum((CorpusMoments.of(vectors) for _, vectors in pages), CorpusMoments.empty(dim))


def scan_pages(
    read: Callable[[int, int], Sequence[Sequence[Any]]], matrix: Callable[[Sequence[bytes]], Vector]
) -> Iterator[tuple[list[Document], Vector]]:
    """Implements ``Index.scan`` for a store whose keys increase with age.

    Args:
        read: Returns rows (key, vector, *columns) by key: at most as many as the second number, with keys above the
            first. Each call is one transaction that ends before the page is used, so a slow caller blocks no writer.
        matrix: Converts vectors from the store's format to an array.
    """
    after = 0
    while rows := read(after, SCAN_PAGE):
        yield [decode_document(row[2:]) for row in rows], matrix([row[1] for row in rows])
        after = rows[-1][0]


def check_tenants(
    tenants: Iterable[str], load: Callable[[str], CorpusMoments], vectors: Callable[[str], VectorPages]
) -> list[str]:
    """Runs ``check_moments`` for each tenant."""
    return [fault for t in tenants for fault in check_moments(t, partial(load, t), vectors(t))]


def check_moments(tenant: str, load: Callable[[], CorpusMoments], pages: VectorPages) -> list[str]:
    """Compares a tenant's stored moments with its vectors: O(n dim) time, constant memory, one sentence per fault.

    Compares the count, the sum of squared lengths (n for unit vectors), and mean and standard deviation of the
    similarities to ``PROBES`` random directions.
    """
    try:
        moments = load()
    except DataError as error:
        return [str(error)]
    probes = np.random.default_rng(0).standard_normal((len(moments.mean), PROBES)).astype(np.float32)
    faults, squares, projected = [], 0.0, CorpusMoments.empty(PROBES)
    for keys, vectors in pages:
        X = vectors.astype(np.float64)
        squares += float((X * X).sum())
        projected += CorpusMoments.of(X @ probes)  # type: ignore[arg-type]  # already float64
        faults += [
            f"tenant {tenant!r}: the vector with key {key} is not of unit length: index its document again"
            for key in keys[_not_unit(vectors)]
        ]
    if projected.n != moments.n:
        return [*faults, f"tenant {tenant!r}: the moments count {moments.n} documents, the index {projected.n}: {FIX}"]
    if not projected.n:
        return faults
    if not abs(moments.sum_of_squares - squares) <= MOMENT_TOLERANCE * projected.n:  # `not <=` also catches NaN
        sums = f"sum to {moments.sum_of_squares:.6f} in the moments, to {squares:.6f} in the vectors"
        faults.append(f"tenant {tenant!r}: the squared lengths {sums}: {FIX}")
    expected = np.array([[b.mean, b.std] for b in map(moments.similarity_stats, probes.T)])
    actual = np.stack([projected.mean, np.sqrt(np.diag(projected.scatter) / projected.n)], axis=1)
    if not np.allclose(expected, actual, rtol=MOMENT_TOLERANCE, atol=1e-6):
        faults.append(f"tenant {tenant!r}: the moments do not fit the vectors: {FIX}")
    return faults


def _not_unit(vectors: Vector) -> npt.NDArray[np.bool_]:
    """Rows that are not of unit length; NaN is not."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    unit: npt.NDArray[np.bool_] = np.abs(lengths - 1) < UNIT_TOLERANCE
    return ~unit
