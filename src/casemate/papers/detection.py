"""Tables 1, 2 and 8 and Figure 1: detection of attack questions, without generating answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeAlias

import numpy as np

from casemate.guard.defenses.query_filter import QueryFilter
from casemate.guard.guard import Guard
from casemate.maths import metrics, stats
from casemate.papers.laboratory import ATTACKS, CORPUS, OURS, PAPER, K, Lab, Setting, nfcorpus
from casemate.papers.published_numbers import (
    FIVE,
    NORMALITY,
    TABLE_1,
    TABLE_2,
    TABLE_2_AGENT,
    TABLE_8,
    TABLE_8_AGENT,
    Numbers,
)
from casemate.papers.result import Cell, Panel, Result, Row, balanced_cells, mean, share, write_figure
from casemate.plugins import build
from casemate.protocols import MembershipAttack, Steps
from casemate.redteam.campaigns.pipeline import SCRIPTED_ATTACKS
from casemate.redteam.lab.experiment import digest
from casemate.reports.format import number
from casemate.reports.svg import step_chart
from casemate.types import Float64, Query, Vector

Kind: TypeAlias = tuple[str, bool]
"""The attack, or ``HARMLESS``; and whether the questions are about members."""

HARMLESS = "harmless"
LOOSER = "calibrated, 5 %"
"""The calibrated guard at the false-alarm rate of the paper."""
ONE_EACH = (
    "Each attack asks one question about each candidate, drawn at random if it has several. The paper has 323, as many "
    "as there are benign questions.",
    f"{SCRIPTED_ATTACKS} In the paper, GPT-4o and GPT-4o-mini write for IA.",
)
AGENT = "agent"
"""The detector that labels a question by its wording."""
NOT_RUN = (
    "The agent is simulated: the rules of query_filter replace GPT-4o, which the paper asks for a label. SciDocs and "
    "TREC-COVID are left out, because they are not available."
)
OF_OURS = (
    "'calibrated' is fitted to the dev questions of NFCorpus, and to probes that the same six attacks write about 200 "
    "documents of the index. The benign questions here are the test questions. It may flag at most 1 % of benign "
    "questions, the default. '5 %' is the significance of the paper.",
)
BINS = 48


class Asked(NamedTuple):
    """A question about a document; ``kind`` is the attack, or ``HARMLESS``."""

    kind: str
    member: bool
    source: str
    text: str


class Seen(NamedTuple):
    """Whether a guard withheld a document, and whether it withheld the document that the question is about."""

    flagged: bool
    target: bool


async def table1(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Tests whether a question's similarities to all documents are normally distributed."""
    lab = await nfcorpus(setting, steps, opened)
    questions = await asked(lab)
    kept = [question for question in questions if question.member or question.kind == HARMLESS]
    rows = [Row(kind, "printed", numbers) for kind, numbers in TABLE_1.items()]
    with steps("testing for normality", len(kept)) as count:
        for (kind, _), S, sources in similarities(lab, kept):
            rows.append(Row(kind, "here", _normality(S, sources)))
            count(len(S))
    columns = (*NORMALITY, "without its document", "rejected", "rejected without s_max")
    return Result(
        "Table 1: mean p of D'Agostino and Pearson's test on the similarities S_q of each question",
        columns,
        tuple(sorted(rows, key=lambda row: [HARMLESS, *ATTACKS].index(row.of))),
        (*CORPUS, *ONE_EACH),
        (
            "'rejected' is the share of questions with p below .05. 'without its document' leaves out all chunks of "
            "the nearest document.",
        ),
        lab.facts,
    )


def _normality(S: Vector, sources: Sequence[str]) -> dict[str, Cell]:
    """Means and shares of p-values over the rows of S, (questions, chunks)."""
    place = {source: np.flatnonzero(np.array(sources) == source) for source in set(sources)}
    p = []
    for row in S.astype(np.float64):
        best = int(row.argmax())
        p.append([metrics.normality_p_value(np.delete(row, out)) for out in ([], [best], place[sources[best]])])
    whole, alone, without = np.array(p).T
    return {
        **dict(zip((*NORMALITY, "without its document"), map(mean, (whole, alone, without)), strict=True)),
        "rejected": share(whole < 0.05),
        "rejected without s_max": share(alone < 0.05),
    }


