"""Differential privacy of quorum answers: noise, accounting, budgets, and an empirical attack on the bound."""

import asyncio
import json
import math
import os
import random
import signal
import sys
import time
import traceback
from contextlib import closing
from dataclasses import replace
from importlib.metadata import EntryPoint
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate import config as configuration
from casemate import plugins
from casemate.app import open_app
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.doctor import examine
from casemate.errors import BackendError, CasemateError, ConfigError
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.quorum.bounds import break_glass_advantage
from casemate.guard.defenses.quorum.keywords import Word
from casemate.guard.defenses.quorum.ledger import Ledger
from casemate.guard.defenses.quorum.privacy import PrivateHistogram
from casemate.guard.defenses.quorum.private_answers import PrivateAnswers
from casemate.guard.guard import Guard
from casemate.maths.stats import clopper_pearson
from casemate.rag.pipeline import Rag
from casemate.redteam.campaigns.own import OwnSystem
from casemate.redteam.campaigns.workers import TargetFactory
from casemate.redteam.lab.caching import CachedGenerator
from casemate.system import ReadOnlyEventStore
from casemate.types import UNKNOWN, Document, Hit, Query, QuotaGrant, Retrieval, SimilarityStats
from tests.fakes import BagOfWords, Memory, Parrot
from tests.unit.monitor_stores import fresh_url

NO_GROUPS = frozenset[str]()
QUESTION = "When did the Sydney bridge open?"
PHI = NormalDist().cdf


def texts(count):
    """Distinct texts that state the same two keywords, 1932 and steel."""
    return [
        f"The Sydney bridge did open in 1932 with steel near {' '.join(f'own{i}x{j}' for j in range(12))}."
        for i in range(count)
    ]


def hits(count, **fields):
    return tuple(Hit(Document(f"d{i}", t, **fields), 0.8 - i / 10_000) for i, t in enumerate(texts(count)))


def ask(quorum, found, question=QUESTION, **client):
    retrieval = Retrieval(found, SimilarityStats(100, 0.0, 0.1), True, frozenset(h.document.id for h in found))
    return asyncio.run(quorum.on_retrieve(Query(question, groups=NO_GROUPS, **client), retrieval))


def text_of(outcome):
    (hit,) = outcome.value.hits
    return hit.document.text


def private(store, **options):
    return Quorum(store=store, **({"epsilon": 8.0, "words": 5} | options))


# Noise and accounting


@pytest.mark.parametrize(
    ("epsilon", "words", "sigma", "even", "likely"),
    [(8, 5, 1.38, 7.6, 9.3), (2, 5, 4.62, 23.0, 28.9), (8, 8, 1.74, 9.5, 11.7), (2, 8, 5.85, 29.3, 36.8)],
)
def test_noise_and_supporters_equal_reference_values(epsilon, words, sigma, even, likely):
    """Reference: analytic Gaussian with delta 5e-6, and the supporters for a release probability of .5 and .9."""
    found = PrivateHistogram.of(epsilon, 1e-5, words)
    assert found.sigma == pytest.approx(sigma, abs=0.005)
    assert found.threshold == pytest.approx(even, abs=0.05)
    assert found.threshold + found.sigma * NormalDist().inv_cdf(0.9) == pytest.approx(likely, abs=0.05)
    assert found.probability(round(even * 2)) > 0.9


def exact_epsilon(histogram, keywords, delta):
    """Epsilon at delta by the privacy loss distributions of dp-accounting, composed over keywords."""
    from dp_accounting.pld import privacy_loss_distribution

    one = privacy_loss_distribution.from_gaussian_mechanism(histogram.sigma, value_discretization_interval=1e-3)
    return one.self_compose(keywords).get_epsilon_for_delta(delta)


def renyi_epsilon(histogram, keywords, delta):
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 200))
    return RdpAccountant(orders).compose(GaussianDpEvent(histogram.sigma), keywords).get_epsilon(delta)


