"""Sentence features for extractive answers, and the models fitted on them."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.text.answering import (
    BY_VECTORS,
    BY_WORDS,
    FEATURES,
    NUMBER_WORDS,
    SUPPORT_FEATURES,
    TYPES,
    WORD_FEATURES,
    Passage,
    Question,
    sentence_features,
    support_features,
    with_cosines,
)

PASSAGES = [
    Passage("Parking", ("The garage has two floors.", "It costs 2 marks an hour.", "Bring coins.")),
    Passage("", ()),
    Passage("Staff", ("Ada Okwu runs the garage.", "She came in May 1987.")),
]


def column(name, question, passages=PASSAGES, cosines=None):
    table = sentence_features(Question(question), passages)
    table = table if cosines is None else with_cosines(table, passages, np.array(cosines))
    return table[:, FEATURES.index(name)].round(6).tolist()


@pytest.mark.parametrize(
    ("question", "feature", "expected"),
    [
        ("How many floors are there?", "lacks_number", [0, 0, 1, 1, 0]),
        ("When did Ada come?", "lacks_date", [1, 1, 1, 1, 0]),
        ("Who runs the garage?", "lacks_person", [1, 1, 1, 0, 0]),
        ("Where is it?", "lacks_place", [1, 1, 1, 1, 0]),
        ("How long does it take?", "lacks_duration", [1, 1, 1, 1, 1]),
        ("What dose of aspirin was suggested?", "lacks_number", [1, 1, 1, 1, 1]),
        ("What is in the garage?", "lacks_number", [0, 0, 0, 0, 0]),
    ],
)
def test_feature_compares_a_sentence_with_the_expected_answer_type(question, feature, expected):
    assert column(feature, question) == expected


def test_number_from_the_question_is_not_an_answer():
    assert column("lacks_number", "How many floors does the garage with 1987 places have?")[4] == 1


def test_coverage_includes_title_and_neighboring_sentences():
    question = "parking costs floors"
    sentence, nearby, passage = (column(f"covered{part}", question)[:3] for part in ("", "_nearby", "_by_passage"))
    assert all(a <= b <= c + 1e-9 for a, b, c in zip(sentence, nearby, passage, strict=True))
    assert nearby[0] == nearby[1] == passage[0] == pytest.approx(1)
    assert sentence[2] < nearby[2] < 1


def test_word_weights_sum_to_one_and_rare_words_weigh_more():
    passages = [Passage("", ("garage floors", "garage coins", "garage staff"))]
    covered = column("covered", "garage coins", passages)
    assert covered[1] == pytest.approx(1) and covered[0] < 0.5


def test_vector_features_equal_a_naive_computation():
    cosines = np.array([0.1, 0.5, 0.3, 0.2, 0.9])
    assert column("cosine", "x", cosines=cosines) == cosines.tolist()
    assert column("cosine_passage", "x", cosines=cosines) == [0.5, 0.5, 0.5, 0.9, 0.9]
    standardized = [(c - sum(cosines) / 5) / (math.sqrt(sum((d - 0.4) ** 2 for d in cosines) / 5)) for c in cosines]
    assert column("cosine_standardized", "x", cosines=cosines) == pytest.approx(standardized, abs=1e-4)


def test_vector_features_ignore_sentences_without_a_cosine():
    cosines = np.array([math.nan, 0.5, 0.1, 0.7, math.nan])
    assert column("cosine", "x", cosines=cosines) == [0, 0.5, 0.1, 0.7, 0]
    assert column("cosine_passage", "x", cosines=cosines) == [0, 0.5, 0.5, 0.7, 0]
    std = math.sqrt(sum((c - 1.3 / 3) ** 2 for c in (0.5, 0.1, 0.7)) / 3)
    expected = [0, *((c - 1.3 / 3) / std for c in (0.5, 0.1, 0.7)), 0]
    assert column("cosine_standardized", "x", cosines=cosines) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "focus"),
    [
        ("Where is the tower of Ada Okwu? It is great.", "Where is the tower of Ada Okwu?"),
        ("I am new here. Where is the old garage? Thanks!", "Where is the old garage?"),
        ("Hello there. Tell me when the garage opens.", "Tell me when the garage opens."),
        (
            "When does the garage open? How many floors has the garage?",
            "When does the garage open? How many floors has the garage?",
        ),
        ("My son has a fever. What should he take at night?", "My son has a fever. What should he take at night?"),
        ("Herons nest in reeds. Known?", "Herons nest in reeds. Known?"),
        ("The garage is full. Ada came in May.", "The garage is full. Ada came in May."),
        ("", ""),
    ],
)
def test_focus_is_the_part_of_the_text_that_asks(text, focus):
    assert Question(text).focus == focus


def test_remark_words_that_occur_in_no_passage_have_no_weight():
    alone = column("covered", "Who runs the garage?")
    assert column("covered", "Who runs the garage? Xanadoo is great.") == alone
    assert column("covered", "Hello, can someone please explain who runs the garage?") == alone
    assert max(column("covered", "Who runs the garage of Xanadoo?")) < max(alone)


def test_vector_features_are_zero_and_unweighted_without_vectors():
    table = sentence_features(Question("Who runs the garage?"), PASSAGES)
    assert not table[:, len(WORD_FEATURES) :].any()
    assert set(BY_WORDS.ranking[len(WORD_FEATURES) :]) == {0.0}
    weights = dict(zip(SUPPORT_FEATURES, BY_WORDS.support, strict=True))
    assert weights["cosine"] == weights["best_cosine"] == 0


@pytest.mark.parametrize("model", [BY_WORDS, BY_VECTORS])
def test_model_has_one_weight_per_feature_and_ranks_the_answer_first(model):
    assert len(model.ranking) == len(FEATURES) and len(model.support) == len(SUPPORT_FEATURES)
    weights = dict(zip(FEATURES, model.ranking, strict=True))
    assert weights["covered"] > 0 and weights["covered_nearby"] > 0 and weights["rank"] > 0
    assert max(w for name, w in weights.items() if name.startswith("lacks_")) < 0


@pytest.mark.parametrize(
    ("question", "sentence", "says", "quotes"),
    [
        ("What dose was suggested?", "Please suggest.", True, False),
        ("Is the pharmacy on level 2?", "The pharmacy is on level 2.", True, True),
        ("Is the pharmacy on level 2?", "The pharmacy is not on level 2.", False, False),
        ("Known? She came in May 1987 by boat!", "She came in May 1987 by boat.", True, True),
        ("Known? She came in May 1987 by boat!", "Yes, she came in May 1987 by boat.", False, True),
        ("When did she come?", "She came in May 1987.", False, False),
    ],
)
def test_question_detects_sentences_that_it_states_or_quotes(question, sentence, says, quotes):
    assert (Question(question).says(sentence), Question(question).quotes(sentence)) == (says, quotes)


TEXT = st.text("abAB 12.?'-\n", max_size=60)


@given(TEXT, st.lists(st.tuples(TEXT, st.lists(TEXT, max_size=3).map(tuple)), max_size=3))
def test_features_are_finite_for_any_text(question, passages):
    context = [Passage(*p) for p in passages]
    asked, count = Question(question), sum(len(p.sentences) for p in context)
    table = with_cosines(sentence_features(asked, context), context, np.linspace(-1, 1, count))
    assert table.shape == (count, len(FEATURES)) and np.isfinite(table).all()
    if count:
        assert support_features(table, 0).shape == (len(SUPPORT_FEATURES),)
        assert 0 < BY_VECTORS.probability(table, 0) < 1


COUNTS = "|".join(sorted({*NUMBER_WORDS, "one", "half", "third", "quarter", "dozen", "once", "twice", "hundred"}))
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
PLAIN_PATTERNS = {
    "lacks_person": re.compile(r"(?<=[^.!?:]\s)[A-Z][\w’'-]+|\b[A-Z][\w’'-]+ [A-Z][\w’'-]+"),
    "lacks_date": re.compile(
        rf"\b1\d{{3}}|\b20\d\d|\b(?:{MONTHS}|{DAYS})\b|\b\d{{1,2}}[:.]\d\d\b|centur|\bworking day"
    ),
    "lacks_duration": re.compile(
        rf"\b(?:\d+|{COUNTS}|several|few)[ -](?:\w+ )?(?:second|minute|hour|day|night|week|month|year)"
    ),
}
TEXT_PIECES = st.sampled_from(
    "A Ada-B Ön Mayor May _May 1987 201 9:30 Twenty-two dozen half days few . ! : - ’ _".split()
)


@given(st.lists(st.one_of(TEXT_PIECES, st.just(" "), TEXT), max_size=16).map("".join))
def test_optimized_type_patterns_match_the_same_spans_as_the_plain_patterns(text):
    """Patterns that start with a character class are faster and match the same spans."""
    for kind in TYPES:
        plain = PLAIN_PATTERNS.get(kind.feature, kind.contained)
        assert [m.span() for m in kind.contained.finditer(text)] == [m.span() for m in plain.finditer(text)]
