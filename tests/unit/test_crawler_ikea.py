import asyncio
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import registry
from casemate.attacks.ikea import FRAMES, IKEA, _Past
from casemate.crawl.anchors import GENERAL, Stems
from casemate.errors import CapabilityError, ConfigError
from casemate.types import UNKNOWN
from casemate.words import abstains
from tests.fakes import WORDS, BagOfWords
from tests.unit.crawl_world import NOTES, Placed, Scripted, World, Writer, crawl

COMMANDS = re.compile(r"\b(?:repeat|copy|print|context|documents?|verbatim|ignore)\b", re.IGNORECASE)


def ikea(**options):
    return IKEA(**{"embedder": Stems(), "near_anchor": 0.5, **options})


class TestACrawl:
    def test_reaches_much_of_a_small_collection_by_harmless_questions(self):
        world = World(budget=120)
        crawl(ikea(), world)
        assert len(world.reached) >= 0.5 * len(NOTES)
        for question in world.asked:
            assert question.endswith("?")
            assert not COMMANDS.search(question)

    def test_gives_out_answers_each_once_and_no_abstention(self):
        found = crawl(ikea(), World(budget=80))
        assert len(found) > 10 and len(set(found)) == len(found)
        assert not [text for text in found if abstains(text)]

    def test_asks_no_question_twice(self):
        world = World(budget=120)
        crawl(ikea(), world)
        assert len(set(world.asked)) == len(world.asked)

    def test_asks_the_same_after_the_same_replies(self):
        def asked(seed):
            attack, runs = ikea(), [World(budget=25), World(budget=25)]
            crawl(attack, runs[0], seed)
            crawl(attack, runs[1], seed)
            assert runs[0].asked == runs[1].asked
            return runs[0].asked

        assert asked(1) != asked(2)

    def test_ends_when_no_anchor_is_left(self):
        world = World(budget=10_000, mute=True)
        assert crawl(ikea(), world) == []
        assert len(world.asked) == len(GENERAL)

    def test_asks_about_what_it_was_told(self):
        box = Scripted(["Otters build lodges beside willow groves.", UNKNOWN], budget=200)
        crawl(ikea(), box)
        assert any("lodges" in question for question in box.asked)


class TestAnchors:
    @given(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=2).map(" ".join), max_size=10))
    def test_stand_apart_and_what_does_not_is_spared(self, words):
        embedder = BagOfWords()
        past = _Past(ikea(apart=0.6), embedder)
        past.admit(words)
        past.admit(words[::-1])
        V = past.anchors.vectors
        assert (V @ V.T - np.eye(len(V))).max(initial=0) < 0.6
        assert set(past.anchors.texts) | set(past._spare.texts) == set(words)

    def test_may_stand_nearer_when_all_are_used(self):
        past = _Past(ikea(apart=0.5), Placed({"amber": (1, 0), "birch": (0.8, 0.6)}))
        past.admit(["amber", "birch"])
        assert past.anchors.texts == ["amber"]
        past.used.add("amber")
        assert past.draw(np.random.default_rng(0)) == "birch"
        past.used.add("birch")
        assert past.draw(np.random.default_rng(0)) is None

    def test_are_on_the_topic(self):
        near = {"birds": (1, 0), "heron": (0.4, 0.9), "ledger": (0.2, 0.98)}
        past = _Past(IKEA(topic="birds", apart=1.0), Placed(near))
        past.admit(["heron", "ledger"])
        assert past.anchors.texts == ["heron"]


class TestExperience:
    @given(st.lists(st.tuples(st.sampled_from(["refused", "unrelated", "good"]), st.sampled_from(WORDS)), max_size=12))
    def test_weighs_words_by_the_penalties_of_all_that_was_asked_near_them(self, history):
        embedder, attack = BagOfWords(), ikea(apart=2.0 / 2, refused=3.0, unrelated=2.0)
        past = _Past(attack, embedder)
        past.admit(WORDS[:8])
        for i, (what, word) in enumerate(history):
            question = embedder.embed([word])[0]
            past.note(f"{word} {i}", question, {"refused": "", "unrelated": "xylo phone", "good": word}[what])
            if i == 5:
                past.admit(WORDS[8:])  # those that come later know of it too

        penalty = {"refused": 3.0, "unrelated": 2.0, "good": 0.0}
        for word, against in zip(past.anchors.texts, past._against, strict=True):
            near = [what for what, asked in history if embedder.embed([word])[0] @ embedder.embed([asked])[0] > 0.7]
            assert against == pytest.approx(math.fsum(penalty[what] for what in near))

    def test_draws_in_proportion_to_it(self):
        past = _Past(ikea(), BagOfWords())
        past.admit(["amber", "birch", "cedar"])
        past._against = [0.0, 1.0, 10.0]
        rng = np.random.default_rng(1)
        draws = [past.draw(rng) for _ in range(3000)]
        assert draws.count("birch") / draws.count("amber") == pytest.approx(math.exp(-1), abs=0.05)
        assert draws.count("cedar") <= 3


