"""Reads files of traces: OTLP as JSON, spans with OpenInference's attributes, and exports of Langfuse.

A file is one JSON value, JSON lines, or a CSV table; with ``.gz`` compressed. The form of each record decides its
format, so one file may contain several:

- ``resourceSpans``: an OTLP request, as the OpenTelemetry collector's file exporter writes them;
- ``context.trace_id``: a span of Phoenix (REST, data frame) or of OpenTelemetry's console exporter;
- ``traceId`` or ``trace_id`` with ``type``: an observation of Langfuse (API, blob storage, user interface);
- ``id`` with ``timestamp`` and ``input``, ``output`` or ``observations``: a trace of Langfuse.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from casemate.errors import DataError
from casemate.monitor.traces import otlp
from casemate.monitor.traces.otlp import usable_time
from casemate.monitor.traces.span_content import Span, SpanEvent

MAX_BYTES = 256_000_000
"""Largest uncompressed file."""
MAX_CELL = 10_000_000
"""Characters of a cell of a CSV table."""
MAX_FLATTENED = 10_000
"""Attributes of one span; further ones are left out."""
FORMATS = "OTLP JSON (resourceSpans), OpenInference spans (context.trace_id), Langfuse traces and observations"


@dataclass(frozen=True, slots=True)
class ExportedSpans:
    """The spans of a file, in its order, with counts of records by format, and of skipped ones by reason."""

    spans: tuple[Span, ...]
    formats: Mapping[str, int]
    skipped: Mapping[str, int]


def read_export(path: Path, now: datetime) -> ExportedSpans:
    """Reads a file; ``now`` judges whether times are usable.

    Raises:
        DataError: If it cannot be read, is too large, or has no record of a known format.
    """
    spans: list[Span] = []
    formats, skipped = Counter[str](), Counter[str]()
    keys: list[str] = []
    for record in _records(path, skipped):
        try:
            name, found, rejected = _spans_of(record, now)
        except DataError as error:
            skipped[str(error)] += 1
            continue
        if not name:
            keys = keys or sorted(map(str, record))
            skipped["unknown format"] += 1
            continue
        formats[name] += 1
        if rejected:
            skipped["span without valid ids"] += rejected
        spans += found
    if not formats:
        seen = f"; the first record has the keys {', '.join(key[:40] for key in keys[:12])}" if keys else ""
        why = next((reason for reason in skipped if reason != "unknown format"), "no record has a known format")
        raise DataError(f"{path}: {why}{seen}; allowed: {FORMATS}, as JSON, JSON lines or CSV")
    return ExportedSpans(tuple(spans), formats, skipped)


def _records(path: Path, skipped: Counter[str]) -> Iterator[Mapping[str, Any]]:
    """The records of a file. Lists, and objects with a list under ``data``, are taken apart."""
    text = _read(path)
    if path.name.removesuffix(".gz").endswith(".csv"):
        csv.field_size_limit(MAX_CELL)
        try:
            yield from ({k: _cell(v) for k, v in row.items() if k} for row in csv.DictReader(io.StringIO(text)))
        except csv.Error as error:
            raise DataError(f"{path} is not a valid CSV table: {error}") from error
        return
    for value in _json_values(text, path, skipped):
        inner = value.get("data") if isinstance(value, Mapping) and "resourceSpans" not in value else None
        for one in inner if isinstance(inner, list) else value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                yield one
            else:
                skipped["record that is not a JSON object"] += 1


def _read(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"cannot read the traces {path}: {why}") from error
    if len(content) > MAX_BYTES:
        raise DataError(f"{path} has more than {MAX_BYTES:,} bytes uncompressed; export shorter periods")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}") from error


def _json_values(text: str, path: Path, skipped: Counter[str]) -> Iterator[Any]:
    """The whole file as one JSON value, or each line as one. Damaged lines are skipped and counted."""
    try:
        yield json.loads(text)
        return
    except RecursionError as error:
        raise DataError(f"{path} is nested too deep") from error
    except ValueError:
        pass
    for line in io.StringIO(text):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                skipped["line that is not JSON"] += 1


def _cell(value: Any) -> Any:
    """A cell of a table: JSON where it is JSON. Langfuse writes texts, objects and null so."""
    try:
        return json.loads(value) if isinstance(value, str) and value[:1] in ('"', "{", "[", "n") else value
    except (ValueError, RecursionError):
        return value


def _spans_of(record: Mapping[str, Any], now: datetime) -> tuple[str, list[Span], int]:
    """Format of a record, its spans, and the number of spans without valid ids; an empty format is unknown."""
    if "resourceSpans" in record:
        request = otlp.spans_of(record, now)
        return "otlp", list(request.spans), request.rejected
    context = record.get("context")
    if isinstance(context, Mapping) or "context.trace_id" in record:
        return "openinference", *_valid([_openinference_span(record, now)])
    if _first(record, "traceId", "trace_id") and record.get("type"):
        return "langfuse", *_valid([_observation(record, "", now)])
    if record.get("id") and "timestamp" in record and {"input", "output", "observations"} & record.keys():
        name = str(record["id"])
        observations = record.get("observations")
        inner = [one for one in observations if isinstance(one, Mapping)] if isinstance(observations, list) else []
        return "langfuse", *_valid([_langfuse_trace(record, now), *(_observation(one, name, now) for one in inner)])
    return "", [], 0


def _valid(spans: Iterable[Span]) -> tuple[list[Span], int]:
    made = list(spans)
    kept = [span for span in made if span.trace and span.id]
    return kept, len(made) - len(kept)


def _openinference_span(record: Mapping[str, Any], now: datetime) -> Span:
    """A span with nested or flat attributes, or a row of a data frame with columns such as ``attributes.llm``."""
    context = record.get("context")
    given: Mapping[str, Any] = context if isinstance(context, Mapping) else {}
    trace, name = (_hex(given.get(key, record.get(f"context.{key}"))) for key in ("trace_id", "span_id"))
    attributes: dict[str, Any] = {}
    _flatten(record.get("attributes"), "", attributes, 0)
    for key, value in record.items():
        if key.startswith("attributes."):
            _flatten(value, key.removeprefix("attributes."), attributes, 0)
    kind = record.get("span_kind")
    if isinstance(kind, str) and kind:
        attributes.setdefault("openinference.span.kind", kind)
    raw = record.get("events")
    events = [one for one in raw if isinstance(one, Mapping)] if isinstance(raw, list) else []
    return Span(
        trace,
        name,
        _hex(record.get("parent_id")),
        usable_time(_time(record.get("start_time")), now),
        attributes,
        tuple(SpanEvent(str(e.get("name") or ""), _flat(e.get("attributes"))) for e in events),
    )


def _langfuse_trace(record: Mapping[str, Any], now: datetime) -> Span:
    name = str(record["id"])
    attributes = _langfuse_attributes(record, "TRACE")
    return Span(name, f"trace {name}", "", usable_time(_time(record["timestamp"]), now), attributes)


def _observation(record: Mapping[str, Any], trace: str, now: datetime) -> Span:
    return Span(
        str(_first(record, "traceId", "trace_id") or trace),
        str(record.get("id") or ""),
        str(_first(record, "parentObservationId", "parent_observation_id") or ""),
        usable_time(_time(_first(record, "startTime", "start_time")), now),
        _langfuse_attributes(record, str(record.get("type"))),
    )


def _langfuse_attributes(record: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "openinference.span.kind": kind,
        "input.value": record.get("input"),
        "output.value": record.get("output"),
    }


def _first(record: Mapping[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name)), None)


def _hex(raw: Any) -> str:
    return str(raw).lower().removeprefix("0x") if isinstance(raw, str) else ""


def _time(raw: Any) -> datetime | None:
    """An ISO 8601 time, or milliseconds since 1970; without a zone it is UTC."""
    try:
        at = (
            datetime.fromtimestamp(raw / 1e3, UTC)
            if isinstance(raw, int | float)
            else datetime.fromisoformat(str(raw).strip())
        )
    except (ValueError, OverflowError, OSError):
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _flat(raw: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _flatten(raw, "", found, 0)
    return found


def _flatten(raw: Any, prefix: str, found: dict[str, Any], depth: int) -> None:
    """Writes nested mappings, and lists of mappings, under dotted names."""
    if len(found) >= MAX_FLATTENED or depth > otlp.MAX_DEPTH:
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(raw, list) and prefix.startswith("gen_ai.") or prefix.endswith(".metadata"):
        found[prefix] = raw  # a value, not a flattened list
    elif isinstance(raw, Mapping):
        inner = raw.items()
    elif isinstance(raw, list) and raw and all(isinstance(one, Mapping) for one in raw):
        inner = enumerate(raw)
    elif prefix:
        found[prefix] = raw
    for key, value in inner:
        _flatten(value, f"{prefix}.{key}" if prefix else str(key), found, depth + 1)
