import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import CapabilityError, DataError
from casemate.guard.audience import AudiencePolicy, EntitlementRule
from casemate.guard.guard import Guard
from casemate.maths import stats
from casemate.protocols import CalibratedDefense, Defense
from casemate.redteam.lab import datasets
from casemate.redteam.lab.benign import measure_utility
from casemate.redteam.lab.experiment import ExperimentPlan
from casemate.redteam.lab.judge import _audit_check
from casemate.redteam.lab.results import CheckStatus, TwoWorldAudit
from casemate.redteam.lab.two_world_audit import IndexWithout, two_world_audit
from casemate.types import Action, Document, Outcome, Query, Verdict
from tests.fakes import BagOfWords, documents
from tests.lab_setting import BlockAfterHit, Hide, Name, Shorten, setting, verdict


@pytest.fixture
def lab(tmp_path):
    with setting(tmp_path) as made:
        yield made


def chunked(count, pieces, seed=0):
    whole = documents(count, seed)
    return [Document(f"{d.id}#{i}", f"{d.text} part{i}", source=d.id) for d in whole for i in range(pieces)]


@pytest.mark.parametrize("pieces", [1, 4])
def test_view_without_a_source_equals_the_index_after_its_removal(tmp_path, pieces):
    held = chunked(60, pieces)
    E = BagOfWords().embed([d.content for d in held])
    index = SqliteIndex(tmp_path / "i.db")
    index.open("bag-of-words", 64)
    index.add(held, E)
    index.add(held[:8], E[:8], "acme")
    names = [f"d{i}" for i in range(0, 60, 12)]
    before = datasets.indexed_sources(index, names)
    queries = np.concatenate([E[:: 2 * pieces], BagOfWords().embed(["amber", "birch cedar"])])
    for name in names:
        view = IndexWithout(index, {name: before[name]})
        seen = [(view.search(q, k), view.search(q, k, "acme")) for q in queries for k in (1, 5, 300)]
        listed = (view.digests(), view.tenants(), [d.id for ds, _ in view.scan() for d in ds], view.check())
        moments = view.moments()
        gone = [d for d in held if d.source == name]
        vectors = E[[held.index(d) for d in gone]]
        assert index.remove([name]) == pieces
        real = [(index.search(q, k), index.search(q, k, "acme")) for q in queries for k in (1, 5, 300)]
        for (found, other), (expected, same) in zip(seen, real, strict=True):
            assert found.hits == expected.hits
            assert found.similarity_stats.n == expected.similarity_stats.n
            assert found.similarity_stats.mean == pytest.approx(expected.similarity_stats.mean, rel=1e-12, abs=1e-15)
            assert found.similarity_stats.std == pytest.approx(expected.similarity_stats.std, rel=1e-12)
            assert other == same
        assert listed == (index.digests(), index.tenants(), [d.id for ds, _ in index.scan() for d in ds], [])
        assert np.allclose(moments.scatter, index.moments().scatter, rtol=0, atol=1e-12)
        index.add(gone, vectors)
        before = datasets.indexed_sources(index, names)
    index.close()


def test_view_without_the_only_source_is_empty(tmp_path):
    held = chunked(1, 3)
    index = SqliteIndex(tmp_path / "i.db")
    index.open("bag-of-words", 64)
    E = BagOfWords().embed([d.content for d in held])
    index.add(held, E)
    view = IndexWithout(index, datasets.indexed_sources(index, ["d0"]))
    assert view.search(E[0], 5).hits == ()
    assert view.search(E[0], 5).similarity_stats.n == 0
    assert view.tenants() == []
    assert list(view.scan()) == []
    index.close()


def test_view_is_read_only(lab):
    view = IndexWithout(lab.index, dict([next(iter(lab.indexed.items()))]))
    E = BagOfWords().embed(["x"])
    for change in (
        lambda: view.add([Document("x", "x")], E),
        lambda: view.remove(["d1"]),
        view.rebuild,
        view.clear,
    ):
        with pytest.raises(CapabilityError, match="read-only"):
            change()
    view.open("another", 3)
    view.warm()
    view.close()
    assert lab.index.search(E[0], 1).hits


