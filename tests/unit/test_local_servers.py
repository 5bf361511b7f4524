"""Detection of local model servers, and `casemate init` with fake servers."""

import importlib
import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from casemate import config as configuration
from casemate.backends import local_servers
from casemate.backends.local_servers import LocalServer, find_local_servers
from casemate.cli import cli
from casemate.errors import ConfigError
from casemate.plugins import build

init_command = importlib.import_module("casemate.cli.init")  # the package has a function of this name


@contextmanager
def server(*models, status=200, body=None):
    """A server that lists models; yields its port and the requested paths."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            answer = body if body is not None else json.dumps({"data": [{"id": m} for m in models]}).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield running.server_address[1], asked
    finally:
        running.shutdown()
        running.server_close()


@pytest.fixture
def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class TestDetection:
    def test_finds_servers_and_their_chat_models(self, closed_port):
        with server("nomic-embed-text", "llama3.2:3b", "org/model-7b") as (one, asked), server("m") as (two, _):
            found = find_local_servers({"ollama": one, "llama.cpp": closed_port, "vllm": two}, 5.0)
        assert found == [LocalServer("ollama", one, ("llama3.2:3b", "org/model-7b")), LocalServer("vllm", two, ("m",))]
        assert asked == ["/v1/models"]
        assert found[0].base_url == f"http://127.0.0.1:{one}/v1"

    @pytest.mark.parametrize(
        "body",
        [b"", b"<html>", b"[]", b'{"data": 3}', b'{"data": [{"id": 7}, "x"]}', b'{"data": []}', b"[" * 100_000],
    )
    def test_ignores_services_that_are_not_model_servers(self, body):
        with server(body=body) as (port, _):
            assert find_local_servers({"vllm": port}, 5.0) == []

    def test_ignores_a_server_that_requires_authentication(self):
        with server("m", status=401) as (port, _):  # the gateway of Casemate has the default port of vLLM
            assert find_local_servers({"vllm": port}, 5.0) == []

    @pytest.mark.parametrize("name", ["${HOME}", "a\nb: c", "x" * 201, "[red]", "bge-m3", "all-minilm", ""])
    def test_omits_unsafe_names_and_embedding_models(self, name):
        with server(name) as (port, _):
            assert find_local_servers({"ollama": port}, 5.0) == []

    def test_times_out_if_a_server_never_answers(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            before = time.monotonic()
            assert find_local_servers({"ollama": listener.getsockname()[1]}, 0.2) == []
            assert time.monotonic() - before < 30  # the timeout is 0.2 s; without it the call would not return

    def test_does_not_use_proxies(self, monkeypatch, closed_port):
        with server("m") as (proxy, asked):
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
            assert find_local_servers({"ollama": closed_port}, 5.0) == [] and asked == []

    def test_default_ports_are_those_of_the_products(self):
        assert dict(local_servers.PORTS) == {"ollama": 11434, "llama.cpp": 8080, "vllm": 8000}


@pytest.fixture
def init(tmp_path, monkeypatch):
    """Runs ``casemate init`` with fake servers; returns its result and the configuration file."""
    monkeypatch.chdir(tmp_path)

    def run(*words, found=(), interactive=None, keys=None):
        monkeypatch.setattr(init_command, "find_local_servers", lambda ports: list(found))
        monkeypatch.setattr(init_command, "is_terminal", lambda: bool(interactive))
        done = CliRunner().invoke(cli, ["init", *words], catch_exceptions=False, input=keys)
        assert done.exit_code == 0, done.output
        return done, configuration.read(tmp_path / "casemate.yaml")

    return run


OLLAMA = LocalServer("ollama", 11434, ("llama3.2:3b", "qwen2.5:7b"))
VLLM = LocalServer("vllm", 8000, ("org/model",))


class TestInit:
    def test_writes_all_protections_in_observe_mode(self, init):
        done, written = init()
        assert (written.guard.mode, written.monitor.gate) == ("observe", "observe")
        assert [part.use for part in written.guard.defenses] == ["mirabel", "crawl_limit"]
        for part in written.guard.defenses:
            build("defense", part)
        assert "casemate enforce" in done.stderr

    def test_deleting_two_comment_signs_enables_quorum(self, init, tmp_path, monkeypatch):
        init()
        monkeypatch.setenv("QUORUM_SECRET", "s" * 16)
        file = tmp_path / "casemate.yaml"
        file.write_text(
            file.read_text().replace("# - {use: quorum", "- {use: quorum").replace("# audience", "audience")
        )
        written = configuration.read(file)
        assert [part.use for part in written.guard.defenses] == ["mirabel", "quorum", "crawl_limit"]
        assert written.guard.audience.unentitled == "quorum"
        build("defense", written.guard.defenses[1])

    def test_written_options_are_the_defaults(self, init):
        _, written = init()
        for part in written.guard.defenses:
            default, made = build("defense", configuration.PluginSpec(use=part.use)), build("defense", part)
            for name, value in part.options.items():
                assert getattr(made, name) == value
            if part.use == "crawl_limit":
                assert made.questions == default.questions

    def test_uses_the_extractive_generator_without_a_server(self, init):
        assert init()[1].rag.generator.use == "extractive"

    def test_lists_servers_without_using_them_if_there_is_no_terminal(self, init):
        Path("docs").mkdir()
        done, written = init("docs", found=[OLLAMA])
        assert written.rag.generator.use == "extractive"
        assert "casemate init --force --generator ollama:llama3.2:3b docs" in done.stderr

    @pytest.mark.parametrize(
        ("words", "model"),
        [
            (("--yes",), "llama3.2:3b"),
            (("--generator", "ollama"), "llama3.2:3b"),
            (("--generator", "ollama:qwen2.5:7b"), "qwen2.5:7b"),
        ],
    )
    def test_option_selects_a_server(self, init, words, model):
        _, written = init(*words, found=[OLLAMA, VLLM])
        part = written.rag.generator
        assert (part.use, part.options["model"]) == ("openai", model)
        assert part.options["base_url"] == "http://127.0.0.1:11434/v1"

    @pytest.mark.parametrize(("keys", "use"), [("\n", "openai"), ("y\n", "openai"), ("n\n", "extractive")])
    def test_prompts_for_a_server_on_a_terminal(self, init, keys, use):
        _, written = init(found=[OLLAMA], interactive=True, keys=keys)
        assert written.rag.generator.use == use

    def test_gateway_port_differs_from_the_port_of_the_model_server(self, init):
        _, written = init("--yes", found=[VLLM])
        assert written.gateway.port == 8001

    def test_extractive_option_searches_for_no_server(self, init, monkeypatch):
        def fail(ports):
            raise AssertionError

        monkeypatch.setattr(init_command, "find_local_servers", fail)
        runner = CliRunner().invoke(cli, ["init", "--generator", "extractive"], catch_exceptions=False)
        assert runner.exit_code == 0

    def test_json_output_lists_the_servers(self, init):
        done, _ = init("--json", found=[VLLM])
        found = json.loads(done.stdout)
        assert found["written"] == "casemate.yaml" and found["generator"] == "extractive"
        assert found["servers"] == [
            {"name": "vllm", "port": 8000, "models": ["org/model"], "base_url": "http://127.0.0.1:8000/v1"}
        ]

    @pytest.mark.parametrize(
        ("wanted", "says"),
        [("olama", "did you mean 'ollama'"), ("vllm", "no vllm with a model answers"), ("ollama:x", "it has llama3.2")],
    )
    def test_missing_server_is_an_error_and_writes_nothing(self, init, tmp_path, wanted, says):
        with pytest.raises(ConfigError, match=says):
            init("--generator", wanted, found=[OLLAMA])
        assert not (tmp_path / "casemate.yaml").exists()

    def test_writes_valid_yaml_for_any_corpus_name(self, init, tmp_path):
        Path('a: "b" # {c}').mkdir()
        init('a: "b" # {c}', "--yes", found=[OLLAMA])
        assert yaml.safe_load((tmp_path / "casemate.yaml").read_text())["rag"]["corpus"] == 'a: "b" # {c}'
