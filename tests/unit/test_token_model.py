"""Decoding sessions with a cache that can be rolled back, on a tiny random Llama and on the trained pair."""

from __future__ import annotations

import asyncio
import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from casemate import plugins
from casemate.backends.generators.transformers import CausalLM
from casemate.errors import BackendError, ConfigError
from casemate.protocols import TokenModel
from casemate.types import Document, Prompt
from tests.unit.test_transformers_backend import CHAT, LENGTH, saved

REASON = "needs casemate[transformers]"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

CLINIC = Document("b", "The phone number of Okwu is 482-113. The home city of Okwu is Port Snaw.")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return CausalLM(str(saved(tmp_path_factory.mktemp("tiny"))), device="cpu")


@cache
def load_or_skip(data: Path, name: str) -> CausalLM:
    """Loads a model of the trained pair, or skips the test."""
    folder = data.parent / "models" / name
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    return CausalLM(str(folder), device="cpu")


@pytest.fixture(params=["draft", "reference"])
def trained(data: Path, request: pytest.FixtureRequest) -> CausalLM:
    return load_or_skip(data, request.param)


@pytest.fixture(params=["tiny", "draft", "reference"])
def model(request: pytest.FixtureRequest, tiny: CausalLM) -> CausalLM:
    return tiny if request.param == "tiny" else load_or_skip(request.getfixturevalue("data"), request.param)


def drawn(model: CausalLM, count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, len(model.vocabulary), count)]


def logits_in_one_pass(model: CausalLM, prompt: list[int], answer: list[int]) -> Any:
    """Oracle: logits after every position of the answer, computed by transformers directly."""
    with torch.no_grad():
        out = model._model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    return out[len(prompt) - 1 :, : len(model.vocabulary)].numpy()


def kept(reading: Any) -> list[Any]:
    return [copy.deepcopy(t) for layer in reading._cache.layers for t in (layer.keys, layer.values)]


