from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("httpx", reason="needs casemate[http]")

from casemate import remote
from casemate.app import build
from casemate.backends.openai_endpoint import OpenAIEndpoint
from casemate.config import Part
from casemate.errors import BackendError, ConfigError
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.results import Status
from casemate.monitor.canaries.run import run
from casemate.remote import Page
from casemate.types import Query, Secret
from tests.fake_openai import ANSWER, FakeOpenAI

KEY = Secret("sk-verysecretkey")


@pytest.fixture
def server(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)
    with FakeOpenAI() as fake:
        yield fake


def endpoint(server, **options):
    return OpenAIEndpoint(
        **{"model": "m", "base_url": server.url, "api_key": KEY, "retries": 0, "timeout_s": 5} | options
    )


def ask(target, question="Who was the plaintiff?"):
    return asyncio.run(target.ask(Query(question)))


def test_the_question_is_asked_and_nothing_else(server):
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


def test_instructions_stand_in_front_and_no_temperature_is_sent_below_0(server):
    ask(endpoint(server, instructions="Be brief.", temperature=-1))
    body = server.received[0].body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "temperature" not in body


def test_a_server_that_wants_no_key_gets_none(server):
    ask(endpoint(server, api_key=Secret("")))
    assert "authorization" not in server.received[0].headers


def test_it_streams_in_one_piece(server):
    async def pieces():
        return [piece async for piece in endpoint(server).stream(Query("q"))]

    assert asyncio.run(pieces()) == ["".join(ANSWER)]


def test_a_refusal_is_an_answer(server):
    server.script = ["refusal"]
    assert ask(endpoint(server)).text == "I will not."


def test_a_server_that_does_not_stream_is_read_too():
    target = OpenAIEndpoint("m", "http://127.0.0.1/v1")
    page = Page("application/json", b'{"choices": [{"message": {"content": "It is 7."}}]}')
    assert target._read(page) == ("It is 7.", True)


@pytest.mark.parametrize(
    ("how", "message", "retryable"),
    [
        ("401", "HTTP 401: the key is refused, or there is none", False),
        ("404", "HTTP 404: there is nothing at this path", False),
        ("429", "HTTP 429: too many requests", True),
        ("500", "HTTP 500: the server failed", True),
        ("html", "an HTML page came instead of JSON", False),
        ("json", "the reply is no JSON", False),
        ("cut", "the connection failed", True),
        ("garbled", "the reply cannot be read", False),
        ("shape", "the reply cannot be read", False),
        ("error", "broke off with an error", True),
        ("empty", "the answer broke off", True),
        ("done", "the answer broke off", True),
        ("filtered", "the answer is empty", False),
    ],
)
def test_failures_say_where_and_what_and_no_secret(server, how, message, retryable):
    server.script = [how]
    with pytest.raises(BackendError) as caught:
        ask(endpoint(server), "my own question")
    error = caught.value
    assert message in str(error)
    assert str(error).startswith(server.host)
    assert error.retryable is retryable
    assert str(KEY) not in str(error)
    assert "my own question" not in str(error)


def test_a_busy_server_is_asked_again(server):
    server.script = ["429", "500"]
    assert ask(endpoint(server, retries=2)).text == "".join(ANSWER)


@pytest.mark.parametrize("how", ["stall", "slow"])
def test_one_that_stalls_or_goes_on_for_ever_is_left(server, how):
    server.script = [how]
    begun = time.monotonic()
    with pytest.raises(BackendError, match="no reply within 0.3 s"):
        ask(endpoint(server, timeout_s=0.3))
    assert time.monotonic() - begun < 30


def test_an_endless_answer_is_not_read_to_its_end(server):
    server.script = ["slow"]
    with pytest.raises(BackendError, match="more than 2,000 bytes"):
        ask(endpoint(server, max_bytes=2000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "need a model"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"base_url": "ftp://x"}, "must begin with http"),
        ({"base_url": "", "api_key": Secret("")}, "no key for api.openai.com"),
        ({"api_key": Secret("a\nb")}, "characters that no key has"),
        ({"timeout_s": -1}, "timeout_s=-1"),
    ],
)
def test_options_that_cannot_be(server, options, message):
    with pytest.raises(ConfigError, match=message):
        endpoint(server, **options)


def test_the_environment_fills_in(server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/")
    monkeypatch.setenv("OPENAI_API_KEY", str(KEY))
    target = build("target", Part(use="openai_endpoint", model="m"))
    ask(target)
    assert server.received[0].path == "/v1/chat/completions"
    assert str(KEY) not in repr(target)


def test_the_key_of_the_environment_goes_to_its_own_address_alone(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", str(KEY))
    ask(endpoint(server, api_key=Secret("")))
    assert "authorization" not in server.received[0].headers


def test_canaries_through_it(server):
    found = [Canary(id="a", query="Is it closed?", expected_answer="the case is cløsed")]
    (result,) = asyncio.run(run(found, endpoint(server), run_id="r")).results
    assert (result.status, result.documents, result.words) == (Status.PASS, (), 4)
    with pytest.raises(ConfigError, match="tells its sources"):
        asyncio.run(run([Canary(id="a", query="b", expected_sources=["x"])], endpoint(server), run_id="r"))
