"""``reproduce``: a paper's numbers beside ours."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from casemate import reproduce as experiments
from casemate.cli.console import INTERRUPTED, Json, out, print_json, say, shown
from casemate.cli.redteam import step
from casemate.reproduce import NAMES, Result, Setting

FULL = 1000
"""Members, and non-members, of the published split."""


def reproduce(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(NAMES)}.")],
    data: Annotated[
        Path | None, typer.Option(help="The evaluation data. Default: CASEMATE_DATA, else ../shared/data.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where work is kept, so that the next table is fast.")] = Path(
        ".casemate/reproduce"
    ),
    members: Annotated[int, typer.Option(min=20, max=FULL, help="Documents attacked that are in the index.")] = 250,
    nonmembers: Annotated[int, typer.Option(min=20, max=FULL, help="Documents attacked that are held out.")] = 250,
    full: Annotated[bool, typer.Option("--full", help="All 1,000 of each, as in the paper.")] = False,
    as_json: Json = False,
) -> None:
    """Run a paper's experiment on the data at hand and print its numbers beside ours.

    Interrupt at will and run again: what was finished is kept.
    """
    experiments.require(name)  # before anybody looks for the data
    sizes = (FULL, FULL) if full else (members, nonmembers)
    setting = Setting(experiments.data_folder(data), folder, *sizes)
    began = time.monotonic()
    try:
        result = asyncio.run(experiments.reproduce(name, setting, step))
    except KeyboardInterrupt:
        say.print("interrupted; what was finished is kept, run the same command again to go on")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json({"name": name, **result.as_json()})
        return
    show(result)
    say.print(f"[dim]{time.monotonic() - began:.0f} s; work is kept in {shown(str(folder))}[/dim]")


def show(result: Result) -> None:
    """The table, a figure in each line and the paper's beside ours, and all that is to be known when reading it."""
    groups = {row.of: {r.system: r.cells for r in result.rows if r.of == row.of} for row in result.rows}
    systems = dict.fromkeys(row.system for row in result.rows)
    table = Table("", "", *map(shown, systems), title=shown(result.title), title_justify="left")
    for of, rows in groups.items():
        table.add_section()
        lines = [column for column in result.columns if any(column in cells for cells in rows.values())]
        for column in lines:
            found = (experiments.shown(rows[system].get(column) if system in rows else None) for system in systems)
            table.add_row(shown(of if column == lines[0] else ""), shown(column), *map(shown, found))
    out.print(table)
    for kind, notes in (("* ", result.odd), ("", result.remarks), ("differs: ", result.differs)):
        for note in notes:
            out.print(shown(f"{kind}{note}"), soft_wrap=True)
    out.print(shown(", ".join(f"{key} {value}" for key, value in result.setting.items())), soft_wrap=True, style="dim")
    for path in result.files:
        out.print(f"wrote {shown(str(path))}", soft_wrap=True)
