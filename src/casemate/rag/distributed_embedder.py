"""An embedder that distributes long lists of texts over the workers of an executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from casemate.protocols import Embedder, EmbedderProxy, Progress
from casemate.runtime.executor import EMBEDDING_BATCH, Executor, Item, Stopped, batches
from casemate.types import Vector


@dataclass(eq=False)
class DistributedEmbedder(EmbedderProxy):
    """Embeds short lists of texts in this process and long ones on the executor's workers, by ``task``."""

    inner: Embedder
    executor: Executor
    task: Callable[[Sequence[str]], Vector]
    _prefetched: dict[str, Vector] = field(default_factory=dict, init=False, repr=False)

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """See ``Embedder``. More than ``EMBEDDING_BATCH`` texts are embedded in batches of that size."""
        ready = self._prefetched
        if texts and all(text in ready for text in texts):
            if progress:
                progress(len(texts))
            return np.stack([ready[text] for text in texts])
        if len(texts) <= EMBEDDING_BATCH:
            return self.inner.embed(texts, progress)
        found = []
        for vectors in self.executor.map(self.task, batches(texts, EMBEDDING_BATCH)):
            found.append(vectors)
            if progress:
                progress(len(vectors))
        return np.concatenate(found)

    def prefetch(
        self, work: Iterable[Item], texts: Callable[[Item], Sequence[str]], stopped: Stopped = lambda: False
    ) -> Iterator[Item]:
        """Yields the same items in order, while the workers embed the texts of the following ones.

        Until the next item is requested, ``embed`` returns the prefetched vectors of the current one.
        """
        waiting: deque[tuple[Item, Sequence[str]]] = deque()

        def batches() -> Iterator[Sequence[str]]:
            for item in work:
                waiting.append((item, list(texts(item))))
                yield waiting[-1][1]

        try:
            for vectors in self.executor.map(self.task, batches(), stopped):
                item, embedded = waiting.popleft()
                self._prefetched = dict(zip(embedded, vectors, strict=True))
                yield item
        finally:
            self._prefetched = {}
