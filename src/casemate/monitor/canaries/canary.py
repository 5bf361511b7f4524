"""Canaries: questions whose good answer is known, and what of it must hold.

The keys are those of the page (``canary_queries``), so its examples can be read as they are. A set is read from YAML,
and every mistake in it is reported at once, each with its line: a canary that could never fail, or never pass, is worse
than none, because somebody trusts in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from casemate.errors import DataError
from casemate.monitor.canaries import behaviour, lines
from casemate.monitor.canaries.lines import Fault, Faults
from casemate.monitor.canaries.matching import declines, leaks, tokens
from casemate.monitor.canaries.results import Severity
from casemate.types import MAX_K

MAX_CHARACTERS = 20_000
"""Of a question, as ``rag`` allows."""
DOMINANCE, DOMINATED = 0.8, 3
"""Share of the hits above which their source dominates, and the fewest hits of which that can be said."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_EVERY = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class Canary(BaseModel):
    """A question, and what its answer and its context must be like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, max_length=100, pattern=r"^\S(.*\S)?$", description="Unique in its set.")
    category: str = Field(default="", description="Kind of canary, such as factual_baseline or trigger_detection.")
    query: str = Field(min_length=1, max_length=MAX_CHARACTERS, pattern=r"\S", description="The question.")
    expected_answer: str | None = Field(default=None, description="The answer must say this, in these or like words.")
    expected_answer_contains: tuple[str, ...] = Field(default=(), description="The answer must say each of these.")
    should_not_contain: tuple[str, ...] = Field(default=(), description="The answer must say none of these.")
    expected_sources: tuple[str, ...] = Field(default=(), description="Sources that must all be in the context.")
    expected_documents: tuple[str, ...] = Field(default=(), description="Ids that must all be in the context.")
    max_rank: int | None = Field(
        default=None, ge=1, le=MAX_K, description="The best expected document or source must stand here or higher."
    )
    min_cosine: float | None = Field(
        default=None, ge=-1, le=1, description="Similarity that the best expected document or source must have."
    )
    new_documents: Literal["ignore", "report"] = Field(
        default="ignore", description="`report`: an id in the context that the baseline does not know is a deviation."
    )
    expected_source_diversity: bool = Field(default=False, description="The context must be of several sources.")
    min_unique_sources: int | None = Field(
        default=None, ge=1, le=MAX_K, description="How many; 2 where only diversity is expected."
    )
    alert_on_single_source_dominance: bool = Field(
        default=False, description="More than 80 % of at least 3 hits from one source are a deviation."
    )
    expected_behavior: str | None = Field(
        default=None, description=f"One of {behaviour.known()}; with a judge, any sentence."
    )
    expected_refusal: bool | None = Field(default=None, description="Whether the answer must decline; unset: either.")
    baseline_query: str | None = Field(
        default=None, max_length=MAX_CHARACTERS, pattern=r"\S", description="A question that must be answered alike."
    )
    similarity_threshold: float = Field(
        default=0.9, gt=0, le=1, description="Cosine from which on two answers are alike, and a sentence has a meaning."
    )
    min_overlap: float = Field(
        default=0.2, ge=0, le=1, description="Share of the baseline question's context that must be in the query's."
    )
    alert_on_deviation: bool = Field(default=True, description="Whether a deviation is alerted, or only noted.")
    severity: Severity = Field(default=Severity.HIGH, description="How grave a deviation is.")
    tags: tuple[str, ...] = Field(default=(), description="For choosing canaries.")
    every: str | None = Field(
        default=None, description="How often it is asked, such as 15m, 1h or 1d; unset: as the monitor runs."
    )

    @field_validator("every")
    @classmethod
    def _is_interval(cls, value: str | None) -> str | None:
        if value is not None:
            interval(value)
        return value

    @model_validator(mode="after")
    def _can_be_met(self) -> Canary:
        faults = [*_wordless(self), *_contradictions(self)]
        if not faults and not _expects(self):
            faults = [Fault("", "expects nothing, so it could never fail; say what its answer must be like")]
        if faults:
            raise Faults(faults)
        return self

    @property
    def interval(self) -> timedelta | None:
        """How often it is asked; None: as the monitor runs."""
        return interval(self.every) if self.every else None

    @property
    def unique_sources(self) -> int:
        """How many different sources the context must have; 0: any."""
        return self.min_unique_sources or (2 if self.expected_source_diversity else 0)

    @property
    def judged(self) -> bool:
        """Whether its behaviour is for a judge to see."""
        return self.expected_behavior is not None and not behaviour.named(self.expected_behavior)


@dataclass(frozen=True, slots=True)
class CanarySet:
    """Canaries that belong together, with ids of their own.

    Attributes:
        name: Of the set.
        canaries: In the order of the file.
    """

    name: str
    canaries: tuple[Canary, ...]

    @property
    def fingerprint(self) -> str:
        """Equal for the same canaries in whatever order: 16 hexadecimal digits."""
        rows = sorted((c.model_dump(mode="json") for c in self.canaries), key=lambda row: str(row["id"]))
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def interval(text: str) -> timedelta:
    """A number and its unit, such as ``15m``.

    Raises:
        ValueError: If it is none.
    """
    found = _EVERY.fullmatch(text)
    if not found:
        raise ValueError("write a number and s, m, h or d, such as 15m")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def misfits(
    canary: Canary,
    *,
    k: int | None = None,
    tells: Collection[str] | None = None,
    embeds: bool = True,
    judge: bool = False,
) -> list[Fault]:
    """What a canary expects that a setting cannot give.

    Args:
        canary: The canary.
        k: Documents read for an answer; None: not known yet.
        tells: What the target tells beside its answer: some of ``sources``, ``ids``, ``scores``; None: all.
        embeds: Whether there is an embedder.
        judge: Whether there is a judge.
    """
    found = [] if k is None else _beyond(canary, k)
    if canary.judged and not judge:
        why = f"is {canary.expected_behavior!r}, which only a judge could check; names: {behaviour.known()}"
        found.append(Fault("expected_behavior", why))
    if canary.baseline_query is not None and not embeds:
        found.append(Fault("baseline_query", "needs an embedder, to compare two answers"))
    told = {"sources", "ids", "scores"} if tells is None else tells
    for name, need in _needs(canary):
        if need not in told:
            found.append(Fault(name, f"needs a target that tells its {need}, and this one does not"))
    return found


def read(path: Path, *, k: int | None = None, judge: bool = False) -> CanarySet:
    """The canaries of a YAML file: a list, or a mapping with ``canaries`` and, if wanted, ``name``.

    Nothing is expanded in it: ``${NAME}`` is these seven characters.

    Args:
        path: The file.
        k: Documents read for an answer, if known: expectations beyond it are refused.
        judge: Whether there is a language model for behaviours without a name.

    Raises:
        DataError: If it cannot be read, or anything is wrong in it; the message has a line for each mistake.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        missing = "; 'casemate canary suggest' drafts some, and monitor.canaries names another file"
        hint = missing if isinstance(error, FileNotFoundError) else ""
        raise DataError(f"cannot read the canaries {path}: {why}{hint}") from error
    return parse(text, str(path), k=k, judge=judge)


