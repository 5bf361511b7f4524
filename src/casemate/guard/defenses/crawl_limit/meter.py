"""Measures what an answer discloses while it is written, and cuts it at the limits of ``crawl_limit``."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from casemate.errors import BackendError
from casemate.guard.audience import ReleasedDocument
from casemate.guard.client_state.crawl_evidence import CLEAR, text_name
from casemate.guard.client_state.withheld_documents import key_of
from casemate.guard.verdict_log import append
from casemate.text.disclosure import PIECE_END, DisclosureCounter
from casemate.types import Action, Document, Query, Verdict

if TYPE_CHECKING:
    from casemate.guard.defenses.crawl_limit import CrawlLimit

_WORD_END = re.compile(rf"(?<=\S)(?=\s)|(?<=[{PIECE_END}])(?=[^\s{PIECE_END}])")
QUOTE_WORDS, QUOTE_SHARE = 300, 0.5
"""Default of ``quote_words``: the share of the words of the context, and at least so many words. Ordinary answers from
long documents disclose more than 300 words, but less than half of what was read for them."""
OWN_WORDS, OWN_SHARE = 4, 0.8
"""Words that only one chunk contains: the fewest that count, and the share of them from which the chunk is copied."""
WORD_LETTERS = 4
"""Letters of a short content word: bounds the words in letters that are not decoded yet."""
UNDECODED_LETTERS = 32
"""Letters of an answer that are sent before they are decoded: fewer than the share of a chunk that may be disclosed."""
MAX_WORD = 500
"""Characters without white space that are read as one word, at most."""


class UnfinishedAnswers:
    """Meters of the answers that are not recorded yet: together they must not exceed the limits."""

    def __init__(self) -> None:
        self._by_chunk: dict[tuple[str, str], list[DisclosureMeter]] = {}  # tenant and chunk
        self._by_client: dict[tuple[str, str], list[DisclosureMeter]] = {}
        self._lock = threading.Lock()

    def add(self, meter: DisclosureMeter) -> None:
        """Adds an answer that begins."""
        with self._lock:
            self._by_client.setdefault(key_of(meter.query.tenant, meter.query.client), []).append(meter)
            for chunk in meter.names:
                sharing = self._by_chunk.setdefault((meter.query.tenant, chunk), [])
                _recheck(sharing)
                sharing.append(meter)

    def remove(self, meter: DisclosureMeter) -> None:
        """Removes an answer that is recorded, if it is there."""
        with self._lock:
            _remove(self._by_client, key_of(meter.query.tenant, meter.query.client), meter)
            for chunk in meter.names:
                _recheck(_remove(self._by_chunk, (meter.query.tenant, chunk), meter))

    def disclosing(self, meter: DisclosureMeter, whole_tenant: bool) -> tuple[list[int], bool]:
        """For each chunk of an answer, the words that others to its client, or to its tenant, disclose so far.

        Returns:
            The words, and whether there are such answers.
        """
        client, tenant = meter.query.client, meter.query.tenant
        with self._lock:
            others = [
                [
                    m.disclosing[chunk]
                    for m in self._by_chunk.get((tenant, chunk), ())
                    if m is not meter and (whole_tenant or m.query.client == client)
                ]
                for chunk in meter.names
            ]
        return [reduce(or_, masks, 0) for masks in others], any(others)

    def exposing(self, meter: DisclosureMeter) -> frozenset[str]:
        """The chunks of which other answers to the client disclose more than the share."""
        with self._lock:
            others = self._by_client.get(key_of(meter.query.tenant, meter.query.client), ())
            return frozenset().union(*(m.exposed for m in others if m is not meter))


def _recheck(meters: Iterable[DisclosureMeter]) -> None:
    for meter in meters:
        meter.stale = True


def _remove(
    held: dict[tuple[str, str], list[DisclosureMeter]], key: tuple[str, str], meter: DisclosureMeter
) -> list[DisclosureMeter]:
    """Removes a meter; returns those that are left."""
    left = [m for m in held.pop(key, ()) if m is not meter]
    if left:
        held[key] = left
    return left


class DisclosureMeter:
    """Measures what one answer discloses, and cuts it at the limits.

    Attributes:
        names: The ``text_name`` of each chunk of the context.
        limit_reached: Whether the answer discloses more than any client may be given. The answer to a suspected client
            is cut earlier, but read on until this is known. Otherwise the limit event, which is evidence, would be
            likelier for suspected clients.
        cut_by: Name of the limit at which the answer was cut; empty: it was not.
    """

    def __init__(
        self,
        limit: CrawlLimit,
        query: Query,
        context: Iterable[Document],
        unseen: Sequence[str],
        *,
        enforced: bool = True,
    ) -> None:
        context = [d for d in context if not isinstance(d, ReleasedDocument)]
        self.limit, self.query, self.names, self.limit_reached = limit, query, list(map(text_name, context)), False
        self.texts, self.unseen = [d.content for d in context], unseen
        self.counter = DisclosureCounter(self.texts, query.text, unseen)
        self.clear = limit.evidence.level(query) is CLEAR
        self.most = limit.whole or max(1, min(3, query.k - 1))
        self.most_words = limit.quote_words or max(QUOTE_WORDS, QUOTE_SHARE * sum(self.counter.lengths))
        self.incomplete, self.waiting, self.sent = "", list[str](), list[str]()
        self.cut_by, self.reserved, self.enforced = "", 0, enforced
        self._prepared_to = 0
        self.disclosing, self.exposed = dict.fromkeys(self.names, 0), frozenset[str]()
        self._hidden = [0] * len(self.names)
        self._checked_to = self._reserved_to = -1.0
        self._given = False
        self._read_evidence()
        limit.unfinished.add(self)

    @property
    def cut(self) -> bool:
        """Whether the answer was cut; in observe mode, whether it would have been."""
        return bool(self.cut_by)

    def _read_evidence(self) -> None:
        """Reads what earlier answers disclosed, and what others that are not finished disclose so far."""
        evidence, query = self.limit.evidence, self.query
        self.disclosed = [evidence.disclosed(query, i) for i in self.names]
        self.disclosed_to_tenant = [evidence.disclosed_to_tenant(query.tenant, i) for i in self.names]
        colluding = evidence.is_colluding(query.tenant)
        self.before = self.disclosed_to_tenant if colluding else self.disclosed
        self.beside, self.stale = self.limit.unfinished.disclosing(self, colluding)

    async def passing(self, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
        """Yields the text of an answer up to the limit; records it at the end."""
        try:
            async for piece in pieces:
                if text := self.feed(piece):
                    yield text
                if self.limit_reached:
                    break
                await self._prepare()
            if text := self.finish():
                yield text
        finally:
            self.record()

    async def _prepare(self) -> None:
        """Acquires words for what follows, once the answer has reserved more: ``feed`` then rarely waits for the store.

        If the store fails, ``feed`` ends the answer once the acquired words are used up.
        """
        if self.reserved > self._prepared_to and not self.cut:
            self._prepared_to = self.reserved
            with suppress(BackendError):
                await self.limit.prepare(self.query)

    def feed(self, piece: str) -> str:
        """Adds a piece; returns the whole words that may be sent."""
        *words, self.incomplete = _WORD_END.split(self.incomplete + piece)
        if len(self.incomplete) > MAX_WORD:
            words, self.incomplete = [*words, self.incomplete], ""
        return "".join(map(self._read, words))

    def finish(self) -> str:
        """Returns the rest, at the end of the answer."""
        text = self._read(self.incomplete)
        self.counter.finish()
        self._check()
        return text + self._release()

    def _read(self, word: str) -> str:
        """Measures a word; returns the words that may be sent.

        A word that may be in another form waits until it is decoded. Otherwise an answer could exceed every limit by
        the letters of one decoded part.
        """
        if self.limit_reached:
            return ""
        self.counter.add(word)
        self._check()
        self.waiting.append(word)
        return self._release() if self.counter.undecoded_letters <= UNDECODED_LETTERS else ""

    def _release(self) -> str:
        """Returns the words that wait; none once the answer is cut."""
        text, self.waiting = "" if self.cut else "".join(self.waiting), []
        self.sent.append(text)
        return text

    def _check(self) -> None:
        """Compares the answer with the limits, unless too little was added since the last time to reach one."""
        pending = min(self.counter.undecoded_letters, UNDECODED_LETTERS) // WORD_LETTERS
        growth = self.counter.growth
        if not self.stale and growth <= self._checked_to and growth + pending <= self._reserved_to:
            return
        if self.stale:
            self._read_evidence()
        self._hidden = self._find_hidden()
        new = self._credited()
        words = sum(bits.bit_count() for bits in new)
        exposed, left = self._exposed(new, self._known)
        self.limit_reached = words > self.most_words or len(exposed) > self.most
        self.cut_by = self.cut_by or self._exceeded(words, exposed)
        if not self.cut:
            ahead, self.cut_by = self._reserve(pending)
            self._reserved_to = growth + pending + ahead
        if self.cut:  # it is read on until its limit is known, and nothing of it is sent
            self._reserved_to = math.inf
        else:
            self.exposed = frozenset(exposed)
        most = self.most_words if self.cut or self.clear else min(self.most_words, self.limit.short_quote_words)
        self._checked_to = growth + max(0, math.floor(min(most - words, left)))
        self.disclosing = dict(zip(self.names, map(or_, self.counter.covered, self._hidden), strict=True))

    def _exceeded(self, words: int, exposed: Sequence[str]) -> str:
        """Returns the name of the limit that an answer with so many new words exceeds; empty if none.

        Args:
            words: New words.
            exposed: Chunks disclosed above the share. A suspected client may be given none.
        """
        if words > self.most_words:
            return "quote_words"
        if len(exposed) > self.most:
            return "whole"
        if not self.clear:
            return "exposure" if exposed else "short_quote_words" if words > self.limit.short_quote_words else ""
        before = self.limit.evidence.exposed_chunks(self.query) | self.limit.unfinished.exposing(self)
        left = max(0, self.limit.questions - len(before))
        return "questions" if sum(i not in before for i in exposed) > left else ""

    def _reserve(self, pending: int) -> tuple[int, str]:
        """Reserves the new words, and those that may be in letters that are not decoded yet; see ``reserve``."""
        new, tenant_new = (
            sum(bits.bit_count() for bits in self._new(self.counter.covered, before)) + pending
            for before in (self.disclosed, self.disclosed_to_tenant)
        )
        ahead, exhausted = self.limit.reserve(self.query, self.reserved, new, tenant_new)
        self.reserved = self.reserved if exhausted else new + ahead
        return ahead, exhausted

    def _credited(self) -> list[int]:
        """Returns the new words of each chunk. A word of the answer counts for one chunk, however many contain it."""
        return self._new(self.counter.credited, self.before)

    def _new(self, masks: Iterable[int], before: Iterable[int]) -> list[int]:
        """Returns the words of each chunk that were not disclosed before, those that are hidden included."""
        return [(bits | hidden) & ~known for bits, hidden, known in zip(masks, self._hidden, before, strict=True)]

    def _find_hidden(self) -> list[int]:
        """Returns the words of each chunk that unreadable words may encode.

        They may encode any words. They count as words that were not disclosed to the client, first those that were not
        disclosed to the tenant, chunk by chunk.
        """
        left, counter = self.counter.unreadable_words, self.counter
        hidden = [0] * len(self.names)
        if not left:
            return hidden
        parts = zip(counter.covered, self.disclosed, counter.lengths, strict=True)
        free = [((1 << length) - 1) & ~(bits | known) for bits, known, length in parts]
        for among in ([~bits for bits in self.disclosed_to_tenant], [-1] * len(free)):
            for i, words in enumerate(free):
                part = _lowest(words & among[i] & ~hidden[i], left)
                hidden[i] |= part
                left -= part.bit_count()
        return hidden

    @property
    def _known(self) -> list[int]:
        """Words of each chunk in other answers, also in those that are not finished."""
        return list(map(or_, self.before, self.beside))

    def _exposed(self, new: Sequence[int], known: Sequence[int]) -> tuple[list[str], float]:
        """Returns the chunks with new words of which all answers together disclose more than the share.

        Words that the answer has in common with texts that were not in the context are chance, and do not count, also
        if an earlier answer disclosed them. Forms share most words; therefore a chunk also counts if an answer
        discloses nearly all words that only this chunk contains.

        Args:
            new: New words of each chunk in this answer.
            known: Words of each chunk in other answers that count as well.

        Returns:
            These chunks, and the number of further words that may be disclosed until there is another one.
        """
        counter, share, exposed, least = self.counter, self.limit.exposure, list[str](), math.inf
        parts = zip(self.names, new, map(or_, new, known), counter.lengths, counter.own, strict=True)
        for number, (i, bits, disclosed, n, own) in enumerate(parts):
            left = share * n - disclosed.bit_count()
            if left < 0:
                chance = counter.covered[number] & counter.common[number] & disclosed
                left += min(counter.expected, chance.bit_count())
            if (count := own.bit_count()) >= OWN_WORDS:
                left = min(left, OWN_SHARE * count - (disclosed & own).bit_count())
            if bits and left < 0:
                exposed.append(i)
            else:
                least = min(least, left)
        return exposed, least

    def _is_copy(self) -> bool:
        """Whether the answer copies more chunks than it may disclose, those disclosed before included, and a new one.

        A crawler asks about what it knows, to find more. So its answers often have few new chunks.
        """
        nothing = [0] * len(self.names)
        copied, _ = self._exposed(self._new(self.counter.credited, nothing), nothing)
        return len(copied) > self.most and bool(self._exposed(self._credited(), self._known)[0])

    def record(self) -> None:
        """Records the text that was sent, which may be less than the text that was generated, and closes the meter."""
        try:
            text, limit_reached = "".join(self.sent), self.limit_reached or self._is_copy()
            if self.cut or self.counter.undecoded_letters:  # it may have ended before it was read
                self.counter = DisclosureCounter(self.texts, self.query.text, self.unseen)
                self.counter.read(text)
            self._read_evidence()
            self.beside = [0] * len(self.names)  # others are compared with this one when they are recorded
            self._hidden = self._find_hidden()
            covered = self.counter.covered
            new = self._new(covered, self.disclosed)
            disclosed = {i: bits | added for i, bits, added in zip(self.names, covered, new, strict=True)}
            exposed, _ = self._exposed(self._credited(), self._known)
            self._give(new)
            self.limit.evidence.record_answer(self.query, text, disclosed, exposed, limit_reached, self.cut)
            if self.cut:  # for the operator; the event above is what is kept
                append(None, self.query, self._verdict())
        finally:
            self.close()

    def _give(self, new: Iterable[int]) -> None:
        """Takes the words that the answer disclosed from those acquired for its client and tenant."""
        tenant_new = self._new(self.counter.covered, self.disclosed_to_tenant)
        words, tenant_words = (sum(bits.bit_count() for bits in masks) for masks in (new, tenant_new))
        self.limit.give(self.query, {"budget": words, "tenant_budget": tenant_words})
        self._given = True

    def _verdict(self) -> Verdict:
        limits = {"quote_words": self.most_words, "whole": self.most}
        most = limits.get(self.cut_by) or getattr(self.limit, self.cut_by)
        evidence = {"cut": self.cut_by, "most": most}
        return Verdict("crawl_limit", False, Action.WITHHOLD, 0.0, None, evidence=evidence, enforced=self.enforced)

    def close(self) -> None:
        """Ends the reservation. The answer no longer counts as unfinished."""
        if not self._given:  # it could not be recorded
            self.limit.give(self.query, dict.fromkeys(("budget", "tenant_budget"), self.reserved))
        self.limit.release(self.query, self.reserved)
        self.reserved = 0
        self.limit.unfinished.remove(self)


def _lowest(bits: int, count: int) -> int:
    """The lowest bits that are set, at most ``count``."""
    low, high = 0, bits.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (bits & ((1 << middle) - 1)).bit_count() < count:
            low = middle + 1
        else:
            high = middle
    return bits & ((1 << low) - 1)
