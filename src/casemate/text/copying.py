"""Copy detection: how much of an answer is copied from each chunk of its context, updated token by token.

Three measures per chunk:

- run length: the longest suffix of the answer that occurs in the chunk;
- quoted tokens: the answer's tokens inside common runs of at least ``MIN_RUN`` tokens;
- longest common subsequence: the numerator of ROUGE-L. Filler tokens between copied tokens do not reduce it.

Runs of at least ``MIN_RUN`` tokens that also occur in the question are not counted in the first two measures. Each step
is cheap. A state is immutable, so a speculative decoder can discard the states of rejected tokens.

The detector compares integer symbols: token ids, word ids, or the token classes of ``Alphabet``, which ignore letter
case, spaces and punctuation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError
from casemate.text.tokens import position_masks

Ids = npt.NDArray[np.int64]
MIN_RUN = 3
"""Minimum length of a common run whose tokens count as quoted. Shorter runs occur by chance."""
NO_SYMBOL = -1
"""Symbol of a token without letters or digits. Detection skips such tokens."""
_PARTIAL_CHARACTER = "\ufffd"  # decoded text of a token that contains only some bytes of a character


class SuffixAutomaton:
    """Suffix automaton of a sequence: accepts all its substrings (Blumer et al. 1985). Built in linear time.

    A position is a node and a match length: the longest suffix of the input that occurs in the sequence.
    """

    def __init__(self, sequence: Sequence[int]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        last = 0
        for symbol in sequence:
            last = self._append(last, symbol)

    def _append(self, last: int, symbol: int) -> int:
        """Adds a symbol to the sequence; returns the node of the whole sequence."""
        new = self._add_node({}, 0, self._length[last] + 1)
        at = last
        while at >= 0 and symbol not in self._next[at]:
            self._next[at][symbol] = new
            at = self._link[at]
        if at >= 0:
            old = self._next[at][symbol]
            self._link[new] = old if self._length[old] == self._length[at] + 1 else self._clone(at, old, symbol)
        return new

    def _clone(self, at: int, old: int, symbol: int) -> int:
        """Clones a node for its shorter substrings, which occur at more positions than its longer ones."""
        copy = self._add_node(dict(self._next[old]), self._link[old], self._length[at] + 1)
        while at >= 0 and self._next[at].get(symbol) == old:
            self._next[at][symbol] = copy
            at = self._link[at]
        self._link[old] = copy
        return copy

    def _add_node(self, transitions: dict[int, int], link: int, length: int) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        return len(self._link) - 1

    def step(self, node: int, length: int, symbol: int) -> tuple[int, int]:
        """Returns the position after one more input symbol."""
        while node > 0 and symbol not in self._next[node]:
            node = self._link[node]
            length = self._length[node]
        found = self._next[node].get(symbol)
        return (0, 0) if found is None else (found, length + 1)

    def continuations(self, node: int, length: int, least: int) -> Collection[int]:
        """Returns the symbols that follow the last ``least`` input symbols somewhere in the sequence.

        Empty if these input symbols do not occur in it.
        """
        if length < least:
            return ()
        while node > 0 and self._length[self._link[node]] >= least:
            node = self._link[node]
        return self._next[node].keys()


class ChunkMatch(NamedTuple):
    """Match of an answer with one chunk.

    Attributes:
        node: Node of the chunk's suffix automaton.
        run: Length of the longest suffix of the answer that occurs in the chunk.
        quoted: Tokens of the answer in common runs of at least ``MIN_RUN`` tokens. Not reduced when a later token
            shows that a run occurs in the question.
        counted: Number of answer tokens that ``quoted`` takes into account.
        row: Row of the bit-parallel longest common subsequence.
    """

    node: int
    run: int
    quoted: int
    counted: int
    row: int


class CopyState(NamedTuple):
    """State of the detector after some tokens of an answer.

    Attributes:
        length: Number of symbols.
        matches: One match per chunk.
        question_match: Node and match length in the question's automaton.
        question_mask: Bit i is set if the i-th last symbol belongs to a run that occurs in the question.
        copied: Chunks that are or were being copied.
    """

    length: int
    matches: tuple[ChunkMatch, ...]
    question_match: tuple[int, int]
    question_mask: int
    copied: frozenset[int]


class CopyDetector:
    """Detects which chunks of a context an answer copies.

    A chunk is being copied while a run has at least ``run`` tokens. A chunk over its budget is being copied until the
    end of the answer. It is over its budget in two cases: ``budget`` of its tokens are quoted, or its longest common
    subsequence with the answer reaches both ``budget`` and ``share`` of the chunk.

    Args:
        chunks: The chunks, as symbols.
        question: The question, as symbols.
        run: Run length from which a chunk is being copied, at least 1.
        budget: Number of quoted tokens from which a chunk is being copied, at least 0; None: no limit.
        share: Share of the chunk, in (0, 1].

    Raises:
        ConfigError: If an option is out of range.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[int]],
        question: Sequence[int] = (),
        run: int = 16,
        budget: int | None = 24,
        share: float = 0.3,
    ) -> None:
        if run < 1 or (budget is not None and budget < 0) or not 0 < share <= 1:
            given = f"run={run}, budget={budget}, share={share}"
            raise ConfigError(f"need run > 0, a budget of at least 0 or none, and share in (0, 1], got {given}")
        self.run, self.budget, self.share = run, budget, share
        self._chunks = [[symbol for symbol in chunk if symbol != NO_SYMBOL] for chunk in chunks]
        self._automata = [SuffixAutomaton(chunk) for chunk in self._chunks]
        self._masks = [position_masks(chunk) for chunk in self._chunks]
        self._question = SuffixAutomaton([symbol for symbol in question if symbol != NO_SYMBOL])

    def start(self) -> CopyState:
        """Returns the state before the first token."""
        matches = tuple(ChunkMatch(0, 0, 0, 0, _ones(len(chunk))) for chunk in self._chunks)
        state = CopyState(0, matches, (0, 0), 0, frozenset())
        return state._replace(copied=frozenset(self.copied_chunks(state)))

    def step(self, state: CopyState, symbol: int) -> CopyState:
        """Returns the state after one more token of the answer, given as its symbol."""
        if symbol == NO_SYMBOL:
            return state
        length, mask = state.length + 1, state.question_mask << 1
        question_match = self._question.step(*state.question_match, symbol)
        if question_match[1] >= MIN_RUN:
            mask |= _ones(question_match[1])
        matches = tuple(self._update(z, match, symbol, length, mask) for z, match in enumerate(state.matches))
        new = CopyState(length, matches, question_match, mask, state.copied)
        return new._replace(copied=state.copied.union(self.copied_chunks(new)))

    def copied_chunks(self, state: CopyState) -> list[int]:
        """Returns the chunks that are being copied, in order."""
        return [
            z for z in range(len(self._chunks)) if self.run_length(state, z) >= self.run or self.over_budget(state, z)
        ]

    def run_length(self, state: CopyState, chunk: int) -> int:
        """Returns the length of the answer's longest suffix that occurs in a chunk, without tokens of the question."""
        run = state.matches[chunk].run
        return run - (state.question_mask & _ones(run)).bit_count()

    def over_budget(self, state: CopyState, chunk: int) -> bool:
        """Returns whether the answer uses up the budget of a chunk."""
        if self.budget is None or not self._chunks[chunk]:
            return False
        enough = max(self.budget, self.share * len(self._chunks[chunk]))
        return self.quoted_tokens(state, chunk) >= self.budget or self.lcs_length(state, chunk) >= enough

    def quoted_tokens(self, state: CopyState, chunk: int) -> int:
        """Returns the number of answer tokens in runs of a chunk."""
        return state.matches[chunk].quoted

    def lcs_length(self, state: CopyState, chunk: int) -> int:
        """Returns the length of the longest common subsequence of the answer and a chunk."""
        size = len(self._chunks[chunk])
        return size - state.matches[chunk].row.bit_count()

    def rouge_l_recall(self, state: CopyState, chunk: int) -> float:
        """Returns the ROUGE-L recall of a chunk in the answer, in [0, 1]. Lower values protect the chunk better."""
        return self.lcs_length(state, chunk) / max(len(self._chunks[chunk]), 1)

    def continuations(self, state: CopyState, chunk: int) -> Collection[int]:
        """Returns the symbols that would continue the copy of a chunk.

        These extend a run to ``run`` tokens or more. For a chunk over its budget, they are all its symbols.
        """
        match = state.matches[chunk]
        return self._automata[chunk].continuations(match.node, match.run, self._least(state, chunk))

    def _least(self, state: CopyState, chunk: int) -> int:
        """Number of last symbols that contain ``run`` symbols outside the question; 0 for a chunk over its budget."""
        if self.over_budget(state, chunk):
            return 0
        new, length = 0, 0
        while new < self.run:
            new += not state.question_mask >> length & 1
            length += 1
        return length

    def _update(self, chunk: int, match: ChunkMatch, symbol: int, length: int, question_mask: int) -> ChunkMatch:
        node, run = self._automata[chunk].step(match.node, match.run, symbol)
        quoted, counted = match.quoted, match.counted
        if run >= MIN_RUN:
            fresh = min(length - counted, run)  # tokens that were in no such run before
            quoted, counted = quoted + fresh - (question_mask & _ones(fresh)).bit_count(), length
        row, here = match.row, self._masks[chunk].get(symbol)
        if here is not None:  # bit-parallel step (Crochemore et al. 2001); carries beyond the end are cut off
            both = row & here
            row = ((row + both) | (row - both)) & _ones(len(self._chunks[chunk]))
        return ChunkMatch(node, run, quoted, counted, row)


