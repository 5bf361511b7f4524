"""Turns in LlamaIndex: query fusion, hybrid retrieval and query engines."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.llms import ChatMessage, CompletionResponse, CustomLLM, LLMMetadata, MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import QueryEngineTool, RetrieverTool

from casemate.errors import ConfigError
from casemate.guard.turn import turn
from casemate.integrations.llamaindex import guarded, unguarded_legs
from tests.unit import test_integrations_llamaindex as wrappers
from tests.unit.test_integrations_llamaindex import filled, ids, node
from tests.wrapped import HARMLESS, config, corpus, mirabel, text_of

calibration = wrappers.calibration


@pytest.fixture(autouse=True)
def closed_event_loop():
    """Closes the event loop that LlamaIndex creates for synchronous calls and never closes.

    Otherwise the garbage collector would report it during a later test.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def leg(calibration):
    """A guarded retriever without client state, so that only the turn connects queries."""
    defenses = [mirabel(calibration=calibration, session_hours=0)]
    made = guarded(filled(), config=config(defenses=defenses), fit=False, similarity_top_k=3)
    yield made
    made.protection.close()


class ByWord(BaseRetriever):
    def _retrieve(self, query_bundle):
        words = set(query_bundle.query_str.split())
        found = sorted(corpus(), key=lambda d: -len(words.intersection(d.text.split())))
        return [NodeWithScore(node=node(d), score=1.0) for d in found[:4]]


