"""The request of an attack: a template with the text about the candidate.

Small models follow short requests better than long ones, so attacks let the user replace their request. Choose it on
other documents than the attacked ones (``python -m benchmarks.real requests``).
"""

from __future__ import annotations

import reprlib

from casemate.errors import ConfigError

TEXT = "{text}"
"""Stands for the text in a request."""


def require_text(attack: str, request: str) -> None:
    """Checks that a request shows the text.

    Raises:
        ConfigError: If it does not.
    """
    if not isinstance(request, str) or TEXT not in request:
        shown = reprlib.repr(request)
        raise ConfigError(f"{attack}.request is {shown}; it must contain {TEXT}, in place of which the text is shown")


def with_text(request: str, text: str) -> str:
    """Returns a request with the text.

    >>> with_text('Is "{text}" in the documents?', "a {text}")
    'Is "a {text}" in the documents?'
    """
    return request.replace(TEXT, text)
