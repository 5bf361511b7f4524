"""Mirabel in mode calibrated: withheld documents, sessions, false alarms, and contexts independent of membership."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import DataError
from casemate.guard.calibration import file as calibration
from casemate.guard.calibration.closeness import FEATURES, LOOKAHEAD
from casemate.guard.calibration.fitting import CalibrationSettings, calibrate
from casemate.guard.client_state import withheld_documents
from casemate.guard.defenses.mirabel import Mirabel, _with_stats_without
from casemate.guard.guard import Guard
from casemate.guard.turn import turn
from casemate.guard.units import SourceRelations
from casemate.maths import stats
from casemate.maths.calibration import MAX_SIZE_RATIO, Calibration
from casemate.protocols import Index
from casemate.rag.pipeline import Rag, join_stream
from casemate.redteam.attacks.direct import Direct
from casemate.text.sentences import sentences
from casemate.types import Action, Document, Hit, Query, Retrieval, SimilarityStats
from tests.fakes import BagOfWords, Memory, Parrot

HEADS, TAILS = ("ba", "ce", "di", "fo", "gu", "ha"), ("a", "ek", "in", "or")
VOCABULARY = [head + middle + tail for head in HEADS for middle in "lmnrst" for tail in TAILS]
K = 3


def sentence(rng, words=9):
    return " ".join(rng.choice(VOCABULARY, words)).capitalize() + "."


def corpus(count, seed=0):
    """Documents with two chunks of three sentences."""
    rng = np.random.default_rng(seed)
    return [
        Document(f"d{i}#{j}", " ".join(sentence(rng) for _ in range(3)), source=f"d{i}", digest="x")
        for i in range(count)
        for j in range(2)
    ]


def benign_questions(count, seed=9):
    """Benign questions: a few words of the vocabulary, or of one document."""
    rng, held = np.random.default_rng(seed), corpus(120)
    made = []
    for i in range(count):
        words = VOCABULARY if i % 2 else held[int(rng.integers(len(held)))].text.replace(".", "").lower().split()
        made.append(" ".join(rng.choice(words, int(rng.integers(2, 5)), replace=False)) + "?")
    return made


HELD = corpus(120)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A calibration on the corpus."""
    index = SqliteIndex(tmp_path_factory.mktemp("learnt") / "index.db")
    rag = Rag(BagOfWords(), index, Parrot())
    index.add(HELD, rag.embedder.embed([d.content for d in HELD]))
    settings = CalibrationSettings(k=K, documents=60, questions=400)
    defense = Mirabel(embedder=rag.embedder, index=index)
    found = asyncio.run(calibrate(defense, rag, {"direct": Direct()}, benign_questions(400), settings))
    index.close()
    return replace(found, salt="the same in every run")


@pytest.fixture
def make(tmp_path, learned):
    """Guards with Mirabel over a corpus; state is separate unless a store is given."""
    opened = []

    def guard(held=HELD, found=learned, *, enforce=True, on_error="closed", store=None, **options):
        path = tmp_path / f"{len(opened)}.json"
        if found is not None:
            calibration.write_calibration(path, "default", found)
        index, embedder = SqliteIndex(tmp_path / f"{len(opened)}.db"), BagOfWords()
        opened.append(index)
        rag = Rag(embedder, index, Parrot())
        if held:
            index.add(held, embedder.embed([d.content for d in held]))
        mirabel = Mirabel(calibration=path, embedder=embedder, index=index, store=store, **options)
        return Guard(rag, [mirabel], enforce=enforce, on_error=on_error, store=store)

    yield guard
    for index in opened:
        index.close()


def ask(guard, text, client="anna", k=K):
    retrieval, (verdict,) = asyncio.run(guard.retrieve(Query(text, client=client, k=k)))
    return [h.document.source for h in retrieval.hits], verdict


def record(i):
    return " ".join(d.text for d in HELD if d.source == f"d{i}")


# Withheld documents


def test_question_that_contains_a_record_is_answered_without_it(make):
    guard = make()
    for i in range(20):
        context, verdict = ask(guard, record(i), client=f"client {i}")
        assert f"d{i}" in verdict.evidence["flagged"]
        assert verdict.evidence["withheld"] == verdict.evidence["flagged"]
        assert (verdict.evidence["target"], verdict.evidence["reasons"]) == (f"d{i}", ["closeness"])
        assert (verdict.flagged, verdict.action) == (True, Action.HIDE)
        assert verdict.score > verdict.threshold
        assert f"d{i}" not in context
        assert len(context) == K


def test_benign_questions_are_answered_as_without_a_guard(make):
    guard = make()
    flagged = 0
    for i, question in enumerate(benign_questions(200, seed=77)):
        context, verdict = ask(guard, question, client=f"client {i}")
        bare = asyncio.run(guard.rag.retrieve(Query(question, k=K)))
        flagged += verdict.flagged
        if not verdict.flagged:
            assert context == [h.document.source for h in bare.hits]
            assert (verdict.action, verdict.hidden) == (Action.NONE, ())
            assert verdict.score <= verdict.threshold
    assert flagged <= 200 * 0.01 + 4  # significance .01


def test_hides_and_reports_all_chunks_of_a_source(make):
    guard = make()
    for i in range(10):
        first = HELD[2 * i].text  # paper mode hides one chunk only
        retrieval, (verdict,) = asyncio.run(guard.retrieve(Query(first, k=20, client=f"client {i}")))
        assert verdict.flagged
        assert set(verdict.hidden) >= {f"d{i}#0"}
        assert not {f"d{i}#0", f"d{i}#1"} & {h.document.id for h in retrieval.hits}
        assert len(retrieval.hits) == 20


def test_hides_a_near_copy_under_another_name(make):
    words = HELD[0].text.split()
    copy = Document("copy#0", " ".join([*words[:-2], "balor", "gunek."]), source="copy", digest="x")
    guard = make([*HELD, copy])
    context, verdict = ask(guard, HELD[0].text)
    assert verdict.evidence["flagged"] == ["d0", "copy"]
    assert verdict.evidence["scores"].keys() == {"d0", "copy"}
    assert min(verdict.evidence["scores"].values()) > verdict.threshold
    assert not {"d0", "copy"} & set(context)
    assert len(context) == K


