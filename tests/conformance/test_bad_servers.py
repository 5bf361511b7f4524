"""Servers that stop, hang, reject the password or have another version: each store raises, and the guard fails closed.

Postgres and Milvus are real servers behind a proxy that can be closed. Qdrant is its HTTP interface in front of the
client's local mode (``tests.qdrant_wire``).
"""

from __future__ import annotations

import asyncio
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from pymilvus import DataType, MilvusClient
from pymilvus.grpc_gen import common_pb2, milvus_pb2
from qdrant_client import models

from casemate.backends import index_checks
from casemate.backends.clients import postgres
from casemate.backends.collections import milvus_collection, pgvector_table, qdrant_collection
from casemate.backends.collections.milvus_collection import MilvusCollection
from casemate.backends.collections.pgvector_table import PgvectorTable
from casemate.backends.collections.qdrant_collection import QdrantCollection
from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.indexes.milvus import MilvusIndex
from casemate.backends.indexes.pgvector import PgvectorIndex
from casemate.backends.indexes.qdrant import QdrantIndex
from casemate.backends.sidecar import attach_scan as scanning
from casemate.errors import BackendError
from casemate.guard.guard import Guard
from casemate.protocols import Index
from casemate.rag.pipeline import Rag
from casemate.types import Document, Query, Secret
from tests.bad_servers import ServerProxy, faulty_milvus, silent_server, web_server
from tests.fakes import BagOfWords, Parrot
from tests.postgres import database as new_database
from tests.postgres import sql as execute
from tests.qdrant_wire import QdrantWire, qdrant_wire

pytestmark = [
    pytest.mark.filterwarnings("ignore:Api key is used with an insecure connection:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the Milvus server's launcher
]
DIM, N = 16, 60
SHORT_TIMEOUT_S, LONG_TIMEOUT_S = 1.0, 60.0
"""Timeouts of a call: where the server must fail, and where it must answer on a busy machine."""
MAX_DURATION_S = 20
"""Limit for a call with ``SHORT_TIMEOUT_S``: opening makes several calls, and a pool retries."""
OWN, ATTACHED = ("pgvector", "milvus", "qdrant"), ("pgvector_table", "milvus_collection", "qdrant_collection")
STORES = OWN + ATTACHED
EMBEDDER = BagOfWords(dim=DIM)
DOCUMENTS = [
    Document("1", "the patient Anna Weiss has diabetes"),
    *(Document(str(i), f"text {i}") for i in range(2, N + 1)),
]


def make_index(
    store: str, port: int, folder: Path, name: str = "nowhere", timeout_s: float = SHORT_TIMEOUT_S, **options: Any
) -> Index:
    """An index that is not opened, in the server on a port or attached to it."""
    user = options.pop("user", "anna")
    address = Secret(f"postgresql://{user}:s3cret@127.0.0.1:{port}/{options.pop('database', 'db')}")
    http = Secret(f"http://127.0.0.1:{port}")
    given = {"timeout_s": timeout_s, **options}
    if store == "pgvector":
        return PgvectorIndex(address, schema=name, connections=1, **given)
    if store == "milvus":
        return MilvusIndex(http, Secret("anna:s3cret"), collection=name, **given)
    if store == "qdrant":
        return QdrantIndex(http, Secret("s3cret"), collection=name, **given)
    collection = {
        "pgvector_table": lambda: PgvectorTable(address, name, connections=1, **given),
        "milvus_collection": lambda: MilvusCollection(http, name, Secret("anna:s3cret"), **given),
        "qdrant_collection": lambda: QdrantCollection(http, name, Secret("s3cret"), **given),
    }[store]()
    return AttachedIndex(collection, folder / "attached.db", near_copies=0)


def assert_fails(call: Callable[[], object], store: str, *, retryable: bool, says: str | None = None) -> None:
    """Asserts that a call fails in time with an error that contains neither a secret nor a document."""
    begin = time.monotonic()
    with pytest.raises(BackendError, match=says) as caught:
        call()
    assert time.monotonic() - begin < MAX_DURATION_S
    assert caught.value.backend == store
    assert caught.value.retryable is retryable
    text = "".join(traceback.format_exception(caught.value))
    assert "s3cret" not in text
    assert "diabetes" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


# Errors on open


@pytest.mark.parametrize("store", STORES)
def test_open_fails_without_a_server(store, tmp_path) -> None:
    index = make_index(store, 1, tmp_path)
    assert_fails(lambda: index.open("test", DIM), store, retryable=True)
    assert "s3cret" not in repr(index)


@pytest.mark.parametrize("store", STORES)
def test_open_fails_if_the_server_never_answers(store, tmp_path, caplog) -> None:
    with silent_server() as port:
        assert_fails(lambda: make_index(store, port, tmp_path).open("test", DIM), store, retryable=True)
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("store", "status"), [*((store, 200) for store in STORES), ("qdrant", 404), ("qdrant_collection", 404)]
)
def test_open_fails_on_an_unrelated_web_server(store, status, tmp_path) -> None:
    with web_server(status) as port:
        retryable, says = (False, "not from Qdrant") if "qdrant" in store else (True, None)
        assert_fails(lambda: make_index(store, port, tmp_path).open("test", DIM), store, retryable=retryable, says=says)


