"""Scores recorded answers by each attack's own measure, and writes the recorded set."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ROOT, SEED
from benchmarks.real import files, planning
from benchmarks.real.questions import PROMPTS, RecordedWriter, generated, scripted
from casemate.backends.generators.simulated_reader import SimulatedReader
from casemate.maths import stats
from casemate.protocols import MembershipAttack
from casemate.redteam.lab.judge import membership_metrics
from casemate.redteam.lab.results import MembershipMetrics, Trial
from casemate.types import Document, Probe, Prompt, Reply

SIDES = ("off", "on")
SIMULATED = "simulated"
RECORDED = ROOT / "benchmarks/recorded"
VERBATIM = 20
"""Length in words of a quotation from the corpus that a recorded text may not contain."""
FEWEST = 40
"""Minimum number of trials of a reported attack."""
SCORED_BY = {"natural": "menta", "natural_title": "menta"}
"""The attack that scores the questions of each natural asker."""


def judge(corpus: str, work: Path, models: Sequence[str]) -> dict[str, Any]:
    """Metrics by reader, author and attack; writes one recorded set for each model.

    Trials without a complete set of answers on both sides are left out.

    Args:
        corpus: Name of the corpus.
        work: Folder of prompts and answers.
        models: Names of the readers with answers in `answers_reader_NAME.jsonl.gz`. Empty: only the simulated reader.
    """
    sample = {row["id"]: row for row in files.read(work / f"sample_{corpus}.jsonl.gz")}
    given = {model: files.read_answers(work / f"answers_reader_{model}.jsonl.gz") for model in models}
    trials = asked_trials(corpus, work, sample)
    found: dict[str, Any] = {"withheld": _withheld(trials), "benign": _benign(corpus, work), "readers": {}}
    answered = {model: _complete(trials, answers) for model, (answers, _) in given.items()}
    kept = {planning.trial_key(trial) for own in answered.values() for trial in own}
    answered[SIMULATED] = [trial for trial in trials if not models or planning.trial_key(trial) in kept]
    given[SIMULATED] = _simulate(corpus, work, answered[SIMULATED]), {"model": "simulated_reader"}
    for model, (answers, about) in given.items():
        scored = _scored(answered[model], sample, answers)
        found["readers"][model] = {"about": about, "answers": len(answers), "attacks": _figures(scored, sample)}
        if model != SIMULATED:
            head = {"recorded": 1, "corpus": corpus, **about, "prompts": PROMPTS, "seed": SEED}
            files.write(RECORDED / f"{corpus}_{model}.jsonl.gz", [head, *_recorded(scored, sample)])
    return found


def _complete(trials: Sequence[dict[str, Any]], answers: Mapping[str, str]) -> list[dict[str, Any]]:
    """The trials with answers on both sides."""
    return [t for t in trials if all(i in answers for side in SIDES for i in t[side])]


def asked_trials(corpus: str, work: Path, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trials with the ids of their prompts."""
    keys = {planning.trial_key(row): row["key"] for row in planning.selected(corpus, work)}
    _, trials = planning.reader_prompts(corpus, work)
    return [
        trial | {"key": keys[planning.trial_key(trial)], "member": sample[trial["candidate"]]["member"]}
        for trial in trials
        if planning.trial_key(trial) in keys
    ]


