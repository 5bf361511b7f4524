"""What is learnt from which questions, how much that is worth, and that nothing is learnt from too little."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from casemate import calibration
from casemate.attacks.direct import Direct
from casemate.backends.sqlite import SqliteIndex
from casemate.calibration import Calibration
from casemate.closeness import FEATURES
from casemate.lab import calibrate as module
from casemate.lab.calibrate import (
    ENOUGH,
    FEWEST,
    PER_ATTACK,
    RATES,
    REWORDED,
    Settings,
    calibrate,
    monotone_logistic,
    reworded,
    whole_documents,
)
from casemate.protocols import MembershipAttack
from casemate.rag import Rag
from casemate.stats import Rate
from casemate.types import Document, Probe
from tests.fakes import BagOfWords, Parrot

VOCABULARY = [
    a + b + c for a in ("ba", "ce", "di", "fo", "gu", "ha") for b in "lmnrst" for c in ("a", "ek", "in", "or")
]


class Bag(BagOfWords):
    """The same, computed once for each word."""

    _direction = cache(BagOfWords._direction)
    __hash__ = object.__hash__


def corpus(count, seed=0, chunks=1):
    """Documents of three sentences of their own, in so many chunks each."""
    rng, made = np.random.default_rng(seed), []
    for i in range(count):
        for j in range(chunks):
            text = " ".join(" ".join(rng.choice(VOCABULARY, 9)).capitalize() + "." for _ in range(3))
            title = " ".join(rng.choice(VOCABULARY, 3))
            made.append(Document(f"d{i}#{j}", text, title=title, source=f"d{i}", digest="x"))
    return made


def asked(count, seed=9):
    """Harmless questions of few words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(VOCABULARY, int(rng.integers(2, 6)))) + f" {i}?" for i in range(count)]


@pytest.fixture
def system(tmp_path):
    opened = []

    def make(held):
        index = SqliteIndex(tmp_path / f"{len(opened)}.db")
        rag = Rag(Bag(), index, Parrot())
        opened.append(index)
        index.add(held, rag.embedder.embed([d.content for d in held]))
        return rag

    yield make
    for index in opened:
        index.close()


SMALL = Settings(k=3, documents=40, questions=240)


def fit(rag, attacks=None, log=(), settings=SMALL, **options):
    return asyncio.run(calibrate(rag, attacks or {}, log, settings, **options))


@pytest.fixture
def spied(monkeypatch):
    """What the weights and the law were learnt from: texts of harmless questions, and sources of probes."""
    seen = {}
    real_fit, real_law, real_recall = module._Work.fit, module._Work.law, module._Work.recall

    def fit(work, harmless, probes):
        seen["weights"], seen["fitted"] = [q.text for q in harmless], {p.source for p in probes}
        return real_fit(work, harmless, probes)

    def law(work, blank, judged):
        seen["law"] = [q.text for q in judged]
        return real_law(work, blank, judged)

    def recall(work, ready, probes):
        seen["recall"] = {p.source for p in probes}
        return real_recall(work, ready, probes)

    for name, spy in (("fit", fit), ("law", law), ("recall", recall)):
        monkeypatch.setattr(module._Work, name, spy)
    return seen


def test_half_of_a_log_gives_the_weights_and_the_other_half_the_law(system, spied):
    log = asked(ENOUGH + 20)
    found = fit(system(corpus(60)), log=log)
    assert sorted(spied["weights"] + spied["law"]) == sorted(log)
    assert len(spied["weights"]) == len(spied["law"]) == len(found.benign) == 110
    assert found.source == "220 questions of a log"


def test_a_short_log_is_kept_whole_for_the_law(system, spied):
    log = asked(ENOUGH - 1)
    found = fit(system(corpus(60)), log=log)
    assert spied["law"] == log
    assert not set(spied["weights"]) & set(log)
    assert len(spied["weights"]) == 240
    assert len(found.benign) == ENOUGH - 1


@pytest.mark.parametrize("questions", [240, 60])
def test_no_made_question_serves_for_both(system, spied, questions):
    """However few there are: a law of questions that the weights were fitted on would promise too much."""
    found = fit(system(corpus(60)), settings=replace(SMALL, questions=questions))
    assert len(spied["weights"]) == len(spied["law"]) == len(found.benign) == questions // 2
    assert found.source == f"{questions} questions made from the corpus"


