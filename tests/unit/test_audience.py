"""The audience policy: who may read what in full, on every path of a query."""

import asyncio
import json
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from casemate import config as configuration
from casemate import plugins
from casemate.app import open_app
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli import cli
from casemate.doctor import examine
from casemate.errors import ConfigError
from casemate.gateway.auth.keys import ApiKeyStore, Grant
from casemate.gateway.mcp.found_documents import judge_found
from casemate.guard.audience import IGNORED, AudiencePolicy, EntitlementRule, ReleasedDocument
from casemate.guard.defenses.honeytoken import HoneyToken
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.guard import Guard
from casemate.guard.turn import turn
from casemate.guard.watermarks.honeytoken_keys import HoneytokenKeyFile
from casemate.protocols import Defense
from casemate.rag import pipeline
from casemate.rag.pipeline import Rag
from casemate.system import audience_policy
from casemate.types import UNKNOWN, Action, Document, Outcome, Query, Verdict
from tests.fakes import BagOfWords, Memory, Parrot

QUESTION = "When did the harbor bridge open?"
FACT = "The harbor bridge opened in 1932"
TEXTS = (
    f"{FACT}. Its north tower has a walnut door.",
    f"Guides say: {FACT.lower()}. Tickets cost three coins at the orchid booth.",
    f"{FACT}, in spring. The saffron festival follows each year near the old market.",
)
WORDS = ("walnut", "orchid", "saffron")


def collection(private=3, public=1):
    held = [Document(f"d{i}", TEXTS[i], metadata={"department": "archive"}) for i in range(private)]
    notes = [f"A public note about the harbor bridge and topic number {i}." for i in range(public)]
    return held + [
        Document(f"p{i}", note, metadata={"department": ["office", "press"]}) for i, note in enumerate(notes)
    ]


def policy(unentitled="quorum"):
    return AudiencePolicy(
        unentitled,
        (
            EntitlementRule(frozenset({"archivist"})),
            EntitlementRule(frozenset(), {"department": frozenset({"press"})}),
        ),
    )


STRANGER, ENTITLED = frozenset({"visitor"}), frozenset({"archivist"})


def asked(groups=STRANGER, **more):
    return Query(QUESTION, groups=groups, **more)


@pytest.fixture
def rag(tmp_path):
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        made = Rag(BagOfWords(256), index, Parrot())
        asyncio.run(Guard(made, []).add(collection()))
        yield made


def guard_of(rag, unentitled="quorum", defenses=None, **more):
    defenses = [Quorum(jitter=1, floor=0.1)] if defenses is None else defenses
    return Guard(rag, defenses, audience=policy(unentitled), **more)


def context(guard, query):
    return [hit.document for hit in asyncio.run(guard.retrieve(query))[0].hits]


# Rules


def test_rules_entitle_by_group_and_metadata():
    private, public = collection()[0], collection()[-1]
    rules = policy()
    assert rules.entitles(asked(ENTITLED), private) and rules.entitles(asked(None), private)
    assert not rules.entitles(asked(), private) and rules.entitles(asked(), public)
    assert rules.entitles(asked(client="ann"), replace(private, metadata={"readers": ["ann"]}))
    assert not rules.restricts(asked(ENTITLED)) and not rules.restricts(asked(None)) and rules.restricts(asked())


def same_department(query, document):
    """A rule of the operator: the name of a client begins with the department of the document."""
    return query.client.startswith(document.metadata["department"] + "-")


def test_a_function_of_the_operator_entitles(rag):
    section = {"audience": {"unentitled": "nothing", "function": f"{__name__}:same_department"}}
    made = audience_policy(configuration.parse({"guard": section}).guard, Path())
    guard = Guard(rag, [], audience=made)
    assert {d.id for d in context(guard, asked(client="archive-7"))} == {"d0", "d1", "d2"}
    assert context(guard, asked(client="press-1")) == []


