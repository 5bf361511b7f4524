"""Distributions of complete answers, on toy models whose answers can be enumerated."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import chisquare

from casemate.errors import BackendError
from casemate.guard.defenses.cascade import decoding as module
from casemate.guard.defenses.cascade.decoding import CascadeDecoding, DecodingSettings, reference_prompt
from casemate.maths.cascade import DeferralRule, softmax, target_distribution
from casemate.text.copying import Alphabet, CopyDetector
from casemate.types import Document, Prompt
from tests.unit.toy_models import Toy

CONTEXT = (Document("a", "abca"), Document("b", "cbb"))
PROMPT = Prompt("a", CONTEXT, "")
LIMITS = {"run": 1, "budget": 3, "share": 1.0}
V = 4  # letters of a toy model; the last is a space, which copy detection ignores


@dataclass(frozen=True)
class Always(DeferralRule):
    """Defers every token, or none."""

    whose: bool = True

    def deferred(self, q, p, copies=()):
        return np.full(len(q), self.whose)


def opened(settings, prompt=PROMPT, seed=0, draft=None, reference=None, **limits):
    models = draft or Toy(1), reference or Toy(2)
    alphabet = Alphabet(models[1].vocabulary)
    chunks = [alphabet.encode(models[1].tokens(d.text)) for d in prompt.context]
    copying = CopyDetector(chunks, **(LIMITS | limits))
    return CascadeDecoding(models, prompt, settings, copying, alphabet, np.random.default_rng(seed))


def finished(decoding):
    while not decoding.finished:
        decoding.block()
    return tuple(decoding.tokens)


def answer_distribution(make, monkeypatch):
    """Returns the exact distribution of answers by enumerating the outcomes of all random draws."""
    distribution = defaultdict(float)
    pending = [[]]
    while pending:
        script = pending.pop()
        chance, at = 1.0, 0

        def chosen(options, u, script=script):
            nonlocal chance, at
            possible = [i for i, share in enumerate(options) if share > 0]
            if at == len(script):
                pending.extend([*script, i] for i in possible[1:])
                script.append(possible[0])
            at += 1
            chance *= float(options[script[at - 1]]) / float(np.sum(options))
            return script[at - 1]

        monkeypatch.setattr(module, "sample_token", chosen)
        distribution[finished(make())] += chance
    return dict(distribution)


def naive_copies(chunks, generated, run, budget):
    """Returns the copy tokens of each chunk that is being copied, by trying all substrings."""
    generated = [token for token in generated if token != V - 1]

    def quoted(chunk):
        spans = [(i, j) for i in range(len(generated)) for j in range(i + 3, len(generated) + 1)]
        return len({t for i, j in spans if _occurs(generated[i:j], chunk) for t in range(i, j)})

    found = {}
    for z, chunk in enumerate(chunks):
        if budget is not None and (quoted(chunk) >= budget or _common(generated, chunk) >= max(budget, len(chunk))):
            found[z] = set(chunk)
        elif len(generated) >= run and _occurs(generated[len(generated) - run :], chunk):
            found[z] = {v for v in range(V) if _occurs([*generated[len(generated) - run :], v], chunk)}
    return found


def _occurs(part, text):
    return any(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


def _common(generated, chunk):
    """Returns the length of the longest common subsequence, by trying all subsequences of the chunk."""
    for size in range(len(chunk), 0, -1):
        for part in itertools.combinations(chunk, size):
            rest = iter(generated)
            if all(token in rest for token in part):
                return size
    return 0


def oracle(settings, generated, run, budget, prompt=PROMPT):
    """Returns pi after a prefix by definition, the distribution of the reference, and the copy tokens."""
    draft, reference = Toy(1), Toy(2)
    chunks = [reference.tokens(d.text) for d in prompt.context]
    before = [generated[:i] for i in range(len(generated) + 1)]
    now = naive_copies(chunks, generated, run, budget)
    ever = {z for part in before for z in naive_copies(chunks, part, run, budget)}
    view = reference_prompt(prompt, settings.view, frozenset(ever if now else ()))
    q = softmax(draft.logits(draft.encode(prompt), generated), settings.temperature or 1)
    p = softmax(reference.logits(reference.encode(view), generated), settings.temperature or 1)
    copies = [np.array(sorted(tokens), np.int64) for tokens in now.values()]
    return target_distribution(q, p, settings.rule.deferred(q, p, copies)), p, copies


TOKEN_COPY = DeferralRule("token_copy", 0.3, 1.5)


@pytest.mark.parametrize(
    ("rule", "view", "budget"),
    [
        (TOKEN_COPY, "ablated", 3),
        (DeferralRule("paper"), "same", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (TOKEN_COPY, "ablated", None),
                (TOKEN_COPY, "same", 3),
                (TOKEN_COPY, "summary", 3),
                (TOKEN_COPY, "guarded", 3),
                (DeferralRule("paper"), "ablated", 3),
                (DeferralRule("excess", 0.2, 2.0), "ablated", 3),
                (DeferralRule("opt"), "ablated", 3),
            ]
        ),
    ],
)
def test_probability_of_every_answer_equals_the_mixture(rule, view, budget, monkeypatch):
    settings = DecodingSettings(rule, view, gamma=2, bonus="mixture", temperature=0.8, max_tokens=3)
    models = {"draft": Toy(1), "reference": Toy(2)}
    found = answer_distribution(lambda: opened(settings, budget=budget, **models), monkeypatch)
    assert sum(found.values()) == pytest.approx(1)
    for generated in itertools.product(range(V), repeat=3):
        parts = [oracle(settings, list(generated[:i]), 1, budget)[0][generated[i]] for i in range(3)]
        assert found.get(generated, 0.0) == pytest.approx(np.prod(parts), abs=1e-9), generated


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [3])
def test_block_size_does_not_change_the_distribution(gamma, monkeypatch):
    settings = DecodingSettings(
        DeferralRule("token_copy", 0.3, 1.5), "ablated", gamma, "mixture", temperature=1.0, max_tokens=3
    )
    found = answer_distribution(lambda: opened(settings), monkeypatch)
    one = DecodingSettings(settings.rule, "ablated", 1, "mixture", temperature=1.0, max_tokens=3)
    expected = answer_distribution(lambda: opened(one), monkeypatch)
    assert {k: v for k, v in found.items() if v > 1e-15} == pytest.approx(expected, abs=1e-12)


def test_per_token_bound_holds_while_a_chunk_is_copied():
    """The copy rule is necessary: with a looser bound, pi exceeds the tighter bound."""
    tight, loose = (
        DecodingSettings(DeferralRule("token_copy", 0.9, bound), "ablated", 2, "mixture", temperature=0.8)
        for bound in (1.5, 9.9)
    )
    checked = beyond = 0
    for generated in itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(6))):
        pi, p, copies = oracle(tight, list(generated), 2, 3)
        other = oracle(loose, list(generated), 2, 3)[0]
        for tokens in copies:
            checked += len(tokens)
            assert (pi[tokens] <= 2.5 * p[tokens] + 1e-12).all()
            beyond += int((other[tokens] > 2.5 * p[tokens]).sum())
    assert checked > 500 and beyond > 20


@pytest.mark.parametrize("bonus", ["verifier", "mixture"])
def test_full_deferral_gives_the_reference_distribution(bonus):
    _assert_distribution(DecodingSettings(Always(whose=True), "same", 3, bonus, 1.0, max_tokens=3), Toy(2))


def test_no_deferral_gives_the_draft_distribution():
    _assert_distribution(DecodingSettings(Always(whose=False), "same", 3, "mixture", 1.0, max_tokens=3), Toy(1))


def _assert_distribution(settings, model, samples=2500):
    """Chi-square test of all three-letter answers against the model's distribution. Another model fails the test."""
    counts = defaultdict(int)
    models = {"draft": Toy(1), "reference": Toy(2)}
    for seed in range(samples):
        counts[finished(opened(settings, seed=seed, **models))] += 1
    answers = sorted(itertools.product(range(V), repeat=3))
    distribution = np.array([_chance(model, answer) for answer in answers])
    other = np.array([_chance(Toy(9), answer) for answer in answers])
    seen = np.array([counts[answer] for answer in answers])
    assert _p_value(seen, distribution) > 0.01
    assert _p_value(seen, other) < 1e-9


