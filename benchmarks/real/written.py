"""Written questions of the recorded set, for a reader that has not answered them yet.

The writer's answers are not in the repository, its questions are. A trial is taken if none of its questions was left
out of the recorded set. The subsample is fixed by the order of the sample, before any answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.real import files
from benchmarks.real.planning import sample_rows
from benchmarks.real.sample import open_sample

RECORDED = ROOT / "benchmarks/recorded/nfcorpus_qwen1.5b.jsonl.gz"
KEYLESS = ("natural", "menta", "natural_title", "split_facts")
"""Attacks whose scores need no key. That of the interrogation attack, its right answers, was not recorded."""


def plan(corpus: str, work: Path, each: int, first: int, attacks: Sequence[str]) -> None:
    """Writes the sample, and the recorded questions about its first candidates.

    Args:
        corpus: Name of the corpus.
        work: Folder of prompts and answers.
        each: Members and non-members of the sample.
        first: Members and non-members that are asked about, in the order of the sample.
        attacks: Names of attacks.
    """
    with open_sample(corpus, each) as sample:
        members = {d.source for d in sample.split.members}
        candidates = sample_rows(sample, members)
    files.write(work / f"sample_{corpus}.jsonl.gz", candidates)
    rows = trials(files.read(RECORDED)[1:], attacks)
    files.write(work / f"questions_{corpus}.jsonl.gz", subsample(rows, candidates, first))


def trials(recorded: Iterable[Mapping[str, Any]], attacks: Sequence[str]) -> list[dict[str, Any]]:
    """The trials of the attacks whose questions are complete and were written by a model.

    Args:
        recorded: Rows of a recorded set.
        attacks: Names of attacks; `natural` and `natural_title` are recorded as authors of MEntA's trials.
    """
    found = []
    for row in recorded:
        author, _, name = row["author"].partition(":")
        attack = name or row["attack"]
        if author == "model" and attack in attacks and all(row["questions"]):
            kept = {what: row[what] for what in ("candidate", "member", "questions")}
            found.append({"author": author, "attack": attack, **kept, "key": {}})
    return found


def subsample(
    rows: Sequence[dict[str, Any]], candidates: Iterable[Mapping[str, Any]], first: int
) -> list[dict[str, Any]]:
    """The trials about the first members and non-members that have a trial of every attack.

    >>> rows = [{"attack": a, "candidate": c} for a, c in (("x", "1"), ("x", "2"), ("y", "2"), ("x", "3"), ("y", "3"))]
    >>> found = subsample(rows, [{"id": i, "member": True} for i in "123"], 1)
    >>> [(row["attack"], row["candidate"]) for row in found]
    [('x', '2'), ('y', '2')]
    """
    most = len({row["attack"] for row in rows})
    asked = Counter(row["candidate"] for row in rows)
    taken: Counter[bool] = Counter()
    kept = set()
    for candidate in candidates:
        if asked[candidate["id"]] == most and taken[candidate["member"]] < first:
            taken[candidate["member"]] += 1
            kept.add(candidate["id"])
    return [row for row in rows if row["candidate"] in kept]
