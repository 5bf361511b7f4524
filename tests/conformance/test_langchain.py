"""LangChain's own test suites for vector stores and retrievers, unmodified, on the guarded ones."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("langchain_tests")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from casemate.integrations.langchain import GuardedVectorStoreRetriever, guarded
from tests.real_stores import chroma, faiss


def expect_failures(request):
    """Marks the tests that FAISS fails, because it does not replace a document with the same id."""
    fails = ("delete_missing_content", "with_ids_is_idempotent", "by_id_with_mutation")
    if any(name in request.node.name for name in fails):
        request.node.add_marker(pytest.mark.xfail(strict=True, reason="the unguarded store fails, too"))


class TestGuardedVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self):
        store = guarded(InMemoryVectorStore(self.get_embeddings()))
        yield store
        store.protection.close()


@pytest.mark.slow
class TestGuardedChroma(VectorStoreIntegrationTests):
    open_store = staticmethod(chroma)

    @pytest.fixture
    def vectorstore(self, tmp_path):
        store = guarded(self.open_store(tmp_path, self.get_embeddings()))
        yield store
        store.protection.close()


class TestGuardedFaiss(TestGuardedChroma):
    """It fails exactly the six tests that the unguarded store fails (``TestBareFaiss``)."""

    open_store = staticmethod(faiss)

    @pytest.fixture(autouse=True)
    def _as_unguarded(self, request):
        expect_failures(request)


@pytest.mark.slow
class TestBareFaiss(VectorStoreIntegrationTests):
    """The unguarded store fails exactly the six tests that ``TestGuardedFaiss`` expects to fail."""

    @pytest.fixture(autouse=True)
    def _expected(self, request):
        expect_failures(request)

    @pytest.fixture
    def vectorstore(self, tmp_path):
        return faiss(tmp_path, self.get_embeddings())


class TestGuardedRetriever(RetrieversIntegrationTests):
    open_store = staticmethod(lambda folder, embeddings: InMemoryVectorStore(embeddings))

    @pytest.fixture(autouse=True)
    def _store(self, tmp_path):
        store = self.open_store(tmp_path, DeterministicFakeEmbedding(size=6))
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


@pytest.mark.slow
class TestGuardedChromaRetriever(TestGuardedRetriever):
    open_store = staticmethod(chroma)


@pytest.mark.slow
class TestGuardedFaissRetriever(TestGuardedRetriever):
    open_store = staticmethod(faiss)
