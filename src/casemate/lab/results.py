"""What a campaign found: plain records that are written as json, rendered as a report, and compared with a baseline."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from casemate.errors import DataError
from casemate.lab.crawl_results import Crawl
from casemate.stats import Rate

FORMAT = 1


class Status(StrEnum):
    """How a check or a whole campaign ended. A check that was not made is never a pass."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"  # skipped, interrupted, or too few trials for a statement
    ERROR = "error"  # the target or a part could not be reached


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate attacked once.

    Attributes:
        candidate: Id of the document.
        member: Whether it was in the index.
        features: What the attack measured; higher speaks for membership.
        questions: How many it asked.
        hidden: In how many of them the guard withheld this very document; 0 with the guard off.
        flagged: In how many of them the guard withheld anything.
    """

    candidate: str
    member: bool
    features: tuple[float, ...]
    questions: int
    hidden: int = 0
    flagged: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one attack achieved against one target. A rate has its 95 % interval; None: too few trials to say.

    Attributes:
        members: Candidates that were in the index.
        nonmembers: Candidates that were not.
        auc: Area under the ROC curve, in [0, 1]; .5 is chance, for the owner nearer to .5 is better.
        adjusted_accuracy: max(acc, 1 - acc) - .5 at thresholds fitted on the other half, in [0, .5]; lower is better.
        tpr_at_1: Share of members found at 1 % false alarms, in [0, 1]; lower is better for the owner.
        tpr_at_01: The same at .1 %.
        ks: Kolmogorov-Smirnov distance of the scores, in [0, 1]; lower is better for the owner.
        recall_query: Share of members' questions in which the candidate was withheld; higher is better.
        recall_document: Share of members withheld in at least one question; higher is better.
        nonmember_flags: Share of non-members' questions in which anything was withheld.
        roc: Points (false positive rate, true positive rate).
        histogram: ``edges`` and the counts ``members`` and ``nonmembers`` of the scores.
    """

    members: int
    nonmembers: int
    auc: Rate
    adjusted_accuracy: Rate
    tpr_at_1: Rate | None
    tpr_at_01: Rate | None
    ks: float
    recall_query: Rate | None
    recall_document: Rate | None
    nonmember_flags: Rate | None
    roc: tuple[tuple[float, float], ...] = ()
    histogram: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttackResult:
    """One attack, guard off against on.

    Attributes:
        name: The attack's name.
        paper: Where it is from.
        backend: What it used to write and read: ``deterministic``, or the name of a model.
        off: Against the bare system; None if that was not run.
        on: Against the guarded one.
        auc_drop: AUC off minus on, from paired resamples.
        error: Why there are no figures, if there are none.
    """

    name: str
    paper: str
    backend: str
    off: Figures | None
    on: Figures | None
    auc_drop: Rate | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Utility:
    """What the guard cost harmless askers.

    Attributes:
        source: Where the harmless questions are from; whether they were asked by people or made from the corpus.
        questions: How many.
        flagged: Share in which anything was withheld, in [0, 1]; lower is better. None: the target does not tell.
        answer_changed: Share whose answer was another, in [0, 1]; lower is better. Of a target that does not tell what
            it withheld: share that the bare system answers and this one does not.
    """

    source: str
    questions: int
    flagged: Rate | None
    answer_changed: Rate


@dataclass(frozen=True, slots=True)
class Audit:
    """Two worlds: with the document present and withheld, and without it. The final contexts must be the same.

    Attributes:
        pairs: Questions compared.
        differing: How many gave another context.
        rate: Their share; anything above 0 is a leak.
    """

    pairs: int
    differing: int
    rate: Rate


@dataclass(frozen=True, slots=True)
class Transcript:
    """One exchange, redacted: words that are not the attack's own are replaced by their length."""

    attack: str
    guard: str
    member: bool
    question: str
    reply: str


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was to hold.

    Attributes:
        name: What was to hold, in words.
        status: Whether it did.
        value: What was measured.
        limit: What was allowed.
        why: A sentence: what this means, or why it could not be said.
        attack: The attack it is about, or empty.
        owasp: Ids of the OWASP Top 10 for LLM Applications.
        atlas: Ids of MITRE ATLAS techniques.
    """

    name: str
    status: Status
    value: float | None
    limit: float | None
    why: str
    attack: str = ""
    owasp: tuple[str, ...] = ()
    atlas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Campaign:
    """Everything a report says.

    Attributes:
        id: Of this run.
        at: When it ended, ISO 8601 with offset.
        status: Of the whole: ERROR before FAIL before INCONCLUSIVE before PASS.
        attacks: Their results.
        utility: What the guard cost; None if it was not measured.
        audit: The two-world audit; None if it was not made.
        checks: What was to hold.
        not_tested: What nobody should take this report to say, a sentence each.
        simulated: What stood in for something real, a sentence each; empty if nothing.
        transcripts: A few exchanges.
        evidence: Seed, versions, hashes of configuration and corpus, sizes of the split.
        cost: Questions asked, answered from the cache, model calls, seconds.
        crawls: What crawlers carried away, without the texts.
    """

    id: str
    at: str
    status: Status
    attacks: tuple[AttackResult, ...] = ()
    utility: Utility | None = None
    audit: Audit | None = None
    checks: tuple[Check, ...] = ()
    not_tested: tuple[str, ...] = ()
    simulated: tuple[str, ...] = ()
    transcripts: tuple[Transcript, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    crawls: tuple[Crawl, ...] = ()
    format: int = FORMAT

    def save(self, path: Path) -> None:
        """Writes it as json."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> Campaign:
    """A campaign that was saved.

    Raises:
        DataError: If the file is missing, damaged, or of another format.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format") != FORMAT:
            raise DataError(f"{path} has report format {raw.get('format')!r}, this version reads {FORMAT}")
        campaign = TypeAdapter(Campaign).validate_python(raw)
    except (OSError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        what = (
            f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}" if isinstance(error, ValidationError) else error
        )
        raise DataError(f"{path} is no report of 'casemate redteam run' or 'crawl': {what}") from error
    if wrong := [rate for rate in _rates(campaign) if not rate.low <= rate.high or not all(map(math.isfinite, rate))]:
        raise DataError(f"{path} holds a rate that cannot be: {tuple(wrong[0])}")
    return campaign


def _short(error: Exception) -> str:
    """The first thing that is wrong."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _rates(part: Any) -> Iterator[Rate]:
    """Every rate in a result."""
    if isinstance(part, Rate):
        yield part
    elif is_dataclass(part):
        for entry in fields(part):
            yield from _rates(getattr(part, entry.name))
    elif isinstance(part, Mapping | tuple):
        for item in part.values() if isinstance(part, Mapping) else part:
            yield from _rates(item)