def test_hides_a_dozen_copies_and_fills_the_context(make):
    """More copies than ``max_hidden_sources``: the guard retrieves more hits."""
    copies = [Document(f"copy{i}#0", f"{HELD[0].text} extra{i}", source=f"copy{i}", digest="x") for i in range(12)]
    context, verdict = ask(make([*HELD, *copies]), HELD[0].text)
    assert set(verdict.evidence["flagged"]) == {"d0", *(f"copy{i}" for i in range(12))}
    assert len(context) == K
    assert all(source.startswith("d") for source in context)


def test_copy_that_the_client_may_read_stays_in_a_turn(make):
    held = [*HELD, replace(HELD[0], id="copy#0", source="copy", metadata={"readers": ["anna"]})]
    alone, verdict = ask(make(held), record(0))
    assert verdict.evidence["withheld"] == ["d0"] and alone[0] == "copy"
    with turn(record(0)):
        assert ask(make(held), record(0))[0] == alone
    with turn(record(0)):
        assert "copy" not in ask(make(held), record(0), client="otto")[0]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1)), min_size=5, max_size=20),
    st.sets(st.sampled_from("ab")),
)
def test_statistics_without_sources_are_those_of_a_collection_without_them(rows, gone):
    rows += [("c", 0.1), ("c", 0.7)]  # at least two chunks remain
    scores, kept = [s for _, s in rows], [s for name, s in rows if name not in gone]
    found = replace(
        retrieval(scores, names=[name for name, _ in rows]),
        similarity_stats=SimilarityStats(len(scores), float(np.mean(scores)), float(np.std(scores))),
    )
    stats_left = _with_stats_without(found, gone).similarity_stats
    assert stats_left.n == len(kept) and stats_left.mean == pytest.approx(np.mean(kept))
    assert stats_left.std == pytest.approx(np.std(kept), abs=1e-6)


def test_withheld_documents_are_excluded_from_comparisons(judging):
    """The second document, if not withheld, would explain the similarity of the first."""
    mirabel = judging(similarity_only(np.arange(100) / 200, weights=(0, 1, 0, 0, 0, 0)))  # gap, at most .495
    near, alone = retrieval([0.9, 0.89, *BELOW]), retrieval([0.9, *BELOW])
    assert judge(mirabel, near, client="a").verdict.evidence["flagged"] == ["s0", "s1"]
    assert judge(mirabel, alone, client="b").verdict.evidence["flagged"] == ["s0"]
    three = retrieval([0.9, 0.6, 0.59, *BELOW])  # two documents that are not withheld explain it
    assert judge(mirabel, three, client="c").verdict.evidence["flagged"] == []


def test_chunks_of_sources_ranked_above_are_excluded_from_comparisons(judging):
    """A source is decided at its first chunk, so a later chunk of it must not count."""
    mirabel = judging(similarity_only(np.arange(100) / 200, weights=(0, 1, 0, 0, 0, 0)))
    names = ["x", "y", "x", *[f"o{i}" for i in range(len(BELOW))]]
    found = retrieval([0.9, 0.8, 0.79, *BELOW], names=names)
    assert judge(mirabel, found).verdict.evidence["flagged"] == ["x", "y"]
    without_x = retrieval([0.8, *BELOW], names=["y", *names[3:]])
    assert judge(mirabel, without_x, client="otto").verdict.evidence["flagged"] == ["y"]


def test_blocked_sources_are_excluded_from_the_retrieval_of_sentences(judging):
    """Even if only a sentence of the question retrieves the source."""

    class Sentences(ListIndex):
        def search(self, vector, k, tenant):  # ``tenant`` has no default: the caller must pass that of the question
            return retrieval([0.9, 0.89, *BELOW], names=["y", "barred", *[f"o{i}" for i in range(len(BELOW))]])

    learned = similarity_only(np.arange(100) / 200, weights=(0, 1, 0, 0, 0, 0), doubt=-math.inf)
    whole = retrieval([0.3, *BELOW], names=["y", *[f"o{i}" for i in range(len(BELOW))]])
    text = "Amber birch cedar delta. Ember flint grove heron."
    for blocked in (False, True):
        mirabel = judging(learned, embedder=BagOfWords(), index=Sentences([], np.empty((0, 64))))
        if blocked:
            mirabel.withheld.add("default", "anna", "barred")
        assert judge(mirabel, whole, text=text).verdict.evidence["flagged"] == (["y"] if blocked else [])


# Sessions


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=lambda: now.at, at=withheld_documents.time.time())
    monkeypatch.setattr(withheld_documents, "time", now)
    return now


def question_about(i):
    """A benign question that retrieves document i."""
    words = HELD[2 * i].text.replace(".", "").lower().split()
    return " ".join(words[:3])


def test_withheld_document_stays_withheld_from_that_client_only(make):
    guard, i = make(), 4
    assert f"d{i}" in ask(guard, question_about(i))[0]
    ask(guard, record(i))
    context, verdict = ask(guard, question_about(i))
    assert f"d{i}" not in context
    assert len(context) == K
    assert (verdict.evidence["withheld"], verdict.evidence["flagged"]) == ([f"d{i}"], [])
    assert (verdict.flagged, verdict.evidence["reasons"]) == (True, ["before"])
    other, verdict = ask(guard, question_about(i), client="otto")
    assert f"d{i}" in other
    assert not verdict.flagged


def test_withheld_document_is_shown_again_after_the_session(make, clock):
    guard, i = make(session_hours=2), 4
    ask(guard, record(i))
    clock.at += 2 * 3600 - 1
    assert f"d{i}" not in ask(guard, question_about(i))[0]
    clock.at += 1
    assert f"d{i}" in ask(guard, question_about(i))[0]


def test_session_of_zero_hours_withholds_from_one_answer_only(make):
    guard, i = make(session_hours=0), 4
    assert f"d{i}" not in ask(guard, record(i))[0]
    assert f"d{i}" in ask(guard, question_about(i))[0]


