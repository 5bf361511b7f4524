"""``client``: list flagged and limited clients, and reset a client or a tenant."""

from __future__ import annotations

from collections import Counter, defaultdict
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
from casemate.guard.client_state.crawl_evidence import KIND as CRAWL
from casemate.guard.client_state.crawl_evidence import RecordedLimits
from casemate.guard.client_state.feed import MAX_HOURS
from casemate.guard.client_state.reset import KINDS as STATE_KINDS
from casemate.guard.client_state.reset import reset_client, reset_of, reset_tenant
from casemate.protocols import EventStore
from casemate.text.prefixes import SHORTEST, find_by_prefix, unique_prefixes

client = typer.Typer(help="Clients: list flagged and limited ones, reset a client or a tenant.", no_args_is_help=True)


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
    hours: Annotated[float, typer.Option(min=0.0, max=MAX_HOURS, help="Period to look back.")] = 24.0,
    canaries: Annotated[bool, typer.Option("--canaries", help="List the clients of canaries, too.")] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """List clients that were flagged, by which defense, or that crawl_limit limited: fewer documents or a cut answer.

    Says first if crawl_limit restricts all clients of a tenant.
    """
    is_canary = configuration.read(config).monitor.is_canary
    with open_event_store(config) as store:
        since = datetime.now(UTC) - timedelta(hours=hours)
        limits = RecordedLimits(store, since)
        found = _flagged_clients(store, since, limits)
        found = [one for one in found if canaries or not is_canary(one.client)]
        keys = ApiKeyStore(store)
        keys.sync()
        names = keys.names()
        short = unique_prefixes([*_clients_with_state(store), *(one.client for one in found)])
    if as_json:
        print_json({"clients": [_as_json(one, names) for one in found], "restricted_tenants": limits.restricted()})
        return
    for line in limits.describe():
        out.print(shown(line))
    if not found:
        out.print(f"no client was flagged or limited in the last {hours:g} hours")
        return
    first = Column("client", overflow="fold", no_wrap=max(len(short[one.client]) for one in found) == SHORTEST)
    others = ("key", "tenant", "flagged", "sources", "limited", "last")
    table = Table(first, *(Column(name, overflow="fold") for name in others))
    for one in found:
        by = ", ".join(f"{defense} {count}" for defense, count in one.verdicts.most_common())
        name = names.get(one.client.partition("/")[0], "")
        counts = str(len(one.withheld)), str(len(one.limited))
        row = (short[one.client], name, one.tenant, by, *counts, f"{one.last:%m-%d %H:%M}")
        table.add_row(*map(shown, row))
    out.print(table)
    out.print(
        "client: first characters of its name, which 'client reset' accepts; --json has whole names; flagged: verdicts "
        "by defense; sources: withheld; limited: requests with fewer documents or a cut answer; last: UTC"
    )


@client.command()
def reset(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLIENT]",
            help="Client from 'casemate client list', or the first characters of its name.",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant: end the restriction of all its clients.", show_default=False)
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Reset a client: make withheld documents available again, and delete the evidence against it.

    With --tenant: end the restriction of all clients of a tenant. Clients that are crawlers by themselves stay limited.
    What is deleted cannot be restored.

    New questions are judged as before. To let a client read a document in any case, name it under 'readers' in the
    document's metadata. All gateways apply the reset with the client's next question.
    """
    if (name is None) == (tenant is None):
        raise ConfigError("give either a client or --tenant; 'casemate client list' shows both")
    with open_event_store(config) as store:
        if tenant is not None:
            if not any(e.body.get("tenant") == tenant for kind in (CRAWL, "verdict") for e in store.scan(kind)):
                raise ConfigError(f"no client of tenant {tenant!r} has asked; 'casemate client list' shows the tenants")
            reset_tenant(store, tenant)
            out.print(f"reset tenant {shown(tenant)}: the evidence about its clients together is deleted")
            return
        assert name is not None
        tenants_of = _clients_with_state(store)
        whole = find_by_prefix(name, tenants_of, "clients")
        if whole is None:
            raise ConfigError(f"there is no state of client {name[:120]!r}; 'casemate client list' shows the clients")
        for one in sorted(tenants_of[whole]):
            reset_client(store, one, whole)
    done = "withheld documents are available again, and the evidence is deleted; this cannot be undone"
    out.print(f"reset {shown(whole)}: {done}")


def _clients_with_state(store: EventStore) -> dict[str, set[str]]:
    """The clients that a reset changes, each with its tenants."""
    found = defaultdict[str, set[str]](set)
    for event in (e for kind in STATE_KINDS for e in store.scan(kind) if e.body.get("client")):
        found[str(event.body["client"])].add(str(event.body["tenant"]))
    return found


def _flagged_clients(store: EventStore, since: datetime, limits: RecordedLimits) -> list[_FlaggedClient]:
    """The flagged and the limited clients, the most recent first. Adds the verdicts to ``limits``."""
    resets = dict(filter(None, map(reset_of, store.scan(withheld_documents.KIND, since))))
    found: dict[tuple[str, str], _FlaggedClient] = {}
    for event in store.scan("verdict", since):
        body, limited = event.body, limits.add(event)
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
