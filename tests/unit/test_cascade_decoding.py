"""The laws of whole answers, on models of a few letters whose every answer can be enumerated."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import chisquare

from casemate.cascade import Rule, mixture, softmax
from casemate.copying import Alphabet, Copying
from casemate.defenses.cascade import decoding as module
from casemate.defenses.cascade.decoding import Decoding, Method, shown
from casemate.errors import BackendError
from casemate.types import Document, Prompt
from tests.unit.toy_models import Toy

CONTEXT = (Document("a", "abca"), Document("b", "cbb"))
PROMPT = Prompt("a", CONTEXT, "")
LIMITS = {"run": 1, "budget": 3, "share": 1.0}
V = 4  # letters of a toy, the last a space, which counts as nothing when copies are looked for


@dataclass(frozen=True)
class Always(Rule):
    """The reference settles everything, or the draft."""

    whose: bool = True

    def deferred(self, q, p, copies=()):
        return np.full(len(q), self.whose)


def opened(method, prompt=PROMPT, seed=0, draft=None, reference=None, **limits):
    models = draft or Toy(1), reference or Toy(2)
    alphabet = Alphabet(models[1].vocabulary)
    chunks = [alphabet.read(models[1].tokens(d.text)) for d in prompt.context]
    copying = Copying(chunks, **(LIMITS | limits))
    return Decoding(models, prompt, method, copying, alphabet, np.random.default_rng(seed))


def finished(decoding):
    while not decoding.finished:
        decoding.block()
    return tuple(decoding.said)


def outcomes(make, monkeypatch):
    """The exact law of a decoding's answers: every draw is made in every way, and the chances multiplied."""
    law = defaultdict(float)
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

        monkeypatch.setattr(module, "draw", chosen)
        law[finished(make())] += chance
    return dict(law)


def naive_copies(chunks, said, run, budget):
    """For each chunk that is being copied, its copy tokens: by trying all substrings."""
    said = [token for token in said if token != V - 1]

    def quoted(chunk):
        spans = [(i, j) for i in range(len(said)) for j in range(i + 3, len(said) + 1)]
        return len({t for i, j in spans if _occurs(said[i:j], chunk) for t in range(i, j)})

    found = {}
    for z, chunk in enumerate(chunks):
        if budget is not None and (quoted(chunk) >= budget or _common(said, chunk) >= max(budget, len(chunk))):
            found[z] = set(chunk)
        elif len(said) >= run and _occurs(said[len(said) - run :], chunk):
            found[z] = {v for v in range(V) if _occurs([*said[len(said) - run :], v], chunk)}
    return found


def _occurs(part, text):
    return any(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


def _common(said, chunk):
    """Length of the longest common subsequence, by trying all of the chunk's."""
    for size in range(len(chunk), 0, -1):
        for part in itertools.combinations(chunk, size):
            rest = iter(said)
            if all(token in rest for token in part):
                return size
    return 0


def oracle(method, said, run, budget, prompt=PROMPT):
    """Pi after a beginning of an answer, from its definition; and the reference's law and the copy tokens."""
    draft, reference = Toy(1), Toy(2)
    chunks = [reference.tokens(d.text) for d in prompt.context]
    before = [said[:i] for i in range(len(said) + 1)]
    now = naive_copies(chunks, said, run, budget)
    ever = {z for part in before for z in naive_copies(chunks, part, run, budget)}
    view = shown(prompt, method.view, frozenset(ever if now else ()))
    q = softmax(draft.logits(draft.encode(prompt), said), method.temperature or 1)
    p = softmax(reference.logits(reference.encode(view), said), method.temperature or 1)
    copies = [np.array(sorted(tokens), np.int64) for tokens in now.values()]
    return mixture(q, p, method.rule.deferred(q, p, copies)), p, copies


TOKEN_COPY = Rule("token_copy", 0.3, 1.5)


@pytest.mark.parametrize(
    ("rule", "view", "budget"),
    [
        (TOKEN_COPY, "ablated", 3),
        (Rule("paper"), "same", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (TOKEN_COPY, "ablated", None),
                (TOKEN_COPY, "same", 3),
                (TOKEN_COPY, "summary", 3),
                (TOKEN_COPY, "guarded", 3),
                (Rule("paper"), "ablated", 3),
                (Rule("excess", 0.2, 2.0), "ablated", 3),
                (Rule("opt"), "ablated", 3),
            ]
        ),
    ],
)
def test_every_answer_is_as_likely_as_the_mixture_has_it(rule, view, budget, monkeypatch):
    method = Method(rule, view, gamma=2, bonus="mixture", temperature=0.8, most=3)
    models = {"draft": Toy(1), "reference": Toy(2)}
    found = outcomes(lambda: opened(method, budget=budget, **models), monkeypatch)
    assert sum(found.values()) == pytest.approx(1)
    for said in itertools.product(range(V), repeat=3):
        parts = [oracle(method, list(said[:i]), 1, budget)[0][said[i]] for i in range(3)]
        assert found.get(said, 0.0) == pytest.approx(np.prod(parts), abs=1e-9), said


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [3])
def test_the_size_of_a_block_changes_no_law(gamma, monkeypatch):
    method = Method(Rule("token_copy", 0.3, 1.5), "ablated", gamma, "mixture", temperature=1.0, most=3)
    found = outcomes(lambda: opened(method), monkeypatch)
    one = Method(method.rule, "ablated", 1, "mixture", temperature=1.0, most=3)
    expected = outcomes(lambda: opened(one), monkeypatch)
    assert {k: v for k, v in found.items() if v > 1e-15} == pytest.approx(expected, abs=1e-12)


