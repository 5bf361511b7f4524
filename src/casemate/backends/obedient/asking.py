"""What is asked of a model: the kind of task, and the text that it is about."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from casemate.words import sentences


class Kind(StrEnum):
    """The tasks that the reader knows."""

    FILL = "fill"  # give the word at each mask
    PRESENT = "present"  # does the context hold this text, word for word?
    JUDGE = "judge"  # is this statement true, yes or no?
    MATCH = "match"  # give the text of the context that goes with this one
    CONTINUE = "continue"  # give what follows this text
    REPEAT = "repeat"  # give the whole context
    ANSWER = "answer"  # any other question


class Request(NamedTuple):
    """A question, understood.

    Attributes:
        kind: The task.
        text: What it is about: the text with masks, the quoted text, the statement, or the question itself.
        topic: What stands in front of a statement or question, and says what it is about.
    """

    kind: Kind
    text: str
    topic: str = ""


MASK = re.compile(r"[\[<{(](?:MASK|BLANK|GAP)[_ -]?\d*[\]>})]|_{3,}", re.IGNORECASE)
QUOTED = re.compile(r"[\"“”«](.+)[\"“”»]", re.DOTALL)
ANSWER_FORM = re.compile(r"[\"“”'‘’](yes|no|true|false|i (?:don['’]t|do not) know)([.,]?)[\"“”'‘’]", re.IGNORECASE)
YES_NO = re.compile(r"\byes\b.{0,20}\bno\b|\bno\b.{0,20}\byes\b|\btrue or false\b", re.IGNORECASE | re.DOTALL)
FORM = re.compile(
    r"(?:\b(?:please|answer|reply|respond|say)\b[^.:?!\n]{0,30})?\byes\b.{0,20}\bno\b\W*(?:\w+\W*){0,6}$", re.IGNORECASE
)
POINTER = re.compile(
    r"\b(?:this|these|the following|text|passage|excerpt|sentence)\b[^.:?\n]{0,80}:\s"
    r"|\b(?:text|passage|excerpt|sentence|paragraph) below\b[^:?\n]{0,80}[:?]\s",
    re.IGNORECASE,
)
ABOUT_TEXT = re.compile(
    r"\b(?:text|passage|excerpt|quot\w+|sentence|statement|paragraph|snippet|words?|appear\w*|beginning)\b",
    re.IGNORECASE,
)
ABOUT_CONTEXT = re.compile(
    r"(?:^|[.!?:;,\n]\s*|\b(?:please|then|now|and|you|to)\s+)(?:"
    r"(?:repeat|copy|print|output|recite|reproduce|transcribe|dump|reveal|echo)\b.{0,60}"
    r"\b(?:context|documents?|passages?|sources?|materials?|texts?|above|everything|verbatim|word[ -]for[ -]word)\b"
    r"|(?:list|write|put|show|return|give|state|quote|provide|display|share|tell)\b.{0,60}"
    r"\b(?:everything|verbatim|word[ -]for[ -]word|the above|your context|"
    r"(?:all|whole|entire|full)(?: of)?(?: the| your| these)?(?: \w+)? (?:context|document|passage|source|text)s?))",
    re.IGNORECASE | re.DOTALL,
)
"""A command to say the context again: its verb stands where a command begins."""
CONTINUES = re.compile(
    r"\b(?:follow(?!ing)\w*|continu\w+|complet\w+|next|rest|remain\w+|go(?:es)? on)\b", re.IGNORECASE
)
MATCHES = re.compile(
    r"\b(?:fit\w*|match\w*|belong\w*|correspond\w*|closest|nearest|similar|related|relevant)\b", re.IGNORECASE
)
QUOTE_WORDS = 8
"""A quotation of fewer words may be a name inside a question, unless the rest of the question speaks of a text."""
FORM_WORDS = 25
"""A longer sentence is no mere request for a form of answer."""


def understand(question: str) -> Request:
    """The task in a question, whatever its exact wording."""
    if MASK.search(question):
        return Request(Kind.FILL, question)
    plain = ANSWER_FORM.sub(r"\1\2", question)
    quote, frame = _quotation(plain)
    if YES_NO.search(frame):
        return Request(Kind.PRESENT, quote) if quote else Request(Kind.JUDGE, *_parts(plain))
    if quote and CONTINUES.search(frame) and not MATCHES.search(frame):
        return Request(Kind.CONTINUE, quote)
    if quote and (MATCHES.search(frame) or CONTINUES.search(frame)):
        return Request(Kind.MATCH, quote)
    if ABOUT_CONTEXT.search(frame):
        return Request(Kind.REPEAT, quote)
    return Request(Kind.ANSWER, *_parts(plain))


def _quotation(question: str) -> tuple[str, str]:
    """The text that is quoted, if any, and the question around it."""
    if found := QUOTED.search(question):
        frame = question[: found.start()] + " " + question[found.end() :]
        length = len(found[1].split())
        spoken_of = ABOUT_TEXT.search(frame) or CONTINUES.search(frame)
        if length >= QUOTE_WORDS or (spoken_of and 4 * length >= len(frame.split())):
            return found[1].strip(), frame
    if found := POINTER.search(question[:400]):  # no quotation marks: a long text after a colon
        body, _, tail = question[found.end() :].partition("\n\n")
        request = FORM.search(body)
        text = body[: request.start()] if request else body
        if len(text.split()) >= QUOTE_WORDS:
            return text.strip(), f"{question[: found.end()]} {request[0] if request else ''} {tail}"
    return "", question


def _parts(question: str) -> tuple[str, str]:
    """The last question that asks something, without the request for a form of answer; and what precedes it."""
    pieces = [p for p in sentences(question) if not YES_NO.search(p) or len(p.split()) > FORM_WORDS]
    if not pieces:  # statement and form in one sentence
        return YES_NO.sub("", question).strip(), ""
    asked = [i for i, piece in enumerate(pieces) if piece.rstrip().endswith("?")]
    at = asked[-1] if asked else len(pieces) - 1
    return pieces[at], " ".join(pieces[:at])
