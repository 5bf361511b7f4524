"""``enforce``: shows what would have been withheld from recorded traffic, and switches enforcement on or off."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from casemate import config as configuration
from casemate.cli.console import ConfigFile, Json, is_terminal, note, out, print_json, say, shown
from casemate.config import Config
from casemate.errors import ConfigError
from casemate.monitor.enforcement import (
    LEAST_QUESTIONS,
    TOLERABLE,
    EnforcementPreview,
    GuardMode,
    read_preview,
    require_switchable,
    setting_values,
    switch,
)
from casemate.plugins import build
from casemate.reports.format import percent, plural, sample_rate, utc_time

AUTHOR = "casemate enforce"
LONGER = "serve your users in observe mode for longer, or choose a longer period with --days"
UNSEEN = (
    "no question was recorded in observe mode in this period, so it is unknown what would be withheld. Serve your "
    "users in observe mode first, or choose a longer period with --days"
)
TOO_FEW = (
    f"{{}} recorded in observe mode in this period; at least {LEAST_QUESTIONS} are needed to see what would be "
    f"withheld. {LONGER.capitalize()}"
)
TOO_FEW_TO_JUDGE = (
    f"probably an attack, or too few questions to judge ({{}} of {LEAST_QUESTIONS}). Look at the clients, and {LONGER}"
)
EXCESSIVE = (
    f"certainly more than {100 * TOLERABLE:.0f} % of the questions would be affected (the 95 % interval lies above "
    "it): an attack, or questions unlike those of the calibration. Look at the clients; if they are benign, run "
    "'casemate calibrate --recorded', which adjusts the threshold to the recorded scores, or 'casemate calibrate "
    "--log FILE'"
)


def enforce(
    days: Annotated[float, typer.Option(min=0.0, max=36500.0, help="Days of traffic to show.")] = 7.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Switch without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the traffic and change nothing.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Switch back to observe mode.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help=f"With --yes: switch although many questions are affected, or fewer than {LEAST_QUESTIONS} recorded.",
        ),
    ] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show what would have been withheld from real traffic, then switch enforcement on.

    Sets guard.mode, and monitor.gate if it is 'observe'. Comments stay. Running gateways follow within seconds.
    """
    path = config or Path(configuration.FILE)
    if not path.exists():
        raise ConfigError(f"there is no {path}; create one with 'casemate init', or name it with --config")
    settings = configuration.read(path)
    mode: GuardMode = "observe" if off else "enforce"
    require_switchable(settings, settings.guard.mode, mode)
    values = setting_values(path, mode)
    with closing(build("store", settings.store, settings.folder)) as store:
        since = datetime.now(UTC) - timedelta(days=days)
        preview = None if off else read_preview(store, since, settings.monitor.is_canary)
        why = _objection(preview) if preview and not force else ""
        needed = _needed(settings, path, mode, values) and not dry_run
        if preview and not as_json:
            _show(preview, refused=bool(needed and why and (yes or not is_terminal())))
        if needed and yes and why:
            raise ConfigError(f"nothing was changed: {why}. To switch to {mode} all the same, add --force")
        done = needed and _confirmed(mode, yes, as_json, why)
        problem = switch(store, path, mode, AUTHOR) if done else ""
    if as_json:
        shown_preview = asdict(preview) if preview else None
        print_json({"mode": mode if done else settings.guard.mode, "file": problem or "ok", "preview": shown_preview})
    elif done:
        _report(path, mode, values, settings.monitor.gate is True, problem)
    if problem:
        raise typer.Exit(1)


def _objection(preview: EnforcementPreview) -> str:
    """Why the recorded traffic does not support the switch; empty if it does."""
    if preview.excessive:
        return TOO_FEW_TO_JUDGE.format(preview.questions) if preview.few else EXCESSIVE
    if not preview.few:
        return ""
    were = "was" if preview.questions == 1 else "were"
    return TOO_FEW.format(f"{plural(preview.questions, 'question')} {were}") if preview.questions else UNSEEN


