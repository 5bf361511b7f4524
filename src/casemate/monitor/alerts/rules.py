"""Alert rules: which alerts a canary run, a drift check or a corpus check opens, updates and closes.

Pure functions: open alerts go in, events come out. Event ids are derived from the run, so processing a run twice
notifies once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from casemate.monitor.alerts.alert import (
    Alert,
    AlertPhase,
    AlertState,
    alert_to_event,
    highest_severity,
    make_alert_id,
)
from casemate.monitor.alerts.messages import MAX_ITEMS, sanitize
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Severity
from casemate.monitor.drift.answer_drift import DriftReading
from casemate.monitor.drift.corpus_drift import MIN_SAME_COSINE, CorpusChange, VectorAudit
from casemate.monitor.trends.cusum import MIN_PASSES, AlarmLimits, CusumState, RunAnalysis, WatchedSet
from casemate.monitor.trends.trend import (
    BLIND,
    CHANGED,
    DECAY,
    FAILURES,
    MANY,
    PERSISTENT,
    SUDDEN,
    UNREACHABLE,
    TrendFinding,
    persistent_failures,
    run_findings,
)
from casemate.reports.durations import duration
from casemate.types import Event

SEQUENTIAL_KINDS = {CHANGED, MANY}
"""Alerts of the sequential tests."""
PAGE_RULE_KINDS = {SUDDEN, PERSISTENT, FAILURES}
"""Alerts of the page rules."""
MANY_CANARIES = 3
"""From this number of canaries on, the severity of an alert is one step above theirs."""
MAX_COMPARED, SHOWN_CONTEXT = 3, 5
"""Canaries whose answers before and after an alert shows, and documents of a context that it names."""
MAX_DOCUMENTS = 20
"""Documents that a drift or corpus alert lists."""
ALL_UPDATES = "All of them: 'casemate events --kind corpus-update'."
TRACED = {"traced answers": "Answers in traces", "traced questions": "Questions in traces"}
"""Series of recorded traces."""
DRIFT_SUBJECTS = {"canaries": "Answers to the canaries", "traffic": "Verdicts about the traffic"} | TRACED
"""What drifted, by series."""
TITLES = {
    CHANGED: "{n} canar{y} fail{s} more often than in the baseline",
    MANY: "{n} canaries failed in one run",
    DECAY: "canaries fail more often together than in the baseline",
    UNREACHABLE: "the target does not answer",
    BLIND: "{n} canar{y} get{s} no answer",
    SUDDEN: "{n} canar{y} failed after passing",
    PERSISTENT: "{n} canar{y} failed in 8 of the last 10 runs or more",
    FAILURES: "more than 10 % of the canaries failed",
}
SHOW_HISTORY = "Show the history: 'casemate canary trend'."
ADVICE = {
    CHANGED: (
        "Ask the question with 'casemate ask --explain', which names withheld documents, and compare its context with "
        "the baseline.",
        "If an intended change of corpus, model or guard explains it, record a new baseline: 'casemate canary "
        "baseline'.",
    ),
    MANY: (
        "Look for one common cause first: a new index, embedder, model, prompt, bulk import, or enforcement by the "
        "guard.",
        "If there is none, restore the corpus of the last run without failures.",
    ),
    DECAY: (
        "No single canary stands out. Look for what changed for all: model, prompt, embedder, index, slow poisoning.",
        "If an intended change explains it, record a new baseline: 'casemate canary baseline'.",
    ),
    UNREACHABLE: ("Check that the monitored system is running. Until it answers, no canary is checked.",),
    BLIND: ("Check why these questions get no answer while others do: a rate limit, a crash or a missing tenant.",),
}
GUARD_WITHHELD = (
    "Check the guard first: it withheld documents from these answers. Ask the question with 'casemate ask --explain', "
    "which gives the reason of each defense.",
    "If these documents are benign, calibrate on your users' questions: 'casemate calibrate --recorded'. Until then, "
    "switch back to observe mode: 'casemate enforce --off'.",
)
NEW_DOCUMENTS = (
    "Check the new documents first: who added them, when, and whether their content is genuine.",
    "Remove documents of unknown origin from the index, then run the canaries again: 'casemate canary run'.",
)
EXTERNAL_ADVICE = {
    CHANGED: (
        "Ask the target the question again, and compare answer and sources with the baseline.",
        "If an intended change of corpus or model explains it, record a new baseline: 'casemate canary baseline'.",
    ),
    MANY: (
        "Look for one common cause first: a new index, embedder, model, prompt or bulk import of the target.",
        "If there is none, ask the target's operator to restore the corpus of the last run without failures.",
    ),
}
"""For a target of which only the answers are known; the other kinds as in ``ADVICE``."""
NEW_SOURCES = (
    "Check the new sources first: who added them to the target, when, and whether their content is genuine.",
    "Have sources of unknown origin removed from the target, then run the canaries again: 'casemate canary run'.",
)


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run, with everything its alerts report.

    ``documents``, ``sources`` and ``passed`` are those of ``new_documents``, ``new_sources`` and ``last_passes``.
    """

    before: CusumState
    analysis: RunAnalysis
    results: Sequence[CanaryResult]
    documents: Mapping[str, Sequence[str]]
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    passed: Mapping[str, CanaryResult] = field(default_factory=dict)


