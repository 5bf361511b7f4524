import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.redteam.attacks.rag_crawler import (
    EXPLORE_TEMPLATES,
    GRAPH_ONLY_AFTER,
    PAIR_TEMPLATE,
    RELATION_TEMPLATES,
    RAGCrawler,
    _rule_questions,
    _Scheduler,
)
from casemate.redteam.crawling.anchors import HashingEmbedder
from casemate.redteam.crawling.common_words import GENERAL_WORDS
from casemate.redteam.crawling.knowledge_graph import OTHER, RELATIONS, KnowledgeGraph, Triple
from casemate.types import UNKNOWN
from tests.fakes import BagOfWords
from tests.unit.crawls import Scripted, Writer, crawl, world

CHAIN = [Triple("ferry", "part", "keel"), Triple("ferry", "use", "sheep"), Triple("storm", "cause", "floods")]


def scheduler(recorded=CHAIN, embedder=None, **options):
    graph = KnowledgeGraph(embedder or BagOfWords(), [*RELATIONS, OTHER], 0.99)
    graph.add(recorded)
    made = _Scheduler(RAGCrawler(**options), graph)
    made._grow()
    return made


class TestCrawl:
    @pytest.mark.parametrize("embedder", [None, BagOfWords()])
    def test_asks_no_question_similar_to_an_earlier_one(self, embedder):
        system = world(budget=60)
        crawl(RAGCrawler(embedder=embedder, question_similarity=0.7), system)
        E = (embedder or HashingEmbedder()).embed(system.questions)
        assert (E @ E.T - np.eye(len(E))).max() < 0.7 + 1e-5

    def test_starts_with_the_topic(self):
        system = world(budget=2, mute=True)
        crawl(RAGCrawler(topic="thyroid tests and migraine", top_entities=1), system)
        assert "thyroid tests" in system.questions[0] and "migraine" in system.questions[1]

    def test_uses_graph_entities_only_after_the_first_answers(self):
        replies = [f"The otter{i} builds lodge{i} beside willow{i}." for i in range(30)]
        box = Scripted(replies, budget=30)
        crawl(RAGCrawler(), box)
        recorded = [question for question in box.questions if re.search(r"(?:otter|lodge|willow)\d", question)]
        assert len(recorded) >= len(box.questions) - GRAPH_ONLY_AFTER

    def test_ends_if_every_reply_is_a_refusal(self):
        system = world(budget=10_000, mute=True)
        assert crawl(RAGCrawler(), system) == []
        assert all(
            sum(re.search(rf"\b{word}\b", q) is not None for q in system.questions) >= 1 for word in GENERAL_WORDS
        )
        assert len(system.questions) <= 6 * len(GENERAL_WORDS)

    def test_repeated_answer_has_no_gain(self):
        box = Scripted(["The ferry of Crale sank in a storm."], budget=10_000)
        assert crawl(RAGCrawler(), box) == box.replies
        assert len(box.questions) < 10_000


