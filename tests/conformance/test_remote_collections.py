"""Attached indexes of Elasticsearch, OpenSearch, Weaviate and Pinecone, on simulated servers."""

from __future__ import annotations

import json
import uuid

import numpy as np
import pytest

from casemate.backends.collections import elasticsearch_index
from casemate.backends.collections.chroma_collection import ChromaCollection
from casemate.backends.collections.elasticsearch_index import ElasticsearchIndex
from casemate.backends.collections.pinecone_index import PineconeIndex
from casemate.backends.collections.weaviate_collection import WeaviateCollection
from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.sidecar.row_collection import SPARE
from casemate.errors import BackendError, CapabilityError, ConfigError, DataError
from casemate.testing import check_collection
from casemate.types import Document, Secret
from tests import record_store_requests as record
from tests.store_servers import KEY, Chroma, Elasticsearch, OpenSearch, Pinecone, RecentElasticsearch, Weaviate, serving

DIM, N = 8, 250


def vectors(n=N):
    return np.random.default_rng(1).standard_normal((n, DIM)).astype(np.float32)


def names(kind, n=N):
    if kind is Weaviate:
        return [str(uuid.uuid5(uuid.NAMESPACE_DNS, str(i))) for i in range(n)]
    return [f"a/{i:04}#" for i in range(n)]


def fields(i, kind):
    if kind in (Weaviate, Pinecone):
        return {"text": f"text {i}", "doc": f"d{i // 3}"}
    return {"text": f"text {i}", "even": i % 2 == 0, "metadata": {"doc": f"d{i // 3}", "page": i}}


def stored_rows(kind, n=N):
    return [(name, x, fields(i, kind)) for i, (name, x) in enumerate(zip(names(kind, n), vectors(n), strict=True))]


def collection(kind, url, **options):
    if kind is Weaviate:
        return WeaviateCollection(Secret(url), "Docs", **{"source": "doc", **options})
    if kind is Pinecone:
        return PineconeIndex(Secret(url), Secret(KEY), **{"source": "doc", **options})
    return ElasticsearchIndex(Secret(url), "docs", **{"source": "metadata.doc", **options})


KINDS = [Elasticsearch, RecentElasticsearch, OpenSearch, Weaviate, Pinecone]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr(elasticsearch_index, "SCAN_PAGE", 40)


def test_a_collection_passes_the_conformance_suite(kind, small_pages):
    rows = stored_rows(kind)
    with serving(store := kind(rows)) as url:
        check_collection(
            collection(kind, url), [Document(name, f"text {i}") for i, (name, _, _) in enumerate(rows)], vectors(),
            absent=str(uuid.UUID(int=7)),
        )  # fmt: skip
    assert not store.snapshots, "a snapshot that is not closed occupies the server"


def test_rows_are_attached_with_their_sources_and_moments(kind, tmp_path, small_pages):
    rows, X = stored_rows(kind), vectors()
    rows[1] = (rows[1][0], rows[1][1], {name: value for name, value in rows[1][2].items() if name != "text"})
    if kind is not Pinecone:  # its records always have values
        rows[2] = (rows[2][0], None, rows[2][2])
    with serving(kind(rows)) as url:
        index = AttachedIndex(collection(kind, url), tmp_path / "attached.db")
        index.open("test", DIM)
        summary = index.attach()
        incomplete = [i for i, row in enumerate(rows) if row[1] is None or "text" not in row[2]]
        assert (summary.rows, summary.textless, summary.vectorless) == (N - len(incomplete), 1, len(incomplete) - 1)
        assert not any("unit length" in problem for problem in index.check())
        q = (X[5] / np.linalg.norm(X[5])).astype(np.float32)
        found = index.search(q, 3)
        U = X.astype(np.float64) / np.linalg.norm(X.astype(np.float64), axis=1, keepdims=True)
        expected = np.delete(U, incomplete, axis=0) @ q
        assert found.similarity_stats.mean == pytest.approx(float(expected.mean()), abs=1e-6)
        assert found.similarity_stats.std == pytest.approx(float(expected.std()), abs=1e-6)
        best = [i for i in np.argsort(-(U @ q)).tolist() if i not in incomplete][:3]
        assert [h.document.id for h in found.hits] == [rows[i][0] for i in best]
        document = found.hits[0].document
        assert (document.text, document.source) == ("text 5", "d1")
        assert not {"text", "vector", "doc", "values"} & document.metadata.keys()
        index.close()


