"""Replays recorded questions and answers: each attack scores them as in a campaign, without asking anything.

A recorded set is a file of JSON lines, gzip-compressed or not. A line without ``candidate`` holds facts about the set
(model, digest, prompt version, seed). Every other line is one trial:

- ``attack``: name of the attack whose questions these are; default ``menta``, which scores open questions.
- ``author``: who wrote the questions, for example ``script`` or ``model``; default empty.
- ``candidate``, ``member``: name of the attacked document, and whether it was in the collection.
- ``questions`` and ``answers``, or ``question`` and ``answer`` for one. ``answers`` is a list, or a mapping from the
  target (``off``, ``on``) to a list; a list belongs to ``recorded``, a target whose guard is not known.
- ``text``, ``title``: the attacked document; ``key``: what the attack needs to score answers, such as masked words.
- ``features``: measurements by target, used where answers or text are not recorded. They need no ``questions``.
- ``withheld``: for each question, whether the guard withheld the candidate.
- ``half``: ``A`` or ``B``; decision rules are fitted on one half and applied to the other. Default: members and
  non-members each in turn.

A candidate has one membership, and the same questions about it are recorded once for each target.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from casemate.config import PluginSpec
from casemate.errors import CasemateError, DataError, first_reason
from casemate.plugins import build
from casemate.protocols import MembershipAttack
from casemate.rag.corpus import read_lines
from casemate.redteam.lab.datasets import Half
from casemate.redteam.lab.judge import OFF, ON, membership_metrics, missing_trials
from casemate.redteam.lab.results import MembershipMetrics, Trial
from casemate.types import Document, Probe, Reply

RECORDED = "recorded"  # target of answers without the name of one
MOST_BYTES = 1_000_000_000  # largest uncompressed size of a set
MOST_LINE_BYTES = 16_000_000  # largest uncompressed size of a line
HELP = "see 'casemate redteam replay --help' for the format"
Name: TypeAlias = Annotated[str, BeforeValidator(str)]
TargetName: TypeAlias = Literal["off", "on", "recorded"]


def _in_range(value: float) -> float:
    """The value, if sums of its square do not overflow."""
    if abs(value) > 1e100:
        raise ValueError("must be from -1e100 to 1e100")
    return value


Feature: TypeAlias = Annotated[FiniteFloat, AfterValidator(_in_range)]


class RecordedTrial(BaseModel):
    """One recorded trial; see the module for the fields."""

    model_config = ConfigDict(strict=True, frozen=True)
    attack: Name = "menta"
    author: Name = ""
    candidate: Name
    text: Name = ""
    title: Name = ""
    member: bool
    questions: list[str] = []
    answers: dict[TargetName, list[str]] = {}
    key: dict[str, Any] = {}
    features: dict[TargetName, Annotated[list[Feature], Field(min_length=1)]] = {}
    withheld: list[bool] = []
    half: Half | None = None
    line: int = 0

    @model_validator(mode="before")
    @classmethod
    def _plural(cls, row: dict[str, Any]) -> dict[str, Any]:
        """Accepts one question and one answer, and answers without the name of a target."""
        row = {f"{n}s": [row[n]] for n in ("question", "answer") if n in row} | row
        return row | {"answers": {RECORDED: row["answers"]}} if isinstance(row.get("answers"), list) else row

    @model_validator(mode="after")
    def _one_for_each_question(self) -> RecordedTrial:
        if not self.questions:
            if self.answers or not self.features:
                raise ValueError("questions: field required, except with features instead of answers")
            return self
        lists: list[tuple[str, Sequence[object]]] = [("answers", answers) for answers in self.answers.values()]
        lists += [("withheld", self.withheld)] if "withheld" in self.model_fields_set else []
        for name, values in lists:
            if len(values) != len(self.questions):
                raise ValueError(f"{len(self.questions)} questions need as many {name}, not {len(values)}")
        return self

    @property
    def document(self) -> Document:
        """The attacked document."""
        return Document(self.candidate, self.text, self.title)


@dataclass(frozen=True, slots=True)
class RecordedSet:
    """Recorded trials in the order of the file, and facts about the set."""

    about: Mapping[str, Any]
    trials: tuple[RecordedTrial, ...]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one attack achieved with questions of one author.

    Attributes:
        targets: Metrics by target; None with too few trials.
        missing: Why there are too few trials, by target.
        withheld: Share of the questions about members for which the member was withheld; None if not recorded.
        rescored: Trials scored from their answers; the others have recorded features only.
    """

    attack: str
    author: str
    targets: Mapping[str, MembershipMetrics | None] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    withheld: float | None = None
    rescored: int = 0


