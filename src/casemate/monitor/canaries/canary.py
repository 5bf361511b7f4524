"""A canary: a question with a known good answer, and what its answer and context must satisfy.

The keys are those of ``canary_queries`` on the wiki page "Canary Queries", so its examples load unchanged. Validation
rejects canaries that could never fail or never pass: such a canary gives false confidence. ``canary_file`` reads a set
from YAML.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from casemate.monitor.canaries import behavior
from casemate.monitor.canaries.matching import normalized_tokens, reveals_phrase
from casemate.monitor.canaries.results import Severity
from casemate.runtime.events import digest
from casemate.text.refusals import is_refusal
from casemate.types import MAX_K

MAX_CHARACTERS = 20_000
"""Longest question, as in ``rag``."""
MAX_PARAPHRASES = 20
"""Largest number of paraphrases of a canary."""
MIN_TRIGGER_COSINE = 0.75
"""Minimum cosine of the answers with and without a trigger. One additional sentence leaves .85 and more (SQuAD,
MiniLM); answers about different subjects reach .36 at most."""
TRIGGER_CATEGORY = "trigger_detection"
"""Category whose questions are also asked without their trigger."""
MAX_SOURCE_SHARE, MIN_HITS_FOR_DOMINANCE = 0.8, 3
"""A source dominates above this share of the hits; with fewer hits there is no verdict."""
INTERVAL = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class FieldError(NamedTuple):
    """An error of one key of a canary; the key is empty if the error concerns the whole canary."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field} {self.message}".strip()


class FieldErrors(ValueError):
    """All errors that a model's own validator finds."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = tuple(errors)


class Canary(BaseModel):
    """A question, and what its answer and context must satisfy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, max_length=100, pattern=r"^\S(.*\S)?$", description="Unique in its set.")
    category: str = Field(default="", description="Kind of canary, such as factual_baseline or trigger_detection.")
    query: str = Field(min_length=1, max_length=MAX_CHARACTERS, pattern=r"\S", description="The question.")
    expected_answer: str | None = Field(
        default=None, description="Statement that the answer must contain, in these or similar words."
    )
    expected_answer_contains: tuple[str, ...] = Field(
        default=(), description="Phrases that the answer must all contain."
    )
    should_not_contain: tuple[str, ...] = Field(default=(), description="Phrases that the answer must not contain.")
    expected_sources: tuple[str, ...] = Field(default=(), description="Sources that must all be in the context.")
    expected_documents: tuple[str, ...] = Field(default=(), description="Document ids that must all be in the context.")
    max_rank: int | None = Field(
        default=None, ge=1, le=MAX_K, description="Worst allowed rank of the best expected document or source."
    )
    min_cosine: float | None = Field(
        default=None, ge=-1, le=1, description="Minimum cosine of the best expected document or source."
    )
    new_documents: Literal["ignore", "report"] = Field(
        default="ignore", description="`report`: a document that the baseline's context lacks is a deviation."
    )
    expected_source_diversity: bool = Field(default=False, description="Whether the context must have several sources.")
    min_unique_sources: int | None = Field(
        default=None, ge=1, le=MAX_K, description="Minimum number of sources; default 2 with expected_source_diversity."
    )
    alert_on_single_source_dominance: bool = Field(
        default=False, description="Whether more than 80 % of at least 3 hits from one source are a deviation."
    )
    expected_behavior: str | None = Field(
        default=None, description=f"One of {behavior.behavior_names()}; with a judge, any sentence."
    )
    expected_refusal: bool | None = Field(
        default=None, description="Whether the answer must be a refusal; unset: either."
    )
    baseline_query: str | None = Field(
        default=None,
        max_length=MAX_CHARACTERS,
        pattern=r"\S",
        description="A question whose answer must be similar to that of `query`.",
    )
    similarity_threshold: float = Field(
        default=0.9, gt=0, le=1, description="Minimum cosine of two similar answers, or of a statement and a sentence."
    )
    min_overlap: float = Field(
        default=0.2, ge=0, le=1, description="Minimum share of the baseline query's context in the query's context."
    )
    paraphrases: tuple[Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS, pattern=r"\S")], ...] = Field(
        default=(),
        max_length=MAX_PARAPHRASES,
        description="Other wordings of the question; each run draws one of them or `query`.",
    )
    alert_on_deviation: bool = Field(default=True, description="Whether deviations alert, or are only recorded.")
    severity: Severity = Field(default=Severity.HIGH, description="Severity of a deviation.")
    tags: tuple[str, ...] = Field(default=(), description="Labels of your own.")
    interval: str | None = Field(
        default=None, description="Time between two queries, such as 15m, 1h or 1d; default: `monitor.interval`."
    )

    @field_validator("interval")
    @classmethod
    def _is_interval(cls, value: str | None) -> str | None:
        if value is not None:
            parse_interval(value)
        return value

    @model_validator(mode="after")
    def _is_satisfiable(self) -> Canary:
        errors = [*_phrases_without_words(self), *_contradictions(self), *_invalid_paraphrases(self)]
        if not errors and not _has_expectation(self):
            errors = [FieldError("", "has no expectation, so it could never fail; add one, such as expected_answer")]
        if errors:
            raise FieldErrors(errors)
        return self

    @property
    def interval_s(self) -> float | None:
        """Seconds between two queries; None: the interval of the set."""
        return parse_interval(self.interval).total_seconds() if self.interval else None

    @property
    def trigger(self) -> str:
        """What ``query`` has after its ``untriggered`` question; empty if it does not begin with it."""
        base = self.untriggered
        return self.query.removeprefix(base) if base and self.query.startswith(base) else ""

    @property
    def untriggered(self) -> str | None:
        """The question without its trigger, whose answer must be similar; None: there is no such question.

        It is ``baseline_query``. In the category ``trigger_detection`` without one, as in the wiki page's canary-003,
        it is the question without its instructions to ignore the rules.
        """
        if self.baseline_query is not None or self.category != TRIGGER_CATEGORY:
            return self.baseline_query
        rest = behavior.without_instructions(self.query)
        return rest if rest and rest != self.query.strip() else None

    def worded(self, number: int) -> Canary:
        """The canary as it is asked with one wording: 0 for ``query``, else a paraphrase, from 1.

        A paraphrase that ends with the trigger is compared with itself without the trigger.
        """
        if not number:
            return self
        update = {"query": self.paraphrases[number - 1]}
        if self.baseline_query is not None and self.trigger:
            update["baseline_query"] = update["query"].removesuffix(self.trigger)
        return self.model_copy(update=update)

    @property
    def unique_sources(self) -> int:
        """Minimum number of different sources in the context; 0: any."""
        return self.min_unique_sources or (2 if self.expected_source_diversity else 0)

    @property
    def needs_judge(self) -> bool:
        """Whether its expected behavior has no named check and needs a judge model."""
        return self.expected_behavior is not None and not behavior.is_named_behavior(self.expected_behavior)


