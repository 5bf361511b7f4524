"""Campaigns on external targets: possible checks, verdicts, and failures of the target."""

import asyncio
import contextlib
import json
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

pytest.importorskip("httpx", reason="needs casemate[http]")
pytest.importorskip("jsonpath_ng", reason="needs casemate[http]")

from casemate import config as configuration
from casemate.backends.target_answers import partial_answer
from casemate.backends.targets.http import HttpTarget
from casemate.backends.targets.openai_endpoint import OpenAIEndpoint
from casemate.backends.targets.python import PythonTarget
from casemate.cli.redteam_output import print_result
from casemate.errors import BackendError, ConfigError
from casemate.protocols import Target
from casemate.redteam.campaigns import external
from casemate.redteam.campaigns.external import ExternalExtractionCampaign, ExternalMembershipCampaign
from casemate.redteam.campaigns.external_targets import (
    MeteredTarget,
    build_external_targets,
    is_external,
    override_targets,
)
from casemate.redteam.campaigns.liveness_checks import (
    QUESTIONS_AFTER,
    QUESTIONS_BEFORE,
    LivenessQuestion,
    LivenessResult,
    check_still_answers,
)
from casemate.redteam.lab.capabilities import CHECKS, NO_BARE_TARGET, Capability, external_capabilities
from casemate.redteam.lab.datasets import genre_auc, split_provided
from casemate.redteam.lab.results import CheckStatus, load_result
from casemate.redteam.reporting.files import newest_report, write_report
from casemate.runtime.http_client import HttpResponse
from casemate.types import Document, Query
from tests import external_system
from tests.campaigns import campaign

UNSEEN = ["two_worlds", "defense_errors"]
PROVIDED = {"members": "known/in", "nonmembers": "known/out"}


@pytest.fixture(autouse=True)
def reset_asked():
    external_system.asked.clear()


@pytest.fixture(scope="module")
def owner_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("owner")
    external_system.write_known(folder)
    return folder


def settings(owner_folder, tmp_path, target, **more):
    """A configuration with its own folder and the shared texts."""
    part = {"use": "python", "call": f"tests.external_system:{target}"} if isinstance(target, str) else target
    section = {
        "target": part,
        "i_own_this_target": True,
        "provided": PROVIDED,
        "attacks": ["direct"],
        "gate": {"adjusted_accuracy": 0.35, "harmless": 0.3},
        "folder": str(tmp_path / "lab"),
    }
    return configuration.parse({"redteam": section | more}, folder=owner_folder)


@contextlib.contextmanager
def silent(title, total):
    yield lambda n: None


def run(config, **more):
    return asyncio.run(ExternalMembershipCampaign(config, **more).run(silent))


def crawl(config):
    return asyncio.run(ExternalExtractionCampaign(config).run(silent))


def reasons(campaign, status):
    return {check.name: check.reason for check in campaign.checks if check.status is status}


def http(fake, **more):
    return {"use": "http", "url": fake.url, "retries": 0, "timeout_s": 20} | more


@pytest.mark.parametrize(("text", "found"), [("The toll is {}.", True), ("Please log in.", False), ("", False)])
def test_liveness_check_passes_if_one_answer_comes_from_its_text(text, found):
    texts = [Document(str(fee), f"The toll of bridge {fee} is {fee} crowns in {fee + 1} months.") for fee in (41, 52)]
    asked = tuple(
        LivenessQuestion(f"What is the toll of {d.id}?", d, [o]) for d, o in zip(texts, texts[::-1], strict=True)
    )

    class Fixed(Target):
        async def ask(self, query):
            return partial_answer(text.format("41 crowns in 42 months" if "41" in query.text else "unknown"))

    before = LivenessResult("on", 2, 2, asked)
    check = asyncio.run(check_still_answers(MeteredTarget(Fixed()), before, 1))
    assert (check is None) is found
    assert check is None or check.status is CheckStatus.INCONCLUSIVE


