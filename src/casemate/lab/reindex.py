"""Learns a space in which a collection's topics lie apart, and how much of it the owner can afford.

1. Topics of the chunks (``topics``).
2. A map of the embedder's space that draws them apart (``mapping``), or a fine-tuned encoder that does (``lora``); none
   in mode ``gate``.
3. Made questions that have one right answer each (``finding``): with the map in force, the share that find it may fall
   by ``recall_loss`` at most, with 95 % confidence: the largest strength that seems to keep a bound is too large more
   often than not. So the strength is lowered until that holds; if nothing is left then, or what is left changes next
   to nothing, the re-indexing is refused, and says why.

Nothing is written into the index.
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
from casemate.lab.finding import Score, Sought, crossings, found, sought
from casemate.protocols import Embedder, Index
from casemate.reindexing import lora
from casemate.reindexing.lora import LoraSettings
from casemate.reindexing.mapping import train
from casemate.reindexing.space import NO_VECTORS, TUNED, Mode, Reindexing, distinct, key, require_mode
from casemate.reindexing.supcon import StepDone, Trained, TrainSettings
from casemate.reindexing.topics import NOISE, Labels, Topics, TopicSettings, drawn, find_topics, silhouette
from casemate.reindexing.tuned import Tunable, tunable
from casemate.spread import ALONE, Shared, Spread
from casemate.types import DEFAULT_TENANT, Document, Vector

Tell: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""

FEWEST = 100
"""Chunks below which nothing is learnt."""
HALVINGS = 6
"""How finely the strength is found: to 1 / 64."""
CONFIDENT = 1.645
"""Standard errors above the loss that was seen, up to which the true one lies with 95 % confidence."""
GAIN = 0.05
"""Of the neighbours of another topic, a re-indexing must take at least this share away."""
LARGE = 0.02
"""Of a source with more than this share of the chunks, it is the very chunk that is to be found: any of it is found
whatever is done."""
QUOTING = 1000
"""Chunks whose neighbours are looked at."""


@dataclass(frozen=True)
class Settings:
    """How a collection is re-indexed.

    Attributes:
        tenant: Whose.
        mode: See ``Reindexing``. ``lora`` and ``lora_compatible`` need an embedder that can be fine-tuned.
        k: Hits that make a context.
        recall_loss: By how much the share of made questions that find their source may fall, in (0, 1); with 0 no map
            that changes anything can be shown to be good enough.
        questions: Made questions that decide, and as many again that the map is taught to keep.
        penalty: Of a chunk of another topic at full strength, mode ``gate``.
        topics: How topics are looked for.
        training: How the map or the encoder is trained; its mode follows ``mode``. None: what is usual for either.
        encoder: What of it is trained, and where.
        checkpoint: File to go on from when training was interrupted; None: none is kept.
        seed: Of the questions.
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
        """How what this mode trains is trained."""
        usual = lora.DEFAULT if self.mode in TUNED else TrainSettings()
        return replace(self.training or usual, mode="adapter" if self.mode in ("adapter", "lora") else "compatible")


