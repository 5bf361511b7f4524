"""Evaluation with real models: reading shared beginnings once, and subsamples of recorded questions."""

from __future__ import annotations

from typing import Any

import pytest

REASON = "needs casemate[transformers]"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from benchmarks.real import answer_here, files, written  # noqa: E402
from casemate.backends.generators.transformers.batch import Job  # noqa: E402
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
