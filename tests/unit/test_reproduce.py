import ast
import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support
from typer.testing import CliRunner

from casemate import papers
from casemate.cli import cli
from casemate.cli.reproduce import show
from casemate.errors import ConfigError, DataError
from casemate.guard.calibration.fitting import CalibrationSettings
from casemate.guard.defenses.query_filter import matched_rules
from casemate.maths import metrics
from casemate.maths.stats import Estimate, clopper_pearson
from casemate.papers import Setting, detection, laboratory, utility
from casemate.papers.differential_privacy import PRINTED_10, PRINTED_11
from casemate.papers.laboratory import CorpusSubset, relevant
from casemate.papers.published_numbers import (
    FOUR,
    TABLE_1,
    TABLE_2,
    TABLE_2_AGENT,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TABLE_8,
    TABLE_8_AGENT,
    TABLE_9,
    TABLE_12,
    Printed,
)
from casemate.papers.result import Result, Row, balanced, balanced_cells, distance, mean, shown
from casemate.reports.svg import step_chart
from casemate.runtime.file_lock import LockHeld, exclusive_lock
from tests.fakes import BagOfWords, documents


@contextmanager
def quietly(title, total):
    yield lambda count: None


def test_a_locked_folder_rejects_a_second_experiment(tmp_path):
    with (
        exclusive_lock(tmp_path / papers.LOCK, "an experiment", ""),
        pytest.raises(LockHeld, match="runs an experiment"),
    ):
        asyncio.run(papers.reproduce("mirabel-table8", Setting(tmp_path, tmp_path), quietly))


def values(numbers, columns=FOUR):
    return [numbers[column].value for column in columns]


# Published numbers


@pytest.mark.parametrize(
    ("numbers", "column", "value"),
    [
        (TABLE_1["harmless"], "S_q", 0.469),
        (TABLE_1["IA"], "without s_max", 0.226),
        (TABLE_2["MBA"], "accuracy", 0.847),
        (TABLE_2["IA"], "F1", 0.750),
        (TABLE_3["NQ", "Mirabel"], "R@5", 0.172),
        (TABLE_3["TriviaQA", "no guard"], "EM@100", 0.755),
        (TABLE_4["IA"], "Mirabel", 0.008),
        (TABLE_5["MBA"], "no guard", 0.754),
        (TABLE_8["IA"], "recall", 0.895),
        (TABLE_9["S2MIA", "Mirabel"], "precision", 0.526),
        (TABLE_12["perplexity"], "Mirabel", 0.050),
    ],
)
def test_printed_values_equal_the_paper(numbers, column, value):
    assert numbers[column].value == value


@pytest.mark.parametrize("table", [TABLE_8, TABLE_8_AGENT])
@pytest.mark.parametrize("attack", TABLE_8)
def test_table_8_is_consistent_and_implies_the_false_alarms(attack, table):
    printed = table[attack]
    recomputed = balanced(printed["recall"].value, printed["harmless flagged"].value)
    rounding = 0.003 if printed is TABLE_8_AGENT["IA"] else 0.0015  # recall .006 is printed with one significant digit
    assert recomputed == pytest.approx(values(printed), abs=rounding)


def test_table_2_is_consistent_except_for_the_rotated_columns_of_ia():
    for printed in (*TABLE_2.values(), *TABLE_2_AGENT.values()):
        accuracy, precision, recall, f1 = values(printed)
        odd = printed is TABLE_2["IA"]
        assert {bool(printed[c].odd) for c in ("precision", "recall", "F1")} == {odd}
        if odd:
            precision, recall, f1 = f1, precision, recall  # the paper prints F1, precision and recall in this order
        assert f1 == pytest.approx(2 * precision * recall / (precision + recall), abs=0.001)
        assert accuracy == pytest.approx(balanced(recall, recall * (1 / precision - 1)).accuracy, abs=0.002)


