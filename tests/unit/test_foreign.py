"""Attacks on a target outside: what it can undergo, what that leaves open, and what becomes of it when it fails."""

import asyncio
import contextlib
import json
import threading
import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("httpx", reason="needs casemate[http]")
pytest.importorskip("jsonpath_ng", reason="needs casemate[http]")

from casemate import config as configuration
from casemate.backends.http import Http
from casemate.backends.openai_endpoint import OpenAIEndpoint
from casemate.backends.python import Python
from casemate.capabilities import Capability
from casemate.crawlers import as_report
from casemate.errors import BackendError, ConfigError
from casemate.foreign.aim import is_outside, pointed, take_aim
from casemate.foreign.campaign import run_outside
from casemate.foreign.crawl import crawl_outside
from casemate.foreign.signs import ASKED, LATER
from casemate.lab.known import apart, known_split
from casemate.lab.report import write_report
from casemate.lab.results import Status, load
from casemate.remote import Page
from casemate.types import Document, Query
from tests import outside

UNSEEN = ["two_worlds", "defense_errors"]
KNOWN = {"members": "known/in", "nonmembers": "known/out"}


@pytest.fixture(autouse=True)
def nothing_asked():
    outside.asked.clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("owner")
    outside.write_known(folder)
    return folder


def settings(place, tmp_path, target, **more):
    """A configuration of which everything but the texts is this test's own."""
    part = {"use": "python", "call": f"tests.outside:{target}"} if isinstance(target, str) else target
    section = {
        "target": part,
        "i_own_this_target": True,
        "known": KNOWN,
        "attacks": ["direct"],
        "gate": {"adjusted_accuracy": 0.35, "harmless": 0.3},
        "folder": str(tmp_path / "lab"),
    }
    return configuration.parse({"redteam": section | more}, folder=place)


@contextlib.contextmanager
def silent(title, total):
    yield lambda n: None


def run(config, **more):
    return asyncio.run(run_outside(config, (), silent, **more))


def crawl(config):
    return asyncio.run(crawl_outside(config, silent))


def of(campaign, status):
    return {check.name: check.why for check in campaign.checks if check.status is status}


def http(fake, **more):
    return {"use": "http", "url": fake.url, "retries": 0, "timeout_s": 20} | more


