"""RAGFort's Table 1 without its cascade, and Figure 1: chunk recovery of crawlers, and the value of a stolen part.

The cascade needs models: ``ragfort-table2`` measures it with the offline pair, on texts that the pair can read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from casemate.config import PluginSpec
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.defenses.reindex import Reindex
from casemate.guard.defenses.similarity_floor import SimilarityFloor
from casemate.guard.defenses.summarize import Summarize
from casemate.guard.guard import Guard
from casemate.maths import metrics
from casemate.papers.laboratory import BARE, Bench, Setting, bench, records
from casemate.papers.published_numbers import printed_table
from casemate.papers.readers import reader_name, reader_note
from casemate.papers.result import Cell, Result, Row, share
from casemate.papers.utility import Item, halves
from casemate.plugins import build
from casemate.protocols import Defense, Embedder, Generator, Progress, Steps, Target
from casemate.rag.pipeline import INSTRUCTIONS, Rag, join_stream
from casemate.redteam.campaigns.pipeline import SCRIPTED_ATTACKS
from casemate.redteam.lab.extraction_experiment import Crawler, CrawlPlan
from casemate.redteam.lab.extraction_metrics import measure_crawl
from casemate.reindexing.fitting import ReindexSettings, fit
from casemate.reindexing.registry import ReindexRegistry
from casemate.types import DEFAULT_TENANT, Document, Prompt, Vector

K = 5
CHUNKS: Mapping[str, int] = MappingProxyType({"patient_doctor_qa": 2500, "enron_worms": 2000, "mathqa": 320})
"""Sizes of HealthCareMagic, Enron and MathQA in the paper."""
FLOOR = 0.35
COLUMNS = (BARE, "re-ranking", "summarization", "inter-class", "crawl_limit")
PRINTED = printed_table("ragfort-table1", COLUMNS[:4])
"""Chunk recovery rates with Qwen-14B (Li et al. 2026, Tables 1 and 2)."""
DIFFERS_1 = (
    SCRIPTED_ATTACKS,
    "The system, the worm's copy and the score use the embedder all-MiniLM-L6-v2. The paper does not name its "
    "embedder.",
    "Replies are compared with the chunks as a whole and by the items of their lists. Comparing windows takes ten "
    "times the work. It can only increase CRR, under every protection.",
    "Inter-class is re-indexing by SupCon at full strength, as in the paper, whatever the loss of retrieval quality.",
    "The cascade (intra-class) and RAGFort as a whole are left out, because they need models that can read these "
    "texts. See ragfort-table2.",
)
REMARKS_1 = ("CRR: ROUGE-L F1 above .5 and cosine above .85. crawl_limit is this project's, with one client.",)
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
WAYS = ("entries of every topic", "whole topics", "both")
DIFFERS_F = (
    "The data are SQuAD, with its articles as topics. The paper uses HealthCareMagic, Enron and MathQA, judged by "
    "GPT-4.",
    "An answer is correct if it contains a correct one.",
    "The paper exchanges its two terms: its inter-class protection removes entries within each class, and is said to "
    "simulate intra-class protection. Here, each way is named by what is removed.",
)
REMARKS_F = (
    "'both' removes a share of the topics, and the same share of the entries of the remaining topics. So at 40 % it "
    "leaves 36 %. Compare it with one way at 60 %, which leaves 40 %.",
    "The last rows simulate no leak: their system was built from the texts that rag_thief recovered here.",
)


async def table1(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Chunk recovery of Worm and RAG-Thief on three corpora, under each protection that needs no model."""
    setting.require(*(f"{name}/corpus.jsonl.gz" for name in CHUNKS))
    rows: list[Row] = []
    questions = setting.members
    for name, chunks in CHUNKS.items():
        ground = await _sample(setting, name, chunks, steps, opened)
        for attack in ("worm", "rag_thief"):
            with steps(f"{attack} on {name}", questions * len(COLUMNS)) as count:
                cells = {column: await ground.recovered(attack, column, setting, count) for column in COLUMNS}
            rows.append(Row(f"{name}, {attack}", "printed, Qwen-14B", PRINTED[name, attack]))
            rows.append(Row(f"{name}, {attack}", "here", cells))
    facts = {
        "chunks": dict(CHUNKS),
        "questions": questions,
        "k": K,
        "seed": setting.seed,
        "reader": reader_name(setting.reader),
    }
    differs = (f"{reader_note(setting.reader)} The paper uses Qwen-14B and two others.", *DIFFERS_1)
    return Result("RAGFort, Table 1: chunk recovery rate", COLUMNS, tuple(rows), differs, REMARKS_1, facts)


def full_reindex(rag: Rag, folder: Path, settings: ReindexSettings, **options: Any) -> Defense:
    """The defense ``reindex`` at full strength. Its projection is learned once, and kept in the folder."""
    shelf = ReindexRegistry(folder, DEFAULT_TENANT)
    if shelf.current() is None:
        shelf.write(replace(fit(rag.index, rag.embedder, settings), strength=1.0, accepted=True))
    return Reindex(mode="compatible", folder=folder, embedder=rag.embedder, index=rag.index, **options)


