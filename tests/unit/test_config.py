import re
import traceback
from pathlib import Path

import pytest

from casemate import config
from casemate.config import PluginSpec
from casemate.errors import ConfigError, UnknownName
from casemate.plugins import build
from casemate.types import Secret


def test_a_missing_default_file_yields_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = config.read()
    assert (found.rag.embedder.use, found.guard.mode, found.rag.k) == ("minilm", "enforce", 5)


def test_an_empty_file_yields_the_defaults(tmp_path):
    (tmp_path / "casemate.yaml").write_text("")
    assert config.read(tmp_path / "casemate.yaml").rag.k == 5


def test_folder_of_a_configuration_is_the_folder_of_its_file(tmp_path):
    (tmp_path / "c.yaml").write_text("rag: {k: 3}")
    found = config.read(tmp_path / "c.yaml")
    assert (found.folder, found.file) == (tmp_path, tmp_path / "c.yaml")
    assert config.with_overrides(found, rag={"k": 4}).file == found.file


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"gaurd": {}},
            "unknown key 'gaurd'; did you mean 'guard'? "
            "allowed: rag, guard, calibrate, redteam, monitor, gateway, store, privacy",
        ),
        ({"guard": {"mod": "off"}}, "unknown key 'guard.mod'; did you mean 'mode'? allowed: mode, on_error, defenses"),
        (
            {"rag": {"chunk": {"token": 3}}},
            "unknown key 'rag.chunk.token'; did you mean 'tokens'? allowed: tokens, overlap",
        ),
        ({"folder": "x"}, "unknown key 'folder'; allowed: rag, guard, calibrate, "),
        (
            {"monitor": {"runs_per_false_alert": float("inf")}},  # no alarm would ever occur
            "monitor.runs_per_false_alert is inf: input should be a finite number",
        ),
        ({"gateway": {"timeout_s": float("nan")}}, "gateway.timeout_s is nan: input should be a finite number"),
        ({"rag": {"k": 0}}, "rag.k is 0: input should be greater than or equal to 1"),
        ({"rag": {"k": "many"}}, "rag.k is 'many'"),
        ({"guard": {"mode": "on"}}, "guard.mode is 'on': input should be 'enforce', 'observe' or 'off'"),
        (
            {"monitor": {"gate": "obsrve"}},
            "configuration: monitor.gate is 'obsrve': input should be a valid boolean, unable to interpret input, or "
            "input should be 'observe'",
        ),
        (
            {"monitor": {"gate": [{"x": "y"}]}},
            "monitor.gate is [{'x': 'y'}]: input should be a valid boolean, or input should be 'observe'",
        ),
        ({"guard": {"defenses": [{"threshold": "paper"}]}}, "guard.defenses.0.use is missing"),
        ([1, 2], "must be a mapping of keys to values, not list"),
    ],
)
def test_invalid_keys_and_values_are_refused_with_the_allowed_ones(raw, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.parse(raw)


def test_every_problem_of_a_file_is_reported():
    with pytest.raises(ConfigError, match=r"rag\.k is 0: .*; unknown key 'monitor\.every'; allowed: canaries"):
        config.parse({"monitor": {"every": "1h"}, "rag": {"k": 0}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("concurrency", 0),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("runs_per_false_alert", 0),
        ("interval", "0s"),
        ("interval", "1.5h"),
        ("notifications_per_hour", 0),
    ],
)
def test_monitor_options_out_of_range_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"monitor.{key} is "):
        config.parse({"monitor": {key: value}})


