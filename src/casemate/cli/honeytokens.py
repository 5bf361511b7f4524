"""``canary plant|rotate|clean|scan|strings``: honeytoken records, unique strings, and the search for both."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from casemate.app import open_app
from casemate.cli.canary import canary
from casemate.cli.console import Code, ConfigFile, Json, Tenant, note, out, print_json, say, show_progress, shown
from casemate.config import PluginSpec
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKeyFile
from casemate.monitor.honeytokens.ownership import LEVEL, records_needed
from casemate.monitor.honeytokens.planting import (
    MAX_BENIGN_SHARE,
    PlantingResult,
    PlantingSettings,
    RemovalResult,
    find_records,
    plant_records,
    remove_records,
    rotate_records,
)
from casemate.monitor.honeytokens.records import Style
from casemate.monitor.honeytokens.search import search_files, training_strings
from casemate.monitor.service import watched_questions
from casemate.plugins import build
from casemate.reports.format import measured, percent, plural
from casemate.system import App
from casemate.types import DEFAULT_TENANT

StyleOption = Annotated[Style, typer.Option(help="Style of the corpus.")]
Folder = Annotated[str, typer.Option(help="Prefix of the records' source names; answers may show it.")]


@canary.command("plant")
def plant_command(
    count: Annotated[int | None, typer.Option(min=1, help="Number of records. Default: by corpus size.")] = None,
    style: StyleOption = "article",
    folder: Folder = "archive",
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Plant made-up records that crawlers retrieve and ordinary questions rarely do.

    Exit code 3 if none fits, or fewer than --count.
    """
    with open_app(config) as app:
        settings = _settings(app, tenant, style, folder)
        result = asyncio.run(plant_records(app.guard, key_file(app), settings, count, show_progress))
        _warn_without_defense(app)
    print_json(asdict(result)) if as_json else _show_planted(result)
    complete = bool(result.held) if count is None else result.held >= count
    raise typer.Exit(Code.OK if complete else Code.INCOMPLETE)


@canary.command("rotate")
def rotate_command(
    style: StyleOption = "article",
    folder: Folder = "archive",
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Replace tokens and records by a new generation. Old ones are still recognized.

    Exit code 3 if no new record fits: the old records then stay.
    """
    with open_app(config) as app:
        settings = _settings(app, tenant, style, folder)
        planted, removed = asyncio.run(rotate_records(app.guard, key_file(app), settings, show_progress))
    if as_json:
        print_json({"planted": asdict(planted), "removed": asdict(removed)})
    else:
        _show_planted(planted)
        _show_removed(removed)
    if planted.wanted and not planted.held:
        say.print("no new record fits, so the old records stay; index more documents, or try another --style")
    complete = planted.held or not planted.wanted
    raise typer.Exit(Code.FAILED if removed.left else Code.OK if complete else Code.INCOMPLETE)


@canary.command("clean")
def clean_command(
    config: ConfigFile = None,
    everywhere: Annotated[bool, typer.Option("--all", help="Of all tenants.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also documents that merely resemble a record.")] = False,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Remove all records. Exit code 1 if some were left."""
    with open_app(config) as app:
        which = None if everywhere else tenant
        result = asyncio.run(remove_records(app.guard, key_file(app), tenant=which, force=force))
    print_json(asdict(result)) if as_json else _show_removed(result)
    raise typer.Exit(Code.FAILED if result.left else Code.OK)


@canary.command("scan")
def scan_command(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders: answers, dumps, model outputs.")],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Search files for planted strings, also disguised ones, and show their origin. Exit code 1 if one is found."""
    with open_app(config) as app, say.status("searching"):
        found = search_files(paths, key_file(app), app.store, app.index)
    if as_json:
        print_json([asdict(sighting) for sighting in found])
    elif not found:
        out.print("no planted strings found")
    for sighting in () if as_json else found:
        details = ", ".join(f"{name} {value}" for name, value in sighting.string.details.items())
        line = f"{sighting.where}: {sighting.string.kind} string, encoding {sighting.form} ({details})"
        out.print(shown(line))
    raise typer.Exit(Code.FAILED if found else Code.OK)


@canary.command("strings")
def strings_command(
    count: Annotated[int, typer.Argument(min=1, max=10_000, help="Number of strings.")],
    purpose: Annotated[str, typer.Option(help="Data set and purpose.")],
    who: Annotated[str, typer.Option(help="Recipient.")],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Print unique sentences for a data set: a model that outputs one was trained on it (see 'canary scan')."""
    with open_app(config) as app:
        strings = training_strings(key_file(app), app.store, count, purpose=purpose, who=who)
    if as_json:
        print_json(strings)
    else:
        for text in strings:
            out.print(shown(text))


def key_file(app: App) -> HoneytokenKeyFile:
    """Key file of the configured honeytoken defense, or of its defaults."""
    configured = (spec for spec in app.config.guard.defenses if spec.use == "honeytoken")
    spec = next(configured, PluginSpec(use="honeytoken"))
    return HoneytokenKeyFile(build("defense", spec, app.config.folder).keys)


def _settings(app: App, tenant: str, style: Style, folder: str) -> PlantingSettings:
    """Settings; questions about records that are planted already are not benign ones. Writes no key file."""
    app.require_documents(tenant)
    planted = {r.source for r in find_records(app.index, key_file(app).load(), tenant).records}
    questions = watched_questions(app, tenant, 500, planted)
    return PlantingSettings(tenant, style, questions, app.config.rag.k, folder)


def _warn_without_defense(app: App) -> None:
    if not any(spec.use == "honeytoken" for spec in app.config.guard.defenses):
        note("guard.defenses lacks 'honeytoken', so records in answers are not detected; add it")


def _show_planted(result: PlantingResult) -> None:
    asked = f"{plural(result.wanted, 'record')} asked for, {len(result.added)} planted"
    out.print(f"{asked}; generation {result.generation} has {result.held}")
    if result.benign is not None:
        rate = result.benign
        out.print(f"{measured(rate, share=True)} of the benign questions retrieve a new record", markup=False)
    if result.skipped:
        out.print(_why_skipped(result), markup=False)
    if result.added and not result.english:
        out.print(
            "the records are English prose and most documents are not: readers of a copy can find and remove them. "
            "Search and 'casemate canary prove' work as usual"
        )
    if result.held < (needed := records_needed(LEVEL)):
        out.print(f"'casemate canary prove' needs at least {needed} records for its level of {LEVEL:g}")


def _why_skipped(result: PlantingResult) -> str:
    """Why records were not planted, and how many documents are needed."""
    most, what = percent(MAX_BENIGN_SHARE), plural(result.skipped, "record")
    if result.rejected is None or result.needed is None:
        return (
            f"{what} not planted: more than {most} of the benign questions would retrieve each draft. Index more "
            "documents, or try another --style"
        )
    about = round(result.needed, 2 - len(str(result.needed)))  # two digits
    return (
        f"{what} not planted: at least {percent(result.rejected)} of the benign questions would retrieve any draft; "
        f"allowed is {most}. Index more documents: about {about:,} are needed"
    )


def _show_removed(result: RemovalResult) -> None:
    out.print(f"removed {sum(map(len, result.removed.values()))} records")
    for line in result.left:
        out.print(f"[yellow]left:[/yellow] {shown(line)}")