class TestScores:
    @given(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 9)), max_size=12),
        st.integers(1, 4),
    )
    def test_equal_the_documented_formula(self, rounds, window):
        embedder = BagOfWords()
        made = scheduler(
            embedder=embedder, window=window, exploration=0.7, deficit_weight=0.4, novelty=1.5, salience=0.2
        )
        gains = [[] for _ in range(5)]
        for t, (entity, entities, edges) in enumerate(rounds):
            made.record_gain(entity, entities, edges)
            recent = rounds[max(0, t + 1 - window) : t + 1]
            most = max(1, *(r[1] for r in recent)), max(1, *(r[2] for r in recent))
            gains[entity].append(entities / most[0] + edges / most[1])

        names, N = made.graph.entities.texts, len(rounds)
        degree, deficits = made.graph.degree, made.graph.deficits()
        asked = [embedder.embed([names[e]])[0] for e in {r[0] for r in rounds}]
        for e, score in enumerate(made._scores()):
            n = len(gains[e])
            plan = sum(gains[e]) / max(n, 1) + 0.7 * math.sqrt(math.log(max(N, 1)) / (n + 1))
            lack = 1 - degree[e] / (max(degree) + 1e-6) + max(deficits[e])
            near = max((float(embedder.embed([names[e]])[0] @ row) for row in asked), default=-1)
            added = 1.5 * (1 - near) + 0.2 * math.log(1 + degree[e])
            assert score == pytest.approx(N / (N + window) * plan + 0.4 * lack + added, abs=1e-4)

    def test_determine_the_sampling_of_top_entities(self):
        made = scheduler(top_entities=2)
        scores = np.array([1.0, 2.0, 0.5, 3.0, 2.5])
        made._scores = scores.copy
        rng = np.random.default_rng(0)
        draws = [made.sample_entity(rng) for _ in range(2000)]
        assert set(draws) == {3, 4}
        assert draws.count(3) / draws.count(4) == pytest.approx(math.exp(0.5), abs=0.2)
        made.set_aside(3)
        assert {made.sample_entity(rng) for _ in range(100)} == {1, 4}
        for entity in (0, 1, 2, 4):
            made.set_aside(entity)
        assert made.sample_entity(rng) is None and not made.has_entities

    def test_are_extended_when_the_graph_grows(self):
        made = scheduler()
        made.record_gain(0, 3, 3)
        made.graph.add([Triple(f"pier{i}", "part", f"post{i}") for i in range(100)])
        assert made.sample_entity(np.random.default_rng(0)) is not None
        assert len(made._scores()) == 205


class TestQuestions:
    def made(self, entity, missing=""):
        return list(_rule_questions(entity, missing, scheduler().graph, np.random.default_rng(0)))

    def test_ask_for_the_relation_with_a_large_deficit(self):
        made = scheduler([Triple(f"Pier{i}", "use", f"Rope{i}") for i in range(9)] + [Triple("Post", "part", "Nail")])
        made.sample_entity(np.random.default_rng(0))
        missing = {name: made.missing(i) for i, name in enumerate(made.graph.entities.texts)}
        assert missing.pop("Post") == missing.pop("Nail") == "use"  # all others lack "part", which only two have
        assert set(missing.values()) == {""}

    def test_are_ordered_as_relation_open_question_and_neighbors(self):
        first, second, *rest = self.made(0, "cause")
        assert first == RELATION_TEMPLATES["cause"].format("ferry")
        assert second in [form.format("ferry") for form in EXPLORE_TEMPLATES]
        assert sorted(rest) == [PAIR_TEMPLATE.format("ferry", "keel"), PAIR_TEMPLATE.format("ferry", "sheep")]
        assert self.made(0)[0] in [form.format("ferry") for form in EXPLORE_TEMPLATES]

    def test_every_relation_but_the_last_has_a_template(self):
        assert set(RELATION_TEMPLATES) == set(RELATIONS)


class TestWriter:
    def run(self, rules, replies, budget=3, **options):
        box = Scripted(replies, budget=budget)
        writer = Writer(rules)
        crawl(RAGCrawler(topic="ferries", writer=writer, **options), box)
        return box, [p.question for p in writer.prompts], writer

    def test_writer_names_relations_extracts_triples_twice_and_generates_questions(self):
        facts = "ferry | sank in | storm\nno fact at all\n| x | y\n" + "long " * 30 + "| x | y"
        rules = {
            "Name up to": "sinks in\nbelongs to",
            "are known": "captain | belongs to | ferry",
            "Write down every fact": facts,
            "question about ferries": "Which ferries are there?",
            "question about": "Who knows more?",
        }
        box, recorded, writer = self.run(rules, ["The ferry sank.", UNKNOWN])
        assert box.questions[0] == "Which ferries are there?" and "Who knows more?" in box.questions
        assert "sinks in, belongs to, other" in recorded[2]
        assert "no fact at all" in recorded[3] and writer.prompts[3].context[0].text == "The ferry sank."
        names = set(re.findall(r"question about ([^\n]*?) that asks", "\n".join(recorded)))
        assert {"ferries", "captain"} & names and not names & {"x", "y", "no fact at all"}

    def test_an_entity_without_a_question_is_excluded(self):
        box, recorded, _ = self.run({}, [UNKNOWN], budget=50)
        assert box.questions == []
