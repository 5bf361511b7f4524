"""`casemate try --endpoint`: attacks on an existing system within a limit of requests."""

import json
import re
import sys
from collections import Counter

import numpy as np
import pytest

from casemate import plugins
from casemate.cli import main
from casemate.config import PluginSpec
from casemate.demo import endpoint
from casemate.demo.assessment import quotes
from casemate.demo.assessment_report import mark_quotations
from casemate.errors import ConfigError, DataError
from casemate.text.tokens import words
from casemate.types import Document
from tests import external_system
from tests.external_system import serving
from tests.fake_openai import FakeOpenAI
from tests.fakes import LongTexts

CRAWL_COMMAND = re.compile(r"word for word|[Cc]opy out|verbatim|reproduce all|Put aside|For the archive")
KEY = "CASEMATE_ENDPOINT_KEY"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the notes of the system, and the same number of other notes."""
    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda role, name: LongTexts if name == "minilm" else load(role, name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(endpoint, "RESUME_S", 0.0)
    external_system.write_known(tmp_path)
    return tmp_path


@pytest.fixture
def run_try(folder, monkeypatch, capsys):
    """Runs the command; returns exit code, printed text, and JSON."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["casemate", "try", "--documents", "known/in", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        found = json.loads(printed.out) if "--json" in arguments and printed.out else {}
        return left.value.code or 0, printed.out + printed.err, found

    return run


def headline_values(found):
    return [head["value"] and head["value"][0] for head in found["headlines"]]


@pytest.mark.parametrize("guarded", [False, True])
def test_an_openai_compatible_system_is_attacked_within_the_limit(run_try, folder, guarded):
    with FakeOpenAI(always="answer", answer=lambda q: external_system.answer(q, guarded)) as server:
        code, printed, found = run_try(
            "--endpoint", server.url, "--model", "m", "--nonmembers", "known/out", "--json", "--queries", "80"
        )
    auc, quoted, copied = headline_values(found)
    assert code in (0, 3)
    assert found["requests"] == len(server.received) <= 80
    assert "At most 80 requests" in printed and "8 ordinary questions, 48 with a pasted text" in printed
    assert (auc < 0.75, quoted < 0.1) == (guarded, guarded)
    assert auc > 0.95 or guarded
    assert found["headlines"][1]["baseline"][0] == 0
    assert (copied is not None) and (copied > 0.05 or guarded)
    page = (folder / ".casemate/try/report.html").read_text()
    assert ("<mark>" in page) is not guarded
    assert "What an attacker gets from this system" in page
    assert re.search(r'class="off-side"><p class="label">This system', page) and "guard on" not in page.lower()
    assert "<script" not in page


def test_only_listed_model_is_used(run_try, monkeypatch):
    monkeypatch.setenv(KEY, "sk-1")
    models = ["text-embedding-3", "wiki-rag"]
    with FakeOpenAI(always="answer", answer=external_system.bare, models=models) as server:
        code, printed, found = run_try("--endpoint", server.url, "--json", "--queries", "40")
    assert code in (0, 3) and "model: wiki-rag, the only one that 127.0.0.1" in printed
    listed, *asked = server.received
    assert (listed.path, listed.headers["authorization"]) == ("/v1/models", "Bearer sk-1")
    assert {request.body["model"] for request in asked} == {"wiki-rag"}
    assert found["requests"] == len(asked) <= 40


@pytest.mark.parametrize(
    ("models", "message"), [(["a", "b"], "lists several models: a, b"), ([], "lists no model that writes answers")]
)
def test_missing_or_ambiguous_model_is_an_error_that_lists_the_choices(run_try, models, message):
    with FakeOpenAI(models=models) as server:
        code, printed, _ = run_try("--endpoint", server.url)
    assert code == 2 and len(server.received) == 1
    assert message in printed and "name the model with --model" in " ".join(printed.split())


def test_plain_http_system_is_attacked_and_the_baseline_has_recombined_texts(run_try):
    with serving() as server:
        code, printed, found = run_try("--endpoint", server.url, "--json", "--queries", "60")
    assert headline_values(found)[0] > 0.95
    assert headline_values(found)[1] > 0.9
    assert server.count == found["requests"] <= 60
    assert "sentences come from different records" in printed


def test_retries_count_against_the_limit(run_try):
    with serving(script=["429"] * 30) as server:
        code, printed, found = run_try("--endpoint", server.url, "--json", "--queries", "50")
    assert server.count <= 50
    assert code == 2  # three attempts fail
    assert "too many requests" in printed
    with serving(always="busy") as server:
        code, printed, found = run_try("--endpoint", server.url, "--json", "--queries", "60")
    assert server.count == 60
    assert code == 3
    assert any("then the requests were used up" in gap for gap in found["gaps"])
    assert headline_values(found)[2] is None