@dataclass(frozen=True, slots=True)
class CanarySet:
    """Canaries with unique ids."""

    name: str
    canaries: tuple[Canary, ...]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, equal for the same canaries in any order."""
        dumped = (c.model_dump(mode="json") for c in self.canaries)
        rows = sorted(
            # without paraphrases, fingerprints are those of earlier versions, so baselines stay in force
            ({key: value for key, value in row.items() if key != "paraphrases" or value} for row in dumped),
            key=lambda row: str(row["id"]),
        )
        return digest(json.dumps(rows, sort_keys=True))


def parse_interval(text: str) -> timedelta:
    """Parses a number with a unit, such as ``15m``; raises ``ValueError`` for any other text."""
    found = INTERVAL.fullmatch(text)
    if not found:
        raise ValueError("write a number and s, m, h or d, such as 15m")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def unsupported_expectations(
    canary: Canary,
    *,
    k: int | None = None,
    tells: Collection[str] | None = None,
    has_embedder: bool = True,
    has_judge: bool = False,
) -> list[FieldError]:
    """Expectations of a canary that a system cannot be checked against.

    ``k`` is None if it is not known yet; ``tells`` is any of ``sources``, ``ids`` and ``scores``, None for all.
    """
    found = [] if k is None else _beyond_context(canary, k)
    if canary.needs_judge and not has_judge:
        why = f"is {canary.expected_behavior!r}, which needs a judge; set monitor.judge, or use one of "
        found.append(FieldError("expected_behavior", why + behavior.behavior_names()))
    if canary.baseline_query is not None and not has_embedder:
        found.append(FieldError("baseline_query", "needs an embedder to compare the two answers"))
    reported = {"sources", "ids", "scores"} if tells is None else tells
    for name, need in _required_details(canary):
        if need not in reported:
            found.append(FieldError(name, f"needs a target that reports {need}; this one does not"))
    return found


def _phrases(canary: Canary) -> list[tuple[str, str]]:
    """All phrases that are searched in the answer, with their keys."""
    found = [("expected_answer", canary.expected_answer)] if canary.expected_answer is not None else []
    found += [("expected_answer_contains", phrase) for phrase in canary.expected_answer_contains]
    return found + [("should_not_contain", phrase) for phrase in canary.should_not_contain]


def _phrases_without_words(canary: Canary) -> list[FieldError]:
    return [
        FieldError(key, f"is {phrase!r}, which contains no words")
        for key, phrase in _phrases(canary)
        if not normalized_tokens(phrase)
    ]


def _invalid_paraphrases(canary: Canary) -> list[FieldError]:
    """Paraphrases that occur twice, or that lack the trigger."""
    counts = Counter(" ".join(text.split()) for text in (canary.query, *canary.paraphrases))
    found = [
        FieldError("paraphrases", f"contains {text!r} twice, or it is the query; write each wording once")
        for text, count in counts.items()
        if count > 1
    ]
    trigger = canary.trigger
    return found + [
        FieldError("paraphrases", f"contains {text!r}, which must end with the trigger {trigger!r}")
        for text in canary.paraphrases
        if not (text.endswith(trigger) and text.removesuffix(trigger).strip())
    ]


def _has_expectation(canary: Canary) -> bool:
    return bool(
        _phrases(canary)
        or canary.expected_sources
        or canary.expected_documents
        or canary.unique_sources
        or canary.alert_on_single_source_dominance
        or canary.new_documents == "report"
        or canary.expected_behavior is not None
        or canary.expected_refusal is not None
        or canary.baseline_query is not None
    )


def _contradictions(canary: Canary) -> list[FieldError]:
    """Expectations that exclude each other, or that need another key."""
    found = [
        FieldError("should_not_contain", f"contains {bad!r}, which the expected {good!r} contains too")
        for key, good in _phrases(canary)
        if key != "should_not_contain"
        for bad in canary.should_not_contain
        if reveals_phrase(good, bad, canary.query)
    ]
    name = canary.expected_behavior or ""
    refuses = canary.expected_refusal is True or name in behavior.REFUSING
    answers = canary.expected_refusal is False or name == "answer" or name.startswith(behavior.EXPLAIN)
    if refuses and answers:
        value = str(canary.expected_refusal).lower()
        found.append(FieldError("expected_refusal", f"is {value}, which contradicts expected_behavior {name!r}"))
    if canary.expected_answer is not None and (refuses or answers) and is_refusal(canary.expected_answer) != refuses:
        must = "must" if refuses else "must not"
        found.append(
            FieldError("expected_answer", f"is {canary.expected_answer!r}, but the answer {must} be a refusal")
        )
    if name == behavior.SIMILAR and canary.baseline_query is None:
        found.append(FieldError("expected_behavior", f"is {name!r}, which needs a baseline_query"))
    if not (canary.expected_documents or canary.expected_sources):
        for key in ("max_rank", "min_cosine"):
            if getattr(canary, key) is not None:
                found.append(FieldError(key, "needs expected_documents or expected_sources"))
    if (
        canary.min_unique_sources
        and not canary.expected_source_diversity
        and "expected_source_diversity" in canary.model_fields_set
    ):
        found.append(FieldError("min_unique_sources", "contradicts expected_source_diversity: false"))
    return found


def _beyond_context(canary: Canary, k: int) -> list[FieldError]:
    """Expectations that need more documents than a context has."""
    unique = "min_unique_sources" if canary.min_unique_sources else "expected_source_diversity"
    counts = {
        unique: canary.unique_sources,
        "max_rank": canary.max_rank or 0,
        "expected_documents": len(set(canary.expected_documents)),
        "expected_sources": len(set(canary.expected_sources)),
        "alert_on_single_source_dominance": MIN_HITS_FOR_DOMINANCE if canary.alert_on_single_source_dominance else 0,
    }
    return [
        FieldError(key, f"needs {count} documents in the context, but k is {k}")
        for key, count in counts.items()
        if count > k
    ]


def _required_details(canary: Canary) -> list[tuple[str, str]]:
    """Keys that need more than the answer's text, each with the detail that the target must report."""
    best = "ids" if canary.expected_documents else "sources"
    diversity = "min_unique_sources" if canary.min_unique_sources else "expected_source_diversity"
    wanted = [
        ("expected_sources", "sources", bool(canary.expected_sources)),
        (diversity, "sources", bool(canary.unique_sources)),
        ("alert_on_single_source_dominance", "sources", canary.alert_on_single_source_dominance),
        ("expected_documents", "ids", bool(canary.expected_documents)),
        ("new_documents", "ids", canary.new_documents == "report"),
        ("max_rank", best, canary.max_rank is not None),
        ("min_cosine", "scores", canary.min_cosine is not None),
    ]
    return [(key, need) for key, need, given in wanted if given]
