"""Shared by experiments with the offline pair: the models, and a synthetic collection that they can read.

The pair cannot read medical text, so these experiments use neither NFCorpus nor Enron but synthetic records of people,
products and contracts, in the form of the training data. Models and texts are tiny; compare relations, not values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from casemate.backends.generators.transformers import CausalLM
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.config import PluginSpec
from casemate.errors import DataError
from casemate.papers.laboratory import Setting
from casemate.papers.synthetic_records import Record, records
from casemate.plugins import build
from casemate.protocols import Embedder
from casemate.rag.pipeline import Rag
from casemate.runtime.blas_threads import single_blas_thread
from casemate.runtime.cached_embedder import CachedEmbedder

ROOT = Path(__file__).parents[3]
VARIABLE = "CASEMATE_MODELS"
DIFFERS = (
    "Data: records of eight facts about people, products and contracts that do not exist, a hundred tokens and "
    "more each. "
    "The offline pair cannot read the paper's collections.",
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
        rag: An unguarded system; the reference model answers, without instructions, which it was not trained on.
        held: Indexed records.
        out: Records of the same kind outside the index.
    """

    draft: CausalLM
    rag: Rag
    held: Sequence[Record]
    out: Sequence[Record]


def pair(setting: Setting, inside: int, outside: int, longest: int, opened: ExitStack) -> Pair:
    """A temporary system over records.

    Args:
        setting: Folders and seed.
        inside: Records in the index.
        outside: Records outside the index.
        longest: Tokens of an answer.
        opened: Closes the system.

    Raises:
        DataError: If the models are missing.
        MissingExtra: If ``casemate[transformers]`` is not installed.
    """
    opened.enter_context(single_blas_thread())
    folder = models_folder()
    draft, reference = (CausalLM(str(folder / n), device="cpu", max_tokens=longest) for n in ("draft", "reference"))
    place = Path(opened.enter_context(TemporaryDirectory()))
    index = opened.enter_context(closing(SqliteIndex(place / "index.db")))
    embedder: Embedder = CachedEmbedder(build("embedder", PluginSpec(use="minilm")))
    rag = Rag(embedder, index, reference, "")
    drawn = records(inside + outside, setting.seed)
    documents = [record.document for record in drawn[:inside]]
    index.add(documents, embedder.embed([document.content for document in documents]))
    return Pair(draft, rag, drawn[:inside], drawn[inside:])


def models_folder() -> Path:
    """Folder of the pair: ``CASEMATE_MODELS``, else the repository.

    Raises:
        DataError: If it does not exist.
    """
    folder = Path(os.environ.get(VARIABLE) or ROOT / "models")
    if not (folder / "reference" / "config.json").is_file():
        raise DataError(
            f"the offline pair is not at {folder}: it comes with the repository, not with the package; give the folder "
            f"'models' of a checkout in {VARIABLE}"
        )
    return folder