def fit(
    index: Index,
    embedder: Embedder,
    settings: Settings | None = None,
    progress: Tell = lambda what, done, of: None,
    spread: Spread = ALONE,
) -> Reindexing:
    """Learns a re-indexing of one tenant's collection. Not written yet: ``reindexing.Shelf`` does that.

    Args:
        index: Read once.
        embedder: The one that the index was built with; embeds made questions.
        settings: How.
        progress: Told what is going on.
        spread: Who compares questions with chunks. Topics and training are this process's: both see a sample.

    Returns:
        With its figures in ``report``; ``accepted`` and ``why`` say whether it may be used.

    Raises:
        DataError: If there are too few chunks, or they have no two topics.
        CapabilityError: If the embedder would have to be fine-tuned, and cannot be.
        BackendError: If the checkpoint cannot be written.
        MissingExtra: If torch, peft or scikit-learn is absent.
    """
    settings = settings or Settings()
    if settings.mode in TUNED:
        tunable(embedder)  # before anything takes time
    held = _read(index, settings, progress)
    progress("finding topics", 0, len(held.E))
    topics = find_topics(held.E, settings.topics)
    keys, labels = distinct(held.keys, topics.labels)
    plain = Reindexing(
        settings.mode, settings.tenant, embedder.fingerprint, topics.centroids, topics.floors, keys, labels
    )
    trial = _Trial(held, topics.labels, settings, spread)
    trial.ask(partial(_embedded, embedder, progress))
    if settings.mode == "gate":
        return _judged(trial, replace(plain, penalty=settings.penalty), topics, None)
    told = _counted("training", settings.schedule.steps, progress)
    if settings.mode in TUNED:
        return _tuned(trial, tunable(embedder), plain, topics, progress, told)
    trained = train(held.E, topics.labels, trial.taught, settings.schedule, settings.checkpoint, told)
    return _judged(trial, replace(plain, weights=trained.weights), topics, trained)


def _tuned(
    trial: _Trial, embedder: Tunable, plain: Reindexing, topics: Topics, progress: Tell, told: StepDone
) -> Reindexing:
    """The embedder's model, fine-tuned, and what it makes of the chunks."""
    held, settings = trial.held, trial.settings
    texts = lora.Texts(held.texts, held.E, topics.labels, trial.teach, trial.taught)
    adapter, trained = lora.tune(embedder, texts, settings.schedule, settings.encoder, settings.checkpoint, told)
    encoder = embedder.tuned(adapter)
    T = encoder.embed(held.texts, _counted("embedding chunks anew", len(held.texts), progress))
    trial.take(T, encoder.embed([s.text for s in trial.made]))
    _, first = np.unique(np.array(held.keys, np.uint64), return_index=True)
    return _judged(trial, replace(plain, adapter=adapter, tuned=T[first]), topics, trained)


class _Held(NamedTuple):
    """A collection in memory, and the chunks that questions are made from."""

    E: Vector
    keys: list[int]
    sources: list[str]
    texts: list[str]
    asked: list[Document]


def _read(index: Index, settings: Settings, progress: Tell) -> _Held:
    total = index.moments(settings.tenant).n
    if total < FEWEST:
        raise DataError(f"tenant {settings.tenant!r} has {total} chunks; re-indexing needs at least {FEWEST}")
    rng = np.random.default_rng(settings.seed)
    wanted = set(rng.permutation(total)[: 2 * settings.questions].tolist())
    keys, sources, ids, pieces, asked = list[int](), list[str](), list[str](), list[Vector](), list[Document]()
    texts = list[str]()
    for documents, vectors in index.scan(settings.tenant):
        asked += [d for i, d in enumerate(documents, len(keys)) if i in wanted]
        keys += [key(d) for d in documents]
        sources += [d.source for d in documents]
        ids += [d.id for d in documents]
        texts += [d.content for d in documents] if settings.mode in TUNED else []
        pieces.append(np.array(vectors, np.float32))
        progress("reading the index", min(len(keys), total), total)
    kept = sorted({name: i for i, name in enumerate(ids)}.values())  # what was replaced meanwhile may come twice
    E = np.concatenate(pieces)
    if len(kept) < len(ids):
        E, keys, sources = E[kept], [keys[i] for i in kept], [sources[i] for i in kept]
        texts = [texts[i] for i in kept] if texts else texts
    rng.shuffle(asked)
    large = {source for source, count in Counter(sources).items() if count > max(1, LARGE * len(sources))}
    sources = [f"{source} {k}" if source in large else source for source, k in zip(sources, keys, strict=True)]
    asked = [replace(d, source=f"{d.source} {key(d)}") if d.source in large else d for d in asked]
    return _Held(E, keys, sources, texts, asked)


