"""Honeytokens: a planted credential in the instructions, planted records in the corpus, and detection of both.

After the wiki page "Canary Queries" (honey-prompt canary tokens; "AI-Native LLM Security", p. 346-351), and, for the
records, Wang et al. 2026, "MemPot" (PMLR v306): trap documents that crawlers retrieve and users rarely do. Tokens and
their recognition are in ``watermarks.honeytoken_keys``; ``monitor.honeytokens`` plants the records.

No account uses the credential, so no legitimate answer contains it. Answers are searched while they are generated, and
end before the first letter of the token; the event is recorded at that moment. Records are retrieved like all
documents. One record in a context is not evidence. A crawler cannot avoid several different ones.

Deviation: the page searches the finished answer for the token as written. Here the stream delays text that could be the
start of a token in any disguise that ``watermarks.detection`` recognizes: 36 letters, at most 1,000 characters.

Deviation: the page replaces the answer by a block message. Here it is cut, or is the usual "I don't know.": a block
message would inform an attacker.

Deviation: a token that appears whole in the question is not secret from this client. It is recorded, as evidence of an
earlier leak, and the answer is not cut: a cut would reveal the trap and protect nothing.

Deviation: MemPot's sequential test is a count of distinct records here: ``records`` of them within ``hours``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from casemate.errors import CasemateError, ConfigError, require_range
from casemate.guard.client_state.feed import MAX_HOURS
from casemate.guard.client_state.withheld_documents import ClientSources
from casemate.guard.verdict_log import append
from casemate.guard.watermarks.detection import WatermarkDetector, WatermarkFilter, WatermarkMatch
from casemate.guard.watermarks.honeytoken_keys import (
    FORMS,
    Form,
    HoneytokenKey,
    HoneytokenKeyFile,
    HoneytokenRecord,
    instruction_lines,
)
from casemate.protocols import Defense, EventStore, Generator
from casemate.rag.pipeline import closing_stream
from casemate.runtime.bounded_dict import BoundedDict
from casemate.text.disguises import DecodedText
from casemate.types import Action, Outcome, Prompt, Query, Retrieval, Verdict

log = logging.getLogger(__name__)

NAME = "honeytoken"
LEAKED, KNOWN, RECORD_QUOTED = 1.0, 0.75, 0.25
"""Scores: a credential was about to leave; the question contained one; the answer quoted a record's token."""
THRESHOLD = 0.5
MAX_PENDING = 10_000
"""Requests between retrieval and the end of generation; the oldest are dropped."""
_DOMAIN = re.compile(r"[a-z0-9-]+(?:\.[a-z0-9-]+)+")


@dataclass(eq=False)
class Honeytoken(Defense):
    """Plants a credential in the instructions, cuts answers before it leaves, and counts planted records per client.

    Attributes:
        formats: Credentials in the instructions, a line each: ``api_key``, ``url``, ``email``, ``sentence``; none: only
            records are counted.
        domain: Of a planted URL or address. The default belongs to no organization; with your own, you see its use.
        keys: Key file from which all tokens and records follow; created if missing.
        records: Number of distinct records shown to one client from which it is flagged as a crawler, at least 1.
        hours: How long the records shown to a client are remembered.
        serve_honeytokens: Whether records are shown like documents, so that they are extracted. False: they are
            counted, and removed from the context.
        store: The system's; receives the verdicts about answers.
    """

    formats: tuple[Form, ...] = ("api_key",)
    domain: str = "example.net"
    keys: Path = Path(".casemate/honeytokens.json")
    records: int = 3
    hours: float = 24.0
    serve_honeytokens: bool = True
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Canary Queries page (honey-prompt tokens); Wang et al. 2026, MemPot, PMLR v306"

    def __post_init__(self) -> None:
        self.formats = tuple(self.formats)
        unknown = [f for f in self.formats if f not in FORMS]
        if unknown or len(set(self.formats)) < len(self.formats):
            raise ConfigError(f"{NAME}.formats is {list(self.formats)}; allowed are, once each: {', '.join(FORMS)}")
        if not _DOMAIN.fullmatch(self.domain):
            raise ConfigError(f"{NAME}.domain is {self.domain!r}; it must be a domain name such as example.net")
        require_range(NAME, self, "records", at_least=1)
        require_range(NAME, self, "hours", above=0, at_most=MAX_HOURS)
        self._keys = HoneytokenKeyFile(self.keys)
        self._shown = ClientSources(NAME, self.hours * 3600, self.store)
        self._pending: BoundedDict[str, Query] = BoundedDict(MAX_PENDING)  # by request
        self._lock = threading.Lock()

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Counts the records in the context, and removes them unless they are served."""
        with self._lock:
            self._pending[query.id] = query
        key = self._keys.load()
        records = {h.document.id: r for h in retrieval.hits if key and (r := key.identify(h.document, query.tenant))}
        if not records:
            return Outcome(retrieval)
        await asyncio.to_thread(self._shown.sync)  # here, because records are rare
        left = tuple(h for h in retrieval.hits if h.document.id not in records)
        if not self.serve_honeytokens and len(left) < query.k and not retrieval.exhausted:
            return Outcome(retrieval, more=True)
        shown = {records[h.document.id].source for h in retrieval.hits[: query.k] if h.document.id in records}
        for source in shown:
            self._shown.add(query.tenant, query.client, source)
        verdict = self._verdict(query, sorted(shown), () if self.serve_honeytokens else tuple(records))
        return Outcome(retrieval if self.serve_honeytokens else replace(retrieval, hits=left), verdict)

    def on_generate(self, generator: Generator) -> Generator:
        """Wraps the generator: plants the credential in its instructions and filters its answers.

        Raises:
            DataError: If the key file is damaged.
            BackendError: If it cannot be read or created.
        """
        return _HoneytokenGenerator(self, generator, self._keys.load_or_create())

    def _verdict(self, query: Query, shown: list[str], hidden: tuple[str, ...]) -> Verdict:
        """The verdict about the records in a context."""
        count = len(self._shown.sources(query.tenant, query.client))
        threshold = 0.0 if hidden else self.records - 1.0
        score = max(float(count), 1.0) if hidden else float(count)
        evidence = {"flagged": shown, "different": count, "crawler": count >= self.records}
        action = Action.HIDE if hidden else Action.NONE
        return Verdict(NAME, score > threshold, action, score, threshold, hidden, evidence)

    def _append(self, request: str, verdict: Verdict) -> None:
        append(self.store, self._pending.get(request) or Query("", client="", tenant="", id=request), verdict)


class _HoneytokenGenerator(Generator):
    """A generator with a credential in its instructions, whose answers are cut before they contain one."""

    def __init__(self, defense: Honeytoken, generator: Generator, key: HoneytokenKey) -> None:
        self._defense, self._generator, self._planted = defense, generator, _PlantedCredentials(key)

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer with a short delay; cut at a token, then ``UNKNOWN`` if nothing was sent yet."""
        defense, planted = self._defense, self._current()
        known = [m.token for m in planted.detector.matches(DecodedText(prompt.question)) if not m.errors]
        watermark_filter = WatermarkFilter(planted.detector_without(known))
        quoted = _QuotedRecords(planted.key, defense._pending.get(prompt.request), prompt)

        def append_leak(match: WatermarkMatch) -> None:
            defense._append(prompt.request, planted.leak_verdict(match))

        stream = watermark_filter.answer(self._generator.stream(planted.plant(prompt, defense)), append_leak)
        try:
            async with closing_stream(stream):
                async for out in stream:
                    quoted.feed(out)
                    yield out
        finally:
            for verdict in (planted.known_verdict(known), quoted.verdict()):
                if verdict:
                    defense._append(prompt.request, verdict)

    def _current(self) -> _PlantedCredentials:
        """Returns the credentials of the current key; those of the last key if the file cannot be read."""
        try:
            key = self._defense._keys.load()
            if key is not None and key != self._planted.key:
                self._planted = _PlantedCredentials(key)
        except CasemateError as error:
            log.error("%s keeps the last key: %s", NAME, error)
        return self._planted