def test_each_target_has_separate_reports_and_those_of_the_own_system_remain(owner_folder, tmp_path):
    lab = tmp_path / "lab"

    def attack(target):
        made = ExternalMembershipCampaign(settings(owner_folder, tmp_path, target, provided={}))
        return asyncio.run(made.run_and_write(silent))[1]["json"]

    def target(path):
        return load_result(path).evidence["target"].rpartition(":")[2]

    first = attack("bare")
    assert first.parent.parent == lab / "targets"
    assert target(first) == target(lab / "report.json") == "bare"
    second = attack("guarded")
    assert (target(first), target(second), target(lab / "report.json")) == ("bare", "guarded", "guarded")
    own = campaign()
    write_report(replace(own, evidence={**own.evidence, "target": "own"}), lab)
    assert attack("bare") == first
    assert (target(first), target(lab / "report.json")) == ("bare", "own")
    assert newest_report(lab) == first


class TestVerdicts:
    def test_guarded_target_with_an_unguarded_target_passes_and_is_named_in_the_reports(self, owner_folder, tmp_path):
        off = {"use": "python", "call": "tests.external_system:bare"}
        found = run(settings(owner_folder, tmp_path, "guarded", target_off=off, skip_checks=[*UNSEEN, "fresh_clients"]))
        assert found.status is CheckStatus.PASS, reasons(found, CheckStatus.INCONCLUSIVE)
        (attack,) = found.attacks
        assert attack.off.auc.value > 0.9
        assert attack.on.recall_query is None  # withheld documents are not observable
        assert {c.name for c in found.checks}.isdisjoint({"No defense failed", "Withheld documents leave no trace"})
        paths = write_report(found, tmp_path / "report")
        texts = {kind: path.read_text() for kind, path in paths.items()}
        assert all("python tests.external_system:guarded" in text for text in texts.values())
        assert all("guard_off" in text for text in texts.values())
        assert load_result(paths["json"]).checks == found.checks
        assert json.loads(texts["sarif"])["runs"][0]["properties"]["target"] == "python tests.external_system:guarded"
        assert not any(d.text[:60] in text for d in external_system.notes()[0] for text in texts.values())

    def test_unguarded_target_fails_without_a_second_target(self, owner_folder, tmp_path):
        found = run(settings(owner_folder, tmp_path, "bare"))
        assert found.status is CheckStatus.FAIL
        assert found.attacks[0].off is None and found.attacks[0].on.auc.value > 0.9

    def test_a_guarded_target_alone_is_inconclusive_unless_the_operator_skips_the_checks(self, owner_folder, tmp_path):
        found = run(settings(owner_folder, tmp_path, "guarded", skip_checks=UNSEEN))
        assert found.status is CheckStatus.INCONCLUSIVE
        why = reasons(found, CheckStatus.INCONCLUSIVE)
        assert "redteam.target_off" in why["The attack works without the guard"]
        accepted = [*UNSEEN, "guard_off", "harmless"]
        found = run(settings(owner_folder, tmp_path, "guarded", skip_checks=accepted))
        assert found.status is CheckStatus.PASS
        assert {NO_BARE_TARGET, *(CHECKS[name].skipped for name in accepted)} <= set(found.not_tested)

    def test_impossible_checks_are_inconclusive_with_instructions(self, owner_folder, tmp_path):
        found = run(settings(owner_folder, tmp_path, "bare"))
        open_ones = reasons(found, CheckStatus.INCONCLUSIVE)
        for name, key in {
            "The attack works without the guard": "guard_off",
            "Benign questions get the same answers as without the guard": "harmless",
            "Withheld documents leave no trace": "two_worlds",
            "No defense failed": "defense_errors",
            "New client names do not help the attacker": "fresh_clients",
        }.items():
            assert f"add {key} to redteam.skip_checks" in open_ones[name]
        junit = ET.parse(write_report(found, tmp_path / "report")["junit"]).getroot()
        assert int(junit.get("errors")) == len(open_ones)

    def test_one_configured_client_name_does_not_require_the_check_of_new_names(self, owner_folder, tmp_path):
        found = run(settings(owner_folder, tmp_path, "bare", identity="campaign"))
        assert "New client names do not help the attacker" not in reasons(found, CheckStatus.INCONCLUSIVE)
        assert "An attacker with a new client name for each text." in found.not_tested

    def test_without_provided_texts_no_request_is_sent_and_the_check_has_instructions(self, owner_folder, tmp_path):
        found = run(settings(owner_folder, tmp_path, "guarded", provided={"members": "known/in"}))
        assert found.status is CheckStatus.INCONCLUSIVE
        (only,) = found.checks
        assert "redteam.provided.nonmembers is not set" in only.reason
        assert external_system.asked == []
        page = write_report(found, tmp_path / "report")["html"].read_text()
        assert page.count("redteam.provided.nonmembers is not set") == 1

    def test_too_few_provided_texts_are_inconclusive(self, owner_folder, tmp_path):
        few = tmp_path / "few.jsonl"
        few.write_text("\n".join(json.dumps({"_id": str(i), "text": f"Note {i}."}) for i in range(5)))
        found = run(settings(owner_folder, tmp_path, "guarded", provided=PROVIDED | {"members": str(few)}))
        assert found.status is CheckStatus.INCONCLUSIVE and "at least 10" in found.checks[0].reason

    def test_meaningless_answers_are_inconclusive(self, owner_folder, tmp_path):
        found = run(
            settings(owner_folder, tmp_path, "garbage", skip_checks=[*UNSEEN, "guard_off", "harmless", "fresh_clients"])
        )
        assert found.status is CheckStatus.INCONCLUSIVE
        assert "The target (guard on) answers from its collection" in reasons(found, CheckStatus.INCONCLUSIVE)


