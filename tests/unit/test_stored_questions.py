"""Questions in documents: detection of their labels in a collection, and separation from the rest of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.text.stored_questions import HEADING, question_labels, stored_question, without_question

POST = "Patient: I sleep badly. What helps?\nDoctor: Less coffee. Why not tea?"
PROBLEM = "general\nProblem: find the length of the train .\nRationale: 5 * 60 = 300 .\nAnswer: c ) 300"
PROBLEM_REST = "general\nRationale: 5 * 60 = 300 .\nAnswer: c ) 300"
ENTRY = "How do I park?\nLeave the car at gate 2. Is it full? Use gate 3."
REPORT = "Herons\nMETHODS: We counted herons.\nRESULTS: There were nine."
LETTER = "Dear Dr Ito,\n\nSubject: Herons\nThe herons are back."


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        ([POST], ("Patient",)),
        ([PROBLEM], ("Problem",)),
        ([ENTRY], (HEADING,)),
        ([POST, ENTRY, PROBLEM], (HEADING, "Patient", "Problem")),
        ([REPORT] * 4 + [POST], ("Patient",)),
        ([REPORT] * 5 + [POST], ()),
        ([POST, "Patient: It rains.\nDoctor: Yes.", "Patient: It snows.\nDoctor: Yes."], ()),
        ([REPORT, LETTER, "One line only?", "Patient: Why?\nPatient: Again.", "", "\n"], ()),
        ([], ()),
    ],
)
def test_question_labels_are_detected_in_a_collection(texts, labels):
    assert question_labels(texts) == labels


@pytest.mark.parametrize(
    ("text", "labels", "question", "rest"),
    [
        (POST, ("Patient",), "I sleep badly. What helps?", "Doctor: Less coffee. Why not tea?"),
        (
            PROBLEM,
            ("Problem",),
            "find the length of the train .",
            "general\nRationale: 5 * 60 = 300 .\nAnswer: c ) 300",
        ),
        (ENTRY, (HEADING,), "How do I park?", "Leave the car at gate 2. Is it full? Use gate 3."),
        ("## **Question:** Who?\n**Answer:** Ada.", ("Question",), "Who?", "**Answer:** Ada."),
        ("Patient: The chunk ends here", ("Patient",), "The chunk ends here", ""),
        (POST, (), "", POST),
        ("Why so?\nIt is.", (HEADING, "Problem"), "Why so?", "It is."),
        (REPORT, ("Patient", HEADING), "", REPORT),
    ],
)
def test_a_document_is_split_into_question_and_rest(text, labels, question, rest):
    assert (stored_question(text, labels), without_question(text, labels)) == (question, rest)


@given(st.text("abQ:? \n*#", max_size=60))
def test_question_and_rest_contain_all_words_of_any_text(text):
    labels = (HEADING, "Q", "Qa")
    question, rest = stored_question(text, labels), without_question(text, labels)
    assert question in text and len(rest) <= len(text)
    assert rest == text or len(question) + len(rest) <= len(text)
    assert without_question(text, ()) == text
