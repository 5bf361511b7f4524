"""Spans in one form for all export formats, and their content: a question, its answer, the context's documents.

The names of four conventions are read:

- OpenTelemetry, generative AI: ``gen_ai.*`` attributes and events, also those of earlier versions;
- OpenInference: ``openinference.span.kind``, ``input.value``, ``llm.*``, ``retrieval.documents.*``;
- OpenLLMetry: ``gen_ai.prompt.0.content``, ``traceloop.entity.input``;
- Casemate's own gateway: the event ``verdict``.

Frameworks wrap texts in JSON of many shapes. Two lists of keys, for questions and for answers, say where the text is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Any, NamedTuple

MAX_ID = 200
"""Characters of an id or a source; a longer one, or one that is not printable, is replaced by its hash."""
MAX_DOCUMENTS = 50
"""Documents of one span that are read."""
MAX_NESTING = 8
"""Depth of JSON in JSON that is searched for a text."""
QUESTION_KEYS = (
    "question query user_input user_query input prompt text content messages message parts contents value kwargs args "
    "data"
).split()
ANSWER_KEYS = (
    "answer output result response completion text content messages message choices generations parts contents value "
    "kwargs data"
).split()
"""Keys that contain the text, the likeliest first."""
ASKING_ROLES, ANSWERING_ROLES = {"user", "human"}, {"assistant", "ai", "model"}
SOURCE_KEYS = ("source", "file_path", "file_name", "filename", "url", "path")
DETAILS_EVENT = "gen_ai.client.inference.operation.details"


class SpanEvent(NamedTuple):
    """Something that happened during a span: its name and its attributes."""

    name: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """One step of one request.

    Attributes:
        parent: Id of the enclosing span; empty: none.
        start: None: the export has no usable time.
        attributes: Attributes under their published names. Values are strings, numbers, lists or mappings.
    """

    trace: str
    id: str
    parent: str
    start: datetime | None
    attributes: Mapping[str, Any]
    events: tuple[SpanEvent, ...] = ()


class QuestionPlace(IntEnum):
    """Where in a request a question was found. The lower, the likelier it is the user's own wording."""

    WHOLE = 0
    """Input of the whole request: an agent, a chain, a workflow."""
    RETRIEVAL = 1
    """Query of a retrieval, which may be rewritten."""
    MODEL = 2
    """Last message to the model, which may contain a prompt template."""


def wording_order(place: int, root: bool, at: datetime | None) -> tuple[int, bool, float]:
    """Sorts the spans of a trace: the likeliest user's own wording first, then spans without a parent, then by start.

    ``place`` is a ``QuestionPlace``; without a start the span is last.
    """
    return place, not root, at.timestamp() if at else float("inf")


KINDS = {
    **dict.fromkeys(("chain", "agent", "workflow", "task", "trace", "span"), QuestionPlace.WHOLE),
    **dict.fromkeys(("invoke_agent", "invoke_workflow"), QuestionPlace.WHOLE),
    **dict.fromkeys(("retriever", "retrieval", "reranker"), QuestionPlace.RETRIEVAL),
    **dict.fromkeys(("llm", "chat", "generation", "generate_content", "text_completion"), QuestionPlace.MODEL),
}
"""Kinds of spans that can contain a question, in the words of all conventions; of the others no text is read."""


class TracedDocument(NamedTuple):
    """A document of a context: its id and its source; empty where the trace has none."""

    id: str
    source: str


@dataclass(frozen=True, slots=True)
class SpanContent:
    """What a span tells; ``answer`` and ``flagged`` are None, and the others empty, where it tells nothing."""

    place: QuestionPlace
    question: str
    answer: str | None
    documents: tuple[TracedDocument, ...]
    flagged: bool | None

    @property
    def empty(self) -> bool:
        """Whether nothing was found."""
        return not (self.question or self.documents) and self.answer is None and self.flagged is None


