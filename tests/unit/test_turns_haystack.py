"""Turns in Haystack: hybrid pipelines, joiners, and pipelines of agents."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

pytest.importorskip("haystack")

from haystack import Pipeline, component
from haystack.components.joiners import DocumentJoiner
from haystack.components.rankers import LostInTheMiddleRanker
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever, InMemoryEmbeddingRetriever

from casemate.errors import ConfigError
from casemate.guard.turn import turn
from casemate.integrations.haystack import GuardedHaystackRetriever
from casemate.integrations.haystack_fusion import GuardedDocumentJoiner, unguarded_legs
from tests.unit import test_integrations_haystack as wrappers
from tests.unit.test_integrations_haystack import Embedder, filled, ids
from tests.wrapped import HARMLESS, config, mirabel, text_of

calibration = wrappers.calibration


@pytest.fixture
def leg(calibration):
    """A guarded retriever without client state, so that only the turn connects queries."""
    settings = config(defenses=[mirabel(calibration=calibration, session_hours=0)])
    inner = InMemoryEmbeddingRetriever(filled(), top_k=3)
    made = GuardedHaystackRetriever(inner, Embedder(), config=settings, fit=False)
    yield made
    made.protection.close()


def hybrid(leg, joiner):
    pipeline = Pipeline()
    pipeline.add_component("dense", leg)
    pipeline.add_component("words", InMemoryBM25Retriever(leg.retriever.document_store, top_k=3))
    pipeline.add_component("joiner", joiner)
    pipeline.connect("dense.documents", "joiner.documents")
    pipeline.connect("words.documents", "joiner.documents")
    return pipeline


def ids_for(pipeline, question, query=None):
    given = {"dense": {"query": query or question}, "words": {"query": query or question}}
    if isinstance(pipeline.get_component("joiner"), GuardedDocumentJoiner):
        given["joiner"] = {"query": question}
    return ids(pipeline.run(given)["joiner"])


def test_an_unguarded_leg_of_a_hybrid_pipeline_is_reported(leg):
    pipeline = hybrid(leg, DocumentJoiner())
    assert "d4" in ids_for(pipeline, text_of("d4"))
    assert unguarded_legs(pipeline) == ["words: InMemoryBM25Retriever"]


def test_the_guarded_joiner_judges_results_of_every_leg(leg):
    pipeline = hybrid(leg, GuardedDocumentJoiner(leg))
    assert unguarded_legs(pipeline) == []
    for i in (4, 7, 9):
        assert f"d{i}" not in ids_for(pipeline, text_of(f"d{i}"))
    dense = leg.retriever.run(query_embedding=Embedder().run(HARMLESS)["embedding"])
    words = pipeline.get_component("words").run(query=HARMLESS)
    assert set(ids_for(pipeline, HARMLESS)) == {*ids(dense), *ids(words)}


def test_rewritten_queries_of_a_pipeline_are_one_turn(leg):
    pipeline = hybrid(leg, GuardedDocumentJoiner(leg))
    assert "d4" in ids_for(pipeline, "only4 amber")
    with turn(text_of("d4")):
        assert "d4" not in ids_for(pipeline, "only4 amber")


async def test_an_asynchronous_pipeline_runs_within_the_turn(leg):
    pipeline = Pipeline()
    pipeline.add_component("dense", leg)
    with turn(text_of("d4")):
        found = await pipeline.run_async({"dense": {"query": "only4 amber"}})
    assert "d4" not in ids(found["dense"])


@pytest.mark.parametrize("question", [text_of("d4"), text_of("d7")])
async def test_an_asynchronous_hybrid_pipeline_is_guarded_in_every_leg(leg, question):
    pipeline = hybrid(leg, GuardedDocumentJoiner(leg))
    given = {"dense": {"query": question}, "words": {"query": question}, "joiner": {"query": question}}
    found = ids((await pipeline.run_async(given))["joiner"])
    assert len(found) >= 3
    assert question not in [text_of(name) for name in found]
    weaker = {name: {"query": "only4 amber"} for name in given}
    assert "d4" in ids((await pipeline.run_async(weaker))["joiner"])
    with turn(text_of("d4")):
        assert "d4" not in ids((await pipeline.run_async(weaker))["joiner"])


def test_an_agent_with_a_pipeline_as_its_tool_is_guarded_within_a_turn(leg):
    from haystack.components.agents import Agent
    from haystack.dataclasses import ChatMessage, ToolCall
    from haystack.tools import Tool

    @component
    class ScriptedGenerator:
        """Calls the tool with a weaker query, then finishes."""

        @component.output_types(replies=list[ChatMessage])
        def run(self, messages: list[ChatMessage], tools: list | None = None):
            called = any(message.tool_call_results for message in messages)
            call = [] if called else [ToolCall("search", {"query": "only4 amber"})]
            return {"replies": [ChatMessage.from_assistant("done" if called else None, tool_calls=call)]}

    def search(query: str) -> str:
        return " ".join(ids(leg.run(query=query)))

    leg.warm_up()
    schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    tool = Tool("search", "Searches.", schema, search)
    found = []
    for question in (None, text_of("d4")):
        agent = Agent(chat_generator=ScriptedGenerator(), tools=[tool])
        with turn(question) if question else nullcontext():
            messages = agent.run(messages=[ChatMessage.from_user(text_of("d4"))])["messages"]
        (result,) = [m.tool_call_result.result for m in messages if m.tool_call_results]
        found.append(result.split())
    assert "d4" in found[0] and "d4" not in found[1] and len(found[1]) == 3


def test_the_joiner_is_written_to_yaml_and_read_again(leg):
    pipeline = hybrid(leg, GuardedDocumentJoiner(leg))
    guarded_components = [
        "casemate.integrations.haystack",
        "casemate.integrations.haystack_fusion",
        "tests.unit.test_integrations_haystack",
    ]
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=guarded_components).get_component("joiner")
    assert again.to_dict() == pipeline.get_component("joiner").to_dict()


def test_a_retriever_without_embeddings_is_refused(leg):
    with pytest.raises(ConfigError, match="give an embedding retriever"):
        GuardedHaystackRetriever(InMemoryBM25Retriever(leg.retriever.document_store), Embedder())


def test_a_component_after_a_guarded_retriever_gets_only_allowed_documents(leg):
    pipeline = Pipeline()
    pipeline.add_component("dense", leg)
    pipeline.add_component("ranker", LostInTheMiddleRanker())
    pipeline.connect("dense.documents", "ranker.documents")
    assert unguarded_legs(pipeline) == []
    found = ids(pipeline.run({"dense": {"query": text_of("d4")}})["ranker"])
    assert len(found) == 3
    assert "d4" not in found


def test_the_document_store_itself_is_not_protected(leg):
    found = leg.retriever.run(query_embedding=Embedder().run(text_of("d4"))["embedding"])
    assert "d4" in ids(found)
    assert "other paths" in leg.protection_report.acts_not
