"""What each error rate costs: the page from which an owner chooses ``mirabel.significance``.

The smaller the share of harmless questions that may be flagged, the more attacks get through. The page shows both, says
what the harmless questions were, and is plain where there were too few of them. It has no script and loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.resources import files

from casemate.calibration import DRIFT, Calibration
from casemate.closeness import FEATURES
from casemate.lab.calibrate import RATES, REWORDED
from casemate.lab.charts import Markup, tag
from casemate.lab.cost_charts import Measures, View, alike, fewest, histogram, legend_mark, one_in, panel, written
from casemate.lab.html import POLICY
from casemate.lab.wording import interval, measured, number, percent, scrub
from casemate.stats import Rate

MADE = "made from the corpus"
ASKED = "of a log"
"""What ``lab.calibrate`` says of the harmless questions."""
EXPLAINED = dict(
    zip(
        FEATURES,
        (
            "How alike question and document are: the cosine of the document's best chunk.",
            "How much more alike than the next three documents are.",
            "How far above the mean of all documents, in standard deviations: the figure of the published rule.",
            "How unlikely it is by chance that one document stands out so far from those that follow.",
            "Four-word phrases that question and document share.",
            "How many more of the question's content words this document has than any other that was found.",
        ),
        strict=True,
    )
)
"""The figures of ``closeness.FEATURES`` for people."""
READING = {
    "Significance": (
        "The share of harmless questions that you accept to be flagged. A flagged question is answered without the "
        "document that it is too close to; whoever asked is not told. Larger: more attacks are stopped, and more "
        "harmless askers miss a document."
    ),
    "Stopped, by question": "Of the questions of an attack, the share whose document the guard would have withheld.",
    "Stopped, by document": (
        "Of the documents attacked, the share for which at least one of up to four questions was flagged. From then on "
        "the document is withheld from that client (mirabel.session_hours)."
    ),
    "Intervals": (
        "In brackets, 95 %. Those of attacks are about further documents of this corpus, not about other attacks: "
        "somebody may come with one that is not here."
    ),
    "Likely share flagged": (
        "The promise is kept on average over all samples of harmless questions that could have been drawn. With the "
        "sample that was drawn, the true share lies in this interval in 95 of 100 cases. More questions narrow it."
    ),
    REWORDED: "Our own probe, not a published attack: the text with words left out, and one sentence out of order.",
    "Not counted here": (
        "Evidence that adds up over a client's questions: it stops more, and flags a further share of harmless "
        "questions of at most mirabel.session_alarm. A document that was flagged once, and so is withheld again. And "
        "the small random share by which the threshold is lowered for each client and document: it stops more, and "
        "harmless scores have it in them already."
    ),
}
STYLE = """
.banner.now { --tone: var(--on); --tint: var(--card); }
.banner.costs h1 { text-transform: none; font-size: 1.9rem; letter-spacing: 0; }
.banner.costs p { max-width: 78ch; }
.caveats pre { font: .84rem/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; margin: 4px 0; }
.now th, .now td, td.now { background: var(--card); }
.now th.name { box-shadow: inset 4px 0 var(--on); background: var(--card); }
td.why { color: var(--inconclusive); }
.legend { display: inline-block; width: 26px; height: 12px; vertical-align: -1px; margin: 0 6px 0 4px; }
.panels figure { break-inside: avoid; margin-top: 8px; }
.panels figcaption { font-weight: 400; }
.panels figcaption b { color: var(--ink); }
.caveats pre + h2, .caveats ul + h2 { margin-top: 10px; }
.pair svg[role="img"] { max-width: 440px; }
.pair { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 6fr); gap: 12px 40px; align-items: start; }
.weights li { display: grid; grid-template-columns: 92px minmax(0, 1fr) 44px; gap: 0 12px; align-items: center;
  padding: 7px 0; border-top: 1px solid var(--line); }
