"""RobustRAG: a special case of the quorum, and decoding against the model's token probabilities."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate.errors import BackendError, CapabilityError, ConfigError
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.robust_rag import WRITE, RobustRAG, aggregated_token
from casemate.maths.cascade import softmax
from casemate.protocols import Generator
from casemate.rag.pipeline import join_stream
from casemate.types import UNKNOWN, Document, Hit, Prompt, Query, Retrieval, SimilarityStats
from tests.fakes import Memory, Parrot
from tests.unit.toy_models import Toy

QUESTION = "What is at the bridge?"
VOCABULARY = tuple("amber brook cedar delta ember fjord grove heron inlet jetty".split())


def prompt_of(texts, question=QUESTION):
    return Prompt(question, tuple(Document(f"d{i}", text) for i, text in enumerate(texts)), "Answer.", "r1")


def answer(texts, defense=None, question=QUESTION, generator=None):
    wrapped = (defense or RobustRAG()).on_generate(generator or Parrot())
    return asyncio.run(join_stream(wrapped.stream(prompt_of(texts, question))))


def texts_of(units):
    """Returns one sentence for each unit, with distinct words, so that no two are copies."""
    return [
        f"The bridge {' '.join(unit)} near {' '.join(f'own{i}x{j}' for j in range(12))}."
        for i, unit in enumerate(units)
    ]


# Keywords


@given(
    st.lists(st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=4, unique=True), min_size=7, max_size=10),
)
@settings(max_examples=40, deadline=None)
def test_equals_quorum_with_passages_as_units(units):
    """With seven or more answers, beta decides, and the threshold equals that of the quorum without jitter."""
    texts = texts_of(units)
    hits = tuple(Hit(Document(f"d{i}", text), 0.8 - i / 1000) for i, text in enumerate(texts))
    found = Retrieval(hits, SimilarityStats(100, 0.0, 0.1), True, frozenset(hit.document.id for hit in hits))
    quorum = Quorum(support=3, jitter=1, words=64)
    (released,) = asyncio.run(quorum.on_retrieve(Query(QUESTION), found)).value.hits
    assert answer(texts) == released.document.text


def test_threshold_is_lower_if_many_passages_abstain():
    """The threshold falls with the number of answers: two of three passages abstain, and the third suffices."""
    texts = ["The bridge is amber.", "Herons nest early.", "Barges pay a toll."]
    assert answer(texts) == "Bridge is amber."
    assert (
        answer(["The bridge is amber.", "The bridge is brook.", "Brook, says a bridge.", "A bridge, jade."]) != "Amber."
    )


def test_each_retrieved_copy_counts_as_one_passage():
    """The quorum counts copies as one unit."""
    texts = texts_of([["amber"]] * 2)
    poison = ["The bridge zebra."] * 3
    assert "zebra" in answer([*texts, *poison, *texts_of([["cedar"]] * 5)]).lower()


@dataclass
class Writer(Generator):
    """Repeats the first sentence of a passage, or the keywords."""

    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        yield prompt.context[0].text.split(". ")[0]


def test_writer_answers_from_single_passages_and_then_from_keywords():
    writer, store = Writer(), Memory()
    texts = [f"It was opened in 1932, says guide {name}. {name} left." for name in ("Ann", "Ben", "Cid", "Dee")]
    said = answer(texts, RobustRAG(writer=writer, store=store), "When did the bridge open?")
    assert said == "1932; guide; say"
    assert [len(p.context) for p in writer.prompts] == [1] * 5 and writer.prompts[-1].instructions == WRITE
    assert store.events[0].body["calls"] == 4 and store.events[0].body["defense"] == "robust_rag"


def test_without_a_released_keyword_the_answer_is_unknown():
    assert answer(["Amber.", "Brook."], RobustRAG(share=1.0, writer=Writer())) == UNKNOWN
    assert answer([]) == UNKNOWN


@dataclass
class BlockingWriter(Writer):
    """Exceeds the time limit for a text that contains a word."""

    on: str = "Ann"

    async def stream(self, prompt):
        async for piece in super().stream(prompt):
            yield piece
        await asyncio.sleep(60 if self.on in prompt.context[0].text else 0)


def test_passage_abstains_if_the_writer_exceeds_its_time_limit():
    texts = [f"It was opened in 1932, says guide {name}. {name} left." for name in ("Ann", "Ben", "Cid", "Dee", "Eve")]
    defense = RobustRAG(writer=BlockingWriter(), writer_s=0.3)
    assert answer(texts, defense, "When did the bridge open?") == "1932; guide; say"


def test_writer_that_exceeds_its_time_limit_on_the_keywords_fails():
    texts = [f"It was opened in 1932, says guide {name}. {name} left." for name in ("Ann", "Ben", "Cid", "Dee")]
    defense = RobustRAG(writer=BlockingWriter(on="1932;"), writer_s=0.3)
    with pytest.raises(BackendError, match="writer_s"):
        answer(texts, defense, "When did the bridge open?")


@given(st.integers(0, 40), st.floats(0.01, 1), st.integers(1, 10))
def test_threshold_is_the_smallest_number_that_reaches_the_limit(n, share, most):
    found = RobustRAG(share=share, most=most).threshold(n)
    limit = min(share * n, most)
    assert found == next(c for c in range(1, 60) if c >= limit - 1e-9)


# Decoding


def test_decoding_uses_the_sum_of_the_probabilities_of_the_passages():
    model = Toy(3, end=" ")
    prompt = Prompt("a", tuple(Document(x, t) for x, t in (("a", "abca"), ("b", "cbb"), ("c", "bac"))), "", "r")
    for margin in (0.0, 0.4, 5.0):
        said = asyncio.run(
            join_stream(RobustRAG("decoding", margin=margin, tokens=8).on_generate(model).stream(prompt))
        )
        prompts = [model.encode(Prompt("a", (d,), "")) for d in prompt.context]
        bare, written = model.encode(Prompt("a", (), "")), []
        for _ in range(8):  # reference implementation
            sums = sum(softmax(model.logits(tuple(p), written)) for p in prompts)
            order = np.argsort(sums)
            leads = sums[order[-1]] - sums[order[-2]] > margin
            token = int(order[-1]) if leads else int(np.argmax(model.logits(tuple(bare), written)))
            if token in model.ends:
                break
            written.append(token)
        assert said == model.text(written).lstrip()


def test_fewer_passages_than_the_margin_cannot_change_the_token():
    """kappa passages change the sum by at most kappa: with a lead above eta + 2 kappa, the token stays."""
    clean = softmax(np.array([[6.0, 0.0, 0.0]] * 4))
    poison = np.array([[0.0, 0.0, 1.0]])
    assert aggregated_token(np.concatenate([clean, poison]), 1, 1.0) == 0
    assert aggregated_token(np.concatenate([clean, *[poison] * 4]), 1, 1.0) == 1


def test_passages_with_a_probable_refusal_are_excluded():
    @dataclass
    class Declines(Toy):
        letters: str = "abc I don't know."

        def logits(self, prompt, answer):
            unknown = self.tokens(UNKNOWN)
            sure = np.full(len(self.letters), -40.0)
            step = len(answer)
            if self.tokens("c")[0] in prompt and step < len(unknown) and tuple(answer) == tuple(unknown[:step]):
                sure[unknown[step]] = 0.0
                return sure
            return super().logits(prompt, answer)

    model = Declines(1)
    heard = (
        RobustRAG("decoding").on_generate(model)._heard(Prompt("a", (Document("x", "ab"), Document("y", "abc")), ""))
    )
    assert [model.text(ids) for ids in heard] == [" a ab ", " a "]
    both = Prompt("a", (Document("x", "cc"), Document("y", "abc")), "")
    assert asyncio.run(join_stream(RobustRAG("decoding").on_generate(model).stream(both))) == UNKNOWN


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "votes"}, "allowed are keywords, decoding"),
        ({"share": 0.0}, "share=0.0"),
        ({"most": 0}, "most=0"),
        ({"margin": -1.0}, "margin=-1.0"),
        ({"tokens": 0}, "tokens=0"),
        ({"writer_s": 0.0}, "writer_s=0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RobustRAG(**options)


def test_decoding_requires_token_probabilities():
    with pytest.raises(CapabilityError, match="Parrot provides none"):
        RobustRAG("decoding").on_generate(Parrot())
