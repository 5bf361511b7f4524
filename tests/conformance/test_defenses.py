"""Every defense keeps the promises of ``Defense``, and ``check_defense`` notices one that does not."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest

from casemate import calibration, registry
from casemate.calibration import Calibration
from casemate.closeness import FEATURES
from casemate.defenses.honeytoken import HoneyToken
from casemate.defenses.mirabel import Mirabel
from casemate.defenses.reindex import Reindex
from casemate.errors import DataError
from casemate.protocols import Defense, Generator
from casemate.reindexing.shelf import Shelf
from casemate.testing import DEFENSE_OBLIGATIONS, check_defense
from casemate.testing.defenses import _cases
from casemate.types import Action, Background, Document, Outcome, Query, Verdict
from tests.topical import drawn, indexed, topical

LEARNT = Calibration(
    fingerprint="none",
    documents=1000,
    k=5,
    features=FEATURES,
    centre=(0.0,) * 6,
    scale=(1.0,) * 6,
    weights=(0.0, 1.0, 0.0, 0.0, 0.0, 0.1),  # the gap to the next documents, and a little of the words
    benign=tuple(i / 400 for i in range(200)),
    source="a test",
)


@pytest.fixture
def mirabel(tmp_path):
    """As an operator has it, with a calibration."""
    calibration.write(tmp_path / "calibration.json", "default", LEARNT)
    return Mirabel(calibration=tmp_path / "calibration.json")


@pytest.fixture
def reindex(tmp_path):
    """As an operator has it, with a re-indexing; the documents of the cases have come since."""
    documents = topical()
    index, embedder = indexed(tmp_path, documents)
    Shelf(tmp_path / "reindex", "default").write(drawn(documents, embedder))
    return Reindex(folder=tmp_path / "reindex", embedder=embedder, index=index, min_documents=2)


@pytest.fixture
def honeytoken(tmp_path):
    """As an operator has it, with a key of its own."""
    return HoneyToken(keys=tmp_path / "honey.json")


@pytest.mark.parametrize("name", registry.names("defense"))
def test_a_defense_that_ships_keeps_its_promises(name, request) -> None:
    """A fixture of its name makes one that needs something; any other works as it is."""
    made = request.getfixturevalue(name) if name in globals() else registry.load("defense", name)()
    check_defense(made)


@pytest.mark.parametrize("mode", ["paper", "gumbel", "exact"])
def test_mirabel_keeps_its_promises_whatever_is_set(mode) -> None:
    check_defense(Mirabel(mode=mode))
    check_defense(Mirabel(mode=mode, significance=0.4, min_documents=3))


def test_mirabel_is_seen_to_act(mirabel) -> None:
    """Or its promises would be easy to keep."""
    acted = [asyncio.run(mirabel.on_retrieve(Query("x", client=what), found)).verdict for what, found in _cases()]
    assert 4 <= sum(verdict.flagged for verdict in acted) < len(acted) - 3


def test_mirabel_without_a_calibration_does_not_pretend(tmp_path) -> None:
    with pytest.raises(DataError, match="run 'casemate calibrate'"):
        check_defense(Mirabel(calibration=tmp_path / "none.json"))


@dataclass
class Good(Defense):
    """Does nothing."""

    paper: ClassVar[str] = "none"


@dataclass
class HideBest(Defense):
    """Hides the nearest source when it is nearer than ``limit``.

    Attributes:
        limit: Above it a query is flagged.
    """

    limit: float = 0.5
    paper: ClassVar[str] = "none"
    hides: ClassVar[int] = 1

    async def on_retrieve(self, query, retrieval):
        if not retrieval.hits:
            return Outcome(retrieval)
        best = retrieval.hits[0]
        gone = [h for h in retrieval.hits if h.document.source == best.document.source and best.score > self.limit]
        verdict = Verdict(
            "hide_best",
            bool(gone),
            Action.HIDE if gone else Action.NONE,
            best.score,
            self.limit,
            tuple(h.document.id for h in gone),
        )
        return self.outcome(replace(retrieval, hits=tuple(h for h in retrieval.hits if h not in gone)), verdict)

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, verdict)


def test_good_defenses_pass() -> None:
    check_defense(Good())
    check_defense(HideBest())


@dataclass
class NoPaper(Defense):
    """Does nothing."""


@dataclass
class NoDocstring(Good):
    pass


class NoDataclass(Defense):
    """Does nothing."""

    paper = "none"

    def __init__(self) -> None:
        self.option = 1


@dataclass
class Unexplained(Good):
    """Does nothing."""

    limit: float = 0.5


@dataclass
class Greedy(Good):
    """Wants more for ever."""

    async def on_retrieve(self, query, retrieval):
        return Outcome(retrieval, more=True)


@dataclass
class Tampers(Good):
    """Changes metadata."""

    async def on_retrieve(self, query, retrieval):
        for hit in retrieval.hits:
            hit.document.metadata["seen"] = True
        return Outcome(retrieval)


@dataclass
class Remembers(Good):
    """Flags every third."""

    async def on_retrieve(self, query, retrieval):
        self._count = getattr(self, "_count", 0) + 1
        return Outcome(retrieval, Verdict("x", self._count % 3 == 0, Action.NONE, self._count % 3 == 0, 0.5))


@dataclass
class HidesTwo(HideBest):
    """More than ``limit`` says."""

    def outcome(self, retrieval, verdict):
        if not verdict.flagged or not retrieval.hits:
            return Outcome(retrieval, verdict)
        source = retrieval.hits[0].document.source
        gone = tuple(h.document.id for h in retrieval.hits if h.document.source == source)
        kept = tuple(h for h in retrieval.hits if h.document.source != source)
        return Outcome(replace(retrieval, hits=kept), replace(verdict, hidden=verdict.hidden + gone))


@dataclass
class HidesHalf(HideBest):
    """Only the best chunk, when ``limit`` is passed."""

    async def on_retrieve(self, query, retrieval):
        if not retrieval.hits or retrieval.hits[0].score <= self.limit:
            return Outcome(retrieval)
        best = retrieval.hits[0]
        verdict = Verdict("x", True, Action.HIDE, best.score, self.limit, (best.document.id,))
        return Outcome(replace(retrieval, hits=retrieval.hits[1:]), verdict)


@dataclass
class Silent(HideBest):
    """Does not name what it hides beyond ``limit``."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, hidden=(), action=Action.NONE))


