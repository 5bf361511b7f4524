"""Honey tokens: a made-up credential in the instructions, made-up records in the corpus, and a watch on both.

After the wiki page "Canary Queries" (honey-prompt canary tokens; "AI-Native LLM Security", p. 346-351), and, for the
records, Wang et al. 2026, "MemPot" (PMLR v306): trap documents that a crawler meets and others hardly do. The tokens
and how they are told are in ``marks.honey``; records are planted by ``monitor.honey``.

The credential is nobody's, so no honest answer has it. An answer is watched while it is written, and ends before the
first letter of the token; the event is noted at that moment. Records may be found like all documents. To be shown one
is no offence; to be shown several different ones is what a crawler cannot avoid.

Deviation: the page looks for the token in the finished answer, as it is written. Here what could be the beginning of a
token, in any disguise that ``marks`` knows, is held back: 36 letters, at most 1,000 characters.
Deviation: the page replaces the answer by a message that says so. Here it breaks off, or is the usual "I don't know.":
whoever hears of a block learns what to leave out.
Deviation: a token that stands whole in the question is no longer secret to the asker: it is noted, as the sign of an
earlier leak, and the answer is not cut. A cut would tell him that what he holds is a trap, and keep nothing from him.
Deviation: MemPot's sequential test is a count of different records here: ``records`` of them within ``hours``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from casemate.errors import CasemateError, ConfigError
from casemate.marks import Found, Marks, Text, Watch
from casemate.marks.honey import FORMS, Form, HoneyKey, HoneyKeys, Record, lines
from casemate.protocols import Defense, EventStore, Generator
from casemate.record import note
from casemate.sessions import Sessions
from casemate.types import UNKNOWN, Action, Outcome, Prompt, Query, Retrieval, Verdict

log = logging.getLogger(__name__)

NAME = "honeytoken"
LEAKED, KNOWN, TOLD = 1.0, 0.75, 0.25
"""Scores of an answer: a token was on its way out; the asker had one before; a record's string was told."""
THRESHOLD = 0.5
OPEN = 10_000
"""Requests whose answers are still expected; the oldest are given up."""
_DOMAIN = re.compile(r"[a-z0-9-]+(?:\.[a-z0-9-]+)+")


@dataclass(eq=False)
class HoneyToken(Defense):
    """Plants a made-up credential in the instructions, and ends an answer before it leaves; counts made-up records.

    Attributes:
        formats: What is planted in the instructions, a line each: ``api_key``, ``url``, ``email``, ``sentence``; none:
            only the records are watched.
        domain: Of a planted address. The default belongs to nobody; with one of your own you see who tries it.
        keys: File of the key that all tokens and records follow from, made when there is none.
        records: Different records shown to one client from which on he is flagged as a crawler, at least 1.
        hours: For how long what a client was shown is remembered.
        serve_honey: Whether records are shown like documents, so that they are carried away. False: they are counted,
            and taken out of the context.
        store: The system's; takes the verdicts about answers.
    """

    formats: tuple[Form, ...] = ("api_key",)
    domain: str = "example.net"
    keys: Path = Path(".casemate/honey.json")
    records: int = 3
    hours: float = 24.0
    serve_honey: bool = True
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Canary Queries page (honey-prompt tokens); Wang et al. 2026, MemPot, PMLR v306"

    def __post_init__(self) -> None:
        self.formats = tuple(self.formats)
        unknown = [f for f in self.formats if f not in FORMS]
        if unknown or len(set(self.formats)) < len(self.formats):
            raise ConfigError(f"{NAME}.formats is {list(self.formats)}; allowed are, once each: {', '.join(FORMS)}")
        if not _DOMAIN.fullmatch(self.domain):
            raise ConfigError(f"{NAME}.domain is {self.domain!r}; it must be the name of a domain, such as example.net")
        if self.records < 1 or not 0 < self.hours < math.inf:
            raise ConfigError(
                f"{NAME}: records={self.records}, hours={self.hours}; records must be at least 1, hours above 0"
            )
        self._keys = HoneyKeys(self.keys)
        self._shown = Sessions(NAME, self.hours * 3600, self.store)  # remembers what was shown, not what is withheld
        self._asked: OrderedDict[str, Query] = OrderedDict()
        self._lock = threading.Lock()

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Counts the records in the context, and takes them out where they are not served."""
        with self._lock:
            self._asked[query.id] = query
            if len(self._asked) > OPEN:
                self._asked.popitem(last=False)
        key = self._keys.find()
        ours = {h.document.id: r for h in retrieval.hits if key and (r := key.record(h.document, query.tenant))}
        if not ours:
            return Outcome(retrieval)
        await asyncio.to_thread(self._shown.follow)  # seldom
        left = tuple(h for h in retrieval.hits if h.document.id not in ours)
        if not self.serve_honey and len(left) < query.k and not retrieval.exhausted:
            return Outcome(retrieval, more=True)
        shown = {ours[h.document.id].source for h in retrieval.hits[: query.k] if h.document.id in ours}
        for source in shown:
            self._shown.bar(query.tenant, query.client, source)
        verdict = self._counted(query, sorted(shown), () if self.serve_honey else tuple(ours))
        return Outcome(retrieval if self.serve_honey else replace(retrieval, hits=left), verdict)

    def on_generate(self, generator: Generator) -> Generator:
        """The generator, with the token in its instructions, and watched.

        Raises:
            DataError: If the key file is damaged.
            BackendError: If it can be neither read nor made.
        """
        return _Watched(self, generator, self._keys.get())

    def _counted(self, query: Query, shown: list[str], hidden: tuple[str, ...]) -> Verdict:
        """What the records in a context say. ``flagged`` in the evidence is what ``Sessions`` recalls."""
        count = len(self._shown.barred(query.tenant, query.client))
        threshold = 0.0 if hidden else self.records - 1.0
        score = max(float(count), 1.0) if hidden else float(count)
        evidence = {"flagged": shown, "different": count, "crawler": count >= self.records}
        action = Action.HIDE if hidden else Action.NONE
        return Verdict(NAME, score > threshold, action, score, threshold, hidden, evidence)

    def _note(self, request: str, verdict: Verdict) -> None:
        """The verdict about an answer, beside those of the guard and in their form."""
        note(self.store, self._asked.get(request) or Query("", client="", tenant="", id=request), verdict)


class _Watched(Generator):
    """A generator with a token in its instructions, whose answers end where one begins."""

    def __init__(self, defense: HoneyToken, generator: Generator, key: HoneyKey) -> None:
        self._defense, self._generator = defense, generator
        self._follow(key)

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The answer as it comes, a little behind; cut off at a token, and then ``UNKNOWN`` if nothing was out yet."""
        defense, tokens = self._defense, self._current()
        known = [found.mark for found in tokens.all.each(Text(prompt.question)) if not found.errors]  # all of it
        watch = Watch(tokens.without(known))
        told = _Told(tokens.key, defense._asked.get(prompt.request), prompt)
        pieces, said = self._generator.stream(tokens.planted(prompt, defense)), False
        try:
            async for piece in pieces:
                if out := watch.feed(piece):
                    said = said or bool(out.strip())
                    told.take(out)
                    yield out
                if watch.found:
                    break
            rest = watch.finish()
            if watch.found:
                defense._note(prompt.request, tokens.leaked(watch.found))
            told.take(rest)
            if rest or (watch.found and not said):
                yield rest or UNKNOWN
        finally:
            await _close(pieces)
            for verdict in (tokens.known(known), told.verdict()):
                if verdict:
                    defense._note(prompt.request, verdict)

    def _current(self) -> _Tokens:
        """The tokens as the key file has them now; as they were, if it cannot be read: the watch goes on."""
        try:
            key = self._defense._keys.find()
            if key is not None and key != self._tokens.key:
                self._follow(key)
        except CasemateError as error:
            log.error("%s goes on with the key it has: %s", NAME, error)
        return self._tokens

    def _follow(self, key: HoneyKey) -> None:
        self._tokens = _Tokens(key)


