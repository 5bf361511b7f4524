"""Greedy batch decoding on an accelerator: fixed key-value cache, steps as CUDA graphs.

The decoder of the package supports any transformers model and copies its cache when a row ends. Here each row has a
fixed place in the cache, so that each step has the same shapes and is replayed as one graph. It supports models of the
Qwen2 family (biased projections, RMSNorm, rotary positions, grouped keys, SwiGLU). On a CPU it runs without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from casemate.backends.generators.transformers.batch import BatchDecoder, Decoded, Job, Row

POSITIONS = 4096
"""Positions of a row. Longer prompts are decoded one by one, without a fixed cache."""
SPANS = (512, 1024, 1536, 2048, 3072, POSITIONS)
"""Numbers of attended positions; a step uses the smallest that contains every row."""
READ_AT_ONCE = 49_152
"""Largest number of prompt tokens in one pass, including padding."""
STEPS = 16
"""Steps between two prompt passes while rows are free."""


class FixedCacheDecoder:
    """Greedy batch decoder. Not thread-safe.

    Args:
        model: A Qwen2 model of transformers, on its device.
        size: Size of the vocabulary; logits beyond have no token.
        ends: End-of-sequence tokens.
        rows: Most answers in progress.
        last: Arguments by which the model computes the logits of the last position only.
    """

    def __init__(self, model: Any, size: int, ends: Collection[int], rows: int, last: dict[str, Any]) -> None:
        import torch

        self._model, self._size, self._ends, self._most, self._last = model, size, ends, rows, last
        config, device = model.config, model.device
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._wide = config.hidden_size // self._heads
        self._epsilon = config.rms_norm_eps
        self._cuda = device.type == "cuda"
        theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        turns = 1.0 / theta ** (torch.arange(0, self._wide, 2, device=device).float() / self._wide)
        angles = torch.outer(torch.arange(POSITIONS, device=device).float(), turns)
        angles = torch.cat([angles, angles], dim=-1)
        kind = model.dtype
        self._cos, self._sin = angles.cos().to(kind), angles.sin().to(kind)  # (positions, head)
        with torch.inference_mode():
            self._layers = [_Layer(layer) for layer in model.model.layers]
        shape = (len(self._layers), rows, self._groups, POSITIONS, self._wide)
        self._keys = torch.zeros(shape, dtype=kind, device=device)
        self._values = torch.zeros(shape, dtype=kind, device=device)
        self._every = torch.arange(rows, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self._places = torch.zeros(rows, dtype=torch.long, device=device)
        self._columns = torch.arange(POSITIONS, device=device)
        self._graphs: dict[int, tuple[Any, Any]] = {}
        self._rows: list[Row | None] = [None] * rows

    def decode(self, jobs: Sequence[Job] = (), arrived: Callable[[], Sequence[Job]] = tuple) -> Iterator[Decoded]:
        """Yields answers as they finish, in any order.

        Args:
            jobs: The first prompts.
            arrived: Called before each step; returns further prompts.
        """
        import torch

        waiting, steps = list(jobs), STEPS
        self._rows = [None] * self._most  # rows that an error left
        with torch.inference_mode():
            while True:
                waiting += arrived()
                busy = any(self._rows)
                if not waiting and not busy:
                    return
                if waiting and None in self._rows and (steps >= STEPS or not busy):
                    yield from self._admit(waiting)
                    steps = 0
                if any(self._rows):
                    yield from self._step()
                    steps += 1

    def _admit(self, waiting: list[Job]) -> Iterator[Decoded]:
        """Reads the shortest waiting prompts in one pass. Long prompts wait while short ones arrive."""
        waiting.sort(key=lambda job: len(job.prompt))  # neighbors need little padding
        group: list[Job] = []
        widest, free = 0, self._rows.count(None)
        while waiting and len(group) < free:
            job = waiting[0]
            if len(job.prompt) + job.limit > POSITIONS:
                waiting.pop(0)
                yield from self._alone(job)
                continue
            widest = max(widest, len(job.prompt))
            if group and widest * (len(group) + 1) > READ_AT_ONCE:
                break
            group.append(waiting.pop(0))
        if group:
            yield from self._read(group)

    def _alone(self, job: Job) -> Iterator[Decoded]:
        yield from BatchDecoder(self._model, self._size, self._ends, 1, self._last).decode([job])

    def _read(self, group: Sequence[Job]) -> Iterator[Decoded]:
        """Reads prompts, padded on the right, into free rows."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        device = self._tokens.device
        rows = [i for i, row in enumerate(self._rows) if row is None][: len(group)]
        lengths = [len(job.prompt) for job in group]
        width = max(lengths)
        ids = torch.tensor([[*job.prompt, *[0] * (width - len(job.prompt))] for job in group], device=device)
        index = torch.tensor(rows, device=device)
        cos, sin = self._cos[:width, None], self._sin[:width, None]

        def attend(number: int, q: Any, k: Any, v: Any) -> Any:
            q, k, v = (part.transpose(1, 2) for part in (_turned(q, cos, sin), _turned(k, cos, sin), v))
            self._keys[number, index, :, :width] = k
            self._values[number, index, :, :width] = v
            more = {"enable_gqa": True} if self._heads != self._groups else {}
            return scaled_dot_product_attention(q, k, v, is_causal=True, **more).transpose(1, 2)

        hidden = self._passed(ids, attend)
        ends = torch.tensor(lengths, device=device) - 1
        tokens = self._likeliest(hidden[torch.arange(len(group), device=device), ends])
        for row, job in zip(rows, group, strict=True):
            self._rows[row] = Row(job, len(job.prompt))
        yield from self._append(dict(zip(rows, tokens.tolist(), strict=True)))

    def _step(self) -> Iterator[Decoded]:
        """Decodes one more token for every row."""
        import torch

        active = {i: row for i, row in enumerate(self._rows) if row}
        tokens = [row.answer[-1] if row else 0 for row in self._rows]
        places = [row.position if row else 0 for row in self._rows]
        span = next(s for s in SPANS if s > max(places))
        self._tokens.copy_(torch.tensor(tokens), non_blocking=True)
        self._places.copy_(torch.tensor(places), non_blocking=True)
        if self._cuda:
            if span not in self._graphs:
                self._graphs[span] = self._graph(span)
            graph, chosen = self._graphs[span]
            graph.replay()
        else:
            chosen = self._next(span)
        found = chosen.tolist()
        for row in active.values():
            row.position += 1
        yield from self._append({i: found[i] for i in active})

    def _graph(self, span: int) -> tuple[Any, Any]:
        """A step as a graph, and the tensor of its tokens."""
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._next(span)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chosen = self._next(span)
        return graph, chosen

    def _next(self, span: int) -> Any:
        """The most probable next token of every row, from the static inputs."""
        import torch

        rows, groups = self._most, self._groups
        cos, sin = self._cos[self._places][:, None, None], self._sin[self._places][:, None, None]
        hidden_columns = (self._columns[:span] > self._places[:, None])[:, None, None]  # (rows, 1, 1, span)

        def attend(number: int, q: Any, k: Any, v: Any) -> Any:
            self._keys[number, self._every, :, self._places] = _turned(k, cos, sin)[:, 0]
            self._values[number, self._every, :, self._places] = v[:, 0]
            q = _turned(q, cos, sin).view(rows, groups, self._heads // groups, self._wide) * self._wide**-0.5
            scores = torch.matmul(q, self._keys[number, :, :, :span].transpose(2, 3)).float()
            weights = scores.masked_fill(hidden_columns, -torch.inf).softmax(dim=-1).to(q.dtype)
            return torch.matmul(weights, self._values[number, :, :, :span]).view(rows, 1, self._heads, self._wide)

        return self._likeliest(self._passed(self._tokens[:, None], attend)[:, 0])

    def _passed(self, ids: Any, attend: Callable[[int, Any, Any, Any], Any]) -> Any:
        """Hidden states after all layers, (rows, tokens, hidden)."""
        from torch.nn.functional import linear, silu

        hidden = self._model.model.embed_tokens(ids)
        count, width = ids.shape
        for number, layer in enumerate(self._layers):
            mixed = linear(self._normed(hidden, layer.before), layer.attention, layer.bias)
            mixed = mixed.view(count, width, self._heads + 2 * self._groups, self._wide)
            q, k, v = mixed.split([self._heads, self._groups, self._groups], dim=2)
            found = attend(number, q, k, v).reshape(count, width, self._heads * self._wide)
            hidden = hidden + linear(found, layer.out)
            gate, up = linear(self._normed(hidden, layer.after), layer.inside).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        return hidden

    def _normed(self, hidden: Any, weight: Any) -> Any:
        from torch.nn.functional import rms_norm

        return rms_norm(hidden, (hidden.shape[-1],), weight, self._epsilon)

    def _likeliest(self, hidden: Any) -> Any:
        logits = self._model.lm_head(self._normed(hidden, self._model.model.norm.weight))
        return logits[:, : self._size].float().argmax(dim=-1)

    def _append(self, tokens: dict[int, int]) -> Iterator[Decoded]:
        """Appends a token to each row; a finished row becomes free."""
        for i, token in tokens.items():
            row = self._rows[i]
            assert row
            if row.add(token, self._ends):
                self._rows[i] = None
                yield row.job.number, row.answer


class _Layer:
    """Weights of one layer; projections with the same input are one matrix."""

    def __init__(self, layer: Any) -> None:
        import torch

        parts = [getattr(layer.self_attn, f"{name}_proj") for name in "qkv"]
        self.attention = torch.cat([part.weight for part in parts])
        self.bias = torch.cat([part.bias for part in parts]) if parts[0].bias is not None else None
        self.out = layer.self_attn.o_proj.weight
        self.inside = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        self.down = layer.mlp.down_proj.weight
        self.before, self.after = layer.input_layernorm.weight, layer.post_attention_layernorm.weight


def _turned(vectors: Any, cos: Any, sin: Any) -> Any:
    """Applies rotary positions."""
    import torch

    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos + torch.cat([-second, first], dim=-1) * sin
