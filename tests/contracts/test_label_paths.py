"""Access labels (``acl``) in the frameworks: a client without the label receives no part of a document."""

from __future__ import annotations

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from casemate.errors import ConfigError
from casemate.integrations.guarded_query import ClientIdentity, client_context, client_identity
from casemate.types import Document, Query, access_labels
from tests.fakes import BagOfWords

QUESTION = "Which door does the north tower of the harbor bridge have?"
TEXTS = {"open": "The north tower of the harbor bridge has a door of steel.", "hr": "The harbor door has a walnut."}
ACL = {"open": {}, "hr": {"Acl": ["hr", "board"]}}
OBSERVED = {"guard": {"mode": "observe", "defenses": []}}


def langchain():
    pytest.importorskip("langchain_core")
    from langchain_core.documents import Document
    from langchain_core.vectorstores import InMemoryVectorStore

    from casemate.integrations.langchain import guarded
    from tests.unit.test_integrations_langchain import Model

    store = InMemoryVectorStore(Model())
    store.add_documents([Document(text, id=name, metadata=ACL[name]) for name, text in TEXTS.items()])
    return guarded(store, config=OBSERVED)


def langchain_search():
    store = langchain()
    return store.protection, lambda: [d.id for d in store.similarity_search(QUESTION, k=2)]


def langchain_retriever():
    retriever = langchain().as_retriever()
    return retriever.vectorstore.protection, lambda: [d.id for d in retriever.invoke(QUESTION)]


def langchain_by_ids():
    store = langchain()
    return store.protection, lambda: [d.id for d in store.get_by_ids(list(TEXTS))]


def langchain_parents():
    """Parents with labels that their passages lack."""
    pytest.importorskip("langchain_classic")
    from langchain_classic.retrievers import ParentDocumentRetriever
    from langchain_core.documents import Document
    from langchain_core.stores import InMemoryStore
    from langchain_core.vectorstores import InMemoryVectorStore
    from langchain_text_splitters import CharacterTextSplitter

    from casemate.integrations.langchain import guarded
    from tests.unit.test_integrations_langchain import Model

    parents = ParentDocumentRetriever(
        vectorstore=guarded(InMemoryVectorStore(Model()), config=OBSERVED),
        docstore=InMemoryStore(),
        child_splitter=CharacterTextSplitter(),
        child_metadata_fields=["name"],
    )
    parents.add_documents([Document(text, metadata={"name": name, **ACL[name]}) for name, text in TEXTS.items()])
    made = guarded(parents)
    return parents.vectorstore.protection, lambda: [d.metadata["name"] for d in made.invoke(QUESTION)]


@pytest.mark.parametrize("with_id", [True, False])
def test_labels_of_the_store_apply_to_results_of_other_retrievers(with_id):
    """Such a retriever was built from the texts alone, so its results lack metadata."""
    pytest.importorskip("langchain_core")
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever

    from casemate.integrations.langchain import guarded

    class Other(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document(text, id=name if with_id else None) for name, text in TEXTS.items()]

    store = langchain()
    retriever = guarded(Other(), store=store)
    with client_context("ann"):
        assert [d.id for d in retriever.invoke(QUESTION)] == ["open"]
    with client_context("ann", labels=["hr"]):
        assert [d.id for d in retriever.invoke(QUESTION)] == ["open", "hr"]
    store.protection.close()


def llamaindex():
    pytest.importorskip("llama_index.core")
    from llama_index.core import VectorStoreIndex
    from llama_index.core.schema import TextNode

    from casemate.integrations.llamaindex import guarded
    from tests.unit.test_integrations_llamaindex import Model

    nodes = [TextNode(text=text, id_=name, metadata=ACL[name]) for name, text in TEXTS.items()]
    made = guarded(VectorStoreIndex(nodes, embed_model=Model()), config=OBSERVED, similarity_top_k=2)
    return made.protection, lambda: [n.node.node_id for n in made.retrieve(QUESTION)]


