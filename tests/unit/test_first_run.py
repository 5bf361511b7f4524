"""Messages and exit codes of a first use of the command line."""

import asyncio
import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from casemate import config as configuration
from casemate import papers, plugins
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli import cli
from casemate.cli.canary import _baseline_failures, _comparison
from casemate.config import PluginSpec
from casemate.errors import BackendError, ConfigError, DataError
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.guard import Guard
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus
from casemate.monitor.trends.cusum import AlarmLimits, CusumState, WatchedCanary, WatchedSet, analyze_run
from casemate.monitor.trends.sequential_tests import FlakeCounts
from casemate.monitor.trends.trend import compute_trend
from casemate.rag.pipeline import Rag
from casemate.redteam.reporting.files import newest_report
from casemate.types import Action, Document, Query
from tests.fakes import BagOfWords, Memory, Parrot, documents

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli, words)


class TestAsk:
    def test_without_documents_the_error_names_the_command(self, run, tmp_path):
        (tmp_path / "casemate.yaml").write_text("guard: {defenses: []}")
        for words in (["ask", "When does it open?"], ["ask", "--explain", "Why?"], ["ask", "--json", "Why?"]):
            done = run(*words)
            assert isinstance(done.exception, DataError)
            assert str(done.exception) == "nothing is indexed yet; run 'casemate index'"
            assert done.stdout == ""

    def test_without_documents_a_file_of_questions_is_an_error(self, run, tmp_path):
        (tmp_path / "questions.txt").write_text("When does it open?\n")
        assert isinstance(run("ask", "--from", "questions.txt").exception, DataError)

    def test_error_for_an_empty_tenant_lists_other_tenants(self, run, tmp_path):
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs/fees.md").write_text("The fee is 90 crowns.")
        assert run("index", "docs", "--tenant", "north", "--no-calibrate").exit_code == 0
        error = run("ask", "What is the fee?").exception
        assert str(error).endswith("or choose another with --tenant: north")
        assert "90 crowns" in run("ask", "What is the fee?", "--tenant", "north").stdout

    def test_a_guard_without_calibration_withholds_the_context_in_enforce_mode_only(self, run, tmp_path):
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs/fees.md").write_text("The fee is 90 crowns.")
        for document in documents(40):
            (tmp_path / f"docs/{document.id}.md").write_text(document.text)
        done = run("index", "docs", "--no-calibrate")
        assert done.exit_code == 0
        assert "warning: " in done.stderr and "run 'casemate calibrate'" in done.stderr
        done = run("ask", "What is the fee?", "--guard", "observe")
        assert "90 crowns" in done.stdout and "withheld" not in done.stderr
        assert "the guard could not judge (" in done.stderr
        assert done.stderr.endswith("). In enforce mode this answer would have had no context.\n")
        done = run("ask", "What is the fee?", "--guard", "enforce")
        assert "90 crowns" not in done.stdout
        assert "the guard failed and withheld the whole context: " in done.stderr

    def test_truncated_answer_is_reported(self, run, tmp_path):
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs/fees.md").write_text("The fee for each visit of the northern museum is 90 crowns.")
        (tmp_path / "casemate.yaml").write_text("guard: {defenses: [{use: crawl_limit, quote_words: 3}]}")
        assert run("index", "docs").exit_code == 0
        question = "What is the fee?"
        explained = run("ask", question, "--explain").stdout
        assert "crawl_limit: not flagged, the rest of the answer withheld\n" in explained
        assert "one answer may (quote_words 3)" in explained
        assert json.loads(run("ask", question, "--json").stdout)["verdicts"][-1]["evidence"]["cut"] == "quote_words"
        assert run("ask", question).stderr == "note: the guard withheld the rest of the answer; --explain shows why\n"
        assert "would be withheld (observe mode)" in run("ask", question, "--explain", "--guard", "observe").stdout


def test_the_example_of_an_attached_collection_starts_in_observe_mode():
    page = (ROOT / "docs/how-to/attach-a-collection.md").read_text(encoding="utf-8")
    example = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    assert example["guard"]["mode"] == "observe"


