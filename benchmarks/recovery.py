"""How long it takes to score a large crawl: 10,000 chunks against 5,000 answers.

Counted: cutting the answers into segments, and comparing all chunks with all segments. Not counted: embedding. The
texts are synthetic, in the lengths of real ones. The vectors are sums of random directions of their words, which stand
in for an embedder: texts of one topic are near one another. How many pairs pass each bound depends on that, so it is
given. ``records`` is a bad case: forms of one template, nearly all near all answers, with nearly the same words in
another order, so that no bound helps.

Checked in the same run: a sample of chunks against all segments that are near, by a quadratic table.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from benchmarks import SEED, save
from casemate.maths import recovery
from casemate.maths.recovery import ROUGE_LEVELS, Recovery, Segments, chunk_recovery, segments, window_sizes
from casemate.text.tokens import words
from casemate.types import Vector

DIM, COMMON, RARE, TOPICS = 384, 150, 30_000, 300
CHUNKS, ANSWERS, SAMPLE = 10_000, 5_000, 100
RECORDS, REPLIES = 500, 250
MOST = 200
"""Segments that a chunk of the sample is compared with by a table."""


def main(chunks: int = CHUNKS, answers: int = ANSWERS, records: int = RECORDS, replies: int = REPLIES) -> None:
    """Times the crawl and the worst case."""
    world = World(np.random.default_rng(SEED))
    collection = [world.text(int(world.rng.integers(100, 201))) for _ in range(chunks)]
    said = [world.answer(collection) for _ in range(answers)]
    results = {"crawl": measure(world, collection, said)}
    forms = [world.record() for _ in range(records)]
    quoted = [" ".join(forms[i] for i in world.rng.integers(records, size=3)) for _ in range(replies)]
    save("recovery", results | {"records": measure(world, forms, quoted)})


class World:
    """Where the texts come from: common words, as often as in prose, and rare ones by topic."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.words = np.array([f"w{i}" for i in range(COMMON + RARE)])
        weights = 1 / np.arange(5, COMMON + 5)
        self.common = weights / weights.sum()
        self.topics = rng.integers(COMMON, COMMON + RARE, (TOPICS, 400))
        self.directions = rng.standard_normal((COMMON + RARE, DIM), dtype=np.float32)
        self.directions[:COMMON] *= 0.1

    def text(self, length: int) -> str:
        """Sentences of 8 to 30 words on one topic, half of them common ones."""
        topic = self.topics[self.rng.integers(TOPICS)]
        rare = topic[np.minimum(self.rng.exponential(20, length).astype(int), 399)]
        common = self.rng.choice(COMMON, length, p=self.common)
        spoken = self.words[np.where(self.rng.random(length) < 0.5, rare, common)]
        ends = np.cumsum(self.rng.integers(8, 31, length))
        return " ".join(_sentence(part) for part in np.split(spoken, ends[ends < length]) if len(part))

    def answer(self, chunks: list[str]) -> str:
        """300 to 500 words: by thirds with whole chunks copied, with one copied in part, or with none."""
        kind, length = self.rng.integers(3), int(self.rng.integers(300, 501))
        if kind == 0:
            copied = [chunks[i] for i in self.rng.integers(len(chunks), size=2)]
        elif kind == 1:
            copied = [self.worn(chunks[self.rng.integers(len(chunks))])]
        else:
            copied = []
        held = sum(len(text.split()) for text in copied)
        begin = self.text(max(20, int((length - held) * self.rng.random())))
        rest = length - held - len(begin.split())
        return " ".join([begin, *copied, *([self.text(rest)] if rest > 0 else [])])

    def worn(self, text: str) -> str:
        """A text in which 10 to 70 % of the words are others."""
        spoken = np.array(text.split())
        other = self.rng.random(len(spoken)) < self.rng.uniform(0.1, 0.7)
        spoken[other] = self.words[self.rng.integers(COMMON + RARE, size=int(other.sum()))]
        return " ".join(spoken.tolist())

    def record(self) -> str:
        """A form of 110 words, filled in: 60 are the same in all, the others are a dozen that all have."""
        fixed = [self.words[i : i + 6] for i in range(COMMON, COMMON + 60, 6)]
        filled = self.words[COMMON + 60 + self.rng.integers(12, size=(10, 5))]
        return " ".join(_sentence(np.concatenate(pair)) for pair in zip(fixed, filled, strict=True))

    def embed(self, texts: tuple[str, ...] | list[str]) -> Vector:
        """Unit vectors, (n, DIM): the sum of the words' directions."""
        number = {word: i for i, word in enumerate(self.words.tolist())}
        E = np.empty((len(texts), DIM), np.float32)
        for row, text in enumerate(texts):
            E[row] = self.directions[[number[w] for w in words(text) if w in number]].sum(axis=0)
        return E / np.linalg.norm(E, axis=1, keepdims=True)


