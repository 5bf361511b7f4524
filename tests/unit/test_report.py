import base64
import hashlib
import json
import math
import os
import re
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from casemate.errors import BackendError, DataError
from casemate.maths.stats import Estimate
from casemate.redteam.lab.results import (
    AttackResult,
    CampaignResult,
    Check,
    CheckStatus,
    MembershipMetrics,
    load_result,
)
from casemate.redteam.reporting.charts import histogram, lowest_auc, roc, track
from casemate.redteam.reporting.files import NAMES, write_report
from casemate.redteam.reporting.html import render_html
from casemate.redteam.reporting.junit import to_junit
from casemate.redteam.reporting.sarif import to_sarif
from casemate.redteam.reporting.text import (
    auc_in_words,
    describe_attack,
    describe_checks,
    headline,
    overall_status,
    reported_checks,
    strongest_attack,
)
from tests.campaigns import attack, campaign, crawl_campaign, sessions

HOSTILE = "\"><script>alert(1)</script>]]>'<img src=x onerror=alert(1)>&amp;\x00\x1b[31m\ud800\u202e\uffff"
SEEN = """"><script>alert(1)</script>]]>'<img src=x onerror=alert(1)>&amp;"""
SURE = Estimate(0.98, 0.97, 0.99)
CHANCE = Estimate(0.51, 0.48, 0.54)


