"""Reproductions with the offline pair at minimal size: they complete, resume, and print what the paper printed."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from casemate import papers
from casemate.errors import ConfigError, DataError
from casemate.papers import Setting, cascades, differential_privacy, model_pair, readers
from casemate.papers.synthetic_records import records

WITH_THE_PAIR = [f"mirabel-table{i}" for i in (6, 7, 10, 11)] + ["ragfort-table2", "ragfort-table3"]


@contextmanager
def quietly(title: str, total: float | None) -> Any:
    yield lambda count: None


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all experiments, as on the command line."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs casemate[transformers]")
    pytest.importorskip("transformers", reason="needs casemate[transformers]")
    pytest.importorskip("sklearn", reason="needs casemate[torch]")
    pytest.importorskip("dp_accounting", reason="needs casemate[dp]")
    made = model_pair.pair
    for module, name, value in (
        (differential_privacy, "MOST", 4),
        (differential_privacy, "LONGEST", 2),
        (differential_privacy, "DISTRACTORS", 30),
        (differential_privacy, "ASKED_7", 2),
        (cascades, "OFFLINE", cascades.OFFLINE._replace(questions=2, longest=30)),
        (cascades, "GIVEN", cascades.GIVEN._replace(questions=2, longest=30, asked=8)),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(model_pair, "pair", lambda setting, inside, *rest: made(setting, min(inside, 120), *rest))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_THE_PAIR)
def test_every_table_gives_figures_with_intervals(name: str, small: None, work: Path) -> None:
    found = asyncio.run(papers.reproduce(name, Setting(work, work), quietly))
    json.dumps(found.as_json())
    assert found.differs and found.remarks
    assert {row.printed for row in found.rows} == {True, False}
    for row in found.rows:
        assert set(row.cells) <= set(found.columns)
        if not row.printed:
            assert all(cell.low <= cell.value <= cell.high for cell in row.cells.values())  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_result_names_a_configured_pair(small: None, work: Path) -> None:
    folder = model_pair.models_folder()
    setting = Setting(work, work, reader=str(folder / "reference"), draft=str(folder / "draft"))
    found = asyncio.run(papers.reproduce("ragfort-table3", setting, quietly))
    assert str(found.setting["reader"]).startswith("reference (SHA-256 ")
    assert any("draft (SHA-256 " in line for line in found.differs)
    assert model_pair.OFFLINE not in found.differs
    assert {row.system for row in found.rows if not row.printed} == {"before, here", "after, here"}


def test_a_draft_needs_a_reader(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a draft is given without a reader"):
        asyncio.run(papers.reproduce("ragfort-table2", Setting(tmp_path, tmp_path, draft="draft"), quietly))


def test_a_missing_reader_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no model at .*absent.gguf"):
        readers.reader_name(str(tmp_path / "absent.gguf"))


@pytest.mark.slow
def test_finished_attacks_are_not_repeated(small: None, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(work, work)
    first = asyncio.run(papers.reproduce("mirabel-table6", setting, quietly))
    monkeypatch.setattr(differential_privacy, "_said", None)
    assert asyncio.run(papers.reproduce("mirabel-table6", setting, quietly)) == first


def test_attacks_score_a_right_answer_above_a_wrong_one() -> None:
    for record in records(20, 1):
        for attack in differential_privacy.ATTACKS:
            questions, scored = differential_privacy.probe(attack, record)
            disclosed = [v for q in questions for _, v in record.facts if v in record.document.text and v not in q]
            right = {"S2MIA": [record.facts[0][1]], "IA": ["Yes, it is."] * len(questions)}.get(attack)
            right = right or [" ".join(disclosed)] * len(questions)
            assert scored(right) > scored(["I don't know."] * len(questions))
            assert all(record.name in question for question in questions)


def test_table_6_disagrees_with_table_10_in_the_marked_cells_only() -> None:
    for (attack, system), numbers in differential_privacy.PRINTED_10.items():
        adjusted = abs(numbers["accuracy"].value - 0.5)
        if system.startswith(differential_privacy.LARGE):
            assert adjusted == pytest.approx(
                differential_privacy.PRINTED_11[attack, system][differential_privacy.ADJUSTED].value
            )
            continue
        printed = differential_privacy.PRINTED_6[attack, system][differential_privacy.ADJUSTED]
        assert (adjusted == pytest.approx(printed.value)) == (not printed.odd)
        if printed.odd:
            assert printed.odd.endswith(f"by Table 10, this is {f'{adjusted:.3f}'.lstrip('0')}")


def test_printed_ragfort_rates_with_both_parts_are_below_those_with_one() -> None:
    for numbers in cascades.PRINTED_2.values():
        nothing, inter, intra, both = (number.value for number in numbers.values())
        assert both < min(inter, intra) < nothing
    lost = [numbers["before"].value - numbers["after"].value for numbers in cascades.PRINTED_3.values()]
    assert max(lost) == pytest.approx(0.025)


def test_a_missing_offline_pair_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(model_pair.VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match="the offline pair is not at"):
        model_pair.models_folder()
