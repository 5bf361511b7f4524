"""The LangChain wrapper: unchanged results, withheld documents, and every method that returns documents."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("langchain_core")

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from casemate.errors import CapabilityError, ConfigError, DataError, QueryError
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.file import read_calibrations, write_calibration
from casemate.guard.defenses.mirabel import Mirabel
from casemate.integrations import protection
from casemate.integrations.guarded_query import client_context
from casemate.integrations.langchain import GuardedVectorStore, GuardedVectorStoreRetriever, guarded
from casemate.maths.moments import CorpusMoments
from casemate.types import Query
from tests.wrapped import HARMLESS, MEMBERS, config, corpus, embedded, mirabel, text_of


class Model(Embeddings):
    def embed_documents(self, texts):
        return embedded(texts)

    def embed_query(self, text):
        return embedded([text])[0]


class Store(InMemoryVectorStore):
    """Defines a relevance function, which LangChain's in-memory store lacks."""

    def _select_relevance_score_fn(self):
        return lambda score: (1 + score) / 2


def filled(kind=Store, leave_out=()):
    store = kind(Model())
    store.add_documents(
        [Document(d.text, id=d.id, metadata={"n": int(d.id[1:])}) for d in corpus() if d.id not in leave_out]
    )
    return store


def ids(found):
    return [d.id for d in found]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    """The path of a calibration that is fitted once for all tests."""
    folder = tmp_path_factory.mktemp("fit")
    guarded(filled(), config=config(), path=folder).protection.close()
    return str(folder / "calibration.json")


@pytest.fixture
def wrap(calibration, tmp_path):
    """Guards stores with the fitted calibration, and closes them before ``tmp_path`` is removed."""
    made = []

    def wrapped(store=None, defenses=None, path=None, fit=False, **guard):
        settings = config(defenses=defenses or [mirabel(calibration=calibration)], **guard)
        made.append(guarded(store or filled(), config=settings, path=path, fit=fit))
        return made[-1]

    yield wrapped
    for store in made:
        store.protection.close()


class Listener(BaseCallbackHandler):
    """Records all events that a tracer receives."""

    def __init__(self):
        self.logged = []

    def on_retriever_start(self, serialized, query, **kwargs):
        self.logged.append((query, kwargs))

    def on_retriever_end(self, documents, **kwargs):
        self.logged.append((documents, kwargs))

    def on_chain_start(self, serialized, inputs, **kwargs):
        self.logged.append((inputs, kwargs))

    def on_chain_end(self, outputs, **kwargs):
        self.logged.append((outputs, kwargs))


def test_question_with_a_copied_document_gets_k_other_documents(wrap):
    bare, store = filled(), wrap()
    withheld = 0
    for i in range(40):
        question = f"Do you know this: {text_of(f'd{i}')}?"
        assert ids(bare.similarity_search(question, k=3))[0] == f"d{i}"
        found = ids(store.similarity_search(question, k=3, casemate_client=f"attacker {i}"))
        assert len(set(found)) == 3
        withheld += f"d{i}" not in found
    assert withheld >= 36


def test_harmless_question_gets_the_documents_order_and_scores_of_the_unguarded_store(wrap):
    bare, store = filled(), wrap()
    expected = bare.similarity_search_with_score(HARMLESS, k=5)
    found = store.similarity_search_with_score(HARMLESS, k=5)
    assert [d for d, _ in found] == [d for d, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected])
    assert store.similarity_search(HARMLESS, k=5) == [d for d, _ in expected]


def test_results_equal_those_of_a_store_without_the_withheld_document(wrap):
    for i in (7, 31, 77):
        question = f"Do you know this: {text_of(f'd{i}')}?"
        inside, outside = wrap(), wrap(filled(leave_out={f"d{i}"}))
        assert ids(inside.similarity_search(question, k=4)) == ids(outside.similarity_search(question, k=4))


def test_documents_callbacks_and_traces_contain_no_verdict(wrap):
    tracer, store = Listener(), wrap()
    chain = store.as_retriever(search_kwargs={"k": 3}) | RunnableLambda(lambda found: found)
    found = chain.invoke(text_of("d4"), {"callbacks": [tracer], "metadata": {"casemate_client": "eve"}})
    assert "d4" not in ids(found)
    assert all(set(d.metadata) == {"n"} for d in found)
    assert len(tracer.logged) >= 4
    assert "id='d4'" not in repr(tracer.logged)
    for word in ("mirabel", "verdict", "threshold", "withheld", "flagged", "calibrat"):
        assert word not in repr(tracer.logged).lower().replace("casemate_client", "")


