"""Tables 4, 5, 9 and 12 and Figure 3: success of attackers that see the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np

from casemate.errors import DataError
from casemate.maths.stats import clustered_rate
from casemate.papers.laboratory import ATTACKS, BARE, CORPUS, OURS, PAPER, K, Lab, Setting, nfcorpus
from casemate.papers.published_numbers import FOUR, SYSTEMS, TABLE_4, TABLE_5, TABLE_9, TABLE_12, Numbers
from casemate.papers.readers import BATCH, reader_note
from casemate.papers.result import Cell, Panel, Result, Row, averaged, balanced_cells, distance, mean, write_figure
from casemate.plugins import build
from casemate.protocols import MembershipAttack, Steps, Target
from casemate.redteam.campaigns.pipeline import SCRIPTED_ATTACKS
from casemate.redteam.lab import judge
from casemate.redteam.lab.datasets import Half
from casemate.redteam.lab.experiment import Experiment, ExperimentPlan, digest
from casemate.redteam.lab.fitting import cross_fit
from casemate.redteam.lab.results import Trial
from casemate.reports.format import measured
from casemate.reports.svg import GroupHistogram, score_histogram

Found: TypeAlias = Mapping[tuple[str, str], tuple[Trial, ...]]
"""Finished trials by attack and system."""
Figure: TypeAlias = Callable[[str, Sequence[Trial], Mapping[str, Half]], Cell]
"""Computes a cell from an attack, its trials, and the half of each candidate."""

BINS = 20
SETTING = (
    f"{SCRIPTED_ATTACKS} In the paper, GPT-4o and GPT-4o-mini write for IA.",
    "MBA masks 10 words. The paper uses the best of 5, 10, 15 and 20.",
    "S2MIA computes the perplexity of the reply after the candidate from word counts. The paper uses GPT-2.",
    "Each candidate has a client of its own, because the calibrated guard keeps state per client.",
    "SciDocs and TREC-COVID are left out, because they are not available.",
)
FITTED = (
    "Thresholds are fitted under the attacked system on one half of the candidates and judged on the other, then the "
    "reverse. Of several features, the best of three rules is used, so IA may have any lambda. The paper fits on one "
    "half, with a lambda from .5 to 1.",
)
PRIVATE = (
    "Only the printed figures of DP-RAG are shown. It draws each token from a model's probabilities, and the simulated "
    "reader has none. mirabel-table6, mirabel-table10 and mirabel-table11 measure it with the offline pair.",
)
SYSTEMS_HERE = (BARE, PAPER, OURS)


async def table4(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Adjusted attack accuracy."""
    return await _by_system(
        await nfcorpus(setting, steps, opened),
        "Table 4: adjusted accuracy of attackers; 0 is chance, .5 is always correct",
        TABLE_4,
        lambda attack, trials, half: judge.adjusted_accuracy(cross_fit(trials, half)),
        FITTED,
    )


