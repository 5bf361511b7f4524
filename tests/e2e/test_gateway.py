"""The gateway with OpenAI's SDK, under kills and signals, and under a fuzzer."""

import asyncio
import itertools
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks import api_contract
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from tests.fakes import BagOfWords
from tests.gateways import Down, Endless, HideNamed, chat, key, make, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path):
    """A server, a client key and an admin key."""
    app = make(tmp_path, defenses=(HideNamed("d3"),))
    plain, admin = key(app), key(app, "admin")
    with serving(app) as url:
        yield url, plain, admin


def test_the_sdk_lists_models_and_chats(server):
    url, plain, _ = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key=plain) as client:
        assert [model.id for model in client.models.list()] == ["casemate"]
        assert client.models.retrieve("casemate").owned_by == "casemate"
        done = client.chat.completions.create(model="casemate", messages=[{"role": "user", "content": "only7"}])
        choice = done.choices[0]
        assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
        assert choice.message.content.startswith("d7 ")
        assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens > 0
        assert done.id.removeprefix("chatcmpl-") == done._request_id


def test_the_sdk_reads_complete_and_streamed_responses(server):
    url, plain, _ = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key=plain, max_retries=0) as client:
        done = client.responses.create(model="casemate", input="only7", instructions="Be rude.")
        assert done.status == "completed"
        assert done.output_text.startswith("d7 ")
        assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > 0
        events = list(client.responses.create(model="casemate", input="only7", stream=True))
        assert events[-1].response.output_text == done.output_text
        with client.responses.stream(model="casemate", input=[{"role": "user", "content": "only7"}]) as stream:
            assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == done.output_text
            assert stream.get_final_response().output_text == done.output_text
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(model="casemate", input="x", previous_response_id="resp_1")
        assert raised.value.param == "previous_response_id"


def test_the_sdk_streams(server):
    url, plain, _ = server
    messages = [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "only7"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=plain) as client:
        chunks = list(
            client.chat.completions.create(
                model="casemate",
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                temperature=0.2,
                max_tokens=100,
                user="ann",
            )
        )
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(texts).startswith("d7 ")
        assert len([t for t in texts if t]) == 5
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage.completion_tokens > 0
        with client.chat.completions.stream(model="casemate", messages=messages) as stream:
            assert stream.get_final_completion().choices[0].message.content == "".join(texts)


def test_the_asynchronous_sdk_streams_and_may_disconnect(tmp_path):
    endless = Endless()
    app = make(tmp_path, endless)
    text = key(app)

    async def leave(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=text) as client:
            messages = [{"role": "user", "content": "x"}]
            async with await client.chat.completions.create(model="casemate", messages=messages, stream=True) as s:
                async for _ in s:
                    break

    with serving(app) as url:
        asyncio.run(leave(url))
        end = time.monotonic() + 10
        while not endless.ended and time.monotonic() < end:
            time.sleep(0.02)
    assert endless.ended == 1


def test_the_sdk_raises_its_own_errors(server, tmp_path):
    url, plain, _ = server
    ask = {"model": "casemate", "messages": [{"role": "user", "content": "x"}]}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            client.models.list()
        assert raised.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=f"{url}/v1", api_key=plain, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as raised:
            client.chat.completions.create(**ask | {"model": "gpt"})
        assert raised.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**ask, n=2)
        assert raised.value.param == "n"
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="casemate", input="x")


def test_the_sdk_reports_an_interrupted_stream(tmp_path):
    app = make(tmp_path, Down(after=1))
    text = key(app)
    with serving(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key=text, max_retries=0) as client:
        messages = [{"role": "user", "content": "x"}]
        chunks = client.chat.completions.create(model="casemate", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="temporarily unavailable"):
            list(chunks)


@contextmanager
def process(folder, *how):
    """Starts a gateway in its own process; yields process and address."""
    command = [sys.executable, "-m", "tests.gateway_process", str(folder), *how]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running, running.stdout.readline().strip()
        finally:
            if running.poll() is None:
                running.kill()


