"""``casemate client``: lists flagged clients and resets a client. ``casemate events``: export."""

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
def event_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "casemate.yaml").write_text("store: {use: sql, path: events.db}\n")
    return SqlEventStore(path=tmp_path / "events.db")


def flagged(client, hours=0.0, sources=("a",), is_flagged=True):
    body = {"tenant": "default", "client": client, "defense": "mirabel", "flagged": is_flagged}
    at = datetime.now(UTC) - timedelta(hours=hours)
    return Event(f"{client}{hours}{sources}", at, "verdict", body | {"evidence": {"withheld": list(sources)}})


def list_clients(*options):
    done = CliRunner().invoke(cli, ["client", "list", "--json", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return {one["client"]: one for one in json.loads(done.stdout)["clients"]}


def test_flagged_clients_are_listed_until_they_are_reset(event_store):
    key, _ = ApiKeyStore(event_store).create(Grant("web-shop"))
    for event in (flagged(f"{key.id}/ann"), flagged(f"{key.id}/ann", 1, ("b", "c")), flagged("eve", 30)):
        event_store.append(event)
    event_store.append(flagged("harmless", is_flagged=False))
    WithheldDocuments("mirabel", 3600.0, event_store).add("default", f"{key.id}/ann", "a")
    event_store.flush()
    (one,) = list_clients().values()
    assert (one["client"], one["key"], one["verdicts"]) == (f"{key.id}/ann", "web-shop", {"mirabel": 2})
    assert one["withheld"] == ["a", "b", "c"]
    done = CliRunner().invoke(cli, ["client", "reset", f"{key.id}/ann"], catch_exceptions=False)
    assert done.exit_code == 0
    assert list_clients() == {}
    event_store.append(flagged(f"{key.id}/ann", -0.001))
    event_store.flush()
    assert list_clients()[f"{key.id}/ann"]["verdicts"] == {"mirabel": 1}
    event_store.close()


def test_the_list_fits_80_columns_and_its_prefixes_are_accepted(event_store, monkeypatch):
    monkeypatch.setattr(client_command, "out", TextConsole(width=80, highlight=False))
    keys = [ApiKeyStore(event_store).create(Grant(f"web-shop-{i}"))[0] for i in range(3)]
    names = [f"{key.id}/customer-{key.id}@department.example.org" for key in keys]
    names += [f"cli-{i}{'0' * 31}" for i in "ab"]
    for name in names:
        WithheldDocuments("mirabel", 3600.0, event_store).add("default", name, "a")
        event_store.append(flagged(name))
    event_store.flush()
    done = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False)
    table = done.stdout.partition("client: first characters")[0]
    assert max(map(len, table.splitlines())) <= 80
    short = [line.split("│")[1].strip() for line in table.splitlines() if "mirabel" in line]
    assert len(short) == 5 and max(map(len, short)) == 16
    assert [sum(name.startswith(one) for one in short) for name in names] == [1] * 5
    done = CliRunner().invoke(cli, ["client", "reset", keys[0].id[:12]], catch_exceptions=False)
    assert done.stdout.startswith(f"reset {names[0]}: ")
    assert names[0] not in list_clients() and names[1] in list_clients()
    with pytest.raises(ConfigError, match=rf"2 clients begin with 'cli-': {names[3]}, {names[4]}; give more"):
        cli(["client", "reset", "cli-"], standalone_mode=False)
    event_store.close()


def test_keys_are_found_by_a_prefix_of_their_id_or_name(event_store):
    keys = ApiKeyStore(event_store)
    shop, _ = keys.create(Grant("web-shop"))
    other, _ = keys.create(Grant("web-forum"))
    assert keys.named("web-s") == keys.named(shop.id[:15]) == keys.named("web-shop")
    with pytest.raises(ConfigError, match=r"2 valid keys match 'web': .*web-shop.*; give the id of one"):
        keys.named("web")
    assert keys.revoke(other.id[:15]).id == other.id
    assert keys.named("web") == keys.named("web-shop")
    keys.create(Grant("web-forum-2"))
    with pytest.raises(ConfigError, match="no valid key has the id or name 'web-forum'"):
        keys.named("web-forum")  # the name of a revoked key
    with pytest.raises(ConfigError, match="no key has the id ''"):
        keys.revoke("")
    event_store.close()


def test_clients_limited_by_crawl_limit_are_listed_with_their_requests(event_store):
    def at(number, client, grade, hidden=(), **more):
        body = {"tenant": "default", "client": client, "defense": "crawl_limit", "flagged": False, "enforced": True}
        body |= {"request": f"r{number // 2}", "hidden": list(hidden), "evidence": {"grade": grade}, **more}
        event_store.append(Event(f"e{number}", datetime.now(UTC), "verdict", body))

    at(0, "full", "full")
    at(2, "observed", "quorum", enforced=False)
    at(4, "other", "full", ["d1"], defense="mirabel")
    for number in (6, 7, 8):  # two verdicts belong to one request
        at(number, "budget", "extracts")
    at(10, "share", "full", ["d1"])
    event_store.flush()
    found = list_clients()
    assert {name: one["limited"] for name, one in found.items()} == {"budget": 2, "share": 1}
    assert found["share"]["verdicts"] == {}


def restrict(store, limit, first=0):
    """Lets four clients copy, which restricts all clients of the tenant. Then a new client asks."""
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


def test_restriction_of_all_clients_is_shown_until_the_tenant_is_reset(event_store):
    limit, other = CrawlLimit(store=event_store), CrawlLimit(store=event_store)
    (alert,) = alerts_for_event(restrict(event_store, limit))
    assert alert.kind == "crawl_tenant" and "all clients of tenant 'default' are restricted until" in alert.changes[0]
    assert list_clients()["new"]["limited"] == 1  # its answer was cut
    done = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False)
    assert "all clients of tenant 'default' are restricted until 20" in done.stdout
    done = CliRunner().invoke(cli, ["client", "reset", "--tenant", "default"], catch_exceptions=False)
    assert done.exit_code == 0
    for each in (limit, other, CrawlLimit(store=event_store)):
        each.sync()
        assert not each.evidence.is_colluding("default")
        assert "tenant_until" not in each.evidence.summary(Query("q", "new"))
    assert "all clients" not in CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False).stdout
    restrict(event_store, limit, first=1)  # the same clients and chunks in other pairs
    assert "all clients" in CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False).stdout
    event_store.close()


