"""Propagates trace headers to backends: requests during a traced query carry its context."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("casemate-trace-headers")


def forward_headers(headers: Mapping[str, str]) -> None:
    """Sets the headers for requests of this task and of tasks that it starts."""
    _HEADERS.set(headers)


def forwarded_headers() -> dict[str, str]:
    """Headers to send along; empty without tracing."""
    return dict(_HEADERS.get({}))