@pytest.mark.parametrize("where", ["metadata", "configurable"])
def test_client_and_tenant_come_from_the_config_of_the_run(wrap, where):
    store = wrap()
    retriever = store.as_retriever(search_kwargs={"k": 3})
    retriever.invoke(text_of("d4"), {where: {"casemate_client": "eve"}})
    near = "only4 amber"  # not flagged without an earlier question
    assert "d4" in ids(retriever.invoke(near, {where: {"casemate_client": "bob"}}))
    assert "d4" not in ids(retriever.invoke(near, {where: {"casemate_client": "eve"}}))
    assert "d4" in ids(retriever.invoke(near, {where: {"casemate_client": "eve", "casemate_tenant": "another"}}))


def test_functions_in_a_chain_use_the_client_of_the_run(wrap):
    store = wrap()
    chain = RunnableLambda(lambda question: store.similarity_search(question, k=3))
    chain.invoke(text_of("d4"), {"configurable": {"casemate_client": "eve"}})
    with client_context("eve"):
        assert ids(store.get_by_ids(["d4", "d5"])) == ["d5"]
    with client_context("bob"):
        assert ids(store.get_by_ids(["d4", "d5"])) == ["d4", "d5"]


def test_client_that_is_not_a_string_is_refused(wrap):
    with pytest.raises(ConfigError, match="casemate_client is a list"):
        wrap().similarity_search(HARMLESS, casemate_client=["eve"])


async def test_asynchronous_methods_withhold_documents(wrap):
    store = wrap()
    retriever = store.as_retriever(search_kwargs={"k": 3})
    found = await asyncio.gather(*(retriever.ainvoke(text_of(f"d{i}")) for i in range(8)))
    assert all(len(f) == 3 for f in found)
    assert sum(f"d{i}" in ids(f) for i, f in enumerate(found)) <= 2
    config_of_eve = {"metadata": {"casemate_client": "eve"}}
    assert "d9" not in ids(await retriever.ainvoke(text_of("d9"), config_of_eve))
    with client_context("eve"):
        assert await store.aget_by_ids(["d9"]) == []
    assert len(await store.asimilarity_search_by_vector(embedded([HARMLESS])[0], k=3)) == 3
    assert len(await store.amax_marginal_relevance_search(HARMLESS, k=3)) == 3
    assert len(await store.asimilarity_search_with_score(HARMLESS, k=3)) == 3


async def test_synchronous_calls_work_in_a_running_event_loop(wrap):
    store = wrap()
    with client_context("eve"):
        assert "d4" not in ids(store.similarity_search(text_of("d4"), k=3))
        assert store.get_by_ids(["d4"]) == []


def test_concurrent_threads_get_guarded_results(wrap):
    retriever = wrap().as_retriever(search_kwargs={"k": 3})
    found = retriever.batch([text_of(f"d{i}") for i in range(24)], {"max_concurrency": 8})
    assert all(len(f) == 3 for f in found)
    assert sum(f"d{i}" in ids(f) for i, f in enumerate(found)) <= 4


def test_filters_apply_and_do_not_bypass_the_guard(wrap):
    store = wrap()

    def even(document):
        return document.metadata["n"] % 2 == 0

    found = store.similarity_search(HARMLESS, k=5, filter=even)
    assert found == filled().similarity_search(HARMLESS, k=5, filter=even)
    withheld = 0
    for i in range(0, 40, 2):
        found = store.similarity_search(text_of(f"d{i}"), k=3, filter=even, casemate_client=f"eve {i}")
        assert len(found) == 3
        assert all(map(even, found))
        withheld += f"d{i}" not in ids(found)
    assert withheld >= 18
    alone = store.similarity_search(text_of("d8"), k=3, filter=lambda d: d.id == "d8", casemate_client="mallory")
    assert alone == []


def test_filtered_search_returns_k_documents_with_the_scores_of_the_store(wrap, calibration):
    """The session memory is off, so only the search of the whole collection may withhold a document."""
    store = wrap(defenses=[mirabel(calibration=calibration, session_hours=0)])

    def few(document):
        return document.metadata["n"] < 20

    for i in range(20):
        question = f"Do you know this: {text_of(f'd{i}')}?"
        scores = {d.id: s for d, s in store.unguarded.similarity_search_with_score(question, k=20, filter=few)}
        for k in (1, 5):
            found = store.similarity_search_with_score(question, k=k, filter=few)
            assert len(found) == k
            assert all(s == scores[d.id] for d, s in found)


