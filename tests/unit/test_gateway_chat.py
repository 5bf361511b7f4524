import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.gateway.chat import SPAN, TURNS, ChatRequest, Completion, follows, question, tokens
from casemate.gateway.refusals import Refusal


def request(*turns, **more):
    messages = [{"role": role, "content": text} for role, text in turns]
    return ChatRequest.model_validate({"model": "casemate", "messages": messages, **more})


def test_a_question_that_stands_alone_is_asked_alone():
    asked = request(("user", "Who runs the pharmacy?"), ("assistant", "Ann."), ("user", "When does the library open?"))
    assert asked.question == "When does the library open?"


def test_a_follow_up_takes_the_question_it_follows():
    turns = ["Who runs the pharmacy?", "When does she work?", "And on Sundays?"]
    assert question(turns) == "\n".join(turns)
    assert question(["When does the library open?", *turns]) == "\n".join(turns)


def test_no_more_than_some_turns_and_characters_are_taken():
    assert question(["Why?"] * 10).count("\n") == TURNS
    assert question(["x " * SPAN, "Why?"]) == "Why?"


def test_assistant_and_system_turns_are_never_asked():
    asked = request(
        ("system", "Repeat SYSTEMWORD."),
        ("developer", "Repeat DEVELOPERWORD."),
        ("user", "What about Mr Ray?"),
        ("assistant", "The record says ASSISTANTWORD."),
        ("user", "And what does it say?"),
    )
    assert asked.question == "What about Mr Ray?\nAnd what does it say?"


def test_a_prefilled_answer_does_not_replace_the_question():
    assert request(("user", "Who runs the pharmacy?"), ("assistant", "It is")).question == "Who runs the pharmacy?"


def test_a_conversation_without_a_user_is_refused():
    with pytest.raises(Refusal) as refused:
        _ = request(("system", "Hello")).question
    assert refused.value.status_code == 400


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "is it?"}]
    found = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert found.question == "Who\nis it?"


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 2},
        {"n": "1"},
        {"n": True},
        {"tools": [{"type": "function"}]},
        {"functions": [{}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"modalities": ["audio"]},
        {"audio": {}},
    ],
)
def test_what_cannot_be_done_is_refused_by_name(bad):
    with pytest.raises(Refusal) as refused:
        request(("user", "x"), **bad).require_supported()
    assert refused.value.body["error"]["param"] == next(iter(bad))
    assert refused.value.body["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "fine",
    [
        {"n": 1, "temperature": 0.3, "max_tokens": 5, "stop": ["x"], "seed": 1, "metadata": {}, "something": "new"},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False, "n": None},
    ],
)
def test_what_is_harmless_is_let_through(fine):
    request(("user", "x"), **fine).require_supported()


@given(st.lists(st.text(max_size=50), min_size=1, max_size=8))
def test_the_last_turn_is_always_the_end_of_what_is_asked(turns):
    asked = question(turns)
    assert asked.endswith(turns[-1])
    assert asked == question(turns)
    if not follows(turns[-1]):
        assert asked == turns[-1]


def test_tokens_are_of_what_the_client_sees():
    assert [tokens(t) for t in ("", "abcd", "abcde", "é" * 4)] == [0, 1, 2, 2]
    whole = Completion("r", "m", 7).whole("abcde")
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


def test_a_stream_ends_as_the_sdk_expects():
    completion = Completion("r", "m", 7, with_usage=True)
    sent = completion.first() + completion.piece("Æ\ud800") + completion.last(3)
    lines = [line.removeprefix("data: ") for line in sent.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert [c["choices"][0]["delta"] for c in chunks[:3]] == [
        {"role": "assistant", "content": ""},
        {"content": "Æ?"},
        {},
    ]
    assert chunks[2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[3]["choices"] == []
    assert chunks[3]["usage"]["total_tokens"] == 10
    assert len({c["id"] for c in chunks}) == 1
