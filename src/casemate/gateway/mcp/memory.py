"""Agent memory: each client adds entries to the collection and deletes its own; other clients receive none in full.

An entry is a document whose metadata names the client as ``subject`` and as its only reader. So the audience policy
(``guard.audience``) decides what another client receives of it: a quorum answer, or nothing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from casemate.errors import ConfigError
from casemate.gateway.auth.keys import ApiKey
from casemate.gateway.errors import ApiError
from casemate.gateway.mcp.tools import (
    GuardedTools,
    ToolDescription,
    ToolResult,
    described_arguments,
    find_tool,
    text_argument,
)
from casemate.gateway.state import Gateway, RequestContext
from casemate.guard.calibration.fitting import calibration_due
from casemate.rag.chunking import split_document
from casemate.types import READERS, Document

REMEMBER, FORGET = "remember", "forget"
SUBJECT = "subject"
MOST_CHARACTERS = 20_000
"""Length of an entry."""
_log = logging.getLogger(__name__)


class MemoryTools(GuardedTools):
    """The tools of the gateway's own system, with ``remember`` and ``forget``.

    Raises:
        ConfigError: If the guard does not withhold entries from other clients.
    """

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._adding = asyncio.Lock()
        guard = gateway.app.guard
        if guard.audience.unentitled == "full" or not guard.enforce:
            raise ConfigError(
                "agent memory: every client could read the entries of all others; set guard.mode: enforce, and "
                "guard.audience.unentitled: nothing or quorum"
            )

    async def descriptions(self, key: ApiKey) -> Sequence[ToolDescription]:
        text = {"type": "string", "description": "What to remember, as a text that is clear on its own."}
        return (
            *await super().descriptions(key),
            ToolDescription(
                REMEMBER,
                "Stores a text in this client's memory, where its questions and searches find it.",
                described_arguments({"text": text}, "text"),
                finds=False,
                read_only=False,
            ),
            ToolDescription(
                FORGET,
                "Deletes everything that this client has stored with `remember`.",
                described_arguments({}),
                finds=False,
                read_only=False,
            ),
        )

    async def call(self, context: RequestContext, key: ApiKey, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if name not in (REMEMBER, FORGET):
            return await super().call(context, key, name, arguments)
        find_tool(await self.descriptions(key), name)
        context.client = key.id
        if name == REMEMBER:
            text = text_argument(arguments, "text")
            result = ToolResult(await self._remember(key, text))
            return await self.charge(key, text, result)
        return await self.charge(key, "", ToolResult(await self._forget(key)))

    async def _remember(self, key: ApiKey, text: str) -> str:
        """Stores an entry. The reply does not reveal whether the screening withheld it."""
        if not text.strip() or len(text) > MOST_CHARACTERS or "\x00" in text:
            raise ApiError(
                400, f"text: 1 to {MOST_CHARACTERS:,} characters are required, without NUL", "invalid_value", "text"
            )
        rag = self.gateway.app.guard.rag
        recipe = self.gateway.app.config.rag.chunk
        entry = Document(_prefix(key) + uuid.uuid4().hex, text, metadata={SUBJECT: key.id, READERS: [key.id]})
        tokens = recipe.tokens or rag.embedder.max_tokens
        chunks = await asyncio.to_thread(split_document, entry, rag.embedder, tokens, recipe.overlap)
        async with self._adding:  # the number of chunks is that of the check
            await asyncio.to_thread(self._require_calibrated, key.grant.tenant, len(chunks))
            withheld = await self.gateway.documents.add(chunks, key.grant.tenant, uploader=f"key {key.id}")
        counts = int(not withheld), 0 if withheld else len(chunks), len(withheld)
        self.gateway.record_ingest(key, "added", *counts)
        return "Stored."

    def _require_calibrated(self, tenant: str, added: int) -> None:
        """Refuses an entry that would make a calibration stale: a client could take away the answers of all others."""
        app = self.gateway.app
        for defense in app.calibrated:
            before, why = (calibration_due([defense], app.index, tenant, chunks) for chunks in (0, added))
            if why and not before:
                _log.warning("an entry of the agent memory was refused, because with it %s", why)
                raise ApiError(503, "The memory takes no further entries at the moment.", "memory_full")

    async def _forget(self, key: ApiKey) -> str:
        """Deletes the client's entries, even if a calibration gets stale; those in quarantine stay for the reviewer."""
        tenant = key.grant.tenant
        held = await asyncio.to_thread(self.gateway.app.index.digests, tenant)
        sources = [source for source in held if source.startswith(_prefix(key))]
        removed = await self.gateway.documents.remove(sources, tenant) if sources else 0
        self.gateway.record_ingest(key, "removed", len(sources), removed)
        if sources and (why := await asyncio.to_thread(self.gateway.app.due, tenant)):
            _log.warning("entries of the agent memory were deleted, and the guard cannot judge questions: %s", why)
        return f"Deleted {len(sources)} entries."


def _prefix(key: ApiKey) -> str:
    """Beginning of the source names of a client's entries."""
    return f"memory/{key.id}/"


def own_tools(gateway: Gateway) -> GuardedTools:
    """The tools of the gateway's own system: with memory if ``gateway.agent_memory`` is on."""
    return MemoryTools(gateway) if gateway.section.agent_memory else GuardedTools(gateway)
