"""Headers that go with requests to other systems while one of ours is answered: how a trace goes on elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("casemate-passed-on")


def pass_on(headers: Mapping[str, str]) -> None:
    """Sends these along from now on, in this task and in what it begins."""
    _HEADERS.set(headers)


def passed_on() -> dict[str, str]:
    """What is to be sent along; nothing outside of a gateway that writes traces."""
    return dict(_HEADERS.get({}))
