"""The audience policy: which clients may read which documents in full, on every path of a query."""

import asyncio
import json
import threading
from contextlib import closing
from dataclasses import dataclass, replace
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
from casemate.guard.defenses.honeytoken import Honeytoken
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
from tests.fakes import BAG, BagOfWords, Memory, Parrot, entry_points

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


UNENTITLED, ENTITLED = frozenset({"visitor"}), frozenset({"archivist"})


def client_query(groups=UNENTITLED, **more):
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
    assert rules.entitles(client_query(ENTITLED), private) and rules.entitles(client_query(None), private)
    assert not rules.entitles(client_query(), private) and rules.entitles(client_query(), public)
    for key in ("readers", "Readers"):
        assert rules.entitles(client_query(client="ann"), replace(private, metadata={key: ["ann"]}))
    assert (
        not rules.restricts(client_query(ENTITLED))
        and not rules.restricts(client_query(None))
        and rules.restricts(client_query())
    )


def same_department(query, document):
    """A rule of the operator: the client name must start with the department of the document."""
    return query.client.startswith(document.metadata["department"] + "-")


def test_operator_function_entitles(rag):
    section = {"audience": {"unentitled": "nothing", "function": f"{__name__}:same_department"}}
    made = audience_policy(configuration.parse({"guard": section}).guard, Path())
    guard = Guard(rag, [], audience=made)
    assert {d.id for d in context(guard, client_query(client="archive-7"))} == {"d0", "d1", "d2"}
    assert context(guard, client_query(client="press-1")) == []


@pytest.mark.parametrize("result", [None, 1, "yes", [True]])
def test_function_entitles_only_by_returning_true(result, caplog):
    document = collection()[0]
    assert not AudiencePolicy("nothing", (), lambda query, document: result).entitles(client_query(), document)

    def fails(query, document):
        raise KeyError(document.text)

    assert not AudiencePolicy("nothing", (), fails).entitles(client_query(), document)
    assert "KeyError" in caplog.text and document.text not in caplog.text


def test_rule_can_entitle_by_source_name():
    rule = EntitlementRule(frozenset({"staff"}), {"kind": frozenset({"page"})}, ("public/*", "faq.md"))
    rules = AudiencePolicy("nothing", (rule,))

    def entitled(source, groups=frozenset({"staff"}), kind="page"):
        return rules.entitles(client_query(groups), Document("d", "text", source=source, metadata={"kind": kind}))

    assert entitled("public/a.md") and entitled("public/x/a.md") and entitled("faq.md")
    assert not entitled("private/public/a.md") and not entitled("x/faq.md") and not entitled("Public/a.md")
    assert not entitled("public/a.md", frozenset()) and not entitled("public/a.md", kind="note")
    assert rules.restricts(client_query(frozenset({"staff"})))
    every = AudiencePolicy("nothing", (EntitlementRule(sources=("public/*",)),))
    assert every.restricts(client_query()) and every.entitles(client_query(), Document("d", "t", source="public/a.md"))


@given(
    st.dictionaries(st.sampled_from(["department", "x"]), st.sampled_from([None, "", [], ["archive"], "x"]), max_size=2)
)
def test_missing_metadata_never_entitles(metadata):
    rules = AudiencePolicy("quorum", (EntitlementRule(frozenset(), {"department": frozenset({"press", "None"})}),))
    assert not rules.entitles(client_query(), Document("d", "text", metadata=metadata))


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
def test_invalid_policy_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        audience_policy(configuration.parse({"guard": section}).guard, Path())


def test_quorum_without_a_secret_is_a_configuration_error(tmp_path):
    raw = {"guard": {"defenses": ["quorum"], "audience": {"unentitled": "quorum"}}}
    with pytest.raises(ConfigError, match="quorum.secret"):
        open_app(configuration.parse(raw, folder=tmp_path))


# The guard


def test_unentitled_clients_receive_released_keywords_and_readable_sources(rag):
    found = context(guard_of(rag), client_query())
    assert [d.id for d in found] == ["p0", "quorum"]
    assert "1932" in found[1].text and not any(word in d.text for word in WORDS for d in found)


@pytest.mark.parametrize("groups", [ENTITLED, None])
@pytest.mark.parametrize("unentitled", ["quorum", "nothing"])
def test_entitled_clients_get_byte_equal_answers(rag, groups, unentitled):
    plain, guarded = Guard(rag, []), guard_of(rag, unentitled)
    for k in (1, 2, 5):
        query = client_query(groups, k=k)
        assert asyncio.run(guarded.ask(query)).text == asyncio.run(plain.ask(query)).text
        assert context(guarded, query) == context(plain, query)


