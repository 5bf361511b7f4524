"""One page that says what a campaign found: no script, no network, nothing beside itself.

The order is that of the questions a reader has: did it hold, what does that not say, what did each attack achieve, what
did the guard cost, and what is all that made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from casemate.lab.charts import Markup, histogram, join, lowest_auc, roc, tag, track
from casemate.lab.compare import Change, Diff, conclusion, diff, flat
from casemate.lab.crawl_html import crawl_section, is_crawl
from casemate.lab.generation import live
from casemate.lab.results import AttackResult, Audit, Campaign, Check, Figures, Status, Transcript, Utility
from casemate.lab.wording import (
    SEVERITY,
    TOO_FEW,
    cases,
    ended,
    headline,
    in_figures,
    interval,
    measured,
    number,
    overall,
    percent,
    scrub,
    sentence,
    strongest,
)
from casemate.stats import Rate

ICON = {Status.PASS: "✓", Status.FAIL: "✕", Status.INCONCLUSIVE: "?", Status.ERROR: "!"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Whatever got past the escaping could still load and run nothing."""
COLUMNS = (
    ("Guard", ""),
    ("AUC", ".5 is chance"),
    ("Adjusted accuracy", "0 is guessing"),
    ("TPR at 1\u00a0%\u00a0FPR", "members named"),
    ("TPR at 0.1\u00a0%\u00a0FPR", "members named"),
    ("KS", "0 is alike"),
    ("Withheld", "per question"),
    ("Withheld", "per document"),
)
NAMED_AT_MOST = 4
BLOCK = re.compile(r"(▇×\d+)")
FIGURE = re.compile(r"[\d.<>]+( %)?( \[[^\]]*\])?")
READING = {
    "AUC": (
        "Take one member and one other document at random: how likely the attack finds the member the more "
        "suspicious of the two. .50 is a coin toss, 1.00 is certainty."
    ),
    "Adjusted accuracy": (
        "How far beyond guessing the attack is right, at a threshold fitted on other candidates: .00 is guessing, "
        ".50 is always right."
    ),
    "TPR at 1 % FPR": (
        "Share of the members that the attack names while it wrongly names 1 % of the others. An attacker who "
        "must not be wrong looks at this, not at the AUC."
    ),
    "KS": (
        "Largest distance between the two distributions of scores: 0 when they are the same, 1 when they do not touch."
    ),
    "Withheld": (
        "Per question: in how many questions about a member the guard withheld that very document. Per document: "
        "of how many members it did so at least once. With the guard off nothing is withheld."
    ),
    "Intervals": (
        'In brackets. Of 100 campaigns like this one, 95 would have an interval that holds the true figure. "Too '
        'few to say": the sample is too small for this figure, so none is given.'
    ),
    "Inconclusive": "A check that was left out, broke off, or had too little to go by. It is not a pass.",
}


