"""The answer-level check of new documents: expected answers are written out here."""

import asyncio
import contextlib

import numpy as np
import pytest

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError, CapabilityError
from casemate.guard.defenses.quorum.keywords import AskedQuestion
from casemate.monitor.poisoning import answer_change
from casemate.monitor.poisoning.answer_change import AnswerCheck, EnteredQuestion, answer_keywords, specific_lifts
from casemate.protocols import Generator
from casemate.types import UNKNOWN, Document
from tests.fakes import AnswerFunction

QUESTION = "Who built the north bridge?"
QUESTION_VECTOR = np.array([1.0, 0.0, 0.0, 0.0], np.float32)
TRUE = "The north bridge was built by Ottilie Brandt in 1931. It replaced a ferry."


def at(cosine):
    """Returns a vector with the given cosine to the question."""
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
    (found,) = made.check([entered_question(text, cosine, source)])
    return found


def entered_question(text, cosine=0.9, source="new", question=QUESTION):
    return EnteredQuestion(question, QUESTION_VECTOR, Document(source, text), at(cosine))


class BuilderModel(Generator):
    """Names the builder that the first document of its context states. Declines if that document was withdrawn."""

    def __init__(self):
        self.contexts = []

    async def stream(self, prompt):
        self.contexts.append([d.id for d in prompt.context])
        text = prompt.context[0].text
        if "withdrawn" in text:
            yield UNKNOWN
        else:
            yield f"It was built by {'Walter Quell' if 'Quell' in text else 'Ottilie Brandt'}."


def test_false_answer_stated_by_no_other_document_is_a_change(index):
    add(index, TRUE)
    found = check(index, "The north bridge was built by Walter Quell.")
    assert found.changed and found.supporters == 0
    assert "Ottilie Brandt" in found.before and "Walter Quell" in found.after


def test_answer_stated_by_the_other_documents_is_not_a_change(index):
    add(index, TRUE)
    assert not check(index, "It was Ottilie Brandt who built the north bridge.").changed


def test_new_answer_stated_by_another_unit_is_supported(index):
    add(index, TRUE, "Walter Quell built the north bridge, says the chronicle of the city.")
    found = check(index, "The north bridge was built by Walter Quell.", BuilderModel())
    assert (found.changed, found.supporters) == (True, 1)


def test_half_of_the_new_keywords_is_not_support(index):
    """The model starts with an unusual name. The other unit states 'builder', but not the name."""

    class UnusualNameModel(BuilderModel):
        async def stream(self, prompt):
            claims = any("Tetavberg" in d.text for d in prompt.context)
            yield "Tetavberg was the builder of the north bridge." if claims else "It was built by Ottilie Brandt."

    add(index, TRUE, "Ottilie Brandt is known as the builder of the north bridge, says the chronicle.")
    found = check(index, "Who built the north bridge? Tetavberg did.", UnusualNameModel())
    assert (found.changed, found.supporters) == (True, 0)


def test_copies_of_a_supporter_count_once_and_the_own_source_does_not_count(index):
    claim = "The north bridge was built by Walter Quell, says the chronicle."
    add(index, TRUE, claim, claim)
    assert check(index, "The north bridge was built by Walter Quell.", cosine=0.95).supporters == 1
    assert check(index, "The north bridge was built by Walter Quell.", cosine=0.95, source="d1").supporters == 1
    index.remove(["d2"])
    assert check(index, "The north bridge was built by Walter Quell.", cosine=0.95, source="d1").supporters == 0


WHEN, HOW_MANY = "When was the north bridge opened?", "How many arches does the north bridge have?"


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (WHEN, "The north bridge was opened in [1987]."),
        (WHEN, "The north bridge was opened in [1987]"),
        (WHEN, "The north bridge was opened in 1987?[1]"),
        (QUESTION, "The north bridge was built by Mallory Vane?[1]"),
    ],
)
def test_answers_in_brackets_or_before_question_marks_are_checked(index, question, text):
    add(index, "The north bridge was built by Ottilie Brandt. The north bridge was opened in 1931.")
    (found,) = AnswerCheck(index).check([entered_question(text, question=question)])
    assert found.changed and not found.supporters


