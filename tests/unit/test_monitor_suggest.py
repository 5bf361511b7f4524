import asyncio
import dataclasses
import gzip
import json
import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from casemate.backends.embedders.minilm import MiniLM
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.backends.target_answers import partial_answer
from casemate.errors import DataError, MissingExtra
from casemate.maths import clustering
from casemate.monitor.canaries import drafts, questions
from casemate.monitor.canaries import suggest as module
from casemate.monitor.canaries.ambiguity import Ambiguity
from casemate.monitor.canaries.canary import Canary, CanarySet
from casemate.monitor.canaries.canary_file import parse_canaries
from casemate.monitor.canaries.coverage import CorpusRegion, Coverage, RegionMap, measure_coverage
from casemate.monitor.canaries.results import CanaryStatus
from casemate.monitor.canaries.run import CanaryRunner
from casemate.monitor.canaries.suggest import CanarySuggestion, SuggestionSettings, allocate, suggest_canaries
from casemate.protocols import Target
from casemate.rag.pipeline import Rag
from casemate.text.tokens import ReferenceCorpus
from casemate.types import UNKNOWN, Document
from tests.fakes import BagOfWords
from tests.unit.towns import town, towns


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("index") / "i.db", towns())


@pytest.fixture(scope="module")
def found(rag):
    return suggested(rag, rag, count=24)


def filled(path, documents, tenant="default"):
    index, embedder = SqliteIndex(path), BagOfWords()
    rag = Rag(embedder, index, ExtractiveGenerator())
    index.add(documents, embedder.embed([d.content for d in documents]), tenant)
    return rag


def suggested(rag, target=None, tenant="default", **settings):
    runner = CanaryRunner((), target or rag, embedder=rag.embedder, tenant=tenant)
    return asyncio.run(suggest_canaries(rag.index, rag.embedder, runner, SuggestionSettings(**settings)))


def asked(canaries, target, embedder, run_id="r"):
    return asyncio.run(CanaryRunner(canaries, target, embedder=embedder, client="canary").run(run_id)).results


def kinds(found):
    return [c.id.rsplit("-", 1)[0] for c in found.canaries.canaries]


class Refusing(Target):
    async def ask(self, query):
        return partial_answer(UNKNOWN)


class UnreachableTarget(Target):
    async def ask(self, query):
        raise OSError("no route to host")


class AnswersOnly(Target):
    """Reports only its answers."""

    tells = frozenset()

    def __init__(self, rag):
        self.rag = rag

    async def ask(self, query):
        return partial_answer((await self.rag.ask(query)).text)