def audited(lab, *make_defenses, attacks=None, plan=None, **options):
    """Runs an experiment against the guard, then the audit with new guards."""

    def make(index):
        return lab.guard(*(make_defense() for make_defense in make_defenses), index=index)

    plan = plan or ExperimentPlan(waits=(), **options)
    experiment = lab.experiment(attacks, {"off": lab.rag, "on": make(lab.index)}, plan)
    asyncio.run(experiment.run())
    steps = []
    worlds = asyncio.run(
        two_world_audit(lab.index, make, experiment.member_sessions("on"), lab.indexed, plan, steps.append)
    )
    assert sum(steps) == len(list(experiment.member_sessions("on")))
    return worlds


@pytest.mark.parametrize("identity", ["candidate", "question", "campaign"])
def test_guard_that_refills_the_context_has_no_difference(lab, identity):
    worlds = audited(lab, lambda: Hide(lab.secret), identity=identity)
    assert worlds.audit == TwoWorldAudit(40, 0, stats.proportion(0, 20))  # two questions about each of 20 members
    assert (worlds.asked, worlds.exposed, worlds.audit.differing) == (40, 0, 0)


def add_copy(lab):
    """Adds a copy of the first member with its words in another order; returns its name."""
    member = lab.split.members[0]
    copy = Document("copy", " ".join(reversed(member.text.split())))
    lab.index.add([copy], lab.embedder.embed([copy.content]))
    return copy.source


def test_guard_that_withholds_the_whole_unit_has_no_difference(lab):
    both = frozenset({lab.split.members[0].source, add_copy(lab)})
    worlds = audited(lab, lambda: Hide(both))
    assert (worlds.audit.pairs, worlds.audit.differing) == (2, 0)


def test_copy_in_the_context_counts_as_exposure_and_not_as_a_difference(lab):
    add_copy(lab)
    worlds = audited(lab, lambda: Hide(frozenset({lab.split.members[0].source})))
    assert (worlds.exposed, worlds.audit.pairs, worlds.audit.differing) == (40, 0, 0)


def test_detects_a_guard_that_does_not_refill_the_context(lab):
    worlds = audited(lab, lambda: Shorten(frozenset({lab.split.members[0].source})))
    assert (worlds.audit.pairs, worlds.audit.differing) == (2, 2)
    assert worlds.audit.rate == stats.proportion(1, 1)  # of one member


def test_detects_a_difference_in_a_separate_tenant(lab):
    inside = [d for d in lab.documents if d not in lab.split.nonmembers]
    lab.index.add(inside, lab.embedder.embed([d.content for d in inside]), "ward")
    worlds = audited(lab, lambda: Shorten(frozenset({lab.split.members[0].source})), tenant="ward")
    assert (worlds.audit.pairs, worlds.audit.differing) == (2, 2)


def test_detects_client_state_of_the_guard_in_the_next_question(lab):
    secret = frozenset({lab.split.members[0].source})
    worlds = audited(lab, lambda: BlockAfterHit(secret))
    assert (worlds.audit.pairs, worlds.audit.differing) == (2, 1)
    restarted = audited(lab, lambda: BlockAfterHit(secret), identity="question")
    assert restarted.audit.differing == 0  # each question has its own client


@dataclass
class DependsOnStatistics(Hide):
    """Hides the secret documents, and also the best other hit if the number of documents is odd."""

    async def on_retrieve(self, query, retrieval):
        found = await super().on_retrieve(query, retrieval)
        odd = retrieval.similarity_stats.n % 2
        return Outcome(replace(found.value, hits=found.value.hits[odd:]), found.verdict)


def test_detects_a_guard_that_depends_on_the_similarity_statistics(lab):
    worlds = audited(lab, lambda: DependsOnStatistics(lab.secret))
    assert worlds.audit.differing == worlds.audit.pairs == 40


def test_members_that_are_not_withheld_count_as_exposed_and_are_not_compared(lab):
    half = frozenset(d.source for d in lab.split.members[:10])
    worlds = audited(lab, lambda: Hide(half))
    assert (worlds.asked, worlds.exposed, worlds.audit.pairs) == (40, 20, 20)


