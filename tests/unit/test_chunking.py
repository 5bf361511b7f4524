"""Chunking. The oracles locate a part of a text in which no visible character occurs twice."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from casemate.errors import ConfigError
from casemate.rag import chunking
from casemate.rag.chunking import LONGEST, PIECE, split_document, split_text
from casemate.text.wordpiece import WordPiece
from casemate.types import Document


def tokens(text):
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


class Words:
    """The token boundaries of an embedder."""

    def spans(self, text):
        return tokens(text)


@st.composite
def unique_texts(draw):
    """Words of characters that occur once, separated by all kinds of whitespace."""
    lengths = draw(st.lists(st.integers(1, 6), max_size=60))
    gaps = st.sampled_from([" ", "  ", "\n", "\n\n", "\n \n", " ", "\t", "", "\r\n\r\n"])
    text, code = draw(gaps), 0x4E00
    for length in lengths:
        text += "".join(map(chr, range(code, code + length))) + draw(gaps)
        code += length
    return text


SIZES = st.integers(1, 20)
OVERLAPS = st.integers(-1, 25)


def part_positions(text, pieces):
    """Start and end of each part, found by the position of its first character."""
    begins = [text.index(piece[0]) for piece in pieces]
    for piece, begin in zip(pieces, begins, strict=True):
        assert text[begin : begin + len(piece)] == piece
    return [(begin, begin + len(piece)) for piece, begin in zip(pieces, begins, strict=True)]


def check_cover(text, pieces):
    assert all(piece == piece.strip() != "" for piece in pieces)
    assert set(text) - set("".join(pieces)) <= set(" \n\t\r")
    found = part_positions(text, pieces)
    assert found == sorted(found)


@given(unique_texts(), SIZES, OVERLAPS)
def test_parts_cover_all_words_and_fit_the_size(text, size, overlap):
    pieces = split_text(text, tokens(text), size, overlap)
    check_cover(text, pieces)
    assert all(len(tokens(piece)) <= size for piece in pieces)
    found = part_positions(text, pieces)
    for (_, stop), (begin, further) in zip(found, found[1:], strict=False):
        assert further > stop  # no part is contained in the previous one
        assert len(tokens(text[begin:stop])) <= max(overlap, 0)
    if len(tokens(text)) <= size:
        assert len(pieces) == bool(text.strip())


@given(
    unique_texts(),
    st.lists(st.tuples(st.integers(-5, 300), st.integers(-5, 300)), max_size=80),
    SIZES,
    OVERLAPS,
)
@example("一二三", [(0, 1)] * 9, 2, 2)
@example("一 二 三", [(0, 5)] * 9 + [(2, 3), (1, 1), (1, 1), (1, 0)], 1, 1)
def test_parts_cover_the_text_for_any_token_spans(text, spans, size, overlap):
    pieces = split_text(text, spans, size, overlap)
    check_cover(text, pieces)
    for begin, stop in part_positions(text, pieces):
        count = sum(begin <= min(max(start, 0), len(text)) < stop for start, _ in spans)
        assert count <= size or stop - begin == 1


@given(st.text(max_size=200), SIZES, OVERLAPS)
def test_any_text_is_split_by_characters(text, size, overlap):
    pieces = split_text(text, [(i, i + 1) for i in range(len(text))], size, overlap)
    assert all(0 < len(piece) <= size for piece in pieces)
    assert {c for c in text if not c.isspace()} <= set("".join(pieces))


@given(st.integers(2, 30), st.integers(0, 15), st.integers(1, 200))
def test_parts_of_plain_words_overlap_by_the_configured_number(size, overlap, count):
    text = " ".join(f"w{i}" for i in range(count))
    pieces = [piece.split() for piece in split_text(text, tokens(text), size, overlap)]
    expected = min(overlap, size // 2)
    for before, after in zip(pieces, pieces[1:], strict=False):
        assert len(before) == size
        assert before[len(before) - expected :] == after[:expected]


def test_blank_text_has_no_parts_and_text_without_tokens_has_one():
    assert split_text("", [], 5, 1) == []
    assert split_text(" \n ", [], 5, 1) == []
    assert split_text(" \n ", [(0, 1), (1, 2), (2, 3)], 1, 0) == []
    assert split_text(" ab cd ", [], 5, 1) == ["ab cd"]


@pytest.mark.parametrize("size", [0, -3])
def test_size_must_be_positive(size):
    with pytest.raises(ConfigError, match="at least 1 token"):
        split_text("a", [(0, 1)], size, 0)


@pytest.mark.parametrize(
    ("tail", "end"),
    [
        ("x. y\n\nz. p q", "y"),  # the paragraph, though a sentence ends later
        ("w x y. z p q r", "y."),  # the sentence, though words end later
        ("w x y z p q r s", "z"),  # the word
        ("w x! y z p q r s", "x!"),
        ("w x? 'y z p q r s", "x?"),
        ("這。是什麼都 w x y z", "這。"),
    ],
)
def test_part_ends_at_the_best_boundary_near_the_limit(tail, end):
    text = "a b c d e f g h i j k l " + tail
    first, *_ = split_text(text, tokens(text), 16, 0)
    assert first.endswith(end)
    assert first == text[: len(first)]


def test_early_boundaries_are_ignored():
    text = "One. Two.\n\n" + "x" * 50
    by_character = [(i, i + 1) for i in range(len(text))]
    assert split_text(text, by_character, 40, 0) == [text[:40], text[40:]]


def test_overlap_starts_at_a_sentence_or_a_word():
    text = "a b c d e f g h i j. k l m n o p q r s t u v w"
    pieces = split_text(text, tokens(text), 16, 6)
    assert pieces[0].endswith("n o")
    assert pieces[1].startswith("k l m n o")  # at the sentence, not at its full stop, six tokens earlier
    text = "a b c d e f g h i j k l m n o p" + "q" * 20
    pieces = split_text(text, [(i, i + 1) for i in range(len(text))], 20, 5)
    assert pieces[1].startswith("i j k")  # at a word


def test_runtime_is_linear():
    for text in (
        "a b. c\n\n" * 250_000,
        "x" * 2_000_000,
        "\n" * 2_000_000 + "x",
        "." * 2_000_000,
        "\n " * 10**6,
    ):
        assert len(split_document(Document("d", text), Words(), 254, 253)) >= bool(text.strip())


def source_document(text, title="", **more):
    return Document("name", text, title, "name", "digest", {"k": 1}, **more)


def test_chunks_are_named_after_their_source():
    assert split_document(source_document("a b"), Words(), 8, 0) == [source_document("a b")]
    many = split_document(source_document("a b c d e f g h i"), Words(), 4, 0)
    assert [d.id for d in many] == ["name#1", "name#2", "name#3"]
    assert {(d.source, d.digest, d.metadata["k"]) for d in many} == {("name", "digest", 1)}
    assert [d.text for d in many] == ["a b c d", "e f g h", "i"]


def test_ids_of_different_sources_differ():
    sources = [Document(name, "a b c") for name in ("a", "a#1", "a#1#1", "a#x")]
    ids = [d.id for source in sources for size in (2,) for d in split_document(source, Words(), size, 0)]
    ids += [d.id for name in ("b", "b#2") for d in split_document(Document(name, "a"), Words(), 9, 0)]
    assert len(set(ids)) == len(ids)
    one, two = split_document(Document("a#1", "x"), Words(), 9, 0), split_document(Document("a", "x y"), Words(), 1, 0)
    assert {d.id for d in one}.isdisjoint(d.id for d in two)
    assert one[0].source == "a#1"


@given(unique_texts(), unique_texts(), st.integers(4, 30), OVERLAPS)
def test_chunks_fit_with_their_title(title, text, size, overlap):
    made = split_document(source_document(text, title), Words(), size, overlap)
    assert all(len(tokens(d.content)) <= size and len(tokens(d.title)) <= size // 4 for d in made)
    assert {c for c in text if not c.isspace()} <= set("".join(d.text for d in made))
    assert len(made) >= bool(text.strip() or title.strip())


def test_a_long_title_is_shortened_to_one_line():
    made = split_document(source_document("x " * 50, " T1\n t2  t3 t4 t5 t6 "), Words(), 16, 0)
    assert {d.title for d in made} == {"T1 t2 t3 t4"}
    assert all(len(tokens(d.content)) <= 16 for d in made)
    assert split_document(source_document("x", "T" * 10**6), Words(), 16, 0)[0].title == "T" * 4 * PIECE
    assert split_document(source_document("x", "T"), Words(), 3, 0)[0].title == ""


def test_source_without_text_gives_one_chunk_of_its_title_or_none():
    assert [(d.title, d.text) for d in split_document(source_document(" \n", "Only a title"), Words(), 8, 0)] == [
        ("", "Only a title")
    ]
    assert split_document(source_document(" ", " \n"), Words(), 8, 0) == []


@given(unique_texts(), SIZES, st.integers(4, 40))
def test_blocks_concatenate_to_the_text_and_are_limited_in_length(text, size, block):
    whole, chunking.BLOCK = chunking.BLOCK, block
    try:
        parts = list(chunking._blocks(text))
        pieces = [d.text for d in split_document(Document("d", text), Words(), size, 2)]
    finally:
        chunking.BLOCK = whole
    assert "".join(parts) == text
    assert all(len(part) <= block for part in parts)
    check_cover(text, pieces)


def test_blocks_end_at_paragraphs():
    text = ("word " * 50 + "end.\n\n") * 2000
    parts = list(chunking._blocks(text))
    assert len(parts) == 6
    assert all(part.endswith("end.\n\n") for part in parts)


@pytest.mark.parametrize("filler", ["x" * 50_000, "\u200b" * 50_000, "\U0001f600" * 50_000, "\u200b" * 50_000 + "x"])
def test_long_unknown_word_is_split_into_several_parts(filler):
    text, words = f"leave {filler} leave", WordPiece({"[UNK]": 0, "leave": 1}, ["[UNK]"])
    assert len(words.spans(text)) < 5
    parts = split_text(text, words.spans(text), 254, 32)
    assert max(map(len, parts)) <= 255 * LONGEST and len(parts) > 40
    assert parts[0].startswith("leave") and parts[-1].endswith("leave")
    assert sum(map(len, parts)) >= len(text) - 2


@given(st.integers(0, 400), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400))), SIZES, OVERLAPS)
@example(400, [], 1, 0)
def test_parts_have_a_limited_length_for_any_spans(length, spans, size, overlap):
    assert all(len(part) <= (size + 1) * LONGEST for part in split_text("a" * length, spans, size, overlap))