def test_score_uses_neighbors_outside_the_filter(calibration, tmp_path):
    found = read_calibrations(Path(calibration))["default"]
    zero, one = (0.0,) * len(FEATURES), (1.0,) * len(FEATURES)
    spacing = tuple(float(name == "spacing") for name in FEATURES)  # a feature that needs neighbors
    law = tuple(i / 40 for i in range(40))
    write_calibration(
        tmp_path / "c.json",
        "default",
        replace(found, weights=spacing, centre=zero, scale=one, benign=law, doubt=math.inf, jitter=0.0),
    )
    defenses = [mirabel(calibration=str(tmp_path / "c.json"), session_hours=0)]
    store = guarded(filled(), config=config(defenses=defenses), fit=False)

    def some(document):
        return document.id in {"d8", "d9"}

    assert ids(store.unguarded.similarity_search(text_of("d8"), k=2, filter=some)) == ["d8", "d9"]
    assert ids(store.similarity_search(text_of("d8"), k=2, filter=some)) == ["d9"]
    assert ids(store.similarity_search(HARMLESS, k=2, filter=some))
    store.protection.close()


def test_mmr_selects_from_documents_that_are_not_withheld(wrap):
    bare, store = filled(), wrap()
    assert store.max_marginal_relevance_search(HARMLESS, k=4) == bare.max_marginal_relevance_search(HARMLESS, k=4)
    retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 3, "fetch_k": 12})
    found = retriever.invoke(text_of("d4"))
    assert len(found) == 3
    assert "d4" not in ids(found)


def test_search_by_vector_is_judged_without_question_text(wrap):
    bare, store = filled(), wrap()
    vector = embedded([text_of("d4")])[0]
    assert ids(bare.similarity_search_by_vector(vector, k=3))[0] == "d4"
    assert "d4" not in ids(store.similarity_search_by_vector(vector, k=3))
    assert "d4" not in ids(store.max_marginal_relevance_search_by_vector(vector, k=3))
    store.similarity_search(text_of("d4"), k=3, casemate_client="eve")
    weak = embedded(["only4 amber"])[0]
    assert "d4" in ids(bare.similarity_search_by_vector(weak, k=3))
    assert "d4" not in ids(store.similarity_search_by_vector(weak, k=3, casemate_client="eve"))


def test_score_threshold_uses_the_relevance_scores_of_the_store(wrap):
    bare, store = filled(), wrap()
    kwargs = {"search_type": "similarity_score_threshold", "search_kwargs": {"k": 5, "score_threshold": 0.8}}
    assert store.as_retriever(**kwargs).invoke(HARMLESS) == bare.as_retriever(**kwargs).invoke(HARMLESS)
    assert "d4" in ids(bare.as_retriever(**kwargs).invoke(text_of("d4")))
    assert "d4" not in ids(store.as_retriever(**kwargs).invoke(text_of("d4")))


def test_retriever_has_the_tags_of_the_unguarded_retriever(wrap):
    assert wrap().as_retriever().tags == filled().as_retriever().tags


def test_modes_observe_and_off_do_not_change_results(wrap):
    bare = filled()
    for mode in ("observe", "off"):
        store = wrap(mode=mode)
        for question in (HARMLESS, text_of("d4")):
            assert store.similarity_search(question, k=3) == bare.similarity_search(question, k=3)
        assert ids(store.get_by_ids(["d4"])) == ["d4"]


def test_failing_defense_withholds_all_documents_unless_on_error_is_open(wrap, monkeypatch):
    store, open_ = wrap(), wrap(on_error="open")

    async def broken(self, query, retrieval):
        raise RuntimeError("broken")

    monkeypatch.setattr(Mirabel, "on_retrieve", broken)
    assert store.similarity_search(HARMLESS, k=3) == []
    assert store.as_retriever().invoke(HARMLESS) == []
    assert len(open_.similarity_search(HARMLESS, k=3)) == 3


def test_without_calibration_no_document_is_returned_and_the_reason_is_reported():
    store = guarded(filled(), fit=False)
    assert "no calibration" in store.protection.due
    assert store.similarity_search(HARMLESS) == []
    store.protection.close()


def test_invalid_questions_are_refused(wrap):
    with pytest.raises(QueryError, match="NUL"):
        wrap().similarity_search("a\0b")
    with pytest.raises(QueryError, match="k is 0"):
        wrap().similarity_search(HARMLESS, k=0)


def test_protection_report_lists_what_is_not_protected(wrap, caplog):
    with caplog.at_level(logging.INFO, "casemate.integrations"):
        store = wrap(defenses=["similarity_floor", "summarize"])
    assert store.protection_report.acts == ("similarity_floor",)
    assert "generator" in store.protection_report.acts_not["summarize"]
    assert "the framework owns the model" in store.protection_report.acts_not["the answer"]
    assert "summarize" in caplog.text