def hostile(value):
    """Returns the same records with each text replaced by markup and control characters."""
    if isinstance(value, StrEnum):
        return value
    if isinstance(value, str):
        return HOSTILE
    if is_dataclass(value):
        return replace(value, **{f.name: hostile(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, dict):
        return {hostile(k) if k in {"seed", "questions"} else k: hostile(v) for k, v in value.items()}
    if isinstance(value, tuple) and not isinstance(value, Estimate):
        return tuple(map(hostile, value))
    return value


class Page(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.stack = set(), [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in {"meta", "input"}:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.stack):
            self.text.append(data)

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


def banner(page):
    return page[page.index('<section class="banner') if '<section class="banner' in page else 0 :].split("</section>")[
        0
    ]


def plain_text(auc, **changes):
    made = MembershipMetrics(100, 100, auc, Estimate(0.1, 0.05, 0.15), None, None, 0.2, None, None, None)
    return replace(made, **changes)


# sentences about results


@pytest.mark.parametrize(
    ("auc", "said"),
    [
        (CHANCE, "no better than chance"),
        (Estimate(0.5, 0.3, 0.7), "too uncertain to distinguish from chance"),
        (Estimate(0.58, 0.52, 0.64), "weak"),
        (Estimate(0.7, 0.66, 0.74), "moderate"),
        (Estimate(0.85, 0.8, 0.9), "strong"),
        (SURE, "near-perfect"),
        (Estimate(0.3, 0.25, 0.35), "below chance, .70 with inverted answers"),
    ],
)
def test_an_auc_is_described_in_words(auc, said):
    assert auc_in_words(auc) == said


def test_an_attack_is_described_in_one_sentence():
    result = AttackResult("mba", "", "deterministic", plain_text(SURE), plain_text(CHANCE), Estimate(0.47, 0.43, 0.51))
    assert describe_attack(result) == (
        "mba: AUC .98 [.97, .99] with the guard off (near-perfect), .51 [.48, .54] with the guard on (no better than "
        "chance)."
    )


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (AttackResult("a", "", "", plain_text(CHANCE), plain_text(CHANCE)), "fails even with the guard off"),
        (
            AttackResult("a", "", "", plain_text(SURE), plain_text(SURE), Estimate(0.0, -0.1, 0.1)),
            "no measurable effect",
        ),
        (
            AttackResult("a", "", "", plain_text(SURE), plain_text(SURE), Estimate(-0.2, -0.3, -0.1)),
            "The attack is stronger with the guard",
        ),
        (AttackResult("a", "", "", None, plain_text(CHANCE)), "the guard's effect is unknown"),
        (AttackResult("a", "", "", plain_text(SURE), None), "Not run with the guard on"),
        (AttackResult("a", "", "", None, None, error="no model"), "no metrics (no model); its result is unknown"),
    ],
)
def test_a_description_attributes_to_the_guard_only_its_own_effect(result, said):
    assert said in describe_attack(result)


def test_the_strongest_attack_has_the_auc_farthest_from_one_half():
    attacks = (
        AttackResult("weak", "", "", plain_text(SURE), plain_text(Estimate(0.6, 0.55, 0.65))),
        AttackResult("turned", "", "", plain_text(SURE), plain_text(Estimate(0.3, 0.25, 0.35))),
    )
    assert "turned, AUC .30" in strongest_attack(campaign(attacks=attacks))
    assert strongest_attack(campaign(attacks=())) == "No attack has metrics."


# the status is never better than the worst check


@pytest.mark.parametrize(
    "changes",
    [
        {"checks": (), "attacks": ()},
        {"checks": (Check("a", CheckStatus.PASS, 0.0, 0.0, ""),)},  # menta has no metrics
        {
            "checks": (Check("a", CheckStatus.PASS, 0.0, 0.0, ""), Check("b", CheckStatus.INCONCLUSIVE, 0.0, 0.0, "")),
            "attacks": (),
        },
    ],
)
def test_no_format_passes_with_an_inconclusive_check(changes):
    made = campaign(status=CheckStatus.PASS, **changes)
    assert overall_status(made) is CheckStatus.INCONCLUSIVE
    assert "not a pass" in headline(made)
    assert "inconclusive" in banner(render_html(made)) and "✓" not in banner(render_html(made))
    suite = ET.fromstring(to_junit(made)).find("testsuite")
    assert int(suite.get("errors")) == 1 and suite.find(".//error").get("type") == "inconclusive"
    assert [r["level"] for r in json.loads(to_sarif(made))["runs"][0]["results"]] == ["warning"]


@pytest.mark.parametrize("status", CheckStatus)
def test_the_status_is_the_worst_of_all_recorded_ones(status):
    checks = tuple(Check(s, s, None, None, "") for s in CheckStatus)
    assert overall_status(campaign(status=status, checks=checks)) is CheckStatus.ERROR
    assert overall_status(campaign(status=status, checks=checks[:1], attacks=())) is status
    assert {c.status for c in reported_checks(campaign(status=status, checks=checks[:1], attacks=()))} == {
        CheckStatus.PASS,
        status,
    }


def test_the_reason_names_only_attacks_without_metrics_of_either_target():
    bare, guarded, none = (replace(a, error="no route") for a in (campaign().attacks[:1] * 3))
    attacks = (
        replace(bare, on=None),
        replace(guarded, name="mba", off=None),
        replace(none, name="s2mia", off=None, on=None),
    )
    check = reported_checks(campaign(status=CheckStatus.PASS, checks=(), attacks=attacks))[-1]
    assert (check.status, check.reason) == (CheckStatus.INCONCLUSIVE, "s2mia has no metrics: no route")
    passed = (Check("a", CheckStatus.PASS, 0.0, 0.0, ""),)
    assert overall_status(campaign(status=CheckStatus.PASS, checks=passed, attacks=attacks[:2])) is CheckStatus.PASS


def test_a_passing_campaign_passes_in_every_format():
    made = campaign(
        status=CheckStatus.PASS, checks=(Check("a", CheckStatus.PASS, 0.0, 0.0, ""),), attacks=(attack("mba", 0),)
    )
    assert "<h1>" in banner(render_html(made)) and 'class="banner pass"' in render_html(made)
    suite = ET.fromstring(to_junit(made)).find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "0")
    assert json.loads(to_sarif(made))["runs"][0]["results"] == []


# HTML page


def test_the_banner_contains_verdict_untested_and_simulated_parts():
    made = campaign()
    frame = Page(banner(render_html(made)) + "</section>")
    text = " ".join(frame.text)
    for sentence in ("fail", headline(made), "Not tested", *made.not_tested, "Simulated", *made.simulated):
        assert sentence in text


def test_an_empty_list_of_untested_parts_is_reported_as_missing():
    assert "a gap in the record" in banner(render_html(campaign(not_tested=())))


