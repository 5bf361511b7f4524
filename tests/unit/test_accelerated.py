"""The benchmark decoder for accelerators, compared with the decoder of the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.real import accelerated
from benchmarks.real.accelerated import FixedCacheDecoder
from casemate.backends.generators.transformers.batch import BatchDecoder, Job

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY, ENDS = 40, (0, 1)


@pytest.fixture(scope="module")
def model() -> Any:
    """Random weights with large biases, so that the answers differ."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = transformers.Qwen2Config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    made = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights.add_(0.3 * torch.randn_like(weights))
    return made


def _jobs(count: int) -> list[Job]:
    rng = np.random.default_rng(7)
    lengths, limits = rng.integers(1, 60, count), rng.integers(1, 20, count)
    prompts = [rng.integers(2, VOCABULARY, length).tolist() for length in lengths]
    return [Job(i, prompt, int(limit)) for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
def test_answers_equal_those_of_the_package(model: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerated, "POSITIONS", 64)  # prompts that do not fit are decoded alone
    monkeypatch.setattr(accelerated, "SPANS", (16, 64))
    monkeypatch.setattr(accelerated, "READ_AT_ONCE", 100)
    expected = dict(BatchDecoder(model, VOCABULARY, ENDS, 4, {}).decode(_jobs(14)))
    later = [_jobs(14)[7:]]
    found = dict(
        FixedCacheDecoder(model, VOCABULARY, ENDS, rows, {}).decode(_jobs(14)[:7], lambda: later.pop() if later else [])
    )
    assert found == expected
    assert len({tuple(answer) for answer in found.values()}) > 7


def test_an_interrupted_run_leaves_no_rows(model: Any) -> None:
    decoder = FixedCacheDecoder(model, VOCABULARY, ENDS, 3, {})
    next(decoder.decode(_jobs(6)))
    assert {number for number, _ in decoder.decode(_jobs(2))} == {0, 1}
