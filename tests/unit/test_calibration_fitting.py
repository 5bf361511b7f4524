"""Fitting of calibrations: use of questions and documents, recall, and insufficient data."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

import numpy as np
import pytest

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.calibration import file as calibration
from casemate.guard.calibration import fitting as module
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.fitting import (
    MIN_DOCUMENTS,
    MIN_LOG,
    QUESTIONS_PER_ATTACK,
    RATES,
    REWORDED,
    CalibrationSettings,
    calibrate,
    recall_of_probes,
    reworded,
    whole_documents,
)
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.calibration import Calibration
from casemate.maths.stats import Estimate, proportion, share_interval
from casemate.protocols import MembershipAttack
from casemate.rag.pipeline import Rag
from casemate.redteam.attacks.direct import Direct
from casemate.types import Document, Probe, Query
from tests.fakes import BagOfWords, Parrot

VOCABULARY = [
    a + b + c for a in ("ba", "ce", "di", "fo", "gu", "ha") for b in "lmnrst" for c in ("a", "ek", "in", "or")
]


def corpus(count, seed=0, chunks=1):
    """Documents with ``chunks`` chunks of three sentences."""
    rng, made = np.random.default_rng(seed), []
    for i in range(count):
        for j in range(chunks):
            text = " ".join(" ".join(rng.choice(VOCABULARY, 9)).capitalize() + "." for _ in range(3))
            title = " ".join(rng.choice(VOCABULARY, 3))
            made.append(Document(f"d{i}#{j}", text, title=title, source=f"d{i}", digest="x"))
    return made


def sample_questions(count, seed=9):
    """Benign questions with few words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(VOCABULARY, int(rng.integers(2, 6)))) + f" {i}?" for i in range(count)]


@pytest.fixture
def system(tmp_path):
    opened = []

    def make(stored):
        index = SqliteIndex(tmp_path / f"{len(opened)}.db")
        rag = Rag(BagOfWords(), index, Parrot())
        opened.append(index)
        index.add(stored, rag.embedder.embed([d.content for d in stored]))
        return rag

    yield make
    for index in opened:
        index.close()


SMALL = CalibrationSettings(k=3, documents=40, questions=240)


def fit(rag, attacks=None, log=(), settings=SMALL, **options):
    defense = Mirabel(embedder=rag.embedder, index=rag.index)
    return asyncio.run(calibrate(defense, rag, attacks or {}, log, settings, **options))


@pytest.fixture
def fit_inputs(monkeypatch):
    """Records the data used for weights and distribution: texts of benign questions, sources of probes."""
    seen = {}
    real_fit, real_law = module._Fitter.fit_weights, module._Fitter.add_distribution
    real_scores = module._Fitter.probe_scores

    def fit(work, harmless, probes):
        seen["weights"], seen["fitted"] = [q.text for q in harmless], {p.source for p in probes}
        return real_fit(work, harmless, probes)

    def law(work, blank, judged):
        seen["law"] = [q.text for q in judged]
        return real_law(work, blank, judged)

    def probe_scores(work, ready, probes):
        seen["recall"] = {p.source for p in probes}
        return real_scores(work, ready, probes)

    for name, spy in (("fit_weights", fit), ("add_distribution", law), ("probe_scores", probe_scores)):
        monkeypatch.setattr(module._Fitter, name, spy)
    return seen


def test_log_is_split_between_weights_and_distribution(system, fit_inputs):
    log = sample_questions(MIN_LOG + 20)
    found = fit(system(corpus(60)), log=log)
    assert sorted(fit_inputs["weights"] + fit_inputs["law"]) == sorted(log)
    assert len(fit_inputs["weights"]) == len(fit_inputs["law"]) == len(found.benign) == 110
    assert found.source == "220 questions of a query log"


def test_short_log_is_used_for_the_distribution_only(system, fit_inputs):
    log = sample_questions(MIN_LOG - 1)
    found = fit(system(corpus(60)), log=log)
    assert fit_inputs["law"] == log
    assert not set(fit_inputs["weights"]) & set(log)
    assert len(fit_inputs["weights"]) == 240
    assert len(found.benign) == MIN_LOG - 1


@pytest.mark.parametrize("questions", [240, 60])
def test_no_synthetic_question_is_used_for_weights_and_distribution(system, fit_inputs, questions):
    """Also if there are few: a distribution of the questions that fit the weights would be too optimistic."""
    found = fit(system(corpus(60)), settings=replace(SMALL, questions=questions))
    assert len(fit_inputs["weights"]) == len(fit_inputs["law"]) == len(found.benign) == questions // 2
    assert found.source == f"{questions} synthetic questions"


