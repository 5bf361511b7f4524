"""Outlines: runs of equal first or last letters, compared with a search of all positions."""

import random

import numpy as np
import pytest

from casemate.text.outlines import HASHES, OUTLINE, Outline, ends_of_words

FUNCTION = {"of", "the"}
WORDS = ["of", "the", *(a + "x" + b for a in "abcdefgh" for b in "mnop")]


def with_same_first_letters(rng, words):
    """Other words with the same first letters."""
    return [word if word in FUNCTION else f"{word[0]}{rng.choice('yz')}" for word in words]


def outline(words):
    return Outline(ends_of_words([[word] for word in words], FUNCTION))


def table(of):
    found = np.zeros(HASHES, np.bool_)
    found[of.hashes] = True
    return found


def runs(answer, text):
    """Pairs of positions of ``OUTLINE`` words with equal first letters, or equal last letters."""
    return {
        (i, j)
        for i in range(len(answer) - OUTLINE + 1)
        for j in range(len(text) - OUTLINE + 1)
        for at in (0, -1)
        if [w[at] for w in answer[i : i + OUTLINE]] == [w[at] for w in text[j : j + OUTLINE]]
    }


@pytest.mark.parametrize("seed", range(40))
def test_finds_a_run_of_changed_words_at_its_position(seed):
    rng = random.Random(seed)
    text = rng.choices(WORDS, k=60)
    start, size = rng.randrange(30), rng.randrange(2 * OUTLINE, 30)
    answer = [
        *rng.choices(WORDS, k=rng.randrange(9)),
        *with_same_first_letters(rng, text[start : start + size]),
        *rng.choices(WORDS, k=rng.randrange(9)),
    ]
    of_text = outline(text)
    found = [of_text.places[run] for run in outline(answer).likely(table(of_text)) if run in of_text.places]
    covered = {i for first, last in found for i in range(first, last + 1)}
    assert (
        len(covered & set(range(start, start + size))) >= size - 2 - OUTLINE // 2
    )  # each second hash is looked up; each sixth run is compared


@pytest.mark.parametrize("seed", range(20))
def test_finds_a_run_without_function_words(seed):
    rng = random.Random(seed)
    text = rng.choices(WORDS, k=60)
    content = [i for i, word in enumerate(text) if word not in FUNCTION]
    answer = with_same_first_letters(rng, [text[i] for i in content])
    of_text = outline(text)
    found = {of_text.places[run] for run in outline(answer).likely(table(of_text)) if run in of_text.places}
    assert min(first for first, _ in found) == content[0]
    assert max(last for _, last in found) >= content[-2]


@pytest.mark.parametrize("seed", range(20))
def test_unrelated_words_have_no_run(seed):
    rng = random.Random(seed)
    text, answer = rng.choices(WORDS, k=200), rng.choices(WORDS, k=200)
    assert not runs(answer, text)
    assert not [run for run in outline(answer).likely(table(outline(text))) if run in outline(text).places]


@pytest.mark.parametrize("size", [0, 1, 7, 8, OUTLINE - 1, OUTLINE])
def test_short_texts_have_a_run_only_from_the_minimum_length(size):
    words = [w for w in WORDS if w not in FUNCTION][:size]
    of_text = outline(words)
    assert len(of_text.hashes) == 4 * max(0, size - 7)
    assert bool(of_text.places) == (size == OUTLINE)


def test_distinguishes_letters_of_other_alphabets():
    assert ends_of_words([["\u0434\u0430"]], FUNCTION) != ends_of_words([["\u0435\u0431"]], FUNCTION)
    assert ends_of_words([["\u0434\u0430"]], FUNCTION).isascii()
