"""The LlamaIndex wrappers, by LlamaIndex's own interfaces: retriever, postprocessor, query engine, events."""

from __future__ import annotations

from contextlib import closing

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters

from casemate.errors import ConfigError
from casemate.integrations.guarded_query import client_context
from casemate.integrations.llamaindex import GuardedLlamaIndexRetriever, guarded
from tests.wrapped import HARMLESS, MEMBERS, config, corpus, embedded, mirabel, text_of


class Model(BaseEmbedding):
    def _get_text_embedding(self, text):
        return embedded([text])[0]

    def _get_query_embedding(self, query):
        return embedded([query])[0]

    async def _aget_query_embedding(self, query):
        return embedded([query])[0]


def node(d, source=""):
    made = TextNode(text=d.text, id_=d.id, metadata={"n": int(d.id[1:]) % 2})
    made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=source or f"source of {d.id}")
    return made


def ids(nodes):
    return [n.node.node_id for n in nodes]


def filled():
    return VectorStoreIndex([node(d) for d in corpus()], embed_model=Model())


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    guarded(filled(), config=config(), path=folder).protection.close()
    return str(folder / "calibration.json")


@pytest.fixture
def wrap(calibration):
    made = []

    def wrapped(source=None, **options):
        options = {"similarity_top_k": 3} | options if source is None else options
        settings = config(defenses=[mirabel(calibration=calibration)])
        made.append(guarded(source or filled(), config=settings, fit=False, **options))
        return made[-1]

    yield wrapped
    for retriever in made:
        retriever.protection.close()


def test_question_with_a_copied_document_gets_top_k_other_nodes(wrap):
    index = filled()
    bare, retriever = index.as_retriever(similarity_top_k=3), wrap()
    assert isinstance(retriever, BaseRetriever)
    withheld = 0
    for i in range(30):
        assert ids(bare.retrieve(text_of(f"d{i}")))[0] == f"d{i}"
        with client_context(f"eve {i}"):
            found = ids(retriever.retrieve(text_of(f"d{i}")))
        assert len(set(found)) == 3
        withheld += f"d{i}" not in found
    assert withheld >= 26
    expected = bare.retrieve(HARMLESS)
    found = retriever.retrieve(HARMLESS)
    assert ids(found) == ids(expected)
    assert [n.score for n in found] == pytest.approx([n.score for n in expected])
    assert [n.metadata for n in found] == [n.metadata for n in expected]


async def test_asynchronous_retrieval_withholds_nodes(wrap):
    retriever = wrap()
    assert "d4" not in ids(await retriever.aretrieve(text_of("d4")))
    assert len(await retriever.aretrieve(HARMLESS)) == 3
    assert "d4" not in ids(retriever.retrieve(text_of("d4")))  # in a running event loop


def test_filters_of_the_retriever_apply(wrap):
    filters = MetadataFilters(filters=[MetadataFilter(key="n", value=0, operator=FilterOperator.EQ)])
    retriever = wrap(filled().as_retriever(similarity_top_k=4, filters=filters))
    assert {n.metadata["n"] for n in retriever.retrieve(HARMLESS)} == {0}
    assert "d4" not in ids(retriever.retrieve(text_of("d4")))


def test_client_comes_from_the_query_bundle_or_the_context(wrap):
    retriever = wrap()
    retriever.similarity_top_k = 4
    bundle = QueryBundle(text_of("d4"))
    bundle.casemate_client = "eve"
    assert "d4" not in ids(retriever.retrieve(bundle))
    near = "only4 amber"
    with client_context("eve"):
        assert "d4" not in ids(retriever.retrieve(near))
    with client_context("bob"):
        assert "d4" in ids(retriever.retrieve(near))


def test_query_engine_and_events_contain_no_withheld_node_and_no_verdict(wrap):
    class RecordingHandler(BaseEventHandler):
        recorded: list = []

        def handle(self, event, **kwargs):
            self.recorded.append(repr(event))

    recorder, debug = RecordingHandler(), LlamaDebugHandler(print_trace_on_end=False)
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(recorder)
    try:
        nodes = [node(d) for d in corpus()]
        index = VectorStoreIndex(nodes, embed_model=Model(), callback_manager=CallbackManager([debug]))
        inner = index.as_retriever(similarity_top_k=3)
        synthesizer = get_response_synthesizer(llm=MockLLM(), response_mode="accumulate", streaming=False)
        engine = RetrieverQueryEngine(wrap(inner), response_synthesizer=synthesizer)
        answer = engine.query(text_of("d4"))
    finally:
        dispatcher.event_handlers.remove(recorder)
    assert len(answer.source_nodes) == 3
    assert "d4" not in ids(answer.source_nodes)
    events = repr(recorder.recorded) + repr(debug.get_events())
    assert recorder.recorded
    assert debug.get_events()
    assert "source of d4" not in events
    for word in ("mirabel", "verdict", "withheld", "flagged"):
        assert word not in events.lower()


def test_postprocessor_judges_results_of_another_retriever_and_replaces_withheld_nodes(wrap):
    index = filled()
    post = wrap(index.as_retriever(similarity_top_k=3)).as_postprocessor()
    assert isinstance(post, BaseNodePostprocessor)
    assert post.class_name() == "GuardedPostprocessor"
    given = [NodeWithScore(node=node(d), score=0.5 - i / 10) for i, d in enumerate(corpus()[2:6])]
    kept = post.postprocess_nodes(given, query_str=HARMLESS)
    assert [(n.node.node_id, n.score) for n in kept] == [(n.node.node_id, n.score) for n in given]
    kept = post.postprocess_nodes(given, query_str=text_of("d4"))
    assert len(kept) == 4
    assert ids(kept)[:3] == ["d2", "d3", "d5"]
    assert "d4" not in ids(kept)
    with_unknown = [*given, NodeWithScore(node=TextNode(text="from elsewhere", id_="web"), score=1.0)]
    assert "web" not in ids(post.postprocess_nodes(with_unknown, query_str=HARMLESS))
    assert post.postprocess_nodes([], query_str=HARMLESS) == []
    with pytest.raises(ConfigError, match="without their question"):
        post.postprocess_nodes(given)


