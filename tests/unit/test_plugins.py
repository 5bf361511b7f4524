import json
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from casemate import plugins
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli import cli
from casemate.config import PluginSpec
from casemate.errors import ConfigError, UnknownName
from casemate.guard.defenses.mirabel import Mirabel
from casemate.plugins import build
from casemate.protocols import (
    Defense,
    Embedder,
    EventStore,
    Generator,
    Index,
    LanguageModel,
    plug_in_name,
)
from tests.fakes import BagOfWords


@pytest.fixture
def installed(monkeypatch):
    """Simulates installed packages that register entry points."""
    entries = []

    def register(role, name, value):
        entries.append(EntryPoint(name, value, f"casemate.{role}"))

    def entry_points(group, name=None):
        return [e for e in entries if group == e.group and name in {None, e.name}]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    return register


def test_all_built_in_plug_ins_load():
    for role in plugins.ROLES:
        for name in plugins.names(role):
            assert plugins.ROLES[role][1] in plugins.load(role, name).__mro__


def test_error_about_an_unknown_name_lists_the_available_names():
    known = "attached, milvus, pgvector, qdrant, sqlite"
    with pytest.raises(UnknownName, match=rf"unknown index 'sqlight'; did you mean 'sqlite'\? allowed: {known}"):
        plugins.load("index", "sqlight")


def test_plug_in_of_another_role_is_unknown():
    with pytest.raises(UnknownName, match="unknown generator 'minilm'; allowed: extractive, openai, simulated_reader"):
        plugins.load("generator", "minilm")


def test_another_package_adds_a_plug_in(installed):
    installed("defense", "theirs", "casemate.guard.defenses.mirabel:Mirabel")
    assert {"mirabel", "theirs"} <= set(plugins.names("defense"))
    assert plugins.load("defense", "theirs") is Mirabel


