"""Scaling: five million vectors on one machine, the cost of each unit of work, and a cluster of two workers.

1. ``vectors``: up to 5,000,000 clustered unit vectors of 384 dimensions, float16 on disk, with an int8 copy for search.
   A search scans the copy in blocks and rescores the best candidates in float16. Detection computes the similarity
   statistics from the moments of the stored vectors. Both by the number of vectors.
2. ``units``: CPU seconds of one chunk, row, merge, clustering, decision, question.
3. ``cluster``: the same embedding with one and with two Ray workers.
4. ``plan``: extrapolation to 10^7 to 10^9 chunks, from 1 and 2 and the prices below.

Costs are CPU seconds of one core unless they are called wall, because the machine may be shared. Name parts to measure
only these: ``python -m benchmarks.scale units plan``.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, ingest, save, saved
from casemate.app import open_app
from casemate.backends.clusters.ray import RayCluster
from casemate.backends.embedders.minilm import MiniLM
from casemate.config import Config
from casemate.demo.clinic import write_corpus
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.clustering import TopicSettings, assign_topics, find_topics
from casemate.maths.moments import CorpusMoments
from casemate.redteam.campaigns.own import OwnMembershipCampaign
from casemate.runtime.blas_threads import single_blas_thread
from casemate.runtime.executor import Executor, LocalExecutor, batches
from casemate.system import EmbeddingTask
from casemate.types import Document, Hit, Retrieval

DIM, BLOCK, CLUSTERS = 384, 20_000, 2000
SIZES = (10_000, 100_000, 1_000_000, 5_000_000)
K, CANDIDATES, BATCH = 10, 64, 16
MARK = "CASEMATE_SCALE"
PRICES = {"core_hour": 0.04, "ram_gb_month": 3.0, "ssd_gb_month": 0.10}
"""Assumed prices in US dollars; replace them by yours."""
TEXT_KB, LINKS = 1.0, 200
"""Assumed kilobytes of text and keys of a chunk, and bytes of HNSW links per vector (32 links, and upper levels)."""


def main() -> None:
    """Measures all or the named parts in a temporary folder; other results are kept."""
    named = sys.argv[1:]
    found = saved("scale") if named else {}
    with tempfile.TemporaryDirectory(prefix="casemate-scale-") as folder, single_blas_thread():
        for name, measure in {"vectors": vectors, "units": units, "cluster": cluster}.items():
            if not named or name in named:
                found[name] = measure(Path(folder)) | {"load": os.getloadavg()[0]}
    save("scale", found | {"plan": plan(found)})


def plan(found: dict[str, Any]) -> dict[str, Any]:
    """Requirements of 10^7 to 10^9 chunks of 180 tokens: core hours, gigabytes, dollars."""
    each, largest = found["units"], found["vectors"][str(max(SIZES))]
    rows = {}
    for n in (10**7, 10**8, 10**9):
        embed = n / each["embed_long_chunks_a_cpu_s"] / 3600
        moments = n / each["moments_rows_a_cpu_s_dim384"] / 3600
        ram = {kind: n * (size * DIM + LINKS) / 1e9 for kind, size in (("float16", 2), ("int8", 1))}
        disk = n * (2 * DIM + 1000 * TEXT_KB) / 1e9
        rows[f"1e{round(math.log10(n))}"] = {
            "embed_core_hours": embed,
            "driver_core_hours": n * each["index_driver_cpu_ms_a_chunk"] / 3.6e6,
            "embed_dollars": embed * PRICES["core_hour"],
            "moments_core_hours": moments,
            "merge_core_s_pieces_of_20000": n / BLOCK * each["merge_cpu_ms_dim384"] / 1e3,
            "graph_ram_gb": ram,
            "graph_ram_dollars_a_month": {kind: gb * PRICES["ram_gb_month"] for kind, gb in ram.items()},
            "disk_gb_float16_and_text": disk,
            "disk_dollars_a_month": disk * PRICES["ssd_gb_month"],
            "scan_cpu_s_a_question": largest["search_cpu_s"] * n / max(SIZES),
            "detection_cpu_us_a_question": largest["detection_cpu_us"],
        }
    questions = 6 * 400 * 2 * 10
    hours = questions * each["campaign_cpu_ms_a_question"] / 3.6e6
    campaign = {"questions": questions, "core_hours": hours, "dollars": hours * PRICES["core_hour"]}
    return {"prices_assumed": PRICES, "chunks": rows, "campaign_of_6_attacks_on_400": campaign}


class Stored:
    """Vectors on disk: float16 for exact scores, int8 for scans."""

    def __init__(self, folder: Path, n: int) -> None:
        self.n = n
        self.half = np.lib.format.open_memmap(folder / "half.npy", "w+", np.float16, (n, DIM))
        self.byte = np.lib.format.open_memmap(folder / "byte.npy", "w+", np.int8, (n, DIM))
        rng = np.random.default_rng(SEED)
        centres = rng.standard_normal((CLUSTERS, DIM), dtype=np.float32)
        self.step = 6 / np.sqrt(DIM) / 127  # six standard deviations of a coordinate; larger values are clipped
        for rows in _blocks(n):
            E = 0.6 * centres[rng.integers(0, CLUSTERS, len(rows))]
            E += rng.standard_normal(E.shape, dtype=np.float32)
            E /= np.linalg.norm(E, axis=1, keepdims=True)
            self.half[rows.start : rows.stop] = E
            self.byte[rows.start : rows.stop] = np.clip(np.round(E / self.step), -127, 127)

    def read(self, rows: range) -> np.ndarray:
        """The float16 vectors, as float32."""
        return self.half[rows.start : rows.stop].astype(np.float32)

    def search(self, Q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions (m, K) and exact scores (m, K) of the nearest among the first n vectors, for Q (m, DIM)."""
        best = np.full((len(Q), CANDIDATES), -np.inf, np.float32)
        at = np.zeros((len(Q), CANDIDATES), np.int64)
        for rows in _blocks(n):
            S = Q @ self.byte[rows.start : rows.stop].astype(np.float32).T  # (m, rows)
            joined = np.hstack([best, S])
            top = np.argpartition(-joined, CANDIDATES, axis=1)[:, :CANDIDATES]
            best = np.take_along_axis(joined, top, axis=1)
            places = np.hstack([at, np.broadcast_to(np.arange(rows.start, rows.stop), S.shape)])
            at = np.take_along_axis(places, top, axis=1)
        exact = np.stack([self.half[i].astype(np.float64) @ q for i, q in zip(at, Q.astype(np.float64), strict=True)])
        order = np.argsort(-exact, axis=1)[:, :K]
        return np.take_along_axis(at, order, axis=1), np.take_along_axis(exact, order, axis=1)

    def scan(self, Q: np.ndarray, n: int) -> Iterator[np.ndarray]:
        """All scores in blocks (m, rows): the reference result."""
        for rows in _blocks(n):
            yield Q.astype(np.float64) @ self.read(rows).astype(np.float64).T


