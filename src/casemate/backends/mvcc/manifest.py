"""Tenant manifests: a tenant's moments and tombstones, stored in rows beside its documents."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from casemate.backends import index_checks
from casemate.backends.mvcc.versioned_store import ROW_BITS
from casemate.maths.moments import CorpusMoments

KeyRanges = list[tuple[int, int]]  # first and last key of each range, both included

ASCII_BODY, UNICODE_BODY = 65_000, 16_000  # characters per row body: at most 65,535 bytes in UTF-8, the limit of Milvus
READ_AHEAD = 32  # manifest rows per read: 2 MB


@dataclass(eq=False)
class TenantManifest:
    """The state of a tenant after one transaction, in rows with consecutive keys.

    ``first`` is the body of the first row: one line of JSON, then the beginning of the payload. ``read`` returns bodies
    of rows by key.
    """

    key: int
    first: str
    read: Callable[[Sequence[int]], list[str]]

    @cached_property
    def _header(self) -> Mapping[str, Any]:
        header: Mapping[str, Any] = json.loads(self.first.partition("\n")[0])
        return header

    @property
    def transaction(self) -> int:
        """Number of the transaction that wrote it."""
        return self.key >> ROW_BITS

    @property
    def keys(self) -> range:
        """Keys of all its rows."""
        return range(self.key, self.key + int(self._header["rows"]))

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        return str(self._header["tenant"])

    @property
    def n(self) -> int:
        """Number of documents."""
        return int(self._header["n"])

    @cached_property
    def _payload(self) -> list[str]:
        bodies = [self.first]
        for i in range(1, len(self.keys), READ_AHEAD):
            bodies += self.read(self.keys[i : i + READ_AHEAD])
        lines = "".join(bodies).split("\n")
        if len(bodies) != len(self.keys) or len(lines) != 3:
            raise index_checks.damaged_moments(self.tenant)
        return lines

    @cached_property
    def tombstones(self) -> KeyRanges:
        """Rows that this transaction removed. They are deleted once it is committed."""
        blob = zlib.decompress(base64.b85decode(self._payload[1]))
        return [(int(a), int(b)) for a, b in np.frombuffer(blob, np.int64).reshape(-1, 2)]

    def moments(self, dim: int) -> CorpusMoments:
        """The moments of the tenant's vectors; ``DataError``: they are damaged."""
        if not self.n:
            return CorpusMoments.empty(dim)
        try:
            values = np.frombuffer(base64.b85decode(self._payload[2]))
            mean, triangle = values[:dim], values[dim:]
            scatter = np.zeros((dim, dim))
            scatter[np.triu_indices(dim)] = triangle
        except (ValueError, IndexError) as error:
            raise index_checks.damaged_moments(self.tenant) from error
        return CorpusMoments(self.n, mean, scatter + np.triu(scatter, 1).T)


def encode_manifest(tenant: str, m: CorpusMoments, tombstones: KeyRanges) -> list[str]:
    """Row bodies of a manifest. The scatter matrix is stored as its upper triangle."""
    values = np.concatenate([m.mean, m.scatter[np.triu_indices(len(m.mean))]]) if m.n else np.empty(0)
    ranges = zlib.compress(np.array(tombstones, np.int64).tobytes())
    payload = "\n".join(base64.b85encode(blob).decode() for blob in (ranges, values.tobytes()))
    header: dict[str, Any] = {"tenant": tenant, "n": m.n, "rows": 0}
    room = ASCII_BODY - len(json.dumps(header)) - 20
    bodies = ["", *(payload[i : i + ASCII_BODY] for i in range(room, len(payload), ASCII_BODY))]
    bodies[0] = json.dumps(header | {"rows": len(bodies)}) + "\n" + payload[:room]
    return bodies


def key_ranges(keys: Sequence[int]) -> KeyRanges:
    """Keys as ranges of consecutive values.

    >>> key_ranges([7, 3, 4, 5])
    [(3, 5), (7, 7)]
    """
    x = np.unique(np.array(keys, np.int64))
    if not len(x):
        return []
    cuts = np.flatnonzero(np.diff(x) > 1)
    firsts, lasts = x[np.r_[0, cuts + 1]], x[np.r_[cuts, len(x) - 1]]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
