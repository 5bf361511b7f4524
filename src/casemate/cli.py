"""The command line. Answers go to stdout, everything said along the way to stderr."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from casemate import config as configuration
from casemate.app import App, open_app
from casemate.config import Config
from casemate.corpus import Corpus
from casemate.demo.show import run_demo
from casemate.doctor import examine
from casemate.errors import BackendError, CasemateError, ConfigError, QueryError
from casemate.ingest import Gone, Ingest, Plan, Report
from casemate.protocols import EventStore
from casemate.types import DEFAULT_TENANT, Action, Answer, Event, Query, Verdict

HELP = """\
Guard a private RAG system, ask it, and look after it.

To begin: casemate demo; or on your own documents: casemate init FOLDER, casemate index, casemate ask "...".

Exit codes: 0 done; 1 a check failed; 2 error; 3 done, but part of the input was left out; 130 interrupted.
"""
OK, FAILED, ERROR, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 130
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
UTF8 = "utf-8-sig"  # with or without a byte order mark

cli = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
say = Console(stderr=True, highlight=False)
out = Console(highlight=False)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file. Default: casemate.yaml here, if any.")
]
Json = Annotated[bool, typer.Option("--json", help="One machine-readable object on stdout.")]
Tenant = Annotated[str, typer.Option(help="Whose documents.")]
Mode = Annotated[
    Literal["enforce", "observe", "off"] | None, typer.Option("--guard", help="Instead of the configured mode.")
]

TEMPLATE = """\
# Casemate. Every key, with its default: docs/reference/configuration.md. Secrets: ${{NAME}}, from the environment.
rag:
  corpus: {corpus}
  embedder: minilm          # openai | sentence_transformers
  index: sqlite             # pgvector
  generator: extractive     # {{use: openai, model: ..., base_url: ..., api_key: "${{LLM_KEY}}"}}
  k: 5
guard:
  mode: enforce             # observe | off
  on_error: closed          # open
  defenses:
    - {{name: mirabel, threshold: paper}}
"""


def main() -> None:
    """Entry point: errors become one line and an exit code, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        cli()
    except (CasemateError, OSError) as error:  # OSError: a full disk under stdout, a folder that is a file
        say.print(f"[red]error:[/red] {_shown(str(error))}", soft_wrap=True)
        sys.exit(ERROR)


