"""Reads trace requests of the OpenTelemetry protocol (OTLP 1.x), as protobuf or as JSON.

The fields are those of ``opentelemetry/proto/trace/v1/trace.proto``; JSON is mapped as the OTLP specification says (ids
in hexadecimal, 64-bit integers as strings). Unknown fields are skipped, as both encodings require.

A sender may be hostile. So the protobuf encoding is read here, field by field, within ``max_values`` and ``MAX_DEPTH``:
a general decoder turns 2 bytes into an object of a hundred. A body whose JSON, that in texts included, may have more
values is refused before it is parsed. Time and memory are linear in the length of the decompressed body. The number of
values, which cost more than other bytes, is bounded by the length of the compressed one.

Deviation: a message field that occurs twice is replaced, not merged. No encoder writes that.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from casemate.errors import DataError
from casemate.monitor.traces.span_content import Span, SpanEvent

MAX_SPANS = 10_000
"""Spans of one request."""
MAX_FIELDS = 500_000
"""Fields of one protobuf body, and occurrences of ``{``, ``[`` and ``,`` in one body, those in texts included."""
MAX_FIELDS_SMALL, MAX_FIELDS_PER_BYTE = 20_000, 16
"""The same for a small compressed body: a number, and more for each compressed byte. The random ids of spans do not
compress, so a span takes at least 20 bytes, which allow 320 fields."""
MAX_DEPTH = 16
"""Depth of nested values; deeper ones become None in JSON, and are an error in protobuf."""
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
MAX_AHEAD = timedelta(days=1)
"""A start before ``EARLIEST``, or further ahead of this machine's clock than this, is not usable."""
_TRACE_ID, _SPAN_ID = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")

_HEX, _TEXT, _VARINT, _SIGNED, _FIXED, _DOUBLE = "hex", "text", "varint", "signed", "fixed64", "double"
_MESSAGES: Mapping[str, Mapping[int, tuple[str, str, bool]]] = {
    "request": {1: ("resourceSpans", "resource spans", True)},
    "resource spans": {2: ("scopeSpans", "scope spans", True)},
    "scope spans": {2: ("spans", "span", True)},
    "span": {
        1: ("traceId", _HEX, False),
        2: ("spanId", _HEX, False),
        4: ("parentSpanId", _HEX, False),
        7: ("startTimeUnixNano", _FIXED, False),
        9: ("attributes", "attribute", True),
        11: ("events", "event", True),
    },
    "event": {2: ("name", _TEXT, False), 3: ("attributes", "attribute", True)},
    "attribute": {1: ("key", _TEXT, False), 2: ("value", "value", False)},
    "value": {
        1: ("stringValue", _TEXT, False),
        2: ("boolValue", _VARINT, False),
        3: ("intValue", _SIGNED, False),
        4: ("doubleValue", _DOUBLE, False),
        5: ("arrayValue", "array", False),
        6: ("kvlistValue", "mapping", False),
    },
    "array": {1: ("values", "value", True)},
    "mapping": {1: ("values", "attribute", True)},
}
"""Message: field number to JSON name, type and whether it repeats."""
_WIRE = {_VARINT: 0, _SIGNED: 0, _FIXED: 1, _DOUBLE: 1}
"""Wire type of each type that is not length-delimited."""


class TraceRequest(NamedTuple):
    """A decoded request; ``rejected`` counts spans without a valid trace id and span id."""

    spans: tuple[Span, ...]
    rejected: int


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Undoes the content encoding of a body: ``gzip``, ``deflate``, or ``identity`` or empty for none.

    Raises:
        DataError: If the encoding is unknown, the body is damaged, or the result is larger.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise DataError(f"the content encoding {encoding[:40]!r} is not supported; allowed: gzip, deflate, identity")
    reader = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        found = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise DataError(f"the body is not valid {encoding}; send it again, or uncompressed") from error
    if len(found) > max_bytes:
        raise DataError(f"the body is larger than {max_bytes:,} bytes once decompressed; send smaller batches")
    if not reader.eof:
        raise DataError(f"the {encoding} body is cut off; send it again")
    return found


def max_values(sent: int) -> int:
    """Largest number of values in a body of which ``sent`` bytes were sent, compressed or not."""
    return min(MAX_FIELDS, MAX_FIELDS_SMALL + MAX_FIELDS_PER_BYTE * sent)


def parse_protobuf(body: bytes, now: datetime, sent: int | None = None) -> TraceRequest:
    """Decodes an ``ExportTraceServiceRequest``.

    Args:
        body: The decompressed body.
        now: Judges whether times are usable.
        sent: Length of the body before decompression, in bytes. None: it was not compressed.

    Raises:
        DataError: If it is damaged, or exceeds a limit.
    """
    most = _require_few_values(body, sent)
    return spans_of(_Reader(body, most).read("request", 0, len(body), 0), now)


def parse_json(body: bytes, now: datetime, sent: int | None = None) -> TraceRequest:
    """Decodes a body of type ``application/json``. See ``parse_protobuf``."""
    _require_few_values(body, sent)
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError("the body is not valid JSON; send an OTLP trace request") from error
    return spans_of(request, now)


def _require_few_values(body: bytes, sent: int | None) -> int:
    """Returns the largest number of values; ``DataError``: the body's JSON may have more.

    Texts of attributes count, because JSON in them is parsed, too.
    """
    most = max_values(len(body) if sent is None else sent)
    if sum(map(body.count, (b"{", b"[", b","))) > most:
        raise DataError(f"the body has more than {most:,} JSON values; send smaller batches")
    return most


def spans_of(request: Any, now: datetime) -> TraceRequest:
    """Reads the spans of a request in the JSON mapping; for ``now`` see ``parse_protobuf``.

    Raises:
        DataError: If it is not a trace request, or has more than ``MAX_SPANS`` spans.
    """
    if not isinstance(request, Mapping):
        raise DataError("an OTLP trace request is a JSON object with 'resourceSpans'")
    if unknown := {"resourceLogs", "resourceMetrics"} & request.keys():
        raise DataError(f"the request has {unknown.pop()}; only traces (resourceSpans) are accepted here")
    found: list[Span] = []
    seen = 0
    for resource in _mappings(request.get("resourceSpans")):
        # versions before 0.15 wrote instrumentationLibrarySpans
        for scope in _mappings(resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans")):
            spans = scope.get("spans")
            seen += len(spans) if isinstance(spans, Sequence) else 0
            if seen > MAX_SPANS:
                raise DataError(f"the request has more than {MAX_SPANS:,} spans; send smaller batches")
            found += [span for raw in _mappings(spans) if (span := _span(raw, now))]
    return TraceRequest(tuple(found), seen - len(found))


def usable_time(at: datetime | None, now: datetime) -> datetime | None:
    """The time, unless it is missing or cannot be that of a recorded span."""
    return at if at is not None and EARLIEST <= at <= now + MAX_AHEAD else None


def _span(raw: Mapping[str, Any], now: datetime) -> Span | None:
    """A span; None without valid ids."""
    trace, name, parent = (str(raw.get(key) or "").lower() for key in ("traceId", "spanId", "parentSpanId"))
    if not (_TRACE_ID.fullmatch(trace) and _SPAN_ID.fullmatch(name) and trace.strip("0") and name.strip("0")):
        return None
    events = tuple(
        SpanEvent(str(event.get("name") or ""), _attributes(event.get("attributes"), 0))
        for event in _mappings(raw.get("events"))
    )
    start = usable_time(_time(raw.get("startTimeUnixNano")), now)
    return Span(trace, name, parent.strip("0") and parent, start, _attributes(raw.get("attributes"), 0), events)


def _time(nanoseconds: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(nanoseconds) / 1e9, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _attributes(raw: Any, depth: int) -> dict[str, Any]:
    return {str(one.get("key") or ""): _value(one.get("value"), depth) for one in _mappings(raw)}


def _value(raw: Any, depth: int) -> Any:
    """A value of an attribute; None if it has an unknown type or is nested too deep."""
    if not isinstance(raw, Mapping) or depth > MAX_DEPTH:
        return None
    for key in ("stringValue", "boolValue", "doubleValue"):
        if key in raw:
            return raw[key]
    if "intValue" in raw:
        text = str(raw["intValue"])
        return int(text) if re.fullmatch(r"-?\d{1,20}", text, re.ASCII) else None
    if isinstance(listed := raw.get("arrayValue"), Mapping):
        return [_value(one, depth + 1) for one in _mappings(listed.get("values"))]
    if isinstance(listed := raw.get("kvlistValue"), Mapping):
        return _attributes(listed.get("values"), depth + 1)
    return None


def _mappings(raw: Any) -> list[Mapping[str, Any]]:
    return [one for one in raw if isinstance(one, Mapping)] if isinstance(raw, list | tuple) else []


class _Reader:
    """Reads protobuf's wire format into the JSON mapping. Only the fields in ``_MESSAGES`` are read."""

    def __init__(self, body: bytes, most: int) -> None:
        self._body, self._most, self._left = body, most, most

    def read(self, message: str, at: int, end: int, depth: int) -> dict[str, Any]:
        """Reads the message between two positions."""
        if depth > 2 * MAX_DEPTH:  # a value takes two levels: a message and its list
            raise DataError(f"the protobuf body is nested more than {MAX_DEPTH} values deep")
        fields, found = _MESSAGES[message], dict[str, Any]()
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise DataError(f"the protobuf body has more than {self._most:,} fields; send smaller batches")
            tag, at = self._varint(at, end)
            number, wire = tag >> 3, tag & 7
            raw, start, at = self._field(wire, at, end)
            known = fields.get(number)
            if known is None or _WIRE.get(known[1], 2) != wire:
                continue
            name, kind, repeats = known
            value = self.read(kind, start, at, depth + 1) if kind in _MESSAGES else _scalar(kind, raw)
            if repeats:
                found.setdefault(name, []).append(value)
            else:
                found[name] = value
        return found

    def _field(self, wire: int, at: int, end: int) -> tuple[Any, int, int]:
        """Content of a field, where it starts, and where the next field starts."""
        if wire == 0:
            value, after = self._varint(at, end)
            return value, at, after
        if wire == 2:
            length, at = self._varint(at, end)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise DataError("the body is not valid protobuf: unknown wire type")
        if length > end - at:
            raise DataError("the protobuf body is cut off")
        return memoryview(self._body)[at : at + length], at, at + length

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self._body[at]
            value, at = value | (byte & 0x7F) << shift, at + 1
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at
            shift += 7
        raise DataError("the protobuf body is cut off or not valid")


def _scalar(kind: str, raw: Any) -> Any:
    if kind == _HEX:
        return bytes(raw).hex()
    if kind == _TEXT:
        return bytes(raw).decode("utf-8", "replace")
    if kind == _FIXED:
        return struct.unpack("<Q", raw)[0]
    if kind == _DOUBLE:
        return struct.unpack("<d", raw)[0]
    if kind == _SIGNED:
        return raw - (1 << 64) if raw >> 63 else raw
    return bool(raw)
