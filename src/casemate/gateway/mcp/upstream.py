"""Guards the retrieval tools of another MCP server.

Nothing of the other server reaches a client unguarded. Only tools with a known argument for the query are offered:
those that the operator names, or else those that the other server marks as read-only. A client may send the query, the
user's question and the arguments that the operator names. Results are replaced by the documents of the index that they
name (``found_documents``), after the guard. A failure, or a result of another form, counts as nothing found: a refusal
would reveal the content of the other server. Its resources, prompts and further tools are not offered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from casemate.errors import BackendError, ConfigError, needs
from casemate.gateway.auth.keys import ApiKey
from casemate.gateway.errors import ApiError
from casemate.gateway.mcp.found_documents import judge_found
from casemate.gateway.mcp.tools import (
    QUESTION,
    QUESTION_SCHEMA,
    ToolDescription,
    ToolResult,
    ToolSet,
    may_search,
    text_argument,
)
from casemate.gateway.state import Gateway, RequestContext
from casemate.types import Secret

QUERY_ARGUMENTS = ("query", "question", "q", "search", "search_query")
"""Names by which the argument with the query is recognized, the likeliest first."""
LISTS = ("result", "results", "documents", "hits", "matches", "data", "items", "chunks", "passages", "nodes")
TEXTS = ("result", "text", "content", "page_content", "document", "passage", "chunk", "snippet", "body")
"""Fields in which results have their documents, and documents their text."""
SEARCH_SHARE = 0.5
"""Share of ``gateway.timeout_s`` for the other server. The rest is for the guard, so that slowness is not visible."""
TURN_QUESTION = "user_question"
"""Argument with the user's question, where the tool has an argument of that name itself."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upstream:
    """Another MCP server.

    Attributes:
        address: Its URL (streamable HTTP), or the command that starts it (stdio).
        tools: Arguments by tool to be guarded: the first has the query, and is recognized by its name if it is missing
            or empty. The others are passed on; the guard does not judge them. Without tools, all are guarded that are
            marked as read-only and whose argument is recognized.
        variables: Environment variables for the command, besides the SDK's default ones such as PATH and HOME.
    """

    address: str
    tools: Mapping[str, Sequence[str]]
    token: Secret | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class _Guarded:
    description: ToolDescription
    query: str
    question: str


