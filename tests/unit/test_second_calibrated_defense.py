"""A calibrated defense from another package: calibrated, enforced, tuned and attacked like the built-in one."""

import asyncio
import json
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from casemate import plugins
from casemate.app import open_app
from casemate.cli import cli, console
from casemate.doctor import examine
from casemate.errors import ConfigError, DataError
from casemate.gateway import operating_point
from casemate.guard.calibration.file import CalibrationFile, read_calibrations
from casemate.monitor.enforcement import SettingsSync
from casemate.protocols import CalibratedDefense
from casemate.redteam.campaigns.own import OwnMembershipCampaign
from casemate.redteam.campaigns.workers import calibration_files
from casemate.testing import check_defense
from casemate.types import Action, Outcome, Query, Verdict
from tests.fakes import documents

MODULE = Path(__file__).stem


@dataclass(eq=False)
class TopSimilarity(CalibratedDefense):
    """Withholds every source in the context whose similarity exceeds that of benign queries.

    Attributes: calibration: The calibration file. significance: Largest share of benign queries that may be flagged.
    min_documents: With fewer chunks the defense is inactive.
    """

    calibration: Path = Path("top_similarity.json")
    significance: float | None = 0.1
    min_documents: int = 30

    name: ClassVar[str] = "top_similarity"
    paper: ClassVar[str] = "none: a test"
    max_hidden_sources: ClassVar[int] = 3

    def __post_init__(self):
        self._file = CalibrationFile(self.calibration)

    def ready(self, tenant, documents):
        if documents < self.min_documents:
            return None
        found = self._file.of(tenant)
        if found is None:
            raise DataError(f"top_similarity has no calibration for tenant {tenant!r}: run 'casemate calibrate'")
        return found

    async def score(self, query, retrieval, calibration):
        scores = {}
        for hit in retrieval.hits[: query.k]:
            scores[hit.document.source] = max(hit.score, scores.get(hit.document.source, -1.0))
        return scores

    async def on_retrieve(self, query, retrieval):
        calibration = self.ready(query.tenant, retrieval.similarity_stats.n)
        if calibration is None or not retrieval.hits:
            return Outcome(retrieval, Verdict(self.name, False, Action.NONE, 0.0, None))
        threshold = calibration.threshold(self.significance)
        scores = await self.score(query, retrieval, calibration)
        hidden = {source for source, score in scores.items() if score > threshold}
        ids = tuple(h.document.id for h in retrieval.hits if h.document.source in hidden)
        kept = tuple(h for h in retrieval.hits if h.document.source not in hidden)
        action = Action.HIDE if hidden else Action.NONE
        verdict = Verdict(self.name, bool(hidden), action, max(scores.values()), threshold, ids)
        return Outcome(replace(retrieval, hits=kept), verdict)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Simulates a package that registers the defense and an embedder as entry points."""
    values = {"defense": ("top_similarity", f"{MODULE}:TopSimilarity"), "embedder": ("bag", "tests.fakes:BagOfWords")}
    classes = {"defense": TopSimilarity}

    class Registered(EntryPoint):
        def load(self):
            return classes.get(self.group.removeprefix("casemate.")) or super().load()

    entries = [Registered(name, value, f"casemate.{role}") for role, (name, value) in values.items()]

    def entry_points(group, name=None):
        return [e for e in entries if e.group == group and name in {None, e.name}]

    monkeypatch.setattr(plugins, "entry_points", entry_points)


@pytest.fixture
def folder(tmp_path):
    """A corpus of 80 records, and a configuration whose only defense is the third-party one."""
    corpus = [{"_id": d.id, "text": d.text} for d in documents(80, words=14)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    write(tmp_path, "top_similarity")
    return tmp_path


def write(folder, *defenses):
    (folder / "casemate.yaml").write_text(
        f"""\
