"""``ask``: one question or a file of them, with what the operator may know about the answer."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from casemate import config as configuration
from casemate.app import App, open_app
from casemate.cli.console import (
    INCOMPLETE,
    OK,
    ConfigFile,
    Json,
    Tenant,
    out,
    plain,
    print_json,
    read_questions,
    say,
    shown,
)
from casemate.config import Config
from casemate.errors import BackendError, ConfigError, QueryError
from casemate.events import EventStore, Relay
from casemate.types import DEFAULT_TENANT, Answer, Event, Query, Verdict

SHOWN = 5
Mode = Annotated[
    Literal["enforce", "observe", "off"] | None, typer.Option("--guard", help="Instead of the configured mode.")
]


def ask(
    question: Annotated[str | None, typer.Argument(help="The question.")] = None,
    config: ConfigFile = None,
    k: Annotated[int | None, typer.Option("-k", "--k", help="Documents to read. Default: rag.k.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    client: Annotated[str, typer.Option(help="Ask as this client, whom the guard remembers. Default: a new one.")] = "",
    guard: Mode = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the verdicts and what was hidden.")] = False,
    questions: Annotated[
        str | None, typer.Option("--from", help="File of questions, text or jsonl(.gz), a line each; - for stdin.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask one question, or a file of them (one json line each)."""
    if (question is None) == (questions is None):
        raise ConfigError("give either a question or --from FILE")
    settings = _with_mode(configuration.read(config), guard)

    def make(text: str) -> Query:
        # Whoever sits here is the operator: unless he plays a client, the guard remembers nothing against him.
        name = client or f"cli-{uuid.uuid4().hex}"
        return Query(text, client=name, tenant=tenant, k=settings.rag.k if k is None else k)

    with open_app(settings) as app:
        if tenant not in app.index.tenants():
            attached = settings.rag.index.use == "attached"
            how = "'casemate attach' reads them" if attached else "'casemate index FOLDER' puts some in"
            what = f"tenant {shown(repr(tenant))} has no documents; {how}"
            say.print(f"[yellow]note:[/yellow] {what}", soft_wrap=True)
        if questions is not None:
            whole = asyncio.run(_answer_file(app, read_questions(questions), make))
            raise typer.Exit(OK if whole else INCOMPLETE)
        assert question is not None
        if as_json or explain:
            answer = asyncio.run(app.target.ask(make(question)))
            print_json(_as_json(answer)) if as_json else _explain(answer, settings.guard.mode)
        else:
            app.guard.store = overheard = _Overheard(app.store)
            asyncio.run(_print_stream(app.target.stream(make(question))))
            _tell_what_was_hidden(overheard.events)


class _Overheard(Relay):
    """Remembers what is written."""

    def __init__(self, store: EventStore) -> None:
        super().__init__(store)
        self.events: list[Event] = []

    def append(self, event: Event) -> None:
        self.events.append(event)
        super().append(event)


def _tell_what_was_hidden(events: list[Event]) -> None:
    """Whoever sits at this command line is the operator, and may know why an answer is poor."""
    for message in dict.fromkeys(e.body["evidence"].get("message") for e in events):
        if message:
            say.print(f"[red]the guard failed, and withheld everything:[/red] {shown(message)}", soft_wrap=True)
    hidden = [i for e in events if e.body["enforced"] for i in e.body["hidden"]]
    if hidden:
        say.print(
            f"[yellow]note:[/yellow] the guard withheld {shown(_some(hidden))}; --explain shows why",
            soft_wrap=True,
        )


def _with_mode(settings: Config, mode: str | None) -> Config:
    if mode is None:
        return settings
    return settings.model_copy(update={"guard": settings.guard.model_copy(update={"mode": mode})})


async def _print_stream(pieces: AsyncIterator[str]) -> None:
    async for piece in pieces:
        sys.stdout.write(plain(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")


async def _answer_file(app: App, questions: Iterator[tuple[str, str | None]], make: Callable[[str], Query]) -> bool:
    """Prints a json line for each question; False if one could not be answered."""
    whole = True
    for label, text in questions:
        try:
            if text is None:
                raise QueryError('the line is no question: write it as it is, or as {"_id": ..., "text": ...}')
            line = {"id": label, **_as_json(await app.target.ask(make(text)))}
        except (QueryError, BackendError) as error:
            line, whole = {"id": label, "error": str(error)}, False
        print_json(line, indent=None)
    return whole


def _as_json(answer: Answer) -> dict[str, Any]:
    hits = [{"id": h.document.id, "source": h.document.source, "score": h.score} for h in answer.retrieval.hits]
    return {"answer": answer.text, "hits": hits, "verdicts": [asdict(v) for v in answer.verdicts]}


def _explain(answer: Answer, mode: str) -> None:
    out.print(shown(answer.text), soft_wrap=True)
    context = Table("rank", "score", "document in the context", title=f"guard: {mode}", title_justify="left")
    for rank, hit in enumerate(answer.retrieval.hits, 1):
        context.add_row(str(rank), f"{hit.score:.4f}", shown(hit.document.id))
    out.print(context)
    for v in answer.verdicts:
        out.print(_sentence(v), soft_wrap=True)


def _sentence(v: Verdict) -> str:
    evidence = ", ".join(f"{k} {_short(value)}" for k, value in v.evidence.items())
    if v.threshold is None:
        what = f"failed, {v.action}" if "error" in v.evidence else "no statement"
        return f"{v.defense}: {what} ({shown(evidence)})"
    law = f"score {v.score:.4f}, threshold {v.threshold:.4f} ({shown(evidence)})"
    if not v.flagged:
        return f"{v.defense}: not flagged: {law}"
    what = "hidden" if v.enforced else "would be hidden (observe mode)"
    return f"{v.defense}: flagged: {law}; {what}: {shown(_some(v.hidden))}"


def _short(value: object) -> str:
    if isinstance(value, list):
        return _some([str(v) for v in value]) or "nothing"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _some(names: Sequence[str]) -> str:
    """The first few."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
