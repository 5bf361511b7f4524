"""``canary suggest|paraphrase|baseline|compare|drill``: drafts a set, records a baseline, compares systems."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Column, Table

from casemate.app import open_app
from casemate.cli.canary import canary, opened_monitor
from casemate.cli.console import Code, ConfigFile, Json, Tenant, bar, counted_errors, out, print_json, say, shown
from casemate.errors import ConfigError
from casemate.monitor.canaries.canary import MAX_PARAPHRASES
from casemate.monitor.canaries.canary_file import with_paraphrases
from casemate.monitor.canaries.paraphrase import SPARE, Paraphrased, paraphrase_canaries
from casemate.monitor.canaries.suggest import CanarySuggestion, SuggestionSettings, suggest_canaries
from casemate.monitor.drift.compare import REPEATS, Comparison, Conclusion, compare_targets
from casemate.monitor.poisoning.drill import DrillResult
from casemate.monitor.poisoning.scoring import MIN_DOCUMENTS
from casemate.monitor.service import DRILL_ATTACKS, canary_file, open_runner, open_target, run_drill
from casemate.monitor.trends import baseline
from casemate.monitor.trends.baseline import BASELINE_RUNS, Baseline
from casemate.protocols import Target
from casemate.rag.question_file import questions_in
from casemate.reports.format import percent, plural
from casemate.reports.verdicts import some
from casemate.runtime.files import write_atomically
from casemate.system import App
from casemate.types import DEFAULT_TENANT

REASONS = {
    "missing_phrase": "the answer of the system lacks the fact",
    "document_missing": "the context of the system lacks its document",
    "low_rank": "its document does not come first in the context of the system",
    "low_similarity": "its document is too far from the question",
    "missing_refusal": "the system answers it, though the documents do not",
    "unexpected_refusal": "the system refuses to answer it",
    "backdoor_trigger": "the answer changes with the trigger",
    "retrieval_shift": "the context changes with the trigger",
}
"""What the kinds of deviations say about a dropped draft."""

_REVIEW = "delete the questions whose expected answer is wrong"


@canary.command("suggest")
def suggest_command(
    output: Annotated[
        Path | None, typer.Argument(help="File to write.", show_default="the value of monitor.canaries")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Number of canaries.")] = 50,
    questions: Annotated[
        Path | None, typer.Option("--from", help="File of clients' questions, to measure how many are covered.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Draft a set from your documents, keep the canaries that your system passes, and show what is not covered."""
    with open_app(config) as app, say.status("drafting and testing canaries"), counted_errors():
        file = output or canary_file(app)
        if file.exists() and not force:
            raise ConfigError(f"{file} exists; name another file, or overwrite it with --force")
        asked = questions_in(questions) if questions else ()
        settings = SuggestionSettings(count, app.config.calibrate.seed, asked, file.stem)
        runner = open_runner(app, _target(app, tenant), tenant)
        found = asyncio.run(suggest_canaries(app.index, app.guard.rag.embedder, runner, settings))
        write_atomically(file, found.text.encode())  # it contains text of documents
        is_configured = file.resolve() == canary_file(app).resolve()
    if as_json:
        dropped = [draft._asdict() for draft in found.dropped]
        written = len(found.canaries.canaries)
        print_json({"written": str(file), "canaries": written, "coverage": asdict(found.coverage), "dropped": dropped})
        return
    _show_suggestion(found, file, count)
    configure = "" if is_configured else "set monitor.canaries to this file, "
    out.print(f"next: {_REVIEW}, {configure}then run 'casemate canary baseline'")


def _target(app: App, tenant: str) -> Target:
    """The monitored system. A calibrated guard enforces, else canaries would fail once enforcement is switched on."""
    if app.config.guard.mode == "observe" and not app.due(tenant):
        app.guard.enforce = True
    return open_target(app, app.config.monitor.target, recorded=False)