def test_withheld_documents_persist_over_a_restart(make):
    store, i = Memory(), 4
    ask(make(store=store), record(i))
    again = make(store=store)
    context, verdict = ask(again, question_about(i))
    assert f"d{i}" not in context
    assert verdict.evidence["reasons"] == ["before"]
    assert f"d{i}" in ask(again, question_about(i), client="otto")[0]
    assert f"d{i}" in ask(make(), question_about(i))[0]  # without a store, state is not shared


@pytest.mark.parametrize(("readers", "withheld"), [
    (["anna", "otto"], False), ("anna", False),
    (["otto"], True), ([], True), ("annabel", True), (None, True), (7, True), ({"anna": 1}, True),
])  # fmt: skip
def test_documents_are_not_withheld_from_their_readers(make, readers, withheld):
    held = [replace(d, metadata={"readers": readers}) if d.source == "d4" else d for d in HELD]
    context, verdict = ask(make(held), record(4))
    assert ("d4" not in context) == withheld
    assert verdict.flagged == withheld
    assert "d4" not in ask(make(held), record(4), client="mallory")[0]


def test_metadata_key_of_readers_is_an_option(make):
    held = [replace(d, metadata={"ACL": ["anna"]}) if d.source == "d4" else d for d in HELD]
    assert "d4" in ask(make(held, readers="acl"), record(4))[0]
    assert "d4" not in ask(make(held), record(4))[0]


# A withheld source that becomes readable


def grant(guard, source, **metadata):
    """Indexes a source again with other metadata, as after a change of rights."""
    chunks = [replace(d, metadata=metadata) for d in HELD if d.source == source]
    asyncio.run(guard.add(chunks))


def test_withheld_source_is_shown_again_if_its_readers_list_the_client(make):
    guard = make()
    for client in ("anna", "otto"):
        assert "d4" not in ask(guard, record(4), client)[0]
    ask(guard, record(7))
    grant(guard, "d4", readers=["anna"])
    context, verdict = ask(guard, question_about(4))
    assert "d4" in context
    assert (verdict.flagged, verdict.action, verdict.hidden) == (False, Action.NONE, ())
    assert (verdict.evidence["withheld"], verdict.evidence["reasons"]) == ([], [])
    context, verdict = ask(guard, record(4))  # also for a question that contains it
    assert "d4" in context and "d4" not in verdict.evidence["withheld"]
    assert "d7" not in ask(guard, question_about(7))[0]  # other sources remain withheld
    assert "d4" not in ask(guard, question_about(4), "otto")[0]  # and remain withheld from other clients
    grant(guard, "d4")
    assert "d4" not in ask(guard, question_about(4))[0]  # the right is revoked within the session


def test_readable_source_counts_in_the_retrieval_of_a_sentence_although_it_was_withheld(judging):
    """``readers`` must also apply if only a sentence of the question retrieves the source."""
    readers = {"readers": ["anna"]}

    class Sentences(ListIndex):
        def search(self, vector, k, tenant="default"):
            found = retrieval([0.9, 0.89, *BELOW], names=["y", "granted", *[f"o{i}" for i in range(len(BELOW))]])
            granted = replace(found.hits[1], document=replace(found.hits[1].document, metadata=readers))
            return replace(found, hits=(found.hits[0], granted, *found.hits[2:]))

    learned = similarity_only(np.arange(100) / 200, weights=(0, 1, 0, 0, 0, 0), doubt=-math.inf)
    whole = retrieval([0.3, *BELOW], names=["y", *[f"o{i}" for i in range(len(BELOW))]])
    text = "Amber birch cedar delta. Ember flint grove heron."
    for client, flagged in (("anna", []), ("otto", ["y"])):
        mirabel = judging(learned, embedder=BagOfWords(), index=Sentences([], np.empty((0, 64))))
        mirabel.withheld.add("default", client, "granted")
        assert judge(mirabel, whole, client=client, text=text).verdict.evidence["flagged"] == flagged


def test_questions_about_a_readable_source_do_not_add_evidence(judging):
    """Otherwise the source would be withheld at the first question after the right is revoked."""
    mirabel, found = judging(similarity_only(np.arange(1, 200) / 200), significance=0.01), retrieval([0.985, *BELOW])
    readable = replace(found.hits[0], document=replace(found.hits[0].document, metadata={"readers": "anna"}))
    for _ in range(20):
        assert not judge(mirabel, replace(found, hits=(readable, *found.hits[1:]))).verdict.flagged
    assert mirabel.withheld.evidence("default", "anna", "s0") == 1
    assert not judge(mirabel, found).verdict.flagged


def labeled(guard, text, *labels):
    query = Query(text, client="anna", k=K, labels=frozenset(labels))
    found, (verdict,) = asyncio.run(guard.retrieve(query))
    return [h.document.source for h in found.hits], verdict


def test_source_without_a_label_of_the_client_is_not_recorded_as_withheld(make):
    """Questions without the label change no state: the source is not in the collection visible to the client."""
    held = [replace(d, metadata={"acl": ["board"]}) if d.source == "d4" else d for d in HELD]
    guard = make(held)
    for _ in range(3):
        context, verdict = labeled(guard, record(4))
        assert "d4" not in context and "d4" not in verdict.evidence["withheld"]
    context, verdict = labeled(guard, question_about(4), "board")
    assert "d4" in context and not verdict.flagged


def test_source_withheld_for_closeness_stays_withheld_with_a_label(make):
    """Labels determine retrieval; only ``readers`` exempt a client from detection."""
    held = [replace(d, metadata={"acl": ["board"]}) if d.source == "d4" else d for d in HELD]
    guard = make(held)
    assert labeled(guard, record(4), "board")[1].evidence["withheld"] == ["d4"]
    without = labeled(guard, question_about(4))
    assert "d4" not in without[0] and without[1].evidence["withheld"] == []
    again = labeled(guard, question_about(4), "board")
    assert "d4" not in again[0] and again[1].evidence["reasons"] == ["before"]
    assert len(again[0]) == K


