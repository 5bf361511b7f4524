import asyncio
import math
import re
from dataclasses import dataclass, replace

import pytest

from casemate.errors import BackendError, BudgetExhausted, DataError
from casemate.protocols import MembershipAttack
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan
from casemate.types import Answer, Probe, Retrieval, SimilarityStats
from tests.lab_setting import Coin, FirstInLastOut, Hide, Name, Stepwise, Unreliable, setting


@pytest.fixture
def lab(tmp_path):
    with setting(tmp_path) as made:
        yield made


def run(experiment, **options):
    return asyncio.run(experiment.run(**options))


def test_attack_detects_members_without_the_guard_and_not_with_it(lab):
    trials = run(lab.experiment(targets={"off": lab.rag, "on": lab.guard(Hide(lab.secret))}))
    off, on = trials.done["name", "off"], trials.done["name", "on"]
    assert all(t.features == (float(t.member),) for t in off)
    assert all(t.features == (0.0,) for t in on)
    assert [t.candidate for t in off] == [t.candidate for t in on] == [d.source for d, _ in lab.split.candidates]
    assert {t.candidate for t in off if t.member} == lab.secret
    assert trials.cost["questions"] == 2 * 2 * 40
    assert (trials.missing, trials.reason, trials.errors, trials.failed) == (0, "", {}, 0)


def test_trials_count_questions_with_the_candidate_withheld_and_with_any_withheld(lab):
    trials = run(lab.experiment(targets={"off": lab.rag, "on": lab.guard(Hide(lab.secret))}))
    for trial in trials.done["name", "on"]:
        assert trial.questions == 2
        assert trial.hidden == (2 if trial.member else 0)
        assert trial.flagged == 2  # 25 of 50 retrieved documents always contain one of the 20 secret ones
    assert all((t.hidden, t.flagged) == (0, 0) for t in trials.done["name", "off"])


def test_targets_off_and_on_receive_the_same_questions_in_any_order(lab):
    attack = Name()
    targets = {"off": lab.rag, "on": lab.guard(Hide(lab.secret))}
    run(lab.experiment({"name": attack}, targets))
    other = Name()
    lab.store._db.execute("DELETE FROM trial")
    run(lab.experiment({"name": other}, dict(reversed(targets.items())), concurrency=1))
    assert len(attack.asked) == 80
    assert sorted(attack.asked) == sorted(other.asked)
    assert sorted(attack.asked)[::2] == sorted(attack.asked)[1::2]


def test_different_seed_gives_different_questions(lab):
    one, two = Name(), Name()
    run(lab.experiment({"name": one}))
    run(lab.experiment({"name": two}, seed=8))
    assert not set(one.asked) & set(two.asked)


@pytest.mark.parametrize("identity", ["candidate", "question", "campaign"])
def test_concurrency_does_not_change_results(lab, identity):
    found = []
    for count in (1, 8):
        lab.store._db.execute("DELETE FROM trial")
        targets = {"off": FirstInLastOut(lab.rag), "on": FirstInLastOut(lab.guard(Hide(lab.secret)))}
        attacks = {"name": Name(), "coin": Coin(), "stepwise": Stepwise()}
        found.append(run(lab.experiment(attacks, targets, identity=identity, concurrency=count)))
    assert found[0].done == found[1].done
    assert len(found[0].done) == 6


class RecordClients:
    """Records the clients."""

    def __init__(self, inner):
        self.inner = inner
        self.clients = []
        self.now = self.most = 0

    async def ask(self, query):
        self.now += 1
        self.most = max(self.most, self.now)
        self.clients.append(query.client)
        await asyncio.sleep(0)
        answer = await self.inner.ask(query)
        self.now -= 1
        return answer


@pytest.mark.parametrize(("identity", "clients"), [("candidate", 40), ("question", 80), ("campaign", 1)])
def test_attacker_uses_the_configured_number_of_clients(lab, identity, clients):
    target = RecordClients(lab.rag)
    run(lab.experiment(targets={"off": target}, identity=identity))
    assert len(target.clients) == 80
    assert len(set(target.clients)) == clients
    assert (target.most > 1) is (identity != "campaign")