def test_table_9_is_consistent_except_for_ia_which_implies_58_percent_members():
    shares = []
    for (attack, _), printed in TABLE_9.items():
        accuracy, precision, recall, f1 = values(printed)
        assert f1 == pytest.approx(2 * precision * recall / (precision + recall), abs=0.001)
        equal = balanced(recall, recall * (1 / precision - 1)).accuracy
        if attack == "IA":
            assert abs(equal - accuracy) > 0.01
            assert f"{equal:.3f}".lstrip("0") in printed["accuracy"].odd
            shares.append((1 - accuracy) / (1 + recall / precision - 2 * recall))
        else:
            assert equal == pytest.approx(accuracy, abs=0.0015)
    assert shares == pytest.approx([0.579, 0.579], abs=0.003)


def test_table_4_equals_the_adjusted_accuracy_of_tables_9_and_10():
    for attack, printed in TABLE_4.items():
        for system, cell in printed.items():
            dp = (attack, system) in PRINTED_10
            accuracy = (PRINTED_10 if dp else TABLE_9)[attack, system]["accuracy"].value
            assert cell.value == pytest.approx(metrics.adjusted_accuracy(accuracy), abs=1e-9)


def test_tables_4_and_5_equal_table_11_for_dp_rag():
    for (attack, system), printed in PRINTED_11.items():
        if system in TABLE_4[attack]:
            assert [TABLE_4[attack][system].value, TABLE_5[attack][system].value] == [n.value for n in printed.values()]


def test_s2mia_in_table_5_is_the_mean_of_table_12():
    for system in ("no guard", "Mirabel"):
        both = [TABLE_12[score][system].value for score in ("similarity", "perplexity")]
        assert TABLE_5["S2MIA"][system].value == pytest.approx(np.mean(both), abs=0.0005)


def test_table_3_marks_exact_match_above_recall_as_inconsistent():
    for printed in TABLE_3.values():
        for k in (5, 20, 100):
            assert bool(printed[f"EM@{k}"].odd) == (printed[f"EM@{k}"].value > printed[f"R@{k}"].value)


# Rates and their intervals


def test_balanced_equals_scikit_learn_on_balanced_classes():
    for tp, fp in ((3, 1), (0, 4), (8, 0), (0, 0), (8, 8)):
        flagged = [1] * tp + [0] * (8 - tp) + [1] * fp + [0] * (8 - fp)
        want = precision_recall_fscore_support([1] * 8 + [0] * 8, flagged, average="binary", zero_division=0)
        assert balanced(tp / 8, fp / 8) == pytest.approx(((tp + 8 - fp) / 16, *want[:3]))


@pytest.mark.parametrize(
    ("recall", "fpr", "printed"),
    [  # Mirabel, Table 8: recall, implied false positive rate, printed metrics
        (1.000, 0.247, (0.876, 0.802, 1.000, 0.890)),
        (0.895, 0.248, (0.824, 0.783, 0.895, 0.835)),
        (0.992, 0.262, (0.865, 0.791, 0.992, 0.880)),
        (0.940, 0.000, (0.970, 1.000, 0.940, 0.969)),
        (0.000, 0.000, (0.500, 0.000, 0.000, 0.000)),
    ],
)
def test_balanced_reproduces_the_printed_metrics_of_table_8(recall, fpr, printed):
    assert balanced(recall, fpr) == pytest.approx(printed, abs=1.5e-3)


def test_balanced_cells_weight_kinds_of_negatives_equally():
    found = balanced_cells([True] * 9 + [False], [True] * 2 + [False] * 2, [False] * 100)
    recall, alarms = 0.9, 0.25
    assert [found[c].value for c in FOUR] == pytest.approx(list(balanced(recall, alarms)))
    assert all(rate.low <= rate.value <= rate.high for rate in found.values())


def test_intervals_of_perfect_detection_have_positive_width():
    found = balanced_cells([True] * 50, [False] * 50)
    assert {c: found[c].value for c in FOUR} == dict.fromkeys(FOUR, 1.0)
    assert all(0.9 < rate.low < 1 and rate.high == 1 for rate in found.values())