def test_long_log_is_sampled(system, fit_inputs):
    log = sample_questions(900)
    found = fit(system(corpus(60)), log=log)
    drawn = fit_inputs["weights"] + fit_inputs["law"]
    assert len(drawn) == len(set(drawn)) == 240
    assert set(drawn) < set(log)
    assert not set(drawn) <= set(log[:400])  # from the whole log
    assert found.source == "240 questions of a query log"


def test_recall_and_weights_use_different_documents(system, fit_inputs):
    fit(system(corpus(60)), {"direct": Direct()})
    assert len(fit_inputs["fitted"]) == len(fit_inputs["recall"]) == 20
    assert not fit_inputs["fitted"] & fit_inputs["recall"]


def test_calibration_is_deterministic_except_salt_and_time(system):
    rag = system(corpus(50))
    first, again = fit(rag, {"direct": Direct()}), fit(rag, {"direct": Direct()})
    assert replace(first, salt="", at="") == replace(again, salt="", at="")
    assert first.salt != again.salt
    assert min(len(first.salt), len(again.salt)) >= 32
    assert fit(rag, settings=replace(SMALL, seed=8)).benign != first.benign


def test_calibration_records_the_properties_of_its_system(system):
    rag = system(corpus(50, chunks=2))
    found = fit(rag)
    assert (found.fingerprint, found.documents, found.k, found.features) == ("bag-of-words", 100, 3, FEATURES)
    assert found.staleness("bag-of-words", 100) == ""
    assert min(found.weights) >= 0
    assert found.jitter > 0
    assert found.benign == tuple(sorted(found.benign))
    assert min(found.benign) < found.doubt < max(found.benign)
    assert found.notes["seed"] == 7
    assert (found.notes["documents"], found.notes["judged"]) == (40, 120)


def test_index_is_not_changed(system):
    rag = system(corpus(50))
    before = (dict(rag.index.digests()), rag.index.moments().scatter.tobytes())
    fit(rag, {"direct": Direct()})
    assert (dict(rag.index.digests()), rag.index.moments().scatter.tobytes()) == before


def test_recall_table_has_every_attack_and_rate(system, tmp_path):
    found = fit(system(corpus(60)), {"direct": Direct(), "silent": AsksNothing()})
    table = found.notes["recall"]
    assert set(table) == {"direct", REWORDED}  # an attack without questions has no recall
    for rows in table.values():
        assert list(rows) == [str(r) for r in RATES]
        for row in rows.values():
            assert set(row) == {"question", "document"}
            assert all(isinstance(r, Estimate) and 0 <= r.low <= r.value <= r.high <= 1 for r in row.values())
            assert row["document"].value >= row["question"].value
        shares = [row["question"].value for row in rows.values()]
        assert shares == sorted(shares)
    assert table["direct"]["0.1"]["question"].value > 0.9
    calibration.write_calibration(tmp_path / "c.json", "default", found)
    read = calibration.read_calibrations(tmp_path / "c.json")["default"]
    assert replace(read, notes={}) == replace(found, notes={})
    assert read.notes == json.loads(json.dumps(found.notes))


def test_recall_below_the_smallest_attainable_rate_is_zero(system):
    """119 benign questions allow a rate of 1 in 120, as ``attainable_rate`` reports. Rows below it are 0."""
    found = fit(system(corpus(60)), {"direct": Direct()}, log=sample_questions(119))
    assert found.threshold(0.005) == np.inf
    assert np.isfinite(found.threshold(0.01))
    assert found.attainable_rate(0.005) == pytest.approx(1 / 120)
    rows = found.notes["recall"]["direct"]
    assert rows["0.005"]["question"].value == 0 < rows["0.01"]["question"].value


def test_the_recall_of_questions_has_documents_as_the_sampling_unit():
    probes = {"direct": [[9.0] * 4, *[[0.0] * 4] * 19]}
    benign = tuple(map(float, range(9)))  # the threshold of a rate of 1 in 10 is 8
    made = Calibration("", 20, 5, (), (), (), (), benign, "", notes={"probes": probes})
    found = recall_of_probes(made)["direct"]["0.1"]
    assert found["document"] == proportion(1, 20)
    assert found["question"][1:] == share_interval(0.05, 19)  # 20 less 1 for their mean


