"""What all reproductions share: the data, the index without the non-members, the guards, and what attackers ask.

Everything that takes time is kept in a folder, and taken from there by the next table: the index, the vectors of
questions, the answers, the finished trials, the calibration.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from casemate import calibration
from casemate.app import build, published_attacks
from casemate.backends.sqlite import SqliteIndex
from casemate.config import Part
from casemate.corpus import Corpus, Source
from casemate.defenses.mirabel import Mirabel
from casemate.errors import DataError
from casemate.guard import Guard
from casemate.ingest import Ingest
from casemate.lab import datasets
from casemate.lab.box import CachedEmbedder, CachedGenerator
from casemate.lab.calibrate import Settings, calibrate
from casemate.lab.datasets import Split, Stored
from casemate.lab.ledger import Ledger
from casemate.neighbors import one_thread
from casemate.protocols import Embedder, Progress, Remembering
from casemate.rag import Rag
from casemate.redteam import Steps
from casemate.types import Document, Vector

K = 3
"""Documents that make a context, as in the paper's attacks."""
PAPER, OURS = "Mirabel", "calibrated"
"""The guards: the published rule, and the one that is fitted to harmless questions."""
BARE = "no guard"
ATTACKS: Mapping[str, Part] = {
    "S2MIA": Part(use="s2mia"),
    "MBA": Part.model_validate({"use": "mba", "policy": "random"}),  # as the paper's authors did
    "IA": Part.model_validate({"use": "interrogation", "penalty": 1.0}),  # one of the lambdas that they tried
    "direct": Part(use="direct"),
    "DCMI": Part(use="dcmi"),
    "MEntA": Part(use="menta"),
}
"""The paper's attacks, then others."""
CORPUS = (
    "Index: the documents of NFCorpus that are none of the 1,000 published non-members, 2,633, cut into chunks of 256 "
    "tokens. The paper: 70 % of NFCorpus, each document whole.",
    "Embedder: all-MiniLM-L6-v2, 384 dimensions. The paper: BGE-M3, 1,024.",
)
"""What differs whatever is measured."""
SPLIT = "mia_riddle/nfcorpus_selected_indices.json"
PORTION = 64
"""Texts whose vectors are written at a time: a second of work, which is what an interruption may cost."""
HELP = "docs/how-to/reproduce-the-papers.md says what is wanted"


@dataclass(frozen=True, slots=True)
class Setting:
    """How large, and where.

    Attributes:
        data: The folder with the evaluation data.
        folder: Where work is kept.
        members: Candidates in the index.
        nonmembers: Candidates held out of it.
        seed: Of everything that is drawn.
    """

    data: Path
    folder: Path = Path(".casemate/reproduce")
    members: int = 250
    nonmembers: int = 250
    seed: int = 7

    def require(self, *names: str) -> None:
        """Sees to it that files of the data are there.

        Raises:
            DataError: If one is not.
        """
        for name in names:
            if not (self.data / name).is_file():
                raise DataError(
                    f"the evaluation data is not whole: there is no {name} in {self.data}; give its folder with --data "
                    f"or in CASEMATE_DATA ({HELP})"
                )


