"""The whole monitor on a flaky HTTP service alarms in the run in which the simulation does, and notifies."""

import numpy as np
import pytest

from benchmarks import pooled_drift
from benchmarks.pooled_drift import CHANGES, LASTING, Change, usual, whole_monitor


@pytest.mark.slow
@pytest.mark.parametrize("lasting", ["independent", "half last"])
def test_a_sudden_fault_alarms_in_the_run_of_the_simulation(lasting):
    change = CHANGES["one fails always"]._replace(longest=8)
    found = whole_monitor(np.random.default_rng(0), LASTING[lasting], change)
    assert found["run"] == found["run_in_simulation"] < 8
    assert found["alarmed_runs"] >= 1 and found["notified"] >= 1
    if lasting == "independent":
        assert found["run"] == 1


@pytest.mark.slow
def test_without_a_fault_nothing_is_sent():
    quiet = Change(usual, lambda _: False, 6, 1, 6)
    found = whole_monitor(np.random.default_rng(3), LASTING["independent"], quiet)
    assert found == {"run": 6, "alarmed_runs": 0, "notified": 0, "run_in_simulation": 6, "within": 6}


def test_every_figure_is_simulated_and_run_end_to_end():
    parts = pooled_drift.parts()
    for name in [*(f"independent: {fault}" for fault in CHANGES), *(f"{kind}: false alarms" for kind in LASTING)]:
        assert {name, f"end to end, {name}"} <= parts.keys()
