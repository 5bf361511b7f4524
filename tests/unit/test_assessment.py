"""The assessment on a folder, with an embedder that hashes words, so that it is fast and needs no weights."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from casemate import config as configuration
from casemate import plugins
from casemate.cli import console, main
from casemate.demo import assessment, assessment_report, sample
from casemate.demo import run as demo
from casemate.demo.clinic import case_notes
from casemate.demo.sample import SampledCorpus
from casemate.errors import BackendError, DataError
from casemate.monitor.poisoning import scoring
from casemate.redteam.campaigns.pipeline import campaign_lock
from casemate.runtime.file_lock import LockHeld
from casemate.types import Document
from tests.fakes import LongTexts

try_documents = importlib.import_module("casemate.cli.try_documents")  # `casemate.cli` has a function with this name


CONFIG = assessment.CONFIG
SMALL = {
    **CONFIG,
    "calibrate": {"questions": 60, "documents": 20},
    "redteam": {"attacks": ["direct"], "folder": "redteam"},
}


@contextmanager
def steps(title, total):
    yield lambda count: None


def shrink(monkeypatch):
    """Replaces the embedder's model and reduces the number of questions."""
    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda role, name: LongTexts if name == "minilm" else load(role, name))
    monkeypatch.setattr(assessment, "CONFIG", SMALL)
    monkeypatch.setattr(assessment, "CRAWL_QUESTIONS", 6)
    monkeypatch.setattr("casemate.redteam.campaigns.own.BENIGN_QUESTIONS", 20)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    shrink(monkeypatch)


def test_assessment_includes_all_default_membership_attacks():
    """The report names the strongest attack. Without one of the attacks, its figure could be too low."""
    used = [spec.use for spec in configuration.parse(CONFIG).redteam.attacks]
    assert used == [spec.use for spec in configuration.RedteamSection().attacks]


def write_notes(folder, count):
    for name, text in case_notes(count):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def run(folder, tmp_path, seconds=60.0):
    work = tmp_path / "work"
    work.mkdir()
    return asyncio.run(assessment.try_folder(folder, work, ["When is the pharmacy open?"], seconds, steps))


def test_drafted_questions_keep_the_capital_letters_of_names():
    text = "The invoices of the bakery went to Priya Natarajan. The annual audit was led by the head accountant."
    chunks = [Document(f"d{i}", text) for i in range(8)]
    found = assessment._questions(chunks, 2, np.random.default_rng(1))
    assert "Priya Natarajan" in " ".join(found)
    assert "priya" not in " ".join(found)


def test_assessment_holds_out_documents_and_measures_with_and_without_the_guard(tmp_path):
    found = run(write_notes(tmp_path / "notes", 44), tmp_path)
    held = found.sample
    assert (held.found, held.indexed, held.held_out, held.gap) == (44, 33, 11, "")
    assert held.whole
    assert {d.source for d in held.split.nonmembers}.isdisjoint(d.source for d in held.split.members)
    assert found.membership.evidence["members"] == len(held.split.members)
    assert found.pasted.quoted["off"].value > 0.8
    assert found.pasted.quoted["on"].value < 0.3
    page = assessment_report.render_assessment(found)
    assert "<code>guard.audience</code> decide who may read the others" in page
    assert "2. A pasted record: the guard withholds the rest<" in page
    low = assessment_report.strongest(found, "on")[1].low
    assert ("What to do about it" in page) == bool(assessment_report.remedy(found)) == (low > 0.5)
    ineffective = [replace(attack, on=attack.off) for attack in found.membership.attacks]
    failed = replace(found, membership=replace(found.membership, attacks=tuple(ineffective)))
    assert "unentitled: quorum" in assessment_report.remedy(failed)
    assert "What to do about it" in assessment_report.render_assessment(failed)
    page = assessment_report.render_assessment(replace(found, pasted=None))
    assert "2. A pasted record<" in page and "Not tried: no part of your documents has" in page
    crawl = found.crawl.by_side
    assert crawl["off"].crr.value > crawl["on"].crr.value
    assert found.poisoning.false_answers["on"] is None  # 44 notes are too few for the screening
    membership, extraction, poisoning = assessment_report.headlines(found)
    assert membership.off.value > 0.9 > membership.on.value
    assert f"{found.sample.chunks:,} chunks" in extraction.cases
    assert "at least 500 chunks" in poisoning.reason
    assert poisoning.on is None
    page = assessment_report.render_assessment(found)
    assert "simulated reader" in page.lower()
    assert "<mark>" in page
    assert "not measured" in page
    assert "] %" not in page.replace("\N{NO-BREAK SPACE}", " ")
    assert "<script" not in page
    assert json.dumps(assessment_report.as_json(found))


@pytest.mark.slow
def test_held_out_documents_count_for_the_screening(tmp_path, monkeypatch):
    folder = write_notes(tmp_path / "notes", 44)
    for module in (assessment, scoring):  # more chunks than the index has, fewer than in the whole folder
        monkeypatch.setattr(module, "MIN_DOCUMENTS", 40)
    found = run(folder, tmp_path)
    assert found.sample.chunks < 40
    assert found.poisoning.gap == ""
    assert found.poisoning.false_answers["on"].value <= found.poisoning.false_answers["off"].value


