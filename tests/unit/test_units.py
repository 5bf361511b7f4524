"""Units of independence: groups of related documents, among hits and in a whole collection."""

from contextlib import closing
from itertools import combinations, product
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard import units
from casemate.guard.turn import Turn
from casemate.guard.units import MAX_COPIES, SourceRelations, group_units, unit_sources
from casemate.text import edited_copies
from casemate.text.sentences import sentences
from casemate.types import Document, Hit, Retrieval, SimilarityStats
from tests.fakes import BagOfWords

WORDS = [f"{a}{b}" for a in ("amber", "birch", "cedar", "delta", "ember", "fjord") for b in "abcdefghijklmnop"]


def record(seed, parts=4):
    """A text of several sentences of random words."""
    rng = np.random.default_rng(seed)
    return " ".join(" ".join(rng.choice(WORDS, 10, replace=False)).capitalize() + "." for _ in range(parts))


def edited_copy(text, seed):
    """A copy with 22 % of the words dropped and the sentences in random order."""
    rng = np.random.default_rng(seed)
    parts = sentences(text)
    words = " ".join(parts[i] for i in rng.permutation(len(parts))).split()
    return " ".join(w for w in words if rng.random() > 0.22)


def related_sources(documents, sources, keys=(), *, copies=True):
    """The other sources in the units of some sources."""
    return SourceRelations(documents, keys, copies=copies).related_to(sources)


ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.lists(st.integers(0, 4), max_size=2)), min_size=1, max_size=9
)


def chunks_of(rows):
    """Chunks of sources, each with one of a few texts and with subjects."""
    return [
        Document(f"d{i}", f"text {text}" if text else f"own {i}", source=f"s{source}", metadata={"subject": subjects})
        for i, (source, text, subjects) in enumerate(rows)
    ]


def naive_unit(rows, source):
    """Oracle: transitive closure by repeated comparison of all pairs. Equal texts or common subjects are relations."""
    found = {f"s{source}"}
    for _ in rows:
        for (a, text, subjects), (b, other, common) in product(rows, rows):
            if f"s{a}" in found and ((text and text == other) or not set(subjects).isdisjoint(common)):
                found.add(f"s{b}")
    return found


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_related_sources_are_the_transitive_closure_of_relations(rows):
    source = rows[0][0]
    expected = naive_unit(rows, source)
    assert related_sources(chunks_of(rows), [f"s{source}"], ["subject"]) == expected - {f"s{source}"}


@given(ROWS, st.integers(0, 9), st.sets(st.integers(1, 5)))
@settings(max_examples=60, deadline=None)
def test_repeated_questions_about_relations_equal_those_of_fewer_documents(rows, end, left_out):
    documents, source = chunks_of(rows), f"s{rows[0][0]}"
    excluded = {f"s{i}" for i in left_out} - {source}
    relations = SourceRelations(documents, ["subject"])
    relations.related_to([source])
    counted = [d for d in documents[:end] if d.source not in excluded]
    assert relations.related_to([source], end, excluded) == related_sources(counted, [source], ["subject"])


def test_relations_compare_each_text_once(monkeypatch):
    """Mirabel asks about many sets of sources for one question: other comparisons would take seconds."""
    compared = list[tuple[object, object]]()
    documents = [Document(f"d{i}", edited_copy(record(i % 3), i)) for i in range(12)]
    relations = SourceRelations(documents)
    original = units.is_edited_copy
    monkeypatch.setattr(units, "is_edited_copy", lambda a, b, **o: compared.append((a, b)) or original(a, b, **o))
    for end in range(13):
        relations.related_to([f"d{end % 3}"], end)
    assert 0 < len(compared) == len(set(compared)) <= 12 * 12


