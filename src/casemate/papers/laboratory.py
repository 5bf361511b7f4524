"""Shared setting of the experiments: data, index without the non-members, guards, and attack questions.

Expensive results are kept in a folder and reused by other tables: index, answers, trials and calibration.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.config import PluginSpec
from casemate.errors import DataError
from casemate.guard.calibration import file as calibration
from casemate.guard.calibration.fitting import CalibrationSettings, calibrate
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.guard import Guard
from casemate.papers.readers import open_reader, reader_name
from casemate.plugins import build
from casemate.protocols import Embedder, Steps
from casemate.rag.corpus import Corpus, Source
from casemate.rag.ingest import Ingest
from casemate.rag.pipeline import Rag
from casemate.redteam.lab import datasets
from casemate.redteam.lab.datasets import IndexedSource, Split
from casemate.redteam.lab.experiment import digest
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime.blas_threads import single_blas_thread
from casemate.runtime.cached_embedder import CachedEmbedder
from casemate.system import published_attacks
from casemate.types import Document

K = 3
"""Documents in a context, as in the paper's attacks."""
PAPER, OURS = "Mirabel", "calibrated"
"""The guards: the published rule, and the calibrated one."""
BARE = "no guard"
ATTACKS: Mapping[str, PluginSpec] = {
    "S2MIA": PluginSpec(use="s2mia"),
    "MBA": PluginSpec.model_validate({"use": "mba", "policy": "random"}),  # as the paper's authors did
    "IA": PluginSpec.model_validate({"use": "interrogation", "penalty": 1.0}),  # one of the lambdas that they tried
    "direct": PluginSpec(use="direct"),
    "DCMI": PluginSpec(use="dcmi"),
    "MEntA": PluginSpec(use="menta"),
}
"""The paper's attacks, then others."""
CORPUS = (
    "The index has 2,633 documents: NFCorpus without the 1,000 published non-members, in chunks of 256 tokens. The "
    "paper uses 70 % of NFCorpus, each document whole.",
    "The embedder is all-MiniLM-L6-v2, with 384 dimensions. The paper uses BGE-M3, with 1,024.",
)
"""Differences from the papers that apply to every table."""
SPLIT = "mia_riddle/nfcorpus_selected_indices.json"
NFCORPUS = (*(f"nfcorpus/{f}" for f in ("corpus.jsonl.gz", "queries.jsonl.gz", "qrels.tsv", "qrels.dev.tsv")), SPLIT)
"""Files of NFCorpus and of its published split."""
HELP = "contents: docs/how-to/reproduce-the-papers.md"


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes and folders.

    Attributes:
        data: Folder with the evaluation data.
        folder: Folder for intermediate results.
        members: Candidates in the index.
        nonmembers: Candidates outside the index.
        seed: Seed of all draws.
        reader: The language model that answers: a GGUF file, or a model's folder. Empty: the simulated reader, or the
            offline pair.
        draft: The cascade's draft, a smaller model with the vocabulary of the reader.
        passages: Passages per answer of a language model in Mirabel's table 3, at most.
    """

    data: Path
    folder: Path = Path(".casemate/reproduce")
    members: int = 250
    nonmembers: int = 250
    seed: int = 7
    reader: str = ""
    draft: str = ""
    passages: int = 5

    def require(self, *names: str) -> None:
        """Checks that files of the data exist.

        Raises:
            DataError: If one is missing.
        """
        for name in names:
            if not (self.data / name).is_file():
                raise DataError(
                    f"the evaluation data is incomplete: no {name} in {self.data}; give its folder with --data "
                    f"or in CASEMATE_DATA ({HELP})"
                )


@dataclass(frozen=True, slots=True)
class Bench:
    """An unguarded system over an index of its own.

    ``ledger`` stores trials and answers. ``folder`` has the calibrations.
    """

    rag: Rag
    ledger: CampaignStore
    folder: Path
    setting: Setting

    def guards(self, calibrated: Path, rates: Mapping[str, float | None] | None = None) -> dict[str, Guard]:
        """New guards: the published rule, and the calibrated one at its default rate or the given rates."""
        ours = {
            name: Mirabel(significance=rate, calibration=calibrated, embedder=self.rag.embedder, index=self.rag.index)
            for name, rate in (rates or {OURS: None}).items()
        }
        return {name: Guard(self.rag, [m]) for name, m in {PAPER: Mirabel(mode="paper"), **ours}.items()}

    async def calibrated(self, log: Sequence[str], k: int, steps: Steps) -> Path:
        """File with the calibration for this index and these benign questions; created if missing."""
        settings = CalibrationSettings(k=k, seed=self.setting.seed)
        facts = [self._indexed, list(log), repr(settings)]
        path = self.folder / f"calibration-{digest(*facts)}.json"
        if not calibration.read_calibrations(path):
            defense = Mirabel(embedder=self.rag.embedder, index=self.rag.index)
            found = await calibrate(defense, self.rag, published_attacks(), log, settings, steps)
            calibration.write_calibration(path, settings.tenant, found)
        return path

    @property
    def state(self) -> str:
        """Fingerprint of the index, of the program, and of the language model."""
        model = self.setting.reader
        return digest(self._indexed, reader_name(model)) if model else self._indexed

    @property
    def _indexed(self) -> str:
        return digest(self.rag.embedder.fingerprint, dict(self.rag.index.digests()), version("casemate"))


@dataclass(frozen=True, slots=True)
class Lab:
    """NFCorpus without its non-members, and the candidates.

    ``held`` is the indexed content of each member. ``calibrated`` is the calibration from the dev questions;
    ``harmless`` are the test questions.
    """

    setting: Setting
    bench: Bench
    split: Split
    held: Mapping[str, IndexedSource]
    calibrated: Path
    harmless: tuple[str, ...]
    steps: Steps

    @property
    def facts(self) -> dict[str, Any]:
        """Description of the setting."""
        moments, rag = self.bench.rag.index.moments(), self.bench.rag
        return {
            "data": "NFCorpus",
            "documents": len(rag.index.digests()),
            "chunks": moments.n,
            "members": len(self.split.members),
            "nonmembers": len(self.split.nonmembers),
            "near_duplicates_dropped": self.split.dropped,
            "harmless_questions": len(self.harmless),
            "calibrated_on": calibration.read_calibrations(self.calibrated)["default"].source + ", the dev questions",
            "k": K,
            "seed": self.setting.seed,
            "embedder": rag.embedder.fingerprint,
            "reader": reader_name(self.setting.reader),
        }


class CorpusSubset(Corpus):
    """A corpus without some of its sources."""

    def __init__(self, path: Path, out: Collection[str]) -> None:
        super().__init__(path)
        self._out = frozenset(out)

    def sources(self) -> Iterator[Source]:
        return (source for source in super().sources() if source.name not in self._out)


async def bench(setting: Setting, name: str, out: Collection[str], steps: Steps, opened: ExitStack) -> Bench:
    """A system over a data set, the folder ``name``, without the documents ``out``; indexed if necessary."""
    folder = setting.folder / name
    opened.enter_context(single_blas_thread())
    ledger = opened.enter_context(CampaignStore(folder / "ledger.db"))
    index = opened.enter_context(closing(SqliteIndex(folder / "index.db")))
    embedder: Embedder = build("embedder", PluginSpec(use="minilm"))
    reader = open_reader(setting.reader, ledger)
    work = Ingest(Guard(Rag(embedder, index, reader), []), CorpusSubset(setting.data / name, out))
    plan = work.plan()
    if plan.todo or plan.gone:
        with steps(f"indexing {name}: {len(plan.todo)} documents", plan.bytes) as count:
            await work.run(plan, lambda size: count(round(size)))
    return Bench(Rag(CachedEmbedder(embedder), index, reader), ledger, folder, setting)


async def nfcorpus_bench(setting: Setting, steps: Steps, opened: ExitStack) -> Bench:
    """A system over NFCorpus without the 1,000 published non-members, even if fewer are attacked."""
    setting.require(*NFCORPUS)
    return await bench(setting, "nfcorpus", _published(setting)[1], steps, opened)


async def nfcorpus(setting: Setting, steps: Steps, opened: ExitStack) -> Lab:
    """Setting of the paper's attacks."""
    ground = await nfcorpus_bench(setting, steps, opened)
    split = _candidates(setting, *_published(setting))
    asked = questions(setting.data / "nfcorpus")
    dev, test = ([asked[i] for i in relevant(setting.data / "nfcorpus" / f)] for f in ("qrels.dev.tsv", "qrels.tsv"))
    calibrated = await ground.calibrated(dev, K, steps)
    held = datasets.indexed_sources(ground.rag.index, {d.source for d in split.members})
    return Lab(setting, ground, split, held, calibrated, tuple(test), steps)


