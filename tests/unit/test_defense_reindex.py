import asyncio
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from casemate.errors import CapabilityError, ConfigError, DataError
from casemate.guard.defenses import reindex as module
from casemate.guard.defenses.reindex import Reindex
from casemate.guard.guard import Guard
from casemate.protocols import Defense
from casemate.rag.pipeline import Rag
from casemate.reindexing.registry import ReindexRegistry
from casemate.reindexing.space import apply_map
from casemate.types import Action, Document, Outcome, Query, Verdict
from tests.fakes import BagOfWords, Parrot
from tests.topical import TOPICS, drawn, indexed, topical

QUESTION = "t2w3 t2w5 t3w1 t3w4 only20"


@pytest.fixture
def documents():
    return topical()


class Setting:
    """A system re-indexed with a random map."""

    def __init__(self, folder, documents, mode="adapter", **options):
        self.folder, self.documents = folder / "reindex", documents
        self.index, self.embedder = indexed(folder, documents)
        self.registry = ReindexRegistry(self.folder, "default")
        self.reindexing = self.registry.write(drawn(documents, self.embedder, mode))
        self.defense = Reindex(mode, self.folder, embedder=self.embedder, index=self.index, **options)
        self.rag = Rag(self.embedder, self.index, Parrot())

    def found(self, text=QUESTION, hits=200):
        q = self.embedder.embed([text])[0]
        retrieval = self.index.search(q, hits)
        return replace(retrieval, exhausted=len(retrieval.hits) < hits)

    def rerank(self, retrieval, text=QUESTION, k=5):
        return asyncio.run(self.defense.on_retrieve(Query(text, k=k), retrieval))

    def expected(self, hits, text=QUESTION, reindexing=None):
        """Ids of these hits in the order of the mapped space, computed one by one."""
        reindexing = reindexing or self.reindexing
        q = self.embedder.embed([text])

        def score(hit):
            x = self.embedder.embed([hit.document.content])
            if reindexing.mode == "gate":
                topic = int((reindexing.centroids @ q[0]).argmax())
                return hit.score - reindexing.penalty * (int(hit.document.id[1:]) % TOPICS != topic)
            asked = apply_map(q, reindexing.weights) if reindexing.mode == "adapter" else q
            return float(asked[0] @ apply_map(x, reindexing.weights)[0])

        return [h.document.id for h in sorted(hits, key=lambda h: -score(h))]


@pytest.fixture
def setting(tmp_path, documents):
    return Setting(tmp_path, documents)


def ids(retrieval):
    return [h.document.id for h in retrieval.hits]


