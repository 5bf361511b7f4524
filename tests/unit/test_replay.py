"""Recorded questions and answers: reading, scoring, and the command."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from casemate.cli import cli
from casemate.errors import ConfigError, DataError
from casemate.redteam.attacks.direct import Direct
from casemate.redteam.campaigns.replay import read_recorded, replay
from casemate.types import Document, Probe, Reply


def trials(count: int = 24, **more: Any) -> list[dict[str, Any]]:
    """Direct questions. With the guard off, members get yes; with the guard on, only every second member."""
    rows = []
    for i in range(count):
        member = i % 2 == 0
        on = "Yes." if member and i % 4 == 0 else "No."
        row = {"attack": "direct", "author": "script", "candidate": f"d{i}", "member": member, "text": f"Text {i}."}
        row |= {"questions": ["Is it there?"], "answers": {"off": ["Yes." if member else "No."], "on": [on]}}
        row |= {"withheld": [member and i % 4 == 2], "half": "AB"[i // 2 % 2]}
        rows.append(row | more)
    return rows


def write(path: Path, rows: list[Any], compressed: bool = True) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if compressed else data)
    return path


@pytest.mark.parametrize("compressed", [True, False])
def test_replay_computes_scores_with_the_attack(compressed: bool, tmp_path: Path) -> None:
    file = write(tmp_path / "set", [{"model": "m", "seed": 7}, *trials()], compressed)
    recorded = read_recorded(file)
    assert recorded.about == {"model": "m", "seed": 7}
    (result,) = replay(recorded)
    assert (result.attack, result.author, result.rescored) == ("direct", "script", 24)
    assert result.withheld == 0.5
    off, on = result.targets["off"], result.targets["on"]
    assert off is not None and on is not None
    assert (off.members, off.nonmembers, off.auc.value, on.auc.value) == (12, 12, 1.0, 0.75)
    assert on.recall_query is not None and on.recall_query.value == 0.5


def test_recorded_features_replace_missing_texts(tmp_path: Path) -> None:
    rows = []
    for row in trials():
        candidate = Document(row["candidate"], row["text"])
        probe = Probe(tuple(row["questions"]))
        measure = Direct().measure
        row["features"] = {
            side: list(asyncio.run(measure(candidate, probe, [Reply(a) for a in answers])))
            for side, answers in row["answers"].items()
        }
        rows.append({name: value for name, value in row.items() if name not in ("answers", "text", "questions")})
    (shown,) = replay(read_recorded(write(tmp_path / "a", rows)))
    (whole,) = replay(read_recorded(write(tmp_path / "b", trials())))
    assert shown.targets == whole.targets and shown.rescored == 0


def test_rows_with_one_question_are_open_questions(tmp_path: Path) -> None:
    text = "The north bridge was closed in May for repairs of its eastern pillar."
    rows = [
        {"candidate": f"d{i}", "member": i % 2 == 0, "text": f"{text} Note {i}.", "question": "What happened?"}
        | {"answer": text if i % 2 == 0 else "I don't know."}
        for i in range(24)
    ]
    (result,) = replay(read_recorded(write(tmp_path / "set", rows)))
    assert (result.attack, result.author, result.withheld) == ("menta", "", None)
    assert list(result.targets) == ["recorded"]
    assert result.targets["recorded"] is not None and result.targets["recorded"].auc.value > 0.9


def test_too_few_trials_give_no_metrics_and_a_reason(tmp_path: Path) -> None:
    (result,) = replay(read_recorded(write(tmp_path / "set", trials(2))))
    assert result.targets == {"off": None, "on": None}
    assert "half A has 1 members and 1 non-members" in result.missing["off"]


def test_trials_of_members_only_or_of_one_candidate_are_inconclusive(tmp_path: Path) -> None:
    members = [row | {"member": True} for row in trials()]
    one = [row | {"candidate": "d", "member": True, "questions": [f"Is it {i}?"]} for i, row in enumerate(trials())]
    for rows, reason in ((members, "12 members and 0 non-members"), (one, "24 trials of 1 candidates")):
        found = CliRunner().invoke(cli, ["redteam", "replay", str(write(tmp_path / "set", rows))])
        assert found.exit_code == 3
        assert "too few trials of direct, script (guard on)" in found.output and reason in found.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no recorded trial"),
        ("[1]", "line 2: no recorded trial"),
        (
            '{"candidate": "a", "member": "yes", "question": "q", "answer": "a"}',
            "member: input should be a valid boolean",
        ),
        (
            '{"candidate": "a", "member": true}',
            "line 2.*questions: field required.*replay --help",
        ),
        (
            '{"candidate": "a", "question": "q"}',
            "line 2.*member: field required",
        ),
        (
            '{"candidate": "a", "member": true, "questions": ["q"], "answers": []}',
            "1 questions need as many answers, not 0",
        ),
        (
            '{"candidate": "a", "member": true, "questions": ["q"], "answers": [1]}',
            r"answers\.recorded\.0: input .* string",
        ),
        ('{"candidate": "a", "member": true, "questions": ["q"], "answers": "x"}', "answers: input .* dictionary"),
        (
            '{"candidate": "a", "member": true, "questions": "q", "answers": ["x"]}',
            "line 2.*questions: input should be a valid list",
        ),
        (
            '{"candidate": "a", "member": true, "question": "q", "answers": {"guarded": ["x"]}}',
            "answers.guarded.*should be 'off', 'on' or 'recorded'",
        ),
        (
            '{"candidate": "a", "member": true, "question": "q", "features": [0.1]}',
            "line 2.*features: input .* dictionary",
        ),
        (
            '{"candidate": "a", "member": true, "question": "q", "features": {"no": [1]}}',
            "features.no.*should be 'off', 'on' or 'recorded'",
        ),
        (
            '{"candidate": "a", "member": true, "question": "q", "features": {"on": [NaN]}}',
            r"features\.on\.0: .*finite",
        ),
        ('{"candidate": "a", "member": true, "question": "q", "features": {"on": []}}', "at least 1"),
        (
            f'{{"candidate": "a", "member": true, "question": "q", "features": {{"on": [{10**399}]}}}}',
            r"line 2.*features\.on\.0: input .* number",
        ),
        (
            '{"candidate": "a", "member": true, "features": {"on": [2e100]}}',
            r"features\.on\.0: .* from -1e100 to 1e100",
        ),
        (
            '{"candidate": "a", "member": true, "features": {"on": [-1e308]}}',
            r"features\.on\.0: .* from -1e100 to 1e100",
        ),
        ('{"candidate": "a", "member": true, "features": {"on": [1]}, "answers": {"on": []}}', "questions: field req"),
        (
            '{"candidate": "a", "member": true, "question": "q", "answer": "x", "half": "a"}',
            "half: input should be 'A' or 'B'",
        ),
        (
            '{"candidate": "a", "member": true, "question": "q", "answer": "x", "withheld": []}',
            "1 questions need as many withheld, not 0",
        ),
        (
            '{"candidate": "a", "member": true, "question": "q", "answer": "x", "withheld": ["no"]}',
            r"withheld\.0: .* boolean",
        ),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "set").write_text(json.dumps({"model": "m"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        read_recorded(tmp_path / "set")


def test_line_numbers_include_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "set").write_text("{}\n\n \n{\n")
    with pytest.raises(DataError, match="line 4: no recorded trial"):
        read_recorded(tmp_path / "set")


def test_a_text_may_contain_a_line_separator(tmp_path: Path) -> None:
    rows = [json.dumps(row | {"text": "One.\u2028Two.\u0085"}, ensure_ascii=False) for row in trials(4)]
    (tmp_path / "set").write_bytes("\r\n".join(rows).encode())
    recorded = read_recorded(tmp_path / "set")
    assert [t.text for t in recorded.trials] == ["One.\u2028Two.\u0085"] * 4


def test_features_of_different_lengths_are_an_error(tmp_path: Path) -> None:
    rows = [row | {"features": {"off": [1.0] * (1 + (i == 2))}} for i, row in enumerate(trials(4))]
    with pytest.raises(DataError, match=r"line 3.*features.off has 2 numbers; earlier trials have 1"):
        read_recorded(write(tmp_path / "set", rows))


def test_contradictory_membership_of_a_candidate_is_an_error(tmp_path: Path) -> None:
    rows = [*trials(4), trials(1, member=False, questions=["Another?"])[0]]
    with pytest.raises(DataError, match="line 5.*'d0' has another 'member' in line 1"):
        read_recorded(write(tmp_path / "set", rows))


def test_repeated_questions_count_once_per_target(tmp_path: Path) -> None:
    split = [row | {"answers": {side: row["answers"][side]}} for row in trials() for side in ("off", "on")]
    (whole,), (parts,) = (replay(read_recorded(write(tmp_path / "set", rows))) for rows in (trials(), split))
    assert {t: m and m.auc for t, m in parts.targets.items()} == {t: m and m.auc for t, m in whole.targets.items()}
    with pytest.raises(DataError, match=r"line 5.*repeats line 2: the same questions about 'd0' \(on\)"):
        read_recorded(write(tmp_path / "set", [*split[:4], split[1]]))


def test_the_largest_allowed_features_are_scored(tmp_path: Path) -> None:
    values = [[1e100, -1e100, float(i)] for i in range(24)]
    rows = [
        {"candidate": f"d{i}", "member": i % 2 == 0, "features": {"off": [v * (-1) ** i for v in values[i]]}}
        for i in range(24)
    ]
    (result,) = replay(read_recorded(write(tmp_path / "set", rows)))
    assert result.targets["off"] is not None and result.targets["off"].auc.value == 1.0


def test_features_and_scored_answers_must_have_equal_lengths(tmp_path: Path) -> None:
    rows = trials()
    rows[0] = {"attack": "direct", "author": "script", "candidate": "d0", "member": True, "features": {"off": [1, 2]}}
    with pytest.raises(DataError, match="another number of values"):
        replay(read_recorded(write(tmp_path / "set", rows)))


def test_reading_a_decompression_bomb_stops_early(tmp_path: Path) -> None:
    (tmp_path / "set").write_bytes(gzip.compress(b"\n" * 2_000_000, mtime=0))
    with pytest.raises(DataError, match="cannot be read .more than 100,000 blank lines"):
        read_recorded(tmp_path / "set")


@pytest.mark.parametrize("content", [b"", b"{}\n", gzip.compress(b"{}\n" * 99, mtime=0)[:20], b"\xff\xfe"])
def test_a_file_without_trials_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "set").write_bytes(content)
    with pytest.raises(DataError, match=str(tmp_path / "set")):
        read_recorded(tmp_path / "set")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_recorded(tmp_path / "absent")


def test_answers_without_text_or_features_are_an_error(tmp_path: Path) -> None:
    recorded = read_recorded(write(tmp_path / "set", trials(text="")))
    with pytest.raises(DataError, match="'d0' has answers, but neither the candidate's 'text' nor 'features'"):
        replay(recorded)


@pytest.mark.parametrize(
    ("attack", "key", "error"),
    [
        ("interrogation", {}, "KeyError"),
        ("interrogation", {"truth": []}, "ValueError"),
        ("mba", {}, "ZeroDivisionError"),
        ("mba", {"masks": "heron"}, "KeyError"),
    ],
)
def test_a_missing_key_is_an_error(attack: str, key: dict[str, Any], error: str, tmp_path: Path) -> None:
    recorded = read_recorded(write(tmp_path / "set", [{}, *trials(attack=attack, key=key)]))
    with pytest.raises(DataError, match=f"line 2: the trial of 'd0' cannot be scored .{error}.; record the attack's"):
        replay(recorded)


def test_an_unknown_attack_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nonesuch"):
        replay(read_recorded(write(tmp_path / "set", trials(attack="nonesuch"))))


def test_the_command_prints_metrics_per_attack(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl.gz", [{"model": "[b]m"}, *trials()])
    found = CliRunner().invoke(cli, ["redteam", "replay", str(file)])
    assert found.exit_code == 0, found.output
    assert "model: [b]m" in found.output
    for cell in ("direct, script", "1.00 [1.00, 1.00]", ".75", "50 %"):
        assert cell in found.output
    found = CliRunner().invoke(cli, ["redteam", "replay", str(file), "--json"])
    data = json.loads(found.output)
    assert data["about"] == {"model": "[b]m"} and data["attacks"][0]["withheld"] == 0.5


def test_the_table_wraps_no_name_at_80_columns(tmp_path: Path) -> None:
    rows = trials(attack="interrogation", author="model:natural_title", key={"truth": ["yes"]})
    found = CliRunner().invoke(cli, ["redteam", "replay", str(write(tmp_path / "set", rows))], env={"COLUMNS": "80"})
    assert found.exit_code == 0, found.output
    for name in ("interrogation", "model:natural_title"):
        assert name in found.output
