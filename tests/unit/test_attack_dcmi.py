import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import ConfigError
from casemate.maths import metrics
from casemate.protocols import Generator
from casemate.redteam.attacks.dcmi import ANTONYM_PAIRS, ANTONYMS, DCMI, perturbed_copy
from casemate.types import Document, Probe, Reply
from tests.fakes import documents

TEXT = (
    "The high dose was given to 120 patients in the first week, and 3.5 % of them felt worse. The risk increased "
    "slowly but significantly. Nobody was told why the team did not stop."
)


@dataclass
class Writer(Generator):
    """Returns a fixed text and records the prompts."""

    text: str
    prompts: list = field(default_factory=list)

    async def stream(self, prompt):
        self.prompts.append(prompt)
        for piece in re.findall(r"\S*\s*", self.text):
            yield piece


def prepared(text, rng=0, **options):
    probe = asyncio.run(DCMI(**options).prepare(Document("a", text), np.random.default_rng(rng)))
    return probe, [re.match(r'"(.*)"\n', question, re.S)[1] for question in probe.questions]


def measured(*replies):
    return asyncio.run(DCMI().measure(Document("a", ""), Probe(("?", "?")), [Reply(r) for r in replies]))


def test_asks_the_same_question_about_the_text_and_the_perturbed_copy():
    probe, (text, copy) = prepared(TEXT)
    assert text == TEXT != copy
    assert probe.questions[0].replace(TEXT, "") == probe.questions[1].replace(copy, "")
    assert "Yes or No" in probe.questions[0]


@pytest.mark.parametrize(
    ("replies", "difference"),
    [
        (("Yes.", "No."), 1),
        (("**Yes**, it is.", "I don't know."), 1),
        (("Yes", "yes"), 0),
        (("No", "No"), 0),
        (("", ""), 0),
        (("No", "Yes"), -1),
        (("yes or no? Yes", "yes or no? No"), 1),
    ],
)
def test_the_score_is_the_difference(replies, difference):
    assert measured(*replies) == (difference,)


class TestPerturbedCopy:
    @pytest.mark.parametrize(("share", "count"), [(0.001, 1), (0.03, 1), (0.1, 3), (0.18, 6)])
    def test_the_share_of_changed_words_is_respected(self, share, count):
        assert len(re.findall(r"[\w.]*\w", TEXT)) == 33
        before, after = TEXT.split(), perturbed_copy(TEXT, share, np.random.default_rng(1)).split()
        assert len(before) == len(after)  # the first choices each replace one word by one word
        assert sum(a != b for a, b in zip(before, after, strict=True)) == count

    def test_antonyms_and_numbers_are_changed_first(self):
        after = perturbed_copy(TEXT, 0.3, np.random.default_rng(0))  # ten words: all antonyms and numbers, and one more
        for word in ("low", "last", "better", "decreased", "quickly", "insignificantly", "indeed"):
            assert re.search(rf"\b{word}\b", after)
        numbers = re.findall(r"[\d.]*\d", after)
        assert len(numbers) == 2 and numbers[0] != "120" and numbers[1] != "3.5"
        assert [n[1:] for n in numbers] == ["20", ".5"]

    @pytest.mark.parametrize(
        ("text", "copy"),
        [
            ("HIGH tide", "LOW tide"),
            ("Older people", "Younger people"),
            ("Herons were there", "Herons were not there"),
            ("Grey herons nest graciously beside them", "Grey herons nest not graciously beside them"),
            ("of the herons", "of the not herons"),
            ("of the", "of not the | not of the"),
            ("?!", "?!"),
        ],
    )
    def test_words_are_changed_by_rules(self, text, copy):
        found = {perturbed_copy(text, 0.01, np.random.default_rng(seed)) for seed in range(9)}
        assert found <= set(copy.split(" | "))

    @given(st.integers(0, 999))
    def test_a_number_is_replaced_by_one_of_the_same_form(self, seed):
        after = perturbed_copy("352.80", 0.01, np.random.default_rng(seed))
        assert re.fullmatch(r"[124-9]52\.80", after)

    @given(st.text(max_size=100), st.integers(0, 99))
    def test_any_text_is_changed_deterministically(self, text, seed):
        first, again = (perturbed_copy(text, 0.06, np.random.default_rng(seed)) for _ in range(2))
        assert first == again
        assert (first != text) == bool(re.search(r"[^\W_]", text))

    def test_antonyms_are_unique_and_differ_from_the_word(self):
        listed = Counter(word for pair in ANTONYM_PAIRS.split() for word in pair.split("/"))
        assert set(listed.values()) == {1}
        assert not [word for word, other in ANTONYMS.items() if word == other]


class TestWriter:
    def test_copy_by_the_writer_is_used(self):
        writer = Writer(f'"{TEXT.replace("high", "modest")}"\n')
        _, (text, copy) = prepared(TEXT, writer=writer)
        assert copy == TEXT.replace("high", "modest")
        assert writer.prompts[0].question == text and "6%" in writer.prompts[0].instructions

    @pytest.mark.parametrize("reply", [TEXT, "", "I cannot help with that.", TEXT.upper()])
    def test_rules_replace_an_unusable_copy(self, reply):
        assert prepared(TEXT, writer=Writer(reply))[1] == prepared(TEXT)[1]


def test_a_long_text_is_truncated():
    _, (text, copy) = prepared("heron " * 1000)
    assert text == ("heron " * 1000)[:2000]
    assert copy.replace("not ", "") == text


@pytest.mark.parametrize("options", [{"share": 0}, {"share": 1.1}, {"max_characters": 0}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(ConfigError, match="(share=.*above 0 and at most 1|max_characters=0; it must be at least 1)"):
        DCMI(**options)


def test_target_that_compares_texts_reveals_every_member():
    """The worst-case target has the members' texts and replies "yes" if it contains the text verbatim."""
    candidates = documents(20, words=60)
    member_texts, scores = candidates[:10], []
    attack = DCMI()
    for number, candidate in enumerate(candidates):
        probe = asyncio.run(attack.prepare(candidate, np.random.default_rng(number)))
        replies = [Reply("Yes." if any(d.text in q for d in member_texts) else "No.") for q in probe.questions]
        scores += asyncio.run(attack.measure(candidate, probe, replies))
    assert metrics.auc(scores[:10], scores[10:]) == 1
