"""Turns in LangChain: rewritten queries, hybrid retrieval, compressors, chains and tools."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools.retriever import create_retriever_tool

from casemate.errors import ConfigError
from casemate.guard.turn import turn
from casemate.integrations.langchain import GuardedFusion, guarded, unguarded_legs
from casemate.types import Query
from tests.unit import test_integrations_langchain as wrappers
from tests.unit.test_integrations_langchain import ByWord, Listener, Model, filled, ids
from tests.wrapped import HARMLESS, config, mirabel, text_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RECORDS = 60


calibration = wrappers.calibration


@pytest.fixture
def store(calibration):
    """A guarded store without client state, so that only the turn connects queries."""
    defenses = [mirabel(calibration=calibration, session_hours=0)]
    made = guarded(filled(), config=config(defenses=defenses), fit=False)
    yield made
    made.protection.close()


def rewritten(question):
    """Three queries about one part of the question each, as a language model would write them."""
    words = question.split()
    third = -(-len(words) // 3)
    return [" ".join(words[i : i + third]) for i in range(0, len(words), third)]


class Rewriter(BaseRetriever):
    """A query rewriter without a language model: the union of the results."""

    retriever: BaseRetriever

    def _get_relevant_documents(self, query, *, run_manager):
        return list({d.id: d for q in rewritten(query) for d in self.retriever.invoke(q)}.values())


class Ensemble(BaseRetriever):
    retrievers: list[BaseRetriever]

    def _get_relevant_documents(self, query, *, run_manager):
        return list({d.id: d for r in self.retrievers for d in r.invoke(query)}.values())


class Parents(BaseRetriever):
    """Returns the parent record of each passage, from a separate store."""

    retriever: BaseRetriever
    docstore: dict[str, str]

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(f"the record of {d.id}", metadata={"of": d.id}) for d in self.retriever.invoke(query)]


class AddsUnknownDocument(Rewriter):
    """Adds a document that no guarded retriever returned."""

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document("from elsewhere"), *self.retriever.invoke(query)]


def multi_query(retriever):
    module = pytest.importorskip("langchain_classic.retrievers", reason="langchain-classic is not installed")
    return module.MultiQueryRetriever(
        retriever=retriever, llm_chain=RunnableLambda(lambda given: rewritten(given["question"]))
    )


def leaks(retriever):
    questions = {f"d{i}": text_of(f"d{i}") for i in range(RECORDS)}
    return {name for name, question in questions.items() if name in ids(retriever.invoke(question))}


@pytest.mark.parametrize("rewriter", [lambda leg: Rewriter(retriever=leg), multi_query], ids=["own", "MultiQuery"])
def test_rewritten_queries_leak_no_more_than_the_question(store, rewriter):
    leg = store.as_retriever(search_kwargs={"k": 3})
    direct, before = leaks(leg), leaks(rewriter(leg))
    assert len(before) > len(direct)
    assert leaks(guarded(rewriter(leg))) <= direct


async def test_rewritten_queries_asynchronously(store):
    leg = store.as_retriever(search_kwargs={"k": 3})
    retriever, names = guarded(Rewriter(retriever=leg)), [f"d{i}" for i in range(20)]
    found = await asyncio.gather(*(retriever.ainvoke(text_of(name)) for name in names))
    assert {name for name, documents in zip(names, found, strict=True) if name in ids(documents)} <= leaks(leg)


def test_benign_questions_get_the_same_documents_as_without_the_guard(store):
    bare = filled().as_retriever(search_kwargs={"k": 3})
    found = guarded(Rewriter(retriever=store.as_retriever(search_kwargs={"k": 3}))).invoke(HARMLESS)
    assert found == Rewriter(retriever=bare).invoke(HARMLESS)


def test_a_document_withheld_for_a_later_query_is_not_returned_for_an_earlier_one(store):
    class Later(Rewriter):
        def _get_relevant_documents(self, query, *, run_manager):
            return [*self.retriever.invoke("only4 amber"), *self.retriever.invoke(text_of("d4"))]

    leg = store.as_retriever(search_kwargs={"k": 3})
    assert "d4" in ids(Later(retriever=leg).invoke(HARMLESS))
    assert "d4" not in ids(guarded(Later(retriever=leg)).invoke(HARMLESS))


def test_a_hybrid_search_with_an_unguarded_leg_is_rejected_with_its_name(store):
    hybrid = Ensemble(retrievers=[store.as_retriever(), ByWord()])
    assert "d4" in ids(hybrid.invoke(text_of("d4")))
    assert unguarded_legs(hybrid) == ["Ensemble.retrievers[1]: ByWord"]
    with pytest.raises(ConfigError, match=r"Ensemble.retrievers\[1\]: ByWord"):
        guarded(hybrid)


def test_a_hybrid_search_is_guarded_in_every_leg_by_the_store(store):
    bare = Ensemble(retrievers=[store.unguarded.as_retriever(), ByWord()])
    hybrid = guarded(bare, store=store)
    assert isinstance(hybrid, GuardedFusion)
    assert unguarded_legs(hybrid) == []
    assert unguarded_legs(bare) == ["Ensemble.retrievers[0]: VectorStoreRetriever", "Ensemble.retrievers[1]: ByWord"]
    assert "d4" in ids(bare.invoke(text_of("d4")))
    assert "d4" not in ids(hybrid.invoke(text_of("d4")))
    assert set(ids(hybrid.invoke(HARMLESS))) == set(ids(bare.invoke(HARMLESS))) - {"web"}


def test_the_ensemble_of_langchain_with_bm25_is_guarded(store):
    module = pytest.importorskip("langchain_classic.retrievers", reason="langchain-classic is not installed")
    pytest.importorskip("rank_bm25", reason="rank-bm25 is not installed")
    community = pytest.importorskip("langchain_community.retrievers", reason="langchain-community is not installed")
    words = community.BM25Retriever.from_texts([h["text"] for h in store.unguarded.store.values()], k=3)
    hybrid = module.EnsembleRetriever(retrievers=[store.as_retriever(), words])
    assert text_of("d4") in [d.page_content for d in hybrid.invoke(text_of("d4"))]
    assert unguarded_legs(hybrid) == ["EnsembleRetriever.retrievers[1]: BM25Retriever"]
    found = guarded(hybrid, store=store)
    assert text_of("d4") not in [d.page_content for d in found.invoke(text_of("d4"))]
    assert len(found.invoke(HARMLESS)) >= 4


def test_a_compressor_of_rewritten_queries_returns_only_allowed_documents(store):
    module = pytest.importorskip("langchain_classic.retrievers", reason="langchain-classic is not installed")
    from langchain_core.documents import BaseDocumentCompressor

    class FirstWords(BaseDocumentCompressor):
        def compress_documents(self, documents, query, callbacks=None):
            return [Document(" ".join(d.page_content.split()[:5]), metadata=d.metadata) for d in documents]

    leg = store.as_retriever(search_kwargs={"k": 3})
    bare = module.ContextualCompressionRetriever(base_compressor=FirstWords(), base_retriever=Rewriter(retriever=leg))
    assert unguarded_legs(bare) == []
    assert any("only4" in d.page_content for d in bare.invoke(text_of("d4")))
    found = guarded(bare).invoke(text_of("d4"))
    assert found
    assert not any("only4" in d.page_content for d in found)


def test_parents_of_withheld_passages_are_withheld(store):
    leg = store.as_retriever(search_kwargs={"k": 3})
    bare = Rewriter(retriever=Parents(retriever=leg, docstore={}))
    assert any(d.metadata["of"] == "d4" for d in Parents(retriever=leg, docstore={}).invoke("only4 amber"))
    found = guarded(bare).invoke(text_of("d4"))
    assert not any(d.metadata["of"] == "d4" for d in found)
    assert guarded(Parents(retriever=leg, docstore={})).invoke(HARMLESS)


class LongParents(Parents):
    """Returns a long parent record for each passage."""

    def _get_relevant_documents(self, query, *, run_manager):
        found = [d.id for d in self.retriever.invoke(query)]
        return [Document(" ".join(f"{name}x{i}" for i in range(50))) for name in found]


@pytest.mark.parametrize("asked", ["invoke", "ainvoke"])
@pytest.mark.parametrize("around", [lambda leg: leg, lambda leg: Ensemble(retrievers=[leg])], ids=["alone", "ensemble"])
def test_the_budget_is_charged_for_parents_instead_of_their_passages(asked, around):
    children = guarded(filled(), config=config(defenses=[{"use": "crawl_limit", "budget": 200}]), fit=False)
    retriever = guarded(around(LongParents(retriever=children.as_retriever(search_kwargs={"k": 2}), docstore={})))
    words = set()
    for number in range(0, RECORDS, 2):
        found = getattr(retriever, asked)(f"only{number}")
        found = asyncio.run(found) if asked == "ainvoke" else found
        words.update(word for d in found for word in d.page_content.split())
    (limit,) = children.protection.guard.defenses
    children.protection.close()
    assert 150 <= len(words) <= limit.evidence.disclosed_words(Query("")) <= 200


def test_documents_that_no_guarded_leg_returned_are_dropped(store):
    found = guarded(AddsUnknownDocument(retriever=store.as_retriever())).invoke(HARMLESS)
    assert len(found) == 4
    assert "from elsewhere" not in [d.page_content for d in found]


def test_a_history_aware_chain_and_a_tool_are_guarded_within_a_turn(store):
    retriever = store.as_retriever(search_kwargs={"k": 3})
    question = text_of("d4")
    weaker = "only4 amber"
    chain = RunnablePassthrough() | RunnableLambda(lambda _: weaker) | retriever
    tool = create_retriever_tool(retriever, "search", "Searches.")
    assert "d4" in ids(chain.invoke(question))
    assert "only4" in tool.invoke({"query": weaker})
    with turn(question):
        assert "d4" not in ids(chain.invoke(question))
        assert "only4" not in tool.invoke({"query": weaker})
        assert "d4" not in ids(store.similarity_search(weaker, k=3))
        assert "d4" not in ids(store.similarity_search_by_vector(Model().embed_query(weaker), k=3))
        assert len(store.similarity_search(weaker, k=3)) == 3


async def test_a_turn_applies_in_tasks_and_threads(store):
    with turn(text_of("d4")):
        found = await asyncio.gather(
            store.asimilarity_search("only4 amber", k=3),
            asyncio.to_thread(store.similarity_search, "only4 amber", k=3),
        )
    assert all("d4" not in ids(f) for f in found)
    assert "d4" in ids(store.similarity_search("only4 amber", k=3))


def test_the_same_text_in_another_store_is_withheld_in_the_turn(store, calibration):
    defenses = [mirabel(calibration=calibration, session_hours=0)]
    other = guarded(filled(), config=config(defenses=defenses), fit=False)
    with turn(HARMLESS):
        store.similarity_search(text_of("d4"), k=3)
        assert "d4" not in ids(other.similarity_search("only4 amber", k=3))
    other.protection.close()


def test_a_turn_counts_as_one_question_in_the_evidence_about_a_client(calibration):
    words = text_of("d4").split()[:7]
    near = [" ".join([*words[i:], *words[:i]]) for i in range(4)]
    evidence = []
    for queries in (near[:1], near):
        made = guarded(filled(), config=config(defenses=[mirabel(calibration=calibration)]), fit=False)
        with turn(near[0]):
            assert all("d4" in ids(made.similarity_search(query, k=3)) for query in queries)
        withheld = made.protection.guard.defenses[0].withheld
        evidence.append(withheld.evidence("default", "anonymous", "d4"))
        made.protection.close()
    assert evidence[0] == evidence[1] > 1


def test_observe_mode_changes_no_result_in_a_turn(calibration):
    defenses = [mirabel(calibration=calibration, session_hours=0)]
    observed = guarded(filled(), config=config(defenses=defenses, mode="observe"), fit=False)
    with turn(text_of("d4")):
        assert "d4" in ids(observed.similarity_search("only4 amber", k=3))
    observed.protection.close()


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_retrievers_that_combine_others_return_everything_without_enforcement(calibration, mode):
    defenses = [mirabel(calibration=calibration, session_hours=0)]
    made = guarded(filled(), config=config(defenses=defenses, mode=mode), fit=False)
    leg, bare = (s.as_retriever(search_kwargs={"k": 3}) for s in (made, filled()))
    docstore = {name: text_of(name) for name in ("d4", "d5")}
    for question in (text_of("d4"), HARMLESS):
        assert guarded(Rewriter(retriever=leg)).invoke(question) == Rewriter(retriever=bare).invoke(question)
        parents = guarded(Parents(retriever=leg, docstore=docstore)).invoke(question)
        assert parents == Parents(retriever=bare, docstore=docstore).invoke(question)
    made.protection.close()


def test_legs_of_chains_and_tools_are_found(store):
    bare = filled()
    chain = RunnablePassthrough() | {"context": bare.as_retriever(), "question": RunnablePassthrough()}
    assert [line.rsplit(": ")[-1] for line in unguarded_legs(chain)] == ["VectorStoreRetriever"]
    assert unguarded_legs(RunnableLambda(lambda question: bare.similarity_search(question, k=2))) == [
        "RunnableLambda.func.bare: Store"
    ]
    tool = create_retriever_tool(bare.as_retriever(), "search", "Searches.")
    assert unguarded_legs(tool) == ["StructuredTool.func.retriever: VectorStoreRetriever"]
    assert unguarded_legs([create_retriever_tool(store.as_retriever(), "search", "Searches.")]) == []


def test_a_fusion_is_not_traced(store):
    listener = Listener()
    retriever = guarded(Rewriter(retriever=store.as_retriever(search_kwargs={"k": 3})))
    retriever.invoke(text_of("d4"), {"callbacks": [listener]})
    assert listener.logged
    assert "id='d4'" not in repr(listener.logged)


def test_the_limits_of_hybrid_search_and_of_several_queries_are_stated_at_wiring(calibration, caplog):
    with caplog.at_level("INFO", "casemate.integrations"):
        defenses = [mirabel(calibration=calibration, session_hours=0)]
        made = guarded(filled(), config=config(defenses=defenses), fit=False)
    logged = " ".join(record.getMessage() for record in caplog.records)
    for limit in ("hybrid search and rerankers: each document is judged by its vector", "each query is judged alone"):
        assert limit in logged and limit in str(made.protection_report)
    made.protection.close()


def test_keyword_hits_are_judged_by_their_vectors_and_reranking_restores_no_document(store):
    """The order of the reranker is kept, without withheld documents."""
    backwards = Ensemble(retrievers=[store.unguarded.as_retriever(search_kwargs={"k": 3}), ByWord()])

    class Reranked(Rewriter):
        def _get_relevant_documents(self, query, *, run_manager):
            return self.retriever.invoke(query)[::-1]

    bare = Reranked(retriever=backwards)
    found = ids(guarded(bare, store=store).invoke(text_of("d4")))
    assert "d4" in ids(bare.invoke(text_of("d4")))
    assert found and "d4" not in found
    harmless = ids(guarded(bare, store=store).invoke(HARMLESS))
    assert harmless == [name for name in ids(bare.invoke(HARMLESS)) if name in harmless]


def test_the_store_itself_is_not_protected(store):
    assert "d4" in ids(store.unguarded.similarity_search(text_of("d4")))
    assert "other paths" in store.protection_report.acts_not


# LangChain's own components


WEAKER = "only4 amber"
"""A rewritten query that retrieves d4, although the question itself does not receive it."""


def named_documents(retriever, question):
    return [d.metadata["of"] for d in retriever.invoke(question)]


def test_a_history_aware_retriever_is_guarded(store):
    chains = pytest.importorskip("langchain_classic.chains", reason="langchain-classic is not installed")
    from langchain_core.language_models import FakeListChatModel
    from langchain_core.prompts import ChatPromptTemplate

    def chain(retriever):
        model, prompt = FakeListChatModel(responses=[WEAKER]), ChatPromptTemplate.from_messages([("human", "{input}")])
        return chains.create_history_aware_retriever(model, retriever, prompt)

    asked = {"input": text_of("d4"), "chat_history": [("human", "hello")]}
    (unguarded,) = unguarded_legs(chain(filled().as_retriever()))
    assert unguarded.endswith("VectorStoreRetriever")
    guarded_chain = chain(store.as_retriever(search_kwargs={"k": 3}))
    assert unguarded_legs(guarded_chain) == []
    assert "d4" in ids(guarded_chain.invoke(asked))
    with turn(text_of("d4")):
        assert "d4" not in ids(guarded_chain.invoke(asked))


def test_a_parent_document_retriever_returns_only_allowed_parents(calibration):
    classic = pytest.importorskip("langchain_classic.retrievers", reason="langchain-classic is not installed")
    from langchain_classic.storage import InMemoryStore
    from langchain_text_splitters import CharacterTextSplitter

    bare = filled()
    for name, parent in bare.store.items():
        parent["metadata"]["doc_id"] = name
    parents = InMemoryStore()
    parents.mset([(name, Document(f"the record of {name}", metadata={"of": name})) for name in bare.store])
    defenses = [mirabel(calibration=calibration, session_hours=0)]
    children = guarded(bare, config=config(defenses=defenses), fit=False)

    def retriever(store):
        return classic.ParentDocumentRetriever(
            vectorstore=store, docstore=parents, child_splitter=CharacterTextSplitter(), search_kwargs={"k": 3}
        )

    assert unguarded_legs(retriever(bare)) == ["ParentDocumentRetriever.vectorstore: Store"]
    assert "d4" in named_documents(retriever(bare), text_of("d4"))
    found = guarded(Rewriter(retriever=retriever(children)))
    assert "d4" in named_documents(retriever(children), WEAKER)
    assert "d4" not in named_documents(found, text_of("d4"))
    assert len(named_documents(guarded(retriever(children)), HARMLESS)) == 3
    children.protection.close()


def test_a_self_query_retriever_is_guarded(store):
    classic = pytest.importorskip("langchain_classic.retrievers", reason="langchain-classic is not installed")
    from langchain_core.structured_query import StructuredQuery, Visitor

    class NoFilters(Visitor):
        def visit_structured_query(self, structured_query):
            return structured_query.query, {}

        visit_operation = visit_comparison = None

    def retriever(store):
        return classic.SelfQueryRetriever(
            vectorstore=store,
            query_constructor=RunnableLambda(lambda _: StructuredQuery(query=WEAKER, filter=None, limit=None)),
            structured_query_translator=NoFilters(),
            search_kwargs={"k": 3},
        )

    assert unguarded_legs(retriever(filled())) == ["SelfQueryRetriever.vectorstore: Store"]
    assert "d4" in ids(retriever(store).invoke(text_of("d4")))
    found = ids(guarded(retriever(store)).invoke(text_of("d4")))
    assert len(found) == 3 and "d4" not in found


@pytest.mark.slow
def test_hypothetical_document_embeddings_leak_no_more_than_the_question(store):
    hyde = pytest.importorskip("langchain_classic.chains.hyde.base", reason="langchain-classic is not installed")
    from langchain_core.prompts import PromptTemplate

    model = RunnableLambda(lambda prompt: rewritten(prompt.to_string())[0])
    bare = filled()
    bare.embedding = hyde.HypotheticalDocumentEmbedder(
        base_embeddings=Model(), llm_chain=PromptTemplate.from_template("{question}") | model
    )
    made = guarded(bare, config=config(defenses=[mirabel(session_hours=0)]))
    direct = leaks(store.as_retriever(search_kwargs={"k": 3}))
    assert len(leaks(bare.as_retriever(search_kwargs={"k": 3}))) > len(direct)
    assert leaks(made.as_retriever(search_kwargs={"k": 3})) <= direct
    made.protection.close()


async def test_an_agent_of_langgraph_is_guarded(store):
    graph = pytest.importorskip("langgraph.prebuilt", reason="langgraph is not installed")
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage

    class ScriptedModel(GenericFakeChatModel):
        """Calls the tool with the weaker query, then finishes."""

        def bind_tools(self, tools, **options):
            return self

    def agent(retriever):
        call = AIMessage("", tool_calls=[{"name": "search", "args": {"query": WEAKER}, "id": "1"}])
        model = ScriptedModel(messages=iter([call, AIMessage("done")]))
        return graph.create_react_agent(model, [create_retriever_tool(retriever, "search", "Searches.")])

    asked = {"messages": [("human", text_of("d4"))]}

    def read(state):
        (found,) = [m.content for m in state["messages"] if m.type == "tool"]
        return "only4" in found

    leg = store.as_retriever(search_kwargs={"k": 3})
    (unguarded,) = unguarded_legs(agent(filled().as_retriever()))
    assert unguarded.endswith("['search'].func.retriever: VectorStoreRetriever")
    assert unguarded_legs(agent(leg)) == []
    assert read(agent(leg).invoke(asked))
    with turn(text_of("d4")):
        assert not read(agent(leg).invoke(asked))
        assert not read(await agent(leg).ainvoke(asked))


def test_graph_nodes_that_call_a_store_are_found(store):
    graph = pytest.importorskip("langgraph.graph", reason="langgraph is not installed")

    def compiled(retriever):
        def find(state):
            return {"messages": [("ai", retriever.invoke(HARMLESS)[0].page_content)]}

        made = graph.StateGraph(graph.MessagesState)
        made.add_node("find", find)
        made.add_edge(graph.START, "find")
        return made.compile()

    assert unguarded_legs(compiled(store.as_retriever())) == []
    (unguarded,) = unguarded_legs(compiled(filled().as_retriever()))
    assert unguarded == "CompiledStateGraph.nodes['find'].func.retriever: VectorStoreRetriever"


MODULE_RETRIEVER = None


def find_by_global_name(question):
    return MODULE_RETRIEVER.invoke(question)[:1]


class Holder:
    def __init__(self, retriever):
        self.retriever = retriever

    def find(self, question):
        return self.retriever.invoke(question)


class MethodRunnable(RunnableLambda, Holder):
    """A runnable that calls its own method."""

    def __init__(self, retriever):
        RunnableLambda.__init__(self, self.find)
        Holder.__init__(self, retriever)


def test_retrievers_that_a_function_or_a_method_uses_are_found(store, monkeypatch):
    bare = filled().as_retriever()
    monkeypatch.setitem(globals(), "MODULE_RETRIEVER", bare)
    for part in (find_by_global_name, RunnableLambda(find_by_global_name), MethodRunnable(bare)):
        assert len(unguarded_legs(part)) == 1
    assert unguarded_legs(MethodRunnable(store.as_retriever())) == []