def posts(count):
    """Documents with a user's question and an answer."""
    made = []
    for i, d in enumerate(corpus(count)):
        first, *rest = d.text.split(". ")
        text = f"Patient: {first} {i}?\nDoctor: {'. '.join(rest)}"
        made.append(replace(d, text=text))
    return made


def test_questions_in_documents_are_used_as_benign_questions(system, fit_inputs):
    rag, settings = system(posts(200)), CalibrationSettings(documents=60, questions=160)
    found = fit(rag, settings=settings)
    assert found.labels == ("Patient",) and "120 of them from the documents" in found.source
    mirabel, threshold = Mirabel(), found.threshold(found.attainable_rate(0.02))

    def flagged(text):
        (vector,) = rag.embedder.embed([text])
        retrieval = rag.index.search(vector, 5 + mirabel.lookahead + 2 * mirabel.max_hidden_sources)
        query = Query(text, k=5)
        return max(asyncio.run(mirabel.score(query, retrieval, found)).values()) > threshold

    parts = [d.text.removeprefix("Patient: ").split("\nDoctor: ") for d in posts(200)[150:]]
    assert sum(flagged(question) for question, _ in parts) <= 3
    assert sum(flagged(answer) for _, answer in parts) >= 48
    assert sum(flagged(f"{question} {answer}") for question, answer in parts) >= 48


def test_a_log_replaces_the_questions_in_documents(system):
    found = fit(system(posts(60)), log=sample_questions(40))
    assert found.labels == ("Patient",) and found.source == "40 questions of a query log"


def test_documents_without_questions_have_no_labels(system):
    assert fit(system(corpus(40))).labels == ()


def test_fewer_than_99_questions_cannot_guarantee_1_percent(system):
    found = fit(system(corpus(60)), log=sample_questions(98))
    assert (len(found.benign), found.notes["judged"]) == (98, 98)
    assert found.threshold(0.01) == np.inf
    assert found.attainable_rate(0.01) == pytest.approx(1 / 99)
    assert np.isfinite(fit(system(corpus(60)), log=sample_questions(99)).threshold(0.01))


def test_jitter_is_sampled_per_document(system, monkeypatch):
    """As in the guard: the largest of three equally close documents counts, on average .75 of the width."""
    plain = {}

    async def score(mirabel, query, retrieval, learnt):
        plain[query.text] = len(query.text) % 7 + len(set(query.text)) / 10
        return dict.fromkeys("abc", plain[query.text])

    monkeypatch.setattr(Mirabel, "score", score)
    log = sample_questions(400)
    found = fit(system(corpus(30)), log=log, settings=replace(SMALL, questions=400))
    law = [plain[text] for text in log[1::2]]
    assert found.jitter == pytest.approx(0.3 * np.std(law))
    assert (np.mean(found.benign) - np.mean(law)) / found.jitter == pytest.approx(0.75, abs=0.06)


def is_empty(found: Calibration) -> bool:
    return found.benign == () and set(found.weights) == {0.0} and found.score((9.0,) * 6) == 0


@pytest.mark.parametrize("count", [1, MIN_DOCUMENTS - 1])
def test_too_few_documents_give_an_empty_calibration_with_a_reason(system, count, tmp_path):
    found = fit(system(corpus(count, chunks=3)))
    assert is_empty(found)
    why = f"too few sources ({count}; a calibration needs at least {MIN_DOCUMENTS})"
    assert found.source == f"{why}; split long files into one file per record, or add documents"
    calibration.write_calibration(tmp_path / "c.json", "default", found)
    assert calibration.read_calibrations(tmp_path / "c.json")["default"] == found


def test_minimum_number_of_documents_is_sufficient(system):
    assert not is_empty(fit(system(corpus(MIN_DOCUMENTS))))


def test_documents_of_other_tenants_are_not_used(system):
    rag = system(corpus(40))
    stored = corpus(MIN_DOCUMENTS - 1, seed=5)
    rag.index.add(stored, rag.embedder.embed([d.content for d in stored]), "small")
    assert is_empty(fit(rag, settings=replace(SMALL, tenant="small")))
    assert fit(rag, settings=replace(SMALL)).documents == 40


@pytest.mark.parametrize("log", [[""], [" \n", "\t"] * 150])
def test_log_without_questions_gives_an_empty_calibration(system, log):
    found = fit(system(corpus(40)), log=log)
    assert is_empty(found)
    assert "no benign question retrieves its document" in found.source


def test_blank_lines_of_a_log_are_skipped(system):
    log = sample_questions(150)
    found = fit(system(corpus(40)), log=[*log[:70], "", *log[70:], "  "])
    assert len(found.benign) == 150


