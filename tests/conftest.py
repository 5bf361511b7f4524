"""What tests of several kinds share."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The maintenance database of a real Postgres server; a test makes a database of its own in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without XDG_RUNTIME_DIR, its import warns
        import pgserver
    folder = tempfile.mkdtemp(prefix="casemate-pg-")  # short enough for a socket, and open to the server's own user
    try:
        server = pgserver.get_server(folder, cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
