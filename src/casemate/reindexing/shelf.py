"""What re-indexing has learnt of one tenant's collection, and where it is kept: numbered files, one of them in force.

Made by ``lab.reindex``, used by ``defenses.reindex``. The index itself is left alone: it keeps the embedder's vectors,
which other defenses judge by. A file holds the map, the topics and the figures by which it was accepted, and no text.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from casemate.errors import CapabilityError, ConfigError, DataError
from casemate.protocols import Index
from casemate.reindexing.residual import SHAPES, Weights, mapped
from casemate.reindexing.topics import NOISE, Labels, nearest, silhouette
from casemate.types import Document, Vector

Mode: TypeAlias = Literal["adapter", "compatible", "gate"]
MODES: tuple[str, ...] = get_args(Mode)
Keys: TypeAlias = npt.NDArray[np.uint64]

FORMAT = 1
FIT = "run 'casemate reindex'"
CHANGED = 0.1
"""Share of chunks that may be new or gone before a re-indexing is due again."""
FADED = 0.05
"""By how much the topics' separation may fall before it is due again."""
LOOKED_AT = 5000
"""Chunks that the separation is computed from."""


@dataclass(frozen=True, eq=False)
class Reindexing:
    """A space to rank in, and the topics of a collection.

    Attributes:
        mode: ``adapter``: chunks and questions go through the map. ``compatible``: chunks only. ``gate``: neither; a
            chunk of another topic than the question's loses ``strength * penalty``.
        tenant: Whose collection.
        fingerprint: Of the embedder.
        centroids: Unit mean of each topic in the embedder's space, (C, dim).
        floors: How near a centroid a chunk must be to be of that topic, (C,).
        keys: Of the chunks that were learnt from, sorted, (n,), see ``key``.
        labels: Their topics, (n,).
        weights: The map's; empty for ``gate``.
        strength: Share of the map, or of the penalty, that is in force, in [0, 1].
        penalty: What a chunk of another topic loses, mode ``gate``.
        accepted: Whether what is found stays found.
        why: What was decided, and why.
        report: The figures behind it.
        version: Number of the file; 0: not written yet.
        at: When, ISO 8601.
    """

    mode: Mode
    tenant: str
    fingerprint: str
    centroids: Vector
    floors: Vector
    keys: Keys
    labels: Labels
    weights: Weights = field(default_factory=dict)
    strength: float = 1.0
    penalty: float = 0.0
    accepted: bool = True
    why: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0
    at: str = ""

    def chunks(self, E: Vector) -> Vector:
        """Chunks' vectors in the new space, (n, dim)."""
        return mapped(E, self.weights, self.strength) if self.weights else E

    def questions(self, Q: Vector) -> Vector:
        """Questions' vectors as they are compared with ``chunks``, (m, dim)."""
        return mapped(Q, self.weights, self.strength) if self.mode == "adapter" else Q

    def topics(self, keys: Keys, E: Vector) -> Labels:
        """The topics of chunks, (n,): as learnt, or of the nearest centroid for what is new; nothing is trained.

        Args:
            keys: Of the chunks, (n,).
            E: Their vectors by the embedder, (n, dim).
        """
        labels = nearest(E, self.centroids, self.floors)
        if len(self.keys):
            places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            known = self.keys[places] == keys
            labels[known] = self.labels[places[known]]
        return labels

    def nearest(self, Q: Vector) -> Labels:
        """The topic nearest to each question, (m,), however far it is; ``NOISE`` if there are none."""
        return nearest(Q, self.centroids, np.full(len(self.centroids), -np.inf, np.float32))

    def scores(self, Q: Vector, Z: Vector, labels: Labels) -> Vector:
        """What is ranked by: similarity of each question to each chunk in the new space, (m, n).

        Args:
            Q: Questions' vectors by the embedder, (m, dim).
            Z: The chunks', as ``chunks`` gives them, (n, dim).
            labels: Their topics, (n,); for ``gate``.
        """
        S: Vector = self.questions(Q) @ Z.T
        if self.mode == "gate":
            S = S - np.float32(self.strength * self.penalty) * (labels[None] != self.nearest(Q)[:, None])
        return S

    @property
    def digest(self) -> str:
        """Of the collection that was learnt from."""
        return hashlib.blake2b(self.keys.tobytes(), digest_size=16).hexdigest()