class _Tokens:
    """All tokens that ever stood in the instructions, for one state of the key."""

    def __init__(self, key: HoneyKey) -> None:
        self.key = key
        self.about = key.prompt_marks()
        self.all = Marks(self.about)

    def without(self, known: list[str]) -> Marks:
        """What must not leave: all but what the asker has."""
        return Marks(self.about.keys() - set(known)) if known else self.all

    def planted(self, prompt: Prompt, defense: HoneyToken) -> Prompt:
        """The prompt, with the tokens of this generation in its instructions."""
        added = lines(self.key, defense.formats, defense.domain)
        return replace(prompt, instructions="\n\n".join(part for part in (prompt.instructions, added) if part))

    def leaked(self, found: Found) -> Verdict:
        """What is noted of an answer that was cut."""
        form, generation = self.about[found.mark]
        evidence = {"what": "leaked", "form": form, "generation": generation, "disguise": found.form}
        return Verdict(NAME, True, Action.WITHHOLD, LEAKED, THRESHOLD, evidence=evidence)

    def known(self, marks: list[str]) -> Verdict | None:
        """What is noted of a question that holds tokens, each whole."""
        if not marks:
            return None
        tokens = [{"form": form, "generation": generation} for form, generation in map(self.about.__getitem__, marks)]
        evidence = {"what": "known to the asker", "tokens": tokens}
        return Verdict(NAME, True, Action.NONE, KNOWN, THRESHOLD, evidence=evidence)


class _Told:
    """Which records of the context an answer tells the unique string of."""

    def __init__(self, key: HoneyKey, query: Query | None, prompt: Prompt) -> None:
        found = [key.record(d, query.tenant) for d in prompt.context] if query else []
        self._records: Mapping[str, Record] = {
            key.record_mark(r.tenant, r.generation, r.number): r for r in found if r is not None
        }
        self._said: list[str] = []

    def take(self, piece: str) -> None:
        """Takes what has left of the answer."""
        if self._records:
            self._said.append(piece)

    def verdict(self) -> Verdict | None:
        """What is noted of the answer; None if it tells none of the strings."""
        marks = Marks(self._records).all(Text("".join(self._said))) if self._said else []
        if not marks:
            return None
        evidence: dict[str, Any] = {"what": "record told", "records": sorted(self._records[m].source for m in marks)}
        return Verdict(NAME, False, Action.NONE, TOLD, THRESHOLD, evidence=evidence)


async def _close(pieces: AsyncIterator[str]) -> None:
    """Ends a stream that nobody reads on, so that the model stops writing."""
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()