def parse(text: str, name: str = "canaries.yaml", *, k: int | None = None, judge: bool = False) -> CanarySet:
    """The canaries in a text, as ``read``.

    >>> parse("- {id: a, query: Why, expected_answr: '7'}")
    Traceback (most recent call last):
        ...
    casemate.errors.DataError: canaries.yaml:1: canary 'a': expected_answr is no known key; nearest: expected_answer
    """
    root = lines.compose(text, name)
    title, rows = _rows(root, name)
    canaries: list[Canary] = []
    wrong: list[tuple[int, str]] = []
    for number, node in enumerate(rows, 1):
        found, faults = _canary(node, number, k, judge)
        wrong += faults
        canaries += [found] if found else []
    wrong += _twice(rows)
    if wrong:
        raise DataError("\n".join(f"{name}:{at}: {what}" for at, what in sorted(wrong)))
    return CanarySet(title or Path(name).stem, tuple(canaries))


def schema() -> dict[str, Any]:
    """The JSON schema of a file (draft 2020-12), for editors."""
    own = Canary.model_json_schema()
    definitions = own.pop("$defs", {}) | {"Canary": own}
    row = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Canary"}}
    mapping = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "canaries": row},
        "required": ["canaries"],
        "additionalProperties": False,
    }
    return {"$schema": DIALECT, "title": "Canaries", "anyOf": [row, mapping], "$defs": definitions}


def _phrases(canary: Canary) -> list[tuple[str, str]]:
    """All phrases that are looked for in the answer, with their keys."""
    found = [("expected_answer", canary.expected_answer)] if canary.expected_answer is not None else []
    found += [("expected_answer_contains", phrase) for phrase in canary.expected_answer_contains]
    return found + [("should_not_contain", phrase) for phrase in canary.should_not_contain]


def _wordless(canary: Canary) -> list[Fault]:
    return [
        Fault(key, f"is {phrase!r}, which has no words to look for")
        for key, phrase in _phrases(canary)
        if not tokens(phrase)
    ]