QDRANT = [
    (401, b"no", False, "refuses the API key; set api_key"),
    (403, b"{}", False, "the API key lacks a permission"),
    (429, b"{}", True, "429"),
    (503, b"busy with s3cret", True, "503: busy with"),
    (507, b"{}", True, "disk is full"),
    (200, b'{"result": {"payload": {"text": "diabetes"}}}', False, "cannot be parsed"),
    (200, b'{"result": null}', False, "not from Qdrant"),
]


@pytest.mark.parametrize("store", ["qdrant", "qdrant_collection"])
@pytest.mark.parametrize(("status", "body", "retryable", "says"), QDRANT)
def test_errors_of_a_qdrant_server(store, status, body, retryable, says, tmp_path) -> None:
    with web_server(status, body) as port:
        assert_fails(lambda: make_index(store, port, tmp_path).open("test", DIM), store, retryable=retryable, says=says)


CONNECTED = {
    "Connect": milvus_pb2.ConnectResponse(status=common_pb2.Status(), identifier=1),
    "GetVersion": milvus_pb2.GetVersionResponse(version="v2.3.5"),
}
OLD = {**CONNECTED, "GetVersion": milvus_pb2.GetVersionResponse(version="v2.2.9")}
MILVUS = [
    ({}, grpc.StatusCode.UNAUTHENTICATED, False, "refuses the token"),
    (CONNECTED, grpc.StatusCode.UNAUTHENTICATED, False, "refuses the token"),
    (CONNECTED, grpc.StatusCode.PERMISSION_DENIED, False, "refuses the token"),
    ({}, grpc.StatusCode.UNIMPLEMENTED, False, "gRPC port of Milvus 2.3 or later"),
    (CONNECTED, grpc.StatusCode.UNIMPLEMENTED, False, "gRPC port of Milvus 2.3 or later"),
    (CONNECTED, grpc.StatusCode.UNAVAILABLE, True, "UNAVAILABLE"),
    (CONNECTED, grpc.StatusCode.INTERNAL, True, "INTERNAL"),
    (OLD, grpc.StatusCode.UNIMPLEMENTED, False, r"is Milvus v2\.2\.9; 2\.3 or later is needed"),
]


@pytest.mark.parametrize("store", ["milvus", "milvus_collection"])
@pytest.mark.parametrize(("answers", "other", "retryable", "says"), MILVUS)
def test_errors_of_a_milvus_server(store, answers, other, retryable, says, tmp_path, caplog) -> None:
    with faulty_milvus(answers, other, "not for anna:s3cret") as port:
        assert_fails(lambda: make_index(store, port, tmp_path).open("test", DIM), store, retryable=retryable, says=says)
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(("store", "needed"), [("qdrant", "1.16"), ("qdrant_collection", "1.10")])
def test_an_old_qdrant_server(store, needed, tmp_path) -> None:
    with qdrant_wire() as wire:
        wire.version = "1.9.2"
        says = f"is Qdrant 1.9.2; {needed} or later is needed"
        assert_fails(
            lambda: make_index(store, wire.port, tmp_path).open("test", DIM), store, retryable=False, says=says
        )


def socket_path(url: str) -> str:
    """Path of the socket of pgserver."""
    return f"{url.partition('?host=')[2].replace('%2F', '/')}/.s.PGSQL.5432"


@pytest.fixture
def database(postgres_url: str) -> Iterator[tuple[str, int]]:
    """Name of a database without pgvector, and the port of a proxy to its server."""
    proxy = ServerProxy(socket_path(postgres_url))
    with new_database(postgres_url) as url:
        yield url.partition("?")[0].rpartition("/")[2], proxy.port
        proxy.crash()


def sql(url: str, name: str, *statements: str) -> None:
    """Executes statements in the database with this name."""
    execute(url.replace("/postgres?", f"/{name}?"), *statements)


def _loaded(url: str) -> object:
    """Time at which the server loaded its configuration, read over a new connection."""
    import psycopg

    with psycopg.connect(url) as server:
        return server.execute("SELECT pg_conf_load_time()").fetchone()


