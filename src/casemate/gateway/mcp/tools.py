"""Tools of the gateway for agents: ``ask`` answers a question, ``search`` returns documents.

An agent asks several queries for one question of its user. If it names that question, they are one turn: a document
that is withheld for one of them stays withheld for all (``casemate.guard.turn``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from casemate.errors import QueryError
from casemate.gateway.api.openai_schema import count_tokens
from casemate.gateway.auth.keys import ApiKey, query_of
from casemate.gateway.errors import ApiError, forbidden
from casemate.gateway.state import Gateway, RequestContext
from casemate.guard.turn import OpenTurns, continued
from casemate.rag.pipeline import require_answerable
from casemate.types import Document, Query

QUESTION = "question"
"""Argument with the question of the agent's user."""
QUESTION_SCHEMA = {
    "type": "string",
    "description": "The user's question, word for word and the same in every call that serves it.",
}


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """A tool as a client sees it.

    Attributes:
        arguments: JSON schema of its arguments.
        finds: Whether it returns documents; else a text.
        read_only: Whether it changes nothing; None: not known.
    """

    name: str
    description: str
    arguments: Mapping[str, Any]
    finds: bool
    read_only: bool | None = True


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returns to the client: a text, or documents. It has no place for a score or a verdict."""

    text: str = ""
    documents: Sequence[Document] | None = None


class ToolSet(ABC):
    """The tools of a server, answered by a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._turns = OpenTurns()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keeps connections open while the server runs."""
        yield

    @abstractmethod
    async def descriptions(self, key: ApiKey) -> Sequence[ToolDescription]:
        """The tools that a key may call."""

    @abstractmethod
    async def call(self, context: RequestContext, key: ApiKey, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls a tool of ``descriptions``.

        Raises:
            ApiError: If an argument is invalid.
            CasemateError: If the system fails.
        """

    def query(self, context: RequestContext, key: ApiKey, text: str, question: str = "") -> Query:
        """Builds the query of a call; the question of the agent's user, if given, has the limits of a query, too.

        Raises:
            ApiError: If the text or the question is not a valid question.
        """
        context.client = key.id
        query = query_of(key, text, key.id, self.gateway.app.config.rag.k, context.id)
        try:
            require_answerable(query)
            require_answerable(replace(query, text=question or text))
        except QueryError as error:
            raise ApiError(400, str(error), "invalid_value") from None
        return query

    @contextmanager
    def turn(self, query: Query, question: str) -> Iterator[None]:
        """Makes the block part of the turn of a question; without one, the query is its own question."""
        with continued(self._turns.of(query.tenant, query.client, question or query.text)):
            yield

    async def charge(self, key: ApiKey, asked: str, result: ToolResult) -> ToolResult:
        """Charges a call to its key, and waits until its events are written."""
        sent = [result.text, *(d.content for d in result.documents or ())]
        await self.gateway.usage_meter(key).charge_and_write(sum(map(count_tokens, [asked, *sent])), last=True)
        return result


class GuardedTools(ToolSet):
    """The tools of this gateway's own system."""

    async def descriptions(self, key: ApiKey) -> Sequence[ToolDescription]:
        """See ``ToolSet``. Only a key that may use ``/v1/retrieve`` may search."""
        ask = ToolDescription(
            "ask",
            "Answers a question from the document collection.",
            described_arguments({QUESTION: QUESTION_SCHEMA}, QUESTION),
            finds=False,
        )
        query = {"type": "string", "description": "What to search for."}
        search = ToolDescription(
            "search",
            "Finds the documents of the collection that best match a query.",
            described_arguments({"query": query, QUESTION: QUESTION_SCHEMA}, "query"),
            finds=True,
        )
        return (ask, search) if may_search(key) else (ask,)

    async def call(self, context: RequestContext, key: ApiKey, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        tool = find_tool(await self.descriptions(key), name)
        question = text_argument(arguments, QUESTION, required=not tool.finds)
        query = self.query(context, key, text_argument(arguments, "query") if tool.finds else question, question)
        with self.turn(query, question):
            if tool.finds:
                found = await self.gateway.retrieve(query)
                result = ToolResult(documents=[hit.document for hit in found.hits])
            else:
                result = ToolResult((await self.gateway.app.target.ask(query)).reply.text)
        return await self.charge(key, query.text, result)


def find_tool(tools: Sequence[ToolDescription], name: str) -> ToolDescription:
    """The tool with this name. One that the key may not call does not differ from one that does not exist."""
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        raise forbidden()
    return found


def text_argument(arguments: Mapping[str, Any], name: str, *, required: bool = True) -> str:
    """An argument that must be a text; empty if it is missing and not required."""
    value = arguments.get(name, None if required else "")
    if not isinstance(value, str):
        raise ApiError(400, f"{name}: a text is required", "invalid_value", name)
    return value


def described_arguments(properties: Mapping[str, Any], *required: str) -> Mapping[str, Any]:
    """JSON schema of a tool's arguments; others than these are refused by clients that check it."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def may_search(key: ApiKey) -> bool:
    """Whether a key may receive documents."""
    return key.grant.role == "admin" or key.grant.retrieve
