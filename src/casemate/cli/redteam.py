"""`redteam` and `report`: attacks the operator's own system or target, and reads the reports."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from casemate import config as configuration
from casemate import plugins
from casemate.app import open_app, open_executor
from casemate.cli.console import (
    Code,
    ConfigFile,
    Json,
    On,
    Tenant,
    interruptible,
    out,
    print_json,
    say,
    show_progress,
    shown,
)
from casemate.cli.redteam_output import print_replay, print_result
from casemate.config import Config, PluginSpec
from casemate.errors import ConfigError
from casemate.monitor.service import fit_screen
from casemate.rag.question_file import questions_in
from casemate.redteam.campaigns.external import ExternalExtractionCampaign, ExternalMembershipCampaign
from casemate.redteam.campaigns.external_targets import is_external, override_targets
from casemate.redteam.campaigns.own import OwnExtractionCampaign, OwnMembershipCampaign
from casemate.redteam.campaigns.pipeline import Campaign, campaign_lock, validate_plan
from casemate.redteam.campaigns.probe import OwnProbeCampaign
from casemate.redteam.campaigns.promptfoo import NO_MODEL, PromptfooExport, judge_results
from casemate.redteam.campaigns.replay import read_recorded
from casemate.redteam.campaigns.replay import replay as replay_recorded
from casemate.redteam.lab.capabilities import ATTACKS, CHECKS
from casemate.redteam.lab.results import CampaignResult, CheckStatus, load_result
from casemate.redteam.reporting.compare import ReportDiff, compare_results, conclusion, render_diff_text
from casemate.redteam.reporting.files import CRAWL, PROBE, newest_report, write_report
from casemate.text.output_transforms import TRANSFORMS
from casemate.types import DEFAULT_TENANT

redteam = typer.Typer(help="Attack your own system, guard off and guard on.", no_args_is_help=True)
report = typer.Typer(help="Read and compare reports.", no_args_is_help=True)
TargetName = Annotated[
    str | None, typer.Option("--target", help="Target: a name in redteam.targets, an address, module:function, or own.")
]
ProbeTarget = Annotated[
    str | None, typer.Option("--target", help="Only own: documents are added to a copy of the own index.")
]
TargetOff = Annotated[str | None, typer.Option("--target-off", help="The same external target with its guard off.")]
Own = Annotated[bool, typer.Option("--own", help="Confirm that you own the target, or may attack it.")]
Seed = Annotated[int | None, typer.Option(help="Seed of all random choices. Default: redteam.seed.")]
Restart = Annotated[bool, typer.Option("--restart", help="Abandon an interrupted campaign on an external target.")]
NO_EXTERNAL_PROBE = (
    "redteam probe adds documents to a copy of the index, so only the own system can be probed: no external target "
    "offers to remove them again; leave --target out, and set redteam.target: own"
)
COMMANDS = {"attack": "run", "crawler": "crawl", "injector": "probe"}
"""Subcommand that runs the attacks of a role."""
RESUME_HINT = "interrupted; finished work is kept, run the same command again to continue"
EXIT_CODES = {
    CheckStatus.PASS: Code.OK,
    CheckStatus.FAIL: Code.FAILED,
    CheckStatus.INCONCLUSIVE: Code.INCOMPLETE,
    CheckStatus.ERROR: Code.ERROR,
}


@redteam.command("list")
def list_attacks(as_json: Json = False) -> None:
    """List the attacks, their requirements, and the checks that need more of a target than answers."""
    found: dict[tuple[str, str], type[Any]] = {}
    faults: list[str] = []
    for key in [(role, name) for role in COMMANDS for name in plugins.names(role)]:
        try:
            found[key] = plugins.load(*key)
        except ConfigError as error:  # of another package; the others can be used
            faults.append(str(error))
    if as_json:
        attacks = {name: {"from": cls.paper, "needs": sorted(ATTACKS[role])} for (role, name), cls in found.items()}
        needs = {name: sorted(check.needs) for name, check in CHECKS.items()}
        print_json({"attacks": attacks, "checks": needs, "faults": faults})
        return
    table = Table("attack", "command", "needs", "paper", "description")
    for (role, name), cls in found.items():
        lines = (cls.__doc__ or "").strip().splitlines()
        table.add_row(name, COMMANDS[role], ", ".join(sorted(ATTACKS[role])), cls.paper, lines[0] if lines else "")
    out.print(table)
    for fault in faults:
        say.print(f"not listed: {shown(fault)}")
    checks = Table("check", "needs", "result without", title="Checks", title_justify="left")
    for name, check in CHECKS.items():
        checks.add_row(name, ", ".join(sorted(check.needs)), f"INCONCLUSIVE: {check.unmet}")
    out.print(checks)


@redteam.command()
def run(
    config: ConfigFile = None,
    attack: Annotated[list[str] | None, typer.Option(help="Attacks to run. Default: redteam.attacks.")] = None,
    members: Annotated[int | None, typer.Option(help="Attacked documents that are in the index.")] = None,
    nonmembers: Annotated[int | None, typer.Option(help="Attacked documents that are held out.")] = None,
    budget: Annotated[int | None, typer.Option(help="Total number of questions.")] = None,
    seed: Seed = None,
    baseline: Annotated[Path | None, typer.Option(help="An earlier report.json to compare with.")] = None,
    target: TargetName = None,
    target_off: TargetOff = None,
    own: Own = False,
    restart: Restart = False,
    tenant: Tenant = DEFAULT_TENANT,
    on: On = None,
    as_json: Json = False,
) -> None:
    """Run membership inference and write the report. An interrupted run resumes when repeated.

    Exit codes: 0 PASS, 1 FAIL (or worse than the baseline), 3 INCONCLUSIVE, 2 ERROR.
    """
    given = {"members": members, "nonmembers": nonmembers, "budget": budget, "seed": seed}
    settings = _override(configuration.read(config), "", attack, **given)
    settings = override_targets(settings, target, target_off, own)
    before = load_result(baseline) if baseline else None
    query_log, benign = (_questions(settings, f) for f in (settings.calibrate.query_log, settings.redteam.benign))
    if on and is_external(settings):
        raise ConfigError("--cluster requires the own system; an external target is asked from this machine only")
    validate_plan(settings)  # before the system is opened, which creates its files
    with interruptible(RESUME_HINT):
        if is_external(settings):
            result, files = _run(ExternalMembershipCampaign(settings, restart, benign), before)
        else:
            with open_executor(on) as executor, open_app(settings, executor=executor) as app:
                result, files = _run(OwnMembershipCampaign(app, benign, tenant, query_log), before)
    change = compare_results(result, before) if before else None
    if as_json:
        print_json({"status": result.status, "files": files})
    else:
        _print(result, files["html"])
        if change:
            out.print(shown(render_diff_text(change)))
    raise typer.Exit(_exit_code(result.status, change))


@redteam.command()
def crawl(
    config: ConfigFile = None,
    attack: Annotated[list[str] | None, typer.Option(help="Crawlers to run. Default: redteam.crawl.attacks.")] = None,
    questions: Annotated[int | None, typer.Option(help="Questions for each crawler.")] = None,
    clients: Annotated[int | None, typer.Option(help="Client names of each crawler.")] = None,
    seed: Seed = None,
    transform: Annotated[
        list[str] | None,
        typer.Option(help="Output transforms: a name, or all. Each crawler also runs with each. Default: none."),
    ] = None,
    target: TargetName = None,
    target_off: TargetOff = None,
    own: Own = False,
    restart: Restart = False,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Run extraction attacks, guard off and guard on. An interrupted run resumes when repeated.

    Exit codes: 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 2 ERROR.
    """
    transforms = tuple(TRANSFORMS) if transform and "all" in transform else tuple(transform or ()) or None
    given = {"questions": questions, "clients": clients, "transforms": transforms}
    settings = _override(_override(configuration.read(config), "", None, seed=seed), "crawl", attack, **given)
    settings = override_targets(settings, target, target_off, own)
    benign = _questions(settings, settings.redteam.benign)
    validate_plan(settings, CRAWL)
    with interruptible(RESUME_HINT):
        if is_external(settings):
            result, files = _run(ExternalExtractionCampaign(settings, restart))
        else:
            with open_app(settings) as app:
                result, files = _run(OwnExtractionCampaign(app, benign, tenant))
    _finish(result, files["html"], as_json)


