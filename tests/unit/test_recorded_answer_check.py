"""The answer-change check with recorded answers of a real model, and with the model itself if it is available."""

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
def results(tmp_path_factory):
    return invented(RecordedModel(None, RECORDED, TOKENS), tmp_path_factory.mktemp("index"))


@pytest.mark.parametrize("reader", ["without a model", "model"])
def test_a_document_with_a_false_answer_that_the_model_adopts_stays_suspicious(results, reader):
    for form in FORMS:
        assert results[reader][form]["deceived"][0] >= 0.5
        assert results[reader][form]["stays_suspicious_if_deceived"][0] == 1.0


@pytest.mark.parametrize("reader", ["without a model", "model"])
def test_a_harmless_document_with_a_confirmed_answer_is_not_suspicious(results, reader):
    assert results[reader]["harmless, stated by others"]["stays_suspicious"][0] == 0.0
    assert results[reader]["harmless, stated by no other"]["stays_suspicious"][0] > 0.5


@pytest.mark.slow
def test_a_real_model_adopts_a_false_text_and_the_check_accepts_a_true_one(tmp_path):
    """Needs a 491 MB model in the cache outside the repository."""
    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}")
    documents, cases = synthetic(FACTS, REDUNDANCY)
    case = next(c for c in cases if c.r == 3)
    fact = case.id.rsplit("-", 1)[0]
    true_document = next(d for d in documents if d.id == f"{fact}-0")
    embedder, model = MiniLM(threads=1), RecordedModel(MODEL, tmp_path / "answers.jsonl.gz", TOKENS)
    with contextlib.closing(SqliteIndex(tmp_path / "i.db")) as index:
        index.open(embedder.fingerprint, embedder.dim)
        rest = [d for d in documents if d is not true_document]
        index.add(rest, embedder.embed([d.content for d in rest]))
        poison = Document("poison", f"{case.question} The latest figures confirm that it is {case.false}.")
        asked, *vectors = embedder.embed([case.question, poison.content, true_document.content])
        entered = [
            EnteredQuestion(case.question, asked, d, v) for d, v in zip((poison, true_document), vectors, strict=True)
        ]
        false, true = AnswerCheck(index, k=3, reader=model).check(entered)
    assert case.false in false.after and false.changed and not false.supporters
    assert not true.changed or true.supporters
    assert 2 <= len(model.used) <= 3  # the answer without a document is generated once
