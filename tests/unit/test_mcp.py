"""The MCP tools with the client of the official SDK: over HTTP, over stdio, and as a proxy of another server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from itertools import chain

import httpx
import pytest

pytest.importorskip("mcp", reason="the extra casemate[mcp] is not installed")
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typer.testing import CliRunner

from casemate.cli import cli
from casemate.errors import BackendError, ConfigError
from casemate.gateway import state
from casemate.gateway.auth.keys import ApiKeyStore
from casemate.gateway.auth.rate_limits import RateLimits, Rejection
from casemate.gateway.errors import ApiError
from casemate.gateway.mcp import upstream
from casemate.gateway.mcp.server import _Stdio
from casemate.gateway.mcp.tools import GuardedTools
from casemate.gateway.mcp.upstream import Upstream, UpstreamTools
from casemate.gateway.server import uvicorn_config
from casemate.gateway.state import Gateway
from casemate.gateway.tracing import RequestTracer
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.turn import OpenTurns
from casemate.types import Outcome, Secret
from tests import gateways
from tests.fakes import documents
from tests.gateways import SECRET_WORDS, HideNamed, key, make

DOCUMENTS = {d.id: d for d in documents(40)}
SECRET = DOCUMENTS["d3"].text
HIDDEN = "only3"


def program(kind, folder):
    """Parameters of a server process on stdio."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return StdioServerParameters(
        command=sys.executable, args=["-m", "tests.mcp_process", kind, str(folder)], env=environment
    )


LIBRARY = f"{sys.executable} -m tests.mcp_process library -"


class HideFor(HideNamed):
    """Hides d3 if the query contains a word."""

    async def on_retrieve(self, query, retrieval):
        return await super().on_retrieve(query, retrieval) if "attack" in query.text else Outcome(retrieval)


@contextmanager
def serving(app, make_tools=GuardedTools):
    """Serves in a thread; yields the address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateways, "uvicorn_config", lambda app: uvicorn_config(app, make_tools))
        with gateways.serving(app) as url:
            yield url


@asynccontextmanager
async def connected(url, text, mode="auto"):
    """An SDK client with an API key."""
    headers = {"Authorization": f"Bearer {text}"}
    async with httpx2.AsyncClient(headers=headers, timeout=20) as http:
        async with Client(streamable_http_client(f"{url}/v1/mcp", http_client=http), mode=mode) as client:
            yield client


def found(result):
    """Ids of the documents in a result, after a check that it contains no other data."""
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content
    for one in result.structured_content["documents"]:
        assert one.keys() == {"id", "source", "title", "text"}
    assert not any(word in result.model_dump_json() for word in SECRET_WORDS)
    return [one["id"] for one in result.structured_content["documents"]]


def error_message(result):
    """The message of a rejected call."""
    assert result.is_error
    assert result.structured_content is None
    return result.content[0].text


def build(*given, **named):
    """Builds a system outside of the running event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make, *given, **named).result()


@pytest.fixture
def app(tmp_path):
    return build(tmp_path, defenses=(HideNamed("d3"),), mcp=True)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_guard_applies_to_answers_and_documents_over_http(app, mode):
    text = key(app, retrieve=True)
    with serving(app) as url:
        async with connected(url, text, mode) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == {"ask", "search"}
            ids = found(await client.call_tool("search", {"query": f"{HIDDEN} {SECRET}"}))
            answer = await client.call_tool("ask", {"question": f"{HIDDEN} {SECRET}"})
    assert len(ids) == 5 and "d3" not in ids
    assert answer.content[0].text.split() == ids  # the fake generator repeats the ids of its context
    assert answer.structured_content is None


@pytest.mark.parametrize("clients", [1, 2])
async def test_searches_disclose_at_most_the_word_budget_of_each_key(tmp_path, clients):
    """Each document has thirteen words and its id; one of the words is unique."""
    limit = CrawlLimit(budget=200, questions=10**4, alarm=1e-12)
    app = build(tmp_path, defenses=(limit,), mcp=True)
    keys, obtained = [key(app, name=f"agent {c}", retrieve=True) for c in range(clients)], []
    with serving(app) as url:
        for text in keys:
            async with connected(url, text) as client:
                queries = [{"query": f"only{number} only{number + 1}"} for number in range(0, 40, 2)]
                results = [await client.call_tool("search", query) for query in queries]
            lengths = {}
            for one in chain.from_iterable(result.structured_content["documents"] for result in results):
                assert DOCUMENTS[one["id"]].text.startswith(one["text"])
                lengths[one["id"]] = max(lengths.get(one["id"], 0), 1 + len(one["text"].split()))
            obtained.append(sum(lengths.values()))
    assert all(180 <= words <= 200 for words in obtained)