def test_intervals_of_balanced_cells_cover_the_true_value():
    rng, truth, inside = np.random.default_rng(5), balanced(0.8, 0.3), np.zeros(4)
    for _ in range(60):
        found = balanced_cells(rng.random(80) < 0.8, rng.random(80) < 0.3)
        inside += [found[c].low <= t <= found[c].high for c, t in zip(FOUR, truth, strict=True)]
    assert inside.min() >= 52


def test_distance_is_the_ks_statistic_with_a_covering_interval():
    rng, inside = np.random.default_rng(6), 0
    for shift in (0.0, 1.0):
        truth = 0.0 if not shift else 0.3829  # 2 Phi(1/2) - 1
        for _ in range(10):
            a, b = rng.normal(shift, 1, 60), rng.normal(0, 1, 60)
            found = distance(a, b)
            assert found.value == pytest.approx(metrics.ks_statistic(a, b))
            inside += found.low <= truth <= found.high
    assert inside >= 18


def test_intervals_of_extreme_distances_have_positive_width():
    same, apart = distance(np.zeros(50), np.zeros(50)), distance(np.ones(50), np.zeros(50))
    assert (same.value, same.low, apart.value, apart.high) == (0, 0, 1, 1)
    assert same.high == pytest.approx(clopper_pearson(0, 50)[1])
    assert apart.low == pytest.approx(1 - clopper_pearson(0, 50)[1])


def test_distance_depends_on_ranks_only():
    a, b = np.array([0.0, 1.0, 1.0, 5.0]), np.array([0.0, 0.0, 1.0, 2.0])
    assert distance(a, b) == distance(np.exp(a), np.exp(b))


def test_mean_has_a_normal_95_percent_interval():
    x = np.random.default_rng(7).normal(3, 2, 400)
    found = mean(x)
    assert found.value == pytest.approx(x.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * x.std() / 20, rel=0.1)


# Output


RESULT = Result(
    title="Table 0: nothing [bold]",
    columns=("accuracy", "recall"),
    rows=(
        Row("mba", "Mirabel, printed", {"accuracy": Printed(0.75, "too round"), "recall": Printed(0.5, "too round")}),
        Row("mba", "Mirabel, here", {"accuracy": Estimate(0.5, 0.4, 0.6)}),
    ),
    differs=("Everything.",),
    remarks=("Nothing else.",),
    setting={"k": 3},
)


def test_inconsistent_numbers_are_listed_once_with_their_cells():
    assert RESULT.odd == ("mba (Mirabel, printed; accuracy, recall): too round",)
    assert [row.printed for row in RESULT.rows] == [True, False]


def test_json_contains_rows_inconsistencies_deviations_and_settings():
    found = json.loads(json.dumps(RESULT.as_json()))
    assert found["rows"][1] == {
        "of": "mba",
        "system": "Mirabel, here",
        "printed": False,
        "cells": {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}},
    }
    assert found["rows"][0]["cells"]["accuracy"] == {"value": 0.75, "odd": "too round"}
    assert (found["odd"], found["differs"], found["setting"]) == (list(RESULT.odd), ["Everything."], {"k": 3})


def test_the_table_shows_printed_and_measured_values_and_deviations(capsys):
    show(RESULT)
    shown_text = " ".join(capsys.readouterr().out.split())
    for part in ("[bold]", ".750 *", ".500 [.40, .60]", "* mba (Mirabel, printed; ", "differs: Everything.", "k 3"):
        assert part in shown_text


def test_the_command_passes_its_options_and_prints_one_json_object(tmp_path, monkeypatch):
    asked = []

    async def recomputed(name, setting, steps):
        asked.append((name, setting))
        return RESULT

    monkeypatch.setattr(papers, "reproduce", recomputed)
    words = ["reproduce", "mirabel-table8", "--data", str(tmp_path), "--folder", "work", "--json"]
    done = CliRunner().invoke(cli, [*words, "--members", "30"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"name": "mirabel-table8", **RESULT.as_json()})
    assert CliRunner().invoke(cli, [*words, "--full"]).exit_code == 0
    expected = Setting(tmp_path, Path("work"), 30, 250), Setting(tmp_path, Path("work"), 1000, 1000)
    assert asked == [("mirabel-table8", setting) for setting in expected]


