"""CPU-seconds of ``import casemate``; peak memory of searching 100,000 chunks, and of indexing the demo's clinic."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import SEED, clustered, save
from casemate.backends.sqlite import SqliteIndex
from casemate.demo.clinic import write_corpus
from casemate.types import Document

N, DIM = 100_000, 384
IMPORT = "import time; t = time.process_time(); import casemate; print(time.process_time() - t)"
SEARCH = """
import json, resource, sys
from pathlib import Path
import numpy as np
from casemate.backends.minilm import MiniLM
from casemate.backends.sqlite import SqliteIndex
model, index = MiniLM(), SqliteIndex(Path(sys.argv[1]))
index.open("synthetic", {dim})
for q in model.embed(["one question", "another question"]):
    index.search(q, 10)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
"""
INDEX = """
import resource, subprocess, sys
command = [sys.executable, "-m", "casemate", "index", "clinic"]
subprocess.run(command, cwd=sys.argv[1], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def main() -> None:
    """Measures all in fresh processes."""
    costs = [float(_python(IMPORT)) for _ in range(5)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.db"
        text = "a sentence of a document that is about as long as most are, and a bit more. " * 10
        index = SqliteIndex(path)
        index.open("synthetic", DIM)
        E = clustered(N, DIM, np.random.default_rng(SEED))
        for start in range(0, N, 10_000):
            part = range(start, start + 10_000)
            index.add([Document(f"d{i}", text) for i in part], E[start : start + 10_000])
        index.close()
        write_corpus(Path(folder) / "clinic")
        index_peak = float(_python(INDEX, folder))
        peak = float(json.loads(_python(SEARCH.format(dim=DIM), str(path))))
    matrix_mb, texts_mb = N * DIM * 4 / 2**20, N * len(text) / 2**20
    save(
        "footprint",
        {
            "import_cpu_s": min(costs),
            "search_peak_mb": peak,
            "matrix_mb": matrix_mb,
            "texts_mb": texts_mb,
            "beyond_matrix_mb": peak - matrix_mb,
            "allowed_mb": matrix_mb + texts_mb + 300,
            "index_clinic_peak_mb": index_peak,
        },
    )


def _python(code: str, *words: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
