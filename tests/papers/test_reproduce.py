"""A table of the Mirabel paper on a small part of the real data."""

import asyncio
import gzip
import json
import shutil
from contextlib import contextmanager
from functools import partial

import pytest

from casemate.guard.calibration.fitting import CalibrationSettings
from casemate.papers import Setting, laboratory, reproduce
from casemate.papers.laboratory import SPLIT

pytestmark = pytest.mark.slow

OTHERS = 70


@contextmanager
def quietly(title, total):
    yield lambda count: None


@pytest.fixture
def part(data, tmp_path):
    """NFCorpus with 15 members, 15 non-members and some other documents; all questions."""
    folder = tmp_path / "data"
    shutil.copytree(data / "nfcorpus", folder / "nfcorpus")
    named = json.loads((data / SPLIT).read_text())
    split = {key: names[:15] for key, names in named.items()}
    (folder / SPLIT).parent.mkdir()
    (folder / SPLIT).write_text(json.dumps(split))
    chosen = {name for names in split.values() for name in names}
    with gzip.open(data / "nfcorpus/corpus.jsonl.gz", "rt") as file:
        records = [(json.loads(line)["_id"], line) for line in file]
    rest = [line for name, line in records if name not in chosen][:OTHERS]
    (folder / "nfcorpus/corpus.jsonl.gz").chmod(0o600)
    with gzip.open(folder / "nfcorpus/corpus.jsonl.gz", "wt") as file:
        file.writelines([*rest, *(line for name, line in records if name in chosen)])
    return folder


def test_the_calibrated_guard_detects_attacks_with_fewer_false_alarms_than_the_printed_rule(
    part, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        laboratory, "CalibrationSettings", partial(CalibrationSettings, documents=24)
    )  # fewer probes, to save embedding time
    result = asyncio.run(reproduce("mirabel-table8", Setting(part, tmp_path / "work", 15, 15), quietly))
    assert result.setting["documents"] == 15 + OTHERS
    cells = {(row.of, row.system): row.cells for row in result.rows}
    for attack in ("S2MIA", "MBA", "IA"):
        paper, calibrated = (cells[attack, f"{name}, here"] for name in ("Mirabel", "calibrated"))
        assert cells[attack, "Mirabel, printed"]["recall"].value >= 0.895
        assert paper["recall"].value > 0.7
        assert calibrated["recall"].value > 0.7
        assert calibrated["harmless flagged"].high < paper["harmless flagged"].low
        assert calibrated["F1"].value > paper["F1"].value