def test_does_not_repeat_finished_trials(lab):
    first = run(lab.experiment())
    attack, steps = Name(), []
    second = run(lab.experiment({"name": attack}), progress=steps.append)
    assert second.done == first.done
    assert not attack.asked
    assert steps == [40]


def test_progress_reaches_the_total(lab):
    experiment, steps = lab.experiment({"name": Name(), "coin": Coin()}), []
    run(experiment, progress=steps.append)
    assert sum(steps) == experiment.total == 80


@pytest.mark.parametrize(
    "change",
    [{"seed": 8}, {"k": 3}, {"identity": "question"}, {"label": "other"}],
)
def test_does_not_reuse_trials_of_another_campaign(lab, change):
    run(lab.experiment())
    attack = Name()
    run(lab.experiment({"name": attack}, **change))
    assert len(attack.asked) == 40


def test_changed_options_invalidate_only_the_trials_of_that_attack(lab):
    run(lab.experiment({"name": Name(), "coin": Coin()}))
    changed = Name(questions=1)
    trials = run(lab.experiment({"name": changed, "coin": Coin()}))
    assert len(changed.asked) == 40
    assert trials.cost["questions"] == 80
    assert {t.questions for t in trials.done["name", "off"]} == {1}


def test_campaign_identity_does_not_depend_on_concurrency_and_budget(lab):
    run(lab.experiment())
    attack = Name()
    run(lab.experiment({"name": attack}, concurrency=1, questions=1000))
    assert not attack.asked


def test_budget_ends_the_campaign_and_a_second_run_resumes(lab):
    targets = {"off": lab.rag, "on": lab.guard(Hide(lab.secret))}
    attacks = {"name": Name(), "coin": Coin()}
    trials = run(lab.experiment(attacks, targets, questions=61, concurrency=1))
    assert trials.cost["questions"] == 60  # six for each candidate; the 61st finished no trial
    assert trials.missing == 160 - 40
    assert "61 questions ran out" in trials.reason
    for key, done in trials.done.items():
        assert len(done) == 10, key  # attacks, targets and kinds of candidates are interleaved
        assert sum(t.member for t in done) == 5
    attack = Name()
    again = run(lab.experiment({"name": attack, "coin": Coin()}, targets, questions=61))
    assert len(again.reason) > 0 and not again.missing < 119  # one more question finishes no trial of two questions
    rest = run(lab.experiment(attacks, targets, questions=240))
    assert (rest.missing, rest.cost["questions"]) == (0, 240)


def test_missing_trials_beyond_the_target_limit_have_the_reason_of_the_target(lab):
    class Limited(RecordClients):
        async def ask(self, query):
            if len(self.clients) == 10:
                raise BudgetExhausted("all 10 requests to localhost are sent")
            return await super().ask(query)

    trials = run(lab.experiment({"name": Name(questions=3)}, {"off": Limited(lab.rag)}, concurrency=1))
    assert (len(trials.done["name", "off"]), trials.missing) == (3, 37)
    assert trials.reason == "all 10 requests to localhost are sent"


@dataclass
class AskUntilExhausted(Name):
    """Asks four times or until the budget is exhausted, and measures the replies so far."""

    async def run(self, candidate, box, rng):
        found = []
        try:
            for _ in range(4):
                found.append(await box.ask(candidate.text))
        except BudgetExhausted:
            pass
        return await self.measure(candidate, Probe(()), found)


def test_does_not_store_a_trial_truncated_by_the_budget(lab):
    trials = run(lab.experiment({"frugal": AskUntilExhausted()}, questions=10, concurrency=1))
    assert [t.questions for t in trials.done["frugal", "off"]] == [4, 4]
    assert trials.missing == 38