def alert_events(
    states: Iterable[AlertState], run: RunContext, watched: WatchedSet, limits: AlarmLimits
) -> list[Event]:
    """Changes of a set's alerts after one of its runs; alerts of other sets are ignored."""
    before = {s.alert.id: s for s in states if s.open and s.alert.set == watched.name}
    current = {name: s.alert for name, s in before.items()}
    findings = run_findings(run.before, run.analysis, watched, limits)
    if limits.page_rules:
        findings += persistent_failures(run.analysis, watched, limits)
    for finding in (f for f in findings if f.alerts):
        alert = _merge(_matching_alert(current.values(), finding, run), finding, run, watched)
        current[alert.id] = alert
    escalated = {name: _escalate(alert, run, watched) for name, alert in current.items()}
    return [event for name, alert in escalated.items() if (event := _change(before.get(name), alert, run))]


def new_documents(
    history: Iterable[CanaryResult], results: Iterable[CanaryResult], watched: WatchedSet
) -> dict[str, tuple[str, ...]]:
    """For each failed canary, the documents that neither its baseline nor its passes contain, best first.

    A canary without baseline and passes has no new documents.
    """
    seen = {canary.id: set(canary.documents) for canary in watched.canaries}
    for result in history:
        if result.status is CanaryStatus.PASS and result.canary in seen:
            seen[result.canary].update(result.documents)
    found: dict[str, dict[str, None]] = {}
    for result in results:
        known = seen.get(result.canary)
        if result.status is CanaryStatus.FAIL and known:
            found.setdefault(result.canary, {}).update(dict.fromkeys(d for d in result.documents if d not in known))
    return {canary: tuple(documents) for canary, documents in found.items() if documents}


def new_sources(
    history: Iterable[CanaryResult], results: Iterable[CanaryResult], watched: WatchedSet
) -> dict[str, tuple[str, ...]]:
    """Like ``new_documents`` for sources, also of targets without ids. A canary without passes has no new ones."""
    baseline, seen = {c.id: c.documents for c in watched.canaries}, dict[str, set[str]]()
    found: dict[str, dict[str, None]] = {}
    for result in history:
        if result.status is CanaryStatus.PASS:
            seen.setdefault(result.canary, set()).update(result.sources)
    for result in results:
        known = seen.get(result.canary)
        if result.status is not CanaryStatus.FAIL or not known:
            continue
        ids = {*baseline.get(result.canary, ())}
        named = itertools.zip_longest(result.sources, result.documents[: len(result.sources)], fillvalue="")
        new = dict.fromkeys(source for source, document in named if source not in known and document not in ids)
        found.setdefault(result.canary, {}).update(new)
    return {canary: tuple(sources) for canary, sources in found.items() if sources}


def last_passes(history: Iterable[CanaryResult], results: Iterable[CanaryResult]) -> dict[str, CanaryResult]:
    """For each failed canary, the last result that passed; none for a canary that never did."""
    failed = {r.canary for r in results if r.status is CanaryStatus.FAIL}
    return {r.canary: r for r in history if r.status is CanaryStatus.PASS and r.canary in failed}


