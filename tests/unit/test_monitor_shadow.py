import asyncio

import pytest

from casemate.backends.target_answers import partial_answer
from casemate.monitor.drift.shadow import shadow_diff
from casemate.protocols import Target
from casemate.types import UNKNOWN, Answer, Document, Hit, Retrieval, SimilarityStats
from tests.fakes import BagOfWords


class TableTarget(Target):
    """Answers from a table: question to answer and ids."""

    def __init__(self, table):
        self.table = table
        self.clients = set()

    async def ask(self, query):
        self.clients.add((query.client, query.tenant, query.k))
        text, ids = self.table[query.text]
        if isinstance(text, Exception):
            raise text
        hits = tuple(Hit(Document(i, "text", source=f"s{i}"), 0.5) for i in ids)
        return Answer(text, Retrieval(hits, SimilarityStats(10, 0.0, 0.1)))


BEFORE = {
    "fee": ("It is 25 crowns [1].", "abc"),
    "hours": ("From 8 to 4.", "de"),
    "mayor": (UNKNOWN, "fg"),
    "bridge": ("Built in 1931.", "hi"),
}


def diff(after, questions=tuple(BEFORE), before=BEFORE, **options):
    return asyncio.run(shadow_diff(questions, TableTarget(before), TableTarget(before | after), **options))


class TestFlips:
    def test_equal_answers_have_no_flips(self):
        found = diff({})
        assert (found.asked, found.errors, found.flips, found.suspects, found.overlap) == (4, 0, (), (), 1.0)
        assert found.share.value == 0.0

    def test_classifies_flips(self):
        found = diff({"fee": ("It is 90 crowns.", "xab"), "hours": (UNKNOWN, "xd"), "mayor": ("It is Ann.", "fgy")})
        assert [(f.question, f.kind, f.new) for f in found.flips] == [
            (0, "changed", ("x",)),
            (1, "refused", ("x",)),
            (2, "answered", ("y",)),
        ]
        assert found.share.value == 0.75

    def test_ignores_changed_citations(self):
        assert diff({"fee": ("It is 25 crowns [2].\nSources: [2] a.md", "abc")}).flips == ()

    def test_similar_answers_are_equal_with_an_embedder(self):
        embedder = BagOfWords()
        near = {"hours": ("From 8 to 4 o'clock.", "de")}
        assert len(diff(near).flips) == 1
        E = embedder.embed(["From 8 to 4.", "From 8 to 4 o'clock."])
        cosine = float(E[0] @ E[1])
        assert bool(diff(near, embedder=embedder).flips) is (cosine < 0.9)
        (flip,) = diff({"hours": ("Closed for good", "de")}, embedder=embedder).flips
        assert flip.cosine == pytest.approx(
            float(embedder.embed(["From 8 to 4."])[0] @ embedder.embed(["Closed for good"])[0])
        )

    def test_empty_answer_is_a_change(self):
        assert [f.kind for f in diff({"fee": ("", "abc")}, embedder=BagOfWords()).flips] == ["changed"]


class TestSuspects:
    after = {
        "fee": ("It is 90 crowns.", "xab"),
        "hours": ("Never open.", "xd"),
        "bridge": ("Built in 1931.", "nhi"),
        "mayor": (UNKNOWN, "xf"),
    }

    def test_lists_documents_with_most_flips_first(self):
        assert diff(self.after).suspects == (("x", 3, 2), ("n", 1, 0))

    def test_counts_flips_without_a_new_document(self):
        assert diff({"fee": ("It is 90 crowns.", "abc")}).unexplained == 1


class TestAsking:
    def test_unanswered_questions_are_errors(self):
        found = diff({"fee": (OSError("the fee"), "")})
        assert (found.asked, found.errors) == (3, 1)
        assert "the fee" not in repr(found)

    def test_unreachable_targets_give_errors_only(self):
        found = diff({q: (OSError("gone"), "") for q in BEFORE})
        assert (found.asked, found.errors, found.overlap) == (0, 4, 1.0)
        with pytest.raises(ValueError, match="trials"):
            _ = found.share

    def test_hanging_target_times_out(self):
        class Hanging(Target):
            async def ask(self, query):
                await asyncio.sleep(30)

        found = asyncio.run(shadow_diff(["fee"], TableTarget(BEFORE), Hanging(), timeout_s=0.02))
        assert found.errors == 1

    def test_queries_contain_client_tenant_and_k(self):
        after = TableTarget(BEFORE)
        asyncio.run(shadow_diff(["fee"], TableTarget(BEFORE), after, k=3, tenant="north"))
        assert after.clients == {("shadow", "north", 3)}

    def test_targets_without_ids_have_no_suspects(self):
        class SourcesOnly(Target):
            tells = frozenset({"sources"})

            def __init__(self, source):
                self.source = source

            async def ask(self, query):
                return partial_answer("yes", sources=(self.source,))

        found = asyncio.run(shadow_diff(["fee"], SourcesOnly("a"), SourcesOnly("b")))
        assert (found.suspects, found.overlap) == ((), 0.0)

    def test_result_contains_no_text(self):
        assert "crowns" not in repr(diff(TestSuspects.after))
