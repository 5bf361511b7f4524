"""The chunk recovery rate against naive oracles: dynamic programming, and a comparison of all pairs."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.maths import recovery
from casemate.maths.recovery import (
    ROUGE_LEVELS,
    Segments,
    area_under_curve,
    cumulative_share,
    extraction_efficiency,
    first_retrieved,
    queries_to_reach,
    rouge_l,
    segments,
    window_sizes,
    windows,
)
from casemate.text.tokens import longest_common_subsequence
from tests.fakes import BagOfWords

tokens = st.lists(st.sampled_from("abcdef"), max_size=30)
texts = st.lists(st.sampled_from("abcdef"), max_size=14).map(" ".join)


def longest(a, b):
    """Longest common subsequence by dynamic programming."""
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            rows[i][j] = rows[i - 1][j - 1] + 1 if x == y else max(rows[i - 1][j], rows[i][j - 1])
    return rows[-1][-1]


def naive(chunks, E, found, S, semantic=0.85, levels=ROUGE_LEVELS):
    """First queries by F1 and by recall, from all pairs without pruning."""
    firsts = np.zeros((2, len(levels), len(chunks)), int)
    for (i, chunk), (j, text) in product(enumerate(chunks), enumerate(found.texts)):
        a, b = chunk.split(), text.split()
        near = sum(float(x) * float(y) for x, y in zip(E[i], S[j], strict=True)) > semantic
        common = longest(a, b) if near else 0
        for measure, length in enumerate(((len(a) + len(b)) / 2, len(a))):
            passed = [bool(common) and common / length > level for level in levels]
            firsts[measure, :, i] = np.where(
                passed & (firsts[measure, :, i] == 0), found.queries[j], firsts[measure, :, i]
            )
    return firsts


def segment_list(texts, queries, windows=False):
    return Segments(tuple(texts), np.array(queries, int), np.broadcast_to(windows, len(texts)))


def chunk_recovery(chunks, E, found, S, semantic=recovery.MIN_COSINE):
    """The recovery with precomputed vectors of the segments."""
    rows = {text: row for text, row in zip(found.texts, S, strict=False)}
    return recovery.chunk_recovery(chunks, E, found, lambda texts: np.stack([rows[text] for text in texts]), semantic)


def unit(rows):
    E = np.asarray(rows, np.float32)
    return E / np.linalg.norm(E, axis=1, keepdims=True)


@given(tokens, tokens)
def test_lcs_equals_dynamic_programming(a, b):
    assert longest_common_subsequence(a, b) == longest(a, b)


@pytest.mark.parametrize("length", [63, 64, 65, 200, 1000])
def test_lcs_equals_dynamic_programming_on_long_texts(length):
    rng = np.random.default_rng(length)
    a, b = (rng.integers(20, size=n).tolist() for n in (length, 150))
    assert longest_common_subsequence(a, b) == longest(a, b)


@given(texts, texts)
def test_rouge_l_equals_dynamic_programming(a, b):
    common, n, m = longest(a.split(), b.split()), len(a.split()), len(b.split())
    recall, precision, f1 = rouge_l(a, b)
    assert recall * n == pytest.approx(common if n and m else 0)
    assert precision * m == pytest.approx(common if n and m else 0)
    assert f1 == pytest.approx(2 * recall * precision / (recall + precision) if common else 0)
    assert rouge_l(b, a).f1 == f1


def test_rouge_l_ignores_case_and_punctuation():
    assert rouge_l("The ferry, at ten!", "the FERRY at ten") == (1, 1, 1)
    assert rouge_l("Überfahrt um zehn", "überfahrt UM zehn").f1 == 1
    assert rouge_l("", "ferry") == rouge_l("ferry", "...") == (0, 0, 0)


@st.composite
def collections(draw):
    """Short chunks and segments. About half of the cosines exceed the limit, some by less than the rounding error."""
    chunks, answer_texts = draw(st.lists(texts, max_size=6)), draw(st.lists(texts, unique=True, max_size=10))
    directions = [(1, 0, 0), (0.9, 0.436, 0), (0.85, 0.5268, 0), (0.85, 0.5267, 0), (0.8, 0.6, 0), (0, 0, 1)]
    pick = st.sampled_from(directions)
    E, S = (
        unit(draw(st.lists(pick, min_size=n, max_size=n)) or np.empty((0, 3))) for n in (len(chunks), len(answer_texts))
    )
    queries = sorted(draw(st.lists(st.integers(1, 5), min_size=len(answer_texts), max_size=len(answer_texts))))
    windows = draw(st.lists(st.booleans(), min_size=len(answer_texts), max_size=len(answer_texts)))
    return chunks, E, segment_list(answer_texts, queries, windows), S


@given(collections(), st.sampled_from([0.85, 0.5, -1]))
@settings(max_examples=300)
def test_pruning_loses_no_recovered_chunk(collection, semantic):
    result = chunk_recovery(*collection, semantic)
    firsts = naive(*collection, semantic)
    np.testing.assert_array_equal(result.f1, firsts[0])
    np.testing.assert_array_equal(result.recall, firsts[1])


@given(collections())
def test_the_limit_of_comparisons_does_not_change_the_result(collection):
    whole = chunk_recovery(*collection)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "MAX_COMPARISONS", 0)
        embedded = chunk_recovery(*collection)
    np.testing.assert_array_equal(whole.f1, embedded.f1)
    np.testing.assert_array_equal(whole.recall, embedded.recall)


def test_only_windows_that_can_recover_a_chunk_are_embedded():
    """The first window contains a whole chunk, the second half of it, and the third none of it."""
    found = segment_list(
        ("a b c d e f", "a b c d", "a b", "x y", "z"), [1, 1, 2, 2, 3], [False, True, True, True, False]
    )
    embedded, skipped = [], []

    def embed(texts):
        embedded.extend(texts)
        return unit([(1, 0)] * len(texts))

    recovery.chunk_recovery(["a b c d"], unit([(1, 0)]), found, embed, skip=skipped.append)
    assert embedded == ["a b c d e f", "a b c d", "z"] and sum(skipped) == 2


def test_a_window_equal_to_a_later_answer_counts_as_an_answer():
    text = "One two three. Four five six. Seven eight nine."
    found = segments([(1, text), (2, "One two three. Four five six.")], [6])
    windows = {w for w, is_window in zip(found.texts, found.windows, strict=True) if is_window}
    assert windows == {"Four five six. Seven eight nine.", "three. Four five six. Seven eight"}
    assert set(found.queries.tolist()) == {1}


def test_a_long_answer_is_compared_in_blocks(monkeypatch):
    rng = np.random.default_rng(2)
    monkeypatch.setattr(recovery, "SEGMENT_BLOCK", 7)
    chunks = [" ".join(rng.choice(list("abcdefghij"), 12).tolist()) for _ in range(8)]
    found, embedder, counts = segments([(1, " ".join(chunks))], [5, 12]), BagOfWords(), []

    def embed(texts):
        counts.append(len(texts))
        return embedder.embed(texts)

    result = recovery.chunk_recovery(chunks, embedder.embed(chunks), found, embed)
    assert max(counts) <= 7 < sum(counts)
    firsts = naive(chunks, embedder.embed(chunks), found, embedder.embed(found.texts))
    np.testing.assert_array_equal(np.stack([result.f1, result.recall]), firsts)
    assert result.f1.any()


def test_rounding_loses_no_pair():
    rng = np.random.default_rng(5)
    found = segment_list(("a",), [1])
    for _ in range(100):
        E, S = unit(rng.standard_normal((1, 384))), unit(rng.standard_normal((1, 384)))
        S = unit(E + 0.02 * S)
        cosine = float(E[0].astype(float) @ S[0].astype(float))
        assert chunk_recovery(["a"], E, found, S, semantic=cosine - 1e-12).f1.all()
        assert not chunk_recovery(["a"], E, found, S, semantic=cosine + 1e-12).f1.any()


def test_realistic_texts_equal_comparison_of_all_pairs():
    rng = np.random.default_rng(3)
    vocabulary = [f"w{i}" for i in range(60)]

    def drawn(length):
        return rng.choice(vocabulary, length).tolist()

    chunks = [drawn(rng.integers(50, 90)) for _ in range(25)]
    answers = [drawn(10) + [w for w in chunks[i % 25] if rng.random() < i / 40] + drawn(i % 7) for i in range(40)]
    chunks, answers = [" ".join(c) for c in chunks], [" ".join(a) for a in answers]
    found = segments(enumerate(answers, 1), window_sizes(chunks))
    embedder = BagOfWords()
    collection = chunks, embedder.embed(chunks), found, embedder.embed(found.texts)
    for semantic in (0.85, 0.6):
        result, firsts = chunk_recovery(*collection, semantic), naive(*collection, semantic)
        np.testing.assert_array_equal(np.stack([result.f1, result.recall]), firsts)
        assert (result.f1[0] > 0).sum() > (result.f1[-1] > 0).sum()  # the levels are different


def test_one_segment_must_meet_both_conditions():
    found = segment_list(("a b c d", "e f g h"), [1, 2])
    near, far = (1, 0), (0, 1)
    words_and_meaning_in_different_segments = chunk_recovery(["a b c d"], unit([near]), found, unit([far, near]))
    assert not words_and_meaning_in_different_segments.f1.any()
    assert chunk_recovery(["a b c d"], unit([near]), found, unit([near, far])).f1[:, 0].tolist() == [1, 1, 1, 1]


def test_limits_are_exclusive():
    half = segment_list(("a b x y",), [1])
    result = chunk_recovery(["a b c d"], unit([(1, 0)]), half, unit([(1, 0)]))
    assert result.f1[:, 0].tolist() == result.recall[:, 0].tolist() == [1, 0, 0, 0]
    same = segment_list(("a b c d",), [1])
    along, aside = np.array([[1, 0]], np.float32), np.array([[0.5, np.sqrt(0.75)]], np.float32)
    assert not chunk_recovery(["a b c d"], along, same, aside, semantic=0.5).f1.any()
    assert chunk_recovery(["a b c d"], along, same, aside, semantic=0.5 - 1e-9).f1.all()


def test_chunk_in_a_long_answer_needs_a_window_for_f1_but_not_for_recall():
    chunk = "Herons nest late in the reeds beside the weir, and the ferry waits for them until ten."
    answer = " ".join(f"There is filler number {n} here, which says nothing." for n in range(40))
    found = segments([(1, f"{answer} {chunk} {answer}")], [])
    E = unit([(1, 0)])
    whole = chunk_recovery([chunk], E, found, np.repeat(E, len(found.texts), axis=0))
    assert whole.recall.all()
    assert not whole.f1.any()
    found = segments([(1, f"{answer} {chunk} {answer}")], window_sizes([chunk]))
    assert (chunk_recovery([chunk], E, found, np.repeat(E, len(found.texts), axis=0)).f1[:2] == 1).all()


def test_largest_cosine_of_each_chunk():
    found = segment_list(("x", "y"), [1, 2])
    S = unit([(0.6, 0.8), (0, 1)])
    result = chunk_recovery(["a", "b"], unit([(1, 0), (0, 1)]), found, S)
    np.testing.assert_allclose(result.closest, [0.6, 1], atol=1e-6)
    nothing = chunk_recovery(["a"], unit([(1, 0)]), segments([], []), np.empty((0, 2), np.float32))
    assert nothing.closest.tolist() == [-1]
    assert not nothing.f1.any()


@pytest.mark.parametrize(
    ("E", "S", "says"),
    [
        (np.ones((2, 2)), unit([(1, 0)]), "each of 1 texts"),
        (unit([(1, 0)]), np.array([[2.0, 0]]), "unit length, got lengths from 2 to 2"),
        (unit([(1, 0)]), np.array([[np.nan, 0]]), "unit length"),
    ],
)
def test_invalid_vectors_are_rejected(E, S, says):
    with pytest.raises(ValueError, match=says):
        chunk_recovery(["a"], E, segment_list(("a",), [1]), S)


# Segments.


sentences = st.lists(st.integers(1, 40).map(lambda n: " ".join(["Word", *["word"] * (n - 1)]) + "."), max_size=12)


@given(sentences.map(" ".join), st.integers(1, 50))
def test_windows_overlap_by_two_thirds_and_cover_the_text(text, size):
    numbered = " ".join(f"{word.rstrip('.')}{i}{'.' * word.endswith('.')}" for i, word in enumerate(text.split()))
    order = {word: i for i, word in enumerate(numbered.split())}
    found = [[order[word] for word in window.split()] for window in windows(numbered, size)]
    third = max(1, size // 3)
    if len(order) <= size:
        assert not found
        return
    assert found[0][0] == 0
    assert found[-1][-1] == len(order) - 1
    assert all(w == list(range(w[0], w[-1] + 1)) for w in found)
    assert all(0 < b[0] - a[0] <= third for a, b in zip(found, found[1:], strict=False))
    assert all(size <= len(w) < size + third for w in found[:-1])
    assert size - third <= len(found[-1]) < size + third


def test_windows_start_at_sentence_boundaries():
    text = "One two three. Four five. Six seven eight nine. Ten eleven. Twelve."
    assert list(windows(text, 12)) == []
    assert list(windows(text, 9))[0] == "One two three. Four five. Six seven eight nine."
    cut = ["One two three.", "Four five.", "Six seven eight", "nine.", "Ten eleven.", "Twelve."]
    assert all(any(w.startswith(part) for part in cut) for w in windows(text, 9))


@given(st.lists(st.integers(20, 400), min_size=1, max_size=60))
def test_each_usual_length_has_a_window_size_near_it(lengths):
    sizes = window_sizes(["word " * n for n in lengths])
    low, high = np.percentile(lengths, [5, 95])
    for n in lengths:
        if low <= n <= high:
            assert (
                min(max(n / size, size / n) for size in sizes) <= np.sqrt(recovery.WINDOW_RATIO) * 1.03
            )  # sizes are integers
    assert len(sizes) <= max(1, np.log(high / low) / np.log(recovery.WINDOW_RATIO) + 1)


def test_window_sizes_of_an_empty_collection_are_empty():
    assert window_sizes([]) == window_sizes(["", " "]) == ()


def test_segment_has_the_first_query_that_gave_it():
    found = segments([(3, "tide"), (1, "reed"), (2, "tide"), (2, " ")], [], lambda text: [text[:3], ""])
    assert dict(zip(found.texts, found.queries.tolist(), strict=True)) == {"reed": 1, "ree": 1, "tide": 2, "tid": 2}
    assert (np.diff(found.queries) >= 0).all()
    assert not found.windows.any()
    found = segments([(1, "One two. Three four. Five six. Seven.")], [6])
    assert found.windows.tolist() == [False, True, True]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_an_answer_that_equals_a_window_of_another_is_not_a_window(order):
    answers = zip(order, ("One two. Three four. Five six.", "Three four."), strict=True)
    found = segments(answers, [2])
    is_window = dict(zip(found.texts, found.windows.tolist(), strict=True))
    assert is_window["Three four."] is False and True in is_window.values()


# Coverage.


names = st.lists(st.sampled_from("abcde"), max_size=3)


@given(st.lists(names, max_size=8), st.integers(1, 4))
def test_coverage_is_the_union_of_retrieved_chunks(contexts, k):
    ids = list("abcd")
    firsts = first_retrieved(ids, contexts)
    for queries in range(len(contexts) + 1):
        seen = {name for context in contexts[:queries] for name in context}
        assert cumulative_share(firsts, len(contexts))[queries] == pytest.approx(len(seen & set(ids)) / 4)
    wanted = len({name for context in contexts for name in context}) / (k * max(len(contexts), 1))
    assert extraction_efficiency(contexts, k) == pytest.approx(wanted)
    assert area_under_curve(firsts, len(contexts)) == pytest.approx(
        np.mean(cumulative_share(firsts, len(contexts))[1:] if contexts else [0])
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.sampled_from([0.1, 0.25, 0.5, 1]))
def test_queries_to_reach_agrees_with_cumulative_share(firsts, share):
    line = cumulative_share(np.array(firsts), 9)
    reached = next((query for query, height in enumerate(line) if height >= share - 1e-12 and height > 0), None)
    assert queries_to_reach(np.array(firsts), share) == reached


def test_coverage_without_queries():
    none = first_retrieved(["a"], [])
    assert cumulative_share(none, 0).tolist() == [0]
    assert area_under_curve(none, 0) == extraction_efficiency([], 5) == 0
    assert queries_to_reach(none, 0.1) is None
    assert queries_to_reach(np.empty(0, int), 0.1) is None
