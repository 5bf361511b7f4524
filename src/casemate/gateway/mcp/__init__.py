"""The Model Context Protocol (https://modelcontextprotocol.io): guarded tools for agents, over stdio and HTTP."""
