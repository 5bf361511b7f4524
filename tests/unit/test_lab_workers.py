"""Trials on workers: the same measurements, store, budget and resumption as in one process."""

from __future__ import annotations

import asyncio

import pytest

from casemate.errors import BackendError
from casemate.redteam.lab import experiment as module
from casemate.redteam.lab.experiment import LEASE_QUESTIONS, WorkItem
from tests.lab_setting import Coin, Hide, Name, Unreliable, setting


@pytest.fixture
def lab(tmp_path):
    with setting(tmp_path / "local") as built:
        yield built


class Worker:
    """Runs work items in this process, on a separate experiment that never writes its store."""

    def __init__(self, folder, attacks=None, wrap=lambda target: target, break_at=None, **plan):
        self.folder, self.wrap, self.break_at = folder, wrap, break_at
        self.attacks, self.plan = attacks, plan
        self.ran: list[WorkItem] = []

    def __call__(self, items, stopped):
        with setting(self.folder) as own:
            targets = {"off": self.wrap(own.rag), "on": self.wrap(own.guard(Hide(own.secret)))}
            remote = own.experiment(self.attacks, targets, **self.plan)
            for item in items:
                if len(self.ran) == self.break_at:
                    raise KeyboardInterrupt
                self.ran.append(item)
                yield asyncio.run(remote.run_item(item))
            assert not own.store.trials(remote._campaign("name"), "off")


def experiment(lab, attacks=None, send=None, **plan):
    built = lab.experiment(attacks, {"off": lab.rag, "on": lab.guard(Hide(lab.secret))}, **plan)
    built.run_on_workers = send
    return built


def run(built, progress=lambda count: None):
    return asyncio.run(built.run(progress))


BOTH = {"name": Name(), "coin": Coin()}


def test_workers_measure_and_store_the_same_as_one_process(lab, tmp_path):
    local = run(experiment(lab, BOTH))
    with setting(tmp_path / "elsewhere") as other:
        worker, progress = Worker(tmp_path / "worker", BOTH), []
        remote = experiment(other, BOTH, worker)
        found = run(remote, progress.append)
        assert len(worker.ran) == 80
        assert not other.rag.generator.prompts
        assert (found.done, found.errors, found.missing) == (local.done, {}, 0)
        assert (found.cost["questions"], found.failed) == (local.cost["questions"], local.failed)
        assert sum(progress) == remote.total == 160
        source = other.split.members[0].source
        assert remote.exchanges("name", "on", source) == experiment(lab, BOTH).exchanges("name", "on", source)


def test_resumes_an_interrupted_experiment_locally_or_on_workers(lab, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(experiment(lab, send=Worker(tmp_path / "worker", break_at=7)))
    assert sum(map(len, experiment(lab).trials().done.values())) == 14
    worker = Worker(tmp_path / "second")
    assert run(experiment(lab, send=worker)).missing == 0
    assert len(worker.ran) == 33


def test_item_with_a_locally_finished_target_runs_locally(lab, tmp_path):
    lab.experiment(targets={"off": lab.rag})
    run(lab.experiment(targets={"off": lab.rag}))
    worker = Worker(tmp_path / "worker")
    assert run(experiment(lab, send=worker)).missing == 0
    assert not worker.ran


def test_total_questions_never_exceed_the_budget(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEASE_QUESTIONS", 10)
    worker = Worker(tmp_path / "worker")
    found = run(experiment(lab, send=worker, questions=60, concurrency=1))  # two trials would share the last lease
    assert worker.ran
    assert all(item.questions == 10 for item in worker.ran)
    assert found.cost["questions"] == 60  # each trial asks twice: unused leases are used locally
    assert "budget of 60 questions ran out" in found.reason
    assert LEASE_QUESTIONS > 10


def test_item_that_exceeds_its_lease_runs_locally(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEASE_QUESTIONS", 3)
    worker = Worker(tmp_path / "worker")
    found = run(experiment(lab, send=worker, questions=1000))
    assert len(worker.ran) == 40
    assert found.missing == 0
    assert found.cost["questions"] == 160


def test_error_on_a_worker_aborts_the_attack(lab, tmp_path):
    def unavailable(target):
        return Unreliable(target, 10**9, retryable=False)

    worker = Worker(tmp_path / "worker", wrap=unavailable)
    found = run(experiment(lab, send=worker))
    assert found.errors == {"name": f"{BackendError.__name__}: no route to the model"}
    assert len(worker.ran) == 1
    assert not lab.rag.generator.prompts


def test_campaign_with_one_client_runs_locally_in_order(lab, tmp_path):
    worker = Worker(tmp_path / "worker")
    assert run(experiment(lab, send=worker, identity="campaign")).missing == 0
    assert not worker.ran