class TestFailures:
    def test_unreachable_server_is_an_error_with_a_report(self, owner_folder, tmp_path):
        with external_system.serving() as fake:
            target = http(fake)
        found = run(settings(owner_folder, tmp_path, target))
        assert found.status is CheckStatus.ERROR
        assert "the connection failed" in reasons(found, CheckStatus.ERROR)["The target answered until the end"]
        write_report(found, tmp_path / "report")

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ("500", "HTTP 500"),
            ("malformed", "the response is not JSON"),
            ("other schema", "no text at http.answer"),
            ("429 later", "HTTP 429"),
            ("400", "HTTP 400"),
        ],
    )
    def test_campaign_on_a_failing_server_saves_finished_work_and_resumes(self, owner_folder, tmp_path, how, message):
        with external_system.serving(script=["bare"] * 55) as fake:
            fake.always = how
            config = settings(owner_folder, tmp_path, http(fake), concurrency=1, members=15, nonmembers=15)
            found = run(config)
            assert found.status is CheckStatus.ERROR
            assert any(message in why for why in reasons(found, CheckStatus.ERROR).values())
            kept = found.evidence["trials"]
            assert 0 < kept < 30
            fake.always, before = "bare", fake.count
            again = run(config)
            assert again.status is CheckStatus.FAIL and again.evidence["resumed"]
            asked = 30 - kept + QUESTIONS_BEFORE + QUESTIONS_AFTER  # answered questions are not repeated
            assert fake.count - before == asked

    def test_a_resumed_campaign_repeats_no_benign_question(self, owner_folder, tmp_path, monkeypatch):
        monkeypatch.setattr(external, "BENIGN_QUESTIONS", 20)
        off = {"use": "python", "call": "tests.external_system:bare"}
        with external_system.serving(always="500", script=["guarded"] * (QUESTIONS_BEFORE + 15)) as fake:
            config = settings(
                owner_folder, tmp_path, http(fake), target_off=off, concurrency=1, members=10, nonmembers=10
            )
            assert run(config).status is CheckStatus.ERROR
            fake.always, before = "guarded", fake.count
            again = run(config)
            assert fake.count - before == QUESTIONS_BEFORE + 5 + 20 + QUESTIONS_AFTER
        assert again.utility.questions == 20

    def test_busy_servers_are_retried(self, owner_folder, tmp_path):
        with external_system.serving(script=["429", "bare", "500", "bare"]) as fake:
            found = run(settings(owner_folder, tmp_path, http(fake, retries=2)))
        assert found.status is CheckStatus.FAIL
        assert found.cost["requests_this_run"] == found.cost["questions_this_run"] + 2

    def test_duration_includes_the_preparation(self, owner_folder, tmp_path, monkeypatch):
        prepare = ExternalMembershipCampaign.prepare

        async def slow(self, *arguments):
            await asyncio.sleep(2)
            return await prepare(self, *arguments)

        monkeypatch.setattr(ExternalMembershipCampaign, "prepare", slow)
        before = time.monotonic()
        found = run(settings(owner_folder, tmp_path, "guarded"))
        assert 2 <= found.cost["seconds"] <= time.monotonic() - before

    def test_a_slow_server_times_out(self, owner_folder, tmp_path):
        with external_system.serving(always="slow") as fake:
            found = run(settings(owner_folder, tmp_path, http(fake, timeout_s=0.2)))
        assert "no response within 0.2 s" in reasons(found, CheckStatus.ERROR)["The target answered until the end"]

    def test_many_refusals_are_inconclusive(self, owner_folder, tmp_path):
        with external_system.serving(script=["bare"] * 45) as fake:
            fake.script += ["400", "bare"] * 60
            found = run(settings(owner_folder, tmp_path, http(fake), skip_checks=[*UNSEEN, "guard_off", "harmless"]))
        assert "refused" in reasons(found, CheckStatus.INCONCLUSIVE)["Questions are answered, not refused"]
        assert found.status is not CheckStatus.PASS

    @pytest.mark.slow
    @pytest.mark.parametrize(("how", "refused"), [("empty", 20), ("other schema", 20), ("bare", 0)])
    def test_responses_without_text_count_as_refused(self, owner_folder, tmp_path, how, refused):
        with external_system.serving(script=["bare"] * 40) as fake:
            fake.script += {"empty": ["empty"] * 20, "other schema": ["other schema", "bare"] * 20}.get(how, [])
            config = settings(owner_folder, tmp_path, http(fake), concurrency=1, members=10, nonmembers=10)
            found = run(config)
        assert found.cost["refused"] == refused
        assert ("Questions are answered, not refused" in reasons(found, CheckStatus.INCONCLUSIVE)) is bool(refused)

    @pytest.mark.slow
    def test_target_that_stops_answering_from_its_collection_is_inconclusive(self, owner_folder, tmp_path):
        with external_system.serving(script=["bare"] * 45, always="garbage") as fake:
            found = run(settings(owner_folder, tmp_path, http(fake), skip_checks=[*UNSEEN, "guard_off", "harmless"]))
        why = reasons(found, CheckStatus.INCONCLUSIVE)["The target (guard on) still answers from its collection"]
        assert "After the attacks it answered none of 3 questions" in why

    def test_exhausted_budget_is_inconclusive_and_a_larger_budget_resumes(self, owner_folder, tmp_path):
        config = settings(owner_folder, tmp_path, "guarded", budget=20, skip_checks=[*UNSEEN, "guard_off", "harmless"])
        found = run(config)
        assert found.status is CheckStatus.INCONCLUSIVE and found.cost["questions"] == 20
        more = configuration.with_overrides(config, redteam={"budget": None})
        found = run(more)
        assert found.status is CheckStatus.PASS and found.cost["questions"] == 60 and found.evidence["resumed"]

    def test_too_small_a_budget_is_refused_before_the_first_question(self, owner_folder, tmp_path):
        config = settings(owner_folder, tmp_path, "guarded", budget=59)
        external_system.asked.clear()
        with pytest.raises(ConfigError) as refused:
            asyncio.run(ExternalMembershipCampaign(config).run_and_write(silent))
        assert str(refused.value) == (
            "1 attack on 60 texts needs about 60 questions; the budget is 59. Raise it (redteam.budget) or name fewer "
            "attacks"
        )
        assert not external_system.asked
        enough = configuration.with_overrides(config, redteam={"budget": 60})
        asyncio.run(ExternalMembershipCampaign(enough).run_and_write(silent))
        assert external_system.asked

    def test_attack_stopped_by_the_budget_is_not_finished(self, owner_folder, tmp_path):
        found = run(settings(owner_folder, tmp_path, "guarded", budget=12))
        assert found.attacks[0].error.startswith("not finished: fewer than 5 members or non-members in a half")
        assert found.attacks[0].error.endswith("the budget of 12 questions ran out; raise it and run again to continue")
        console = Console(width=120)
        with console.capture() as held:
            print_result(found, console)
        (row,) = [line for line in held.get().splitlines() if line.startswith("│ direct")]
        assert row.split()[1:] == ["direct", "│", "not", "finished", "│", "│"]


