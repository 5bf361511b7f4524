"""What crawlers carried away, as part of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from casemate.lab.charts import Markup, Scale, tag
from casemate.lab.crawl_results import Crawl, Haul
from casemate.lab.results import Campaign
from casemate.lab.wording import carried, measured, number, overall

COLUMNS = (
    ("Guard", ""),
    ("Recovered", "CRR, ROUGE-L > .5 and cosine > .85"),
    ("Recovered", "by recall"),
    ("Reached", "coverage"),
    ("Efficiency", "1 is the most"),
    ("Half recovered after", "questions"),
    ("First alarm", "question"),
)
LEAD = (
    "How much of the collection crawlers carried away, with 95 % intervals. Lower is better; the curves show what was "
    "recovered, question by question."
)


def is_crawl(campaign: Campaign) -> bool:
    """Whether a campaign was one of crawlers, with figures or without."""
    return bool(campaign.crawls) or any(key.startswith("loot.") for key in campaign.evidence)


def crawl_section(campaign: Campaign, beside: bool) -> Iterator[Markup]:
    """The section on extraction.

    Args:
        campaign: One of crawlers.
        beside: Whether it stands on another campaign's page, so that its verdict must be told here.
    """
    parts: list[Markup] = []
    if beside:
        about = f"A campaign of its own, of {campaign.at.replace('T', ' ', 1)}, on target "
        about += f"{campaign.evidence.get('target', 'own')}; it ended in "
        verdict = tag("b", overall(campaign).upper(), class_=str(overall(campaign)))
        parts.append(tag("p", about, verdict, ". That is not in the word above."))
    loot = {key[5:]: str(text) for key, text in campaign.evidence.items() if key.startswith("loot.")}
    if campaign.crawls:
        parts += [tag("ul", *(tag("li", carried(crawl)) for crawl in campaign.crawls)), _table(campaign.crawls)]
        drawn = [
            tag("figure", tag("figcaption", crawl.attack), curves(crawl.hauls, f"x{i}"))
            for i, crawl in enumerate(campaign.crawls)
        ]
        parts.append(tag("div", *drawn, class_="panels"))
    else:
        parts.append(tag("p", "What that is of the collection is not known: its texts were not given.", class_="gap"))
    if loot:
        rows = [piece for who, what in loot.items() for piece in (tag("dt", who.replace(".", ", ")), tag("dd", what))]
        parts += [tag("h3", "Loot"), tag("dl", *rows, class_="pairs")]
    yield tag("section", tag("h2", "Extraction"), tag("p", LEAD, class_="lead"), *parts)


def curves(hauls: Mapping[str, Haul], key: str) -> Markup:
    """Share recovered by the number of questions, each target a curve."""
    most = max((haul.questions for haul in hauls.values()), default=1) or 1
    x, y = Scale(0.0, float(most), 42.0, 310.0), Scale(0.0, 1.0, 200.0, 12.0)
    marks = [
        piece
        for v in (0.0, 0.5, 1.0)
        for piece in (
            tag("line", class_="grid", x1=x.start, x2=x.end, y1=y(v), y2=y(v)),
            tag("text", f"{v:.0%}", x=36.0, y=y(v) + 4, text_anchor="end"),
        )
    ]
    for side, haul in hauls.items():
        points = " L".join(f"{x(at):.1f},{y(crr):.1f}" for at, _, crr in ((0, None, 0.0), *haul.curve))
        marks.append(tag("path", class_=f"curve {side}", d=f"M{points}"))
    marks.append(tag("text", f"questions, 0 to {most}", x=176.0, y=222.0, text_anchor="middle"))
    said = "; ".join(f"guard {side}: {measured(haul.crr, share=True)} recovered" for side, haul in hauls.items())
    return tag("svg", tag("title", said), *marks, viewBox="0 0 320 230", role="img", aria_label=said, id=key)


def _table(crawls: Sequence[Crawl]) -> Markup:
    top = [tag("th", "Crawler", class_="name", scope="col")]
    top += [tag("th", title, *([tag("small", hint)] if hint else []), scope="col") for title, hint in COLUMNS]
    bodies = []
    for crawl in crawls:
        about = f"{crawl.budget} questions, {crawl.clients} {'names' if crawl.clients > 1 else 'name'}"
        name = tag("th", crawl.attack, tag("small", about), class_="name", scope="rowgroup", rowspan=len(crawl.hauls))
        rows = [
            tag("tr", *([name] if i == 0 else []), *_cells(side, haul))
            for i, (side, haul) in enumerate(crawl.hauls.items())
        ]
        bodies.append(tag("tbody", *rows))
    table = tag("table", tag("thead", tag("tr", *top)), *bodies)
    return tag("div", table, class_="scroll", role="region", tabindex=0, aria_label="Figures of all crawls")


def _cells(side: str, haul: Haul) -> Iterator[Markup]:
    seen = haul.coverage is not None
    alarm = str(haul.first_alarm) if haul.first_alarm else "none" if seen else "not told"
    half = haul.crr_after.get("50%")
    yield tag("th", side, class_=f"side {side}", scope="row")
    yield tag("td", measured(haul.crr, share=True))
    yield tag("td", measured(haul.crr_recall, share=True))
    yield tag("td", measured(haul.coverage, share=True) if seen else "not told")
    yield tag("td", number(haul.efficiency) if seen else "not told")
    yield tag("td", str(half) if half else "never")
    yield tag("td", "–" if side == "off" else alarm)
