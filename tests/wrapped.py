"""What the tests of all framework wrappers share: documents, a quick embedder, a guard that is fitted in no time."""

from __future__ import annotations

from casemate.types import Document
from tests.fakes import BagOfWords, documents

MODEL = BagOfWords()
FIT = {"questions": 60, "documents": 24}
MEMBERS = 150
HARMLESS = "amber birch cedar"


def corpus(count=MEMBERS) -> list[Document]:
    """Documents of which each has a word of its own."""
    return documents(count, seed=3)


def text_of(identity):
    """Of one document."""
    return next(d.text for d in corpus() if d.id == identity)


def embedded(texts) -> list[list[float]]:
    """As frameworks want it: lists of numbers."""
    return MODEL.embed(list(texts)).tolist()


def config(**guard):
    """A guard that is fitted quickly, and flags rather more, so that no test stands on the edge of a threshold."""
    return {"calibrate": FIT, "guard": {"defenses": [mirabel()]} | guard}


def mirabel(**options):
    """See ``config``."""
    return {"use": "mirabel", "significance": 0.1} | options