def test_the_key_is_sent_and_not_quoted_in_an_authentication_error(kind):
    options = {} if kind is Pinecone else {"api_key": Secret(KEY)}
    with serving(kind(stored_rows(kind), KEY)) as url:
        opened = collection(kind, url, **options)
        assert opened.open() == DIM
        opened.close()
    with serving(kind(stored_rows(kind), "another key")) as url:
        refused = collection(kind, url, **options)
        with pytest.raises(BackendError, match="the server refuses the key") as caught:
            refused.open()
        assert KEY not in str(caught.value)
        refused.close()


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        ((404, {"message": "no"}), DataError, "check both|use the index's host"),
        ((500, {"message": f"broken {KEY}"}), BackendError, "status 500: .*broken"),
        ((400, {"message": "bad"}), DataError, "rejected the request"),
        ((429, {}), BackendError, "too many requests"),
        ((302, {}), BackendError, "status 302"),
        ((200, b"<html>"), BackendError, "is not JSON"),
    ],
)
def test_server_failures_are_errors_with_advice(kind, answer, error, why):
    options = {} if kind is Pinecone else {"api_key": Secret(KEY)}
    with serving(store := kind(stored_rows(kind, 3))) as url:
        opened = collection(kind, url, **options)
        opened.open()
        store.fail = answer
        with pytest.raises(error, match=why) as caught:
            opened.search(vectors(1)[0], 2)
        assert KEY not in str(caught.value)
        opened.close()
    with pytest.raises(BackendError, match="not open"):
        opened.search(vectors(1)[0], 2)


def test_rows_without_text_do_not_end_a_search_early(kind, tmp_path):
    rows = stored_rows(kind)
    for i in range(0, N, 3):
        rows[i] = (*rows[i][:2], {name: value for name, value in rows[i][2].items() if name != "text"})
    whole = [i for i in range(N) if i % 3]
    X = vectors().astype(np.float64)
    q = X[5] / np.linalg.norm(X[5])
    best = sorted(whole, key=lambda i: -(X[i] @ q) / np.linalg.norm(X[i]))
    with serving(kind(rows)) as url:
        opened = collection(kind, url)
        opened.open()
        for k in (0, 60, len(whole), len(whole) + 1, N + 1):
            assert [h.document.id for h in opened.search(q.astype(np.float32), k)] == [rows[i][0] for i in best[:k]]
        opened.close()


def test_a_search_beyond_the_limit_of_the_store_is_rejected_and_not_truncated(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(type(collection(kind, "http://x")), "max_results", 100)
    rows = stored_rows(kind)
    q = (vectors()[5] / np.linalg.norm(vectors()[5])).astype(np.float32)
    with serving(store := kind(rows)) as url:
        index = AttachedIndex(collection(kind, url), tmp_path / "attached.db")
        index.open("test", DIM)
        index.attach()
        assert len(index.search(q, 100).hits) == 100
        index.withhold([index.search(q, 1).hits[0].document.id])
        assert len(index.search(q, 99).hits) == 99, "a second search asks for as many rows as the store allows"
        for k in (100, 101):
            with pytest.raises(CapabilityError, match="k = 101 rows needs more than the 100 rows .*lower k"):
                index.search(q, k)
        store.rows = rows[:60]
        assert len(index.collection.search(q, 100)) == 60
        store.rows = [(*row[:2], {}) for row in rows[:120]] + rows[120:]
        with pytest.raises(CapabilityError, match="remove rows without text"):
            index.collection.search(q, 90)
        index.close()


@pytest.mark.parametrize("kind", [Elasticsearch, OpenSearch])
@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"_shards": {"total": 2, "successful": 1, "failed": 1}}, "1 failed shards"),
        ({"timed_out": True}, "the server's time limit passed"),
    ],
)
def test_a_response_from_some_shards_only_is_a_retryable_error(kind, part, why):
    class Partial(kind):
        partial = False

        def answer(self, method, path, query, body):
            if path.endswith("/_search"):
                assert query["allow_partial_search_results"] == "false"
            found = super().answer(method, path, query, body)
            return {**found, **part} if self.partial and path.endswith(("/_search", "/_count")) else found

    with serving(store := Partial(stored_rows(kind, 9))) as url:
        opened = collection(kind, url)
        opened.open()
        store.partial = True
        calls = [lambda: opened.search(vectors(1)[0], 2), lambda: opened.find(names(kind, 2)), opened.count]
        for call in (*calls, lambda: list(opened.scan())):
            with pytest.raises(BackendError, match=f"may lack rows: {why}") as caught:
                call()
            assert caught.value.retryable
        assert not store.snapshots
        opened.close()


