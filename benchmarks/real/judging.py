"""Judges recorded answers by each attack's own scores, and writes the recorded set."""

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
"""Words in a row of a corpus document that a recorded text may not contain."""
FEWEST = 40
"""Fewest trials of an attack that are reported."""
SCORED_BY = {"natural": "menta", "natural_title": "menta"}
"""The attack that scores questions which no attack writes itself."""


def judge(corpus: str, work: Path, models: Sequence[str], complete: bool = False) -> dict[str, Any]:
    """Figures by reader, author and attack; writes one recorded set for each model.

    Args:
        corpus: Name of the corpus.
        work: Folder of prompts and answers.
        models: Names of the readers: `answers_reader_NAME.jsonl.gz` holds the answers of each. Empty: only the
            simulated reader.
        complete: Leave out the trials that the reader has not answered with the contexts of both sides.
    """
    sample = {row["id"]: row for row in files.read(work / f"sample_{corpus}.jsonl.gz")}
    given = {model: files.read_answers(work / f"answers_reader_{model}.jsonl.gz") for model in models}
    trials = _trials(corpus, work, sample)
    withheld = _withheld(trials)
    answered = {model: _complete(trials, given[model][0]) if complete else trials for model in models}
    kept = {planning.trial_key(trial) for own in answered.values() for trial in own}
    trials = [trial for trial in trials if not models or planning.trial_key(trial) in kept]
    found: dict[str, Any] = {"withheld": withheld, "benign": _benign(corpus, work), "readers": {}}
    simulated = _simulate(corpus, work, trials)
    for model in (*models, SIMULATED):
        answers, about = given.get(model, (simulated, {"model": "simulated_reader"}))
        others = {} if model == SIMULATED else _answered(work)
        scored = _scored(answered.get(model, trials), sample, answers, others)
        found["readers"][model] = {"about": about, "answers": len(answers), "attacks": _figures(scored, sample)}
        if model != SIMULATED:
            head = {"recorded": 1, "corpus": corpus, **about, "prompts": PROMPTS, "seed": SEED}
            rows = [*_recorded(scored, sample), *_questions(answered[model], scored, sample)]
            files.write(RECORDED / f"{corpus}_{model}.jsonl.gz", [head, *rows])
    return found


def _complete(trials: Sequence[dict[str, Any]], answers: Mapping[str, str]) -> list[dict[str, Any]]:
    """The trials that are answered on both sides."""
    return [t for t in trials if all(i in answers for side in SIDES for i in t[side])]


