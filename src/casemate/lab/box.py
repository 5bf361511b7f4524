"""What stands between an attack and its target: it strips answers to replies, counts, remembers, and stops.

An attack holds a ``Box``, which asks and does nothing else. What the guard did is noted in the ``Session`` behind it,
for the lab. Finished sessions and generated replies are kept in a ``Ledger`` as they come, so that a killed campaign
goes on where it was, and no reply of a model is paid for twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import numpy as np

from casemate.errors import BackendError, BudgetExhausted, QueryError
from casemate.lab.errands import Replies
from casemate.lab.ledger import Exchange, Ledger
from casemate.protocols import BlackBox, Embedder, Generator, Progress, Remembering, Target
from casemate.rag import join
from casemate.types import DEFAULT_TENANT, Action, Answer, Prompt, Query, Reply, Vector

T = TypeVar("T")

_generated: ContextVar[Counter[str] | None] = ContextVar("casemate_lab_generated", default=None)
"""How often each prompt was answered in the session that is under way."""


@dataclass(slots=True)
class Budget:
    """How many questions may be asked.

    Attributes:
        total: Of a campaign; None: as many as it takes.
        each: Of one candidate.
        spent: Asked so far.
        exhausted: Whether one was refused because the total was spent.
        leased: Promised to errands that are under way.
    """

    total: int | None = None
    each: int | None = None
    spent: int = 0
    exhausted: bool = False
    leased: int = 0

    def lease(self, count: int) -> bool:
        """Promises so many questions to an errand; False if not so many are left."""
        if self.total is None:
            return True
        if self.spent + self.leased + count > self.total:
            return False
        self.leased += count
        return True

    def settle(self, count: int, asked: int) -> None:
        """An errand came back that was promised so many and asked so many."""
        self.leased -= count if self.total is not None else 0
        self.spent += asked

    def take(self, asked: int) -> None:
        """Takes one question out for a candidate that was asked so many.

        Raises:
            BudgetExhausted: If there is none.
        """
        if self.total is not None and self.spent >= self.total:
            self.exhausted = True
            raise BudgetExhausted(f"all {self.total} questions of the campaign are asked; raise its budget")
        if self.each is not None and asked >= self.each:
            raise BudgetExhausted(f"all {self.each} questions for this candidate are asked; raise its budget")
        self.spent += 1


class Box(BlackBox):
    """All that an attack gets."""

    def __init__(self, ask: Callable[[str], Awaitable[Reply]]) -> None:
        self._ask = ask

    async def ask(self, text: str) -> Reply:
        """See ``BlackBox.ask``."""
        return await self._ask(text)


@dataclass(slots=True)
class Session:
    """One attack on one candidate: in a ``with`` block it is the box, afterwards it tells what happened.

    Attributes:
        target: Who is asked.
        client: The client's name for the question of that number, from 0.
        budget: Shared by all sessions of a campaign.
        k: Documents that may be read for an answer.
        tenant: Whose documents.
        waits: Seconds before each further try when the target cannot be reached for the moment.
        cut: Whether the campaign's budget ended this session before the attack did.
    """

    target: Target
    client: Callable[[int], str]
    budget: Budget
    k: int = 5
    tenant: str = DEFAULT_TENANT
    waits: Sequence[float] = ()
    cut: bool = False
    _asked: int = 0
    _notes: dict[int, Exchange] = field(default_factory=dict)
    _token: Token[Counter[str] | None] | None = None

    def __enter__(self) -> Box:
        self._token = _generated.set(Counter())
        return Box(self._ask)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _generated.reset(self._token)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """What was asked and answered, in the order of asking."""
        return tuple(self._notes[number] for number in sorted(self._notes))

    async def _ask(self, text: str) -> Reply:
        try:
            self.budget.take(self._asked)
        except BudgetExhausted:
            self.cut |= self.budget.exhausted
            raise
        number, self._asked = self._asked, self._asked + 1
        query = Query(text, self.client(number), self.tenant, self.k)
        try:
            answer = await patiently(lambda: self.target.ask(query), self.waits)
        except QueryError:  # what a client sees of it tells nothing, whoever is a member
            self._notes[number] = Exchange(text, "", refused=True)
            return Reply("")
        except BackendError as error:  # it was tried often enough: nobody further out need try again
            raise BackendError(str(error), backend=error.backend, retryable=False) from error
        self._notes[number] = noted(text, answer)
        return answer.reply


def noted(question: str, answer: Answer) -> Exchange:
    """What the operator knows about an answer."""
    enforced = [v for v in answer.verdicts if v.enforced]
    return Exchange(
        question,
        answer.text,
        context=tuple(h.document.id for h in answer.retrieval.hits),
        hidden=tuple(sorted({i for v in enforced for i in v.hidden})),
        withheld=any(v.hidden or v.action is not Action.NONE for v in enforced),
        failed=any("error" in v.evidence for v in answer.verdicts),
    )


async def patiently(call: Callable[[], Awaitable[T]], waits: Sequence[float]) -> T:
    """What a call returns, tried again after each wait for as long as its errors say that this may help."""
    for wait in waits:
        try:
            return await call()
        except BackendError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(wait)
    return await call()


@dataclass(eq=False)
class CachedGenerator(Generator):
    """A generator whose replies are kept: the same prompt is answered again without asking the model.

    A prompt that comes again within one session is a new question to the model, for it may be one that samples. The
    next session begins anew, so that the guarded run gets what the bare one got wherever the context is the same.

    Attributes:
        inner: Who writes.
        ledger: Where replies are kept.
        label: What identifies the generator: its name and all its options.
        calls: How often it was asked.
        hits: How often that was not needed.
    """

    inner: Generator
    ledger: Ledger | Replies
    label: str
    calls: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The whole answer as one piece."""
        prints = _print(self.label, prompt)
        counts = _generated.get()
        before = 0 if counts is None else counts[prints]
        key = f"{prints}-{before}"
        text = self.ledger.reply(key)
        if text is None:
            text = self.ledger.keep(key, await join(self.inner.stream(prompt)))
            self.calls += 1
        else:
            self.hits += 1
        if counts is not None:
            counts[prints] = before + 1
        yield text