def test_the_error_names_an_unreachable_server_without_its_password(kind):
    unreachable = collection(kind, "http://127.0.0.1:9")
    with pytest.raises(BackendError, match="cannot be reached"):
        unreachable.open()
    unreachable.close()
    with pytest.raises(BackendError, match="must begin with http"):
        collection(kind, "file:///etc").open()
    if kind is not Pinecone:
        assert "word" not in collection(kind, "http://user:word@127.0.0.1:9").name


@pytest.mark.parametrize("kind", [Elasticsearch, OpenSearch])
def test_only_rows_that_match_a_filter_are_attached(kind):
    with serving(kind(stored_rows(kind))) as url:
        even = collection(kind, url, only={"even": True})
        even.open()
        assert even.count() == N // 2 == sum(len(page.documents) for page in even.scan())
        assert {int(hit.document.id[2:6]) % 2 for hit in even.search(vectors()[5], 20)} == {0}
        assert [d.id for d in even.find([names(kind)[0], names(kind)[1]]).documents] == [names(kind)[0]]
        even.close()


@pytest.mark.parametrize("kind", [Elasticsearch, OpenSearch])
def test_a_scan_reads_one_snapshot_and_resumes_after_rows_with_equal_sequence_numbers(kind, small_pages):
    with serving(store := kind(stored_rows(kind))) as url:
        opened = collection(kind, url)
        opened.open()
        pages = opened.scan()
        first = next(pages)
        store.rows = store.rows[:100]  # another program removes rows during the scan
        seen = [d.id for page in [first, *pages] for d in page.documents]
        assert seen == names(kind), "the snapshot still has them, each once"
        store.rows = stored_rows(kind)
        again = [d.id for page in opened.scan(first.after) for d in page.documents]
        assert [d.id for d in first.documents] + again == names(kind)
        opened.close()


@pytest.mark.parametrize("kind", [Elasticsearch, OpenSearch])
def test_a_scan_is_complete_if_its_snapshot_expires_at_the_end(kind, small_pages, monkeypatch):
    def expired(self, method, path, query, body):
        return None if method == "DELETE" else kind.answer(self, method, path, query, body)

    with serving(type("Expired", (kind,), {"answer": expired})(stored_rows(kind))) as url:
        opened = collection(kind, url)
        opened.open()
        assert sum(len(page.documents) for page in opened.scan()) == N
        opened.close()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ElasticsearchIndex(Secret("http://x"), "docs-*"), "without wildcards"),
        (lambda: ElasticsearchIndex(Secret("http://x"), "../docs"), "without wildcards"),
        (lambda: ElasticsearchIndex(Secret("http://x"), "docs", text=""), "must not be empty"),
        (lambda: ElasticsearchIndex(Secret("http://x"), "docs", effort=10_001), "effort is 10001; allowed: 1 to 10000"),
        (lambda: WeaviateCollection(Secret("http://x"), "Docs) { x }"), "letters, digits and _"),
        (lambda: WeaviateCollection(Secret("http://x"), "Docs", vector="a b"), "letters, digits and _"),
        (lambda: PineconeIndex(Secret("http://x"), Secret("")), "must not be empty"),
        (lambda: ChromaCollection("http://x", "docs", timeout_s=0), "timeout_s must be above 0"),
    ],
)
def test_invalid_options_are_rejected(make, why):
    with pytest.raises(ConfigError, match=why):
        make()


