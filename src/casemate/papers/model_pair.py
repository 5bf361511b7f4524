"""Shared by experiments that need a small and a larger language model: the models, and a collection of records.

By default the models are the offline pair of the repository. It cannot read medical text, so these experiments use
neither NFCorpus nor Enron but synthetic records of people, products and contracts, in the form of its training data.
A given pair answers about the same records.
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
from casemate.papers.readers import load, reader_name
from casemate.papers.synthetic_records import Record, records
from casemate.plugins import build
from casemate.protocols import Embedder
from casemate.rag.pipeline import Rag
from casemate.runtime.blas_threads import single_blas_thread
from casemate.runtime.cached_embedder import CachedEmbedder

ROOT = Path(__file__).parents[3]
VARIABLE = "CASEMATE_MODELS"
OFFLINE = (
    "The models are the offline pair of the repository, with 1.15 and 4.07 million parameters (models/MODEL_CARD.md). "
    "Only compare figures within a table: the figures themselves say nothing about a large model."
)
DIFFERS = (
    "The data are records of at least a hundred tokens, with eight facts about people, products and contracts that do "
    "not exist. The offline pair cannot read the paper's collections.",
    "The embedder is all-MiniLM-L6-v2.",
)
VERBATIM = "An answer is correct if it is the expected one, word for word. In the paper, GPT-4 judges."
CONTAINED = "An answer is correct if it contains the expected value. In the paper, GPT-4 judges."
READER = "Answer the question from the documents below."
"""System prompt of a given reader. With the further sentence "If the documents do not hold the answer, say: I don't
know." a model of 1.5 billion parameters declines every command to repeat its context."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The pair, and an unguarded system over the records ``held``, in which the larger model answers.

    The offline pair gets no instructions, because it was not trained on any. Records of the same kind are ``out`` of
    the index. ``name`` is that of the reader; ``models`` is a sentence about both models.
    """

    draft: CausalLM
    rag: Rag
    held: Sequence[Record]
    out: Sequence[Record]
    name: str
    models: str

    @property
    def differs(self) -> tuple[str, ...]:
        """Differences from the papers."""
        return (*DIFFERS, self.models)


def pair(setting: Setting, inside: int, outside: int, longest: int, opened: ExitStack) -> Pair:
    """A temporary system with some records inside the index and some outside; ``longest``: tokens of an answer.

    Raises:
        DataError: If the models are missing.
        MissingExtra: If ``casemate[transformers]`` is not installed.
    """
    opened.enter_context(single_blas_thread())
    draft, reference, name, models = _models(setting, longest)
    place = Path(opened.enter_context(TemporaryDirectory()))
    index = opened.enter_context(closing(SqliteIndex(place / "index.db")))
    embedder: Embedder = CachedEmbedder(build("embedder", PluginSpec(use="minilm")))
    rag = Rag(embedder, index, reference, READER if setting.reader else "")
    drawn = records(inside + outside, setting.seed)
    documents = [record.document for record in drawn[:inside]]
    index.add(documents, embedder.embed([document.content for document in documents]))
    return Pair(draft, rag, drawn[:inside], drawn[inside:], name, models)


def _models(setting: Setting, longest: int) -> tuple[CausalLM, CausalLM, str, str]:
    """Draft, reader, the reader's name, and a sentence about both."""
    if setting.reader:
        reference, name = load(setting.reader, longest), reader_name(setting.reader)
        draft = load(setting.draft, longest) if setting.draft else reference
        return draft, reference, name, f"Models: {name}; draft: {reader_name(setting.draft or setting.reader)}."
    folder = models_folder()
    draft, reference = (CausalLM(str(folder / n), device="cpu", max_tokens=longest) for n in ("draft", "reference"))
    return draft, reference, "the offline reference", OFFLINE


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