def test_a_failure_is_reported_first(tmp_path):
    found = run(write_notes(tmp_path / "notes", 3), tmp_path)
    assert assessment_report.failures(found) == []
    assert "Do not trust" not in assessment_report.render_assessment(found)
    broken = replace(found.crawl.by_side["on"], failed=2)
    found = replace(found, crawl=replace(found.crawl, by_side=found.crawl.by_side | {"on": broken}))
    assert assessment_report.failures(found) == ["With the guard on, a defense failed in 2 questions of the crawl."]
    assert "Do not trust these figures" in assessment_report.render_assessment(found)
    assert assessment_report.as_json(found)["failures"]


def test_too_few_documents_give_a_reason_instead_of_a_figure(tmp_path):
    found = run(write_notes(tmp_path / "notes", 5), tmp_path)
    assert (found.sample.indexed, found.sample.held_out, found.membership) == (5, 0, None)
    membership_headline = assessment_report.headlines(found)[0]
    assert (membership_headline.off, membership_headline.on) == (None, None)
    assert "at least 10 of each" in membership_headline.reason
    page = assessment_report.render_assessment(found)
    assert "could not be calibrated" in page
    assert "crawl_limit, questions" not in page  # there is no casemate.yaml for the setting
    assert all(f"casemate redteam {name}" in page for name in ("run", "crawl", "probe"))


@pytest.mark.parametrize(("chunks", "said"), [(24, True), (30, False)])
def test_report_states_that_mirabel_withheld_no_document(chunks, said, tmp_path):
    found = run(write_notes(tmp_path / "notes", 5), tmp_path)
    found = replace(found, guard_gap="", sample=replace(found.sample, chunks=chunks))
    note = (
        "mirabel withheld no document: it decides only from 30 chunks, and 24 were indexed. Use a folder of at least "
        "40 documents."
    )
    assert assessment_report.guard_note(found) == (note if said else "")
    assert (note in assessment_report.render_assessment(found)) == said
    assert assessment_report.as_json(found)["guard_note"] == (note if said else "")


def test_a_large_folder_is_sampled(tmp_path, monkeypatch):
    folder = write_notes(tmp_path / "notes", 30)
    monkeypatch.setattr(sample, "MAX_FILES", 12)
    corpus = SampledCorpus(folder)
    names = [source.name for source in corpus.sources()]
    assert (len(names), corpus.left_out) == (12, 18)
    assert names == [source.name for source in corpus.sources()]
    monkeypatch.setattr(sample, "MAX_BYTES", 5000)
    assert sum(source.size for source in corpus.sources()) <= 5000


def test_unreadable_files_are_skipped_with_a_reason(tmp_path):
    folder = write_notes(tmp_path / "notes", 8)
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    with (folder / "big.txt").open("wb") as file:
        file.truncate(50_000_000)
    if os.getuid():
        (folder / "secret.txt").write_text("no")
        (folder / "secret.txt").chmod(0)
    found = run(folder, tmp_path)
    reasons = {p.where: p.reason for p in found.sample.problems}
    assert "binary" in reasons["binary.txt"]
    assert "50 MB, more than max_file_mb (10 MB)" in reasons["big.txt"]
    assert (found.sample.indexed, found.sample.ignored) == (8, 1)
    ignored = "ignored, because they are not text, markdown, html, pdf or jsonl: 1 file (1 .jpg)"
    assert ignored in assessment_report.scope(found)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: folder.mkdir(), "no file of a known type"),
        (lambda folder: None, "no file or folder"),
        (lambda folder: folder.write_bytes(b"\0" * 100), "no file of a known type"),
    ],
)
def test_folder_without_readable_files_is_an_error(tmp_path, make, expected):
    make(tmp_path / "documents")
    with pytest.raises(DataError, match=expected):
        run(tmp_path / "documents", tmp_path)


def test_single_binary_file_is_an_error_with_a_reason(tmp_path):
    (tmp_path / "only.txt").write_bytes(bytes(range(256)) * 20)
    with pytest.raises(DataError, match="binary"):
        run(tmp_path / "only.txt", tmp_path)


def test_marked_parts_concatenate_to_the_reply():
    rest = "the second half of this record says that the dose was doubled in May"
    reply = f"Here it is: {rest}. And more of other things that nobody asked for."
    parts = assessment_report.mark_quotations(f"The first half. And {rest}.", "The first half.", reply)
    assert "".join(text for text, _ in parts) == reply
    assert [text for text, copied in parts if copied] == [rest]
    assert assessment_report.mark_quotations(rest, "", "") == []


def test_command_writes_only_the_report(tmp_path, monkeypatch, capsys):
    write_notes(tmp_path / "notes", 5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["casemate", "try", "notes", "--json"])
    with pytest.raises(SystemExit, match="0"):
        main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == ".casemate/try/report.html"
    assert os.listdir(".casemate/try") == ["report.html"]
    assert os.stat(".casemate/try/report.html").st_mode & 0o077 == 0
    assert [h["on"] is None for h in printed["headlines"]] == [True, False, True]


