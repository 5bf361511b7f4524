"""Training of one network: stages, optimizers, progress, and resumption.

Matrices are trained by Muon (Jordan et al. 2024: orthogonalized momentum), other weights by Adam. The result is the
running mean of the weights. The same seed, steps and machine give the same network, with or without interruptions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, pad

from benchmarks.models.rows import GATED, Batch, Rows

WARM = 60
"""Warm-up steps of the learning rates."""
AVERAGED = 0.998
MOMENTUM, DECAY = 0.95, 0.01
FADE = 0.985
"""Decay of the running share of correct answers, per answer."""
PORTION = 256
"""Logits are computed for a multiple of this number of tokens: oneDNN caches a program for each size, and would use
more and more memory.
"""
POLYNOMIAL = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a training.

    Attributes:
        steps: Number of steps.
        tokens: Approximate tokens per step.
        muon: Learning rate of matrices in stages 0 and 1.
        late: Learning rate of matrices in later stages; with the higher rate, long copies have errors.
        adam: Learning rate of other weights.
        stage: The first stage, 0 to 3.
        until: Shares of the steps at which stages 0, 1 and 2 end at the latest.
        gates: Shares of correct answers at which they end.
        fade: Final share of the steps, over which the rates decay to .03 of their value.
        seed: Seed of weights and data.
        device: Device name of torch.
        compiled: Whether torch compiles the network first: 1.3 to 1.8 times as fast, after one or two minutes.
    """

    steps: int
    tokens: int = 4096
    muon: float = 0.02
    late: float = 0.008
    adam: float = 3e-3
    stage: int = 0
    until: tuple[float, float, float] = (0.05, 0.15, 0.3)
    gates: tuple[float, float, float] = (0.93, 0.95, 0.95)
    fade: float = 0.6
    seed: int = 0
    device: str = "cpu"
    compiled: bool = False


DRAFT = Plan(17000)
"""70 million tokens: 75 minutes on one core for the released pair."""
REFERENCE = Plan(8000, tokens=8192, muon=0.003, late=0.003, adam=6e-4, stage=3, fade=1.0, seed=1)
"""Starts from the final draft with a low rate; at a higher rate the result was worse than the initial network."""