class _PlantedCredentials:
    """All credentials that are or were in the instructions, for one state of the key."""

    def __init__(self, key: HoneytokenKey) -> None:
        self.key = key
        self.tokens = key.prompt_tokens()
        self.detector = WatermarkDetector(self.tokens)

    def detector_without(self, known: list[str]) -> WatermarkDetector:
        """Detects all tokens except those that the client has."""
        return WatermarkDetector(self.tokens.keys() - set(known)) if known else self.detector

    def plant(self, prompt: Prompt, defense: Honeytoken) -> Prompt:
        """Adds the credentials of the current generation to the instructions."""
        added = instruction_lines(self.key, defense.formats, defense.domain)
        return replace(prompt, instructions="\n\n".join(part for part in (prompt.instructions, added) if part))

    def leak_verdict(self, match: WatermarkMatch) -> Verdict:
        """The verdict about an answer that was cut."""
        form, generation = self.tokens[match.token]
        evidence = {"what": "leaked", "form": form, "generation": generation, "disguise": match.form}
        return Verdict(NAME, True, Action.WITHHOLD, LEAKED, THRESHOLD, evidence=evidence)

    def known_verdict(self, known: list[str]) -> Verdict | None:
        """The verdict about a question that contains whole tokens; None if it contains none."""
        if not known:
            return None
        tokens = [{"form": form, "generation": generation} for form, generation in map(self.tokens.__getitem__, known)]
        evidence = {"what": "known to the asker", "tokens": tokens}
        return Verdict(NAME, True, Action.NONE, KNOWN, THRESHOLD, evidence=evidence)


class _QuotedRecords:
    """Detects the tokens of the context's records in an answer."""

    def __init__(self, key: HoneytokenKey, query: Query | None, prompt: Prompt) -> None:
        found = [key.identify(d, query.tenant) for d in prompt.context] if query else []
        self._records: Mapping[str, HoneytokenRecord] = {
            key.record_token(r.tenant, r.generation, r.number): r for r in found if r is not None
        }
        self._sent: list[str] = []

    def feed(self, piece: str) -> None:
        """Adds a piece that was sent."""
        if self._records:
            self._sent.append(piece)

    def verdict(self) -> Verdict | None:
        """The verdict about the answer; None if it contains no token."""
        tokens = WatermarkDetector(self._records).tokens(DecodedText("".join(self._sent))) if self._sent else []
        if not tokens:
            return None
        evidence: dict[str, Any] = {"what": "record quoted", "records": sorted(self._records[t].source for t in tokens)}
        return Verdict(NAME, False, Action.NONE, RECORD_QUOTED, THRESHOLD, evidence=evidence)
