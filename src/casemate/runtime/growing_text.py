"""Streams a text that a model generates token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

from casemate.text.tokens import REPLACEMENT_CHARACTER


async def stream_growth(texts: Iterator[str], empty: Exception | None = None) -> AsyncGenerator[str, None]:
    """Streams the difference between successive texts; a character waits until all its tokens are there.

    Each step runs in a thread. ``empty`` is raised if there is no text.
    """
    text, sent = "", 0
    while (longer := await asyncio.to_thread(next, texts, None)) is not None:
        text = longer
        if len(text) > sent and not text.endswith(REPLACEMENT_CHARACTER):
            yield text[sent:]
            sent = len(text)
    if text[sent:]:
        yield text[sent:]
    elif not sent and empty:
        raise empty
