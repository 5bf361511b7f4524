"""An index migrates to another embedder while a gateway answers: docs/how-to/operate.md, on Postgres."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import psycopg
import pytest

from casemate.demo.clinic import write_corpus
from tests.e2e.test_many_gateways import database
from tests.fake_openai import FakeOpenAI
from tests.gateways import chat

CONFIG = """
rag:
  corpus: corpus
  embedder: {{use: openai, model: {model}, base_url: "{url}", api_key: "${{EMBEDDING_KEY}}"}}
  index: {{use: pgvector, url: "${{DATABASE_URL}}", schema: {schema}}}
guard: {{defenses: [{{use: mirabel, calibration: {schema}.json}}]}}
calibrate: {{questions: 20, documents: 20}}
store: {{use: sql, url: "${{DATABASE_URL}}"}}
gateway: {{port: 0, pace_ms: 0}}
"""
pytestmark = pytest.mark.slow


class Place:
    """A folder with a corpus and two configurations, in which commands run."""

    def __init__(self, folder, url, models):
        self.folder = folder
        self.environment = os.environ | {"DATABASE_URL": url, "EMBEDDING_KEY": "k", "OPENBLAS_NUM_THREADS": "1"}
        write_corpus(folder / "corpus", 30)
        for schema in ("casemate", "casemate_2"):
            text = CONFIG.format(model=f"model-of-{schema}", schema=schema, url=models)
            (folder / f"{schema}.yaml").write_text(text)

    def command(self, *words):
        return [sys.executable, "-m", "casemate", *words]

    def run(self, *words):
        done = subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def serving(self, config):
        serve = self.command("serve", "--config", config)
        log = self.folder / f"{config}.log"
        with (
            log.open("w") as file,
            subprocess.Popen(serve, cwd=self.folder, env=self.environment, stderr=file) as running,
        ):
            try:
                while not (address_line := re.search(r"serving at (\S+)/v1", log.read_text())):
                    assert running.poll() is None, log.read_text()
                    time.sleep(0.05)
                yield address_line[1]
            finally:
                running.terminate()
                running.wait(60)


class QuestionLoop:
    """Asks continuously at the current address, as behind a proxy."""

    def __init__(self, key):
        self.key, self.place, self.stop, self.statuses = key, "", threading.Event(), []
        self.thread, self.stack = threading.Thread(target=self._run), ExitStack()

    def _run(self):
        headers, sent = {"Authorization": f"Bearer {self.key}"}, chat("How many beds?")
        while not self.stop.wait(0.2):
            if self.place:
                answer = httpx.post(f"{self.place}/v1/chat/completions", json=sent, headers=headers, timeout=60)
                self.statuses.append(answer.status_code)

    def wait_for(self, more):
        wanted = len(self.statuses) + more
        while len(self.statuses) < wanted:
            assert self.thread.is_alive(), "a request failed"
            time.sleep(0.05)

    def end(self):
        self.stop.set()
        self.thread.join(90)
        self.stack.close()


def test_migration_to_another_embedder_interrupts_no_request(postgres_url, tmp_path):
    with database(postgres_url) as url, FakeOpenAI() as fake:
        place = Place(tmp_path, url, fake.url)
        first = json.loads(place.run("index", "--config", "casemate.yaml", "--no-calibrate", "--json"))
        question_loop = QuestionLoop(place.run("key", "create", "web", "--config", "casemate.yaml").strip())
        question_loop.thread.start()
        try:
            with place.serving("casemate.yaml") as old:
                question_loop.place = old
                second = json.loads(place.run("index", "--config", "casemate_2.yaml", "--no-calibrate", "--json"))
                assert second["indexed"] == first["indexed"] > 40
                place.run("calibrate", "--config", "casemate_2.yaml")
                place.run("doctor", "--config", "casemate_2.yaml")
                again = json.loads(place.run("index", "--config", "casemate_2.yaml", "--no-calibrate", "--json"))
                assert again["indexed"] == 0  # documents that changed since the first run; none did
                new = question_loop.stack.enter_context(place.serving("casemate_2.yaml"))
                question_loop.place = new
                question_loop.wait_for(3)
            with psycopg.connect(url) as connection:
                connection.execute("DROP SCHEMA casemate CASCADE")  # the remaining tables of the old index
            question_loop.wait_for(2)
        finally:
            question_loop.end()
    assert len(question_loop.statuses) > 5
    assert set(question_loop.statuses) == {200}
