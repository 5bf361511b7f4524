"""The table of a poisoning drill shows the reason for exit code 1."""

import pytest

from casemate.cli.canary_set import _show_drill
from casemate.monitor.poisoning.drill import DrillResult


def result(watched: bool, detected_by: tuple[str, ...], false: bool = True) -> DrillResult:
    return DrillResult("poison", "Which level?", watched, 5, None, false, false, detected_by, 1.0, True)


@pytest.mark.parametrize(
    "found, line",
    [
        (
            [result(True, ()), result(True, ("a",)), result(False, ())],
            "missed 1 of 2 false answers to their questions (exit",
        ),
        ([result(True, ("a",)), result(True, (), false=False)], "missed 0 of 1 false answers to their questions\n"),
    ],
)
def test_the_missed_false_answers_are_counted(found, line, capsys):
    _show_drill(found)
    assert line in capsys.readouterr().out
