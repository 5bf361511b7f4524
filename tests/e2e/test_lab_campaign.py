"""Complete experiments, from the index to the judgment; also after kills and with concurrent processes."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.guard import Guard
from casemate.protocols import Defense
from casemate.rag.pipeline import Rag
from casemate.redteam.lab import datasets, results
from casemate.redteam.lab.benign import measure_utility
from casemate.redteam.lab.caching import CachedGenerator
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan
from casemate.redteam.lab.judge import judge_campaign
from casemate.redteam.lab.results import CampaignResult, CheckStatus
from casemate.redteam.lab.store import CampaignStore
from casemate.redteam.lab.two_world_audit import two_world_audit
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.types import Outcome, Query
from tests.fakes import BagOfWords, Parrot, documents
from tests.lab_setting import Coin, Name, setting, verdict

ROOT = Path(__file__).parents[2]


@dataclass
class HideQueried(Defense):
    """Hides the document whose unique word is in the question. With `gap`, the context is not refilled."""

    gap: bool = False
    max_hidden_sources: ClassVar[int] = 1

    async def on_retrieve(self, query, retrieval):
        asked = {f"d{number}" for number in re.findall(r"only(\d+)", query.text)}
        hidden = tuple(h.document.id for h in retrieval.hits if h.document.source in asked)
        seen = retrieval.hits[: query.k] if self.gap else retrieval.hits
        kept = tuple(h for h in seen if h.document.source not in asked)
        return Outcome(replace(retrieval, hits=kept), verdict(hidden))


def campaign(folder, gap, size=300):
    """Split, experiment, audit, utility and judgment."""
    whole = documents(size * 2 + 100)
    owner, lab = SqliteIndex(folder / "owner.db"), SqliteIndex(folder / "lab.db")
    embedder = CachedEmbedder(BagOfWords())
    with CampaignStore(folder / "campaigns.db") as store:
        generator = CachedGenerator(Parrot(), store, "parrot")
        owner.open(embedder.fingerprint, embedder.dim)
        owner.add(whole, embedder.embed([d.content for d in whole]))

        def make(index):
            return Guard(Rag(embedder, index, generator), [HideQueried(gap)])

        guard, split = make(lab), datasets.draw_split(whole, size, size, 7)
        datasets.copy_without_nonmembers(owner, lab, split)
        sources_in_index = datasets.indexed_sources(lab, {d.source for d in split.members})
        plan, attacks = ExperimentPlan(), {"name": Name()}
        experiment = Experiment(attacks, split, {"off": guard.rag, "on": guard}, store, sources_in_index, plan)
        trials = asyncio.run(experiment.run())
        worlds = asyncio.run(two_world_audit(lab, make, experiment.member_sessions("on"), sources_in_index, plan))
        queries = [Query(f"amber birch {i}", client=f"user-{i}") for i in range(80)]
        utility_cost = asyncio.run(measure_utility(guard.rag, guard, queries, "made"))
        judged = judge_campaign(trials, split, attacks, utility=utility_cost, audit=worlds.audit)
        calls, hits = generator.calls, generator.hits
    owner.close()
    lab.close()
    made = CampaignResult(
        "1", "2026-01-01T00:00:00+00:00", judged.status, judged.attacks, utility_cost, worlds.audit, judged.checks
    )
    return made, worlds, (calls, hits)


def test_a_guard_without_observable_difference_passes(tmp_path):
    made, worlds, (calls, hits) = campaign(tmp_path, gap=False)
    assert made.status is CheckStatus.PASS, [c for c in made.checks if c.status is not CheckStatus.PASS]
    (result,) = made.attacks
    assert (result.off.auc.value, result.on.auc.value) == (1.0, 0.5)
    assert result.on.recall_document.value == 1.0
    assert (worlds.audit.pairs, worlds.audit.differing, worlds.exposed) == (600, 0, 0)
    # The guard does not change contexts of non-members and benign questions, so their replies are cached.
    assert calls <= 1200 + 600 + 80
    assert hits >= 600 + 80
    (tmp_path / "campaign.json").write_text(made.to_json(), "utf-8")
    assert results.load_result(tmp_path / "campaign.json") == made


def test_a_guard_that_stops_the_attack_but_is_observable_fails(tmp_path):
    made, worlds, _ = campaign(tmp_path, gap=True)
    assert made.status is CheckStatus.FAIL
    assert [c.name for c in made.checks if c.status is CheckStatus.FAIL] == ["Withheld documents leave no trace"]
    assert worlds.audit.differing == worlds.audit.pairs == 600
    assert made.attacks[0].on.adjusted_accuracy.value == 0.0


SCRIPT = """
import asyncio, sys
from pathlib import Path
from tests.e2e.test_lab_campaign import one_run
one_run(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
"""


@dataclass
class Slow:
    """Answers slowly and logs each question to a file."""

    inner: object
    seconds: float
    log: Path

    async def ask(self, query):
        await asyncio.sleep(self.seconds)
        with self.log.open("a") as file:
            file.write(json.dumps(query.text) + "\n")
        return await self.inner.ask(query)


def one_run(folder, seconds, name):
    """One process of an experiment, with its own index and a shared store."""
    (folder / name).mkdir()
    with setting(folder / name) as lab, CampaignStore(folder / "campaigns.db") as store:
        target = Slow(lab.rag, seconds, folder / name / "asked")
        attacks = {"name": Name(), "coin": Coin()}
        targets = {"off": target, "on": target}
        experiment = Experiment(attacks, lab.split, targets, store, lab.indexed, ExperimentPlan(concurrency=3))
        return asyncio.run(experiment.run())


def start(folder, seconds, name):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(seconds), name],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
    )


def stored_trials(folder):
    """Number of stored trials."""
    if not (folder / "campaigns.db").exists():
        return 0
    with CampaignStore(folder / "campaigns.db") as store:
        return store._db.execute("SELECT count(*) FROM trial").fetchone()[0]


def test_a_killed_experiment_resumes(tmp_path):
    (tmp_path / "whole").mkdir()
    expected = one_run(tmp_path / "whole", 0.0, "reference")
    process = start(tmp_path, 0.01, "killed")
    try:
        while stored_trials(tmp_path) < 30:
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = stored_trials(tmp_path)
    assert 30 <= kept < 160
    trials = one_run(tmp_path, 0.0, "second")
    assert trials.done == expected.done
    assert trials.missing == 0
    asked = len((tmp_path / "second" / "asked").read_text().splitlines())
    assert asked < 240  # 1.5 questions for each of 160 trials, minus the completed ones
    assert asked <= 240 - kept


@pytest.mark.slow
def test_two_processes_with_one_store_complete_the_same_trials(tmp_path):
    (tmp_path / "whole").mkdir()
    expected = one_run(tmp_path / "whole", 0.0, "reference")
    both = [start(tmp_path, 0.002, name) for name in ("one", "two")]
    assert [process.wait() for process in both] == [0, 0]
    trials = one_run(tmp_path, 0.0, "third")
    assert trials.done == expected.done
    assert not (tmp_path / "third" / "asked").exists()