async def test_guard_applies_to_answers_and_documents_over_stdio(tmp_path):
    async with Client(program("guarded", tmp_path)) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == {"ask", "search"}
        ids = found(await client.call_tool("search", {"query": SECRET}))
        answer = await client.call_tool("ask", {"question": SECRET})
        assert "text is required" in error_message(await client.call_tool("search", {"query": 3}))
        assert "question is empty" in error_message(await client.call_tool("ask", {"question": " "}))
    assert len(ids) == 5 and "d3" not in ids
    assert answer.content[0].text.split() == ids


@pytest.mark.parametrize("header", [None, "Bearer cmk_0000000000000000_" + "x" * 43, "Basic x"])
def test_http_requires_a_valid_key(app, header):
    headers = {"Authorization": header} if header else {}
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "ask", "arguments": {"question": "x"}},
    }
    with serving(app) as url:
        for method in ("POST", "GET", "DELETE"):
            answer = httpx.request(method, f"{url}/v1/mcp", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_rejects_a_metrics_key_and_a_revoked_key(app):
    revoked = key(app, name="gone")
    store = ApiKeyStore(app.store)
    store.sync()
    store.revoke(store.named("gone").id)
    metrics = key(app, "metrics")
    with serving(app) as url:
        for text, status in ((metrics, 403), (revoked, 401)):
            headers = {"Authorization": f"Bearer {text}"}
            assert httpx.post(f"{url}/v1/mcp", json={}, headers=headers).status_code == status


def test_route_is_disabled_by_default(tmp_path):
    app = build(tmp_path)
    headers = {"Authorization": f"Bearer {key(app)}"}
    with gateways.serving(app) as url:
        assert httpx.post(f"{url}/v1/mcp", json={}, headers=headers).status_code == 404


async def test_key_without_the_retrieve_permission_can_only_ask(app):
    text = key(app)
    with serving(app) as url:
        async with connected(url, text) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["ask"]
            same = error_message(await client.call_tool("search", {"query": "only5"}))
            assert same == error_message(await client.call_tool("no such tool", {}))


async def test_applies_the_labels_of_the_key(tmp_path):
    app = build(tmp_path, count=0, mcp=True)
    secret = documents(1, metadata={"acl": ["board"]})
    open_ = documents(5, seed=1)[1:]
    await app.guard.add([*secret, *open_])
    keys = {"board": key(app, retrieve=True, labels=("board",)), "other": key(app, retrieve=True)}
    with serving(app) as url:
        for name, text in keys.items():
            async with connected(url, text) as client:
                ids = found(await client.call_tool("search", {"query": secret[0].text}))
                assert ("d0" in ids) == (name == "board")


async def test_tool_calls_and_other_messages_have_separate_rate_limits(app):
    limited = key(app, retrieve=True, requests_per_minute=2)
    with serving(app) as url:
        async with connected(url, limited, "legacy") as client:  # two messages before the first call, or more
            for _ in range(2):
                await client.list_tools()
                found(await client.call_tool("search", {"query": SECRET}))
            message = error_message(await client.call_tool("search", {"query": SECRET}))
        headers = {"Authorization": f"Bearer {limited}"}
        statuses = [httpx.post(f"{url}/v1/mcp", json={}, headers=headers).status_code for _ in range(10)]
        app.store.flush()
        assert len(list(app.store.scan("verdict"))) == 2
    assert re.fullmatch(r"Too many requests for this API key. Try again in \d+ seconds.", message)
    assert 400 in statuses and statuses[-1] == 429


async def test_document_withheld_for_the_question_is_withheld_for_all_its_queries(tmp_path):
    """The defense hides d3 only if the user's question is asked; the rewritten query alone would retrieve it."""
    app = build(tmp_path, defenses=(HideFor(),), mcp=True)
    text = key(app, retrieve=True)
    with serving(app) as url:
        async with connected(url, text) as client:
            assert "d3" in found(await client.call_tool("search", {"query": HIDDEN}))
            question = f"attack {SECRET}"
            asked = {"query": HIDDEN, "question": question}
            assert "d3" not in found(await client.call_tool("search", asked))
            assert "d3" not in found(await client.call_tool("search", {**asked, "query": f"{HIDDEN} again"}))
            assert "d3" in found(await client.call_tool("search", {"query": HIDDEN}))  # a different turn


async def test_records_calls_with_their_client(app):
    text = key(app, retrieve=True)
    with serving(app) as url:
        async with connected(url, text) as client:
            await client.call_tool("search", {"query": SECRET})
        app.store.flush()
        (verdict,), requests = app.store.scan("verdict"), app.store.scan("request")
        (id_,) = [one.id for one in _keys(app)]
    assert verdict.body["client"] == id_
    assert {e.body["route"] for e in requests} == {"/v1/mcp"}
    assert verdict.body["request"] in {e.body["request"] for e in requests}


async def test_tool_call_has_a_span_in_its_request_and_an_unknown_tool_has_none(app, monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(state, "open_tracer", lambda address: RequestTracer(provider))
    text = key(app, retrieve=True)
    with serving(app) as url:
        async with connected(url, text) as client:
            await client.call_tool("search", {"query": SECRET})
            await client.call_tool("secretword", {})
    spans = exporter.get_finished_spans()
    (call,) = [span for span in spans if span.name.startswith("execute_tool")]
    (request,) = [span for span in spans if span.context.span_id == call.parent.span_id]
    assert request.name == "POST /v1/mcp"
    assert dict(call.attributes) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "mcp.method.name": "tools/call",
    }
    assert {span.name for span in spans if span.parent and span.parent.span_id == call.context.span_id} >= {"retrieval"}
    assert not any("secretword" in span.to_json() or HIDDEN in span.to_json() for span in spans)


@pytest.mark.parametrize("stdio", [False, True])
async def test_overloaded_gateway_returns_retry_after(app, monkeypatch, stdio):
    text, expected = key(app, retrieve=True), "The service is busy. Try again in 1 second."
    if stdio:
        admission = _Stdio(Gateway(app), ApiKeyStore(app.store).named("someone"))
        admission.gateway.limits.concurrency = 0
        with pytest.raises(ApiError, match=expected):
            async with admission.call(None):
                pass
        return
    with serving(app) as url:
        async with connected(url, text, "legacy") as client:
            await client.list_tools()
            monkeypatch.setattr(RateLimits, "acquire_slot", lambda self, key: Rejection("busy", 1))
            with pytest.raises(MCPError) as refusal:
                await client.call_tool("search", {"query": SECRET})
    assert refusal.value.error.message == expected
    assert refusal.value.error.data == {"code": "overloaded", "retry_after_s": 1}


async def test_error_does_not_contain_the_cause_of_a_failure(tmp_path):
    app = build(tmp_path, generator=gateways.Down(), mcp=True)
    text = key(app)
    with serving(app) as url:
        async with connected(url, text) as client:
            message = error_message(await client.call_tool("ask", {"question": "only5"}))
    assert message == "The service is temporarily unavailable."


def library_variables():
    return {"PYTHONPATH": os.pathsep.join(sys.path)}


LIMITED = {"search": ("query", "limit")}


@asynccontextmanager
async def guarded_library(app, tools=(), address=LIBRARY, token=None, **variables):
    """An SDK client of a server that guards the library."""
    text = key(app, retrieve=True)
    other = Upstream(address, dict(tools), token, {**library_variables(), **variables})
    with serving(app, lambda gateway: UpstreamTools(gateway, other)) as url:
        async with connected(url, text) as client:
            yield client


async def test_guard_applies_to_upstream_results_with_one_verdict_of_each_defense(app):
    async with guarded_library(app) as client:
        offered = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert "read_document" not in offered  # it has no query
        assert "documents" in offered["search"].output_schema["properties"]
        ids = found(await client.call_tool("search", {"query": SECRET}))
        app.store.flush()
        (verdict,) = app.store.scan("verdict")  # one verdict of each defense
        assert verdict.body["flagged"] and verdict.body["hidden"] == ["d3"]
        text = found(await client.call_tool("search_text", {"query": SECRET}))
        free = found(await client.call_tool("search", {"query": DOCUMENTS["d7"].text}))
    assert len(ids) == 5 and "d3" not in ids
    assert len(text) == 5 and "d3" not in text
    assert free[0] == "d7" and len(free) == 5


@pytest.mark.slow
async def test_number_of_documents_does_not_depend_on_the_upstream_result(app):
    """The upstream server returns the document only if it has it; else nothing or an echo of the query."""
    async with guarded_library(app) as client:
        for query in (SECRET, DOCUMENTS["d7"].text, "a text that is in no document"):
            for name in ("search_member", "search_echo"):
                ids = found(await client.call_tool(name, {"query": query}))
                assert len(ids) == 5 and "d3" not in ids


@pytest.mark.slow
async def test_forwards_only_configured_arguments_to_the_upstream_server(app, tmp_path):
    async with guarded_library(app) as client:
        (search,) = [tool for tool in (await client.list_tools()).tools if tool.name == "search"]
        assert set(search.input_schema["properties"]) == {"query", "question"}
        assert search.input_schema["additionalProperties"] is False
        for name in ("where", "limit", "secretword"):
            message = error_message(await client.call_tool("search", {"query": "only5", name: "x"}))
            assert "secretword" not in message
    (tmp_path / "other").mkdir()
    async with guarded_library(build(tmp_path / "other", mcp=True), LIMITED) as client:
        (search,) = (await client.list_tools()).tools
        assert set(search.input_schema["properties"]) == {"query", "limit", "question"}
        assert found(await client.call_tool("search", {"query": DOCUMENTS["d7"].text, "limit": 3}))[0] == "d7"
        error_message(await client.call_tool("search", {"query": "only5", "where": "x"}))


@pytest.mark.slow
async def test_offers_read_only_tools_by_default_or_else_the_configured_ones(app, tmp_path):
    async with guarded_library(app) as client:
        offered = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert offered["search"].annotations.read_only_hint is True
    assert offered.keys().isdisjoint({"execute", "search_unmarked", "environment"})
    assert "summarize" not in offered  # its argument is a text, not a query
    assert "search_shelf" not in offered  # it has another required argument
    named = {"execute": (), "search_unmarked": (), "search_shelf": ("query", "shelf"), "search": ()}
    (tmp_path / "other").mkdir()
    async with guarded_library(build(tmp_path / "other", mcp=True), named) as client:
        hints = {tool.name: tool.annotations.read_only_hint for tool in (await client.list_tools()).tools}
    assert hints == {"execute": False, "search_unmarked": None, "search_shelf": True, "search": True}


@pytest.mark.slow
async def test_question_argument_has_the_limits_of_a_query(app, tmp_path, monkeypatch):
    text, kept = key(app, retrieve=True), []
    monkeypatch.setattr(OpenTurns, "of", lambda *given: kept.append(given))
    with serving(app) as url:
        async with connected(url, text) as client:
            for question in ("x" * 20_001, "\0", " "):
                error_message(await client.call_tool("search", {"query": "only5", "question": question}))
    asked = []
    (tmp_path / "other").mkdir()
    async with guarded_library(build(tmp_path / "other", mcp=True)) as client:
        monkeypatch.setattr(UpstreamTools, "_found", lambda *given: asked.append(given))
        message = error_message(await client.call_tool("search", {"query": "only5", "question": "x" * 20_001}))
    assert "at most 20000 are allowed" in message
    assert not kept and not asked


@pytest.mark.slow
async def test_upstream_command_receives_only_configured_environment_variables(app, monkeypatch):
    monkeypatch.setenv("CASEMATE_TEST_A", "7")  # set in this process, not configured
    query = {"query": DOCUMENTS["d20"].text}
    async with guarded_library(app, {"environment": ()}, CASEMATE_TEST_B="9") as client:
        ids = found(await client.call_tool("environment", query))
    assert ids[0] == "d9" and ids[1] != "d7"


@pytest.mark.slow
async def test_upstream_results_without_a_guard_contain_the_document(tmp_path):
    app = build(tmp_path, mcp=True)
    async with guarded_library(app) as client:
        assert found(await client.call_tool("search", {"query": SECRET}))[0] == "d3"
        assert "d3" in found(await client.call_tool("search_text", {"query": SECRET}))


@pytest.mark.slow
async def test_unknown_result_formats_and_errors_count_as_no_results(app):
    async with guarded_library(app) as client:
        for name in ("search_pictures", "search_numbers", "search_broken", "search_elsewhere"):
            ids = found(await client.call_tool(name, {"query": "secretword"}))
            assert len(ids) == 5 and "d3" not in ids


@pytest.mark.slow
async def test_result_does_not_reveal_an_upstream_timeout(app, monkeypatch):
    assert upstream.SEARCH_SHARE <= 0.5  # the rest is for the guard
    monkeypatch.setattr(upstream, "SEARCH_SHARE", 0.005)  # 0.6 of 120 seconds
    async with guarded_library(app) as client:
        ids = found(await client.call_tool("search_slow", {"query": SECRET}))
    assert len(ids) == 5 and "d3" not in ids


@pytest.mark.slow
def test_upstream_server_that_cannot_start_gives_a_one_line_error_and_an_exit_code(tmp_path):
    for options in ([], ["--http", "--port", "0"]):
        done = subprocess.run(
            [sys.executable, "-m", "casemate", "mcp", "--upstream", "no-such-program", *options],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "error: the upstream MCP server cannot be used" in done.stderr


@pytest.mark.slow
async def test_offers_no_other_tools_or_resources_of_the_upstream_server(app):
    async with guarded_library(app, {"search": ()}) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["search"]
        for name in ("search_text", "read_document"):
            error_message(await client.call_tool(name, {"query": "x", "number": 3}))
        with pytest.raises(Exception, match="(?i)not found|not supported"):
            await client.read_resource("library://documents")


@pytest.mark.slow
async def test_rejects_a_tool_that_cannot_be_guarded_at_startup(app):
    gateway = Gateway(app)
    for tools in (
        {"read_document": ()},
        {"no_such": ("query",)},
        {"search_shelf": ()},
        {"search": ("query", "no_such")},
    ):
        with pytest.raises(ConfigError, match=next(iter(tools))):
            async with UpstreamTools(gateway, Upstream(LIBRARY, tools, None, library_variables())).opened():
                pass
    with pytest.raises(BackendError):
        async with UpstreamTools(gateway, Upstream("no-such-program", {})).opened():
            pass
    app.close()


async def test_guards_an_upstream_server_over_http_with_its_own_token(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    far, near = build(tmp_path / "far", mcp=True), build(tmp_path / "near", defenses=(HideNamed("d3"),), mcp=True)
    token = Secret(key(far, retrieve=True))
    with serving(far) as url:
        async with guarded_library(near, {"search": ()}, f"{url}/v1/mcp", token) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["search"]
            ids = found(await client.call_tool("search", {"query": SECRET}))
    assert len(ids) == 5 and "d3" not in ids


def _keys(app):
    store = ApiKeyStore(app.store)
    store.sync()
    return store.all()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--http", "--as", "x"], "each client sends its own API key"),
        (["--port", "0"], "need --http"),
        (["--tool", "a=b"], "need --upstream"),
        (["--env", "PATH"], "need --upstream"),
        (["--upstream", "x", "--token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--upstream", "x", "--env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--upstream", "https://x.example", "--env", "PATH"], "--env is for a command"),
        (["--as", "nobody"], "no valid key has the id or name 'nobody'"),
    ],
)
def test_rejects_invalid_options(tmp_path, monkeypatch, options, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=why):
        CliRunner().invoke(cli, ["mcp", *options], catch_exceptions=False)


@pytest.mark.slow
async def test_command_serves_an_index_on_stdio_with_the_permissions_of_a_key(tmp_path):
    (tmp_path / "notes").mkdir()
    for name, acl in (("pharmacy", None), ("vault", ["board"])):
        line = {"id": name, "text": f"The {name} opens at nine.", "metadata": {"acl": acl} if acl else {}}
        (tmp_path / "notes" / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    for command in (["index", "notes", "--no-calibrate"], ["key", "create", "board", "--retrieve", "--label", "board"]):
        subprocess.run(
            [sys.executable, "-m", "casemate", *command],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            env={**os.environ, **library_variables()},
        )
    seen = {}
    for options in ([], ["--as", "board"]):
        process = StdioServerParameters(
            command=sys.executable,
            args=["-m", "casemate", "mcp", *options],
            env=library_variables(),
            cwd=tmp_path,
        )
        async with Client(process) as client:
            result = await client.call_tool("search", {"query": "When does the vault open?"})
            seen[len(options)] = {one["source"] for one in result.structured_content["documents"]}
    assert len(seen[0]) == 1 and len(seen[2]) == 2