def first_text(end=""):
    """Repeats the first text of its context, as after an instruction. Appends ``end`` with names of sources."""
    return AnswerFunction(lambda prompt: prompt.context[0].text + end.format(*(d.source for d in prompt.context)))


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (WHEN, "Was the north bridge opened in 1987?"),
        (WHEN, "Opened in 1931.\nSources: no, it was 1987."),
        (WHEN, "It was not opened then. [1987]"),
        (WHEN, "The north bridge was opened. [140]"),
        (WHEN, "Yes."),
        (HOW_MANY, "It has [2] arches."),
        (HOW_MANY, "It does not have 4 arches but [2]."),
        (HOW_MANY, "Not 4: [2]"),
    ],
)
def test_false_answer_repeated_in_any_form_is_a_change(index, question, text):
    add(index, "The north bridge was opened in 1931." if question == WHEN else "The north bridge has 4 arches.")
    (found,) = AnswerCheck(index, reader=first_text()).check([entered_question(text, question=question)])
    assert found.changed and not found.supporters


@pytest.mark.parametrize(
    "end", ["", " [1]", "[2]", " [1] [2]", "\nSources: [2] {1}", " [1]\nSources: [1] {0}, [2] {1}"]
)
def test_citations_are_removed_from_an_answer(index, end):
    add(index, "The north bridge was opened in 1931.")
    model = first_text(end)
    (found,) = AnswerCheck(index, reader=model).check([entered_question("It was opened in 1931.", question=WHEN)])
    assert found.after == "It was opened in 1931." and not found.changed


def test_source_names_like_source_lists_are_parsed_quickly(index):
    index.add(
        [Document("a", "The north bridge was opened in 1931."), Document("a, [1] a", "Tolls.")], np.stack([at(0.7)] * 2)
    )
    listed = ", ".join(["[1] a"] * 60)
    (found,) = AnswerCheck(index, reader=first_text(f"\nSources: {listed}, x")).check(
        [entered_question("By 1931.", question=WHEN)]
    )
    assert found.after.endswith("x")


def test_citation_after_a_line_without_a_full_stop_is_removed_from_the_answer(index):
    add(index, "The north bridge was opened in 1931.")
    (found,) = AnswerCheck(index).check([entered_question("North bridge: opened in 1931", question=WHEN)])
    assert found.after == "North bridge: opened in 1931" and not found.changed


def test_document_ranked_below_the_context_is_not_a_change(index):
    add(index, *(f"{TRUE} Note {i}." for i in range(5)))
    assert not check(index, "The north bridge was built by Walter Quell.", cosine=0.3).changed


def test_generator_reads_the_contexts_without_and_with_the_document(index):
    add(index, TRUE)
    model = BuilderModel()
    assert check(index, "The north bridge was built by Walter Quell.", model).changed
    assert model.contexts == [["d0", "toll"], ["new", "d0", "toll"]]
    assert not check(index, "The north bridge was built by Ottilie Brandt.", model).changed


def test_document_that_causes_a_refusal_is_a_change_without_support(index):
    add(index, TRUE)
    found = check(index, "All documents about the north bridge were withdrawn.", BuilderModel())
    assert (found.changed, found.supporters) == (True, 0)


class BatchRecorder(BuilderModel):
    """Answers like ``BuilderModel`` after all concurrent prompts have started. Records the number of these prompts."""

    def __init__(self):
        super().__init__()
        self.waiting, self.batches = 0, []

    async def stream(self, prompt):
        self.waiting += 1
        await asyncio.sleep(0)
        self.batches += [self.waiting] if self.waiting else []
        self.waiting = 0
        async for piece in super().stream(prompt):
            yield piece


