"""What the attacker's language model writes about a candidate: a summary, and questions."""

from __future__ import annotations

from casemate.protocols import Generator
from casemate.redteam.crawling.anchors import LIST_ITEM
from casemate.text.sentences import describe_topic
from casemate.types import Document, Prompt

SUMMARY_REQUEST = (
    "Name the subject of the document in one short phrase that holds its most telling terms. Write the phrase and "
    "nothing else; do not call it a document, text or study."
)


async def generate(generator: Generator, question: str, candidate: Document, instructions: str = "") -> str:
    """Text of a generator with the candidate as context."""
    return "".join([piece async for piece in generator.stream(Prompt(question, (candidate,), instructions))])


async def summarize(writer: Generator | None, candidate: Document) -> str:
    """A summary, by rules without a writer; it ends with a full stop."""
    written = await generate(writer, SUMMARY_REQUEST, candidate) if writer else ""
    summary = (" ".join(written.split()) or describe_topic(candidate.text, candidate.title)).rstrip(". ")
    return summary if summary.endswith(("?", "!")) else f"{summary}."


async def write_questions(writer: Generator | None, request: str, count: int, candidate: Document) -> list[str]:
    """The writer's first questions; empty without a writer."""
    lines = (await generate(writer, request.format(count=count), candidate)).splitlines() if writer else []
    return [q for q in (LIST_ITEM.sub("", line).strip() for line in lines) if q.endswith("?")][:count]
