"""Supervised contrastive (SupCon) training that separates topics: of a residual map here, of the encoder in ``lora``.

RAGFort, Section 4.2, Eq. 1 (Li et al. 2026, AAAI, arXiv 2511.10128), with the loss of Khosla et al. 2020. For labels y
and unit vectors z of a batch, P(i) are the others of the same label and A(i) all others:

    L = sum_i -1/|P(i)| sum_(p in P(i)) log( exp(z_i.z_p / tau) / sum_(a in A(i)) exp(z_i.z_a / tau) )

Deviation: the paper trains "a new encoder" and leaves the query encoder unchanged, so questions and chunks would lie in
two spaces. Here the embedder E is frozen, and a small residual map is trained on its vectors: z = norm(E + A(E)),
A(E) = relu(E W1 + b1) W2 + b2. W2 = b2 = 0 at the start, so the map starts as the identity. Mode ``adapter`` maps
questions too; mode ``compatible`` does not (the literal reading of the paper).
Deviation: mean over the anchors, not sum. An anchor without a partner is skipped (its 1/|P(i)| would be 1/0). A chunk
without a topic is neither anchor nor partner, but stays in A(i).
Deviation: two regularizers: ``identity_weight`` times the mean of |z - E|^2, and ``keep_weight`` times the mean of
(q.z - q.E)^2 over benign questions q, which preserves the ranking of chunks.
Deviation: the paper states no temperature, batch size, steps or stopping rule; ours: ``TrainSettings``.

Needs torch.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError, DataError, needs, require_range
from casemate.maths.clustering import NOISE, Labels, silhouette
from casemate.reindexing.space import Weights, apply_map
from casemate.runtime.files import write_atomically
from casemate.types import Vector

log = logging.getLogger(__name__)

StepCallback: TypeAlias = Callable[[int], None]  # receives the number of steps just completed

EXTRA = "casemate[torch]"
PATIENCE, MIN_GAIN = 5, 1e-3
"""Early stopping: after ``PATIENCE`` evaluations without a gain of ``MIN_GAIN`` in separation."""
HELD_OUT = 0.1  # share of each topic held out for evaluation


@dataclass(frozen=True)
class TrainSettings:
    """Hyperparameters of SupCon training.

    Attributes:
        mode: ``adapter``: questions are mapped too. ``compatible``: they are not.
        temperature: tau of the loss.
        classes: Topics per batch.
        per_class: Chunks per topic in a batch.
        negatives: Chunks without a topic per batch.
        questions: Questions per batch for the ``keep_weight`` term.
        identity_weight: Weight of the distance to E.
        keep_weight: Weight of the change in the questions' similarities.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        steps: Maximum.
        eval_interval: Steps between two evaluations on the held-out chunks.
        seed: Of all random draws.
    """

    mode: Literal["adapter", "compatible"] = "adapter"
    temperature: float = 0.1
    classes: int = 16
    per_class: int = 8
    negatives: int = 32
    questions: int = 64
    identity_weight: float = 0.1
    keep_weight: float = 1000.0
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    steps: int = 1000
    eval_interval: int = 50
    seed: int = 7

    def __post_init__(self) -> None:
        if self.mode not in ("adapter", "compatible"):
            raise ConfigError(f"supcon: mode is {self.mode!r}; known: adapter, compatible")
        require_range("supcon", self, "temperature learning_rate", above=0)
        require_range("supcon", self, "identity_weight keep_weight weight_decay negatives questions", at_least=0)
        require_range("supcon", self, "classes per_class", at_least=2)
        require_range("supcon", self, "steps eval_interval", at_least=1)


@dataclass(frozen=True)
class TrainingResult:
    """The trained parameters and the training curve.

    Attributes:
        weights: Parameters at the best step: the one with the highest silhouette of the held-out chunks.
        step: The best step.
        steps: Number of steps run.
        losses: (step, loss) at each evaluation.
        separations: (step, silhouette of the held-out chunks) at each evaluation; the first is that of E.
    """

    weights: Weights
    step: int
    steps: int
    losses: tuple[tuple[int, float], ...]
    separations: tuple[tuple[int, float], ...]


def supcon_loss(z: Any, labels: Any, temperature: float) -> Any:
    """Eq. 1 as a mean over the anchors with a partner: a scalar tensor, at least 0; 0 if no anchor has one.

    Args:
        z: Unit vectors of a batch, (B, dim), a tensor.
        labels: (B,), an integer tensor; ``NOISE`` has no partners.
        temperature: tau.
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
    """Draws P x K batches: P topics with K chunks each, plus chunks without a topic.

    A batch depends on seed and step only, so a resumed training sees the same batches.
    """

    def __init__(self, labels: Labels, settings: TrainSettings) -> None:
        self._settings = settings
        order = np.argsort(labels, kind="stable")
        topics, starts = np.unique(labels[order], return_index=True)
        groups = dict(zip(topics.tolist(), np.split(order, starts[1:]), strict=True))
        self._noise = groups.pop(NOISE, np.empty(0, np.int64))
        self._members = list(groups.values())

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """Returns the positions of one batch, drawn without replacement; a smaller group is used whole."""
        settings, rng = self._settings, np.random.default_rng((self._settings.seed, step))
        chosen = rng.choice(len(self._members), min(settings.classes, len(self._members)), replace=False)
        wanted = [(self._members[i], settings.per_class) for i in chosen] + [(self._noise, settings.negatives)]
        return np.concatenate([rng.choice(group, min(count, len(group)), replace=False) for group, count in wanted])


