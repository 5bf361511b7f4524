"""Opens the vector stores of several vendors, empty, through LangChain. Skips the test if a package is missing."""

from __future__ import annotations

import pytest


def chroma(folder, embeddings):
    chromadb = pytest.importorskip("chromadb", reason="chromadb is not installed")
    langchain = pytest.importorskip("langchain_chroma", reason="langchain-chroma is not installed")
    client = chromadb.PersistentClient(str(folder), chromadb.config.Settings(anonymized_telemetry=False))
    return langchain.Chroma("collection", embeddings, client=client, collection_metadata={"hnsw:space": "cosine"})


def faiss(folder, embeddings):
    index = pytest.importorskip("faiss", reason="faiss-cpu is not installed").IndexFlatL2(dim_of(embeddings))
    pytest.importorskip("langchain_community", reason="langchain-community is not installed")
    from langchain_community.docstore.in_memory import InMemoryDocstore
    from langchain_community.vectorstores import FAISS

    return FAISS(embeddings, index, InMemoryDocstore(), {})


def qdrant(folder, embeddings):
    client = pytest.importorskip("qdrant_client", reason="qdrant-client is not installed")
    langchain = pytest.importorskip("langchain_qdrant", reason="langchain-qdrant is not installed")
    local = client.QdrantClient(path=str(folder))
    params = client.models.VectorParams(size=dim_of(embeddings), distance=client.models.Distance.COSINE)
    local.create_collection("collection", vectors_config=params)
    return langchain.QdrantVectorStore(local, "collection", embeddings)


def lancedb(folder, embeddings):
    pytest.importorskip("lancedb", reason="lancedb is not installed")
    pytest.importorskip("langchain_community", reason="langchain-community is not installed")
    from langchain_community.vectorstores import LanceDB

    return LanceDB(embedding=embeddings, uri=str(folder), distance="cosine", mode="append")


def dim_of(embeddings):
    return len(embeddings.embed_query("a"))
