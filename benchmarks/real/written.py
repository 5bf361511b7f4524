"""Scripted questions, and the written questions of the recorded set, for a further reader.

The repository contains the writer's questions, but not its answers. A trial is used if the recorded set contains all of
its questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.real import files
from benchmarks.real.planning import questions, sample_rows
from benchmarks.real.questions import scripted
from benchmarks.real.sample import CORPORA, open_sample

RECORDED = {corpus: ROOT / f"benchmarks/recorded/{corpus}_qwen0.5b.jsonl.gz" for corpus in CORPORA}
"""By corpus, a recorded set with all written questions."""
ATTACKS = ("natural", "menta", "natural_title", "split_facts", "interrogation")


def plan(corpus: str, work: Path, each: int) -> None:
    """Writes the sample and its questions.

    Args:
        corpus: Name of the corpus.
        work: Folder of prompts and answers.
        each: Members and non-members of the sample.
    """
    with open_sample(corpus, each) as sample:
        candidates = sample_rows(sample, {d.source for d in sample.split.members})
        rows = asyncio.run(questions(sample, (("script", name, attack) for name, attack in scripted().items())))
    files.write(work / f"sample_{corpus}.jsonl.gz", candidates)
    known = {row["id"] for row in candidates}
    written = [t for t in trials(files.read(RECORDED[corpus])[1:]) if t["candidate"] in known]
    files.write(work / f"questions_{corpus}.jsonl.gz", [*rows, *written])


def trials(recorded: Iterable[Mapping[str, Any]], attacks: Collection[str] = ATTACKS) -> list[dict[str, Any]]:
    """The trials whose questions are complete and were written by a model.

    Args:
        recorded: Rows of a recorded set. There `natural` and `natural_title` are authors of MEntA's trials.
        attacks: The attacks to use.
    """
    found = []
    for row in recorded:
        author, _, name = row["author"].partition(":")
        attack = name or row["attack"]
        if author == "model" and attack in attacks and all(row["questions"]):
            kept = {what: row[what] for what in ("candidate", "member", "questions")}
            found.append({"author": author, "attack": attack, **kept, "key": row.get("key") or {}})
    return found
