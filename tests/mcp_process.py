"""MCP servers in their own process, on stdio: ``python -m tests.mcp_process guarded|library FOLDER``."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

from mcp.server import MCPServer
from mcp_types import ImageContent

from casemate.gateway.auth.keys import ApiKey, Grant
from casemate.gateway.mcp.server import serve_stdio
from casemate.gateway.mcp.tools import GuardedTools
from casemate.gateway.state import Gateway
from tests.fakes import documents
from tests.gateways import HideNamed, make


def library():
    """A server of another vendor: finds all documents that have a word of the query, with their scores."""
    server = MCPServer("library")

    def find(query: str) -> list[dict]:
        words = query.split()
        scored = [(sum(word in d.text.split() for word in words), d) for d in documents(40)]
        best = sorted((pair for pair in scored if pair[0]), key=lambda pair: -pair[0])
        return [{"id": d.id, "text": d.text, "score": score} for score, d in best]

    @server.tool()
    def search(query: str, limit: int = 5) -> dict:
        """Search the library."""
        return {"documents": find(query)[:limit]}

    @server.tool()
    def search_text(query: str) -> str:
        """Search the library; all documents in one text."""
        return "\n---\n".join(one["text"] for one in find(query)[:3])

    @server.tool()
    def search_pictures(query: str) -> ImageContent:
        """Search the library's pictures."""
        return ImageContent(type="image", data="aGVsbG8=", mime_type="image/png")

    @server.tool()
    def search_numbers(query: str) -> dict:
        """Return a form that nobody knows."""
        return {"secretword": {"deep": [1, 2]}}

    @server.tool()
    def search_broken(query: str) -> str:
        """Fail with a message that has text of a document."""
        raise ValueError(documents(40)[3].text)

    @server.tool()
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

    return server


def main() -> None:
    """Serves until stdin is closed."""
    kind, folder = sys.argv[1:3]
    if kind == "library":
        library().run()
        return
    app = make(Path(folder), defenses=(HideNamed("d3"),))
    key = ApiKey("local", Grant("local", retrieve=True), "", datetime.now(UTC))
    asyncio.run(serve_stdio(GuardedTools(Gateway(app)), key))


if __name__ == "__main__":
    main()
