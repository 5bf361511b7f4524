"""Fine-tunes the embedder's own model by the loss of ``supcon``, through a low-rank adapter. Needs torch and peft.

RAGFort, Section 4.2 (Li et al. 2026, AAAI, arXiv 2511.10128) trains "a new encoder"; this is the reading with
an encoder that is really another one. The adapter is LoRA (Hu et al. 2021, arXiv 2106.09685) in every linear layer; the
model's own weights stay as they are, so an adapter is some megabytes, and without it the encoder is the embedder.

In mode ``lora`` the fine-tuned encoder is for chunks and questions alike; in mode ``lora_compatible`` for chunks only,
and questions are embedded as ever (the paper's text to the letter).

Deviation: the paper says nothing of how its encoder is trained. Here dropout is off, in the model and in the adapter:
the same step of the same data gives the same gradient, so that a training that was broken off goes on as if it had not
been. The terms that hold it back are those of ``supcon``.
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

from casemate.errors import ConfigError, DataError, needs
from casemate.reindexing.supcon import Learner, Run, StepDone, Trained, TrainSettings
from casemate.reindexing.topics import Labels
from casemate.reindexing.tuned import FILES, Adapter, Tunable
from casemate.types import Vector

EXTRA = "casemate[lora]"
AT_ONCE = {"cpu": 8}
"""Texts of like length that go through the model together, by device: elsewhere ``MANY``. What is padded is wasted."""
MANY = 64
DEFAULT = TrainSettings(classes=8, each=4, negatives=8, questions=16, rate=3e-4, steps=400, look=25)
"""A schedule for an encoder: it costs some thousand times as much a step as a map, and fewer will do."""


@dataclass(frozen=True)
class LoraSettings:
    """What is trained, and where.

    Attributes:
        rank: Of the adapter.
        alpha: The adapter counts alpha / rank times.
        device: As torch names it; ``auto``: a GPU if there is one.
        checkpointing: Whether activations are computed again instead of kept: less memory, a third more time.
    """

    rank: int = 8
    alpha: int = 16
    device: str = "auto"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise ConfigError(f"lora needs rank and alpha of at least 1; got {self.rank} and {self.alpha}")


@dataclass(frozen=True)
class Texts:
    """What is embedded: with the embedder's vectors of the same.

    Attributes:
        chunks: Texts of the chunks, n.
        E: Their vectors by the embedder, (n, dim).
        labels: Their topics, (n,).
        questions: Harmless questions whose similarities are to be kept, m.
        Q: Their vectors by the embedder, (m, dim).
    """

    chunks: Sequence[str]
    E: Vector
    labels: Labels
    questions: Sequence[str]
    Q: Vector


def tune(
    embedder: Tunable,
    texts: Texts,
    training: TrainSettings = DEFAULT,
    settings: LoraSettings = LoraSettings(),
    checkpoint: Path | None = None,
    progress: StepDone = lambda steps: None,
) -> tuple[Adapter, Trained]:
    """Fine-tunes; stops when chunks that were held out lie no further apart.

    Args:
        embedder: Whose model; it stays as it is.
        texts: What is learnt from.
        training: How; its mode says whether questions go through the new encoder too.
        settings: What is trained, and where.
        checkpoint: A file to go on from, and to write at each look.
        progress: Called with the number of steps just taken.

    Returns:
        The adapter at the best step, and how it came about.

    Raises:
        ConfigError: If the device cannot be used.
        DataError: If there are fewer than two topics, or the model's output has not the embedder's dimensions.
        BackendError: If the checkpoint cannot be written.
        MissingExtra: If torch or peft is absent.
    """
    encoder = _Encoder(embedder, texts, settings, training.seed)
    run = Run(texts.E, texts.labels, texts.Q, training, encoder)
    trained = run.whole(checkpoint, progress)
    return encoder.adapter(trained.weights), trained


def merged(network: Any, adapter: Adapter) -> Any:
    """The network with the adapter added to its weights; changes the one that is given.

    Raises:
        DataError: If the adapter is damaged, or of another model.
        MissingExtra: If peft is absent.
    """
    with needs(EXTRA):
        import peft
        from safetensors.torch import load
    transformer = _inner(network)
    try:
        about = json.loads(adapter[FILES[0]])
        options = {name: about[name] for name in ("r", "lora_alpha", "target_modules")}
        with _quiet():
            model = peft.get_peft_model(transformer, peft.LoraConfig(**options))
            weights = load(adapter[FILES[1]])
            if weights.keys() != peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys():
                raise ValueError("other layers")
            peft.set_peft_model_state_dict(model, weights)
            model.merge_and_unload(safe_merge=True)
    except Exception as error:  # of a damaged file: whatever safetensors, peft and torch raise
        raise DataError(
            f"the adapter is damaged or of another model ({type(error).__name__}); run 'casemate reindex'"
        ) from error
    return network.eval()


class _Encoder(Learner):
    """The model with an adapter that starts as nothing: its second factor is zero."""

    def __init__(self, embedder: Tunable, texts: Texts, settings: LoraSettings, seed: int) -> None:
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
                model = _inner(self.network)  # the method has a new name from version 5.20 on
                name = "activation_checkpointing_enable"
                getattr(model, name, model.gradient_checkpointing_enable)({"use_reentrant": False})
        self.network.to(self.device).train(settings.checkpointing)  # layers compute again in training mode only
        self.parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    def chunks(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._encoded([self._texts.chunks[i] for i in rows.tolist()])

    def questions(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._encoded([self._texts.questions[i] for i in rows.tolist()])

    def held(self, rows: npt.NDArray[np.int64]) -> Vector:
        with self.torch.no_grad():
            found: Vector = self.chunks(rows).cpu().numpy()
        return found

    @property
    def identity(self) -> str:
        """The model and what of it is trained."""
        return f" {self._name} {self._settings.rank} {self._settings.alpha}"

    def adapter(self, weights: Mapping[str, Vector]) -> Adapter:
        """These weights as the files that peft reads."""
        import peft
        from safetensors.torch import save

        with self.torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(self.torch.from_numpy(weights[name]))
        with _quiet():
            state = peft.get_peft_model_state_dict(self._model, save_embedding_layers=False)
        about = self._model.peft_config["default"].to_dict()
        about["target_modules"] = sorted(about["target_modules"])
        about |= {"base_model_name_or_path": None, "inference_mode": True}  # no path of this machine
        config = json.dumps(about, indent=2, sort_keys=True, default=str)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        return dict(zip(FILES, (config.encode(), save(tensors, {"format": "pt"})), strict=True))

    def _encoded(self, texts: list[str]) -> Any:
        order, count = sorted(range(len(texts)), key=lambda i: -len(texts[i])), AT_ONCE.get(self.device.type, MANY)
        parts = [order[start : start + count] for start in range(0, len(order), count)]
        found = self.torch.cat([self._together([texts[i] for i in part]) for part in parts])
        return found[np.argsort(order)]

    def _together(self, texts: list[str]) -> Any:
        from sentence_transformers.util import batch_to_device

        prepare = getattr(self.network, "preprocess", None) or self.network.tokenize  # the former from version 6 on
        features = batch_to_device(prepare(texts), self.device)
        with self.torch.autocast(self.device.type, self.torch.bfloat16, enabled=self.device.type == "cuda"):
            out = self.network(features)["sentence_embedding"]
        if out.shape[1] != self._texts.E.shape[1]:
            raise DataError(
                f"the model {self._name!r} gives {out.shape[1]} dimensions in training, and the index has "
                f"{self._texts.E.shape[1]}: it cannot be fine-tuned here"
            )
        return self.torch.nn.functional.normalize(out.float(), dim=1)


def _inner(network: Any) -> Any:
    """The transformer that is adapted, in a network of sentence-transformers.

    Raises:
        ConfigError: If it begins with none.
    """
    found = getattr(network[0], "auto_model", None)
    if found is None:
        raise ConfigError(
            f"the model begins with {type(network[0]).__name__}, which is no transformer, and cannot be fine-tuned; "
            "use mode adapter, compatible or gate"
        )
    return found


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"the device {name!r} cannot be used here; 'auto' and 'cpu' always can") from error


def _without_dropout(network: Any) -> None:
    """Sets every chance of dropout to 0; some models keep it as a number of their attention layers."""
    for module in network.modules():
        for name in ("p", "dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without one warning that peft causes and cannot help: it reads a property that transformers renames."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
