"""Conformance suite for indexes: every operation agrees with an exhaustive scan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from casemate.errors import BackendError, CasemateError, DataError
from casemate.protocols import Index
from casemate.testing.reference import DIM, PRECISION, Reference, agree, same_hits, unit_vectors
from casemate.types import DEFAULT_TENANT, Document, Vector


class MakeIndex(Protocol):
    """Creates unopened indexes for the checks: ``make(True)`` on a new location, ``make(False)`` on the last one."""

    def __call__(self, fresh: bool) -> Index:
        """An unopened index."""
        ...


def check_index(make: MakeIndex, *, exact: bool = True) -> None:
    """Runs every check for an index.

    Args:
        make: Creates the indexes.
        exact: Whether a search finds the k nearest. False: it may miss a tenth of them.
    """
    for obligation in INDEX_OBLIGATIONS:
        obligation(make, exact)


@contextmanager
def _opened(make: MakeIndex, fresh: bool = True) -> Iterator[Index]:
    """An open index; ``check()`` must pass at the end."""
    with closing(make(fresh)) as index:
        index.open("check", DIM)
        yield index
        problems = list(index.check())
        assert problems == [], f"check() finds fault after allowed use: {problems}"


def _documents(source: str, count: int, label: str = "") -> list[Document]:
    digest = f"digest {label}"
    return [Document(f"{source}/{i}", f"text {i} {label}", "title", source, digest, {"i": i}) for i in range(count)]


def _add(
    targets: Sequence[Index | Reference], documents: Sequence[Document], vectors: Vector, tenant: str = DEFAULT_TENANT
) -> None:
    for target in targets:
        target.add(documents, vectors, tenant)


def _refused(kind: type[CasemateError], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind as error:
        assert str(error), f"{what}: the {kind.__name__} has no message"
    except Exception as error:
        raise AssertionError(f"{what} must raise {kind.__name__}, and raises {error!r}") from error
    else:
        raise AssertionError(f"{what} must raise {kind.__name__}, and is accepted")


def _is_open_only_when_opened(make: MakeIndex, exact: bool) -> None:
    """Calls before ``open`` and after ``close`` are refused; closing twice is allowed."""
    index = make(True)

    def scan() -> object:
        return list(index.scan())

    for when in ("before open", "after close"):
        for call in (index.tenants, index.moments, index.check, scan):
            _refused(BackendError, call, f"{call.__name__}() {when}")
        index.open("check", DIM)
        index.close()
    index.close()


def _is_empty_at_first(make: MakeIndex, exact: bool) -> None:
    """An empty index answers queries and reports that it is empty."""
    with _opened(make) as index:
        index.warm()
        assert index.remove(["nothing"]) == 0, "an empty index removed something"
        index.rebuild()
        agree(index, Reference(), exact)


def _agrees_with_a_scan(make: MakeIndex, exact: bool) -> None:
    """After any additions, replacements and removals in two tenants, search and moments equal those of a scan."""
    rng, oracle = np.random.default_rng(7), Reference()
    with _opened(make) as index:
        for step in range(40):
            tenant, sources = str(rng.choice(["a", "b"])), [f"s{i}" for i in rng.choice(12, 3, replace=False)]
            if rng.random() < 0.3:
                gone, expected = index.remove(sources, tenant), oracle.remove(sources, tenant)
                assert gone == expected, f"remove() returned {gone}, there were {expected} documents"
            else:
                documents = [d for s in sources for d in _documents(s, int(rng.integers(1, 20)), str(step))]
                vectors = unit_vectors(rng, len(documents))
                vectors[2::4] = vectors[1::4][: len(vectors[2::4])]  # ties
                _add((index, oracle), documents, vectors, tenant)
            agree(index, oracle, exact)
        index.rebuild()
        index.warm("a")
        agree(index, oracle, exact)
    with _opened(make, fresh=False) as index:  # the reference is unchanged
        agree(index, oracle, exact)


def _breaks_ties_by_age(make: MakeIndex, exact: bool) -> None:
    """Of equal documents, the oldest are found."""
    with _opened(make) as index:
        index.add(_documents("a", 300), np.repeat(unit_vectors(np.random.default_rng(3), 1), 300, axis=0))
        found = [h.document.id for h in index.search(unit_vectors(np.random.default_rng(4), 1)[0], 3).hits]
        assert found == ["a/0", "a/1", "a/2"] or not exact, f"the oldest are a/0 to a/2, not {found}"


def _orders_by_float64(make: MakeIndex, exact: bool) -> None:
    """Of documents closer together than float32 resolves, the nearest are found."""
    rng, oracle = np.random.default_rng(12), Reference()
    q = unit_vectors(rng, 1)[0]
    alike = q * (1 + 1e-7 * rng.standard_normal((300, DIM)))
    with _opened(make) as index:
        _add((index, oracle), _documents("a", 300), alike.astype(np.float32))
        if exact:
            same_hits(index.search(q, 3), oracle.ranking(q, DEFAULT_TENANT), 3, exact)


def _replaces_whole_sources(make: MakeIndex, exact: bool) -> None:
    """A source replaced with fewer chunks keeps no old ones; other sources stay unchanged."""
    rng, oracle = np.random.default_rng(1), Reference()
    with _opened(make) as index:
        for source, count in (("a", 5), ("b", 3), ("a", 2)):
            documents, vectors = _documents(source, count, str(count)), unit_vectors(rng, count)
            _add((index, oracle), documents, vectors)
        agree(index, oracle, exact)


def _keeps_tenants_apart(make: MakeIndex, exact: bool) -> None:
    """Equal ids in two tenants are independent documents."""
    rng, oracle = np.random.default_rng(2), Reference()
    with _opened(make) as index:
        for tenant in ("a", "a'; --", "ä%_"):
            vectors = unit_vectors(rng, 4)
            _add((index, oracle), _documents("same", 4, tenant), vectors, tenant)
        assert index.remove(["same"], "a") == oracle.remove(["same"], "a") == 4
        agree(index, oracle, exact)


def _refuses_what_does_not_fit(make: MakeIndex, exact: bool) -> None:
    """Wrong shapes, vectors without unit length and duplicate ids raise DataError and change nothing."""
    rng, oracle = np.random.default_rng(5), Reference()
    good, one = unit_vectors(rng, 3), np.zeros((3, 1), np.float32)
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
            _add((index, oracle), _documents(source, 3, "old"), good)
        for what, vectors in wrong.items():
            _refused(DataError, partial(index.add, documents, vectors), what)
        for what, last in {
            "an id that is given twice": documents[0],
            "an id of another source": replace(documents[2], id="b/0"),
            "half of a surrogate pair": replace(documents[2], text="\ud800"),
            "metadata that is not JSON": replace(documents[2], metadata={"x": object()}),
        }.items():
            _refused(DataError, partial(index.add, [*documents[:2], last], good), what)
        agree(index, oracle, exact)


def _refuses_another_embedder(make: MakeIndex, exact: bool) -> None:
    """Vectors of another embedder are refused until ``clear``; open handles notice the new embedder."""
    oracle, vectors = Reference(), unit_vectors(np.random.default_rng(6), 5)
    with _opened(make) as index:
        _add((index, oracle), _documents("a", 5), vectors)
        with closing(make(False)) as other:
            _refused(DataError, lambda: other.open("another", DIM), "opening for another embedder")
        agree(index, oracle, exact)
    with closing(make(False)) as old, closing(make(False)) as new:
        old.open("check", DIM)
        new.clear()
        new.open("another", DIM // 2)
        assert new.moments().n == 0 and not new.tenants() and not new.digests(), "something is left after clear()"
        for call in (partial(old.search, vectors[0], 1), partial(old.add, _documents("a", 5), vectors), old.check):
            _refused(DataError, call, "using an index that another process cleared, for another embedder,")


def _keeps_every_character(make: MakeIndex, exact: bool) -> None:
    """Ids, texts and metadata are returned unchanged; NUL may be refused, but not dropped."""
    odd = "ä 漢字 🏰 e\u0301 \u202eabc 'quoted' \"%s\" \\ \r\n\t {} \x7f\uffff"
    oracle, vector = Reference(), unit_vectors(np.random.default_rng(8), 1)
    metadata = {odd: [1, 2.5, 1e300, -0.1, None, True, {"": "\0" + odd}], "n": 2**60}
    with _opened(make) as index:
        for document in (Document(odd, odd * 999, odd, odd, odd, metadata), Document(" ", "", "", "")):
            _add((index, oracle), [document], vector, odd)
        agree(index, oracle, exact)
        try:
            index.add([Document("nul", "a\0b")], vector)
        except DataError as error:
            assert "nul" in str(error), "the refusal does not name the document"
        else:
            assert index.search(vector[0], 1).hits[0].document.text == "a\0b", "NUL was dropped"


def _follows_other_handles(make: MakeIndex, exact: bool) -> None:
    """Changes of one process are visible to the next search of another."""
    rng, oracle = np.random.default_rng(9), Reference()
    with _opened(make) as one, _opened(make, fresh=False) as two:
        for step, index in enumerate([one, two, two, one, two]):
            documents = _documents("a" if step % 2 else "b", 5 - step, str(step))
            vectors = unit_vectors(rng, len(documents))
            _add((index, oracle), documents, vectors)
            agree(one, oracle, exact)
            agree(two, oracle, exact)


def _loses_no_writer(make: MakeIndex, exact: bool) -> None:
    """Concurrent writers lose nothing, and the moments are those of all documents."""
    rng, oracle = np.random.default_rng(11), Reference()
    steps = [(_documents(f"s{i}", 3), unit_vectors(rng, 3)) for i in range(20)]

    def write(index: Index, part: Sequence[tuple[Sequence[Document], Vector]]) -> None:
        for documents, vectors in part:
            index.add(documents, vectors, "new")

    with _opened(make) as one, _opened(make, fresh=False) as two:
        _at_once(partial(write, one, steps[:10]), partial(write, two, steps[10:]))
        came = [d.source for documents, _ in one.scan("new") for d in documents]
        age = {source: i for i, source in enumerate(came)}
        for documents, vectors in sorted(steps, key=lambda step: age.get(step[0][0].source, 0)):
            oracle.add(documents, vectors, "new")
        agree(one, oracle, exact)
        agree(two, oracle, exact)


def _shows_one_moment(make: MakeIndex, exact: bool) -> None:
    """A search concurrent with a writer reads a step completely or not at all, with matching similarity statistics."""
    rng = np.random.default_rng(10)
    with _opened(make) as index:
        q, done = unit_vectors(rng, 1)[0], threading.Event()
        batches = [unit_vectors(rng, 5) for _ in range(20)]

        def write() -> None:
            try:
                for i, vectors in enumerate(batches):
                    index.add(_documents(f"s{i % 13}", 5, str(i)), vectors)
            finally:
                done.set()

        def read() -> None:
            while not done.is_set():
                found = index.search(q, 10_000)
                seen, b = np.array([h.score for h in found.hits]), found.similarity_stats
                assert b.n % 5 == 0, f"a search saw {b.n} documents, half of a step"
                if exact and b.n:
                    assert len(seen) == b.n, f"a search saw {len(seen)} documents and a background of {b.n}"
                    assert abs(seen.mean() - b.mean) < PRECISION, "the background is not that of the documents seen"

        _at_once(write, read)


def _scans_beside_writers(make: MakeIndex, exact: bool) -> None:
    """A running scan does not block writers, and unchanged documents are seen once, by age."""
    rng, size = np.random.default_rng(13), 1500
    with _opened(make) as index, _opened(make, fresh=False) as other:
        for source in "abc":
            index.add(_documents(source, size), unit_vectors(rng, size))
        pieces = index.scan()
        seen = [d.id for d in next(pieces)[0]]
        for writer, source in ((index, "d"), (other, "e")):
            writer.add(_documents(source, 3), unit_vectors(rng, 3))
            writer.remove(["b"])
        seen += [d.id for documents, _ in pieces for d in documents]
        stayed = [f"{source}/{i}" for source in "ac" for i in range(size)]
        assert [identity for identity in seen if identity in set(stayed)] == stayed, "a scan beside writers missed some"
        assert len(seen) == len(set(seen)), "a scan beside writers gave a document twice"


def _at_once(*calls: Callable[[], object]) -> None:
    """Runs calls in threads and raises the first error."""
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
    _orders_by_float64,
    _replaces_whole_sources,
    _keeps_tenants_apart,
    _refuses_what_does_not_fit,
    _refuses_another_embedder,
    _keeps_every_character,
    _follows_other_handles,
    _loses_no_writer,
    _shows_one_moment,
    _scans_beside_writers,
)
