"""What an attacker's language model writes: lines and phrases; of a candidate, a summary and questions."""

from __future__ import annotations

import re

from casemate.protocols import Generator
from casemate.redteam.crawling.anchors import MAX_ANCHOR_CHARACTERS
from casemate.text.sentences import describe_topic
from casemate.types import Document, Prompt

LIST_ITEM = re.compile(r"^[\s\-*•]*(?:\d+[.):]\s*)?")
SUMMARY_REQUEST = (
    "Name the subject of the document in one short phrase that holds its most telling terms. Write the phrase and "
    "nothing else; do not call it a document, text or study."
)


async def generate(generator: Generator, request: str, *context: Document, instructions: str = "") -> str:
    """Text of a generator with some documents as context."""
    return "".join([piece async for piece in generator.stream(Prompt(request, context, instructions))])


async def writer_lines(writer: Generator, request: str, text: str = "") -> list[str]:
    """Lines that the writer writes about a text, without numbers and bullets."""
    written = await generate(writer, request, *((Document("reply", text),) if text else ()))
    return [line for raw in written.splitlines() if (line := LIST_ITEM.sub("", raw).strip(" \"'`"))]


async def writer_phrases(writer: Generator, request: str, count: int, text: str = "") -> list[str]:
    """The writer's first phrases, each once; long lines are dropped."""
    written = (line.rstrip(".,;:") for line in await writer_lines(writer, request, text))
    return list(dict.fromkeys(line for line in written if line and len(line) <= MAX_ANCHOR_CHARACTERS))[:count]


async def summarize(writer: Generator | None, candidate: Document) -> str:
    """A summary, by rules without a writer; it ends with a full stop."""
    written = await generate(writer, SUMMARY_REQUEST, candidate) if writer else ""
    summary = (" ".join(written.split()) or describe_topic(candidate.text, candidate.title)).rstrip(". ")
    return summary if summary.endswith(("?", "!")) else f"{summary}."


async def write_questions(writer: Generator | None, request: str, count: int, candidate: Document) -> list[str]:
    """The writer's first questions; empty without a writer."""
    lines = (await generate(writer, request.format(count=count), candidate)).splitlines() if writer else []
    return [q for q in (LIST_ITEM.sub("", line).strip() for line in lines) if q.endswith("?")][:count]
