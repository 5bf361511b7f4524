"""Executors without a cluster: the local one, prefetching, and the errors of a cluster that is not available."""

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

from casemate.backends.clusters import ray as module
from casemate.backends.clusters.ray import RayCluster
from casemate.cli import cli
from casemate.errors import BackendError, ConfigError, MissingExtra
from casemate.rag.distributed_embedder import DistributedEmbedder
from casemate.runtime.executor import EMBEDDING_BATCH, LocalExecutor, prefetch
from casemate.types import Secret
from tests.fakes import BagOfWords


class Counting(LocalExecutor):
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
def executor():
    return Counting()


@pytest.fixture
def embedder(executor):
    return DistributedEmbedder(BagOfWords(), executor, BagOfWords().embed)


class TestDistributedEmbedder:
    def test_equals_the_inner_embedder(self, embedder, executor):
        texts = [f"text {i}" for i in range(2 * EMBEDDING_BATCH + 3)]
        said = []
        assert np.array_equal(embedder.embed(texts, said.append), BagOfWords().embed(texts))
        assert executor.sizes == said == [EMBEDDING_BATCH, EMBEDDING_BATCH, 3]
        assert (embedder.dim, embedder.fingerprint, embedder.max_tokens) == (64, "bag-of-words", 40)
        assert embedder.spans("a b") == [(0, 1), (2, 3)]

    def test_embeds_short_lists_locally(self, embedder, executor):
        assert np.array_equal(embedder.embed(["one"]), BagOfWords().embed(["one"]))
        assert embedder.embed([]).shape == (0, 64)
        assert not executor.sizes

    def test_prefetched_vectors_are_kept_until_the_next_batch(self, embedder):
        work = {"first": ["a", "b"], "second": ["c", "a"]}
        for name in embedder.prefetch(work, work.__getitem__):
            assert np.array_equal(embedder.embed(work[name]), BagOfWords().embed(work[name]))
            assert not embedder.inner.texts
            embedder.embed(work[name][:1])  # a part of it, when others are held back
            assert not embedder.inner.texts
        embedder.embed(["a"])
        assert embedder.inner.texts == ["a"]

    def test_stops_early(self, embedder):
        seen = []
        for number in embedder.prefetch(range(100), lambda i: [str(i)], lambda: len(seen) == 3):
            seen.append(number)
        assert seen == [0, 1, 2]


class TestSecret:
    def test_is_pickled_by_the_name_of_its_variable(self, monkeypatch):
        monkeypatch.setenv("A_KEY", "hidden")
        sent = pickle.dumps(Secret.read("Bearer ${A_KEY}"))
        assert b"hidden" not in sent
        monkeypatch.setenv("A_KEY", "another")
        assert str(pickle.loads(sent)) == "Bearer another"
        monkeypatch.delenv("A_KEY")
        with pytest.raises(KeyError, match="A_KEY"):
            pickle.loads(sent)

    def test_without_a_variable_is_pickled_by_value(self):
        assert pickle.loads(pickle.dumps(Secret("plain"))) == "plain"


def test_a_backend_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(BackendError("gone", backend="milvus", retryable=True)))
    assert (str(error), error.backend, error.retryable) == ("gone", "milvus", True)


class TestNoCluster:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("ray")

    @pytest.mark.parametrize("address", ["somewhere", "ray://", "host:", ":10", "host:port"])
    def test_an_invalid_address_is_refused(self, address):
        with pytest.raises(ConfigError, match="allowed: 'local', 'auto', 'host:port' or 'ray://host:port'"):
            RayCluster(address)

    @pytest.mark.parametrize("scheme", ["", "ray://"])
    def test_a_closed_port_is_reported_at_once(self, scheme):
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
            (
                ConnectionError("Could not find any running Ray instance"),
                BackendError,
                "start one with 'ray start --head'",
            ),
            (SystemExit(15), BackendError, "no Ray cluster at 'auto'"),
        ],
    )
    def test_connection_errors_of_ray_are_translated(self, monkeypatch, raised, kind, said):
        def fail(**options):
            raise raised

        monkeypatch.setattr("ray.init", fail)
        with pytest.raises(kind, match=said):
            RayCluster("auto")

    def test_a_worker_without_casemate_is_reported(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "casemate.backends.clusters.ray", None)
        found = module._probe()()
        assert module.describe_build(found).startswith("no casemate (Python 3.")


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'casemate\[ray\]'"):
        RayCluster("local")


@pytest.mark.parametrize("command", ["index", "calibrate", "reindex", "attach", "redteam run"])
def test_commands_accept_a_cluster(command, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text("a text")
    (tmp_path / "casemate.yaml").write_text("rag: {corpus: docs}")
    done = CliRunner().invoke(cli, [*command.split(), "--cluster", "somewhere"])
    assert "--cluster is 'somewhere'; allowed: " in str(done.exception)


class TestPrefetch:
    def test_reads_ahead_and_closes_the_generator_of_a_stopped_consumer(self):
        read, closed = [], threading.Event()

        def items():
            try:
                for number in range(10):
                    read.append(number)
                    yield number
            finally:
                closed.set()

        prefetched = prefetch(items(), 3)
        assert next(prefetched) == 0
        until(lambda: len(read) >= 3)
        assert len(read) <= 4
        prefetched.close()
        assert closed.is_set() and len(read) <= 4

    def test_an_error_is_raised_at_its_item(self):
        def items():
            yield 1
            raise ValueError("the third page is torn")

        prefetched = prefetch(items())
        assert next(prefetched) == 1
        with pytest.raises(ValueError, match="torn"):
            next(prefetched)
