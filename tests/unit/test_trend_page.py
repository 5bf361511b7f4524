"""Trend plots: band, change, alarm, order of the canaries, limits, and escaping."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from casemate.maths.stats import predicted_share
from casemate.monitor.canaries.canary import Canary, CanarySet
from casemate.monitor.canaries.results import CanaryResult, CanaryStatus, Severity
from casemate.monitor.trends import trend_page
from casemate.monitor.trends.baseline import Baseline, CanaryBaseline, canary_fingerprint, watched_set
from casemate.monitor.trends.trend import compute_trend
from casemate.monitor.trends.trend_page import TrendSource, draw_trend, render_trend
from casemate.reports.svg import RUN_LEGEND, RunAlarm, RunChart, RunPanel, run_chart, run_legend

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LETTERS = {"P": CanaryStatus.PASS, "F": CanaryStatus.FAIL, "E": CanaryStatus.ERROR}


def source(histories, *, scores=None, asked=100, baseline=True, severities=None):
    """A trend from a string of results per canary id, such as ``PPF``. A space: the canary was not asked."""
    canaries = CanarySet(
        "clinic",
        tuple(
            Canary(
                id=i,
                query=f"Where is {i}?",
                expected_answer_contains=("x",),
                severity=(severities or {}).get(i, "high"),
            )
            for i in histories
        ),
    )
    runs = max(map(len, histories.values()))
    history = [
        CanaryResult(
            i,
            f"clinic@{run:04}",
            NOON + timedelta(hours=run),
            LETTERS[letters[run]],
            scores=(scores[i][run],) if scores else (),
        )
        for run in range(runs)
        for i, letters in histories.items()
        if letters[run] != " "
    ]
    measured = {
        c.id: CanaryBaseline(canary_fingerprint(c), asked, 0, cosine=0.78, highest_cosine=0.82)
        for c in canaries.canaries
    }
    accepted = Baseline("b", "clinic", canaries.fingerprint, NOON, asked, measured) if baseline else None
    watched = watched_set(canaries, accepted)
    return TrendSource(
        compute_trend(history, watched), history, watched, {c.id: c for c in canaries.canaries}, accepted
    )


def drawn(image):
    return ET.fromstring(str(image))


def elements(image, kind):
    return [e for e in drawn(image).iter() if e.get("class") == kind]


class Tags(HTMLParser):
    """Elements and attributes of a page."""

    def __init__(self, page):
        super().__init__()
        self.found = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found |= {(tag, ""), *((tag, name) for name, _ in attrs)}


BROKEN = {"fee": "P" * 20 + "F" * 10, "beds": "P" * 30, "parking": "P" * 30}


def test_a_broken_canary_comes_first_with_its_change_and_alarm():
    found = draw_trend(source(BROKEN))
    (plot,) = found.plots
    assert (plot.canary, plot.state, plot.severity) == ("fee", "alarmed", "high")
    assert [p.canary for p in found.strips] == ["beds", "parking"]
    assert found.headline == "1 of 3 canaries alarmed."
    assert any(s.startswith("Estimated change: 02 Mar 08:00 UTC") for s in plot.sentences)  # noon and 20 hours
    (change,), (alarm,) = elements(plot.image, "change"), elements(plot.image, "alarm")
    assert float(change.get("x1")) < float(alarm.get("x1"))
    assert len(re.findall("M", elements(plot.image, "failed")[0].get("d"))) == 10


def test_marks_and_change_line_are_at_the_positions_of_their_runs():
    """The change line is at the position of the first failed run on the axis."""
    (plot,) = draw_trend(source(BROKEN)).plots
    first = float(re.match(r"M([\d.]+)", elements(plot.image, "failed")[0].get("d"))[1]) + 3
    assert float(elements(plot.image, "change")[0].get("x1")) == pytest.approx(first, abs=0.2)
    left, right = 46.0, 332.0
    assert first == pytest.approx(left + (right - left) * 20.5 / 30, abs=0.2)


def test_recovered_and_suspicious_canaries_follow_alarmed_ones():
    found = draw_trend(
        source(
            {
                "well": "P" * 60,
                "was": "P" * 20 + "F" * 10 + "P" * 30,
                "odd": "P" * 55 + "PPFPF",
                "broken": "P" * 50 + "F" * 10,
                "worse": "P" * 50 + "F" * 10,
            },
            severities={"worse": "critical"},
        )
    )
    states = [(p.canary, p.state) for p in found.plots]
    assert states == [("worse", "alarmed"), ("broken", "alarmed"), ("was", "recovered"), ("odd", "suspicious")]
    assert elements(found.plots[2].image, "recovered")
    assert [p.canary for p in found.strips] == ["well"]


def test_the_band_is_the_prediction_of_the_baseline_and_covers_healthy_rates():
    """Simulation: at most one in 20 rates of a healthy canary with its own baseline lies outside the band."""
    rng = np.random.default_rng(5)
    outside = 0
    for _ in range(4000):
        rate = rng.beta(0.5, 0.5)
        low, high = predicted_share(int(rng.binomial(20, rate)), 20, 10)
        outside += not low <= rng.binomial(10, rate) / 10 <= high
    assert outside / 4000 <= 0.05
    (plot,) = draw_trend(source(BROKEN, asked=20)).plots
    (band,) = elements(plot.image, "band")
    assert float(band.get("height")) == pytest.approx(72 * predicted_share(0, 20, 10)[1], abs=0.1)


def test_without_a_baseline_there_is_no_band():
    found = draw_trend(source({"fee": "F" * 40, "beds": "P" * 40}, baseline=False))
    assert not elements(found.overview, "band")
    assert all(not elements(p.image, "band") for p in found.plots)
    assert any("no accepted baseline" in s for s in found.sentences)


def test_a_lower_cosine_makes_a_passing_canary_suspicious():
    scores = {"fee": [0.8] * 25 + [0.7] * 5, "beds": [0.8] * 30}
    found = draw_trend(source({"fee": "P" * 30, "beds": "P" * 30}, scores=scores))
    assert [(p.canary, p.state) for p in found.plots] == [("fee", "suspicious")]
    assert "Cosine of its best document: .70; baseline: .78 to .82." in found.plots[0].sentences
    assert len(elements(found.plots[0].image, "band")) == 2


def test_errors_and_missing_results_interrupt_the_line_and_have_marks():
    letters = "P" * 20 + "EE" + "  " + "F" * 12
    (plot,) = draw_trend(source({"fee": letters, "beds": "P" * 36})).plots
    assert elements(plot.image, "unanswered")[0].get("d").count("M") == 2
    assert elements(plot.image, "line")[0].get("d").count("M") == 2  # before and after the gap
    assert any(s == "Failed in 12 of 32 runs, 2 without an answer." for s in plot.sentences)


def test_the_overview_marks_each_run_with_an_alarm_once():
    histories = {f"c{i}": "P" * 30 + "F" * 8 for i in range(12)} | {"later": "P" * 35 + "FFF"}
    found = draw_trend(source(histories))
    alarms = {a.alarmed for a in source(histories).trend.alarms}
    assert len(elements(found.overview, "alarm")) == len(alarms) >= 1


def test_the_number_of_shown_canaries_is_limited_and_the_rest_counted(monkeypatch):
    monkeypatch.setattr(trend_page, "MAX_CANARIES", 2)
    histories = {f"bad{i}": "P" * 20 + "F" * 10 for i in range(3)} | {f"good{i}": "P" * 30 for i in range(4)}
    found = draw_trend(source(histories))
    assert (len(found.plots), len(found.strips)) == (2, 0)
    assert found.hidden == "5 more canaries not shown, 1 of them alarmed."
    assert found.hidden in render_trend(found, NOON)


def test_long_histories_are_truncated_to_the_latest_runs(monkeypatch):
    monkeypatch.setattr(trend_page, "MAX_RUNS", 25)
    found = draw_trend(source({"fee": "P" * 50 + "F" * 10, "beds": "P" * 60}))
    assert "The last 25 runs are drawn." in found.sentences
    (plot,) = found.plots
    assert len(re.findall("M", elements(plot.image, "failed")[0].get("d"))) == 10
    assert float(elements(plot.image, "change")[0].get("x1")) == pytest.approx(46 + 286 * 15.5 / 25, abs=0.2)


def test_markup_in_ids_is_escaped_and_the_page_loads_no_resource():
    hostile = "<script>alert(1)</script>\"'&"
    page = render_trend(draw_trend(source({hostile: "P" * 20 + "F" * 10, "<img src=x>": "P" * 30})), NOON)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    tags = Tags(page)
    assert not {name for _, name in tags.found} & {"src", "href", "action", "onload", "onerror", "srcset"}
    assert not {tag for tag, _ in tags.found} & {"script", "img", "link", "iframe", "object", "form"}
    assert "url(" not in page and "@import" not in page
    assert "default-src &#39;none&#39;" in page


def test_every_image_has_a_text_alternative_and_ids_are_unique():
    page = render_trend(draw_trend(source(BROKEN)), NOON)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) >= 4
    for name in re.findall(r'aria-(?:labelledby|describedby)="([^"]*)"', page):
        assert name in ids
    assert 'role="img"' in page


def test_an_empty_period_is_inconclusive_with_advice():
    nothing = TrendSource(compute_trend([], source(BROKEN).watched), [], source(BROKEN).watched, {})
    found = draw_trend(nothing)
    assert (found.tone, found.headline, found.overview) == ("inconclusive", "No run in this period.", None)
    assert "casemate canary run" in render_trend(found, NOON)


def test_a_single_run_is_drawn():
    found = draw_trend(source({"fee": "F", "beds": "P"}))
    assert elements(found.overview, "column")
    assert render_trend(found, NOON)


def test_a_run_chart_without_alarms_or_marks_is_drawn():
    image = run_chart(
        RunChart("t", "d", ("", ""), "", (RunPanel("p", (None, None), None, (0.0, 1.0), ("0", "1")),)), "k"
    )
    assert not elements(image, "alarm")
    assert all(elements(run_legend(kind), kind) for kind in RUN_LEGEND)


def test_severities_are_those_of_the_canary_set():
    assert draw_trend(source(BROKEN, severities={"fee": "low"})).plots[0].severity == Severity.LOW


def test_alarm_labels_stay_within_the_chart():
    panel = RunPanel("p", (0.0,) * 50, None, (0.0, 1.0), ("0", "1"))
    for alarm in (RunAlarm(0, (0, 0, 0)), RunAlarm(49, (49, 48, 49)), RunAlarm(20, (18, 10, 20))):
        image = run_chart(RunChart("t", "d", ("", ""), "", (panel,), (alarm,)), "k")
        texts = [e for e in drawn(image).iter() if e.tag == "text" and e.text in ("alarm", "change")]
        assert len(texts) == 2
        for text in texts:
            x, size = float(text.get("x")), 7.0 * len(text.text)
            left, right = (x - size, x) if text.get("text-anchor") == "end" else (x, x + size)
            assert 0 <= left and right <= 340


def test_older_runs_and_outdated_canaries_are_reported():
    made = source({"a": "PPP", "b": "PFF"})
    first, second = made.watched.canaries
    watched = replace(made.watched, canaries=(first, replace(second, alerts=False, outdated=True, changed=("x.md",))))
    later = replace(made.baseline, at=NOON + timedelta(hours=2))
    plots = draw_trend(replace(made, watched=watched, baseline=later))
    assert "It also judges 2 older runs." in plots.sentences
    sentences_of_b = next(p for p in (*plots.plots, *plots.strips) if p.canary == "b").sentences
    assert "It is outdated and does not alert: its documents were changed or removed (x.md)." in sentences_of_b
    assert not any("older run" in sentence for sentence in draw_trend(made).sentences)