@pytest.mark.parametrize("text", ["the of and to", "!!! ... ???", "患者于三月入院", "17 4 1999"])
def test_documents_without_words_can_be_calibrated(system, text):
    found = fit(system([Document(f"x{i}", f"{text} {'.' * i}", digest="x") for i in range(30)]))
    assert np.isfinite(found.benign).all()
    assert np.isfinite(found.weights).all()


@dataclass
class AsksNothing(MembershipAttack):
    """Asks no questions."""

    paper: ClassVar[str] = "none"

    async def prepare(self, candidate, rng):
        return Probe(())


@dataclass
class AsksTenQuestions(MembershipAttack):
    """Asks ten questions and records the studied texts."""

    studied: list = field(default_factory=list)
    paper: ClassVar[str] = "none"

    def study(self, texts):
        self.studied += texts

    async def prepare(self, candidate, rng):
        return Probe(tuple(f"{candidate.text} {i}" for i in range(10)))


def test_questions_per_attack_and_document_are_limited(system, monkeypatch):
    retrieved_questions, real = [], module._Fitter.retrieve

    async def record_questions(work, *groups):
        retrieved_questions.extend(chain.from_iterable(groups))
        return await real(work, *groups)

    monkeypatch.setattr(module._Fitter, "retrieve", record_questions)
    attack, counts, totals = AsksTenQuestions(), [], []

    def steps(title, total):
        totals.append(total)
        return nullcontext(counts.append)

    fit(system(corpus(60)), {"talkative": attack}, steps=steps)
    assert totals == [sum(counts)]
    by_document = [source for kind, source, _ in retrieved_questions if kind == "talkative"]
    assert len(by_document) == 40 * QUESTIONS_PER_ATTACK
    assert {by_document.count(source) for source in by_document} == {QUESTIONS_PER_ATTACK}
    assert len(attack.studied) == 40
    assert len({text for kind, _, text in retrieved_questions if kind == "talkative"}) == len(
        by_document
    )  # drawn without replacement
    assert sum(count for count in counts if count > 1) == len(retrieved_questions)  # embedded
    assert counts.count(1) == 2 * 120 + 120  # scored: benign questions twice, probes of the other half once


def test_sources_with_many_chunks_are_scored(system):
    """After forty chunks of one source, the next documents have much lower scores."""
    alike = [replace(d, id=f"{d.id}.{i}", text=f"{d.text} Part {i}.") for d in corpus(25) for i in range(40)]
    found = fit(system(alike), settings=replace(SMALL, documents=24, questions=60))
    assert len(found.benign) == 30
    assert np.isfinite(found.benign).all()


def test_feature_constant_among_benign_questions_has_no_extreme_weight(system):
    """Questions of two words share no four-word phrase, so the standard deviation of that feature is 0."""
    rng = np.random.default_rng(3)
    found = fit(system(corpus(60)), {"direct": Direct()}, log=[" ".join(rng.choice(VOCABULARY, 2)) for _ in range(240)])
    phrases = FEATURES.index("phrases")
    assert found.centre[phrases] == 0
    assert found.scale[phrases] > 0.1
    assert max(found.weights) < 100
    assert found.notes["recall"]["direct"]["0.05"]["question"].value > 0.9


def test_whole_documents_are_joined_from_chunks(system):
    stored = corpus(12, chunks=3)
    whole = whole_documents(system(stored).index, "default", 100, seed=0)
    assert sorted(d.source for d in whole) == sorted({d.source for d in stored})
    for document in whole:
        parts = [d for d in stored if d.source == document.source]
        assert document.text == "\n".join(d.text for d in parts)
        assert (document.id, document.title) == (document.source, parts[0].title)


def test_sample_of_documents_is_deterministic_for_a_seed(system):
    index = system(corpus(30)).index
    drawn = [[d.source for d in whole_documents(index, "default", 10, seed)] for seed in (0, 0, 1)]
    assert len(set(drawn[0])) == 10
    assert drawn[0] == drawn[1] != drawn[2]


def test_reworded_text_is_shorter_and_uses_the_original_words():
    document = replace(corpus(1)[0], text=" ".join(d.text for d in corpus(4)))
    for seed in range(20):
        long, short = reworded(document, np.random.default_rng(seed))
        words = set(document.content.replace(".", "").lower().split())
        for text in (long, short):
            assert set(text.lower().replace(".", "").replace(":", "").replace("?", "").split()) <= words
        assert len(short.split()) < len(long.split()) < len(document.text.split())