def test_default_is_full_and_does_not_change_answers(rag):
    plain, guarded = Guard(rag, []), guard_of(rag, "full")
    assert context(guarded, client_query()) == context(plain, client_query())


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_unentitled_nothing_equals_a_collection_without_those_sources(tmp_path_factory, k, private, public):
    found = []
    for held in (collection(private, public), collection(0, public)):
        with closing(SqliteIndex(tmp_path_factory.mktemp("index") / "index.db")) as index:
            guard = guard_of(Rag(BagOfWords(256), index, Parrot()), "nothing", [])
            if held:
                asyncio.run(guard.add(held))
            found.append(context(guard, client_query(k=k)))
    assert found[0] == found[1]


def test_quorum_has_no_effect_with_unentitled_nothing(rag):
    far = Query("a question far from every document", groups=UNENTITLED, k=3)
    found = context(guard_of(rag, "nothing"), far)
    assert found == context(guard_of(rag, "nothing", []), far)
    assert found and "quorum" not in [d.id for d in found]


class DeniesFullText(Defense):
    """Denies the client the full text of all sources."""

    def denies_full_text(self, query):
        return True


@pytest.mark.parametrize("unentitled", ["nothing", "quorum"])
def test_client_beyond_its_budget_does_not_cause_searches_of_the_whole_index(tmp_path, monkeypatch, unentitled):
    searched = []

    async def search(rag, vector, k, tenant):
        searched.append(k)
        return await original(rag, vector, k, tenant)

    original = Rag.search
    monkeypatch.setattr(Rag, "search", search)
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        guard = guard_of(Rag(BagOfWords(64), index, Parrot()), unentitled, [DeniesFullText()])
        asyncio.run(guard.add(collection(3, 60)))
        assert context(guard, client_query(k=3)) == []
    assert searched == [3]


def test_wide_searches_of_unentitled_clients_run_one_at_a_time(tmp_path, monkeypatch):
    """Twenty concurrent questions of such clients leave threads for other clients, whose questions are answered."""
    monkeypatch.setattr(pipeline, "WIDE", 50)
    wide_searches, concurrent_counts, release = [], [], threading.Event()

    def search(index, vector, k, tenant="default"):
        if k >= 50:
            wide_searches.append(k)
            concurrent_counts.append(len(wide_searches))
            assert release.wait(20)
            wide_searches.remove(k)
        return original(index, vector, k, tenant)

    original = SqliteIndex.search
    monkeypatch.setattr(SqliteIndex, "search", search)

    async def run_concurrently(guard):
        slow = [asyncio.create_task(guard.retrieve(client_query(k=3))) for _ in range(20)]
        while not wide_searches:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            ordinary, _ = await guard.retrieve(client_query(None, k=3))
        assert len(ordinary.hits) == 3 and len(wide_searches) == 1
        release.set()
        return [found.hits for found, _ in await asyncio.gather(*slow)]

    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        archive_only = AudiencePolicy("nothing", (EntitlementRule(ENTITLED),))
        guard = Guard(Rag(BagOfWords(64), index, Parrot()), [], audience=archive_only)
        asyncio.run(guard.add(collection(3, 60)))
        assert asyncio.run(run_concurrently(guard)) == [()] * 20
    assert set(concurrent_counts) == {1}


@dataclass
class FailingDefense(Defense):
    """Raises an error on every retrieval."""

    async def on_retrieve(self, query, retrieval):
        raise RuntimeError


@pytest.mark.parametrize("on_error", ["open", "closed"])
@pytest.mark.parametrize("defenses", [[], [FailingDefense()]])
def test_unreadable_text_is_removed_if_the_defense_is_missing_or_fails(rag, on_error, defenses):
    found = context(guard_of(rag, defenses=defenses, on_error=on_error), client_query())
    assert all(d.id.startswith("p") for d in found)


def test_unreadable_text_remains_without_the_final_check(rag, monkeypatch):
    monkeypatch.setattr("casemate.guard.guard._without_unreadable", lambda kept, found: kept)
    with pytest.raises(AssertionError):
        test_unreadable_text_is_removed_if_the_defense_is_missing_or_fails(rag, "open", [])