@pytest.mark.parametrize("readable", [4, 20])
def test_protects_a_client_with_few_readable_documents(make, readable):
    """The calibration remains valid: the size of the collection is that of the tenant, not that of the client."""
    mine = {f"d{i}" for i in range(readable)}
    held = [d if d.source in mine else replace(d, metadata={"acl": ["board"]}) for d in HELD]
    guard = make(held)
    context, verdict = labeled(guard, record(2))
    assert "error" not in verdict.evidence and "undecided" not in verdict.evidence
    assert "d2" in verdict.evidence["withheld"] and "d2" not in context and set(context) <= mine
    context, verdict = labeled(guard, question_about(1))
    assert verdict.evidence["flagged"] == [] and context and set(context) <= mine


# With the similarity as the score


def similarity_only(benign, *, weights=(1, 0, 0, 0, 0, 0), **options):
    made = Calibration(
        fingerprint="bag-of-words",
        documents=1000,
        k=K,
        features=FEATURES,
        centre=(0.0,) * 6,
        scale=(1.0,) * 6,
        weights=tuple(map(float, weights)),
        benign=tuple(map(float, benign)),
        source="a test",
        salt="s",
    )
    return replace(made, **options)


@pytest.fixture
def judging(tmp_path):
    """Mirabel with a calibration, without embedder or index."""
    count = iter(range(10**6))

    def make(found, **options):
        path = tmp_path / f"{next(count)}.json"
        calibration.write_calibration(path, "default", found)
        return Mirabel(calibration=path, **options)

    return make


def retrieval(scores, n=1000, names=None):
    names = names or [f"s{i}" for i in range(len(scores))]
    documents = [Document(f"{name}#{i}", f"word{i}", source=name) for i, name in enumerate(names)]
    hits = (Hit(document, float(score)) for document, score in zip(documents, scores, strict=True))
    return Retrieval(tuple(hits), SimilarityStats(n, 0.0, 0.1), exhausted=True)


QUESTIONS = itertools.count()


def judge(mirabel, found, client="anna", k=K, text=None):
    text = text or f"question {next(QUESTIONS)}"  # a repeated question counts once
    return asyncio.run(mirabel.on_retrieve(Query(text, client=client, k=k), found))


BELOW = [0.2 - i / 100 for i in range(LOOKAHEAD + K)]


def test_score_at_the_threshold_is_not_flagged(judging):
    found = similarity_only(np.arange(1, 200) / 200)
    assert found.threshold(0.05) == 0.95
    mirabel = judging(found, significance=0.05)
    assert not judge(mirabel, retrieval([0.95, *BELOW])).verdict.flagged
    assert judge(mirabel, retrieval([0.9501, *BELOW])).verdict.flagged


def edited(text, seed):
    """A copy with 22 % of the words dropped and the sentences in another order."""
    rng = np.random.default_rng(seed)
    parts = sentences(text)
    words = " ".join(parts[i] for i in rng.permutation(len(parts))).split()
    return " ".join(w for w in words if rng.random() > 0.22)


def records_with_leaked_copy(judging, on=True):
    """Of 18 records with an edited copy below the threshold: those with the copy in the context."""
    mirabel, leaked = judging(similarity_only(np.arange(1, 200) / 200), significance=0.05, edited_copies=on), []
    for i in range(18):
        text = " ".join(sentence(np.random.default_rng(1000 * i + j)) for j in range(5))
        found = retrieval([0.97, 0.91, *BELOW])
        first, second, *others = found.hits
        first, second = (
            replace(h, document=replace(h.document, text=t)) for h, t in ((first, text), (second, edited(text, i)))
        )
        outcome = judge(mirabel, replace(found, hits=(first, second, *others)), client=f"client {i}")
        assert outcome.verdict.flagged and len(outcome.value.hits) >= K
        leaked += [i] * any(h.document.source == second.document.source for h in outcome.value.hits)
    return leaked


def test_withholds_edited_copies_of_a_withheld_record(judging):
    assert not records_with_leaked_copy(judging)


def test_edited_copies_leak_if_the_option_is_off(judging):
    assert len(records_with_leaked_copy(judging, on=False)) == 18


def test_a_copy_below_many_chunks_of_the_context_enters_no_comparison(judging):
    """Chunks of sources in the context are skipped by comparisons, so these reach beyond k + LOOKAHEAD hits."""
    mirabel = judging(similarity_only(np.arange(1, 200) / 200 * 0.42 / 0.95, weights=(0, 1, 0, 0, 0, 0)))
    text = " ".join(sentence(np.random.default_rng(j)) for j in range(5))
    names = ["W", "A", "B", "A", "A", "A", "B", "B", "O", "O", "O", "P", "P", "P", "X", *(f"Q{i}" for i in range(8))]
    scores = [1.2, 0.62, 0.6, *[0.5] * 5, *[0.2] * 6, 0.19, *[0.1] * 8]
    texts = {"W": text, "X": edited(text, 1)}
    hits = [
        replace(hit, document=replace(hit.document, text=texts.get(name, hit.document.text)))
        for name, hit in zip(names, retrieval(scores, names=names).hits, strict=True)
    ]
    worlds = [hits, [hit for hit in hits if hit.document.source not in texts]]
    contexts = [
        judge(replace(mirabel, significance=0.05), replace(retrieval(scores), hits=tuple(world)), k=2).value.hits
        for world in worlds
    ]
    assert [hit.document.id for hit in contexts[0]] == [hit.document.id for hit in contexts[1]]


def test_edited_copy_stays_withheld_in_later_questions(judging):
    mirabel = judging(similarity_only(np.arange(1, 200) / 200), significance=0.05, edited_copies=True)
    text = " ".join(sentence(np.random.default_rng(j)) for j in range(5))
    found = retrieval([0.97, 0.91, *BELOW])
    first, second, *others = found.hits
    first, second = (
        replace(h, document=replace(h.document, text=t)) for h, t in ((first, text), (second, edited(text, 1)))
    )
    judge(mirabel, replace(found, hits=(first, second, *others)))
    later = judge(mirabel, replace(found, hits=(replace(second, score=0.3), *others)))  # without the original
    assert later.verdict.evidence["withheld"] == [second.document.source]