def test_units_in_a_collection_use_all_its_documents(tmp_path):
    rng = np.random.default_rng(5)
    rows = [(int(rng.integers(9)), int(rng.integers(4)), rng.integers(12, size=1).tolist()) for _ in range(24)]
    corpus = chunks_of(rows)
    with closing(SqliteIndex(tmp_path / "i.db")) as index:
        index.open("bag-of-words", 64)
        index.add(corpus, BagOfWords().embed([d.content for d in corpus]))
        sources = {d.source for d in corpus}
        found = unit_sources(index, sources, keys=["subject"])
        assert unit_sources(index, ["absent"]) == {"absent": {"absent"}}
    assert found == {source: naive_unit(rows, int(source[1:])) for source in sources}


@pytest.mark.parametrize("seed", range(5))
def test_a_unit_contains_edited_copies_and_no_text_on_the_same_topic(seed):
    text = record(seed)
    words = text.split()
    half = f"{' '.join(words[: len(words) // 2])} {record(seed + 100, 2)}"
    documents = [Document("a", text), Document("b", edited_copy(text, seed)), Document("c", half)]
    assert related_sources(documents, ["a"]) == {"b"}
    assert related_sources(documents, ["a"], copies=False) == frozenset()


def test_copies_of_copies_are_one_unit():
    text = record(1, 6)
    second = edited_copy(text, 2)
    third = edited_copy(second, 3)
    documents = [Document("a", text), Document("b", second), Document("c", third)]
    assert related_sources(documents, ["c"]) == {"a", "b"}


