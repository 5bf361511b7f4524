"""Each cell of the table of retrieval paths has a test."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = Path("docs/how-to/use-with-your-framework.md")
LANGCHAIN, LLAMAINDEX = "test_integrations_langchain", "test_integrations_llamaindex"
HAYSTACK = "test_integrations_haystack"
JUDGED = "question_with_a_copied_document_gets_top_k_other_nodes"
REPLACED = "postprocessor_judges_results_of_another_retriever_and_replaces_withheld_nodes"
STORES, LC, LI, HS = "test_real_stores", "test_turns_langchain", "test_turns_llamaindex", "test_turns_haystack"
TESTS = {
    ("vector search", "LangChain"): (LANGCHAIN, "question_with_a_copied_document_gets_k_other_documents"),
    ("vector search", "LlamaIndex"): (LLAMAINDEX, JUDGED),
    ("vector search", "Haystack"): (HAYSTACK, "question_with_a_copied_document_gets_top_k_other_documents"),
    ("with a filter", "LangChain"): (LANGCHAIN, "filters_apply_and_do_not_bypass_the_guard"),
    ("with a filter", "LlamaIndex"): (LLAMAINDEX, "filters_of_the_retriever_apply"),
    ("with a filter", "Haystack"): (HAYSTACK, "filters_top_k_scores_and_embeddings_of_the_retriever_apply"),
    ("keywords (BM25)", "LangChain"): (STORES, "keyword_documents_without_ids_of_the_store_are_judged_by_their_text"),
    ("keywords (BM25)", "LlamaIndex"): (LI, "keyword_retrievers_are_judged"),
    ("keywords (BM25)", "Haystack"): (HS, "the_guarded_joiner_judges_results_of_every_leg"),
    ("keywords alone, unguarded", "LangChain"): (LANGCHAIN, "retriever_without_a_store_is_refused"),
    ("keywords alone, unguarded", "LlamaIndex"): (LI, "keyword_retrievers_are_judged"),
    ("keywords alone, unguarded", "Haystack"): (HS, "a_retriever_without_embeddings_is_refused"),
    ("hybrid, every leg guarded", "LangChain"): (LC, "a_hybrid_search_is_guarded_in_every_leg_by_the_store"),
    ("hybrid, every leg guarded", "LlamaIndex"): (LI, "a_fusion_with_an_unguarded_leg_is_rejected_with_its_name"),
    ("hybrid, every leg guarded", "Haystack"): (HS, "the_guarded_joiner_judges_results_of_every_leg"),
    ("hybrid, one leg unguarded", "LangChain"): (LC, "a_hybrid_search_with_an_unguarded_leg_is_rejected_with_its_name"),
    ("hybrid, one leg unguarded", "LlamaIndex"): (LI, "a_fusion_with_an_unguarded_leg_is_rejected_with_its_name"),
    ("hybrid, one leg unguarded", "Haystack"): (HS, "an_unguarded_leg_of_a_hybrid_pipeline_is_reported"),
    ("hybrid mode of one store", "LangChain"): (STORES, "qdrant_in_hybrid_mode_is_rejected_with_advice"),
    ("hybrid mode of one store", "LlamaIndex"): (LI, "a_hybrid_query_mode_is_refused"),
    ("hybrid mode of one store", "Haystack"): (HS, "a_retriever_without_embeddings_is_refused"),
    ("rewritten queries", "LangChain"): (LC, "rewritten_queries_leak_no_more_than_the_question"),
    ("rewritten queries", "LlamaIndex"): (LI, "query_fusion_leaks_no_more_than_the_question"),
    ("rewritten queries", "Haystack"): (HS, "rewritten_queries_of_a_pipeline_are_one_turn"),
    ("compressors, rerankers", "LangChain"): (LC, "a_compressor_of_rewritten_queries_returns_only_allowed_documents"),
    ("compressors, rerankers", "LlamaIndex"): (LLAMAINDEX, REPLACED),
    ("compressors, rerankers", "Haystack"): (HS, "a_component_after_a_guarded_retriever_gets_only_allowed_documents"),
    ("agents, chat with history", "LangChain"): (LC, "a_history_aware_chain_and_a_tool_are_guarded_within_a_turn"),
    ("agents, chat with history", "LlamaIndex"): (LI, "other_engines_are_guarded_within_a_turn"),
    ("agents, chat with history", "Haystack"): (HS, "an_asynchronous_pipeline_runs_within_the_turn"),
    ("the store itself", "LangChain"): (LC, "the_store_itself_is_not_protected"),
    ("the store itself", "LlamaIndex"): (LI, "the_index_itself_is_not_protected"),
    ("the store itself", "Haystack"): (HS, "the_document_store_itself_is_not_protected"),
}  # fmt: skip
ENGINES = (LI, "engines_and_agents_are_guarded_within_a_turn_and_their_legs_are_found")
COMPONENTS = {
    "LangChain `MultiQueryRetriever`": (LC, "rewritten_queries_leak_no_more_than_the_question"),
    "LangChain `EnsembleRetriever` with `BM25Retriever`": (LC, "the_ensemble_of_langchain_with_bm25_is_guarded"),
    "LangChain `ContextualCompressionRetriever`": (
        LC,
        "a_compressor_of_rewritten_queries_returns_only_allowed_documents",
    ),
    "LangChain `ParentDocumentRetriever`": (LC, "a_parent_document_retriever_returns_only_allowed_parents"),
    "LangChain `SelfQueryRetriever`": (LC, "a_self_query_retriever_is_guarded"),
    "LangChain `HypotheticalDocumentEmbedder`": (
        LC,
        "hypothetical_document_embeddings_leak_no_more_than_the_question",
    ),
    "LangChain `create_history_aware_retriever`": (LC, "a_history_aware_retriever_is_guarded"),
    "LangGraph `create_react_agent`, `StateGraph`": (LC, "an_agent_of_langgraph_is_guarded"),
    "LlamaIndex `QueryFusionRetriever`": (LI, "query_fusion_leaks_no_more_than_the_question"),
    "LlamaIndex `RouterRetriever`": (LI, "a_router_of_retrievers_is_guarded_by_itself"),
    "LlamaIndex `SubQuestionQueryEngine`, `RouterQueryEngine`": ENGINES,
    "LlamaIndex `ContextChatEngine`, `CondenseQuestionChatEngine`, `CondensePlusContextChatEngine`": ENGINES,
    "LlamaIndex `ReActAgent`": ENGINES,
    "Haystack `DocumentJoiner`, hybrid": (HS, "an_asynchronous_hybrid_pipeline_is_guarded_in_every_leg"),
    "Haystack `Agent`": (HS, "an_agent_with_a_pipeline_as_its_tool_is_guarded_within_a_turn"),
}
STATES = ("guarded", "refused", "unprotected")


def table(heading):
    text = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]


def cells():
    rows = table("Retrieval paths")
    names = [name.strip() for name in rows[0][1:]]
    return {(row[0].strip(), n): cell.strip() for row in rows[2:] for n, cell in zip(names, row[1:], strict=True)}


def test_every_cell_has_a_state_and_a_test():
    assert cells().keys() == TESTS.keys()
    assert all(cell.startswith(STATES) for cell in cells().values())


def test_every_component_has_a_state_and_a_test():
    rows = {row[0].strip(): row[1].strip() for row in table("Components that were tested")[2:]}
    assert rows.keys() == COMPONENTS.keys()
    assert all(state.startswith(STATES) for state in rows.values())


@pytest.mark.parametrize("file", sorted({file for file, _ in TESTS.values()}))
def test_the_tests_exist(file):
    text = Path(f"tests/unit/{file}.py").read_text()
    missing = {
        name
        for other, name in [*TESTS.values(), *COMPONENTS.values()]
        if other == file and f"def test_{name}(" not in text
    }
    assert not missing
