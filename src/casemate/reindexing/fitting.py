"""Fits a re-indexing: a space in which topics are separated, at a strength that preserves retrieval quality.

1. Topics: clusters of the chunks (``maths.clustering``).
2. A mapping that separates them: a residual map (``supcon``) or a fine-tuned encoder (``lora``); none in mode ``gate``.
3. Known-item questions (``retrieval_quality``): the share that finds its source may fall by at most ``recall_loss``,
   with 95 % confidence. The point estimate alone would accept too large a strength more often than not. The strength is
   reduced until the bound is met. If no strength meets it, or the effect is negligible, the re-indexing is refused with
   the reason.

Nothing is written to the index.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError, DataError
from casemate.maths.clustering import NOISE, Labels, Topics, TopicSettings, find_topics, sample_labeled, silhouette
from casemate.protocols import Embedder, Index
from casemate.reindexing import lora
from casemate.reindexing.lora import LoraSettings
from casemate.reindexing.retrieval_quality import (
    KnownItemQuestion,
    ScoreFunction,
    cross_topic_share,
    found_in_top_k,
    known_item_questions,
)
from casemate.reindexing.space import (
    NO_VECTORS,
    TUNED,
    Mode,
    Reindexing,
    TunableEmbedder,
    chunk_key,
    require_mode,
    require_tunable,
    unique_keys,
)
from casemate.reindexing.supcon import StepCallback, TrainingResult, TrainSettings, train_map
from casemate.runtime.executor import LOCAL, Executor, Shared
from casemate.types import DEFAULT_TENANT, Document, Vector

ProgressCallback: TypeAlias = Callable[[str, int, int], None]
"""Receives the name of the step, the amount done, and the total."""

MIN_CHUNKS = 100
HALVINGS = 6  # bisection steps for the strength: a resolution of 1 / 64
Z_95 = 1.645  # standard errors above the mean of the one-sided 95 % confidence bound
MIN_GAIN = 0.05  # minimum relative reduction of neighbors of another topic; less is refused
LARGE_SOURCE = 0.02  # share of all chunks above which a source is too easy to find; the very chunk is relevant then
NEIGHBOR_SAMPLE = 1000  # chunks whose neighbors are examined


@dataclass(frozen=True)
class ReindexSettings:
    """Settings of one fit.

    Attributes:
        mode: See ``Reindexing``. ``lora`` and ``lora_compatible`` need an embedder that can be fine-tuned.
        recall_loss: Allowed loss of known-item recall, in (0, 1).
        questions: Number of synthetic questions for the decision; as many again serve as training data.
        penalty: Deduction for a chunk of another topic at full strength, mode ``gate``.
        training: Hyperparameters; its ``mode`` follows ``mode``. None: the defaults of the mode.
        encoder: Adapter and device, modes ``lora`` and ``lora_compatible``.
        checkpoint: File to resume an interrupted training from; None: no checkpoint.
    """

    tenant: str = DEFAULT_TENANT
    mode: Mode = "adapter"
    k: int = 5
    recall_loss: float = 0.01
    questions: int = 900
    penalty: float = 0.2
    topics: TopicSettings = field(default_factory=TopicSettings)
    training: TrainSettings | None = None
    encoder: LoraSettings = LoraSettings()
    checkpoint: Path | None = None
    seed: int = 7

    def __post_init__(self) -> None:
        require_mode(self.mode)
        if not 0 < self.recall_loss < 1 or self.questions < 30 or self.k < 1 or not 0 < self.penalty < np.inf:
            what = f"recall_loss={self.recall_loss}, questions={self.questions}, k={self.k}, penalty={self.penalty}"
            raise ConfigError(f"reindex needs recall_loss in (0, 1), questions >= 30, k >= 1, penalty > 0; got {what}")

    @property
    def schedule(self) -> TrainSettings:
        """The hyperparameters in effect."""
        default = lora.DEFAULT_TRAINING if self.mode in TUNED else TrainSettings()
        return replace(self.training or default, mode="adapter" if self.mode in ("adapter", "lora") else "compatible")


def fit(
    index: Index,
    embedder: Embedder,
    settings: ReindexSettings | None = None,
    progress: ProgressCallback = lambda step, done, total: None,
    spread: Executor = LOCAL,
) -> Reindexing:
    """Fits a re-indexing of one tenant's collection. ``ReindexRegistry.write`` stores it.

    Clustering and training run in this process; ``spread`` runs the comparisons of questions and chunks. The result has
    its metrics in ``report``; ``accepted`` and ``reason`` give the decision.

    Raises:
        DataError: If there are too few chunks or fewer than two topics.
        CapabilityError: If the mode needs an embedder that can be fine-tuned, and this one cannot.
        BackendError: If the checkpoint cannot be written.
        MissingExtra: If torch, peft or scikit-learn is absent.
    """
    settings = settings or ReindexSettings()
    if settings.mode in TUNED:
        require_tunable(embedder)  # fail before the long steps
    snapshot = _read(index, settings, progress)
    progress("finding topics", 0, len(snapshot.E))
    topics = find_topics(snapshot.E, settings.topics)
    keys, labels = unique_keys(snapshot.keys, topics.labels)
    plain = Reindexing(
        settings.mode, settings.tenant, embedder.fingerprint, topics.centroids, topics.floors, keys, labels
    )
    evaluation = _Evaluation(snapshot, topics.labels, settings, spread)
    evaluation.prepare_questions(partial(_embed, embedder, progress))
    if settings.mode == "gate":
        return _decide(evaluation, replace(plain, penalty=settings.penalty), topics, None)
    on_step = _counter("training", settings.schedule.steps, progress)
    if settings.mode in TUNED:
        return _fit_encoder(evaluation, require_tunable(embedder), plain, topics, progress, on_step)
    Q = evaluation.training_Q
    trained = train_map(snapshot.E, topics.labels, Q, settings.schedule, settings.checkpoint, on_step)
    return _decide(evaluation, replace(plain, weights=trained.weights), topics, trained)


def _fit_encoder(
    evaluation: _Evaluation,
    embedder: TunableEmbedder,
    plain: Reindexing,
    topics: Topics,
    progress: ProgressCallback,
    on_step: StepCallback,
) -> Reindexing:
    """Fine-tunes the embedder's model and embeds the chunks with it."""
    snapshot, settings = evaluation.snapshot, evaluation.settings
    texts = lora.TrainingTexts(
        snapshot.texts, snapshot.E, topics.labels, evaluation.training_questions, evaluation.training_Q
    )
    adapter, trained = lora.fine_tune(
        embedder, texts, settings.schedule, settings.encoder, settings.checkpoint, on_step
    )
    encoder = embedder.with_adapter(adapter)
    T = encoder.embed(snapshot.texts, _counter("embedding chunks again", len(snapshot.texts), progress))
    evaluation.use_encoder(T, encoder.embed([question.text for question in evaluation.questions]))
    _, first = np.unique(np.array(snapshot.keys, np.uint64), return_index=True)
    return _decide(evaluation, replace(plain, adapter=adapter, tuned=T[first]), topics, trained)