class Fusion(QueryFusionRetriever):
    """LlamaIndex's own fusion, with fixed queries about parts of the question."""

    def _get_queries(self, original_query):
        words = original_query.split()
        third = -(-len(words) // 3)
        return [QueryBundle(" ".join(words[i : i + third])) for i in range(0, len(words), third)]

    async def _aget_queries(self, original_query):
        return self._get_queries(original_query)


def fusion(*legs, use_async=True):
    return Fusion(list(legs), llm=MockLLM(), num_queries=4, use_async=use_async, similarity_top_k=9)


def leaks(retriever):
    return {f"d{i}" for i in range(30) if f"d{i}" in ids(retriever.retrieve(text_of(f"d{i}")))}


@pytest.mark.parametrize("use_async", [False, True])
def test_query_fusion_leaks_no_more_than_the_question(leg, use_async):
    direct, before = leaks(leg), leaks(fusion(leg, use_async=use_async))
    assert len(before) > len(direct)
    assert leaks(guarded(fusion(leg, use_async=use_async))) <= direct


async def test_query_fusion_asynchronously(leg):
    found = await guarded(fusion(leg)).aretrieve(text_of("d4"))
    assert found
    assert "d4" not in ids(found)


def test_benign_questions_get_the_nodes_of_the_unguarded_fusion(leg):
    bare = filled().as_retriever(similarity_top_k=3)
    assert ids(guarded(fusion(leg)).retrieve(HARMLESS)) == ids(fusion(bare).retrieve(HARMLESS))


def test_a_fusion_returns_all_nodes_in_observe_mode(calibration):
    settings = config(defenses=[mirabel(calibration=calibration, session_hours=0)], mode="observe")
    observed = guarded(filled(), config=settings, fit=False, similarity_top_k=3)
    bare = filled().as_retriever(similarity_top_k=3)
    for question in (text_of("d4"), HARMLESS):
        assert ids(guarded(fusion(observed)).retrieve(question)) == ids(fusion(bare).retrieve(question))
    observed.protection.close()


def test_a_fusion_with_an_unguarded_leg_is_rejected_with_its_name(leg):
    hybrid = fusion(leg, ByWord())
    assert "d4" in ids(hybrid.retrieve(text_of("d4")))
    assert unguarded_legs(hybrid) == ["Fusion._retrievers[1]: ByWord"]
    with pytest.raises(ConfigError, match=r"Fusion._retrievers\[1\]: ByWord"):
        guarded(hybrid)
    whole = guarded(hybrid, judge=leg)
    assert "d4" not in ids(whole.retrieve(text_of("d4")))
    assert len(whole.retrieve(HARMLESS)) >= 3


def test_keyword_retrievers_are_judged(leg):
    with pytest.raises(ConfigError, match="judge=guarded"):
        guarded(ByWord())
    found = guarded(ByWord(), judge=leg)
    assert "d4" in ids(ByWord().retrieve(text_of("d4")))
    assert "d4" not in ids(found.retrieve(text_of("d4")))


def test_legs_of_engines_and_tools_are_found(leg):
    bare = RetrieverQueryEngine.from_args(ByWord(), llm=MockLLM())
    assert unguarded_legs(bare) == ["RetrieverQueryEngine._retriever: ByWord"]
    assert [line.rsplit(": ")[-1] for line in unguarded_legs([QueryEngineTool.from_defaults(bare)])] == ["ByWord"]
    judged = RetrieverQueryEngine.from_args(ByWord(), llm=MockLLM(), node_postprocessors=[leg.as_postprocessor()])
    assert unguarded_legs(judged) == []
    assert unguarded_legs(RetrieverQueryEngine.from_args(leg, llm=MockLLM())) == []


def test_other_engines_are_guarded_within_a_turn(leg):
    assert "d4" in ids(leg.retrieve("only4 amber"))
    with turn(text_of("d4")):
        assert "d4" not in ids(leg.retrieve("only4 amber"))


def test_a_hybrid_query_mode_is_refused():
    with pytest.raises(ConfigError, match="query mode 'hybrid'"):
        guarded(filled().as_retriever(vector_store_query_mode="hybrid"))


def test_the_index_itself_is_not_protected(leg):
    assert "d4" in ids(leg.unguarded.retrieve(text_of("d4")))
    assert "other paths" in leg.protection_report.acts_not


# LlamaIndex's own engines and agents


WEAKER = "only4 amber"
"""A rewritten query that retrieves d4, although the question itself does not receive it."""


class FixedSubQuestions(BaseQuestionGenerator):
    """Returns the weaker query as the only sub-question."""

    def generate(self, tools, query):
        return [SubQuestion(sub_question=WEAKER, tool_name=tools[0].name)]

    async def agenerate(self, tools, query):
        return self.generate(tools, query)

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass


class FirstTool(BaseSelector):
    """Always selects the first tool."""

    def _select(self, choices, query):
        return SelectorResult(selections=[SingleSelection(index=0, reason="the first")])

    async def _aselect(self, choices, query):
        return self._select(choices, query)

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass


class ScriptedModel(CustomLLM):
    """Condenses every question to the weaker query. As an agent, it first calls the tool with that query."""

    agent: bool = False
    asked: int = 0

    @property
    def metadata(self):
        return LLMMetadata()

    def complete(self, prompt, formatted=False, **options):
        self.asked += 1
        if not self.agent:
            return CompletionResponse(text=WEAKER)
        call = f'Thought: search.\nAction: docs\nAction Input: {{"input": "{WEAKER}"}}'
        return CompletionResponse(text=call if self.asked == 1 else "Thought: I can answer.\nAnswer: done")

    def stream_complete(self, prompt, formatted=False, **options):
        yield self.complete(prompt)


def engine(retriever):
    return RetrieverQueryEngine.from_args(retriever, llm=MockLLM())


def tool(retriever):
    return QueryEngineTool.from_defaults(engine(retriever), name="docs", description="All documents.")


def sources(response):
    return [n.node.node_id for n in response.source_nodes]


def memory():
    """A chat memory without the default database, which would stay open."""
    return ChatMemoryBuffer.from_defaults(llm=MockLLM())


def sub_questions(retriever, use_async):
    made = SubQuestionQueryEngine.from_defaults(
        [tool(retriever)], question_gen=FixedSubQuestions(), llm=MockLLM(), use_async=use_async, verbose=False
    )
    return made, lambda: sources(made.query(text_of("d4")))


def router(retriever, use_async):
    made = RouterQueryEngine(FirstTool(), [tool(retriever)], llm=MockLLM())
    return made, lambda: sources(asyncio.run(made.aquery(WEAKER)) if use_async else made.query(WEAKER))


def routed_retriever(retriever, use_async):
    made = RouterRetriever(FirstTool(), [RetrieverTool.from_defaults(retriever, description="All.")], llm=MockLLM())
    return made, lambda: ids(asyncio.run(made.aretrieve(WEAKER)) if use_async else made.retrieve(WEAKER))


def chat(kind, retrieved, llm):
    def make(retriever, use_async):
        made = kind.from_defaults(retrieved(retriever), llm=llm, memory=memory())

        def ask():
            given = text_of("d4"), [ChatMessage(role="user", content="hello")]
            return sources(asyncio.run(made.achat(*given)) if use_async else made.chat(*given))

        return made, ask

    return make


def agent(retriever, use_async):
    async def ask():
        made = ReActAgent(tools=[tool(retriever)], llm=ScriptedModel(agent=True), streaming=False)
        done = await made.run(user_msg=text_of("d4"), memory=memory())
        return [name for call in done.tool_calls for name in sources(call.tool_output.raw_output)]

    return ReActAgent(tools=[tool(retriever)], llm=ScriptedModel(agent=True)), lambda: asyncio.run(ask())


ENGINES = {
    "SubQuestionQueryEngine": sub_questions,
    "RouterQueryEngine": router,
    "RouterRetriever": routed_retriever,
    "ContextChatEngine": chat(ContextChatEngine, lambda r: r, MockLLM()),
    "CondensePlusContextChatEngine": chat(CondensePlusContextChatEngine, lambda r: r, ScriptedModel()),
    "CondenseQuestionChatEngine": chat(CondenseQuestionChatEngine, engine, ScriptedModel()),
    "ReActAgent": agent,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # deprecation warnings of LlamaIndex's agents
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_engines_and_agents_are_guarded_within_a_turn_and_their_legs_are_found(leg, make, use_async):
    made, ask = make(leg, use_async)
    bare, _ = make(filled().as_retriever(similarity_top_k=3), use_async)
    assert unguarded_legs(made) == []
    assert [line.rsplit(": ")[-1] for line in unguarded_legs(bare)] == ["VectorIndexRetriever"]
    if make is not ENGINES["ContextChatEngine"]:  # this engine retrieves by the question itself
        assert "d4" in ask(), "the rewritten query alone retrieves the document"
    with turn(text_of("d4")):
        found = ask()
    assert len(found) >= 3 and "d4" not in found


def test_a_router_of_retrievers_is_guarded_by_itself(leg):
    made, _ = routed_retriever(leg, False)
    assert "d4" not in ids(guarded(made).retrieve(text_of("d4")))
    bare, _ = routed_retriever(filled().as_retriever(), False)
    with pytest.raises(ConfigError, match="VectorIndexRetriever"):
        guarded(bare)
