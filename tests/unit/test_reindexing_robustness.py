"""Re-indexing with killed processes, full disks, concurrent processes, and collections without topics."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from casemate.errors import BackendError, DataError
from casemate.reindexing.fitting import ReindexSettings, fit
from casemate.reindexing.registry import ReindexRegistry
from casemate.reindexing.supcon import TrainSettings
from casemate.runtime.files import write_atomically
from casemate.types import Document
from tests.fakes import BagOfWords
from tests.topical import drawn, indexed, topical

pytest.importorskip("sklearn", reason="needs casemate[torch]")
ROOT = Path(__file__).parents[2]
GATE = ReindexSettings(mode="gate", questions=60)


def fitted(folder, documents, settings=GATE):
    index, embedder = indexed(folder, documents)
    try:
        return fit(index, embedder, settings)
    finally:
        index.close()


class TestCollections:
    @pytest.mark.parametrize("count", [0, 1, 5, 99])
    def test_too_few_chunks_are_an_error_with_the_minimum(self, tmp_path, count):
        with pytest.raises(DataError, match=f"has {count} chunks; re-indexing needs at least 100"):
            fitted(tmp_path, topical(count))

    def test_identical_chunks_have_no_topics(self, tmp_path):
        with pytest.raises(DataError, match="cannot find topics: all 150 chunks are equal"):
            fitted(tmp_path, [Document(f"d{i}", "t1w1 t1w2 t1w3") for i in range(150)])

    @pytest.mark.parametrize(
        "text",
        [
            lambda i: "t1w1 t1w2" if i % 2 else "t2w5 t2w8",  # two texts, each repeated
            lambda i: f"t1w1 t1w2 t1w3 t1w4 t1w5 t2w{i % 14}",  # a single large cluster
        ],
    )
    def test_negligible_effect_is_rejected(self, tmp_path, text):
        refused = fitted(tmp_path, [Document(f"d{i}", text(i)) for i in range(150)])
        assert not refused.accepted
        assert refused.reason.startswith("negligible effect")

    def test_within_one_large_source_only_the_queried_chunk_is_relevant(self, tmp_path):
        """In a single large source every ranking finds some chunk, so recall by source would be uninformative."""
        documents = [replace(d, source="book", text=d.text.partition(" ")[2]) for d in topical(150)]
        found = fitted(tmp_path, documents, replace(GATE, penalty=5.0))
        assert found.report["strengths"][0].loss > 0
        (tmp_path / "b").mkdir()
        apart = fitted(tmp_path / "b", [replace(d, source=d.id) for d in documents], replace(GATE, penalty=5.0))
        assert found.report["strengths"] == apart.report["strengths"]


class TestDisk:
    def test_full_disk_is_reported_and_changes_nothing(self, tmp_path):
        """A limit on the file size (``ulimit -f``), in a separate process."""
        registry = ReindexRegistry(tmp_path, "default")
        registry.write(drawn(topical(), BagOfWords()))
        before = {p.name: p.read_bytes() for p in registry.folder.iterdir()}
        child = """
