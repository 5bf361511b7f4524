"""Malicious files end the parsing process, not the program; the next file is parsed."""

import gzip
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from casemate.errors import DataError
from casemate.rag import parsing_process
from casemate.rag.corpus import MAX_BLANK_LINES, Corpus
from casemate.rag.parsing_process import ParsingProcess, _answer


@pytest.fixture
def parser():
    process = ParsingProcess()
    yield process
    process.close()


def page(text):
    return f"<title>{text}</title><p>{text}".encode()


def pdf_of_one_page(references, words=400):
    """A PDF of about 120 kB that refers to one page many times."""
    stream = b"BT /F1 12 Tf " + b" ".join(b"(word%d) Tj" % i for i in range(words)) + b" ET"
    font = b"<< /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (references, b"3 0 R " * references),
        b"<< /Type /Page /Parent 2 0 R /Resources << /Font %s >> /Contents 4 0 R >>" % font,
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    out, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    end = b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(out)
    return out + b"xref\n0 5\n0000000000 65535 f \n" + table + end


HOSTILE = {
    "references.pdf": lambda: pdf_of_one_page(20_000),
    "nested.html": lambda: b"<div>" * 1_000_000 + b"deep",
    "table.html": lambda: b"<table>" + b"<tr><td>a<td>b" * 2_000_000,
}


def test_many_files_share_one_process(parser):
    assert parser.parse(".html", page("one")) == ("one", "one", {})
    first = parser._process.pid
    assert parser.parse(".html", page("two")) == ("two", "two", {})
    assert parser.parse(".txt", "na\xefve caf\xe9".encode("cp1252"))[1].endswith("caf\xe9")
    assert parser._process.pid == first


def test_each_thread_receives_the_text_of_its_file(parser):
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda i: parser.parse(".html", page(f"page {i}")), range(40)))
    assert answers == [(f"page {i}", f"page {i}", {}) for i in range(40)]


def test_timeout_ends_the_process_and_the_next_file_is_parsed(parser, monkeypatch):
    parser.parse(".html", page("before"))
    monkeypatch.setattr(parsing_process, "SECONDS", 0.2)
    with pytest.raises(DataError, match=r"not parsed within 0\.2 seconds; convert it to plain text, or split it"):
        parser.parse(".html", b"<table>" + b"<tr><td>a<td>b" * 500_000)
    monkeypatch.undo()
    assert parser.parse(".html", page("after")) == ("after", "after", {})


def test_parses_a_file_after_the_process_ended(parser):
    parser.parse(".html", page("before"))
    ended = parser._process
    ended.kill()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended; its exit code is not yet read
    assert parser.parse(".html", page("after")) == ("after", "after", {})


def test_kills_a_waiting_process(parser, monkeypatch):
    parser.parse(".html", page("before"))
    started = parser._process
    monkeypatch.setattr(parsing_process, "WAITING_FACTOR", 0.01)
    os.kill(started.pid, 19)  # SIGSTOP: it uses no CPU time
    with pytest.raises(DataError, match="not parsed within"):
        parser.parse(".html", page("never"))
    monkeypatch.undo()
    assert parser.parse(".html", page("after")) == ("after", "after", {})


def test_error_about_a_process_killed_by_the_system_is_not_a_timeout(parser):
    parser.parse(".html", page("before"))
    started = parser._process
    os.kill(started.pid, 19)  # SIGSTOP: it is still waiting when it is killed, like by an out-of-memory kill
    killer = threading.Timer(0.3, started.kill)
    killer.start()
    with pytest.raises(DataError, match="the system killed the parser, as it does when memory is short"):
        parser.parse(".html", page("never"))
    assert parser.parse(".html", page("after")) == ("after", "after", {})


def test_interruption_does_not_return_the_text_of_another_file(parser, monkeypatch):
    def interrupted(*arguments):
        process, _, raw = arguments  # sends the request; the interrupt precedes the reply
        for part in (b'{"kind": ".html", "seconds": 4}', raw):
            process.stdin.write(parsing_process._LENGTH.pack(len(part)) + part)
        process.stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(parsing_process, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parser.parse(".html", page("first"))
    monkeypatch.undo()
    assert parser.parse(".html", page("second")) == ("second", "second", {})


def test_forked_process_starts_its_own_parser(parser, monkeypatch):
    parser.parse(".html", page("parent"))
    first = parser._process
    monkeypatch.setattr(parsing_process.os, "getpid", lambda: -1)
    assert parser.parse(".html", page("child")) == ("child", "child", {})
    assert parser._process.pid != first.pid
    parser.close()
    monkeypatch.undo()
    first.stdin.close()
    first.stdout.close()
    first.wait()


def test_does_not_import_files_of_the_current_folder(parser, monkeypatch, tmp_path):
    for name in ("pypdf", "bs4", "json", "casemate"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert parser.parse(".html", page("text")) == ("text", "text", {})
    assert not (tmp_path / "executed").exists()


def test_reports_memory_limit_output_limit_and_damaged_files(monkeypatch):
    def out_of_memory(raw):
        raise MemoryError

    monkeypatch.setattr(parsing_process, "READERS", {".a": out_of_memory, ".b": lambda raw: ("", "x" * 11, {})})
    monkeypatch.setattr(parsing_process, "TEXT_CHARACTERS", 10)
    assert "takes more than 2 GB of memory" in _answer(".a", b"")["problem"]
    assert "more than 10 characters of text" in _answer(".b", b"")["problem"]
    monkeypatch.undo()
    assert "cannot be read" in _answer(".pdf", b"no pdf")["problem"]


def test_process_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(parsing_process.sys, "executable", "/bin/false")
    with pytest.raises(DataError, match="the parser ended with exit code 1"):
        ParsingProcess().parse(".html", page("text"))


def test_too_many_blank_lines_end_a_file_of_records(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"_id": "a", "text": "b"}\n' + b"\n" * (MAX_BLANK_LINES + 1))
    corpus = Corpus(tmp_path)
    assert [source.name for source in corpus.sources()] == ["a"]
    assert "more than 100,000 blank lines in a row" in corpus.problems[0].reason
    assert corpus.incomplete


def test_stops_reading_a_compressed_file_that_expands_too_much(tmp_path):
    with gzip.open(tmp_path / "x.jsonl.gz", "wb") as file:
        for _ in range(170):
            file.write(b"x" * 1_000_000)
    corpus = Corpus(tmp_path, max_mb=1)
    assert list(corpus.sources()) == []
    assert [p.where for p in corpus.problems] == ["x.jsonl.gz:1", "x.jsonl.gz"]
    assert "expands to more than 200 times its size" in corpus.problems[1].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_malicious_files_time_out_and_the_next_file_is_parsed(tmp_path, name):
    (tmp_path / name).write_bytes(HOSTILE[name]())
    (tmp_path / "z.html").write_bytes(page("harmless"))
    hostile, harmless = Corpus(tmp_path).sources()
    with pytest.raises(DataError, match="not parsed within 4 seconds"):
        hostile.parse()
    assert harmless.parse() == ("harmless", "harmless", {})
