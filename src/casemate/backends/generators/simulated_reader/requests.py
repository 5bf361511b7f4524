"""Parses a question into a task and the text that it refers to."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from casemate.text.sentences import sentences


class Task(StrEnum):
    """Tasks of the simulated reader."""

    FILL = "fill"  # fill the masks
    PRESENT = "present"  # is this text in the context, word for word?
    JUDGE = "judge"  # is this statement true, yes or no?
    MATCH = "match"  # return the text of the context that matches this one
    CONTINUE = "continue"  # return the continuation of this text
    REPEAT = "repeat"  # return the whole context
    ANSWER = "answer"  # any other question


class Request(NamedTuple):
    """A parsed question.

    Attributes:
        task: The task.
        text: The text with masks, the quoted text, the statement, or the question itself.
        topic: Text before the statement or question, which names its subject.
    """

    task: Task
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
    r"(?:^|[.!?:;,]\s*|\n[^\S\n]*|\b(?:please|then|now|and|you|to)\s+)(?:"
    r"(?:repeat|copy|print|output|recite|reproduce|transcribe|dump|reveal|echo)\b.{0,60}"
    r"\b(?:context|documents?|passages?|sources?|materials?|texts?|above|everything|verbatim|word[ -]for[ -]word)\b"
    r"|(?:list|write|put|show|return|give|state|quote|provide|display|share|tell)\b.{0,60}"
    r"\b(?:everything|verbatim|word[ -]for[ -]word|the above|your context|"
    r"(?:all|whole|entire|full)(?: of)?(?: the| your| these)?(?: \w+)? (?:context|document|passage|source|text)s?))",
    re.IGNORECASE | re.DOTALL,
)
"""A command to repeat the context: its verb is where a command begins."""
CONTINUES = re.compile(
    r"\b(?:follow(?!ing)\w*|continu\w+|complet\w+|next|rest|remain\w+|go(?:es)? on)\b", re.IGNORECASE
)
MATCHES = re.compile(
    r"\b(?:fit\w*|match\w*|belong\w*|correspond\w*|closest|nearest|similar|related|relevant)\b", re.IGNORECASE
)
QUOTE_WORDS = 8  # a shorter quotation may be a name in a question, unless the rest of the question mentions a text
FORM_WORDS = 25  # a longer sentence is more than a request for an answer format


def parse_request(question: str) -> Request:
    """Recognizes the task of a question."""
    if MASK.search(question):
        return Request(Task.FILL, question)
    plain = ANSWER_FORM.sub(r"\1\2", question)
    quote, frame = _quotation(plain)
    if YES_NO.search(frame):
        return Request(Task.PRESENT, quote) if quote else Request(Task.JUDGE, *_parts(plain))
    if quote and CONTINUES.search(frame) and not MATCHES.search(frame):
        return Request(Task.CONTINUE, quote)
    if quote and (MATCHES.search(frame) or CONTINUES.search(frame)):
        return Request(Task.MATCH, quote)
    if ABOUT_CONTEXT.search(frame):
        return Request(Task.REPEAT, quote)
    return Request(Task.ANSWER, *_parts(plain))


def _quotation(question: str) -> tuple[str, str]:
    """The quoted text, or empty, and the question around it."""
    if found := QUOTED.search(question):
        frame = question[: found.start()] + " " + question[found.end() :]
        length = len(found[1].split())
        mentioned = ABOUT_TEXT.search(frame) or CONTINUES.search(frame)
        if length >= QUOTE_WORDS or (mentioned and 4 * length >= len(frame.split())):
            return found[1].strip(), frame
    if found := POINTER.search(question[:400]):  # no quotation marks, but a long text after a colon
        body, _, tail = question[found.end() :].partition("\n\n")
        request = FORM.search(body)
        text = body[: request.start()] if request else body
        if len(text.split()) >= QUOTE_WORDS:
            return text.strip(), f"{question[: found.end()]} {request[0] if request else ''} {tail}"
    return "", question


def _parts(question: str) -> tuple[str, str]:
    """The last question without the request for an answer format, and the text before it."""
    parts = [p for p in sentences(question) if not YES_NO.search(p) or len(p.split()) > FORM_WORDS]
    if not parts:  # statement and format in one sentence
        return YES_NO.sub("", question).strip(), ""
    questions = [i for i, part in enumerate(parts) if part.rstrip().endswith("?")]
    at = questions[-1] if questions else len(parts) - 1
    return parts[at], " ".join(parts[:at])
