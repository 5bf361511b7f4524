"""Separation of written attack questions from benign ones by the guard's score, for three fits of its weights.

    python -m benchmarks.real.score_limits WORK

Corpus: NFCorpus; `WORK` is the folder that the step ``retrieve`` leaves. Thresholds are fitted on half of the dev
questions, false alarms measured on the test questions. The weights:

- ``calibration``: those of the product, fitted on the other half and on scripted probes.
- ``people``: fitted on questions that users wrote about single paragraphs of SQuAD, and on broad questions about the
  same paragraphs. Corpus, documents and authors differ.
- ``bound``: fitted on written questions about other members of the same sample. This is the best result of the six
  features, not a result of the product, which has no such questions.

Scores are computed without single sentences and without jitter. So they are slightly below those of the guard.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import DATA, SEED, read_rows, save
from benchmarks.real import files
from benchmarks.real.sample import K, benign_log, benign_test
from benchmarks.real.written import RECORDED, trials
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.calibration.file import read_calibrations
from casemate.guard.calibration.fitting import CalibrationSettings, _Fitter
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths import stats
from casemate.maths.calibration import Calibration
from casemate.papers.laboratory import relevant
from casemate.rag.pipeline import Rag
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.text.synthetic_questions import FEW_WORDS, generate_questions
from casemate.types import Document

RATES = (0.01, 0.02)
PARAGRAPHS, QUESTIONS, MEMBERS = 200, 200, 60
"""Number of SQuAD paragraphs, of questions of each kind about them, and of NFCorpus members."""
ATTACKS = ("natural", "natural_title")
"""The attacks whose questions the guard withholds least often."""


def main() -> None:
    """Fits, and writes the rates."""
    system = Path(sys.argv[1]) / "system_nfcorpus"
    embedder = CachedEmbedder(MiniLM(threads=1), megabytes=400)
    calibration = read_calibrations(system / "calibration.json")["default"]
    people = asyncio.run(_people(embedder))
    with closing(SqliteIndex(system / "index.db")) as index:
        index.open(embedder.fingerprint, embedder.dim)
        found = asyncio.run(measured(Rag(embedder, index, SimulatedReader()), calibration, people))
    sizes = {"paragraphs": PARAGRAPHS, "questions": QUESTIONS, "members": MEMBERS, "k": K}
    save("real_score_limits", sizes | found)


def _fitter(rag: Rag) -> _Fitter:
    return _Fitter(Mirabel(embedder=rag.embedder, index=rag.index), rag, CalibrationSettings(k=K))


async def _people(embedder: CachedEmbedder) -> Calibration:
    """Weights from users' questions about paragraphs of SQuAD."""
    rows = {name: read_rows(f"squad/{name}.jsonl.gz") for name in ("corpus", "queries")}
    documents = [Document(r["_id"], r["text"], r["title"]) for r in rows["corpus"][:PARAGRAPHS]]
    own = relevant(DATA / "squad/qrels.tsv")
    held = {d.source for d in documents}
    asked = [(r["text"], own[r["_id"]]) for r in rows["queries"] if own.get(r["_id"]) in held]
    rng = np.random.default_rng(SEED)
    probes = [("people", *asked[i][::-1]) for i in rng.permutation(len(asked))[:QUESTIONS]]
    harmless = [("", "", text) for text in generate_questions(documents, QUESTIONS, rng, FEW_WORDS)]
    with tempfile.TemporaryDirectory() as folder, closing(SqliteIndex(Path(folder) / "index.db")) as index:
        index.open(embedder.fingerprint, embedder.dim)
        index.add(documents, embedder.embed([d.content for d in documents]))
        fitter = _fitter(Rag(embedder, index, SimulatedReader()))
        fitted = fitter.fit_weights(*await fitter.retrieve(harmless, probes))
    assert fitted is not None
    return fitted


async def measured(rag: Rag, product: Calibration, people: Calibration) -> dict[str, Any]:
    """Rates by weights."""
    fitter = _fitter(rag)
    rows = [row for row in trials(files.read(RECORDED["nfcorpus"])[1:], ATTACKS) if row["member"]]
    names = sorted({row["candidate"] for row in rows})[:MEMBERS]
    asked = [(r["attack"], r["candidate"], text) for r in rows if r["candidate"] in names for text in r["questions"]]
    logged, tested = ([("", "", text) for text in read("nfcorpus")] for read in (benign_log, benign_test))
    dev, test, probes = await fitter.retrieve(logged, tested, asked)
    halves = [set(names[::2]), set(names[1::2])]
    bound = []
    for half in halves:
        fitted = fitter.fit_weights(dev[::2], [p for p in probes if p.source in half])
        assert fitted is not None
        bound.append((fitted, [p for p in probes if p.source not in half]))
    cases: Mapping[str, Sequence[tuple[Calibration, Sequence[Any]]]] = {
        "calibration": [(product, probes)],
        "people": [(replace(product, weights=people.weights), probes)],
        "bound": bound,
    }
    found: dict[str, Any] = {}
    for name, parts in cases.items():
        found[name] = {"weights": [dict(zip(c.features, c.weights, strict=True)) for c, _ in parts]}
        for rate in RATES:
            found[name][str(rate)] = _shares(fitter, parts, dev[1::2], test, rate)
    return found


def _shares(fitter: _Fitter, parts: Any, judged: Any, test: Any, rate: float) -> dict[str, Any]:
    """Share of each attack's questions above the threshold, among those with the record in the context."""
    caught: dict[str, list[bool]] = {}
    for calibration, probes in parts:
        threshold = stats.conformal_threshold(sorted(_largest(fitter, calibration, q) for q in judged), rate)
        for probe in probes:
            own = fitter._features(probe).get(probe.source)
            if own is not None:
                caught.setdefault(probe.attack, []).append(calibration.score(own) > threshold)
        if "harmless" not in caught:  # each question once, for its interval
            caught["harmless"] = [_largest(fitter, calibration, q) > threshold for q in test]
    return {name: stats.proportion(sum(flags), len(flags)) for name, flags in sorted(caught.items())}


def _largest(fitter: _Fitter, calibration: Calibration, question: Any) -> float:
    return max((calibration.score(f) for f in fitter._features(question).values()), default=-np.inf)


if __name__ == "__main__":
    main()