def test_an_extraction_report_on_an_external_target_names_no_guard():
    made = crawl_campaign()
    (crawl,) = made.crawls
    one = replace(crawl, by_target={"on": crawl.by_target["on"]})
    outside = replace(made, crawls=(one,), sessions=(), evidence={"target": "http://a.example"})
    section = render_html(outside).partition('<section class="extraction">')[2].partition("</section>")[0]
    assert (
        "number of questions: this system." in section and '<th class="side on" scope="row">this system</th>' in section
    )
    assert "guard off" not in section and "guard on" not in section
    own = render_html(made).partition('<section class="extraction">')[2].partition("</section>")[0]
    assert "guard off" in own and "guard on" in own


def test_the_report_is_self_contained_and_without_script():
    page = Page(render_html(campaign(), campaign()))
    names = {name for name, _ in page.attributes}
    assert not page.tags & {"script", "link", "img", "iframe", "object", "form", "base", "a"}
    assert not names & {"src", "href", "style", "action"} and not any(n.startswith("on") for n in names)
    css = files("casemate.reports").joinpath("templates/report.css").read_text()
    assert "url(" not in css and "@import" not in css and "</" not in css
    assert "default-src 'none'" in " ".join(page.values("content"))


def test_every_element_is_closed_and_every_id_is_unique_and_referenced():
    page = Page(render_html(campaign()))
    assert page.stack == []
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert set(page.values("aria-labelledby") + page.values("aria-describedby")) == set(ids)


def test_the_report_shows_every_rate_with_its_interval_or_its_absence():
    text = re.sub(r"\s+", " ", " ".join(Page(render_html(campaign())).text))
    for figures in (a for r in campaign().attacks for a in (r.off, r.on) if a):
        assert f"{figures.auc.value:.2f}".lstrip("0") in text
        assert f"{figures.ks:.2f}".lstrip("0") in text
    assert "too few to say" in text  # there is no TPR at .1 % with 500 candidates
    assert "No figures: fewer than 5 members" in text
    assert "323 test questions of NFCorpus, asked by people" in text
    assert "0 of 400" in text
    assert "OWASP LLM02:2025 · OWASP LLM08:2025 · MITRE ATLAS AML.T0024.000" in text


def test_the_report_lists_failed_then_inconclusive_then_passed_checks():
    listed = render_html(campaign()).split('<ul class="checks">')[1].split("</section>")[0]
    severity = {"error": 0, "fail": 1, "inconclusive": 2, "pass": 3}
    requirements = listed.split("<li><div>")[1:]
    names = [re.search("<h3>(.*?)</h3>", one)[1] for one in requirements]
    assert len(names) == len(set(names)) and set(names) == {check.name for check in campaign().checks}
    worst = [severity[re.search(r'class="chip (\w+)"', one)[1]] for one in requirements]
    assert worst == sorted(worst)
    for name, one in zip(names, requirements, strict=True):
        made = [check for check in campaign().checks if check.name == name]
        found = re.findall(r'class="mark (\w+)".*?<b>(.*?)</b>', one)
        assert sorted(found) == sorted((c.status, c.attack) for c in made if c.attack)
        assert [severity[status] for status, _ in found] == sorted(severity[status] for status, _ in found)
        assert severity[min((c.status for c in made), key=severity.get)] == worst[names.index(name)]


def test_no_sentence_of_a_check_or_attack_is_repeated():
    text = Page(render_html(campaign())).text
    sentences = [t.strip() for t in text if len(t.split()) > 6 and t.strip().endswith(".")]
    assert len(sentences) > 20 and len(sentences) == len(set(sentences))


def explorer(**changes):
    made = campaign(sessions=sessions(), **changes)
    return made, render_html(made)


def embedded(page):
    return json.loads(re.search(r'id="explorer-data">(.*?)</script>', page, re.DOTALL)[1])


def test_questions_and_answers_are_embedded_worst_first():
    made, page = explorer()
    data = embedded(page)
    assert [s["candidate"] for s in data["sessions"]] == [s.candidate for s in made.sessions]
    assert [s["outcome"] for s in data["sessions"][:4]] == ["identified", "identified", "named", "protected"]
    side = data["sessions"][3]["exchanges"][0]["on"]
    assert side["hidden"] == ["notes/004.md#0"] and "mirabel: score 3.20" in side["reasons"][0]
    assert "carvedilol" not in page and "Sandel" not in page
    assert f"Questions are included for {sum(bool(s.exchanges) for s in made.sessions)} sessions" in page