def _needed(settings: Config, path: Path, mode: GuardMode, values: Collection[str]) -> bool:
    """Whether the file differs from what a switch would set."""
    needed = settings.guard.mode != mode or len(values) > 1
    if not needed:
        say.print(f"{shown(str(path))} has guard.mode: {mode} already")
    return needed


def _confirmed(mode: GuardMode, yes: bool, as_json: bool, why: str) -> bool:
    """Asks for confirmation on a terminal. ``why``: what ``--yes`` alone would be refused for, if anything."""
    if yes:
        return True
    if as_json or not is_terminal():
        if why:
            raise ConfigError(f"nothing was changed: {why}. To switch to {mode} all the same, add --yes and --force")
        raise ConfigError(f"nothing was changed: there is no terminal to confirm on; add --yes to switch to {mode}")
    return typer.confirm(f"Set guard.mode to {mode}?", default=False, err=True)


def _show(preview: EnforcementPreview, refused: bool) -> None:
    """Prints the preview. ``refused``: an error with the objection follows, so it is not printed here."""
    since = utc_time(preview.since, seconds=False)
    if not preview.questions:
        out.print(f"no question was recorded in observe mode since {since}; this preview is empty")
    else:
        share, about = sample_rate(preview.affected, preview.questions)
        repeated = f"; {preview.repeated} of them only repeat an earlier decision about the same client and documents"
        out.print(
            f"since {since}: {plural(preview.questions, 'question')} in {plural(preview.sessions, 'session')}; "
            f"enforcement would have withheld something from {share} ({about}), "
            f"in {plural(preview.affected_sessions, 'session')}{repeated * bool(preview.repeated)}"
        )
        _show_defenses(preview)
    if preview.questions and not refused and (why := _objection(preview)):
        note(why)
    if preview.sources:
        names = ", ".join(preview.sources[:5]) + (", ..." if len(preview.sources) > 5 else "")
        count = plural(len(preview.sources), "new source")
        out.print(f"screening would have quarantined {count}: {shown(names)}")


def _show_defenses(preview: EnforcementPreview) -> None:
    counted = ("questions", "withheld", "repeated", "sessions", "undecided", "failed")
    table = Table(Column("defense", no_wrap=True), *(Column(name, overflow="fold") for name in counted), box=None)
    for name, d in preview.defenses.items():
        withheld = f"{d.affected} ({percent(d.affected / d.questions)})"
        counts = d.repeated, d.sessions, d.undecided, d.failed
        table.add_row(name, str(d.questions), withheld, *map(str, counts))
    out.print(table)
    for name, d in preview.defenses.items():
        for example in d.examples:
            what = f"chunks {', '.join(example.hidden[:5])}" if example.hidden else "answer cut"
            where = f"request {example.request}, client {example.client}, {utc_time(example.at)}"
            out.print(f"  {name}: {shown(where)}: {shown(what)}")
        if d.failed:
            note(
                f"{name} failed on {d.failed} questions; in enforce mode guard.on_error applies "
                "to them; run 'casemate doctor'"
            )
        if d.undecided == d.questions:
            note(f"{name} decided nothing; run 'casemate doctor'")


def _report(path: Path, mode: GuardMode, values: Collection[str], gated: bool, problem: str) -> None:
    """Prints what was changed. ``values`` are the keys that were set; ``gated``: ``monitor.gate`` was true before."""
    if problem:
        more = ", and 'gate: true' under 'monitor:'" if "monitor.gate" in values else ""
        note(f"{shown(problem)}; write 'mode: {mode}' under 'guard:'{more} yourself")
        return
    out.print(f"{shown(str(path))}: guard.mode is {mode}; running gateways follow within seconds")
    if "monitor.gate" in values:
        out.print(f"{shown(str(path))}: monitor.gate is true; suspicious new documents are quarantined")
    elif gated and mode == "observe":
        out.print("monitor.gate stays true; set it to observe if screening must not quarantine")
