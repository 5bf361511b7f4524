import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest

from casemate import stats
from casemate.backends.sqlite import SqliteIndex
from casemate.errors import CapabilityError, DataError
from casemate.guard import Guard
from casemate.lab import datasets
from casemate.lab.audit import Without, two_worlds, utility
from casemate.lab.experiment import Plan
from casemate.lab.results import Audit
from casemate.protocols import Defense
from casemate.types import Action, Document, Outcome, Query, Verdict
from tests.fakes import BagOfWords, documents
from tests.lab_setting import Hide, Name, Shorten, Sulk, setting, verdict


@pytest.fixture
def lab(tmp_path):
    with setting(tmp_path) as made:
        yield made


def chunked(count, pieces, seed=0):
    whole = documents(count, seed)
    return [Document(f"{d.id}#{i}", f"{d.text} part{i}", source=d.id) for d in whole for i in range(pieces)]


@pytest.mark.parametrize("pieces", [1, 4])
def test_the_view_is_the_index_after_a_real_removal(tmp_path, pieces):
    held = chunked(60, pieces)
    E = BagOfWords().embed([d.content for d in held])
    index = SqliteIndex(tmp_path / "i.db")
    index.open("bag-of-words", 64)
    index.add(held, E)
    index.add(held[:8], E[:8], "acme")
    names = [f"d{i}" for i in range(0, 60, 7)]
    before = datasets.stored(index, names)
    queries = np.concatenate([E[:: 2 * pieces], BagOfWords().embed(["amber", "birch cedar"])])
    for name in names:
        view = Without(index, name, before[name])
        seen = [(view.search(q, k), view.search(q, k, "acme")) for q in queries for k in (1, 5, 300)]
        told = (view.digests(), view.tenants(), [d.id for ds, _ in view.scan() for d in ds], view.check())
        moments = view.moments()
        gone = [d for d in held if d.source == name]
        vectors = E[[held.index(d) for d in gone]]
        assert index.remove([name]) == pieces
        real = [(index.search(q, k), index.search(q, k, "acme")) for q in queries for k in (1, 5, 300)]
        for (found, other), (expected, same) in zip(seen, real, strict=True):
            assert found.hits == expected.hits
            assert found.background.n == expected.background.n
            assert found.background.mean == pytest.approx(expected.background.mean, rel=1e-12, abs=1e-15)
            assert found.background.std == pytest.approx(expected.background.std, rel=1e-12)
            assert other == same
        assert told == (index.digests(), index.tenants(), [d.id for ds, _ in index.scan() for d in ds], [])
        assert np.allclose(moments.scatter, index.moments().scatter, rtol=0, atol=1e-12)
        index.add(gone, vectors)
        before = datasets.stored(index, names)
    index.close()


def test_the_view_of_the_only_source_is_empty(tmp_path):
    held = chunked(1, 3)
    index = SqliteIndex(tmp_path / "i.db")
    index.open("bag-of-words", 64)
    E = BagOfWords().embed([d.content for d in held])
    index.add(held, E)
    view = Without(index, "d0", datasets.stored(index, ["d0"])["d0"])
    assert view.search(E[0], 5).hits == ()
    assert view.search(E[0], 5).background.n == 0
    assert view.tenants() == []
    assert list(view.scan()) == []
    index.close()


def test_the_view_is_only_read(lab):
    view = Without(lab.index, "d0", next(iter(lab.held.values())))
    E = BagOfWords().embed(["x"])
    for change in (
        lambda: view.add([Document("x", "x")], E),
        lambda: view.remove(["d1"]),
        view.rebuild,
        view.clear,
    ):
        with pytest.raises(CapabilityError, match="only read"):
            change()
    view.open("another", 3)
    view.warm()
    view.close()
    assert lab.index.search(E[0], 1).hits