@dataclass
class FailingAttack(MembershipAttack):
    """Raises an error in one method."""

    where: str = "measure"
    error: object = None
    features = ("score",)

    def study(self, texts):
        self._fail("study")

    async def prepare(self, candidate, rng):
        self._fail("prepare")
        return Probe(("amber",))

    async def measure(self, candidate, probe, replies):
        self._fail("measure")
        return (0.0,)

    def _fail(self, where):
        if where == self.where:
            raise self.error


@pytest.mark.parametrize("where", ["study", "prepare", "measure"])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (BackendError("no route to the model", backend="fake", retryable=True), "BackendError: no route to the model"),
        (DataError("no texts"), "DataError: no texts"),
        (ZeroDivisionError("with the text of a patient"), r"ZeroDivisionError in test_lab_experiment.py, line \d+"),
    ],
)
def test_reports_a_failed_attack_and_continues_the_others(lab, where, error, says):
    trials = run(lab.experiment({"broken": FailingAttack(where, error), "name": Name()}))
    assert list(trials.errors) == ["broken"] and re.fullmatch(says, trials.errors["broken"])
    assert len(trials.done["name", "off"]) == 40
    assert trials.missing == 0  # of the attacks that did not fail


def test_aborted_attack_asks_no_more_questions(lab):
    class Failing(Name):
        async def measure(self, candidate, probe, replies):
            raise ZeroDivisionError

    target = RecordClients(lab.rag)
    run(lab.experiment({"failing": Failing()}, {"off": target, "on": target}, concurrency=1))
    assert len(target.clients) == 2


def test_logs_concurrent_failures_of_an_attack_once(lab, caplog):
    class Failing(Name):
        async def measure(self, candidate, probe, replies):
            raise ZeroDivisionError

    run(lab.experiment({"failing": Failing()}, concurrency=4))
    assert [r.message.startswith("the attack failing was aborted: ZeroDivisionError") for r in caplog.records] == [True]


@dataclass
class InvalidFeatures(Coin):
    """Returns invalid features."""

    value: tuple = ()

    async def measure(self, candidate, probe, replies):
        return self.value


@pytest.mark.parametrize("value", [(), (1.0, 2.0), (math.nan,), (math.inf,)])
def test_features_must_be_finite_and_match_the_declared_number(lab, value):
    trials = run(lab.experiment({"wrong": InvalidFeatures(value)}))
    assert "finite numbers were expected for score" in trials.errors["wrong"]


def test_retries_an_attack_with_an_unavailable_model(lab):
    left = [2]

    @dataclass
    class TwoFailures(Name):
        async def measure(self, candidate, probe, replies):
            if left[0]:
                left[0] -= 1
                raise BackendError("the judge is busy", backend="fake", retryable=True)
            return await super().measure(candidate, probe, replies)

    trials = run(lab.experiment({"shaky": TwoFailures()}, concurrency=1))
    assert not trials.errors
    assert len(trials.done["shaky", "off"]) == 40


def test_retries_an_unavailable_target(lab):
    trials = run(lab.experiment(targets={"off": Unreliable(lab.rag, 2)}, concurrency=1))
    assert not trials.errors
    assert trials.cost["questions"] == 80


@pytest.mark.parametrize("retryable", [True, False])
def test_unavailable_target_is_an_error_and_another_run_resumes(lab, retryable):
    target = Unreliable(lab.rag, 0)
    targets = {"off": target, "on": lab.rag}
    run(lab.experiment(targets=targets, questions=40))
    target.failures, target.retryable = 10**9, retryable
    trials = run(lab.experiment(targets=targets))
    assert trials.errors == {"name": "BackendError: no route to the model"}
    target.failures = 0
    assert run(lab.experiment(targets=targets)).missing == 0


def test_counts_failed_defenses(lab):
    class Failing(Hide):
        async def on_retrieve(self, query, retrieval):
            raise RuntimeError

    trials = run(lab.experiment(targets={"off": lab.rag, "on": lab.guard(Failing())}))
    assert trials.failed == 80
    assert not trials.errors


