from pathlib import Path

import pytest

from casemate import config
from casemate.app import build
from casemate.config import Part
from casemate.errors import ConfigError, UnknownName
from casemate.types import Secret


def test_no_file_means_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = config.read()
    assert (found.rag.embedder.use, found.guard.mode, found.rag.k) == ("minilm", "enforce", 5)


def test_an_empty_file_means_the_defaults(tmp_path):
    (tmp_path / "casemate.yaml").write_text("")
    assert config.read(tmp_path / "casemate.yaml").rag.k == 5


def test_relative_paths_start_at_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("rag: {k: 3}")
    assert config.read(tmp_path / "c.yaml").folder == tmp_path


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            {"gaurd": {}},
            "gaurd is no known key; known: rag, guard, calibrate, redteam, monitor, gateway, store, privacy",
        ),
        ({"rag": {"chunk": {"token": 3}}}, "rag.chunk.token is no known key; known: tokens, overlap"),
        ({"folder": "x"}, "folder is no known key"),
        ({"rag": {"k": 0}}, "rag.k is 0: input should be greater than or equal to 1"),
        ({"rag": {"k": "many"}}, "rag.k is 'many'"),
        ({"guard": {"mode": "on"}}, "guard.mode is 'on': input should be 'enforce', 'observe' or 'off'"),
        ({"guard": {"defenses": [{"threshold": "paper"}]}}, "guard.defenses.0.use is missing"),
        ([1, 2], "must hold keys and values"),
    ],
)
def test_what_is_unknown_or_out_of_range_is_refused_with_what_is_allowed(raw, says):
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        config.parse(raw)


@pytest.mark.parametrize("content", [b"rag: [", b"\xff\xfe\x00", b"a: !!python/object/apply:os.system [ls]"])
def test_a_file_that_is_no_yaml_is_refused(tmp_path, content):
    (tmp_path / "casemate.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"casemate\.yaml"):
        config.read(tmp_path / "casemate.yaml")


@pytest.mark.parametrize(
    "text", ["a: &a [1, 1]\nb: [*a, *a]", "a: &a [*a]", "[" * 5000, "rag: {k: 2024-13-45}", "rag: {max_file_mb: .inf}"]
)
def test_hostile_yaml_is_refused_at_once(tmp_path, text):
    (tmp_path / "casemate.yaml").write_text(text)
    with pytest.raises(ConfigError):
        config.read(tmp_path / "casemate.yaml")


def test_a_bare_off_turns_the_guard_off(tmp_path):
    (tmp_path / "casemate.yaml").write_text("guard: {mode: off}")
    assert config.read(tmp_path / "casemate.yaml").guard.mode == "off"


def test_a_plug_in_is_not_named_by_a_secret(monkeypatch):
    monkeypatch.setenv("U", "s3cret")
    with pytest.raises(ConfigError) as caught:
        config.parse({"rag": {"embedder": "${U}"}})
    assert "s3cret" not in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="casemate init"):
        config.read(Path("/nowhere/casemate.yaml"))


def test_a_plug_in_is_a_name_or_a_mapping():
    found = config.parse({"guard": {"defenses": ["mirabel", {"name": "mirabel", "significance": 0.1}]}})
    assert [(d.use, d.options) for d in found.guard.defenses] == [("mirabel", {}), ("mirabel", {"significance": 0.1})]


def test_variables_come_from_the_environment_and_do_not_show(monkeypatch):
    monkeypatch.setenv("LLM_KEY", "s3cret")
    found = config.parse({"rag": {"generator": {"use": "openai", "model": "m", "api_key": "${LLM_KEY}"}}})
    key = found.rag.generator.options["api_key"]
    assert (key, isinstance(key, Secret)) == ("s3cret", True)
    assert "s3cret" not in repr(found)


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("LLM_KEY", raising=False)
    with pytest.raises(ConfigError, match="LLM_KEY is not set"):
        config.parse({"store": {"use": "sql_events", "url": "${LLM_KEY}"}})


@pytest.mark.parametrize(
    ("role", "part", "error", "says"),
    [
        ("defense", Part(use="mirable"), UnknownName, "no defense is called 'mirable'; known: canary_token, "),
        ("embedder", Part(use="sqlite"), UnknownName, "no embedder is called 'sqlite'; known: minilm, openai"),
        ("embedder", Part(use="minilm", thread=2), ConfigError, "no option 'thread'; known: weights, cache, threads"),
        ("embedder", Part(use="minilm", threads="two"), ConfigError, "option 'threads' is 'two'"),
        ("generator", Part(use="openai"), ConfigError, "needs the option 'model'"),
        ("generator", Part(use="openai", model="m", api_key="written"), ConfigError, r"is a secret: write \$\{NAME\}"),
        ("defense", Part(use="mirabel", mode="tight"), ConfigError, "option 'mode' is 'tight'"),
    ],
)
def test_wiring_refuses_what_no_plug_in_reads(role, part, error, says):
    with pytest.raises(error, match=says):
        build(role, part)


def test_relative_paths_of_plug_ins_start_at_the_configuration(tmp_path):
    assert build("index", Part(use="sqlite"), tmp_path).path == tmp_path / ".casemate/index.db"
    assert build("index", Part(use="sqlite", path="x.db"), tmp_path).path == tmp_path / "x.db"
    assert build("index", Part(use="sqlite", path="/x.db"), tmp_path).path == Path("/x.db")


def test_a_certificate_needs_its_key():
    with pytest.raises(ConfigError, match="tls_cert and tls_key belong together"):
        config.parse({"gateway": {"tls_cert": "a.pem"}})