def drift_alert(
    about: str, series: str, readings: Sequence[DriftReading], at: datetime, changed: Collection[str] = ()
) -> Alert:
    """Alert for drifted answers: the signals that alarm in one window, which starts at a time.

    ``series`` is one of ``DRIFT_SUBJECTS``; ``changed`` are sources that were changed or removed during the comparison.
    """
    sources = f"{len(changed)} sources were changed or removed during the comparison. {ALL_UPDATES}"
    return Alert(
        make_alert_id("drift", about, f"{series} {at.isoformat()}"),
        "drift",
        Severity.MEDIUM,
        about,
        (series,),
        at,
        f"{DRIFT_SUBJECTS[series]} drifted: {', '.join(r.signal for r in readings)}",
        changes=tuple(
            f"{r.signal}: {r.value:.3g}; in the reference {r.reference:.3g}; evidence {r.evidence:.3g} "
            f"(alarm at {r.threshold:.3g})"
            for r in readings
        )
        + ((sources,) if changed else ()),
        documents=tuple(d for r in readings for d in r.documents)[:MAX_DOCUMENTS],
        advice=(
            "Check what changed: documents, model, embedder or clients. If the change was intended, start a new "
            f"reference after it: 'casemate {'traces report' if series in TRACED else 'canary drift'} --since'.",
        ),
        changed=tuple(sorted(changed))[:MAX_DOCUMENTS],
    )


def corpus_alert(tenant: str, change: CorpusChange | None, audit: VectorAudit | None, at: datetime) -> Alert | None:
    """Alert for vectors that changed without their texts; None if there are none."""
    wrong = audit.wrong if audit else ()
    if change is not CorpusChange.IN_PLACE and not wrong:
        return None
    changes = []
    if change is CorpusChange.IN_PLACE:
        changes.append(f"Vectors of tenant {tenant!r} changed although no source did.")
    if audit and wrong:
        changes.append(
            f"{len(wrong)} of {audit.checked} re-embedded documents have another vector in the index "
            f"(cosine below {MIN_SAME_COSINE})."
        )
    return Alert(
        make_alert_id("corpus", tenant, at.isoformat()),
        "corpus",
        Severity.HIGH,
        "corpus",
        (tenant,),
        at,
        "Vectors in the index do not match their texts",
        tuple(changes),
        tuple(document for document, _ in wrong)[:MAX_DOCUMENTS],
        ("Find out who can write to the index, then rebuild it: 'casemate index --rebuild'.",),
    )


def _matching_alert(alerts: Iterable[Alert], finding: TrendFinding, run: RunContext) -> Alert | None:
    """The open alert that a finding belongs to: of the same kind, or with the same new document or source."""
    if finding.kind not in SEQUENTIAL_KINDS:
        return next((a for a in alerts if a.kind == finding.kind), None)
    new = {d for i in finding.canaries for d in run.documents.get(i, ())}
    sources = {s for i in finding.canaries for s in run.sources.get(i, ())}
    alerts = [a for a in alerts if a.kind in SEQUENTIAL_KINDS]
    shared = next((a for a in alerts if new & set(a.documents) or sources & set(a.sources)), None)
    if shared is None and finding.kind == MANY and not (new or sources):
        return next((a for a in alerts if a.kind == MANY), None)  # the same outage takes in more canaries
    return shared


def _merge(alert: Alert | None, finding: TrendFinding, run: RunContext, watched: WatchedSet) -> Alert:
    new = [d for i in finding.canaries for d in run.documents.get(i, ())]
    documents = [*(alert.documents if alert else ()), *(d for d, _ in Counter(new).most_common())]
    canaries = tuple(dict.fromkeys([*(alert.canaries if alert else ()), *finding.canaries]))
    severity = highest_severity([finding.severity, *([alert.severity] if alert else [])])
    changes = _describe_finding(finding, run)
    sources = [*(alert.sources if alert else ()), *(s for i in finding.canaries for s in run.sources.get(i, ()))]
    concerned = watched.by_id if finding.kind == DECAY else finding.canaries
    changed = [*(alert.changed if alert else ()), *(s for i in concerned for s in watched.by_id[i].changed)]
    lists = {"documents": documents, "sources": sources, "changed": changed}
    unique: dict[str, Any] = {name: tuple(dict.fromkeys(ids)) for name, ids in lists.items()}
    if alert:
        return replace(alert, canaries=canaries, severity=severity, changes=changes, **unique)
    return Alert(
        make_alert_id(finding.kind, watched.name, finding.run),
        finding.kind,
        severity,
        watched.name,
        canaries,
        _began(finding, run),
        alert_title(finding.kind, watched.name, len(canaries)),
        changes,
        advice=(*_advice(finding, bool(documents or sources), run, watched.external), SHOW_HISTORY),
        **unique,
    )