def require_mode(mode: str) -> None:
    """Refuses what is no mode.

    Raises:
        CapabilityError: If it is ``lora``.
        ConfigError: If it is anything else that is not known.
    """
    if mode == "lora":
        raise CapabilityError(
            "reindex: mode lora would train the embedder itself, which needs the package peft and an embedder that can "
            f"be trained; none of ours can. Use one of: {', '.join(MODES)}"
        )
    if mode not in MODES:
        raise ConfigError(f"reindex: mode is {mode!r}; known: {', '.join(MODES)}")


def key(document: Document) -> int:
    """Tells a chunk by its title and text, whatever its id: equal texts have equal vectors."""
    return int.from_bytes(hashlib.blake2b(document.content.encode(), digest_size=8).digest(), "little")


def due(learnt: Reindexing, index: Index) -> str:
    """Why a collection must be re-indexed anew; empty if it need not. Reads the whole collection once."""
    stride = max(1, index.moments(learnt.tenant).n // LOOKED_AT)
    held, sample, count = set[int](), list[Vector](), 0
    kept = list[int]()
    for documents, vectors in index.scan(learnt.tenant):
        keys = [key(d) for d in documents]
        held.update(keys)
        first = -count % stride
        sample.append(np.array(vectors[first::stride]))
        kept += keys[first::stride]
        count += len(documents)
    known = {int(k) for k in learnt.keys}
    new, gone = len(held - known), len(known - held)
    if max(new, gone) > CHANGED * max(len(known), 1):
        return f"{new} chunks are new and {gone} are gone since it was made with {len(known)}"
    then = learnt.report.get("silhouette", {}).get("after")
    if then is None or not kept:
        return ""
    E = np.concatenate(sample)
    now = silhouette(learnt.chunks(E), learnt.topics(np.array(kept, np.uint64), E))
    return f"topics lie less apart ({now:.3f}) than when it was made ({then:.3f})" if now < then - FADED else ""


class Shelf:
    """The versions of one tenant's re-indexing, in a folder: ``NNN.npz``, and ``current`` with the number in force.

    Args:
        folder: Of all tenants.
        tenant: Whose.
    """

    def __init__(self, folder: Path, tenant: str) -> None:
        self.place = folder / hashlib.sha256(tenant.encode()).hexdigest()[:16]
        self.tenant = tenant
        self._state: tuple[int, int, int] | None = None
        self._held: Reindexing | None = None

    def versions(self) -> list[int]:
        """Numbers of all versions, also of those that were refused, oldest first."""
        return sorted(int(p.stem) for p in self.place.glob("*.npz") if p.stem.isdigit())

    def current(self) -> Reindexing | None:
        """The version in force, read again when that changes; None: none is.

        Raises:
            DataError: If a file is damaged or missing.
        """
        try:
            found = (self.place / "current").stat()
        except OSError:
            return None
        state = (found.st_mtime_ns, found.st_ino, found.st_size)
        if state != self._state:
            self._held = self.read(self._number())
            self._state = state
        return self._held

    def read(self, version: int) -> Reindexing:
        """One version.

        Raises:
            DataError: If its file is damaged or missing.
        """
        return replace(_read(self._path(version), self.tenant), version=version)

    def write(self, learnt: Reindexing) -> Reindexing:
        """Adds a version, and puts it in force if it was accepted."""
        self.place.mkdir(parents=True, exist_ok=True)
        written = replace(learnt, version=max(self.versions(), default=0) + 1)
        _write(self._path(written.version), written)
        if written.accepted:
            self._choose(written.version)
        return written

    def rollback(self, version: int | None = None) -> Reindexing:
        """Puts an earlier version in force.

        Args:
            version: Which; None: the last accepted one before the version in force.

        Raises:
            DataError: If there is none, or it was refused.
        """
        if version is None:
            now = self._number() if (self.place / "current").exists() else 0
            earlier = [v for v in self.versions() if v < now and self.read(v).accepted]
            if not earlier:
                raise DataError(f"there is no version of tenant {self.tenant!r} before {now} to go back to")
            version = earlier[-1]
        if version not in self.versions():
            known = ", ".join(map(str, self.versions())) or "none"
            raise DataError(f"there is no version {version} of tenant {self.tenant!r}; known: {known}")
        found = self.read(version)
        if not found.accepted:
            raise DataError(f"version {version} was refused: {found.why}")
        self._choose(version)
        return found

    def _number(self) -> int:
        text = (self.place / "current").read_text(encoding="utf-8", errors="replace").strip()
        if not text.isdecimal():
            raise DataError(f"{self.place / 'current'} is damaged; {FIT}")
        return int(text)

    def _path(self, version: int) -> Path:
        return self.place / f"{version:03d}.npz"

    def _choose(self, version: int) -> None:
        _put(self.place / "current", lambda file: file.write(f"{version}\n".encode()))


_ABOUT = ("mode", "tenant", "fingerprint", "strength", "penalty", "accepted", "why", "report", "at")
_ARRAYS = {"centroids": np.float32, "floors": np.float32, "keys": np.uint64, "labels": np.int64}


def _write(path: Path, learnt: Reindexing) -> None:
    about = {"format": FORMAT, **{name: getattr(learnt, name) for name in _ABOUT}}
    arrays: dict[str, Any] = {name: getattr(learnt, name) for name in _ARRAYS} | dict(learnt.weights)
    _put(path, lambda file: np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays))


