import asyncio
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate import calibration as calibrations
from casemate.backends.sqlite import SqliteIndex
from casemate.calibration import Calibration
from casemate.cli import cli
from casemate.closeness import FEATURES
from casemate.lab.calibrate import RATES, Settings, calibrate
from casemate.lab.cost_charts import BOX, View, alike, fewest, histogram, panel
from casemate.lab.costs import EXPLAINED, _likely, render_html
from casemate.rag import Rag
from casemate.stats import Rate, rate
from casemate.types import DEFAULT_TENANT
from tests.fakes import BagOfWords, Parrot, documents

SALT = "5a17" * 16
HOSTILE = "\"><script>alert(1)</script>'<img src=x onerror=alert(1)>&amp;\x00\x1b[31m\ud800\u202e"


def recall(**attacks):
    """By attack the number of questions, of 200, that are withheld at each rate; of 100 documents half as many."""
    return {
        name: {
            str(r): {"question": rate(n, 200), "document": rate(n // 2, 100)} for r, n in zip(RATES, ns, strict=True)
        }
        for name, ns in attacks.items()
    }


TABLE = recall(
    menta=(60, 80, 120, 140, 160, 180),
    reworded=(50, 70, 110, 150, 170, 190),
    direct=(200,) * 6,
    s2mia=(200,) * 6,
)


def calibration(n=500, **changes):
    made = Calibration(
        fingerprint="bag-of-words",
        documents=5387,
        k=3,
        features=FEATURES,
        centre=(0.0,) * 6,
        scale=(1.0,) * 6,
        weights=(2.0, 0.0, 0.25, 0.0, 0.5, 1.0),
        benign=tuple(range(n)),
        source=f"{2 * n} questions made from the corpus",
        salt=SALT,
        at="2026-11-20T14:34:10+00:00",
        notes={"seed": 7, "documents": 200, "judged": n, "recall": TABLE},
    )
    return replace(made, **changes)


NOTHING = calibration(0, source="12 documents, too few to fit a guard (at least 20 are needed)", notes={})


class Page(HTMLParser):
    """Elements, attributes, visible text and tables of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.stack, self.rows = set(), [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        if tag != "meta":
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if "style" not in self.stack:
            self.text.append(data)
            if {"td", "th"} & set(self.stack):
                self.rows[-1][-1] = f"{self.rows[-1][-1]} {data}".strip().replace("\u00a0", " ")

    def values(self, name):
        return [value for key, value in self.attributes if key == name]

    def row(self, *begins):
        return next(r for r in self.rows if r[0].split()[: len(begins)] == list(begins))


def said(page):
    return re.sub(r"\s+", " ", " ".join(Page(page).text))


def banner(page):
    return said(
        page[page.index('<section class="banner') if '<section class="banner' in page else 0 :].split("</section>")[0]
        + "</section>"
    )


# what stands at the top


def test_the_top_says_what_holds_on_what_it_rests_and_how_to_change_it():
    text = banner(render_html(calibration(), 0.01))
    for part in (
        "at most 1 in 100 harmless questions",
        "reworded, our own probe. Its document is withheld in 55 % [48, 62] of its questions",
        "1000 questions made from the corpus",
        "500 of them",
        "Nobody asked them",
        "2026-11-20 14:34:10",
        "bag-of-words",
        "5,387 chunks",
        "{name: mirabel, significance: .01}",
    ):
        assert part in text


def test_a_log_is_not_called_made_and_made_questions_are_not_called_asked():
    text = banner(render_html(calibration(source="1000 questions of a log"), 0.01))
    assert "as they did in the log" in text and "Nobody asked" not in text
    assert "in the log" not in banner(render_html(calibration(), 0.01))


@pytest.fixture
def rag(tmp_path):
    """A system with few documents."""
    index = SqliteIndex(tmp_path / "index.db")
    rag = Rag(BagOfWords(), index, Parrot())
    few = documents(24)
    index.add(few, rag.embedder.embed([d.content for d in few]))
    yield rag
    index.close()


@pytest.mark.parametrize(
    ("log", "part"), [((), "Nobody asked them"), (("amber birch",) * 30, "as they did in the log")]
)
def test_the_page_understands_what_a_calibration_says_of_its_questions(log, part, rag):
    made = asyncio.run(calibrate(rag, {}, log, Settings(documents=24, questions=40)))
    assert made.benign
    assert part in banner(render_html(made, 0.2))
    assert made.salt not in render_html(made, 0.2)


def test_the_page_understands_a_calibration_of_too_few_documents(rag):
    made = asyncio.run(calibrate(rag, {}, (), Settings(documents=5)))
    assert "could not be fitted: 5 documents" in banner(render_html(made, 0.01))


def test_without_a_calibrated_guard_the_page_says_that_nothing_is_withheld_and_why():
    page = render_html(NOTHING, 0.01)
    assert "Nothing is withheld" in banner(page) and "12 documents, too few" in banner(page)
    assert "at most 1 in" not in said(page) and not {"table", "svg"} & Page(page).tags


def test_too_few_questions_for_the_significance_withhold_nothing_and_the_page_says_what_would():
    text = banner(render_html(calibration(40), 0.01))
    assert "Nothing is withheld" in text and "needs at least 99" in text and "there are 40" in text
    usable = float(re.search(r"significance of at least (\.\d+)", text)[1])
    assert math.isfinite(calibration(40).threshold(usable)) and math.isinf(calibration(40).threshold(usable - 0.0002))


def test_between_two_rates_that_were_measured_the_lower_one_counts():
    text = banner(render_html(calibration(), 0.03))
    assert "70 % [63, 76]" in text and "measured at .02; at .03 no fewer" in text  # menta at .02
    assert "known from .002 on; at this rate no more" in banner(render_html(calibration(2000), 0.001))
    assert "not measured" in banner(render_html(calibration(notes={}), 0.01))


# figures


@pytest.mark.parametrize("share", [*RATES, 0.03, 0.29, 1 / 3, 0.0625])
def test_the_fewest_questions_are_those_that_give_a_finite_threshold(share):
    n = fewest(share)
    assert math.isfinite(calibration(n).threshold(share)) and math.isinf(calibration(n - 1).threshold(share))


@pytest.mark.parametrize(("share", "n"), [(0.05, 60), (0.1, 200)])
def test_the_likely_share_holds_what_a_new_sample_of_harmless_questions_gives(share, n):
    drawn = np.random.default_rng(3).random((4000, n))  # uniform: the share above t is 1 - t
    true = np.array([1 - calibration(benign=tuple(row)).threshold(share) for row in drawn])
    found = _likely(share, n)
    assert found.value == pytest.approx(true.mean(), abs=0.002) and found.value <= share
    assert [(true < found.low).mean(), (true > found.high).mean()] == pytest.approx([0.025, 0.025], abs=0.01)


def test_the_choice_shows_cost_and_the_attack_that_gets_through_most_at_each_rate():
    page = Page(render_html(calibration(), 0.01))
    assert page.row(".01", "now")[1:4] == ["1 in 100 1 %", "55 % [48, 62] reworded", "55 % [45, 65] reworded"]
    assert page.row(".02")[2] == "70 % [63, 76] menta"
    assert page.row(".01", "now")[5] == f"{calibration().threshold(0.01):.2f}"
    assert [r[0].split()[0] for r in page.rows[1:7]] == [f"{r:g}".removeprefix("0") for r in RATES]


def test_a_rate_without_enough_questions_is_unavailable_everywhere_and_the_reason_is_given():
    page = Page(render_html(calibration(150), 0.01))
    assert (
        page.row(".005")[2]
        == "Unavailable: needs at least 199 harmless questions that set the threshold; there are 150"
    )
    figures = page.row("menta")
    assert figures[2:4] == ["–", "–"] and figures[4] == "60 % [53, 67]"
    assert "too few questions" in page.text and ".002 needs 499, .005 needs 199" in " ".join(page.text)
    assert "too few questions" not in Page(render_html(calibration(), 0.01)).text


def test_the_table_has_every_figure_with_its_interval_also_after_the_file():
    stored = json.loads(json.dumps(asdict(calibration())))
    again = calibration(notes=stored["notes"])
    assert type(again.notes["recall"]["menta"]["0.01"]["question"]) is list
    page = render_html(again, 0.01)
    assert page == render_html(calibration(), 0.01)
    rows = Page(page).rows
    at = rows.index(Page(page).row("menta"))
    assert [c.split()[0] for c in rows[at][2:]] == ["30", "40", "60", "70", "80", "90"]
    assert rows[at + 1][0] == "documents" and rows[at + 1][1] == "30 % [21, 40]"


def test_attacks_that_are_all_stopped_alike_are_not_called_the_weakest():
    alone = calibration(notes={"recall": recall(mba=(200,) * 6, direct=(200,) * 6)})
    assert Page(render_html(alone, 0.01)).row(".01", "now")[2] == "100 % [98, 100] all attacks alike"


def test_weights_are_shown_by_size_and_each_figure_is_explained():
    assert set(EXPLAINED) == set(FEATURES) and all(EXPLAINED.values())
    text = said(render_html(calibration(), 0.01))
    places = [
        text.index(f"{name} {weight} {EXPLAINED[name]}")
        for name, weight in (("similarity", "2.00"), ("margin", "1.00"), ("gap", ".00"))
    ]
    assert places == sorted(places)


# charts


def points(svg, by):
    d = re.search(rf'class="line {by}" d="M([^"]+)"', svg)[1]
    return [tuple(map(float, pair.split(","))) for pair in d.split(" L")]


def test_a_panel_is_logarithmic_and_as_high_as_what_is_withheld():
    view = View(calibration(), 0.01)
    svg = panel(view, "menta", view.attacks["menta"], "k")
    question = points(svg, "question")
    shares = [(BOX.bottom - y) / (BOX.bottom - BOX.top) for _, y in question]
    assert shares == pytest.approx([0.3, 0.4, 0.6, 0.7, 0.8, 0.9], abs=0.001)
    steps = np.diff([x for x, _ in question]) / np.diff(np.log(RATES))
    assert steps == pytest.approx(np.full(5, steps[0]), abs=0.2)
    now = float(re.search(r'class="chosen" x1="([\d.]+)"', svg)[1])
    assert now == pytest.approx((question[2][0] + points(svg, "document")[2][0]) / 2, abs=0.2)
    low, high = (float(v) for v in re.search(r'class="error question"[^>]+y1="([\d.]+)" y2="([\d.]+)"', svg).groups())
    interval = TABLE["menta"]["0.002"]["question"]
    assert [low, high] == pytest.approx(
        [BOX.bottom - v * (BOX.bottom - BOX.top) for v in (interval.low, interval.high)], abs=0.1
    )


@pytest.mark.parametrize("significance", [1e-4, 0.5])
def test_a_significance_outside_the_rates_is_still_inside_the_chart(significance):
    view = View(calibration(20_000), significance)
    svg = panel(view, "menta", view.attacks["menta"], "k")
    now = float(re.search(r'class="chosen" x1="([\d.]+)"', svg)[1])
    xs = [x for x, _ in points(svg, "question")]
    assert BOX.left < now < BOX.right
    assert now < min(xs) if significance < RATES[0] else now > max(xs)


def test_attacks_that_look_alike_share_a_panel_with_the_widest_interval():
    few = {r: {by: Rate(1.0, 0.5, 1.0) for by in ("question", "document")} for r in RATES}
    attacks = {**View(calibration(), 0.01).attacks, "few": few}
    shown = alike(attacks)
    assert list(shown) == ["reworded", "menta", "direct, s2mia, few"]
    assert shown["direct, s2mia, few"][0.01]["question"].low == 0.5


def areas(svg, kind):
    """Number of questions that the bars stand for, and where they begin and end."""
    bars = re.findall(r"M([\d.]+),([\d.]+) V([\d.]+) H([\d.]+)", re.search(rf'class="{kind}" d="([^"]*)"', svg)[1])
    return [(float(a), float(d), float(b) - float(c)) for a, b, c, d in bars]


@pytest.mark.parametrize("significance", [0.005, 0.01, 0.2, 0.97, 0.997])
@pytest.mark.parametrize("shape", ["normal", "far", "grid"])
def test_the_histogram_tells_the_questions_above_the_threshold_from_the_others(shape, significance):
    rng = np.random.default_rng(5)
    scores = {
        "normal": rng.normal(size=400),
        "far": np.r_[rng.normal(size=399), 60.0],
        "grid": np.repeat(np.arange(20.0), 20),
    }[shape]
    held = calibration(benign=tuple(scores))
    svg, text = histogram(View(held, significance), "k")
    below, above = areas(svg, "bar"), areas(svg, "bar flagged")
    counts = [sum(h for *_, h in bars) for bars in (below, above)]
    flagged = int((scores > held.threshold(significance)).sum())
    assert counts[1] / sum(counts) == pytest.approx(flagged / 400, abs=0.01)
    assert f"; {flagged} of these lie above" in text
    line = float(re.search(r'class="chosen" x1="([\d.]+)"', svg)[1])
    assert all(b <= line + 0.1 for _, b, _ in below) and all(a >= line - 0.1 for a, *_ in above)
    assert len(below) + len(above) < 80


@pytest.mark.parametrize("benign", [(1.0,), (2.0,) * 300, (-1.0, 1.0)])
def test_a_histogram_of_hardly_anything_is_drawn(benign):
    for significance in (0.001, 0.01, 0.6):
        page = render_html(calibration(benign=benign), significance)
        assert not re.search(r"\b(nan|inf)\b", page)


# the page


@pytest.mark.parametrize("held", [calibration(), calibration(40), calibration(5), NOTHING, calibration(notes={})])
def test_the_page_loads_nothing_runs_nothing_and_is_well_formed(held):
    text = render_html(held, 0.01)
    page = Page(text)
    names = {name for name, _ in page.attributes}
    assert page.stack == [] and text.startswith("<!doctype html>")
    assert not page.tags & {"script", "link", "img", "iframe", "object", "form", "base", "a"}
    assert not names & {"src", "href", "style", "action"} and not any(n.startswith("on") for n in names)
    assert "default-src 'none'" in " ".join(page.values("content")) and "url(" not in text and "@import" not in text
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert set(page.values("aria-labelledby") + page.values("aria-describedby")) == set(ids)


@pytest.mark.parametrize("held", [calibration(), calibration(40), NOTHING])
def test_the_salt_is_not_on_the_page(held):
    assert held.salt == SALT and SALT[:8] not in render_html(held, 0.01)


def test_hostile_names_stay_texts():
    table = {HOSTILE: TABLE["menta"]}
    page = render_html(calibration(source=HOSTILE, fingerprint=HOSTILE, at=HOSTILE, notes={"recall": table}), 0.01)
    page.encode()
    assert not Page(page).tags & {"script", "img"}
    assert not set("\x00\x1b\u202e") & set(page) and "<script>alert(1)" in said(page)


def test_a_significance_that_is_no_rate_is_refused():
    with pytest.raises(ValueError, match="rate"):
        render_html(calibration(), 0.0)


# the command


def test_the_command_writes_the_page_beside_the_calibration_of_each_tenant_for_its_owner_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tenant in (DEFAULT_TENANT, "a/b"):
        done = CliRunner().invoke(cli, ["calibrate", "--tenant", tenant])
        assert done.exit_code == 0, done.output
    folder = tmp_path / ".casemate"
    pages = sorted(folder.glob("*.html"))
    assert [p.name for p in pages] == ["calibration.a%2Fb.html", "calibration.html"]
    assert all(p.stat().st_mode & 0o077 == 0 for p in pages)
    held = calibrations.read(folder / "calibration.json")
    assert pages[1].read_text() == render_html(held[DEFAULT_TENANT], 0.01)