class TestSession:
    def test_logits_equal_those_of_one_pass(self, model: CausalLM) -> None:
        prompt, answer = drawn(model, 12), drawn(model, 20, 1)
        expected = logits_in_one_pass(model, prompt, answer)
        reading = model.begin([prompt])
        assert reading.read([])[0, 0] == pytest.approx(expected[0], abs=5e-4)
        for i in range(1, 21):
            assert reading.read(answer[:i])[0, 0] == pytest.approx(expected[i], abs=5e-4)
        found = model.begin([prompt]).read(answer, 21)
        assert found.shape == (1, 21, len(model.vocabulary)) and found.dtype == np.float32
        assert found[0] == pytest.approx(expected, abs=5e-4)

    def test_a_session_equals_a_new_one_after_a_rollback(self, model: CausalLM) -> None:
        rng = np.random.default_rng(5)
        prompt, truth = drawn(model, 9), drawn(model, 24, 1)
        reading, done = model.begin([prompt]), 0
        while done < 20:
            right = int(rng.integers(0, 5))
            tried = [*truth[: done + right], *drawn(model, 4 - right, seed=done)]
            found = reading.read(tried, 5)[0]
            assert found == pytest.approx(logits_in_one_pass(model, prompt, tried)[-5:], abs=5e-4)
            done += right

    def test_the_cache_after_a_rollback_is_bit_identical(self, model: CausalLM) -> None:
        prompt, answer = drawn(model, 10), drawn(model, 8, 1)
        reading = model.begin([prompt])
        reading.read(answer)
        was, places = kept(reading), 18
        reading.read([*answer, *drawn(model, 5, 2)])
        reading.read([*answer, *drawn(model, 3, 3)], 3)
        assert reading._roll_back(answer, places) == places
        assert all(torch.equal(a, b) for a, b in zip(was, kept(reading), strict=True))

    def test_rolled_back_tokens_do_not_affect_later_logits(self, model: CausalLM) -> None:
        """Two sessions make the same passes with different rejected tokens in between."""
        prompt, truth = drawn(model, 10), drawn(model, 24, 1)
        one, other = model.begin([prompt]), model.begin([prompt])
        for done in range(0, 20, 2):
            head = truth[:done]
            found = [
                reading.read([*head, *drawn(model, 4, seed)], 1) for reading, seed in ((one, done), (other, 99 + done))
            ]
            assert not np.array_equal(*found)
            assert np.array_equal(one.read(truth[: done + 1], 2), other.read(truth[: done + 1], 2))

    def test_several_prompts_equal_separate_sessions(self, model: CausalLM) -> None:
        prompts = [drawn(model, n, n) for n in (12, 3, 7)]
        answer, other = drawn(model, 6, 1), drawn(model, 9, 2)
        together = model.begin(prompts)
        for text, last in ((answer, 7), (answer[:4] + other, 2), (other, 10)):
            found = together.read(text, last)
            assert found.shape == (3, last, len(model.vocabulary))
            for row, prompt in zip(found, prompts, strict=True):
                assert row == pytest.approx(logits_in_one_pass(model, prompt, text)[-last:], abs=5e-4)

    def test_several_prompts_are_processed_in_one_pass(self, tiny: CausalLM) -> None:
        passes: list[int] = []
        hook = tiny._model.register_forward_hook(lambda *_: passes.append(1))
        reading = tiny.begin([drawn(tiny, n, n) for n in (12, 3, 7)])
        assert not passes
        reading.read(drawn(tiny, 5))
        assert len(passes) == 1
        hook.remove()

    def test_a_pass_processes_only_new_tokens(self, tiny: CausalLM) -> None:
        lengths: list[int] = []
        hook = tiny._model.register_forward_pre_hook(
            lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        reading, answer = tiny.begin([drawn(tiny, 10)]), drawn(tiny, 9, 1)
        for text, last in ((answer[:2], 1), (answer[:3], 1), (answer[:8], 3), ([*answer[:6], 7], 1), (answer, 10)):
            reading.read(text, last)
        assert lengths == [12, 1, 5, 1, 10]
        hook.remove()

    def test_counts_flops(self, tiny: CausalLM) -> None:
        reading = tiny.begin([drawn(tiny, 10), drawn(tiny, 4)])
        reading.read([5, 6])
        assert reading.flops == 2 * tiny.flops(12, 0)
        reading.read([5, 6, 7, 8], 2)
        assert reading.flops == 2 * (tiny.flops(12, 0) + tiny.flops(2, 12))

    @pytest.mark.parametrize("last", [0, 4])
    def test_last_is_limited_by_the_positions(self, tiny: CausalLM, last: int) -> None:
        with pytest.raises(ValueError, match="an answer of 2 tokens has 3 positions"):
            tiny.begin([[5]]).read([6, 7], last)

    @pytest.mark.parametrize("prompts", [[], [[]], [[5], []]])
    def test_an_empty_prompt_is_rejected(self, tiny: CausalLM, prompts: list[list[int]]) -> None:
        with pytest.raises(BackendError, match="there is no prompt, or an empty one"):
            tiny.begin(prompts)

    def test_too_many_tokens_are_rejected(self, tiny: CausalLM) -> None:
        with pytest.raises(BackendError, match=rf"have {LENGTH + 1} tokens, but it reads {LENGTH}; use fewer"):
            tiny.begin([drawn(tiny, LENGTH + 1)])
        reading = tiny.begin([drawn(tiny, LENGTH - 3)])
        reading.read([5, 6, 7])
        with pytest.raises(BackendError, match=f"have {LENGTH + 1} tokens"):
            reading.read([5, 6, 7, 8])

    def test_after_a_failure_the_cache_is_rebuilt(self, tiny: CausalLM) -> None:
        prompt, answer = drawn(tiny, 6), drawn(tiny, 5, 1)
        reading, fails = tiny.begin([prompt]), [True]

        def fail(*_: Any) -> None:
            if fails:
                fails.pop()
                raise torch.OutOfMemoryError("secret")

        reading.read(answer[:2])
        hook = tiny._model.model.layers[1].register_forward_pre_hook(fail)  # after the first layer's cache has grown
        with pytest.raises(BackendError, match=r"failed on cpu \(OutOfMemoryError\); use shorter texts") as caught:
            reading.read(answer)
        assert "secret" not in str(caught.value)
        assert reading.read(answer)[0] == pytest.approx(logits_in_one_pass(tiny, prompt, answer)[-1:], abs=5e-4)
        hook.remove()

    def test_weights_that_return_nan_raise(self, tmp_path: Path) -> None:
        model = CausalLM(str(saved(tmp_path)), device="cpu")
        with torch.no_grad():
            model._model.lm_head.weight[:] = float("nan")
        with pytest.raises(BackendError, match="returned NaN"):
            model.begin([[5]]).read([])


class TestModel:
    def test_the_model_is_registered_as_a_token_model(self) -> None:
        assert plugins.names("token_model") == ["transformers"]
        assert TokenModel in plugins.load("token_model", "transformers").__mro__

    def test_the_trained_pair_shares_a_vocabulary(self, data: Path) -> None:
        one, other = (load_or_skip(data, name) for name in ("draft", "reference"))
        assert one.vocabulary == other.vocabulary
        assert len(one.vocabulary) == 3072
        assert one.ends == {2}

    def test_tokens_and_text_are_inverse(self, tiny: CausalLM) -> None:
        text = " heron, grove\n7!"
        assert tiny.text(tiny.tokens(text)) == text
        assert [tiny.vocabulary[t] for t in tiny.tokens("ab")] == ["a", "b"]

    def test_special_tokens_in_text_are_escaped(self, tiny: CausalLM) -> None:
        marks = {tiny._tokenizer.token_to_id(mark) for mark in ("<s>", "</s>", "<|end|>")}
        assert not marks & set(tiny.tokens("a</s><|end|><s>b"))
        assert tiny.text([5, *marks, 6]) == tiny.text([5, 6])

    @pytest.mark.parametrize("chat", ["", CHAT])
    def test_encode_equals_the_prompt_of_stream(self, chat: str, tmp_path: Path) -> None:
        model = CausalLM(str(saved(tmp_path, chat)), device="cpu")
        prompt = Prompt("Where?", (CLINIC,), "Be brief.")
        assert model.encode(prompt) == model._prompt_ids(prompt)

    def test_greedy_decoding_equals_greedy_generation(self, trained: CausalLM) -> None:
        prompt = Prompt("What is the home city of Okwu?", (CLINIC,), "")

        async def written() -> str:
            return "".join([chunk async for chunk in trained.stream(prompt)])

        reading, generated = trained.begin([trained.encode(prompt)]), list[int]()
        while len(generated) < 60 and (not generated or generated[-1] not in trained.ends):
            generated.append(int(reading.read(generated)[0, -1].argmax()))
        assert trained.text(generated).strip() == asyncio.run(written()) == "The home city of Okwu is Port Snaw."

    def test_flops_are_two_per_parameter_and_attention(self, tiny: CausalLM) -> None:
        parameters = sum(p.numel() for p in tiny._model.parameters())
        assert tiny.flops(1, 0) == 2 * parameters + 4 * 2 * 32
        assert tiny.flops(3, 10) == 3 * 2 * parameters + 4 * 2 * 32 * (11 + 12 + 13)

    def test_the_vocabulary_excludes_padding_of_the_weights(self, tmp_path: Path) -> None:
        folder = saved(tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        size = model.config.vocab_size
        model.resize_token_embeddings(size + 60, mean_resizing=False)
        model.save_pretrained(folder)
        wide = CausalLM(str(folder), device="cpu")
        assert len(wide.vocabulary) == size
        assert wide.begin([[5]]).read([]).shape == (1, 1, size)

    def test_half_precision_weights(self, tmp_path: Path) -> None:
        half = CausalLM(str(saved(tmp_path)), device="cpu", dtype="bfloat16")
        found = half.begin([drawn(half, 5), drawn(half, 3)]).read([5, 6], 2)
        assert found.dtype == np.float32 and np.isfinite(found).all()

    def test_a_model_that_does_not_fit_on_its_device_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = saved(tmp_path)

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("secret")

        monkeypatch.setattr(transformers.LlamaForCausalLM, "to", fail)
        with pytest.raises(ConfigError, match=r"does not fit on cpu \(OutOfMemoryError\); use a smaller model"):
            CausalLM(str(folder), device="cpu")