def read_content(span: Span) -> SpanContent:
    """Reads a span. Never raises: what is not understood is left out."""
    attributes = dict(span.attributes)
    for event in span.events:
        if event.name == DETAILS_EVENT:
            attributes |= event.attributes
    place = _place(attributes)
    question, answer, documents = "", None, tuple[TracedDocument, ...]()
    if place is not None:
        question = _question(attributes, span.events).strip()
        answer = None if place is QuestionPlace.RETRIEVAL else _answer(attributes, span.events)
        documents = _documents(attributes, place)
    verdicts = [event.attributes for event in span.events if event.name == "verdict"]
    flagged = any(v.get("casemate.flagged") is True for v in verdicts) if verdicts else None
    return SpanContent(place or QuestionPlace.WHOLE, question, answer, documents, flagged)


def safe_id(text: str) -> str:
    """An id as it is stored: itself, or its hash if it is too long to be an id or not printable.

    >>> safe_id("leave.md#3"), len(safe_id("a whole sentence " * 20))
    ('leave.md#3', 64)
    """
    usable = len(text) <= MAX_ID and text.isprintable()
    return text if usable else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _place(attributes: Mapping[str, Any]) -> QuestionPlace | None:
    """None if the span is of a kind without a question: an embedding, a tool, an evaluation."""
    for name in ("openinference.span.kind", "gen_ai.operation.name", "traceloop.span.kind", "llm.request.type"):
        kind = attributes.get(name)
        if isinstance(kind, str) and kind:
            return KINDS.get(kind.lower())
    if any(name.startswith("gen_ai.") for name in attributes):
        return QuestionPlace.MODEL  # versions before 1.27 have no operation
    return None


def _question(attributes: Mapping[str, Any], events: Sequence[SpanEvent]) -> str:
    found: list[Any] = [attributes.get("gen_ai.retrieval.query.text"), attributes.get("gen_ai.input.messages")]
    found.append(_indexed(attributes, "llm.input_messages."))
    found.append(_indexed(attributes, "gen_ai.prompt."))
    found += [attributes.get(name) for name in ("input.value", "traceloop.entity.input", "gen_ai.prompt")]
    found += [event.attributes.get("content") for event in events[::-1] if event.name == "gen_ai.user.message"][:1]
    found += [event.attributes.get("gen_ai.prompt") for event in events if event.name == "gen_ai.content.prompt"]
    return next((text for raw in found if (text := _text(raw, QUESTION_KEYS, ASKING_ROLES))), "")


def _answer(attributes: Mapping[str, Any], events: Sequence[SpanEvent]) -> str | None:
    found: list[Any] = [attributes.get("gen_ai.output.messages"), _indexed(attributes, "llm.output_messages.")]
    found.append(_indexed(attributes, "gen_ai.completion."))
    found += [attributes.get(name) for name in ("output.value", "traceloop.entity.output", "gen_ai.completion")]
    for event in events:
        if event.name == "gen_ai.choice":
            found += [event.attributes.get("message"), event.attributes.get("content")]
        if event.name == "gen_ai.content.completion":
            found.append(event.attributes.get("gen_ai.completion"))
    return next((text for raw in found if (text := _text(raw, ANSWER_KEYS, ANSWERING_ROLES))), None)


def _documents(attributes: Mapping[str, Any], place: QuestionPlace) -> tuple[TracedDocument, ...]:
    raw: Any = attributes.get("gen_ai.retrieval.documents")
    raw = raw or _indexed(attributes, "retrieval.documents.") or _indexed(attributes, "reranker.output_documents.")
    if not raw and place is QuestionPlace.RETRIEVAL:
        raw = attributes.get("output.value")
    found = [d for one in _document_list(raw, 0)[:MAX_DOCUMENTS] if (d := _document(one)) and (d.id or d.source)]
    return tuple(dict.fromkeys(found))