def test_document_names_are_in_a_separate_file_and_not_in_the_report(tmp_path):
    made = campaign(sessions=sessions(), document_names={"document 1": "notes/HV-2030.md"})
    paths = write_report(made, tmp_path)
    names = tmp_path / NAMES
    assert json.loads(names.read_text()) == {"document 1": "notes/HV-2030.md"}
    assert names.stat().st_mode & 0o777 == 0o600
    assert set(paths) == {"html", "json", "junit", "sarif"}
    assert not any("HV-2030" in path.read_text() for path in paths.values())
    assert load_result(paths["json"]).sessions == made.sessions
    assert "HV-2030" not in json.dumps(made.summary())


def test_markup_in_sessions_is_escaped():
    page = render_html(hostile(campaign(sessions=sessions())))
    found = Page(page)
    assert "img" not in found.tags and not any(name.startswith("on") for name, _ in found.attributes)
    assert len(re.findall("<script", page)) == 2 and found.stack == []
    data = embedded(page)
    assert SEEN in data["sessions"][0]["candidate"]
    assert SEEN in data["sessions"][0]["exchanges"][0]["off"]["reply"]


def test_omitted_sessions_are_counted():
    _, page = explorer(sessions_total=9000)
    assert f"Only the {len(sessions())} worst of 9,000 sessions are listed." in page


def test_without_its_script_the_page_shows_the_worst_sessions():
    _, page = explorer()
    first = page[page.index('id="explorer-list"') : page.index("</section>\n</div>", page.index('id="explorer-list"'))]
    assert "notes/000.md" in first and "Member identified" in first


def test_the_content_security_policy_allows_only_the_script_of_the_package():
    _, page = explorer()
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert [bool(attributes) for attributes, _ in scripts] == [True, False]
    digest = base64.b64encode(hashlib.sha256(scripts[1][1].encode()).digest()).decode()
    policy = " ".join(Page(page).values("content"))
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    source = files("casemate.reports").joinpath("templates/explorer.js").read_text()
    assert scripts[1][1] == source
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|</", source)
    assert "script-src" not in render_html(campaign())


def test_missing_measurements_are_listed():
    text = " ".join(Page(render_html(campaign(utility=None, audit=None, evidence={}, cost={}, attacks=()))).text)
    for sentence in ("the cost of the guard is unknown", "Not run", "cannot be repeated", "No attack was run"):
        assert sentence in text


def test_redacted_words_are_shown_as_blocks():
    page = render_html(campaign(sessions=sessions()))
    assert '<span class="block">▇×' in page
    assert "Sandel" not in page and "carvedilol" not in page


def test_a_comparison_lists_first_the_differences_that_invalidate_it():
    before = campaign(evidence=campaign().evidence | {"seed": 8}, utility=None)
    text = " ".join(Page(render_html(campaign(), before)).text)
    assert text.index("Not comparable") < text.index("seed: 8 -> 7") < text.index("Appeared")


