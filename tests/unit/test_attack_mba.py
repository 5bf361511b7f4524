import asyncio
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError
from casemate.maths import metrics
from casemate.protocols import LanguageModel
from casemate.redteam.attacks.mba import MBA, REQUEST, parse_mask_answers
from casemate.text.tokens import STOP_WORDS
from casemate.types import Document, Probe, Reply, TokenScore
from tests.fakes import WORDS, documents

TEXT = (
    "On Monday the keeper of the old mill counted 42.5 herons near the weir (a record), and (so he says) an osprey. "
    "The herons' nests were built by the storks of Lapland; nobody had seen the like of it since the flood."
)


class TableRanks(LanguageModel):
    """Ranks each token by a table, otherwise 0. A token has at most four letters."""

    def __init__(self, **ranks):
        self.ranks = ranks

    def score(self, text):
        return [TokenScore(*m.span(), -1.0, self.ranks.get(m[0], 0)) for m in re.finditer(r"\w{1,4}", text)][1:]


def prepared(text, rng=0, study=(), **options):
    attack = MBA(**options)
    attack.study(study)
    return asyncio.run(attack.prepare(Document("a", text), np.random.default_rng(rng)))


def masked(probe):
    return probe.questions[0].removesuffix(REQUEST.removeprefix("{text}")).rstrip()


def restored(probe):
    return re.sub(r"\[MASK_(\d+)\]", lambda m: probe.key[m[1]], masked(probe))


def measured(key, reply):
    return asyncio.run(MBA().measure(Document("a", ""), Probe(("?",), key), [Reply(reply)]))


