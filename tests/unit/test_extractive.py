import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.backends.extractive import Extractive
from casemate.rag import join
from casemate.types import UNKNOWN, Document, Prompt

PHARMACY = Document(
    "p#1", "The pharmacy is on level 2. It opens at 8:30 and closes at 19:00.\nBring your card.", source="pharmacy.md"
)
PARKING = Document("k#1", "# Parking\n\n- Parking costs 2 marks an hour.\n- Dr. Okwu parks free.", source="parking.md")


def answer(question, *context, **options):
    return asyncio.run(join(Extractive(**options).stream(Prompt(question, context, ""))))


def test_quotes_the_sentence_that_answers_with_its_source():
    assert answer("When does the pharmacy close?", PHARMACY, PARKING).splitlines() == [
        "The pharmacy is on level 2. [1] It opens at 8:30 and closes at 19:00. [1]",
        "Sources: [1] pharmacy.md",
    ]


def test_numbers_only_the_sources_it_quotes():
    assert "[1] parking.md" in answer("What does parking cost per hour?", PHARMACY, PARKING)


@pytest.mark.parametrize(
    "question", ["Who won the football match?", "???", "the of and", "pharmacy quarterly dividend forecast"]
)
def test_says_that_it_does_not_know(question):
    assert answer(question, PHARMACY, PARKING) == UNKNOWN


def test_knows_nothing_without_context():
    assert answer("When does the pharmacy close?") == UNKNOWN


def test_quotes_at_most_as_many_sentences_as_allowed():
    text = " ".join(f"Heron number {i} lives here." for i in range(20))
    assert answer("heron lives", Document("a", text), sentences=2).count("Heron") == 2


def test_titles_and_abbreviations_do_not_end_sentences():
    assert "Dr. Okwu parks free." in answer("Who parks free?", PARKING)


def test_a_sentence_that_stands_in_two_documents_is_quoted_once():
    twin = Document("q", PHARMACY.text)
    assert answer("When does the pharmacy close?", PHARMACY, twin).count("19:00") == 1


def test_a_long_question_that_quotes_a_sentence_finds_it():
    question = "x y z " * 30 + "It opens at 8:30 and closes at 19:00."
    assert "19:00" in answer(question, PHARMACY)


@given(st.text(max_size=200), st.lists(st.text(max_size=300), max_size=4))
def test_any_text_is_answered_from_the_context_or_not_at_all(question, texts):
    found = answer(question, *(Document(str(i), t) for i, t in enumerate(texts)))
    assert found == UNKNOWN or "Sources: [1] " in found