def test_an_interrupted_command_explains_how_to_resume(tmp_path, monkeypatch):
    async def interrupted(name, setting, steps):
        raise KeyboardInterrupt

    monkeypatch.setattr(papers, "reproduce", interrupted)
    done = CliRunner().invoke(cli, ["reproduce", "mirabel-table8", "--data", str(tmp_path)])
    assert done.exit_code == 130
    assert "run the same command again" in done.output


def test_step_chart_draws_groups_and_threshold():
    edges = np.linspace(0, 1, 5)
    groups = {"members": np.array([0, 0, 0.5, 0.5]), "harmless & <others>": np.array([1.0, 0, 0, 0])}
    image = step_chart("s_max", edges, groups, "similarity", 0.625).__html__()
    seen = HTMLParser()
    tags = []
    seen.handle_starttag = lambda tag, attributes: tags.append(tag)
    seen.feed(image)
    assert "s_max" in image
    assert (tags.count("path"), image.count('class="chance"')) == (2, 1)
    assert "harmless &amp; &lt;others&gt;: mean .12; threshold .62" in image


# Names and data


def test_an_unknown_experiment_lists_the_valid_names():
    with pytest.raises(ConfigError, match=r"did you mean 'mirabel-table.*allowed: mirabel-table1, .*mirabel-figure3"):
        papers.require("mirabel-table13")
    done = CliRunner().invoke(cli, ["reproduce", "nonsense", "--data", "nowhere"])
    assert isinstance(done.exception, ConfigError)


def test_every_table_and_figure_has_an_experiment():
    tables = [f"mirabel-table{i}" for i in range(1, 13)]
    ragfort = [f"ragfort-table{i}" for i in (1, 2, 3)]
    expected = [*tables, "mirabel-figure1", "mirabel-figure3", *ragfort, "ragfort-figure1"]
    assert list(papers.NAMES) == expected


def test_a_missing_data_folder_is_an_error_with_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CASEMATE_DATA", raising=False)
    assert papers.data_folder(None) == Path("data")  # experiments with synthetic records read no data
    monkeypatch.setenv("CASEMATE_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match="elsewhere"):
        papers.data_folder(None)
    assert papers.data_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("name", "file"), [("table8", "nfcorpus/corpus.jsonl.gz"), ("table3", "squad/corpus.jsonl.gz")]
)
def test_an_incomplete_data_folder_is_an_error(tmp_path, name, file):
    with pytest.raises(DataError, match=f"is incomplete: no {file} in"):
        asyncio.run(papers.reproduce(f"mirabel-{name}", Setting(tmp_path, tmp_path / "work"), quietly))


# The experiments, on a small synthetic collection with a small embedder


