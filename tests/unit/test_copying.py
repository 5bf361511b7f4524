from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.copying import NOTHING, SHORT, Alphabet, Automaton, Copying
from casemate.errors import ConfigError

SYMBOLS = st.integers(0, 3)
TEXTS = st.lists(SYMBOLS, max_size=14)


def occurs(part, text):
    return any(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


def longest_run(text, answer):
    """The longest end of the answer that occurs in the text, by trying."""
    return max(n for n in range(len(answer) + 1) if occurs(answer[len(answer) - n :], text))


def in_runs(text, answer):
    """Which tokens of the answer lie in a run of SHORT or more, by trying all substrings."""
    found = set()
    for i in range(len(answer)):
        for j in range(i + SHORT, len(answer) + 1):
            if occurs(answer[i:j], text):
                found |= set(range(i, j))
    return found


def subsequence(a, b):
    """Length of the longest common subsequence, by the textbook's table."""
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


def walked(copying, answer):
    state = copying.start()
    for symbol in answer:
        state = copying.step(state, symbol)
    return state


@given(TEXTS, TEXTS, st.integers(0, 5))
def test_the_automaton_finds_the_longest_match_and_what_carries_it_on(text, answer, least):
    automaton, place = Automaton(text), (0, 0)
    for symbol in answer:
        place = automaton.step(*place, symbol)
    assert place[1] == longest_run(text, answer)
    tail = answer[len(answer) - least :] if least <= len(answer) else None
    expected = {s for s in range(4) if tail is not None and occurs([*tail, s], text)}
    assert set(automaton.extending(*place, least)) == expected


@given(st.lists(TEXTS, max_size=3), TEXTS)
def test_counts_are_those_of_trying(chunks, answer):
    copying = Copying(chunks, run=4)
    state = walked(copying, answer)
    for z, chunk in enumerate(chunks):
        assert copying.run_of(state, z) == longest_run(chunk, answer)
        assert copying.quoted(state, z) == len(in_runs(chunk, answer))
        assert copying.common(state, z) == subsequence(chunk, answer)
        assert copying.recall(state, z) == subsequence(chunk, answer) / max(len(chunk), 1)


@given(TEXTS, TEXTS, TEXTS, st.integers(1, 5))
def test_what_the_question_has_counts_in_no_run(chunk, question, answer, run):
    copying = Copying([chunk], question, run, budget=None)
    state = walked(copying, answer)
    known = set()
    for end in range(len(answer) + 1):  # what is known of each end, when it was reached
        n = longest_run(question, answer[:end])
        known |= set(range(end - n, end)) if n >= SHORT else set()
    length = longest_run(chunk, answer)
    new = [i for i in range(len(answer) - length, len(answer)) if i not in known]
    assert copying.run_of(state, 0) == len(new)
    assert bool(copying.active(state)) == (len(new) >= run)
    if len(new) >= run:
        tail = answer[new[-run] :]
        assert set(copying.extending(state, 0)) == {s for s in range(4) if occurs([*tail, s], chunk)}
    else:
        assert not copying.extending(state, 0)
    assert copying.common(state, 0) == subsequence(chunk, answer)  # whoever asked
    assert copying.quoted(state, 0) >= len(in_runs(chunk, answer) - known)  # never less; a few more at a run's start
    assert copying.quoted(state, 0) <= len(in_runs(chunk, answer))


@given(TEXTS, TEXTS, st.integers(0, 6))
def test_a_spent_chunk_stays_spent_and_bars_all_its_symbols(chunk, answer, budget):
    copying = Copying([chunk], run=3, budget=budget, share=0.5)
    state, was = copying.start(), False
    for i, symbol in enumerate(answer):
        state = copying.step(state, symbol)
        said = answer[: i + 1]
        common = subsequence(chunk, said)
        spent = len(in_runs(chunk, said)) >= budget or common >= max(budget, 0.5 * len(chunk))
        assert copying.spent(state, 0) == (bool(chunk) and spent)
        assert copying.spent(state, 0) >= was
        was = copying.spent(state, 0)
        if was:
            assert set(copying.extending(state, 0)) == set(chunk)
            assert copying.active(state) == [0]
            assert 0 in state.copied


def test_filler_between_the_words_does_not_hide_a_copy():
    chunk, filler = list(range(60)), 99
    answer = [s for pair in chunk for s in (pair, filler)]
    copying = Copying([chunk], run=8, budget=16, share=0.4)
    states = [copying.start()]
    for symbol in answer:
        states.append(copying.step(states[-1], symbol))
    assert copying.quoted(states[-1], 0) == 0
    at = next(i for i, state in enumerate(states) if copying.spent(state, 0))
    assert copying.common(states[at], 0) == 24  # 40 % of 60
    assert Copying([chunk], run=8, budget=None).active(states[-1]) == []


def test_a_state_is_a_value():
    copying = Copying([[1, 2, 3, 4, 5]], run=2)
    one = copying.step(copying.start(), 1)
    there = copying.step(copying.step(one, 2), 3)
    elsewhere = copying.step(one, 7)
    assert copying.step(copying.step(one, 2), 3) == there
    assert copying.active(there) == [0] and copying.active(elsewhere) == []
    assert there.copied == {0} and one.copied == frozenset()


def test_chunks_that_were_copied_are_remembered_when_they_no_longer_are():
    copying = Copying([[1, 2, 3], [4, 5, 6]], run=3)
    state = walked(copying, [1, 2, 3, 9, 4, 5, 6])
    assert (copying.active(state), state.copied) == ([1], {0, 1})


def test_symbols_of_nothing_are_passed_over_in_chunk_question_and_answer():
    copying = Copying([[1, NOTHING, 2, 3]], [NOTHING], run=3)
    assert copying.active(walked(copying, [1, 2, NOTHING, NOTHING, 3, NOTHING])) == [0]
    assert set(Copying([[1, NOTHING, 2, 3]], run=2).extending(walked(copying, [1, NOTHING, 2]), 0)) == {3}


def test_no_chunk_and_an_empty_chunk_are_never_copied():
    assert Copying([]).active(walked(Copying([]), [1, 2, 3])) == []
    empty = Copying([[], [NOTHING]], run=1, budget=0)
    assert empty.active(walked(empty, [1, 2, 3])) == []
    assert empty.recall(empty.start(), 0) == 0


@pytest.mark.parametrize("options", [{"run": 0}, {"budget": -1}, {"share": 0.0}, {"share": 1.5}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError, match="need run > 0, a budget"):
        Copying([], **options)


class TestAlphabet:
    def test_letter_case_spaces_and_signs_do_not_count(self):
        alphabet = Alphabet(["The", " the", "THE ", "-", " ", "", "«a»", "A", "é", "É", "7", "\n"])
        assert alphabet.symbols.tolist() == [0, 0, 0, -1, -1, -1, 1, 1, 2, 2, 3, -1]

    def test_parts_of_characters_stay_apart(self):
        assert len(set(Alphabet(["\ufffd", "\ufffd", "a"]).read([0, 1, 2]))) == 3

    @given(st.lists(st.text(string.ascii_letters[:3] + "A- ", max_size=2), min_size=1, max_size=12), st.data())
    def test_tokens_are_all_those_of_the_symbols(self, texts, data):
        alphabet = Alphabet(texts)
        symbols = data.draw(st.sets(st.sampled_from([s for s in range(alphabet.symbols.max() + 1)] or [0])))
        symbols &= set(alphabet.symbols.tolist())
        expected = [i for i, s in enumerate(alphabet.symbols.tolist()) if s in symbols]
        assert sorted(alphabet.tokens(symbols).tolist()) == expected