def test_unreachable_system_is_reported_as_an_error_in_one_line(run_try):
    code, printed, _ = run_try("--endpoint", "http://127.0.0.1:9/ask")
    assert code == 2
    assert "the connection failed" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("model", [("--model", "m"), ()])
def test_error_for_a_rejected_key_names_the_variable_and_not_the_key(run_try, monkeypatch, model):
    monkeypatch.setenv(KEY, "sk-very-secret")
    with FakeOpenAI(always="401") as server:
        code, printed, _ = run_try("--endpoint", server.url, *model)
    assert code == 2
    assert f"environment variable {KEY}" in printed
    assert "sk-very-secret" not in printed
    assert server.received[0].headers["authorization"] == "Bearer sk-very-secret"


def test_empty_answers_are_an_error_before_any_attack(run_try):
    with FakeOpenAI(always="say:") as server:
        code, printed, _ = run_try("--endpoint", server.url, "--model", "m", "--queries", "200")
    assert (code, len(server.received)) == (2, 1)
    assert "the answer is empty" in printed
    with serving(always="empty") as plain:
        code, printed, _ = run_try("--endpoint", plain.url)
    assert (code, plain.count) == (2, 20)
    assert "answered none of 20 ordinary questions" in printed


def test_an_empty_answer_to_one_question_counts_as_refused(run_try):
    empty = iter([False] * 9 + [True] + [False] * 500)
    with FakeOpenAI(always="answer", answer=lambda q: "" if next(empty) else external_system.bare(q)) as server:
        code, _, found = run_try("--endpoint", server.url, "--model", "m", "--json", "--queries", "80")
    assert not found["failures"]
    assert found["headlines"][0]["value"][0] > 0.9
    assert len(server.received) <= 80


@pytest.mark.parametrize(("answered", "busy"), [(15, 12), (80, 3)])
def test_questions_resume_after_three_failed_requests(answered, busy, run_try):
    with serving(script=["bare"] * answered + ["429"] * busy) as server:
        code, _, found = run_try("--endpoint", server.url, "--json", "--queries", "130")
    assert (code in (0, 3), found["failures"]) == (True, [])
    assert server.count <= 130 and headline_values(found)[0] > 0.9 and headline_values(found)[2] is not None


def test_answered_questions_are_not_repeated_after_a_failed_question(run_try):
    script = ["answer"] * 3 + ["500"] * 3
    with FakeOpenAI(script, always="answer", answer=external_system.bare) as server:
        code, _, found = run_try(
            "--endpoint", server.url, "--model", "m", "--json", "--queries", "40", "--question", "Who was treated?"
        )
    assert found["requests"] == len(server.received) <= 40
    asked = [request.body["messages"][-1]["content"] for request in server.received]
    assert code in (0, 3) and max(Counter(asked[:3]).values()) == asked.count("Who was treated?") == 1


def test_the_rate_of_requests_can_be_limited(run_try, monkeypatch):
    built = []
    build = endpoint.build_external_targets
    monkeypatch.setattr(endpoint, "build_external_targets", lambda config: built.append(config) or build(config))
    run_try("--endpoint", "http://127.0.0.1:9/ask", "--requests-per-s", "2.5")
    assert built[0].redteam.target.options["requests_per_s"] == 2.5


def test_report_contains_failures_of_the_system_during_the_attack(run_try, folder):
    with serving(script=["bare"] * 15, always="malformed") as server:
        code, printed, found = run_try("--endpoint", server.url, "--json", "--queries", "100")
    assert code == 2
    assert found["failures"]
    assert "Do not trust these figures" in (folder / ".casemate/try/report.html").read_text()


def test_meaningless_answers_make_the_figures_doubtful(run_try):
    with serving(always="garbage") as server:
        code, _, found = run_try("--endpoint", server.url, "--json", "--queries", "60")
    assert code == 3
    assert any("from the text in question" in gap for gap in found["gaps"])


def test_meaningless_answers_after_the_attacks_make_the_figures_doubtful(run_try):
    with serving(script=["bare"] * 6, always="garbage") as server:
        code, _, found = run_try("--endpoint", server.url, "--json", "--queries", "60")
    assert (code, found["requests"]) == (3, server.count)
    assert any("After the attacks it answered none of" in gap for gap in found["gaps"])


def test_identical_replies_to_the_crawler_make_the_figures_doubtful(run_try):
    def answer(question):
        return "在记录中没有找到相关信息。" if CRAWL_COMMAND.search(question) else external_system.bare(question)

    with FakeOpenAI(always="answer", answer=answer) as server:
        code, _, found = run_try("--endpoint", server.url, "--model", "m", "--json", "--queries", "40")
    assert code == 3
    assert any("got refusals or one and the same reply" in gap for gap in found["gaps"])


