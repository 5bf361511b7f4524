"""OTLP requests: equality with the real SDK's encoder, and malicious request bodies."""

from __future__ import annotations

import gzip
import json
import random
import time
import tracemalloc
import zlib
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.errors import DataError
from casemate.monitor.traces import otlp
from casemate.monitor.traces.otlp import decompress, parse_json, parse_protobuf

pytest.importorskip("opentelemetry.proto", reason="the extra casemate[otel] is not installed")
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def otlp_json(request: ExportTraceServiceRequest) -> dict:
    """The request in OTLP's JSON mapping: that of protobuf, except for hexadecimal ids."""
    found = MessageToDict(request)
    for resource, raw in zip(found.get("resourceSpans", ()), request.resource_spans, strict=True):
        for scope, raw_scope in zip(resource.get("scopeSpans", ()), raw.scope_spans, strict=True):
            for span, raw_span in zip(scope.get("spans", ()), raw_scope.spans, strict=True):
                span["traceId"], span["spanId"] = raw_span.trace_id.hex(), raw_span.span_id.hex()
                span["parentSpanId"] = raw_span.parent_span_id.hex()
    return found


def test_spans_of_the_real_sdk_are_read_from_both_encodings():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("app")
    with tracer.start_as_current_span("request", attributes={"input.value": "Wie alt? é", "n": -7, "x": 0.5}):
        with tracer.start_as_current_span("search", attributes={"hit": True, "ids": ["a", "b"]}) as inner:
            inner.add_event("verdict", {"casemate.flagged": True})
    spans = exporter.get_finished_spans()
    request = encode_spans(spans)
    for found in (
        parse_protobuf(request.SerializeToString(), datetime.now(UTC)),
        parse_json(json.dumps(otlp_json(request)).encode(), datetime.now(UTC)),
    ):
        assert found.rejected == 0
        for read, made in zip(found.spans, spans, strict=True):
            assert (read.trace, read.id) == (f"{made.context.trace_id:032x}", f"{made.context.span_id:016x}")
            assert read.parent == (f"{made.parent.span_id:016x}" if made.parent else "")
            assert read.attributes == {k: list(v) if isinstance(v, tuple) else v for k, v in made.attributes.items()}
            assert [(e.name, e.attributes) for e in read.events] == [(e.name, dict(e.attributes)) for e in made.events]
            assert abs(read.start.timestamp() - made.start_time / 1e9) < 1e-3


scalars = st.one_of(
    st.text().map(lambda v: {"stringValue": v}),
    st.booleans().map(lambda v: {"boolValue": v}),
    st.integers(-(2**63), 2**63 - 1).map(lambda v: {"intValue": str(v)}),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda v: {"doubleValue": v}),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: {"arrayValue": {"values": v}})
        | st.lists(st.tuples(st.text(max_size=5), inner), max_size=3).map(
            lambda v: {"kvlistValue": {"values": [{"key": k, "value": one} for k, one in v]}}
        )
    ),
    max_leaves=6,
)
attributes = st.lists(st.tuples(st.text(min_size=1, max_size=8), values), max_size=4)


