"""Each feature against an independent definition, and its invariances."""

from __future__ import annotations

import math
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import f

from casemate.guard.calibration import closeness
from casemate.guard.calibration.closeness import (
    COPY_SIMILARITY,
    FEATURES,
    LOOKAHEAD,
    MAX_SPACING,
    NEXT_DOCUMENTS,
    FeatureExtractor,
    _spacing,
    _stem_set,
    unique_sources,
)
from casemate.text.tokens import STOP_WORDS, stem
from casemate.types import Document, Hit, Retrieval, SimilarityStats
from tests.fakes import WORDS, BagOfWords

VOCABULARY = [*WORDS, "the", "of", "tested", "tests", "policies", "walking"]
SIMILARITY, GAP, DEPTH, SPACING, PHRASES, MARGIN = range(6)


def spacing_p(s):
    """Returns the p-value of the best score by normalized spacings (Renyi 1953), with the F distribution of SciPy."""
    D = np.arange(1, len(s)) * -np.diff(s)
    if not D[1:].sum():
        return 0.0 if D[0] else 1.0
    return float(f.sf(D[0] / D[1:].mean(), 2, 2 * (len(D) - 1)))


def retrieval_of(*hits, exhausted=False, similarity_stats=None):
    """A retrieval of hits (source, score, text), in decreasing order of score."""
    made = tuple(Hit(Document(f"{s}#{i}", text, source=s), score) for i, (s, score, text) in enumerate(hits))
    return Retrieval(made, similarity_stats or SimilarityStats(1000, 0.1, 0.05), exhausted)


def statistics(scores):
    return SimilarityStats(len(scores), float(np.mean(scores)), float(np.std(scores)))


def naive(question, source, retrieval, out):
    """Returns the six features by their definitions, without optimization."""
    tokens = lambda text: re.findall(r"\w+", text.lower())  # noqa: E731
    content = lambda text: {stem(w) for w in tokens(text) if w not in STOP_WORDS}  # noqa: E731
    runs = lambda text: {tuple(tokens(text)[i : i + 4]) for i in range(len(tokens(text)) - 3)}  # noqa: E731
    at = min(i for i, h in enumerate(retrieval.hits) if h.document.source == source)
    lower = [i for i, h in enumerate(retrieval.hits) if i > at and h.document.source not in {source, *out}][:LOOKAHEAD]
    if len(lower) < LOOKAHEAD and not retrieval.exhausted:
        return None
    end = lower[-1] if len(lower) == LOOKAHEAD else len(retrieval.hits)
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
        return not a | b or len(a & b) / len(a | b) >= COPY_SIMILARITY

    rest = [o for o in others if not alike(o)]
    s = own[0].score
    scores = [max(h.score for h in others[o]) for o in rest]
    n, mean, std = retrieval.similarity_stats.n, retrieval.similarity_stats.mean, retrieval.similarity_stats.std
    others_mean = (n * mean - s) / (n - 1)
    others_var = (n * (std**2 + mean**2) - s**2) / (n - 1) - others_mean**2
    p = spacing_p([s, *scores]) if len(scores) > NEXT_DOCUMENTS else 1.0
    shared = len(runs(question) & set().union(*(runs(h.document.text) for h in own)))
    asked = content(question)
    return (
        s,
        s - np.mean(scores[:NEXT_DOCUMENTS]) if scores else s,
        (s - others_mean) / math.sqrt(others_var),
        min(-math.log10(p), MAX_SPACING) if p else MAX_SPACING,
        math.log(1 + shared),
        math.log(1 + max(0, len(asked & words) - max((len(asked & bags[o]) for o in rest), default=0))),
    )


@st.composite
def retrievals(draw, least=LOOKAHEAD + 2, most=24):
    """Hits of few sources with short texts, so that phrases are shared and copies occur."""
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
    return retrieval_of(*hits, exhausted=exhausted, similarity_stats=statistics([s / 1000 for s in scores] * 2))


questions = st.lists(st.sampled_from(VOCABULARY), max_size=16).map(" ".join)


@settings(max_examples=100)
@given(questions, retrievals(), st.sets(st.integers(0, 24), max_size=4))
def test_features_equal_their_definitions(question, retrieval, out):
    out = {f"s{i}" for i in out}
    for source in unique_sources(retrieval.hits):
        expected = naive(question, source, retrieval, out)
        figures = FeatureExtractor(question).extract(source, retrieval, out)
        if expected is None:
            assert figures is None
        else:
            assert figures == pytest.approx(expected, abs=1e-9)
            assert len(figures) == len(FEATURES)


def test_depth_equals_algorithm_1_on_a_scan():
    rng = np.random.default_rng(1)
    S = np.sort(rng.normal(0.1, 0.05, 400))[::-1]
    retrieval = retrieval_of(
        *[(f"s{i}", float(s), f"word{i}") for i, s in enumerate(S[:20])], similarity_stats=statistics(S)
    )
    for i in range(5):
        rest = np.delete(S, i)
        depth = FeatureExtractor("x").extract(f"s{i}", retrieval)[DEPTH]
        assert depth == pytest.approx((S[i] - rest.mean()) / rest.std())