class _CollectionSnapshot(NamedTuple):
    """A collection in memory, and the chunks from which questions are built."""

    E: Vector
    keys: list[int]
    sources: list[str]
    texts: list[str]
    question_chunks: list[Document]


def _read(index: Index, settings: ReindexSettings, progress: ProgressCallback) -> _CollectionSnapshot:
    total = index.moments(settings.tenant).n
    if total < MIN_CHUNKS:
        raise DataError(f"tenant {settings.tenant!r} has {total} chunks; re-indexing needs at least {MIN_CHUNKS}")
    rng = np.random.default_rng(settings.seed)
    sampled = set(rng.permutation(total)[: 2 * settings.questions].tolist())
    keys, sources, ids, batches = list[int](), list[str](), list[str](), list[Vector]()
    texts, question_chunks = list[str](), list[Document]()
    for documents, vectors in index.scan(settings.tenant):
        question_chunks += [d for i, d in enumerate(documents, len(keys)) if i in sampled]
        keys += [chunk_key(d) for d in documents]
        sources += [d.source for d in documents]
        ids += [d.id for d in documents]
        texts += [d.content for d in documents] if settings.mode in TUNED else []
        batches.append(np.array(vectors, np.float32))
        progress("reading the index", min(len(keys), total), total)
    latest = sorted({name: i for i, name in enumerate(ids)}.values())  # a chunk replaced during the scan occurs twice
    E = np.concatenate(batches)
    if len(latest) < len(ids):
        E, keys, sources = E[latest], [keys[i] for i in latest], [sources[i] for i in latest]
        texts = [texts[i] for i in latest] if texts else texts
    rng.shuffle(question_chunks)
    large = {source for source, count in Counter(sources).items() if count > max(1, LARGE_SOURCE * len(sources))}
    sources = [f"{source} {k}" if source in large else source for source, k in zip(sources, keys, strict=True)]
    question_chunks = [
        replace(d, source=f"{d.source} {chunk_key(d)}") if d.source in large else d for d in question_chunks
    ]
    return _CollectionSnapshot(E, keys, sources, texts, question_chunks)


