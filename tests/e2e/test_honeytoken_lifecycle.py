"""Honeytoken records and training-data honeytokens from planting to removal: commands, a gateway process, a webhook."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from casemate import config as configuration
from casemate.app import open_app
from casemate.cli.honeytokens import key_file
from casemate.monitor.honeytokens.planting import find_records
from tests.commands import run
from tests.fakes import documents
from tests.unit.listener import Listener
from tests.waiting import wait_for

CONFIG = """\
rag: {corpus: docs, generator: extractive, k: 3}
guard: {defenses: [honeytoken]}
gateway: {port: 0, pace_ms: 0}
monitor: {channels: [{use: webhook, url: "${HOOK}", secret: "${HOOK_KEY}"}]}
"""


@pytest.fixture
def receiver(tmp_path, monkeypatch):
    with Listener() as listener:
        (tmp_path / "docs").mkdir()
        for document in documents(60, seed=3):
            (tmp_path / "docs" / f"{document.id}.md").write_text(document.text)
        (tmp_path / "casemate.yaml").write_text(CONFIG)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOOK", listener.url)
        monkeypatch.setenv("HOOK_KEY", "k")
        assert run("index", "--json")[0] == 0
        yield listener


class Gateway:
    """``casemate serve`` as a process."""

    def __enter__(self):
        self.secret = run("key", "create", "eve")[1].splitlines()[0]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "casemate", "serve"], stderr=subprocess.PIPE, text=True, env=os.environ
        )
        for line in self.process.stderr:
            if found := re.search(r"serving at (http\S+)/v1", line):
                self.url = found[1]
                return self
        raise AssertionError("the gateway did not start")

    def ask(self, question):
        body = {"model": "casemate", "messages": [{"role": "user", "content": question}]}
        headers = {"Authorization": f"Bearer {self.secret}"}
        done = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert done.status_code == 200, done.text
        return done.json()["choices"][0]["message"]["content"]

    def __exit__(self, *error):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
        self.process.stderr.close()


def records():
    """Texts of the planted records by source."""
    with open_app(configuration.read()) as app:
        planted = {r.source for r in find_records(app.index, key_file(app).load(), "default").records}
        return {d.source: d.text for page, _ in app.index.scan() for d in page if d.source in planted}


def test_honeytoken_records_are_planted_retrieved_reported_rotated_and_removed(receiver, tmp_path):
    code, planted = run("canary", "plant", "--count", "4", "--json")
    assert planted["held"] >= 3 and code == (0 if planted["held"] == 4 else 3)
    first = records()
    assert len(first) == planted["held"]
    with Gateway() as gateway:
        for text in first.values():
            gateway.ask(text)
        wait_for(lambda: receiver.posts)
        notice = receiver.bodies[0]
        assert notice["details"]["kind"] == "honeytoken_crawl"
        assert not any(text in json.dumps(receiver.bodies) for text in first.values())  # no text of a record
        (alert,) = run("canary", "alerts", "--json")[1]
        assert run("canary", "alerts", "--close", alert["id"], "--reason", "the key was revoked")[0] == 0

        code, rotated = run("canary", "rotate", "--json")
        assert code == 0 and rotated["planted"]["generation"] == 2
        second = records()
        assert second and not first.keys() & second.keys()
        stolen = next(iter(first.values()))
        assert stolen not in gateway.ask(stolen)  # the running process uses the new generation of records
        (tmp_path / "dump.txt").write_text(f"seen elsewhere: {stolen}")
        code, found = run("canary", "scan", "dump.txt", "--json")
        assert code == 1 and found  # a record of the first generation is still detected

        code, removed = run("canary", "clean", "--all", "--json")
        assert code == 0 and not removed["left"] and records() == {}
        assert next(iter(second.values())) not in gateway.ask(next(iter(second.values())))


def test_a_string_of_a_training_honeytoken_is_traced_to_its_recipient(receiver, tmp_path):
    code, strings = run("canary", "strings", "3", "--purpose", "pilot data", "--who", "vendor a", "--json")
    assert code == 0 and len(set(strings)) == 3
    (tmp_path / "outputs.txt").write_text(f"model output: {strings[1].upper()}\n")
    code, found = run("canary", "scan", "outputs.txt", "--json")
    assert code == 1
    assert [s["string"]["details"]["who"] for s in found] == ["vendor a"]
    (tmp_path / "outputs.txt").write_text("an ordinary model output\n")
    assert run("canary", "scan", "outputs.txt", "--json") == (0, [])
