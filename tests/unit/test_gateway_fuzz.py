"""Random requests, most of them invalid: no failure, no undocumented status, no document text in an error."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import dataclass, field

import httpx
import pytest

from casemate.gateway.app import make_app
from casemate.types import Document
from tests.fakes import WORDS
from tests.gateways import HideNamed, key, make

SMOKE, ALL = 300, 10_000
MARK = "zqx"
"""A part of each word of the documents. No request contains it."""
PATHS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models",
    "/v1/models/casemate",
    "/v1/models/other",
    "/v1/retrieve",
    "/v1/documents",
    "/healthz",
    "/readyz",
    "/metrics",
    "/v1/nothing",
    "/",
)
VALID = {
    "/v1/chat/completions": {"model": "casemate", "messages": [{"role": "user", "content": "garden"}]},
    "/v1/responses": {"model": "casemate", "input": "garden"},
    "/v1/retrieve": {"question": "garden"},
    "/v1/documents": {"documents": [{"source": "added", "text": "a garden"}]},
}
NAMES = (
    "model",
    "messages",
    "role",
    "content",
    "stream",
    "input",
    "question",
    "k",
    "user",
    "documents",
    "source",
    "text",
)
ODD = (
    None,
    True,
    0,
    -1,
    2**63,
    1e308,
    "",
    " ",
    "\0",
    "\ud800",
    "casemate",
    "user",
    "x" * 5000,
    "'; DROP TABLE document",
    [],
)


@dataclass
class Fuzzer:
    """Generates requests.

    Attributes:
        rng: Source of randomness.
        keys: API keys of several roles.
    """

    rng: random.Random
    keys: list[str] = field(repr=False)

    def request(self) -> dict:
        path = self.rng.choice(PATHS)
        method = self.rng.choice(["GET", "POST", "POST", "POST", "DELETE", "PUT", "OPTIONS", "HEAD"])
        headers = [
            ("content-type", self.rng.choice(["application/json"] * 6 + ["text/plain", "multipart/form-data", ""]))
        ]
        if self.rng.random() < 0.9:
            scheme = self.rng.choice(["Bearer"] * 20 + ["Basic", "bearer", ""])
            headers.append(("authorization", f"{scheme} {self.rng.choice(self.keys * 5 + ['cmk_x', ''])}"))
        query = {
            self.rng.choice(["limit", "after", "source", "x"]): self.unusual_text()
            for _ in range(self.rng.randrange(3))
        }
        return {"method": method, "url": path, "headers": headers, "params": query, "content": self.body(path)}

    def unusual_text(self) -> str:
        return str(self.rng.choice(ODD))[:300].encode("utf-8", "replace").decode()

    def body(self, path: str) -> bytes:
        valid = VALID.get(path, {})
        match self.rng.randrange(6):
            case 0:
                return json.dumps(valid).encode()
            case 1:
                return self.rng.randbytes(self.rng.randrange(200))
            case 2:
                return b"[" * self.rng.randrange(1, 100_000)
            case 3:
                raw = bytearray(json.dumps(valid).encode())
                raw[self.rng.randrange(len(raw))] = self.rng.randrange(256)
                return bytes(raw)
            case _:
                return json.dumps(self.mutated(valid)).encode()

    def mutated(self, value, depth=0):
        if self.rng.random() < 0.15 or depth > 4:
            return self.rng.choice(ODD)
        if isinstance(value, dict):
            found = {name: self.mutated(item, depth + 1) for name, item in value.items() if self.rng.random() < 0.95}
            if self.rng.random() < 0.3:
                found[self.rng.choice(NAMES)] = self.mutated({}, depth + 1)
            return found
        if isinstance(value, list):
            return [self.mutated(item, depth + 1) for item in value for _ in range(self.rng.randrange(3))]
        return value


@pytest.mark.parametrize("count", [SMOKE, pytest.param(ALL, marks=pytest.mark.slow)])
def test_random_requests_cause_no_failure_and_no_document_text_in_responses(tmp_path, count):
    app = make(tmp_path, defenses=(HideNamed(),), count=0, requests_per_minute=10**9, tokens_per_day=10**12)
    words = [f"{MARK}{word}" for word in WORDS]
    texts = [" ".join(["garden", *random.Random(i).choices(words, k=12)]) for i in range(40)]
    vectors = app.guard.rag.embedder.embed(texts)
    app.index.add([Document(f"d{i}", text) for i, text in enumerate(texts)], vectors)
    keys = [key(app, role, retrieve=role == "client") for role in ("client", "admin", "metrics")]
    statuses = asyncio.run(send(make_app(app), Fuzzer(random.Random(count), keys), count))
    assert {200, 400, 401, 403, 404, 405} <= statuses


async def send(api, fuzzer, count) -> set[int]:
    """Sends requests within the process; returns the statuses of the responses."""
    statuses, schema = set(), api.openapi()
    async with (
        api.router.lifespan_context(api),
        httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://gateway") as http,
    ):
        for _ in range(count):
            request = fuzzer.request()
            answer = await http.request(**request)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (request, answer.text)
            assert answer.status_code < 400 or MARK not in answer.text, request
            assert str(answer.status_code) in documented(schema, request, answer), (request, answer.text)
            if request["method"] != "HEAD" and answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return statuses


def documented(schema, request, answer) -> set[str]:
    """The statuses in the schema; for an unknown path or method, those of routing."""
    path = re.sub(r"^/v1/models/.*", "/v1/models/{model}", request["url"])
    operation = schema["paths"].get(path, {}).get(request["method"].lower())
    return operation["responses"].keys() if operation else {"200", "401", "404", "405"}


def test_schema_documents_the_errors_of_every_operation(tmp_path):
    schema = make_app(make(tmp_path)).openapi()
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            found = operation["responses"].keys()
            assert {"200", "400", "408", "413", "500", "503"} <= found, path
            assert "422" not in found
            assert not path.startswith("/v1/") or {"401", "403", "429"} <= found
            error = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/ErrorBody"}
    assert "HTTPValidationError" not in schema["components"]["schemas"]
