"""Tables 1, 2 and 8 and Figure 1: how questions look to the guard, without anybody answering them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from casemate import metrics, stats
from casemate.app import build
from casemate.lab.wording import number
from casemate.protocols import MembershipAttack
from casemate.redteam import WRITTEN, Steps
from casemate.reproduce import drawing
from casemate.reproduce.laboratory import ATTACKS, K, OURS, PAPER, Lab, Setting, digest, nfcorpus
from casemate.reproduce.printed import FIVE, FOUR, NORMALITY, TABLE_1, TABLE_2, TABLE_8, Numbers
from casemate.reproduce.result import Cell, Result, Row, mean, printed, share, told
from casemate.stats import Rate
from casemate.types import Float64, Query, Vector

HARMLESS = "harmless"
LOOSER = "calibrated, 5 %"
"""Ours at the rate that the paper names."""
CORPUS = (
    "Index: 2,633 documents of NFCorpus, those that are none of the 1,000 published non-members, cut into chunks of 256 "
    "tokens. The paper: a member part of 70 %, each document one embedding.",
    "Embedder: all-MiniLM-L6-v2, 384 dimensions. The paper: BGE-M3, 1,024.",
    "Attack questions: written by script. The paper: GPT-4o and GPT-4o-mini for the questions of IA.",
    "One question of each attack about each candidate, of several one drawn at random. The paper: as many as there are "
    "harmless questions, 323.",
    "SciDocs and TREC-COVID are not at hand, and the detector that asks GPT-4o was not run: these rows are left out.",
)
OF_OURS = (
    "'calibrated' is fitted to the 324 dev questions of NFCorpus. The harmless questions here are the test questions.",
    "It flags at most 1 % of such questions, the product's usual rate; '5 %' at the rate that the paper names. Its "
    "threshold is an order statistic of 162 scores, so that the share itself varies.",
)
QUIET = "What the guard sees of a question does not depend on a reader, so none was simulated here."


class Asked(NamedTuple):
    """A question that somebody asks.

    Attributes:
        kind: The attack, or ``HARMLESS``.
        member: Whether it is about a document in the index.
        source: The document.
        text: The question.
    """

    kind: str
    member: bool
    source: str
    text: str


class Seen(NamedTuple):
    """What a guard did with it.

    Attributes:
        flagged: It withheld something.
        target: It withheld the document that the question is about.
    """

    flagged: bool
    target: bool


async def asked(lab: Lab) -> list[Asked]:
    """The harmless questions, and one of each attack about each candidate."""
    found = [Asked(HARMLESS, False, "", text) for text in lab.harmless]
    texts = sorted(document.content for document, _ in lab.split.candidates)
    for name, part in ATTACKS.items():
        attack: MembershipAttack = build("attack", part)
        attack.study(texts)
        for document, member in lab.split.candidates:
            rng = np.random.default_rng(int(digest([lab.setting.seed, name, document.source]), 16))
            questions = (await attack.prepare(document, rng)).questions
            if questions:
                found.append(Asked(name, member, document.source, questions[int(rng.integers(len(questions)))]))
    return found


async def judged(lab: Lab, questions: Sequence[Asked]) -> dict[str, dict[tuple[str, bool], list[Seen]]]:
    """What each guard does with each question, by attack and whether it is about a member. Every client is a new one."""
    guards = lab.bench.guards(lab.calibrated, {OURS: None, LOOSER: 0.05})
    found: dict[str, dict[tuple[str, bool], list[Seen]]] = {name: {} for name in guards}
    with lab.steps("looking at questions", len(questions)) as count:
        for number_, (kind, member, source, text) in enumerate(questions):
            query = Query(text, f"client-{number_}", k=K)
            for name, guard in guards.items():
                _, (verdict,) = await guard.retrieve(query)
                target = member and not lab.held[source].isdisjoint(verdict.hidden)
                found[name].setdefault((kind, member), []).append(Seen(bool(verdict.hidden), target))
            count(1)
    return found


async def table2(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Member attack queries against harmless ones and attack queries about non-members, half and half."""
    return await _detection(
        await nfcorpus(setting, steps, opened),
        "Table 2: questions that attack members, told from harmless ones and from attacks on non-members",
        TABLE_2,
        (False, True),
        "Negatives: harmless questions and questions about non-members, both kinds weighing the same. The paper has as "
        "many negatives as positives and does not say how many of which.",
    )


async def table8(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Member attack queries against harmless ones."""
    return await _detection(
        await nfcorpus(setting, steps, opened),
        "Table 8: questions that attack members, told from harmless ones",
        TABLE_8,
        (False,),
        "Negatives: harmless questions alone, weighing as much as the positives, of which the paper has as many.",
    )


async def _detection(lab: Lab, title: str, paper: dict[str, Numbers], against: tuple[bool, ...], how: str) -> Result:
    raise NotImplementedError
