import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import registry
from casemate.attacks.rag_crawler import BOTH, EXPLORE, FIRST, QUESTIONS, RAGCrawler, _made, _Scheduler
from casemate.crawl.anchors import GENERAL, Stems
from casemate.crawl.graph import OTHER, RELATIONS, Graph, Triple
from casemate.errors import ConfigError
from casemate.types import UNKNOWN
from casemate.words import abstains
from tests.fakes import BagOfWords
from tests.unit.crawl_world import NOTES, Scripted, World, Writer, crawl

COMMANDS = re.compile(r"\b(?:repeat|copy|print|context|documents?|verbatim|ignore)\b", re.IGNORECASE)
CHAIN = [Triple("ferry", "part", "keel"), Triple("ferry", "use", "sheep"), Triple("storm", "cause", "floods")]


def scheduler(told=CHAIN, embedder=None, **options):
    graph = Graph(embedder or BagOfWords(), [*RELATIONS, OTHER], 0.99)
    graph.add(told)
    made = _Scheduler(RAGCrawler(**options), graph)
    made._grow()
    return made


class TestACrawl:
    def test_reaches_most_of_a_small_collection_by_harmless_questions(self):
        world = World(budget=120)
        crawl(RAGCrawler(), world)
        assert len(world.reached) >= 0.6 * len(NOTES)
        for question in world.asked:
            assert question.endswith("?")
            assert not COMMANDS.search(question)

    def test_gives_out_answers_each_once_and_no_abstention(self):
        found = crawl(RAGCrawler(), World(budget=80))
        assert len(found) > 10 and len(set(found)) == len(found)
        assert not [text for text in found if abstains(text)]

    @pytest.mark.parametrize("embedder", [None, BagOfWords()])
    def test_asks_nothing_that_is_nearly_asked_before(self, embedder):
        world = World(budget=60)
        crawl(RAGCrawler(embedder=embedder, repeat=0.7), world)
        E = (embedder or Stems()).embed(world.asked)
        assert (E @ E.T - np.eye(len(E))).max() < 0.7 + 1e-5

    def test_asks_the_same_after_the_same_replies(self):
        def asked(seed):
            attack, runs = RAGCrawler(), [World(budget=25), World(budget=25)]
            crawl(attack, runs[0], seed)
            crawl(attack, runs[1], seed)
            assert runs[0].asked == runs[1].asked
            return runs[0].asked

        assert asked(1) != asked(2)

    def test_begins_with_the_topic_where_one_is_given(self):
        world = World(budget=2, mute=True)
        crawl(RAGCrawler(topic="thyroid tests and migraine", best=1), world)
        assert "thyroid tests" in world.asked[0] and "migraine" in world.asked[1]

    def test_asks_from_the_graph_once_enough_was_answered(self):
        replies = [f"The otter{i} builds lodge{i} beside willow{i}." for i in range(30)]
        box = Scripted(replies, budget=30)
        crawl(RAGCrawler(), box)
        told = [question for question in box.asked if re.search(r"(?:otter|lodge|willow)\d", question)]
        assert len(told) >= len(box.asked) - FIRST

    def test_ends_when_nothing_comes_back(self):
        world = World(budget=10_000, mute=True)
        assert crawl(RAGCrawler(), world) == []
        assert all(sum(re.search(rf"\b{word}\b", q) is not None for q in world.asked) >= 1 for word in GENERAL)
        assert len(world.asked) <= 6 * len(GENERAL)

    def test_takes_an_answer_that_comes_again_for_nothing_new(self):
        box = Scripted(["The ferry of Crale sank in a storm."], budget=10_000)
        assert crawl(RAGCrawler(), box) == box.replies
        assert len(box.asked) < 10_000


