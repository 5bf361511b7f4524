import asyncio
import gzip
import json

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from casemate.backends import index_checks
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.config import Config
from casemate.errors import DataError
from casemate.monitor.poisoning.drill import guarded_copy
from casemate.rag import index_copy
from casemate.rag.corpus import Corpus
from casemate.rag.pipeline import Rag
from casemate.redteam.lab import datasets
from casemate.text.tokens import words
from casemate.types import Document
from tests.fakes import BagOfWords, Parrot, documents


@pytest.fixture
def make(tmp_path):
    opened = []

    def index(held=(), tenant="default"):
        made = SqliteIndex(tmp_path / f"{len(opened)}.db")
        opened.append(made)
        made.open("bag-of-words", 64)
        if held:
            made.add(held, BagOfWords().embed([d.content for d in held]), tenant)
        return made

    yield index
    for made in opened:
        made.close()


def chunked(count, pieces=3):
    """Whole documents and their chunks."""
    whole = documents(count)
    chunks = [
        Document(f"{d.id}#{i}", f"{d.text} part{i}", source=d.id, digest="1") for d in whole for i in range(pieces)
    ]
    return whole, chunks


def test_split_is_disjoint_reproducible_and_stratified():
    held = documents(200)
    first, again, other = (datasets.draw_split(held, 60, 40, seed) for seed in (1, 1, 2))
    assert first == again != other
    members, nonmembers = ({d.source for d in kind} for kind in (first.members, first.nonmembers))
    assert (len(members), len(nonmembers)) == (60, 40)
    assert not members & nonmembers
    for kind, size in ((members, 60), (nonmembers, 40)):
        assert sum(first.half[name] == "A" for name in kind) == size // 2
    assert first.half.keys() == members | nonmembers


def test_each_prefix_of_the_candidates_is_balanced():
    split = datasets.draw_split(documents(200), 60, 20, 0)
    for count in range(4, 81, 4):
        assert sum(not member for _, member in split.candidates[:count]) == count // 4
    assert {d.source for d, _ in split.candidates} == split.half.keys()


def test_replaces_nonmembers_with_a_near_duplicate_in_the_index():
    held = documents(100)
    held += [Document(f"twin{i}", held[i].text) for i in range(40)]
    split = datasets.draw_split(held, 30, 40, 5)
    out = {d.source for d in split.nonmembers}
    assert len(out) == 40
    assert split.dropped > 0
    assert str(split.dropped) in split.notes[0]
    for d in split.nonmembers:
        original_name = d.source.removeprefix("twin") if d.source.startswith("twin") else d.source
        number = original_name.removeprefix("d")
        both = {f"d{number}", f"twin{number}"} & {x.source for x in held}
        assert both <= out


def test_nonmember_that_returns_to_the_index_returns_its_near_duplicates_too(tmp_path):
    text = " ".join(f"word{i}" for i in range(60))
    near = text.replace("word0 word1 ", "other more ")
    far = near.replace("word2 word3 ", "third fourth ")
    held = [*documents(40), Document("stays", text), Document("near", near), Document("far", far)]
    X = TfidfVectorizer(analyzer=words).fit_transform([d.content for d in held])
    S = (X @ X.T).toarray()
    assert S[40, 41] >= 0.95 > S[40, 42]
    assert S[41, 42] >= 0.95
    file = tmp_path / "split.json"
    names = [f"d{i}" for i in range(20)]
    file.write_text(json.dumps({"members": [f"d{i}" for i in range(20, 40)], "nonmembers": [*names, "near", "far"]}))
    split = datasets.read_split(file, held, 0)
    assert {d.source for d in split.nonmembers} == set(names)
    assert split.dropped == 2


