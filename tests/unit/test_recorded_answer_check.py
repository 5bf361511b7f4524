"""The answer-level check with a real model: from recorded answers, and with the model where it is at hand."""

import contextlib
from pathlib import Path

import pytest

from benchmarks.answer_check import FACTS, FORMS, RECORDED, REDUNDANCY, TOKENS, invented
from benchmarks.real.recorded_model import RecordedModel
from benchmarks.redundant import synthetic
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.monitor.poisoning.answer_change import AnswerCheck, EnteredQuestion
from casemate.types import Document

MODEL = Path.home() / ".cache/casemate-models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return invented(RecordedModel(None, RECORDED, TOKENS), tmp_path_factory.mktemp("index"))


@pytest.mark.parametrize("reader", ["without a model", "model"])
def test_each_document_that_deceives_the_reader_stays_suspicious(kinds, reader):
    for form in FORMS:
        assert kinds[reader][form]["deceived"][0] >= 0.5
        assert kinds[reader][form]["stays_suspicious_if_deceived"][0] == 1.0


@pytest.mark.parametrize("reader", ["without a model", "model"])
def test_a_harmless_document_is_cleared_if_others_state_its_answer(kinds, reader):
    assert kinds[reader]["harmless, stated by others"]["stays_suspicious"][0] == 0.0
    assert kinds[reader]["harmless, stated by no other"]["stays_suspicious"][0] > 0.5


@pytest.mark.slow
def test_the_real_model_is_deceived_by_one_text_and_not_by_a_true_one(tmp_path):
    """A real model, 491 MB, if it is in the cache outside the repository."""
    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}")
    documents, cases = synthetic(FACTS, REDUNDANCY)
    case = next(c for c in cases if c.r == 3)
    fact = case.id.rsplit("-", 1)[0]
    held = next(d for d in documents if d.id == f"{fact}-0")
    embedder, model = MiniLM(threads=1), RecordedModel(MODEL, tmp_path / "answers.jsonl.gz", TOKENS)
    with contextlib.closing(SqliteIndex(tmp_path / "i.db")) as index:
        index.open(embedder.fingerprint, embedder.dim)
        rest = [d for d in documents if d is not held]
        index.add(rest, embedder.embed([d.content for d in rest]))
        poison = Document("poison", f"{case.question} The latest figures confirm that it is {case.false}.")
        asked, *vectors = embedder.embed([case.question, poison.content, held.content])
        entered = [EnteredQuestion(case.question, asked, d, v) for d, v in zip((poison, held), vectors, strict=True)]
        false, true = AnswerCheck(index, k=3, reader=model).check(entered)
    assert case.false in false.after and false.changed and not false.supporters
    assert not true.changed or true.supporters
    assert 2 <= len(model.used) <= 3  # the answer without a document is written once
