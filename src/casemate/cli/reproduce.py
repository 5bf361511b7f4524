"""``reproduce``: published figures next to measured ones."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from casemate import papers as experiments
from casemate.cli.console import Json, interruptible, out, print_json, say, show_progress, shown
from casemate.papers import NAMES, Result, Setting

LIST = "list"
FULL = 1000
"""Members and non-members of the published split."""


def reproduce(
    name: Annotated[str, typer.Argument(help=f"An experiment, or list. One of: {', '.join(NAMES)}.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the evaluation data. Default: the variable CASEMATE_DATA, else data."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder for intermediate results.")] = Path(".casemate/reproduce"),
    members: Annotated[int, typer.Option(min=20, max=FULL, help="Attacked documents in the index.")] = 250,
    nonmembers: Annotated[int, typer.Option(min=20, max=FULL, help="Attacked documents outside the index.")] = 250,
    reader: Annotated[
        str, typer.Option(help="Language model that answers: GGUF file or folder. Default: simulated, or offline pair.")
    ] = "",
    draft: Annotated[str, typer.Option(help="ragfort-table2, 3: a smaller model with the reader's vocabulary.")] = "",
    passages: Annotated[
        int, typer.Option(min=5, max=100, help="mirabel-table3 with a reader: up to 5, 20 or 100 passages per answer.")
    ] = 5,
    full: Annotated[bool, typer.Option("--full", help="All 1,000 members and non-members, as in the paper.")] = False,
    as_json: Json = False,
) -> None:
    """Run an experiment of a paper and print published and measured figures. Can be interrupted and resumed."""
    if name == LIST:
        _list_experiments(as_json)
        return
    experiments.require(name)  # before the data is searched
    sizes = (FULL, FULL) if full else (members, nonmembers)
    found = experiments.data_folder(data)
    setting = Setting(found, folder, *sizes, reader=reader, draft=draft, passages=passages)
    began = time.monotonic()
    with interruptible("interrupted; finished work is kept; run the same command again to resume"):
        result = asyncio.run(experiments.reproduce(name, setting, show_progress))
    if as_json:
        print_json({"name": name, **result.as_json()})
        return
    show(result)
    say.print(f"[dim]{time.monotonic() - began:.0f} s; intermediate results: {shown(str(folder))}[/dim]")


def _list_experiments(as_json: bool) -> None:
    found = {name: experiments.describe(name) for name in NAMES}
    if as_json:
        print_json({"experiments": found})
        return
    table = Table("experiment", "content")
    for name, content in found.items():
        table.add_row(name, content)
    out.print(table)


def show(result: Result) -> None:
    """Prints the table, one figure per line with published and measured values, and its notes."""
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
            out.print(shown(f"{kind}{note}"))
    out.print(shown(", ".join(f"{key} {value}" for key, value in result.setting.items())), style="dim")
    for path in result.files:
        out.print(f"wrote {shown(str(path))}")
