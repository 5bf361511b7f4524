"""The fixed sample of each corpus: members and non-members."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, SEED, nfcorpus_questions, read_rows
from casemate.app import open_app
from casemate.demo.clinic import write_corpus
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest
from casemate.redteam.lab.datasets import Split, read_documents, split_from_pools
from casemate.system import App
from casemate.types import Document

CORPORA = ("nfcorpus", "squad", "clinic")
EACH = 100
"""Number of members, and of non-members."""
K = 3
CLINIC_NOTES = 600
FIRST = {"nfcorpus": 2015}
"""Number of further indexed documents of a corpus, in file order; default: all."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Candidates of one corpus.

    Attributes:
        corpus: Its name.
        folder: Where its documents are.
        split: Members and non-members.
    """

    corpus: str
    folder: Path
    split: Split


@contextmanager
def open_sample(corpus: str, each: int = EACH) -> Iterator[Sample]:
    """Draws the sample; the clinic's documents are written into a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = DATA / corpus
        if corpus == "clinic":
            folder = Path(temporary) / "clinic"
            write_corpus(folder, CLINIC_NOTES, SEED)
        files = Corpus(folder)
        every = read_documents(files, {source.name for source in files.sources()})
        documents = [d for d in every if len(d.text.split()) >= 40]
        sample = _draw(corpus, folder, documents, each)
        if corpus in FIRST:
            sample = replace(sample, folder=_cut(sample, every[: FIRST[corpus]], Path(temporary) / corpus))
        yield sample


def _cut(sample: Sample, first: Sequence[Document], folder: Path) -> Path:
    """Writes the first documents and the members into a folder."""
    kept = {d.source: d for d in (*first, *sample.split.members)}
    rows = [{"_id": d.source, "title": d.title, "text": d.text} for d in kept.values()]
    folder.mkdir()
    with gzip.open(folder / "corpus.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def _draw(corpus: str, folder: Path, documents: Sequence[Document], each: int) -> Sample:
    rng = np.random.default_rng(SEED)
    rows = {d.source: i for i, d in enumerate(documents)}
    if corpus == "nfcorpus":  # the published split of Naseh et al.
        named = json.loads((DATA / "mia_riddle/nfcorpus_selected_indices.json").read_text())
        pools = [[rows[name] for name in named[kind] if name in rows] for kind in ("mem_indices", "non_mem_indices")]
        inside, outside = ([int(i) for i in rng.permutation(pool)] for pool in pools)
    else:
        order = [int(i) for i in rng.permutation(len(documents))]
        inside, outside = order[::2], order[1::2]
    nonmembers = outside[: each + each // 2]  # more than needed: near-duplicates of members are left out
    return Sample(corpus, folder, split_from_pools(documents, inside[:each], nonmembers, (each, each), rng))


@contextmanager
def open_guarded(sample: Sample, instructions: str, folder: Path) -> Iterator[App]:
    """The corpus without the non-members, indexed, with the default guard in the product's calibration.

    Args:
        sample: The sample.
        instructions: System prompt of the reader.
        folder: Folder of index and calibration; existing ones are reused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw: dict[str, Any] = {
        "rag": {
            "corpus": str(sample.folder),
            "k": K,
            "instructions": instructions,
            "index": {"use": "sqlite", "path": f"{folder}/index.db"},
        },
        "guard": {"defenses": [{"use": "mirabel", "calibration": f"{folder}/calibration.json"}]},
        "store": {"use": "sql", "path": f"{folder}/events.db"},
    }
    ready = folder / f"ready-{sample.split.fingerprint}"
    with open_app(raw) as app:
        if not ready.exists():
            work = Ingest(app.guard, Corpus(sample.folder))
            asyncio.run(work.run(work.plan()))
            app.index.remove([d.source for d in sample.split.nonmembers])
            asyncio.run(app.calibrate(benign_log(sample.corpus)))
            ready.touch()
        yield app


def benign_log(corpus: str) -> list[str]:
    """Benign questions for the calibration; empty: the product generates synthetic ones."""
    if corpus == "nfcorpus":
        return nfcorpus_questions("qrels.dev.tsv")
    if corpus == "clinic":
        return []
    return _queries(corpus)[::2][:500]


def benign_test(corpus: str) -> list[str]:
    """Further benign questions, to measure false positives."""
    if corpus == "nfcorpus":
        return nfcorpus_questions("qrels.tsv")
    return [] if corpus == "clinic" else _queries(corpus)[1::2][:300]


def _queries(corpus: str) -> list[str]:
    texts = [str(row["text"]) for row in read_rows(f"{corpus}/queries.jsonl.gz")]
    return [texts[i] for i in np.random.default_rng(SEED).permutation(len(texts))]


def digest(*facts: Any) -> str:
    """Digest of JSON values, 24 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()
