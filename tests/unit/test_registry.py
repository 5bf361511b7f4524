from importlib.metadata import EntryPoint

import pytest

from casemate import registry
from casemate.defenses.mirabel import Mirabel
from casemate.errors import ConfigError, UnknownName


@pytest.fixture
def installed(monkeypatch):
    """Pretends that another package declares an entry point."""

    def declare(role, name, value):
        entry = EntryPoint(name, value, f"casemate.{role}")

        def entry_points(group, name=None):
            return [entry] if group == entry.group and name in {None, entry.name} else []

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return declare


def test_every_role_has_plug_ins_that_load():
    for role in registry.ROLES:
        for name in registry.names(role):
            assert registry.ROLES[role][1] in registry.load(role, name).__mro__


def test_a_name_that_is_not_there_lists_those_that_are():
    with pytest.raises(UnknownName, match="no index is called 'sqlight'; known: pgvector, sqlite"):
        registry.load("index", "sqlight")


def test_a_name_of_another_role_is_not_taken():
    with pytest.raises(UnknownName, match="no generator is called 'minilm'; known: extractive, obedient, openai"):
        registry.load("generator", "minilm")


def test_another_package_adds_a_plug_in(installed):
    installed("defense", "theirs", "casemate.defenses.mirabel:Mirabel")
    assert registry.names("defense") == ["mirabel", "theirs"]
    assert registry.load("defense", "theirs") is Mirabel


def test_an_entry_point_that_fills_no_role_is_refused(installed):
    installed("defense", "theirs", "casemate.types:Document")
    with pytest.raises(ConfigError, match="must be a subclass of Defense"):
        registry.load("defense", "theirs")
