"""Stores re-indexings: numbered version files per tenant, one of them active.

``fitting`` writes them, the defense ``reindex`` reads them. The index keeps the embedder's vectors, which other
defenses rely on. A file contains the mapping, the topics and the acceptance metrics, and no text.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from casemate.errors import DataError
from casemate.maths.clustering import NOISE, silhouette
from casemate.protocols import Index
from casemate.reindexing.space import (
    ADAPTER_FILES,
    MODES,
    NO_VECTORS,
    TUNED,
    WEIGHT_NAMES,
    Adapter,
    Reindexing,
    adapter_digest,
    chunk_key,
)
from casemate.runtime.file_lock import lock_file
from casemate.runtime.files import write_atomically
from casemate.types import Vector

FORMAT = 2
RUN_REINDEX = "run 'casemate reindex'"
MAX_CHANGED = 0.1  # share of chunks that may be new or removed before re-indexing is due again
MAX_SEPARATION_LOSS = 0.05  # loss of silhouette before re-indexing is due again
SAMPLE = 5000  # chunks from which the silhouette is computed


def reindex_due(reindexing: Reindexing, index: Index) -> str:
    """Returns why a collection must be re-indexed again; empty if it need not. Scans the collection once."""
    stride = max(1, index.moments(reindexing.tenant).n // SAMPLE)
    present, sample, count = set[int](), list[Vector](), 0
    sample_keys = list[int]()
    for documents, vectors in index.scan(reindexing.tenant):
        keys = [chunk_key(d) for d in documents]
        present.update(keys)
        first = -count % stride
        sample.append(np.array(vectors[first::stride]))
        sample_keys += keys[first::stride]
        count += len(documents)
    known = {int(k) for k in reindexing.keys}
    new, removed = len(present - known), len(known - present)
    if max(new, removed) > MAX_CHANGED * max(len(known), 1):
        return f"{new} chunks are new and {removed} were removed since training on {len(known)}"
    then = reindexing.report.get("silhouette", {}).get("after")
    if then is None or not sample_keys:
        return ""
    _, Z, labels = reindexing.before_and_after(np.array(sample_keys, np.uint64), np.concatenate(sample))
    now = silhouette(Z, labels)
    if now >= then - MAX_SEPARATION_LOSS:
        return ""
    return f"topic separation (silhouette) fell to {now:.3f}; it was {then:.3f} after training"


class ReindexRegistry:
    """The versions of one tenant's re-indexing in a folder: ``NNN.npz``, and ``current`` with the active number.

    A fine-tuned encoder is stored beside its version as a peft folder ``NNN.lora``. It is loaded only if its files
    match the SHA-256 in ``NNN.npz``.
    """

    def __init__(self, folder: Path, tenant: str) -> None:
        self.folder = folder / hashlib.sha256(tenant.encode()).hexdigest()[:16]
        self.tenant = tenant
        self._state: tuple[int, int, int] | None = None
        self._loaded: Reindexing | None = None

    def versions(self) -> list[int]:
        """Returns the numbers of all versions, refused ones included, oldest first."""
        return sorted(int(p.stem) for p in self.folder.glob("*.npz") if p.stem.isdigit())

    def current(self) -> Reindexing | None:
        """The active version, read again when the file changes; None if there is none; errors as for ``read``."""
        try:
            found = (self.folder / "current").stat()
        except OSError:
            return None
        state = (found.st_mtime_ns, found.st_ino, found.st_size)
        if state != self._state:
            self._loaded = self.read(self._active_number())
            self._state = state
        return self._loaded

    def read(self, version: int) -> Reindexing:
        """Reads one version; ``DataError``: its file is damaged, missing, or of another format."""
        return replace(_read(self._path(version), self.tenant), version=version)

    def readable(self) -> Iterator[Reindexing]:
        """Reads all versions, oldest first, without those for which ``read`` raises ``DataError``."""
        for version in self.versions():
            with suppress(DataError):
                yield self.read(version)

    def write(self, reindexing: Reindexing) -> Reindexing:
        """Adds a version and activates it if it was accepted. The encoder of a refused version is not stored.

        Raises:
            BackendError: If the folder cannot be written; the active version does not change.
        """
        stored = reindexing if reindexing.accepted else replace(reindexing, adapter={}, tuned=NO_VECTORS)
        with self._lock("lock"):
            written = replace(reindexing, version=max(self.versions(), default=0) + 1)
            path = self._path(written.version)
            shutil.rmtree(path.with_suffix(".lora"), ignore_errors=True)  # left by a killed process
            for name, content in stored.adapter.items():
                write_atomically(path.with_suffix(".lora") / name, content)
            _write(path, stored)
            if written.accepted:
                self._activate(written.version)
        return written

    @contextmanager
    def training_lock(self) -> Iterator[Path]:
        """Admits one training process per tenant; yields the path of its checkpoint.

        The checkpoint is removed when the block succeeds. An interrupted process leaves it for the next one.

        Raises:
            DataError: If another process holds the lock.
        """
        with self._lock("learning", wait=False):
            yield (checkpoint := self.folder / "training.pt")
            checkpoint.unlink(missing_ok=True)

    @contextmanager
    def _lock(self, name: str, wait: bool = True) -> Iterator[None]:
        """Locks a file among processes. The operating system releases the lock when the process ends."""
        with lock_file(self.folder / f".{name}", wait=wait) as handle:
            if handle is None:
                raise DataError(
                    f"another process is re-indexing tenant {self.tenant!r} in {self.folder}; wait for it or end it"
                )
            yield

    def rollback(self, version: int | None = None) -> Reindexing:
        """Activates an earlier version; None: the last accepted one before the active version.

        Raises:
            DataError: If there is none, or it was refused.
        """
        if version is None:
            now = self._active_number() if (self.folder / "current").exists() else 0
            earlier = [r.version for r in self.readable() if r.version < now and r.accepted]
            if not earlier:
                raise DataError(f"tenant {self.tenant!r} has no accepted version before {now} to roll back to")
            version = earlier[-1]
        if version not in self.versions():
            known = ", ".join(map(str, self.versions())) or "none"
            raise DataError(f"tenant {self.tenant!r} has no version {version}; known: {known}")
        found = self.read(version)
        if not found.accepted:
            raise DataError(f"version {version} was refused: {found.reason}")
        self._activate(version)
        return found

    def _active_number(self) -> int:
        text = (self.folder / "current").read_text(encoding="utf-8", errors="replace").strip()
        if not text.isdecimal():
            raise DataError(f"{self.folder / 'current'} is damaged; {RUN_REINDEX}")
        return int(text)

    def _path(self, version: int) -> Path:
        return self.folder / f"{version:03d}.npz"

    def _activate(self, version: int) -> None:
        write_atomically(self.folder / "current", f"{version}\n".encode())


_ABOUT = ("mode", "tenant", "fingerprint", "strength", "penalty", "accepted", "reason", "report", "at")
_ARRAYS = {"centroids": np.float32, "floors": np.float32, "keys": np.uint64, "labels": np.int64}
_OPTIONAL_ARRAYS = {"tuned": np.float32}  # arrays that older files lack


def _write(path: Path, reindexing: Reindexing) -> None:
    about = {"format": FORMAT, **{name: getattr(reindexing, name) for name in _ABOUT}}
    about["adapter"] = adapter_digest(reindexing.adapter) if reindexing.adapter else ""
    arrays: dict[str, Any] = {name: getattr(reindexing, name) for name in (*_ARRAYS, *_OPTIONAL_ARRAYS)} | dict(
        reindexing.weights
    )
    whole = io.BytesIO()
    np.savez_compressed(whole, about=np.array(json.dumps(about)), **arrays)
    write_atomically(path, whole.getvalue())


def _read(path: Path, tenant: str) -> Reindexing:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about.pop("format") != FORMAT:
                raise DataError(f"{path} was written by another version of Casemate; {RUN_REINDEX}")
            dtypes = _ARRAYS | {name: dtype for name, dtype in _OPTIONAL_ARRAYS.items() if name in file.files}
            arrays = {name: file[name].astype(dtype, casting="no") for name, dtype in dtypes.items()}
            weights = {name: file[name].astype(np.float32, casting="no") for name in WEIGHT_NAMES if name in file.files}
        pinned = about.pop("adapter", "")
        adapter = _adapter(path.with_suffix(".lora"), pinned) if pinned else {}
        reindexing = Reindexing(**about, **arrays, weights=weights, adapter=adapter)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or not a re-indexing ({type(error).__name__}); {RUN_REINDEX}") from error
    if reindexing.tenant != tenant or not _sound(reindexing):
        raise DataError(f"{path} is inconsistent or belongs to another tenant than {tenant!r}; {RUN_REINDEX}")
    return reindexing


def _adapter(folder: Path, pinned: str) -> Adapter:
    """Reads the encoder's files and verifies their digest."""
    found = {name: (folder / name).read_bytes() for name in ADAPTER_FILES}
    if adapter_digest(found) != pinned:
        raise DataError(f"the adapter files in {folder} were changed after training; {RUN_REINDEX}")
    return found


def _sound(r: Reindexing) -> bool:
    """Whether shapes are consistent and values finite: a damaged map must not rank."""
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
