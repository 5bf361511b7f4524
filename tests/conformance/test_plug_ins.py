"""Every built-in plug-in passes the conformance suite of its role; indexes and defenses have files of their own.

``MAKERS`` builds a plug-in from a role and a name. A plug-in without an entry must work with its default options.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from casemate import plugins, testing
from casemate.backends.collections.milvus_collection import MilvusCollection
from casemate.backends.collections.pgvector_table import PgvectorTable
from casemate.backends.collections.qdrant_collection import QdrantCollection
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.generators.transformers import CausalLM
from casemate.protocols import Embedder
from casemate.types import Document, Secret
from tests import postgres
from tests.fake_openai import FakeOpenAI
from tests.fakes import BagOfWords
from tests.unit.listener import Listener

ROOT = Path(__file__).parents[2]
APART = {"index", "defense"}
"""Roles whose built-in plug-ins are checked in test_indexes.py and test_defenses.py."""
HEAVY = {
    ("collection", "chroma_collection"),
    ("collection", "lancedb_table"),
    ("collection", "milvus_collection"),
    ("cluster", "ray"),
    ("crawler", "worm"),
    ("embedder", "sentence_transformers"),
}
CASES = [
    pytest.param(role, name, marks=[pytest.mark.slow] if (role, name) in HEAVY else [])
    for role in plugins.ROLES
    if role not in APART
    for name in plugins.names(role)
]
DEAD = "http://127.0.0.1:9"


def echo(question: str) -> str:
    """A system that answers, for the python target."""
    return f"You asked: {question}"


def fail(question: str) -> str:
    """A system that fails."""
    raise RuntimeError("out of order")


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as fake:
        yield fake


def test_every_role_has_a_suite():
    assert testing.CHECKS.keys() == plugins.ROLES.keys()


@pytest.mark.parametrize(("role", "name"), CASES)
def test_a_built_in_plug_in_passes_the_suite_of_its_role(role, name, request):
    maker = MAKERS.get((role, name), default)
    arguments, options = maker(role, name, request)
    testing.CHECKS[role](*arguments, **options)


def entered(context: Any, request: pytest.FixtureRequest) -> Any:
    """Enters a context for the duration of the test."""
    value = context.__enter__()
    request.addfinalizer(lambda: context.__exit__(None, None, None))
    return value


def default(role: str, name: str, request: pytest.FixtureRequest) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The plug-in with default options; for an embedder option, a fake."""
    cls = plugins.load(role, name)
    embedder = MiniLM() if role == "crawler" else BagOfWords()  # crawlers compare embeddings
    given = {field: embedder for field, kind in plugins.injected(cls).items() if kind is Embedder}
    return (cls(**given),), {}


def worm(role, name, request):
    """Uses few training questions; with the default of 3,000 per command the check takes many minutes."""
    return (plugins.load(role, name)(embedder=MiniLM(), suffix=4, training_questions=20),), {}


def sentence_transformers(role, name, request):
    pytest.importorskip("torch", reason="needs casemate[sentence-transformers]")
    pytest.importorskip("sentence_transformers", reason="needs casemate[sentence-transformers]")
    from tests import tiny_encoder
    from tests.unit.test_sentence_transformers_backend import DIM, VOCABULARY

    folder = request.getfixturevalue("tmp_path")
    (folder / "bert").mkdir()
    bert = tiny_encoder.bert(folder / "bert", VOCABULARY, DIM)
    return (plugins.load(role, name)(str(tiny_encoder.sentence_model(bert, folder / "model", 20))),), {}


def openai(role, name, request):
    fake = request.getfixturevalue("server")
    return (plugins.load(role, name)(model="m", base_url=fake.url),), {}


def openai_endpoint(role, name, request):
    cls, fake = plugins.load(role, name), request.getfixturevalue("server")
    return (cls(model="m", base_url=fake.url),), {"broken": cls(model="m", base_url=f"{DEAD}/v1", retries=0)}


def http(role, name, request):
    from tests.unit.test_http_target import serving

    cls, fake = plugins.load(role, name), entered(serving(), request)
    return (cls(url=fake.url, answer="$.answer"),), {"broken": cls(url=DEAD, answer="$.answer", retries=0)}


def python(role, name, request):
    cls = plugins.load(role, name)
    module = "tests.conformance.test_plug_ins"
    return (cls(call=f"{module}:echo"),), {"broken": cls(call=f"{module}:fail", retries=0)}


def langchain_runnable(role, name, request):
    pytest.importorskip("langchain_core", reason="needs casemate[langchain]")
    cls = plugins.load(role, name)
    module = "tests.unit.test_langchain_runnable"
    return (cls(f"{module}:text"),), {"broken": cls(f"{module}:secret")}


def transformers(role, name, request):
    pytest.importorskip("torch", reason="needs casemate[transformers]")
    pytest.importorskip("transformers", reason="needs casemate[transformers]")
    return (CausalLM(str(ROOT / "models/draft"), device="cpu"),), {}


def sql(role, name, request):
    folder, numbers = request.getfixturevalue("tmp_path"), itertools.count()
    path = [folder]

    def make(fresh: bool) -> SqlEventStore:
        if fresh:
            path[0] = folder / f"{next(numbers)}.db"
        return SqlEventStore(path=path[0])

    return (make,), {}


