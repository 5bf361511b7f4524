"""``casemate attach`` on an existing Postgres table: rows per second, CPU time, and memory by size.

Each size is read in its own process, so that peak memory is measured separately. On a shared machine wall-clock time is
unreliable. The CPU seconds of reader and server give the best rate that two free cores could reach.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import SEED, save
from casemate.backends.collections.pgvector_table import PgvectorTable
from casemate.backends.indexes.attached import AttachedIndex
from casemate.types import Secret

DIM, PIECE, TEXT = 384, 10_000, "a sentence of some length that stands for what a chunk says. " * 8
SIZES = (100_000, 400_000)


def main(sizes: tuple[int, ...] = SIZES) -> None:
    """Fills tables and attaches them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pgserver
    folder = tempfile.mkdtemp(prefix="casemate-pg-")
    server = pgserver.get_server(folder, cleanup_mode="stop")
    try:
        results = {}
        for n in sizes:
            fill(server.get_uri(), f"docs{n}", n)
            results[str(n)] = measured(server.get_uri(), f"docs{n}", n, folder)
            print(n, results[str(n)], file=sys.stderr)
        save("attach", {"dim": DIM, "cores": os.cpu_count(), "load_after": os.getloadavg()[0], "sizes": results})
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def fill(url: str, table: str, n: int) -> None:
    """Fills a table with typical rows: number, 500 bytes of text, file name, vector."""
    import psycopg

    rng = np.random.default_rng(SEED)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE EXTENSION IF NOT EXISTS vector")
        columns = f"id bigint PRIMARY KEY, text text, file text, embedding vector({DIM})"
        db.execute(f"CREATE TABLE {table} ({columns}) WITH (autovacuum_enabled = false)")  # it would add CPU time
        with db.cursor().copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copy:
            copy.write(b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0))
            for start in range(0, n, PIECE):
                X = rng.standard_normal((PIECE, DIM), dtype=np.float32)
                blobs = (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(">f4")
                copy.write(b"".join(packed(i, x) for i, x in enumerate(blobs, start)))
            copy.write(struct.pack(">h", -1))
        db.execute(f"VACUUM ANALYZE {table}")


def packed(i: int, x: np.ndarray) -> bytes:
    """A row in the binary format of COPY."""
    vector = struct.pack(">hh", DIM, 0) + x.tobytes()
    fields = struct.pack(">q", i), TEXT.encode(), f"file {i // 7}".encode(), vector
    return struct.pack(">h", 4) + b"".join(struct.pack(">i", len(f)) + f for f in fields)


def measured(url: str, table: str, n: int, folder: str) -> dict[str, Any]:
    """Attaches the table in a new process, and adds the server's CPU time."""
    postmaster = int(Path(folder, "postmaster.pid").read_text().splitlines()[0])
    time.sleep(2)  # until the connection that filled the table is counted
    before = children_s(postmaster)
    command = [sys.executable, "-m", "benchmarks.attach", "one", url, table]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    time.sleep(2)
    server_s = children_s(postmaster) - before
    pass_s = found["scan_cpu_s"] + server_s
    return found | {
        "server_cpu_s": server_s,
        "rows_per_s_wall": n / found["scan_s"],
        "cpu_s_per_million_rows": 1e6 * pass_s / n,
        "rows_per_s_of_two_free_cores_at_best": 2 * n / pass_s,
    }


def one(url: str, table: str) -> None:
    """Attaches the table, and prints times and memory."""
    with tempfile.TemporaryDirectory() as folder:
        collection = PgvectorTable(Secret(url), table, source="file")
        index = AttachedIndex(collection, Path(folder) / "attached.db")
        index.open("benchmark", DIM)
        base_mb = peak_mb()
        start, times = (time.perf_counter(), time.process_time()), [(0.0, 0.0, 0.0)]

        def tell(rows: int) -> None:
            peak = peak_mb()
            times.append((time.perf_counter() - start[0], time.process_time() - start[1], peak))

        index.attach(tell)
        scan_s, scan_cpu_s, scan_mb = times[-1]
        index.close()
        all_mb = peak_mb()
        print(
            json.dumps(
                {
                    "scan_s": scan_s,
                    "scan_cpu_s": scan_cpu_s,
                    "copies_s": time.perf_counter() - start[0] - scan_s,
                    "copies_cpu_s": time.process_time() - start[1] - scan_cpu_s,
                    "memory_before_mb": base_mb,
                    "memory_of_scan_mb": scan_mb,
                    "memory_peak_mb": all_mb,
                }
            )
        )


def peak_mb() -> float:
    """Peak memory of this process in MB. ``getrusage`` would include the peak of the parent process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def children_s(pid: int) -> float:
    """CPU seconds of a process's finished children: the server's connections."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    one(*sys.argv[2:]) if sys.argv[1:2] == ["one"] else main()
