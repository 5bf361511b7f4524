"""Renders a campaign as JUnit XML, for CI servers.

FAIL is a `failure`. INCONCLUSIVE and ERROR are an `error` of that type. They are never `skipped`, because most CI
servers show skipped tests as green.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

from casemate.redteam.lab.results import CampaignResult, Check, CheckStatus
from casemate.redteam.reporting.compare import flatten
from casemate.redteam.reporting.text import check_message, overall_status, reported_checks, summary_lines
from casemate.reports.format import scrub

SUITE = "casemate.redteam"


def to_junit(campaign: CampaignResult) -> str:
    """JUnit XML with a test case for each reported check."""
    campaign = scrub(campaign)
    made = reported_checks(campaign)
    seconds = campaign.cost.get("seconds", 0.0)
    count: dict[str, Any] = {
        "tests": str(len(made)),
        "failures": str(sum(c.status is CheckStatus.FAIL for c in made)),
        "errors": str(sum(c.status in {CheckStatus.ERROR, CheckStatus.INCONCLUSIVE} for c in made)),
        "skipped": "0",
        "time": f"{seconds:.3f}",
    }
    root = ET.Element("testsuites", name="casemate", **count)
    suite = ET.SubElement(root, "testsuite", name=SUITE, **count)
    properties = ET.SubElement(suite, "properties")
    facts = {
        "campaign": campaign.id,
        "at": campaign.at,
        "status": overall_status(campaign),
        **dict(flatten(campaign.evidence)),
    }
    for name, value in facts.items():
        ET.SubElement(properties, "property", name=name, value=value)
    for check in made:
        _testcase(suite, check)
    ET.SubElement(suite, "system-out").text = "\n".join(summary_lines(campaign))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _testcase(suite: ET.Element, check: Check) -> None:
    classname = f"{SUITE}.{check.attack}" if check.attack else SUITE
    case = ET.SubElement(suite, "testcase", classname=classname, name=check.name, time="0")
    if check.status is CheckStatus.PASS:
        return
    kind = "failure" if check.status is CheckStatus.FAIL else "error"
    ET.SubElement(case, kind, type=str(check.status), message=check_message(check)).text = check.reason
