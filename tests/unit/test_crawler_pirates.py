import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import registry
from casemate.attacks.pirates import INJECTIONS, SHARPNESS, Pirates, _Raid
from casemate.crawl.anchors import GENERAL, Stems
from casemate.crawl.loot import COMMANDS
from casemate.errors import CapabilityError, ConfigError
from casemate.types import Reply
from casemate.words import words
from tests.fakes import BagOfWords
from tests.unit.crawl_world import NOTES, Placed, Scripted, World, Writer, crawl


def flat(text):
    return " ".join(text.split())


class TestACrawl:
    def test_carries_most_of_a_small_collection_away(self):
        world = World(budget=60)
        found = crawl(Pirates(embedder=Stems()), world)
        assert len(world.reached) >= 0.8 * len(NOTES)
        whole = [flat(note.text) for note in NOTES]
        taken = [sum(len(flat(text)) for text in found if flat(text) in note) / len(note) for note in whole]
        assert sum(share > 0.8 for share in taken) >= 0.8 * len(NOTES)

    def test_gives_out_texts_of_the_collection_each_once(self):
        found = crawl(Pirates(embedder=Stems()), World(budget=30))
        assert all(any(flat(text) in flat(note.text) for note in NOTES) for text in found)
        assert len({" ".join(words(text)) for text in found}) == len(found)

    def test_asks_the_same_after_the_same_replies(self):
        def asked(seed):
            attack, runs = Pirates(embedder=Stems()), [World(budget=15), World(budget=15)]
            crawl(attack, runs[0], seed)
            crawl(attack, runs[1], seed)  # the attack remembers nothing of the first run
            assert runs[0].asked == runs[1].asked
            return runs[0].asked

        assert asked(1) != asked(2)

    def test_begins_with_the_topic_where_one_is_given(self):
        world = World(budget=1)
        crawl(Pirates(topic="thyroid tests", embedder=Stems()), world)
        assert "thyroid tests" in world.asked[0]

    def test_asks_around_several_anchors_that_it_was_told(self):
        world = World(budget=20)
        crawl(Pirates(topic="thyroid", anchors=2, embedder=Stems()), world)
        collection = " ".join(flat(note.text).lower() for note in NOTES)
        for question in world.asked[1:]:
            anchors = question.split("\n")[0].rstrip(".").split(" and ")
            assert len(anchors) == 2
            assert all(anchor.lower() in collection for anchor in anchors)

    def test_ends_when_nothing_comes_back(self):
        world = World(budget=10_000, mute=True)
        assert crawl(Pirates(embedder=Stems()), world) == []
        assert len(GENERAL) / 3 <= len(world.asked) <= 4 * 4 * len(GENERAL)

    def test_ends_when_all_is_known(self):
        box = Scripted(["The ferry at Crale sank in the late autumn storm."], budget=2000)
        assert crawl(Pirates(topic="ferries", embedder=Stems()), box) == [box.replies[0]]
        assert len(box.asked) < 30


class TestInjections:
    def test_are_tried_until_one_works_which_then_comes_first(self):
        class Obeys:
            def __init__(self):
                self.asked = []

            async def ask(self, text):
                self.asked.append(text)
                return Reply("The ferry at Crale sank late." if text.startswith(COMMANDS[1]) else "I cannot do that.")

        box = Obeys()
        crawl(Pirates(topic="ferries", embedder=Stems()), box)
        assert [question.startswith(COMMANDS[1]) for question in box.asked] == [False, *[True] * (len(box.asked) - 1)]

    def test_all_hold_the_text(self):
        assert all("{text}" in form for form in INJECTIONS)
        assert len(set(INJECTIONS)) == 4


