from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from casemate.backends.embedders.minilm import PACKAGE, MiniLM
from casemate.backends.embedders.sentence_transformers import SentenceTransformers
from casemate.errors import BackendError, ConfigError, DataError
from tests import tiny_encoder

REASON = "needs casemate[sentence-transformers]"
torch = pytest.importorskip("torch", reason=REASON)
sentence_transformers = pytest.importorskip("sentence_transformers", reason=REASON)

VOCABULARY = [
    *tiny_encoder.SPECIAL,
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    "court",
    ",",
]
LENGTH, DIM = 20, 32
TEXTS = ["the court", "a", "", "court, court, court and so on", "zebra", "x y z", "ünïcödé 東京", "court " * 50]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights and no pooler, as saved by transformers."""
    return tiny_encoder.bert(tmp_path_factory.mktemp("bert"), VOCABULARY, DIM)


@pytest.fixture(scope="module")
def folder(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, as saved by sentence-transformers."""
    return tiny_encoder.sentence_model(bert, tmp_path_factory.mktemp("models") / "tiny", LENGTH)


@pytest.fixture(scope="module")
def backend(folder: Path) -> SentenceTransformers:
    return SentenceTransformers(str(folder), batch=3)


def altered(folder: Path, into: Path, change: Any) -> Path:
    """A copy of the folder with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, into)
    weights = load_file(into / "model.safetensors")
    change(weights)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def test_embeddings_are_unit_vectors_equal_to_those_of_the_library(backend: SentenceTransformers, folder: Path) -> None:
    done: list[int] = []
    vectors = backend.embed(TEXTS, done.append)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), DIM) == (len(TEXTS), backend.dim)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert done == [3, 3, 2]
    library = sentence_transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    own = library.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(vectors, own, atol=1e-5)
    one_by_one = np.concatenate([backend.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(vectors, one_by_one, atol=1e-5)


def test_an_empty_list_gives_no_rows(backend: SentenceTransformers) -> None:
    assert backend.embed([]).shape == (0, DIM)


def test_embeddings_are_deterministic(backend: SentenceTransformers, folder: Path) -> None:
    again = SentenceTransformers(str(folder), batch=3)
    np.testing.assert_array_equal(again.embed(TEXTS), backend.embed(TEXTS))
    assert again.fingerprint == backend.fingerprint


def test_long_texts_are_truncated(backend: SentenceTransformers) -> None:
    assert backend.max_tokens == LENGTH - 2
    whole, cut = backend.embed(["court " * 500, "court " * backend.max_tokens])
    np.testing.assert_allclose(whole, cut, atol=1e-6)
    assert not np.allclose(cut, backend.embed(["court " * (backend.max_tokens - 1)])[0], atol=1e-6)


def test_spans_map_to_the_text(backend: SentenceTransformers) -> None:
    text = "Court, zeb  Çözt\n東 court"
    tokens = [text[a:b] for a, b in backend.spans(text)]
    assert tokens == ["Court", ",", "z", "e", "b", "Ç", "ö", "z", "t", "東", "court"]
    assert backend.spans("") == []
    assert len(backend.spans("court " * 500)) == 500
    backend.embed(["court"])
    assert len(backend.spans("court " * 500)) == 500


class TestFingerprint:
    def test_contains_the_model_name_but_not_the_folder(
        self, backend: SentenceTransformers, folder: Path, tmp_path: Path
    ) -> None:
        parts = backend.fingerprint.split(":")
        assert parts[:2] == ["sentence_transformers", "tiny"] and parts[3:] == [str(LENGTH), str(DIM)]
        moved = SentenceTransformers(str(shutil.copytree(folder, tmp_path / "tiny")) + "/")
        assert moved.fingerprint == backend.fingerprint

    def test_changes_with_the_weights(self, backend: SentenceTransformers, folder: Path, tmp_path: Path) -> None:
        def change(weights: dict[str, Any]) -> None:
            weights["encoder.layer.1.output.dense.bias"][7] += 1e-3

        other = SentenceTransformers(str(altered(folder, tmp_path / "tiny", change)))
        assert other.fingerprint.split(":")[2] != backend.fingerprint.split(":")[2]
        assert other.fingerprint.split(":")[3:] == backend.fingerprint.split(":")[3:]

    def test_changes_with_length_and_pooling(self, backend: SentenceTransformers, folder: Path, tmp_path: Path) -> None:
        library = sentence_transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        library.max_seq_length = LENGTH - 1
        library.save(str(tmp_path / "shorter" / "tiny"))
        shorter = SentenceTransformers(str(tmp_path / "shorter" / "tiny"))
        assert shorter.fingerprint == backend.fingerprint.replace(f":{LENGTH}:", f":{LENGTH - 1}:")
        cls = tmp_path / "cls" / "tiny"
        shutil.copytree(folder, cls)
        config = cls / "1_Pooling" / "config.json"
        config.write_text(config.read_text().replace('"mean"', '"cls"'))
        assert SentenceTransformers(str(cls)).fingerprint != backend.fingerprint

    def test_does_not_depend_on_random_parameters(self, bert: Path) -> None:
        first, second = SentenceTransformers(str(bert)), SentenceTransformers(str(bert))
        assert first.fingerprint == second.fingerprint
        np.testing.assert_array_equal(first.embed(TEXTS), second.embed(TEXTS))


def test_concurrent_calls_return_the_same_embeddings(backend: SentenceTransformers) -> None:
    expected = backend.embed(TEXTS)
    found: list[np.ndarray] = []

    def work() -> None:
        backend.spans("court " * 99)
        found.append(backend.embed(TEXTS))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for vectors in found:
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_loading_a_folder_uses_no_network_and_shows_no_progress_bars(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    SentenceTransformers(str(folder)).embed(["court"] * 3)
    assert capfd.readouterr() == ("", "")


def test_progress_bars_are_restored(folder: Path) -> None:
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    try:
        for shown in (True, False):
            (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
            SentenceTransformers(str(folder))
            assert logging.is_progress_bar_enabled() is shown
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


class TestRefusals:
    @pytest.mark.parametrize("name", ["/nowhere/model", "./model", "a/b/c", "", "~/no-such-folder-here", "../x"])
    def test_missing_folder_is_an_error(self, name: str) -> None:
        with pytest.raises(DataError, match=r"no model folder at .*; set a folder with modules\.json"):
            SentenceTransformers(name)

    def test_unknown_name_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def loads_nothing(*_: Any, **options: Any) -> None:
            assert options["local_files_only"] is False
            raise OSError("no such model")

        monkeypatch.setattr(sentence_transformers, "SentenceTransformer", loads_nothing)
        with pytest.raises(DataError, match=r"'some/model' cannot be loaded \(OSError\); correct the name or path"):
            SentenceTransformers("some/model")

    def test_folder_without_a_model_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot be loaded .*; set a folder saved by sentence-transformers"):
            SentenceTransformers(str(tmp_path))

    @pytest.mark.parametrize("device", ["gpu", "cuda:99", ""])
    def test_unavailable_device_is_an_error(self, folder: Path, device: str) -> None:
        with pytest.raises(ConfigError, match="is not available; 'cpu' always is"):
            SentenceTransformers(str(folder), device=device)

    def test_invalid_batch_size_is_an_error(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="batch=0; it must be at least 1"):
            SentenceTransformers(str(folder), batch=0)

    def test_weights_with_non_finite_vectors_are_an_error(self, folder: Path, tmp_path: Path) -> None:
        def spoil(weights: dict[str, Any]) -> None:
            weights["embeddings.LayerNorm.weight"][:] = float("nan")

        with pytest.raises(BackendError, match="zero or not finite") as caught:
            SentenceTransformers(str(altered(folder, tmp_path / "tiny", spoil)))
        assert caught.value.backend == "sentence_transformers" and not caught.value.retryable

    def test_a_model_without_a_fast_tokenizer_is_an_error(self, backend: SentenceTransformers) -> None:
        from casemate.runtime.hugging_face import fast_tokenizer

        with pytest.raises(ConfigError, match="no fast tokenizer"):
            fast_tokenizer(object(), "some/model")

    def test_missing_package_raises_an_error_with_the_extra(self) -> None:
        code = """
