"""When canaries are due, and what has become of each time: durable, by the events in the store, without a broker.

A set has a slot every so many seconds, counted from 1970; every process counts the same. Within its slot a run begins
at a moment that is drawn for the slot from a secret in the store: an attacker who knows code and set knows no more of
the next run than that it comes within the interval. A run has the name of its slot. It is done when its event of kind
``canary-run`` is in the store; begun when its event of kind ``canary-slot`` is. So whoever takes over, after a stop or
a crash, knows what is begun and goes on with it, asking only what has no result yet; makes up for the latest slot that
nobody worked on; and notes those before it as missed.

Deviation: METHODS D6 asks for a Poisson schedule. Here times are uniform within slots of equal length. That has the
same mean and no fixed clock, and there is one run in each interval for sure, which is what "due" and "missed" mean.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from casemate.errors import BackendError
from casemate.monitor.trends.gauges import State, Step
from casemate.monitor.trends.watched import Watched
from casemate.protocols import EventStore
from casemate.types import Event

RUN = "canary-run"
"""Events of this kind end a run."""
SLOT = "canary-slot"
"""Events of this kind begin a run, or tell of slots that were missed."""
CLOCK = "canary-clock"
"""Events of this kind hold the secret that the moments of a set's runs are drawn from."""
WINDOWS = (timedelta(hours=3), timedelta(days=2), timedelta(days=60), None)
"""How far back is looked for the last run, in turn."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """The slots of a set.

    Attributes:
        watched: The set.
        secret: From which moments are drawn.
    """

    watched: Watched
    secret: str = ""

    @property
    def interval(self) -> int:
        """Seconds from one slot to the next: the shortest interval of its canaries."""
        return int(min(c.every or self.watched.every for c in self.watched.canaries))

    def due(self, slot: int) -> float:
        """When a slot's run begins, in seconds since 1970: within the interval that the slot begins.

        Args:
            slot: Its beginning, in seconds since 1970; a multiple of the interval.
        """
        drawn = hashlib.sha256(f"{self.secret}\0{self.watched.name}\0{slot}".encode()).digest()[:8]
        return slot + self.interval * (int.from_bytes(drawn, "big") / 2**64)

    def latest(self, now: float) -> int:
        """The latest slot whose run is due."""
        slot = int(now // self.interval) * self.interval
        return slot if self.due(slot) <= now else slot - self.interval

    def following(self, slot: int) -> int:
        """The slot after another, which may have been one of another interval."""
        return (slot // self.interval + 1) * self.interval

    def canaries(self, slot: int, after: int | None) -> tuple[str, ...]:
        """The canaries that a run asks: those whose own interval began anew since another slot.

        Args:
            slot: Of the run.
            after: Of the run before; None: there was none, and all are asked.
        """
        every = {c.id: int(c.every or self.watched.every) for c in self.watched.canaries}
        return tuple(i for i, seconds in every.items() if after is None or slot // seconds > after // seconds)

    def run(self, slot: int) -> str:
        """The name of a slot's run."""
        return f"{self.watched.name}@{_stamp(slot)}"


class Begun(NamedTuple):
    """A run that was begun: its slot, its name, and which canaries it asks."""

    slot: int
    run: str
    canaries: tuple[str, ...]


class Gap(NamedTuple):
    """Slots of a set that nobody worked on: the first, the last, how many, and when that was noted; None: not yet."""

    set: str
    first: datetime
    last: datetime
    slots: int
    noted: datetime | None


@dataclass(frozen=True, slots=True)
class Past:
    """What has become of the slots so far.

    Attributes:
        finished: The last slot whose run was finished; None: there is none.
        accounted: The last slot that was finished or noted as missed.
        begun: Runs that were begun and not finished, oldest first.
        state: What the last finished run left known.
    """

    finished: int | None = None
    accounted: int | None = None
    begun: tuple[Begun, ...] = ()
    state: State = State()


def past(store: EventStore, name: str, now: datetime) -> Past:
    """What has become of the slots of a set.

    Raises:
        BackendError: If the store cannot be read.
    """
    for window in WINDOWS:
        since = now - window if window else None
        runs = [e for e in store.scan(RUN, since) if e.body["set"] == name]
        slots = [e for e in store.scan(SLOT, since) if e.body["set"] == name]
        if runs:
            break
    finished = [int(e.body["slot"]) for e in runs if e.body["slot"] is not None]
    missed = [int(e.body["last"]) for e in slots if e.body["state"] == "missed"]
    done = {e.body["run"] for e in runs}
    begun = [e for e in slots if e.body["state"] == "begun" and e.body["run"] not in done]
    return Past(
        max(finished, default=None),
        max([*finished, *missed], default=None),
        tuple(sorted(Begun(int(e.body["slot"]), e.body["run"], tuple(e.body["canaries"])) for e in begun)),
        State.from_json(runs[-1].body["knowledge"]) if runs else State(),
    )


