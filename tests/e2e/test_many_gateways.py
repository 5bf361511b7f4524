"""Three gateways and several canary watchers on one Postgres server: shared state, and kills of any process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.pgvector import PgvectorIndex
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.monitor.scheduler import schedule
from casemate.types import Secret
from tests.fakes import BagOfWords
from tests.gateways import chat
from tests.many_gateways import HELD, harmless, prepare
from tests.postgres import database
from tests.unit.test_monitor_watch import WORKER
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Fleet:
    """Three gateways in their own processes."""

    def __init__(self, folder, url):
        self.folder, self.url, self.running, self.addresses = folder, url, {}, {}

    def start(self, *numbers):
        command = [sys.executable, "-m", "tests.many_gateways", str(self.folder)]
        environment = os.environ | {"URL": self.url, "OPENBLAS_NUM_THREADS": "1"}
        for number in numbers:
            self.running[number] = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
            )
        for number in numbers:
            self.addresses[number] = self.running[number].stdout.readline().strip()
            assert self.addresses[number], "a gateway did not begin"

    def kill(self, number):
        self.running[number].send_signal(signal.SIGKILL)
        assert self.running[number].wait(20) == -signal.SIGKILL
        self.running[number].stdout.close()

    def end(self):
        for process in self.running.values():
            process.kill()
            process.wait(20)
            process.stdout.close()

    def http(self, number, key):
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.addresses[number], headers=headers, timeout=30)

    def ask(self, number, key, text):
        with self.http(number, key) as http:
            return http.post("/v1/chat/completions", json=chat(text))

    def accepts(self, number, key):
        with self.http(number, key) as http:
            return http.get("/v1/models").status_code == 200


@pytest.fixture(scope="module")
def fleet(postgres_url, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    with database(postgres_url, "CREATE EXTENSION vector") as url:
        prepare(folder, url)
        found = Fleet(folder, url)
        found.harmless = harmless(folder, url, ("d7", "d8", "d9", "d20"))
        try:
            found.start(0, 1, 2)
            yield found
        finally:
            found.end()


@pytest.fixture
def keys(fleet):
    with closing(SqlEventStore(Secret(fleet.url))) as store:
        yield ApiKeyStore(store)


def make(keys, fleet, role="client", **grant):
    """Creates a key, and waits until all gateways accept it."""
    made, text = keys.create(Grant("someone", role, **grant))
    for number in fleet.addresses:
        wait_for(lambda at=number: fleet.accepts(at, text))
    return made.id, str(text)


def ids_of(answer):
    assert answer.status_code == 200, answer.text
    return {name.partition("#")[0] for name in answer.json()["choices"][0]["message"]["content"].split()}


def test_documents_withheld_from_a_client_are_withheld_by_all_gateways(fleet, keys):
    _, suspect = make(keys, fleet)
    _, other = make(keys, fleet)
    for number in (0, 1, 2):
        target = HELD[7 + number]
        plain = fleet.harmless[target.id]
        assert target.id in ids_of(fleet.ask(number, suspect, plain))
        assert target.id not in ids_of(fleet.ask(number, suspect, target.text))  # quotes the document
        for there in (0, 1, 2):  # immediately
            assert target.id not in ids_of(fleet.ask(there, suspect, plain))
            assert target.id in ids_of(fleet.ask(there, other, plain))


def test_documents_stay_withheld_after_a_kill_of_the_gateway_that_flagged_them(fleet, keys):
    _, suspect = make(keys, fleet)
    plain = fleet.harmless["d20"]
    assert "d20" in ids_of(fleet.ask(2, suspect, plain))
    assert "d20" not in ids_of(fleet.ask(1, suspect, HELD[20].text))
    fleet.kill(1)
    assert "d20" not in ids_of(fleet.ask(2, suspect, plain))
    fleet.start(1)
    assert "d20" not in ids_of(fleet.ask(1, suspect, plain))


def test_a_revoked_key_is_rejected_by_all_gateways_immediately(fleet, keys):
    made, text = make(keys, fleet)
    keys.revoke(made)
    assert [fleet.ask(number, text, "only1").status_code for number in (0, 1, 2)] == [401, 401, 401]


def test_login_and_logout_take_effect_at_all_gateways(fleet, keys):
    _, admin = make(keys, fleet, "admin")
    with httpx.Client(timeout=30) as browser:
        form = browser.get(f"{fleet.addresses[0]}/dashboard/login").text
        sent = {"csrf": re.search('name="csrf" value="([^"]*)"', form)[1], "key": admin, "next": ""}
        assert browser.post(f"{fleet.addresses[1]}/dashboard/login", data=sent).status_code == 303
        page = browser.get(f"{fleet.addresses[2]}/dashboard/")
        assert page.status_code == 200
        token = re.search('name="csrf" value="([^"]*)"', page.text)[1]
        assert browser.post(f"{fleet.addresses[0]}/dashboard/alerts/close", data={"csrf": "x"}).status_code == 403
        stolen = dict(browser.cookies)
        assert browser.post(f"{fleet.addresses[0]}/dashboard/logout", data={"csrf": token}).status_code == 303
    with httpx.Client(timeout=30, cookies=stolen) as thief:
        for place in fleet.addresses.values():
            assert thief.get(f"{place}/dashboard/").status_code == 303


class Load:
    """A client that retries requests when a gateway is killed."""

    def __init__(self, fleet, key, stop):
        self.fleet, self.key, self.stop = fleet, key, stop
        self.seen, self.tokens, self.broken = Counter(), 0, 0
        self.kept, self.unsure = set(), set()

    def run(self, work, first):
        for turn in range(first, 100_000):
            if self.stop.is_set():
                return
            try:
                with self.fleet.http(turn % 3, self.key) as http:
                    work(http, turn)
            except (httpx.TransportError, httpx.InvalidURL):
                self.broken += 1
                time.sleep(0.05)

    def ask(self, http, turn):
        answer = http.post("/v1/chat/completions", json=chat(f"only{turn % 60}"))
        self.seen[answer.status_code] += 1
        if answer.status_code == 200:
            self.tokens += answer.json()["usage"]["total_tokens"]

    def write(self, http, turn):
        name = f"new{turn}"
        self.unsure.add(name)
        sent = {"documents": [{"source": name, "text": f"{name} maple ocean"}]}
        assert http.post("/v1/documents", json=sent).status_code == 200
        self.kept.add(name)
        self.unsure.discard(name)


def test_kills_under_load_exceed_no_budget_and_lose_no_document(fleet, keys):
    """Clients with and without limits, and one writer. A gateway is killed and restarted."""
    budget, rate = 400, 40
    grants = ({"tokens_per_day": budget}, {"requests_per_minute": rate}, {})
    texts = [make(keys, fleet, **grant)[1] for grant in grants] + [make(keys, fleet, "admin")[1]]
    stop = threading.Event()
    limited, slow, free, writer = loads = [Load(fleet, text, stop) for text in texts]
    began = time.monotonic()
    pairs = [(load, load.ask) for load in (limited, limited, limited, slow, slow, free)] + [(writer, writer.write)]
    threads = [threading.Thread(target=load.run, args=(work, i)) for i, (load, work) in enumerate(pairs)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    fleet.kill(0)
    time.sleep(1)
    fleet.start(0)
    end = time.monotonic() + 30
    while not (limited.seen[429] and slow.seen[429] and len(writer.kept) > 5) and time.monotonic() < end:
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join(60)
    minutes = (time.monotonic() - began) / 60
    assert 0 < limited.tokens <= budget
    assert limited.seen.keys() <= {200, 429}
    assert limited.seen[429]
    assert [fleet.ask(number, texts[0], "only1").status_code for number in (0, 1, 2)] == [429] * 3
    # Requests that poll until all gateways accept the key are counted as well.
    assert 0 < slow.seen[200] <= rate * (1 + minutes) + 1
    assert free.seen[200] and sum(load.broken for load in loads)
    with closing(PgvectorIndex(Secret(fleet.url))) as index:
        embedder = BagOfWords(256)
        index.open(embedder.fingerprint, embedder.dim)
        stored = {name for name in index.digests() if name.startswith("new")}
        assert not index.check()
    assert writer.kept <= stored <= writer.kept | writer.unsure


def test_each_canary_run_happens_once_if_the_leading_watcher_is_killed(postgres_url, tmp_path):
    with database(postgres_url, "CREATE EXTENSION vector") as url:
        SqlEventStore(Secret(url)).close()
        _watch_and_kill(url, tmp_path / "log")
        with closing(SqlEventStore(Secret(url))) as store:
            runs = [event.body["slot"] for event in store.scan(schedule.RUN_KIND)]
            results = Counter((e.body["run"], e.body["canary"]) for e in store.scan("canary"))
            missed = [gap.slots for gap in schedule.load_gaps(store, "clinic")]
    assert len(runs) >= 2
    assert len(set(runs)) == len(runs)
    assert set(results.values()) == {1}
    assert sum(missed) + len(runs) >= (max(runs) - min(runs)) // 2 + 1


def _watch_and_kill(url, log):
    """Three watchers of one set: the leader is killed, and another watcher takes over."""
    command = [sys.executable, "-c", WORKER, url, str(log), "2", "1.0"]
    watches = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) for _ in range(3)]
    try:
        wait_for(lambda: len(_lines(log)) > 25)  # during its second run
        leader = int(_lines(log)[-1][1])
        os.kill(leader, signal.SIGKILL)
        wait_for(lambda: any(int(line[1]) != leader for line in _lines(log)))
        time.sleep(3)
    finally:
        for watch in watches:
            watch.terminate()
        for watch in watches:
            watch.wait(30)


def _lines(log):
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []
