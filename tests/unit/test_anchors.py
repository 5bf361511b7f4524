import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.crawl.anchors import GENERAL, LONGEST, Memory, Stems, lines, named, phrases, required
from casemate.errors import CapabilityError
from casemate.words import STOP_WORDS
from tests.fakes import WORDS, BagOfWords
from tests.unit.crawl_world import NOTES, Writer

some_texts = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join), max_size=12)


class TestPhrases:
    @given(st.text(max_size=300))
    def test_stand_in_the_text_and_are_short(self, text):
        for phrase in phrases(text):
            assert phrase.lower() in " ".join(text.lower().split())
            assert 0 < len(phrase) <= LONGEST

    def test_are_told_once_whatever_their_form(self):
        assert phrases("Herons nest in reeds. A heron eats frogs.").count("herons nest") == 1
        assert phrases("The tolls are high. A toll is paid. The toll again.") == ["tolls", "high", "paid"]

    def test_break_at_verbs_fillers_and_labels(self):
        found = phrases("Owner: the ferry brings several sheep. Thanks for a good answer about pier Warden: it floods.")
        assert found == ["ferry", "sheep", "answer", "pier", "floods"]

    def test_of_a_case_note_are_about_its_case(self):
        for note in NOTES[:10]:
            assert len(phrases(note.text)) >= 15
            assert not [p for p in phrases(note.text) if p.lower() in STOP_WORDS]


def test_general_words_are_different_and_no_stop_words():
    assert len(set(GENERAL)) == len(GENERAL) > 50
    assert not set(GENERAL) & STOP_WORDS


def test_an_attack_without_an_embedder_says_what_it_needs():
    with pytest.raises(CapabilityError, match="ikea .*embedder"):
        required(None, "ikea")
    assert required(embedder := Stems(), "ikea") is embedder


class TestWriter:
    def test_lines_are_without_numbers_bullets_and_quotes(self):
        writer = Writer({"Name": '1. north bridge\n\n- "tolls"\n  * piers  '})
        assert asyncio.run(lines(writer, "Name some", "It rained.")) == ["north bridge", "tolls", "piers"]
        assert writer.prompts[0].context[0].text == "It rained."

    def test_names_are_short_different_and_few(self):
        writer = Writer({"Name": f"tolls.\ntolls\n{'long ' * 20}\npiers\nbells"})
        assert asyncio.run(named(writer, "Name some", 2)) == ["tolls", "piers"]
        assert writer.prompts[0].context == ()


class TestMemory:
    @given(some_texts, some_texts, st.floats(0.1, 1))
    def test_admits_what_is_like_nothing_held(self, first, second, limit):
        embedder = BagOfWords()
        memory = Memory(embedder)
        memory.admit(first, limit)
        let_in = [memory.texts[i] for i in memory.admit(second, limit)]

        held = []  # one by one, with every cosine computed anew
        for text in [*first, *second]:
            row = embedder.embed([text])[0]
            if text not in held and all(float(embedder.embed([t])[0] @ row) < limit for t in held):
                held.append(text)
        assert memory.texts == held
        assert let_in == held[len(held) - len(let_in) :]

    def test_embeds_a_text_once_and_grows(self):
        embedder = BagOfWords()
        memory = Memory(embedder)
        texts = [f"word{i}" for i in range(200)]
        memory.admit(texts, 2.0)
        count = len(embedder.texts)
        assert memory.texts == texts and memory.vectors.shape == (200, 64)
        assert np.array_equal(memory.embed(texts[::-1]), memory.vectors[::-1])
        assert memory.add("word7") == 7
        assert len(embedder.texts) == count
        assert "word7" in memory and "word200" not in memory

    def test_finds_the_text_most_alike(self):
        memory = Memory(BagOfWords())
        assert memory.closest(np.ones(64, np.float32)) == (-1, -1.0)
        memory.admit(["amber birch", "cedar delta"], 2.0)
        place, cosine = memory.closest(memory.embed(["delta cedar"])[0])
        assert place == 1 and cosine == pytest.approx(1)

    def test_of_nothing_is_nothing(self):
        memory = Memory(BagOfWords())
        assert memory.embed([]).shape == (0, 64)
        assert memory.admit([], 0.5) == [] and len(memory) == 0


class TestStems:
    @given(st.lists(st.text(max_size=40), max_size=6))
    def test_rows_have_unit_length(self, texts):
        E = Stems().embed(texts)
        assert E.shape == (len(texts), 1024)
        assert np.allclose(np.linalg.norm(E, axis=1), 1, atol=1e-6)

    def test_texts_are_alike_by_their_stems(self):
        a, b, c, d = Stems().embed(["the north tolls", "a toll, north", "north bridge", "herons"])
        assert a @ b == pytest.approx(1)
        assert a @ c == pytest.approx(0.5, abs=0.2)
        assert a @ d == pytest.approx(0, abs=0.2)

    def test_no_two_words_are_the_same(self):
        E = Stems().embed([f"pier{i}x" for i in range(1000)])
        assert (E @ E.T - np.eye(1000, dtype=np.float32)).max() < 0.8