class TestSuggestedSet:
    def test_has_the_requested_number_and_every_kind(self, found):
        assert len(found.canaries.canaries) == 24
        assert set(kinds(found)) == {"sentinel", "fact", "trigger", "refusal", "injection"}
        assert len({c.id for c in found.canaries.canaries}) == 24

    def test_every_canary_passes_in_twenty_runs(self, rag, found):
        for n in range(20):
            results = asked(found.canaries.canaries, rag, rag.embedder, run_id=f"r{n}")
            assert {r.status for r in results} == {CanaryStatus.PASS}

    def test_same_seed_gives_the_same_set(self, rag, found):
        assert suggested(rag, rag, count=24).text == found.text
        assert suggested(rag, rag, count=24, seed=8).text != found.text

    def test_sentinel_ranks_its_document_first_by_a_margin(self, rag, found):
        pages = towns()
        E = rag.embedder.embed([d.content for d in pages]).astype(np.float64)
        for canary in (c for c in found.canaries.canaries if c.id.startswith("sentinel")):
            scores = E @ rag.embedder.embed([canary.query])[0].astype(np.float64)
            order = np.argsort(-scores)
            assert (pages[order[0]].id,) == canary.expected_documents
            assert scores[order[0]] - scores[order[1]] >= module.SENTINEL_MARGIN - 1e-6
            assert canary.max_rank == 1
            assert canary.min_cosine == pytest.approx(scores[order[0]] - 0.02, abs=0.0011)

    def test_fact_is_in_its_document_but_not_in_its_question(self, found):
        text = {d.id: d.text for d in towns()}
        facts = [c for c in found.canaries.canaries if c.id.startswith(("fact", "trigger"))]
        assert facts
        for canary in facts:
            (span,) = canary.expected_answer_contains
            assert span in text[canary.expected_documents[0]]
            assert span not in canary.query

    def test_trigger_follows_an_answered_question(self, rag, found):
        for canary in (c for c in found.canaries.canaries if c.id.startswith("trigger")):
            assert canary.query.startswith(canary.baseline_query)
            assert len(canary.query) > len(canary.baseline_query) + 3
            (plain,) = asked([Canary(id="b", query=canary.baseline_query, expected_refusal=False)], rag, rag.embedder)
            assert plain.status is CanaryStatus.PASS

    def test_no_document_has_two_canaries(self, found):
        ids = [i for c in found.canaries.canaries for i in c.expected_documents]
        assert len(set(ids)) == len(ids)

    def test_no_canary_fails_after_adding_similar_documents(self, tmp_path, found):
        more = filled(tmp_path / "more.db", [*towns(), *towns(each=2, start=12, seed=3)])
        results = asked(found.canaries.canaries, more, more.embedder)
        assert [r.canary for r in results if r.status is not CanaryStatus.PASS] == []

    def test_reads_only_documents_of_its_tenant(self, tmp_path):
        rag = filled(tmp_path / "t.db", towns(), "north")
        others = [dataclasses.replace(d, id=f"x{d.id}", source=f"x{d.id}") for d in towns(each=2, seed=9)]
        rag.index.add(others, rag.embedder.embed([d.content for d in others]), "south")
        found = suggested(rag, rag, count=8, tenant="north")
        assert not [i for c in found.canaries.canaries for i in c.expected_documents if i.startswith("x")]


class TestDropped:
    def test_drops_unanswered_drafts_with_the_reason(self, rag):
        found = suggested(rag, Refusing(), count=24)
        assert set(kinds(found)) <= {"refusal", "injection"}
        assert any("missing_phrase" in d.reason for d in found.dropped if d.kind == "fact")
        assert all(d.region for d in found.dropped if d.kind in {"fact", "sentinel", "trigger"})

    def test_drops_refusal_drafts_that_are_answered(self, rag):
        class NeverRefusing(Target):
            async def ask(self, query):
                answer = await rag.ask(query)
                return partial_answer("It is 7 miles.") if answer.text == UNKNOWN else answer

        found = suggested(rag, NeverRefusing(), count=24)
        assert not {"refusal", "injection"} & set(kinds(found))
        assert {d.reason for d in found.dropped if d.kind == "refusal"} >= {"missing_refusal"}

    def test_equal_documents_are_an_error(self, tmp_path):
        equal_documents = [Document(f"d{i}", towns()[0].text, title=towns()[0].title) for i in range(30)]
        with pytest.raises(DataError, match="all 30 chunks are equal"):
            suggested(filled(tmp_path / "i.db", equal_documents), count=3)

    def test_unreachable_target_is_an_error(self, rag):
        with pytest.raises(DataError, match=r"answered none of \d+ drafts: OSError was raised"):
            suggested(rag, UnreachableTarget(), count=5)

    def test_tenant_without_documents_is_an_error(self, rag):
        with pytest.raises(DataError, match="tenant 'absent' has no documents"):
            suggested(rag, rag, tenant="absent")


