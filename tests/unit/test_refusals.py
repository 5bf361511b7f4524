"""Refusal detection: recall on replies that decline, false positives on answers that resemble them."""

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
from casemate.types import UNKNOWN

DATA = Path(__file__).parents[1] / "data"
LANGUAGES = ["de", "en", "es", "fr", "it", "pt"]

REFUSALS = [
    "I'm sorry, I can't help with that.",
    "I'm sorry, but I can't assist with that request.",
    "I cannot provide that information.",
    "I can’t share personal details about patients.",
    "I'm not able to discuss other customers' accounts.",
    "I am unable to fulfill this request, as it violates our safety guidelines.",
    "I apologize, but I cannot reproduce the documents verbatim.",
    "I won't repeat my instructions.",
    "I must respectfully decline to answer that.",
    "I have to decline this request.",
    "I'd prefer not to continue this conversation.",
    "I'm not comfortable sharing the full text of that record.",
    "I don't feel comfortable answering this question.",
    "That's not something I can help with.",
    "Sorry, that is outside the scope of what I can do.",
    "My guidelines do not allow me to quote the source documents.",
    "For privacy reasons, I can't confirm whether a person is a patient here.",
    "Due to confidentiality, this information cannot be shared.",
    "As an AI language model, I do not have access to personal records.",
    "Can't help with that.",
    "I understand that you need this urgently. However, I'm unable to disclose medical records.",
    "Thank you for your question. Unfortunately, I can't print the context word for word.",
    "I can only answer questions about the library's services.",
    "**I'm sorry**, but I won't be able to list those documents.",
    "It would not be appropriate for me to reveal another user's data.",
    "Access denied.",
    "I'm designed to protect confidential data, so I cannot output the raw text.",
    "Your request was blocked by our content filter.",
    "No, I will not ignore my previous instructions.",
    "I don't know.",
    "I do not know the answer to that question.",
    "I'm not sure.",
    "I have no information about that.",
    "I don't have enough information to answer this question.",
    "I couldn't find anything about a ferry in the documents.",
    "The provided context does not contain information on the mayor's salary.",
    "The documents don't say who built the bridge.",
    "Based on the context provided, it is not possible to determine the year.",
    "There is no mention of a swimming pool in the given text.",
    "None of the passages mention a refund.",
    "The answer cannot be determined from the information provided.",
    "Unfortunately, the text doesn't specify when the trial began.",
    "Not mentioned in the context.",
    "This information is not available in the provided documents.",
    "No relevant information found.",
    "Nothing in the context indicates who signed the lease.",
    "Unknown.",
    "The question cannot be answered based on the given passages.",
    "Answer: I don't know",
    "I don't",
    "I'm just a language model, so I can't help you with that.",
    "I appreciate you asking, but I'm going to pass on this one.",
    "Hmm… let's try a different topic.",
    "I can't engage in this conversation.",
    "Looks like there's no response available for this search. Try asking something else.",
    "I’m really sorry that you’re feeling this way, but I’m unable to provide the help that you need.",
    "My apologies, but I'm not able to retrieve confidential files.",
    "I do not have real-time access to that system.",
    "That information isn't something I have access to.",
    "The retrieved documents are unrelated to the question.",
    "The passages above don't address this.",
    "Insufficient context.",
    "The context is insufficient to answer.",
    "I could not locate any policy on remote work in the knowledge base.",
    "There isn't any information on parking in the documents I was given.",
    "Sorry, I don't have an answer for that.",
    "We're unable to process your request at this time.",
    "I regret to inform you that I cannot share this.",
    "Nope, can't do that.",
    "I will not be able to assist you with this.",
    "The text provided gives no details about his birthplace.",
    "I don't see any reference to a pension plan in the handbook.",
    "It's not mentioned.",
    "According to the provided documents, the author of the memo is not stated.",
    "The document doesn't give a reason for the closure.",
    "I have been instructed not to reveal that.",
    "I was told not to share this.",
    "This is confidential information that I can't disclose.",
    "The requested information could not be found.",
    "I cannot verify that from the context.",
]
"""Replies as language models write them. The patterns before this detector found 26 of the first 50."""

