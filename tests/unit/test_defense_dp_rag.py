from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from casemate import plugins
from casemate.config import PluginSpec
from casemate.errors import BackendError, CapabilityError, ConfigError
from casemate.guard.defenses.dp_rag import DPRAG, affordable_tokens, composed_epsilon, epsilon_per_token
from casemate.plugins import build
from casemate.rag.pipeline import join_stream
from casemate.testing import check_defense
from casemate.types import Document, Hit, Prompt, Query, Retrieval, SimilarityStats
from tests.fakes import Memory, Parrot
from tests.unit.toy_models import Toy

CONTEXT = (Document("a", "abca"), Document("b", "cbb"), Document("c", "bac"))
PROMPT = Prompt("a", CONTEXT, "", "r1")


def whole(generator, prompt=PROMPT):
    return asyncio.run(join_stream(generator.stream(prompt)))


def made(store=None, model=None, **options):
    return DPRAG(model=model, store=store, **({"tokens": 6, "delta": 0.0} | options)).on_generate(model or Toy(2))


@dataclass
class Failing(Toy):
    def begin(self, prompts):
        raise BackendError("no memory is left", backend="toy", retryable=False)


class TestWiring:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"epsilon": 0.0}, "epsilon=0.0; it must be above 0"),
            ({"epsilon": math.inf}, "epsilon=inf"),
            ({"temperature": 0.0}, "temperature=0.0"),
            ({"steepness": -1.0}, "steepness=-1.0"),
            ({"token_epsilon": 0.0}, "token_epsilon=0.0"),
            ({"delta": 1.0}, "delta=1.0"),
            ({"public": -1.0}, "public=-1.0"),
            ({"tokens": 0}, "tokens=0"),
            ({"tokens": 5000}, "at most 4096"),
            ({"wanted": 0}, "wanted=0"),
            ({"wanted": 2, "threshold_epsilon": 2.0}, "threshold_epsilon below epsilon"),
            ({"seed": -1}, "seed=-1"),
            ({"token_epsilon": 3.0, "delta": 0.0}, "a budget of 2 does not cover one token of 3"),
        ],
    )
    def test_invalid_options_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            DPRAG(**options)

    def test_generator_without_probabilities_is_refused(self):
        with pytest.raises(CapabilityError, match="Parrot provides none; set 'model'"):
            DPRAG().on_generate(Parrot())

    def test_is_built_by_name_with_a_model(self):
        assert plugins.load("defense", "dp_rag") is DPRAG
        assert build("defense", PluginSpec(use="dp_rag")).epsilon == 2.0
        assert {"model", "store"} == plugins.injected(DPRAG).keys()

    def test_satisfies_the_defense_contract(self):
        check_defense(DPRAG(delta=0.0))


class TestAnswers:
    def test_each_document_and_the_question_without_documents_have_a_separate_context(self):
        model = Toy(2)
        whole(made(model=model))
        asked = [model.text(model.encode(Prompt("a", documents, ""))) for documents in [(d,) for d in CONTEXT] + [()]]
        assert model.begun == asked

    def test_answer_ends_when_the_budget_is_used(self):
        for tokens in (1, 4):
            assert len(whole(made(tokens=tokens, model=Toy(2, "abc")))) == tokens
        memory = Memory()
        whole(made(memory, epsilon=2.0, token_epsilon=0.6, tokens=70, model=Toy(2, "abc")))
        assert memory.events[0].body["tokens"] == 3

    def test_answer_ends_at_the_end_token_which_uses_budget(self):
        memory = Memory()
        text = whole(made(memory, model=Toy(1, "ab.", "."), tokens=200, seed=1))
        assert "." not in text and 0 < len(text) < 200
        assert memory.events[0].body["tokens"] == len(text) + 1

    @pytest.mark.slow
    def test_without_documents_tokens_follow_the_public_model(self):
        options = {"model": Toy(2, "abc"), "public": 1.0, "tokens": 1, "epsilon": 1.0}
        counts = Counter(whole(made(seed=s, **options), Prompt("a", (), "")) for s in range(4000))
        logits = Toy(2, "abc").logits(Toy(2, "abc").encode(Prompt("a", (), "")), [])
        shares = np.exp(logits) / np.exp(logits).sum()
        assert [counts[c] / 4000 for c in "abc"] == pytest.approx(shares, abs=0.03)

    def test_answers_are_random_without_a_seed(self):
        assert len({whole(made(tokens=12)) for _ in range(6)}) > 1
        assert len({whole(made(tokens=12, seed=3)) for _ in range(3)}) == 1

    @pytest.mark.slow
    def test_replacing_a_document_changes_answer_frequencies_within_epsilon(self):
        """Frequencies of answers over the same 1,200 draws differ by less than the bound."""
        other = Prompt("a", (*CONTEXT[:2], Document("d", "ccccc")), "")
        epsilon = 0.5
        defense = DPRAG(epsilon=epsilon, tokens=2, delta=0.0, seed=1)
        shares = []
        for prompt in (PROMPT, other):
            counts: Counter[str] = Counter()
            for s in range(1200):
                defense.seed = s
                counts[whole(defense.on_generate(Toy(2, "ab")), prompt)] += 1
            shares.append(counts)
        for text in ("aa", "ab", "ba", "bb"):
            assert abs(math.log(shares[0][text] / shares[1][text])) < epsilon + 0.25

    def test_failure_of_the_model_is_raised(self):
        with pytest.raises(BackendError, match="no memory"):
            whole(made(model=Failing(2)))

    def test_costs_are_recorded_without_text(self):
        memory = Memory()
        text = whole(made(memory, epsilon=3.0))
        (event,) = memory.events
        assert event.kind == "generation"
        assert event.body["defense"] == "dp_rag" and event.body["request"] == "r1"
        assert (event.body["epsilon"], event.body["token_epsilon"], event.body["contexts"]) == (3.0, 0.5, 3)
        assert event.body["flops_honest"] > 0 and text not in json.dumps(event.body)