def _read(path: Path, tenant: str) -> Reindexing:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about.pop("format") != FORMAT:
                raise DataError(f"{path} is of another version of Casemate; {FIT}")
            arrays = {name: file[name].astype(kind, casting="no") for name, kind in _ARRAYS.items()}
            weights = {name: file[name].astype(np.float32, casting="no") for name in SHAPES if name in file.files}
        learnt = Reindexing(**about, **arrays, weights=weights)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is no re-indexing, or damaged ({type(error).__name__}); {FIT}") from error
    if learnt.tenant != tenant or not _sound(learnt):
        raise DataError(f"{path} makes no sense for tenant {tenant!r}; {FIT}")
    return learnt


def _sound(r: Reindexing) -> bool:
    """Whether shapes fit one another and numbers are numbers: a damaged map must not rank."""
    C, dim = r.centroids.shape
    fits = r.mode in MODES and r.floors.shape == (C,) and r.keys.shape == r.labels.shape
    if not fits or (r.mode == "gate") == bool(r.weights) or not (0 <= r.strength <= 1 and 0 <= r.penalty < np.inf):
        return False
    if r.weights:
        hidden = len(r.weights.get("b1", ()))
        expected = {"W1": (dim, hidden), "b1": (hidden,), "W2": (hidden, dim), "b2": (dim,)}
        if {name: w.shape for name, w in r.weights.items()} != expected:
            return False
    ordered = bool((r.keys[1:] > r.keys[:-1]).all()) and bool(((r.labels >= NOISE) & (r.labels < C)).all())
    return ordered and all(np.isfinite(a).all() for a in (r.centroids, r.floors, *r.weights.values()))


def _put(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Makes a file, whole or not at all, readable by its owner only."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def distinct(keys: Sequence[int], labels: Labels) -> tuple[Keys, Labels]:
    """Keys, each once and sorted, and their topics; of equal texts the first counts."""
    found, first = np.unique(np.array(keys, np.uint64), return_index=True)
    return found, labels[first]