class TestVerdicts:
    def test_a_guard_beside_none_passes_and_the_report_says_who_was_attacked(self, place, tmp_path):
        off = {"use": "python", "call": "tests.outside:bare"}
        found = run(settings(place, tmp_path, "guarded", target_off=off, leave_out=[*UNSEEN, "fresh_clients"]))
        assert found.status is Status.PASS, of(found, Status.INCONCLUSIVE)
        (attack,) = found.attacks
        assert attack.off.auc.value > 0.9
        assert attack.on.recall_query is None  # nobody saw what was withheld
        assert {c.name for c in found.checks}.isdisjoint({"No defense failed", "What is withheld leaves no trace"})
        paths = write_report(found, tmp_path / "report")
        texts = {kind: path.read_text() for kind, path in paths.items()}
        assert all("python tests.outside:guarded" in text for text in texts.values())
        assert all("guard_off" in text for text in texts.values())
        assert load(paths["json"]).checks == found.checks
        assert json.loads(texts["sarif"])["runs"][0]["properties"]["target"] == "python tests.outside:guarded"
        assert not any(d.text[:60] in text for d in outside.notes()[0] for text in texts.values())

    def test_no_guard_fails_whether_or_not_there_is_another_to_compare_with(self, place, tmp_path):
        found = run(settings(place, tmp_path, "bare"))
        assert found.status is Status.FAIL
        assert found.attacks[0].off is None and found.attacks[0].on.auc.value > 0.9

    def test_a_guard_alone_is_inconclusive_unless_its_owner_accepts_that(self, place, tmp_path):
        found = run(settings(place, tmp_path, "guarded", leave_out=UNSEEN))
        assert found.status is Status.INCONCLUSIVE
        why = of(found, Status.INCONCLUSIVE)
        assert "redteam.target_off" in why["The attack works without the guard"]
        accepted = [*UNSEEN, "guard_off", "harmless"]
        found = run(settings(place, tmp_path, "guarded", leave_out=accepted))
        assert found.status is Status.PASS
        assert sum("Whether" in line or "What the" in line for line in found.not_tested) >= 4

    def test_what_it_cannot_undergo_is_inconclusive_each_with_what_to_do(self, place, tmp_path):
        found = run(settings(place, tmp_path, "bare"))
        open_ones = of(found, Status.INCONCLUSIVE)
        for name, key in {
            "The attack works without the guard": "guard_off",
            "Harmless questions are answered as without the guard": "harmless",
            "What is withheld leaves no trace": "two_worlds",
            "No defense failed": "defense_errors",
            "Attackers under fresh names get no further": "fresh_clients",
        }.items():
            assert f"add {key} to redteam.leave_out" in open_ones[name]
        junit = ET.parse(write_report(found, tmp_path / "report")["junit"]).getroot()
        assert int(junit.get("errors")) == len(open_ones)

    def test_one_name_for_all_is_no_gap_where_the_owner_asked_for_it(self, place, tmp_path):
        found = run(settings(place, tmp_path, "bare", identity="campaign"))
        assert "Attackers under fresh names get no further" not in of(found, Status.INCONCLUSIVE)
        assert "An attacker who goes by a fresh name for each text." in found.not_tested

    def test_without_known_texts_nothing_is_asked_and_it_says_what_to_do(self, place, tmp_path):
        found = run(settings(place, tmp_path, "guarded", known={"members": "known/in"}))
        assert found.status is Status.INCONCLUSIVE
        assert "redteam.known.nonmembers is not given" in found.attacks[0].error
        assert outside.asked == []
        write_report(found, tmp_path / "report")

    def test_too_few_known_texts_are_no_pass_either(self, place, tmp_path):
        few = tmp_path / "few.jsonl"
        few.write_text("\n".join(json.dumps({"_id": str(i), "text": f"Note {i}."}) for i in range(5)))
        found = run(settings(place, tmp_path, "guarded", known=KNOWN | {"members": str(few)}))
        assert found.status is Status.INCONCLUSIVE and "at least 10" in found.attacks[0].error

    def test_garbage_tells_nobody_from_anybody_and_is_not_taken_for_a_guard(self, place, tmp_path):
        found = run(settings(place, tmp_path, "garbage", leave_out=[*UNSEEN, "guard_off", "harmless", "fresh_clients"]))
        assert found.status is Status.INCONCLUSIVE
        assert "The target (guard on) answers from its collection" in of(found, Status.INCONCLUSIVE)


