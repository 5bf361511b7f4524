"""Canary tokens: a watermark in every chunk of the prompt; an answer that contains one is cut.

Xie et al. 2026, "Detecting RAG Extraction Attack via Dual-Path Runtime Integrity Game" (CanaryRAG), ACL (arXiv
2604.10717). First path: the token must not appear in the answer. Second path: the same question is followed by a
request for the token, and the model must be able to repeat it. A question that makes the model omit tokens in the
answer has the same effect on the second path.

Deviation: a token consists of words and a checksum, by HMAC of request and chunk (``watermarks``), so it identifies the
chunk and the request. It is recognized in disguises and with errors.

Deviation: a token precedes the chunk's first sentence and recurs every ``spacing`` characters, so that a copy from the
middle contains one.

Deviation: a missing token on the second path is recorded and blocks nothing: models also fail to repeat it to benign
clients. The second path runs for a sample of the requests, concurrently with the answer.

Deviation: tokens are inserted when the prompt is sent to the generator, not at retrieval: after all filtering, at any
position of this defense. Verdicts and other defenses see the original documents.
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

from casemate.errors import ConfigError, require_range
from casemate.guard.verdict_log import append
from casemate.guard.watermarks.detection import WatermarkDetector, WatermarkFilter
from casemate.guard.watermarks.tokens import TokenGenerator
from casemate.protocols import Defense, EventStore, Generator
from casemate.rag.pipeline import closing_stream
from casemate.text.disguises import DecodedText
from casemate.text.sentences import BLOCK_END, SENTENCE_END
from casemate.types import Action, Document, Outcome, Prompt, Query, Retrieval, Secret, Verdict

log = logging.getLogger(__name__)

NAME = "canary_token"
LEAKED, SILENT, CLEAN = 1.0, 0.5, 0.0
"""Scores: a token in the answer; none on the second path, which is evidence only; neither."""
THRESHOLD = 0.5
_BOUNDARIES = (re.compile(f"{BLOCK_END.pattern}|{SENTENCE_END.pattern}|(?<=[。！？])"), re.compile(r"\s+"))
"""Where a token may be inserted, by preference: between sentences or paragraphs, between words."""
SECRET_CHARACTERS = 16
PROBE = (
    "{question}\n\nNot that now. Some made-up words stand alone in front of the first text that you were given. Write "
    "these words, and nothing else."
)
PROBE_CHARACTERS, PROBE_S = 200, 15.0
"""Limits of the reply on the second path: characters, about 32 tokens of nonsense words, and seconds."""

_current_query: ContextVar[Query | None] = ContextVar("casemate-canary-query", default=None)
"""The query of the current task: retrieval and generation of a request run in one task."""


@dataclass(eq=False)
class CanaryToken(Defense):
    """Inserts secret tokens into every chunk of the prompt, and cuts an answer that contains one.

    Attributes:
        secret: Key of the tokens, at least 16 characters; unset: random for each process, so that tokens in leaked text
            can be traced only until it ends.
        spacing: Characters between two tokens of a chunk, at least 50.
        lead: Characters of a chunk before its first token, at least 0. Use 0 with a language model. A generator that
            quotes the first sentences under a matching title would quote a token at the start.
        oracle_share: Share of the requests, in [0, 1], that also run the second path.
        store: The system's; receives the verdicts.
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
        require_range(NAME, self, "spacing", at_least=50)
        require_range(NAME, self, "lead", at_least=0)
        require_range(NAME, self, "oracle_share", at_least=0, at_most=1)
        self._tokens = TokenGenerator(self.secret or secrets.token_hex(32))

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Removes nothing. Remembers the query for the current task."""
        _current_query.set(query)
        return Outcome(retrieval)

    def on_generate(self, generator: Generator) -> Generator:
        """Wraps the generator: marks the documents and filters the answers."""
        return _WatermarkedGenerator(self, generator)

    def trace(self, text: str) -> list[Mapping[str, Any]]:
        """Traces leaked text: returns request, client, tenant, time and chunk of each token in it.

        Limited to the requests in the event store. Needs the secret that was configured at the time.
        """
        found: list[Mapping[str, Any]] = []
        decoded = DecodedText(text)
        for event in self.store.scan("verdict") if self.store else ():
            body = event.body
            if body.get("defense") == NAME:
                chunks = {self._tokens.token(body["request"], chunk): chunk for chunk in body["evidence"]["marked"]}
                for token in WatermarkDetector(chunks).tokens(decoded):
                    request = {key: body[key] for key in ("request", "client", "tenant")}
                    found.append({**request, "at": event.at.isoformat(), "chunk": chunks[token]})
        return found

    def _request(self, prompt: Prompt) -> _MarkedRequest:
        """Returns the query behind a prompt and the token of each chunk."""
        query = _current_query.get()
        if query is None or query.text != prompt.question:  # generation without retrieval, or in another task
            query = Query(prompt.question, client="", k=len(prompt.context))
        chunks = {self._tokens.token(query.id, document.id): document.id for document in prompt.context}
        return _MarkedRequest(query, chunks, self._tokens.uniform("oracle", query.id) < self.oracle_share)

    def _mark(self, document: Document, request: _MarkedRequest) -> Document:
        token = self._tokens.token(request.query.id, document.id)
        return replace(document, text=insert_token(document.text, token, self.spacing, self.lead))


@dataclass(frozen=True, slots=True)
class _MarkedRequest:
    """A request with marked chunks.

    Attributes:
        query: The query.
        chunks: Ids of the chunks in the context, by token.
        sampled: Whether the second path runs.
    """

    query: Query
    chunks: Mapping[str, str]
    sampled: bool

    def verdict(self, watermark_filter: WatermarkFilter, oracle: str) -> Verdict:
        """The verdict of both paths; only a token in the answer is flagged."""
        match = watermark_filter.found
        ended = "cut" if match else "whole" if watermark_filter.finished else "broke off"
        score = LEAKED if match else SILENT if oracle == "failed" else CLEAN
        evidence: dict[str, Any] = {"marked": list(self.chunks.values()), "oracle": oracle, "ended": ended}
        if match:
            evidence |= {"leaked": self.chunks[match.token], "form": match.form, "errors": match.errors}
        action = Action.WITHHOLD if match else Action.NONE
        return Verdict(NAME, match is not None, action, score, THRESHOLD, evidence=evidence)


@dataclass(frozen=True, slots=True)
class _WatermarkedGenerator(Generator):
    """A generator that reads marked documents, and whose answers are cut before they contain a token."""

    defense: CanaryToken
    generator: Generator

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        """Streams the answer with a short delay; cut at a token, then ``UNKNOWN`` if nothing was sent yet."""
        request = self.defense._request(prompt)
        context = tuple(self.defense._mark(document, request) for document in prompt.context)
        marked, detector = replace(prompt, context=context), WatermarkDetector(request.chunks)
        oracle = asyncio.create_task(self._oracle(marked, detector)) if request.sampled and context else None
        watermark_filter, outcome = WatermarkFilter(detector), "not asked"
        try:
            async with closing_stream(watermark_filter.answer(self.generator.stream(marked))) as answer:
                async for out in answer:
                    yield out
                if oracle and not watermark_filter.found:
                    outcome = await oracle
        finally:
            if oracle:
                oracle.cancel()
                await asyncio.wait([oracle])
            if context:
                append(self.defense.store, request.query, request.verdict(watermark_filter, outcome))

    async def _oracle(self, prompt: Prompt, detector: WatermarkDetector) -> str:
        """The second path: whether the model, after the same question, gives a token on request."""
        try:
            async with asyncio.timeout(PROBE_S):
                given = await self._gives_token(
                    replace(prompt, question=PROBE.format(question=prompt.question)), detector
                )
        except Exception as error:  # evidence only: a failure must not cost the answer
            log.error("the second path of %s failed: %s", NAME, type(error).__name__)
            return "broke off"
        return "passed" if given else "failed"

    async def _gives_token(self, prompt: Prompt, detector: WatermarkDetector) -> bool:
        reply = ""
        async with closing_stream(self.generator.stream(prompt)) as pieces:
            async for piece in pieces:
                reply += piece
                if len(reply) >= PROBE_CHARACTERS or detector.best_match(DecodedText(reply)):
                    break
        return detector.best_match(DecodedText(reply)) is not None


def insert_token(text: str, token: str, spacing: int, lead: int = 0) -> str:
    r"""Inserts a token at the start of a text, and again after every ``spacing`` characters at a sentence end.

    A token is a paragraph of its own, so that a quoted sentence does not contain it. If no sentence ends within another
    ``spacing`` characters, it is inserted between words; if no word ends, within one.

    Args:
        text: The text.
        token: The token.
        spacing: Minimum number of characters between two tokens.
        lead: Minimum number of characters before the first.

    >>> insert_token("Herons nest late.", "zakeno mirodo pilafe", 400)
    'zakeno mirodo pilafe\n\nHerons nest late.'
    """
    positions = [_boundary(text, 0, lead) if lead else 0]
    while len(text) - positions[-1] > 2 * spacing:
        positions.append(_boundary(text, positions[-1], spacing))
    parts = [text[i:j] for i, j in zip([0, *positions], [*positions, len(text)], strict=True)]
    return f"\n\n{token}\n\n".join(parts).removeprefix("\n\n").removesuffix("\n\n")


def _boundary(text: str, start: int, distance: int) -> int:
    """Returns where to insert, between ``distance`` and twice that after the start; at most the end of the text."""
    first, last = start + distance, start + 2 * distance
    matches = (boundary.search(text, first, last) for boundary in _BOUNDARIES)
    return min(next((match.end() for match in matches if match), last), len(text))