def test_colluding_clients_count_again_after_a_reset_of_the_tenant(event_store):
    evidence = CrawlLimit(store=event_store).evidence
    for day in ("monday", "sunday"):
        for number in range(4):
            text = " ".join(f"{day}{number}{word}" for word in "abcdefgh")
            evidence.record_answer(Query("q", f"told{number}"), text, {}, (), False)
            assert not evidence.is_colluding("default")
            evidence.record_question(Query(text, f"asks{number}"))
        assert evidence.is_colluding("default")
        reset_tenant(event_store, "default")
        evidence.sync()
    event_store.close()


def test_a_reset_needs_a_client_or_a_tenant(event_store):
    event_store.close()
    for reset_arguments in ([], ["ann", "--tenant", "default"]):
        with pytest.raises(ConfigError, match="either a client or --tenant"):
            CliRunner().invoke(cli, ["client", "reset", *reset_arguments], catch_exceptions=False)


def test_canary_clients_are_listed_only_with_the_option(event_store):
    for client in ("canary-fee-7", "eve"):
        event_store.append(flagged(client))
    event_store.flush()
    assert list_clients().keys() == {"eve"}
    assert list_clients("--canaries").keys() == {"canary-fee-7", "eve"}


def test_resetting_an_unknown_client_or_tenant_is_an_error(event_store):
    event_store.append(flagged("eve"))
    event_store.close()
    with pytest.raises(ConfigError, match="there is no state of client 'ann'"):
        CliRunner().invoke(cli, ["client", "reset", "ann"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="no client of tenant 'defualt' has asked"):
        CliRunner().invoke(cli, ["client", "reset", "--tenant", "defualt"], catch_exceptions=False)
    assert CliRunner().invoke(cli, ["client", "reset", "--tenant", "default"]).exit_code == 0


@pytest.mark.parametrize("width", [60, 80])
def test_list_keeps_its_last_column_in_a_narrow_terminal(event_store, monkeypatch, width):
    monkeypatch.setattr(client_command, "out", TextConsole(width=width, highlight=False))
    event_store.append(flagged(f"cli-{'0' * 32}"))
    event_store.flush()
    table = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False).stdout.partition("client: first")[0]
    rows = table.splitlines()
    assert max(map(len, rows)) <= width and all(row[-1] in "┓┃┩│┘" for row in rows)
    assert any(row.count("┃") == 8 and "last" in row for row in rows) and "cli-000000000000" in table


def test_the_table_shows_the_whole_id_of_a_key(event_store):
    key, _ = ApiKeyStore(event_store).create(Grant("a-shop-with-a-long-name"))
    event_store.append(flagged(key.id))
    event_store.flush()
    done = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False)
    assert key.id in done.stdout


def test_table_is_not_truncated_at_80_columns(event_store, monkeypatch):
    name = "a-shop-with-a-long-name"
    key, _ = ApiKeyStore(event_store).create(Grant(name))
    event_store.append(
        replace(flagged(key.id), body={**flagged(key.id).body, "evidence": {"withheld": [str(n) for n in range(120)]}})
    )
    event_store.flush()
    monkeypatch.setattr(client_command, "out", TextConsole(width=80))
    shown = CliRunner().invoke(cli, ["client", "list"], catch_exceptions=False).stdout
    assert "…" not in shown and key.id in shown and "120" in shown and "default" in shown
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert "".join(row[1] for row in cells) == name


