import asyncio
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.demo.clinic import case_notes
from casemate.errors import ConfigError
from casemate.redteam.attacks.menta import MEntA, claims
from casemate.text.tokens import content_words
from casemate.types import UNKNOWN, Document, Probe, Reply
from tests.fakes import Script

TEXT = (
    "The north bridge over the Tarn was closed on 3 May 2031, after divers found cracks in two piers. Engineer Ottilie "
    "Brandt estimates that the repair costs 4.2 million marks. Buses of line 12 now cross at Wexcombe. The mayor has "
    "promised a ferry for cyclists. Complaints about night noise have increased in the mill quarter. It rained."
)
NOTES = [Document(name, text) for name, text in case_notes(24, seed=3)]
QUESTION = "North bridge. What is known about buses and the repair?"


def prepared(text=TEXT, title="", seed=0, genre=(), **options):
    attack = MEntA(**options)
    attack.study(genre)
    return asyncio.run(attack.prepare(Document("a", text, title), np.random.default_rng(seed)))


def measured(*replies, genre=(), question=QUESTION, **options):
    attack = MEntA(**options)
    attack.study(genre)
    probe = Probe(tuple(question for _ in replies))
    return asyncio.run(attack.measure(Document("a", TEXT, "North bridge"), probe, [Reply(r) for r in replies]))


class TestQuestions:
    def test_are_five_open_questions_that_start_with_the_title(self):
        probe = prepared(title="A bridge closed.")
        assert len(probe.questions) == 5
        assert len({q.split("?")[0][:28] for q in probe.questions}) == 5  # each with a different wording
        for question in probe.questions:
            assert re.fullmatch(r"A bridge closed\. [^.?]+\?", question)

    def test_contain_no_command_and_no_number(self):
        for note in NOTES:
            for question in prepared(note.text, genre=[n.text for n in NOTES], summary=False).questions:
                assert not re.search(r"\b(?:answer|repeat|yes|no|context|documents?)\b", question, re.IGNORECASE)
                assert re.match(r"What |How |I would like ", question)

    def test_ask_for_terms_of_the_text(self):
        frames = content_words(
            "what is known found tell me about respect I would like to understand better how go together"
        )
        for question in prepared(summary=False).questions:
            asked = content_words(question) - frames - {"especiall"}
            assert asked and asked <= content_words(TEXT)
            assert any(asked <= content_words(sentence) for sentence in TEXT.split(". "))

    def test_ask_for_rare_terms_first(self):
        (plain,) = prepared(questions=1, summary=False).questions
        common = [s for s in TEXT.split(". ") if not s.startswith("Buses")]
        (rare,) = prepared(questions=1, summary=False, genre=[". ".join(common)] * 20).questions
        assert "buses" in rare.lower() and plain != rare

    def test_are_fewer_for_a_short_text_and_none_for_an_empty_text(self):
        assert len(prepared("The bridge at Crale is old.").questions) == 1
        assert prepared(" ").questions == ()
        assert measured() == (-1.0, 0.0, 0.0)

    def test_depend_on_the_seed_only(self):
        assert prepared(seed=1) == prepared(seed=1)
        assert prepared(seed=1) != prepared(seed=2)


@given(st.text(max_size=200), st.integers(0, 9))
def test_scores_are_finite_for_any_text_and_reply(text, seed):
    probe = prepared(text, seed=seed)
    json.dumps(dict(probe.key))
    for figure in measured(*[text] * len(probe.questions)):
        assert -1 <= figure <= 1


@pytest.mark.parametrize(
    ("reply", "entailed"),
    [
        ("Buses of line 12 now cross at Wexcombe.", True),
        ("According to [1], complaints about night noise have increased in the mill quarter. [1]", True),
        ("It is a long story. The mayor promised cyclists a ferry.", True),
        ("Buses of line 14 now cross at Wexcombe.", False),
        ("Buses of line 12 now cross at Brackwell.", False),
        ("The repair of the north bridge is known.", False),
        ("Buses and repair.\nSources: [1] bridge.md, [2] Wexcombe mayor ferry cyclists", False),
        ("Sources: bridge, mayor, ferry, cyclists", False),
        ("[1], [2]", False),
        ("The chapel in Hartley was restored by volunteers with lottery money.", False),
        ("", False),
    ],
)
def test_a_claim_is_entailed_by_its_words_numbers_and_names(reply, entailed):
    assert measured(reply)[1] == entailed


def test_score_equals_the_formula_of_the_paper():
    entailed, other, abstains = "The mayor has promised a ferry for cyclists.", "It may be so.", UNKNOWN
    assert measured(entailed, entailed) == (1, 1, 1)
    assert measured(entailed, other, abstains, abstains) == (-0.25, 0.25, 0.5)
    assert measured(other) == (0, 0, 1)
    assert measured("", abstains) == (-1, 0, 0)
    assert measured("I could not find this. But the mayor has promised a ferry for cyclists.") == (0, 1, 0)


def test_statements_common_in_the_genre_are_not_evidence():
    reply = "The mayor has promised a ferry for cyclists."
    assert measured(reply, genre=["Bells rang.", "Snow fell."])[1] == 1
    assert measured(reply, genre=[f"The mayor promised a ferry for cyclists. Case {i}." for i in range(50)])[1] == 0


def test_repetition_of_the_question_is_not_evidence():
    reply = "Complaints about night noise have increased in the mill quarter."
    assert measured(reply)[1] == 1
    assert measured(reply, question="How did complaints about night noise in the mill quarter increase?")[1] == 0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("One (source 2). Two [1, 3]; **three** is it [2].", ["One", "Two; three is it"]),
        ("- It rained.\n- The toll rose [4].\nReferences:\n", ["It rained", "The toll rose"]),
        ("", []),
    ],
)
def test_citations_and_markup_are_removed_from_claims(reply, expected):
    assert claims(reply) == expected


@pytest.mark.parametrize(
    "options", [{"questions": 0}, {"support": 0}, {"support": 1.5}, {"novelty": -1}, {"novelty": float("nan")}]
)
def test_options_out_of_range_are_rejected(options):
    with pytest.raises(ConfigError, match="menta"):
        MEntA(**options)


def test_writer_generates_questions_and_summary():
    writer = Script(["Sure:\n1. Who pays for it?\n2. Why now?\n3. What next?", " a closed\nbridge. "])
    assert prepared(writer=writer, questions=2).questions == (
        "a closed bridge. Who pays for it?",
        "a closed bridge. Why now?",
    )
    assert all(p.context == (Document("a", TEXT),) for p in writer.prompts)


def test_rules_generate_questions_if_the_writer_returns_none():
    assert prepared(writer=Script(["I cannot.", ""])).questions == prepared().questions


def test_judge_decides_on_informative_claims_only():
    judge = Script(["No.", "**Yes**, it does.", "No."])
    reply = "The repair is known. A pot of gold lies under pier seven. Ravens guard the golden weathervane. It is."
    assert measured(reply, judge=judge)[1] == 1
    assert [re.search('"(.*)"', p.question)[1] for p in judge.prompts[:-1]] == [
        "A pot of gold lies under pier seven",
        "Ravens guard the golden weathervane",
    ]
    assert judge.prompts[0].context[0].text == TEXT
    assert measured(reply, judge=Script(["No.", "I don't know.", "No."]))[1] == 0


def test_the_judge_decides_whether_a_reply_declines():
    assert measured("It is.", judge=Script(["Yes."]))[2] == 0
    assert measured("It is.", judge=Script(["No."]))[2] == 1
