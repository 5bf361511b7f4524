"""Shared by the tests of all framework wrappers: documents, a fast embedder, and a guard that is calibrated quickly."""

from __future__ import annotations

from casemate.types import Document
from tests.fakes import BagOfWords, documents

MODEL = BagOfWords()
FIT = {"questions": 60, "documents": 24}
MEMBERS = 150
HARMLESS = "amber birch cedar"


def corpus(count=MEMBERS) -> list[Document]:
    """Documents with a unique word each."""
    return documents(count, seed=3)


def text_of(identity):
    """The text of one document."""
    return next(d.text for d in corpus() if d.id == identity)


def embedded(texts) -> list[list[float]]:
    """Vectors in the format of the frameworks: lists of numbers."""
    return MODEL.embed(list(texts)).tolist()


def config(**guard):
    """A guard that is calibrated quickly and flags many questions, so that no test depends on a close decision."""
    return {"calibrate": FIT, "guard": {"defenses": [mirabel()]} | guard}


def mirabel(**options):
    """Options of Mirabel; see ``config``."""
    return {"use": "mirabel", "significance": 0.1} | options