def _document_list(raw: Any, depth: int) -> list[Mapping[str, Any]]:
    raw = _parsed(raw)
    if isinstance(raw, Mapping) and depth < MAX_NESTING:
        inner = next((raw[key] for key in ("documents", "nodes", "matches", "results") if key in raw), None)
        return _document_list(inner, depth + 1)
    return [one for one in raw if isinstance(one, Mapping)] if isinstance(raw, list) else []


def _document(raw: Mapping[str, Any]) -> TracedDocument | None:
    """A document in the form of a framework: LangChain, LlamaIndex, Haystack, or OpenInference's attributes."""
    for key in ("kwargs", "node", "document"):
        if isinstance(inner := raw.get(key), Mapping):
            raw = inner
    metadata = _parsed(raw.get("metadata", raw.get("document.metadata", raw.get("meta"))))
    metadata = metadata if isinstance(metadata, Mapping) else {}
    names = ("document.id", "id", "id_", "_id", "node_id", "doc_id", "document_id")
    name = next((raw[key] for key in names if isinstance(raw.get(key), str | int)), metadata.get("id", ""))
    source = next((found for part in (raw, metadata) for key in SOURCE_KEYS if (found := part.get(key))), "")
    name, source = (safe_id(str(one)) if isinstance(one, str | int) else "" for one in (name, source))
    return TracedDocument(name, source)


def _indexed(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Items of a list that is flattened into attributes: ``PREFIX0.role``, ``PREFIX0.content``, ``PREFIX1.role``."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in attributes.items():
        number, _, key = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and re.fullmatch(r"\d{1,6}", number, re.ASCII):
            key = key.removeprefix("message.")
            key = "content" if re.fullmatch(r"contents\.\d+\.message_content\.text", key, re.ASCII) else key
            found.setdefault(int(number), {})[key] = value
    return [found[number] for number in sorted(found)]


def _text(raw: Any, keys: Sequence[str], roles: set[str], depth: int = 0) -> str:
    """The text in a value: the last message of one of the roles, or what is under the likeliest key."""
    raw = _parsed(raw)
    if isinstance(raw, str):
        return raw.strip()
    if depth > MAX_NESTING:
        return ""
    if isinstance(raw, list):
        return _text_in_list(raw, keys, roles, depth)
    if isinstance(raw, Mapping):
        given = (raw[key] for key in keys if raw.get(key))
        return next((text for one in given if (text := _text(one, keys, roles, depth + 1))), "")
    return ""


def _text_in_list(raw: Sequence[Any], keys: Sequence[str], roles: set[str], depth: int) -> str:
    messages = [one for one in raw if isinstance(one, Mapping) and _role(one)]
    if messages:
        said = next((one for one in reversed(messages) if _role(one) in roles), {})
        # the role decides; without a message of the role there is no text
        rest = {key: value for key, value in said.items() if key not in ("role", "type", "id")}
        return _text(rest, keys, roles, depth + 1)
    read = (_text(one, keys, roles, depth + 1) for one in raw[:MAX_DOCUMENTS] if not _is_media(one))
    texts = [text for text in read if text]
    is_one_message = all(isinstance(one, Mapping) and "type" in one for one in raw)
    return "\n".join(texts if is_one_message else texts[:1])


def _role(message: Mapping[str, Any]) -> str:
    """Role of a message, also in LangChain's serialized forms; empty if the value is not a message."""
    role = message.get("role")
    if role is None and message.get("type") in ("human", "ai", "system", "tool"):
        role = message["type"]
    if role is None and isinstance(name := message.get("id"), list) and name and message.get("lc"):
        role = {"HumanMessage": "human", "AIMessage": "ai"}.get(str(name[-1]), "other")
    return role.lower() if isinstance(role, str) else ""


def _is_media(part: Any) -> bool:
    """Whether a part of a message is not text: an image, a call of a tool."""
    return isinstance(part, Mapping) and part.get("type") not in (None, "text", "output_text", "input_text")


def _parsed(raw: Any) -> Any:
    """The value in a string that contains a JSON object or list; else the value itself."""
    if isinstance(raw, str) and raw.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return raw
    return raw