def test_rejects_an_entry_point_that_implements_no_role(installed):
    installed("defense", "theirs", "casemate.types:Document")
    with pytest.raises(ConfigError, match="must be a subclass of Defense"):
        plugins.load("defense", "theirs")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no license server')", "cannot be imported: RuntimeError: no license server; repair or"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("from casemate.protocols import DefenseV2", "cannot be imported: ImportError: cannot import name 'DefenseV2'"),
        ("class Theirs(Defense): ...", "must be a dataclass: its fields are its options"),
        ("Theirs = 7", "must be a subclass of Defense"),
        ("other = 7", "cannot be imported: AttributeError"),
        (
            "@dataclass\nclass Theirs(Defense):\n    async def on_retrive(self, query, retrieval): ...",
            "has the stage on_retrive, which this version never calls; did you mean 'on_retrieve'",
        ),
        (
            "@dataclass\nclass Theirs(Defense):\n    before: date | None = None",
            "has an option whose type is not imported at run time: name 'date' is not defined",
        ),
        (
            "import sys\n@dataclass\nclass Theirs(Defense):\n    before: sys.Date = None",
            "has an option whose type cannot be evaluated: AttributeError: module 'sys' has no attribute 'Date'",
        ),
        ("raise SystemExit(7)", "cannot be imported: SystemExit: 7; repair or"),
    ],
)
def test_error_about_an_invalid_entry_point_contains_the_reason(installed, tmp_path, monkeypatch, code, message):
    start = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom casemate import Defense\n"
    (tmp_path / "their_plug_in.py").write_text(start + code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_plug_in", raising=False)
    installed("defense", "theirs", "their_plug_in:Theirs")
    with pytest.raises(ConfigError, match=f"theirs = their_plug_in:Theirs of group casemate.defense {message}"):
        plugins.load("defense", "theirs")


def test_option_with_a_name_similar_to_a_stage_is_accepted(installed, tmp_path, monkeypatch):
    code = "from dataclasses import dataclass\nfrom casemate import Defense\n"
    code += "@dataclass\nclass Theirs(Defense):\n    on_missing: str = 'skip'\n"
    (tmp_path / "plug_in_with_an_option.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    installed("defense", "theirs", "plug_in_with_an_option:Theirs")
    assert build("defense", PluginSpec(use="theirs", on_missing="fail")).on_missing == "fail"


def test_output_of_a_plug_in_during_import_goes_to_stderr(installed, tmp_path, monkeypatch, capsys):
    code = "from casemate.guard.defenses.mirabel import Mirabel\nprint('loaded')\n"
    (tmp_path / "plug_in_that_prints.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    installed("defense", "theirs", "plug_in_that_prints:Mirabel")
    plugins.load("defense", "theirs")
    assert capsys.readouterr() == ("", "loaded\n")


def test_error_about_an_incompatible_plug_in_contains_the_required_version(monkeypatch):
    package = SimpleNamespace(name="acme-rag", version="2.0", requires=["numpy", "casemate-extra>=1", "casemate>=9.1"])
    entry = EntryPoint("theirs", "casemate.protocols:DefenseV9", "casemate.defense")._for(package)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    says = rf"\(acme-rag 2.0\) .* it requires casemate>=9.1, and {metadata.version('casemate')} is installed; repair or"
    with pytest.raises(ConfigError, match=says):
        plugins.load("defense", "theirs")


def test_lists_attacks_even_if_one_cannot_be_imported(installed):
    installed("attack", "theirs", "no_such_module:Theirs")
    done = CliRunner().invoke(cli, ["redteam", "list", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and "mba" in found["attacks"] and "theirs" not in found["attacks"]
    assert "No module named 'no_such_module'" in found["faults"][0]


def test_error_about_an_unknown_name_suggests_the_role_or_group_that_has_it(installed, monkeypatch):
    with pytest.raises(UnknownName, match="the role crawler has a plug-in of this name"):
        plugins.load("attack", "worm")
    with pytest.raises(UnknownName, match="if another package provides it, install that package"):
        plugins.load("attack", "theirs")
    installed("defence", "theirs", "their.package:Theirs")
    monkeypatch.setattr(plugins, "_installed", lambda: SimpleNamespace(groups={"casemate.defence", "console_scripts"}))
    with pytest.raises(UnknownName, match=r"in the group casemate.defence; did you mean 'casemate.defense'\?"):
        plugins.load("defense", "theirs")


def test_hint_to_install_a_package_does_not_depend_on_the_texts_of_names(installed):
    installed("attack", "did you mean", "their.package:Theirs")
    with pytest.raises(UnknownName, match="if another package provides it, install that package"):
        plugins.load("attack", "xyzzy")


def test_name_of_a_plug_in_is_its_entry_point_or_its_module(installed):
    @dataclass
    class Unregistered(Mirabel):
        """A defense without an entry point."""

    installed("defense", "theirs", "tests.campaign_process:HideAsked")
    assert plug_in_name(plugins.load("defense", "theirs")()) == "theirs"
    assert [plug_in_name(one) for one in (Mirabel(), Unregistered())] == ["mirabel", "Unregistered"]


def test_entry_point_cannot_replace_a_built_in_plug_in(installed):
    installed("defense", "mirabel", "their.package:Weaker")
    message = "the entry point mirabel = their.package:Weaker .* built-in casemate.guard.defenses.mirabel:Mirabel"
    with pytest.raises(ConfigError, match=message):
        plugins.load("defense", "mirabel")
    with pytest.raises(ConfigError, match=message):
        build("defense", PluginSpec(use="mirabel"))
    assert plugins.load("defense", "summarize")


def test_two_packages_cannot_register_the_same_name(installed):
    installed("defense", "theirs", "casemate.guard.defenses.mirabel:Mirabel")
    installed("defense", "theirs", "other.package:Defense")
    with pytest.raises(ConfigError, match="theirs = casemate.guard.defenses.mirabel:Mirabel .* other.package:Defense"):
        plugins.load("defense", "theirs")


def test_every_base_class_belongs_to_one_role():
    assert [plugins.role_of(base) for _, base in plugins.ROLES.values()] == list(plugins.ROLES)


def test_recognizes_plug_in_options_by_type():
    assert plugins.injected(Mirabel) == {"embedder": Embedder, "index": Index, "store": EventStore}
    assert plugins.injected(plugins.load("store", "sql")) == {}

    @dataclass
    class Both(Defense):
        """A required plug-in, an optional one, and two plain options."""

        model: LanguageModel
        generator: Generator | None = None
        name: str = ""
        count: int | None = None

    assert plugins.injected(Both) == {"model": LanguageModel, "generator": Generator}


def test_plug_in_option_defaults_to_the_component_of_the_system(tmp_path):
    embedder, index = BagOfWords(), SqliteIndex(tmp_path / "index.db")
    parts = {Embedder: embedder, Index: index}
    made = build("defense", PluginSpec(use="mirabel"), tmp_path, parts)
    assert (made.embedder, made.index, made.store) == (embedder, index, None)
    assert made.calibration == tmp_path / ".casemate/calibration.json"
    own = build("defense", PluginSpec(use="mirabel", index={"use": "sqlite", "path": "own.db"}), tmp_path, parts)
    assert own.embedder is embedder
    assert own.index.path == tmp_path / "own.db"
    named = build("defense", PluginSpec(use="mirabel", index="sqlite"), tmp_path)
    assert (named.embedder, named.index.path) == (None, tmp_path / ".casemate/index.db")


@pytest.mark.parametrize(
    ("value", "message"),
    [(7, "option 'index' is 7"), ("mirabel", "unknown index 'mirabel'"), ({"path": "x"}, "option 'index' is")],
)
def test_rejects_a_plug_in_option_of_another_role(value, message):
    with pytest.raises(ConfigError, match=message):
        build("defense", PluginSpec(use="mirabel", index=value))


@pytest.mark.parametrize(
    ("role", "options", "message"),
    [
        ("attack", {"use": "mbaa"}, "unknown attack 'mbaa'"),
        ("attack", {"use": "mba", "maskz": 3}, "attack 'mba' has no option 'maskz'"),
        ("attack", {"use": "mba", "masks": "many"}, "attack 'mba', option 'masks' is 'many'"),
        ("crawler", {"use": "rag_thief", "model": {"use": "extractiv"}}, "'rag_thief'|unknown"),
        ("generator", {"use": "openai"}, "needs the option 'model'"),
    ],
)
def test_validates_names_and_options_without_building(role, options, message):
    with pytest.raises(ConfigError, match=message):
        plugins.validate(role, PluginSpec.model_validate(options))


def test_valid_plug_ins_pass_the_validation():
    for role in ("attack", "crawler"):
        for name in plugins.names(role):
            plugins.validate(role, PluginSpec(use=name))
    plugins.validate("generator", PluginSpec(use="simulated_reader"))
