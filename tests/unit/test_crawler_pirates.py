import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.redteam.attacks.pirates import INJECTIONS, SHARPNESS, Pirates, _State
from casemate.redteam.crawling.anchors import HashingEmbedder
from casemate.redteam.crawling.common_words import GENERAL_WORDS
from casemate.redteam.crawling.extracted_texts import COMMANDS
from casemate.text.tokens import words
from casemate.types import Reply
from tests.fakes import BagOfWords
from tests.unit.crawls import PARAGRAPHS, Placed, Scripted, Writer, crawl, world


def flat(text):
    return " ".join(text.split())


class TestCrawl:
    def test_recovers_most_of_a_small_collection(self):
        system = world(budget=60)
        found = crawl(Pirates(embedder=HashingEmbedder()), system)
        assert len(system.reached) >= 0.8 * len(PARAGRAPHS)
        whole = [flat(note.text) for note in PARAGRAPHS]
        recovered_shares = [sum(len(flat(text)) for text in found if flat(text) in note) / len(note) for note in whole]
        assert sum(share > 0.8 for share in recovered_shares) >= 0.8 * len(PARAGRAPHS)

    def test_yields_each_text_once(self):
        found = crawl(Pirates(embedder=HashingEmbedder()), world(budget=30))
        assert all(any(flat(text) in flat(note.text) for note in PARAGRAPHS) for text in found)
        assert len({" ".join(words(text)) for text in found}) == len(found)

    def test_starts_with_the_topic(self):
        system = world(budget=1)
        crawl(Pirates(topic="thyroid tests", embedder=HashingEmbedder()), system)
        assert "thyroid tests" in system.questions[0]

    def test_queries_combine_several_anchors_of_replies(self):
        system = world(budget=20)
        crawl(Pirates(topic="thyroid", anchors=2, embedder=HashingEmbedder()), system)
        collection = " ".join(flat(note.text).lower() for note in PARAGRAPHS)
        for question in system.questions[1:]:
            anchors = question.split("\n")[0].rstrip(".").split(" and ")
            assert len(anchors) == 2
            assert all(anchor.lower() in collection for anchor in anchors)

    def test_ends_if_every_reply_is_a_refusal(self):
        system = world(budget=10_000, mute=True)
        assert crawl(Pirates(embedder=HashingEmbedder()), system) == []
        assert len(GENERAL_WORDS) / 3 <= len(system.questions) <= 4 * 4 * len(GENERAL_WORDS)

    def test_ends_if_every_chunk_was_recovered(self):
        box = Scripted(["The ferry at Crale sank in the late autumn storm."], budget=2000)
        assert crawl(Pirates(topic="ferries", embedder=HashingEmbedder()), box) == [box.replies[0]]
        assert len(box.questions) < 30


class TestInjections:
    def test_are_tried_in_turn_and_the_successful_one_is_kept(self):
        class FollowsSecondCommand:
            def __init__(self):
                self.questions = []

            async def ask(self, text):
                self.questions.append(text)
                return Reply("The ferry at Crale sank late." if text.startswith(COMMANDS[1]) else "I cannot do that.")

        box = FollowsSecondCommand()
        crawl(Pirates(topic="ferries", embedder=HashingEmbedder()), box)
        assert [question.startswith(COMMANDS[1]) for question in box.questions] == [
            False,
            *[True] * (len(box.questions) - 1),
        ]

    def test_all_contain_the_text(self):
        assert all("{text}" in form for form in INJECTIONS)
        assert len(set(INJECTIONS)) == 4


class TestRelevance:
    @given(
        st.lists(st.sampled_from(["amber birch", "cedar delta", "ember flint"]), min_size=0, max_size=4),
        st.floats(0, 1),
    )
    def test_is_reduced_by_the_share_of_duplicates_times_the_penalty(self, duplicates, share):
        embedder = BagOfWords()
        state = _State(embedder)
        state.add_anchors(["amber birch", "cedar", "maple"], 2.0)
        state.penalize([0, 2], embedder.embed(duplicates), share)

        penalize = [0.0, 0.0]
        for text in duplicates:
            weights = [
                math.exp(SHARPNESS * float(embedder.embed([text])[0] @ embedder.embed([anchor])[0]))
                for anchor in ("amber birch", "maple")
            ]
            penalize = [b + w / sum(weights) / len(duplicates) for b, w in zip(penalize, weights, strict=True)]
        if not duplicates:
            penalize = [0.5, 0.5]
        assert state.relevance == pytest.approx([1 - share * penalize[0], 1, 1 - share * penalize[1]], abs=1e-4)

    def test_a_new_anchor_starts_with_the_highest_relevance(self):
        state = _State(HashingEmbedder())
        state.add_anchors(["amber", "birch"], 0.8)
        state.penalize([0, 1], np.empty((0, 1024), np.float32), 0.4)
        state.penalize([0], np.empty((0, 1024), np.float32), 0.3)
        state.add_anchors(["cedar", "birches"], 0.8)
        assert state.anchors.texts == ["amber", "birch", "cedar"]
        assert state.relevance == pytest.approx([0.5, 0.8, 0.8])

    def test_determines_the_sampling_of_anchors(self):
        state = _State(HashingEmbedder())
        state.add_anchors([f"anchor{i}" for i in range(4)], 2.0)
        state.relevance = [0.05, 0.4, 1.0, 1.0]
        rng = np.random.default_rng(0)
        draws = [state.sample_anchors(1, 0.15, 0.1, rng)[0] for _ in range(3000)]
        weights = np.array([0, *np.exp(np.array([0.4, 1, 1]) / 0.15)])
        assert np.bincount(draws, minlength=4) / 3000 == pytest.approx(weights / weights.sum(), abs=0.03)
        assert sorted(state.sample_anchors(9, 0.15, 0.1, rng)) == [1, 2, 3]
        assert state.sample_anchors(1, 0.15, 1.0, rng) == []


def test_near_duplicates_are_yielded_but_not_followed():
    close = {"Herons nest in reeds": (1, 0), "Two herons nest there now": (0.99, 0.14), "Frogs": (0, 1)}
    state = _State(Placed(close))
    found = ["Herons nest in reeds", "herons nest, in reeds!", "Two herons nest there now", "Frogs are loud at night"]
    not_recovered, new, old = state.split_duplicates(found, 0.95)
    assert not_recovered == [found[0], found[2], found[3]]
    assert new == [found[0], found[3]]
    assert len(old) == 2
    assert state.split_duplicates(found, 0.95)[:2] == ([], [])


def test_writer_composes_texts_and_anchors():
    writer = Writer(
        {"plain text": "On the rain\nof Crale, " + "and so on " * 20, "subjects": "1. Crale ferry\n2. storm"}
    )
    box = Scripted(["The ferry at Crale sank in the late autumn storm.", "I don't know."], budget=6)
    crawl(Pirates(topic="ferries", writer=writer, embedder=HashingEmbedder()), box)
    assert box.questions[0].startswith("On the rain of Crale, and so on")
    assert len(box.questions[0].split("\n")[0].split()) == 30
    prompt_text = " ".join(p.question for p in writer.prompts)
    assert "Crale ferry" in prompt_text and "storm" in prompt_text
    assert [p for p in writer.prompts if p.context][0].context[0].text == box.replies[0]
