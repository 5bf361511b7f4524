"""Reads values that were stored as JSON."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from casemate.errors import DataError

Stored = TypeVar("Stored")


def read_stored(adapter: TypeAdapter[Stored], value: Any, what: str) -> Stored:
    """Converts stored JSON to its type.

    Raises:
        DataError: If it does not fit. The message names the fields, never their values, which may be texts.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        details = error.errors(include_input=False, include_url=False, include_context=False)
        fields = sorted({".".join(map(str, e["loc"])) for e in details})
    raise DataError(f"a stored {what} is damaged (field {', '.join(fields)}); restore the event store from a backup")