@pytest.mark.parametrize("words", [["calibrate"], ["redteam", "run"], ["redteam", "crawl"], ["redteam", "probe"]])
def test_commands_that_require_documents_name_the_index_command(words, run, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "casemate.yaml").write_text("rag: {corpus: docs}")
    error = run(*words).exception
    assert isinstance(error, DataError)
    assert str(error) == "nothing is indexed yet; run 'casemate index'"
    assert not list(tmp_path.rglob("calibration*"))


class TestInit:
    def test_a_missing_folder_is_refused_and_nothing_is_written(self, run, tmp_path):
        error = run("init", "nowhere", "--generator", "extractive").exception
        assert isinstance(error, ConfigError)
        assert str(error) == "no file or folder at nowhere; create it, or give the folder with your documents"
        assert not (tmp_path / "casemate.yaml").exists()

    def test_the_default_folder_may_be_created_later(self, run):
        done = run("init", "--generator", "extractive")
        assert done.exit_code == 0
        assert "docs, the value of rag.corpus, does not exist yet" in done.stderr
        with pytest.raises(ConfigError, match="no file or folder at docs, the value of rag.corpus; correct it in case"):
            CliRunner().invoke(cli, ["index"], catch_exceptions=False)
        written = Path("casemate.yaml").read_text()
        assert "{use: mirabel, " in written and "{use: crawl_limit, " in written
        assert "{name:" not in written


class TestReproduce:
    def test_list_shows_every_experiment_without_data(self, run, monkeypatch):
        monkeypatch.delenv("CASEMATE_DATA", raising=False)
        found = json.loads(run("reproduce", "list", "--json").stdout)["experiments"]
        assert list(found) == list(papers.NAMES)
        assert all(content.endswith(".") for content in found.values())
        done = run("reproduce", "list")
        assert done.exit_code == 0
        assert all(name in done.stdout for name in papers.NAMES)

    def test_defaults_contain_no_path_of_a_developer(self, run):
        assert "shared/data" not in run("reproduce", "--help").stdout
        assert "shared/data" not in (ROOT / "docs/how-to/reproduce-the-papers.md").read_text()


class TestReportShow:
    def test_the_newest_report_is_the_default(self, tmp_path):
        for age, name in ((20, "report.json"), (10, "crawl.json"), (0, "other.json")):
            (tmp_path / name).write_text("{}")
            os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
        assert newest_report(tmp_path) == tmp_path / "crawl.json"

    def test_error_without_a_report_names_the_command(self, run):
        error = run("report", "show").exception
        assert isinstance(error, DataError)
        assert "no report in" in str(error) and "run 'casemate redteam run'" in str(error)


class TestConfigurationErrors:
    @pytest.mark.parametrize(
        ("raw", "says"),
        [
            ({"gateway": {"tls_cert": "a.pem"}}, "gateway: tls_cert and tls_key belong together"),
            ({"rag": {"generator": {"use": 3}}}, "rag.generator.use is 3: input should be a valid string"),
        ],
    )
    def test_pydantic_prefixes_are_removed(self, raw, says):
        with pytest.raises(ConfigError) as caught:
            configuration.parse(raw)
        assert says in str(caught.value)
        assert "alue error" not in str(caught.value)

    @pytest.mark.parametrize(
        ("raw", "says"),
        [
            ({"rga": {}}, "unknown key 'rga'; did you mean 'rag'?"),
            ({"monitor": {"gates": True}}, "unknown key 'monitor.gates'; did you mean 'gate'?"),
            ({"redteam": {"crawl": {"question": 5}}}, "did you mean 'questions'?"),
        ],
    )
    def test_unknown_keys_are_reported_with_a_suggestion(self, raw, says):
        with pytest.raises(ConfigError) as caught:
            configuration.parse(raw)
        assert says in str(caught.value)

    def test_unknown_options_of_a_plug_in_are_reported_with_a_suggestion(self):
        with pytest.raises(ConfigError, match="no option 'significanse'; did you mean 'significance'"):
            plugins.build("defense", PluginSpec.model_validate({"use": "mirabel", "significanse": 0.1}))


