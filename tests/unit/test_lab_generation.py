from __future__ import annotations

from datetime import UTC, datetime

import pytest

from casemate.lab.generation import spent, told
from casemate.types import Event


def event(**body):
    return Event("e", datetime(2026, 1, 1, tzinfo=UTC), "generation", body)


CASCADE = (
    event(flops_paper=50.0, flops_honest=130.0, flops_reference=100.0, judged=10, accepted=9),
    event(flops_paper=150.0, flops_honest=270.0, flops_reference=200.0, judged=30, accepted=27),
)


def test_costs_are_per_answer_and_against_the_reference_alone():
    assert spent(CASCADE) == pytest.approx(
        {
            "answers": 2,
            "flops_paper": 100,
            "flops_paper_of_reference": 2 / 3,
            "flops_honest": 200,
            "flops_honest_of_reference": 4 / 3,
            "accepted": 0.9,
        }
    )


def test_whole_answers_have_no_operations():
    assert spent([event(generations=2, mode="answer")]) == {} == spent([])
    assert spent([*CASCADE, event(generations=2)]) == spent(CASCADE)


def test_a_private_answer_has_no_drafts():
    found = spent([event(flops_honest=300.0, flops_reference=100.0)])
    assert set(found) == {"answers", "flops_honest", "flops_honest_of_reference"}
    assert told(found) == "1 answers written by a defense: 3e+02 FLOPs each, 3.00 times the reference alone (honest)"


def test_the_line_has_both_counts():
    assert "0.67 times the reference alone (paper's count)" in told(spent(CASCADE))
    assert told(spent(CASCADE)).endswith("90 % of drafts kept")