class TestRounds:
    def test_a_finished_campaign_is_repeated_with_new_client_names(self, owner_folder, tmp_path):
        config = settings(owner_folder, tmp_path, "guarded")
        run(config)
        first = {client for client, _ in external_system.asked}
        external_system.asked.clear()
        found = run(config)
        assert not found.evidence["resumed"]
        assert len(external_system.asked) >= 100
        assert first.isdisjoint(client for client, _ in external_system.asked)

    def test_interrupted_campaign_can_be_restarted_from_the_beginning(self, owner_folder, tmp_path):
        config = settings(owner_folder, tmp_path, "guarded", budget=20)
        run(config)
        assert run(config).evidence["resumed"]
        assert not run(config, restart=True).evidence["resumed"]

    def test_trials_are_not_shared_between_targets(self, owner_folder, tmp_path):
        assert run(settings(owner_folder, tmp_path, "bare")).attacks[0].on.auc.value > 0.9
        assert run(settings(owner_folder, tmp_path, "garbage")).attacks[0].on.auc.value < 0.7


class TestCrawls:
    EMBEDDER = {"rag": {"embedder": {"use": "bag"}}}

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        from casemate.redteam.campaigns import external as module
        from tests.fakes import BagOfWords

        real = module.build

        def build(role, *rest):
            return BagOfWords(64) if role == "embedder" else real(role, *rest)

        monkeypatch.setattr(module, "build", build)

    def made(self, owner_folder, tmp_path, target, provided, **more):
        section = {"attacks": ["composite"], "questions": 12, "max_recovered": 0.1}
        return settings(
            owner_folder, tmp_path, target, provided=provided, crawl=section, skip_checks=["defense_errors"], **more
        )

    def test_an_unguarded_collection_is_extracted_and_fails(self, owner_folder, tmp_path):
        found = crawl(self.made(owner_folder, tmp_path, "bare", {"corpus": "known/in"}))
        assert found.status is CheckStatus.FAIL
        result = found.crawls[0].by_target["on"]
        assert result.crr.value > 0.1 and result.coverage is None and "off" not in found.crawls[0].by_target
        paths = write_report(found, tmp_path / "report", stem="crawl")
        assert not any(d.text[:60] in path.read_text() for d in external_system.notes()[0] for path in paths.values())
        assert all("python tests.external_system:bare" in path.read_text() for path in paths.values())
        assert load_result(paths["json"]).crawls[0].by_target["on"].crr == result.crr

    def test_without_provided_texts_the_volume_is_reported_and_the_verdict_inconclusive(self, owner_folder, tmp_path):
        found = crawl(self.made(owner_folder, tmp_path, "bare", {}))
        assert found.status is CheckStatus.INCONCLUSIVE
        assert found.crawls == ()
        side = found.extracted["composite"]["on"]
        assert side.questions == 12 and side.words > 100
        assert "redteam.provided.corpus" in found.checks[0].reason
        page = write_report(found, tmp_path / "report", stem="crawl")["html"].read_text()
        assert f"{side.words:,} words" in page

    def test_provided_members_are_reported_as_a_sample(self, owner_folder, tmp_path):
        found = crawl(self.made(owner_folder, tmp_path, "bare", {"members": "known/in"}))
        assert any("random sample" in line for line in found.not_tested)

    def test_failing_target_is_an_error_and_exchanges_are_saved(self, owner_folder, tmp_path):
        with external_system.serving(script=["bare"] * 50) as fake:
            fake.always = "500"
            config = self.made(owner_folder, tmp_path, http(fake), {"corpus": "known/in"})
            found = crawl(config)
            assert found.status is CheckStatus.ERROR
            assert 0 < found.extracted["composite"]["on"].questions < 12
            fake.always = "bare"
            again = crawl(config)
        assert again.extracted["composite"]["on"].resumed == found.extracted["composite"]["on"].questions

    def test_several_client_names_require_a_target_that_receives_them(self, owner_folder, tmp_path):
        section = {"attacks": ["composite"], "questions": 4, "clients": 3}
        found = crawl(settings(owner_folder, tmp_path, "bare", provided={}, crawl=section))
        assert "New client names do not help the attacker" in {c.name for c in found.checks}


