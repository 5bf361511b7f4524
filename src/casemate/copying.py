"""Which retrieved chunks an answer is copying, token by token.

Three things are counted for each chunk: the run, which is how many of the last tokens stand so in the chunk; the quoted
tokens, which lie in any run of ``SHORT`` or more; and the longest common subsequence with the chunk, the numerator of
ROUGE-L, which no filler words between the tokens can hide. What stands so in the question, in ``SHORT`` tokens or more,
is known to whoever asked: in run and quotation it does not count. All of it is cheap at each token, and a state is a
value: a block of drafted tokens can be followed and given up.

What is compared are symbols, which may be token ids, or words. ``Alphabet`` makes symbols of token ids so that letter
case, spaces and punctuation do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from casemate.errors import ConfigError

Ids = npt.NDArray[np.int64]
SHORT = 3
"""Shortest run whose tokens count as quoted; shorter ones occur by chance."""
NOTHING = -1
"""The symbol of a token without letters or digits. It neither carries a run on nor ends it."""
_HALF = "\ufffd"  # what part of a character decodes to


class Automaton:
    """All substrings of one sequence (suffix automaton; Blumer et al. 1985), built in linear time.

    A place in it is a node and the length of the match: the longest end of what was read that occurs in the sequence.
    """

    def __init__(self, sequence: Sequence[int]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        last = 0
        for symbol in sequence:
            last = self._grown(last, symbol)

    def _grown(self, last: int, symbol: int) -> int:
        """Takes one more symbol in; returns the node of the whole."""
        new = self._node({}, 0, self._length[last] + 1)
        at = last
        while at >= 0 and symbol not in self._next[at]:
            self._next[at][symbol] = new
            at = self._link[at]
        if at >= 0:
            old = self._next[at][symbol]
            self._link[new] = old if self._length[old] == self._length[at] + 1 else self._split(at, old, symbol)
        return new

    def _split(self, at: int, old: int, symbol: int) -> int:
        """A copy of a node for its shorter substrings, which occur in more places than its longer ones."""
        copy = self._node(dict(self._next[old]), self._link[old], self._length[at] + 1)
        while at >= 0 and self._next[at].get(symbol) == old:
            self._next[at][symbol] = copy
            at = self._link[at]
        self._link[old] = copy
        return copy

    def _node(self, following: dict[int, int], link: int, length: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        return len(self._link) - 1

    def step(self, node: int, length: int, symbol: int) -> tuple[int, int]:
        """The place after one more symbol."""
        while node > 0 and symbol not in self._next[node]:
            node = self._link[node]
            length = self._length[node]
        found = self._next[node].get(symbol)
        return (0, 0) if found is None else (found, length + 1)

    def extending(self, node: int, length: int, least: int) -> Collection[int]:
        """Symbols with which the last ``least`` symbols, and the one, occur in the sequence; none if they do not."""
        if length < least:
            return ()
        while node > 0 and self._length[self._link[node]] >= least:
            node = self._link[node]
        return self._next[node].keys()


class Match(NamedTuple):
    """How an answer stands to one chunk.

    Attributes:
        node: Where it stands in the chunk's automaton.
        run: Length of the longest end of the answer that occurs in the chunk.
        quoted: Tokens of the answer in runs of ``SHORT`` or more; what turns out to be the question's is not taken off.
        counted: Tokens of the answer up to which ``quoted`` is counted.
        row: The row of the longest common subsequence, as the bits of an integer.
    """

    node: int
    run: int
    quoted: int
    counted: int
    row: int


class State(NamedTuple):
    """How an answer stands to the chunks.

    Attributes:
        length: Symbols so far.
        matches: One for each chunk.
        asked: Node and run in the question's automaton.
        known: Which symbols the question has, as the bits of an integer, the latest lowest.
        copied: Chunks that were being copied at any place so far, or are now.
    """

    length: int
    matches: tuple[Match, ...]
    asked: tuple[int, int]
    known: int
    copied: frozenset[int]


class Copying:
    """The chunks of one answer's context, and how much of each may be quoted.

    A chunk is being copied while a run is as long as ``run``; and from when it is spent to the end of the answer. It
    is spent when ``budget`` of its tokens are quoted, or when so many as ``share`` of the chunk, and at least
    ``budget``, stand in the answer in order, whatever stands between.

    Attributes:
        run: Tokens that may be quoted freely in one piece, at least 1.
        budget: Tokens that may be quoted freely, at least 0; None: any number.
        share: Share of a chunk, in (0, 1].
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
            what = f"run={run}, budget={budget}, share={share}"
            raise ConfigError(f"need run > 0, a budget of at least 0 or none, and share in (0, 1], got {what}")
        self.run, self.budget, self.share = run, budget, share
        self._chunks = [[symbol for symbol in chunk if symbol != NOTHING] for chunk in chunks]
        self._automata = [Automaton(chunk) for chunk in self._chunks]
        self._places = [_places(chunk) for chunk in self._chunks]
        self._question = Automaton([symbol for symbol in question if symbol != NOTHING])

    def start(self) -> State:
        """Before the first token."""
        matches = tuple(Match(0, 0, 0, 0, _ones(len(chunk))) for chunk in self._chunks)
        state = State(0, matches, (0, 0), 0, frozenset())
        return state._replace(copied=frozenset(self.active(state)))

    def step(self, state: State, symbol: int) -> State:
        """After one more token, given as its symbol."""
        if symbol == NOTHING:
            return state
        length, asked, known = state.length + 1, self._question.step(*state.asked, symbol), state.known << 1
        if asked[1] >= SHORT:
            known |= _ones(asked[1])
        matches = tuple(self._moved(z, match, symbol, length, known) for z, match in enumerate(state.matches))
        new = State(length, matches, asked, known, state.copied)
        return new._replace(copied=state.copied.union(self.active(new)))

    def active(self, state: State) -> list[int]:
        """The chunks that are being copied: the next token must not carry that on freely."""
        return [z for z in range(len(self._chunks)) if self.run_of(state, z) >= self.run or self.spent(state, z)]

    def run_of(self, state: State, chunk: int) -> int:
        """How many of the last tokens stand so in a chunk, without those that the question has."""
        run = state.matches[chunk].run
        return run - (state.known & _ones(run)).bit_count()

    def spent(self, state: State, chunk: int) -> bool:
        """Whether nothing more of a chunk may be quoted freely."""
        if self.budget is None or not self._chunks[chunk]:
            return False
        enough = max(self.budget, self.share * len(self._chunks[chunk]))
        return self.quoted(state, chunk) >= self.budget or self.common(state, chunk) >= enough

    def quoted(self, state: State, chunk: int) -> int:
        """Tokens of the answer so far that lie in runs of a chunk."""
        return state.matches[chunk].quoted

    def common(self, state: State, chunk: int) -> int:
        """Length of the longest common subsequence of the answer so far and a chunk."""
        size = len(self._chunks[chunk])
        return size - state.matches[chunk].row.bit_count()

    def recall(self, state: State, chunk: int) -> float:
        """ROUGE-L recall of a chunk in the answer so far: in [0, 1], lower is better for who owns it."""
        return self.common(state, chunk) / max(len(self._chunks[chunk]), 1)

    def extending(self, state: State, chunk: int) -> Collection[int]:
        """The symbols that would carry on the copy of a chunk: a run of ``run``, or, once it is spent, all it has."""
        match = state.matches[chunk]
        return self._automata[chunk].extending(match.node, match.run, self._least(state, chunk))

    def _least(self, state: State, chunk: int) -> int:
        """How many of the last tokens make up a run that must not be carried on."""
        if self.spent(state, chunk):
            return 0
        new, length = 0, 0
        while new < self.run:
            new += not state.known >> length & 1
            length += 1
        return length

    def _moved(self, chunk: int, match: Match, symbol: int, length: int, known: int) -> Match:
        node, run = self._automata[chunk].step(match.node, match.run, symbol)
        quoted, counted = match.quoted, match.counted
        if run >= SHORT:
            fresh = min(length - counted, run)  # tokens that were in no such run before
            quoted, counted = quoted + fresh - (known & _ones(fresh)).bit_count(), length
        row, here = match.row, self._places[chunk].get(symbol)
        if here is not None:  # the bit-parallel step of Crochemore et al. 2001; carries beyond the end are cut off
            both = row & here
            row = ((row + both) | (row - both)) & _ones(len(self._chunks[chunk]))
        return Match(node, run, quoted, counted, row)