class TestQuestion:
    def test_contains_the_masked_text_and_the_key_restores_the_text(self):
        probe = prepared(TEXT)
        assert restored(probe) == TEXT
        assert list(probe.key) == [str(i) for i in range(1, len(probe.key) + 1)]
        assert json.loads(json.dumps(probe.key)) == probe.key

    def test_keeps_the_punctuation_around_a_masked_word(self):
        probe = prepared("one two three four five The bird (a heron), he said.", masks=1)
        assert "(a [MASK_1])," in probe.questions[0]
        assert probe.key == {"1": "heron"}

    @given(st.integers(0, 10**6), st.integers(1, 15), st.sampled_from(["idf", "random"]))
    def test_masks_one_eligible_word_per_fragment(self, seed, masks, policy):
        rng = np.random.default_rng(seed)
        pool = [*WORDS, "the", "of", "a", "(x)", "n=3", "7", "42.5%", "--", "...", "U.S.", "mid-day,", "reed/rush"]
        text = " ".join(rng.choice(pool, int(rng.integers(0, 80))))
        probe = prepared(text, masks=masks, policy=policy)
        if not probe.questions:
            assert not probe.key
            return
        assert restored(probe) == text
        parts = masked(probe).split()
        size = math.ceil(len(parts) / masks)
        places = [i for i, part in enumerate(parts) if "[MASK_" in part]
        assert len({i // size for i in places}) == len(places) <= masks
        assert min(places) >= 5
        assert all(b - a > 1 for a, b in zip(places, places[1:], strict=False))
        assert not {word.lower() for word in probe.key.values()} & STOP_WORDS
        assert all(re.fullmatch(r"\w[\w.-]+", word) for word in probe.key.values())
        assert not re.search(r"\]/|/\[", masked(probe))

    def test_masks_the_rarest_word_of_the_genre(self):
        text = "amber birch cedar delta ember flint grove heron inlet"
        genre = [text.replace("grove", ""), text.replace("grove", "").replace("heron", "")]
        assert prepared(text, study=genre, masks=1).key == {"1": "grove"}

    def test_prefers_words_that_occur_once(self):
        text = "one two three four five amber birch amber"
        assert prepared(text, study=["birch", "birch", "birch"], masks=1).key == {"1": "birch"}

    def test_difficulty_is_that_of_the_rarest_token(self):
        text = "amber birch cedar delta ember flint grove heron quartzite inlet"
        ranks = TableRanks(flin=30, g=20, zite=90, grov=80, inle=40)  # "quartzite" is quar, tzit, e
        assert prepared(text, masks=1, model=ranks).key == {"1": "grove"}
        assert prepared(text, masks=1, model=TableRanks(flin=30, tzit=90)).key == {"1": "quartzite"}
        assert prepared(text, masks=1, model=TableRanks(ceda=90, flin=30)).key == {
            "1": "flint"
        }  # cedar is among the first

    def test_a_model_sets_the_default_policy(self):
        text = "amber birch cedar delta ember flint grove heron quartzite inlet"
        assert prepared(text, masks=1, model=TableRanks(flin=30), policy="idf").key == {"1": "quartzite"}

    def test_random_masks_depend_on_the_seed(self):
        keys = [tuple(prepared(TEXT, rng=seed, policy="random").key.values()) for seed in range(8)]
        assert keys[3] == tuple(prepared(TEXT, rng=3, policy="random").key.values())
        assert len(set(keys)) > 4

    def test_a_long_text_is_truncated_between_words(self):
        text = "lapwing " * 400
        for length in (2048, 100, 104, 103):
            assert len(restored(prepared(text, max_characters=length))) == (length + 1) // 8 * 8 - 1

    @pytest.mark.parametrize("text", ["", "   ", "one two three four five", "a b c d e of the and to", "x" * 5000])
    def test_a_text_without_eligible_words_gets_no_question(self, text):
        probe = prepared(text)
        assert probe == Probe(())
        assert asyncio.run(MBA().measure(Document("a", text), probe, [])) == (0.0,)


class TestReply:
    KEY = {"1": "heron", "2": "42.5", "3": "mid-day"}

    @pytest.mark.parametrize(
        "reply",
        [
            "[MASK_1]: heron\n[MASK_2]: 42.5\n[MASK_3]: mid-day",
            "Here are the words:\n\n[MASK_1]: Heron.\n[MASK_2]: 42.5\n[MASK_3]: Mid-Day",
            "**[MASK_1]:** heron\n**[MASK_2]:** 42.5\n**[MASK_3]:** mid-day",
            "- **MASK_1**: heron\n- **MASK_2**: 42.5\n- **MASK_3**: mid-day",
            "MASK_1 = heron\nMASK_2 = 42.5\nMASK_3 = mid-day",
            "MASK 1 -> heron; MASK 2 -> 42.5; MASK 3 -> mid-day",
            "[MASK_1] - heron\n[MASK_2] – 42.5\n[MASK_3] — mid-day",
            "[MASK_1] heron\n[MASK_2] 42.5\n[MASK_3] mid-day",
            "[mask_1]:\nheron\n[mask_2]:\n42.5\n[mask_3]:\nmid-day",
            "| mask | word |\n|---|---|\n| [MASK_1] | heron |\n| [MASK_2] | 42.5 |\n| [MASK_3] | mid-day |",
            "1. heron\n2. 42.5\n3. mid-day",
            "1. [MASK_1]: heron\n2. [MASK_2]: 42.5\n3. [MASK_3]: mid-day",
            "1) heron\n2) 42.5\n3) mid-day",
            "1: heron\n2: 42.5\n3: mid-day",
            "[1]: heron\n[2]: 42.5\n[3]: mid-day",
            '{"[MASK_1]": "heron", "[MASK_2]": "42.5", "[MASK_3]": "mid-day"}',
            '```json\n{\n  "MASK_1": "heron",\n  "MASK_2": 42.5,\n  "MASK_3": ["mid-day"]\n}\n```',
            '{"1": "heron", "2": "42.5", "3": "mid-day"}',
            '{"1":"heron","2":"42.5","3":"mid-day"}',
            "[MASK_1]: 'heron'\n[MASK_2]: “42.5”\n[MASK_3]: `mid-day`",
            "[MASK_1]: grey heron (the bird)\n[MASK_2]: about 42.5 of them\n[MASK_3]: mid day",
            "[MASK_1] is heron\n[MASK_2] is 42.5\n[MASK_3] is midday",
            "heron\n42.5\nmid-day",
            "heron, 42.5, mid-day",
            "The [MASK_1] came at [MASK_3].\n[MASK_1]: heron\n[MASK_2]: 42.5\n[MASK_3]: mid-day",
            "[MASK_3]: mid-day\n[MASK_2]: 42.5\n[MASK_1]: heron",
            "[MASK_01]: heron [MASK_02]: 42.5 [MASK_03]: mid-day",
        ],
    )
    def test_correct_answers_are_accepted_in_many_formats(self, reply):
        assert measured(self.KEY, reply) == (1.0,)

    @pytest.mark.parametrize(
        ("reply", "right"),
        [
            ("", 0),
            ("I don't know.", 0),
            ("[MASK_1]: unknown\n[MASK_2]: unknown\n[MASK_3]: unknown", 0),
            ("[MASK_1]: herons\n[MASK_2]: 42\n[MASK_3]: day", 0),
            ("[MASK_1]: 42.5\n[MASK_2]: heron", 0),
            ("[MASK_1]: heron\n[MASK_2]: 425\n[MASK_3]: -", 2),  # punctuation does not count, so 425 is 42.5
            ("[MASK_1]: stork\n[MASK_1]: heron", 0),  # the first answer counts
            ("[MASK_1]: one two three four five six seven eight heron", 0),  # an explanation is not an answer
            ("[MASK_1]:\n[MASK_2]: 42.5", 1),
            ("The heron was seen at mid-day, 42.5 times.", 0),
            (f"[MASK_{'1' * 5000}]: heron\n{'1' * 5000}: heron", 0),
            ("heron\n42.5", 0),  # ambiguous: the reply does not name the masks
        ],
    )
    def test_answers_are_matched_per_mask(self, reply, right):
        assert measured(self.KEY, reply) == (pytest.approx(right / 3),)

    @given(st.text(max_size=200), st.integers(1, 12))
    def test_any_reply_can_be_parsed(self, reply, masks):
        assert all(number == str(int(number)) for number in parse_mask_answers(reply, masks))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": 0}, "mba: masks=0; it must be at least 1"),
        ({"max_characters": 0}, "max_characters=0; it must be at least 1"),
        ({"policy": "hard"}, "mba.policy is 'hard'; known: idf, difficulty, random"),
        ({"policy": "difficulty"}, "needs a language model: set mba.model, or take 'idf'"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        MBA(**options)


@pytest.mark.parametrize("policy", ["idf", "difficulty", "random"])
def test_target_that_restores_masks_reveals_every_member(policy):
    """The worst-case target aligns the masked text with its texts, and guesses if none fits."""
    candidates = documents(20, words=60)
    member_texts, scores = candidates[:10], []
    attack = MBA(policy=policy, model=TableRanks())
    attack.study([d.text for d in candidates])
    for number, candidate in enumerate(candidates):
        probe = asyncio.run(attack.prepare(candidate, np.random.default_rng(number)))
        form = re.sub(r"\\\[MASK_\d+\\\]", r"(\\S+)", re.escape(masked(probe)))
        found = [match.groups() for d in member_texts if (match := re.fullmatch(form, d.text))]
        filled = found[0] if found else ["heron"] * len(probe.key)
        reply = "\n".join(f"[MASK_{i}]: {word}" for i, word in enumerate(filled, 1))
        scores += asyncio.run(attack.measure(candidate, probe, [Reply(reply)]))
    assert scores[:10] == [1.0] * 10
    assert metrics.auc(scores[:10], scores[10:]) == 1