def _chance(model, answer):
    prompt_tokens = model.encode(PROMPT)
    return float(np.prod([softmax(model.logits(prompt_tokens, answer[:i]))[v] for i, v in enumerate(answer)]))


def _p_value(seen, distribution):
    """Cells with fewer than five expected are merged."""
    expected = distribution * seen.sum()
    large = expected >= 5
    observed = [*seen[large], seen[~large].sum()]
    return chisquare(observed, [*expected[large], expected[~large].sum()]).pvalue


@pytest.mark.parametrize("whose", [True, False])
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_greedy_answers_equal_those_of_one_model(whose, gamma):
    for seed in range(20):
        draft, reference = Toy(seed), Toy(100 + seed)
        settings = DecodingSettings(Always(whose=whose), "same", gamma, "mixture", max_tokens=30)
        model, generated = (reference if whose else draft), []
        for _ in range(30):
            generated.append(int(model.logits(model.encode(PROMPT), generated).argmax()))
        assert finished(opened(settings, draft=draft, reference=reference)) == tuple(generated)


@pytest.mark.parametrize("view", ["same", "ablated"])
def test_greedy_answers_maximize_pi(view):
    settings = DecodingSettings(DeferralRule("token_copy", 0.3, 1.5), view, 3, "mixture", max_tokens=12)
    generated = finished(opened(settings, run=2, budget=4, share=1.0))
    for i, token in enumerate(generated):
        assert token == int(oracle(settings, list(generated[:i]), 2, 4)[0].argmax())