@cli.callback(invoke_without_command=True)
def _root(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        out.print(version("casemate"))
        raise typer.Exit


@cli.command()
def init(
    corpus: Annotated[str, typer.Argument(help="Folder or file with the documents.")] = "docs",
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a casemate.yaml to start from."""
    path = Path(configuration.FILE)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; edit it, or write over it with --force")
    try:
        path.write_text(TEMPLATE.format(corpus=json.dumps(corpus)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; go to a folder that you may write to") from error
    if as_json:
        _print_json({"written": str(path)})
    else:
        out.print(f"wrote {path}; next: casemate index")
        if not Path(corpus).exists():
            say.print(f"[yellow]note:[/yellow] {_shown(corpus)} is not there yet; rag.corpus in {path} names it")


@cli.command()
def index(
    corpus: Annotated[Path | None, typer.Argument(help="Folder or file. Default: rag.corpus.")] = None,
    config: ConfigFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    gone: Annotated[Gone, typer.Option(help="Sources that are no longer there.")] = "auto",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Empty the whole index first, all tenants.")] = False,
    as_json: Json = False,
) -> None:
    """Embed what is new or changed, remove what is gone. Interrupt at will and run again."""
    settings = configuration.read(config)
    place = corpus or (settings.folder / settings.rag.corpus if settings.rag.corpus else None)
    if place is None:
        raise ConfigError("no corpus: give a folder or file, or set rag.corpus in casemate.yaml")
    source = Corpus(place, settings.rag.max_file_mb, empty=gone == "remove")
    with open_app(settings, rebuild=rebuild) as app:
        chunk = settings.rag.chunk
        work = Ingest(app.guard, source, chunk.tokens, chunk.overlap, tenant, gone)
        with say.status("comparing with the index"):
            plan = work.plan()
        report = _run(work, plan)
        with say.status("preparing the search"):
            app.index.warm(tenant)
        total = app.index.moments(tenant).n
    _report(report, total, as_json)
    raise typer.Exit(OK if report.complete else INCOMPLETE)


def _run(work: Ingest, plan: Plan) -> Report:
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=say, transient=True, disable=not say.is_terminal) as bar:
        task = bar.add_task(f"embedding {len(plan.todo)} sources", total=plan.bytes or 1)
        try:
            return asyncio.run(work.run(plan, lambda size: bar.advance(task, size)))
        except KeyboardInterrupt:
            say.print("interrupted; what was saved is kept, run 'casemate index' again to go on")
            raise typer.Exit(INTERRUPTED) from None


def _report(report: Report, total: int, as_json: bool) -> None:
    for problem in report.problems:
        say.print(f"[yellow]left out:[/yellow] {_shown(problem.where)}: {_shown(problem.reason)}", soft_wrap=True)
    if as_json:
        _print_json({**report.as_json(), "documents": total})
        return
    rate = f", {report.chunks / report.seconds:.0f} a second" if report.chunks and report.seconds > 1 else ""
    said = f"indexed {report.indexed} sources ({report.chunks} chunks{rate}), {report.unchanged} unchanged"
    said += f", {report.removed} removed, {len(report.problems)} left out"
    said += f", {report.ignored} files of other kinds passed over" if report.ignored else ""
    out.print(f"{said}; the index holds {total} chunks", soft_wrap=True)


@cli.command()
def ask(
    question: Annotated[str | None, typer.Argument(help="The question.")] = None,
    config: ConfigFile = None,
    k: Annotated[int | None, typer.Option("-k", "--k", help="Documents to read. Default: rag.k.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
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
        return Query(text, client="cli", tenant=tenant, k=settings.rag.k if k is None else k)

    with open_app(settings) as app:
        if tenant not in app.index.tenants():
            what = f"tenant {_shown(repr(tenant))} has no documents"
            say.print(f"[yellow]note:[/yellow] {what}; 'casemate index FOLDER' puts some in", soft_wrap=True)
        if questions is not None:
            whole = asyncio.run(_answer_file(app, _read_questions(questions), make))
            raise typer.Exit(OK if whole else INCOMPLETE)
        assert question is not None
        if as_json or explain:
            answer = asyncio.run(app.target.ask(make(question)))
            _print_json(_as_json(answer)) if as_json else _explain(answer, settings.guard.mode)
        else:
            app.guard.store = overheard = _Overheard(app.store)
            asyncio.run(_print_stream(app.target.stream(make(question))))
            _tell_what_was_hidden(overheard.events)


class _Overheard:
    """Passes events on to the store, and remembers them."""

    def __init__(self, store: EventStore) -> None:
        self.events: list[Event] = []
        self._store = store

    def append(self, event: Event) -> None:
        self.events.append(event)
        self._store.append(event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _tell_what_was_hidden(events: list[Event]) -> None:
    """Whoever sits at this command line is the operator, and may know why an answer is poor."""
    hidden = [i for e in events if e.body["enforced"] for i in e.body["hidden"]]
    if hidden:
        say.print(
            f"[yellow]note:[/yellow] the guard withheld {_shown(', '.join(hidden))}; --explain shows why",
            soft_wrap=True,
        )


def _with_mode(settings: Config, mode: str | None) -> Config:
    if mode is None:
        return settings
    return settings.model_copy(update={"guard": settings.guard.model_copy(update={"mode": mode})})


async def _print_stream(pieces: AsyncIterator[str]) -> None:
    async for piece in pieces:
        sys.stdout.write(_plain(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")


def _read_questions(name: str) -> Iterator[tuple[str, str | None]]:
    """Id and text of each question; the line number where there is no id."""
    path = Path(name)
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.lstrip().startswith("{"):
                yield _from_record(line, str(number))
            elif line.strip():
                yield str(number), line.strip()


@contextmanager
def _open_text(path: Path) -> Iterator[Any]:
    try:
        if str(path) == "-":
            yield sys.stdin
            return
        opened = gzip.open(path, "rt", encoding=UTF8) if path.suffix == ".gz" else path.open(encoding=UTF8)
        with opened as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"cannot read the questions in {path}: {error}") from error


def _from_record(line: str, number: str) -> tuple[str, str | None]:
    """Id and text of a json line; None for the text where there is none, or the line is no json."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return number, None
    text = next((record[key] for key in ("text", "query", "question") if key in record), None)
    return str(record.get("_id", record.get("id", number))), text if isinstance(text, str) else None


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
        _print_json(line, indent=None)
    return whole


def _as_json(answer: Answer) -> dict[str, Any]:
    hits = [{"id": h.document.id, "source": h.document.source, "score": h.score} for h in answer.retrieval.hits]
    return {"answer": answer.text, "hits": hits, "verdicts": [asdict(v) for v in answer.verdicts]}


def _explain(answer: Answer, mode: str) -> None:
    out.print(_shown(answer.text), soft_wrap=True)
    context = Table("rank", "score", "document in the context", title=f"guard: {mode}", title_justify="left")
    for rank, hit in enumerate(answer.retrieval.hits, 1):
        context.add_row(str(rank), f"{hit.score:.4f}", _shown(hit.document.id))
    out.print(context)
    for v in answer.verdicts:
        out.print(_sentence(v), soft_wrap=True)


def _sentence(v: Verdict) -> str:
    evidence = ", ".join(f"{k} {_short(value)}" for k, value in v.evidence.items())
    if v.threshold is None:
        what = "no statement" if v.action is Action.NONE else f"failed, {v.action}"
        return f"{v.defense}: {what} ({_shown(evidence)})"
    law = f"s_max = {v.score:.4f}, τ = {v.threshold:.4f} ({_shown(evidence)})"
    if not v.flagged:
        return f"{v.defense}: not flagged: {law}"
    what = "hidden" if v.enforced else "would be hidden (observe mode)"
    return f"{v.defense}: flagged: {law}; {what}: {_shown(', '.join(v.hidden))}"


def _short(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@cli.command()
def doctor(
    config: ConfigFile = None,
    fix: Annotated[bool, typer.Option("--fix", help="Rebuild the moments if they are wrong.")] = False,
    as_json: Json = False,
) -> None:
    """Look at every part and say what is wrong."""
    findings = list(examine(config, fix))
    failed = any(f.ok is False for f in findings)
    if as_json:
        _print_json({"ok": not failed, "findings": [asdict(f) for f in findings]})
    else:
        signs = {True: "[green]ok  [/green]", False: "[red]FAIL[/red]", None: "[yellow]note[/yellow]"}
        for f in findings:
            out.print(f"{signs[f.ok]} {f.name}: {_shown(f.detail)}", soft_wrap=True)
    raise typer.Exit(FAILED if failed else OK)


@cli.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the sample clinic is put.")] = Path("casemate-demo"),
    as_json: Json = False,
) -> None:
    """Guard off against guard on, on a fictional clinic. Needs no key and no network."""
    result = asyncio.run(run_demo(folder, say if as_json else out, say))
    if as_json:
        _print_json(result)


def _print_json(value: Any, indent: int | None = 2) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    print(CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", text))


def _plain(text: str) -> str:
    """Without what makes a terminal do things: documents and file names are not ours."""
    return CONTROL.sub("\ufffd", text)


def _shown(text: str) -> str:
    """Text that is not ours, as rich prints it."""
    return escape_markup(_plain(text))
