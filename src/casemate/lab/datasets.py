"""Who is a member: candidates that stay in the index, candidates that are held out of it, and the lab's own index.

A candidate is a whole source, title and text, named as the index names it. The owner's index is never touched: the
lab copies it, vectors and all, into an index of its own from which the non-members are missing.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from casemate.corpus import Corpus
from casemate.errors import DataError
from casemate.protocols import Index, Progress
from casemate.stats import CorpusMoments
from casemate.types import DEFAULT_TENANT, Document, Float64, Vector
from casemate.words import words

Half: TypeAlias = Literal["A", "B"]

MINIMUM = 10
"""Candidates of each kind below which no figure would mean anything."""
SAME = 0.95
"""TF-IDF cosine from which two texts count as one (Naseh et al. 2025, arXiv 2502.00306)."""
CELLS = 4_000_000
"""Similarities that are held at once while twins are sought: some 50 MB."""
WINDOW = 2048
"""Documents of one commit while an index is copied."""
ROUNDING = 1e-7
"""By how much sums of the same unit vectors, taken in another order, may differ; one other vector makes more."""
NAMES = (("members", "nonmembers"), ("mem_indices", "non_mem_indices"))
"""Keys of a file that says who is what: ours, and those of the splits that were published with attacks."""


@dataclass(frozen=True, slots=True)
class Split:
    """The candidates of a campaign.

    Attributes:
        members: Those that stay in the index, in random order.
        nonmembers: Those that are held out of it, in random order.
        half: In which half each is, by name: thresholds are fitted on one and judged on the other.
        dropped: Non-members that were left out, because a text that stays in the index is as good as the same.
        fingerprint: Of all documents and of who is what: equal only where results may be put together.
        notes: What the owner should know about the split, a sentence each.
    """

    members: tuple[Document, ...]
    nonmembers: tuple[Document, ...]
    half: Mapping[str, Half]
    dropped: int
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def candidates(self) -> list[tuple[Document, bool]]:
        """Everyone, and whether he is a member. Both kinds are mixed evenly: what is done of them is a fair part."""
        placed = [
            ((place + 0.5) / len(kind), member, document)
            for member, kind in ((True, self.members), (False, self.nonmembers))
            for place, document in enumerate(kind)
        ]
        return [(document, member) for _, member, document in sorted(placed, key=lambda p: (p[0], not p[1]))]


class Stored(NamedTuple):
    """What an index holds of one source."""

    ids: tuple[str, ...]
    vectors: Vector  # (chunks, dim)

    def isdisjoint(self, ids: Iterable[str]) -> bool:
        """Whether none of these is of the source."""
        return set(self.ids).isdisjoint(ids)


def read(corpus: Corpus, held: Collection[str]) -> list[Document]:
    """The whole documents of a corpus that an index holds; what cannot be read is left out.

    Args:
        corpus: Where the texts are.
        held: Names of the sources in the index, as ``Index.digests`` gives them.
    """
    found = []
    for source in corpus.sources():
        if source.name in held:
            try:
                title, text, _ = source.parse()
            except DataError:
                continue
            found.append(Document(source.name, text, title))
    return found


def split(documents: Sequence[Document], members: int, nonmembers: int, seed: int) -> Split:
    """Draws candidates at random.

    Args:
        documents: All whole documents of the index, each name once.
        members: How many are to stay in the index.
        nonmembers: How many are to be held out. One with a twin that stays is passed over for another.
        seed: The same gives the same split.

    Returns:
        As many as were asked for, or fewer of both with a note that says why.

    Raises:
        DataError: If there are too few to say anything.
    """
    rng = np.random.default_rng(seed)
    share = min(1.0, len(documents) / max(members + nonmembers, 1))
    m, n = int(members * share), int(nonmembers * share)
    _require_enough(m, n, f"of {len(documents)} documents {members} and {nonmembers} were to be drawn")
    order = rng.permutation(len(documents)).tolist()
    kept, dropped = _without_twins(documents, order[m:], n)
    return _split(documents, order[:m], kept, (dropped, members, nonmembers), rng)


def read_split(path: Path, documents: Sequence[Document], seed: int) -> Split:
    """The split that a json file names: ``{"members": [names], "nonmembers": [names]}``, or the published keys.

    Args:
        path: The file.
        documents: All whole documents, each name once; those of both lists must be among them.
        seed: For the halves and the order.

    Raises:
        DataError: If the file is no split of these documents, or names too few.
    """
    named = _named(path)
    place = {d.source: i for i, d in enumerate(documents)}
    unknown = [name for names in named for name in names if name not in place]
    if unknown:
        raise DataError(f"{path} names {len(unknown)} documents that the corpus does not have, {unknown[0]!r} first")
    twice = [name for name, count in Counter(named[0] + named[1]).items() if count > 1]
    if twice:
        raise DataError(f"{path} names {twice[0]!r} twice; a document is a member or a non-member, once")
    rng = np.random.default_rng(seed)
    inside, pool = ([place[names[i]] for i in rng.permutation(len(names))] for names in named)
    kept, dropped = _without_twins(documents, pool, len(pool))
    return _split(documents, inside, kept, (dropped, len(inside), len(pool)), rng)


def drawn(
    documents: Sequence[Document],
    members: Sequence[int],
    nonmembers: Sequence[int],
    counts: tuple[int, int],
    rng: np.random.Generator,
) -> Split:
    """The split of texts of which it is known what they are: the first of both kinds, as many as wanted.

    Args:
        documents: All of them, each name once.
        members: Those that are in the collection, in random order.
        nonmembers: Those that are not. One with a twin among the members is left out: it is as good as in.
        counts: How many members and non-members are wanted.
        rng: For the halves.

    Raises:
        DataError: If there are too few to say anything.
    """
    kept, dropped = _without_twins(documents, nonmembers, len(nonmembers))
    return _split(documents, members[: counts[0]], kept[: counts[1]], (dropped, *counts), rng)


def hold_out(
    index: Index, target: Index, split: Split, tenant: str = DEFAULT_TENANT, progress: Progress = lambda count: None
) -> int:
    """Makes another index hold everything of this one but the non-members. Nothing is embedded again.

    What the other holds already is kept, so an interrupted copy goes on and a finished one is used again. At the end
    the moments of both must agree: they are sums over all vectors, so one document too many or too few is seen.

    Args:
        index: The owner's, which is only read.
        target: The lab's, opened for the same embedder.
        split: Who is held out.
        tenant: Whose documents; the same in both.
        progress: Called with the number of documents just copied.

    Returns:
        How many documents were copied.

    Raises:
        DataError: If a member is not in the index, or the index was changed meanwhile.
    """
    out = {d.source for d in split.nonmembers}
    wanted = {source: digest for source, digest in index.digests(tenant).items() if source not in out}
    absent = [d.source for d in split.members if d.source not in wanted]
    if absent:
        raise DataError(f"{len(absent)} members are not in the index, {absent[0]!r} first; run 'casemate index'")
    sizes, moments = _census(index, wanted, tenant)
    copied = 0
    for keep in (True, False):  # if what was there does not do, all is copied anew
        stale = [s for s, digest in target.digests(tenant).items() if not keep or wanted.get(s) != digest]
        if stale:
            target.remove(stale, tenant)
        missing = wanted.keys() - target.digests(tenant).keys()
        for documents, vectors in _sources(index, {s: sizes[s] for s in missing if s in sizes}, tenant):
            target.add(documents, vectors, tenant)
            copied += len(documents)
            progress(len(documents))
        if target.digests(tenant) == wanted and _equal(target.moments(tenant), moments):
            return copied
    raise DataError("the index was changed while the lab copied it; run again when nobody writes to it")


def stored(index: Index, sources: Collection[str], tenant: str = DEFAULT_TENANT) -> dict[str, Stored]:
    """Ids and vectors of some sources, from one pass over the index; a source that it does not hold is left out."""
    ids: dict[str, list[str]] = {}
    rows: dict[str, list[Vector]] = {}
    for documents, vectors in index.scan(tenant):
        for document, vector in zip(documents, vectors, strict=True):
            if document.source in sources:
                ids.setdefault(document.source, []).append(document.id)
                rows.setdefault(document.source, []).append(vector.copy())
    return {source: Stored(tuple(ids[source]), np.stack(rows[source])) for source in ids}


def _named(path: Path) -> tuple[list[str], list[str]]:
    """Names of members and of non-members, as a file has them."""
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as json: {error}") from error
    for inside, outside in NAMES:
        m, n = (raw.get(inside), raw.get(outside)) if isinstance(raw, dict) else (None, None)
        if isinstance(m, list) and isinstance(n, list) and all(isinstance(name, str) for name in m + n):
            return m, n
    known = " or ".join(f'{{"{m}": [names], "{n}": [names]}}' for m, n in NAMES)
    raise DataError(f"{path} says not who is a member; it must be {known}")


def _split(
    documents: Sequence[Document],
    inside: Sequence[int],
    outside: Sequence[int],
    asked: tuple[int, int, int],
    rng: np.random.Generator,
) -> Split:
    """Assigns halves, within each kind by chance, and says what became of the wish."""
    dropped, members, nonmembers = asked
    _require_enough(len(inside), len(outside), f"{dropped} non-members have a twin that stays in the index")
    half: dict[str, Half] = {}
    for kind in (inside, outside):
        for place, i in enumerate(rng.permutation(kind)):
            half[documents[i].source] = "A" if place % 2 else "B"
    notes = []
    if dropped:
        notes.append(f"{dropped} non-members were left out: a text that stays in the index is as good as the same")
    if (len(inside), len(outside)) != (members, nonmembers):
        notes.append(
            f"{members} members and {nonmembers} non-members were asked for, {len(inside)} and {len(outside)} "
            f"could be had of {len(documents)} documents"
        )
    named = [[documents[i] for i in kind] for kind in (inside, outside)]
    return Split(tuple(named[0]), tuple(named[1]), half, dropped, _fingerprint(documents, *named), tuple(notes))


def _require_enough(members: int, nonmembers: int, why: str) -> None:
    if min(members, nonmembers) < MINIMUM:
        raise DataError(
            f"{members} members and {nonmembers} non-members are too few ({why}); at least {MINIMUM} of each are "
            f"needed, so {2 * MINIMUM} documents, and some hundreds of each for a firm statement"
        )


def _fingerprint(documents: Sequence[Document], members: Sequence[Document], nonmembers: Sequence[Document]) -> str:
    lines = sorted(json.dumps([d.source, d.content]) for d in documents)
    lines += [json.dumps(sorted(d.source for d in kind)) for kind in (members, nonmembers)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _without_twins(documents: Sequence[Document], pool: Sequence[int], wanted: int) -> tuple[list[int], int]:
    """The first of the pool, as many as wanted, none of which has a twin outside; and how many were passed over."""
    twins = _twins(documents)
    chosen: set[int] = set()
    known: dict[int, set[int]] = {}
    taken = 0
    while len(chosen) < wanted and taken < len(pool):
        new = pool[taken : taken + wanted - len(chosen)]
        taken += len(new)
        known |= twins(new)
        chosen.update(new)
        while bad := [i for i in chosen if known[i] - chosen]:  # who goes back may be another's twin
            chosen.difference_update(bad)
    return [i for i in pool if i in chosen], taken - len(chosen)


def _twins(documents: Sequence[Document]) -> Callable[[Sequence[int]], dict[int, set[int]]]:
    """Finds, for some rows, which other documents have a TF-IDF cosine of ``SAME`` or more, block by block."""
    X = tfidf(documents)
    columns = X.T.tocsr()  # once; else each product would sort it anew
    rows = max(1, CELLS // max(len(documents), 1))

    def find(wanted: Sequence[int]) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {i: set() for i in wanted}
        for start in range(0, len(wanted), rows):
            block = wanted[start : start + rows]
            s = (X[block] @ columns).tocoo()  # (rows, documents)
            near = s.data >= SAME
            for row, other in zip(s.row[near].tolist(), s.col[near].tolist(), strict=True):
                found[block[row]] |= {other} - {block[row]}
        return found

    return find


def tfidf(documents: Sequence[Document]) -> Any:
    """Unit rows of counts times ln((1 + n) / (1 + documents with the word)) + 1: (documents, words), sparse."""
    from scipy.sparse import csr_matrix, diags

    places: dict[str, int] = {}
    column, count, ends = array("i"), array("f"), array("q", [0])
    for document in documents:
        for word, times in Counter(words(document.content)).items():
            column.append(places.setdefault(word, len(places)))
            count.append(times)
        ends.append(len(column))
    parts = (np.frombuffer(a, a.typecode) if len(a) else np.empty(0, a.typecode) for a in (count, column, ends))
    X = csr_matrix(tuple(parts), shape=(len(documents), len(places)), dtype=np.float32)
    spread = np.bincount(X.indices, minlength=len(places))
    X.data *= (np.log((1 + len(documents)) / (1 + spread)) + 1)[X.indices].astype(np.float32)
    lengths: Float64 = np.sqrt(np.asarray(X.multiply(X).sum(axis=1), np.float64)).ravel()
    return diags(1 / np.maximum(lengths, 1e-12)).astype(np.float32) @ X


def _census(index: Index, wanted: Collection[str], tenant: str) -> tuple[Counter[str], CorpusMoments]:
    """How many documents each wanted source has, and the moments of all of them."""
    sizes: Counter[str] = Counter()
    total = None
    for documents, vectors in index.scan(tenant):
        mine = [i for i, d in enumerate(documents) if d.source in wanted]
        sizes.update(documents[i].source for i in mine)
        part = CorpusMoments.of(vectors[mine])
        total = part if total is None else total + part
    if total is None:
        raise DataError(f"tenant {tenant!r} has no documents; run 'casemate index' first")
    return sizes, total


def _sources(index: Index, sizes: Mapping[str, int], tenant: str) -> Iterator[tuple[list[Document], Vector]]:
    """Documents with their vectors, some ``WINDOW`` at a time, never a part of a source: adding replaces sources."""
    parts: dict[str, list[tuple[Document, Vector]]] = {}
    whole: list[tuple[Document, Vector]] = []
    for documents, vectors in index.scan(tenant) if sizes else ():
        for document, vector in zip(documents, vectors, strict=True):
            if document.source in sizes:
                part = parts.setdefault(document.source, [])
                part.append((document, vector.copy()))
                whole += parts.pop(document.source) if len(part) == sizes[document.source] else ()
        if len(whole) >= WINDOW:
            yield [d for d, _ in whole], np.stack([v for _, v in whole])
            whole = []
    if whole:
        yield [d for d, _ in whole], np.stack([v for _, v in whole])


def _equal(a: CorpusMoments, b: CorpusMoments) -> bool:
    return (
        a.n == b.n
        and float(np.abs(a.mean - b.mean).max()) <= ROUNDING
        and float(np.abs(a.scatter - b.scatter).max()) <= ROUNDING
    )