def render_html(campaign: Campaign, baseline: Campaign | None = None, crawl: Campaign | None = None) -> str:
    """The report as one self-contained page.

    Args:
        campaign: What to report.
        baseline: An earlier campaign; the page then begins with what changed.
        crawl: One of crawlers, to be shown beside this one.
    """
    campaign = scrub(campaign)
    status = overall(campaign)
    body = tag(
        "main",
        _top(campaign),
        _banner(campaign, status),
        *(_baseline(diff(campaign, baseline), scrub(baseline)) if baseline else ()),
        *_what(campaign, scrub(crawl)),
        *_checks(cases(campaign)),
        *_table(campaign.attacks),
        *_charts(campaign.attacks),
        *_exchanges(campaign.transcripts),
        *_pairs("What it is made of", campaign.evidence, "No evidence was recorded, so this run cannot be repeated."),
        *_pairs("What it took", campaign.cost, "Not recorded.", live(campaign.cost)),
        *_reading(),
    )
    style = Markup(files("casemate.lab").joinpath("report.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Markup('<meta name="robots" content="noindex"><meta name="referrer" content="no-referrer">'),
        tag("title", f"{status.upper()}: red team, {campaign.at}"),
        tag("style", style),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def _what(campaign: Campaign, crawl: Campaign | None) -> Iterator[Markup]:
    """What was achieved, and what it costs to hinder it."""
    if is_crawl(campaign):
        yield from crawl_section(campaign, beside=False)
        return
    yield from _overview(campaign)
    yield from _utility(campaign.utility)
    yield from _worlds(campaign.audit)
    if crawl is not None:
        yield from crawl_section(crawl, beside=True)


def _top(campaign: Campaign) -> Markup:
    target = f"target {campaign.evidence.get('target', 'own')}"
    parts = [tag("b", "Casemate red team"), tag("span", target), tag("span", f"campaign {campaign.id}")]
    parts.append(tag("time", _time(campaign.at)))
    return tag("header", *parts, class_="top")


def _time(at: str) -> str:
    return at.replace("T", " ", 1)


def _unbroken(text: str) -> str:
    """A figure and its interval stay on one line."""
    return FIGURE.sub(lambda found: found.group().replace(" ", "\u00a0"), text)


def _chip(status: Status) -> Markup:
    return tag("span", f"{ICON[status]} {status}", class_=f"chip {status}")


def _banner(campaign: Campaign, status: Status) -> Markup:
    """Verdict, why, and inside the same frame what it does not cover: nobody can quote one without the other."""
    failing = sorted(
        (c for c in cases(campaign) if c.status is not Status.PASS), key=lambda c: SEVERITY.index(c.status)
    )
    rows = [tag("li", _chip(c.status), tag("span", _subject(c), in_figures(c))) for c in failing[:NAMED_AT_MOST]]
    if len(failing) > NAMED_AT_MOST:
        rows.append(tag("li", f"and {len(failing) - NAMED_AT_MOST} more, below."))
    gap = "Nothing is named. That is a gap in the record, not an assurance."
    return tag(
        "section",
        tag("h1", tag("span", ICON[status], aria_hidden="true"), str(status)),
        tag("p", headline(campaign), class_="headline"),
        tag("p", _unbroken(strongest(campaign))),
        *([tag("ul", *rows, class_="open")] if rows else []),
        tag(
            "div",
            _caveat("Not tested", campaign.not_tested, gap),
            _caveat("Simulated", campaign.simulated, "Nothing: no part stood in for a real one."),
            class_="caveats",
        ),
        class_=f"banner {status}",
    )


def _caveat(title: str, lines: tuple[str, ...], otherwise: str) -> Markup:
    items = [tag("li", line) for line in lines or (otherwise,)]
    return tag("div", tag("h2", title), tag("ul", *items))


def _subject(check: Check) -> str:
    return f"{check.attack}: {check.name}" if check.attack else check.name


def _section(title: str, lead: str, *children: str) -> Iterator[Markup]:
    yield tag("section", tag("h2", title), *([tag("p", lead, class_="lead")] if lead else []), *children)


def _baseline(change: Diff, baseline: Campaign) -> Iterator[Markup]:
    """What is different from last time; what makes the two incomparable comes first."""
    groups: tuple[tuple[str, Iterable[Change | str]], ...] = (
        ("Not comparable, because this differs", change.settings),
        ("Worse", change.worse),
        ("Better", change.better),
        ("Disappeared", change.disappeared),
        ("Appeared", change.appeared),
        ("Also different", change.notes),
    )
    blocks = []
    for title, changes in groups:
        lines = [c if isinstance(c, str) else f"{c.what}: {c.before} → {c.after}" for c in changes]
        if lines:
            blocks.append(tag("h3", title))
            blocks.append(tag("ul", *(tag("li", line) for line in lines)))
    title = f"Against the baseline of {_time(baseline.at)}"
    yield from _section(title, conclusion(change), tag("div", *blocks, class_="changes"))


def _overview(campaign: Campaign) -> Iterator[Markup]:
    low = lowest_auc(campaign.attacks)
    rows = []
    for i, attack in enumerate(campaign.attacks):
        drawn = [track(attack, low, f"a{i}")] if attack.on or attack.off else []
        rows.append(tag("li", tag("h3", attack.name), tag("p", _unbroken(sentence(attack))), *drawn))
    lead = tag(
        "p",
        "Each attack tries to find out whose record is in the collection. ",
        tag("span", class_="key off"),
        "guard off, ",
        tag("span", class_="key on"),
        "guard on, with 95 % intervals. Nearer to the coin toss is better.",
        class_="lead",
    )
    body = [lead, tag("ul", *rows, class_="attacks")] if rows else [tag("p", "No attack was run.", class_="gap")]
    yield from _section("What each attack achieved", "", *body)


def _checks(checks: tuple[Check, ...]) -> Iterator[Markup]:
    rows = []
    for check in sorted(checks, key=lambda c: SEVERITY.index(c.status)):
        ids = [*(f"OWASP {i}" for i in check.owasp), *(f"MITRE ATLAS {i}" for i in check.atlas)]
        about = [tag("strong", _subject(check)), in_figures(check)]
        text = tag("div", tag("p", *about), tag("p", ended(check.why)), tag("p", " · ".join(ids), class_="meta"))
        rows.append(tag("li", tag("div", _chip(check.status)), text))
    yield from _section("What was to hold", "", tag("ul", *rows, class_="checks"))


def _table(attacks: tuple[AttackResult, ...]) -> Iterator[Markup]:
    if not attacks:
        return
    top = [tag("th", "Attack", class_="name", scope="col")]
    top += [tag("th", title, *([tag("small", hint)] if hint else []), scope="col") for title, hint in COLUMNS]
    table = tag("table", tag("thead", tag("tr", *top)), *(_rows(a, len(COLUMNS)) for a in attacks))
    region = tag("div", table, class_="scroll", role="region", tabindex=0, aria_label="Figures of all attacks")
    lead = (
        "With 95 % intervals. For the owner, lower is better, except for the last two columns: what the guard withheld."
    )
    yield from _section("Guard off against guard on", lead, region)


def _rows(attack: AttackResult, width: int) -> Markup:
    """Two lines of the table, off above on, or one that says why there are none."""
    sides = [(side, f) for side, f in (("off", attack.off), ("on", attack.on)) if f]
    about = []
    if sides:
        about.append(f"{sides[0][1].members} members, {sides[0][1].nonmembers} others")
    if attack.auc_drop:
        about.append(f"AUC drop {measured(attack.auc_drop)}")
    name = tag(
        "th",
        attack.name,
        *(tag("small", a) for a in about),
        class_="name",
        scope="rowgroup",
        rowspan=max(len(sides), 1),
    )
    if not sides:
        why = tag("td", tag("span", f"No figures: {attack.error or 'it was not run'}"), colspan=width, class_="wrap")
        return tag("tbody", tag("tr", name, why))
    lines = [tag("tr", *([name] if i == 0 else []), *_cells(side, f)) for i, (side, f) in enumerate(sides)]
    return tag("tbody", *lines)


def _cells(side: str, f: Figures) -> Iterator[Markup]:
    yield tag("th", side, class_=f"side {side}", scope="row")
    yield _cell(f.auc)
    yield _cell(f.adjusted_accuracy)
    yield _cell(f.tpr_at_1, share=True)
    yield _cell(f.tpr_at_01, share=True)
    yield tag("td", number(f.ks))
    for rate in (f.recall_query, f.recall_document):
        yield tag("td", "–") if side == "off" or rate is None else _cell(rate, share=True)


def _cell(rate: Rate | None, share: bool = False) -> Markup:
    if rate is None:
        return tag("td", tag("small", TOO_FEW))
    return tag("td", percent(rate.value) if share else number(rate.value), tag("small", interval(rate, share)))


def _charts(attacks: tuple[AttackResult, ...]) -> Iterator[Markup]:
    drawn = [_attack(a, f"a{i}") for i, a in enumerate(attacks) if a.off or a.on]
    if drawn:
        lead = (
            "Left: the more a curve bulges up and to the left, the better the attack. Right: how it scores members and "
            "others; where the upper shape mirrors the lower one, it cannot tell them apart."
        )
        yield from _section("Curves and scores", lead, *drawn)


def _attack(attack: AttackResult, key: str) -> Markup:
    figures = [
        tag("figure", tag("figcaption", caption), image)
        for caption, image in (
            ("ROC curve", roc(attack, key)),
            ("Scores, guard off", histogram(attack, "off", key)),
            ("Scores, guard on", histogram(attack, "on", key)),
        )
    ]
    return tag(
        "article", tag("h3", attack.name), *_about(attack), tag("div", *figures, class_="panels"), class_="attack"
    )


def _about(attack: AttackResult) -> Iterator[Markup]:
    """Where it is from, and how well the guard aims: at the member asked about, or at anything."""
    mind = "fixed rules, without a language model" if attack.backend == "deterministic" else attack.backend
    yield tag("p", f"{attack.paper}. Runs on {mind}.", class_="meta")
    on = attack.on
    if on and on.recall_query and on.nonmember_flags:
        hit, miss = measured(on.recall_query, share=True), measured(on.nonmember_flags, share=True)
        text = f"The guard withheld the member in {hit} of the questions about members, anything in {miss} of others."
        yield tag("p", _unbroken(text), class_="meta")


def _utility(utility: Utility | None) -> Iterator[Markup]:
    title = "What the guard costs harmless askers"
    if utility is None:
        yield from _section(title, "", tag("p", "Not measured, so nobody knows what the guard costs.", class_="gap"))
        return
    changed = measured(utility.answer_changed, True)
    facts = [(changed, f"of {utility.questions} answers were lost with the guard")]
    if utility.flagged:
        facts = [
            (measured(utility.flagged, True), f"of {utility.questions} harmless questions had something withheld"),
            (changed, "got another answer than without the guard"),
        ]
    yield from _section(title, f"The questions: {utility.source}", _facts(facts))


def _facts(facts: Iterable[tuple[str, str]]) -> Markup:
    return tag("div", *(tag("div", tag("b", figure), text, class_="fact") for figure, text in facts), class_="facts")


def _worlds(audit: Audit | None) -> Iterator[Markup]:
    title = "Two worlds"
    if audit is None:
        text = "Not made, so it is not known whether a withheld document leaves a trace in the context."
        yield from _section(title, "", tag("p", text, class_="gap"))
        return
    lead = (
        "The same question, once with the document there and withheld, once without the document. What the model reads "
        "must be the same; each difference is a leak."
    )
    fact = (f"{audit.differing} of {audit.pairs}", f"contexts differ: {measured(audit.rate, True)}")
    yield from _section(title, lead, _facts([fact]))


def _exchanges(transcripts: tuple[Transcript, ...]) -> Iterator[Markup]:
    if not transcripts:
        return
    cards = [
        tag(
            "article",
            tag("h3", f"{t.attack}, guard {t.guard}, {'a member' if t.member else 'not a member'}"),
            tag("p", "asked", class_="meta"),
            tag("pre", _blocked(t.question)),
            tag("p", "answered", class_="meta"),
            tag("pre", _blocked(t.reply)),
            class_="exchange",
        )
        for t in transcripts
    ]
    lead = "A few, to see how the attacks go about it. ▇×12 stands for twelve words that are not the attack's own."
    yield from _section("Exchanges, redacted", lead, *cards)


def _blocked(text: str) -> Markup:
    return join(tag("span", part, class_="block") if BLOCK.fullmatch(part) else part for part in BLOCK.split(text))


def _pairs(title: str, mapping: Mapping[str, Any], otherwise: str, lead: str = "") -> Iterator[Markup]:
    if not mapping:
        yield from _section(title, "", tag("p", otherwise, class_="gap"))
        return
    rows = [piece for key, value in flat(mapping) for piece in (tag("dt", key.replace("_", " ")), tag("dd", value))]
    yield from _section(title, lead, tag("dl", *rows, class_="pairs"))


def _reading() -> Iterator[Markup]:
    rows = [piece for term, text in READING.items() for piece in (tag("dt", term), tag("dd", text))]
    yield from _section("How to read this", "", tag("dl", *rows, class_="reading"))
