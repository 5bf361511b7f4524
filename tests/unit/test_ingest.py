import asyncio
import gzip
import json
import threading

import pytest

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.errors import ConfigError, DataError
from casemate.guard.guard import Guard
from casemate.rag import corpus
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest
from casemate.rag.pipeline import Rag
from casemate.types import Document, Query
from tests.fakes import BagOfWords, Parrot


@pytest.fixture
def guard(tmp_path):
    index = SqliteIndex(tmp_path / "index.db")
    yield Guard(Rag(BagOfWords(), index, Parrot()), [])
    index.close()


@pytest.fixture
def folder(tmp_path):
    corpus_folder = tmp_path / "docs"
    corpus_folder.mkdir()
    for i in range(6):
        (corpus_folder / f"{i}.txt").write_text(f"text number {i} " + "amber birch " * 30)
    return corpus_folder


def run(guard, folder, **options):
    work = Ingest(guard, Corpus(folder), overlap=4, **options)
    return asyncio.run(work.run(work.plan()))


def sources(guard):
    return set(guard.rag.index.digests())


def test_indexing_again_embeds_nothing(guard, folder):
    first = run(guard, folder)
    embedded = len(guard.rag.embedder.texts)
    again = run(guard, folder)
    assert (first.indexed, again.indexed, again.unchanged) == (6, 0, 6)
    assert len(guard.rag.embedder.texts) == embedded == first.chunks > 6


def test_only_changed_sources_are_embedded(guard, folder):
    run(guard, folder)
    guard.rag.embedder.texts.clear()
    (folder / "3.txt").write_text("a new text about herons")
    report = run(guard, folder)
    assert (report.indexed, report.unchanged) == (1, 5)
    assert guard.rag.embedder.texts == ["a new text about herons"]
    assert [h.document.source for h in guard.rag.index.search(guard.rag.embedder.embed(["herons"])[0], 1).hits] == [
        "3.txt"
    ]


def test_removed_sources_lose_all_their_chunks(guard, folder):
    run(guard, folder)
    (folder / "2.txt").unlink()
    assert run(guard, folder).removed == 1
    assert sources(guard) == {f"{i}.txt" for i in (0, 1, 3, 4, 5)}
    assert guard.rag.index.check() == []


def test_changed_chunking_options_cause_reindexing(guard, folder):
    run(guard, folder)
    assert run(guard, folder, tokens=20).indexed == 6


def test_removing_most_of_a_corpus_requires_confirmation(guard, folder):
    run(guard, folder)
    for i in range(4):
        (folder / f"{i}.txt").unlink()
    with pytest.raises(DataError, match="4 of 6 sources.*--missing remove"):
        run(guard, folder)
    assert len(sources(guard)) == 6
    assert run(guard, folder, missing="keep").kept == 4
    assert run(guard, folder, missing="remove").removed == 4
    assert sources(guard) == {"4.txt", "5.txt"}


