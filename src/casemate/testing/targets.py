"""Conformance suite for targets."""

from __future__ import annotations

import asyncio

from casemate.errors import BackendError
from casemate.protocols import TARGET_DETAILS, Target
from casemate.types import Answer, Query

QUESTIONS = ("When does the pharmacy open?", "naïve café 漢字 🦉?", "a" * 2000)


def check_target(target: Target, broken: Target | None = None) -> None:
    """Runs every check for a target. Call it where no event loop runs.

    Args:
        target: A target whose system is reachable and answers every question.
        broken: The same kind of target whose system fails; None: the check is left out.
    """

    async def concurrent() -> list[Answer]:
        queries = [Query(text, client=f"client {i}") for i, text in enumerate(QUESTIONS * 3)]
        return list(await asyncio.gather(*map(target.ask, queries)))

    async def streamed(query: Query) -> list[str]:
        return [piece async for piece in target.stream(query)]

    for attribute, allowed in (("tells", TARGET_DETAILS), ("can", {"clients"})):
        unknown = sorted(set(getattr(target, attribute, ())) - allowed)
        assert not unknown, f"{attribute} contains {unknown[0]!r}; allowed: {', '.join(sorted(allowed))}"
    for text in QUESTIONS:
        answer = asyncio.run(target.ask(Query(text)))
        assert isinstance(answer, Answer), f"ask must return an Answer, not {type(answer).__name__}"
        assert isinstance(answer.text, str), "the text of an answer must be a text"
        ids = [hit.document.id for hit in answer.retrieval.hits]
        assert len(ids) == len(set(ids)), "a document must not occur twice in a context"
        pieces = asyncio.run(streamed(Query(text)))
        assert all(isinstance(piece, str) for piece in pieces), "stream must yield texts"
    assert len(asyncio.run(concurrent())) == 3 * len(QUESTIONS), "concurrent questions must work"
    if broken is not None:
        try:
            asyncio.run(broken.ask(Query(QUESTIONS[0])))
        except BackendError as error:
            assert str(error) and QUESTIONS[0] not in str(error), "an error must not repeat the question"
        else:
            raise AssertionError("a system that fails must raise BackendError")
