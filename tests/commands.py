"""Runs commands in this process, and waits for conditions in other processes."""

import json
import time

from typer.testing import CliRunner

from casemate.cli import cli


def run(*arguments):
    """Returns exit code and output. With ``--json`` the output is the parsed object."""
    done = CliRunner().invoke(cli, list(arguments))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout) if "--json" in arguments else done.stdout


def until(condition):
    """Waits for a true value, and returns it."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)
    return found
