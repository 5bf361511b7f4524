"""``quarantine list|show|release|drop``: decisions about suspicious new documents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from casemate.app import open_app
from casemate.cli.console import Code, ConfigFile, Json, out, print_json, shown
from casemate.guard.guard import Guard
from casemate.monitor.poisoning.quarantine import Quarantine, QuarantinedSource

quarantine = typer.Typer(help="Review new documents that look poisoned.", no_args_is_help=True)
NAMING = "Key of the source, a unique prefix of it, or the name of the source"
Key = Annotated[str, typer.Argument(help=f"{NAMING}.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY", help=f"{NAMING}; several are possible.")]


@quarantine.command("list")
def list_command(config: ConfigFile = None, as_json: Json = False) -> None:
    """List sources without a decision. Exit code 1 if there are any."""
    with open_app(config) as app:
        pending = Quarantine(app.store).pending()
    if as_json:
        print_json([asdict(source) for source in pending])
    elif not pending:
        out.print("the quarantine is empty")
    for source in () if as_json else pending:
        when = f"{shown(source.tenant)}, {source.at:%Y-%m-%d %H:%M}"
        out.print(f"[bold]{source.key[:12]}[/bold] {shown(source.source)} [dim]({when})[/dim]")
        for reason in source.reasons:
            out.print(f"  {shown(reason)}")
    if pending and not as_json:
        out.print("next: casemate quarantine show|release|drop KEY")
    raise typer.Exit(Code.FAILED if pending else Code.OK)


@quarantine.command("show")
def show_command(key: Key, config: ConfigFile = None) -> None:
    """Print the text of a quarantined source."""
    with open_app(config) as app:
        source = Quarantine(app.store).get(key)
    for document in source.documents:
        out.print(shown(document.content))


@quarantine.command("release")
def release_command(keys: Keys, config: ConfigFile = None) -> None:
    """Index sources. The same content is not screened again."""
    _decide(config, keys, Quarantine.release)


@quarantine.command("drop")
def drop_command(keys: Keys, config: ConfigFile = None) -> None:
    """Reject sources. The same content stays out of the index."""
    _decide(config, keys, Quarantine.drop)


def _decide(
    config: Path | None,
    keys: Sequence[str],
    decide: Callable[[Quarantine, str, Guard], Coroutine[None, None, QuarantinedSource]],
) -> None:
    """Makes one decision about several sources: none if a key is wrong."""
    with open_app(config) as app:
        quarantined = Quarantine(app.store)
        found = list(dict.fromkeys(quarantined.get(key).key for key in keys))

        async def decide_all() -> None:
            for key in found:
                source = await decide(quarantined, key, app.guard)
                out.print(f"{source.state}: {shown(source.source)}")

        asyncio.run(decide_all())