def test_too_few_benign_questions_for_the_significance_level_cause_a_warning(wrap, caplog, monkeypatch):
    store = wrap()
    (present,) = store.protection.guard.defenses
    made = present.ready("default", len(corpus()))

    async def fit(*_):
        return {"mirabel": replace(made, benign=made.benign[:5])}

    monkeypatch.setattr(protection, "calibrate_guard", fit)
    with caplog.at_level(logging.WARNING, "casemate.integrations"):
        store.protection.calibrate()
    assert "5 benign questions are too few for mirabel.significance 0.1, which needs 9" in caplog.text


def test_unguarded_store_is_accessible_only_as_unguarded(wrap):
    store = wrap()
    with pytest.raises(AttributeError, match="unguarded"):
        _ = store.store
    assert isinstance(store.unguarded, Store)


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="no option 'mode' here; allowed: config, path, fit, source"):
        guarded(filled(), mode="observe")
    with pytest.raises(ConfigError, match="no option 'mode'"):
        guarded(filled().as_retriever(), mode="observe")


def test_guarding_is_idempotent(wrap):
    store = wrap()
    assert guarded(store) is store
    retriever = store.as_retriever()
    assert guarded(retriever) is retriever
    with pytest.raises(ConfigError, match="not guarded"):
        GuardedVectorStoreRetriever(vectorstore=filled())
    with pytest.raises(
        ConfigError, match="the GuardedVectorStore is already guarded and keeps its options; remove fit"
    ):
        guarded(store, fit=False)


def test_first_question_without_a_client_causes_one_warning(wrap, caplog):
    """All such questions share one client, its budgets and its withheld documents."""
    store, off = wrap(), wrap(mode="off")
    with client_context("eve"):
        store.similarity_search(HARMLESS)
    store.similarity_search(HARMLESS, casemate_client="eve")
    store.as_retriever().invoke(HARMLESS, {"metadata": {"casemate_client": "eve"}})
    off.similarity_search(HARMLESS)
    assert not [message for message in caplog.messages if "names no client" in message]
    for _ in range(2):
        store.as_retriever().invoke(HARMLESS)
        asyncio.run(store.asimilarity_search(HARMLESS))
    (warning,) = [r for r in caplog.records if "names no client" in r.getMessage()]
    assert warning.levelno == logging.WARNING and "they share every budget" in warning.getMessage()


def test_guarded_retriever_keeps_search_type_and_tags(calibration):
    inner = filled().as_retriever(search_type="mmr", search_kwargs={"k": 2, "fetch_k": 9}, tags=["mine"])
    defenses = [mirabel(calibration=calibration)]
    retriever = guarded(inner, config=config(defenses=defenses), fit=False)
    assert (retriever.search_type, retriever.tags) == ("mmr", ["mine"])
    assert len(retriever.invoke(HARMLESS)) == 2
    assert "d4" not in ids(retriever.invoke(text_of("d4")))
    retriever.vectorstore.protection.close()


class ByWord(BaseRetriever):
    """A retriever without a vector store: returns documents that share two words, and one unknown document."""

    def _get_relevant_documents(self, query, *, run_manager):
        words = query.replace("?", "").split()
        hits = [Document(d.text, id=d.id) for d in corpus() if sum(w in d.text.split() for w in words) >= 2]
        return [Document("from elsewhere", id="web"), *hits[:6]]


def test_results_of_another_retriever_are_judged_and_unknown_documents_dropped(wrap, caplog):
    store = wrap()
    retriever = guarded(ByWord(), store=store)
    plain = [i for i in ids(ByWord().invoke("amber birch")) if i != "web"]
    assert ids(retriever.invoke("amber birch")) == plain
    assert "1 documents are not in it" in caplog.text
    bare, found = ByWord().invoke(text_of("d4")), retriever.invoke(text_of("d4"))
    assert "d4" in ids(bare)
    assert "d4" not in ids(found)
    assert len(found) == len(bare) - 1  # the unknown document is dropped, the withheld one replaced


async def test_results_of_another_retriever_are_not_traced_before_judgment(wrap):
    tracer = Listener()
    retriever = guarded(ByWord(), store=wrap())
    found = await retriever.ainvoke(text_of("d4"), {"callbacks": [tracer]})
    assert found
    assert "id='d4'" not in repr(tracer.logged)


