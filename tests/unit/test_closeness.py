"""Each figure against a definition of its own, and what must not change it."""

from __future__ import annotations

import math
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casemate import closeness, stats
from casemate.closeness import ALIKE, CEILING, FEATURES, LOOKS, NEXT, Question, _known, _spacing, sources
from casemate.types import Background, Document, Hit, Retrieval
from casemate.words import STOP_WORDS, stem
from tests.fakes import WORDS, BagOfWords

VOCABULARY = [*WORDS, "the", "of", "tested", "tests", "policies", "walking"]
SIMILARITY, GAP, DEPTH, SPACING, PHRASES, MARGIN = range(6)


def found(*hits, exhausted=False, background=None):
    """Hits of (source, score, text), by decreasing score."""
    made = tuple(Hit(Document(f"{s}#{i}", text, source=s), score) for i, (s, score, text) in enumerate(hits))
    return Retrieval(made, background or Background(1000, 0.1, 0.05), exhausted)


def law(scores):
    return Background(len(scores), float(np.mean(scores)), float(np.std(scores)))


def naive(question, source, retrieval, out):
    """The six figures as their descriptions have them, without regard to speed."""
    tokens = lambda text: re.findall(r"\w+", text.lower())  # noqa: E731
    content = lambda text: {stem(w) for w in tokens(text) if w not in STOP_WORDS}  # noqa: E731
    runs = lambda text: {tuple(tokens(text)[i : i + 4]) for i in range(len(tokens(text)) - 3)}  # noqa: E731
    at = min(i for i, h in enumerate(retrieval.hits) if h.document.source == source)
    lower = [i for i, h in enumerate(retrieval.hits) if i > at and h.document.source not in {source, *out}][:LOOKS]
    if len(lower) < LOOKS and not retrieval.exhausted:
        return None
    end = lower[-1] if len(lower) == LOOKS else len(retrieval.hits)
    own = [h for h in retrieval.hits[at:end] if h.document.source == source]
    words = set().union(*(content(h.document.text) for h in own))
    others = {}
    for i in lower:
        others.setdefault(retrieval.hits[i].document.source, []).append(retrieval.hits[i])
    bags = {o: set().union(*(content(h.document.text) for h in hits)) for o, hits in others.items()}
    stops = lambda hits: any(w in STOP_WORDS for h in hits for w in tokens(h.document.text))  # noqa: E731
    marked = lambda bag, hits: bag | ({""} if stops(hits) else set())  # noqa: E731

    def alike(o):
        a, b = marked(words, own), marked(bags[o], others[o])
        return not a | b or len(a & b) / len(a | b) >= ALIKE

    rest = [o for o in others if not alike(o)]
    s = own[0].score
    scores = [max(h.score for h in others[o]) for o in rest]
    n, mean, std = retrieval.background.n, retrieval.background.mean, retrieval.background.std
    others_mean = (n * mean - s) / (n - 1)
    others_var = (n * (std**2 + mean**2) - s**2) / (n - 1) - others_mean**2
    p = stats.spacing_test([s, *scores], 1) if len(scores) > NEXT else 1.0
    shared = len(runs(question) & set().union(*(runs(h.document.text) for h in own)))
    asked = content(question)
    return (
        s,
        s - np.mean(scores[:NEXT]) if scores else s,
        (s - others_mean) / math.sqrt(others_var),
        min(-math.log10(p), CEILING) if p else CEILING,
        math.log(1 + shared),
        math.log(1 + max(0, len(asked & words) - max((len(asked & bags[o]) for o in rest), default=0))),
    )


@st.composite
def retrievals(draw, least=LOOKS + 2, most=24):
    """Hits of a few sources with texts of few words, so that phrases are shared and copies occur."""
    count = draw(st.integers(least, most))
    text = st.lists(st.sampled_from(VOCABULARY), max_size=12).map(" ".join)
    scores = sorted(draw(st.lists(st.integers(-900, 1000), min_size=count, max_size=count, unique=True)), reverse=True)
    texts = [draw(text) for _ in range(count)]
    for i in range(1, count):
        if draw(st.integers(0, 4)) == 0:
            texts[i] = texts[i - 1]
    names = [f"s{draw(st.integers(0, count))}" for _ in range(count)]
    exhausted = draw(st.booleans())
    hits = [(name, s / 1000, t) for name, s, t in zip(names, scores, texts, strict=True)]
    return found(*hits, exhausted=exhausted, background=law([s / 1000 for s in scores] * 2))


questions = st.lists(st.sampled_from(VOCABULARY), max_size=16).map(" ".join)


@settings(max_examples=100)
@given(questions, retrievals(), st.sets(st.integers(0, 24), max_size=4))
def test_the_figures_are_those_of_the_definitions(question, retrieval, out):
    out = {f"s{i}" for i in out}
    for source in sources(retrieval.hits):
        expected = naive(question, source, retrieval, out)
        figures = Question(question).figures(source, retrieval, out)
        if expected is None:
            assert figures is None
        else:
            assert figures == pytest.approx(expected, abs=1e-9)
            assert len(figures) == len(FEATURES)


