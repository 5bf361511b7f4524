"""Prints campaign results on the console."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from casemate.maths.stats import Estimate
from casemate.redteam.campaigns.membership import ENDED_EARLY
from casemate.redteam.campaigns.replay import RECORDED, RecordedSet, ReplayResult
from casemate.redteam.lab.judge import EXTRACTION_FAILS, NOT_FINISHED, OFF, ON
from casemate.redteam.lab.results import (
    SEVERITY,
    AttackResult,
    CampaignResult,
    CheckStatus,
    Crawl,
    MembershipMetrics,
)
from casemate.redteam.reporting.text import (
    describe_audit,
    describe_checks,
    describe_extracted,
    describe_personal_data,
    describe_utility,
    is_one_system,
    overall_status,
    undecided_note,
)
from casemate.reports.format import measured, percent, scrub

COLORS = {
    CheckStatus.PASS: "green",
    CheckStatus.FAIL: "red",
    CheckStatus.INCONCLUSIVE: "yellow",
    CheckStatus.ERROR: "red",
}

REPLAY_COLUMNS = {RECORDED: "as recorded", OFF: "guard off", ON: "guard on"}
"""Heading of each target of a recorded set."""
PROBE_COLUMNS = (
    "With the guard off and on, lower is better. control: the user gives the same instruction, so a low share shows "
    "that the reader ignores it anyway. suspicious: share of the documents that screening would quarantine."
)
"""Caption of the table of injected instructions."""


def print_result(result: CampaignResult, out: Console) -> None:
    """Prints the status, the table guard off against guard on, and every check that did not pass."""
    result = scrub(result)
    status = overall_status(result)
    out.print(f"[bold {COLORS[status]}]{status.upper()}[/bold {COLORS[status]}]")
    out.print(_target(result), soft_wrap=True)
    if note := undecided_note(result):
        out.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    for table in _tables(result):
        out.print(table)
    for line in _lines(result):
        out.print(line, soft_wrap=True)


def print_replay(recorded: RecordedSet, results: Sequence[ReplayResult], out: Console) -> None:
    """Prints the facts about a recorded set and the success of each attack in it."""
    facts = ", ".join(f"{name}: {value}" for name, value in scrub(dict(recorded.about)).items())
    out.print(escape(facts or "the file has no first line with facts about the model (optional)"), soft_wrap=True)
    used = {target for result in results for target in result.targets}
    columns = {target: name for target, name in REPLAY_COLUMNS.items() if target in used}
    rows = []
    for result in scrub(list(results)):
        auc = [_auc(result, target) for target in columns]
        share = "not recorded" if result.withheld is None else percent(result.withheld)
        rows.append((escape(_recorded_attack(result)), *auc, share))
    headings = ("attack, questions by", *columns.values(), "withheld")
    out.print(_table("Recorded trials: AUC [95 %]; .5 is chance", headings, rows))
    for result in scrub(list(results)):
        name = _recorded_attack(result)
        for target, why in result.missing.items():
            out.print(escape(f"too few trials of {name} ({REPLAY_COLUMNS[target]}): {why}"), soft_wrap=True)


def _recorded_attack(result: ReplayResult) -> str:
    return f"{result.attack}, {result.author}" if result.author else result.attack


def _auc(result: ReplayResult, target: str) -> str:
    metrics = result.targets.get(target)
    return measured(metrics.auc) if metrics else "too few trials" if target in result.missing else "not recorded"


def _target(result: CampaignResult) -> str:
    evidence = result.evidence
    off = f", guard off: {evidence['target_off']}" if "target_off" in evidence else ""
    capabilities = ", ".join(evidence.get("capabilities", ())) or "not recorded"
    return escape(f"target: {evidence.get('target', 'own')}{off}; capabilities: {capabilities}")


def _tables(result: CampaignResult) -> Iterator[Table]:
    crawlers = [check for check in result.checks if check.name == EXTRACTION_FAILS]
    if result.probes:
        rows = [(escape(p.name), *map(_share_cell, (p.off, p.on, p.control, p.quarantined))) for p in result.probes]
        headings = ("instruction", "guard off", "guard on", "control", "suspicious")
        yield _table("Instructions in documents, share followed [95 %]", headings, rows, PROBE_COLUMNS)
    elif result.attacks:
        attacks = [(escape(a.name), *_attack_cells(a)) for a in result.attacks]
        columns = ("attack", "guard off", "guard on", "withheld")
        yield _table("Membership inference: AUC [95 %]; .5 is chance", *_one_system(result, columns, attacks))
    if crawlers:
        crawls = {crawl.attack: crawl for crawl in result.crawls}
        crawled = [(escape(c.attack), *_crawl_cells(crawls.get(c.attack)), c.status.value) for c in crawlers]
        headings = ("crawler", "guard off", "guard on", "first alarm", "status")
        title = "Share of the chunks recovered (CRR) [95 %]; lower is better"
        yield _table(title, *_one_system(result, headings, crawled))


def _one_system(
    result: CampaignResult, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]]:
    """Columns and rows with one column for a system that may have no guard, instead of one for each side."""
    if not is_one_system(result):
        return columns, rows
    merged = [(first, on, *rest) for first, _, on, *rest in rows]
    return (columns[0], "this system", *columns[3:]), merged


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number > 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _attack_cells(attack: AttackResult) -> tuple[str, str, str]:
    if attack.error:
        word = NOT_FINISHED if attack.error.startswith(NOT_FINISHED) else "error"
        return word, word, ""

    def auc(metrics: MembershipMetrics | None) -> str:
        return escape(measured(metrics.auc)) if metrics else "not run"

    withheld = percent(attack.on.recall_query.value) if attack.on and attack.on.recall_query else ""
    return auc(attack.off), auc(attack.on), withheld


def _crawl_cells(crawl: Crawl | None) -> tuple[str, str, str]:
    if crawl is None:
        return "unknown", "unknown", ""
    off, on = crawl.by_target.get(OFF), crawl.by_target[ON]
    alarm = f"question {on.first_alarm}" if on.first_alarm else "unknown" if on.coverage is None else "none"
    return escape(measured(off.crr)) if off else "not run", escape(measured(on.crr)), alarm


def _lines(result: CampaignResult) -> Iterator[str]:
    yield from (escape(f"{name}: {text}") for name, text in describe_extracted(result))
    if result.personal_data:
        yield escape(describe_personal_data(result.personal_data))
    yield from _cost_of_the_guard(result)
    if (audit := result.audit) and audit.pairs:  # else the check says why
        ended_early = result.evidence.get(ENDED_EARLY)
        more = (
            f" Sessions compared in part, as a document changed the context without being withheld: {ended_early}."
            if ended_early
            else ""
        )
        yield f"{describe_audit(audit)}{more}"
    for status in SEVERITY:
        if status is not CheckStatus.PASS:
            found = describe_checks((check for check in result.checks if check.status is status), "\n  ", "\n  ")
            yield from (f"[bold]{status.value}[/bold] {escape(line)}" for line in found)
    used = [f"{name.replace('_', ' ')} {v:,.0f}" for name, v in result.cost.items() if not name.startswith("live_")]
    yield f"cost: {', '.join(used) or 'not recorded'}"
    yield from (f"[dim]simulated: {escape(line)}[/dim]" for line in result.simulated)
    yield from (f"[dim]not tested: {escape(line)}[/dim]" for line in result.not_tested)


def _cost_of_the_guard(result: CampaignResult) -> Iterator[str]:
    if result.utility:
        yield escape(describe_utility(result.utility))
    if replay := result.benign_sessions:
        flagged = ", ".join(f"{name} in {count}" for name, count in sorted(replay.alarms.items())) or "none"
        yield (
            f"Benign sessions with a flagged question (not an alert), of {replay.sessions}: {escape(flagged)}; "
            f"{replay.changed} of {replay.questions} answers changed."
        )


def _share_cell(rate: Estimate | None) -> str:
    """A share above its interval: with four of them in a line, no width remains for names at 80 columns."""
    return escape(measured(rate, share=True).replace(" [", "\n[")) if rate else "not\nmeasured"
