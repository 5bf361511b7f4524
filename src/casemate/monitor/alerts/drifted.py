"""Drift as an alert: the system behaves otherwise, or its vectors are not those of its texts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from casemate.monitor.alerts.alert import Alert, identity
from casemate.monitor.canaries.results import Severity
from casemate.monitor.drift.moments import Audit, Move
from casemate.monitor.drift.traffic import Reading

NAMED = 20
"""Documents that are named."""


def behaviour(about: str, series: str, found: Sequence[Reading], at: datetime) -> Alert:
    """For signals that have drifted.

    Args:
        about: The canary set.
        series: Whose answers: those of the canaries, or traffic.
        found: The signals that alarm in a window.
        at: When that began.
    """
    signals = tuple(r.signal for r in found)
    return Alert(
        identity("drift", about, f"{series} {at.isoformat()}"),
        "drift",
        Severity.MEDIUM,
        about,
        (series,),
        at,
        f"The {series} have drifted: {', '.join(signals)}",
        changes=tuple(f"{r.signal}: {r.value:.3g}, usually {r.usual:.3g}." for r in found),
        documents=tuple(d for r in found for d in r.documents)[:NAMED],
        advice=(
            "Ask what has changed: documents, model, embedder, users. If it was you, count from then on: "
            "casemate canary drift --since.",
        ),
    )


def corpus(tenant: str, move: Move | None, audit: Audit | None, at: datetime) -> Alert | None:
    """For vectors that nobody should have changed; None: there are none."""
    wrong = audit.wrong if audit else ()
    if move is not Move.IN_PLACE and not wrong:
        return None
    changes = [f"The vectors of tenant {tenant!r} {move.value}."] if move is Move.IN_PLACE else []
    if audit and wrong:
        changes.append(f"Of {audit.checked} documents embedded anew, {len(wrong)} have other vectors in the index.")
    return Alert(
        identity("corpus", tenant, at.isoformat()),
        "corpus",
        Severity.HIGH,
        "corpus",
        (tenant,),
        at,
        "Vectors are not those of their texts",
        tuple(changes),
        tuple(document for document, _ in wrong)[:NAMED],
        ("Find out who can write to the index, and build it anew: casemate index --rebuild.",),
    )
