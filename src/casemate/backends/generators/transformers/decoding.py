"""Decoding sessions with a key-value cache that can be rolled back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from casemate.errors import BackendError
from casemate.protocols import DecodingSession, Logits

NAME = "transformers"


@dataclass(frozen=True, eq=False)
class DecodingModel:
    """A causal language model of transformers, on its device, and what a decoding session needs of it.

    ``size`` is that of the vocabulary: logits beyond have no token. ``limit`` is the largest context length in tokens.
    ``cost`` computes the FLOPs of reading some tokens after some others. ``keeps_last_logits``: the model can compute
    the logits of the last positions only.
    """

    model: Any
    name: str
    size: int
    limit: int | None
    cost: Callable[[int, int], float]
    translate_errors: Callable[[], AbstractContextManager[None]]
    keeps_last_logits: bool = False

    def logits(self, rows: list[list[int]], pads: list[int], cache: Any, last: int) -> Any:
        """Logits of the last positions of all tokens, (contexts, positions), in float32: (contexts, last, vocabulary).

        ``pads`` counts the padding at the start of each row. The key-value cache of the first positions is extended.
        """
        import torch

        kept = cache.get_seq_length()
        more: dict[str, Any] = {}
        if any(pads):
            position = torch.arange(len(rows[0]), device=self.model.device)
            shift = torch.tensor(pads, device=self.model.device)[:, None]
            more["attention_mask"] = (position[None] >= shift).long()  # (contexts, positions)
            more["position_ids"] = (position[None] - shift).clamp(min=0)[:, kept:]
        if self.keeps_last_logits:
            more["logits_to_keep"] = last  # logits of a whole prompt may take gigabytes
        inputs = torch.tensor([row[kept:] for row in rows], device=self.model.device)  # (contexts, new)
        out = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, **more)
        return out.logits[:, -last:, : self.size].float()

    def error(self, problem: str, remedy: str) -> BackendError:
        """A ``BackendError`` that names the model."""
        return BackendError(f"the model {self.name!r}: {problem}; {remedy}", backend=NAME, retryable=False)


class CachedDecodingSession(DecodingSession):
    """A decoding session with a key-value cache. Not thread-safe.

    Shorter prompts are padded at the start; the attention mask excludes the padding.

    Raises:
        BackendError: If a prompt is empty or too long.
    """

    def __init__(self, model: DecodingModel, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        if not prompts or not all(prompts):
            raise model.error("there is no prompt, or an empty one", "pass at least one token per prompt")
        self._width = max(map(len, prompts))
        self._pads = [self._width - len(prompt) for prompt in prompts]
        self._prompts = [[0] * pad + list(prompt) for pad, prompt in zip(self._pads, prompts, strict=True)]
        self._require_room(0)
        self._cache: Any = None
        self._cached: list[int] | None = None  # answer tokens in the cache after the prompts; None: empty cache
        self._flops = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of all tokens read so far."""
        return self._flops

    def read(self, answer: Sequence[int], last: int = 1) -> Logits:
        """Next-token logits at the last positions of an answer: (contexts, last, vocabulary).

        Raises:
            BackendError: If the answer has become too long for the model, or the model fails.
        """
        import torch

        if not 1 <= last <= len(answer) + 1:
            raise ValueError(f"last is {last}; an answer of {len(answer)} tokens has {len(answer) + 1} positions")
        self._require_room(len(answer))
        positions = self._width + len(answer)
        with self._model.translate_errors(), torch.inference_mode():
            kept = self._roll_back(answer, positions - last)
            rows = [[*prompt, *answer] for prompt in self._prompts]
            logits = self._model.logits(rows, self._pads, self._cache, last)
        if logits.isnan().any():
            raise self._model.error("it returned NaN", "use dtype float32 or bfloat16")
        self._cached = list(answer)
        self._flops += len(rows) * self._model.cost(positions - kept, kept)
        result: Logits = logits.cpu().numpy()
        return result

    def _roll_back(self, answer: Sequence[int], most: int) -> int:
        """Crops the cache to at most ``most`` positions and to the answer's prefix. Returns its length."""
        from transformers import DynamicCache

        cached, self._cached = self._cached, None  # if the model fails from here on, the cache is invalid
        if cached is None:
            self._cache = DynamicCache()  # without a configuration, so no layer drops positions outside a window
            return 0
        pairs = enumerate(zip(cached, answer, strict=False))
        same = next((i for i, (old, new) in pairs if old != new), min(len(cached), len(answer)))
        kept = min(self._width + same, most)
        if surplus := self._width + len(cached) - kept:
            self._cache.crop(-surplus)
        return kept

    def _require_room(self, answer: int) -> None:
        if self._model.limit and self._width + answer > self._model.limit:
            raise self._model.error(
                f"prompt and answer have {self._width + answer} tokens, but it reads {self._model.limit}",
                "use fewer or shorter documents, or a model with a longer context",
            )
