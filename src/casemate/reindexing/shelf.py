"""Where re-indexings are kept: numbered files of each tenant, one of them in force.

Made by ``lab.reindex``, used by ``defenses.reindex``. The index itself is left alone: it keeps the embedder's vectors,
which other defenses judge by. A file holds the map, the topics and the figures by which it was accepted, and no text.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from casemate.errors import DataError
from casemate.protocols import Index
from casemate.reindexing.files import put, unwritable
from casemate.reindexing.residual import SHAPES
from casemate.reindexing.space import MODES, NO_VECTORS, TUNED, Reindexing, key
from casemate.reindexing.topics import NOISE, silhouette
from casemate.reindexing.tuned import FILES, Adapter, digest
from casemate.types import Vector

FORMAT = 1
FIT = "run 'casemate reindex'"
CHANGED = 0.1
"""Share of chunks that may be new or gone before a re-indexing is due again."""
FADED = 0.05
"""By how much the topics' separation may fall before it is due again."""
LOOKED_AT = 5000
"""Chunks that the separation is computed from."""


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
    _, Z, labels = learnt.seen(np.array(kept, np.uint64), np.concatenate(sample))
    now = silhouette(Z, labels)
    return f"topics lie less apart ({now:.3f}) than when it was made ({then:.3f})" if now < then - FADED else ""


class Shelf:
    """The versions of one tenant's re-indexing, in a folder: ``NNN.npz``, and ``current`` with the number in force.

    A fine-tuned encoder lies beside its version, in the folder ``NNN.lora``, as peft reads it; only the files that were
    written are loaded (SHA-256 in ``NNN.npz``).

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
        """Adds a version, and puts it in force if it was accepted; of what was refused, the encoder is not kept.

        Raises:
            BackendError: If the disk is full, or nothing may be written there; what was in force stays so.
        """
        kept = learnt if learnt.accepted else replace(learnt, adapter={}, tuned=NO_VECTORS)
        with self._lock("lock"):
            written = replace(learnt, version=max(self.versions(), default=0) + 1)
            path = self._path(written.version)
            shutil.rmtree(path.with_suffix(".lora"), ignore_errors=True)  # of a program that was killed
            for name, content in kept.adapter.items():
                put(path.with_suffix(".lora") / name, content)
            _write(path, kept)
            if written.accepted:
                self._choose(written.version)
        return written

    @contextmanager
    def learning(self) -> Iterator[Path]:
        """One process at a time learns for a tenant: gives the place of its checkpoint, which is gone afterwards.

        Whoever is interrupted leaves the checkpoint to the next.

        Raises:
            DataError: If another process is at it.
        """
        with self._lock("learning", wait=False):
            yield (checkpoint := self.place / "training.pt")
            checkpoint.unlink(missing_ok=True)

    @contextmanager
    def _lock(self, name: str, wait: bool = True) -> Iterator[None]:
        """Among processes; let go when this one ends, however it ends."""
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.place / f".{name}", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise unwritable(self.place, error) from error
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        except BlockingIOError as error:
            raise DataError(
                f"another process is re-indexing tenant {self.tenant!r} in {self.place}; wait for it, or end it"
            ) from error
        finally:
            os.close(handle)

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
        put(self.place / "current", f"{version}\n".encode())


_ABOUT = ("mode", "tenant", "fingerprint", "strength", "penalty", "accepted", "why", "report", "at")
_ARRAYS = {"centroids": np.float32, "floors": np.float32, "keys": np.uint64, "labels": np.int64}
_LATER = {"tuned": np.float32}
"""Arrays that files of earlier programs lack."""


def _write(path: Path, learnt: Reindexing) -> None:
    about = {"format": FORMAT, **{name: getattr(learnt, name) for name in _ABOUT}}
    about["adapter"] = digest(learnt.adapter) if learnt.adapter else ""
    arrays: dict[str, Any] = {name: getattr(learnt, name) for name in (*_ARRAYS, *_LATER)} | dict(learnt.weights)
    whole = io.BytesIO()
    np.savez_compressed(whole, about=np.array(json.dumps(about)), **arrays)
    put(path, whole.getvalue())


def _read(path: Path, tenant: str) -> Reindexing:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about.pop("format") != FORMAT:
                raise DataError(f"{path} is of another version of Casemate; {FIT}")
            kinds = _ARRAYS | {name: kind for name, kind in _LATER.items() if name in file.files}
            arrays = {name: file[name].astype(kind, casting="no") for name, kind in kinds.items()}
            weights = {name: file[name].astype(np.float32, casting="no") for name in SHAPES if name in file.files}
        pinned = about.pop("adapter", "")
        adapter = _adapter(path.with_suffix(".lora"), pinned) if pinned else {}
        learnt = Reindexing(**about, **arrays, weights=weights, adapter=adapter)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is no re-indexing, or damaged ({type(error).__name__}); {FIT}") from error
    if learnt.tenant != tenant or not _sound(learnt):
        raise DataError(f"{path} makes no sense for tenant {tenant!r}; {FIT}")
    return learnt


def _adapter(folder: Path, pinned: str) -> Adapter:
    """The encoder's files, if they are those that were written."""
    found = {name: (folder / name).read_bytes() for name in FILES}
    if digest(found) != pinned:
        raise DataError(f"the files in {folder} are not those that were trained: they were changed; {FIT}")
    return found


def _sound(r: Reindexing) -> bool:
    """Whether shapes fit one another and numbers are numbers: a damaged map must not rank."""
    C, dim = r.centroids.shape
    fits = r.mode in MODES and r.floors.shape == (C,) and r.keys.shape == r.labels.shape
    mapping, tuned = r.mode in ("adapter", "compatible"), r.mode in TUNED and r.accepted
    fits = fits and mapping == bool(r.weights) and tuned == bool(r.adapter)
    if not fits or not (0 <= r.strength <= 1 and 0 <= r.penalty < np.inf):
        return False
    if tuned and r.tuned.shape != (len(r.keys), dim):
        return False
    if r.weights:
        hidden = len(r.weights.get("b1", ()))
        expected = {"W1": (dim, hidden), "b1": (hidden,), "W2": (hidden, dim), "b2": (dim,)}
        if {name: w.shape for name, w in r.weights.items()} != expected:
            return False
    ordered = bool((r.keys[1:] > r.keys[:-1]).all()) and bool(((r.labels >= NOISE) & (r.labels < C)).all())
    return ordered and all(np.isfinite(a).all() for a in (r.centroids, r.floors, r.tuned, *r.weights.values()))