def audited(lab, *make_defenses, attacks=None, plan=None, **options):
    """Runs the campaign against the guard, then the audit with guards that are made anew."""

    def make(index):
        return lab.guard(*(make_defense() for make_defense in make_defenses), index=index)

    plan = plan or Plan(waits=(), **options)
    experiment = lab.experiment(attacks, {"off": lab.rag, "on": make(lab.index)}, plan)
    asyncio.run(experiment.run())
    steps = []
    worlds = asyncio.run(two_worlds(lab.index, make, experiment.sessions("on"), lab.held, plan, steps.append))
    assert sum(steps) == len(list(experiment.sessions("on")))
    return worlds


@pytest.mark.parametrize("identity", ["candidate", "question", "campaign"])
def test_a_guard_that_fills_the_gap_leaves_no_trace(lab, identity):
    worlds = audited(lab, lambda: Hide(lab.secret), identity=identity)
    assert worlds.audit == Audit(40, 0, stats.rate(0, 40))
    assert (worlds.asked, worlds.exposed, worlds.differences) == (40, 0, ())


def test_a_guard_that_leaves_the_gap_open_is_found(lab):
    worlds = audited(lab, lambda: Shorten(frozenset({lab.split.members[0].source})))
    assert (worlds.audit.pairs, worlds.audit.differing) == (2, 2)
    assert worlds.audit.rate == stats.rate(2, 2)
    for number, difference in enumerate(worlds.differences):
        assert (difference.attack, difference.number) == ("name", number)
        assert difference.candidate == lab.split.members[0].source
        assert len(difference.context) == 4
        assert len(difference.without) == 5
        assert difference.candidate not in difference.without


def test_a_guard_that_remembers_is_found_in_the_question_after(lab):
    secret = frozenset({lab.split.members[0].source})
    worlds = audited(lab, lambda: Sulk(secret))
    assert (worlds.audit.pairs, worlds.audit.differing) == (2, 1)
    assert worlds.differences[0].number == 1
    assert worlds.differences[0].context == ()
    asked_anew = audited(lab, lambda: Sulk(secret), identity="question")
    assert asked_anew.audit.differing == 0  # each question is a new client's


@dataclass
class Law(Hide):
    """Hides what is secret, and the best of the rest as well where there is an odd number of documents."""

    async def on_retrieve(self, query, retrieval):
        found = await super().on_retrieve(query, retrieval)
        odd = retrieval.background.n % 2
        return Outcome(replace(found.value, hits=found.value.hits[odd:]), found.verdict)


def test_a_guard_whose_decision_depends_on_the_background_is_found(lab):
    worlds = audited(lab, lambda: Law(lab.secret))
    assert worlds.audit.differing == worlds.audit.pairs == 40
    assert len(worlds.differences) == 5


def test_what_the_guard_lets_through_is_exposed_and_not_compared(lab):
    half = frozenset(d.source for d in lab.split.members[:10])
    worlds = audited(lab, lambda: Hide(half))
    assert (worlds.asked, worlds.exposed, worlds.audit.pairs) == (40, 20, 20)


@dataclass
class Crowd(Hide):
    """Hides what is secret, but from a client's first question: there it shows in its place what would else come later.

    So the first answer tells whether the secret was among the hits, though nothing is withheld.
    """

    def __post_init__(self):
        super().__post_init__()
        self.known = set()

    async def on_retrieve(self, query, retrieval):
        found = await super().on_retrieve(query, retrieval)
        if query.client in self.known or not found.verdict.hidden:
            return found
        self.known.add(query.client)
        return Outcome(replace(found.value, hits=found.value.hits[1:]), None)


def test_a_member_who_changes_a_context_and_is_not_withheld_ends_the_comparison_and_is_counted(lab):
    secret = frozenset({lab.split.members[0].source})
    worlds = audited(lab, lambda: Crowd(secret))
    assert (worlds.swayed, worlds.audit.pairs, worlds.audit.differing) == (1, 0, 0)
    asked_anew = audited(lab, lambda: Hide(secret))
    assert (asked_anew.swayed, asked_anew.audit.pairs) == (0, 2)


