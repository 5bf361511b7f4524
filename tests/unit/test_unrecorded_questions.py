"""Questions from the lab and from monitor tools are not recorded, so they affect no operator view or statistic."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from casemate import plugins
from casemate.app import open_app
from casemate.cli import cli
from casemate.doctor import examine
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.redteam.campaigns.own import OwnExtractionCampaign, OwnMembershipCampaign
from casemate.types import Query
from tests.campaign_process import CONFIG, registered
from tests.fakes import documents
from tests.unit.test_external_campaigns import silent
from tests.unit.towns import towns


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An indexed and calibrated system with stateful defenses."""
    monkeypatch.setattr(plugins, "entry_points", registered)
    monkeypatch.chdir(tmp_path)
    corpus = [{"_id": d.id, "text": d.text} for d in documents(80, words=14)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    defenses = "{use: mirabel, calibration: calibration.json}, crawl_limit, hide_asked"
    (tmp_path / "casemate.yaml").write_text(CONFIG.replace("DEFENSE", defenses))
    with open_app() as app:
        asyncio.run(app.guard.add(documents(80, words=14)))
        asyncio.run(app.calibrate())
        assert not app.store.scan()
    return tmp_path


def events(app):
    assert app.store.flush()
    return [(e.id, e.kind) for e in app.store.scan()]


def test_a_question_of_a_client_is_recorded_and_one_from_a_tool_is_not(folder):
    question = documents(1, words=14)[0].text
    with open_app() as app:
        recorded = asyncio.run(app.target.ask(Query(question, "ann", k=3)))
        before = events(app)
        assert {kind for _, kind in before} > {"verdict"}  # and events of client state
        found = asyncio.run(app.unrecorded_target().ask(Query(question, "bob", k=3)))
        assert found.reply == recorded.reply
        assert [v.defense for v in found.verdicts] == [v.defense for v in recorded.verdicts]
        assert events(app) == before


def test_an_unrecorded_question_uses_client_state_without_changing_it(folder):
    question, later = documents(1, words=14)[0].text, Query("only0", "ann", k=3)
    with open_app() as app:
        asyncio.run(app.unrecorded_target().ask(Query(question, "ann", k=3)))
        fresh = asyncio.run(app.target.ask(later)).verdicts[0]
        assert fresh.evidence.get("reasons") != ["before"]
        asyncio.run(app.target.ask(Query(question, "ann", k=3)))
        assert app.store.flush()
        remembered = asyncio.run(app.unrecorded_target().ask(later)).verdicts[0]
        assert remembered.hidden == asyncio.run(app.target.ask(later)).verdicts[0].hidden == ("d0",)


def test_an_unrecorded_question_applies_a_changed_mode_of_enforcement(folder):
    question = Query(documents(1, words=14)[0].text, "ann", k=3)
    with open_app() as app:
        before = app.guard.enforce
        for enforce in (not before, before):
            app.guard.enforce = enforce
            answer = asyncio.run(app.unrecorded_target().ask(question))
            assert {v.enforced for v in answer.verdicts} == {enforce}
            assert ("d0" in [h.document.id for h in answer.retrieval.hits]) != enforce


def test_ask_as_a_key_changes_no_row_of_the_event_store(folder, monkeypatch):
    config = folder / "casemate.yaml"
    config.write_text(config.read_text().replace("crawl_limit", "{use: crawl_limit, budget: 300, questions: 2}"))
    with open_app() as app:
        path = app.config.folder / app.config.store.options.get("path", ".casemate/events.db")
        key, _ = ApiKeyStore(app.store).create(Grant("web-shop"))
        asyncio.run(app.target.ask(Query(documents(2, words=14)[1].text, key.id, k=3)))
        assert app.store.flush()

    def rows():
        with closing(sqlite3.connect(path)) as database:
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return {name: database.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in names}

    before = rows()
    assert before["casemate_quotas"]
    for options in (["--explain"], ["--json"], []):
        for text in ("amber birch", documents(1, words=14)[0].text):
            done = CliRunner().invoke(cli, ["ask", "--as", "web-shop", *options, text], catch_exceptions=False)
            assert done.exit_code == 0, done.output
    assert rows() == before


@pytest.mark.slow
def test_campaigns_calibration_and_drafts_record_no_event(folder):
    with open_app() as app:
        asyncio.run(OwnMembershipCampaign(app).run_and_write(silent))
        asyncio.run(OwnExtractionCampaign(app).run_and_write(silent))
        asyncio.run(app.guard.add(towns()))
        asyncio.run(app.calibrate())
        assert events(app) == []
    done = CliRunner().invoke(cli, ["canary", "suggest", "--count", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["canaries"]
    assert Path("canaries.yaml").stat().st_mode & 0o077 == 0  # it quotes documents
    done = CliRunner().invoke(cli, ["canary", "shadow", "own", "bare", "--count", "5", "--json"])
    assert done.exit_code in (0, 1, 3), done.output
    with open_app() as app:
        assert events(app) == []


def test_doctor_counts_questions_of_clients_only(folder):
    with open_app() as app:
        for client in ("ann", "canary-a-1", "canary-b-1"):
            asyncio.run(app.target.ask(Query("amber birch", client, k=3)))
        assert app.store.flush()
    (found,) = [f for f in examine(None) if "verdicts" in f.detail]
    assert found.detail.startswith("3 verdicts")  # one per defense
    assert "of 1 questions" in found.detail
