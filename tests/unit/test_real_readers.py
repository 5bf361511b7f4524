"""Evaluation with real models: reading shared beginnings once, and subsamples of recorded questions."""

from __future__ import annotations

import doctest
from types import ModuleType
from typing import Any

import numpy as np
import pytest

REASON = "needs casemate[transformers]"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from benchmarks.real import answer_here, files, judging, output_forms, quality, written  # noqa: E402
from casemate.backends.generators.transformers.batch import Job  # noqa: E402
from casemate.text.output_transforms import TRANSFORMS  # noqa: E402
from tests.unit.test_batched_generation import END, VOCABULARY, alone, drawn_jobs, network  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_each_prompt_alone(rows: int, seed: int, network: Any) -> None:  # noqa: F811
    jobs = drawn_jobs(17, seed)
    decoder = answer_here.TrunkDecoder(network, VOCABULARY, {END}, rows, {})
    assert dict(decoder.decode(jobs)) == {job.number: alone(network, job) for job in jobs}
    assert decoder.tokens_read < sum(len(job.prompt) for job in jobs)


def test_a_shared_beginning_is_read_once(network: Any) -> None:  # noqa: F811
    stem = list(range(1, 31))
    jobs = [Job(number, [*stem, 31 + number], 1) for number in range(8)]
    decoder = answer_here.TrunkDecoder(network, VOCABULARY, (), 8, {})
    assert len(dict(decoder.decode(jobs))) == 8
    assert decoder.tokens_read == 30 + 8


def test_recorded_questions_are_trials_again() -> None:
    rows = written.trials(files.read(written.RECORDED)[1:], ("natural", "menta"))
    assert {(row["author"], row["attack"]) for row in rows} == {("model", "natural"), ("model", "menta")}
    assert len(rows) > 380
    assert all(question for row in rows for question in row["questions"])


@pytest.mark.parametrize("module", [answer_here, judging, output_forms, quality, written], ids=lambda m: m.__name__)
def test_examples(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", output_forms.FORMS)
def test_a_perfect_reply_has_the_form_and_a_plain_copy_has_not(name: str) -> None:
    text = "Dear Dr Lund, the lock keeper of Wexcombe scratched her knuckles raw since Lent, 28 times a shift."
    assert output_forms.judged(name, text, TRANSFORMS[name].encode(text)) == (True, True)
    assert output_forms.judged(name, text, text)[1] is False
    assert output_forms.judged(name, text, "I don't know.")[0] is False


def test_kappa_is_that_of_the_table_of_counts() -> None:
    """Cohen 1960: kappa from the counts of a two by two table."""
    rng = np.random.default_rng(1)
    a, b = rng.random(200) < 0.6, rng.random(200) < 0.3
    counts = np.array([[np.sum(a & b), np.sum(a & ~b)], [np.sum(~a & b), np.sum(~a & ~b)]])
    n = counts.sum()
    chance = counts.sum(0) @ counts.sum(1) / n**2
    assert quality.kappa(a, b) == pytest.approx((np.trace(counts) / n - chance) / (1 - chance))
    assert quality.kappa(a, a) == 1
