"""Calibrations: statistics and the calibration file."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import kstest

from casemate.cli import setup
from casemate.cli.setup import _say_calibrated
from casemate.errors import BackendError, DataError
from casemate.guard.calibration import file as calibration
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.file import CalibrationFile, read_calibrations, write_calibration
from casemate.guard.calibration.fitting import RATES
from casemate.guard.calibration.log_review import weak_attacks_note
from casemate.maths import stats
from casemate.maths.calibration import MAX_SIZE_RATIO, Calibration
from casemate.runtime import files

MADE = Calibration(
    fingerprint="test",
    documents=1000,
    k=5,
    features=FEATURES,
    centre=(0.5, 0.1, 3.0, 1.0, 0.2, 0.7),
    scale=(0.1, 0.05, 1.5, 0.5, 0.3, 0.4),
    weights=(1.0, 0.0, 0.5, 0.25, 2.0, 3.0),
    benign=tuple(float(x) for x in np.random.default_rng(0).normal(size=200)),
    source="200 questions of a log",
    doubt=1.25,
    jitter=0.3,
    salt="a secret",
    at="2026-01-02T03:04:05+00:00",
    notes={"seed": 7, "recall": {"direct": {"0.01": {"question": [0.9, 0.8, 0.95]}}}},
)
scores = st.floats(-5, 5).map(lambda x: round(x, 2))


def test_note_names_attacks_whose_questions_mostly_pass(capsys):
    recall = {a: {"0.01": {"question": [share, 0.0, 1.0]}} for a, share in (("direct", 0.9), ("mba", 0.03))}
    weak = replace(MADE, notes={"recall": recall})
    assert "fewer than half of the questions of these attacks: mba 3 %;" in weak_attacks_note(weak, 0.01)
    for harmless, rate in ((MADE, 0.01), (replace(MADE, notes={}), 0.01), (weak, 0.03)):
        assert weak_attacks_note(harmless, rate) == ""
    _say_calibrated("mirabel", weak, 0.01)
    assert f"note: {weak_attacks_note(weak, 0.01)}" in " ".join(capsys.readouterr().err.split())


def test_score_is_the_weighted_sum_of_standardized_features():
    figures = np.random.default_rng(1).normal(size=(50, 6))
    expected = (figures - np.array(MADE.centre)) / np.array(MADE.scale) @ np.array(MADE.weights)
    assert [MADE.score(tuple(f)) for f in figures] == pytest.approx(expected)
    assert MADE.score(MADE.centre) == pytest.approx(0)


@given(st.lists(scores, max_size=60), scores)
def test_p_value_is_conformal(benign, score):
    made = replace(MADE, benign=tuple(benign))
    for one in (score, *benign[:3]):
        assert made.p_value(one) == (1 + sum(b >= one for b in benign)) / (len(benign) + 1)


@given(st.lists(scores, max_size=150), st.floats(0.001, 0.999))
def test_threshold_is_conformal(benign, rate):
    made = replace(MADE, benign=tuple(benign))
    assert made.threshold(rate) == stats.conformal_threshold(benign, rate)


@given(st.lists(scores, min_size=1, max_size=150), st.floats(0.001, 0.999))
def test_attainable_rate_has_a_finite_threshold(benign, rate):
    made = replace(MADE, benign=tuple(benign))
    assert made.attainable_rate(rate) >= rate
    assert math.isfinite(made.threshold(made.attainable_rate(rate)))
    if math.isfinite(made.threshold(rate)):
        assert made.attainable_rate(rate) == rate
    assert bool(made.shortage("rate", rate)) is math.isinf(made.threshold(rate))


@pytest.mark.parametrize("rate", [0.002, 0.01, 0.3])
def test_no_rate_is_attainable_without_benign_scores(rate):
    none = replace(MADE, benign=())
    assert none.threshold(none.attainable_rate(rate)) == math.inf
    assert none.p_value(1e9) == 1


def test_threshold_reduction_is_constant_for_client_and_document():
    assert {MADE.threshold_reduction("t", "anna", "d1") for _ in range(5)} == {
        MADE.threshold_reduction("t", "anna", "d1")
    }
    assert replace(MADE, at="later").threshold_reduction("t", "anna", "d1") == MADE.threshold_reduction(
        "t", "anna", "d1"
    )


def test_threshold_reduction_depends_on_tenant_client_document_and_salt():
    cases = [("t", "anna", "d1"), ("u", "anna", "d1"), ("t", "otto", "d1"), ("t", "anna", "d2"), ("ta", "nna", "d1")]
    cases += [("t", "ann", "ad1"), ("t", 'anna", "d', "1"), ("", "tanna", "d1"), ("t", "ännä", "患者"), ("t", "", "")]
    drawn = [MADE.threshold_reduction(*m) for m in cases] + [
        replace(MADE, salt="another").threshold_reduction(*cases[0])
    ]
    assert len(set(drawn)) == len(drawn)


def test_threshold_reduction_is_a_keyed_hash_of_the_names_as_json():
    names = ["t", 'anna "Ä"\n', "d/1\u2028"]
    drawn = hashlib.blake2b(json.dumps(names).encode(), key=MADE._key, digest_size=8).digest()
    assert MADE.threshold_reduction(*names) == MADE.jitter * int.from_bytes(drawn, "big") / 2.0**64


def test_threshold_reduction_is_uniform_over_clients_and_documents():
    drawn = np.array([MADE.threshold_reduction("t", f"client {i % 71}", f"document {i}") for i in range(5000)])
    assert 0 <= drawn.min()
    assert drawn.max() <= MADE.jitter
    assert kstest(drawn / MADE.jitter, "uniform").pvalue > 0.01
    by_client = [MADE.threshold_reduction("t", f"client {i}", "one document") for i in range(2000)]
    assert kstest(np.array(by_client) / MADE.jitter, "uniform").pvalue > 0.01


def test_no_jitter_gives_no_threshold_reduction():
    assert replace(MADE, jitter=0.0).threshold_reduction("t", "anna", "d1") == 0


@pytest.mark.parametrize(
    ("fingerprint", "documents", "says"),
    [
        ("test", 1000, ""),
        ("test", 1250, ""),
        ("test", 800, ""),
        ("test", 1251, "1000 chunks; the tenant now has 1251"),
        ("test", 799, "1000 chunks; the tenant now has 799"),
        ("other", 1000, "embedder 'test'; the present one is 'other'"),
    ],
)
def test_calibration_is_stale_with_another_embedder_or_size(fingerprint, documents, says):
    assert MAX_SIZE_RATIO == 1.25
    assert says in MADE.staleness(fingerprint, documents)
    assert bool(MADE.staleness(fingerprint, documents)) == bool(says)


def test_repr_hides_the_salt():
    assert "a secret" not in repr(MADE)


def test_written_calibrations_are_read_by_tenant(tmp_path):
    path, other = tmp_path / "deep" / "er" / "calibration.json", replace(MADE, doubt=math.inf, jitter=0.0, salt="x")
    write_calibration(path, "default", MADE)
    write_calibration(path, "clinic ‘é’\u2028", other)
    assert read_calibrations(path) == {"default": MADE, "clinic ‘é’\u2028": other}
    again = replace(MADE, weights=(0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    write_calibration(path, "default", again)
    assert read_calibrations(path) == {"default": again, "clinic ‘é’\u2028": other}


def test_missing_file_has_no_calibrations(tmp_path):
    assert read_calibrations(tmp_path / "none.json") == {}
    assert CalibrationFile(tmp_path / "none.json").of("default") is None


def test_file_mode_is_0600(tmp_path):
    path, old = tmp_path / "calibration.json", os.umask(0)
    try:
        write_calibration(path, "default", MADE)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.chmod(path, 0o644)
    write_calibration(path, "default", MADE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def text_of(**changes):
    return json.dumps({"format": 1, "tenants": {"default": asdict(MADE) | changes}})


DAMAGED = {
    "empty": "",
    "half": text_of()[:500],
    "a list": "[]",
    "a number": "7",
    "no text at all": b"\xff\xfe\x00calibration",
    "no tenants": '{"format": 1}',
    "tenants are a list": '{"format": 1, "tenants": []}',
    "another program's": '{"format": 1, "tenants": {"default": {"name": "x"}}}',
    "another format": '{"format": 2, "tenants": {}}',
    "no format": '{"tenants": {}}',
    "weights of words": text_of(weights=["a"] * 6),
    "weights missing": text_of(weights=[1.0] * 5),
    "nothing in it": text_of(features=[], centre=[], scale=[], weights=[]),
    "negative weight": text_of(weights=[1.0, -0.1, 0, 0, 0, 0]),
    "NaN weight": text_of(weights=[math.nan, 0, 0, 0, 0, 0]),
    "NaN score": text_of(benign=[0.1, math.nan]),
    "infinite score": text_of(benign=[0.1, math.inf]),
    "NaN centre": text_of(centre=[math.nan] * 6),
    "NaN doubt": text_of(doubt=math.nan),
    "NaN jitter": text_of(jitter=math.nan),
    "negative jitter": text_of(jitter=-0.1),
    "scale of 0": text_of(scale=[0.0, 1, 1, 1, 1, 1]),
    "negative scale": text_of(scale=[-1.0, 1, 1, 1, 1, 1]),
    "k of 0": text_of(k=0),
    "absurd figure": text_of(centre=[1e300, 0, 0, 0, 0, 0]),
    "absurd scale": text_of(scale=[1e-300, 1, 1, 1, 1, 1]),
    "no number at all": text_of(documents=10**400),
    "jitter without salt": text_of(salt=""),
    "weights that tell nothing": text_of(weights=[0.0] * 6),
    "no harmless questions": text_of(benign=[]),
    "too deep": "[" * 100_000,
    "fewer than no documents": text_of(documents=-1),
    "other figures": text_of(features=["similarity", "gap", "depth", "spacing", "phrases", "length"]),
    "figures in another order": text_of(features=list(reversed(FEATURES))),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_unusable_file_is_refused_with_advice(tmp_path, name):
    path = tmp_path / "calibration.json"
    damaged = DAMAGED[name]
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    for use in (
        lambda: read_calibrations(path),
        lambda: CalibrationFile(path).of("default"),
        lambda: write_calibration(path, "t", MADE),
    ):
        with pytest.raises(DataError, match=r"calibration\.json.*delete .*run 'casemate calibrate'"):
            use()
    assert path.read_bytes() == (damaged if isinstance(damaged, bytes) else damaged.encode())


def test_folder_instead_of_a_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="IsADirectoryError"):
        read_calibrations(tmp_path)


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    write_calibration(path, "default", MADE)
    before = path.read_bytes()

    def fail(handle):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(BackendError, match=r"calibration\.json cannot be written \(disk full\)"):
        write_calibration(path, "default", replace(MADE, jitter=0.5))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"]


def test_concurrent_reader_never_sees_a_partial_file(tmp_path):
    path, wrong, done = tmp_path / "calibration.json", [], threading.Event()
    versions = [replace(MADE, at=str(i), benign=MADE.benign * (1 + 9 * (i % 2))) for i in range(60)]
    write_calibration(path, "default", versions[0])
    calibration_file = CalibrationFile(path)

    def poll():
        while not done.is_set():
            try:
                latest = calibration_file.of("default")
                wrong.extend([] if latest == versions[int(latest.at)] else [latest])
            except Exception as error:
                wrong.append(error)

    reader = threading.Thread(target=poll)
    reader.start()
    for version in versions:
        write_calibration(path, "default", version)
    done.set()
    reader.join()
    assert wrong == []
    assert calibration_file.of("default") == versions[-1]


def test_file_is_read_again_only_when_it_changes(tmp_path, monkeypatch):
    path, times = tmp_path / "calibration.json", []
    monkeypatch.setattr(calibration, "read_calibrations", lambda p: times.append(p) or read_calibrations(p))
    calibration_file = CalibrationFile(path)
    assert calibration_file.of("default") is None
    write_calibration(path, "default", MADE)
    times.clear()
    assert [calibration_file.of("default") for _ in range(5)] == [MADE] * 5
    assert calibration_file.of("unknown") is None
    assert len(times) == 1
    write_calibration(path, "default", replace(MADE, jitter=0.4))
    assert calibration_file.of("default").jitter == 0.4
    path.write_text("damaged")
    for _ in range(2):
        with pytest.raises(DataError):
            calibration_file.of("default")
    write_calibration(tmp_path / "new.json", "default", MADE)
    os.replace(tmp_path / "new.json", path)
    assert calibration_file.of("default") == MADE
    path.unlink()
    assert calibration_file.of("default") is None


def test_table_of_error_rates_fits_80_columns_without_truncated_names(monkeypatch):
    whole = {"question": (1.0, 1.0, 1.0), "document": (1.0, 1.0, 1.0)}
    recall = {"interrogation": {str(rate): whole for rate in RATES}}
    found = replace(MADE, notes={"recall": recall})
    console = Console(width=80)
    monkeypatch.setattr(setup, "out", console)
    with console.capture() as captured:
        setup._show("mirabel", found, 0.01)
    (row,) = [line.split() for line in captured.get().splitlines() if "interrogation" in line]
    assert row == ["interrogation", *["100", "/", "100"] * 5]