class TestMutation:
    PLACES = {
        "heron": (1, 0, 0),
        "Herons eat frogs": (0.8, 0.6, 0),
        "frogs": (0.5, 0.85, 0),
        "reeds": (0, 0.9, 0.44),
        "ledger": (0, 0.1, 1),
    }

    def mutated(self, words, cosine_of_region=None, **options):
        attack = IKEA(writer=Writer({"terms": "\n".join(words)}), embedder=Placed(self.PLACES), **options)
        past = _Past(attack, attack.embedder)
        (question,) = attack.embedder.embed(["heron"])
        region = past.note("heron", question, "Herons eat frogs and reeds.")
        asked = asyncio.run(attack._mutated(region, "Herons eat frogs and reeds.", past))
        return asked and asked[0]

    def test_takes_the_word_of_the_region_least_like_the_question(self):
        # the answer's cosine to the question is .8; to the words .91, .54 and .06
        assert "reeds" in self.mutated(["frogs", "reeds", "ledger"])
        assert "frogs" in self.mutated(["frogs", "ledger"])
        assert self.mutated(["ledger"]) is None
        assert "ledger" in self.mutated(["ledger"], trust=0.05)

    def test_ends_when_the_question_was_nearly_asked(self):
        assert "frogs" in self.mutated(["frogs"], same=0.6)
        assert self.mutated(["frogs"], same=0.4) is None

    def test_ends_after_a_refusal_an_unrelated_or_a_known_answer(self):
        past = _Past(IKEA(), Placed(self.PLACES))
        heron, frogs = past.questions.embed(["heron", "frogs"])
        assert past.note("a", heron, "") is None
        assert past.note("b", heron, "ledger") is None
        question, answer, radius = past.note("c", frogs, "reeds")
        assert np.array_equal(question, frogs)
        assert radius == pytest.approx(0.5 * float(frogs @ answer))
        assert past.note("d", frogs, "reeds") is None


class TestQuestions:
    def test_are_the_most_like_their_anchor_of_all_frames(self):
        places = {frame.format("heron"): (0.5 + i / 10, 0.5) for i, frame in enumerate(FRAMES)} | {"heron": (1, 0)}
        attack = IKEA(embedder=Placed(places))
        asked = asyncio.run(attack._question("heron", _Past(attack, attack.embedder)))
        assert asked[0] == FRAMES[-1].format("heron")

    def test_are_not_asked_if_none_is_near_its_anchor(self):
        attack = IKEA(embedder=Placed({"heron": (1, 0), "heron?": (0, 1), "heron to me?": (0, 1)}))
        assert asyncio.run(attack._question("heron", _Past(attack, attack.embedder))) is None

    def test_are_the_writers_where_there_is_one(self):
        writer = Writer({"concepts": "herons\nwillows", "natural questions": "1. Where do herons nest?\n2. Herons."})
        box = Scripted([UNKNOWN])
        crawl(IKEA(topic="birds", near_topic=-1, near_anchor=0.1, writer=writer, embedder=Stems()), box)
        assert box.asked == ["Where do herons nest?"]  # of both anchors; about willows it is too far off


def test_without_an_embedder_it_says_so():
    with pytest.raises(CapabilityError, match="ikea"):
        crawl(IKEA(), World())


@pytest.mark.parametrize(
    "options",
    [{"near_topic": 1.1}, {"apart": 0}, {"near_anchor": -2}, {"refused": -1}, {"unrelated": math.inf}, {"nearness": 2},
     {"related": -1.5}, {"trust": 1.5}, {"same": 0}, {"concepts": 0}],
)  # fmt: skip
def test_refuses_options_out_of_range(options):
    with pytest.raises(ConfigError, match=f"ikea.*{next(iter(options))}"):
        IKEA(**options)


def test_is_found_by_its_name():
    assert registry.load("crawler", "ikea") is IKEA
    assert {"writer", "embedder"} <= set(registry.wants(IKEA))