@pytest.mark.parametrize("keys", [("members", "nonmembers"), ("mem_indices", "non_mem_indices")])
def test_reads_a_split_from_a_file(tmp_path, keys):
    held, file = documents(60), tmp_path / "split.json"
    file.write_text(json.dumps({keys[0]: [f"d{i}" for i in range(25)], keys[1]: [f"d{i}" for i in range(30, 50)]}))
    split = datasets.read_split(file, held, 0)
    assert {d.source for d in split.members} == {f"d{i}" for i in range(25)}
    assert {d.source for d in split.nonmembers} == {f"d{i}" for i in range(30, 50)}
    assert not split.notes


NAMES = [f"d{i}" for i in range(20)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "is not a split"),
        ('{"members": "d1", "nonmembers": []}', "is not a split"),
        ("{", "cannot be read"),
        (json.dumps({"members": ["nobody"], "nonmembers": []}), "'nobody'"),
        (json.dumps({"members": NAMES, "nonmembers": NAMES}), "twice"),
        (json.dumps({"members": NAMES, "nonmembers": ["d30"]}), r"too few \(from 60 documents\); at least 10"),
    ],
)
def test_rejects_a_file_that_is_not_a_split(tmp_path, content, says):
    (tmp_path / "split.json").write_text(content)
    with pytest.raises(DataError, match=says):
        datasets.read_split(tmp_path / "split.json", documents(60), 0)


def test_error_contains_the_name_of_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="no.json"):
        datasets.read_split(tmp_path / "no.json", documents(60), 0)


def test_few_documents_give_a_smaller_split_with_a_note_or_an_error():
    split = datasets.draw_split(documents(60), 100, 200, 0)
    assert (len(split.members), len(split.nonmembers)) == (20, 40)
    assert "100 members and 200 non-members were requested" in split.notes[0]
    with pytest.raises(DataError, match="at least 10 of each"):
        datasets.draw_split(documents(25), 100, 200, 0)
    with pytest.raises(DataError, match="at least 10 of each"):
        datasets.draw_split(documents(30), 0, 0, 0)


@pytest.mark.parametrize(
    ("fixed", "asked", "drawn"),
    [
        ((), (200, 200), (22, 22)),
        (("nonmembers",), (200, 10), (34, 10)),
        (("nonmembers",), (200, 12), (32, 12)),
        (("members",), (30, 200), (30, 14)),
        (("members", "nonmembers"), (20, 24), (20, 24)),
    ],
)
def test_keeps_a_fixed_number_and_reduces_the_other(fixed, asked, drawn):
    split = datasets.draw_split(documents(44), *asked, 0, fixed)
    assert (len(split.members), len(split.nonmembers)) == drawn


def test_replaces_near_duplicates_among_a_fixed_number_of_nonmembers():
    held = documents(44)
    held[1::2] = [Document(f"copy{d.id}", d.text) for d in held[0:20:2]] + held[21::2]
    split = datasets.draw_split(held, 200, 10, 0, ("nonmembers",))
    assert len(split.nonmembers) == 10
    assert len(split.members) >= datasets.MIN_CANDIDATES


@pytest.mark.parametrize(("fixed", "asked"), [(("nonmembers",), (200, 40)), (("members", "nonmembers"), (30, 30))])
def test_error_about_too_large_numbers_suggests_valid_ones(fixed, asked):
    with pytest.raises(DataError, match="these work: --members 33 --nonmembers 11"):
        datasets.draw_split(documents(44), *asked, 0, fixed)


@pytest.mark.parametrize(("least", "drawn"), [(20, (22, 22)), (30, (30, 14)), (40, (34, 10))])
def test_draws_fewer_nonmembers_if_the_index_would_become_too_small(least, drawn):
    """If even the minimum of non-members is too many, the minimum is drawn."""
    split = datasets.draw_split(documents(44), 200, 200, 0, (), lambda outside: 44 - len(outside) >= least)
    assert (len(split.members), len(split.nonmembers)) == drawn


def test_fingerprint_depends_on_texts_and_roles():
    held = documents(100)
    changed = [*held[:-1], Document(held[-1].id, "another text")]
    prints = [datasets.draw_split(d, 30, 30, s).fingerprint for d, s in ((held, 1), (held, 2), (changed, 1), (held, 1))]
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3


