"""Quorum in scripts without spaces: each released phrase is contained as a whole in enough units."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.unspaced_texts import LANGUAGES
from casemate.guard.defenses.quorum import Quorum
from casemate.guard.defenses.quorum import release as release_module
from casemate.guard.defenses.quorum.keywords import AskedQuestion, Span, Word, best_sentences, read_text, statements
from casemate.guard.defenses.quorum.release import Release, Thresholds, compose
from casemate.text.tokens import WORD
from casemate.text.unspaced import Cluster, clusters, pieces, spans
from casemate.types import UNKNOWN
from tests.unit.test_quorum import answer, only_pivotal_units_change_the_answer

QUESTIONS = {
    "Chinese": "青柳桥在哪里？",
    "Japanese": "青柳橋はどこですか？",
    "Thai": "สะพานบางแก้วอยู่ที่ไหน",
    "Burmese": "ရွှေတံတားဘယ်မှာလဲ",
}
ABOUT = {"Chinese": "青柳桥", "Japanese": "青柳橋", "Thai": "สะพานบางแก้ว", "Burmese": "ရွှေတံတား"}
WORDS = {
    "Chinese": "红松 白鹤 码头 图书馆 三十元 陶罐 面包师 铜钟".split(),
    "Japanese": "赤松 しらさぎ 桟橋 ランプ 図書館 三千円 土鍋 パン屋".split(),
    "Thai": "ต้นสน นกกระสา ท่าเรือ ห้องสมุด สามสิบบาท หม้อดิน คนทำขนมปัง ระฆัง".split(),
    "Burmese": "ထင်းရှူး ဗျိုင်း ဆိပ်ကမ်း စာကြည့်တိုက် ကျပ် မြေအိုး မုန့်ဖုတ်သမား ခေါင်းလောင်း".split(),
}
SCRIPTS = st.sampled_from(sorted(WORDS))
UNITS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), min_size=1, max_size=6)


def own_text(i):
    """A unique text for each unit, so that no two are copies."""
    return "".join(chr(0x5000 + 97 * i + 5 * j) for j in range(14))


def texts_of(script, units):
    return [
        f"{ABOUT[script]}{''.join(WORDS[script][w] for w in unit)}。{ABOUT[script]}{own_text(i)}。"
        for i, unit in enumerate(units)
    ]


def check_every_phrase_is_in_m_units(script, units, m):
    texts = texts_of(script, units)
    said = answer(texts, question=QUESTIONS[script], quorum=Quorum(support=m, jitter=1))
    for phrase in [] if said == UNKNOWN else said.removesuffix(".").split("; "):
        assert sum(phrase in text for text in texts) >= m, phrase


@given(SCRIPTS, UNITS, st.integers(2, 4))
@settings(max_examples=150, deadline=None)
def test_every_phrase_is_contained_as_a_whole_in_m_units(script, units, m):
    check_every_phrase_is_in_m_units(script, units, m)


def test_phrase_check_fails_with_a_lower_threshold(monkeypatch):
    monkeypatch.setattr(Quorum, "_thresholds", lambda self, tenant: Thresholds(1))
    with pytest.raises(AssertionError):
        check_every_phrase_is_in_m_units("Chinese", [[0], [1]], 2)


def join_overlapping(names):
    """Joins spans that overlap at their ends; possibly no unit contains the result."""
    joined = {a + b[2:] for a in names for b in names if a[-2:] == b[:2] and a != b}
    return joined or names


def test_phrase_check_fails_for_spans_joined_from_overlapping_ones(monkeypatch):
    units = [[0, 1], [0, 1], [1, 2], [1, 2]]
    check_every_phrase_is_in_m_units("Chinese", units, 2)
    monkeypatch.setattr(release_module, "_longest", join_overlapping)
    with pytest.raises(AssertionError):
        check_every_phrase_is_in_m_units("Chinese", units, 2)


@given(SCRIPTS, UNITS, st.integers(2, 3), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_unit_changes_the_answer_only_at_a_threshold(script, units, m, jitter):
    only_pivotal_units_change_the_answer(
        QUESTIONS[script], texts_of(script, units), m, jitter, lambda q, r: compose(q, r.levels)
    )


def test_answer_by_counts_changes_without_a_threshold():
    with pytest.raises(AssertionError):
        only_pivotal_units_change_the_answer(
            QUESTIONS["Thai"], texts_of("Thai", [[0]] * 7), 3, 1, lambda q, r: max(r.support.values())
        )


def test_certificate_counts_units_of_a_span():
    said = [{Span("三十元"), Word("三十元")}] * 4 + [{Span("三十元")}]
    found = Release.of(said, Thresholds(2))
    assert found.supporters("三十元") == 5
    assert found.certificate(("三十元",))["lost"] == 4
    assert Release.of(said[4:] * 2, Thresholds(2)).certificate(("三十元",))["lost"] == 1
    assert Release.of([{Span("三十元")}], Thresholds(3)).certificate(())["added"] == 2


def test_omits_a_span_if_one_half_was_released():
    assert release_module._repeats("東京都庁", "これは東京都") and release_module._repeats("東京都庁", "都庁前")
    assert not release_module._repeats("東京都庁", "京都市") and not release_module._repeats("tower", "towers")


@given(SCRIPTS, UNITS, st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_unit_states_parts_of_at_most_four_clusters_per_keyword(script, units, most):
    question = AskedQuestion.of(QUESTIONS[script])
    for text in texts_of(script, units):
        said = statements(question, best_sentences(question, text, "", 2), most)
        longest = release_module._longest({item.text for item in said if isinstance(item, Span)})
        pairs = {(a.text, b.text) for s in longest for a, b in zip(clusters(s), clusters(s)[1:], strict=False)}
        assert len(pairs) <= 4 * most and len({i for i in said if isinstance(i, Word)}) <= most


@pytest.mark.parametrize("language", LANGUAGES)
def test_releases_a_fact_of_m_units_and_not_of_fewer(language):
    texts, rng, released = LANGUAGES[language], np.random.default_rng(3), 0
    for name in texts.names:
        fact, quorum = texts.facts[0], Quorum(support=3, jitter=1)
        value = fact.values[len(name) % len(fact.values)]
        written = texts.documents(fact, name, value, 5, rng)
        question = fact.question.format(n=name)
        released += value in answer(written, question=question, quorum=quorum)
        assert value not in answer(written[:2], question=question, quorum=quorum)
    assert released >= 0.7 * len(texts.names)


def test_span_contains_units_of_measurement_of_the_question():
    question = AskedQuestion.of("สวนพฤกษศาสตร์เปิดกี่โมง")
    said = statements(question, read_text("สวนพฤกษศาสตร์เปิดแปดโมงครึ่ง"), 8)
    assert Span("แปดโมงครึ่ง") in said
    assert not any(isinstance(item, Span) and item.text.startswith("โมง") for item in said)


def test_numbers_with_separators_are_one_cluster():
    question = AskedQuestion.of("診察料はいくらですか？")
    assert {Span("2,400円"), Span("2,400")} <= statements(question, read_text("診察料は2,400円です。"), 8)
    assert Span("2.5公里") in statements(AskedQuestion.of("有多远？"), read_text("路程2.5公里。"), 8)


@given(st.text("青a1,.'๑กรัิ์เสียงၿမ္မာကိုលស្រはさみビ一十Bק\u3099\u0300-", max_size=30))
@settings(max_examples=200, deadline=None)
def test_clusters_partition_the_letters_of_a_run(text):
    for run in (match[0] for match in WORD.finditer(text)):
        assert "".join(cluster.text for cluster in clusters(run)) == run
        assert sum(len(piece.clusters) for piece in pieces(run, frozenset())) <= len(clusters(run))
        for part in spans(clusters(run), 5):
            assert part in run


def test_clusters_keep_marks():
    """Otherwise no text would contain the span."""
    assert [c.text for c in clusters("พ.ศ")] == ["พ.", "ศ"]
    assert clusters("橋") == (Cluster("橋", False, False),)