def test_a_field_without_vectors_is_rejected_with_the_existing_fields():
    with serving(Elasticsearch(stored_rows(Elasticsearch, 3))) as url:
        with pytest.raises(DataError, match="'text' is not a vector field; the fields are metadata, text, vector"):
            collection(Elasticsearch, url, vector="text").open()
    with serving(Weaviate(stored_rows(Weaviate, 3))) as url:
        for wrong in ({"text": "body"}, {"source": "of"}, {"source": "of.name"}, {"title": "body"}):
            (name,) = wrong.values()
            with pytest.raises(DataError, match=f"has no property '{name}' of a plain type; it has text, doc"):
                collection(Weaviate, url, **wrong).open()
        with pytest.raises(DataError, match="has no vector 'v'"):
            collection(Weaviate, url, vector="v").open()


def test_an_unresponsive_or_unreachable_chroma_server_is_a_retryable_error():
    pytest.importorskip("chromadb", reason="chromadb is not installed")
    with serving(store := Chroma(stored_rows(Weaviate, 3))) as url:
        opened = ChromaCollection(url, "docs", Secret(KEY), timeout_s=0.2)
        store.silent = True
        calls = [opened.open, opened.count, lambda: next(opened.scan()), lambda: opened.search(vectors()[0], 1)]
        for call in calls:
            with pytest.raises(BackendError, match="cannot be reached, or exceeded timeout_s") as caught:
                call()
            assert caught.value.retryable and KEY not in str(caught.value)
            if call == opened.open:
                store.silent = False
                assert (opened.open(), opened.count()) == (DIM, 3)
                store.silent = True
        store.released.set()
    for call in (opened.count, ChromaCollection("http://127.0.0.1:9", "docs").open):
        with pytest.raises(BackendError, match="cannot be reached") as caught:
            call()
        assert caught.value.retryable
    opened.close()


def test_rows_of_weaviate_have_the_same_metadata_in_scans_and_searches():
    rows = [
        (name, x, {**fields_of_row, "of": {"name": "nested"}}) for name, x, fields_of_row in stored_rows(Weaviate, 3)
    ]
    with serving(Weaviate(rows)) as url:
        opened = collection(Weaviate, url)
        opened.open()
        scanned = {d.id: d for page in opened.scan() for d in page.documents}
        assert scanned == {hit.document.id: hit.document for hit in opened.search(vectors()[0], 3)}
        opened.close()


def test_requests_equal_those_of_the_vendors_clients():
    """Oracle: paths, parameters and bodies of the same calls, recorded by ``tests.record_store_requests``."""
    recorded = json.loads(record.FILE.read_text())
    assert recorded.keys() == record.PRODUCTS.keys()
    for name, (_, kind, _) in record.PRODUCTS.items():
        with serving(store := kind(record.rows())) as url:
            opened = collection(kind, url)
            opened.open()
            opened.count()
            pages = list(opened.scan())
            assert sum(len(page.documents) for page in pages) == record.N
            opened.search(np.array(record.VECTOR, np.float32), record.K - SPARE)
            opened.find(record.IDS)
            opened.close()
        sent = json.loads(json.dumps(store.requests))
        vendor_requests = [request for request in recorded[name]["requests"] if request[1] != "/v1/meta"]
        assert [request for request in vendor_requests if request not in sent] == [], name
        if kind is not Weaviate:  # the vendor's client searches and lists over gRPC
            assert [request for request in sent if request not in vendor_requests] == [], name
