"""Messages that a new user meets first."""

import importlib
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from casemate import plugins
from casemate.app import open_app
from casemate.cli import cli
from casemate.cli.ask import _sentence
from casemate.errors import ConfigError
from casemate.rag.question_file import questions_in
from casemate.types import Action, Document, Verdict
from tests.fakes import BagOfWords


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The module of the server; the working directory is empty, and the embedder needs no model."""
    pytest.importorskip("fastapi", reason="needs casemate[serve]")
    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda role, name: BagOfWords if name == "minilm" else load(role, name))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("casemate.gateway.server")


@pytest.mark.parametrize("documents", [(), (Document("a", "a text"),)])
def test_serve_says_that_the_index_is_empty(documents, server, monkeypatch):
    if documents:
        with open_app() as app:
            app.index.add(documents, app.guard.rag.embedder.embed([d.content for d in documents]))
    monkeypatch.setattr(server, "serve", lambda app, show: show("http://x"))
    done = CliRunner().invoke(cli, ["serve"], catch_exceptions=False)
    assert "serving at http://x/v1" in done.stderr
    assert ("the index is empty" in done.stderr) == (not documents)


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_serve_says_that_it_observes_and_how_to_create_the_first_key(mode, server, monkeypatch):
    Path("casemate.yaml").write_text(f"guard: {{mode: {mode}}}\n")
    monkeypatch.setattr(server, "serve", lambda app, show: show("http://x"))
    start = partial(CliRunner().invoke, cli, catch_exceptions=False)
    first = start(["serve"]).stderr
    assert "create a key: casemate key create NAME" in first
    assert ("the guard observes" in first) == (mode == "observe")
    start(["key", "create", "app"])
    assert "create a key" not in start(["serve"]).stderr


def test_serve_says_that_the_address_is_in_use(server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(cli, ["serve", "--port", str(port)])
    assert str(done.exception) == f"127.0.0.1:{port} is in use; choose another with --port"


def test_a_missing_question_file_is_named_once():
    with pytest.raises(ConfigError) as error:
        questions_in(Path("absent.txt"))
    assert str(error.value) == "cannot read the questions in absent.txt: No such file or directory"


def test_a_verdict_shows_no_empty_evidence():
    evidence = {"target": "notes/1.md", "flagged": [], "withheld": [], "why": [], "p": 0.25}
    text = _sentence(Verdict("mirabel", False, Action.NONE, 1.0, 2.0, (), evidence))
    assert text == "mirabel: not flagged: score 1.0000, threshold 2.0000 (target notes/1.md, p 0.2500)"


@pytest.mark.parametrize(
    ("enforced", "what"), [(True, "withheld again"), (False, "would be withheld again (observe mode)")]
)
def test_a_document_withheld_for_an_earlier_question_is_not_called_flagged(enforced, what):
    verdict = Verdict("mirabel", True, Action.HIDE, 11.5, 13.7, ("d3",), {"why": ["before"]}, enforced)
    assert _sentence(verdict) == (
        f"mirabel: {what}, because an earlier question of this client was flagged; this question flags no other "
        "document (score 11.5000, threshold 13.7000): d3"
    )
    both = replace(verdict, evidence={"why": ["before", "closeness"]})
    assert _sentence(both).startswith("mirabel: flagged: score 11.5000")