def test_retriever_without_a_store_is_refused():
    with pytest.raises(ConfigError, match="give store="):
        guarded(ByWord())


def moments_of(store):
    vectors = np.array(
        [held["vector"] for held in getattr(store.unguarded, "within", getattr(store.unguarded, "store", {})).values()],
        np.float64,
    )
    return CorpusMoments.of((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))


def same(a, b):
    return a.n == b.n and np.allclose(a.mean, b.mean, atol=1e-7) and np.allclose(a.scatter, b.scatter, atol=1e-5)


def test_added_replaced_and_deleted_documents_update_the_moments_at_once(wrap):
    store, rng = wrap(), np.random.default_rng(5)
    for step in range(12):
        some = [f"d{i}" for i in rng.choice(MEMBERS + 20, 5, replace=False)]
        if step % 3 == 2:
            store.delete(some)
        else:
            new = [Document(f"only{step} amber {name} {rng.integers(99)}", id=name) for name in some]
            assert store.add_documents(new) == some
        assert same(store.protection.index.moments(), moments_of(store))
    assert len(store.add_texts(["one more", "and another"], [{"n": 1}, {"n": 2}])) == 2
    assert same(store.protection.index.moments(), moments_of(store))


async def test_concurrent_writes_are_serialized(wrap, tmp_path):
    store = wrap(path=tmp_path)
    some = [[Document(f"only{i} amber {j}", id=f"n{i}.{j}") for j in range(3)] for i in range(6)]
    await asyncio.gather(*(store.aadd_documents(documents) for documents in some))
    await asyncio.gather(store.adelete(["n1.0"]), store.adelete(["n2.0"]))
    assert store.protection.index.moments().n == MEMBERS + 16
    assert same(store.protection.index.moments(), moments_of(store))


class PartialWriteStore(Store):
    """Writes the first document, then fails."""

    failing = False

    def add_documents(self, documents, ids=None, **kwargs):
        if self.failing:
            super().add_documents(documents[:1], ids=ids[:1], **kwargs)
            raise OSError("disk full")
        return super().add_documents(documents, ids=ids, **kwargs)


def test_moments_are_correct_after_a_partial_write(wrap):
    store = wrap(filled(PartialWriteStore))
    store.unguarded.failing = True
    with pytest.raises(OSError, match="disk full"):
        store.add_documents([Document("one", id="n1"), Document("two", id="n2")])
    assert same(store.protection.index.moments(), moments_of(store))
    assert store.protection.index.moments().n == MEMBERS + 1


def test_search_fails_until_sync_after_many_unseen_writes(wrap):
    store = wrap()
    store.unguarded.add_documents([Document(f"new{i} amber", id=f"n{i}") for i in range(20)])
    with pytest.raises(DataError, match=r"170 rows, 150 when it was read last: .*; call sync\(\) of the wrapper$"):
        store.similarity_search(HARMLESS)
    store.sync()
    assert same(store.protection.index.moments(), moments_of(store))
    assert len(store.similarity_search(HARMLESS, k=3)) == 3


def test_growth_beyond_the_calibration_is_logged_and_calibrate_restores_results(caplog):
    store = guarded(filled(), config=config(), fit=False)
    store.calibrate()
    store.add_documents([Document(f"fresh{i} amber delta grove", id=f"n{i}") for i in range(60)])
    assert "until calibrate() is called" in caplog.text
    assert store.similarity_search(HARMLESS) == []
    store.calibrate()
    assert len(store.similarity_search(HARMLESS)) == 4
    store.protection.close()


def test_empty_store_is_calibrated_before_the_first_question_after_documents_are_added(caplog):
    store = guarded(Store(Model()), config=config())
    assert "0 documents are too few to judge" in caplog.text
    assert "too few" in store.protection_report.acts_not["calibration"]
    assert store.similarity_search(HARMLESS) == []
    stored = filled().store.values()
    texts = [Document(h["text"], id=h["id"], metadata=h["metadata"]) for h in stored]
    store.add_documents(texts[:100])
    assert "before the next question" in caplog.text
    assert "no calibration" in store.protection_report.acts_not["calibration"]
    assert len(store.similarity_search(HARMLESS, k=3)) == 3
    assert "calibration" not in store.protection_report.acts_not
    assert sum(f"d{i}" in ids(store.similarity_search(text_of(f"d{i}"), k=3)) for i in range(20)) <= 2
    store.add_documents(texts[100:])  # 50 % more
    assert len(store.similarity_search(HARMLESS, k=3)) == 3
    assert "d120" not in ids(store.similarity_search(text_of("d120"), k=3))
    store.protection.close()


