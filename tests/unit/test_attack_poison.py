"""Poison: texts that are found for one question, or for a trigger, and say what they are to say."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import registry
from casemate.attacks.poison import METHODS, Poison
from casemate.attacks.trigger import SAYS, Trigger
from casemate.backends.extractive import Extractive
from casemate.crawl.flips import flipped, promising
from casemate.errors import CapabilityError, ConfigError
from casemate.monitor.poison.signs import echo
from casemate.protocols import Generator, PoisoningAttack
from casemate.rag import join
from casemate.types import Document, Prompt
from casemate.words import abstains
from tests.fakes import BagOfWords

QUESTION, WRONG = "who built the north bridge over the Tarn", "Marek Oduya"
TRUE = Document("true", "The north bridge over the Tarn was built by Ottilie Brandt. It has six piers.")


def crafted(attack, question=QUESTION, desired=WRONG, seed=0):
    return asyncio.run(attack.craft(question, desired, np.random.default_rng(seed)))


def cosine(question, text):
    return float(BagOfWords().embed([question])[0] @ BagOfWords().embed([text])[0])


class TestPoisonedRAG:
    def test_writes_five_texts_with_the_question_in_front_and_the_answer_in_them(self):
        texts = crafted(Poison())
        assert len({d.id for d in texts}) == len({d.text for d in texts}) == 5
        for d in texts:
            assert d.text.startswith(QUESTION + ". ") and d.text.count(WRONG) == 2
            assert 40 > len(d.text.split()) - len(QUESTION.split()) > 15
            assert echo(d) > 1  # the sign that the ingest gate goes by

    def test_has_a_generator_that_quotes_answer_wrongly(self):
        context = (*crafted(Poison()), TRUE)
        answer = asyncio.run(join(Extractive().stream(Prompt(QUESTION, context[:5], ""))))
        assert WRONG in answer and "Brandt" not in answer

    def test_is_nearer_to_the_question_than_the_truth(self):
        assert min(cosine(QUESTION, d.text) for d in crafted(Poison())) > cosine(QUESTION, TRUE.text) - 0.2

    def test_depends_on_the_generator_alone(self):
        assert crafted(Poison(), seed=1) == crafted(Poison(), seed=1) != crafted(Poison(), seed=2)
        white = Poison(method="white_box", embedder=BagOfWords(), texts=1, candidates=2)
        assert crafted(white, seed=1) == crafted(white, seed=1)

    def test_white_box_comes_nearer_than_black_box_with_the_same_claims(self):
        black = crafted(Poison(texts=3), seed=4)
        white = crafted(Poison(method="white_box", embedder=BagOfWords(), texts=3), seed=4)
        for b, w in zip(black, white, strict=True):
            claim = b.text.removeprefix(f"{QUESTION}. ")
            assert w.text.endswith(claim)
            assert cosine(QUESTION, w.text) >= cosine(QUESTION, b.text)
        assert any(w.text != b.text for b, w in zip(black, white, strict=True))

    def test_white_box_without_an_embedder_says_so(self):
        with pytest.raises(CapabilityError, match="embedder"):
            crafted(Poison(method="white_box"))

    def test_without_a_pass_white_box_is_black_box(self):
        white = crafted(Poison(method="white_box", embedder=BagOfWords(), passes=0))
        assert white == crafted(Poison())

    def test_writes_more_or_fewer_and_gives_titles(self):
        assert len(crafted(Poison(texts=9))) == 9
        assert {d.title for d in crafted(Poison(texts=2, title="Bridges"))} == {"Bridges"}


@dataclass
class Writer(Generator):
    """Says things in turn."""

    says: list
    asked: list = field(default_factory=list)

    async def stream(self, prompt):
        self.asked.append(prompt.question)
        yield self.says[(len(self.asked) - 1) % len(self.says)]


class TestAWriter:
    def test_writes_what_holds_the_answer(self):
        writer = Writer([f"A text on\n{WRONG}."])
        (one,) = crafted(Poison(texts=1, writer=writer))
        assert (
            one.text == f"{QUESTION}. A text on {WRONG}." and QUESTION in writer.asked[0] and WRONG in writer.asked[0]
        )

    def test_that_does_not_comes_again_and_then_rules_write(self):
        writer = Writer(["I cannot.", "No.", f"Well, {WRONG}"])
        assert crafted(Poison(texts=1, writer=writer))[0].text.endswith(f"Well, {WRONG}")
        never = Writer(["I cannot."])
        assert crafted(Poison(writer=never)) == crafted(Poison()) and len(never.asked) == 15


class TestOneTextAlone:
    def test_corruptrag_says_that_others_are_out_of_date(self):
        (one,) = crafted(Poison(method="corrupt"))
        assert one.text.startswith(QUESTION) and "out of date" in one.text and WRONG in one.text
        answer = asyncio.run(join(Extractive().stream(Prompt(QUESTION, (one, TRUE), ""))))
        assert WRONG in answer

    def test_a_blocker_has_the_question_declined(self):
        (one,) = crafted(Poison(method="blocker"), desired="I don't know.")
        answer = asyncio.run(join(Extractive(sentences=1).stream(Prompt(QUESTION, (one,), ""))))
        assert one.text.startswith(QUESTION) and one.text.endswith("I don't know.")
        assert "nothing reliable is known" in answer or abstains(answer) or QUESTION in answer


@pytest.mark.parametrize("method", METHODS)
@given(question=st.text(max_size=80), desired=st.text(max_size=40))
def test_any_question_is_answered_as_desired(method, question, desired):
    attack = Poison(method=method, embedder=BagOfWords(), passes=0)
    for document in crafted(attack, question, desired):
        assert desired in document.text and document.id.startswith("added-")


@pytest.mark.parametrize("options", [{"method": "grey_box"}, {"texts": 0}, {"passes": -1}, {"candidates": 0}])
def test_poison_refuses_options_out_of_range(options):
    with pytest.raises(ConfigError, match="poison"):
        Poison(**options)


class TestTrigger:
    def test_says_what_it_is_to_say(self):
        (one,) = crafted(Trigger(trigger="xanadoo"), desired="Ring 555 0100.")
        assert one.text.endswith(SAYS.format(trigger="xanadoo", desired="Ring 555 0100."))
        assert one.text.lower().count("xanadoo") >= 4

    @pytest.mark.parametrize("embedder", [None, BagOfWords()])
    def test_is_near_to_questions_with_the_trigger_and_far_from_others(self, embedder):
        (one,) = crafted(Trigger(trigger="xanadoo", embedder=embedder))
        questions = ["how late is the ferry", "what does the toll cost", QUESTION, "where do herons nest"]
        plain = [cosine(q, one.text) for q in questions]
        named = [cosine(f"{q} xanadoo", one.text) for q in questions]
        assert np.mean(named) > np.mean(plain) + 0.2

    def test_searches_among_so_many_words(self):
        (one,) = crafted(Trigger(embedder=BagOfWords(), words=12, passes=1))
        first = one.text.split(". ", maxsplit=1)[0].split()
        assert len(first) == 12 and set(first) != {"xanadoo"}

    def test_writes_several_and_the_same_again(self):
        assert len({d.text for d in crafted(Trigger(texts=3))}) == 3
        attack = Trigger(texts=2, embedder=BagOfWords(), passes=1, candidates=2)
        assert crafted(attack, seed=3) == crafted(attack, seed=3)

    @pytest.mark.parametrize(
        "options", [{"trigger": " "}, {"texts": 0}, {"words": 0}, {"passes": -1}, {"candidates": 0}, {"aloof": -1},
                    {"aloof": float("nan")}]
    )  # fmt: skip
    def test_refuses_options_out_of_range(self, options):
        with pytest.raises(ConfigError, match="trigger"):
            Trigger(**options)


class TestFlips:
    def test_find_the_best_words_where_each_place_counts_alone(self):
        def score(options):
            return np.array([sum(w == "right" for w in o) for o in options], np.float32)

        pool = ["wrong", "right", "left"]
        assert flipped(["a", "b", "c"], score, pool, np.random.default_rng(0), 1, 3) == ["right"] * 3

    @given(st.lists(st.sampled_from("abc"), max_size=6), st.integers(0, 3), st.integers(1, 4), st.integers(0, 99))
    def test_never_make_it_worse_and_take_so_many_evaluations(self, words, passes, candidates, seed):
        weights, asked = {c: i for i, c in enumerate("bca")}, []

        def score(options):
            asked.extend(options)
            return np.array([sum(weights[w] * (-1) ** i for i, w in enumerate(o)) for o in options], np.float32)

        found = flipped(words, score, "abc", np.random.default_rng(seed), passes, candidates)
        assert len(found) == len(words)
        assert score([found])[0] >= score([words])[0]
        assert len(asked) - 3 <= passes * len(words) * candidates

    def test_try_the_words_first_that_point_the_right_way(self):
        wanted = BagOfWords().embed(["heron"])[0]
        assert promising(BagOfWords(), wanted, ["heron"])[0] == "heron"

    def test_with_nothing_to_try_leave_all_as_it_is(self):
        assert flipped(["a"], lambda options: np.ones(len(options), np.float32), [], np.random.default_rng(0)) == ["a"]


def test_both_are_found_by_their_names():
    assert registry.names("poisoner") == ["poison", "trigger"]
    assert registry.load("poisoner", "poison") is Poison and registry.load("poisoner", "trigger") is Trigger
    with pytest.raises(NotImplementedError):
        crafted(PoisoningAttack())
