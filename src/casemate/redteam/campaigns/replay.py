"""Replays recorded questions and answers: each attack scores them as in a campaign, without asking anything.

A recorded set is a file of JSON lines, gzip-compressed or not. A line without ``candidate`` holds facts about the set
(model, digest, prompt version, seed). Every other line is one trial:

- ``attack``: name of the attack whose questions these are; default ``menta``, which scores open questions.
- ``author``: who wrote the questions, for example ``script`` or ``model``; default empty.
- ``candidate``, ``member``: name of the attacked document, and whether it was in the collection.
- ``questions`` and ``answers``, or ``question`` and ``answer`` for one. ``answers`` is a list, or a mapping from the
  target (``off``, ``on``) to a list; a list belongs to ``off``.
- ``text``, ``title``: the attacked document; ``key``: what the attack needs to score answers, such as masked words.
- ``features``: measurements by target, used where answers or text are not recorded.
- ``withheld``: for each question, whether the guard withheld the candidate.
- ``half``: ``A`` or ``B``; decision rules are fitted on one half and applied to the other. Default: members and
  non-members each in turn.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from casemate.config import PluginSpec
from casemate.errors import CasemateError, DataError
from casemate.plugins import build
from casemate.protocols import MembershipAttack
from casemate.redteam.lab.datasets import Half
from casemate.redteam.lab.judge import OFF, ON, membership_metrics
from casemate.redteam.lab.results import MembershipMetrics, Trial
from casemate.types import Document, Probe, Reply

MOST_BYTES = 1_000_000_000
"""Largest uncompressed size of a set."""


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """One recorded trial; see the module for the fields."""

    attack: str
    author: str
    candidate: Document
    member: bool
    questions: tuple[str, ...]
    answers: Mapping[str, tuple[str, ...]]
    key: Mapping[str, Any]
    features: Mapping[str, tuple[float, ...]]
    withheld: tuple[bool, ...]
    half: str


@dataclass(frozen=True, slots=True)
class RecordedSet:
    """Recorded trials.

    Attributes:
        about: Facts about the set.
        trials: In the order of the file.
    """

    about: Mapping[str, Any]
    trials: tuple[RecordedTrial, ...]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one attack achieved with questions of one author.

    Attributes:
        attack: Name of the attack.
        author: Author of the questions.
        targets: Metrics by target; None with too few trials.
        withheld: Share of the questions about members for which the member was withheld; None if not recorded.
        rescored: Trials scored from their answers; the others have recorded features only.
    """

    attack: str
    author: str
    targets: Mapping[str, MembershipMetrics | None] = field(default_factory=dict)
    withheld: float | None = None
    rescored: int = 0


def read_recorded(path: Path) -> RecordedSet:
    """Reads a recorded set.

    Raises:
        DataError: If the file cannot be read, or a line is no trial; the error names the line.
    """
    about: dict[str, Any] = {}
    trials: list[RecordedTrial] = []
    drawn = _Halves()
    widths: dict[tuple[str, str, str], int] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "candidate" in row:
                trials.append(_trial(row, drawn[row["candidate"], row.get("member")]))
                _check_widths(trials[-1], widths)
            else:
                about |= row
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: no recorded trial ({type(error).__name__}: {error})") from error
    if not trials:
        raise DataError(f"{path} contains no recorded trial; see 'casemate redteam replay --help' for the format")
    return RecordedSet(about, tuple(trials))


def replay(recorded: RecordedSet) -> list[ReplayResult]:
    """Scores a recorded set, by attack and author in alphabetical order.

    Raises:
        ConfigError: If an attack is not known.
        DataError: If a trial has neither features nor answers with the candidate's text.
    """
    groups: dict[tuple[str, str], list[RecordedTrial]] = defaultdict(list)
    for trial in recorded.trials:
        groups[trial.attack, trial.author].append(trial)
    genre = sorted({t.candidate.content for t in recorded.trials if t.candidate.text})
    return [_replay(name, author, trials, genre) for (name, author), trials in sorted(groups.items())]


def _replay(name: str, author: str, trials: Sequence[RecordedTrial], genre: Sequence[str]) -> ReplayResult:
    attack: MembershipAttack = build("attack", PluginSpec(use=name))
    attack.study(genre)
    half: dict[str, Half] = {t.candidate.source: "A" if t.half == "A" else "B" for t in trials}
    found: dict[str, MembershipMetrics | None] = {}
    for target in (OFF, ON):
        scored = [s for t in trials if (s := _scored(attack, t, target)) is not None]
        if scored:
            found[target] = membership_metrics(scored, half, guarded=target == ON)
    hidden = [h for t in trials if t.member for h in t.withheld]
    rescored = sum(bool(t.candidate.text and t.answers) for t in trials)
    return ReplayResult(name, author, found, sum(hidden) / len(hidden) if hidden else None, rescored)


