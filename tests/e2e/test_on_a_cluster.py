"""Work on a Ray cluster of several nodes gives the same results as one process, also after node failures."""

from __future__ import annotations

import asyncio
import os
import pickle
import sqlite3
import sys
import time
import uuid
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

if not find_spec("ray"):  # not imported here: the import takes seconds, also in runs without these tests
    pytest.skip("ray is not installed", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("looks for processes in /proc", allow_module_level=True)

from casemate.app import open_app
from casemate.backends.clusters import ray as module
from casemate.backends.clusters.ray import SECRET_VARIABLE, RayCluster
from casemate.backends.indexes.attached import AttachedIndex
from casemate.backends.sidecar.attach_scan import map_in_thread
from casemate.config import parse
from casemate.demo.clinic import write_corpus
from casemate.errors import BackendError, ConfigError
from casemate.rag import ingest
from casemate.rag.corpus import Corpus
from casemate.rag.ingest import Ingest
from casemate.redteam.campaigns.own import OwnMembershipCampaign
from casemate.reindexing.retrieval_quality import found_in_top_k
from casemate.runtime.executor import LocalExecutor
from casemate.system import EmbeddingTask
from casemate.types import Document
from tests.cluster_tasks import (
    AddsShared,
    DotProducts,
    KillsWorker,
    environment_of,
    refuse,
    slow_every_third,
)
from tests.unit.folder_collection import FolderCollection

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),  # warnings about future versions of Ray
]
MARK = "CASEMATE_TEST_CLUSTER"
STORE = 100 * 2**20
START_S = 240  # on a busy machine
BENIGN = [f"When is the pharmacy open on day {i}?" for i in range(12)]


class NodeCluster:
    """A cluster with a head node without cores, and nodes with one core each."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = []
        self.grow(2)

    def grow(self, count):
        """Adds nodes until there are ``count``."""
        while len(self.nodes) < count:
            self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=STORE))

    def kill(self):
        """Kills the newest node with all its workers."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


@pytest.fixture(scope="module")
def node_cluster():
    """Three nodes. At the end, none of their processes may remain."""
    own = {
        SECRET_VARIABLE: uuid.uuid4().hex,
        MARK: uuid.uuid4().hex,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ |= own
    try:
        with slow_starts():
            made = NodeCluster()
            try:
                yield made
            finally:
                made.cluster.shutdown()
                wait_for_none_of(os.environ[MARK])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def slow_starts():
    """Waits up to ``START_S`` for a node to start. Ray's fixed limit is 30 seconds."""
    from ray._private import services

    get_node = services.get_node

    def started(*words, **options):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(RuntimeError):  # not registered yet
                return get_node(*words, **options)
            time.sleep(0.1)
        return get_node(*words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", started)
        yield


def wait_for_none_of(mark):
    for _ in range(300):
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in environment(pid)]
        if left == [os.getpid()] or not left:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes of the cluster are left: {left}")


def environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def cluster(node_cluster):
    node_cluster.grow(2)
    with closing(RayCluster(node_cluster.cluster.address)) as connected:
        yield connected


class TestMap:
    def test_results_are_in_order_and_items_are_read_lazily(self, cluster):
        taken = []
        came = []
        for number, _ in cluster.map(slow_every_third, (taken.append(i) or i for i in range(20))):
            came.append(number)
            assert len(taken) <= len(came) + module.TASKS_PER_WORKER * cluster.workers
        assert came == list(range(20))

    def test_closing_the_iterator_stops_the_work(self, cluster):
        came = []
        for number, _ in cluster.map(slow_every_third, range(1000), lambda: len(came) > 3):
            came.append(number)
        assert came == list(range(len(came)))
        assert len(came) < 30

    def test_a_task_is_retried_after_its_worker_is_killed(self, cluster, tmp_path):
        assert list(cluster.map(KillsWorker(tmp_path), range(8))) == [i * i for i in range(8)]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "5"]

    def test_a_task_that_kills_every_worker_fails(self, cluster, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "MAX_DEATHS", 2)
        with pytest.raises(BackendError, match="2 workers died on the same task"):
            list(cluster.map(KillsWorker(tmp_path, bad=2), range(4)))

    def test_exceptions_of_tasks_are_raised(self, cluster):
        with pytest.raises(BackendError, match="no [012] here") as caught:
            list(cluster.map(refuse, range(3)))
        assert (caught.value.backend, caught.value.retryable) == ("fake", True)

    def test_a_shared_value_reaches_the_workers(self, cluster):
        shared = cluster.share(np.arange(1000))
        added = list(cluster.map(AddsShared(shared), range(3)))
        assert [a[999] for a in added] == [999, 1000, 1001]

    def test_workers_send_no_usage_statistics(self, cluster):
        assert next(cluster.map(environment_of, ["RAY_USAGE_STATS_ENABLED"]))[0] == "0"

    def test_moments_are_bit_identical_to_one_process(self, cluster, tmp_path):
        shelf = FolderCollection(tmp_path / "shelf")
        rng = np.random.default_rng(3)
        for i, v in enumerate(rng.standard_normal((400, 16)).astype(np.float32)):
            shelf.put(Document(f"d{i:03}", f"text {i}"), v)
        one, many = (
            attached(shelf, tmp_path / "one.db", map_in_thread),
            attached(shelf, tmp_path / "many.db", cluster.map),
        )
        assert one.n == many.n == 400
        assert np.array_equal(one.mean, many.mean)
        assert np.array_equal(one.scatter, many.scatter)

    def test_searches_equal_those_of_one_process(self, cluster):
        rng = np.random.default_rng(4)
        E, Q = (unit(rng.standard_normal((n, 16)).astype(np.float32)) for n in (500, 200))
        own = [np.array([i, i + 250]) for i in range(200)]
        one, many = (found_in_top_k(DotProducts(s.share(E)), Q, own, 5, s) for s in (LocalExecutor(), cluster))
        assert np.array_equal(one, many)
        assert 0 < one.sum() < 200