@canary.command("paraphrase")
def paraphrase_command(
    count: Annotated[int, typer.Option(min=1, max=MAX_PARAPHRASES // SPARE, help="Paraphrases per canary.")] = 3,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Write other wordings of the canaries into their file: by the model of `monitor.judge`, else by rules.

    Each wording is tried on the system first. Runs then draw one wording per canary. Record a new baseline afterwards.
    """
    with opened_monitor(config, tenant) as monitor, bar() as progress:
        task = progress.add_task("trying wordings", total=None)
        rng = np.random.default_rng(monitor.app.config.calibrate.seed)
        target = open_target(monitor.app, monitor.app.config.monitor.target, recorded=False)
        runner = replace(monitor.runner, target=target)

        def on_trial(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        found = asyncio.run(paraphrase_canaries(runner, count, rng, runner.judge, on_trial))
        added = {one.canary: one.kept for one in found if one.kept}
        if added:
            file = monitor.file
            text = with_paraphrases(file.read_text(encoding="utf-8-sig"), added, str(file))
            write_atomically(file, text.encode("utf-8"))
    if as_json:
        print_json([one._asdict() for one in found])
        return
    _show_paraphrases(found)
    if added:
        what = f"correct {shown(str(file))} where a wording is wrong, then run 'casemate canary baseline'"
        out.print(f"next: {what}; the edited canaries have no baseline now")
    else:
        out.print("the file was not changed")


def _show_paraphrases(found: Sequence[Paraphrased]) -> None:
    """Prints how many wordings were written, and which canaries have none."""
    reasons = Counter(reason.replace("_", " ") for one in found for reason in one.reasons)
    dropped = f"; {sum(one.dropped for one in found)} were dropped: {', '.join(reasons)}" if reasons else ""
    written, worded = sum(len(one.kept) for one in found), sum(bool(one.kept) for one in found)
    out.print(f"{written} wordings for {worded} of {len(found)} canaries{dropped}")
    if without := [one.canary for one in found if not one.kept]:
        out.print(f"without another wording: {shown(some(without))}")


@canary.command("baseline")
def baseline_command(
    runs: Annotated[int, typer.Option(min=1, max=1000, help="How often each canary is asked.")] = BASELINE_RUNS,
    accept: Annotated[str, typer.Option(help="Accept the recorded baseline with this id.")] = "",
    by: Annotated[str, typer.Option(help="Who accepts it.")] = "operator",
    yes: Annotated[bool, typer.Option("--yes", help="Accept the new baseline at once.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Include canaries that never pass.")] = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Record how canaries behave while nothing is wrong. A recorded baseline has no effect until you accept it."""
    with opened_monitor(config, tenant) as monitor:
        store = monitor.app.store
        before = baseline.load_baseline(store, monitor.set)
        if accept:
            found = baseline.accept_baseline(store, monitor.set, accept, by, datetime.now(UTC))
        else:
            with bar() as progress, counted_errors():
                task = progress.add_task("asking all canaries, runs", total=runs)
                found = asyncio.run(monitor.measure_baseline(runs, force, lambda n: progress.advance(task, n)))
            if yes:
                baseline.accept_baseline(store, monitor.set, found.id, by, datetime.now(UTC))
    accepted = bool(accept) or yes
    changes = baseline.baseline_changes(before, found)
    if as_json:
        canaries = {name: asdict(c) for name, c in found.canaries.items()}
        print_json({"id": found.id, "accepted": accepted, "changes": changes, "canaries": canaries})
    else:
        same = baseline.unchanged_canaries(before, found) if before else 0
        _show_baseline([*changes, *([f"{same} unchanged"] if same else [])], found, accepted)


@canary.command("compare")
def compare_command(
    first: Annotated[str, typer.Argument(help="First system: `own`, `bare` (without guard), or a configuration file.")],
    second: Annotated[str, typer.Argument(help="Second system, in the same form.")],
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="How often each canary is asked.")] = REPEATS,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Ask two systems the same canaries. Exit codes: 0 not worse, 1 the second is worse, 3 inconclusive."""
    with opened_monitor(config, tenant) as monitor, ExitStack() as stack:
        one, other = (open_named_target(name, monitor.app, stack) for name in (first, second))
        with say.status(f"asking both systems {repeats} times"):
            comparison = asyncio.run(compare_targets(replace(monitor.runner, target=one), other, repeats))
    print_json(asdict(comparison)) if as_json else _show_comparison(comparison)
    exit_codes = {Conclusion.WORSE: Code.FAILED, Conclusion.UNCLEAR: Code.INCOMPLETE}
    raise typer.Exit(exit_codes.get(comparison.conclusion, Code.OK))


@canary.command("drill")
def drill_command(
    count: Annotated[int, typer.Option(min=1, max=50, help="Questions with a canary, and as many without.")] = 3,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Plant false documents in a copy of the corpus and see what detects them. Exit code 1 if canaries miss one."""
    with opened_monitor(config, tenant) as monitor, bar() as progress:
        task = progress.add_task("planting, asking, removing", total=2 * count * len(DRILL_ATTACKS))
        found = asyncio.run(run_drill(monitor, count, lambda n: progress.advance(task, n)))
    missed = any(not d.detected_by for d in _false_answers(found))
    print_json([asdict(d) for d in found]) if as_json else _show_drill(found)
    raise typer.Exit(Code.FAILED if missed else Code.OK)


def open_named_target(name: str, app: App, stack: ExitStack) -> Target:
    """``own``, ``bare``, or the target of a configuration file."""
    if name in ("own", "bare"):
        return app.unrecorded_target() if name == "own" else app.guard.rag
    other = stack.enter_context(open_app(Path(name)))
    return open_target(other, other.config.monitor.target, recorded=False)


def _show_suggestion(found: CanarySuggestion, file: Path, wanted: int) -> None:
    written = len(found.canaries.canaries)
    out.print(shown(f"wrote {written} of {wanted} canaries to {file}; the file contains text of your documents"))
    coverage = found.coverage
    regions = f"{len(coverage.regions) - len(coverage.uncovered)} of {len(coverage.regions)} regions of the corpus"
    out.print(f"covered: {regions}, {percent(coverage.documents)} of the chunks")
    if coverage.traffic is not None:
        out.print(f"covered: {percent(coverage.traffic.value)} of the given questions")
    for region in coverage.uncovered:
        out.print(shown(f"not covered: {region.name} ({region.chunks} chunks)"))
    if not found.dropped:
        return
    out.print(f"{plural(len(found.dropped), 'other draft')} were dropped, so that none is doubtful:")
    reasons = Counter(d.reason.removeprefix("not filled: ") for d in found.dropped)
    for reason, count in reasons.most_common():
        out.print(shown(f"  {count:>5,}  {_reason(reason)}"))


def _reason(reason: str) -> str:
    """Why a draft was dropped, as a sentence. A draft that failed its test has the kinds of the deviations."""
    return "; ".join(REASONS.get(part, part.replace("_", " ")) for part in reason.split(", "))


def _false_answers(found: Sequence[DrillResult]) -> list[DrillResult]:
    """False answers to questions that a canary asks."""
    return [d for d in found if d.watched and d.false_guarded]


def _show_drill(found: Sequence[DrillResult]) -> None:
    """One line per attack on questions with a canary, and one on others."""
    columns = ("canary", "off", "on", "gate", "detected", "restored")
    table = Table(Column("attack", overflow="fold"), *(Column(name, no_wrap=True) for name in columns))
    for attack, watched in dict.fromkeys((d.attack, d.watched) for d in found):
        drills = [d for d in found if (d.attack, d.watched) == (attack, watched)]
        outcomes = zip(*((d.false_unguarded, d.false_guarded, bool(d.detected_by)) for d in drills), strict=True)
        unguarded, guarded, detected = (f"{sum(side)} of {len(drills)}" for side in outcomes)
        planted = sum(d.documents for d in drills)
        screened = [d.quarantined for d in drills if d.quarantined is not None]
        gate = f"{sum(screened)} of {planted}" if screened else "none"
        restored = "yes" if all(d.restored for d in drills) else "[red]no[/red]"
        table.add_row(attack, "yes" if watched else "no", unguarded, guarded, gate, detected, restored)
    out.print(table)
    out.print("off, on: false answers without and with the guard; gate: documents quarantined")
    if any(d.quarantined is None for d in found):
        out.print(f"no gate: screening needs an index of at least {MIN_DOCUMENTS} chunks")
    if false := _false_answers(found):
        missed = sum(not d.detected_by for d in false)
        code = " (exit code 1)" if missed else ""
        out.print(f"canaries missed {missed} of {len(false)} false answers to their questions{code}")
    slowest = max(d.seconds for d in found)
    out.print(f"a run of the canaries took up to {slowest:.1f} s; before the next run, only the gate can detect poison")


def _show_baseline(changes: Sequence[str], found: Baseline, accepted: bool) -> None:
    for line in changes:
        out.print(shown(line))
    for name, canary_baseline in found.canaries.items():
        if canary_baseline.failed:
            counts = f"{canary_baseline.failed} of {canary_baseline.asked} runs"
            out.print(shown(f"{name}: failed in {counts} although nothing was wrong"))
    if accepted:
        out.print(f"[green]baseline {found.id} is in force[/green]")
    else:
        command = f"casemate canary baseline --accept {found.id}"
        out.print(f"recorded baseline {found.id}; it has no effect until you accept it: {command}")


def _show_comparison(comparison: Comparison) -> None:
    one, other = comparison.rates
    d = comparison.difference
    out.print(f"[bold]{comparison.conclusion.value}[/bold]: pass rates {percent(one)} and {percent(other)}; ", end="")
    points = f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}] percentage points"
    out.print(f"difference {points}, p = {comparison.p:.2g}", markup=False)
    if comparison.overlap is not None and comparison.cosine is not None:
        out.print(f"overlap of the contexts {comparison.overlap:.2f}; cosine of the answers {comparison.cosine:.2f}")
    if comparison.left_out:
        silent = [sum(counts[side] > 0 for counts in comparison.left_out.values()) for side in (0, 1)]
        errors = f"no answer from the first to {silent[0]}, from the second to {silent[1]}"
        out.print(f"left out: {len(comparison.left_out)} canaries; {errors}")
    for pair in comparison.flips:
        out.print(shown(f"{pair.canary}: {pair.flip.value if pair.flip else ''}"))
