"""What an index and a defense must obey, as checks that a third party runs on its own.

A check that fails is an ``AssertionError`` that says what is wrong. Each obligation is a small function; all of them
are in ``INDEX_OBLIGATIONS`` and ``DEFENSE_OBLIGATIONS``, to be run one by one where that is wanted.

    def test_my_index(tmp_path):
        places = [tmp_path / "0"]

        def make(fresh):
            if fresh:
                places.append(tmp_path / str(len(places)))
            return MyIndex(places[-1])

        check_index(make)

    def test_my_defense():
        check_defense(MyDefense())
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np

from casemate.errors import BackendError, CapabilityError, CasemateError, DataError
from casemate.guard import Guard
from casemate.protocols import Defense, Generator, Index
from casemate.rag import INSTRUCTIONS, Rag
from casemate.stats import CorpusMoments
from casemate.types import Action, Answer, Background, Document, Float64, Hit, Prompt, Query, Retrieval, Vector, Verdict

DIM = 16
PRECISION = 1e-9


class MakeIndex(Protocol):
    """How the checks get an index.

    ``make(True)`` gives one that was not opened yet, on an empty place of its own; ``make(False)`` another object, not
    opened yet either, on the place of the last ``make(True)``, as a second process would have it.
    """

    def __call__(self, fresh: bool) -> Index:
        """An index that was not opened yet."""
        ...


def check_index(make: MakeIndex, *, exact: bool = True) -> None:
    """Runs every obligation of an index.

    Args:
        make: How to get one.
        exact: Whether a search finds the k nearest. False: it may miss a tenth of them; all else is as strict.

    Raises:
        AssertionError: If one is not met; the message says how.
    """
    for obligation in INDEX_OBLIGATIONS:
        obligation(make, exact)


def check_defense(defense: Defense) -> None:
    """Runs every obligation of a defense.

    Raises:
        AssertionError: If one is not met; the message says how.
    """

    async def run() -> None:
        for obligation in DEFENSE_OBLIGATIONS:
            await obligation(defense)

    asyncio.run(run())


class _Scan:
    """The oracle of an index: a list, looked at from end to end."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[Document, Vector]]] = {}

    def add(self, documents: Sequence[Document], vectors: Vector, tenant: str) -> None:
        self.remove({d.source for d in documents}, tenant)
        self.rows[tenant] += zip(documents, vectors, strict=True)

    def remove(self, sources: Collection[str], tenant: str) -> int:
        before = self.rows.get(tenant, [])
        self.rows[tenant] = [row for row in before if row[0].source not in sources]
        return len(before) - len(self.rows[tenant])

    def search(self, q: Vector, k: int, tenant: str) -> Retrieval:
        s = self.scores(q, tenant)
        hits = [Hit(self.rows[tenant][i][0], float(s[i])) for i in np.argsort(-s, kind="stable")[:k]]
        return Retrieval(tuple(hits), Background(len(s), float(s.mean()) if len(s) else 0, float(s.std()) if len(s) else 0))

    def scores(self, q: Vector, tenant: str) -> Float64:
        return np.array([np.sum(x.astype(np.float64) * q.astype(np.float64)) for _, x in self.rows.get(tenant, [])])

    def moments(self, tenant: str) -> CorpusMoments:
        return CorpusMoments.of(np.array([x for _, x in self.rows.get(tenant, [])], np.float32).reshape(-1, DIM))


@contextmanager
def _opened(make: MakeIndex, fresh: bool = True) -> Iterator[Index]:
    """An open index, which must be sound in the end."""
    with closing(make(fresh)) as index:
        index.open("check", DIM)
        yield index
        problems = list(index.check())
        assert problems == [], f"check() finds fault after allowed use: {problems}"


def _documents(source: str, count: int, label: str = "") -> list[Document]:
    return [
        Document(f"{source}/{i}", f"text {i} {label}", "title", source, f"digest {label}", {"i": i}) for i in range(count)
    ]


def _vectors(rng: np.random.Generator, count: int) -> Vector:
    x = rng.standard_normal((count, DIM))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


