"""Calibration and membership campaigns from the command line, on a small fictional clinic."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import closing

import pytest

from casemate.demo.clinic import write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """\
rag: {corpus: clinic, k: 3}
calibrate: {questions: 240, documents: 30}
redteam: {attacks: [direct, mba], members: 74, nonmembers: 24, gate: {adjusted_accuracy: 0.3, harmless: 0.2}}
"""
"""The two-world audit passes from 72 withheld documents on."""


def casemate(folder, *words, code=0):
    command = [sys.executable, "-m", "casemate", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """An indexed clinic of 100 notes with a calibrated guard."""
    clinic_folder = tmp_path_factory.mktemp("clinic")
    write_corpus(clinic_folder / "clinic", count=100)
    (clinic_folder / "casemate.yaml").write_text(CONFIG)
    indexing = casemate(clinic_folder, "index")
    assert "mirabel is calibrated on 240 synthetic questions" in indexing.stderr
    return clinic_folder


@pytest.fixture
def clinic_folder(clinic, tmp_path):
    return shutil.copytree(clinic, tmp_path / "clinic")


def test_a_calibrated_guard_is_not_calibrated_again(clinic_folder):
    assert "fitting" not in casemate(clinic_folder, "index").stderr


def test_calibrate_reads_a_query_log_and_shows_the_cost_of_rates(clinic_folder):
    lines = [json.dumps({"text": f"When does department {i} open on day {i % 7}?"}) for i in range(120)]
    (clinic_folder / "log.jsonl").write_text("\n".join(lines))
    done = casemate(clinic_folder, "calibrate", "--log", "log.jsonl")
    assert "120 questions of a query log" in done.stdout
    assert "mba" in done.stdout
    page = (clinic_folder / ".casemate/calibration.html").read_text()
    calibration = json.loads((clinic_folder / ".casemate/calibration.json").read_text())["tenants"]["default"]
    assert calibration["salt"] not in page
    assert "<svg" in page


def test_an_uncalibrated_guard_answers_no_question_and_warns_the_operator(clinic_folder):
    (clinic_folder / ".casemate/calibration.json").unlink()
    done = casemate(clinic_folder, "ask", "When is the pharmacy open?")
    assert done.stdout.strip() == "I don't know."
    assert "casemate calibrate" in done.stderr


def test_a_run_writes_standard_reports_and_exits_with_its_status(clinic_folder):
    done = casemate(clinic_folder, "redteam", "run")
    assert done.stdout.startswith("PASS")
    folder = clinic_folder / ".casemate/redteam"
    report = json.loads((folder / "report.json").read_text())
    assert report["status"] == "pass"
    for attack in report["attacks"]:
        assert attack["off"]["auc"][0] > 0.95
        assert attack["on"]["recall_document"][0] > 0.9
    assert report["audit"]["differing"] == 0
    assert json.loads((folder / "report.sarif").read_text())["version"] == "2.1.0"
    assert ET.parse(folder / "report.junit.xml").getroot().get("failures") == "0"
    text = (folder / "report.html").read_text() + (folder / "report.json").read_text()
    note = next((clinic_folder / "clinic/notes").iterdir()).read_text()
    assert not any(sentence in text for sentence in note.split(". ") if len(sentence) > 30)
    casemate(clinic_folder, "report", "show", str(folder / "report.json"))
    casemate(clinic_folder, "report", "diff", str(folder / "report.json"), str(folder / "report.json"))
    weak = "rag: {corpus: clinic, k: 3}\nguard: {defenses: []}\n" + CONFIG.partition("\n")[2]
    (clinic_folder / "casemate.yaml").write_text(weak)
    assert casemate(clinic_folder, "redteam", "run", code=1).stdout.startswith("FAIL")


def test_a_killed_run_resumes(clinic_folder):
    command = [sys.executable, "-m", "casemate", "redteam", "run", "--json"]
    store = clinic_folder / ".casemate/redteam/campaigns.db"
    running = subprocess.Popen(command, cwd=clinic_folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            if len(trials(store)) > 20:
                break
            time.sleep(0.1)
        os.kill(running.pid, signal.SIGKILL)
    finally:
        running.wait()
    kept = trials(store)
    assert kept
    done = casemate(clinic_folder, "redteam", "run", "--json")
    assert json.loads(done.stdout)["status"] == "pass"
    whole = trials(store)
    assert kept.items() < whole.items()


def trials(store):
    """The completed trials as rows of the database."""
    if not store.exists():
        return {}
    with closing(sqlite3.connect(store)) as db:
        try:
            rows = db.execute("SELECT rowid, trial, campaign, target, candidate FROM trial").fetchall()
        except sqlite3.OperationalError:  # the database does not exist yet or is locked
            return {}
    return {tuple(key): (row, body) for row, body, *key in rows}


def test_attacks_are_listed_and_unknown_attacks_rejected(clinic_folder):
    assert "interrogation" in casemate(clinic_folder, "redteam", "list").stdout
    assert (
        "unknown attack 'mbaa'; did you mean 'mba'?"
        in casemate(clinic_folder, "redteam", "run", "--attack", "mbaa", code=2).stderr
    )