def test_reference_contexts_are_read_only_after_a_copy():
    class Reciter(Toy):
        def logits(self, prompt, answer):
            # for any context
            return 9.0 * np.eye(V)[self.tokens("abca")[len(answer) % 4]]

    settings = DecodingSettings(DeferralRule(), "ablated", 2, max_tokens=4)
    free = opened(settings, draft=Reciter(), reference=Reciter(), run=5, budget=None)
    finished(free)
    assert free.stats.contexts == 0 and free.reference.begun == [" a abca cbb "]
    seen = opened(settings, draft=Reciter(), reference=Reciter(), run=2, budget=None)
    finished(seen)
    assert seen.stats.contexts == 1
    assert seen.reference.begun[1] == " a cbb "


def test_copied_chunks_stay_removed_while_any_chunk_is_copied():
    state_copied = []
    settings = DecodingSettings(DeferralRule(), "ablated", 2, "mixture", 1.0, max_tokens=12)
    for seed in range(30):
        decoding = opened(settings, seed=seed, run=2, budget=None)
        finished(decoding)
        state_copied.append(decoding.state.copied)
        open_views = decoding._views._open
        assert len(open_views) <= module.MAX_VIEWS
    assert frozenset({0, 1}) in state_copied


def test_end_token_ends_the_answer_and_is_not_in_its_text():
    draft, reference = Toy(1, end="c"), Toy(2, end="c")
    settings = DecodingSettings(DeferralRule("opt"), "same", 4, temperature=1.0, max_tokens=50)
    lengths = set()
    for seed in range(40):
        decoding = opened(settings, seed=seed, draft=draft, reference=reference)
        generated = finished(decoding)
        assert 2 not in generated[:-1]
        assert decoding.answer == [t for t in generated if t != 2]
        assert (generated[-1] == 2) or len(generated) == 50
        lengths.add(len(generated))
    assert len(lengths) > 5


@pytest.mark.parametrize("most", [1, 2, 5, 6])
def test_length_of_an_answer_is_limited(most):
    for gamma in (1, 4, 9):
        assert len(finished(opened(DecodingSettings(DeferralRule(), "same", gamma, max_tokens=most)))) == most


def test_smaller_context_limit_of_the_two_models_applies():
    prompt_tokens = len(Toy(1).encode(PROMPT))
    settings = DecodingSettings(DeferralRule("opt"), "same", 4)
    for limits in ((prompt_tokens + 3, None), (None, prompt_tokens + 3), (prompt_tokens + 3, prompt_tokens + 9)):
        draft, reference = Toy(1, limit=limits[0]), Toy(2, limit=limits[1])
        assert len(finished(opened(settings, draft=draft, reference=reference))) == 3


@pytest.mark.parametrize("which", ["draft", "reference"])
def test_prompt_beyond_a_model_limit_is_refused(which):
    with pytest.raises(
        BackendError, match=r"the prompt has 12 tokens, and a model of the cascade reads at most 12; use fewer"
    ):
        opened(DecodingSettings(DeferralRule()), **{which: Toy(3, limit=12)})


def test_empty_context_gives_an_answer():
    empty = Prompt("a", (), "")
    decoding = opened(DecodingSettings(DeferralRule(), max_tokens=8), empty)
    assert len(finished(decoding)) == 8
    assert decoding.stats.contexts == 0


def test_stats_are_consistent():
    decoding = opened(
        DecodingSettings(DeferralRule(), "ablated", 3, temperature=1.0, max_tokens=40), run=2, budget=None
    )
    finished(decoding)
    f = decoding.stats
    assert f.tokens == 40
    assert f.accepted <= f.judged <= f.drafted
    assert f.passes >= 40 / 4
    prompt = len(Toy().encode(PROMPT))
    assert f.flops_reference == prompt + 40  # a toy model uses one unit per token
    assert f.flops_paper == 2 * prompt + 40
    read = decoding._draft.flops + sum(reading.flops for reading in decoding._views._open.values())
    assert f.flops_honest >= read > 0


class TestReferencePrompt:
    def test_same_is_unchanged(self):
        assert reference_prompt(PROMPT, "same", frozenset({0})) is PROMPT

    @pytest.mark.parametrize("view", ["ablated", "summary", "guarded"])
    def test_unchanged_while_nothing_is_copied(self, view):
        assert reference_prompt(PROMPT, view, frozenset()) is PROMPT

    def test_ablated_removes_copied_documents(self):
        assert reference_prompt(PROMPT, "ablated", frozenset({0})).context == CONTEXT[1:]

    def test_guarded_adds_an_instruction(self):
        prompt = reference_prompt(Prompt("q", CONTEXT, "Be brief."), "guarded", frozenset({1}))
        assert prompt.context == CONTEXT
        assert prompt.instructions.startswith("Be brief. Tell it in words of your own")

    def test_summary_replaces_a_document_by_its_topics(self):
        text = "The north bridge is closed until May. From May the toll of the north bridge is doubled."
        prompt = reference_prompt(Prompt("q", (Document("x", text), CONTEXT[0]), ""), "summary", frozenset({0}))
        assert prompt.context[0].text == "A document about: north bridge, toll."
        assert prompt.context[0].id == "x" and prompt.context[1] == CONTEXT[0]
