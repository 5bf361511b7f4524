"""A span: one step of one request, as tracing tools record it, in one form for all export formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple


class SpanEvent(NamedTuple):
    """Something that happened during a span: its name and its attributes."""

    name: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """One step of one request.

    Attributes:
        trace: Id of the request.
        id: Id of the span, unique in its trace.
        parent: Id of the enclosing span; empty: none.
        start: None: the export has no usable time.
        attributes: Attributes under their published names. Values are strings, numbers, lists or mappings.
    """

    trace: str
    id: str
    parent: str
    start: datetime | None
    attributes: Mapping[str, Any]
    events: tuple[SpanEvent, ...] = ()
