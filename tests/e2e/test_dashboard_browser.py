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
from tests.seeded_clinic import live_through, settle

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
    """A short day at the clinic, without the red team."""
    settings = settle(tmp_path_factory.mktemp("clinic"), notes=60)
    live_through(settings, redteam=False, notes=60)
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
def inside(browser, gateway):
    """A browser that is logged in; script errors and policy violations fail the test."""
    url, admin, _, _ = gateway
    browser.look(1366)
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


def test_a_flagged_question_appears_without_a_reload(inside, gateway):
    url, _, client, _ = gateway
    inside.go(f"{url}/dashboard/")
    before = inside.js("document.querySelectorAll('#flagged tbody tr').length")
    first = inside.js("document.querySelector('#flagged tbody tr').id")
    begun = time.monotonic()
    ask(url, client, f"Is this record in your files? {case_notes(60)[40][1]}")
    inside.wait(f"document.querySelector('#flagged tbody tr').id !== '{first}'", 30)
    assert time.monotonic() - begun < 30 and before > 0
    assert "client" in inside.js("document.querySelector('#flagged tbody tr').innerText")
    inside.follow_link("#flagged tbody tr a")
    assert "Flagged by mirabel" in inside.text() and "closer to a document" in inside.text()


def test_an_alert_is_acknowledged(inside, gateway):
    url, *_ = gateway
    assert "not acknowledged" in inside.text()
    waiting = inside.js("document.querySelectorAll('.alert form[action$=acknowledge]').length")
    for left in range(waiting, 0, -1):
        inside.follow_link(".alert form[action$=acknowledge] button")
        assert "acknowledged by admin" in inside.text()
        assert inside.js("document.querySelectorAll('.alert form[action$=acknowledge]').length") == left - 1
    inside.go(f"{url}/dashboard/")
    assert "No unacknowledged alerts" in inside.text()


def test_the_operating_point_is_changed_and_saved(inside, gateway, clinic):
    url, _, _, app = gateway
    inside.go(f"{url}/dashboard/calibration")
    assert "Now: significance .01" in inside.text()
    inside.follow_link("table a[href*='at=0.05']")
    assert "Apply .05" in inside.text()
    inside.follow_link(".apply button")
    assert "The guard now uses significance .05" in inside.text() and "Now: significance .05" in inside.text()
    assert app.calibrated[0].significance == 0.05
    assert "# withholds what a question is too close to" in clinic.read_text()
    with open_app(clinic) as again:
        assert again.calibrated[0].significance == 0.05