def test_of_a_long_log_so_many_are_drawn(system, spied):
    log = asked(900)
    found = fit(system(corpus(60)), log=log)
    drawn = spied["weights"] + spied["law"]
    assert len(drawn) == len(set(drawn)) == 240
    assert set(drawn) < set(log)
    assert not set(drawn) <= set(log[:400])  # from all of it
    assert found.source == "240 questions of a log"


def test_the_documents_that_tell_the_recall_did_not_make_the_weights(system, spied):
    fit(system(corpus(60)), {"direct": Direct()})
    assert len(spied["fitted"]) == len(spied["recall"]) == 20
    assert not spied["fitted"] & spied["recall"]


def test_the_same_system_gives_the_same_but_for_salt_and_time(system):
    rag = system(corpus(50))
    first, again = fit(rag, {"direct": Direct()}), fit(rag, {"direct": Direct()})
    assert replace(first, salt="", at="") == replace(again, salt="", at="")
    assert first.salt != again.salt
    assert min(len(first.salt), len(again.salt)) >= 32
    assert fit(rag, settings=replace(SMALL, seed=8)).benign != first.benign


def test_it_describes_what_it_was_made_with(system):
    rag = system(corpus(50, chunks=2))
    found = fit(rag)
    assert (found.fingerprint, found.documents, found.k, found.features) == ("bag-of-words", 100, 3, FEATURES)
    assert found.stale("bag-of-words", 100) == ""
    assert min(found.weights) >= 0
    assert found.jitter > 0
    assert found.benign == tuple(sorted(found.benign))
    assert min(found.benign) < found.doubt < max(found.benign)
    assert found.notes["seed"] == 7
    assert (found.notes["documents"], found.notes["judged"]) == (40, 120)


def test_nothing_is_written_to_the_index(system):
    rag = system(corpus(50))
    before = (dict(rag.index.digests()), rag.index.moments().scatter.tobytes())
    fit(rag, {"direct": Direct()})
    assert (dict(rag.index.digests()), rag.index.moments().scatter.tobytes()) == before


def test_the_recall_table_has_every_attack_and_rate(system, tmp_path):
    found = fit(system(corpus(60)), {"direct": Direct(), "silent": Silent()})
    table = found.notes["recall"]
    assert set(table) == {"direct", REWORDED}  # who asks nothing has no recall
    for rows in table.values():
        assert list(rows) == [str(r) for r in RATES]
        for row in rows.values():
            assert set(row) == {"question", "document"}
            assert all(isinstance(r, Rate) and 0 <= r.low <= r.value <= r.high <= 1 for r in row.values())
            assert row["document"].value >= row["question"].value
        shares = [row["question"].value for row in rows.values()]
        assert shares == sorted(shares)
    assert table["direct"]["0.1"]["question"].value > 0.9
    calibration.write(tmp_path / "c.json", "default", found)
    read = calibration.read(tmp_path / "c.json")["default"]
    assert replace(read, notes={}) == replace(found, notes={})
    assert read.notes == json.loads(json.dumps(found.notes))


def test_recall_below_the_smallest_rate_that_can_be_promised_is_none(system):
    """119 harmless questions: 1 in 120. The owner is told by ``attainable``, and the rows are empty, not guessed."""
    found = fit(system(corpus(60)), {"direct": Direct()}, log=asked(119))
    assert found.threshold(0.005) == np.inf
    assert np.isfinite(found.threshold(0.01))
    assert found.attainable(0.005) == pytest.approx(1 / 120)
    rows = found.notes["recall"]["direct"]
    assert rows["0.005"]["question"].value == 0 < rows["0.01"]["question"].value


def test_fewer_than_99_questions_cannot_promise_one_in_a_hundred(system):
    found = fit(system(corpus(60)), log=asked(98))
    assert (len(found.benign), found.notes["judged"]) == (98, 98)
    assert found.threshold(0.01) == np.inf
    assert found.attainable(0.01) == pytest.approx(1 / 99)
    assert np.isfinite(fit(system(corpus(60)), log=asked(99)).threshold(0.01))