def test_depth_is_algorithm_1_on_a_scan():
    rng = np.random.default_rng(1)
    S = np.sort(rng.normal(0.1, 0.05, 400))[::-1]
    retrieval = found(*[(f"s{i}", float(s), f"word{i}") for i, s in enumerate(S[:20])], background=law(S))
    for i in range(5):
        rest = np.delete(S, i)
        depth = Question("x").figures(f"s{i}", retrieval)[DEPTH]
        assert depth == pytest.approx((S[i] - rest.mean()) / rest.std())


@settings(max_examples=100)
@given(st.lists(st.integers(-1000, 1000), min_size=NEXT + 2, max_size=20))
def test_spacing_is_the_spacing_test(scores):
    s = [x / 1000 for x in sorted(scores, reverse=True)]
    p = stats.spacing_test(s, 1)
    if s[0] - s[1] < 1e-9:
        assert _spacing(s) == 0 == pytest.approx(-math.log10(p))
    else:
        assert _spacing(s) == pytest.approx(min(-math.log10(p), CEILING) if p else CEILING, abs=1e-6)


@pytest.mark.parametrize("count", range(NEXT + 2))
def test_too_few_scores_say_nothing_of_spacing(count):
    assert _spacing([0.9, 0.5, 0.4, 0.3][:count]) == 0


def test_spacing_above_documents_that_are_all_alike_is_large_and_finite():
    """The sum of their spacings is 0 but for rounding, of either sign: it must not be drawn by lot."""
    for low in (0.1, 0.3, 1 / 3, 0.7):
        assert _spacing([0.9, *[low] * 7]) == CEILING
        assert _spacing([low] * 8) == 0


ELSEWHERE = [(f"o{i}", 0.5 - i / 50, f"{WORDS[i]} only{i} grove{i}") for i in range(10)]
TEXT = "amber birch cedar delta ember flint grove heron inlet jetty knoll larch"


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("change", ["", "", "quartz", "quartz pearl"])
def test_copies_do_not_shrink_what_makes_a_document_stand_out(copies, change):
    """A copy under another name is as near and shares as many words; it must not explain the similarity away."""
    own = ("d", 0.95, TEXT)
    near = [(f"copy{i}", 0.94 - i / 1000, f"{TEXT} {change}") for i in range(copies)]
    alone, among = found(own, *ELSEWHERE), found(own, *near, *ELSEWHERE)
    question = Question(TEXT)
    before, after = question.figures("d", alone), question.figures("d", among)
    assert after[GAP] >= before[GAP]
    assert after[MARGIN] >= before[MARGIN]
    assert after[SPACING] > 1


def test_another_document_of_the_same_topic_does_shrink_it():
    own, other = (
        ("d", 0.95, TEXT),
        ("o", 0.94, "amber birch cedar delta ember only other words that no copy would have"),
    )
    alone, beside = found(own, *ELSEWHERE), found(own, other, *ELSEWHERE)
    question = Question(TEXT)
    assert question.figures("d", beside)[GAP] < question.figures("d", alone)[GAP]
    assert question.figures("d", beside)[MARGIN] < question.figures("d", alone)[MARGIN]


@settings(max_examples=100)
@given(questions, retrievals(), st.data())
def test_who_is_left_out_has_no_influence(question, retrieval, data):
    """The figures with a source left out of the comparison are those of a ranking in which it never was."""
    gone = data.draw(st.sampled_from(sources(retrieval.hits)))
    without = Retrieval(
        tuple(h for h in retrieval.hits if h.document.source != gone), retrieval.background, retrieval.exhausted
    )
    for source in sources(without.hits):
        assert Question(question).figures(source, retrieval, {gone}) == Question(question).figures(source, without)


@settings(max_examples=100)
@given(questions, retrievals(most=40), st.data())
def test_who_ranks_above_has_no_influence(question, retrieval, data):
    order = sources(retrieval.hits)
    place = data.draw(st.integers(1, len(order)))
    below = Retrieval(
        tuple(h for h in retrieval.hits if h.document.source not in order[: place - 1]),
        retrieval.background,
        retrieval.exhausted,
    )
    source = order[place - 1]
    assert Question(question).figures(source, retrieval, order[: place - 1]) == Question(question).figures(
        source, below
    )


@settings(max_examples=100)
@given(st.lists(st.integers(-1000, 1000), min_size=LOOKS + 3, max_size=24), st.data())
def test_taking_another_out_never_lowers_the_gap(scores, data):
    """Whoever comes next in his place is no nearer."""
    retrieval = found(*[(f"s{i}", s / 1000, f"word{i}") for i, s in enumerate(sorted(scores, reverse=True))])
    gone = data.draw(st.sampled_from(sources(retrieval.hits)))
    for source in sources(retrieval.hits):
        before, after = (Question("word0").figures(source, retrieval, out) for out in ((), {gone}))
        if source != gone and before and after:
            assert after[GAP] >= before[GAP] - 1e-12


