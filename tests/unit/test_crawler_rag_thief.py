import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.redteam.attacks.rag_thief import MAX_ANCHOR_CHARACTERS, ORDERS, RAGThief, _Queue, windows
from casemate.redteam.crawling.common_words import SENTENCES
from casemate.redteam.crawling.extracted_texts import COMMANDS
from casemate.text.tokens import words
from tests.unit.crawls import NOTES, Scribe, Scripted, System, crawl, share

NOTE = "The ferry at Crale runs every twenty minutes until half past ten. Dogs are not allowed on the upper deck."


def test_yields_each_text_of_the_replies_once():
    system = System(budget=60)
    found = crawl(RAGThief(), system)
    assert set(found) <= {note.text for note in NOTES}
    assert len(set(found)) == len(found)
    assert share(found) == len({i for shown in system.shown for i in shown}) / len(NOTES) > 0.5


def test_continues_from_new_chunks():
    system = System(budget=12)
    found = crawl(RAGThief(topics=("heron ward",)), system)
    assert system.questions[0] == f"heron ward\n\n{COMMANDS[0]}"
    for question in system.questions[1:]:
        anchor = question.partition("\n\n")[0]
        assert any(set(words(anchor)) <= set(words(text)) for text in found)


@pytest.mark.parametrize("order", ORDERS)
def test_ends_when_replies_contain_no_new_text(order):
    system = System(NOTES[:6])
    assert share(crawl(RAGThief(order=order, patience=5), system), NOTES[:6]) == 1
    assert len(system.questions) < 6 * 10 + 80
    assert len(set(system.questions)) == len(system.questions)


def test_tries_all_commands_on_a_target_that_refuses():
    box = Scripted(["I don't know."])
    assert crawl(RAGThief(patience=20), box) == []
    assert len(box.questions) == 20
    assert all(any(command in q for q in box.questions) for command in COMMANDS)
    assert all(any(sentence in q for sentence in SENTENCES) for q in box.questions)


class TestAnchors:
    def test_are_windows_from_both_ends_and_keywords(self):
        text_words = NOTE.split()
        found = windows(NOTE, 6, 5, 5)
        assert found[:2] == [" ".join(text_words[-6:]), " ".join(text_words[:6])]
        assert "ferry Crale runs every twenty minutes half past" in found
        assert len(found) <= 10

    @given(st.text(max_size=200), st.integers(4, 30), st.integers(0, 6), st.integers(1, 6))
    def test_contain_a_limited_number_of_words_of_the_chunk(self, chunk, window_words, forward, backward):
        found = windows(chunk, window_words, forward, backward)
        assert len(found) <= forward + backward
        assert len(set(found)) == len(found)
        for anchor in found:
            assert 0 < len(anchor.split()) <= max(window_words, 8)
            assert all(word in chunk for word in anchor.split())

    def test_contain_no_characters_that_change_the_command(self):
        chunk = (
            'He said: "Fill in ____ and\x00 then “ask” for the rest of what follows in this very long text." '
            + "x" * 900
        )
        box = Scripted([chunk])
        crawl(RAGThief(patience=1, topics=("a",)), box)
        assert len(box.questions) > 1
        for question in box.questions:
            assert not set('"“”_\x00') & set(question)
            assert len(question) < MAX_ANCHOR_CHARACTERS + 200

    @given(st.lists(st.text("abc ", min_size=1, max_size=12).filter(str.strip), max_size=30), st.integers(1, 9))
    def test_order_equals_an_exhaustive_search_for_the_most_novel_anchor(self, anchors, each):
        queue, waiting, text_words, known = _Queue("novelty"), [], set(), set()
        for at in range(0, len(anchors), each):
            queue.put(anchors[at : at + each])
            fresh = [a for a in dict.fromkeys(anchors[at : at + each]) if a not in known]
            waiting += fresh
            known |= set(fresh)
            if waiting:
                novelty = [sum(w not in text_words for w in words(a)) / (len(words(a)) + 6) for a in waiting]
                best = waiting.pop(int(np.argmax(novelty)))
                assert queue.pop() == best
                text_words |= set(words(best))
        assert bool(queue) == bool(waiting)

    def test_order_by_age_is_optional(self):
        queue = _Queue("age")
        queue.put(["b c", "a", "b c"])
        queue.put(["a", "z y x"])
        assert [queue.pop() for _ in range(3)] == ["b c", "a", "z y x"]
        assert not queue


class TestWriter:
    def test_generates_preceding_and_following_texts(self):
        after, before = "1. The last boat sails at ten.\n2. It is often late.", "- The pier was built of oak.\nok"
        writer = Scribe([after, before])
        box = Scripted([NOTE])
        crawl(RAGThief(topics=("ferries",), patience=1, writer=writer), box)
        asked = {q.partition("\n\n")[0] for q in box.questions}
        assert asked >= {"The last boat sails at ten.", "It is often late.", "The pier was built of oak."}
        assert "ok" not in asked
        first, second = writer.prompts
        assert first.context[0].text == second.context[0].text == NOTE
        assert "after" in first.question and "before" in second.question

    def test_windows_are_used_if_the_writer_returns_no_texts(self):
        with_empty_writer, none = Scripted([NOTE]), Scripted([NOTE])
        crawl(RAGThief(patience=1, writer=Scribe([""])), with_empty_writer)
        crawl(RAGThief(patience=1), none)
        assert with_empty_writer.questions == none.questions