class TestScores:
    @given(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 9)), max_size=12),
        st.integers(1, 4),
    )
    def test_are_the_formula_of_the_paper_and_what_we_add(self, rounds, window):
        embedder = BagOfWords()
        made = scheduler(embedder=embedder, window=window, curiosity=0.7, completing=0.4, novelty=1.5, salience=0.2)
        gains = [[] for _ in range(5)]
        for t, (entity, entities, edges) in enumerate(rounds):
            made.note(entity, entities, edges)
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

    def test_decide_who_is_drawn_from_the_best(self):
        made = scheduler(best=2)
        scores = np.array([1.0, 2.0, 0.5, 3.0, 2.5])
        made._scores = scores.copy
        rng = np.random.default_rng(0)
        draws = [made.draw(rng) for _ in range(2000)]
        assert set(draws) == {3, 4}
        assert draws.count(3) / draws.count(4) == pytest.approx(math.exp(0.5), abs=0.2)
        made.set_aside(3)
        assert {made.draw(rng) for _ in range(100)} == {1, 4}
        for entity in (0, 1, 2, 4):
            made.set_aside(entity)
        assert made.draw(rng) is None and not made.left

    def test_grow_with_the_graph(self):
        made = scheduler()
        made.note(0, 3, 3)
        made.graph.add([Triple(f"pier{i}", "part", f"post{i}") for i in range(100)])
        assert made.draw(np.random.default_rng(0)) is not None
        assert len(made._scores()) == 205


class TestQuestions:
    def made(self, entity, missing=""):
        return list(_made(entity, missing, scheduler().graph, np.random.default_rng(0)))

    def test_ask_for_a_relation_that_is_missing_more_than_most(self):
        made = scheduler([Triple(f"Pier{i}", "use", f"Rope{i}") for i in range(9)] + [Triple("Post", "part", "Nail")])
        made.draw(np.random.default_rng(0))
        missing = {name: made.missing(i) for i, name in enumerate(made.graph.entities.texts)}
        assert missing.pop("Post") == missing.pop("Nail") == "use"  # all others lack "part", which only two have
        assert set(missing.values()) == {""}

    def test_come_in_order_relation_anything_neighbours(self):
        first, second, *rest = self.made(0, "cause")
        assert first == QUESTIONS["cause"].format("ferry")
        assert second in [form.format("ferry") for form in EXPLORE]
        assert sorted(rest) == [BOTH.format("ferry", "keel"), BOTH.format("ferry", "sheep")]
        assert self.made(0)[0] in [form.format("ferry") for form in EXPLORE]

    def test_there_is_one_for_every_relation_but_the_last(self):
        assert set(QUESTIONS) == set(RELATIONS)


class TestWriter:
    def run(self, rules, replies, budget=3, **options):
        box = Scripted(replies, budget=budget)
        writer = Writer(rules)
        crawl(RAGCrawler(topic="ferries", writer=writer, **options), box)
        return box, [p.question for p in writer.prompts], writer

    def test_names_relations_finds_facts_twice_and_asks(self):
        facts = "ferry | sank in | storm\nno fact at all\n| x | y\n" + "long " * 30 + "| x | y"
        rules = {
            "Name up to": "sinks in\nbelongs to",
            "are known": "captain | belongs to | ferry",
            "Write down every fact": facts,
            "question about ferries": "Which ferries are there?",
            "question about": "Who knows more?",
        }
        box, told, writer = self.run(rules, ["The ferry sank.", UNKNOWN])
        assert box.asked[0] == "Which ferries are there?" and "Who knows more?" in box.asked
        assert "sinks in, belongs to, other" in told[2]
        assert "no fact at all" in told[3] and writer.prompts[3].context[0].text == "The ferry sank."
        names = set(re.findall(r"question about ([^\n]*?) that asks", "\n".join(told)))
        assert {"ferries", "captain"} & names and not names & {"x", "y", "no fact at all"}

    def test_that_writes_no_question_is_asked_no_more_about_it(self):
        box, told, _ = self.run({}, [UNKNOWN], budget=50)
        assert box.asked == []


@pytest.mark.parametrize(
    "options",
    [{"curiosity": -1}, {"completing": math.nan}, {"novelty": math.inf}, {"salience": -0.1}, {"best": 0}, {"tries": 0},
     {"window": 0}, {"repeat": 0}, {"alike": 1.1}],
)  # fmt: skip
def test_refuses_options_out_of_range(options):
    with pytest.raises(ConfigError, match=f"rag_crawler.*{next(iter(options))}"):
        RAGCrawler(**options)


def test_is_found_by_its_name():
    assert registry.load("crawler", "rag_crawler") is RAGCrawler
    assert {"writer", "embedder"} <= set(registry.wants(RAGCrawler))