def test_counts_rejected_questions(lab):
    class TooLongQuestion(Coin):
        async def prepare(self, candidate, rng):
            return Probe(("x" * 30_000, "amber"), {"coin": 0.5})

    trials = run(lab.experiment({"shout": TooLongQuestion()}))
    assert trials.cost["refused"] == 40
    assert not trials.errors


def test_member_missing_from_the_index_is_an_error(lab):
    held = dict(lab.indexed)
    name = lab.split.members[3].source
    del held[name]
    experiment = Experiment({"name": Name()}, lab.split, {"off": lab.rag}, lab.store, held)
    with pytest.raises(DataError, match=name):
        run(experiment)


def test_keeps_finished_trials_after_an_interruption(lab):
    class Interrupted(Name):
        async def measure(self, candidate, probe, replies):
            if len(self.asked) == 11:
                raise KeyboardInterrupt
            return await super().measure(candidate, probe, replies)

    experiment = lab.experiment({"name": Interrupted()}, concurrency=1)
    with pytest.raises(KeyboardInterrupt):
        run(experiment)
    trials = experiment.trials()
    assert len(trials.done["name", "off"]) == 11
    assert (trials.missing, trials.reason) == (29, "the campaign was interrupted; run again to continue")


def test_cancelled_campaign_leaves_no_running_task(lab):
    async def cancelled():
        task = asyncio.create_task(lab.experiment(targets={"off": FirstInLastOut(lab.rag, 10**6)}).run())
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(cancelled()) == []


def test_failed_write_to_the_store_ends_the_campaign(lab):
    lab.store._db.execute("PRAGMA query_only = ON")
    with pytest.raises(BackendError, match="campaign store"):
        run(lab.experiment())


def test_prepares_a_probe_once_for_all_targets(lab):
    class CountedPreparation(Name):
        prepared = 0

        async def prepare(self, candidate, rng):
            type(self).prepared += 1
            return await super().prepare(candidate, rng)

    run(lab.experiment({"counted": CountedPreparation()}, {"off": lab.rag, "on": lab.guard()}))
    assert CountedPreparation.prepared == 40


def test_study_receives_members_and_nonmembers_in_sorted_order(lab):
    seen = []

    class Student(Coin):
        def study(self, texts):
            seen.append(texts)

    run(lab.experiment({"student": Student()}))
    assert seen == [sorted(d.content for d, _ in lab.split.candidates)]
    run(lab.experiment({"student": Student()}))
    assert len(seen) == 1  # study is skipped if all trials are finished


def test_stores_the_sessions_of_members(lab):
    experiment = lab.experiment(targets={"off": lab.rag, "on": lab.guard(Hide(lab.secret))})
    run(experiment)
    found = list(experiment.member_sessions("on"))
    assert [(name, d.source) for name, d, _ in found] == [("name", d.source) for d in lab.split.members]
    for _, document, exchanges in found:
        assert len(exchanges) == 2
        assert all(e.question.startswith(document.text) for e in exchanges)
        assert all(document.id in e.hidden and document.id not in e.context for e in exchanges)


def test_attacks_a_target_without_retrieval_details(lab):
    class Remote:
        async def ask(self, query):
            answer = await lab.rag.ask(query)
            return Answer(answer.text, Retrieval((), SimilarityStats(0, 0.0, 0.0)))

    trials = run(lab.experiment(targets={"off": Remote()}))
    assert all(t.features == (float(t.member),) for t in trials.done["name", "off"])


def test_identity_option_determines_client_names(lab):
    plan = ExperimentPlan()
    assert replace(plan, identity="campaign").client("a", "x")(3) == "redteam-a"
    assert plan.client("a", "x")(0) == plan.client("a", "x")(1) != plan.client("a", "y")(0)
    assert plan.client("a", "x")(0) != plan.client("b", "x")(0)
