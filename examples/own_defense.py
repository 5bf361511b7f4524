"""A defense of your own, tested with the suite that ours pass, around parts that are put together by hand."""

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from casemate import Action, Defense, Document, Guard, Outcome, Query, Rag, Retrieval, Verdict
from casemate.backends.extractive import Extractive
from casemate.backends.minilm import MiniLM
from casemate.backends.sqlite import SqliteIndex
from casemate.defenses.mirabel import Mirabel
from casemate.testing import check_defense


@dataclass(frozen=True)
class Embargo(Defense):
    """Withholds the best source document when its text has a forbidden word.

    Attributes:
        word: The word.
    """

    word: str = "embargoed"

    paper: ClassVar[str] = "none: an example"
    hides: ClassVar[int] = 1

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        """Looks at the best hit only."""
        found = bool(retrieval.hits) and self.word in retrieval.hits[0].document.text
        source = retrieval.hits[0].document.source if found else None
        hidden = tuple(h.document.id for h in retrieval.hits if found and h.document.source == source)
        kept = tuple(h for h in retrieval.hits if h.document.id not in hidden)
        verdict = Verdict("embargo", found, Action.HIDE if found else Action.NONE, float(found), 0.5, hidden)
        return Outcome(replace(retrieval, hits=kept), verdict)


async def main() -> None:
    """Two press releases, one of which is not out yet."""
    with tempfile.TemporaryDirectory() as folder:
        index = SqliteIndex(Path(folder) / "index.db")
        guard = Guard(Rag(MiniLM(), index, Extractive()), [Embargo(), Mirabel(mode="paper")])
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
