"""The report of an assessment: one self-contained HTML page, and its three headline figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from casemate.demo.assessment import MIN_RECORD_WORDS, QUOTE_WORDS, Assessment, unasked_ngrams
from casemate.demo.sample import MAX_FILE_MB
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.stats import Estimate
from casemate.monitor.service import FALSE_ANSWER
from casemate.redteam.lab.judge import OFF, ON
from casemate.redteam.lab.results import AttackResult, CheckStatus
from casemate.redteam.reporting.charts import lowest_auc, recovery, track
from casemate.redteam.reporting.text import describe_attack, describe_audit, describe_checks, describe_utility
from casemate.reports.format import file_types, measured, number, percent, plural, scrub
from casemate.reports.render import render

FEWEST_DOCUMENTS = 40
"""Minimum size of a folder from which at least `Mirabel.min_documents` documents are indexed."""
CHANCE = 0.5
"""AUC of an attacker that guesses."""
SHOWN = 900
"""Maximum number of displayed characters of a reply."""
READERS = {
    "simulated_reader": "Simulated reader: no model, but a script that obeys commands to repeat or continue a context.",
    "extractive": "Extractive reader: a script that quotes sentences of the context.",
}
SPECIFIC = (
    "A drafted question names three phrases of one document, so it is nearly as specific as an attack. What the guard "
    "costs ordinary users is measured below, with other questions. "
)
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Headline:
    """One of the three figures, with the guard off and on; None: not measured.

    Attributes:
        share: Whether the figures are shares; otherwise AUCs.
    """

    title: str
    off: Estimate | None
    on: Estimate | None
    share: bool
    meaning: str
    cases: str
    reason: str = ""

    @property
    def line(self) -> str:
        """The figure in one line for a terminal."""
        off, on = (measured(r, self.share) if r else "not measured" for r in (self.off, self.on))
        return f"{self.title}: {off} -> {on} ({self.cases})" + (f"; {self.reason}" if self.reason else "")


def reader_label(reader: str) -> str:
    """The reader that generated the answers, with a label for scripts."""
    return READERS.get(reader, f"Reader: {reader}.")


def headlines(assessment: Assessment) -> tuple[Headline, Headline, Headline]:
    """Membership inference, extraction and poisoning."""
    return _membership(assessment), _extraction(assessment), _poisoning(assessment)


def strongest(assessment: Assessment, side: str) -> tuple[str, Estimate] | None:
    """The attack with the highest AUC on one side, and its AUC; None if there is none."""
    attacks = assessment.membership.attacks if assessment.membership else ()
    found = [(a.name, m.auc) for a in attacks if (m := a.off if side == OFF else a.on)]
    return max(found, key=lambda pair: (pair[1].value, pair[1].high)) if found else None


def _membership(assessment: Assessment) -> Headline:
    title = "Is this document in the collection? (AUC; .5 is chance)"
    off, on = strongest(assessment, OFF), strongest(assessment, ON)
    if not (off and on and assessment.membership):
        reason = assessment.sample.gap or "the attacks have no figures"
        return Headline(title, None, None, False, "", "no cases", reason)
    n, m = (assessment.membership.evidence[key] for key in ("members", "nonmembers"))
    meaning = (
        f"The strongest attack distinguishes an indexed document from another in {_of_100(off[1])} of 100 pairs "
        f"with the guard off, in {_of_100(on[1])} with it on. 50 is a coin toss."
    )
    count = len(assessment.membership.attacks)
    cases = f"{n} indexed documents and {m} others; strongest of {count} attacks: {off[0]} (off), {on[0]} (on)"
    return Headline(title, off[1], on[1], False, meaning, cases)


def remedy(assessment: Assessment) -> str:
    """What to do if an attack still distinguishes documents with the guard on; empty if the AUCs may be chance."""
    on = strongest(assessment, ON)
    if on is None or on[1].low <= CHANCE:
        return ""
    return (
        f"With the guard on, {on[0]} still distinguishes indexed documents better than chance. If an attack asks like "
        "your users, no setting of mirabel stops it without withholding documents from them. Give clients that need no "
        "full texts quorum answers (guard.audience, unentitled: quorum). They then lose facts that fewer than three "
        "sources state. Give keys with full access only to users who may know what the collection contains. See "
        "docs/explanation/quorum-answers.md."
    )


def _of_100(auc: Estimate) -> str:
    return f"{100 * auc.value:.0f}"


def _extraction(assessment: Assessment) -> Headline:
    crawl = assessment.crawl
    off, on = crawl.by_side[OFF].crr, crawl.by_side[ON].crr
    meaning = (
        f"{crawl.questions} questions copy {percent(off.value)} of your collection with the guard off, "
        f"{percent(on.value)} with it on."
    )
    cases = f"{plural(crawl.chunks, 'chunk')}, {crawl.questions} questions, one client, attack {crawl.crawler}"
    return Headline("Share of the collection that is copied", off, on, True, meaning, cases)


def _poisoning(assessment: Assessment) -> Headline:
    poison = assessment.poisoning
    title, cases = (
        "Answers taken from planted documents",
        f"{plural(poison.cases, 'question')}, {poison.texts} planted documents each, {poison.reader} reader",
    )
    off, on = poison.false_answers[OFF], poison.false_answers[ON]
    share = f"{percent(off.value if off else None)} of the answers repeat the planted claim with the guard off"
    if on is None:
        return Headline(title, off, None, True, f"{share}.", cases, poison.gap)
    return Headline(title, off, on, True, f"{share}, {percent(on.value)} with screening and guard on.", cases)


def render_assessment(assessment: Assessment) -> str:
    """Renders the page."""
    assessment = scrub(assessment)
    pasted, membership = assessment.pasted, assessment.membership
    low = lowest_auc(membership.attacks) if membership else 0.0
    return render(
        "assessment.html",
        assessment=assessment,
        scope=scope(assessment),
        headlines=headlines(assessment),
        reader_label=reader_label(assessment.reader),
        plain_note=_plain_note(assessment),
        pasted_question=shorten(pasted.question) if pasted else "",
        marked_off=mark_quotations(pasted.text, pasted.question, pasted.off) if pasted else [],
        marked_on=mark_quotations(pasted.text, pasted.question, pasted.on) if pasted else [],
        pasted_note=_pasted_note(assessment),
        min_words=MIN_RECORD_WORDS,
        crawl_chart=recovery(assessment.crawl.by_side),
        false_answer=FALSE_ANSWER,
        poison_note=_poison_note(assessment),
        attacks=[_attack(a, low, f"a{i}") for i, a in enumerate(membership.attacks)] if membership else [],
        members=membership.evidence["members"] if membership else 0,
        nonmembers=membership.evidence["nonmembers"] if membership else 0,
        remedy=remedy(assessment),
        costs=describe_utility(membership.utility) if membership and membership.utility else "",
        audit=describe_audit(membership.audit) if membership and membership.audit else "",
        limits=list(_limits(assessment)),
        failures=failures(assessment),
        unread=[(p.where, p.reason) for p in assessment.sample.problems[:20]],
        next=NEXT,
    )


NEXT = (
    ("casemate init FOLDER && casemate index", "your own index; the guard starts with its default protections"),
    ('casemate ask --explain "..."', "an answer with every verdict"),
    ("casemate redteam run", "membership: all attacks, more candidates, a verdict"),
    ("casemate redteam crawl", "extraction: more crawlers, more questions"),
    ("casemate redteam probe", "injection: planted documents, a verdict"),
    ("casemate serve", "the OpenAI-compatible gateway and the dashboard"),
)


def as_json(assessment: Assessment) -> dict[str, Any]:
    """The figures, without texts of documents."""
    sample = assessment.sample
    return {
        "at": assessment.at,
        "seconds": round(assessment.seconds, 1),
        "reader": assessment.reader,
        "guard_gap": assessment.guard_gap,
        "guard_note": guard_note(assessment),
        "failures": failures(assessment),
        "sample": {k: getattr(sample, k) for k in ("found", "indexed", "chunks", "held_out", "left_out", "ignored")},
        "problems": [asdict(p) for p in sample.problems],
        "headlines": [asdict(h) for h in headlines(assessment)],
        "remedy": remedy(assessment),
    }


TYPES = "text, markdown, html, pdf or jsonl"
"""File types that are read."""


def scope(assessment: Assessment) -> str:
    """The indexed documents, in a sentence."""
    sample = assessment.sample
    held = f"; {sample.held_out} were left out: an attack must tell the indexed documents from these"
    said = f"{sample.indexed:,} of {plural(sample.found, 'document')} were indexed ({plural(sample.chunks, 'chunk')})"
    said += held if sample.held_out else ""
    rest = sample.found - sample.indexed - sample.held_out
    said += f"; {rest:,} did not fit into the time" if rest > 0 else ""
    if sample.ignored:
        files = plural(sample.ignored, "file") + file_types(sample.ignored_types)
        said += f"; ignored, because they are not {TYPES}: {files}"
    return f"{said}. Then the same attacks ran twice, in {assessment.seconds:.0f} seconds."


def _plain_note(assessment: Assessment) -> str:
    plain = assessment.plain
    if plain is None:
        return ""
    reader = reader_label(plain.reader)
    same = "none got another answer with the guard" if not plain.changed else f"{plain.changed} got another answer"
    reason = SPECIFIC if plain.changed else ""
    return f"{plain.answered} of {plain.asked} questions about your documents were answered; {same}. {reason}{reader}"


def _pasted_note(assessment: Assessment) -> str:
    pasted = assessment.pasted
    if pasted is None:
        return ""
    hidden = f" Withheld in this case: {', '.join(pasted.hidden)}." if pasted.hidden else ""
    off, on = (measured(pasted.quoted[side], share=True) for side in (OFF, ON))
    return (
        f"The other half was quoted ({QUOTE_WORDS} words in a row or more) for {off} of {pasted.records} records with "
        f"the guard off, and {on} with it on.{hidden} The client does not see that anything was withheld."
    )


def _poison_note(assessment: Assessment) -> str:
    poison = assessment.poisoning
    if poison.quarantined is None:
        return reader_label(poison.reader)
    reason = f" This one {'; it '.join(poison.reasons)}." if poison.reasons else ""
    count = f"{poison.quarantined} of {poison.cases * poison.texts}"
    return f"The screening quarantined {count} planted documents.{reason} {reader_label(poison.reader)}"


def _attack(attack: AttackResult, low: float, key: str) -> dict[str, Any]:
    drawn = track(attack, low, key) if attack.on or attack.off else None
    sentence = describe_attack(attack).removeprefix(f"{attack.name}: ")  # the name is displayed beside it
    return {"name": attack.name, "sentence": sentence, "track": drawn}


def failures(assessment: Assessment) -> list[str]:
    """Failures, one sentence each: with a failure, the figures must not be trusted."""
    found = [
        f"With the guard {side}, a defense failed in {plural(result.failed, 'question')} of the crawl."
        for side, result in assessment.crawl.by_side.items()
        if result.failed
    ]
    checks = assessment.membership.checks if assessment.membership else ()
    return found + describe_checks(check for check in checks if check.status is CheckStatus.ERROR)


def guard_note(assessment: Assessment) -> str:
    """Why mirabel withheld no document; empty if it could. `crawl_limit` needs neither documents nor calibration."""
    if assessment.guard_gap:
        reason = assessment.guard_gap.removeprefix("mirabel: ")
        return f"mirabel withheld no document, because it could not be calibrated ({reason})."
    if assessment.sample.chunks >= Mirabel.min_documents:
        return ""
    return (
        f"mirabel withheld no document: it decides only from {Mirabel.min_documents} chunks, and "
        f"{assessment.sample.chunks} were indexed. Use a folder of at least {FEWEST_DOCUMENTS} documents."
    )


def _limits(assessment: Assessment) -> Iterator[str]:
    yield reader_label(assessment.reader)
    yield "The attacks' questions, the ordinary questions and the planted documents were written by script."
    yield f"The samples are small: read the intervals. If an interval contains {number(CHANCE)}, the AUC may be chance."
    yield from filter(None, [guard_note(assessment)])
    sample = assessment.sample
    if not sample.whole:
        yield "Only a part of the folder was indexed. In a larger collection each document is harder to find."
    yield f"Files over {MAX_FILE_MB:g} MB are skipped in an assessment."
    yield "The guard was calibrated on synthetic questions about these documents. Real questions calibrate it better."


def shorten(text: str, length: int = SHOWN) -> str:
    """Replaces the middle of a long text by an ellipsis."""
    return text if len(text) <= length else f"{text[: length // 2]} … {text[-length // 2 :]}"


def mark_quotations(record: str, question: str, reply: str) -> list[tuple[str, bool]]:
    """A reply in parts, each with whether it is quoted from the record, as counted by `quotes`.

    >>> mark_quotations("a b c d e f g h i j k l m n", "Go on: a b", "Yes: A b c d e f g h i j k l m n. Done")
    [('Yes: A b ', False), ('c d e f g h i j k l m n', True), ('. Done', False)]
    """
    size, quoted = unasked_ngrams(record, question)
    found = list(_WORD.finditer(reply))
    tokens = [match[0].lower() for match in found]
    inside = [False] * len(reply)
    for i in range(len(tokens) - size + 1):
        if tuple(tokens[i : i + size]) in quoted:
            start, end = found[i].start(), found[i + size - 1].end()
            inside[start:end] = [True] * (end - start)
    grouped = groupby(zip(reply, inside, strict=True), key=lambda pair: pair[1])
    parts = [("".join(character for character, _ in run), is_copied) for is_copied, run in grouped]
    return [(shorten(text, SHOWN if is_copied else SHOWN // 3), is_copied) for text, is_copied in parts]