def test_pages_work_by_keyboard(inside, gateway):
    url, *_ = gateway
    inside.go(f"{url}/dashboard/")
    skip = "document.querySelector('a, button, input, select')"
    assert inside.js(f"{skip}.className") == "skip"
    inside.js(f"{skip}.focus()")  # browsers differ in the element that the first Tab starts from
    inside.press("Enter", 13, "\r")
    inside.wait("document.activeElement.id === 'main' || location.hash === '#main'")
    seen = set()
    for _ in range(24):
        inside.press("Tab", 9)
        seen.add(inside.js("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"))
        outline = inside.js("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", inside.js("document.activeElement.outerHTML")
    assert {"7d", "Custom", "Guarded requests"} <= seen and any("flagged" in name for name in seen - {"Flagged"})


def test_a_bar_is_opened_by_keyboard(inside, gateway):
    inside.go(f"{gateway[0]}/dashboard/")
    inside.js("document.querySelector('#busy a.hit').focus()")
    wanted = inside.js("document.activeElement.getAttribute('aria-label')").split(": ")[1].split(" ")[0]
    inside.enter()
    assert inside.js("location.pathname") == "/dashboard/verdicts" and "since=" in inside.js("location.search")
    assert inside.js("document.querySelectorAll('#found tbody tr').length") == int(wanted)


def test_all_sources_of_the_quarantine_are_dropped_at_once(inside, gateway):
    inside.go(f"{gateway[0]}/dashboard/quarantine")
    inside.click("#bulk [data-all]")
    boxes = "[...document.querySelectorAll('input[form=bulk]')]"
    assert inside.js(f"{boxes}.length") == 2 and inside.js(f"{boxes}.every((b) => b.checked)")
    inside.follow_link("#bulk button.grave")
    assert "Dropped 2 sources." in inside.text()


@pytest.mark.parametrize("screen", SCREENS)
def test_no_page_is_wider_than_the_screen(inside, gateway, screen):
    inside.look(SCREENS[screen])
    for page in PAGES:
        inside.go(f"{gateway[0]}/dashboard/{page}")
        assert inside.js("document.documentElement.scrollWidth <= innerWidth"), page
        assert inside.js("document.querySelectorAll('h1').length") == 1


@pytest.mark.parametrize("screen", SCREENS)
def test_no_column_of_the_verdicts_is_clipped(inside, gateway, screen):
    url, _, client, _ = gateway
    ask(url, client, f"Is this record in your files? {case_notes(60)[12][1]}", user="f3" * 24)
    inside.look(SCREENS[screen])
    for page in ("", "verdicts", "verdicts?outcome=flagged", "requests", "clients", "enforcement", "documents"):
        inside.go(f"{url}/dashboard/{page}")
        assert inside.js(CLIPPED) == [], page


@pytest.mark.parametrize("dark", [False, True])
def test_texts_have_enough_contrast_in_light_and_dark_mode(inside, gateway, dark):
    inside.look(1366, dark=dark)
    for page in PAGES:
        inside.go(f"{gateway[0]}/dashboard/{page}")
        assert inside.js(CONTRAST) == [], page


@pytest.mark.skipif(axe() is None, reason="there is no axe-core; run make test, or set AXE")
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_violation(inside, gateway, screen, dark):
    inside.look(SCREENS[screen], dark=dark)
    details = (
        "verdicts/"
        + inside.js("fetch('/dashboard/verdicts').then((r) => r.text()).then((t) => t.match(/id=\"v-([^\"]+)/)[1])"),
    )
    for page in (*PAGES, *details):
        inside.go(f"{gateway[0]}/dashboard/{page}")
        assert inside.violations(axe()) == [], page


def test_everything_works_without_scripts(inside, gateway):
    url, *_ = gateway
    inside.scripts(False)
    try:
        inside.go(f"{url}/dashboard/verdicts?outcome=flagged")
        assert "Flagged" in inside.text()
        inside.follow_link("thead a[href*='sort=-score']")
        assert inside.js("document.querySelector('th[aria-sort=descending]').innerText").startswith("Score")
        inside.follow_link(".range a[href*='range=7d']")
        assert "outcome=flagged" in inside.js("location.search") and "sort=-score" in inside.js("location.search")
        inside.follow_link("svg a.hit")
        assert inside.js("document.querySelector('.range details').className") == "chosen"
    finally:
        inside.scripts(True)


def test_the_explorer_of_a_report_runs_inside_the_dashboard(inside, gateway, clinic):
    write_report(campaign(sessions=sessions(40)), clinic.parent / "redteam")
    inside.go(f"{gateway[0]}/dashboard/redteam")
    inside.follow_link("main a[href$='#attack=mba']")
    rows = "document.querySelectorAll('#explorer-list > li').length"
    inside.wait(f"{rows} > 0 && document.querySelector('[name=attack]').value === 'mba'")
    before = inside.js(rows)
    inside.js(
        "(() => { const e = document.querySelector('[name=search]'); e.value = 'notes/008';"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    inside.wait(f"{rows} === 1")
    inside.click("#explorer-list summary")
    inside.wait("document.querySelector('#explorer-list .turn')")
    assert before > 1 and "Guard on: no answer" in inside.text()
    assert inside.js("(() => { try { return document.cookie; } catch (e) { return 'refused'; } })()") == "refused"


def test_logout_ends_the_session(inside, gateway):
    inside.follow_link("form[action$=logout] button")
    inside.go(f"{gateway[0]}/dashboard/verdicts")
    assert "Admin API key" in inside.text()
