"""Agent memory over MCP, with the client of the official SDK. Only the client that stored an entry receives it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("mcp", reason="the extra casemate[mcp] is not installed")

from casemate.errors import ConfigError
from casemate.gateway.mcp.memory import MOST_CHARACTERS, MemoryTools, own_tools
from casemate.gateway.state import Gateway
from casemate.guard.audience import AudiencePolicy
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.file import write_calibration
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.guard import Guard
from casemate.maths.calibration import Calibration
from tests.fakes import BagOfWords
from tests.gateways import key, make
from tests.unit.test_mcp import connected, serving

NOTE = "word11 word12 word13 word14 my passport number is 4471"


def system(folder, unentitled="nothing", mode="enforce", **options):
    """A gateway whose clients may read only their own entries."""

    def wire():
        app = make(folder, **{"count": 0} | options, mode=mode, mcp=True, agent_memory=True)
        old, policy = app.guard, AudiencePolicy(unentitled)
        guard = Guard(old.rag, old.defenses, enforce=old.enforce, store=app.store, audience=policy)
        return replace(app, guard=guard)

    with ThreadPoolExecutor(1) as pool:  # outside the running event loop
        return pool.submit(wire).result()


async def search(client, text):
    result = await client.call_tool("search", {"query": text})
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content
    return [one["text"] for one in result.structured_content["documents"]]


async def test_only_the_client_that_stored_an_entry_receives_it(tmp_path):
    app = system(tmp_path)
    ann, bob = (key(app, name=name, retrieve=True) for name in ("ann", "bob"))
    with serving(app, own_tools) as url:
        async with connected(url, ann) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == {"ask", "search", "remember", "forget"}
            stored = await client.call_tool("remember", {"text": NOTE})
            assert stored.content[0].text == "Stored."
            assert await search(client, NOTE) == [NOTE]
            answer = (await client.call_tool("ask", {"question": NOTE})).content[0].text
            assert answer.startswith("memory/")  # the test generator repeats its context
        async with connected(url, bob) as client:
            assert await search(client, NOTE) == []
            assert "memory/" not in (await client.call_tool("ask", {"question": NOTE})).content[0].text
            assert (await client.call_tool("forget", {})).content[0].text == "Deleted 0 entries."
        async with connected(url, ann) as client:
            assert await search(client, NOTE) == [NOTE]
            assert (await client.call_tool("forget", {})).content[0].text == "Deleted 1 entries."
            assert await search(client, NOTE) == []


async def test_entry_source_contains_a_client_hash_and_events_do_not_contain_the_text(tmp_path):
    app = system(tmp_path)
    text = key(app, name="ann", retrieve=True)
    with serving(app, own_tools) as url:
        async with connected(url, text) as client:
            await client.call_tool("remember", {"text": NOTE})
        events = list(app.store.scan(kind="ingest"))
        (source,) = app.index.digests("default")
    owner = source.split("/")[1]
    assert source.startswith("memory/") and len(owner) == 16
    assert [event.body["action"] for event in events] == ["added"]
    assert "4471" not in json.dumps([event.body for event in events])


@pytest.mark.parametrize("text", ["", " \n", "a\x00b", "x" * (MOST_CHARACTERS + 1), 7])
async def test_an_invalid_entry_is_refused(tmp_path, text):
    app = system(tmp_path)
    client_key = key(app)
    with serving(app, own_tools) as url:
        async with connected(url, client_key) as client:
            result = await client.call_tool("remember", {"text": text})
    assert result.is_error and result.content[0].text.startswith("text: ")


async def test_an_entry_that_would_make_a_calibration_due_is_refused(tmp_path):
    """Otherwise one client could let the guard withhold every answer of all others."""
    mirabel = Mirabel(min_documents=3, calibration=tmp_path / "none.json")
    app = system(tmp_path, defenses=[mirabel])
    someone = key(app)
    with serving(app, own_tools) as url:
        async with connected(url, someone) as client:
            stored = [await client.call_tool("remember", {"text": f"{NOTE} {i}"}) for i in range(3)]
        assert not app.due()
    assert [result.is_error for result in stored] == [False, False, True]
    assert stored[2].content[0].text == "The memory takes no further entries at the moment."


async def test_deletion_that_makes_a_calibration_stale_is_carried_out_and_logged(tmp_path, caplog):
    """The client has a right to the deletion; the operator must learn that the guard needs a calibration."""
    embedder, zero, one = BagOfWords(256), (0.0,) * len(FEATURES), (1.0,) * len(FEATURES)
    mirabel = Mirabel(min_documents=3, calibration=tmp_path / "calibration.json", embedder=embedder)
    app = system(tmp_path, count=3, defenses=[mirabel])
    fitted = Calibration(embedder.fingerprint, 4, 5, FEATURES, zero, one, zero, benign=(), source="a test")
    write_calibration(mirabel.calibration, "default", fitted)
    someone = key(app)
    with serving(app, own_tools) as url:
        async with connected(url, someone) as client:
            await client.call_tool("remember", {"text": NOTE})
            assert not app.due() and "agent memory" not in caplog.text
            deleted = await client.call_tool("forget", {})
            again = await client.call_tool("forget", {})
        assert [one.content[0].text for one in (deleted, again)] == ["Deleted 1 entries.", "Deleted 0 entries."]
        assert "stale" in app.due()
    assert caplog.text.count("entries of the agent memory were deleted, and the guard cannot judge") == 1


@pytest.mark.parametrize(("unentitled", "mode"), [("full", "enforce"), ("nothing", "observe")])
def test_memory_that_all_clients_could_read_is_refused(tmp_path, unentitled, mode):
    app = system(tmp_path, unentitled, mode)
    with pytest.raises(ConfigError, match=r"agent memory: every client could read .* set guard\.mode: enforce"):
        own_tools(Gateway(app))


def test_memory_is_off_by_default(tmp_path):
    app = make(tmp_path, count=0, mcp=True)
    assert not isinstance(own_tools(Gateway(app)), MemoryTools)
