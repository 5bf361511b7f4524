"""A campaign as files: a page for people, JUnit and SARIF for build servers, json for the next comparison.

In JUnit a FAIL is a ``failure``. INCONCLUSIVE and ERROR are both an ``error``, of that type: nothing was found, and
nothing was shown to be safe. They are never ``skipped``, because most build servers paint a skipped test green.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from casemate.errors import BackendError, DataError
from casemate.lab.compare import Change, Diff, diff, flat, render_diff_text
from casemate.lab.html import render_html
from casemate.lab.results import Campaign, Check, Status, load
from casemate.lab.wording import carried, cases, ended, headline, in_figures, overall, redact, scrub, sentence

__all__ = [
    "Change",
    "Diff",
    "diff",
    "redact",
    "render_diff_text",
    "render_html",
    "to_junit",
    "to_sarif",
    "write_report",
]

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
PLACE = "casemate.yaml"
"""A finding is about a running system, but GitHub shows none without a file: the one in which it would be mended."""
CRAWL = "crawl"
"""Name of the files of a crawl."""
LEVEL = {Status.FAIL: "error", Status.ERROR: "error", Status.INCONCLUSIVE: "warning"}
HELP = (
    "Casemate ran published attacks against this system. The check compares what they achieved, "
    "or what the guard cost, with what the owner allowed. report.html has the figures and what was not tested."
)


def to_junit(campaign: Campaign) -> str:
    """JUnit XML with a testcase for each check, and one for the whole where no check shows its status."""
    campaign = scrub(campaign)
    made = cases(campaign)
    seconds = campaign.cost.get("seconds", 0.0)
    count: dict[str, Any] = {
        "tests": str(len(made)),
        "failures": str(sum(c.status is Status.FAIL for c in made)),
        "errors": str(sum(c.status in {Status.ERROR, Status.INCONCLUSIVE} for c in made)),
        "skipped": "0",
        "time": f"{seconds:.3f}",
    }
    root = ET.Element("testsuites", name="casemate", **count)
    suite = ET.SubElement(root, "testsuite", name="casemate.redteam", **count)
    properties = ET.SubElement(suite, "properties")
    facts = {"campaign": campaign.id, "at": campaign.at, "status": overall(campaign), **dict(flat(campaign.evidence))}
    for name, value in facts.items():
        ET.SubElement(properties, "property", name=name, value=value)
    for check in made:
        _testcase(suite, check)
    ET.SubElement(suite, "system-out").text = "\n".join(_summary(campaign))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _testcase(suite: ET.Element, check: Check) -> None:
    place = f"casemate.redteam.{check.attack}" if check.attack else "casemate.redteam"
    case = ET.SubElement(suite, "testcase", classname=place, name=check.name, time="0")
    if check.status is Status.PASS:
        return
    kind = "failure" if check.status is Status.FAIL else "error"
    ET.SubElement(case, kind, type=str(check.status), message=_message(check)).text = check.why


def _summary(campaign: Campaign) -> Iterator[str]:
    """The report in lines."""
    yield headline(campaign)
    yield from map(sentence, campaign.attacks)
    yield from map(carried, campaign.crawls)
    yield from (f"Not tested: {line}" for line in campaign.not_tested)
    yield from (f"Simulated: {line}" for line in campaign.simulated)


def _message(check: Check) -> str:
    return f"{check.status}: {check.name}{in_figures(check)}. {ended(check.why)}"


def to_sarif(campaign: Campaign) -> str:
    """SARIF 2.1.0: a rule for each check made, a result for each that did not pass."""
    campaign = scrub(campaign)
    made = cases(campaign)
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
                "executionSuccessful": overall(campaign) is not Status.ERROR,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": f"{a.name}: {a.error}"}} for a in campaign.attacks if a.error
                ],
            }
        ],
        "artifacts": [{"location": {"uri": PLACE}}],
        "results": [_result(c, names.index(c.name)) for c in made if c.status is not Status.PASS],
        "properties": {
            "status": overall(campaign),
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
    """A readable id; the hash keeps names apart that differ in signs only, such as 1 % and .1 %."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].rstrip("-")
    return f"casemate/{slug}-{_hash(name)[:6]}"


def _result(check: Check, rule: int) -> dict[str, Any]:
    subject = check.attack or "campaign"
    finite = {"value": check.value, "limit": check.limit}
    return {
        "ruleId": _rule_id(check.name),
        "ruleIndex": rule,
        "level": LEVEL[check.status],
        "message": {"text": f"{check.attack}: {_message(check)}" if check.attack else _message(check)},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": PLACE, "index": 0}, "region": {"startLine": 1}},
                "logicalLocations": [{"name": subject, "fullyQualifiedName": f"redteam/{subject}", "kind": "module"}],
            }
        ],
        "partialFingerprints": {"primaryLocationLineHash": f"{_hash(check.name, check.attack)[:16]}:1"},
        "properties": {
            "status": check.status,
            **{key: x if x is not None and math.isfinite(x) else None for key, x in finite.items()},
        },
    }


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_report(
    campaign: Campaign, folder: Path, baseline: Campaign | None = None, stem: str = "report"
) -> dict[str, Path]:
    """Writes report.html, .json, .junit.xml and .sarif into a folder, which is made if it is not there.

    The page shows beside the campaign the last crawl that was written there; its verdict stays its own.

    All four are rendered before the first is put in place, and each is put in place at once: whoever reads a report
    while it is written anew sees an old file or a new one, never half of one.

    Returns:
        The paths by kind: ``html``, ``json``, ``junit``, ``sarif``.

    Raises:
        BackendError: If the folder cannot be written.
    """
    campaign = scrub(campaign)
    texts = {
        "html": (f"{stem}.html", render_html(campaign, baseline, _last_crawl(folder) if stem != CRAWL else None)),
        "junit": (f"{stem}.junit.xml", to_junit(campaign)),
        "sarif": (f"{stem}.sarif", to_sarif(campaign)),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as name:
            made = {kind: Path(name, file) for kind, (file, _) in texts.items()} | {"json": Path(name, f"{stem}.json")}
            for kind, (_, text) in texts.items():
                made[kind].write_text(text, encoding="utf-8")
            campaign.save(made["json"])
            return {kind: _put(path, folder) for kind, path in sorted(made.items())}
    except OSError as error:
        raise BackendError(
            f"the report cannot be written to {folder}: {error}", backend="disk", retryable=False
        ) from error


def _last_crawl(folder: Path) -> Campaign | None:
    """What ``casemate redteam crawl`` wrote here; a damaged file says nothing."""
    try:
        return load(folder / f"{CRAWL}.json")
    except DataError:
        return None


def _put(path: Path, folder: Path) -> Path:
    place = folder / path.name
    path.chmod(0o600)  # it names documents
    os.replace(path, place)
    return place
