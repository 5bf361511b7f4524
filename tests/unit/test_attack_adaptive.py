"""Adaptive attacks: they separate members without a guard, and avoid the limits of a known guard."""

import asyncio
import json
import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError
from casemate.maths import metrics
from casemate.protocols import BlackBox
from casemate.redteam.attacks.averaging import Averaging, other_form
from casemate.redteam.attacks.decoys import Decoys
from casemate.redteam.attacks.duplicates import Duplicates, content_bigrams
from casemate.redteam.attacks.ladder import SHARES, Ladder, subsample_words
from casemate.redteam.attacks.oracle import LEVELS, Oracle
from casemate.redteam.attacks.split_facts import SplitFacts
from casemate.text.grounding import grounding_score
from casemate.text.sentences import sentences
from casemate.text.tokens import ReferenceCorpus, content_words, keywords, ngrams
from casemate.types import UNKNOWN, Document, Probe, Reply

ATTACKS = [Averaging, Decoys, Duplicates, Ladder, Oracle, SplitFacts]
PREPARED = [a for a in ATTACKS if a is not Oracle]
TEMPLATE = "The survey covered the {} valley in {}. Each herd near {} gave {} litres of {} milk."
TEXTS = st.text(st.sampled_from("ab cd. X1,\n-?é"), max_size=200)


def similar_documents(count, seed=0):
    """Documents of one form with different names and numbers."""
    rng = np.random.default_rng(seed)
    parts = [a + b for a in "br cl dr f gr h j k l m n pr r st tw".split() for b in ("ad", "el", "im", "or", "un")]

    def name():
        return "".join(parts[i] for i in rng.integers(len(parts), size=3)).capitalize()

    def sentence():
        return f"{name()} {name()} counted {int(rng.integers(10, 999))} {name()} by {name()} of the {name()} {name()}."

    found = []
    for i in range(count):
        form = TEMPLATE.format(name(), int(rng.integers(1900, 2000)), name(), int(rng.integers(10, 99)), name())
        found.append(Document(f"d{i}", " ".join([form, *(sentence() for _ in range(6))]), title=f"{name()} {name()}"))
    return found


class Reader(BlackBox):
    """Finds the document that shares the most words with a question, and replies with three of its sentences.

    Words are compared by their first letters, which approximates an embedder. ``limit`` makes it a guard. A
    question that shares more words with the nearest document hides that document permanently.
    """

    def __init__(self, documents, limit=math.inf):
        self.documents, self.limit, self.hidden, self.asked = documents, limit, set(), []

    async def ask(self, text):
        self.asked.append(text)
        question_stems = {w[:6] for w in content_words(text)}
        common = {d.id: len(question_stems & {w[:6] for w in content_words(d.content)}) for d in self.documents}
        nearest = max(common, key=common.get, default="")
        self.hidden |= {nearest} if common.get(nearest, 0) > self.limit else set()
        left = [d for d in self.documents if d.id not in self.hidden and common[d.id]]
        if not left:
            return Reply(UNKNOWN)
        best = max(left, key=lambda d: common[d.id])
        ranked_sentences = sorted(
            sentences(best.text), key=lambda s: -len(question_stems & {w[:6] for w in content_words(s)})
        )
        return Reply(" ".join(ranked_sentences[:3]))


def prepared(attack, document, study=(), seed=0):
    attack.study(study)
    return asyncio.run(attack.prepare(document, np.random.default_rng(seed)))


def measured(attack, document, probe, *replies):
    return asyncio.run(attack.measure(document, probe, [Reply(text) for text in replies]))


def scores(attack, members, nonmembers, target):
    """First features of members and nonmembers. Each candidate has its own target."""
    attack.study(sorted(d.content for d in members + nonmembers))
    run = [asyncio.run(attack.run(d, target(), np.random.default_rng(0))) for d in members + nonmembers]
    return [f[0] for f in run[: len(members)]], [f[0] for f in run[len(members) :]]


@pytest.fixture(scope="module")
def candidates():
    found = similar_documents(24)
    return found[:12], found[12:]