@dataclass
class FirstQuestion(Hide):
    """Hides the secret documents; in a client's first question, it drops the best hit instead and reports no verdict.

    The first answer then reveals whether the secret was among the hits, although nothing is withheld.
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


def test_difference_without_a_withheld_member_ends_the_comparison_and_is_counted(lab):
    secret = frozenset({lab.split.members[0].source})
    worlds = audited(lab, lambda: FirstQuestion(secret))
    assert (worlds.ended_early, worlds.audit.pairs, worlds.audit.differing) == (1, 0, 0)
    restarted = audited(lab, lambda: Hide(secret))
    assert (restarted.ended_early, restarted.audit.pairs) == (0, 2)


@dataclass
class CalibratedHide(CalibratedDefense, Hide):
    """`Hide` with a calibration that is invalid for another number of chunks."""

    calibration: Path = Path("unused.json")
    significance: float | None = None
    name = "calibrated_hide"


def test_member_with_over_a_fifth_of_the_chunks_is_counted_and_not_compared(lab, monkeypatch):
    monkeypatch.setattr(
        "casemate.redteam.lab.two_world_audit.indexed_sources",
        lambda index, sources, tenant: {source: lab.indexed[source] for source in sources},
    )
    member = lab.split.members[0].source
    chunks = lab.index.moments().n
    own = lab.indexed[member]
    for count, expected in ((chunks // 5, 0), (chunks // 5 + 1, 1)):
        others = tuple(f"more-{i}" for i in range(count - len(own.ids)))
        lab.indexed[member] = own._replace(ids=(*own.ids, *others))
        worlds = audited(lab, lambda: CalibratedHide(lab.secret), attacks=None)
        assert worlds.audit.not_compared == expected
        assert worlds.audit.pairs == 40 - 2 * expected
    lab.indexed[member] = own._replace(ids=(*own.ids, *others))
    assert audited(lab, lambda: Hide(lab.secret)).audit.not_compared == 0  # no defense is calibrated


@dataclass
class HideFromMany(Hide):
    """`Hide` without a decision in a small index."""

    min_documents: int = 0

    async def on_retrieve(self, query, retrieval):
        few = retrieval.similarity_stats.n < self.min_documents
        return Outcome(retrieval) if few else await super().on_retrieve(query, retrieval)


def test_member_that_a_defense_needs_for_its_minimum_of_chunks_is_not_compared(lab):
    chunks = lab.index.moments().n
    size = max(len(source.ids) for source in lab.indexed.values())
    enough = audited(lab, lambda: HideFromMany(lab.secret, chunks - size)).audit
    assert (enough.pairs, enough.differing, enough.not_compared) == (40, 0, 0)
    few = audited(lab, lambda: HideFromMany(lab.secret, chunks), lambda: HideFromMany(min_documents=1)).audit
    assert (few.pairs, few.differing, few.not_compared) == (0, 0, 20)
    check = _audit_check(few)
    assert check.status is CheckStatus.INCONCLUSIVE
    assert (
        check.reason.startswith("Nothing was compared. 20 sessions were not compared: ")
        and "--nonmembers" in check.reason
    )


def test_guard_that_withholds_nothing_gives_no_comparisons(lab):
    worlds = audited(lab, Defense)
    assert (worlds.audit.pairs, worlds.audit.differing, worlds.audit.rate) == (0, 0, (0.0, 0.0, 1.0))
    assert worlds.exposed == worlds.asked == 40


@dataclass
class AnswerState(Hide):
    """Derives client state from answers: after a withheld document, the client's contexts are empty."""

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


def test_generates_answers_if_a_defense_acts_on_them(lab):
    worlds = audited(lab, lambda: AnswerState(frozenset({lab.split.members[0].source})))
    assert (worlds.audit.pairs, worlds.audit.differing) == (2, 1)


def test_generates_no_answer_if_no_defense_acts_on_answers(lab):
    def make(index):
        guard = lab.guard(Hide(lab.secret), index=index)
        guard.generator = None
        return guard

    experiment = lab.experiment(targets={"on": lab.guard(Hide(lab.secret))})
    asyncio.run(experiment.run())
    worlds = asyncio.run(
        two_world_audit(lab.index, make, experiment.member_sessions("on"), lab.indexed, ExperimentPlan())
    )
    assert worlds.audit.pairs == 40


def test_rejected_questions_have_an_empty_context_in_both_worlds(lab):
    class TooLongQuestions(Name):
        async def prepare(self, candidate, rng):
            probe = await super().prepare(candidate, rng)
            return replace(probe, questions=("x" * 30_000, *probe.questions))

    worlds = audited(lab, lambda: Hide(lab.secret), attacks={"shout": TooLongQuestions()})
    assert (worlds.asked, worlds.audit.pairs, worlds.audit.differing) == (60, 40, 0)


