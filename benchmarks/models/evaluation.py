"""Evaluation of the models: exact answers by kind of question and number of documents.

The documents come from the training generator with other seeds. ``unseen`` has attributes and a domain that are
excluded from training. Decoding is greedy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from benchmarks.models.documents import Writer, shown
from benchmarks.models.questions import Asker
from benchmarks.models.tokens import END, PAD, encoded, prompt, read
from casemate.maths import stats
from casemate.maths.recovery import rouge_l

SEED = 987654
BATCH = 50


class Cell(NamedTuple):
    """A group of test questions: kind, number of documents, and whether the domain was trained."""

    kind: str
    documents: int
    unseen: bool = False


CELLS = {
    "qa_1doc": Cell("qa", 1),
    "qa_3docs": Cell("qa", 3),
    "qa_5docs": Cell("qa", 5),
    "qa_3docs_unseen": Cell("qa", 3, True),
    "idk_1doc": Cell("idk", 1),
    "idk_3docs": Cell("idk", 3),
    "idk_5docs": Cell("idk", 5),
    "yn_3docs": Cell("yn", 3),
    "which_5docs": Cell("which", 5),
    "about_3docs": Cell("about", 3),
    "event_3docs": Cell("ev", 3),
    "fill_3docs": Cell("fill", 3),
    "mem_3docs": Cell("mem", 3),
    "rep_2docs": Cell("rep", 2),
    "rep_4docs": Cell("rep", 4),
    "rep_5docs": Cell("rep", 5),
}


@dataclass(frozen=True, slots=True)
class Item:
    """A context as text, a question, and its answer."""

    context: str
    question: str
    answer: str


def evaluated(folder: Path, count: int = 100, cells: Sequence[str] = tuple(CELLS)) -> dict[str, dict[str, Any]]:
    """Share of exact answers and mean ROUGE-L in each cell.

    Args:
        folder: Folder of the network.
        count: Questions in each cell.
        cells: Names of ``CELLS``.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = read(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    found = {}
    for name in cells:
        items = drawn(CELLS[name], count)
        said = answers(model, tokenizer, items)
        right = sum(a == item.answer.strip() for a, item in zip(said, items, strict=True))
        overlap = [rouge_l(item.answer, a).f1 for a, item in zip(said, items, strict=True)]
        found[name] = {"exact": stats.proportion(right, count), "rouge_l": round(sum(overlap) / count, 3)}
        print(folder.name, name, found[name], file=sys.stderr, flush=True)
    return found


def drawn(cell: Cell, count: int) -> list[Item]:
    """The questions of a cell, sorted by context length."""
    asker = Asker(Writer(SEED + cell.documents, 3, cell.unseen))
    items: list[Item] = []
    while len(items) < count:
        texts = asker.writer.context(cell.documents, 0.6 if cell.kind == "ev" else 0.25)
        if cell.kind in {"qa", "idk", "yn"} and not any(text.facts for text in texts):
            continue
        asked = asker.ask(texts, cell.kind)
        if asked.kind == cell.kind:
            items.append(Item(shown(texts), asked.text, asked.answer))
    return sorted(items, key=lambda item: len(item.context))


@torch.inference_mode()
def answers(model: Any, tokenizer: Tokenizer, items: Sequence[Item]) -> list[str]:
    """Answers by greedy decoding."""
    found = []
    for start in range(0, len(items), BATCH):
        part = items[start : start + BATCH]
        prompts = [sum(prompt(tokenizer, item.context, item.question), []) for item in part]
        longest = max(map(len, prompts))
        room = max(len(encoded(tokenizer, f" {item.answer}")) for item in part) + 8
        given = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts])
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            given, attention_mask=seen, max_new_tokens=room, do_sample=False, pad_token_id=PAD, eos_token_id=END
        )
        for row in out[:, longest:].tolist():
            said = row[: row.index(END)] if END in row else row
            found.append(tokenizer.decode([token for token in said if token != PAD]).strip())
    return found
