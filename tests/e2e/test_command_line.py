"""The command line as a process, with the real embedder and real files."""

import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.backends.indexes.sqlite import SqliteIndex

FINGERPRINT = "minilm:53aa51172d142c89:fp32:256"


@pytest.fixture
def run(tmp_path):
    """Runs ``casemate`` in an empty folder and expects an exit code."""

    def casemate(*words, code=0, calibrate=False, **options):
        if words[0] == "index" and not calibrate:  # calibration takes longer than all other steps together
            words += ("--no-calibrate",)
        done = subprocess.run(
            [sys.executable, "-m", "casemate", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=2400,
            check=False,
            **options,
        )
        assert done.returncode == code, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        return done

    return casemate


@pytest.fixture
def notes(tmp_path):
    """A folder of three notes."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, hours in (("pharmacy", "8:30 to 19:00"), ("library", "10:00 to 17:00"), ("bakery", "6:00 to noon")):
        text = f"# The {name}\n\nThe {name} is open from {hours}, on Sundays it is closed.\n"
        (folder / f"{name}.md").write_text(text)
    return folder


WITH_INTERRUPTS = (  # background jobs of a shell ignore SIGINT, and their child processes inherit that
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from casemate.cli import main; main()"
)


def start(tmp_path, *words):
    command = [sys.executable, "-c", WITH_INTERRUPTS, *words, *(("--no-calibrate",) if words[0] == "index" else ())]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def index_contents(tmp_path):
    index = SqliteIndex(tmp_path / ".casemate/index.db")
    index.open(FINGERPRINT, 384)
    found = index.digests(), index.check()
    index.close()
    return found


def write_many(folder, count=900):
    """A corpus for several indexing batches."""
    folder.mkdir()
    text = "the heron stands by the water. " * 6
    records = [{"_id": f"r{i}", "text": f"Record {i}: {text}"} for i in range(count)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def committed_documents(file):
    """Number of documents in an index that another process is writing."""
    if not file.exists():
        return 0
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db, suppress(sqlite3.OperationalError):
        return db.execute("SELECT count(*) FROM document").fetchone()[0]
    return 0  # the tables do not exist yet


def wait_for_documents(tmp_path, process):
    """Waits until the first documents are committed."""
    deadline = time.monotonic() + 120
    while not committed_documents(tmp_path / ".casemate/index.db"):
        assert process.poll() is None, "ended before anything was committed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.smoke
def test_init_index_and_ask_answer_a_question(run, notes):
    assert "casemate index" in run("init", "notes").stdout
    assert run("index").stdout.startswith("indexed 3 sources (3 chunks), 0 unchanged")
    answer = run("ask", "When is the pharmacy open?").stdout
    assert "8:30 to 19:00" in answer
    assert "Sources: [1] pharmacy.md" in answer
    assert run("index").stdout.startswith("indexed 0 sources (0 chunks), 3 unchanged")


def test_index_and_ask_work_without_a_configuration(run, notes):
    run("index", "notes")
    assert "10:00" in run("ask", "library opening time").stdout


def test_index_counts_ignored_files_by_type(run, notes, tmp_path):
    for name in ("prices.csv", "staff.csv", "letter.docx"):
        (tmp_path / "notes" / name).write_text("x")
    assert "3 files of other types ignored (2 .csv, 1 .docx)" in run("index", "notes").stdout


def test_explain_shows_the_score_and_threshold_of_mirabel(run, tmp_path):
    (tmp_path / "casemate.yaml").write_text("guard: {defenses: [{use: mirabel, mode: paper}]}")
    write_many(tmp_path / "docs", 60)
    run("index", "docs")
    shown = run("ask", "--explain", "Record 7: " + "the heron stands by the water. " * 6).stdout
    assert "score " in shown and "threshold " in shown
    assert "compared with" in shown


def test_json_is_one_object_on_stdout(run, notes):
    written = json.loads(run("init", "notes", "--generator", "extractive", "--json").stdout)
    assert written == {"written": "casemate.yaml", "generator": "extractive", "servers": []}
    report = json.loads(run("index", "--json").stdout)
    assert (report["indexed"], report["documents"], report["complete"]) == (3, 3, True)
    answer = json.loads(run("ask", "--json", "When is the bakery open?").stdout)
    assert answer["hits"][0].keys() == {"id", "source", "score"}
    assert answer["hits"][0]["id"] == "bakery.md"
    verdict, crawl = answer["verdicts"]
    assert (verdict["defense"], verdict["threshold"]) == ("mirabel", None)
    assert (crawl["defense"], crawl["flagged"], crawl["enforced"]) == ("crawl_limit", False, False)
    assert "too few chunks (3;" in verdict["evidence"]["undecided"]
    assert json.loads(run("doctor", "--json").stdout)["ok"] is True


def test_the_guard_option_sets_the_mode_of_one_question(run, tmp_path):
    write_many(tmp_path / "docs", 60)
    run("index", "docs")
    question = "Record 7: " + "the heron stands by the water. " * 6
    off, observe, enforce = (
        json.loads(run("ask", "--json", "--guard", mode, question).stdout) for mode in ("off", "observe", "enforce")
    )
    assert off["verdicts"] == []
    assert (observe["answer"], observe["hits"]) == (off["answer"], off["hits"])
    assert [v["enforced"] for v in (*observe["verdicts"], *enforce["verdicts"])] == [False, True]


def test_a_file_of_questions_gives_one_json_line_per_question(run, notes, tmp_path):
    run("index", "notes")
    (tmp_path / "q.jsonl").write_text('{"_id": "a", "text": "bakery hours"}\nlibrary hours\n{"_id": "c", "text": ""}\n')
    done = run("ask", "--from", "q.jsonl", "--json", code=3)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["id"] for line in lines] == ["a", "2", "c"]
    assert lines[0]["hits"][0]["id"] == "bakery.md"
    assert "empty" in lines[2]["error"]
    assert json.loads(run("ask", "--from", "-", input="bakery hours\n").stdout)["id"] == "1"


def test_each_question_records_a_verdict_without_its_text(run, notes, tmp_path):
    run("index", "notes")
    run("ask", "when does the bakery open, in confidence?", "--client", "cli")
    store = SqlEventStore(path=tmp_path / ".casemate/events.db")
    (event,) = store.scan("verdict")
    store.close()
    assert (event.body["defense"], event.body["client"], event.body["enforced"]) == ("mirabel", "cli", True)
    assert "confidence" not in json.dumps(dict(event.body))


def test_malformed_records_are_reported_and_the_others_indexed(run, tmp_path):
    (tmp_path / "c.jsonl").write_text(
        '{"_id": "a", "text": "one"}\n{broken\n{"_id": "a", "text": "again"}\n{"_id": "b", "text": "two"}'
    )
    done = run("index", "c.jsonl", code=3)
    assert "c.jsonl:2" in done.stderr
    assert "c.jsonl:3" in done.stderr
    assert done.stdout.startswith("indexed 2 sources")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ask", ""], "the question is empty"),
        (["ask", "a\x01b", "--k", "0"], "k is 0"),
        (["ask"], "give either a question or --from FILE"),
        (["ask", "--from", "absent.jsonl"], "cannot read the questions"),
        (["index"], "no corpus"),
        (["index", "absent"], "no file or folder at absent"),
        (["ask", "x", "--config", "absent.yaml"], "cannot read the configuration absent.yaml"),
    ],
)
def test_invalid_arguments_exit_with_code_2_and_a_message_on_stderr(run, words, says):
    done = run(*words, code=2)
    assert says in done.stderr
    assert done.stdout == ""


def test_unknown_keys_and_names_are_rejected_with_a_suggestion(run, tmp_path):
    (tmp_path / "casemate.yaml").write_text("guard: {defenses: [mirable]}")
    assert (
        "unknown defense 'mirable'; did you mean 'mirabel'? allowed: canary_token, " in run("ask", "x", code=2).stderr
    )
    (tmp_path / "casemate.yaml").write_text("gaurd: {}")
    assert "unknown key 'gaurd'; did you mean 'guard'? allowed: rag, guard" in run("ask", "x", code=2).stderr


def test_init_does_not_overwrite_a_file(run, tmp_path):
    (tmp_path / "casemate.yaml").write_text("rag: {k: 3}")
    assert "--force" in run("init", code=2).stderr
    assert (tmp_path / "casemate.yaml").read_text() == "rag: {k: 3}"


def test_a_damaged_index_is_reported_and_not_changed(run, notes, tmp_path):
    run("index", "notes")
    file = tmp_path / ".casemate/index.db"
    file.write_bytes(b"not a database, but something of somebody" * 100)
    before = file.read_bytes()
    assert "is damaged or not an index" in run("ask", "x", code=2).stderr
    assert "is damaged or not an index" in run("doctor", code=1).stdout
    assert file.read_bytes() == before


def test_an_index_of_another_embedder_is_rejected_until_rebuilt(run, notes, tmp_path):
    run("index", "notes")
    with sqlite3.connect(tmp_path / ".casemate/index.db") as db:
        db.execute("UPDATE meta SET value = 'other' WHERE name = 'fingerprint'")
    db.close()
    assert "'other'" in run("ask", "x", code=2).stderr
    assert "indexed 3 sources" in run("index", "notes", "--rebuild").stdout
    run("ask", "bakery")


def test_doctor_detects_and_repairs_changed_moments(run, tmp_path):
    (tmp_path / "casemate.yaml").write_text("guard: {defenses: [{use: mirabel, mode: paper}]}")
    write_many(tmp_path / "docs", 40)
    run("index", "docs")
    with sqlite3.connect(tmp_path / ".casemate/index.db") as db:
        db.execute("UPDATE tenant SET mean = zeroblob(length(mean))")
    db.close()
    assert "moments" in run("doctor", code=1).stdout
    run("doctor", "--fix")
    assert "FAIL" not in run("doctor").stdout


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_indexing_keeps_saved_documents_and_the_next_run_completes(run, tmp_path, blow):
    write_many(tmp_path / "docs")
    process = start(tmp_path, "index", "docs")
    wait_for_documents(tmp_path, process)
    process.send_signal(blow)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[blow], errors
    assert blow == signal.SIGKILL or "what was saved is kept" in errors
    saved, problems = index_contents(tmp_path)
    assert problems == []
    assert 0 < len(saved) < 900
    assert f"{len(saved)} unchanged" in run("index", "docs").stdout
    finished, problems = index_contents(tmp_path)
    assert (len(finished), problems) == (900, [])
    assert saved.items() <= finished.items()


@pytest.mark.slow
def test_two_processes_index_concurrently(run, tmp_path):
    write_many(tmp_path / "docs", 600)
    both = [start(tmp_path, "index", "docs") for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    saved, problems = index_contents(tmp_path)
    assert (len(saved), problems) == (600, [])


@pytest.mark.slow
def test_a_full_disk_is_reported_and_loses_no_saved_document(run, tmp_path):
    write_many(tmp_path / "docs")
    (tmp_path / "few").mkdir()
    (tmp_path / "few/a.txt").write_text("a first document")
    run("index", "few")
    limit = (tmp_path / ".casemate/index.db").stat().st_size + 1_000_000

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = run("index", "docs", "--missing", "keep", code=2, preexec_fn=small_disk)
    assert "the disk is full" in done.stderr
    saved, problems = index_contents(tmp_path)
    assert "a.txt" in saved
    assert problems == []
    run("index", "docs", "--missing", "keep")
    assert len(index_contents(tmp_path)[0]) == 901


@pytest.mark.slow
@pytest.mark.timeout(2400)  # on a busy machine
def test_demo_results_agree_with_the_readme(run, tmp_path):
    done = run("demo", "--json")
    result = json.loads(done.stdout)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for attack in result["attacks"]:
        off, on = attack["off"]["auc"][0], attack["on"]["auc"][0]
        printed = re.search(rf"\| `{attack['name']}` \| ([\d.]+) .* \| ([\d.]+) ", readme)
        assert abs(off - float(printed[1])) <= 0.03  # another processor may round a near-tie differently
        assert abs(on - float(printed[2])) <= 0.1  # the thresholds have a secret, random component
        assert off > 0.9
        assert abs(on - 0.5) < 0.2
    assert result["audit"]["pairs"] > 500
    assert result["audit"]["differing"] == 0
    assert result["evidence"]["audit_sessions_ended_early"] <= 6  # of 360
    assert result["status"] in ("pass", "inconclusive")  # with so few candidates the check may be inconclusive
    assert any("simulated" in line for line in result["simulated"])
    assert "a membership probe" in done.stderr
    report = (tmp_path / "casemate-demo/redteam/report.html").read_text()
    assert "<svg" in report
    assert "HV-20" not in report  # no record number
    (tmp_path / "casemate-demo/casemate.yaml").write_text("rag: {k: 3}")
    assert "not the demo's" in run("demo", code=2).stderr


@pytest.mark.smoke
def test_help_names_every_command(run):
    shown = run("--help").stdout
    commands = ("init", "index", "calibrate", "ask", "redteam", "report", "reproduce", "doctor", "demo")
    assert all(command in shown for command in commands)
    assert run("--version").stdout.strip().count(".") == 2


def test_secrets_in_the_configuration_are_rejected(run, tmp_path):
    (tmp_path / "casemate.yaml").write_text("rag: {generator: {use: openai, model: m, api_key: sk-written}}")
    done = run("ask", "x", code=2, env={**os.environ, "PYTHONWARNINGS": ""})
    assert "is a secret" in done.stderr
    assert "sk-written" not in done.stderr
