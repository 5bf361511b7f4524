"""Console output, exit codes and command-line options of campaigns."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from casemate import config as configuration
from casemate import plugins
from casemate.app import open_app
from casemate.cli import cli
from casemate.cli.redteam import _exit_code, _override, _print
from casemate.cli.redteam_output import print_result
from casemate.errors import ConfigError, DataError
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.stats import proportion
from casemate.rag.question_file import questions_in
from casemate.redteam.campaigns.own import OwnMembershipCampaign, describe_undecided
from casemate.redteam.lab.capabilities import ATTACK_WORKS
from casemate.redteam.lab.judge import INFERENCE_FAILS, without_decisions, worst_status
from casemate.redteam.lab.results import Check, CheckStatus, ProbeResult, TwoWorldAudit, Utility
from casemate.redteam.reporting.compare import ReportChange, ReportDiff
from casemate.redteam.reporting.html import render_html
from casemate.redteam.reporting.text import describe_audit, describe_utility, measured_and_limit
from tests.campaigns import campaign
from tests.fakes import BagOfWords, documents

BEYOND = ReportDiff(worse=(ReportChange("AUC", ".5", ".9"),), compared=1)


def test_output_has_no_control_characters_and_no_better_status_than_the_checks():
    made = campaign()
    (first, *rest) = made.checks
    worst = replace(first, status=CheckStatus.FAIL, reason="\x1b[31mred\x1b]0;title\x07 [bold]not ours[/bold]")
    console = Console(width=200)
    with console.capture() as captured:
        print_result(replace(made, status=CheckStatus.PASS, checks=(worst, *rest), simulated=("\x9b2J",)), console)
    shown = captured.get()
    assert shown.startswith(("FAIL", "ERROR"))
    assert "[bold]not ours[/bold]" in shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


@pytest.mark.parametrize(
    ("evidence", "alone"),
    [({"target": "http a.example"}, True), ({"target": "http a.example", "target_off": "http b.example"}, False)],
)
def test_a_target_without_a_known_guard_has_one_column(evidence, alone):
    made = campaign()
    made = replace(made, evidence={**{k: v for k, v in made.evidence.items() if k != "target"}, **evidence})
    console = Console(width=120)
    with console.capture() as captured:
        print_result(made, console)
    assert ("this system" in captured.get(), "guard on" in captured.get()) == (alone, not alone)
    page = render_html(made)
    assert ("Figures of this system" in page) == alone and ("Guard off against guard on" in page) != alone


def test_a_lower_bound_is_printed_as_at_least():
    least = Check(ATTACK_WORKS, CheckStatus.PASS, 0.9, 0.05, "why")
    most = replace(least, name=INFERENCE_FAILS)
    assert [measured_and_limit(check) for check in (least, most)] == [
        " (measured .90, at least .05)",
        " (measured .90, limit .05)",
    ]


def test_the_injection_table_explains_its_columns_and_wraps_no_name():
    shares = {"off": proportion(999, 1000), "on": proportion(1, 10), "control": proportion(1, 999)}
    probes = (
        ProbeResult("injection", "disclosure", "", 10, **shares, quarantined=proportion(9, 10)),
        ProbeResult("long_attack_name", "marker", "", 10),
    )
    console = Console(width=80)
    with console.capture() as captured:
        print_result(replace(campaign(), probes=probes, crawls=()), console)
    printed = " ".join(captured.get().split())
    assert {"instruction", "injection:", "disclosure", "long_attack_name:"} <= {*printed.split()}
    assert "Instructions in documents, share followed [95 %] ┏" in printed  # higher is better in two of the columns
    assert printed.index("10 %") < printed.index("control: the user gives the same instruction")


def test_printed_results_have_a_line_for_each_attack_and_shares_in_percent():
    why = "Adjusted accuracy; 95 % interval against the limit of 0.05: 0.000 to "
    status = CheckStatus.INCONCLUSIVE
    checks = [Check(INFERENCE_FAILS, status, 0.0, 0.05, why + end, f"a{end}") for end in ("0.1", "0.2")]
    cost = Utility("300 synthetic questions", 300, proportion(3, 300), proportion(6, 300))
    made = replace(campaign(), checks=tuple(checks), utility=cost, audit=TwoWorldAudit(0, 0, proportion(0, 1)))
    console = Console(width=80)
    with console.capture() as captured:
        print_result(made, console)
    printed = captured.get()
    assert "\n  a0.1: 0.000 to 0.1\n  a0.2: 0.000 to 0.2\n" in printed
    assert "1.0 % [0.2, 2.9] had a document withheld, and 2.0 % [0.7, 4.3] got another answer" in printed
    assert "Two-world audit" not in printed  # the audit compared no pairs


def test_the_cost_of_an_external_guard_is_the_rate_of_lost_answers():
    cost = replace(campaign().utility, flagged=None, source="323 logged questions")
    assert describe_utility(cost) == "Of 323 logged questions, 2.8 % [1.3, 4.8] lost their answer."
    assert describe_utility(replace(cost, source="330 logged questions")).startswith("Of 330 logged questions (323 of ")


def test_the_cost_includes_answers_lost_without_entitlement():
    cost = replace(campaign().utility, unentitled_lost=proportion(30, 300))
    assert describe_utility(cost).endswith(" A client without entitlement lost 10 % [6.8, 14] of the answers.")
    assert "lost to a client without entitlement" in render_html(replace(campaign(), utility=cost))
    assert "without entitlement" not in render_html(campaign())


def test_an_audit_without_pairs_says_that_nothing_was_compared():
    assert describe_audit(replace(campaign().audit, pairs=0)) == "Two-world audit: nothing was compared."


@pytest.mark.parametrize(("given", "drawn"), [({}, (31, 13)), ({"nonmembers": 20}, (24, 20))])
def test_the_split_leaves_enough_chunks_for_mirabel_after_removing_a_member(given, drawn, tmp_path, monkeypatch):
    """The two-world audit removes a member from the copy."""
    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda role, name: BagOfWords if name == "minilm" else load(role, name))
    records = [json.dumps({"_id": d.id, "text": d.text}) for d in documents(44)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(records))
    settings = configuration.parse({"rag": {"corpus": "corpus.jsonl"}, "redteam": given}, folder=tmp_path)
    with open_app(settings) as app:
        asyncio.run(app.guard.add(documents(44)))
        split = OwnMembershipCampaign(app)._split()
    assert (len(split.members), len(split.nonmembers)) == drawn


def test_a_defense_without_decisions_makes_the_campaign_inconclusive(tmp_path):
    why = describe_undecided([CrawlLimit(), Mirabel()], 22)
    assert why == "mirabel decided nothing: 22 chunks are indexed, it needs 30"
    assert not describe_undecided([Mirabel()], 30) and not describe_undecided([CrawlLimit()], 22)
    failed = Check(INFERENCE_FAILS, CheckStatus.FAIL, 0.5, 0.05, "", "mba")
    checks = without_decisions([failed], why)
    assert without_decisions([failed], "") == [failed]
    assert {check.status for check in checks} == {CheckStatus.INCONCLUSIVE}
    found = replace(campaign(), status=worst_status(c.status for c in checks), checks=tuple(checks))
    console = Console(width=200)
    with console.capture() as captured:
        print_result(found, console)
    assert captured.get().startswith("INCONCLUSIVE")
    assert captured.get().index(why) < captured.get().index("Membership inference: AUC")
    assert f"<strong>{why}" in render_html(found)
    (tmp_path / "report.json").write_text(found.to_json(), "utf-8")
    assert why in (tmp_path / "report.json").read_text()


@pytest.mark.parametrize(
    ("status", "change", "code"),
    [
        (CheckStatus.PASS, None, 0),
        (CheckStatus.PASS, ReportDiff(compared=3), 0),
        (CheckStatus.PASS, ReportDiff(), 3),
        (CheckStatus.PASS, BEYOND, 1),
        (CheckStatus.INCONCLUSIVE, BEYOND, 1),
        (CheckStatus.FAIL, ReportDiff(), 1),
        (CheckStatus.ERROR, BEYOND, 2),
    ],
)
def test_the_exit_code_is_that_of_the_worst_status(status, change, code):
    assert _exit_code(status, change) == code


def test_command_line_options_override_keys_and_keep_the_options_of_an_attack():
    settings = configuration.parse({"redteam": {"attacks": [{"use": "mba", "masks": 3}], "members": 20}})
    changed = _override(settings, "", ["mba", "dcmi"], members=None, nonmembers=30).redteam
    assert [(part.use, part.options) for part in changed.attacks] == [("mba", {"masks": 3}), ("dcmi", {})]
    assert (changed.members, changed.nonmembers, changed.budget) == (20, 30, None)
    assert {"members", "nonmembers"} & _override(settings, "", None, budget=5).redteam.model_fields_set == {"members"}
    with pytest.raises(ConfigError, match=r"redteam\.members is 3: input should be greater than or equal to 10"):
        _override(settings, "", None, members=3)


def test_a_file_without_questions_is_an_error(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"other": 1}\n\n')
    with pytest.raises(ConfigError, match="has no questions"):
        questions_in(tmp_path / "log.jsonl")


def test_a_damaged_calibration_is_reported_before_anything_is_embedded(tmp_path):
    (tmp_path / "calibration.json").write_text("{")
    parts = {"guard": {"defenses": [{"use": "mirabel", "calibration": str(tmp_path / "calibration.json")}]}}
    places = {"index": {"use": "sqlite", "path": str(tmp_path / "index.db")}}
    store = {"use": "sql", "path": str(tmp_path / "events.db")}
    with open_app({"rag": places, "store": store} | parts) as app:
        app.guard.rag.embedder = None  # must not be used
        with pytest.raises(DataError, match="damaged or not a calibration"):
            asyncio.run(app.calibrate())


def test_a_verdict_that_is_not_pass_names_the_next_step(capsys):
    for status in CheckStatus:
        _print(replace(campaign(), status=status), "report.html")
        assert ("next: " in capsys.readouterr().out) == (status is not CheckStatus.PASS)


@pytest.mark.parametrize(
    ("command", "configured", "given", "seed"),
    [("run", 3, [], 3), ("run", 3, ["--seed", "0"], 0), ("crawl", 3, ["--seed", "5"], 5)],
)
def test_the_seed_on_the_command_line_is_used(tmp_path, monkeypatch, command, configured, given, seed):
    seeds = []

    def record(config, *stem):
        seeds.append(config.redteam.seed)
        raise ConfigError("enough")

    monkeypatch.setattr("casemate.cli.redteam.validate_plan", record)
    (tmp_path / "casemate.yaml").write_text(f"redteam: {{seed: {configured}}}")
    CliRunner().invoke(cli, ["redteam", command, "--config", str(tmp_path / "casemate.yaml"), *given])
    assert seeds == [seed]
