"""Proof of ownership: the exact test, innocent and copying systems, and the command."""

import asyncio
import itertools
import json
import math
from datetime import UTC, datetime
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from typer import Exit
from typer.testing import CliRunner

from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli import cli, ownership
from casemate.cli.endpoints import ANSWER, BODY, EndpointOptions, endpoint_target
from casemate.cli.ownership import QUESTIONED
from casemate.config import PluginSpec
from casemate.errors import BackendError, ConfigError, DataError
from casemate.guard.guard import Guard
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKey, HoneytokenKeyFile, HoneytokenRecord
from casemate.maths.stats import poisson_binomial_tail
from casemate.monitor.honeytokens.ownership import (
    CHOICES,
    LEVEL,
    VALUES,
    facts,
    facts_text,
    ownership_questions,
    ownership_test,
    questions_needed,
    records_needed,
)
from casemate.monitor.honeytokens.planting import PlantingSettings, find_records, plant_records
from casemate.monitor.honeytokens.search import planted_records
from casemate.rag.pipeline import Rag
from casemate.types import Document, Event, Query, Secret
from tests.fakes import Memory

RECORDS = [HoneytokenRecord("default", f"honeytoken/{n}", 1, n) for n in range(20)]


def key_of(number):
    return HoneytokenKey(Secret(f"key number {number} of these tests, long enough"))


class TestTail:
    @given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 9))
    def test_equals_the_sum_over_all_outcomes(self, chances, successes):
        expected = sum(
            math.prod(p if hit else 1 - p for p, hit in zip(chances, hits, strict=True))
            for hits in itertools.product((0, 1), repeat=len(chances))
            if sum(hits) >= successes
        )
        assert poisson_binomial_tail(chances, successes) == pytest.approx(min(1, expected), abs=1e-12)

    def test_equals_the_binomial_tail_of_scipy_for_tiny_probabilities(self):
        for successes in (5, 20, 60):
            expected = scipy_stats.binom.sf(successes - 1, 80, 1 / 16)
            assert poisson_binomial_tail([1 / 16] * 80, successes) == pytest.approx(expected, rel=1e-9)


class TestFacts:
    def test_values_are_distinct_words(self):
        every = [value.lower() for values in VALUES.values() for value in values]
        assert len(set(every)) == len(every) == CHOICES * len(VALUES)
        assert all(len(values) == CHOICES for values in VALUES.values())

    def test_values_depend_on_the_key_and_are_uniform(self):
        drawn = [facts(key_of(k), "default", 1, n)["town"] for k in range(40) for n in range(40)]
        counts = [drawn.count(town) for town in VALUES["town"]]
        assert scipy_stats.chisquare(counts).pvalue > 1e-3
        assert facts(key_of(1), "default", 1, 0) != facts(key_of(2), "default", 1, 0)

    def test_text_contains_the_values_and_questions_do_not(self):
        key = key_of(0)
        for question in ownership_questions(key, RECORDS):
            assert question.value.lower() not in question.text.lower()
        text = facts_text(key, "default", 1, 3)
        assert all(value in text for value in facts(key, "default", 1, 3).values())

    def test_first_questions_are_about_different_records_and_facts(self):
        first = ownership_questions(key_of(0), RECORDS)[: len(RECORDS)]
        assert len({q.text.split(" of ")[-1] for q in first}) >= 15
        assert {q.attribute for q in first} == set(VALUES)


@pytest.mark.parametrize(
    "sentence",
    ["It was {}.", "看守人是{}，住在城里。", "{}です", "담당자는 {}입니다", "It was {}'s town.", "Hüter:{}", "**{}**"],
)  # fmt: skip
def test_recognizes_values_in_answers_in_any_script(sentence):
    asked = ownership_questions(key_of(0), RECORDS)
    answers = [(q, sentence.format(q.value)) for q in asked]
    assert ownership_test(answers).correct == len(asked)
    wide = [(q, "".join(chr(ord(c) + 0xFEE0) for c in q.value)) for q in asked]  # full-width letters
    assert ownership_test(wide).correct == len(asked)
    others = [(q, sentence.format(next(v for v in VALUES[q.attribute] if v != q.value))) for q in asked]
    assert ownership_test(others).correct == 0


def test_recognizes_a_value_with_an_accent():
    asked = [q for q in ownership_questions(key_of(0), RECORDS) if q.value == "Malmo"]
    assert asked and ownership_test([(q, "in Malmö") for q in asked]).correct == len(asked)


def test_asks_once_about_a_record_planted_under_two_names():
    store = Memory()
    for source in ("honeytoken/a", "other/a"):
        body = {"what": "planted", "tenant": "default", "source": source, "generation": 1, "number": 0}
        store.append(Event(source, datetime.now(UTC), "honeytoken", body))
    asked = ownership_questions(key_of(0), planted_records(key_of(0), store))
    assert len({q.text for q in asked}) == len(asked) == 4
    with pytest.raises(ConfigError, match="twice"):
        ownership_test([(q, "") for q in [*asked, asked[0]]])


