"""With a flaky HTTP service, the whole monitor raises its alarm in the same run as the simulation, and notifies."""

import numpy as np
import pytest

from benchmarks import pooled_drift
from benchmarks.pooled_drift import CHANGES, LASTING, Change, usual, whole_monitor


@pytest.mark.slow
@pytest.mark.parametrize("lasting", ["independent", "half last"])
def test_a_sudden_fault_raises_the_alarm_in_the_same_run_as_in_the_simulation(lasting):
    change = CHANGES["one fails always"]._replace(longest=8)
    found = whole_monitor(np.random.default_rng(0), LASTING[lasting], change)
    assert found["run"] == found["run_in_simulation"] < 8
    assert found["alarmed_runs"] >= 1 and found["notified"] >= 1
    if lasting == "independent":
        assert found["run"] == 1


@pytest.mark.slow
def test_no_notification_without_a_fault():
    quiet = Change(usual, lambda _: False, 6, 1, 6)
    found = whole_monitor(np.random.default_rng(3), LASTING["independent"], quiet)
    assert found == {"run": 6, "alarmed_runs": 0, "notified": 0, "run_in_simulation": 6, "within": 6}


def test_every_fault_has_a_simulation_and_an_end_to_end_run():
    parts = pooled_drift.parts()
    for name in [*(f"independent: {fault}" for fault in CHANGES), *(f"{kind}: false alarms" for kind in LASTING)]:
        assert {name, f"end to end, {name}"} <= parts.keys()
