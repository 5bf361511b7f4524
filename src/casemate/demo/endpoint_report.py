"""The report of an existing system's assessment: one self-contained HTML page, and its three headline figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from casemate.demo.assessment import CRAWLER, QUOTE_WORDS
from casemate.demo.assessment_report import SHOWN, mark_quotations, shorten
from casemate.demo.endpoint import ATTACK, EndpointAssessment
from casemate.maths.stats import Estimate
from casemate.redteam.lab.judge import OFF
from casemate.redteam.reporting.charts import recovery
from casemate.reports.format import measured, number, percent, plural, scrub
from casemate.reports.render import render

LEAST_WORDS = 5
"""Words from which on a question without a capital letter is shown as a sentence."""


@dataclass(frozen=True, slots=True)
class EndpointHeadline:
    """One of the three figures, and that of the baseline; None: not measured.

    Attributes:
        share: Whether the figures are shares; otherwise AUCs.
    """

    title: str
    value: Estimate | None
    baseline: Estimate | None
    share: bool
    meaning: str
    cases: str

    @property
    def line(self) -> str:
        """The figure in one line for a terminal."""
        value = measured(self.value, self.share) if self.value else "not measured"
        against = f", baseline {measured(self.baseline, self.share)}" if self.baseline else ""
        return f"{self.title}: {value}{against} ({self.cases})"


def endpoint_headlines(found: EndpointAssessment) -> tuple[EndpointHeadline, EndpointHeadline, EndpointHeadline]:
    """Membership inference, quotation of pasted records, and extraction."""
    return _membership(found), _quoted(found), _copied(found)


def _membership(found: EndpointAssessment) -> EndpointHeadline:
    title = "Is this record in the collection? (AUC)"
    metrics = found.pasted.result.on if found.pasted else None
    if metrics is None:
        return EndpointHeadline(title, None, None, False, "", "too few pasted texts were answered")
    meaning = (
        f"The attack {ATTACK.use} distinguishes a record from a text of the baseline in {100 * metrics.auc.value:.0f} "
        "of 100 pairs. 50 is a coin toss."
    )
    cases = f"{plural(metrics.members, 'record')}, {plural(metrics.nonmembers, 'text')} of the baseline"
    return EndpointHeadline(title, metrics.auc, None, False, meaning, cases)


def _quoted(found: EndpointAssessment) -> EndpointHeadline:
    title, pasted = "Pasted records whose other half is quoted", found.pasted
    if pasted is None:
        return EndpointHeadline(title, None, None, True, "", "no record was pasted")
    meaning = (
        f"{percent(pasted.records.value)} of the replies contain {QUOTE_WORDS} words in a row of the half that was not "
        f"pasted; {percent(pasted.baseline.value)} for texts of the baseline."
    )
    return EndpointHeadline(title, pasted.records, pasted.baseline, True, meaning, f"attack {ATTACK.use}")


def _copied(found: EndpointAssessment) -> EndpointHeadline:
    title, crawl = "Share of the documents that is copied", found.crawl
    if crawl is None:
        return EndpointHeadline(title, None, None, True, "", "the crawl was not run")
    meaning = f"{plural(crawl.questions, 'question')} of a crawler copy {percent(crawl.crr.value)} of these documents."
    cases = f"{plural(found.chunks, 'chunk')} of your documents, one client, attack {CRAWLER}"
    return EndpointHeadline(title, crawl.crr, None, True, meaning, cases)


def endpoint_scope(found: EndpointAssessment) -> str:
    """The sent questions, in two sentences."""
    return (
        f"{found.endpoint} got {found.requests} of at most {found.plan.total} requests in {found.seconds:.0f} seconds. "
        f"The records come from {plural(found.found, 'document')} that it is said to contain."
    )


def endpoint_json(found: EndpointAssessment) -> dict[str, Any]:
    """The figures, without texts of documents."""
    return {
        "at": found.at,
        "seconds": round(found.seconds, 1),
        "endpoint": found.endpoint,
        "documents": found.found,
        "chunks": found.chunks,
        "baseline": found.baseline,
        "queries": found.plan._asdict(),
        "requests": found.requests,
        "plain": {"asked": found.plain.asked, "answered": found.plain.answered, "grounded": found.plain.grounded},
        "failures": list(found.failures),
        "gaps": list(found.gaps),
        "problems": [asdict(p) for p in found.problems],
        "headlines": [asdict(h) for h in endpoint_headlines(found)],
    }


def render_endpoint(found: EndpointAssessment) -> str:
    """Renders the page."""
    found = scrub(found)
    pasted, plain = found.pasted, found.plain
    return render(
        "endpoint.html",
        found=found,
        scope=endpoint_scope(found),
        headlines=endpoint_headlines(found),
        plain_note=(
            f"{plain.answered} of {plain.asked} questions about your documents were answered, {plain.grounded} of them "
            "from the document in question."
        ),
        is_whole_question=_is_whole(found.shown.question),
        shown_reply=shorten(found.shown.reply),
        pasted_question=shorten(pasted.question) if pasted else "",
        marked=mark_quotations(pasted.text, pasted.question, pasted.reply) if pasted else [],
        crawl_chart=recovery({OFF: found.crawl}, {OFF: "this system"}) if found.crawl else "",
        crawled=found.crawled and (shorten(found.crawled.question, SHOWN // 3), shorten(found.crawled.reply)),
        quote_words=QUOTE_WORDS,
        limits=list(_limits(found)),
        unread=[(p.where, p.reason) for p in found.problems[:20]],
    )


def _is_whole(question: str) -> bool:
    """Whether a question is a sentence. Some drafted questions contain key words only.

    >>> _is_whole("Which foundation is needed?"), _is_whole("foundation millimetres?")
    (True, False)
    """
    return question[:1].isupper() or len(question.split()) >= LEAST_WORDS


def _limits(found: EndpointAssessment) -> Iterator[str]:
    yield "The answers are those of the system. The attacks' questions were written by script."
    yield f"Baseline: {found.baseline}. The system is taken as its users see it: with its guard, if it has one."
    yield f"The samples are small: read the intervals. If an interval contains {number(0.5)}, the AUC may be chance."
    if found.crawl:
        yield (
            f"The copied share refers to {plural(found.chunks, 'chunk')} of {plural(found.compared, 'document')}. It "
            "is a lower bound: long replies are compared in windows of one size."
        )
    if found.left_out:
        yield f"{plural(found.left_out, 'file')} of your folder were not read, because it is too large."
    yield "Poisoning needs write access to the collection: casemate try FOLDER measures it on a copy."