ACCENTED = (
    "Frau Müller übergab am dritten März den Schlüssel für das Büro in Köln. Während der Prüfung blieb die Tür offen, "
    "später schloß Jürgen Vögele die Räume für längere Zeit und führte Gäste über die Brücke."
)
FORMS = {
    "decomposed": normalize("NFD", ACCENTED),
    "full width": ACCENTED.translate({code: code + 0xFEE0 for code in range(33, 127)}),
    "soft hyphens": ACCENTED.replace("e", "\u00ade"),
    "zero-width spaces": ACCENTED.replace("r", "r\u200b"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_in_another_unicode_form_is_in_the_unit(form):
    documents = [Document("a", ACCENTED), Document("b", edited_copy(FORMS[form], 1)), Document("c", record(1))]
    assert related_sources(documents, ["a"]) == {"b"}
    assert len(group_units([Hit(document, 0.5) for document in documents])) == 2


@pytest.mark.parametrize(("copies", "related"), [(MAX_COPIES, MAX_COPIES), (MAX_COPIES + 1, 0)])
def test_a_text_that_is_frequent_in_the_collection_is_no_relation(copies, related):
    documents = [Document(f"d{i}", record(1)) for i in range(copies + 1)]
    assert len(related_sources(documents, ["d0"])) == related


def test_a_document_without_a_subject_is_related_to_none():
    documents = [Document(f"d{i}", f"own {i}", metadata={"subject": s}) for i, s in enumerate([None, "", [], "x"])]
    assert related_sources(documents, ["d0"], ["subject"]) == frozenset()


# Turns


def test_an_edited_copy_in_another_index_is_withheld_in_the_turn():
    text, current = record(1), Turn("question")
    first, second = object(), object()
    current.withhold([Document("a", text)], first, "default")
    hits = tuple(Hit(Document(i, t), 0.5) for i, t in (("b", edited_copy(text, 1)), ("c", record(9))))
    shown = current.visible(Retrieval(hits, SimilarityStats(9, 0.1, 0.1)), second, "default")
    assert [hit.document.id for hit in shown.hits] == ["c"]
    current.show(hits, second, "default")
    found = [(hit.document.id, hit.document.text) for hit in hits]
    assert [name for name, _ in current.allowed(found, lambda item: item)] == ["c"]


FORM = (
    "A patient came to the ward at night with fever and a sore throat. Blood pressure {}, pulse {}. "
    "Doctors gave water, rest and paracetamol; discharge followed the next morning after breakfast."
)


def test_a_form_with_other_numbers_stays_in_the_turn():
    """It is another record: without it, the context would reveal that the first form is in the index."""
    current, index = Turn("question"), object()
    current.withhold([Document("a", FORM.format(120, 71))], index, "default")
    other = Hit(Document("b", FORM.format(140, 88)), 0.5)
    current.show([other], index, "default")
    assert current.visible(Retrieval((other,), SimilarityStats(9, 0.1, 0.1)), index, "default").hits == (other,)
    assert current.allowed([("b", other.document.text)], lambda item: item)
    extract = other.document.text[:110]  # of a framework, from any of both
    assert not current.allowed([("b", extract)], lambda item: item)


def test_text_of_which_a_copy_was_left_is_not_withheld_in_the_turn():
    """Such as a text in more than ``MAX_COPIES`` sources."""
    text, current, index = record(1), Turn("question"), object()
    hits = tuple(Hit(Document(i, t), 0.5) for i, t in (("b", text), ("c", edited_copy(text, 1)), ("d", record(2))))
    found = Retrieval(hits, SimilarityStats(9, 0.1, 0.1))
    current.withhold([Document("a", text)], index, "default", [hits[0].document])
    assert current.visible(found, index, "default").hits == hits
    current.withhold([Document("a", text)], index, "default", [hits[2].document])
    assert current.visible(found, index, "default").hits == hits[2:]


def test_forms_with_other_numbers_are_unrelated_records_in_one_unit():
    first, second = FORM.format(120, 71), FORM.format(140, 88)
    documents = [Document("a", first), Document("b", second), Document("c", f"Discharged later. {first}")]
    assert related_sources(documents, ["a"]) == {"c"}
    assert len(group_units([Hit(document, 0.5) for document in documents])) == 1


def test_a_short_chunk_of_boilerplate_is_no_copy_of_a_record():
    boilerplate = "Repeat the blood sugar in three months, test before breakfast, swap juice for water, come at once."
    text = f"{record(1)} {boilerplate}"
    documents = [Document("a", text), Document("b#2", f"Until then: {boilerplate}", source="b")]
    assert related_sources(documents, ["a"]) == related_sources(documents, ["b"]) == frozenset()
    assert len(group_units([Hit(document, 0.5) for document in documents])) == 1  # counts join rather too much
    part = " ".join(text.split()[: len(text.split()) * 2 // 3])
    assert related_sources([*documents, Document("c", part)], ["a"]) == {"c"}


NOTE = "The harbor gate of Varna was closed on Monday by order of captain Iliev."


def number_of_units(documents, *keys):
    return len(group_units([Hit(document, 0.5) for document in documents], keys))


def test_copies_of_a_short_note_with_dropped_words_are_one_unit():
    words = NOTE.split()
    copies = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
    assert number_of_units([Document(f"d{i}", text) for i, text in enumerate([*copies, NOTE])]) == 1
    assert related_sources([Document("a", NOTE), Document("b", copies[2])], ["a"]) == frozenset()  # for counting only


def test_a_text_of_few_words_does_not_merge_the_units_of_texts_that_contain_it():
    other = "The harbor gate of Burgas opened again in spring after repairs."
    notes = [NOTE, other, "The harbor gate."]
    assert number_of_units([Document(f"d{i}", text) for i, text in enumerate(notes)]) == 2
    assert number_of_units([Document(f"d{i}", text) for i, text in enumerate([NOTE, other, ""])]) == 3


def test_chunks_of_one_word_merge_no_units_of_other_sources():
    texts = [record(seed, 1) for seed in (1, 2, 3)]
    planted = [Document(f"p{i}", f"{text.split()[0]}.", source="planted") for i, text in enumerate(texts)]
    documents = [*(Document(f"d{i}", text) for i, text in enumerate(texts)), *planted]
    units = group_units([Hit(document, 0.5) for document in documents])
    assert [[hit.document.id for hit in unit] for unit in units] == [["d0"], ["d1"], ["d2"]]
    own = Document("p3", "Quartz lanterns glow.", source="planted")
    assert number_of_units([*documents, own]) == 4


def test_copies_of_a_statement_with_dropped_words_are_one_unit():
    copies = ["Alma Reyes takes cordivol evening.", "Alma Reyes takes cordivol every evening.", "Alma takes cordivol."]
    assert number_of_units([Document(f"d{i}", text) for i, text in enumerate(copies)]) == 1


ALIKE = [
    "MALLORY ",
    "Mallory\u200b",
    "Mal\u200blory",
    "M\u0430llory",
    "\uff2dallory",
    "Mall\xf3ry",
    "Mall\u0585\u034f\u0301ry",
]


@pytest.mark.parametrize("name", ALIKE)
def test_confusable_values_are_equal(name):
    documents = [Document(f"d{i}", f"own {i}", metadata={"author": n}) for i, n in enumerate(["Mallory", name, "Ito"])]
    assert number_of_units(documents, "author") == 2
    assert related_sources(documents, ["d0"], ["author"]) == {"d1"}


@pytest.mark.parametrize(
    "names",
    [
        ("Smith <a@x.org>", "Smith <b@y.org>"),
        ("patient [a]", "patient [b]"),
        ("\u0915\u0941\u0932", "\u0915\u0942\u0932"),  # Devanagari ku, kuu
        ("\u304b\u306a", "\u304c\u306a"),  # kana ka, ga
    ],
)
def test_distinguishable_values_are_different(names):
    documents = [Document(f"d{i}", f"own {i}", metadata={"author": n}) for i, n in enumerate(names)]
    assert number_of_units(documents, "author") == 2
    assert related_sources(documents, ["d0"], ["author"]) == frozenset()


def test_a_value_without_visible_characters_is_ignored():
    values = ["\u200b", "\u200b\u2060", " \u00ad", "", None]
    documents = [Document(f"d{i}", f"own {i}", metadata={"author": v}) for i, v in enumerate(values)]
    assert number_of_units(documents, "author") == 1
    assert related_sources(documents, ["d0"], ["author"]) == frozenset()


def test_values_of_markup_alone_are_distinct():
    named = ["<ito@clinic.example>", "<sato@clinic.example>", "<ITO@clinic.example>"]
    documents = [Document(f"d{i}", f"own {i}", metadata={"author": name}) for i, name in enumerate(named)]
    assert related_sources(documents, ["d0"], ["author"]) == {"d2"}
    assert number_of_units(documents, "author") == 2


SOME_WORDS = tuple(f"word{i}" if i % 3 else f"{i}" for i in range(24))
OVERLAPPING = st.lists(st.lists(st.sampled_from(SOME_WORDS), max_size=24, unique=True).map(" ".join), max_size=9)


def naive_groups(texts):
    """Oracle: connected components by a comparison of all pairs."""
    words = [edited_copies.text_words(text) for text in texts]
    group = list(range(len(texts)))
    for i, j in combinations(range(len(texts)), 2):
        if edited_copies.is_edited_copy(words[i], words[j]):
            group = united(group, i, j)
    contained = {
        i
        for i, short in enumerate(words)
        if 0 < len(short.stems) < edited_copies.MIN_WORDS and any(short.stems < text.stems for text in words)
    }
    return group, contained


def united(group, i, j):
    low, high = sorted((group[i], group[j]))
    return [low if g == high else g for g in group]


@pytest.fixture
def no_cached_words():
    edited_copies.text_words.cache_clear()
    yield
    edited_copies.text_words.cache_clear()


@pytest.mark.parametrize("bits", [2048, 16])
def test_groups_of_copies_equal_connected_components_of_all_pairs(bits, no_cached_words, monkeypatch):
    """With 16 bits most words have hash collisions."""
    monkeypatch.setattr(edited_copies, "_BITS", bits)

    @given(OVERLAPPING)
    @settings(max_examples=60, deadline=None)
    def check(texts):
        assert edited_copies.copy_groups(texts) == naive_groups(texts)

    check()


def test_the_oracle_detects_a_comparison_that_misses_pairs(monkeypatch):
    monkeypatch.setattr(edited_copies, "_possible_copies", lambda words: iter(()))
    texts = [" ".join(SOME_WORDS[:16]), " ".join(SOME_WORDS[:15])]
    assert edited_copies.copy_groups(texts) != naive_groups(texts)