class StrengthTrial(NamedTuple):
    """The loss of known-item recall at one strength, and the upper end of its one-sided 95 % confidence interval."""

    strength: float
    loss: float
    at_most: float


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Scores of questions for every chunk under one ranking; picklable."""

    shared: Shared[tuple[Reindexing | None, Vector, Labels]]
    dim: int

    def __call__(self, Q: Vector) -> Vector:
        reindexing, Z, labels = self.shared.get()
        if reindexing is None:
            plain: Vector = Q[:, : self.dim] @ Z.T
            return plain
        return reindexing.scores(Q[:, : self.dim], Z, labels, Q[:, self.dim :])


class _Evaluation:
    """Measures recall and topic separation under a ranking; a ranking of None is that of the embedder."""

    def __init__(
        self, snapshot: _CollectionSnapshot, labels: Labels, settings: ReindexSettings, spread: Executor
    ) -> None:
        self.snapshot, self.labels, self.settings, self._spread = snapshot, labels, settings, spread
        self.neighbor_sample = sample_labeled(labels, NEIGHBOR_SAMPLE, settings.seed)
        self.T: Vector | None = None
        self.question_T: Vector | None = None

    def prepare_questions(self, embed: Callable[[list[str]], Vector]) -> None:
        """Builds questions: one half for the decision, the other half, about other sources, as training data."""
        built = known_item_questions(self.snapshot.question_chunks, np.random.default_rng(self.settings.seed))
        present = set(self.snapshot.sources)
        built = [question for question in built if question.source in present]
        self.questions = built[: (len(built) + 1) // 2]
        evaluated = {question.source for question in self.questions}
        rest = [question for question in built[len(self.questions) :] if question.source not in evaluated]
        self.training_questions = [question.text for question in rest]
        Q = embed([question.text for question in self.questions] + self.training_questions)
        self.Q, self.training_Q = Q[: len(self.questions)], Q[len(self.questions) :]
        self.own = _positions(self.questions, self.snapshot.sources)
        self.topic = np.array([self.labels[rows[0]] for rows in self.own], np.int64)

    def use_encoder(self, T: Vector, question_T: Vector) -> None:
        """Sets the fine-tuned encoder's vectors of the chunks, (n, dim), and of the questions, (m, dim)."""
        self.T, self.question_T = T, question_T

    def hits(self, reindexing: Reindexing | None) -> npt.NDArray[np.bool_]:
        """Returns which questions find their source among the k best."""
        Q = self._with_encoder(self.Q, self.question_T)
        return found_in_top_k(self._score(reindexing), Q, self.own, self.settings.k, self._spread)

    def recall(self, reindexing: Reindexing | None) -> dict[str, float]:
        """Returns known-item recall@k, overall and by kind of question."""
        hit, kinds = self.hits(reindexing), np.array([question.kind for question in self.questions])
        return {"all": float(hit.mean())} | {str(kind): float(hit[kinds == kind].mean()) for kind in np.unique(kinds)}

    def separation(self, reindexing: Reindexing | None) -> dict[str, float]:
        """Returns the silhouette, and the cross-topic shares of chunks' neighbors and of questions' hits."""
        k, E, labels, sample = self.settings.k, self.snapshot.E, self.labels, self.neighbor_sample
        Z = reindexing.map_chunks(E, self.T) if reindexing else E
        chunks = self._with_encoder(E[sample], None if self.T is None else self.T[sample])
        score, inside = self._score(reindexing), self.topic != NOISE
        questions = self._with_encoder(self.Q, self.question_T)[inside]
        return {
            "silhouette": silhouette(Z, labels),
            "strangers": cross_topic_share(score, chunks, labels[sample], labels, k, sample.tolist()),
            "strangers_asked": cross_topic_share(score, questions, self.topic[inside], labels, k),
        }

    def affordable_strength(self, reindexing: Reindexing) -> tuple[float, list[StrengthTrial]]:
        """Finds the largest strength within the allowed loss by bisection; 0: none. Returns the trials too."""
        before, trials = self.hits(None), list[StrengthTrial]()

        def affordable(strength: float) -> bool:
            after = self.hits(replace(reindexing, strength=strength))
            trials.append(StrengthTrial(strength, *_recall_loss(before, after)))
            return trials[-1].at_most <= self.settings.recall_loss

        if affordable(1.0):
            return 1.0, trials
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if affordable(middle) else (low, middle)
        return low, trials

    def _score(self, reindexing: Reindexing | None) -> ScoreFunction:
        """The scoring function of a ranking; its input comes from ``_with_encoder``."""
        E = self.snapshot.E
        Z = reindexing.map_chunks(E, self.T) if reindexing else E
        lean = replace(reindexing, tuned=NO_VECTORS) if reindexing else None  # Z includes the chunks' vectors
        return _Ranking(self._spread.share((lean, Z, self.labels)), E.shape[1])

    @staticmethod
    def _with_encoder(Q: Vector, T: Vector | None) -> Vector:
        """Concatenates the vectors by the embedder and by the fine-tuned encoder, if there is one."""
        return Q if T is None else np.hstack([Q, T])


