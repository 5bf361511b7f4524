import asyncio
import gzip
import json

import pytest

from casemate.backends.sqlite import SqliteIndex
from casemate.corpus import Corpus
from casemate.errors import ConfigError, DataError
from casemate.guard import Guard
from casemate.ingest import Ingest
from casemate.rag import Rag
from casemate.types import Document, Query
from tests.fakes import BagOfWords, Parrot


@pytest.fixture
def guard(tmp_path):
    index = SqliteIndex(tmp_path / "index.db")
    yield Guard(Rag(BagOfWords(), index, Parrot()), [])
    index.close()


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "docs"
    place.mkdir()
    for i in range(6):
        (place / f"{i}.txt").write_text(f"text number {i} " + "amber birch " * 30)
    return place


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


def test_only_what_changed_is_embedded(guard, folder):
    run(guard, folder)
    guard.rag.embedder.texts.clear()
    (folder / "3.txt").write_text("a new text about herons")
    report = run(guard, folder)
    assert (report.indexed, report.unchanged) == (1, 5)
    assert guard.rag.embedder.texts == ["a new text about herons"]
    assert [h.document.source for h in guard.rag.index.search(guard.rag.embedder.embed(["herons"])[0], 1).hits] == [
        "3.txt"
    ]


def test_what_is_gone_is_removed_with_all_its_chunks(guard, folder):
    run(guard, folder)
    (folder / "2.txt").unlink()
    assert run(guard, folder).removed == 1
    assert sources(guard) == {f"{i}.txt" for i in (0, 1, 3, 4, 5)}
    assert guard.rag.index.check() == []


def test_cutting_differently_indexes_anew(guard, folder):
    run(guard, folder)
    assert run(guard, folder, tokens=20).indexed == 6


def test_most_of_a_folder_is_not_removed_without_being_told(guard, folder):
    run(guard, folder)
    for i in range(4):
        (folder / f"{i}.txt").unlink()
    with pytest.raises(DataError, match="4 of 6 sources.*--gone remove"):
        run(guard, folder)
    assert len(sources(guard)) == 6
    assert run(guard, folder, gone="keep").kept == 4
    assert run(guard, folder, gone="remove").removed == 4
    assert sources(guard) == {"4.txt", "5.txt"}


def test_what_another_corpus_or_a_program_added_is_not_gone(guard, folder, tmp_path):
    asyncio.run(guard.add([Document("api", "added by a program")]))
    run(guard, folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.txt").write_text("another folder")
    assert run(guard, other).removed == 0
    assert run(guard, folder).removed == 0
    assert len(sources(guard)) == 8
    assert run(guard, other, gone="remove").removed == 6
    assert sources(guard) == {"x.txt", "api"}


def test_a_folder_that_was_moved_is_still_the_same_corpus(guard, folder):
    run(guard, folder)
    moved = folder.rename(folder.with_name("records"))
    (moved / "1.txt").unlink()
    report = run(guard, moved)
    assert (report.unchanged, report.removed) == (5, 1)
    assert "1.txt" not in sources(guard)


def test_a_name_that_another_corpus_has_is_not_written_over(guard, folder, tmp_path):
    run(guard, folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "1.txt").write_text("something else of the same name")
    report = run(guard, other)
    assert [(p.where, report.complete) for p in report.problems] == [("1.txt", False)]
    texts = {h.document.text for h in guard.rag.index.search(guard.rag.embedder.embed(["else"])[0], 99).hits}
    assert "something else of the same name" not in texts


def test_a_text_that_cannot_be_read_any_more_is_said_to_be_answered_still(guard, folder):
    run(guard, folder)
    (folder / "1.txt").write_bytes(b"\0 binary")
    (problem,) = run(guard, folder).problems
    assert "what was indexed of it before is still answered" in problem.reason


def test_chunks_longer_than_the_embedder_reads_are_refused(guard, folder):
    with pytest.raises(ConfigError, match="rag.chunk.tokens is 41, and the embedder reads 40"):
        run(guard, folder, tokens=41)


def test_a_malformed_line_is_named_the_rest_indexed_and_nothing_removed(guard, tmp_path):
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
    assert "r3" in sources(guard)  # its new text is unknown: the old one stays


def test_a_file_that_cannot_be_read_keeps_what_was_indexed_of_it(guard, folder):
    run(guard, folder)
    (folder / "1.txt").write_bytes(b"\0\1\2binary")
    report = run(guard, folder)
    assert [p.where for p in report.problems] == ["1.txt"]
    assert "1.txt" in sources(guard)


def test_a_damaged_gzip_keeps_what_was_indexed(guard, tmp_path):
    file = tmp_path / "corpus.jsonl.gz"
    data = "\n".join(json.dumps({"_id": f"r{i}", "text": f"record {i} {i * i}"}) for i in range(500)).encode()
    file.write_bytes(gzip.compress(data))
    run(guard, file)
    file.write_bytes(gzip.compress(data)[:-400])
    report = run(guard, file)
    assert not report.complete
    assert len(sources(guard)) == 500


def test_a_gzip_damaged_near_its_beginning_is_no_purge(guard, tmp_path):
    file = tmp_path / "corpus.jsonl.gz"
    data = "\n".join(json.dumps({"_id": f"r{i}", "text": f"record {i} {i * i}"}) for i in range(500)).encode()
    file.write_bytes(gzip.compress(data))
    run(guard, file)
    file.write_bytes(gzip.compress(data)[:500])
    report = run(guard, file)
    assert (report.complete, report.removed, len(sources(guard))) == (False, 0, 500)


def test_a_window_holds_whole_sources_so_that_none_is_half_there(guard, folder, monkeypatch):
    monkeypatch.setattr("casemate.ingest.WINDOW", 3)
    calls = []
    add = guard.add

    async def spy(documents, *rest):
        calls.append({d.source for d in documents})
        await add(documents, *rest)
        if len(calls) == 2:
            raise KeyboardInterrupt

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
    ticks = []

    def slow(texts, progress=None):
        for _ in range(10_000):
            ticks.append(1)
            progress(0)
        raise AssertionError("was not stopped")

    async def cancelled():
        work = Ingest(guard, Corpus(folder))
        task = asyncio.create_task(
            work.run(work.plan(), lambda size: task.get_loop().call_soon_threadsafe(task.cancel))
        )
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(guard.rag.embedder, "embed", slow)
    asyncio.run(cancelled())
    assert len(ticks) < 10_000
    assert sources(guard) == set()


def test_hits_know_the_source_they_were_cut_from(guard, folder):
    run(guard, folder)
    retrieval, _ = asyncio.run(guard.retrieve(Query("number 4", k=50)))
    assert {h.document.source for h in retrieval.hits} == {f"{i}.txt" for i in range(6)}
    assert all(h.document.id.startswith(f"{h.document.source}#") for h in retrieval.hits)