@pytest.mark.parametrize("result", [None, 1, "yes", [True]])
def test_a_function_entitles_by_true_alone_and_never_by_failing(result, caplog):
    document = collection()[0]
    assert not AudiencePolicy("nothing", (), lambda query, document: result).entitles(asked(), document)

    def fails(query, document):
        raise KeyError(document.text)

    assert not AudiencePolicy("nothing", (), fails).entitles(asked(), document)
    assert "KeyError" in caplog.text and document.text not in caplog.text


def test_names_of_sources_entitle():
    rule = EntitlementRule(frozenset({"staff"}), {"kind": frozenset({"page"})}, ("public/*", "faq.md"))
    rules = AudiencePolicy("nothing", (rule,))

    def entitled(source, groups=frozenset({"staff"}), kind="page"):
        return rules.entitles(asked(groups), Document("d", "text", source=source, metadata={"kind": kind}))

    assert entitled("public/a.md") and entitled("public/x/a.md") and entitled("faq.md")
    assert not entitled("private/public/a.md") and not entitled("x/faq.md") and not entitled("Public/a.md")
    assert not entitled("public/a.md", frozenset()) and not entitled("public/a.md", kind="note")
    assert rules.restricts(asked(frozenset({"staff"})))
    every = AudiencePolicy("nothing", (EntitlementRule(sources=("public/*",)),))
    assert every.restricts(asked()) and every.entitles(asked(), Document("d", "t", source="public/a.md"))


@given(
    st.dictionaries(st.sampled_from(["department", "x"]), st.sampled_from([None, "", [], ["archive"], "x"]), max_size=2)
)
def test_missing_metadata_never_entitles(metadata):
    rules = AudiencePolicy("quorum", (EntitlementRule(frozenset(), {"department": frozenset({"press", "None"})}),))
    assert not rules.entitles(asked(), Document("d", "text", metadata=metadata))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"audience": {"unentitled": "some"}}, "unentitled"),
        ({"audience": {"unentitled": "quorum"}}, "'quorum', which is not in defenses; add it before crawl_limit"),
        ({"audience": {"unentitled": "nothing"}, "mode": "off"}, "mode off gives every client full text"),
        ({"audience": {"entitled": [{"groups": ["a"]}]}}, "rules without effect"),
        ({"audience": {"unentitled": "nothing", "entitled": [{"group": ["a"]}]}}, "did you mean 'groups'"),
        ({"audience": {"unentitled": "nothing", "entitled": [{}]}}, "neither groups nor metadata nor sources"),
        ({"audience": {"unentitled": "nothing", "entitled": [{"metadata": {"a": []}}]}}, "has no value"),
        ({"audience": {"function": "a:b"}}, "rules without effect"),
        ({"audience": {"unentitled": "nothing", "function": "json"}}, "write module:function"),
        ({"audience": {"unentitled": "nothing", "function": "json:absent"}}, "no attribute 'absent'"),
        ({"audience": {"unentitled": "nothing", "function": "json:__name__"}}, "must name a function"),
        ({"audience": {"unentitled": "nothing", "function": "asyncio:sleep"}}, "not asynchronous"),
    ],
)
def test_a_bad_policy_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        audience_policy(configuration.parse({"guard": section}).guard, Path())


def test_quorum_without_its_secret_does_not_start(tmp_path):
    raw = {"guard": {"defenses": ["quorum"], "audience": {"unentitled": "quorum"}}}
    with pytest.raises(ConfigError, match="quorum.secret"):
        open_app(configuration.parse(raw, folder=tmp_path))


# The guard


def test_unentitled_clients_receive_released_keywords_and_readable_sources(rag):
    found = context(guard_of(rag), asked())
    assert [d.id for d in found] == ["p0", "quorum"]
    assert "1932" in found[1].text and not any(word in d.text for word in WORDS for d in found)


@pytest.mark.parametrize("groups", [ENTITLED, None])
@pytest.mark.parametrize("unentitled", ["quorum", "nothing"])
def test_entitled_clients_get_byte_equal_answers(rag, groups, unentitled):
    plain, guarded = Guard(rag, []), guard_of(rag, unentitled)
    for k in (1, 2, 5):
        query = asked(groups, k=k)
        assert asyncio.run(guarded.ask(query)).text == asyncio.run(plain.ask(query)).text
        assert context(guarded, query) == context(plain, query)


