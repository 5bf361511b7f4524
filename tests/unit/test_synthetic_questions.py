"""Synthetic questions: proportions of the kinds, reproducibility, and robustness against unusual documents."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.text.synthetic_questions import (
    KINDS,
    OPEN_TEMPLATES,
    RELATION_TEMPLATES,
    _QuestionGenerator,
    generate_questions,
)
from casemate.text.tokens import STOP_WORDS, content_words, words
from casemate.types import Document

BRIDGE = Document(
    "bridge",
    "The north bridge over the Aura was closed in May because of corrosion at two bearings. Repairs took four months "
    "and cost 1.2 million euros. The engineers of the harbour office recommended yearly inspections of all bearings.",
    title="Closure of the north bridge",
)
MARKET = Document("market", "Fish prices at the quay market fell by a third after the new cold store had opened.")


def rng(seed=0):
    return np.random.default_rng(seed)


def test_questions_use_no_parts_of_urls_or_tags():
    text = "Ask for [the blue form](https://a.example/travel-desk/list.html) before a trip to <b>Turku</b>.<br>Thanks."
    asked = " ".join(generate_questions([Document("form", text)], 200, rng())).lower()
    assert "turku" in asked
    assert not [word for word in ("http", "travel-desk", "list.html", " br ", " b ") if word in asked]


def test_kinds_have_equal_shares():
    made = generate_questions([BRIDGE, MARKET], 500, rng())
    assert len(made) == 500
    shapes = Counter(shape(question) for question in made)
    frames = shapes["open"] + shapes["relation"]
    assert frames == 200
    assert 80 <= shapes["relation"] <= 100  # the sentence about the market may contain only one phrase
    assert shapes["fact"] == 100
    assert shapes["short"] == 200
    assert len(set(made)) > 200


def shape(question):
    for name, frames in (("open", OPEN_TEMPLATES), ("relation", RELATION_TEMPLATES)):
        if any(re.fullmatch(re.escape(f).replace(r"\{\}", ".+"), question) for f in frames):
            return name
    return "fact" if question.endswith("?") else "short"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_uses_words_of_the_document(kind):
    frame = set(words(" ".join((*OPEN_TEMPLATES, *RELATION_TEMPLATES))))
    for seed in range(40):
        made = _QuestionGenerator(BRIDGE, rng(seed)).generate(kind)
        assert set(words(made)) - frame <= set(words(BRIDGE.content))
        assert content_words(made) & content_words(BRIDGE.content)
        assert len(made.split()) <= 18


def test_keyword_questions_are_short_and_topic_questions_have_no_stop_words():
    for seed in range(40):
        assert 1 <= len(_QuestionGenerator(BRIDGE, rng(seed)).generate("keywords").split()) <= 3
        assert len(_QuestionGenerator(BRIDGE, rng(seed)).generate("fact").split()) >= 3
        assert not STOP_WORDS & set(words(_QuestionGenerator(BRIDGE, rng(seed)).generate("topic")))


def test_questions_are_shorter_than_a_quarter_of_the_document():
    made = generate_questions([BRIDGE], 200, rng())
    assert np.mean([len(q.split()) for q in made]) < len(BRIDGE.content.split()) / 4


def test_questions_are_reproducible_from_the_seed():
    assert generate_questions([BRIDGE, MARKET], 60, rng(3)) == generate_questions([BRIDGE, MARKET], 60, rng(3))
    assert generate_questions([BRIDGE, MARKET], 60, rng(3)) != generate_questions([BRIDGE, MARKET], 60, rng(4))


def test_questions_cover_all_documents():
    corpus = [
        Document(f"d{i}", f"Report about topic{i} written by clerk{i} in room{i} of house{i} on day{i}")
        for i in range(30)
    ]
    made = " ".join(generate_questions(corpus, 600, rng()))
    assert {i for i in range(30) if re.search(rf"\b(topic|clerk|room|house|day){i}\b", made)} == set(range(30))


def test_a_count_of_zero_gives_no_questions():
    assert generate_questions([BRIDGE], 0, rng()) == []


HOSTILE = {
    "empty": Document("x", ""),
    "only a title": Document("x", "", title="Closure of the north bridge"),
    "blank": Document("x", " \n\t "),
    "one word": Document("x", "bridge"),
    "only digits": Document("x", "17 4 1999 3.5 12 88 90210 44"),
    "only words without meaning": Document("x", "the of and to a in. it is so and the"),
    "no sentences": Document("x", "bridge " * 3000),
    "only punctuation": Document("x", "!!! ... ??? --- ***"),
    "underscores": Document("x", "___ __ _____"),
    "markup": Document("x", "<b></b><script>{}{0}%s{name}</script> {} {!r}"),
    "Chinese": Document("x", "患者于三月入院，经检查诊断为肺炎。"),
    "emoji": Document("x", "\U0001f9ea\U0001f469\u200d\U0001f52c \U0001f9ea"),
    "one long word": Document("x", "x" * 100_000),
    "line ends": Document("x", "a\r\nb\x0bc\x0cd\u2028e\u2029f"),
    "title without meaning": Document("x", "", title="The of and"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("beside", [(), (BRIDGE,)])
def test_no_question_is_empty_for_unusual_documents(name, beside):
    made = generate_questions([HOSTILE[name], *beside], 50, rng(1))
    assert len(made) == 50
    assert all(words(question) for question in made)


@given(st.text(max_size=200), st.text(max_size=40), st.integers(0, 99))
def test_no_question_is_empty_for_random_text(text, title, seed):
    made = generate_questions([Document("x", text, title=title)], 10, rng(seed))
    assert [bool(words(q)) for q in made] == [True] * 10