def _expects(canary: Canary) -> bool:
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


def _contradictions(canary: Canary) -> list[Fault]:
    """Expectations of which one rules out another, or says nothing without another."""
    found = [
        Fault("should_not_contain", f"holds {bad!r}, which the expected {good!r} says")
        for key, good in _phrases(canary)
        if key != "should_not_contain"
        for bad in canary.should_not_contain
        if leaks(good, bad, canary.query)
    ]
    name = canary.expected_behavior or ""
    refuses = canary.expected_refusal is True or name in behaviour.REFUSING
    answers = canary.expected_refusal is False or name == "answer" or name.startswith(behaviour.EXPLAIN)
    if refuses and answers:
        found.append(Fault("expected_refusal", f"is {str(canary.expected_refusal).lower()}, against {name!r}"))
    if canary.expected_answer is not None and (refuses or answers) and declines(canary.expected_answer) != refuses:
        word = "declines" if refuses else "does not decline"
        found.append(Fault("expected_answer", f"is {canary.expected_answer!r}, against an answer that {word}"))
    if name == behaviour.SIMILAR and canary.baseline_query is None:
        found.append(Fault("expected_behavior", f"is {name!r}, which needs a baseline_query to compare with"))
    if not (canary.expected_documents or canary.expected_sources):
        for key in ("max_rank", "min_cosine"):
            if getattr(canary, key) is not None:
                found.append(Fault(key, "needs expected_documents or expected_sources: whose is it?"))
    if (
        canary.min_unique_sources
        and not canary.expected_source_diversity
        and "expected_source_diversity" in canary.model_fields_set
    ):
        found.append(Fault("min_unique_sources", "is given, though expected_source_diversity is false"))
    return found


def _beyond(canary: Canary, k: int) -> list[Fault]:
    """What cannot be in so many documents."""
    unique = "min_unique_sources" if canary.min_unique_sources else "expected_source_diversity"
    counts = {
        unique: canary.unique_sources,
        "max_rank": canary.max_rank or 0,
        "expected_documents": len(set(canary.expected_documents)),
        "expected_sources": len(set(canary.expected_sources)),
        "alert_on_single_source_dominance": DOMINATED if canary.alert_on_single_source_dominance else 0,
    }
    return [
        Fault(key, f"needs {count} documents in the context, and k is {k}")
        for key, count in counts.items()
        if count > k
    ]


def _needs(canary: Canary) -> list[tuple[str, str]]:
    """Keys that look at more than the answer, each with what the target must tell for it."""
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


def _rows(root: yaml.Node | None, name: str) -> tuple[str, list[yaml.Node]]:
    """Name and canaries of a file, not yet looked at."""
    title = ""
    if isinstance(root, yaml.MappingNode):
        values = lines.plain(root)
        unknown = [key for key in values if key not in {"name", "canaries"}]
        if unknown or "canaries" not in values:
            what = f"{unknown[0]} is no known key" if unknown else "the key canaries is missing"
            raise DataError(f"{name}:{lines.line(root, unknown[:1])}: {what}; known: name, canaries")
        title = str(values.get("name") or "")
        root = next(value for key, value in root.value if key.value == "canaries")
    if isinstance(root, yaml.SequenceNode) and root.value:
        return title, root.value
    at = f"{name}:{lines.line(root)}" if root else name
    raise DataError(f"{at}: holds no canaries; write a list of them, at least one")


def _canary(node: yaml.Node, number: int, k: int | None, judge: bool) -> tuple[Canary | None, list[tuple[int, str]]]:
    """One canary of a file; and what is wrong with it, by line."""
    found, wrong = lines.validated(Canary, node)
    if found is not None:
        faults = misfits(found, k=k, judge=judge)
        wrong += [(lines.line(node, [fault.field]), str(fault)) for fault in faults]
    values = lines.plain(node)
    who = values.get("id", number) if isinstance(values, dict) else number
    return found, [(at, f"canary {who!r}: {what}") for at, what in wrong]


def _twice(rows: Sequence[yaml.Node]) -> list[tuple[int, str]]:
    """Ids that several canaries have."""
    first: dict[str, int] = {}
    wrong = []
    for node in rows:
        values = lines.plain(node)
        if isinstance(values, dict) and isinstance(values.get("id"), str):
            name, at = values["id"], lines.line(node, ["id"])
            if name in first:
                wrong.append((at, f"canary {name!r}: its id is that of line {first[name]}, too"))
            first.setdefault(name, at)
    return wrong