async def table5(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Kolmogorov-Smirnov distance between the scores of members and non-members."""
    how = (
        "Distances are of the attack's score, over all candidates. That of S2MIA is the mean over BLEU and likelihood, "
        "with no candidate left out. The score of IA has lambda 1.",
    )
    return await _by_system(
        await nfcorpus(setting, steps, opened),
        "Table 5: Kolmogorov-Smirnov distance between scores of members and non-members; 0 is equal",
        TABLE_5,
        lambda attack, trials, half: score_distance(attack, trials),
        how,
    )


async def table12(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Kolmogorov-Smirnov distance of each score of S2MIA."""
    lab = await nfcorpus(setting, steps, opened)
    found = await run_attacks(lab, ("S2MIA",))
    rows = []
    for place, (score, printed) in enumerate(TABLE_12.items()):
        rows.append(Row(score, "printed", printed))
        cells: dict[str, Cell] = {}
        for system in SYSTEMS_HERE:
            trials = found["S2MIA", system]
            inside, outside = ([t.features[place] for t in trials if t.member is kind] for kind in (True, False))
            cells[system] = distance(inside, outside)
        rows.append(Row(score, "here", cells))
    title = "Table 12: Kolmogorov-Smirnov distance between members and non-members, by score of S2MIA; 0 is equal"
    remark = "Table 5 prints the mean of both."
    return Result(title, SYSTEMS_HERE, tuple(rows), _differs(lab), (remark,), lab.facts)


async def table9(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Accuracy, precision, recall and F1 of attackers."""
    lab = await nfcorpus(setting, steps, opened)
    found = await run_attacks(lab, tuple(ATTACKS))
    rows = []
    for attack in ATTACKS:
        for system in SYSTEMS_HERE:
            rows += [Row(attack, f"{system}, printed", TABLE_9[attack, system])] if (attack, system) in TABLE_9 else []
            fitted = cross_fit(found[attack, system], lab.split.half)
            said = balanced_cells(fitted.predicted[fitted.member], fitted.predicted[~fitted.member])
            rows.append(Row(attack, f"{system}, here", said))
    title = "Table 9: accuracy, precision, recall and F1 of attackers; .5 is chance"
    return Result(title, FOUR, tuple(rows), (*_differs(lab), *FITTED), _withheld(found), lab.facts)


async def figure3(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """IA's scores, unguarded and guarded."""
    lab = await nfcorpus(setting, steps, opened)
    found = await run_attacks(lab, ("IA",))
    rows = [Row("IA", f"{system}, printed", {"distance": n}) for system, n in TABLE_5["IA"].items()]
    for system in SYSTEMS_HERE:
        trials = found["IA", system]
        inside, outside = ([t.features[0] for t in trials if t.member is kind] for kind in (True, False))
        cells: dict[str, Cell] = {
            "members": mean(inside),
            "others": mean(outside),
            "distance": score_distance("IA", trials),
        }
        rows.append(Row("IA", f"{system}, here", cells))
    path = write_figure(setting.folder / "mirabel-figure3.html", "Scores of IA", _panels(found))
    title = "Figure 3: scores of IA, means and Kolmogorov-Smirnov distance (Table 5)"
    remark = "A score is the share of right answers minus that of 'I don't know' (lambda 1), from -1 to 1."
    columns = ("members", "others", "distance")
    return Result(title, columns, tuple(rows), _differs(lab), (remark,), lab.facts, (path,))


def _panels(found: Found) -> list[Panel]:
    """Unguarded system and both guards, on common histogram scales."""
    edges = np.histogram_bin_edges([t.features[0] for system in SYSTEMS_HERE for t in found["IA", system]], BINS)
    shapes = {}
    for system in SYSTEMS_HERE:
        scores = ([t.features[0] for t in found["IA", system] if t.member is kind] for kind in (True, False))
        members, others = (np.histogram(some, edges)[0] / len(some) for some in scores)
        shapes[system] = GroupHistogram(edges.tolist(), members.tolist(), others.tolist())
    panels = []
    for place, system in enumerate(SYSTEMS_HERE):
        pair = {"off": shapes[BARE], "on": shapes[PAPER if system == BARE else system]}
        panels.append((system, score_histogram("IA", pair, "off" if system == BARE else "on", f"f{place}")))
    return panels


def _differs(lab: Lab) -> tuple[str, ...]:
    return (*CORPUS, f"{reader_note(lab.setting.reader)} The paper uses Llama-3.2-3B.", *SETTING)


async def _by_system(
    lab: Lab, title: str, paper: Mapping[str, Numbers], figure: Figure, how: tuple[str, ...]
) -> Result:
    """A table with one attack per row and one system per column."""
    found = await run_attacks(lab, tuple(ATTACKS))
    rows = []
    for attack in ATTACKS:
        rows += [Row(attack, "printed", paper[attack])] if attack in paper else []
        cells = {system: figure(attack, found[attack, system], lab.split.half) for system in SYSTEMS_HERE}
        rows.append(Row(attack, "here", cells))
    columns = (*SYSTEMS[:2], OURS, *SYSTEMS[2:])
    return Result(title, columns, tuple(rows), (*_differs(lab), *PRIVATE, *how), _withheld(found), lab.facts)


def _withheld(found: Found) -> tuple[str, ...]:
    """Share of questions about members for which each guard withheld the member."""
    lines = []
    for system in (PAPER, OURS):
        rates = []
        for attack in ATTACKS:
            inside = [t for t in found[attack, system] if t.member]
            rate = clustered_rate([t.hidden for t in inside], [t.questions for t in inside])
            rates.append(f"{attack} {measured(rate, share=True)}")
        lines.append(f"{system} withheld the member in this share of the questions about it: {', '.join(rates)}.")
    return tuple(lines)


def score_distance(attack: str, trials: Sequence[Trial]) -> Cell:
    """Distance between an attack's scores of members and of non-members."""
    inside, outside = (np.array([t.features for t in trials if t.member is kind]) for kind in (True, False))
    scores = 2 if attack == "S2MIA" else 1  # the other attacks have one feature that is the score
    return averaged([(inside[:, i], outside[:, i]) for i in range(scores)])


async def run_attacks(lab: Lab, names: Sequence[str]) -> Found:
    """Attacks every candidate on the unguarded system and both guards; finished trials are reused.

    Raises:
        DataError: If an attack was interrupted, or a defense failed.
    """
    bench = lab.bench
    attacks: dict[str, MembershipAttack] = {name: build("attack", ATTACKS[name]) for name in names}
    targets: dict[str, Target] = {BARE: bench.rag, **bench.guards(lab.calibrated)}
    facts = [bench.state, lab.calibrated.read_text(encoding="utf-8")]
    plan = ExperimentPlan(seed=lab.setting.seed, k=K, label=digest(*facts), concurrency=BATCH)
    experiment = Experiment(attacks, lab.split, targets, bench.ledger, lab.held, plan)
    with lab.steps("attacking", experiment.total) as count:
        trials = await experiment.run(count)
    if trials.errors or trials.failed or trials.missing:
        reason = "; ".join(trials.errors.values()) or trials.reason or f"a defense failed in {trials.failed} questions"
        raise DataError(f"the attacks were not completed: {reason}")
    return trials.done
