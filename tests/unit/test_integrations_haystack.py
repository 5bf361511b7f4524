"""The Haystack component, in Haystack's own pipelines."""

from __future__ import annotations

from contextlib import closing

import pytest

pytest.importorskip("haystack")

from haystack import Document, Pipeline, component
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever, InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from casemate.errors import ConfigError
from casemate.integrations.haystack import GuardedHaystackRetriever
from tests.wrapped import HARMLESS, MEMBERS, config, corpus, embedded, mirabel, text_of


@component
class Embedder:
    """Embeds a question."""

    @component.output_types(embedding=list[float])
    def run(self, text: str):
        return {"embedding": embedded([text])[0]}


def ids(found):
    return [d.id for d in found["documents"]]


def filled(per_source=1):
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    vectors = embedded([d.text for d in corpus()])
    store.write_documents(
        [
            Document(id=d.id, content=d.text, embedding=v, meta={"source_id": f"s{i // per_source}", "n": i % 2})
            for i, (d, v) in enumerate(zip(corpus(), vectors, strict=True))
        ]
    )
    return store


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    made = GuardedHaystackRetriever(InMemoryEmbeddingRetriever(filled()), Embedder(), config=config(), path=str(folder))
    made.warm_up()
    made.protection.close()
    return str(folder / "calibration.json")


@pytest.fixture
def wrap(calibration):
    made = []

    def wrapped(retriever=None, **options):
        settings = config(defenses=[mirabel(calibration=calibration)])
        retriever = retriever or InMemoryEmbeddingRetriever(filled(), top_k=3)
        made.append(GuardedHaystackRetriever(retriever, Embedder(), config=settings, fit=False, **options))
        return made[-1]

    yield wrapped
    for retriever in made:
        retriever.protection.close()


def test_question_with_a_copied_document_gets_top_k_other_documents(wrap):
    bare, guarded = InMemoryEmbeddingRetriever(filled(), top_k=3), wrap()
    withheld = 0
    for i in range(30):
        question = text_of(f"d{i}")
        assert ids(bare.run(query_embedding=embedded([question])[0]))[0] == f"d{i}"
        found = ids(guarded.run(query=question, client=f"eve {i}"))
        assert len(set(found)) == 3
        withheld += f"d{i}" not in found
    assert withheld >= 26
    expected = bare.run(query_embedding=embedded([HARMLESS])[0])["documents"]
    assert guarded.run(query=HARMLESS)["documents"] == expected


def test_pipeline_output_contains_no_verdict(wrap):
    pipeline = Pipeline()
    pipeline.add_component("embedder", Embedder())
    pipeline.add_component("retriever", wrap())
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    inputs = {"embedder": {"text": text_of("d4")}, "retriever": {"query": text_of("d4"), "client": "eve"}}
    outputs = pipeline.run(inputs, include_outputs_from={"retriever", "embedder"})
    assert len(outputs["retriever"]["documents"]) == 3
    assert "d4" not in ids(outputs["retriever"])
    assert all(set(d.meta) == {"source_id", "n"} for d in outputs["retriever"]["documents"])
    for word in ("mirabel", "verdict", "withheld", "flagged"):
        assert word not in repr(outputs).lower()


async def test_asynchronous_pipeline_withholds_documents(wrap):
    pipeline = Pipeline()
    pipeline.add_component("retriever", wrap())
    outputs = await pipeline.run_async({"retriever": {"query": text_of("d4")}})
    assert len(outputs["retriever"]["documents"]) == 3
    assert "d4" not in ids(outputs["retriever"])


def test_client_and_tenant_are_inputs_of_the_component(wrap):
    guarded = wrap()
    guarded.run(query=text_of("d4"), client="eve")
    near = "only4 amber"
    assert "d4" not in ids(guarded.run(query=near, client="eve", top_k=4))
    assert "d4" in ids(guarded.run(query=near, client="bob", top_k=4))
    assert "d4" in ids(guarded.run(query=near, client="eve", tenant="another", top_k=4))


def test_filters_top_k_scores_and_embeddings_of_the_retriever_apply(wrap):
    filters = {"field": "meta.n", "operator": "==", "value": 0}
    guarded = wrap()
    found = guarded.run(query=HARMLESS, filters=filters, top_k=5)["documents"]
    assert len(found) == 5
    assert {d.meta["n"] for d in found} == {0}
    assert all(d.embedding is None for d in found)
    assert "d4" not in ids(guarded.run(query=text_of("d4"), filters=filters))
    assert ids(guarded.run(query=HARMLESS, top_k=0)) == []
    kept = wrap(InMemoryEmbeddingRetriever(filled(), top_k=2, return_embedding=True, scale_score=True))
    found = kept.run(query=HARMLESS)["documents"]
    assert all(d.embedding is not None for d in found)
    bare = kept.retriever.run(query_embedding=embedded([HARMLESS])[0])["documents"]
    assert [d.score for d in found] == [d.score for d in bare]


def test_all_parts_of_a_source_are_withheld(wrap):
    guarded = wrap(InMemoryEmbeddingRetriever(filled(per_source=2), top_k=4))
    assert not {"d4", "d5"} & set(ids(guarded.run(query=text_of("d4"))))
    assert "d5" not in ids(guarded.run(query="only5 amber"))


def test_component_is_saved_to_yaml_and_loaded(wrap):
    guarded = wrap()
    pipeline = Pipeline()
    pipeline.add_component("retriever", guarded)
    modules = ["casemate.integrations.haystack", __name__]
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=modules).get_component("retriever")
    assert again.to_dict() == guarded.to_dict()
    assert isinstance(again, GuardedHaystackRetriever)
    assert isinstance(again.retriever, InMemoryEmbeddingRetriever)
    assert again.config == guarded.config


def test_sync_indexes_documents_written_directly_to_the_store(wrap):
    guarded = wrap()
    guarded.warm_up()
    store = guarded.retriever.document_store
    store.write_documents([Document(id="new", content="only999 amber", embedding=embedded(["only999 amber"])[0])])
    guarded.sync()
    assert guarded.protection.index.moments().n == MEMBERS + 1


def test_retriever_that_does_not_search_by_vector_is_refused():
    with pytest.raises(ConfigError, match="give an embedding retriever"):
        GuardedHaystackRetriever(InMemoryBM25Retriever(filled()), Embedder())


def test_protection_report_lists_what_is_not_protected(wrap, caplog):
    with caplog.at_level("INFO", "casemate.integrations"):
        guarded = wrap()
        guarded.warm_up()
    assert "the framework owns the model" in str(guarded.protection_report)
    assert str(guarded.protection_report) in caplog.text


def test_client_obtains_at_most_the_word_budget_of_crawl_limit():
    settings, lengths = config(defenses=[{"use": "crawl_limit", "budget": 200, "questions": 10_000}]), {}
    values = set()
    retriever = InMemoryEmbeddingRetriever(filled(), top_k=3)
    guarded = GuardedHaystackRetriever(retriever, Embedder(), config=settings, fit=False)
    with closing(guarded.protection):
        for n in range(0, 80, 2):
            for d in guarded.run(query=f"only{n} only{n + 1}", client="eve")["documents"]:
                lengths[d.id] = max(lengths.get(d.id, 0), len(d.content.split()))
                values |= {d.id, "source", "id", "n", *map(str, d.meta.values())}
    assert 180 <= sum(lengths.values()) + len(values) <= 200
