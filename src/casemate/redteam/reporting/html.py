"""The report of a campaign as one self-contained HTML page: it loads nothing, and needs no network.

One headline, the checks, then the evidence: attacks, questions and answers, costs, audit, figures. The text is in
``reports/templates/report.html``. Questions and answers are filtered by ``explorer.js``, the only script that the page
may run; without it, the page shows the worst sessions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from casemate.guard.generation_costs import format_live_costs
from casemate.redteam.lab.results import (
    SEVERITY,
    AttackResult,
    AttackSession,
    CampaignResult,
    Check,
    CheckStatus,
    ExtractionResult,
    RedactedExchange,
)
from casemate.redteam.reporting.charts import histogram, lowest_auc, recovery, roc, track
from casemate.redteam.reporting.compare import compare_results, conclusion, flatten
from casemate.redteam.reporting.sessions import OUTCOMES, outcome
from casemate.redteam.reporting.standards import DISCLAIMER, related_requirements
from casemate.redteam.reporting.text import (
    auc_in_words,
    common_reason,
    describe_extracted,
    describe_personal_data,
    guard_effect,
    headline,
    is_one_system,
    mean_ratio,
    measured_and_limit,
    overall_status,
    reported_checks,
    strongest_attack,
    undecided_note,
    with_full_stop,
)
from casemate.reports.format import measured, number, plural, scrub
from casemate.reports.render import CSP, load_script, render

FIRST_SESSIONS, FIRST_QUESTIONS = 10, 5  # sessions, and questions of each, that the page shows without its script
TONES = {
    "identified": "fail",
    "undecided": "inconclusive",
    "named": "inconclusive",
    "protected": "pass",
    "recovered": "fail",
    "bare": "pass",
    "nothing": "pass",
    "missed": "pass",
    "cleared": "pass",
}
"""CSS class of each outcome of a session."""
_BLOCK = re.compile(r"(▇×\d+)")


def render_html(
    campaign: CampaignResult, baseline: CampaignResult | None = None, crawl: CampaignResult | None = None
) -> str:
    """Renders a report, compared with a ``baseline`` if there is one, and beside an extraction campaign."""
    campaign = scrub(campaign)
    extraction = _extraction(campaign) if is_crawl(campaign) else _extraction(scrub(crawl), True) if crawl else None
    script, csp = load_script("explorer.js") if campaign.sessions else ("", CSP)
    return render(
        "report.html",
        csp=csp,
        campaign=campaign,
        status=overall_status(campaign),
        target=campaign.evidence.get("target", "own"),
        one_system=is_one_system(campaign),
        headline=headline(campaign),
        strongest=strongest_attack(campaign),
        undecided=undecided_note(campaign),
        checks=list(requirements(reported_checks(campaign))),
        comparison=describe_comparison(campaign, scrub(baseline)) if baseline else None,
        membership=not is_crawl(campaign) and not campaign.probes,
        probes=campaign.probes,
        personal_data=describe_personal_data(campaign.personal_data) if campaign.personal_data else "",
        overview=list(overview(campaign.attacks)),
        extraction=extraction,
        charts=[_charts(a, f"a{i}") for i, a in enumerate(campaign.attacks) if a.off or a.on],
        explorer=_explorer(campaign, script) if campaign.sessions else None,
        evidence=[(name.replace("_", " "), value) for name, value in flatten(campaign.evidence)],
        cost=[(name.replace("_", " "), _amount(value)) for name, value in campaign.cost.items()],
        cost_note=format_live_costs(campaign.cost),
        standards=related_requirements(campaign.checks),
        disclaimer=DISCLAIMER,
    )


def is_crawl(campaign: CampaignResult) -> bool:
    """Whether a campaign ran crawlers, with or without figures."""
    return bool(campaign.crawls or campaign.extracted)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def requirements(checks: Iterable[Check]) -> Iterator[dict[str, Any]]:
    """The checks by requirement, worst first: one that concerns several attacks is stated once."""
    checks = sorted(checks, key=lambda c: SEVERITY.index(c.status))
    order = list(dict.fromkeys(check.name for check in checks))
    for name, group in groupby(sorted(checks, key=lambda c: order.index(c.name)), key=lambda c: c.name):
        made = list(group)
        shared, own = common_reason([check.reason for check in made])
        yield {
            "name": name,
            "status": made[0].status,
            "reason": with_full_stop(shared),
            "ids": " · ".join([*(f"OWASP {i}" for i in made[0].owasp), *(f"MITRE ATLAS {i}" for i in made[0].atlas)]),
            "results": [
                {
                    "attack": check.attack,
                    "status": check.status,
                    "figures": measured_and_limit(check).strip(" ()"),
                    "reason": "" if check.status is CheckStatus.PASS else with_full_stop(rest),
                }
                for check, rest in zip(made, own, strict=True)
            ],
        }


def describe_comparison(campaign: CampaignResult, baseline: CampaignResult) -> dict[str, Any]:
    """The changes since an earlier campaign, in groups with a title."""
    change = compare_results(campaign, baseline)
    return {"at": baseline.at, "conclusion": conclusion(change), "groups": change.groups}


def overview(attacks: Sequence[AttackResult]) -> Iterator[dict[str, Any]]:
    """The AUC of each attack by side, in words and drawn, and what the guard changes, or why there are no figures."""
    low = lowest_auc(attacks)
    for i, attack in enumerate(attacks):
        yield {
            "name": attack.name,
            "sides": [(side, metrics.auc, auc_in_words(metrics.auc)) for side, metrics in attack.sides.items()],
            "note": guard_effect(attack) if attack.sides else f"No figures: {attack.error or 'it was not run'}",
            "track": track(attack, low, f"a{i}") if attack.sides else None,
        }


def _explorer(campaign: CampaignResult, script: str) -> dict[str, Any]:
    """Questions and answers: the data of the script, and the worst sessions for a page without it."""
    sessions = campaign.sessions
    total = max(campaign.sessions_total, len(sessions))
    found = [outcome(session) for session in sessions]
    complete = sum(bool(session.exchanges) for session in sessions)
    limits = [f"Only the {len(sessions):,} worst of {total:,} sessions are listed."] if total > len(sessions) else []
    if complete < len(sessions):
        limits.append(f"Questions are included for {complete:,} sessions, the worst of each attack.")
    crawl = all(session.member is None for session in sessions)
    attacks = sorted({session.attack for session in sessions})
    return {
        "script": script,
        "crawl": crawl,
        "kinds": [] if crawl else [("", "all"), ("member", "members"), ("nonmember", "non-members")],
        "order": "question" if crawl else "candidate",
        "total": f"{total:,}",
        "limits": " ".join(limits),
        "attacks": [("", "all"), *((name, name) for name in attacks)],
        "outcomes": [
            ("", "all"),
            *((key, f"{label} ({found.count(key):,})") for key, label in OUTCOMES.items() if key in found),
        ],
        "first": [_first_session(session) for session in sessions[:FIRST_SESSIONS]],
        "data": {
            "outcomes": dict(OUTCOMES),
            "tones": TONES,
            "sessions": [{**asdict(session), "outcome": key} for session, key in zip(sessions, found, strict=True)],
        },
    }


def _first_session(session: AttackSession) -> dict[str, Any]:
    key = outcome(session)
    return {
        "attack": session.attack,
        "candidate": session.candidate,
        "outcome": OUTCOMES[key],
        "tone": TONES[key],
        "turns": [
            {
                "question": _parts(next(iter(turn.values())).question),
                "sides": [(side, _answer(exchange)) for side, exchange in turn.items()],
            }
            for turn in session.exchanges[:FIRST_QUESTIONS]
        ],
    }


def _answer(exchange: RedactedExchange) -> dict[str, Any]:
    state = "rejected by the target" if exchange.refused else "answered" if exchange.answered else "no answer"
    rest = exchange.hidden_count - len(exchange.hidden)
    context = {None: "", True: "Candidate in the context.", False: "Candidate not in the context."}
    return {
        "state": state,
        "reply": _parts(exchange.reply),
        "context": context[exchange.in_context],
        "recovered": f"{plural(exchange.recovered_count, 'chunk')}: {', '.join(exchange.recovered)}"
        if exchange.recovered_count
        else "",
        "sources": exchange.context,
        "hidden": [*exchange.hidden, *([f"{rest} more"] if rest else [])],
        "reasons": exchange.reasons,
    }


def _charts(attack: AttackResult, key: str) -> dict[str, Any]:
    backend = "fixed rules, without a language model" if attack.backend == "deterministic" else attack.backend
    on = attack.on
    both = on is not None and on.recall_query is not None and on.nonmember_flags is not None
    return {
        "name": attack.name,
        "about": f"{attack.paper}. Backend: {backend}.",
        "hits": on.recall_query if on and both else None,
        "misses": on.nonmember_flags if on and both else None,
        "roc": roc(attack, key),
        "histograms": [(side, histogram(attack, side, key)) for side in ("off", "on")],
    }


def _parts(text: str) -> list[tuple[str, bool]]:
    """A redacted text in parts, each with whether it is a redacted block."""
    return [(part, _BLOCK.fullmatch(part) is not None) for part in _BLOCK.split(text)]


def _extraction(campaign: CampaignResult, separate: bool = False) -> dict[str, Any]:
    """The extraction section; ``separate``: the page reports another campaign, so this one's verdict is shown here."""
    one = is_one_system(campaign)
    return {
        "separate": separate,
        "one_system": one,
        "at": campaign.at,
        "target": campaign.evidence.get("target", "own"),
        "status": overall_status(campaign),
        "crawls": [
            {
                "attack": crawl.attack,
                "ratio": crawl.ratio,
                "budget": crawl.budget,
                "clients": crawl.clients,
                "sides": [{"name": side, "cells": _cells(side, result)} for side, result in crawl.by_target.items()],
                "chart": recovery(crawl.by_target, dict.fromkeys(crawl.by_target, "this system") if one else None),
            }
            for crawl in campaign.crawls
        ],
        "mean_ratio": mean_ratio(campaign.crawls),
        "extracted_texts": list(describe_extracted(campaign)),
    }


def _cells(side: str, result: ExtractionResult) -> list[str]:
    known = result.coverage is not None
    alarm = str(result.first_alarm) if result.first_alarm else "none" if known else "unknown"
    half = result.crr_after.get("50%")
    return [
        measured(result.crr, share=True),
        measured(result.crr_recall, share=True),
        measured(result.coverage, share=True) if known else "unknown",
        number(result.efficiency) if known else "unknown",
        str(half) if half else "never",
        "–" if side == "off" else alarm,
    ]