class TestCanaries:
    def summary(self, asked, failed):
        canary = WatchedCanary("fee", flakes=FlakeCounts(asked, failed))
        (line,) = compute_trend([], WatchedSet("clinic", (canary,))).canaries
        return line

    def test_a_canary_that_always_passed_shows_no_estimated_flake_rate(self):
        line = self.summary(20, 0)
        assert _baseline_failures(line) == "0 of 20"
        assert line.flake_rate.value == 0
        assert line.assumed_flake_rate > line.flake_rate.value

    def test_a_flaky_canary_shows_the_interval(self):
        assert _baseline_failures(self.summary(20, 2)) == "2 of 20 [.01, .32]"

    def test_without_a_baseline_no_rate_is_shown(self):
        assert _baseline_failures(self.summary(0, 0)) == "no baseline"

    def test_run_names_the_baseline_of_the_comparison(self):
        made, at = (
            WatchedSet("s", (WatchedCanary("a", flakes=FlakeCounts(20, 1)), WatchedCanary("b"))),
            datetime.now(UTC),
        )
        results = [CanaryResult(i, "s@r", at, CanaryStatus.FAIL) for i in ("a", "b")]
        analysis = analyze_run(CusumState(), results, made, AlarmLimits())
        said = _comparison(made, analysis)
        assert "baseline: 5.0 % of the answers failed (1 of 20; 95 % interval 0.1 to 24.9 %)" in said
        assert f"by chance: {analysis.p_value:.2g}" in said
        assert "probability" not in _comparison(made, replace(analysis, p_value=1.0))
        said = _comparison(replace(made, canaries=(WatchedCanary("a"), WatchedCanary("b"))), analysis)
        assert said.startswith("no baseline yet") and "probability" not in said

    def test_help_and_page_agree_on_exit_code_2_of_run(self, run):
        said = " ".join(run("canary", "run", "--help").stdout.split())
        assert "2 some could not be judged" in said
        page = " ".join((ROOT / "docs/how-to/run-canaries.md").read_text().split())
        assert "2 error, for `run` also if some canaries got no answer and none failed" in page


class TestEventStoreFailure:
    """Threat model: writing does not delay answers; defenses that read a failed store fail."""

    @pytest.fixture
    def guard(self, tmp_path):
        class Unreadable(Memory):
            def read_since(self, kind, after, since=None):
                raise BackendError("the store is down", backend="test", retryable=True)

        index, embedder, store = SqliteIndex(tmp_path / "index.db"), BagOfWords(), Unreadable()
        rag = Rag(embedder, index, Parrot())
        asyncio.run(Guard(rag, []).add([Document(f"d{i}", f"Note {i} about ferry {i}.") for i in range(30)]))
        yield lambda **options: Guard(rag, [CrawlLimit(store=store)], store=store, **options)
        index.close()

    def test_on_error_closed_withholds_the_context(self, guard):
        answer = asyncio.run(guard().ask(Query("Where is ferry 3?")))
        assert answer.retrieval.hits == ()
        assert [v.action for v in answer.verdicts] == [Action.WITHHOLD]

    def test_on_error_open_answers_without_the_defense(self, guard):
        assert asyncio.run(guard(on_error="open").ask(Query("Where is ferry 3?"))).retrieval.hits

    def test_threat_model_documents_the_behavior(self):
        text = " ".join((ROOT / "docs/explanation/threat-model.md").read_text().split())
        assert "none yet" not in text
        assert "a question waits up to five seconds for it. Then the defense counts as failed" in text


def test_readme_installs_the_extras_that_its_commands_require():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    assert any("casemate serve" in block for block in blocks)
    assert any("casemate try --endpoint" in block for block in blocks)
    assert any("make install" in block for block in blocks)
    installed = re.search(r"--editable '\.\[(.*?)\]'", (ROOT / "Makefile").read_text())
    assert installed and set(installed[1].split(",")) >= {"serve", "http"}
