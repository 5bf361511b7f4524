"""Guarded vector stores: the unmodified packages of several vendors, through LangChain."""

from __future__ import annotations

import uuid

import pytest

pytest.importorskip("langchain_core")

from langchain_core.documents import Document

from casemate.errors import ConfigError
from casemate.integrations.langchain import guarded
from tests.real_stores import chroma, faiss, lancedb, qdrant
from tests.unit.test_integrations_langchain import Model, ids
from tests.wrapped import HARMLESS, config, corpus, mirabel, text_of

UUIDS = {d.id: str(uuid.uuid5(uuid.NAMESPACE_DNS, d.id)) for d in corpus()}
"""Qdrant accepts only numbers and UUIDs as ids."""


def documents():
    return [
        Document(d.text, id=UUIDS[d.id], metadata={"n": int(d.id[1:]), "part": int(d.id[1:]) // 50}) for d in corpus()
    ]


def only(store, key, value):
    """A metadata filter in the syntax of the store."""
    if type(store).__name__ == "QdrantVectorStore":
        from qdrant_client import models

        match = models.FieldCondition(key=f"metadata.{key}", match=models.MatchValue(value=value))
        return {"filter": models.Filter(must=[match])}
    if type(store).__name__ == "LanceDB":
        return {"filter": f"metadata.{key} = {value}", "prefilter": True}
    return {"filter": {key: value}} | ({"fetch_k": 999} if type(store).__name__ == "FAISS" else {})


def identity(document):
    return document.metadata["n"]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    from tests.unit.test_integrations_langchain import filled

    folder = tmp_path_factory.mktemp("fit")
    guarded(filled(), config=config(), path=folder).protection.close()
    return str(folder / "calibration.json")


@pytest.fixture(params=[chroma, faiss, qdrant, lancedb], ids=lambda make: make.__name__)
def pair(request, tmp_path, calibration):
    """A store with the documents of ``corpus``, unguarded and guarded."""
    bare = request.param(tmp_path, Model())
    bare.add_documents(documents(), ids=list(UUIDS.values()))
    settings = config(defenses=[mirabel(calibration=calibration)])
    store = guarded(bare, config=settings, fit=False)
    yield bare, store
    store.protection.close()


@pytest.mark.filterwarnings("ignore:No results found")
def test_a_filter_without_matches_returns_nothing(pair):
    bare, store = pair
    assert bare.similarity_search(HARMLESS, k=3, **only(bare, "n", 999)) == []
    assert store.similarity_search(HARMLESS, k=3, **only(bare, "n", 999)) == []
    assert [identity(d) for d in store.similarity_search(HARMLESS, k=3, **only(bare, "n", 8))] == [8]
    assert store.similarity_search(text_of("d8"), k=3, **only(bare, "n", 8)) == []


def test_benign_questions_get_the_documents_and_scores_of_the_unguarded_store(pair):
    bare, store = pair
    expected = bare.similarity_search_with_score(HARMLESS, k=5)
    found = store.similarity_search_with_score(HARMLESS, k=5)
    assert [identity(d) for d, _ in found] == [identity(d) for d, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected], abs=1e-5)
    part = only(bare, "part", 1)
    expected = bare.similarity_search(HARMLESS, k=5, **part)
    assert [identity(d) for d in store.similarity_search(HARMLESS, k=5, **part)] == [identity(d) for d in expected]


def test_a_document_that_the_question_contains_is_withheld_and_replaced(pair):
    bare, store = pair
    withheld = 0
    for i in range(20):
        question = f"Do you know this: {text_of(f'd{i}')}?"
        assert identity(bare.similarity_search(question, k=3)[0]) == i
        found = [identity(d) for d in store.similarity_search(question, k=3, casemate_client=f"eve {i}")]
        assert len(found) == 3
        withheld += i not in found
    assert withheld >= 18


def test_added_and_deleted_documents_are_guarded_immediately(pair):
    bare, store = pair
    new = str(uuid.uuid5(uuid.NAMESPACE_DNS, "new"))
    question = "only500 only501 amber birch cedar delta ember flint grove heron inlet jetty"
    assert store.add_documents([Document(question, id=new, metadata={"n": 500, "part": 9})]) == [new]
    assert store.protection.index.moments().n == len(UUIDS) + 1
    assert identity(bare.similarity_search(question, k=1)[0]) == 500
    assert 500 not in [identity(d) for d in store.similarity_search(question, k=3)]
    store.delete([new])
    assert store.protection.index.moments().n == len(UUIDS)
    assert len(store.max_marginal_relevance_search(HARMLESS, k=3)) == 3


def test_qdrant_returns_withheld_documents_by_id_to_other_clients_only(tmp_path, calibration):
    bare = qdrant(tmp_path, Model())
    bare.add_documents(documents())
    store = guarded(bare, config=config(defenses=[mirabel(calibration=calibration)]), fit=False)
    assert [identity(d) for d in store.get_by_ids([UUIDS["d4"]])] == [4]
    store.similarity_search(text_of("d4"), k=3)
    assert [identity(d) for d in store.get_by_ids([UUIDS["d4"], UUIDS["d5"]])] == [5]
    store.protection.close()


def test_qdrant_in_hybrid_mode_is_rejected_with_advice(tmp_path):
    store = qdrant(tmp_path, Model())
    store.retrieval_mode = "hybrid"
    with pytest.raises(ConfigError, match="retrieval_mode 'dense'"):
        guarded(store)


def test_an_overwritten_table_of_lancedb_is_reloaded(tmp_path, calibration):
    bare = lancedb(tmp_path, Model())
    bare.add_documents(documents(), ids=list(UUIDS.values()))
    bare.mode = "overwrite"
    store = guarded(bare, config=config(defenses=[mirabel(calibration=calibration)]), fit=False)
    store.add_documents([Document(f"only{i} amber", metadata={"n": i, "part": 0}) for i in range(40)])
    assert store.protection.index.moments().n == 40


@pytest.mark.parametrize("given_ids", [None, "other"])
def test_keyword_documents_without_ids_of_the_store_are_judged_by_their_text(pair, given_ids):
    pytest.importorskip("rank_bm25", reason="rank-bm25 is not installed")
    pytest.importorskip("langchain_community", reason="langchain-community is not installed")
    from langchain_community.retrievers import BM25Retriever

    _, store = pair
    texts = [d.text for d in corpus()]
    own = [f"{given_ids} {i}" for i in range(len(texts))] if given_ids else None
    words = BM25Retriever.from_texts([*texts, "not in the store"], ids=[*own, "x"] if own else None, k=4)
    bare, found = words.invoke(HARMLESS), guarded(words, store=store).invoke(HARMLESS)
    assert [d.page_content for d in found] == [d.page_content for d in bare]
    assert own or set(ids(found)) <= set(UUIDS.values())
    question = text_of("d4")
    assert text_of("d4") == words.invoke(question)[0].page_content
    found = guarded(words, store=store).invoke(question)
    assert len(found) == 4
    assert text_of("d4") not in [d.page_content for d in found]
    assert guarded(words, store=store).invoke("not in the store") != []
    store.delete([UUIDS["d7"]])
    assert text_of("d7") not in [d.page_content for d in guarded(words, store=store).invoke("only7 amber")]


def test_results_of_another_search_in_the_same_collection_are_judged(pair):
    bare, store = pair
    retriever = guarded(bare.as_retriever(search_kwargs={"k": 3}), store=store)
    assert [identity(d) for d in retriever.invoke(HARMLESS)] == [
        identity(d) for d in bare.similarity_search(HARMLESS, k=3)
    ]
    found = [d.page_content for d in retriever.invoke(text_of("d4"))]
    assert len(found) == 3
    assert text_of("d4") not in found