@dataclass(frozen=True, slots=True)
class Bench:
    """A bare system over an index of its own.

    Attributes:
        rag: The system. Its reader is the simulated one.
        kept: Its embedder, behind a cache in memory.
        ledger: Where trials, answers and vectors are kept.
        folder: Where it lies, and calibrations beside it.
        seed: Of what is drawn for a calibration.
    """

    rag: Rag
    kept: Kept
    ledger: Ledger
    folder: Path
    seed: int

    def guards(self, calibrated: Path, rates: Mapping[str, float | None] | None = None) -> dict[str, Guard]:
        """Guards without a past: the published rule, and the calibrated one at its usual rate or at those given."""
        ours = {
            name: Mirabel(significance=rate, calibration=calibrated, embedder=self.rag.embedder, index=self.rag.index)
            for name, rate in (rates or {OURS: None}).items()
        }
        return {name: Guard(self.rag, [m]) for name, m in {PAPER: Mirabel(mode="paper"), **ours}.items()}

    async def calibrated(self, log: Sequence[str], k: int, steps: Steps) -> Path:
        """The file with a calibration for this index and harmless questions, made if it is not there."""
        settings = Settings(k=k, seed=self.seed)
        facts = [self.state, list(log), repr(settings)]
        path = self.folder / f"calibration-{digest(facts)}.json"
        if not calibration.read(path):
            with steps(f"calibrating, k = {k}", None) as count:
                found = await calibrate(self.rag, published_attacks(), log, settings, count)
            calibration.write(path, settings.tenant, found)
        return path

    @property
    def state(self) -> str:
        """A fingerprint of the index and of the program."""
        return digest([self.rag.embedder.fingerprint, dict(self.rag.index.digests()), version("casemate")])


@dataclass(frozen=True, slots=True)
class Lab:
    """NFCorpus without its non-members, and who is attacked.

    Attributes:
        setting: How large.
        bench: The system.
        split: The candidates.
        held: What the index holds of each member.
        calibrated: The calibration, from the dev questions.
        harmless: The test questions.
        steps: Shows progress.
    """

    setting: Setting
    bench: Bench
    split: Split
    held: Mapping[str, Stored]
    calibrated: Path
    harmless: tuple[str, ...]
    steps: Steps

    @property
    def facts(self) -> dict[str, Any]:
        """What was measured on."""
        moments, rag = self.bench.rag.index.moments(), self.bench.rag
        return {
            "data": "NFCorpus",
            "documents": len(rag.index.digests()),
            "chunks": moments.n,
            "members": len(self.split.members),
            "nonmembers": len(self.split.nonmembers),
            "near_duplicates_dropped": self.split.dropped,
            "harmless_questions": len(self.harmless),
            "calibrated_on": calibration.read(self.calibrated)["default"].source + ", the dev questions",
            "k": K,
            "seed": self.setting.seed,
            "embedder": rag.embedder.fingerprint,
            "reader": "obedient (simulated)",
        }


class Kept(Remembering):
    """Finds the vectors of some texts on disk: the next table asks the same questions.

    Attributes:
        ledger: Where vectors are kept.
    """

    def __init__(self, inner: Embedder, ledger: Ledger) -> None:
        super().__init__(inner)
        self.ledger = ledger

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vector:
        """See ``Embedder``."""
        held = {place: found for place, text in enumerate(texts) if (found := self._found(text)) is not None}
        new = [place for place in range(len(texts)) if place not in held]
        if new:
            held |= zip(new, self.inner.embed([texts[place] for place in new], progress), strict=True)
        return np.stack([held[i] for i in range(len(texts))]) if held else np.empty((0, self.dim), np.float32)

    def keep(self, texts: Sequence[str], progress: Progress) -> None:
        """Puts the vectors of these texts on disk, as far as they are not there."""
        for start in range(0, len(texts), PORTION):
            portion = texts[start : start + PORTION]
            for text, vector in zip(portion, self.embed(portion), strict=True):
                self.ledger.keep(self._key(text), base64.b64encode(vector.tobytes()).decode())
            progress(len(portion))

    def _found(self, text: str) -> Vector | None:
        held = self.ledger.reply(self._key(text))
        return None if held is None else np.frombuffer(base64.b64decode(held), np.float32)

    def _key(self, text: str) -> str:
        return f"vector-{digest([self.fingerprint, text])}"


class Rest(Corpus):
    """A corpus without some of its sources."""

    def __init__(self, path: Path, out: Collection[str]) -> None:
        super().__init__(path)
        self._out = frozenset(out)

    def sources(self) -> Iterator[Source]:
        """See ``Corpus.sources``."""
        return (source for source in super().sources() if source.name not in self._out)


