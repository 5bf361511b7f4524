"""``canary suggest|baseline|compare``: making a set, saying what is normal, and comparing two systems by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from casemate import config as configuration
from casemate.app import App, open_app
from casemate.canaries import DRILLS, open_canaries, run_drill, target_of
from casemate.cli.canary import canary
from casemate.cli.console import FAILED, INCOMPLETE, OK, ConfigFile, Json, Tenant, bar, out, print_json, say, shown
from casemate.errors import ConfigError
from casemate.lab.drill import Drill
from casemate.monitor.canaries.suggest import Settings, suggest
from casemate.monitor.drift.compare import REPEATS, Comparison, Conclusion, compare
from casemate.monitor.trends import baseline
from casemate.monitor.trends.baseline import RUNS, Baseline
from casemate.protocols import Target
from casemate.types import DEFAULT_TENANT


@canary.command("suggest")
def suggest_canaries(
    output: Annotated[Path, typer.Argument(help="The file to write.")] = Path("canaries.yaml"),
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many canaries.")] = 50,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Draft a set from your own documents, each canary tried on your own system, and say what it does not watch."""
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; name another file, or write over it with --force")
    with open_app(configuration.read(config)) as app, say.status("drafting and trying canaries"):
        wanted = Settings(count, app.config.rag.k, tenant, app.config.calibrate.seed, name=output.stem)
        target = target_of(app, app.config.monitor.target)
        found = asyncio.run(suggest(app.index, app.guard.rag.embedder, target, wanted))
    output.write_text(found.text, encoding="utf-8")
    if as_json:
        dropped = [draft._asdict() for draft in found.dropped]
        count = len(found.canaries.canaries)
        told = {"written": str(output), "canaries": count, "coverage": asdict(found.coverage), "dropped": dropped}
        print_json(told)
        return
    out.print(f"wrote {len(found.canaries.canaries)} canaries to {shown(str(output))}; it holds text of your documents")
    bare = found.coverage.bare
    regions = len(found.coverage.regions)
    seen = f"{regions - len(bare)} of {regions} regions of the corpus have one"
    out.print(f"{seen}; {found.coverage.documents:.0%} of the chunks are in the context of one")
    for region in bare:
        out.print(shown(f"without one: {region.name} ({region.chunks} chunks)"), soft_wrap=True)
    out.print("look through them, then: casemate canary baseline")


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
    with open_app(configuration.read(config)) as app:
        found = open_canaries(app, tenant)
        before = baseline.load(app.store, found.set)
        if accept:
            made = baseline.accept(app.store, found.set, accept, by, datetime.now(UTC))
        else:
            with bar() as progress:
                task = progress.add_task("asking", total=runs)
                made = asyncio.run(found.measure(runs, force, lambda n: progress.advance(task, n)))
            if yes:
                baseline.accept(app.store, found.set, made.id, by, datetime.now(UTC))
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
    with ExitStack() as opened:
        app = opened.enter_context(open_app(configuration.read(config)))
        found = open_canaries(app, tenant)
        targets = [named(name, app, opened) for name in (first, second)]
        section = app.config.monitor
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
    with open_app(configuration.read(config)) as app, bar() as progress:
        task = progress.add_task("planting, asking, cleaning up", total=2 * count * len(DRILLS))
        found = asyncio.run(run_drill(open_canaries(app, tenant), count, lambda n: progress.advance(task, n)))
    missed = [d for d in found if d.watched and d.false_guarded and not d.noticed]
    print_json([asdict(d) for d in found]) if as_json else _show_drills(found)
    raise typer.Exit(FAILED if missed else OK)


def _show_drills(found: Sequence[Drill]) -> None:
    """A line for each attack on watched questions, and on others."""
    table = Table("attack", "question", "false answers: bare", "guarded", "held at the gate", "noticed", "cleaned up")
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


def named(name: str, app: App, opened: ExitStack) -> Target:
    """``own``, ``bare``, or the target of a configuration file."""
    if name in ("own", "bare"):
        return app.target if name == "own" else app.guard.rag
    other = opened.enter_context(open_app(configuration.read(Path(name))))
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
    for pair in done.flips:
        out.print(shown(f"{pair.canary}: {pair.flip.value if pair.flip else ''}"), soft_wrap=True)
