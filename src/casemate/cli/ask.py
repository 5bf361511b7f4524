"""``ask``: answers one question or a file of questions, with verdicts for the operator."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from casemate import config as configuration
from casemate.app import open_app
from casemate.backends.generators.extractive import unanswered_reason
from casemate.cli.console import Code, ConfigFile, Json, Tenant, note, out, plain, print_json, say, shown
from casemate.config import Config
from casemate.errors import BackendError, ConfigError, QueryError
from casemate.gateway.auth.keys import ApiKey, ApiKeyStore, query_of
from casemate.guard import verdict_log
from casemate.guard.audience import IGNORED
from casemate.protocols import Target
from casemate.rag.pipeline import require_answerable
from casemate.rag.question_file import read_questions
from casemate.reports.format import plural
from casemate.reports.verdicts import NOTES, context_rows, score_figures, some, verdict_lines
from casemate.system import App
from casemate.types import DEFAULT_TENANT, UNKNOWN, Action, Answer, Query, Verdict

Mode = Annotated[Literal["enforce", "observe", "off"] | None, typer.Option("--guard", help="Overrides guard.mode.")]


def ask(
    question: Annotated[str | None, typer.Argument(help="The question.")] = None,
    config: ConfigFile = None,
    k: Annotated[int | None, typer.Option("-k", "--k", help="Documents in the context. Default: rag.k.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    client: Annotated[str, typer.Option(help="Client name, for state kept per client. Default: a new client.")] = "",
    as_client: Annotated[
        str, typer.Option("--as", help="Ask as an API key, by id, name or its beginning: a dry run, not recorded.")
    ] = "",
    guard: Mode = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show verdicts and hidden documents.")] = False,
    questions: Annotated[
        str | None, typer.Option("--from", help="File with one question per line, plain or jsonl(.gz); - for stdin.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer one question, or a file of questions (one JSON line each)."""
    if (question is None) == (questions is None):
        raise ConfigError("give either a question or --from FILE")
    if as_client and client:
        raise ConfigError("--as and --client exclude each other: a key is a client; give one of them")
    settings = _with_mode(configuration.read(config), guard)
    with open_app(settings) as app:
        asker = _Asker.of(app, as_client, client, tenant, settings.rag.k if k is None else k)
        asker.warn_of_observe_mode()
        if questions is not None:
            with closing(read_questions(questions)) as lines:
                first = next(lines, None)  # opens the file
                app.require_documents(asker.tenant)
                complete = first is None or asyncio.run(_answer_file(asker, chain([first], lines)))
            raise typer.Exit(Code.OK if complete else Code.INCOMPLETE)
        assert question is not None
        require_answerable(asker.query(question))
        app.require_documents(asker.tenant)
        if as_json or explain:
            answer, excluded = asyncio.run(asker.explained(question))
            why = "" if as_json else _no_answer_reason(app, question, answer)
            print_json(_as_json(answer, excluded)) if as_json else _explain(answer, settings.guard.mode, excluded, why)
        else:
            asker.print_stream(question)


@dataclass(frozen=True, slots=True)
class _Excluded:
    """Sources among the nearest chunks that a client does not receive, whatever the defenses decide.

    Attributes:
        sources: Removed by the audience policy (``unentitled: nothing``); None if it removes nothing for this client.
        labeled: With access labels that the client lacks.
    """

    client: str
    k: int
    sources: tuple[str, ...] | None
    labeled: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """One line for each reason."""
        if self.labeled:
            yield f"labels: {self._found(self.labeled)} (acl): {some(self.labeled)}"
        if self.sources is not None:
            names = f": {some(self.sources)}" if self.sources else ""
            yield f"audience: {self._found(self.sources)} (unentitled: nothing){names}"

    def _found(self, sources: tuple[str, ...]) -> str:
        count = plural(len(sources), "source")
        return f"of the {plural(self.k, 'nearest chunk')}, {count} not readable by {self.client}"


@dataclass(frozen=True, slots=True)
class _Asker:
    """The client of the questions, and the system that answers it; without a key, it is the operator."""

    app: App
    key: ApiKey | None
    client: str
    tenant: str
    k: int

    @classmethod
    def of(cls, app: App, key: str, client: str, tenant: str, k: int) -> _Asker:
        found = ApiKeyStore(app.store).named(key) if key else None
        return cls(app, found, client, found.grant.tenant if found else tenant, k)

    @property
    def target(self) -> Target:
        """For a key, a system that records nothing."""
        return self.app.target if self.key is None else self.app.unrecorded_target()

    def query(self, text: str) -> Query:
        if self.key is not None:
            return query_of(self.key, text, self.key.id, self.k)
        # A fresh client name: questions of the operator must not add to the evidence against a client.
        return Query(text, client=self.client or f"cli-{uuid.uuid4().hex}", tenant=self.tenant, k=self.k)

    async def explained(self, text: str) -> tuple[Answer, _Excluded]:
        """Answers a question, and says what access labels and the audience policy removed for this client."""
        query = self.query(text)
        answer = await verdict_log.ask(self.target, query)
        sources = await self.app.guard.excluded_sources(query)
        labeled = await self.app.guard.label_restricted_sources(query)
        name = self.key.grant.name if self.key else query.client
        return answer, _Excluded(name, query.k, sources, labeled)

    def warn_of_observe_mode(self) -> None:
        """Says that a key with restrictions is answered without them."""
        if self.key is not None and self.app.ignores_audience and self.app.guard.audience.restricts(self.query("")):
            say.print(f"[yellow]warning:[/yellow] {IGNORED}; --guard enforce shows the answer with it")

    def print_stream(self, question: str) -> None:
        """Streams the answer, and reports to the operator what was withheld. For a key, it says only that this ran."""
        if self.key is not None:
            asyncio.run(_print_stream(self.target.stream(self.query(question))))
            what = "shows the verdicts, and the sources that this key may not read"
            say.print(f"dry run as {shown(self.key.grant.name)}: nothing was recorded; --explain {what}")
            return
        with verdict_log.collect_verdicts() as verdicts:
            text = asyncio.run(_print_stream(self.target.stream(self.query(question))))
        if not _report_withheld(verdicts) and text.strip() == UNKNOWN:
            say.print("--explain shows the context, and why there is no answer")