def test_larger_context_is_tested_at_a_smaller_rate(judging):
    """A larger context has more candidates, so the rate is divided by the growth of k since the calibration."""
    found = similarity_only(np.arange(1, 2000) / 2000)
    mirabel = judging(found, significance=0.05)
    limits = {
        k: judge(mirabel, retrieval([0.5, *[0.1] * (k + LOOKAHEAD)]), k=k).verdict.threshold for k in (1, 3, 6, 30)
    }
    assert limits == {k: found.threshold(0.05 * min(1, 3 / k)) for k in limits}
    assert limits[1] == limits[3] < limits[6] < limits[30]


def test_large_k_does_not_disable_the_test(judging):
    """With 100 benign questions the smallest attainable rate is 1 in 101; a large k would need a smaller rate."""
    mirabel = judging(similarity_only(np.arange(100) / 100), significance=0.01)
    for k in (3, 10, 200, 1000):
        outcome = judge(mirabel, retrieval([1.0, *[0.1] * (k + LOOKAHEAD)]), k=k, client=f"k {k}")
        assert outcome.verdict.flagged
        assert outcome.verdict.threshold == 0.99


def test_few_benign_questions_use_the_smallest_attainable_rate(judging):
    mirabel = judging(similarity_only(np.arange(50) / 100), significance=0.01)
    assert judge(mirabel, retrieval([0.495, *BELOW])).verdict.flagged


def test_empty_calibration_flags_nothing_and_gives_the_reason(judging):
    mirabel = judging(similarity_only([], weights=(0,) * 6, source="7 documents, too few"))
    outcome = judge(mirabel, retrieval([0.99, *BELOW]))
    assert len(outcome.value.hits) == 1 + len(BELOW)
    assert (outcome.verdict.flagged, outcome.verdict.threshold) == (False, None)
    assert outcome.verdict.evidence["undecided"] == "7 documents, too few"
    assert "Infinity" not in json.dumps(outcome.verdict.evidence)


def test_threshold_in_the_verdict_is_specific_to_client_and_document(judging):
    found = similarity_only(np.arange(1, 200) / 200, jitter=0.1)
    mirabel = judging(found, significance=0.05)
    for i in range(200):
        found_now = retrieval([0.95 - i / 2000, *BELOW])
        verdict = judge(mirabel, found_now, client=f"client {i}").verdict
        assert verdict.threshold == pytest.approx(0.95 - found.threshold_reduction("default", f"client {i}", "s0"))
        assert verdict.flagged == (verdict.score > verdict.threshold)


@pytest.mark.parametrize("n", [0, 1, 29])
def test_too_few_documents_have_no_decision(judging, n):
    outcome = judge(judging(similarity_only(np.arange(100) / 100)), retrieval([0.99] * min(n, 10), n=n))
    assert len(outcome.value.hits) == min(n, 10)
    assert outcome.verdict.threshold is None
    assert "a decision needs at least 30" in outcome.verdict.evidence["undecided"]


def test_too_few_hits_request_more_and_change_no_state(judging):
    mirabel = judging(similarity_only(np.arange(100) / 100))
    short = replace(retrieval([0.995, *BELOW[: LOOKAHEAD - 1]]), exhausted=False)
    outcome = judge(mirabel, short, k=1)
    assert outcome == (short, None, True)
    assert asyncio.run(mirabel.score(Query("x", k=1), short, similarity_only(np.arange(100) / 100))) == {}
    assert mirabel.blocked_sources(Query("x", client="anna")) == frozenset()
    long = replace(retrieval([0.995, *BELOW[:LOOKAHEAD]]), exhausted=False)
    assert judge(mirabel, replace(long, hits=long.hits[:LOOKAHEAD])).more
    assert judge(mirabel, long, k=1).more  # the document that enters the context has no lower-ranked hit
    enough = replace(retrieval([0.995, *BELOW]), exhausted=False)
    assert judge(mirabel, enough, k=1).verdict.evidence["flagged"] == ["s0"]
    assert judge(mirabel, short, k=1) == (short, None, True)  # too few to find sources related to the withheld one


def test_question_close_to_more_than_max_hidden_sources_has_an_empty_context(judging, monkeypatch):
    monkeypatch.setattr("casemate.guard.defenses.mirabel.MAX_HIDDEN", 3)
    mirabel = judging(similarity_only(np.arange(100) / 100))
    for count in (3, 4):
        outcome = judge(mirabel, retrieval([1.2] * count + BELOW), client=f"client {count}")
        assert len(outcome.verdict.hidden) == count and len(outcome.value.hits) == (len(BELOW) if count == 3 else 0)


def test_nan_similarity_is_an_error(judging):
    with pytest.raises(DataError, match="no finite score"):
        judge(judging(similarity_only(np.arange(100) / 100)), retrieval([math.nan, *BELOW]))


# False alarms


def contexts(rng, count):
    """Similarities of benign questions, with several documents nearly as close as the first."""
    topic, own = rng.normal(0.4, 0.1, (count, 1)), rng.normal(0, 0.02, (count, K + LOOKAHEAD))
    return -np.sort(-(topic + own), axis=1)


@pytest.mark.parametrize(("significance", "benign"), [(0.05, 99), (0.1, 60), (0.02, 149)])
def test_false_alarm_rate_of_exchangeable_questions_is_the_significance(significance, benign):
    """With jitter, over calibrations, clients and questions. The lower bound excludes a test that never flags."""
    rng, jitter, flagged, trials = np.random.default_rng(8), 0.03, 0, 1500
    for trial in range(trials):
        benign_scores = np.max(contexts(rng, benign)[:, :K] + jitter * rng.random((benign, K)), axis=1)
        mirabel = Mirabel(significance=significance)
        found = similarity_only(benign_scores, jitter=jitter, salt=str(trial))
        mirabel.ready = lambda tenant, n, found=found: found
        flagged += judge(mirabel, retrieval(contexts(rng, 1)[0]), client=f"client {trial}").verdict.flagged
    promised = math.floor(significance * (benign + 1)) / (benign + 1)
    error = math.sqrt(promised * (1 - promised) / trials)
    assert promised - 3.5 * error < flagged / trials < promised + 3.5 * error


