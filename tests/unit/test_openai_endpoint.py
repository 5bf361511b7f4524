from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("httpx", reason="needs casemate[http]")

from casemate.backends.targets import openai_endpoint
from casemate.backends.targets.openai_endpoint import OpenAIEndpoint
from casemate.config import PluginSpec
from casemate.errors import BackendError, ConfigError
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.plugins import build
from casemate.runtime import retry
from casemate.runtime.http_client import HttpResponse
from casemate.types import Query, Secret
from tests.fake_openai import ANSWER, FakeOpenAI

KEY = Secret("sk-verysecretkey")


@pytest.fixture
def server(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(retry, "BACKOFF_S", 0.01)
    with FakeOpenAI() as fake:
        yield fake


def endpoint(server, **options):
    return OpenAIEndpoint(
        **{"model": "m", "base_url": server.url, "api_key": KEY, "retries": 0, "timeout_s": 5} | options
    )


def ask(target, question="Who was the plaintiff?"):
    return asyncio.run(target.ask(Query(question)))


def test_sends_only_the_question(server):
    answer = ask(endpoint(server))
    assert answer.text == "".join(ANSWER)
    assert answer.retrieval.hits == ()
    (request,) = server.received
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == f"Bearer {str(KEY)}"
    assert request.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Who was the plaintiff?"}],
        "stream": True,
        "max_tokens": 512,
        "temperature": 0.0,
    }


def test_sends_instructions_first_and_no_negative_temperature(server):
    ask(endpoint(server, instructions="Be brief.", temperature=-1))
    body = server.received[0].body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "temperature" not in body


def test_turns_option_sends_earlier_turns_of_the_same_client(server):
    target = endpoint(server, turns=2, instructions="Be brief.")

    async def session():
        for question in ("a", "b", "c", "d"):
            await target.ask(Query(question, "one"))
        await target.ask(Query("e", "two"))

    asyncio.run(session())
    said = [[(m["role"], m["content"]) for m in request.body["messages"]] for request in server.received]
    system, answer = ("system", "Be brief."), ("assistant", "".join(ANSWER))
    assert said[0] == [system, ("user", "a")]
    assert said[3] == [system, ("user", "b"), answer, ("user", "c"), answer, ("user", "d")]
    assert said[4] == [system, ("user", "e")]


def test_failed_question_is_not_sent_as_a_turn(server):
    target = endpoint(server, turns=5)
    server.script = ["500", "ok"]
    with pytest.raises(BackendError):
        ask(target, "a")
    ask(target, "b")
    assert len(server.received[-1].body["messages"]) == 1


def test_limits_the_number_of_stored_conversations(server, monkeypatch):
    monkeypatch.setattr(openai_endpoint, "CONVERSATIONS", 2)
    target = endpoint(server, turns=1)

    async def sessions():
        for client in ("one", "two", "three", "one"):
            await target.ask(Query("a", client))

    asyncio.run(sessions())
    assert [len(request.body["messages"]) for request in server.received] == [1, 1, 1, 1]


def test_rejects_a_negative_number_of_turns(server):
    with pytest.raises(ConfigError, match="openai_endpoint: turns=-1; it must be at least 0"):
        endpoint(server, turns=-1)


def test_sends_no_authorization_without_a_key(server):
    ask(endpoint(server, api_key=Secret("")))
    assert "authorization" not in server.received[0].headers


def test_stream_yields_one_chunk(server):
    async def chunks():
        return [chunk async for chunk in endpoint(server).stream(Query("q"))]

    assert asyncio.run(chunks()) == ["".join(ANSWER)]


def test_refusal_is_an_answer(server):
    server.script = ["refusal"]
    assert ask(endpoint(server)).text == "I will not."


def test_reads_a_response_that_is_not_streamed():
    target = OpenAIEndpoint("m", "http://127.0.0.1/v1")
    page = HttpResponse("application/json", b'{"choices": [{"message": {"content": "It is 7."}}]}')
    assert target._read(page) == ("It is 7.", True)


