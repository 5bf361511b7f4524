"""Trains the map of ``residual`` by the loss of ``supcon``. Needs torch, and knows nothing but arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from casemate.errors import needs
from casemate.reindexing.residual import mapped
from casemate.reindexing.supcon import EXTRA, Learner, Run, StepDone, Trained, TrainSettings
from casemate.reindexing.topics import Labels
from casemate.types import Vector


def train(
    E: Vector,
    labels: Labels,
    Q: Vector,
    settings: TrainSettings | None = None,
    checkpoint: Path | None = None,
    progress: StepDone = lambda steps: None,
) -> Trained:
    """Trains a map that draws topics apart; stops when chunks that were held out do so no more.

    Args:
        E: Unit vectors of the chunks, (n, dim).
        labels: Their topics, (n,), at least two.
        Q: Unit vectors of harmless questions whose similarities are to be kept, (m, dim); none: m = 0.
        settings: How.
        checkpoint: A file to go on from, and to write now and then. What is damaged, or of other data or settings, is
            not gone on from.
        progress: Called with the number of steps just taken.

    Raises:
        DataError: If there are fewer than two topics.
        BackendError: If the checkpoint cannot be written.
        MissingExtra: If torch is absent.
    """
    settings = settings or TrainSettings()
    run = Run(E, labels, Q, settings, _Map(E, Q, settings.seed))
    with _one_thread(run.torch):
        return run.whole(checkpoint, progress)


@contextmanager
def _one_thread(torch: Any) -> Iterator[None]:
    """Torch on one thread: the products are small, and two threads wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Map(Learner):
    """The residual map: A(E) = 0 whatever E at the start; the first layer is drawn as torch does for a linear layer."""

    def __init__(self, E: Vector, Q: Vector, seed: int) -> None:
        with needs(EXTRA):
            import torch
        self.torch, self.E, self.Q = torch, E, np.ascontiguousarray(Q, np.float32)
        dim, rng = E.shape[1], np.random.default_rng((seed, 1 << 20))
        bound = dim**-0.5
        first = {"W1": rng.uniform(-bound, bound, (dim, dim)), "b1": rng.uniform(-bound, bound, dim)}
        drawn = first | {"W2": np.zeros((dim, dim)), "b2": np.zeros(dim)}
        self.parameters = {
            name: torch.tensor(value, dtype=torch.float32, requires_grad=True) for name, value in drawn.items()
        }

    def chunks(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._mapped(self.E[rows])

    def questions(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._mapped(self.Q[rows])

    def held(self, rows: npt.NDArray[np.int64]) -> Vector:
        return mapped(self.E[rows], {name: p.detach().numpy() for name, p in self.parameters.items()})

    def _mapped(self, vectors: Vector) -> Any:
        p, x = self.parameters, self.torch.from_numpy(vectors)
        change = self.torch.relu(x @ p["W1"] + p["b1"]) @ p["W2"] + p["b2"]
        return self.torch.nn.functional.normalize(x + change, dim=1)
