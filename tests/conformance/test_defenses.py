"""Every built-in defense satisfies the contract of ``Defense``, and ``check_defense`` rejects faulty ones."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest

from casemate import plugins
from casemate.errors import DataError
from casemate.guard.calibration import file as calibration
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.defenses.honeytoken import Honeytoken
from casemate.guard.defenses.mirabel import Mirabel
from casemate.guard.defenses.personal_data import MaskPersonalData
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.reindex import Reindex
from casemate.maths.calibration import Calibration
from casemate.protocols import Defense, Generator, PersonalDataFinder
from casemate.reindexing.registry import ReindexRegistry
from casemate.testing import DEFENSE_OBLIGATIONS, check_defense
from casemate.testing.defenses import _cases
from casemate.types import Action, Document, Outcome, PersonalData, Query, Secret, SimilarityStats, Verdict
from tests.topical import drawn, indexed, topical

LEARNT = Calibration(
    fingerprint="none",
    documents=1000,
    k=5,
    features=FEATURES,
    centre=(0.0,) * 6,
    scale=(1.0,) * 6,
    weights=(0.0, 1.0, 0.0, 0.0, 0.0, 0.1),  # mostly the gap to the next documents
    benign=tuple(i / 400 for i in range(200)),
    source="a test",
)


@pytest.fixture
def mirabel(tmp_path):
    """With a calibration."""
    calibration.write_calibration(tmp_path / "calibration.json", "default", LEARNT)
    return Mirabel(calibration=tmp_path / "calibration.json")


@pytest.fixture
def reindex(tmp_path):
    """With a re-indexing that was fitted before the documents of the cases were added."""
    documents = topical()
    index, embedder = indexed(tmp_path, documents)
    ReindexRegistry(tmp_path / "reindex", "default").write(drawn(documents, embedder))
    return Reindex(folder=tmp_path / "reindex", embedder=embedder, index=index, min_documents=2)


@pytest.fixture
def honeytoken(tmp_path):
    """With its own key."""
    return Honeytoken(keys=tmp_path / "honeytokens.json")


@pytest.fixture
def quorum():
    """With a key for its jitter."""
    return Quorum(secret=Secret("a secret of the tests"))


class Numbers(PersonalDataFinder):
    """Reports every number as personal data."""

    def find(self, text):
        return [PersonalData("NUMBER", found.start(), found.end()) for found in re.finditer(r"\d+", text)]


@pytest.fixture
def personal_data():
    """With a finder that needs no package."""
    return MaskPersonalData(Numbers())


@pytest.mark.parametrize("name", plugins.names("defense"))
def test_built_in_defenses_satisfy_the_contract(name, request) -> None:
    """Builds a defense with requirements from the fixture of the same name, and others without options."""
    made = request.getfixturevalue(name) if name in globals() else plugins.load("defense", name)()
    check_defense(made)


@pytest.mark.parametrize("mode", ["paper", "gumbel", "exact"])
def test_mirabel_satisfies_the_contract_in_every_mode(mode) -> None:
    check_defense(Mirabel(mode=mode))
    check_defense(Mirabel(mode=mode, significance=0.4, min_documents=3))


def test_the_suite_makes_mirabel_hide_a_document(mirabel) -> None:
    """Otherwise Mirabel would satisfy the contract trivially."""
    acted = [asyncio.run(mirabel.on_retrieve(Query("x", client=what), found)).verdict for what, found in _cases()]
    assert 4 <= sum(verdict.flagged for verdict in acted) < len(acted) - 3


def test_mirabel_without_a_calibration_fails(tmp_path) -> None:
    with pytest.raises(DataError, match="run 'casemate calibrate'"):
        check_defense(Mirabel(calibration=tmp_path / "none.json"))


@dataclass
class Correct(Defense):
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
    max_hidden_sources: ClassVar[int] = 1

    async def on_retrieve(self, query, retrieval):
        if not retrieval.hits:
            return Outcome(retrieval)
        best = retrieval.hits[0]
        withheld = [h for h in retrieval.hits if h.document.source == best.document.source and best.score > self.limit]
        verdict = Verdict(
            "hide_best",
            bool(withheld),
            Action.HIDE if withheld else Action.NONE,
            best.score,
            self.limit,
            tuple(h.document.id for h in withheld),
        )
        return self.outcome(replace(retrieval, hits=tuple(h for h in retrieval.hits if h not in withheld)), verdict)

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, verdict)


def test_correct_defenses_pass() -> None:
    check_defense(Correct())
    check_defense(HideBest())


@dataclass
class NoPaper(Defense):
    """Does nothing."""


@dataclass
class NoDocstring(Correct):
    pass


class NoDataclass(Defense):
    """Does nothing."""

    paper = "none"

    def __init__(self) -> None:
        self.option = 1


@dataclass
class Unexplained(Correct):
    """Does nothing."""

    limit: float = 0.5


@dataclass
class Greedy(Correct):
    """Requests more hits forever."""

    async def on_retrieve(self, query, retrieval):
        return Outcome(retrieval, more=True)


@dataclass
class Tampers(Correct):
    """Modifies metadata."""

    async def on_retrieve(self, query, retrieval):
        for hit in retrieval.hits:
            hit.document.metadata["seen"] = True
        return Outcome(retrieval)


@dataclass
class Stateful(Correct):
    """Flags every third query."""

    async def on_retrieve(self, query, retrieval):
        self._count = getattr(self, "_count", 0) + 1
        return Outcome(retrieval, Verdict("x", self._count % 3 == 0, Action.NONE, self._count % 3 == 0, 0.5))


@dataclass
class HidesTwo(HideBest):
    """Hides more sources than ``limit`` allows."""

    def outcome(self, retrieval, verdict):
        if not verdict.flagged or not retrieval.hits:
            return Outcome(retrieval, verdict)
        source = retrieval.hits[0].document.source
        withheld = tuple(h.document.id for h in retrieval.hits if h.document.source == source)
        kept = tuple(h for h in retrieval.hits if h.document.source != source)
        return Outcome(replace(retrieval, hits=kept), replace(verdict, hidden=verdict.hidden + withheld))


@dataclass
class HidesHalf(HideBest):
    """Hides only the best chunk above ``limit``."""

    async def on_retrieve(self, query, retrieval):
        if not retrieval.hits or retrieval.hits[0].score <= self.limit:
            return Outcome(retrieval)
        best = retrieval.hits[0]
        verdict = Verdict("x", True, Action.HIDE, best.score, self.limit, (best.document.id,))
        return Outcome(replace(retrieval, hits=retrieval.hits[1:]), verdict)


@dataclass
class OmitsHidden(HideBest):
    """Does not name the hidden documents above ``limit``."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, hidden=(), action=Action.NONE))


