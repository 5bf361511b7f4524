"""The answer-level check of new documents, against answers written down here."""

import asyncio
import contextlib

import numpy as np
import pytest

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.defenses.quorum.keywords import AskedQuestion
from casemate.monitor.poisoning.answer_change import AnswerCheck, answer_keywords, specific_lifts
from casemate.protocols import Generator
from casemate.types import UNKNOWN, Document

QUESTION = "Who built the north bridge?"
ASKED = np.array([1.0, 0.0, 0.0, 0.0], np.float32)
TRUE = "The north bridge was built by Ottilie Brandt in 1931. It replaced a ferry."


def at(cosine):
    """A vector at a cosine to the question."""
    return np.array([cosine, np.sqrt(1 - cosine**2), 0, 0], np.float32)


@pytest.fixture
def index(tmp_path):
    with contextlib.closing(SqliteIndex(tmp_path / "i.db")) as made:
        made.open("test", 4)
        made.add([Document("toll", "Tolls on the river are due on Mondays.")], at(0.2)[None])
        yield made


def add(index, *texts, cosine=0.6):
    documents = [Document(f"d{i}", text) for i, text in enumerate(texts)]
    index.add(documents, np.stack([at(cosine - 0.01 * i) for i in range(len(texts))]))


def check(index, text, reader=None, cosine=0.9, source="new"):
    made = AnswerCheck(index) if reader is None else AnswerCheck(index, reader=reader)
    return made.check(QUESTION, ASKED, Document(source, text), at(cosine))


class Model(Generator):
    """Says the last name of the first document of its context; declines without a bridge in it."""

    def __init__(self):
        self.contexts = []

    async def stream(self, prompt):
        self.contexts.append([d.id for d in prompt.context])
        text = prompt.context[0].text
        if "withdrawn" in text:
            yield UNKNOWN
        else:
            yield f"It was built by {'Walter Quell' if 'Quell' in text else 'Ottilie Brandt'}."


def test_a_false_answer_that_no_other_document_states_is_a_change(index):
    add(index, TRUE)
    found = check(index, "The north bridge was built by Walter Quell.")
    assert found.changed and found.supporters == 0
    assert "Ottilie Brandt" in found.before and "Walter Quell" in found.after


def test_the_answer_of_the_other_documents_is_no_change(index):
    add(index, TRUE)
    assert not check(index, "It was Ottilie Brandt who built the north bridge.").changed


def test_a_new_answer_that_another_unit_states_is_supported(index):
    add(index, TRUE, "Walter Quell built the north bridge, says the chronicle of the city.")
    found = check(index, "The north bridge was built by Walter Quell.", Model())
    assert (found.changed, found.supporters) == (True, 1)


def test_copies_of_the_supporter_count_once_and_its_own_source_never(index):
    claim = "The north bridge was built by Walter Quell, says the chronicle."
    add(index, TRUE, claim, claim)
    assert check(index, "The north bridge was built by Walter Quell.", cosine=0.95).supporters == 1
    assert check(index, "The north bridge was built by Walter Quell.", cosine=0.95, source="d1").supporters == 1
    index.remove(["d2"])
    assert check(index, "The north bridge was built by Walter Quell.", cosine=0.95, source="d1").supporters == 0


def test_a_document_behind_the_context_changes_nothing(index):
    add(index, *(f"{TRUE} Note {i}." for i in range(5)))
    assert not check(index, "The north bridge was built by Walter Quell.", cosine=0.3).changed


def test_a_generator_reads_both_contexts(index):
    add(index, TRUE)
    model = Model()
    assert check(index, "The north bridge was built by Walter Quell.", model).changed
    assert model.contexts == [["d0", "toll"], ["new", "d0", "toll"]]
    assert not check(index, "The north bridge was built by Ottilie Brandt.", model).changed


def test_a_document_that_makes_the_reader_decline_is_a_change_without_support(index):
    add(index, TRUE)
    found = check(index, "All documents about the north bridge were withdrawn.", Model())
    assert (found.changed, found.supporters) == (True, 0)


class TestAnswerPulls:
    def test_grows_with_the_lift(self):
        small, large = (specific_lifts([QUESTION], TRUE, [lift])[0] for lift in (0.2, 0.4))
        assert large == pytest.approx(2 * small)

    def test_is_larger_for_a_text_about_this_question_alone(self):
        longer = f"{TRUE} Its arches are of granite, and herons nest below them from March until the harvest begins."
        assert specific_lifts([QUESTION], TRUE, [0.2]) > specific_lifts([QUESTION], longer, [0.2]) > [0.0]

    def test_equals_the_root_of_the_f1_of_content_words(self):
        # question: built, north, bridge; text: those and ottilie, brandt
        text = "The north bridge was built by Ottilie Brandt."
        assert specific_lifts([QUESTION], text, [1.0]) == [pytest.approx((2 * 3 / (3 + 5)) ** 0.5)]

    def test_without_words_there_is_no_pull(self):
        assert specific_lifts(["?", QUESTION], "", [0.5, 0.5]) == [0.0, 0.0]


def test_the_check_works_inside_an_event_loop(index):
    add(index, TRUE)

    async def inside():
        return check(index, "The north bridge was built by Caspar Holm in 1931.")

    assert asyncio.run(inside()) == check(index, "The north bridge was built by Caspar Holm in 1931.")


def test_a_long_sentence_is_searched_once_for_the_expected_type(monkeypatch):
    searched = []
    expects = AskedQuestion.expects
    monkeypatch.setattr(AskedQuestion, "expects", lambda self, text: searched.append(text) or expects(self, text))
    asked = AskedQuestion.of("Who built the amber ferry?")
    assert "zed quellbach" in answer_keywords(asked, "the amber ferry was built by Zed Quellbach and " * 50)
    assert len(searched) == 1
