"""Warnings about a query log, for constructed logs: attacks, another language, few queries, benign queries."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli import cli
from casemate.cli.setup import _limits, _require_questions
from casemate.demo.clinic import case_notes
from casemate.errors import DataError
from casemate.guard.calibration.file import write_calibration
from casemate.guard.calibration.fitting import CalibrationSettings, calibrate
from casemate.guard.calibration.log_review import (
    AS_CLOSE,
    UNFAMILIAR,
    as_close_as_attacks,
    log_warnings,
    unfamiliar_share,
)
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.calibration import Calibration
from casemate.rag.pipeline import Rag
from casemate.redteam.attacks.direct import Direct
from casemate.reports.calibration_report import render_html
from casemate.types import Document, Hit, Retrieval, SimilarityStats
from tests.fakes import BagOfWords, Parrot

NOTES = [Document(name, text) for name, text in case_notes(60)]
GERMAN = "Welche Nebenwirkungen hat dieses Medikament bei Kindern unter zwölf Jahren?".split()


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    index = SqliteIndex(tmp_path_factory.mktemp("log") / "index.db")
    rag = Rag(BagOfWords(), index, Parrot())
    index.add(NOTES, rag.embedder.embed([note.content for note in NOTES]))
    yield rag
    index.close()


def common_words(count, seed=3):
    """Questions about words that several notes share."""
    rng, words = np.random.default_rng(seed), sorted({w for n in NOTES for w in n.text.lower().split() if w.isalpha()})
    common = [w for w in words if sum(f" {w} " in n.text.lower() for n in NOTES) > 12 and len(w) > 3]
    return [f"{' '.join(rng.choice(common, 3))} {i}?" for i in range(count)]


def german_questions(count):
    rng = np.random.default_rng(4)
    return [" ".join(rng.permutation(GERMAN)) + f" {i}" for i in range(count)]


def pasted_notes(count):
    return [f"Is this in your files? {NOTES[i % len(NOTES)].text}" for i in range(count)]


def fit_calibration(rag, log):
    settings = CalibrationSettings(k=3, documents=60, questions=400)
    return asyncio.run(calibrate(Mirabel(), rag, {"direct": Direct()}, log, settings))


@pytest.fixture(scope="module")
def benign_calibration(rag):
    return fit_calibration(rag, common_words(400))


class TestStatistics:
    def test_as_close_is_the_share_of_queries_at_or_above_the_attack_median(self):
        rng = np.random.default_rng(1)
        benign, attack = rng.normal(0, 1, 300).tolist(), rng.normal(2, 1, 101).tolist()
        (share,) = as_close_as_attacks(benign, {"a": attack}).values()
        assert share.value == np.mean(np.array(benign) >= np.median(attack))
        assert share.low < share.value < share.high

    def test_attack_queries_without_their_document_do_not_lower_the_median(self):
        found = as_close_as_attacks([1.0] * 50, {"a": [3.0, 3.0, *[-np.inf] * 9], "none": [-np.inf]})
        assert list(found) == ["a"] and found["a"].value == 0

    def test_detects_half_of_the_attack_above_the_share_and_less_below_it(self):
        rng = np.random.default_rng(2)
        benign, attack = np.sort(rng.normal(0, 1, 999)), rng.normal(1, 1, 201)
        share = as_close_as_attacks(benign.tolist(), {"a": attack.tolist()})["a"].value
        made = replace(calibration(), benign=tuple(benign.tolist()))
        assert np.mean(attack > made.threshold(share + 0.01)) >= 0.5 > np.mean(attack > made.threshold(share - 0.01))

    def test_unfamiliar_queries_share_fewer_than_half_of_their_words(self):
        found = Retrieval(
            (Hit(Document("d", "The ferry leaves the pier at noon."), 0.5),), SimilarityStats(1, 0.5, 0.0)
        )
        queries = [("When does the ferry leave?", found), ("ferry pier zebra", found), ("zebra giraffe noon", found)]
        assert unfamiliar_share(queries).value == 1 / 3
        assert unfamiliar_share([("the of and", found)]) is None


def calibration(**notes):
    zero, one = (0.0,) * 6, (1.0,) * 6
    features = ("similarity", "gap", "depth", "spacing", "phrases", "margin")
    return Calibration("test", 100, 3, features, zero, one, one, tuple(range(400)), "a query log", notes=notes)


class TestConstructedLogs:
    def test_benign_log_gives_no_warning(self, benign_calibration):
        assert log_warnings(benign_calibration, 0.01) == []
        assert benign_calibration.notes["log"][AS_CLOSE].keys() == benign_calibration.notes["recall"].keys()

    @pytest.mark.parametrize("share", [0.1, 0.4])
    def test_warns_about_pasted_records(self, rag, share):
        count = round(400 * share)
        log = np.random.default_rng(5).permutation([*common_words(400 - count), *pasted_notes(count)]).tolist()
        (warning,) = log_warnings(fit_calibration(rag, log), 0.01)
        assert "as close to one document as attack queries (direct" in warning
        assert "pasted records or attacks, remove them" in warning

    def test_log_of_attacks_only_gives_a_warning_or_an_error(self, rag):
        made = fit_calibration(rag, pasted_notes(400))
        assert "as close to single documents as attack questions" in made.source or log_warnings(made, 0.01)

    def test_warns_about_a_log_in_another_language(self, rag):
        (warning,) = log_warnings(fit_calibration(rag, german_questions(400)), 0.01)
        assert "another collection or in another language" in warning

    def test_does_not_review_synthetic_questions(self, rag):
        assert "log" not in fit_calibration(rag, []).notes

    def test_one_close_query_of_a_short_log_gives_no_warning(self):
        made = calibration(log={AS_CLOSE: {"direct": (0.05, 0.001, 0.25)}, UNFAMILIAR: (0.6, 0.3, 0.85)})
        assert log_warnings(made, 0.01) == []


class TestReports:
    def test_page_shows_the_warnings_of_a_log(self):
        made = replace(calibration(log={AS_CLOSE: {"mba": (0.2, 0.16, 0.24)}}), source="400 questions of a query log")
        page = render_html(made, 0.01)
        assert "<b>Warning:</b> 20.0% of the logged queries are as close" in page

    @pytest.mark.parametrize(
        ("n", "significance", "attainable"), [(98, None, 1 / 99), (99, 0.01, 0.01), (0, None, None)]
    )
    def test_json_has_null_for_an_unattainable_rate_and_the_attainable_rate(self, n, significance, attainable):
        found = _limits(replace(calibration(), benign=tuple(map(float, range(n)))), 0.01)
        assert (found["significance"], found["attainable"]) == (significance, attainable)
        assert (found["rates"]["0.01"] is None) == (significance is None)
        json.dumps(found, allow_nan=False)

    def test_too_short_log_does_not_replace_a_calibration(self, tmp_path):
        defense = SimpleNamespace(name="mirabel", significance=0.01, calibration=tmp_path / "calibration.json")
        app = SimpleNamespace(calibrated=[defense])
        _require_questions(app, 8, "default")  # no calibration exists yet
        write_calibration(defense.calibration, "default", calibration())
        _require_questions(app, 99, "default")
        with pytest.raises(
            DataError, match=r"^98 questions in the log are too few: mirabel\.significance 0\.01 needs 99"
        ):
            _require_questions(app, 98, "default")

    @pytest.mark.slow
    def test_json_output_of_the_command_contains_the_limits(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "casemate.yaml").write_text(
            "rag: {corpus: docs}\nguard: {defenses: [{use: mirabel, significance: 0.01}]}\n"
            "calibrate: {questions: 60, documents: 24}\n"
        )
        (tmp_path / "docs").mkdir()
        for i, (_, text) in enumerate(case_notes(24)):
            (tmp_path / "docs" / f"{i}.md").write_text(text)
        (tmp_path / "log.txt").write_text("\n".join(common_words(60)))
        assert CliRunner().invoke(cli, ["index", "--no-calibrate"]).exit_code == 0
        done = CliRunner().invoke(cli, ["calibrate", "--log", "log.txt", "--json"], catch_exceptions=False)
        found = json.loads(done.stdout)["defenses"]["mirabel"]
        assert found["significance"] is None and 0.01 < found["attainable"] == pytest.approx(1 / 61)
        assert found["rates"]["0.01"] is None and found["rates"]["0.1"] is not None
        assert found["log"].keys() == {"as_close", "unfamiliar"}
