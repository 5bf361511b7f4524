"""Fine-tunes the embedder's model with a LoRA adapter and the SupCon loss. Needs torch and peft.

RAGFort, Section 4.2 (Li et al. 2026, AAAI, arXiv 2511.10128) trains "a new encoder", and here it is a separate encoder.
The adapter is LoRA (Hu et al. 2021, arXiv 2106.09685) in every linear layer. The model's weights do not change,
so an adapter takes some megabytes, and without it the encoder is the embedder.

Mode ``lora`` uses the fine-tuned encoder for chunks and questions. Mode ``lora_compatible`` uses it for chunks only
(the literal reading of the paper).

Deviation: the paper does not say how its encoder is trained. Here dropout is off in model and adapter: a step gives the
same gradient every time, so an interrupted training resumes exactly. The regularizers are those of ``supcon``.
Deviation: on a CUDA device the model computes in bfloat16; parameters and loss are float32.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError, DataError, needs, require_range
from casemate.maths.clustering import Labels
from casemate.reindexing.space import ADAPTER_FILES, Adapter, TunableEmbedder
from casemate.reindexing.supcon import Learner, StepCallback, TrainingResult, TrainingRun, TrainSettings
from casemate.runtime.hugging_face import require_device
from casemate.types import Vector

EXTRA = "casemate[lora]"
CPU_BATCH, DEVICE_BATCH = 8, 64
"""Texts of similar length per forward pass; small on a CPU, where padding costs more than batching saves."""
DEFAULT_TRAINING = TrainSettings(
    classes=8, per_class=4, negatives=8, questions=16, learning_rate=3e-4, steps=400, eval_interval=25
)
"""Hyperparameters for an encoder: a step costs about a thousand times that of a map, and fewer steps suffice."""


@dataclass(frozen=True)
class LoraSettings:
    """Adapter and device.

    Attributes:
        alpha: The adapter's output is scaled by alpha / rank.
        device: A torch device name; ``auto``: a GPU if there is one.
        checkpointing: Whether activations are recomputed instead of stored: less memory, a third more time.
    """

    rank: int = 8
    alpha: int = 16
    device: str = "auto"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        require_range("lora", self, "rank alpha", at_least=1)


@dataclass(frozen=True)
class TrainingTexts:
    """Training data: texts and their vectors by the embedder.

    There are n chunks with vectors, (n, dim), and topics, (n,), and m benign questions with vectors, (m, dim), whose
    similarities are preserved.
    """

    chunks: Sequence[str]
    E: Vector
    labels: Labels
    questions: Sequence[str]
    Q: Vector


def fine_tune(
    embedder: TunableEmbedder,
    texts: TrainingTexts,
    training: TrainSettings = DEFAULT_TRAINING,
    settings: LoraSettings = LoraSettings(),
    checkpoint: Path | None = None,
    progress: StepCallback = lambda steps: None,
) -> tuple[Adapter, TrainingResult]:
    """Trains an adapter with early stopping on held-out chunks. The embedder's model does not change.

    ``training.mode`` selects whether questions use the new encoder, too. The checkpoint is a file to resume from,
    written at each evaluation. Returns the adapter at the best step, and the training curve.

    Raises:
        ConfigError: If the device cannot be used.
        DataError: If there are fewer than two topics, or the model's dimension differs from the embedder's.
        BackendError: If the checkpoint cannot be written.
        MissingExtra: If torch or peft is absent.
    """
    encoder = _Encoder(embedder, texts, settings, training.seed)
    trained = TrainingRun(texts.E, texts.labels, texts.Q, training, encoder).run(checkpoint, progress)
    return encoder.adapter(trained.weights), trained


def merge_adapter(network: Any, adapter: Adapter) -> Any:
    """Merges the adapter into the network's weights, in place, and returns the network.

    Raises:
        DataError: If the adapter is damaged or belongs to another model.
        MissingExtra: If peft is absent.
    """
    with needs(EXTRA):
        import peft
        from safetensors.torch import load
    transformer = _inner(network)
    try:
        about = json.loads(adapter[ADAPTER_FILES[0]])
        options = {name: about[name] for name in ("r", "lora_alpha", "target_modules")}
        with _quiet():
            model = peft.get_peft_model(transformer, peft.LoraConfig(**options))
            weights = load(adapter[ADAPTER_FILES[1]])
            if weights.keys() != peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys():
                raise ValueError("layers of another model")
            peft.set_peft_model_state_dict(model, weights)
            model.merge_and_unload(safe_merge=True)
    except Exception as error:  # safetensors, peft and torch document no errors for a damaged file
        raise DataError(
            f"the adapter is damaged or belongs to another model ({type(error).__name__}); run 'casemate reindex'"
        ) from error
    return network.eval()


class _Encoder(Learner):
    """The model with an adapter that starts as the identity: its second factor is zero."""

    def __init__(self, embedder: TunableEmbedder, texts: TrainingTexts, settings: LoraSettings, seed: int) -> None:
        with needs(EXTRA):
            import peft
            import torch
        self.torch, self._texts, self._settings = torch, texts, settings
        self._name = embedder.fingerprint
        self.device = _device(settings.device)
        self.network = embedder.network()
        _without_dropout(self.network)
        config = peft.LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, target_modules="all-linear", lora_dropout=0.0, bias="none"
        )
        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(seed)
            self._model = peft.get_peft_model(_inner(self.network), config)
            if settings.checkpointing:
                model = _inner(self.network)  # renamed in version 5.20
                name = "activation_checkpointing_enable"
                getattr(model, name, model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.network.to(self.device).train(settings.checkpointing)  # recomputation needs training mode
        self.parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    def chunks(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._encode([self._texts.chunks[i] for i in rows.tolist()])

    def questions(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._encode([self._texts.questions[i] for i in rows.tolist()])

    def evaluate(self, rows: npt.NDArray[np.int64]) -> Vector:
        with self.torch.no_grad():
            found: Vector = self.chunks(rows).cpu().numpy()
        return found

    @property
    def identity(self) -> str:
        return f" {self._name} {self._settings.rank} {self._settings.alpha}"

    def adapter(self, weights: Mapping[str, Vector]) -> Adapter:
        import peft
        from safetensors.torch import save

        with self.torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(self.torch.from_numpy(weights[name]))
        with _quiet():
            state = peft.get_peft_model_state_dict(self._model, save_embedding_layers=False)
        about = self._model.peft_config["default"].to_dict()
        about["target_modules"] = sorted(about["target_modules"])
        about |= {"base_model_name_or_path": None, "inference_mode": True}  # no local path
        config = json.dumps(about, indent=2, sort_keys=True, default=str)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        return dict(zip(ADAPTER_FILES, (config.encode(), save(tensors, {"format": "pt"})), strict=True))

    def _encode(self, texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        size = CPU_BATCH if self.device.type == "cpu" else DEVICE_BATCH
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        vectors = self.torch.cat([self._encode_batch([texts[i] for i in batch]) for batch in batches])
        return vectors[np.argsort(order)]

    def _encode_batch(self, texts: list[str]) -> Any:
        from sentence_transformers.util import batch_to_device

        prepare = getattr(self.network, "preprocess", None) or self.network.tokenize  # preprocess: from version 6
        features = batch_to_device(prepare(texts), self.device)
        with self.torch.autocast(self.device.type, self.torch.bfloat16, enabled=self.device.type == "cuda"):
            out = self.network(features)["sentence_embedding"]
        if out.shape[1] != self._texts.E.shape[1]:
            raise DataError(
                f"the model {self._name!r} has {out.shape[1]} dimensions in training and the index "
                f"{self._texts.E.shape[1]}: it cannot be fine-tuned for this index"
            )
        return self.torch.nn.functional.normalize(out.float(), dim=1)


def _inner(network: Any) -> Any:
    """The transformer inside a sentence-transformers network."""
    found = getattr(network[0], "auto_model", None)
    if found is None:
        raise ConfigError(
            f"the first module of the model is {type(network[0]).__name__}, not a transformer, so it cannot be "
            "fine-tuned; use mode adapter, compatible or gate"
        )
    return found


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return require_device(name)


def _without_dropout(network: Any) -> None:
    """Sets every dropout probability to 0; some models store it as an attribute of their attention layers."""
    for module in network.modules():
        for name in ("p", "dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses one warning that peft causes: it reads a property that transformers renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
