"""A LangChain runnable, chain, agent or graph as a system that answers. It is called by its interface: ``invoke``.

Nothing of LangChain is imported here: whatever has the interface will do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from casemate.callables import Patience, named
from casemate.errors import ConfigError
from casemate.protocols import Target
from casemate.remote import names, told
from casemate.types import Answer, Query

NAME = "langchain_runnable"
ANSWERS = ("answer", "result", "output", "text", "output_text", "messages")
"""Keys under which chains and graphs return what they say."""
TELLS = frozenset({"sources", "ids"})


@dataclass(eq=False)
class LangChainRunnable(Target):
    """Invokes an object that has ``invoke`` or ``ainvoke``.

    It returns the answer's text; or a message, whose text is the answer; or a mapping with one of them, and, as far as
    it tells them, the documents that it read.

    Attributes:
        runnable: The object, or a function without arguments that makes it, as ``module:name``.
        input: Key under which the question is given in a mapping; ``messages`` gives it as a user's message. Empty:
            the text itself.
        answer: Key of the answer in a mapping that comes back; empty: ``answer``, ``result``, ``output``, ``text``,
            ``output_text`` or ``messages``, the first there is.
        context: Key of the documents in it.
        tells: What it tells beside the text: some of ``sources`` (``metadata["source"]``) and ``ids``.
        sessions: Whether each client is a thread and session of his own, by ``configurable``.
        asynchronous: Whether ``ainvoke`` is awaited where it was asked, instead of ``invoke`` in a thread.
        folder: Where the module may lie beside the installed ones.
        threads: Questions at once.
        timeout_s: Longest time for one try.
        retries: Further tries when it raises; not after a try that was too slow.
        requests_per_s: Most calls in a second; 0: no limit. Waiting counts towards the time that an asker allows.
    """

    runnable: str
    input: str = ""
    answer: str = ""
    context: str = "context"
    tells: frozenset[str] = frozenset()
    sessions: bool = False
    asynchronous: bool = False
    folder: Path = Path()
    threads: int = 8
    timeout_s: float = 60.0
    retries: int = 0
    requests_per_s: float = 0.0

    def __post_init__(self) -> None:
        if unknown := sorted(self.tells - TELLS):
            raise ConfigError(f"{NAME}: tells has {unknown[0]!r}; allowed: {', '.join(sorted(TELLS))}")
        found = named(f"{NAME}.runnable", self.runnable, self.folder)
        way = "ainvoke" if self.asynchronous else "invoke"
        if not _has(found, way) and callable(found):
            found = found()
        if not _has(found, way):
            raise ConfigError(
                f"{NAME}.runnable is {self.runnable!r}, which has no {way}(); name a runnable, or a function without "
                "arguments that returns one; for one with ainvoke() only, set asynchronous: true"
            )
        self._invoke = getattr(found, way)
        self.can: frozenset[str] = frozenset({"clients"} if self.sessions else ())
        limits = (self.timeout_s, self.retries, self.requests_per_s, self.threads)
        self._patience = Patience(NAME, self.runnable, *limits)

    @property
    def requests(self) -> int:
        """Calls so far, tries included."""
        return self._patience.requests

    async def ask(self, query: Query) -> Answer:
        """Answers one query, whole.

        Raises:
            BackendError: If the runnable raises, takes too long, or returns what is no answer.
        """
        known = {"thread_id": query.client, "session_id": query.client}
        config = {"configurable": known} if self.sessions else None
        given = self._given(query.text)
        value = await self._patience.returned(lambda: self._invoke(given, config), self.asynchronous)
        try:
            return self._answer(value)
        except (ValueError, TypeError) as error:
            raise self._patience.error(str(error)) from None

    async def stream(self, query: Query) -> AsyncIterator[str]:
        """The whole answer in one piece."""
        yield (await self.ask(query)).text

    def _given(self, question: str) -> Any:
        if self.input == "messages":
            return {"messages": [("user", question)]}
        return {self.input: question} if self.input else question

    def _answer(self, value: Any) -> Answer:
        """What came back, as an answer.

        Raises:
            ValueError: If it is none, or lacks what the runnable is said to tell.
        """
        found: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
        said = next((found[key] for key in ([self.answer] if self.answer else ANSWERS) if key in found), None)
        text = _text(said if isinstance(value, Mapping) else value)
        if text is None:
            keys = f" with {sorted(map(str, found))}" if found else ""
            raise ValueError(f"returned {type(value).__name__}{keys}; need a text, a message, or a mapping with one")
        if not self.tells:
            return told(text)
        documents = found.get(self.context)
        if not isinstance(documents, Sequence) or isinstance(documents, str):
            raise ValueError(f"returned no documents under {self.context!r}, though it is said to tell them (tells)")
        return told(
            text,
            names([_of(d, "id") for d in documents]) if "ids" in self.tells else None,
            names([_of(d, "metadata").get("source") for d in documents]) if "sources" in self.tells else None,
        )


def _has(found: Any, way: str) -> bool:
    return not isinstance(found, type) and callable(getattr(found, way, None))


def _of(document: Any, part: str) -> Any:
    found = getattr(document, part, None)
    if found is None:
        raise ValueError(f"returned a {type(document).__name__} without {part}, though it is said to tell them (tells)")
    return found


def _text(said: Any) -> str | None:
    """The text of an answer: of a message the parts that are text, of several messages that of the last."""
    if isinstance(said, list | tuple) and said:
        said = said[-1]
    content = getattr(said, "content", said)
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else part.get("text", "") for part in content]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else None
