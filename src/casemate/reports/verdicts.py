"""Verdicts in plain words, for the operator: decision, score and threshold, reason, what was withheld."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from casemate.guard.audience import ReleasedDocument
from casemate.reports.format import decimal, number, percent, plural
from casemate.types import Action, Answer, Verdict

REASONS = {
    "closeness": "the question is closer to a document than benign questions are",
    "session": "evidence against this client accumulated over several questions",
    "before": "the document was flagged for this client before, and stays withheld",
    "unit": "the document is a copy of a flagged one, or belongs to the same unit",
}
"""Reasons of ``mirabel``, by their name in the evidence."""
CUTS = {
    "quote_words": "it would disclose more new words of its context than one answer may",
    "whole": "it would disclose most of more chunks than one answer may",
    "questions": "it would disclose most of more chunks than the client may be given in a period",
    "exposure": "it would disclose a larger share of a chunk than a suspected client may be given",
    "short_quote_words": "it would disclose more new words than an answer to a suspected client may",
    "budget": "the new words that the client may be given in a period are used up",
    "tenant_budget": "the new words that all clients of the tenant together may be given in a period are used up",
}
"""Limits of ``crawl_limit`` that cut an answer, by the name of the option."""
LEAST_EVIDENCE, ORDERS_ABOVE = 0.1, 6.0
"""Evidence of ``crawl_limit`` is drawn from the first on, and up to so many powers of ten above the alarm."""
NOTES = {
    "mirabel": "mirabel: a score is that of one source, from wording and similarity, so the highest need not have "
    "rank 1; the threshold differs at random by client and document",
    "crawl_limit": "crawl_limit: evidence 1 is that of an ordinary client; above the second number, it raises an alarm",
}
"""What the figures of a defense with a threshold mean."""
SHOWN = 5
"""Names in a list."""


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def verdict_lines(v: Verdict) -> list[str]:
    """A line with the decision, a line with the reason, and a line with what is withheld, if anything is.

    ``quorum`` flags no question. If no unreadable source was relevant, one line says so.
    """
    if v.defense == "quorum" and "best" in v.evidence:
        return [f"quorum: {reason(v.defense, v.evidence)}"]
    figures = score_figures(v.defense, v.score, v.threshold)
    lines = [
        f"{v.defense}: {_decision(v)}{f'; {figures}' if figures else ''}",
        f"  reason: {reason(v.defense, v.evidence)}",
    ]
    kept_back = "left out" if v.defense == "quorum" else "withheld"
    kept_back = kept_back if v.enforced else "would withhold"
    if sources := v.evidence.get("withheld"):
        scores = v.evidence.get("scores", {})
        judged = [f"{s} (score {decimal(scores[s])})" if s in scores else s for s in sources]
        lines.append(f"  {kept_back} sources: {some(judged)}")
    elif v.hidden:
        lines.append(f"  {kept_back} chunks: {some(v.hidden)}")
    return lines


def reason(defense: str, evidence: Mapping[str, Any]) -> str:
    """Why a defense decided as it did. Evidence of a defense that is not built in is listed by its keys."""
    if "error" in evidence:
        return str(evidence.get("message") or evidence["error"])
    if "undecided" in evidence and not evidence.get("reasons"):
        return str(evidence["undecided"])
    try:
        return DEFENSES.get(defense, _listed)(evidence)
    except (KeyError, TypeError, ValueError):  # evidence of another version
        return _listed(evidence)


def context_rows(answer: Answer) -> list[tuple[str, str, float | None]]:
    """Id, source and score of each document in the context. What several units state together has no score."""
    evidence = next((v.evidence for v in answer.verdicts if "units" in v.evidence), {})
    units, released = evidence.get("stating", evidence.get("units", 0)), evidence.get("words", 0)
    combined = f"({plural(units, 'source')} combined)" if released and units else "(no source)"
    return [
        (combined, combined, None)
        if isinstance(hit.document, ReleasedDocument)
        else (hit.document.id, hit.document.source, hit.score)
        for hit in answer.retrieval.hits
    ]


def evidence_items(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The recorded evidence as names and values, without empty texts and lists."""
    return [(name.replace("_", " "), text) for name, value in evidence.items() if (text := _text(value))]


