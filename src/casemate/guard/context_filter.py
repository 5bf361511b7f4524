"""Removes passages from the context before the generator reads it, by how they compare with one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from casemate.errors import CapabilityError
from casemate.guard import generation_costs
from casemate.protocols import Embedder, EventStore, Generator
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.types import Document, Prompt, Vector

CACHED_PASSAGES = 4096
Choice: TypeAlias = Callable[[Sequence[Document], Callable[[], Vector]], frozenset[int]]
"""Returns the positions of the passages to remove. Its second argument computes their unit vectors, (n, dim)."""


class ContextFilter(Generator):
    """A generator that reads only some passages. Hits beyond the context do not take the place of the others.

    A ``generation`` event reports the number of passages and of those removed.

    Args:
        generator: The generator that reads the rest.
        embedder: The system's; embeds passages as the index does. The most recent ones are cached.
        store: The event store; None: no events.
        choose: Chooses the passages to remove. It runs in a thread, and only for two or more passages.

    Raises:
        CapabilityError: If there is no embedder.
    """

    def __init__(
        self, name: str, generator: Generator, embedder: Embedder | None, store: EventStore | None, choose: Choice
    ) -> None:
        if embedder is None:
            raise CapabilityError(f"{name} needs an embedder, and there is none; set the option embedder")
        self._name, self._generator, self._store, self._choose = name, generator, store, choose
        self._embedder = CachedEmbedder(embedder, most=CACHED_PASSAGES)

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer to the rest of the context."""
        removed: frozenset[int] = frozenset()
        if len(prompt.context) > 1:
            texts = [document.content for document in prompt.context]
            removed = await asyncio.to_thread(self._choose, prompt.context, lambda: self._embedder.embed(texts))
        figures = {"passages": len(prompt.context), "removed": len(removed)}
        generation_costs.append(self._store, self._name, prompt.request, figures)
        kept = tuple(document for i, document in enumerate(prompt.context) if i not in removed)
        async for piece in self._generator.stream(replace(prompt, context=kept)):
            yield piece
