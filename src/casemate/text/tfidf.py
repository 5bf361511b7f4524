"""TF-IDF vectors of texts as a sparse matrix, and exact near-duplicate search among them."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from casemate.text.tokens import words
from casemate.types import Float64


class TfIdf:
    """TF-IDF matrix with unit rows: word counts times ln((1 + n) / (1 + df)) + 1, the default of scikit-learn.

    n is the number of texts and df the document frequency of a word. Storage is in compressed sparse rows. A text
    without words is a zero row.

    Attributes:
        columns: Column of each entry. The entries of row i are at ``starts[i]`` to ``starts[i + 1]``.
        values: Value of each entry.
        starts: Position of each row's first entry, and the number of entries, (texts + 1,).
        shape: Number of texts and of distinct words.

    >>> TfIdf(["north bridge", "north bridge north", "weir"]).near_duplicates(0, 0.9)
    {1}
    """

    def __init__(self, texts: Iterable[str]) -> None:
        numbers: dict[str, int] = {}
        columns, counts, starts = array("q"), array("q"), array("q", [0])
        for text in texts:
            for word, count in Counter(words(text)).items():
                columns.append(numbers.setdefault(word, len(numbers)))
                counts.append(count)
            starts.append(len(columns))
        self.columns: npt.NDArray[np.int64] = np.array(columns, np.int64)
        self.starts: npt.NDArray[np.int64] = np.array(starts, np.int64)
        self.shape = (len(starts) - 1, len(numbers))
        self._document_frequency = np.bincount(self.columns, minlength=self.shape[1])
        self._rows = np.repeat(np.arange(self.shape[0]), np.diff(self.starts))
        idf = np.log((1 + self.shape[0]) / (1 + self._document_frequency)) + 1
        weights = np.array(counts, np.float64) * idf[self.columns]
        norms = np.sqrt(np.bincount(self._rows, weights**2, self.shape[0]))
        self.values: Float64 = weights / norms[self._rows]
        self._by_column = self._rows[np.argsort(self.columns, kind="stable")]
        self._column_starts = np.append(0, np.cumsum(self._document_frequency))

    def dot(self, vector: Float64) -> Float64:
        """Dot product of each text's TF-IDF vector with a vector over the vocabulary.

        Shape of the result: (number of texts,).
        """
        return np.bincount(self._rows, self.values * vector[self.columns], self.shape[0]).astype(np.float64)

    def mean(self, rows: npt.NDArray[np.bool_]) -> Float64:
        """Returns the mean (words,) of the rows selected by a mask (texts,), which must select at least one."""
        kept = rows[self._rows]
        return np.bincount(self.columns[kept], self.values[kept], self.shape[1]).astype(np.float64) / int(rows.sum())

    def near_duplicates(self, row: int, threshold: float) -> set[int]:
        """Returns the other rows whose cosine similarity to a row is at least ``threshold``, in (0, 1].

        The result is exact. Prefix filtering (Bayardo et al. 2007) restricts the comparison to rows with one of the
        row's rarest words. The norm of the other words is below the threshold. By the Cauchy-Schwarz inequality, a row
        with only these words in common cannot reach it.
        """
        own = slice(self.starts[row], self.starts[row + 1])
        columns, values = self.columns[own], self.values[own]
        rarest = np.argsort(self._document_frequency[columns], kind="stable")
        remaining = 1 - np.cumsum(values[rarest] ** 2)
        prefix = rarest[: int((remaining >= threshold**2 - 1e-8).sum()) + 1]
        dense = np.zeros(self.shape[1])
        dense[columns] = values
        found = set()
        for other in {i for column in columns[prefix].tolist() for i in self._postings(column)} - {row}:
            entries = slice(self.starts[other], self.starts[other + 1])
            if math.fsum(self.values[entries] * dense[self.columns[entries]]) >= threshold - 1e-9:
                found.add(other)
        return found

    def _postings(self, column: int) -> list[int]:
        found: list[int] = self._by_column[self._column_starts[column] : self._column_starts[column + 1]].tolist()
        return found
