"""Proof of ownership: power against copies of a collection, and p-values of systems without one.

``python -m benchmarks.ownership [corpus ...] [model=FILE]`` plants twenty records among documents of NFCorpus and
SQuAD. A thief copies all of them, half, or a fifth, and answers with the extractive generator or the **simulated**
reader.

An informed thief knows the design, but not the key. It removes every document with a name that no other document
contains: three consecutive words that occur in this document only, at least twice. ``innocent``: the collection without
the records. With a model, the thief paraphrases each planted record. Other documents stay as they are, because no
question depends on them.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT, SEED, before, code_digest, read_rows, save
from benchmarks.kept import Kept
from benchmarks.real import files
from benchmarks.real.recorded_model import RecordedModel
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.guard import Guard
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKey, HoneytokenKeyFile, HoneytokenRecord
from casemate.monitor.honeytokens.ownership import ownership_questions, ownership_test
from casemate.monitor.honeytokens.planting import PlantingSettings, find_records, plant_records
from casemate.protocols import Embedder, Generator
from casemate.rag.pipeline import Rag, join_stream
from casemate.types import Document, Prompt, Query

DOCUMENTS, RECORDS = 600, 20
SHARES = {"all": 1.0, "half": 0.5, "a fifth": 0.2}
CORPORA = ("nfcorpus", "squad")
REWRITE = "Rewrite this text in other words. Change every sentence, and keep all facts. Write only the new text."
CAPITALIZED = re.compile(r"\b[A-Z]\w+ [A-Z]\w+ [A-Z]\w+\b")


def main() -> None:
    """Measures both corpora."""
    model = next((a.removeprefix("model=") for a in sys.argv[1:] if a.startswith("model=")), "")
    name = "_".join(["ownership", *([files.short_name(Path(model))] if model else [])])
    results = before(name, {"documents": DOCUMENTS, "records": RECORDS})
    for corpus in [a for a in sys.argv[1:] if "=" not in a] or CORPORA:
        with tempfile.TemporaryDirectory() as folder:
            embedder = Kept(Path("/tmp/casemate-ownership.npz"))
            found = asyncio.run(_measured(corpus, Path(folder), embedder, model))
            embedder.save()
        results["corpora"][corpus] = {"code": code_digest(), "model": Path(model).name, **found}
        save(name, results)


async def _measured(corpus: str, folder: Path, embedder: Embedder, model: str) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    every = [Document(r["_id"], r["text"], r.get("title", "")) for r in read_rows(f"{corpus}/corpus.jsonl.gz")]
    plain = [every[i] for i in rng.permutation(len(every))[:DOCUMENTS]]
    keys = HoneytokenKeyFile(folder / "key.json")
    with closing(_index(folder / "own.db", embedder)) as index:
        guard = Guard(Rag(embedder, index, ExtractiveGenerator(embedder=embedder)), [])
        await guard.add(plain)
        await plant_records(guard, keys, PlantingSettings(style="article"), RECORDS)
        copied = [d for piece, _ in index.scan("default") for d in piece]
        key = keys.load_or_create()
        records = find_records(index, key).records
    drawn = rng.permutation(len(copied))
    thieves = {name: [copied[i] for i in drawn[: int(share * len(copied))]] for name, share in SHARES.items()}
    kept = _filtered(copied)
    thieves |= {"informed": kept, "innocent": plain}
    if model:
        thieves["paraphrased"] = await _paraphrased(copied, model)
    readers: dict[str, Generator] = {
        "extractive": ExtractiveGenerator(embedder=embedder),
        "simulated": SimulatedReader(),
    }
    measured: dict[str, Any] = {
        f"{thief}, {name}": await _suspect(folder / f"{thief}-{name}.db", documents, embedder, reader, key, records)
        for thief, documents in thieves.items()
        for name, reader in readers.items()
    }
    lost = sum(d in plain for d in copied) - sum(d in plain for d in kept)
    left = sum(d.source.startswith("archive/") for d in kept)
    return {"questions": 4 * len(records), "informed": {"documents_lost": lost, "records_left": left}, **measured}


async def _paraphrased(documents: Sequence[Document], model: str) -> list[Document]:
    """The documents with paraphrased records. If the model's answer is empty, the record is lost."""
    writer = RecordedModel(Path(model), ROOT / f"build/ownership/{Path(model).stem}.jsonl.gz", 160)
    planted = [document for document in documents if document.source.startswith("archive/")]
    asked = (join_stream(writer.stream(Prompt(f"{REWRITE}\n\n{d.content}", (), ""))) for d in planted)
    texts = dict(zip((d.id for d in planted), await asyncio.gather(*asked), strict=True))
    found = [replace(d, title="", text=texts[d.id]) if d.id in texts else d for d in documents]
    return [d for d in found if d.text.strip()]


def _filtered(documents: Sequence[Document]) -> list[Document]:
    names = [Counter(CAPITALIZED.findall(d.content)) for d in documents]
    holding = Counter(name for found in names for name in found)
    return [
        d
        for d, found in zip(documents, names, strict=True)
        if not any(count > 1 and holding[name] == 1 for name, count in found.items())
    ]


def _index(file: Path, embedder: Embedder) -> SqliteIndex:
    index = SqliteIndex(file)
    index.open(embedder.fingerprint, embedder.dim)
    return index


async def _suspect(
    file: Path,
    documents: Sequence[Document],
    embedder: Embedder,
    reader: Generator,
    key: HoneytokenKey,
    records: Sequence[HoneytokenRecord],
) -> dict[str, float]:
    with closing(_index(file, embedder)) as index:
        suspect = Guard(Rag(embedder, index, reader), [])
        await suspect.add(documents)
        asked = [(q, (await suspect.ask(Query(q.text))).text) for q in ownership_questions(key, records)]
    return ownership_test(asked)._asdict()


if __name__ == "__main__":
    main()
