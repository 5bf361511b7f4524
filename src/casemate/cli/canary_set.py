"""``canary suggest|baseline|compare``: making a set, saying what is normal, and comparing two systems by it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from casemate import config as configuration
from casemate.app import App, open_app
from casemate.canaries import DRILLS, file_of, run_drill, target_of
from casemate.cli.canary import canary, opened
from casemate.cli.console import (
    FAILED,
    INCOMPLETE,
    OK,
    ConfigFile,
    Json,
    Tenant,
    bar,
    out,
    print_json,
    questions_in,
    say,
    shown,
)
from casemate.errors import ConfigError
from casemate.lab.drill import Drill
from casemate.monitor.canaries.suggest import Settings, Suggestion, suggest
from casemate.monitor.drift.compare import REPEATS, Comparison, Conclusion, compare
from casemate.monitor.trends import baseline
from casemate.monitor.trends.baseline import RUNS, Baseline
from casemate.protocols import Target
from casemate.types import DEFAULT_TENANT


@canary.command("suggest")
def suggest_canaries(
    output: Annotated[
        Path | None, typer.Argument(help="The file to write.", show_default="what monitor.canaries names")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many canaries.")] = 50,
    asked: Annotated[
        Path | None, typer.Option("--from", help="File of questions that people asked, to say how many are covered.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Draft a set from your own documents, each canary tried on your own system, and say what it does not watch."""
    with open_app(configuration.read(config)) as app, say.status("drafting and trying canaries"):
        file, section = output or file_of(app), app.config.monitor
        if file.exists() and not force:
            raise ConfigError(f"{file} exists; name another file, or write over it with --force")
        wanted = Settings(
            count,
            app.config.rag.k,
            tenant,
            app.config.calibrate.seed,
            questions_in(asked) if asked else (),
            section.client,
            section.concurrency,
            section.timeout_s,
            file.stem,
        )
        found = asyncio.run(suggest(app.index, app.guard.rag.embedder, target_of(app, section.target), wanted))
        file.write_text(found.text, encoding="utf-8")
        used = file.resolve() == file_of(app).resolve()
    if as_json:
        dropped = [draft._asdict() for draft in found.dropped]
        made = len(found.canaries.canaries)
        print_json({"written": str(file), "canaries": made, "coverage": asdict(found.coverage), "dropped": dropped})
        return
    _show_suggestion(found, file, count)
    out.print(f"look through them, then: {'' if used else 'name the file in monitor.canaries, and '}", end="")
    out.print("casemate canary baseline")