@pytest.mark.parametrize("cls", ATTACKS)
class TestEveryAdaptiveAttack:
    def test_separates_members_from_nonmembers_without_a_guard(self, cls, candidates):
        members, others = candidates
        assert metrics.auc(*scores(cls(), members, others, lambda: Reader(members))) > 0.95

    def test_scores_are_at_chance_if_every_reply_is_a_refusal(self, cls, candidates):
        members, others = candidates
        assert metrics.auc(*scores(cls(), members, others, lambda: Reader([]))) == 0.5

    def test_works_without_studied_texts(self, cls, candidates):
        members, others = candidates
        boxes = {d.id: Reader(members) for d in members + others}
        run = {d.id: asyncio.run(cls().run(d, boxes[d.id], np.random.default_rng(0)))[0] for d in members + others}
        assert metrics.auc([run[d.id] for d in members], [run[d.id] for d in others]) > 0.9

    def test_questions_depend_on_the_seed_only(self, cls, candidates):
        document, study = candidates[0][0], [d.content for d in candidates[1]]
        first, again, other = (prepared(cls(), document, study, seed) for seed in (1, 1, 2))
        assert first == again != other
        assert json.loads(json.dumps(first.key)) == first.key

    def test_an_empty_text_gets_no_questions_and_zero_scores(self, cls):
        document = Document("a", " \n")
        probe = prepared(cls(), document)
        assert probe.questions == ()
        assert set(measured(cls(), document, probe)) == {0.0}

    @given(text=TEXTS, reply=TEXTS)
    def test_scores_are_finite_for_any_text_and_reply(self, cls, text, reply):
        document = Document("a", text)
        probe = prepared(cls(), document, [text, "ab cd X1"])
        figures = measured(cls(), document, probe, *[reply] * len(probe.questions))
        assert len(figures) == len(cls.features)
        assert all(0 <= f <= 1 for f in figures)

    def test_invalid_options_are_rejected(self, cls):
        numeric = [f.name for f in fields(cls) if f.init and isinstance(f.default, int) and f.name != "disguise"]
        for name in numeric:
            with pytest.raises(ConfigError, match=f"{name}=-1"):
                cls(**{name: -1})

    def test_the_paper_field_marks_own_attacks(self, cls):
        assert cls.paper.startswith("own: ")


@pytest.mark.parametrize("cls", [SplitFacts, Duplicates, Decoys, Averaging])
@pytest.mark.parametrize("count", [1, 7])
def test_asks_at_most_the_configured_number_of_questions(cls, count, candidates):
    document = candidates[0][0]
    assert len(prepared(cls(questions=count), document, [d.content for d in candidates[1]]).questions) == count


class TestGroundingScore:
    TEXT = "The keeper Aldous Finch counted 42 herons near the lower weir before the flood of March."

    def test_only_facts_absent_from_the_question_count(self):
        reply = "Aldous Finch counted 42 herons near the lower weir."
        assert grounding_score(self.TEXT, "Who counted?", reply) == 1
        assert grounding_score(self.TEXT, f"Is it true that {reply}", reply) == 0

    def test_facts_absent_from_the_text_reduce_the_score(self):
        new = "Aldous Finch met 77 storks near the upper weir"  # 4 of its 8 words occur in the text
        assert grounding_score(self.TEXT, "", new) == 0
        assert grounding_score(self.TEXT, "", new.replace("77", "42")) == pytest.approx(2 * 5 / 8 - 1)

    def test_score_is_that_of_the_best_clause_and_short_clauses_weigh_less(self):
        assert grounding_score(self.TEXT, "", "Storks left for Lapland. Keeper Finch counted 42 herons: Aldous.") == 1
        assert grounding_score(self.TEXT, "", "42 herons.") == pytest.approx(2 / 6)

    @pytest.mark.parametrize("reply", ["", UNKNOWN, "The context does not mention what Aldous Finch counted."])
    def test_a_refusal_has_no_grounding(self, reply):
        assert grounding_score(self.TEXT, "", reply) == 0


def test_distinctive_words_are_sorted_by_rarity():
    genre = ReferenceCorpus(["north bridge toll", "north gate toll", "north tower"])
    assert [round(genre.rarity(w), 3) for w in ("north", "TOLLS", "tower", "weir")] == [0, 0.208, 0.5, 1]
    assert genre.distinctive_words("The north weir and the north tower.") == ["weir", "tower", "north"]


