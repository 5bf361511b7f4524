"""Campaigns on gateway processes as external targets, from the command line."""

import dataclasses
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml

pytest.importorskip("httpx", reason="needs casemate[http]")
pytest.importorskip("jsonpath_ng", reason="needs casemate[http]")

from casemate import config as configuration
from casemate import plugins
from casemate.redteam.campaigns.external_targets import build_external_targets
from tests import external_system

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BODY = {"model": "casemate", "user": "{client}", "messages": [{"role": "user", "content": "{question}"}]}


def casemate(folder, *words, key="", code=0):
    command = [sys.executable, "-m", "casemate", *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"RAG_KEY": key}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not key or key not in done.stderr + done.stdout
    return done


@contextmanager
def gateway(folder, *words):
    """The address of a gateway process and a key."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.external_system", str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line, "the gateway did not begin"
        yield json.loads(line)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def folder_and_key(tmp_path_factory):
    """A folder with provided texts, and two gateways over the same notes, one of them without a guard."""
    folder = tmp_path_factory.mktemp("foreign")
    external_system.write_known(folder)
    with gateway(folder / "a") as (guarded, key), gateway(folder / "b", "bare") as (bare, other):
        answer = "$.choices[0].message.content"
        targets = {
            "guarded": {
                "use": "openai_endpoint",
                "base_url": f"{guarded}/v1",
                "model": "casemate",
                "api_key": "${RAG_KEY}",
                "user": "{client}",
            },
            "bare": {
                "use": "http",
                "url": f"{bare}/v1/chat/completions",
                "headers": {"authorization": f"Bearer {other}"},
                "body": BODY,
                "answer": answer,
            },
        }
        section = {
            "targets": targets,
            "target": "guarded",
            "target_off": "bare",
            "provided": {"members": "known/in", "nonmembers": "known/out"},
            "skip_checks": ["two_worlds", "defense_errors"],
            "attacks": ["direct"],
            "gate": {"adjusted_accuracy": 0.35, "harmless": 0.3},
        }
        (folder / "casemate.yaml").write_text(yaml.safe_dump({"redteam": section}))
        yield folder, key


def test_a_target_without_confirmed_ownership_is_not_attacked(folder_and_key):
    folder, key = folder_and_key
    message = casemate(folder, "redteam", "run", key=key, code=2).stderr
    assert "i_own_this_target: true, or pass --own" in message
    assert not (folder / ".casemate").exists()


def test_a_guarded_gateway_with_an_unguarded_control_passes(folder_and_key):
    folder, key = folder_and_key
    done = casemate(folder, "redteam", "run", "--own", key=key)
    assert done.stdout.startswith("PASS\ntarget: guarded (openai_endpoint 127.0.0.1:")
    report = json.loads((folder / ".casemate/redteam/report.json").read_text())
    assert report["attacks"][0]["off"]["auc"][0] > 0.9
    assert report["evidence"]["capabilities"] == ["answers", "clients", "guard_off", "provided"]
    assert key not in json.dumps(report)


def test_an_unguarded_gateway_fails_and_an_unreachable_one_is_an_error(folder_and_key):
    folder, key = folder_and_key
    assert casemate(folder, "redteam", "run", "--own", "--target", "bare", key=key, code=1).stdout.startswith("FAIL")
    unreachable = ("--own", "--target", "http://127.0.0.1:9/ask")
    assert "the connection failed" in casemate(folder, "redteam", "run", *unreachable, key=key, code=2).stdout


def test_a_killed_campaign_resumes(folder_and_key, tmp_path):
    folder, key = folder_and_key
    whole = yaml.safe_load((folder / "casemate.yaml").read_text())
    slow = whole["redteam"] | {"target": "bare", "target_off": None, "folder": str(tmp_path / "lab")}
    slow["targets"]["bare"]["requests_per_s"] = 10
    (folder / "killed.yaml").write_text(yaml.safe_dump({"redteam": slow}))
    words = ("redteam", "run", "--own", "-c", "killed.yaml", "--json")
    command = [sys.executable, "-m", "casemate", *words]
    running = subprocess.Popen(command, cwd=folder, env=os.environ | {"RAG_KEY": key}, stdout=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            if running.poll() is not None or trials(tmp_path / "lab/campaigns.db"):
                break
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGKILL)
    finally:
        running.wait()
    kept = trials(tmp_path / "lab/campaigns.db")
    assert kept
    assert json.loads(casemate(folder, *words, key=key, code=1).stdout)["status"] == "fail"
    assert json.loads((tmp_path / "lab/report.json").read_text())["evidence"]["resumed"]
    found = trials(tmp_path / "lab/campaigns.db")
    assert kept.items() <= found.items() and len(found) == 60


def trials(path):
    """The completed trials as rows of the database."""
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path)) as db:
        try:
            return {tuple(key): row for row, *key in db.execute("SELECT rowid, target, candidate FROM trial")}
        except sqlite3.OperationalError:  # the database does not exist yet
            return {}


def test_list_shows_the_requirements_of_attacks_and_checks(folder_and_key):
    folder, key = folder_and_key
    message = json.loads(casemate(folder, "redteam", "list", "--json", key=key).stdout)
    assert message["attacks"]["mba"]["needs"] == ["answers", "provided"]
    assert message["attacks"]["worm"]["needs"] == ["answers", "corpus"]
    assert message["checks"]["two_worlds"] == ["ingest", "verdicts"]


def test_the_example_runs():
    path = Path(__file__).parents[2] / "examples/attack_an_external_system.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS\ntarget: guarded (http 127.0.0.1:")


def test_the_configuration_of_the_how_to_guide_is_valid(monkeypatch):
    monkeypatch.setenv("RAG_KEY", "x")
    page = (Path(__file__).parents[2] / "docs/how-to/attack-an-external-system.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.S)
    assert len(blocks) == 3
    first, *_ = [configuration.parse(yaml.safe_load(block)) for block in blocks]
    assert build_external_targets(first).can == {"answers", "sources", "clients", "guard_off"} - {"sources"}
    for line in re.findall(r"^\| .*`(\{use: .*?\})`", page, re.M):
        part = yaml.safe_load(line)
        assert set(part) - {"use"} <= {field.name for field in dataclasses.fields(plugins.load("target", part["use"]))}