class UpstreamTools(ToolSet):
    """The retrieval tools of another server, guarded.

    The gateway's index must contain the documents that it retrieves.
    """

    def __init__(self, gateway: Gateway, upstream: Upstream) -> None:
        super().__init__(gateway)
        self._upstream = upstream
        self._tools: dict[str, _Guarded] = {}
        self._client: Any = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Connects to the other server.

        Raises:
            BackendError: If it cannot be reached.
            ConfigError: If it has no tool that can be guarded, or lacks a configured one.
        """
        with needs("casemate[mcp]"):
            from mcp import Client
        opened = AsyncExitStack()
        try:
            async with asyncio.timeout(self.gateway.section.timeout_s):
                transport = await _transport(self._upstream, opened)
                self._client = await opened.enter_async_context(Client(transport, cache=None))
                offered = await self._offered()
        except Exception as error:
            await opened.aclose()
            message = f"the upstream MCP server cannot be used: {type(error).__name__}"
            raise BackendError(message, backend="mcp", retryable=True) from error
        try:
            self._tools = {tool.name: guarded for tool in offered if (guarded := self._guarded(tool))}
            self._require_tools([tool.name for tool in offered])
            yield
        finally:  # an error that passed the client's own context would become a group
            await opened.aclose()

    async def _offered(self) -> list[Any]:
        tools, cursor = [], None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    def _guarded(self, tool: Any) -> _Guarded | None:
        """The tool as it is offered here; None if it is not to be guarded or needs further arguments."""
        chosen = self._upstream.tools
        properties = dict(tool.input_schema.get("properties", {}))
        texts = [name for name, schema in properties.items() if _is_text(schema)]
        first, *others = chosen.get(tool.name) or ("",)
        query = first or next((name for name in QUERY_ARGUMENTS if name in texts), "")
        passed, required = {query, *others}, set(tool.input_schema.get("required", ()))
        read_only = tool.annotations.read_only_hint if tool.annotations else None
        if not (tool.name in chosen if chosen else read_only is True):
            return None
        if query not in texts or not required <= passed <= properties.keys():
            return None
        question = TURN_QUESTION if QUESTION in passed else QUESTION
        arguments = {
            **tool.input_schema,
            "properties": {**{name: properties[name] for name in (query, *others)}, question: QUESTION_SCHEMA},
            "required": sorted({query, *required}),
            "additionalProperties": False,
        }
        description = ToolDescription(tool.name, tool.description or "", arguments, True, read_only)
        return _Guarded(description, query, question)

    def _require_tools(self, offered: Sequence[str]) -> None:
        lacking = [name for name in self._upstream.tools if name not in self._tools]
        if lacking or not self._tools:
            what = (
                f"cannot be guarded: {', '.join(lacking)}"
                if lacking
                else "none is known to be read-only and to take a query"
            )
            raise ConfigError(
                f"of the upstream server's tools, {what}; name them, the query's argument, and others to pass on: "
                f"--tool NAME=ARGUMENT[,ARGUMENT...] (its tools: {', '.join(offered) or 'none'})"
            )
        rest = [name for name in offered if name not in self._tools]
        _log.warning("guarded: %s; not offered: %s", ", ".join(self._tools), ", ".join(rest) or "none")

    async def descriptions(self, key: ApiKey) -> Sequence[ToolDescription]:
        """See ``ToolSet``. Only a key that may use ``/v1/retrieve`` may search."""
        return [tool.description for tool in self._tools.values()] if may_search(key) else ()

    async def call(self, context: RequestContext, key: ApiKey, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        tool, app = self._tools[name], self.gateway.app
        if not arguments.keys() <= tool.description.arguments["properties"].keys():
            raise ApiError(400, "an argument is not one of the tool's", "invalid_value")
        question = text_argument(arguments, tool.question, required=False)
        query = self.query(context, key, text_argument(arguments, tool.query), question)
        passed = {argument: value for argument, value in arguments.items() if argument != tool.question}
        texts = await self._found(name, passed)
        with self.turn(query, question):
            documents = await judge_found(app.guard, query, texts, off=app.config.guard.mode == "off")
        await self.gateway.pace()
        return await self.charge(key, query.text, ToolResult(documents=documents))

    async def _found(self, name: str, arguments: Mapping[str, Any]) -> list[str]:
        """The texts that the other server finds; none if it fails, or the result has no known form."""
        try:
            async with asyncio.timeout(SEARCH_SHARE * self.gateway.section.timeout_s):
                result = await self._client.call_tool(name, dict(arguments))
        except Exception as error:
            _log.error("tool %s of the upstream server failed: %s", name, type(error).__name__)
            return []
        texts = None if result.is_error else recognize(result.content, result.structured_content)
        if texts is None:
            _log.error("tool %s: the result is an error or has no known form; it is dropped", name)
        return texts or []


def recognize(content: Sequence[Any], structured: Any = None) -> list[str] | None:
    """The texts of the documents in the result of a tool; None if it has an unknown form.

    Known forms: texts; lists of texts; objects with a text, or with one list of these (``LISTS``, ``TEXTS``). They may
    be structured content, which is preferred, or JSON in text blocks. A block that is not JSON is one text.
    """
    try:
        if structured is not None:
            return list(_texts(structured))
        return [text for block in content for text in _block_texts(block)]
    except (LookupError, RecursionError):
        return None


def _block_texts(block: Any) -> Iterator[str]:
    if block.type != "text":
        raise LookupError(block.type)
    try:
        value = json.loads(block.text)
    except (ValueError, RecursionError):
        value = block.text
    yield from _texts(value) if isinstance(value, dict | list) else [block.text]


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value; raises LookupError if it has another form."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        lists = [name for name in LISTS if isinstance(value.get(name), list)]
        texts = [name for name in TEXTS if isinstance(value.get(name), str)]
        if len(lists) + len(texts) == 0 or len(lists) > 1:
            raise LookupError("no text")
        yield from _texts(value[lists[0]]) if lists else [value[texts[0]]]
    else:
        raise LookupError(type(value).__name__)


async def _transport(upstream: Upstream, opened: AsyncExitStack) -> Any:
    """What the client connects to."""
    from mcp import StdioServerParameters

    if upstream.address.startswith(("http://", "https://")):
        if upstream.token is None:
            return upstream.address
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {"Authorization": f"Bearer {upstream.token}"}
        http = await opened.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=60))
        return streamable_http_client(upstream.address, http_client=http)
    command, *arguments = shlex.split(upstream.address)
    return StdioServerParameters(command=command, args=arguments, env=dict(upstream.variables))


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"