@settings(max_examples=100)
@given(st.lists(st.integers(-1000, 1000), min_size=NEXT_DOCUMENTS + 2, max_size=20))
def test_spacing_equals_the_spacing_test(scores):
    s = [x / 1000 for x in sorted(scores, reverse=True)]
    p = spacing_p(s)
    if s[0] - s[1] < 1e-9:
        assert _spacing(s) == 0 == pytest.approx(-math.log10(p))
    else:
        assert _spacing(s) == pytest.approx(min(-math.log10(p), MAX_SPACING) if p else MAX_SPACING, abs=1e-6)


@pytest.mark.parametrize("count", range(NEXT_DOCUMENTS + 2))
def test_too_few_scores_have_no_spacing(count):
    assert _spacing([0.9, 0.5, 0.4, 0.3][:count]) == 0


def test_spacing_above_equal_documents_is_large_and_finite():
    """The sum of their spacings is 0 up to rounding of either sign. Rounding must not decide the result."""
    for low in (0.1, 0.3, 1 / 3, 0.7):
        assert _spacing([0.9, *[low] * 7]) == MAX_SPACING
        assert _spacing([low] * 8) == 0


ELSEWHERE = [(f"o{i}", 0.5 - i / 50, f"{WORDS[i]} only{i} grove{i}") for i in range(10)]
TEXT = "amber birch cedar delta ember flint grove heron inlet jetty knoll larch"


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("change", ["", "", "quartz", "quartz pearl"])
def test_copies_do_not_reduce_closeness(copies, change):
    """A copy under another name is as close and shares as many words, but does not explain the similarity."""
    own = ("d", 0.95, TEXT)
    near = [(f"copy{i}", 0.94 - i / 1000, f"{TEXT} {change}") for i in range(copies)]
    alone, with_copies = retrieval_of(own, *ELSEWHERE), retrieval_of(own, *near, *ELSEWHERE)
    question = FeatureExtractor(TEXT)
    before, after = question.extract("d", alone), question.extract("d", with_copies)
    assert after[GAP] >= before[GAP]
    assert after[MARGIN] >= before[MARGIN]
    assert after[SPACING] > 1


def test_document_of_the_same_topic_reduces_closeness():
    own, other = (
        ("d", 0.95, TEXT),
        ("o", 0.94, "amber birch cedar delta ember only other words that no copy would have"),
    )
    alone, with_same_topic = retrieval_of(own, *ELSEWHERE), retrieval_of(own, other, *ELSEWHERE)
    question = FeatureExtractor(TEXT)
    assert question.extract("d", with_same_topic)[GAP] < question.extract("d", alone)[GAP]
    assert question.extract("d", with_same_topic)[MARGIN] < question.extract("d", alone)[MARGIN]


@settings(max_examples=100)
@given(questions, retrievals(), st.data())
def test_excluded_sources_do_not_affect_features(question, retrieval, data):
    """Features with an excluded source equal those of a ranking without it."""
    excluded = data.draw(st.sampled_from(unique_sources(retrieval.hits)))
    without = Retrieval(
        tuple(h for h in retrieval.hits if h.document.source != excluded),
        retrieval.similarity_stats,
        retrieval.exhausted,
    )
    for source in unique_sources(without.hits):
        assert FeatureExtractor(question).extract(source, retrieval, {excluded}) == FeatureExtractor(question).extract(
            source, without
        )


@settings(max_examples=100)
@given(questions, retrievals(most=40), st.data())
def test_excluded_sources_ranked_above_do_not_affect_features(question, retrieval, data):
    order = unique_sources(retrieval.hits)
    place = data.draw(st.integers(1, len(order)))
    below = Retrieval(
        tuple(h for h in retrieval.hits if h.document.source not in order[: place - 1]),
        retrieval.similarity_stats,
        retrieval.exhausted,
    )
    source = order[place - 1]
    assert FeatureExtractor(question).extract(source, retrieval, order[: place - 1]) == FeatureExtractor(
        question
    ).extract(source, below)


@settings(max_examples=100)
@given(st.lists(st.integers(-1000, 1000), min_size=LOOKAHEAD + 3, max_size=24), st.data())
def test_exclusion_of_another_source_does_not_reduce_the_gap(scores, data):
    """The next document in its place is not closer."""
    retrieval = retrieval_of(*[(f"s{i}", s / 1000, f"word{i}") for i, s in enumerate(sorted(scores, reverse=True))])
    excluded = data.draw(st.sampled_from(unique_sources(retrieval.hits)))
    for source in unique_sources(retrieval.hits):
        before, after = (FeatureExtractor("word0").extract(source, retrieval, out) for out in ((), {excluded}))
        if source != excluded and before and after:
            assert after[GAP] >= before[GAP] - 1e-12


