"""Caches for campaigns: replies of a generator, kept in the campaign store."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from casemate.protocols import Generator
from casemate.rag.pipeline import join_stream
from casemate.redteam.lab.store import CampaignStore
from casemate.types import Prompt

PROMPT_COUNTS: ContextVar[Counter[str] | None] = ContextVar("casemate_lab_prompt_counts", default=None)
"""Number of answers to each prompt in the current trial; None outside of trials."""


@dataclass(eq=False)
class ReplyBuffer:
    """Replies generated for one work item: the interface of a `CampaignStore`, in memory."""

    _replies: dict[str, str] = field(default_factory=dict)

    def get_reply(self, key: str) -> str | None:
        """See `CampaignStore.get_reply`."""
        return self._replies.get(key)

    def put_reply(self, key: str, text: str) -> str:
        """See `CampaignStore.put_reply`."""
        return self._replies.setdefault(key, text)

    def drain(self) -> dict[str, str]:
        """Returns all replies and empties the buffer."""
        drained, self._replies = self._replies, {}
        return drained


@dataclass(eq=False)
class CachedGenerator(Generator):
    """Answers a repeated prompt from the store instead of the model.

    A prompt that repeats within one trial is a new sample of the model. The count restarts with each trial, so the
    guarded run gets the bare run's replies wherever the context is equal. ``label`` identifies the generator with all
    its options; ``calls`` counts replies of the model, ``hits`` those of the store.
    """

    inner: Generator
    store: CampaignStore | ReplyBuffer
    label: str
    calls: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Yields the whole answer at once."""
        fingerprint = _fingerprint(self.label, prompt)
        counts = PROMPT_COUNTS.get()
        repetition = 0 if counts is None else counts[fingerprint]
        key = f"{fingerprint}-{repetition}"
        text = self.store.get_reply(key)
        if text is None:
            text = self.store.put_reply(key, await join_stream(self.inner.stream(prompt)))
            self.calls += 1
        else:
            self.hits += 1
        if counts is not None:
            counts[fingerprint] = repetition + 1
        yield text


def _fingerprint(label: str, prompt: Prompt) -> str:
    """Fingerprint of everything that a generator can read."""
    documents = [[d.id, d.source, d.title, d.text, dict(d.metadata)] for d in prompt.context]
    whole = json.dumps([label, prompt.question, prompt.instructions, documents], sort_keys=True, default=str)
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
