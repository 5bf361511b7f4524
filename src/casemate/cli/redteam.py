"""``redteam`` and ``report``: attacking one's own system, and reading what came out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from casemate import config as configuration
from casemate import registry
from casemate.app import open_app, spread_on
from casemate.capabilities import ATTACKS, CHECKS, WHY
from casemate.cli.console import (
    ERROR,
    FAILED,
    INCOMPLETE,
    INTERRUPTED,
    OK,
    ConfigFile,
    Json,
    On,
    Tenant,
    bar,
    out,
    print_json,
    questions_in,
    say,
    shown,
)
from casemate.config import Config, Part
from casemate.crawlers import as_report, run_crawls, without_texts
from casemate.crawlers import show as show_crawls
from casemate.errors import ConfigError
from casemate.foreign.aim import is_outside, pointed
from casemate.foreign.campaign import run_outside
from casemate.foreign.crawl import crawl_outside
from casemate.lab.compare import conclusion
from casemate.lab.report import CRAWL, Diff, diff, render_diff_text, write_report
from casemate.lab.results import Status, load
from casemate.redteam import run_campaign, show
from casemate.types import DEFAULT_TENANT

redteam = typer.Typer(help="Attack your own system, guard off and guard on.", no_args_is_help=True)
report = typer.Typer(help="Read and compare reports.", no_args_is_help=True)
TargetName = Annotated[
    str | None,
    typer.Option("--target", help="Who is attacked: a name of redteam.targets, an address, module:function, or own."),
]
TargetOff = Annotated[str | None, typer.Option("--target-off", help="The same target outside with its guard off.")]
Own = Annotated[bool, typer.Option("--own", help="The target is yours, or its owner has told you to attack it.")]
Anew = Annotated[bool, typer.Option("--anew", help="Give up an interrupted campaign on a target outside.")]
CODES = {Status.PASS: OK, Status.FAIL: FAILED, Status.INCONCLUSIVE: INCOMPLETE, Status.ERROR: ERROR}


@redteam.command("list")
def list_attacks(as_json: Json = False) -> None:
    """The attacks there are, what their figures need, and which checks need more of a target than answers."""
    found = {(role, name): registry.load(role, name) for role in ("attack", "crawler") for name in registry.names(role)}
    if as_json:
        told = {name: {"from": cls.paper, "needs": sorted(ATTACKS[role])} for (role, name), cls in found.items()}
        print_json({"attacks": told, "checks": {name: sorted(needed) for name, needed in CHECKS.items()}})
        return
    table = Table("attack", "command", "needs", "from", "what it does")
    for (role, name), cls in found.items():
        lines = (cls.__doc__ or "").strip().splitlines()
        command = "run" if role == "attack" else "crawl"
        table.add_row(name, command, ", ".join(sorted(ATTACKS[role])), cls.paper, lines[0] if lines else "")
    out.print(table)
    checks = Table("check", "needs", "where the target lacks that", title="Checks", title_justify="left")
    for name, needed in CHECKS.items():
        checks.add_row(name, ", ".join(sorted(needed)), f"INCONCLUSIVE: {WHY[name]}")
    out.print(checks)


@redteam.command()
def run(
    config: ConfigFile = None,
    attack: Annotated[list[str] | None, typer.Option(help="Only these. Default: redteam.attacks.")] = None,
    members: Annotated[int | None, typer.Option(help="Documents attacked that are in the index.")] = None,
    nonmembers: Annotated[int | None, typer.Option(help="Documents attacked that are held out.")] = None,
    budget: Annotated[int | None, typer.Option(help="Questions in all.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="An earlier report.json to compare with.")] = None,
    target: TargetName = None,
    target_off: TargetOff = None,
    own: Own = False,
    anew: Anew = False,
    tenant: Tenant = DEFAULT_TENANT,
    on: On = None,
    as_json: Json = False,
) -> None:
    """Run the attacks and write the report. Interrupt at will and run again.

    Exit codes: 0 PASS, 1 FAIL (or worse than the baseline), 3 INCONCLUSIVE, 2 ERROR.
    """
    settings = _with(configuration.read(config), attack, members, nonmembers, budget)
    settings = pointed(settings, target, target_off, own)
    before = load(baseline) if baseline else None
    section = settings.redteam
    files = (settings.calibrate.log, section.benign)
    log, benign = (questions_in(settings.folder / file) if file else [] for file in files)
    if on and is_outside(settings):
        raise ConfigError("--on is for a system of this configuration; one outside is asked from here, at its pace")
    with going_on():
        if is_outside(settings):
            campaign = asyncio.run(run_outside(settings, benign, step, anew))
        else:
            with spread_on(on) as spread, open_app(settings, spread=spread) as app:
                campaign = asyncio.run(run_campaign(app, log, benign, step, tenant))
    paths = write_report(campaign, settings.folder / section.folder, before)
    if as_json:
        print_json({"status": campaign.status, "files": {k: str(p) for k, p in paths.items()}})
    else:
        show(campaign, out)
        out.print(f"report: {shown(str(paths['html']))}", soft_wrap=True)
    change = diff(campaign, before) if before else None
    if change and not as_json:
        out.print(shown(render_diff_text(change)), soft_wrap=True)
    raise typer.Exit(_exit_code(campaign.status, change))


def _with(
    settings: Config, attack: list[str] | None, members: int | None, nonmembers: int | None, budget: int | None
) -> Config:
    """The configuration with what the command line says instead; an attack keeps its configured options."""
    known = {part.use: part for part in settings.redteam.attacks}
    attacks = tuple(known.get(name, Part(use=name)) for name in attack) if attack else None
    given = {"attacks": attacks, "members": members, "nonmembers": nonmembers, "budget": budget}
    return configuration.changed(settings, redteam={k: v for k, v in given.items() if v is not None})


def _exit_code(status: Status, change: Diff | None) -> int:
    """The gravest of what the campaign and the comparison with the baseline say."""
    codes = (CODES[status], change.exit_code if change else OK)
    return next(code for code in (ERROR, FAILED, INCOMPLETE, OK) if code in codes)


@redteam.command()
def crawl(
    config: ConfigFile = None,
    attack: Annotated[list[str] | None, typer.Option(help="Only these. Default: redteam.crawl.attacks.")] = None,
    questions: Annotated[int | None, typer.Option(help="Questions that each may ask.")] = None,
    clients: Annotated[int | None, typer.Option(help="Names that each goes by.")] = None,
    target: TargetName = None,
    target_off: TargetOff = None,
    own: Own = False,
    anew: Anew = False,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Let crawlers carry away what they can, guard off and guard on. Interrupt at will and run again.

    Exit codes: 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 2 ERROR.
    """
    settings = configuration.read(config)
    known = {part.use: part for part in settings.redteam.crawl.attacks}
    attacks = tuple(known.get(name, Part(use=name)) for name in attack) if attack else None
    given = {"attacks": attacks, "questions": questions, "clients": clients}
    section = dict(settings.redteam.crawl) | {k: v for k, v in given.items() if v is not None}
    settings = pointed(configuration.changed(settings, redteam={"crawl": section}), target, target_off, own)
    benign = questions_in(settings.folder / settings.redteam.benign) if settings.redteam.benign else []
    with going_on():
        if is_outside(settings):
            campaign = asyncio.run(crawl_outside(settings, step, anew))
        else:
            with open_app(settings) as app:
                campaign = asyncio.run(run_crawls(app, benign, step, tenant))
    paths = write_report(as_report(campaign), settings.folder / settings.redteam.folder, stem=CRAWL)
    if as_json:
        print_json(without_texts(campaign))
    else:
        show_crawls(campaign, out)
        out.print(f"report: {shown(str(paths['html']))}", soft_wrap=True)
    raise typer.Exit(CODES[campaign.status])