def test_taking_another_out_hardly_ever_lowers_the_margin():
    """It can: the hit that comes into view at the end may share more of the question's words than those before it.

    That is why the guard leaves the withheld out of every comparison rather than to rely on it. Measured here: 1 %.
    """
    rng, embedder = np.random.default_rng(4), BagOfWords()
    texts = [" ".join(rng.choice(WORDS, 8)) + f" only{i}" for i in range(200)]
    E = embedder.embed(texts)
    lower = judged = 0
    for _ in range(40):
        own = int(rng.integers(200))
        asked = " ".join(rng.permutation(texts[own].split())[:6])
        S = E.astype(np.float64) @ embedder.embed([asked])[0]
        hits = [(f"s{i}", float(S[i]), texts[i]) for i in np.argsort(-S)[:20]]
        retrieval, question = found(*hits, background=law(S)), Question(asked)
        order = sources(retrieval.hits)
        for gone in order[1:8]:
            judged += 1
            before = question.figures(order[0], retrieval)
            lower += question.figures(order[0], retrieval, {gone})[MARGIN] < before[MARGIN]
    assert judged == 280
    assert lower / judged < 0.03


def test_a_source_is_judged_by_all_its_chunks_that_were_found_beside_what_it_is_compared_with():
    other = [(f"o{i}", 0.5 - i / 100, "nothing shared") for i in range(12)]
    chunks = [("d", 0.9, "amber birch"), ("d", 0.495, "cedar delta ember flint"), ("d", 0.1, "grove heron")]
    retrieval = found(*sorted(chunks + other, key=lambda h: -h[1]))
    figures = Question("amber birch cedar delta ember flint grove heron").figures("d", retrieval)
    assert figures[SIMILARITY] == 0.9
    assert figures[PHRASES] == pytest.approx(math.log(2))  # the second chunk's; phrases do not run over two chunks
    assert figures[MARGIN] == pytest.approx(math.log(7))  # and the third is too far down


def test_a_source_near_the_end_is_not_judged_unless_that_is_all_there_is():
    hits = [(f"s{i}", 0.9 - i / 100, f"word{i}") for i in range(LOOKS + 1)]
    question = Question("word1")
    assert question.figures("s0", found(*hits)) is not None
    assert question.figures("s1", found(*hits)) is None
    assert question.figures("s1", found(*hits, exhausted=True)) is not None
    assert question.figures("nobody", found(*hits, exhausted=True)) is None


def test_a_document_alone_in_the_index_is_judged():
    figures = Question("amber").figures(
        "d", found(("d", 0.9, "amber"), exhausted=True, background=Background(1, 0.9, 0))
    )
    assert figures == (0.9, 0.9, 0.0, 0.0, 0.0, pytest.approx(math.log(2)))


HOSTILE = {
    "empty": "",
    "blank": " \n\t ",
    "no words": "?!... --- §§",
    "only words without meaning": "the of and to",
    "long": "lorem ipsum " * 8_334,
    "one long word": "x" * 100_000,
    "Chinese": "患者于三月入院，经检查诊断为肺炎。患者于三月入院，经检查诊断为肺炎。",
    "Arabic": "دخل المريض المستشفى في شهر مارس",
    "emoji": "\U0001f9ea\U0001f469\u200d\U0001f52c" * 50,
    "half a surrogate pair": "amber \udcff birch",
    "controls": "".join(map(chr, range(1, 32))),
    "combining": "a\u0301" * 3_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_judged_like_others(name):
    text = HOSTILE[name]
    for asked, held in ((text, TEXT), (TEXT, text), (text, text)):
        retrieval = found(("d", 0.9, held), *ELSEWHERE)
        figures = Question(asked).figures("d", retrieval)
        assert np.isfinite(figures).all()
        assert figures[SIMILARITY] == 0.9
        assert min(figures[PHRASES], figures[MARGIN]) >= 0


def test_words_are_shared_whatever_their_case_and_punctuation():
    retrieval = found(("d", 0.9, "Amber, birch; CEDAR (delta) — “ember”"), *ELSEWHERE)
    figures = Question("amber birch cedar delta ember?").figures("d", retrieval)
    assert figures[PHRASES] == pytest.approx(math.log(3))
    assert figures[MARGIN] > math.log(4)


def test_what_is_remembered_of_texts_is_bounded(monkeypatch):
    for i in range(3 * closeness.CACHED):
        _known(f"word{i}")
    assert _known.cache_info().currsize <= closeness.CACHED
    monkeypatch.setattr(closeness, "_STEMS", held := closeness._Stems())
    for i in range((1 << 17) + 10):
        held[f"w{i}"]
    assert len(held) < 1 << 17
    assert sys.getsizeof(held) < 1 << 24


@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_plain_letters_are_read_as_all_others_are(text):
    assert closeness._tokens.__wrapped__(text) == closeness._tokens.__wrapped__(f"{text} \u03b1")[:-1]
