"""Spreading work without a cluster: what one process does, and what is said when there are no workers to be had."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate.backends import ray as module
from casemate.backends.ray import RayCluster
from casemate.cli import cli
from casemate.errors import BackendError, ConfigError, MissingExtra
from casemate.spread import PIECE, Alone, SpreadEmbedder, ahead
from casemate.types import Secret
from tests.fakes import BagOfWords


class Counting(Alone):
    """One process that says how it was used."""

    def __init__(self):
        self.sizes = []

    def map(self, function, items, stopped=lambda: False):
        for found in super().map(function, items, stopped):
            self.sizes.append(len(found))
            yield found


def until(holds, seconds=30):
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, "it took too long"
        time.sleep(0.01)


@pytest.fixture
def spread():
    return Counting()


@pytest.fixture
def embedder(spread):
    return SpreadEmbedder(BagOfWords(), spread, BagOfWords().embed)


class TestEmbedder:
    def test_is_the_one_inside_in_everything_but_who_works(self, embedder, spread):
        texts = [f"text {i}" for i in range(2 * PIECE + 3)]
        said = []
        assert np.array_equal(embedder.embed(texts, said.append), BagOfWords().embed(texts))
        assert spread.sizes == said == [PIECE, PIECE, 3]
        assert (embedder.dim, embedder.fingerprint, embedder.max_tokens) == (64, "bag-of-words", 40)
        assert embedder.spans("a b") == [(0, 1), (2, 3)]

    def test_embeds_what_is_short_itself(self, embedder, spread):
        assert np.array_equal(embedder.embed(["one"]), BagOfWords().embed(["one"]))
        assert embedder.embed([]).shape == (0, 64)
        assert not spread.sizes

    def test_knows_what_was_embedded_ahead_until_the_next_comes(self, embedder):
        work = {"first": ["a", "b"], "second": ["c", "a"]}
        for name in embedder.ahead(work, work.__getitem__):
            assert np.array_equal(embedder.embed(work[name]), BagOfWords().embed(work[name]))
            assert not embedder.inner.texts
            embedder.embed(work[name][:1])  # a part of it, when others are held back
            assert not embedder.inner.texts
        embedder.embed(["a"])
        assert embedder.inner.texts == ["a"]

    def test_stops_when_it_is_told_to(self, embedder):
        seen = []
        for number in embedder.ahead(range(100), lambda i: [str(i)], lambda: len(seen) == 3):
            seen.append(number)
        assert seen == [0, 1, 2]


class TestSecret:
    def test_is_pickled_by_its_name(self, monkeypatch):
        monkeypatch.setenv("A_KEY", "hidden")
        sent = pickle.dumps(Secret.read("Bearer ${A_KEY}"))
        assert b"hidden" not in sent
        monkeypatch.setenv("A_KEY", "another")
        assert str(pickle.loads(sent)) == "Bearer another"
        monkeypatch.delenv("A_KEY")
        with pytest.raises(KeyError, match="A_KEY"):
            pickle.loads(sent)

    def test_without_a_name_is_what_it_is(self):
        assert pickle.loads(pickle.dumps(Secret("plain"))) == "plain"


def test_an_error_of_a_backend_survives_the_way_from_one_process_to_another():
    error = pickle.loads(pickle.dumps(BackendError("gone", backend="milvus", retryable=True)))
    assert (str(error), error.backend, error.retryable) == ("gone", "milvus", True)


class TestNoCluster:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("ray")

    @pytest.mark.parametrize("address", ["somewhere", "ray://", "host:", ":10", "host:port"])
    def test_what_is_no_address_is_refused(self, address):
        with pytest.raises(ConfigError, match="is no cluster; write 'local', 'auto', 'host:port' or 'ray://host:port'"):
            RayCluster(address)

    @pytest.mark.parametrize("scheme", ["", "ray://"])
    def test_nobody_at_an_address_is_said_at_once(self, scheme):
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            address = f"{scheme}127.0.0.1:{free.getsockname()[1]}"
            with pytest.raises(BackendError, match=f"no Ray cluster at '{address}'") as caught:
                RayCluster(address)
        assert caught.value.retryable

    @pytest.mark.parametrize(
        ("raised", "kind", "said"),
        [
            (RuntimeError("Version mismatch: The cluster was started with: Ray: 1"), ConfigError, "other versions"),
            (ConnectionError("Could not find any running Ray instance"), BackendError, "'ray start --head' starts one"),
            (SystemExit(15), BackendError, "no Ray cluster at 'auto'"),
        ],
    )
    def test_what_ray_says_is_put_into_our_words(self, monkeypatch, raised, kind, said):
        def fail(**options):
            raise raised

        monkeypatch.setattr("ray.init", fail)
        with pytest.raises(kind, match=said):
            RayCluster("auto")

    def test_a_worker_without_casemate_says_so(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "casemate.backends.ray", None)
        found = module._probe()()
        assert module.told(found).startswith("no casemate (Python 3.")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'casemate\[ray\]'"):
        RayCluster("local")


@pytest.mark.parametrize("command", ["index", "calibrate", "reindex", "attach", "redteam run"])
def test_every_command_that_can_be_shared_takes_the_cluster(command, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text("a text")
    (tmp_path / "casemate.yaml").write_text("rag: {corpus: docs}")
    done = CliRunner().invoke(cli, [*command.split(), "--on", "somewhere"])
    assert "--on 'somewhere' is no cluster" in str(done.exception)


class TestAhead:
    def test_reads_on_while_nobody_asks_and_closes_what_is_given_up(self):
        read, closed = [], threading.Event()

        def items():
            try:
                for number in range(10):
                    read.append(number)
                    yield number
            finally:
                closed.set()

        given = ahead(items(), 3)
        assert next(given) == 0
        until(lambda: len(read) >= 3)
        assert len(read) <= 4
        given.close()
        assert closed.is_set() and len(read) <= 4

    def test_an_error_comes_where_it_happened(self):
        def items():
            yield 1
            raise ValueError("the third page is torn")

        given = ahead(items())
        assert next(given) == 1
        with pytest.raises(ValueError, match="torn"):
            next(given)
