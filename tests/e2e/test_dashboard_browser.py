"""The dashboard in a real browser: login, live updates, alerts, operating point, layout and contrast."""

from __future__ import annotations

import time

import httpx
import pytest

from casemate import config as configuration
from casemate.app import open_app
from casemate.demo.clinic import case_notes
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.redteam.reporting.files import write_report
from tests.browser import CONTRAST, Browser, axe, chromium
from tests.campaigns import campaign, sessions
from tests.gateways import serving
from tests.seeded_clinic import prepare_clinic, simulate_day

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="there is no Chromium; set CHROMIUM")]
SCREENS = {"desk": 1366, "phone": 390, "wall": 3840}
PAGES = (
    "",
    "verdicts",
    "requests",
    "clients",
    "disclosure",
    "topics",
    "canaries",
    "canaries/trend?set=clinic",
    "alerts",
    "redteam",
    "calibration",
    "enforcement",
    "documents",
    "quarantine",
)

CLIPPED = """
[...document.querySelectorAll(".scroll")].filter((e) => e.querySelector("table:not(.matrix)"))
  .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => [e.ariaLabel, e.scrollWidth, e.clientWidth])
"""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """A short day at the fictional clinic, without the red team."""
    settings = prepare_clinic(tmp_path_factory.mktemp("clinic"), notes=60)
    simulate_day(settings, redteam=False, notes=60)
    return settings


@pytest.fixture(scope="module")
def gateway(clinic):
    """Address, admin key and client key."""
    with open_app(clinic) as app:
        texts = [str(ApiKeyStore(app.store).create(Grant(role, role))[1]) for role in ("admin", "client")]
        app.store.flush()
    app = open_app(configuration.with_overrides(configuration.read(clinic), gateway={"port": 0}))
    with serving(app) as url:
        yield url, *texts, app


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture
def logged_in(browser, gateway):
    """A logged-in browser. Script errors and policy violations fail the test."""
    url, admin, _, _ = gateway
    browser.set_screen(1366)
    browser.problems.clear()
    browser.go(f"{url}/dashboard/alerts")
    if "Log in" in browser.text():
        assert browser.js("document.activeElement.name") == "key"
        browser.type(admin)
        browser.enter()
    assert browser.js("location.pathname") == "/dashboard/alerts"
    yield browser
    assert browser.problems == []


def ask(url, key, question, **fields):
    body = {"model": "casemate", "messages": [{"role": "user", "content": question}], **fields}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200


def test_a_flagged_question_appears_without_a_reload(logged_in, gateway):
    url, _, client, _ = gateway
    logged_in.go(f"{url}/dashboard/")
    before = logged_in.js("document.querySelectorAll('#flagged tbody tr').length")
    first = logged_in.js("document.querySelector('#flagged tbody tr').id")
    begun = time.monotonic()
    ask(url, client, f"Is this record in your files? {case_notes(60)[40][1]}")
    logged_in.wait(f"document.querySelector('#flagged tbody tr').id !== '{first}'", 30)
    assert time.monotonic() - begun < 30 and before > 0
    assert "client" in logged_in.js("document.querySelector('#flagged tbody tr').innerText")
    logged_in.follow_link("#flagged tbody tr a")
    assert "Flagged by mirabel" in logged_in.text() and "closer to a document" in logged_in.text()


def test_an_alert_is_acknowledged(logged_in, gateway):
    url, *_ = gateway
    assert "not acknowledged" in logged_in.text()
    waiting = logged_in.js("document.querySelectorAll('.alert form[action$=acknowledge]').length")
    for left in range(waiting, 0, -1):
        logged_in.follow_link(".alert form[action$=acknowledge] button")
        assert "acknowledged by admin" in logged_in.text()
        assert logged_in.js("document.querySelectorAll('.alert form[action$=acknowledge]').length") == left - 1
    logged_in.go(f"{url}/dashboard/")
    assert "No unacknowledged alerts" in logged_in.text()


def test_the_operating_point_is_changed_and_saved(logged_in, gateway, clinic):
    url, _, _, app = gateway
    logged_in.go(f"{url}/dashboard/calibration")
    assert "Now: significance .01" in logged_in.text()
    logged_in.follow_link("table a[href*='at=0.05']")
    assert "Apply .05" in logged_in.text()
    logged_in.follow_link(".apply button")
    assert "The guard now uses significance .05" in logged_in.text() and "Now: significance .05" in logged_in.text()
    assert app.calibrated[0].significance == 0.05
    assert "# withholds what a question is too close to" in clinic.read_text()
    with open_app(clinic) as again:
        assert again.calibrated[0].significance == 0.05


