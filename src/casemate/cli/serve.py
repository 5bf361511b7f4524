"""``serve`` and ``key``: the gateway, and who may use it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from casemate import config as configuration
from casemate.app import build, open_app
from casemate.cli.console import ConfigFile, Json, Tenant, out, print_json, say, shown
from casemate.errors import needs
from casemate.events import EventStore
from casemate.gateway.keys import Grant, Key, Keys
from casemate.types import DEFAULT_TENANT

key = typer.Typer(help="API keys of the gateway: create, list, revoke.", no_args_is_help=True)


def serve(
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Instead of gateway.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Instead of gateway.port; 0: any that is free.")] = None,
) -> None:
    """Answer over HTTP as OpenAI does, guarded. Ends on SIGTERM or Ctrl-C, when running answers are finished."""
    with needs("casemate[serve]"):
        server = importlib.import_module("casemate.gateway.server")
    settings = configuration.read(config)
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = configuration.changed(settings, gateway=given) if given else settings
    with open_app(settings) as app:
        server.serve(app, _tell)
    say.print("ended; everything is written")


def _tell(address: str) -> None:
    say.print(
        f"serving at {shown(address)}/v1, dashboard at {shown(address)}/dashboard; a key: casemate key create NAME",
        soft_wrap=True,
    )


@key.command()
def create(
    name: Annotated[str, typer.Argument(help="Who or what will use it.")],
    role: Annotated[
        Literal["client", "admin", "metrics"],
        typer.Option(help="client: ask; admin: also add and remove documents; metrics: read /metrics only."),
    ] = "client",
    tenant: Tenant = DEFAULT_TENANT,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Lets it read documents of this label (metadata: acl); may be given several times."),
    ] = None,
    rate: Annotated[int | None, typer.Option(min=1, help="Requests a minute. Default: the gateway's.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Tokens a day. Default: the gateway's.")] = None,
    trust_user: Annotated[
        bool, typer.Option("--trust-user", help="Believe the field 'user': the guard remembers each end user.")
    ] = False,
    retrieve: Annotated[
        bool, typer.Option("--retrieve", help="Allow /v1/retrieve, which hands documents out as they are.")
    ] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    grant = Grant(name, role, tenant, tuple(label or ()), rate, budget, trust_user, retrieve)
    with _keys(config) as keys:
        made, text = keys.create(grant)
    if as_json:
        print_json({**_as_json(made), "secret": str(text)})
        return
    print(str(text))
    say.print(f"key {made.id} for {shown(name)}; keep it now, it is not shown again", soft_wrap=True)


@key.command("list")
def list_(config: ConfigFile = None, as_json: Json = False) -> None:
    """Show all keys, without their secrets."""
    with _keys(config) as keys:
        keys.follow()
        found = keys.all()
    if as_json:
        print_json({"keys": [_as_json(one) for one in found]})
        return
    table = Table("id", "name", "role", "tenant", "created", "state")
    for one in found:
        state = f"revoked {one.revoked:%Y-%m-%d %H:%M}" if one.revoked else "valid"
        grant = one.grant
        row = (one.id, grant.name, grant.role, grant.tenant, f"{one.created:%Y-%m-%d %H:%M}", state)
        table.add_row(*map(shown, row))
    out.print(table)


@key.command()
def revoke(
    id_: Annotated[str, typer.Argument(metavar="ID", help="As 'casemate key list' shows it.")],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Take a key back, for good. Gateways refuse it within seconds."""
    with _keys(config) as keys:
        gone = keys.revoke(id_)
    if as_json:
        print_json(_as_json(gone))
    else:
        out.print(f"revoked {gone.id} ({shown(gone.grant.name)})")


@contextmanager
def event_store(config: ConfigFile) -> Iterator[EventStore]:
    """The configured event store; nothing else is opened."""
    settings = configuration.read(config)
    with closing(build("store", settings.store, settings.folder)) as store:
        yield store


@contextmanager
def _keys(config: ConfigFile) -> Iterator[Keys]:
    with event_store(config) as store:
        yield Keys(store)


def _as_json(one: Key) -> dict[str, Any]:
    grant = {name: getattr(one.grant, name) for name in Grant.__slots__}
    return {"id": one.id, **grant, "created": one.created, "revoked": one.revoked}
