"""The command line. Answers go to stdout, everything said along the way to stderr."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from casemate.cli import canary_drift, canary_set, honey  # noqa: F401  their commands are those of canary
from casemate.cli.answer import ask
from casemate.cli.attach import attach
from casemate.cli.canary import canary
from casemate.cli.client import client
from casemate.cli.console import ERROR, out, say, shown
from casemate.cli.manage import calibrate, demo, doctor, index, init
from casemate.cli.quarantine import quarantine
from casemate.cli.redteam import redteam, report
from casemate.cli.reindex import reindex
from casemate.cli.reproduce import reproduce
from casemate.cli.serve import key, serve
from casemate.errors import CasemateError

HELP = """\
Guard a private RAG system, ask it, and look after it.

To begin: casemate demo; or on your own documents: casemate init FOLDER, casemate index, casemate ask "...".

Exit codes: 0 done; 1 a check failed; 2 error; 3 done, but part of the input was left out; 130 interrupted.
"""
cli = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
for command in (init, index, attach, calibrate, reindex, ask, doctor, demo, serve, reproduce):
    cli.command()(command)
cli.add_typer(key, name="key")
cli.add_typer(client, name="client")
cli.add_typer(canary, name="canary")
cli.add_typer(quarantine, name="quarantine")
cli.add_typer(redteam, name="redteam")
cli.add_typer(report, name="report")


def main() -> None:
    """Entry point: errors become one line and an exit code, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        cli()
    except (CasemateError, OSError) as error:  # OSError: a full disk under stdout, a folder that is a file
        say.print(f"[red]error:[/red] {shown(str(error))}", soft_wrap=True)
        sys.exit(ERROR)


@cli.callback(invoke_without_command=True)
def _root(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        out.print(version("casemate"))
        raise typer.Exit