def test_pages_work_by_keyboard(logged_in, gateway):
    url, *_ = gateway
    logged_in.go(f"{url}/dashboard/")
    skip = "document.querySelector('a, button, input, select')"
    assert logged_in.js(f"{skip}.className") == "skip"
    logged_in.js(f"{skip}.focus()")  # the element that the first Tab starts from depends on the browser
    logged_in.press("Enter", 13, "\r")
    logged_in.wait("document.activeElement.id === 'main' || location.hash === '#main'")
    seen = set()
    for _ in range(24):
        logged_in.press("Tab", 9)
        seen.add(logged_in.js("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"))
        outline = logged_in.js("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", logged_in.js("document.activeElement.outerHTML")
    assert {"7d", "Custom", "Guarded requests"} <= seen and any("flagged" in name for name in seen - {"Flagged"})


def test_a_chart_bar_opens_its_verdicts_by_keyboard(logged_in, gateway):
    logged_in.go(f"{gateway[0]}/dashboard/")
    logged_in.js("document.querySelector('#busy a.hit').focus()")
    wanted = logged_in.js("document.activeElement.getAttribute('aria-label')").split(": ")[1].split(" ")[0]
    logged_in.enter()
    assert logged_in.js("location.pathname") == "/dashboard/verdicts" and "since=" in logged_in.js("location.search")
    assert logged_in.js("document.querySelectorAll('#found tbody tr').length") == int(wanted)


def test_all_sources_of_the_quarantine_are_dropped_together(logged_in, gateway):
    logged_in.go(f"{gateway[0]}/dashboard/quarantine")
    logged_in.click("#bulk [data-all]")
    boxes = "[...document.querySelectorAll('input[form=bulk]')]"
    assert logged_in.js(f"{boxes}.length") == 2 and logged_in.js(f"{boxes}.every((b) => b.checked)")
    logged_in.follow_link("#bulk button.grave")
    assert "Dropped 2 sources." in logged_in.text()


@pytest.mark.parametrize("screen", SCREENS)
def test_no_page_is_wider_than_the_screen(logged_in, gateway, screen):
    logged_in.set_screen(SCREENS[screen])
    for page in PAGES:
        logged_in.go(f"{gateway[0]}/dashboard/{page}")
        assert logged_in.js("document.documentElement.scrollWidth <= innerWidth"), page
        assert logged_in.js("document.querySelectorAll('h1').length") == 1


@pytest.mark.parametrize("screen", SCREENS)
def test_no_column_of_the_verdicts_is_clipped(logged_in, gateway, screen):
    url, _, client, _ = gateway
    ask(url, client, f"Is this record in your files? {case_notes(60)[12][1]}", user="f3" * 24)
    logged_in.set_screen(SCREENS[screen])
    for page in ("", "verdicts", "verdicts?outcome=flagged", "requests", "clients", "enforcement", "documents"):
        logged_in.go(f"{url}/dashboard/{page}")
        assert logged_in.js(CLIPPED) == [], page


@pytest.mark.parametrize("dark", [False, True])
def test_texts_have_enough_contrast_in_light_and_dark_mode(logged_in, gateway, dark):
    logged_in.set_screen(1366, dark=dark)
    for page in PAGES:
        logged_in.go(f"{gateway[0]}/dashboard/{page}")
        assert logged_in.js(CONTRAST) == [], page


@pytest.mark.skipif(axe() is None, reason="there is no axe-core; run make test, or set AXE")
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_violation(logged_in, gateway, screen, dark):
    logged_in.set_screen(SCREENS[screen], dark=dark)
    details = (
        "verdicts/"
        + logged_in.js("fetch('/dashboard/verdicts').then((r) => r.text()).then((t) => t.match(/id=\"v-([^\"]+)/)[1])"),
    )
    for page in (*PAGES, *details):
        logged_in.go(f"{gateway[0]}/dashboard/{page}")
        assert logged_in.violations(axe()) == [], page


def test_all_pages_work_without_scripts(logged_in, gateway):
    url, *_ = gateway
    logged_in.scripts(False)
    try:
        logged_in.go(f"{url}/dashboard/verdicts?outcome=flagged")
        assert "Flagged" in logged_in.text()
        logged_in.follow_link("thead a[href*='sort=-score']")
        assert logged_in.js("document.querySelector('th[aria-sort=descending]').innerText").startswith("Score")
        logged_in.follow_link(".range a[href*='range=7d']")
        assert "outcome=flagged" in logged_in.js("location.search") and "sort=-score" in logged_in.js("location.search")
        logged_in.follow_link("svg a.hit")
        assert logged_in.js("document.querySelector('.range details').className") == "chosen"
    finally:
        logged_in.scripts(True)


def test_the_explorer_of_a_report_runs_inside_the_dashboard(logged_in, gateway, clinic):
    write_report(campaign(sessions=sessions(40)), clinic.parent / "redteam")
    logged_in.go(f"{gateway[0]}/dashboard/redteam")
    logged_in.follow_link("main a[href$='#attack=mba']")
    rows = "document.querySelectorAll('#explorer-list > li').length"
    logged_in.wait(f"{rows} > 0 && document.querySelector('[name=attack]').value === 'mba'")
    before = logged_in.js(rows)
    logged_in.js(
        "(() => { const e = document.querySelector('[name=search]'); e.value = 'notes/008';"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    logged_in.wait(f"{rows} === 1")
    logged_in.click("#explorer-list summary")
    logged_in.wait("document.querySelector('#explorer-list .turn')")
    assert before > 1 and "Guard on: no answer" in logged_in.text()
    assert logged_in.js("(() => { try { return document.cookie; } catch (e) { return 'refused'; } })()") == "refused"


def test_logout_ends_the_session(logged_in, gateway):
    logged_in.follow_link("form[action$=logout] button")
    logged_in.go(f"{gateway[0]}/dashboard/verdicts")
    assert "Admin API key" in logged_in.text()
