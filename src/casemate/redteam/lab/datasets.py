"""Splits a corpus, or texts of known membership, and copies the index without the non-members.

A candidate is a whole source: title and text, under its name in the index. The operator's index is only read; documents
and vectors are copied into a separate index.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from casemate.errors import DataError
from casemate.maths import metrics, stats
from casemate.protocols import Index, Progress
from casemate.rag.corpus import Corpus
from casemate.rag.index_copy import copy_index
from casemate.text.tfidf import TfIdf
from casemate.types import DEFAULT_TENANT, Document, Vector

Half: TypeAlias = Literal["A", "B"]

MIN_CANDIDATES = 10  # minimum number of members, and of non-members, for meaningful metrics
NEAR_DUPLICATE = 0.95  # TF-IDF cosine from which two texts are near-duplicates (Naseh et al. 2025, arXiv 2502.00306)
GENRE_SEED = 0  # seed of the resamples of `genre_auc`, as in `judge`
SPLIT_KEYS = (("members", "nonmembers"), ("mem_indices", "non_mem_indices"))
"""Accepted keys of a split file: `members` and `nonmembers`, or those of splits published with attacks."""


@dataclass(frozen=True, slots=True)
class Split:
    """The candidates of a campaign.

    Attributes:
        members: Documents that stay in the index, in random order.
        nonmembers: Documents left out of it, in random order.
        half: The half of each candidate by name: decision rules are fitted on one and evaluated on the other.
        dropped: Non-members left out because of a near-duplicate that stays in the index.
        fingerprint: Of all documents and their roles: equal only for splits whose results can be combined.
        notes: Remarks for the operator, one sentence each.
    """

    members: tuple[Document, ...]
    nonmembers: tuple[Document, ...]
    half: Mapping[str, Half]
    dropped: int
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def candidates(self) -> list[tuple[Document, bool]]:
        """All candidates and whether they are members, evenly mixed: every prefix is a representative sample."""
        ranked = [
            ((rank + 0.5) / len(kind), member, document)
            for member, kind in ((True, self.members), (False, self.nonmembers))
            for rank, document in enumerate(kind)
        ]
        return [(document, member) for _, member, document in sorted(ranked, key=lambda r: (r[0], not r[1]))]


class IndexedSource(NamedTuple):
    """The chunks of a source, or of several, in an index."""

    ids: tuple[str, ...]
    vectors: Vector  # (chunks, dim)

    @classmethod
    def joined(cls, sources: Collection[IndexedSource]) -> IndexedSource:
        """The chunks of all of these sources, at least one."""
        ids = tuple(identity for source in sources for identity in source.ids)
        return cls(ids, np.concatenate([source.vectors for source in sources]))

    def isdisjoint(self, ids: Iterable[str]) -> bool:
        """Whether none of these ids belongs to the source."""
        return set(self.ids).isdisjoint(ids)


def read_documents(corpus: Corpus, indexed: Collection[str]) -> list[Document]:
    """Reads the whole documents of a corpus whose names are indexed; unreadable ones are skipped."""
    found = []
    for source in corpus.sources():
        if source.name in indexed:
            try:
                title, text, _ = source.parse()
            except DataError:
                continue
            found.append(Document(source.name, text, title))
    return found


def draw_split(
    documents: Sequence[Document],
    members: int,
    nonmembers: int,
    seed: int,
    fixed: Collection[str] = (),
    leaves_enough: Callable[[Sequence[Document]], bool] = lambda nonmembers: True,
) -> Split:
    """Draws members and non-members from whole documents at random: the requested numbers, or fewer with a note.

    A non-member with a near-duplicate that stays in the index is replaced by another. ``documents`` are all whole
    documents of the index, each name once. ``fixed``: which of `members` and `nonmembers` must not be reduced. If the
    index would be too small without the non-members (``leaves_enough``), fewer are drawn, at least `MIN_CANDIDATES`.

    Raises:
        DataError: If there are too few documents.
    """
    rng = np.random.default_rng(seed)
    m, n = _fit_counts(len(documents), members, nonmembers, fixed)
    order = rng.permutation(len(documents)).tolist()
    inside, kept, dropped = m, list[int](), 0
    for inside, outside in _attempts((m, n), members, fixed):
        kept, dropped = _without_near_duplicates(documents, order[inside:], outside)
        if len(kept) == n if "nonmembers" in fixed else leaves_enough([documents[i] for i in kept]):
            break
    return _split(documents, order[:inside], kept, (dropped, members, nonmembers), rng)


def read_split(path: Path, documents: Sequence[Document], seed: int) -> Split:
    """Reads a split of all whole documents, each name once, from a JSON file with the keys of `SPLIT_KEYS`.

    Raises:
        DataError: If the file is not a split of these documents, or names too few.
    """
    named = _read_names(path)
    row = {d.source: i for i, d in enumerate(documents)}
    unknown = [name for names in named for name in names if name not in row]
    if unknown:
        raise DataError(f"{path} names {len(unknown)} documents that are not in the corpus, {unknown[0]!r} first")
    twice = [name for name, count in Counter(named[0] + named[1]).items() if count > 1]
    if twice:
        raise DataError(f"{path} names {twice[0]!r} twice; a document is either a member or a non-member")
    rng = np.random.default_rng(seed)
    inside, pool = ([row[names[i]] for i in rng.permutation(len(names))] for names in named)
    kept, dropped = _without_near_duplicates(documents, pool, len(pool))
    return _split(documents, inside, kept, (dropped, len(inside), len(pool)), rng)


def split_from_pools(
    documents: Sequence[Document],
    members: Sequence[int],
    nonmembers: Sequence[int],
    counts: tuple[int, int],
    rng: np.random.Generator,
) -> Split:
    """Splits texts of known membership, given by rows in random order: the first of both pools, at most ``counts``.

    Near-duplicates of members are left out of the non-members.

    Raises:
        DataError: If there are too few texts.
    """
    kept, dropped = _without_near_duplicates(documents, nonmembers, len(nonmembers))
    return _split(documents, members[: counts[0]], kept[: counts[1]], (dropped, *counts), rng)


def read_provided(path: Path, kind: str, max_mb: float) -> list[Document]:
    """Reads the whole documents under a path, each named by their kind (such as `members`) and its name.

    Files, and lines of JSON Lines, above ``max_mb`` are skipped.

    Raises:
        DataError: If no text is readable.
    """
    found = []
    for source in Corpus(path, max_mb).sources():
        try:
            title, text, metadata = source.parse()
        except DataError:
            continue
        found.append(Document(f"{kind}/{source.name}", text, title, metadata=metadata))
    if not found:
        raise DataError(f"{path} ({kind}) contains no readable text; provide texts, one per file or record")
    return found


def split_provided(
    members: Sequence[Document], nonmembers: Sequence[Document], counts: tuple[int, int], seed: int
) -> Split:
    """Draws candidates from the provided texts, at most ``counts``, without non-members that nearly duplicate a member.

    Raises:
        DataError: If there are too few texts.
    """
    rng = np.random.default_rng(seed)
    inside = rng.permutation(len(members)).tolist()
    outside = (len(members) + rng.permutation(len(nonmembers))).tolist()
    return split_from_pools([*members, *nonmembers], inside, outside, counts, rng)


def genre_auc(split: Split) -> stats.Estimate:
    """How well the texts alone distinguish members from non-members, without the target: an AUC with its interval.

    Texts of one genre give 0.5. If this is high, an attack's metrics may measure the genre instead of membership. The
    score of a text is its TF-IDF cosine with the mean of the members of the other half, minus that with its
    non-members.
    """
    candidates = split.candidates
    tfidf = TfIdf([document.content for document, _ in candidates])
    member = np.array([kind for _, kind in candidates])
    half = np.array([split.half[document.source] for document, _ in candidates])
    scores = np.zeros(len(candidates))
    for here, other in (("A", "B"), ("B", "A")):
        inside, outside = (tfidf.mean((half == other) & (member == kind)) for kind in (True, False))
        scores[half == here] = tfidf.dot(inside - outside)[half == here]
    return stats.bootstrap(metrics.auc, scores[member], scores[~member], GENRE_SEED)


def copy_without_nonmembers(
    index: Index, target: Index, split: Split, tenant: str = DEFAULT_TENANT, progress: Progress = lambda count: None
) -> int:
    """Copies an index without the non-members; see `copy_index`.

    Raises:
        DataError: If a member is not in the index, or the index changed during the copy.
    """
    out = {d.source for d in split.nonmembers}
    held = index.digests(tenant).keys() - out
    absent = [d.source for d in split.members if d.source not in held]
    if absent:
        raise DataError(f"{len(absent)} members are not in the index, {absent[0]!r} first; run 'casemate index'")
    return copy_index(index, target, tenant, out, progress)


def indexed_sources(index: Index, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> dict[str, IndexedSource]:
    """The chunks of some sources, from one pass over the index; missing sources are left out."""
    ids: dict[str, list[str]] = {}
    rows: dict[str, list[Vector]] = {}
    for documents, vectors in index.scan(tenant):
        for document, vector in zip(documents, vectors, strict=True):
            if document.source in sources:
                ids.setdefault(document.source, []).append(document.id)
                rows.setdefault(document.source, []).append(vector.copy())
    return {source: IndexedSource(tuple(ids[source]), np.stack(rows[source])) for source in ids}


def _read_names(path: Path) -> tuple[list[str], list[str]]:
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    for inside, outside in SPLIT_KEYS:
        m, n = (raw.get(inside), raw.get(outside)) if isinstance(raw, dict) else (None, None)
        if isinstance(m, list) and isinstance(n, list) and all(isinstance(name, str) for name in m + n):
            return m, n
    known = " or ".join(f'{{"{m}": [names], "{n}": [names]}}' for m, n in SPLIT_KEYS)
    raise DataError(f"{path} is not a split; it must be {known}")


def _split(
    documents: Sequence[Document],
    inside: Sequence[int],
    outside: Sequence[int],
    asked: tuple[int, int, int],
    rng: np.random.Generator,
) -> Split:
    """Assigns halves at random within each kind, and notes differences from the request."""
    dropped, members, nonmembers = asked
    reason = f"from {len(documents)} documents"
    if dropped:
        reason = f"{dropped} non-members have a near-duplicate that stays in the index"
    _require_minimum(len(inside), len(outside), reason)
    half: dict[str, Half] = {}
    for kind in (inside, outside):
        for rank, i in enumerate(rng.permutation(kind)):
            half[documents[i].source] = "A" if rank % 2 else "B"
    notes = []
    if dropped:
        notes.append(f"{dropped} non-members were left out: near-duplicates of them stay in the index")
    if (len(inside), len(outside)) != (members, nonmembers):
        notes.append(
            f"{members} members and {nonmembers} non-members were requested, {len(inside)} and {len(outside)} "
            f"were available from {len(documents)} documents"
        )
    named = [[documents[i] for i in kind] for kind in (inside, outside)]
    return Split(tuple(named[0]), tuple(named[1]), half, dropped, _fingerprint(documents, *named), tuple(notes))


def _fit_counts(total: int, members: int, nonmembers: int, fixed: Collection[str]) -> tuple[int, int]:
    """Members and non-members that fit into this number of documents: a fixed number stays, the other is reduced."""
    m, n = members, nonmembers
    reason = f"{members} and {nonmembers} were requested from {total} documents; {_numbers_that_work(total)}"
    if members + nonmembers > total:
        share = total / (members + nonmembers)
        match sorted(fixed):
            case ["members", "nonmembers"]:
                raise DataError(f"there are too few documents: {reason}")
            case ["members"]:
                n = max(total - members, 0)
            case ["nonmembers"]:
                m = max(total - nonmembers, 0)
            case _:
                m, n = int(members * share), int(nonmembers * share)
    _require_minimum(m, n, reason)
    return m, n


def _numbers_that_work(total: int) -> str:
    """Numbers of members and non-members that this number of documents allows."""
    if total < 2 * MIN_CANDIDATES:
        return "no numbers work"
    outside = max(total // 4, MIN_CANDIDATES)  # as many members as possible stay in the index: the guard needs chunks
    return f"these work: --members {total - outside} --nonmembers {outside}"


def _attempts(counts: tuple[int, int], members: int, fixed: Collection[str]) -> Iterator[tuple[int, int]]:
    """Numbers of members and non-members to draw, the preferred ones first.

    Fixed non-members that have near-duplicates are replaced by members that are not fixed. Other non-members are
    reduced, and members added up to the requested number.
    """
    m, n = counts
    if "members" in fixed and "nonmembers" in fixed:
        yield m, n
    elif "nonmembers" in fixed:
        yield from ((inside, n) for inside in range(m, MIN_CANDIDATES - 1, -max(1, m // 20)))
    else:
        yield from ((min(members, m + n - outside), outside) for outside in range(n, MIN_CANDIDATES - 1, -1))


def _require_minimum(members: int, nonmembers: int, reason: str) -> None:
    if min(members, nonmembers) < MIN_CANDIDATES:
        raise DataError(
            f"{members} members and {nonmembers} non-members are too few ({reason}); at least {MIN_CANDIDATES} of each "
            f"are required, so {2 * MIN_CANDIDATES} documents, and several hundred of each for a conclusive result"
        )


def _fingerprint(documents: Sequence[Document], members: Sequence[Document], nonmembers: Sequence[Document]) -> str:
    lines = sorted(json.dumps([d.source, d.content]) for d in documents)
    lines += [json.dumps(sorted(d.source for d in kind)) for kind in (members, nonmembers)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _without_near_duplicates(documents: Sequence[Document], pool: Sequence[int], wanted: int) -> tuple[list[int], int]:
    """The first rows of the pool, as many as wanted, without a near-duplicate outside; and the number skipped."""
    tfidf = TfIdf([document.content for document in documents])
    chosen: set[int] = set()
    known: dict[int, set[int]] = {}
    taken = 0
    while len(chosen) < wanted and taken < len(pool):
        new = pool[taken : taken + wanted - len(chosen)]
        taken += len(new)
        known |= {i: tfidf.near_duplicates(i, NEAR_DUPLICATE) for i in new}
        chosen.update(new)
        while bad := [i for i in chosen if known[i] - chosen]:  # a returned row may be a near-duplicate of another
            chosen.difference_update(bad)
    return [i for i in pool if i in chosen], taken - len(chosen)
