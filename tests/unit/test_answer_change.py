"""The answer-level check of new documents, against answers written down here."""

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
    (found,) = made.check([entered(text, cosine, source)])
    return found


def entered(text, cosine=0.9, source="new", question=QUESTION):
    return EnteredQuestion(question, ASKED, Document(source, text), at(cosine))


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


def test_half_of_the_new_keywords_is_no_support(index):
    """A model that begins with an unusual name: the other unit states 'builder', not the name."""

    class Says(Model):
        async def stream(self, prompt):
            claims = any("Tetavberg" in d.text for d in prompt.context)
            yield "Tetavberg was the builder of the north bridge." if claims else "It was built by Ottilie Brandt."

    add(index, TRUE, "Ottilie Brandt is known as the builder of the north bridge, says the chronicle.")
    found = check(index, "Who built the north bridge? Tetavberg did.", Says())
    assert (found.changed, found.supporters) == (True, 0)


def test_copies_of_the_supporter_count_once_and_its_own_source_never(index):
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
def test_brackets_and_question_marks_hide_no_answer_from_the_check(index, question, text):
    add(index, "The north bridge was built by Ottilie Brandt. The north bridge was opened in 1931.")
    (found,) = AnswerCheck(index).check([entered(text, question=question)])
    assert found.changed and not found.supporters


class Copies(Generator):
    """Says the first text of its context, as a model does that is told to; ends as given, with names of sources."""

    def __init__(self, end=""):
        self.end = end

    async def stream(self, prompt):
        yield prompt.context[0].text + self.end.format(*(d.source for d in prompt.context))


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
def test_a_model_that_repeats_a_false_answer_in_any_form_changes_it(index, question, text):
    add(index, "The north bridge was opened in 1931." if question == WHEN else "The north bridge has 4 arches.")
    (found,) = AnswerCheck(index, reader=Copies()).check([entered(text, question=question)])
    assert found.changed and not found.supporters


@pytest.mark.parametrize(
    "end", ["", " [1]", "[2]", " [1] [2]", "\nSources: [2] {1}", " [1]\nSources: [1] {0}, [2] {1}"]
)
def test_citations_are_no_part_of_an_answer(index, end):
    add(index, "The north bridge was opened in 1931.")
    model = Copies(end)
    (found,) = AnswerCheck(index, reader=model).check([entered("It was opened in 1931.", question=WHEN)])
    assert found.after == "It was opened in 1931." and not found.changed


def test_names_of_sources_that_look_like_lists_of_sources_cost_no_time(index):
    index.add(
        [Document("a", "The north bridge was opened in 1931."), Document("a, [1] a", "Tolls.")], np.stack([at(0.7)] * 2)
    )
    listed = ", ".join(["[1] a"] * 60)
    (found,) = AnswerCheck(index, reader=Copies(f"\nSources: {listed}, x")).check([entered("By 1931.", question=WHEN)])
    assert found.after.endswith("x")


def test_the_default_reader_s_citation_of_a_line_without_a_full_stop_is_no_part_of_the_answer(index):
    add(index, "The north bridge was opened in 1931.")
    (found,) = AnswerCheck(index).check([entered("North bridge: opened in 1931", question=WHEN)])
    assert found.after == "North bridge: opened in 1931" and not found.changed


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


class Batches(Model):
    """Answers as ``Model`` once no further prompt is in progress; keeps the numbers of questions asked at once."""

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


def test_documents_that_come_together_are_read_in_one_batch_and_equal_prompts_once(index):
    add(index, TRUE)
    model, texts = Batches(), [f"The north bridge was built by Walter Quell in {year}." for year in (1931, 1932, 1933)]
    changes = AnswerCheck(index, reader=model).check([entered(text, source=f"n{i}") for i, text in enumerate(texts)])
    assert model.batches == [4]  # once without, and with each of the documents
    alone = [check(index, text, Model(), source=f"n{i}") for i, text in enumerate(texts)]
    assert changes == alone and all(c.changed for c in changes)


def test_documents_with_equal_ids_and_other_texts_are_different_prompts(index):
    add(index, TRUE)
    false, true = AnswerCheck(index, reader=Model()).check([entered("By Walter Quell."), entered("By Ottilie Brandt.")])
    assert false.changed and not true.changed


def test_without_documents_no_answer_is_asked_for(index):
    assert AnswerCheck(index, reader=Model()).check([]) == []


def test_an_answer_that_fails_is_an_error_not_a_clearance(index):
    class Broken(Generator):
        async def stream(self, prompt):
            raise BackendError("no model", backend="fake", retryable=True)
            yield ""

    with pytest.raises(BackendError, match="no model"):
        check(index, "The north bridge was built by Walter Quell.", Broken())


