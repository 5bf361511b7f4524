"""A LangChain runnable, chain, agent or graph as a target, called by ``invoke`` or ``ainvoke``.

Nothing of LangChain is imported: any object with this interface works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from casemate.backends.target_answers import partial_answer
from casemate.errors import ConfigError
from casemate.protocols import Target
from casemate.runtime.callables import FunctionCaller, import_attribute
from casemate.types import Answer, Query

NAME = "langchain_runnable"
ANSWERS = ("answer", "result", "output", "text", "output_text", "messages")
"""Keys under which chains and graphs return their answer."""
DETAILS = frozenset({"sources", "ids"})


@dataclass(eq=False)
class LangChainRunnable(Target):
    """Invokes an object with ``invoke`` or ``ainvoke``.

    It returns text, a message, or a mapping with one of them and optionally the documents of the context.

    Attributes:
        runnable: The object, or a function without arguments that returns it, as ``module:name``.
        input: Key of the question in the input mapping; ``messages`` sends it as a user message. Empty: the input is
            the text itself.
        answer: Key of the answer in a returned mapping. Empty: the first of ``answer``, ``result``, ``output``,
            ``text``, ``output_text`` and ``messages``.
        context: Key of the documents in it.
        tells: Details that it returns beside the text: some of ``sources`` (``metadata["source"]``) and ``ids``.
        sessions: Whether each client has its own thread and session id in ``configurable``.
        asynchronous: Whether to await ``ainvoke`` in the caller's loop instead of running ``invoke`` in a thread.
        folder: Folder to import the module from, besides installed packages.
        threads: Largest number of concurrent questions.
        timeout_s: Limit of one attempt.
        retries: Further attempts when it raises; none after a timeout.
        requests_per_s: Rate limit. 0: none. Waiting counts towards the caller's timeout.
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
        if unknown := sorted(self.tells - DETAILS):
            raise ConfigError(f"{NAME}: tells has {unknown[0]!r}; allowed: {', '.join(sorted(DETAILS))}")
        runnable = import_attribute(f"{NAME}.runnable", self.runnable, self.folder)
        method = "ainvoke" if self.asynchronous else "invoke"
        if not _has(runnable, method) and callable(runnable):
            runnable = runnable()
        if not _has(runnable, method):
            raise ConfigError(
                f"{NAME}.runnable is {self.runnable!r}, which has no {method}(); name a runnable, or a function "
                "without arguments that returns one; if it has ainvoke() only, set asynchronous: true"
            )
        self._invoke = getattr(runnable, method)
        self.can: frozenset[str] = frozenset({"clients"} if self.sessions else ())
        limits = (self.timeout_s, self.retries, self.requests_per_s, self.threads)
        self._calls = FunctionCaller(NAME, self.runnable, *limits)

    @property
    def requests(self) -> int:
        """Calls so far, including retries."""
        return self._calls.requests

    async def ask(self, query: Query) -> Answer:
        session = {"thread_id": query.client, "session_id": query.client}
        config = {"configurable": session} if self.sessions else None
        value_in = self._input(query.text)
        value = await self._calls.call(lambda: self._invoke(value_in, config), self.asynchronous)
        try:
            return self._answer(value)
        except (ValueError, TypeError) as error:
            raise self._calls.error(str(error)) from None

    def _input(self, question: str) -> Any:
        if self.input == "messages":
            return {"messages": [("user", question)]}
        return {self.input: question} if self.input else question

    def _answer(self, value: Any) -> Answer:
        """The answer that a returned value contains; ``ValueError``: none, or it lacks a detail in ``tells``."""
        fields: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
        answer = next((fields[key] for key in ([self.answer] if self.answer else ANSWERS) if key in fields), None)
        text = _text(answer if isinstance(value, Mapping) else value)
        if text is None:
            keys = f" with {sorted(map(str, fields))}" if fields else ""
            raise ValueError(f"returned {type(value).__name__}{keys}; expected text, a message, or a mapping with one")
        if not self.tells:
            return partial_answer(text)
        documents = fields.get(self.context)
        if not isinstance(documents, Sequence) or isinstance(documents, str):
            raise ValueError(f"returned no documents under {self.context!r}, which tells requires")
        return partial_answer(
            text,
            [_attribute(d, "id") for d in documents] if "ids" in self.tells else None,
            [_attribute(d, "metadata").get("source") for d in documents] if "sources" in self.tells else None,
        )


def _has(runnable: Any, method: str) -> bool:
    return not isinstance(runnable, type) and callable(getattr(runnable, method, None))


def _attribute(document: Any, name: str) -> Any:
    value = getattr(document, name, None)
    if value is None:
        raise ValueError(f"returned a {type(document).__name__} without {name}, which tells requires")
    return value


def _text(answer: Any) -> str | None:
    """The text of an answer: the text parts of a message, or of the last of several messages."""
    if isinstance(answer, list | tuple) and answer:
        answer = answer[-1]
    content = getattr(answer, "content", answer)
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else part.get("text", "") for part in content]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else None
