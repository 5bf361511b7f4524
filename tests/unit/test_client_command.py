"""``casemate client``: who was flagged, and letting one begin anew."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from casemate.backends.sql_events import SqlEvents
from casemate.cli import cli
from casemate.errors import ConfigError
from casemate.gateway.keys import Grant, Keys
from casemate.sessions import Sessions
from casemate.types import Event


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "casemate.yaml").write_text("store: {use: sql_events, path: events.db}\n")
    return SqlEvents(path=tmp_path / "events.db")


def flagged(client, hours=0.0, sources=("a",), is_flagged=True):
    body = {"tenant": "default", "client": client, "defense": "mirabel", "flagged": is_flagged}
    at = datetime.now(UTC) - timedelta(hours=hours)
    return Event(f"{client}{hours}{sources}", at, "verdict", body | {"evidence": {"withheld": list(sources)}})


def listed():
    done = CliRunner().invoke(cli, ["client", "list", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return {one["client"]: one for one in json.loads(done.stdout)["clients"]}


def test_who_was_flagged_lately_is_listed_until_he_is_forgiven(place):
    key, _ = Keys(place).create(Grant("web-shop"))
    for event in (flagged(f"{key.id}/ann"), flagged(f"{key.id}/ann", 1, ("b", "c")), flagged("eve", 30)):
        place.append(event)
    place.append(flagged("harmless", is_flagged=False))
    Sessions("mirabel", 3600.0, place).bar("default", f"{key.id}/ann", "a")
    place.flush()
    (one,) = listed().values()
    assert (one["client"], one["key"], one["verdicts"]) == (f"{key.id}/ann", "web-shop", {"mirabel": 2})
    assert one["withheld"] == ["a", "b", "c"]
    done = CliRunner().invoke(cli, ["client", "forgive", f"{key.id}/ann"], catch_exceptions=False)
    assert done.exit_code == 0
    assert listed() == {}
    place.append(flagged(f"{key.id}/ann", -0.001))
    place.flush()
    assert listed()[f"{key.id}/ann"]["verdicts"] == {"mirabel": 1}
    place.close()


def test_forgiving_whoever_is_not_known_says_so(place):
    place.close()
    with pytest.raises(ConfigError, match="nothing is held against a client 'ann'"):
        CliRunner().invoke(cli, ["client", "forgive", "ann"], catch_exceptions=False)