import sys
sys.modules["sentence_transformers"] = sys.modules["torch"] = None
from casemate.backends.embedders.sentence_transformers import SentenceTransformers
try:
    SentenceTransformers("some/model")
except Exception as error:
    print(type(error).__name__, error)
"""
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout == (
            "MissingExtra the package 'sentence_transformers' is not installed: "
            "pip install 'casemate[sentence-transformers]'\n"
        )


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec(PACKAGE), reason=f"needs {PACKAGE}")
def test_minilm_on_onnx_equals_minilm_on_torch(tmp_path: Path) -> None:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec and spec.origin
    texts = [
        *("Who was the plaintiff?", "The court dismissed the appeal with costs.", "word " * 1000, "a" * 5000),
        *("", " ", "\n\t\n", ".", "?!?!", "[CLS] [SEP] [MASK] [PAD]", "\u200b", "\x00\x01", "1234567890" * 30),
        *(
            "Der Kläger beantragte Prozesskostenhilfe.",
            "東京地方裁判所は訴えを棄却した。",
            "Апелляция отклонена",
            "مرحبا",
        ),
        *("👩‍🚀🧑‍⚖️ 🎉", "e\u0301 vs é, ﬁ vs fi, İ", "<html> &amp; {json: 'x'} C:\\path\\file.txt " * 40),
    ]
    assert len(texts) == 20
    onnx = MiniLM(cache=tmp_path)
    torch_backend = SentenceTransformers(str(Path(spec.origin).parent / "model"), batch=5)
    assert (onnx.dim, onnx.max_tokens) == (torch_backend.dim, torch_backend.max_tokens)
    cosines = (onnx.embed(texts) * torch_backend.embed(texts)).sum(axis=1)
    assert cosines.min() > 0.99999, dict(zip(texts, cosines, strict=True))
    for text in texts:
        assert onnx.spans(text) == torch_backend.spans(text)
