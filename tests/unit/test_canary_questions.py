"""Canary questions that rules generate from a sentence."""

import re

import pytest

from casemate.demo.clinic import PAGES
from casemate.monitor.canaries import drafts
from casemate.monitor.canaries.drafts import FACT, SENTINEL, CanaryDrafter
from casemate.monitor.canaries.questions import connected_questions, fact_questions, noun_phrases
from casemate.text.tokens import STOP_WORDS, ReferenceCorpus
from casemate.types import Document

OPENINGS = re.compile(
    r'(In "[^"]+", (which year is|how many [a-z]+ are) mentioned together with |What (is known|do we have) about '
    r"|Is there anything on |I am looking for information on |What do the documents say about "
    r'|What does "[^"]+" say about |Who [a-z]+ |((Within|For|After|In|From|Before|By) )?[Hh]ow many [a-z]+ [a-z]+ '
    r"|(In|Since|Until) which year )"
)


@pytest.mark.parametrize(
    ("sentence", "query", "answer"),
    [
        ("The stone bridge of the lower town was built in 1871.",
         "In which year was the stone bridge of the lower town built?", "1871"),
        ("In 1871, the stone bridge was opened to carriages.",
         "In which year was the stone bridge opened to carriages?", "1871"),
        ("The harbor council bought the old ferry in 1931 for the islands.",
         "In which year was it that the harbor council bought the old ferry for the islands?", "1931"),
        ("The evening ferry has 48 seats for island visitors.",
         "How many seats does the evening ferry have for island visitors?", "48"),
        ("The guided harbor tour lasts about ninety minutes in summer.",
         "How many minutes does the guided harbor tour last in summer?", "ninety"),
        ("Dr Ivo Tansley repairs the old harbor clock.", "Who repairs the old harbor clock?", "Dr Ivo Tansley"),
    ],
)  # fmt: skip
def test_sentence_of_supported_structure_gives_one_question(sentence, query, answer):
    (found,) = fact_questions(sentence)
    assert (found.query, found.answer) == (query, answer)


@pytest.mark.parametrize(
    "sentence",
    [
        "It was built in 1871 by the harbor council of the town.",  # ambiguous subject: it
        "The study was completed in 1998 with all patients.",  # ambiguous subject: the study
        "The harbor tour lasts 40 to 60 minutes in summer.",  # a range
        "The old ferry was sold in 1901 after repairs in 1898.",  # two years
        "When the ferry was sold in 1901, the town mourned it.",  # starts with a clause
        "Harbor tour: 40 minutes; ferry: 20 minutes; walk: 60 minutes.",  # not a sentence
        "The ferry is not closed in 1901 to all island visitors of the town.",
    ],
)
def test_ambiguous_sentence_gives_no_question(sentence):
    assert fact_questions(sentence) == []


def test_question_about_the_only_number_names_the_phrases_next_to_it():
    phrases = ["the old ferryman", "the harbor council"]
    assert connected_questions("12 weeks or 14 weeks on the harbor council.", "Ferries", phrases) == []
    assert connected_questions("About 12 to 14 weeks on the harbor council.", "Ferries", phrases) == []
    assert connected_questions("A fee of .5 crowns, by 1901 and 1902.", "Ferries", phrases) == []
    (found,) = connected_questions("In 1901 the old ferryman left the harbor council.", "", phrases)
    assert found.query == "Which year is mentioned together with the old ferryman and the harbor council?"


def test_noun_phrases_end_at_grammatical_boundaries():
    assert noun_phrases("The machine takes coins.") == []
    assert noun_phrases("A crowd stood silent at the gate.") == []
    assert noun_phrases("We aim to absorb red anthocyanins.") == []
    assert noun_phrases("The copyright is held by John Wiley and the old press.") == []
    assert noun_phrases("The ferry of Corwick carries a painted anchor.") == ["Corwick", "a painted anchor"]
    assert noun_phrases("Priya Natarajan repairs the lower gate.") == ["Priya Natarajan", "the lower gate"]


def test_drafts_for_the_clinic_are_well_formed_english():
    import numpy as np

    pages = [Document(p.name, p.read_text(encoding="utf-8"), title=p.stem) for p in sorted(PAGES.glob("*.md"))]
    drafter = CanaryDrafter(ReferenceCorpus([d.content for d in pages]), np.random.default_rng(1))
    asked = [draft.query for page in pages for kind in (SENTINEL, FACT) for draft in drafter.about(kind, page, 0)]
    assert len(asked) > 2 * len(pages)
    for query in asked:
        assert OPENINGS.match(query), query
        assert query[-1] in ".?"
        assert not re.search(r"\b(\w+) \1\b", query), query
        assert query.rstrip("?.").rpartition(" ")[2].lower() not in STOP_WORDS, query


def test_words_of_each_phrase_are_computed_once(monkeypatch):
    """Otherwise one long sentence of a document takes minutes."""
    phrases = [f"the {a}{b} bridge {b}{a}" if a == b else f"{a}{b}" for a in "bdfg" for b in "klmn"] + ["bk", "old bdk"]
    read = list[str]()
    monkeypatch.setattr(drafts, "content_words", lambda phrase: read.append(phrase) or frozenset(phrase.split()))
    assert drafts._without_overlap(phrases) == [*phrases[:16], "old bdk"]
    assert read == phrases
