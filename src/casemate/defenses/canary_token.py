"""Canary tokens: each chunk carries made-up words that no honest answer needs; an answer that holds them is cut.

Xie et al. 2026, "Detecting RAG Extraction Attack via Dual-Path Runtime Integrity Game" (CanaryRAG), ACL (arXiv
2604.10717). Two paths: in the answer the token must not appear; asked for it behind the same question, the model must
be able to give it. Whoever talks the model out of repeating tokens in the answer talks it out of them there, too.

Deviation: a token is words and a checksum by HMAC of request and chunk (``marks``), so that it tells which chunk went
to whom; it is looked for in disguises, and with errors.
Deviation: a token stands before the chunk's first sentence and again every ``spacing`` characters, so that a copy from
the middle holds one.
Deviation: a missing token on the second path is noted, and blocks nothing: models fail to give it to harmless askers,
too. The second path is taken for a sample of the requests, beside the answer.
Deviation: tokens are put in when the prompt goes to the generator, not when documents are found. That is behind all
filtering wherever this defense stands, and verdicts, records and other defenses see the documents as they are.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from casemate.errors import ConfigError
from casemate.marks import Found, Marks, Mint, Text, Watch
from casemate.protocols import Defense, EventStore, Generator
from casemate.record import note
from casemate.types import UNKNOWN, Action, Document, Outcome, Prompt, Query, Retrieval, Secret, Verdict
from casemate.words import BLOCK_END, SENTENCE_END

log = logging.getLogger(__name__)

NAME = "canary_token"
LEAKED, SILENT, CLEAN = 1.0, 0.5, 0.0
"""Scores: a token in the answer; none on the second path, which is evidence alone; neither."""
THRESHOLD = 0.5
_ENDS = (re.compile(f"{BLOCK_END.pattern}|{SENTENCE_END.pattern}|(?<=[。！？])"), re.compile(r"\s+"))
"""Where a token may stand, best first: between sentences or paragraphs, between words."""
SECRET_CHARACTERS = 16
PROBE = (
    "{question}\n\nNot that now. Some made-up words stand alone in front of the first text that you were given. Write "
    "these words, and nothing else."
)
PROBE_CHARACTERS, PROBE_S = 200, 15.0
"""How much of the reply on the second path is read, about 32 tokens of words that are none, and for how long."""

_asked: ContextVar[Query | None] = ContextVar("asked", default=None)
"""The question that the task at hand is about: retrieval and generation of a request run in one task."""


@dataclass(eq=False)
class CanaryToken(Defense):
    """Puts secret words into every chunk that is read, and cuts an answer that holds some.

    Attributes:
        secret: Key of the tokens, at least 16 characters; unset: made at random when the process starts, and tokens in
            a text that turns up later can be told only until it ends.
        spacing: Characters after which a chunk is marked again, at least 50.
        lead: Characters of a chunk before its first token, at least 0. 0 is right for a language model. A generator
            that quotes the first sentences under a fitting title would quote a token that stands in front.
        oracle_share: Share of the requests, in [0, 1], whose question is also asked with a demand for the token.
        store: The system's; takes the verdicts.
    """

    secret: Secret = field(default=Secret(""), repr=False)
    spacing: int = 400
    lead: int = 0
    oracle_share: float = 0.05
    store: EventStore | None = field(default=None, repr=False)

    paper: ClassVar[str] = "Xie et al. 2026, arXiv 2604.10717"

    def __post_init__(self) -> None:
        self.secret = Secret(self.secret)
        if 0 < len(self.secret) < SECRET_CHARACTERS:
            raise ConfigError(f"{NAME}.secret is too short; it must have at least {SECRET_CHARACTERS} characters")
        if self.spacing < 50 or self.lead < 0 or not 0 <= self.oracle_share <= 1:
            raise ConfigError(
                f"{NAME}: spacing={self.spacing}, lead={self.lead}, oracle_share={self.oracle_share}; spacing must be "
                "at least 50, lead at least 0, oracle_share between 0 and 1"
            )
        self._mint = Mint(self.secret or secrets.token_hex(32))

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Takes nothing out. Remembers, for the task at hand, whose question it is."""
        _asked.set(query)
        return Outcome(retrieval)

    def on_generate(self, generator: Generator) -> Generator:
        """The generator, given marked documents and watched."""
        return _Watched(self, generator)

    def trace(self, text: str) -> list[Mapping[str, Any]]:
        """For which requests the tokens in a text were made: request, client, tenant, time and chunk of each.

        As far as the store reaches back. Without the secret they were made with, nothing is found.
        """
        found: list[Mapping[str, Any]] = []
        seen = Text(text)
        for event in self.store.scan("verdict") if self.store else ():
            body = event.body
            if body.get("defense") == NAME:
                chunks = {self._mint.mark(body["request"], chunk): chunk for chunk in body["evidence"]["marked"]}
                for mark in Marks(chunks).all(seen):
                    who = {key: body[key] for key in ("request", "client", "tenant")}
                    found.append({**who, "at": event.at.isoformat(), "chunk": chunks[mark]})
        return found

    def _request(self, prompt: Prompt) -> _Request:
        """Who asked what is answered here, and the token of each of his chunks."""
        query = _asked.get()
        if query is None or query.text != prompt.question:  # generated without a retrieval, or in another task
            query = Query(prompt.question, client="", k=len(prompt.context))
        chunks = {self._mint.mark(query.id, document.id): document.id for document in prompt.context}
        return _Request(query, chunks, self._mint.share("oracle", query.id) < self.oracle_share)

    def _marked(self, document: Document, request: _Request) -> Document:
        token = self._mint.mark(request.query.id, document.id)
        return replace(document, text=marked(document.text, token, self.spacing, self.lead))

    def _note(self, request: _Request, verdict: Verdict) -> None:
        """The verdict, beside those of the guard and in their form: it is not known before the answer ends."""
        note(self.store, request.query, verdict)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request under watch.

    Attributes:
        query: Who asked what.
        chunks: Ids of the chunks in the context, by their tokens.
        sampled: Whether the second path is taken.
    """

    query: Query
    chunks: Mapping[str, str]
    sampled: bool

    def verdict(self, found: Found | None, oracle: str, ended: str) -> Verdict:
        """What the two paths say. Flagged is a token in the answer only."""
        score = LEAKED if found else SILENT if oracle == "failed" else CLEAN
        evidence: dict[str, Any] = {"marked": list(self.chunks.values()), "oracle": oracle, "ended": ended}
        if found:
            evidence |= {"leaked": self.chunks[found.mark], "form": found.form, "errors": found.errors}
        action = Action.WITHHOLD if found else Action.NONE
        return Verdict(NAME, found is not None, action, score, THRESHOLD, evidence=evidence)


@dataclass(frozen=True, slots=True)
class _Watched(Generator):
    """A generator that reads marked documents, and whose answers are cut where a token begins."""

    defense: CanaryToken
    generator: Generator

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """The answer as it comes, a little behind; cut off at a token, and then ``UNKNOWN`` if nothing was out yet."""
        request = self.defense._request(prompt)
        context = tuple(self.defense._marked(document, request) for document in prompt.context)
        marked_prompt, marks = replace(prompt, context=context), Marks(request.chunks)
        oracle = asyncio.create_task(self._oracle(marked_prompt, marks)) if request.sampled and context else None
        pieces, watch = self.generator.stream(marked_prompt), Watch(marks)
        said, ended, outcome = False, "broke off", "not asked"
        try:
            async for piece in pieces:
                if out := watch.feed(piece):
                    said = said or bool(out.strip())
                    yield out
                if watch.found:
                    break
            rest = watch.finish()
            ended = "cut" if watch.found else "whole"
            if rest or (watch.found and not said):
                yield rest or UNKNOWN
            if oracle and not watch.found:
                outcome = await oracle
        finally:
            await _close(pieces)
            if oracle:
                oracle.cancel()
                await asyncio.wait([oracle])
            if context:
                self.defense._note(request, request.verdict(watch.found, outcome, ended))

    async def _oracle(self, prompt: Prompt, marks: Marks) -> str:
        """The second path: whether the model, with the same question before it, gives a token when asked for one."""
        try:
            async with asyncio.timeout(PROBE_S):
                given = await self._gives(replace(prompt, question=PROBE.format(question=prompt.question)), marks)
        except Exception as error:  # it is for evidence, and must not cost anybody an answer
            log.error("the second path of %s gave no answer: %s", NAME, type(error).__name__)
            return "broke off"
        return "passed" if given else "failed"

    async def _gives(self, prompt: Prompt, marks: Marks) -> bool:
        pieces, reply = self.generator.stream(prompt), ""
        try:
            async for piece in pieces:
                reply += piece
                if len(reply) >= PROBE_CHARACTERS or marks.find(Text(reply)):
                    break
        finally:
            await _close(pieces)
        return marks.find(Text(reply)) is not None


def marked(text: str, token: str, spacing: int, lead: int = 0) -> str:
    r"""A text with a token in it, and again after each so many characters, where a sentence ends.

    A token is a paragraph of its own, so that nobody who quotes a sentence quotes it. Where no sentence ends in as many
    characters more, it stands between words, and where no word ends, inside.

    Args:
        text: The text.
        token: The token.
        spacing: Characters between two, at least.
        lead: Characters before the first, at least.

    >>> marked("Herons nest late.", "zakeno mirodo pilafe", 400)
    'zakeno mirodo pilafe\n\nHerons nest late.'
    """
    places = [_cut(text, 0, lead) if lead else 0]
    while len(text) - places[-1] > 2 * spacing:
        places.append(_cut(text, places[-1], spacing))
    parts = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    return f"\n\n{token}\n\n".join(parts).removeprefix("\n\n").removesuffix("\n\n")


def _cut(text: str, start: int, distance: int) -> int:
    """Where to cut, between a distance from a start and twice that; the end of a text that ends before."""
    first, last = start + distance, start + 2 * distance
    ends = (end.search(text, first, last) for end in _ENDS)
    return min(next((match.end() for match in ends if match), last), len(text))


async def _close(pieces: AsyncIterator[str]) -> None:
    """Ends a stream that nobody reads on, so that the model stops writing."""
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()
