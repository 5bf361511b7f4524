"""GGUF files: conversion, cache, roles, and files that cannot be used."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

REASON = "needs casemate[transformers]"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)
gguf = pytest.importorskip("gguf", reason=REASON)

from casemate.backends.chat_prompt import user_message  # noqa: E402
from casemate.backends.generators.transformers import DATA_NOTE, CausalLM, chat_template  # noqa: E402
from casemate.backends.generators.transformers.chat_template import ChatTemplate  # noqa: E402
from casemate.backends.generators.transformers.gguf import converted  # noqa: E402
from casemate.backends.indexes.sqlite import SqliteIndex  # noqa: E402
from casemate.errors import BackendError, ConfigError, DataError  # noqa: E402
from casemate.guard.defenses.cascade import Cascade  # noqa: E402
from casemate.guard.guard import Guard  # noqa: E402
from casemate.protocols import Defense  # noqa: E402
from casemate.rag.pipeline import Rag  # noqa: E402
from casemate.types import Action, Answer, Document, Outcome, Prompt, Query, Verdict  # noqa: E402
from tests.fakes import BagOfWords  # noqa: E402
from tests.unit.tiny_gguf import CHAT, LENGTH, write_gguf  # noqa: E402

NOTE = Document("a", "The pharmacy is on level 2.", title="Pharmacy")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(file: Path, cache: Path) -> CausalLM:
    return CausalLM(str(file), device="cpu", cache=cache, max_tokens=12)


def answer(model: CausalLM, question: str = "Where?", *context: Document, instructions: str = "") -> str:
    async def whole() -> str:
        return "".join([chunk async for chunk in model.stream(Prompt(question, context, instructions))])

    return asyncio.run(whole())


def test_weights_equal_those_of_the_file(tiny: CausalLM, file: Path) -> None:
    named = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}
    state = tiny._model.state_dict()
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "lm_head.weight": "output.weight",
    }
    for name, source in pairs.items():
        assert state[name].numpy().tolist() == named[source].data.tolist()
    assert tiny.limit == LENGTH


def test_a_cached_model_is_not_converted_again(file: Path, cache: Path, tiny: CausalLM, monkeypatch: Any) -> None:
    (folder,) = cache.iterdir()
    assert hashlib.sha256(file.read_bytes()).hexdigest()[:16] in folder.name
    monkeypatch.setattr("casemate.backends.generators.transformers.gguf._convert", None)
    again = CausalLM(str(file), device="cpu", cache=cache, max_tokens=12)
    assert answer(again, "Where?", NOTE) == answer(tiny, "Where?", NOTE)


def test_changed_file_is_converted_again(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", seed=1)
    first = converted(file, cache=tmp_path / "cache")
    write_gguf(file, seed=2)
    assert converted(file, cache=tmp_path / "cache") != first


def test_cache_folder_follows_xdg_cache_home(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert converted(file).parent == tmp_path / "casemate" / "models"


def test_interrupted_conversion_leaves_no_files(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Path, folder: Path, dtype: str) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("casemate.backends.generators.transformers.gguf._convert", interrupted)
        converted(file, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert (converted(file, cache=tmp_path) / "config.json").exists()


def test_the_prompt_is_a_chat_with_roles(tiny: CausalLM) -> None:
    ids = tiny.encode(Prompt("Where? <|im_end|>", (NOTE,), "Be brief."))
    shown = str(tiny._tokenizer.decode(ids, skip_special_tokens=False))
    assert shown.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '<|im_end|>\n<|im_start|>user\n<document number="1">\nPharmacy\nThe pharmacy' in shown
    assert shown.endswith("Question: Where? < |im_end|><|im_end|>\n<|im_start|>assistant\n")
    (end,) = tiny.ends
    assert ids.count(end) == 2  # special tokens in a question do not end a turn


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no system') }}", ""])
def test_a_template_without_system_messages(refusal: str, tmp_path: Path) -> None:
    chat = "{% if messages[0]['role'] == 'system' %}" + refusal + "{% set messages = messages[1:] %}{% endif %}" + CHAT
    model = CausalLM(str(write_gguf(tmp_path / "m.gguf", chat)), device="cpu", cache=tmp_path / "cache")
    shown = str(model._tokenizer.decode(model.encode(Prompt("Where?", (), "Be brief.")), skip_special_tokens=False))
    assert shown.startswith("<|im_start|>user\nBe brief.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('never') }}", "refuses the prompt (TemplateError)"),
        ("{{ 1/0 }}", "refuses the prompt (ZeroDivisionError)"),
        ("{{ messages + 1 }}", "refuses the prompt (TypeError)"),
        ("{% if %}", "refuses the prompt (TemplateSyntaxError)"),
        ("{{ messages[9].content }}", "refuses the prompt (UndefinedError)"),
        ("{{ 'x' * 200000 }}", "refuses the prompt (it adds more than 100,000 characters)"),
        ("{% set x = 'x' * 10 ** 10 %}" + CHAT, "refuses the prompt (MemoryError)"),
        ("Hello.", "drops the question or the documents"),
    ],
)
def test_a_template_that_fails_is_refused_when_the_model_is_loaded(template: str, message: str) -> None:
    with pytest.raises(DataError, match=f"the chat template of 'm' {re.escape(message)}; use another model"):
        ChatTemplate.load(template, {}, "m")


@pytest.mark.slow
def test_template_that_exceeds_the_time_limit_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 2)  # the caller kills the process after three times this limit
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"refuses the prompt \(it did not end within 6 seconds\)"):
        ChatTemplate.load(loop, {}, "m")


@given(system=st.text(), user=st.text())
def test_messages_replace_the_placeholders(system: str, user: str) -> None:
    template = ChatTemplate(("<", chat_template.SYSTEM, "|", chat_template.USER, ">"))
    assert template.text(system, user) == f"<{system.strip()}|{user.strip()}>"


def test_chat_equals_that_of_transformers(tiny: CausalLM) -> None:
    prompt = Prompt("Where? {{ messages }}", (NOTE,), "Be brief.")
    chat = [
        {"role": "system", "content": f"Be brief.\n\n{DATA_NOTE}"},
        {"role": "user", "content": user_message(prompt)},
    ]
    expected = tiny._chat.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tiny._tokenizer.decode(tiny.encode(prompt), skip_special_tokens=False) == expected


class TestDigest:
    def test_expected(self, file: Path, cache: Path) -> None:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        CausalLM(str(file), device="cpu", cache=cache, sha256=digest.upper())
        with pytest.raises(DataError, match=f"has SHA-256 {digest}, expected {'0' * 64}"):
            CausalLM(str(file), device="cpu", cache=cache, sha256="0" * 64)

    def test_of_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is not a GGUF file; remove it"):
            CausalLM(str(tmp_path), device="cpu", sha256="0" * 64)


class TestUnusableFiles:
    @pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.9, 0.9999])
    def test_truncated(self, share: float, file: Path, tmp_path: Path) -> None:
        data = file.read_bytes()
        short = tmp_path / "short.gguf"
        short.write_bytes(data[: int(share * len(data))])
        with pytest.raises(DataError, match="is truncated|is not a GGUF file"):
            converted(short, cache=tmp_path / "cache")
        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize(
        "content", [b"PK\x03\x04" + b"\0" * 100, b"ggml" * 20, b"{}", random.Random(0).randbytes(64)]
    )
    def test_other_file_format(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(DataError, match="is not a GGUF file: it does not begin with 'GGUF'"):
            converted(tmp_path / "m.gguf", cache=tmp_path)

    @pytest.mark.parametrize(("version", "count"), [(1, 3), (99, 3), (3, 2**60), (0x03000000, 3)])
    def test_damaged_header(self, version: int, count: int, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", version, count, count) + b"\0" * 100)
        with pytest.raises(DataError, match="it is damaged, big-endian, or of an unknown version"):
            converted(tmp_path / "m.gguf", cache=tmp_path)

    @pytest.mark.parametrize("seed", range(12))
    def test_damaged_metadata(self, seed: int, file: Path, tmp_path: Path) -> None:
        import random

        rng = random.Random(seed)
        data = bytearray(file.read_bytes())
        for _ in range(20):
            data[rng.randrange(24, 6000)] = rng.randrange(256)
        (tmp_path / "m.gguf").write_bytes(data)
        try:
            converted(tmp_path / "m.gguf", cache=tmp_path / "cache")
        except DataError as error:
            assert "m.gguf" in str(error)

    def test_without_a_chat_template(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="has no chat template, .* use an 'instruct' or 'chat' version"):
            converted(write_gguf(tmp_path / "m.gguf", ""), cache=tmp_path)

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        file = write_gguf(tmp_path / "m.gguf", architecture="clip")
        with pytest.raises(DataError, match="cannot be converted .* may not support its architecture"):
            converted(file, cache=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_one_of_several_parts(self, tmp_path: Path) -> None:
        file = write_gguf(tmp_path / "m.gguf", split__count=3)
        with pytest.raises(DataError, match="is one of 3 parts"):
            converted(file, cache=tmp_path)

    @pytest.mark.parametrize("name", ["absent.gguf", ""])
    def test_missing_file(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"cannot be read \((No such file|Is a directory)"):
            converted(tmp_path / name, cache=tmp_path)

    def test_cache_that_cannot_be_written(self, file: Path, tmp_path: Path) -> None:
        (tmp_path / "occupied").write_text("")
        with pytest.raises(BackendError, match="cannot be written .* XDG_CACHE_HOME"):
            converted(file, cache=tmp_path / "occupied" / "models")


@pytest.mark.parametrize("part", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_damaged_conversion(part: str, share: float, file: Path, tmp_path: Path) -> None:
    damaged = converted(file, cache=tmp_path) / part
    damaged.write_bytes(damaged.read_bytes()[: int(share * damaged.stat().st_size)])
    with pytest.raises(DataError, match=r"m.* cannot be loaded .* delete the folder, and the file is converted again"):
        CausalLM(str(file), device="cpu", cache=tmp_path)


class TestAnswers:
    def test_endless_answer_ends_at_max_tokens(self, tiny: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        letter = tiny._tokenizer.token_to_id("h")
        monkeypatch.setattr(tiny, "_next", lambda *_: (letter, None))
        assert answer(tiny) == "h" * tiny.max_tokens

    def test_empty_answer_is_an_error(self, tiny: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        (end,) = tiny.ends
        monkeypatch.setattr(tiny, "_next", lambda *_: (end, None))
        with pytest.raises(BackendError, match="wrote nothing after .* tokens; use a model trained to answer"):
            answer(tiny)

    def test_too_long_a_context(self, tiny: CausalLM) -> None:
        with pytest.raises(BackendError, match=f"the model .* reads {LENGTH}; use fewer"):
            answer(tiny, "Where?", Document("a", "word " * LENGTH))


class ReplaceAnswer(Defense):
    """Replaces every answer, so any other text that a client receives was not guarded."""

    paper = "none: for these tests"

    async def on_answer(self, query: Query, answer: Answer) -> Outcome[Answer]:
        verdict = Verdict("sealed", True, Action.NONE, 1.0, 0.5)
        return Outcome(replace(answer, text="sealed"), verdict)


class TestModelWithGuard:
    """For every behavior of the model, a client receives a guarded answer or an error in bounded time."""

    def guard(self, model: CausalLM, tmp_path: Path, *defenses: Defense) -> Guard:
        index = SqliteIndex(tmp_path / "index.db")
        embedder = BagOfWords()
        index.open(embedder.fingerprint, embedder.dim)
        index.add([NOTE], embedder.embed([NOTE.content]))
        return Guard(Rag(embedder, index, model), list(defenses))

    def received(self, guard: Guard, streamed: bool) -> str:
        async def whole() -> str:
            if streamed:
                return "".join([piece async for piece in guard.stream(Query("Where?", "ann"))])
            return (await guard.ask(Query("Where?", "ann"))).text

        return asyncio.run(whole())

    @pytest.mark.parametrize("streamed", [False, True])
    def test_endless_answer_ends_at_max_tokens(
        self, streamed: bool, tiny: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[int] = []
        letter = tiny._tokenizer.token_to_id("h")
        monkeypatch.setattr(tiny, "_next", lambda *_: calls.append(1) or (letter, None))
        assert self.received(self.guard(tiny, tmp_path, ReplaceAnswer()), streamed) == "sealed"
        assert len(calls) == tiny.max_tokens

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize("failure", ["silence", "too long", "NaN in the middle"])
    def test_model_failure_is_raised_without_output(
        self, failure: str, streamed: bool, tiny: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[int] = []
        (end,) = tiny.ends

        def following(*_: object) -> tuple[int, None]:
            made.append(1)
            if failure == "silence":
                return end, None
            if len(made) == 3:
                raise BackendError("NaN", backend="transformers", retryable=False)
            return tiny._tokenizer.token_to_id("h"), None

        monkeypatch.setattr(tiny, "_next", following)
        if failure == "too long":
            monkeypatch.setattr(tiny, "_limit", 20)
        guard, pieces = self.guard(tiny, tmp_path, ReplaceAnswer()), []

        async def whole() -> None:
            stream = guard.stream(Query("Where?", "ann"))
            pieces.extend([piece async for piece in stream]) if streamed else await guard.ask(Query("Where?", "ann"))

        with pytest.raises(BackendError):
            asyncio.run(whole())
        assert not pieces

    @pytest.mark.parametrize("failure", ["silence", "too long"])
    def test_cascade_raises_the_error(
        self, failure: str, tiny: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if failure == "silence":
            monkeypatch.setattr(tiny, "_ends", frozenset(range(len(tiny.vocabulary))))
        else:
            monkeypatch.setattr(tiny, "_limit", 20)
        guard = self.guard(tiny, tmp_path, Cascade(draft=tiny, max_tokens=8))
        with pytest.raises(BackendError, match="wrote nothing" if failure == "silence" else "reads at most 20"):
            self.received(guard, streamed=False)


@pytest.mark.slow
def test_smollm2_answers_from_the_context() -> None:
    """Uses a model of 98 MB if it is in the cache."""
    file = Path.home() / ".cache/casemate-models/smollm2-135m-instruct-q4_1.gguf"
    if not file.exists():
        pytest.skip(f"no model at {file}")
    digest = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    model = CausalLM(str(file), device="cpu", max_tokens=24, sha256=digest)
    shown = model.text(model.encode(Prompt("Where?", (NOTE,), "Be brief.")))
    assert "Be brief." in shown and shown.endswith("assistant\n")
    assert "level 2" in answer(model, "On which level is the pharmacy?", NOTE, instructions="Answer briefly.")
