"""Switches enforcement on or off, after a preview of what would have been withheld from recorded traffic.

A switch is an event of kind ``setting``. Running gateways on the same event store follow it (``SettingsSync``), and it
is written into casemate.yaml, where it is permanent. Functions that use the store raise ``BackendError`` if it fails.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from casemate import config as configuration
from casemate.config import Config
from casemate.config_file import set_values
from casemate.errors import CasemateError, DataError
from casemate.guard.client_state import crawl_evidence
from casemate.maths.stats import clopper_pearson
from casemate.monitor.poisoning.quarantine import SCREENING_KIND
from casemate.protocols import CalibratedDefense, EventStore
from casemate.runtime.events import append_durably
from casemate.system import App
from casemate.types import Action, Event

GuardMode: TypeAlias = Literal["enforce", "observe"]
SETTING_KIND, SETTING = "setting", "guard.mode"
"""Kind of the events that record a switch, and the name of the setting in them."""
SIGNIFICANCE = "significance"
"""Option of a calibrated defense whose changes such events record too."""
THRESHOLD = "threshold"
"""Name of the setting in events that record a threshold adjusted to recorded scores. Previews apply the new one."""
SESSION_GAP = timedelta(minutes=30)
"""A client's question after a longer pause starts a new session."""
EXAMPLES = 5
TOLERABLE = 0.02
"""Share of affected questions above which benign traffic is an unlikely cause, or the calibration does not fit it."""

LEAST_QUESTIONS = 99
"""Recorded questions that a switch without confirmation needs: as ``calibrate --recorded`` at significance .01."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WithheldExample:
    """A question from which a defense would have withheld chunks. It contains ids only."""

    request: str
    at: datetime
    client: str
    hidden: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DefensePreview:
    """What one defense would have done.

    Attributes:
        affected: Questions from which it would have withheld something, or whose answer it would have cut.
        repeated: Of these, questions in which it only repeats an earlier decision about the client and the documents.
        undecided: Questions on which it could not decide, for example without a calibration.
        failed: Questions on which it failed. In enforce mode, ``guard.on_error`` applies to them.
    """

    questions: int
    affected: int
    repeated: int
    sessions: int
    undecided: int
    failed: int
    examples: tuple[WithheldExample, ...]


@dataclass(frozen=True, slots=True)
class EnforcementPreview:
    """What enforcement would have changed in the traffic that was recorded in observe mode.

    Attributes:
        questions: Questions of clients, without canaries.
        sessions: Questions of one client with pauses of at most 30 minutes are one session.
        affected: Questions that any defense would have affected.
        repeated: Of these, questions in which every defense only repeats an earlier decision.
        sources: New sources that would have been quarantined.
    """

    since: datetime
    questions: int
    sessions: int
    affected: int
    repeated: int
    affected_sessions: int
    defenses: Mapping[str, DefensePreview]
    sources: tuple[str, ...]

    @property
    def few(self) -> bool:
        """Whether there are fewer questions than a judgment needs."""
        return self.questions < LEAST_QUESTIONS

    @property
    def excessive(self) -> bool:
        """Whether the share of affected questions is above ``TOLERABLE``, at 95 % confidence."""
        return clopper_pearson(self.affected, self.questions)[0] > TOLERABLE if self.questions else False


@dataclass(frozen=True, slots=True)
class _Judgment:
    """One defense's judgment of one question."""

    request: str
    at: datetime
    client: tuple[str, str]  # tenant, client
    defense: str
    affects: bool
    repeats: bool
    undecided: bool
    failed: bool
    hidden: tuple[str, ...]


