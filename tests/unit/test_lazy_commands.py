"""The command line imports the module of a command when it runs."""

import subprocess
import sys

import pytest

import casemate
from casemate.cli.lazy_group import COMMANDS, describe, load


def modules_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_read_from_the_source_is_that_of_the_command(name):
    command = load(name)
    assert command.name == name
    assert " ".join(describe(name).split())
    assert " ".join(command.help.split()) == " ".join(describe(name).split())


def test_help_imports_no_command():
    loaded = modules_after(
        "sys.argv = ['casemate', '--help']\ntry:\n import casemate.__main__\nexcept SystemExit: pass"
    )
    assert "casemate.cli.lazy_group" in loaded
    assert not loaded & {"numpy", "pydantic", "casemate.app", "casemate.cli.ask"}


def test_the_names_of_the_package_are_imported_on_first_use():
    assert "casemate.guard.guard" not in modules_after("import casemate")
    assert casemate.Guard.__module__ == "casemate.guard.guard"
    assert set(dir(casemate)) >= {"Guard", "Rag", "Document", "ConfigError"}
    with pytest.raises(AttributeError, match="module 'casemate' has no attribute 'Nothing'"):
        casemate.Nothing  # noqa: B018
    for name in dir(casemate):
        getattr(casemate, name)