def _scored(
    trials: Sequence[Mapping[str, Any]], sample: Mapping[str, Any], answers: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The trials with their answers and the features of each side."""
    attacks = _attacks(sample)
    found = []
    for trial in trials:
        row = sample[trial["candidate"]]
        candidate = Document(row["id"], row["text"], row["title"])
        attack, probe = attacks[trial["author"], trial["attack"]], Probe(tuple(trial["questions"]), trial["key"])
        given = {side: [answers[i] for i in trial[side]] for side in SIDES}
        features = {
            side: list(asyncio.run(attack.measure(candidate, probe, [Reply(t) for t in texts])))
            for side, texts in given.items()
        }
        found.append({**trial, "features": features, "answers": given})
    return found


def _attacks(sample: Mapping[str, Any]) -> dict[tuple[str, str], MembershipAttack]:
    """The attacks by author and name, prepared on the sample's texts."""
    texts = sorted(Document(r["id"], r["text"], r["title"]).content for r in sample.values())
    writer = RecordedWriter({})
    found = {("script", name): attack for name, attack in scripted().items()}
    found |= {("model", name): attack for name, attack in generated(writer).items()}
    for attack in found.values():
        attack.study(texts)
    return found


def _figures(scored: Sequence[Mapping[str, Any]], sample: Mapping[str, Any]) -> dict[str, Any]:
    """AUC and true positive rates by author, attack and side."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for trial in scored:
        groups[f"{trial['author']}:{trial['attack']}"].append(trial)
    half = {name: row["half"] for name, row in sample.items()}
    figures: dict[str, Any] = {}
    for name, trials in groups.items():
        if len(trials) < FEWEST:
            continue
        questions = sum(len(t["questions"]) for t in trials)
        figures[name] = {"trials": len(trials), "questions": questions}
        for side in SIDES:
            measured = [
                Trial(t["candidate"], t["member"], tuple(t["features"][side]), len(t["questions"])) for t in trials
            ]
            figures[name][side] = brief(membership_metrics(measured, half, guarded=False))
    return figures


def brief(metrics: MembershipMetrics | None) -> dict[str, Any] | None:
    """The reported metrics."""
    if metrics is None:
        return None
    kept = ("members", "nonmembers", "auc", "adjusted_accuracy", "tpr_at_1")
    return {name: value for name, value in asdict(metrics).items() if name in kept}


def _withheld(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rates among questions about members: member in the unguarded context, and member withheld."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        if trial["member"]:
            count = counts[f"{trial['author']}:{trial['attack']}"]
            count.update(asked=len(trial["questions"]), shown=sum(trial["shown"]), hidden=sum(trial["hidden"]))
            count.update(documents=1, hidden_documents=any(trial["hidden"]))
    return {
        name: {
            "questions": c["asked"],
            "in_context": stats.proportion(c["shown"], c["asked"]),
            "withheld": stats.proportion(c["hidden"], c["shown"]) if c["shown"] else None,
            "documents_withheld": stats.proportion(c["hidden_documents"], c["documents"]),
        }
        for name, c in counts.items()
    }


def _benign(corpus: str, work: Path) -> Any:
    """Share of benign questions whose context the guard changed."""
    for row in files.read(work / f"contexts_{corpus}.jsonl.gz"):
        if row["author"] == "benign" and row["questions"]:
            changed = sum(set(a) != set(b) for a, b in zip(row["off"], row["on"], strict=True))
            return stats.proportion(changed, len(row["questions"]))
    return None


def _simulate(corpus: str, work: Path, trials: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Answers of the simulated reader by prompt id, cached in a file."""
    held = work / f"answers_reader_{SIMULATED}.jsonl.gz"
    answers = files.read_answers(held)[0] if held.exists() else {}
    wanted = {i for trial in trials for side in SIDES for i in trial[side]} - answers.keys()
    if wanted:
        prompts, _ = planning.reader_prompts(corpus, work)
        for name in sorted(wanted):
            answers[name] = asyncio.run(_read(prompts[name]))
        files.write(held, [{"id": name, "answer": text} for name, text in answers.items()])
    return answers


async def _read(prompt: Prompt) -> str:
    return "".join([chunk async for chunk in SimulatedReader().stream(prompt)])


def _recorded(scored: Sequence[Mapping[str, Any]], sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the recorded set, without answers that contain a long quotation from the corpus."""
    rows = []
    for trial in scored:
        text = sample[trial["candidate"]]["text"]
        row = _row(trial, sample) | {"features": trial["features"]}
        if not any(quotes(answer, text) for given in trial["answers"].values() for answer in given):
            row |= {"answers": trial["answers"], "key": trial["key"]}
        rows.append(row)
    return rows


def _row(trial: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    """A trial without answers. Questions with a long quotation from the corpus are replaced by an empty text."""
    attack = SCORED_BY.get(trial["attack"], trial["attack"])
    return {
        "attack": attack,
        "author": trial["author"] if attack == trial["attack"] else f"{trial['author']}:{trial['attack']}",
        "candidate": trial["candidate"],
        "member": trial["member"],
        "half": sample[trial["candidate"]]["half"],
        "questions": ["" if quotes(q, sample[trial["candidate"]]["text"]) else q for q in trial["questions"]],
        "withheld": trial["hidden"],
    }


def quotes(text: str, source: str, words: int = VERBATIM) -> bool:
    """Whether a text contains a run of ``words`` words of a source.

    >>> quotes("He said: one two three.", "zero one two three four", 3)
    True
    """
    given, own = (re.findall(r"\w+", t.lower()) for t in (text, source))
    there = {tuple(own[i : i + words]) for i in range(len(own) - words + 1)}
    return any(tuple(given[i : i + words]) in there for i in range(len(given) - words + 1))