@pytest.mark.parametrize(("epsilon", "words", "answers"), [(8, 5, 1), (2, 5, 3), (1, 8, 10)])
def test_epsilon_of_the_budget_equals_that_of_two_other_accountants(epsilon, words, answers):
    found = PrivateHistogram.of(epsilon, 1e-5, words, answers)
    assert exact_epsilon(found, found.most, 5e-6) == pytest.approx(epsilon, rel=0.01)
    assert epsilon <= renyi_epsilon(found, found.most, 5e-6) < 1.25 * epsilon  # less tight for Renyi orders
    assert exact_epsilon(found, 2 * found.most, 5e-6) > 1.2 * epsilon  # twice the budget exceeds epsilon


@given(st.floats(0.1, 20), st.floats(1e-9, 0.01), st.integers(1, 20), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_release_probability_of_a_single_unit_is_at_most_half_of_delta(epsilon, delta, words, answers):
    found = PrivateHistogram.of(epsilon, delta, words, answers)

    def released(keywords):
        return -math.expm1(keywords * math.log1p(-found.probability(1)))  # 1 - (1 - p) ** keywords loses digits

    assert released(found.most) <= delta / 2 * (1 + 1e-6)
    assert released(2 * found.most) > delta / 2


def world_epsilon(histogram, count, delta):
    """Exact smallest epsilon at delta for the releases of one answer: L words with this count, or one less.

    Naive: the number of released words is sufficient, so both distributions are binomial.
    """
    n = histogram.words

    def binomial(p):
        return [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]

    more = binomial(histogram.probability(count))
    less = binomial(histogram.probability(count - 1) if count > 1 else 0.0)
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        lost = max(
            sum(max(0.0, a - math.exp(middle) * b) for a, b in zip(p, q, strict=True))
            for p, q in ((more, less), (less, more))
        )
        low, high = (middle, high) if lost > delta else (low, middle)
    return high


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_exact_distributions_of_both_worlds_satisfy_the_bound(epsilon):
    found = PrivateHistogram.of(epsilon, 1e-5, 5)
    assert max(world_epsilon(found, count, 1e-5) for count in range(1, 60)) <= epsilon


def test_exact_distributions_violate_the_bound_with_too_little_noise():
    weak = replace(PrivateHistogram.of(2.0, 1e-5, 5), sigma=4.62 / 4)
    assert max(world_epsilon(weak, count, 1e-5) for count in range(1, 60)) > 2.0
    low = replace(PrivateHistogram.of(2.0, 1e-5, 5), threshold=3.0)
    assert world_epsilon(low, 1, 1e-5) > 2.0


def test_releases_have_the_stated_probabilities():
    found = PrivateHistogram.of(8.0, 1e-5, 5)
    for count in (5, 7, 8, 10, 16):
        units = [["amber"]] * count
        drawn = [found.release(units).get("amber", -1) for _ in range(4000)]
        for level in (0, 1):
            low, high = clopper_pearson(sum(x >= level for x in drawn), 4000, 0.9999)
            bound = found.threshold * 2**level
            assert low <= PHI((count - bound) / found.sigma) <= high


def test_randomness_comes_from_the_operating_system(monkeypatch):
    found, asked = PrivateHistogram.of(8.0, 1e-5, 5), []
    monkeypatch.setattr("secrets.randbits", lambda bits: asked.append(bits) or 0)
    assert found.release([["amber"]]) != {}  # the smallest draw releases everything
    assert asked == [128]


def test_probability_of_rare_releases_is_precise():
    """Far below tau the CDF of the standard library has no correct digit."""
    found = PrivateHistogram.of(0.5, 1e-9, 8, 30)
    exact = -math.expm1(math.log1p(-5e-10) / 240)
    assert found.probability(1) == pytest.approx(exact, rel=1e-9)


def test_no_unit_contributes_more_than_l_keywords():
    found = PrivateHistogram.of(8.0, 1e-5, 2)
    with pytest.raises(ValueError, match="more than 2"):
        found.release([["a", "b", "c"]])


def test_bounds_on_attackers_equal_those_of_gaussian_differential_privacy():
    """Compares with numerical integration for a Gaussian shift of mu."""
    found = PrivateHistogram.of(2.0, 1e-5, 5)
    grid = [x / 1000 for x in range(-8000, 8000)]
    density = NormalDist().pdf
    advantage = sum(max(0.0, density(x - found.mu) - density(x)) for x in grid) / 1000
    auc = sum(density(x - found.mu) * PHI(x) for x in grid) / 1000
    assert found.advantage == pytest.approx(advantage, abs=1e-4)
    assert found.auc == pytest.approx(auc, abs=1e-4)


# The defense


def test_answer_contains_statements_of_many_units_and_not_of_one():
    store = Memory()
    outcome = ask(private(store), (*hits(40), Hit(Document("other", "Minutes of another meeting."), 0.7)))
    assert "1932" in text_of(outcome) and "own" not in text_of(outcome)
    evidence = outcome.verdict.evidence
    assert evidence["stating"] == 40 and evidence["charged"] == 200 and evidence["without_budget"] == 0
    spent = [used for name, (used, *_) in store.tallies.items() if " latest " not in name]
    assert spent == [5] * 40
    assert text_of(ask(private(Memory()), hits(1))) == UNKNOWN


def test_lists_all_released_keywords_without_the_limit_of_phrases():
    words = [f"{name} steel" for name in ("amber", "brook", "cedar", "delta", "ember", "fjord")]
    held = [f"The Sydney bridge did open with {' and '.join(words)} own{i}." for i in range(40)]
    found = tuple(Hit(Document(f"d{i}", text), 0.8) for i, text in enumerate(held))
    text = text_of(ask(private(Memory(), words=8), found, "What did the Sydney bridge open with?"))
    assert all(name in text.lower() for name in ("amber", "brook", "cedar", "delta", "ember", "fjord", "steel"))


def test_uses_all_units_above_the_floor_so_none_displaces_another():
    found = hits(60)
    assert ask(private(Memory(), units=3), found).verdict.evidence["units"] == 60
    retrieval = Retrieval(found, SimilarityStats(100, 0.0, 0.1), False, frozenset(h.document.id for h in found))
    assert asyncio.run(private(Memory()).on_retrieve(Query(QUESTION), retrieval)).more
    assert not asyncio.run(
        private(Memory()).on_retrieve(
            Query(QUESTION), replace(retrieval, hits=(*found, Hit(Document("low", "x"), 0.1)))
        )
    ).more


def test_unit_contributes_to_as_many_answers_per_period_as_its_budget_covers(monkeypatch):
    store, found, day = Memory(), hits(40), 86_400
    charged = []
    for at in (0, 1, 29, 30):  # in days; a period begins at 0
        monkeypatch.setattr("casemate.guard.defenses.quorum.ledger.time.time", lambda at=at: (30_000 + at) * day)
        charged.append(ask(private(store, answers=2), found).verdict.evidence["charged"])
    assert charged == [200, 200, 0, 200]
    assert private(store, answers=2).private.histogram == PrivateHistogram.of(8.0, 1e-5, 5, 2)


def test_unit_without_budget_does_not_contribute():
    store, found = Memory(), hits(40)
    assert "1932" in text_of(ask(private(store), found))
    other = ask(private(store), found, "In which year did the Sydney bridge open?")
    assert text_of(other) == UNKNOWN and other.verdict.evidence["without_budget"] == 40


@pytest.mark.parametrize("days", [-31, -62, -3000])
def test_clock_that_is_set_back_resets_no_budget(days, monkeypatch):
    store, found = Memory(), hits(40)
    ask(private(store), found)
    spent = private(store).private.ledger.spent()
    earlier = time.time() + days * 86_400
    monkeypatch.setattr("casemate.guard.defenses.quorum.ledger.time.time", lambda: earlier)
    assert private(store).private.ledger.spent() == spent == [5] * 40
    assert ask(private(store), found).verdict.evidence["charged"] == 0
    assert ask(private(ReadOnlyEventStore(store)), found).verdict.evidence["charged"] == 0
    ask(private(store), hits(1, metadata={"subject": "Ito"}), tenant="other")  # an earlier latest period
    assert sorted(private(store).private.ledger.spent()) == [5] * 41


def test_repeated_question_has_the_same_answer_without_a_charge():
    store = Memory()
    quorum, found = private(store, answers=10), hits(9)  # release probability near one half
    first = ask(quorum, found)
    spent = dict(store.tallies)
    for question in (QUESTION, f"  {QUESTION.upper()} "):
        again = ask(quorum, found, question)
        assert text_of(again) == text_of(first) and again.verdict.evidence["repeated"]
    assert store.tallies == spent
    assert text_of(ask(quorum, hits(60))) == text_of(first)  # a repeated answer must not depend on the collection


@pytest.mark.parametrize("client", [{"labels": frozenset({"hr"})}, {"tenant": "other"}])
def test_clients_with_different_permissions_do_not_share_answers(client):
    quorum = private(Memory(), answers=10)
    ask(quorum, hits(40))
    assert "repeated" not in ask(quorum, hits(40), **client).verdict.evidence


def test_all_sources_of_a_metadata_value_share_one_budget():
    store = Memory()
    quorum = private(store, unit_keys=("subject",))
    first, second = hits(2, metadata={"subject": "Ito"})
    assert ask(quorum, (first,)).verdict.evidence["charged"] == 5
    other = ask(quorum, (second,), "How old is the Sydney bridge that did open?")
    assert other.verdict.evidence["charged"] == 0
    assert other.verdict.evidence["without_budget"] == 1


def test_verdict_contains_model_calls_and_epsilon():
    evidence = ask(private(Memory(), writer=Parrot()), hits(3)).verdict.evidence
    assert (evidence["calls"], evidence["epsilon"]) == (3, 8.0)


def test_unentitled_clients_share_the_budget_and_tenants_do_not():
    store, found = Memory(), hits(40)
    ask(private(store), found, client="one")
    assert ask(private(store), found, client="two").verdict.evidence["charged"] == 0
    assert ask(private(store), found, client="one", tenant="other").verdict.evidence["charged"] == 200


def test_read_only_store_reads_budgets_and_charges_none():
    store, found = Memory(), hits(40)
    reading = private(ReadOnlyEventStore(store))
    assert ask(reading, found).verdict.evidence["charged"] == 200 and not store.tallies
    ask(private(store), found)
    assert ask(private(ReadOnlyEventStore(store)), found).verdict.evidence["charged"] == 0


class UnavailableLedger(Memory):
    def acquire(self, wanted):
        raise BackendError("the ledger is down", backend="memory", retryable=True)


@pytest.mark.parametrize("store", [UnavailableLedger(), None], ids=["unreachable", "missing"])
@pytest.mark.parametrize("on_error", ["closed", "open"])
def test_releases_nothing_without_the_ledger_and_only_the_verdict_has_the_reason(store, on_error, tmp_path):
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        guard = Guard(
            Rag(BagOfWords(), index, Parrot()),
            [private(store, floor=0.0)],
            on_error=on_error,
            audience=AudiencePolicy("quorum"),
        )
        asyncio.run(guard.add([hit.document for hit in hits(40)]))
        answer = asyncio.run(guard.ask(Query(QUESTION, groups=NO_GROUPS)))
    assert answer.text == "" and not answer.retrieval.hits  # the fake generator repeats its context
    assert "ledger is down" in str(answer.verdicts) or "no event store" in str(answer.verdicts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0; it must be above 0"),
        ({"epsilon": float("inf")}, "must be above 0 and finite"),
        ({"epsilon": 1.0, "delta": 0.0}, "delta=0.0; it must be above 0 and below 1"),
        ({"epsilon": 1.0, "answers": 0}, "answers=0"),
        ({"epsilon": 1.0, "break_glass": 1}, "set one of them only"),
    ],
)
def test_rejects_invalid_options(options, message):
    with pytest.raises(ConfigError, match=message):
        Quorum(**options)


