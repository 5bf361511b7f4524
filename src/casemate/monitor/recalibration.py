"""Fits the threshold of a calibrated defense to the scores that were recorded in observe mode.

The verdicts of observe mode contain scores of real users' questions, but no text. They replace the benign scores of the
calibration; its weights stay. So no query log is needed. Whatever was recorded counts as benign, also an attack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from casemate.errors import DataError
from casemate.guard.calibration.fitting import recall_of_probes
from casemate.guard.calibration.log_review import AS_CLOSE, as_close_as_attacks
from casemate.maths.calibration import Calibration
from casemate.protocols import EventStore
from casemate.types import Event

PER_CLIENT = 20
"""Questions of one client that are used, the first ones: so a single client hardly moves the threshold."""


def recorded_scores(
    store: EventStore, defense: str, tenant: str, calibration: Calibration, is_canary: Callable[[str], bool]
) -> list[float]:
    """Scores of the questions that a defense judged by a calibration in observe mode. Blocks.

    Each is increased by the reduction of the threshold for that client and document. Left out: verdicts before the
    calibration, on another scale; canaries; failures; questions with a larger context than the calibration's; and those
    from which an earlier decision would have withheld a document, because the defense did not judge this document
    again.
    """
    found, of_client = list[float](), Counter[str]()
    for event in store.scan("verdict", datetime.fromisoformat(calibration.at)):
        body, client = event.body, str(event.body.get("client", ""))
        wanted = body["defense"] == defense and body.get("tenant") == tenant and not body["enforced"]
        if not wanted or is_canary(client) or not _usable(event, calibration) or of_client[client] == PER_CLIENT:
            continue
        of_client[client] += 1
        reduction = calibration.threshold_reduction(tenant, client, str(body["evidence"].get("target", "")))
        found.append(float(body["score"]) + reduction)
    return found


def _usable(event: Event, calibration: Calibration) -> bool:
    body, evidence = event.body, event.body.get("evidence", {})
    judged = evidence.get("form") == "calibrated" and "undecided" not in evidence and "error" not in evidence
    return judged and "before" not in evidence.get("reasons", ()) and int(body.get("k", 0)) <= calibration.k


def recalibrated(calibration: Calibration, scores: Sequence[float], significance: float) -> Calibration:
    """The calibration with recorded scores (``recorded_scores``) in place of its benign ones.

    ``significance`` is the configured share of benign questions that may be flagged, in (0, 1).

    Raises:
        DataError: If the scores are too few for the significance, or the calibration flags nothing.
    """
    needed = math.ceil(1 / significance) - 1
    if not calibration.benign:
        raise DataError(f"there is no threshold to adjust: {calibration.source}")
    if len(scores) < needed:
        raise DataError(
            f"{len(scores)} usable questions were recorded in observe mode since the calibration, at most {PER_CLIENT} "
            f"per client; significance {significance} needs {needed}: wait for more, or raise the significance"
        )
    changed = replace(
        calibration,
        benign=tuple(sorted(scores)),
        source=f"{len(scores)} questions recorded in observe mode",
    )
    notes = {name: value for name, value in calibration.notes.items() if name not in ("log", "recall")}
    notes |= {"judged": len(scores), "recorded_at": datetime.now(UTC).isoformat(timespec="seconds")}
    notes["recall"] = recall_of_probes(changed)
    plain = {
        attack: [-math.inf if s is None else s for document in found for s in document]
        for attack, found in calibration.notes.get("probes", {}).items()
    }
    notes["log"] = {AS_CLOSE: as_close_as_attacks(changed.benign, plain)}
    return replace(changed, notes=notes)
