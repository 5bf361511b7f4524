"""Schema migrations of the event store, one file each. A store runs ``upgrade`` when it opens; no alembic.ini."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Engine

LOCKS = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(7307203)"}
"""Statements that lock out other migrating processes until the transaction ends."""
_one_thread = threading.Lock()  # alembic has one context per process


def upgrade(engine: Engine) -> None:
    """Migrates a database to the newest schema, in one transaction and one process at a time."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    with _one_thread, engine.begin() as connection:
        connection.exec_driver_sql(LOCKS[engine.dialect.name])
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
