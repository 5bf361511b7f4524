"""Trials that run elsewhere: the same measurements, ledger, budget and going on as when they run here."""

from __future__ import annotations

import asyncio

import pytest

from casemate.errors import BackendError
from casemate.lab import experiment as module
from casemate.lab.errands import LEASE, Errand
from tests.lab_setting import Coin, Hide, Name, Unreliable, setting


@pytest.fixture
def lab(tmp_path):
    with setting(tmp_path / "here") as made:
        yield made


class Worker:
    """Runs errands in this process, on an experiment of its own whose ledger is never written."""

    def __init__(self, folder, attacks=None, wrap=lambda target: target, break_at=None, **plan):
        self.folder, self.wrap, self.break_at = folder, wrap, break_at
        self.attacks, self.plan = attacks, plan
        self.ran: list[Errand] = []

    def __call__(self, errands, stopped):
        with setting(self.folder) as own:
            targets = {"off": self.wrap(own.rag), "on": self.wrap(own.guard(Hide(own.secret)))}
            there = own.experiment(self.attacks, targets, **self.plan)
            for errand in errands:
                if len(self.ran) == self.break_at:
                    raise KeyboardInterrupt
                self.ran.append(errand)
                yield asyncio.run(there.errand(errand))
            assert not own.ledger.trials(there._campaign("name"), "off")


def experiment(lab, attacks=None, send=None, **plan):
    made = lab.experiment(attacks, {"off": lab.rag, "on": lab.guard(Hide(lab.secret))}, **plan)
    made.send = send
    return made


def run(made, said=lambda count: None):
    return asyncio.run(made.run(said))


BOTH = {"name": Name(), "coin": Coin()}


def test_the_same_is_measured_and_kept(lab, tmp_path):
    here = run(experiment(lab, BOTH))
    with setting(tmp_path / "elsewhere") as other:
        worker, said = Worker(tmp_path / "worker", BOTH), []
        there = experiment(other, BOTH, worker)
        found = run(there, said.append)
        assert len(worker.ran) == 80
        assert not other.rag.generator.prompts
        assert (found.done, found.errors, found.missing) == (here.done, {}, 0)
        assert (found.cost["questions"], found.failed) == (here.cost["questions"], here.failed)
        assert sum(said) == there.total == 160
        source = other.split.members[0].source
        assert there.session("name", "on", source) == experiment(lab, BOTH).session("name", "on", source)


def test_what_is_interrupted_goes_on_here_or_elsewhere(lab, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(experiment(lab, send=Worker(tmp_path / "worker", break_at=7)))
    assert sum(map(len, experiment(lab).trials().done.values())) == 14
    worker = Worker(tmp_path / "second")
    assert run(experiment(lab, send=worker)).missing == 0
    assert len(worker.ran) == 33


def test_a_trial_whose_other_half_was_done_here_is_done_here(lab, tmp_path):
    lab.experiment(targets={"off": lab.rag})
    run(lab.experiment(targets={"off": lab.rag}))
    worker = Worker(tmp_path / "worker")
    assert run(experiment(lab, send=worker)).missing == 0
    assert not worker.ran


def test_a_budget_is_never_overspent(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEASE", 10)
    worker = Worker(tmp_path / "worker")
    found = run(experiment(lab, send=worker, questions=60, concurrency=1))  # or two trials halve the last two questions
    assert worker.ran
    assert all(errand.questions == 10 for errand in worker.ran)
    assert found.cost["questions"] == 60  # each trial asks twice: what errands left is spent here
    assert "budget of 60 questions ran out" in found.why
    assert LEASE > 10


def test_a_lease_that_is_too_small_leaves_the_trial_for_here(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEASE", 3)
    worker = Worker(tmp_path / "worker")
    found = run(experiment(lab, send=worker, questions=1000))
    assert len(worker.ran) == 40
    assert found.missing == 0
    assert found.cost["questions"] == 160


def test_a_trial_that_asks_too_much_for_its_candidate_is_not_tried_twice(lab, tmp_path):
    worker = Worker(tmp_path / "worker", per_candidate=1)
    found = run(experiment(lab, send=worker, per_candidate=1))
    assert found.missing == 80
    assert found.why == "80 trials needed more than 1 questions for their candidate"
    assert not lab.rag.generator.prompts


def test_an_attack_that_breaks_off_elsewhere_is_broken_off(lab, tmp_path):
    def broken(target):
        return Unreliable(target, 10**9, retryable=False)

    worker = Worker(tmp_path / "worker", wrap=broken)
    found = run(experiment(lab, send=worker))
    assert found.errors == {"name": f"{BackendError.__name__}: no route to the model"}
    assert len(worker.ran) == 1
    assert not lab.rag.generator.prompts


def test_one_client_for_a_whole_campaign_means_that_the_order_matters(lab, tmp_path):
    worker = Worker(tmp_path / "worker")
    assert run(experiment(lab, send=worker, identity="campaign")).missing == 0
    assert not worker.ran
