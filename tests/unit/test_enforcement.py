"""Switching enforcement: preview of recorded traffic, the switch, and its effect on all gateways."""

import asyncio
import importlib
import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console
from typer.testing import CliRunner

from casemate import config as configuration
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.cli import cli
from casemate.errors import BackendError, ConfigError, DataError
from casemate.guard.client_state import crawl_evidence
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.monitor import enforcement
from casemate.monitor.enforcement import SettingsSync, read_preview
from casemate.monitor.poisoning.quarantine import SCREENING_KIND
from casemate.types import Event, Query
from tests.fakes import Memory, Parrot
from tests.gateways import make as make_app

NOW = datetime.now(UTC)
SINCE = NOW - timedelta(days=7)
enforce_command = importlib.import_module("casemate.cli.enforce")  # the package has a function of this name


def verdict(number, defense="mirabel", hidden=(), minute=0, client="ann", **more):
    body = {
        "defense": defense,
        "flagged": bool(hidden),
        "action": "hide" if hidden else "none",
        "score": 1.0,
        "threshold": 2.0,
        "hidden": list(hidden),
        "evidence": {},
        "enforced": False,
        "request": f"r{number}",
        "client": client,
        "tenant": "default",
    }
    return Event(f"{defense}-{number}", NOW - timedelta(minutes=300 - minute), "verdict", body | more)


def preview(*events):
    return read_preview(Memory(list(events)), SINCE, lambda client: client.startswith("canary-"))


