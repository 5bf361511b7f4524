"""Replay of recorded answers of a real model to questions with redundancy, compared with published figures."""

import asyncio
import json
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from benchmarks import ROOT, quorum
from benchmarks.quorum_reader import RECORDED, Asked, _packed, compositions, recorded, tables
from benchmarks.real import answer
from benchmarks.real.recorded_model import RecordedModel
from benchmarks.real.sample import digest
from benchmarks.redundant import Case, synthetic
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import BackendError
from casemate.rag.pipeline import Rag, join_stream
from casemate.redteam.lab import datasets
from casemate.redteam.lab.two_world_audit import IndexWithout
from casemate.text.edited_copies import copy_groups
from casemate.types import UNKNOWN, Document, Prompt, Query
from tests.fakes import BagOfWords, Parrot

CASE = Case("x", "Who built the mill of Oxford?", ("Ann Orr",), "Bo Lund", 2)


def asked(*isolated, plain="Ann Orr built it."):
    return Asked("synthetic", CASE, 0, plain, isolated)


def test_synthetic_collection_has_the_stated_redundancy():
    documents, cases = synthetic(2, (1, 3, 8))
    assert len(documents) == 2 * (1 + 3 + 8) and len(cases) == 2 * 2 * 3
    for case in cases:
        stating = [d for d in documents if case.answers[0] in d.text and case.id.rsplit("-", 1)[0] in d.id]
        assert len(stating) == case.r
        assert not any(case.false in d.text for d in documents)
    groups, contained = copy_groups([d.text for d in documents])
    assert max(Counter(groups).values()) == 1 and not contained  # no copies


def test_compositions_equal_manual_results():
    row = asked("The mill was built by Ann Orr.", "Ann Orr and Kim built it.", "It was Kim, says Bo Lund.")
    found = compositions(row, 2)
    assert found["words"] == "ann orr kim"
    assert found["span"] == "Ann Orr and Kim built"  # the order is that of one unit
    assert found["phrase"] == "Ann Orr"
    assert "Ann Orr" in found["compose"] and "Lund" not in str(found)


@pytest.mark.parametrize("name", ["compose", "words", "span", "span, pairs", "phrase"])
def test_no_composition_contains_statements_of_one_unit(name):
    row = asked("Ann Orr built it.", "The mill is the work of Bo Lund.", "")
    assert compositions(row, 2)[name] in (UNKNOWN, "")


def test_tables_count_correct_and_false_answers():
    rows = [asked("Ann Orr did.", "Ann Orr, they say."), asked("Bo Lund did.", "Bo Lund, they say.", plain="Bo Lund.")]
    found = tables(rows)["synthetic"]["poison 0"]
    assert found["plain"]["right"][:2] == [1, 2] and found["plain"]["false"][:2] == [1, 2]
    assert found["m=2, compose"]["right"][:2] == [1, 2] and found["m=2, compose"]["false"][:2] == [1, 2]
    assert found["m=3, compose"]["right"][0] == 0
    assert found["plain"]["right_by_r"] == {"2": [1, 2]}


def test_replays_recorded_answers_without_the_model(tmp_path):
    file, prompt = tmp_path / "a.jsonl.gz", Prompt("Who?", (), "Be brief.")
    answer.write_lines(file, [{"model": "m"}, {"id": digest("Who?", [], "Be brief."), "answer": "Ann."}])
    model = RecordedModel(None, file, 8)
    assert asyncio.run(join_stream(model.stream(prompt))) == "Ann."
    with pytest.raises(BackendError, match="no answer to this prompt"):
        asyncio.run(join_stream(model.stream(Prompt("When?", (), "Be brief."))))


def test_replay_equals_the_published_figures():
    published = json.loads((ROOT / "benchmarks/results/quorum_reader.json").read_text())["results"]
    about, rows = recorded(RECORDED / "reader_qwen0.5b.jsonl.gz")
    assert {"model", "digest", "dtype", "decoding", "prompts", "seed"} <= about.keys() and len(about["digest"]) == 64
    found = json.loads(json.dumps(tables(rows)))
    assert "synthetic" in found  # SQuAD only if its data is present
    assert found == {name: published["qwen0.5b"]["tables"][name] for name in found}


def test_records_contain_no_questions_and_gold_answers_of_squad():
    """SQuAD records have an id only; records of the synthetic collection contain the question."""
    row = asked("Ann Orr did.", plain="Yes.")
    packed = _packed(replace(row, corpus="squad"))
    assert packed["case"] == {"id": "x", "question": "", "answers": [], "false": "Bo Lund", "r": 2, "stated": None}
    assert _packed(row)["case"]["question"] == CASE.question


def test_summary_of_the_strongest_attacker_equals_manual_results():
    found = quorum._summary([[False, True, True], [False, False, False]])
    assert found["answers"][:2] == [2, 6] and found["members"] == [1, 2] and found["auc"][0] == 0.75


def test_differing_answers_equal_those_of_two_guards(tmp_path):
    """Compares with two guards, one of which has an index without the unit."""
    texts = [
        f"The harbor bridge opened in 19{i} near the {w} tower." for i, w in ((32, "red"), (32, "old"), (41, "red"))
    ]
    with closing(SqliteIndex(tmp_path / "index.db")) as index:
        rag = Rag(BagOfWords(256), index, Parrot())
        index.add([Document(f"d{i}", text) for i, text in enumerate(texts)], rag.embedder.embed(texts))
        held = datasets.indexed_sources(index, {"d0"})
        worlds = [
            quorum._guard(Rag(rag.embedder, world, Parrot()), 2, 1) for world in (index, IndexWithout(index, held))
        ]
        seen = set()
        for question in ("When did the harbor bridge open?", "Which tower is near the harbor bridge?", "Where is it?"):
            one, other = (asyncio.run(w.ask(Query(question, k=3, groups=frozenset()))).text for w in worlds)
            (vector,) = rag.embedder.embed([question])
            assert quorum._differing(rag, question, vector, frozenset({"d0"}))["m=2"] == (one != other)
            seen.add(one != other)
        assert seen == {True, False}
