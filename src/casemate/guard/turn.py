"""The turn: a user's question, with every query that a rewriter, a hybrid search or an agent derives from it.

A rewritten question may retrieve a document that the guard withholds for the question itself. One leg of a hybrid
search may return what another withholds. So within a ``turn`` every guard judges the user's question first. A document
that is withheld for one query stays withheld for all others, in every index. Documents are recognized by source within
an index, and by text across indexes, edited copies included.

    with turn("Who is the patient of room 4?") as current:
        found = [document for query in rewritten for document in store.similarity_search(query)]
        documents = current.allowed(found, lambda document: (document.id, document.page_content))
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeAlias

from casemate.maths.moments import without_documents
from casemate.text.edited_copies import TextWords, is_edited_copy, text_words
from casemate.types import Document, Hit, Retrieval, T

MAX_OPEN_TURNS, OPEN_TURN_S = 4096, 600.0
"""Turns that a server keeps for later calls, and the seconds after the last one."""
SourceKey: TypeAlias = tuple[int, str, str]
"""Index, tenant and source of a document."""


@dataclass(eq=False)
class Turn:
    """What the guards of one turn have shown and withheld. Created by ``turn``; safe for threads.

    Attributes:
        id: Id of the request that judges it.
        refused: Whether a guard withheld the whole context of the question. Every query then has an empty one.
    """

    question: str = field(repr=False)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    refused: bool = False
    _judged: dict[tuple[int, str, str], object] = field(default_factory=dict)
    _withheld: set[SourceKey] = field(default_factory=set)
    _texts: dict[bytes, TextWords] = field(default_factory=dict)
    _shown: dict[bytes | str, set[SourceKey]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_judged(self, index: object, tenant: str, client: str) -> bool:
        """Whether the user's question was judged on this index."""
        return (id(index), tenant, client) in self._judged

    def mark_judged(self, index: object, tenant: str, client: str) -> None:
        """Records that the user's question was judged on this index."""
        with self._lock:
            self._judged[id(index), tenant, client] = index  # kept, so that no other object gets its id

    def visible(self, retrieval: Retrieval, index: object, tenant: str) -> Retrieval:
        """The retrieval as if the documents that are withheld for this turn were not in the index."""
        with self._lock:
            if not self._withheld:
                return retrieval
            return without_documents(retrieval, lambda document: self._withholds(index, tenant, document))

    def withhold(
        self, documents: Iterable[Document], index: object, tenant: str, left: Collection[Document] = ()
    ) -> None:
        """Withholds documents, and all of their sources, for the rest of the turn.

        Copies of their texts are withheld, too, unless the defenses left one: a text that is common in the collection,
        or whose copy the client may always read, withholds its source only.

        Args:
            documents: The documents.
            index: The index that contains them.
            tenant: The tenant.
            left: Documents that the defenses left in the same retrieval.
        """
        with self._lock:
            for document in documents:
                self._withheld.add((id(index), tenant, document.source))
                words = text_words(document.text)
                if not any(is_edited_copy(words, text_words(other.text), same_record=True) for other in left):
                    self._texts[text_digest(document.text)] = words

    def show(self, hits: Iterable[Hit], index: object, tenant: str) -> None:
        """Records the documents that a guard lets through."""
        for hit in hits:
            document = hit.document
            self._record(document.id, document.text, {(id(index), tenant, document.source)})

    def allowed(
        self, items: Iterable[T], name: Callable[[T], tuple[str | None, str]], sources: set[SourceKey] | None = None
    ) -> list[T]:
        """The items that a guard let through and that no query of the turn withheld, in their order.

        Args:
            items: Documents of a framework, after all queries.
            name: Returns an item's id, if it has one, and its text.
            sources: Of items that are composed of documents, such as summaries: what ``collect_sources`` found. Such an
                item is allowed if none of them is withheld. None: an item that no guard let through is dropped.
        """
        kept = []
        for item in items:
            identity, text = name(item)
            with self._lock:
                shown = self._shown.get(text_digest(text))
                known = shown or self._shown.get(identity or "") or sources
                withheld = (
                    not known
                    or not known.isdisjoint(self._withheld)
                    or self._is_copy(text, same_record=shown is not None)
                )
            if not withheld and not self.refused:
                assert known is not None
                self._record(identity, text, known)
                kept.append(item)
        return kept

    def _record(self, identity: str | None, text: str, keys: set[SourceKey]) -> None:
        with self._lock:
            for name in (text_digest(text), identity):
                if name:
                    self._shown.setdefault(name, set()).update(keys)
            for collected in _COLLECTED.get():
                collected.update(keys)

    def _withholds(self, index: object, tenant: str, document: Document) -> bool:
        return (id(index), tenant, document.source) in self._withheld or self._is_copy(document.text, same_record=True)

    def _is_copy(self, text: str, *, same_record: bool) -> bool:
        """Whether a text is a withheld one, or an edited copy of one.

        A document of an index is one only of the same record, as in a unit. A text that a framework composed or
        shortened may also be an extract.
        """
        if not self._texts or text_digest(text) in self._texts:
            return bool(self._texts)
        words = text_words(text)
        return any(is_edited_copy(withheld, words, same_record=same_record) for withheld in self._texts.values())


_TURN: ContextVar[Turn | None] = ContextVar("casemate_turn", default=None)
_COLLECTED: ContextVar[tuple[set[SourceKey], ...]] = ContextVar("casemate_turn_collected", default=())


@contextmanager
def turn(question: str) -> Iterator[Turn]:
    """Makes all retrievals for a user's question inside the block one turn. In another turn, it belongs to that one.

    The turn follows the context: into tasks and into threads that copy it (``asyncio.to_thread``, the executors of
    LangChain, LlamaIndex and Haystack).
    """
    outer = _TURN.get()
    if outer is not None:
        yield outer
        return
    with continued(Turn(question)) as found:
        yield found


@contextmanager
def continued(current: Turn) -> Iterator[Turn]:
    """Makes all retrievals inside the block part of a turn that began elsewhere, such as in an earlier request."""
    token = _TURN.set(current)
    try:
        yield current
    finally:
        _TURN.reset(token)


class OpenTurns:
    """The turns of clients that ask the queries of one question in separate requests, such as an agent's tool calls.

    Safe for threads. A turn ends ``OPEN_TURN_S`` after its last call, or when ``MAX_OPEN_TURNS`` newer ones exist.
    """

    def __init__(self) -> None:
        self._turns: dict[tuple[str, str, bytes], tuple[Turn, float]] = {}
        self._lock = threading.Lock()

    def of(self, tenant: str, client: str, question: str) -> Turn:
        """The turn of this question of a client: the open one, or a new one."""
        digest = hashlib.sha256(question.encode(errors="surrogatepass")).digest()
        now, name = time.monotonic(), (tenant, client, digest)
        with self._lock:
            found, last = self._turns.pop(name, (None, now))
            if found is None or now - last > OPEN_TURN_S:
                found = Turn(question)
            self._turns[name] = found, now
            while len(self._turns) > MAX_OPEN_TURNS or next(iter(self._turns.values()))[1] < now - OPEN_TURN_S:
                del self._turns[next(iter(self._turns))]
            return found


def current_turn() -> Turn | None:
    """The turn of the enclosing block; None outside of one."""
    return _TURN.get()


@contextmanager
def collect_sources() -> Iterator[set[SourceKey]]:
    """Collects the sources of all documents that guards let through inside the block."""
    found: set[SourceKey] = set()
    token = _COLLECTED.set((*_COLLECTED.get(), found))
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def text_digest(text: str) -> bytes:
    """Digest of a document's text: equal for equal texts."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
