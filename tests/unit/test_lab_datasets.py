import gzip
import json

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from casemate import indexing
from casemate.backends.sqlite import SqliteIndex
from casemate.corpus import Corpus
from casemate.errors import DataError
from casemate.lab import datasets
from casemate.types import Document
from casemate.words import words
from tests.fakes import BagOfWords, documents


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
    """Whole documents, and the chunks that an index has of them."""
    whole = documents(count)
    chunks = [
        Document(f"{d.id}#{i}", f"{d.text} part{i}", source=d.id, digest="1") for d in whole for i in range(pieces)
    ]
    return whole, chunks


def test_a_split_is_disjoint_repeatable_and_halved_within_each_kind():
    held = documents(200)
    first, again, other = (datasets.split(held, 60, 40, seed) for seed in (1, 1, 2))
    assert first == again != other
    members, nonmembers = ({d.source for d in kind} for kind in (first.members, first.nonmembers))
    assert (len(members), len(nonmembers)) == (60, 40)
    assert not members & nonmembers
    for kind, size in ((members, 60), (nonmembers, 40)):
        assert sum(first.half[name] == "A" for name in kind) == size // 2
    assert first.half.keys() == members | nonmembers


def test_any_beginning_of_the_candidates_is_a_fair_part():
    split = datasets.split(documents(200), 60, 20, 0)
    for count in range(4, 81, 4):
        assert sum(not member for _, member in split.candidates[:count]) == count // 4
    assert {d.source for d, _ in split.candidates} == split.half.keys()


def test_similarity_is_that_of_an_independent_implementation():
    held = [*documents(60), Document("empty", "?!")]
    X = TfidfVectorizer(analyzer=words).fit_transform([d.content for d in held])
    ours = datasets.tfidf(held)
    assert np.allclose((ours @ ours.T).toarray(), (X @ X.T).toarray(), atol=1e-6)


def test_twins_are_found_block_by_block(monkeypatch):
    held = documents(50)
    held += [Document(f"twin{i}", held[i].text, held[i].title) for i in (3, 7, 8)]
    X = TfidfVectorizer(analyzer=words).fit_transform([d.content for d in held])
    S = (X @ X.T).toarray()
    wanted = list(range(53))[::-1]
    expected = {i: {j for j in range(53) if j != i and S[i, j] >= 0.95} for i in wanted}
    assert sum(map(len, expected.values())) == 6
    assert datasets._twins(held)(wanted) == expected
    monkeypatch.setattr(datasets, "CELLS", 120)  # two rows at a time
    assert datasets._twins(held)(wanted) == expected


def test_a_non_member_whose_twin_stays_is_passed_over_for_another():
    held = documents(100)
    held += [Document(f"twin{i}", held[i].text) for i in range(40)]
    split = datasets.split(held, 30, 40, 5)
    out = {d.source for d in split.nonmembers}
    assert len(out) == 40
    assert split.dropped > 0
    assert str(split.dropped) in split.notes[0]
    for d in split.nonmembers:
        twin = d.source.removeprefix("twin") if d.source.startswith("twin") else d.source
        number = twin.removeprefix("d")
        both = {f"d{number}", f"twin{number}"} & {x.source for x in held}
        assert both <= out


def test_who_goes_back_into_the_index_takes_his_other_twins_along(tmp_path):
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
def test_reads_who_is_what_from_a_file(tmp_path, keys):
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
        ("[1]", "says not who is a member"),
        ('{"members": "d1", "nonmembers": []}', "says not who is a member"),
        ("{", "cannot be read"),
        (json.dumps({"members": ["nobody"], "nonmembers": []}), "'nobody'"),
        (json.dumps({"members": NAMES, "nonmembers": NAMES}), "twice"),
        (json.dumps({"members": NAMES, "nonmembers": ["d30"]}), "too few"),
    ],
)
def test_refuses_a_file_that_is_no_split(tmp_path, content, says):
    (tmp_path / "split.json").write_text(content)
    with pytest.raises(DataError, match=says):
        datasets.read_split(tmp_path / "split.json", documents(60), 0)


def test_says_when_the_file_is_missing(tmp_path):
    with pytest.raises(DataError, match="no.json"):
        datasets.read_split(tmp_path / "no.json", documents(60), 0)


def test_too_few_documents_give_a_smaller_split_with_a_note_or_none_at_all():
    split = datasets.split(documents(60), 100, 200, 0)
    assert (len(split.members), len(split.nonmembers)) == (20, 40)
    assert "100 members and 200 non-members were asked for" in split.notes[0]
    with pytest.raises(DataError, match="at least 10 of each"):
        datasets.split(documents(25), 100, 200, 0)
    with pytest.raises(DataError, match="at least 10 of each"):
        datasets.split(documents(30), 0, 0, 0)


def test_the_fingerprint_is_of_the_texts_and_of_who_is_what():
    held = documents(100)
    changed = [*held[:-1], Document(held[-1].id, "another text")]
    prints = [datasets.split(d, 30, 30, s).fingerprint for d, s in ((held, 1), (held, 2), (changed, 1), (held, 1))]
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3