def test_copy_contains_all_except_nonmembers_without_embedding(make):
    whole, chunks = chunked(80)
    split = datasets.draw_split(whole, 20, 30, 0)
    out = {d.source for d in split.nonmembers}
    owner, lab = make(chunks), make()
    steps = []
    assert datasets.copy_without_nonmembers(owner, lab, split, progress=steps.append) == sum(steps) == 150
    by_id = {d.id: (d, v) for ds, vs in lab.scan() for d, v in zip(ds, vs, strict=True)}
    original = {d.id: (d, v) for ds, vs in owner.scan() for d, v in zip(ds, vs, strict=True)}
    assert by_id.keys() == {c.id for c in chunks if c.source not in out}
    for name, (document, vector) in by_id.items():
        assert document == original[name][0]
        assert np.array_equal(vector, original[name][1])
    assert not lab.check()
    assert owner.moments().n == 240


def test_second_copy_writes_nothing_and_another_split_copies_only_the_difference(make):
    whole, chunks = chunked(80)
    owner, lab = make(chunks), make()
    one, two = (datasets.draw_split(whole, 20, 30, seed) for seed in (0, 1))
    datasets.copy_without_nonmembers(owner, lab, one)
    assert datasets.copy_without_nonmembers(owner, lab, one) == 0
    back = {d.source for d in one.nonmembers} - {d.source for d in two.nonmembers}
    assert 0 < datasets.copy_without_nonmembers(owner, lab, two) == 3 * len(back)
    assert lab.digests().keys() == owner.digests().keys() - {d.source for d in two.nonmembers}


def test_resumes_an_interrupted_copy(make, monkeypatch):
    monkeypatch.setattr(index_copy, "COPY_BATCH", 30)
    monkeypatch.setattr(index_checks, "SCAN_PAGE", 10)
    whole, chunks = chunked(80)
    split = datasets.draw_split(whole, 20, 30, 0)
    owner, lab = make(chunks), make()

    def stop(count):
        if lab.moments().n >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        datasets.copy_without_nonmembers(owner, lab, split, progress=stop)
    done = lab.moments().n
    assert 60 <= done < 100
    assert datasets.copy_without_nonmembers(owner, lab, split) == 150 - done
    assert not lab.check()


def test_detects_a_change_without_digests_by_the_moments(make):
    whole, _ = chunked(80)
    split = datasets.draw_split(whole, 20, 30, 0)
    member = split.members[0].source
    owner, lab = make(whole), make()  # without digests
    datasets.copy_without_nonmembers(owner, lab, split)
    changed = Document(member, "amber amber birch")
    owner.add([changed], BagOfWords().embed([changed.content]))
    assert datasets.copy_without_nonmembers(owner, lab, split) == 50
    assert changed in [d for ds, _ in lab.scan() for d in ds]


class InterleavedIndex:
    """An index with interleaved sources, as after two concurrent writers."""

    def __init__(self, index, seed=0):
        self.index = index
        self.seed = seed

    def __getattr__(self, name):
        return getattr(self.index, name)

    def scan(self, tenant="default"):
        rows = [(d, v) for ds, vs in self.index.scan(tenant) for d, v in zip(ds, vs, strict=True)]
        order = np.random.default_rng(self.seed).permutation(len(rows))
        for i in range(0, len(rows), 7):
            part = [rows[j] for j in order[i : i + 7]]
            yield [d for d, _ in part], np.stack([v for _, v in part])


def test_copies_all_chunks_of_interleaved_sources(make, monkeypatch):
    monkeypatch.setattr(index_copy, "COPY_BATCH", 10)
    whole, chunks = chunked(80)
    split = datasets.draw_split(whole, 20, 30, 0)
    lab = make()
    assert datasets.copy_without_nonmembers(InterleavedIndex(make(chunks)), lab, split) == 150
    assert lab.moments().n == 150