async def test_concurrent_questions_wait_for_the_calibration_of_an_empty_store(caplog):
    store = guarded(Store(Model()), config=config())
    store.add_texts([d.text for d in corpus()])
    found = await asyncio.gather(*(store.asimilarity_search(HARMLESS, k=3) for _ in range(4)))
    assert [len(f) for f in found] == [3] * 4
    assert caplog.text.count("before the next question, which waits for it") == 1
    store.protection.close()


def test_empty_store_without_automatic_fit_returns_no_document_until_calibrate(caplog):
    store = guarded(Store(Model()), config=config(), fit=False)
    store.add_texts([d.text for d in corpus()])
    assert "until calibrate() is called" in caplog.text
    assert store.similarity_search(HARMLESS) == []
    store.calibrate()
    assert len(store.similarity_search(HARMLESS)) == 4
    store.protection.close()


def test_calibration_and_withheld_documents_persist_in_the_folder(tmp_path):
    inner = filled()
    first = guarded(inner, config=config(), path=tmp_path)
    first.similarity_search(text_of("d4"), casemate_client="eve")
    first.protection.close()
    again = guarded(inner, config=config(), path=tmp_path, fit=False)
    assert again.protection.due == ""
    with client_context("eve"):
        assert again.get_by_ids(["d4"]) == []
    verdicts = again.protection.events.scan("verdict")
    assert {e.body["client"] for e in verdicts} == {"eve"}
    again.protection.close()


def test_search_by_vector_omits_documents_withheld_by_another_process(wrap, tmp_path):
    inner = filled()
    here, there = (wrap(inner, path=tmp_path) for _ in range(2))
    weak = embedded(["only4 amber"])[0]
    assert "d4" in ids(here.similarity_search_by_vector(weak, k=3, casemate_client="eve"))
    there.similarity_search(text_of("d4"), k=3, casemate_client="eve")
    assert there.protection.events.flush()
    assert "d4" not in ids(here.similarity_search_by_vector(weak, k=3, casemate_client="eve"))


def test_moments_are_recomputed_after_a_process_died_during_a_write(tmp_path, wrap):
    inner = filled()
    first = wrap(inner, path=tmp_path)
    first.protection.index._note("somebody")
    inner.store["d1"]["vector"] = embedded(["another text"])[0]
    first.protection.close()
    again = wrap(inner, path=tmp_path)
    assert same(again.protection.index.moments(), moments_of(again))