def _advice(finding: TrendFinding, new: bool, run: RunContext, external: bool) -> tuple[str, ...]:
    """What to do about a finding, and first, if the answers show them, about the guard and about new documents."""
    advice = ADVICE | EXTERNAL_ADVICE if external else ADVICE
    failed = (r for r in run.results if r.canary in finding.canaries and r.status is CanaryStatus.FAIL)
    guard = GUARD_WITHHELD if any(r.withheld for r in failed) else ()
    documents = (NEW_SOURCES if external else NEW_DOCUMENTS) if new else ()
    return (*guard, *documents, *advice.get(finding.kind, advice[CHANGED]))


def alert_title(kind: str, about: str, count: int) -> str:
    """One-line title of an alert.

    >>> alert_title("changed", "clinic", 1)
    'clinic: 1 canary fails more often than in the baseline'
    """
    one = count == 1
    words = TITLES[kind].format(n=count, s="s" if one else "", y="y" if one else "ies")
    return f"{sanitize(about)}: {words}"


def _describe_finding(finding: TrendFinding, run: RunContext) -> tuple[str, ...]:
    """The finding, and which expectations the answers did not meet."""
    if finding.kind == CHANGED:
        return (*_describe_counts(finding.canaries, run.analysis), *_describe_deviations(finding.canaries, run))
    return (finding.message, *_describe_deviations(finding.canaries, run))


def _before_and_after(canary: str, failed: CanaryResult, run: RunContext) -> list[str]:
    """The last passed answer of a canary and the failed one: its form, and the documents or sources of its context."""
    passed = run.passed.get(canary)
    if passed is None:
        return []
    return [
        f"{canary} before ({passed.at:%Y-%m-%d %H:%M} UTC): {_form(passed)}",
        f"{canary} now: {_form(failed)}",
    ]


def _form(result: CanaryResult) -> str:
    kind = "a refusal" if result.refused else "an answer"
    context = [*map(str, result.documents or result.sources)][:SHOWN_CONTEXT]
    names = ", ".join(sanitize(name) for name in context) or "unknown"
    withheld = ", ".join(sanitize(name) for name in result.withheld[:SHOWN_CONTEXT])
    return f"{kind} of {result.words} words; context: {names}{'; withheld by the guard: ' * bool(withheld)}{withheld}"


def _describe_counts(canaries: Sequence[str], analysis: RunAnalysis) -> tuple[str, ...]:
    """For each canary: failures since when, against how many in the baseline; and the evidence of a new alarm."""
    found = []
    for i in canaries[:MAX_ITEMS]:
        c, evidence = analysis.state.canaries[i], analysis.evidence.get(i)
        since = f" since {c.since:%Y-%m-%d %H:%M} UTC" if c.since else ""
        baseline = f"baseline {c.flakes.failed} of {c.flakes.asked}" if c.flakes.asked else "no baseline"
        measured = f"; evidence {evidence.value:,.0f} (alarm at {evidence.threshold:,.0f})" if evidence else ""
        found.append(f"{i} failed in {c.failed} of {c.asked} runs{since}; {baseline}{measured}")
    return tuple(found)


def _describe_deviations(canaries: Sequence[str], run: RunContext) -> tuple[str, ...]:
    """Unmet expectations in this run: their kinds, and the first of them in full."""
    failed = [r for r in run.results if r.canary in canaries and r.status is CanaryStatus.FAIL]
    last = {r.canary: r for r in failed}  # its last repetition represents a canary
    kinds = Counter(kind for r in last.values() for kind in sorted({d.kind for d in r.deviations}))
    unmet = [
        f"{kind.replace('_', ' ')}: {count} canar{'y' if count == 1 else 'ies'}" for kind, count in kinds.most_common()
    ]
    deviations = [f"{r.canary}: {d.message}" for r in last.values() for d in r.deviations]
    compared = [line for i, r in list(last.items())[:MAX_COMPARED] for line in _before_and_after(i, r, run)]
    return (*(["; ".join(unmet)] if unmet else []), *deviations[:MAX_ITEMS], *compared)