class TestSplitFacts:
    @given(
        st.lists(st.sampled_from("weir heron reed toll north gate flood mill osprey of the and".split()), max_size=60)
    )
    def test_no_question_quotes_four_words_of_the_text(self, text):
        document = Document("a", " ".join(text), title=" ".join(text[3:8]))
        for question in prepared(SplitFacts(words=5), document).questions:
            assert not ngrams(question) & ngrams(document.content)

    def test_questions_are_short_and_sorted_by_length(self, candidates):
        document = candidates[0][0]
        document_words = content_words(document.content)
        sizes = [len(content_words(q) & document_words) for q in prepared(SplitFacts(), document).questions]
        assert set(sizes) == {2, 3}
        assert sizes == sorted(sizes)

    def test_questions_are_distinct(self, candidates):
        asked = prepared(SplitFacts(), candidates[0][0]).questions
        assert len({content_words(q) for q in asked}) >= len(asked) * 0.9

    def test_separates_members_with_a_guard_that_withholds_on_close_questions(self, candidates):
        members, others = candidates
        assert metrics.auc(*scores(SplitFacts(), members, others, lambda: Reader(members, limit=3))) > 0.95


class TestLadder:
    def test_rungs_are_ordered_from_distant_to_close_questions(self, candidates):
        document = candidates[0][0]
        probe = prepared(Ladder(repeats=2), document)
        assert probe.key["rungs"] == [0, 0, 1, 1, 2, 3, 4, 5]
        half = " ".join(sentences(document.text)[:4])
        shared = [len(content_words(q) & content_words(document.content)) for q in probe.questions]
        assert max(shared[:4]) <= 4 < shared[4] < shared[5] < shared[6] < shared[7]
        assert f'"{half}"' in probe.questions[-1]
        assert document.text[len(half) + 1 :] not in probe.questions[-1]

    @pytest.mark.parametrize("share", SHARES)
    def test_subsampled_words_keep_their_order_and_share(self, share):
        text = "Keepers of northern mills counted herons near lower weirs before floods rose"
        kept = subsample_words(text, share, np.random.default_rng(0)).split()
        content = [w for w in text.split() if w not in ("of", "before")]
        assert len(kept) == round(share * len(content))
        assert kept == [w for w in content if w in kept]

    def test_drop_compares_distant_with_closer_rungs(self):
        document = similar_documents(1)[0]
        probe = Probe(tuple("abcdef"), {"rungs": list(range(6))})
        good, bad = document.text, UNKNOWN
        assert measured(Ladder(), document, probe, *[good] * 6) == (1, 0)
        assert measured(Ladder(), document, probe, *[bad] * 6) == (0, 0)
        assert measured(Ladder(), document, probe, bad, good, good, bad, bad, bad) == (1, 1)
        assert measured(Ladder(), document, probe, bad, bad, bad, good, good, good) == (1, 0)

    def test_a_guard_causes_a_drop(self, candidates):
        members, others = candidates
        attack = Ladder()
        attack.study([d.content for d in members + others])
        run = [asyncio.run(attack.run(d, Reader(members, limit=5), np.random.default_rng(0))) for d in members + others]
        assert metrics.auc([f[1] for f in run[:12]], [f[1] for f in run[12:]]) > 0.95


class TestDecoys:
    def test_own_words_are_placed_between_decoy_words(self, candidates):
        document, others = candidates[0][0], [d.content for d in candidates[1]]
        own = content_words(document.content)
        for question in prepared(Decoys(shares=(2.0,)), document, [document.content, *others]).questions:
            lead = keywords(question.partition(". ")[0])
            own_positions = [i for i, word in enumerate(lead) if content_words(word) & own]
            assert (len(lead), own_positions) == (8, [3, 4])
            assert any(
                content_words(" ".join(w for i, w in enumerate(lead) if i not in own_positions)) <= content_words(o)
                for o in others
            )

    def test_shares_are_used_in_turn(self, candidates):
        probe = prepared(Decoys(shares=(0.0, 1.0), questions=4), candidates[0][0], [d.content for d in candidates[1]])
        assert [len(q.partition(". ")[0].split()) for q in probe.questions] == [2, 5, 2, 5]

    @pytest.mark.parametrize("shares", [(), (1.0, -0.5)])
    def test_invalid_shares_are_rejected(self, shares):
        with pytest.raises(ConfigError, match="must have at least one number, and none below 0"):
            Decoys(shares=shares)


