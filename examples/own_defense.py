"""A defense of your own, checked by the conformance suite, in a guarded system."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from casemate import Action, Defense, Document, Guard, Outcome, Query, Rag, Retrieval, Verdict
from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.guard.defenses.mirabel import Mirabel
from casemate.testing import check_defense


@dataclass(frozen=True)
class Embargo(Defense):
    """Hides every source whose text contains a forbidden word."""

    word: str = "embargoed"
    paper = "none: an example"
    max_hidden_sources = 1  # the guard fetches as many more

    async def on_retrieve(self, query: Query, retrieval: Retrieval) -> Outcome[Retrieval]:
        hidden = tuple(h.document.id for h in retrieval.hits if self.word in h.document.text)
        kept = tuple(h for h in retrieval.hits if h.document.id not in hidden)
        verdict = Verdict("embargo", bool(hidden), Action.HIDE if hidden else Action.NONE, len(hidden), 0.5, hidden)
        return Outcome(replace(retrieval, hits=kept), verdict)


check_defense(Embargo())
with TemporaryDirectory() as folder:
    index = SqliteIndex(Path(folder) / "index.db")
    guard = Guard(Rag(MiniLM(), index, ExtractiveGenerator()), [Embargo(), Mirabel(mode="paper")])
    releases = [Document("old", "The new bridge opened in May."), Document("new", "embargoed: the bridge closes.")]
    asyncio.run(guard.add(releases))
    answer = asyncio.run(guard.ask(Query("When did the bridge open?", client="alice")))
    print(answer.reply.text, answer.verdicts[0].hidden)
    index.close()
