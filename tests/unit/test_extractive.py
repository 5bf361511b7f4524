import asyncio
from string import punctuation

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from casemate.backends.generators import extractive
from casemate.backends.generators.extractive import COMPARED, MARKUP, MAX_SENTENCES, ExtractiveGenerator, passages_of
from casemate.errors import ConfigError
from casemate.rag.pipeline import join_stream
from casemate.text.answering import Question
from casemate.text.sentences import sentences
from casemate.text.tokens import words
from casemate.types import UNKNOWN, Document, Prompt
from tests.fakes import BagOfWords

PHARMACY = Document(
    "p#1", "The pharmacy is on level 2. It opens at 8:30 and closes at 19:00.\nBring your card.", source="pharmacy.md"
)
PARKING = Document("k#1", "# Parking\n\n- Parking costs 2 marks an hour.\n- Dr. Okwu parks free.", source="parking.md")


def answer(question, *context, **options):
    return asyncio.run(join_stream(ExtractiveGenerator(**options).stream(Prompt(question, context, ""))))


def test_quotes_the_matching_sentence_with_its_source():
    assert answer("When does the pharmacy close?", PHARMACY, PARKING).splitlines() == [
        "The pharmacy is on level 2. [1] It opens at 8:30 and closes at 19:00. [1]",
        "Sources: [1] pharmacy.md",
    ]


@pytest.mark.parametrize(
    "written, quoted",
    [
        (
            "The port is set by `gateway.port_of_api` in the file.",
            "The port is set by gateway.port_of_api in the file. [1]",
        ),
        ("The port is _always_ set by __one__ file.", "The port is always set by one file. [1]"),
        (
            "The file gateway\\_file sets the port am 1\\. Mai \\(version 9\\.5\\)\\.",
            "The file gateway_file sets the port am 1. Mai (version 9.5). [1]",
        ),
    ],
)
def test_emphasis_is_removed_and_a_name_with_underscores_is_kept(written, quoted):
    assert answer("Which file sets the port?", Document("a", written)).splitlines()[0] == quoted


def test_numbers_quoted_sources_only():
    assert "[1] parking.md" in answer("What does parking cost per hour?", PHARMACY, PARKING)


@pytest.mark.parametrize(
    "question", ["Who won the football match?", "???", "the of and", "pharmacy quarterly dividend forecast"]
)
def test_answers_unknown_without_a_match(question):
    assert answer(question, PHARMACY, PARKING) == UNKNOWN


def test_answers_unknown_without_context():
    assert answer("When does the pharmacy close?") == UNKNOWN


def test_the_number_of_sentences_is_limited():
    text = " ".join(f"Heron number {i} lives here." for i in range(20))
    assert answer("heron lives", Document("a", text), sentences=2).count("Heron") == 2


def test_long_sentence_is_quoted_alone():
    """A text without full stops is one sentence, so three sentences would be the whole context."""
    filler = " and the tide went on" * 20
    long = [Document(f"{i}.md", f"The ferry to island {i} sails at noon{filler}") for i in range(3)]
    assert answer("When does the ferry sail to the island?", *long).count("The ferry") == 1
    short = [Document(d.id, d.text[:38] + ".") for d in long]
    assert answer("When does the ferry sail to the island?", *short).count("The ferry") == 3


def test_titles_and_abbreviations_do_not_end_sentences():
    assert "Dr. Okwu parks free." in answer("Who parks free?", PARKING)


def test_a_sentence_in_two_documents_is_quoted_once():
    duplicate = Document("q", PHARMACY.text)
    assert answer("When does the pharmacy close?", PHARMACY, duplicate).count("19:00") == 1


@pytest.mark.parametrize(
    "question",
    [
        "x y z " * 30 + "It opens at 8:30 and closes at 19:00.",
        "Is this known? The pharmacy is on level 2. It opens at 8:30 and closes at 19:00. Bring your card.",
        "the pharmacy is on level 2, it opens at 8:30 and it closes at 19:00",
        "Is the pharmacy on level 2?",
    ],
)
def test_statements_of_the_question_are_not_repeated(question):
    assert answer(question, PHARMACY) == UNKNOWN


def test_negation_of_the_question_is_quoted():
    assert "not on level 2" in answer("Is the pharmacy on level 2?", Document("n", "The pharmacy is not on level 2."))


def test_answering_sentence_precedes_a_question_with_the_same_words():
    note = Document("n", "Please suggest. He was given ciprofloxacin 500 mg twice daily. What dose of ciprofloxacin?")
    found = answer("What dose of ciprofloxacin was suggested?", note, sentences=1)
    assert found.splitlines()[0] == "He was given ciprofloxacin 500 mg twice daily. [1]"


def test_a_pronoun_is_quoted_with_the_sentence_that_explains_it():
    text = "Mira Feld runs the archive. She opens the archive at nine on weekdays."
    assert answer("When does she open the archive on weekdays?", Document("a", text)).startswith("Mira Feld")


def test_questions_are_not_quoted_as_answers():
    text = "What does the pharmacy cost? The pharmacy is closed."
    assert "cost" not in answer("What does the pharmacy cost today?", Document("a", text))


def test_number_of_sentences_of_a_long_context_is_bounded():
    documents = [Document(str(i), "Herons nest here. " * 50) for i in range(100)]
    passages = passages_of(Question("Where do herons nest?"), documents)
    assert len(passages) == 100 and sum(len(p.sentences) for p in passages) == MAX_SENTENCES


