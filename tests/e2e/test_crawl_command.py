"""Extraction campaigns and re-indexing from the command line, on a fictional clinic."""

import json

import pytest

from casemate.demo.clinic import write_corpus
from tests.e2e.test_redteam_command import casemate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """\
rag: {corpus: clinic}
guard: {defenses: [crawl_limit]}
redteam: {crawl: {attacks: [rag_thief], questions: 20, max_recovered: 0.15}}
"""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crawled")
    write_corpus(folder / "clinic", count=80)
    (folder / "casemate.yaml").write_text(CONFIG)
    casemate(folder, "index", "--no-calibrate")
    return folder


def test_crawlers_are_limited_and_resume(clinic):
    found = json.loads(casemate(clinic, "redteam", "crawl", "--json").stdout)
    assert found["status"] == "pass"
    for crawl in found["crawls"]:
        assert crawl["by_target"]["off"]["crr"][0] > 0.2
        assert crawl["by_target"]["on"]["crr"][0] < 0.1
        assert crawl["by_target"]["on"]["first_alarm"] < 10
    assert found["benign_sessions"]["alarms"] == {}
    again = json.loads(casemate(clinic, "redteam", "crawl", "--json").stdout)
    assert again["crawls"][0]["by_target"]["off"]["resumed"] == 20
    folder = clinic / ".casemate/redteam"
    files = [folder / f"crawl.{kind}" for kind in ("html", "json", "junit.xml", "sarif")]
    written = json.dumps(found) + "".join(path.read_text() for path in files)
    note = next((clinic / "clinic/notes").iterdir()).read_text()
    assert not any(sentence in written for sentence in note.split(". ") if len(sentence) > 30)
    assert "rag_thief<small>20 questions, 1 client</small>" in files[0].read_text()


def test_crawlers_succeed_without_a_limit_and_the_command_fails(clinic):
    (clinic / "bare.yaml").write_text(CONFIG.replace("[crawl_limit]", "[]"))
    done = casemate(clinic, "redteam", "crawl", "-c", "bare.yaml", "--attack", "rag_thief", code=1)
    assert done.stdout.startswith("FAIL")
    assert "unknown crawler 'thief'" in casemate(clinic, "redteam", "crawl", "--attack", "thief", code=2).stderr


def test_a_reindexing_is_fitted_listed_and_rolled_back(clinic):
    first = casemate(clinic, "reindex", "--json")
    assert json.loads(first.stdout)["version"] == 1
    assert "not in guard.defenses" in first.stderr
    casemate(clinic, "reindex")
    listed = json.loads(casemate(clinic, "reindex", "--show", "--json").stdout)
    assert [v["version"] for v in listed["versions"]] == [1, 2]
    assert (listed["current"], listed["due"]) == (2, "")
    casemate(clinic, "reindex", "--rollback", "1")
    assert json.loads(casemate(clinic, "reindex", "--show", "--json").stdout)["current"] == 1
    (clinic / "ranked.yaml").write_text(CONFIG.replace("[crawl_limit]", "[reindex, crawl_limit]"))
    assert "fits the collection" in casemate(clinic, "doctor", "-c", "ranked.yaml").stdout
    assert casemate(clinic, "ask", "-c", "ranked.yaml", "When is the pharmacy open?").stdout.strip() != "I don't know."
    assert "version 9" in casemate(clinic, "reindex", "--rollback", "9", code=2).stderr
