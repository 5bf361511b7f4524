"""Crawl limit: what one client may carry away, and when he is taken for a crawler.

Own work (METHODS C9). A crawler needs two things that askers do not: texts word for word, and ever new ones. So each
answer may quote only so many words, and each client may be shown only so many different chunks a day, as many as
somebody who asks ``questions`` questions a day can be shown at all. Two sequential tests tell crawlers from askers long
before: one counts answers that run into the limit on quotations, one counts questions that repeat what earlier answers
said. Both are CUSUMs of e-values, whose rate of false alarms is bounded as long as harmless clients do these things as
seldom as the test assumes (Shin, Ramdas and Rinaldo 2022).

The response is graded. Whoever is suspected gets shorter quotations, and of no chunk more than a share: not fewer
documents and no extracts, or his answers would no longer tell whether he copies. Whoever is held to be a crawler, or
has been shown his day's share, is answered from what he was shown before; a crawler from extracts of it, and after a
pause if one is set.
When several clients of a tenant are, or several begin to run into the limit at the same time, all clients of the tenant
are suspected, and count as one who was told what any of them was.

Place it last in the list of defenses: it counts what is shown. In observe mode nobody watches the answers, so only
chunks are counted.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from casemate.errors import ConfigError, DataError
from casemate.protocols import Defense, EventStore, Generator
from casemate.quoting import Quotes
from casemate.reindexing.shelf import Shelf
from casemate.reindexing.topics import NOISE
from casemate.sessions import Once, key_of
from casemate.traces import ALARMED, CLEAR, Level, Traces
from casemate.types import Action, Document, Hit, Outcome, Prompt, Query, Retrieval, Verdict
from casemate.words import extract

OPEN = 10_000
"""Requests whose answers are still expected; the oldest are given up."""


@dataclass(eq=False)
class CrawlLimit(Defense):
    """Limits what a client is shown and told word for word, and more when he behaves like a crawler.

    Attributes:
        questions: Questions a day that every client may ask without being shown less, whatever they are. He may be told
            as many chunks, too, word for word beyond the share ``exposure``.
        quote_words: Words that one answer may quote from its context: more than one chunk has.
        short_quote_words: The same for clients who are suspected.
        whole: Chunks of which one answer may quote more than the share ``exposure``; 0: three, but fewer than are read
            for it, if those are more than one.
        exposure: Share of a chunk, in (0, 1], that a suspected client may be told word for word in all. Below a third,
            what is quoted of it has a ROUGE-L F1 below .5: it does not count as recovered.
        sentences: Sentences of a chunk, nearest to the question, that an answer to a crawler is made from at most; 0:
            the whole chunk.
        pause_s: Seconds that a crawler waits for an answer, well below ``gateway.timeout_s``. What else he asks
            meanwhile is answered at once, without documents: only one of his questions waits. 0: none does.
        alarm: Chance, per question, that a harmless client is held to be a crawler, in (0, 1).
        colluders: Crawlers among a tenant's clients from which on all its clients are suspected; 0: never.
        topics: Topics a day that a client may be shown chunks of, as ``casemate reindex`` found them; 0: any number.
        folder: Where ``casemate reindex`` keeps its versions; for ``topics``.
        hours: How long all this is remembered.
        store: The system's; remembers over a restart, and for other processes on the same store.
    """

    questions: int = 50
    quote_words: int = 300
    short_quote_words: int = 60
    whole: int = 0
    exposure: float = 0.3
    sentences: int = 2
    pause_s: float = 0.0
    alarm: float = 2e-5
    colluders: int = 3
    topics: int = 0
    folder: Path = Path(".casemate/reindex")
    hours: float = 24.0
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "own: limits and sequential tests by client and tenant (METHODS C9)"

    def __post_init__(self) -> None:
        for name, least in (
            ("questions", 1),
            ("quote_words", 1),
            ("short_quote_words", 1),
            ("whole", 0),
            ("sentences", 0),
            ("colluders", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"crawl_limit.{name} is {getattr(self, name)}; it must be at least {least}")
        if not (0 < self.exposure <= 1 and 0 < self.alarm < 1 and 0 < self.hours < math.inf):
            what = f"exposure={self.exposure}, alarm={self.alarm}, hours={self.hours}"
            raise ConfigError(f"crawl_limit: {what}; exposure in (0, 1], alarm in (0, 1), hours above 0")
        if not 0 <= self.pause_s < math.inf:
            raise ConfigError(f"crawl_limit.pause_s is {self.pause_s}; it must be 0 or more seconds")
        self.traces = Traces(self.alarm, self.colluders, self.hours * 3600, self.store)
        self._shelves: dict[str, Shelf] = {}
        self._open: OrderedDict[str, Query] = OrderedDict()
        self._waiting = set[tuple[str, str]]()  # clients
        self._once = Once()
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Takes in what clients were shown and told by other processes."""
        self.traces.follow()

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Leaves out what the client may not be shown, and notes what he is."""
        level = self.traces.asked(query) if self._once.first(query.id) else self.traces.level(query)
        topics = self._topics(query, retrieval.hits)
        kept = self._allowed(query, retrieval.hits, level, topics)
        gone = tuple(h.document.id for h in retrieval.hits if h not in kept)
        shown = [h.document.id for h in kept[: query.k]]
        self.traces.shown(query, shown, [t for i in shown if (t := topics[i]) != NOISE])
        with self._lock:
            self._open[query.id] = query
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
        verdict = Verdict(
            "crawl_limit",
            level is ALARMED,
            Action.HIDE if gone else Action.NONE,
            self.traces.score(query),
            1 / self.alarm,
            gone,
            {"level": level.value, **self.traces.evidence(query)},
        )
        return Outcome(replace(retrieval, hits=tuple(kept)), verdict)

    def on_generate(self, generator: Generator) -> Generator:
        """The generator, cut off where an answer quotes too much."""
        return _Watched(generator, self)

    def _allowed(self, query: Query, hits: Sequence[Hit], level: Level, topics: Mapping[str, int]) -> list[Hit]:
        """What may be shown: new ones while the day's share lasts; to a crawler half as many, and none of them new."""
        k = max(1, query.k // 2) if level is ALARMED else query.k
        fresh = 0 if level is ALARMED else self.questions * query.k - self.traces.count(query)
        kept, seen = list[Hit](), set(self.traces.topics(query))
        for hit in hits:
            new, topic = not self.traces.knows(query, hit.document.id), topics[hit.document.id]
            if self.topics and topic not in (NOISE, *seen) and len(seen) >= self.topics:
                continue
            if len(kept) >= k:
                kept += [] if level is ALARMED else [hit]  # nobody is shown it, but a defense that follows may look
            elif not new or fresh > 0:
                kept.append(hit)
                seen |= {topic} - {NOISE}
                fresh -= new
        return kept

    def _topics(self, query: Query, hits: Sequence[Hit]) -> dict[str, int]:
        """Which topic each chunk is of, by its id; ``NOISE``: none, or topics do not matter."""
        if not self.topics:
            return dict.fromkeys((h.document.id for h in hits), NOISE)
        learnt = self._shelves.setdefault(query.tenant, Shelf(self.folder, query.tenant)).current()
        if learnt is None:
            raise DataError(
                f"crawl_limit.topics is {self.topics}, and no topics are known for tenant {query.tenant!r} in "
                f"{self.folder}; run 'casemate reindex', or set topics to 0"
            )
        return {h.document.id: learnt.learnt(h.document) for h in hits}

    def opened(self, prompt: Prompt) -> Query | None:
        """Whose request a prompt belongs to."""
        with self._lock:
            return self._open.pop(prompt.request, None)

    async def read(self, query: Query, prompt: Prompt) -> Prompt:
        """What the generator is given: to a crawler, when he has waited, extracts of the chunks.

        Only to a crawler: his alarm stands. Extracts would keep a suspect's answers from being evidence, and harmless
        people become suspects too easily to be answered worse.
        """
        if self.traces.level(query) is not ALARMED:
            return prompt
        context = prompt.context if not self.pause_s or await self._waited(query) else ()
        if self.sentences:
            texts = [extract(prompt.question, d.text, self.sentences) for d in context]
            context = tuple(replace(d, text=text) for d, text in zip(context, texts, strict=True) if text)
        return replace(prompt, context=context)

    async def _waited(self, query: Query) -> bool:
        """Waits, unless another question of the client does: each that waits takes up a place at the gateway."""
        client = key_of(query.tenant, query.client)
        with self._lock:
            if client in self._waiting:
                return False
            self._waiting.add(client)
        try:
            await asyncio.sleep(self.pause_s)
        finally:
            with self._lock:
                self._waiting.discard(client)
        return True


class _Watched(Generator):
    """A generator whose answers end where they have quoted enough."""

    def __init__(self, generator: Generator, limit: CrawlLimit) -> None:
        self._generator, self._limit = generator, limit

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        query = self._limit.opened(prompt)
        pieces = self._generator.stream(await self._limit.read(query, prompt) if query else prompt)
        watch = _Watch(self._limit, query, prompt.context) if query else None  # by the whole chunks, whatever is read
        try:
            async for piece in pieces:
                if watch is None:
                    yield piece
                elif said := watch.passed(piece):
                    yield said
                if watch and watch.over:
                    break
            if watch and (said := watch.rest()):
                yield said
        finally:
            if watch:
                watch.note()
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()


class _Watch:
    """One answer: what of it may leave, and what it quotes that its reader was not told before.

    Attributes:
        over: Whether it quotes more than any answer may. A suspect's ends earlier, but is read on until that is known:
            it is evidence whoever asks, and to end early would make it likelier for suspects.
    """

    def __init__(self, limit: CrawlLimit, query: Query, context: Iterable[Document]) -> None:
        self.limit, self.query, self.ids, self.over = limit, query, [d.id for d in context], False
        self.quotes = Quotes([d.content for d in context], query.text)
        self.before = [limit.traces.covered(query, i) for i in self.ids]
        self.clear = limit.traces.level(query) is CLEAR
        self.known = limit.traces.whole(query) if self.clear else frozenset[str]()
        self.left = max(0, limit.questions - len(self.known)) if self.clear else 0
        self.most = limit.whole or max(1, min(3, query.k - 1))
        self.held, self.said, self.cut, self.told = "", list[str](), False, [0] * len(self.ids)

    def passed(self, piece: str) -> str:
        """What of the text so far may leave: whole words, up to the limit."""
        *whole, self.held = _split(self.held + piece)
        return self._up_to_the_limit(whole)

    def rest(self) -> str:
        """The last word, when nothing more comes."""
        return self._up_to_the_limit([self.held])

    def _up_to_the_limit(self, pieces: Sequence[str]) -> str:
        said = list[str]()
        for piece in pieces:
            if self.over:
                break
            self.quotes.take(piece)
            self._judge()
            if not self.cut:
                said.append(piece)
                self.told = list(self.quotes.covered)
        self.said += said
        return "".join(said)

    def _judge(self) -> None:
        new = [covered & ~told for covered, told in zip(self.quotes.covered, self.before, strict=True)]
        words = min(self.quotes.words, sum(bits.bit_count() for bits in new))
        whole = self._whole(new)
        self.over = words > self.limit.quote_words or len(whole) > self.most
        self.cut |= (
            self.over
            or sum(i not in self.known for i in whole) > self.left
            or (not self.clear and words > self.limit.short_quote_words)
        )

    def _whole(self, new: Sequence[int]) -> list[str]:
        """Of which chunks this answer tells something new, so that more than a share is told in all answers."""
        told = zip(self.ids, new, self.before, self.quotes.lengths, strict=True)
        return [i for i, bits, old, n in told if bits and (bits | old).bit_count() > self.limit.exposure * n]

    def note(self) -> None:
        """Keeps what was told, which may be less than what was read."""
        told = dict(zip(self.ids, self.told, strict=True))
        self.limit.traces.told(self.query, "".join(self.said), told, self._whole(self.told), self.over)


def _split(text: str) -> list[str]:
    """The text cut before each white space that follows a word; the last piece may go on."""
    pieces, start = list[str](), 0
    for at in range(1, len(text)):
        if text[at].isspace() and not text[at - 1].isspace():
            pieces.append(text[start:at])
            start = at
    return [*pieces, text[start:]]