@pytest.mark.parametrize("store", ["pgvector", "pgvector_table"])
def test_open_fails_if_postgres_rejects_the_password(store, postgres_url, database, tmp_path) -> None:
    """A real server that requires a password for this role only."""
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as server:
        hba_file = Path(server.execute("SHOW hba_file").fetchone()[0])  # type: ignore[index]
        before, role = hba_file.read_text(), f"r{uuid.uuid4().hex}"
        hba_file.write_text(f"local all {role} scram-sha-256\n{before}")
        try:
            server.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'another'")
            loaded = _loaded(postgres_url)
            server.execute("SELECT pg_reload_conf()")
            while _loaded(postgres_url) == loaded:
                time.sleep(0.01)
            index = make_index(store, database[1], tmp_path, user=role, database=database[0])
            assert_fails(lambda: index.open("test", DIM), store, retryable=False, says="password authentication failed")
        finally:
            hba_file.write_text(before)
            server.execute("SELECT pg_reload_conf()")
            server.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("store", ["pgvector", "pgvector_table"])
def test_open_fails_if_postgres_lacks_pgvector(store, database, tmp_path) -> None:
    index = make_index(store, database[1], tmp_path, user="postgres", database=database[0])
    assert_fails(lambda: index.open("test", DIM), store, retryable=False, says="CREATE EXTENSION vector")


def test_a_pgvector_without_hnsw_supports_exact_search_only(postgres_url, database, tmp_path) -> None:
    """Before version 0.5 there is no HNSW index; the exact index and an attached table work."""
    name, port = database
    lose = "UPDATE pg_am SET amname = 'other_am' WHERE amname = 'hnsw'"
    table = f"CREATE TABLE theirs (id int PRIMARY KEY, text text, embedding vector({DIM}))"
    row = f"INSERT INTO theirs VALUES (1, 'one', '{[1] * DIM}')"
    sql(postgres_url, name, "CREATE EXTENSION vector", lose, table, row)
    about = {"user": "postgres", "database": name, "timeout_s": LONG_TIMEOUT_S}
    graph = make_index("pgvector", port, tmp_path, "graph", search_by="hnsw", **about)
    assert_fails(lambda: graph.open("test", DIM), "pgvector", retryable=False, says="hnsw.*0.5 or later")
    graph.close()
    q = EMBEDDER.embed(["one"])[0]
    for store, index_name in (("pgvector", "exact"), ("pgvector_table", "theirs")):
        index = make_index(store, port, tmp_path, index_name, **about)
        index.open("test", DIM)
        if isinstance(index, AttachedIndex):
            index.attach()
        else:
            index.add(DOCUMENTS[:1], EMBEDDER.embed([DOCUMENTS[0].content]))
        assert len(index.search(q, 1).hits) == 1
        index.close()


# Errors after open


class Case:
    """An open index with ``DOCUMENTS`` behind a proxy, and a guard in front of it."""

    def __init__(self, store: str, index: Index, proxy: ServerProxy) -> None:
        self.store, self.index, self.proxy = store, index, proxy
        # A busy machine may exceed SHORT_TIMEOUT_S here, so the tested timeout starts later.
        self.guard = eventually(lambda: Guard(Rag(EMBEDDER, index, Parrot()), ()))  # opens the index
        eventually(self._fill)
        assert eventually(self.ask) == "1"

    def _fill(self) -> None:
        if isinstance(self.index, AttachedIndex):
            self.index.attach()
        elif not self.index.moments().n:
            self.index.add(DOCUMENTS, EMBEDDER.embed([d.content for d in DOCUMENTS]))

    def ask(self) -> str:
        return asyncio.run(self.guard.ask(Query("patient Anna Weiss has diabetes", k=1))).text.strip()

    def wait(self, seconds: float) -> None:
        """Sets the timeout of Milvus calls."""
        if isinstance(self.index, MilvusIndex):
            self.index._store._server.timeout_s = seconds
        elif self.store == "milvus_collection":
            self.index.collection._server.timeout_s = seconds


