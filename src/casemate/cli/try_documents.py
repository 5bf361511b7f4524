"""``try``: attacks the operator's own documents, guard off and guard on, without any configuration."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from casemate.cli.console import Code, ConfigFile, Json, interruptible, out, print_json, say, show_progress, shown
from casemate.cli.endpoints import (
    ANSWER,
    BODY,
    KEY_VARIABLE,
    AnswerPath,
    Body,
    EndpointOptions,
    KeyVariable,
    Model,
    Own,
    endpoint_target,
    key_explained,
)
from casemate.demo.assessment import Assessment, try_folder
from casemate.demo.assessment_report import as_json as assessment_json
from casemate.demo.assessment_report import (
    failures,
    guard_note,
    headlines,
    reader_label,
    remedy,
    render_assessment,
    scope,
)
from casemate.demo.endpoint import MIN_QUERIES, QUERIES, EndpointAssessment, EndpointPlan, plan_endpoint, try_endpoint
from casemate.demo.endpoint_report import endpoint_headlines, endpoint_json, endpoint_scope, render_endpoint
from casemate.errors import BackendError, ConfigError, DataError
from casemate.redteam.reporting.text import describe_utility
from casemate.runtime.file_lock import exclusive_lock
from casemate.runtime.files import write_atomically

INDEX_SECONDS = 120.0
WORK, LOCK = "work-", "try.lock"
"""Start of the name of a run's folder, and the file in it that the run locks."""
_KEPT = re.compile(r"[;:] (?:finished work is kept|this step was rolled back).*", re.S)
"""Advice of stores whose files stay; those of an assessment are deleted."""


Seconds = Annotated[float, typer.Option(min=5, help="Time for indexing; what does not fit is left out.")]
Endpoint = Annotated[
    str | None, typer.Option(help="Ask this existing system instead: an address, or a name in redteam.targets.")
]
Documents = Annotated[Path | None, typer.Option(help="With --endpoint: documents that the system contains.")]
Nonmembers = Annotated[
    Path | None, typer.Option(help="With --endpoint: documents of the same kind that it does not contain.")
]
Rate = Annotated[
    float | None, typer.Option(min=0.01, help="With --endpoint: largest number of requests a second, retries included.")
]
Queries = Annotated[
    int, typer.Option(min=MIN_QUERIES, help="With --endpoint: largest number of requests, retries included.")
]