def test_the_per_token_bound_holds_wherever_a_chunk_is_copied():
    """And it would not without the rule's part on copies: with a bound far off, pi goes beyond the near one."""
    near, far = (
        Method(Rule("token_copy", 0.9, bound), "ablated", 2, "mixture", temperature=0.8) for bound in (1.5, 9.9)
    )
    checked = beyond = 0
    for said in itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(6))):
        pi, p, copies = oracle(near, list(said), 2, 3)
        other = oracle(far, list(said), 2, 3)[0]
        for tokens in copies:
            checked += len(tokens)
            assert (pi[tokens] <= 2.5 * p[tokens] + 1e-12).all()
            beyond += int((other[tokens] > 2.5 * p[tokens]).sum())
    assert checked > 500 and beyond > 20


@pytest.mark.parametrize("bonus", ["verifier", "mixture"])
def test_with_all_deferred_the_answers_are_the_references(bonus):
    _assert_law(Method(Always(whose=True), "same", 3, bonus, 1.0, most=3), Toy(2))


def test_with_none_deferred_the_answers_are_the_drafts():
    _assert_law(Method(Always(whose=False), "same", 3, "mixture", 1.0, most=3), Toy(1))


def _assert_law(method, model, samples=2500):
    """Chi-square of all answers of three letters against the model's own law; and it would notice another model."""
    counts = defaultdict(int)
    models = {"draft": Toy(1), "reference": Toy(2)}
    for seed in range(samples):
        counts[finished(opened(method, seed=seed, **models))] += 1
    answers = sorted(itertools.product(range(V), repeat=3))
    law = np.array([_chance(model, answer) for answer in answers])
    other = np.array([_chance(Toy(9), answer) for answer in answers])
    seen = np.array([counts[answer] for answer in answers])
    assert _p_value(seen, law) > 0.01
    assert _p_value(seen, other) < 1e-9


def _chance(model, answer):
    given = model.encode(PROMPT)
    return float(np.prod([softmax(model.logits(given, answer[:i]))[v] for i, v in enumerate(answer)]))


def _p_value(seen, law):
    """Cells of fewer than five expected are put together."""
    expected = law * seen.sum()
    large = expected >= 5
    observed = [*seen[large], seen[~large].sum()]
    return chisquare(observed, [*expected[large], expected[~large].sum()]).pvalue


@pytest.mark.parametrize("whose", [True, False])
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_greedy_answers_are_those_of_one_model_token_by_token(whose, gamma):
    for seed in range(20):
        draft, reference = Toy(seed), Toy(100 + seed)
        method = Method(Always(whose=whose), "same", gamma, "mixture", most=30)
        model, said = (reference if whose else draft), []
        for _ in range(30):
            said.append(int(model.logits(model.encode(PROMPT), said).argmax()))
        assert finished(opened(method, draft=draft, reference=reference)) == tuple(said)


@pytest.mark.parametrize("view", ["same", "ablated"])
def test_greedy_answers_are_the_likeliest_of_pi_token_by_token(view):
    method = Method(Rule("token_copy", 0.3, 1.5), view, 3, "mixture", most=12)
    said = finished(opened(method, run=2, budget=4, share=1.0))
    for i, token in enumerate(said):
        assert token == int(oracle(method, list(said[:i]), 2, 4)[0].argmax())


