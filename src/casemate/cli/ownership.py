"""``canary prove``: tests whether a suspect system answers from a copy of the collection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from casemate.app import open_app
from casemate.cli.canary import canary
from casemate.cli.console import Code, ConfigFile, Json, bar, out, print_json, say, shown
from casemate.cli.endpoints import (
    ANSWER,
    BODY,
    KEY_VARIABLE,
    AnswerPath,
    Body,
    EndpointOptions,
    KeyVariable,
    Model,
    endpoint_target,
    key_explained,
)
from casemate.cli.honeytokens import key_file
from casemate.config import PluginSpec
from casemate.errors import BackendError, ConfigError, DataError
from casemate.monitor.honeytokens.ownership import (
    LEVEL,
    OwnershipQuestion,
    OwnershipResult,
    ownership_questions,
    ownership_test,
    questions_needed,
    records_needed,
)
from casemate.monitor.honeytokens.search import planted_records
from casemate.plugins import build
from casemate.redteam.campaigns.external_targets import MeteredTarget
from casemate.reports.format import plural
from casemate.system import App
from casemate.types import Query

CONCURRENCY = 4
"""Questions to a suspect at the same time."""
QUESTIONED = (
    "{} would be asked the questions that --questions prints, possibly at a cost",
    "May you ask it?",
    "if you may ask it, pass --own; or ask by hand, and pass --answers",
)
"""What happens to the suspect, the question before, and what to do without a terminal."""
Own = Annotated[bool, typer.Option("--own", help="Confirm that you may ask the suspect these questions.")]
Suspect = Annotated[str | None, typer.Option("--target", help="The suspect: an address, or a name in redteam.targets.")]
CollectedAnswers = Annotated[
    Path | None, typer.Option(help="Instead: answers that you collected, JSON lines with question and answer.")
]


@canary.command("prove")
def prove_command(
    target: Suspect = None,
    answers: CollectedAnswers = None,
    questions: Annotated[bool, typer.Option("--questions", help="Only print the questions, as JSON lines.")] = False,
    most: Annotated[int, typer.Option("--most", min=1, help="Largest number of questions.")] = 80,
    level: Annotated[float, typer.Option(min=0.0, max=1.0, help="Largest p-value that counts as proof.")] = LEVEL,
    model: Model = "",
    body: Body = BODY,
    answer: AnswerPath = ANSWER,
    key_env: KeyVariable = KEY_VARIABLE,
    own: Own = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Test whether a system answers from a copy of the collection, by the facts in planted records.

    Prints the probability that a system without the collection gives as many correct answers.

    Exit codes: 1 a copy, 0 no proof of a copy, 2 error, 3 no conclusion: fewer than half of the questions were
    answered, or there are too few questions for the level.
    """
    with open_app(config) as app:
        asked = _ownership_questions(app)[:most]
    if questions:
        for question in asked:
            print(json.dumps({"question": question.text}, ensure_ascii=False))
        return
    if (target is None) == (answers is None):
        raise ConfigError("give the suspect with --target, or collected answers with --answers")
    if answers is not None:
        replies = _collected_answers(answers, asked)
    else:
        spec = endpoint_target(target or "", EndpointOptions(model, body, answer, key_env), config, own, QUESTIONED)
        with key_explained(key_env):
            replies = asyncio.run(_ask_suspect(spec, asked))
    _conclude(ownership_test(list(zip(asked, replies, strict=True))), len(asked), level, as_json)


def _conclude(result: OwnershipResult, asked: int, level: float, as_json: bool) -> NoReturn:
    print_json(result._asdict()) if as_json else _show_ownership(result, asked, level)
    if result.p_value <= level:
        raise typer.Exit(Code.FAILED)
    conclusive = 2 * result.answered >= asked and result.smallest_p_value <= level
    raise typer.Exit(Code.OK if conclusive else Code.INCOMPLETE)


def _ownership_questions(app: App) -> list[OwnershipQuestion]:
    """The questions about all records that were ever planted."""
    keys = key_file(app)
    key = keys.load()
    records = planted_records(key, app.store, app.index) if key is not None else []
    if key is None or not records:
        raise DataError(f"no planted records ({keys.path}); plant some first with 'casemate canary plant'")
    return ownership_questions(key, records)


async def _ask_suspect(spec: PluginSpec, asked: Sequence[OwnershipQuestion]) -> list[str]:
    """The answers of the suspect; empty for a refused question, and for one at which it fails."""
    target, failures = MeteredTarget(build("target", spec)), list[BackendError]()
    with bar() as progress:
        task = progress.add_task("asking", total=len(asked))
        queries = [Query(question.text, "ownership") for question in asked]
        replies = await target.ask_all(queries, CONCURRENCY, lambda count: progress.advance(task, count), failures)
    if failures and len(failures) == len(asked):
        raise failures[0]
    if failures:
        say.print(
            f"the suspect failed at {plural(len(failures), 'question')}, counted as wrong; the first error: "
            f"{shown(str(failures[0]))}"
        )
    return [reply.text if reply is not None else "" for reply in replies]


def _collected_answers(file: Path, asked: Sequence[OwnershipQuestion]) -> list[str]:
    """Answers from a file, in the order of the questions; empty where there is none."""
    try:
        lines = file.read_text("utf-8").split("\n")  # JSON texts may contain other line separators
    except (OSError, UnicodeError) as error:
        raise DataError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    found = dict[str, str]()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {"question": "", "answer": ""}
            found.setdefault(str(row["question"]).strip(), str(row["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            why = 'each line must be JSON such as {"question": "...", "answer": "..."}'
            raise DataError(f"{file}, line {number}: {why}") from error
    if not any(q.text in found for q in asked):
        raise DataError(f"{file} answers none of the questions; print them with 'casemate canary prove --questions'")
    return [found.get(q.text, "") for q in asked]


def _show_ownership(result: OwnershipResult, asked: int, level: float) -> None:
    out.print(f"{result.answered} of {asked} questions answered; {result.correct} answers name the planted value")
    out.print(f"a system without the collection would name {result.expected:.1f} by chance")
    verdict = "[red]a copy of the collection[/red]" if result.p_value <= level else "no proof of a copy"
    out.print(f"p = {result.p_value:.2g}: {verdict} (level {level:g})")
    if result.smallest_p_value > level:
        out.print(
            f"{asked} questions give p = {result.smallest_p_value:.2g} at best, so a copy cannot be proven; level "
            f"{level:g} needs {questions_needed(level)} questions (--most) about {records_needed(level)} records "
            "('casemate canary plant --count')"
        )