def _published(setting: Setting) -> tuple[list[str], list[str]]:
    found = json.loads((setting.data / SPLIT).read_text(encoding="utf-8"))
    inside, outside = (list(map(str, found[key])) for key in ("mem_indices", "non_mem_indices"))
    return inside, outside


def _candidates(setting: Setting, inside: Sequence[str], outside: Sequence[str]) -> Split:
    """A subset of the published candidates. Near-duplicates are searched among the indexed documents."""
    rng = np.random.default_rng(setting.seed)
    wanted = {"members": (inside, setting.members), "nonmembers": (outside, setting.nonmembers)}
    drawn = {key: [names[i] for i in rng.permutation(len(names))[:n]] for key, (names, n) in wanted.items()}
    path = setting.folder / f"nfcorpus/split-{setting.members}-{setting.nonmembers}-{setting.seed}.json"
    path.write_text(json.dumps(drawn) + "\n", encoding="utf-8")
    gone = set(outside).difference(drawn["nonmembers"])
    found = [(source.name, *source.parse()) for source in CorpusSubset(setting.data / "nfcorpus", gone).sources()]
    return datasets.read_split(path, [Document(name, text, title) for name, title, text, _ in found], setting.seed)


def questions(folder: Path) -> dict[str, str]:
    """Question texts of a data set by id."""
    return {i: record["text"] for i, record in records(folder / "queries.jsonl.gz").items()}


def records(path: Path) -> dict[str, dict[str, Any]]:
    """Records of a zipped jsonl file by id."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {record["_id"]: record for record in map(json.loads, file)}


def relevant(path: Path) -> dict[str, str]:
    """First relevant document of each question in a file of judgements."""
    return {question: next(iter(documents)) for question, documents in _judgements(path).items()}


def relevant_documents(path: Path) -> dict[str, frozenset[str]]:
    """All relevant documents of each question in a file of judgements."""
    return {question: frozenset(documents) for question, documents in _judgements(path).items()}


def _judgements(path: Path) -> dict[str, dict[str, None]]:
    """Relevant documents of each question, in the order of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        found: dict[str, dict[str, None]] = {}
        for question, document, _ in list(csv.reader(file, delimiter="\t"))[1:]:
            found.setdefault(question, {})[document] = None
        return found
