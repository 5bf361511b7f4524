"""``casemate client``: list flagged clients, and reset one. ``casemate events``: export."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from casemate.backends.event_stores.sql import SqlEventStore
from casemate.cli import cli
from casemate.cli import client as client_command
from casemate.cli.console import TextConsole
from casemate.errors import ConfigError, DataError
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.guard.client_state.reset import reset_tenant
from casemate.guard.client_state.withheld_documents import WithheldDocuments
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.monitor.alerts.alert import Alert, AlertPhase, alert_to_event
from casemate.monitor.alerts.alerting_store import alerts_for_event
from casemate.monitor.canaries.canary import Canary
from casemate.monitor.canaries.check import ObservedAnswer, check_answer
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Severity, result_to_event
from casemate.monitor.poisoning.quarantine import Quarantine
from casemate.monitor.poisoning.scoring import ScreeningResult
from casemate.types import Document, Event, Query, Retrieval, SimilarityStats


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "casemate.yaml").write_text("store: {use: sql, path: events.db}\n")
    return SqlEventStore(path=tmp_path / "events.db")


def flagged(client, hours=0.0, sources=("a",), is_flagged=True):
    body = {"tenant": "default", "client": client, "defense": "mirabel", "flagged": is_flagged}
    at = datetime.now(UTC) - timedelta(hours=hours)
    return Event(f"{client}{hours}{sources}", at, "verdict", body | {"evidence": {"withheld": list(sources)}})


def listed(*options):
    done = CliRunner().invoke(cli, ["client", "list", "--json", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return {one["client"]: one for one in json.loads(done.stdout)["clients"]}


def test_flagged_clients_are_listed_until_they_are_reset(place):
    key, _ = ApiKeyStore(place).create(Grant("web-shop"))
    for event in (flagged(f"{key.id}/ann"), flagged(f"{key.id}/ann", 1, ("b", "c")), flagged("eve", 30)):
        place.append(event)
    place.append(flagged("harmless", is_flagged=False))
    WithheldDocuments("mirabel", 3600.0, place).add("default", f"{key.id}/ann", "a")
    place.flush()
    (one,) = listed().values()
    assert (one["client"], one["key"], one["verdicts"]) == (f"{key.id}/ann", "web-shop", {"mirabel": 2})
    assert one["withheld"] == ["a", "b", "c"]
    done = CliRunner().invoke(cli, ["client", "reset", f"{key.id}/ann"], catch_exceptions=False)
    assert done.exit_code == 0
    assert listed() == {}
    place.append(flagged(f"{key.id}/ann", -0.001))
    place.flush()
    assert listed()[f"{key.id}/ann"]["verdicts"] == {"mirabel": 1}
    place.close()


def test_the_list_fits_80_columns_and_its_prefixes_are_accepted(place, monkeypatch):
    monkeypatch.setattr(client_command, "out", TextConsole(width=80, highlight=False))
    keys = [ApiKeyStore(place).create(Grant(f"web-shop-{i}"))[0] for i in range(3)]
    names = [f"{key.id}/customer-{key.id}@department.example.org" for key in keys]
    names += [f"cli-{i}{'0' * 31}" for i in "ab"]
    for name in names:
        WithheldDocuments("mirabel", 3600.0, place).add("default", name, "a")
        place.append(flagged(name))
    place.flush()
    done = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False)
    table = done.stdout.partition("client: first characters")[0]
    assert max(map(len, table.splitlines())) <= 80
    short = [line.split("│")[1].strip() for line in table.splitlines() if "mirabel" in line]
    assert len(short) == 5 and max(map(len, short)) == 16
    assert [sum(name.startswith(one) for one in short) for name in names] == [1] * 5
    done = CliRunner().invoke(cli, ["client", "reset", keys[0].id[:12]], catch_exceptions=False)
    assert done.stdout.startswith(f"reset {names[0]}: ")
    assert names[0] not in listed() and names[1] in listed()
    with pytest.raises(ConfigError, match=rf"2 clients begin with 'cli-': {names[3]}, {names[4]}; give more"):
        cli(["client", "reset", "cli-"], standalone_mode=False)
    place.close()


def test_keys_are_found_by_the_beginning_of_their_id_or_name(place):
    keys = ApiKeyStore(place)
    shop, _ = keys.create(Grant("web-shop"))
    other, _ = keys.create(Grant("web-forum"))
    assert keys.named("web-s") == keys.named(shop.id[:15]) == keys.named("web-shop")
    with pytest.raises(ConfigError, match=r"2 valid keys match 'web': .*web-shop.*; give the id of one"):
        keys.named("web")
    assert keys.revoke(other.id[:15]).id == other.id
    assert keys.named("web") == keys.named("web-shop")
    keys.create(Grant("web-forum-2"))
    with pytest.raises(ConfigError, match="no valid key has the id or name 'web-forum'"):
        keys.named("web-forum")  # it is the name of a revoked key
    with pytest.raises(ConfigError, match="no key has the id ''"):
        keys.revoke("")
    place.close()


def test_clients_that_only_crawl_limit_limits_are_listed_with_their_requests(place):
    def at(number, client, grade, hidden=(), **more):
        body = {"tenant": "default", "client": client, "defense": "crawl_limit", "flagged": False, "enforced": True}
        body |= {"request": f"r{number // 2}", "hidden": list(hidden), "evidence": {"grade": grade}, **more}
        place.append(Event(f"e{number}", datetime.now(UTC), "verdict", body))

    at(0, "full", "full")
    at(2, "observed", "quorum", enforced=False)
    at(4, "other", "full", ["d1"], defense="mirabel")
    for number in (6, 7, 8):  # two verdicts belong to one request
        at(number, "budget", "extracts")
    at(10, "share", "full", ["d1"])
    place.flush()
    found = listed()
    assert {name: one["limited"] for name, one in found.items()} == {"budget": 2, "share": 1}
    assert found["share"]["verdicts"] == {}


def restrict(store, limit, first=0):
    """Lets four clients copy, so that all clients of the tenant are restricted; then a new client asks."""
    for number in range(4):
        limit.evidence.record_answer(Query("q", f"c{number}"), "", {f"d{(number + first) % 4}": 1}, (), True)
    query, nothing = Query("What is new?", "new"), Retrieval((), SimilarityStats(0, 0.0, 0.0))
    verdict = asyncio.run(limit.on_retrieve(query, nothing)).verdict
    body = {"tenant": "default", "client": "new", "defense": "crawl_limit", "flagged": verdict.flagged}
    body |= {"hidden": [], "evidence": verdict.evidence, "enforced": True, "request": query.id}
    store.append(Event(query.id, datetime.now(UTC), "verdict", body))
    limit.evidence.record_answer(query, "an answer", {"d9": 1}, (), False, shortened=True)
    cut = body | {"evidence": {"cut": "quote_words", "most": 60}}  # the verdict on the answer
    store.append(Event(f"{query.id} cut", datetime.now(UTC), "verdict", cut))
    store.flush()
    return Event(query.id, datetime.now(UTC), "verdict", body)


def test_a_restriction_of_all_clients_is_shown_and_ends_with_a_reset_of_the_tenant(place):
    limit, other = CrawlLimit(store=place), CrawlLimit(store=place)
    (alert,) = alerts_for_event(restrict(place, limit))
    assert alert.kind == "crawl_tenant" and "all clients of tenant 'default' are restricted until" in alert.changes[0]
    assert listed()["new"]["limited"] == 1  # its answer was cut
    done = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False)
    assert "all clients of tenant 'default' are restricted until 20" in done.stdout
    done = CliRunner().invoke(cli, ["client", "reset", "--tenant", "default"], catch_exceptions=False)
    assert done.exit_code == 0
    for each in (limit, other, CrawlLimit(store=place)):
        each.sync()
        assert not each.evidence.is_colluding("default")
        assert "tenant_until" not in each.evidence.summary(Query("q", "new"))
    assert "all clients" not in CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False).stdout
    restrict(place, limit, first=1)  # the same clients and chunks, other pairs
    assert "all clients" in CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False).stdout
    place.close()


def test_clients_that_repeat_answers_to_one_another_count_again_after_a_reset_of_the_tenant(place):
    evidence = CrawlLimit(store=place).evidence
    for day in ("monday", "sunday"):
        for number in range(4):
            text = " ".join(f"{day}{number}{word}" for word in "abcdefgh")
            evidence.record_answer(Query("q", f"told{number}"), text, {}, (), False)
            assert not evidence.is_colluding("default")
            evidence.record_question(Query(text, f"asks{number}"))
        assert evidence.is_colluding("default")
        reset_tenant(place, "default")
        evidence.sync()
    place.close()


def test_a_reset_needs_a_client_or_a_tenant(place):
    place.close()
    for given in ([], ["ann", "--tenant", "default"]):
        with pytest.raises(ConfigError, match="either a client or --tenant"):
            CliRunner().invoke(cli, ["client", "reset", *given], catch_exceptions=False)


def test_clients_of_canaries_are_listed_on_request_only(place):
    for client in ("canary-fee-7", "eve"):
        place.append(flagged(client))
    place.flush()
    assert listed().keys() == {"eve"}
    assert listed("--canaries").keys() == {"canary-fee-7", "eve"}


def test_resetting_an_unknown_client_or_tenant_is_an_error(place):
    place.append(flagged("eve"))
    place.close()
    with pytest.raises(ConfigError, match="there is no state of client 'ann'"):
        CliRunner().invoke(cli, ["client", "reset", "ann"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="no client of tenant 'defualt' has asked"):
        CliRunner().invoke(cli, ["client", "reset", "--tenant", "defualt"], catch_exceptions=False)
    assert CliRunner().invoke(cli, ["client", "reset", "--tenant", "default"]).exit_code == 0


@pytest.mark.parametrize("width", [60, 80])
def test_the_list_keeps_its_last_column_in_a_narrow_terminal(place, monkeypatch, width):
    monkeypatch.setattr(client_command, "out", TextConsole(width=width, highlight=False))
    place.append(flagged(f"cli-{'0' * 32}"))
    place.flush()
    table = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False).stdout.partition("client: first")[0]
    rows = table.splitlines()
    assert max(map(len, rows)) <= width and all(row[-1] in "┓┃┩│┘" for row in rows)
    assert any(row.count("┃") == 8 and "last" in row for row in rows) and "cli-000000000000" in table


def test_the_table_shows_the_whole_id_of_a_key(place):
    key, _ = ApiKeyStore(place).create(Grant("a-shop-with-a-long-name"))
    place.append(flagged(key.id))
    place.flush()
    done = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False)
    assert key.id in done.stdout


def test_the_table_loses_no_content_at_80_columns(place, monkeypatch):
    name = "a-shop-with-a-long-name"
    key, _ = ApiKeyStore(place).create(Grant(name))
    place.append(
        replace(flagged(key.id), body={**flagged(key.id).body, "evidence": {"withheld": [str(n) for n in range(120)]}})
    )
    place.flush()
    monkeypatch.setattr(client_command, "out", TextConsole(width=80))
    shown = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False).stdout
    assert "…" not in shown and key.id in shown and "120" in shown and "default" in shown
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert "".join(row[1] for row in cells) == name


def exported(*options):
    done = CliRunner().invoke(cli, ["events", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout, [json.loads(line) for line in done.stdout.splitlines()]


def test_events_of_a_time_range_are_exported_without_text_and_digests(place):
    ApiKeyStore(place).create(Grant("web-shop"))
    now = datetime.now(UTC)
    for hours, client in ((30, "too old"), (2, "eve"), (1, "ann")):
        made = flagged(client, hours)
        place.append(replace(made, body={**made.body, "text": "RAW question", "new_field": "RAW"}))
    held = {"what": "held", "key": "k", "reasons": [], "documents": [{"id": "d1", "text": "RAW document"}]}
    place.append(Event("q", now - timedelta(minutes=5), "quarantine", held))
    place.append(Event("c", now, "canary-clock", {"secret": "RAW"}))
    place.flush()
    place.close()
    said, found = exported()
    assert [(e["kind"], e["body"].get("client")) for e in found] == [
        ("verdict", "eve"),
        ("verdict", "ann"),
        ("quarantine", None),
        ("key", None),
    ]
    assert "RAW" not in said and "digest" not in said
    assert found[2]["body"]["document_ids"] == ["d1"] and found[3]["body"]["name"] == "web-shop"
    said, found = exported(
        "--text", "--kind", "verdict", "--since", "40h", "--until", f"{now - timedelta(hours=2):%FT%T}Z"
    )
    assert [e["body"]["client"] for e in found] == ["too old"] and "RAW question" in said and "new_field" not in said
    for options, why in ((["--kind", "keys"], "the kinds are"), (["--until", "25h"], "choose an earlier start")):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(cli, ["events", *options], catch_exceptions=False)


def test_phrases_of_canaries_are_exported_with_text_only(place):
    now = datetime.now(UTC)
    canary = Canary(
        id="a", query="q", expected_answer="Patient Maria Huber has cancer", should_not_contain=["7741-ZEBRA"]
    )
    deviations = check_answer(canary, ObservedAnswer("The code is 7741-ZEBRA."))
    place.append(result_to_event(CanaryResult("a", "run", now, CanaryStatus.FAIL, deviations)))
    changes = tuple(d.message for d in deviations)
    alert = Alert("x", "changed", Severity.HIGH, "clinic", ("a",), now, "clinic: 1 canary fails", changes)
    place.append(alert_to_event(alert, AlertPhase.OPENED, now, "run"))
    place.flush()
    place.close()
    said, found = exported()
    assert "Maria" not in said and "ZEBRA" not in said
    by_kind = {e["kind"]: e["body"] for e in found}
    assert by_kind["canary"]["deviations"] == [{"kind": "answer_mismatch"}, {"kind": "unexpected_phrase"}]
    assert by_kind["alert"]["title"] == "clinic: 1 canary fails"
    said, found = exported("--text")
    assert said.count("Maria Huber") == said.count("ZEBRA") == 2


def test_each_event_is_exported_once_in_ascii_and_verdicts_on_canaries_are_marked(place):
    for number, client in enumerate(("canary-fee-7", "\u00e9ve\u2028")):
        place.append(replace(flagged(client), id=str(number)))
    place.flush()
    place.close()
    said, found = exported("--kind", "verdict", "--kind", "verdict")
    assert said.isascii()
    assert {e["body"]["client"]: e["body"].get("canary") for e in found} == {
        "canary-fee-7": True,
        "\u00e9ve\u2028": None,
    }
    assert len(found) == 2


def test_several_quarantined_sources_are_dropped_at_once_and_none_if_a_key_is_wrong(place):
    quarantined = Quarantine(place)
    for name in "abc":
        quarantined.add([ScreeningResult(Document(name, f"text {name}"), 5.0, 0.01, ())], "default")
    with pytest.raises(DataError, match="'x' matches 0"):
        CliRunner().invoke(cli, ["quarantine", "drop", "a", "x"], catch_exceptions=False)
    assert len(quarantined.pending()) == 3
    done = CliRunner().invoke(cli, ["quarantine", "drop", "a", "b", "a"], catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, "dropped: a\ndropped: b\n")
    assert [source.source for source in quarantined.pending()] == ["c"]
    place.close()


@pytest.mark.parametrize("since", ["yesterday", "999999d", "0001-01-01T00:00:00+14:00"])
def test_a_start_that_is_no_time_is_refused(place, since):
    place.close()
    with pytest.raises(ConfigError, match="ISO 8601"):
        CliRunner().invoke(cli, ["events", "--since", since], catch_exceptions=False)


def test_a_period_before_all_time_is_refused(place):
    assert CliRunner().invoke(cli, ["client", "list", "--hours", "1e9"]).exit_code == 2