def _refused(kind: type[CasemateError], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind as error:
        assert str(error), f"{what}: the {kind.__name__} has no message"
    except Exception as error:
        raise AssertionError(f"{what} must raise {kind.__name__}, and raises {error!r}") from error
    else:
        raise AssertionError(f"{what} must raise {kind.__name__}, and is accepted")


def _agree(index: Index, oracle: _Scan, exact: bool) -> None:
    """Asserts that an index tells everything as the scan does."""
    tenants = sorted(tenant for tenant, rows in oracle.rows.items() if rows)
    assert list(index.tenants()) == tenants, f"tenants() is {index.tenants()}, documents are held of {tenants}"
    for tenant in (*tenants, "nobody"):
        digests = {d.source: d.digest for d, _ in oracle.rows.get(tenant, [])}
        assert dict(index.digests(tenant)) == digests, f"the digests of {tenant!r} are not those that were added"
        held, true = index.moments(tenant), oracle.moments(tenant)
        assert held.n == true.n, f"the moments of {tenant!r} count {held.n} documents, there are {true.n}"
        for part in ("mean", "scatter"):
            off = np.abs(getattr(held, part) - getattr(true, part)).max()
            assert off < PRECISION, f"{part} of the moments of {tenant!r} is off by {off}"
        for k, q in zip((0, 1, 5, 10_000), _vectors(np.random.default_rng(true.n), 4), strict=True):
            _same(index.search(q, k, tenant), oracle.search(q, k, tenant), oracle.scores(q, tenant), exact)


def _same(found: Retrieval, true: Retrieval, s: Float64, exact: bool) -> None:
    """Asserts that a search found what the scan found."""
    for part, tolerance in (("n", 0.5), ("mean", PRECISION), ("std", PRECISION)):
        got, wanted = getattr(found.background, part), getattr(true.background, part)
        assert abs(got - wanted) < tolerance, f"the background's {part} is {got}, by scan {wanted}"
    scores = np.array([h.score for h in found.hits])
    assert np.all(np.diff(scores) <= 0), "hits are not by decreasing score"
    known = {h.document.id: h for h in true.hits}
    near = [known[h.document.id] for h in found.hits if h.document.id in known]
    if exact:
        got, wanted = [h.document.id for h in found.hits], [h.document.id for h in true.hits]
        assert got == wanted, f"the nearest, ties by age, are {wanted}, not {got}"
    off = np.abs(scores[:, None] - s).min(axis=1, initial=2 if len(s) == 0 else np.inf)
    assert np.all(off < PRECISION), f"a score is off by {off.max(initial=0)}; it must be the float64 product"
    missed = len(true.hits) - sum(score > true.hits[-1].score - PRECISION for score in scores) if true.hits else 0
    assert missed <= 0.1 * len(true.hits), f"{missed} of the {len(true.hits)} nearest were missed"
    for hit, wanted in zip([h for h in found.hits if h.document.id in known], near, strict=True):
        assert hit.document == wanted.document, f"{hit.document} is not as it was added: {wanted.document}"
        assert abs(hit.score - wanted.score) < PRECISION, f"the score of {hit.document.id!r} is off"


def _is_open_only_when_opened(make: MakeIndex, exact: bool) -> None:
    """Before ``open`` and after ``close`` calls are refused; closing twice is allowed."""
    index = make(True)
    for when in ("before open", "after close"):
        for call in (index.tenants, index.moments, index.check):
            _refused(BackendError, call, f"{call.__name__}() {when}")
        index.open("check", DIM)
        index.close()
    index.close()


def _is_empty_at_first(make: MakeIndex, exact: bool) -> None:
    """An index that holds nothing answers, and says that it holds nothing."""
    with _opened(make) as index:
        index.warm()
        assert index.remove(["nothing"]) == 0, "an empty index removed something"
        index.rebuild()
        _agree(index, _Scan(), exact)


def _agrees_with_a_scan(make: MakeIndex, exact: bool) -> None:
    """Whatever is added, replaced and removed, in two tenants, search and moments are those of a scan."""
    rng, oracle = np.random.default_rng(7), _Scan()
    with _opened(make) as index:
        for step in range(40):
            tenant, sources = str(rng.choice(["a", "b"])), [f"s{i}" for i in rng.choice(12, 3, replace=False)]
            if rng.random() < 0.3:
                gone, expected = index.remove(sources, tenant), oracle.remove(sources, tenant)
                assert gone == expected, f"remove() returned {gone}, there were {expected} documents"
            else:
                documents = [d for s in sources for d in _documents(s, int(rng.integers(1, 20)), str(step))]
                vectors = _vectors(rng, len(documents))
                vectors[2::4] = vectors[1::4][: len(vectors[2::4])]  # ties
                for target in (index, oracle):
                    target.add(documents, vectors, tenant)
            _agree(index, oracle, exact)
        index.rebuild()
        index.warm("a")
        _agree(index, oracle, exact)
    with _opened(make, fresh=False) as index:  # whatever was held is held
        _agree(index, oracle, exact)


def _breaks_ties_by_age(make: MakeIndex, exact: bool) -> None:
    """Of documents that are all alike, however many, the oldest are found."""
    with _opened(make) as index:
        index.add(_documents("a", 300), np.repeat(_vectors(np.random.default_rng(3), 1), 300, axis=0))
        found = [h.document.id for h in index.search(_vectors(np.random.default_rng(4), 1)[0], 3).hits]
        assert len(found) == 3 and (not exact or found == ["a/0", "a/1", "a/2"]), f"the oldest are a/0 to a/2, not {found}"


def _replaces_whole_sources(make: MakeIndex, exact: bool) -> None:
    """A source that comes back with fewer chunks leaves none of its old ones, and no other source is touched."""
    rng, oracle = np.random.default_rng(1), _Scan()
    with _opened(make) as index:
        for source, count in (("a", 5), ("b", 3), ("a", 2)):
            documents, vectors = _documents(source, count, str(count)), _vectors(rng, count)
            for target in (index, oracle):
                target.add(documents, vectors, "default")
        _agree(index, oracle, exact)


def _keeps_tenants_apart(make: MakeIndex, exact: bool) -> None:
    """The same ids in two tenants are two documents; what one does, the other does not notice."""
    rng, oracle = np.random.default_rng(2), _Scan()
    with _opened(make) as index:
        for tenant in ("a", "a'; --", "ä%_"):
            vectors = _vectors(rng, 4)
            for target in (index, oracle):
                target.add(_documents("same", 4, tenant), vectors, tenant)
        assert index.remove(["same"], "a") == oracle.remove(["same"], "a") == 4
        _agree(index, oracle, exact)


def _refuses_what_does_not_fit(make: MakeIndex, exact: bool) -> None:
    """A wrong shape, a vector that is not of unit length, an id given twice: DataError, and nothing has changed."""
    rng, oracle = np.random.default_rng(5), _Scan()
    good, one = _vectors(rng, 3), np.zeros((3, 1), np.float32)
    wrong = {
        "fewer vectors than documents": good[:2],
        "vectors of another dimension": np.hstack([good, one]),
        "a single vector": good[0],
        "a vector of half the length": good * np.array([[1], [1], [0.5]], np.float32),
        "a vector of zeros": good * np.array([[1], [0], [1]], np.float32),
        "a vector with NaN": good + np.where(np.arange(DIM) == 3, np.nan, 0).astype(np.float32),
        "a vector with infinity": good + np.where(np.arange(DIM) == 3, np.inf, 0).astype(np.float32),
    }
    documents = _documents("a", 3, "new")
    with _opened(make) as index:
        for source in ("a", "b"):
            for target in (index, oracle):
                target.add(_documents(source, 3, "old"), good, "default")
        for what, vectors in wrong.items():
            _refused(DataError, lambda vectors=vectors: index.add(documents, vectors), what)  # type: ignore[misc]
        for what, last in {
            "an id that is given twice": documents[0],
            "an id of another source": replace(documents[2], id="b/0"),
            "half of a surrogate pair": replace(documents[2], text="\ud800"),
            "metadata that is no JSON": replace(documents[2], metadata={"x": object()}),
        }.items():
            _refused(DataError, lambda last=last: index.add([*documents[:2], last], good), what)  # type: ignore[misc]
        _agree(index, oracle, exact)


def _refuses_another_embedder(make: MakeIndex, exact: bool) -> None:
    """Vectors of another embedder are refused; after ``clear`` another may begin, and the first notices."""
    oracle, vectors = _Scan(), _vectors(np.random.default_rng(6), 5)
    with _opened(make) as index:
        for target in (index, oracle):
            target.add(_documents("a", 5), vectors, "default")
        with closing(make(False)) as other:
            _refused(DataError, lambda: other.open("another", DIM), "opening for another embedder")
        _agree(index, oracle, exact)
    with closing(make(False)) as old, closing(make(False)) as new:
        old.open("check", DIM)
        new.clear()
        new.open("another", DIM // 2)
        assert new.moments().n == 0 and not new.tenants() and not new.digests(), "something is left after clear()"
        _refused(DataError, lambda: old.search(vectors[0], 1), "a search with vectors of the embedder before clear()")
        _refused(DataError, lambda: old.add(_documents("a", 5), vectors), "adding what the embedder before clear() made")


def _keeps_every_character(make: MakeIndex, exact: bool) -> None:
    """Ids, texts and metadata come back as they were; NUL may be refused, but not dropped."""
    odd = "ä 漢字 🏰 e\u0301 \u202eabc 'quoted' \"%s\" \\ \r\n\t {} \x7f\uffff"
    oracle, vector = _Scan(), _vectors(np.random.default_rng(8), 1)
    metadata = {odd: [1, 2.5, 1e300, -0.1, None, True, {"": "\0" + odd}], "n": 2**60}
    cases = [Document(odd, odd * 999, odd, odd, odd, metadata), Document(" ", "", "", ""), Document("x", "", "", odd + "2")]
    with _opened(make) as index:
        for document in cases:
            for target in (index, oracle):
                target.add([document], vector, odd)
        _agree(index, oracle, exact)
        try:
            index.add([Document("nul", "a\0b")], vector)
        except DataError as error:
            assert "nul" in str(error), "the refusal does not name the document"
        else:
            assert index.search(vector[0], 1).hits[0].document.text == "a\0b", "NUL was dropped"


def _follows_other_handles(make: MakeIndex, exact: bool) -> None:
    """What one process changes, the next search of another sees; two that write at once lose nothing."""
    rng, oracle = np.random.default_rng(9), _Scan()
    with _opened(make) as one, _opened(make, fresh=False) as two:
        for step, index in enumerate([one, two, two, one]):
            vectors = _vectors(rng, 4 - step)
            for target in (index, oracle):
                target.add(_documents("a" if step % 2 else "b", 4 - step, str(step)), vectors, "default")
            _agree(one, oracle, exact)
            _agree(two, oracle, exact)
        batches = [_vectors(rng, 3) for _ in range(20)]
        for i, vectors in enumerate(batches):
            oracle.add(_documents(f"w{i}", 3), vectors, "default")
        _at_once(*(
            lambda half=half, index=index: [index.add(_documents(f"w{i}", 3), batches[i]) for i in half]  # type: ignore[misc]
            for half, index in ((range(10), one), (range(10, 20), two))
        ))
        for tenant in ("default",):  # ages depend on who came first; sums do not
            for index in (one, two):
                assert index.moments(tenant).n == oracle.moments(tenant).n, "two writers at once lost documents"
                off = np.abs(index.moments(tenant).scatter - oracle.moments(tenant).scatter).max()
                assert off < PRECISION, f"two writers at once left moments that are off by {off}"


def _shows_one_moment(make: MakeIndex, exact: bool) -> None:
    """A search beside a writer sees all of a step or nothing of it, and the background of just what it sees."""
    rng = np.random.default_rng(10)
    with _opened(make) as index:
        q, done = _vectors(rng, 1)[0], threading.Event()
        batches = [_vectors(rng, 5) for _ in range(20)]

        def write() -> None:
            try:
                for i, vectors in enumerate(batches):
                    index.add(_documents(f"s{i % 13}", 5, str(i)), vectors)
            finally:
                done.set()

        def read() -> None:
            while not done.is_set():
                found = index.search(q, 10_000)
                seen, b = np.array([h.score for h in found.hits]), found.background
                assert b.n % 5 == 0, f"a search saw {b.n} documents, half of a step"
                if exact and b.n:
                    assert len(seen) == b.n, f"a search saw {len(seen)} documents and a background of {b.n}"
                    assert abs(seen.mean() - b.mean) < PRECISION, "the background is not that of the documents seen"

        _at_once(write, read)


def _at_once(*calls: Callable[[], object]) -> None:
    """Runs calls in threads; the first that fails is raised."""
    failed: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error


INDEX_OBLIGATIONS: tuple[Callable[[MakeIndex, bool], None], ...] = (
    _is_open_only_when_opened,
    _is_empty_at_first,
    _agrees_with_a_scan,
    _breaks_ties_by_age,
    _replaces_whole_sources,
    _keeps_tenants_apart,
    _refuses_what_does_not_fit,
    _refuses_another_embedder,
    _keeps_every_character,
    _follows_other_handles,
    _shows_one_moment,
)
