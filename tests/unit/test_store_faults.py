"""Two gateways on one event store that fails at random: no acknowledged event is lost, and no answer is unguarded.

Faults are real where a test can cause them. Otherwise the database itself raises them (Postgres: a full disk).
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from casemate.backends.event_stores.sql import SqlEventStore, database
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.gateway import state
from casemate.types import Secret
from tests.fakes import BagOfWords
from tests.gateways import HideNamed, chat, client, key, make
from tests.unit.monitor_stores import fresh_url
from tests.waiting import wait_for

url = pytest.fixture(params=["sqlite", "postgres"])(fresh_url)
RATE, ROUNDS = 0.25, 16
DISK_FULL = "DO $$ BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = 'disk_full'; END $$"


class FaultInjector:
    """Makes some transactions of a store fail, with the errors of its database.

    Attributes: on: Whether faults are active. hits: Number of failed or delayed transactions.
    """

    def __init__(self, store, url, kind, rng):
        self.url, self.kind, self.rng, self.on, self.hits, self.lite = url, kind, rng, False, 0, "sqlite" in url
        event.listen(store._engine, "begin", self._begin)
        event.listen(store._engine, "commit", self._commit)
        real = store._engine.dialect.do_commit

        def commit(connection):
            real(connection)
            if self._happens("reply lost"):
                raise OperationalError("commit", {}, OSError("the reply was lost"))

        store._engine.dialect.do_commit = commit

    def _happens(self, kind):
        happens = self.on and kind == self.kind and self.rng.random() < RATE
        self.hits += happens
        return happens

    def _begin(self, connection):
        raw = connection.connection.dbapi_connection
        full, read_only = self._happens("full"), self._happens("read-only")
        if self.lite:
            raw.execute(f"PRAGMA max_page_count = {1 if full else 10**9}")  # at least the current size
            raw.execute(f"PRAGMA query_only = {int(read_only)}")
        if full:
            self._fail(raw, "CREATE TABLE filler AS SELECT zeroblob(1000000) AS x" if self.lite else DISK_FULL)
        if read_only and not self.lite:
            raw.execute("SET TRANSACTION READ ONLY")
        if self._happens("slow"):
            time.sleep(0.4)
        if self._happens("locked"):
            self._lock()

    def _fail(self, raw, statement):
        try:
            raw.execute(statement)
        except (sqlite3.Error, psycopg.Error) as error:  # wrapped as if the first statement had failed
            raw.rollback()
            raise OperationalError("insert", {}, error) from error

    def _lock(self):
        """Simulates another process that writes for a while."""
        if self.lite:
            other = sqlite3.connect(self.url.removeprefix("sqlite:///"), check_same_thread=False, isolation_level=None)
            begin = "BEGIN IMMEDIATE"
        else:
            other, begin = psycopg.connect(self.url), "LOCK TABLE casemate_events IN EXCLUSIVE MODE NOWAIT"
        try:
            other.execute(begin)
        except (sqlite3.Error, psycopg.Error):  # it is already locked
            other.close()
        else:
            threading.Timer(0.4, other.close).start()

    def _commit(self, connection):
        if self._happens("cut"):
            raw = connection.connection.dbapi_connection
            if self.lite:
                raise OperationalError("commit", {}, OSError("the file is gone"))
            with psycopg.connect(self.url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", [raw.info.backend_pid])


class GatewayClients:
    """Changes documents and asks questions; records acknowledged changes and answers.

    Attributes: versions: The versions that a source may have. answered: Ids of the answers that a client received.
    early: Answers whose verdict was not in the database when they arrived.
    """

    def __init__(self, url):
        self.versions, self.answered, self.early, self.statuses = {}, [], [], Counter()
        lite = "sqlite" in url
        self.database = (
            sqlite3.connect(url.removeprefix("sqlite:///")) if lite else psycopg.connect(url, autocommit=True)
        )
        body = "body LIKE ?" if lite else "body::text LIKE %s"
        self.query = f"SELECT count(*) FROM casemate_events WHERE kind = 'verdict' AND {body}"

    def close(self):
        self.database.close()

    def write(self, http, source, version):
        allowed = self.versions.setdefault(source, set())
        allowed.add(version)
        sent = {"documents": [{"source": source, "text": f"{version} maple"}]}
        if self._sent(http, "/v1/documents", sent).status_code == 200:
            self.versions[source] = {version}

    def ask(self, http):
        answer = self._sent(http, "/v1/chat/completions", chat("only3"))
        if answer.status_code == 200:
            request = answer.headers["x-request-id"]
            self.answered.append(request)
            found = self.database.execute(self.query, (f"%{request}%",)).fetchone()[0]
            self.early += [] if found else [request]
            assert "d3" not in answer.json()["choices"][0]["message"]["content"].split()

    def _sent(self, http, path, body):
        answer = http.post(path, json=body)
        self.statuses[answer.status_code] += 1
        assert answer.status_code in {200, 503}, answer.text
        return answer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "read-only", "slow", "locked", "cut", "reply lost"])
def test_acknowledged_changes_and_verdicts_survive_faults_of_the_event_store(url, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_S", 0.2)
    monkeypatch.setattr(state, "WRITE_TIMEOUT_S", 0.3)
    rng = random.Random(kind)
    with ExitStack() as opened:
        gateways, faults = [], []
        for _ in range(2):
            app = make(tmp_path, defenses=(HideNamed("d3"),), requests_per_minute=10**6)
            store = opened.enter_context(closing(SqlEventStore(Secret(url), retry_s=0.05)))
            app = replace(app, store=store, guard=app.guard.instrumented(store=store))
            faults.append(FaultInjector(store, url, kind, rng))
            gateways.append(opened.enter_context(client(app, key(app, "admin"))))
        for http in gateways:
            wait_for(lambda at=http: at.get("/v1/models").status_code == 200)
        clients = opened.enter_context(closing(GatewayClients(url)))
        for fault in faults:
            fault.on = True
        for number in range(ROUNDS):
            clients.write(gateways[number % 2], f"s{number % 3}", str(number))
            clients.ask(gateways[number % 2])
        for fault in faults:
            fault.on = False
        for http in gateways:
            wait_for(lambda at=http: at.post("/v1/chat/completions", json=chat("only3")).status_code == 200)
    assert clients.early == []
    assert sum(fault.hits for fault in faults) > 5
    assert clients.statuses[200] and (clients.statuses[503] or kind == "slow")
    with closing(SqlEventStore(Secret(url))) as store:
        recorded = Counter(e.body["request"] for e in store.scan("verdict"))
    assert {request: recorded[request] for request in clients.answered} == dict.fromkeys(clients.answered, 1)
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        index.open(BagOfWords.fingerprint, 256)
        assert index.check() == []
        stored = {d.source: d.text.split()[0] for documents, _ in index.scan() for d in documents}
    for source, allowed in clients.versions.items():
        assert stored.get(source, "absent") in allowed | ({"absent"} if len(allowed) > 1 else set()), source
