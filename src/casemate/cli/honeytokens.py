"""``canary plant|rotate|clean|scan|strings|prove``: planted records and strings, and the search for copies of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from casemate import config as configuration
from casemate.app import open_app
from casemate.cli.canary import canary
from casemate.cli.console import FAILED, INCOMPLETE, OK, ConfigFile, Json, Tenant, bar, out, print_json, say, shown
from casemate.cli.endpoints import (
    ANSWER,
    BODY,
    KEY_VARIABLE,
    AnswerPath,
    Body,
    EndpointOptions,
    KeyVariable,
    Model,
    Own,
    confirm_ownership,
    key_explained,
    parse_endpoint,
    with_model,
)
from casemate.config import PluginSpec
from casemate.errors import ConfigError, DataError, QueryError
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKeyFile
from casemate.monitor.honeytokens.ownership import (
    LEVEL,
    OwnershipQuestion,
    OwnershipResult,
    ownership_questions,
    ownership_test,
)
from casemate.monitor.honeytokens.planting import (
    PlantingResult,
    PlantingSettings,
    RemovalResult,
    plant_records,
    remove_records,
    rotate_records,
)
from casemate.monitor.honeytokens.records import Style
from casemate.monitor.honeytokens.search import planted_records, search_files, training_strings
from casemate.monitor.service import watched_questions
from casemate.plugins import build
from casemate.redteam.campaigns.external_targets import MeteredTarget
from casemate.runtime.concurrency import map_concurrently
from casemate.system import App
from casemate.types import DEFAULT_TENANT, Query

CONCURRENCY = 4
"""Questions to a suspect at the same time."""
StyleOption = Annotated[Style, typer.Option(help="Style of the corpus.")]
Folder = Annotated[str, typer.Option(help="Prefix of the records' source names; answers may show it.")]


@canary.command("plant")
def plant_command(
    count: Annotated[int | None, typer.Option(min=1, help="Number of records. Default: by corpus size.")] = None,
    style: StyleOption = "article",
    folder: Folder = "honey",
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Plant made-up records that crawlers retrieve and ordinary questions rarely do. Exit code 3 if none fits."""
    with open_app(configuration.read(config)) as app:
        with say.status("choosing locations"):
            result = asyncio.run(plant_records(app.guard, _keys(app), _settings(app, tenant, style, folder), count))
        _warn_without_defense(app)
    print_json(asdict(result)) if as_json else _show_planted(result)
    raise typer.Exit(OK if result.held else INCOMPLETE)


@canary.command("rotate")
def rotate_command(
    style: StyleOption = "article",
    folder: Folder = "honey",
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Replace tokens and records by a new generation. Old ones are still recognized."""
    with open_app(configuration.read(config)) as app, say.status("rotating"):
        planted, removed = asyncio.run(rotate_records(app.guard, _keys(app), _settings(app, tenant, style, folder)))
    if as_json:
        print_json({"planted": asdict(planted), "removed": asdict(removed)})
    else:
        _show_planted(planted)
        _show_removed(removed)
    raise typer.Exit(FAILED if removed.left else OK)


@canary.command("clean")
def clean_command(
    config: ConfigFile = None,
    everywhere: Annotated[bool, typer.Option("--all", help="Of all tenants.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also documents that merely resemble a record.")] = False,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Remove all records. Exit code 1 if some were left."""
    with open_app(configuration.read(config)) as app:
        which = None if everywhere else tenant
        result = asyncio.run(remove_records(app.guard, _keys(app), tenant=which, force=force))
    print_json(asdict(result)) if as_json else _show_removed(result)
    raise typer.Exit(FAILED if result.left else OK)


@canary.command("scan")
def scan_command(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders: answers, dumps, model outputs.")],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Search files for planted strings, also disguised ones, and show their origin. Exit code 1 if one is found."""
    with open_app(configuration.read(config)) as app, say.status("searching"):
        found = search_files(paths, _keys(app), app.store, app.index)
    if as_json:
        print_json([asdict(sighting) for sighting in found])
    elif not found:
        out.print("no planted strings found")
    for sighting in () if as_json else found:
        details = ", ".join(f"{name} {value}" for name, value in sighting.string.details.items())
        line = f"{sighting.where}: {sighting.string.kind} string, encoding {sighting.form} ({details})"
        out.print(shown(line), soft_wrap=True)
    raise typer.Exit(FAILED if found else OK)


@canary.command("strings")
def strings_command(
    count: Annotated[int, typer.Argument(min=1, max=10_000, help="Number of strings.")],
    purpose: Annotated[str, typer.Option(help="Data set and purpose.")],
    who: Annotated[str, typer.Option(help="Recipient.")],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Print unique sentences for a data set: a model that outputs one was trained on it (see 'canary scan')."""
    with open_app(configuration.read(config)) as app:
        strings = training_strings(_keys(app), app.store, count, purpose=purpose, who=who)
    if as_json:
        print_json(strings)
    else:
        for text in strings:
            out.print(shown(text), soft_wrap=True)


@canary.command("prove")
def prove_command(
    target: Annotated[
        str | None, typer.Option("--target", help="The suspect: an address, or a name in redteam.targets.")
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Instead: answers that you collected, JSON lines with question and answer.")
    ] = None,
    questions: Annotated[bool, typer.Option("--questions", help="Only print the questions, as JSON lines.")] = False,
    most: Annotated[int, typer.Option("--most", min=1, help="Largest number of questions.")] = 80,
    level: Annotated[float, typer.Option(min=0.0, max=1.0, help="Largest p-value that counts as proof.")] = LEVEL,
    model: Model = "",
    body: Body = BODY,
    answer: AnswerPath = ANSWER,
    key_env: KeyVariable = KEY_VARIABLE,
    own: Own = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Test whether a system answers from a copy of the collection, by the facts in planted records.

    Prints the probability that a system without the collection gives as many correct answers.

    Exit codes: 1 a copy, 0 no proof of a copy, 2 error, 3 fewer than half of the questions were answered.
    """
    with open_app(configuration.read(config)) as app:
        asked = _ownership_questions(app)[:most]
    if questions:
        for question in asked:
            print(json.dumps({"question": question.text}, ensure_ascii=False))
        return
    if (target is None) == (answers is None):
        raise ConfigError("give the suspect with --target, or collected answers with --answers")
    if answers is not None:
        replies = _collected_answers(answers, asked)
    else:
        spec = parse_endpoint(target or "", EndpointOptions(model, body, answer, key_env), config)
        confirm_ownership(spec, own)
        with key_explained(key_env):
            replies = asyncio.run(_ask_suspect(with_model(spec, key_env), asked))
    result = ownership_test(list(zip(asked, replies, strict=True)))
    if as_json:
        print_json(result._asdict())
    else:
        _show_ownership(result, len(asked), level)
    if result.p_value <= level:
        raise typer.Exit(FAILED)
    raise typer.Exit(OK if 2 * result.answered >= len(asked) else INCOMPLETE)


def _ownership_questions(app: App) -> list[OwnershipQuestion]:
    """The questions about all records that were ever planted.

    Raises:
        DataError: If none was planted.
    """
    keys = _keys(app)
    key = keys.load()
    records = planted_records(key, app.store, app.index) if key is not None else []
    if key is None or not records:
        raise DataError(f"no planted records ({keys.path}); plant some first with 'casemate canary plant'")
    return ownership_questions(key, records)


async def _ask_suspect(spec: PluginSpec, asked: Sequence[OwnershipQuestion]) -> list[str]:
    """The answers of the suspect; empty for a refused question."""
    target = MeteredTarget(build("target", spec))
    with bar() as progress:
        task = progress.add_task("asking", total=len(asked))

        async def ask(question: OwnershipQuestion) -> str:
            try:
                return (await target.ask(Query(question.text, "ownership"))).text
            except QueryError:
                return ""
            finally:
                progress.advance(task)

        return await map_concurrently(ask, asked, CONCURRENCY)


def _collected_answers(file: Path, asked: Sequence[OwnershipQuestion]) -> list[str]:
    """Answers from a file, in the order of the questions; empty where there is none.

    Raises:
        DataError: If the file cannot be read.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise DataError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    found = dict[str, str]()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {"question": "", "answer": ""}
            found.setdefault(str(row["question"]).strip(), str(row["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            why = 'each line must be JSON such as {"question": "...", "answer": "..."}'
            raise DataError(f"{file}, line {number}: {why}") from error
    if not any(q.text in found for q in asked):
        raise DataError(f"{file} answers none of the questions; print them with 'casemate canary prove --questions'")
    return [found.get(q.text, "") for q in asked]


def _show_ownership(result: OwnershipResult, asked: int, level: float) -> None:
    out.print(f"{result.answered} of {asked} questions answered; {result.correct} answers name the planted value")
    out.print(f"a system without the collection would name {result.expected:.1f} by chance")
    verdict = "[red]a copy of the collection[/red]" if result.p_value <= level else "no proof of a copy"
    out.print(f"p = {result.p_value:.2g}: {verdict} (level {level:g})")


def _keys(app: App) -> HoneytokenKeyFile:
    """Key file of the configured honeytoken defense, or of its defaults."""
    configured = (spec for spec in app.config.guard.defenses if spec.use == "honeytoken")
    spec = next(configured, PluginSpec(use="honeytoken"))
    return HoneytokenKeyFile(build("defense", spec, app.config.folder).keys)


def _settings(app: App, tenant: str, style: Style, folder: str) -> PlantingSettings:
    return PlantingSettings(tenant, style, watched_questions(app, tenant, count=500), app.config.rag.k, folder)


def _warn_without_defense(app: App) -> None:
    if not any(spec.use == "honeytoken" for spec in app.config.guard.defenses):
        say.print(
            "[yellow]note:[/yellow] guard.defenses lacks 'honeytoken', so records in answers are not detected; add it"
        )


def _show_planted(result: PlantingResult) -> None:
    out.print(f"planted {len(result.added)} records; generation {result.generation} has {result.held}")
    if result.benign is not None:
        rate = result.benign
        share = f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]"
        out.print(f"{share} of the benign questions retrieve a new record", markup=False)
    if result.skipped:
        out.print(f"skipped {result.skipped} records: too many benign questions would retrieve them")
    if not result.held:
        out.print("no record fits: the corpus is too small, or too similar to the records; try another --style")


def _show_removed(result: RemovalResult) -> None:
    out.print(f"removed {sum(map(len, result.removed.values()))} records")
    for line in result.left:
        out.print(f"[yellow]left:[/yellow] {shown(line)}", soft_wrap=True)
