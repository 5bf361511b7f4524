"""The audience policy on every query path: an unentitled client never receives the text, an entitled one does."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner

from casemate import config as configuration
from casemate import plugins
from casemate.app import open_app
from casemate.cli import cli
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.gateway.server import uvicorn_config
from casemate.integrations.guarded_query import client_context
from casemate.types import Document
from tests import gateways
from tests.fakes import BAG, BagOfWords, entry_points

QUESTION = "Which door does the north tower of the harbor bridge have?"
FACT = "the north tower of the harbor bridge has a door"
SECRETS = ("walnut", "orchid", "saffron")
TEXTS = [f"In {year} {FACT} of {word}." for year, word in zip((1932, 1941, 1957), SECRETS, strict=True)]
DOCUMENTS = [Document(f"d{i}", text, metadata={"department": "archive"}) for i, text in enumerate(TEXTS)]
GROUPS = {"stranger": ("visitor",), "archivist": ("archivist",)}
AUDIENCE = {"unentitled": "quorum", "entitled": [{"groups": ["archivist"]}]}
QUORUM = {"use": "quorum", "floor": -1.0, "jitter": 1}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder with an installation over the documents, and the API keys of both clients."""
    monkeypatch.setattr(plugins, "entry_points", entry_points(BAG))
    monkeypatch.chdir(tmp_path)
    raw = {
        "rag": {"generator": "extractive", "embedder": {"use": "bag", "dim": 256}},
        "guard": {"defenses": [QUORUM], "audience": AUDIENCE},
        "gateway": {"port": 0, "pace_ms": 0, "mcp": True},
    }
    (tmp_path / "casemate.yaml").write_text(json.dumps(raw))
    with open_app() as app:
        asyncio.run(app.guard.add(DOCUMENTS))
        keys = ApiKeyStore(app.store)
        return {name: str(keys.create(Grant(name, groups=groups, retrieve=True))[1]) for name, groups in GROUPS.items()}


def gateway_path(address, **body):
    """A query path of the gateway; it returns the body of the response."""

    def received(installed, name):
        pytest.importorskip("fastapi")
        with open_app(configuration.read()) as app, gateways.client(app, installed[name]) as http:
            reply = http.post(address, json=body)
            assert reply.status_code == 200, reply.text
            return reply.text

    return received


def mcp_path(tool, argument):
    """A query path through an MCP tool, over HTTP."""

    def received(installed, name):
        pytest.importorskip("mcp", reason="the extra casemate[mcp] is not installed")
        from casemate.gateway.mcp.tools import GuardedTools
        from tests.unit.test_mcp import connected

        async def call(url):
            async with connected(url, installed[name]) as client:
                return (await client.call_tool(tool, {argument: QUESTION})).model_dump_json()

        with pytest.MonkeyPatch.context() as patch, open_app(configuration.read()) as app:
            patch.setattr(gateways, "uvicorn_config", lambda app: uvicorn_config(app, GuardedTools))
            with gateways.serving(app) as url:
                return asyncio.run(call(url))

    return received


def command_line_path(*options):
    def received(installed, name):
        done = CliRunner().invoke(cli, ["ask", QUESTION, "--as", name, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    return received


def embedded(texts):
    return BagOfWords().embed(list(texts)).tolist()


def settings():
    return {"guard": {"defenses": [QUORUM], "audience": AUDIENCE}}


def langchain(installed, name):
    pytest.importorskip("langchain_core")
    from langchain_core.documents import Document as Page
    from langchain_core.vectorstores import InMemoryVectorStore

    from casemate.integrations.langchain import guarded
    from tests.unit.test_integrations_langchain import Model

    store = InMemoryVectorStore(Model())
    store.add_documents([Page(d.text, id=d.id) for d in DOCUMENTS])
    made = guarded(store, config=settings())
    with client_context(name, groups=GROUPS[name]):
        found = [*made.similarity_search(QUESTION, k=3), *made.as_retriever().invoke(QUESTION)]
    made.protection.close()
    return " ".join(d.page_content for d in found)


def llamaindex(installed, name):
    pytest.importorskip("llama_index.core")
    from llama_index.core import VectorStoreIndex
    from llama_index.core.schema import TextNode

    from casemate.integrations.llamaindex import guarded
    from tests.unit.test_integrations_llamaindex import Model

    index = VectorStoreIndex([TextNode(text=d.text, id_=d.id) for d in DOCUMENTS], embed_model=Model())
    made = guarded(index, config=settings(), similarity_top_k=3)
    with client_context(name, groups=GROUPS[name]):
        found = made.retrieve(QUESTION)
    made.protection.close()
    return " ".join(n.node.get_content() for n in found)


def haystack(installed, name):
    pytest.importorskip("haystack")
    from haystack import Document as Page
    from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
    from haystack.document_stores.in_memory import InMemoryDocumentStore

    from casemate.integrations.haystack import GuardedHaystackRetriever
    from tests.unit.test_integrations_haystack import Embedder

    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    vectors = embedded(TEXTS)
    store.write_documents([Page(id=d.id, content=d.text, embedding=v) for d, v in zip(DOCUMENTS, vectors, strict=True)])
    made = GuardedHaystackRetriever(InMemoryEmbeddingRetriever(store, top_k=3), Embedder(), config=settings())
    made.warm_up()
    with client_context(name, groups=GROUPS[name]):
        found = made.run(query=QUESTION)["documents"]
    made.protection.close()
    return " ".join(d.content for d in found)


CHAT = {"model": "casemate", "messages": [{"role": "user", "content": QUESTION}]}
PATHS = {
    "chat": gateway_path("/v1/chat/completions", **CHAT),
    "chat, streamed": gateway_path("/v1/chat/completions", **CHAT, stream=True),
    "responses": gateway_path("/v1/responses", model="casemate", input=QUESTION),
    "responses, streamed": gateway_path("/v1/responses", model="casemate", input=QUESTION, stream=True),
    "retrieve": gateway_path("/v1/retrieve", question=QUESTION),
    "MCP, search": mcp_path("search", "query"),
    "MCP, ask": mcp_path("ask", "question"),
    "ask --as": command_line_path(),
    "ask --as --explain": command_line_path("--explain"),
    "LangChain": langchain,
    "LlamaIndex": llamaindex,
    "Haystack": haystack,
}


@pytest.mark.parametrize("path", PATHS)
def test_only_entitled_clients_receive_the_text(installed, path):
    assert any(word in PATHS[path](installed, "archivist") for word in SECRETS)
    assert not any(word in PATHS[path](installed, "stranger") for word in SECRETS)


def test_the_contract_fails_without_the_policy(installed, monkeypatch):
    """Without the policy, the unentitled client receives the text."""
    monkeypatch.setattr("casemate.guard.audience.AudiencePolicy.restricts", lambda policy, query: False)
    with pytest.raises(AssertionError):
        test_only_entitled_clients_receive_the_text(installed, "ask --as")


def test_every_gateway_route_that_answers_questions_is_a_tested_path():
    """Add each new route that answers questions to ``PATHS``."""
    pytest.importorskip("fastapi")
    from casemate.gateway.api import chat, retrieve

    addresses = {
        route.path for router in (chat.router, retrieve.router) for route in router.routes if "POST" in route.methods
    }
    assert addresses == {"/v1/chat/completions", "/v1/responses", "/v1/retrieve"}