@pytest.mark.parametrize("theme", [0, 1])
def test_colors_have_enough_contrast_in_light_and_dark_mode(theme):
    css = files("casemate.reports").joinpath("templates/report.css").read_text()
    colors = dict(re.findall(r"--([\w-]+): (#\w{6})", re.findall(r":root \{(.*?)\}", css, re.DOTALL)[theme]))

    def light(name):  # WCAG 2.1, relative luminance
        parts = [int(colors[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(
            w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    def contrast(a, b):
        low, high = sorted((light(a), light(b)))
        return (high + 0.05) / (low + 0.05)

    assert contrast("page", "page") == 1
    for name in ("ink", "soft", "off", "on", "pass", "fail", "inconclusive", "error"):
        assert contrast(name, "page") >= 4.5
    for status in CheckStatus:
        assert contrast(status, f"{status}-tint") >= 4.5 and contrast("ink", f"{status}-tint") >= 7


# charts


def path(svg, kind):
    found = re.search(rf'class="{kind}" d="([^"]+)"', svg)
    return [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+),([\d.]+)", found[1])]


def test_a_roc_curve_has_the_coordinates_of_its_points():
    result = AttackResult(
        "a", "", "", plain_text(SURE, roc=((0.0, 0.5), (0.5, 1.0))), plain_text(CHANCE, roc=((0.5, 0.5),))
    )
    svg = str(roc(result, "k"))
    (x0, y0), half, top, (x1, y1) = path(svg, "curve off")
    assert x0 < x1 and y0 > y1  # from the lower left to the upper right corner
    assert half == pytest.approx((x0, (y0 + y1) / 2), abs=0.1)
    assert top == pytest.approx(((x0 + x1) / 2, y1), abs=0.1)
    assert path(svg, "curve on")[1] == pytest.approx(((x0 + x1) / 2, (y0 + y1) / 2), abs=0.1)


def test_histograms_share_a_scale_with_the_guard_off_and_on():
    off = plain_text(SURE, histogram={"edges": [0.0, 1.0, 2.0], "members": [0.0, 10.0], "nonmembers": [30.0, 10.0]})
    on = plain_text(CHANCE, histogram={"edges": [0.0, 1.0, 2.0], "members": [5.0, 5.0], "nonmembers": [20.0, 20.0]})
    result = AttackResult("a", "", "", off, on)
    (_, base), _, _, (_, left), _, *_ = (members := path(str(histogram(result, "off", "k")), "bar off"))
    heights = [base - members[2 * i + 1][1] for i in range(2)]
    others = [path(str(histogram(result, "off", "k")), "bar off others")[2 * i + 1][1] - base for i in range(2)]
    guarded = [base - path(str(histogram(result, "on", "k")), "bar on")[2 * i + 1][1] for i in range(2)]
    assert [h / heights[1] for h in (*heights, *others, *guarded)] == pytest.approx(
        [0, 1, 0.75, 0.25, 0.5, 0.5], abs=0.01
    )
    assert left < base


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"edges": [0.0, 1.0], "members": [1.0], "nonmembers": []},
        {"edges": [1.0, 1.0], "members": [1.0], "nonmembers": [1.0]},
        {"edges": [0.0, math.nan], "members": [1.0], "nonmembers": [1.0]},
        {"edges": [0.0, 1.0], "members": [math.inf], "nonmembers": [1.0]},
    ],
)
def test_a_missing_histogram_is_reported(shape):
    result = AttackResult("a", "", "", None, plain_text(SURE, histogram=shape))
    assert histogram(result, "on", "k") is None
    assert "No scores with the guard on" in render_html(campaign(attacks=(result,)))


def test_empty_groups_and_invalid_figures_are_rendered():
    nothing = Estimate(math.nan, math.nan, math.nan)
    empty = {"edges": [0.0, 1.0], "members": [0.0], "nonmembers": [0.0]}
    broken = plain_text(nothing, ks=math.nan, histogram=empty, roc=((math.nan, math.nan),))
    result = AttackResult("a", "", "", broken, broken, nothing)
    page = render_html(campaign(attacks=(result,)))
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)


def test_auc_plots_share_an_axis_that_contains_every_interval():
    low = AttackResult("a", "", "", plain_text(Estimate(0.25, 0.21, 0.3)), plain_text(SURE))
    assert lowest_auc([low]) == 0.2
    assert lowest_auc([]) == 0.4
    xs = [float(x) for x in re.findall(r'x[12]?="([\d.]+)"', str(track(low, 0.2, "k")))]
    assert 0 <= min(xs) and max(xs) <= 300


def test_guard_off_and_on_differ_not_only_in_color():
    svg = str(track(attack("mba", 0), 0.4, "k"))
    assert svg.count("<circle") == 1 and svg.count("<rect") == 1
    assert not re.search(r"#[0-9a-f]{3}|rgb", svg)


# JUnit and SARIF


