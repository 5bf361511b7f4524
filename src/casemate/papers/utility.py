"""Table 3: cost of a guard for harmless clients, on SQuAD."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from casemate.maths import metrics
from casemate.papers.laboratory import BARE, Bench, Setting, bench, records, relevant
from casemate.papers.published_numbers import TABLE_3, UTILITY
from casemate.papers.result import Cell, Result, Row, share
from casemate.protocols import Progress, Target
from casemate.redteam.campaigns.pipeline import SIMULATED_READER, Steps
from casemate.types import Query

SIZES = (5, 20, 100)
LOG = 1000
"""Questions for calibration."""
DIFFERS = (
    "Data: the 4,497 paragraphs of 92 articles of SQuAD 1.1 (dev set and 44 articles of the training set), almost all "
    "of them one chunk. The paper: a tenth of Wikipedia in chunks of 100 tokens, and 200 questions each of Natural "
    "Questions and TriviaQA, which are not available.",
    "Embedder: all-MiniLM-L6-v2. The paper: BGE-M3.",
    f"{SIMULATED_READER} It answers in sentences of the context only, so EM cannot exceed R. The "
    "paper: Llama-3.1-8B, which knows many answers without retrieval.",
    "DP-RAG's lines are in a table of their own, mirabel-table7, on records and a trained pair of models.",
)
REMARKS = (
    "EM@k: the answer contains a right one. R@k: one of the k passages does.",
    "The calibrated guard is fitted, for each k, to 1,000 questions about one half of the articles; measured are "
    "questions about the other half. It is to flag 1 % of harmless questions at most.",
    "A question of SQuAD was written with one paragraph before its author, so it is closer to one document than "
    "questions usually are.",
)


class Item(NamedTuple):
    """A question with its correct answers."""

    text: str
    answers: tuple[str, ...]


class Served(NamedTuple):
    """Result of a question."""

    exact: bool
    recalled: bool
    flagged: bool


async def table3(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """EM@k and R@k, unguarded and guarded."""
    setting.require("squad/corpus.jsonl.gz", "squad/queries.jsonl.gz", "squad/qrels.tsv")
    ground = await bench(setting, "squad", (), steps, opened)
    log, items = halves(setting.data / "squad", setting.members + setting.nonmembers, setting.seed)
    cells: dict[str, dict[str, Cell]] = {}
    for k in SIZES:
        targets: dict[str, Target] = {BARE: ground.rag, **ground.guards(await ground.calibrated(log, k, steps))}
        with steps(f"asking, k = {k}", len(items) * len(targets)) as count:
            for name, target in targets.items():
                exact, recalled, flagged = zip(*[await _served(target, k, item, count) for item in items], strict=True)
                row: dict[str, Cell] = {f"EM@{k}": share(exact), f"R@{k}": share(recalled)}
                cells.setdefault(name, {}).update(row if name == BARE else row | {f"flagged@{k}": share(flagged)})
    rows = [Row("harmless", f"{data}, {system}, printed", numbers) for (data, system), numbers in TABLE_3.items()]
    rows += [Row("harmless", f"SQuAD, {name}, here", measured) for name, measured in cells.items()]
    columns = (*UTILITY, *(f"flagged@{k}" for k in SIZES))
    title = "Table 3: exact match and answer recall of benign questions"
    return Result(title, columns, tuple(rows), DIFFERS, REMARKS, _facts(ground, len(items), len(log), setting.seed))


async def _served(target: Target, k: int, item: Item, count: Progress) -> Served:
    """Asks with a new client."""
    answer = await target.ask(Query(item.text, f"client of {item.text}", k=k))
    count(1)
    passages = [hit.document.text for hit in answer.retrieval.hits]
    return Served(
        metrics.exact_match(answer.text, item.answers),
        metrics.answer_recall(passages, item.answers),
        any(verdict.hidden for verdict in answer.verdicts),
    )


def halves(folder: Path, count: int, seed: int) -> tuple[list[str], list[Item]]:
    """Calibration questions and test questions, about different articles.

    Args:
        folder: SQuAD.
        count: Most test questions.
        seed: Seed of the draw.
    """
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


def _facts(ground: Bench, asked: int, log: int, seed: int) -> Mapping[str, object]:
    return {
        "data": "SQuAD 1.1",
        "documents": len(ground.rag.index.digests()),
        "chunks": ground.rag.index.moments().n,
        "questions": asked,
        "calibrated_on": f"{log} questions about other articles",
        "seed": seed,
        "embedder": ground.rag.embedder.fingerprint,
        "reader": "simulated_reader (simulated)",
    }