@cache
def questions_of_many_keys():
    return [ownership_questions(key_of(number), RECORDS[:5]) for number in range(2000)]


class TestInnocentSystems:
    """The p-value of a system without the collection is at most p with probability at most p."""

    @pytest.mark.parametrize("strategy", ["one guess", "eight guesses", "always the same", "all values", "silent"])
    def test_false_positive_rate_is_at_most_the_level(self, strategy):
        rng, values = np.random.default_rng(5), []
        for asked in questions_of_many_keys():
            answers = [self.answer(strategy, q.attribute, rng) for q in asked]
            values.append(ownership_test(list(zip(asked, answers, strict=True))).p_value)
        for level in (0.1, 0.01, 0.001):
            allowed = scipy_stats.binom.ppf(1 - 1e-6, len(values), level)
            assert sum(p <= level for p in values) <= allowed

    def answer(self, strategy, attribute, rng):
        options = VALUES[attribute]
        count = {"one guess": 1, "eight guesses": 8, "always the same": 1, "all values": 16, "silent": 0}[strategy]
        if strategy == "always the same":
            return options[3]
        return " ".join(options[i] for i in rng.permutation(len(options))[:count])

    def test_answers_with_all_values_have_a_p_value_of_1(self):
        asked = ownership_questions(key_of(0), RECORDS)
        result = ownership_test([(q, " ".join(VALUES[q.attribute])) for q in asked])
        assert result.correct == len(asked)
        assert result.p_value == 1.0


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A copied collection of 150 short texts with twenty planted records."""
    folder = tmp_path_factory.mktemp("ownership")
    minilm, rng = MiniLM(), np.random.default_rng(4)
    subjects = "river bridge ferry heron toll weir pier reed cart mill valley market harbor ledger guild bell".split()
    texts = [
        Document(f"d{n}", f"The {a} and the {b} of parish {n} were mended in {1700 + n} by the {c} wardens.")
        for n, (a, b, c) in enumerate(rng.choice(subjects, 3, replace=False) for _ in range(150))
    ]
    index = SqliteIndex(folder / "i.db")
    index.open(minilm.fingerprint, minilm.dim)
    keys = HoneytokenKeyFile(folder / "honeytokens.json")
    keys.path.write_text(json.dumps({"format": 1, "secret": "a key that the tests know" * 2, "generation": 1}))
    guard = Guard(Rag(minilm, index, ExtractiveGenerator(embedder=minilm)), [], store=Memory())
    asyncio.run(guard.add(texts))
    asyncio.run(plant_records(guard, keys, PlantingSettings(), 20))
    copied = [d for piece, _ in index.scan("default") for d in piece]
    records = find_records(index, keys.load()).records
    index.close()
    return minilm, keys.load(), records, copied


def suspect_p_value(planted, folder, documents):
    """Asks all questions of a system with the given documents."""
    minilm, key, records, _ = planted
    index = SqliteIndex(folder / "suspect.db")
    index.open(minilm.fingerprint, minilm.dim)
    suspect = Guard(Rag(minilm, index, ExtractiveGenerator(embedder=minilm)), [])
    asked = ownership_questions(key, records)

    async def ask_suspect():
        await suspect.add(documents)
        return [(q, (await suspect.ask(Query(q.text))).text) for q in asked]

    answers = asyncio.run(ask_suspect())
    index.close()
    return ownership_test(answers)


@pytest.mark.slow
def test_proves_a_whole_and_a_partial_copy(planted, tmp_path):
    copied, rng = planted[3], np.random.default_rng(1)
    for share in (1.0, 0.5, 0.2):
        part = [copied[i] for i in rng.permutation(len(copied))[: int(share * len(copied))]]
        (folder := tmp_path / str(share)).mkdir()
        assert suspect_p_value(planted, folder, part).p_value < 1e-6, share


@pytest.mark.slow
def test_documents_without_the_records_are_not_proven_as_a_copy(planted, tmp_path):
    plain = [d for d in planted[3] if not d.source.startswith("archive/")]
    assert len(plain) == 150
    assert suspect_p_value(planted, tmp_path, plain).p_value > 0.01


class TestSuspect:
    """Answers of a suspect that fails at some questions, and collected answers."""

    def ask(self, folder, failing):
        """The answers of a copy that fails at the questions about some facts."""
        asked = ownership_questions(key_of(0), RECORDS[:3])
        answers = {q.text: q.value for q in asked if q.attribute not in failing}
        (folder / f"suspect{len(failing)}.py").write_text(f"answer = {answers!r}.__getitem__\n")
        spec = PluginSpec(use="python", call=f"suspect{len(failing)}:answer", folder=str(folder))
        return asked, asyncio.run(ownership._ask_suspect(spec, asked))

    def test_proves_a_copy_by_the_answered_questions(self, tmp_path, capsys):
        asked, replies = self.ask(tmp_path, ["town"])
        result = ownership_test(list(zip(asked, replies, strict=True)))
        assert (result.answered, result.correct) == (9, 9) and result.p_value < 1e-8
        assert "failed at 3 questions" in capsys.readouterr().err

    def test_suspect_that_fails_at_every_question_is_an_error(self, tmp_path):
        with pytest.raises(BackendError, match="KeyError"):
            self.ask(tmp_path, list(VALUES))

    def test_answers_in_a_file_may_contain_line_separators(self, tmp_path):
        asked = ownership_questions(key_of(0), RECORDS[:1])
        rows = [{"question": q.text, "answer": f"one\u2028two\u2029three\x85{q.value}"} for q in asked]
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
        assert ownership._collected_answers(file, asked) == [row["answer"] for row in rows]

    @pytest.mark.parametrize(("records", "level", "code"), [(1, LEVEL, 3), (2, LEVEL, 1), (1, 1e-4, 1), (2, 1e-12, 3)])
    def test_too_few_questions_for_the_level_are_inconclusive(self, records, level, code, capsys):
        asked = ownership_questions(key_of(0), RECORDS[:records])
        result = ownership_test([(q, q.value) for q in asked])
        with pytest.raises(Exit) as ended:
            ownership._conclude(result, len(asked), level, as_json=False)
        assert ended.value.exit_code == code
        needed = f"about {records_needed(level)} records"
        assert (needed in capsys.readouterr().out) == (code == 3)


def test_needed_records_and_questions_are_minimal():
    assert [records_needed(level) for level in (1.0, 0.05, LEVEL, 1e-12, 0.0)] == [0, 1, 2, 3, 68]
    asked = ownership_questions(key_of(0), RECORDS)
    for level in (0.05, LEVEL, 1e-12):
        n = questions_needed(level)
        best = [ownership_test([(q, q.value) for q in asked[:count]]).p_value for count in (n - 1, n)]
        assert best[0] > level >= best[1]


class TestCommand:
    def setting(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "docs").mkdir()
        for n in range(30):
            (tmp_path / f"docs/{n}.md").write_text(f"The ferry number {n} crosses the river at {n} past noon.")
        (tmp_path / "casemate.yaml").write_text("rag: {corpus: docs}\n")
        run = CliRunner().invoke
        assert run(cli, ["index", "--no-calibrate"]).exit_code == 0
        return run

    @pytest.mark.parametrize("command", [["plant"], ["shadow", "own", "bare"]])
    def test_error_without_documents_names_the_index_command(self, command, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "casemate.yaml").write_text("rag: {corpus: docs}\n")
        failed = CliRunner().invoke(cli, ["canary", *command])
        assert isinstance(failed.exception, DataError) and "run 'casemate index'" in str(failed.exception)
        assert not (tmp_path / ".casemate/honeytokens.json").exists()

    def test_error_without_records_names_the_plant_command(self, tmp_path, monkeypatch):
        run = self.setting(tmp_path, monkeypatch)
        nothing = run(cli, ["canary", "prove", "--answers", "a.jsonl"])
        assert isinstance(nothing.exception, DataError) and "canary plant" in str(nothing.exception)

    def test_remote_suspect_requires_a_confirmation_that_does_not_mention_attacks(self):
        options = EndpointOptions("", BODY, ANSWER, "NO_KEY")
        with pytest.raises(ConfigError, match="rag.example would be asked the questions .* pass --own") as refused:
            endpoint_target("https://rag.example/ask", options, None, False, QUESTIONED)
        assert "attack" not in str(refused.value)

    @pytest.mark.slow
    def test_reads_answers_from_a_file(self, tmp_path, monkeypatch):
        run = self.setting(tmp_path, monkeypatch)
        assert run(cli, ["canary", "plant", "--count", "4"]).exit_code in (0, 3)
        listed = run(cli, ["canary", "prove", "--questions"])
        asked = [json.loads(line)["question"] for line in listed.stdout.splitlines() if line.startswith("{")]
        assert 4 <= len(asked) <= 16
        answer = {"question": asked[0], "answer": "nobody knows"}
        (tmp_path / "a.jsonl").write_text(json.dumps(answer) + "\n")
        few = run(cli, ["canary", "prove", "--answers", "a.jsonl"])
        assert few.exit_code == 3 and "no proof" in few.output
        (tmp_path / "a.jsonl").write_text("{}\n")
        wrong = run(cli, ["canary", "prove", "--answers", "a.jsonl"])
        assert isinstance(wrong.exception, DataError) and "line 1" in str(wrong.exception)