# Break-glass


def make_quorum(store, **options):
    return Quorum(store=store, jitter=1, **({"break_glass": 2} | options))


def test_budget_limits_single_unit_answers_over_all_clients():
    store, (only, *_) = Memory(), hits(3)
    found = []
    for i in range(4):
        outcome = ask(make_quorum(store), (only,), f"{QUESTION}{'!' * i}", client=f"client {i}")
        found.append((text_of(outcome) != UNKNOWN, outcome.verdict.evidence["break_glass"]))
    opened = {"sources": ["d0"], "granted": True}
    assert found == [(True, opened)] * 2 + [(False, opened | {"granted": False})] * 2
    assert "1932" in text_of(ask(make_quorum(Memory()), (only,)))


def test_single_unit_answer_is_from_the_nearest_unit_with_a_statement():
    store, (only,) = Memory(), hits(1)
    silent = Hit(Document("other", "Minutes of another meeting."), 0.9)
    outcome = ask(make_quorum(store), (silent, only))
    assert outcome.verdict.evidence["break_glass"] == {"sources": ["d0"], "granted": True}
    assert text_of(ask(make_quorum(store), (silent,))) == UNKNOWN and make_quorum(
        store
    ).single_unit_answers.spent() == [1]


def test_sources_with_a_common_metadata_value_share_single_unit_answers():
    quorum = make_quorum(Memory(), break_glass=1, unit_keys=("subject",))
    first, second = hits(2, metadata={"subject": "Ito"})
    assert "1932" in text_of(ask(quorum, (first,)))
    assert text_of(ask(quorum, (second,))) == UNKNOWN