def test_evidence_of_medium_closeness_accumulates(judging):
    """Each question alone is below the threshold: p = .02, e = 3.5; the evidence of six exceeds 1 in 1,000."""
    found = similarity_only(np.arange(1, 200) / 200)
    mirabel = judging(found, significance=0.01)
    p = found.p_value(0.985)
    assert p == pytest.approx(0.02)
    needed = math.ceil(math.log(1000) / math.log(stats.e_value(p)))
    seen = []
    for i in range(needed + 1):
        outcome = judge(mirabel, retrieval([0.985, *BELOW]))
        seen.append((outcome.verdict.flagged, outcome.verdict.evidence["reasons"]))
        assert ("s0" in {h.document.source for h in outcome.value.hits}) == (i < needed - 1)
    assert seen == [(False, [])] * (needed - 1) + [(True, ["session"]), (True, ["before"])]
    assert not judge(mirabel, retrieval([0.985, 0.985, *BELOW]), client="otto").verdict.flagged
    assert [mirabel.withheld.evidence("default", "otto", s) > 1 for s in ("s0", "s1")] == [True, False]


def test_repeated_question_adds_no_evidence(judging):
    mirabel = judging(similarity_only(np.arange(1, 200) / 200), significance=0.01)
    for i in range(30):
        asked = "When is the pharmacy open?" if i % 2 else "when is the  pharmacy open?"
        assert not judge(mirabel, retrieval([0.985, *BELOW]), text=asked).verdict.flagged
    once = mirabel.withheld.evidence("default", "anna", "s0")
    judge(mirabel, retrieval([0.985, *BELOW]), text="And on Sundays?")
    assert mirabel.withheld.evidence("default", "anna", "s0") == pytest.approx(once**2)


def test_evidence_is_per_document_and_decays_with_benign_questions(judging):
    mirabel = judging(similarity_only(np.arange(1, 200) / 200), significance=0.01)
    for i in range(40):
        score, names = (0.98 if i % 4 == 0 else 0.3), ["a", *[f"o{j}" for j in range(len(BELOW))]]
        assert not judge(mirabel, retrieval([score, *BELOW], names=names)).verdict.flagged
        assert mirabel.withheld.evidence("default", "anna", "a") < 4
        assert mirabel.withheld.evidence("default", "anna", "o0") == 1


def test_benign_sessions_about_one_document_rarely_alarm():
    """Worst case: every question retrieves the same document first. At most 1 in 1,000 questions in the long run."""
    rng, alarms, asked, found = np.random.default_rng(5), 0, 0, similarity_only(np.random.default_rng(4).random(400))
    mirabel = Mirabel(significance=0.001)
    mirabel.ready = lambda tenant, n: found
    for client in range(120):
        for _ in range(40):
            asked += 1
            found_now = retrieval([rng.random() * 0.999, *np.full(LOOKAHEAD + K, -1.0)])
            verdict = judge(mirabel, found_now, client=str(client)).verdict
            if "session" in verdict.evidence["reasons"]:
                alarms += 1
                break
            if verdict.flagged:
                break
    assert asked > 2000
    assert alarms / asked < 0.001


# Decoys


def decoyed(i, sentences=1):
    """Sentences of a record among three unrelated ones."""
    rng = np.random.default_rng(1000 + i)
    own = [part.rstrip(".") + "." for part in HELD[2 * i].text.split(". ")[:sentences]]
    return " ".join([sentence(rng), *own, sentence(rng), sentence(rng)])


def test_detects_a_text_among_decoys_by_its_sentences(make):
    guard, without_sentences = make(), make()
    without_sentences.defenses[0].embedder = None
    without_sentences.defenses[0].index = None
    found = [f"d{i}" in ask(guard, decoyed(i), client=f"c{i}")[1].evidence["flagged"] for i in range(110)]
    whole = [f"d{i}" in ask(without_sentences, decoyed(i), client=f"c{i}")[1].evidence["flagged"] for i in range(110)]
    assert sum(found) >= 2 * sum(whole) > 0
    assert all(b <= a for a, b in zip(found, whole, strict=True))


def test_scores_sentences_only_of_doubtful_questions(make, learned):
    def embedded(found, question):
        guard = make(found=found)
        guard.rag.embedder.texts.clear()
        ask(guard, question)
        return len(guard.rag.embedder.texts) - 1

    doubtful = "Balek celor dinin. Fotek gumor hasin."
    assert embedded(replace(learned, doubt=-math.inf), doubtful) == 2
    assert embedded(replace(learned, doubt=math.inf), doubtful) == 0
    assert embedded(replace(learned, doubt=-math.inf), "Balek celor dinin fotek gumor hasin.") == 0  # a single sentence
    assert (
        embedded(replace(learned, doubt=-math.inf), " ".join(sentence(np.random.default_rng(i)) for i in range(30)))
        == 8
    )


def test_number_of_embedded_texts_does_not_depend_on_membership(make):
    """Otherwise the latency of scoring sentences would reveal the record."""
    for i in range(12):
        with_document, without_document = make(), make()
        asyncio.run(without_document.remove([f"d{i}"]))
        work = []
        for guard in (with_document, without_document):
            guard.rag.embedder.texts.clear()
            verdict = ask(guard, record(i))[1]
            work.append(len(guard.rag.embedder.texts))
            assert (f"d{i}" in verdict.evidence["withheld"]) == (guard is with_document)
        assert work[0] == work[1]


# Invalid calibrations


def retrieve_without_calibration(guard):
    retrieval, (verdict,) = asyncio.run(guard.retrieve(Query(question_about(4), k=K)))
    return [h.document.source for h in retrieval.hits], verdict


def test_missing_calibration_withholds_the_context_with_a_reason(make):
    context, verdict = retrieve_without_calibration(make(found=None))
    assert context == []
    assert (verdict.action, verdict.evidence["error"]) == (Action.WITHHOLD, "DataError")
    assert "no calibration for tenant 'default'" in verdict.evidence["message"]
    assert "run 'casemate calibrate', or set its mode to paper" in verdict.evidence["message"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"documents": 100}, "100 chunks; the tenant now has 240"), ({"fingerprint": "old"}, "the embedder 'old'")],
)
def test_stale_calibration_withholds_the_context(make, learned, changes, says):
    context, verdict = retrieve_without_calibration(make(found=replace(learned, **changes)))
    assert context == []
    assert says in verdict.evidence["message"]
    assert "run 'casemate calibrate'" in verdict.evidence["message"]


