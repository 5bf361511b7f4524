"""Encodes documents as rows and decodes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from casemate.backends import index_checks
from casemate.backends.mvcc.manifest import ASCII_BODY, UNICODE_BODY
from casemate.backends.mvcc.versioned_store import StoredRow
from casemate.errors import DataError
from casemate.types import Document, Vector

MANIFEST, CONTINUATION = "manifest", "continuation"
"""Tenant column of manifest rows, and of rows with the rest of a long document."""


def hash_text(text: str) -> str:
    """Stands for a text in rows and filters: 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def split_body(text: str) -> list[str]:
    """Splits a text into row bodies, at least one."""
    size = ASCII_BODY if text.isascii() else UNICODE_BODY
    return [text[i : i + size] for i in range(0, len(text), size)] or [""]


def encode_document(keys: Callable[[int], range], document: Document, vector: Vector, tenant: str) -> list[StoredRow]:
    """The rows of a document: one, and continuation rows if the text is long, which repeat the vector."""
    columns = index_checks.document_columns(document)
    bodies = split_body(json.dumps(columns, ensure_ascii=False))
    label = json.dumps(columns[1:3], ensure_ascii=False)
    label = f"{len(bodies) - 1} {label if len(label) <= UNICODE_BODY else ''}"
    first, *rest = keys(len(bodies))
    row = StoredRow(
        first, hash_text(tenant), hash_text(document.source), hash_text(document.id), label, bodies[0], vector
    )
    continuation = zip(rest, bodies[1:], strict=True)
    return [row, *(StoredRow(key, CONTINUATION, "", "", "", body, vector) for key, body in continuation)]


def continuation_keys(row: StoredRow) -> range:
    """Keys of a document's continuation rows."""
    return range(row.key + 1, row.key + 1 + int(row.label.partition(" ")[0]))


def source_and_digest(row: StoredRow) -> tuple[str, str] | None:
    """Source and digest from the label. None: they were too long for it."""
    text = row.label.partition(" ")[2]
    return tuple(json.loads(text)) if text else None


def decode_columns(row: StoredRow, rest: Sequence[str]) -> list[str]:
    """The columns of a document (see ``index_checks.document_columns``) from its first row and the other rows' bodies.

    Raises:
        DataError: If the row is damaged.
    """
    try:
        columns: list[str] = json.loads(row.body + "".join(rest))
    except ValueError as error:
        raise DataError(f"the document with key {row.key} is damaged: run 'casemate index --rebuild'") from error
    return columns
