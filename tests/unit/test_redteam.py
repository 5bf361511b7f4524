"""What a campaign shows of itself, and how the command ends."""

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from casemate import config as configuration
from casemate.app import open_app
from casemate.cli.console import questions_in
from casemate.cli.redteam import _exit_code, _with
from casemate.errors import ConfigError, DataError
from casemate.lab.compare import Change, Diff
from casemate.lab.ledger import Exchange
from casemate.lab.results import Status
from casemate.redteam import show, transcripts
from casemate.types import Document
from tests.campaigns import campaign

BEYOND = Diff(worse=(Change("AUC", ".5", ".9"),), compared=1)


def records(*names):
    """Forms: all that differs is the name."""
    return tuple(Document(name, f"Patient {name}, allergy to penicillin, seen by the clinic.") for name in names)


def test_a_transcript_shows_the_attack_s_words_and_not_what_all_records_share():
    asked = Exchange(
        "Is this in the context? Patient {}, allergy to penicillin, seen by the clinic.", "Yes. Penicillin."
    )
    experiment = SimpleNamespace(
        split=SimpleNamespace(members=records("ada", "bob"), nonmembers=records("eve", "joe")),
        attacks={"direct": None},
        session=lambda name, target, source: (asked._replace(question=asked.question.format(source)),),
    )
    found = list(transcripts(experiment))
    assert len(found) == 4
    for transcript in found:
        told = f"{transcript.question} {transcript.reply}".lower()
        assert "context" in told and "yes" in told
        assert not re.search("patient|allergy|penicillin|clinic|seen|ada|eve", told)


def test_what_is_printed_can_do_nothing_to_a_terminal_and_is_never_better_than_the_checks():
    made = campaign()
    (first, *rest) = made.checks
    worst = replace(first, status=Status.FAIL, why="\x1b[31mred\x1b]0;title\x07 [bold]not ours[/bold]")
    console = Console(width=200)
    with console.capture() as held:
        show(replace(made, status=Status.PASS, checks=(worst, *rest), simulated=("\x9b2J",)), console)
    told = held.get()
    assert told.startswith(("FAIL", "ERROR"))
    assert "[bold]not ours[/bold]" in told
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", told)


@pytest.mark.parametrize(
    ("status", "change", "code"),
    [
        (Status.PASS, None, 0),
        (Status.PASS, Diff(compared=3), 0),
        (Status.PASS, Diff(), 3),
        (Status.PASS, BEYOND, 1),
        (Status.INCONCLUSIVE, BEYOND, 1),
        (Status.FAIL, Diff(), 1),
        (Status.ERROR, BEYOND, 2),
    ],
)
def test_the_exit_code_is_that_of_the_gravest_finding(status, change, code):
    assert _exit_code(status, change) == code


def test_the_command_line_overrides_keys_and_keeps_the_options_of_an_attack():
    settings = configuration.parse({"redteam": {"attacks": [{"use": "mba", "masks": 3}], "members": 20}})
    changed = _with(settings, ["mba", "dcmi"], None, 30, None).redteam
    assert [(part.use, part.options) for part in changed.attacks] == [("mba", {"masks": 3}), ("dcmi", {})]
    assert (changed.members, changed.nonmembers, changed.budget) == (20, 30, None)
    with pytest.raises(ConfigError, match=r"redteam\.members is 3: input should be greater than or equal to 10"):
        _with(settings, None, 3, None, None)


def test_a_file_without_questions_is_refused_and_not_replaced_by_made_ones(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"other": 1}\n\n')
    with pytest.raises(ConfigError, match="holds no questions"):
        questions_in(tmp_path / "log.jsonl")


def test_a_damaged_calibration_is_named_before_anything_is_embedded(tmp_path):
    (tmp_path / "calibration.json").write_text("{")
    parts = {"guard": {"defenses": [{"use": "mirabel", "calibration": str(tmp_path / "calibration.json")}]}}
    places = {"index": {"use": "sqlite", "path": str(tmp_path / "index.db")}}
    store = {"use": "sql_events", "path": str(tmp_path / "events.db")}
    with open_app({"rag": places, "store": store} | parts) as app:
        app.guard.rag.embedder = None  # nobody may ask it
        with pytest.raises(DataError, match="no calibration, or damaged"):
            asyncio.run(app.calibrate())
