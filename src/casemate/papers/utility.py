"""Table 3: cost of a guard for benign clients, on SQuAD and on the open questions of NFCorpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from casemate.maths import metrics
from casemate.papers.laboratory import (
    BARE,
    NFCORPUS,
    Bench,
    Setting,
    bench,
    nfcorpus_bench,
    questions,
    records,
    relevant,
    relevant_documents,
)
from casemate.papers.published_numbers import TABLE_3, UTILITY
from casemate.papers.readers import BATCH, reader_name, reader_note
from casemate.papers.result import Cell, Result, Row, share
from casemate.protocols import Progress, Steps, Target
from casemate.runtime.concurrency import map_concurrently
from casemate.types import Query

SIZES = (5, 20, 100)
LOG = 1000
"""Questions for calibration."""
DIFFERS = (
    "The data are the 4,497 paragraphs of 92 articles of SQuAD 1.1: the dev set and 44 articles of the training set. "
    "Almost all paragraphs are one chunk.",
    "The paper uses a tenth of Wikipedia in chunks of 100 tokens, with 200 questions each of Natural Questions and "
    "TriviaQA. Neither is used here.",
    "The open questions are the test questions of NFCorpus with a relevant document in the index, which lacks the "
    "published non-members. They name a topic, and were not written for one text. They have relevant documents instead "
    "of an answer, so EM is undefined.",
    "The embedder is all-MiniLM-L6-v2. The paper uses BGE-M3.",
    "DP-RAG has a table of its own, mirabel-table7, on records and with a trained pair of models.",
)
SIMULATED = "It answers in sentences of the context only, so EM cannot exceed R. "
"""A remark that applies to the simulated reader."""
PAPER_READER = "The paper uses Llama-3.1-8B, which knows many answers without retrieval."
FEWER_SIZES = "A given language model answers with up to {} passages. More take hours on a CPU (--passages)."
REMARKS = (
    "EM@k is the share of answers that contain a correct answer. R@k is the share of questions for which one of the k "
    "passages contains it. For open questions, a passage must be relevant instead.",
    "For each k, the calibrated guard is fitted to 1,000 questions about one half of the articles. The measured "
    "questions are about the other half. On NFCorpus it is fitted to the dev questions. It may flag at most 1 % of "
    "benign questions.",
    "The author of a SQuAD question had read one paragraph. So the question is closer to one document than questions "
    "usually are.",
)


class Item(NamedTuple):
    """A question with its correct answers, or with its relevant documents."""

    text: str
    answers: tuple[str, ...]
    documents: frozenset[str] = frozenset()


class Served(NamedTuple):
    """Result of a question."""

    exact: bool
    recalled: bool
    flagged: bool


async def table3(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """EM@k and R@k, unguarded and guarded."""
    setting.require("squad/corpus.jsonl.gz", "squad/queries.jsonl.gz", "squad/qrels.tsv", *NFCORPUS)
    ground = await bench(setting, "squad", (), steps, opened)
    log, items = halves(setting.data / "squad", setting.members + setting.nonmembers, setting.seed)
    rows = [Row("harmless", f"{data}, {system}, printed", numbers) for (data, system), numbers in TABLE_3.items()]
    rows += await _rows("SQuAD", ground, log, items, steps)
    rows += await _open_questions(setting, steps, opened)
    columns = (*UTILITY, *(f"flagged@{k}" for k in SIZES))
    title = "Table 3: exact match and answer recall of benign questions"
    reader = f"{reader_note(setting.reader)} {'' if setting.reader else SIMULATED}{PAPER_READER}"
    facts = _facts(ground, len(items), len(log))
    limited = len(sizes(setting)) < len(SIZES)
    differs = (*DIFFERS, reader, *([FEWER_SIZES.format(max(sizes(setting)))] if limited else []))
    return Result(title, columns, tuple(rows), differs, REMARKS, facts)


async def _open_questions(setting: Setting, steps: Steps, opened: ExitStack) -> list[Row]:
    """The test questions of NFCorpus with a relevant document in the index."""
    ground = await nfcorpus_bench(replace(setting, reader=""), steps, opened)  # no answer is judged
    folder, held = setting.data / "nfcorpus", set(ground.rag.index.digests())
    texts = questions(folder)
    log = [texts[i] for i in relevant(folder / "qrels.dev.tsv")]
    right = {i: found & held for i, found in relevant_documents(folder / "qrels.tsv").items()}
    items = [Item(texts[i], (), found) for i, found in right.items() if found]
    return await _rows("NFCorpus", ground, log, items, steps)


async def _rows(data: str, ground: Bench, log: Sequence[str], items: Sequence[Item], steps: Steps) -> list[Row]:
    """One row per system."""
    cells: dict[str, dict[str, Cell]] = {}
    for k in sizes(ground.setting):
        targets: dict[str, Target] = {BARE: ground.rag, **ground.guards(await ground.calibrated(log, k, steps))}
        with steps(f"asking {data}, k = {k}", len(items) * len(targets)) as count:
            for name, target in targets.items():
                served = await map_concurrently(partial(_served, target, k, count), items, BATCH)
                row: dict[str, Cell] = {f"R@{k}": share([one.recalled for one in served])}
                row |= {f"EM@{k}": share([one.exact for one in served])} if items[0].answers else {}
                row |= {} if name == BARE else {f"flagged@{k}": share([one.flagged for one in served])}
                cells.setdefault(name, {}).update(row)
    return [Row("harmless", f"{data}, {name}, here", measured) for name, measured in cells.items()]


def sizes(setting: Setting) -> list[int]:
    """The numbers of passages per answer that are measured."""
    return [k for k in SIZES if k <= setting.passages or not setting.reader]


async def _served(target: Target, k: int, count: Progress, item: Item) -> Served:
    """Asks with a new client."""
    answer = await target.ask(Query(item.text, f"client of {item.text}", k=k))
    count(1)
    found = [hit.document for hit in answer.retrieval.hits]
    relevant_there = any(document.source in item.documents for document in found)
    return Served(
        metrics.exact_match(answer.text, item.answers),
        relevant_there or metrics.answer_recall([document.text for document in found], item.answers),
        any(verdict.hidden for verdict in answer.verdicts),
    )


def halves(folder: Path, count: int, seed: int) -> tuple[list[str], list[Item]]:
    """Calibration questions of SQuAD, and at most ``count`` test questions, about different articles."""
    rng = np.random.default_rng(seed)
    title = {i: record["title"] for i, record in records(folder / "corpus.jsonl.gz").items()}
    about = {question: title[document] for question, document in relevant(folder / "qrels.tsv").items()}
    articles = sorted(set(about.values()))
    fitting = {articles[i] for i in rng.permutation(len(articles))[: len(articles) // 2]}
    asked = [record for i, record in records(folder / "queries.jsonl.gz").items() if i in about]
    order = [asked[i] for i in rng.permutation(len(asked))]
    log = [record["text"] for record in order if about[record["_id"]] in fitting][:LOG]
    others = [record for record in order if about[record["_id"]] not in fitting][:count]
    return log, [Item(record["text"], tuple(record["answers"])) for record in others]


def _facts(ground: Bench, asked: int, log: int) -> Mapping[str, object]:
    return {
        "data": "SQuAD 1.1",
        "documents": len(ground.rag.index.digests()),
        "chunks": ground.rag.index.moments().n,
        "questions": asked,
        "calibrated_on": f"{log} questions about other articles",
        "seed": ground.setting.seed,
        "embedder": ground.rag.embedder.fingerprint,
        "reader": reader_name(ground.setting.reader),
    }