.weights li:last-child { border-bottom: 1px solid var(--line); }
.weights svg { height: 12px; }
.weights b:last-of-type { text-align: right; }
.weights p { grid-column: 1 / -1; font-size: .88rem; color: var(--soft); }
svg .bar { fill: var(--on); stroke: var(--on); stroke-width: .6; }
svg .bar.flagged { fill: var(--fail); stroke: var(--fail); stroke-width: 1; }
svg .chosen { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 5 3; }
svg .missing { fill: var(--line); opacity: .55; }
svg .question { stroke: var(--on); fill: var(--on); }
svg .document { stroke: var(--soft); fill: var(--page); stroke-width: 1.5; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .line.document { stroke-width: 1.2; stroke-dasharray: 1 3; }
svg .error { stroke-width: 2; opacity: .55; }
@media (max-width: 720px) {
  .pair { grid-template-columns: minmax(0, 1fr); }
  .banner.costs h1 { font-size: 1.6rem; }
  th.name { min-width: 0; max-width: 140px; }
}
@media print {
  .panels { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  .pair { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .pair li { break-inside: avoid; }
}
"""


def render_html(calibration: Calibration, significance: float) -> str:
    """What each error rate costs, as one self-contained page.

    Args:
        calibration: What was learnt; its secret stays in it.
        significance: The share of harmless questions that may be flagged now, in (0, 1).

    Raises:
        ValueError: If the significance is out of its range.
    """
    view = View(scrub(calibration), significance)
    title = "What each error rate costs"
    body = tag(
        "main",
        tag("header", tag("b", "Casemate calibration"), tag("time", _time(view.held.at)), class_="top"),
        _banner(view, title),
        *(_body(view) if view.held.benign else ()),
    )
    style = files("casemate.lab").joinpath("report.css").read_text(encoding="utf-8") + STYLE
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Markup('<meta name="robots" content="noindex"><meta name="referrer" content="no-referrer">'),
        tag("title", f"{title}: {_time(view.held.at)}"),
        tag("style", Markup(style)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


# words


def _time(at: str) -> str:
    return at.replace("T", " ", 1) or "at an unknown time"


def _told(rate: Rate) -> str:
    """A share with its interval, on one line."""
    return measured(rate, share=True).replace(" ", "\u00a0")


def _missing(rate: float, n: int) -> str:
    return f"needs at least {fewest(rate)} harmless questions that set the threshold; there are {n}"


def _likely(rate: float, n: int) -> Rate:
    """The share of all harmless questions above the threshold, given this sample, with its 95 % interval.

    Its law is Beta(a, N + 1 - a), a = floor(rate (N + 1)) as in ``stats.conformal_threshold``, if no two scores are
    equal, and else lower (Vovk 2012, "Conditional validity of inductive conformal predictors").
    """
    from scipy.stats import beta

    a = math.floor(rate * (n + 1) + 1e-9)
    low, high = beta.ppf([0.025, 0.975], a, n + 1 - a)
    return Rate(a / (n + 1), float(low), float(high))


# sections


def _section(title: str, lead: str, *children: str) -> Markup:
    return tag("section", tag("h2", title), *([tag("p", lead, class_="lead")] if lead else []), *children)


def _banner(view: View, title: str) -> Markup:
    """What holds now, in one frame with what it rests on."""
    works = math.isfinite(view.threshold)
    said = _now(view) if works else _nothing(view)
    return tag(
        "section",
        tag("h1", title if works else "Nothing is withheld"),
        *(tag("p", text, **({"class_": "headline"} if i == 0 else {})) for i, text in enumerate(said)),
        tag("div", _questions(view), _system(view), class_="caveats"),
        class_=f"banner costs {'now' if works else 'inconclusive'}",
    )


def _now(view: View) -> Iterator[str]:
    yield (
        f"Now, at significance {written(view.significance)}: at most {one_in(view.significance)} harmless questions is "
        "flagged, and answered without the document that it is too close to."
    )
    if not view.attacks:
        yield "How often attacks would be stopped was not measured."
        return
    if view.near is None:
        yield f"How often attacks are stopped is known from {written(view.rates[0])} on; at this rate no more are."
        return
    (name, by_question), (other, by_document) = (view.weakest(view.near, by) for by in ("question", "document"))
    own = ", our own probe" if name == REWORDED else ""
    yield (
        f"Stopped least often: {name}{own}. Its document is withheld in {_told(by_question)} of its questions. "
        f"By document, over all questions about it, stopped least often: {other}, {_told(by_document)}."
    )
    if view.near != view.significance:
        yield f"Both were measured at {written(view.near)}; at {written(view.significance)} no fewer are stopped."


def _nothing(view: View) -> Iterator[str]:
    if not view.n:
        yield f"The guard could not be fitted: {view.held.source}."
        yield "Until then every question is answered from all documents. Add some, and run casemate\u00a0calibrate."
        return
    yield f"Significance {written(view.significance)} {_missing(view.significance, view.n)}."
    usable = math.ceil(1e4 / (view.n + 1)) / 1e4
    yield (
        "Until then every question is answered from all documents. Give more questions (casemate calibrate --log FILE, "
        f"or a larger calibrate.questions in casemate.yaml), or set a significance of at least {written(usable)}."
    )


def _questions(view: View) -> Markup:
    source = view.held.source
    lines = [f"{source[:1].upper()}{source[1:]}."] if view.n else ["None was used."]
    if view.n:
        lines.append(f"{view.n} of them, which the weights were not fitted on, set the threshold.")
    if source.endswith(MADE):
        lines.append(
            "Nobody asked them: they are shaped like questions of people. The promise holds for questions like these; "
            "your people may come closer to a document, or stay farther away."
        )
        lines.append("Better: questions that people asked you. casemate calibrate --log FILE")
    elif source.endswith(ASKED):
        lines.append("The promise holds as long as people go on asking as they did in the log.")
        lines.append("An attack that is in the log counts as harmless, and makes room for others like it.")
    return tag("div", tag("h2", "Harmless questions"), tag("ul", *(tag("li", line) for line in lines)))


def _system(view: View) -> Markup:
    held = view.held
    lines = (
        f"Made {_time(held.at)}.",
        f"Embedder: {held.fingerprint}.",
        f"{held.documents:,} chunks; {held.k} make a context.",
        f"Stale with another embedder, or with more than {DRIFT:g} times as many or as few chunks.",
    )
    code = f"guard:\n  defenses:\n    - {{name: mirabel, significance: {written(view.significance)}}}"
    return tag(
        "div",
        tag("h2", "This calibration"),
        tag("ul", *(tag("li", line) for line in lines)),
        tag("h2", "To change the rate, in casemate.yaml"),
        tag("pre", code),
    )


def _body(view: View) -> Iterator[Markup]:
    yield _choices(view)
    if view.attacks:
        yield _panels(view)
    yield tag("div", _scores(view), _weights(view.held), class_="pair")
    if view.attacks:
        yield _table(view)
    rows = [piece for term, text in READING.items() for piece in (tag("dt", term), tag("dd", text))]
    yield _section("How to read this", "", tag("dl", *rows, class_="reading"))
    secret = "Keep this page as you keep other findings: it tells how close a question may come before it is flagged."
    yield tag("p", secret, class_="lead")


def _scroll(table: Markup, label: str) -> Markup:
    return tag("div", table, class_="scroll", role="region", tabindex=0, aria_label=label)


def _choices(view: View) -> Markup:
    """A row for each rate: what it costs harmless askers, and how often the attack that does best is stopped."""
    titles = (
        ("Significance", ""),
        ("Harmless flagged", "at most"),
        ("Stopped, by question", "of the attack stopped least"),
        ("Stopped, by document", "of the attack stopped least"),
        ("Likely share flagged", "with these questions"),
        ("Threshold", "score; 0 is average"),
    )
    top = [tag("th", a, *([tag("small", b)] if b else []), scope="col") for a, b in titles]
    rows = [_choice(view, rate) for rate in sorted({*RATES, view.significance})]
    table = tag("table", tag("thead", tag("tr", *top)), tag("tbody", *rows))
    lead = (
        "What each rate costs harmless askers, and how often it stops the attack that gets through most often. Take "
        "the smallest rate that stops what you fear."
    )
    return _section("Choose", lead, _scroll(table, "Rates to choose from"))


def _choice(view: View, rate: float) -> Markup:
    chosen = rate == view.significance
    name = tag("th", written(rate), *([tag("small", "now")] if chosen else []), class_="name", scope="row")
    cells = [tag("td", one_in(rate), tag("small", f"{100 * rate:g} %"))]
    threshold = view.held.threshold(rate)
    if math.isinf(threshold):
        cells.append(tag("td", tag("span", f"Unavailable: {_missing(rate, view.n)}"), colspan=4, class_="wrap why"))
    else:
        cells += [_least(view, rate, by) for by in ("question", "document")]
        cells += [tag("td", interval(_likely(rate, view.n), share=True) + " %"), tag("td", f"{threshold:.2f}")]
    return tag("tr", name, *cells, **({"class_": "now"} if chosen else {}))


def _least(view: View, rate: float, by: str) -> Markup:
    if not view.attacks or rate not in view.rates:
        return tag("td", tag("small", "not measured"))
    name, share = view.weakest(rate, by)
    return tag("td", _told(share), tag("small", name))


def _table(view: View) -> Markup:
    top = [tag("th", "Attack", class_="name", scope="col"), tag("th", "withheld of", scope="col")]
    for rate in RATES:
        hint = "now" if rate == view.significance else f"{100 * rate:g} % flagged"
        top.append(tag("th", written(rate), tag("small", hint), scope="col"))
    bodies = [tag("tbody", *_rows(view, name, measures)) for name, measures in view.attacks.items()]
    lead = "Share of an attack's questions, and of the documents attacked, for which the document is withheld, with "
    lead += f"95 % intervals. The weights were not fitted on these documents. {_unavailable(view)}"
    table = tag("table", tag("thead", tag("tr", *top)), *bodies)
    return _section("All figures", lead.rstrip(), _scroll(table, "Recall of all attacks at all rates"))


def _rows(view: View, name: str, measures: Measures) -> Iterator[Markup]:
    for i, by in enumerate(("question", "document")):
        head = [tag("th", name, class_="name", scope="rowgroup", rowspan=2)] if i == 0 else []
        cells = []
        for rate in RATES:
            own = {"class_": "now"} if rate == view.significance else {}
            share = measures[rate][by] if rate in measures else None
            told = [percent(share.value), tag("small", interval(share, share=True))] if share else ["–"]
            cells.append(tag("td", *told, **own))
        yield tag("tr", *head, tag("th", f"{by}s", class_="side", scope="row"), *cells)


def _unavailable(view: View) -> str:
    """Why some rates have no figures; empty if all have."""
    if not view.gone:
        return ""
    needs = ", ".join(f"{written(r)} needs {fewest(r)}" for r in view.gone)
    return f"Too few harmless questions ({view.n}) for the smallest rates: {needs}."


def _panels(view: View) -> Markup:
    """A chart for each attack: in one for all, the lines would lie on top of one another."""
    figures = []
    for i, (name, measures) in enumerate(alike(view.attacks).items()):
        near = view.near or min(measures)
        said = [f"{percent(measures[near][by].value)} of {by}s" for by in ("question", "document")]
        caption = tag(
            "figcaption", tag("b", name), f" at {written(near)}: {said[0]}, {said[1]}".replace(" %", "\u00a0%")
        )
        figures.append(tag("figure", caption, panel(view, name, measures, f"p{i}")))
    lead = tag(
        "p",
        "Share of an attack whose document is withheld, against the share of harmless questions flagged for it. Up is "
        "better; the attack that gets through most often comes first. The broken line is the rate now. ",
        legend_mark("question"),
        "of its questions, ",
        legend_mark("document"),
        f"of the documents attacked, with 95 % intervals. {_unavailable(view)}".rstrip(),
        class_="lead",
    )
    return _section("What it buys: how often each attack is stopped", "", lead, tag("div", *figures, class_="panels"))


def _scores(view: View) -> Markup:
    image, said = histogram(view, "scores")
    return _section("How close harmless questions come", said, image)


def _weights(held: Calibration) -> Markup:
    largest = max(*held.weights, 1e-9)
    rows = []
    for name, weight in sorted(zip(held.features, held.weights, strict=True), key=lambda pair: -pair[1]):
        bar = tag("rect", class_="bar", x=0.0, y=0.0, width=100 * weight / largest, height=8.0)
        image = tag("svg", bar, viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true")
        rows.append(tag("li", tag("b", name), image, tag("b", number(weight)), tag("p", EXPLAINED.get(name, ""))))
    lead = (
        "The score of a document is the sum of these figures, each in standard deviations above its mean among "
        "harmless questions, times its weight. A weight of .00: here, the others tell as much."
    )
    return _section("What makes a question close", lead, tag("ul", *rows, class_="weights"))