@pytest.mark.parametrize("content", [b"rag: [", b"\xff\xfe\x00", b"a: !!python/object/apply:os.system [ls]"])
def test_a_file_that_is_not_yaml_is_refused(tmp_path, content):
    (tmp_path / "casemate.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"casemate\.yaml"):
        config.read(tmp_path / "casemate.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("guard:\n  audience: {unentitled: nothing}\nguard:\n  mode: enforce\n", "'guard' occurs twice"),
        ("guard: {defenses: [{use: crawl_limit, questions: 9, questions: 90}]}", "'questions' occurs twice"),
        ("guard: !!map [a]", "expected a mapping node"),
        ("guard: !!map abc", "expected a mapping node"),
    ],
)
def test_a_key_that_occurs_twice_is_refused(tmp_path, text, problem):
    (tmp_path / "casemate.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        config.read(tmp_path / "casemate.yaml")


@pytest.mark.parametrize(
    "text", ["a: &a [1, 1]\nb: [*a, *a]", "a: &a [*a]", "[" * 5000, "rag: {k: 2024-13-45}", "rag: {max_file_mb: .inf}"]
)
def test_adversarial_yaml_is_refused(tmp_path, text):
    (tmp_path / "casemate.yaml").write_text(text)
    with pytest.raises(ConfigError):
        config.read(tmp_path / "casemate.yaml")


def test_unquoted_off_disables_the_guard(tmp_path):
    (tmp_path / "casemate.yaml").write_text("guard: {mode: off}")
    assert config.read(tmp_path / "casemate.yaml").guard.mode == "off"


def test_a_plug_in_name_cannot_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("U", "s3cret")
    with pytest.raises(ConfigError) as caught:
        config.parse({"rag": {"embedder": "${U}"}})
    assert "s3cret" not in str(caught.value)


def test_error_about_a_missing_file_suggests_casemate_init():
    with pytest.raises(ConfigError, match="casemate init"):
        config.read(Path("/nowhere/casemate.yaml"))


def test_plug_in_can_be_a_name_or_a_mapping():
    found = config.parse({"guard": {"defenses": ["crawl_limit", {"name": "mirabel", "significance": 0.1}]}})
    options = {"crawl_limit": {}, "mirabel": {"significance": 0.1}}
    assert {d.use: d.options for d in found.guard.defenses} == options


def test_duplicate_defense_is_refused():
    with pytest.raises(ConfigError, match="crawl_limit is given more than once; name each defense once"):
        config.parse({"guard": {"defenses": ["crawl_limit", "mirabel", {"use": "crawl_limit", "questions": 5}]}})


def test_environment_variables_are_expanded_and_hidden_in_repr(monkeypatch):
    monkeypatch.setenv("LLM_KEY", "s3cret")
    found = config.parse({"rag": {"generator": {"use": "openai", "model": "m", "api_key": "${LLM_KEY}"}}})
    key = found.rag.generator.options["api_key"]
    assert (key, isinstance(key, Secret)) == ("s3cret", True)
    assert "s3cret" not in repr(found)


def test_an_unset_variable_is_reported_by_name(monkeypatch):
    monkeypatch.delenv("LLM_KEY", raising=False)
    with pytest.raises(ConfigError, match="LLM_KEY is not set"):
        config.parse({"store": {"use": "sql", "url": "${LLM_KEY}"}})


@pytest.mark.parametrize(
    ("role", "spec", "error", "message"),
    [
        (
            "defense",
            PluginSpec(use="mirable"),
            UnknownName,
            "unknown defense 'mirable'; did you mean 'mirabel'? allowed: canary_token, ",
        ),
        ("embedder", PluginSpec(use="sqlite"), UnknownName, "unknown embedder 'sqlite'; allowed: minilm, openai"),
        (
            "embedder",
            PluginSpec(use="minilm", thread=2),
            ConfigError,
            "no option 'thread'; did you mean 'threads'? allowed: weights, cache, threads",
        ),
        ("embedder", PluginSpec(use="minilm", threads="two"), ConfigError, "option 'threads' is 'two'"),
        ("generator", PluginSpec(use="openai"), ConfigError, "needs the option 'model'"),
        (
            "generator",
            PluginSpec(use="openai", model="m", api_key="written"),
            ConfigError,
            "is a secret: write ${NAME} and set NAME in the environment; leave it out if none is needed",
        ),
        ("defense", PluginSpec(use="mirabel", mode="tight"), ConfigError, "option 'mode' is 'tight'"),
    ],
)
def test_unknown_plug_ins_and_options_are_refused(role, spec, error, message):
    with pytest.raises(error, match=re.escape(message)):
        build(role, spec)


URL = "https://ann:s3cret@rag.example/ask"


@pytest.mark.parametrize(
    "raw",
    [
        {"rag": {"k": URL}},
        {"rag": {"generator": [URL], "index": {"password": "s3cret"}}},
        {"gateway": {"tls_key": ["s3cret"]}},
        {"guard": {"audience": {"entitled": [{"groups": {"api_key": "s3cret"}}, URL]}}},
        {"gateway": {"otlp_endpoint": URL}},
        {"rag": {"k": "ann:s3cret@rag.example"}, "gateway": {"port": "https://rag.example?access_token=s3cret"}},
        {"rag": {"k": "host=db password=s3cret"}, "gateway": {"port": [{"Authorization": "Bearer s3cret"}]}},
    ],
)
def test_errors_show_no_password_that_was_written_into_a_wrong_key(raw):
    with pytest.raises(ConfigError) as caught:
        config.parse(raw)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("embedder", {"use": "minilm", "threads": URL}),
        ("target", {"use": "http", "url": "https://rag.example", "headers": [{"api_key": "s3cret"}]}),
        ("target", {"use": "http", "url": "https://rag.example", "headers": {"Authorization": "s3cret", "X-Pages": 5}}),
        ("crawler", {"use": "rag_crawler", "embedder": {"api_key": "s3cret"}}),
        ("generator", {"use": URL}),
    ],
)
def test_errors_show_no_password_that_was_written_into_a_wrong_option(role, options):
    with pytest.raises(ConfigError) as caught:
        build(role, PluginSpec.model_validate(options))
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("text", ["api_key: 's3cret", "\tapi_key: s3cret", "rag: {api_key: &k s3cret, k: *k}"])
def test_errors_of_yaml_show_no_line_of_the_file(tmp_path, text):
    (tmp_path / "casemate.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"line 1, column \d") as caught:
        config.read(tmp_path / "casemate.yaml")
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_errors_show_patterns_and_values_that_are_not_secret():
    with pytest.raises(ConfigError, match=re.escape(r"'^(https?://[^\s@]+)?$'")):
        config.parse({"gateway": {"otlp_endpoint": "localhost"}})
    with pytest.raises(ConfigError, match="'unit_keys' is 5"):
        build("defense", PluginSpec(use="mirabel", unit_keys=5))


def test_relative_paths_of_plug_ins_are_resolved_against_the_configuration(tmp_path):
    assert build("index", PluginSpec(use="sqlite"), tmp_path).path == tmp_path / ".casemate/index.db"
    assert build("index", PluginSpec(use="sqlite", path="x.db"), tmp_path).path == tmp_path / "x.db"
    assert build("index", PluginSpec(use="sqlite", path="/x.db"), tmp_path).path == Path("/x.db")


def test_certificate_without_a_key_is_refused():
    with pytest.raises(ConfigError, match="tls_cert and tls_key belong together"):
        config.parse({"gateway": {"tls_cert": "a.pem"}})
