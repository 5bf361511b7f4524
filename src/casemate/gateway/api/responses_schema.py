"""OpenAI's shapes of the responses API: requests, whole responses and the events of a stream. Text only.

Nothing is stored: a client sends the whole conversation, as it does to ``/v1/chat/completions``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from casemate.gateway.api.openai_schema import RequestBody, RequestModel, Text, count_tokens
from casemate.gateway.errors import ApiError, to_json

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "previous_response_id": (),
    "prompt": (),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""See ``RequestBody.neutral``."""


class InputText(RequestModel):
    """A text part of an input message. Images, audio and files are refused."""

    type: Literal["input_text", "output_text"]
    text: Text


class InputMessage(RequestModel):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[InputText]

    @property
    def text(self) -> str:
        """All text of the message."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ResponsesRequest(RequestBody):
    """Body of ``POST /v1/responses``. ``instructions`` are ignored, as system messages are."""

    neutral = NEUTRAL_VALUES
    question_field = "input"
    model: Text
    input: Text | Annotated[list[InputMessage], Field(min_length=1, max_length=2000)]
    stream: bool | None = None
    user: Text | None = None

    @property
    def turns(self) -> Sequence[tuple[str, str]]:
        if isinstance(self.input, str):
            return [("user", self.input)]
        return [(message.role, message.text) for message in self.input]


@dataclass(slots=True)
class ResponseEvents:
    """Formats an answer as OpenAI's responses API does, whole or as the events of one stream."""

    request: str
    model: str
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    _pieces: list[str] = field(default_factory=list)
    _number: int = 0

    def whole(self, text: str) -> dict[str, Any]:
        """Returns the whole response."""
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": count_tokens(text),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + count_tokens(text),
        }
        return self._response("completed", [self._item("completed", [_part(text)])], usage)

    def first_chunk(self) -> bytes:
        """Returns the events before the first text."""
        started = {"response": self._response("in_progress", [], None)}
        return b"".join(
            (
                self._event("response.created", started),
                self._event("response.in_progress", started),
                self._event("response.output_item.added", {"output_index": 0, "item": self._item("in_progress", [])}),
                self._event("response.content_part.added", self._position() | {"part": _part("")}),
            )
        )

    def text_chunk(self, text: str) -> bytes:
        """Returns the event of a piece of text."""
        self._pieces.append(text)
        return self._event("response.output_text.delta", self._position() | {"delta": text, "logprobs": []})

    def last_chunks(self, tokens: int) -> bytes:
        """Returns the events after the last text."""
        text = "".join(self._pieces)
        whole = self.whole(text)
        return b"".join(
            (
                self._event("response.output_text.done", self._position() | {"text": text, "logprobs": []}),
                self._event("response.content_part.done", self._position() | {"part": _part(text)}),
                self._event("response.output_item.done", {"output_index": 0, "item": whole["output"][0]}),
                self._event("response.completed", {"response": whole}),
            )
        )

    def error_chunk(self, error: ApiError) -> bytes:
        """Returns the event that ends an interrupted stream."""
        body = error.body["error"]
        return self._event("error", {name: body[name] for name in ("code", "message", "param")})

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": f"resp_{self.request}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": usage,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    @property
    def _item_id(self) -> str:
        return f"msg_{self.request}"

    def _position(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + to_json(body) + b"\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