@dataclass(frozen=True, slots=True)
class _Ground:
    """An indexed sample of a corpus, with all its chunks."""

    bench: Bench
    name: str
    chunks: Sequence[Document]

    async def recovered(self, attack: str, column: str, setting: Setting, count: Progress) -> Cell:
        """Chunk recovery rate under one protection."""
        crawler = self.crawler(attack, column, setting)
        walks = await crawler.run(count)
        return measure_crawl(crawler, walks, self.chunks, self.bench.rag.embedder, windows=False).by_target[column].crr

    def target(self, column: str, setting: Setting) -> Target:
        """The system under one protection."""
        made: dict[str, list[Defense]] = {
            "re-ranking": [SimilarityFloor(floor=FLOOR)],
            "summarization": [Summarize()],
            "crawl_limit": [CrawlLimit()],
        }
        defenses, folder = made.get(column, []), setting.folder / f"{self.name}-shelf"
        if column == "inter-class":
            defenses = [full_reindex(self.bench.rag, folder, ReindexSettings(mode="compatible"))]
        return Guard(self.bench.rag, defenses) if defenses else self.bench.rag

    def crawler(self, attack: str, column: str, setting: Setting) -> Crawler:
        """The crawl of one protection."""
        built = build("crawler", PluginSpec(use=attack), setting.folder, {Embedder: self.bench.rag.embedder})
        plan = CrawlPlan(setting.seed, K, questions=setting.members, label=f"{self.bench.state} {column}")
        return Crawler(attack, built, {column: self.target(column, setting)}, self.bench.ledger, plan, (column,))


async def _sample(setting: Setting, name: str, count: int, steps: Steps, opened: ExitStack) -> _Ground:
    ids = sorted(records(setting.data / name / "corpus.jsonl.gz"))
    order = np.random.default_rng(setting.seed).permutation(len(ids))
    ground = await bench(setting, name, [ids[i] for i in order[count:]], steps, opened)
    return _Ground(ground, name, [d for documents, _ in ground.rag.index.scan() for d in documents])


async def figure1(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Quality of a system built from the unprotected part of a collection, or from recovered texts."""
    setting.require("squad/corpus.jsonl.gz", "squad/queries.jsonl.gz", "squad/qrels.tsv")
    ground = await bench(setting, "squad", (), steps, opened)
    _, items = halves(setting.data / "squad", setting.members + setting.nonmembers, setting.seed)
    pieces = [(documents, vectors) for documents, vectors in ground.rag.index.scan()]
    chunks = [d for documents, _ in pieces for d in documents]
    E = np.concatenate([vectors for _, vectors in pieces])
    exam = _Exam(items, ground.rag.embedder.embed([item.text for item in items]), ground.rag.generator)
    rng = np.random.default_rng(setting.seed)
    topics = np.unique([d.title for d in chunks], return_inverse=True)[1]
    leave = {share: _remaining(topics, share, rng) for share in SHARES}
    rows = []
    with steps("asking systems built from parts", len(SHARES) * len(WAYS)) as count:
        for way in WAYS:
            cells: dict[str, Cell] = {}
            for portion, kept in leave.items():
                cells[f"{portion:.0%}"] = await exam.right(
                    [d for d, k in zip(chunks, kept[way], strict=True) if k], E[kept[way]]
                )
                count(1)
            rows.append(Row("removed", way, cells))
    rows += await _stolen_systems(_Ground(ground, "squad", chunks), exam, setting, steps)
    columns = (*(f"{portion:.0%}" for portion in SHARES), "right")
    facts = {"data": "SQuAD 1.1", "chunks": len(chunks), "questions": len(items), "k": K, "seed": setting.seed}
    facts["reader"] = reader_name(setting.reader)
    title = "RAGFort, Figure 1: share of questions that a stolen part answers"
    return Result(title, columns, tuple(rows), (*DIFFERS_F, reader_note(setting.reader)), REMARKS_F, facts)


@dataclass(frozen=True, slots=True)
class _Exam:
    """Asks systems with different documents questions with known answers."""

    items: Sequence[Item]
    Q: Vector
    reader: Generator

    async def right(self, texts: Sequence[Document], E: Vector) -> Any:
        """Share of correct answers of a system with these texts, with its interval."""
        best = (
            np.argsort(-(self.Q @ E.T), axis=1, kind="stable")[:, :K]
            if len(texts)
            else np.empty((len(self.items), 0), int)
        )
        found = []
        for item, places in zip(self.items, best, strict=True):
            prompt = Prompt(item.text, tuple(texts[i] for i in places), INSTRUCTIONS)
            found.append(metrics.exact_match(await join_stream(self.reader.stream(prompt)), item.answers))
        return share(found)


def _remaining(
    topics: npt.NDArray[np.int64], portion: float, rng: np.random.Generator
) -> dict[str, npt.NDArray[np.bool_]]:
    """Chunks that remain when a share of the topics, or of each topic's entries, is removed."""
    number = topics.max() + 1
    gone = np.isin(topics, rng.permutation(number)[: round(portion * number)])
    entry = np.zeros(len(topics), bool)
    for topic in range(number):
        own = np.flatnonzero(topics == topic)
        entry[rng.permutation(own)[: round(portion * len(own))]] = True
    return {WAYS[0]: ~entry, WAYS[1]: ~gone, WAYS[2]: ~(gone | entry)}


async def _stolen_systems(ground: _Ground, exam: _Exam, setting: Setting, steps: Steps) -> list[Row]:
    """Systems built from recovered texts, guard off and on."""
    rows = []
    for column in (BARE, "crawl_limit"):
        crawler = ground.crawler("rag_thief", column, setting)
        with steps(f"rag_thief crawls, {column}", setting.members) as count:
            walk = (await crawler.run(count))[column]
        texts = list(dict.fromkeys(find.text for find in walk.finds))
        with steps(f"building a system from {len(texts)} texts", None):
            E = ground.bench.rag.embedder.embed(texts)
            cells: dict[str, Cell] = {"right": await exam.right([Document(str(i), t) for i, t in enumerate(texts)], E)}
        rows.append(Row(f"stolen with {len(walk.exchanges)} questions", column, cells))
    return rows
