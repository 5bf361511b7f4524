"""Route for production traces: ``POST /v1/traces``, OpenTelemetry's protocol over HTTP (OTLP 1.x).

Deviation: errors have the gateway's form, not that of ``google.rpc.Status``; exporters decide by the HTTP status alone.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from casemate.errors import DataError
from casemate.gateway.api.caller import gateway_of, require_role
from casemate.gateway.api.streaming import run_while_connected
from casemate.gateway.errors import ApiError, JsonResponse, documented
from casemate.gateway.state import Gateway
from casemate.monitor.traces import otlp
from casemate.monitor.traces.otlp import TraceRequest

PROTOBUF, JSON = "application/x-protobuf", "application/json"
BODY = {"requestBody": {"required": True, "content": {JSON: {"schema": {"type": "object"}}, PROTOBUF: {}}}}
"""The body, for the OpenAPI schema; its fields are those of OTLP."""
router = APIRouter()


@router.post("/v1/traces", tags=["traces"], responses=documented(415, 504), openapi_extra=BODY)
async def export(request: Request) -> Response:
    """Records spans of the operator's applications, for keys with the role `traces` or `admin`.

    The response is sent once they are on disk. A span that is sent again is recorded once. Spans without a valid id are
    rejected and counted in `partialSuccess`; the others are recorded.
    """
    gateway, key = gateway_of(request), require_role(request, "traces", "admin")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        message = f"Traces are accepted as {PROTOBUF} or {JSON}."
        raise ApiError(415, message, "unsupported_media_type", "content-type")
    body, encoding = await request.body(), request.headers.get("content-encoding", "").strip().lower()
    work = _decode_and_record(gateway, body, kind, encoding, key.grant.tenant)
    try:
        rejected = await run_while_connected(request.receive, work, gateway.section.timeout_s)
    except DataError as error:
        raise ApiError(400, f"{error}.", "invalid_traces") from None
    if kind == JSON:
        return JsonResponse(_partial_success(rejected))
    return Response(_encoded_partial_success(rejected), media_type=PROTOBUF)


async def _decode_and_record(gateway: Gateway, body: bytes, kind: str, encoding: str, tenant: str) -> int:
    """Returns the number of rejected spans. Waiting requests have their bodies as they were sent, not decoded."""
    async with gateway.recording:
        async with gateway.decoding:
            found = await asyncio.to_thread(_decode, gateway, body, kind, encoding)
        await _record(gateway, found, tenant)
        return found.rejected


def _decode(gateway: Gateway, body: bytes, kind: str, encoding: str) -> TraceRequest:
    plain = otlp.decompress(body, encoding, int(gateway.section.max_body_mb * 1e6))
    return (otlp.parse_protobuf if kind == PROTOBUF else otlp.parse_json)(plain, datetime.now(UTC), len(body))


async def _record(gateway: Gateway, found: TraceRequest, tenant: str) -> None:
    await gateway.wait_written(gateway.app.store.receipt())  # while the store fails, traces must not displace verdicts
    await gateway.traces.record(found.spans, tenant, datetime.now(UTC))
    await gateway.wait_written(gateway.app.store.receipt())


MESSAGE = "spans without a valid trace id and span id were rejected"


def _partial_success(rejected: int) -> dict[str, object]:
    """``ExportTraceServiceResponse`` in JSON; empty if all spans were accepted."""
    return {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": MESSAGE}} if rejected else {}


def _encoded_partial_success(rejected: int) -> bytes:
    """The same in protobuf: field 1 contains the number in field 1 and the message in field 2."""
    if not rejected:
        return b""
    inner = b"\x08" + _varint(rejected) + b"\x12" + _varint(len(MESSAGE)) + MESSAGE.encode()
    return b"\x0a" + _varint(len(inner)) + inner


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