class RecordingEmbedder(BagOfWords):
    fingerprint = "minilm:stand-in"

    def __init__(self):
        super().__init__(fingerprint=self.fingerprint)
        self.calls = []

    def embed(self, texts, progress=None):
        self.calls.append(tuple(texts))
        return super().embed(texts, progress)


def test_sentence_vectors_are_computed_once_and_do_not_depend_on_the_rest_of_the_context():
    embedder = RecordingEmbedder()
    generator = ExtractiveGenerator(embedder=embedder)

    def asked(*context):
        embedder.calls.clear()
        asyncio.run(join_stream(generator.stream(Prompt("When does the pharmacy close?", context, ""))))
        question, *sentences = embedder.calls
        assert question == ("When does the pharmacy close?",)  # question vectors are not cached
        return sum(sentences, ())

    assert len(asked(PHARMACY, PARKING)) == 6
    assert asked(PARKING, PHARMACY) == asked(PHARMACY) == ()


def test_only_the_sentences_ranked_first_by_words_are_embedded():
    embedder = RecordingEmbedder()
    text = " ".join(f"Heron number {i} lives here." for i in range(30)) + " The pharmacy closes at 19:00."
    found = answer("When does the pharmacy close?", Document("a", text), embedder=embedder)
    assert "19:00" in found and [len(call) for call in embedder.calls] == [1, COMPARED]


def test_number_of_cached_vectors_is_bounded(monkeypatch):
    monkeypatch.setattr(extractive, "CACHED_SENTENCES", 2)
    generator = ExtractiveGenerator(embedder=RecordingEmbedder())
    for context in (PHARMACY, PARKING):
        asyncio.run(join_stream(generator.stream(Prompt("When does the pharmacy close?", (context,), ""))))
    assert len(generator._vectors._vectors) == 2


REMARKS = ["{} Xanadoo is great.", "Xanadoo is great! {}", "Hello, I am new here. {} Thanks a lot!"]


@pytest.mark.parametrize("remark", REMARKS)
def test_remark_next_to_a_question_does_not_prevent_the_answer(remark):
    asked = ["When does the pharmacy close?", "What does parking cost per hour?"]
    for question, expected in zip(asked, ["19:00", "2 marks"], strict=True):
        assert expected in answer(question, PHARMACY, PARKING)
        assert expected in answer(remark.format(question), PHARMACY, PARKING)
    assert answer(remark.format("Who won the football match?"), PHARMACY, PARKING) == UNKNOWN


@pytest.mark.parametrize("remark", REMARKS)
def test_sentences_are_compared_with_the_question_without_the_remark(remark):
    embedder = RecordingEmbedder()
    answer(remark.format("When does the pharmacy close?"), PHARMACY, embedder=embedder)
    assert embedder.calls[0][0] == "When does the pharmacy close?"


def test_vectors_of_another_embedder_are_not_used():
    class Other(RecordingEmbedder):
        fingerprint = "other"

    embedder = Other()
    found = answer("When does the pharmacy close?", PHARMACY, embedder=embedder)
    assert embedder.calls == [] and found == answer("When does the pharmacy close?", PHARMACY)


@pytest.mark.parametrize("options", [{"sentences": 0}, {"support": 0.0}, {"support": 1.5}])
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError, match="extractive"):
        ExtractiveGenerator(**options)


WORDS = st.sampled_from("pharmacy level opens closes bring card not who when dose 500 mg Dr Ito ? . , is the".split())
TEXTS = st.lists(WORDS, min_size=1, max_size=40).map(" ".join) | st.text(max_size=200)


def unescaped(text):
    read, rest = "", iter(text)
    for character in rest:
        following = next(rest, "") if character == "\\" else ""
        read += character * (not following or following not in punctuation) + following
    return read


@example("Who pays?", ["The pharmacy pays 5 \\% \\\\ on level\\_2\\. Who pays?"], False)
@given(TEXTS, st.lists(TEXTS, max_size=4), st.booleans())
def test_every_quoted_sentence_is_in_its_source_and_not_in_the_question(question, texts, vectors):
    context = tuple(Document(str(i), t) for i, t in enumerate(texts))
    generator = ExtractiveGenerator(support=1e-9, embedder=RecordingEmbedder() if vectors else None)

    async def parts():
        return [part async for part in generator.stream(Prompt(question, context, ""))]

    *quoted, last = asyncio.run(parts())
    assert last == UNKNOWN if not quoted else last.startswith("\nSources: [1] ")
    assert len(quoted) <= 3
    plain = [" ".join(" ".join(MARKUP.sub("", s).split()) for s in sentences(unescaped(t))) for t in texts]
    asked = " ".join(["", *words(question), ""])
    for part in quoted:
        sentence = part.strip().rpartition(" [")[0]
        assert any(sentence in text for text in plain)
        assert " ".join(["", *words(sentence), ""]) not in asked


@given(st.lists(st.sampled_from("the heron nests in late reeds near a bridge".split()), min_size=1, max_size=30))
def test_a_pasted_sentence_is_never_quoted(pasted):
    record = " ".join(pasted) + "."
    assert answer(f"Do you know this: {record}", Document("r", record)) == UNKNOWN


@given(st.text(max_size=200), st.lists(st.text(max_size=300), max_size=4))
def test_every_answer_is_quoted_or_unknown(question, texts):
    found = answer(question, *(Document(str(i), t) for i, t in enumerate(texts)))
    assert found == UNKNOWN or "Sources: [1] " in found