class TestTroubles:
    def test_a_dead_server_is_an_error_with_a_report(self, place, tmp_path):
        with outside.serving() as fake:
            target = http(fake)
        found = run(settings(place, tmp_path, target))
        assert found.status is Status.ERROR
        assert "the connection failed" in of(found, Status.ERROR)["The target could be asked to the end"]
        write_report(found, tmp_path / "report")

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ("500", "HTTP 500"),
            ("malformed", "no JSON"),
            ("other schema", "no text at answer"),
            ("429 later", "HTTP 429"),
            ("400", "HTTP 400"),
        ],
    )
    def test_a_server_that_breaks_in_the_middle_keeps_what_was_done_and_goes_on(self, place, tmp_path, how, message):
        with outside.serving(script=["bare"] * 55) as fake:
            fake.always = how
            config = settings(place, tmp_path, http(fake), concurrency=1, members=15, nonmembers=15)
            found = run(config)
            assert found.status is Status.ERROR
            assert any(message in why for why in of(found, Status.ERROR).values())
            kept = found.evidence["trials"]
            assert 0 < kept < 30
            fake.always, before = "bare", fake.count
            again = run(config)
            assert again.status is Status.FAIL and again.evidence["resumed"]
            assert fake.count - before == 30 - kept + ASKED + LATER  # what was answered was not asked again

    def test_busy_servers_are_asked_again(self, place, tmp_path):
        with outside.serving(script=["429", "bare", "500", "bare"]) as fake:
            found = run(settings(place, tmp_path, http(fake, retries=2)))
        assert found.status is Status.FAIL
        assert found.cost["requests_this_run"] == found.cost["questions_this_run"] + 2

    def test_a_very_slow_server_is_an_error_soon(self, place, tmp_path):
        with outside.serving(always="slow") as fake:
            found = run(settings(place, tmp_path, http(fake, timeout_s=0.2)))
        assert "no reply within 0.2 s" in of(found, Status.ERROR)["The target could be asked to the end"]

    def test_many_refusals_are_no_pass(self, place, tmp_path):
        with outside.serving(script=["bare"] * 45) as fake:
            fake.script += ["400", "bare"] * 60
            found = run(settings(place, tmp_path, http(fake), leave_out=[*UNSEEN, "guard_off", "harmless"]))
        assert "refused" in of(found, Status.INCONCLUSIVE)["Questions are answered, not refused"]
        assert found.status is not Status.PASS

    def test_the_budget_ends_it_inconclusively_and_a_larger_one_goes_on(self, place, tmp_path):
        config = settings(place, tmp_path, "guarded", budget=20, leave_out=[*UNSEEN, "guard_off", "harmless"])
        found = run(config)
        assert found.status is Status.INCONCLUSIVE and found.cost["questions"] == 20
        more = configuration.changed(config, redteam={"budget": None})
        found = run(more)
        assert found.status is Status.PASS and found.cost["questions"] == 60 and found.evidence["resumed"]


class TestRounds:
    def test_a_finished_campaign_is_asked_anew_under_other_names(self, place, tmp_path):
        config = settings(place, tmp_path, "guarded")
        run(config)
        first = {client for client, _ in outside.asked}
        outside.asked.clear()
        found = run(config)
        assert not found.evidence["resumed"]
        assert len(outside.asked) >= 100
        assert first.isdisjoint(client for client, _ in outside.asked)

    def test_an_interrupted_one_can_be_given_up(self, place, tmp_path):
        config = settings(place, tmp_path, "guarded", budget=20)
        run(config)
        assert run(config).evidence["resumed"]
        assert not run(config, anew=True).evidence["resumed"]

    def test_another_target_has_a_ledger_of_its_own(self, place, tmp_path):
        assert run(settings(place, tmp_path, "bare")).attacks[0].on.auc.value > 0.9
        assert run(settings(place, tmp_path, "garbage")).attacks[0].on.auc.value < 0.7