rag: {{corpus: corpus.jsonl, embedder: bag, k: 3}}
guard: {{defenses: [{", ".join(defenses)}]}}
calibrate: {{questions: 60, documents: 24}}
redteam: {{attacks: [direct], members: 20, nonmembers: 20, folder: lab}}
"""
    )


def opened(folder):
    app = open_app(folder / "casemate.yaml")
    asyncio.run(app.guard.add(documents(80, words=14)))
    return app


def ask(app, text):
    return asyncio.run(app.guard.ask(Query(text, k=3)))


def test_passes_the_conformance_checks(tmp_path):
    check_defense(TopSimilarity(min_documents=10**6))


def test_the_defense_fails_closed_until_calibrated_and_then_withholds_documents(folder):
    with opened(folder) as app:
        (defense,) = app.calibrated
        assert (defense.name, defense.calibration) == ("top_similarity", folder / "top_similarity.json")
        assert "run 'casemate calibrate'" in app.due()
        assert ask(app, "amber birch").verdicts[0].action is Action.WITHHOLD  # fails closed until calibrated
        found = asyncio.run(app.calibrate())
        assert found.keys() == {"top_similarity"}
        assert read_calibrations(folder / "top_similarity.json").keys() == {"default"}
        assert app.due() == ""
        (record,) = documents(1, words=14)
        attacked, benign = ask(app, record.text), ask(app, "amber birch")
        assert attacked.verdicts[0].hidden == ("d0",) and "d0" not in attacked.text.split()
        assert not benign.verdicts[0].flagged and len(benign.retrieval.hits) == 3
        assert attacked.verdicts[0].threshold == found["top_similarity"].threshold(0.1)


def test_the_command_line_calibrates_the_defense_and_writes_its_report(folder, monkeypatch):
    write(folder, "{use: mirabel, calibration: mirabel.json}", "top_similarity")
    opened(folder).close()
    monkeypatch.chdir(folder)
    stop, last = console._ProgressLines.stop, []
    monkeypatch.setattr(console._ProgressLines, "stop", lambda bar: [last.extend(bar.tasks), stop(bar)])
    done = CliRunner().invoke(cli, ["calibrate", "--json"])
    assert done.exit_code == 0, done.output
    assert [task.completed == task.total > 0 for task in last] == [True, True]
    figures = json.loads(done.stdout)
    assert figures["tenant"] == "default" and figures["defenses"].keys() == {"mirabel", "top_similarity"}
    assert all(each["rates"]["0.1"] is not None for each in figures["defenses"].values())
    assert "{use: top_similarity, significance: 0.1}" in (folder / "top_similarity.html").read_text()
    assert "mirabel" not in (folder / "top_similarity.html").read_text()
    assert "mirabel.session_hours" in (folder / "mirabel.html").read_text()


def test_doctor_checks_the_calibration_of_the_defense(folder):
    opened(folder).close()
    findings = [f for f in examine(folder / "casemate.yaml") if f.name == "guard"]
    assert [(f.ok, "run 'casemate calibrate'" in f.detail) for f in findings] == [(False, True)]
    with open_app(folder / "casemate.yaml") as app:
        asyncio.run(app.calibrate())
    findings = [f for f in examine(folder / "casemate.yaml") if f.name == "guard"]
    assert [f.ok for f in findings] == [True]
    assert findings[0].detail.startswith("top_similarity, tenant 'default': ")


def test_a_changed_operating_point_is_recorded_saved_and_synchronized(folder):
    file = (folder / "casemate.yaml").rename(folder / "other.yaml")
    with open_app(file) as app, open_app(file) as other:
        asyncio.run(app.guard.add(documents(80, words=14)))
        assert operating_point.change(app, 0.02, "operator") == ""
        assert app.calibrated[0].significance == 0.02
        assert [e.body["name"] for e in app.store.scan("setting")] == ["top_similarity.significance"]
        SettingsSync(other).sync()
        assert other.calibrated[0].significance == 0.02
    with open_app(file) as again:
        assert again.calibrated[0].significance == 0.02


def test_two_calibrated_defenses_work_together_with_separate_files(folder):
    write(folder, "{use: mirabel, calibration: mirabel.json}", "top_similarity")
    with opened(folder) as app:
        assert asyncio.run(app.calibrate()).keys() == {"mirabel", "top_similarity"}
        assert {v.defense for v in ask(app, "amber birch").verdicts} == {"mirabel", "top_similarity"}
        scores = [
            read_calibrations(folder / f"{name}.json")["default"].benign for name in ("mirabel", "top_similarity")
        ]
        assert all(scores) and scores[0] != scores[1]
        assert app.due() == ""


def test_two_defenses_cannot_share_a_calibration_file(folder):
    write(folder, "{use: mirabel, calibration: top_similarity.json}", "top_similarity")
    with pytest.raises(
        ConfigError, match=r"mirabel and top_similarity share the calibration file .*top_similarity\.json"
    ):
        opened(folder)


def test_the_lab_calibrates_each_defense_on_the_index_of_the_lab(folder):
    write(folder, "{use: mirabel, calibration: mirabel.json}", "top_similarity")
    with opened(folder) as app:
        result = asyncio.run(OwnMembershipCampaign(app, ["amber birch", "cedar delta"]).run(NoProgress))
        assert [attack.name for attack in result.attacks] == ["direct"] and not result.attacks[0].error
    (fitted,) = (folder / "lab").glob("calibration-*")
    assert [file.name for file in calibration_files(fitted)] == ["mirabel.json", "top_similarity.json"]
    assert all(read_calibrations(file)["default"].documents == 60 for file in calibration_files(fitted))
    assert not (folder / "top_similarity.json").exists()


def test_a_framework_integration_calibrates_and_enforces_the_defense():
    pytest.importorskip("langchain_core")
    from casemate.integrations.langchain import guarded
    from tests.unit.test_integrations_langchain import filled, ids
    from tests.wrapped import text_of

    settings = {"guard": {"defenses": ["top_similarity"]}, "calibrate": {"questions": 60, "documents": 24}}
    store = guarded(filled(), config=settings, fit=False)
    try:
        assert store.similarity_search(text_of("d4"), k=3) == []  # fails closed until it is calibrated
        store.calibrate()
        assert "d4" in ids(store.unguarded.similarity_search(text_of("d4"), k=3))
        found = ids(store.similarity_search(text_of("d4"), k=3))
        assert "d4" not in found and len(found) == 3
    finally:
        store.protection.close()


class NoProgress:
    def __init__(self, title, total):
        pass

    def __enter__(self):
        return lambda count: None

    def __exit__(self, *error):
        pass