def webhook(role, name, request):
    cls, listener = plugins.load(role, name), entered(Listener(), request)
    made = [cls(url=Secret(url), secret=Secret("key")) for url in (listener.url, DEAD)]
    return (made[0],), {"broken": made[1]}


def apprise(role, name, request):
    pytest.importorskip("apprise", reason="needs casemate[notify]")
    cls, listener = plugins.load(role, name), entered(Listener(), request)
    broken = cls(url=Secret("json://127.0.0.1:9/x"))
    return (cls(url=Secret(listener.url.replace("http://", "json://"))),), {"broken": broken}


def ray(role, name, request):
    pytest.importorskip("ray", reason="needs casemate[ray]")
    executor = plugins.load(role, name)("local", cores=1)
    request.addfinalizer(executor.close)
    return (executor,), {}


def presidio(role, name, request):
    pytest.importorskip("presidio_analyzer", reason="needs casemate[presidio]")
    return default(role, name, request)


DIM, ROWS = 8, 60


def rows() -> tuple[list[Document], np.ndarray]:
    """Rows of a collection, with numbers as ids and vectors of any length."""
    X = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)
    return [Document(str(i), f"text {i}") for i in range(ROWS)], X


def pgvector_table(role, name, request):
    stored, X = rows()
    url = request.getfixturevalue("vector_url")
    values = ", ".join(f"({i}, 'text {i}', '{v.tolist()}')" for i, v in enumerate(X))
    create = f"CREATE TABLE docs (id bigint PRIMARY KEY, text text, embedding vector({DIM}))"
    postgres.sql(url, create, f"INSERT INTO docs VALUES {values}")
    return (PgvectorTable(Secret(url), "docs", id="id", text="text", vector="embedding"), stored, X), {}


def qdrant_collection(role, name, request):
    from qdrant_client import QdrantClient, models

    stored, X = rows()
    path = str(request.getfixturevalue("tmp_path") / "qdrant")
    client = QdrantClient(path=path)
    client.create_collection("docs", models.VectorParams(size=DIM, distance=models.Distance.DOT))
    points = [models.PointStruct(id=i, vector=x.tolist(), payload={"text": f"text {i}"}) for i, x in enumerate(X)]
    client.upsert("docs", points)
    client.close()
    return (QdrantCollection(Secret(path), "docs", text="text"), stored, X), {}


def milvus_collection(role, name, request):
    from tests.conformance import test_milvus_collection as entities

    url = request.getfixturevalue("milvus_url")
    client, collection, U = entities.filled(url)
    client.close()
    stored = [Document(str(i), f"t{i}") for i in range(entities.N)]
    X = np.random.default_rng(1).standard_normal((entities.N, entities.DIM)).astype(np.float32)
    given = {"text": "body", "vector": "v", "timeout_s": entities.LONG_S}
    return (MilvusCollection(Secret(url), collection, **given), stored, X), {}


def local_collection(role, name, request):
    """A collection in a folder, with a local package."""
    from tests.conformance import test_local_collections as local

    fill, make = {
        "chroma_collection": (local.make_chroma, local.chroma),
        "lancedb_table": (local.make_lancedb, local.lancedb),
        "faiss_folder": (local.make_faiss, local.faiss_saved),
    }[name]
    folder = request.getfixturevalue("tmp_path") / "store"
    fill(folder)
    stored = [Document(row, f"text {i}") for i, row in enumerate(local.names())]
    return (make(folder), stored, local.vectors(), "no such id"), {}


def remote_collection(role, name, request):
    """A collection on a simulated server."""
    from tests import store_servers
    from tests.conformance import test_remote_collections as remote

    kind = {
        "elasticsearch_index": store_servers.Elasticsearch,
        "weaviate_collection": store_servers.Weaviate,
        "pinecone_index": store_servers.Pinecone,
    }[name]
    server = store_servers.serving(kind(remote.stored_rows(kind)))
    url = server.__enter__()
    request.addfinalizer(lambda: server.__exit__(None, None, None))
    stored = [Document(row, f"text {i}") for i, row in enumerate(remote.names(kind))]
    return (remote.collection(kind, url), stored, remote.vectors(), str(uuid.UUID(int=7))), {}


MAKERS: dict[tuple[str, str], Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    ("crawler", "worm"): worm,
    ("embedder", "openai"): openai,
    ("embedder", "sentence_transformers"): sentence_transformers,
    ("generator", "openai"): openai,
    ("generator", "transformers"): transformers,
    ("language_model", "transformers"): transformers,
    ("token_model", "transformers"): transformers,
    ("store", "sql"): sql,
    ("target", "http"): http,
    ("target", "openai_endpoint"): openai_endpoint,
    ("target", "python"): python,
    ("target", "langchain_runnable"): langchain_runnable,
    ("channel", "webhook"): webhook,
    ("channel", "apprise"): apprise,
    ("cluster", "ray"): ray,
    ("personal_data_finder", "presidio"): presidio,
    ("collection", "pgvector_table"): pgvector_table,
    ("collection", "qdrant_collection"): qdrant_collection,
    ("collection", "milvus_collection"): milvus_collection,
    **{("collection", name): local_collection for name in ("chroma_collection", "faiss_folder", "lancedb_table")},
    **{
        ("collection", name): remote_collection
        for name in ("elasticsearch_index", "pinecone_index", "weaviate_collection")
    },
}