def test_full_is_the_default_and_changes_nothing(rag):
    plain, guarded = Guard(rag, []), guard_of(rag, "full")
    assert context(guarded, asked()) == context(plain, asked())


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_nothing_equals_a_collection_without_those_sources(tmp_path_factory, k, private, public):
    found = []
    for held in (collection(private, public), collection(0, public)):
        with closing(SqliteIndex(tmp_path_factory.mktemp("index") / "index.db")) as index:
            guard = guard_of(Rag(BagOfWords(256), index, Parrot()), "nothing", [])
            if held:
                asyncio.run(guard.add(held))
            found.append(context(guard, asked(k=k)))
    assert found[0] == found[1]


def test_quorum_does_nothing_where_unreadable_sources_do_not_exist(rag):
    far = Query("a question far from every document", groups=STRANGER, k=3)
    found = context(guard_of(rag, "nothing"), far)
    assert found == context(guard_of(rag, "nothing", []), far)
    assert found and "quorum" not in [d.id for d in found]


class Denies(Defense):
    """Denies the client the full text of all sources."""

    def denies_full_text(self, query):
        return True


@pytest.mark.parametrize("unentitled", ["nothing", "quorum"])
def test_a_client_beyond_its_budget_makes_no_question_read_the_whole_index(tmp_path, monkeypatch, unentitled):
    searched = []

    async def search(rag, vector, k, tenant):
        searched.append(k)
        return await original(rag, vector, k, tenant)

    original = Rag.search
    monkeypatch.setattr(Rag, "search", search)
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        guard = guard_of(Rag(BagOfWords(64), index, Parrot()), unentitled, [Denies()])
        asyncio.run(guard.add(collection(3, 60)))
        assert context(guard, asked(k=3)) == []
    assert searched == [3]


def test_clients_that_may_read_nothing_search_the_whole_index_one_at_a_time(tmp_path, monkeypatch):
    """Twenty such questions at once leave threads for others, whose questions are answered meanwhile."""
    monkeypatch.setattr(pipeline, "WIDE", 50)
    wide, most, free = [], [], threading.Event()

    def search(index, vector, k, tenant="default"):
        if k >= 50:
            wide.append(k)
            most.append(len(wide))
            assert free.wait(20)
            wide.remove(k)
        return original(index, vector, k, tenant)

    original = SqliteIndex.search
    monkeypatch.setattr(SqliteIndex, "search", search)

    async def story(guard):
        slow = [asyncio.create_task(guard.retrieve(asked(k=3))) for _ in range(20)]
        while not wide:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            ordinary, _ = await guard.retrieve(asked(None, k=3))
        assert len(ordinary.hits) == 3 and len(wide) == 1
        free.set()
        return [found.hits for found, _ in await asyncio.gather(*slow)]

    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        archive_only = AudiencePolicy("nothing", (EntitlementRule(ENTITLED),))
        guard = Guard(Rag(BagOfWords(64), index, Parrot()), [], audience=archive_only)
        asyncio.run(guard.add(collection(3, 60)))
        assert asyncio.run(story(guard)) == [()] * 20
    assert set(most) == {1}


@dataclass
class Broken(Defense):
    """Fails."""

    async def on_retrieve(self, query, retrieval):
        raise RuntimeError


@pytest.mark.parametrize("on_error", ["open", "closed"])
@pytest.mark.parametrize("defenses", [[], [Broken()]])
def test_unreadable_text_never_remains_when_the_defense_is_missing_or_fails(rag, on_error, defenses):
    found = context(guard_of(rag, defenses=defenses, on_error=on_error), asked())
    assert all(d.id.startswith("p") for d in found)