class TestTargetSelection:
    def test_an_attack_requires_confirmed_ownership(self, owner_folder, tmp_path):
        config = settings(owner_folder, tmp_path, "guarded", i_own_this_target=False)
        with pytest.raises(ConfigError, match="i_own_this_target: true, or pass --own"):
            run(config)
        with pytest.raises(ConfigError, match="i_own_this_target"):
            crawl(config)
        assert external_system.asked == []
        assert override_targets(config, None, None, True).redteam.i_own_this_target

    @pytest.mark.parametrize(
        ("said", "use", "name"),
        [
            ("http://rag.example/ask", "http", "http rag.example"),
            ("https://u:p@rag.example/v1#m", "openai_endpoint", "openai_endpoint rag.example m"),
            ("tests.external_system:bare", "python", "python tests.external_system:bare"),
            ("staging", "staging", "staging (http stage.example)"),
        ],
    )
    def test_targets_on_the_command_line(self, said, use, name):
        named = {"staging": {"use": "http", "url": "http://stage.example/ask"}}
        config = override_targets(configuration.parse({"redteam": {"targets": named}}), said, None, True)
        assert config.redteam.target.use == use and is_external(config)
        if use != "openai_endpoint":
            assert build_external_targets(config).names["on"] == name

    def test_selected_target_does_not_inherit_the_unguarded_target(self):
        raw = {"target": {"use": "http", "url": "http://a.example"}, "target_off": {"use": "http", "url": "http://b/"}}
        config = override_targets(configuration.parse({"redteam": raw}), "http://c.example/", None, True)
        assert config.redteam.target_off is None
        assert not is_external(override_targets(config, "own", None, False))

    def test_an_unknown_name_is_an_error(self):
        with pytest.raises(ConfigError, match="unknown target 'stagin'; known: own"):
            override_targets(configuration.parse({}), "stagin", None, True)
        with pytest.raises(ConfigError, match="unknown target 'htp'; known: .*http"):
            build_external_targets(configuration.parse({"redteam": {"target": "htp", "i_own_this_target": True}}))

    def test_guarded_and_unguarded_target_must_differ(self):
        part = {"use": "http", "url": "http://a.example"}
        raw = {"target": part, "target_off": part | {"retries": 1}, "i_own_this_target": True}
        with pytest.raises(ConfigError, match="are the same"):
            build_external_targets(configuration.parse({"redteam": raw}))

    def test_renewed_key_does_not_change_the_label(self, monkeypatch):
        def label(key, url="http://a.example/ask"):
            monkeypatch.setenv("KEY", key)
            part = {"use": "http", "url": url, "headers": {"authorization": "Bearer ${KEY}"}}
            return build_external_targets(
                configuration.parse({"redteam": {"target": part, "i_own_this_target": True}})
            ).label

        assert label("old") == label("new") != label("new", "http://b.example/ask")

    def test_target_without_declared_capabilities_only_answers(self):
        assert external_capabilities(object()) == {Capability.ANSWERS}
        assert external_capabilities(SimpleNamespace(can=("verdicts",)), Capability.PROVIDED) == {
            Capability.ANSWERS,
            Capability.PROVIDED,
            Capability.VERDICTS,
        }

    def test_capabilities_follow_from_templates(self):
        def can(**options):
            part = {"use": "http", "url": "http://a.example", **options}
            return build_external_targets(
                configuration.parse({"redteam": {"target": part, "i_own_this_target": True}})
            ).can

        assert can() == {Capability.ANSWERS}
        assert can(sources="$.s", body={"q": "{question}", "u": "{client}"}) == {"answers", "sources", "clients"}
        assert can(headers={"X-User": "{client}"}) == {"answers", "clients"}