@canary.command("baseline")
def record_baseline(
    runs: Annotated[int, typer.Option(min=1, max=1000, help="How often each canary is asked.")] = RUNS,
    accept: Annotated[str, typer.Option(help="Make the recording with this id the norm.")] = "",
    by: Annotated[str, typer.Option(help="Who accepts.")] = "operator",
    yes: Annotated[bool, typer.Option("--yes", help="Accept what is recorded at once.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also canaries that never pass.")] = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Record how the canaries fare while all is well. A recording counts once it is accepted, by you."""
    with opened(config, tenant) as found:
        store = found.app.store
        before = baseline.load(store, found.set)
        if accept:
            made = baseline.accept(store, found.set, accept, by, datetime.now(UTC))
        else:
            with bar() as progress:
                task = progress.add_task("asking", total=runs)
                made = asyncio.run(found.measure(runs, force, lambda n: progress.advance(task, n)))
            if yes:
                baseline.accept(store, found.set, made.id, by, datetime.now(UTC))
    accepted = bool(accept) or yes
    if as_json:
        norms = {name: asdict(norm) for name, norm in made.norms.items()}
        print_json({"id": made.id, "accepted": accepted, "changes": baseline.changes(before, made), "norms": norms})
    else:
        _show_baseline(before, made, accepted)


@canary.command("compare")
def compare_targets(
    first: Annotated[str, typer.Argument(help="What is: `own`, `bare` (without its guard), or a configuration file.")],
    second: Annotated[str, typer.Argument(help="What is compared with it: the same.")],
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="How often each canary is asked.")] = REPEATS,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Ask two systems the same canaries. Exit codes: 0 no worse, 1 the second is worse, 3 too few to say."""
    with opened(config, tenant) as found, ExitStack() as stack:
        app, section = found.app, found.app.config.monitor
        targets = [named(name, app, stack) for name in (first, second)]
        with say.status(f"asking both {repeats} times"):
            done = asyncio.run(
                compare(
                    found.set.canaries,
                    *targets,
                    repeats=repeats,
                    k=app.config.rag.k,
                    embedder=app.guard.rag.embedder,
                    concurrency=section.concurrency,
                    timeout_s=section.timeout_s,
                    tenant=tenant,
                    client=section.client,
                    judge=found.judge,
                )
            )
    if as_json:
        print_json(asdict(done))
    else:
        _show_comparison(done)
    raise typer.Exit({Conclusion.WORSE: FAILED, Conclusion.UNCLEAR: INCOMPLETE}.get(done.conclusion, OK))


@canary.command("drill")
def run_drills(
    count: Annotated[int, typer.Option(min=1, max=50, help="Questions that canaries ask, and as many others.")] = 3,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Plant false documents into a copy of the corpus, and see who notices. Exit code 1 if canaries missed one."""
    with opened(config, tenant) as canaries, bar() as progress:
        task = progress.add_task("planting, asking, cleaning up", total=2 * count * len(DRILLS))
        found = asyncio.run(run_drill(canaries, count, lambda n: progress.advance(task, n)))
    missed = [d for d in found if d.watched and d.false_guarded and not d.noticed]
    print_json([asdict(d) for d in found]) if as_json else _show_drills(found)
    raise typer.Exit(FAILED if missed else OK)


def _show_suggestion(found: Suggestion, file: Path, wanted: int) -> None:
    """What was written, what it watches, and why it is no more."""
    made = len(found.canaries.canaries)
    said = f"wrote {made} canaries of {wanted} to {file}; it holds text of your documents"
    out.print(shown(said), soft_wrap=True)
    covered = found.coverage
    seen = f"{len(covered.regions) - len(covered.bare)} of {len(covered.regions)} regions of the corpus have one"
    out.print(f"{seen}; {covered.documents:.0%} of the chunks are in the context of one")
    if covered.traffic is not None:
        out.print(f"{covered.traffic.value:.0%} of the questions given lie near one")
    for region in covered.bare:
        out.print(shown(f"without one: {region.name} ({region.chunks} chunks)"), soft_wrap=True)
    for (kind, reason), count in Counter((d.kind, d.reason) for d in found.dropped).most_common():
        out.print(shown(f"dropped: {count} {kind}, {reason}"), soft_wrap=True)


def _show_drills(found: Sequence[Drill]) -> None:
    """A line for each attack on watched questions, and on others."""
    others = ("question", "false answers: bare", "guarded", "held at the gate", "noticed", "cleaned up")
    table = Table(Column("attack", min_width=12), *others)
    for attack, watched in dict.fromkeys((d.attack, d.watched) for d in found):
        some = [d for d in found if (d.attack, d.watched) == (attack, watched)]
        happened = zip(*((d.false_bare, d.false_guarded, bool(d.noticed)) for d in some), strict=True)
        bare, guarded, noticed = (f"{sum(side)} of {len(some)}" for side in happened)
        planted, held = sum(d.documents for d in some), [d.held for d in some if d.held is not None]
        gate = f"{sum(held)} of {planted}" if held else "no gate"
        clean = "yes" if all(d.clean for d in some) else "[red]no[/red]"
        table.add_row(attack, "watched" if watched else "not watched", bare, guarded, gate, noticed, clean)
    out.print(table)
    slowest = max(d.seconds for d in found)
    out.print(f"a run of the canaries took {slowest:.1f} s at most; until it comes, nobody notices but the gate")


def named(name: str, app: App, stack: ExitStack) -> Target:
    """``own``, ``bare``, or the target of a configuration file."""
    if name in ("own", "bare"):
        return app.target if name == "own" else app.guard.rag
    other = stack.enter_context(open_app(configuration.read(Path(name))))
    return target_of(other, other.config.monitor.target)


def _show_baseline(before: Baseline | None, made: Baseline, accepted: bool) -> None:
    for line in baseline.changes(before, made):
        out.print(shown(line), soft_wrap=True)
    flaky = [(name, norm) for name, norm in made.norms.items() if norm.failed]
    for name, norm in flaky:
        out.print(shown(f"{name}: failed in {norm.failed} of {norm.asked} runs though all was well"), soft_wrap=True)
    if accepted:
        out.print(f"[green]recording {made.id} is the norm now[/green]")
    else:
        out.print(f"recorded as {made.id}; it counts once you accept it: casemate canary baseline --accept {made.id}")


def _show_comparison(done: Comparison) -> None:
    d = done.difference
    out.print(f"[bold]{done.conclusion.value}[/bold]: pass rates {done.rates[0]:.1%} and {done.rates[1]:.1%}; ", end="")
    out.print(f"difference {d.value:+.1%} [{d.low:+.1%}, {d.high:+.1%}], p = {done.p:.2g}", markup=False)
    if done.overlap is not None and done.alike is not None:
        out.print(f"overlap of the contexts {done.overlap:.2f}; cosine of the answers {done.alike:.2f}")
    if done.left_out:
        silent = [sum(counts[side] > 0 for counts in done.left_out.values()) for side in (0, 1)]
        told = f"the first gave no answer to {silent[0]}, the second to {silent[1]}"
        out.print(f"left out: {len(done.left_out)} canaries; {told}", soft_wrap=True)
    for pair in done.flips:
        out.print(shown(f"{pair.canary}: {pair.flip.value if pair.flip else ''}"), soft_wrap=True)
