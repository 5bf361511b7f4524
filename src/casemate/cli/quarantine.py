"""``quarantine``: new documents that were held back, and what becomes of them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from casemate import config as configuration
from casemate.app import open_app
from casemate.cli.console import FAILED, OK, ConfigFile, Json, out, print_json, shown
from casemate.monitor.poison.quarantine import Held, Quarantine

quarantine = typer.Typer(help="Documents that were held back because they look like poison.", no_args_is_help=True)
Key = Annotated[str, typer.Argument(help="Its key, or the beginning of it.")]


@quarantine.command("list")
def list_held(config: ConfigFile = None, as_json: Json = False) -> None:
    """What nobody has decided about. Exit code 1 if there is any."""
    with open_app(configuration.read(config)) as app:
        waiting = Quarantine(app.store).waiting()
    if as_json:
        print_json([asdict(held) for held in waiting])
    elif not waiting:
        out.print("nothing is held back")
    for held in () if as_json else waiting:
        when = f"{shown(held.tenant)}, {held.at:%Y-%m-%d %H:%M}"
        out.print(f"[bold]{held.key[:12]}[/bold] {shown(held.source)} [dim]({when})[/dim]", soft_wrap=True)
        for reason in held.reasons:
            out.print(f"  {shown(reason)}", soft_wrap=True)
    raise typer.Exit(FAILED if waiting else OK)


@quarantine.command("show")
def show_held(key: Key, config: ConfigFile = None) -> None:
    """Print the text of what was held back."""
    with open_app(configuration.read(config)) as app:
        held = Quarantine(app.store).get(key)
    for document in held.documents:
        out.print(shown(document.content), soft_wrap=True)


@quarantine.command("release")
def release_held(key: Key, config: ConfigFile = None) -> None:
    """Let it into the index; the same content is not judged again."""
    with open_app(configuration.read(config)) as app:
        _say(asyncio.run(Quarantine(app.store).release(key, app.guard)))


@quarantine.command("drop")
def drop_held(key: Key, config: ConfigFile = None) -> None:
    """Leave it out for good; the same content stays out."""
    with open_app(configuration.read(config)) as app:
        _say(asyncio.run(Quarantine(app.store).drop(key, app.guard)))


def _say(held: Held) -> None:
    out.print(f"{held.state}: {shown(held.source)}")