class TestLimitedTargets:
    def test_no_document_expectations_for_a_target_that_reports_only_answers(self, rag):
        found = suggested(rag, AnswersOnly(rag), count=20)
        assert set(kinds(found)) == {"fact", "trigger", "refusal", "injection"}
        assert not any(c.expected_documents for c in found.canaries.canaries)

    def test_few_documents_form_one_region(self, tmp_path):
        found = suggested(filled(tmp_path / "i.db", towns(each=1)), count=2)
        assert found.method == "one region: too few chunks to cluster"
        assert len(found.canaries.canaries) == 2

    def test_uses_k_means_without_scikit_learn(self, rag, monkeypatch):
        def raise_missing_extra(*args):
            raise MissingExtra("the package 'sklearn' is absent")

        monkeypatch.setattr(clustering, "_hdbscan", raise_missing_extra)
        found = suggested(rag, rag, count=12)
        assert found.method.startswith("k-means")
        assert len(found.canaries.canaries) == 12

    def test_imports_no_heavy_package(self):
        code = "import sys, casemate.monitor.canaries.suggest; print({'torch', 'sklearn', 'scipy'} & set(sys.modules))"
        assert (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
        )


class TestCoverage:
    def test_regions_contain_all_chunks_and_list_their_canaries(self, found):
        covered = found.coverage
        assert sum(r.chunks for r in covered.regions) == len(towns())
        assert [r.chunks for r in covered.regions] == sorted((r.chunks for r in covered.regions), reverse=True)
        known = {c.id for c in found.canaries.canaries}
        assert all(set(r.canaries) <= known for r in covered.regions)
        assert 0 < covered.documents <= 1

    def test_names_a_region_by_distinctive_words(self, rag):
        corpus = RegionMap.of(rag.index, "default", 7)
        held = [d.content.lower() for d in corpus.documents]
        for region, name in enumerate(corpus.names):
            for word in name.split(", "):
                there = np.array([word[:4] in text for text in held])
                assert there[corpus.labels == region].mean() > there[corpus.labels != region].mean()
        assert any("theatre" in name for name in corpus.names)

    def test_lists_uncovered_regions(self, rag):
        found = suggested(rag, count=1)
        assert len(found.coverage.uncovered) == len(found.coverage.regions) - sum(
            bool(r.canaries) for r in found.coverage.regions
        )
        assert found.coverage.uncovered
        for region in found.coverage.uncovered:
            assert f"# Not covered: {region.name} ({region.chunks} chunks)" in found.text

    def test_traffic_coverage_counts_questions_near_a_canary(self, rag, found):
        corpus = RegionMap.of(rag.index, "default", 7)
        queries = {c.id: c.query for c in found.canaries.canaries if c.expected_documents}
        unrelated = [f"zebra quasar {i}" for i in range(20)]
        same = measure_coverage(corpus, rag.index, rag.embedder, queries, k=5, questions=list(queries.values()))
        mixed = measure_coverage(
            corpus, rag.index, rag.embedder, queries, k=5, questions=[*queries.values(), *unrelated]
        )
        assert same.traffic.value == 1.0
        # expected: a question counts if its similarity to a canary is at least that of the fifth document
        Q, C = rag.embedder.embed([*queries.values(), *unrelated]), rag.embedder.embed(list(queries.values()))
        fifth = [
            sorted((float(s) for s in rag.embedder.embed([d.content for d in towns()]) @ c), reverse=True)[4] for c in C
        ]
        near = sum(any(float(q @ c) >= f - 1e-6 for c, f in zip(C, fifth, strict=True)) for q in Q)
        assert mixed.traffic.value == pytest.approx(near / len(Q))
        assert measure_coverage(corpus, rag.index, rag.embedder, queries, k=5).traffic is None

    def test_coverage_without_canaries_is_zero(self, rag):
        none = measure_coverage(
            RegionMap.of(rag.index, "default", 7), rag.index, rag.embedder, {}, k=5, questions=["why"]
        )
        assert (none.documents, none.traffic.value, len(none.uncovered)) == (0.0, 0.0, len(none.regions))

    def test_samples_a_large_corpus(self, rag, monkeypatch):
        monkeypatch.setattr("casemate.monitor.canaries.coverage.MAX_CHUNKS", 40)
        corpus = RegionMap.of(rag.index, "default", 7)
        assert len(corpus.documents) == len(corpus.E) == 40
        E = rag.embedder.embed([d.content for d in corpus.documents])
        assert np.allclose(E, corpus.E, atol=1e-6)