class TestDefense:
    @pytest.mark.parametrize("mode", ["adapter", "compatible", "gate"])
    def test_reorders_hits_and_keeps_their_scores(self, tmp_path, documents, mode):
        setting = Setting(tmp_path, documents, mode)
        before = setting.found()
        after, verdict, more = setting.rerank(before)
        assert not more
        assert ids(after)[:69] == setting.expected(before.hits[:69])
        assert ids(after)[69:] == ids(before)[69:]
        assert ids(after) != ids(before)
        assert {h.document.id: h.score for h in after.hits} == {h.document.id: h.score for h in before.hits}
        assert after.similarity_stats == before.similarity_stats
        assert (verdict.flagged, verdict.action, verdict.hidden) == (False, Action.NONE, ())
        assert verdict.evidence["mode"] == mode
        assert verdict.evidence["came_in"] == len(set(ids(after)[:5]) - set(ids(before)[:5]))

    def test_score_is_the_share_of_hits_outside_the_topic(self, setting):
        before = setting.found()
        topic = int((setting.reindexing.centroids @ setting.embedder.embed([QUESTION])[0]).argmax())
        away = sum(int(h.document.id[1:]) % TOPICS != topic for h in before.hits[:5])
        assert setting.rerank(before).verdict.score == away / 5

    def test_requests_more_hits_when_there_are_too_few(self, setting):
        few = setting.found(hits=68)
        assert setting.rerank(few).more
        assert not setting.rerank(setting.found(hits=69)).more
        assert not setting.rerank(replace(few, exhausted=True)).more

    def test_guard_fetches_enough_hits(self, setting):
        guard = Guard(setting.rag, [setting.defense])
        retrieval, (verdict,) = asyncio.run(guard.retrieve(Query(QUESTION)))
        assert ids(retrieval) == setting.expected(setting.found().hits[:69])[:5]
        assert verdict.evidence["version"] == 1

    def test_equal_texts_keep_their_order(self, tmp_path, documents):
        copies = [Document(f"d{i}", documents[20].text) for i in (1000, 1001, 1002)]
        after, _, _ = (s := Setting(tmp_path, documents + copies)).rerank(s.found())
        assert [i for i in ids(after) if i in {"d20", "d1000", "d1001", "d1002"}] == ["d20", "d1000", "d1001", "d1002"]

    def test_new_documents_are_mapped_without_training(self, setting):
        setting.rerank(setting.found())
        (new,) = topical(1, seed=9, first=1000)
        setting.index.add([new], setting.embedder.embed([new.content]))
        asked = len(setting.embedder.texts)
        before = setting.found(new.text)
        after = setting.rerank(before, new.text).value
        assert "d1000" in ids(before)[:69]
        assert setting.embedder.texts[asked:].count(new.content) == 1 + 2  # once as a hit; twice as the question
        assert ids(after)[:69] == setting.expected(before.hits[:69], new.text)

    def test_many_new_documents_are_read_by_a_scan_and_not_embedded(self, setting):
        setting.rerank(setting.found())
        new = topical(30, seed=9, first=1000)
        setting.index.add(new, setting.embedder.embed([d.content for d in new]))
        before, asked = setting.found(), len(setting.embedder.texts)
        after = setting.rerank(before).value
        assert setting.embedder.texts[asked:] == [QUESTION]
        assert ids(after)[:69] == setting.expected(before.hits[:69])

    def test_changed_documents_are_ranked_by_their_new_text(self, setting):
        setting.rerank(setting.found())
        changed = Document("d20", "t5w1 t5w2 t5w3 t2w3")
        setting.index.add([changed], setting.embedder.embed([changed.content]))
        before = setting.found()
        assert ids(setting.rerank(before).value)[:69] == setting.expected(before.hits[:69])

    def test_new_version_applies_at_once_and_can_be_rolled_back(self, setting):
        before = setting.found()
        first = ids(setting.rerank(before).value)
        other = setting.registry.write(drawn(setting.documents, setting.embedder, seed=5))
        second = setting.rerank(before)
        assert ids(second.value)[:69] == setting.expected(before.hits[:69], reindexing=other) != first[:69]
        assert second.verdict.evidence["version"] == 2
        assert setting.registry.rollback().version == 1
        assert ids(setting.rerank(before).value) == first

    def test_small_collections_are_not_reranked(self, setting):
        setting.defense.min_documents = 181
        before = setting.found()
        assert setting.rerank(before) == Outcome(before)
        empty = replace(before, hits=())
        assert setting.rerank(empty) == Outcome(empty)

    def test_fails_without_an_active_version(self, setting, tmp_path):
        before = setting.found()
        setting.defense.folder = tmp_path / "elsewhere"
        with pytest.raises(DataError, match="no active version for tenant 'default'.*run 'casemate reindex'"):
            setting.rerank(before)
        ReindexRegistry(tmp_path / "elsewhere", "default").write(
            replace(setting.reindexing, accepted=False, reason="it costs too much")
        )
        with pytest.raises(DataError, match="it costs too much"):
            asyncio.run(
                Reindex(folder=tmp_path / "elsewhere", embedder=setting.embedder, index=setting.index).on_retrieve(
                    Query(QUESTION), before
                )
            )

    def test_refuses_a_version_for_another_embedder(self, setting):
        """A map applies only to vectors of the embedder that it was trained on."""
        before = setting.found()
        setting.defense.embedder = BagOfWords(fingerprint="another")
        with pytest.raises(DataError, match="and the configured one is 'another'"):
            setting.rerank(before)

    def test_refuses_a_version_of_another_mode(self, setting):
        other = Reindex("gate", setting.folder, embedder=setting.embedder, index=setting.index)
        with pytest.raises(DataError, match="in mode adapter, not gate"):
            other.ready("default")
        with pytest.raises(ConfigError, match="needs the system's embedder and index"):
            Reindex().ready("default")

    def test_invalid_options_are_refused(self):
        with pytest.raises(CapabilityError, match="set rag.embedder to sentence_transformers"):
            Reindex("lora", embedder=BagOfWords())
        with pytest.raises(ConfigError, match="known: adapter, compatible, gate, lora"):
            Reindex("whitening")
        for wrong in ({"candidates": 0}, {"min_documents": 0}):
            with pytest.raises(ConfigError, match=next(iter(wrong))):
                Reindex(**wrong)


