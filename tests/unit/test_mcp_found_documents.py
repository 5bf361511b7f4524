"""Results of another retriever: recognized formats, matched documents, and the decision of the guard."""

from __future__ import annotations

import asyncio
import functools
import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.gateway.mcp.found_documents import find_documents, judge_found, merge_verdicts
from casemate.gateway.mcp.upstream import LISTS, TEXTS, recognize
from casemate.guard import turn as turns
from casemate.guard.audience import AudiencePolicy
from casemate.guard.defenses.crawl_limit import CrawlLimit
from casemate.guard.turn import OpenTurns, continued
from casemate.types import Action, Document, Outcome, Query, Verdict
from tests.fakes import documents
from tests.gateways import HideNamed, make

DOCUMENTS = documents(40)
TEXT = {d.id: d.text for d in DOCUMENTS}


@dataclass
class Block:
    text: str = ""
    type: str = "text"


def blocks(*values):
    return [Block(v if isinstance(v, str) else json.dumps(v)) for v in values]


@given(st.lists(st.text(st.characters(codec="utf-8"))), st.sampled_from(LISTS), st.sampled_from(TEXTS))
def test_recognizes_texts_in_all_documented_formats(texts, several, one):
    as_objects = [{one: text, "score": 0.5, "metadata": {"page": 3}} for text in texts]
    for form in (texts, as_objects, {several: texts}, {several: as_objects, "total": 9}):
        assert recognize([], form) == texts
        assert recognize(blocks(form)) == texts
    assert recognize(blocks(*as_objects)) == texts


@pytest.mark.parametrize(
    "content",
    [[Block(type="image")], [Block("a"), Block(type="resource_link")], blocks({"a": 1}), blocks([1]), blocks([None])],
)
def test_does_not_recognize_other_formats(content):
    assert recognize(content) is None


@pytest.mark.parametrize("structured", [1, True, {}, {"x": "y"}, {"result": 3}, {"hits": [], "results": []}])
def test_does_not_recognize_other_structured_content_even_with_a_text_block(structured):
    assert recognize(blocks("a text"), structured) is None


def test_json_scalars_in_text_blocks_are_texts():
    assert recognize(blocks("12", "null", "plain")) == ["12", "null", "plain"]


def test_text_of_many_brackets_is_a_text_and_a_deep_list_is_not_recognized():
    text = "[" * 100_000
    deep = functools.reduce(lambda inner, _: [inner], range(5_000), "inside")
    assert recognize([Block(text), Block("plain")]) == [text, "plain"]
    assert recognize([], deep) is None


def test_text_matches_documents_that_it_equals_contains_or_is_part_of():
    whole = Document("w", "The pharmacy on level two opens at eight and closes at noon.", "Pharmacy")
    other = Document("o", "Visitors park behind the chapel, and pay at the gate in coins.")
    both = [whole, other]
    for text, expected in {
        whole.text: [whole],
        whole.content.replace(" ", "\n "): [whole],
        f"1. {other.text}\n2. {whole.text}": [whole, other],
        "opens at eight and closes at noon.": [whole],
        "opens at eight": [],
        "": [],
    }.items():
        assert find_documents([text], both) == expected
    assert find_documents([other.text, "unknown", whole.text, other.text], both) == [other, whole]


class HideIfFirst(HideNamed):
    """Hides d3 if it is the best hit."""

    async def on_retrieve(self, query, retrieval):
        if retrieval.hits and retrieval.hits[0].document.source == self.source:
            return await super().on_retrieve(query, retrieval)
        return Outcome(retrieval)


async def judged_ids(guard, text, found, k=5, **query):
    kept = await judge_found(guard, Query(text, k=k, **query), [TEXT[name] for name in found])
    assert len({d.id for d in kept}) == len(kept)
    return [d.id for d in kept]


@pytest.fixture
def guard(tmp_path):
    with make(tmp_path, defenses=(HideNamed("d3"),)) as app:
        yield app.guard


async def test_allowed_documents_keep_their_order_and_withheld_documents_are_replaced(guard):
    kept = await judged_ids(guard, TEXT["d7"], ["d9", "d7", "d20"])
    assert kept[:3] == ["d9", "d7", "d20"] and len(kept) == 5
    kept = await judged_ids(guard, TEXT["d3"], ["d9", "d3", "d20"])
    assert kept[:2] == ["d9", "d20"] and len(kept) == 5 and "d3" not in kept


async def test_judges_a_document_that_dense_search_does_not_find(guard):
    """The other retriever returns d3 for a query without common words."""
    kept = await judged_ids(guard, TEXT["d30"], ["d3"])
    assert len(kept) == 5 and "d3" not in kept


async def test_returns_at_most_k_documents_and_no_unknown_ones(guard):
    assert await judged_ids(guard, "amber", ["d1", "d2", "d4", "d5"], k=2) == ["d1", "d2"]
    kept = await judge_found(guard, Query("amber"), ["of no document in the index, whatever it is"])
    assert len(kept) == 5


