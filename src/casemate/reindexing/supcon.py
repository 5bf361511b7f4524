"""Supervised contrastive learning of what draws topics apart: a small map (``mapping``) or the encoder (``lora``).

RAGFort, Section 4.2, Eq. 1 (Li et al. 2026, AAAI, arXiv 2511.10128); the loss is that of Khosla et al. 2020. With
labels y and unit vectors z of a batch, P(i) the others of the same label, A(i) all others:

    L = sum_i -1/|P(i)| sum_(p in P(i)) log( exp(z_i.z_p / tau) / sum_(a in A(i)) exp(z_i.z_a / tau) )

Deviation: the paper trains "a new encoder" and leaves the query encoder alone; a question's vector and a chunk's would
then lie in two spaces. Here the embedder E is frozen, and a small residual map is trained on its vectors:
z = norm(E + A(E)), A(E) = relu(E W1 + b1) W2 + b2, with W2 = b2 = 0 at the start, so that it starts as E itself. In
mode ``adapter`` a question goes through the same map; in mode ``compatible`` it does not (the paper's text to the
letter). Needs torch, and knows nothing but arrays.
Deviation: mean over the anchors, not sum; an anchor without a partner is skipped (its 1/|P(i)| would be 1/0); what has
no topic is never anchor nor partner, and stays in A(i).
Deviation: two terms hold the map back: ``identity`` times the mean of |z - E|^2, and ``keep`` times the mean of
(q.z - q.E)^2 over harmless questions q, which keeps the order in which chunks are found.
Deviation: the paper gives no temperature, batch, steps or rule to stop; ours are the fields of ``TrainSettings``.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError, DataError, needs
from casemate.reindexing.files import put
from casemate.reindexing.residual import Weights
from casemate.reindexing.topics import NOISE, Labels, silhouette
from casemate.types import Vector

log = logging.getLogger(__name__)

StepDone: TypeAlias = Callable[[int], None]

EXTRA = "casemate[torch]"
PATIENCE, LEAST = 5, 1e-3
"""Training stops after so many looks at which the separation has not grown by that much."""
HELD_OUT = 0.1


@dataclass(frozen=True)
class TrainSettings:
    """How the map is trained.

    Attributes:
        mode: ``adapter``: questions go through the map too. ``compatible``: they do not.
        temperature: tau of the loss.
        classes: Topics in a batch.
        each: Chunks of each of them.
        negatives: Chunks without a topic in a batch.
        questions: Questions in a batch, whose similarities are to be kept.
        identity: Weight of staying near E.
        keep: Weight of keeping the questions' similarities.
        rate: Of AdamW.
        decay: Of AdamW.
        steps: Most.
        look: Steps between two looks at the chunks that were held out.
        seed: Of everything that is drawn.
    """

    mode: Literal["adapter", "compatible"] = "adapter"
    temperature: float = 0.1
    classes: int = 16
    each: int = 8
    negatives: int = 32
    questions: int = 64
    identity: float = 0.1
    keep: float = 1000.0
    rate: float = 1e-3
    decay: float = 1e-2
    steps: int = 1000
    look: int = 50
    seed: int = 7

    def __post_init__(self) -> None:
        if self.mode not in ("adapter", "compatible"):
            raise ConfigError(f"supcon: mode is {self.mode!r}; known: adapter, compatible")
        if not self.temperature > 0 or not self.rate > 0 or min(self.identity, self.keep, self.decay) < 0:
            raise ConfigError(f"supcon: temperature and rate must be above 0, weights at least 0; got {self}")
        if (
            self.classes < 2
            or self.each < 2
            or min(self.negatives, self.questions) < 0
            or min(self.steps, self.look) < 1
        ):
            raise ConfigError(
                f"supcon needs classes and each >= 2, negatives and questions >= 0, steps and look >= 1; got {self}"
            )


@dataclass(frozen=True)
class Trained:
    """What was learnt, and how it came about.

    Attributes:
        weights: Parameters at the step at which the held-out chunks lay furthest apart.
        step: That step.
        steps: How many were taken.
        losses: (step, loss) at each look.
        separations: (step, silhouette of the held-out chunks) at each look; the first is that of E.
    """

    weights: Weights
    step: int
    steps: int
    losses: tuple[tuple[int, float], ...]
    separations: tuple[tuple[int, float], ...]


def supcon_loss(z: Any, labels: Any, temperature: float) -> Any:
    """Eq. 1 as a mean over the anchors that have a partner.

    Args:
        z: Unit vectors of a batch, (B, dim), a tensor.
        labels: (B,), a tensor of integers; ``NOISE`` is nobody's partner.
        temperature: tau.

    Returns:
        A tensor without dimensions, at least 0; 0 where no anchor has a partner.
    """
    with needs(EXTRA):
        import torch
    self_ = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(self_, -torch.inf)
    log_p = logits - torch.logsumexp(logits, dim=1, keepdim=True)  # (B, B)
    partners = (labels[:, None] == labels[None, :]) & (labels != NOISE)[:, None] & ~self_
    count = partners.sum(dim=1)
    anchors = count > 0
    own = log_p.masked_fill(~partners, 0.0).sum(dim=1)
    return -(own[anchors] / count[anchors]).sum() / max(int(anchors.sum()), 1)


class Sampler:
    """Draws batches: P topics x K chunks, and some chunks that have no topic.

    The same step gives the same batch, so a training that was broken off goes on as if it had not been.

    Args:
        labels: Topics of the chunks, (n,).
        settings: How many of each.
    """

    def __init__(self, labels: Labels, settings: TrainSettings) -> None:
        self._settings = settings
        order = np.argsort(labels, kind="stable")
        topics, starts = np.unique(labels[order], return_index=True)
        groups = dict(zip(topics.tolist(), np.split(order, starts[1:]), strict=True))
        self._noise = groups.pop(NOISE, np.empty(0, np.int64))
        self._members = list(groups.values())

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """Positions of the chunks of one batch. None is drawn twice; where there are fewer, all are taken."""
        settings, rng = self._settings, np.random.default_rng((self._settings.seed, step))
        chosen = rng.choice(len(self._members), min(settings.classes, len(self._members)), replace=False)
        wanted = [(self._members[i], settings.each) for i in chosen] + [(self._noise, settings.negatives)]
        return np.concatenate([rng.choice(group, min(count, len(group)), replace=False) for group, count in wanted])


class Learner:
    """What is trained: gives vectors of chunks and questions, by position, that depend on parameters.

    Attributes:
        parameters: What is learnt, tensors by name.
    """

    parameters: dict[str, Any]

    def chunks(self, rows: npt.NDArray[np.int64]) -> Any:
        """Unit vectors of chunks, (B, dim), a tensor that can be differentiated."""
        raise NotImplementedError

    def questions(self, rows: npt.NDArray[np.int64]) -> Any:
        """Of questions, the same."""
        raise NotImplementedError

    def held(self, rows: npt.NDArray[np.int64]) -> Vector:
        """Of chunks, as an array."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """What a checkpoint is for, beyond data and settings."""
        return ""


@dataclass
class _Progress:
    """What a training has come to, in plain numbers."""

    step: int = 0
    best: float = -1.0
    best_step: int = 0
    stale: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    separations: list[tuple[int, float]] = field(default_factory=list)


class Run:
    """A training in the making.

    Args:
        E: Unit vectors of the chunks by the embedder, (n, dim).
        labels: Their topics, (n,), at least two.
        Q: Unit vectors of harmless questions, (m, dim).
        settings: How.
        learner: What is trained.

    Raises:
        DataError: If there are fewer than two topics.
    """

    def __init__(self, E: Vector, labels: Labels, Q: Vector, settings: TrainSettings, learner: Learner) -> None:
        with needs(EXTRA):
            import torch
        if len(np.unique(labels[labels != NOISE])) < 2:
            raise DataError("there are fewer than two topics: nothing can be drawn apart")
        self.torch, self.settings, self.learner = torch, settings, learner
        self.taught, self.out = _split(labels, settings.seed)
        self.sampler = Sampler(labels[self.taught], settings)
        self.E, self.labels, self.Q = E, labels, np.ascontiguousarray(Q, np.float32)
        self.optimiser = torch.optim.AdamW(
            learner.parameters.values(), lr=settings.rate, weight_decay=settings.decay, foreach=False
        )
        self.best = self._copied()
        self.now = _Progress(best=(start := self._separation()), separations=[(0, start)])

    def whole(self, checkpoint: Path | None, progress: StepDone) -> Trained:
        """All of it, from the checkpoint on if there is one."""
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
            progress(self.now.step)
        while not self.finished:
            self.advance(self.settings.look, progress)
            if checkpoint is not None:
                self._save(checkpoint)
        now, weights = self.now, {name: w.numpy().copy() for name, w in self.best.items()}
        return Trained(weights, now.best_step, now.step, tuple(now.losses), tuple(now.separations))

    @property
    def finished(self) -> bool:
        """Whether all steps were taken, or the last ones did no good."""
        return self.now.step >= self.settings.steps or self.now.stale >= PATIENCE

    def advance(self, steps: int, progress: StepDone) -> None:
        """Some steps, and a look at what was held out."""
        now, loss = self.now, 0.0
        end = min(now.step + steps, self.settings.steps)
        for step in range(now.step, end):
            loss = self._step(step)
            progress(1)
        now.step = end
        now.losses.append((end, loss))
        found = self._separation()
        now.separations.append((end, found))
        now.stale = 0 if found > now.best + LEAST else now.stale + 1
        if found > now.best:
            now.best, now.best_step, self.best = found, end, self._copied()

    def _step(self, step: int) -> float:
        loss = self._loss(self.taught[self.sampler.batch(step)], self._asked(step))
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return float(loss.detach())

    def _loss(self, rows: npt.NDArray[np.int64], asked: npt.NDArray[np.int64]) -> Any:
        s, torch = self.settings, self.torch
        z = self.learner.chunks(rows)
        x, y = (torch.from_numpy(a[rows]).to(z.device) for a in (self.E, self.labels))
        loss = supcon_loss(z, y, s.temperature) + s.identity * ((z - x) ** 2).sum(dim=1).mean()
        if len(asked) and s.keep:
            q = torch.from_numpy(self.Q[asked]).to(z.device)
            mapped_q = self.learner.questions(asked) if s.mode == "adapter" else q
            loss = loss + s.keep * ((mapped_q @ z.T - q @ x.T) ** 2).mean()
        return loss

    def _asked(self, step: int) -> npt.NDArray[np.int64]:
        rng = np.random.default_rng((self.settings.seed, step, 1))
        return (
            rng.choice(len(self.Q), min(self.settings.questions, len(self.Q)), replace=False)
            if len(self.Q)
            else np.empty(0, int)
        )

    def _separation(self) -> float:
        return silhouette(self.learner.held(self.out), self.labels[self.out])

    def _copied(self) -> dict[str, Any]:
        return {name: p.detach().cpu().clone() for name, p in self.learner.parameters.items()}

    def _identity(self) -> str:
        """Of data and settings: what a checkpoint belongs to. ``steps`` may be raised."""
        rest = {k: v for k, v in asdict(self.settings).items() if k != "steps"}
        sums = [float(np.abs(a).sum(dtype=np.float64)) for a in (self.E, self.Q, self.labels)]
        return f"{rest} {self.E.shape} {sums}{self.learner.identity}"

    def _save(self, path: Path) -> None:
        """Writes the checkpoint, whole or not at all."""
        state = {
            "identity": self._identity(),
            "now": asdict(self.now),
            "parameters": self._copied(),
            "best": self.best,
            "optimiser": self.optimiser.state_dict(),
        }
        whole = io.BytesIO()
        self.torch.save(state, whole)
        put(path, whole.getvalue())

    def _load(self, path: Path) -> None:
        """Goes on from a checkpoint; one that is damaged or of another training is passed over, and replaced."""
        try:
            state = self.torch.load(path, weights_only=True, map_location="cpu")
            same = state["identity"] == self._identity()
        except Exception as error:  # torch raises nothing narrower
            log.warning("%s is no checkpoint, or damaged (%s): training begins anew", path, type(error).__name__)
            return
        if not same:
            log.warning("%s is the checkpoint of another training, of other chunks or settings: it begins anew", path)
            return
        self.optimiser.load_state_dict(state["optimiser"])
        with self.torch.no_grad():
            for name, p in self.learner.parameters.items():
                p.copy_(state["parameters"][name])
        self.best = state["best"]
        pairs = {n: [(int(a), float(b)) for a, b in state["now"][n]] for n in ("losses", "separations")}
        self.now = _Progress(**(state["now"] | pairs))


def _split(labels: Labels, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions that are taught, and held out: a tenth of each topic; with too few chunks for that, the same."""
    rng = np.random.default_rng((seed, 1 << 21))
    held = [
        rng.choice(members, int(HELD_OUT * len(members)), replace=False)
        for topic in np.unique(labels[labels != NOISE])
        for members in [np.flatnonzero(labels == topic)]
    ]
    out = np.sort(np.concatenate(held)).astype(np.int64)
    if len(np.unique(labels[out])) < 2:
        return np.arange(len(labels)), np.flatnonzero(labels != NOISE)
    return np.setdiff1d(np.arange(len(labels)), out), out