def write_gz(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def write_qrels(path, pairs):
    path.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t1\n" for q, d in pairs))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The format of the real data: 90 documents, 24 of them non-members. SQuAD has 40 paragraphs of 4 articles."""
    folder = tmp_path_factory.mktemp("data")
    contents = [d.text.split() for d in documents(90, words=30)]
    texts = [
        f"In {1900 + i} the {w[1]} {w[2]} was seen by {w[3]}. The {' '.join(w[4:14])} was {w[0]}. {' '.join(w[14:26])}."
        for i, w in enumerate(contents)
    ]
    write_gz(
        folder / "nfcorpus/corpus.jsonl.gz",
        [
            {"_id": f"d{i}", "title": f"The {w[1]}", "text": t}
            for i, (w, t) in enumerate(zip(contents, texts, strict=True))
        ],
    )
    asked = [{"_id": f"q{i}", "text": f"what of {w[2]} and {w[3]}"} for i, w in enumerate(contents)]
    write_gz(folder / "nfcorpus/queries.jsonl.gz", asked)
    write_qrels(folder / "nfcorpus/qrels.dev.tsv", [(f"q{i}", f"d{i}") for i in range(60)])
    write_qrels(folder / "nfcorpus/qrels.tsv", [(f"q{i}", f"d{i}") for i in range(60, 90)])
    split = {"mem_indices": [f"d{i}" for i in range(30)], "non_mem_indices": [f"d{i}" for i in range(30, 54)]}
    (folder / "mia_riddle").mkdir()
    (folder / laboratory.SPLIT).write_text(json.dumps(split))
    paragraphs = [{"_id": f"p{i}", "title": f"Article {i % 4}", "text": texts[i]} for i in range(40)]
    write_gz(folder / "squad/corpus.jsonl.gz", paragraphs)
    questions = [
        {
            "_id": f"s{i}",
            "text": f"Who has seen the {t.split()[3]} {t.split()[4]}?",
            "answers": [t.split()[8].strip(".")],
        }
        for i, t in enumerate(texts[:40])
    ]
    write_gz(folder / "squad/queries.jsonl.gz", questions)
    write_qrels(folder / "squad/qrels.tsv", [(f"s{i}", f"p{i}") for i in range(40)])
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Shared by all experiments, as on the command line."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def run(data, work, monkeypatch):
    build = laboratory.build
    small = BagOfWords(max_tokens=60)
    monkeypatch.setattr(laboratory, "CalibrationSettings", partial(CalibrationSettings, documents=40, questions=200))
    monkeypatch.setattr(laboratory, "build", lambda role, part: small if role == "embedder" else build(role, part))
    monkeypatch.setattr(utility, "SIZES", (5, 100))
    setting = Setting(data, work, 20, 20)
    return lambda name: asyncio.run(papers.reproduce(f"mirabel-{name}", setting, quietly))


WITH_THE_PAIR = {"table6", "table7", "table10", "table11"}  # see test_reproduce_pair
OF_MIRABEL = [name.removeprefix("mirabel-") for name in papers.NAMES if name.startswith("mirabel-")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "table3"))
        for name in OF_MIRABEL
        if name not in WITH_THE_PAIR
    ],
)
def test_every_experiment_gives_figures_with_intervals(run, name):
    found = run(name)
    json.dumps(found.as_json())
    assert found.differs
    here = [row for row in found.rows if not row.printed]
    assert any(row.printed for row in found.rows) == (name != "figure1")
    for row in here:
        assert set(row.cells) <= set(found.columns)
        for cell in row.cells.values():
            assert cell.low <= cell.value <= cell.high
    assert all(path.is_file() for path in found.files)
    assert bool(found.files) == name.startswith("figure")


def test_a_second_run_returns_the_stored_result_without_new_attacks(run, monkeypatch):
    first = run("table4")
    monkeypatch.setattr("casemate.redteam.lab.experiment.Experiment._attempt", None)
    assert run("table4") == first


def test_table_5_gives_s2mia_the_mean_of_table_12(run):
    twelve = {row.of: row.cells for row in run("table12").rows if not row.printed}
    (five,) = (row.cells for row in run("table5").rows if row.of == "S2MIA" and not row.printed)
    for system in ("no guard", "Mirabel", "calibrated"):
        both = [twelve[score][system].value for score in ("similarity", "perplexity")]
        assert five[system].value == pytest.approx(np.mean(both))


def test_decisions_of_the_agent_equal_those_of_the_query_filter(run, data, work):
    """Its decisions depend on the question only; the oracle is ``matched_rules``."""

    async def flagged():
        with ExitStack() as opened:
            lab = await laboratory.nfcorpus(Setting(data, work, 20, 20), quietly, opened)
            questions = await detection.asked(lab)
            return questions, await detection.judged(lab, questions)

    questions, seen = asyncio.run(flagged())
    for kind, found in seen["agent"].items():
        expected = [bool(matched_rules(q.text)) for q in questions if (q.kind, q.member) == kind]
        assert [one.flagged for one in found] == expected
    assert any(one.target for one in seen["agent"]["MBA", True])
    assert not any(one.flagged for one in seen["agent"]["harmless", False])


