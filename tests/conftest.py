"""Fixtures and test tiers shared by all tests.

Two tiers: ``make test`` runs every test that is not marked ``slow``; ``make test-all`` runs everything. A test is
slow if it is marked so, lies in ``tests/e2e``, or uses a fixture in ``SLOW_FIXTURES`` or a server in ``SLOW_SERVERS``.
The marker ``smoke`` keeps it in the first tier.
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

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read when it is imported
# One thread in each test process: the products of tests are small, and threads of two processes wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
MEMORY, NEEDED_BYTES = "/dev/shm", 4 << 30
if "TMPDIR" not in os.environ and os.path.isdir(MEMORY):
    # Databases of tests wait for a disk at each commit, which no test is about: files in memory survive a kill as well.
    room = os.statvfs(MEMORY)
    if room.f_bavail * room.f_frsize >= NEEDED_BYTES and not room.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The maintenance database of a real Postgres server; a test makes a database of its own in it."""
    with postgres_server() as running:
        yield running.get_uri()


@pytest.fixture(scope="session")
def vector_url(postgres_url: str) -> Iterator[str]:
    """A database with pgvector. Each test has tables or a schema of its own in it."""
    with database(postgres_url, "CREATE EXTENSION vector") as url:
        yield url


@pytest.fixture(scope="module")
def milvus_url() -> Iterator[str]:
    """A real Milvus server. Once for a file of tests, as it takes a quarter of a core even when nobody asks it."""
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus", reason="the server is the package milvus")
    from tests.milvus_server import milvus_server

    with milvus_server() as server:
        yield f"http://127.0.0.1:{server.listen_port}"


SLOW_FIXTURES = {"milvus_url", "nfcorpus_index"}
"""Fixtures that take more than ten seconds."""
SLOW_SERVERS = ("milvus",)
"""Servers that take more than ten seconds to start, by the beginning of the parameters of a test."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without garbage collection, and exempts their modules from it: it would take 0.8 s each time."""
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
    """The real data, or a skip that says what is missing."""
    folder = Path(os.environ.get("CASEMATE_DATA", Path(__file__).parents[2] / "shared/data"))
    if not folder.is_dir():
        pytest.skip(f"the evaluation data is not at {folder}; set CASEMATE_DATA")
    return folder


@pytest.fixture(scope="session")
def nfcorpus_index(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of NFCorpus, indexed once by the command line: 3,633 documents."""
    place = tmp_path_factory.mktemp("nfcorpus")
    command = [sys.executable, "-m", "casemate", "index", str(data / "nfcorpus"), "--json", "--no-calibrate"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["indexed"] == 3633
    return place