def test_guarding_with_calibration_logs_no_warning(caplog):
    guarded(filled(), config=config()).protection.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_calibration_reports_progress_in_the_log_or_on_stderr(caplog, capsys, monkeypatch):
    monkeypatch.setattr(protection, "PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, "casemate.integrations"):
        guarded(filled(), config=config()).protection.close()
    begun = next(i for i, r in enumerate(caplog.messages) if "calibrating the guard on generated questions" in r)
    assert re.search(r"calibrating, [\d,]+ questions after \d+ s", "\n".join(caplog.messages[begun:]))
    assert any("calibrated mirabel on" in r for r in caplog.messages[begun:])
    assert "calibrating" not in capsys.readouterr().err
    monkeypatch.setattr(protection.log, "hasHandlers", lambda: False)
    guarded(filled(), config=config(), path=None).protection.close()
    assert "calibrating the guard on generated questions" in capsys.readouterr().err


def test_from_texts_creates_a_guarded_store_in_memory():
    store = GuardedVectorStore.from_texts(["one", "two"], Model(), [{"n": 1}, {"n": 2}], ids=["a", "b"])
    assert ids(store.similarity_search("one", k=1)) == ["a"]
    store.protection.close()


class Opaque(VectorStore):
    """A custom store that returns distances and cannot list its documents."""

    def __init__(self, embedding):
        self.within = {}
        self.inside = InMemoryVectorStore(embedding)
        self.within = self.inside.store

    @property
    def embeddings(self):
        return self.inside.embeddings

    @classmethod
    def from_texts(cls, *args, **kwargs):
        raise NotImplementedError

    def add_documents(self, documents, **kwargs):
        return self.inside.add_documents(documents, **kwargs)

    def delete(self, ids=None, **kwargs):
        return self.inside.delete(ids)

    def get_by_ids(self, ids, /):
        return self.inside.get_by_ids(ids)

    def similarity_search_with_score_by_vector(self, embedding, k=4, **kwargs):
        found = self.inside.similarity_search_with_score_by_vector(embedding, k, **kwargs)
        return [(d, 1 - s) for d, s in found]

    def similarity_search_with_score(self, query, k=4, **kwargs):
        return self.similarity_search_with_score_by_vector(self.embeddings.embed_query(query), k, **kwargs)

    def similarity_search(self, query, k=4, **kwargs):
        return [d for d, _ in self.similarity_search_with_score(query, k, **kwargs)]


class FaissLike(Opaque):
    """Has the interface of FAISS: positions, and vectors by position."""

    def __init__(self, embedding):
        super().__init__(embedding)
        self.index = self.docstore = self

    @property
    def index_to_docstore_id(self):
        return dict(enumerate(self.within))

    def reconstruct(self, position):
        return np.array(list(self.within.values())[position]["vector"], np.float32)

    def search(self, name, *args, **kwargs):
        return self.get_by_ids([name])[0]


class ChromaLike(Opaque):
    """Has the interface of Chroma: pages of all entries."""

    @property
    def _collection(self):
        return self

    def count(self):
        return len(self.within)

    def get(self, ids=None, limit=None, offset=0, include=()):
        held = [h for h in self.within.values() if ids is None or h["id"] in ids]
        held = held[offset : None if limit is None else offset + limit]
        return {
            "ids": [h["id"] for h in held],
            "documents": [h["text"] for h in held],
            "metadatas": [h["metadata"] for h in held],
            "embeddings": np.array([h["vector"] for h in held]).reshape(len(held), 64),
        }


@pytest.mark.parametrize("kind", [FaissLike, ChromaLike])
def test_stores_with_the_interfaces_of_faiss_and_chroma_are_guarded(wrap, kind):
    store = wrap(filled(kind))
    assert type(store.protection.store).__name__ == f"_{kind.__name__.removesuffix('Like')}"
    assert "d4" not in ids(store.similarity_search(text_of("d4"), k=3))
    bare = store.unguarded.similarity_search_with_score(HARMLESS, k=3)
    assert [(d.id, pytest.approx(s)) for d, s in store.similarity_search_with_score(HARMLESS, k=3)] == [
        (d.id, s) for d, s in bare
    ]
    store.delete(["d1", "d2"])
    store.add_documents([Document("one more", id="d2")])
    assert same(store.protection.index.moments(), moments_of(store))
    assert len(store.max_marginal_relevance_search(HARMLESS, k=3)) == 3


def test_store_that_cannot_be_listed_requires_vectors_and_cosine(calibration):
    inner = Opaque(Model())
    inner.add_documents([Document(d.text, id=d.id) for d in corpus()])
    with pytest.raises(ConfigError, match="give vectors="):
        guarded(inner)
    with pytest.raises(CapabilityError, match="cannot be read through"):
        guarded(inner, cosine=lambda distance: 1 - distance)

    def rows():
        return [(inner.get_by_ids([name])[0], inner.within[name]["vector"]) for name in inner.within]

    defenses = [mirabel(calibration=calibration)]
    store = guarded(
        inner, vectors=rows, cosine=lambda distance: 1 - distance, config=config(defenses=defenses), fit=False
    )
    assert "d4" not in ids(store.similarity_search(text_of("d4"), k=3))
    bare = inner.similarity_search_with_score(HARMLESS, k=3)
    found = store.similarity_search_with_score(HARMLESS, k=3)
    assert [(d.id, pytest.approx(s)) for d, s in found] == [(d.id, s) for d, s in bare]
    assert math.isclose(bare[0][1], 1 - filled().similarity_search_with_score(HARMLESS, k=1)[0][1])
    store.protection.close()


class Remote(VectorStore):
    """A store of LangChain whose documents are on a server; it returns no vectors."""

    def __init__(self, collection, embeddings):
        self.collection, self._embeddings = collection, embeddings

    @property
    def embeddings(self):
        return self._embeddings

    def similarity_search(self, query, k=4, **kwargs):
        return self.similarity_search_by_vector(self._embeddings.embed_query(query), k)

    def similarity_search_by_vector(self, embedding, k=4, **kwargs):
        found = self.collection.search(np.array(embedding, np.float32), k)
        return [Document(h.document.text, id=h.document.id, metadata=h.document.metadata["metadata"]) for h in found]

    @classmethod
    def from_texts(cls, *args, **kwargs):
        raise NotImplementedError


def test_store_on_a_server_uses_the_vectors_of_an_attached_collection(calibration):
    from casemate.backends.collections.elasticsearch_index import ElasticsearchIndex
    from casemate.types import Secret
    from tests.store_servers import Elasticsearch, serving

    held = [
        (d.id, Model().embed_query(d.text), {"text": d.text, "metadata": {"source": f"of {d.id}"}}) for d in corpus()
    ]
    server = Elasticsearch(held)
    server.field = {**server.field, "dims": len(held[0][1])}
    with serving(server) as url:

        def collection():
            return ElasticsearchIndex(Secret(url), "docs", source="metadata.source")

        remote_collection = collection()
        remote_collection.open()
        inner = Remote(remote_collection, Model())
        with pytest.raises(ConfigError, match="give collection="):
            guarded(inner)
        with pytest.raises(ConfigError, match="remove vectors= and cosine="):
            guarded(inner, collection=collection(), cosine=lambda s: s)
        defenses = [mirabel(calibration=calibration)]
        store = guarded(inner, collection=collection(), config=config(defenses=defenses), fit=False)
        assert store.protection.index.moments().n == len(held)
        assert store.similarity_search(HARMLESS, k=3) == inner.similarity_search(HARMLESS, k=3)
        assert ids(inner.similarity_search(text_of("d4"), k=3))[0] == "d4"
        found = store.similarity_search(text_of("d4"), k=3)
        assert len(found) == 3 and "d4" not in ids(found)
        assert store.protection.sources(["d5"]) == {"d5": "of d5"}
        store.protection.close()
        server.field = {**server.field, "dims": 3}
        with pytest.raises(ConfigError, match="vectors of 3 dimensions"):
            guarded(inner, collection=collection())
        remote_collection.close()


def test_all_chunks_of_a_source_are_withheld_and_each_table_row_is_a_source(calibration):
    inner = Store(Model())
    for d in corpus():
        n = int(d.id[1:])
        inner.add_documents([Document(d.text, id=d.id, metadata={"source": "table.csv", "row": n // 2})])
    defenses = [mirabel(calibration=calibration)]
    store = guarded(inner, config=config(defenses=defenses), fit=False)
    assert store.protection.sources(["d4", "d5"]) == {"d4": "table.csv#2", "d5": "table.csv#2"}
    with client_context("eve"):
        store.similarity_search(text_of("d4"))
        assert store.get_by_ids(["d4", "d5"]) == []
    store.protection.close()


def words_obtained(found):
    """Counts the longest prefix of each document, and ids and metadata once."""
    lengths = {}
    for d in found:
        assert text_of(d.id).startswith(d.page_content)
        lengths[d.id] = max(lengths.get(d.id, 0), len(d.page_content.split()))
    values = {str(value) for d in found for value in (d.id, *d.metadata, *d.metadata.values())}
    return sum(lengths.values()) + len(values)


WAYS = {
    "search": lambda store, n: store.similarity_search(f"only{n} only{n + 1}", 2),
    "async": lambda store, n: asyncio.run(store.asimilarity_search(f"only{n} only{n + 1}", 2)),
    "MMR": lambda store, n: store.max_marginal_relevance_search(f"only{n}", 2, fetch_k=20),
    "async MMR": lambda store, n: asyncio.run(store.amax_marginal_relevance_search(f"only{n}", 2, fetch_k=20)),
    "MMR by vector": lambda store, n: store.max_marginal_relevance_search_by_vector(embedded([f"only{n}"])[0], 2),
    "retriever": lambda store, n: store.as_retriever(k=2).invoke(f"only{n} only{n + 1}"),
    "vector": lambda store, n: store.similarity_search_by_vector(embedded([f"only{n}"])[0], 2),
    "id": lambda store, n: store.get_by_ids([f"d{n}", f"d{n + 1}"]),
    "async id": lambda store, n: asyncio.run(store.aget_by_ids([f"d{n}", f"d{n + 1}"])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clients", [1, 3])
def test_clients_obtain_at_most_the_word_budget_of_crawl_limit(wrap, way, clients):
    """The application's model may repeat its whole context, so all texts count."""
    store, obtained = wrap(defenses=[{"use": "crawl_limit", "budget": 200, "questions": 10_000}]), []
    for name in range(clients):
        with client_context(f"client {name}"):
            obtained.append(words_obtained([d for n in range(0, 80, 2) for d in WAYS[way](store, n)]))
    assert all(160 <= words <= 200 for words in obtained)


def test_observe_mode_charges_the_budget_without_withholding(wrap):
    store = wrap(defenses=[{"use": "crawl_limit", "budget": 30}], mode="observe")
    for number in range(9):
        found = store.similarity_search(f"only{number}", 2)
        assert [d.page_content for d in found] == [text_of(d.id) for d in found] and len(found) == 2
    assert store.protection.guard.defenses[0].evidence.disclosed_words(Query("")) == 30
