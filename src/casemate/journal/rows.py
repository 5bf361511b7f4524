"""Documents as rows, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from casemate import indexing
from casemate.errors import DataError
from casemate.journal.heads import PIECE, pieces
from casemate.journal.lease import MORE
from casemate.journal.store import Row
from casemate.types import Document, Vector


def hashed(text: str) -> str:
    """What stands for a text in rows and conditions: 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def rows_of(keys: Callable[[int], range], document: Document, vector: Vector, tenant: str) -> list[Row]:
    """The rows of a document: one, and more for the rest of a long text.

    Args:
        keys: Gives so many fresh keys.
        document: What is written.
        vector: Its vector; the rows of the rest carry it, too, because each needs one.
        tenant: Whose it is.
    """
    columns = indexing.columns(document)
    texts = pieces(json.dumps(columns, ensure_ascii=False))
    label = json.dumps(columns[1:3], ensure_ascii=False)
    label = f"{len(texts) - 1} {label if len(label) <= PIECE else ''}"
    first, *rest = keys(len(texts))
    row = Row(first, hashed(tenant), hashed(document.source), hashed(document.id), label, texts[0], vector)
    return [row, *(Row(key, MORE, "", "", "", text, vector) for key, text in zip(rest, texts[1:], strict=True))]


def rest_of(row: Row) -> range:
    """The keys of the rows that hold the rest of a document."""
    return range(row.key + 1, row.key + 1 + int(row.label.partition(" ")[0]))


def source_of(row: Row) -> tuple[str, str] | None:
    """Source and digest, if the label has room for them."""
    text = row.label.partition(" ")[2]
    return tuple(json.loads(text)) if text else None


def columns_of(row: Row, rest: Sequence[str]) -> list[str]:
    """The columns of a document, from its first row and the bodies of the others."""
    try:
        columns: list[str] = json.loads(row.body + "".join(rest))
    except ValueError as error:
        raise DataError(f"the document with key {row.key} is damaged; 'casemate index --rebuild'") from error
    return columns