def _decision(v: Verdict) -> str:
    if "error" in v.evidence:
        what = "failed"
    elif "undecided" in v.evidence and not v.flagged:
        what = "could not decide"
    elif v.defense == "quorum":
        left_out = f"{plural(len(v.hidden), 'chunk')} that the client may not read"
        return f"left out {left_out}" if v.enforced else f"would leave out {left_out} (observe mode)"
    elif v.flagged:
        what = "flagged by an earlier question only" if v.evidence.get("reasons") == ["before"] else "flagged"
    else:
        what = "not flagged"
    withheld = _withheld(v)
    if not withheld:
        return f"{what}, nothing withheld"
    return f"{what}, {withheld} withheld" if v.enforced else f"{what}, {withheld} would be withheld (observe mode)"


def score_figures(defense: str, score: float, threshold: float | None) -> str:
    """The score of a verdict and its threshold, with two decimals, or as many as show on which side it is.

    ``crawl_limit``: its evidence against a client, and the value above which it raises an alarm. Empty if the verdict
    has no threshold or no score.

    >>> score_figures("mirabel", 3.0, 2.0), score_figures("mirabel", 13.7004, 13.7), score_figures("quorum", 0.0, 0.0)
    ('score 3.00, threshold 2.00', 'score 13.7004, threshold 13.7000', '')
    >>> score_figures("crawl_limit", 20.0, 1e5), score_figures("crawl_limit", 1e100, 1e5)
    ('evidence 20 of 100,000', 'evidence above 100,000')
    """
    if threshold is None or not (score or threshold):
        return ""
    if defense == "crawl_limit":
        return f"evidence above {threshold:,.0f}" if score > threshold else f"evidence {score:.3g} of {threshold:,.0f}"
    digits = next((d for d in range(2, 6) if decimal(score, d) != decimal(threshold, d)), 2)
    return f"score {decimal(score, digits)}, threshold {decimal(threshold, digits)}"


def score_position(defense: str, score: float, threshold: float) -> tuple[float, float]:
    """Where a score and its threshold are drawn on a line.

    The evidence of ``crawl_limit`` is a product, from below 1 to far above the alarm. It is drawn as a logarithm to
    base 10, with limits at both ends.

    >>> score_position("mirabel", 3.0, 2.0), score_position("crawl_limit", 1000.0, 1e5)
    ((3.0, 2.0), (3.0, 5.0))
    >>> score_position("crawl_limit", 1e100, 1e5)
    (11.0, 5.0)
    """
    if defense != "crawl_limit":
        return score, threshold
    drawn, alarm = (math.log10(max(x, LEAST_EVIDENCE)) for x in (score, threshold))
    return min(drawn, alarm + ORDERS_ABOVE), alarm


def _withheld(v: Verdict) -> str:
    if v.action is Action.WITHHOLD and "error" in v.evidence:
        return "the whole context"
    if v.hidden:
        return plural(len(v.hidden), "chunk")
    return "the rest of the answer" if v.action is Action.WITHHOLD else ""


def _listed(e: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in evidence_items(e)) or "none given"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _mirabel(e: Mapping[str, Any]) -> str:
    if e["form"] != "calibrated":
        compared = f"mean similarity {number(e['mean'])}, standard deviation {number(e['std'])}"
        return f"the closest source is {e['target']}, compared with {plural(e['n'], 'chunk')} ({compared})"
    reasons = [REASONS.get(name, name) for name in e["reasons"]] or ["no document is closer than in benign questions"]
    closest = f"highest score against its threshold: {e['target']}; " if e["target"] else ""
    return f"{'; '.join(reasons)} ({closest}{percent(e['p'])} of benign questions are as close)"


def _crawl_limit(e: Mapping[str, Any]) -> str:
    if "cut" in e:
        return f"the answer was cut: {CUTS[e['cut']]} ({e['cut']} {e['most']:g})"
    grade = {"full": "whole chunks", "extracts": "extracts", "quorum": "no text of a document"}[e["grade"]]
    together = "; all clients of the tenant are restricted" if "tenant_until" in e else ""
    tests = f"evidence of long quotes {e['quotes']:.3g}, of questions that repeat answers {e['echoes']:.3g}"
    level = e["level"]
    if "alarmed_from" in e:  # events of earlier versions have no limits
        tests += f" (suspected above {e['suspected_above']:g}, alarmed from {e['alarmed_from']:,.0f})"
        earlier = level == "alarmed" and max(e["quotes"], e["echoes"]) < e["alarmed_from"]
        level += " by an earlier question" if earlier else ""
    seen = f"client {level}: {plural(e['chunks'], 'different chunk')} shown"
    return f"{seen}, {tests}; it is answered from {grade}{together}"


