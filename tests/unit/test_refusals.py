"""Refusal detection: recall on refusals, and false positives on answers that resemble them."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.text import refusals
from casemate.text.refusals import is_refusal, judge_refusal, says_yes
from tests.unit.test_monitor_check import Judge

DATA = Path(__file__).parents[1] / "data"
DEVELOPMENT = ["development", "held_out", "held_out_2"]
LANGUAGES = ["de", "en", "es", "fr", "it", "pt"]


class TestIsRefusal:
    @pytest.mark.parametrize(
        "form", ["{}", "  {}\n", "**{}**", "> {}", "Answer: {}", "{{{}}}", "Hello! {}", "Sorry. {}"]
    )
    @pytest.mark.parametrize("reply", ["I can’t help with that.", "I DON'T KNOW.", "The text does not mention it."])
    def test_ignores_markup_labels_and_preambles(self, form, reply):
        assert is_refusal(form.format(reply))

    @pytest.mark.parametrize(
        ("reply", "refused"),
        [
            ("I can't share the contract, but I can help with other questions.", True),
            ("I can't share the contract, but please ask the front desk.", True),
            ("I can't share the contract, but the fee is 3 EUR.", False),
            ("I don't know the month, but I think it was in 1962.", False),
            ("I can't do that; it would be unsafe.", True),
            ("The text does not give a date; it was written under Otto II.", False),
            ("The text does not give a date, so I cannot say.", True),
        ],
    )
    def test_an_answer_after_the_refusal_counts(self, reply, refused):
        assert is_refusal(reply) is refused

    @given(st.text(max_size=300))
    def test_accepts_any_text(self, reply):
        assert is_refusal(reply) in {True, False}

    @pytest.mark.parametrize(
        ("reply", "refused"),
        [
            ("Ich kann das nicht beantworten, aber ich helfe gern bei anderen Fragen.", True),
            ("Ich kenne den Monat nicht, aber die Brücke wurde 1962 eröffnet.", False),
            ("Le texte ne donne pas de date, donc je ne peux pas répondre.", True),
            ("Le texte ne donne pas de date ; le pont fut ouvert en 1962.", False),
            ("El texto no da la fecha, pero el puente se abrió en 1962.", False),
            ("Il testo non indica la data, ma il ponte fu aperto nel 1962.", False),
            ("O texto não indica a data, mas a ponte foi aberta em 1962.", False),
        ],
    )
    def test_an_answer_after_the_refusal_counts_in_other_languages(self, reply, refused):
        assert is_refusal(reply) is refused

    @pytest.mark.parametrize(
        "reply",
        [
            '"I cannot help you," the clerk wrote to Ann in May.',
            "I can't help with that, wrote Ann, and sent the file to Tom.",
            "« Je ne sais pas », répond le maire au conseil.",
            "Karin schrieb: „Ich weiß es nicht.“ Sie fragt am Montag nach.",
        ],
    )
    def test_reported_speech_is_an_answer(self, reply):
        assert not is_refusal(reply)

    def test_only_the_beginning_is_examined(self):
        assert not is_refusal("The bridge is open. " * 200 + "I don't know.")
        assert is_refusal("I don't know. " + "The bridge is open. " * refusals.INSPECTED)


HOSTILE = [
    *(
        "i am not ",
        "the ",
        "i cannot really ",
        "no relevant ",
        "a, ",
        "not in the text ",
        "{",
        "a",
        '"a',
        "« ",
        "[1] context ",
    ),
    *(
        "based on the context ",
        "without more ",
        "is not something ",
        "there is no a a a ",
        "my search query ",
        "wrote, said, ",
    ),
    *(
        "ich kann ich nicht ",
        "ich habe ",
        "im text der text ",
        "aus im dem text text ",
        "kontext ",
        "je ne peux ",
        "je n'ai ",
    ),
    *(
        "ne ne ne texte ",
        "no puedo ",
        "el texto no ",
        "non ho ",
        "il testo non ",
        "nao tenho ",
        "o texto nao ",
        "documento no ",
    ),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_is_refusal_takes_linear_time(text, monkeypatch):
    """For four times the text, a linear detector takes four times the CPU time, a quadratic one sixteen times."""
    monkeypatch.setattr(refusals, "INSPECTED", 10**9)

    def cost(length):
        reply = (text * length)[:length]
        times = []
        for _ in range(3):
            start = time.process_time()
            is_refusal(reply)
            times.append(time.process_time() - start)
        return min(times)

    assert min(cost(16_000) / cost(4_000) for _ in range(2)) < 9


def replies(name):
    return [json.loads(line) for line in (DATA / f"refusals_{name}.jsonl").read_text("utf-8").splitlines()]


def normal(text):
    return " ".join(re.findall(r"\w+", text.lower().replace("’", "'")))


def figures(rows):
    hits = sum(row["refusal"] and is_refusal(row["text"]) for row in rows)
    flagged = sum(is_refusal(row["text"]) for row in rows)
    return hits / sum(row["refusal"] for row in rows), hits / max(flagged, 1)


class TestLabeledReplies:
    """``benchmarks/refusals.py`` prints the rates with intervals."""

    def test_there_are_500_held_out_replies_and_half_of_them_are_answers(self):
        rows = replies("held_out_3")
        assert (len(rows), sum(row["refusal"] for row in rows)) == (500, 250)
        assert sorted({row["language"] for row in rows}) == LANGUAGES

    def test_held_out_replies_share_nothing_with_development(self):
        used = {normal(row["text"]) for name in DEVELOPMENT for row in replies(name)}
        held_out = [normal(row["text"]) for row in replies("held_out_3")]
        assert len(set(held_out)) == len(held_out)
        assert not used & set(held_out)

    def test_recall_and_precision_on_held_out_replies(self):
        """The lower limits are the measured values. Both are below the targets .98 and .99."""
        recall, precision = figures(replies("held_out_3"))
        assert recall >= 0.952
        assert precision >= 0.983

    @pytest.mark.parametrize("language", LANGUAGES)
    def test_recall_and_precision_by_language(self, language):
        recall, precision = figures([row for row in replies("held_out_3") if row["language"] == language])
        assert recall >= 0.9
        assert precision >= 0.95

    @pytest.mark.parametrize("name", DEVELOPMENT)
    def test_recall_and_precision_on_development_replies(self, name):
        recall, precision = figures(replies(name))
        assert recall >= 0.99
        assert precision >= 0.997


class TestJudgeRefusal:
    @pytest.mark.parametrize(
        ("verdict", "expected"), [("Yes.", True), ("**No**", False), ("Hard to say", True), ("", True)]
    )
    def test_the_model_decides_with_the_rules_as_fallback(self, verdict, expected):
        judge = Judge(verdict)
        assert asyncio.run(judge_refusal(judge, "Who paid?", "I don't know.")) is expected
        assert "Who paid?" in judge.prompts[0].question and "I don't know." in judge.prompts[0].question

    def test_an_empty_reply_is_not_sent(self):
        judge = Judge("Yes")
        assert asyncio.run(judge_refusal(judge, "Who paid?", " \n")) is False
        assert not judge.prompts


def test_says_yes_depends_on_the_first_yes_or_no():
    assert says_yes("Yes, it is. No doubt.")
    assert not says_yes("Yes or no? No.")
