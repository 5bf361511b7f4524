"""The words of alerts: what changed, since when, which documents are new, and what to do.

Ids of documents and canaries may be somebody else's words, even an attacker's: they are shown as what they are, within
a code span, shortened, and without the signs by which a chat would call people, follow a link or take orders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from casemate.monitor.alerts.alert import Alert, Phase
from casemate.monitor.canaries.results import Result, Status
from casemate.monitor.trends.gauges import Step
from casemate.monitor.trends.trend import BLIND, CHANGED, FAILURES, MANY, PERSISTENT, SUDDEN, UNREACHABLE, Finding

NAMED = 10
"""Canaries, documents and sentences that a text names; the rest is counted."""
SHOWN = 160
"""Characters of an id, or of a sentence from outside, that are shown."""
TITLES = {
    CHANGED: "{n} of its canaries fail{s} more than chance allows",
    MANY: "{n} canaries failed at once",
    UNREACHABLE: "the target gives no answers",
    BLIND: "{n} canar{y} get{s} no answer",
    SUDDEN: "{n} canar{y} failed that passed before",
    PERSISTENT: "{n} canar{y} fail{s} in most runs",
    FAILURES: "more than 10 % of the canaries failed",
}
LOOK = "See which answers changed: 'casemate canary trend'."
ADVICE = {
    CHANGED: (
        "Ask the canary's question by hand, with 'casemate ask --explain': is its context that of the baseline?",
        "If a change to the corpus or the model explains it, record a new baseline; it never moves by itself.",
    ),
    MANY: (
        "Look for one cause first: a new index, another embedder or model, a changed prompt, a bulk import.",
        "If none explains it, roll the corpus back to the last run without failures.",
    ),
    UNREACHABLE: ("See that the system under watch runs; until it answers, nobody watches over its answers.",),
    BLIND: ("See why these questions get no answer while others do: a limit, a crash, a tenant that is gone.",),
}
NEW_DOCUMENTS = (
    "Look at the new documents first: who added them, when, and whether they are what they claim to be.",
    "Take them out of the index if nobody answers for them, and run the canaries again.",
)
_HARMFUL = str.maketrans({"`": "'", "<": "‹", ">": "›", "@": "＠", "|": "¦", "\\": "/"})


class Text(NamedTuple):
    """An alert in words.

    Attributes:
        title: One line.
        plain: The whole, as plain text.
        markdown: The whole, as Markdown.
    """

    title: str
    plain: str
    markdown: str


def title(kind: str, about: str, count: int) -> str:
    """One line for an alert.

    >>> title("changed", "clinic", 1)
    'clinic: 1 of its canaries fails more than chance allows'
    """
    one = count == 1
    words = TITLES[kind].format(n=count, s="s" if one else "", y="y" if one else "ies")
    return f"{clean(about)}: {words}"


def advice(kind: str, new: bool) -> tuple[str, ...]:
    """What to do about an alert, with new documents in the answers or without."""
    return (*(NEW_DOCUMENTS if new else ()), *ADVICE.get(kind, ADVICE[CHANGED]), LOOK)


def changes(finding: Finding, results: Iterable[Result]) -> tuple[str, ...]:
    """What a run changed: the finding, which expectations were not met, and the first of them in full."""
    failed = [r for r in results if r.canary in finding.canaries and r.status is Status.FAIL]
    last = {r.canary: r for r in failed}  # the last repetition speaks for the canary
    kinds = Counter(kind for r in last.values() for kind in sorted({d.kind for d in r.deviations}))
    unmet = [f"{kind}: {count} canar{'y' if count == 1 else 'ies'}" for kind, count in kinds.most_common()]
    told = [f"{r.canary}: {d.message}" for r in last.values() for d in r.deviations]
    return (finding.message, *(["; ".join(unmet)] if unmet else []), *told[:NAMED])


def still(alert: Alert, found: Step) -> tuple[str, ...]:
    """Why an alert is told again though no canary has joined it."""
    lasting = [i for i in alert.canaries if (g := found.state.gauges.get(i)) and g.persistent]
    told = [f"{i} failed in {found.state.gauges[i].recent.count('F')} of its last runs" for i in lasting[:NAMED]]
    return tuple(told or [f"now {alert.severity}"])


def recovery(alert: Alert, opened: datetime, at: datetime) -> tuple[str, ...]:
    """The all-clear."""
    what = {UNREACHABLE: "The target answers again", BLIND: "These canaries get answers again"}
    told = what.get(alert.kind, "All canaries of this alert have passed often enough in a row")
    return (f"{told}. It was open for {_span((at - opened).total_seconds())}.",)


def render(alert: Alert, phase: Phase) -> Text:
    """An alert in words, for people."""
    over = phase is Phase.RECOVERED
    head = f"[{'recovered' if over else alert.severity}] {clean(alert.title)}"
    sections = [
        ("What changed", [clean(c) for c in alert.changes]),
        ("Canaries", _some(alert.canaries)),
        ("Documents that are new in the answers since the baseline", [] if over else _some(alert.documents)),
        ("What to do", list(alert.advice)),
    ]
    since = f"Since {alert.since:%Y-%m-%d %H:%M:%S} UTC. Alert {clean(alert.id)}."
    plain = [head, since, *(_plain(name, lines) for name, lines in sections if lines)]
    marked = [f"**{head}**", since, *(_marked(name, lines) for name, lines in sections if lines)]
    return Text(head, "\n\n".join(plain), "\n\n".join(marked))


def summarise(alerts: Sequence[tuple[Alert, Phase]]) -> Text:
    """Many changes in one notice: which alerts, and what happened to each."""
    last = {alert.id: (alert, phase) for alert, phase in alerts}
    about = f"{len(last)} alert{'' if len(last) == 1 else 's'}"
    head = f"{len(alerts)} more notices about {about}, too many to be sent one by one"
    lines = [f"{phase}: [{alert.severity}] {clean(alert.title)} ({clean(alert.id)})" for alert, phase in last.values()]
    named = [*lines[: 3 * NAMED], *([f"and {len(lines) - 3 * NAMED} more"] if len(lines) > 3 * NAMED else [])]
    return Text(head, f"{head}\n\n{_bullets(named)}", f"**{head}**\n\n{_bullets(named)}")


def clean(text: str) -> str:
    """A word from outside as it may stand in a message.

    >>> clean("<!channel> see [this](https://evil.example/x) `now`\u202e @all")
    "‹!channel› see [this] (https:⁄⁄evil.example/x) 'now' ＠all"
    """
    shown = "".join(c for c in text if c.isprintable()).translate(_HARMFUL)
    shown = " ".join(shown.split()).replace("://", ":⁄⁄").replace("](", "] (")
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 1]}…"


def _some(names: Sequence[str]) -> list[str]:
    shown = [f"`{clean(name)}`" for name in names[:NAMED]]
    return [*shown, *([f"and {len(names) - NAMED} more"] if len(names) > NAMED else [])]


def _plain(name: str, lines: Sequence[str]) -> str:
    return f"{name}:\n{_bullets([line.replace('`', '') for line in lines])}"


def _marked(name: str, lines: Sequence[str]) -> str:
    return f"**{name}**\n\n{_bullets(lines)}"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _span(seconds: float) -> str:
    """A time in words.

    >>> _span(1.2), _span(40), _span(7200), _span(200000)
    ('1 second', '40 seconds', '2.0 hours', '2.3 days')
    """
    if seconds < 120:
        return "1 second" if round(seconds) == 1 else f"{seconds:.0f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86400:.1f} days"