@dataclass
class Invents(Good):
    """Adds a document."""

    async def on_retrieve(self, query, retrieval):
        extra = replace(retrieval.hits[0], document=Document("new", "x")) if retrieval.hits else None
        return Outcome(replace(retrieval, hits=(*retrieval.hits, *([extra] if extra else []))))


@dataclass
class Reorders(Good):
    """Turns the hits round."""

    async def on_retrieve(self, query, retrieval):
        return Outcome(replace(retrieval, hits=retrieval.hits[::-1]))


@dataclass
class Blurs(Good):
    """Changes the background for those who come after."""

    async def on_retrieve(self, query, retrieval):
        return Outcome(replace(retrieval, background=Background(1, 0.0, 0.0)))


@dataclass
class Contradicts(HideBest):
    """Says that it flags nothing, and ``limit`` says otherwise."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, flagged=False))


@dataclass
class Tells(HideBest):
    """Keeps texts as evidence, above ``limit``."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, evidence={"x": [h.document.text for h in retrieval.hits]}))


@dataclass
class Unkept(HideBest):
    """Evidence that is no JSON, above ``limit``."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, evidence={"x": np.float32(1)}))


@dataclass
class Shortens(Good):
    """Vectors that are no unit vectors."""

    async def on_index(self, documents, vectors):
        return documents, vectors / 2


@dataclass
class InPlace(Good):
    """Changes the vectors that it is given."""

    async def on_index(self, documents, vectors):
        vectors[0] = vectors[1]
        return documents, vectors


@dataclass
class Dice(Good):
    """Another vector each time."""

    _rng: object = field(default_factory=lambda: np.random.default_rng(0), repr=False)

    async def on_index(self, documents, vectors):
        return documents, np.roll(vectors, self._rng.integers(1, 5), axis=0)

    __doc__ = "Another vector each time, by _rng."


class Counting(Generator):
    def __init__(self) -> None:
        self.count = itertools.count()

    async def stream(self, prompt):
        yield str(next(self.count))


@dataclass
class Wraps(Good):
    """Another text each time."""

    def on_generate(self, generator):
        return Counting()


@dataclass
class Fails(HideBest):
    """On an empty index; else as ``limit`` says."""

    async def on_retrieve(self, query, retrieval):
        assert retrieval.hits[0]
        return await super().on_retrieve(query, retrieval)


@dataclass
class Enforced(HideBest):
    """Says that it was only observed, above ``limit``."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, enforced=False))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (NoPaper, "where the method is from"), (NoDocstring, "a docstring"), (NoDataclass, "dataclass fields"),
        (Unexplained, "the option 'limit'"), (Tampers, "the retrieval was changed"), (Remembers, "not always the same"),
        (HidesTwo, "more than 'hides'"), (HidesHalf, "other chunks"), (Silent, "are missing"),
        (Invents, "not added"), (Reorders, "not added, changed or moved"), (Blurs, "the background was changed"),
        (Contradicts, "flagged is False"), (Tells, "holds the text"), (Unkept, "cannot be kept as JSON"),
        (Shortens, "not of unit length"), (InPlace, "changed what it was given"), (Dice, "something else"),
        (Wraps, "another text"), (Fails, "list|tuple index"), (Enforced, "the guard's to say"),
        (Greedy, "there are no more"),
    ],
)  # fmt: skip
def test_a_defense_that_breaks_a_promise_is_noticed(bad, says) -> None:
    with pytest.raises(Exception, match=says):
        check_defense(bad())


def test_an_obligation_says_in_a_sentence_what_it_is() -> None:
    assert all(o.__doc__ and o.__doc__.strip().endswith(".") for o in DEFENSE_OBLIGATIONS)