def haystack():
    pytest.importorskip("haystack")
    from haystack import Document
    from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
    from haystack.document_stores.in_memory import InMemoryDocumentStore

    from casemate.integrations.haystack import GuardedHaystackRetriever
    from tests.unit.test_integrations_haystack import Embedder

    store, vectors = (
        InMemoryDocumentStore(embedding_similarity_function="cosine"),
        BagOfWords().embed([*TEXTS.values()]),
    )
    store.write_documents(
        [
            Document(name, text, embedding=v.tolist(), meta=ACL[name])
            for (name, text), v in zip(TEXTS.items(), vectors, strict=True)
        ]
    )
    made = GuardedHaystackRetriever(InMemoryEmbeddingRetriever(store, top_k=2), Embedder(), config=OBSERVED)
    made.warm_up()
    return made.protection, lambda: [d.id for d in made.run(query=QUESTION)["documents"]]


PATHS = [langchain_search, langchain_retriever, langchain_by_ids, langchain_parents, llamaindex, haystack]


@pytest.fixture(params=PATHS, ids=lambda path: path.__name__)
def searched(request):
    protection, search = request.param()
    yield search
    protection.close()


def test_only_a_client_with_the_label_receives_a_restricted_document(searched):
    with client_context("ann"):
        assert searched() == ["open"]
    with client_context("ann", labels=["sales"]):
        assert searched() == ["open"]
    with client_context("ann", labels=["hr"]):
        assert sorted(searched()) == ["hr", "open"]
        with client_context("ben"):  # the labels belong to another client
            assert searched() == ["open"]
    assert searched() == ["open"]


def test_documents_withheld_for_lack_of_labels_are_logged_once(caplog):
    protection, search = langchain_search()
    with client_context("ann"), caplog.at_level(logging.WARNING, "casemate.integrations"):
        search(), search()
    protection.close()
    assert [r.message.count("labels=") for r in caplog.records if "acl" in r.message] == [1]


def test_labels_must_be_a_list():
    with pytest.raises(ConfigError, match="labels must be a list of texts"), client_context("ann", labels="hr"):
        pass


def test_labels_apply_to_one_client_of_one_tenant():
    with client_context("ben", tenant="north", labels=["hr"]):
        assert client_identity("ben", "north").labels == ("hr",)
        assert client_identity("ben", "south").labels == ()
    with client_context("north/ben", labels=["hr"]), client_context("ben", tenant="north"):
        assert client_identity().labels == ()


PART = st.text("a/%2F", max_size=4)


@example(("b/c", "a"), ("c", "a/b"))
@example(("north/ben", ""), ("ben", "north"))
@given(st.tuples(PART.filter(bool), PART), st.tuples(PART.filter(bool), PART))
def test_two_clients_never_have_the_same_name(one, other):
    assert (ClientIdentity(*one).name == ClientIdentity(*other).name) == (one == other)


VALUE = st.sampled_from(["Ann", ["hr"], {"hr": 1}, None])
OTHER = st.dictionaries(st.sampled_from(["by", "metadata", "readers"]), VALUE)


@given(st.sampled_from(["acl", "ACL", " Acl "]), st.lists(st.tuples(st.booleans(), OTHER), max_size=4))
def test_labels_restrict_at_any_depth_of_the_metadata(key, around):
    """LangChain's stores keep the metadata of a document inside a field ``metadata``."""
    metadata = {key: ["hr"]}
    for in_list, others in around:
        metadata = others | {"metadata": [metadata] if in_list else metadata}
    restricted = Document("d", "", metadata=metadata)
    assert not Query("", labels=frozenset()).may_read(restricted)
    assert Query("", labels=frozenset(["hr"])).may_read(restricted)


def test_deeply_nested_metadata_are_read():
    metadata = {"acl": ["hr"]}
    for _ in range(5_000):
        metadata = {"inner": metadata}
    assert access_labels(metadata) == {"hr"}
    assert access_labels(metadata | {"acl": []}) == frozenset()