def test_observe_mode_records_the_verdict_without_changing_the_retrieval(rag):
    guard = guard_of(rag, enforce=False)
    retrieval, (verdict,) = asyncio.run(guard.retrieve(client_query()))
    assert {h.document.id for h in retrieval.hits} == {"d0", "d1", "d2", "p0"}
    assert verdict.defense == "quorum" and not verdict.enforced


# Turns


class HidesFirstDocument(Defense):
    """Hides document d0."""

    max_hidden_sources = 1

    async def on_retrieve(self, query, retrieval):
        kept = tuple(h for h in retrieval.hits if h.document.id != "d0")
        return Outcome(replace(retrieval, hits=kept), Verdict("hide_first", True, Action.HIDE, 1.0, 0.5, ("d0",)))


@pytest.mark.parametrize("questions", [(QUESTION, QUESTION), ("In which year did the harbor bridge open?", QUESTION)])
def test_quorum_answers_every_query_of_a_turn(rag, questions):
    guard = guard_of(rag)
    with turn(QUESTION):
        for text in questions:
            assert "1932" in context(guard, replace(client_query(), text=text))[-1].text


def test_documents_hidden_by_another_defense_stay_hidden_in_a_turn_with_quorum(rag):
    guard = guard_of(rag, defenses=[HidesFirstDocument(), Quorum(jitter=1, floor=0.1)])
    with turn(QUESTION):
        context(guard, client_query())
        guard.defenses = guard.defenses[1:]
        assert guard.defenses[0].replaces_unreadable
        (verdict,) = asyncio.run(guard.retrieve(client_query()))[1]
        assert set(verdict.hidden) == {"d1", "d2"}


def single_unit_answers(store):
    return sum(store.tallies[name][0] for name in store.tallies if " source " in name and " latest " not in name)


def test_judging_the_question_of_a_turn_uses_no_single_unit_answer(rag):
    store = Memory()
    guard = guard_of(rag, defenses=[Quorum(support=9, jitter=1, floor=0.1, break_glass=1, store=store)])
    with turn(QUESTION):
        asyncio.run(guard.judge_turn(replace(client_query(), text="Which harbor bridge?")))
        assert not single_unit_answers(store)
        assert isinstance(context(guard, client_query())[-1], ReleasedDocument)
    assert single_unit_answers(store) == 1


def test_a_defense_after_quorum_that_removes_hits_charges_the_budget_once(rag, tmp_path):
    store, honeytoken = Memory(), Honeytoken(keys=tmp_path / "honeytokens.json", serve_honeytokens=False)
    key = HoneytokenKeyFile(honeytoken.keys).load_or_create()
    record = Document("h0", "The harbor bridge: when did it open?", metadata={"department": "press"})
    notes = [replace(d, text=f"zebra {d.id}") for d in collection(0, 200)]  # below the floor
    asyncio.run(Guard(rag, []).add([key.seal(record, "default", 1, 0), *notes]))
    quorum = Quorum(support=9, jitter=1, floor=0.1, break_glass=5, store=store)
    documents = context(guard_of(rag, defenses=[quorum, honeytoken]), client_query(k=3))
    assert single_unit_answers(store) == 1
    assert len(documents) == 2 and "h0" not in [d.id for d in documents]
    assert isinstance(documents[-1], ReleasedDocument)


@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize(
    "found", [[], [TEXTS[0]], list(TEXTS), ["A public note about the harbor bridge and topic number 0."]]
)
def test_single_unit_answer_is_delivered_with_results_of_another_retriever(rag, found, k):
    store = Memory()
    guard = guard_of(rag, defenses=[Quorum(support=9, jitter=1, floor=0.1, break_glass=1, store=store)])
    with turn(QUESTION):
        documents = asyncio.run(judge_found(guard, client_query(k=k), found))
    assert single_unit_answers(store) == 1
    assert [d.id for d in documents] == ["p0", "quorum"]
    assert documents[-1].text != UNKNOWN


def test_acl_labels_take_precedence_over_the_audience_policy(rag, tmp_path):
    """Documents whose labels a client lacks are not used."""
    with closing(SqliteIndex(tmp_path / "labelled.db")) as index:
        guard = guard_of(Rag(BagOfWords(256), index, Parrot()))
        asyncio.run(guard.add([replace(d, metadata={"acl": "board"}) for d in collection(3, 0)]))
        assert asyncio.run(guard.ask(client_query(labels=frozenset()))).text == UNKNOWN
        assert "1932" in asyncio.run(guard.ask(client_query(labels=frozenset({"board"})))).text


