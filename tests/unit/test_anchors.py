import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import CapabilityError
from casemate.redteam.crawling.anchors import (
    MAX_ANCHOR_CHARACTERS,
    HashingEmbedder,
    TextVectors,
    noun_phrases,
    require_embedder,
)
from casemate.redteam.crawling.common_words import GENERAL_WORDS
from casemate.redteam.crawling.writer import writer_lines, writer_phrases
from casemate.text.tokens import STOP_WORDS
from tests.fakes import WORDS, BagOfWords
from tests.unit.crawls import PARAGRAPHS, Writer

some_texts = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join), max_size=12)


class TestNounPhrases:
    @given(st.text(max_size=300))
    def test_are_short_and_occur_in_the_text(self, text):
        for phrase in noun_phrases(text):
            assert phrase.lower() in " ".join(text.lower().split())
            assert 0 < len(phrase) <= MAX_ANCHOR_CHARACTERS

    def test_are_distinct_by_stem(self):
        assert noun_phrases("Herons nest in reeds. A heron eats frogs.").count("herons nest") == 1
        assert noun_phrases("The tolls are high. A toll is paid. The toll again.") == ["tolls", "high", "paid"]

    def test_end_at_verbs_fillers_and_labels(self):
        found = noun_phrases(
            "Owner: the ferry brings several sheep. Thanks for a good answer about pier Warden: it floods."
        )
        assert found == ["ferry", "sheep", "answer", "pier", "floods"]

    def test_of_a_case_note_describe_the_case(self):
        for note in PARAGRAPHS[:10]:
            assert len(noun_phrases(note.text)) >= 15
            assert not [p for p in noun_phrases(note.text) if p.lower() in STOP_WORDS]


def test_general_words_are_distinct_and_not_stop_words():
    assert len(set(GENERAL_WORDS)) == len(GENERAL_WORDS) > 50
    assert not set(GENERAL_WORDS) & STOP_WORDS


def test_a_missing_embedder_is_an_error():
    with pytest.raises(CapabilityError, match="ikea .*embedder"):
        require_embedder(None, "ikea")
    assert require_embedder(embedder := HashingEmbedder(), "ikea") is embedder


class TestWriter:
    def test_lines_have_no_numbers_bullets_and_quotes(self):
        writer = Writer({"Name": '1. north bridge\n\n- "tolls"\n  * piers  '})
        assert asyncio.run(writer_lines(writer, "Name some", "It rained.")) == ["north bridge", "tolls", "piers"]
        assert writer.prompts[0].context[0].text == "It rained."

    def test_phrases_are_short_distinct_and_limited(self):
        writer = Writer({"Name": f"tolls.\ntolls\n{'long ' * 20}\npiers\nbells"})
        assert asyncio.run(writer_phrases(writer, "Name some", 2)) == ["tolls", "piers"]
        assert writer.prompts[0].context == ()


class TestTextVectors:
    @given(some_texts, some_texts, st.floats(0.1, 1))
    def test_add_dissimilar_skips_similar_texts(self, first, second, limit):
        embedder = BagOfWords()
        memory = TextVectors(embedder)
        memory.add_dissimilar(first, limit)
        accepted = [memory.texts[i] for i in memory.add_dissimilar(second, limit)]

        accepted_one_by_one = []  # one by one, with every cosine computed again
        for text in [*first, *second]:
            row = embedder.embed([text])[0]
            if text not in accepted_one_by_one and all(
                float(embedder.embed([t])[0] @ row) < limit for t in accepted_one_by_one
            ):
                accepted_one_by_one.append(text)
        assert memory.texts == accepted_one_by_one
        assert accepted == accepted_one_by_one[len(accepted_one_by_one) - len(accepted) :]

    def test_embeds_each_text_once_and_grows(self):
        embedder = BagOfWords()
        memory = TextVectors(embedder)
        texts = [f"word{i}" for i in range(200)]
        memory.add_dissimilar(texts, 2.0)
        count = len(embedder.texts)
        assert memory.texts == texts and memory.vectors.shape == (200, 64)
        assert np.array_equal(memory.embed(texts[::-1]), memory.vectors[::-1])
        assert memory.add("word7") == 7
        assert len(embedder.texts) == count
        assert "word7" in memory and "word200" not in memory

    def test_finds_the_nearest_text(self):
        memory = TextVectors(BagOfWords())
        assert memory.nearest(np.ones(64, np.float32)) == (-1, -1.0)
        memory.add_dissimilar(["amber birch", "cedar delta"], 2.0)
        place, cosine = memory.nearest(memory.embed(["delta cedar"])[0])
        assert place == 1 and cosine == pytest.approx(1)

    def test_empty_input_gives_empty_output(self):
        memory = TextVectors(BagOfWords())
        assert memory.embed([]).shape == (0, 64)
        assert memory.add_dissimilar([], 0.5) == [] and len(memory) == 0


class TestHashingEmbedder:
    @given(st.lists(st.text(max_size=40), max_size=6))
    def test_rows_have_unit_length(self, texts):
        E = HashingEmbedder().embed(texts)
        assert E.shape == (len(texts), 1024)
        assert np.allclose(np.linalg.norm(E, axis=1), 1, atol=1e-6)

    def test_similarity_depends_on_shared_stems(self):
        a, b, c, d = HashingEmbedder().embed(["the north tolls", "a toll, north", "north bridge", "herons"])
        assert a @ b == pytest.approx(1)
        assert a @ c == pytest.approx(0.5, abs=0.2)
        assert a @ d == pytest.approx(0, abs=0.2)

    def test_different_words_have_different_vectors(self):
        E = HashingEmbedder().embed([f"pier{i}x" for i in range(1000)])
        assert (E @ E.T - np.eye(1000, dtype=np.float32)).max() < 0.8