def _blocks(n: int) -> Iterator[range]:
    return (range(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK))


def vectors(folder: Path, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Search and detection by size."""
    began = time.process_time()
    stored = Stored(folder, max(sizes))
    found: dict[str, Any] = {"written_cpu_s": time.process_time() - began}
    rng = np.random.default_rng(SEED + 1)
    near = stored.half[np.sort(rng.choice(min(sizes), BATCH, replace=False))].astype(np.float32)
    near += 0.04 * rng.standard_normal(near.shape, dtype=np.float32)
    Q = (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)
    held, cost = _moments(stored, sizes)
    for n in sizes:
        found[str(n)] = {"moments_cpu_s": cost[n]} | _searched(stored, Q, n) | _checked(stored, Q, n, held[n])
        print(n, found[str(n)], file=sys.stderr)
    rounds = [{n: _decision(held[n], Q) for n in sizes} for _ in range(5)]
    for n in sizes:
        found[str(n)]["detection_cpu_us"] = 1e6 * min(r[n] for r in rounds)
    first, last = (found[str(n)]["detection_cpu_us"] for n in (min(sizes), max(sizes)))
    status = Path("/proc/self/status").read_text().splitlines()
    memory = {
        line.split(":")[0]: int(line.split()[1]) / 1e3 for line in status if line.startswith(("RssAnon", "VmHWM"))
    }
    return found | {
        "detection_ratio_of_largest_to_smallest": last / first,
        "bytes_on_disk_per_vector": {"float16": 2 * DIM, "int8": DIM},
        "moments_mb": 8 * DIM * (DIM + 1) / 1e6,
        "memory_mb_anonymous_after": memory["RssAnon"],
        "memory_mb_peak_with_mapped_files": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def _moments(stored: Stored, sizes: tuple[int, ...]) -> tuple[dict[int, CorpusMoments], dict[int, float]]:
    """Moments of the first n vectors for each size n, and CPU seconds from the start."""
    held, cost, began = {}, {}, time.process_time()
    pieces = ((rows.stop, stored.read(rows)) for rows in _blocks(stored.n))
    for stop, total in summed(LocalExecutor(), pieces):
        for n in sizes:
            if stop == n or (n < BLOCK and n not in held):
                part = total if stop == n else CorpusMoments.of(stored.read(range(n)))
                held[n], cost[n] = part, time.process_time() - began
    return held, cost


def _searched(stored: Stored, Q: np.ndarray, n: int) -> dict[str, float]:
    one = _cpu(lambda: stored.search(Q[:1], n), 3)
    many = _cpu(lambda: stored.search(Q, n), 1)
    return {"search_cpu_s": one, "search_cpu_s_each_of_16": many / len(Q)}


def _checked(stored: Stored, Q: np.ndarray, n: int, held: CorpusMoments) -> dict[str, float]:
    """Recall compared with a full scan, and errors of the similarity statistics from moments."""
    Q = Q[:8]
    found, _ = stored.search(Q, n)
    total, squares = np.zeros(len(Q)), np.zeros(len(Q))
    best, at = np.zeros((len(Q), 0)), np.zeros((len(Q), 0), np.int64)
    for rows, S in zip(_blocks(n), stored.scan(Q, n), strict=True):
        total, squares = total + S.sum(axis=1), squares + (S * S).sum(axis=1)
        best = np.hstack([best, S])
        at = np.hstack([at, np.broadcast_to(np.arange(rows.start, rows.stop), S.shape)])
        top = np.argsort(-best, axis=1)[:, :K]
        best, at = np.take_along_axis(best, top, axis=1), np.take_along_axis(at, top, axis=1)
    mean = total / n
    std = np.sqrt(squares / n - mean**2)
    law = [held.similarity_stats(q) for q in Q]
    return {
        "recall_at_1": float(np.mean(found[:, 0] == at[:, 0])),
        "recall_at_10": float(np.mean([len({*a} & {*b}) / K for a, b in zip(found, at, strict=True)])),
        "std_relative_error": max(abs(b.std / s - 1) for b, s in zip(law, std, strict=True)),
        "mean_error": max(abs(b.mean - m) for b, m in zip(law, mean, strict=True)),
    }


def _decision(moments: CorpusMoments, Q: np.ndarray) -> float:
    """CPU seconds of similarity statistics, threshold and verdict."""
    mirabel = Mirabel(mode="paper")
    hits = tuple(Hit(Document(str(i), "text"), 0.5 - i / 100) for i in range(6))

    def judge() -> None:
        for q in Q:
            mirabel.judge(Retrieval(hits, moments.similarity_stats(q)))

    return _cpu(judge, 100) / len(Q)


def _cpu(call: Callable[[], Any], repeats: int) -> float:
    """CPU-seconds of one call."""
    call()
    began = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - began) / repeats


def units(folder: Path) -> dict[str, Any]:
    """Cost of one unit of each kind of work."""
    rng = np.random.default_rng(SEED)
    found: dict[str, Any] = _embedding(rng)
    for dim in (384, 1024):
        E = rng.standard_normal((4096, dim)).astype(np.float32)
        E /= np.linalg.norm(E, axis=1, keepdims=True)
        part = CorpusMoments.of(E)
        found[f"moments_rows_a_cpu_s_dim{dim}"] = len(E) / _cpu(lambda E=E: CorpusMoments.of(E), 5)
        found[f"merge_cpu_ms_dim{dim}"] = 1e3 * _cpu(lambda part=part: part + part, 50)
        found[f"moments_pickled_mb_dim{dim}"] = (part.scatter.nbytes + part.mean.nbytes) / 1e6
    centres = rng.standard_normal((60, DIM)).astype(np.float32)
    X = centres[rng.integers(0, 60, 5000)] + 0.9 * rng.standard_normal((5000, DIM)).astype(np.float32)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    found["hdbscan_5000_cpu_s"] = _once(lambda: find_topics(X))
    found["kmeans_5000_cpu_s"] = _once(lambda: find_topics(X, TopicSettings(method="kmeans")))
    topics = find_topics(X, TopicSettings(method="kmeans"))
    each = _cpu(lambda: assign_topics(X, topics.centroids, topics.floors), 10) / len(X)
    found["assign_rows_a_cpu_s_50_topics"] = 1 / each
    return found | _campaign(folder / "campaign")


def _embedding(rng: np.random.Generator) -> dict[str, float]:
    embedder = MiniLM(threads=1)
    rates = {}
    for name, words in (("short", 20), ("long", 180)):
        texts = [_text(rng, words) for _ in range(64)]
        tokens = float(np.mean([len(embedder.spans(t)) for t in texts]))
        rates[f"embed_{name}_tokens"] = tokens
        rates[f"embed_{name}_chunks_a_cpu_s"] = len(texts) / _cpu(lambda texts=texts: embedder.embed(texts), 2)
    return rates


def _text(rng: np.random.Generator, words: int) -> str:
    known = (
        "the patient came with pain in the left knee and was told to rest for two weeks before a second visit".split()
    )
    return " ".join(rng.choice(known, words))


def _once(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _campaign(folder: Path) -> dict[str, float]:
    """Indexing and attacking a small clinic, with a scripted reader."""
    folder.mkdir()
    write_corpus(folder / "clinic", count=100)
    config = {
        "rag": {"corpus": str(folder / "clinic"), "k": 3, "index": {"use": "sqlite", "path": f"{folder}/index.db"}},
        "guard": {"defenses": [{"use": "mirabel", "mode": "paper"}]},
        "store": {"use": "sql", "path": f"{folder}/events.db"},
        "redteam": {
            "attacks": ["direct", "mba", "interrogation", "dcmi"],
            "members": 15,
            "nonmembers": 15,
            "folder": f"{folder}/redteam",
        },
    }

    @contextmanager
    def steps(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        began = time.process_time()
        yield lambda count: None
        spent[title] = time.process_time() - began

    spent: dict[str, float] = {}
    with open_app(config) as app:
        embedder, inside = app.guard.rag.embedder, list[float]()
        embed = embedder.embed

        def timed(*args: Any) -> np.ndarray:
            start = time.process_time()
            vectors = embed(*args)
            inside.append(time.process_time() - start)
            return vectors

        embedder.embed = timed  # type: ignore[method-assign]
        began = time.process_time()
        report = ingest(app, folder / "clinic")
        indexing, embedding = time.process_time() - began, sum(inside)
        campaign = asyncio.run(OwnMembershipCampaign(app).run(steps))
    attacking = sum(seconds for title, seconds in spent.items() if title.startswith("attacking"))
    return {
        "index_clinic_cpu_ms_a_chunk": 1e3 * indexing / report.chunks,
        "index_driver_cpu_ms_a_chunk": 1e3 * (indexing - embedding) / report.chunks,
        "campaign_questions": campaign.cost["questions"],
        "campaign_cpu_ms_a_question": 1e3 * attacking / campaign.cost["questions"],
    }


@dataclass(frozen=True)
class Moments:
    """Computes the moments of one piece, with its key."""

    read: Callable[[Any], np.ndarray]

    def __call__(self, piece: tuple[int, Any]) -> tuple[int, CorpusMoments]:
        """Sums the vectors that ``read`` returns, in one thread."""
        with single_blas_thread():
            return piece[0], CorpusMoments.of(self.read(piece[1]))


def itself(value: np.ndarray) -> np.ndarray:
    """The value itself: the vectors were sent."""
    return value


def summed(
    spread: Executor, pieces: Iterable[tuple[int, Any]], read: Callable[[Any], np.ndarray] = itself
) -> Iterator[tuple[int, CorpusMoments]]:
    """Maps over the workers, and merges here in the order of the pieces."""
    total = CorpusMoments.empty(DIM)
    for key, part in spread.map(Moments(read), pieces):
        total += part
        yield key, total


@dataclass(frozen=True)
class Rows:
    """Reads rows of a vector file on a worker."""

    path: Path

    def __call__(self, rows: range) -> np.ndarray:
        """The vectors."""
        return np.load(self.path, mmap_mode="r")[rows.start : rows.stop]


def cluster(folder: Path) -> dict[str, Any]:
    """64 batches of 16 chunks on one worker and on two; moments of 100,000 vectors, sent to or read by the worker."""
    rng = np.random.default_rng(SEED)
    texts = [_text(rng, 100) for _ in range(1024)]
    task = EmbeddingTask.of(Config(), MiniLM(threads=1).fingerprint)
    E = rng.standard_normal((100_000, DIM)).astype(np.float32)
    np.save(folder / "E.npy", E)
    ways: dict[str, tuple[Any, ...]] = {
        "moments_sent": ([(r.stop, E[r.start : r.stop]) for r in _blocks(len(E))],),
        "moments_read": ([(r.stop, r) for r in _blocks(len(E))], Rows(folder / "E.npy")),
    }
    os.environ[MARK] = str(os.getpid())
    found: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    for cores in (1, 2):
        with closing(RayCluster("local", cores)) as spread:
            list(spread.map(Timed(task), batches(texts[:32], 16)))  # the workers load the model
            before, began, own = _ray_cpu(), time.perf_counter(), time.process_time()
            useful = sum(spread.map(Timed(task), batches(texts, 16)))
            wall, total = time.perf_counter() - began, _ray_cpu() - before + time.process_time() - own
            moments = {way: _moved(spread, work) for way, work in ways.items()}
        found[f"workers_{cores}"] = {
            "embed_wall_s": wall,
            "embed_work_cpu_s": useful,
            "embed_all_cpu_s": total,
            "embed_useful_share_of_cpu": useful / total,
            **moments,
        }
    found["moments_alone_cpu_s"] = _once(lambda: list(summed(LocalExecutor(), *ways["moments_sent"])))
    walls = [found[f"workers_{cores}"]["embed_wall_s"] for cores in (1, 2)]
    return found | {"embed_wall_efficiency_2": walls[0] / walls[1] / 2}


def _moved(spread: RayCluster, work: tuple[Any, ...]) -> dict[str, float]:
    """Cost of one summation."""
    list(summed(spread, *work))
    began, own, before = time.perf_counter(), time.process_time(), _ray_cpu()
    list(summed(spread, *work))
    driver = time.process_time() - own
    wall = time.perf_counter() - began
    return {"wall_s": wall, "driver_cpu_s": driver, "all_cpu_s": _ray_cpu() - before + driver}


class Timed:
    """CPU seconds of the task on a worker."""

    def __init__(self, task: EmbeddingTask) -> None:
        self.task = task

    def __call__(self, texts: list[str]) -> float:
        """Embeds, and discards the vectors."""
        began = time.process_time()
        self.task(texts)
        return time.process_time() - began


def _ray_cpu() -> float:
    """CPU seconds of all child processes of this one."""
    total = 0.0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={os.getpid()}" in Path(f"/proc/{pid}/environ").read_text(errors="replace"):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return total


if __name__ == "__main__":
    importlib.import_module("benchmarks.scale").main()  # a worker cannot import tasks of __main__
