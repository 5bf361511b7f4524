"""Campaigns as processes: two concurrent ones, kills in each stage, and an index that changes during a campaign."""

import json
import shutil
import signal

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from tests.campaign_process import CONFIG, casemate, start, wait_for
from tests.fakes import documents

pytestmark = [pytest.mark.timeout(900)]
STAGES = ["plan", "prepare", "execute", "audit", "judge", "write"]
DIFFERS = ("id", "at", "cost")
"""Report fields that differ between two runs of the same campaign."""


def write(folder, count=80, defense="hide_asked"):
    folder.mkdir(exist_ok=True)
    corpus = [{"_id": d.id, "text": d.text} for d in documents(count, words=14)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (folder / "casemate.yaml").write_text(CONFIG.replace("DEFENSE", defense))


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A folder with an indexed corpus of 80 records."""
    folder = tmp_path_factory.mktemp("campaigns") / "indexed"
    write(folder)
    assert casemate(folder, "index", "--no-calibrate")[0] == 0
    return folder


@pytest.fixture
def place(indexed, tmp_path):
    return shutil.copytree(indexed, tmp_path / "place")


@pytest.fixture(scope="module")
def reference(indexed, tmp_path_factory):
    """The report of an uninterrupted campaign."""
    folder = shutil.copytree(indexed, tmp_path_factory.mktemp("reference") / "place")
    assert casemate(folder, "redteam", "run")[0] in (0, 1, 3)
    return report(folder)


def report(folder, stem="report"):
    """The part of a report that must be equal in each run of a campaign."""
    found = json.loads((folder / f"lab/{stem}.json").read_text())
    return {key: value for key, value in found.items() if key not in DIFFERS}


def check(folder, name, stem="report"):
    return next(c for c in report(folder, stem)["checks"] if c["name"] == name)


@pytest.mark.parametrize("other", [pytest.param(("redteam", "run"), marks=pytest.mark.smoke), ("redteam", "crawl")])
def test_a_second_campaign_in_the_folder_fails_immediately_and_the_first_completes(place, reference, other):
    first = start(place, "redteam", "run", stop=("--pause", "execute"))
    try:
        wait_for(place / "paused")
        code, _, err = casemate(place, *other)
        assert code == 2
        assert f"process {first.pid} runs a membership campaign in lab since" in " ".join(err.split())
        assert "wait until it ends, stop it, or set redteam.folder to another folder" in " ".join(err.split())
        assert [p.name for p in (place / "lab/runs").iterdir()] == [reference["evidence"]["run"]]
        (place / "go").touch()
        first.communicate(timeout=300)
    finally:
        first.kill()
        first.wait()
    assert report(place) == reference
    assert check(place, "Every trial is finished")["status"] == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_campaign_killed_in_any_stage_resumes_with_the_same_report(place, reference, stage):
    code, _, _ = casemate(place, "redteam", "run", stop=("--kill", stage))
    assert code == -signal.SIGKILL
    whole = [p for p in (place / "lab").glob("report.*") if p.name == "report.json"]
    assert not whole or stage == "write"
    assert casemate(place, "redteam", "run")[0] in (0, 1, 3)
    assert report(place) == reference
    archive = place / "lab/runs" / reference["evidence"]["run"]
    for file in ("report.html", "report.json", "report.junit.xml", "report.sarif"):
        assert (archive / file).read_bytes() == (place / "lab" / file).read_bytes()


@pytest.mark.slow
def test_a_killed_crawl_resumes_with_the_same_report(place, tmp_path):
    whole = shutil.copytree(place, tmp_path / "whole")
    assert casemate(whole, "redteam", "crawl")[0] in (0, 1, 3)
    assert casemate(place, "redteam", "crawl", stop=("--kill", "crawl"))[0] == -signal.SIGKILL
    assert not (place / "lab/crawl.json").exists()
    assert casemate(place, "redteam", "crawl")[0] in (0, 1, 3)
    found, expected = report(place, "crawl"), report(whole, "crawl")
    assert any([side.pop("resumed") for side in sides(found)])
    assert not any([side.pop("resumed") for side in sides(expected)])
    assert found == expected


def sides(crawled):
    """All records of one crawler against one target."""
    for crawl in crawled["crawls"]:
        yield from crawl["by_target"].values()
    for targets in crawled["extracted"].values():
        yield from targets.values()


def change_index_while_paused(place, process):
    """Indexes three more documents while a campaign is paused, and resumes the campaign."""
    try:
        wait_for(place / "paused")
        write(place, count=83)
        assert casemate(place, "index", "--no-calibrate")[0] == 0
        (place / "go").touch()
        process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_an_index_change_during_a_campaign_is_reported_and_the_copy_is_attacked(place, reference):
    first = start(place, "redteam", "run", stop=("--pause", "execute"))
    change_index_while_paused(place, first)
    found = check(place, "The index did not change during the campaign")
    assert (found["status"], found["value"]) == ("inconclusive", 3.0)
    assert report(place)["attacks"] == reference["attacks"]
    assert casemate(place, "redteam", "run")[0] in (0, 1, 3)  # a new campaign, on the new index
    assert report(place)["evidence"]["run"] != reference["evidence"]["run"]
    assert check(place, "The index did not change during the campaign")["status"] == "pass"
    assert len(list((place / "lab/runs").glob("*/index.db"))) == 1


@pytest.mark.slow
def test_an_index_change_during_a_crawl_is_an_error_and_discards_its_results(place, indexed):
    first = start(place, "redteam", "crawl", stop=("--pause", "crawl"))
    change_index_while_paused(place, first)
    assert first.returncode == 2
    found = check(place, "The index did not change during the campaign", "crawl")
    assert (found["status"], found["value"]) == ("error", 3.0)
    assert "are discarded" in found["reason"]
    write(place)
    assert casemate(place, "index", "--no-calibrate", "--missing", "remove")[0] == 0
    code, out, _ = casemate(place, "redteam", "crawl", "--json")
    assert code != 2
    again = json.loads(out)
    assert all(side["resumed"] == 0 for crawl in again["crawls"] for side in crawl["by_target"].values())


@pytest.mark.slow
def test_a_defense_failure_on_benign_questions_is_an_error_with_the_count(tmp_path):
    write(tmp_path, defense="{use: hide_asked, fails_for: benign}")
    assert casemate(tmp_path, "index", "--no-calibrate")[0] == 0
    assert casemate(tmp_path, "redteam", "run")[0] == 2
    found = check(tmp_path, "No defense failed")
    asked = report(tmp_path)["utility"]["questions"]
    assert (found["status"], found["value"]) == ("error", asked)
    assert f"A defense failed in {asked} questions (benign questions: {asked})" in found["reason"]
    assert casemate(tmp_path, "redteam", "crawl")[0] == 2
    found = check(tmp_path, "No defense failed", "crawl")
    assert found["status"] == "error" and "benign sessions: " in found["reason"]


@pytest.mark.slow
def test_questions_from_casemate_itself_are_not_recorded(tmp_path):
    write(tmp_path, defense="mirabel")
    commands = [("index",), ("calibrate",), ("canary", "suggest"), ("redteam", "run"), ("redteam", "crawl")]
    for words in commands:
        code, _, err = casemate(tmp_path, *words)
        assert code in (0, 1, 3), (words, err)
    assert count_events(tmp_path) == (0, 0)
    assert casemate(tmp_path, "ask", "Where is only7?")[0] == 0
    assert count_events(tmp_path)[0] == 1


def count_events(folder):
    """Numbers of verdicts and requests in the event store, the data of the operator's views."""
    store = SqlEventStore(path=folder / ".casemate/events.db")
    try:
        return len(list(store.scan("verdict"))), len(list(store.scan("request")))
    finally:
        store.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--attack", "mbaa"), "unknown attack 'mbaa'; did you mean 'mba'?"),
        (("run", "--members", "3"), "redteam.members"),
        (("crawl", "--attack", "ike"), "unknown crawler 'ike'"),
        (("crawl", "--questions", "0"), "questions"),
    ],
)
def test_names_and_options_are_checked_before_anything_is_written(tmp_path, words, message):
    write(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    code, _, err = casemate(tmp_path, "redteam", *words)
    assert code == 2 and message in " ".join(err.split())
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
