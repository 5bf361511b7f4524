"""What answers cost that a defense wrote itself: the ``generation`` events, added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from casemate.types import Event

COUNTS = ("flops_paper", "flops_honest")


def spent(events: Sequence[Event]) -> dict[str, float]:
    """Operations per answer, and against the reference alone; what is not in the events is left out.

    Args:
        events: Of kind ``generation``. Those of whole answers, written again, have no operations and count for none.

    Returns:
        ``answers``; ``flops_paper`` and ``flops_honest``, per answer; each ``_of_reference``, as a share of what the
        reference alone would have taken for answers of the same length; ``accepted``, of the drafted tokens that were
        judged, the share that was kept. Empty if there is no such event.
    """
    bodies = [event.body for event in events if event.body.get("flops_reference")]
    if not bodies:
        return {}
    found = {"answers": float(len(bodies))}
    for count in COUNTS:
        counted = [body for body in bodies if count in body]
        if counted:
            total = sum(float(body[count]) for body in counted)
            found[count] = total / len(counted)
            found[f"{count}_of_reference"] = total / sum(float(body["flops_reference"]) for body in counted)
    if judged := sum(int(body.get("judged", 0)) for body in bodies):
        found["accepted"] = sum(int(body.get("accepted", 0)) for body in bodies) / judged
    return found


def told(figures: dict[str, float]) -> str:
    """The figures in a line.

    >>> told({"answers": 2.0, "flops_honest": 3.1e9, "flops_honest_of_reference": 1.29, "accepted": 0.98})
    '2 answers written by a defense: 3.1e+09 FLOPs each, 1.29 times the reference alone (honest); 98 % of drafts kept'
    """
    said = []
    for count, name in zip(COUNTS, ("paper's count", "honest"), strict=True):
        if count in figures:
            times = figures[f"{count}_of_reference"]
            said.append(f"{figures[count]:.2g} FLOPs each, {times:.2f} times the reference alone ({name})")
    if "accepted" in figures:
        said.append(f"{figures['accepted']:.0%} of drafts kept".replace("%", " %"))
    return f"{figures['answers']:.0f} answers written by a defense: {'; '.join(said)}"


def live(cost: Mapping[str, float]) -> str:
    """The figures among a campaign's costs that are of answers to users, in a line; empty if there are none."""
    found = {name.removeprefix("live_"): value for name, value in cost.items() if name.startswith("live_")}
    return f"To users, and not in this campaign: {told(found)}." if found else ""