@dataclass
class WithholdSources(Defense):
    """Withholds some sources.

    Attributes:
        withheld: The sources.
    """

    withheld: tuple = ()
    paper: ClassVar[str] = "none"
    max_hidden_sources: ClassVar[int] = 3

    async def on_retrieve(self, query, retrieval):
        hits = tuple(h for h in retrieval.hits if h.document.source not in self.withheld)
        hidden = tuple(h.document.id for h in retrieval.hits if h not in hits)
        verdict = Verdict("hides", bool(hidden), Action.HIDE if hidden else Action.NONE, 1.0, 0.5, hidden)
        return Outcome(replace(retrieval, hits=hits), verdict)


class TestAfterADefenseThatWithholds:
    @pytest.mark.parametrize("exact", [False, True])
    def test_context_equals_that_of_a_collection_without_the_withheld_source(self, tmp_path, documents, exact):
        (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
        whole = Setting(tmp_path / "a", documents, candidates=20, exact=exact)
        for name in ("d20", "d146", "d8"):
            less = [d for d in documents if d.id != name]
            reduced = Setting(tmp_path / "b", less, candidates=20, exact=exact)
            reduced.registry.write(whole.reindexing)
            for i in range(0, 60, 7):
                query = Query(documents[i].text)
                with_it, _ = asyncio.run(Guard(whole.rag, [WithholdSources((name,)), whole.defense]).retrieve(query))
                without, _ = asyncio.run(Guard(reduced.rag, [WithholdSources(), reduced.defense]).retrieve(query))
                assert ids(with_it) == ids(without)
                assert name not in ids(with_it)
            (tmp_path / "b" / "index.db").unlink()


class TestExact:
    def test_finds_the_best_documents_of_the_collection(self, tmp_path, documents):
        """Few candidates do not suffice under a random map; exact mode fetches more until they do."""
        setting = Setting(tmp_path, documents, candidates=2, exact=True)
        few = Setting.__new__(Setting)
        few.__dict__ = setting.__dict__ | {"defense": replace(setting.defense, exact=False)}
        missed = 0
        for i in range(12):
            query = Query(documents[i].text)
            best = setting.expected(setting.found(query.text).hits, query.text)[:5]
            assert ids(asyncio.run(Guard(setting.rag, [setting.defense]).retrieve(query))[0]) == best
            missed += ids(asyncio.run(Guard(few.rag, [few.defense]).retrieve(query))[0]) != best
        assert missed > 6

    def test_uses_added_and_not_removed_documents(self, tmp_path, documents):
        setting = Setting(tmp_path, documents, candidates=2, exact=True)
        guard = Guard(setting.rag, [setting.defense])
        asyncio.run(guard.retrieve(Query(QUESTION)))
        new = topical(20, seed=9, first=1000)
        setting.index.add(new, setting.embedder.embed([d.content for d in new]))
        setting.index.remove(["d20"])
        best = setting.expected(setting.found(hits=500).hits)[:5]
        assert ids(asyncio.run(guard.retrieve(Query(QUESTION)))[0]) == best


def test_collection_is_scanned_only_after_many_new_documents(setting, monkeypatch):
    read = []
    scan = setting.index.scan
    monkeypatch.setattr(setting.index, "scan", lambda tenant: read.append(tenant) or scan(tenant))
    for _ in range(3):
        setting.rerank(setting.found())
    assert read == ["default"]
    monkeypatch.setattr(module, "MAX_NEW", 0)
    (new,) = topical(1, seed=9, first=1000)
    setting.index.add([new], setting.embedder.embed([new.content]))
    for _ in range(2):
        setting.rerank(setting.found(new.text), new.text)
    assert read == ["default", "default"]