def gaps(store: EventStore, name: str, since: datetime | None = None) -> list[Gap]:
    """The slots of a set that nobody worked on, oldest first.

    Raises:
        BackendError: If the store cannot be read.
    """
    return [gap for event in store.scan(SLOT, since) if (gap := gap_of(event)) and gap.set == name]


def gap_of(event: Event) -> Gap | None:
    """The slots that an event says were missed; None: it says something else."""
    body = event.body
    if event.kind != SLOT or body["state"] != "missed":
        return None
    return Gap(body["set"], _moment(body["first"]), _moment(body["last"]), int(body["count"]), event.at)


def unwatched(watched: Watched, before: Past, now: float) -> Gap | None:
    """The slots that are over since a watch last worked, and that nobody has begun; None: none, or there was no watch.

    Args:
        watched: The set.
        before: What has become of its slots.
        now: Seconds since 1970.
    """
    if before.accounted is None:
        return None
    table = Timetable(watched)
    first = table.following(max([before.accounted, *(b.slot for b in before.begun)]))
    last = int(now // table.interval - 1) * table.interval
    if last < first:
        return None
    return Gap(watched.name, _moment(first), _moment(last), (last - first) // table.interval + 1, None)


def secret(store: EventStore, name: str, now: datetime) -> str:
    """The secret of a set's clock, made when there is none; the same for all who share the store.

    Raises:
        BackendError: If the store cannot be read or written.
    """
    for attempt in range(2):
        known = [e for e in store.scan(CLOCK) if e.body["set"] == name]
        if known:
            return str(known[0].body["secret"])
        if not attempt:  # of several who make one at the same moment, the store keeps the first
            store.append(Event(f"{CLOCK}:{name}", now, CLOCK, {"set": name, "secret": secrets.token_hex(16)}))
    raise BackendError("the event store does not keep events", backend="store", retryable=False)


def missed(timetable: Timetable, before: Past, latest: int, now: datetime) -> Event | None:
    """The event that tells of the slots before the latest that nobody worked on; None: there are none."""
    if before.accounted is None:
        return None
    open_ = max([before.accounted, *(b.slot for b in before.begun)])
    first, last = timetable.following(open_), latest - timetable.interval
    if last < first:
        return None
    body = {
        "set": timetable.watched.name,
        "state": "missed",
        "first": first,
        "last": last,
        "count": (last - first) // timetable.interval + 1,
    }
    return Event(f"{SLOT}:missed:{timetable.watched.name}@{_stamp(first)}", now, SLOT, body)


def begin(timetable: Timetable, slot: int, after: int | None, now: datetime) -> Event:
    """The event that begins the run of a slot."""
    run = timetable.run(slot)
    body = {
        "set": timetable.watched.name,
        "state": "begun",
        "run": run,
        "slot": slot,
        "canaries": list(timetable.canaries(slot, after)),
    }
    return Event(f"{SLOT}:begun:{run}", now, SLOT, body)


def by_hand(watched: Watched, now: datetime) -> str:
    """A name for a run that somebody asks for out of turn."""
    return f"{watched.name}@{_stamp(int(now.timestamp()))}.{now.microsecond:06d}"


def finish(watched: Watched, found: Step, slot: int | None, now: datetime) -> Event:
    """The event that ends a run, with its figures and with all that is known after it."""
    body: Mapping[str, Any] = {
        "set": watched.name,
        "run": found.run,
        "slot": slot,
        "judged": found.asked,
        "failed": list(found.failed),
        "errors": found.errors,
        "chance": found.chance,
        "alarmed": list(found.alarmed),
        "recovered": list(found.recovered),
        "unreachable": found.unreachable,
        "knowledge": found.state.to_json(),
    }
    return Event(f"{RUN}:{found.run}", now, RUN, body)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _stamp(slot: int) -> str:
    return f"{_moment(slot):%Y-%m-%dT%H:%M:%SZ}"
