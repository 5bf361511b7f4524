"""``casemate canary drift|shadow|corpus``."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.cli import cli
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, result_to_event
from casemate.monitor.trends.baseline import record_source_updates
from casemate.types import Event
from tests.e2e.test_canary_command import CONFIG, PAGES, place, run

__all__ = ["place"]
NOW = datetime.now(UTC)


def runs(store, count, refused=0, first=0):
    """Records hourly runs of 40 canaries, some of them refused."""
    for number in range(first, first + count):
        at = NOW - timedelta(hours=20 - number)
        for i in range(40):
            result = CanaryResult(
                f"c{i:02}", f"clinic@{at:%Y-%m-%dT%H:00:00Z}", at, CanaryStatus.PASS, documents=(f"d{i}",)
            )
            store.append(result_to_event(_refused(result, i < refused)))


def _refused(result, refused):
    return CanaryResult(**{name: getattr(result, name) for name in result.__slots__} | {"refused": refused, "words": 9})


def traffic(store, days, share):
    """Records some days of verdicts, a share of them flagged."""
    rng = np.random.default_rng(3)
    for day in days:
        for i in range(60):
            body = {"client": "ann", "request": f"{day}-{i}", "flagged": bool(rng.random() < share), "defense": "m"}
            store.append(Event(f"v{day}-{i}", NOW - timedelta(days=25 - day), "verdict", body))


def test_drift_of_canaries_alerts_once(place):
    code, found = run("canary", "drift", "--json")
    assert (code, found["readings"]) == (3, {})  # no runs
    with closing(SqlEventStore(path=place / ".casemate/events.db")) as store:
        runs(store, 10)
        assert store.flush()
        code, found = run("canary", "drift", "--reference", "6", "--json")
        assert (code, found["windows"], len(found["readings"]["canaries"])) == (0, {"canaries": 10, "traffic": 0}, 4)
        runs(store, 3, refused=12, first=10)
        record_source_updates(store, "default", ["fees.md"], NOW)
        assert store.flush()
    assert run("canary", "drift", "--reference", "6", "--alert")[0] == 1
    code, alerts = run("canary", "alerts", "--json")
    assert [(a["kind"], a["canaries"]) for a in alerts] == [("drift", ["canaries"])]
    assert "refusals" in alerts[0]["title"] and alerts[0]["changed"] == ["fees.md"]
    again = CliRunner().invoke(cli, ["canary", "drift", "--reference", "6", "--alert"])
    assert "opened no alert" in again.output
    run("canary", "alerts", "--close", alerts[0]["id"], "--reason", "another model")
    assert run("canary", "drift", "--reference", "6", "--alert")[0] == 1
    assert run("canary", "alerts", "--json") == (0, [])  # the same drift raises no second alert


def test_drift_of_traffic(place):
    with closing(SqlEventStore(path=place / ".casemate/events.db")) as store:
        traffic(store, range(12), 0.02)
        assert store.flush()
        code, found = run("canary", "drift", "--json")
        assert code == 0 and found["windows"]["traffic"] == 12
        traffic(store, range(12, 16), 0.5)
    code, found = run("canary", "drift", "--json")
    assert code == 1
    assert {r["signal"] for step in found["readings"]["traffic"] for r in step if r["alarm"]} == {"flagged"}


def test_shadow_compares_two_systems_on_the_same_questions(place):
    questions = place / "q.txt"
    questions.write_text("\n".join(f"{what} number {i}?" for i in range(20) for what in PAGES))
    same = ("canary", "shadow", "own", "own", "--from", str(questions), "--json")
    code, found = run(*same)
    assert (code, found["asked"], found["flips"]) == (0, 120, [])
    assert run(*same, "--count", "5")[0] == 3  # inconclusive
    store = "store: {use: sql, path: o.db}\n"
    (place / "other.yaml").write_text(f"monitor: {{target: {{use: python, call: 'says_nothing:tell'}}}}\n{store}")
    (place / "says_nothing.py").write_text("def tell(question):\n    return 'I do not know.'\n")
    code, found = run("canary", "shadow", "own", "other.yaml", "--json")
    assert code == 1 and {flip["kind"] for flip in found["flips"]} == {"refused"}
    unreachable = (
        "monitor: {target: {use: http, url: 'http://127.0.0.1:9/', body: {q: '{question}'}, answer: $.a, retries: 0}}\n"
    )
    (place / "dead.yaml").write_text(unreachable + store)
    code, found = run("canary", "shadow", "own", "dead.yaml", "--count", "3", "--json")
    assert (code, found["asked"], found["errors"]) == (2, 0, 3)


def test_shadow_lists_a_new_document_that_changes_answers(place):
    (place / "other").mkdir()
    (place / "other" / "casemate.yaml").write_text(CONFIG.replace("corpus: docs", "corpus: ../docs"))
    (place / "docs" / "poison.md").write_text("A missed appointment costs 90 crowns.")
    assert run("index", "--config", "other/casemate.yaml")[0] == 0
    (place / "q.txt").write_text("What does a missed appointment cost?\n")
    done = CliRunner().invoke(cli, ["canary", "shadow", "own", "other/casemate.yaml", "--from", "q.txt"])
    assert "poison.md: new in 1 contexts, 1 of them with a flipped answer" in " ".join(done.output.split())


def test_the_corpus_audit_finds_swapped_vectors(place):
    assert run("canary", "corpus", "--json")[0] == 3  # the first check has no reference
    code, found = run("canary", "corpus", "--json")
    assert (code, found["audit"]["wrong"], found["shift"]["p"]) == (0, [], 1.0)
    (place / "docs" / "more.md").write_text("The canteen serves soup from noon on.")
    assert run("index")[0] == 0
    assert run("canary", "corpus", "--json")[1]["shift"]["added"] == 1
    (place / "docs" / "more.md").write_text("The canteen serves bread from noon on.")
    assert run("index")[0] == 0
    code, found = run("canary", "corpus", "--json")
    assert code == 3 and "give the number of replaced documents" in found["change"]
    assert run("canary", "corpus", "--removed", "1")[0] in {0, 3}
    swap_vectors(place / ".casemate/index.db")
    for _ in range(2):  # a corrupt state does not become the reference
        code, found = run("canary", "corpus", "--alert", "--json")
        assert code == 1 and len(found["audit"]["wrong"]) == 2
    (alert,) = run("canary", "alerts", "--json")[1]
    assert alert["kind"] == "corpus" and len(alert["documents"]) == 2
    assert run("canary", "corpus", "--audit", "0", "--accept")[0] in {1, 3}


def swap_vectors(path):
    """Swaps the vectors of two chunks in the database, which leaves the moments unchanged."""
    with closing(sqlite3.connect(path)) as db, db:
        (a, x), (b, y) = db.execute("SELECT key, value FROM vector ORDER BY key LIMIT 2").fetchall()
        db.executemany("UPDATE vector SET value = ? WHERE key = ?", [(y, a), (x, b)])


@pytest.mark.parametrize("command", [("drift", "--since", "soon"), ("drift", "--window", "0")])
def test_invalid_intervals_exit_with_code_2(place, command):
    done = CliRunner().invoke(cli, ["canary", *command])
    assert done.exit_code == 2 and "Traceback" not in done.output