class TestCrawls:
    EMBEDDER = {"rag": {"embedder": {"use": "bag"}}}

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        from casemate.foreign import crawl as module
        from tests.fakes import BagOfWords

        real = module.build

        def build(role, *rest):
            return BagOfWords(64) if role == "embedder" else real(role, *rest)

        monkeypatch.setattr(module, "build", build)

    def made(self, place, tmp_path, target, known, **more):
        section = {"attacks": ["composite"], "questions": 12, "recovered": 0.1}
        return settings(place, tmp_path, target, known=known, crawl=section, leave_out=["defense_errors"], **more)

    def test_a_bare_system_is_carried_away_and_fails(self, place, tmp_path):
        found = crawl(self.made(place, tmp_path, "bare", {"corpus": "known/in"}))
        assert found.status is Status.FAIL
        haul = found.crawls[0].hauls["on"]
        assert haul.crr.value > 0.1 and haul.coverage is None and "off" not in found.crawls[0].hauls
        paths = write_report(as_report(found), tmp_path / "report", stem="crawl")
        assert not any(d.text[:60] in path.read_text() for d in outside.notes()[0] for path in paths.values())
        assert all("python tests.outside:bare" in path.read_text() for path in paths.values())
        assert load(paths["json"]).crawls[0].hauls["on"].crr == haul.crr

    def test_without_the_collection_loot_is_told_and_the_verdict_is_open(self, place, tmp_path):
        found = crawl(self.made(place, tmp_path, "bare", {}))
        assert found.status is Status.INCONCLUSIVE
        assert found.crawls == ()
        loot = found.loot["composite"]["on"]
        assert loot.questions == 12 and loot.words > 100
        assert "redteam.known.corpus" in found.verdicts[0].why
        page = write_report(as_report(found), tmp_path / "report", stem="crawl")["html"].read_text()
        assert f"{loot.words} words" in page

    def test_known_members_are_a_sample(self, place, tmp_path):
        found = crawl(self.made(place, tmp_path, "bare", {"members": "known/in"}))
        assert any("random sample" in line for line in found.not_tested)

    def test_a_target_that_dies_is_an_error_and_what_was_asked_is_kept(self, place, tmp_path):
        with outside.serving(script=["bare"] * 50) as fake:
            fake.always = "500"
            config = self.made(place, tmp_path, http(fake), {"corpus": "known/in"})
            found = crawl(config)
            assert found.status is Status.ERROR
            assert 0 < found.loot["composite"]["on"].questions < 12
            fake.always = "bare"
            again = crawl(config)
        assert again.loot["composite"]["on"].resumed == found.loot["composite"]["on"].questions

    def test_several_names_need_a_target_that_is_told_them(self, place, tmp_path):
        section = {"attacks": ["composite"], "questions": 4, "clients": 3}
        found = crawl(settings(place, tmp_path, "bare", known={}, crawl=section))
        assert "Attackers under fresh names get no further" in {c.name for c in found.checks}


class TestAim:
    def test_nobody_attacks_what_is_not_said_to_be_his(self, place, tmp_path):
        config = settings(place, tmp_path, "guarded", i_own_this_target=False)
        with pytest.raises(ConfigError, match="i_own_this_target: true, or say --own"):
            run(config)
        with pytest.raises(ConfigError, match="i_own_this_target"):
            crawl(config)
        assert outside.asked == []
        assert pointed(config, None, None, True).redteam.i_own_this_target

    @pytest.mark.parametrize(
        ("said", "use", "name"),
        [
            ("http://rag.example/ask", "http", "http rag.example"),
            ("https://u:p@rag.example/v1#m", "openai_endpoint", "openai_endpoint rag.example m"),
            ("tests.outside:bare", "python", "python tests.outside:bare"),
            ("staging", "staging", "staging (http stage.example)"),
        ],
    )
    def test_targets_on_the_command_line(self, said, use, name):
        named = {"staging": {"use": "http", "url": "http://stage.example/ask"}}
        config = pointed(configuration.parse({"redteam": {"targets": named}}), said, None, True)
        assert config.redteam.target.use == use and is_outside(config)
        if use != "openai_endpoint":
            assert take_aim(config).names["on"] == name

    def test_another_target_does_not_inherit_what_belongs_to_the_first(self):
        raw = {"target": {"use": "http", "url": "http://a.example"}, "target_off": {"use": "http", "url": "http://b/"}}
        config = pointed(configuration.parse({"redteam": raw}), "http://c.example/", None, True)
        assert config.redteam.target_off is None
        assert not is_outside(pointed(config, "own", None, False))

    def test_an_unknown_name_is_told(self):
        with pytest.raises(ConfigError, match="no target is called 'stagin'; known: own"):
            pointed(configuration.parse({}), "stagin", None, True)
        with pytest.raises(ConfigError, match="no target is called 'htp'; known: .*http"):
            take_aim(configuration.parse({"redteam": {"target": "htp", "i_own_this_target": True}}))

    def test_off_and_on_must_not_be_the_same(self):
        part = {"use": "http", "url": "http://a.example"}
        raw = {"target": part, "target_off": part | {"retries": 1}, "i_own_this_target": True}
        with pytest.raises(ConfigError, match="are the same"):
            take_aim(configuration.parse({"redteam": raw}))

    def test_a_renewed_key_leaves_the_target_what_it_was(self, monkeypatch):
        def label(key, url="http://a.example/ask"):
            monkeypatch.setenv("KEY", key)
            part = {"use": "http", "url": url, "headers": {"authorization": "Bearer ${KEY}"}}
            return take_aim(configuration.parse({"redteam": {"target": part, "i_own_this_target": True}})).label

        assert label("old") == label("new") != label("new", "http://b.example/ask")

    def test_capabilities_are_what_templates_say(self):
        def can(**options):
            part = {"use": "http", "url": "http://a.example", **options}
            return take_aim(configuration.parse({"redteam": {"target": part, "i_own_this_target": True}})).can

        assert can() == {Capability.ANSWERS}
        assert can(sources="$.s", body={"q": "{question}", "u": "{client}"}) == {"answers", "sources", "clients"}
        assert can(headers={"X-User": "{client}"}) == {"answers", "clients"}