def read_recorded(path: Path) -> RecordedSet:
    """Reads a recorded set.

    Raises:
        DataError: If the file cannot be read, or a line is not a trial; the error names the line.
    """
    about: dict[str, Any] = {}
    trials: list[RecordedTrial] = []
    drawn = _Halves()
    earlier = _EarlierTrials()
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "candidate" in row:
                trial = RecordedTrial.model_validate(row | {"line": number})
                half = drawn[trial.candidate, trial.member]
                trials.append(trial if trial.half else trial.model_copy(update={"half": half}))
                earlier.check(trial)
            else:
                about |= row
        except (ValueError, TypeError, RecursionError) as error:
            reason = first_reason(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
            raise DataError(f"{path}, line {number}: no recorded trial ({reason}); {HELP}") from error
    if not trials:
        raise DataError(f"{path} contains no recorded trial; {HELP}")
    return RecordedSet(about, tuple(trials))


def replay(recorded: RecordedSet) -> list[ReplayResult]:
    """Scores a recorded set, by attack and author in alphabetical order.

    Raises:
        ConfigError: If an attack is not known.
        DataError: If a trial has neither features nor answers with the candidate's text, or cannot be scored.
    """
    groups: dict[tuple[str, str], list[RecordedTrial]] = defaultdict(list)
    for trial in recorded.trials:
        groups[trial.attack, trial.author].append(trial)
    genre = sorted({t.document.content for t in recorded.trials if t.text})
    return [_replay(name, author, trials, genre) for (name, author), trials in sorted(groups.items())]


def _replay(name: str, author: str, trials: Sequence[RecordedTrial], genre: Sequence[str]) -> ReplayResult:
    attack: MembershipAttack = build("attack", PluginSpec(use=name))
    attack.study(genre)
    half: dict[str, Half] = {t.candidate: t.half or "A" for t in trials}
    found: dict[str, MembershipMetrics | None] = {}
    missing: dict[str, str] = {}
    for target in (RECORDED, OFF, ON):
        scored = [s for t in trials if (s := _scored(attack, t, target)) is not None]
        if len({len(s.features) for s in scored}) > 1:
            raise DataError(f"some features of {name!r} have another number of values than its scored answers")
        if scored:
            found[target] = membership_metrics(scored, half, guarded=target == ON)
        if scored and found[target] is None:
            missing[target] = missing_trials(scored, half)
    hidden = [h for t in trials if t.member for h in t.withheld]
    rescored = sum(bool(t.text and t.answers) for t in trials)
    return ReplayResult(name, author, found, missing, sum(hidden) / len(hidden) if hidden else None, rescored)


def _scored(attack: MembershipAttack, trial: RecordedTrial, target: str) -> Trial | None:
    """The trial against one target, scored from its answers if they and the text are there."""
    which = f"line {trial.line}: the trial of {trial.candidate!r}"
    if target in trial.answers and trial.text:
        replies = [Reply(text) for text in trial.answers[target]]
        probe = Probe(tuple(trial.questions), trial.key)
        try:
            features = tuple(map(float, asyncio.run(attack.measure(trial.document, probe, replies))))
        except CasemateError:
            raise
        except Exception as error:
            message = f"{which} cannot be scored ({type(error).__name__})"
            raise DataError(f"{message}; record the attack's 'key' and an answer to every question") from error
    elif target in trial.features:
        features = tuple(trial.features[target])
    elif target in trial.answers:
        raise DataError(f"{which} has answers, but neither the candidate's 'text' nor 'features'")
    else:
        return None
    hidden = sum(trial.withheld) if target == ON else 0
    asked = len(trial.questions) or len(trial.withheld)
    return Trial(trial.candidate, trial.member, features, asked, hidden, hidden)


class _Halves(dict[tuple[str, bool], Half]):
    """The half of each candidate by name and membership: in turn within each kind."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[bool] = Counter()

    def __missing__(self, key: tuple[str, bool]) -> Half:
        self._counts[key[1]] += 1
        self[key] = "B" if self._counts[key[1]] % 2 else "A"
        return self[key]


class _EarlierTrials:
    """What the trials of earlier lines determine for later ones."""

    def __init__(self) -> None:
        self._widths: dict[tuple[str, str, str], int] = {}
        self._first: dict[str, RecordedTrial] = {}
        self._lines: dict[tuple[str, str, str, str, frozenset[str]], int] = {}

    def check(self, trial: RecordedTrial) -> None:
        """Checks a trial against the earlier ones (``ValueError``), and keeps what later ones need."""
        first = self._first.setdefault(trial.candidate, trial)
        if first.member != trial.member:
            raise ValueError(f"candidate {trial.candidate!r} has another 'member' in line {first.line}")
        for target in trial.answers.keys() | trial.features.keys():
            key = trial.attack, trial.author, trial.candidate, target, frozenset(trial.questions)
            if (line := self._lines.setdefault(key, trial.line)) != trial.line:
                raise ValueError(f"repeats line {line}: the same questions about {trial.candidate!r} ({target})")
        for target, values in trial.features.items():
            expected = self._widths.setdefault((trial.attack, trial.author, target), len(values))
            if len(values) != expected:
                raise ValueError(f"features.{target} has {len(values)} numbers; earlier trials have {expected}")


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, which may be compressed. Only a line feed ends a line: JSON texts may contain others."""
    size = number = 0
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        for number, line in enumerate(read_lines(str(path), MOST_LINE_BYTES, compressed), 1):
            size += len(line)
            if len(line) > MOST_LINE_BYTES or size > MOST_BYTES:
                limits = f"more than {MOST_LINE_BYTES:,} bytes in a line, or {MOST_BYTES:,} in all"
                raise DataError(f"{path}, line {number}: {limits}; split it")
            yield line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 text") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); give a file of JSON lines, .gz or not") from error
