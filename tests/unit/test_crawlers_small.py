"""Every crawler against collections of no document, of one, and of one text over and over: it ends, and lies not."""

import pytest

from casemate import plugins
from casemate.types import Document
from tests.unit.crawls import System, crawl

TEXT = "The north bridge is closed for repairs since May. Boats go every hour from the old pier."
COLLECTIONS = {
    "one": [Document("d0", TEXT)],
    "five": [Document(f"d{i}", f"{TEXT} Note {i} says so.") for i in range(5)],
    "identical": [Document(f"d{i}", TEXT) for i in range(30)],
    "one word": [Document("d0", "bridge")],
}


@pytest.mark.parametrize("name", ["composite", "rag_thief", "worm", "pirates", "ikea", "rag_crawler", "mextra"])
@pytest.mark.parametrize("documents", COLLECTIONS.values(), ids=COLLECTIONS)
def test_a_small_collection_is_recovered_and_nothing_else(name, documents):
    system = System(documents, budget=12)
    cls = plugins.load("crawler", name)
    options = {"embedder": system.embedder} if "embedder" in cls.__dataclass_fields__ else {}
    if name == "worm":
        options |= {"suffix": 4, "training_questions": 20}
    found = crawl(cls(**options), system)
    assert len(system.questions) <= 12
    assert len(set(found)) == len(found)
    held = " ".join(d.text for d in documents)
    for text in found:
        assert set(text.lower().replace(".", "").split()) & set(held.lower().replace(".", "").split())
