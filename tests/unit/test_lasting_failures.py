"""A baseline, its repeat-failure rate and one run, end to end, with transient or persistent failures of the target."""

import asyncio
import contextlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from casemate import config as configuration
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.guard import Guard
from casemate.monitor.canaries.canary import Canary, CanarySet
from casemate.monitor.canaries.run import CanaryRunner
from casemate.monitor.service import CanaryMonitor
from casemate.monitor.trends.baseline import accept_baseline
from casemate.rag.pipeline import Rag
from casemate.system import App
from casemate.types import Answer, Retrieval, SimilarityStats
from tests.fakes import BagOfWords, Parrot

NO_HITS = Retrieval((), SimilarityStats(1, 0.0, 0.0))
SET = CanarySet("clinic", tuple(Canary(id=f"c{i}", query=f"fee {i}?", expected_answer="25") for i in range(10)))


class Target:
    """Answers a question wrongly the number of times in ``wrong``."""

    def __init__(self):
        self.wrong = {}

    async def ask(self, query):
        left = self.wrong.get(query.text, 0)
        self.wrong[query.text] = max(left - 1, 0)
        return Answer("It is 99." if left else "It is 25.", NO_HITS)


@pytest.mark.parametrize(("lasts", "alarmed"), [(1, ("c0",)), (2, ())], ids=["passing", "lasting"])
def test_fault_alarms_in_the_first_run_only_if_random_failures_do_not_repeat(tmp_path, lasts, alarmed):
    config = configuration.parse({"rag": {"k": 5}, "guard": {"defenses": []}}, folder=tmp_path)
    target = Target()

    def next_run(number=1):
        target.wrong = {"fee 4?": lasts, "fee 7?": lasts} if number % 8 == 1 else {}

    with contextlib.ExitStack() as stack:
        index = stack.enter_context(contextlib.closing(SqliteIndex(tmp_path / "index.db")))
        store = stack.enter_context(contextlib.closing(SqlEventStore(path=tmp_path / "events.db")))
        app = App(config, Guard(Rag(BagOfWords(), index, Parrot()), [], store=store), store, stack)
        runner = CanaryRunner(SET.canaries, target, concurrency=1)
        monitor = CanaryMonitor(app, Path("canaries.yaml"), SET, runner, [])
        done = iter(range(2, 99))
        next_run()
        found = asyncio.run(monitor.measure_baseline(progress=lambda _: next_run(next(done)), pause_s=0))
        assert [found.canaries[c].flakes.repeats for c in ("c4", "c0")] == [3, 0]
        assert found.canaries["c4"].flakes.repeats_failed == 3 * (lasts - 1)
        accept_baseline(store, SET, found.id, "test", datetime.now(UTC))
        target.wrong = {"fee 0?": 99}
        analysis = asyncio.run(monitor.run(pause_s=0))
    assert analysis.failed == ("c0",)
    assert analysis.alarmed == alarmed
