from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from casemate import registry
from casemate.app import build
from casemate.backends.sqlite import SqliteIndex
from casemate.config import Part
from casemate.defenses.mirabel import Mirabel
from casemate.errors import ConfigError, UnknownName
from casemate.protocols import Defense, Embedder, EventStore, Generator, Index, LanguageModel
from tests.fakes import BagOfWords


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
    known = "attached, milvus, pgvector, qdrant, sqlite"
    with pytest.raises(UnknownName, match=f"no index is called 'sqlight'; known: {known}"):
        registry.load("index", "sqlight")


def test_a_name_of_another_role_is_not_taken():
    with pytest.raises(UnknownName, match="no generator is called 'minilm'; known: extractive, obedient, openai"):
        registry.load("generator", "minilm")


def test_another_package_adds_a_plug_in(installed):
    installed("defense", "theirs", "casemate.defenses.mirabel:Mirabel")
    assert {"mirabel", "theirs"} <= set(registry.names("defense"))
    assert registry.load("defense", "theirs") is Mirabel


def test_an_entry_point_that_fills_no_role_is_refused(installed):
    installed("defense", "theirs", "casemate.types:Document")
    with pytest.raises(ConfigError, match="must be a subclass of Defense"):
        registry.load("defense", "theirs")


def test_every_role_has_a_name_of_its_own():
    assert [registry.role(base) for _, base in registry.ROLES.values()] == list(registry.ROLES)


def test_the_options_that_are_plug_ins_are_known_by_their_type():
    assert registry.wants(Mirabel) == {"embedder": Embedder, "index": Index, "store": EventStore}
    assert registry.wants(registry.load("store", "sql_events")) == {}

    @dataclass
    class Both(Defense):
        """One that it must have, one that it may have, and two that are none."""

        model: LanguageModel
        generator: Generator | None = None
        name: str = ""
        count: int | None = None

    assert registry.wants(Both) == {"model": LanguageModel, "generator": Generator}


def test_an_option_that_is_a_plug_in_is_the_systems_own_unless_it_is_given(tmp_path):
    embedder, index = BagOfWords(), SqliteIndex(tmp_path / "index.db")
    parts = {Embedder: embedder, Index: index}
    made = build("defense", Part(use="mirabel"), tmp_path, parts)
    assert (made.embedder, made.index, made.store) == (embedder, index, None)
    assert made.calibration == tmp_path / ".casemate/calibration.json"
    own = build("defense", Part(use="mirabel", index={"use": "sqlite", "path": "own.db"}), tmp_path, parts)
    assert own.embedder is embedder
    assert own.index.path == tmp_path / "own.db"
    named = build("defense", Part(use="mirabel", index="sqlite"), tmp_path)
    assert (named.embedder, named.index.path) == (None, tmp_path / ".casemate/index.db")


@pytest.mark.parametrize(
    ("value", "says"),
    [(7, "option 'index' is 7"), ("mirabel", "no index is called 'mirabel'"), ({"path": "x"}, "option 'index' is")],
)
def test_an_option_that_is_no_plug_in_of_its_role_is_refused(value, says):
    with pytest.raises(ConfigError, match=says):
        build("defense", Part(use="mirabel", index=value))
