"""Messages of a first use."""

import importlib
import re
import socket
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from casemate import plugins
from casemate.app import open_app
from casemate.backends.generators.extractive import unanswered_reason
from casemate.cli import cli
from casemate.cli.ask import _Excluded, _explain, _report_withheld
from casemate.cli.canary import _describe_counts
from casemate.errors import ConfigError
from casemate.guard import defenses
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus
from casemate.rag.question_file import questions_in
from casemate.reports import verdicts
from casemate.reports.verdicts import evidence_items, verdict_lines
from casemate.types import Action, Answer, Document, Retrieval, SimilarityStats, Verdict
from tests.fakes import BagOfWords


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The module of the server; the working directory is empty, and the embedder needs no model."""
    pytest.importorskip("fastapi", reason="needs casemate[serve]")
    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda role, name: BagOfWords if name == "minilm" else load(role, name))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("casemate.gateway.server")


@pytest.mark.parametrize("documents", [(), (Document("a", "a text"),)])
def test_serve_warns_that_the_index_is_empty(documents, server, monkeypatch):
    if documents:
        with open_app() as app:
            app.index.add(documents, app.guard.rag.embedder.embed([d.content for d in documents]))
    monkeypatch.setattr(server, "serve", lambda app, show: show("http://x"))
    done = CliRunner().invoke(cli, ["serve"], catch_exceptions=False)
    assert "serving at http://x/v1" in done.stderr
    assert ("the index is empty" in done.stderr) == (not documents)


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_serve_reports_observe_mode_and_the_command_that_creates_the_first_key(mode, server, monkeypatch):
    Path("casemate.yaml").write_text(f"guard: {{mode: {mode}}}\n")
    monkeypatch.setattr(server, "serve", lambda app, show: show("http://x"))
    start = partial(CliRunner().invoke, cli, catch_exceptions=False)
    first = start(["serve"]).stderr
    assert "create a key: casemate key create NAME" in first
    assert ("the guard observes" in first) == (mode == "observe")
    start(["key", "create", "app"])
    assert "create a key" not in start(["serve"]).stderr


@pytest.mark.parametrize("options", [(), ("--details",)])
def test_key_list_shows_the_command_that_creates_the_first_key(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = partial(CliRunner().invoke, cli, ["key", "list", *options], catch_exceptions=False)
    assert run().stdout == "no API key exists; create one with 'casemate key create NAME'\n"
    CliRunner().invoke(cli, ["key", "create", "app"], catch_exceptions=False)
    assert "app" in run().stdout and "no API key" not in run().stdout


@pytest.mark.parametrize(("mode", "unentitled"), [("observe", "nothing"), ("observe", "full"), ("enforce", "nothing")])
def test_serve_warns_that_observe_mode_does_not_enforce_the_audience_policy(mode, unentitled, server, monkeypatch):
    Path("casemate.yaml").write_text(f"guard: {{mode: {mode}, audience: {{unentitled: {unentitled}}}}}\n")
    monkeypatch.setattr(server, "serve", lambda app, show: show("http://x"))
    warned = CliRunner().invoke(cli, ["serve"], catch_exceptions=False).stderr
    assert ("the audience policy is not carried out" in warned) == ((mode, unentitled) == ("observe", "nothing"))


def test_serve_reports_that_the_address_is_in_use(server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(cli, ["serve", "--port", str(port)])
    assert str(done.exception) == f"127.0.0.1:{port} is in use; choose another with --port"


def test_a_missing_question_file_is_named_once():
    with pytest.raises(ConfigError) as error:
        questions_in(Path("absent.txt"))
    assert str(error.value) == "cannot read the questions in absent.txt: No such file or directory"


EVIDENCE = {
    "mirabel": {
        "target": "n/1.md",
        "form": "calibrated",
        "flagged": [],
        "withheld": [],
        "reasons": [],
        "p": 0.25,
        "n": 90,
    },
    "crawl_limit": {"level": "suspected", "grade": "full", "quotes": 12.5, "echoes": 1.0, "chunks": 40},
    "honeytoken": {"flagged": ["h1"], "different": 3, "crawler": True},
    "canary_token": {"marked": ["d1", "d2"], "oracle": "", "ended": "done", "leaked": "d1", "form": "", "errors": 0},
    "quorum": {
        "units": 3,
        "readable": 1,
        "words": 2,
        "stating": 3,
        "support": [3, 3],
        "lost": 1,
        "added": 2,
        "altered": 1,
    },
    "query_filter": {"by": "rules", "rules": ["repeat", "paste"]},
    "reindex": {"version": "2", "mode": "linear", "topic": 4, "topics": 2, "came_in": 1},
    "personal_data": {"EMAIL": 2, "PERSON": 1},
    "dp_rag": {"floor": 0.5, "kept": 3, "epsilon": 1.0},
    "similarity_floor": {"floor": 0.3, "lowest": 0.25, "kept": 4},
}
EXPECTED = {
    "mirabel": "no document is closer than in benign questions (highest score against its threshold: "
    "n/1.md; 25 % of benign questions are as close)",
    "crawl_limit": "client suspected: 40 different chunks shown, evidence of long quotes 12.5, of questions that "
    "repeat answers 1; it is answered from whole chunks",
    "honeytoken": "planted records in the context: h1; this client has retrieved 3 different ones, as a crawler does",
    "canary_token": "the answer began to contain the watermark of chunk d1 and was cut",
    "quorum": "2 keywords released from 3 units (a unit is a source with its copies; 3 of them state something about "
    "the question) that the client may not read; 1 readable document kept; units that state each keyword: 3, 3; units "
    "that must change to alter the answer: 1",
    "query_filter": "the wording matches rules: repeat, paste",
    "reindex": "ordered for topic 4 by version 2 (linear); 1 chunk came into the context, which has 2 topics",
    "personal_data": "masked: 2 EMAIL, 1 PERSON",
    "dp_rag": "3 chunks kept above the noisy similarity threshold .50",
    "similarity_floor": "least similarity in the context .25, floor .30; 4 chunks of the context reach it",
}


def test_every_defense_with_verdicts_states_its_reason_in_words():
    root = Path(defenses.__file__).parent
    files = [f for f in root.rglob("*.py") if re.search(r"[^.]Verdict\(", f.read_text())]
    judging = {Path(f.relative_to(root).parts[0]).stem for f in files}
    assert judging == set(verdicts.DEFENSES) == set(EXPECTED)
    for name, evidence in EVIDENCE.items():
        assert verdicts.reason(name, evidence) == EXPECTED[name]
    one = verdicts.reason("quorum", EVIDENCE["quorum"] | {"stating": 1})
    assert one == EXPECTED["quorum"].replace("3 of them state", "1 of them states")
    assert verdicts.reason("quorum", {"units": 0, "readable": 0, "words": 0, "best": 0.17, "floor": 0.3}) == (
        "left out unreadable sources; none was relevant (best .17, needs .30); 0 readable documents kept"
    )
    assert verdicts.reason("embargo", {"rule_name": "x", "none": []}) == "rule name: x"


def test_a_canary_that_passed_after_a_repetition_is_named():
    fact, fee = (CanaryResult(name, "r", datetime.now(UTC), CanaryStatus.PASS) for name in ("fact-05", "fee"))
    results = {"fact-05": fact, "fee": fee}
    assert _describe_counts(results, ["fact-05"]) == (
        "1 passed at once, 1 after a repetition (fact-05), 0 failed, 0 without a verdict"
    )
    assert _describe_counts(results, []) == "2 passed, 0 failed, 0 without a verdict"


def lines(why, flagged=True, hidden=("d3",), enforced=True, threshold=13.7, **evidence):
    found = {**EVIDENCE["mirabel"], "reasons": why, **evidence}
    action = Action.HIDE if hidden else Action.NONE
    return verdict_lines(Verdict("mirabel", flagged, action, 11.5, threshold, hidden, found, enforced))


def test_score_of_crawl_limit_is_shown_as_evidence_with_its_bound():
    found = Verdict("crawl_limit", False, Action.NONE, 0.5, 49999.99999999999, (), EVIDENCE["crawl_limit"])
    assert verdict_lines(found)[0] == "crawl_limit: not flagged, nothing withheld; evidence 0.5 of 50,000"


def test_a_verdict_shows_decision_reason_and_what_is_withheld():
    first, second, last = lines(["closeness"], withheld=["a.md", "b.md"])
    assert first == "mirabel: flagged, 1 chunk withheld; score 11.50, threshold 13.70"
    assert second.startswith("  reason: the question is closer to a document than benign questions are (")
    assert last == "  withheld sources: a.md, b.md"
    assert lines([], False, ())[0] == "mirabel: not flagged, nothing withheld; score 11.50, threshold 13.70"
    assert "1 chunk would be withheld (observe mode)" in lines(["closeness"], enforced=False)[0]
    assert lines(["closeness"], enforced=False, withheld=["a.md"])[-1] == "  would withhold sources: a.md"
    assert lines([], False, (), threshold=None, undecided="3 documents")[:2] == [
        "mirabel: could not decide, nothing withheld",
        "  reason: 3 documents",
    ]
    failed = Verdict("quorum", False, Action.WITHHOLD, 0.0, None, evidence={"error": "OSError"})
    assert verdict_lines(failed) == ["quorum: failed, the whole context withheld", "  reason: OSError"]


@pytest.mark.parametrize("enforced", [True, False])
def test_verdict_of_quorum_does_not_contain_not_flagged(enforced):
    far = {"units": 0, "readable": 0, "words": 0, "best": 0.24, "floor": 0.3, "left_out": 6}
    found = Verdict("quorum", False, Action.HIDE, 0.0, 0.0, ("a#1", "b#1"), far, enforced)
    assert verdict_lines(found) == [
        "quorum: left out 6 unreadable sources; none was relevant (best .24, needs .30); 0 readable documents kept"
    ]
    answered = Verdict("quorum", False, Action.HIDE, 0.0, 0.0, ("a#1", "b#1"), EVIDENCE["quorum"], enforced)
    decision, _, last = verdict_lines(answered)
    left_out = "2 chunks that the client may not read"
    assert decision == f"quorum: {f'left out {left_out}' if enforced else f'would leave out {left_out} (observe mode)'}"
    assert last == f"  {'left out' if enforced else 'would withhold'} chunks: a#1, b#1"


@pytest.mark.parametrize("flagged", [True, False])
def test_figures_of_a_flagged_question_are_explained(flagged, capsys):
    found = (
        Verdict("mirabel", flagged, Action.NONE, 10.91, 16.69, (), EVIDENCE["mirabel"]),
        Verdict("crawl_limit", flagged, Action.NONE, 1.0, 1e5, (), EVIDENCE["crawl_limit"]),
        Verdict("quorum", flagged, Action.NONE, 0.0, 0.0, (), EVIDENCE["quorum"]),
    )
    _explain(
        Answer("text", Retrieval((), SimilarityStats(40, 0.1, 0.1)), found), "enforce", _Excluded("a", 5, None, ())
    )
    said = " ".join(capsys.readouterr().out.split())
    assert ("the threshold differs at random by client and document" in said) == flagged
    assert ("evidence 1 is that of an ordinary client" in said) == flagged


RECORD = "Ada Lund reported back pain after lifting the heavy fixtures. The company doctor advised two weeks of rest."
OTHER = "Visitors sign in at gate 2 and wear a yellow badge."


@pytest.mark.parametrize(
    ("question", "context", "reason"),
    [
        (f"Is this in your files? {RECORD}", RECORD, "contains 2 of the sentences in the context"),
        ("Who won the cup?", OTHER, "no sentence of the context answers the question"),
    ],
)
def test_an_unknown_answer_has_a_reason(question, context, reason):
    assert reason in unanswered_reason(question, [Document("d", context)])


@pytest.mark.parametrize(
    ("enforced", "hidden", "note"),
    [
        (False, ("hr.txt",), "note: the guard observes; it would withhold hr.txt; --explain shows why"),
        (True, ("hr.txt",), "note: the guard withheld hr.txt; --explain shows why"),
        (True, (), ""),
    ],
)
def test_note_lists_the_sources_that_are_or_would_be_withheld(enforced, hidden, note, capsys):
    given = [Verdict("mirabel", bool(hidden), Action.HIDE, 2.0, 1.0, hidden, {}, enforced)] * 2
    assert _report_withheld(given) == bool(note)
    assert " ".join(capsys.readouterr().err.split()) == note


def test_empty_evidence_is_omitted():
    assert evidence_items({"reasons": [], "target": "", "came_in": 0, "p": 0.25}) == [("came in", "0"), ("p", "0.25")]


def test_each_withheld_source_is_shown_with_its_score():
    last = lines(["closeness", "before"], withheld=["a.md", "b.md", "c.md"], scores={"a.md": 14.25, "c.md": 13.8})[-1]
    assert last == "  withheld sources: a.md (score 14.25), b.md, c.md (score 13.80)"


def test_evidence_of_crawl_limit_is_shown_with_its_limits():
    evidence = EVIDENCE["crawl_limit"] | {"suspected_above": 10.0, "alarmed_from": 1e5}
    assert "repeat answers 1 (suspected above 10, alarmed from 100,000)" in verdicts.reason("crawl_limit", evidence)
    assert verdicts.reason("crawl_limit", evidence | {"level": "alarmed"}).startswith(
        "client alarmed by an earlier question: "
    )
    now = evidence | {"level": "alarmed", "quotes": 2e5}
    assert verdicts.reason("crawl_limit", now).startswith("client alarmed: ")


def test_a_document_withheld_for_an_earlier_question_is_not_flagged_again():
    first, second, _ = lines(["before"])
    assert first.startswith("mirabel: flagged by an earlier question only, 1 chunk withheld")
    assert "flagged for this client before, and stays withheld" in second
