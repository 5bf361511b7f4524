"""The dashboard over HTTP: who gets in, what is shown to whom, and what forms do."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import config as configuration
from casemate.backends.sql_events import SqlEvents
from casemate.defenses.mirabel import Mirabel
from casemate.errors import BackendError, DataError
from casemate.gateway.dashboard import figures, operating_point
from casemate.gateway.dashboard.page import percent, share
from casemate.gateway.dashboard.records import FIRST, Tail
from casemate.gateway.dashboard.session import ALL_TENANTS, IDLE_S, LONGEST_S, MOST, TRIES, Sessions
from casemate.gateway.dashboard.site import ACTS, PAGES
from casemate.gateway.keys import Grant, Keys
from casemate.lab.crawl_results import Crawl, Haul
from casemate.lab.report import write_report
from casemate.monitor.alerts.alert import Alert, Phase, event
from casemate.monitor.alerts.at_once import Alarming
from casemate.monitor.canaries.results import Deviation, Result, Severity, Status, to_event
from casemate.monitor.poison.quarantine import Quarantine
from casemate.monitor.poison.suspicion import Judgement
from casemate.sessions import Sessions as BarredSessions
from casemate.stats import Rate
from casemate.types import Document, Event
from tests.campaigns import campaign
from tests.fakes import Memory, documents
from tests.gateways import key, make, serving

NOW = datetime.now(UTC)
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
SHOWN = [path for path in PAGES if "{" not in path and not path.endswith(("result", "report", "remove"))]


def verdict(number=0, flagged=False, **more):
    body = {
        "defense": "mirabel",
        "flagged": flagged,
        "action": "hide" if flagged else "none",
        "score": 3.0 if flagged else 1.0,
        "threshold": 2.0,
        "hidden": ["d3"] if flagged else [],
        "evidence": {"why": ["closeness"], "withheld": ["d3"], "p": 0.004} if flagged else {},
        "enforced": True,
        "request": f"r{number}",
        "client": "somebody",
        "tenant": "default",
        "k": 5,
    }
    return Event(f"verdict-{number}", NOW - timedelta(minutes=5) + timedelta(seconds=number), "verdict", body | more)


def alert(name="changed-1", **more):
    found = Alert(name, "changed", Severity.HIGH, "clinic", ("beds",), NOW, "something changed", ("it differs",))
    return event(replace(found, **more), Phase.OPENED, NOW, "run")


def result(canary="beds", run="clinic@2026-01-01T00:00:00Z", status=Status.FAIL, **more):
    deviations = (Deviation("missing_phrase", "expected 96 beds"),) if status is Status.FAIL else ()
    return Result(canary, run, NOW, status, deviations, documents=("d1",), sources=("d1",), scores=(0.5,), **more)


class Visitor:
    """Somebody with a browser without scripts."""

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
def left():
    """Closes the connections of all visitors."""
    yield
    while Visitor.opened:
        Visitor.opened.pop().close()


@contextmanager
def visiting(app, *events, labels=(), tenant="default"):
    """An admin who is logged in, to a gateway whose store holds these events."""
    for one in events:
        app.store.append(one)
    text = key(app, "admin", "operator", labels=labels, tenant=tenant)
    app.store.flush()
    with serving(app) as url:
        visitor = Visitor(url)
        assert visitor.login(text).status_code == 303
        yield visitor


class TestDoor:
    def test_nothing_is_shown_to_whoever_is_not_logged_in(self, tmp_path):
        with serving(make(tmp_path)) as url, httpx.Client(base_url=url) as http:
            for path in PAGES:
                answer = http.get(f"/dashboard{path.replace('{id}', 'x')}")
                assert answer.status_code == 303 and "/dashboard/login" in answer.headers["location"], path
            for path in ACTS:
                answer = http.post(f"/dashboard{path}", data={"id": "x", "csrf": "x"})
                assert answer.status_code == 303 and answer.headers["location"] == "/dashboard/login"

    def test_only_admins_get_in_and_all_others_are_told_the_same(self, tmp_path):
        app = make(tmp_path)
        made = Keys(app.store)
        gone, gone_text = made.create(Grant("gone", "admin"))
        made.revoke(gone.id)
        texts = [key(app), key(app, "metrics"), str(gone_text), "cmk_0_x", "", "x" * 200, key(app, "admin")[:-1] + "!"]
        app.store.flush()
        with serving(app) as url:
            told = set()
            for text in texts:
                answer = Visitor(url).login(text)
                assert answer.status_code == 403 and "casemate-session" not in answer.headers.get("set-cookie", "")
                told.add(re.sub('value="[^"]*"', "", answer.text))
            assert len(told) == 1

    def test_keys_open_nothing_of_it_as_a_bearer(self, tmp_path):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            answer = httpx.get(f"{url}/dashboard/", headers={"Authorization": f"Bearer {text}"})
            assert answer.status_code == 303

    def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(self, tmp_path):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            cookie = Visitor(url).login(text).headers["set-cookie"]
            assert "casemate-session=" in cookie and "HttpOnly" in cookie and "SameSite=strict" in cookie
            assert "Path=/dashboard" in cookie

    def test_the_login_form_must_come_from_here(self, tmp_path):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            assert httpx.post(f"{url}/dashboard/login", data={"key": text}).status_code == 403
            assert Visitor(url).login(text, csrf="0" * 64).status_code == 403
            foreign = Visitor(url, **{"Sec-Fetch-Site": "cross-site"})
            assert foreign.login(text).status_code == 403

    def test_after_some_failures_nobody_may_try_for_a_while(self, tmp_path):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            visitor = Visitor(url)
            assert {visitor.login("wrong").status_code for _ in range(TRIES)} == {403}
            assert visitor.login(text).status_code == 429

    def test_a_revoked_key_ends_its_session(self, tmp_path):
        app = make(tmp_path)
        with visiting(app) as visitor:
            assert visitor.get("/").status_code == 200
            keys = Keys(app.store)
            keys.follow()
            keys.revoke(next(k.id for k in keys.all() if k.grant.role == "admin"))
            _until(lambda: visitor.get("/").status_code == 303)

    def test_logging_out_ends_the_session_and_not_only_the_cookie(self, tmp_path):
        with visiting(make(tmp_path)) as visitor:
            cookies = dict(visitor.http.cookies)
            assert visitor.post("/logout").status_code == 303
            visitor.http.cookies.update(cookies)
            assert visitor.get("/").status_code == 303

    @pytest.mark.parametrize(
        "address", ["//evil.example/", "https://evil.example", "/v1/models", "/dashboard/\\x", "/dashboard/logout"]
    )
    def test_leads_nowhere_else_after_the_login(self, tmp_path, address):
        app = make(tmp_path)
        text = key(app, "admin")
        with serving(app) as url:
            assert Visitor(url).login(text, next=address).headers["location"] == "/dashboard/"
            assert Visitor(url).login(text, next="/dashboard/alerts").headers["location"] == "/dashboard/alerts"

    def test_is_no_part_of_the_api(self, tmp_path):
        with serving(make(tmp_path)) as url:
            assert "dashboard" not in httpx.get(f"{url}/openapi.json").text


def _until(what, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


class TestSessions:
    def test_end_by_age_and_by_idleness(self):
        clock, store = [1e9], Memory()
        sessions, admin = Sessions(store, Keys(store), lambda: clock[0]), Keys(store).create(Grant("a", "admin"))[0]
        sessions._keys.follow()
        token, start = sessions.begin(admin), clock[0]
        clock[0] = start + IDLE_S - 1
        assert sessions.find(token, touch=True)
        clock[0] = start + 2 * IDLE_S - 2
        assert sessions.find(token, touch=False)
        clock[0] += 2
        assert sessions.find(token, touch=False) is None, "what a page fetches by itself kept it alive"
        other = sessions.begin(admin)
        start = clock[0]
        while clock[0] < start + LONGEST_S:
            assert sessions.find(other, touch=True)
            clock[0] += IDLE_S / 2
        clock[0] += 1
        assert sessions.find(other, touch=True) is None

    def test_are_bounded(self):
        sessions, _, admin = self.two(Memory())
        tokens = [sessions.begin(admin) for _ in range(MOST + 1)]
        assert sessions.find(tokens[0], touch=False) is None
        assert sessions.find(tokens[1], touch=False) and sessions.find(tokens[-1], touch=False)

    def test_ids_are_not_kept(self):
        store = Memory()
        sessions, _, admin = self.two(store)
        token = sessions.begin(admin)
        assert token not in repr(vars(sessions)) + repr(store.events)
        assert sessions.find(token + "x", touch=False) is None

    def test_are_those_of_all_gateways(self):
        here, there, admin = self.two(Memory())
        token = here.begin(admin)
        assert there.find(token, touch=True).csrf == here.find(token, touch=True).csrf
        there.end(token)
        assert here.find(token, touch=True) is None

    def test_use_at_one_gateway_keeps_them_alive_at_the_others(self):
        clock = [1e9]
        here, there, admin = self.two(Memory(), lambda: clock[0])
        token = here.begin(admin)
        for _ in range(4):
            clock[0] += IDLE_S - 1
            assert there.find(token, touch=True)
        assert here.find(token, touch=False)

    def test_failed_logins_are_counted_by_all_together(self):
        here, there, _ = self.two(Memory(clock=lambda: 0.0))
        for sessions in (here, there) * (TRIES // 2):
            assert sessions.may_try("10.0.0.1")
            sessions.failed("10.0.0.1")
        assert not here.may_try("10.0.0.1") and not there.may_try("10.0.0.1")
        assert there.may_try("10.0.0.2")

    def two(self, store, clock=time.time):
        keys = Keys(store)
        admin, _ = keys.create(Grant("a", "admin"))
        return Sessions(store, keys, clock), Sessions(store, keys, clock), admin


class TestPages:
    def test_say_what_to_do_where_there_is_nothing(self, tmp_path):
        app = make(tmp_path, count=0)
        with visiting(app) as visitor:
            for path in SHOWN:
                answer = visitor.get(path)
                assert answer.status_code == 200, path
                assert 'class="empty"' in answer.text or path == "/", path
                assert "casemate" in answer.text.partition("<main")[2], path

    def test_hold_no_markup_of_strangers_and_nothing_inline(self, tmp_path):
        app = make(tmp_path, k=5)
        bad = replace(documents(1)[0], id="bad", source=HOSTILE, text=HOSTILE, title=HOSTILE)
        asyncio.run(app.guard.add([bad]))
        Quarantine(app.store).hold([Judgement(replace(bad, source="q" + HOSTILE), 3.0, 2.0, (HOSTILE,), {})], "default")
        write_report(replace(campaign(), id=HOSTILE, simulated=(HOSTILE,)), tmp_path / ".casemate/redteam")
        evidence = {HOSTILE: HOSTILE, "why": [HOSTILE], "withheld": [HOSTILE]}
        events = (
            verdict(1, True, client=HOSTILE, defense=HOSTILE, hidden=[HOSTILE], evidence=evidence, request=HOSTILE),
            alert(title=HOSTILE, canaries=(HOSTILE,), changes=(HOSTILE,), documents=(HOSTILE,), advice=(HOSTILE,)),
            to_event(replace(result(HOSTILE[:40].replace(" ", "")), error=HOSTILE, sources=(HOSTILE,))),
        )
        with visiting(app, *events) as visitor:
            asked = f"?client={HOSTILE}&source={HOSTILE}&at={HOSTILE}&run={HOSTILE}"
            paths = [*SHOWN, *(p + asked for p in SHOWN), "/verdicts/verdict-1", "/nothing", f"/{HOSTILE}"]
            for path in paths:
                answer = visitor.get(path)
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

    def test_a_report_can_run_nothing(self, tmp_path):
        app = make(tmp_path)
        write_report(campaign(), tmp_path / ".casemate/redteam")
        with visiting(app) as visitor:
            assert "ROC curves" in visitor.get("/redteam").text
            answer = visitor.get("/redteam/report")
            assert answer.status_code == 200
            assert "sandbox" in answer.headers["content-security-policy"]
            assert "script-src" not in answer.headers["content-security-policy"]

    def test_compare_the_newest_red_team_run_with_the_one_before_and_draw_crawls(self, tmp_path):
        app = make(tmp_path)
        folder = tmp_path / ".casemate/redteam"
        write_report(campaign(), folder)
        before = replace(campaign(), at="2020-01-01T00:00:00+00:00", attacks=campaign().attacks[:1])
        before.save(folder / "2020.json")
        hauls = {"off": {"questions": 100, "coverage": [0.6, 0.5, 0.7], "curve": [[1, 0.01, 0.0], [100, 0.6, 0.4]]}}
        crawl = {"crawls": [{"attack": "composite", "hauls": hauls}]}
        (folder / "crawl.json").write_text(json.dumps(crawl))
        (folder / "broken.json").write_text("{")
        (folder / "other.json").write_text(
            '{"crawls": [{"hauls": {"off": {"curve": [[1], "x", null]}}, "attack": "y"}, 3]}'
        )
        with visiting(app) as visitor:
            page = visitor.get("/redteam").text
            assert "Against 2020.json" in page and "Earlier runs" in page
            assert "guard off: 60\u00a0% reached" in page and "310.0,87.2" in page

    def test_show_the_last_crawl_as_it_was_written_and_so_does_the_report(self, tmp_path):
        app = make(tmp_path)
        folder = tmp_path / ".casemate/redteam"
        rate = Rate(0.4, 0.3, 0.5)
        haul = Haul(50, 9, 20, rate, rate, {}, {}, None, 0.5, None, None, None, rate, {}, {"50%": None})
        crawl = Crawl(
            "worm", "a paper", 7, 50, 1, "bag", {"on": replace(haul, curve=((0, None, 0.0), (50, None, 0.4)))}
        )
        about = {"target": "http rag.example", "capabilities": ["answers"], "loot.worm.on": "3 texts, 70 words"}
        live = {"live_answers": 2.0, "live_flops_honest": 3e9, "live_flops_honest_of_reference": 1.3}
        made = campaign(attacks=(), checks=(), crawls=(crawl,), evidence=about, cost={"questions": 50, **live})
        write_report(made, folder, stem="crawl")
        with visiting(app) as visitor:
            page = visitor.get("/redteam").text
            assert "guard on: 40\u00a0% recovered" in page and "310.0,124.8" in page
            assert "worm, guard on: 3 texts, 70 words" in page and "Target http rag.example" in page
            assert "3e+09 FLOPs each" in page
        text = write_report(campaign(), folder)["html"].read_text()
        assert "A campaign of its own" in text and "http rag.example" in text and "worm recovers of the texts" in text
        alone = (folder / "crawl.html").read_text()
        assert "3e+09 FLOPs each" in alone and "A campaign of its own" not in alone

    def test_the_map_rings_what_was_withheld_and_is_drawn_once(self, tmp_path):
        app = make(tmp_path, count=60)
        scans = []
        whole = app.index.scan
        app.index.scan = lambda tenant="default": scans.append(tenant) or whole(tenant)
        with visiting(app, verdict(1, flagged=True), verdict(2, flagged=True)) as visitor:
            pages = [visitor.get("/topics").text for _ in range(2)]
            assert all(page.count("<title>d3: withheld 2 times</title>") == 1 for page in pages)
            assert sum(page.count("h.01") for page in pages) == 120 and scans == ["default"]

    def test_are_made_apart_from_the_threads_that_answer_questions(self, tmp_path, monkeypatch):
        app = make(tmp_path)
        names = set()
        latest = SqlEvents.latest

        def noted(self, kind, count):
            names.add(threading.current_thread().name)
            return latest(self, kind, count)

        monkeypatch.setattr(SqlEvents, "latest", noted)
        with visiting(app) as visitor:
            visitor.get("/")
        assert names and all(name.startswith("casemate-dashboard") for name in names)

    def test_tell_rates_with_their_counts(self, tmp_path):
        with visiting(make(tmp_path), *(verdict(i, flagged=i < 2) for i in range(8))) as visitor:
            assert "2 of 8; 95 % interval 3.2 to 65.1 %" in visitor.get("/").text

    def test_verdicts_can_be_filtered(self, tmp_path):
        events = [verdict(i, flagged=i == 3, client=f"client-{i}", defense="a" if i % 2 else "b") for i in range(6)]
        with visiting(make(tmp_path), *events) as visitor:
            for asked, wanted in (
                ("", {0, 1, 2, 3, 4, 5}),
                ("?flagged=yes", {3}),
                ("?flagged=no&defense=a", {1, 5}),
                ("?client=CLIENT-4", {4}),
                (
                    f"?since={(NOW - timedelta(minutes=5) + timedelta(seconds=4)).replace(tzinfo=None).isoformat()}",
                    {4, 5},
                ),
            ):
                found = set(map(int, re.findall('id="v-verdict-(\\d+)"', visitor.get(f"/verdicts{asked}").text)))
                assert found == wanted, asked

    def test_verdicts_on_canaries_are_shown_when_asked_for(self, tmp_path):
        events = (verdict(1), verdict(2, client="canary-beds-clinic@2026-01-01T00:00:00Z"))
        with visiting(make(tmp_path), *events) as visitor:
            for asked, wanted in (("", {1}), ("?asker=canaries", {2}), ("?asker=all", {1, 2}), ("?client=beds", {2})):
                found = set(map(int, re.findall('id="v-verdict-(\\d+)"', visitor.get(f"/verdicts{asked}").text)))
                assert found == wanted, asked

    def test_an_alert_of_quarantine_leads_to_quarantine(self, tmp_path):
        app = make(tmp_path)
        store = Alarming(app.store)
        Quarantine(store).hold([Judgement(Document("evil#0", "x", source="evil"), 3.0, 2.0, ("odd",), {})], "default")
        with visiting(app) as visitor:
            page = visitor.get("/alerts").text
        card = page[page.index('id="open"') :]
        assert 'href="/dashboard/quarantine"' in card and "Held back" in card
        assert "honey" not in card and "in the answers" not in card and ">Canaries<" not in card

    def test_a_verdict_tells_why_and_what_was_withheld(self, tmp_path):
        with visiting(make(tmp_path), verdict(1, flagged=True)) as visitor:
            text = visitor.get("/verdicts/verdict-1").text
            assert "The score 3.000 is above the threshold 2.000." in text
            assert "closer to a document than harmless questions are" in text and "<code>d3</code>" in text
            assert visitor.get("/verdicts/verdict-2").status_code == 404

    def test_text_of_questions_shows_only_where_privacy_allows(self, tmp_path):
        for allowed in (False, True):
            folder = tmp_path / str(allowed)
            folder.mkdir()
            app = make(folder)
            app = replace(app, config=configuration.changed(app.config, privacy={"log_text": allowed}))
            with visiting(app, verdict(1, text="what was asked")) as visitor:
                assert ("what was asked" in visitor.get("/verdicts/verdict-1").text) is allowed

    def test_runs_that_nobody_made_are_told(self, tmp_path):
        body = {"set": "clinic", "state": "missed", "count": 3, "last": NOW.timestamp() + 60}
        first = datetime(2026, 3, 1, 7, tzinfo=UTC).timestamp()
        events = [to_event(result()), Event("m", NOW, "canary-slot", body | {"first": first}),
                  Event("b", NOW, "canary-slot", body | {"state": "begun", "run": "r", "canaries": [], "slot": 0}),
                  Event("o", NOW, "canary-slot", body | {"first": first, "set": "other"})]  # fmt: skip
        with visiting(make(tmp_path), *events) as visitor:
            page = visitor.get("/canaries").text
        assert page.count("Not made, because nobody watched: 3 runs, from 01 Mar 07:00 to") == 1

    def test_canaries_lead_to_their_deviations(self, tmp_path):
        events = [to_event(result()), to_event(result("fees", status=Status.PASS))]
        with visiting(make(tmp_path), *events) as visitor:
            page = visitor.get("/canaries").text
            way = re.search('href="/dashboard(/canaries/result[^"]*beds)"', page)[1].replace("&amp;", "&")
            assert "expected 96 beds" in visitor.get(way).text
            assert "1 of 1" in page and "0 of 1" in page

    def test_follow_what_happens_and_are_not_made_again_without_news(self, tmp_path):
        app = make(tmp_path)
        with visiting(app, verdict(1)) as visitor:
            first = visitor.get("/verdicts")
            headers = {"X-Live": "1", "If-None-Match": first.headers["etag"]}
            answers = [visitor.get("/verdicts", headers=headers) for _ in range(2)]
            assert any(a.status_code == 304 and not a.content for a in answers)  # unless ten seconds just passed
            app.store.append(verdict(2, flagged=True))
            _until(lambda: "v-verdict-2" in visitor.get("/verdicts", headers=headers).text)

    def test_a_store_that_fails_is_said_and_shows_no_trace(self, tmp_path, monkeypatch):
        app = make(tmp_path)
        with visiting(app) as visitor:

            def broken(self, kind, count):
                raise BackendError("the store is away", backend="store", retryable=True)

            monkeypatch.setattr(SqlEvents, "latest", broken)
            _until(lambda: visitor.get("/").status_code == 503)
            text = visitor.get("/").text
            assert "the store is away" in text and "Traceback" not in text


class TestForms:
    def test_of_strangers_do_nothing(self, tmp_path):
        app = make(tmp_path)
        with visiting(app, alert()) as visitor:
            sent = {"id": "changed-1"}
            assert visitor.http.post("/dashboard/alerts/acknowledge", data=sent).status_code == 403
            assert visitor.http.post("/dashboard/alerts/acknowledge", data=sent | {"csrf": "x"}).status_code == 403
            visitor.http.headers["Sec-Fetch-Site"] = "cross-site"
            assert visitor.post("/alerts/acknowledge", **sent).status_code == 403
            assert "nobody has acknowledged it" in visitor.get("/alerts").text

    def test_acknowledge_and_close_an_alert(self, tmp_path):
        with visiting(make(tmp_path), alert()) as visitor:
            assert visitor.post("/alerts/acknowledge", id="changed-1").headers["location"] == "/dashboard/alerts"
            assert "acknowledged by operator" in visitor.get("/alerts").text
            visitor.post("/alerts/close", id="changed-1", reason="it was a drill")
            page = visitor.get("/alerts").text
            assert "No alert is open." in page and "it was a drill" in page
            assert visitor.post("/alerts/close", id="changed-1", reason="again").status_code == 409

    def test_let_a_client_begin_anew(self, tmp_path):
        app = make(tmp_path)
        held = BarredSessions("mirabel", 3600.0, app.store)
        held.bar("default", "somebody", "d3")
        with visiting(app, verdict(1, flagged=True), verdict(2)) as visitor:
            assert "begin anew" not in visitor.get("/verdicts/verdict-2").text
            assert "begin anew" in visitor.get("/verdicts/verdict-1").text
            fields = {"client": "somebody", "verdict": "verdict-1"}
            assert visitor.post("/verdicts/forgive", tenant="other", **fields).status_code == 403
            done = visitor.post("/verdicts/forgive", tenant="default", **fields)
            assert done.headers["location"] == "/dashboard/verdicts/verdict-1"
            assert "somebody begins anew" in visitor.get("/verdicts/verdict-1").text
            held.follow()
            assert held.barred("default", "somebody") == frozenset()

    def test_remove_a_source(self, tmp_path):
        app = make(tmp_path)
        with visiting(app) as visitor:
            assert "d3" in visitor.get("/documents?source=d3").text
            assert "Remove it for good" in visitor.get("/documents/remove?source=d3&tenant=default").text
            assert "d3" in app.index.digests(), "asking removed it"
            assert visitor.post("/documents/remove", source="d3", tenant="default").status_code == 303
            assert "d3" not in app.index.digests()
            assert visitor.post("/documents/remove", source="d3", tenant="default").status_code == 404

    def test_release_and_drop_what_is_in_quarantine(self, tmp_path):
        app = make(tmp_path)
        held = [
            Quarantine(app.store).hold([Judgement(Document(n, f"{n} text"), 3.0, 2.0, ("odd",), {})], "default")
            for n in ("good", "evil")
        ]
        with visiting(app) as visitor:
            visitor.post("/quarantine/release", key=held[0].key)
            visitor.post("/quarantine/drop", key=held[1].key)
            assert "good" in app.index.digests() and "evil" not in app.index.digests()
            assert {h.source: h.state for h in Quarantine(app.store).all().values()} == {
                "good": "released",
                "evil": "dropped",
            }
            assert visitor.post("/quarantine/drop", key=held[0].key).status_code == 409

    def test_that_are_too_long_are_refused(self, tmp_path):
        with visiting(make(tmp_path), alert()) as visitor:
            assert visitor.post("/alerts/close", id="changed-1", reason="x" * 30_000).status_code == 413


class TestTenants:
    def test_are_kept_apart(self, tmp_path):
        app = make(tmp_path)
        asyncio.run(app.guard.add([Document("theirs", "their text")], "b"))
        held = Quarantine(app.store).hold([Judgement(Document("new", "x"), 3.0, 2.0, ("odd",), {})], "default")
        with visiting(app, verdict(1, True), verdict(2, True, tenant="b"), alert(), tenant="b") as visitor:
            page = visitor.get("/verdicts?tenant=default").text
            assert "v-verdict-2" in page and "v-verdict-1" not in page
            assert visitor.get("/verdicts/verdict-1").status_code == 404
            assert "theirs" in visitor.get("/documents?tenant=default").text
            assert "No source has this" in visitor.get("/documents?tenant=default&source=d3").text
            assert visitor.post("/documents/remove", source="d3", tenant="default").status_code == 403
            assert visitor.post("/quarantine/release", key=held.key).status_code == 404
            for path in ("/alerts", "/canaries", "/redteam", "/canaries/result", "/redteam/report"):
                assert visitor.get(path).status_code == 403, path
            assert visitor.post("/alerts/acknowledge", id="changed-1").status_code == 403
            assert visitor.post("/calibration/apply", significance="0.5").status_code == 403
            assert "something changed" not in visitor.get("/").text

    def test_one_key_may_look_after_all(self, tmp_path):
        app = make(tmp_path)
        asyncio.run(app.guard.add([Document("theirs", "their text")], "b"))
        with visiting(app, verdict(1), verdict(2, tenant="b"), labels=(ALL_TENANTS,)) as visitor:
            page = visitor.get("/verdicts").text
            assert "v-verdict-2" in page and "v-verdict-1" in page
            assert "theirs" in visitor.get("/documents?tenant=b").text


class TestOperatingPoint:
    def test_takes_effect_at_once_and_is_noted(self, tmp_path):
        defense = Mirabel(mode="paper", significance=0.05)
        app = make(tmp_path, defenses=[defense])
        with visiting(app) as visitor:
            assert "Apply" in visitor.get("/calibration?at=0.2").text
            visitor.post("/calibration/apply", significance="0.2")
            assert defense.significance == 0.2
            page = visitor.get("/calibration").text
            assert "The guard now goes by significance .2" in page and "Only until this gateway ends" in page
            (noted,) = app.store.scan("setting")
            assert (noted.body["before"], noted.body["after"]) == (0.05, 0.2) and "operator" in noted.body["by"]
            for wrong in ("0", "1", "nan", "inf", "x", ""):
                assert visitor.post("/calibration/apply", significance=wrong).status_code == 409
            assert defense.significance == 0.2

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
            "guard:\n  defenses:\n  - significance: 0.5 # high\n    use: mirabel\n"
            "store: {use: sql_events, url: '${DB}'}\n",
        ],
    )
    def test_is_written_into_the_configuration_and_nothing_else_changes(self, tmp_path, monkeypatch, text):
        monkeypatch.setenv("DB", "sqlite:///x.db")
        path = tmp_path / "casemate.yaml"
        path.write_text(text)
        path.chmod(0o640)
        before = configuration.read(path)
        assert operating_point.save(path, 0.02) == ""
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
    def test_leaves_a_file_alone_that_it_cannot_change_safely(self, tmp_path, text):
        path = tmp_path / "casemate.yaml"
        path.write_text(text)
        assert operating_point.save(path, 0.02) and path.read_text() == text
        assert operating_point.save(tmp_path / "none.yaml", 0.02)

    def test_needs_a_guard_that_has_one(self, tmp_path):
        with make(tmp_path) as app, pytest.raises(DataError, match="no mirabel"):
            operating_point.move(app, 0.1, "me")


class TestTail:
    @given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 50))
    def test_holds_the_newest_in_order_whatever_came_between(self, batches, keep):
        store, tail, written = Memory(), None, []
        tail = Tail(store, "verdict", keep, lambda e: e.id)
        for size in batches:
            fresh = [Event(f"e{len(written) + i}", NOW, "verdict", {}) for i in range(size)]
            for one in fresh:
                store.append(one)
                store.append(replace(one, id=f"other-{one.id}", kind="other"))
            written += [e.id for e in fresh]
            assert tail.follow() is bool(fresh)
            assert tail.all == written[-keep:]

    def test_reads_little_of_a_large_store(self):
        store = Memory([Event(f"e{i}", NOW, "verdict", {}) for i in range(5000)])
        counts = []
        store.latest = lambda kind, count: counts.append(count) or store.events[-count:]
        tail = Tail(store, "verdict", 3000, lambda e: e.id)
        tail.follow()
        assert len(tail.all) == 3000 and tail.full and max(counts) <= 3000
        counts.clear()
        store.events += [Event(f"n{i}", NOW, "verdict", {}) for i in range(20)]
        tail.follow()
        assert counts == [FIRST] and tail.all[-20:] == [f"n{i}" for i in range(20)] and len(tail.all) == 3000

    def test_one_event_that_cannot_be_read_is_left_out(self, caplog):
        store = Memory([Event("a", NOW, "verdict", {}), Event("b", NOW, "verdict", {"x": 1})])
        tail = Tail(store, "verdict", 10, lambda e: e.body["x"])
        tail.follow()
        assert tail.all == [1] and not tail.follow()

    @given(st.lists(st.sampled_from(["a", "b"]), max_size=30), st.integers(0, 35))
    def test_the_store_gives_the_newest_as_a_scan_would(self, tmp_path_factory, kinds, count):
        store = SqlEvents(path=tmp_path_factory.mktemp("store") / "events.db")
        for i, kind in enumerate(kinds):
            store.append(Event(f"e{i}", NOW, kind, {"i": i}))
        wanted = list(store.scan("a"))
        assert list(store.latest("a", count)) == (wanted[-count:] if count else [])
        store.close()


class TestFigures:
    def test_shares_are_never_rounded_to_nothing(self):
        assert share(0, 0) == ("–", "of none")
        assert percent(0.0004).startswith("0.0") and percent(0.5) == "50\u00a0%"
        assert "1 of 10; 95 % interval 0.3 to 44.5 %" in share(1, 10)[1]

    def test_bars_and_dots_are_drawn_for_what_there_is(self):
        begins = figures.hours(NOW, 24, timedelta(hours=1))
        assert begins[-1] <= NOW < begins[-1] + timedelta(hours=1) and len(set(begins)) == 24
        image = figures.bars([figures.Bar(b, i, i // 2) for i, b in enumerate(begins)], "said")
        assert image.count("<rect") == 23 + 22
        dots = figures.scatter([(NOW, 1.0, True), (NOW + timedelta(seconds=1), -1.0, False)], "said")
        assert dots.count("h.01") == 2
        assert figures.line([None, None], "said").count("M") == 0
