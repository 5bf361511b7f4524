"""Questions made from a corpus: of every kind, the same for the same seed, and none that is empty."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.lab.questions import KINDS, OPEN, RELATION, _Maker, made_questions
from casemate.types import Document
from casemate.words import STOP_WORDS, content_words, words

BRIDGE = Document(
    "bridge",
    "The north bridge over the Aura was closed in May because of corrosion at two bearings. Repairs took four months "
    "and cost 1.2 million euros. The engineers of the harbour office recommended yearly inspections of all bearings.",
    title="Closure of the north bridge",
)
MARKET = Document("market", "Fish prices at the quay market fell by a third after the new cold store had opened.")


def rng(seed=0):
    return np.random.default_rng(seed)


def test_the_kinds_come_in_equal_shares():
    made = made_questions([BRIDGE, MARKET], 500, rng())
    assert len(made) == 500
    shapes = Counter(shape(question) for question in made)
    frames = shapes["open"] + shapes["relation"]
    assert frames == 200
    assert 80 <= shapes["relation"] <= 100  # the market's one sentence may have but one phrase
    assert shapes["fact"] == 100
    assert shapes["short"] == 200
    assert len(set(made)) > 200


def shape(question):
    for name, frames in (("open", OPEN), ("relation", RELATION)):
        if any(re.fullmatch(re.escape(f).replace(r"\{\}", ".+"), question) for f in frames):
            return name
    return "fact" if question.endswith("?") else "short"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_asks_about_the_document_in_its_own_words(kind):
    frame = set(words(" ".join((*OPEN, *RELATION))))
    for seed in range(40):
        made = _Maker(BRIDGE, rng(seed)).make(kind)
        assert set(words(made)) - frame <= set(words(BRIDGE.content))
        assert content_words(made) & content_words(BRIDGE.content)
        assert len(made.split()) <= 18


def test_key_words_are_few_and_a_fact_has_several():
    for seed in range(40):
        assert 1 <= len(_Maker(BRIDGE, rng(seed)).make("keywords").split()) <= 3
        assert len(_Maker(BRIDGE, rng(seed)).make("fact").split()) >= 3
        assert not STOP_WORDS & set(words(_Maker(BRIDGE, rng(seed)).make("topic")))


def test_they_are_far_shorter_than_a_document():
    made = made_questions([BRIDGE], 200, rng())
    assert np.mean([len(q.split()) for q in made]) < len(BRIDGE.content.split()) / 4


def test_the_same_seed_makes_the_same_questions_and_another_others():
    assert made_questions([BRIDGE, MARKET], 60, rng(3)) == made_questions([BRIDGE, MARKET], 60, rng(3))
    assert made_questions([BRIDGE, MARKET], 60, rng(3)) != made_questions([BRIDGE, MARKET], 60, rng(4))


def test_all_documents_are_asked_about():
    held = [
        Document(f"d{i}", f"Report about topic{i} written by clerk{i} in room{i} of house{i} on day{i}")
        for i in range(30)
    ]
    made = " ".join(made_questions(held, 600, rng()))
    assert {i for i in range(30) if re.search(rf"\b(topic|clerk|room|house|day){i}\b", made)} == set(range(30))


def test_no_question_is_asked():
    assert made_questions([BRIDGE], 0, rng()) == []


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
def test_whatever_a_document_is_no_question_is_empty(name, beside):
    made = made_questions([HOSTILE[name], *beside], 50, rng(1))
    assert len(made) == 50
    assert all(words(question) for question in made)


@given(st.text(max_size=200), st.text(max_size=40), st.integers(0, 99))
def test_any_text_makes_questions(text, title, seed):
    made = made_questions([Document("x", text, title=title)], 10, rng(seed))
    assert [bool(words(q)) for q in made] == [True] * 10