class Tried(NamedTuple):
    """What a strength costs.

    Attributes:
        strength: Which.
        loss: By how much the share of the made questions that find their source fell.
        at_most: Upper end of its one-sided 95 % interval.
    """

    strength: float
    loss: float
    at_most: float


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Similarity of questions to every chunk, under one ranking or another."""

    by: Shared[tuple[Reindexing | None, Vector, Labels]]
    dim: int

    def __call__(self, Q: Vector) -> Vector:
        learnt, Z, labels = self.by.get()
        if learnt is None:
            plain: Vector = Q[:, : self.dim] @ Z.T
            return plain
        return learnt.scores(Q[:, : self.dim], Z, labels, Q[:, self.dim :])


class _Trial:
    """What is found, and what is near what, under one ranking or another."""

    def __init__(self, held: _Held, labels: Labels, settings: Settings, spread: Spread) -> None:
        self.held, self.labels, self.settings, self._spread = held, labels, settings, spread
        self.quoted = drawn(labels, QUOTING, settings.seed)
        self.T: Vector | None = None
        self.asked_T: Vector | None = None

    def ask(self, embed: Callable[[list[str]], Vector]) -> None:
        """Makes the questions: one half to judge by, the other, about other sources, to teach the map what to keep."""
        made = sought(self.held.asked, np.random.default_rng(self.settings.seed))
        there = set(self.held.sources)
        made = [s for s in made if s.source in there]
        self.made = made[: (len(made) + 1) // 2]
        known = {s.source for s in self.made}
        others = [s for s in made[len(self.made) :] if s.source not in known]
        self.teach = [s.text for s in others]
        Q = embed([s.text for s in self.made] + self.teach)
        self.Q, self.taught = Q[: len(self.made)], Q[len(self.made) :]
        self.own = _positions(self.made, self.held.sources)
        self.topic = np.array([self.labels[rows[0]] for rows in self.own], np.int64)

    def take(self, T: Vector, asked: Vector) -> None:
        """Takes in what a fine-tuned encoder makes of the chunks, (n, dim), and of the questions, (m, dim)."""
        self.T, self.asked_T = T, asked

    def hits(self, learnt: Reindexing | None) -> npt.NDArray[np.bool_]:
        """Which questions find their source among the k best; None: as it was."""
        Q = self._both(self.Q, self.asked_T)
        return found(self._score(learnt), Q, self.own, self.settings.k, self._spread)

    def recall(self, learnt: Reindexing | None) -> dict[str, float]:
        """Share of the questions that find their source, in all and by kind; None: as it was."""
        hit, kinds = self.hits(learnt), np.array([s.kind for s in self.made])
        return {"all": float(hit.mean())} | {str(kind): float(hit[kinds == kind].mean()) for kind in np.unique(kinds)}

    def spread(self, learnt: Reindexing | None) -> dict[str, float]:
        """How far apart topics lie: of the chunks' vectors, of a chunk's neighbours, of what a question finds."""
        k, E, labels = self.settings.k, self.held.E, self.labels
        Z = learnt.chunks(E, self.T) if learnt else E
        quoted = self._both(E[self.quoted], None if self.T is None else self.T[self.quoted])
        score, inside = self._score(learnt), self.topic != NOISE
        return {
            "silhouette": silhouette(Z, labels),
            "strangers": crossings(score, quoted, labels[self.quoted], labels, k, self.quoted.tolist()),
            "strangers_asked": crossings(
                score, self._both(self.Q, self.asked_T)[inside], self.topic[inside], labels, k
            ),
        }

    def strength(self, learnt: Reindexing) -> tuple[float, list[Tried]]:
        """The largest strength that costs no more than was allowed, by bisection, and what was tried; 0: none does."""
        before, tried = self.hits(None), list[Tried]()

        def affordable(strength: float) -> bool:
            tried.append(Tried(strength, *_loss(before, self.hits(replace(learnt, strength=strength)))))
            return tried[-1].at_most <= self.settings.recall_loss

        if affordable(1.0):
            return 1.0, tried
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if affordable(middle) else (low, middle)
        return low, tried

    def _score(self, learnt: Reindexing | None) -> Score:
        """What is ranked by; takes what ``_both`` gives."""
        E = self.held.E
        Z = learnt.chunks(E, self.T) if learnt else E
        ranked = replace(learnt, tuned=NO_VECTORS) if learnt else None  # the chunks' vectors are in Z
        return _Ranking(self._spread.share((ranked, Z, self.labels)), E.shape[1])

    @staticmethod
    def _both(Q: Vector, T: Vector | None) -> Vector:
        """Questions' vectors by the embedder, and beside them those by a fine-tuned encoder, if there is one."""
        return Q if T is None else np.hstack([Q, T])


