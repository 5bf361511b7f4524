"""Runs commands in this process, and waits for conditions in other processes."""

import json

from typer.testing import CliRunner

from casemate.cli import cli


def run(*arguments):
    """Returns exit code and output. With ``--json`` the output is the parsed object."""
    done = CliRunner().invoke(cli, list(arguments))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout) if "--json" in arguments else done.stdout