def test_member_without_indexed_chunks_is_an_error(lab):
    sessions = [("name", Document("nobody", "text"), ())]
    with pytest.raises(DataError, match="nobody"):
        asyncio.run(
            two_world_audit(lab.index, lambda index: lab.guard(index=index), sessions, lab.indexed, ExperimentPlan())
        )


@dataclass
class EveryFourth(Defense):
    """Withholds in every fourth question, with or without an effect."""

    effect: bool = True
    count: int = 0

    async def on_retrieve(self, query, retrieval):
        self.count += 1
        if self.count % 4:
            return Outcome(retrieval, verdict(()))
        kept = retrieval.hits[1:] if self.effect else retrieval.hits
        return Outcome(replace(retrieval, hits=kept), Verdict("every", True, Action.HIDE, 1.0, 0.5, ("x",)))


@pytest.mark.parametrize(("effect", "changed"), [(True, 10), (False, 0)])
def test_utility_counts_withheld_documents_and_changed_answers(lab, effect, changed):
    queries = [Query(f"amber only{i}") for i in range(40)]
    steps = []
    found = asyncio.run(measure_utility(lab.rag, lab.guard(EveryFourth(effect)), queries, "made", steps.append))
    assert found.flagged == stats.proportion(10, 40)
    assert found.answer_changed == stats.proportion(changed, 40)
    assert (found.source, found.questions, sum(steps)) == ("made", 40, 40)


def test_observe_mode_has_no_utility_loss(lab):
    guard = Guard(lab.rag, [EveryFourth()], enforce=False)
    found = asyncio.run(measure_utility(lab.rag, guard, [Query("amber")] * 8, "made"))
    assert (found.flagged.value, found.answer_changed.value) == (0, 0)


@dataclass
class Failing(Hide):
    """Raises at each question."""

    async def on_retrieve(self, query, retrieval):
        raise RuntimeError("the text of a document")


def test_utility_counts_questions_with_a_failed_defense(lab):
    found = asyncio.run(measure_utility(lab.rag, lab.guard(Failing()), [Query("amber")] * 8, "made"))
    assert found.failed == 8
    assert asyncio.run(measure_utility(lab.rag, lab.guard(Hide()), [Query("amber")] * 8, "made")).failed == 0


def test_audit_counts_questions_with_a_failed_defense_even_if_contexts_are_equal(lab):
    experiment = lab.experiment(targets={"on": lab.guard(Hide(lab.secret))})
    asyncio.run(experiment.run())
    worlds = asyncio.run(
        two_world_audit(
            lab.index,
            lambda index: lab.guard(Failing(), index=index),
            experiment.member_sessions("on"),
            lab.indexed,
            experiment.plan,
        )
    )
    assert (worlds.audit.pairs, worlds.audit.differing, worlds.audit.failed) == (0, 0, 2 * 2 * 20)


@pytest.mark.parametrize(("rules", "lost"), [((), 20), ((EntitlementRule(sources=("*",)),), 0)])
def test_unentitled_client_loses_only_answers_of_the_system_without_a_guard(lab, rules, lost):
    guard = Guard(lab.rag, [], audience=AudiencePolicy("nothing", rules))
    steps, queries = [], [Query(f"amber only{i}") for i in range(20)]
    found = asyncio.run(measure_utility(lab.rag, guard, [*queries, Query(" ")], "made", steps.append, guard))
    assert (found.unentitled_lost, sum(steps)) == (stats.proportion(lost, 20), 21)
    assert found.answer_changed.value == 0  # entitled client


def test_no_rate_of_lost_answers_if_it_is_not_measured(lab):
    assert asyncio.run(measure_utility(lab.rag, lab.guard(), [Query("amber")], "made")).unentitled_lost is None


def test_system_without_a_guard_is_asked_each_benign_question_once(lab):
    asked = []

    class Counted:
        async def ask(self, query):
            asked.append(query.text)
            return await lab.rag.ask(query)

    queries = [Query(f"amber only{i}") for i in range(3)]
    asyncio.run(measure_utility(Counted(), lab.guard(), queries, "made", unentitled=lab.guard()))
    assert sorted(asked) == [query.text for query in queries]


def test_utility_without_a_valid_question_is_an_error(lab):
    queries = [Query("amber"), Query(" ")]
    assert asyncio.run(measure_utility(lab.rag, lab.guard(), queries, "made")).questions == 1
    with pytest.raises(DataError, match="no benign question could be answered"):
        asyncio.run(measure_utility(lab.rag, lab.guard(), [Query(" ")], "made"))
