"""One run after another: what has added up on each canary, and which of them are to alert somebody.

A fold: ``step`` takes what was known and the results of one run, and returns what is known now. It reads no clock and
no store, so whoever repeats it, in another process and after a crash, gets the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from casemate.errors import ConfigError
from casemate.monitor.canaries.results import Result, Severity, Status, base
from casemate.monitor.trends import evidence
from casemate.monitor.trends.evidence import NOTHING, Sums
from casemate.monitor.trends.watched import Clean, Known, Watched

WEIGHTS = {Severity.LOW: 0.5, Severity.MEDIUM: 1.0, Severity.HIGH: 2.0, Severity.CRITICAL: 4.0}
"""Shares in the budget of false alarms: a grave canary needs less evidence, at the cost of the others."""
RECENT = 10
"""Runs of each canary that the page looks back on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a trend becomes an alarm.

    Attributes:
        budget: Runs in which at most one false alarm is allowed, above 0. Half goes to the tests of single canaries,
            half to that of many failures at once.
        confirm: How often a canary that failed is asked again within the run, 0 to 9.
        echo: Share, at least 0 and below 1, of a harmless failure's repetitions that fail too, where it is larger than
            the canary's flake rate: what makes a question fail by chance may last for some seconds.
        errors: Runs in a row without an answer that make a target unreachable, and a canary blind; at least 1.
        passes: Passes in a row, 1 to 10, that a canary needs at least to count as well again.
        page_rules: Whether the page's own rules alert somebody, too.
    """

    budget: float = 1000.0
    confirm: int = 5
    echo: float = 0.1
    errors: int = 3
    passes: int = 3
    page_rules: bool = False

    def __post_init__(self) -> None:
        good = self.budget > 0 and 0 <= self.confirm <= 9 and 0 <= self.echo < 1
        if not good or self.errors < 1 or not 1 <= self.passes <= RECENT:
            raise ConfigError(
                f"budget={self.budget}, confirm={self.confirm}, echo={self.echo}, errors={self.errors}, "
                f"passes={self.passes}: budget must be above 0, confirm 0 to 9, echo at least 0 and below 1, errors at "
                f"least 1, passes 1 to {RECENT}"
            )


@dataclass(frozen=True, slots=True)
class Gauge:
    """What has added up on one canary.

    Attributes:
        clean: The baseline that it is measured by; under another one it begins anew.
        sums: Its CUSUMs; nothing while it is alarmed.
        recent: Its last runs in which it could be judged, oldest first: ``P`` passed, ``F`` failed.
        errors: Runs in a row in which it could not be judged.
        since: Time of the first failure of those that add up now; None: there is none.
        asked: Runs since then in which it could be judged.
        failed: How many of these failed.
        alarmed: Whether it has been alerted and is not well again.
    """

    clean: Clean = Clean()
    sums: Sums = NOTHING
    recent: str = ""
    errors: int = 0
    since: datetime | None = None
    asked: int = 0
    failed: int = 0
    alarmed: bool = False

    @property
    def streak(self) -> int:
        """Passes in a row at the end."""
        return len(self.recent) - len(self.recent.rstrip("P"))

    @property
    def idle(self) -> bool:
        """Whether one more pass changes nothing: it has passed for long, and nothing adds up."""
        return self.recent == RECENT * "P" and not (self.errors or self.alarmed or max(self.sums) > 1)

    @property
    def persistent(self) -> bool:
        """The page's rule: at least 8 of the last 10 runs failed."""
        return self.recent.count("F") >= 8