def test_break_glass_is_off_by_default():
    store, (only, *_) = Memory(), hits(1)
    outcome = ask(make_quorum(store, break_glass=0), (only,))
    assert text_of(outcome) == UNKNOWN and "break_glass" not in outcome.verdict.evidence and not store.tallies


def test_quorum_answer_charges_no_single_unit_answer():
    store = Memory()
    assert "1932" in text_of(ask(make_quorum(store, support=2), hits(2)))
    assert not store.tallies


def test_unit_without_remaining_single_unit_answers_is_not_replaced_by_the_next():
    store, found = Memory(), hits(2)
    apart = (found[0], Hit(Document("e", "The Sydney bridge did open after a strike of welders."), 0.7))
    for i in range(2):
        ask(make_quorum(store), apart, f"{QUESTION}{'!' * i}")
    assert text_of(ask(make_quorum(store), apart)) == UNKNOWN
    assert len([name for name in store.tallies if " latest " not in name]) == 1


@pytest.mark.parametrize("store", [UnavailableLedger(), None], ids=["unreachable", "missing"])
def test_single_unit_answers_require_the_ledger(store):
    with pytest.raises(CasemateError):
        ask(make_quorum(store), hits(1))


def test_doctor_and_campaigns_report_the_budgets(tmp_path, monkeypatch):
    entry = EntryPoint("bag", "tests.fakes:BagOfWords", "casemate.embedder")
    monkeypatch.setattr(plugins, "entry_points", lambda group, name=None: [entry] * (group == entry.group))
    monkeypatch.chdir(tmp_path)
    for options, detail in (
        ({"break_glass": 3}, "1 of 4 sources have given one: the attacker's advantage (true minus false positives) is"),
        ({"epsilon": 8.0, "words": 5}, "1 of 4 sources have spent some of their 5 keywords, 1 all"),
    ):
        raw = {
            "rag": {"generator": "extractive", "embedder": "bag", "index": {"use": "sqlite", "path": "index.db"}},
            "guard": {"defenses": [{"use": "quorum", "floor": 0.3, "jitter": 1, **options}]},
        }
        raw["guard"]["audience"] = {"unentitled": "quorum"}
        (tmp_path / "casemate.yaml").write_text(json.dumps(raw))
        other = [Document(f"o{i}", f"minutes of meeting {i}") for i in range(3)]
        with open_app() as app:
            asyncio.run(app.guard.add([hits(1)[0].document, *other]))
            asyncio.run(app.guard.ask(Query(QUESTION, groups=NO_GROUPS)))
            facts = OwnSystem(
                app, Rag(BagOfWords(), app.index, CachedGenerator(Parrot(), None, "")), "default", tmp_path, {}
            )
        (found,) = [f for f in examine(None) if f.name == "budgets"]
        assert detail in found.detail
        assert found.ok is (None if "break_glass" in options else True)
        assert any("the budgets of units" in line for line in facts.not_tested)

    def unreadable(store, prefix):
        raise BackendError("the budgets are unreadable", backend="sql", retryable=True)

    monkeypatch.setattr(SqlEventStore, "quota_usage", unreadable)
    (found,) = [f for f in examine(None) if f.name == "budgets"]
    assert found.ok is False and "unreadable" in found.detail


