"""Evaluation with real models: shared prompt prefixes are computed once, and subsamples of recorded questions."""

from __future__ import annotations

import argparse
import asyncio
import doctest
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

REASON = "needs casemate[transformers]"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from benchmarks.real import (  # noqa: E402
    answer,
    defenses,
    files,
    judging,
    output_forms,
    quality,
    translation,
    written,
)
from benchmarks.real.recorded_model import RecordedModel  # noqa: E402
from casemate.backends.generators.transformers.batch import Job  # noqa: E402
from casemate.rag.pipeline import join_stream  # noqa: E402
from casemate.text.output_transforms import TRANSFORMS  # noqa: E402
from casemate.types import Document, Prompt, TokenScore  # noqa: E402
from tests.unit.test_batched_generation import END, VOCABULARY, alone, drawn_jobs, network  # noqa: E402, F401
from tests.unit.tiny_gguf import write_gguf  # noqa: E402


@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (2, 1), (5, 0), (5, 2), (64, 1)])
def test_batched_answers_equal_those_of_single_prompts(rows: int, seed: int, network: Any) -> None:  # noqa: F811
    jobs = drawn_jobs(17, seed)
    decoder = answer.TrunkDecoder(network, VOCABULARY, {END}, rows, {})
    assert dict(decoder.decode(jobs)) == {job.number: alone(network, job) for job in jobs}
    assert decoder.tokens_read < sum(len(job.prompt) for job in jobs)


def test_a_shared_prefix_is_computed_once(network: Any) -> None:  # noqa: F811
    stem = list(range(1, 31))
    jobs = [Job(number, [*stem, 31 + number], 1) for number in range(8)]
    decoder = answer.TrunkDecoder(network, VOCABULARY, (), 8, {})
    assert len(dict(decoder.decode(jobs))) == 8
    assert decoder.tokens_read == 30 + 8


def test_an_interrupted_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts, answers = tmp_path / "prompts.jsonl.gz", tmp_path / "answers.jsonl.gz"
    rows = [{"id": str(i), "max_tokens": 4, "parts": ["a"], "user": f"Who is {i}?"} for i in range(5)]
    files.write(prompts, [{"part": "a", "text": "A shared text."}, *rows])
    given = {"prompts": prompts, "answers": answers, "model": write_gguf(tmp_path / "tiny.gguf"), "minutes": 9.0}
    answer.run(argparse.Namespace(**given, limit=2))
    about, *first = files.read(answers)
    assert about["model"] == "tiny.gguf" and {row["id"] for row in first} == {"0", "1"}
    answers.write_bytes(answers.read_bytes() + b"\x1f\x8b cut")
    answer.run(argparse.Namespace(**given, limit=None))
    assert files.read(answers)[:3] == [about, *first]
    assert sorted(row["id"] for row in files.read(answers)[1:]) == ["0", "1", "2", "3", "4"]
    assert all(row["tokens"] == 4 or row["stopped"] for row in files.read(answers)[1:])


def test_recorded_questions_are_parsed_as_trials() -> None:
    rows = written.trials(files.read(written.RECORDED["nfcorpus"])[1:])
    assert {(row["author"], row["attack"]) for row in rows} == {("model", name) for name in written.ATTACKS}
    assert len(rows) > 920
    assert all(question for row in rows for question in row["questions"])