class TestKnown:
    def test_a_non_member_with_a_twin_among_the_members_is_left_out(self):
        inside, others = outside.notes()
        twin = Document("twin", inside[0].text)
        split = known_split(inside, [*others, twin], (100, 100), 7)
        assert split.dropped == 1 and len(split.members) == len(split.nonmembers) == 30
        assert any("100 members" in note for note in split.notes)

    def test_texts_of_another_genre_are_seen_without_asking_anybody(self):
        inside, others = outside.notes()
        assert apart(known_split(inside, others, (100, 100), 7)).low < 0.6
        letters = [
            Document(f"l{i}", f"Dear neighbour {i}, the harbour closes early on day {i * 7}.") for i in range(30)
        ]
        assert apart(known_split(inside, letters, (100, 100), 7)).low > 0.9


class TestTargets:
    def sent(self, target, monkeypatch, reply):
        """The headers and body of what a target sends for a client's question."""
        found = []

        async def send(method, url, headers, body):
            found.append((dict(headers), json.loads(body)))
            return Page("application/json", json.dumps(reply).encode())

        monkeypatch.setattr(target._caller, "send", send)
        asyncio.run(target.ask(Query("Why?", client="ann\r\nX: 1")))
        return found[0]

    def test_a_client_s_name_cannot_end_a_header(self, monkeypatch):
        target = Http("http://a.example", headers={"X-User": "u-{client}", "Key": "{question}"})
        headers, _ = self.sent(target, monkeypatch, {"answer": "7"})
        assert headers["x-user"] == "u-ann%0D%0AX%3A%201"
        assert headers["key"] == "{question}"

    def test_an_endpoint_is_told_the_user_if_it_is_to_be(self, monkeypatch):
        reply = {"choices": [{"message": {"content": "7"}}]}
        for user, told in (("{client}", "ann\r\nX: 1"), ("", None)):
            target = OpenAIEndpoint("m", base_url="http://a.example/v1", user=user)
            assert self.sent(target, monkeypatch, reply)[1].get("user") == told
            assert target.can == ({"clients"} if user else set())

    def test_a_function_that_hangs_is_given_up_and_one_that_raises_tried_again(self, monkeypatch):
        release, calls = threading.Event(), []

        def hangs(question):
            release.wait(20)

        def flaky(question):
            calls.append(question)
            if len(calls) < 2:
                raise OSError
            return "at last"

        monkeypatch.setattr(outside, "hangs", hangs, raising=False)
        monkeypatch.setattr(outside, "flaky", flaky, raising=False)
        try:
            with pytest.raises(BackendError, match="no answer within 0.1 s"):
                asyncio.run(Python("tests.outside:hangs", timeout_s=0.1).ask(Query("Why?")))
        finally:
            release.set()
        assert asyncio.run(Python("tests.outside:flaky", retries=1).ask(Query("Why?"))).text == "at last"