@pytest.mark.parametrize("options", [{"epsilon": 8.0, "words": 5}, {"break_glass": 1}])
def test_lab_uses_separate_budgets(options, tmp_path):
    section = {"defenses": [{"use": "quorum", "floor": 0.3, "jitter": 1, **options}]}
    section |= {"audience": {"unentitled": "quorum"}}
    store = {"use": "sql", "path": str(tmp_path / "events.db")}
    config = configuration.parse({"guard": section, "store": store})
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        bare = Rag(BagOfWords(), index, Parrot())
        asyncio.run(Guard(bare, []).add([hit.document for hit in hits(40 if "epsilon" in options else 1)]))
        guard = TargetFactory(config, tmp_path, bare, None).guard()
        assert guard.defenses[0].compares_clients and not Quorum(jitter=1).compares_clients
        query = Query(QUESTION, groups=NO_GROUPS)
        first, second = (asyncio.run(guard.ask(replace(query, text=f"{QUESTION}{i * '?'}"))) for i in (0, 1))
        fresh = asyncio.run(TargetFactory(config, tmp_path, bare, None).guard().ask(query))
    assert "1932" in first.text and second.text == UNKNOWN and "1932" in fresh.text
    assert not (tmp_path / "events.db").exists()


def test_advantage_of_break_glass_is_the_share_of_units_with_an_answer():
    """Simulates an attacker that predicts membership for answered units and guesses for the others."""
    rng = random.Random(1)
    opened = set(range(30))
    hits_ = sum(rng.randrange(100) in opened or rng.random() < 0.5 for _ in range(20_000)) / 20_000
    assert hits_ - 0.5 <= break_glass_advantage(30, 100) + 0.01
    certain = sum(rng.randrange(100) in opened for _ in range(20_000)) / 20_000  # no guesses: no false positive
    assert certain == pytest.approx(break_glass_advantage(30, 100), abs=0.02)
    assert break_glass_advantage(3, 2) == 1.0  # some sources were removed afterwards
    assert break_glass_advantage(3, 0) == 1.0 and break_glass_advantage(0, 0) == 0.0