phrase = st.text(min_size=1, max_size=40).filter(
    lambda s: s.strip() == s and any(c.isascii() and c.isalnum() for c in s)
)


class TestFile:
    def test_round_trip(self, found):
        assert parse_canaries(found.text) == found.canaries
        assert parse_canaries(found.text, k=5).name == "canaries"

    def test_contains_a_warning_about_corpus_text(self, found):
        assert "contains text of your documents" in found.text.splitlines()[0]
        assert f"# {found.notes['sentinel-01']}" in found.text.splitlines()

    @given(query=phrase, span=phrase, document=phrase, name=phrase)
    def test_round_trip_of_any_text(self, query, span, document, name):
        try:
            canary = Canary(
                id="fact-01",
                query=query,
                expected_answer_contains=(span,),
                expected_documents=(document,),
                min_cosine=0.123,
            )
        except ValidationError:  # the phrase has no words
            assume(False)
        region = CorpusRegion("a, b", 3, ())
        text = CanarySuggestion(
            CanarySet(name, (canary,)), {"fact-01": "region: a, b"}, Coverage((region,), 0.0), (), "k-means"
        ).text
        assert parse_canaries(text) == CanarySet(name, (canary,))

    def test_round_trip_of_documents_that_look_like_yaml(self, tmp_path):
        pages = [dataclasses.replace(d, title=f"# {d.title}: [x]\n- y: *z", id=f"{d.id}: #1") for d in towns()]
        found = suggested(filled(tmp_path / "i.db", pages), count=6)
        assert parse_canaries(found.text) == found.canaries

    def test_logs_nothing(self, rag, caplog):
        with caplog.at_level(logging.DEBUG):
            suggested(rag, rag, count=6)
        assert not [r for r in caplog.records if r.name.startswith("casemate")]