def new_key(folder, role="client"):
    with closing(SqlEventStore(path=folder / "events.db")) as store:
        return str(ApiKeyStore(store).create(Grant("someone", role))[1])


def test_sigterm_completes_running_answers_and_writes_events(tmp_path):
    text = new_key(tmp_path)
    with process(tmp_path, "slow") as (running, url):
        headers = {"Authorization": f"Bearer {text}"}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat("x", stream=True), headers=headers) as one:
            lines = one.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/healthz")
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert running.wait(20) == 0
        assert running.stdout.read().strip() == "ended"
        assert "Traceback" not in running.stderr.read()
    with closing(SqlEventStore(path=tmp_path / "events.db")) as store:
        assert len(store.scan("verdict")) == 1
        used = [event.body["keys"].get(text.split("_")[1], {}) for event in store.scan("usage")]
        assert sum(counts.get("tokens", 0) for counts in used) > 5


class Writer:
    """Adds and removes documents; records which changes were acknowledged and which are uncertain."""

    def __init__(self):
        self.kept, self.unsure, self.numbers = {f"d{i}" for i in range(40)}, set(), itertools.count()
        self.added = 0

    def work(self, http):
        number = next(self.numbers)
        name, old = f"new{number}", f"new{number - 3}"
        self.unsure.add(name)
        added = http.post("/v1/documents", json={"documents": [{"source": name, "text": f"only{number} x"}]})
        assert added.status_code == 200
        self.added += 1
        self.kept.add(name)
        self.unsure.discard(name)
        if number % 2 and old in self.kept:  # an unacknowledged addition is not in `kept`, and remains uncertain
            self.unsure.add(old)
            assert http.delete("/v1/documents", params={"source": old}).status_code == 200
            self.kept.discard(old)
            self.unsure.discard(old)


class QuestionClient:
    """Asks for a withheld document, and disconnects from every fifth answer."""

    def __init__(self):
        self.answers, self.numbers = [], itertools.count()

    def work(self, http):
        if next(self.numbers) % 5 == 4:
            with http.stream("POST", "/v1/chat/completions", json=chat("only3", stream=True)) as one:
                next(one.iter_lines())
            return
        answer = http.post("/v1/chat/completions", json=chat("only3")).json()
        self.answers.append(answer["choices"][0]["message"]["content"].split())


def until_killed(who, url, text):
    with (
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {text}"}) as http,
        suppress(httpx.TransportError),
    ):
        while True:
            who.work(http)


@pytest.mark.slow
def test_a_kill_loses_no_acknowledged_event_and_reveals_no_withheld_document(tmp_path):
    """The process is killed twice while documents change, questions are asked and clients disconnect."""
    writer, questioner, other, revoked = Writer(), QuestionClient(), QuestionClient(), []
    keys = [new_key(tmp_path, "admin"), new_key(tmp_path), new_key(tmp_path)]
    for life in (1, 2):
        with process(tmp_path) as (running, url):
            pairs = zip((writer, questioner, other), keys, strict=True)
            threads = [threading.Thread(target=until_killed, args=(who, url, text)) for who, text in pairs]
            for thread in threads:
                thread.start()
            revoked.append(new_key(tmp_path).split("_")[1])
            with closing(SqlEventStore(path=tmp_path / "events.db")) as store:
                ApiKeyStore(store).revoke(revoked[-1])
            end = time.monotonic() + 60
            while (writer.added < 12 * life or len(questioner.answers) < 4 * life) and time.monotonic() < end:
                time.sleep(0.01)
            running.send_signal(signal.SIGKILL)
            for thread in threads:
                thread.join(30)
            assert running.wait(10) == -signal.SIGKILL
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        index.open(BagOfWords(256).fingerprint, 256)
        remaining = set(index.digests())
        assert not index.check()
    assert writer.kept - writer.unsure <= remaining <= writer.kept | writer.unsure
    assert writer.added >= 24
    with closing(SqlEventStore(path=tmp_path / "events.db")) as store:
        found = ApiKeyStore(store)
        found.sync()
        assert {k.id for k in found.all() if k.revoked} == set(revoked)
        assert len(store.scan("verdict")) >= len(questioner.answers) + len(other.answers)
    assert len(questioner.answers) >= 8
    assert not [a for a in questioner.answers + other.answers if "d3" in a]