class Learner:
    """The trained model: computes vectors of chunks and questions, given by position. Its parameters are trained."""

    parameters: dict[str, Any]

    def chunks(self, rows: npt.NDArray[np.int64]) -> Any:
        """Returns unit vectors of chunks, (B, dim), as a differentiable tensor."""
        raise NotImplementedError

    def questions(self, rows: npt.NDArray[np.int64]) -> Any:
        """Returns unit vectors of questions, (B, dim), as a differentiable tensor."""
        raise NotImplementedError

    def evaluate(self, rows: npt.NDArray[np.int64]) -> Vector:
        """Returns unit vectors of chunks, (B, dim), as an array."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """Identifies the model in a checkpoint, beyond data and settings."""
        return ""


@dataclass
class _Progress:
    """The state of a training as plain numbers."""

    step: int = 0
    best: float = -1.0
    best_step: int = 0
    stale: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    separations: list[tuple[int, float]] = field(default_factory=list)


class TrainingRun:
    """One training run on the arguments of ``train_map``, resumable from a checkpoint.

    Raises:
        DataError: If there are fewer than two topics.
    """

    def __init__(self, E: Vector, labels: Labels, Q: Vector, settings: TrainSettings, learner: Learner) -> None:
        with needs(EXTRA):
            import torch
        if len(np.unique(labels[labels != NOISE])) < 2:
            raise DataError("training needs at least two topics")
        self.torch, self.settings, self.learner = torch, settings, learner
        self.train_rows, self.eval_rows = _split(labels, settings.seed)
        self.sampler = Sampler(labels[self.train_rows], settings)
        self.E, self.labels, self.Q = E, labels, np.ascontiguousarray(Q, np.float32)
        self.optimizer = torch.optim.AdamW(
            learner.parameters.values(), lr=settings.learning_rate, weight_decay=settings.weight_decay, foreach=False
        )
        self.best = self._parameters()
        self.now = _Progress(best=(start := self._separation()), separations=[(0, start)])

    def run(self, checkpoint: Path | None, progress: StepCallback) -> TrainingResult:
        """Trains to the end, from the checkpoint if there is one."""
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
            progress(self.now.step)
        while not self.finished:
            self.advance(self.settings.eval_interval, progress)
            if checkpoint is not None:
                self._save(checkpoint)
        now, weights = self.now, {name: w.numpy().copy() for name, w in self.best.items()}
        return TrainingResult(weights, now.best_step, now.step, tuple(now.losses), tuple(now.separations))

    @property
    def finished(self) -> bool:
        """Whether all steps were run, or early stopping applies."""
        return self.now.step >= self.settings.steps or self.now.stale >= PATIENCE

    def advance(self, steps: int, progress: StepCallback) -> None:
        """Runs some steps, then evaluates on the held-out chunks."""
        now, loss = self.now, 0.0
        end = min(now.step + steps, self.settings.steps)
        for step in range(now.step, end):
            loss = self._step(step)
            progress(1)
        now.step = end
        now.losses.append((end, loss))
        separation = self._separation()
        now.separations.append((end, separation))
        now.stale = 0 if separation > now.best + MIN_GAIN else now.stale + 1
        if separation > now.best:
            now.best, now.best_step, self.best = separation, end, self._parameters()

    def _step(self, step: int) -> float:
        loss = self._loss(self.train_rows[self.sampler.batch(step)], self._question_rows(step))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def _loss(self, rows: npt.NDArray[np.int64], question_rows: npt.NDArray[np.int64]) -> Any:
        s, torch = self.settings, self.torch
        z = self.learner.chunks(rows)
        x, y = (torch.from_numpy(a[rows]).to(z.device) for a in (self.E, self.labels))
        loss = supcon_loss(z, y, s.temperature) + s.identity_weight * ((z - x) ** 2).sum(dim=1).mean()
        if len(question_rows) and s.keep_weight:
            q = torch.from_numpy(self.Q[question_rows]).to(z.device)
            mapped_q = self.learner.questions(question_rows) if s.mode == "adapter" else q
            loss = loss + s.keep_weight * ((mapped_q @ z.T - q @ x.T) ** 2).mean()
        return loss

    def _question_rows(self, step: int) -> npt.NDArray[np.int64]:
        if not len(self.Q):
            return np.empty(0, np.int64)
        rng = np.random.default_rng((self.settings.seed, step, 1))
        return rng.choice(len(self.Q), min(self.settings.questions, len(self.Q)), replace=False)

    def _separation(self) -> float:
        return silhouette(self.learner.evaluate(self.eval_rows), self.labels[self.eval_rows])

    def _parameters(self) -> dict[str, Any]:
        return {name: p.detach().cpu().clone() for name, p in self.learner.parameters.items()}

    def _identity(self) -> str:
        """Identifies data, settings and model in a checkpoint. ``steps`` is left out, so that it can be raised."""
        rest = {k: v for k, v in asdict(self.settings).items() if k != "steps"}
        sums = [float(np.abs(a).sum(dtype=np.float64)) for a in (self.E, self.Q, self.labels)]
        return f"{rest} {self.E.shape} {sums}{self.learner.identity}"

    def _save(self, path: Path) -> None:
        state = {
            "identity": self._identity(),
            "now": asdict(self.now),
            "parameters": self._parameters(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
        }
        whole = io.BytesIO()
        self.torch.save(state, whole)
        write_atomically(path, whole.getvalue())

    def _load(self, path: Path) -> None:
        """Resumes from a checkpoint. A damaged one, or one of another training, is ignored and later replaced."""
        try:
            state = self.torch.load(path, weights_only=True, map_location="cpu")
            same = state["identity"] == self._identity()
        except Exception as error:  # torch raises nothing narrower
            log.warning(
                "%s is damaged or not a checkpoint (%s): training starts from scratch", path, type(error).__name__
            )
            return
        if not same:
            log.warning("%s is a checkpoint for other chunks or settings: training starts from scratch", path)
            return
        self.optimizer.load_state_dict(state["optimizer"])
        with self.torch.no_grad():
            for name, p in self.learner.parameters.items():
                p.copy_(state["parameters"][name])
        self.best = state["best"]
        pairs = {n: [(int(a), float(b)) for a, b in state["now"][n]] for n in ("losses", "separations")}
        self.now = _Progress(**(state["now"] | pairs))


def train_map(
    E: Vector,
    labels: Labels,
    Q: Vector,
    settings: TrainSettings | None = None,
    checkpoint: Path | None = None,
    progress: StepCallback = lambda steps: None,
) -> TrainingResult:
    """Trains the residual map with early stopping on held-out chunks.

    Args:
        E: Unit vectors of the chunks, (n, dim).
        labels: Their topics, (n,), at least two.
        Q: Unit vectors of benign questions whose similarities are preserved, (m, dim); m may be 0.
        settings: Hyperparameters.
        checkpoint: File to resume from and to write at each evaluation. A damaged file, or one for other data or
            settings, is ignored.
        progress: Counts the completed steps.

    Raises:
        DataError: If there are fewer than two topics.
        BackendError: If the checkpoint cannot be written.
        MissingExtra: If torch is absent.
    """
    settings = settings or TrainSettings()
    training = TrainingRun(E, labels, Q, settings, _ResidualMap(E, Q, settings.seed))
    with _one_thread(training.torch):
        return training.run(checkpoint, progress)


@contextmanager
def _one_thread(torch: Any) -> Iterator[None]:
    """Limits torch to one thread: for products this small, synchronization costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _ResidualMap(Learner):
    """The residual map with A(E) = 0 at the start; the first layer is initialized as torch does for a linear layer."""

    def __init__(self, E: Vector, Q: Vector, seed: int) -> None:
        with needs(EXTRA):
            import torch
        self.torch, self.E, self.Q = torch, E, np.ascontiguousarray(Q, np.float32)
        dim, rng = E.shape[1], np.random.default_rng((seed, 1 << 20))
        bound = dim**-0.5
        first = {"W1": rng.uniform(-bound, bound, (dim, dim)), "b1": rng.uniform(-bound, bound, dim)}
        initial = first | {"W2": np.zeros((dim, dim)), "b2": np.zeros(dim)}
        self.parameters = {
            name: torch.tensor(value, dtype=torch.float32, requires_grad=True) for name, value in initial.items()
        }

    def chunks(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._map(self.E[rows])

    def questions(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._map(self.Q[rows])

    def evaluate(self, rows: npt.NDArray[np.int64]) -> Vector:
        return apply_map(self.E[rows], {name: p.detach().numpy() for name, p in self.parameters.items()})

    def _map(self, vectors: Vector) -> Any:
        p, x = self.parameters, self.torch.from_numpy(vectors)
        change = self.torch.relu(x @ p["W1"] + p["b1"]) @ p["W2"] + p["b2"]
        return self.torch.nn.functional.normalize(x + change, dim=1)


def _split(labels: Labels, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Splits positions into training and evaluation: a tenth of each topic. With too few chunks, the sets overlap."""
    rng = np.random.default_rng((seed, 1 << 21))
    held_out = [
        rng.choice(members, int(HELD_OUT * len(members)), replace=False)
        for topic in np.unique(labels[labels != NOISE])
        for members in [np.flatnonzero(labels == topic)]
    ]
    out = np.sort(np.concatenate(held_out)).astype(np.int64)
    if len(np.unique(labels[out])) < 2:
        return np.arange(len(labels)), np.flatnonzero(labels != NOISE)
    return np.setdiff1d(np.arange(len(labels)), out), out
