"""One answer behind one or several prompts, with a cache of keys and values that can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from casemate.errors import BackendError
from casemate.protocols import Logits, Reading

NAME = "transformers"


@dataclass(frozen=True, eq=False)
class Reader:
    """A model, as a reading needs it.

    Attributes:
        model: A causal language model of transformers, on its device.
        name: What the operator calls it.
        size: Tokens of the vocabulary; logits beyond have no token.
        limit: Most tokens that it reads.
        cost: Operations that reading so many tokens takes after so many others.
        failures: Turns what torch raises into BackendError.
        skips: Whether the model can be told for how many places logits are wanted.
    """

    model: Any
    name: str
    size: int
    limit: int | None
    cost: Callable[[int, int], float]
    failures: Callable[[], AbstractContextManager[None]]
    skips: bool = False

    def logits(self, rows: list[list[int]], pads: list[int], cache: Any, last: int) -> Any:
        """Logits of the last places, in float32, of rows of which the cache already holds the beginning.

        Args:
            rows: All tokens, (contexts, places).
            pads: How many in front of each row are padding.
            cache: Keys and values; what is new is added to them.
            last: How many places.
        """
        import torch

        kept = cache.get_seq_length()
        more: dict[str, Any] = {}
        if any(pads):
            place = torch.arange(len(rows[0]), device=self.model.device)
            shift = torch.tensor(pads, device=self.model.device)[:, None]
            more["attention_mask"] = (place[None] >= shift).long()  # (contexts, places)
            more["position_ids"] = (place[None] - shift).clamp(min=0)[:, kept:]
        if self.skips:
            more["logits_to_keep"] = last  # a prompt's other logits may take gigabytes
        given = torch.tensor([row[kept:] for row in rows], device=self.model.device)  # (contexts, new)
        out = self.model(input_ids=given, past_key_values=cache, use_cache=True, **more)
        return out.logits[:, -last:, : self.size].float()

    def error(self, what: str, remedy: str) -> BackendError:
        """The error that names the model."""
        return BackendError(f"the model {self.name!r}: {what}; {remedy}", backend=NAME, retryable=False)


class CachedReading(Reading):
    """What a model expects next. Not to be shared by threads.

    Prompts of unequal length are padded in front, and what is padded is seen by nobody.

    Args:
        reader: The model.
        prompts: Tokens of each prompt, at least one each.

    Raises:
        BackendError: If a prompt is empty or too long.
    """

    def __init__(self, reader: Reader, prompts: Sequence[Sequence[int]]) -> None:
        self._reader = reader
        if not prompts or not all(prompts):
            raise reader.error("there is no prompt, or an empty one", "give at least one token")
        self._width = max(map(len, prompts))
        self._pads = [self._width - len(prompt) for prompt in prompts]
        self._prompts = [[0] * pad + list(prompt) for pad, prompt in zip(self._pads, prompts, strict=True)]
        self._require_room(0)
        self._cache: Any = None
        self._held: list[int] | None = None  # the answer's tokens in the cache, behind the prompts; None: nothing is
        self._flops = 0.0

    @property
    def flops(self) -> float:
        """Floating-point operations of all that was read so far."""
        return self._flops

    def read(self, answer: Sequence[int], last: int = 1) -> Logits:
        """Logits of the token after each of the last places of an answer: (contexts, last, vocabulary).

        Raises:
            BackendError: If the answer has become too long for the model, or the model fails.
        """
        import torch

        if not 1 <= last <= len(answer) + 1:
            raise ValueError(f"last is {last}; an answer of {len(answer)} tokens has {len(answer) + 1} places")
        self._require_room(len(answer))
        places = self._width + len(answer)
        with self._reader.failures(), torch.inference_mode():
            kept = self._rewound(answer, places - last)
            rows = [[*prompt, *answer] for prompt in self._prompts]
            logits = self._reader.logits(rows, self._pads, self._cache, last)
        if logits.isnan().any():
            raise self._reader.error("it put out what is no number", "take dtype float32 or bfloat16")
        self._held = list(answer)
        self._flops += len(rows) * self._reader.cost(places - kept, kept)
        found: Logits = logits.cpu().numpy()
        return found

    def _rewound(self, answer: Sequence[int], most: int) -> int:
        """Takes back what the cache holds beyond ``most`` places or beyond the answer; returns what it still holds."""
        from transformers import DynamicCache

        held, self._held = self._held, None  # should the model fail from here on, the cache may not be relied on
        if held is None:
            self._cache = DynamicCache()  # without a configuration: no layer forgets what has left a window
            return 0
        pairs = enumerate(zip(held, answer, strict=False))
        same = next((i for i, (old, new) in pairs if old != new), min(len(held), len(answer)))
        kept = min(self._width + same, most)
        if surplus := self._width + len(held) - kept:
            self._cache.crop(-surplus)
        return kept

    def _require_room(self, answer: int) -> None:
        if self._reader.limit and self._width + answer > self._reader.limit:
            raise self._reader.error(
                f"prompt and answer have {self._width + answer} tokens, and it reads {self._reader.limit}",
                "give it fewer or shorter documents, or take a model that reads more",
            )