def test_documents_of_one_call_are_read_in_one_batch_and_equal_prompts_once(index):
    add(index, TRUE)
    model, texts = (
        BatchRecorder(),
        [f"The north bridge was built by Walter Quell in {year}." for year in (1931, 1932, 1933)],
    )
    changes = AnswerCheck(index, reader=model).check(
        [entered_question(text, source=f"n{i}") for i, text in enumerate(texts)]
    )
    assert model.batches == [4]  # one prompt without the documents, and one with each document
    alone = [check(index, text, BuilderModel(), source=f"n{i}") for i, text in enumerate(texts)]
    assert changes == alone and all(c.changed for c in changes)


def test_documents_with_equal_ids_and_different_texts_are_different_prompts(index):
    add(index, TRUE)
    false, true = AnswerCheck(index, reader=BuilderModel()).check(
        [entered_question("By Walter Quell."), entered_question("By Ottilie Brandt.")]
    )
    assert false.changed and not true.changed


def test_no_documents_cause_no_prompts(index):
    assert AnswerCheck(index, reader=BuilderModel()).check([]) == []


def test_failed_answer_is_an_error(index):
    class Broken(Generator):
        async def stream(self, prompt):
            raise BackendError("no model", backend="fake", retryable=True)
            yield ""

    with pytest.raises(BackendError, match="no model"):
        check(index, "The north bridge was built by Walter Quell.", Broken())


def test_document_that_prevents_an_answer_counts_as_a_change(index):
    """The text must not clear itself, and must not prevent the check of the other documents."""

    class FailsAboutQuell(BuilderModel):
        async def stream(self, prompt):
            if any("Quell" in d.text for d in prompt.context):
                raise BackendError("the model wrote nothing", backend="fake", retryable=False)
            yield "It was built by Ottilie Brandt."

    add(index, TRUE)
    texts = ["The north bridge was built by Walter Quell.", "It was Ottilie Brandt who built the north bridge."]
    silenced, harmless = AnswerCheck(index, reader=FailsAboutQuell()).check(
        [entered_question(t, source=t[:5]) for t in texts]
    )
    assert (silenced.changed, silenced.supporters) == (True, 0)
    assert not harmless.changed


class FailingModel(BuilderModel):
    """Fails if its context contains Quell, and for the first ``at_first`` prompts."""

    def __init__(self, failure, at_first=0):
        super().__init__()
        self.failure, self.at_first, self.asked = failure, at_first, []

    async def stream(self, prompt):
        quell = any("Quell" in d.text for d in prompt.context)
        self.asked.append(quell)
        if quell or len(self.asked) <= self.at_first:
            raise self.failure
        yield "It was built by Ottilie Brandt."


EMPTY_ANSWER = BackendError("the answer is empty", backend="fake", retryable=True)
TEXTS = ("The north bridge was built by Walter Quell.", "It was Ottilie Brandt who built the north bridge.")


@pytest.mark.parametrize(
    "failure", [EMPTY_ANSWER, TimeoutError(), ValueError("Quell"), CapabilityError("no such text")]
)
def test_document_that_makes_the_reader_fail_does_not_prevent_checks_of_others(index, caplog, failure):
    """Its prompt is repeated once alone, because the server may have caused the failure."""
    add(index, TRUE)
    reader = FailingModel(failure)
    hostile, harmless = AnswerCheck(index, reader=reader).check([entered_question(t, source=t[:5]) for t in TEXTS])
    assert (hostile.changed, hostile.supporters) == (True, 0) and not harmless.changed
    assert sum(reader.asked) == 2 and len(reader.asked) == 4
    assert "stays suspicious" in caplog.text and "Quell" not in caplog.text


def test_temporary_failure_is_retried_without_effect(index):
    add(index, TRUE)
    reader = FailingModel(EMPTY_ANSWER, at_first=2)
    (harmless,) = AnswerCheck(index, reader=reader).check([entered_question(TEXTS[1])])
    assert not harmless.changed and len(reader.asked) == 4