def test_each_document_of_a_context_has_its_own_share_of_the_jitter(system, monkeypatch):
    """As the guard draws it: of three that are equally close, the luckiest counts, .75 of the width on average."""
    plain = {}

    async def score(mirabel, query, retrieval, learnt):
        plain[query.text] = len(query.text) % 7 + len(set(query.text)) / 10
        return dict.fromkeys("abc", plain[query.text])

    monkeypatch.setattr(module.Mirabel, "score", score)
    log = asked(400)
    found = fit(system(corpus(30)), log=log, settings=replace(SMALL, questions=400))
    law = [plain[text] for text in log[1::2]]
    assert found.jitter == pytest.approx(0.3 * np.std(law))
    assert (np.mean(found.benign) - np.mean(law)) / found.jitter == pytest.approx(0.75, abs=0.06)


def nothing(found: Calibration) -> bool:
    return found.benign == () and set(found.weights) == {0.0} and found.score((9.0,) * 6) == 0


@pytest.mark.parametrize("count", [1, FEWEST - 1])
def test_of_too_few_documents_nothing_is_learnt_and_it_says_so(system, count, tmp_path):
    found = fit(system(corpus(count, chunks=3)))
    assert nothing(found)
    assert found.source == f"{count} documents, too few to fit a guard (at least {FEWEST} are needed)"
    calibration.write(tmp_path / "c.json", "default", found)
    assert calibration.read(tmp_path / "c.json")["default"] == found


def test_just_enough_documents_are_enough(system):
    assert not nothing(fit(system(corpus(FEWEST))))


def test_another_tenants_documents_do_not_count(system):
    rag = system(corpus(40))
    held = corpus(FEWEST - 1, seed=5)
    rag.index.add(held, rag.embedder.embed([d.content for d in held]), "small")
    assert nothing(fit(rag, settings=replace(SMALL, tenant="small")))
    assert fit(rag, settings=replace(SMALL)).documents == 40


@pytest.mark.parametrize("log", [[""], [" \n", "\t"] * 150])
def test_of_a_log_without_questions_nothing_is_learnt(system, log):
    found = fit(system(corpus(40)), log=log)
    assert nothing(found)
    assert "no questions that could be asked" in found.source


def test_blank_lines_of_a_log_are_passed_over(system):
    log = asked(150)
    found = fit(system(corpus(40)), log=[*log[:70], "", *log[70:], "  "])
    assert len(found.benign) == 150


@pytest.mark.parametrize("text", ["the of and to", "!!! ... ???", "患者于三月入院", "17 4 1999"])
def test_documents_without_words_do_not_stop_it(system, text):
    found = fit(system([Document(f"x{i}", f"{text} {'.' * i}", digest="x") for i in range(30)]))
    assert np.isfinite(found.benign).all()
    assert np.isfinite(found.weights).all()


@dataclass
class Silent(MembershipAttack):
    """Asks nothing."""

    paper: ClassVar[str] = "none"

    async def prepare(self, candidate, rng):
        return Probe(())


@dataclass
class Talkative(MembershipAttack):
    """Asks ten questions, and remembers what it studied."""

    studied: list = field(default_factory=list)
    paper: ClassVar[str] = "none"

    def study(self, texts):
        self.studied += texts

    async def prepare(self, candidate, rng):
        return Probe(tuple(f"{candidate.text} {i}" for i in range(10)))


def test_of_an_attack_with_many_questions_a_few_of_each_document_are_looked_at(system, monkeypatch):
    looked, real = [], module._Work.look

    async def look(work, questions):
        looked.extend(questions)
        return await real(work, questions)

    monkeypatch.setattr(module._Work, "look", look)
    attack, counts = Talkative(), []
    fit(system(corpus(60)), {"talkative": attack}, progress=counts.append)
    by_document = [source for kind, source, _ in looked if kind == "talkative"]
    assert len(by_document) == 40 * PER_ATTACK
    assert {by_document.count(source) for source in by_document} == {PER_ATTACK}
    assert len(attack.studied) == 40
    assert len({text for kind, _, text in looked if kind == "talkative"}) == len(by_document)  # drawn, none twice
    assert sum(counts) == len(looked)


def test_sources_of_many_chunks_are_judged_all_the_same(system):
    """A question that finds forty chunks of one source has the next documents further down."""
    alike = [replace(d, id=f"{d.id}.{i}", text=f"{d.text} Part {i}.") for d in corpus(25) for i in range(40)]
    found = fit(system(alike), settings=replace(SMALL, documents=24, questions=60))
    assert len(found.benign) == 30
    assert np.isfinite(found.benign).all()