def test_guarded_copy_contains_all_chunks_of_a_source_on_two_scan_pages(make, monkeypatch):
    monkeypatch.setattr(index_checks, "SCAN_PAGE", 10)  # the fourth source has chunks on the first and second page
    owner = make(chunked(80)[1])

    async def copied():
        rag = Rag(BagOfWords(), owner, Parrot())
        async with guarded_copy(rag, Config(guard={"defenses": []})) as guard:
            return [d for documents, _ in guard.rag.index.scan() for d in documents]

    assert sorted(d.id for d in asyncio.run(copied())) == sorted(d.id for ds, _ in owner.scan() for d in ds)


def test_members_missing_from_the_index_are_an_error(make):
    whole, chunks = chunked(80)
    split = datasets.draw_split(whole, 20, 30, 0)
    gone = split.members[4].source
    with pytest.raises(DataError, match=gone):
        datasets.copy_without_nonmembers(make([c for c in chunks if c.source != gone]), make(), split)


def test_index_that_changes_during_each_copy_is_an_error(make):
    whole, chunks = chunked(80)
    split = datasets.draw_split(whole, 20, 30, 0)
    owner = make(chunks)

    name = split.members[0].source

    class Busy(InterleavedIndex):
        def scan(self, tenant="default"):
            self.seed += 1
            changed = [Document(name, f"only{self.seed} version", digest="1")]
            self.index.add(changed, BagOfWords().embed([changed[0].text]))
            yield from super().scan(tenant)

    with pytest.raises(DataError, match="changed during the copy"):
        datasets.copy_without_nonmembers(Busy(owner), make(), split)


def test_copies_one_tenant_only(make):
    whole, chunks = chunked(80)
    split = datasets.draw_split(whole, 20, 30, 0)
    owner, lab = make(chunks, "acme"), make()
    owner.add([Document("d0", "other")], BagOfWords().embed(["other"]))
    datasets.copy_without_nonmembers(owner, lab, split, "acme")
    assert lab.tenants() == ["acme"]
    with pytest.raises(DataError):
        datasets.copy_without_nonmembers(owner, lab, split, "nobody")


def test_indexed_sources_contain_ids_and_vectors(make):
    _, chunks = chunked(10)
    index = make(chunks)
    found = datasets.indexed_sources(index, {"d3", "d5", "absent"})
    assert found.keys() == {"d3", "d5"}
    assert found["d3"].ids == ("d3#0", "d3#1", "d3#2")
    assert np.array_equal(found["d3"].vectors, BagOfWords().embed([c.content for c in chunks[9:12]]))
    assert not found["d3"].isdisjoint(["d5#0", "d3#1"])
    assert found["d3"].isdisjoint(["d5#0"])


def test_reads_whole_documents_from_the_index(tmp_path):
    (tmp_path / "a.md").write_text("# Title\n\nText of a.")
    (tmp_path / "b.md").write_text("# Other\n\nText of b.")
    (tmp_path / "blank.md").write_text(" ")
    found = datasets.read_documents(Corpus(tmp_path), {"a.md", "blank.md"})
    assert [(d.source, d.id, "Text of a." in d.text) for d in found] == [("a.md", "a.md", True)]


def test_reads_the_published_nfcorpus_split_without_near_duplicates(data):
    with gzip.open(data / "nfcorpus/corpus.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    held = [Document(r["_id"], r["text"], r["title"]) for r in rows]
    split = datasets.read_split(data / "mia_riddle/nfcorpus_selected_indices.json", held, 7)
    assert len(split.members) == 1000
    assert len(split.nonmembers) + split.dropped == 1000
    stays = [i for i, d in enumerate(held) if d.source not in {n.source for n in split.nonmembers}]
    X = TfidfVectorizer(analyzer=words).fit_transform([d.content for d in held])
    out = [i for i, d in enumerate(held) if d.source in {n.source for n in split.nonmembers}]
    assert (X[out] @ X[stays].T).max() < 0.95
    assert split.dropped > 0
