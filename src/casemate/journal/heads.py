"""Heads: what an attempt made of a tenant, written into rows beside the documents."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from casemate import indexing
from casemate.errors import DataError
from casemate.journal.store import BITS
from casemate.stats import CorpusMoments

Ranges = list[tuple[int, int]]
"""First and last key of each range."""

ASCII_PIECE, PIECE = 65_000, 16_000
"""Characters of one row's body, in ASCII and else: at most 65,535 bytes, the most that Milvus takes."""
AT_A_TIME = 32
"""Rows of a head that are read at a time: 2 MB."""


@dataclass(eq=False)
class Head:
    """What an attempt made of a tenant.

    Attributes:
        key: Of its first row; those of the others follow.
        first: The first row's text: a line of JSON, then the beginning of the rest.
        read: Gives the text of later rows by their keys.
    """

    key: int
    first: str
    read: Callable[[Sequence[int]], list[str]]

    @cached_property
    def _about(self) -> Mapping[str, Any]:
        about: Mapping[str, Any] = json.loads(self.first.partition("\n")[0])
        return about

    @property
    def born(self) -> int:
        """The attempt's number."""
        return self.key >> BITS

    @property
    def keys(self) -> range:
        """Of all its rows."""
        return range(self.key, self.key + int(self._about["rows"]))

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return str(self._about["tenant"])

    @property
    def n(self) -> int:
        """How many documents count."""
        return int(self._about["n"])

    @cached_property
    def _rest(self) -> list[str]:
        texts = [self.first]
        for i in range(1, len(self.keys), AT_A_TIME):
            texts += self.read(self.keys[i : i + AT_A_TIME])
        rest = "".join(texts).split("\n")
        if len(texts) != len(self.keys) or len(rest) != 3:
            raise DataError(f"tenant {self.tenant!r}: the moments are damaged: {indexing.FIX}")
        return rest

    @cached_property
    def dying(self) -> Ranges:
        """First and last key of each range of rows that no longer count, and are deleted when nobody writes."""
        blob = zlib.decompress(base64.b85decode(self._rest[1]))
        return [(int(a), int(b)) for a, b in np.frombuffer(blob, np.int64).reshape(-1, 2)]

    def moments(self, dim: int) -> CorpusMoments:
        """The moments; DataError if they are damaged."""
        if not self.n:
            return CorpusMoments.empty(dim)
        try:
            held = np.frombuffer(base64.b85decode(self._rest[2]))
            mean, triangle = held[:dim], held[dim:]
            scatter = np.zeros((dim, dim))
            scatter[np.triu_indices(dim)] = triangle
        except (ValueError, IndexError) as error:
            raise DataError(f"tenant {self.tenant!r}: the moments are damaged: {indexing.FIX}") from error
        return CorpusMoments(self.n, mean, scatter + np.triu(scatter, 1).T)


def written(tenant: str, m: CorpusMoments, dying: Ranges) -> list[str]:
    """The texts of a head's rows."""
    held = np.concatenate([m.mean, m.scatter[np.triu_indices(len(m.mean))]]) if m.n else np.empty(0)
    gone = zlib.compress(np.array(dying, np.int64).tobytes())
    rest = "\n".join(base64.b85encode(blob).decode() for blob in (gone, held.tobytes()))
    about: dict[str, Any] = {"tenant": tenant, "n": m.n, "rows": 0}
    space = ASCII_PIECE - len(json.dumps(about)) - 20
    texts = ["", *(rest[i : i + ASCII_PIECE] for i in range(space, len(rest), ASCII_PIECE))]
    texts[0] = json.dumps(about | {"rows": len(texts)}) + "\n" + rest[:space]
    return texts


def pieces(text: str) -> list[str]:
    """A text in pieces that fit into a row each, at least one."""
    size = ASCII_PIECE if text.isascii() else PIECE
    return [text[i : i + size] for i in range(0, len(text), size)] or [""]


def ranges(keys: Sequence[int]) -> Ranges:
    """Keys as ranges of neighbours.

    >>> ranges([7, 3, 4, 5])
    [(3, 5), (7, 7)]
    """
    x = np.unique(np.array(keys, np.int64))
    if not len(x):
        return []
    cuts = np.flatnonzero(np.diff(x) > 1)
    firsts, lasts = x[np.r_[0, cuts + 1]], x[np.r_[cuts, len(x) - 1]]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
