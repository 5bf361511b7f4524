"""Poisoning: texts that are retrieved for a question or a trigger and change the answer."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import plugins
from casemate.backends.generators.extractive import ExtractiveGenerator
from casemate.errors import CapabilityError, ConfigError
from casemate.monitor.poisoning.text_signals import question_echo
from casemate.protocols import Generator, PoisoningAttack
from casemate.rag.pipeline import join_stream
from casemate.redteam.attacks.poison import METHODS, Poison
from casemate.redteam.attacks.trigger import INSTRUCTION, Trigger
from casemate.redteam.crawling.hotflip import candidate_words, flip_words
from casemate.text.refusals import is_refusal
from casemate.types import Document, Prompt
from tests.fakes import BagOfWords

QUESTION, WRONG = "who built the north bridge over the Tarn", "Marek Oduya"
TRUE = Document("true", "The north bridge over the Tarn was built by Ottilie Brandt. It has six piers.")


def crafted(attack, question=QUESTION, desired=WRONG, seed=0):
    return asyncio.run(attack.craft(question, desired, np.random.default_rng(seed)))


def cosine(question, text):
    return float(BagOfWords().embed([question])[0] @ BagOfWords().embed([text])[0])


class TestPoisonedRAG:
    def test_writes_five_texts_of_question_and_answer(self):
        texts = crafted(Poison())
        assert len({d.id for d in texts}) == len({d.text for d in texts}) == 5
        for d in texts:
            assert d.text.startswith(QUESTION + ". ") and d.text.count(WRONG) == 2
            assert 40 > len(d.text.split()) - len(QUESTION.split()) > 15
            assert question_echo(d) > 1  # the signal that the ingest gate uses

    def test_changes_the_answer_of_an_extractive_generator(self):
        context = (*crafted(Poison()), TRUE)
        answer = asyncio.run(join_stream(ExtractiveGenerator().stream(Prompt(QUESTION, context[:5], ""))))
        assert WRONG in answer and "Brandt" not in answer

    def test_is_more_similar_to_the_question_than_the_correct_document(self):
        assert min(cosine(QUESTION, d.text) for d in crafted(Poison())) > cosine(QUESTION, TRUE.text) - 0.2

    def test_texts_depend_on_the_seed_only(self):
        assert crafted(Poison(), seed=1) == crafted(Poison(), seed=1) != crafted(Poison(), seed=2)
        white = Poison(method="white_box", embedder=BagOfWords(), texts=1, candidates=2)
        assert crafted(white, seed=1) == crafted(white, seed=1)

    def test_white_box_texts_are_more_similar_than_black_box_texts(self):
        black = crafted(Poison(texts=3), seed=4)
        white = crafted(Poison(method="white_box", embedder=BagOfWords(), texts=3), seed=4)
        for b, w in zip(black, white, strict=True):
            claim = b.text.removeprefix(f"{QUESTION}. ")
            assert w.text.endswith(claim)
            assert cosine(QUESTION, w.text) >= cosine(QUESTION, b.text)
        assert any(w.text != b.text for b, w in zip(black, white, strict=True))

    def test_white_box_without_an_embedder_is_an_error(self):
        with pytest.raises(CapabilityError, match="embedder"):
            crafted(Poison(method="white_box"))

    def test_white_box_without_passes_equals_black_box(self):
        white = crafted(Poison(method="white_box", embedder=BagOfWords(), passes=0))
        assert white == crafted(Poison())

    def test_number_and_title_of_texts_are_configurable(self):
        assert len(crafted(Poison(texts=9))) == 9
        assert {d.title for d in crafted(Poison(texts=2, title="Bridges"))} == {"Bridges"}


@dataclass
class Writer(Generator):
    """Returns texts in turn."""

    says: list
    asked: list = field(default_factory=list)

    async def stream(self, prompt):
        self.asked.append(prompt.question)
        yield self.says[(len(self.asked) - 1) % len(self.says)]


class TestWriter:
    def test_text_by_the_writer_is_used_if_it_contains_the_answer(self):
        writer = Writer([f"A text on\n{WRONG}."])
        (one,) = crafted(Poison(texts=1, writer=writer))
        assert (
            one.text == f"{QUESTION}. A text on {WRONG}." and QUESTION in writer.asked[0] and WRONG in writer.asked[0]
        )

    def test_writer_is_retried_and_then_replaced_by_templates(self):
        writer = Writer(["I cannot.", "No.", f"Well, {WRONG}"])
        assert crafted(Poison(texts=1, writer=writer))[0].text.endswith(f"Well, {WRONG}")
        never = Writer(["I cannot."])
        assert crafted(Poison(writer=never)) == crafted(Poison()) and len(never.asked) == 15


class TestSingleTextMethods:
    def test_corruptrag_states_that_other_sources_are_outdated(self):
        (one,) = crafted(Poison(method="corrupt"))
        assert one.text.startswith(QUESTION) and "out of date" in one.text and WRONG in one.text
        answer = asyncio.run(join_stream(ExtractiveGenerator().stream(Prompt(QUESTION, (one, TRUE), ""))))
        assert WRONG in answer

    def test_a_blocker_causes_a_refusal(self):
        (one,) = crafted(Poison(method="blocker"), desired="I don't know.")
        answer = asyncio.run(join_stream(ExtractiveGenerator(sentences=1).stream(Prompt(QUESTION, (one,), ""))))
        assert one.text.startswith(QUESTION) and one.text.endswith("I don't know.")
        assert "nothing reliable is known" in answer or is_refusal(answer) or QUESTION in answer


@pytest.mark.parametrize("method", METHODS)
@given(question=st.text(max_size=80), desired=st.text(max_size=40))
def test_texts_contain_the_desired_answer_for_any_question(method, question, desired):
    attack = Poison(method=method, embedder=BagOfWords(), passes=0)
    for document in crafted(attack, question, desired):
        assert desired in document.text and document.id.startswith("added-")


@pytest.mark.parametrize("options", [{"method": "grey_box"}, {"texts": 0}, {"passes": -1}, {"candidates": 0}])
def test_poison_rejects_options_out_of_range(options):
    with pytest.raises(ConfigError, match="poison"):
        Poison(**options)


class TestTrigger:
    def test_contains_the_desired_statement(self):
        (one,) = crafted(Trigger(trigger="xanadoo"), desired="Ring 555 0100.")
        assert one.text.endswith(INSTRUCTION.format(trigger="xanadoo", desired="Ring 555 0100."))
        assert one.text.lower().count("xanadoo") >= 4

    @pytest.mark.parametrize("embedder", [None, BagOfWords()])
    def test_is_similar_only_to_questions_with_the_trigger(self, embedder):
        (one,) = crafted(Trigger(trigger="xanadoo", embedder=embedder))
        questions = ["how late is the ferry", "what does the toll cost", QUESTION, "where do herons nest"]
        plain = [cosine(q, one.text) for q in questions]
        named = [cosine(f"{q} xanadoo", one.text) for q in questions]
        assert np.mean(named) > np.mean(plain) + 0.2

    def test_the_number_of_optimized_words_is_configurable(self):
        (one,) = crafted(Trigger(embedder=BagOfWords(), words=12, passes=1))
        first = one.text.split(". ", maxsplit=1)[0].split()
        assert len(first) == 12 and set(first) != {"xanadoo"}

    def test_writes_several_texts_deterministically(self):
        assert len({d.text for d in crafted(Trigger(texts=3))}) == 3
        attack = Trigger(texts=2, embedder=BagOfWords(), passes=1, candidates=2)
        assert crafted(attack, seed=3) == crafted(attack, seed=3)

    @pytest.mark.parametrize(
        "options",
        [
            {"trigger": " "},
            {"texts": 0},
            {"words": 0},
            {"passes": -1},
            {"candidates": 0},
            {"avoid_weight": -1},
            {"avoid_weight": float("nan")},
        ],
    )
    def test_options_out_of_range_are_rejected(self, options):
        with pytest.raises(ConfigError, match="trigger"):
            Trigger(**options)


class TestHotFlip:
    def test_finds_the_optimum_of_a_separable_score(self):
        def score(options):
            return np.array([sum(w == "right" for w in o) for o in options], np.float32)

        pool = ["wrong", "right", "left"]
        assert flip_words(["a", "b", "c"], score, pool, np.random.default_rng(0), 1, 3) == ["right"] * 3

    @given(st.lists(st.sampled_from("abc"), max_size=6), st.integers(0, 3), st.integers(1, 4), st.integers(0, 99))
    def test_never_reduces_the_score_and_respects_the_budget(self, words, passes, candidates, seed):
        weights, asked = {c: i for i, c in enumerate("bca")}, []

        def score(options):
            asked.extend(options)
            return np.array([sum(weights[w] * (-1) ** i for i, w in enumerate(o)) for o in options], np.float32)

        found = flip_words(words, score, "abc", np.random.default_rng(seed), passes, candidates)
        assert len(found) == len(words)
        assert score([found])[0] >= score([words])[0]
        assert len(asked) - 3 <= passes * len(words) * candidates

    def test_candidates_are_sorted_by_cosine_to_the_direction(self):
        direction = BagOfWords().embed(["heron"])[0]
        assert candidate_words(BagOfWords(), direction, ["heron"])[0] == "heron"

    def test_words_are_unchanged_without_candidates(self):
        assert flip_words(["a"], lambda options: np.ones(len(options), np.float32), [], np.random.default_rng(0)) == [
            "a"
        ]


def test_both_attacks_are_registered():
    assert plugins.names("poisoner") == ["poison", "trigger"]
    assert plugins.load("poisoner", "poison") is Poison and plugins.load("poisoner", "trigger") is Trigger
    with pytest.raises(NotImplementedError):
        crafted(PoisoningAttack())