def test_terminal_reports_the_missing_calibration_before_the_figures(tmp_path, monkeypatch, capsys):
    write_notes(tmp_path / "notes", 24)  # 10 are held out, and 14 are too few for the calibration
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["casemate", "try", "notes"])
    with pytest.raises(SystemExit, match="0"):
        main()
    printed = capsys.readouterr().out
    assert "too few sources (14; a calibration needs at least 20)" in printed
    assert printed.index("mirabel withheld no document") < printed.index("Guard off -> guard on")


def test_report_path_that_is_a_folder_is_an_error_before_indexing(tmp_path, monkeypatch, capsys):
    write_notes(tmp_path / "notes", 5)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(try_documents, "try_folder", None)  # not called
    monkeypatch.setattr("sys.argv", ["casemate", "try", "notes", "--out", "out"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "cannot write out: it is a folder" in " ".join(capsys.readouterr().err.split())
    assert sorted(os.listdir()) == ["notes", "out"]


def test_only_folders_of_killed_runs_are_removed(tmp_path):
    killed, running, other = (tmp_path / f"work-{name}" for name in ("killed", "running", "other"))
    for folder in (killed, running, other):
        folder.mkdir()
        (folder / "index.db").write_text("documents")
    (killed / "try.lock").write_text('{"pid": 1}')  # a killed process leaves its lock file
    with try_documents._lock(running):
        made = try_documents._make_work_folder(tmp_path / "report.html")
    assert sorted(tmp_path.iterdir()) == sorted([made, running, other])
    assert (running / "index.db").exists() and not list(made.iterdir())


def test_the_whole_assessment_holds_the_campaign_lock(tmp_path, monkeypatch):
    messages, crawl = [], assessment._crawl

    async def crawl_and_acquire_the_lock(systems, *others):
        with pytest.raises(LockHeld) as held, campaign_lock(tmp_path / "work" / "redteam", "another campaign"):
            pass
        messages.append(str(held.value))
        return await crawl(systems, *others)

    monkeypatch.setattr(assessment, "_crawl", crawl_and_acquire_the_lock)
    run(write_notes(tmp_path / "notes", 5), tmp_path)
    assert "runs an assessment in" in messages[0]


def test_a_second_demo_in_the_same_folder_is_refused_before_indexing(tmp_path):
    with campaign_lock(tmp_path / "redteam", "the demo"), pytest.raises(LockHeld, match="runs the demo in"):
        (tmp_path / "casemate.yaml").write_text(demo.CONFIG)
        asyncio.run(demo.run_demo(tmp_path, Console(), steps, None, None))


def test_progress_is_printed_as_lines_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.01)
    lines = ""
    with console.show_progress("embedding", 4) as count:
        count(1)
        while "embedding" not in lines:
            lines += capsys.readouterr().err
    assert re.match(r"embedding: 1 of 4 after \d+ s\n", lines)
    with console.bar() as progress:
        task = progress.add_task("embedding", total=1000)
        monkeypatch.setattr(progress, "get_time", iter(range(100)).__next__)
        for _ in range(3):
            progress.advance(task, 2)
        assert re.fullmatch(r"embedding: 6 of 1,000 after \d+ s", console._progress_line(progress.tasks[0]))
        progress.advance(task, 104)
        seconds = console._progress_line(progress.tasks[0])
        assert re.fullmatch(r"embedding: 110 of 1,000 after \d+ s, about \d+ s left", seconds)
        progress.advance(task, 886)
        assert re.search(r", about \d s left$", console._progress_line(progress.tasks[0]))
    with console.bar() as progress:
        progress.add_task("reading", total=4000, completed=1000, unit="bytes")
        assert console._progress_line(progress.tasks[0]).startswith("reading: 25 % after ")


def test_progress_without_a_total_shows_the_count_or_only_the_time(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.01)
    for done, expected in ((0, "comparing: after"), (2100, "comparing: 2,100 done after")):
        lines = ""
        with console.show_progress("comparing", None) as count:
            count(done)
            while expected not in lines:
                lines += capsys.readouterr().err


@pytest.mark.parametrize("error", [partial(BackendError, backend="sqlite", retryable=True), DataError])
def test_error_about_a_full_disk_does_not_state_that_work_is_kept(error, tmp_path):
    advice = "database or disk is full; finished work is kept, run again to continue"
    with pytest.raises(BackendError) as caught, try_documents._work_folder(tmp_path / "report.html") as work:
        raise error(f"campaign store {work}/campaigns.db: {advice}")
    assert str(caught.value).endswith(
        "database or disk is full. Nothing was kept: free space, or choose another place with --out"
    )
    assert not list(tmp_path.iterdir())
    with pytest.raises((BackendError, DataError), match="^other$"):
        with try_documents._work_folder(tmp_path / "report.html"):
            raise error("other")