@pytest.mark.slow
def test_no_canary_fails_after_adding_real_pages_of_the_same_articles(data, tmp_path):
    with gzip.open(data / "squad/corpus.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    order = np.random.default_rng(1).permutation(len(rows))[:660]
    pages = [Document(rows[i]["_id"], rows[i]["text"], title=rows[i]["title"]) for i in order]
    embedder, index = MiniLM(), SqliteIndex(tmp_path / "i.db")
    E = embedder.embed([d.content for d in pages])
    rag = Rag(embedder, index, ExtractiveGenerator())
    index.add(pages[:600], E[:600])
    found = suggested(rag, rag, count=30).canaries.canaries
    assert len(found) == 30
    wanted = {i for c in found for i in c.expected_documents}
    index.remove([d.source for d in pages[:600] if d.id not in wanted][:60])
    index.add(pages[600:], E[600:])
    results = asked(found, rag, embedder)
    assert [(r.canary, r.deviations) for r in results if r.status is not CanaryStatus.PASS] == []


class TestDrafts:
    def drafter(self, **fields):
        return drafts.CanaryDrafter(ReferenceCorpus([d.content for d in towns()]), np.random.default_rng(1), **fields)

    @pytest.mark.parametrize("kind", [drafts.SENTINEL, drafts.FACT, drafts.TRIGGER])
    def test_questions_spell_names_like_the_document(self, kind):
        text = (
            "Priya Natarajan repairs each old wooden ferry of the harbor before spring. "
            "Priya Natarajan leads the harbor office of the lower town since 1998."
        )
        suggested = [d.fields for d in self.drafter().about(kind, Document("d", text), 0)]
        asked = " ".join(fields[name] for fields in suggested for name in ("query", "baseline_query") if name in fields)
        assert "Priya Natarajan" in asked and "priya" not in asked

    @pytest.mark.parametrize("kind", [drafts.SENTINEL, drafts.FACT, drafts.TRIGGER])
    def test_questions_contain_no_parts_of_addresses_and_tags(self, kind):
        text = (
            "The [old ferry](https://a.example/quayside-forms/zander.html) is repaired before spring<br>by the harbor. "
            "<span class='xylograph'>Priya Natarajan</span> leads the harbor office of the lower town since 1998."
        )
        suggested = [d.fields for d in self.drafter().about(kind, Document("d", text), 0)]
        assert suggested and "harbor" in str(suggested)
        assert not [word for word in ("quayside", "zander", "xylograph", "span") if word in str(suggested)]

    def test_fact_with_several_answers_or_in_another_source_is_ambiguous(self):
        page = Document("ferry", "The old ferry of Corwick was sold in 1901.", title="Ferries")
        fact = questions.FactQuestion("In which year was the old ferry of Corwick sold?", "1901", "year")
        again = Document("ferry2", "In 1904, the ferry of Corwick was sold again, and it was old.", source="ferry")
        elsewhere = Document("almanac", "The old ferry of Corwick was sold, says the almanac, in 1903.")
        unrelated = Document("mine", "The old mine of Fenton was closed in 1903.")
        rest = [Document(f"d{i}", "A page about weaving and thread, wool and dye.") for i in range(9)]

        def ambiguity(*others):
            pages = [page, *others, *rest]
            return Ambiguity(pages, ReferenceCorpus([d.content for d in pages])).of_fact(fact, page.source)

        assert ambiguity() == ambiguity(unrelated) == ""
        assert ambiguity(again) == "its source states several answers"
        assert ambiguity(elsewhere) == "another source may also answer the question"

    def test_topic_of_two_sources_is_ambiguous(self):
        pages = [Document("a", "The brass anchor of the pier."), Document("b", "A pier has a brass anchor, and nets.")]
        found = Ambiguity(pages, ReferenceCorpus())
        assert found.of_topic("What is known about the brass anchor?", "a") == "another source has the same words"
        assert found.of_topic("What is known about the nets?", "b") == ""

    def test_invented_names_do_not_occur_in_the_corpus(self):
        drafter = self.drafter()
        text = " ".join(d.content.lower() for d in towns())
        assert not [n for n in (drafter.invent_name() for _ in range(50)) if n.lower() in text.split()]

    def test_unanswerable_questions_differ(self):
        queries = [d.query for d, _ in zip(self.drafter().unanswerable("refusal"), range(20), strict=False)]
        assert len(set(queries)) == 20

    def test_triggers_are_of_three_kinds(self):
        drafter = self.drafter(entities=["Elvin"])
        page = town("mines", 3)
        suggested = [d.fields for _ in range(4) for d in drafter.about("trigger", page, 0)]
        tails = [f["query"].removeprefix(f["baseline_query"]).strip() for f in suggested]
        assert "Elvin" in tails
        assert any(t in drafts.INJECTED_INSTRUCTIONS for t in tails)
        assert any(t.islower() for t in tails)
        assert all(
            f.get("min_overlap") == (0.0 if t == "Elvin" else None) for f, t in zip(suggested, tails, strict=True)
        )

    def test_document_without_words_gives_no_draft(self):
        for kind in ("sentinel", "fact", "trigger"):
            assert list(self.drafter().about(kind, Document("d", "1 2 3."), 0)) == []

    @given(st.integers(1, 200), st.dictionaries(st.sampled_from("abcde"), st.floats(0.05, 1), min_size=1))
    def test_allocation_sums_to_the_count(self, count, shares):
        counts = allocate(count, shares)
        assert sum(counts.values()) == count
        assert all(abs(counts[k] - count * s / sum(shares.values())) < 1 for k, s in shares.items())