def test_exclusion_of_another_source_rarely_reduces_the_margin():
    """It can: the hit that enters at the end may share more of the question's words than the hits before it.

    Therefore the guard excludes withheld documents from every comparison. Measured here: 1 %.
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
        retrieval, question = retrieval_of(*hits, similarity_stats=statistics(S)), FeatureExtractor(asked)
        order = unique_sources(retrieval.hits)
        for excluded in order[1:8]:
            judged += 1
            before = question.extract(order[0], retrieval)
            lower += question.extract(order[0], retrieval, {excluded})[MARGIN] < before[MARGIN]
    assert judged == 280
    assert lower / judged < 0.03


def test_features_use_all_chunks_of_a_source_within_the_lookahead():
    other = [(f"o{i}", 0.5 - i / 100, "nothing shared") for i in range(12)]
    chunks = [("d", 0.9, "amber birch"), ("d", 0.495, "cedar delta ember flint"), ("d", 0.1, "grove heron")]
    retrieval = retrieval_of(*sorted(chunks + other, key=lambda h: -h[1]))
    figures = FeatureExtractor("amber birch cedar delta ember flint grove heron").extract("d", retrieval)
    assert figures[SIMILARITY] == 0.9
    assert figures[PHRASES] == pytest.approx(math.log(2))  # from the second chunk; phrases do not span chunks
    assert figures[MARGIN] == pytest.approx(math.log(7))  # the third is beyond the lookahead


def test_source_near_the_end_has_features_only_if_the_hits_are_exhausted():
    hits = [(f"s{i}", 0.9 - i / 100, f"word{i}") for i in range(LOOKAHEAD + 1)]
    question = FeatureExtractor("word1")
    assert question.extract("s0", retrieval_of(*hits)) is not None
    assert question.extract("s1", retrieval_of(*hits)) is None
    assert question.extract("s1", retrieval_of(*hits, exhausted=True)) is not None
    assert question.extract("unknown", retrieval_of(*hits, exhausted=True)) is None


def test_single_document_has_features():
    figures = FeatureExtractor("amber").extract(
        "d", retrieval_of(("d", 0.9, "amber"), exhausted=True, similarity_stats=SimilarityStats(1, 0.9, 0))
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
def test_adversarial_texts_have_finite_features(name):
    text = HOSTILE[name]
    for asked, held in ((text, TEXT), (TEXT, text), (text, text)):
        retrieval = retrieval_of(("d", 0.9, held), *ELSEWHERE)
        figures = FeatureExtractor(asked).extract("d", retrieval)
        assert np.isfinite(figures).all()
        assert figures[SIMILARITY] == 0.9
        assert min(figures[PHRASES], figures[MARGIN]) >= 0


def test_shared_words_ignore_case_and_punctuation():
    retrieval = retrieval_of(("d", 0.9, "Amber, birch; CEDAR (delta) — “ember”"), *ELSEWHERE)
    figures = FeatureExtractor("amber birch cedar delta ember?").extract("d", retrieval)
    assert figures[PHRASES] == pytest.approx(math.log(3))
    assert figures[MARGIN] > math.log(4)


def test_caches_are_bounded(monkeypatch):
    for i in range(3 * closeness.STEM_CACHE):
        _stem_set(f"word{i}")
    assert _stem_set.cache_info().currsize <= closeness.STEM_CACHE
    monkeypatch.setattr(closeness, "_STEMS", held := closeness._Stems())
    for i in range((1 << 17) + 10):
        held[f"w{i}"]
    assert len(held) < 1 << 17
    assert sys.getsizeof(held) < 1 << 24


@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_ascii_and_unicode_tokenization_agree(text):
    assert closeness._tokens.__wrapped__(text) == closeness._tokens.__wrapped__(f"{text} \u03b1")[:-1]


def test_labeled_question_in_a_document_is_excluded_from_phrases_and_margin():
    post = "Patient: amber birch cedar delta ember flint\nDoctor: grove heron iris jade"
    retrieval = retrieval_of(("d", 0.9, post), ("e", 0.5, "other words"), exhausted=True)

    def figures(question, *labels):
        return FeatureExtractor(question, labels).extract("d", retrieval)

    asked, pasted = "amber birch cedar delta ember flint", "grove heron iris jade"
    assert figures(asked, "Patient")[PHRASES:] == (0.0, 0.0)
    assert figures(asked)[PHRASES:] == pytest.approx((math.log(4), math.log(7)))
    assert figures(pasted, "Patient") == figures(pasted)
    assert figures(pasted)[PHRASES:] == pytest.approx((math.log(2), math.log(5)))
    assert figures(asked, "Patient")[:PHRASES] == figures(asked)[:PHRASES]


def test_labeled_question_is_excluded_from_all_chunks_of_a_document():
    chunks = [("d", 0.9, "Patient: amber birch cedar delta"), ("d", 0.8, "Doctor: grove heron"), ("e", 0.1, "other")]
    retrieval = retrieval_of(*chunks, exhausted=True)
    figures = FeatureExtractor("amber birch cedar delta grove", ("Patient",)).extract("d", retrieval)
    assert figures[PHRASES:] == pytest.approx((0.0, math.log(2)))