def attached(shelf, path, spread):
    with closing(AttachedIndex(shelf, path)) as index:
        index.open("any", shelf.dim)
        index.attach(map_pages=spread)
        return index.moments()


def unit(E):
    return E / np.linalg.norm(E, axis=1, keepdims=True)


class TestErrors:
    def test_workers_with_another_build_are_rejected(self, node_cluster, monkeypatch):
        monkeypatch.setattr(module, "build", lambda: ("3.11", "9.9.9", "abc"))
        with pytest.raises(ConfigError, match=r"has casemate .* this machine casemate 9\.9\.9 \(code abc\)"):
            RayCluster(node_cluster.cluster.address)

    @pytest.mark.parametrize(("secret", "said"), [("x" * 32, "node .* has another"), ("short", "set")])
    def test_nodes_with_another_secret_are_rejected(self, node_cluster, monkeypatch, secret, said):
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        with pytest.raises(ConfigError, match=f"{said} CASEMATE_CLUSTER_SECRET"):
            RayCluster(node_cluster.cluster.address)

    def test_secrets_are_not_sent_and_a_missing_one_is_reported(self, cluster, monkeypatch):
        monkeypatch.setenv("ONLY_HERE", "s3cret")
        config = {"rag": {"embedder": {"use": "minilm", "weights": "${ONLY_HERE}"}}}
        task = EmbeddingTask.of(parse(config), "any")
        assert b"s3cret" not in pickle.dumps(task)
        with pytest.raises(ConfigError, match="a worker lacks the environment variable 'ONLY_HERE'"):
            list(cluster.map(task, [["a text"]]))


def rows(path):
    """The complete contents of an index."""
    with closing(sqlite3.connect(path)) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: db.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in names}


@contextmanager
def clinic(folder, corpus, spread=None):
    config = {
        "rag": {"corpus": str(corpus), "k": 3, "index": {"use": "sqlite", "path": f"{folder}/index.db"}},
        "guard": {"defenses": [{"use": "mirabel", "mode": "paper"}]},
        "store": {"use": "sql", "path": f"{folder}/events.db"},
        "redteam": {"attacks": ["direct", "dcmi"], "members": 10, "nonmembers": 10, "folder": f"{folder}/redteam"},
    }
    with open_app(config, executor=spread) as app:
        yield app


def index(folder, corpus, spread=None, kill_node=lambda done: None):
    """The contents of the index, and the reported progress in bytes."""
    folder.mkdir()
    reported_bytes = []
    with clinic(folder, corpus, spread) as app:
        work = Ingest(app.guard, Corpus(corpus))

        def progress(size):
            reported_bytes.append(size)
            kill_node(len(reported_bytes))

        report = asyncio.run(work.run(work.plan(), progress))
    assert report.complete
    assert sum(reported_bytes) == pytest.approx(
        sum(p.stat().st_size for p in corpus.rglob("*") if p.is_file()), rel=0.01
    )
    return rows(folder / "index.db")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clinic") / "clinic"
    folder.mkdir()
    write_corpus(folder, count=50)
    for path in folder.rglob("*"):
        if path.is_file():  # a few sentences of each note, because embedding takes most of the time
            path.write_text(path.read_text()[:300])
    return folder


@pytest.fixture(scope="module")
def single_process(corpus, tmp_path_factory):
    """Folder and contents of an index and a campaign by one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest, "BATCH_CHUNKS", 8)
        folder = tmp_path_factory.mktemp("alone") / "lab"
        return folder, index(folder, corpus)


def test_an_index_is_bit_identical_after_a_node_failure(
    node_cluster, cluster, corpus, single_process, tmp_path, monkeypatch
):
    monkeypatch.setattr(ingest, "BATCH_CHUNKS", 8)
    killed = []

    def kill_node(done):
        if done == 2:
            node_cluster.kill()
            killed.append(done)

    assert index(tmp_path / "lab", corpus, cluster, kill_node) == single_process[1]
    assert killed


@contextmanager
def no_steps(title, total):
    yield lambda count: None


def campaign(folder, corpus, spread=None, steps=no_steps):
    with clinic(folder, corpus, spread) as app:
        done = asyncio.run(OwnMembershipCampaign(app, BENIGN).run(steps))
    with closing(sqlite3.connect(folder / "redteam/campaigns.db")) as db:
        trials = db.execute("SELECT campaign, target, candidate, trial, failed, refused FROM trial ORDER BY 1, 2, 3")
        return done, trials.fetchall(), db.execute("SELECT count(*) FROM reply").fetchone()


def test_a_campaign_is_identical_after_a_node_failure(node_cluster, cluster, corpus, single_process, tmp_path):
    one, trials, replies = campaign(single_process[0], corpus)
    index(tmp_path / "lab", corpus)
    killed = []

    @contextmanager
    def steps(title, total):
        done = []

        def count(number):
            done.append(number)
            if title.startswith("attacking") and sum(done) > 8 and not killed:
                node_cluster.kill()
                killed.append(title)

        yield count

    many, same_trials, same_replies = campaign(tmp_path / "lab", corpus, cluster, steps)
    assert killed
    assert len(trials) == 2 * 2 * 20
    assert [t[1:] for t in same_trials] == [t[1:] for t in trials]
    assert same_replies == replies
    assert (many.attacks, many.audit, many.utility) == (one.attacks, one.audit, one.utility)
    assert many.cost["questions"] == one.cost["questions"]