def test_damaged_calibration_withholds_the_context(make):
    guard = make()
    guard.defenses[0].calibration.write_text("{")
    context, verdict = retrieve_without_calibration(guard)
    assert context == []
    assert "damaged" in verdict.evidence["message"]


def test_defense_raises_without_a_valid_calibration(judging, tmp_path):
    with pytest.raises(DataError, match="no calibration"):
        judge(Mirabel(calibration=tmp_path / "none.json"), retrieval([0.9, *BELOW]))
    with pytest.raises(DataError, match="stale.*999999"):
        mirabel = judging(similarity_only([0.1]), embedder=BagOfWords())
        judge(mirabel, retrieval([0.9, *BELOW], n=999_999))


def test_on_error_open_answers_without_the_defense(make):
    guard = make(found=None, on_error="open")
    context, verdict = retrieve_without_calibration(guard)
    assert len(context) == K
    assert "no calibration" in verdict.evidence["message"]


def test_new_calibration_is_used_without_a_restart(make, learned):
    guard = make(found=None)
    assert retrieve_without_calibration(guard)[0] == []
    calibration.write_calibration(guard.defenses[0].calibration, "default", learned)
    assert len(retrieve_without_calibration(guard)[0]) == K


def test_calibration_of_another_tenant_is_not_used(make, learned):
    guard = make(found=None)
    calibration.write_calibration(guard.defenses[0].calibration, "another", learned)
    assert "tenant 'default'" in retrieve_without_calibration(guard)[1].evidence["message"]


# Contexts independent of membership


def test_observe_mode_changes_no_answer(make):
    watched, bare = make(enforce=False), make()
    for text in [
        record(3),
        question_about(3),
        HELD[7].text,
        decoyed(5),
        question_about(7),
        record(3),
        *benign_questions(20),
    ]:
        query = Query(text, client="anna", k=K)
        expected = asyncio.run(bare.rag.ask(query))
        seen = asyncio.run(watched.ask(query))
        assert (seen.text, seen.retrieval.hits) == (expected.text, expected.retrieval.hits)
        assert asyncio.run(join_stream(watched.stream(query))) == expected.text
    assert ask(watched, record(3))[1].flagged


def test_hidden_documents_are_not_in_the_context_and_events_contain_no_text(make):
    store = Memory()
    guard = make(store=store)
    for i, text in enumerate([record(3), decoyed(4), *benign_questions(10), HELD[9].text, record(3)]):
        retrieval, (verdict,) = asyncio.run(guard.retrieve(Query(text, client=f"c{i % 3}", k=K)))
        assert not set(verdict.hidden) & {h.document.id for h in retrieval.hits}
        assert len(retrieval.hits) == K
    noted = json.dumps([e.body for e in store.events])
    assert not any(word in noted for word in VOCABULARY[:40])


class ListIndex(Index):
    """An exact in-memory index."""

    def __init__(self, held, E):
        self.held, self.E = list(held), np.asarray(E, np.float64)

    def open(self, fingerprint, dim):
        pass

    def search(self, vector, k, tenant="default"):
        S = (self.E * np.asarray(vector, np.float64)).sum(axis=1)
        near = np.argsort(-S, kind="stable")[:k]
        return Retrieval(
            tuple(Hit(self.held[i], float(S[i])) for i in near),
            SimilarityStats(len(S), float(S.mean()), float(S.std())),
        )

    def without(self, sources):
        kept = [i for i, d in enumerate(self.held) if d.source not in sources]
        return ListIndex([self.held[i] for i in kept], self.E[kept])


EMBEDDER = BagOfWords()
WORDS = [f"{w}{i}" for i in range(8) for w in VOCABULARY[:40]]


def world(rng, sources=45):
    """A corpus with topics, and with copies and near copies of several chunks under other names."""
    topics = [rng.choice(WORDS, 30, replace=False) for _ in range(6)]
    made: list[list[str]] = []
    for _ in range(sources):
        if made and rng.random() < 0.25:
            base = made[int(rng.integers(len(made)))]
            share = rng.choice([0.0, 0.1, 0.3])
            made.append([" ".join(w if rng.random() > share else rng.choice(WORDS) for w in c.split()) for c in base])
        else:
            topic = topics[int(rng.integers(6))]
            words = [np.where(rng.random(14) < 0.6, rng.choice(topic, 14), rng.choice(WORDS, 14)) for _ in range(4)]
            made.append([" ".join(w) for w in words[: int(rng.integers(1, 5))]])
    return [Document(f"s{i}#{j}", c, source=f"s{i}") for i, chunks in enumerate(made) for j, c in enumerate(chunks)]


