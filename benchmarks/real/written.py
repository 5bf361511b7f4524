"""Questions by script, and the written questions of the recorded set, for a reader that has not answered them yet.

The writer's answers are not in the repository, its questions are. A trial is taken if none of its questions was left
out of the recorded set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.real import files
from benchmarks.real.planning import questions, sample_rows
from benchmarks.real.questions import scripted
from benchmarks.real.sample import open_sample

RECORDED = ROOT / "benchmarks/recorded/nfcorpus_qwen1.5b.jsonl.gz"
KEYLESS = ("natural", "menta", "natural_title", "split_facts")
"""Attacks whose scores need no key. That of the interrogation attack, its right answers, was not recorded."""


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
    written = trials(files.read(RECORDED)[1:])
    files.write(work / f"questions_{corpus}.jsonl.gz", [*rows, *(t for t in written if t["candidate"] in known)])


def trials(recorded: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The trials of the attacks in `KEYLESS` whose questions are complete and were written by a model.

    Args:
        recorded: Rows of a recorded set. There `natural` and `natural_title` are authors of MEntA's trials.
    """
    found = []
    for row in recorded:
        author, _, name = row["author"].partition(":")
        attack = name or row["attack"]
        if author == "model" and attack in KEYLESS and all(row["questions"]):
            kept = {what: row[what] for what in ("candidate", "member", "questions")}
            found.append({"author": author, "attack": attack, **kept, "key": {}})
    return found