class Muon(torch.optim.Optimizer):
    """Optimizer for matrices with orthogonalized momentum.

    Args:
        matrices: Parameters.
        lr: Learning rate.
    """

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Performs one step."""
        for group in self.param_groups:
            for weights in group["params"]:
                held = self.state[weights]
                momentum = held.setdefault("momentum", torch.zeros_like(weights))
                momentum.lerp_(weights.grad, 1 - MOMENTUM)
                stretch = max(1.0, weights.shape[0] / weights.shape[1]) ** 0.5
                step = orthogonal(weights.grad.lerp(momentum, MOMENTUM))
                weights.mul_(1 - group["lr"] * DECAY).add_(step, alpha=-group["lr"] * stretch)


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """A matrix with the same singular vectors, and singular values near 1 (Newton-Schulz iteration)."""
    a, b, c = POLYNOMIAL
    tall = matrix.shape[0] > matrix.shape[1]
    X = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.T if tall else X


@dataclass
class Progress:
    """Progress of a training.

    Attributes:
        step: Completed steps.
        stage: Stage of the curriculum.
        tokens: Processed tokens.
        right: By kind of question, the running share of exact answers, and their number.
    """

    step: int = 0
    stage: int = 0
    tokens: int = 0
    right: dict[str, tuple[float, int]] = field(default_factory=dict)

    def told(self, kind: str, right: bool) -> None:
        """Records whether an answer was exact."""
        share, count = self.right.get(kind, (0.0, 0))
        self.right[kind] = (share * FADE + right * (1 - FADE), count + 1)

    @property
    def mastered(self) -> float:
        """Mean share of exact answers in the kinds that gate the next stage; 0 with too few answers."""
        kinds = GATED if self.stage else ("rep", "repdoc", "cont")
        found = [self.right.get(kind, (0.0, 0)) for kind in kinds]
        few = any(count < 100 for _, count in found)
        return 0.0 if few else sum(share for share, _ in found) / len(found)


class Training:
    """Training of one network, with its state in a file for resumption.

    Args:
        model: The network as it begins; on the cpu.
        tokenizer: The pair's.
        plan: How.
        file: Where the state is kept.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, plan: Plan, file: Path) -> None:
        self.model, self.plan, self.file = model.to(plan.device), plan, file
        self.rows = Rows(tokenizer, plan.seed)
        self.progress = Progress(stage=plan.stage)
        named = list(model.named_parameters())
        matrix = [p.ndim == 2 and "embed" not in name for name, p in named]
        self.muon = Muon([p for (_, p), m in zip(named, matrix, strict=True) if m], plan.muon)
        rest = [p for (_, p), m in zip(named, matrix, strict=True) if not m]
        self.adam = torch.optim.AdamW(rest, lr=plan.adam, betas=(0.9, 0.98), weight_decay=0.0)
        self.mean = {name: p.detach().clone() for name, p in named}
        self._body = torch.compile(model.model, dynamic=False) if plan.compiled else model.model
        if file.exists():
            self._go_on(torch.load(file, map_location=plan.device, weights_only=True))

    def run(self, every_s: float = 20.0) -> Any:
        """Trains to the end of the plan, and returns the network with the mean weights.

        Args:
            every_s: Seconds between progress lines; the state is saved every four intervals.
        """
        began, shown, saved, first = time.monotonic(), 0.0, 0.0, self.progress.step
        while self.progress.step < self.plan.steps:
            loss = self.step()
            now = time.monotonic() - began
            if now - shown > every_s:
                shown = now
                self._show(loss, (self.plan.steps - self.progress.step) * now / (self.progress.step - first))
            if now - saved > 4 * every_s:
                saved = now
                self.save()
        self.save()
        self.model.load_state_dict(self.mean, strict=False)
        return self.model

    def step(self) -> float:
        """Performs one step; returns its loss."""
        plan, progress = self.plan, self.progress
        rate = self._rate()
        self.adam.param_groups[0]["lr"] = plan.adam * rate
        self.muon.param_groups[0]["lr"] = (plan.muon if progress.stage < 2 else plan.late) * rate
        batch = self.rows.batch(progress.stage, plan.tokens)
        loss, right = self._loss(batch)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.muon.step()
        progress.step += 1
        progress.tokens += int((batch.tokens > 0).sum())
        weight = 1 - min(AVERAGED, progress.step / (progress.step + 10))
        for name, p in self.model.named_parameters():
            self.mean[name].lerp_(p.detach(), weight)
        for kind, well in zip(batch.kinds, right, strict=True):
            if kind:
                progress.told(kind, well)
        self._advance()
        return float(loss.detach())

    def save(self) -> None:
        """Writes the state atomically."""
        kept = {
            "plan": self._facts(),
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "mean": self.mean,
            "adam": self.adam.state_dict(),
            "muon": self.muon.state_dict(),
            "rows": self.rows.state(),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".part")
        torch.save(kept, beside)
        os.replace(beside, self.file)

    def _go_on(self, kept: dict[str, Any]) -> None:
        if kept["plan"] != self._facts():
            raise SystemExit(f"{self.file} is of another plan ({kept['plan']}); take another folder")
        self.progress = Progress(**kept["progress"])
        self.model.load_state_dict(kept["model"])
        self.mean = kept["mean"]
        self.adam.load_state_dict(kept["adam"])
        self.muon.load_state_dict(kept["muon"])
        self.rows.go_on(kept["rows"])

    def _facts(self) -> str:
        return json.dumps({k: v for k, v in asdict(self.plan).items() if k not in {"device", "compiled"}})

    def _rate(self) -> float:
        """Factor of the learning rates: warm-up, constant, decay."""
        done = self.progress.step / self.plan.steps
        falling = max(0.03, (1 - done) / self.plan.fade) if done > 1 - self.plan.fade else 1.0
        return min(1.0, (self.progress.step + 1) / WARM) * min(1.0, falling)

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, list[bool]]:
        """Weighted mean loss over tokens, and for each answer whether all its tokens were the most probable ones."""
        device = self.plan.device
        with self._half():
            out = self._body(
                input_ids=batch.tokens.to(device),
                position_ids=batch.places.to(device),
                attention_mask=batch.seen.to(device),
                use_cache=False,
            )
            weights = batch.weights[:, 1:].to(device)
            chosen = weights > 0
            hidden = out.last_hidden_state[:, :-1][chosen]
            padded = pad(hidden, (0, 0, 0, -len(hidden) % PORTION))
            logits = self.model.lm_head(padded)[: len(hidden)].float()  # (chosen, vocabulary)
        wanted, weight = batch.tokens[:, 1:].to(device)[chosen], weights[chosen]
        each = cross_entropy(logits, wanted, reduction="none")
        of = batch.answers[:, 1:].to(device)[chosen]
        right = torch.ones(len(batch.kinds), device=device)
        said = of >= 0
        right.scatter_reduce_(0, of[said], (logits.argmax(-1) == wanted)[said].float(), "amin")
        return (each * weight).sum() / weight.sum(), right.bool().tolist()

    def _half(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.plan.device.split(":")[0], dtype=torch.bfloat16)

    def _advance(self) -> None:
        progress, plan = self.progress, self.plan
        if progress.stage == 3:
            return
        late = progress.step >= plan.until[progress.stage] * plan.steps
        if late or progress.mastered > plan.gates[progress.stage]:
            progress.stage += 1
            progress.right = {}

    def _show(self, loss: float, left_s: float) -> None:
        shares = {kind: round(share, 2) for kind, (share, count) in self.progress.right.items() if count > 30}
        facts = {"step": self.progress.step, "of": self.plan.steps, "stage": self.progress.stage}
        facts |= {"Mtok": round(self.progress.tokens / 1e6, 2), "loss": round(loss, 3), "right": shares}
        print(json.dumps(facts | {"minutes_left": round(left_s / 60, 1)}), file=sys.stderr, flush=True)