class TestPreview:
    def test_without_traffic_it_is_empty(self):
        found = preview()
        assert (found.questions, found.sessions, found.affected, dict(found.defenses)) == (0, 0, 0, {})

    def test_questions_sessions_and_shares_are_counted(self):
        found = preview(
            verdict(1),
            verdict(1, "crawl_limit"),
            verdict(2, hidden=("d3", "d4"), minute=20),
            verdict(2, "crawl_limit", hidden=("d5",), minute=20),
            verdict(3, minute=51),  # 31 minutes later: a new session
            verdict(4, hidden=("d9",), client="ben"),
        )
        assert (found.questions, found.sessions, found.affected, found.affected_sessions) == (4, 3, 2, 2)
        mirabel, crawl = found.defenses["mirabel"], found.defenses["crawl_limit"]
        assert (mirabel.questions, mirabel.affected, mirabel.sessions) == (4, 2, 2)
        assert (crawl.questions, crawl.affected, crawl.sessions) == (2, 1, 1)
        assert [(e.request, e.hidden) for e in mirabel.examples] == [("r2", ("d3", "d4")), ("r4", ("d9",))]

    def test_decisions_that_only_repeat_an_earlier_one_are_counted_separately(self):
        before = {"hidden": ("d3",), "evidence": {"reasons": ["before"]}}
        found = preview(
            verdict(1, hidden=("d3",), evidence={"reasons": ["closeness"]}),
            verdict(2, **before),
            verdict(3, **before),
            verdict(3, "crawl_limit", hidden=("d5",)),  # a new decision about the same question
            verdict(4, hidden=("d3", "d4"), evidence={"reasons": ["before", "closeness"]}),
            verdict(5, evidence={"reasons": []}),
        )
        assert (found.affected, found.repeated) == (4, 1)
        assert {name: (d.affected, d.repeated) for name, d in found.defenses.items()} == {
            "mirabel": (4, 2),
            "crawl_limit": (1, 0),
        }

    def test_canary_verdicts_and_enforced_verdicts_are_excluded(self):
        found = preview(verdict(1, client="canary-beds-1", hidden=("d1",)), verdict(2, enforced=True, hidden=("d1",)))
        assert found.questions == 0

    def test_failures_and_missing_decisions_are_counted_separately(self):
        failed = verdict(1, action="withhold", evidence={"error": "DataError"})
        found = preview(failed, verdict(2, evidence={"undecided": "3 documents"}))
        mirabel = found.defenses["mirabel"]
        assert (mirabel.affected, mirabel.failed, mirabel.undecided) == (0, 1, 1)

    def test_an_answer_that_would_have_been_cut_is_affected(self):
        cut = Event("c", NOW, crawl_evidence.KIND, {"tenant": "default", "client": "ann", "shortened": "r1"})
        found = preview(verdict(1), verdict(1, "crawl_limit"), cut)
        assert (found.defenses["mirabel"].affected, found.defenses["crawl_limit"].affected) == (0, 1)
        assert found.defenses["crawl_limit"].examples[0].hidden == ()

    def test_sources_flagged_by_screening_are_listed(self):
        events = [Event(f"s{i}", NOW, SCREENING_KIND, {"source": name}) for i, name in enumerate("bab")]
        assert preview(*events).sources == ("a", "b")

    @pytest.mark.parametrize(
        ("questions", "said"),
        [(7, "probably an attack, or too few questions to judge (7 of 99)"), (200, "certainly more than 2 % of the")],
    )
    def test_objection_names_few_questions_or_a_large_share(self, questions, said):
        found = enforcement.EnforcementPreview(datetime.now(UTC), questions, 2, questions // 2, 0, 1, {}, ())
        assert enforce_command._objection(found).startswith(said)

    @pytest.mark.parametrize(
        ("affected", "of", "excessive"), [(0, 0, False), (0, 50, False), (2, 50, False), (9, 50, True)]
    )
    def test_a_large_share_is_excessive(self, affected, of, excessive):
        found = preview(*(verdict(i, hidden=("d1",) if i < affected else ()) for i in range(of)))
        assert found.excessive is excessive

    def test_the_newest_examples_are_kept(self):
        found = preview(*(verdict(i, hidden=("d1",), minute=i) for i in range(20)))
        assert [e.request for e in found.defenses["mirabel"].examples] == [f"r{i}" for i in range(15, 20)]


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """A folder with a configuration in observe mode."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "casemate.yaml").write_text("guard:\n  mode: observe # mine\nmonitor: {gate: observe}\n")
    return tmp_path


def record(*events):
    store = SqlEventStore()
    for event in events:
        store.append(event)
    store.flush()
    store.close()


def settings():
    store = SqlEventStore()
    found = [e.body["after"] for e in store.scan(enforcement.SETTING_KIND)]
    store.close()
    return found


def run(*words, code=0, **options):
    done = CliRunner().invoke(cli, ["enforce", *words], catch_exceptions=False, **options)
    assert done.exit_code == code, done.output
    return done


class TestCommand:
    def test_command_shows_the_traffic_and_switches_the_mode(self, working_folder):
        record(*map(verdict, range(3, 100)), verdict(1), verdict(2, hidden=("d3#1",), client="ben", minute=2))
        shown = run("--yes").stdout
        assert "99 questions in 2 sessions" in shown and "1 of 99" in shown
        assert "guard.mode is enforce" in shown and "monitor.gate is true" in shown
        assert "request r2, client ben" in shown and "chunks d3#1" in shown and "earlier decision" not in shown
        written = configuration.read(working_folder / "casemate.yaml")
        assert (written.guard.mode, written.monitor.gate) == ("enforce", True)
        assert "# mine" in (working_folder / "casemate.yaml").read_text()
        assert settings() == ["enforce"]
        assert "already" in run("--yes").stderr and settings() == ["enforce"]

    @pytest.mark.parametrize(
        ("questions", "said"), [(9, "too few questions to judge (9 of 99)"), (99, "casemate calibrate --recorded")]
    )
    def test_large_share_leads_to_advice_to_calibrate(self, working_folder, questions, said):
        record(*(verdict(i, hidden=("d1",)) for i in range(questions)))
        assert said in run("--dry-run").stderr
        refused = CliRunner().invoke(cli, ["enforce", "--yes"])
        assert isinstance(refused.exception, ConfigError) and "add --force" in str(refused.exception)
        assert settings() == []
        assert "is enforce" in run("--yes", "--force").stdout

    def test_without_recorded_traffic_yes_alone_is_refused(self, working_folder):
        record(verdict(1, client="canary-beds-1"))
        before = (working_folder / "casemate.yaml").read_text()
        refused = CliRunner().invoke(cli, ["enforce", "--yes"])
        assert isinstance(refused.exception, ConfigError)
        assert "no question was recorded" in str(refused.exception) and "add --force" in str(refused.exception)
        assert (working_folder / "casemate.yaml").read_text() == before and settings() == []
        assert "is enforce" in run("--yes", "--force").stdout

    def test_too_few_recorded_questions_are_refused_with_the_required_number(self, working_folder):
        record(*map(verdict, range(98)))
        refused = CliRunner().invoke(cli, ["enforce", "--yes"])
        assert isinstance(refused.exception, ConfigError) and settings() == []
        assert "98 questions were recorded" in str(refused.exception) and "at least 99" in str(refused.exception)
        assert "at least 99 are needed" in run("--dry-run").stderr
        assert "is enforce" in run("--yes", "--force").stdout

    def test_command_switches_back_to_observe_mode(self, working_folder):
        run("--yes", "--force")
        assert "monitor.gate stays true" in run("--off", "--yes").stdout
        written = configuration.read(working_folder / "casemate.yaml")
        assert (written.guard.mode, written.monitor.gate) == ("observe", True)
        assert settings() == ["enforce", "observe"]

    def test_a_dry_run_changes_nothing(self, working_folder):
        before = (working_folder / "casemate.yaml").read_text()
        assert "no question was recorded in observe mode" in run("--dry-run").stdout
        assert (working_folder / "casemate.yaml").read_text() == before and settings() == []

    def test_without_a_terminal_the_option_yes_is_required(self, working_folder):
        before = (working_folder / "casemate.yaml").read_text()
        refused = r"no question was .*\. To switch to enforce all the same, add --yes and --force$"
        with pytest.raises(ConfigError, match=refused):
            run()
        record(*map(verdict, range(99)))
        with pytest.raises(ConfigError, match="add --yes to switch to enforce$"):
            run()
        assert (working_folder / "casemate.yaml").read_text() == before and settings() == []

    @pytest.mark.parametrize(("keys", "mode"), [("y\n", "enforce"), ("n\n", "observe"), ("\n", "observe")])
    def test_on_a_terminal_the_command_asks_for_confirmation(self, working_folder, monkeypatch, keys, mode):
        monkeypatch.setattr(enforce_command, "is_terminal", lambda: True)
        run(input=keys)
        assert configuration.read(working_folder / "casemate.yaml").guard.mode == mode

    def test_disabled_gate_stays_disabled(self, working_folder):
        (working_folder / "casemate.yaml").write_text("guard: {mode: observe}\n")
        assert "monitor.gate" not in run("--yes", "--force").stdout + run("--off", "--yes").stdout
        assert configuration.read(working_folder / "casemate.yaml").monitor.gate is False

    def test_json_is_one_object(self, working_folder):
        record(verdict(2, hidden=("d3",)))
        found = json.loads(run("--yes", "--json", "--force").stdout)
        assert (found["mode"], found["file"], found["preview"]["affected"]) == ("enforce", "ok", 1)
        assert json.loads(run("--dry-run", "--json").stdout)["mode"] == "enforce"

    def test_a_file_that_cannot_be_edited_is_reported(self, working_folder, monkeypatch):
        monkeypatch.setattr(enforcement, "set_values", lambda path, values: "casemate.yaml cannot be written")
        assert "cannot be written; write 'mode: enforce'" in run("--yes", "--force", code=1).stderr

    def test_agent_memory_needs_enforcement(self, working_folder):
        file = working_folder / "casemate.yaml"
        file.write_text(file.read_text() + "gateway: {agent_memory: true}\n")
        with pytest.raises(DataError, match="agent memory needs enforcement"):
            run("--off", "--yes")

    @pytest.mark.parametrize("words", [["--yes"], ["--off", "--yes"], ["--dry-run"]])
    def test_a_guard_that_is_off_is_not_switched(self, working_folder, words):
        (working_folder / "casemate.yaml").write_text("guard: {mode: off}\n")
        with pytest.raises(DataError, match="the guard is off"):
            run(*words)
        assert configuration.read(working_folder / "casemate.yaml").guard.mode == "off" and settings() == []

    def test_configuration_file_is_required(self, working_folder):
        (working_folder / "casemate.yaml").unlink()
        with pytest.raises(ConfigError, match="casemate init"):
            run("--yes")

    def test_names_of_defenses_are_complete_at_80_columns(self, working_folder, monkeypatch):
        monkeypatch.setattr(enforce_command, "out", Console(width=80, highlight=False))
        record(verdict(1, hidden=("d3",)), verdict(1, defense="crawl_limit"), verdict(1, defense="similarity_floor"))
        table = run("--dry-run").stdout
        assert "…" not in table and all(f" {name} " in table for name in ("crawl_limit", "similarity_floor"))

    @pytest.mark.parametrize("words", [[], ["--yes"]])
    def test_refusal_gives_its_reason_once(self, working_folder, words):
        record(*map(verdict, range(11)))
        with pytest.raises(ConfigError, match="11 questions were recorded"):
            run(*words)
        assert "11 questions were" in run("--dry-run").stderr
        assert "11 questions were" in run("--yes", "--force").stderr

    def test_reason_of_a_refusal_is_not_repeated_in_a_note(self, working_folder):
        record(*map(verdict, range(11)))
        done = CliRunner().invoke(cli, ["enforce", "--yes"])
        assert isinstance(done.exception, ConfigError) and "note:" not in done.stderr

    def test_number_of_repeated_decisions_is_shown(self, working_folder):
        before = {"hidden": ("d3",), "evidence": {"reasons": ["before"]}}
        record(verdict(1, hidden=("d3",)), *(verdict(number, **before) for number in (2, 3)))
        shown = run("--dry-run").stdout
        assert "; 2 of them only repeat an earlier decision about the same client and documents" in shown
        assert json.loads(run("--dry-run", "--json").stdout)["preview"]["repeated"] == 2

    def test_hostile_client_names_are_escaped(self, working_folder):
        record(verdict(2, hidden=("[red]\x1b[2J",), client="[bold]\x1b[2J"))
        shown = run("--dry-run").stdout
        assert "\x1b[2J" not in shown and "[bold]" in shown and "[red]" in shown


class TestSwitch:
    def test_mode_is_unchanged_if_the_store_cannot_be_written(self, working_folder):
        store, before = Memory(), (working_folder / "casemate.yaml").read_text()
        store.flush = lambda timeout_s=10.0: False
        with pytest.raises(BackendError):
            enforcement.switch(store, working_folder / "casemate.yaml", "enforce", "me")
        assert (working_folder / "casemate.yaml").read_text() == before

    def test_other_gateways_apply_the_switch(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        app = make_app(tmp_path, defenses=[])
        app.guard.enforce = False
        follower = SettingsSync(app)
        follower.sync()
        assert app.mode == "observe"
        enforcement.switch(app.store, tmp_path / "none.yaml", "enforce", "me")
        follower.sync()
        assert app.mode == "enforce"
        enforcement.switch(app.store, tmp_path / "none.yaml", "observe", "me")
        follower.sync()
        assert app.mode == "observe"
        app.close()

    def test_gateways_with_agent_memory_keep_enforcement(self, tmp_path, monkeypatch):
        """In observe mode, every client could read the entries of all others."""
        monkeypatch.chdir(tmp_path)
        app = make_app(tmp_path, defenses=[], agent_memory=True)
        enforcement.switch(app.store, tmp_path / "none.yaml", "observe", "me")
        SettingsSync(app).sync()
        assert app.mode == "enforce"
        app.close()

    def test_a_file_that_was_edited_later_keeps_its_mode(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        file = tmp_path / "other.yaml"  # the file of the option --config
        file.write_text("{}")
        app = replace(make_app(tmp_path, defenses=[]), config=configuration.read(file))
        enforcement.switch(app.store, tmp_path / "none.yaml", "observe", "me")
        os.utime(file, (NOW.timestamp() + 3600, NOW.timestamp() + 3600))
        SettingsSync(app).sync()
        assert app.mode == "enforce"
        app.close()

    def test_the_guard_switches_between_two_questions(self, tmp_path):
        app = make_app(tmp_path, defenses=[CrawlLimit()])
        copy = app.guard.instrumented()
        for enforce in (False, True, False):
            app.guard.enforce = enforce
            answer = asyncio.run(copy.ask(Query("amber heron")))
            assert {v.enforced for v in answer.verdicts} == {enforce}
            assert type(copy.generator) is type(app.guard.generator) is not Parrot
        app.close()
