"""Crawl limit: limits what one client can extract, and detects crawlers.

Own work (METHODS C9, METHODS2 L). An extraction attack needs two things that users do not need: the words of the
chunks, and always new chunks. So each answer may disclose a limited number of words of its context. Each client may be
shown a limited number of distinct chunks per day, and receive a limited number of new words (``budget``). Disclosed
words are counted in any form of the answer (``casemate.text.disclosure``); an unreadable form counts as a copy.

Two sequential tests detect crawlers long before these limits. One counts answers that reach the limit, the other
questions that repeat phrases of earlier answers. Both are CUSUMs of e-values. Their false-alarm rate is bounded while
benign clients cause such events as rarely as the test assumes (Shin, Ramdas and Rinaldo 2022).

The response is graded (``Grade``). A suspected client gets shorter answers, and only a share of each chunk. It gets
neither fewer documents nor extracts, because its answers would no longer show whether it copies. An alarmed client, and
a client that has reached its daily share, gets answers from chunks that it was shown before. An alarmed client, and one
that has used most of its budget, gets answers from extracts. Beyond the budget, a client is treated as one that may
read no source: it gets answers of ``quorum``, or from no documents.

Several clients of a tenant may be alarmed, start to reach the limit at the same time, or repeat answers to one another.
Then all clients of the tenant are suspected and share one record of disclosed words. In the last two cases, one further
event suffices for an alarm: the client reaches the limit, or repeats an answer to it.

Documents that are delivered to the client itself are charged in full, to the same budgets (``delivery``).

Place it last in the list of defenses: it counts what is shown. In observe mode answers are measured and not cut.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import ClassVar

from casemate.errors import BackendError, DataError, require_range
from casemate.guard.audience import ReleasedDocument
from casemate.guard.client_state.crawl_evidence import ALARMED, CrawlEvidence, SuspicionLevel
from casemate.guard.client_state.crawl_evidence import CLEAR as CLEAR
from casemate.guard.client_state.feed import MAX_HOURS
from casemate.guard.client_state.withheld_documents import SeenRequests, key_of
from casemate.guard.client_state.word_quotas import BLOCK_SHARE, WantedWords, WordBlock, WordQuotas
from casemate.guard.defenses.crawl_limit.delivery import Delivery
from casemate.guard.defenses.crawl_limit.meter import DisclosureMeter, UnfinishedAnswers
from casemate.maths.clustering import NOISE
from casemate.protocols import Defense, EventStore, Generator
from casemate.rag.pipeline import closing_stream
from casemate.reindexing.registry import ReindexRegistry
from casemate.runtime.bounded_dict import BoundedDict
from casemate.text.disclosure import DisclosureCounter as DisclosureCounter
from casemate.text.sentences import extract_sentences, nearest_sentences
from casemate.types import Action, Document, Hit, Outcome, Prompt, Query, Retrieval, Verdict

log = logging.getLogger(__name__)
MAX_PENDING = 10_000
"""Requests between retrieval and generation. The oldest are dropped: they are answered from no documents."""
EXTRACTS_FROM = 0.8
"""Share of the budget from which a client is answered from extracts."""
LEAST_ANSWER = 20
"""Words left of a budget below which it counts as used up: an answer would end within its first sentence. For small
budgets a tenth of it."""
MAX_UNSEEN, MIN_UNSEEN, MAX_RECENT, MAX_TENANTS = 5, 3, 16, 1000
"""Texts of the null: at most, and at least for one; recently shown texts kept for each tenant; tenants."""
RESERVED_AHEAD = 32
"""Words of its budget that an unfinished answer reserves before it discloses them, at most, and the part of the free
words that these are."""


class Grade(Enum):
    """What a client is answered from.

    Attributes:
        FULL: The whole chunks.
        EXTRACTS: The sentences of each chunk that are nearest to the question.
        QUORUM: What several sources state together, if ``quorum`` is among the defenses; otherwise no documents.
    """

    FULL = "full"
    EXTRACTS = "extracts"
    QUORUM = "quorum"


@dataclass(eq=False)
class CrawlLimit(Defense):
    """Limits the chunks shown and the words disclosed to each client, and restricts suspected crawlers further.

    Attributes:
        questions: Questions a day that every client may ask without being shown less, whatever they are. Also the
            number of chunks disclosed beyond the share ``exposure``.
        budget: Words of chunks that may be newly disclosed to a client in ``hours``, at least 1. From
            ``EXTRACTS_FROM`` of it on, answers are from extracts; beyond it they are those of ``quorum``, if it is
            among the defenses, otherwise from no documents.
        tenant_budget: The same for all clients of a tenant together; 0: no limit.
        quote_words: Words of its context that one answer may disclose, above the length of a chunk; 0: half of its
            words, but at least 300.
        short_quote_words: The same for suspected clients.
        whole: Chunks of which one answer may disclose more than the share ``exposure``; 0: three, but always fewer than
            the context has, if that is more than one.
        exposure: Share of a chunk, in (0, 1], that may be disclosed to a suspected client in all answers together.
            Below a third, the disclosed part has a ROUGE-L F1 below .5 with the chunk: it does not count as recovered.
        sentences: Maximum number of sentences of a chunk, nearest to the question, for answers to an alarmed client; 0:
            the whole chunk.
        pause_s: Seconds that an alarmed client waits for an answer, well below ``gateway.timeout_s``. Only one of its
            questions waits; others are answered meanwhile at once, without documents. 0: no pause.
        alarm: Probability, per question, of a false alarm for a benign client, in (0, 1).
        colluders: Number of alarmed clients of a tenant from which all its clients are suspected; 0: never.
        topics: Topics a day of which a client may be shown chunks, as found by ``casemate reindex``; 0: no limit.
        folder: Folder of the versions written by ``casemate reindex``; for ``topics``.
        hours: How long evidence is remembered.
        store: The system's; shares the evidence with other processes and keeps it over a restart.
    """

    questions: int = 50
    budget: int = 5000
    tenant_budget: int = 0
    quote_words: int = 0
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
        require_range("crawl_limit", self, "questions budget short_quote_words", at_least=1)
        require_range("crawl_limit", self, "tenant_budget quote_words whole sentences colluders pause_s", at_least=0)
        require_range("crawl_limit", self, "exposure", above=0, at_most=1)
        require_range("crawl_limit", self, "alarm", above=0, below=1)
        require_range("crawl_limit", self, "hours", above=0, at_most=MAX_HOURS)
        self.evidence = CrawlEvidence(self.alarm, self.colluders, self.hours * 3600, self.store)
        self.quotas = WordQuotas(self.hours * 3600, self.store)
        self._registries: dict[str, ReindexRegistry] = {}
        self._pending: BoundedDict[str, tuple[Query, tuple[str, ...]]] = BoundedDict(MAX_PENDING)  # by request
        self._recent: BoundedDict[str, deque[str]] = BoundedDict(MAX_TENANTS)  # texts shown to a tenant
        self._in_flight = Counter[tuple[str, str | None]]()  # words of unfinished answers, by client and by tenant
        self.unfinished = UnfinishedAnswers()
        self._pausing = set[tuple[str, str]]()  # clients
        self._seen = SeenRequests()
        self._lock = threading.Lock()

    @property
    def compares_clients(self) -> bool:
        """True if colluding clients are detected."""
        return bool(self.colluders)

    def sync(self) -> None:
        """Applies the evidence recorded by other processes."""
        self.evidence.sync()

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Removes chunks that the client may not be shown, and records those it is shown."""
        evidence = self.evidence
        await self.prepare(query)
        level = evidence.record_question(query) if self._seen.is_first(query.id) else evidence.level(query)
        released = [h for h in retrieval.hits if isinstance(h.document, ReleasedDocument)]
        if (grade := self.grade(query)) is Grade.QUORUM:
            kept = released  # and neither recorded nor measured: it discloses no text of a source
        else:
            topics = self._topics(query, retrieval.hits)
            kept = self._allowed(query, retrieval.hits, level, topics)
            shown = [h.document.id for h in kept[: query.k] if h not in released]
            evidence.record_shown(query, shown, [t for i in shown if (t := topics[i]) != NOISE])
            self._remember(query, kept)
        hidden = tuple(h.document.id for h in retrieval.hits if h not in kept)
        verdict = Verdict(
            "crawl_limit",
            level is ALARMED,
            Action.HIDE if hidden else Action.NONE,
            evidence.score(query),
            round(evidence.alarm_limit(query), 6),  # 100,000, not 99,999.99999999999
            hidden,
            {"level": level.value, "grade": grade.value, **evidence.summary(query)},
        )
        return Outcome(replace(retrieval, hits=tuple(kept)), verdict)

    def describe_small_collection(self, chunks: int, k: int) -> str:
        """Warns if one client may be shown more than half of all chunks, and recommends a setting for about a quarter.

        Empty if it may not, or if a client with a single question a day may be shown as much.

        Args:
            chunks: Chunks of a tenant.
            k: Chunks in a context, at least 1.
        """
        seen, quarter = min(self.questions * k, chunks), max(1, chunks // (4 * k))
        left = min(quarter * k, chunks)  # with the suggested value
        if self.topics or 2 * seen <= chunks or (left == seen < chunks):
            return ""
        note = (
            f"one client may be shown {seen} of {chunks} chunks ({100 * seen / chunks:.0f} %) in {self.hours:g} hours. "
        )
        if left >= seen:
            return f"{note}Index more documents, so that it is a smaller share."
        most = f"at most {left} ({100 * left / chunks:.0f} %)"
        return (
            f"{note}To show it {most}, set questions: {quarter} for crawl_limit in guard.defenses: "
            "further questions are then answered from the chunks that the client was shown before."
        )

    def denies_full_text(self, query: Query) -> bool:
        """Whether the client has used up its budget."""
        return self.grade(query) is Grade.QUORUM

    def on_generate(self, generator: Generator) -> Generator:
        """Wraps the generator: answers are cut at the quote limit."""
        return _LimitedGenerator(generator, self)

    async def on_deliver(self, query: Query, documents: Sequence[Document]) -> Sequence[Document]:
        """Charges every word of the texts that the client is given, and ends them where a budget ends."""
        self.evidence.expire(query)  # documents may be looked up by their ids, without a question
        await self.prepare(query)
        grade = self.grade(query)
        while True:
            with self._lock:  # nothing else is charged or reserved meanwhile
                delivery, given = self._deliver(query, grade, documents)
                if not (wanted := self._lacking(query, delivery.charged)):
                    self._pending.pop(query.id, None)
                    self.give(query, delivery.charged)
                    self.evidence.record_given(query, delivery.disclosed, delivery.shortened)
                    return given
            await asyncio.to_thread(self.quotas.acquire, wanted)

    def _deliver(self, query: Query, grade: Grade, documents: Iterable[Document]) -> tuple[Delivery, list[Document]]:
        """Returns what the client may be given of some documents. Requires the lock."""
        delivery, given = Delivery(self.evidence, query, self._free(query)), list[Document | None]()
        for document in documents:
            if isinstance(document, ReleasedDocument):
                given.append(document)
            elif grade is not Grade.QUORUM:
                given.append(delivery.add(document, self._parts(grade, query.text, document.text)))
        return delivery, [document for document in given if document is not None]

    def _parts(self, grade: Grade, question: str, text: str) -> Sequence[str]:
        """Returns the parts of a text that a client of this grade may be given."""
        whole = grade is Grade.FULL or not self.sentences
        return [text] if whole else nearest_sentences(question, text, self.sentences)

    def on_observe(self, generator: Generator) -> Generator:
        """Wraps the generator: answers are measured as if they were cut."""
        return _MeasuredGenerator(generator, self)

    def _allowed(
        self, query: Query, hits: Sequence[Hit], level: SuspicionLevel, topics: Mapping[str, int]
    ) -> list[Hit]:
        """Returns the hits that may be shown: new chunks within the daily limit.

        An alarmed client gets half as many, and no new ones.
        """
        k = max(1, query.k // 2) if level is ALARMED else query.k
        fresh = 0 if level is ALARMED else self.questions * query.k - self.evidence.shown_count(query)
        kept, seen = list[Hit](), set(self.evidence.shown_topics(query))
        for hit in hits:
            if isinstance(hit.document, ReleasedDocument):
                kept.append(hit)
                continue
            new, topic = not self.evidence.was_shown(query, hit.document.id), topics[hit.document.id]
            if self.topics and topic not in (NOISE, *seen) and len(seen) >= self.topics:
                continue
            if len(kept) >= k:
                kept += [] if level is ALARMED else [hit]  # beyond the context: for the defenses that follow
            elif not new or fresh > 0:
                kept.append(hit)
                seen |= {topic} - {NOISE}
                fresh -= new
        return kept

    def _topics(self, query: Query, hits: Sequence[Hit]) -> dict[str, int]:
        """Returns the topic of each chunk by its id; ``NOISE`` without one, or if topics are not limited."""
        if not self.topics:
            return dict.fromkeys((h.document.id for h in hits), NOISE)
        reindexing = self._registries.setdefault(query.tenant, ReindexRegistry(self.folder, query.tenant)).current()
        if reindexing is None:
            raise DataError(
                f"crawl_limit.topics is {self.topics}, but {self.folder} has no topics for tenant {query.tenant!r}; "
                "run 'casemate reindex', or set topics to 0"
            )
        return {h.document.id: reindexing.learned_topic(h.document) for h in hits}

    def _remember(self, query: Query, kept: Sequence[Hit]) -> None:
        """Keeps the query for its answer, with the texts of the null: those not shown, and those shown recently."""
        shown = [h.document.content for h in kept[: query.k]]
        with self._lock:
            recent = self._recent[query.tenant] = self._recent.get(query.tenant, deque(maxlen=MAX_RECENT))
            others = [h.document.content for h in kept[query.k :][:MAX_UNSEEN]]
            ordered = [
                *others[: MIN_UNSEEN - 1],
                *recent,
                *others,
            ]  # near-duplicates of shown texts are never the median
            unseen = [text for text in dict.fromkeys(ordered) if text not in shown][:MAX_UNSEEN]
            recent.extendleft(text for text in shown if text not in recent)
            self._pending[query.id] = query, tuple(unseen) if len(unseen) >= MIN_UNSEEN else ()

    def pop_query(self, prompt: Prompt) -> tuple[Query | None, tuple[str, ...]]:
        """Returns the query that a prompt belongs to, once, and texts that are not in its context."""
        with self._lock:
            return self._pending.pop(prompt.request, (None, ()))

    def grade(self, query: Query) -> Grade:
        """Returns what the client is answered from."""
        used = self._used(query)
        budgets = [(most, used[name]) for name, (most, _, _) in self._budgets(query).items()]
        if any(budget - used < min(LEAST_ANSWER, budget / 10) for budget, used in budgets):
            return Grade.QUORUM
        scarce = any(used >= EXTRACTS_FROM * budget for budget, used in budgets)
        return Grade.EXTRACTS if scarce or self.evidence.level(query) is ALARMED else Grade.FULL

    def reserve(self, query: Query, words: int, new: int, tenant_new: int) -> tuple[int, str]:
        """Reserves new words for an unfinished answer, and a small part of those that are free.

        Args:
            query: The question.
            words: Words that the answer has reserved already.
            new: Words that are new to the client, with those that may be in text not decoded yet.
            tenant_new: The same for the tenant.

        Returns:
            The number of words that are reserved beyond ``new``, and the name of the budget that has too few for
            ``new``; empty: neither. The client's comes first. Then nothing is reserved.
        """
        client, tenant = key_of(query.tenant, query.client), (query.tenant, None)
        needed = {"budget": new - words, "tenant_budget": tenant_new - words}
        while True:
            with self._lock:
                free = {name: left - needed[name] for name, left in self._free(query).items()}
                if exhausted := [name for name, left in free.items() if left < 0]:
                    return 0, exhausted[0]
                ahead = min(RESERVED_AHEAD, min(free.values()) // RESERVED_AHEAD)
                if not (wanted := self._lacking(query, {name: count + ahead for name, count in needed.items()})):
                    self._in_flight[client] += new + ahead - words
                    self._in_flight[tenant] += new + ahead - words
                    return ahead, ""
            try:
                self.quotas.acquire(wanted)
            except BackendError as error:
                log.error("crawl_limit ends an answer, because it cannot count its words: %s", error)
                return 0, "budget"

    def give(self, query: Query, words: Mapping[str, int]) -> None:
        """Takes words that were disclosed from those acquired for each budget."""
        for name, (_, block, _) in self._budgets(query).items():
            self.quotas.give(block, words[name])

    async def prepare(self, query: Query) -> None:
        """Acquires words for a usual answer, unless enough of those acquired before are left.

        Raises:
            BackendError: If the event store fails.
        """
        with self._lock:
            usual = {name: max(1, most // (2 * BLOCK_SHARE)) for name, (most, _, _) in self._budgets(query).items()}
            wanted = self._lacking(query, usual)
        if wanted:
            await asyncio.to_thread(self.quotas.acquire, wanted)

    def _lacking(self, query: Query, words: Mapping[str, int]) -> list[WantedWords]:
        """Returns what must be acquired before words of some budgets may be disclosed. Requires the lock.

        Nothing for a budget of which no words are left.
        """
        wanted = list[WantedWords]()
        for name, (most, block, owner) in self._budgets(query).items():
            held = self.quotas.words_left(block)
            lacking = words.get(name, 0) + self._in_flight[owner] - held
            if lacking > 0 < words.get(name, 0) and self.quotas.most_left(block, most) > held:
                wanted.append(WantedWords(block, lacking, most))
        return wanted

    def _budgets(self, query: Query) -> dict[str, tuple[int, WordBlock, tuple[str, str | None]]]:
        """Returns the limit of each budget, the words acquired from it, and its owner in ``_in_flight``."""
        block, tenant_block = self.evidence.blocks(query)
        budgets: dict[str, tuple[int, WordBlock, tuple[str, str | None]]] = {
            "budget": (self.budget, block, key_of(query.tenant, query.client))
        }
        if self.tenant_budget:
            budgets["tenant_budget"] = self.tenant_budget, tenant_block, (query.tenant, None)
        return budgets

    def _used(self, query: Query) -> dict[str, int]:
        """Returns the used words of each budget: those disclosed, or those counted in the event store if more."""
        disclosed = {"budget": self.evidence.disclosed_words(query)}
        if self.tenant_budget:
            disclosed["tenant_budget"] = self.evidence.tenant_words(query.tenant)
        return {
            name: max(disclosed[name], most - self.quotas.most_left(block, most))
            for name, (most, block, _) in self._budgets(query).items()
        }

    def _free(self, query: Query) -> dict[str, int]:
        """Returns the words of each budget that are neither disclosed nor reserved. Requires the lock."""
        used = self._used(query)
        return {
            name: most - used[name] - self._in_flight[owner] for name, (most, _, owner) in self._budgets(query).items()
        }

    def release(self, query: Query, words: int) -> None:
        """Ends the reservation of an answer."""
        with self._lock:
            for key in (key_of(query.tenant, query.client), (query.tenant, None)):
                self._in_flight[key] -= words
                if not self._in_flight[key]:
                    del self._in_flight[key]

    async def restrict(self, query: Query, prompt: Prompt) -> Prompt:
        """Restricts the prompt to what the client's grade permits; an alarmed client first waits, if so configured.

        A suspected client gets whole chunks. Extracts would hide whether it copies, and benign clients become
        suspected too easily for worse answers.
        """
        waited = True
        if self.pause_s and self.evidence.level(query) is ALARMED:
            waited = await self._pause(query)
        context = self._context(self.grade(query), prompt) if waited else ()
        return prompt if context == prompt.context else replace(prompt, context=context)

    def _context(self, grade: Grade, prompt: Prompt) -> tuple[Document, ...]:
        """Returns the documents that an answer of this grade is written from."""
        if grade is Grade.QUORUM:
            return ()
        if grade is Grade.FULL or not self.sentences:
            return prompt.context
        texts = [extract_sentences(prompt.question, d.text, self.sentences) for d in prompt.context]
        return tuple(replace(d, text=text) for d, text in zip(prompt.context, texts, strict=True) if text)

    async def _pause(self, query: Query) -> bool:
        """Waits, unless another question of the client waits: each one takes up capacity of the gateway."""
        client = key_of(query.tenant, query.client)
        with self._lock:
            if client in self._pausing:
                return False
            self._pausing.add(client)
        try:
            await asyncio.sleep(self.pause_s)
        finally:
            with self._lock:
                self._pausing.discard(client)
        return True


def daily_share_notes(defenses: Iterable[Defense], chunks: int, k: int) -> Iterator[str]:
    """Yields the results of ``describe_small_collection`` for each ``crawl_limit``."""
    limits = (defense for defense in defenses if isinstance(defense, CrawlLimit))
    yield from filter(None, (limit.describe_small_collection(chunks, k) for limit in limits))


class _LimitedGenerator(Generator):
    """A generator whose answers end at the quote limit."""

    def __init__(self, generator: Generator, limit: CrawlLimit) -> None:
        self._generator, self._limit = generator, limit

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        query, unseen = self._limit.pop_query(prompt)
        if query is None:  # the budget is used up, or the request was dropped: no text that would not be measured
            released = tuple(d for d in prompt.context if isinstance(d, ReleasedDocument))
            restricted, meter = replace(prompt, context=released), None
        else:
            restricted = await self._limit.restrict(query, prompt)
            meter = DisclosureMeter(self._limit, query, prompt.context, unseen)  # against whole chunks
        async with closing_stream(self._generator.stream(restricted)) as pieces:
            if meter is None:
                async for piece in pieces:
                    yield piece
                return
            async with closing_stream(meter.passing(pieces)) as passing:
                async for text in passing:
                    yield text


class _MeasuredGenerator(Generator):
    """A generator whose answers are measured and not changed."""

    def __init__(self, generator: Generator, limit: CrawlLimit) -> None:
        self._generator, self._limit = generator, limit

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        (query, unseen), whole = self._limit.pop_query(prompt), list[str]()
        async with closing_stream(self._generator.stream(prompt)) as pieces:
            try:
                async for piece in pieces:
                    whole.append(piece)
                    yield piece
            finally:
                if query is not None:
                    self._measure(query, prompt.context, unseen, "".join(whole))

    def _measure(self, query: Query, context: Iterable[Document], unseen: Sequence[str], text: str) -> None:
        try:
            with closing(DisclosureMeter(self._limit, query, context, unseen, enforced=False)) as meter:
                meter.feed(text)
                meter.finish()
                meter.record()
        except Exception as error:  # the answer must not depend on it
            log.error("crawl_limit could not measure an answer in observe mode: %s", type(error).__name__)