@redteam.command()
def probe(
    config: ConfigFile = None,
    attack: Annotated[list[str] | None, typer.Option(help="Attacks to run. Default: redteam.probe.attacks.")] = None,
    questions: Annotated[int | None, typer.Option(help="Ordinary questions for each injected instruction.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write a promptfoo configuration instead; ask nothing.")] = None,
    provider: Annotated[str, typer.Option(help="With --export: the model that promptfoo asks.")] = NO_MODEL,
    results: Annotated[
        Path | None, typer.Option("--import", help="Judge promptfoo's results.json of an exported configuration.")
    ] = None,
    target: ProbeTarget = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Hide instructions in documents of a copy of the index, and count the answers that follow them.

    The questions are ordinary ones. An interrupted run resumes when repeated. The simulated reader follows no
    instruction in documents: set redteam.reader to own.

    --export and --import test a model with promptfoo instead: it gets one document with each question.

    Exit codes: 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 2 ERROR.
    """
    settings = _override(configuration.read(config), "probe", attack, questions=questions)
    settings = override_targets(settings, target, None, own=False)
    if export and results:
        raise ConfigError("--export and --import exclude each other; export, run promptfoo, then import")
    if is_external(settings) and not results:
        raise ConfigError(NO_EXTERNAL_PROBE)
    benign = _questions(settings, settings.redteam.benign)
    validate_plan(settings, PROBE)
    if results:
        result, files = _import_results(settings, results)
    else:
        with interruptible(RESUME_HINT), open_app(settings) as app:
            campaign = OwnProbeCampaign(app, benign, tenant, partial(fit_screen, app, tenant))
            if export:
                parts = campaign.attacks(), campaign.questions()[1], app.guard.rag.instructions
                count = PromptfooExport(*parts, settings.redteam.seed).write(export, provider)
                say.print(f"{count:,} tests in {shown(str(export))}; next: promptfoo eval --output results.json")
                return
            result, files = _run(campaign)
    _finish(result, files["html"], as_json)


@redteam.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Recorded set: JSON lines, gzip-compressed or not.")],
    as_json: Json = False,
) -> None:
    """Score recorded questions and answers of any system. Nothing is asked, and no configuration is read.

    A line is one trial: candidate (name), member (true or false), question and answer, or questions and answers (a
    list, or lists by target: off, on; a list is shown "as recorded"). Further fields: attack (default menta, for open
    questions), author, text and title of the candidate, key (what the attack needs, such as the masked words), features
    (measurements by target; no questions needed),
    withheld (for each question), half (A or B). A line without a candidate holds facts about the set.

    Exit codes: 0 scored, 2 error, 3 too few trials of an attack.
    """
    recorded = read_recorded(file)
    results = replay_recorded(recorded)
    if as_json:
        print_json({"about": dict(recorded.about), "attacks": [asdict(result) for result in results]})
    else:
        print_replay(recorded, results, out)
    raise typer.Exit(Code.INCOMPLETE if any(result.missing for result in results) else Code.OK)


def _import_results(settings: Config, file: Path) -> tuple[CampaignResult, dict[str, str]]:
    """Judges promptfoo's results and writes the reports; their paths by kind."""
    result, folder = judge_results(file, settings.redteam.probe.max_followed), settings.folder / settings.redteam.folder
    with campaign_lock(folder, "an import of results"):
        files = write_report(result, folder, stem=PROBE, configuration=settings.file)
    return result, {kind: str(path) for kind, path in files.items()}


ADVICE = {
    CheckStatus.FAIL: "docs/how-to/read-a-report.md says what to do about a check that failed",
    CheckStatus.INCONCLUSIVE: "the check names what is missing (docs/how-to/read-a-report.md)",
    CheckStatus.ERROR: "run 'casemate doctor', correct what failed, and run this again",
}
"""What to do after a verdict that is not PASS."""


def _run(campaign: Campaign, baseline: CampaignResult | None = None) -> tuple[CampaignResult, dict[str, str]]:
    """Runs a campaign and writes its reports; their paths by kind."""
    result, files = asyncio.run(campaign.run_and_write(show_progress, baseline))
    return result, {kind: str(path) for kind, path in files.items()}


def _print(result: CampaignResult, page: str) -> None:
    print_result(result, out)
    if advice := ADVICE.get(result.status):
        out.print(f"next: {advice}")
    out.print(f"report: {shown(page)}")


def _override(settings: Config, section: str, names: list[str] | None, **options: object) -> Config:
    """Applies command-line options to a section below ``redteam``, or to ``redteam`` itself; None: not given.

    Attacks that are named keep their configured options.
    """
    before = getattr(settings.redteam, section) if section else settings.redteam
    known = {part.use: part for part in before.attacks}
    attacks = tuple(known.get(name, PluginSpec(use=name)) for name in names) if names else None
    given = {name: value for name, value in {"attacks": attacks, **options}.items() if value is not None}
    return configuration.with_overrides(settings, redteam={section: dict(before) | given} if section else given)


def _questions(settings: Config, file: Path | None) -> list[str]:
    return questions_in(settings.folder / file) if file else []


def _finish(result: CampaignResult, page: str, as_json: bool) -> NoReturn:
    print_json(result.summary()) if as_json else _print(result, page)
    raise typer.Exit(EXIT_CODES[result.status])


def _exit_code(status: CheckStatus, change: ReportDiff | None) -> int:
    """The most severe code of the campaign and of its comparison with the baseline."""
    codes = (EXIT_CODES[status], change.exit_code if change else Code.OK)
    return next(code for code in (Code.ERROR, Code.FAILED, Code.INCOMPLETE, Code.OK) if code in codes)


@report.command("show")
def show_report(
    file: Annotated[
        Path | None, typer.Argument(help="A report.json. Default: the newest report in redteam.folder.")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Print the status and the table of a report, by default of the newest one."""
    if file is None:
        settings = configuration.read(config)
        file = newest_report(settings.folder / settings.redteam.folder)
        say.print(f"report: {shown(str(file))}")
    result = load_result(file)
    print_json(result.summary()) if as_json else print_result(result, out)


@report.command("diff")
def diff_reports(
    file: Annotated[Path, typer.Argument(help="A report.json.")],
    baseline: Annotated[Path, typer.Argument(help="An earlier one.")],
    as_json: Json = False,
) -> None:
    """Compare two reports. Exit codes: 0 nothing worse, 1 worse, 3 not comparable."""
    found = compare_results(load_result(file), load_result(baseline))
    if as_json:
        print_json({"conclusion": conclusion(found), **asdict(found)})
    else:
        out.print(shown(render_diff_text(found)))
    raise typer.Exit(found.exit_code)