async def test_postprocessor_works_asynchronously_and_in_a_query_engine(wrap):
    index = filled()
    post = wrap(index.as_retriever(similarity_top_k=3)).as_postprocessor()
    given = [NodeWithScore(node=node(d), score=0.5) for d in corpus()[2:6]]
    assert "d4" not in ids(await post.apostprocess_nodes(given, query_str=text_of("d4")))
    synthesizer = get_response_synthesizer(llm=MockLLM(), response_mode="accumulate")
    engine = RetrieverQueryEngine(index.as_retriever(similarity_top_k=3), synthesizer, node_postprocessors=[post])
    answer = await engine.aquery(text_of("d4"))
    assert len(answer.source_nodes) == 3
    assert "d4" not in ids(answer.source_nodes)


def test_all_nodes_of_a_document_are_withheld(calibration):
    nodes = [node(d, f"report {int(d.id[1:]) // 2}") for d in corpus()]
    index = VectorStoreIndex(nodes, embed_model=Model())
    settings = config(defenses=[mirabel(calibration=calibration)])
    retriever = guarded(index, config=settings, fit=False, similarity_top_k=4)
    assert not {"d4", "d5"} & set(ids(retriever.retrieve(text_of("d4"))))
    assert "d5" not in ids(retriever.retrieve("only5 amber"))
    retriever.protection.close()


def test_inserted_nodes_are_indexed_at_once(wrap):
    retriever = wrap()
    retriever.insert_nodes([TextNode(text="only999 amber", id_="new")])
    assert retriever.protection.index.moments().n == MEMBERS + 1
    assert ids(retriever.retrieve("only999 amber"))[0] == "new"
    retriever.sync()
    assert retriever.protection.index.moments().n == MEMBERS + 1


def test_retrievers_with_other_search_methods_are_refused():
    index = filled()
    with pytest.raises(ConfigError, match="as_postprocessor"):
        guarded(index.as_retriever(vector_store_query_mode="mmr"))
    with pytest.raises(ConfigError, match="as_postprocessor"):
        guarded(other_retriever())


def test_guarding_is_idempotent(wrap):
    retriever = wrap()
    assert guarded(retriever) is retriever
    with pytest.raises(ConfigError, match="no option|cannot be judged alone"):
        guarded(retriever, fit=False)


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="no option 'mode' here; allowed: config, path, fit, similarity_top_k"):
        guarded(filled(), mode="observe")
    with pytest.raises(ConfigError, match="no option 'similarity_top_k' here; allowed: config, path, fit$"):
        guarded(filled().as_retriever(), similarity_top_k=3)  # the retriever has its own value


def other_retriever():
    class Other(BaseRetriever):
        def _retrieve(self, query_bundle):
            return []

    return Other()


def test_protection_report_lists_what_is_not_protected(wrap, caplog):
    with caplog.at_level("INFO", "casemate.integrations"):
        retriever = wrap()
    assert isinstance(retriever, GuardedLlamaIndexRetriever)
    assert "the framework owns the model" in str(retriever.protection_report)
    assert str(retriever.protection_report) in caplog.text
    assert retriever.as_postprocessor().protection_report == retriever.protection_report


@pytest.mark.parametrize("way", ["retriever", "postprocessor"])
def test_client_obtains_at_most_the_word_budget_of_crawl_limit(way):
    settings, lengths = config(defenses=[{"use": "crawl_limit", "budget": 200, "questions": 10_000}]), {}
    values = set()
    retriever = guarded(filled(), config=settings, fit=False, similarity_top_k=3)
    with closing(retriever.protection), client_context("eve"):
        judged = retriever.as_postprocessor()
        for n in range(0, 80, 2):
            bundle = QueryBundle(f"only{n} only{n + 1}")
            given = [NodeWithScore(node=node(d)) for d in corpus()[n : n + 2]]
            asked = retriever.retrieve(bundle) if way == "retriever" else judged.postprocess_nodes(given, bundle)
            for found in asked:
                lengths[found.node_id] = max(lengths.get(found.node_id, 0), len(found.text.split()))
                values |= {found.node_id, *found.metadata, *map(str, found.metadata.values())}
    assert 180 <= sum(lengths.values()) + len(values) + 3 * len(lengths) <= 200  # each node has a source id


def test_metadata_of_related_nodes_counts_against_the_budget():
    settings = config(defenses=[{"use": "crawl_limit", "budget": 200, "questions": 10_000}])
    nodes = [node(d) for d in corpus()]
    for number, one in enumerate(nodes):
        metadata = {"section": " ".join(f"r{number}x{i}" for i in range(30))}
        one.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id=f"next{number}", metadata=metadata)
    retriever = guarded(VectorStoreIndex(nodes, embed_model=Model()), config=settings, fit=False, similarity_top_k=3)
    obtained = set()
    with closing(retriever.protection), client_context("eve"):
        for n in range(0, 40, 2):
            for found in retriever.retrieve(QueryBundle(f"only{n} only{n + 1}")):
                obtained |= set(found.node.relationships[NodeRelationship.NEXT].metadata["section"].split())
    assert 60 <= len(obtained) <= 200
