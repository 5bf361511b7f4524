"""Greedy decoding of many prompts at once, with shared prefixes and continuous refill.

A step of a model costs about as much for one answer as for sixteen, because it is bound by reading the weights. Rows
of finished answers are therefore replaced at once, not when the whole batch is finished. Prompts are ordered by their
tokens, so that neighbors share a prefix (the system message, often the documents); it is read once.

In the cache, a row is: its prompt's shared prefix, padding, the rest of the prompt, the answer. The attention mask
excludes the padding; position ids do not count it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Decoded: TypeAlias = tuple[int, list[int]]  # number of a prompt, and the tokens of its answer

REFILL = 4  # a quarter of the batch is refilled at once: a prompt read alone costs more than one read among others
LEAST_PREFIX = 16  # shorter shared prefixes are not worth a pass of their own


class NaNError(ValueError):
    """The model returned NaN."""


class Job(NamedTuple):
    """One prompt: its number, its tokens (at least one), and the largest length of its answer (at least 1)."""

    number: int
    prompt: Sequence[int]
    limit: int


@dataclass(slots=True)
class Row:
    """An answer in progress; `position` is the position id of its next token."""

    job: Job
    position: int
    answer: list[int] = field(default_factory=list)

    def add(self, token: int, ends: Collection[int]) -> bool:
        """Appends a token unless it ends the answer; returns whether the answer is finished."""
        if token not in ends:
            self.answer.append(token)
        return token in ends or len(self.answer) == self.job.limit


class BatchDecoder:
    """Decodes greedily, many answers at once. Not thread-safe.

    Args:
        model: A causal language model of transformers, on its device.
        size: Size of the vocabulary; logits beyond have no token.
        ends: End-of-sequence tokens.
        rows: Most answers in progress.
        last: Arguments by which the model computes the logits of the last position only.
    """

    def __init__(self, model: Any, size: int, ends: Collection[int], rows: int, last: dict[str, Any]) -> None:
        self._model, self._size, self._ends, self._most, self._last = model, size, ends, rows, last
        self._rows: list[Row] = []
        self._cache: Any = None
        self._mask: Any = None  # (rows, positions); 0: padding

    def decode(self, jobs: Sequence[Job] = (), arrived: Callable[[], Sequence[Job]] = tuple) -> Iterator[Decoded]:
        """Yields answers as they finish, in any order. Calls ``arrived`` before each step for further prompts.

        Raises:
            NaNError: If the model returns NaN.
        """
        import torch

        waiting: list[Job] = []  # the next one is last
        with torch.inference_mode():
            while (new := [*jobs, *arrived()]) or waiting or self._rows:
                jobs, waiting = (), [*sorted(new, key=lambda job: list(job.prompt), reverse=True), *waiting]
                free = self._most - len(self._rows)
                if waiting and (free * REFILL >= self._most or not self._rows):
                    yield from self._admit([waiting.pop() for _ in range(min(free, len(waiting)))])
                if self._rows:
                    yield from self._step()

    def _admit(self, jobs: Sequence[Job]) -> Iterator[Decoded]:
        for group in by_prefix(jobs):
            logits, cache, mask = self._read([job.prompt for job in group])
            rows = [Row(job, len(job.prompt)) for job in group]
            self._merge(rows, cache, mask)
            yield from self._append(rows, logits)

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any, Any]:
        """Logits after each prompt, key-value cache and mask."""
        import torch
        from transformers import DynamicCache

        device, shared = self._model.device, _shared(prompts)
        shared = shared if len(prompts) > 1 and shared >= LEAST_PREFIX else 0
        cache = DynamicCache()
        if shared:
            self._model(
                input_ids=torch.tensor([prompts[0][:shared]], device=device), past_key_values=cache, **self._last
            )
            cache.batch_repeat_interleave(len(prompts))
        rests = [prompt[shared:] for prompt in prompts]
        width = max(map(len, rests))
        pads = torch.tensor([width - len(rest) for rest in rests], device=device)[:, None]
        inputs = torch.tensor([[0] * (width - len(rest)) + list(rest) for rest in rests], device=device)
        places = torch.arange(width, device=device)[None] - pads  # (rows, width)
        mask = torch.cat([torch.ones(len(rests), shared, device=device), places >= 0], dim=1).long()
        out = self._model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=places.clamp(min=0) + shared,
            past_key_values=cache,
            use_cache=True,
            **self._last,
        )
        return out.logits[:, -1, : self._size].float(), cache, mask

    def _merge(self, rows: Sequence[Row], cache: Any, mask: Any) -> None:
        """Adds rows to the batch: the shorter cache is padded on the left."""
        import torch

        self._rows = [*self._rows, *rows]
        if self._cache is None:
            self._cache, self._mask = cache, mask
            return
        width = max(mask.shape[1], self._mask.shape[1])
        self._mask = torch.cat([_padded(m, width, 1) for m in (self._mask, mask)])
        for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
            ours.keys = torch.cat([_padded(k, width, 2) for k in (ours.keys, theirs.keys)])
            ours.values = torch.cat([_padded(v, width, 2) for v in (ours.values, theirs.values)])

    def _step(self) -> Iterator[Decoded]:
        """One more token for every row."""
        import torch

        device = self._model.device
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._rows), 1)], dim=1)
        out = self._model(
            input_ids=torch.tensor([[row.answer[-1]] for row in self._rows], device=device),
            attention_mask=self._mask,
            position_ids=torch.tensor([[row.position] for row in self._rows], device=device),
            past_key_values=self._cache,
            use_cache=True,
        )
        for row in self._rows:
            row.position += 1
        yield from self._append(self._rows, out.logits[:, -1, : self._size].float())

    def _append(self, rows: Sequence[Row], logits: Any) -> Iterator[Decoded]:
        """Appends the likeliest token to each row, and removes the rows that are finished."""
        if logits.isnan().any():
            raise NaNError
        finished = set()
        for row, token in zip(rows, logits.argmax(dim=-1).tolist(), strict=True):
            if row.add(token, self._ends):
                finished.add(row.job.number)
                yield row.job.number, row.answer
        if finished:
            self._remove(finished)

    def _remove(self, numbers: Collection[int]) -> None:
        """Removes rows, and the positions that are padding in all others."""
        import torch

        kept = [i for i, row in enumerate(self._rows) if row.job.number not in numbers]
        self._rows = [self._rows[i] for i in kept]
        if not kept:
            self._cache = self._mask = None
            return
        index = torch.tensor(kept, device=self._mask.device)
        mask = self._mask[index]
        start = int(mask.any(dim=0).int().argmax())
        self._mask = mask[:, start:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[index][:, :, start:], layer.values[index][:, :, start:]


def by_prefix(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Splits ordered prompts into groups whose members share at least half of each prompt, or takes all as one group.

    >>> jobs = [Job(0, [1, 2, 3, 4], 1), Job(1, [1, 2, 3, 5], 1), Job(2, [7, 8, 9, 9], 1), Job(3, [7, 8, 9, 0], 1)]
    >>> [[job.number for job in group] for group in by_prefix(jobs)]
    [[0, 1], [2, 3]]
    """
    groups: list[list[Job]] = []
    for job in jobs:
        if groups and 2 * _shared([groups[-1][0].prompt, job.prompt]) >= max(
            len(job.prompt), len(groups[-1][0].prompt)
        ):
            groups[-1].append(job)
        else:
            groups.append([job])
    alone = [group[0] for group in groups if len(group) == 1]
    yield from (group for group in groups if len(group) > 1)
    if alone:
        yield alone


def _shared(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix, shorter than every prompt: each has a last token of its own to read."""
    most = min(map(len, prompts)) - 1
    first = prompts[0]
    return next((i for i in range(most) if any(prompt[i] != first[i] for prompt in prompts)), most)


def _padded(values: Any, width: int, dim: int) -> Any:
    """Zeros before the values along a dimension, up to a width."""
    import torch

    missing = width - values.shape[dim]
    if not missing:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values.new_zeros(shape), values], dim=dim)
