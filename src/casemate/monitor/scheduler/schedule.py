"""The schedule of a canary set: when runs are due, which ones started, finished or were missed.

Durable without a message broker: everything is computed from events in the store. A set has one slot per interval,
counted from 1970, so every process computes the same slots. A run is named after its slot. Within the slot it starts at
a time drawn from a secret in the store. So an attacker who has the code and the set can only predict the interval.

A run has started if its ``canary-slot`` event exists, and finished if its ``canary-run`` event exists. A process that
takes over after a stop or a crash continues started runs, and asks only canaries without a result. It catches up on the
latest missed slot, and records earlier ones as missed.

Functions that use the store raise ``BackendError`` if it fails.

Deviation: METHODS D6 asks for a Poisson schedule. Here times are uniform within slots of equal length. The mean is the
same and there is no fixed clock either, but each interval has exactly one run, which defines "due" and "missed".
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from casemate.monitor.trends.cusum import CusumState, RunAnalysis, WatchedSet
from casemate.protocols import EventStore
from casemate.runtime.events import append_durably
from casemate.types import Event

RUN_KIND = "canary-run"
"""Kind of the events that finish a run."""
SLOT_KIND = "canary-slot"
"""Kind of the events that start a run, or record missed slots."""
SECRET_KIND = "canary-clock"
"""Kind of the events that store the secret of a set's schedule."""
LOOK_BACK = (timedelta(hours=3), timedelta(days=2), timedelta(days=60), None)
"""Windows in which the last run is searched, in turn."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Slots of a set, and start times, which are drawn from a secret."""

    watched: WatchedSet
    secret: str = ""

    @property
    def interval(self) -> int:
        """Seconds between two slots: the shortest interval of the canaries."""
        return int(min(c.interval_s or self.watched.interval_s for c in self.watched.canaries))

    def start_time(self, slot: int) -> float:
        """Start of a slot's run, within the slot; both in seconds since 1970."""
        drawn = hashlib.sha256(f"{self.secret}\0{self.watched.name}\0{slot}".encode()).digest()[:8]
        return slot + self.interval * (int.from_bytes(drawn, "big") / 2**64)

    def latest_slot(self, now: float) -> int:
        """The latest slot whose run is due."""
        slot = int(now // self.interval) * self.interval
        return slot if self.start_time(slot) <= now else slot - self.interval

    def next_slot(self, slot: int) -> int:
        """The slot after another, which may belong to another interval."""
        return (slot // self.interval + 1) * self.interval

    def canaries_due(self, slot: int, after: int | None) -> tuple[str, ...]:
        """Canaries to ask in a slot: those with a new interval of their own since the previous run's; None: all."""
        intervals = {c.id: int(c.interval_s or self.watched.interval_s) for c in self.watched.canaries}
        return tuple(i for i, seconds in intervals.items() if after is None or slot // seconds > after // seconds)

    def run_id(self, slot: int) -> str:
        """Id of a slot's run."""
        return f"{self.watched.name}@{_format_time(slot)}"


class StartedRun(NamedTuple):
    """A started run: slot (None for a manual run), id and the canaries that it asks."""

    slot: int | None
    run: str
    canaries: tuple[str, ...]


class ScheduleGap(NamedTuple):
    """Missed slots of a set: first, last, number, and when they were recorded; None: not yet."""

    set: str
    first: datetime
    last: datetime
    slots: int
    recorded: datetime | None


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What the store contains about the slots of a set.

    Attributes:
        finished: Last slot with a finished run; None: there is none.
        accounted: Last slot that is finished or recorded as missed.
        started: Started and unfinished runs, oldest first.
    """

    finished: int | None = None
    accounted: int | None = None
    started: tuple[StartedRun, ...] = ()
    state: CusumState = CusumState()

    @property
    def last_slot(self) -> int | None:
        """Last slot of a finished or started run."""
        slots = [self.finished, *(run.slot for run in self.started)]
        return max([s for s in slots if s is not None], default=None)


def load_history(store: EventStore, name: str, now: datetime) -> RunHistory:
    """Reads the history of a set."""
    for window in LOOK_BACK:
        since = now - window if window else None
        runs = [e for e in store.scan(RUN_KIND, since) if e.body["set"] == name]
        slots = [e for e in store.scan(SLOT_KIND, since) if e.body["set"] == name]
        if runs:
            break
    finished = [int(e.body["slot"]) for e in runs if e.body["slot"] is not None]
    missed = [int(e.body["last"]) for e in slots if e.body["state"] == "missed"]
    done = {e.body["run"] for e in runs}
    started = [e for e in slots if e.body["state"] == "begun" and e.body["run"] not in done]
    return RunHistory(
        max(finished, default=None),
        max([*finished, *missed], default=None),
        tuple(
            StartedRun(int(e.body["slot"]), e.body["run"], tuple(e.body["canaries"]))
            for e in sorted(started, key=lambda e: (int(e.body["slot"]), e.body["run"]))
        ),
        CusumState.from_json(runs[-1].body["cusums"]) if runs else CusumState(),
    )


def load_gaps(store: EventStore, name: str, since: datetime | None = None) -> list[ScheduleGap]:
    """Recorded gaps of a set, oldest first."""
    return [gap for event in store.scan(SLOT_KIND, since) if (gap := gap_from_event(event)) and gap.set == name]


def gap_from_event(event: Event) -> ScheduleGap | None:
    """The gap that an event records; None if it records none."""
    body = event.body
    if event.kind != SLOT_KIND or body["state"] != "missed":
        return None
    return ScheduleGap(
        body["set"], _from_timestamp(body["first"]), _from_timestamp(body["last"]), int(body["count"]), event.at
    )


def current_gap(watched: WatchedSet, history: RunHistory, now: float) -> ScheduleGap | None:
    """Slots that have passed without a run and are not recorded yet; None if there are none or no run ever started."""
    schedule = Schedule(watched)
    slots = _missed_slots(schedule, history, int(now // schedule.interval - 1) * schedule.interval)
    if slots is None:
        return None
    first, last, count = slots
    return ScheduleGap(watched.name, _from_timestamp(first), _from_timestamp(last), count, None)


def schedule_secret(store: EventStore, name: str, now: datetime) -> str:
    """The secret of a set's schedule, created on first use; the same for all processes on the store."""
    known = {e.body["set"]: str(e.body["secret"]) for e in store.scan(SECRET_KIND)}
    if name not in known:  # of concurrent writers, the store keeps the first
        body = {"set": name, "secret": secrets.token_hex(16)}
        append_durably(store, [Event(f"{SECRET_KIND}:{name}", now, SECRET_KIND, body)], "the schedule's secret")
        known = {e.body["set"]: str(e.body["secret"]) for e in store.scan(SECRET_KIND)}
    return known[name]


def gap_event(schedule: Schedule, history: RunHistory, latest: int, now: datetime) -> Event | None:
    """Event that records the missed slots before the latest; None if there are none."""
    slots = _missed_slots(schedule, history, latest - schedule.interval)
    if slots is None:
        return None
    first, last, count = slots
    body = {"set": schedule.watched.name, "state": "missed", "first": first, "last": last, "count": count}
    return Event(f"{SLOT_KIND}:missed:{schedule.watched.name}@{_format_time(first)}", now, SLOT_KIND, body)


def run_started_event(schedule: Schedule, slot: int, after: int | None, now: datetime) -> Event:
    """Event that starts the run of a slot."""
    run = schedule.run_id(slot)
    body = {
        "set": schedule.watched.name,
        "state": "begun",
        "run": run,
        "slot": slot,
        "canaries": list(schedule.canaries_due(slot, after)),
    }
    return Event(f"{SLOT_KIND}:begun:{run}", now, SLOT_KIND, body)


def manual_run_id(watched: WatchedSet, now: datetime) -> str:
    """Id of a run outside the schedule."""
    return f"{watched.name}@{_format_time(int(now.timestamp()))}.{now.microsecond:06d}"


def run_finished_event(watched: WatchedSet, analysis: RunAnalysis, slot: int | None, now: datetime) -> Event:
    """Event that finishes a run, with its figures and the state after it."""
    body: Mapping[str, Any] = {
        "set": watched.name,
        "run": analysis.run,
        "slot": slot,
        "judged": analysis.judged,
        "failed": list(analysis.failed),
        "errors": analysis.errors,
        "p_value": analysis.p_value,
        "alarmed": list(analysis.alarmed),
        "recovered": list(analysis.recovered),
        "unreachable": analysis.unreachable,
        "cusums": analysis.state.to_json(),
    }
    return Event(f"{RUN_KIND}:{analysis.run}", now, RUN_KIND, body)


def _missed_slots(schedule: Schedule, history: RunHistory, last: int) -> tuple[int, int, int] | None:
    """First, last and number of the slots up to ``last`` that nothing accounts for."""
    slots = [slot for slot in (history.accounted, *(run.slot for run in history.started)) if slot is not None]
    if not slots:
        return None
    first = schedule.next_slot(max(slots))
    return None if last < first else (first, last, (last - first) // schedule.interval + 1)


def _from_timestamp(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _format_time(slot: int) -> str:
    return f"{_from_timestamp(slot):%Y-%m-%dT%H:%M:%SZ}"
