"""Benchmarks. Each module writes ``benchmarks/results/<name>.json`` and prints the results.

Both terms of a ratio are measured in one run. The file also has the machine, the seed and the commit.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from casemate.app import open_app
from casemate.protocols import EventStore
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest, IngestReport
from casemate.redteam.lab.results import AttackResult, MembershipMetrics
from casemate.runtime.file_lock import lock_file
from casemate.system import App
from casemate.types import Event

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("CASEMATE_DATA", ROOT.parent / "shared/data"))
SEED = 7
LOAD = os.getloadavg()[0]  # load of the machine before the measurement


def save(name: str, results: dict[str, Any]) -> None:
    """Writes the results with the machine, the seed and the commit, so that the measurement can be repeated."""
    about = {
        "benchmark": name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "code": code_digest(),
        "seed": SEED,
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": sys.version.split()[0],
        },
        "versions": dict(_versions()),
        "load_before": LOAD,
    }
    file = ROOT / "benchmarks/results" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(about | {"results": results}, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    print(f"written: {file.relative_to(ROOT)}", file=sys.stderr)


def _versions() -> Iterator[tuple[str, str]]:
    """Names and versions of the installed packages."""
    for package in ("casemate", "numpy", "onnxruntime", "usearch", "torch"):
        with suppress(PackageNotFoundError):
            yield package, version(package)


def _commit() -> str:
    """The commit, with ``-dirty`` if any file except results and recorded answers differs from it.

    Without a repository, the environment variable ``COMMIT`` names it.
    """
    if not (ROOT / ".git").exists():
        return os.environ.get("COMMIT", "unknown")

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    dirty = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/recorded")
    return git("rev-parse", "--short", "HEAD") + "-dirty" * bool(dirty)


@cache
def code_digest() -> str:
    """Digest of the package's code. It also identifies the measured code after a rebase, which changes commit ids."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "src/casemate").rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def saved(name: str) -> dict[str, Any]:
    """The saved results of a benchmark; empty if there are none."""
    file = ROOT / f"benchmarks/results/{name}.json"
    found: dict[str, Any] = json.loads(file.read_text())["results"] if file.exists() else {}
    return found


def before(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The saved results if they were measured with the same sizes; otherwise the sizes and an empty ``corpora``."""
    held = saved(name)
    return held if all(held.get(what) == size for what, size in sizes.items()) else sizes | {"corpora": {}}


@contextmanager
def updating(name: str, sizes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the results of ``before`` and writes them at the end of the block.

    It holds a lock against other processes.
    """
    with lock_file(ROOT / f"build/{name}.lock", wait=True):
        results = before(name, sizes)
        yield results
        save(name, results)


def read_rows(name: str | Path) -> list[dict[str, Any]]:
    """Rows of a gzip-compressed JSONL file of the evaluation data."""
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def nfcorpus_questions(qrels: str) -> list[str]:
    """Questions in a relevance file: ``qrels.tsv`` (test) or ``qrels.dev.tsv``."""
    with (DATA / "nfcorpus" / qrels).open() as file:
        wanted = {line.split("\t")[0] for line in list(file)[1:]}
    return [q["text"] for q in read_rows("nfcorpus/queries.jsonl.gz") if q["_id"] in wanted]


@contextmanager
def nfcorpus_app(out: Collection[str], log: Sequence[str]) -> Iterator[App]:
    """NFCorpus without some documents, guarded by a Mirabel that is calibrated on a log; k = 3."""
    with tempfile.TemporaryDirectory() as folder:
        raw = {
            "rag": {"corpus": str(DATA / "nfcorpus"), "k": 3, "index": {"use": "sqlite", "path": f"{folder}/index.db"}},
            "guard": {"defenses": [{"use": "mirabel", "calibration": f"{folder}/calibration.json"}]},
            "store": {"use": "sql", "path": f"{folder}/events.db"},
        }
        with open_app(raw) as app:
            ingest(app, DATA / "nfcorpus")
            app.index.remove(list(out))
            asyncio.run(app.calibrate(log))
            yield app


def ingest(app: App, corpus: Path) -> IngestReport:
    """Indexes a corpus."""
    work = Ingest(app.guard, Corpus(corpus))
    return asyncio.run(work.run(work.plan()))


@contextmanager
def print_steps(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Prints the title of each step of a campaign (see ``Steps``)."""
    print(f"{title} ({total})", file=sys.stderr, flush=True)
    yield lambda n: None


def both_sides(attacks: Iterable[AttackResult]) -> dict[str, Any]:
    """Metrics of attacks with the guard off and on, without curves."""

    def brief(figures: MembershipMetrics | None) -> dict[str, Any] | None:
        return figures and {k: v for k, v in asdict(figures).items() if k not in ("roc", "histogram")}

    return {attack.name: {"off": brief(attack.off), "on": brief(attack.on)} for attack in attacks}


class MemoryEvents(EventStore):
    """Keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def append(self, event: Event) -> None:
        """See ``EventStore``."""
        self.events.append(event)

    def scan(self, kind: str | None = None, since: datetime | None = None) -> Sequence[Event]:
        """See ``EventStore``."""
        return [e for e in self.events if kind in {None, e.kind}]

    def flush(self, timeout_s: float = 10.0) -> bool:
        """See ``EventStore``."""
        return True


def median_s(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of one call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def clustered(n: int, dim: int, rng: np.random.Generator, clusters: int = 300) -> np.ndarray:
    """Unit vectors in clusters, as embeddings of texts are; float32, (n, dim)."""
    centres = rng.standard_normal((clusters, dim), dtype=np.float32)
    E = np.empty((n, dim), np.float32)
    for start in range(0, n, 100_000):
        part = E[start : start + 100_000]
        part[:] = 0.6 * centres[rng.integers(0, clusters, len(part))] + rng.standard_normal(
            part.shape, dtype=np.float32
        )
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return E


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
