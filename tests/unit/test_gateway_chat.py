import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.gateway.api.conversation import MAX_CHARACTERS, MAX_EARLIER, is_follow_up, to_query
from casemate.gateway.api.openai_schema import ChatRequest, Completion, count_tokens
from casemate.gateway.errors import ApiError


def request(*turns, **more):
    messages = [{"role": role, "content": text} for role, text in turns]
    return ChatRequest.model_validate({"model": "casemate", "messages": messages, **more})


def test_a_standalone_question_is_used_alone():
    asked = request(("user", "Who runs the pharmacy?"), ("assistant", "Ann."), ("user", "When does the library open?"))
    assert asked.question == "When does the library open?"


def test_earlier_messages_are_prepended_to_a_follow_up_question():
    turns = ["Who runs the pharmacy?", "When does she work?", "And on Sundays?"]
    assert to_query(turns) == "\n".join(turns)
    assert to_query(["When does the library open?", *turns]) == "\n".join(turns)


def test_prepended_messages_are_limited_in_number_and_length():
    assert to_query(["Why?"] * 10).count("\n") == MAX_EARLIER
    assert to_query(["x " * MAX_CHARACTERS, "Why?"]) == "Why?"


def test_assistant_and_system_messages_are_ignored():
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


def test_a_conversation_without_a_user_message_is_refused():
    with pytest.raises(ApiError) as refused:
        _ = request(("system", "Hello")).question
    assert refused.value.status_code == 400


def test_text_parts_are_joined():
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
def test_unsupported_fields_are_refused_by_name(bad):
    with pytest.raises(ApiError) as refused:
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
def test_fields_that_do_not_change_the_answer_are_ignored(fine):
    request(("user", "x"), **fine).require_supported()


@given(st.lists(st.text(max_size=50), min_size=1, max_size=8))
def test_a_query_always_ends_with_the_last_message(turns):
    asked = to_query(turns)
    assert asked.endswith(turns[-1])
    assert asked == to_query(turns)
    if not is_follow_up(turns[-1]):
        assert asked == turns[-1]


def test_tokens_count_only_text_that_the_client_sends_and_receives():
    assert [count_tokens(t) for t in ("", "abcd", "abcde", "é" * 4)] == [0, 1, 2, 2]
    whole = Completion("r", "m", 7).whole("abcde")
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


def test_stream_ends_with_finish_reason_usage_and_done():
    completion = Completion("r", "m", 7, with_usage=True)
    sent = completion.first_chunk() + completion.text_chunk("Æ\ud800") + completion.last_chunks(3)
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
