import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError, ConfigError
from casemate.guard.defenses.summarize import Summarize
from casemate.guard.guard import Guard
from casemate.protocols import Generator
from casemate.rag.pipeline import Rag, join_stream
from casemate.text.sentences import extract_sentences, sentences
from casemate.text.tokens import content_words
from casemate.types import Document, Prompt, Query
from tests.fakes import BagOfWords

TEXT = (
    "The north bridge was closed in May. Divers had found cracks in two piers of the bridge. It rained. "
    "The repair of the bridge costs 4.2 million marks. Buses cross at Wexcombe."
)
QUESTION = "What does the repair of the north bridge cost?"


@dataclass
class EchoReader(Generator):
    """Repeats its context and records the prompts."""

    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        for document in prompt.context:
            yield f"<{document.id}: {document.text}>"


@dataclass
class FakeSummarizer(Generator):
    """Streams a given summary per document in pieces, or raises a given error. The first summary is the slowest."""

    written: dict
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        for _ in range(3 - len(self.prompts)):
            await asyncio.sleep(0)
        (document,) = prompt.context
        summary = self.written[document.id]
        if isinstance(summary, Exception):
            raise summary
        for char in summary:
            yield char


def read(defense, *texts, question=QUESTION):
    context = tuple(Document(f"d{i}", text, "title", "source", metadata={"i": i}) for i, text in enumerate(texts))
    prompt = Prompt(question, context, "Answer.")
    asyncio.run(join_stream(defense.on_generate(reader := EchoReader()).stream(prompt)))
    return reader.prompts[0]


class TestExtracts:
    def test_contain_the_sentences_with_most_shared_words_in_order(self):
        assert extract_sentences(QUESTION, TEXT, 2) == (
            "The north bridge was closed in May. The repair of the bridge costs 4.2 million marks."
        )
        assert extract_sentences(QUESTION, TEXT, 1) == "The repair of the bridge costs 4.2 million marks."

    def test_are_empty_without_shared_words(self):
        assert (
            extract_sentences("Who feeds the heron?", TEXT, 3)
            == extract_sentences("", TEXT, 3)
            == extract_sentences("Is it?", TEXT, 3)
            == ""
        )

    @given(st.lists(st.sampled_from(TEXT.split()), max_size=60).map(" ".join), st.integers(1, 4))
    def test_contain_only_the_best_sentences(self, text, most):
        asked = content_words(QUESTION)
        options = [s.strip() for s in sentences(text)]
        taken = extract_sentences(QUESTION, text, most)
        counts = sorted((len(content_words(s) & asked) for s in options), reverse=True)
        expected = [c for c in counts if c][:most]
        left, got = taken, []
        for sentence in options:
            if expected and left.startswith(sentence) and len(content_words(sentence) & asked) >= expected[-1]:
                left = left.removeprefix(sentence).lstrip()
                got.append(len(content_words(sentence) & asked))
        assert not left and sorted(got, reverse=True) == expected


class TestModel:
    def test_reads_extracts_instead_of_chunks(self):
        prompt = read(Summarize(sentences=1), TEXT, "Buses and repairs. The bridge is a landmark. Cost rose.")
        assert [d.text for d in prompt.context] == [
            "The repair of the bridge costs 4.2 million marks.",
            "Buses and repairs.",
        ]
        assert [(d.id, d.title, d.source, d.metadata) for d in prompt.context] == [
            (f"d{i}", "title", "source", {"i": i}) for i in range(2)
        ]
        assert (prompt.question, prompt.instructions) == (QUESTION, "Answer.")

    def test_does_not_read_irrelevant_chunks(self):
        assert [d.id for d in read(Summarize(), "It rained.", TEXT, "").context] == ["d1"]

    def test_reads_extracts_while_the_retrieval_keeps_the_documents(self, tmp_path):
        index = SqliteIndex(tmp_path / "i.db")
        context_documents = [Document("a", TEXT), Document("b", "The heron nests late. It rained.")]
        answers = {}
        for enforce in (True, False):
            guard = Guard(Rag(BagOfWords(), index, EchoReader()), [Summarize()], enforce=enforce)
            asyncio.run(guard.add(context_documents))
            answers[enforce] = asyncio.run(guard.ask(Query(QUESTION)))
        index.close()
        assert answers[True].text == f"<a: {extract_sentences(QUESTION, TEXT, 2)}>"
        assert TEXT in answers[False].text
        scores = [[(h.document, h.score) for h in answer.retrieval.hits] for answer in answers.values()]
        assert scores[0] == scores[1] and {d.text for d, _ in scores[0]} == {d.text for d in context_documents}


class TestWriter:
    def test_summarizes_each_chunk_for_the_question(self):
        writer = FakeSummarizer({"d0": " Repair: 4.2 million. ", "d1": "A landmark."})
        prompt = read(Summarize(sentences=3, writer=writer), TEXT, "The bridge is a landmark.")
        assert [d.text for d in prompt.context] == ["Repair: 4.2 million.", "A landmark."]
        assert [p.context[0].text for p in writer.prompts] == [TEXT, "The bridge is a landmark."]
        assert all(QUESTION in p.question and "3 short sentences" in p.question for p in writer.prompts)

    def test_a_chunk_without_relevant_content_has_no_summary(self):
        writer = FakeSummarizer({"d0": "NOTHING.", "d1": "", "d2": "Nothing was closed."})
        assert [d.text for d in read(Summarize(writer=writer), TEXT, TEXT, TEXT).context] == ["Nothing was closed."]

    def test_failure_falls_back_to_an_extract(self, caplog):
        writer = FakeSummarizer({"d0": BackendError("it is down", backend="fake", retryable=True), "d1": "A landmark."})
        prompt = read(Summarize(writer=writer), TEXT, "The bridge is a landmark.")
        assert [d.text for d in prompt.context] == [extract_sentences(QUESTION, TEXT, 2), "A landmark."]
        assert "the writer failed; using an extract: it is down" in caplog.text
        assert "Divers" not in caplog.text

    def test_question_with_braces_is_unchanged(self):
        writer = FakeSummarizer({"d0": "A."})
        read(Summarize(writer=writer), TEXT, question="What is {nothing} {0}?")
        assert "What is {nothing} {0}?" in writer.prompts[0].question


def test_zero_sentences_are_rejected():
    with pytest.raises(ConfigError, match="summarize: sentences=0"):
        Summarize(sentences=0)
