"""LangChain's own suites for vector stores and retrievers, on the guarded ones, as they are."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("langchain_tests")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from casemate.integrations.langchain import GuardedVectorStoreRetriever, guarded


class TestGuardedVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self):
        store = guarded(InMemoryVectorStore(self.get_embeddings()))
        yield store
        store.protection.close()


class TestGuardedRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _store(self):
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=6))
        store.add_documents([Document(f"document {i}", id=str(i)) for i in range(12)])
        self.store = guarded(store)
        yield
        self.store.protection.close()

    @property
    def retriever_constructor(self):
        return GuardedVectorStoreRetriever

    @property
    def retriever_constructor_params(self):
        return {"vectorstore": self.store}

    @property
    def retriever_query_example(self):
        return "document 3"
