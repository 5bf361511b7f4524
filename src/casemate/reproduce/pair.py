"""What reproductions with the offline pair share: the models, and a collection of made-up records that they can read.

The pair reads no medical text, so nothing here is NFCorpus or Enron: records of people, products and contracts that do
not exist, in the form that the pair was trained on. Models and texts are tiny; how figures relate is what they tell.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from casemate.app import build
from casemate.backends.sqlite import SqliteIndex
from casemate.backends.transformers import CausalLM
from casemate.config import Part
from casemate.errors import DataError
from casemate.lab.box import CachedEmbedder
from casemate.neighbors import one_thread
from casemate.protocols import Embedder
from casemate.rag import Rag
from casemate.reproduce.laboratory import Setting
from casemate.reproduce.records import Record, records

ROOT = Path(__file__).parents[3]
VARIABLE = "CASEMATE_MODELS"
DIFFERS = (
    "Data: records of eight facts about people, products and contracts that do not exist, a hundred tokens and "
    "more each. "
    "The paper's collections are none that the offline pair can read.",
    "Models: the offline pair of the repository, 1.15 and 4.07 million parameters (models/MODEL_CARD.md). How "
    "figures of "
    "one table relate means something; the figures themselves say nothing about a large model.",
    "Embedder: all-MiniLM-L6-v2.",
)


@dataclass(frozen=True, slots=True)
class Pair:
    """The pair, and a system over some records.

    Attributes:
        draft: The small model.
        rag: A bare system; the reference writes its answers, without instructions, which it was never taught.
        held: The records in the index.
        out: Records of the same kind that are not.
    """

    draft: CausalLM
    rag: Rag
    held: Sequence[Record]
    out: Sequence[Record]


def pair(setting: Setting, inside: int, outside: int, longest: int, opened: ExitStack) -> Pair:
    """A system over so many records, of a moment.

    Args:
        setting: Where, and the seed.
        inside: Records in the index.
        outside: Records besides.
        longest: Tokens of an answer.
        opened: Closes it.

    Raises:
        DataError: If the models are not there.
        MissingExtra: If ``casemate[transformers]`` is not installed.
    """
    opened.enter_context(one_thread())
    folder = models_folder()
    draft, reference = (CausalLM(str(folder / n), device="cpu", max_tokens=longest) for n in ("draft", "reference"))
    place = Path(opened.enter_context(TemporaryDirectory()))
    index = opened.enter_context(closing(SqliteIndex(place / "index.db")))
    embedder: Embedder = CachedEmbedder(build("embedder", Part(use="minilm")))
    rag = Rag(embedder, index, reference, "")
    drawn = records(inside + outside, setting.seed)
    documents = [record.document for record in drawn[:inside]]
    index.add(documents, embedder.embed([document.content for document in documents]))
    return Pair(draft, rag, drawn[:inside], drawn[inside:])


def models_folder() -> Path:
    """Where the pair is: as ``CASEMATE_MODELS`` says, or in the repository.

    Raises:
        DataError: If it is nowhere.
    """
    folder = Path(os.environ.get(VARIABLE) or ROOT / "models")
    if not (folder / "reference" / "config.json").is_file():
        raise DataError(
            f"the offline pair is not at {folder}: it comes with the repository, not with the package; give the folder "
            f"'models' of a checkout in {VARIABLE}"
        )
    return folder
