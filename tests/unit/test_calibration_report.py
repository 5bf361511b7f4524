import asyncio
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate.backends.indexes.sqlite import SqliteIndex
from casemate.cli import cli
from casemate.guard.calibration import file as calibrations
from casemate.guard.calibration.closeness import FEATURES
from casemate.guard.calibration.fitting import RATES, CalibrationSettings, calibrate
from casemate.guard.defenses.mirabel import Mirabel
from casemate.maths.calibration import Calibration, min_questions
from casemate.maths.stats import Estimate, proportion
from casemate.rag.pipeline import Rag
from casemate.reports.calibration_report import (
    FEATURES_EXPLAINED,
    WRITTEN,
    CalibrationView,
    _likely,
    merged,
    render_html,
)
from casemate.reports.svg import AREA_BOTTOM, AREA_LEFT, AREA_TOP, RIGHT
from casemate.system import App
from casemate.types import DEFAULT_TENANT
from tests.fakes import BagOfWords, Parrot, documents

SALT = "5a17" * 16
HOSTILE = "\"><script>alert(1)</script>'<img src=x onerror=alert(1)>&amp;\x00\x1b[31m\ud800\u202e"


def recall(**attacks):
    """Recall by attack. Of 200 questions the given number is withheld at each rate, of 100 documents half of it."""
    return {
        name: {
            str(r): {"question": proportion(n, 200), "document": proportion(n // 2, 100)}
            for r, n in zip(RATES, ns, strict=True)
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


EMPTY_CALIBRATION = calibration(0, source="12 documents, too few to fit a guard (at least 20 are needed)", notes={})


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


def visible_text(page):
    return re.sub(r"\s+", " ", " ".join(Page(page).text))


def banner(page):
    return visible_text(
        page[page.index('<section class="banner') if '<section class="banner' in page else 0 :].split("</section>")[0]
        + "</section>"
    )


# banner


def test_banner_states_the_rate_its_basis_and_the_option():
    text = banner(render_html(calibration(), 0.01))
    for part in (
        "at most 1 in 100 benign questions",
        "reworded, our own probe. Its document is withheld in 55 % [48, 62] of its questions",
        "1000 questions made from the corpus",
        "500 of them",
        "no user asked them",
        "2026-11-20 14:34:10",
        "bag-of-words",
        "5,387 chunks",
        "{use: mirabel, significance: 0.01}",
    ):
        assert part in text


def test_log_questions_and_synthetic_questions_are_distinguished():
    text = banner(render_html(calibration(source="1000 questions of a log"), 0.01))
    assert "as in the log" in text and "no user asked" not in text
    assert "in the log" not in banner(render_html(calibration(), 0.01))


@pytest.fixture
def rag(tmp_path):
    """A RAG system with few documents."""
    index = SqliteIndex(tmp_path / "index.db")
    rag = Rag(BagOfWords(), index, Parrot())
    few = documents(24)
    index.add(few, rag.embedder.embed([d.content for d in few]))
    yield rag
    index.close()


@pytest.mark.parametrize(("log", "part"), [((), "no user asked them"), (("amber birch",) * 30, "as in the log")])
def test_report_states_the_source_of_the_questions(log, part, rag):
    made = asyncio.run(calibrate(Mirabel(), rag, {}, log, CalibrationSettings(documents=24, questions=40)))
    assert made.benign
    assert part in banner(render_html(made, 0.2))
    assert made.salt not in render_html(made, 0.2)


def test_the_report_explains_a_calibration_of_too_few_documents(rag):
    made = asyncio.run(calibrate(Mirabel(), rag, {}, (), CalibrationSettings(documents=5)))
    assert "could not be fitted: too few sources (5;" in banner(render_html(made, 0.01))


def test_report_without_a_threshold_states_that_nothing_is_withheld_and_why():
    page = render_html(EMPTY_CALIBRATION, 0.01)
    assert "Nothing is withheld" in banner(page) and "12 documents, too few" in banner(page)
    assert "at most 1 in" not in visible_text(page) and not {"table", "svg"} & Page(page).tags


def test_report_with_too_few_questions_suggests_a_change():
    text = banner(render_html(calibration(40), 0.01))
    assert "Nothing is withheld" in text and "needs at least 99" in text and "there are 40" in text
    usable = float(re.search(r"significance of at least (\.\d+)", text)[1])
    assert math.isfinite(calibration(40).threshold(usable)) and math.isinf(calibration(40).threshold(usable - 0.0002))


def test_recall_between_two_measured_rates_is_that_of_the_lower_rate():
    text = banner(render_html(calibration(), 0.03))
    assert "70 % [63, 76]" in text and "measured at .02; at .03 no fewer" in text  # menta at .02
    assert "known from .002 on; at this rate no more" in banner(render_html(calibration(2000), 0.001))
    assert "not measured" in banner(render_html(calibration(notes={}), 0.01))


# figures


@pytest.mark.parametrize("share", [*RATES, 0.03, 0.29, 1 / 3, 0.0625])
def test_min_questions_is_the_smallest_number_with_a_finite_threshold(share):
    n = min_questions(share)
    assert math.isfinite(calibration(n).threshold(share)) and math.isinf(calibration(n - 1).threshold(share))


@pytest.mark.parametrize(("share", "n"), [(0.05, 60), (0.1, 200)])
def test_the_likely_share_covers_new_samples_of_benign_questions(share, n):
    drawn = np.random.default_rng(3).random((4000, n))  # uniform: the share above t is 1 - t
    true = np.array([1 - calibration(benign=tuple(row)).threshold(share) for row in drawn])
    found = _likely(share, n)
    assert found.value == pytest.approx(true.mean(), abs=0.002) and found.value <= share
    assert [(true < found.low).mean(), (true > found.high).mean()] == pytest.approx([0.025, 0.025], abs=0.01)


def test_each_rate_shows_its_cost_and_the_weakest_result():
    page = Page(render_html(calibration(), 0.01))
    assert page.row(".01", "now")[1:4] == ["1 in 100 1 %", "55 % [48, 62] reworded", "55 % [45, 65] reworded"]
    assert page.row(".02")[2] == "70 % [63, 76] menta"
    assert page.row(".01", "now")[5] == f"{calibration().threshold(0.01):.2f}"
    assert [r[0].split()[0] for r in page.rows[1:7]] == [f"{r:g}".removeprefix("0") for r in RATES]


def test_rate_with_too_few_questions_is_unavailable_with_a_reason():
    page = Page(render_html(calibration(150), 0.01))
    assert (
        page.row(".005")[2] == "Unavailable: needs at least 199 benign questions that set the threshold; there are 150"
    )
    figures = page.row("menta")
    assert figures[2:4] == ["–", "–"] and figures[4] == "60 % [53, 67]"
    assert "too few questions" in page.text and ".002 needs 499, .005 needs 199" in " ".join(page.text)
    assert "too few questions" not in Page(render_html(calibration(), 0.01)).text


def test_table_has_all_figures_with_intervals_also_when_read_from_a_file():
    stored = json.loads(json.dumps(asdict(calibration())))
    again = calibration(notes=stored["notes"])
    assert type(again.notes["recall"]["menta"]["0.01"]["question"]) is list
    page = render_html(again, 0.01)
    assert page == render_html(calibration(), 0.01)
    rows = Page(page).rows
    at = rows.index(Page(page).row("menta"))
    assert [c.split()[0] for c in rows[at][2:]] == ["30", "40", "60", "70", "80", "90"]
    assert rows[at + 1][0] == "documents" and rows[at + 1][1] == "30 % [21, 40]"


def test_equal_attacks_are_not_named_as_the_weakest():
    alone = calibration(notes={"recall": recall(mba=(200,) * 6, direct=(200,) * 6)})
    assert Page(render_html(alone, 0.01)).row(".01", "now")[2] == "100 % [98, 100] all attacks alike"


def test_weights_are_sorted_and_each_feature_is_explained():
    assert set(FEATURES_EXPLAINED) == set(FEATURES) and all(FEATURES_EXPLAINED.values())
    text = visible_text(render_html(calibration(), 0.01))
    places = [
        text.index(f"{name} {weight} {FEATURES_EXPLAINED[name]}")
        for name, weight in (("similarity", "2.00"), ("margin", "1.00"), ("gap", ".00"))
    ]
    assert places == sorted(places)


# charts


def points(svg, by):
    d = re.search(rf'class="line {by}" d="M([^"]+)"', svg)[1]
    return [tuple(map(float, pair.split(","))) for pair in d.split(" L")]


def test_recall_panel_has_a_logarithmic_axis_and_correct_heights():
    view = CalibrationView(calibration(), 0.01)
    svg = next(str(image) for name, _, image in view.panels() if name == "menta")
    question = points(svg, "question")
    shares = [(AREA_BOTTOM - y) / (AREA_BOTTOM - AREA_TOP) for _, y in question]
    assert shares == pytest.approx([0.3, 0.4, 0.6, 0.7, 0.8, 0.9], abs=0.001)
    steps = np.diff([x for x, _ in question]) / np.diff(np.log(RATES))
    assert steps == pytest.approx(np.full(5, steps[0]), abs=0.2)
    now = float(re.search(r'class="chosen" x1="([\d.]+)"', svg)[1])
    assert now == pytest.approx((question[2][0] + points(svg, "document")[2][0]) / 2, abs=0.2)
    low, high = (float(v) for v in re.search(r'class="error question"[^>]+y1="([\d.]+)" y2="([\d.]+)"', svg).groups())
    interval = TABLE["menta"]["0.002"]["question"]
    assert [low, high] == pytest.approx(
        [AREA_BOTTOM - v * (AREA_BOTTOM - AREA_TOP) for v in (interval.low, interval.high)], abs=0.1
    )


@pytest.mark.parametrize("significance", [1e-4, 0.5])
def test_marker_of_a_significance_outside_the_rates_is_inside_the_chart(significance):
    view = CalibrationView(calibration(20_000), significance)
    svg = next(str(image) for name, _, image in view.panels() if name == "menta")
    now = float(re.search(r'class="chosen" x1="([\d.]+)"', svg)[1])
    xs = [x for x, _ in points(svg, "question")]
    assert AREA_LEFT < now < RIGHT
    assert now < min(xs) if significance < RATES[0] else now > max(xs)


def test_equal_attacks_share_a_panel_with_the_widest_interval():
    few = {by: {r: Estimate(1.0, 0.5, 1.0) for r in RATES} for by in ("question", "document")}
    attacks = {**CalibrationView(calibration(), 0.01).attacks, "few": few}
    shown = merged(attacks)
    assert list(shown) == ["reworded", "menta", "direct, s2mia, few"]
    assert shown["direct, s2mia, few"]["question"][0.01].low == 0.5


def areas(svg, kind):
    """Start, end and height of each bar."""
    bars = re.findall(r"M([\d.]+),([\d.]+) V([\d.]+) H([\d.]+)", re.search(rf'class="{kind}" d="([^"]*)"', svg)[1])
    return [(float(a), float(d), float(b) - float(c)) for a, b, c, d in bars]


@pytest.mark.parametrize("significance", [0.005, 0.01, 0.2, 0.97, 0.997])
@pytest.mark.parametrize("shape", ["normal", "far", "grid"])
def test_the_histogram_separates_the_scores_above_the_threshold(shape, significance):
    rng = np.random.default_rng(5)
    scores = {
        "normal": rng.normal(size=400),
        "far": np.r_[rng.normal(size=399), 60.0],
        "grid": np.repeat(np.arange(20.0), 20),
    }[shape]
    held = calibration(benign=tuple(scores))
    image, text = CalibrationView(held, significance).histogram()
    svg = str(image)
    below, above = areas(svg, "bar"), areas(svg, "bar flagged")
    counts = [sum(h for *_, h in bars) for bars in (below, above)]
    flagged = int((scores > held.threshold(significance)).sum())
    assert counts[1] / sum(counts) == pytest.approx(flagged / 400, abs=0.01)
    assert f"; {flagged} scores are above" in text
    line = float(re.search(r'class="chosen" x1="([\d.]+)"', svg)[1])
    assert all(b <= line + 0.1 for _, b, _ in below) and all(a >= line - 0.1 for a, *_ in above)
    assert len(below) + len(above) < 80


@pytest.mark.parametrize("benign", [(1.0,), (2.0,) * 300, (-1.0, 1.0)])
def test_a_histogram_of_few_scores_is_drawn(benign):
    for significance in (0.001, 0.01, 0.6):
        page = render_html(calibration(benign=benign), significance)
        assert not re.search(r"\b(nan|inf)\b", page)


# the whole report


@pytest.mark.parametrize(
    "held", [calibration(), calibration(40), calibration(5), EMPTY_CALIBRATION, calibration(notes={})]
)
def test_the_report_is_self_contained_and_well_formed(held):
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


def test_table_shows_measured_recall_of_scripted_and_model_written_questions():
    path = Path(__file__).parents[2] / "benchmarks/results/real_nfcorpus.json"
    measured = json.loads(path.read_text())["results"]["nfcorpus"]["withheld"]
    for name, shares in WRITTEN.items():
        for by, share in zip(("script", "model"), shares, strict=True):
            found = measured.get(f"{by}:{name}")
            assert (share and tuple(share)) == (found and tuple(round(x, 2) for x in found["withheld"])), name
    assert ["menta", "100 % [99, 100]", "81 % [77, 85]"] in Page(render_html(calibration(), 0.01)).rows


@pytest.mark.parametrize("held", [calibration(), calibration(40), EMPTY_CALIBRATION])
def test_the_report_does_not_contain_the_salt(held):
    assert held.salt == SALT and SALT[:8] not in render_html(held, 0.01)


def test_hostile_names_are_escaped():
    table = {HOSTILE: TABLE["menta"]}
    page = render_html(calibration(source=HOSTILE, fingerprint=HOSTILE, at=HOSTILE, notes={"recall": table}), 0.01)
    page.encode()
    assert not Page(page).tags & {"script", "img"}
    assert not set("\x00\x1b\u202e") & set(page) and "<script>alert(1)" in visible_text(page)


def test_an_invalid_significance_is_refused():
    with pytest.raises(ValueError, match="rate"):
        render_html(calibration(), 0.0)


# the command


def test_command_writes_a_private_report_for_the_calibration_of_each_tenant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".casemate").mkdir()
    (tmp_path / ".casemate/calibration.html").touch(0o644)  # from an earlier version with a permissive mode
    monkeypatch.setattr(App, "require_documents", lambda app, tenant: None)  # the command needs no documents here
    for tenant in (DEFAULT_TENANT, "a/b"):
        done = CliRunner().invoke(cli, ["calibrate", "--tenant", tenant])
        assert done.exit_code == 0, done.output
    folder = tmp_path / ".casemate"
    pages = sorted(folder.glob("*.html"))
    assert [p.name for p in pages] == ["calibration.a%2Fb.html", "calibration.html"]
    assert all(p.stat().st_mode & 0o077 == 0 for p in pages)
    held = calibrations.read_calibrations(folder / "calibration.json")
    assert pages[1].read_text() == render_html(held[DEFAULT_TENANT], 0.01)