def export_events(*options):
    done = CliRunner().invoke(cli, ["events", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout, [json.loads(line) for line in done.stdout.splitlines()]


def test_events_of_a_time_range_are_exported_without_text_and_digests(event_store):
    ApiKeyStore(event_store).create(Grant("web-shop"))
    now = datetime.now(UTC)
    for hours, client in ((30, "too old"), (2, "eve"), (1, "ann")):
        made = flagged(client, hours)
        event_store.append(replace(made, body={**made.body, "text": "RAW question", "new_field": "RAW"}))
    quarantine_event = {"what": "held", "key": "k", "reasons": [], "documents": [{"id": "d1", "text": "RAW document"}]}
    event_store.append(Event("q", now - timedelta(minutes=5), "quarantine", quarantine_event))
    event_store.append(Event("c", now, "canary-clock", {"secret": "RAW"}))
    event_store.flush()
    event_store.close()
    output, found = export_events()
    assert [(e["kind"], e["body"].get("client")) for e in found] == [
        ("verdict", "eve"),
        ("verdict", "ann"),
        ("quarantine", None),
        ("key", None),
    ]
    assert "RAW" not in output and "digest" not in output
    assert found[2]["body"]["document_ids"] == ["d1"] and found[3]["body"]["name"] == "web-shop"
    output, found = export_events(
        "--text", "--kind", "verdict", "--since", "40h", "--until", f"{now - timedelta(hours=2):%FT%T}Z"
    )
    assert (
        [e["body"]["client"] for e in found] == ["too old"] and "RAW question" in output and "new_field" not in output
    )
    for options, why in ((["--kind", "keys"], "the kinds are"), (["--until", "25h"], "choose an earlier start")):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(cli, ["events", *options], catch_exceptions=False)


def test_phrases_of_canaries_are_exported_only_with_text(event_store):
    now = datetime.now(UTC)
    canary = Canary(
        id="a", query="q", expected_answer="Patient Maria Huber has cancer", should_not_contain=["7741-ZEBRA"]
    )
    deviations = check_answer(canary, ObservedAnswer("The code is 7741-ZEBRA."))
    event_store.append(result_to_event(CanaryResult("a", "run", now, CanaryStatus.FAIL, deviations)))
    changes = tuple(d.message for d in deviations)
    alert = Alert("x", "changed", Severity.HIGH, "clinic", ("a",), now, "clinic: 1 canary fails", changes)
    event_store.append(alert_to_event(alert, AlertPhase.OPENED, now, "run"))
    event_store.flush()
    event_store.close()
    output, found = export_events()
    assert "Maria" not in output and "ZEBRA" not in output
    by_kind = {e["kind"]: e["body"] for e in found}
    assert by_kind["canary"]["deviations"] == [{"kind": "answer_mismatch"}, {"kind": "unexpected_phrase"}]
    assert by_kind["alert"]["title"] == "clinic: 1 canary fails"
    output, found = export_events("--text")
    assert output.count("Maria Huber") == output.count("ZEBRA") == 2


def test_events_are_exported_once_in_ascii_with_canary_verdicts_marked(event_store):
    for number, client in enumerate(("canary-fee-7", "\u00e9ve\u2028")):
        event_store.append(replace(flagged(client), id=str(number)))
    event_store.flush()
    event_store.close()
    output, found = export_events("--kind", "verdict", "--kind", "verdict")
    assert output.isascii()
    assert {e["body"]["client"]: e["body"].get("canary") for e in found} == {
        "canary-fee-7": True,
        "\u00e9ve\u2028": None,
    }
    assert len(found) == 2


def test_quarantined_sources_are_dropped_together_or_not_at_all(event_store):
    quarantined = Quarantine(event_store)
    for name in "abc":
        quarantined.add([ScreeningResult(Document(name, f"text {name}"), 5.0, 0.01, ())], "default")
    with pytest.raises(DataError, match="'x' matches 0"):
        CliRunner().invoke(cli, ["quarantine", "drop", "a", "x"], catch_exceptions=False)
    assert len(quarantined.pending()) == 3
    done = CliRunner().invoke(cli, ["quarantine", "drop", "a", "b", "a"], catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, "dropped: a\ndropped: b\n")
    assert [source.source for source in quarantined.pending()] == ["c"]
    event_store.close()


@pytest.mark.parametrize("since", ["yesterday", "999999d", "0001-01-01T00:00:00+14:00"])
def test_invalid_start_time_is_refused(event_store, since):
    event_store.close()
    with pytest.raises(ConfigError, match="ISO 8601"):
        CliRunner().invoke(cli, ["events", "--since", since], catch_exceptions=False)


def test_period_longer_than_the_calendar_is_refused(event_store):
    assert CliRunner().invoke(cli, ["client", "list", "--hours", "1e9"]).exit_code == 2
