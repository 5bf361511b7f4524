"""The dashboard over HTTP: login, access control, pages and forms."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from base64 import urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import URL
from starlette.requests import Request

from casemate import config as configuration
from casemate.backends.event_stores.sql import SqlEventStore
from casemate.errors import BackendError, DataError
from casemate.gateway import operating_point
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.gateway.dashboard.disclosure import by_client as disclosed_by_client
from casemate.gateway.dashboard.documents import word_diff
from casemate.gateway.dashboard.records import FIRST, EventTail
from casemate.gateway.dashboard.requests import percentiles
from casemate.gateway.dashboard.session import (
    ALL_TENANTS,
    IDLE_S,
    MAX_AGE_S,
    MAX_SESSIONS,
    NOTES_COOKIE,
    SESSION_COOKIE,
    TRIES,
    SessionStore,
)
from casemate.gateway.dashboard.site import ACTIONS, PAGES
from casemate.gateway.dashboard.table import Column, Table, TableSpec
from casemate.gateway.dashboard.time_range import MAX_BINS, TimeRange, by_bin
from casemate.gateway.dashboard.topics import topic_name
from casemate.guard.audience import AudiencePolicy, EntitlementRule
from casemate.guard.client_state.withheld_documents import WithheldDocuments
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.stats import Estimate
from casemate.monitor.alerts.alert import Alert, AlertPhase, alert_to_event
from casemate.monitor.alerts.alerting_store import AlertingEventStore
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Deviation, Severity, result_to_event
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.poisoning.scoring import ScreeningResult
from casemate.monitor.service import trend_of_results
from casemate.monitor.trends.baseline import BASELINE_KIND, UPDATE_KIND
from casemate.monitor.trends.trend_page import draw_trend
from casemate.redteam.lab.results import Crawl, ExtractionResult, ExtractionSide
from casemate.redteam.reporting.files import target_folder, write_report
from casemate.reports import svg
from casemate.reports.format import percent, sample_rate
from casemate.types import Document, Event
from tests.campaigns import campaign, crawl_campaign
from tests.fakes import Memory, documents
from tests.gateways import HideNamed, chat, key, make, serving
from tests.waiting import wait_for

NOW = datetime.now(UTC)
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
SHOWN = [path for path in PAGES if "{" not in path and not path.endswith(("result", "report", "remove"))]


FLAGGED = {"form": "calibrated", "target": "", "reasons": ["closeness"], "withheld": ["d3"], "p": 0.004}


DOTS = re.compile(r'class="dots [a-z]+" d="([^"]*)"')


def verdict(number=0, flagged=False, **more):
    body = {
        "defense": "mirabel",
        "flagged": flagged,
        "action": "hide" if flagged else "none",
        "score": 3.0 if flagged else 1.0,
        "threshold": 2.0,
        "hidden": ["d3"] if flagged else [],
        "evidence": FLAGGED if flagged else {},
        "enforced": True,
        "request": f"r{number}",
        "client": "client-7",
        "tenant": "default",
        "k": 5,
    }
    return Event(f"verdict-{number}", NOW - timedelta(minutes=5) + timedelta(seconds=number), "verdict", body | more)


def alert(name="changed-1", **more):
    found = Alert(name, "changed", Severity.HIGH, "clinic", ("beds",), NOW, "something changed", ("it differs",))
    return alert_to_event(replace(found, **more), AlertPhase.OPENED, NOW, "run")


def result(canary="beds", run="clinic@2026-01-01T00:00:00Z", status=CanaryStatus.FAIL, **more):
    deviations = (Deviation("missing_phrase", "expected 96 beds"),) if status is CanaryStatus.FAIL else ()
    return CanaryResult(canary, run, NOW, status, deviations, documents=("d1",), sources=("d1",), scores=(0.5,), **more)


class Browser:
    """A browser without scripts."""

    opened: ClassVar[list] = []

    def __init__(self, url, **headers):
        self.http = httpx.Client(base_url=url, timeout=20, headers=headers)
        self.opened.append(self.http)

    def get(self, path, **more):
        return self.http.get(f"/dashboard{path}", **more)

    def login(self, text, **more):
        form = self.get("/login").text
        sent = {"csrf": re.search('name="csrf" value="([^"]*)"', form)[1], "key": text, "next": "", **more}
        return self.http.post("/dashboard/login", data=sent)

    def post(self, path, **fields):
        token = re.search('name="csrf" value="([^"]*)"', self.get("/").text)[1]
        return self.http.post(f"/dashboard{path}", data={"csrf": token} | fields)


@pytest.fixture(autouse=True)
def close_connections():
    """Closes all connections."""
    yield
    while Browser.opened:
        Browser.opened.pop().close()


@contextmanager
def logged_in(app, *events, labels=(), tenant="default"):
    """Serves a gateway with these events, and logs in with an admin key."""
    for one in events:
        app.store.append(one)
    text = key(app, "admin", "operator", labels=labels, tenant=tenant)
    app.store.flush()
    with serving(app) as url:
        browser = Browser(url)
        assert browser.login(text).status_code == 303
        yield browser


class TestLogin:
    def test_all_pages_require_a_login(self, tmp_path):
        with serving(make(tmp_path)) as url, httpx.Client(base_url=url) as http:
            for path in PAGES:
                answer = http.get(f"/dashboard{path.replace('{id}', 'x')}")
                assert answer.status_code == 303 and "/dashboard/login" in answer.headers["location"], path
            for path in ACTIONS:
                answer = http.post(f"/dashboard{path}", data={"id": "x", "csrf": "x"})
                assert answer.status_code == 303 and answer.headers["location"] == "/dashboard/login"

    def test_only_admin_keys_log_in_and_all_other_keys_get_the_same_response(self, tmp_path):
        app = make(tmp_path)
        made = ApiKeyStore(app.store)
        revoked_key, revoked_text = made.create(Grant("gone", "admin"))
        made.revoke(revoked_key.id)
        texts = [
            key(app),
            key(app, "metrics"),
            str(revoked_text),
            "cmk_0_x",
            "",
            "x" * 200,
            key(app, "admin")[:-1] + "!",
        ]
        app.store.flush()
        with serving(app) as url:
            responses = set()
            for text in texts:
                answer = Browser(url).login(text)
                assert answer.status_code == 403 and "casemate-session" not in answer.headers.get("set-cookie", "")
                responses.add(re.sub('value="[^"]*"', "", answer.text))
            assert len(responses) == 1

    def test_bearer_keys_give_no_access(self, tmp_path):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            answer = httpx.get(f"{url}/dashboard/", headers={"Authorization": f"Bearer {text}"})
            assert answer.status_code == 303

    def test_the_cookie_is_protected_from_scripts_and_other_sites(self, tmp_path):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            cookie = Browser(url).login(text).headers["set-cookie"]
            assert "casemate-session=" in cookie and "HttpOnly" in cookie and "SameSite=strict" in cookie
            assert "Path=/dashboard" in cookie

    def test_login_requests_from_another_site_are_refused(self, tmp_path):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            assert httpx.post(f"{url}/dashboard/login", data={"key": text}).status_code == 403
            assert Browser(url).login(text, csrf="0" * 64).status_code == 403
            other_site = Browser(url, **{"Sec-Fetch-Site": "cross-site"})
            assert other_site.login(text).status_code == 403

    def test_failed_logins_are_rate_limited(self, tmp_path):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            browser = Browser(url)
            assert {browser.login("wrong").status_code for _ in range(TRIES)} == {403}
            assert browser.login("wrong").status_code == 429
            assert browser.login(text).status_code == 303, "others must not lock the admin out"

    def test_a_revoked_key_ends_its_session(self, tmp_path):
        app = make(tmp_path)
        with logged_in(app) as browser:
            assert browser.get("/").status_code == 200
            keys = ApiKeyStore(app.store)
            keys.sync()
            keys.revoke(next(k.id for k in keys.all() if k.grant.role == "admin"))
            wait_for(lambda: browser.get("/").status_code == 303, 10)

    def test_logout_ends_the_session_on_the_server(self, tmp_path):
        with logged_in(make(tmp_path)) as browser:
            cookies = dict(browser.http.cookies)
            assert browser.post("/logout").status_code == 303
            browser.http.cookies.update(cookies)
            assert browser.get("/").status_code == 303

    @pytest.mark.parametrize(
        "address", ["//evil.example/", "https://evil.example", "/v1/models", "/dashboard/\\x", "/dashboard/logout"]
    )
    def test_login_redirects_only_to_the_dashboard(self, tmp_path, address):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            assert Browser(url).login(text, next=address).headers["location"] == "/dashboard/"
            assert Browser(url).login(text, next="/dashboard/alerts").headers["location"] == "/dashboard/alerts"

    def test_the_api_schema_does_not_contain_the_dashboard(self, tmp_path):
        with serving(make(tmp_path)) as url:
            assert "dashboard" not in httpx.get(f"{url}/openapi.json").text


def test_requests_without_a_login_do_not_occupy_the_threads_that_answer_questions(tmp_path, monkeypatch):
    released, waiting = threading.Event(), []

    def slow(*given):
        waiting.append(given)
        released.wait(10)

    monkeypatch.setattr(SessionStore, "find", slow)
    app = make(tmp_path)
    asked = {"Authorization": f"Bearer {key(app)}"}
    with serving(app) as url, ThreadPoolExecutor(34) as pool, httpx.Client(base_url=url, timeout=5) as http:
        cookie = {"Cookie": f"{SESSION_COOKIE}=x"}  # asyncio has at most 32 threads
        pages = [pool.submit(http.get, "/dashboard/", headers=cookie, timeout=20) for _ in range(34)]
        try:
            while len(waiting) < 2:
                time.sleep(0.01)
            time.sleep(0.2)  # the others arrive
            assert http.post("/v1/chat/completions", json=chat("only3"), headers=asked).status_code == 200
        finally:
            released.set()
        assert {page.result().status_code for page in pages} == {303}


class TestSessions:
    def test_sessions_expire_by_age_and_by_idle_time(self):
        clock, store = [1e9], Memory()
        sessions, admin = (
            SessionStore(store, ApiKeyStore(store), lambda: clock[0]),
            ApiKeyStore(store).create(Grant("a", "admin"))[0],
        )
        sessions._keys.sync()
        token, start = sessions.start(admin), clock[0]
        clock[0] = start + IDLE_S - 1
        assert sessions.find(token, touch=True)
        clock[0] = start + 2 * IDLE_S - 2
        assert sessions.find(token, touch=False)
        clock[0] += 2
        assert sessions.find(token, touch=False) is None, "an automatic update kept it alive"
        other = sessions.start(admin)
        start = clock[0]
        while clock[0] < start + MAX_AGE_S:
            assert sessions.find(other, touch=True)
            clock[0] += IDLE_S / 2
        clock[0] += 1
        assert sessions.find(other, touch=True) is None

    def test_the_number_of_sessions_is_limited(self):
        sessions, _, admin = self.two_session_stores(Memory())
        tokens = [sessions.start(admin) for _ in range(MAX_SESSIONS + 1)]
        assert sessions.find(tokens[0], touch=False) is None
        assert sessions.find(tokens[1], touch=False) and sessions.find(tokens[-1], touch=False)

    def test_session_ids_are_not_stored(self):
        store = Memory()
        sessions, _, admin = self.two_session_stores(store)
        token = sessions.start(admin)
        assert token not in repr(vars(sessions)) + repr(store.events)
        assert sessions.find(token + "x", touch=False) is None

    def test_sessions_are_shared_by_all_gateways(self):
        here, there, admin = self.two_session_stores(Memory())
        token = here.start(admin)
        assert there.find(token, touch=True).csrf == here.find(token, touch=True).csrf
        there.end(token)
        assert here.find(token, touch=True) is None

    def test_use_at_one_gateway_extends_the_session_at_the_others(self):
        clock = [1e9]
        here, there, admin = self.two_session_stores(Memory(), lambda: clock[0])
        token = here.start(admin)
        for _ in range(4):
            clock[0] += IDLE_S - 1
            assert there.find(token, touch=True)
        assert here.find(token, touch=False)

    def test_failed_logins_are_counted_over_all_gateways(self):
        here, there, _ = self.two_session_stores(Memory(clock=lambda: 0.0))
        for sessions in (here, there) * (TRIES // 2):
            assert sessions.may_try("10.0.0.1")
            sessions.record_failure("10.0.0.1")
        assert not here.may_try("10.0.0.1") and not there.may_try("10.0.0.1")
        assert there.may_try("10.0.0.2")

    def two_session_stores(self, store, clock=time.time):
        keys = ApiKeyStore(store)
        admin, _ = keys.create(Grant("a", "admin"))
        return SessionStore(store, keys, clock), SessionStore(store, keys, clock), admin


class TestPages:
    def test_empty_pages_show_instructions(self, tmp_path):
        app = make(tmp_path, count=0)
        with logged_in(app) as browser:
            for path in SHOWN:
                answer = browser.get(path)
                assert answer.status_code == 200, path
                assert 'class="empty"' in answer.text or path == "/", path
                assert "casemate" in answer.text.partition("<main")[2], path

    def test_hostile_text_is_escaped_and_pages_have_no_inline_scripts_or_styles(self, tmp_path):
        app = make(tmp_path, k=5)
        bad = replace(documents(1)[0], id="bad", source=HOSTILE, text=HOSTILE, title=HOSTILE)
        asyncio.run(app.guard.add([bad]))
        Quarantine(app.store).add(
            [ScreeningResult(replace(bad, source="q" + HOSTILE), 3.0, 2.0, (HOSTILE,))], "default"
        )
        write_report(replace(campaign(), id=HOSTILE, simulated=(HOSTILE,)), tmp_path / ".casemate/redteam")
        evidence = {HOSTILE: HOSTILE, "reasons": [HOSTILE], "withheld": [HOSTILE]}
        events = (
            verdict(1, True, client=HOSTILE, defense=HOSTILE, hidden=[HOSTILE], evidence=evidence, request=HOSTILE),
            alert(title=HOSTILE, canaries=(HOSTILE,), changes=(HOSTILE,), documents=(HOSTILE,), advice=(HOSTILE,)),
            result_to_event(replace(result(HOSTILE[:40].replace(" ", "")), error=HOSTILE, sources=(HOSTILE,))),
        )
        with logged_in(app, *events) as browser:
            asked = f"?client={HOSTILE}&source={HOSTILE}&at={HOSTILE}&run={HOSTILE}"
            paths = [*SHOWN, *(p + asked for p in SHOWN), "/verdicts/verdict-1", "/nothing", f"/{HOSTILE}"]
            for path in paths:
                answer = browser.get(path)
                assert answer.status_code in (200, 404), path
                inner = answer.text
                assert "<img" not in inner and "alert(1)</script>" not in inner, path
                assert re.findall('<script(?! src="/dashboard/static/)', inner) == [], path
                assert (
                    "<style" not in inner
                    and re.search(r"<[^>]*\s(style|on\w+)=", re.sub('"[^"]*"', '""', inner)) is None
                )
                policy = answer.headers["content-security-policy"]
                assert "unsafe" not in policy and "script-src 'self'" in policy

    def test_a_report_is_sandboxed(self, tmp_path):
        app = make(tmp_path)
        write_report(campaign(), tmp_path / ".casemate/redteam")
        with logged_in(app) as browser:
            assert "ROC curves" in browser.get("/redteam").text
            answer = browser.get("/redteam/report")
            assert answer.status_code == 200
            assert "sandbox" in answer.headers["content-security-policy"]
            policy = answer.headers["content-security-policy"]
            assert (
                "script-src 'sha256-" in policy
                and "allow-same-origin" not in policy
                and "script-src 'self'" not in policy
            )
            assert browser.get("/redteam/report?name=crawl").status_code == 404
            assert browser.get("/redteam/report?name=../report").status_code == 404

    def test_newest_campaign_is_compared_with_the_previous_one_and_crawls_are_plotted(self, tmp_path):
        app = make(tmp_path)
        folder = tmp_path / ".casemate/redteam"
        write_report(campaign(), folder)
        before = replace(campaign(), at="2020-01-01T00:00:00+00:00", attacks=campaign().attacks[:1])
        (folder / "2020.json").write_text(before.to_json(), "utf-8")
        made = crawl_campaign()
        (crawl,) = made.crawls
        reached = replace(
            crawl.by_target["off"], coverage=Estimate(0.6, 0.5, 0.7), curve=((0, 0.0, 0.0), (12, 0.6, 0.4))
        )
        bare = replace(made, crawls=(replace(crawl, by_target={"off": reached}),))
        (folder / "crawl.json").write_text(bare.to_json(), "utf-8")
        (folder / "broken.json").write_text("{")
        (folder / "dangling.json").symlink_to(folder / "missing.json")
        (folder / "other.json").write_text('{"crawls": [{"by_target": {"off": {"curve": [[1], "x", null]}}}, 3]}')
        with logged_in(app) as browser:
            page = browser.get("/redteam").text
            assert "Comparison with 2020.json" in page and "Earlier campaigns" in page
            assert "guard off: 60\u00a0% reached" in page and "310.0,87.2" in page

    def test_page_and_report_show_the_newest_crawl(self, tmp_path):
        app = make(tmp_path)
        folder = tmp_path / ".casemate/redteam"
        rate = Estimate(0.4, 0.3, 0.5)
        result = ExtractionResult(50, 9, 20, rate, rate, {}, {}, None, 0.5, None, None, None, rate, {}, {"50%": None})
        crawl = Crawl(
            "worm", "a paper", 7, 50, 1, "bag", {"on": replace(result, curve=((0, None, 0.0), (50, None, 0.4)))}
        )
        about = {"target": "http rag.example", "capabilities": ["answers"]}
        extracted = {"worm": {"on": ExtractionSide(50, rate, 0, 90, 3, 70, 60)}}
        live = {"live_answers": 2.0, "live_flops_honest": 3e9, "live_flops_honest_of_reference": 1.3}
        made = campaign(
            attacks=(), checks=(), crawls=(crawl,), extracted=extracted, evidence=about, cost={"questions": 50, **live}
        )
        write_report(made, folder, stem="crawl")
        with logged_in(app) as browser:
            page = browser.get("/redteam").text
            assert "guard on: 40\u00a0% recovered" in page and "310.0,124.8" in page
            assert "worm, guard on: 3 texts, 70 words" in page and "Target http rag.example" in page
            assert "3e+09 FLOPs each" in page
        text = write_report(campaign(), folder)["html"].read_text()
        assert "A separate campaign" in text and "http rag.example" in text and "<td>40 % [30, 50]</td>" in text
        alone = (folder / "crawl.html").read_text()
        assert "3e+09 FLOPs each" in alone and "A separate campaign" not in alone

    def test_reports_of_external_targets_are_listed_with_their_names(self, tmp_path):
        folder = tmp_path / ".casemate/redteam"
        for name in ("staging", "http rag.example"):
            write_report(campaign(evidence={"target": name}), target_folder(folder, name))
        crawled = campaign(attacks=(), crawls=crawl_campaign().crawls, evidence={"target": "staging"})
        write_report(crawled, target_folder(folder, "staging"), stem="crawl")
        with logged_in(make(tmp_path)) as browser:
            page = browser.get("/redteam").text
            rows = re.findall(
                'href="/dashboard(/redteam/report[^"]*)">([^<]*)</a></div></td><td[^>]*><div>([^<]*)', page
            )
            assert sorted(row[1:] for row in rows) == [
                ("http rag.example", "membership inference"),
                ("staging", "extraction"),
                ("staging", "membership inference"),
            ]
            for way, name, _ in rows:
                answer = browser.get(way.replace("&amp;", "&"))
                assert answer.status_code == 200 and name in answer.text
                assert "sandbox allow-scripts" in answer.headers["content-security-policy"]
            for bad in ("targets/../report", "targets/staging/../../report", "targets/staging/other"):
                assert browser.get("/redteam/report", params={"name": bad}).status_code == 404

    def test_the_topic_map_marks_withheld_chunks_and_is_computed_once(self, tmp_path):
        app = make(tmp_path, count=60)
        scans = []
        whole = app.index.scan
        app.index.scan = lambda tenant="default": scans.append(tenant) or whole(tenant)
        with logged_in(app, verdict(1, flagged=True), verdict(2, flagged=True)) as browser:
            pages = [browser.get("/topics").text for _ in range(2)]
            assert all(page.count("<title>d3: withheld, 2 times</title>") == 1 for page in pages)
            assert sum(page.count("h.01") for page in pages) == 120 and scans == ["default"]

    def test_observe_mode_verdicts_are_not_shown_as_withheld(self, tmp_path):
        app = make(tmp_path, count=60, mode="observe", defenses=(HideNamed("d3"),))
        client = ApiKeyStore(app.store).create(Grant("ann"))[0].id
        with logged_in(app, verdict(1, flagged=True, enforced=False)) as browser:
            pages = [browser.get(path).text for path in ("/topics", "/documents", "/clients")]
            assert "1 chunk would be withheld" in browser.post("/clients/view", client=client, question="only3").text
        assert "<title>d3: would have been withheld, 1 time</title>" in pages[0]
        assert ">Sources would have been withheld<" in pages[2]
        assert all(">Would have been withheld<" in page for page in pages[:2])
        both = (verdict(1, flagged=True, enforced=False), verdict(2, flagged=True))
        with logged_in(make(tmp_path / "both", count=60), *both) as browser:
            assert "<title>d3: withheld, or would have been in observe mode, 2 times<" in browser.get("/topics").text

    def test_pages_are_rendered_on_separate_threads(self, tmp_path, monkeypatch):
        app = make(tmp_path)
        names = set()
        latest = SqlEventStore.latest

        def noted(self, kind, count):
            names.add(threading.current_thread().name)
            return latest(self, kind, count)

        monkeypatch.setattr(SqlEventStore, "latest", noted)
        with logged_in(app) as browser:
            browser.get("/")
        assert names and all(name.startswith("casemate-dashboard") for name in names)

    def test_rates_are_shown_with_counts_and_intervals(self, tmp_path):
        with logged_in(make(tmp_path), *(verdict(i, flagged=i < 2) for i in range(8))) as browser:
            assert "2 of 8; 95 % interval 3.2 to 65.1 %" in browser.get("/").text

    def test_verdicts_can_be_filtered(self, tmp_path):
        events = [verdict(i, flagged=i == 3, client=f"client-{i}", defense="a" if i % 2 else "b") for i in range(6)]
        with logged_in(make(tmp_path), *events) as browser:
            for asked, wanted in (
                ("", {0, 1, 2, 3, 4, 5}),
                ("?outcome=flagged", {3}),
                ("?outcome=passed&defense=a", {1, 5}),
                ("?client=CLIENT-4", {4}),
                (
                    f"?since={(NOW - timedelta(minutes=5) + timedelta(seconds=4)).replace(tzinfo=None).isoformat()}",
                    {4, 5},
                ),
            ):
                found = set(map(int, re.findall('id="v-verdict-(\\d+)"', browser.get(f"/verdicts{asked}").text)))
                assert found == wanted, asked

    def test_canary_verdicts_are_shown_on_request(self, tmp_path):
        events = (verdict(1), verdict(2, client="canary-beds-clinic@2026-01-01T00:00:00Z"))
        with logged_in(make(tmp_path), *events) as browser:
            for asked, wanted in (("", {1}), ("?asker=canaries", {2}), ("?asker=all", {1, 2}), ("?client=beds", {2})):
                found = set(map(int, re.findall('id="v-verdict-(\\d+)"', browser.get(f"/verdicts{asked}").text)))
                assert found == wanted, asked

    def test_a_quarantine_alert_links_to_the_quarantine(self, tmp_path):
        app = make(tmp_path)
        store = AlertingEventStore(app.store)
        Quarantine(store).add([ScreeningResult(Document("evil#0", "x", source="evil"), 3.0, 2.0, ("odd",))], "default")
        with logged_in(app) as browser:
            page = browser.get("/alerts").text
        card = page[page.index('id="open"') :]
        assert 'href="/dashboard/quarantine"' in card and "Quarantined" in card
        assert "honeytoken" not in card and "in the answers" not in card and ">Canaries<" not in card

    def test_a_verdict_shows_reasons_and_withheld_chunks(self, tmp_path):
        with logged_in(make(tmp_path), verdict(1, flagged=True)) as browser:
            text = browser.get("/verdicts/verdict-1").text
            assert "Score 3.00, threshold 2.00. Higher is more suspicious." in text
            assert "closer to a document than benign questions are (" in text and "<code>d3</code>" in text
            assert browser.get("/verdicts/verdict-2").status_code == 404

    def test_verdict_without_a_score_shows_no_score(self, tmp_path):
        bare = verdict(1, defense="quorum", score=0.0, threshold=0.0)
        with logged_in(make(tmp_path), bare) as browser:
            listed, text = (browser.get(path).text for path in ("/verdicts", "/verdicts/verdict-1"))
        assert "no score" in listed and "0.00, threshold" not in listed and "score 0" not in text.lower()

    def test_overview_shows_only_scores_of_new_decisions(self, tmp_path):
        again = verdict(2, flagged=True, score=1.0, evidence={"reasons": ["before"], "withheld": ["d3"]})
        with logged_in(make(tmp_path), verdict(1, flagged=True), again) as browser:
            page = browser.get("/").text
        assert "score 3.00, threshold 2.00" in page and "score 1.00" not in page

    def test_requests_that_repeat_an_earlier_decision_are_counted_separately_on_all_pages(self, tmp_path):
        repeated = {"score": 1.0, "evidence": {"reasons": ["before"], "withheld": ["d3"]}}
        again = [verdict(i, flagged=True, **repeated) for i in (2, 3)]
        app = make(tmp_path, defenses=[Mirabel(mode="paper")])
        with logged_in(app, verdict(0), verdict(1, flagged=True), *again) as browser:
            pages = [browser.get(path).text for path in ("/", "/verdicts", "/calibration")]
            clients = browser.get("/clients").text
            new, old = (browser.get(f"/verdicts?outcome={outcome}").text for outcome in ("flagged", "again"))
        assert all("1 of 4; 95 % interval 0.6 to 80.6 %; 2 more only withheld again" in page for page in pages)
        assert (pages[1].count(">Withheld again<"), pages[1].count(">Flagged<")) == (2, 1)
        assert "4 requests over time, 1 of them flagged" in pages[0] and pages[0].count('<tr id="v-') == 1
        assert "1 of 4" in pages[0] and ">2 withheld again<" in clients and ">25\u00a0%<" in clients
        assert [page.count('<tr id="v-') for page in (new, old)] == [1, 2]

    def test_a_request_with_several_verdicts_is_one_flagged_request(self, tmp_path):
        """The flagged request has two queries and two defenses; the other request is not flagged."""
        same = {"request": "r1", "hidden": ["d1", "d2"]}
        crawl = verdict(3, flagged=True, defense="crawl_limit", **same)
        events = (verdict(1, flagged=True), verdict(2, flagged=True, **same), crawl, verdict(4))
        with logged_in(make(tmp_path, defenses=[Mirabel(mode="paper")]), *events) as browser:
            overview, clients, page = (browser.get(path).text for path in ("/", "/clients", "/calibration"))
        assert overview.count('<tr id="v-') == 1 and 'id="v-verdict-2"' in overview
        assert "mirabel 1, crawl_limit 1" in clients or "crawl_limit 1, mirabel 1" in clients
        assert "1 of 2" in overview and "(1 of 2;" in page

    def test_evidence_above_the_alarm_limit_is_shown_as_above_the_limit(self, tmp_path):
        alarmed = verdict(1, defense="crawl_limit", score=1e100, threshold=100_000.0, flagged=True)
        with logged_in(make(tmp_path), alarmed) as browser:
            pages = [browser.get(path).text for path in ("/verdicts", "/verdicts/verdict-1", "/")]
        assert all("evidence above 100,000" in page.lower() and "00000.0" not in page for page in pages)

    def test_evidence_is_plotted_on_a_logarithmic_scale_with_an_upper_limit(self, tmp_path):
        """Evidence 1, 1,000 and 1e30 with an alarm above 1e5: the last is drawn at 1e11, six orders above the alarm."""
        crawl = {"defense": "crawl_limit", "threshold": 100_000.0}
        events = [verdict(i, score=score, flagged=score > 1e5, **crawl) for i, score in enumerate((1.0, 1e3, 1e30))]
        with logged_in(make(tmp_path), *events) as browser:
            page = browser.get("/verdicts").text
        heights = [float(y) for y in re.findall(r"M[\d.]+,([\d.]+)", "".join(DOTS.findall(page)))]
        assert len(heights) == 3
        low, middle, high = sorted(heights, reverse=True)
        assert (low - middle) / (low - high) == pytest.approx(3 / 11, abs=0.01)

    def test_each_of_several_defenses_has_its_own_scale(self, tmp_path):
        crawl = {"defense": "crawl_limit", "score": 1.0, "threshold": 100_000.0}
        events = (verdict(0), verdict(1, flagged=True), verdict(2, **crawl), verdict(3, **crawl))
        with logged_in(make(tmp_path), *events) as browser:
            both, one = (browser.get(path).text for path in ("/verdicts", "/verdicts?defense=crawl_limit"))
        assert "far above" in both and "+99999.00" not in both
        assert "far above" in one and "99999.00" not in one
        assert "evidence 1 of 100,000" in one and "3.00, threshold 2.00" in both
        dots = "".join(DOTS.findall(both))
        assert len(set(re.findall(r"M[\d.]+,([\d.]+)", dots))) == 2, (
            "the largest distance of each defense reaches an end of the axis"
        )

    def test_verdict_page_shows_what_its_defense_withheld(self, tmp_path):
        leak = {"defense": "honeytoken", "action": "withhold", "hidden": [], "evidence": {"what": "leaked"}}
        failure = {"action": "withhold", "threshold": None, "evidence": {"error": "OSError"}}
        crawl = verdict(3, flagged=True, defense="crawl_limit")
        events = (verdict(0, flagged=True), verdict(1, **leak), verdict(2, **failure), crawl, verdict(4))
        with logged_in(make(tmp_path), *events) as browser:
            texts = [browser.get(f"/verdicts/verdict-{i}").text for i in range(len(events))]
        said = (
            "replaced them",
            "it was cut",
            "The whole context",
            "not in the context",
            "This defense withheld nothing",
        )
        assert [[part in text for part in said] for text in texts] == [
            [True, False, False, True, False],
            [False, True, False, False, False],
            [False, False, True, False, False],
            [False, False, False, True, False],
            [False, False, False, False, True],
        ]

    def test_questions_are_shown_only_with_privacy_log_text(self, tmp_path):
        for allowed in (False, True):
            folder = tmp_path / str(allowed)
            folder.mkdir()
            app = make(folder)
            app = replace(app, config=configuration.with_overrides(app.config, privacy={"log_text": allowed}))
            with logged_in(app, verdict(1, text="what was asked")) as browser:
                assert ("what was asked" in browser.get("/verdicts/verdict-1").text) is allowed

    def test_missed_canary_runs_are_shown(self, tmp_path):
        body = {"set": "clinic", "state": "missed", "count": 3, "last": NOW.timestamp() + 60}
        first = datetime(2026, 3, 1, 7, tzinfo=UTC).timestamp()
        events = [result_to_event(result()), Event("m", NOW, "canary-slot", body | {"first": first}),
                  Event("b", NOW, "canary-slot", body | {"state": "begun", "run": "r", "canaries": [], "slot": 0}),
                  Event("o", NOW, "canary-slot", body | {"first": first, "set": "other"})]  # fmt: skip
        with logged_in(make(tmp_path), *events) as browser:
            page = browser.get("/canaries").text
        assert page.count("Missed 3 runs from 01 Mar 07:00 to") == 1

    def test_canary_marks_link_to_deviations(self, tmp_path):
        events = [result_to_event(result()), result_to_event(result("fees", status=CanaryStatus.PASS))]
        with logged_in(make(tmp_path), *events) as browser:
            page = browser.get("/canaries").text
            way = re.search('href="/dashboard(/canaries/result[^"]*beds)"', page)[1].replace("&amp;", "&")
            assert "expected 96 beds" in browser.get(way).text
            assert "1 of 1" in page and "0 of 1" in page

    def test_a_set_has_the_plots_of_the_report(self, tmp_path):
        """A canary that fails in the second half: plot, alarm, and a link from each run to the matrix."""
        text = "name: clinic\ncanaries:\n" + "".join(
            f"- {{id: {name}, query: 'How many?', expected_answer_contains: [x]}}\n" for name in ("beds", "fees")
        )
        (tmp_path / "canaries.yaml").write_text(text)
        status = {True: CanaryStatus.FAIL, False: CanaryStatus.PASS}
        rows = [
            replace(result(name, f"clinic@{h:02}", status[name == "beds" and h > 11]), at=NOW - timedelta(hours=24 - h))
            for h in range(24)
            for name in ("beds", "fees")
        ]
        app = make(tmp_path)
        with logged_in(app, *map(result_to_event, rows)) as browser:
            way = re.search('href="/dashboard(/canaries/trend[^"]*)"', browser.get("/canaries?range=7d").text)[1]
            page = browser.get(way.replace("&amp;", "&")).text
            drawn = draw_trend(trend_of_results(app, "clinic", rows, {}))
            assert len(drawn.plots) == 1 and str(drawn.plots[0].image) in page
            assert drawn.headline in page and "there is no band" in page
            assert browser.get("/static/trend.css").status_code == 200
            run = re.search('<a href="/dashboard(/canaries[^"]*)" aria-label="Run of', page)[1].replace("&amp;", "&")
            assert browser.get(run).text.count('<th scope="col"><span>') == 1

    def test_missing_plots_show_the_reason(self, tmp_path):
        with logged_in(make(tmp_path), result_to_event(result())) as browser:
            assert "No canary of this set ran" in browser.get("/canaries/trend?set=other").text
            assert "cannot read the canaries" in browser.get("/canaries/trend?set=clinic").text
            (tmp_path / "canaries.yaml").write_text("- {id: a, query: Why, expected_answer: b}")
            assert "plots need the file of the set" in browser.get("/canaries/trend?set=clinic").text

    def test_live_pages_update_and_are_rendered_only_after_new_events(self, tmp_path):
        app = make(tmp_path)
        with logged_in(app, verdict(1)) as browser:
            first = browser.get("/verdicts")
            headers = {"X-Live": "1", "If-None-Match": first.headers["etag"]}
            answers = [browser.get("/verdicts", headers=headers) for _ in range(2)]
            assert any(a.status_code == 304 and not a.content for a in answers)  # unless a new version began
            app.store.append(verdict(2, flagged=True))
            wait_for(lambda: "v-verdict-2" in browser.get("/verdicts", headers=headers).text)

    def test_store_failure_is_reported_without_a_traceback(self, tmp_path, monkeypatch):
        app = make(tmp_path)
        with logged_in(app) as browser:

            def broken(self, kind, count):
                raise BackendError("the store is away", backend="store", retryable=True)

            monkeypatch.setattr(SqlEventStore, "latest", broken)
            wait_for(lambda: browser.get("/").status_code == 503)
            text = browser.get("/").text
            assert "the store is away" in text and "Traceback" not in text


class TestForms:
    def test_forms_without_a_valid_token_are_refused(self, tmp_path):
        app = make(tmp_path)
        with logged_in(app, alert()) as browser:
            sent = {"id": "changed-1"}
            assert browser.http.post("/dashboard/alerts/acknowledge", data=sent).status_code == 403
            assert browser.http.post("/dashboard/alerts/acknowledge", data=sent | {"csrf": "x"}).status_code == 403
            browser.http.headers["Sec-Fetch-Site"] = "cross-site"
            assert browser.post("/alerts/acknowledge", **sent).status_code == 403
            assert "not acknowledged" in browser.get("/alerts").text

    def test_acknowledge_and_close_an_alert(self, tmp_path):
        with logged_in(make(tmp_path), alert()) as browser:
            assert browser.post("/alerts/acknowledge", id="changed-1").headers["location"] == "/dashboard/alerts"
            assert "acknowledged by operator" in browser.get("/alerts").text
            browser.post("/alerts/close", id="changed-1", reason="it was a drill")
            page = browser.get("/alerts").text
            assert "No alert is open." in page and "it was a drill" in page
            assert browser.post("/alerts/close", id="changed-1", reason="again").status_code == 409

    def test_a_client_is_reset(self, tmp_path):
        app = make(tmp_path)
        held = WithheldDocuments("mirabel", 3600.0, app.store)
        held.add("default", "client-7", "d3")
        with logged_in(app, verdict(1, flagged=True), verdict(2)) as browser:
            assert "Reset the client" not in browser.get("/verdicts/verdict-2").text
            assert "Reset the client" in browser.get("/verdicts/verdict-1").text
            fields = {"verdict": "verdict-1"}
            theirs, own = (json.dumps([tenant, "client-7"]) for tenant in ("other", "default"))
            assert browser.post("/clients/reset", selected=theirs, **fields).status_code == 403
            for damaged in ("{", "[" * 5_000):
                assert browser.post("/clients/reset", selected=damaged, **fields).status_code == 400
            done = browser.post("/clients/reset", selected=own, **fields)
            assert done.headers["location"] == "/dashboard/verdicts/verdict-1"
            assert "Reset 1 client, from the next question on: client-7." in browser.get("/verdicts/verdict-1").text
            held.sync()
            assert held.sources("default", "client-7") == frozenset()

    def test_remove_a_source(self, tmp_path):
        app = make(tmp_path)
        with logged_in(app) as browser:
            assert "d3" in browser.get("/documents?source=d3").text
            assert "Remove 1 source" in browser.get("/documents/remove?source=d3&tenant=default").text
            assert "d3" in app.index.digests(), "the confirmation page removed it"
            app.store.append(Event("baseline", NOW, BASELINE_KIND, {"set": "none"}))
            app.store.flush()
            assert browser.post("/documents/remove", selected="d3", tenant="default").status_code == 303
            assert "d3" not in app.index.digests()
            assert browser.post("/documents/remove", selected="d3", tenant="default").status_code == 404
            assert [e.body["sources"] for e in app.store.scan(UPDATE_KIND)] == [["d3"]]

    def test_quarantined_sources_are_released_and_dropped(self, tmp_path):
        app = make(tmp_path)
        held = [
            Quarantine(app.store).add([ScreeningResult(Document(n, f"{n} text"), 3.0, 2.0, ("odd",))], "default")
            for n in ("good", "evil")
        ]
        with logged_in(app) as browser:
            browser.post("/quarantine/release", selected=held[0].key)
            browser.post("/quarantine/drop", selected=held[1].key)
            assert "good" in app.index.digests() and "evil" not in app.index.digests()
            assert {h.source: h.state for h in Quarantine(app.store).all().values()} == {
                "good": "released",
                "evil": "dropped",
            }
            assert browser.post("/quarantine/drop", selected=held[0].key).status_code == 409

    @pytest.mark.parametrize(
        ("gate", "expected"), [(True, "off until the index has 500 chunks (now 40)"), (False, "Set monitor.gate: true")]
    )
    def test_empty_quarantine_page_gives_the_reason_if_screening_is_off(self, gate, expected, tmp_path):
        app = make(tmp_path)
        app = replace(app, config=configuration.with_overrides(app.config, monitor={"gate": gate}))
        with logged_in(app) as browser:
            page = browser.get("/quarantine").text
        assert expected in page and "look like poisoning are quarantined" not in page

    def test_a_quarantined_source_is_compared_with_its_indexed_version(self, tmp_path):
        app = make(tmp_path)
        asyncio.run(app.guard.add([Document("toll#1", "The toll is due on Mondays.", source="toll")]))
        changed = Document("toll#2", f"The toll was abolished on Mondays. {HOSTILE}", source="toll")
        found = Quarantine(app.store).add([ScreeningResult(changed, 3.0, 2.0, ("odd",))], "default")
        other = Quarantine(app.store).add([ScreeningResult(Document("n", "only7"), 3.0, 2.0, ("odd",))], "other")
        with logged_in(app) as browser:
            assert f'href="/dashboard/quarantine/{found.key}"' in browser.get("/quarantine").text
            page = browser.get(f"/quarantine/{found.key}").text
            assert "<del>is due </del><ins>was abolished </ins>on Mondays." in page and "indexed version" in page
            assert "<script>alert" not in page and "which the new one would replace" in page
            assert browser.get(f"/quarantine/{other.key}").status_code == 404  # another tenant's
            assert browser.get("/quarantine/nothing").status_code == 404

    @given(st.text("ab \n", max_size=40), st.text("ab \n", max_size=40))
    def test_parts_of_a_comparison_reconstruct_both_texts(self, before, after):
        parts = word_diff(before, after)
        assert "".join(text for kind, text in parts if kind != "removed") == after
        assert [word for kind, text in parts if kind != "added" for word in text.split()] == before.split()

    def test_long_forms_are_refused(self, tmp_path):
        with logged_in(make(tmp_path), alert()) as browser:
            assert browser.post("/alerts/close", id="changed-1", reason="x" * 30_000).status_code == 413


def test_a_cookie_with_messages_that_another_site_has_set_breaks_no_page(tmp_path):
    with logged_in(make(tmp_path)) as visitor:
        for content in (b"[" * 30_000, b"[[1]]", b"{", b"\xff", b'[["good", "<img src=x onerror=alert(3)>"]]'):
            visitor.http.cookies.set(NOTES_COOKIE, urlsafe_b64encode(content).decode(), path="/dashboard")
            page = visitor.get("/verdicts")
            assert page.status_code == 200 and "<img" not in page.text


class TestTenants:
    def test_tenants_are_separated(self, tmp_path):
        app = make(tmp_path)
        asyncio.run(app.guard.add([Document("theirs", "their text")], "b"))
        held = Quarantine(app.store).add([ScreeningResult(Document("new", "x"), 3.0, 2.0, ("odd",))], "default")
        with logged_in(app, verdict(1, True), verdict(2, True, tenant="b"), alert(), tenant="b") as browser:
            page = browser.get("/verdicts?tenant=default").text
            assert "v-verdict-2" in page and "v-verdict-1" not in page
            assert browser.get("/verdicts/verdict-1").status_code == 404
            assert "theirs" in browser.get("/documents?tenant=default").text
            assert "No source name contains this text" in browser.get("/documents?tenant=default&source=d3").text
            assert browser.post("/documents/remove", selected="d3", tenant="default").status_code == 403
            assert browser.post("/quarantine/release", selected=held.key).status_code == 404
            for path in ("/alerts", "/canaries", "/redteam", "/canaries/result", "/redteam/report"):
                assert browser.get(path).status_code == 403, path
            assert browser.post("/alerts/acknowledge", id="changed-1").status_code == 403
            assert browser.post("/calibration/apply", significance="0.5").status_code == 403
            assert "something changed" not in browser.get("/").text

    def test_key_of_all_tenants_can_view_each_tenant(self, tmp_path):
        app = make(tmp_path)
        asyncio.run(app.guard.add([Document("theirs", "their text")], "b"))
        with logged_in(app, verdict(1), verdict(2, tenant="b"), labels=(ALL_TENANTS,)) as browser:
            page = browser.get("/verdicts").text
            assert "v-verdict-2" in page and "v-verdict-1" in page
            assert "theirs" in browser.get("/documents?tenant=b").text


class TestOperatingPoint:
    def test_a_change_takes_effect_at_once_and_is_recorded(self, tmp_path):
        defense = Mirabel(mode="paper", significance=0.05)
        app = make(tmp_path, defenses=[defense])
        with logged_in(app) as browser:
            assert "Apply" in browser.get("/calibration?at=0.2").text
            browser.post("/calibration/apply", significance="0.2")
            assert defense.significance == 0.2
            page = browser.get("/calibration").text
            assert "The guard now uses significance .2" in page and "This holds until the gateway stops" in page
            (noted,) = app.store.scan("setting")
            assert (noted.body["before"], noted.body["after"]) == (0.05, 0.2) and "operator" in noted.body["by"]
            for wrong in ("0", "1", "nan", "inf", "x", ""):
                assert browser.post("/calibration/apply", significance=wrong).status_code == 409
            assert defense.significance == 0.2

    def test_canary_verdicts_are_not_counted(self, tmp_path):
        events = (verdict(1), *(verdict(n, client=f"canary-beds-{n}") for n in range(2, 9)))
        with logged_in(make(tmp_path, defenses=[Mirabel(mode="paper")]), *events) as browser:
            assert "(0 of 1;" in browser.get("/calibration").text

    @pytest.mark.parametrize(
        "text",
        [
            "rag: {k: 3}\n",
            "",
            "# mine\nguard:\n  mode: observe # for now\n",
            "guard: {mode: observe}\n",
            "guard:\n  defenses: [mirabel]\n",
            "guard:\n  defenses:\n    - mirabel # first\n    - reindex\n",
            "guard:\n  defenses:\n    - name: mirabel\n      mode: paper # as printed\nrag: {k: 3}\n",
            "guard:\n  defenses:\n    - {use: mirabel, significance: .05}\n",
            "guard: {defenses: [{significance: 0.05, use: mirabel}]}\n",
            "guard:\n  defenses:\n  - significance: 0.5 # high\n    use: mirabel\nstore: {use: sql, url: '${DB}'}\n",
        ],
    )
    def test_change_is_written_to_the_configuration_and_other_settings_are_unchanged(self, tmp_path, monkeypatch, text):
        monkeypatch.setenv("DB", "sqlite:///x.db")
        path = tmp_path / "casemate.yaml"
        path.write_text(text)
        path.chmod(0o640)
        before = configuration.read(path)
        assert operating_point.write_config(path, "mirabel", 0.02) == ""
        after = configuration.read(path)
        part = next(p for p in after.guard.defenses if p.use == "mirabel")
        assert part.options["significance"] == 0.02
        others = [p.options | {"significance": None} for p in after.guard.defenses]
        assert others == [p.options | {"significance": None} for p in before.guard.defenses]
        assert after.model_dump(exclude={"guard"}) == before.model_dump(exclude={"guard"})
        assert after.guard.mode == before.guard.mode
        assert re.findall("#.*", path.read_text()) == re.findall("#.*", text) and path.stat().st_mode & 0o777 == 0o640
        assert ("${DB}" in path.read_text()) is ("${DB}" in text)

    @pytest.mark.parametrize(
        "text", ["guard: [", "guard: {defenses: []}\n", "guard: {defenses: [reindex]}\n", "rag: {what: 1}"]
    )
    def test_a_file_that_cannot_be_edited_safely_is_unchanged(self, tmp_path, text):
        path = tmp_path / "casemate.yaml"
        path.write_text(text)
        assert operating_point.write_config(path, "mirabel", 0.02) and path.read_text() == text
        assert operating_point.write_config(tmp_path / "none.yaml", "mirabel", 0.02)

    def test_change_requires_a_calibrated_defense(self, tmp_path):
        with (
            make(tmp_path) as app,
            pytest.raises(DataError, match="no defense has an operating point; add a calibrated one"),
        ):
            operating_point.change(app, 0.1, "me")


class TestEnforcement:
    def test_page_shows_what_would_be_withheld_and_switches_the_mode(self, tmp_path):
        path = tmp_path / "other.yaml"
        path.write_text("guard:\n  mode: observe # mine\nmonitor: {gate: observe}\n")
        app = make(tmp_path, mode="observe")
        app.config._file = path  # the file of the option --config
        observed = {"enforced": False, "client": HOSTILE}
        with logged_in(app, verdict(1, **observed), verdict(2, flagged=True, **observed), verdict(3)) as browser:
            assert "/dashboard/enforcement" in browser.get("/").text
            page = browser.get("/enforcement").text
            assert "The guard observes" in page and "1 of 2" in page and "r2" in page and HOSTILE not in page
            browser.post("/enforcement/switch", mode="enforce")
            assert (app.mode, app.guard.enforce) == ("enforce", True)
            assert "Enforcement is on" in browser.get("/enforcement").text
            assert "The guard is on" in browser.get("/").text
            (noted,) = app.store.scan("setting")
            assert noted.body["after"] == "enforce" and "operator" in noted.body["by"]
            written = configuration.read(path)
            assert (written.guard.mode, written.monitor.gate) == ("enforce", True) and "# mine" in path.read_text()
            browser.post("/enforcement/switch", mode="observe")
            assert app.mode == "observe" and configuration.read(path).guard.mode == "observe"

    def test_switch_requires_a_key_for_the_whole_installation(self, tmp_path):
        app = make(tmp_path, mode="observe")
        with logged_in(app, tenant="b") as browser:
            assert browser.get("/enforcement").status_code == 403
            assert browser.post("/enforcement/switch", mode="enforce").status_code == 403
            assert app.mode == "observe"

    def test_the_guard_of_a_gateway_with_agent_memory_is_not_switched_off(self, tmp_path):
        app = make(tmp_path, agent_memory=True)
        with logged_in(app) as visitor:
            found = visitor.post("/enforcement/switch", mode="observe")
            assert found.status_code == 409 and "agent memory needs enforcement" in found.text
            assert app.mode == "enforce" and not app.store.scan("setting")

    def test_a_host_header_does_not_change_what_a_form_needs(self, tmp_path, monkeypatch):
        """Older versions of Starlette copy the header into ``Request.url`` as it is."""
        url = property(lambda http: URL(f"http://{http.headers['host']}{http.scope['path']}"))
        monkeypatch.setattr(Request, "url", url)
        app = make(tmp_path, mode="observe")
        with logged_in(app, tenant="b") as visitor:
            visitor.http.headers["host"] = "host/clients?"
            assert visitor.post("/enforcement/switch", mode="enforce").status_code == 403
            assert app.mode == "observe"

    @pytest.mark.parametrize("unentitled", ["full", "nothing"])
    def test_overview_warns_that_the_audience_policy_is_not_enforced(self, unentitled, tmp_path):
        app = make(tmp_path, mode="observe")
        app.guard.audience = AudiencePolicy(unentitled)
        with logged_in(app) as browser:
            page = browser.get("/").text
            assert ("The audience policy is not carried out" in page) == (unentitled == "nothing")

    def test_a_guard_that_is_off_is_not_switched(self, tmp_path):
        app = make(tmp_path, mode="off")
        with logged_in(app) as browser:
            assert "The guard is off" in browser.get("/enforcement").text
            assert browser.post("/enforcement/switch", mode="enforce").status_code == 409
            assert app.mode == "off"


class TestEventTail:
    @given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 50))
    def test_tail_contains_the_newest_events_in_order(self, batches, keep):
        store, tail, written = Memory(), None, []
        tail = EventTail(store, "verdict", keep, lambda e: e.id)
        for size in batches:
            fresh = [Event(f"e{len(written) + i}", NOW, "verdict", {}) for i in range(size)]
            for one in fresh:
                store.append(one)
                store.append(replace(one, id=f"other-{one.id}", kind="other"))
            written += [e.id for e in fresh]
            assert tail.sync() is bool(fresh)
            assert tail.all == written[-keep:]

    def test_tail_reads_a_small_part_of_a_large_store(self):
        store = Memory([Event(f"e{i}", NOW, "verdict", {}) for i in range(5000)])
        counts = []
        store.latest = lambda kind, count: counts.append(count) or store.events[-count:]
        tail = EventTail(store, "verdict", 3000, lambda e: e.id)
        tail.sync()
        assert len(tail.all) == 3000 and tail.full and max(counts) <= 3000
        counts.clear()
        store.events += [Event(f"n{i}", NOW, "verdict", {}) for i in range(20)]
        tail.sync()
        assert counts == [FIRST] and tail.all[-20:] == [f"n{i}" for i in range(20)] and len(tail.all) == 3000

    def test_unreadable_event_is_skipped(self, caplog):
        store = Memory([Event("a", NOW, "verdict", {}), Event("b", NOW, "verdict", {"x": 1})])
        tail = EventTail(store, "verdict", 10, lambda e: e.body["x"])
        tail.sync()
        assert tail.all == [1] and not tail.sync()

    @pytest.mark.slow
    @given(st.lists(st.sampled_from(["a", "b"]), max_size=30), st.integers(0, 35))
    def test_latest_returns_the_same_events_as_a_scan(self, tmp_path_factory, kinds, count):
        store = SqlEventStore(path=tmp_path_factory.mktemp("store") / "events.db")
        for i, kind in enumerate(kinds):
            store.append(Event(f"e{i}", NOW, kind, {"i": i}))
        wanted = list(store.scan("a"))
        assert list(store.latest("a", count)) == (wanted[-count:] if count else [])
        store.close()


class TestTimeRange:
    @pytest.mark.parametrize(("name", "hours"), [("", 24), ("1h", 1), ("24h", 24), ("7d", 168), ("30d", 720)])
    def test_a_relative_range_ends_now_and_contains_later_events(self, name, hours):
        found = TimeRange.parse({"range": name}, NOW)
        assert (found.start, found.end) == (NOW - timedelta(hours=hours), NOW) and not found.problem
        assert NOW + timedelta(seconds=3) in found and found.start in found
        assert found.start - timedelta(seconds=1) not in found
        assert TimeRange.parse(found.parameters, NOW) == found

    def test_absolute_range_is_half_open_and_equals_the_range_of_its_url_parameters(self):
        found = TimeRange.parse({"since": "2026-03-01T10:00", "until": "2026-03-01T12:30:10+01:00", "range": "7d"}, NOW)
        begin, end = datetime(2026, 3, 1, 10, tzinfo=UTC), datetime(2026, 3, 1, 11, 30, 10, tzinfo=UTC)
        assert (found.start, found.end, found.preset) == (begin, end, "")
        assert begin in found and end not in found and end - timedelta(seconds=1) in found
        assert TimeRange.parse(found.parameters, NOW) == found

    @pytest.mark.parametrize(
        "asked",
        [{"range": "5y"}, {"since": "x"}, {"until": "2026-13-01"}, {"since": "2026-03-02", "until": "2026-03-01"},
         {"since": "0001-01-01T00:00+14:00"}, {"since": "0001-01-01"}, {"until": "9999-12-31T23:59"}],
    )  # fmt: skip
    def test_invalid_range_is_reported_and_replaced_by_the_last_day(self, asked):
        found = TimeRange.parse(asked, NOW)
        assert found.problem and (found.start, found.end) == (NOW - timedelta(days=1), NOW)

    @given(st.integers(1, 10**9), st.integers(0, 10**9))
    def test_bins_cover_the_range_without_gaps(self, seconds, offset):
        end = datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=offset)
        found = TimeRange(end - timedelta(seconds=seconds), end, "")
        bins = found.bins
        assert 1 <= len(bins) <= MAX_BINS and bins[0].start <= found.start and bins[-1].end >= found.end
        assert all(a.end == b.start for a, b in zip(bins, bins[1:], strict=False))
        assert len({b.end - b.start for b in bins}) == 1 and bins[0].end > found.start and bins[-1].start < found.end

    @given(st.lists(st.integers(-90_000, 5), max_size=30))
    def test_each_time_is_in_the_bin_that_contains_it(self, offsets):
        bins, times = TimeRange.parse({}, NOW).bins, [NOW + timedelta(seconds=s) for s in offsets]
        found = by_bin(bins, times)
        for number, one in enumerate(bins):
            inside = [i for i, at in enumerate(times) if one.start <= at < one.end]
            assert inside == [i for i in found[number] if times[i] < bins[-1].end]


class TestTable:
    ROWS: ClassVar = [{"n": n, "text": text} for n, text in ((3, "b"), (None, "a"), (1, "c"), (2, "B"))]
    SPEC: ClassVar = TableSpec(
        "Things", ("", Column("N", lambda r: r["n"], "n", True), Column("Text", lambda r: r["text"], "text")), size=3
    )

    def found(self, **query):
        return [row["n"] for row in Table.of(query, self.SPEC, self.ROWS).rows]

    def test_rows_are_sorted_and_those_without_a_value_come_last(self):
        assert self.found() == [3, None, 1]
        assert self.found(sort="n") == [1, 2, 3] and self.found(sort="-n") == [3, 2, 1]
        assert self.found(sort="-n", page="2") == [None] == self.found(sort="n", page="2")
        assert self.found(sort="text", page="9") == [1]
        for wrong in ("x", "-", "0", "-text-"):
            assert self.found(sort=wrong) == [3, None, 1]
        assert self.found(page="-1") == self.found(page="x") == [3, None, 1]

    def test_headings_sort_by_their_column_and_keep_filters(self):
        table = Table.of({"sort": "-n", "page": "2", "client": "a&b"}, self.SPEC, self.ROWS)
        assert table.headings == [
            ("", "", ""),
            ("N", "?client=a%26b&sort=n", "descending"),
            ("Text", "?client=a%26b&sort=text", ""),
        ]
        assert table.before == "?sort=-n&client=a%26b&page=1" and not table.after and table.total == 4
        assert Table.of({}, self.SPEC, self.ROWS).headings[1].url == "?sort=-n"

    def test_two_tables_of_a_page_have_separate_parameters(self):
        query = {"sort": "-n", "x-sort": "n", "x-page": "2"}
        table = Table.of(query, replace(self.SPEC, name="x"), self.ROWS)
        assert [r["n"] for r in table.rows] == [None] and table.headings[1].url == "?sort=-n&x-sort=-n"


class TestExploring:
    def test_every_page_applies_the_range_and_keeps_it_in_its_links(self, tmp_path):
        old = replace(verdict(7, flagged=True), at=NOW - timedelta(days=5))
        with logged_in(make(tmp_path), verdict(1), old) as browser:
            for path in SHOWN:
                page = browser.get(f"{path}?range=7d").text
                assert 'title="The last 7 days" aria-current="true"' in page, path
                assert 'href="/dashboard/verdicts?range=7d"' in page, path
            shown = {name: "v-verdict-7" in browser.get(f"/verdicts?range={name}").text for name in ("24h", "7d")}
            assert shown == {"24h": False, "7d": True}
            assert "The range ends before it starts." in browser.get("/?since=2026-03-02&until=2026-03-01").text

    def test_bar_links_to_the_verdicts_that_it_counts(self, tmp_path):
        with logged_in(make(tmp_path), *(verdict(i, flagged=i < 2) for i in range(5))) as browser:
            bars = r'<a href="([^"]*)" aria-label="[^"]*: (\d) requests?, (\d) flagged"'
            listed, flagged = set(), 0
            for way, count, hits in re.findall(bars, browser.get("/").text):
                own = re.findall(r'id="v-(verdict-\d)"', browser.http.get(way.replace("&amp;", "&")).text)
                assert len(own) == int(count)
                listed |= set(own)
                flagged += int(hits)
            assert len(listed) == 5 and flagged == 2

    def test_verdicts_are_sorted_by_score_and_filtered_by_document(self, tmp_path):
        events = [verdict(i, flagged=i == 3, score=float(i % 3)) for i in range(5)]
        with logged_in(make(tmp_path), *events) as browser:
            order = re.findall(r'id="v-verdict-(\d)"', browser.get("/verdicts?sort=score").text)
            assert [int(n) % 3 for n in order] == [0, 0, 1, 1, 2]
            assert re.findall(r'id="v-verdict-(\d)"', browser.get("/verdicts?document=D3").text) == ["3"]
            assert re.findall(r'id="v-verdict-(\d)"', browser.get("/verdicts?search=closeness").text) == ["3"]

    def test_answers_of_the_responses_api_are_in_the_chart_of_durations(self, tmp_path):
        app = make(tmp_path)
        headers = {"Authorization": f"Bearer {key(app)}"}
        with logged_in(app) as browser:
            body = {"model": "casemate", "input": "apple river stone"}
            assert browser.http.post("/v1/responses", json=body, headers=headers).status_code == 200
            wait_for(lambda: "1 request" in browser.get("/requests").text)
            assert 'class="key p50"' in browser.get("/").text

    def test_requests_are_recorded_with_durations_and_listed_slowest_first(self, tmp_path):
        app = make(tmp_path, defenses=[HideNamed()])
        asking = key(app, name="front desk", trust_user=True)
        with logged_in(app) as browser:
            for stream in (False, True):
                body = chat("apple river stone", stream=stream, user="u" * 40)
                headers = {"Authorization": f"Bearer {asking}"}
                assert browser.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
            assert browser.http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
            wait_for(lambda: len(app.store.scan("request")) == 2)
            events = [e.body for e in app.store.scan("request")]
            for body in events:
                assert body["client"].endswith("/" + "u" * 40) and body["status"] == 200
                stages = sum(body["stages"].values())
                assert {"embed", "search", "generate"} <= body["stages"].keys() and stages <= body["seconds"]
                assert "apple" not in json.dumps(body)
            assert events[0]["first_token"] is None and 0 < events[1]["first_token"] <= events[1]["seconds"]
            wait_for(lambda: "2 requests" in browser.get("/requests").text)
            page = browser.get("/requests?sort=-seconds").text
            slowest = max(events, key=lambda body: body["seconds"])["request"]
            assert re.findall('id="r-([^"]*)"', page)[0] == slowest
            assert "front desk/uuuuuu…uuuuu" in page and f'title="front desk/{"u" * 40}"' in page
            assert "stage: generate" in browser.get("/").text and "p99" in page
            inner = browser.get(f"/requests/{slowest}").text
            assert "Stage search" in inner and "hide_best" in inner and "u" * 40 in inner
            assert browser.get("/requests/none").status_code == 404

    def test_percentiles_equal_those_of_the_durations(self):
        seconds = [i / 1000 for i in range(1, 101)]
        assert percentiles(seconds) == pytest.approx((0.0505, 0.09505, 0.09901))

    def test_clients_are_summarized_and_several_are_reset_at_once(self, tmp_path):
        app = make(tmp_path)
        held = WithheldDocuments("mirabel", 3600.0, app.store)
        for name in ("anna", "ben"):
            held.add("default", name, "d3")
        events = [verdict(i, flagged=i < 4, client=("anna", "ben")[i % 2]) for i in range(6)]
        limited = {"defense": "crawl_limit", "evidence": {"level": "clear", "grade": "quorum"}}
        with logged_in(app, *events, verdict(9, client="calm"), verdict(10, client="calm", **limited)) as browser:
            page = browser.get("/clients").text
            assert re.findall(r'data-label="Limited"><div>(\d+)<', page) == ["0", "0", "1"]
            assert page.index("anna") < page.index("calm") and "67\u00a0%" in page
            assert "calm" not in browser.get("/clients?flagged=yes").text.partition("<main")[2]
            token = re.search('name="csrf" value="([^"]*)"', page)[1]
            chosen = [json.dumps(["default", name]) for name in ("anna", "ben")]
            done = browser.http.post("/dashboard/clients/reset?range=7d", data={"csrf": token, "selected": chosen})
            assert done.headers["location"] == "/dashboard/clients?range=7d"
            page = browser.get("/clients").text
            assert "Reset 2 clients" in page
            shares = r'data-label="(?:Requests|Share)"><div>([^<]*)<'
            assert sorted(re.findall(shares, page)) == ["0\u00a0%"] * 3 + ["2", "3", "3"]
            held.sync()
            assert not held.sources("default", "anna") and not held.sources("default", "ben")
            browser.post("/clients/reset")
            assert "No client was selected." in browser.get("/clients").text

    def test_view_as_a_client_shows_its_context_and_records_nothing(self, tmp_path):
        app = make(tmp_path, defenses=(HideNamed("d3"),))
        app.guard.audience = AudiencePolicy("nothing", (EntitlementRule(frozenset({"staff"})),))
        keys = ApiKeyStore(app.store)
        ids = {name: keys.create(Grant(name, groups=(name,)))[0].id for name in ("staff", "visitor")}
        revoked = keys.create(Grant("gone"))[0].id
        keys.revoke(revoked)
        with logged_in(app) as browser:
            before = len(list(app.store.scan("verdict")))
            assert "/dashboard/clients/view" in browser.get("/clients").text
            assert f"staff (default), {ids['staff']}, groups staff<" in browser.get("/clients/view").text
            shown = {
                name: browser.post("/clients/view", client=client, question="only3").text
                for name, client in ids.items()
            }
            assert browser.post("/clients/view", client=ids["staff"], question=" ").status_code == 200
            for client in (revoked, "absent"):
                assert browser.post("/clients/view", client=client, question="only3").status_code == 403
            hostile = browser.post("/clients/view", client=ids["staff"], question=HOSTILE).text
            assert len(list(app.store.scan("verdict"))) == before
        assert (
            "may read in full" in shown["staff"]
            and "hide_best" in shown["staff"]
            and "1 chunk withheld" in shown["staff"]
        )
        assert "may not read every source" in shown["visitor"] and "The context is empty" in shown["visitor"]
        assert "5 sources among the nearest chunks left out" in shown["visitor"]
        assert "left out" not in shown["staff"]
        assert HOSTILE not in hostile and "&lt;script&gt;" in hostile

    def test_view_as_a_client_lists_sources_whose_labels_the_client_lacks(self, tmp_path):
        app = make(tmp_path)
        asyncio.run(app.guard.add([Document("secret", "only3 and only4", metadata={"acl": ["hr"]})]))
        keys = ApiKeyStore(app.store)
        hr, other = (keys.create(Grant(name, labels=labels))[0].id for name, labels in (("hr", ("hr",)), ("shop", ())))
        with logged_in(app) as browser:
            shown = {
                id_: browser.post("/clients/view", client=id_, question="only3 and only4").text for id_ in (hr, other)
            }
        assert "1 source among the nearest chunks left out, because of access labels" in shown[other]
        assert "access labels" not in shown[hr]

    def test_admin_of_one_tenant_cannot_view_clients_of_another(self, tmp_path):
        app = make(tmp_path)
        other = ApiKeyStore(app.store).create(Grant("theirs", tenant="acme"))[0].id
        with logged_in(app, tenant="default") as browser:
            assert "theirs" not in browser.get("/clients/view").text
            assert browser.post("/clients/view", client=other, question="only3").status_code == 403

    def test_several_alerts_are_acknowledged_and_closed_at_once(self, tmp_path):
        with logged_in(make(tmp_path), alert("a"), alert("b"), alert("c", severity=Severity.LOW)) as browser:
            assert browser.get("/alerts?severity=low").text.count("<article") == 1
            browser.post("/alerts/acknowledge", selected=["a", "c"])
            assert "Acknowledged 2 alerts." in browser.get("/alerts").text
            browser.post("/alerts/close", selected=["a", "b", "gone"], reason="a drill")
            page = browser.get("/alerts").text
            assert "Closed 2 alerts." in page and page.count("a drill") == 2
            browser.post("/alerts/close")
            assert "No alert was selected." in browser.get("/alerts").text

    def test_the_alerts_about_selected_canaries_are_acknowledged_and_closed_at_once(self, tmp_path):
        events = [
            alert("a"),
            alert("b", canaries=("fees", "beds")),
            alert("c", canaries=("fees",)),
            alert("d", set="x"),
        ]
        events += [alert("whole", canaries=()), result_to_event(result()), result_to_event(result("fees"))]
        with logged_in(make(tmp_path), *events) as browser:
            page = browser.get("/canaries").text
            assert 'value="clinic/beds"' in page and "Acknowledge their alerts" in page
            browser.post("/canaries/acknowledge", selected=["clinic/beds"])
            assert "Acknowledged 3 alerts." in browser.get("/canaries").text
            assert browser.get("/alerts").text.count("acknowledged by operator") == 3
            browser.post("/canaries/close", selected=["clinic/beds", "clinic/fees"], reason="a new brochure")
            assert "Closed 4 alerts." in browser.get("/canaries").text
            assert browser.get("/alerts").text.count("a new brochure") == 4  # the alert of set x stays open
            assert "Acknowledge their alerts" not in browser.get("/canaries").text
            browser.post("/canaries/close", selected=["clinic/beds"])
            assert "No open alert is about the selected canaries." in browser.get("/canaries").text
            browser.post("/canaries/close")
            assert "No canary was selected." in browser.get("/canaries").text

    def test_several_sources_are_released_and_removed_at_once(self, tmp_path):
        app = make(tmp_path)
        held = [
            Quarantine(app.store).add([ScreeningResult(Document(n, f"{n} text"), 3.0, 2.0, ("odd",))], "default")
            for n in ("one", "two")
        ]
        with logged_in(app) as browser:
            browser.post("/quarantine/release", selected=[q.key for q in held])
            assert {"one", "two"} <= set(app.index.digests())
            assert "two" in browser.get("/documents/remove?source=one&source=two&source=none").text
            browser.post("/documents/remove", selected=["one", "two"], tenant="default")
            assert not {"one", "two"} & set(app.index.digests())
            assert browser.post("/quarantine/drop").status_code == 404

    def test_topics_are_labeled_with_words_of_several_sources(self):
        texts = [f"asthma inhaler {name}" for name in ("ada", "bob", "cem")]
        texts += [f"<span>diabetes</span> [insulin](https://a.example/dose) note{i}" for i in range(3)]
        chunks = [Document(str(i), text, source=str(i)) for i, text in enumerate(texts)]
        labels = np.array([0, 0, 0, 1, 1, 1])
        assert topic_name(chunks, labels, 0) == "asthma, inhaler"
        assert topic_name(chunks, labels, 1) == "diabetes, insulin"
        assert topic_name([replace(c, source="one") for c in chunks], labels, 0) == ""

    def test_verdicts_of_a_topic_are_listed(self, tmp_path):
        app = make(tmp_path, count=60)
        with logged_in(app, verdict(1, flagged=True), verdict(2, flagged=True, hidden=["d4"])) as browser:
            ways = re.findall('href="/dashboard(/verdicts[^"]*topic=[^"]*)"', browser.get("/topics").text)
            pages = [browser.get(way.replace("&amp;", "&")).text for way in ways]
            assert {n for page in pages for n in re.findall(r'id="v-verdict-(\d)"', page)} == {"1", "2"}
            assert browser.get("/verdicts?topic=99&tenant=default").status_code == 200

    def test_ring_of_the_topic_map_links_to_the_verdicts_that_it_counts(self, tmp_path):
        about_canary = verdict(1, flagged=True, hidden=["d4"], client="canary-beds-clinic@2026-01-01T00:00:00Z")
        with logged_in(make(tmp_path, count=60), about_canary) as browser:
            (way,) = set(re.findall('href="/dashboard(/verdicts[^"]*document=d4[^"]*)"', browser.get("/topics").text))
            assert 'id="v-verdict-1"' in browser.get(way.replace("&amp;", "&")).text


def crawl_event(client, number, **body):
    whole = {"process": "p", "tenant": "default", "client": client, **body}
    return Event(f"crawl-{client}-{number}", datetime.now(UTC), "crawl", whole)


class TestDisclosure:
    def test_disclosed_words_are_counted_once_and_a_reset_removes_the_client(self):
        events = [
            crawl_event("ann", 0, covered={"d1": "f", "d2": "3"}),
            crawl_event("ann", 1, covered={"d1": "1f"}, whole=["d1"], shortened="q7"),
            crawl_event("bob", 0, covered={"d1": "ff"}),
            crawl_event("bob", 1, forgiven=True),
            crawl_event("eve", 0, shown=["d1"]),
        ]
        found, new = disclosed_by_client(events)
        (ann,) = found
        assert (ann.client, ann.words, sorted(ann.chunks), ann.exposed, ann.shortened) == (
            "ann",
            7,
            ["d1", "d2"],
            {"d1"},
            1,
        )
        assert [words for _, words in new] == [6, 1]  # new words per event, in total 7

    def test_page_shows_clients_the_trend_and_the_map(self, tmp_path):
        app = make(tmp_path, count=60)
        events = [
            crawl_event("mallory", 0, covered={"d3\nfeed": "fff"}, whole=["d3\nfeed"]),
            crawl_event("ann", 0, covered={}),
        ]
        other = Event(
            "x", datetime.now(UTC), "crawl", {"tenant": "north", "client": "hidden-one", "covered": {"d": "f"}}
        )
        canary = crawl_event("canary-beds-clinic@2026-01-01T00:00:00Z", 0, covered={"d4": "ff"})
        with logged_in(app, *events, other, canary) as browser:
            page = browser.get("/disclosure").text
            assert "1 of 60 chunks disclosed in part, 12 words" in page
            assert "d3: 12 words disclosed" in page and "12 new words" in page
            assert "mallory" in page and "hidden-one" not in page and "canary-beds" not in page

    def test_page_reports_that_crawl_limit_is_not_configured(self, tmp_path):
        with logged_in(make(tmp_path)) as browser:
            assert "crawl_limit is not among guard.defenses" in browser.get("/disclosure").text


class TestCharts:
    def test_shares_are_never_rounded_to_zero(self):
        assert sample_rate(0, 0) == ("–", "no data")
        assert percent(0.0004) == "<0.1 %" and percent(0.5) == "50 %"
        assert "1 of 10; 95 % interval 0.3 to 44.5 %" in sample_rate(1, 10)[1]

    def test_charts_contain_bars_lines_and_dots_for_each_value(self):
        bins = TimeRange.parse({}, NOW).bins
        links = [svg.ChartLink(b.start, b.end, f"/list?{i}", f"bin {i}") for i, b in enumerate(bins)]
        n = len(bins)
        bars = str(svg.request_bars([(i, i // 2) for i in range(n)], links, "said").image)
        assert bars.count('<rect class="all"') == n - 1 and bars.count('<rect class="flagged"') == n - 2
        assert bars.count("<a ") == n - 1 and 'href="/list?3"' in bars and 'role="group"' in bars
        points = [(NOW - timedelta(hours=1), 1.0, True), (NOW - timedelta(hours=2), -1.0, False)]
        dots = svg.score_scatter(points, (bins[0].start, bins[-1].end), links, "said")
        assert str(dots.image).count("h.01") == 2 and str(dots.image).count("<a ") == n
        lines = svg.latency_lines([(1.0, 2.0, 4.0), None, *[(1.0, 1.0, 1.0)] * (n - 2)], links, "said")
        assert lines.y_labels[0] == "4\u00a0s" and str(lines.image).count("M") == 3 * 2
        assert str(lines.image).count("<a ") == n - 1
        assert len(re.findall(r'd="M[\d.]+,[\d.]+h[1-9]', str(lines.image))) == 3  # a single column is visible
        assert str(svg.sparkline([None, None], "said")).count("M") == 0
        assert str(svg.sparkline([0.5, 1.0], "said", [("/a", "x"), ("/b", "y")])).count("<a ") == 2
