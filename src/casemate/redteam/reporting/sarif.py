"""Renders a campaign as SARIF, for code-scanning tools."""

from __future__ import annotations

import hashlib
import json
import math
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from casemate.config import FILE
from casemate.redteam.lab.results import CampaignResult, Check, CheckStatus
from casemate.redteam.reporting.text import check_message, headline, overall_status, reported_checks
from casemate.reports.format import scrub

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVEL = {CheckStatus.FAIL: "error", CheckStatus.ERROR: "error", CheckStatus.INCONCLUSIVE: "warning"}
HELP = (
    "Casemate ran published attacks against this system. The check compares their success, or the guard's cost, with "
    "the configured limit. report.html contains the metrics and what was not tested."
)


def to_sarif(campaign: CampaignResult, file: Path = Path(FILE)) -> str:
    """SARIF 2.1.0 with a rule for each check and a result for each check that did not pass.

    ``file`` is that of every finding: findings concern a running system, but GitHub requires a file, so the one to
    change, the configuration. Of a path that leaves the working directory, only the name is shown.
    """
    campaign = scrub(campaign)
    uri = quote(file.name if file.is_absolute() or ".." in file.parts else file.as_posix())
    made = reported_checks(campaign)
    names = list(dict.fromkeys(c.name for c in made))
    run = {
        "tool": {
            "driver": {
                "name": "Casemate",
                "version": version("casemate"),
                "rules": [_rule(name, [c for c in made if c.name == name]) for name in names],
            }
        },
        "automationDetails": {"id": f"casemate-redteam/{campaign.id}"},
        "invocations": [
            {
                "executionSuccessful": overall_status(campaign) is not CheckStatus.ERROR,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": f"{a.name}: {a.error}"}} for a in campaign.attacks if a.error
                ],
            }
        ],
        "artifacts": [{"location": {"uri": uri}}],
        "results": [_result(c, names.index(c.name), uri) for c in made if c.status is not CheckStatus.PASS],
        "properties": {
            "status": overall_status(campaign),
            "summary": headline(campaign),
            "target": campaign.evidence.get("target", "own"),
            "capabilities": campaign.evidence.get("capabilities", []),
            "notTested": campaign.not_tested,
            "simulated": campaign.simulated,
        },
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _rule(name: str, checks: list[Check]) -> dict[str, Any]:
    owasp, atlas = (dict.fromkeys(i for c in checks for i in getattr(c, kind)) for kind in ("owasp", "atlas"))
    tags = ["security", "privacy", *(f"OWASP LLM/{i}" for i in owasp), *(f"MITRE ATLAS/{i}" for i in atlas)]
    return {
        "id": _rule_id(name),
        "shortDescription": {"text": name},
        "fullDescription": {"text": name},
        "help": {"text": f"{HELP} {' '.join(tags[2:])}".strip()},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": tags},
    }


def _rule_id(name: str) -> str:
    """A readable id; the hash distinguishes names that differ only in punctuation, such as 1 % and .1 %."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].rstrip("-")
    return f"casemate/{slug}-{fingerprint(name)[:6]}"


def _result(check: Check, rule: int, uri: str) -> dict[str, Any]:
    subject = check.attack or "campaign"
    finite = {"value": check.value, "limit": check.limit}
    return {
        "ruleId": _rule_id(check.name),
        "ruleIndex": rule,
        "level": LEVEL[check.status],
        "message": {"text": f"{check.attack}: {check_message(check)}" if check.attack else check_message(check)},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": uri, "index": 0}, "region": {"startLine": 1}},
                "logicalLocations": [{"name": subject, "fullyQualifiedName": f"redteam/{subject}", "kind": "module"}],
            }
        ],
        "partialFingerprints": {"primaryLocationLineHash": f"{fingerprint(check.name, check.attack)[:16]}:1"},
        "properties": {
            "status": check.status,
            **{key: x if x is not None and math.isfinite(x) else None for key, x in finite.items()},
        },
    }


def fingerprint(*parts: str) -> str:
    """SHA-256 of the parts in hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