def _print(label: str, prompt: Prompt) -> str:
    """A fingerprint of everything that a generator can read."""
    documents = [[d.id, d.source, d.title, d.text, dict(d.metadata)] for d in prompt.context]
    whole = json.dumps([label, prompt.question, prompt.instructions, documents], sort_keys=True, default=str)
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class CachedEmbedder(Remembering):
    """Remembers the vectors of the texts it met last: guard off and on ask the same questions.

    Attributes:
        calls: Texts that it embedded.
        hits: Texts that were remembered.
    """

    def __init__(self, inner: Embedder, megabytes: float = 100) -> None:
        """Remembers at most so many megabytes of vectors."""
        super().__init__(inner)
        self.calls = self.hits = 0
        self._most = max(1, int(megabytes * 1e6 / (4 * inner.dim)))
        self._known: OrderedDict[bytes, Vector] = OrderedDict()
        self._lock = threading.Lock()

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """See ``Embedder``."""
        keys = [hashlib.blake2b(t.encode("utf-8", "surrogatepass"), digest_size=16).digest() for t in texts]
        with self._lock:
            found = {key: self._known[key] for key in keys if key in self._known}
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        if new:
            found |= zip(new, self.inner.embed(list(new.values())), strict=True)
        with self._lock:
            self.calls += len(new)
            self.hits += len(texts) - len(new)
            for key in keys:
                self._known[key] = found[key]
                self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        if progress is not None:
            progress(len(texts))
        return np.stack([found[key] for key in keys]) if keys else np.empty((0, self.dim), np.float32)