def probe(rng, held):
    """A question of a random kind."""
    a, b = (held[int(i)].text.split() for i in rng.integers(len(held), size=2))
    decoy = " ".join(rng.choice(WORDS, 6)).capitalize()
    return [
        " ".join(a),
        " ".join(a[: len(a) // 2]),
        " ".join(rng.permutation(a)[:9]),
        " ".join(a[:9] + b[:9]),
        " ".join(rng.choice(WORDS, 6)),
        f"{decoy}. {' '.join(a[:9]).capitalize()}. {' '.join(b[:9]).capitalize()}.",
        f"{' '.join(a[:5])} {decoy}",
    ][int(rng.integers(7))]


def replayed(index, found, asked, k, significance):
    """Contexts and verdicts of a new guard for questions with their clients."""
    mirabel = Mirabel(embedder=EMBEDDER, index=index, significance=significance, min_documents=3, calibration=found)
    guard, seen = Guard(Rag(EMBEDDER, index, Parrot()), [mirabel]), []
    for client, text in asked:
        hits, (verdict,) = asyncio.run(guard.retrieve(Query(text, client=client, k=k)))
        assert "error" not in verdict.evidence
        seen.append(([h.document.id for h in hits.hits], verdict))
    return seen


def unit(held, source):
    """The unit of a source, from the whole collection."""
    return SourceRelations(held).related_to([source]) | {source}


def two_worlds(tmp_path, seed, weights, session, removed=unit):
    """Yields pairs of contexts, with and without the unit of a document, for each withheld document.

    Args:
        tmp_path: Folder of the calibration.
        seed: Of corpus and questions.
        weights: Of the features.
        session: Whether one client asks about few documents; else each question has its own client.
        removed: The sources that are absent in the other world.

    Yields:
        Both contexts; whether the document is withheld in the first one (retrieved or not) and no copy is exposed;
        whether it has changed the client state before.
    """
    rng = np.random.default_rng(seed)
    held = world(rng)
    index = ListIndex(held, EMBEDDER.embed([d.content for d in held]))
    k, significance = int(rng.integers(1, 7)), float(rng.choice([0.02, 0.1, 0.3]))
    harmless = similarity_only([], weights=weights, documents=len(held), jitter=0.05, doubt=-math.inf)
    scale = (0.15, 0.07, 1.3, 0.5, 0.3, 0.5)  # as on NFCorpus
    path = tmp_path / f"{seed}.json"
    harmless = replace(harmless, scale=scale, benign=(0.0,))
    calibration.write_calibration(path, "default", harmless)
    mirabel = Mirabel(embedder=EMBEDDER, index=index, min_documents=3, calibration=path)
    benign_scores = []
    for _ in range(60):
        text = " ".join(rng.choice(held[int(rng.integers(len(held)))].text.split(), 4))
        hits = replace(index.search(EMBEDDER.embed([text])[0], 400), exhausted=True)
        benign_scores.append(max(asyncio.run(mirabel.score(Query(text, k=3), hits, harmless)).values()))
    learned = replace(harmless, benign=tuple(sorted(benign_scores)), doubt=float(np.quantile(benign_scores, 0.6)))
    calibration.write_calibration(path, "default", learned)
    few = [held[int(i)] for i in rng.integers(len(held), size=4)]
    asked = [("anna", probe(rng, few)) if session else (f"client {i}", probe(rng, held)) for i in range(6)]
    with_document = replayed(index, path, asked, k, significance)
    for source in sorted({s for _, verdict in with_document for s in verdict.evidence["withheld"]}):
        absent = removed(held, source)
        if sum(d.source in absent for d in held) > len(held) * (1 - 1 / MAX_SIZE_RATIO):
            continue  # no calibration is valid in both worlds
        without_document = replayed(index.without(absent), path, asked, k, significance)
        compared = blocked = False
        for (_, text), (context, verdict), (other, _) in zip(asked, with_document, without_document, strict=True):
            exposed = any(identity.split("#")[0] in absent for identity in context)
            withheld = source in verdict.evidence["withheld"] and not exposed
            blocked |= session and withheld
            compared |= session and not blocked and retrieves_any(index, text, absent, k)
            yield context, other, withheld or blocked, compared


def retrieves_any(index, text, sources, k):
    """Whether a question or one of its sentences retrieves one of the sources."""
    vectors = EMBEDDER.embed([text, *sentences(text)])
    hits = [h for v in vectors for h in index.search(v, 2 * (k + LOOKAHEAD + 2 * Mirabel.max_hidden_sources)).hits]
    return not sources.isdisjoint(h.document.source for h in hits)


WEIGHTS = st.tuples(*[st.sampled_from([0.0, 0.3, 1.0, 3.0]) for _ in FEATURES])


@settings(max_examples=30)
@given(st.integers(0, 10**6), WEIGHTS)
def test_context_equals_that_of_a_collection_without_the_withheld_documents(tmp_path_factory, seed, weights):
    """For any weights except that of depth, which depends on chunks that are not retrieved.

    Exact in these examples. A copy without a counterpart among the hits is a rare exception (ADR 0015).
    """
    weights = (weights[0] + 0.1, weights[1], 0.0, *weights[3:])
    for context, other, withheld, _ in two_worlds(tmp_path_factory.mktemp("worlds"), seed, weights, False):
        assert context == other or not withheld


@pytest.mark.parametrize("mutation", ["direct copies only", "the document alone removed"])
def test_the_equality_fails_without_whole_units(tmp_path, monkeypatch, mutation):
    """Mutations that the property above must detect: a relation that is not transitive, an incomplete removal."""
    removed = unit
    if mutation == "direct copies only":
        monkeypatch.setattr(
            "casemate.guard.units._reachable",
            lambda related, given: frozenset(given).union(*map(related, given)),
        )
    else:
        removed = lambda held, source: {source}  # noqa: E731
    weights = (1.0, 0.3, 0.0, 0.3, 0.3, 0.3)
    pairs = (pair for seed in range(17, 40) for pair in two_worlds(tmp_path, seed, weights, False, removed))
    assert any(context != other for context, other, withheld, _ in pairs if withheld)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 10**6), WEIGHTS)
def test_contexts_of_a_session_are_equal_until_the_document_enters_a_comparison(tmp_path_factory, seed, weights):
    """Comparisons with the document, and contexts that contain it, change the client state."""
    weights = (weights[0] + 0.1, weights[1], 0.0, *weights[3:])
    for context, other, withheld, compared in two_worlds(tmp_path_factory.mktemp("worlds"), seed, weights, True):
        if withheld and not compared:
            assert context == other


@pytest.mark.slow
def test_depth_feature_changes_under_2_percent_of_contexts(tmp_path):
    """The similarity statistics include withheld chunks beyond the hits; the effect is mostly negligible."""
    pairs = differing = 0
    rng = np.random.default_rng(3)
    for seed in range(20):
        weights = tuple(rng.choice([0.3, 1.0, 3.0], 6))
        for context, other, withheld, _ in two_worlds(tmp_path, seed, weights, False):
            pairs += withheld
            differing += withheld and context != other
    assert pairs > 60
    assert differing / pairs < 0.02


def test_context_equality_with_the_sqlite_index(make, tmp_path):
    """The document is removed from the index; the calibration is the same."""
    for i in (0, 11, 42):
        with_document, without_document = make(), make()
        asyncio.run(without_document.remove([f"d{i}"]))
        for text in (record(i), question_about(i), HELD[2 * i].text, decoyed(i, 2), HELD[2 * i + 1].text):
            context, verdict = ask(with_document, text)
            assert f"d{i}" in verdict.evidence["withheld"]
            assert context == ask(without_document, text)[0]
