"""Re-indexing under kills, full disks, several processes, and collections that have no topics."""

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
from casemate.lab.reindex import Settings, fit
from casemate.reindexing.files import put
from casemate.reindexing.shelf import Shelf
from casemate.reindexing.supcon import TrainSettings
from casemate.types import Document
from tests.fakes import BagOfWords
from tests.topical import drawn, indexed, topical

pytest.importorskip("sklearn", reason="needs casemate[torch]")
ROOT = Path(__file__).parents[2]
GATE = Settings(mode="gate", questions=60)


def learnt(folder, documents, settings=GATE):
    index, embedder = indexed(folder, documents)
    try:
        return fit(index, embedder, settings)
    finally:
        index.close()


class TestCollections:
    @pytest.mark.parametrize("count", [0, 1, 5, 99])
    def test_with_few_chunks_nothing_is_learnt_and_the_message_says_how_many_it_takes(self, tmp_path, count):
        with pytest.raises(DataError, match=f"has {count} chunks; re-indexing needs at least 100"):
            learnt(tmp_path, topical(count))

    def test_chunks_that_are_all_the_same_have_no_topics(self, tmp_path):
        with pytest.raises(DataError, match="all 150 chunks are alike: they have no topics"):
            learnt(tmp_path, [Document(f"d{i}", "t1w1 t1w2 t1w3") for i in range(150)])

    @pytest.mark.parametrize(
        "text",
        [
            lambda i: "t1w1 t1w2" if i % 2 else "t2w5 t2w8",  # two texts, again and again
            lambda i: f"t1w1 t1w2 t1w3 t1w4 t1w5 t2w{i % 14}",  # one huge cluster
        ],
    )
    def test_where_topics_lie_apart_already_there_is_nothing_to_gain(self, tmp_path, text):
        refused = learnt(tmp_path, [Document(f"d{i}", text(i)) for i in range(150)])
        assert not refused.accepted
        assert "it would change next to nothing" in refused.why

    def test_of_one_large_source_the_very_chunk_is_to_be_found(self, tmp_path):
        """A book of one file: some chunk of it is always found, so the gate would hold nothing back."""
        documents = [replace(d, source="book", text=d.text.partition(" ")[2]) for d in topical(150)]
        found = learnt(tmp_path, documents, replace(GATE, penalty=5.0))
        assert found.report["strengths"][0].loss > 0
        (tmp_path / "b").mkdir()
        apart = learnt(tmp_path / "b", [replace(d, source=d.id) for d in documents], replace(GATE, penalty=5.0))
        assert found.report["strengths"] == apart.report["strengths"]


class TestDisk:
    def test_a_full_disk_is_told_and_leaves_all_as_it_was(self, tmp_path):
        """A limit on the size of files, as ``ulimit -f`` sets it, in a process of its own."""
        shelf = Shelf(tmp_path, "default")
        shelf.write(drawn(topical(), BagOfWords()))
        before = {p.name: p.read_bytes() for p in shelf.place.iterdir()}
        child = """
import resource, sys
from pathlib import Path
from casemate.errors import BackendError
from casemate.reindexing.shelf import Shelf
from tests.fakes import BagOfWords
from tests.topical import drawn, topical
learnt = drawn(topical(), BagOfWords(), seed=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    Shelf(Path(sys.argv[1]), "default").write(learnt)
except BackendError as error:
    print(error)
"""
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", child, tmp_path], capture_output=True, text=True, check=True, env=environment
        )
        assert "002.npz cannot be written (File too large); make room" in done.stdout
        assert {p.name: p.read_bytes() for p in shelf.place.iterdir()} == before
        assert shelf.write(drawn(topical(), BagOfWords())).version == 2

    def test_a_folder_that_cannot_be_written_is_told(self, tmp_path):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(BackendError, match="cannot be written"):
            Shelf(tmp_path / "file", "default").write(drawn(topical(), BagOfWords()))
        with pytest.raises(BackendError, match="cannot be written"):
            put(tmp_path / "file" / "x", b"")


class TestProcesses:
    def test_only_one_learns_for_a_tenant_at_a_time(self, tmp_path):
        with (
            Shelf(tmp_path, "default").learning(),
            Shelf(tmp_path, "other").learning(),
            pytest.raises(DataError, match="another process is re-indexing tenant 'default'"),
            Shelf(tmp_path, "default").learning(),
        ):
            pass
        with Shelf(tmp_path, "default").learning() as checkpoint:
            checkpoint.write_bytes(b"x")
        assert not checkpoint.exists()  # done: nothing to go on from

    def test_who_is_interrupted_leaves_the_checkpoint(self, tmp_path):
        with pytest.raises(KeyboardInterrupt), Shelf(tmp_path, "default").learning() as checkpoint:
            checkpoint.write_bytes(b"x")
            raise KeyboardInterrupt
        assert checkpoint.exists()
        with Shelf(tmp_path, "default").learning():
            assert checkpoint.exists()

    def test_versions_that_are_written_at_once_are_all_kept(self, tmp_path):
        made = [drawn(topical(), BagOfWords(), "gate", why=str(i)) for i in range(8)]
        threads = [threading.Thread(target=Shelf(tmp_path, "default").write, args=(r,)) for r in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        shelf = Shelf(tmp_path, "default")
        assert shelf.versions() == [*range(1, 9)]
        assert {shelf.read(v).why for v in shelf.versions()} == {str(i) for i in range(8)}
        assert shelf.current().version in shelf.versions()

    def test_killed_in_training_it_goes_on_where_it_was(self, tmp_path):
        pytest.importorskip("torch", reason="needs casemate[torch]")
        settings = Settings(questions=60, training=TrainSettings(steps=90, look=40, keep=10))
        (tmp_path / "whole").mkdir()
        whole = learnt(tmp_path / "whole", topical(), settings)
        child = """
import sys, time
from dataclasses import replace
from pathlib import Path
from casemate.lab.reindex import Settings, fit
from casemate.reindexing.shelf import Shelf
from casemate.reindexing.supcon import TrainSettings
from tests.topical import indexed, topical
index, embedder = indexed(Path(sys.argv[1]), topical())
def tell(what, done, of):
    if (what, done) == ("training", 50):
        print("killed now", flush=True)
        time.sleep(600)
with Shelf(Path(sys.argv[1]) / "r", "default").learning() as checkpoint:
    training = TrainSettings(steps=90, look=40, keep=10)
    fit(index, embedder, Settings(questions=60, training=training, checkpoint=checkpoint), tell)
"""
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen([sys.executable, "-c", child, tmp_path], stdout=subprocess.PIPE, env=environment) as p:
            assert p.stdout.readline() == b"killed now\n"
            p.send_signal(signal.SIGKILL)
            assert p.wait(timeout=60) == -signal.SIGKILL
        index, embedder = indexed(tmp_path, [])
        told = []
        with Shelf(tmp_path / "r", "default").learning() as checkpoint:
            assert checkpoint.exists()
            again = fit(index, embedder, replace(settings, checkpoint=checkpoint), lambda *news: told.append(news))
        index.close()
        assert [done for what, done, _ in told if what == "training"][:2] == [40, 41]
        np.testing.assert_allclose(again.report["losses"], whole.report["losses"], rtol=1e-5)
        for name, weight in whole.weights.items():
            np.testing.assert_allclose(again.weights[name], weight, atol=1e-5)
