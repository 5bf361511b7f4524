import gzip
import hashlib
import io
import json
import os
import pickle
import time
import tracemalloc
import warnings
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import DataError
from casemate.rag.corpus import OUTSIDE, Corpus, Problem

LINES = [{"_id": "a", "title": "A", "text": "alpha"}, {"_id": "b", "text": "beta"}]


def jsonl(*records):
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records).encode()


def write_files(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def read(path, **options):
    corpus = Corpus(path, **options)
    return corpus, list(corpus.sources())


def names(sources):
    return [source.name for source in sources]


def parsed(tmp_path, name, content):
    corpus, sources = read(write_files(tmp_path, {name: content}))
    assert corpus.problems == []
    (source,) = sources
    title, text, metadata = source.parse()
    assert not metadata or content[:3] == "---"
    return title, text


def failure(tmp_path, name, content):
    (source,) = read(write_files(tmp_path, {name: content}))[1]
    with pytest.raises(DataError) as caught:
        source.parse()
    return str(caught.value)


def pdf(*pages, info="", extra=""):
    """A PDF with one line per page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    objects.append(f"<< {info} >>")
    out, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    start, size = len(out), len(objects) + 1
    out += f"xref\n0 {size}\n0000000000 65535 f \n{table}"
    out += f"trailer << /Size {size} /Root 1 0 R /Info {size - 1} 0 R {extra}>>\nstartxref\n{start}\n%%EOF"
    return out.encode()


# Folders


def test_folder_yields_its_files_in_order_and_then_records(tmp_path):
    write_files(
        tmp_path,
        {
            "b.txt": "b",
            "a/z.MD": "z",
            "a/b/c.html": "c",
            "a.txt": "a",
            ".hidden.txt": "no",
            ".git/x.txt": "no",
            "image.png": b"\x89PNG",
            "README": "no ending",
            "l.jsonl": jsonl(*LINES),
        },
    )
    corpus, sources = read(tmp_path)
    assert names(sources) == ["a/b/c.html", "a/z.MD", "a.txt", "b.txt", "a", "b"]
    assert (corpus.problems, corpus.unread, corpus.incomplete, corpus.ignored) == ([], set(), False, 2)
    assert corpus.ignored_types == {".png": 1}
    first = sources[2]
    assert (first.digest, first.size) == (hashlib.sha256(b"a").hexdigest(), 1)
    assert first.parse() == ("", "a", {})
    assert first == pickle.loads(pickle.dumps(first))
    assert pickle.loads(pickle.dumps(first)).parse() == ("", "a", {})


def test_each_iteration_reads_the_disk_again(tmp_path):
    write_files(tmp_path, {"a.txt": "a", "b.txt": "", "c.bin": "", "d.jsonl": "["})
    corpus, sources = read(tmp_path)
    before = corpus.problems, corpus.ignored, corpus.incomplete
    assert (len(before[0]), before[1:]) == (2, (1, True))
    assert list(corpus.sources()) == sources
    assert (corpus.problems, corpus.ignored, corpus.incomplete) == before
    write_files(tmp_path, {"b.txt": "b", "d.jsonl": jsonl(*LINES)})
    assert len(list(corpus.sources())) == 4
    assert (corpus.problems, corpus.incomplete) == ([], False)


@pytest.mark.parametrize("name", ["x.txt", ".x.md", "x.jsonl"])
def test_single_file_is_read_regardless_of_its_siblings(tmp_path, name):
    write_files(tmp_path, {name: jsonl({"_id": name, "text": "t"}), "other.txt": "o"})
    assert names(read(tmp_path / name)[1]) == [name]


def test_single_file_can_be_a_link_or_a_relative_path(tmp_path, monkeypatch):
    write_files(tmp_path, {"real/x.txt": "x"})
    (tmp_path / "link.txt").symlink_to("real/x.txt")
    assert names(read(tmp_path / "link.txt")[1]) == ["link.txt"]
    monkeypatch.chdir(tmp_path)
    corpus = Corpus(Path("real"))
    monkeypatch.chdir("/")
    assert names(corpus.sources()) == ["x.txt"]


def test_a_corpus_without_readable_files_is_refused(tmp_path):
    with pytest.raises(DataError, match="no file or folder at .*absent"):
        Corpus(tmp_path / "absent")
    with pytest.raises(DataError, match=r"contains no file of a known type .*\.pdf"):
        Corpus(tmp_path)
    write_files(tmp_path, {"x.docx": "x", ".y.txt": "y"})
    for path in (tmp_path, tmp_path / "x.docx"):
        with pytest.raises(DataError, match="contains no file of a known type"):
            Corpus(path)


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_beir_folder_yields_only_the_records_of_its_corpus(tmp_path, name):
    content = jsonl(*LINES)
    write_files(tmp_path, {name: gzip.compress(content) if name.endswith("gz") else content, "queries.jsonl": content})
    write_files(tmp_path, {"qrels/test.tsv": "q", "notes.txt": "n"})
    corpus, sources = read(tmp_path)
    assert names(sources) == ["a", "b"]
    assert (corpus.problems, corpus.ignored) == ([], 3)


def test_beir_subfolder_yields_only_the_records_of_its_corpus(tmp_path):
    write_files(tmp_path, {"set/corpus.jsonl": jsonl(*LINES), "set/queries.jsonl": jsonl({"_id": "q", "text": "q"})})
    write_files(tmp_path, {"set/corpus.jsonl.gz": b"not read", "x.txt": "x"})
    corpus, sources = read(tmp_path)
    assert names(sources) == ["a", "b", "x.txt"]
    assert corpus.problems == []


def test_links_inside_the_corpus_are_read_once_and_others_are_problems(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_files(outside, {"o.txt": "o", "d/p.txt": "p"})
    write_files(root, {"z/a.txt": "a", ".data/k.txt": "k", "plain": "p"})
    for link, target in {
        "loop": ".",
        "z/up": "..",
        "self.txt": "self.txt",
        "a_same": "z",
        "a_same.txt": "z/a.txt",
        "k.txt": ".data/k.txt",
        "kind.txt": "plain",
        "out": outside,
        "out.txt": outside / "o.txt",
        "out.png": outside / "o.txt",
        "nowhere": "nothing",
        "nowhere.txt": "nothing.txt",
        "root2": root,
    }.items():
        (root / link).symlink_to(target)
    corpus, sources = read(root)
    assert names(sources) == ["z/a.txt", "k.txt", "kind.txt"]
    wrong = {p.where: p.reason for p in corpus.problems}
    assert set(wrong) == {"self.txt", "out", "out.txt", "nowhere.txt"}
    assert "not followed" in wrong["out"]
    assert "No such file" in wrong["nowhere.txt"]
    assert corpus.unread == set(wrong)
    assert not corpus.incomplete
    assert corpus.ignored == 3  # plain, out.png, nowhere


def test_hard_links_to_files_outside_are_not_read(tmp_path):
    write_files(
        tmp_path, {"outside/secret.txt": "s", "outside/r.jsonl": '{"_id": "r", "text": "r"}', "root/b.txt": "b"}
    )
    root = tmp_path / "root"
    for name in ("secret.txt", "r.jsonl"):
        os.link(tmp_path / "outside" / name, root / name)
    os.link(tmp_path / "outside/secret.txt", root / "picture.png")
    corpus, sources = read(root)
    assert names(sources) == ["b.txt"]
    assert {p.where for p in corpus.problems} == {"secret.txt", "r.jsonl"}
    assert all(
        "of its hard links are hidden or outside" in p.reason and "copy the file here" in p.reason
        for p in corpus.problems
    )
    assert "secret.txt" in corpus.unread
    assert corpus.incomplete  # the number of records in r.jsonl is unknown
    assert corpus.ignored == 1


def test_hard_links_within_the_corpus_are_read(tmp_path):
    write_files(tmp_path, {"a.txt": "a", "b/c.txt": "c", "z.txt": "z"})
    os.link(tmp_path / "a.txt", tmp_path / "b" / "same.txt")
    os.link(tmp_path / "z.txt", tmp_path / "plain")
    corpus, sources = read(tmp_path)
    assert sorted(names(sources)) == ["a.txt", "b/c.txt", "b/same.txt", "z.txt"]
    assert corpus.problems == []


def test_a_single_file_may_have_hard_links(tmp_path):
    write_files(tmp_path, {"a.txt": "a"})
    os.link(tmp_path / "a.txt", tmp_path / "b.txt")
    assert names(read(tmp_path / "a.txt")[1]) == ["a.txt"]


def test_link_to_a_sibling_whose_name_starts_with_the_root_is_outside(tmp_path):
    write_files(tmp_path, {"root/a.txt": "a", "root2/b.txt": "b"})
    (tmp_path / "root" / "b.txt").symlink_to(tmp_path / "root2" / "b.txt")
    assert names(read(tmp_path / "root")[1]) == ["a.txt"]


def test_linked_folders_are_read_once(tmp_path):
    for i in range(12):  # each links to all others, so the number of paths is exponential
        write_files(tmp_path, {f".d{i}/f{i}.txt": "x"})
        for j in range(12):
            (tmp_path / f".d{i}" / f"to{j}").symlink_to(tmp_path / f".d{j}")
    (tmp_path / "in").symlink_to(".d0")
    assert sorted(n.rpartition("/")[2] for n in names(read(tmp_path)[1])) == sorted(f"f{i}.txt" for i in range(12))


def test_special_files_are_never_opened(tmp_path):
    write_files(tmp_path, {"a.txt": "a"})
    for name in ("pipe.txt", "pipe.jsonl", "corpus.jsonl"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "link.txt").symlink_to("pipe.txt")
    (tmp_path / "null.txt").symlink_to("/dev/zero")
    corpus, sources = read(tmp_path)
    assert names(sources) == ["a.txt"]
    assert corpus.ignored == 4
    with pytest.raises(DataError, match="no file or folder"):
        Corpus(tmp_path / "pipe.txt")


def test_names_with_control_characters_and_invalid_bytes_are_replaced(tmp_path):
    write_files(tmp_path, {"new\nline #1.txt": "n", "ünï/日本.txt": "u"})
    for raw in (b"bad\xff.txt", b"bad\xfe.txt", b"dir\xff/x.txt"):
        path = os.path.join(os.fsencode(tmp_path), raw)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(os.fsdecode(path)).write_text("x")
        except OSError:
            pytest.skip("the file system takes no such names")
    corpus, sources = read(tmp_path)
    assert names(sources) == ["bad\ufffd.txt", "dir\ufffd/x.txt", "new\ufffdline #1.txt", "ünï/日本.txt"]
    assert [s.parse()[1] for s in sources] == ["x", "x", "n", "u"]
    (problem,) = corpus.problems
    assert problem.where == "bad\ufffd.txt"
    assert "a second" in problem.reason
    (problem.where + problem.reason).encode()


@pytest.mark.parametrize("swapped", ["b.txt", "d"])
def test_a_file_that_becomes_a_link_after_its_folder_was_listed_is_not_followed(tmp_path, swapped):
    write_files(tmp_path / "outside", {"b.txt": "secret", "x.txt": "secret"})
    write_files(tmp_path / "in", {"a.txt": "a", "b.txt": "b", "d/x.txt": "x", "e.jsonl": jsonl(LINES[0])})
    corpus = Corpus(tmp_path / "in")
    found = corpus.sources()
    texts = [next(found).parse()[1]]
    (tmp_path / "in" / swapped).rename(tmp_path / "before")
    target = tmp_path / "outside"
    (tmp_path / "in" / swapped).symlink_to(target if swapped == "d" else target / swapped)
    texts += [source.parse()[1] for source in found]
    assert "secret" not in texts and len(texts) == 3
    assert {p.reason for p in corpus.problems} == {OUTSIDE}


def test_names_contain_no_line_breaks_or_control_characters(tmp_path):
    write_files(
        tmp_path, {"a.txt\nindexed 99 sources\x1b[2J.txt": "n", "r.jsonl": jsonl({"_id": "7\r\n8\x85", "text": "t"})}
    )
    _, sources = read(tmp_path)
    assert names(sources) == ["a.txt\ufffdindexed 99 sources\ufffd[2J.txt", "7\ufffd\ufffd8\ufffd"]
    assert sources[0].parse()[1] == "n"


def test_ten_thousand_files_are_read_in_order(tmp_path):
    for i in range(10_000):
        (tmp_path / f"{i:05}.txt").write_bytes(b"x")
    corpus, sources = read(tmp_path)
    assert len(sources) == 10_000
    assert names(sources) == sorted(names(sources))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_read_permission_are_problems(tmp_path):
    write_files(tmp_path, {"a.txt": "a", "secret.txt": "s", "r.jsonl": jsonl(*LINES), "d/x.txt": "x", "e/y.txt": "y"})
    modes = {"secret.txt": 0, "r.jsonl": 0, "d": 0, "e": 0o400}
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    try:
        corpus, sources = read(tmp_path)
        with pytest.raises(DataError, match="may not be read"):
            Corpus(tmp_path / "d")
        with pytest.raises(DataError, match="may not be read"):
            Corpus(tmp_path / "secret.txt")
    finally:
        for name in modes:
            (tmp_path / name).chmod(0o700)
    assert names(sources) == ["a.txt"]
    assert {p.where for p in corpus.problems} == {"secret.txt", "r.jsonl", "d", "e/y.txt"}
    assert {"secret.txt", "e/y.txt"} <= corpus.unread
    assert corpus.incomplete


def test_deleted_files_and_folders_are_problems(tmp_path):
    write_files(tmp_path, {"a.txt": "a", "b.txt": "b", "d/c.txt": "c"})
    corpus = Corpus(tmp_path)
    sources = corpus.sources()
    assert next(sources).name == "a.txt"
    (tmp_path / "b.txt").unlink()
    (tmp_path / "d" / "c.txt").unlink()
    (tmp_path / "d").rmdir()
    assert list(sources) == []
    assert {p.where for p in corpus.problems if "No such file" in p.reason} == {"b.txt", "d"}
    assert "b.txt" in corpus.unread
    assert corpus.incomplete


def test_deleted_root_folder_makes_the_corpus_incomplete(tmp_path):
    corpus = Corpus(write_files(tmp_path / "root", {"a.txt": "a"}))
    (tmp_path / "root" / "a.txt").unlink()
    (tmp_path / "root").rmdir()
    assert list(corpus.sources()) == []
    assert corpus.problems[0].where == "."
    assert corpus.incomplete


def test_file_deleted_or_changed_before_parsing_is_an_error(tmp_path):
    _, (a, b) = read(write_files(tmp_path, {"a.txt": "a", "b.txt": "b"}))
    (tmp_path / "a.txt").unlink()
    write_files(tmp_path, {"b.txt": "B"})
    with pytest.raises(DataError, match="No such file"):
        a.parse()
    with pytest.raises(DataError, match="changed"):
        b.parse()


def test_empty_and_oversized_files_are_problems(tmp_path):
    write_files(tmp_path, {"empty.txt": "", "blank.md": " \n", "huge.txt": "x" * 20_001, "fits.txt": "y" * 20_000})
    write_files(tmp_path, {"empty.jsonl": "", "blank.jsonl": "\n\n"})
    corpus, sources = read(tmp_path, max_mb=0.02)
    assert names(sources) == ["fits.txt"]
    kinds = {p.where: (p.harmless, p.reason) for p in corpus.problems}
    assert kinds["empty.txt"] == kinds["blank.md"] == kinds["empty.jsonl"] == (True, "empty")
    assert kinds["huge.txt"][1].startswith("0.02 MB, more than max_file_mb (0.02 MB)")
    assert len(kinds) == 4
    assert (corpus.unread, corpus.incomplete) == ({"huge.txt"}, False)


# Records


def test_record_fields_become_name_title_text_and_metadata(tmp_path):
    write_files(
        tmp_path,
        {
            "r.jsonl": jsonl(
                {
                    "_id": "a",
                    "id": 9,
                    "title": "T",
                    "text": "x",
                    "url": "u",
                    "metadata": {"url": "v", "y": [1]},
                },
                {"id": 7, "title": None, "text": "", "metadata": "m"},
                {"id": 7, "title": "only", "text": ""},
                "",
                {"_id": 8, "text": "t"},
            )
        },
    )
    corpus, sources = read(tmp_path)
    assert [(s.name, *s.parse()) for s in sources] == [
        ("a", "T", "x", {"id": 9, "url": "u", "y": [1]}),
        ("7", "only", "", {}),
        ("8", "", "t", {}),
    ]
    assert corpus.problems == [Problem("r.jsonl:2", "empty: neither text nor title", harmless=True)]
    assert sources[0].size == len((tmp_path / "r.jsonl").read_bytes().split(b"\n")[0]) + 1


def test_digest_depends_on_the_content_only(tmp_path):
    same = ['{"_id": "1", "text": "é", "n": 1}', '{ "n":1,"text":"\\u00e9","_id":"1" }']
    found = []
    for line in (*same, '{"_id": "1", "text": "é", "n": 2}'):
        found.append(read(write_files(tmp_path, {"r.jsonl": jsonl(line)}))[1][0].digest)
    assert found[0] == found[1] != found[2]
    canonical = '{"_id":"1","n":1,"text":"é"}'
    assert found[0] == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(
    ("line", "unread", "unknown"),
    [
        ("{", set(), True),
        ("[1]", set(), True),
        ("7", set(), True),
        ("[" * 100_000, set(), True),
        ('{"_id": "c", "text": "t", "m": ' + "[" * 2_000 + "]" * 2_000 + "}", set(), True),
        ('{"text": "t"}', set(), True),
        ('{"_id": "", "text": "t"}', set(), True),
        ('{"_id": true, "text": "t"}', set(), True),
        ('{"_id": 1.5, "text": "t"}', set(), True),
        ('{"_id": ["c"], "text": "t"}', set(), True),
        ('{"_id": "%s", "text": "t"}' % ("c" * 600), set(), True),
        ('{"_id": ' + "9" * 5000 + ', "text": "t"}', set(), True),
        ('{"_id": "c"}', {"c"}, False),
        ('{"_id": "c", "text": null}', {"c"}, False),
        ('{"_id": "c", "text": ["t"]}', {"c"}, False),
        ('{"_id": "c", "text": "t", "title": 5}', {"c"}, False),
        ('{"_id": "c", "text": " ", "title": "\\n"}', set(), False),
        ('{"_id": "a", "title": "A", "text": "alpha"}', set(), False),
        ('{"_id": "a", "text": "other"}', set(), False),
    ],
)
def test_invalid_line_does_not_prevent_reading_of_others(tmp_path, line, unread, unknown):
    write_files(tmp_path, {"r.jsonl": jsonl(LINES[0], line, LINES[1])})
    corpus, sources = read(tmp_path)
    assert names(sources) == ["a", "b"]
    assert sources[0].parse()[1] == "alpha"
    (problem,) = corpus.problems
    assert problem.where == "r.jsonl:2"
    assert len(problem.reason) < 300
    assert (corpus.unread, corpus.incomplete) == (unread, unknown)


def test_line_with_invalid_utf8_is_a_problem(tmp_path):
    first = b"\xef\xbb\xbf" + jsonl({"_id": 1, "text": "t"})
    write_files(tmp_path, {"r.jsonl": first + b'{"_id": 2, "text": "\xff"}\n{"_id": 3, "text": "t"}'})
    corpus, sources = read(tmp_path)
    assert names(sources) == ["1", "3"]
    assert [p.where for p in corpus.problems] == ["r.jsonl:2"]


def test_duplicate_ids_across_files_are_problems(tmp_path):
    write_files(
        tmp_path,
        {"a.jsonl": jsonl(*LINES), "b.jsonl": jsonl(*LINES, {"_id": "c.txt", "text": "c"}), "c.txt": "c"},
    )
    corpus, sources = read(tmp_path)
    assert names(sources) == ["a", "b", "c.txt"]
    assert [p.where for p in corpus.problems] == ["b.jsonl:1", "b.jsonl:2", "c.txt"]
    assert not corpus.unread


def test_surrogates_and_control_characters_in_records_are_replaced(tmp_path):
    line = '{"_id": "i\\ud800\\u0000", "title": "\\udc00t", "text": "a\\u0000b\\ud83d\\ude00", '
    line += '"\\ud800": NaN, "x": [1e999]}'
    (source,) = read(write_files(tmp_path, {"r.jsonl": jsonl(line)}))[1]
    assert source.name == "i\ufffd "
    assert source.parse() == ("\ufffdt", "a b😀", {"\ufffd": None, "x": [None]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
)


@pytest.mark.slow
@given(st.lists(JSON.map(json.dumps) | st.fixed_dictionaries({"_id": JSON, "text": JSON}).map(json.dumps) | st.text()))
def test_any_lines_yield_valid_records_or_problems(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "r.jsonl"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    corpus, sources = read(path)
    for source in sources:
        title, text, metadata = source.parse()
        assert (title + text).strip()
        json.dumps([source.name, title, text, metadata], allow_nan=False, ensure_ascii=False).encode()
        assert "\0" not in title + text + source.name
    assert len(set(names(sources))) == len(sources)
    written = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    assert len(sources) + len([p for p in corpus.problems if p.where != "r.jsonl"]) == len(written)


def peak_mb(path, **options):
    corpus = Corpus(path, **options)
    tracemalloc.start()
    count = sum(1 for _ in corpus.sources())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return count, corpus, peak / 1e6


def test_records_are_streamed(tmp_path):
    with gzip.open(tmp_path / "r.jsonl.gz", "wb", 1) as file:
        for i in range(5000):
            file.write(jsonl({"_id": i, "text": "x" * 5000}))
    count, _, peak = peak_mb(tmp_path)
    assert count == 5000
    assert peak < 3


def test_long_lines_are_not_kept_in_memory(tmp_path):
    long = b'{"_id": 1, "text": "' + b"x" * 20_000_000 + b'"}\n'
    content = long + jsonl(*LINES) + long[:-1]
    for name, data in {"r.jsonl": content, "r.jsonl.gz": gzip.compress(content, 1)}.items():
        count, corpus, peak = peak_mb(write_files(tmp_path / name, {name: data}), max_mb=0.1)
        assert (count, corpus.incomplete, peak < 5) == (2, True, True)
        assert [p.where for p in corpus.problems] == [f"{name}:1", f"{name}:4"]
        assert "max_file_mb (0.1 MB)" in corpus.problems[0].reason


def test_line_over_the_size_limit_is_not_read(tmp_path):
    for extra, count in ((0, 1), (1, 0)):
        line = jsonl({"_id": 1, "text": "x"}).strip()
        write_files(tmp_path, {"r.jsonl": line + b" " * (1000 - len(line) + extra)})
        assert len(read(tmp_path, max_mb=0.001)[1]) == count


DATA = gzip.compress(jsonl(*({"_id": i, "text": os.urandom(500).hex()} for i in range(500))))


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (DATA[: len(DATA) // 2], 100),
        (DATA[:-4], 499),
        (DATA[:-8] + b"\0" * 8, 499),
        (DATA + b"garbage", 499),
        (DATA[: len(DATA) // 2] + b"\xff" * 40 + DATA[len(DATA) // 2 + 40 :], 0),
        (b"no gzip", 0),
        (b"", 0),
    ],
)
def test_damaged_gzip_yields_the_readable_records_and_a_problem(tmp_path, data, least):
    corpus, sources = read(write_files(tmp_path, {"r.jsonl.gz": data, "z.txt": "z"}))
    assert names(sources)[-1] == "z.txt"
    assert len(sources) > least
    assert corpus.incomplete
    assert any(p.where == "r.jsonl.gz" and "cannot be read" in p.reason for p in corpus.problems)
    assert not any(p.harmless for p in corpus.problems)


def test_concatenated_gzip_is_read_and_empty_gzip_is_a_problem(tmp_path):
    write_files(
        tmp_path,
        {"a.jsonl.gz": gzip.compress(b""), "b.jsonl.gz": gzip.compress(b"\n") + gzip.compress(jsonl(*LINES))},
    )
    corpus, sources = read(tmp_path)
    assert names(sources) == ["a", "b"]
    assert corpus.problems == [Problem("a.jsonl.gz", "empty", harmless=True)]


# Text


GERMAN = "Der Bär fährt über die Straße. Größe und Übermut tun selten gut.\n"


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"],
)
def test_unicode_and_western_encodings_are_detected(tmp_path, encoding):
    assert parsed(tmp_path, "x.txt", GERMAN.encode(encoding)) == ("", GERMAN)


@pytest.mark.parametrize("bom", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_of_either_byte_order_is_decoded(tmp_path, bom):
    content = bom + GERMAN.encode("utf-16-le" if bom[0] == 0xFF else "utf-16-be")
    assert parsed(tmp_path, "x.txt", content)[1] == GERMAN


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Привет, как дела? Это тест кодировки.", "koi8_r"),
        ("日本語のテキストです。これは試験です。", "shift_jis"),
        ("这是一个中文文本的例子。", "gb18030"),
    ],
)
def test_cyrillic_and_asian_encodings_are_detected(tmp_path, text, encoding):
    assert parsed(tmp_path, "x.txt", text.encode(encoding))[1] == text


def test_line_ends_are_normalized_and_null_bytes_replaced(tmp_path):
    assert parsed(tmp_path, "x.txt", "a\r\nb\rc\n" + "x" * 9000 + "\0y") == (
        "",
        "a\nb\nc\n" + "x" * 9000 + " y",
    )


@pytest.mark.parametrize("name", ["x.txt", "x.md", "x.html"])
def test_binary_file_and_unknown_encoding_are_errors(tmp_path, name):
    assert "binary" in failure(tmp_path, name, b"PK\3\4\0\0rest")
    assert "encoding" in failure(tmp_path, name, b"\xff\xfea")
    noise = zlib.compress(os.urandom(30_000)).replace(b"\0", b"")
    assert "encoding" in failure(tmp_path, name, noise)


@pytest.mark.parametrize(
    ("content", "title", "text"),
    [
        ("intro\n# Title #\nbody\n# Second", "Title", "intro\nbody\n# Second"),
        ("# C#\nbody", "C#", "body"),
        ("## Sub\n#no\nbody", "", "## Sub\n#no\nbody"),
        ("```sh\n# comment\n~~~\n# no\n```\n# Yes\nb", "Yes", "```sh\n# comment\n~~~\n# no\n```\nb"),
        ("---\ntitle: 'Front'\ntags: [a]\n---\n# Head\nb", "Front", "# Head\nb"),
        ("---\r\ndate: 1\r\n---\r\n# Head\r\nb", "Head", "b"),
        ("---\ntitle:\nx: y\n...\nb", "", "b"),
        ("---\n\nrule above\n\n---\nb", "", "---\n\nrule above\n\n---\nb"),
        ("---\nkey: open\nb", "", "---\nkey: open\nb"),
        ("# Only", "Only", ""),
    ],
)
def test_markdown_heading_is_the_title(tmp_path, content, title, text):
    assert parsed(tmp_path, "x.md", content) == (title, text)


def test_html_is_converted_to_text(tmp_path):
    page = """<?xml version="1.0"?><!DOCTYPE html><html><head><title> The
    title </title><style>css</style><script>js()</script></head><body><nav>menu</nav><!-- no -->
    <h1>Head</h1><p>One <b>bo</b>ld &amp; <a href=x>link</a>,
    wrapped.</p><p>Two<br>lines</p><ul><li>i<li>j</ul><template>t</template>
    <table><tr><td>1</td><td>2</td></tr></table><div><div>deep</div></div>tail&nbsp;end</body></html>"""
    title, text = parsed(tmp_path, "x.html", page)
    assert title == "The title"
    assert [line for line in text.split("\n") if line] == [
        "Head",
        "One bold & link, wrapped.",
        "Two",
        "lines",
        "i",
        "j",
        "1 2",
        "deep",
        "tail end",
    ]
    assert "wrapped.\n\nTwo\nlines\n\ni" in text
    assert "\n\n\n" not in text


@pytest.mark.parametrize(
    ("page", "title", "text"),
    [
        ("<h1>A <i>b</i></h1>c", "A b", "A b\nc"),
        ("<title></title><h1>H</h1>", "H", "H"),
        ("<title>T</title>", "T", ""),
        ("https://example.org/page", "", "https://example.org/page"),
        ("file.txt", "", "file.txt"),
        ("<p>un<p>closed<b>x", "", "un\n\nclosedx"),
        ("<![if x]>a<![endif]><![CDATA[b]]>", "", "a"),
        ("<p>&#xD800;&#0;x</p>", "", "\ufffd\ufffdx"),
    ],
)
def test_html_fragments_and_malformed_html_are_parsed(tmp_path, page, title, text):
    assert parsed(tmp_path, "x.htm", page) == (title, text)


def test_declared_encoding_of_html_is_used_if_valid(tmp_path):
    page = '<meta http-equiv=Content-Type content="text/html; charset=ISO-8859-1"><p>café'
    assert parsed(tmp_path, "x.html", page.encode("latin-1")) == ("", "café")
    assert parsed(tmp_path, "x.html", page.encode()) == ("", "café")
    (tmp_path / "x.html").write_bytes(page.replace("ISO-8859-1", "iso-8859-nonsense").encode("latin-1"))
    assert read(tmp_path)[1][0].parse()[1].startswith("caf")


@pytest.mark.parametrize("page", ["<script>x</script>", "<!-- x -->", "<p> </p>&nbsp;"])
def test_html_without_text_is_an_error(tmp_path, page):
    assert "contains no text" in failure(tmp_path, "x.html", page)


def test_error_about_markdown_without_text_does_not_mention_a_scan(tmp_path):
    assert failure(tmp_path, "x.md", "---\ndescription: a draft\n---\n").endswith("contains no text")


FRONT_MATTER = "---\ntitle: T\n{}\n---\nbody"


@pytest.mark.parametrize(
    ("front", "metadata"),
    [
        ("acl: [hr, 'board']", {"acl": ["hr", "board"]}),
        ("acl: no\ndate: 2024-01-31\nreaders:\n  - ann", {"acl": "no", "date": "2024-01-31", "readers": ["ann"]}),
        ("draft: true  # not yet\nby: {name: Ann}", {"draft": "true", "by": {"name": "Ann"}}),
        ("about: a: b", {}),
        ("x: &a [y]\nz: *a", {}),
        ("# acl: [hr]", {}),
        ('"a\\u0063l": [hr]', {"acl": ["hr"]}),
        ("!!str acl: [hr]\n? readers\n: [ann]", {"acl": ["hr"], "readers": ["ann"]}),
        ("ACL: [hr]\nReaders: [ann]", {"ACL": ["hr"], "Readers": ["ann"]}),
    ],
)
def test_front_matter_values_become_metadata_as_strings(tmp_path, front, metadata):
    for encoding in ("utf-8", "utf-16", "cp1252"):
        (source,) = read(write_files(tmp_path, {"x.md": FRONT_MATTER.format(front + "\nof: é").encode(encoding)}))[1]
        expected = metadata | {"of": "é"} if metadata or front.startswith("#") else {}
        assert source.parse() == ("T", "body", expected)


@pytest.mark.parametrize(
    "front",
    [
        "acl: [hr\nx: y",
        "about: a: b\nacl: [hr]",
        "x: &a [y]\nacl: *a",
        "access:\n  acl: [hr]",
        "'readers': [ann]\nx: @",
        "acl: [hr]\nx: " + "y" * 16_000,
        "acl: " + "[" * 5_000,
        "acl: [hr]\nacl: []",
        "access: {acl: [hr]}",
        'access: {"a\\U00000063l": [hr]}',
        "'about': @\n!!str acl: [hr]",
    ],
)
def test_unsupported_front_matter_with_an_access_restriction_is_an_error(tmp_path, front):
    assert "front matter has" in failure(tmp_path, "x.md", FRONT_MATTER.format(front))


@pytest.mark.parametrize(
    "text",
    [
        "---\n\nacl: [hr]\n---\nbody",
        "---\n  acl: [hr]\n---\nbody",
        "---\nmy key: x\nreaders: [ann]\n---\nbody",
        "---\n- acl: [hr]\n---\nbody",
        "---\n{acl: [hr]}\n---\nbody",
        "---\n? acl\n: [hr]\n---\nbody",
        "\n---\nacl: [hr]\n---\nbody",
        "---\nacl: [hr]\nbody",
        '---\n"a\\u0063l": [hr]\n---\nbody',
        '---\n"a\\x63l" : [hr]\n---\nbody',
        '---\n? "ac\\\n  l"\n: [hr]\n---\nbody',
        "---\n!!str acl: [hr]\n---\nbody",
        "---\n!<tag:yaml.org,2002:str> acl: [hr]\n---\nbody",
        "---\n&a acl: [hr]\n---\nbody",
        "---\n'acl ': [hr]\n---\nbody",
        "---\n[acl: [hr]]\n---\nbody",
        "--- # public\nacl: [hr]\n---\nbody",
        "---\u2028acl: [hr]\n---\nbody",
        '+++\nacl = ["hr"]\n+++\nbody',
    ],
)
def test_access_restriction_in_another_front_matter_syntax_is_an_error(tmp_path, text):
    assert "front matter has" in failure(tmp_path, "x.md", text)
    assert "a Markdown file" in failure(tmp_path / "plain", "x.txt", text)


def test_empty_acl_of_a_record_does_not_replace_the_acl_in_its_metadata(tmp_path):
    line = '{"_id": "a", "text": "x", "acl": null, "metadata": {"acl": ["hr"], "by": "Ann"}}'
    (source,) = read(write_files(tmp_path, {"x.jsonl": line}))[1]
    assert source.parse()[2] == {"acl": ["hr"], "by": "Ann"}


def test_readers_line_after_the_front_matter_is_text(tmp_path):
    text = "---\nmy key: x\n---\nreaders: [ann]"
    assert parsed(tmp_path, "x.md", text) == ("", text)
    assert parsed(tmp_path, "x.md", "# T\nacl: [hr]") == ("T", "acl: [hr]")


@pytest.mark.parametrize("hostile", ["-" + " " * 30_000 + "x", "!<" * 30_000, "!&" * 30_000])
def test_front_matter_is_read_in_linear_time(tmp_path, hostile):
    start_time = time.process_time()
    assert parsed(tmp_path, "x.md", f"---\na: b\n{hostile}\n---\ntext") == ("", "text")
    assert time.process_time() - start_time < 1


def test_mail_separator_is_not_front_matter(tmp_path):
    text = "--- Original message ---\nFrom: Ann\nReaders: all\n"
    assert parsed(tmp_path, "x.md", text) == ("", text)


def test_digest_of_a_file_with_front_matter_differs_from_its_content_hash(tmp_path):
    front = FRONT_MATTER.format("acl: hr")
    texts = {"a.md": front.encode(), "b.md": b"# No front", "c.txt": front.encode(), "d.md": front.encode("utf-16")}
    digests = {s.name: s.digest for s in read(write_files(tmp_path, texts))[1]}
    plain = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    assert {name for name in texts if digests[name] != plain[name]} == {"a.md", "d.md"}


@pytest.mark.parametrize("tag", ["div", "b", "nav", "table"])
def test_deeply_nested_html_is_read_or_an_error(tmp_path, tag):
    (source,) = read(write_files(tmp_path, {"x.html": f"<h1>t</h1>y<p>{f'<{tag}>x' * 100_000}"}))[1]
    try:
        title, text, _ = source.parse()
    except DataError:
        return
    assert title == "t"
    assert text.startswith("t\ny")
    assert tag == "nav" or text.count("x") == 100_000


# PDF


def test_pdf_title_and_pages_are_read(tmp_path):
    assert parsed(tmp_path, "x.pdf", pdf("One", "Two", info="/Title (A  title)")) == ("A title", "One\n\nTwo")
    assert parsed(tmp_path, "x.pdf", pdf("One")) == ("", "One")


def test_pdf_without_text_is_an_error_about_ocr(tmp_path):
    assert "OCR" in failure(tmp_path, "x.pdf", pdf(""))


@pytest.mark.parametrize("password", ["secret", ""])
def test_encrypted_pdf_is_read_only_with_an_empty_password(tmp_path, password):
    from pypdf import PdfReader, PdfWriter

    writer, out = PdfWriter(), io.BytesIO()
    writer.append(PdfReader(io.BytesIO(pdf("One"))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warning about the old cipher, which needs no further package
        writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(out)
    if password:
        assert "encrypted" in failure(tmp_path, "x.pdf", out.getvalue())
    else:
        assert parsed(tmp_path, "x.pdf", out.getvalue()) == ("", "One")


@pytest.mark.parametrize("content", [b"no pdf", b"%PDF-1.4\n", pdf("One")[:150], b"%PDF-1.7 \xff\xff\0" + b"<<" * 9999])
def test_damaged_pdf_is_an_error(tmp_path, content, caplog):
    reason = failure(tmp_path, "x.pdf", content)
    assert "cannot be read" in reason or "no text" in reason
    assert not caplog.records


def test_pdf_with_a_wrong_xref_offset_is_read_without_output(tmp_path, caplog, capfd):
    flawed = pdf("One").replace(b"startxref\n", b"startxref\n1")
    assert parsed(tmp_path, "x.pdf", flawed)[1] == "One"
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@given(st.binary(max_size=200), st.integers(0, 800), st.sampled_from([".pdf", ".html", ".md", ".txt"]))
def test_any_bytes_are_read_or_an_error(tmp_path_factory, noise, at, kind):
    path = tmp_path_factory.mktemp("any") / f"x{kind}"
    whole = pdf("One") if kind == ".pdf" else b"<p>x</p>" * 20
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    for source in Corpus(path).sources():
        try:
            title, text, _ = source.parse()
        except DataError:
            continue
        (title + text).encode()
        assert (title + text).strip()
        assert "\0" not in title + text