# Empirical attack on the bound


async def run_inline(function, *given):
    return function(*given)


class UnlimitedBudget(Memory):
    """Charges nothing."""

    def acquire(self, wanted):
        return [QuotaGrant(w.amount, 0) for w in wanted]


async def released(histogram, most, store, member, questions):
    """Number of keywords of the unit released in one session; each question has different other units."""
    said = [Word(f"word{j}") for j in range(histogram.words)]
    others = round(histogram.threshold) - 1
    answers = PrivateAnswers(histogram, Ledger(store, "dp", most, 30))
    seen = 0
    for q in range(questions):
        names = [[("source", f"other{q}-{i}")] for i in range(others)] + [[("source", "target")]] * member
        answer, _ = await answers.ask(Query(f"question {q}"), [said] * len(names), names)
        seen += answer.text.count("word")
    return seen


def refuted_epsilon(histogram, most, store=Memory, questions=16, sessions=500):
    """A lower bound on epsilon with error probability 1e-4: one half selects the event, the other measures it."""

    async def run():
        return [
            [await released(histogram, most, store(), member, questions) for _ in range(sessions)]
            for member in (True, False)
        ]

    inside, outside = asyncio.run(run())
    half = sessions // 2

    def bound(a, b, at, level):
        low = clopper_pearson(sum(x >= at for x in a), len(a), level)[0]
        high = clopper_pearson(sum(x >= at for x in b), len(b), level)[1]
        return math.log(max(low - histogram.delta, 1e-9) / high)

    at = max(sorted({*inside[:half]}), key=lambda at: bound(inside[:half], outside[:half], at, 0.5))
    return bound(inside[half:], outside[half:], at, 0.9999)


@pytest.fixture
def seeded(monkeypatch):
    monkeypatch.setattr("secrets.randbits", random.Random(5).getrandbits)
    monkeypatch.setattr("casemate.guard.defenses.quorum.ledger.asyncio.to_thread", run_inline)


ATTACKED = (1.0, 0.1, 4)
"""A large delta: few supporters are sufficient, so the attack has power."""


@pytest.mark.slow
def test_attack_does_not_refute_the_bound(seeded):
    histogram = PrivateHistogram.of(*ATTACKED)
    assert refuted_epsilon(histogram, histogram.most) <= 1.0