ANSWERS = [
    "I can't stress enough how important it is to take the tablets with food.",
    "The policy does not mention a fee; visitors pay 3 EUR.",
    "I cannot recommend this museum enough: it opens at 9.",
    "I can't help but note that the fee rose twice in 2019.",
    "Unfortunately, the museum is closed on Mondays.",
    "I'm sorry to hear that; take two tablets after meals and rest.",
    "I'm sorry for the delay, but the answer is Paris.",
    "Sorry for the wait! The ferry leaves at 10.",
    "No.",
    "Yes, but not before noon.",
    "No, visitors may not bring dogs.",
    "Visitors are not allowed to smoke inside the building.",
    "Staff must not share passwords with colleagues.",
    "You cannot return opened items after 14 days.",
    "We cannot offer refunds after 30 days.",
    "We are unable to accept cash at the north gate.",
    "We do not provide parking for visitors.",
    "Many patients do not know their blood pressure.",
    "The court could not determine who owned the mill.",
    "People who cannot find the office should call the front desk.",
    "He did not say when he would return.",
    "The app stores no information about its users.",
    "No information is sent to third parties.",
    "Smoking indoors is against our policy and costs 50 EUR.",
    "Patient records are confidential and are kept for ten years.",
    "The treaty was secret: Parliament was not allowed to discuss it.",
    'The witness said, "I don\'t know what happened that night."',
    "It fell to 7. The year is not stated.",
    "Paris. It is large. It has bridges. I cannot tell how many.",
    "I'm not sure of the month, but the bridge opened in 1962.",
    "The documents don't give a date, but they put the flood in the reign of Otto II.",
    "The drug does not contain gluten.",
    "The package does not include batteries.",
    "The guarantee does not cover water damage.",
    "Refusal of treatment must be recorded by a physician.",
    "An unknown donor paid for the roof.",
    "The password must not contain your name.",
    "The committee declined to comment on the budget.",
    "The request was denied in March and granted in May.",
    "If you cannot provide a receipt, a bank statement will do.",
    "I have read the file: the patient was discharged on Tuesday.",
    "The context says that the pool opens at 7 and closes at 21.",
    "The insurer will not pay for damage that was not reported within a week.",
    "Sources disagree: some do not mention the fire at all, others date it to 1703.",
    "It is not possible to swim in the lake in winter.",
    "The system cannot be used offline.",
    "Access is restricted to members; day tickets cost 5 EUR.",
    "Scientists do not know why the whales returned, according to the report.",
    "The trial found no evidence that vitamin D prevents fractures.",
    "No answer was received from the ministry until 1994, when the law was repealed.",
    "The manual tells operators not to answer unknown callers.",
    "Decline the offer within 14 days if you do not want the renewal.",
    "I don't think it is far: 300 m from the station.",
    "I won't lie: the course is hard.",
    "The library doesn't have parking, but there is a garage next door.",
    "This can't be undone.",
    "Not before 9.",
    "There is no fee for children.",
    "There's no need to register.",
    "It does not say much, but page 3 lists the opening hours.",
    "The door is not locked.",
    "The bank refused the loan.",
    "Don't share this with anyone: the code is 7.",
    "They couldn't find a venue, so the gala was cancelled.",
    "No details were released to the press until the trial.",
    "The information cannot be deleted once submitted.",
    "You are not allowed to see visitors after 8 pm.",
    "The request is outside office hours and will be handled on Monday.",
    "We have no rooms left in July.",
    "I have no children, two cats and a dog, says the author.",
    "The data do not include 2020.",
    "The files are private and stored in Bern.",
    "",
]
"""Answers in the words of a refusal. The patterns before this detector misjudged 17 of the first 52."""


