import asyncio

import numpy as np
import pytest

from casemate.errors import ConfigError
from casemate.maths import metrics
from casemate.redteam.attacks.direct import Direct
from casemate.redteam.attacks.mba import MBA
from casemate.redteam.attacks.s2mia import S2MIA
from casemate.types import Document, Probe, Reply
from tests.fakes import documents

DOCUMENT = Document("a", 'She said "go" and\nleft.', title="A farewell")


def prepared(document, **options):
    return asyncio.run(Direct(**options).prepare(document, np.random.default_rng(0)))


def measured(reply):
    return asyncio.run(Direct().measure(DOCUMENT, Probe(("?",)), [Reply(reply)]))


def test_one_question_quotes_the_text_unchanged():
    (question,) = prepared(DOCUMENT).questions
    assert f'"{DOCUMENT.text}"' in question
    assert "context" in question and "Yes or No" in question
    assert DOCUMENT.title not in question


def test_the_title_is_optional():
    assert DOCUMENT.content in prepared(DOCUMENT, title=True).questions[0]


@pytest.mark.parametrize(("options", "length"), [({}, 2000), ({"max_characters": 1000}, 1000)])
def test_a_long_text_is_truncated(options, length):
    (question,) = prepared(Document("a", "z" * 5000), **options).questions
    assert question.count("z") == length


@pytest.mark.parametrize(
    "reply",
    [
        *(" Yes. \n\n", "yes", "YES!", "**Yes**, it does.", "_Yes_", '"Yes"', "Answer: Yes", "- Yes\n- No"),
        *("Yes or no? Yes.", "Yes/No: yes", "I am asked to answer yes or no, and say yes", "Nobody knows, but yes."),
    ],
)
def test_a_yes_scores_one(reply):
    assert measured(reply) == (1.0,)


@pytest.mark.parametrize(
    "reply",
    [
        *(
            "No. ",
            "**No**, yes would be wrong.",
            "no, not at all",
            "\n\nNO",
            "Yes or No",
            "Eyes and yesterday",
            "",
            ". ",
        ),
        *("I don't know.", "The context does not hold it.", "es. \n\n", "Not in the context; nothing known."),
    ],
)
def test_other_replies_score_zero(reply):
    assert measured(reply) == (0.0,)


def test_a_limit_of_zero_characters_is_rejected():
    with pytest.raises(ConfigError, match="direct: max_characters=0; it must be at least 1"):
        Direct(max_characters=0)


def test_target_that_compares_texts_reveals_every_member():
    """The worst-case target has the members' texts and replies correctly."""
    candidates = documents(20, words=60)
    member_texts, scores = candidates[:10], []
    attack = Direct()
    for candidate in candidates:
        probe = asyncio.run(attack.prepare(candidate, np.random.default_rng(0)))
        known = any(d.text in probe.questions[0] for d in member_texts)
        scores += asyncio.run(attack.measure(candidate, probe, [Reply("Yes." if known else "No.")]))
    assert metrics.auc(scores[:10], scores[10:]) == 1


@pytest.mark.parametrize("attack", [Direct, MBA, S2MIA])
def test_request_without_a_placeholder_is_rejected(attack):
    with pytest.raises(ConfigError, match=r"must contain \{text\}"):
        attack(request="Is it there?")


@pytest.mark.parametrize("attack", [Direct, MBA, S2MIA])
def test_configured_request_contains_the_same_text(attack):
    document = Document("d", "The keeper of the old mill counted forty herons near the weir on Monday. {text}")
    usual, other = (probe(attack(request=request), document) for request in (attack().request, "In short: {text}"))
    shown = other.questions[0].removeprefix("In short: ")
    assert shown in usual.questions[0]
    assert other.key == usual.key


def probe(attack, document):
    return asyncio.run(attack.prepare(document, np.random.default_rng(1)))