# Paths of a query


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An installation with three private sources, one public source and three keys."""
    monkeypatch.setattr(plugins, "entry_points", entry_points(BAG))
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


def test_ask_as_a_client_explains_the_answer(folder):
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


def test_ask_as_a_client_lists_the_sources_that_it_may_not_read(folder):
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


def test_ask_as_a_client_lists_the_sources_whose_labels_it_lacks(folder):
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
        (verdict,) = asyncio.run(guard.retrieve(client_query()))[1]
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


def test_keys_are_listed_one_per_line_and_optionally_with_groups_and_labels(folder, monkeypatch):
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


def test_second_valid_key_with_the_same_name_is_refused(folder):
    made = json.loads(cli_run("key", "create", "web", "--json"))
    with pytest.raises(ConfigError, match=f"casemate key revoke {made['id']}"):
        cli_run("key", "create", "web")
    assert cli_run("key", "list").count("web") == 1
    cli_run("key", "revoke", made["id"])
    cli_run("key", "create", "web")


def test_gateway_answers_depend_on_the_groups_of_the_key(folder):
    pytest.importorskip("fastapi")
    from tests import gateways

    with open_app() as app:
        visitor_key, archivist = (
            gateways.key(app, groups=("visitor",), retrieve=True),
            gateways.key(app, groups=("archivist",), retrieve=True),
        )
        with gateways.client(app, visitor_key) as http:
            response = http.post("/v1/chat/completions", json=gateways.chat(QUESTION)).json()
            rows = http.post("/v1/retrieve", json={"question": QUESTION}).json()["data"]
            text = response["choices"][0]["message"]["content"]
            assert "1932" in text and [row["id"] for row in rows] == ["quorum"] and rows[0]["text"] == text
            streamed = http.post("/v1/chat/completions", json=gateways.chat(QUESTION, stream=True)).text
            assert "1932" in streamed
            assert not any(word in json.dumps([response, rows, streamed]) for word in WORDS)
            headers = {"Authorization": f"Bearer {archivist}"}
            rows = http.post("/v1/retrieve", json={"question": QUESTION}, headers=headers).json()["data"]
            assert {row["id"] for row in rows} == {"d0", "d1", "d2"}


def test_integrations_use_the_groups_of_the_client():
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
    """A guarded store without agreement of two units, so that a private unit may answer alone, once."""
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


def break_glass_usage(made):
    usage = made.protection.events.quota_usage("quorum break-glass")
    return sum(used for name, used in usage.items() if " latest " not in name)


def every_document(document):
    return True


def test_filter_does_not_use_a_second_single_unit_answer(tmp_path):
    made = break_glass_store(tmp_path)
    found = made.similarity_search(QUESTION, k=3, filter=every_document)
    assert [d.id for d in found] == ["p0", "quorum"] and found[-1].page_content != UNKNOWN
    assert break_glass_usage(made) == 1
    made.protection.close()


@pytest.mark.parametrize(("found", "shown"), [("d0 p0", "p0 quorum"), ("d1 d0", "p0 quorum"), ("d0", "p0")])
def test_single_unit_answer_with_another_retriever_is_charged_only_if_delivered(tmp_path, found, shown):
    made = break_glass_store(tmp_path)
    from langchain_core.retrievers import BaseRetriever

    from casemate.integrations.langchain import guarded

    class FixedRetriever(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return made.unguarded.get_by_ids(found.split())

    documents = guarded(FixedRetriever(), store=made).invoke(QUESTION)
    assert [d.id for d in documents] == shown.split()
    assert break_glass_usage(made) == ("quorum" in shown)
    assert documents[-1].page_content != UNKNOWN
    made.protection.close()


def test_question_for_one_document_with_a_readable_hit_uses_no_single_unit_answer(tmp_path):
    made = break_glass_store(tmp_path)
    assert [d.id for d in made.similarity_search(QUESTION, k=1)] == ["p0"]
    assert not break_glass_usage(made)
    made.protection.close()


def test_answer_has_no_metadata_of_a_stored_document_with_the_id_quorum(tmp_path):
    made = break_glass_store(tmp_path, ids=("quorum", "d1", "p0"))
    answer = made.similarity_search(QUESTION, k=3)[-1]
    assert answer.id == "quorum" and "department" not in answer.metadata
    made.protection.close()


@pytest.mark.parametrize("wrong", [{"groups": "staff"}, {"labels": "clinic"}])
def test_string_instead_of_a_set_is_refused(wrong):
    with pytest.raises(TypeError, match=f"{next(iter(wrong))}='"):
        Query("Who?", "ann", **wrong)
