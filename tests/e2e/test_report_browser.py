"""The reports in a real browser: filters, search, keyboard, layout, contrast, accessible names."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from casemate.config import PluginSpec
from casemate.demo.assessment_report import render_assessment
from casemate.demo.endpoint import plan_endpoint, try_endpoint
from casemate.demo.endpoint_report import render_endpoint
from casemate.redteam.reporting.html import render_html
from casemate.reports import calibration_report
from tests import external_system
from tests.browser import CONTRAST, Browser, axe, chromium
from tests.campaigns import campaign, crawl_campaign, sessions
from tests.unit import test_assessment as assessments
from tests.unit.test_calibration_report import calibration

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="there is no Chromium; set CHROMIUM")]
ROWS = "document.querySelectorAll('#explorer-list > li').length"
STATUS = "document.getElementById('explorer-status').textContent"
NAMELESS = """
[...document.querySelectorAll("input, select, button, summary, [role=region], [role=search]")].filter((e) => {
  const label = e.getAttribute("aria-label") || e.closest("label")?.firstChild.textContent || e.textContent;
  return !label.trim();
}).map((e) => e.outerHTML.slice(0, 80))
"""
DUPLICATE_IDS = """
(() => { const a = [...document.querySelectorAll("[id]")].map((e) => e.id); return a.length - new Set(a).size; })()
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(campaign(sessions=sessions(200), sessions_total=900)), encoding="utf-8")
    return f"file://{path}"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of the other reports: crawl, calibration, ``casemate try`` on a folder and on an endpoint."""
    folder = tmp_path_factory.mktemp("pages")
    external_system.write_known(folder)
    work = folder / "endpoint"
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch, external_system.serving() as server:
        assessments.shrink(patch)
        tried = assessments.run(assessments.write_notes(folder / "notes", 44), folder)
        target = PluginSpec.model_validate({"use": "http", "url": server.url, "answer": "$.answer"})
        plan = plan_endpoint(target, folder / "known/in", folder / "known/out", 60, (), work)
        texts = {
            "crawl": render_html(crawl_campaign()),
            "calibration": calibration_report.render_html(calibration(), 0.01),
            "try": render_assessment(tried),
            "endpoint": render_endpoint(asyncio.run(try_endpoint(plan, assessments.steps))),
        }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: f"file://{folder / name}.html" for name in texts}


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture
def page(browser, address):
    browser.set_screen(1366)
    browser.go(address)
    yield browser
    assert browser.problems == []


def choose(page, name, value):
    page.js(
        f"(() => {{ const e = document.querySelector('[name={name}]'); e.value = '{value}';"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_filters_and_search_narrow_the_list(page):
    total = len(sessions(200))
    assert page.js(ROWS) == 50
    assert f"{total} of {total} sessions match" in page.js(STATUS)
    choose(page, "outcome", "identified")
    page.wait(f"{ROWS} === 2")
    choose(page, "outcome", "")
    choose(page, "search", "NOTES/007 mba")
    page.wait(f"{ROWS} === 1")
    assert page.js("document.querySelector('#explorer-list mark').textContent") == "notes/007"
    choose(page, "search", "no such text")
    page.wait(f"{STATUS}.startsWith('No session matches')")
    page.click("#explorer-form [type=reset]")
    page.wait(f"{ROWS} === 50")


def test_a_session_shows_both_answers_with_withheld_documents_and_reasons(page):
    choose(page, "search", "notes/004")
    page.wait(f"{ROWS} === 1")
    assert page.js("document.querySelectorAll('#explorer-list .turn').length") == 0  # created on opening
    page.click("#explorer-list summary")
    page.wait("document.querySelectorAll('#explorer-list .turn').length === 2")
    text = page.js("document.querySelector('#explorer-list .turn').innerText")
    for sentence in (
        "Guard off: answered",
        "Guard on: no answer",
        "Withheld: notes/004.md#0",
        "mirabel: score 3.20, threshold",
    ):
        assert sentence in text
    tops = page.js("[...document.querySelectorAll('.turn .answer')].slice(0, 2).map((e) => e.offsetTop)")
    assert tops[0] == tops[1]  # adjacent


def test_url_parameters_set_the_filters(page, address):
    page.go("about:blank")
    page.go(f"{address}#attack=mba&outcome=protected&other=x")
    page.wait(f"{STATUS}.includes('sessions match')")
    assert page.js("[...document.querySelectorAll('#explorer-list b')].every((b) => b.textContent === 'mba')")
    assert page.js("document.querySelector('[name=outcome]').value") == "protected"
    page.js("location.hash = 'attack=direct&outcome='")
    page.wait("document.querySelector('#explorer-list b').textContent === 'direct'")


def test_a_crawl_is_explored_question_by_question(page, tmp_path):
    path = tmp_path / "crawl.html"
    path.write_text(render_html(crawl_campaign()), encoding="utf-8")
    page.go(f"file://{path}")
    assert page.js(ROWS) == 12 and "New text recovered" in page.js("document.querySelector('#explorer-list').innerText")
    page.click("#explorer-list summary")
    page.wait("document.querySelector('#explorer-list .turn')")
    text = page.js("document.querySelector('#explorer-list .turn').innerText")
    assert (
        text.startswith("Question 1")
        and "Recovered 2 chunks: document 1, document 2" in text
        and "In the context: document 1" in text
    )
    choose(page, "order", "candidate")
    page.wait("[...document.querySelectorAll('#explorer-list code')].slice(0, 11).pop().textContent === 'question 11'")
    assert page.js(CONTRAST) == [] and page.js(NAMELESS) == []


@pytest.mark.skipif(axe() is None, reason="there is no axe-core; run make test, or set AXE")
@pytest.mark.parametrize("width", [390, 1366, 3840])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_violation(page, address, pages, width, dark):
    page.set_screen(width, dark=dark)
    for name, one in {"report": address, **pages}.items():
        page.go(one)
        page.js("document.querySelectorAll('details').forEach((d, i) => { d.open = i < 5; })")
        if name in {"report", "crawl"}:
            page.wait("document.querySelectorAll('#explorer-list .turn').length >= 5")
        assert page.violations(axe()) == [], name
        assert page.js("document.documentElement.scrollWidth <= innerWidth"), name


@pytest.mark.parametrize("width", [390, 1366, 3840])
@pytest.mark.parametrize("dark", [False, True])
def test_layout_and_contrast_of_the_other_reports(page, pages, width, dark):
    page.set_screen(width, dark=dark)
    for name, one in pages.items():
        page.go(one)
        assert page.js("document.documentElement.scrollWidth <= innerWidth"), name
        assert page.js(CONTRAST) == [] and page.js(NAMELESS) == [] and page.js(DUPLICATE_IDS) == 0, name
        assert page.js("document.querySelectorAll('h1').length") == 1, name


def test_all_controls_are_reachable_by_keyboard(page):
    page.js("document.querySelector('[name=search]').focus()")
    page.type("notes/004")
    page.wait(f"{ROWS} === 1")
    for _ in range(7):
        page.press("Tab", 9)
        assert page.js("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert page.js("document.activeElement.tagName") == "SUMMARY"
    page.press("Enter", 13, "\r")
    page.wait("document.querySelector('#explorer-list details').open")
    page.js("document.querySelector('#explorer-form').reset()")
    page.wait(f"{ROWS} === 50")
    page.js("document.getElementById('explorer-more').focus()")
    page.press("Enter", 13, "\r")
    page.wait(f"{ROWS} === 100")
    assert page.js("[...document.querySelectorAll('#explorer-list summary')].indexOf(document.activeElement)") == 50


@pytest.mark.parametrize("width", [390, 1366, 3840])
@pytest.mark.parametrize("dark", [False, True])
def test_layout_contrast_and_accessible_names(page, address, width, dark):
    page.set_screen(width, dark=dark)
    page.go(address)
    page.js("document.querySelectorAll('#explorer-list details').forEach((d, i) => { d.open = i < 5; })")
    page.wait("document.querySelectorAll('#explorer-list .turn').length >= 5")
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.js(CONTRAST) == []
    assert page.js(NAMELESS) == []
    assert page.js(DUPLICATE_IDS) == 0
    assert page.js("document.querySelectorAll('h1').length") == 1


def test_without_scripts_the_worst_sessions_are_readable(page, address):
    page.scripts(False)
    try:
        page.go(address)
        assert "Member identified" in page.text()
        page.click("#explorer-list summary")
        assert "Guard on: no answer" in page.text()
    finally:
        page.scripts(True)


def test_a_large_campaign_opens_and_filters(page, tmp_path):
    made = sessions(5000)
    many = tuple(dataclasses.replace(s, exchanges=made[3].exchanges) if i < 2000 else s for i, s in enumerate(made))
    path = tmp_path / "report.html"
    path.write_text(render_html(campaign(sessions=many)), encoding="utf-8")
    page.go(f"file://{path}")
    assert page.js(ROWS) == 50
    choose(page, "search", "threshold 2.50")
    page.wait(f"{ROWS} === 50 && {STATUS}.startsWith('2,')")