def test_junit_has_a_case_for_each_check_and_none_is_skipped():
    made = campaign()
    root = ET.fromstring(to_junit(made))
    found = {(c.get("classname"), c.get("name")): [e.tag for e in c] for c in root.iter("testcase")}
    kinds = {
        CheckStatus.PASS: [],
        CheckStatus.FAIL: ["failure"],
        CheckStatus.INCONCLUSIVE: ["error"],
        CheckStatus.ERROR: ["error"],
    }
    expected = {
        (
            f"casemate.redteam.{c.attack}" if c.attack else "casemate.redteam",
            c.name,
        ): kinds[c.status]
        for c in made.checks
    }
    assert found == expected
    for suite in (root, root.find("testsuite")):
        assert int(suite.get("tests")) == len(made.checks)
        assert int(suite.get("failures")) == sum(v == ["failure"] for v in expected.values()) > 0
        assert int(suite.get("errors")) == sum(v == ["error"] for v in expected.values()) > 0
        assert suite.get("skipped") == "0"
    assert "Not tested: Extraction of the collection" in root.find(".//system-out").text


def test_sarif_has_a_result_for_each_check_that_did_not_pass():
    made = campaign()
    log = json.loads(to_sarif(made))
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-schema-2.1.0.json")
    assert len(run["results"]) == sum(c.status is not CheckStatus.PASS for c in made.checks) > 2
    assert len({r["id"] for r in rules}) == len(rules) == len({c.name for c in made.checks})
    for result in run["results"]:
        rule = rules[result["ruleIndex"]]
        assert rule["id"] == result["ruleId"] and rule["shortDescription"]["text"] in result["message"]["text"]
        assert rule["help"]["text"] and {"security", "privacy"} <= set(rule["properties"]["tags"])
        assert result["level"] == {"fail": "error", "inconclusive": "warning"}[result["properties"]["status"]]
        (place,) = result["locations"]
        assert place["physicalLocation"]["region"]["startLine"] == 1
        assert not place["physicalLocation"]["artifactLocation"]["uri"].startswith(("/", "file:", "."))
        assert place["logicalLocations"][0]["fullyQualifiedName"].startswith("redteam/")
    assert "OWASP LLM/LLM02:2025" in rules[0]["properties"]["tags"]
    assert run["properties"]["notTested"] == list(made.not_tested)


@pytest.mark.parametrize(
    ("file", "uri"),
    [("clinic.yaml", "clinic.yaml"), ("deploy/a b.yaml", "deploy/a%20b.yaml"), ("/etc/x.yaml", "x.yaml"),
     ("../x.yaml", "x.yaml")],
)  # fmt: skip
def test_sarif_names_the_configuration_file(file, uri, tmp_path):
    (run,) = json.loads(write_report(campaign(), tmp_path, configuration=Path(file))["sarif"].read_text())["runs"]
    places = [r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in run["results"]]
    assert {run["artifacts"][0]["location"]["uri"], *places} == {uri}


def test_a_report_of_another_format_is_refused_with_what_to_do(tmp_path):
    path = write_report(campaign(), tmp_path)["json"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(DataError, match="has report format 1; this version reads 2. Run the campaign again$"):
        load_result(path)


def fingerprints(made):
    return [
        r["partialFingerprints"]["primaryLocationLineHash"] for r in json.loads(to_sarif(made))["runs"][0]["results"]
    ]


def test_a_finding_keeps_its_fingerprint_when_its_figures_change():
    made = campaign()
    later = tuple(
        replace(c, value=0.3, reason="another day") if c.status is CheckStatus.FAIL else c for c in made.checks
    )
    assert fingerprints(made) == fingerprints(replace(made, id="x", at="2027", checks=later))
    assert len(set(fingerprints(made))) == len(fingerprints(made))


def test_sarif_rules_that_differ_only_in_symbols_have_distinct_ids():
    checks = tuple(Check(name, CheckStatus.FAIL, 1.0, 0.5, "") for name in ("TPR at 1 %", "TPR at .1 %", "αβ"))
    assert len({r["ruleId"] for r in json.loads(to_sarif(campaign(checks=checks)))["runs"][0]["results"]}) == 3


def test_sarif_is_strict_json_and_reports_a_failed_run():
    checks = (Check("a", CheckStatus.ERROR, math.nan, math.inf, "down"),)
    broken = AttackResult("mba", "", "", None, None, error="the target is down")
    text = to_sarif(campaign(checks=checks, attacks=(broken,)))
    (run,) = json.loads(text, parse_constant=pytest.fail)["runs"]
    assert run["results"][0]["properties"] == {"status": "error", "value": None, "limit": None}
    assert run["invocations"][0]["executionSuccessful"] is False
    assert "the target is down" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]


