"""Fixtures and test tiers shared by all tests.

Two tiers: ``make test`` runs every test that is not marked ``slow``; ``make test-all`` runs everything. A test is slow
if it is marked so, is in ``tests/e2e``, or uses a fixture in ``SLOW_FIXTURES`` or a server in ``SLOW_SERVERS``. The
marker ``smoke`` keeps it in the first tier.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.postgres import database, postgres_server

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read at import
# One thread in each test process: the matrix products of tests are small, and threads of two processes wait for each
# other.
os.environ["OMP_NUM_THREADS"] = "1"
MEMORY, NEEDED_BYTES = "/dev/shm", 4 << 30
if "TMPDIR" not in os.environ and os.path.isdir(MEMORY):
    # Files in memory survive a kill of the process too, and databases do not wait for the disk at each commit.
    room = os.statvfs(MEMORY)
    if room.f_bavail * room.f_frsize >= NEEDED_BYTES and not room.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The maintenance database of a real Postgres server. A test creates its own database in it."""
    with postgres_server() as running:
        yield running.get_uri()


@pytest.fixture(scope="session")
def vector_url(postgres_url: str) -> Iterator[str]:
    """A database with pgvector. Each test has its own tables or schema in it."""
    with database(postgres_url, "CREATE EXTENSION vector") as url:
        yield url


@pytest.fixture(scope="module")
def milvus_url() -> Iterator[str]:
    """A real Milvus server. Once per test file, because an idle server uses a quarter of a core."""
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus", reason="the server is the package milvus")
    from tests.milvus_server import milvus_server

    with milvus_server() as server:
        yield f"http://127.0.0.1:{server.listen_port}"


SLOW_FIXTURES = {"milvus_url", "nfcorpus_index"}
"""Fixtures that take more than ten seconds."""
SLOW_SERVERS = ("milvus",)
"""Servers that take more than ten seconds to start. The parameters of a test begin with such a name."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without garbage collection, and exempts their modules from it. This saves 0.8 s per process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assigns each test to its tier and runs the first tier first."""
    for item in items:
        heavy = "e2e" in item.path.parts or SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        heavy = heavy or item.name.partition("[")[2].startswith(SLOW_SERVERS)
        if heavy and item.get_closest_marker("smoke") is None:
            item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of the real data; without it, the test is skipped with a reason."""
    folder = Path(os.environ.get("CASEMATE_DATA", Path(__file__).parents[2] / "shared/data"))
    if not folder.is_dir():
        pytest.skip(f"the evaluation data is not at {folder}; set CASEMATE_DATA")
    return folder


@pytest.fixture(scope="session")
def nfcorpus_index(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of NFCorpus (3,633 documents), indexed once with the command line."""
    place = tmp_path_factory.mktemp("nfcorpus")
    command = [sys.executable, "-m", "casemate", "index", str(data / "nfcorpus"), "--json", "--no-calibrate"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["indexed"] == 3633
    return place