def measure(world: World, chunks: list[str], answers: list[str]) -> dict[str, Any]:
    """Seconds for each step, what the bounds left over, the rates, and the check."""
    began = time.perf_counter()
    found = segments(enumerate(answers, 1), window_sizes(chunks))
    cut_s = time.perf_counter() - began
    print(f"{len(found.texts)} segments in {cut_s:.1f} s; embedding", file=sys.stderr)
    E, S = world.embed(chunks), world.embed(found.texts)
    seen = _counted()
    start, cpu = time.perf_counter(), time.process_time()
    result = chunk_recovery(chunks, E, found, S)
    compare_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    levels = [str(level) for level in ROUGE_LEVELS]
    return {
        "chunks": len(chunks),
        "answers": len(answers),
        "segments": len(found.texts),
        "cut_s": cut_s,
        "compare_s": compare_s,
        "compare_cpu_s": cpu_s,
        "total_s": cut_s + compare_s,
        "pairs": len(chunks) * len(found.texts),
        **seen,
        "crr": dict(zip(levels, (result.f1 > 0).mean(axis=1).tolist(), strict=True)),
        "crr_recall": dict(zip(levels, (result.recall > 0).mean(axis=1).tolist(), strict=True)),
        "checked": _checked(world.rng, chunks, (E, S), found, result),
    }


def _counted() -> dict[str, int]:
    """Counts what is looked at, from now on."""
    seen = {"pairs_near": 0, "pairs_bounded": 0, "pairs_rouge": 0}
    module: Any = recovery
    search, lcs = module._Search, module.longest_common_subsequence
    compare, shared = search.__dict__["compare"], search.__dict__["_common_words"]

    def counting_compare(self: Any, i: int, js: Any) -> None:
        seen["pairs_near"] += len(js)
        compare(self, i, js)

    def counting_common_words(self: Any, chunk: Any, js: Any) -> Any:
        seen["pairs_bounded"] += len(js)
        return shared(self, chunk, js)

    def counting_lcs(*arguments: Any) -> int:
        seen["pairs_rouge"] += 1
        return lcs(*arguments)

    search.compare, search._common_words, module.longest_common_subsequence = (
        counting_compare,
        counting_common_words,
        counting_lcs,
    )
    return seen


def _checked(
    rng: np.random.Generator, chunks: list[str], vectors: tuple[Vector, Vector], found: Segments, result: Recovery
) -> dict[str, int]:
    """Chunks of a sample whose firsts are not those of a quadratic table, over all segments that are near."""
    sample = rng.choice(len(chunks), min(SAMPLE, len(chunks)), replace=False)
    wrong = tables = 0
    for i in sample:
        cosines = vectors[1].astype(np.float64) @ vectors[0][i].astype(np.float64)
        near = np.flatnonzero(cosines > recovery.MIN_COSINE)[:MOST]
        last = found.queries[near[-1]] if len(near) == MOST else np.inf  # from here on not all is looked at
        a = words(chunks[i])
        firsts = np.zeros((2, len(ROUGE_LEVELS)), np.int64)
        for j in near:
            b = words(found.texts[j])
            common, tables = _table(a, b), tables + 1
            for measure, score in enumerate((2 * common / (len(a) + len(b)), common / len(a))):
                passed = (firsts[measure] == 0) & (np.array(ROUGE_LEVELS) < score)
                firsts[measure][passed] = found.queries[j]
        told = np.stack([result.f1[:, i], result.recall[:, i]])
        wrong += not np.array_equal(np.where(firsts < last, firsts, 0), np.where(told < last, told, 0))
    return {"chunks": len(sample), "tables": tables, "wrong": wrong}


def _table(a: list[str], b: list[str]) -> int:
    """Longest common subsequence, one row of the quadratic table after another."""
    A = np.array(a)
    row = np.zeros(len(a) + 1, np.int64)
    for word in b:
        diagonal = np.where(word == A, row[:-1] + 1, 0)
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], diagonal))
    return int(row[-1])


def _sentence(spoken: np.ndarray) -> str:
    return " ".join(spoken).capitalize() + "."


if __name__ == "__main__":
    main()
