"""The command line. Results go to stdout, progress and messages to stderr."""

from __future__ import annotations

import gc
import logging
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from casemate.cli.console import Code, out, say, shown
from casemate.cli.lazy_group import LazyGroup
from casemate.errors import CasemateError

HELP = """\
Guard, monitor and red-team a private RAG system.

Start with: casemate try FOLDER, on your own documents, or casemate demo. Then: casemate init FOLDER, casemate index,
casemate ask "...".

Exit codes: 0 success; 1 a check failed; 2 error; 3 success, but part of the input was skipped; 130 interrupted.
"""
cli = typer.Typer(
    cls=LazyGroup,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point. An error becomes one line and an exit code, never a traceback."""
    # Plug-ins of pydantic only observe. Looking for them reads the metadata of all installed packages.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.set_threshold(50_000)  # a start creates many objects that stay
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        cli()
    except (CasemateError, OSError) as error:  # OSError: stdout on a full disk, a folder where a file is expected
        say.print(f"[red]error:[/red] {shown(str(error))}")
        sys.exit(Code.ERROR)


@cli.callback(invoke_without_command=True)
def _root(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        out.print(version("casemate"))
        raise typer.Exit
