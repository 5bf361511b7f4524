import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.redteam.attacks.ikea import IKEA, QUESTION_TEMPLATES, _State
from casemate.redteam.crawling.anchors import HashingEmbedder
from casemate.redteam.crawling.common_words import GENERAL_WORDS
from casemate.types import UNKNOWN
from tests.fakes import WORDS, BagOfWords
from tests.unit.crawls import Placed, Scripted, Writer, crawl, world


def ikea(**options):
    return IKEA(**{"embedder": HashingEmbedder(), "min_question_similarity": 0.5, **options})


class TestCrawl:
    def test_asks_no_question_twice(self):
        system = world(budget=120)
        crawl(ikea(), system)
        assert len(set(system.questions)) == len(system.questions)

    def test_ends_when_no_anchor_is_left(self):
        system = world(budget=10_000, mute=True)
        assert crawl(ikea(), system) == []
        assert len(system.questions) == len(GENERAL_WORDS)

    def test_continues_from_answers(self):
        box = Scripted(["Otters build lodges beside willow groves.", UNKNOWN], budget=200)
        crawl(ikea(), box)
        assert any("lodges" in question for question in box.questions)


class TestAnchors:
    @given(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=2).map(" ".join), max_size=10))
    def test_are_dissimilar_and_similar_words_are_stored_for_later(self, words):
        embedder = BagOfWords()
        state = _State(ikea(max_anchor_similarity=0.6), embedder)
        state.add_dissimilar(words)
        state.add_dissimilar(words[::-1])
        V = state.anchors.vectors
        assert (V @ V.T - np.eye(len(V))).max(initial=0) < 0.6
        assert set(state.anchors.texts) | set(state._similar_words.texts) == set(words)

    def test_may_be_more_similar_when_all_are_used(self):
        state = _State(ikea(max_anchor_similarity=0.5), Placed({"amber": (1, 0), "birch": (0.8, 0.6)}))
        state.add_dissimilar(["amber", "birch"])
        assert state.anchors.texts == ["amber"]
        state.used.add("amber")
        assert state.draw(np.random.default_rng(0)) == "birch"
        state.used.add("birch")
        assert state.draw(np.random.default_rng(0)) is None

    def test_are_similar_to_the_topic(self):
        nearby = {"birds": (1, 0), "heron": (0.4, 0.9), "ledger": (0.2, 0.98)}
        state = _State(IKEA(topic="birds", max_anchor_similarity=1.0), Placed(nearby))
        state.add_dissimilar(["heron", "ledger"])
        assert state.anchors.texts == ["heron"]


class TestExperienceReflection:
    @given(
        st.lists(
            st.tuples(st.sampled_from(["refusal_penalty", "unrelated_penalty", "good"]), st.sampled_from(WORDS)),
            max_size=12,
        )
    )
    def test_penalties_are_summed_over_similar_questions(self, history):
        embedder, attack = BagOfWords(), ikea(max_anchor_similarity=2.0 / 2, refusal_penalty=3.0, unrelated_penalty=2.0)
        state = _State(attack, embedder)
        state.add_dissimilar(WORDS[:8])
        for i, (what, word) in enumerate(history):
            question = embedder.embed([word])[0]
            state.record_answer(
                f"{word} {i}", question, {"refusal_penalty": "", "unrelated_penalty": "xylo phone", "good": word}[what]
            )
            if i == 5:
                state.add_dissimilar(WORDS[8:])  # anchors added later include the penalties

        penalty = {"refusal_penalty": 3.0, "unrelated_penalty": 2.0, "good": 0.0}
        for word, against in zip(state.anchors.texts, state._anchor_penalties, strict=True):
            nearby = [what for what, asked in history if embedder.embed([word])[0] @ embedder.embed([asked])[0] > 0.7]
            assert against == pytest.approx(math.fsum(penalty[what] for what in nearby))

    def test_sampling_is_proportional_to_the_exponential_of_penalties(self):
        state = _State(ikea(), BagOfWords())
        state.add_dissimilar(["amber", "birch", "cedar"])
        state._anchor_penalties = [0.0, 1.0, 10.0]
        rng = np.random.default_rng(1)
        draws = [state.draw(rng) for _ in range(3000)]
        assert draws.count("birch") / draws.count("amber") == pytest.approx(math.exp(-1), abs=0.05)
        assert draws.count("cedar") <= 3


class TestTrustRegion:
    POSITIONS = {
        "heron": (1, 0, 0),
        "Herons eat frogs": (0.8, 0.6, 0),
        "frogs": (0.5, 0.85, 0),
        "reeds": (0, 0.9, 0.44),
        "ledger": (0, 0.1, 1),
    }

    def mutated(self, words, cosine_of_region=None, **options):
        attack = IKEA(writer=Writer({"terms": "\n".join(words)}), embedder=Placed(self.POSITIONS), **options)
        state = _State(attack, attack.embedder)
        (question,) = attack.embedder.embed(["heron"])
        region = state.record_answer("heron", question, "Herons eat frogs and reeds.")
        asked = asyncio.run(attack._mutate(region, "Herons eat frogs and reeds.", state))
        return asked and asked[0]

    def test_chooses_the_word_least_similar_to_the_question(self):
        # the answer's cosine to the question is .8; to the words .91, .54 and .06
        assert "reeds" in self.mutated(["frogs", "reeds", "ledger"])
        assert "frogs" in self.mutated(["frogs", "ledger"])
        assert self.mutated(["ledger"]) is None
        assert "ledger" in self.mutated(["ledger"], trust_region=0.05)

    def test_ends_at_a_question_similar_to_an_earlier_one(self):
        assert "frogs" in self.mutated(["frogs"], max_repeat_similarity=0.6)
        assert self.mutated(["frogs"], max_repeat_similarity=0.4) is None

    def test_ends_after_a_refused_unrelated_or_known_answer(self):
        state = _State(IKEA(), Placed(self.POSITIONS))
        heron, frogs = state.questions.embed(["heron", "frogs"])
        assert state.record_answer("a", heron, "") is None
        assert state.record_answer("b", heron, "ledger") is None
        question, answer, radius = state.record_answer("c", frogs, "reeds")
        assert np.array_equal(question, frogs)
        assert radius == pytest.approx(0.5 * float(frogs @ answer))
        assert state.record_answer("d", frogs, "reeds") is None


class TestQuestions:
    def test_use_the_template_most_similar_to_the_anchor(self):
        positions = {frame.format("heron"): (0.5 + i / 10, 0.5) for i, frame in enumerate(QUESTION_TEMPLATES)} | {
            "heron": (1, 0)
        }
        attack = IKEA(embedder=Placed(positions))
        asked = asyncio.run(attack._question("heron", _State(attack, attack.embedder)))
        assert asked[0] == QUESTION_TEMPLATES[-1].format("heron")

    def test_are_skipped_if_none_is_similar_to_the_anchor(self):
        attack = IKEA(embedder=Placed({"heron": (1, 0), "heron?": (0, 1), "heron to me?": (0, 1)}))
        assert asyncio.run(attack._question("heron", _State(attack, attack.embedder))) is None

    def test_come_from_the_writer_if_there_is_one(self):
        writer = Writer({"concepts": "herons\nwillows", "natural questions": "1. Where do herons nest?\n2. Herons."})
        box = Scripted([UNKNOWN])
        crawl(
            IKEA(
                topic="birds",
                min_topic_similarity=-1,
                min_question_similarity=0.1,
                writer=writer,
                embedder=HashingEmbedder(),
            ),
            box,
        )
        assert box.questions == [
            "Where do herons nest?"
        ]  # generated for both anchors; the question about willows is too dissimilar