def test_a_document_that_silences_the_model_stays_suspicious(index):
    """A hostile text must neither clear itself nor stop the documents that come with it."""

    class Silenced(Model):
        async def stream(self, prompt):
            if any("Quell" in d.text for d in prompt.context):
                raise BackendError("the model wrote nothing", backend="fake", retryable=False)
            yield "It was built by Ottilie Brandt."

    add(index, TRUE)
    texts = ["The north bridge was built by Walter Quell.", "It was Ottilie Brandt who built the north bridge."]
    silenced, harmless = AnswerCheck(index, reader=Silenced()).check([entered(t, source=t[:5]) for t in texts])
    assert (silenced.changed, silenced.supporters) == (True, 0)
    assert not harmless.changed


class Fails(Model):
    """Fails while its context has Quell, and for the first ``at_first`` prompts."""

    def __init__(self, failure, at_first=0):
        super().__init__()
        self.failure, self.at_first, self.asked = failure, at_first, []

    async def stream(self, prompt):
        quell = any("Quell" in d.text for d in prompt.context)
        self.asked.append(quell)
        if quell or len(self.asked) <= self.at_first:
            raise self.failure
        yield "It was built by Ottilie Brandt."


EMPTY = BackendError("the answer is empty", backend="fake", retryable=True)
TEXTS = ("The north bridge was built by Walter Quell.", "It was Ottilie Brandt who built the north bridge.")


@pytest.mark.parametrize("failure", [EMPTY, TimeoutError(), ValueError("Quell"), CapabilityError("no such text")])
def test_a_document_that_makes_the_reader_fail_does_not_stop_the_others(index, caplog, failure):
    """It is asked about once more alone: the failure may have been one of the server."""
    add(index, TRUE)
    reader = Fails(failure)
    hostile, harmless = AnswerCheck(index, reader=reader).check([entered(t, source=t[:5]) for t in TEXTS])
    assert (hostile.changed, hostile.supporters) == (True, 0) and not harmless.changed
    assert sum(reader.asked) == 2 and len(reader.asked) == 4
    assert "stays suspicious" in caplog.text and "Quell" not in caplog.text


def test_a_failure_that_has_ended_when_the_prompt_is_asked_again_changes_nothing(index):
    add(index, TRUE)
    reader = Fails(EMPTY, at_first=2)
    (harmless,) = AnswerCheck(index, reader=reader).check([entered(TEXTS[1])])
    assert not harmless.changed and len(reader.asked) == 4


@pytest.mark.parametrize("failure", [EMPTY, ValueError("Quell")])
def test_a_reader_that_answers_nothing_is_an_error_after_one_more_prompt(index, failure):
    add(index, TRUE)
    reader = Fails(failure, at_first=99)
    with pytest.raises(BackendError, match="the answer is empty|failed with ValueError") as raised:
        AnswerCheck(index, reader=reader).check([entered(text, source=text[:5]) for text in TEXTS])
    assert len(reader.asked) == 4 and raised.value.retryable and "Quell" not in str(raised.value)


class Trickles(Model):
    """Never ends an answer about Quell; with ``always``, none."""

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


def test_an_answer_that_does_not_end_is_a_failure(index, monkeypatch):
    monkeypatch.setattr(answer_change, "ANSWER_S", 0.1)
    add(index, TRUE)
    found = [entered(text, source=text[:5]) for text in TEXTS]
    hostile, harmless = AnswerCheck(index, reader=(reader := Trickles())).check(found)
    assert (hostile.changed, hostile.supporters) == (True, 0) and not harmless.changed
    assert reader.closed == 4  # nothing continues to run
    with pytest.raises(BackendError, match="no answer within 0.1 s"):
        AnswerCheck(index, reader=Trickles(always=True)).check(found)


def test_prompts_that_are_asked_again_share_the_time_of_one_answer(index, monkeypatch):
    monkeypatch.setattr(answer_change, "ANSWER_S", 0.1)
    monkeypatch.setattr(answer_change, "AT_ONCE", 8)
    add(index, TRUE)
    reader = Trickles()
    changes = AnswerCheck(index, reader=reader).check([entered(f"{TEXTS[0]} {i}.", source=f"n{i}") for i in range(6)])
    assert all(c.changed for c in changes)
    assert reader.closed in (1 + 6 + 1, 1 + 6 + 2)  # without a shared time 1 + 6 + 6; both limits end at one moment


class TestSpecificLifts:
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