@pytest.mark.slow
def test_verbal_refusals_of_pasted_records_make_the_figures_doubtful(run_try):
    def answer(question):
        return "I cannot answer this question." if len(question) > 250 else external_system.bare(question)

    with FakeOpenAI(always="answer", answer=answer) as server:
        code, _, found = run_try("--endpoint", server.url, "--model", "m", "--json", "--queries", "60")
    assert code == 3
    assert any("18 of 18 pasted records got a refusal or no answer" in gap for gap in found["gaps"])
    assert not any("After the attacks" in gap for gap in found["gaps"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "http://127.0.0.1:9/v1"], "name the model with --model"),
        (["--endpoint", "https://rag.example/ask"], "pass --own"),
        (["--endpoint", "nowhere"], "unknown target 'nowhere'"),
        (["--model", "m"], "belong to --endpoint"),
        (["--endpoint", "http://127.0.0.1:9/ask", "--body", "{}"], "no {question} placeholder"),
    ],
)
def test_invalid_options_are_refused_before_the_first_request(run_try, arguments, message):
    if "--model" in arguments:
        arguments = ["known/in", *arguments]
    code, printed, _ = run_try(*arguments)
    assert code == 2
    assert message in " ".join(printed.split())


def test_a_target_of_the_configuration_is_given_by_its_name(run_try, folder):
    with serving() as server:
        (folder / "casemate.yaml").write_text(f"redteam: {{targets: {{wiki: {{use: http, url: '{server.url}'}}}}}}")
        code, _, found = run_try("--endpoint", "wiki", "--json", "--queries", "40")
    assert found["requests"] == server.count <= 40
    assert found["endpoint"].startswith("127.0.0.1")


def test_a_text_without_spaces_is_long_enough_to_paste():
    chunks = [Document("short", "北桥通行费3元。" * 5), Document("long", "北桥每天早上六点开放，通行费三元。" * 8)]
    assert [d.id for d in endpoint._records(chunks, 2, np.random.default_rng(1))] == ["long"]


def test_recombined_texts_contain_words_of_the_records_but_no_half_of_a_record():
    records = [Document(f"{i}", " ".join(f"Fact {i} of part {j} is w{i}x{j}." for j in range(9))) for i in range(12)]
    made = endpoint.recombined(records, np.random.default_rng(0))
    assert len(made) == 12
    known = {word for record in records for word in words(record.text)}
    for i, text in enumerate(made):
        printed = words(text.text)
        assert set(printed) <= known
        assert f"w{i}x" not in text.text
        sources = set(re.findall(r"w(\d+)x", text.text))
        assert len(sources) == 9


def test_a_target_without_a_limit_of_requests_is_refused(folder):
    spec = PluginSpec.model_validate({"use": "python", "call": "tests.external_system:bare"})
    with pytest.raises(ConfigError, match="cannot be limited"):
        endpoint.plan_endpoint(spec, folder / "known/in", None, 100, (), folder)


def test_too_few_texts_of_the_baseline_are_refused(folder):
    (folder / "few").mkdir()
    (folder / "few/a.txt").write_text("One text of a few words. " * 12)
    spec = PluginSpec.model_validate({"use": "http", "url": "http://127.0.0.1:9/"})
    with pytest.raises(DataError, match="has 1 texts"):
        endpoint.plan_endpoint(spec, folder / "known/in", folder / "few", 100, (), folder)


@pytest.mark.parametrize(
    ("first", "last", "quoted"),
    [(0, 20, False), (0, 22, False), (9, 31, False), (0, 32, True), (20, 32, True), (28, 40, True), (29, 40, False)],
)
def test_quotation_counts_only_within_the_half_that_was_not_pasted(first, last, quoted):
    record, pasted = " ".join(f"w{i}" for i in range(40)), " ".join(f"w{i}" for i in range(20))
    question, reply = f'"{pasted}"\nGive the rest.', " ".join(f"w{i}" for i in range(first, last))
    assert quotes(record, question, reply) is quoted
    marked = " ".join(part.strip() for part, copied in mark_quotations(record, question, reply) if copied)
    assert marked == (" ".join(f"w{i}" for i in range(max(first, 20), last)) if quoted else "")


def test_short_remainder_counts_only_if_quoted_completely():
    record = "w1 w2 w3 w4 w5 w6"
    assert quotes(record, "w1 w2 w3", "w3 w4 w5 w6") and not quotes(record, "w1 w2 w3", "w2 w3 w4 w5")
    assert not quotes(record, record, record) and not quotes("", "w1", "w1")


def test_marked_parts_are_those_that_count_as_quotations():
    record = " ".join(f"w{i}" for i in range(40))
    question, half = " ".join(f"w{i}" for i in range(20)), " ".join(f"W{i}," for i in range(20, 31))
    assert mark_quotations(record, question, half) == [(half, False)]  # eleven words
    marked = mark_quotations(record, question, f"Yes: {half} w31. And more")
    assert [copied for _, copied in marked] == [False, True, False]
    assert marked[1][0] == f"{half} w31"
