"""Batched greedy decoding: equal to single decoding. Shared prefixes are prefilled once, and finished rows are
replaced.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REASON = "needs casemate[transformers]"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from casemate.backends.generators.transformers import CausalLM  # noqa: E402
from casemate.backends.generators.transformers.batch import BatchDecoder, Job, by_prefix  # noqa: E402
from casemate.errors import BackendError, ConfigError  # noqa: E402
from casemate.types import Document, Prompt  # noqa: E402
from tests.unit.test_transformers_backend import CHAT, saved  # noqa: E402

VOCABULARY, END = 40, 0


@pytest.fixture(scope="module")
def network() -> Any:
    """A small Qwen2 with random weights."""
    torch.manual_seed(5)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    return transformers.Qwen2ForCausalLM(config).eval()


def alone(network: Any, job: Job, end: int = END) -> list[int]:
    """Greedy decoding without a cache: the oracle."""
    ids = list(job.prompt)
    with torch.no_grad():
        for _ in range(job.limit):
            token = int(network(torch.tensor([ids])).logits[0, -1].argmax())
            if token == end:
                break
            ids.append(token)
    return ids[len(job.prompt) :]


def drawn_jobs(count: int, seed: int) -> list[Job]:
    """Prompts of different lengths. Some have common prefixes, and some are equal."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, VOCABULARY, rng.integers(1, 60)).tolist() for _ in range(3)]
    jobs = []
    for number in range(count):
        stem = stems[int(rng.integers(3))] if rng.random() < 0.7 else []
        rest = rng.integers(1, VOCABULARY, rng.integers(1, 12)).tolist()
        jobs.append(Job(number, [*stem, *rest] if rng.random() < 0.9 else stems[0], int(rng.integers(1, 20))))
    return jobs


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("seed", range(4))
def test_answers_equal_those_of_single_decoding(rows: int, seed: int, network: Any) -> None:
    jobs = drawn_jobs(17, seed)
    found = dict(BatchDecoder(network, VOCABULARY, {END}, rows, {}).decode(jobs))
    assert found == {job.number: alone(network, job) for job in jobs}
    assert len({len(answer) for answer in found.values()}) > 1


def test_finished_rows_are_replaced_and_the_row_limit_holds(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda **given: sizes.append(given["input_ids"].shape) or forward(**given))
    jobs = [Job(i, [3 + i % 30, 5], 2 + 9 * (i % 2)) for i in range(24)]
    assert len(dict(BatchDecoder(network, VOCABULARY, (), 4, {}).decode(jobs))) == 24
    steps = [rows for rows, width in sizes if width == 1]
    assert max(rows for rows, _ in sizes) <= 4
    assert sum(steps) == sum(job.limit - 1 for job in jobs)
    assert np.mean(steps) > 3  # with waiting for the longest answer of each four it would be 2.2


def test_shared_prefix_is_prefilled_once(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda **given: read.append(given["input_ids"].numel()) or forward(**given))
    stem = [1 + i % 30 for i in range(200)]
    dict(BatchDecoder(network, VOCABULARY, (), 8, {}).decode([Job(i, [*stem, i + 1, 7], 1) for i in range(8)]))
    assert sum(read) == 200 + 8 * 2


def test_no_prompts_give_no_answers(network: Any) -> None:
    assert list(BatchDecoder(network, VOCABULARY, (), 4, {}).decode([])) == []


def test_groups_share_half_of_each_prompt() -> None:
    jobs = [Job(0, [1] * 40, 1), Job(1, [1] * 30 + [2] * 10, 1), Job(2, [1] * 10 + [3] * 90, 1), Job(3, [9], 1)]
    assert [[job.number for job in group] for group in by_prefix(jobs)] == [[0, 1], [2, 3]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, CausalLM]:
    """The same model without and with batches, with a limit for long prompts."""
    folder = saved(tmp_path_factory.mktemp("model"), CHAT)
    single, batched = (CausalLM(str(folder), device="cpu", max_tokens=8, batch=batch) for batch in (1, 3))
    single._limit = batched._limit = 600
    return single, batched


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"Q{i}" * (1 + i % 3), (Document("d", "level " + "x" * (i % 4)),), "Be brief.") for i in range(count)
    ]


async def joined(model: CausalLM, prompt: Prompt) -> str:
    return "".join([chunk async for chunk in model.stream(prompt)])


def generate_concurrently(model: CausalLM, asked: list[Prompt]) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*(joined(model, prompt) for prompt in asked), return_exceptions=True)

    return asyncio.run(gather())


def test_concurrent_answers_are_generated_in_one_batch(
    models: tuple[CausalLM, CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    single, batched = models
    sizes = []
    forward = batched._model.forward
    monkeypatch.setattr(
        batched._model, "forward", lambda **given: sizes.append(given["input_ids"].shape) or forward(**given)
    )
    expected = [asyncio.run(joined(single, prompt)) for prompt in prompts(7)]
    sizes.clear()
    assert generate_concurrently(batched, prompts(7)) == expected
    assert max(rows for rows, _ in sizes) == 3


def test_prompt_is_added_to_a_running_batch(network: Any) -> None:
    first, second = Job(0, [4, 5, 6], 12), Job(1, [9, 8], 3)
    arriving = [[], [], [second]]
    decoder = BatchDecoder(network, VOCABULARY, (), 4, {})
    found = list(decoder.decode([first], lambda: arriving.pop(0) if arriving else []))
    assert [number for number, _ in found] == [1, 0]  # the later prompt has the shorter answer and finishes first
    assert dict(found) == {job.number: alone(network, job, end=-1) for job in (first, second)}


def test_error_of_one_prompt_does_not_affect_the_others(models: tuple[CausalLM, CausalLM]) -> None:
    single, batched = models
    good, long = prompts(2)[1], Prompt("x" * 700, (), "")
    first, second = generate_concurrently(batched, [good, long])
    assert first == asyncio.run(joined(single, good))
    assert isinstance(second, BackendError) and "reads 600" in str(second)


def test_empty_answer_is_an_error(models: tuple[CausalLM, CausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    _, batched = models
    monkeypatch.setattr(batched, "_ends", frozenset(range(len(batched.vocabulary))))
    (found,) = generate_concurrently(batched, prompts(1))
    assert isinstance(found, BackendError) and "wrote nothing" in str(found)


def test_nan_logits_are_an_error(tmp_path: Path) -> None:
    model = CausalLM(str(saved(tmp_path)), device="cpu", batch=2)
    model._limit = None
    with torch.no_grad():
        model._model.lm_head.weight[:] = float("nan")
    (found,) = generate_concurrently(model, [Prompt("a", (), "")])
    assert isinstance(found, BackendError) and "returned NaN" in str(found)


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 2, "temperature": 0.5}])
def test_invalid_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be (at least 1|1 with a temperature above 0)"):
        CausalLM(str(tmp_path), **options)