def test_open_questions_are_scored_by_their_relevant_documents(run):
    rows = {row.system: row.cells for row in run("table3").rows}
    bare = rows["NFCorpus, no guard, here"]
    assert bare["R@100"].value == 1.0  # the context is as large as the index, so it has every relevant document
    assert set(bare) == {"R@5", "R@100"}
    assert rows["SQuAD, no guard, here"]["EM@5"].value <= rows["SQuAD, no guard, here"]["R@5"].value


def test_a_language_model_reads_more_than_five_passages_only_on_request(data):
    of_a_model = partial(Setting, data, reader="model.gguf")
    found = [utility.sizes(setting) for setting in (Setting(data), of_a_model(), of_a_model(passages=20))]
    assert found == [[5, 20, 100], [5], [5, 20]]


def test_a_question_has_all_its_relevant_documents(tmp_path):
    write_qrels(tmp_path / "qrels.tsv", [("q1", "a"), ("q2", "b"), ("q1", "c")])
    assert laboratory.relevant_documents(tmp_path / "qrels.tsv") == {"q1": {"a", "c"}, "q2": {"b"}}
    assert relevant(tmp_path / "qrels.tsv") == {"q1": "a", "q2": "b"}


def test_the_index_contains_members_and_no_non_members(run, data, work):
    async def contents():
        with ExitStack() as opened:
            lab = await laboratory.nfcorpus(Setting(data, work, 20, 20), quietly, opened)
            return set(lab.bench.rag.index.digests()), lab

    sources, lab = asyncio.run(contents())
    assert sources == {f"d{i}" for i in range(90)} - {f"d{i}" for i in range(30, 54)}
    assert {d.source for d in lab.split.members} <= {f"d{i}" for i in range(30)}
    assert {d.source for d in lab.split.nonmembers} <= {f"d{i}" for i in range(30, 54)}
    assert (len(lab.split.members), len(lab.split.nonmembers)) == (20, 20)
    assert (len(lab.harmless), lab.harmless[0]) == (30, laboratory.questions(data / "nfcorpus")["q60"])


def test_calibration_and_evaluation_use_disjoint_articles(data):
    log, items = utility.halves(data / "squad", 1000, 7)
    about = relevant(data / "squad/qrels.tsv")
    number = {text: int(about[i][1:]) % 4 for i, text in laboratory.questions(data / "squad").items()}
    fitted, measured = {number[text] for text in log}, {number[item.text] for item in items}
    assert len(fitted) == len(measured) == 2
    assert not fitted & measured
    assert utility.halves(data / "squad", 3, 7)[1] == items[:3]


def test_corpus_subset_excludes_the_given_documents(data):
    names = [source.name for source in CorpusSubset(data / "nfcorpus", {"d0", "d2"}).sources()]
    assert len(names) == 88
    assert names[:2] == ["d1", "d3"]


def test_shown_cells():
    assert [shown(c) for c in (Printed(0.008), Estimate(1.0, 0.95, 1.0), None)] == [".008", "1.000 [.95, 1.00]", ""]


def printed_texts(tree: ast.Module) -> Iterator[str]:
    """The string literals of a module except docstrings; each interpolated value is one word."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.Expr | ast.JoinedStr):
                continue
            if isinstance(child, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in child.values)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str):
                yield child.value


@pytest.mark.parametrize("file", sorted(Path(papers.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_printed_sentences_have_at_most_25_words(file: Path) -> None:
    texts = list(printed_texts(ast.parse(file.read_text())))
    sentences = [s for text in texts for s in re.split(r"(?<=[.?!:;])\s+(?=[A-Z'])", text) if " " in s]
    assert not {s: len(s.split()) for s in sentences if len(s.split()) > 25}


def test_printed_texts_finds_long_sentences_and_ignores_docstrings() -> None:
    tree = ast.parse(f'"""Docs {"a " * 30}"""\nX = ("One. {"a " * 20}" f"{{3}} {"b " * 9}.", "c d")')
    assert [len(text.split()) for text in printed_texts(tree)] == [32, 2]
