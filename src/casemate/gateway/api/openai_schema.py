"""OpenAI's shapes of chat requests and completions.

Token counts cover the text that the client sent and receives, four bytes of UTF-8 a token. They exclude the context:
its length would reveal whether a document was withheld.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from casemate.gateway.api.conversation import to_query
from casemate.gateway.errors import ApiError, to_json

BYTES_PER_TOKEN = 4
DONE = b"data: [DONE]\n\n"

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
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
"""See ``RequestBody.neutral``."""


def _encodable(text: str) -> str:
    """Refuses a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate; send valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class RequestModel(BaseModel):
    """Part of a request body. Unknown fields are allowed."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class RequestBody(RequestModel):
    """Body of a request for an answer.

    Attributes:
        neutral: Fields that would change what an answer is, with the values that do not. Other fields that a subclass
            does not name control how a model writes, which is the operator's decision: they are ignored.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]
    question_field: ClassVar[str]

    @property
    def turns(self) -> Sequence[tuple[str, str]]:
        """Role and text of each message."""
        raise NotImplementedError

    @property
    def question(self) -> str:
        """The query: it is searched, judged and answered.

        Raises:
            ApiError: If there is no user message.
        """
        texts = [text for role, text in self.turns if role == "user"]
        if not texts:
            message = f"{self.question_field}: no message is of role 'user'"
            raise ApiError(400, message, "invalid_value", self.question_field)
        return to_query(texts)

    @property
    def tokens(self) -> int:
        """Tokens of all messages."""
        return count_tokens("".join(text for _, text in self.turns))

    def require_supported(self) -> None:
        """Refuses fields that would change what an answer is.

        Raises:
            ApiError: If such a field has a value that is not neutral.
        """
        for name, allowed in self.neutral.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
                raise ApiError(400, f"'{name}' is not supported with this value.", "unsupported_parameter", name)


class TextPart(RequestModel):
    """A text part of a message. Images, audio and files are refused."""

    type: Literal["text"]
    text: Text


class Message(RequestModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """All text of the message."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = None


class ChatRequest(RequestBody):
    """Body of ``POST /v1/chat/completions``."""

    neutral = NEUTRAL_VALUES
    question_field = "messages"
    model: Text
    messages: list[Message] = Field(min_length=1, max_length=2000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @property
    def turns(self) -> Sequence[tuple[str, str]]:
        return [(message.role, message.text) for message in self.messages]

    @property
    def with_usage(self) -> bool:
        """Whether the last chunk of a stream must contain the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


def count_tokens(text: str) -> int:
    """Counts the tokens of a text approximately, for budgets and ``usage``."""
    return ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Completion:
    """Formats an answer as OpenAI does, whole or in chunks, of which the last may contain the usage."""

    request: str
    model: str
    prompt_tokens: int
    with_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str) -> dict[str, Any]:
        """Returns the whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return self._head("chat.completion") | {"choices": [choice], "usage": self._usage(count_tokens(text))}

    def first_chunk(self) -> bytes:
        """Returns the chunk before the first text."""
        return self._chunk({"role": "assistant", "content": ""})

    def text_chunk(self, text: str) -> bytes:
        """Returns a chunk of text."""
        return self._chunk({"content": text})

    def last_chunks(self, tokens: int) -> bytes:
        """Returns the chunks after the last text, of an answer with this many tokens."""
        end = self._chunk({}, "stop")
        if self.with_usage:
            end += _event(self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage(tokens)})
        return end + DONE

    def error_chunk(self, error: ApiError) -> bytes:
        """Returns the event that ends an interrupted stream."""
        return _event(error.body)

    def _chunk(self, delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self.with_usage else {}
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.request}", "object": kind, "created": self.created, "model": self.model}

    def _usage(self, tokens: int) -> dict[str, int]:
        total = self.prompt_tokens + tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens, "total_tokens": total}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
