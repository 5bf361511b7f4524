"""``client``: who was flagged lately, and letting one begin anew."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.table import Table

from casemate import sessions, traces
from casemate.cli.console import ConfigFile, Json, out, print_json, shown
from casemate.cli.serve import event_store
from casemate.errors import ConfigError
from casemate.events import EventStore
from casemate.gateway.keys import Keys
from casemate.news import FORGIVEN

client = typer.Typer(help="Clients: who was flagged lately, and letting one begin anew.", no_args_is_help=True)


@dataclass
class _Flagged:
    """What a client was flagged for since he was last forgiven."""

    tenant: str
    client: str
    last: datetime
    verdicts: Counter[str] = field(default_factory=Counter)  # by defense
    withheld: set[str] = field(default_factory=set)


@client.command("list")
def list_(
    hours: Annotated[float, typer.Option(min=0.0, help="How far to look back.")] = 24.0,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show whom the guard flagged, by which defense, and how many sources were withheld from him."""
    with event_store(config) as store:
        found = _flagged(store, datetime.now(UTC) - timedelta(hours=hours))
        keys = Keys(store)
        keys.follow()
        names = {key.id: key.grant.name for key in keys.all()}
    if as_json:
        print_json({"clients": [_as_json(one, names) for one in found]})
        return
    if not found:
        out.print(f"nobody was flagged in the last {hours:g} hours")
        return
    table = Table("client", "key", "tenant", "flagged by", "sources withheld", "last")
    for one in found:
        by = ", ".join(f"{defense} {count}" for defense, count in one.verdicts.most_common())
        name = names.get(one.client.partition("/")[0], "")
        row = (one.client, name, one.tenant, by, str(len(one.withheld)), f"{one.last:%Y-%m-%d %H:%M} UTC")
        table.add_row(*map(shown, row))
    out.print(table)


@client.command()
def forgive(
    name: Annotated[str, typer.Argument(metavar="CLIENT", help="As 'casemate client list' shows it.")],
    config: ConfigFile = None,
) -> None:
    """Let a client begin anew: what was withheld from him for earlier questions is his to ask for again.

    A question that is too close to a document is still answered without it. To let him read a document whatever he
    asks, name him under 'readers' in its metadata. All gateways know with the next question.
    """
    with event_store(config) as store:
        kinds = (sessions.KIND, traces.KIND)
        tenants = sorted(
            {str(e.body["tenant"]) for kind in kinds for e in store.scan(kind) if e.body.get("client") == name}
        )
        if not tenants:
            raise ConfigError(f"nothing is held against a client {name[:120]!r}; 'casemate client list' shows whom")
        for tenant in tenants:
            traces.forgive(store, tenant, name)
    out.print(f"forgiven: {shown(name)}")


def _flagged(store: EventStore, since: datetime) -> list[_Flagged]:
    """Whoever was flagged, the last one first."""
    forgiven = {
        (e.body.get("tenant"), e.body.get("client")): e.at
        for e in store.scan(sessions.KIND, since)
        if e.body.get(FORGIVEN)
    }
    found: dict[tuple[str, str], _Flagged] = {}
    for event in store.scan("verdict", since):
        who = str(event.body.get("tenant")), str(event.body.get("client"))
        if not event.body.get("flagged") or event.at <= forgiven.get(who, since):
            continue
        one = found.setdefault(who, _Flagged(*who, event.at))
        one.last = max(one.last, event.at)
        one.verdicts[str(event.body.get("defense"))] += 1
        withheld = event.body.get("evidence", {}).get("withheld", ())
        one.withheld.update(map(str, withheld))
    return sorted(found.values(), key=lambda one: one.last, reverse=True)


def _as_json(one: _Flagged, names: dict[str, str]) -> dict[str, Any]:
    return {
        "client": one.client,
        "key": names.get(one.client.partition("/")[0]),
        "tenant": one.tenant,
        "verdicts": dict(one.verdicts),
        "withheld": sorted(one.withheld),
        "last": one.last,
    }