class TestProvidedTexts:
    def test_non_member_similar_to_a_member_is_excluded(self):
        inside, others = external_system.notes()
        duplicate = Document("twin", inside[0].text)
        split = split_provided(inside, [*others, duplicate], (100, 100), 7)
        assert split.dropped == 1 and len(split.members) == len(split.nonmembers) == 30
        assert any("100 members" in note for note in split.notes)

    def test_a_different_genre_is_detected_without_the_target(self):
        inside, others = external_system.notes()
        assert genre_auc(split_provided(inside, others, (100, 100), 7)).low < 0.6
        letters = [
            Document(f"l{i}", f"Dear neighbour {i}, the harbour closes early on day {i * 7}.") for i in range(30)
        ]
        assert genre_auc(split_provided(inside, letters, (100, 100), 7)).low > 0.9


class TestTargets:
    def sent(self, target, monkeypatch, reply):
        """Headers and body of a target's request for a client's question."""
        found = []

        async def send(method, url, headers, body):
            found.append((dict(headers), json.loads(body)))
            return HttpResponse("application/json", json.dumps(reply).encode())

        monkeypatch.setattr(target._http, "send", send)
        asyncio.run(target.ask(Query("Why?", client="ann\r\nX: 1")))
        return found[0]

    def test_a_client_name_cannot_inject_a_header(self, monkeypatch):
        target = HttpTarget("http://a.example", headers={"X-User": "u-{client}", "Key": "{question}"})
        headers, _ = self.sent(target, monkeypatch, {"answer": "7"})
        assert headers["x-user"] == "u-ann%0D%0AX%3A%201"
        assert headers["key"] == "{question}"

    def test_endpoint_receives_the_user_if_configured(self, monkeypatch):
        reply = {"choices": [{"message": {"content": "7"}}]}
        for user, sent_user in (("{client}", "ann\r\nX: 1"), ("", None)):
            target = OpenAIEndpoint("m", base_url="http://a.example/v1", user=user)
            assert self.sent(target, monkeypatch, reply)[1].get("user") == sent_user
            assert target.can == ({"clients"} if user else set())

    def test_blocked_function_times_out_and_a_failing_function_is_retried(self, monkeypatch):
        release, calls = threading.Event(), []

        def blocks(question):
            release.wait(20)

        def flaky(question):
            calls.append(question)
            if len(calls) < 2:
                raise OSError
            return "at last"

        monkeypatch.setattr(external_system, "hangs", blocks, raising=False)
        monkeypatch.setattr(external_system, "flaky", flaky, raising=False)
        try:
            with pytest.raises(BackendError, match="no answer within 0.1 s"):
                asyncio.run(PythonTarget("tests.external_system:hangs", timeout_s=0.1).ask(Query("Why?")))
        finally:
            release.set()
        assert asyncio.run(PythonTarget("tests.external_system:flaky", retries=1).ask(Query("Why?"))).text == "at last"