async def bench(setting: Setting, name: str, out: Collection[str], steps: Steps, opened: ExitStack) -> Bench:
    """A system over a data set of that name, without some of its documents; indexed if that is not done yet.

    Args:
        setting: Where.
        name: The data set's folder.
        out: Documents that are left out.
        steps: Shows progress.
        opened: Closes it.
    """
    folder = setting.folder / name
    opened.enter_context(one_thread())
    ledger = opened.enter_context(Ledger(folder / "ledger.db"))
    index = opened.enter_context(closing(SqliteIndex(folder / "index.db")))
    embedder: Embedder = build("embedder", Part(use="minilm"))
    reader = CachedGenerator(build("generator", Part(use="obedient")), ledger, f"obedient {version('casemate')}")
    work = Ingest(Guard(Rag(embedder, index, reader), []), Rest(setting.data / name, out))
    plan = work.plan()
    if plan.todo or plan.gone:
        with steps(f"indexing {name}: {len(plan.todo)} documents", plan.bytes) as count:
            await work.run(plan, lambda size: count(round(size)))
    kept = Kept(embedder, ledger)
    return Bench(Rag(CachedEmbedder(kept), index, reader), kept, ledger, folder, setting.seed)


async def nfcorpus(setting: Setting, steps: Steps, opened: ExitStack) -> Lab:
    """The laboratory of the paper's attacks. All 1,000 published non-members are out, however few are attacked."""
    setting.require(*(f"nfcorpus/{f}" for f in ("corpus.jsonl.gz", "queries.jsonl.gz", "qrels.tsv", "qrels.dev.tsv")))
    setting.require(SPLIT)
    published = json.loads((setting.data / SPLIT).read_text(encoding="utf-8"))
    inside, outside = (list(map(str, published[key])) for key in ("mem_indices", "non_mem_indices"))
    ground = await bench(setting, "nfcorpus", outside, steps, opened)
    split = _candidates(setting, inside, outside)
    asked = questions(setting.data / "nfcorpus")
    dev, test = ([asked[i] for i in relevant(setting.data / "nfcorpus" / f)] for f in ("qrels.dev.tsv", "qrels.tsv"))
    calibrated = await ground.calibrated(dev, K, steps)
    held = datasets.stored(ground.rag.index, {d.source for d in split.members})
    return Lab(setting, ground, split, held, calibrated, tuple(test), steps)


def _candidates(setting: Setting, inside: Sequence[str], outside: Sequence[str]) -> Split:
    """As many of the published candidates as are wanted. Twins are looked for in what the index holds."""
    rng = np.random.default_rng(setting.seed)
    wanted = {"members": (inside, setting.members), "nonmembers": (outside, setting.nonmembers)}
    drawn = {key: [names[i] for i in rng.permutation(len(names))[:n]] for key, (names, n) in wanted.items()}
    path = setting.folder / f"nfcorpus/split-{setting.members}-{setting.nonmembers}-{setting.seed}.json"
    path.write_text(json.dumps(drawn) + "\n", encoding="utf-8")
    gone = set(outside).difference(drawn["nonmembers"])
    found = [(source.name, *source.parse()) for source in Rest(setting.data / "nfcorpus", gone).sources()]
    return datasets.read_split(path, [Document(name, text, title) for name, title, text, _ in found], setting.seed)


def questions(folder: Path) -> dict[str, str]:
    """The texts of a data set's questions by id."""
    return {i: record["text"] for i, record in records(folder / "queries.jsonl.gz").items()}


def records(path: Path) -> dict[str, dict[str, Any]]:
    """The records of a zipped jsonl file by id."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {record["_id"]: record for record in map(json.loads, file)}


def relevant(path: Path) -> dict[str, str]:
    """For each question in a file of judgements its first relevant document."""
    with path.open(encoding="utf-8", newline="") as file:
        found: dict[str, str] = {}
        for question, document, _ in list(csv.reader(file, delimiter="\t"))[1:]:
            found.setdefault(question, document)
    return found


def digest(facts: Any) -> str:
    """A short fingerprint."""
    return hashlib.blake2b(
        json.dumps(facts, sort_keys=True).encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()
