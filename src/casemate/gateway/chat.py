"""OpenAI's chat shapes, and what a conversation asks.

A conversation comes from the client, all of it. So of all that is in it, only what users asked is used:

* **System and developer messages are not followed.** What the model is told to do is the owner's
  (``rag.instructions``): a client who could replace it could tell the model to recite its context.
* **Assistant turns are not read.** They may hold an answer from before a document was hidden, or anything a client
  makes up: read, they would bring back what the guard withholds. The context comes from this request's retrieval only.
* **Earlier user turns** are read when the last one cannot be understood alone, by a fixed rule (``follows``). They are
  put in front of it, and the guard judges all of it as one question: that of somebody who wrote it in one message.

The count of tokens is of what the client sent and is sent, four bytes a token. It does not count the context, or it
would tell whether one was withheld.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from casemate.gateway.refusals import Refusal, to_json
from casemate.words import content_words, words

TURNS = 3
"""Most earlier user turns that are put in front of the last."""
SPAN = 4000
"""Characters that they may have together; an answer to one long text is seldom about the one before."""
BYTES_PER_TOKEN = 4
DONE = b"data: [DONE]\n\n"

REFERRING = frozenset(
    """it its itself they them their theirs he him his she her hers this that these those there then one ones former
    latter same such else another others""".split()
)
OPENINGS = frozenset("and but or so also then otherwise instead too".split())
OPENING_PAIRS = frozenset({("what", "about"), ("how", "about"), ("what", "if"), ("why", "not")})

HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
"""Fields that would change what an answer is, with the values that do not. All other fields that are not named in
``ChatRequest`` are about how a model writes: that is the owner's to say, and they are ignored."""


def _encodable(text: str) -> str:
    """Refuses half of a surrogate pair, which no other program can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair; send plain text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class Shape(BaseModel):
    """A part of a request. What it does not name is let through."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class TextPart(Shape):
    """A piece of a message. Pictures, sounds and files are refused."""

    type: Literal["text"]
    text: Text


class Message(Shape):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """The turn as one text."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())


class StreamOptions(Shape):
    """How a stream is sent."""

    include_usage: bool | None = None


class ChatRequest(Shape):
    """What is posted to ``/v1/chat/completions``."""

    model: Text
    messages: list[Message] = Field(min_length=1, max_length=2000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @property
    def question(self) -> str:
        """What is asked: the text that is searched for, that the guard judges, and that the model answers.

        Raises:
            Refusal: If no user says anything.
        """
        turns = [m.text for m in self.messages if m.role == "user"]
        if not turns:
            raise Refusal(400, "messages: no message is of role 'user'", "invalid_value", "messages")
        return question(turns)

    @property
    def tokens(self) -> int:
        """Tokens of what the client sent."""
        return tokens("".join(m.text for m in self.messages))

    def require_supported(self) -> None:
        """Refuses what would change what an answer is, and cannot be done here.

        Raises:
            Refusal: If such a field has a value that matters.
        """
        for name, allowed in HARMLESS.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
                raise Refusal(400, f"'{name}' is not supported with this value.", "unsupported_parameter", name)


def question(turns: Sequence[str]) -> str:
    r"""What is asked by the last of some user turns, oldest first: it, and behind which earlier ones it stands.

    >>> question(["Who runs the pharmacy?", "And when does she work?"])
    'Who runs the pharmacy?\nAnd when does she work?'
    >>> question(["Who runs the pharmacy?", "When does the library open?"])
    'When does the library open?'
    """
    asked = [turns[-1]]
    for turn in reversed(turns[:-1]):
        if len(asked) > TURNS or not follows(asked[0]) or sum(map(len, (turn, *asked[:-1]))) > SPAN:
            break
        asked.insert(0, turn)
    return "\n".join(asked)


def follows(turn: str) -> bool:
    """Whether a turn cannot be understood without the one before.

    It points back (a pronoun and the like), begins as if it went on, has at most two words, or none that carries
    meaning. The words are English; in other languages only the number of words tells.

    >>> [follows(t) for t in ("What does it cost?", "And on Sundays?", "Und sonntags?", "What does aspirin cost?")]
    [True, True, True, False]
    """
    said = words(turn)
    opening = bool(said) and (said[0] in OPENINGS or tuple(said[:2]) in OPENING_PAIRS)
    return opening or len(said) <= 2 or not content_words(turn) or not REFERRING.isdisjoint(said)


def tokens(text: str) -> int:
    """Tokens of a text, roughly: what budgets and ``usage`` count."""
    return ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Completion:
    """Writes one answer as OpenAI does, whole or in chunks.

    Attributes:
        request: Id of the request.
        model: What the model is called.
        asked: Tokens of what the client sent.
        with_usage: Whether the last chunk tells the count of tokens.
    """

    request: str
    model: str
    asked: int
    with_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str) -> dict[str, Any]:
        """The answer in one."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return self._head("chat.completion") | {"choices": [choice], "usage": self._usage(tokens(text))}

    def first(self) -> bytes:
        """The chunk before the first piece."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> bytes:
        """The chunk of one piece."""
        return self._chunk({"content": text})

    def last(self, answered: int) -> bytes:
        """All that follows the last piece.

        Args:
            answered: Tokens of the answer.
        """
        end = self._chunk({}, "stop")
        if self.with_usage:
            end += _event(self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage(answered)})
        return end + DONE

    def _chunk(self, delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self.with_usage else {}
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.request}", "object": kind, "created": self.created, "model": self.model}

    def _usage(self, answered: int) -> dict[str, int]:
        return {"prompt_tokens": self.asked, "completion_tokens": answered, "total_tokens": self.asked + answered}


def broken_off(refusal: Refusal) -> bytes:
    """The event that ends a stream that cannot go on."""
    return _event(refusal.body)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