def try_documents(
    folder: Annotated[Path | None, typer.Argument(help="Folder or file with your documents.")] = None,
    question: Annotated[list[str] | None, typer.Option(help="An ordinary question of your own, shown first.")] = None,
    output: Annotated[Path, typer.Option("--out", help="The report.")] = Path(".casemate/try/report.html"),
    seconds: Seconds = INDEX_SECONDS,
    endpoint: Endpoint = None,
    documents: Documents = None,
    nonmembers: Nonmembers = None,
    queries: Queries = QUERIES,
    requests_per_s: Rate = None,
    model: Model = "",
    body: Body = BODY,
    answer: AnswerPath = ANSWER,
    key_env: KeyVariable = KEY_VARIABLE,
    own: Own = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Attack your own documents with the guard off and on, and write a report. Needs no configuration, key or network.

    Index and campaign are temporary; only the report stays. It quotes your documents.

    With --endpoint URL --documents FOLDER it asks an existing system instead, within a number of requests.

    Exit codes: 0 done, 2 error, 3 done, but some files could not be read, or (--endpoint) some figures are missing or
    doubtful.
    """
    if endpoint is None:
        if folder is None:
            raise ConfigError("give a folder with documents: casemate try FOLDER")
        if documents or nonmembers or model:
            raise ConfigError("--documents, --nonmembers and --model belong to --endpoint URL; or give only the folder")
        _try_folder(folder, question or (), output, seconds, as_json)
    if folder is not None and documents is not None:
        raise ConfigError(f"two folders: {folder} and {documents}; give one, with --documents")
    at = documents or folder
    if at is None:
        raise ConfigError("give the documents that the system contains: --documents FOLDER")
    target = endpoint_target(endpoint, EndpointOptions(model, body, answer, key_env), config, own)
    if requests_per_s is not None:
        target = target.model_copy(update={"requests_per_s": requests_per_s})
    with _work_folder(output) as work:
        with show_progress("reading the documents", None):
            plan = plan_endpoint(target, at, nonmembers, queries, question or (), work)
        result = _try_endpoint(plan, key_env)
    _report_endpoint(result, output, as_json)


def _try_folder(folder: Path, questions: Sequence[str], output: Path, seconds: float, as_json: bool) -> NoReturn:
    with _work_folder(output) as work:
        result = asyncio.run(try_folder(folder, work, questions, seconds, show_progress))
    write_atomically(output, render_assessment(result).encode("utf-8"))  # for the owner only: it quotes documents
    if as_json:
        print_json({**assessment_json(result), "report": str(output)})
    else:
        show_assessment(result, output)
        out.print(f"next: casemate init {shown(shlex.quote(str(folder)))} && casemate index")
    if failures(result):
        raise typer.Exit(Code.ERROR)
    raise typer.Exit(Code.OK if all(problem.harmless for problem in result.sample.problems) else Code.INCOMPLETE)


def _try_endpoint(plan: EndpointPlan, key_env: str) -> EndpointAssessment:
    say.print(shown(plan.describe()))
    with key_explained(key_env):
        return asyncio.run(try_endpoint(plan, show_progress))


def _report_endpoint(result: EndpointAssessment, output: Path, as_json: bool) -> NoReturn:
    write_atomically(output, render_endpoint(result).encode("utf-8"))
    print_json({**endpoint_json(result), "report": str(output)}) if as_json else _show_endpoint(result, output)
    if result.failures:
        raise typer.Exit(Code.ERROR)
    complete = not result.gaps and all(problem.harmless for problem in result.problems)
    raise typer.Exit(Code.OK if complete else Code.INCOMPLETE)


@contextmanager
def _work_folder(output: Path) -> Iterator[Path]:
    """An empty, locked folder beside the report, which is removed at the end."""
    work = _make_work_folder(output)
    try:
        with interruptible("interrupted; nothing was kept"), _lock(work):
            yield work
    except (BackendError, DataError) as error:
        if str(work) not in str(error):
            raise
        why = f"{_KEPT.sub('', str(error))}. Nothing was kept: free space, or choose another place with --out"
        raise BackendError(why, backend="disk", retryable=False) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_work_folder(output: Path) -> Path:
    """An empty folder beside the report. Folders of runs that were killed are removed."""
    try:
        if output.is_dir():
            why = f"cannot write {output}: it is a folder; give the path of a file with --out"
            raise BackendError(why, backend="disk", retryable=False)
        output.parent.mkdir(parents=True, exist_ok=True)
        for left in output.parent.glob(f"{WORK}*"):
            if _is_dead(left):
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=WORK, dir=output.parent))
    except OSError as error:
        why = f"cannot write to {output.parent}: {error.strerror}; choose another place with --out"
        raise BackendError(why, backend="disk", retryable=False) from error


def _lock(work: Path) -> AbstractContextManager[None]:
    return exclusive_lock(work / LOCK, "an assessment", "choose another place with --out")


def _is_dead(work: Path) -> bool:
    """Whether a run that locked this folder was killed.

    A run writes its entry into the lock file after it acquires the lock, and empties the file at the end.
    """
    with suppress(BackendError, OSError):
        if (work / LOCK).stat().st_size:
            with _lock(work):
                return True
    return False


def show_assessment(result: Assessment, page: Path, console: Console = out) -> None:
    """Prints what was indexed, the three headline figures, and the path of the report."""
    for problem in result.sample.problems[:10]:
        say.print(f"[yellow]skipped:[/yellow] {shown(problem.where)}: {shown(problem.reason)}")
    if (more := len(result.sample.problems) - 10) > 0:
        say.print(f"[yellow]skipped:[/yellow] {more} more, in the report")
    console.print(f"\n{shown(scope(result))}\n")
    for line in failures(result):
        console.print(f"[red]failed:[/red] {shown(line)}")
    if note := guard_note(result):
        console.print(f"[yellow]note:[/yellow] {shown(note)}")
    console.print("Guard off -> guard on, \\[95 % interval]:")
    for head in headlines(result):
        console.print(f"  {shown(head.line)}")
    if what := remedy(result):
        console.print(f"\n[yellow]note:[/yellow] {shown(what)}")
    if result.membership and result.membership.utility:
        console.print(f"\n{shown(describe_utility(result.membership.utility))}")
    console.print(f"\n{shown(reader_label(result.reader))} The attacks are scripts.")
    console.print(f"report: [bold]{shown(str(page))}[/bold]")


def _show_endpoint(result: EndpointAssessment, page: Path) -> None:
    """Prints what was asked, the three headline figures, and the path of the report."""
    for problem in result.problems[:10]:
        say.print(f"[yellow]skipped:[/yellow] {shown(problem.where)}: {shown(problem.reason)}")
    out.print(f"\n{shown(endpoint_scope(result))}\n")
    for line in result.failures:
        out.print(f"[red]failed:[/red] {shown(line)}")
    for line in result.gaps:
        out.print(f"[yellow]note:[/yellow] {shown(line)}")
    out.print("This system, \\[95 % interval]:")
    for head in endpoint_headlines(result):
        out.print(f"  {shown(head.line)}")
    out.print("\nThe attacks are scripts.")
    out.print(f"report: [bold]{shown(str(page))}[/bold]")
