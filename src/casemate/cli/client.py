"""``client``: list flagged and limited clients, and reset a client's state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from casemate import config as configuration
from casemate.cli.console import ConfigFile, Json, out, print_json, shown
from casemate.cli.serve import open_event_store
from casemate.errors import ConfigError
from casemate.gateway.auth.keys import ApiKeyStore
from casemate.guard.client_state import withheld_documents
from casemate.guard.client_state.crawl_evidence import is_limited
from casemate.guard.client_state.reset import KINDS as STATE_KINDS
from casemate.guard.client_state.reset import reset_client, reset_of
from casemate.protocols import EventStore

CLIENT_WIDTH = 16
"""Characters of a key's id."""
client = typer.Typer(help="Clients: list flagged and limited ones, reset a client's state.", no_args_is_help=True)


@dataclass
class _FlaggedClient:
    """What a client was flagged for since its last reset, and its requests that ``crawl_limit`` limited."""

    tenant: str
    client: str
    last: datetime
    verdicts: Counter[str] = field(default_factory=Counter)  # by defense
    withheld: set[str] = field(default_factory=set)
    limited: set[str] = field(default_factory=set)  # requests


@client.command("list")
def list_(
    hours: Annotated[float, typer.Option(min=0.0, help="Period to look back.")] = 24.0,
    canaries: Annotated[bool, typer.Option("--canaries", help="List the clients of canaries, too.")] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """List clients that were flagged, by which defense, or whose context crawl_limit limited in some requests."""
    is_canary = configuration.read(config).monitor.is_canary
    with open_event_store(config) as store:
        found = _flagged_clients(store, datetime.now(UTC) - timedelta(hours=hours))
        found = [one for one in found if canaries or not is_canary(one.client)]
        keys = ApiKeyStore(store)
        keys.sync()
        names = {key.id: key.grant.name for key in keys.all()}
    if as_json:
        print_json({"clients": [_as_json(one, names) for one in found]})
        return
    if not found:
        out.print(f"no client was flagged or limited in the last {hours:g} hours")
        return
    whole = Column("client", overflow="fold", min_width=CLIENT_WIDTH)  # 'client reset' needs all of it
    table = Table(whole, "key", "tenant", "flagged by", "sources withheld", "limited", "last")
    for one in found:
        by = ", ".join(f"{defense} {count}" for defense, count in one.verdicts.most_common())
        name = names.get(one.client.partition("/")[0], "")
        counts = str(len(one.withheld)), str(len(one.limited))
        row = (one.client, name, one.tenant, by, *counts, f"{one.last:%Y-%m-%d %H:%M} UTC")
        table.add_row(*map(shown, row))
    out.print(table)


@client.command()
def reset(
    name: Annotated[str, typer.Argument(metavar="CLIENT", help="Client from 'casemate client list'.")],
    config: ConfigFile = None,
) -> None:
    """Reset a client: make withheld documents available again, and delete the evidence against it.

    New questions are judged as before. To let a client read a document in any case, name it under 'readers' in the
    document's metadata. All gateways apply the reset with the client's next question.
    """
    with open_event_store(config) as store:
        tenants = sorted(
            {str(e.body["tenant"]) for kind in STATE_KINDS for e in store.scan(kind) if e.body.get("client") == name}
        )
        if not tenants:
            raise ConfigError(f"there is no state of client {name[:120]!r}; 'casemate client list' shows the clients")
        for tenant in tenants:
            reset_client(store, tenant, name)
    out.print(f"reset {shown(name)}")


def _flagged_clients(store: EventStore, since: datetime) -> list[_FlaggedClient]:
    """The flagged and the limited clients, the most recent first."""
    resets = dict(filter(None, map(reset_of, store.scan(withheld_documents.KIND, since))))
    found: dict[tuple[str, str], _FlaggedClient] = {}
    for event in store.scan("verdict", since):
        body, limited = event.body, is_limited(event.body)
        id_ = str(body.get("tenant")), str(body.get("client"))
        if not (body.get("flagged") or limited) or event.at <= resets.get(id_, since):
            continue
        one = found.setdefault(id_, _FlaggedClient(*id_, event.at))
        one.last = max(one.last, event.at)
        if limited:
            one.limited.add(str(body.get("request") or event.id))
        if body.get("flagged"):
            one.verdicts[str(body.get("defense"))] += 1
            one.withheld.update(map(str, body.get("evidence", {}).get("withheld", ())))
    return sorted(found.values(), key=lambda one: one.last, reverse=True)


def _as_json(one: _FlaggedClient, names: dict[str, str]) -> dict[str, Any]:
    return {
        "client": one.client,
        "key": names.get(one.client.partition("/")[0]),
        "tenant": one.tenant,
        "verdicts": dict(one.verdicts),
        "withheld": sorted(one.withheld),
        "limited": len(one.limited),
        "last": one.last,
    }