def test_documents_of_another_corpus_or_a_program_are_kept(guard, folder, tmp_path):
    asyncio.run(guard.add([Document("api", "added by a program")]))
    run(guard, folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.txt").write_text("another folder")
    assert run(guard, other).removed == 0
    assert run(guard, folder).removed == 0
    assert len(sources(guard)) == 8
    assert run(guard, other, missing="remove").removed == 6
    assert sources(guard) == {"x.txt", "api"}


def test_a_moved_folder_is_the_same_corpus(guard, folder):
    run(guard, folder)
    moved = folder.rename(folder.with_name("records"))
    (moved / "1.txt").unlink()
    report = run(guard, moved)
    assert (report.unchanged, report.removed) == (5, 1)
    assert "1.txt" not in sources(guard)


def test_a_clashing_name_does_not_overwrite_another_corpus(guard, folder, tmp_path):
    run(guard, folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "1.txt").write_text("something else of the same name")
    report = run(guard, other)
    assert [(p.where, report.complete) for p in report.problems] == [("1.txt", False)]
    texts = {h.document.text for h in guard.rag.index.search(guard.rag.embedder.embed(["else"])[0], 99).hits}
    assert "something else of the same name" not in texts


@pytest.fixture
def other(tmp_path):
    """A second corpus: 1.txt clashes with other content, 2.txt has equal content, x.txt is new."""
    corpus_folder = tmp_path / "other"
    corpus_folder.mkdir()
    (corpus_folder / "1.txt").write_text("something else of the same name")
    (corpus_folder / "2.txt").write_text("text number 2 " + "amber birch " * 30)
    (corpus_folder / "x.txt").write_text("another folder")
    return corpus_folder


def test_clashing_names_count_neither_as_indexed_nor_as_unchanged(guard, folder, other):
    run(guard, folder)
    first, again = run(guard, other), run(guard, other)
    assert (first.indexed, first.unchanged, [p.where for p in first.problems]) == (1, 1, ["1.txt"])
    assert (again.indexed, again.unchanged, [p.where for p in again.problems]) == (0, 2, ["1.txt"])
    assert run(guard, folder).unchanged == 6


def test_clashing_name_is_indexed_after_the_other_corpus_removes_it(guard, folder, other):
    run(guard, folder)
    (folder / "1.txt").unlink()
    assert run(guard, folder).removed == 1
    report = run(guard, other)
    assert (report.indexed, report.unchanged, report.problems) == (2, 1, [])


def test_replacing_other_corpora_overwrites_clashing_names(guard, folder, other):
    run(guard, folder)
    report = run(guard, other, missing="remove")
    assert (report.indexed, report.unchanged, report.removed, report.problems) == (2, 1, 4, [])
    assert sources(guard) == {"1.txt", "2.txt", "x.txt"}
    assert [h.document.source for h in guard.rag.index.search(guard.rag.embedder.embed(["else"])[0], 1).hits] == [
        "1.txt"
    ]


def test_bytes_of_a_plan_are_the_sizes_of_the_sources_to_embed(guard, folder, other):
    run(guard, folder)
    work, done = Ingest(guard, Corpus(other), overlap=4), []
    plan = work.plan()
    assert (set(plan.todo), plan.clashing, plan.bytes) == ({"x.txt"}, ("1.txt",), len("another folder"))
    asyncio.run(work.run(plan, done.append))
    assert sum(done) == pytest.approx(plan.bytes)


def test_report_states_that_the_previous_version_stays(guard, folder):
    run(guard, folder)
    (folder / "1.txt").write_bytes(b"\0 binary")
    (problem,) = run(guard, folder).problems
    assert "its previous version stays in the index" in problem.reason


def test_chunks_beyond_the_embedders_maximum_are_refused(guard, folder):
    with pytest.raises(ConfigError, match="rag.chunk.tokens is 41; the embedder reads at most 40 tokens"):
        run(guard, folder, tokens=41)


def test_a_malformed_line_is_reported_and_removes_nothing(guard, tmp_path):
    file = tmp_path / "c.jsonl"
    lines = [json.dumps({"_id": f"r{i}", "text": f"record {i} heron"}) for i in range(5)]
    file.write_text("\n".join(lines))
    run(guard, file)
    lines[3] = lines[3][:-5]
    file.write_text("\n".join(lines))
    report = run(guard, file)
    assert [p.where for p in report.problems] == ["c.jsonl:4"]
    assert not report.complete
    assert (report.unchanged, report.removed) == (4, 0)
    assert "r3" in sources(guard)  # the new text is unknown, so the previous one stays


def test_an_unreadable_file_keeps_its_indexed_version(guard, folder):
    run(guard, folder)
    (folder / "1.txt").write_bytes(b"\0\1\2binary")
    report = run(guard, folder)
    assert [p.where for p in report.problems] == ["1.txt"]
    assert "1.txt" in sources(guard)


def test_a_damaged_gzip_keeps_its_indexed_records(guard, tmp_path):
    file = tmp_path / "corpus.jsonl.gz"
    data = "\n".join(json.dumps({"_id": f"r{i}", "text": f"record {i} {i * i}"}) for i in range(500)).encode()
    file.write_bytes(gzip.compress(data))
    run(guard, file)
    file.write_bytes(gzip.compress(data)[:-400])
    report = run(guard, file)
    assert not report.complete
    assert len(sources(guard)) == 500


def test_a_gzip_damaged_near_its_beginning_removes_nothing(guard, tmp_path):
    file = tmp_path / "corpus.jsonl.gz"
    data = "\n".join(json.dumps({"_id": f"r{i}", "text": f"record {i} {i * i}"}) for i in range(500)).encode()
    file.write_bytes(gzip.compress(data))
    run(guard, file)
    file.write_bytes(gzip.compress(data)[:500])
    report = run(guard, file)
    assert (report.complete, report.removed, len(sources(guard))) == (False, 0, 500)


def test_batches_contain_whole_sources(guard, folder, monkeypatch):
    monkeypatch.setattr("casemate.rag.ingest.BATCH_CHUNKS", 3)
    calls = []
    add = guard.add

    async def spy(documents, *rest):
        calls.append({d.source for d in documents})
        withheld = await add(documents, *rest)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return withheld

    monkeypatch.setattr(guard, "add", spy)
    with pytest.raises(KeyboardInterrupt):
        run(guard, folder)
    assert sources(guard) == calls[0] | calls[1]
    monkeypatch.setattr(guard, "add", add)
    assert run(guard, folder).unchanged == len(calls[0] | calls[1])
    assert len(sources(guard)) == 6


def test_progress_adds_up_to_the_plan(guard, folder):
    work, done = Ingest(guard, Corpus(folder)), []
    plan = work.plan()
    asyncio.run(work.run(plan, done.append))
    assert sum(done) == pytest.approx(plan.bytes)


def test_cancelling_stops_the_embedding_thread(guard, folder, monkeypatch):
    cancelled, embedded = threading.Event(), []

    def slow(texts, progress=None):
        progress(0)
        assert cancelled.wait(60)
        progress(0)
        embedded.append(texts)

    async def cancel():
        work = Ingest(guard, Corpus(folder))
        task = asyncio.create_task(
            work.run(work.plan(), lambda size: task.get_loop().call_soon_threadsafe(task.cancel))
        )
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()

    monkeypatch.setattr(guard.rag.embedder, "embed", slow)
    asyncio.run(cancel())  # waits for the thread
    assert embedded == []
    assert sources(guard) == set()


def test_cancelling_stops_the_parsing_thread_after_its_current_file(guard, folder, monkeypatch):
    parsing, cancelled, parsed = threading.Event(), threading.Event(), []

    def damaged(path, digest):
        parsed.append(path)
        parsing.set()
        assert cancelled.wait(60)
        raise DataError("damaged")

    async def cancel():
        work = Ingest(guard, Corpus(folder))
        task = asyncio.create_task(work.run(work.plan()))
        await asyncio.to_thread(parsing.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()

    monkeypatch.setattr(corpus, "_parse_file", damaged)
    asyncio.run(cancel())  # waits for the thread
    assert len(parsed) == 1


def test_hits_name_their_source(guard, folder):
    run(guard, folder)
    retrieval, _ = asyncio.run(guard.retrieve(Query("number 4", k=50)))
    assert {h.document.source for h in retrieval.hits} == {f"{i}.txt" for i in range(6)}
    assert all(h.document.id.startswith(f"{h.document.source}#") for h in retrieval.hits)
