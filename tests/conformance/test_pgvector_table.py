"""Somebody's table in a real Postgres, attached: nothing written, nothing believed, whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate.attaching import run as scanning
from casemate.attaching.sidecar import Sidecar
from casemate.backends import pgvector_table
from casemate.backends.attached import AttachedIndex
from casemate.backends.pgvector_table import PgvectorTable
from casemate.cli import cli
from casemate.errors import BackendError, CapabilityError, CasemateError, ConfigError, DataError
from casemate.stats import CorpusMoments
from casemate.types import Document, Secret

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only runs and dies
DIM = 8


def sql(url: str, *statements: str) -> list:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        done = [db.execute(statement) for statement in statements]
        return done[-1].fetchall() if done[-1].description else []


@pytest.fixture(scope="session")
def table_url(postgres_url: str) -> Iterator[str]:
    """A database of our own, with pgvector in it."""
    name = f"t{uuid.uuid4().hex}"
    url = postgres_url.replace("/postgres?", f"/{name}?")
    sql(postgres_url, f"CREATE DATABASE {name}")
    sql(url, "CREATE EXTENSION vector")
    yield url
    sql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


def vectors(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def written(v: np.ndarray) -> str:
    return f"'[{','.join(map(repr, v.tolist()))}]'"


@pytest.fixture
def table(table_url: str) -> str:
    """500 rows with numbers as ids, vectors of any length; ids do not sort as their texts do."""
    name = f"Their {uuid.uuid4().hex[:8]}"
    sql(
        table_url,
        f'CREATE TABLE "{name}" (nr bigint PRIMARY KEY, "Body" text, doc text, vec vector({DIM}), about jsonb)',
        f'INSERT INTO "{name}" VALUES '
        + ", ".join(
            f"({i}, 'text {i}', 'doc {i // 5}', {written(v)}, '{{\"n\": {i}}}')" for i, v in enumerate(vectors(1, 500))
        ),
    )
    return name


def of(url: str, table: str, **options) -> PgvectorTable:
    given = {"id": "nr", "text": "Body", "vector": "vec", "source": "doc", "metadata": "about", "timeout_s": 5}
    return PgvectorTable(Secret(url), table, **(given | options))


def opened(collection: PgvectorTable, folder: Path, **options) -> AttachedIndex:
    index = AttachedIndex(collection, folder / "attached.db", **options)
    index.open("test", DIM)
    return index


def law(url: str, table: str, where: str = "true") -> CorpusMoments:
    rows = sql(url, f'SELECT vec::text FROM "{table}" WHERE vec IS NOT NULL AND "Body" IS NOT NULL AND {where}')
    X = np.array([json.loads(row[0]) for row in rows], np.float64)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    m = X.mean(axis=0)
    return CorpusMoments(len(X), m, sum((np.outer(x - m, x - m) for x in X), np.zeros((DIM, DIM))))


def same(a: CorpusMoments, b: CorpusMoments) -> bool:
    return a.n == b.n and np.allclose(a.mean, b.mean, atol=1e-6) and np.allclose(a.scatter, b.scatter, atol=1e-4)


def test_any_table_is_attached_and_nothing_is_written(table_url, table, tmp_path) -> None:
    """By a role that may read, and only that; the rows and the transactions that wrote them are the same after."""
    role = f"r{uuid.uuid4().hex}"
    sql(table_url, f"CREATE ROLE {role} LOGIN", f'GRANT SELECT ON "{table}" TO {role}')
    state = f"SELECT md5(string_agg(ctid::text || xmin || xmax || t::text, ',' ORDER BY nr)) FROM \"{table}\" AS t"
    before = sql(table_url, state)
    index = opened(of(table_url.replace("postgres:@", f"{role}:@"), table), tmp_path)
    about = index.attach()
    assert (about.rows, about.sources, about.rescaled, about.dim) == (500, 100, 500, DIM)
    assert same(index.moments(), law(table_url, table))
    q = vectors(2, 1)[0] / np.linalg.norm(vectors(2, 1)[0])
    found = index.search(q, 4)
    X = vectors(1, 500).astype(np.float64)
    cosine = X @ q / np.linalg.norm(X, axis=1)
    best = np.argsort(-cosine)[:4].tolist()
    assert [h.document.id for h in found.hits] == [str(i) for i in best]
    assert [h.score for h in found.hits] == pytest.approx(cosine[best].tolist(), abs=1e-6)
    assert found.hits[0].document.source == f"doc {best[0] // 5}"
    assert found.hits[0].document.metadata == {"n": best[0]}
    assert index.check() == []
    with pytest.raises(CapabilityError, match="writable"):
        index.remove(["doc 1"])
    index.rebuild()
    index.close()
    assert sql(table_url, state) == before
    sql(table_url, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_graph_gives_as_many_as_are_wanted(table_url, table, tmp_path) -> None:
    """An HNSW index gives no more than it keeps open, and conditions take from that."""
    sql(table_url, f'CREATE INDEX ON "{table}" USING hnsw (vec vector_cosine_ops)')
    index = opened(of(table_url, table, effort=10), tmp_path)
    index.attach()
    q = vectors(2, 1)[0] / np.linalg.norm(vectors(2, 1)[0])
    assert len(index.search(q, 400).hits) == 400
    index.close()
    few = opened(of(table_url, table, effort=10, where="nr % 100 = 7"), tmp_path / "few")
    few.attach()
    found = few.search(q, 9)
    assert sorted(h.document.id for h in found.hits) == ["107", "207", "307", "407", "7"]
    assert found.background.n == 5
    few.close()


def test_arrays_and_views_are_read_too(table_url, table, tmp_path) -> None:
    sql(table_url, f'CREATE VIEW "{table} v" AS SELECT nr, "Body", doc, about, vec::real[] AS vec FROM "{table}"')
    index = opened(of(table_url, f"public.{table} v"), tmp_path)
    index.attach()
    assert same(index.moments(), law(table_url, table))
    assert len(index.search(vectors(2, 1)[0], 3).hits) == 3
    index.close()


def test_tenants_are_kept_apart(table_url, table, tmp_path) -> None:
    sql(table_url, f'ALTER TABLE "{table}" ADD owner int', f'UPDATE "{table}" SET owner = nr % 3')
    index = opened(of(table_url, table, tenant="owner"), tmp_path)
    index.attach()
    assert index.tenants() == ["0", "1", "2"]
    assert same(index.moments("1"), law(table_url, table, "owner = 1"))
    found = index.search(vectors(2, 1)[0], 500, "1")
    assert {int(h.document.id) % 3 for h in found.hits} == {1}
    assert len(found.hits) == found.background.n == 167
    index.close()


def test_rows_without_text_or_vector_are_left_out_and_counted(table_url, table, tmp_path) -> None:
    sql(
        table_url,
        f'UPDATE "{table}" SET "Body" = NULL WHERE nr < 30',
        f'UPDATE "{table}" SET vec = NULL WHERE nr BETWEEN 20 AND 50',
    )
    index = opened(of(table_url, table), tmp_path, drift=0.001)
    about = index.attach()
    assert (about.rows, about.textless, about.vectorless) == (449, 30, 21)
    assert same(index.moments(), law(table_url, table))
    assert len(index.search(vectors(2, 1)[0], 500).hits) == 449  # those left out are no drift
    index.close()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("ALTER {t} ALTER vec TYPE vector; UPDATE {t} SET vec = '[1,2,3]' WHERE nr IN (4, 9)", "'4', '9' are not of 8"),
        ("UPDATE {t} SET vec = '[0,0,0,0,0,0,0,0]' WHERE nr = 41", "'41' are zero or not finite"),
        ("ALTER {t} DROP CONSTRAINT {p}; UPDATE {t} SET nr = 42 WHERE nr = 43", "two rows of the id '42'"),
        ("ALTER {t} DROP CONSTRAINT {p}; ALTER {t} ALTER nr DROP NOT NULL; UPDATE {t} SET nr = NULL WHERE nr=9", "NU"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(table_url, table, tmp_path, damage, says) -> None:
    for statement in damage.replace("ALTER {t} ", "ALTER TABLE {t} ").split("; "):
        sql(table_url, statement.format(t=f'"{table}"', p=f'"{table}_pkey"'))
    index = opened(of(table_url, table), tmp_path)
    with pytest.raises(DataError, match=says):
        index.attach()
    with pytest.raises(DataError, match="run 'casemate attach'"):  # and so nothing is guarded by half of it
        index.search(vectors(2, 1)[0], 1)
    index.close()


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"table": "nowhere"}, DataError, "table nowhere is not there"),
        ({"text": "nothing"}, DataError, "no column 'nothing'; it has Body, about, doc, nr, vec"),
        ({"vector": "doc"}, (DataError, BackendError), "vector"),
        ({"where": "doc ="}, BackendError, "syntax error"),
        ({"id": ""}, ConfigError, "pgvector_table.id"),
        ({"connections": 0}, ConfigError, "connections=0"),
    ],
)
def test_a_wrong_configuration_is_told_at_once(table_url, table, tmp_path, options, kind, says) -> None:
    with pytest.raises(kind, match=says):
        opened(of(table_url, **({"table": table} | options)), tmp_path)


def test_a_server_that_refuses_or_is_not_there(table_url, table, tmp_path) -> None:
    for url, retryable in (
        ("postgresql://anna:s3cr%40t@127.0.0.1:1/db", True),
        (table_url.replace("postgres:@", "nobody:s3cr%40t@"), False),
    ):
        with pytest.raises(BackendError) as caught:
            opened(of(url, table, timeout_s=2), tmp_path)
        assert caught.value.retryable is retryable
        assert "s3cr" not in str(caught.value)


def test_rows_may_go_while_they_are_read_and_a_cut_connection_is_gone_on_from(
    table_url, table, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(pgvector_table, "PIECE", 50)
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    index = opened(of(table_url, table), tmp_path)
    seen: list[int] = []

    def cut(rows: int) -> None:
        seen.append(rows)
        if rows == 200:
            sql(
                table_url,
                f'DELETE FROM "{table}" WHERE nr IN (3, 480)',
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'FETCH%'",
            )

    with pytest.raises(BackendError) as caught:
        index.attach(cut)
    assert caught.value.retryable
    assert seen[-1] < 500
    before = seen[-1]
    seen.clear()
    index.attach(seen.append)
    assert seen[0] == before  # not from the beginning
    assert index.moments().n == 499  # 3 had been counted, 480 was not
    assert index.drifted().missing == 1
    index.attach()
    assert same(index.moments(), law(table_url, table))
    index.close()


@pytest.mark.parametrize("change", ['ALTER TABLE "{}" RENAME TO "{} gone"', 'DROP TABLE "{}"'])
def test_a_table_that_is_renamed_or_dropped_is_an_error_and_no_empty_answer(table_url, table, tmp_path, change) -> None:
    index = opened(of(table_url, table), tmp_path)
    index.attach()
    sql(table_url, change.format(table, table))
    for call in (lambda: index.search(vectors(2, 1)[0], 1), index.check, index.rebuild):
        with pytest.raises(DataError, match="is not there"):
            call()
    index.close()


def test_in_one_database_rows_and_moments_change_together_or_not(table_url, table, tmp_path, monkeypatch) -> None:
    schema = f"s{uuid.uuid4().hex}"
    index = opened(of(table_url, table, writable=True), tmp_path, schema=schema)
    index.attach()
    one = vectors(3, 2) / np.linalg.norm(vectors(3, 2), axis=1, keepdims=True)
    index.add([Document(str(i), "new", source="doc 1", metadata={"n": 1}) for i in (5, 900)], one)
    assert same(index.moments(), law(table_url, table))
    before = index.moments()
    count = sql(table_url, f'SELECT count(*) FROM "{table}"')

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            other = opened(of(table_url, table, writable=True), tmp_path, schema=schema)
            monkeypatch.setattr(Sidecar, "apply", die)  # the rows are changed, the moments are not
            other.remove(["doc 2"])
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert np.array_equal(index.moments().scatter, before.scatter)
    assert sql(table_url, f'SELECT count(*) FROM "{table}"') == count
    assert index.remove(["doc 2"]) == 5
    assert same(index.moments(), law(table_url, table))
    assert index.check() == []
    assert not (tmp_path / "attached.db").exists()
    index.close()
    sql(table_url, f"CREATE SCHEMA {schema}x", f"CREATE TABLE {schema}x.meta2 (a int)")
    with pytest.raises(DataError, match="tables of another program"):
        opened(of(table_url, table), tmp_path, schema=f"{schema}x")


@pytest.fixture
def casemate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: its exit code, and what it said."""

    def run(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(cli, words)
        if isinstance(done.exception, CasemateError):  # as ``main`` does
            return 2, done.stdout, str(done.exception)
        return done.exit_code, done.stdout, done.stderr

    monkeypatch.chdir(tmp_path)
    return run


def test_by_the_command_line(table_url, tmp_path, casemate, monkeypatch) -> None:
    """Attached, asked, drifted, attached again: as an operator does it."""
    from casemate.app import build
    from casemate.config import Part

    embedder = build("embedder", Part(use="minilm"))
    texts = [f"The {a} of ward {b} was {c} in {m}." for a in ("roof", "lift", "lamp") for b in "ABCD"
             for c in ("mended", "painted", "sold") for m in ("May", "June")]  # fmt: skip
    E = embedder.embed(texts)
    name = f"w{uuid.uuid4().hex[:8]}"
    sql(table_url, f"CREATE TABLE {name} (id text PRIMARY KEY, text text, embedding vector({embedder.dim}))")
    values = [f"('w{i // 4}#{i % 4}', '{t}', {written(2 * v)})" for i, (t, v) in enumerate(zip(texts, E, strict=True))]
    sql(table_url, f"INSERT INTO {name} VALUES {', '.join(values[:64])}")
    (tmp_path / "casemate.yaml").write_text(
        f"""
rag:
  index:
    use: attached
    source_pattern: "^(.*)#"
    drift: 0.1
    collection: {{use: pgvector_table, url: "${{PG_URL}}", table: {name}}}
guard: {{defenses: []}}
"""
    )
    monkeypatch.setenv("PG_URL", table_url)
    question = "Was the roof of ward A mended?"
    code, _, says = casemate("ask", question)
    assert code == 2
    assert "run 'casemate attach'" in says
    assert "casemate index" not in says
    code, says, errors = casemate("attach", "--dry-run", "--json")
    assert code == 0, errors
    assert (json.loads(says)["rows"], json.loads(says)["kept"]) == (64, False)
    assert casemate("ask", question)[0] == 2
    told = json.loads(casemate("attach", "--json")[1])
    assert (told["rows"], told["sources"], told["rescaled"]) == (64, 16, 64)
    assert told["agreement"] > 0.99
    assert not any("own source" in s or "other vectors" in s for s in told["not_protected"])
    code, says, errors = casemate("ask", question)
    assert code == 0, errors
    assert "roof of ward A" in says
    sql(table_url, f"INSERT INTO {name} VALUES {', '.join(values[64:])}")
    assert casemate("ask", question)[0] == 2
    code, says, errors = casemate("attach")
    assert code == 0, errors
    assert "72 rows of 384 numbers" in says
    assert "not protected" in errors
    findings = {f["name"]: f for f in json.loads(casemate("doctor", "--json")[1])["findings"]}
    assert findings["attached"]["ok"] is True
    Path("casemate.yaml").write_text("rag: {index: sqlite}")
    code, _, says = casemate("attach")
    assert code == 2
    assert "use: pgvector_table" in says