def _trials(corpus: str, work: Path, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trials with the ids of their prompts."""
    keys = {planning.trial_key(row): row["key"] for row in planning.selected(corpus, work)}
    _, trials = planning.reader_prompts(corpus, work)
    return [
        trial | {"key": keys[planning.trial_key(trial)], "member": sample[trial["candidate"]]["member"]}
        for trial in trials
        if planning.trial_key(trial) in keys
    ]


def _answered(work: Path) -> dict[tuple[str, int], list[str]]:
    """Ids of the prompts that were answered before the guard's contexts were known, by question and answer length."""
    path = work / "prompts_answered.jsonl.gz"
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in files.read(path) if path.exists() else ():
        if "id" in row:
            found[row["user"], row["max_tokens"]].append(row["id"])
    return found


def _scored(
    trials: Sequence[Mapping[str, Any]],
    sample: Mapping[str, Any],
    answers: Mapping[str, str],
    answered: Mapping[tuple[str, int], Sequence[str]],
) -> list[dict[str, Any]]:
    """The trials whose answers are complete, with the features of each side."""
    attacks = _attacks(sample)
    found = []
    for trial in trials:
        row = sample[trial["candidate"]]
        candidate = Document(row["id"], row["text"], row["title"])
        features, given = {}, {}
        replaced = [False] * len(trial["questions"])
        for side in SIDES:
            texts = [answers.get(i) for i in trial[side]]
            if side == "on":
                replaced = [text is None for text in texts]
                texts = [t if t is not None else _stand_in(trial, n, answers, answered) for n, t in enumerate(texts)]
            if None not in texts:
                given[side] = texts
                attack = attacks[trial["author"], trial["attack"]]
                probe = Probe(tuple(trial["questions"]), trial["key"])
                features[side] = list(asyncio.run(attack.measure(candidate, probe, [Reply(t) for t in texts])))
        if features:
            found.append({**trial, "features": features, "answers": given, "replaced": replaced})
    return found


def _stand_in(
    trial: Mapping[str, Any],
    number: int,
    answers: Mapping[str, str],
    answered: Mapping[tuple[str, int], Sequence[str]],
) -> str | None:
    """A real answer for a context from which the guard withheld other documents too.

    It belongs to the same question and a context in which only the candidate is missing, if the guard withheld it, or
    none. So the candidate is there or not, as in the guard's context.
    """
    bare = trial["off"][number]
    if not trial["hidden"][number]:
        return answers.get(bare)
    same = answered.get((f"Question: {trial['questions'][number]}", planning.length(trial["attack"])), ())
    return next((answers[i] for i in same if i != bare and i in answers), None)


def _attacks(sample: Mapping[str, Any]) -> dict[tuple[str, str], MembershipAttack]:
    """The attacks by author and name, with the sample's texts studied."""
    texts = sorted(Document(r["id"], r["text"], r["title"]).content for r in sample.values())
    writer = RecordedWriter({})
    found = {("script", name): attack for name, attack in scripted().items()}
    found |= {("model", name): attack for name, attack in generated(writer).items()}
    for attack in found.values():
        attack.study(texts)
    return found


def _figures(scored: Sequence[Mapping[str, Any]], sample: Mapping[str, Any]) -> dict[str, Any]:
    """AUC and true positive rates by author, attack and side, on the trials that have both sides."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for trial in scored:
        if all(side in trial["features"] for side in SIDES):
            groups[f"{trial['author']}:{trial['attack']}"].append(trial)
    half = {name: row["half"] for name, row in sample.items()}
    figures: dict[str, Any] = {}
    for name, trials in groups.items():
        if len(trials) < FEWEST:
            continue
        questions = sum(len(t["questions"]) for t in trials)
        replaced = sum(sum(t["replaced"]) for t in trials)
        figures[name] = {"trials": len(trials), "questions": questions, "stand_ins": replaced}
        for side in SIDES:
            measured = [
                Trial(t["candidate"], t["member"], tuple(t["features"][side]), len(t["questions"])) for t in trials
            ]
            figures[name][side] = brief(membership_metrics(measured, half, guarded=False))
    return figures


def brief(metrics: MembershipMetrics | None) -> dict[str, Any] | None:
    """The figures that are reported."""
    if metrics is None:
        return None
    kept = ("members", "nonmembers", "auc", "adjusted_accuracy", "tpr_at_1")
    return {name: value for name, value in asdict(metrics).items() if name in kept}


def _withheld(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares of questions about members: with the member in the bare context, and with the member withheld."""
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
    """Share of ordinary questions whose context the guard changed."""
    for row in files.read(work / f"contexts_{corpus}.jsonl.gz"):
        if row["author"] == "benign" and row["questions"]:
            changed = sum(set(a) != set(b) for a, b in zip(row["off"], row["on"], strict=True))
            return stats.proportion(changed, len(row["questions"]))
    return None


def _simulate(corpus: str, work: Path, trials: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The simulated reader's answers by id of the prompt; kept in a file."""
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
    """Rows of the recorded set: trials with both sides."""
    rows = []
    for trial in scored:
        if all(side in trial["features"] for side in SIDES):
            text = sample[trial["candidate"]]["text"]
            row = _row(trial, sample)
            row["features"] = trial["features"]
            if not any(quotes(answer, text) for given in trial["answers"].values() for answer in given):
                row |= {"answers": trial["answers"], "key": trial["key"]}
            rows.append(row)
    return rows


def _questions(
    trials: Sequence[Mapping[str, Any]], scored: Sequence[Mapping[str, Any]], sample: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the trials whose questions a model wrote, without answers if no reader answered them."""
    there = {planning.trial_key(trial) for trial in scored}
    return [_row(t, sample) for t in trials if t["author"] == "model" and planning.trial_key(t) not in there]


def _row(trial: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    """A trial without answers. Questions that quote the corpus at length are empty: the judgments remain."""
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
    """Whether a text contains so many words in a row of a source.

    >>> quotes("He said: one two three.", "zero one two three four", 3)
    True
    """
    given, own = (re.findall(r"\w+", t.lower()) for t in (text, source))
    there = {tuple(own[i : i + words]) for i in range(len(own) - words + 1)}
    return any(tuple(given[i : i + words]) in there for i in range(len(given) - words + 1))