@pytest.mark.parametrize(
    ("how", "message", "retryable"),
    [
        ("401", "HTTP 401: the key is missing or rejected", False),
        ("404", "HTTP 404: there is nothing at this path", False),
        ("429", "HTTP 429: too many requests", True),
        ("500", "HTTP 500: the server failed", True),
        ("html", "the response is an HTML page instead of JSON", False),
        ("json", "the response is not JSON", False),
        ("cut", "the connection failed", True),
        ("garbled", "the response cannot be parsed", False),
        ("nested", "the response cannot be parsed", False),
        ("shape", "the response cannot be parsed", False),
        ("error", "the server sent an error", True),
        ("empty", "the answer was interrupted", True),
        ("done", "the answer was interrupted", True),
        ("filtered", "the answer is empty", False),
    ],
)
def test_errors_contain_host_and_problem_but_no_secret(server, how, message, retryable):
    server.script = [how]
    with pytest.raises(BackendError) as caught:
        ask(endpoint(server), "my own question")
    error = caught.value
    assert message in str(error)
    assert str(error).startswith(server.host)
    assert error.retryable is retryable
    assert str(KEY) not in str(error)
    assert "my own question" not in str(error)


def test_retries_a_busy_server(server):
    server.script = ["429", "500"]
    assert ask(endpoint(server, retries=2)).text == "".join(ANSWER)


def test_retries_an_interrupted_answer(server):
    server.script = ["empty", "error"]
    assert ask(endpoint(server, retries=2)).text == "".join(ANSWER)
    assert len(server.received) == 3


@pytest.mark.parametrize(("end", "complete"), [(b"data: [DONE]\n\n", True), (b"", False)])
def test_stream_without_finish_reason_is_complete_at_its_end_marker(end, complete):
    target = OpenAIEndpoint("m", "http://127.0.0.1/v1")
    text = b'data: {"choices": [{"delta": {"content": "It is [DONE]."}}]}\n\n'
    assert target._read(HttpResponse("text/event-stream", text + end)) == ("It is [DONE].", complete)


@pytest.mark.parametrize("how", ["stall", "slow"])
def test_times_out_if_the_server_stalls_or_never_ends(server, how):
    server.script = [how]
    begun = time.monotonic()
    with pytest.raises(BackendError, match="no response within 0.3 s"):
        ask(endpoint(server, timeout_s=0.3))
    assert time.monotonic() - begun < 30


def test_limits_the_size_of_an_answer(server):
    server.script = ["slow"]
    with pytest.raises(BackendError, match="more than 2,000 bytes"):
        ask(endpoint(server, max_bytes=2000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model is empty"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"base_url": "ftp://x"}, "must begin with http"),
        ({"base_url": "", "api_key": Secret("")}, "no key for api.openai.com"),
        ({"api_key": Secret("a\nb")}, "characters that no key has"),
        ({"timeout_s": -1}, "timeout_s=-1"),
    ],
)
def test_rejects_invalid_options(server, options, message):
    with pytest.raises(ConfigError, match=message):
        endpoint(server, **options)


def test_reads_defaults_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/")
    monkeypatch.setenv("OPENAI_API_KEY", str(KEY))
    target = build("target", PluginSpec(use="openai_endpoint", model="m"))
    ask(target)
    assert server.received[0].path == "/v1/chat/completions"
    assert str(KEY) not in repr(target)


def test_sends_the_key_of_the_environment_only_to_its_own_address(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", str(KEY))
    ask(endpoint(server, api_key=Secret("")))
    assert "authorization" not in server.received[0].headers


def test_runs_canaries_against_the_endpoint(server):
    found = [Canary(id="a", query="Is it closed?", expected_answer="the case is cløsed")]
    (result,) = asyncio.run(CanaryRunner(found, endpoint(server)).run("r")).results
    assert (result.status, result.documents, result.words) == (CanaryStatus.PASS, (), 4)
    with pytest.raises(ConfigError, match="a target that reports sources"):
        asyncio.run(CanaryRunner([Canary(id="a", query="b", expected_sources=["x"])], endpoint(server)).run("r"))