def _recall_loss(before: npt.NDArray[np.bool_], after: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Returns the paired recall loss and its upper one-sided 95 % bound (normal approximation)."""
    d = before.astype(np.float64) - after
    return float(d.mean()), float(d.mean() + Z_95 * d.std() / math.sqrt(len(d)))


def _decide(evaluation: _Evaluation, full: Reindexing, topics: Topics, trained: TrainingResult | None) -> Reindexing:
    """Returns the re-indexing at the affordable strength, accepted or refused, with its report."""
    strength, trials = evaluation.affordable_strength(full)
    chosen = replace(full, strength=strength)
    before, after = evaluation.separation(None), evaluation.separation(chosen)
    recall = {"before": evaluation.recall(None), "after": evaluation.recall(chosen)}
    report: dict[str, Any] = {name: {"before": before[name], "after": after[name]} for name in before}
    report |= {
        "recall": recall,
        "k": evaluation.settings.k,
        "questions": len(evaluation.questions),
        "strengths": trials,
        "chunks": len(evaluation.labels),
        "topics": len(topics.centroids),
        "noise": topics.noise,
        "method": topics.method,
    }
    if trained is not None:
        report |= {n: getattr(trained, n) for n in ("step", "steps", "losses", "separations")}
        report["training"] = asdict(evaluation.settings.schedule) | {"mode": full.mode}
    if full.adapter:
        report["megabytes"] = full.megabytes
    refusal = _refusal(evaluation.settings, strength, trials, report)
    reason = refusal or (
        f"at strength {strength:.3f}, recall@{evaluation.settings.k} of synthetic questions is "
        f"{recall['after']['all']:.3f}; it was {recall['before']['all']:.3f}"
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(chosen, accepted=not refusal, reason=reason, report=report, at=now)


def _refusal(settings: ReindexSettings, strength: float, trials: list[StrengthTrial], report: dict[str, Any]) -> str:
    """Returns why the re-indexing is refused; empty if it is accepted."""
    if not strength:
        least = min(trials)
        return (
            f"even at strength {least.strength:.3f}, recall@{settings.k} may fall by {least.at_most:.3f} "
            f"(it fell by {least.loss:.3f}); the allowed loss is {settings.recall_loss:.3f}"
        )
    before, after = (report["strangers"][when] for when in ("before", "after"))
    if before - after <= MIN_GAIN * before:
        return (
            f"negligible effect: at strength {strength:.3f}, the largest within the allowed loss, {after:.3f} of a "
            f"chunk's neighbors are of another topic; without it {before:.3f}"
        )
    return ""


def _positions(questions: list[KnownItemQuestion], sources: list[str]) -> list[npt.NDArray[np.int64]]:
    """Positions of the chunks of each question's source."""
    rows: dict[str, list[int]] = {question.source: [] for question in questions}
    for i, source in enumerate(sources):
        if source in rows:
            rows[source].append(i)
    return [np.array(rows[question.source], np.int64) for question in questions]


def _embed(embedder: Embedder, progress: ProgressCallback, texts: list[str]) -> Vector:
    return embedder.embed(texts, _counter("embedding questions", len(texts), progress))


def _counter(step: str, total: int, progress: ProgressCallback) -> Callable[[int], None]:
    """Returns a callback that reports the running total."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(step, done, total)

    return add
