"""The canaries: each against each of its last runs, and what was wrong."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException

from casemate.gateway.dashboard import figures
from casemate.gateway.dashboard.page import (
    Look,
    Page,
    cell,
    chip,
    code,
    decimal,
    empty,
    facts,
    link,
    many,
    seconds,
    section,
    share,
    table,
    url,
    when,
)
from casemate.lab.charts import Markup, join, tag
from casemate.monitor.canaries.results import Result, Status, base
from casemate.monitor.watch.schedule import Gap

RUNS = 24
"""Runs that are shown, the newest."""
MARKS = {
    Status.PASS: ("✓", "good", "passed"),
    Status.FAIL: ("✕", "bad", "failed"),
    Status.ERROR: ("!", "odd", "no answer"),
}


def matrix(look: Look) -> Page:
    """All sets."""
    sets: dict[str, list[Result]] = {}
    for result in look.records.results.all:
        sets.setdefault(result.run.partition("@")[0], []).append(result)
    lead = "Known questions, asked on a schedule. Each mark is one answer; choose it to see what was wrong."
    if not sets:
        path = look.app.config.monitor.canaries
        there = (look.app.config.folder / path).exists()
        steps: tuple[str, ...] = (
            "Ask them once with 'casemate canary run', or keep asking with 'casemate canary watch'.",
        )
        if not there:
            steps = (f"Write a canary set to {path} ('docs/how-to/write-canaries.md' says how).", *steps)
        return Page("Canaries", empty("No canary has been asked yet.", *steps), lead=lead)
    gaps = look.records.gaps.all
    parts = [
        _set(name, results, [g for g in gaps if g.set == name], f"set-{i}")
        for i, (name, results) in enumerate(sorted(sets.items()))
    ]
    legend = tag("p", *(tag("span", chip(f"{m} {w}", t), " ") for m, t, w in MARKS.values()), class_="legend")
    return Page("Canaries", join([legend, *parts]), lead=lead)


def _set(name: str, results: Sequence[Result], gaps: Sequence[Gap], key: str) -> Markup:
    """Canary against run, and the share that failed in each run."""
    runs = list(dict.fromkeys(base(r.run) for r in results))[-RUNS:]
    first = {(r.canary, base(r.run)): r for r in results if "~" not in r.run}
    canaries = sorted({c for c, run in first if run in runs})
    begun = {run: min(r.at for r in results if base(r.run) == run) for run in runs}
    shares = []
    for run in runs:
        judged = [r for c in canaries if (r := first.get((c, run))) and r.status is not Status.ERROR]
        shares.append(sum(r.status is Status.FAIL for r in judged) / len(judged) if judged else None)
    said = "Share of canaries that failed, run by run: " + ", ".join("–" if s is None else f"{s:.0%}" for s in shares)
    head = tag(
        "tr",
        tag("th", "Canary", scope="col", class_="name"),
        *(tag("th", _clock(begun[run].strftime("%H:%M"), begun[run].strftime("%d %b")), scope="col") for run in runs),
        tag("th", "Failed", scope="col", class_="sum"),
    )
    rows = [_row(canary, runs, first) for canary in canaries]
    grid = tag("table", tag("thead", head), tag("tbody", *rows), class_="matrix")
    trend = tag("p", tag("span", "Failed in each run, 0 to 100 %"), figures.line(shares, said), class_="trended")
    return section(
        name,
        trend,
        *(tag("p", _missed(gap), class_="soft") for gap in gaps if gap.last >= begun[runs[0]]),
        tag("div", grid, class_="scroll", role="region", tabindex=0, aria_label=f"Canaries of {name} by run"),
        lead=f"{len(canaries)} canaries, the last {len(runs)} runs, oldest first; times in UTC.",
        id=key,
    )


def _missed(gap: Gap) -> str:
    first, last = f"{gap.first:%d %b %H:%M}", f"{gap.last:%d %b %H:%M}"
    return f"Not made, because nobody watched: {many(gap.slots, 'run')}, " + (
        f"of {first}." if gap.slots == 1 else f"from {first} to {last}."
    )


def _clock(time: str, day: str) -> Markup:
    return join([tag("span", time), tag("small", day)])


def _row(canary: str, runs: Sequence[str], first: dict[tuple[str, str], Result]) -> Markup:
    found = [first.get((canary, run)) for run in runs]
    judged = [r for r in found if r and r.status is not Status.ERROR]
    failed = sum(r.status is Status.FAIL for r in judged)
    cells = [tag("td", _mark(r)) if r else tag("td", "·", class_="soft") for r in found]
    return tag(
        "tr",
        tag("th", canary, scope="row", class_="name"),
        *cells,
        tag("td", f"{failed} of {len(judged)}", class_="sum"),
    )


def _mark(result: Result) -> Markup:
    mark, tone, word = MARKS[result.status]
    label = f"{result.canary}, {result.at:%d %b %H:%M} UTC: {word}"
    return tag(
        "a",
        mark,
        href=url("canaries/result", run=result.run, canary=result.canary),
        class_=f"mark {tone}",
        title=label,
        aria_label=label,
    )


def result(look: Look) -> Page:
    """One canary in one run: what was wrong, and what it was answered from."""
    run, canary = look.asked("run", 300), look.asked("canary", 300)
    history = [r for r in look.records.results.all if r.canary == canary]
    found = next((r for r in history if r.run == run), None)
    if found is None:
        raise HTTPException(404, "There is no such result, or it is older than what is kept here.")
    mark, tone, word = MARKS[found.status]
    body = join(
        [
            tag("p", link("← All canaries", "canaries")),
            section("What was wrong", tag("p", chip(f"{mark} {word}", tone)), _wrong(found)),
            section("What it was answered from", _context(found)),
            section("The answer", facts(_answer(look, found))),
            section("Its other runs", _history(history, found)),
        ]
    )
    return Page(canary, body, lead=f"Run {run}, asked {found.at:%d %B %Y, %H:%M:%S} UTC")


def _wrong(found: Result) -> Markup:
    if found.status is Status.ERROR:
        return tag("p", f"It could not be judged: {found.error or 'no reason was noted'}.")
    if not found.deviations:
        return tag("p", "Nothing: every expectation was met.")
    return tag(
        "ul",
        *(tag("li", tag("b", d.kind.replace("_", " ")), tag("p", d.message)) for d in found.deviations),
        class_="deviations",
    )


def _context(found: Result) -> Markup:
    if not found.documents:
        return tag("p", "From no document, or the target does not tell.")
    scores = [*found.scores, *([None] * (len(found.documents) - len(found.scores)))]
    sources = [*found.sources, *([""] * (len(found.documents) - len(found.sources)))]
    rows = [
        tag(
            "tr",
            cell("Rank", str(i)),
            cell("Source", source or "–", kind="wrap"),
            cell("Chunk", code(document), kind="wrap"),
            cell("Cosine", decimal(score)),
        )
        for i, (document, source, score) in enumerate(zip(found.documents, sources, scores, strict=False), 1)
    ]
    return table(("Rank", "Source", "Chunk", "Cosine similarity"), rows, "Documents of the context", "cards")


def _answer(look: Look, found: Result) -> list[tuple[str, str]]:
    text = found.text if look.app.config.privacy.log_text and found.text else "not kept: privacy.log_text is off"
    return [
        ("Took", seconds(found.seconds)),
        ("Length", f"{found.words} words"),
        ("Declined to answer", "yes" if found.refused else "no"),
        ("Text", text),
    ]


def _history(history: Sequence[Result], found: Result) -> Markup:
    judged = [r for r in history if r.status is not Status.ERROR and "~" not in r.run]
    figure, about = share(sum(r.status is Status.FAIL for r in judged), len(judged))
    marks = [
        tag("li", _mark(r), tag("small", when(r.at, seconds=False))) for r in history[-12:][::-1] if r is not found
    ]
    return join(
        [
            tag("p", tag("b", f"{figure} failed"), f" ({about}), repetitions not counted"),
            tag("ul", *marks, class_="runs"),
        ]
    )
