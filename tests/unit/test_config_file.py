"""Edits of single values in the text of a casemate.yaml."""

import re

import pytest

from casemate import config as configuration
from casemate.config_file import set_values

NEW_VALUES = {"guard.mode": "enforce", "monitor.gate": True}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "{}\n",
        "{rag: {k: 3}} # flow\n",
        "rag: {k: 3}\n",
        "guard:\n  mode: observe   # for now\n  on_error: open # kept\nmonitor:\n  gate: observe # kept, too\n",
        "guard: {mode: observe} # one line\nmonitor: {interval: 1h}\n",
        "guard:\n    defenses: [mirabel] # four spaces\n",
        "guard: {mode: off}\nmonitor:\n  gate: false\n",
        "monitor: {} # empty\nstore: {use: sql, url: '${DB}'}",
        'guard:\n  "mode": "observe"\n',
    ],
)
def test_values_are_set_and_the_rest_is_unchanged(tmp_path, monkeypatch, text):
    monkeypatch.setenv("DB", "sqlite:///x.db")
    path = tmp_path / "casemate.yaml"
    path.write_text(text)
    path.chmod(0o640)
    before = configuration.read(path)
    assert set_values(path, NEW_VALUES) == ""
    after = configuration.read(path)
    assert (after.guard.mode, after.monitor.gate) == ("enforce", True)
    expected_config = before.model_dump()
    expected_config["guard"]["mode"], expected_config["monitor"]["gate"] = "enforce", True
    assert after.model_dump() == expected_config
    assert re.findall("#.*", path.read_text()) == re.findall("#.*", text)
    assert path.stat().st_mode & 0o777 == 0o640 and list(tmp_path.iterdir()) == [path]
    assert ("${DB}" in path.read_text()) is ("${DB}" in text)
    assert set_values(path, NEW_VALUES) == "" and configuration.read(path).model_dump() == expected_config


@pytest.mark.parametrize(
    "text", ["guard: [", "guard: {what: 1}\n", "guard: &a {mode: observe}\nmonitor: *a\n", "- 1\n"]
)
def test_a_file_that_cannot_be_edited_safely_is_unchanged(tmp_path, text):
    path = tmp_path / "casemate.yaml"
    path.write_text(text)
    assert set_values(path, NEW_VALUES) and path.read_text() == text
    assert set_values(tmp_path / "none.yaml", NEW_VALUES)


@pytest.mark.parametrize(
    "text", ["rag: {k: 3}\n", "guard:\n  mode: observe # mine\nmonitor:\n  interval: 1h\n", "{}\n"]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_are_kept(tmp_path, text, end):
    path = tmp_path / "casemate.yaml"
    path.write_bytes(text.replace("\n", end).encode())
    assert set_values(path, NEW_VALUES) == ""
    written = path.read_bytes().decode()
    assert written.count("\n") == written.count(end) >= 1 and written.count("\r") == written.count("\r\n")
    assert (configuration.read(path).guard.mode, configuration.read(path).monitor.gate) == ("enforce", True)
