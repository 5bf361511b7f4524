"""Executors without a cluster: the local one, prefetching, and the errors of a cluster that is not available."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from casemate.backends.clusters import ray as module
from casemate.backends.clusters.ray import RayCluster
from casemate.cli import cli
from casemate.errors import BackendError, ConfigError, DataError, MissingExtra
from casemate.rag.distributed_embedder import DistributedEmbedder
from casemate.runtime.executor import EMBEDDING_BATCH, LocalExecutor, prefetch
from casemate.runtime.sealed_messages import MessageSeal
from casemate.types import Secret
from tests.cluster_tasks import refuse
from tests.fakes import BagOfWords
from tests.waiting import wait_for


class RecordingExecutor(LocalExecutor):
    """Runs tasks in one process, and records the sizes of the results."""

    def __init__(self):
        self.sizes = []

    def map(self, function, items, stopped=lambda: False):
        for found in super().map(function, items, stopped):
            self.sizes.append(len(found))
            yield found


@pytest.fixture
def executor():
    return RecordingExecutor()


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

    def test_prefetched_vectors_are_cached_until_the_next_batch(self, embedder):
        work = {"first": ["a", "b"], "second": ["c", "a"]}
        for name in embedder.prefetch(work, work.__getitem__):
            assert np.array_equal(embedder.embed(work[name]), BagOfWords().embed(work[name]))
            assert not embedder.inner.texts
            embedder.embed(work[name][:1])  # part of the batch, if the other texts are withheld
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
    def test_closed_port_is_reported_without_delay(self, scheme):
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
        *found, proof = module._probe()("any")
        assert module.describe_build(found).startswith("no casemate (Python 3.")
        assert not proof


class CodeOnUnpickle:
    """Runs code when it is unpickled."""

    executed: ClassVar[list[str]] = []

    def __init__(self, where):
        self.where = where

    def __reduce__(self):
        return CodeOnUnpickle.executed.append, (self.where,)


class RayError(Exception):
    pass


class RayTaskError(RayError):
    cause = None


class ToyRay:
    """Runs a task synchronously, after the function ``change`` altered its messages."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, change=lambda kind, message: message):
        self.change, self.done = change, {}

    def put(self, message):
        return self.change("function", message)

    def remote(self, function, item, number, call):
        done = self.change("result", module._run_task(function, self.change("item", item), number, call))
        self.done[number] = done
        return number

    def wait(self, refs, timeout):
        return refs, []

    def get(self, ref):
        return self.done[ref]


def replay_first_result():
    """An attack that replaces each result by the first one."""
    recorded = []

    def change(what, message):
        if what == "result":
            recorded.append(message)
            return recorded[0]
        return message

    return change


class TestSealedTasks:
    @pytest.fixture(autouse=True)
    def _secret(self, monkeypatch):
        monkeypatch.setenv(module.SECRET_VARIABLE, "s" * 32)
        CodeOnUnpickle.executed.clear()

    @staticmethod
    def run(change=lambda kind, message: message, function=abs, items=(-3,)):
        ray = ToyRay(change)
        queue = module._TaskQueue(ray, ray, MessageSeal(b"s" * 32), function)
        for number, item in enumerate(items):
            queue.start(module._Task(number, item))
        while queue.wait():
            yield from queue.results()
            if not queue.size:
                return

    def test_a_task_returns_its_result(self):
        assert list(self.run(items=[-3, 4])) == [3, 4]

    @pytest.mark.parametrize("kind", ["function", "item", "result"])
    def test_a_forged_message_is_rejected_and_not_unpickled(self, kind):
        forged = MessageSeal(b"another secret of 32 characters.").seal(CodeOnUnpickle(kind), kind)

        def change(what, message):
            return replace(message, body=forged.body) if what == kind else message

        with pytest.raises(DataError, match="not from this campaign, so it was rejected"):
            list(self.run(change))
        assert not CodeOnUnpickle.executed

    def test_the_result_of_another_task_is_rejected(self):
        with pytest.raises(DataError, match=r"result 1 of call \w+\) is not from this campaign"):
            list(self.run(replay_first_result(), items=[-3, 4]))

    def test_the_result_of_the_same_task_in_an_earlier_call_is_rejected(self):
        change = replay_first_result()
        assert list(self.run(change)) == [3]
        with pytest.raises(DataError, match="not from this campaign"):
            list(self.run(change))

    def test_exception_of_a_task_is_raised_locally_with_its_remote_traceback(self):
        with pytest.raises(BackendError, match="no 3 here") as caught:
            list(self.run(function=refuse, items=[3]))
        assert "in refuse" in str(caught.value.__cause__)

    def test_an_exception_that_cannot_be_unpickled_is_described(self):
        with pytest.raises(RuntimeError, match="Odd: one and two"):
            list(self.run(function=raise_unpicklable))

    def test_worker_without_the_secret_raises_an_error_with_instructions(self, monkeypatch):
        monkeypatch.delenv(module.SECRET_VARIABLE)
        with pytest.raises(ConfigError, match="set CASEMATE_CLUSTER_SECRET to the same random text of 32"):
            list(self.run())


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_unpicklable(item):
    raise Odd("one", "two")


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
        wait_for(lambda: len(read) >= 3)
        assert len(read) <= 4
        prefetched.close()
        assert closed.is_set() and len(read) <= 4

    def test_error_is_raised_when_its_item_is_read(self):
        def items():
            yield 1
            raise ValueError("the third page is torn")

        prefetched = prefetch(items())
        assert next(prefetched) == 1
        with pytest.raises(ValueError, match="torn"):
            next(prefetched)
