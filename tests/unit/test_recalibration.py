"""Thresholds from scores recorded in observe mode: the scores used, and the preview of the new threshold."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from casemate.cli import setup
from casemate.errors import DataError
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.file import read_calibrations, write_calibration
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.calibration import Calibration
from casemate.monitor.enforcement import THRESHOLD, read_preview, record_setting
from casemate.monitor.recalibration import PER_CLIENT, recalibrated, recorded_scores
from casemate.types import Event
from tests.fakes import Memory

NOW = datetime.now(UTC)
N = len(FEATURES)
FITTED = Calibration(
    fingerprint="f",
    documents=100,
    k=5,
    features=FEATURES,
    centre=(0.0,) * N,
    scale=(1.0,) * N,
    weights=(1.0,) * N,
    benign=tuple(i / 100 for i in range(150)),
    source="150 synthetic questions",
    at=(NOW - timedelta(days=3)).isoformat(timespec="seconds"),
    notes={"probes": {"direct": [[9.0, None], [5.0, 1.0]]}, "recall": {}, "seed": 7},
)


def verdict(number, score, client="", threshold=1.49, why=(), days=1.0, withheld=("d1",), **more):
    hidden = [f"{d}#1" for d in withheld] if why or score > threshold else []
    why = [*why, *(["closeness"] if score > threshold else [])]
    evidence = {"form": "calibrated", "target": "d1", "reasons": why, "withheld": withheld if hidden else []}
    body = {
        "defense": "mirabel",
        "flagged": bool(hidden),
        "action": "hide" if hidden else "none",
        "score": score,
        "threshold": threshold,
        "hidden": hidden,
        "evidence": evidence,
        "enforced": False,
        "request": f"r{number}",
        "client": client or f"c{number}",
        "tenant": "default",
        "k": 5,
    }
    return Event(str(number), NOW - timedelta(days=days, seconds=-number), "verdict", body | more)


class Store(Memory):
    def scan(self, kind=None, since=None):
        return [e for e in super().scan(kind) if since is None or e.at >= since]


def scores(*events, calibration=FITTED):
    return recorded_scores(Store(list(events)), "mirabel", "default", calibration, lambda c: c.startswith("canary"))


def test_scores_of_harmless_traffic_are_used():
    assert scores(verdict(1, 0.5), verdict(2, 3.0)) == [0.5, 3.0]


@pytest.mark.parametrize(
    "event",
    [
        verdict(1, 1.0, client="canary-beds"),
        verdict(1, 1.0, enforced=True),
        verdict(1, 1.0, tenant="other"),
        verdict(1, 1.0, defense="crawl_limit"),
        verdict(1, 1.0, why=["before"]),
        verdict(1, 1.0, k=6),
        verdict(1, 1.0, days=4),
        verdict(1, 0.0, evidence={"form": "calibrated", "undecided": "3 documents"}),
        verdict(1, 0.0, evidence={"error": "DataError"}),
        verdict(1, 0.0, evidence={"form": "exact"}),
    ],
)
def test_verdicts_outside_comparable_client_traffic_are_ignored(event):
    assert scores(event) == []


def test_the_number_of_scores_per_client_is_limited():
    assert len(scores(*(verdict(i, 9.0, client="eve") for i in range(100)))) == PER_CLIENT


def test_recorded_scores_include_the_threshold_reduction():
    jittery = replace(FITTED, jitter=0.5, salt="s")
    reduction = jittery.threshold_reduction("default", "ann", "d1")
    assert scores(verdict(1, 1.0, client="ann"), calibration=jittery) == [1.0 + reduction] and reduction > 0


def test_at_most_the_significance_of_further_questions_exceeds_the_new_threshold():
    rng = np.random.default_rng(5)
    share = []
    for _ in range(200):
        found = recalibrated(FITTED, rng.exponential(size=150).tolist(), 0.02)
        share.append(np.mean(rng.exponential(size=500) > found.threshold(0.02)))
    assert np.mean(share) == pytest.approx(3 / 151, abs=0.004)


def test_the_report_states_the_recall_at_the_new_threshold():
    found = recalibrated(FITTED, [float(i % 8) for i in range(200)], 0.01)
    direct = found.notes["recall"]["direct"]["0.01"]
    assert (direct["question"].value, direct["document"].value) == (0.25, 0.5)
    assert "200 questions recorded" in found.source and found.notes["seed"] == 7
    assert found.notes["log"]["as_close"]["direct"].value == 0.375


def test_too_few_scores_are_an_error():
    with pytest.raises(DataError, match="98 usable questions .* needs 99"):
        recalibrated(FITTED, [1.0] * 98, 0.01)
    with pytest.raises(DataError, match="no threshold"):
        recalibrated(replace(FITTED, benign=(), source="3 documents"), [1.0] * 200, 0.01)


def test_the_preview_applies_the_new_threshold_to_earlier_scores():
    store = Memory(
        [
            verdict(1, 2.0),
            verdict(2, 0.1, client="c1", why=["before"]),  # no longer affected by the earlier question
            verdict(3, 9.0),
            verdict(4, 0.1, client="c3", why=["before"]),
            verdict(5, 0.1),
        ]
    )

    def affected():
        return read_preview(store, NOW - timedelta(days=7), lambda client: False).affected

    assert affected() == 4
    record_setting(store, THRESHOLD, 5.0, "test", before=1.49, defense="mirabel", tenant="other")
    assert affected() == 4
    record_setting(store, THRESHOLD, 5.0, "test", before=1.49, defense="mirabel", tenant="default")
    assert affected() == 2


def test_the_command_replaces_scores_and_keeps_weights(tmp_path):
    mirabel = Mirabel(calibration=tmp_path / "calibration.json")
    write_calibration(mirabel.calibration, "default", FITTED)
    store = Memory([verdict(i, i / 40, days=2) for i in range(200)])
    monitor = SimpleNamespace(is_canary=lambda client: False)
    app = SimpleNamespace(calibrated=(mirabel,), store=store, config=SimpleNamespace(monitor=monitor))
    done = setup._recalibrate(app, "default")
    assert done["mirabel"][1].exists()
    written = read_calibrations(mirabel.calibration)["default"]
    assert written.weights == FITTED.weights and written.benign[-1] == 199 / 40
    preview = read_preview(store, NOW - timedelta(days=7), lambda client: False)
    assert preview.affected == 1 and not preview.excessive  # of 200 questions; before, 140

    with pytest.raises(DataError, match="no calibration of tenant 'other'"):
        setup._recalibrate(app, "other")