def test_without_the_last_check_it_would_remain(rag, monkeypatch):
    monkeypatch.setattr("casemate.guard.guard._without_unreadable", lambda kept, found: kept)
    with pytest.raises(AssertionError):
        test_unreadable_text_never_remains_when_the_defense_is_missing_or_fails(rag, "open", [])


def test_observe_mode_changes_nothing_and_records_the_verdict(rag):
    guard = guard_of(rag, enforce=False)
    retrieval, (verdict,) = asyncio.run(guard.retrieve(asked()))
    assert {h.document.id for h in retrieval.hits} == {"d0", "d1", "d2", "p0"}
    assert verdict.defense == "quorum" and not verdict.enforced


# Turns


class HideFirst(Defense):
    """Hides d0."""

    max_hidden_sources = 1

    async def on_retrieve(self, query, retrieval):
        kept = tuple(h for h in retrieval.hits if h.document.id != "d0")
        return Outcome(replace(retrieval, hits=kept), Verdict("hide_first", True, Action.HIDE, 1.0, 0.5, ("d0",)))


@pytest.mark.parametrize("questions", [(QUESTION, QUESTION), ("In which year did the harbor bridge open?", QUESTION)])
def test_quorum_answers_every_query_of_a_turn(rag, questions):
    guard = guard_of(rag)
    with turn(QUESTION):
        for text in questions:
            assert "1932" in context(guard, replace(asked(), text=text))[-1].text


def test_what_another_defense_hides_stays_hidden_in_a_turn_with_quorum(rag):
    guard = guard_of(rag, defenses=[HideFirst(), Quorum(jitter=1, floor=0.1)])
    with turn(QUESTION):
        context(guard, asked())
        guard.defenses = guard.defenses[1:]
        assert guard.defenses[0].replaces_unreadable
        (verdict,) = asyncio.run(guard.retrieve(asked()))[1]
        assert set(verdict.hidden) == {"d1", "d2"}


def opened(store):
    return sum(store.tallies[name][0] for name in store.tallies if " source " in name and " latest " not in name)


def test_judging_a_turn_s_question_spends_no_single_unit_answer(rag):
    store = Memory()
    guard = guard_of(rag, defenses=[Quorum(support=9, jitter=1, floor=0.1, break_glass=1, store=store)])
    with turn(QUESTION):
        asyncio.run(guard.judge_turn(replace(asked(), text="Which harbor bridge?")))
        assert not opened(store)
        assert isinstance(context(guard, asked())[-1], ReleasedDocument)
    assert opened(store) == 1


def test_a_defense_after_quorum_that_removes_hits_charges_the_budget_once(rag, tmp_path):
    store, honey = Memory(), HoneyToken(keys=tmp_path / "honey.json", serve_honey=False)
    key = HoneytokenKeyFile(honey.keys).load_or_create()
    record = Document("h0", "The harbor bridge: when did it open?", metadata={"department": "press"})
    notes = [replace(d, text=f"zebra {d.id}") for d in collection(0, 200)]  # below the floor
    asyncio.run(Guard(rag, []).add([key.seal(record, "default", 1, 0), *notes]))
    quorum = Quorum(support=9, jitter=1, floor=0.1, break_glass=5, store=store)
    documents = context(guard_of(rag, defenses=[quorum, honey]), asked(k=3))
    assert opened(store) == 1
    assert len(documents) == 2 and "h0" not in [d.id for d in documents]
    assert isinstance(documents[-1], ReleasedDocument)


@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize(
    "found", [[], [TEXTS[0]], list(TEXTS), ["A public note about the harbor bridge and topic number 0."]]
)
def test_an_answer_of_one_unit_is_delivered_beside_another_retriever_s_results(rag, found, k):
    store = Memory()
    guard = guard_of(rag, defenses=[Quorum(support=9, jitter=1, floor=0.1, break_glass=1, store=store)])
    with turn(QUESTION):
        documents = asyncio.run(judge_found(guard, asked(k=k), found))
    assert opened(store) == 1
    assert [d.id for d in documents] == ["p0", "quorum"]
    assert documents[-1].text != UNKNOWN