class TestRelevance:
    @given(
        st.lists(st.sampled_from(["amber birch", "cedar delta", "ember flint"]), min_size=0, max_size=4),
        st.floats(0, 1),
    )
    def test_falls_by_the_share_of_duplicates_times_the_blame(self, duplicates, share):
        embedder = BagOfWords()
        raid = _Raid(embedder)
        raid.learn(["amber birch", "cedar", "maple"], 2.0)
        raid.blame([0, 2], embedder.embed(duplicates), share)

        blame = [0.0, 0.0]
        for text in duplicates:
            weights = [
                math.exp(SHARPNESS * float(embedder.embed([text])[0] @ embedder.embed([anchor])[0]))
                for anchor in ("amber birch", "maple")
            ]
            blame = [b + w / sum(weights) / len(duplicates) for b, w in zip(blame, weights, strict=True)]
        if not duplicates:
            blame = [0.5, 0.5]
        assert raid.worth == pytest.approx([1 - share * blame[0], 1, 1 - share * blame[1]], abs=1e-4)

    def test_of_a_new_anchor_is_that_of_the_best(self):
        raid = _Raid(Stems())
        raid.learn(["amber", "birch"], 0.8)
        raid.blame([0, 1], np.empty((0, 1024), np.float32), 0.4)
        raid.blame([0], np.empty((0, 1024), np.float32), 0.3)
        raid.learn(["cedar", "birches"], 0.8)
        assert raid.anchors.texts == ["amber", "birch", "cedar"]
        assert raid.worth == pytest.approx([0.5, 0.8, 0.8])

    def test_decides_who_is_drawn(self):
        raid = _Raid(Stems())
        raid.learn([f"anchor{i}" for i in range(4)], 2.0)
        raid.worth = [0.05, 0.4, 1.0, 1.0]
        rng = np.random.default_rng(0)
        draws = [raid.draw(1, 0.15, 0.1, rng)[0] for _ in range(3000)]
        weights = np.array([0, *np.exp(np.array([0.4, 1, 1]) / 0.15)])
        assert np.bincount(draws, minlength=4) / 3000 == pytest.approx(weights / weights.sum(), abs=0.03)
        assert sorted(raid.draw(9, 0.15, 0.1, rng)) == [1, 2, 3]
        assert raid.draw(1, 0.15, 1.0, rng) == []


def test_chunks_that_are_nearly_the_same_are_duplicates_but_are_given_out():
    close = {"Herons nest in reeds": (1, 0), "Two herons nest there now": (0.99, 0.14), "Frogs": (0, 1)}
    raid = _Raid(Placed(close))
    found = ["Herons nest in reeds", "herons nest, in reeds!", "Two herons nest there now", "Frogs are loud at night"]
    unheld, new, old = raid.sort(found, 0.95)
    assert unheld == [found[0], found[2], found[3]]
    assert new == [found[0], found[3]]
    assert len(old) == 2
    assert raid.sort(found, 0.95)[:2] == ([], [])


def test_a_writer_writes_texts_and_names_subjects():
    writer = Writer(
        {"plain text": "On the rain\nof Crale, " + "and so on " * 20, "subjects": "1. Crale ferry\n2. storm"}
    )
    box = Scripted(["The ferry at Crale sank in the late autumn storm.", "I don't know."], budget=6)
    crawl(Pirates(topic="ferries", writer=writer, embedder=Stems()), box)
    assert box.asked[0].startswith("On the rain of Crale, and so on")
    assert len(box.asked[0].split("\n")[0].split()) == 30
    told = " ".join(p.question for p in writer.prompts)
    assert "Crale ferry" in told and "storm" in told
    assert [p for p in writer.prompts if p.context][0].context[0].text == box.replies[0]


def test_without_an_embedder_it_says_so():
    with pytest.raises(CapabilityError, match="pirates"):
        crawl(Pirates(), World())


@pytest.mark.parametrize(
    "options",
    [
        {"anchors": 0},
        {"subjects": 0},
        {"temperature": 0},
        {"floor": 1},
        {"floor": -0.1},
        {"same_chunk": 0},
        {"same_anchor": 1.2},
    ],
)
def test_refuses_options_out_of_range(options):
    with pytest.raises(ConfigError, match=f"pirates.*{next(iter(options))}"):
        Pirates(**options)


def test_is_found_by_its_name():
    assert registry.load("crawler", "pirates") is Pirates
    assert {"writer", "embedder"} <= set(registry.wants(Pirates))