async def table2(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Questions that attack members, against benign questions and questions that attack non-members."""
    how = (
        "Negatives are benign questions and attacks on non-members. Both kinds have equal weight, together as much as "
        "the positives. The paper has as many negatives as positives, and does not say how many of each kind."
    )
    title = "Table 2: attacks on members, against benign questions and attacks on non-members"
    printed = {AGENT: TABLE_2_AGENT, PAPER: TABLE_2}
    return await _detection(await nfcorpus(setting, steps, opened), title, printed, True, how)


async def table8(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Questions that attack members, against benign questions."""
    how = "Negatives are benign questions, with the total weight of the positives. The paper has as many of both."
    title = "Table 8: attacks on members, against benign questions"
    printed = {AGENT: TABLE_8_AGENT, PAPER: TABLE_8}
    return await _detection(await nfcorpus(setting, steps, opened), title, printed, False, how)


async def _detection(
    lab: Lab, title: str, printed: Mapping[str, Mapping[str, Numbers]], others: bool, how: str
) -> Result:
    found = await judged(lab, await asked(lab))
    rows = []
    for attack in ATTACKS:
        rows += [Row(attack, f"{name}, printed", paper[attack]) for name, paper in printed.items() if attack in paper]
        rows += [Row(attack, f"{name}, here", _cells(seen, attack, others)) for name, seen in found.items()]
    columns = (*FIVE, *(("non-members flagged",) if others else ()), "target withheld")
    remark = (
        "'target withheld' is the share of attacks on members in which the attacked document was withheld. "
        "Precision would be far lower if fewer than half of the questions were attacks."
    )
    return Result(title, columns, tuple(rows), (*CORPUS, *ONE_EACH, how, NOT_RUN), (remark, *OF_OURS), lab.facts)


def _cells(seen: Mapping[Kind, Sequence[Seen]], attack: str, others: bool) -> dict[str, Cell]:
    flags = {kind: [s.flagged for s in found] for kind, found in seen.items()}
    positives, harmless, outside = flags[attack, True], flags[HARMLESS, False], flags[attack, False]
    cells = balanced_cells(positives, harmless, *([outside] if others else []))
    cells |= {"harmless flagged": share(harmless), "target withheld": share([s.target for s in seen[attack, True]])}
    return cells | ({"non-members flagged": share(outside)} if others else {})


async def figure1(setting: Setting, steps: Steps, opened: ExitStack) -> Result:
    """Similarity of questions to all documents and to the nearest one."""
    lab = await nfcorpus(setting, steps, opened)
    edges = np.linspace(-0.3, 1.0, BINS + 1)
    rows, every, largest, line = [], {}, {}, 0.0
    questions = await asked(lab)
    with steps("comparing questions with all documents", len(questions)) as count:
        for kind, S, _ in similarities(lab, questions):
            best = S.max(axis=1)
            line = line or _line(S, best)  # benign questions come first
            every[kind], largest[kind] = (np.histogram(x, edges)[0] / x.size for x in (S, best))
            rows.append(Row(kind[0], _of(kind), _similarity(S, best, line)))
            count(len(S))
    panels = [*_panels("all similarities", edges, every), *_panels("the largest of each", edges, largest, line)]
    path = write_figure(setting.folder / "mirabel-figure1.html", "Similarities of questions to documents", panels)
    said = (
        f"The line is at {number(line, 3)}, the threshold of Algorithm 1. Its mean and deviation are those of all "
        "similarities of all benign questions without the largest of each, as in the paper's figure. The guard uses "
        "those of each question.",
        "The paper's figure has no numbers.",
    )
    columns = ("mean of S_q", "deviation of S_q", "s_max", "above the line")
    return Result(
        "Figure 1: similarities of questions to all documents, and the largest of them",
        columns,
        tuple(rows),
        (*CORPUS, *ONE_EACH),
        said,
        lab.facts,
        (path,),
    )


def _line(S: Vector, best: Vector) -> float:
    """A global threshold from the similarities of benign questions, (questions, chunks)."""
    count = S.size - len(best)
    x = S.astype(np.float64)
    middle = (x.sum() - best.sum()) / count
    spread = ((x - middle) ** 2).sum() - ((best.astype(np.float64) - middle) ** 2).sum()
    return float(middle + np.sqrt(spread / count) * stats.extreme_value_threshold(S.shape[1], 0.05, "paper"))


def _similarity(S: Vector, best: Vector, line: float) -> dict[str, Cell]:
    return {
        "mean of S_q": mean(S.mean(axis=1)),
        "deviation of S_q": mean(S.std(axis=1)),
        "s_max": mean(best),
        "above the line": share(best > line),
    }


def _of(kind: Kind) -> str:
    return "questions" if kind[0] == HARMLESS else "on members" if kind[1] else "on non-members"


def _panels(title: str, edges: Float64, shares: Mapping[Kind, Float64], line: float | None = None) -> Iterator[Panel]:
    """Questions of each attack beside benign questions."""
    for attack in ATTACKS:
        kinds = {"members": (attack, True), "non-members": (attack, False), HARMLESS: (HARMLESS, False)}
        groups = {name: shares[kind] for name, kind in kinds.items() if kind in shares}
        caption = f"{attack}: {title}"
        yield caption, step_chart(caption, edges, groups, "cosine similarity", line)


async def asked(lab: Lab) -> list[Asked]:
    """Benign questions, then one question of each attack about each candidate. Their vectors are cached."""
    found = [Asked(HARMLESS, False, "", text) for text in lab.harmless]
    texts = sorted(document.content for document, _ in lab.split.candidates)
    for name, part in ATTACKS.items():
        attack: MembershipAttack = build("attack", part)
        attack.study(texts)
        for document, member in lab.split.candidates:
            rng = np.random.default_rng(int(digest(lab.setting.seed, name, document.source), 16))
            questions = (await attack.prepare(document, rng)).questions
            if questions:
                found.append(Asked(name, member, document.source, questions[int(rng.integers(len(questions)))]))
    with lab.steps("embedding questions", len(found)) as count:
        await asyncio.to_thread(lab.bench.rag.embedder.embed, [question.text for question in found], count)
    return found


async def judged(lab: Lab, questions: Sequence[Asked]) -> dict[str, dict[Kind, list[Seen]]]:
    """Decisions of each guard about each question. Every question has a new client."""
    guards = {AGENT: Guard(lab.bench.rag, [QueryFilter()])}
    guards |= lab.bench.guards(lab.calibrated, {OURS: None, LOOSER: 0.05})
    found: dict[str, dict[Kind, list[Seen]]] = {name: {} for name in guards}
    with lab.steps("looking at questions", len(questions)) as count:
        for place, (kind, member, source, text) in enumerate(questions):
            for name, guard in guards.items():
                _, (verdict,) = await guard.retrieve(Query(text, f"client-{place}", k=K))
                target = member and not lab.held[source].isdisjoint(verdict.hidden)
                found[name].setdefault((kind, member), []).append(Seen(bool(verdict.hidden), target))
            count(1)
    return found


def similarities(lab: Lab, questions: Sequence[Asked]) -> Iterator[tuple[Kind, Vector, list[str]]]:
    """Similarities of the questions to all chunks by kind, (questions, chunks), and the sources of the chunks."""
    parts = [(documents, vectors.copy()) for documents, vectors in lab.bench.rag.index.scan()]
    E = np.concatenate([vectors for _, vectors in parts])
    sources = [document.source for documents, _ in parts for document in documents]
    kinds = dict.fromkeys((question.kind, question.member) for question in questions)
    for kind in kinds:
        texts = [question.text for question in questions if (question.kind, question.member) == kind]
        yield kind, lab.bench.rag.embedder.embed(texts) @ E.T, sources