@settings(max_examples=40)
@given(st.lists(st.tuples(attributes, st.integers(0, 2**64 - 1), st.booleans()), max_size=4))
def test_both_encodings_of_a_request_give_the_same_spans(rows):
    """Oracle: the official library encodes each request as protobuf and as JSON."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number, (given_attributes, start, valid) in enumerate(rows, 1):
        span = scope.spans.add(trace_id=bytes([number]) * (16 if valid else 15), span_id=bytes([number]) * 8)
        span.start_time_unix_nano = start
        span.name, span.status.message, span.dropped_links_count = "unread", "fields", 3
        for key, value in given_attributes:
            _set_message_field(span.attributes.add(key=key).value, value)
            _set_message_field(span.events.add(name=key).attributes.add(key="k").value, value)
    binary = parse_protobuf(request.SerializeToString(), NOW)
    assert binary == parse_json(json.dumps(otlp_json(request)).encode(), NOW)
    assert (len(binary.spans), binary.rejected) == (sum(r[2] for r in rows), sum(not r[2] for r in rows))


def _set_message_field(message, value):
    """Writes a value in the JSON mapping into a protobuf message."""
    (kind, content), *_ = value.items()
    if kind == "arrayValue":
        message.array_value.SetInParent()
        for one in content["values"]:
            _set_message_field(message.array_value.values.add(), one)
    elif kind == "kvlistValue":
        message.kvlist_value.SetInParent()
        for one in content["values"]:
            _set_message_field(message.kvlist_value.values.add(key=one["key"]).value, one["value"])
    else:
        name = {"stringValue": "string_value", "boolValue": "bool_value", "intValue": "int_value"}
        setattr(message, name.get(kind, "double_value"), int(content) if kind == "intValue" else content)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_read_or_rejected_with_a_reason(body):
    for parse in (parse_protobuf, parse_json):
        try:
            parse(body, NOW)
        except DataError as error:
            assert len(str(error)) < 200


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_truncated_request_is_rejected(cut):
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(trace_id=b"1" * 16, span_id=b"2" * 8)
    span.attributes.add(key="input.value").value.string_value = "a question that is long enough to be cut"
    with pytest.raises(DataError, match="cut off"):
        parse_protobuf(request.SerializeToString()[:-cut], NOW)


def delimited(number: int, content: bytes) -> bytes:
    length, size = bytearray(), len(content)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def test_many_empty_spans_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(otlp, "MAX_FIELDS", 20_000)
    body = delimited(1, delimited(2, b"\x12\x00" * 200_000))
    tracemalloc.start()
    with pytest.raises(DataError, match="more than 20,000 fields; send smaller batches"):
        parse_protobuf(body, NOW)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # 200,000 mappings would take 12.8 MB


@pytest.mark.parametrize("value", [b"{},", b"[],", b"0,", b'{"":0},'])
def test_json_with_many_small_values_is_rejected_before_memory_grows(monkeypatch, value):
    monkeypatch.setattr(otlp, "MAX_FIELDS", 20_000)
    body = b'{"resourceSpans": [' + value * 30_000 + b"{}]}"
    tracemalloc.start()
    with pytest.raises(DataError, match="more than 20,000 JSON values; send smaller batches"):
        parse_json(body, NOW)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("text", ["", "[" + "{}," * 1_000_000 + "{}]"])
def test_small_compressed_body_with_many_values_is_rejected(text):
    """1,000 bytes that expand to 490,000 fields would take a second."""
    attribute = delimited(1, b"input.value") + delimited(2, delimited(1, text.encode()))
    span = delimited(1, b"1" * 16) + delimited(2, b"2" * 8) + delimited(9, attribute)
    body = delimited(1, delimited(2, delimited(2, span))) + b"\x0a\x00" * (0 if text else 490_000)
    sent = gzip.compress(body)
    plain, start = decompress(sent, "gzip", 4_000_000), time.process_time()
    with pytest.raises(DataError, match="send smaller batches"):
        parse_protobuf(plain, NOW, len(sent))
    assert len(sent) < 4_000 and time.process_time() - start < 0.3


def test_compressed_spans_that_differ_in_their_ids_only_are_read():
    constant = [{"key": f"name {i}", "value": {"stringValue": "x"}} for i in range(40)]
    rng = random.Random(0)
    spans = [
        {"traceId": f"{rng.getrandbits(128):032x}", "spanId": f"{rng.getrandbits(64):016x}", "attributes": constant}
        for _ in range(1_000)
    ]
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    assert len(parse_json(body, NOW, len(gzip.compress(body))).spans) == 1_000


def test_more_spans_than_the_limit_are_rejected():
    raw = {"resourceSpans": [{"scopeSpans": [{"spans": [{}] * 6_000}, {"spans": [{}] * 6_000}]}]}
    with pytest.raises(DataError, match="more than 10,000 spans"):
        parse_json(json.dumps(raw).encode(), NOW)


def test_nested_values_are_bounded_in_both_encodings():
    value = delimited(1, b"x")
    for _ in range(40):
        value = delimited(5, delimited(1, value))
    span = delimited(1, b"1" * 16) + delimited(2, b"2" * 8) + delimited(9, delimited(1, b"k") + delimited(2, value))
    with pytest.raises(DataError, match="nested more than 16 values deep"):
        parse_protobuf(delimited(1, delimited(2, delimited(2, span))), NOW)
    deep: dict = {"stringValue": "x"}
    for _ in range(40):
        deep = {"arrayValue": {"values": [deep]}}
    raw = {"traceId": "ab" * 16, "spanId": "cd" * 8, "attributes": [{"key": "k", "value": deep}]}
    (read,) = otlp.spans_of({"resourceSpans": [{"scopeSpans": [{"spans": [raw]}]}]}, NOW).spans
    assert "x" not in str(read.attributes)
    with pytest.raises(DataError, match="not valid JSON"):
        parse_json(b"[" * 200_000, NOW)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "a JSON object with 'resourceSpans'"),
        ({"resourceLogs": []}, "only traces"),
        ({"resourceMetrics": []}, "only traces"),
    ],
)
def test_other_signals_are_rejected(raw, reason):
    with pytest.raises(DataError, match=reason):
        otlp.spans_of(raw, NOW)


@pytest.mark.parametrize("wrong", [None, 7, "text", [7, None], {"spans": 7}, [{"scopeSpans": [{"spans": [None, 3]}]}]])
def test_values_of_the_wrong_type_give_no_spans(wrong):
    assert otlp.spans_of({"resourceSpans": wrong}, NOW).spans == ()


def test_a_span_without_a_valid_id_is_rejected_and_the_others_are_read():
    good = {"traceId": "AB" * 16, "spanId": "CD" * 8, "parentSpanId": "0" * 16}
    bad = [{}, {**good, "traceId": "0" * 32}, {**good, "spanId": "xyz"}, {**good, "traceId": 7}]
    found = otlp.spans_of({"resourceSpans": [{"scopeSpans": [{"spans": [*bad, good]}]}]}, NOW)
    assert ([(s.trace, s.id, s.parent) for s in found.spans], found.rejected) == ([("ab" * 16, "cd" * 8, "")], 4)


@pytest.mark.parametrize(
    ("at", "usable"),
    [
        (NOW, True),
        (NOW + timedelta(hours=2), True),  # the clock of the sender is slightly ahead
        (NOW + timedelta(days=30), False),
        (datetime(1970, 1, 1, tzinfo=UTC), False),
        (datetime(2400, 1, 1, tzinfo=UTC), False),
    ],
)
def test_times_of_a_wrong_clock_are_not_used(at, usable):
    raw = {"traceId": "ab" * 16, "spanId": "cd" * 8, "startTimeUnixNano": str(int(at.timestamp() * 1e9))}
    (span,) = otlp.spans_of({"resourceSpans": [{"scopeSpans": [{"spans": [raw]}]}]}, NOW).spans
    assert span.start == (at if usable else None)


@pytest.mark.parametrize("wrong", ["soon", "", None, "1e400", 10**40, -5, [1]])
def test_a_missing_time_is_not_used(wrong):
    raw = {"traceId": "ab" * 16, "spanId": "cd" * 8, "startTimeUnixNano": wrong}
    (span,) = otlp.spans_of({"resourceSpans": [{"scopeSpans": [{"spans": [raw]}]}]}, NOW).spans
    assert span.start is None


def test_compressed_bodies_are_bounded():
    body = b"x" * 100_000
    assert decompress(gzip.compress(body), "gzip", 100_000) == body
    assert decompress(zlib.compress(body), "deflate", 100_000) == body
    assert decompress(body, "", 10) == body  # the length is checked on arrival
    for content, encoding, reason in (
        (gzip.compress(b"0" * 50_000_000), "gzip", "larger than 1,000,000 bytes"),
        (gzip.compress(body)[:-20], "gzip", "cut off"),
        (b"no gzip", "gzip", "not valid gzip"),
        (body, "br", "'br' is not supported; allowed: gzip"),
    ):
        with pytest.raises(DataError, match=reason):
            decompress(content, encoding, 1_000_000)