class TestThreshold:
    def retrieve(self, **options):
        hits = tuple(Hit(Document(f"d{i}", "text"), 0.9 - 0.1 * i) for i in range(8))
        found = Retrieval(hits, SimilarityStats(100, 0.0, 0.1))
        return asyncio.run(DPRAG(**options).on_retrieve(Query("q", k=6), found))

    def test_without_a_threshold_all_hits_are_kept(self):
        assert len(self.retrieve().value.hits) == 8 and self.retrieve().verdict is None

    def test_threshold_keeps_the_wanted_number_of_hits_and_flags_nothing(self):
        value, verdict, _ = self.retrieve(epsilon=900.0, threshold_epsilon=800.0, wanted=3)
        assert len(value.hits) == 3
        assert not verdict.flagged and verdict.hidden == ("d3", "d4", "d5", "d6", "d7")

    def test_small_budget_gives_a_random_threshold(self):
        kept = {len(self.retrieve(wanted=3, delta=0.0).value.hits) for _ in range(60)}
        assert len(kept) > 2

    def test_threshold_budget_is_not_available_for_tokens(self):
        plain, with_threshold = DPRAG(delta=0.0), DPRAG(delta=0.0, wanted=3, threshold_epsilon=0.5)
        assert plain._mechanism.epsilon == pytest.approx(2 / 70)
        assert with_threshold._mechanism.epsilon == pytest.approx(1.5 / 70)


class TestAccounting:
    def test_epsilons_add_up_without_delta(self):
        assert composed_epsilon(0.1, 0.0, 20) == pytest.approx(2.0)
        assert (epsilon_per_token(2.0, 0.0, 20), affordable_tokens(2.0, 0.0, 0.1)) == (0.1, 20)

    def test_delta_allows_a_larger_epsilon_per_token_within_the_budget(self):
        pytest.importorskip("dp_accounting", reason="needs casemate[dp]")
        each = epsilon_per_token(2.0, 1e-3, 70)
        assert 2 / 70 < each
        assert composed_epsilon(each, 1e-3, 70) <= 2.0 < composed_epsilon(1.05 * each, 1e-3, 70)
        tokens = affordable_tokens(2.0, 1e-3, 0.2)
        assert composed_epsilon(0.2, 1e-3, tokens) <= 2.0 < composed_epsilon(0.2, 1e-3, tokens + 1)

    def test_composition_equals_that_of_randomized_response(self):
        """The reference is the binomial distribution of n answers, each revealing a bit with odds exp(epsilon)."""
        pytest.importorskip("dp_accounting", reason="needs casemate[dp]")
        each, n, delta = 0.4, 12, 1e-2
        keep = math.exp(each) / (1 + math.exp(each))
        p = [math.comb(n, i) * keep**i * (1 - keep) ** (n - i) for i in range(n + 1)]
        found = composed_epsilon(each, delta, n)

        def missing(epsilon):
            return sum(max(0.0, a - math.exp(epsilon) * b) for a, b in zip(p, reversed(p), strict=True))

        assert missing(found) <= delta < missing(found - 0.05)