def _began(finding: TrendFinding, run: RunContext) -> datetime:
    """When the condition began: the first contributing failure, or the first run without an answer."""
    state = run.analysis.state
    if finding.kind == UNREACHABLE:
        return state.unanswered_since or finding.at
    begun = [c.since for i in finding.canaries if (c := state.canaries.get(i)) and c.since]
    return min(begun, default=finding.at)


def _escalate(alert: Alert, run: RunContext, watched: WatchedSet) -> Alert:
    """Raises the severity one step above the canaries' if the alert affects many canaries or persists."""
    if alert.kind != CHANGED:
        return alert
    by_id, states = watched.by_id, run.analysis.state.canaries
    present = [i for i in alert.canaries if i in by_id]
    severity = highest_severity([by_id[i].severity for i in present])
    shared = Counter(d for i in present for d in run.documents.get(i, ()))
    persists = any(i in states and states[i].persistent and states[i].alarmed for i in present)
    if len(present) >= MANY_CANARIES or persists or max(shared.values(), default=0) > 1:
        severity = list(Severity)[min(severity.rank + 1, Severity.CRITICAL.rank)]
    return replace(alert, severity=severity) if severity.rank > alert.severity.rank else alert


def _change(before: AlertState | None, alert: Alert, run: RunContext) -> Event | None:
    """The event for an alert after a run; None if nothing changed."""
    at, occasion = run.analysis.at, run.analysis.run
    if before is None:
        return alert_to_event(alert, AlertPhase.OPENED, at, occasion)
    rose = alert.severity.rank > before.alert.severity.rank
    joined = set(alert.canaries) - set(before.alert.canaries)
    if rose or joined:
        title = alert_title(alert.kind, alert.set, len(alert.canaries))
        changes = alert.changes if joined else _describe_escalation(before.alert, alert, run)
        changed = replace(alert, title=title, changes=changes)
        return alert_to_event(changed, AlertPhase.UPDATED, at, occasion, quiet=bool(before.acknowledged) and not rose)
    if _has_recovered(alert, run.analysis):
        ended = replace(alert, changes=_recovery_message(alert, before.opened, at), advice=())
        return alert_to_event(ended, AlertPhase.RECOVERED, at, occasion)
    return None


def _describe_escalation(before: Alert, alert: Alert, run: RunContext) -> tuple[str, ...]:
    """Why the severity rose although no canary joined, and the current counts."""
    states = run.analysis.state.canaries
    present = [i for i in alert.canaries if i in states]
    reasons = [
        f"{i} failed in {states[i].recent.count('F')} of its last {len(states[i].recent)} runs"
        for i in present
        if states[i].persistent
    ]
    why = f": {'; '.join(reasons[:MAX_ITEMS])}" if reasons else ""
    counts, deviations = _describe_counts(present, run.analysis), _describe_deviations(present, run)
    return (f"severity raised from {before.severity} to {alert.severity}{why}", *counts, *deviations)


def _recovery_message(alert: Alert, opened: datetime, at: datetime) -> tuple[str, ...]:
    what = {UNREACHABLE: "The target answers again", BLIND: "The canaries get answers again"}
    reason = what.get(alert.kind, "All canaries of this alert passed in enough consecutive runs")
    return (f"{reason}. The alert was open for {duration((at - opened).total_seconds())}.",)


def _has_recovered(alert: Alert, analysis: RunAnalysis) -> bool:
    """Whether the condition has ended. Canaries removed from the set do not keep an alert open."""
    canaries = [c for i in alert.canaries if (c := analysis.state.canaries.get(i))]
    if alert.kind in SEQUENTIAL_KINDS:
        return not any(c.alarmed for c in canaries)
    if alert.kind in PAGE_RULE_KINDS:
        return all(c.passes_in_a_row >= MIN_PASSES for c in canaries)
    if alert.kind == DECAY:
        return not analysis.state.decayed
    if alert.kind == BLIND:
        return not analysis.unreachable and not any(c.errors for c in canaries)
    return alert.kind == UNREACHABLE and not analysis.unreachable