def test_a_guard_that_withholds_nothing_gives_nothing_to_compare(lab):
    worlds = audited(lab, Defense)
    assert (worlds.audit.pairs, worlds.audit.differing, worlds.audit.rate) == (0, 0, (0.0, 0.0, 1.0))
    assert worlds.exposed == worlds.asked == 40


@dataclass
class Talk(Hide):
    """Remembers in what it sees of the answer: a second answer to a client is made from nothing."""

    def __post_init__(self):
        super().__post_init__()
        self.answered = set()

    async def on_retrieve(self, query, retrieval):
        found = await super().on_retrieve(query, retrieval)
        return Outcome(replace(found.value, hits=()) if query.client in self.answered else found.value, found.verdict)

    async def on_answer(self, query, answer):
        if any(v.hidden for v in answer.verdicts):
            self.answered.add(query.client)
        return Outcome(answer)


def test_a_guard_that_acts_on_answers_is_asked_for_them(lab):
    worlds = audited(lab, lambda: Talk(frozenset({lab.split.members[0].source})))
    assert (worlds.audit.pairs, worlds.audit.differing) == (2, 1)


def test_questions_are_not_answered_where_no_defense_looks_at_answers(lab):
    def make(index):
        guard = lab.guard(Hide(lab.secret), index=index)
        guard.generator = None
        return guard

    experiment = lab.experiment(targets={"on": lab.guard(Hide(lab.secret))})
    asyncio.run(experiment.run())
    worlds = asyncio.run(two_worlds(lab.index, make, experiment.sessions("on"), lab.held, Plan()))
    assert worlds.audit.pairs == 40


def test_questions_that_are_none_have_no_context_in_either_world(lab):
    class Shout(Name):
        async def prepare(self, candidate, rng):
            probe = await super().prepare(candidate, rng)
            return replace(probe, questions=("x" * 30_000, *probe.questions))

    worlds = audited(lab, lambda: Hide(lab.secret), attacks={"shout": Shout()})
    assert (worlds.asked, worlds.audit.pairs, worlds.audit.differing) == (60, 40, 0)


def test_a_member_nobody_knows_is_an_error(lab):
    sessions = [("name", Document("nobody", "text"), ())]
    with pytest.raises(DataError, match="nobody"):
        asyncio.run(two_worlds(lab.index, lab.guard, sessions, lab.held, Plan()))


@dataclass
class Every(Defense):
    """Withholds from every so-manieth question, with or without an effect."""

    effect: bool = True
    count: int = 0

    async def on_retrieve(self, query, retrieval):
        self.count += 1
        if self.count % 4:
            return Outcome(retrieval, verdict(()))
        kept = retrieval.hits[1:] if self.effect else retrieval.hits
        return Outcome(replace(retrieval, hits=kept), Verdict("every", True, Action.HIDE, 1.0, 0.5, ("x",)))


@pytest.mark.parametrize(("effect", "changed"), [(True, 10), (False, 0)])
def test_utility_counts_what_is_flagged_and_what_is_answered_otherwise(lab, effect, changed):
    queries = [Query(f"amber only{i}") for i in range(40)]
    steps = []
    found = asyncio.run(utility(lab.rag, lab.guard(Every(effect)), queries, "made", steps.append))
    assert found.flagged == stats.rate(10, 40)
    assert found.answer_changed == stats.rate(changed, 40)
    assert (found.source, found.questions, sum(steps)) == ("made", 40, 40)


def test_in_observe_mode_a_guard_costs_nothing(lab):
    guard = Guard(lab.rag, [Every()], enforce=False)
    found = asyncio.run(utility(lab.rag, guard, [Query("amber")] * 8, "made"))
    assert (found.flagged.value, found.answer_changed.value) == (0, 0)


def test_utility_of_no_question_is_an_error(lab):
    queries = [Query("amber"), Query(" ")]
    assert asyncio.run(utility(lab.rag, lab.guard(), queries, "made")).questions == 1
    with pytest.raises(DataError, match="no harmless questions"):
        asyncio.run(utility(lab.rag, lab.guard(), [Query(" ")], "made"))
