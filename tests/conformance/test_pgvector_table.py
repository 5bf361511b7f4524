"""Attached tables of a real Postgres server: Casemate writes nothing to them and tolerates every change."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate.backends.collections import pgvector_table
from casemate.backends.collections.pgvector_table import PgvectorTable
from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.sidecar import attach_scan as scanning
from casemate.backends.sidecar.sidecar import Sidecar
from casemate.cli import cli
from casemate.errors import BackendError, CapabilityError, CasemateError, ConfigError, DataError
from casemate.maths.moments import CorpusMoments
from casemate.types import Document, Secret
from tests.postgres import sql

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only runs until it is killed
DIM = 8


def vectors(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def written(v: np.ndarray) -> str:
    return f"'[{','.join(map(repr, v.tolist()))}]'"


@pytest.fixture
def table(vector_url: str) -> str:
    """500 rows with numeric ids, which sort differently as text, and vectors of any length."""
    name = f"Their {uuid.uuid4().hex[:8]}"
    sql(
        vector_url,
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


def true_moments(url: str, table: str, where: str = "true") -> CorpusMoments:
    rows = sql(url, f'SELECT vec::text FROM "{table}" WHERE vec IS NOT NULL AND "Body" IS NOT NULL AND {where}')
    X = np.array([json.loads(row[0]) for row in rows], np.float64)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    m = X.mean(axis=0)
    return CorpusMoments(len(X), m, sum((np.outer(x - m, x - m) for x in X), np.zeros((DIM, DIM))))


def same(a: CorpusMoments, b: CorpusMoments) -> bool:
    return a.n == b.n and np.allclose(a.mean, b.mean, atol=1e-6) and np.allclose(a.scatter, b.scatter, atol=1e-4)


def test_a_table_is_attached_and_not_written(vector_url, table, tmp_path) -> None:
    """Uses a read-only role. Rows and their transaction ids do not change."""
    role = f"r{uuid.uuid4().hex}"
    sql(vector_url, f"CREATE ROLE {role} LOGIN", f'GRANT SELECT ON "{table}" TO {role}')
    state = f"SELECT md5(string_agg(ctid::text || xmin || xmax || t::text, ',' ORDER BY nr)) FROM \"{table}\" AS t"
    before = sql(vector_url, state)
    index = opened(of(vector_url.replace("postgres:@", f"{role}:@"), table), tmp_path)
    summary = index.attach()
    assert (summary.rows, summary.sources, summary.rescaled, summary.dim) == (500, 100, 500, DIM)
    assert same(index.moments(), true_moments(vector_url, table))
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
    assert sql(vector_url, state) == before
    sql(vector_url, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_searches_with_an_hnsw_index_return_enough_rows(vector_url, table, tmp_path) -> None:
    """An HNSW index returns at most ef_search rows, before the filter."""
    sql(vector_url, f'CREATE INDEX ON "{table}" USING hnsw (vec vector_cosine_ops)')
    index = opened(of(vector_url, table, effort=10), tmp_path)
    index.attach()
    q = vectors(2, 1)[0] / np.linalg.norm(vectors(2, 1)[0])
    assert len(index.search(q, 400).hits) == 400
    index.close()
    few = opened(of(vector_url, table, effort=10, where="nr % 100 = 7"), tmp_path / "few")
    few.attach()
    found = few.search(q, 9)
    assert sorted(h.document.id for h in found.hits) == ["107", "207", "307", "407", "7"]
    assert found.similarity_stats.n == 5
    few.close()


def test_arrays_and_views_are_supported(vector_url, table, tmp_path) -> None:
    sql(vector_url, f'CREATE VIEW "{table} v" AS SELECT nr, "Body", doc, about, vec::real[] AS vec FROM "{table}"')
    index = opened(of(vector_url, f"public.{table} v"), tmp_path)
    index.attach()
    assert same(index.moments(), true_moments(vector_url, table))
    assert len(index.search(vectors(2, 1)[0], 3).hits) == 3
    index.close()


def test_tenants_are_isolated(vector_url, table, tmp_path) -> None:
    sql(vector_url, f'ALTER TABLE "{table}" ADD owner int', f'UPDATE "{table}" SET owner = nr % 3')
    index = opened(of(vector_url, table, tenant="owner"), tmp_path)
    index.attach()
    assert index.tenants() == ["0", "1", "2"]
    assert same(index.moments("1"), true_moments(vector_url, table, "owner = 1"))
    found = index.search(vectors(2, 1)[0], 500, "1")
    assert {int(h.document.id) % 3 for h in found.hits} == {1}
    assert len(found.hits) == found.similarity_stats.n == 167
    index.close()


def test_rows_without_text_or_vector_are_skipped_and_counted(vector_url, table, tmp_path) -> None:
    sql(
        vector_url,
        f'UPDATE "{table}" SET "Body" = NULL WHERE nr < 30',
        f'UPDATE "{table}" SET vec = NULL WHERE nr BETWEEN 20 AND 50',
    )
    index = opened(of(vector_url, table), tmp_path, drift=0.001)
    summary = index.attach()
    assert (summary.rows, summary.textless, summary.vectorless) == (449, 30, 21)
    assert same(index.moments(), true_moments(vector_url, table))
    assert len(index.search(vectors(2, 1)[0], 500).hits) == 449  # skipped rows do not count as drift
    index.close()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("ALTER {t} ALTER vec TYPE vector; UPDATE {t} SET vec = '[1,2,3]' WHERE nr IN (4, 9)",
         "'4', '9' do not have 8"),
        ("UPDATE {t} SET vec = '[0,0,0,0,0,0,0,0]' WHERE nr = 41", "'41' are zero or not finite"),
        ("ALTER {t} DROP CONSTRAINT {p}; UPDATE {t} SET nr = 42 WHERE nr = 43", "two rows with the id '42'"),
        ("ALTER {t} DROP CONSTRAINT {p}; ALTER {t} ALTER nr DROP NOT NULL; UPDATE {t} SET nr = NULL WHERE nr=9", "NU"),
    ],
)  # fmt: skip
def test_invalid_rows_are_reported_with_their_ids(vector_url, table, tmp_path, damage, says) -> None:
    for statement in damage.replace("ALTER {t} ", "ALTER TABLE {t} ").split("; "):
        sql(vector_url, statement.format(t=f'"{table}"', p=f'"{table}_pkey"'))
    index = opened(of(vector_url, table), tmp_path)
    with pytest.raises(DataError, match=says):
        index.attach()
    with pytest.raises(DataError, match="run 'casemate attach'"):  # an incomplete scan is discarded
        index.search(vectors(2, 1)[0], 1)
    index.close()


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"table": "nowhere"}, DataError, "table nowhere does not exist"),
        ({"text": "nothing"}, DataError, "no column 'nothing'; it has Body, about, doc, nr, vec"),
        ({"vector": "doc"}, (DataError, BackendError), "vector"),
        ({"where": "doc ="}, BackendError, "syntax error"),
        ({"id": ""}, ConfigError, "pgvector_table.id"),
        ({"connections": 0}, ConfigError, "connections=0"),
    ],
)
def test_open_rejects_a_wrong_configuration(vector_url, table, tmp_path, options, kind, says) -> None:
    with pytest.raises(kind, match=says):
        opened(of(vector_url, **({"table": table} | options)), tmp_path)


def test_connection_errors_do_not_contain_the_password(vector_url, table, tmp_path) -> None:
    for url, retryable in (
        ("postgresql://anna:s3cr%40t@127.0.0.1:1/db", True),
        (vector_url.replace("postgres:@", "stranger:s3cr%40t@"), False),
    ):
        with pytest.raises(BackendError) as caught:
            opened(of(url, table, timeout_s=2), tmp_path)
        assert caught.value.retryable is retryable
        assert "s3cr" not in str(caught.value)


def test_a_scan_tolerates_removed_rows_and_resumes_after_a_lost_connection(
    vector_url, table, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(pgvector_table, "SCAN_PAGE", 50)
    monkeypatch.setattr(scanning, "FLUSH_ROWS", 50)
    index = opened(of(vector_url, table), tmp_path)
    seen: list[int] = []

    def cut(rows: int) -> None:
        seen.append(rows)
        if rows == 200:
            sql(
                vector_url,
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
    assert seen[0] == before  # the scan resumed
    assert index.moments().n == 499  # row 3 was counted before the interruption, row 480 was not
    assert index.measure_drift().missing == 1
    index.attach()
    assert same(index.moments(), true_moments(vector_url, table))
    index.close()


@pytest.mark.parametrize("change", ['ALTER TABLE "{}" RENAME TO "{} gone"', 'DROP TABLE "{}"'])
def test_a_renamed_or_dropped_table_raises_instead_of_returning_nothing(vector_url, table, tmp_path, change) -> None:
    index = opened(of(vector_url, table), tmp_path)
    index.attach()
    sql(vector_url, change.format(table, table))
    for call in (lambda: index.search(vectors(2, 1)[0], 1), index.check, index.rebuild):
        with pytest.raises(DataError, match="does not exist"):
            call()
    index.close()


def test_with_a_schema_rows_and_moments_change_in_one_transaction(vector_url, table, tmp_path, monkeypatch) -> None:
    schema = f"s{uuid.uuid4().hex}"
    index = opened(of(vector_url, table, writable=True), tmp_path, schema=schema)
    index.attach()
    one = vectors(3, 2) / np.linalg.norm(vectors(3, 2), axis=1, keepdims=True)
    index.add([Document(str(i), "new", source="doc 1", metadata={"n": 1}) for i in (5, 900)], one)
    assert same(index.moments(), true_moments(vector_url, table))
    before = index.moments()
    count = sql(vector_url, f'SELECT count(*) FROM "{table}"')

    def kill_self(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            other = opened(of(vector_url, table, writable=True), tmp_path, schema=schema)
            monkeypatch.setattr(Sidecar, "record", kill_self)  # between the rows and the moments
            other.remove(["doc 2"])
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert np.array_equal(index.moments().scatter, before.scatter)
    assert sql(vector_url, f'SELECT count(*) FROM "{table}"') == count
    assert index.remove(["doc 2"]) == 5
    assert same(index.moments(), true_moments(vector_url, table))
    assert index.check() == []
    assert not (tmp_path / "attached.db").exists()
    index.close()
    sql(vector_url, f"CREATE SCHEMA {schema}x", f"CREATE TABLE {schema}x.meta2 (a int)")
    with pytest.raises(DataError, match="tables of another program"):
        opened(of(vector_url, table), tmp_path, schema=f"{schema}x")


@pytest.fixture
def casemate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process. Returns exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(cli, words)
        if isinstance(done.exception, CasemateError):  # like ``main``
            return 2, done.stdout, str(done.exception)
        return done.exit_code, done.stdout, done.stderr

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.slow
def test_attach_ask_and_drift_on_the_command_line(vector_url, tmp_path, casemate, monkeypatch) -> None:
    from casemate.config import PluginSpec
    from casemate.plugins import build

    embedder = build("embedder", PluginSpec(use="minilm"))
    texts = [f"The {a} of ward {b} was {c} in {m}." for a in ("roof", "lift", "lamp") for b in "ABCD"
             for c in ("mended", "painted", "sold") for m in ("May", "June")]  # fmt: skip
    E = embedder.embed(texts)
    name = f"w{uuid.uuid4().hex[:8]}"
    sql(vector_url, f"CREATE TABLE {name} (id text PRIMARY KEY, text text, embedding vector({embedder.dim}))")
    values = [f"('w{i // 4}#{i % 4}', '{t}', {written(2 * v)})" for i, (t, v) in enumerate(zip(texts, E, strict=True))]
    sql(vector_url, f"INSERT INTO {name} VALUES {', '.join(values[:64])}")
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
    monkeypatch.setenv("PG_URL", vector_url)
    question = "Was the roof of ward A mended?"
    code, _, says = casemate("ask", question)
    assert code == 2
    assert "run 'casemate attach'" in says
    assert "casemate index" not in says
    code, says, errors = casemate("attach", "--dry-run", "--json")
    assert code == 0, errors
    assert (json.loads(says)["rows"], json.loads(says)["kept"]) == (64, False)
    assert casemate("ask", question)[0] == 2
    report = json.loads(casemate("attach", "--json")[1])
    assert (report["rows"], report["sources"], report["rescaled"]) == (64, 16, 64)
    assert report["agreement"] > 0.99
    assert not any("own source" in s or "other vectors" in s for s in report["not_protected"])
    code, says, errors = casemate("ask", question)
    assert code == 0, errors
    assert "roof of ward A" in says
    sql(vector_url, f"INSERT INTO {name} VALUES {', '.join(values[64:])}")
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
