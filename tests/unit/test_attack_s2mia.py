import asyncio
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError
from casemate.maths import metrics
from casemate.protocols import LanguageModel
from casemate.redteam.attacks.s2mia import S2MIA
from casemate.types import UNKNOWN, Document, Probe, Reply, TokenScore
from tests.fakes import documents

DOCUMENT = Document(
    "a", "The heron stood in the reeds. At dusk it flew off to the north, over the weir.", title="Herons"
)


class UniformModel(LanguageModel):
    """Gives each word the same probability and records the prompts."""

    def __init__(self, logprob=-2.0):
        self.logprob, self.texts = logprob, []

    def score(self, text):
        self.texts.append(text)
        return [TokenScore(*m.span(), self.logprob, 0) for m in re.finditer(r"\w+", text)][1:]


def question(document):
    (found,) = asyncio.run(S2MIA().prepare(document, np.random.default_rng(0))).questions
    return found


def measured(attack, reply, document=DOCUMENT):
    return asyncio.run(attack.measure(document, Probe(("?",)), [Reply(reply)]))


def test_the_question_contains_the_first_half_only():
    half = DOCUMENT.text[: len(DOCUMENT.text) // 2].strip()
    assert f'"{half}"' in question(DOCUMENT)
    assert "weir" not in question(DOCUMENT)


def test_bleu_reference_is_the_whole_text_or_its_second_half():
    rest = DOCUMENT.text[len(DOCUMENT.text) // 2 :].strip()
    reply = "At dusk it flew off to the north."
    assert measured(S2MIA(), reply)[0] == metrics.bleu(DOCUMENT.text, reply)
    assert measured(S2MIA(bleu_ref="rest"), reply)[0] == metrics.bleu(rest, reply)
    assert measured(S2MIA(), DOCUMENT.text)[0] == pytest.approx(1)
    assert measured(S2MIA(bleu_ref="rest"), rest)[0] == pytest.approx(1)


def test_likelihood_interpolates_between_candidate_and_genre():
    attack = S2MIA()
    attack.study(["b b"])
    own = (2 * 1 / 1 + 1 / 3) / 3  # b follows the one a that is not the last word; one of three words is b
    genre = (2 * 0 + 2 / 2) / 3  # b never follows a; all words are b
    expected = math.log(0.6 * own + 0.3 * genre + 0.1 / 50_000)
    assert measured(attack, "A b!", Document("a", "a b a"))[1] == pytest.approx(expected)


def test_a_quotation_of_the_candidate_is_more_likely():
    attack = S2MIA()
    attack.study([d.text for d in documents(50)])
    quoted, other = measured(attack, "it flew off to the north"), measured(attack, "it ran away to the south")
    assert quoted[1] > other[1]


def test_model_scores_the_reply_after_the_candidate():
    class LengthModel(UniformModel):
        def score(self, text):
            return [s._replace(logprob=-1.0 if s.end <= len(DOCUMENT.text) else -3.0) for s in super().score(text)]

    model = LengthModel()
    assert measured(S2MIA(model=model), "At dusk it flew.")[1] == -3.0
    assert model.texts == [f"{DOCUMENT.text}\n\nAt dusk it flew."]


@pytest.mark.parametrize("attack", [S2MIA(), S2MIA(model=UniformModel(-50.0))], ids=["bigrams", "model"])
@pytest.mark.parametrize("reply", ["", " \n"])
def test_an_empty_reply_has_the_lowest_likelihood(attack, reply):
    assert measured(attack, reply) == (0.0, -20.0)


def test_likelihood_is_clipped():
    assert measured(S2MIA(model=UniformModel(-50.0)), "At dusk")[1] == -20.0


@given(st.text(max_size=80), st.text(max_size=80))
def test_scores_are_finite_for_any_texts(text, reply):
    bleu, likelihood = measured(S2MIA(), reply, Document("a", text))
    assert 0 <= bleu <= 1
    assert -20 <= likelihood <= 0


def test_an_unknown_reference_is_rejected():
    with pytest.raises(ConfigError, match=r"s2mia.bleu_ref is 'half'; known: full, rest"):
        S2MIA(bleu_ref="half")


@pytest.mark.parametrize("bleu_ref", ["full", "rest"])
@pytest.mark.parametrize("model", [None, UniformModel()])
def test_target_that_completes_texts_reveals_every_member(bleu_ref, model):
    """The worst-case target completes the quoted beginning with the rest of its text, or declines."""
    candidates = documents(20, words=60)
    member_texts, scores = candidates[:10], []
    attack = S2MIA(bleu_ref=bleu_ref, model=model)
    attack.study([d.text for d in candidates])
    for candidate in candidates:
        probe = asyncio.run(attack.prepare(candidate, np.random.default_rng(0)))
        (half,) = re.findall(r'"(.*)"', probe.questions[0])
        found = [d.text.partition(half)[2] for d in member_texts if half in d.text]
        scores.append(asyncio.run(attack.measure(candidate, probe, [Reply([*found, UNKNOWN][0])])))
    assert metrics.auc([s[0] for s in scores[:10]], [s[0] for s in scores[10:]]) == 1
    if not model:
        assert metrics.auc([s[1] for s in scores[:10]], [s[1] for s in scores[10:]]) == 1
