"""The dashboard in a real browser: log in, see a flagged question appear, acknowledge an alert, move the guard."""

from __future__ import annotations

import time

import httpx
import pytest

from casemate import config as configuration
from casemate.app import open_app
from casemate.demo.clinic import case_notes
from casemate.gateway.keys import Grant, Keys
from tests.browser import Browser, chromium
from tests.gateways import serving
from tests.seeded_clinic import live_through, settle

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="there is no Chromium; set CHROMIUM")]
SCREENS = {"desk": 1366, "phone": 390, "wall": 2560}
PAGES = ("", "verdicts", "topics", "canaries", "alerts", "redteam", "calibration", "documents", "quarantine")
CONTRAST = """
(() => {
  const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
  const light = ([r, g, b]) => {
    const f = [r, g, b].map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2];
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] === 1) return c;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const found = new Map();
  for (const e of document.querySelectorAll("main *, header *")) {
    if (e.closest("svg") || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    if (!e.getClientRects().length) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(parse(style.color)), light(behind(e))].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    const ratio = (a + 0.05) / (b + 0.05);
    const name = `${e.tagName}.${e.className}: ${e.textContent.slice(0, 30)}`;
    if (ratio < (large ? 3 : 4.5)) found.set(name, ratio.toFixed(2));
  }
  return [...found];
})()
"""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """A day at the clinic, with little: no red team."""
    settings = settle(tmp_path_factory.mktemp("clinic"), notes=60)
    live_through(settings, redteam=False, notes=60)
    return settings


@pytest.fixture(scope="module")
def gateway(clinic):
    """Address, the admin's key and a client's."""
    with open_app(clinic) as app:
        texts = [str(Keys(app.store).create(Grant(role, role))[1]) for role in ("admin", "client")]
        app.store.flush()
    app = open_app(configuration.changed(configuration.read(clinic), gateway={"port": 0}))
    with serving(app) as url:
        yield url, *texts, app


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture
def inside(browser, gateway):
    """A browser that is logged in; whatever it complains about fails the test."""
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


def ask(url, key, question):
    body = {"model": "casemate", "messages": [{"role": "user", "content": question}]}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200


def test_a_flagged_question_appears_by_itself(inside, gateway):
    url, _, client, _ = gateway
    inside.go(f"{url}/dashboard/")
    before = inside.js("document.querySelectorAll('#flagged tbody tr').length")
    first = inside.js("document.querySelector('#flagged tbody tr').id")
    begun = time.monotonic()
    ask(url, client, f"Is this record in your files? {case_notes(60)[40][1]}")
    inside.wait(f"document.querySelector('#flagged tbody tr').id !== '{first}'", 30)
    assert time.monotonic() - begun < 30 and before > 0
    assert "client" in inside.js("document.querySelector('#flagged tbody tr').innerText")
    inside.follow("#flagged tbody tr a")
    assert "Flagged by mirabel" in inside.text() and "closer to a document" in inside.text()


def test_an_alert_is_acknowledged(inside, gateway):
    url, *_ = gateway
    assert "nobody has acknowledged it" in inside.text()
    waiting = inside.js("document.querySelectorAll('form[action$=acknowledge]').length")
    for left in range(waiting, 0, -1):
        inside.follow("form[action$=acknowledge] button")
        assert "acknowledged by admin" in inside.text()
        assert inside.js("document.querySelectorAll('form[action$=acknowledge]').length") == left - 1
    inside.go(f"{url}/dashboard/")
    assert "No alert waits for anybody" in inside.text()


def test_the_operating_point_is_moved_and_kept(inside, gateway, clinic):
    url, _, _, app = gateway
    inside.go(f"{url}/dashboard/calibration")
    assert "Now: significance .01" in inside.text()
    inside.follow("table a[href*='at=0.05']")
    assert "Apply .05" in inside.text()
    inside.follow(".apply button")
    assert "The guard now goes by significance .05" in inside.text() and "Now: significance .05" in inside.text()
    assert app.calibrated.significance == 0.05
    assert "# withholds what a question is too close to" in clinic.read_text()
    with open_app(clinic) as again:
        assert again.calibrated.significance == 0.05


def test_pages_work_by_keyboard(inside, gateway):
    url, *_ = gateway
    inside.go(f"{url}/dashboard/")
    skip = "document.querySelector('a, button, input, select')"
    assert inside.js(f"{skip}.className") == "skip"
    inside.js(f"{skip}.focus()")  # browsers differ in where the first tab goes from
    inside.press("Enter", 13, "\r")
    inside.wait("document.activeElement.id === 'main' || location.hash === '#main'")
    seen = set()
    for _ in range(12):
        inside.press("Tab", 9)
        seen.add(inside.js("document.activeElement.innerText"))
        outline = inside.js("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", inside.js("document.activeElement.outerHTML")
    assert "Guarded requests" in seen


@pytest.mark.parametrize("screen", SCREENS)
def test_no_page_is_wider_than_the_screen(inside, gateway, screen):
    inside.look(SCREENS[screen])
    for page in PAGES:
        inside.go(f"{gateway[0]}/dashboard/{page}")
        assert inside.js("document.documentElement.scrollWidth <= innerWidth"), page
        assert inside.js("document.querySelectorAll('h1').length") == 1


@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out_by_day_and_night(inside, gateway, dark):
    inside.look(1366, dark=dark)
    for page in PAGES:
        inside.go(f"{gateway[0]}/dashboard/{page}")
        assert inside.js(CONTRAST) == [], page


def test_everything_works_without_scripts(inside, gateway):
    url, *_ = gateway
    inside.scripts(False)
    try:
        inside.go(f"{url}/dashboard/verdicts?flagged=yes")
        assert "Flagged" in inside.text()
    finally:
        inside.scripts(True)


def test_logging_out_closes_the_door(inside, gateway):
    inside.follow("form[action$=logout] button")
    inside.go(f"{gateway[0]}/dashboard/verdicts")
    assert "API key of an admin" in inside.text()