def read_preview(
    store: EventStore,
    since: datetime,
    is_canary: Callable[[str], bool],
    limit: int | None = None,
    until: datetime | None = None,
) -> EnforcementPreview:
    """Reads the verdicts of a period and summarizes those of observe mode. Blocks.

    Canaries do not count. ``limit`` is the largest number of events of each kind, the newest; None: all.

    Raises:
        BackendError: If the store cannot be read.
    """

    def read(kind: str) -> list[Event]:
        found = store.scan(kind, since) if limit is None else store.latest(kind, limit)
        return [event for event in found if event.at >= since and (until is None or event.at < until)]

    verdicts = [e for e in read("verdict") if not e.body["enforced"] and not is_canary(str(e.body.get("client", "")))]
    moves = [e for e in read(SETTING_KIND) if e.body.get("name") == THRESHOLD]
    verdicts = _judged_again(sorted(verdicts, key=lambda e: e.at), moves) if moves else verdicts
    shortened = {str(e.body.get(crawl_evidence.SHORTENED, "")) for e in read(crawl_evidence.KIND)}
    sources = sorted({str(e.body["source"]) for e in read(SCREENING_KIND)})
    return summarize([_judgment(e, shortened) for e in verdicts], since, sources)


def summarize(judgments: Sequence[_Judgment], since: datetime, sources: Iterable[str] = ()) -> EnforcementPreview:
    """Summarizes judgments of observe mode."""
    session_of = _sessions(judgments)
    affected, decided = _affected(judgments)
    defenses = {}
    for name in sorted({j.defense for j in judgments}):
        own = [j for j in judgments if j.defense == name]
        acted = {j.request: j for j in own if j.affects}
        new = _affected(own)[1]
        defenses[name] = DefensePreview(
            questions=len({j.request for j in own}),
            affected=len(acted),
            repeated=len(acted.keys() - new),
            sessions=len({session_of[request] for request in acted}),
            undecided=len({j.request for j in own if j.undecided}),
            failed=len({j.request for j in own if j.failed}),
            examples=tuple(
                WithheldExample(j.request, j.at, j.client[1], j.hidden) for j in list(acted.values())[-EXAMPLES:]
            ),
        )
    return EnforcementPreview(
        since=since,
        questions=len(session_of),
        sessions=len(set(session_of.values())),
        affected=len(affected),
        repeated=len(affected - decided),
        affected_sessions=len({session_of[request] for request in affected}),
        defenses=defenses,
        sources=tuple(sources),
    )


def _affected(judgments: Iterable[_Judgment]) -> tuple[set[str], set[str]]:
    """The requests that were affected, and those of them with a decision that repeats no earlier one."""
    acted = [j for j in judgments if j.affects]
    return {j.request for j in acted}, {j.request for j in acted if not j.repeats}


def require_switchable(config: Config, present: str, mode: GuardMode) -> None:
    """Refuses a switch of running gateways from their present mode.

    Raises:
        DataError: If the guard is off: they have no guard then. If it would observe, and there is agent memory: every
            client could read the entries of all others.
    """
    if present == "off":
        raise DataError("the guard is off; set guard.mode: observe in casemate.yaml and restart the gateway")
    if mode == "observe" and config.gateway.agent_memory:
        raise DataError(
            "agent memory needs enforcement: in observe mode, every client could read the entries of all others; set "
            "gateway.agent_memory: false in casemate.yaml and restart the gateway"
        )


def switch(store: EventStore, path: Path, mode: GuardMode, by: str) -> str:
    """Records a switch, which running gateways follow, and writes it into the configuration file. Blocks.

    With ``enforce``, the screening of new documents quarantines, too, if ``monitor.gate`` is ``observe``. Returns why
    the file could not be changed; empty if it was.

    Raises:
        BackendError: If the switch could not be recorded; nothing changes then.
    """
    record_setting(store, SETTING, mode, by)
    return set_values(path, setting_values(path, mode))


def setting_values(path: Path, mode: GuardMode) -> dict[str, str | bool]:
    """The keys that a switch sets in a configuration file."""
    values: dict[str, str | bool] = {SETTING: mode}
    try:
        gate = configuration.read(path).monitor.gate
    except CasemateError:
        return values
    if mode == "enforce" and gate == "observe":
        values["monitor.gate"] = True
    return values


