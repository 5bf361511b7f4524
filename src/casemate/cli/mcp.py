"""``mcp``: guarded tools for agents, by the Model Context Protocol."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from casemate import config as configuration
from casemate.app import open_app
from casemate.cli.console import ConfigFile, Tenant, say, shown
from casemate.errors import ConfigError, needs
from casemate.gateway.auth.keys import ApiKey, ApiKeyStore, Grant
from casemate.system import App
from casemate.types import DEFAULT_TENANT, Secret

LOCAL_CLIENT = "mcp-stdio"
"""Client name of the process that starts the server, if no key is given."""


Tool = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=ARGUMENT[,ARGUMENT...]]",
        help="Tool of that server, its argument with the query, and others that are passed on without being judged. "
        "Repeatable. Default: all read-only tools whose query is known.",
    ),
]
TokenVariable = Annotated[
    str, typer.Option(metavar="VARIABLE", help="Environment variable with the bearer token for that URL.")
]
Variable = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VARIABLE",
        help="Environment variable that the command gets besides PATH, HOME and the like. Repeatable.",
    ),
]


def mcp(
    config: ConfigFile = None,
    http: Annotated[bool, typer.Option("--http", help="Serve at /v1/mcp, for API keys. Default: stdio.")] = False,
    host: Annotated[str | None, typer.Option(help="With --http: overrides gateway.host.")] = None,
    port: Annotated[int | None, typer.Option(help="With --http: overrides gateway.port; 0: a free port.")] = None,
    as_client: Annotated[
        str,
        typer.Option("--as", help="With stdio: the client's API key, by id or name. Default: no labels, no groups."),
    ] = "",
    tenant: Tenant = DEFAULT_TENANT,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also serve `remember` and `forget`: entries that only their client reads.")
    ] = False,
    upstream: Annotated[
        str, typer.Option(help="Guard the retrieval tools of another MCP server: its URL, or the command to start it.")
    ] = "",
    tool: Tool = None,
    token_env: TokenVariable = "",
    env: Variable = None,
) -> None:
    """Serve guarded retrieval and answers to agents (Model Context Protocol)."""
    if http and (as_client or tenant != DEFAULT_TENANT):
        raise ConfigError("--as and --tenant are for stdio; over HTTP each client sends its own API key")
    given: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    if given and not http:
        raise ConfigError("--host and --port need --http")
    if memory and upstream:
        raise ConfigError("--memory stores entries in your own index; it cannot be combined with --upstream")
    if memory:
        given["agent_memory"] = True
    make_tools = _tools(upstream, tool or (), token_env, env or ())
    settings = configuration.with_overrides(configuration.read(config), gateway={"mcp": http, **given})
    with open_app(settings) as app:
        if http:
            importlib.import_module("casemate.gateway.server").serve(app, _print_address, make_tools)
        else:
            _serve_stdio(app, make_tools, as_client, tenant)


def _tools(upstream: str, tools: Sequence[str], token_env: str, env: Sequence[str]) -> Callable[[Any], Any]:
    if (tools or token_env or env) and not upstream:
        raise ConfigError("--tool, --token-env and --env need --upstream")
    if env and upstream.startswith(("http://", "https://")):
        raise ConfigError("--env is for a command; the upstream server is a URL")
    with needs("casemate[mcp]"):
        importlib.import_module("casemate.gateway.server")
        importlib.import_module("mcp")
    if not upstream:
        found: Callable[[Any], Any] = importlib.import_module("casemate.gateway.mcp.memory").own_tools
        return found
    module = importlib.import_module("casemate.gateway.mcp.upstream")
    for option, name in (("--token-env", token_env), *(("--env", name) for name in env)):
        if name and name not in os.environ:
            raise ConfigError(f"{option}: the environment variable {name} is not set")
    named = {name: tuple(arguments.split(",")) for name, _, arguments in (text.partition("=") for text in tools)}
    token = Secret(os.environ[token_env]) if token_env else None
    server = module.Upstream(upstream, named, token, {name: os.environ[name] for name in env})
    return lambda gateway: module.UpstreamTools(gateway, server)


def _serve_stdio(app: App, make_tools: Callable[[Any], Any], name: str, tenant: str) -> None:
    state = importlib.import_module("casemate.gateway.state")
    server = importlib.import_module("casemate.gateway.mcp.server")
    if name:
        key = ApiKeyStore(app.store).named(name)
    else:  # the process that starts the server may read its files, but its model's questions come from elsewhere
        grant = Grant(LOCAL_CLIENT, tenant=tenant, retrieve=True)
        key = ApiKey(LOCAL_CLIENT, grant, "", datetime.now(UTC))
    asyncio.run(server.serve_stdio(make_tools(state.Gateway(app)), key))


def _print_address(address: str) -> None:
    say.print(f"serving tools at {shown(address)}/v1/mcp; create a key: casemate key create NAME --retrieve")
