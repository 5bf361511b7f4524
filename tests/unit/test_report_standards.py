"""Reports list the standards for which their completed checks are evidence."""

from dataclasses import replace

from casemate.redteam.lab.results import CampaignResult, Check, CheckStatus
from casemate.redteam.reporting.html import render_html
from casemate.redteam.reporting.standards import (
    DISCLAIMER,
    INFERENCE,
    LEAKAGE,
    REQUIREMENTS,
    related_requirements,
)

NAMES = {"OWASP LLM", "MITRE ATLAS", "NIST AI 600-1", "EU AI Act", "GDPR"}


def check(technique, status=CheckStatus.PASS):
    return Check("a requirement", status, 0.5, 0.6, "why", "an attack", atlas=(technique,))


def test_every_standard_is_covered_and_each_item_occurs_once():
    assert {r.standard.name for r in REQUIREMENTS} == NAMES
    assert len({(r.standard.name, r.item) for r in REQUIREMENTS}) == len(REQUIREMENTS)
    assert all(r.standard.url.startswith("https://") for r in REQUIREMENTS)


def test_only_items_about_the_tested_technique_are_listed():
    inference, leakage = (related_requirements([check(name)]) for name in (INFERENCE, LEAKAGE))
    assert {r.standard.name for r in inference} == {r.standard.name for r in leakage} == NAMES
    assert LEAKAGE not in {r.item for r in inference}
    assert INFERENCE not in {r.item for r in leakage}


def test_a_failed_check_is_evidence_and_a_check_without_result_is_not():
    assert related_requirements([check(INFERENCE, CheckStatus.FAIL)])
    assert not related_requirements([check(INFERENCE, s) for s in (CheckStatus.ERROR, CheckStatus.INCONCLUSIVE)])


def test_the_report_states_the_items_and_claims_no_conformity():
    passed = CampaignResult(status=CheckStatus.PASS, checks=(check(INFERENCE),))
    page = render_html(passed)
    assert DISCLAIMER in page
    assert all(r.item in page for r in related_requirements(passed.checks))
    untested = replace(passed, checks=(check(INFERENCE, CheckStatus.INCONCLUSIVE),))
    assert DISCLAIMER not in render_html(untested)
