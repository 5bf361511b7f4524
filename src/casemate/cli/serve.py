"""``serve`` and ``key``: run the gateway, and manage its API keys."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from casemate import config as configuration
from casemate.app import open_app
from casemate.cli.console import ConfigFile, Json, Tenant, out, print_json, say, shown
from casemate.errors import BackendError, needs
from casemate.gateway.auth.keys import ApiKey, ApiKeyStore, Grant
from casemate.guard.audience import IGNORED
from casemate.plugins import build
from casemate.protocols import EventStore
from casemate.system import App
from casemate.types import DEFAULT_TENANT

EMPTY = (
    "[yellow]note:[/yellow] the index is empty, so every answer will be \"I don't know\"; run '{}', or add documents "
    "with POST /v1/documents"
)
OBSERVES = (
    "the guard observes: it records what it would withhold, and changes no answer; 'casemate enforce' switches it on"
)
key = typer.Typer(help="API keys of the gateway: create, list, revoke.", no_args_is_help=True)


def serve(
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Overrides gateway.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides gateway.port; 0 selects a free port.")] = None,
) -> None:
    """Serve the OpenAI-compatible API and the dashboard. SIGTERM or Ctrl-C stops it after running answers finish."""
    with needs("casemate[serve]"):
        server = importlib.import_module("casemate.gateway.server")
    settings = configuration.read(config)
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = configuration.with_overrides(settings, gateway=given) if given else settings
    with open_app(settings) as app:
        if not app.index.tenants():
            say.print(EMPTY.format(app.indexing_command))
        if app.mode == "observe":
            say.print(OBSERVES)
        if app.ignores_audience:
            say.print(f"[yellow]warning:[/yellow] {IGNORED}")
        server.serve(app, partial(_print_address, app))
    say.print("stopped; all events are written")


def _print_address(app: App, address: str) -> None:
    url, keys = shown(address), ApiKeyStore(app.store)
    with suppress(BackendError):  # the gateway serves without the store, too
        keys.sync()
    has_key = any(one.revoked is None for one in keys.all())
    key_hint = "" if has_key else "; create a key: casemate key create NAME"
    say.print(f"serving at {url}/v1, dashboard at {url}/dashboard{key_hint}")


@key.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the key's user or application.")],
    role: Annotated[
        Literal["client", "admin", "metrics", "traces"],
        typer.Option(
            help="client: ask; admin: also add and remove documents; metrics: only read /metrics; traces: only send "
            "traces to /v1/traces."
        ),
    ] = "client",
    tenant: Tenant = DEFAULT_TENANT,
    label: Annotated[
        list[str] | None, typer.Option(help="Allows documents with this label (metadata: acl). Repeatable.")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="Group of the client, for the rules of guard.audience. Repeatable.")
    ] = None,
    rate: Annotated[int | None, typer.Option(min=1, help="Requests per minute. Default: the gateway's.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Tokens per day. Default: the gateway's.")] = None,
    trust_user: Annotated[
        bool, typer.Option("--trust-user", help="Identify clients by key and the field 'user'.")
    ] = False,
    retrieve: Annotated[
        bool, typer.Option("--retrieve", help="Allow /v1/retrieve, which returns documents unchanged.")
    ] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it once. Only its hash is stored. Two valid keys cannot have one name."""
    grant = Grant(name, role, tenant, tuple(label or ()), rate, budget, trust_user, retrieve, tuple(group or ()))
    with _open_keys(config) as keys:
        keys.require_unused_name(name)
        created, text = keys.create(grant)
    if as_json:
        print_json({**_as_json(created), "secret": str(text)})
        return
    print(str(text))
    say.print(f"key {created.id} for {shown(name)}; store it now, it is not shown again")


@key.command("list")
def list_(
    details: Annotated[bool, typer.Option("--details", help="Show groups, labels and limits, too.")] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """List all keys, without their secrets."""
    with _open_keys(config) as keys:
        keys.sync()
        found = keys.all()
    if as_json:
        print_json({"keys": [_as_json(one) for one in found]})
        return
    if not found:
        out.print("no API key exists; create one with 'casemate key create NAME'")
        return
    if details:
        for one in found:
            out.print("\n".join(map(shown, _details(one))))
        return
    table = Table(box=None)
    for name in ("id", "name", "role", "tenant", "created", "state"):
        table.add_column(name, overflow="fold", no_wrap=name not in ("name", "tenant"))
    for one in found:
        state = "revoked" if one.revoked else "valid"
        row = (one.id, one.grant.name, one.grant.role, one.grant.tenant, f"{one.created:%Y-%m-%d}", state)
        table.add_row(*map(shown, row))
    out.print(table)


def _details(one: ApiKey) -> Iterator[str]:
    """A line with id and name of a key, and an indented line for each thing that it holds."""
    grant = one.grant
    allowed = [name for name in ("retrieve", "trust_user") if getattr(grant, name)]
    yield f"{one.id} {grant.name}"
    for name, text in (
        ("role", grant.role),
        ("tenant", grant.tenant),
        ("groups", ", ".join(grant.groups)),
        ("labels", ", ".join(grant.labels)),
        ("requests per minute", grant.requests_per_minute),
        ("tokens per day", grant.tokens_per_day),
        ("allowed", ", ".join(allowed)),
        ("created", f"{one.created:%Y-%m-%d %H:%M} UTC"),
        ("revoked", one.revoked and f"{one.revoked:%Y-%m-%d %H:%M} UTC"),
    ):
        if text:
            yield f"  {name}: {text}"


@key.command()
def revoke(
    id_: Annotated[str, typer.Argument(metavar="ID", help="Id from 'casemate key list', or its first characters.")],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Revoke a key permanently. All gateways refuse its next request."""
    with _open_keys(config) as keys:
        revoked = keys.revoke(id_)
    print_json(_as_json(revoked)) if as_json else out.print(f"revoked {revoked.id} ({shown(revoked.grant.name)})")


@contextmanager
def open_event_store(config: ConfigFile) -> Iterator[EventStore]:
    """Opens the configured event store, and nothing else."""
    settings = configuration.read(config)
    with closing(build("store", settings.store, settings.folder)) as store:
        yield store


@contextmanager
def _open_keys(config: ConfigFile) -> Iterator[ApiKeyStore]:
    with open_event_store(config) as store:
        yield ApiKeyStore(store)


def _as_json(one: ApiKey) -> dict[str, Any]:
    grant = {name: getattr(one.grant, name) for name in Grant.__slots__}
    return {"id": one.id, **grant, "created": one.created, "revoked": one.revoked}
