"""Benchmark results: several processes write one file, and names of attackers are validated."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import benchmarks
from benchmarks import crawl


def test_results_of_all_concurrent_writers_are_kept(tmp_path, monkeypatch):
    """Each process reads, changes and writes the file several times."""
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    monkeypatch.setattr(benchmarks, "_commit", lambda: "unknown")
    monkeypatch.setattr(benchmarks, "code_digest", lambda: "unknown")
    (tmp_path / "benchmarks").mkdir()

    def write(writer):
        for row in range(5):
            with benchmarks.updating("figures", {"k": 5}) as results:
                results["corpora"][f"{writer}-{row}"] = row

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    written = json.loads((tmp_path / "benchmarks/results/figures.json").read_text())["results"]
    assert len(written["corpora"]) == 4 * 5 and written["k"] == 5


def test_unknown_attacker_is_refused_with_the_known_names():
    assert crawl.chosen("worm,rag_thief+hex") == ["worm", "rag_thief+hex"]
    with pytest.raises(SystemExit, match="did you mean 'rag_thief'.*allowed: composite"):
        crawl.chosen("worm,rag_theif")