import resource, sys
from pathlib import Path
from casemate.errors import BackendError
from casemate.reindexing.registry import ReindexRegistry
from tests.fakes import BagOfWords
from tests.topical import drawn, topical
reindexing = drawn(topical(), BagOfWords(), seed=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    ReindexRegistry(Path(sys.argv[1]), "default").write(reindexing)
except BackendError as error:
    print(error)
"""
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        done = subprocess.run(
            [sys.executable, "-c", child, tmp_path], capture_output=True, text=True, check=True, env=environment
        )
        assert "002.npz cannot be written (File too large); make room" in done.stdout
        assert {p.name: p.read_bytes() for p in registry.folder.iterdir()} == before
        assert registry.write(drawn(topical(), BagOfWords())).version == 2

    def test_unwritable_folder_is_reported(self, tmp_path):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(BackendError, match="cannot be written"):
            ReindexRegistry(tmp_path / "file", "default").write(drawn(topical(), BagOfWords()))
        with pytest.raises(BackendError, match="cannot be written"):
            write_atomically(tmp_path / "file" / "x", b"")


class TestProcesses:
    def test_one_training_per_tenant_at_a_time(self, tmp_path):
        with (
            ReindexRegistry(tmp_path, "default").training_lock(),
            ReindexRegistry(tmp_path, "other").training_lock(),
            pytest.raises(DataError, match="another process is re-indexing tenant 'default'"),
            ReindexRegistry(tmp_path, "default").training_lock(),
        ):
            pass
        with ReindexRegistry(tmp_path, "default").training_lock() as checkpoint:
            checkpoint.write_bytes(b"x")
        assert not checkpoint.exists()  # deleted after success

    def test_interrupted_training_leaves_its_checkpoint(self, tmp_path):
        with pytest.raises(KeyboardInterrupt), ReindexRegistry(tmp_path, "default").training_lock() as checkpoint:
            checkpoint.write_bytes(b"x")
            raise KeyboardInterrupt
        assert checkpoint.exists()
        with ReindexRegistry(tmp_path, "default").training_lock():
            assert checkpoint.exists()

    def test_concurrent_writes_are_all_stored(self, tmp_path):
        made = [drawn(topical(), BagOfWords(), "gate", reason=str(i)) for i in range(8)]
        threads = [threading.Thread(target=ReindexRegistry(tmp_path, "default").write, args=(r,)) for r in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        registry = ReindexRegistry(tmp_path, "default")
        assert registry.versions() == [*range(1, 9)]
        assert {registry.read(v).reason for v in registry.versions()} == {str(i) for i in range(8)}
        assert registry.current().version in registry.versions()

    @pytest.mark.slow
    def test_training_resumes_after_a_kill(self, tmp_path):
        pytest.importorskip("torch", reason="needs casemate[torch]")
        settings = ReindexSettings(questions=60, training=TrainSettings(steps=90, eval_interval=40, keep_weight=10))
        (tmp_path / "whole").mkdir()
        whole = fitted(tmp_path / "whole", topical(), settings)
        child = """
import sys, time
from dataclasses import replace
from pathlib import Path
from casemate.reindexing.fitting import ReindexSettings, fit
from casemate.reindexing.registry import ReindexRegistry
from casemate.reindexing.supcon import TrainSettings
from tests.topical import indexed, topical
index, embedder = indexed(Path(sys.argv[1]), topical())
def progress(step, done, total):
    if (step, done) == ("training", 50):
        print("killed now", flush=True)
        time.sleep(600)
with ReindexRegistry(Path(sys.argv[1]) / "r", "default").training_lock() as checkpoint:
    training = TrainSettings(steps=90, eval_interval=40, keep_weight=10)
    fit(index, embedder, ReindexSettings(questions=60, training=training, checkpoint=checkpoint), progress)
"""
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        with subprocess.Popen([sys.executable, "-c", child, tmp_path], stdout=subprocess.PIPE, env=environment) as p:
            assert p.stdout.readline() == b"killed now\n"
            p.send_signal(signal.SIGKILL)
            assert p.wait(timeout=60) == -signal.SIGKILL
        index, embedder = indexed(tmp_path, [])
        calls = []
        with ReindexRegistry(tmp_path / "r", "default").training_lock() as checkpoint:
            assert checkpoint.exists()
            again = fit(index, embedder, replace(settings, checkpoint=checkpoint), lambda *call: calls.append(call))
        index.close()
        assert [done for step, done, _ in calls if step == "training"][:2] == [40, 41]
        np.testing.assert_allclose(again.report["losses"], whole.report["losses"], rtol=1e-5)
        for name, weight in whole.weights.items():
            np.testing.assert_allclose(again.weights[name], weight, atol=1e-5)