@pytest.fixture(scope="module")
def theirs_in_milvus(milvus_url: str) -> str:
    """A collection of another program. Module scope, because the server needs seconds to create one."""
    client, name = MilvusClient(milvus_url, timeout=LONG_TIMEOUT_S), f"c{uuid.uuid4().hex}"
    schema = client.create_schema()
    schema.add_field("id", DataType.VARCHAR, max_length=50, is_primary=True)
    schema.add_field("text", DataType.VARCHAR, max_length=500)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    params = client.prepare_index_params()
    params.add_index("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=params, timeout=LONG_TIMEOUT_S)
    rows = zip(DOCUMENTS, EMBEDDER.embed([d.content for d in DOCUMENTS]), strict=True)
    client.insert(name, [{"id": d.id, "text": d.text, "vector": v.tolist()} for d, v in rows])
    client.close()
    return name


def in_qdrant(wire: QdrantWire) -> str:
    wire.client.create_collection("theirs", models.VectorParams(size=DIM, distance=models.Distance.COSINE))
    rows = zip(DOCUMENTS, EMBEDDER.embed([d.content for d in DOCUMENTS]), strict=True)
    points = [models.PointStruct(id=int(d.id), vector=v.tolist(), payload={"text": d.text}) for d, v in rows]
    wire.client.upsert("theirs", points)
    return "theirs"


@pytest.fixture(params=STORES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    store, options = request.param, dict[str, Any]()
    with ExitStack() as stack:
        if "qdrant" in store:
            wire = stack.enter_context(qdrant_wire())
            wire.key = "s3cret"
            upstream, name = wire.port, in_qdrant(wire) if store in ATTACHED else "ours"
        elif "milvus" in store:
            upstream = int(request.getfixturevalue("milvus_url").rpartition(":")[2])
            name = request.getfixturevalue("theirs_in_milvus") if store in ATTACHED else f"i{uuid.uuid4().hex}"
            options = {"timeout_s": LONG_TIMEOUT_S}
        else:
            url, (database, _) = request.getfixturevalue("postgres_url"), request.getfixturevalue("database")
            table = f"CREATE TABLE theirs (id int PRIMARY KEY, text text, embedding vector({DIM}))"
            rows = zip(DOCUMENTS, EMBEDDER.embed([d.content for d in DOCUMENTS]), strict=True)
            values = ", ".join(f"({d.id}, '{d.text}', '{v.tolist()}')" for d, v in rows)
            sql(url, database, "CREATE EXTENSION vector", table, f"INSERT INTO theirs VALUES {values}")
            upstream, name = socket_path(url), "theirs" if store in ATTACHED else "ours"
            options = {"user": "postgres", "database": database}
        proxy = ServerProxy(upstream)
        stack.callback(proxy.crash)
        case = Case(store, make_index(store, proxy.port, tmp_path, name, **options), proxy)
        stack.callback(case.index.close)
        yield case


def test_the_guard_fails_closed_if_a_server_hangs(case) -> None:
    case.wait(SHORT_TIMEOUT_S)
    case.proxy.silent.set()
    for _ in range(2):
        assert_fails(case.ask, case.store, retryable=True)
    case.proxy.silent.clear()
    case.wait(LONG_TIMEOUT_S)
    assert eventually(case.ask) == "1"


def test_the_guard_fails_closed_if_a_server_stops_during_a_search(case) -> None:
    case.wait(SHORT_TIMEOUT_S)
    case.proxy.dying.set()
    for _ in range(2):  # during the answer, and after the server stopped
        assert_fails(case.ask, case.store, retryable=True)
    case.proxy.open()
    case.wait(LONG_TIMEOUT_S)
    assert eventually(case.ask) == "1"


@pytest.mark.parametrize("how", ["dying", "silent"])
def test_a_scan_fails_with_the_server_and_an_attached_scan_resumes(case, how, monkeypatch) -> None:
    monkeypatch.setattr(index_checks, "SCAN_PAGE", 7)
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 7)
    monkeypatch.setattr(postgres, "STREAM_TIMEOUTS", 1)
    for module in (milvus_collection, pgvector_table, qdrant_collection):
        monkeypatch.setattr(module, "SCAN_PAGE", 7)
    seen: list[int] = []

    def fail(rows: int) -> None:
        seen.append(rows)
        if rows >= 14:
            getattr(case.proxy, how).set()

    def scan() -> int:
        if isinstance(case.index, AttachedIndex):
            return case.index.attach(fail).rows
        count = 0
        for documents, _ in case.index.scan():
            fail(count := count + len(documents))
        return count

    case.wait(5 * SHORT_TIMEOUT_S)  # the driver's iterator keeps its initial timeout
    assert_fails(scan, case.store, retryable=True)
    assert 14 <= seen[-1] < N
    if how == "dying":
        case.proxy.open()
    case.proxy.silent.clear()
    case.wait(LONG_TIMEOUT_S)
    if isinstance(case.index, AttachedIndex):
        assert eventually(lambda: case.index.attach().rows) == N
    assert eventually(case.ask) == "1"


def eventually(call: Callable[[], Any]) -> Any:
    """Retries a call after a restart, because a pool or channel may need a moment to reconnect."""
    begin = time.monotonic()
    while True:
        try:
            return call()
        except BackendError:
            if time.monotonic() - begin > LONG_TIMEOUT_S:
                raise
            time.sleep(0.2)


@pytest.mark.parametrize("store", ["qdrant", "qdrant_collection"])
@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_the_guard_fails_closed_if_qdrant_rejects_requests(store, status, tmp_path) -> None:
    with qdrant_wire() as wire:
        wire.key = "s3cret"
        case = Case(store, make_index(store, wire.port, tmp_path, in_qdrant(wire)), ServerProxy(wire.port))
        wire.fault = status, b"<html>closed</html>"
        assert_fails(case.ask, store, retryable=status == 500)
        case.index.close()