@pytest.mark.slow
def test_schemathesis_requests_cause_no_server_error(tmp_path):
    """Schemathesis sends requests inside and outside the schema: no status 5xx, and every error has OpenAI's format.

    ``benchmarks.api_contract`` sends 1,000 requests to each operation.
    """
    found, examples = {}, 30
    with api_contract.served(tmp_path) as (schema, headers):
        for operation in (one.ok() for one in schema.get_all_operations()):
            found[operation.label] = {"asked": 0, "examples": 0, "statuses": {}, "faults": []}
            api_contract.block(operation, headers, found[operation.label], examples)
    assert [fault for one in found.values() for fault in one["faults"]] == []
    varied = {label for label, one in found.items() if one["examples"] >= examples // 2}
    assert varied >= {
        "POST /v1/chat/completions",
        "POST /v1/responses",
        "POST /v1/retrieve",
        "POST /v1/documents",
        "GET /v1/documents",
        "DELETE /v1/documents",
    }
    answered = {label for label, one in found.items() if "200" in one["statuses"]}
    assert answered >= {
        "POST /v1/chat/completions",
        "GET /v1/models",
        "POST /v1/retrieve",
        "GET /v1/documents",
        "GET /metrics",
    }
    for label in ("POST /v1/chat/completions", "POST /v1/documents"):
        assert "400" in found[label]["statuses"]


def test_key_creates_lists_and_revokes_and_serve_answers_until_a_signal(tmp_path):
    """``serve`` runs with the default plug-ins."""

    def command(*words):
        return [sys.executable, "-m", "casemate", *words]

    def run(*words):
        done = subprocess.run(command(*words), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    made = json.loads(run("key", "create", "web", "--role", "admin", "--label", "red", "--json"))
    plain = run("key", "create", "other").strip()
    assert re.fullmatch(r"cmk_[0-9a-f]{16}_[\w-]{43}", plain)
    assert "secret" not in run("key", "list", "--json")
    assert plain not in run("key", "list")
    assert "revoked" in run("key", "revoke", plain.split("_")[1])
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    serve = command("serve", "--port", "0")
    with subprocess.Popen(serve, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as running:
        try:
            # first a warning: the index is empty
            log_lines = itertools.takewhile(bool, iter(running.stderr.readline, None))
            url = next(found[1] for line in log_lines if (found := re.search(r"serving at (\S+)/v1", line)))
            headers = {"Authorization": f"Bearer {made['secret']}"}
            text = "The lighthouse keeper is called Mira. She lights the lamp at dusk."
            sent = {"documents": [{"source": "light.md", "text": text}]}
            assert httpx.post(f"{url}/v1/documents", json=sent, headers=headers, timeout=60).status_code == 200
            refused = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {plain}"})
            assert refused.status_code == 401
            running.send_signal(signal.SIGTERM)
            assert running.wait(20) == 0
            assert "all events are written" in running.stderr.read()
        finally:
            if running.poll() is None:
                running.kill()


def test_serve_uses_tls_with_a_certificate(tmp_path):
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    done = subprocess.run(
        [*command.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("openssl is not here to make a certificate")
    app = make(tmp_path, tls_cert="cert.pem", tls_key="key.pem")
    text = key(app)
    with serving(app) as url:
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {text}"}, verify=trust)
        assert answer.status_code == 200
        assert "max-age" in answer.headers["strict-transport-security"]