def _honeytoken(e: Mapping[str, Any]) -> str:
    if e.get("what") == "leaked":
        return f"the answer began to contain the planted {e['form']} (generation {e['generation']}) and was cut"
    if e.get("what") == "known to the asker":
        return f"the question contains planted tokens: {some([token['form'] for token in e['tokens']])}"
    if e.get("what") == "record quoted":
        return f"the answer quotes planted records: {some(e['records'])}"
    known = f"this client has retrieved {plural(e['different'], 'different one')}"
    crawls = ", as a crawler does" if e["crawler"] else ""
    found = f"in the context: {some(e['flagged'])}" if e["flagged"] else "among the hits beyond the context"
    return f"planted records {found}; {known}{crawls}"


def _canary_token(e: Mapping[str, Any]) -> str:
    if "leaked" in e:
        return f"the answer began to contain the watermark of chunk {e['leaked']} and was cut"
    silent = "; the model gave none on request either" if e["oracle"] == "failed" else ""
    return f"the answer contains the watermark of none of {plural(len(e['marked']), 'chunk')}{silent}"


def _quorum(e: Mapping[str, Any]) -> str:
    if "best" in e:
        sources = plural(e["left_out"], "unreadable source") if "left_out" in e else "unreadable sources"
        none = f"none was relevant (best {number(e['best'])}, needs {number(e['floor'])})"
        return f"left out {sources}; {none}; {plural(e['readable'], 'readable document')} kept"
    verb = "states" if e.get("stating") == 1 else "state"
    stating = f"; {e['stating']} of them {verb} something about the question" if "stating" in e else ""
    units = f"{plural(e['units'], 'unit')} (a unit is a source with its copies{stating})"
    said = f"{plural(e['words'], 'keyword')} released from {units} that the client may not read"
    parts = [said, f"{plural(e['readable'], 'readable document')} kept"]
    if e.get("support"):
        parts.append(f"units that state each keyword: {', '.join(map(str, e['support']))}")
    if "altered" in e:
        parts.append(f"units that must change to alter the answer: {e['altered']}")
    if "epsilon" in e:
        parts.append(f"with noise (epsilon {e['epsilon']:g})" + (", repeated" if e.get("repeated") else ""))
    if opened := e.get("break_glass"):
        granted = "one unit answered alone" if opened["granted"] else "a unit alone had no break-glass answer left"
        parts.append(f"{granted}: {some(opened['sources'])}")
    return "; ".join(parts)


def _query_filter(e: Mapping[str, Any]) -> str:
    if e["by"] == "judge":
        return "label of the judge"
    return f"the wording matches rules: {some(e['rules'])}" if e["rules"] else "the wording matches no rule"


def _reindex(e: Mapping[str, Any]) -> str:
    moved = f"{plural(e['came_in'], 'chunk')} came into the context, which has {plural(e['topics'], 'topic')}"
    return f"ordered for topic {e['topic']} by version {e['version']} ({e['mode']}); {moved}"


DEFENSES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "mirabel": _mirabel,
    "crawl_limit": _crawl_limit,
    "honeytoken": _honeytoken,
    "canary_token": _canary_token,
    "quorum": _quorum,
    "query_filter": _query_filter,
    "reindex": _reindex,
    "personal_data": lambda e: "masked: " + (", ".join(f"{n} {kind}" for kind, n in e.items()) or "nothing"),
    "dp_rag": lambda e: f"{plural(e['kept'], 'chunk')} kept above the noisy similarity threshold {number(e['floor'])}",
    "similarity_floor": lambda e: (
        f"least similarity in the context {number(e['lowest'])}, floor {number(e['floor'])}; "
        f"{plural(e['kept'], 'chunk')} of the context reach it"
    ),
}
"""For each defense with verdicts, the reason in words."""