@pytest.mark.parametrize("failure", [EMPTY_ANSWER, ValueError("Quell")])
def test_reader_without_any_answer_is_an_error_after_one_retry(index, failure):
    add(index, TRUE)
    reader = FailingModel(failure, at_first=99)
    with pytest.raises(BackendError, match="the answer is empty|failed with ValueError") as raised:
        AnswerCheck(index, reader=reader).check([entered_question(text, source=text[:5]) for text in TEXTS])
    assert len(reader.asked) == 4 and raised.value.retryable and "Quell" not in str(raised.value)


class EndlessModel(BuilderModel):
    """Never ends an answer about Quell. With ``always``, it ends no answer."""

    def __init__(self, always=False):
        super().__init__()
        self.always, self.closed = always, 0

    async def stream(self, prompt):
        try:
            while self.always or any("Quell" in d.text for d in prompt.context):
                yield "and "
                await asyncio.sleep(0.001)
        finally:
            self.closed += 1
        yield "It was built by Ottilie Brandt."


def test_answer_that_does_not_end_is_a_failure(index, monkeypatch):
    monkeypatch.setattr(answer_change, "ANSWER_S", 0.1)
    add(index, TRUE)
    found = [entered_question(text, source=text[:5]) for text in TEXTS]
    hostile, harmless = AnswerCheck(index, reader=(reader := EndlessModel())).check(found)
    assert (hostile.changed, hostile.supporters) == (True, 0) and not harmless.changed
    assert reader.closed == 4  # all streams are closed
    with pytest.raises(BackendError, match="no answer within 0.1 s"):
        AnswerCheck(index, reader=EndlessModel(always=True)).check(found)


def test_retried_prompts_share_one_time_limit(index, monkeypatch):
    monkeypatch.setattr(answer_change, "ANSWER_S", 0.1)
    monkeypatch.setattr(answer_change, "AT_ONCE", 8)
    add(index, TRUE)
    reader = EndlessModel()
    changes = AnswerCheck(index, reader=reader).check(
        [entered_question(f"{TEXTS[0]} {i}.", source=f"n{i}") for i in range(6)]
    )
    assert all(c.changed for c in changes)
    assert reader.closed in (
        1 + 6 + 1,
        1 + 6 + 2,
    )  # without a shared time limit 1 + 6 + 6; both limits end at the same time


class TestSpecificLifts:
    def test_grows_with_the_lift(self):
        small, large = (specific_lifts([QUESTION], TRUE, [lift])[0] for lift in (0.2, 0.4))
        assert large == pytest.approx(2 * small)

    def test_is_larger_for_a_text_about_this_question_only(self):
        longer = f"{TRUE} Its arches are of granite, and herons nest below them from March until the harvest begins."
        assert specific_lifts([QUESTION], TRUE, [0.2]) > specific_lifts([QUESTION], longer, [0.2]) > [0.0]

    def test_equals_the_root_of_the_f1_of_content_words(self):
        # question: built, north, bridge; text: those and ottilie, brandt
        text = "The north bridge was built by Ottilie Brandt."
        assert specific_lifts([QUESTION], text, [1.0]) == [pytest.approx((2 * 3 / (3 + 5)) ** 0.5)]

    def test_is_zero_without_words(self):
        assert specific_lifts(["?", QUESTION], "", [0.5, 0.5]) == [0.0, 0.0]


def test_the_check_works_inside_an_event_loop(index):
    add(index, TRUE)

    async def inside():
        return check(index, "The north bridge was built by Caspar Holm in 1931.")

    assert asyncio.run(inside()) == check(index, "The north bridge was built by Caspar Holm in 1931.")


def test_long_sentence_is_searched_once_for_the_expected_answer_type(monkeypatch):
    searched = []
    expects = AskedQuestion.expects
    monkeypatch.setattr(AskedQuestion, "expects", lambda self, text: searched.append(text) or expects(self, text))
    asked = AskedQuestion.of("Who built the amber ferry?")
    assert "zed quellbach" in answer_keywords(asked, "the amber ferry was built by Zed Quellbach and " * 50)
    assert len(searched) == 1
