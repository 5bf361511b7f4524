"""Schemathesis against a running gateway: requests inside and outside the schema of each operation.

    python -m benchmarks.api_contract [EXAMPLES [OPERATION ...]]

Each operation gets EXAMPLES requests (default 1,000). If it has a body or parameters, half of them are invalid. A run
resumes the previous one; after a change of the package, an operation starts from zero. A fault is a 5xx status, a
status that the schema does not list, or an error without OpenAI's error format. ``examples``: number of requests sent.
It is smaller if an operation has fewer different requests.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from benchmarks import ROOT, SEED, code_digest, save
from tests.gateways import key, make, serving

EXAMPLES, BLOCK = 1000, 100


def main() -> None:
    """Tests the operations, and adds the results to earlier ones of the same code."""
    count = int(sys.argv[1]) if sys.argv[1:] else EXAMPLES
    file = ROOT / "benchmarks/results/api_contract.json"
    held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"results": {}}
    results: dict[str, Any] = {name: {"code": held["code"]} | found for name, found in held["results"].items()}
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (schema, headers):
        for operation in (found.ok() for found in schema.get_all_operations()):
            if sys.argv[2:] and operation.label not in sys.argv[2:]:
                continue
            found = results.get(operation.label, {})
            if found.get("code") != code_digest():
                found = {"code": code_digest(), "asked": 0, "examples": 0, "statuses": {}, "faults": []}
                results[operation.label] = found
            while found["asked"] < count:
                block(operation, headers, found)
                save("api_contract", results)


@contextmanager
def served(folder: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """The schema of a running gateway, and the headers of an administrator."""
    app = make(folder, requests_per_minute=1_000_000, tokens_per_day=10**12, timeout_s=20)
    headers = {"Authorization": f"Bearer {key(app, 'admin')}"}
    with serving(app) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json"), headers


def block(operation: Any, headers: dict[str, str], found: dict[str, Any], size: int = BLOCK) -> None:
    """Sends ``size`` further examples to an operation."""
    modes = [GenerationMode.POSITIVE]
    if operation.body or operation.query:
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:
        sent, statuses, faults = fuzz(operation, mode, headers, size // len(modes), SEED + found["asked"])
        found["examples"] += sent
        found["statuses"] = dict(sorted((Counter(found["statuses"]) + statuses).items()))
        found["faults"] += faults
    found["asked"] += size


def fuzz(
    operation: Any, mode: GenerationMode, headers: dict[str, str], count: int, start: int
) -> tuple[int, Counter[str], list[str]]:
    """Sends requests to one operation. Returns their number, the response statuses, and the faults."""
    statuses, faults = Counter[str](), list[str]()

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "casemate"  # any other text is a valid request for an unknown model
        answer = case.call(headers=headers)
        statuses[str(answer.status_code)] += 1
        faults.extend(f"{case.as_curl_command()}: {fault}" for fault in _faults(operation, answer))

    check()
    return statuses.total(), statuses, faults


def _faults(operation: Any, answer: Any) -> list[str]:
    if answer.status_code >= 500:
        return [f"status {answer.status_code}"]
    if str(answer.status_code) not in operation.definition.raw["responses"]:
        return [f"the schema does not list status {answer.status_code}"]
    if answer.status_code >= 400 and set(answer.json()["error"]) != {"message", "type", "param", "code"}:
        return ["the error is not of OpenAI's shape"]
    return []


if __name__ == "__main__":
    main()
