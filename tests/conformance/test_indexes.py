"""The obligations of every ``Index``, and requirements on ``PgvectorIndex`` that concern its server."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from casemate.backends import index_checks
from casemate.backends.indexes import pgvector
from casemate.backends.indexes.milvus import MilvusIndex
from casemate.backends.indexes.pgvector import PgvectorIndex
from casemate.backends.indexes.qdrant import QdrantIndex
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError, ConfigError, DataError, MissingExtra
from casemate.maths.moments import CorpusMoments
from casemate.protocols import Index
from casemate.testing import INDEX_OBLIGATIONS, MakeIndex, check_index
from casemate.testing.reference import DIM as CHECK_DIM
from casemate.types import Document, Secret
from tests.fakes import unit
from tests.postgres import database, postgres_server, sql

DIM = 8
QDRANT = os.environ.get("CASEMATE_QDRANT")


@pytest.fixture(scope="module")
def milvus_collections(milvus_url: str) -> list[str]:
    """Empty indexes, created in parallel, because a real server needs seconds for each."""
    names = [f"i{uuid.uuid4().hex}" for _ in INDEX_OBLIGATIONS]

    def make(name: str) -> None:
        index = MilvusIndex(milvus_url, collection=name, timeout_s=60)
        index.open("check", CHECK_DIM)
        index.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, names))
    return names


KINDS = ("sqlite", "sqlite-approximate", "pgvector", "pgvector-approximate", "milvus", "qdrant", "qdrant-server")


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[MakeIndex, bool]:
    name = ["first"]
    if request.param == "qdrant-server" and not QDRANT:
        pytest.skip("no Qdrant server: set CASEMATE_QDRANT to its address")

    def make(fresh: bool) -> Index:
        if fresh:
            milvus = request.param == "milvus"
            name[0] = request.getfixturevalue("milvus_collections").pop() if milvus else f"i{uuid.uuid4().hex}"
        if request.param == "milvus":
            return MilvusIndex(request.getfixturevalue("milvus_url"), collection=name[0], timeout_s=60)
        if "qdrant" in request.param:
            return QdrantIndex(
                Secret(QDRANT or ":memory:") if "server" in request.param else ":memory:", collection=name[0]
            )
        if "pgvector" in request.param:
            by = "hnsw" if "approximate" in request.param else "exact"
            return PgvectorIndex(request.getfixturevalue("vector_url"), schema=name[0], search_by=by)
        return SqliteIndex(tmp_path / name[0] / "index.db", 50 if "approximate" in request.param else 500_000)

    return make, "approximate" not in request.param


LONG = {
    "milvus": ("_is_empty_at_first", "_is_open_only_when_opened", "_agrees_with_a_scan", "_scans_beside_writers"),
    "qdrant": ("_agrees_with_a_scan", "_scans_beside_writers"),
    "pgvector-approximate": ("_scans_beside_writers",),
}
"""Obligations whose tests take more than five seconds."""
KIND_AND_OBLIGATION = [
    pytest.param(
        kind,
        obligation,
        id=f"{kind}-{obligation.__name__.strip('_')}",
        marks=[pytest.mark.slow] if obligation.__name__ in LONG.get(kind, ()) else [],
    )
    for kind in KINDS
    for obligation in INDEX_OBLIGATIONS
]


@pytest.mark.parametrize(("made", "obligation"), KIND_AND_OBLIGATION, indirect=["made"])
def test_index(made, obligation) -> None:
    obligation(*made)


def test_check_index_runs_all_obligations(monkeypatch) -> None:
    calls: list[tuple[object, ...]] = []
    recorders = tuple(lambda *given, number=i: calls.append((number, *given)) for i in range(3))
    monkeypatch.setattr("casemate.testing.indexes.INDEX_OBLIGATIONS", recorders)
    check_index(SqliteIndex)
    check_index(SqliteIndex, exact=False)
    assert calls == [(number, SqliteIndex, exact) for exact in (True, False) for number in range(3)]


# Postgres only


def documents(source: str, count: int) -> list[Document]:
    return [Document(f"{source}/{i}", f"text {i}", source=source) for i in range(count)]


@pytest.fixture
def schema() -> str:
    return f"i{uuid.uuid4().hex}"


@pytest.fixture
def index(vector_url: str, schema: str) -> Iterator[PgvectorIndex]:
    """Open, with 60 documents of 6 sources."""
    index, rng = PgvectorIndex(vector_url, schema=schema, timeout_s=5), np.random.default_rng(0)
    index.open("test", DIM)
    for i in range(6):
        index.add(documents(f"s{i}", 10), unit(rng, 10))
    yield index
    index.close()


@pytest.mark.parametrize(
    ("target", "retryable", "says"),
    [
        ("postgresql://anna:s3cr%40t@127.0.0.1:1/db", True, "127.0.0.1:1/db"),
        ("postgresql://anna:s3cr%40t@no.such.host.invalid/db", True, "no.such.host.invalid/db"),
        ("stranger", False, "does not exist"),
        ("nowhere", False, "does not exist"),
    ],
)
def test_connection_errors_do_not_contain_the_password(vector_url, target, retryable, says) -> None:
    if target == "stranger":
        target = vector_url.replace("postgres:@", "stranger:s3cr%40t@")
    elif target == "nowhere":
        target = vector_url.replace("postgres:@", "postgres:s3cr%40t@").replace("?", "x?")
    index, begin = PgvectorIndex(Secret(target), timeout_s=2), time.monotonic()
    for call in (lambda: index.open("test", DIM), index.clear):
        with pytest.raises(BackendError, match=says) as caught:
            call()
        assert caught.value.backend == "pgvector"
        assert caught.value.retryable is retryable
        assert "s3cr" not in str(caught.value)
    assert "s3cr" not in repr(index)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://anna:s3c@ret@host/db",
        "postgresql://anna:s3c/ret@host/db",
        "postgresql://anna:/s3cret@host/db",
        "postgresql://anna:s3c%zzret@host/db",
        "postgresql://anna:s3cret@host:port/db",
        "mysql://anna:s3cret@host/db",
        "s3cret",
    ],
)
def test_a_malformed_url_is_rejected_and_not_quoted(url) -> None:
    with pytest.raises(ConfigError, match="not of the form") as caught:
        PgvectorIndex(url)
    assert not {"s3c", "ret@", "anna"} & {part for part in ("s3c", "ret@", "anna") if part in str(caught.value)}
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "options",
    [{"schema": "a-b"}, {"schema": 'x"; DROP'}, {"schema": ""}, {"connections": 0}, {"timeout_s": 0}, {"ef": 1001}],
)
def test_options_are_checked(vector_url, options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PgvectorIndex(vector_url, **options)


def test_a_reserved_word_is_allowed_as_schema(vector_url) -> None:
    index = PgvectorIndex(vector_url, schema="order")
    index.open("test", DIM)
    index.add(documents("a", 3), unit(np.random.default_rng(0), 3))
    assert index.check() == []
    index.close()
    sql(vector_url, 'DROP SCHEMA "order" CASCADE')


def test_only_use_of_the_index_requires_psycopg(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtra, match=r"pip install 'casemate\[postgres\]'"):
        PgvectorIndex(Secret("postgresql://host/db"))


def test_a_missing_extension_is_reported(postgres_url) -> None:
    with database(postgres_url) as url, closing(PgvectorIndex(url)) as index:
        with pytest.raises(BackendError, match="superuser.*CREATE EXTENSION vector") as caught:
            index.open("test", DIM)
    assert not caught.value.retryable


def test_an_encoding_other_than_utf8_is_reported(postgres_url) -> None:
    name = f"t{uuid.uuid4().hex}"
    sql(postgres_url, f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(BackendError, match="not in UTF8; create one with ENCODING 'UTF8'"):
        PgvectorIndex(postgres_url.replace("/postgres?", f"/{name}?")).open("test", DIM)
    sql(postgres_url, f"DROP DATABASE {name}")


def test_a_schema_of_another_program_is_rejected_and_not_changed(vector_url, schema) -> None:
    index = PgvectorIndex(vector_url, schema=schema)
    for table in ("document (key int)", "tenant (name text)", "meta (name text, value text)", "meta (other int)"):
        sql(
            vector_url,
            f"DROP SCHEMA IF EXISTS {schema} CASCADE",
            f"CREATE SCHEMA {schema}",
            f"CREATE TABLE {schema}.{table}",
        )
        for call in (lambda: index.open("test", DIM), index.clear):
            with pytest.raises(DataError, match=schema):
                call()
        sql(
            vector_url, f"DROP TABLE {schema}.{table.split()[0]}", f"DROP SCHEMA {schema}"
        )  # no table of Casemate remains
    index.close()


def test_missing_privileges_are_reported(vector_url, index, schema) -> None:
    role = f"r{uuid.uuid4().hex}"
    sql(
        vector_url,
        f"CREATE ROLE {role} LOGIN",
        f"GRANT USAGE ON SCHEMA {schema} TO {role}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}",
    )
    reader = PgvectorIndex(vector_url.replace("postgres:@", f"{role}:@"), schema=schema)
    reader.open("test", DIM)
    q = unit(np.random.default_rng(1), 1)[0]
    assert reader.search(q, 3) == index.search(q, 3)
    assert reader.check() == []
    with pytest.raises(BackendError, match="role lacks a privilege") as caught:
        reader.remove(["s1"])
    assert not caught.value.retryable
    reader.close()
    sql(vector_url, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_documents_that_postgres_cannot_store_are_rejected_with_their_ids(index) -> None:
    vector = unit(np.random.default_rng(1), 1)
    for document, says in [
        (Document("x", "a\0b"), "'x' contains a NUL"),
        (Document("x", "", source="a\0b"), "'x' contains a NUL"),
        (Document("x" * 3000, ""), "2600 bytes"),
        (Document("x", "", source="\u6f22" * 1000), "2600 bytes"),
    ]:
        with pytest.raises(DataError, match=says):
            index.add([document], vector)
    with pytest.raises(DataError):
        index.search(vector[0], 1, tenant="a\0b")
    assert index.remove(["a\0b", "s1"]) == 10
    random = np.random.default_rng(2).integers(0x20, 0x7F, 2500, dtype=np.uint8).tobytes().decode()
    index.add([Document(random, "as long as it may be", source="s")], vector)
    assert index.check() == []


def test_the_graph_is_used_for_small_k_only(vector_url, schema) -> None:
    """With few candidates the graph misses some hits; searches that need more candidates are exact."""
    graph = PgvectorIndex(vector_url, schema=schema, search_by="hnsw", m=4, ef_construct=8, ef=1)
    exact = PgvectorIndex(vector_url, schema=schema)
    for index in (graph, exact):
        index.open("test", DIM)
    E, q = unit(np.random.default_rng(1), 3000), unit(np.random.default_rng(2), 1)[0]
    graph.add(documents("a", 3000), E)
    graph.add(documents("b", 5), unit(np.random.default_rng(3), 5), "small")
    sql(vector_url, f"ANALYZE {schema}.document")
    assert graph.search(q, 2000) == exact.search(q, 2000)
    assert len(graph.search(q, 5, "small").hits) == 5
    s = np.sort(E.astype(np.float64) @ q.astype(np.float64))[::-1]
    assert [h.score for h in exact.search(q, 5).hits] == pytest.approx(s[:5], abs=1e-12)
    found = graph.search(q, 5)
    assert len(found.hits) == 5
    assert found.similarity_stats == exact.search(q, 5).similarity_stats
    for index in (graph, exact):
        index.close()


def test_several_processes_open_a_new_schema_concurrently(vector_url, schema) -> None:
    indexes, failed = [PgvectorIndex(vector_url, schema=schema) for _ in range(6)], []

    def use(index: PgvectorIndex, i: int) -> None:
        try:
            index.open("test", DIM)
            index.add(documents(f"s{i}", 5), unit(np.random.default_rng(i), 5))
        except BaseException as error:
            failed.append(error)

    at_once([lambda i=i, index=index: use(index, i) for i, index in enumerate(indexes)])
    assert failed == []
    assert indexes[0].moments().n == 30
    for index in indexes:
        index.close()


def at_once(calls: list) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_concurrent_searches_can_exceed_the_connections(index) -> None:
    q, found = unit(np.random.default_rng(1), 1)[0], []
    at_once([lambda: found.append(index.search(q, 5)) for _ in range(24)])
    assert len(found) == 24
    assert all(one == found[0] for one in found)


def test_searches_during_clear_read_a_consistent_state(index, vector_url, schema) -> None:
    other, rng, q = PgvectorIndex(vector_url, schema=schema), np.random.default_rng(3), np.eye(1, DIM)[0]
    done, wrong, seen = threading.Event(), [], set()

    def clear() -> None:
        try:
            for _ in range(25):
                other.clear()
                other.open("test", DIM)
                other.add(documents("new", 4), unit(rng, 4))
        finally:
            done.set()

    def search() -> None:
        while not done.is_set():
            try:
                found = index.search(q, 100)
            except DataError as error:
                if "of the embedder None" not in str(error):
                    wrong.append(error)
            else:
                seen.add(len(found.hits))
                wrong.extend([found] if len(found.hits) != found.similarity_stats.n else [])

    at_once([clear, search, search])
    assert wrong == []
    assert seen <= {60, 0, 4}
    other.close()


def test_cached_moments_are_discarded_with_their_schema(index, vector_url, schema) -> None:
    """A counter would not reveal the difference: the recreated tables have had as many changes."""
    q = np.eye(1, DIM)[0]
    assert index.search(q, 1).similarity_stats.n == 60
    sql(vector_url, f"DROP SCHEMA {schema} CASCADE")
    with pytest.raises(DataError, match="has no index"):
        index.search(q, 1)
    other, rng = PgvectorIndex(vector_url, schema=schema), np.random.default_rng(4)
    other.open("test", DIM)
    for i in range(6):
        other.add(documents(f"s{i}", 2), unit(rng, 2))
    assert index.search(q, 100).similarity_stats == other.search(q, 100).similarity_stats
    assert index.search(q, 100).similarity_stats.n == 12
    other.close()


def test_the_moments_cache_is_bounded(index, monkeypatch) -> None:
    monkeypatch.setattr(pgvector, "CACHED_TENANTS", 3)
    rng, q = np.random.default_rng(5), np.eye(1, DIM)[0]
    for i in range(8):
        index.add(documents("a", i + 1), unit(rng, i + 1), f"t{i}")
    for i in range(8):
        assert index.search(q, 1, f"t{i}").similarity_stats.n == i + 1
        assert len(index._cache) <= 3


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("UPDATE {}.tenant SET n = n + 1", "the moments count 61 documents, the index 60"),
        ("UPDATE {}.tenant SET mean = set_byte(mean, 6, get_byte(mean, 6) # 1)", "the moments do not fit"),
        ("UPDATE {}.tenant SET mean = '\\x00'", "the moments are damaged"),
        ("DELETE FROM {}.tenant", "the moments count 0 documents"),
        ("INSERT INTO {}.tenant SELECT 'ghost', 1, 5, mean, scatter FROM {}.tenant", "'ghost': the moments count 5"),
    ],
)
def test_changed_moments_are_reported_and_rebuilt(index, vector_url, schema, statement, complaint) -> None:
    sql(vector_url, statement.replace("{}", schema))
    assert any(complaint in sentence for sentence in index.check())
    index.rebuild()
    assert index.check() == []
    found = index.search(unit(np.random.default_rng(6), 1)[0], 100)
    scores = [h.score for h in found.hits]
    assert found.similarity_stats.n == 60
    assert found.similarity_stats.mean == pytest.approx(np.mean(scores), abs=1e-9)
    assert found.similarity_stats.std == pytest.approx(np.std(scores), abs=1e-9)


def test_changed_vectors_are_reported(index, vector_url, schema) -> None:
    update = f"UPDATE {schema}.document SET embedding = '{{}}' WHERE key = 7"
    sql(vector_url, update.format([0.5] + [0.0] * (DIM - 1)))
    assert any("the vector with key 7 is not of unit length" in sentence for sentence in index.check())
    sql(vector_url, update.format([1.0] + [0.0] * (DIM - 1)))
    assert [("do not fit" in sentence) for sentence in index.check()] == [True]


def test_a_changed_text_is_detected_and_not_returned(index, vector_url, schema) -> None:
    sql(vector_url, f"UPDATE {schema}.document SET text = text || ' ' WHERE key = 7")
    assert [("do not fit their checksum" in sentence) for sentence in index.check()] == [True]
    with pytest.raises(DataError, match="is damaged in the index"):
        index.search(unit(np.random.default_rng(6), 1)[0], 100)


def test_an_index_of_a_version_without_checksums_is_read_and_reported(index, vector_url, schema) -> None:
    sql(vector_url, f"ALTER TABLE {schema}.document DROP COLUMN checksum")
    index.open("test", DIM)
    assert len(index.search(unit(np.random.default_rng(6), 1)[0], 100).hits) == 60
    assert [sentence.partition(",")[0] for sentence in index.check()] == ["60 documents have no checksum"]


def test_check_and_rebuild_read_in_pages(index, monkeypatch) -> None:
    monkeypatch.setattr(pgvector, "FETCH_ROWS", 7)
    assert index.check() == []
    before = index.moments()
    index.rebuild()
    assert index.check() == []
    assert np.abs(index.moments().scatter - before.scatter).max() < 1e-9


def test_a_scan_releases_its_connection_between_pages(index, monkeypatch) -> None:
    monkeypatch.setattr(index_checks, "SCAN_PAGE", 7)
    scans = [index.scan() for _ in range(2 * index.connections)]
    for pages in scans:
        next(pages)
    index.remove(["s0", "s3"])
    sizes = [[len(documents) for documents, _ in pages] for pages in scans]
    assert sizes == [[7, 7, 7, 7, 7, 5]] * len(scans)


def test_a_running_scan_stops_if_the_embedder_changes(index, vector_url, schema, monkeypatch) -> None:
    monkeypatch.setattr(index_checks, "SCAN_PAGE", 7)
    pages, other = index.scan(), PgvectorIndex(vector_url, schema=schema)
    next(pages)
    other.clear()
    other.open("another", DIM)
    with pytest.raises(DataError, match="of the embedder 'another'"):
        next(pages)
    other.close()


def test_moments_stay_accurate_over_many_changes(index) -> None:
    rng, stored = np.random.default_rng(7), {}
    index.remove([f"s{i}" for i in range(6)])
    for _ in range(300):
        source = f"s{rng.integers(20)}"
        stored[source] = unit(rng, int(rng.integers(1, 4)))
        index.add(documents(source, len(stored[source])), stored[source])
    fresh = CorpusMoments.of(np.concatenate(list(stored.values())))
    assert index.moments().n == fresh.n
    assert np.abs(index.moments().scatter - fresh.scatter).max() < 1e-9


def test_a_writer_that_waits_too_long_is_reported(index, vector_url, schema) -> None:
    import psycopg

    hasty = PgvectorIndex(vector_url, schema=schema, timeout_s=0.3)
    hasty.open("test", DIM)
    with psycopg.connect(vector_url) as slow:
        slow.execute(f"SELECT 1 FROM {schema}.tenant FOR UPDATE")
        with pytest.raises(BackendError, match="longer than timeout_s") as caught:
            hasty.remove(["s1"])
        assert caught.value.retryable
        assert len(hasty.search(np.eye(1, DIM)[0], 100).hits) == 60  # readers are not blocked
    assert hasty.remove(["s1"]) == 10
    hasty.close()


def test_lost_connections_are_replaced(index, vector_url) -> None:
    q = np.eye(1, DIM)[0]
    for _ in range(3):
        at_once([lambda: index.search(q, 1) for _ in range(8)])
        sql(vector_url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'casemate'")
        assert len(index.search(q, 100).hits) == 60


def test_a_frozen_connection_times_out_and_is_replaced(vector_url, index, schema) -> None:
    """The server keeps the connection open but does not answer, like a hung machine."""
    hasty, q = PgvectorIndex(vector_url, schema=schema, connections=1, timeout_s=0.5), np.eye(1, DIM)[0]
    hasty.open("test", DIM)
    hasty.search(q, 1)
    with hasty._server.transaction("READ ONLY") as db:
        pid = db.info.backend_pid
    begin = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(BackendError) as caught:
            hasty.search(q, 1)
        assert caught.value.retryable
        assert time.monotonic() - begin < 5
        assert len(hasty.search(q, 100).hits) == 60  # on a connection that is not frozen
    finally:
        os.kill(pid, signal.SIGCONT)
        hasty.close()


@pytest.fixture
def restartable() -> Iterator:
    """A separate server that a test can stop and start."""
    with postgres_server() as running:
        sql(running.get_uri(), "CREATE EXTENSION vector")
        yield running


def test_the_index_reconnects_to_a_restarted_server(restartable) -> None:
    from pgserver._commands import pg_ctl

    def stop() -> None:
        pg_ctl(["-m", "immediate", "-w", "stop"], pgdata=restartable.pgdata, user=restartable.system_user)

    index, rng = PgvectorIndex(restartable.get_uri(), timeout_s=1), np.random.default_rng(8)
    index.open("test", DIM)
    index.add(documents("a", 20), unit(rng, 20))
    stop()
    restartable.ensure_postgres_running()
    assert len(index.search(np.eye(1, DIM)[0], 100).hits) == 20  # the next call succeeds
    stop()
    for call in (lambda: index.search(np.eye(1, DIM)[0], 1), lambda: index.remove(["a"]), index.check):
        begin = time.monotonic()
        with pytest.raises(BackendError) as caught:
            call()
        assert caught.value.retryable
        assert time.monotonic() - begin < 5
    restartable.ensure_postgres_running()
    assert len(index.search(np.eye(1, DIM)[0], 100).hits) == 20
    assert index.remove(["a"]) == 20
    assert index.check() == []
    index.close()