@pytest.mark.parametrize("module", [answer, judging, output_forms, quality, translation], ids=lambda m: m.__name__)
def test_doctests_of_the_benchmark_modules_pass(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", output_forms.FORMS)
def test_output_forms_accept_an_encoded_reply_and_reject_a_plain_copy(name: str) -> None:
    text = "Dear Dr Lund, the lock keeper of Wexcombe scratched her knuckles raw since Lent, 28 times a shift."
    assert output_forms.judged(name, text, TRANSFORMS[name].encode(text)) == (True, True)
    assert output_forms.judged(name, text, text)[1] is False
    assert output_forms.judged(name, text, "I don't know.")[0] is False


def test_kappa_equals_the_formula_on_a_contingency_table() -> None:
    """Oracle: Cohen (1960), from the counts of a 2 x 2 table."""
    rng = np.random.default_rng(1)
    a, b = rng.random(200) < 0.6, rng.random(200) < 0.3
    counts = np.array([[np.sum(a & b), np.sum(a & ~b)], [np.sum(~a & b), np.sum(~a & ~b)]])
    n = counts.sum()
    chance = counts.sum(0) @ counts.sum(1) / n**2
    assert quality.kappa(a, b) == pytest.approx((np.trace(counts) / n - chance) / (1 - chance))
    assert quality.kappa(a, a) == 1


class CountingModel:
    """Yields control once, then answers with the number of prompts so far."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        self.prompts.append(prompt)
        number = len(self.prompts)
        await asyncio.sleep(0)
        yield f"Answer {number}."

    def score(self, text: str) -> list[TokenScore]:
        return [TokenScore(0, len(text), -2.0 if "1" in text else -4.0, 0)]


def recorded_model(folder: Path) -> tuple[RecordedModel, CountingModel]:
    (folder / "m.gguf").write_bytes(b"GGUF")
    inner = CountingModel()
    model = RecordedModel(folder / "m.gguf", folder / "answers.jsonl.gz", 8)
    model._loaded = inner  # type: ignore[assignment]
    return model, inner


def test_concurrent_equal_prompts_share_one_generation(tmp_path: Path) -> None:
    model, inner = recorded_model(tmp_path)
    prompts = [Prompt(text, (), "") for text in ("a", "b", "a", "a")]

    async def ask() -> list[str]:
        return list(await asyncio.gather(*(join_stream(model.stream(prompt)) for prompt in prompts)))

    assert asyncio.run(ask()) == ["Answer 1.", "Answer 2.", "Answer 1.", "Answer 1."]
    assert len(inner.prompts) == 2 == len(files.read_answers(model.file)[0])
    again, other = recorded_model(tmp_path)
    assert asyncio.run(join_stream(again.stream(prompts[0]))) == "Answer 1." and not other.prompts


def test_a_failed_prompt_is_generated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = recorded_model(tmp_path)

    def fail(prompt: Prompt) -> AsyncIterator[str]:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(model._loaded, "stream", fail)
        asyncio.run(join_stream(model.stream(Prompt("a", (), ""))))
    assert asyncio.run(join_stream(model.stream(Prompt("a", (), "")))) == "Answer 1."


def test_the_judge_of_epd_receives_two_answers_and_no_document(tmp_path: Path) -> None:
    model, inner = recorded_model(tmp_path)
    prompt = Prompt("Who has keys?", (Document("d", "The porter has keys."),), "Be brief.")
    assert asyncio.run(join_stream(defenses.EPD(model).stream(prompt))) == "Answer 3."
    with_documents, without, final = inner.prompts
    assert (with_documents.context, without.context, final.context) == (prompt.context, (), ())
    assert "porter" not in final.question
    assert "First answer (loss 2.0): Answer 1." in final.question
    assert "Second answer (loss 4.0): Answer 2." in final.question


def test_questions_of_every_attack_and_harmless_ones_are_labeled() -> None:
    found = asyncio.run(defenses.asked())
    assert set(found) == {*defenses.ATTACKS, "harmless"}
    assert all(len(texts) == defenses.TRIALS for kind, texts in found.items() if kind != "harmless")
    labels = asyncio.run(defenses.labeled(defenses.QueryFilter()))
    assert labels["mba"].value == 1.0 and labels["harmless"].value == 0.0


class GermanModel:
    """Follows the instruction to answer in German, and translates its German."""

    GERMAN = "Der Wärter hat die Schleuse nicht geöffnet."

    async def stream(self, prompt: Prompt) -> AsyncIterator[str]:
        (document,) = prompt.context
        if prompt.question == translation.BACK:
            yield document.text.partition("|")[2]
        else:
            yield f"{self.GERMAN}|{document.text}" if translation.INSTRUCTION in prompt.question else document.text


def test_a_translation_is_recovered_by_the_attackers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "STOP_WORDS", frozenset())  # the fake reply contains its English text
    found = asyncio.run(translation.measured(GermanModel(), GermanModel()))  # type: ignore[arg-type]
    assert found["plain copy"].value == found["in German"].value == found["recovered"].value == 1.0
    assert found["words of the German replies"] == [1.0] * output_forms.CONTEXTS