def test_attack_refutes_the_bound_with_too_little_noise(seeded):
    histogram = PrivateHistogram.of(*ATTACKED)
    assert refuted_epsilon(histogram, histogram.most, questions=1) <= 1.0
    weak = replace(histogram, sigma=histogram.sigma / 5)
    assert refuted_epsilon(weak, weak.most, questions=1) > 1.0


@pytest.mark.slow
def test_attack_refutes_the_bound_without_charged_budgets(seeded):
    histogram = PrivateHistogram.of(*ATTACKED)
    assert refuted_epsilon(histogram, histogram.most, UnlimitedBudget) > 1.0


@pytest.mark.slow
def test_attack_refutes_the_bound_with_unbounded_contributions(seeded):
    wide = replace(PrivateHistogram.of(*ATTACKED), words=15)
    assert refuted_epsilon(wide, 10_000) > 1.0


# Budgets in the event store

url = pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])(fresh_url)
TARGET = [([("source", "target"), ("author", "ito")], 1)]


@pytest.mark.parametrize("budget", [7])
def test_spent_budgets_persist_over_a_restart_and_are_shared(url, budget):
    with closing(SqlEventStore(url)) as one, closing(SqlEventStore(url)) as two:
        ledgers = [Ledger(store, "dp", budget, 30) for store in (one, two)]
        assert asyncio.run(ledgers[0].spend("t", [([("source", "a")], 5)])) == [5]
        assert asyncio.run(ledgers[1].spend("t", [([("source", "a")], 5), ([("source", "b")], 5)])) == [2, 5]
        assert asyncio.run(ledgers[1].spend("u", [([("source", "a")], 5)])) == [5]
        assert asyncio.run(replace(ledgers[1], purpose="break-glass").spend("t", [([("source", "a")], 5)])) == [5]
    with closing(SqlEventStore(url)) as three:
        again = Ledger(three, "dp", budget, 30)
        assert asyncio.run(again.spend("t", [([("source", "a"), ("source", "c")], 5)])) == [0]
        assert sorted(again.spent()) == [5, 5, 5, 7]
        assert asyncio.run(again.spend("t", [])) == []
    assert Ledger(None, "dp", budget, 30).spent() == []


def answer_until_refused(url, budget, said, charge_late):
    """Simulates a gateway: charges one keyword, then writes one byte as its answer."""
    with closing(SqlEventStore(url)) as store:
        ledger = Ledger(store, "dp", budget, 30)
        while True:
            if charge_late:
                os.write(said, b"x")
            try:
                granted = asyncio.run(ledger.spend("t", TARGET))
            except BackendError:
                continue  # another process locked the file for seconds; nothing was charged
            if granted == [0]:
                return
            if not charge_late:
                os.write(said, b"x")


def gateway(url, budget, said, charge_late=False):
    child = os.fork()
    if child:
        return child
    try:
        answer_until_refused(url, budget, said, charge_late)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def answers_of_killed_gateways(url, budget, path, kills, charge_late=False):
    """Number of answers of three gateways, some of which are killed and replaced, until the budget is used."""
    SqlEventStore(url).close()  # migrates the schema once
    rng, codes = random.Random(3), []
    with path.open("ab", buffering=0) as said:
        running = [gateway(url, budget, said.fileno(), charge_late) for _ in range(3)]
        for _ in range(kills):
            time.sleep(rng.uniform(0.02, 0.1))
            killed = running.pop(0)
            os.kill(killed, signal.SIGKILL)
            os.waitpid(killed, 0)
            running.append(gateway(url, budget, said.fileno(), charge_late))
        codes = [os.waitpid(child, 0)[1] for child in running]
    assert codes == [0, 0, 0]
    with closing(SqlEventStore(url)) as store:
        assert Ledger(store, "dp", budget, 30).spent() == [budget]
    return path.stat().st_size


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_gateways_never_exceed_the_budget(url, tmp_path):
    """Each kill loses at most one pending charge."""
    said = answers_of_killed_gateways(url, 400, tmp_path / "said", 5)
    assert 400 - 5 <= said <= 400


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_gateway_that_charges_after_the_answer_exceeds_the_budget(tmp_path):
    assert answers_of_killed_gateways(f"sqlite:///{tmp_path}/e.db", 50, tmp_path / "said", 1, charge_late=True) > 50
