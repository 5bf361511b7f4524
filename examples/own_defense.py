"""A defense of your own, checked by the conformance suite, in a system wired by hand."""

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from casemate import Action, Defense, Document, Guard, Outcome, Query, Rag, Retrieval, Verdict
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.defenses.mirabel import Mirabel
from casemate.testing import check_defense


@dataclass(frozen=True)
class Embargo(Defense):
    """Hides the best source if its text contains a forbidden word.

    Attributes:
        word: The forbidden word.
    """

    word: str = "embargoed"

    paper: ClassVar[str] = "none: an example"
    max_hidden_sources: ClassVar[int] = 1

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Tests the best hit only."""
        found = bool(retrieval.hits) and self.word in retrieval.hits[0].document.text
        source = retrieval.hits[0].document.source if found else None
        hidden = tuple(h.document.id for h in retrieval.hits if found and h.document.source == source)
        kept = tuple(h for h in retrieval.hits if h.document.id not in hidden)
        verdict = Verdict("embargo", found, Action.HIDE if found else Action.NONE, float(found), 0.5, hidden)
        return Outcome(replace(retrieval, hits=kept), verdict)


async def main() -> None:
    """Asks about two press releases, one of them under embargo."""
    with tempfile.TemporaryDirectory() as folder:
        index = SqliteIndex(Path(folder) / "index.db")
        guard = Guard(Rag(MiniLM(), index, ExtractiveGenerator()), [Embargo(), Mirabel(mode="paper")])
        await guard.add(
            [Document("old", "The new bridge opened in May."), Document("new", "embargoed: the bridge closes.")]
        )
        answer = await guard.ask(Query("Does the bridge close?"))
        print(answer.reply.text)
        print(answer.verdicts[0].hidden)
        index.close()


if __name__ == "__main__":
    check_defense(Embargo())
    asyncio.run(main())