@dataclass
class AddsOnRetrieve(Correct):
    """Adds a document."""

    async def on_retrieve(self, query, retrieval):
        extra = replace(retrieval.hits[0], document=Document("new", "x")) if retrieval.hits else None
        return Outcome(replace(retrieval, hits=(*retrieval.hits, *([extra] if extra else []))))


@dataclass
class AddsOnDeliver(Correct):
    """Delivers a document that was not retrieved."""

    async def on_deliver(self, query, documents):
        return [*documents, Document("new", "x")]


@dataclass
class Reorders(Correct):
    """Reverses the hits."""

    async def on_retrieve(self, query, retrieval):
        return Outcome(replace(retrieval, hits=retrieval.hits[::-1]))


@dataclass
class EditsStats(Correct):
    """Changes the similarity statistics for later defenses."""

    async def on_retrieve(self, query, retrieval):
        return Outcome(replace(retrieval, similarity_stats=SimilarityStats(1, 0.0, 0.0)))


@dataclass
class Contradicts(HideBest):
    """Reports not flagged although ``limit`` is exceeded."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, flagged=False))


@dataclass
class LeaksText(HideBest):
    """Puts document texts into the evidence above ``limit``."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, evidence={"x": [h.document.text for h in retrieval.hits]}))


@dataclass
class NotJson(HideBest):
    """Puts values into the evidence above ``limit`` that are not JSON."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, evidence={"x": np.float32(1)}))


@dataclass
class Shortens(Correct):
    """Returns vectors that are not unit vectors."""

    async def on_index(self, documents, vectors):
        return documents, vectors / 2


@dataclass
class InPlace(Correct):
    """Modifies the given vectors."""

    async def on_index(self, documents, vectors):
        vectors[0] = vectors[1]
        return documents, vectors


@dataclass
class NotDeterministic(Correct):
    """Returns a different vector on each call."""

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
class NotDeterministicPrompt(Correct):
    """Returns a different text on each call."""

    def on_generate(self, generator):
        return Counting()


@dataclass
class Fails(HideBest):
    """Fails on an empty index; else hides above ``limit``."""

    async def on_retrieve(self, query, retrieval):
        assert retrieval.hits[0]
        return await super().on_retrieve(query, retrieval)


@dataclass
class Misspelled(HideBest):
    """Hides above ``limit``, and overrides a stage that does not exist."""

    async def on_retrive(self, query, retrieval):
        return Outcome(retrieval)


@dataclass
class Enforced(HideBest):
    """Reports observe mode above ``limit``."""

    def outcome(self, retrieval, verdict):
        return Outcome(retrieval, replace(verdict, enforced=False))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (NoPaper, "where the method is from"), (NoDocstring, "a docstring"), (NoDataclass, "dataclass fields"),
        (Unexplained, "the option 'limit'"), (Tampers, "the retrieval was changed"), (Stateful, "not always the same"),
        (HidesTwo, "more than 'max_hidden_sources'"), (HidesHalf, "other chunks"), (OmitsHidden, "are missing"),
        (AddsOnRetrieve, "not added"), (Reorders, "not added, changed or moved"),
        (EditsStats, "the background was changed"), (Contradicts, "flagged is False"),
        (LeaksText, "holds the text"), (NotJson, "cannot be kept as JSON"),
        (Shortens, "not of unit length"), (InPlace, "changed what it was given"), (NotDeterministic, "something else"),
        (NotDeterministicPrompt, "another text"), (Fails, "list|tuple index"), (Enforced, "the guard's to say"),
        (Greedy, "there are no more"), (AddsOnDeliver, "on_deliver added or moved one"),
        (Misspelled, "on_retrive is never called"),
    ],
)  # fmt: skip
def test_faulty_defenses_are_rejected(bad, says) -> None:
    with pytest.raises(Exception, match=says):
        check_defense(bad())


def test_descriptions_of_obligations_are_sentences() -> None:
    assert all(o.__doc__ and o.__doc__.strip().endswith(".") for o in DEFENSE_OBLIGATIONS)