def _loss(before: npt.NDArray[np.bool_], after: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """By how much recall falls on the same questions, and by how much at most (normal approximation, paired)."""
    d = before.astype(np.float64) - after
    return float(d.mean()), float(d.mean() + CONFIDENT * d.std() / math.sqrt(len(d)))


def _judged(trial: _Trial, learnt: Reindexing, topics: Topics, trained: Trained | None) -> Reindexing:
    """The re-indexing at the strength that the owner can afford, or refused."""
    strength, tried = trial.strength(learnt)
    at = replace(learnt, strength=strength)
    before, after = trial.spread(None), trial.spread(at)
    recall = {"before": trial.recall(None), "after": trial.recall(at)}
    report: dict[str, Any] = {name: {"before": before[name], "after": after[name]} for name in before}
    report |= {
        "recall": recall,
        "k": trial.settings.k,
        "questions": len(trial.made),
        "strengths": tried,
        "chunks": len(trial.labels),
        "topics": len(topics.centroids),
        "noise": topics.noise,
        "method": topics.method,
    }
    if trained is not None:
        report |= {n: getattr(trained, n) for n in ("step", "steps", "losses", "separations")}
        report["training"] = asdict(trial.settings.schedule) | {"mode": learnt.mode}
    if learnt.adapter:
        report["megabytes"] = learnt.megabytes
    refusal = _refusal(trial.settings, strength, tried, report)
    why = refusal or (
        f"at strength {strength:.3f}, recall@{trial.settings.k} of made questions is {recall['after']['all']:.3f}; "
        f"it was {recall['before']['all']:.3f}"
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(at, accepted=not refusal, why=why, report=report, at=now)


def _refusal(settings: Settings, strength: float, tried: list[Tried], report: dict[str, Any]) -> str:
    """Why a re-indexing is of no use; empty if it is."""
    if not strength:
        least = min(tried)
        return (
            f"even at strength {least.strength:.3f}, recall@{settings.k} may fall by {least.at_most:.3f} "
            f"(it fell by {least.loss:.3f}), and {settings.recall_loss:.3f} is allowed"
        )
    was, now = (report["strangers"][when] for when in ("before", "after"))
    if was - now <= GAIN * was:
        return (
            f"at strength {strength:.3f}, the most that keeps recall, {now:.3f} of a chunk's neighbours are of another "
            f"topic, and {was:.3f} were before: it would change next to nothing"
        )
    return ""


def _positions(made: list[Sought], sources: list[str]) -> list[npt.NDArray[np.int64]]:
    """Of the chunks of each question's source."""
    rows: dict[str, list[int]] = {s.source: [] for s in made}
    for i, source in enumerate(sources):
        if source in rows:
            rows[source].append(i)
    return [np.array(rows[s.source], np.int64) for s in made]


def _embedded(embedder: Embedder, progress: Tell, texts: list[str]) -> Vector:
    return embedder.embed(texts, _counted("embedding questions", len(texts), progress))


def _counted(what: str, of: int, progress: Tell) -> Callable[[int], None]:
    """Adds up what is done."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, of)

    return add