class SettingsSync:
    """Applies settings that other processes on the event store changed, or this one before a restart.

    A switch of enforcement applies if it is later than the last change of casemate.yaml before the start. So a file
    that was edited by hand since keeps its mode. Mode ``off`` stays, and so does enforcement with agent memory
    (``require_switchable``). An operating point applies if its previous value
    is the one in effect here. So gateways that start with the same casemate.yaml stay equal.
    """

    def __init__(self, app: App) -> None:
        self._app, self._offset = app, 0
        file = app.config.file
        self._since = datetime.fromtimestamp(file.stat().st_mtime if file.exists() else 0, UTC)

    def sync(self) -> None:
        """Applies the changes recorded since the last call; ``BackendError`` if the store cannot be read. Blocks."""
        events, self._offset = self._app.store.read_since(SETTING_KIND, self._offset)
        calibrated = (d for d in self._app.guard.defenses if isinstance(d, CalibratedDefense))
        defenses = {f"{defense.name}.{SIGNIFICANCE}": defense for defense in calibrated}
        for event in events:
            name, after = str(event.body.get("name")), event.body["after"]
            if name == SETTING and event.at > self._since and self._app.mode != "off":
                self._switch("enforce" if after == "enforce" else "observe")
            elif name in defenses and defenses[name].significance == event.body["before"]:
                defenses[name].significance = float(after)

    def _switch(self, mode: GuardMode) -> None:
        try:
            require_switchable(self._app.config, self._app.mode, mode)
            self._app.guard.enforce = mode == "enforce"
        except DataError as error:
            _log.warning("the switch to observe mode is ignored: %s", error)


def record_setting(store: EventStore, name: str, after: Any, by: str, **more: Any) -> None:
    """Records the new value of a setting. Blocks."""
    body = {"name": name, "after": after, "by": by, **more}
    append_durably(store, [Event(uuid.uuid4().hex, datetime.now(UTC), SETTING_KIND, body)], f"the new value of {name}")


def _judged_again(verdicts: Sequence[Event], moves: Sequence[Event]) -> list[Event]:
    """Verdicts, by time, under the thresholds that were adjusted after them.

    A document withheld again from a client counts only if the client's earlier question still counts.
    """
    withheld: dict[tuple[str, str, str], set[str]] = {}
    found = []
    for event in verdicts:
        body, evidence = event.body, event.body.get("evidence", {})
        key = str(body["defense"]), str(body.get("tenant", "")), str(body.get("client", ""))
        later = [m.body for m in moves if m.at > event.at and (m.body["defense"], m.body["tenant"]) == key[:2]]
        if not later or body.get("threshold") is None or not body["hidden"]:
            found.append(event)
            continue
        moved = sum(float(m["after"]) - float(m["before"]) for m in later)
        sources = set(map(str, evidence.get("withheld", ())))
        earlier = withheld.setdefault(key, set())
        if float(body["score"]) > float(body["threshold"]) + moved or "session" in evidence.get("reasons", ()):
            earlier |= sources
            found.append(event)
        elif sources & earlier:
            found.append(event)
        else:
            found.append(replace(event, body={**body, "hidden": [], "action": Action.NONE.value}))
    return found


def _judgment(event: Event, shortened: set[str]) -> _Judgment:
    body, evidence = event.body, event.body.get("evidence", {})
    request, defense = str(body.get("request") or event.id), str(body["defense"])
    failed = "error" in evidence
    cut = defense == "crawl_limit" and request in shortened
    return _Judgment(
        request=request,
        at=event.at,
        client=(str(body.get("tenant", "")), str(body.get("client", ""))),
        defense=defense,
        affects=not failed and (cut or bool(body["hidden"]) or str(body["action"]) != Action.NONE.value),
        repeats=not cut and evidence.get("reasons") == ["before"],
        undecided="undecided" in evidence,
        failed=failed,
        hidden=tuple(map(str, body["hidden"])),
    )


def _sessions(judgments: Sequence[_Judgment]) -> dict[str, tuple[str, str, int]]:
    """The session of each request: tenant, client and number."""
    found: dict[str, tuple[str, str, int]] = {}
    numbers, last = Counter[tuple[str, str]](), dict[tuple[str, str], datetime]()
    for j in sorted(judgments, key=lambda j: j.at):
        if j.request in found:
            continue
        if j.client in last and j.at - last[j.client] > SESSION_GAP:
            numbers[j.client] += 1
        last[j.client] = j.at
        found[j.request] = (*j.client, numbers[j.client])
    return found
