"""Questions by script, and the written questions of the recorded set, for a reader that has not answered them yet.

The writer's answers are not in the repository, its questions are. A trial is taken if none of its questions was left
out of the recorded set. The interrogation attack needs the right answers, too. Where they were not recorded, the writer
is asked for them again (`prompts_keys.jsonl.gz`), and its answers are read from `answers_keys.jsonl.gz`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.real import files
from benchmarks.real.planning import questions, sample_rows
from benchmarks.real.questions import RecordedWriter, scripted
from benchmarks.real.sample import open_sample
from casemate.redteam.attacks.interrogation import REQUEST, SHADOW_INSTRUCTIONS, yes_no_answer
from casemate.redteam.crawling.writer import generate
from casemate.types import Document

RECORDED = {
    "nfcorpus": ROOT / "benchmarks/recorded/nfcorpus_qwen1.5b.jsonl.gz",
    "squad": ROOT / "benchmarks/recorded/squad_qwen0.5b.jsonl.gz",
    "clinic": ROOT / "benchmarks/recorded/clinic_qwen0.5b.jsonl.gz",
}
"""By corpus, a recorded set with all written questions."""
ATTACKS = ("natural", "menta", "natural_title", "split_facts", "interrogation")


def plan(corpus: str, work: Path, each: int) -> dict[str, dict[str, Any]]:
    """Writes the sample and its questions; returns the prompts for keys that have no answer yet.

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
    held = work / "answers_keys.jsonl.gz"
    writer = RecordedWriter(files.read_answers(held)[0] if held.exists() else {})
    texts = {row["id"]: Document(row["id"], row["text"], row["title"], row["id"]) for row in candidates}
    for trial in written:
        if trial["attack"] == "interrogation" and not trial["key"]:
            trial["key"] = {"truth": asyncio.run(_truth(writer, trial["questions"], texts[trial["candidate"]]))}
    files.write(work / f"questions_{corpus}.jsonl.gz", [*rows, *written])
    return writer.missing


def trials(recorded: Iterable[Mapping[str, Any]], attacks: Collection[str] = ATTACKS) -> list[dict[str, Any]]:
    """The trials whose questions are complete and were written by a model.

    Args:
        recorded: Rows of a recorded set. There `natural` and `natural_title` are authors of MEntA's trials.
        attacks: The attacks that are taken.
    """
    found = []
    for row in recorded:
        author, _, name = row["author"].partition(":")
        attack = name or row["attack"]
        if author == "model" and attack in attacks and all(row["questions"]):
            kept = {what: row[what] for what in ("candidate", "member", "questions")}
            found.append({"author": author, "attack": attack, **kept, "key": row.get("key") or {}})
    return found


async def _truth(writer: RecordedWriter, asked: Sequence[str], candidate: Document) -> list[str]:
    """The writer's answers to the questions, without their summary and the request, from the candidate alone."""
    texts = [question.removesuffix(REQUEST).strip() for question in asked]
    shared = os.path.commonprefix(texts)
    start = max(shared.rfind(end) for end in (". ", "? ", "! ")) + 2
    answers = [await generate(writer, text[start:], candidate, instructions=SHADOW_INSTRUCTIONS) for text in texts]
    return [yes_no_answer(answer) for answer in answers]
