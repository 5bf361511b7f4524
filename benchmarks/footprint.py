"""Install size by package, CPU seconds of ``import casemate``, peak memory of a search and of indexing the clinic."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import ROOT, SEED, clustered, save
from casemate.backends.embedders.minilm import PACKAGE
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.demo.clinic import write_corpus
from casemate.types import Document

N, DIM = 100_000, 384
IMPORT = "import time; t = time.process_time(); import casemate; print(time.process_time() - t)"
SEARCH = """
import json, resource, sys
from pathlib import Path
import numpy as np
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.indexes.sqlite import SqliteIndex
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


def install_sizes() -> dict[str, float]:
    """Megabytes on disk of each package of the base install, and of the embedder's weights, largest first."""
    code = [file for file in (ROOT / "src/casemate").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    found = {"casemate": sum(file.stat().st_size for file in code) / 2**20}
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        package = distribution(name)
        files = [Path(str(package.locate_file(file))) for file in package.files or ()]
        found[name] = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
        wanted += package.requires or ()
    model = next(file for file in distribution(PACKAGE).files or () if file.name == "model.safetensors")
    found["weights"] = Path(str(distribution(PACKAGE).locate_file(model))).stat().st_size / 2**20
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def main() -> None:
    """Measures everything in new processes."""
    sizes = install_sizes()
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
            "install_mb": sum(sizes.values()),
            "install_mb_by_package": {name: round(size, 1) for name, size in sizes.items() if size >= 0.05},
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