@contextmanager
def going_on() -> Iterator[None]:
    """Says what an interruption means, and ends with its code."""
    try:
        yield
    except KeyboardInterrupt:
        say.print("interrupted; what was finished is kept, run the same command again to go on")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def step(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows the progress of one step, as ``casemate.redteam.Steps`` wants it."""
    with bar() as progress:
        task = progress.add_task(title, total=total)
        yield lambda n: progress.advance(task, n)


@report.command("show")
def show_report(file: Annotated[Path, typer.Argument(help="A report.json.")], as_json: Json = False) -> None:
    """Print the verdict and the table of a report."""
    campaign = load(file)
    if as_json:
        print_json(asdict(campaign))
    else:
        show(campaign, out)


@report.command("diff")
def diff_reports(
    file: Annotated[Path, typer.Argument(help="A report.json.")],
    baseline: Annotated[Path, typer.Argument(help="An earlier one.")],
    as_json: Json = False,
) -> None:
    """What got worse or better. Exit codes: 0 nothing worse, 1 worse, 3 not comparable."""
    found = diff(load(file), load(baseline))
    if as_json:
        print_json({"conclusion": conclusion(found), **asdict(found)})
    else:
        out.print(shown(render_diff_text(found)), soft_wrap=True)
    raise typer.Exit(found.exit_code)
