"""The schema of the event store, one step a file. No alembic.ini: a store that opens calls ``upgrade``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Engine

LOCKS = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(7307203)"}
"""What keeps other processes from upgrading the same database at once, until the transaction ends."""
_one_thread = threading.Lock()  # alembic's context belongs to the process


def upgrade(engine: Engine) -> None:
    """Brings a database, empty or old, to the newest schema: in one transaction, one process at a time."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    with _one_thread, engine.begin() as connection:
        connection.exec_driver_sql(LOCKS[engine.dialect.name])
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
