"""``canary plant|rotate|clean|scan|strings``: what is planted, so that it can be found where it should not be."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from casemate import config as configuration
from casemate.app import App, build, open_app
from casemate.canaries import watched_questions
from casemate.cli.canary import canary
from casemate.cli.console import FAILED, INCOMPLETE, OK, ConfigFile, Json, Tenant, out, print_json, say, shown
from casemate.config import Part
from casemate.marks.honey import HoneyKeys
from casemate.monitor.honey.planting import Bed, Cleaned, Planted, clean, plant, rotate
from casemate.monitor.honey.records import Style
from casemate.monitor.honey.search import search_files, training_strings
from casemate.types import DEFAULT_TENANT

StyleOption = Annotated[Style, typer.Option(help="What the corpus's texts are like.")]
Folder = Annotated[str, typer.Option(help="The records' sources begin with this; answers may show it.")]


@canary.command("plant")
def plant_records(
    count: Annotated[int | None, typer.Option(min=1, help="How many. Default: by the size of the corpus.")] = None,
    style: StyleOption = "article",
    folder: Folder = "honey",
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Put fictitious records where crawlers meet them and askers seldom do. Exit code 3 if there is room for none."""
    with open_app(configuration.read(config)) as app:
        with say.status("looking for places"):
            done = asyncio.run(plant(app.guard, _keys(app), _bed(app, tenant, style, folder), count))
        _note_defense(app)
    print_json(asdict(done)) if as_json else _say_planted(done)
    raise typer.Exit(OK if done.held else INCOMPLETE)


@canary.command("rotate")
def rotate_records(
    style: StyleOption = "article",
    folder: Folder = "honey",
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Begin a new generation of tokens and records, and take the old records out. Old ones are still recognised."""
    with open_app(configuration.read(config)) as app, say.status("rotating"):
        planted, cleaned = asyncio.run(rotate(app.guard, _keys(app), _bed(app, tenant, style, folder)))
    if as_json:
        print_json({"planted": asdict(planted), "cleaned": asdict(cleaned)})
    else:
        _say_planted(planted)
        _say_cleaned(cleaned)
    raise typer.Exit(FAILED if cleaned.left else OK)


@canary.command("clean")
def clean_records(
    config: ConfigFile = None,
    everywhere: Annotated[bool, typer.Option("--all", help="Of all tenants.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what only looks like a record.")] = False,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Take every record out again. Exit code 1 if something was left."""
    with open_app(configuration.read(config)) as app:
        done = asyncio.run(clean(app.guard, _keys(app), tenant=None if everywhere else tenant, force=force))
    print_json(asdict(done)) if as_json else _say_cleaned(done)
    raise typer.Exit(FAILED if done.left else OK)


@canary.command("scan")
def scan_files(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders: answers, dumps, outputs of a model.")],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Look for anything planted, disguised or not, and say where it was planted. Exit code 1 if something is found."""
    with open_app(configuration.read(config)) as app, say.status("reading"):
        found = search_files(paths, _keys(app), app.store, app.index)
    if as_json:
        print_json([asdict(sighting) for sighting in found])
    elif not found:
        out.print("nothing that was planted")
    for sighting in () if as_json else found:
        about = ", ".join(f"{name} {value}" for name, value in sighting.planting.about.items())
        out.print(shown(f"{sighting.where}: {sighting.planting.what}, as {sighting.form} ({about})"), soft_wrap=True)
    raise typer.Exit(FAILED if found else OK)


@canary.command("strings")
def print_strings(
    count: Annotated[int, typer.Argument(min=1, max=10_000, help="How many.")],
    purpose: Annotated[str, typer.Option(help="Which data set, and for what.")],
    who: Annotated[str, typer.Option(help="Who has it.")],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Print unique sentences to put into a data set; a model that says one was trained on it ('canary scan' tells)."""
    with open_app(configuration.read(config)) as app:
        made = training_strings(_keys(app), app.store, count, purpose=purpose, who=who)
    if as_json:
        print_json(made)
    else:
        for text in made:
            out.print(shown(text), soft_wrap=True)


def _keys(app: App) -> HoneyKeys:
    """The key that the defense has, or would have."""
    part = next((p for p in app.config.guard.defenses if p.use == "honeytoken"), Part(use="honeytoken"))
    return HoneyKeys(build("defense", part, app.config.folder).keys)


def _bed(app: App, tenant: str, style: Style, folder: str) -> Bed:
    return Bed(tenant, style, watched_questions(app, tenant, count=500), app.config.rag.k, folder)


def _note_defense(app: App) -> None:
    if not any(part.use == "honeytoken" for part in app.config.guard.defenses):
        say.print("[yellow]note:[/yellow] guard.defenses has no honeytoken: nobody looks for the records in answers")


def _say_planted(done: Planted) -> None:
    out.print(f"{len(done.added)} records planted, {done.held} of generation {done.generation} are there")
    if done.benign is not None:
        rate = done.benign
        out.print(
            f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}] of the harmless questions find a new one", markup=False
        )
    if done.given_up:
        out.print(f"{done.given_up} places were given up: too many harmless questions would have found a record there")
    if not done.held:
        out.print("the corpus is too small to hide one, or too much like the records: see whether --style fits")


def _say_cleaned(done: Cleaned) -> None:
    out.print(f"{sum(map(len, done.removed.values()))} records taken out")
    for line in done.left:
        out.print(f"[yellow]left:[/yellow] {shown(line)}", soft_wrap=True)
