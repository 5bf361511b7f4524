"""From what a run showed to what is told: which alerts it opens, changes and ends.

Pure: the alerts that stand go in, events come out. Nothing is told twice, since each event's id follows from the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from casemate.monitor.alerts import wording
from casemate.monitor.alerts.alert import Alert, Phase, Standing, event, graver, gravest, identity, one_worse
from casemate.monitor.canaries.results import Result, Status
from casemate.monitor.trends.gauges import Limits, State, Step
from casemate.monitor.trends.trend import (
    BLIND,
    CHANGED,
    FAILURES,
    MANY,
    PERSISTENT,
    SUDDEN,
    UNREACHABLE,
    Finding,
    of_step,
    persistent,
)
from casemate.monitor.trends.watched import Watched
from casemate.types import Event

TESTED = {CHANGED, MANY}
"""Alerts by the sequential tests."""
RULED = {SUDDEN, PERSISTENT, FAILURES}
"""Alerts by the page's rules."""
SEVERAL = 3
"""Canaries from which on an alert is graver than the gravest of them."""


@dataclass(frozen=True, slots=True)
class Round:
    """A run, with all that is needed to tell of it.

    Attributes:
        before: What was known before it.
        found: What it showed.
        results: Its results.
        documents: For each canary that alarmed, the documents in its answers that it had not before.
    """

    before: State
    found: Step
    results: Sequence[Result]
    documents: Mapping[str, Sequence[str]]


def events_after(standing: Iterable[Standing], run: Round, watched: Watched, limits: Limits) -> list[Event]:
    """What happens to the alerts of a set after one of its runs.

    Args:
        standing: Its open alerts.
        run: The run.
        watched: The set.
        limits: When a trend becomes an alarm.
    """
    there = {s.alert.id: s for s in standing if s.open and s.alert.set == watched.name}
    now = {name: s.alert for name, s in there.items()}
    findings = of_step(run.before, run.found, watched, limits)
    if limits.page_rules:
        findings += persistent(run.found, watched, limits)
    for finding in (f for f in findings if f.pages):
        told = _merged(_same(now.values(), finding, run), finding, run, watched)
        now[told.id] = told
    told_of = {name: _escalated(alert, run, watched) for name, alert in now.items()}
    return [found for name, alert in told_of.items() if (found := _change(there.get(name), alert, run, limits))]


def new_documents(history: Iterable[Result], results: Iterable[Result], watched: Watched) -> dict[str, tuple[str, ...]]:
    """For each canary that failed, the documents in its answers that its baseline and its passes do not know.

    Args:
        history: Results from before; of these, the passes count.
        results: Of the run.
        watched: The set, whose baselines may know documents, too.

    Returns:
        In order of rank. A canary of which nothing is known has no new documents.
    """
    seen = {canary.id: set(canary.documents) for canary in watched.canaries}
    for result in history:
        if result.status is Status.PASS and result.canary in seen:
            seen[result.canary].update(result.documents)
    found: dict[str, dict[str, None]] = {}
    for result in results:
        known = seen.get(result.canary)
        if result.status is Status.FAIL and known:
            found.setdefault(result.canary, {}).update(dict.fromkeys(d for d in result.documents if d not in known))
    return {canary: tuple(documents) for canary, documents in found.items() if documents}


def _same(alerts: Iterable[Alert], finding: Finding, run: Round) -> Alert | None:
    """The open alert that a finding belongs to: of the same kind, or about the same new document."""
    if finding.kind not in TESTED:
        return next((a for a in alerts if a.kind == finding.kind), None)
    new = {d for i in finding.canaries for d in run.documents.get(i, ())}
    return next((a for a in alerts if a.kind in TESTED and new & set(a.documents)), None)


def _merged(alert: Alert | None, finding: Finding, run: Round, watched: Watched) -> Alert:
    """The alert, now with what a finding adds to it; or a new one."""
    new = [d for i in finding.canaries for d in run.documents.get(i, ())]
    documents = [*(alert.documents if alert else ()), *(d for d, _ in Counter(new).most_common())]
    canaries = tuple(dict.fromkeys([*(alert.canaries if alert else ()), *finding.canaries]))
    severity = gravest([finding.severity, *([alert.severity] if alert else [])])
    changes = wording.changes(finding, run.results)
    if alert:
        return replace(
            alert, canaries=canaries, severity=severity, changes=changes, documents=tuple(dict.fromkeys(documents))
        )
    return Alert(
        identity(finding.kind, watched.name, finding.run),
        finding.kind,
        severity,
        watched.name,
        canaries,
        _since(finding, run),
        wording.title(finding.kind, watched.name, len(canaries)),
        changes,
        tuple(dict.fromkeys(documents)),
        wording.advice(finding.kind, bool(documents)),
    )


def _since(finding: Finding, run: Round) -> datetime:
    """When it began: the first of the failures that added up, or the first run without an answer."""
    if finding.kind == UNREACHABLE:
        return run.found.state.down_since or finding.at
    begun = [g.since for i in finding.canaries if (g := run.found.state.gauges.get(i)) and g.since]
    return min(begun, default=finding.at)


def _escalated(alert: Alert, run: Round, watched: Watched) -> Alert:
    """An alert of the tests, as grave as it has become: one step above its canaries if it is broad or lasts."""
    if alert.kind != CHANGED:
        return alert
    known, gauges = watched.known, run.found.state.gauges
    there = [i for i in alert.canaries if i in known]
    severity = gravest([known[i].severity for i in there])
    shared = Counter(d for i in there for d in run.documents.get(i, ()))
    lasting = any(i in gauges and gauges[i].persistent and gauges[i].alarmed for i in there)
    if len(there) >= SEVERAL or lasting or max(shared.values(), default=0) > 1:
        severity = one_worse(severity)
    return replace(alert, severity=severity) if graver(severity, alert.severity) else alert


def _change(before: Standing | None, alert: Alert, run: Round, limits: Limits) -> Event | None:
    """The event that tells of an alert after a run; None: nothing has changed."""
    at, occasion = run.found.at, run.found.run
    if before is None:
        return event(alert, Phase.OPENED, at, occasion)
    rose = graver(alert.severity, before.alert.severity)
    joined = set(alert.canaries) - set(before.alert.canaries)
    if rose or joined:
        title = wording.title(alert.kind, alert.set, len(alert.canaries))
        changes = alert.changes if joined else (*wording.still(alert, run.found), *alert.changes)
        changed = replace(alert, title=title, changes=changes)
        return event(changed, Phase.UPDATED, at, occasion, quiet=bool(before.acknowledged) and not rose)
    if _over(alert, run.found, limits):
        ended = replace(alert, changes=wording.recovery(alert, before.opened, at), advice=())
        return event(ended, Phase.RECOVERED, at, occasion)
    return None


def _over(alert: Alert, found: Step, limits: Limits) -> bool:
    """Whether what an alert is about has ended. A canary that was taken out of the set does not hold it open."""
    gauges = {i: g for i in alert.canaries if (g := found.state.gauges.get(i))}
    if alert.kind in TESTED:
        return not any(g.alarmed for g in gauges.values())
    if alert.kind in RULED:
        return all(g.streak >= limits.passes for g in gauges.values())
    if alert.kind == BLIND:
        return not found.unreachable and not any(g.errors for g in gauges.values())
    return alert.kind == UNREACHABLE and not found.unreachable
