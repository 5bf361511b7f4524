"""Cost of the parsing process on harmless files, and its limits on hostile ones.

Harmless: the clinic's documents as HTML, CPU-seconds to index them, with files parsed in the process of its own (both
processes counted) and in the program itself. Hostile: seconds until each file is left.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks import SEED, save
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.demo.clinic import write_corpus
from casemate.errors import DataError
from casemate.guard.guard import Guard
from casemate.rag import corpus as corpus_module
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest
from casemate.rag.parsing import READERS
from casemate.rag.parsing_process import PARSER
from casemate.rag.pipeline import Rag
from tests.unit.test_parsing_process import HOSTILE

ROUNDS = 3


def cpu_s() -> float:
    """CPU-seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def index_s(pages: Path, model: MiniLM) -> float:
    """CPU-seconds to index a folder into an empty index."""
    began = cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        index = SqliteIndex(Path(folder) / "index.db")
        guard = Guard(Rag(model, index, ExtractiveGenerator()), ())
        ingest = Ingest(guard, Corpus(pages))
        asyncio.run(ingest.run(ingest.plan()))
        index.close()
    PARSER.close()
    return cpu_s() - began


class InProgram:
    """The parser without a process of its own."""

    parse = staticmethod(lambda kind, raw: READERS[kind](raw))


def main() -> None:
    """Measures both in turn; writes ``results/parsing.json``."""
    model = MiniLM()
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "clinic", seed=SEED)
        pages = folder / "pages"
        pages.mkdir()
        for i, source in enumerate(Corpus(folder / "clinic").sources()):
            title, text, _ = source.parse()
            body = "".join(f"<p>{line}</p>" for line in text.split("\n"))
            (pages / f"{i}.html").write_text(f"<title>{title}</title>{body}")
        count = len(list(pages.iterdir()))
        index_s(pages, model)
        for _ in range(ROUNDS):
            inside = _in_program(pages, model)
            ratios.append(index_s(pages, model) / inside)
        hostile = {name: left_s(folder / "hostile", name, make) for name, make in HOSTILE.items()}
    save(
        "parsing",
        {"files": count, "cpu_ratio": {"median": float(np.median(ratios)), "rounds": ratios}, "hostile_s": hostile},
    )


def _in_program(pages: Path, model: MiniLM) -> float:
    with patch.object(corpus_module, "PARSER", InProgram):
        return index_s(pages, model)


def left_s(folder: Path, name: str, make: Callable[[], bytes]) -> dict[str, float]:
    """Seconds and CPU-seconds until one hostile file is left."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(make())
    wall, cpu = time.monotonic(), cpu_s()
    for source in Corpus(folder).sources():
        if source.name == name:
            try:
                source.parse()
            except DataError:
                break
    PARSER.close()
    return {"wall": time.monotonic() - wall, "cpu": cpu_s() - cpu}


if __name__ == "__main__":
    main()