def test_contexts_are_read_when_a_chunk_is_being_copied_and_not_before():
    class Reciter(Toy):
        def logits(self, prompt, answer):
            # whatever it sees
            return 9.0 * np.eye(V)[self.tokens("abca")[len(answer) % 4]]

    method = Method(Rule(), "ablated", 2, most=4)
    free = opened(method, draft=Reciter(), reference=Reciter(), run=5, budget=None)
    finished(free)
    assert free.figures.contexts == 0 and free.reference.begun == [" a abca cbb "]
    seen = opened(method, draft=Reciter(), reference=Reciter(), run=2, budget=None)
    finished(seen)
    assert seen.figures.contexts == 1
    assert seen.reference.begun[1] == " a cbb "


def test_a_chunk_once_copied_is_left_out_whenever_one_is_copied():
    state_copied = []
    method = Method(Rule(), "ablated", 2, "mixture", 1.0, most=12)
    for seed in range(30):
        decoding = opened(method, seed=seed, run=2, budget=None)
        finished(decoding)
        state_copied.append(decoding.state.copied)
        held = decoding._views._open
        assert len(held) <= module.KEPT_VIEWS
    assert frozenset({0, 1}) in state_copied


def test_an_end_ends_the_answer_and_is_no_part_of_its_text():
    draft, reference = Toy(1, end="c"), Toy(2, end="c")
    method = Method(Rule("opt"), "same", 4, temperature=1.0, most=50)
    lengths = set()
    for seed in range(40):
        decoding = opened(method, seed=seed, draft=draft, reference=reference)
        said = finished(decoding)
        assert 2 not in said[:-1]
        assert decoding.answer == [t for t in said if t != 2]
        assert (said[-1] == 2) or len(said) == 50
        lengths.add(len(said))
    assert len(lengths) > 5


@pytest.mark.parametrize("most", [1, 2, 5, 6])
def test_an_answer_is_never_longer_than_allowed(most):
    for gamma in (1, 4, 9):
        assert len(finished(opened(Method(Rule(), "same", gamma, most=most)))) == most


def test_the_shorter_limit_of_the_two_models_counts():
    given = len(Toy(1).encode(PROMPT))
    method = Method(Rule("opt"), "same", 4)
    for limits in ((given + 3, None), (None, given + 3), (given + 3, given + 9)):
        draft, reference = Toy(1, limit=limits[0]), Toy(2, limit=limits[1])
        assert len(finished(opened(method, draft=draft, reference=reference))) == 3


@pytest.mark.parametrize("which", ["draft", "reference"])
def test_a_prompt_that_is_too_long_for_a_model_is_refused(which):
    with pytest.raises(BackendError, match=r"the prompt has 12 tokens, and a model of the cascade reads 12; give it"):
        opened(Method(Rule()), **{which: Toy(3, limit=12)})


def test_without_context_it_answers_from_none():
    empty = Prompt("a", (), "")
    decoding = opened(Method(Rule(), most=8), empty)
    assert len(finished(decoding)) == 8
    assert decoding.figures.contexts == 0


def test_figures_add_up():
    decoding = opened(Method(Rule(), "ablated", 3, temperature=1.0, most=40), run=2, budget=None)
    finished(decoding)
    f = decoding.figures
    assert f.tokens == 40
    assert f.accepted <= f.judged <= f.drafted
    assert f.passes >= 40 / 4
    prompt = len(Toy().encode(PROMPT))
    assert f.flops_reference == prompt + 40  # a toy's cost is a unit for each token
    assert f.flops_paper == 2 * prompt + 40
    read = decoding._draft.flops + sum(reading.flops for reading in decoding._views._open.values())
    assert f.flops_honest >= read > 0


class TestShown:
    def test_same_shows_all(self):
        assert shown(PROMPT, "same", frozenset({0})) is PROMPT

    @pytest.mark.parametrize("view", ["ablated", "summary", "guarded"])
    def test_nothing_changes_while_nothing_is_copied(self, view):
        assert shown(PROMPT, view, frozenset()) is PROMPT

    def test_ablated_leaves_out(self):
        assert shown(PROMPT, "ablated", frozenset({0})).context == CONTEXT[1:]

    def test_guarded_says_so(self):
        prompt = shown(Prompt("q", CONTEXT, "Be brief."), "guarded", frozenset({1}))
        assert prompt.context == CONTEXT
        assert prompt.instructions.startswith("Be brief. Tell it in words of your own")

    def test_summary_tells_what_it_is_about_and_no_sentence(self):
        text = "The north bridge is closed until May. From May the toll of the north bridge is doubled."
        prompt = shown(Prompt("q", (Document("x", text), CONTEXT[0]), ""), "summary", frozenset({0}))
        assert prompt.context[0].text == "A document about: north bridge, toll."
        assert prompt.context[0].id == "x" and prompt.context[1] == CONTEXT[0]
