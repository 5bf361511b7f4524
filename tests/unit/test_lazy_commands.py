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
def test_help_parsed_from_the_source_equals_the_help_of_the_command(name):
    command = load(name)
    assert command.name == name
    assert " ".join(describe(name).split())
    assert " ".join(command.help.split()) == " ".join(describe(name).split())


def test_help_imports_no_command_module():
    loaded = modules_after(
        "sys.argv = ['casemate', '--help']\ntry:\n import casemate.__main__\nexcept SystemExit: pass"
    )
    assert "casemate.cli.lazy_group" in loaded
    assert not loaded & {"numpy", "pydantic", "casemate.app", "casemate.cli.ask"}


def test_imports_names_of_the_package_on_first_use():
    assert "casemate.guard.guard" not in modules_after("import casemate")
    assert casemate.Guard.__module__ == "casemate.guard.guard"
    assert set(dir(casemate)) >= {"Guard", "Rag", "Document", "ConfigError"}
    with pytest.raises(AttributeError, match="module 'casemate' has no attribute 'Nothing'"):
        casemate.Nothing  # noqa: B018
    for name in dir(casemate):
        getattr(casemate, name)


UNNEEDED = {"scipy", "torch", "fastapi", "openai", "httpx", "numpy.f2py", "sqlalchemy.dialects.postgresql"}
"""Installed in development, and slow to import."""


def test_ask_command_imports_no_unneeded_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = (
        "sys.argv = ['casemate', 'ask', 'x']\ntry:\n import casemate.cli\n casemate.cli.main()\nexcept SystemExit: pass"
    )
    modules_after(code)  # the first run creates the event store, which needs more modules
    loaded = modules_after(code)
    assert "casemate.backends.embedders.minilm" in loaded
    assert not loaded & UNNEEDED


def test_sqlite_event_store_imports_no_other_dialect(tmp_path):
    code = (
        "from datetime import UTC, datetime\n"
        "from casemate.backends.event_stores.sql import SqlEventStore\n"
        "from casemate.types import Event\n"
        f"store = SqlEventStore(path={str(tmp_path / 'events.db')!r})\n"
        "store.append(Event('a', datetime.now(UTC), 'k', {}))\n"
        "assert store.flush()"
    )
    modules_after(code)
    assert not modules_after(code) & UNNEEDED