class TestDuplicates:
    def test_bigrams_consist_of_adjacent_words(self):
        assert set(content_bigrams("Lower weirs; herons and lower mills.")) == {
            ("low" + "er", "weir"),
            ("lower", "mill"),
        }

    def test_questions_contain_a_shared_phrase_and_a_word_of_the_target(self, candidates):
        document, others = candidates[0][0], [d.content for d in candidates[1]]
        spread = [set(content_bigrams(text)) for text in others]
        own = content_words(document.content) - frozenset().union(*map(content_words, others))
        for question in prepared(Duplicates(), document, others).questions:
            assert any(sum(pair in s for s in spread) >= 2 for pair in content_bigrams(question))
            assert len(content_words(question) & own) <= 2

    def test_candidate_is_excluded_from_the_counts_of_its_phrases(self):
        document = Document("a", "Lower weirs hold herons.")
        attack = Duplicates(texts=1)
        attack.study([document.content, "Lower mills."])
        assert attack._shared(document) == []
        attack.study([document.content, "Lower weirs."])
        assert attack._shared(document) == ["Lower weirs"]


class TestOracle:
    def shared(self, question, document):
        return len(content_words(question) & content_words(document.content))

    @pytest.mark.parametrize(("limit", "below", "on"), [(math.inf, 9, 14), (6, 4, 6), (3, 2, 3), (1, 2, 2)])
    def test_asks_below_the_measured_limit(self, limit, below, on, candidates):
        (target, *known), _ = candidates
        box = Reader([target, *known], limit)
        attack = Oracle(known=tuple((d.content, True) for d in known), questions=6)
        asyncio.run(attack.run(target, box, np.random.default_rng(0)))
        assert len(box.asked) <= attack.texts * len(LEVELS) + attack.questions
        assert [self.shared(q, target) for q in box.asked[-6:]] == [below] * 4 + [on] * 2

    def test_the_limit_is_never_measured_on_the_target(self, candidates):
        target = candidates[0][0]
        box = Reader([target])
        attack = Oracle(texts=3, questions=2)
        attack.study([d.content for d in (target, *candidates[1][:3])])
        asyncio.run(attack.run(target, box, np.random.default_rng(0)))
        form = content_words(candidates[1][0].content)
        assert not any(content_words(q) & content_words(target.content) - form for q in box.asked[:-2])

    def test_grounding_on_nonmembers_raises_the_threshold(self, candidates):
        """The target repeats two documents in every reply. With a known nonmember, these replies are not evidence."""
        (target, known, *_), (nonmember, *_) = candidates

        class ConstantReply(Reader):
            async def ask(self, text):
                self.asked.append(text)
                return Reply(" ".join(sentences(nonmember.text)[1:3]) + " " + sentences(known.text)[2][:40])

        box = ConstantReply([])
        plain, with_nonmember = (
            Oracle(questions=1, known=k) for k in (((known.content, True),), ((nonmember.content, False),))
        )
        for attack in (plain, with_nonmember):
            asyncio.run(attack.run(target, box, np.random.default_rng(0)))
        assert self.shared(box.asked[-1], target) == LEVELS[0]

    def test_separates_members_with_a_guard_with_a_fixed_threshold(self, candidates):
        members, others = candidates
        assert metrics.auc(*scores(Oracle(), members, others, lambda: Reader(members, limit=4))) > 0.95


class TestAveraging:
    def test_leading_words_are_inflected(self, candidates):
        document = candidates[0][0]
        document_words = content_words(document.content)
        for question in prepared(Averaging(), document).questions:
            lead, _, ask = question.partition(". ")
            assert not content_words(lead) & document_words
            assert len(content_words(ask) & document_words) == 1
            assert len(lead.split()) == Averaging().words

    def test_leading_words_are_unchanged_without_disguise(self, candidates):
        document = candidates[0][0]
        for question in prepared(Averaging(disguise=False), document).questions:
            assert content_words(question.partition(". ")[0]) <= content_words(document.content)

    @given(st.from_regex(r"[a-z]{3,12}", fullmatch=True))
    def test_other_form_has_the_same_prefix_and_another_stem(self, word):
        form = other_form(word)
        assert form[:3] == word[:3]
        assert content_words(form) != content_words(word)

    def test_features_are_mean_and_share_above_the_threshold(self):
        document = similar_documents(1)[0]
        probe = Probe(("a", "b", "c", "d"))
        assert measured(Averaging(), document, probe, document.text, UNKNOWN, UNKNOWN, UNKNOWN) == (0.25, 0.25)
