"""Copy detection, compared with brute-force counts."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError
from casemate.text.copying import MIN_RUN, NO_SYMBOL, Alphabet, CopyDetector, SuffixAutomaton

SYMBOLS = st.integers(0, 3)
TEXTS = st.lists(SYMBOLS, max_size=14)


def occurs(part, text):
    return any(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


def longest_run(text, answer):
    """Returns the length of the longest suffix of the answer that occurs in the text, by brute force."""
    return max(n for n in range(len(answer) + 1) if occurs(answer[len(answer) - n :], text))


def in_runs(text, answer):
    """Returns the positions of the answer in common runs of at least MIN_RUN tokens, by brute force."""
    found = set()
    for i in range(len(answer)):
        for j in range(i + MIN_RUN, len(answer) + 1):
            if occurs(answer[i:j], text):
                found |= set(range(i, j))
    return found


def subsequence(a, b):
    """Returns the length of the longest common subsequence, by the standard dynamic program."""
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


def state_after(copying, answer):
    state = copying.start()
    for symbol in answer:
        state = copying.step(state, symbol)
    return state


@given(TEXTS, TEXTS, st.integers(0, 5))
def test_suffix_automaton_finds_the_longest_match_and_its_continuations(text, answer, least):
    automaton, match_state = SuffixAutomaton(text), (0, 0)
    for symbol in answer:
        match_state = automaton.step(*match_state, symbol)
    assert match_state[1] == longest_run(text, answer)
    tail = answer[len(answer) - least :] if least <= len(answer) else None
    expected = {s for s in range(4) if tail is not None and occurs([*tail, s], text)}
    assert set(automaton.continuations(*match_state, least)) == expected


@given(st.lists(TEXTS, max_size=3), TEXTS)
def test_measures_equal_brute_force(chunks, answer):
    copying = CopyDetector(chunks, run=4)
    state = state_after(copying, answer)
    for z, chunk in enumerate(chunks):
        assert copying.run_length(state, z) == longest_run(chunk, answer)
        assert copying.quoted_tokens(state, z) == len(in_runs(chunk, answer))
        assert copying.lcs_length(state, z) == subsequence(chunk, answer)
        assert copying.rouge_l_recall(state, z) == subsequence(chunk, answer) / max(len(chunk), 1)


@given(TEXTS, TEXTS, TEXTS, st.integers(1, 5))
def test_runs_of_the_question_are_not_counted(chunk, question, answer, run):
    copying = CopyDetector([chunk], question, run, budget=None)
    state = state_after(copying, answer)
    quoted_from_question = set()
    for end in range(len(answer) + 1):  # tokens in runs of the question, at each prefix
        n = longest_run(question, answer[:end])
        quoted_from_question |= set(range(end - n, end)) if n >= MIN_RUN else set()
    length = longest_run(chunk, answer)
    new = [i for i in range(len(answer) - length, len(answer)) if i not in quoted_from_question]
    assert copying.run_length(state, 0) == len(new)
    assert bool(copying.copied_chunks(state)) == (len(new) >= run)
    if len(new) >= run:
        tail = answer[new[-run] :]
        assert set(copying.continuations(state, 0)) == {s for s in range(4) if occurs([*tail, s], chunk)}
    else:
        assert not copying.continuations(state, 0)
    assert copying.lcs_length(state, 0) == subsequence(chunk, answer)  # the question has no effect
    assert copying.quoted_tokens(state, 0) >= len(
        in_runs(chunk, answer) - quoted_from_question
    )  # lower bound; exceeded at the start of a run
    assert copying.quoted_tokens(state, 0) <= len(in_runs(chunk, answer))


@given(TEXTS, TEXTS, st.integers(0, 6))
def test_chunk_over_budget_stays_over_budget_and_all_its_symbols_are_continuations(chunk, answer, budget):
    copying = CopyDetector([chunk], run=3, budget=budget, share=0.5)
    state, was = copying.start(), False
    for i, symbol in enumerate(answer):
        state = copying.step(state, symbol)
        answer_prefix = answer[: i + 1]
        common = subsequence(chunk, answer_prefix)
        exceeds_budget = len(in_runs(chunk, answer_prefix)) >= budget or common >= max(budget, 0.5 * len(chunk))
        assert copying.over_budget(state, 0) == (bool(chunk) and exceeds_budget)
        assert copying.over_budget(state, 0) >= was
        was = copying.over_budget(state, 0)
        if was:
            assert set(copying.continuations(state, 0)) == set(chunk)
            assert copying.copied_chunks(state) == [0]
            assert 0 in state.copied


def test_copy_with_filler_words_is_detected():
    chunk, filler = list(range(60)), 99
    answer = [s for pair in chunk for s in (pair, filler)]
    copying = CopyDetector([chunk], run=8, budget=16, share=0.4)
    states = [copying.start()]
    for symbol in answer:
        states.append(copying.step(states[-1], symbol))
    assert copying.quoted_tokens(states[-1], 0) == 0
    at = next(i for i, state in enumerate(states) if copying.over_budget(state, 0))
    assert copying.lcs_length(states[at], 0) == 24  # 40 % of 60
    assert CopyDetector([chunk], run=8, budget=None).copied_chunks(states[-1]) == []


def test_states_are_immutable():
    copying = CopyDetector([[1, 2, 3, 4, 5]], run=2)
    one = copying.step(copying.start(), 1)
    copy_state = copying.step(copying.step(one, 2), 3)
    other_state = copying.step(one, 7)
    assert copying.step(copying.step(one, 2), 3) == copy_state
    assert copying.copied_chunks(copy_state) == [0] and copying.copied_chunks(other_state) == []
    assert copy_state.copied == {0} and one.copied == frozenset()


def test_state_keeps_chunks_that_are_no_longer_copied():
    copying = CopyDetector([[1, 2, 3], [4, 5, 6]], run=3)
    state = state_after(copying, [1, 2, 3, 9, 4, 5, 6])
    assert (copying.copied_chunks(state), state.copied) == ([1], {0, 1})


def test_tokens_without_letters_are_skipped_in_chunk_question_and_answer():
    copying = CopyDetector([[1, NO_SYMBOL, 2, 3]], [NO_SYMBOL], run=3)
    assert copying.copied_chunks(state_after(copying, [1, 2, NO_SYMBOL, NO_SYMBOL, 3, NO_SYMBOL])) == [0]
    assert set(
        CopyDetector([[1, NO_SYMBOL, 2, 3]], run=2).continuations(state_after(copying, [1, NO_SYMBOL, 2]), 0)
    ) == {3}


def test_empty_chunks_are_never_copied():
    assert CopyDetector([]).copied_chunks(state_after(CopyDetector([]), [1, 2, 3])) == []
    empty = CopyDetector([[], [NO_SYMBOL]], run=1, budget=0)
    assert empty.copied_chunks(state_after(empty, [1, 2, 3])) == []
    assert empty.rouge_l_recall(empty.start(), 0) == 0


@pytest.mark.parametrize("options", [{"run": 0}, {"budget": -1}, {"share": 0.0}, {"share": 1.5}])
def test_options_out_of_range_raise_an_error(options):
    with pytest.raises(ConfigError, match="need run > 0, a budget"):
        CopyDetector([], **options)


class TestAlphabet:
    def test_case_spaces_and_punctuation_are_ignored(self):
        alphabet = Alphabet(["The", " the", "THE ", "-", " ", "", "«a»", "A", "é", "É", "7", "\n"])
        assert alphabet.symbols.tolist() == [0, 0, 0, -1, -1, -1, 1, 1, 2, 2, 3, -1]

    def test_tokens_with_partial_characters_are_not_merged(self):
        assert len(set(Alphabet(["\ufffd", "\ufffd", "a"]).encode([0, 1, 2]))) == 3

    @given(st.lists(st.text(string.ascii_letters[:3] + "A- ", max_size=2), min_size=1, max_size=12), st.data())
    def test_tokens_returns_all_tokens_of_the_symbols(self, texts, data):
        alphabet = Alphabet(texts)
        symbols = data.draw(st.sets(st.sampled_from([s for s in range(alphabet.symbols.max() + 1)] or [0])))
        symbols &= set(alphabet.symbols.tolist())
        expected = [i for i, s in enumerate(alphabet.symbols.tolist()) if s in symbols]
        assert sorted(alphabet.tokens(symbols).tolist()) == expected