def test_acl_labels_stay_absolute(rag, tmp_path):
    """Documents whose labels a client lacks are not used."""
    with closing(SqliteIndex(tmp_path / "labelled.db")) as index:
        guard = guard_of(Rag(BagOfWords(256), index, Parrot()))
        asyncio.run(guard.add([replace(d, metadata={"acl": "board"}) for d in collection(3, 0)]))
        assert asyncio.run(guard.ask(asked(labels=frozenset()))).text == UNKNOWN
        assert "1932" in asyncio.run(guard.ask(asked(labels=frozenset({"board"})))).text


# Paths of a query


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An installation with three private sources and one public one, and three keys."""
    entry = EntryPoint("bag", "tests.fakes:BagOfWords", "casemate.embedder")
    monkeypatch.setattr(
        plugins, "entry_points", lambda group, name=None: [entry] * (group == entry.group and name in {None, "bag"})
    )
    monkeypatch.setenv("QUORUM_SECRET", "0123456789abcdef")
    raw = {
        "rag": {"generator": "extractive", "embedder": {"use": "bag", "dim": 256}},
        "guard": {
            "defenses": [{"use": "quorum", "floor": 0.1, "jitter": 1, "secret": "${QUORUM_SECRET}"}],
            "audience": {
                "unentitled": "quorum",
                "entitled": [{"groups": ["archivist"]}, {"metadata": {"department": "press"}}],
            },
        },
        "gateway": {"port": 0, "pace_ms": 0},
    }
    (tmp_path / "casemate.yaml").write_text(yaml.safe_dump(raw))
    monkeypatch.chdir(tmp_path)
    with open_app() as app:
        asyncio.run(app.guard.add(collection(3, 0)))
        keys = ApiKeyStore(app.store)
        for name, groups in (("visitor", ("visitor",)), ("archive", ("archivist",)), ("none", ())):
            keys.create(Grant(name, groups=groups))
    return tmp_path


def cli_run(*arguments):
    done = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_ask_as_a_client_explains(folder):
    shown = json.loads(cli_run("ask", QUESTION, "--as", "visitor", "--json"))
    assert "1932" in shown["answer"] and not any(word in shown["answer"] for word in WORDS)
    (verdict,) = shown["verdicts"]
    assert verdict["evidence"]["units"] == 3 and verdict["evidence"]["support"][0] == 3
    combined = "(3 sources combined)"
    assert shown["hits"] == [{"id": combined, "source": combined, "score": None}]
    explained = " ".join(cli_run("ask", QUESTION, "--as", "none", "--explain").split())
    about = "a unit is a source with its copies; 3 of them state something about the question"
    units = f"from 3 units ({about}) that the client may not read"
    assert f"{units}; 0 readable documents kept; units that state each" in explained
    assert not any(f"{field} " in explained for field in ("came_in", "altered 1", "stating 3"))
    assert combined in explained and "0.1000" not in explained
    full = cli_run("ask", "Which door does the north tower of the harbor bridge have?", "--as", "archive")
    assert "walnut" in full
    assert UNKNOWN in cli_run("ask", "Which door does the north tower of the harbor bridge have?", "--as", "visitor")
    question = "Which door does the north tower of the harbor bridge have?"
    unreleased = json.loads(cli_run("ask", question, "--as", "visitor", "--json"))
    evidence = unreleased["verdicts"][0]["evidence"]
    assert evidence["words"] == 0 < evidence["stating"] and unreleased["hits"][0]["id"] == "(no source)"
    with open_app() as app:
        assert not app.store.scan("verdict")  # nothing is recorded about the client


def test_ask_as_a_client_names_the_sources_that_it_may_not_read(folder):
    text = (folder / "casemate.yaml").read_text()
    (folder / "casemate.yaml").write_text(text.replace("unentitled: quorum", "unentitled: nothing"))
    explained = cli_run("ask", QUESTION, "--as", "visitor", "--explain", "-k", "2")
    (line,) = [line for line in explained.splitlines() if line.startswith("audience: ")]
    assert line.startswith(
        "audience: of the 2 nearest chunks, 2 sources not readable by visitor (unentitled: nothing): d"
    )
    shown = json.loads(cli_run("ask", QUESTION, "--as", "visitor", "--json"))
    assert shown["hits"] == [] and shown["audience"]["unentitled"] == "nothing"
    assert sorted(shown["audience"]["excluded"]) == ["d0", "d1", "d2"]
    (folder / "questions.txt").write_text(QUESTION)
    assert json.loads(cli_run("ask", "--from", "questions.txt", "--as", "visitor"))["audience"] == shown["audience"]
    for options in (("--as", "archive"), (), ("--as", "visitor", "--guard", "observe"), ("--guard", "off")):
        assert '"audience"' not in cli_run("ask", QUESTION, *options, "--json")
    assert not any(name in cli_run("ask", QUESTION, "--as", "visitor") for name in ("d0", "d1", "d2"))


def test_ask_as_a_client_names_the_sources_whose_labels_it_lacks(folder):
    secret = Document("d9", "The harbor bridge has a secret door.", metadata={"acl": "board", "department": "press"})
    with open_app() as app:
        asyncio.run(app.guard.add([secret]))
        ApiKeyStore(app.store).create(Grant("director", labels=("board",)))
    question = "Which secret door does the harbor bridge have?"
    explained = cli_run("ask", question, "--as", "visitor", "--explain", "-k", "2")
    (line,) = [line for line in explained.splitlines() if line.startswith("labels: ")]
    assert line == "labels: of the 2 nearest chunks, 1 source not readable by visitor (acl): d9"
    shown = json.loads(cli_run("ask", question, "--as", "visitor", "--json"))
    assert shown["labels"] == {"excluded": ["d9"]} and "d9" not in [hit["source"] for hit in shown["hits"]]
    for options in (("--as", "director"), ()):
        shown = json.loads(cli_run("ask", question, *options, "--json"))
        assert "labels" not in shown and "d9" in [hit["source"] for hit in shown["hits"]]
    assert "d9" not in cli_run("ask", question, "--as", "visitor")


@pytest.mark.parametrize("public", [0, 1, 2, 3])
def test_mirabel_counts_the_chunks_that_the_client_may_read(tmp_path, public):
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        guard = guard_of(Rag(BagOfWords(256), index, Parrot()), "nothing", [Mirabel(mode="paper")])
        asyncio.run(guard.add(collection(3, public)))
        (verdict,) = asyncio.run(guard.retrieve(asked()))[1]
    assert verdict.evidence["undecided"].startswith(f"too few chunks ({public} readable of {3 + public}; ")


def test_ask_as_a_restricted_client_warns_in_observe_mode(folder):
    text = (folder / "casemate.yaml").read_text()
    (folder / "casemate.yaml").write_text(text.replace("guard:", "guard:\n  mode: observe"))
    warned = {
        name: IGNORED in " ".join(cli_run("ask", QUESTION, "--as", name).split()) for name in ("visitor", "archive")
    }
    assert warned == {"visitor": True, "archive": False}
    assert IGNORED not in " ".join(cli_run("ask", QUESTION, "--as", "visitor", "--guard", "enforce").split())


def test_ask_as_an_unknown_client_is_refused(folder):
    with pytest.raises(ConfigError, match="no valid key"):
        CliRunner().invoke(cli, ["ask", QUESTION, "--as", "stranger"], catch_exceptions=False)


def test_doctor_shows_the_policy(folder):
    found = [f for f in examine(None) if f.name == "audience"]
    assert found[0].ok and "unentitled clients receive quorum" in found[0].detail
    assert "2 of 3 client keys are restricted" in found[0].detail
    (group,) = [f for f in found if "groups" in f.detail]
    assert group.ok is None and group.detail.endswith("names these groups of keys: ['visitor']")
    text = (folder / "casemate.yaml").read_text()
    (folder / "casemate.yaml").write_text(text.replace("guard:", "guard:\n  mode: observe"))
    observing = next(f for f in examine(None) if f.name == "audience")
    assert observing.ok is False and "; NOT carried out in mode observe: run 'casemate enforce'" in observing.detail
    (folder / "casemate.yaml").write_text(text.replace("archivist", "archivists"))
    details = [f.detail for f in examine(None) if f.ok is None]
    assert any("no client key has these groups of guard.audience.entitled: ['archivists']" in d for d in details)
    (folder / "casemate.yaml").write_text(text.replace("- metadata:", "- sources: [d*, public/*]\n      metadata:"))
    matched = {f.detail.partition(": ")[2]: f.ok for f in examine(None) if "sources match" in f.detail}
    assert matched == {"3 of 3 sources match 'd*'": True, "0 of 3 sources match 'public/*'": None}


def test_keys_are_listed_in_a_line_each_and_on_request_with_groups_and_labels(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--label", "red", "--group", "a", "--group", "b", "--rate", "7")
    made = json.loads(cli_run("key", "create", "the paper archive", *options, "--json"))
    cli_run("key", "create", "metrics reader", "--role", "metrics")
    cli_run("key", "revoke", made["id"])
    lines = [line.split() for line in cli_run("key", "list").splitlines()]
    created = made["created"][:10]
    assert [made["id"], "the", "paper", "archive", "client", "default", created, "revoked"] in lines
    assert ["metrics", "reader", "metrics", "default", created, "valid"] in [line[1:] for line in lines]
    details = cli_run("key", "list", "--details")
    assert all(f"  {line}\n" in details for line in ("groups: a, b", "labels: red", "requests per minute: 7"))


def test_a_second_valid_key_of_the_same_name_is_refused(folder):
    made = json.loads(cli_run("key", "create", "web", "--json"))
    with pytest.raises(ConfigError, match=f"casemate key revoke {made['id']}"):
        cli_run("key", "create", "web")
    assert cli_run("key", "list").count("web") == 1
    cli_run("key", "revoke", made["id"])
    cli_run("key", "create", "web")


def test_gateway_answers_by_key(folder):
    pytest.importorskip("fastapi")
    from tests import gateways

    with open_app() as app:
        stranger, archivist = (
            gateways.key(app, groups=("visitor",), retrieve=True),
            gateways.key(app, groups=("archivist",), retrieve=True),
        )
        with gateways.client(app, stranger) as http:
            said = http.post("/v1/chat/completions", json=gateways.chat(QUESTION)).json()
            rows = http.post("/v1/retrieve", json={"question": QUESTION}).json()["data"]
            text = said["choices"][0]["message"]["content"]
            assert "1932" in text and [row["id"] for row in rows] == ["quorum"] and rows[0]["text"] == text
            streamed = http.post("/v1/chat/completions", json=gateways.chat(QUESTION, stream=True)).text
            assert "1932" in streamed
            assert not any(word in json.dumps([said, rows, streamed]) for word in WORDS)
            headers = {"Authorization": f"Bearer {archivist}"}
            rows = http.post("/v1/retrieve", json={"question": QUESTION}, headers=headers).json()["data"]
            assert {row["id"] for row in rows} == {"d0", "d1", "d2"}


def test_integrations_ask_with_the_groups_of_the_client():
    pytest.importorskip("langchain_core")
    from langchain_core import documents as lc
    from langchain_core.vectorstores import InMemoryVectorStore

    from casemate.integrations.guarded_query import client_context
    from casemate.integrations.langchain import guarded
    from tests.unit.test_integrations_langchain import Model

    store = InMemoryVectorStore(Model())
    store.add_documents([lc.Document(d.text, id=d.id, metadata=dict(d.metadata)) for d in collection()])
    options = {"use": "quorum", "jitter": 1, "floor": -1.0}
    rules = [{"groups": ["archivist"]}, {"metadata": {"department": "press"}}]
    audience = {"unentitled": "quorum", "entitled": rules}
    made = guarded(store, config={"guard": {"defenses": [options], "audience": audience}})
    shown = [
        *made.similarity_search(QUESTION, k=3),
        *made.max_marginal_relevance_search(QUESTION, k=3),
        *made.get_by_ids(["d0", "d1", "p0"]),
    ]
    assert [d.id for d in shown] == ["p0", "quorum", "p0", "quorum", "p0"]
    assert not any(word in d.page_content for word in WORDS for d in shown)
    with client_context("ann", groups=["archivist"]):
        assert {d.id for d in made.similarity_search(QUESTION, k=3)} <= {"d0", "d1", "d2", "p0"}
        assert [d.id for d in made.get_by_ids(["d0"])] == ["d0"]
        with client_context("bob"):  # another client does not inherit groups
            assert made.get_by_ids(["d0"]) == []
    made.protection.close()


def break_glass_store(path, ids=("d0", "d1", "p0")):
    """A guarded store in which no two units agree often enough, so that a private unit may answer alone, once."""
    pytest.importorskip("langchain_core")
    from langchain_core import documents as lc
    from langchain_core.vectorstores import InMemoryVectorStore

    from casemate.integrations.langchain import guarded
    from tests.unit.test_integrations_langchain import Model

    store = InMemoryVectorStore(Model())
    held = collection(2, 1)
    store.add_documents([lc.Document(d.text, id=i, metadata=dict(d.metadata)) for d, i in zip(held, ids, strict=True)])
    options = {"use": "quorum", "support": 9, "jitter": 1, "floor": -1.0, "break_glass": 1}
    audience = {"unentitled": "quorum", "entitled": [{"metadata": {"department": "press"}}]}
    return guarded(store, config={"guard": {"defenses": [options], "audience": audience}}, path=path)


def spent(made):
    usage = made.protection.events.quota_usage("quorum break-glass")
    return sum(used for name, used in usage.items() if " latest " not in name)


def every_document(document):
    return True


def test_a_filter_does_not_spend_a_second_single_unit_answer(tmp_path):
    made = break_glass_store(tmp_path)
    found = made.similarity_search(QUESTION, k=3, filter=every_document)
    assert [d.id for d in found] == ["p0", "quorum"] and found[-1].page_content != UNKNOWN
    assert spent(made) == 1
    made.protection.close()


@pytest.mark.parametrize(("found", "shown"), [("d0 p0", "p0 quorum"), ("d1 d0", "p0 quorum"), ("d0", "p0")])
def test_another_retriever_s_results_spend_a_single_unit_answer_only_if_it_is_delivered(tmp_path, found, shown):
    made = break_glass_store(tmp_path)
    from langchain_core.retrievers import BaseRetriever

    from casemate.integrations.langchain import guarded

    class Found(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return made.unguarded.get_by_ids(found.split())

    documents = guarded(Found(), store=made).invoke(QUESTION)
    assert [d.id for d in documents] == shown.split()
    assert spent(made) == ("quorum" in shown)
    assert documents[-1].page_content != UNKNOWN
    made.protection.close()


def test_a_question_for_one_document_with_a_readable_one_spends_no_single_unit_answer(tmp_path):
    made = break_glass_store(tmp_path)
    assert [d.id for d in made.similarity_search(QUESTION, k=1)] == ["p0"]
    assert not spent(made)
    made.protection.close()


def test_a_stored_document_named_like_the_defense_lends_the_answer_no_metadata(tmp_path):
    made = break_glass_store(tmp_path, ids=("quorum", "d1", "p0"))
    answer = made.similarity_search(QUESTION, k=3)[-1]
    assert answer.id == "quorum" and "department" not in answer.metadata
    made.protection.close()


@pytest.mark.parametrize("wrong", [{"groups": "staff"}, {"labels": "clinic"}])
def test_a_text_in_place_of_a_set_is_refused(wrong):
    with pytest.raises(TypeError, match=f"{next(iter(wrong))}='"):
        Query("Who?", "ann", **wrong)