class Alphabet:
    """What counts as the same token when copies are looked for.

    Tokens whose letters and digits are the same, but for letter case, share a symbol; those without any have none,
    since whoever makes a model put a sign between all words must not get through. Tokens that are part of a character
    stay apart.

    Args:
        texts: What each token of the vocabulary stands for, by its id.

    >>> Alphabet([" The", "the", "*", " end"]).symbols.tolist()
    [0, 0, -1, 1]
    """

    def __init__(self, texts: Iterable[str]) -> None:
        known: dict[str | int, int] = {}
        keys = (i if _HALF in text else _letters(text) for i, text in enumerate(texts))
        found = [NOTHING if key == "" else known.setdefault(key, len(known)) for key in keys]
        self.symbols: Ids = np.array(found, np.int64)
        self._order = np.argsort(self.symbols, kind="stable")
        self._starts = np.searchsorted(self.symbols[self._order], np.arange(len(known) + 1))

    def read(self, tokens: Iterable[int]) -> list[int]:
        """The symbols of some tokens."""
        return [int(self.symbols[token]) for token in tokens]

    def tokens(self, symbols: Iterable[int]) -> Ids:
        """All tokens that have one of these symbols."""
        parts = [self._order[self._starts[s] : self._starts[s + 1]] for s in symbols]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _ones(count: int) -> int:
    """So many bits, all set."""
    return (1 << count) - 1


def _letters(text: str) -> str:
    return "".join(c for c in text.casefold() if c.isalnum())


def _places(sequence: Sequence[int]) -> dict[int, int]:
    """Where each symbol stands, as the bits of an integer."""
    found: dict[int, int] = {}
    for i, symbol in enumerate(sequence):
        found[symbol] = found.get(symbol, 0) | 1 << i
    return found
