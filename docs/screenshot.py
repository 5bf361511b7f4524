"""Makes the pictures of the documentation in a real browser. Needs Chromium.

``python docs/screenshot.py [FOLDER]`` makes dashboard.png: the overview of a day at the fictional clinic. All events
are real (tests/seeded_clinic.py); only their times are spread over a day. It takes some minutes, most of them for the
red team.

``python docs/screenshot.py casemate-demo/assessment.html`` makes assessment.png: the head of the report of the demo.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from casemate import config as configuration  # noqa: E402
from casemate.app import open_app  # noqa: E402
from casemate.demo.clinic import BENIGN_QUESTIONS  # noqa: E402
from tests.browser import Browser, chromium  # noqa: E402
from tests.gateways import key, serving  # noqa: E402
from tests.seeded_clinic import admin_key, prepare_clinic, simulate_day  # noqa: E402

IMAGES = ROOT / "docs/images"
WIDTH, HEIGHT = 1366, 1000
HEAD = 1280, 650
"""Width and height of the head of the report, in pixels."""
LARGEST = 300_000
"""Bytes."""


def dashboard(folder: Path) -> None:
    """Seeds, serves, logs in, and takes the picture."""
    settings = prepare_clinic(folder)
    if not (folder / "events.db").exists() or not (folder / "redteam").exists():
        simulate_day(settings)
    text = admin_key(settings)
    config = configuration.with_overrides(configuration.read(settings), gateway={"port": 0})
    app = open_app(config)
    with serving(app) as url, Browser() as browser:
        _ask(url, key(app))
        browser.set_screen(WIDTH, HEIGHT)
        browser.go(f"{url}/dashboard/")
        browser.type(text)
        browser.enter()
        browser.screenshot(IMAGES / "dashboard.png")


def assessment(report: Path) -> None:
    """Takes the picture of the head of a report."""
    with Browser() as browser:
        browser.set_screen(*HEAD)
        browser.go(report.resolve().as_uri())
        browser.screenshot(IMAGES / "assessment.png", whole=False)


def _check_size(name: str) -> None:
    picture = IMAGES / name
    size = picture.stat().st_size
    print(f"{picture.relative_to(ROOT)}: {size / 1000:.0f} kB")
    if size > LARGEST:
        sys.exit(f"that is more than {LARGEST / 1000:.0f} kB")


def _ask(url: str, text: str) -> None:
    """A few questions over HTTP, so that there are durations to be seen."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {text}"}, timeout=60) as http:
        for number, question in enumerate(BENIGN_QUESTIONS[:12]):
            body = {"model": "casemate", "messages": [{"role": "user", "content": question}], "stream": number % 2 == 0}
            while (answer := http.post("/v1/chat/completions", json=body)).status_code == 401:
                time.sleep(0.2)  # the key was just made
            answer.raise_for_status()


def main() -> None:
    """Makes the picture that is asked for."""
    if chromium() is None:
        sys.exit("there is no Chromium; install it, or set CHROMIUM to its path")
    if len(sys.argv) > 1 and sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if given and given.suffix == ".html":
        assessment(given)
        _check_size("assessment.png")
        return
    with tempfile.TemporaryDirectory() as place:
        dashboard(given or Path(place))
    _check_size("dashboard.png")


if __name__ == "__main__":
    main()
