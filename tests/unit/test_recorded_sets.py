"""Recorded answers of real models in the repository: replayed without a model, compared with the published results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from casemate.redteam.campaigns.replay import ReplayResult, read_recorded, replay

ROOT = Path(__file__).parents[2]
SETS = sorted((ROOT / "benchmarks/recorded").glob("*.jsonl.gz"))
REPLAYED = [
    pytest.param(path, id=path.name, marks=() if path.name == "nfcorpus_qwen1.5b.jsonl.gz" else pytest.mark.slow)
    for path in SETS
]


def test_recorded_sets_exist_and_take_at_most_20_mb() -> None:
    assert SETS
    assert sum(path.stat().st_size for path in SETS) <= 20_000_000


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.name)
def test_a_set_states_its_origin_and_contains_no_document(path: Path) -> None:
    recorded = read_recorded(path)
    assert {"corpus", "model", "digest", "dtype", "decoding", "prompts", "seed"} <= recorded.about.keys()
    assert len(recorded.about["digest"]) == 64
    assert not any(trial.text for trial in recorded.trials)


@pytest.mark.parametrize("path", REPLAYED)
def test_replay_reproduces_the_published_metrics(path: Path) -> None:
    published, model = _published(path)
    results = {_name(result): result for result in _replayed(path)}
    answered = published["readers"][model]["attacks"]
    assert answered
    for name, figures in answered.items():
        for side in ("off", "on"):
            found = results[name].targets[side]
            assert found is not None
            assert list(found.auc) == pytest.approx(figures[side]["auc"], abs=1e-9), (name, side)
            assert (found.members, found.nonmembers) == (figures[side]["members"], figures[side]["nonmembers"])


@pytest.mark.parametrize("path", REPLAYED)
def test_replay_reproduces_the_published_rate_of_withheld_questions(path: Path) -> None:
    """Only for attacks that the reader answered completely does a set contain all trials."""
    published, model = _published(path)
    answered = published["readers"][model]["attacks"]
    compared = 0
    for result in _replayed(path):
        figures = published["withheld"][_name(result)]
        if figures["withheld"] and _name(result) in answered:
            compared += 1
            hidden = figures["withheld"][0] * figures["in_context"][0]  # rate over all questions about members
            assert result.withheld == pytest.approx(hidden, abs=1e-9), result
    assert compared >= 3


@cache
def _replayed(path: Path) -> Sequence[ReplayResult]:
    return replay(read_recorded(path))


def _published(path: Path) -> tuple[dict[str, Any], str]:
    """Published results for the corpus, and the name of the reader. The file name is ``CORPUS_READER``."""
    corpus, model = path.name.removesuffix(".jsonl.gz").split("_", 1)
    text = (ROOT / f"benchmarks/results/real_{corpus}.json").read_text(encoding="utf-8")
    return json.loads(text)["results"][corpus], model


def _name(result: ReplayResult) -> str:
    author, _, attack = result.author.partition(":")
    return f"{author}:{attack or result.attack}"