def test_a_figure_that_no_harmless_question_has_does_not_swallow_the_others(system):
    """Questions of two words share no phrase of four: the deviation there is 0, and divided by it all else is noise."""
    rng = np.random.default_rng(3)
    found = fit(system(corpus(60)), {"direct": Direct()}, log=[" ".join(rng.choice(VOCABULARY, 2)) for _ in range(240)])
    phrases = FEATURES.index("phrases")
    assert found.centre[phrases] == 0
    assert found.scale[phrases] > 0.1
    assert max(found.weights) < 100
    assert found.notes["recall"]["direct"]["0.05"]["question"].value > 0.9


def test_whole_documents_are_put_together_from_their_chunks(system):
    held = corpus(12, chunks=3)
    whole = whole_documents(system(held).index, "default", 100, seed=0)
    assert sorted(d.source for d in whole) == sorted({d.source for d in held})
    for document in whole:
        parts = [d for d in held if d.source == document.source]
        assert document.text == "\n".join(d.text for d in parts)
        assert (document.id, document.title) == (document.source, parts[0].title)


def test_so_many_documents_are_drawn_and_the_same_for_a_seed(system):
    index = system(corpus(30)).index
    drawn = [[d.source for d in whole_documents(index, "default", 10, seed)] for seed in (0, 0, 1)]
    assert len(set(drawn[0])) == 10
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_reworded_text_is_shorter_and_in_its_own_words():
    document = replace(corpus(1)[0], text=" ".join(d.text for d in corpus(4)))
    for seed in range(20):
        long, short = reworded(document, np.random.default_rng(seed))
        words = set(document.content.replace(".", "").lower().split())
        for text in (long, short):
            assert set(text.lower().replace(".", "").replace(":", "").replace("?", "").split()) <= words
        assert len(short.split()) < len(long.split()) < len(document.text.split())


def loss(t, X, y, w, penalty):
    return float(w @ np.logaddexp(0, -y * (X @ t[1:] + t[0])) + penalty / 2 * t[1:] @ t[1:])


def data(slopes, n=400, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, len(slopes)))
    y = np.where(X @ np.array(slopes) + rng.logistic(size=n) > 0.3, 1.0, -1.0)
    return X, y, rng.uniform(0.5, 1.5, n)


@pytest.mark.parametrize("penalty", [1e-3, 1.0, 30.0])
def test_without_a_bound_in_force_it_is_logistic_regression(penalty):
    X, y, w = data([1.5, 0.7, 2.0])
    reference = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000).fit(X, y, sample_weight=w)
    assert reference.coef_.min() > 0
    assert monotone_logistic(X, y, w, penalty) == pytest.approx(reference.coef_[0], abs=1e-3)


def test_what_speaks_for_harmlessness_gets_no_weight_and_the_rest_is_fitted_without_it():
    X, y, w = data([1.5, -1.0, 2.0, -0.3])
    found = monotone_logistic(X, y, w, 0.1)
    reference = LogisticRegression(C=10, tol=1e-10, max_iter=10_000).fit(X[:, [0, 2]], y, sample_weight=w)
    assert found[[1, 3]] == pytest.approx(0, abs=1e-9)
    assert min(found) >= 0
    assert found[[0, 2]] == pytest.approx(reference.coef_[0], abs=1e-3)


def test_no_other_weights_of_their_sign_are_better():
    rng, (X, y, w) = np.random.default_rng(1), data([1.0, -1.0, 0.5, 0.0])
    best = monotone_logistic(X, y, w, 0.1)
    intercepts = np.linspace(-3, 3, 601)
    least = min(loss(np.r_[b, best], X, y, w, 0.1) for b in intercepts)
    for _ in range(50):
        other = np.maximum(best + rng.normal(scale=0.2, size=4), 0)
        assert min(loss(np.r_[b, other], X, y, w, 0.1) for b in intercepts[::10]) >= least - 1e-6


def test_figures_far_out_are_no_fault():
    X, y, w = data([1.0, 2.0])
    assert np.isfinite(monotone_logistic(X * 1e4, y, w)).all()
    assert np.isfinite(monotone_logistic(np.zeros((10, 2)), np.r_[np.ones(5), -np.ones(5)], np.ones(10))).all()