def _scored(attack: MembershipAttack, trial: RecordedTrial, target: str) -> Trial | None:
    """The trial against one target, scored from its answers if they and the text are there."""
    source = trial.candidate.source
    if target in trial.answers and trial.candidate.text:
        replies = [Reply(text) for text in trial.answers[target]]
        probe = Probe(trial.questions, trial.key)
        try:
            features = tuple(map(float, asyncio.run(attack.measure(trial.candidate, probe, replies))))
        except CasemateError:
            raise
        except Exception as error:
            message = f"the trial of {source!r} cannot be scored ({type(error).__name__})"
            raise DataError(f"{message}; record the attack's 'key' and an answer to every question") from error
    elif target in trial.features:
        features = trial.features[target]
    elif target in trial.answers:
        raise DataError(f"the trial of {source!r} has answers, but neither the candidate's 'text' nor 'features'")
    else:
        return None
    hidden = sum(trial.withheld) if target == ON else 0
    return Trial(source, trial.member, features, len(trial.questions), hidden, hidden)


class _Halves(dict[tuple[str, Any], str]):
    """The half of each candidate by name and membership: in turn within each kind."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[Any] = Counter()

    def __missing__(self, key: tuple[str, Any]) -> str:
        self._counts[key[1]] += 1
        self[key] = "AB"[self._counts[key[1]] % 2]
        return self[key]


def _trial(row: Mapping[str, Any], half: str) -> RecordedTrial:
    missing = "member" if "member" not in row else "question" if not {"question", "questions"} & row.keys() else ""
    if missing:
        needed = "a trial needs candidate, member (true or false), and question or questions"
        raise ValueError(f"the field {missing!r} is missing; {needed}")
    questions = row["questions"] if "questions" in row else [row["question"]]
    answers = row["answers"] if "answers" in row else [row["answer"]] if "answer" in row else {}
    answers = _by_target("answers", answers if isinstance(answers, dict) else {OFF: answers})
    features = _by_target("features", row.get("features", {}))
    if not isinstance(row["member"], bool):
        raise ValueError("member must be true or false")
    if not _is_list(questions, str) or not questions:
        raise ValueError("questions must be a list of texts, with at least one")
    for given in answers.values():
        if not _is_list(given, str) or len(given) != len(questions):
            raise ValueError(f"{len(questions)} questions need as many answers, as texts")
    if "withheld" in row and (not _is_list(row["withheld"], bool) or len(row["withheld"]) != len(questions)):
        raise ValueError(f"withheld must be a list of true or false, one for each of {len(questions)} questions")
    if row.get("half", half) not in ("A", "B"):
        raise ValueError(f"half must be A or B, not {row['half']!r}")
    return RecordedTrial(
        attack=str(row.get("attack", "menta")),
        author=str(row.get("author", "")),
        candidate=Document(str(row["candidate"]), str(row.get("text", "")), str(row.get("title", ""))),
        member=row["member"],
        questions=tuple(questions),
        answers={target: tuple(given) for target, given in answers.items()},
        key=dict(row.get("key", {})),
        features={target: _numbers(f"features.{target}", values) for target, values in features.items()},
        withheld=tuple(row.get("withheld", ())),
        half=row.get("half", half),
    )


def _is_list(value: object, kind: type) -> bool:
    """Whether a value is a list with elements of one type."""
    return isinstance(value, list) and all(isinstance(element, kind) for element in value)


def _by_target(name: str, value: object) -> dict[str, Any]:
    """A field with one value for each target."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping from {OFF!r} and {ON!r}")
    if unknown := sorted(value.keys() - {OFF, ON}):
        raise ValueError(f"{name}: unknown target {unknown[0]!r}; the targets are {OFF!r} and {ON!r}")
    return value


def _numbers(name: str, values: object) -> tuple[float, ...]:
    """Finite numbers, at least one."""
    message = f"{name} must be a list of finite numbers, with at least one"
    if not isinstance(values, list) or not values or not all(type(value) in (int, float) for value in values):
        raise ValueError(message)
    try:
        found = tuple(map(float, values))
    except OverflowError as error:
        raise ValueError(message) from error
    if not all(map(math.isfinite, found)):
        raise ValueError(message)
    return found


def _check_widths(trial: RecordedTrial, widths: dict[tuple[str, str, str], int]) -> None:
    """Checks that features have as many numbers as in earlier trials, whose numbers are in ``widths``."""
    for target, values in trial.features.items():
        expected = widths.setdefault((trial.attack, trial.author, target), len(values))
        if len(values) != expected:
            raise ValueError(f"features.{target} has {len(values)} numbers; earlier trials have {expected}")


def _lines(path: Path) -> list[str]:
    """The lines of a file, which may be compressed. Only a line feed ends a line: JSON texts may contain others."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); give a file of JSON lines, .gz or not") from error
    if len(data) > MOST_BYTES:
        raise DataError(f"{path} has more than {MOST_BYTES:,} bytes; split it")
    try:
        return data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text") from error
