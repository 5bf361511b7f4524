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
    """The table, and everything that is to be known when reading it."""
    table = Table(title=shown(result.title), title_justify="left")
    for column in ("", "", *result.columns):
        table.add_column(column)
    before = ""
    for row in result.rows:
        if row.of != before and before:
            table.add_section()
        cells = (experiments.shown(row.cells.get(column)) for column in result.columns)
        style = "dim" if row.printed else ""
        table.add_row(shown(row.of if row.of != before else ""), shown(row.system), *map(shown, cells), style=style)
        before = row.of
    out.print(table)
    for kind, lines in (("* ", result.odd), ("", result.remarks), ("differs: ", result.differs)):
        for line in lines:
            out.print(shown(f"{kind}{line}"), soft_wrap=True)
    out.print(shown(", ".join(f"{key} {value}" for key, value in result.setting.items())), soft_wrap=True, style="dim")
    for path in result.files:
        out.print(f"wrote {shown(str(path))}", soft_wrap=True)