@pytest.mark.parametrize("off", [False, True])
def test_charges_documents_of_another_retriever_unless_the_guard_is_off(tmp_path, off):
    """Charges both the found documents and those added by the retrieval of the guard."""
    limit, query = CrawlLimit(budget=50), Query(TEXT["d9"], k=5)
    with make(tmp_path, defenses=(limit,)) as app:
        kept = asyncio.run(judge_found(app.guard, query, [TEXT["d30"], TEXT["d31"]], off=off))
    assert [d.id for d in kept[:2]] == ["d30", "d31"]
    assert limit.evidence.disclosed_words(query) == (0 if off else 50)
    assert sum(1 + len(d.text.split()) for d in kept) == (5 * 14 if off else 50)  # words and ids


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("k", [1, 5, 100])
async def test_number_of_documents_does_not_depend_on_the_found_documents(guard, k, off):
    """Returns at most k of all documents except the hidden one, even if the other retriever finds it or nothing."""
    for text in (TEXT["d3"], TEXT["d7"], "amber"):
        for texts in ([], ["nothing found"], [TEXT["d3"]], [TEXT["d7"]], list(TEXT.values())):
            kept = await judge_found(guard, Query(text, k=k), texts, off=off)
            assert len(kept) == min(k, 40 if off else 39)
            assert off or "d3" not in [d.id for d in kept]


async def test_replaces_a_document_that_is_withheld_only_because_it_was_found(guard):
    """The defense hides d3 only if it is the best hit; the retrieval of the guard would rank it lower."""
    guard.defenses = (HideIfFirst("d3"),)
    kept = await judged_ids(guard, TEXT["d8"], ["d3"], k=30)
    assert len(kept) == 30 and "d3" not in kept


def test_merged_verdict_is_the_most_severe_one_with_all_hidden_documents():
    calm, flagged = Verdict("m", False, Action.NONE, 3.0, 2.5), Verdict("m", True, Action.HIDE, 2.9, 2.5, ("a",))
    other = Verdict("m", True, Action.HIDE, 2.6, 2.5, ("b", "a"))
    failed, limit = Verdict("m", False, Action.WITHHOLD, 0.0, None), Verdict("crawl_limit", False, Action.NONE, 0.1, 1)
    assert merge_verdicts([calm, limit, flagged, other]) == [replace(flagged, hidden=("a", "b")), limit]
    assert merge_verdicts([flagged, failed]) == [replace(failed, hidden=("a",))]
    assert merge_verdicts([]) == []


@pytest.mark.parametrize("found", [[], ["d3"], ["d7"]])
def test_records_one_verdict_for_any_found_documents(tmp_path, found):
    with make(tmp_path, defenses=(HideNamed("d3"),)) as app:
        asyncio.run(judged_ids(app.guard, TEXT["d3"], found))
        app.store.flush()
        (verdict,) = app.store.scan("verdict")
    assert verdict.body["hidden"] == ["d3"] and verdict.body["enforced"]


async def test_observe_mode_withholds_nothing(guard):
    guard.enforce = False
    assert (await judged_ids(guard, TEXT["d3"], ["d9", "d3"]))[:2] == ["d9", "d3"]


async def test_document_withheld_for_the_question_is_withheld_for_its_queries(guard):
    open_turns = OpenTurns()
    with continued(open_turns.of("default", "c", TEXT["d3"])):
        assert "d3" not in await judged_ids(guard, "amber", ["d3", "d8"], client="c")


def test_turn_continues_only_for_the_same_tenant_client_and_question(monkeypatch):
    now = 0.0
    monkeypatch.setattr(turns.time, "monotonic", lambda: now)
    opened = OpenTurns()
    first = opened.of("t", "c", "q")
    assert opened.of("t", "c", "q") is first
    assert all(opened.of(*other) is not first for other in (("t", "d", "q"), ("u", "c", "q"), ("t", "c", "p")))
    now = turns.OPEN_TURN_S
    assert opened.of("t", "c", "q") is first
    now += turns.OPEN_TURN_S + 1
    assert opened.of("t", "c", "q") is not first
    monkeypatch.setattr(turns, "MAX_OPEN_TURNS", 3)
    kept = opened.of("t", "c", "q")
    for number in range(2):
        opened.of("t", "c", str(number))
    assert opened.of("t", "c", "q") is kept
    for number in range(3):
        opened.of("t", "c", str(number))
    assert opened.of("t", "c", "q") is not kept


def test_open_turns_are_stored_under_a_digest_of_the_question():
    opened = OpenTurns()
    opened.of("t", "c", "secretword")
    assert "secretword" not in repr(list(opened._turns))


async def test_drops_documents_without_a_label_of_the_client_with_the_guard_on_and_off(labelled):
    texts = [d.text for d in labelled.documents]
    for off in (False, True):
        kept = await judge_found(labelled.guard, Query(texts[0], labels=frozenset()), texts, off=off)
        assert "d0" not in [d.id for d in kept]
        kept = await judge_found(labelled.guard, Query(texts[0], labels=frozenset({"board"})), texts, off=off)
        assert kept[0].id == "d0"


@dataclass
class Labelled:
    guard: object
    documents: list


@pytest.fixture
def labelled(tmp_path):
    app = make(tmp_path, count=0)
    held = [*documents(1, metadata={"acl": ["board"]}), *documents(4, seed=1)[1:]]
    asyncio.run(app.guard.add(held))
    with app:
        yield Labelled(app.guard, held)


async def test_returns_no_source_that_the_client_can_read_only_in_part(guard):
    guard.audience = AudiencePolicy("nothing")
    assert await judged_ids(guard, TEXT["d7"], ["d7", "d8"], groups=frozenset()) == []
    assert (await judged_ids(guard, TEXT["d7"], ["d7", "d8"]))[:2] == ["d7", "d8"]