def test_holding_out_copies_all_but_the_non_members_without_embedding(make):
    whole, chunks = chunked(80)
    split = datasets.split(whole, 20, 30, 0)
    out = {d.source for d in split.nonmembers}
    owner, lab = make(chunks), make()
    steps = []
    assert datasets.hold_out(owner, lab, split, progress=steps.append) == sum(steps) == 150
    by_id = {d.id: (d, v) for ds, vs in lab.scan() for d, v in zip(ds, vs, strict=True)}
    original = {d.id: (d, v) for ds, vs in owner.scan() for d, v in zip(ds, vs, strict=True)}
    assert by_id.keys() == {c.id for c in chunks if c.source not in out}
    for name, (document, vector) in by_id.items():
        assert document == original[name][0]
        assert np.array_equal(vector, original[name][1])
    assert not lab.check()
    assert owner.moments().n == 240


def test_holding_out_again_does_nothing_and_another_split_only_what_differs(make):
    whole, chunks = chunked(80)
    owner, lab = make(chunks), make()
    one, two = (datasets.split(whole, 20, 30, seed) for seed in (0, 1))
    datasets.hold_out(owner, lab, one)
    assert datasets.hold_out(owner, lab, one) == 0
    back = {d.source for d in one.nonmembers} - {d.source for d in two.nonmembers}
    assert 0 < datasets.hold_out(owner, lab, two) == 3 * len(back)
    assert lab.digests().keys() == owner.digests().keys() - {d.source for d in two.nonmembers}


def test_an_interrupted_copy_goes_on(make, monkeypatch):
    monkeypatch.setattr(datasets, "WINDOW", 30)
    monkeypatch.setattr(indexing, "SCAN", 10)
    whole, chunks = chunked(80)
    split = datasets.split(whole, 20, 30, 0)
    owner, lab = make(chunks), make()

    def stop(count):
        if lab.moments().n >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        datasets.hold_out(owner, lab, split, progress=stop)
    done = lab.moments().n
    assert 60 <= done < 100
    assert datasets.hold_out(owner, lab, split) == 150 - done
    assert not lab.check()


def test_a_change_that_no_digest_shows_is_seen_by_the_moments(make):
    whole, _ = chunked(80)
    split = datasets.split(whole, 20, 30, 0)
    member = split.members[0].source
    owner, lab = make(whole), make()  # without digests
    datasets.hold_out(owner, lab, split)
    changed = Document(member, "amber amber birch")
    owner.add([changed], BagOfWords().embed([changed.content]))
    assert datasets.hold_out(owner, lab, split) == 50
    assert changed in [d for ds, _ in lab.scan() for d in ds]


class Mixed:
    """An index whose sources lie in pieces, as when two processes filled it."""

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


def test_a_source_that_lies_in_pieces_is_copied_whole(make, monkeypatch):
    monkeypatch.setattr(datasets, "WINDOW", 10)
    whole, chunks = chunked(80)
    split = datasets.split(whole, 20, 30, 0)
    lab = make()
    assert datasets.hold_out(Mixed(make(chunks)), lab, split) == 150
    assert lab.moments().n == 150


def test_members_that_the_index_does_not_hold_are_an_error(make):
    whole, chunks = chunked(80)
    split = datasets.split(whole, 20, 30, 0)
    gone = split.members[4].source
    with pytest.raises(DataError, match=gone):
        datasets.hold_out(make([c for c in chunks if c.source != gone]), make(), split)


def test_an_index_that_changes_all_the_time_is_no_index_to_copy(make):
    whole, chunks = chunked(80)
    split = datasets.split(whole, 20, 30, 0)
    owner = make(chunks)

    name = split.members[0].source

    class Busy(Mixed):
        def scan(self, tenant="default"):
            self.seed += 1
            changed = [Document(name, f"only{self.seed} version", digest="1")]
            self.index.add(changed, BagOfWords().embed([changed[0].text]))
            yield from super().scan(tenant)

    with pytest.raises(DataError, match="changed while the lab copied"):
        datasets.hold_out(Busy(owner), make(), split)


def test_tenants_are_kept_apart(make):
    whole, chunks = chunked(80)
    split = datasets.split(whole, 20, 30, 0)
    owner, lab = make(chunks, "acme"), make()
    owner.add([Document("d0", "other")], BagOfWords().embed(["other"]))
    datasets.hold_out(owner, lab, split, "acme")
    assert lab.tenants() == ["acme"]
    with pytest.raises(DataError):
        datasets.hold_out(owner, lab, split, "nobody")


def test_stored_gives_ids_and_vectors_of_the_sources_asked_for(make):
    _, chunks = chunked(10)
    index = make(chunks)
    found = datasets.stored(index, {"d3", "d5", "absent"})
    assert found.keys() == {"d3", "d5"}
    assert found["d3"].ids == ("d3#0", "d3#1", "d3#2")
    assert np.array_equal(found["d3"].vectors, BagOfWords().embed([c.content for c in chunks[9:12]]))
    assert not found["d3"].isdisjoint(["d5#0", "d3#1"])
    assert found["d3"].isdisjoint(["d5#0"])


def test_reads_the_whole_documents_that_the_index_holds(tmp_path):
    (tmp_path / "a.md").write_text("# Title\n\nText of a.")
    (tmp_path / "b.md").write_text("# Other\n\nText of b.")
    (tmp_path / "blank.md").write_text(" ")
    found = datasets.read(Corpus(tmp_path), {"a.md", "blank.md"})
    assert [(d.source, d.id, "Text of a." in d.text) for d in found] == [("a.md", "a.md", True)]


def test_the_published_split_of_nfcorpus_is_read_with_its_twins_left_out(data):
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