class Alphabet:
    """Equivalence classes of a vocabulary's tokens, numbered as symbols.

    Tokens with the same letters and digits share a symbol, whatever their case. Tokens without letters and digits get
    ``NO_SYMBOL``, so punctuation between words does not hide a copy. Tokens that contain part of a character are never
    merged.

    Args:
        texts: Text of each token, in the order of token ids.

    Attributes:
        symbols: Symbol of each token id.

    >>> Alphabet([" The", "the", "*", " end"]).symbols.tolist()
    [0, 0, -1, 1]
    """

    def __init__(self, texts: Iterable[str]) -> None:
        numbers: dict[str | int, int] = {}
        keys = (i if _PARTIAL_CHARACTER in text else _alphanumeric(text) for i, text in enumerate(texts))
        found = [NO_SYMBOL if key == "" else numbers.setdefault(key, len(numbers)) for key in keys]
        self.symbols: Ids = np.array(found, np.int64)
        self._order = np.argsort(self.symbols, kind="stable")
        self._starts = np.searchsorted(self.symbols[self._order], np.arange(len(numbers) + 1))

    def encode(self, tokens: Iterable[int]) -> list[int]:
        """Returns the symbols of token ids."""
        return [int(self.symbols[token]) for token in tokens]

    def tokens(self, symbols: Iterable[int]) -> Ids:
        """Returns all token ids with one of these symbols."""
        parts = [self._order[self._starts[s] : self._starts[s + 1]] for s in symbols]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _ones(count: int) -> int:
    """Returns an integer with this number of low bits set."""
    return (1 << count) - 1


def _alphanumeric(text: str) -> str:
    return "".join(c for c in text.casefold() if c.isalnum())