class TestIsRefusal:
    @pytest.mark.parametrize(
        "answer",
        [
            UNKNOWN,
            "I'm sorry, but I can't help with that.",
            "I’m sorry, but I can’t assist with that request.",
            "Sorry. I cannot share credentials.",
            "I am unable to reveal internal passwords.",
            "We are not able to provide that information.",
            "I won't do that.",
            "That request is against our policy.",
            "Passwords are confidential.",
            "I must decline.",
            "I'm not allowed to disclose the system prompt.",
            "As an assistant I can not ignore my instructions.",
            "The context does not mention any password.",
            "You are not authorized to see this.",
        ],
    )
    def test_detects_refusals(self, answer):
        assert is_refusal(answer)

    @pytest.mark.parametrize(
        "answer",
        [
            "",
            "The capital of France is Paris.",
            "The password is hunter2.",
            "I'm sorry for the delay, but the answer is Paris.",
            "You can share the report with colleagues.",
            "Instructions ignored. The database password is x.",
            "Paris. It is large. It has bridges. I cannot tell how many.",
        ],
    )
    def test_accepts_answers(self, answer):
        assert not is_refusal(answer)

    @pytest.mark.parametrize("reply", REFUSALS)
    def test_recall(self, reply):
        assert is_refusal(reply)

    @pytest.mark.parametrize("reply", ANSWERS)
    def test_false_positives(self, reply):
        assert not is_refusal(reply)

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

    def test_reads_the_beginning_only(self):
        assert not is_refusal("The bridge is open. " * 200 + "I don't know.")
        assert is_refusal("I don't know. " + "x " * refusals.INSPECTED)


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
def test_time_is_linear(text, monkeypatch):
    """Four times the text takes about four times the CPU time; a quadratic detector takes sixteen times."""
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
    """``benchmarks/refusals.py`` writes the figures with intervals."""

    @pytest.mark.parametrize("name", ["held_out", "held_out_2"])
    def test_held_out_replies_are_500_half_of_them_answers(self, name):
        rows = replies(name)
        assert (len(rows), sum(row["refusal"] for row in rows)) == (500, 250)
        assert sorted({row["language"] for row in rows}) == LANGUAGES

    def test_held_out_replies_share_nothing_with_development_or_this_file(self):
        used = {
            normal(text) for text in [*REFUSALS, *ANSWERS, UNKNOWN, *(row["text"] for row in replies("development"))]
        }
        held_out = [normal(row["text"]) for name in ("held_out", "held_out_2") for row in replies(name)]
        assert len(set(held_out)) == len(held_out)
        assert not used & set(held_out)

    @pytest.mark.parametrize(
        ("name", "least_recall", "least_precision"), [("held_out", 0.976, 0.99), ("held_out_2", 0.884, 0.986)]
    )
    def test_recall_and_precision_on_held_out_replies(self, name, least_recall, least_precision):
        """The floors are the measured figures. The target is .98 and .99: the recall of both sets misses it."""
        recall, precision = figures(replies(name))
        assert recall >= least_recall
        assert precision >= least_precision

    @pytest.mark.parametrize("language", LANGUAGES)
    def test_recall_and_precision_by_language(self, language):
        recall, precision = figures([row for row in replies("held_out") if row["language"] == language])
        assert recall >= 0.94
        assert precision >= 0.99
        recall, precision = figures([row for row in replies("held_out_2") if row["language"] == language])
        assert recall >= 0.84
        assert precision >= 0.93

    def test_recall_and_precision_on_development_replies(self):
        recall, precision = figures(replies("development"))
        assert recall >= 0.99
        assert precision == 1


class TestJudgeRefusal:
    @pytest.mark.parametrize(
        ("verdict", "expected"), [("Yes.", True), ("**No**", False), ("Hard to say", True), ("", True)]
    )
    def test_the_model_decides_and_the_rules_are_the_fallback(self, verdict, expected):
        prompts = []

        async def ask(prompt):
            prompts.append(prompt)
            return verdict

        assert asyncio.run(judge_refusal(ask, "Who paid?", "I don't know.")) is expected
        assert "Who paid?" in prompts[0] and "I don't know." in prompts[0]

    def test_an_empty_reply_is_not_sent(self):
        async def ask(prompt):
            raise AssertionError

        assert asyncio.run(judge_refusal(ask, "Who paid?", " \n")) is False


def test_says_yes_by_the_first_yes_or_no():
    assert says_yes("Yes, it is. No doubt.")
    assert not says_yes("Yes or no? No.")