@dataclass(frozen=True, slots=True)
class State:
    """What is known after a run.

    Attributes:
        gauges: By canary.
        down: Runs in a row in which at least half of the canaries got no answer.
        down_since: When the first of them was.
    """

    gauges: Mapping[str, Gauge] = field(default_factory=dict)
    down: int = 0
    down_since: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        """The state as an event keeps it."""
        return {
            "gauges": {name: asdict(g) | {"since": _iso(g.since)} for name, g in self.gauges.items()},
            "down": self.down,
            "down_since": _iso(self.down_since),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> State:
        """The state that an event kept."""
        return cls(
            {name: _gauge(figures) for name, figures in told["gauges"].items()},
            int(told["down"]),
            _time(told["down_since"]),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What one run has shown.

    Attributes:
        run: Its id.
        at: Time of its last result.
        state: What is known after it.
        alarmed: Canaries that became alarming in it.
        recovered: Canaries that are well again since it.
        failed: Canaries that failed in it.
        asked: How many could be judged.
        errors: How many could not.
        many: Whether so many failed at once that chance is ruled out.
        chance: Probability that chance alone makes as many fail.
        unreachable: Whether the target counts as down.
        blind: Canaries without an answer for several runs, though the target is not down.
    """

    run: str
    at: datetime
    state: State
    alarmed: tuple[str, ...]
    recovered: tuple[str, ...]
    failed: tuple[str, ...]
    asked: int
    errors: int
    many: bool
    chance: float
    unreachable: bool
    blind: tuple[str, ...]


def step(state: State, results: Sequence[Result], watched: Watched, limits: Limits) -> Step:
    """One run more.

    Args:
        state: What was known before.
        results: Of one run and of its repetitions (``watched.base``), in the order asked; at least one. Results of
            canaries that are no longer in the set are left out.
        watched: The set.
        limits: When a trend becomes an alarm.
    """
    known = watched.known
    asked = _asked(results, known)
    gauges = {i: _measured_by(state.gauges.get(i), known[i].clean) for i in known}
    before = {i: g.alarmed for i, g in gauges.items()}
    down = _down(state, asked, len(known), limits)
    for canary, (at, answers) in asked.items():
        if answers or not down:  # of a target that is down, no canary is to blame
            gauges[canary] = _after(gauges[canary], at, answers, limits)
    judged = {i: answers for i, (_, answers) in asked.items() if answers}
    chance, many = _together(judged, before, known, limits)
    picked = _picked(judged, gauges, known, limits) | many
    gauges |= {i: replace(gauges[i], alarmed=True, sums=NOTHING) for i in picked}
    at = max(r.at for r in results)
    return Step(
        base(results[0].run),
        at,
        State(gauges, down, (state.down_since or at) if down else None),
        tuple(i for i in known if i in picked),
        tuple(i for i in asked if before[i] and not gauges[i].alarmed),
        tuple(i for i, answers in judged.items() if not answers[0]),
        len(judged),
        len(asked) - len(judged),
        bool(many),
        chance,
        down >= limits.errors,
        tuple(i for i, g in gauges.items() if g.errors >= limits.errors and down < limits.errors),
    )


def suspects(state: State, results: Sequence[Result], watched: Watched, limits: Limits) -> tuple[str, ...]:
    """The canaries to ask again within the run: they failed, and neither are alarming already nor become so by it.

    That many fail at once is asked again once: it may be over in a moment.

    Args:
        state: What was known before the run.
        results: All of the run so far.
        watched: The set.
        limits: When a trend becomes an alarm.
    """
    if not results:
        return ()
    found = step(state, results, watched, limits)
    known, asked = watched.known, Counter(r.canary for r in results)
    before = {i for i, g in state.gauges.items() if g.alarmed}
    sure = {i for i, g in found.state.gauges.items() if g.alarmed and not (found.many and asked[i] == 1)}
    return tuple(i for i in found.failed if known[i].pages and i not in before | sure)


def _asked(results: Sequence[Result], known: Collection[str]) -> dict[str, tuple[datetime, list[bool]]]:
    """When each canary was asked first, and which of its answers passed; without those in error."""
    found: dict[str, tuple[datetime, list[bool]]] = {}
    for result in results:
        if result.canary in known:
            answers = found.setdefault(result.canary, (result.at, []))[1]
            if result.status is not Status.ERROR:
                answers.append(result.status is Status.PASS)
    return found


def _measured_by(gauge: Gauge | None, clean: Clean) -> Gauge:
    """The gauge, or a new one if there is none by this baseline."""
    return gauge if gauge and gauge.clean == clean else Gauge(clean)


def _after(gauge: Gauge, at: datetime, answers: Sequence[bool], limits: Limits) -> Gauge:
    """A gauge after its canary was asked in one more run, once or several times."""
    if not answers:
        return replace(gauge, errors=gauge.errors + 1)
    if gauge.idle and len(answers) == 1 and answers[0]:
        return gauge  # nearly always: a long history is read in a moment
    failed = not answers[0]
    sums = NOTHING if gauge.alarmed else _summed(gauge, answers, limits)
    since, asked, count = gauge.since, gauge.asked + 1, gauge.failed + failed
    if not gauge.alarmed and evidence.evidence(sums) <= 1:
        since, asked, count = None, 0, 0
    elif since is None:
        since, asked, count = at, 1, int(failed)
    recent = (gauge.recent + ("F" if failed else "P"))[-RECENT:]
    after = Gauge(gauge.clean, sums, recent, 0, since, asked, count, gauge.alarmed)
    return Gauge(gauge.clean, recent=recent) if after.alarmed and _well(after, limits) else after


def _summed(gauge: Gauge, answers: Sequence[bool], limits: Limits) -> Sums:
    """The CUSUMs after the answers of one run; those after the first repeat the same question."""
    flake = evidence.flake_bound(gauge.clean)
    first = evidence.ratio(flake, int(not answers[0]), int(answers[0]))
    if len(answers) == 1:
        return evidence.add(gauge.sums, first)
    failed = list(answers[1:]).count(False)
    again = evidence.ratio(max(flake, limits.echo), failed, len(answers) - 1 - failed)
    return evidence.add(gauge.sums, first, again)


def _well(gauge: Gauge, limits: Limits) -> bool:
    """Whether an alarmed canary has passed often enough in a row."""
    streak = gauge.streak
    return streak >= evidence.enough_passes(
        gauge.failed, max(gauge.asked - streak, gauge.failed), limits.passes, RECENT
    )


def _together(
    judged: Mapping[str, Sequence[bool]], before: Mapping[str, bool], known: Mapping[str, Known], limits: Limits
) -> tuple[float, frozenset[str]]:
    """The probability of as many failures at once by chance; and, if that is ruled out, which canaries failed.

    A failure counts if at least half of its repetitions failed, too. Those that are alarmed already are left out.
    """
    counted = [i for i in judged if known[i].pages and not before[i]]
    failed = [i for i in counted if not judged[i][0] and 2 * list(judged[i][1:]).count(False) >= len(judged[i]) - 1]
    if not failed:
        return 1.0, frozenset()
    chance = float(evidence.failures_tail(tuple(evidence.flake_mean(known[i].clean) for i in counted))[len(failed)])
    return chance, frozenset(failed if chance * 2 * limits.budget <= 1 else ())


def _picked(
    judged: Mapping[str, Sequence[bool]], gauges: Mapping[str, Gauge], known: Mapping[str, Known], limits: Limits
) -> frozenset[str]:
    """The canaries whose own evidence suffices, among those that failed in this run."""
    failing = [i for i, answers in judged.items() if known[i].pages and not all(answers)]
    if not failing:
        return frozenset()
    total = sum(WEIGHTS[c.severity] for c in known.values() if c.pages)
    stakes = {i: evidence.evidence(gauges[i].sums) * WEIGHTS[known[i].severity] / total for i in failing}
    return evidence.alarms(stakes, 2 * limits.budget)


def _down(state: State, asked: Mapping[str, tuple[datetime, Sequence[bool]]], canaries: int, limits: Limits) -> int:
    """Runs in a row in which the target hardly answered. One in which it never did counts for all that are needed."""
    silent = sum(not answers for _, answers in asked.values())
    if not asked or 2 * silent < len(asked):
        return 0
    never = silent == len(asked) and len(asked) >= min(3, canaries)
    return max(state.down + 1, limits.errors if never else 0)


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


def _time(told: str | None) -> datetime | None:
    return datetime.fromisoformat(told) if told else None


def _gauge(told: Mapping[str, Any]) -> Gauge:
    figures = {"clean": Clean(*told["clean"]), "sums": tuple(told["sums"]), "since": _time(told["since"])}
    return Gauge(**{**told, **figures})