# output files


def test_a_report_has_four_files_and_its_json_restores_the_campaign(tmp_path):
    paths = write_report(campaign(), tmp_path / "new" / "folder")
    assert {kind: path.name for kind, path in paths.items()} == {
        "html": "report.html",
        "json": "report.json",
        "junit": "report.junit.xml",
        "sarif": "report.sarif",
    }
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == sorted(p.name for p in paths.values())
    assert load_result(paths["json"]) == campaign()


def test_hostile_texts_are_escaped_in_every_format(tmp_path):
    paths = write_report(hostile(campaign()), tmp_path, hostile(campaign(utility=None)))
    page = Page(paths["html"].read_text(encoding="utf-8"))
    assert not page.tags & {"script", "img"} and "onerror" not in {name for name, _ in page.attributes}
    assert page.stack == []
    assert SEEN in "".join(page.text)
    root = ET.parse(paths["junit"]).getroot()
    assert all(SEEN in case.get("name") for case in root.iter("testcase"))
    log = json.loads(paths["sarif"].read_text(encoding="utf-8"))
    assert all(SEEN in r["message"]["text"] for r in log["runs"][0]["results"])
    assert SEEN in load_result(paths["json"]).id
    for path in paths.values():
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ufffe\uffff]", path.read_text(encoding="utf-8"))


def test_equal_campaigns_have_identical_files(tmp_path):
    one, two = (write_report(campaign(), tmp_path / name) for name in "ab")
    assert all(one[kind].read_bytes() == two[kind].read_bytes() for kind in one)


def test_a_failed_rendering_keeps_the_previous_report(tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in write_report(campaign(), tmp_path).values()}
    monkeypatch.setattr("casemate.redteam.reporting.files.to_sarif", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(campaign(id="later"), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_write_error_leaves_complete_files_and_no_temporary_files(tmp_path, monkeypatch):
    write_report(campaign(), tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(BackendError, match="No space left"):
        write_report(campaign(id="later"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert load_result(tmp_path / "report.json") == campaign()


def test_a_folder_that_cannot_be_created_is_named_in_the_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="file.* cannot be written"):
        write_report(campaign(), tmp_path / "file")


def test_an_empty_campaign_is_written_and_does_not_pass(tmp_path):
    paths = write_report(CampaignResult("", "", CheckStatus.PASS), tmp_path)
    assert "No check was made" in paths["html"].read_text(encoding="utf-8")


def test_terminal_output_states_the_common_reason_of_several_checks_once():
    def check(attack, why):
        return Check("Not inferred", CheckStatus.FAIL, 0.3, 0.1, why, attack)

    found = [check("a", "Accuracy, limit 0.1: 0.3 to 0.4"), check("b", "Accuracy, limit 0.1: 0.2 to 0.5")]
    assert describe_checks(found) == ["Not inferred: Accuracy, limit 0.1: a: 0.3 to 0.4; b: 0.2 to 0.5"]
    assert describe_checks(found, "\n  ", "\n  ") == [
        "Not inferred: Accuracy, limit 0.1:\n  a: 0.3 to 0.4\n  b: 0.2 to 0.5"
    ]
    assert describe_checks(found, " / ") == ["Not inferred: Accuracy, limit 0.1: a: 0.3 to 0.4 / b: 0.2 to 0.5"]
    assert describe_checks(found[:1], "\n  ", "\n  ") == describe_checks(found[:1])
    assert describe_checks([check("a", "Too few trials"), check("b", "Too few trials")]) == [
        "Not inferred: Too few trials (a, b)"
    ]
    assert describe_checks([check("", "It failed")]) == ["Not inferred: It failed"]


def test_the_reading_guide_explains_only_the_metrics_of_its_report():
    membership, crawl = render_html(campaign()), render_html(crawl_campaign())
    assert "<dt>AUC</dt>" in membership and "<dt>Efficiency</dt>" not in membership
    assert "<dt>AUC</dt>" not in crawl and "<dt>Efficiency</dt>" in crawl
    assert "<li>The reader is simulated_reader.</li>" in render_html(
        campaign(simulated=("The reader is `simulated_reader`.",))
    )