def _report_withheld(verdicts: list[Verdict]) -> bool:
    """Reports on stderr what was withheld, or would be: the user of the command line is the operator.

    Returns whether there was anything to report.
    """
    for line in dict.fromkeys(_failure(v) for v in verdicts if v.evidence.get("message")):
        say.print(line)
    judged = [v for v in verdicts if "error" not in v.evidence]
    withheld = [some(hidden)] if (hidden := list(dict.fromkeys(i for v in judged for i in v.hidden))) else []
    withheld += ["the rest of the answer"] if any(v.action is Action.WITHHOLD for v in judged) else []
    if withheld:
        what = shown(" and ".join(withheld))
        did = "withheld" if any(v.enforced for v in judged) else "observes; it would withhold"
        note(f"the guard {did} {what}; --explain shows why")
    return bool(withheld) or len(judged) < len(verdicts)


def _failure(verdict: Verdict) -> str:
    message = verdict.evidence["message"]
    if verdict.action is not Action.WITHHOLD:  # guard.on_error is open
        return f"[red]the guard could not judge and withheld nothing:[/red] {shown(message)}"
    if verdict.enforced:
        return f"[red]the guard failed and withheld the whole context:[/red] {shown(message)}"
    return (
        f"[yellow]the guard could not judge[/yellow] ({shown(message)}). "
        "In enforce mode this answer would have had no context."
    )


def _with_mode(settings: Config, mode: str | None) -> Config:
    """Not validated: an operator may compare mode off with an audience, which no gateway may serve."""
    if mode is None:
        return settings
    return settings.model_copy(update={"guard": settings.guard.model_copy(update={"mode": mode})})


async def _print_stream(parts: AsyncIterator[str]) -> str:
    """Prints an answer as it comes, and returns it."""
    text = ""
    async for part in parts:
        sys.stdout.write(plain(part))
        sys.stdout.flush()
        text += part
    sys.stdout.write("\n")
    return text


async def _answer_file(asker: _Asker, questions: Iterator[tuple[str, str | None]]) -> bool:
    """Prints a JSON line for each question. False if one could not be answered."""
    complete = True
    for label, text in questions:
        try:
            if text is None:
                raise QueryError('the line is not a question; write plain text, or {"_id": ..., "text": ...}')
            line = {"id": label, **_as_json(*await asker.explained(text))}
        except (QueryError, BackendError) as error:
            line, complete = {"id": label, "error": str(error)}, False
        print_json(line, indent=None)
    return complete


def _as_json(answer: Answer, excluded: _Excluded) -> dict[str, Any]:
    hits = [{"id": document, "source": source, "score": score} for document, source, score in context_rows(answer)]
    found: dict[str, Any] = {"answer": answer.text, "hits": hits, "verdicts": [asdict(v) for v in answer.verdicts]}
    if excluded.labeled:
        found["labels"] = {"excluded": excluded.labeled}
    if excluded.sources is not None:
        found["audience"] = {"unentitled": "nothing", "excluded": excluded.sources}
    return found


def _no_answer_reason(app: App, question: str, answer: Answer) -> str:
    """Why there is no answer, if the built-in reader wrote it; else empty."""
    if answer.text.strip() != UNKNOWN or app.config.rag.generator.use != "extractive":
        return ""
    if not answer.retrieval.hits:
        return "no answer: the context is empty"
    return f"no answer: {unanswered_reason(question, [hit.document for hit in answer.retrieval.hits])}"


def _explain(answer: Answer, mode: str, excluded: _Excluded, no_answer: str = "") -> None:
    out.print(shown(answer.text))
    if no_answer:
        out.print(f"[yellow]{shown(no_answer)}[/yellow]")
    context = Table("rank", "score", "document in the context", title=f"guard: {mode}", title_justify="left")
    for rank, (document, _, score) in enumerate(context_rows(answer), 1):
        context.add_row(str(rank), "" if score is None else f"{score:.4f}", shown(document))
    out.print(context)
    for line in excluded.lines():
        out.print(shown(line))
    for v in answer.verdicts:
        for line in verdict_lines(v):
            out.print(shown(line))
    flagged = [v.defense for v in answer.verdicts if v.flagged and score_figures(v.defense, v.score, v.threshold)]
    for explained in dict.fromkeys(NOTES[name] for name in flagged if name in NOTES):
        out.print(f"[dim]{explained}[/dim]")
