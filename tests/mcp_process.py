"""MCP servers as processes, on stdio: ``python -m tests.mcp_process guarded|library FOLDER``."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from mcp.server import MCPServer
from mcp_types import ImageContent, ToolAnnotations

from tests.fakes import documents


def _add_failing_tools(server, read_only):
    @server.tool(annotations=read_only)
    def search_broken(query: str) -> str:
        """Fail with a message that has text of a document."""
        raise ValueError(documents(40)[3].text)

    @server.tool(annotations=read_only)
    async def search_slow(query: str) -> str:
        """Answer later than any client waits."""
        await asyncio.sleep(600)
        return query


def library():
    """A server of another vendor. It finds all documents that contain a word of the query, with scores."""
    server = MCPServer("library")
    read_only = ToolAnnotations(read_only_hint=True)

    def find(query: str) -> list[dict]:
        words = query.split()
        scored = [(sum(word in d.text.split() for word in words), d) for d in documents(40)]
        best = sorted((pair for pair in scored if pair[0]), key=lambda pair: -pair[0])
        return [{"id": d.id, "text": d.text, "score": score} for score, d in best]

    @server.tool(annotations=read_only)
    def search(query: str, limit: int = 5, where: str = "") -> dict:
        """Search the library; ``where`` is a condition on the documents."""
        return {"documents": [one for one in find(query) if where in one["text"]][:limit]}

    @server.tool(annotations=read_only)
    def search_member(query: str) -> list[str]:
        """Find the document with this text, if there is one."""
        return [d.text for d in documents(40) if d.text == query]

    @server.tool(annotations=read_only)
    def search_echo(query: str) -> str:
        """Find nothing, and repeat the query."""
        return f"No results for: {query}"

    @server.tool(annotations=read_only)
    def search_shelf(query: str, shelf: str) -> str:
        """Search a shelf that must be named."""
        return find(query)[0]["text"]

    @server.tool(annotations=read_only)
    def summarize(text: str) -> str:
        """Shorten a text, which is not a query."""
        return text[:20]

    @server.tool(annotations=ToolAnnotations(read_only_hint=False))
    def execute(query: str) -> str:
        """Run a statement that may write."""
        return query

    @server.tool()
    def search_unmarked(query: str) -> str:
        """Search the library, without a statement about writing."""
        return find(query)[0]["text"]

    @server.tool()
    def environment(query: str) -> list[str]:
        """Find documents that are numbered in environment variables."""
        numbers = [int(os.environ[name]) for name in ("CASEMATE_TEST_A", "CASEMATE_TEST_B") if name in os.environ]
        return [documents(40)[number].text for number in numbers]

    @server.tool(annotations=read_only)
    def search_text(query: str) -> str:
        """Search the library; all documents in one text."""
        return "\n---\n".join(one["text"] for one in find(query)[:3])

    @server.tool(annotations=read_only)
    def search_pictures(query: str) -> ImageContent:
        """Search the library's pictures."""
        return ImageContent(type="image", data="aGVsbG8=", mime_type="image/png")

    @server.tool(annotations=read_only)
    def search_numbers(query: str) -> dict:
        """Return a form that nobody knows."""
        return {"secretword": {"deep": [1, 2]}}

    @server.tool(annotations=read_only)
    def search_elsewhere(query: str) -> list[str]:
        """Find what is in no index."""
        return ["a text that the index does not hold, about a secretword"]

    @server.tool()
    def read_document(number: int) -> str:
        """Read any document, without a query."""
        return documents(40)[number].text

    @server.resource("library://documents")
    def everything() -> str:
        """Return all documents."""
        return "\n".join(d.text for d in documents(40))

    _add_failing_tools(server, read_only)
    return server


def main() -> None:
    """Serves until stdin is closed."""
    kind, folder = sys.argv[1:3]
    if kind == "library":
        library().run()
    else:
        serve_guarded(Path(folder))


def serve_guarded(folder: Path) -> None:
    """Imports the package here, because the library server does not need it and starts in half the time."""
    from casemate.gateway.auth.keys import ApiKey, Grant
    from casemate.gateway.mcp.server import serve_stdio
    from casemate.gateway.mcp.tools import GuardedTools
    from casemate.gateway.state import Gateway
    from tests.gateways import HideNamed, make

    app = make(folder, defenses=(HideNamed("d3"),))
    key = ApiKey("local", Grant("local", retrieve=True), "", datetime.now(UTC))
    asyncio.run(serve_stdio(GuardedTools(Gateway(app)), key))


if __name__ == "__main__":
    main()
